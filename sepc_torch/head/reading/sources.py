"""Sources of labelled embeddings that are read in chunks: arrays, batches with an encoder, Arrow and Parquet tables.

:func:`embedding_source` finds the source for what a user passes.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch.data.arrays import float_rows, real_matrix, refuse_columns, refuse_duplicates, rows_per_chunk
from sepc_torch.data.labels import check_one_label_per_row, label_array
from sepc_torch.data.text import printable
from sepc_torch.head.reading.layers import LayerMoments, check_layers, read_layers
from sepc_torch.shapes import Array, Float

# Number of features that the number of rows of a record batch is chosen for; the length of lists is known only later.
_ARROW_FEATURES = 512


class EmbeddingSource(ABC):
    """Labelled embeddings that can be read several times, a chunk of rows at a time.

    Values are not checked: :func:`sepc_torch.head.reading.passes.read` checks every chunk.
    """

    names: tuple[str, ...] | None = None
    """Names of the features, or None."""
    ids: Array | None = None
    """Identifiers (N,) of the rows, integers or strings; None for their positions."""
    layers: LayerMoments | None = None
    """Moments of earlier layers of the network, once all rows were read; None without layers."""

    @abstractmethod
    def chunks(self) -> Iterator[tuple[Float[Array, "n D"], Any]]:
        """Read all rows: embeddings in float32 or float64, and their labels. Chunks may have any number of rows."""

    def row_count(self) -> int | None:
        """Number of rows, or None if only reading them tells."""
        return None


class ArraySource(EmbeddingSource):
    """Embeddings in an array, a tensor or a DataFrame. Chunks are views where possible; nothing is copied as a whole.

    >>> [labels.tolist() for _, labels in ArraySource([[0.0], [1.0], [2.0]], ["a", "b", "a"]).chunks()]
    [['a', 'b', 'a']]
    """

    def __init__(
        self, embeddings: Any, labels: Any, ids: Any = None, layers: Any = None, device: torch.device | None = None
    ) -> None:
        if isinstance(ids, str):
            if ids not in getattr(embeddings, "columns", ()):
                raise ValueError(f"ids={ids!r} names no column of the embeddings; pass the identifiers themselves.")
            ids, embeddings = embeddings[ids], embeddings.drop(columns=[ids])
        self._embeddings, self.names = real_matrix(embeddings, "embeddings")
        self._labels = label_array(labels, "labels")
        check_one_label_per_row(self._embeddings.shape[0], len(self._labels))
        self.ids = None if ids is None else row_ids(ids, len(self._labels))
        self.layers = None if layers is None else read_layers(layers, self._labels, device)

    def row_count(self) -> int:
        """Number of rows of the array."""
        return len(self._labels)

    def chunks(self) -> Iterator[tuple[Float[Array, "n D"], Any]]:
        """Read rows of the array."""
        rows, features = self._embeddings.shape
        step = rows_per_chunk(features)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield float_rows(self._embeddings, start, stop), self._labels[start:stop]


class BatchSource(EmbeddingSource):
    """Batches ``(inputs, labels)`` whose embeddings an encoder computes in every pass.

    An iterator, such as a generator, can be read only once. Its embeddings are computed once and kept in memory, in
    float32. An encoder can return a pair: the embeddings, and a dictionary of the activations of earlier layers.

    >>> source = BatchSource([(torch.ones(2, 3), torch.tensor([0, 1]))], lambda x: 2 * x)
    >>> [(z.tolist(), labels.tolist()) for z, labels in source.chunks()]
    [([[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]], [0, 1])]
    """

    def __init__(
        self, batches: Iterable[Any], encoder: Callable[[Any], Any], device: torch.device | None = None
    ) -> None:
        self._batches, self._encoder, self._device = batches, encoder, device
        self._kept: list[tuple[Array, Any]] | None = None
        self._complete = False
        if isinstance(batches, Iterator):
            self._kept = list(self._encoded())

    def chunks(self) -> Iterator[tuple[Float[Array, "n D"], Any]]:
        """Encode the batches, or read the kept embeddings."""
        return self._encoded() if self._kept is None else iter(self._kept)

    def _encoded(self) -> Iterator[tuple[Array, Any]]:
        for batch in self._batches:
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
                raise TypeError(
                    f"Every batch must be a pair (inputs, labels), got a {type(batch).__name__}{size}. Wrap it: "
                    "TrustHead.fit(((b['x'], b['y']) for b in loader), encoder=...)."
                )
            z, layers = _encode(self._encoder, batch[0])
            if not self._complete and (layers is not None or self.layers is not None):
                self.layers = self.layers or LayerMoments(self._device)
                self.layers.add(layers or {}, label_array(batch[1], "labels").tolist())
            yield z, batch[1]
        self._complete = True


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and restore the mode of each of its submodules on exit.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    >>> with evaluation_mode(net):
    ...     [part.training for part in net]
    [False, False]
    >>> [part.training for part in net]
    [True, False]
    """
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for part, training in modes:
            part.training = training


@torch.no_grad()
def _encode(encoder: Callable[[Any], Any], inputs: Any) -> tuple[Float[Array, "n D"], Mapping[str, Any] | None]:
    """Run the encoder on a batch, in evaluation mode on its own device, and restore its training mode.

    Returns:
        The embeddings, and the activations of earlier layers if the encoder returns such a pair.
    """
    module = encoder if isinstance(encoder, nn.Module) else None
    device = next((p.device for p in module.parameters()), None) if module is not None else None
    with nullcontext() if module is None else evaluation_mode(module):
        z = encoder(inputs.to(device) if device is not None and isinstance(inputs, Tensor) else inputs)
    layers = None
    if isinstance(z, tuple) and len(z) == 2 and isinstance(z[1], Mapping):
        z, layers = z[0], check_layers(z[1])
    if not isinstance(z, Tensor):
        raise TypeError(
            f"The encoder must return a tensor of embeddings, got a {type(z).__name__}; wrap the encoder and "
            "return only the embeddings, or (embeddings, layers) with a dictionary of earlier layers."
        )
    if z.dim() != 2:
        raise ValueError(
            f"The encoder must return embeddings of shape (B, D), got {tuple(z.shape)}. Average a map (B, C, H, W) "
            "over its positions, encoder=lambda x: net(x).mean(dim=(2, 3)), and a sequence (B, N, D) over dim=1; do "
            "the same before head.calibrate and head.judge."
        )
    return z.float().cpu().numpy(), layers


class ArrowSource(EmbeddingSource):
    """Embeddings in a ``pyarrow.Table`` or ``pyarrow.dataset.Dataset``.

    One column holds the labels. The embeddings are all other columns, which must be numbers, or the only other column,
    which must hold lists of numbers of equal length.

    Args:
        table: The table or dataset.
        labels: Name of the label column.
        ids: Name of the column of identifiers, or None.

    >>> import pyarrow
    >>> table = pyarrow.table({"a": [1.0, 2.0], "b": [3, 4], "kind": ["x", "y"]})
    >>> [(z.tolist(), labels) for z, labels in ArrowSource(table, "kind").chunks()]
    [([[1.0, 3.0], [2.0, 4.0]], ['x', 'y'])]
    """

    def __init__(self, table: Any, labels: Any, ids: Any = None) -> None:
        _import_pyarrow()
        import pyarrow.dataset

        if not isinstance(table, (pyarrow.Table, pyarrow.dataset.Dataset)):
            raise TypeError(
                f"embeddings must be a pyarrow.Table or a pyarrow.dataset.Dataset, got {type(table).__name__}; make a "
                "table of it, for example with pyarrow.Table.from_batches."
            )
        columns = table.schema.names
        refuse_duplicates(columns, "The table")
        if not isinstance(labels, str) or labels not in columns:
            listed = ", ".join(map(printable, columns))
            raise ValueError(
                f"labels must name the label column of the table, got {labels!r}; its columns are {listed}."
            )
        self._labels = labels
        self._data = pyarrow.dataset.dataset(table) if isinstance(table, pyarrow.Table) else table
        if ids is not None:
            if not isinstance(ids, str) or ids not in columns or ids == labels:
                raise ValueError("ids must name a column of the table other than the labels.")
            column = self._data.to_table(columns=[ids]).column(ids)
            self.ids = row_ids(column.to_pylist(), self.row_count())
        others = [field for field in table.schema if field.name not in (labels, ids)]
        lists = [field.name for field in others if _is_list(field.type)]
        if lists and len(others) > 1:
            also = ", ".join(printable(field.name) for field in others if field.name != lists[0])
            raise ValueError(
                f"The list column {lists[0]!r} must be the only column besides the labels, got also {also}. Select "
                f"the two columns first, for example table.select([{lists[0]!r}, {labels!r}])."
            )
        values = [field.type.value_type if lists else field.type for field in others]
        wrong = [f.name for f, kind in zip(others, values, strict=True) if not _is_number(kind)]
        refuse_columns(wrong, "embeddings")
        if not others:
            raise ValueError(f"The table has no column besides the labels {labels!r}; add the embeddings.")
        self._columns = [field.name for field in others]
        self._list = bool(lists)
        self.names = None if lists else tuple(self._columns)
        # float32 holds half precision exactly and takes half the memory of float64.
        self._type = pyarrow.float32() if all(map(_fits_float32, values)) else pyarrow.float64()

    def row_count(self) -> int:
        """Number of rows of the table, from the metadata of its files."""
        return int(self._data.count_rows())

    def chunks(self) -> Iterator[tuple[Float[Array, "n D"], Any]]:
        """Read record batches."""
        # Arrow reads 16 batches ahead by default, which would be most of the memory of a fit.
        batches = self._data.to_batches(
            columns=[*self._columns, self._labels],
            batch_size=rows_per_chunk(max(len(self._columns), _ARROW_FEATURES)),
            batch_readahead=1,
            fragment_readahead=1,
        )
        rows = 0
        for batch in batches:
            if batch.num_rows:
                columns = [batch.column(name) for name in self._columns]
                yield self._matrix(columns, rows), batch.column(self._labels).to_pylist()
                rows += batch.num_rows
        if not rows:
            raise ValueError(
                "The table has no rows: there is nothing to fit. Check the file, or the filter of the rows."
            )

    def _matrix(self, columns: list[Any], before: int) -> Float[Array, "n D"]:
        """The embeddings of a record batch; missing values become NaN. ``before`` is the number of earlier rows."""
        if not self._list:
            return np.stack([self._floats(column) for column in columns], axis=1)
        import pyarrow.compute

        lengths = pyarrow.compute.list_value_length(columns[0]).to_numpy(zero_copy_only=False)
        wrong = np.flatnonzero(lengths != lengths[0])
        if np.isnan(lengths[0]) or len(wrong):
            row = 0 if np.isnan(lengths[0]) else int(wrong[0])
            no_list = np.isnan(lengths[row])
            found = "no list" if no_list else f"{lengths[row]:.0f} values, but row {before} holds {lengths[0]:.0f}"
            raise ValueError(
                f"Row {before + row} of the column {self._columns[0]!r} holds {found}; every row needs an embedding of "
                "the same length. Drop those rows."
            )
        return self._floats(columns[0].flatten()).reshape(len(columns[0]), -1)

    def _floats(self, column: Any) -> Float[Array, "n"]:
        """A column in float32 or float64; integers beyond 2**53 are rounded, as in NumPy."""
        return column.cast(self._type, safe=False).to_numpy(zero_copy_only=False)


def _parquet_dataset(path: Path) -> Any:
    """The dataset of a Parquet file, or of all Parquet files in a folder."""
    _import_pyarrow()
    import pyarrow.dataset

    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files or files[0].suffix != ".parquet":
        raise ValueError(
            f"embeddings must be the path of a .parquet file or of a folder of such files, got {str(path)!r}. Load "
            "other files first, for example with numpy.load(path, mmap_mode='r')."
        )
    if not files[0].is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}.")
    return pyarrow.dataset.dataset([str(file) for file in files], format="parquet")


def _import_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401 - only whether it is installed
    except ImportError as error:
        raise ImportError("Arrow tables and Parquet files need pyarrow. Install it: pip install pyarrow.") from error


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)


def _fits_float32(kind: Any) -> bool:
    from pyarrow import types

    return types.is_float32(kind) or types.is_float16(kind)


def row_ids(ids: Any, rows: int, name: str = "ids") -> Array:
    """Identifiers of rows as an array of integers or strings; ``name`` is what errors call them.

    >>> row_ids(["a7", "b3"], 2).tolist()
    ['a7', 'b3']
    """
    found = label_array(ids, name)
    if len(found) != rows:
        raise ValueError(f"Got {len(found)} {name} for {rows} rows; pass one for each row.")
    if found.dtype.kind not in "iuU":
        raise TypeError(f"{name} must be integers or strings; convert them with str() first.")
    if found.dtype.kind == "u" and len(found) and int(found.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{found.max()} in {name} does not fit in 64 bits with a sign; pass {name} as strings.")
    # One integer dtype: int64 and uint64 together would become float64.
    return found if found.dtype.kind == "U" else found.astype(np.int64)


def embedding_source(
    embeddings: Any,
    labels: Any,
    encoder: Callable[[Any], Any] | None,
    ids: Any = None,
    layers: Any = None,
    device: torch.device | None = None,
) -> EmbeddingSource:
    """Return the source of the embeddings and labels that a user passes to a fit.

    Args:
        embeddings: An array, tensor, list or DataFrame of embeddings; an Arrow table or dataset; the path of a Parquet
            file or of a folder of Parquet files; with an encoder, an iterable of batches (inputs, labels).
        labels: The labels; with Arrow and Parquet the name of the label column; None with an encoder.
        encoder: A function or module from inputs to embeddings, or None.
        ids: Identifiers of the rows, the name of their column in a table, or None.
        layers: Activations of earlier layers by name, for embeddings in an array; None for none.
        device: Torch device that computes products of layers; None for NumPy.
    """
    in_array = encoder is None and not isinstance(embeddings, (str, os.PathLike))
    if layers is not None and not (in_array and not type(embeddings).__module__.startswith("pyarrow")):
        raise ValueError(
            "layers= goes with embeddings in an array. An encoder returns layers itself, as a pair (embeddings, "
            "{'layer1': activations, ...}); files and Arrow tables have none."
        )
    if encoder is not None:
        if ids is not None:
            raise ValueError("A loader may give its rows in any order, so ids cannot be matched; pass embeddings.")
        if labels is not None:
            raise ValueError("With an encoder the batches contain the labels; do not give labels as well.")
        return BatchSource(embeddings, encoder, device)
    if isinstance(embeddings, (str, os.PathLike)):
        return ArrowSource(_parquet_dataset(Path(embeddings)), labels, ids)
    if type(embeddings).__module__.startswith("pyarrow"):
        return ArrowSource(embeddings, labels, ids)
    if not isinstance(embeddings, (Tensor, np.ndarray, list, tuple)) and not hasattr(embeddings, "columns"):
        raise TypeError(
            f"embeddings must be an array or a tensor, got {type(embeddings).__name__}; batches need an encoder. "
            "Pass encoder=."
        )
    if labels is None:
        raise ValueError("labels are missing; only batches with an encoder contain labels. Pass labels=.")
    return ArraySource(embeddings, labels, ids, layers, device)
