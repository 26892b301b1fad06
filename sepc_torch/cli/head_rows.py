"""Rows of a file as points of a trust head: a random sample to fit, and pieces to judge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sepc_torch.cli.columns import cells, number_columns
from sepc_torch.cli.row_files import Piece, RowFile
from sepc_torch.cli.shell import note
from sepc_torch.cli_tables import named
from sepc_torch.data.progress import Bar
from sepc_torch.data.table_encoding import (
    ABSENT,
    MISSING,
    Encoded,
    TableEncoding,
    category_texts,
    note_problems,
    parse_numbers,
)
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.shapes import Array, Float

# Most rows that a fit or a calibration reads into memory. Ellipsoids are fitted to about half as many.
MOST_ROWS = 2**19
# Most cells of these rows: text takes about 16 bytes a cell, twice the sample is held, and a copy is made, 1.5 GiB.
MOST_CELLS = 2**25
# Rows that are read in any case: fewer would fit badly in as many columns.
LEAST_ROWS = 2**13
# Most tables that a sample holds: a table of one row and hundreds of columns takes 0.1 MB.
_MOST_TABLES = 2**8


class Sample(NamedTuple):
    """Rows of a file in memory.

    Attributes:
        table: The columns.
        rows: Their numbers in the file, counted from 0.
        read: Number of rows of the file.
        left_out: Rows that cannot be used, with their problems; only those among the sampled rows.
    """

    table: pa.Table
    rows: Array
    read: int
    left_out: dict[int, str]

    def take(self, chosen: Array) -> Sample:
        """The rows at these positions."""
        return self._replace(table=self.table.take(pa.array(chosen)), rows=self.rows[chosen])

    def without(self, problems: dict[int, str]) -> Sample:
        """Leave out the rows at these positions."""
        if not problems:
            return self
        left_out = self.left_out | {int(self.rows[i]): text for i, text in problems.items()}
        return self.take(np.setdiff1d(np.arange(len(self.rows)), list(problems)))._replace(left_out=left_out)


class Points(NamedTuple):
    """Rows of a file as a head takes them.

    Attributes:
        z: (n, D) features; NaN in rows with a problem.
        logits: (n, C) logits, or None.
        truth: True labels as text, None where missing; or None if the file has none.
        problems: What is wrong with the rows that cannot be judged.
        filled: Missing values that training did not have, by column.
    """

    z: Float[Array, "n D"]
    logits: Float[Array, "n C"] | None
    truth: list[str | None] | None
    problems: dict[int, str]
    filled: dict[str, int]


def sample_rows(file: RowFile, columns: Sequence[str], label: str, most: int | None, seed: int) -> Sample:
    """Read a uniform random sample of at most ``most`` rows, in the order of the file, that have a label.

    Args:
        file: The file.
        columns: Names of the columns.
        label: The column of labels, one of ``columns``.
        most: Largest number of rows; by default :data:`MOST_ROWS`, and fewer of a table with many columns.
        seed: Seed of the sample.
    """
    most = min(MOST_ROWS, max(MOST_CELLS // len(columns), LEAST_ROWS)) if most is None else most
    rng = np.random.default_rng(seed)
    kept = _Sampled(most)
    read = 0
    for piece in with_progress(file, columns, "read"):
        kept.add(piece, rng.random(piece.table.num_rows), read)
        read += piece.table.num_rows
    if not read:
        raise ValueError(f"{str(file.path)!r} has no rows.")
    kept.prune()
    sample = Sample(kept.tables[0].combine_chunks(), kept.numbers[0], read, {})
    absent = np.flatnonzero(category_texts(sample.table.column(label).to_pylist()) == ABSENT)
    broken = dict.fromkeys(absent.tolist(), "the label is missing")
    broken |= {i: kept.problems[row] for i, row in enumerate(sample.rows.tolist()) if row in kept.problems}
    sample = sample.without(broken)
    if not len(sample.rows):
        raise ValueError(f"{str(file.path)!r} has no row with a label in column {label!r}; row 0: {broken[0]}.")
    return sample


class _Sampled:
    """The rows with the least keys so far, which are a uniform sample if the keys are random.

    Once there are enough rows, a row whose key is above all of theirs is not kept at all: of a long file few rows are.

    Args:
        most: Number of rows of the sample; up to twice as many are held.
    """

    def __init__(self, most: int) -> None:
        self._most, self._limit = most, np.inf
        self.tables: list[pa.Table] = []
        self.numbers: list[Array] = []
        self.problems: dict[int, str] = {}
        self._keys: list[Array] = []

    def add(self, piece: Piece, keys: Float[Array, "n"], start: int) -> None:
        """Add the rows of a piece with their keys; ``start`` is the number of its first row in the file."""
        chosen = np.flatnonzero(keys < self._limit)
        if not len(chosen):
            return
        table = piece.table if len(chosen) == len(keys) else piece.table.take(pa.array(chosen))
        self.tables.append(table)
        self.numbers.append(start + chosen)
        self._keys.append(keys[chosen])
        self.problems |= {start + i: text for i, text in piece.problems.items() if keys[i] < self._limit}
        if sum(map(len, self._keys)) > 2 * self._most:
            self.prune()
        elif len(self.tables) > _MOST_TABLES:
            self.tables = [self.tables[0], pa.concat_tables(self.tables[1:]).combine_chunks()]

    def prune(self) -> None:
        """Keep the rows with the least keys, in the order of the file, as one table."""
        table, keys, numbers = pa.concat_tables(self.tables), np.concatenate(self._keys), np.concatenate(self.numbers)
        if len(keys) > self._most:
            kept = np.sort(np.argpartition(keys, self._most)[: self._most])
            table, keys, numbers = table.take(pa.array(kept)), keys[kept], numbers[kept]
            self._limit = float(keys.max())
            rows = set(numbers.tolist()) if self.problems else set()
            self.problems = {row: text for row, text in self.problems.items() if row in rows}
        self.tables, self._keys, self.numbers = [table], [keys], [numbers]


def with_progress(file: RowFile, columns: Sequence[str], what: str) -> Iterator[Piece]:
    """Read the pieces of a file with a progress bar."""
    done = 0
    with Bar(what, file.total, "auto") as bar:
        for piece in file.pieces(columns):
            yield piece
            bar.advance(piece.done - done)
            done = piece.done


def head_features(head: TrustHead, file: RowFile, others: Sequence[str | None]) -> list[str]:
    """The columns that a head uses, by name if the head has names, otherwise by position."""
    names = head.feature_names if head.encoding is None else head.encoding.columns
    if names is not None:
        file.require(names)
        return list(names)
    found = [name for name in file.names if name not in others]
    if len(found) != head.in_features:
        raise ValueError(
            f"{str(file.path)!r} has {len(found)} feature columns and the model has {head.in_features} features, which "
            f"are matched by position because the model has no names; the columns are {named(found)}."
        )
    return found


def note_missing_logits(head: TrustHead, logits: Sequence[str]) -> None:
    """Say so if a head was calibrated with logits, and a file has none."""
    if not logits and head.calibration is not None and head.calibration.network.done:
        note("the model was calibrated with a network's logits; without --logits it judges its own labels")


def points_of(
    head: TrustHead | None, piece: Piece, features: Sequence[str], logits: Sequence[str] = (), label: str | None = None
) -> Points:
    """The rows of a piece as points; a head with an encoding encodes them, otherwise they are plain numbers."""
    encoded = encoded_rows(piece.table, features, None if head is None else head.encoding)
    problems = encoded.problems
    scores = None
    if logits:
        # A row without logits has no network label; the head flags it.
        found = encoded_rows(piece.table, logits, None)
        scores, problems = found.points, found.problems | problems
    # Broken rows hold no value at all, and are not counted as filled.
    filled = {name: rows - len(piece.problems) for name, rows in encoded.filled.items() if rows > len(piece.problems)}
    problems |= piece.problems
    encoded.points[list(problems)] = np.nan
    truth = None
    if label is not None:
        texts = category_texts(piece.table.column(label).to_pylist()).tolist()
        truth = [None if text == ABSENT else text for text in texts]
    return Points(encoded.points, scores, truth, problems, filled)


class LabelledPoints(NamedTuple):
    """Labelled rows of a file that a head can judge: the sample, their features, labels and logits."""

    sample: Sample
    z: Float[Array, "n D"]
    targets: list[Any]
    logits: Float[Array, "n C"] | None


def labelled_points(
    head: TrustHead, file: RowFile, label: str, logits: Sequence[str], most: int | None, seed: int
) -> LabelledPoints:
    """Read a random sample of at most ``most`` rows that have a label of the head and no problem."""
    features = head_features(head, file, [label, *logits])
    sample = sample_rows(file, [*features, label, *logits], label, most, seed)
    found = points_of(head, Piece(sample.table, {}, 0), features, logits, label)
    assert found.truth is not None
    by_text = dict(zip(category_texts(head.classes).tolist(), head.classes, strict=True))
    problems = {
        i: f"the model does not know the label {text!r}" for i, text in enumerate(found.truth) if text not in by_text
    } | found.problems
    good = np.setdiff1d(np.arange(len(found.z)), list(problems))
    if not len(good):
        raise ValueError(f"No row of {str(file.path)!r} can be used; row {sample.rows[0]}: {problems[0]}.")
    targets = [by_text[str(found.truth[i])] for i in good]
    scores = None if found.logits is None else found.logits[good]
    return LabelledPoints(sample.without(problems), found.z[good], targets, scores)


def table_columns(
    table: pa.Table, names: Sequence[str], numbers: Sequence[str], missing: Sequence[str]
) -> dict[str, Any]:
    """Columns of a table as arrays; those that should hold numbers are parsed."""
    chosen = set(numbers)
    texts = [name for name in names if name in chosen]
    parsed = dict(zip(texts, number_columns([table.column(name) for name in texts], frozenset(missing)), strict=True))
    return {name: parsed[name] if name in parsed else cells(table.column(name)) for name in names}


def encoded_rows(table: pa.Table, names: Sequence[str], encoding: TableEncoding | None) -> Encoded:
    """Columns of a table as points; without an encoding they are plain numbers, and a missing value is a problem."""
    if encoding is not None:
        numbers = [column.name for column in encoding.numbers]
        return encoding.encode(table_columns(table, names, numbers, encoding.missing))
    problems: dict[int, str] = {}
    parts = []
    for name, column in table_columns(table, names, names, MISSING).items():
        values, wrong = parse_numbers(column, frozenset(MISSING))
        note_problems(problems, name, column, wrong)
        for row in np.flatnonzero(np.isnan(values) & ~wrong).tolist():
            problems.setdefault(row, f"{name}: the value is missing")
        parts.append(values)
    return Encoded(np.stack(parts, axis=1), problems, {})
