"""Files of label pools: people's work, so a damaged file still gives the labels that are known to be undamaged."""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data import files
from sepc_torch.shapes import Array, Int

# The values of a sample without a label, by the name of their array.
_EMPTY = {"round": -1, "answered": False, "answers": 0, "ignored": False}
# Samples that share a checksum.
_BLOCK = 256


def write_state(path: str | os.PathLike[str], state: Mapping[str, Tensor]) -> None:
    """Write the state of a pool to a safetensors file, atomically, with a checksum for every block of samples."""
    arrays = {name: value.numpy() for name, value in state.items()}
    files.write(path, "label_pool", {**arrays, "block_checksums": _block_checksums(arrays)}, {})


def read_state(path: str | os.PathLike[str], *, skip_damaged: bool = False) -> dict[str, Tensor]:
    """Read the state of a pool.

    Args:
        path: A file of :func:`write_state`.
        skip_damaged: Whether a damaged file gives the labels of its undamaged blocks, with a warning, instead of
            FileFormatError.
    """
    try:
        arrays, _ = files.read(path, "label_pool")
    except files.FileFormatError as error:
        arrays, lost = _undamaged(path, error)
        kept = int((arrays["round"] >= 0).sum())
        found = f"{kept} labels lie in undamaged blocks; {lost} of {len(arrays['round'])} samples do not"
        if not skip_damaged:
            remedy = f"{found}. Restore a copy, or keep these labels with restore(path, damaged='skip')."
            raise files.FileFormatError(path, error.problem, remedy) from error
        warnings.warn(f"{os.fspath(path)!r} is damaged: {error.problem}. {found} and lose theirs.", stacklevel=3)
    return {name: torch.from_numpy(arrays[name]) for name in (*_EMPTY, "rounds")}


def _block_checksums(arrays: Mapping[str, Array]) -> Int[Array, "B"]:
    """CRC-32 of the values of every block of samples."""
    rows = [arrays[name] for name in _EMPTY]
    starts = range(0, len(arrays["round"]), _BLOCK)
    found = [zlib.crc32(b"".join(row[start : start + _BLOCK].tobytes() for row in rows)) for start in starts]
    return np.array(found, dtype=np.int64)


def _undamaged(path: str | os.PathLike[str], error: files.FileFormatError) -> tuple[dict[str, Array], int]:
    """The arrays of a damaged file without its damaged blocks, and the number of samples in these blocks."""
    try:
        arrays, _ = files.read(path, "label_pool", damaged=True)
    except files.FileFormatError:
        raise error from None  # not even the sizes can be read
    stored, found = arrays.get("block_checksums"), _block_checksums(arrays)
    if stored is None or stored.shape != found.shape:
        raise error
    intact = np.repeat(stored == found, _BLOCK)[: len(arrays["round"])]
    kept = {name: np.where(intact, arrays[name], value).astype(arrays[name].dtype) for name, value in _EMPTY.items()}
    kept["rounds"] = np.array(int(kept["round"].max(initial=-1)) + 1)
    return kept, int((~intact).sum())
