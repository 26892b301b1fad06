"""File tables of the command line (extra ``cli``): read CSV, Parquet and NPZ, write and summarise scores.

An error in a file raises ``ValueError`` or ``OSError`` with a message of one line. The message names the file and, if
one cell is wrong, the row (counted from 0) and the column.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
import zipfile
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sepc_torch.data.arrays import refuse_duplicates
from sepc_torch.data.csv_cells import escape_cell, quoting, unescape_cell
from sepc_torch.data.files import check_target, replacing
from sepc_torch.data.memory import check_memory
from sepc_torch.data.text_table import text_table
from sepc_torch.model.prediction import Prediction
from sepc_torch.model.rules import Rule
from sepc_torch.shapes import Array, Float, Int

READABLE = (".csv", ".csv.gz", ".parquet", ".npz")
WRITABLE = (".csv", ".parquet")
# Peak memory of reading a table as a multiple of its text or of its numbers in float64, measured with pandas 2.
_TABLE_COPIES = 5
# Text of numbers is at least this many times larger than its gzip file.
_COMPRESSED = 2
# Largest number of names that a message lists.
_NAMED = 8
# Largest number of characters of a cell or a name that a message shows.
_SHOWN = 80


class Table(NamedTuple):
    """Contents of a file.

    Attributes:
        path: The file.
        frame: The columns by name.
        named: Whether the column names come from the file.
        label: Column with the labels of an NPZ file; None for other formats.
    """

    path: Path
    frame: pd.DataFrame
    named: bool = True
    label: str | None = None


def read_table(path: Path) -> Table:
    """Read a CSV, Parquet or NPZ file; the suffix gives the format.

    An NPZ file holds ``X`` (N, D) and optionally ``y`` (N,) and ``feature_names`` (D,). Without ``feature_names`` the
    features are called x0, x1 and so on. The labels become the column ``y``.
    """
    suffix = _suffix(path, READABLE, "read")
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}.")
    _check_table_memory(path, suffix)
    try:
        table = _read_npz(path) if suffix == ".npz" else Table(path, _read_frame(path, suffix))
    except PermissionError:
        raise PermissionError(f"No permission to read {str(path)!r}.") from None
    except ImportError:
        raise
    except Exception as error:  # the readers of pandas, pyarrow and NumPy raise any error for a damaged file
        kind = suffix.removeprefix(".").removesuffix(".gz").upper()
        raise ValueError(f"{str(path)!r} is not a usable {kind} file ({reason(error)}).") from error
    if table.frame.empty:
        raise ValueError(f"{str(path)!r} has no rows.")
    return table


def numbers(table: Table, columns: Sequence[str], rows: Sequence[int] | None = None) -> Float[Array, "N D"]:
    """The given columns as float64, for all rows or for ``rows``; every cell must be a finite number."""
    frame = table.frame if rows is None else table.frame.iloc[list(rows)]
    return np.stack([_numbers(table.path, frame[column]) for column in columns], axis=1)


def labels(table: Table, column: str) -> Array:
    """The labels in a column; raise an error if one is missing."""
    require(table, [column])
    series = table.frame[column]
    missing = np.flatnonzero(series.isna().to_numpy())
    if len(missing):
        raise ValueError(
            f"{str(table.path)!r}, row {missing[0]}, column {column!r}: the label is missing "
            f"({len(missing)} rows in total). Add the labels or drop the rows."
        )
    return series.to_numpy()


def require(table: Table, columns: Sequence[str]) -> None:
    """Raise an error if the table lacks one of the columns."""
    missing = [column for column in columns if column not in table.frame.columns]
    if missing:
        few = "column" if len(missing) == 1 else "columns"
        has = named(list(table.frame.columns))
        raise ValueError(f"{str(table.path)!r} has no {few} {named(missing)}; it has {has}.")


def named(names: Sequence[str]) -> str:
    """The first few names, formatted for an error message.

    >>> named(["a", "b"])
    "'a', 'b'"
    """
    more = len(names) - _NAMED
    return ", ".join(map(shortened, names[:_NAMED])) + (f" and {more} more" if more > 0 else "")


def check_writable(path: Path, suffixes: Sequence[str]) -> None:
    """Raise an error, before any work is done, if the output cannot be written."""
    _suffix(path, suffixes, "write")
    check_target(path)
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"Cannot write {str(path)!r}: no permission to write to {str(path.parent)!r}.")


def write_table(frame: pd.DataFrame, path: Path) -> None:
    """Write a table as CSV or Parquet, by its suffix; on an error the old file stays unchanged.

    In a CSV file, text that looks like a formula starts with an apostrophe, which :func:`read_table` removes.
    """
    suffix = _suffix(path, WRITABLE, "write")
    with replacing(path) as temporary:
        if suffix == ".csv":
            safe = _map_text(frame, escape_cell)
            texts = chain(safe.columns, *(_texts(column) for _, column in safe.items()))
            safe.to_csv(temporary, index=False, quoting=quoting(texts))
            return
        try:
            frame.to_parquet(temporary, index=False)
        except OverflowError as error:
            raise ValueError(
                f"Cannot write {str(path)!r}: a whole number does not fit into 64 bits, the most that Parquet holds. "
                "Write CSV, or leave the column out."
            ) from error


def scored_table(out: Prediction, classes: Sequence[Any]) -> pd.DataFrame:
    """Convert a prediction to a table with the user's labels and the names of the rules."""
    names = pd.Series(list(classes))
    return pd.DataFrame(
        {
            "label": names[out.label.numpy()].to_numpy(),
            "trust": out.trust.numpy(),
            "rule": np.array([rule.name for rule in sorted(Rule)])[out.rule.numpy()],
            "distance": out.distance.numpy(),
            "margin": out.margin.numpy(),
            "runner_up": names[out.runner_up.numpy()].to_numpy(),
        }
    )


class Share(NamedTuple):
    """A subset of the scored points: their number, their fraction of all points, and their accuracy if known."""

    points: int
    share: float
    accuracy: float | None


class Summary(NamedTuple):
    """Summary of a scored set; accepted points lie inside an ellipsoid and have at least the threshold trust."""

    threshold: float
    everything: Share
    accepted: Share
    rules: dict[str, Share]

    def __str__(self) -> str:
        rows = [[name, *_cells(share)] for name, share in self.rules.items()]
        rows += [["all", *_cells(self.everything)], [f"trust >= {self.threshold:g}, inside", *_cells(self.accepted)]]
        return text_table(["rule", "points", "share", "accuracy"], rows)

    def as_dict(self) -> dict[str, Any]:
        """The summary as a dictionary for JSON."""
        rules = {name: share._asdict() for name, share in self.rules.items()}
        return {
            "threshold": self.threshold,
            "points": self.everything.points,
            "accuracy": self.everything.accuracy,
            "accepted": self.accepted.points,
            "coverage": self.accepted.share,
            "accepted_accuracy": self.accepted.accuracy,
            "rules": rules,
        }


def summary(out: Prediction, truth: Int[Array, "B"] | None = None, threshold: float = 0.95) -> Summary:
    """Summarise a prediction by rule and by trust; ``truth`` holds the true classes as indices, if known."""
    right = None if truth is None else out.label.numpy() == truth
    rule = out.rule.numpy()

    def share(chosen: Array) -> Share:
        count = int(chosen.sum())
        accuracy = None if right is None or count == 0 else float(right[chosen].mean())
        return Share(count, count / max(len(chosen), 1), accuracy)

    accepted = ~out.abstain(threshold, outside=True).numpy()
    return Summary(
        threshold,
        share(np.ones(len(rule), dtype=bool)),
        share(accepted),
        {name.name: share(rule == int(name)) for name in Rule},
    )


def _cells(share: Share) -> list[object]:
    return [share.points, f"{share.share:.1%}", "" if share.accuracy is None else f"{share.accuracy:.1%}"]


def _suffix(path: Path, known: Sequence[str], verb: str) -> str:
    for suffix in known:
        if path.name.lower().endswith(suffix):
            return suffix
    raise ValueError(f"Cannot {verb} {str(path)!r}: its name must end in {' or '.join(known)}.")


def _check_table_memory(path: Path, suffix: str) -> None:
    """Raise MemoryError if a whole table does not fit into the available memory; damaged files pass."""
    try:
        if suffix == ".parquet":
            from pyarrow.parquet import read_metadata

            stored = read_metadata(path)
            size = 8 * stored.num_rows * stored.num_columns
        elif suffix == ".npz":
            with zipfile.ZipFile(path) as archive:
                size = sum(entry.file_size for entry in archive.infolist())
        else:
            size = path.stat().st_size * (_COMPRESSED if suffix.endswith(".gz") else 1)
    except ImportError:
        raise
    except Exception:  # the reader says what is wrong with the file
        return
    check_memory(
        _TABLE_COPIES * size,
        f"Reading the whole table {str(path)!r}, as the paper's classifier does,",
        "Split the file, or fit a calibrated model (`sepc fit` without --paper), which reads files in pieces.",
    )


def _read_frame(path: Path, suffix: str) -> pd.DataFrame:
    if suffix == ".parquet":
        from pyarrow.parquet import read_schema

        refuse_duplicates(read_schema(path).names, "it")
        frame = pd.read_parquet(path).reset_index(drop=True)
        return frame.set_axis([str(column) for column in frame.columns], axis=1)
    with warnings.catch_warnings():
        # If a row has more cells than the header, pandas shifts or drops columns and only warns.
        warnings.simplefilter("error", pd.errors.ParserWarning)
        # pandas renames the second of two equal columns, so the header is read as a row of text as well.
        header = pd.read_csv(path, index_col=False, header=None, nrows=1, dtype=str, keep_default_na=False)
        refuse_duplicates(map(unescape_cell, filter(None, header.iloc[0])), "it")
        frame = pd.read_csv(path, index_col=False, low_memory=False)
    return _map_text(frame, unescape_cell)


def _map_text(frame: pd.DataFrame, change: Callable[[str], str]) -> pd.DataFrame:
    """Apply a function to the column names and to the cells that hold text."""
    changed = {}
    for name, column in frame.items():
        texts = {text: change(text) for text in _texts(column)}  # each text once, because columns repeat few labels
        if any(after != before for before, after in texts.items()):
            cells = [texts[cell] if isinstance(cell, str) else cell for cell in column.tolist()]
            changed[str(name)] = pd.Series(cells, index=column.index, dtype=object)
    return frame.assign(**changed).set_axis([change(str(name)) for name in frame.columns], axis=1)


def _texts(column: pd.Series[Any]) -> set[str]:
    """The different texts in a column."""
    return {cell for cell in column.tolist() if isinstance(cell, str)} if column.dtype.kind == "O" else set()


def _read_npz(path: Path) -> Table:
    with path.open("rb") as stream:
        # Loading a pickle can run code, so a file from an unknown source must not contain one.
        file = np.load(stream, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise ValueError("the file is a single array without a name")
        if "X" not in file.files:
            raise ValueError(f"the array 'X' is missing; the file has {named(file.files)}")
        parts = {name: file[name] for name in ("X", "y", "feature_names") if name in file.files}
    for name, part in parts.items():
        if not isinstance(part, np.ndarray):  # NumPy returns the bytes of other files in the archive
            raise ValueError(f"{name} is not an array")
    points, targets, given = parts["X"], parts.get("y"), parts.get("feature_names")
    if points.ndim != 2:
        raise ValueError(f"X must have shape (points, features), got {points.shape}")
    names = [f"x{j}" for j in range(points.shape[1])] if given is None else [str(name) for name in given.ravel()]
    if len(names) != points.shape[1]:
        raise ValueError(f"X has {points.shape[1]} columns and feature_names has {len(names)} names")
    refuse_duplicates(names, "it")
    frame = pd.DataFrame(points, columns=names)
    if targets is None:
        return Table(path, frame, named=given is not None)
    if targets.shape != (len(points),):
        raise ValueError(f"X has {len(points)} rows and y has shape {targets.shape}")
    if "y" in names:
        raise ValueError("the labels and a feature are both called y; rename the feature")
    return Table(path, frame.assign(y=targets), named=given is not None, label="y")


def _numbers(path: Path, series: pd.Series[Any]) -> Float[Array, "N"]:
    kind = series.dtype.kind
    if kind in "fiub":
        values = series.to_numpy(dtype=np.float64, na_value=np.nan)
        wrong = np.zeros(len(values), dtype=bool)
    elif kind == "O":
        cells = series.astype(object).map(_within_float)
        values = pd.to_numeric(cells, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
        wrong = np.isnan(values) & series.notna().to_numpy()
    else:
        raise ValueError(f"{str(path)!r}, column {series.name!r} holds {series.dtype}, not real numbers. Leave it out.")
    bad = np.flatnonzero(wrong) if wrong.any() else np.flatnonzero(~np.isfinite(values))
    if len(bad):
        where = f"{str(path)!r}, row {series.index[bad[0]]}, column {series.name!r}"
        if wrong.any():
            raise ValueError(
                f"{where}: {shortened(series.iloc[bad[0]])} is not a number ({len(bad)} cells of the column are not "
                "numbers). Correct the cells, or leave the column out."
            )
        problem = "value is missing" if np.isnan(values[bad[0]]) else "number is infinite or too large for float64"
        raise ValueError(
            f"{where}: the {problem} ({len(bad)} cells of the column are missing or infinite). Correct the cells or "
            "drop the rows."
        )
    return values


def _within_float(cell: Any) -> Any:
    """The cell, with infinity for a whole number beyond the range of float64, which pandas does not convert."""
    return math.inf if isinstance(cell, int) and abs(cell) > sys.float_info.max else cell


def shortened(value: object) -> str:
    """The ``repr`` of a value, cut if it is long.

    >>> len(shortened("9" * 400)) == _SHOWN
    True
    """
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def reason(error: Exception | Warning) -> str:
    r"""First line of the message of an error.

    >>> reason(ValueError("no rows.\nMore."))
    'no rows'
    """
    # The text of a KeyError is only the key.
    text = f"the entry {error} is missing" if isinstance(error, KeyError) else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0].rstrip(".")
