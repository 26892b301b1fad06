"""Plain text tables, for the ``str`` of records and the command line."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format rows as a table: numeric columns are right-aligned, text columns left-aligned.

    >>> print(text_table(["class", "points"], [["benign", 357], ["malignant", 212]]))
    class      points
    benign        357
    malignant     212
    """
    cells = [[_text(cell) for cell in row] for row in rows]
    right = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(header))]
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]
    lines = []
    for line in [list(header), *cells]:
        padded = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _text(cell: object) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
