"""Labelled rows of a file, to fit a model to: the use of every column, a random sample, and its encoding as numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sepc_torch.cli.columns import (
    Survey,
    chosen_label,
    feature_columns,
    label_values,
    logit_columns,
    refuse_unusable,
    survey,
)
from sepc_torch.cli.head_rows import Sample, encoded_rows, sample_rows, table_columns
from sepc_torch.cli.row_files import RowFile
from sepc_torch.cli.shell import note
from sepc_torch.data.table_encoding import MISSING, TableEncoding
from sepc_torch.shapes import Array, Float


class ColumnOptions(NamedTuple):
    """What a user says about the columns of a file; see the options of ``sepc fit``."""

    label: str | None = None
    drop: list[str] | None = None
    categorical: list[str] | None = None
    missing: list[str] | None = None
    identify: str | None = None
    logits: str | None = None
    classes: str | None = None


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
        table = table_columns(rows.table, self.features, self.columns.numbers, self.missing)
        return TableEncoding.fit(table, self.columns.numbers, self.columns.categories, self.missing)

    def points(self, rows: Sample, encoding: TableEncoding | None) -> Float[Array, "n D"]:
        """The features of some of the rows as numbers."""
        return encoded_rows(rows.table, self.features, encoding).points

    def logits_of(self, rows: Sample) -> Float[Array, "n C"] | None:
        """The logits of some of the rows, or None if the file has none."""
        return encoded_rows(rows.table, self.logits, None).points if self.logits else None


def training_rows(file: RowFile, options: ColumnOptions, most: int | None, seed: int) -> TrainingRows:
    """Read a random sample of at most ``most`` labelled rows; raise ValueError for columns that cannot be used."""
    drop, categorical, identify = options.drop or [], options.categorical or [], options.identify
    label = chosen_label(file, options.label)
    named = [] if identify is None else [identify]
    file.require([*drop, *categorical, *named])
    order = None if options.classes is None else [name.strip() for name in options.classes.split(",")]
    logits = logit_columns(file, options.logits, order)
    embeddings = file.embeddings or bool(logits)
    features = feature_columns(file, [label, identify, *logits, *drop])
    sample = sample_rows(file, list(dict.fromkeys([*features, label, *logits, *named])), label, most, seed)
    absent = (*MISSING, *(options.missing or []))
    found = survey(sample.table, sample.rows, features, categorical, frozenset(absent))
    if embeddings:
        told = "holds categories, which embeddings have not"
        found.unusable.update({name: f"{told} (--drop {name})" for name in found.categories})
    refuse_unusable(file, found.unusable)
    if embeddings:  # rows with a missing number have no embedding
        sample = sample.without(encoded_rows(sample.table, features, None).problems)
    if logits:
        sample = sample.without(encoded_rows(sample.table, logits, None).problems)
    targets = np.array(label_values(sample.table.column(label)))
    names = sorted(set(targets.tolist())) if order is None else _checked_order(order, targets)
    logits = logit_columns(file, options.logits, names)
    if logits and len(logits) != len(names):
        raise ValueError(
            f"There are {len(logits)} columns of logits and {len(names)} labels; every class needs a column and rows. "
            "Name the columns with --logits, in the order of the sorted labels or of --classes."
        )
    return TrainingRows(sample, targets, names, features, logits, found, embeddings, absent)


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
