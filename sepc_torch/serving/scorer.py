"""The class :class:`Scorer`: scores batches of rows with a saved head, inside any engine that maps batches."""

from __future__ import annotations

import difflib
import functools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sepc_torch.data.options import check_count
from sepc_torch.data.table_encoding import note_problems, parse_numbers
from sepc_torch.head.guard import Guard
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.reasons import Reason, refusal_reason
from sepc_torch.head.row_metrics import RowMetrics, openmetrics
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.model.rules import Rule
from sepc_torch.model.sepc import NanPolicy
from sepc_torch.shapes import Array

# Names of a column that holds whole embeddings.
EMBEDDINGS = ("z", "embeddings", "X")
LOGITS = "logits"
GROUPS = "groups"
# Heads that a process keeps: one is usual, a second one while a new version takes over.
_KEPT = 2
_LOADING = threading.Lock()


def _renew_lock() -> None:
    """Give a forked process a lock of its own: the thread that holds the parent's lock does not exist there."""
    global _LOADING
    _LOADING = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_lock)


@functools.lru_cache(maxsize=_KEPT)
def _load(path: str, device: str, trust: bool, version: tuple[int, ...]) -> TrustHead:  # noqa: ARG001 - part of the key
    return TrustHead.load(path, device, trust=trust)


class Scorer:
    """Function from a batch of rows to columns of trust, with a head that every process loads once.

    A pickle of a scorer holds only its arguments. The head is loaded at the first batch; all copies of the scorer in a
    process share it. The results do not depend on how rows are divided into batches, up to the rounding that
    :data:`~sepc_torch.head.calibration.calibration_tables.RESOLUTION` covers; ``accept`` does not depend on it at all.

    The columns are the fields of :class:`~sepc_torch.HeadPrediction` and ``reason``
    (:class:`~sepc_torch.head.reasons.Reason`), with ``label``, ``network_label`` and ``runner_up`` by class name,
    ``rule`` and ``reason`` as text. Flagged rows have the label None. With a guard there are two more: ``row``, the
    number of the row, by which the guard takes its label, and ``promise``, the state of the promise.

    Args:
        path: File that :meth:`TrustHead.save` wrote, where every process can read it.
        device: A torch device, or ``"auto"``: CUDA where there is one, otherwise the CPU.
        batch_size: Number of rows on the device at a time.
        keep: Columns of the input to copy to the output, for instance ids.
        logits: Name of the column of logits. A head that was calibrated with logits needs it; None judges the head's
            own labels. A head with a classifier of its table takes no such column.
        guard: A :class:`~sepc_torch.Guard` of the same head, which decides instead of the head. It follows one stream:
            such a scorer stays in its process and cannot be pickled.
        trust: Whether to load an estimator of the head's user; see :meth:`TrustHead.load`.

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
        logits: str | None = LOGITS,
        guard: Guard | None = None,
        trust: bool = False,
    ) -> None:
        if isinstance(keep, str):
            raise TypeError(f"keep must be a list of column names, got {keep!r}; pass [{keep!r}].")
        self.path = str(Path(path).absolute())  # worker processes can have another working directory
        self.device = str(device)
        self.batch_size = check_count(batch_size, "batch_size", least=1)
        self.keep = tuple(keep)
        self.logits = logits
        self.trust = bool(trust)
        self._counts = RowMetrics()
        self.guard: Guard | None = None
        if guard is not None:
            if not guard.belongs_to(self.head):
                raise ValueError(
                    f"The guard belongs to another head, calibration or threshold than {self.path!r}; load its head "
                    "from this file, or save its head there."
                )
            self.guard = guard

    def __repr__(self) -> str:
        options = f"device={self.device!r}, batch_size={self.batch_size}, keep={self.keep}, logits={self.logits!r}"
        return f"Scorer({self.path!r}, {options})"

    @property
    def head(self) -> TrustHead:
        """The head of the guard, or that of this process; a file that was replaced is then loaded again."""
        if self.guard is not None:
            return self.guard.head
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        state = Path(self.path).stat()
        # A copy of another file can have the time of modification and the size of the old one.
        version = state.st_mtime_ns, state.st_ctime_ns, state.st_size
        with _LOADING:  # threads that start together would load it several times
            return _load(self.path, device, self.trust, version)

    def __call__(self, batch: Any) -> Any:
        """Score a batch.

        Args:
            batch: One of

                - a dictionary of arrays: embeddings (B, D) under "z", "embeddings" or "X", or one array (B,) for each
                  feature under its name; "logits" (B, C) for a head that was calibrated with logits, and "groups" (B,)
                  for a head that accepts by groups; one array for each layer that the head was fitted with, under its
                  name. A head of ``sepc fit`` takes the columns of its table;
                - a pandas DataFrame, ``pyarrow.Table`` or ``pyarrow.RecordBatch`` with such columns; embeddings and
                  logits in one column are lists;
                - an array or tensor (B, D), for a head without an encoding and without logits;
                - an iterator of batches, as Spark's ``mapInPandas`` passes.

        Returns:
            The columns in the form of the batch: a dictionary of arrays for arrays, a DataFrame with the same index, a
            table, a record batch, or an iterator of these.
        """
        if isinstance(batch, Iterator):
            return map(self, batch)
        if isinstance(batch, Mapping):
            return self._columns(batch)
        if _is_a(batch, "pandas", "DataFrame"):
            import pandas as pd

            columns = self._columns({str(name): batch[name] for name in batch.columns})
            # Of objects pandas would choose the type by the values, and text has no None.
            kinds = {name: object if column.dtype == object else None for name, column in columns.items()}
            return type(batch)({name: pd.Series(columns[name], batch.index, kind) for name, kind in kinds.items()})
        for name in ("Table", "RecordBatch"):
            if _is_a(batch, "pyarrow", name):
                fields = {field: batch.column(field) for field in batch.schema.names}
                return type(batch).from_pydict(self._arrow(self._columns(fields)))
        return self._columns({EMBEDDINGS[0]: batch})

    def metrics(self) -> str:
        """Return numbers about the rows that this process has scored as OpenMetrics text; see :meth:`Guard.metrics`."""
        return openmetrics(self._counts.families()) if self.guard is None else self.guard.metrics()

    def _columns(self, batch: Mapping[str, Any]) -> dict[str, Array]:
        """Score columns by name; the results are arrays (B,)."""
        head = self.head
        missing = [name for name in self.keep if name not in batch]
        if missing:
            raise ValueError(f"The batch lacks the columns {missing} to keep; it has {list(batch)}.")
        logits = self._logits(head, batch)
        z = self._embeddings(head, batch)
        by_groups = head.calibration is not None and len(head.calibration.own.group_threshold) > 0
        groups = _array(batch[GROUPS]) if by_groups and GROUPS in batch else None
        kept = {name: _array(batch[name]) for name in self.keep}
        layers = self._layers(head, batch)
        _check_lengths({"z": z, **kept, **layers, **({} if logits is None else {str(self.logits): logits})})
        parts = []
        for start in range(0, max(len(z), 1), self.batch_size):
            rows = slice(start, start + self.batch_size)
            given = (None if column is None else column[rows] for column in (logits, groups))
            mine = {name: column[rows] for name, column in layers.items()}
            parts.append(head.judge(z[rows], *given, layers=mine or None))
        out = HeadPrediction(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
        guarded: dict[str, Array] = {}
        if self.guard is None:
            self._counts.add(out)
            reason = refusal_reason(out, head.promise)
        else:  # after all rows are judged, so that a batch with a wrong row is no part of the stream
            with_logits = logits is not None or head.classifier is not None
            out, state, ids, reason = self.guard.watch(out, with_logits=with_logits, z=z)
            guarded = {"row": ids.numpy(), "promise": np.full(len(ids), state)}
        scores = {name: column.numpy() for name, column in out._asdict().items()}
        for name in ("label", "network_label", "runner_up"):
            scores[name] = _named(head, scores[name])
        scores["rule"] = np.array([rule.name for rule in Rule])[scores["rule"]]
        scores["reason"] = np.array([kind.text for kind in Reason])[reason.numpy()]
        scores |= guarded
        clash = [name for name in self.keep if name in scores]
        if clash:
            raise ValueError(f"keep names {clash}, which are also names of scores; rename these columns of the batch.")
        return {**kept, **scores}

    def _layers(self, head: TrustHead, batch: Mapping[str, Any]) -> dict[str, Array]:
        """The rows of the layers that the head was fitted with, each in a column of its name."""
        missing = [name for name in head.layer_names if name not in batch]
        if missing or head.evidence is None:
            if not missing:
                return {}
            raise ValueError(
                f"The head was fitted with the layers {list(head.layer_names)}, and the batch has no columns "
                f"{missing}; it has {list(batch)}."
            )
        found = {}
        for name, width in zip(head.layer_names, head.evidence.layer_widths, strict=True):
            values = _array(batch[name])
            maps = values.ndim > 2  # averaged over positions by the head
            found[name] = values if maps else _matrix(values, name, width, head.sepc.nan_policy)
        return found

    def _logits(self, head: TrustHead, batch: Mapping[str, Any]) -> Array | None:
        """The logits (B, C) of a batch, or None to judge the head's own labels."""
        if self.logits is None or head.classifier is not None:
            return None
        if self.logits in batch:
            return _matrix(batch[self.logits], self.logits, len(head.classes), head.sepc.nan_policy)
        if not head.takes_logits:
            return None
        near = difflib.get_close_matches(self.logits, list(batch), 1)
        raise ValueError(
            f"The head was calibrated with the network's logits, and the batch has no column {self.logits!r}; it has "
            f"the columns {list(batch)}.{f' Did you mean {near[0]!r}?' if near else ''} Name the column: "
            f"Scorer(..., logits={near[0] if near else 'name'!r}); or choose the head's own labels: "
            "Scorer(..., logits=None)."
        )

    def _embeddings(self, head: TrustHead, batch: Mapping[str, Any]) -> Array:
        """The embeddings (B, D) of a batch, from one column or from a column for each feature."""
        width, policy = head.in_features, head.sepc.nan_policy
        if head.encoding is not None:
            return head.encode(
                _check_lengths({name: _array(batch[name]) for name in head.encoding.columns if name in batch})
            )
        for name in EMBEDDINGS:
            if name in batch and name not in (head.feature_names or ()):
                return _matrix(batch[name], name, width, policy)
        others = (self.logits, GROUPS, *self.keep, *head.layer_names)
        names = head.feature_names or tuple(name for name in batch if name not in others)
        missing = [name for name in names if name not in batch]
        if missing or len(names) != width:
            raise ValueError(
                f"Expected embeddings in a column named {', '.join(EMBEDDINGS)}, or {width} columns"
                + (f" of features such as {names[0]!r}" if head.feature_names else "")
                + f"; got the columns {list(batch)}. Rename the column of embeddings."
            )
        columns = _check_lengths({name: _array(batch[name]) for name in names})
        if any(column.ndim != 1 or _holds_lists(column) for column in columns.values()):
            raise ValueError("Columns of features hold one number in a row; put lists into a column named 'z'.")
        return np.stack([_numbers(column, name, policy) for name, column in columns.items()], axis=1)

    def _arrow(self, columns: Mapping[str, Array]) -> dict[str, Any]:
        """Columns with types that do not depend on the values, so that all batches have one schema."""
        import pyarrow as pa

        names = pa.array(self.head.classes).type
        types = dict.fromkeys(("label", "network_label", "runner_up"), names)
        types |= dict.fromkeys(("rule", "reason", "promise"), pa.string())
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


def _array(column: Any) -> Array:
    """A column as an array; lists in the rows of a table stay objects."""
    if isinstance(column, torch.Tensor):
        column = column.detach().cpu()
        return (column.float() if column.dtype == torch.bfloat16 else column).numpy()  # NumPy has no bfloat16
    if _is_a(column, "pyarrow", "ChunkedArray"):
        return column.to_numpy()
    if _is_a(column, "pyarrow", "Array"):
        return column.to_numpy(zero_copy_only=False)
    try:
        return np.asarray(column)
    except ValueError:  # lists of different length
        found = np.empty(len(column), dtype=object)
        for row, cell in enumerate(column):
            found[row] = cell
        return found


def _check_lengths(columns: dict[str, Array]) -> dict[str, Array]:
    """The columns, all of one length; others are refused."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"The columns of a batch must have one length, got the lengths {lengths}.")
    return columns


def _holds_lists(values: Array) -> bool:
    """Whether a cell of a column is a list."""
    return values.dtype == object and any(isinstance(cell, (list, tuple, np.ndarray)) for cell in values)


def _matrix(column: Any, name: str, width: int, policy: NanPolicy) -> Array:
    """A column of embeddings or logits (B, width); an empty column gets its width."""
    values = _array(column)
    if values.shape == (0,):
        return np.empty((0, width))
    if values.ndim == 1 and _holds_lists(values):
        sizes = [len(cell) if isinstance(cell, (list, tuple, np.ndarray)) else None for cell in values]
        wrong = next((row for row, size in enumerate(sizes) if size != width), None)
        if wrong is not None:
            found = f"{sizes[wrong]} values" if sizes[wrong] is not None else f"{values[wrong]!r}"
            raise ValueError(f"Row {wrong} of the column {name!r} holds {found}; expected a list of {width} numbers.")
        values = np.stack([np.asarray(cell) for cell in values])
    if values.ndim != 2 or values.shape[1] != width:
        raise ValueError(f"Expected {name!r} of shape (B, {width}), got {values.shape}. Pass one list for each row.")
    return _numbers(values, name, policy)


def _numbers(values: Array, name: str, policy: NanPolicy) -> Array:
    """Cells as numbers, NaN where missing; cells that are no numbers are refused, or NaN for a head that flags."""
    if values.dtype.kind in "fiub":
        return values
    cells = values.ravel()
    found, wrong = parse_numbers(cells)
    if policy == "raise":
        problems: dict[int, str] = {}
        note_problems(problems, name, cells.tolist(), wrong)  # Python's own values are shown
        for place, problem in problems.items():
            row = place // max(values[:1].size, 1)
            raise ValueError(f"Row {row}: {problem}. Correct the row, or fit the head with nan_policy='flag'.")
    return found.reshape(values.shape)
