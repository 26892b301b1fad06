"""Columns of a file of rows: which are features, labels, logits and ids, and their cells as arrays."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sepc_torch.cli.row_files import RowFile
from sepc_torch.cli.shell import note
from sepc_torch.cli_tables import named, shortened
from sepc_torch.data.table_encoding import ABSENT, category_texts, parse_numbers
from sepc_torch.shapes import Array

# A column of text with more different texts than this share of its rows is free text, not a category.
_MOST_DISTINCT = 0.5
# A column of text of which at least this share are numbers is meant to be a column of numbers.
_MOSTLY_NUMBERS = 0.5
# Fewer rows can be distinct and in order by chance.
_LEAST_ORDERED = 20
# Dates such as 2024-01-31, 2024/1/31, 31.01.2024 and 1/31/24, alone or before a time of day.
_DATE = re.compile(r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3(\d{4}|\d{2}))([T ]\d{1,2}:\d{2}.*)?")
# Most cells that are parsed in one call: enough that the calls cost little, and 100 MB of temporary text.
_CELLS = 2**21
_DATE_ADVICE = "replace it by numbers that matter, such as the month or the age in days"


class Survey(NamedTuple):
    """The feature columns of a training table.

    Attributes:
        numbers: Columns of numbers.
        categories: Columns of categories.
        unusable: For the other columns, what is wrong and which option helps.
        suspicious: Columns that look like a row number.
        dates: Columns of categories that hold dates.
    """

    numbers: list[str]
    categories: list[str]
    unusable: dict[str, str]
    suspicious: list[str]
    dates: list[str]


def cells(column: Any) -> Array:
    """A column of an Arrow table as a NumPy array: numbers (NaN where missing) or objects (None where missing).

    >>> cells(pa.chunked_array([[1, None]])), cells(pa.chunked_array([["a", None]]))
    (array([ 1., nan]), array(['a', None], dtype=object))
    """
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_boolean(column.type) or pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    return np.asarray(column.to_numpy())


def number_cells(column: Any, missing: frozenset[str]) -> Array:
    """A column that should hold numbers as an array: numbers (NaN where missing), or objects if a text is no number.

    >>> missing = frozenset(["", "NA"])
    >>> number_cells(pa.chunked_array([["1.5", " NA"]]), missing), number_cells(pa.chunked_array([["1", "x"]]), missing)
    (array([1.5, nan]), array(['1', 'x'], dtype=object))
    """
    return number_columns([column], missing)[0]


def number_columns(columns: Sequence[Any], missing: frozenset[str]) -> list[Array]:
    """Columns of the same length that should hold numbers as arrays, each as :func:`number_cells` returns it.

    Arrow parses text tens of times faster than Python does, and to the same numbers. All columns of text are parsed
    in one call, because hundreds of calls for the few hundred rows of a piece of a wide file cost more than parsing.
    """
    if not columns:
        return []
    kind, rows = columns[0].type, len(columns[0])
    at_a_time = max(1, _CELLS // max(rows, 1))
    if len(columns) > at_a_time or any(column.type != kind for column in columns):
        parts = [list(group) for _, group in groupby(columns, key=lambda column: column.type)]
        parts = [part[i : i + at_a_time] for part in parts for i in range(0, len(part), at_a_time)]
        return [values for part in parts for values in number_columns(part, missing)]
    if not _is_text(kind):
        return [cells(column) for column in columns]
    values = _parsed(pa.chunked_array([chunk for column in columns for chunk in column.chunks], kind), missing)
    if values is not None:
        return list(values.reshape(len(columns), rows))
    if len(columns) == 1:
        return [cells(columns[0])]  # error messages quote the text of the cell
    half = len(columns) // 2  # halves find the few columns with a cell that is no number
    return number_columns(columns[:half], missing) + number_columns(columns[half:], missing)


def _parsed(texts: Any, missing: frozenset[str]) -> Array | None:
    """Texts as finite numbers, NaN where missing; None if one of them is neither."""
    trimmed = pc.utf8_trim_whitespace(texts)
    absent = pc.is_in(trimmed, pa.array(sorted(missing), texts.type))
    try:
        values = np.asarray(pc.if_else(absent, None, trimmed).cast(pa.float64()).to_numpy())
    except pa.ArrowInvalid:
        return None
    return None if np.isinf(values).any() else values


def _is_text(kind: Any) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def survey(
    table: pa.Table, rows: Array, features: Sequence[str], categorical: Sequence[str], missing: frozenset[str]
) -> Survey:
    """Sort the feature columns by what they hold.

    Args:
        table: The training rows.
        rows: Their numbers in the file.
        features: Names of the columns.
        categorical: Names of the columns that the user calls categorical.
        missing: Texts that stand for a missing value.
    """
    found = Survey([], [], {}, [], [])
    for name in features:
        column = table.column(name)
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        drop = f"--drop {shlex.quote(name)}"
        if pa.types.is_temporal(kind):
            found.unusable[name] = f"holds dates or times ({_DATE_ADVICE}, or {drop})"
            continue
        if not (_is_number(kind) or _is_text(kind)):
            found.unusable[name] = f"holds {kind}, neither numbers nor text ({drop})"
            continue
        if name in categorical:
            found.categories.append(name)
            continue
        values = number_cells(column, missing)
        numbers, wrong = parse_numbers(values, missing)
        present = int(np.count_nonzero(~np.isnan(numbers) | wrong))
        bad = int(wrong.sum())
        if not present:
            found.unusable[name] = f"holds no value ({drop})"
        elif not bad:
            found.numbers.append(name)
            if len(numbers) >= _LEAST_ORDERED and _is_row_number(numbers):
                found.suspicious.append(name)
        elif _is_number(kind) or bad < _MOSTLY_NUMBERS * present:
            first = int(wrong.argmax())
            cell = values[first] if isinstance(values[first], str) else float(values[first])
            helping = f"--missing {shlex.quote(cell)}, " if isinstance(cell, str) else ""
            helping += f"--categorical {shlex.quote(name)}, or {drop}"
            few = "cell is" if bad == 1 else "cells are"
            found.unusable[name] = (
                f"is almost numeric, but {bad} {few} no finite number, such as {shortened(cell)} in row {rows[first]} "
                f"({helping})"
            )
        else:
            texts = set(category_texts(values, missing).tolist()) - {ABSENT}
            distinct, dates = len(texts), all(map(_DATE.fullmatch, map(str.strip, texts)))
            if dates and distinct > _MOST_DISTINCT * present:
                found.unusable[name] = f"holds dates ({_DATE_ADVICE}, or {drop})"
            elif distinct == present and present > 1:
                found.unusable[name] = f"holds a different text in every row, like an id ({drop})"
            elif distinct > _MOST_DISTINCT * present:
                helping = f"{drop}, or --categorical {shlex.quote(name)} to use the most frequent ones"
                found.unusable[name] = f"holds {distinct} different texts in {present} rows ({helping})"
            else:
                found.categories.append(name)
                if dates:
                    found.dates.append(name)
    return found


def notes_on_columns(found: Survey) -> None:
    """Point out columns that look like a row number and categories that are dates."""
    for name in found.suspicious:
        drop = f"--drop {shlex.quote(name)}"
        note(f"column {name!r} looks like a row number: new rows would all look strange. Leave it out: {drop}")
    for name in found.dates:
        note(
            f"column {name!r} holds dates, which count as categories: all later dates are unknown ones. "
            f"{_DATE_ADVICE.capitalize()}, or leave it out: --drop {shlex.quote(name)}"
        )


def refuse_unusable(file: RowFile, unusable: dict[str, str]) -> None:
    """Raise ValueError with all unusable columns and the options that help."""
    if unusable:
        few = "column" if len(unusable) == 1 else "columns"
        listed = "; ".join(f"{shortened(name)} {problem}" for name, problem in unusable.items())
        raise ValueError(f"{str(file.path)!r} has {len(unusable)} unusable {few}: {listed}.")


def chosen_label(file: RowFile, label: str | None) -> str:
    """The column with the labels; raise ValueError if there is none."""
    label = label or file.label
    if label is None:
        raise ValueError(f"Name the label column of {str(file.path)!r} with --label; the file has {named(file.names)}.")
    file.require([label])
    return label


def logit_columns(file: RowFile, given: str | None, classes: Sequence[Any] | None) -> list[str]:
    """The columns with the logits, in the order of the classes.

    Columns that end in the names of the classes, such as ``logit_cat`` and ``logit_dog``, are ordered by these names;
    other columns keep the order of the file, numbers in order.

    Args:
        file: The file.
        given: The prefix of the columns, or their names separated by commas; None takes the logits of an NPZ file.
        classes: The labels in the order of the model, or None if they are not known yet.
    """
    if given is None:
        return list(file.logits)
    listed = [name.strip() for name in given.split(",")]
    if len(listed) > 1 or listed[0] in file.names:
        file.require(listed)
        return listed
    found = [name for name in file.names if name.startswith(given)]
    if not found:
        raise ValueError(
            f"No column of {str(file.path)!r} starts with {given!r} (--logits); it has {named(file.names)}."
        )
    ends = {name: name.removeprefix(given).lstrip("_- .:") for name in found}
    if classes is not None and sorted(ends.values()) == sorted(map(str, classes)):
        return sorted(found, key=lambda name: list(map(str, classes)).index(ends[name]))
    return sorted(found, key=lambda name: int(ends[name])) if all(map(str.isdecimal, ends.values())) else found


def feature_columns(file: RowFile, others: Sequence[str | None]) -> list[str]:
    """The columns that are nothing else; raise ValueError if there is none."""
    features = [name for name in file.names if name not in others]
    if not features:
        raise ValueError(f"{str(file.path)!r} has no feature column besides the label {others[0]!r}.")
    return features


def label_values(column: Any) -> list[Any]:
    """Labels as plain values, None where missing; text that holds only whole numbers becomes whole numbers.

    >>> label_values(pa.array(["1", "0", ""])), label_values(pa.array(["1", "01"])), label_values(pa.array([1.0, 2.0]))
    ([1, 0, None], ['1', '01'], [1, 2])
    """
    texts = [None if text == ABSENT else text for text in category_texts(column.to_pylist()).tolist()]
    present = {text for text in texts if text is not None}
    # Leading zeros, as in a postal code, and numbers beyond 64 bits are names.
    if present and all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text) for text in present):
        return [None if text is None else int(text) for text in texts]
    return texts


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)


def _is_row_number(numbers: Array) -> bool:
    return bool(np.isfinite(numbers).all() and (np.diff(numbers) > 0).all() and (numbers == np.floor(numbers)).all())
