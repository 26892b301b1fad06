"""Arrays of NPY and NPZ files, read a few rows at a time, without pickle."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from sepc_torch.shapes import Array


class ArrayStream:
    """An array in a file, read from its first row on.

    Args:
        name: Name of the array, for error messages.
        file: The binary file, at the beginning of the array.

    >>> import io
    >>> file = io.BytesIO()
    >>> np.save(file, np.arange(6).reshape(3, 2))
    >>> _ = file.seek(0)
    >>> ArrayStream("X", file).rows(2)
    array([[0, 1],
           [2, 3]])
    """

    def __init__(self, name: str, file: Any) -> None:
        self._name, self._file = name, file
        try:
            version = npy_format.read_magic(file)
        except ValueError:
            raise ValueError(f"{name} is not an array") from None
        read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        self.shape, self._fortran, self._dtype = read(file)
        if self._dtype.hasobject:
            # Python objects would have to be unpickled, which can run code.
            raise ValueError(f"{name} is an array of Python objects; save it as numbers or text")
        self._left = self.shape[0] if self.shape else 1
        self._by_columns: Array | None = None

    def rows(self, number: int) -> Array:
        """Read the next rows, ``number`` or as many as are left. An array that is stored by columns is read whole."""
        number = min(number, self._left)
        start = (self.shape[0] if self.shape else 1) - self._left
        self._left -= number
        if not self._fortran or len(self.shape) < 2:
            return self._read(number).reshape(number, *self.shape[1:])
        if self._by_columns is None:
            self._by_columns = self._read(self.shape[0]).reshape(self.shape, order="F")
        return self._by_columns[start : start + number]

    def _read(self, number: int) -> Array:
        size = number * int(np.prod(self.shape[1:], dtype=np.int64)) * self._dtype.itemsize
        data = self._file.read(size)
        if len(data) != size:
            raise ValueError(f"the file ends within {self._name}")
        return np.frombuffer(data, dtype=self._dtype)


@contextmanager
def npy_stream(path: Path, name: str) -> Iterator[dict[str, ArrayStream]]:
    """The array of an NPY file under a name."""
    with path.open("rb") as file:
        yield {name: ArrayStream(name, file)}


@contextmanager
def npz_streams(path: Path) -> Iterator[dict[str, ArrayStream]]:
    """The arrays of an NPZ file by their names; each can be read independently of the others."""
    with ExitStack() as stack:
        archive = stack.enter_context(zipfile.ZipFile(path))
        yield {
            name.removesuffix(".npy"): ArrayStream(name.removesuffix(".npy"), stack.enter_context(archive.open(name)))
            for name in archive.namelist()
        }
