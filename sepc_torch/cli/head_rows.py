"""Rows of a file as points of a trust head: a random sample to fit, and pieces to judge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sepc_torch.cli.columns import cells
from sepc_torch.cli.row_files import Piece, RowFile
from sepc_torch.cli.shell import note
from sepc_torch.cli_tables import named
from sepc_torch.data.progress import Bar
from sepc_torch.data.table_encoding import ABSENT, MISSING, Encoded, category_texts, note_problems, parse_numbers
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.shapes import Array, Float


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


def sample_rows(file: RowFile, columns: Sequence[str], label: str, most: int, seed: int) -> Sample:
    """Read a uniform random sample of at most ``most`` rows, in the order of the file, that have a label.

    Args:
        file: The file.
        columns: Names of the columns.
        label: The column of labels, one of ``columns``.
        most: Largest number of rows.
        seed: Seed of the sample.
    """
    rng = np.random.default_rng(seed)
    tables: list[pa.Table] = []
    keys, numbers, read = np.zeros(0), np.zeros(0, dtype=np.int64), 0
    problems: dict[int, str] = {}
    for piece in with_progress(file, columns, "read"):
        size = piece.table.num_rows
        tables.append(piece.table)
        keys, numbers = np.append(keys, rng.random(size)), np.append(numbers, np.arange(read, read + size))
        problems |= {read + i: text for i, text in piece.problems.items()}
        read += size
        if len(keys) > 2 * most:
            tables, keys, numbers = _prune(tables, keys, numbers, most)
    if not read:
        raise ValueError(f"{str(file.path)!r} has no rows.")
    tables, keys, numbers = _prune(tables, keys, numbers, most)
    sample = Sample(tables[0].combine_chunks(), numbers, read, {})
    absent = np.flatnonzero(category_texts(sample.table.column(label).to_pylist()) == ABSENT)
    broken = dict.fromkeys(absent.tolist(), "the label is missing")
    broken |= {i: problems[row] for i, row in enumerate(numbers.tolist()) if row in problems}
    sample = sample.without(broken)
    if not len(sample.rows):
        raise ValueError(f"{str(file.path)!r} has no row with a label in column {label!r}; row 0: {broken[0]}.")
    return sample


def _prune(tables: list[pa.Table], keys: Array, numbers: Array, most: int) -> tuple[list[pa.Table], Array, Array]:
    """Keep the rows with the least keys, which are a uniform sample."""
    table = pa.concat_tables(tables)
    if len(keys) <= most:
        return [table], keys, numbers
    kept = np.sort(np.argpartition(keys, most)[:most])
    return [table.take(pa.array(kept))], keys[kept], numbers[kept]


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
    columns = {name: cells(piece.table.column(name)) for name in features}
    if head is not None and head.encoding is not None:
        encoded = head.encoding.encode(columns)
    else:
        encoded = plain_numbers(columns)
    problems = encoded.problems
    scores = None
    if logits:
        # A row without logits has no network label; the head flags it.
        found = plain_numbers({name: cells(piece.table.column(name)) for name in logits})
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
    head: TrustHead, file: RowFile, label: str, logits: Sequence[str], most: int, seed: int
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


def plain_numbers(columns: dict[str, Any]) -> Encoded:
    """Columns of numbers as points; a missing value is a problem, because embeddings have none."""
    problems: dict[int, str] = {}
    parts = []
    for name, column in columns.items():
        values, wrong = parse_numbers(column, frozenset(MISSING))
        note_problems(problems, name, column, wrong)
        for row in np.flatnonzero(np.isnan(values) & ~wrong).tolist():
            problems.setdefault(row, f"{name}: the value is missing")
        parts.append(values)
    return Encoded(np.stack(parts, axis=1), problems, {})
