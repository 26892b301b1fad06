"""Records on disk: a safetensors file with JSON metadata, written whole or not at all. No pickle."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from sepc_torch.shapes import Array

# Raised when the meaning of a file changes; older readers then refuse it instead of misreading it.
FORMAT = 2
# Arrays that format 1 knew by another name.
_RENAMED = {"reach": "sorted_distances", "ranks": "counts_at"}
_KEY = "sepc_torch"
_READERS = {
    "partition": "Partition.load",
    "sepc": "SEPC.load",
    "trust_head": "TrustHead.load",
    "label_pool": "LabelPool.restore",
}


def write(path: str | os.PathLike[str], kind: str, arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> None:
    """Write arrays and metadata so that a reader sees the old file or the new one, never half of it.

    Equal contents give equal bytes: the metadata are one string, since safetensors keeps the order of several at
    random.
    """
    from safetensors.numpy import save

    text = json.dumps({"kind": kind, "format": FORMAT, **metadata}, sort_keys=True, allow_nan=False)
    payload = save({name: np.asarray(array, order="C") for name, array in arrays.items()}, metadata={_KEY: text})
    with replacing(Path(path)) as temporary:
        temporary.write_bytes(payload)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file in the same folder that takes the place of ``path`` once it is complete, or vanishes."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {str(path.parent)!r} to write {path.name!r} into.")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    temporary = Path(name)
    try:
        yield temporary
        os.fsync(handle)
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # mkstemp makes it private
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


def read(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays and metadata of a file of the given kind, or a clear error."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {os.fspath(path)!r}.")
    try:
        with safe_open(os.fspath(path), framework="numpy") as file:
            header = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{os.fspath(path)!r} is not a complete safetensors file ({error}).") from error
    if _KEY not in header:
        raise ValueError(f"{os.fspath(path)!r} is a safetensors file, but sepc_torch did not write it.")
    try:
        metadata: dict[str, Any] = json.loads(header[_KEY])
    except json.JSONDecodeError as error:
        raise ValueError(f"{os.fspath(path)!r} is damaged: its metadata are not JSON ({error}).") from error
    if metadata.get("format", 0) > FORMAT:
        raise ValueError(
            f"{os.fspath(path)!r} was written in format {metadata['format']} by a newer sepc_torch; "
            f"this version reads up to format {FORMAT}. Upgrade sepc_torch."
        )
    if metadata.get("kind") != kind:
        found = str(metadata.get("kind"))
        raise ValueError(
            f"{os.fspath(path)!r} holds a {found}, not a {kind}; read it with {_READERS.get(found, 'its own reader')}."
        )
    return {current_name(name): array for name, array in arrays.items()}, metadata


def current_name(name: str) -> str:
    """The name of an array today, for a name in a file or a state dict of an earlier version.

    >>> current_name("sepc.reach"), current_name("sepc.cells")
    ('sepc.sorted_distances', 'sepc.cells')
    """
    owner, dot, last = name.rpartition(".")
    return f"{owner}{dot}{_RENAMED.get(last, last)}"
