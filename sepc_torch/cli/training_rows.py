"""Labelled rows of a file, to fit a model to: the use of every column, a random sample, and its encoding as numbers."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from sepc_torch.cli.columns import (
    Survey,
    chosen_label,
    encoded_rows,
    feature_columns,
    label_values,
    logit_columns,
    refuse_unusable,
    survey,
    table_columns,
)
from sepc_torch.cli.row_files import Piece, RowFile
from sepc_torch.cli.shell import note, shortened
from sepc_torch.data.table_encoding import ABSENT, MISSING, Decimal, TableEncoding, category_texts
from sepc_torch.data.text import printable
from sepc_torch.shapes import Array, Float, Int

# Most rows that a fit or a calibration reads into memory. Ellipsoids are fitted to about half as many.
MOST_ROWS = 2**19
# Most cells of these rows: text takes about 16 bytes a cell, twice the sample is held, and a copy is made, 1.5 GiB.
MOST_CELLS = 2**25
# Rows that are read in any case: fewer would fit badly in as many columns.
LEAST_ROWS = 2**13
# A label with fewer rows for each value than this is a measurement, or a text of its own for every row.
_LEAST_PER_LABEL = 5
# Fewer values are classes, however few rows they have.
_FEW_LABELS = 20
# Repeated rows are kept together if at least this share of the rows differ; a table of few kinds of rows has no others.
_MOSTLY_DIFFERENT = 0.5
# Up to this many rows of each kind, chance leaves some kinds with one row.
_MOST_COPIES = 4
# Share of other rows whose label a column gives away.
_LEAK = 0.999
# Rows that are asked for leaks, and the least number of them that shows one.
_LEAK_ROWS, _LEAST_LEAK_ROWS = 20_000, 40
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


def unit_names(sample: Sample, column: str | None) -> Array | None:
    """The units of the rows as text; None without a column of units. Raise ValueError if one is missing."""
    if column is None:
        return None
    names = category_texts(sample.table.column(column).to_pylist())
    absent = np.flatnonzero(names == ABSENT)
    if len(absent):
        raise ValueError(
            f"{len(absent)} rows have no unit in column {column!r}, the first is row {sample.rows[absent[0]]}; give "
            "every row a unit, one of its own if it belongs to no other row."
        )
    return names


def sample_rows(
    file: RowFile,
    columns: Sequence[str],
    label: str,
    most: int | None,
    seed: int,
    missing: frozenset[str] = frozenset(MISSING),
) -> Sample:
    """Read a uniform random sample of at most ``most`` rows, in the order of the file, that have a label.

    By default there are at most :data:`MOST_ROWS` rows, and fewer of a table with many columns.
    """
    most = min(MOST_ROWS, max(MOST_CELLS // len(columns), LEAST_ROWS)) if most is None else most
    rng = np.random.default_rng(seed)
    kept = _Sampled(most)
    read = 0
    for piece in file.pieces(columns, "read"):
        kept.add(piece, rng.random(piece.table.num_rows), read)
        read += piece.table.num_rows
    if not read:
        raise ValueError(f"{str(file.path)!r} has no rows.")
    kept.prune()
    sample = Sample(kept.tables[0].combine_chunks(), kept.numbers[0], read, {})
    column = sample.table.column(label)
    absent = np.flatnonzero(category_texts(column.to_pylist(), missing) == ABSENT)
    broken = dict.fromkeys(absent.tolist(), "the label is missing")
    texts = Counter(
        text for text in column.take(pa.array(absent)).to_pylist() if isinstance(text, str) and text.strip()
    )
    for text, rows in texts.items():
        few = "row has" if rows == 1 else "rows have"
        note(f"{rows} {few} the label {shortened(text)}, which counts as missing; --na-values '' keeps it as a label")
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


class ColumnOptions(NamedTuple):
    """What a user says about the columns of a file; see the options of ``sepc fit``."""

    label: str | None = None
    drop: list[str] | None = None
    categorical: list[str] | None = None
    missing: list[str] | None = None
    identify: str | None = None
    logits: str | None = None
    classes: str | None = None
    units: str | None = None
    na_values: str | None = None
    decimal: Decimal = ""


class TrainingRows(NamedTuple):
    """Labelled rows of a file.

    Attributes:
        sample: The rows.
        targets: Their labels.
        classes: The labels in the order of the logits, sorted by default.
        features: Names of the feature columns.
        logits: Names of the columns with a network's logits, in the order of the classes.
        columns: The use of the feature columns.
        embeddings: Whether the features are embeddings of a network, which are not encoded.
        missing: Texts that stand for a missing value.
    """

    sample: Sample
    targets: Array
    classes: list[Any]
    features: list[str]
    logits: list[str]
    columns: Survey
    embeddings: bool
    missing: tuple[str, ...]

    def encoding(self, rows: Sample) -> TableEncoding | None:
        """The encoding of the features that is fitted to some of the rows; None for embeddings."""
        if self.embeddings:
            return None
        found = self.columns
        plain = [name for name in found.numbers if name not in found.decimals]
        table = table_columns(rows.table, self.features, plain, self.missing, found.categories)
        return TableEncoding.fit(
            *(table, found.numbers, found.categories, self.missing), dates=found.dates, decimals=found.decimals
        )

    def points(self, rows: Sample, encoding: TableEncoding | None) -> Float[Array, "n D"]:
        """The features of some of the rows as numbers."""
        return encoded_rows(rows.table, self.features, encoding).points

    def logits_of(self, rows: Sample) -> Float[Array, "n C"] | None:
        """The logits of some of the rows, or None if the file has none."""
        return encoded_rows(rows.table, self.logits, None).points if self.logits else None


def training_rows(file: RowFile, options: ColumnOptions, most: int | None, seed: int) -> TrainingRows:
    """Read a random sample of at most ``most`` labelled rows; raise ValueError for columns that cannot be used."""
    drop, categorical = options.drop or [], options.categorical or []
    label = chosen_label(file, options.label)
    named = [name for name in (options.identify, options.units) if name is not None]
    file.require([*drop, *categorical, *named])
    order = None if options.classes is None else [name.strip() for name in options.classes.split(",")]
    logits = logit_columns(file, options.logits, order)
    embeddings = file.embeddings or bool(logits)
    features = feature_columns(file, [label, *named, *logits, *drop])
    of_label = MISSING if options.na_values is None else ("", *map(str.strip, options.na_values.split(",")))
    columns = list(dict.fromkeys([*features, label, *logits, *named]))
    sample = sample_rows(file, columns, label, most, seed, frozenset(of_label))
    absent = tuple(dict.fromkeys((*of_label, *(options.missing or []))))
    found = survey(sample.table, sample.rows, features, categorical, frozenset(absent), options.decimal)
    if embeddings:
        told = "holds categories or dates, which embeddings have not"
        others = [*found.categories, *found.dates, *found.decimals]
        found.unusable.update({name: f"{told} (--drop {shlex.quote(name)})" for name in others})
        found.numbers.extend(name for name in found.left_out if name not in found.numbers)
        found.left_out.clear()  # an embedding has all its numbers
    refuse_unusable(file, found.unusable)
    if not found.used:
        raise ValueError(f"No column of {str(file.path)!r} says anything; all hold a single value, or none.")
    features = [name for name in features if name not in found.left_out]
    if embeddings:  # rows with a missing number have no embedding
        sample = sample.without(encoded_rows(sample.table, features, None).problems)
    if logits:
        sample = sample.without(encoded_rows(sample.table, logits, None).problems)
    where = f"{str(file.path)!r}, column {label!r},"
    targets = np.array(label_values(sample.table.column(label), where, frozenset(of_label)))
    _check_labels(targets, where)
    names = sorted(set(targets.tolist())) if order is None else _checked_order(order, targets)
    logits = logit_columns(file, options.logits, names)
    if logits and len(logits) != len(names):
        raise ValueError(
            f"There are {len(logits)} columns of logits and {len(names)} labels; every class needs a column and rows. "
            "Name the columns with --logits, in the order of the sorted labels or of --classes."
        )
    return TrainingRows(sample, targets, names, features, logits, found, embeddings, absent)


def _check_labels(targets: Array, where: str) -> None:
    """Raise ValueError if the labels are measurements, or different texts in most rows."""
    values = np.unique(targets)
    numbers = targets.dtype.kind in "fiu" or all(_is_number(text) for text in values.tolist())
    fractions = numbers and targets.dtype.kind not in "iu" and any(float(value) % 1 for value in values.tolist())
    enough = len(targets) >= _LEAST_PER_LABEL * len(values)
    if len(values) < _FEW_LABELS or (enough and not fractions):
        return
    what = "it seems to be a measurement" if numbers else "it seems to be no label"
    remedy = "make classes of it, such as low and high" if numbers else "name the column of the labels"
    raise ValueError(
        f"{where} holds {len(values)} different values in {len(targets)} rows, such as "
        f"{shortened(values.tolist()[0])}: {what}. A class needs at least {_LEAST_PER_LABEL} rows on average. "
        f"Check --label, or {remedy}."
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def equal_rows(rows: TrainingRows) -> Int[Array, "n"] | None:
    """A number for each row, equal for rows with equal features, if some rows repeat others; else None.

    Equal rows on both sides of a split would make the labels look better than they are. In a table with few kinds of
    rows, new rows repeat old ones as well, and None is returned. Chance leaves some kinds with one row; if there is
    none, and few rows of each kind, the table holds copies.
    """
    frame = rows.sample.table.select(rows.features).to_pandas()
    codes = pd.factorize(pd.util.hash_pandas_object(frame, index=False).to_numpy())[0]
    sizes = np.bincount(codes)
    copies = sizes.min() > 1 and len(codes) <= _MOST_COPIES * len(sizes)
    if len(sizes) == len(codes) or not (copies or len(sizes) >= _MOSTLY_DIFFERENT * len(codes)):
        return None
    return codes


def leaks(points: Float[Array, "n D"], targets: Array, held: Array, names: Sequence[str]) -> list[str]:
    """Columns that give the label away: a few values or thresholds of one of them decide it in the held rows.

    Args:
        points: One value for each column, NaN where missing, as in :meth:`TableEncoding.columns_of`.
        targets: The labels.
        held: Which rows are held back.
        names: Names of the columns.
    """
    from sklearn.tree import DecisionTreeClassifier

    fit, test = np.flatnonzero(~held)[:_LEAK_ROWS], np.flatnonzero(held)[:_LEAK_ROWS]
    if len(test) < _LEAST_LEAK_ROWS:
        return []
    values, most = len(np.unique(targets)), np.unique(targets[test], return_counts=True)[1].max()
    if most >= _LEAK * len(test):
        return []
    found = []
    for name, column in zip(names, points.T[:, :, None], strict=True):
        tree = DecisionTreeClassifier(max_leaf_nodes=max(4 * values, 64), random_state=0)
        if tree.fit(column[fit], targets[fit]).score(column[test], targets[test]) >= _LEAK:
            found.append(name)
    return found


def notes_on_leaks(names: Sequence[str]) -> None:
    """Point out columns that decide the label alone."""
    for name in names:
        note(
            f"column {printable(repr(name))} alone decides the label. If new rows do not have it before their label is "
            f"known, leave it out: --drop {shlex.quote(name)}"
        )


def notes_on_rows(sample: Sample) -> None:
    """Say which rows were sampled and which were left out."""
    if sample.read > len(sample.rows) + len(sample.left_out):
        note(f"used a random sample of the {sample.read} rows of the file; --max-rows changes its size")
    if sample.left_out:
        row, problem = next(iter(sorted(sample.left_out.items())))
        few = "1 row is" if len(sample.left_out) == 1 else f"{len(sample.left_out)} rows are"
        note(f"{few} left out: row {row}: {problem}{', and more' if len(sample.left_out) > 1 else ''}")


def _checked_order(order: list[str], targets: Array) -> list[Any]:
    """The classes in the order that the user names, with the type of the labels."""
    by_text = {str(name): name for name in set(targets.tolist())}
    if sorted(order) != sorted(by_text):
        raise ValueError(f"--classes names {order}, and the labels are {sorted(by_text)}; name each label once.")
    return [by_text[name] for name in order]
