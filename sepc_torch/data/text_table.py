"""Text for terminals: plain text tables, and names without control characters."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


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
