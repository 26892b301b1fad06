"""Saving and loading of partitions, models, heads, label pools, monitors and guards.

The files are safetensors files with JSON metadata, written atomically. They contain no pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from sepc_torch.data import schemas
from sepc_torch.shapes import Array

# Increased whenever the meaning of a file changes. Other versions then refuse the file instead of misreading it.
FORMAT = 7
# The key of our JSON text in the metadata of a safetensors file.
_KEY = "sepc_torch"
# A temporary file that has not changed for an hour has no running writer: a write takes seconds to minutes.
_LEFTOVER_SECONDS = 3600.0
# The method that reads each kind of file, for error messages.
_READERS = {
    "partition": "Partition.load",
    "sepc": "SEPC.load",
    "trust_head": "TrustHead.load",
    "label_pool": "LabelPool.restore",
    "drift_monitor": "DriftMonitor.load",
    "risk_monitor": "RiskMonitor.load",
    "guard": "Guard.load",
}


class FileFormatError(ValueError):
    """A file cannot be read: it is damaged, was not written by this package, or is of another kind or format.

    Args:
        path: The file.
        problem: What is wrong, as a clause.
        remedy: What to do, as a sentence.
    """

    def __init__(
        self, path: str | os.PathLike[str], problem: str, remedy: str = "Restore it from a copy, or make it again."
    ) -> None:
        self.path, self.problem, self.remedy = os.fspath(path), problem, remedy
        super().__init__(f"{self.path!r} cannot be read: {problem}. {remedy}")

    def __reduce__(self) -> tuple[type[FileFormatError], tuple[str, str, str]]:
        return type(self), (self.path, self.problem, self.remedy)


def write(path: str | os.PathLike[str], kind: str, arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> None:
    """Write arrays and metadata atomically: a reader sees the old file or the new file, never a part.

    Equal contents give equal bytes. The metadata are a single JSON string, because safetensors writes several metadata
    entries in random order.
    """
    from safetensors.numpy import save

    contents = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    described = {"kind": kind, "format": FORMAT, **metadata}
    # The checksum is of the metadata as they are read: JSON has no tuples, and only strings as keys.
    described = json.loads(json.dumps(described, allow_nan=False))
    try:
        schemas.check(kind, contents, described)  # a file that cannot be read must not replace a good one
    except ValueError as error:
        raise ValueError(f"Cannot write {os.fspath(path)!r}, because it could not be read: {error}.") from error
    described["checksum"] = _checksum(contents, described)
    payload = save(contents, metadata={_KEY: json.dumps(described, sort_keys=True)})
    with replacing(Path(path)) as temporary:
        temporary.write_bytes(payload)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context manager that yields a temporary file, then moves it to ``path``; an error deletes it instead.

    The temporary file lies in the folder of ``path``, so that the move is atomic. A symbolic link stays, and the file
    that it points to is replaced. A killed process leaves its temporary file behind; a later write to the same ``path``
    deletes it.
    """
    check_target(path)
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    # "x" creates a new file with the usual permissions, without reading the umask, which would set it for a moment.
    try:
        with temporary.open("xb") as file:
            _delete_leftovers(path, os.fstat(file.fileno()).st_mtime)
            yield temporary
            os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # moved already, if nothing went wrong


def check_target(path: Path) -> None:
    """Raise an error if ``path`` cannot be the name of a new or replaced file; a device would be replaced, not written.

    >>> check_target(Path("."))
    Traceback (most recent call last):
    ...
    IsADirectoryError: Cannot write '.': it is a folder. Choose the name of a file.
    """
    if path.is_dir():
        raise IsADirectoryError(f"Cannot write {str(path)!r}: it is a folder. Choose the name of a file.")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"Cannot write {str(path)!r}: there is no folder {str(path.parent)!r}. Create the folder first."
        )
    if path.exists() and not path.is_file():
        raise FileExistsError(f"Cannot write {str(path)!r}: it is a device, pipe or socket. Choose the name of a file.")


def _delete_leftovers(path: Path, now: float) -> None:
    """Delete temporary files of earlier writes to ``path`` that have not changed for :data:`_LEFTOVER_SECONDS`.

    ``now`` is the time of a new file in the same folder: the clock of a file server may differ from this machine's.
    """
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[a-z0-9_]{{8}}\.partial")
    # Another process may delete the same files, and another user may own them.
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if pattern.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(OSError):
                    if now - entry.stat(follow_symlinks=False).st_mtime > _LEFTOVER_SECONDS:
                        Path(entry.path).unlink()


def read(path: str | os.PathLike[str], kind: str, *, damaged: bool = False) -> tuple[dict[str, Array], dict[str, Any]]:
    """Read the arrays and metadata of a file of the given kind.

    Raises FileNotFoundError, or FileFormatError if the file is damaged, not ours, of another format or of another kind.
    All values are checked before anything is computed from them.

    Args:
        path: The file.
        kind: The kind of file.
        damaged: Return the arrays even if the checksum differs.
    """
    arrays, metadata = _open(path)
    if not isinstance(metadata.get("format"), int):
        raise FileFormatError(path, "its metadata do not name a format")
    if metadata["format"] != FORMAT:
        raise FileFormatError(
            path,
            f"it is of format {metadata['format']}, and this version of sepc_torch reads format {FORMAT} only",
            "Make it again with this version, or read it with the version that wrote it.",
        )
    if metadata.pop("checksum", None) != _checksum(arrays, metadata) and not damaged:
        raise FileFormatError(path, "its contents do not match its checksum")
    if metadata.get("kind") != kind:
        found = str(metadata.get("kind"))
        reader = _READERS.get(found, "its own reader")
        raise FileFormatError(path, f"it holds a {found}, not a {kind}", f"Read it with {reader}.")
    with interpreting(path):
        schemas.check(kind, arrays, metadata)
    return arrays, metadata


def kind_of(path: str | os.PathLike[str]) -> str:
    """The kind of a file of this package, such as ``"sepc"`` or ``"trust_head"``; its contents are not checked."""
    return str(_open(path)[1].get("kind"))


@contextmanager
def interpreting(path: str | os.PathLike[str]) -> Iterator[None]:
    """Context manager for code that interprets the contents of a file: its errors become FileFormatError."""
    try:
        yield
    except FileFormatError:
        raise
    except MemoryError as error:
        remedy = "Read it on a machine with more memory, if you trust its source."
        raise FileFormatError(path, f"it needs more memory than is available ({error})", remedy) from error
    except (ArithmeticError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        problem = f"its metadata lack {error}" if isinstance(error, KeyError) else str(error)
        raise FileFormatError(path, problem) from error


def _open(path: str | os.PathLike[str]) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays and metadata of a safetensors file that this package wrote."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {os.fspath(path)!r}.")
    try:
        with safe_open(os.fspath(path), framework="numpy") as file:
            header = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    # safetensors raises errors of NumPy for dtypes that NumPy lacks.
    except (SafetensorError, OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise FileFormatError(path, f"it is not a complete safetensors file ({error})") from error
    if _KEY not in header:
        raise FileFormatError(path, "it is a safetensors file, but sepc_torch did not write it")
    try:
        metadata = json.loads(header[_KEY])
    except (ValueError, RecursionError) as error:
        raise FileFormatError(path, f"its metadata are not JSON ({error})") from error
    if not isinstance(metadata, dict):
        raise FileFormatError(path, "its metadata are not a dictionary")
    return arrays, metadata


def _checksum(arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> str:
    """SHA-256 of the metadata and of the names, dtypes, shapes and bytes of all arrays."""
    found = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        found.update(f"{name} {array.dtype.str} {arrays[name].shape}".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()
