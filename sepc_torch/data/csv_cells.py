"""Cells of the CSV files that people open in a spreadsheet: text that looks like a formula is written as text.

A spreadsheet runs a cell such as ``=HYPERLINK(...)`` when the file is opened. An apostrophe before the text prevents
it. The readers of this package remove the apostrophe again, so that every text is read back as it was.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from numbers import Number
from typing import Any, Literal

# A spreadsheet reads text that starts with one of these characters as a formula. Apostrophes before such a character
# count too: else the text '=1, with its own apostrophe, could not be told from the escaped text =1.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")
# The first two are checked much faster than the abstract class, and most cells are one of them.
_NUMBERS = (float, int, Number)
_NUMERAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


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
