"""Columns of a file of rows: which are features, labels, logits and ids, and their cells as arrays."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sepc_torch.cli.row_files import RowFile, is_text
from sepc_torch.cli.shell import named, note, shortened
from sepc_torch.data.labels import check_label_texts
from sepc_torch.data.table_encoding import (
    ABSENT,
    MISSING,
    DateOrder,
    Decimal,
    Encoded,
    TableEncoding,
    category_texts,
    note_problems,
    parse_dates,
    parse_numbers,
    plain_number,
)
from sepc_torch.shapes import Array, Int

# A column of text with more different texts than this share of its rows is free text, not a category.
_MOST_DISTINCT = 0.5
# A column of text of which at least this share are numbers is meant to be a column of numbers.
_MOSTLY_NUMBERS = 0.5
# Above this share of numbers the other cells are few, and named so.
_ALMOST_ALL = 0.9
# Texts that are no numbers are suggested as missing values if they are so few different ones.
_MISSING_TEXTS = 3
# Fewer rows can be distinct by chance.
_LEAST_DISTINCT = 20
# Dates such as 2024-01-31, 2024/1/31, 31.01.2024 and 1/31/24, alone or before a time of day.
_DATE = re.compile(r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3(\d{4}|\d{2}))([T ]\d{1,2}:\d{2}.*)?")
# A comma that cannot be a thousands separator: other than three digits after it, a zero or four digits before it.
_FRACTION = re.compile(r"\d,(\d{1,2}|\d{4,})\D*$|(?<![\d,.])0,\d|\d{4,},\d")
# Names of columns whose numbers are often names.
_CODE = re.compile(
    r"(^|[^a-z])(zip|zipcode|postcode|postal|plz|code|agent|company|store|branch|region)([^a-z]|$)", re.I
)
# Leading zeros, as in a postal code, and numbers beyond 64 bits are names.
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")
# Most cells that are parsed in one call: enough that the calls cost little, and 100 MB of temporary text.
_CELLS = 2**21
_DATE_ADVICE = "replace it by numbers that matter, such as the hour or the length in days"


class Survey(NamedTuple):
    """The feature columns of a training table.

    Attributes:
        numbers: Columns of numbers.
        categories: Columns of categories.
        unusable: For the columns that cannot be used, what is wrong and which option helps.
        suspicious: Columns of numbers that look like an id.
        dates: Columns of dates, with the order of year, month and day.
        decimals: The decimal mark of columns of numbers with currency, spaces or thousands.
        left_out: Columns that say nothing, with the reason.
        codes: Columns of numbers that look like names.
    """

    numbers: list[str]
    categories: list[str]
    unusable: dict[str, str]
    suspicious: list[str]
    dates: dict[str, DateOrder]
    decimals: dict[str, Decimal]
    left_out: dict[str, str]
    codes: list[str]

    @property
    def used(self) -> list[str]:
        """The columns that are features."""
        return [*self.numbers, *self.dates, *self.categories]


def cells(column: Any) -> Array:
    """A column of an Arrow table as a NumPy array: numbers (NaN where missing) or objects (None where missing).

    Booleans become the texts that CSV files have.

    >>> cells(pa.chunked_array([[1, None]])), cells(pa.chunked_array([["a", None]])), cells(pa.chunked_array([[True]]))
    (array([ 1., nan]), array(['a', None], dtype=object), array(['True'], dtype=object))
    """
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_boolean(column.type):
        column = pc.if_else(column, "True", "False")
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    return np.asarray(column.to_numpy())


def names_in(column: Any) -> Any:
    """A column of names, such as categories and labels, in which whole numbers have no fraction.

    Text files write the number 1 as ``1`` or as ``1.0``; in files with types it is one number.

    >>> names_in(pa.chunked_array([["1.0", "01.0", "1.5", "a", None]])).to_pylist()
    ['1', '01.0', '1.5', 'a', None]
    """
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return pc.replace_substring_regex(column, rf"^({_WHOLE.pattern})\.0+$", r"\1") if is_text(column.type) else column


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
    if not is_text(kind):  # a boolean among numbers is 0 or 1
        return [cells(column.cast(pa.float64()) if pa.types.is_boolean(kind) else column) for column in columns]
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


def table_columns(
    table: pa.Table,
    names: Sequence[str],
    numbers: Sequence[str],
    missing: Sequence[str],
    categories: Collection[str] = (),
) -> dict[str, Any]:
    """Columns of a table as arrays; those that should hold numbers are parsed, categories are names."""
    chosen = set(numbers)
    texts = [name for name in names if name in chosen]
    parsed = dict(zip(texts, number_columns([table.column(name) for name in texts], frozenset(missing)), strict=True))
    others = {name: table.column(name) for name in names if name not in parsed}
    found = {name: cells(names_in(column) if name in categories else column) for name, column in others.items()}
    return {name: parsed[name] if name in parsed else found[name] for name in names}


def encoded_rows(table: pa.Table, names: Sequence[str], encoding: TableEncoding | None) -> Encoded:
    """Columns of a table as points; without an encoding they are plain numbers, and a missing value is a problem."""
    if encoding is not None:
        numbers = [column.name for column in encoding.numbers if column.name in names and not column.decimal]
        categories = {column.name for column in encoding.categories}
        return encoding.encode(table_columns(table, names, numbers, encoding.missing, categories))
    problems: dict[int, str] = {}
    parts = []
    for name, column in table_columns(table, names, names, MISSING).items():
        values, wrong = parse_numbers(column, frozenset(MISSING))
        note_problems(problems, name, column, wrong)
        for row in np.flatnonzero(np.isnan(values) & ~wrong).tolist():
            problems.setdefault(row, f"{name}: the value is missing")
        parts.append(values)
    return Encoded(np.stack(parts, axis=1), problems, {}, {})


def survey(
    table: pa.Table,
    rows: Array,
    features: Sequence[str],
    categorical: Sequence[str],
    missing: frozenset[str],
    decimal: Decimal = "",
) -> Survey:
    """Sort the feature columns by what they hold; ``rows`` are the numbers of the table's rows in the file."""
    found = Survey([], [], {}, [], {}, {}, {}, [])
    for name in features:
        column = table.column(name)
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        drop = f"--drop {shlex.quote(name)}"
        problem = _other_type(kind, drop)
        if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
            found.dates[name] = "ymd"
        elif problem is not None:
            found.unusable[name] = problem
        elif name in categorical:
            found.categories.append(name)
        elif is_text(kind) and decimal:
            _survey_column(found, name, cells(column), rows, missing, decimal)
        else:
            values = cells(column) if pa.types.is_boolean(kind) else number_cells(column, missing)
            _survey_column(found, name, values, rows, missing, "")
    for name in list(found.dates):
        days, wrong = parse_dates(cells(table.column(name)), found.dates[name], missing)
        if wrong.any():
            del found.dates[name]
            found.unusable[name] = f"holds dates before year 0 or after year 9999 (--drop {shlex.quote(name)})"
        elif np.isnan(days).all() or days.min() == days.max():
            del found.dates[name]
            found.left_out[name] = "it holds no value" if np.isnan(days).all() else "it holds a single date"
    return found


def _survey_column(
    found: Survey, name: str, values: Array, rows: Array, missing: frozenset[str], mark: Decimal
) -> None:
    """Add a column of numbers or text to what was found."""
    drop = f"--drop {shlex.quote(name)}"
    numbers, wrong = parse_numbers(values, missing, mark)
    present = int(np.count_nonzero(~np.isnan(numbers) | wrong))
    bad = int(wrong.sum())
    if not present:
        found.left_out[name] = "it holds no value"
        return
    texts = [] if not bad else sorted(set(category_texts(values, missing).tolist()) - {ABSENT})
    if bad and not mark and (mark := _decimal_mark(texts)):
        numbers, wrong = parse_numbers(values, missing, mark)
        bad = int(wrong.sum())
    if not bad:
        if present == len(numbers) and numbers.min() == numbers.max():
            found.left_out[name] = f"it holds the single value {numbers[0]:g}"
            return
        found.numbers.append(name)
        if mark and values.dtype == object:
            found.decimals[name] = mark
        elif _is_id(numbers):
            found.suspicious.append(name)
        elif _is_code(name, numbers):
            found.codes.append(name)
        return
    dates = _date_order(texts) if all(map(_DATE.fullmatch, map(str.strip, texts))) else None
    if dates is not None:
        found.dates[name] = dates
    elif values.dtype != object or bad < _MOSTLY_NUMBERS * present:
        first = int(wrong.argmax())
        cell = values[first] if isinstance(values[first], str) else float(values[first])
        others = set(values[wrong].tolist())
        suggest = isinstance(cell, str) and len(others) <= _MISSING_TEXTS
        helping = f"--missing {shlex.quote(str(cell))}, " if suggest else ""
        helping += f"--categorical {shlex.quote(name)}, or {drop}"
        what = "is almost numeric, but" if bad < (1 - _ALMOST_ALL) * present else "mixes numbers and text:"
        few = "cell is" if bad == 1 else "cells are"
        found.unusable[name] = (
            f"{what} {bad} {few} no finite number, such as {shortened(cell)} in row {rows[first]} ({helping})"
        )
    elif len(texts) == present and present > 1:
        found.unusable[name] = (
            f"holds a different text in every row, like an id (--id {shlex.quote(name)}, which leaves it out and names "
            f"the rows, or {drop})"
        )
    elif len(texts) > _MOST_DISTINCT * present:
        helping = f"{drop}, or --categorical {shlex.quote(name)} to use the most frequent ones"
        found.unusable[name] = f"holds {len(texts)} different texts in {present} rows ({helping})"
    elif len(texts) == 1 and present == len(values):
        found.left_out[name] = f"it holds the single value {shortened(texts[0])}"
    else:
        found.categories.append(name)


def _decimal_mark(texts: Collection[str]) -> Decimal:
    """The decimal mark of texts that are all numbers with currency, spaces or thousands; empty for other texts."""
    for mark in (",", ".") if any(map(_FRACTION.search, texts)) else (".",):
        assert mark in get_args(Decimal)
        if all(map(_is_plain, (plain_number(text, mark) for text in texts))):
            return mark
    return ""


def _is_plain(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _date_order(texts: Iterable[str]) -> DateOrder | None:
    """The order of year, month and day in dates; None if no order fits to all of them."""
    texts = [text.strip() for text in texts]
    first: tuple[DateOrder, ...] = ("mdy", "dmy") if any("/" in text for text in texts) else ("dmy", "mdy")
    orders: tuple[DateOrder, ...] = ("ymd", *first) if all(re.match(r"\d{4}", text) for text in texts) else first
    return next((order for order in orders if not parse_dates(texts, order)[1].any()), None)


def notes_on_columns(found: Survey) -> None:
    """Point out columns that were left out or read in a special way, and those that look like ids or names."""
    for name, why in found.left_out.items():
        note(f"column {name!r} is left out: {why}")
    for name in found.suspicious:
        quoted = shlex.quote(name)
        note(
            f"column {name!r} holds a different whole number in every row. If it is an id or a row number, new rows "
            f"would all look strange: --id {quoted} leaves it out and names the rows by it, or pass --drop"
        )
    for name in found.codes:
        note(f"column {name!r} is read as numbers; if they are names, pass --categorical {shlex.quote(name)}")
    for name, mark in found.decimals.items():
        note(f"column {name!r} is read as numbers with the decimal mark {mark!r}, without currency and thousands")
    for name, order in found.dates.items():
        spelt = "-".join({"y": "year", "m": "month", "d": "day"}[letter] for letter in order)
        note(
            f"column {name!r} is read as dates ({spelt}): the model sees year, month, weekday and age in days. Later "
            f"dates lie outside the training rows; --drop {shlex.quote(name)} if the date should not matter"
        )


def refuse_other_types(file: RowFile, table: pa.Table, features: Sequence[str]) -> None:
    """Raise ValueError if a column of features holds neither numbers nor text."""
    problems = {name: _other_type(table.column(name).type, f"--drop {shlex.quote(name)}") for name in features}
    refuse_unusable(file, {name: problem for name, problem in problems.items() if problem is not None})


def _other_type(kind: pa.DataType, drop: str) -> str | None:
    """What is wrong with a column of this type, and the option ``drop`` that helps; None for numbers and text."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_temporal(kind):
        return f"holds dates or times ({_DATE_ADVICE}, or {drop})"
    return None if _is_number(kind) or is_text(kind) else f"holds {kind}, neither numbers nor text ({drop})"


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


def model_columns(file: RowFile, names: Sequence[str] | None, number: int, others: Sequence[str | None]) -> list[str]:
    """The columns with the features of a model, by name, or by position without the columns ``others``."""
    if names is not None:
        file.require(names)
        return list(names)
    found = [name for name in file.names if name not in others]
    if len(found) != number:
        raise ValueError(
            f"{str(file.path)!r} has {len(found)} feature columns and the model has {number} features, which are "
            f"matched by position because the model or the file has no names; the columns are {named(found)}."
        )
    return found


def label_values(
    column: Any, name: str = "the label column", missing: frozenset[str] = frozenset(MISSING)
) -> list[Any]:
    """Labels as plain values, None where missing; text that holds only whole numbers becomes whole numbers.

    >>> label_values(pa.array(["1", "0", ""])), label_values(pa.array(["1", "01"])), label_values(pa.array([1.0, 2.0]))
    ([1, 0, None], ['1', '01'], [1, 2])
    """
    texts = label_texts(column, missing)
    present = {text for text in texts if text is not None}
    check_label_texts(present, name)
    if present and all(map(_WHOLE.fullmatch, present)):
        return [None if text is None else int(text) for text in texts]
    return texts


def whole_numbers(column: Any) -> Any:
    """A column of text as int64, null where a text is no whole number.

    >>> whole_numbers(pa.chunked_array([["7", "07", None]])).to_pylist()
    [7, None, None]
    """
    return pc.if_else(pc.match_substring_regex(column, f"^({_WHOLE.pattern})$"), column, None).cast(pa.int64())


def label_texts(column: Any, missing: frozenset[str] = frozenset(MISSING)) -> list[str | None]:
    """Labels as text, None where missing."""
    texts = category_texts(names_in(column).to_pylist(), missing).tolist()
    return [None if text == ABSENT else text for text in texts]


def class_names(classes: Sequence[Any], codes: Int[Array, "n"]) -> Any:
    """The labels with these indices as an Arrow array, null where an index is negative.

    Labels of several types, such as 1 and "one", are written as text.

    >>> class_names(["cat", 1], np.array([1, -1, 0])).to_pylist()
    ['1', None, 'cat']
    """
    names = classes if len(set(map(type, classes))) == 1 else [str(name) for name in classes]
    return pa.array(names).take(pa.array(codes, mask=codes < 0))


class IdColumns:
    """The columns of a file that identify the rows of its scores; by default the row numbers.

    Args:
        file: The file.
        names: Names of the columns.
        typed: Whether the output has types. Texts that are all whole numbers then become whole numbers, for which the
            whole file is read.
    """

    def __init__(self, file: RowFile, names: Sequence[str], typed: bool) -> None:
        self.names = list(dict.fromkeys(names))
        file.require(self.names)
        self._whole = list(self.names) if typed else []
        for piece in file.pieces(self._whole) if self._whole else ():
            self._whole = [name for name in self._whole if _holds_whole_numbers(piece.table.column(name))]
            if not self._whole:
                break

    def beside(self, table: pa.Table, scores: dict[str, Any], start: int) -> pa.Table:
        """The scores of the rows of a table beside their identifiers; ``start`` is the number of the first row."""
        clash = sorted(set(self.names) & set(scores))
        if clash:
            raise ValueError(f"--id {clash[0]!r} is also the name of a score; rename the column or leave out --id.")
        if not self.names:
            return pa.table({"row": pa.array(np.arange(start, start + table.num_rows)), **scores})
        copied = {name: table.column(name) for name in self.names}
        return pa.table({**copied, **{name: whole_numbers(copied[name]) for name in self._whole}, **scores})


def _holds_whole_numbers(column: Any) -> bool:
    if not is_text(column.type):
        return False
    return not whole_numbers(column.filter(pc.not_equal(column, ""))).null_count


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)


def _is_id(numbers: Array) -> bool:
    """Whether numbers are whole and all different."""
    whole = len(numbers) >= _LEAST_DISTINCT and bool((numbers == np.floor(numbers)).all())
    return whole and len(np.unique(numbers)) == len(numbers)


def _is_code(name: str, numbers: Array) -> bool:
    """Whether a column of several whole numbers has the name of a column of codes."""
    known = numbers[~np.isnan(numbers)]
    return bool(_CODE.search(name)) and bool((known == np.floor(known)).all()) and len(np.unique(known)) > 2
