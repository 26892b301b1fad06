"""Text for people and programs: tables, names without control characters, cells of CSV files, values for JSON."""

from __future__ import annotations

import csv
import math
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, Literal

# A spreadsheet runs a cell such as =HYPERLINK(...) when it opens a file; an apostrophe before the text prevents it, and
# our readers remove it. Text that starts with one of these characters is a formula. A spreadsheet skips NUL, and some
# versions read the full-width forms of = + - @ as the plain ones. Apostrophes before such a character count too: else
# the text '=1, with its own apostrophe, could not be told from the escaped text =1.
_FORMULA = re.compile("'*[=+\\-@\t\r\n\0\uff1d\uff0b\uff0d\uff20]")
# The first two are checked much faster than the abstract class, and most cells are one of them.
_NUMBERS = (float, int, Number)
_NUMERAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def text_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format rows as a table: numeric columns are right-aligned, text columns left-aligned.

    >>> print(text_table(["class", "points"], [["benign", 357], ["malignant", 212]]))
    class      points
    benign        357
    malignant     212
    """
    lines = [[printable(cell) for cell in header], *([_text(cell) for cell in row] for row in rows)]
    right = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(header))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    aligned = []
    for line in lines:
        padded = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True)]
        aligned.append("  ".join(padded).rstrip())
    return "\n".join(aligned)


def printable(value: object) -> str:
    r"""The text of a value, with escapes in place of control characters, which could change or hide other output.

    Every character that ``repr`` escapes is escaped, except spaces of other widths.

    >>> print(printable("red\x1b[31m\n"))
    red\x1b[31m\n
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _text(cell: object) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else printable(cell)


def escape_cell(value: Any) -> Any:
    """Put an apostrophe before a text that a spreadsheet would run as a formula; return other values unchanged.

    >>> [escape_cell(value) for value in ("=1+1", "@cat", "'=1", "cat", "it's", "-1.5e3", -2)]
    ["'=1+1", "'@cat", "''=1", 'cat', "it's", '-1.5e3', -2]
    """
    if isinstance(value, _NUMBERS):
        return value
    text = str(value)
    return f"'{text}" if _is_formula(text) else value


def unescape_cell(value: Any) -> Any:
    """The value that :func:`escape_cell` was called with, from its result.

    >>> [unescape_cell(value) for value in ("'=1+1", "'@cat", "''=1", "cat", "'tis", "-1.5e3", -2)]
    ['=1+1', '@cat', "'=1", 'cat', "'tis", '-1.5e3', -2]
    """
    escaped = isinstance(value, str) and value.startswith("'") and _is_formula(value[1:])
    return value[1:] if escaped else value


def quoting(cells: Iterable[Any]) -> Literal[0, 2]:
    r"""The ``quoting`` of a CSV writer for these cells: all text if a cell holds a carriage return, else where needed.

    Before Python 3.13 the ``csv`` module does not quote a carriage return, and readers start a new row there.

    >>> quoting(["a\n"]) == csv.QUOTE_MINIMAL, quoting(["a\r=1"]) == csv.QUOTE_NONNUMERIC
    (True, True)
    """
    returns = any(not isinstance(cell, _NUMBERS) and "\r" in str(cell) for cell in cells)
    return csv.QUOTE_NONNUMERIC if returns else csv.QUOTE_MINIMAL


def _is_formula(text: str) -> bool:
    return bool(_FORMULA.match(text)) and not _NUMERAL.fullmatch(text)


def to_json(value: Any, digits: int | None = None) -> Any:
    """A value as dictionaries, lists, text and numbers for JSON: NaN and infinity, which JSON lacks, become None.

    Named tuples become dictionaries, arrays and tensors lists, paths text. ``digits`` rounds numbers to significant
    digits.

    >>> to_json({"share": (1 / 3, math.nan)}, digits=3)
    {'share': [0.333, None]}
    """
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    elif hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): to_json(entry, digits) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(entry, digits) for entry in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if digits is None else float(f"{value:.{digits}g}")
    return os.fspath(value) if isinstance(value, os.PathLike) else value
