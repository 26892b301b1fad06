"""The class :class:`Scorer`: scores batches of rows with a saved head, inside any engine that maps batches."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sepc_torch.data.options import count
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.reasons import Reason, refusal_reason
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.model.rules import Rule
from sepc_torch.shapes import Array

# Names of a column that holds whole embeddings.
EMBEDDINGS = ("z", "embeddings", "X")
LOGITS = "logits"
GROUPS = "groups"
# Heads that a process keeps: one is usual, a second one while a new version takes over.
_KEPT = 2
_LOADING = threading.Lock()


@functools.lru_cache(maxsize=_KEPT)
def _load(path: str, device: str, version: tuple[int, int]) -> TrustHead:  # noqa: ARG001 - a part of the key
    return TrustHead.load(path, device)


class Scorer:
    """Function from a batch of rows to columns of trust, with a head that every process loads once.

    A pickle of a scorer holds only its arguments. The head is loaded at the first batch; all copies of the scorer in a
    process share it. The results do not depend on how rows are divided into batches, up to the rounding that
    :data:`~sepc_torch.head.calibration_tables.RESOLUTION` covers; ``accept`` does not depend on it at all.

    The columns are the fields of :class:`~sepc_torch.HeadPrediction` and ``reason``
    (:class:`~sepc_torch.head.reasons.Reason`), with ``label``, ``network_label`` and ``runner_up`` by class name,
    ``rule`` and ``reason`` as text. Flagged rows have the label None.

    Args:
        path: File that :meth:`TrustHead.save` wrote, where every process can read it.
        device: A torch device, or ``"auto"``: CUDA where there is one, otherwise the CPU.
        batch_size: Number of rows on the device at a time.
        keep: Columns of the input to copy to the output, for instance ids.

    >>> import pickle, tempfile
    >>> head = TrustHead.fit([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 2.0]], ["a", "a", "b", "b"], dim=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     head.save(f"{folder}/head.safetensors")
    ...     scorer = pickle.loads(pickle.dumps(Scorer(f"{folder}/head.safetensors", keep=["id"])))
    ...     columns = scorer({"id": [7, 8], "z": [[3.0, 0.0], [0.0, 3.0]]})
    >>> columns["id"].tolist(), columns["label"].tolist(), columns["rule"].tolist()
    ([7, 8], ['a', 'b'], ['SINGLE', 'SINGLE'])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        device: torch.device | str = "auto",
        batch_size: int = 4096,
        *,
        keep: Sequence[str] = (),
    ) -> None:
        if isinstance(keep, str):
            raise TypeError(f"keep must be a list of column names, got {keep!r}; pass [{keep!r}].")
        self.path = str(Path(path).absolute())  # worker processes can have another working directory
        self.device = str(device)
        self.batch_size = count(batch_size, "batch_size", least=1)
        self.keep = tuple(keep)

    def __repr__(self) -> str:
        return f"Scorer({self.path!r}, device={self.device!r}, batch_size={self.batch_size}, keep={self.keep})"

    @property
    def head(self) -> TrustHead:
        """The head of this process; a file that was replaced is loaded again."""
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        state = Path(self.path).stat()
        with _LOADING:  # threads that start together would load it several times
            return _load(self.path, device, (state.st_mtime_ns, state.st_size))

    def __call__(self, batch: Any) -> Any:
        """Score a batch.

        Args:
            batch: One of

                - a dictionary of arrays: embeddings (B, D) under "z", "embeddings" or "X", or one array (B,) for each
                  feature under its name; optional "logits" (B, C), and "groups" (B,) for a head that accepts by groups;
                - a pandas DataFrame, ``pyarrow.Table`` or ``pyarrow.RecordBatch`` with such columns; embeddings and
                  logits in one column are lists;
                - an array or tensor (B, D);
                - an iterator of batches, as Spark's ``mapInPandas`` passes.

        Returns:
            The columns in the form of the batch: a dictionary of arrays for arrays, a DataFrame with the same index, a
            table, a record batch, or an iterator of these.
        """
        if isinstance(batch, Iterator):
            return map(self, batch)
        if isinstance(batch, Mapping):
            return self._columns({name: _matrix(column) for name, column in batch.items()})
        if _is_a(batch, "pandas", "DataFrame"):
            columns = self._columns({str(name): _matrix(batch[name]) for name in batch.columns})
            kinds = {name: object for name, column in columns.items() if column.dtype == object}
            return type(batch)(columns, index=batch.index).astype(kinds)  # pandas would choose types by the values
        for name in ("Table", "RecordBatch"):
            if _is_a(batch, "pyarrow", name):
                fields = {field: _matrix(batch.column(field)) for field in batch.schema.names}
                return type(batch).from_pydict(self._arrow(self._columns(fields)))
        return self._columns({EMBEDDINGS[0]: _matrix(batch)})

    def _columns(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """Score arrays by name; the results are arrays (B,)."""
        head = self.head
        missing = [name for name in self.keep if name not in batch]
        if missing:
            raise ValueError(f"The batch lacks the columns {missing} to keep; it has {list(batch)}.")
        logits = _shaped(batch[LOGITS], len(head.classes), LOGITS) if LOGITS in batch else None
        z = self._embeddings(head, batch)
        by_groups = head.calibration is not None and len(head.calibration.own.group_threshold) > 0
        groups = batch.get(GROUPS) if by_groups else None
        parts = []
        for start in range(0, max(len(z), 1), self.batch_size):
            rows = slice(start, start + self.batch_size)
            given = (None if column is None else column[rows] for column in (logits, groups))
            parts.append(head.judge(z[rows], *given))
        out = HeadPrediction(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
        scores = {name: column.numpy() for name, column in out._asdict().items()}
        for name in ("label", "network_label", "runner_up"):
            scores[name] = _named(head, scores[name])
        scores["rule"] = np.array([rule.name for rule in Rule])[scores["rule"]]
        scores["reason"] = np.array([reason.text for reason in Reason])[refusal_reason(out).numpy()]
        clash = [name for name in self.keep if name in scores]
        if clash:
            raise ValueError(f"keep names {clash}, which are also names of scores; rename these columns of the batch.")
        return {**{name: np.asarray(batch[name]) for name in self.keep}, **scores}

    def _embeddings(self, head: TrustHead, batch: Mapping[str, Array]) -> Array:
        """The embeddings (B, D) of a batch, from one column or from a column for each feature."""
        width = head.in_features
        for name in EMBEDDINGS:
            if name in batch and name not in (head.feature_names or ()):
                return _shaped(batch[name], width, name)
        names = head.feature_names or tuple(name for name in batch if name not in (LOGITS, GROUPS, *self.keep))
        missing = [name for name in names if name not in batch]
        if missing or len(names) != width:
            raise ValueError(
                f"Expected embeddings in a column named {', '.join(EMBEDDINGS)}, or {width} columns"
                + (f" of features such as {names[0]!r}" if head.feature_names else "")
                + f"; got the columns {list(batch)}. Rename the column of embeddings."
            )
        columns = [np.asarray(batch[name], dtype=np.float64) for name in names]
        if any(column.ndim != 1 for column in columns):
            raise ValueError("Columns of features hold one number in a row; put lists into a column named 'z'.")
        return np.stack(columns, axis=1)

    def _arrow(self, columns: Mapping[str, Array]) -> dict[str, Any]:
        """Columns with types that do not depend on the values, so that all batches have one schema."""
        import pyarrow as pa

        names = pa.array(self.head.classes).type
        types = {"label": names, "network_label": names, "runner_up": names, "rule": pa.string(), "reason": pa.string()}
        return {
            name: pa.array(column.tolist() if column.dtype.kind in "OU" else column, type=types.get(name))
            for name, column in columns.items()
        }


def _is_a(value: Any, package: str, name: str) -> bool:
    """Whether a value is an instance of a class of a package, without importing the package."""
    return any(base.__name__ == name and base.__module__.partition(".")[0] == package for base in type(value).__mro__)


def _named(head: TrustHead, codes: Array) -> Array:
    """Class names of codes. The dtype depends on the head only: with flagged rows possible, names are objects."""
    if head.sepc.nan_policy == "raise":
        return np.array(head.classes)[codes]
    names = np.array([*head.classes, None], dtype=object)
    return names[codes]  # the code -1 is the last name


def _matrix(column: Any) -> Array:
    """A column as an array: (B,) of values, or (B, D) of lists."""
    if isinstance(column, torch.Tensor):
        return column.detach().cpu().numpy()
    if _is_a(column, "pyarrow", "ChunkedArray") or _is_a(column, "pyarrow", "Array"):
        column = (
            column.to_numpy() if _is_a(column, "pyarrow", "ChunkedArray") else column.to_numpy(zero_copy_only=False)
        )
    values = np.asarray(column)
    if values.dtype == object and values.ndim == 1 and len(values) and np.ndim(values[0]) == 1:
        return np.stack([np.asarray(row) for row in values])
    return values


def _shaped(values: Array, width: int, name: str) -> Array:
    """A column of embeddings or logits, checked for its shape; an empty column of lists gets its width."""
    if values.shape == (0,):
        return np.empty((0, width))
    if values.ndim != 2 or values.shape[1] != width:
        raise ValueError(f"Expected {name!r} of shape (B, {width}), got {values.shape}. Pass one list for each row.")
    return values
