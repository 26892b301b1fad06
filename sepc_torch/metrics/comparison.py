"""Result of ``compare``: a table with a row per score and a column per metric."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sepc_torch.data.text import text_table
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.shapes import Array, Int

if TYPE_CHECKING:
    import pandas as pd


class _Column(NamedTuple):
    """Format of a metric in the printed table: title, factor, decimals, and whether higher is better."""

    title: str
    factor: float
    decimals: int
    more: bool


# Width of the printed advice, about that of the table.
_WIDTH = 110
# The keys are the names of the functions in sepc_torch.metrics.
_COLUMNS = {
    "aurc": _Column("AURC x1000", 1000.0, 2, more=False),
    "naurc": _Column("NAURC", 1.0, 3, more=False),
    "failure_auroc": _Column("AUROC mistakes", 1.0, 3, more=True),
    "ece": _Column("ECE", 1.0, 3, more=False),
    "accepted": _Column("accepted", 1.0, 3, more=True),
    "unknown_auroc": _Column("AUROC unknowns", 1.0, 3, more=True),
    "fpr95": _Column("FPR95", 1.0, 3, more=False),
    "scod_aurc": _Column("SCOD-AURC x1000", 1000.0, 2, more=False),
}


# What each question is called in the advice, its column, and the field of the head's prediction that answers it.
_QUESTIONS = (
    ("to find mistakes", "aurc", "confidence"),
    ("to find unknowns", "unknown_auroc", "nonconformity"),
    ("to find both", "scod_aurc", "joint"),
)
# Row of the scores that the head makes for each question.
_OURS = "SEP-C"


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Result of :func:`~sepc_torch.compare`; ``print`` shows a table that marks the best score of every column.

    Attributes:
        rows: One dictionary per score: the title of the score under ``"score"``, and a float under the name of every
            metric of :mod:`sepc_torch.metrics` (the printed table shows AURC times 1000). NaN if the metric is
            undefined for the score, or if the network made no mistake, or only mistakes. ``"accepted"`` is the share of
            the rows that the score accepts at a promised risk.
        standard_errors: The standard errors of the metrics, in the same form.
        accuracy: Fraction of the evaluated rows whose network label is right.
        judged: Indices of the test rows used for evaluation, ascending.
        unknown: Number of unknown rows used for evaluation.
        caption: Lines below the table: the rows used for evaluation, how to read the table, and the scores left out.
        head: The calibrated head, ready for use.
    """

    rows: list[dict[str, Any]]
    standard_errors: list[dict[str, Any]]
    accuracy: float
    judged: Int[Array, "B"]
    unknown: int
    caption: str
    head: TrustHead

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the metrics."""
        return tuple(self.rows[0])[1:]

    def best(self, column: str) -> str:
        """Title of the best score of a column; among equal scores, the first."""
        if column not in self.columns:
            raise ValueError(f"There is no column {column!r}; this comparison has {', '.join(self.columns)}.")
        value = self._best_value(column)
        if value is None:
            raise ValueError(
                f"No score has a value in column {column!r}: a ranking needs right and wrong labels, and the network's "
                f"accuracy is {self.accuracy:.0%} on the evaluated rows."
            )
        return str(next(row["score"] for row in self.rows if row[column] == value))

    def _best_value(self, column: str) -> float | None:
        values = [row[column] for row in self.rows if not math.isnan(row[column])]
        return (max if _COLUMNS[column].more else min)(values, default=None)

    @property
    def advice(self) -> str:
        """One sentence: which score to use for mistakes, for unknowns, and for both, on these data.

        It names the best of all other rows for comparison; that was chosen in hindsight, which a user of one score
        cannot.
        """
        parts = []
        for task, column, field in _QUESTIONS:
            if column not in self.columns:
                continue
            title, factor, decimals, more = _COLUMNS[column]
            own = (_OURS, f"{_OURS} {field}")  # the row of the joint score repeats it
            others = [row for row in self.rows if row["score"] not in own and not math.isnan(row[column])]
            ours = next(row[column] for row in self.rows if row["score"] == _OURS)
            if not others or math.isnan(ours):
                continue
            best = (max if more else min)(others, key=lambda row: row[column])
            mine, theirs = (f"{factor * value:.{decimals}f}" for value in (ours, best[column]))
            if mine == theirs or (ours > best[column]) == more:
                parts.append(f"{task}, use {field} ({title} {mine}; best other score: {best['score']}, {theirs})")
            else:
                parts.append(f"{task}, {best['score']} is better ({title} {theirs}; {field} {mine})")
        return f"On these data: {'; '.join(parts)}." if parts else "These data cannot tell which score to use."

    def __repr__(self) -> str:
        return (
            f"Comparison({len(self.rows)} scores, {len(self.judged)} test rows, {self.unknown} unknown rows, "
            f"accuracy {self.accuracy:.3f})"
        )

    def __str__(self) -> str:
        shown = []
        for name in self.columns:
            title, factor, decimals, _ = _COLUMNS[name]
            best = self._best_value(name)
            cells = [title + " "]
            for row in self.rows:
                value = row[name]
                text = "-" if math.isnan(value) else f"{factor * value:.{decimals}f}"
                cells.append(text + ("*" if value == best else " "))
            width = max(map(len, cells))
            shown.append([cell.rjust(width) for cell in cells])
        header, *lines = zip(*shown, strict=True)
        names = [row["score"] for row in self.rows]
        table = text_table(["score", *header], [[name, *line] for name, line in zip(names, lines, strict=True)])
        advice = textwrap.fill(self.advice, _WIDTH)
        return f"{table}\n\n{self.caption}\n{textwrap.fill(self._errors, _WIDTH)}\n\n{advice}"

    @property
    def _errors(self) -> str:
        """The standard errors of the first row, which are about those of the others, in words."""
        shown = [(_COLUMNS[name], self.standard_errors[0][name]) for name in self.columns]
        listed = [f"{c.title} {c.factor * value:.{c.decimals}f}" for c, value in shown if not math.isnan(value)]
        return f"Standard errors of {_OURS}: {', '.join(listed)}; of all rows: to_pandas()."

    def to_pandas(self) -> pd.DataFrame:
        """A DataFrame with a row per score, and for each metric a column and one of its standard error (``aurc_se``).

        pandas must be installed.
        """
        import pandas as pd

        found, errors = (pd.DataFrame(rows).set_index("score") for rows in (self.rows, self.standard_errors))
        return found.join(errors.add_suffix("_se"))
