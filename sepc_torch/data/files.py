"""Saving and loading of partitions, models, heads and label pools: atomic safetensors files with JSON metadata.

The files contain no pickle.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from sepc_torch.data.old_formats import current_arrays
from sepc_torch.shapes import Array

# Increased whenever the meaning of a file changes. Older versions then refuse the file instead of misreading it.
FORMAT = 4
# The key of our JSON text in the metadata of a safetensors file.
_KEY = "sepc_torch"
# The method that reads each kind of file, for error messages.
_READERS = {
    "partition": "Partition.load",
    "sepc": "SEPC.load",
    "trust_head": "TrustHead.load",
    "label_pool": "LabelPool.restore",
}


def write(path: str | os.PathLike[str], kind: str, arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> None:
    """Write arrays and metadata atomically: a reader sees the old file or the new file, never a part.

    Equal contents give equal bytes. The metadata are a single JSON string, because safetensors writes several metadata
    entries in random order.
    """
    from safetensors.numpy import save

    text = json.dumps({"kind": kind, "format": FORMAT, **metadata}, sort_keys=True, allow_nan=False)
    payload = save({name: np.asarray(array, order="C") for name, array in arrays.items()}, metadata={_KEY: text})
    with replacing(Path(path)) as temporary:
        temporary.write_bytes(payload)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context manager that yields a temporary file, then moves it to ``path``; an error deletes it instead.

    The temporary file lies in the folder of ``path``, so that the move is atomic.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"There is no folder {str(path.parent)!r} to write {path.name!r} into. Create it first."
        )
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    temporary = Path(name)
    try:
        yield temporary
        os.fsync(handle)
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # mkstemp makes the file private
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


def read(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Array], dict[str, Any]]:
    """Read the arrays and metadata of a file of the given kind; arrays of older formats are converted.

    Raises FileNotFoundError, or ValueError if the file is damaged, not ours, of a newer format or of another kind.
    """
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
    return current_arrays(arrays), metadata
