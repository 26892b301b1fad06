"""The writer of the pages' tables. A table is declared by its title, its rows in a stored result, and its columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

Row = dict[str, Any]
# A key of the row (nested keys with dots between them), or a function of the row.
Value = str | Callable[[Any], Any]
# Name, value and format of a column; the format is "{}" if it is left out.
Column = tuple[str, Value] | tuple[str, Value, str]


@dataclass(frozen=True)
class Table:
    """A table under its title; ``rows`` finds the rows in the result, and ``{key}`` in the title is a value of it."""

    title: str
    columns: Sequence[Column]
    rows: Value = "rows"

    def __call__(self, result: Row) -> str:
        return f"{self.title.format(**result)}:\n\n{table(value_of(result, self.rows), self.columns)}"


def table(rows: Iterable[Any], columns: Sequence[Column], *more: Sequence[str]) -> str:
    """A Markdown table with a line for every row; ``more`` are further lines, as texts."""
    body = [[_cell(row, *column[1:]) for column in columns] for row in rows]
    return text_table([column[0] for column in columns], [*body, *more])


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of texts."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows])


def value_of(row: Any, value: Value) -> Any:
    """A value of a row; None for a key that the row does not have."""
    if callable(value):
        return value(row)
    for key in value.split("."):
        row = row.get(key) if row else None
    return row


def _cell(row: Any, value: Value, form: str = "{}") -> str:
    """The text of a value: empty for None, and with spaces between thousands where the format has ``:,``."""
    found = value_of(row, value)
    text = "" if found is None else form.format(found)
    return text.replace(",", " ") if ":," in form else text


def spaced(number: float) -> str:
    """A whole number with spaces between thousands."""
    return f"{number:,.0f}".replace(",", " ")


def size(row: Row) -> str:
    """Rows, ellipsoids and dimensions of a measurement."""
    return f"{spaced(row['rows'])} x {row['ellipsoids']} x {row['dims']}"


def mean(values: Iterable[float]) -> float:
    """The mean of some numbers."""
    found = list(values)
    return sum(found) / len(found)


def interval(values: Sequence[float]) -> list[float]:
    """Mean and the ends of its 95 % interval by Student's t; the ends are the mean if there is one value.

    >>> [round(x, 3) for x in interval([0.0, 1.0, 2.0])]
    [1.0, -1.484, 3.484]
    """
    centre, count = mean(values), len(values)
    reach = float(stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / np.sqrt(count)) if count > 1 else 0.0
    return [centre, centre - reach, centre + reach]
