"""The columns of a table in a report: how far their values moved since the training, and the values of shown rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sepc_torch.data.table_encoding import NumberColumn, part_name
from sepc_torch.head.explanation import FeatureValue
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.report.record import ColumnDrift, ColumnShift, Value
from sepc_torch.report.rows import columns_of, shortened, take
from sepc_torch.report.sentences import CHANCE, figure, percent
from sepc_torch.shapes import Array, Float, Int

# Rows that are compared with the training rows: more take time and change little.
_MOST_ROWS = 20_000
# Columns in the table of shifts: a reader looks at the first few.
_MOST_COLUMNS = 20
# Values of a row on its card.
_MOST_VALUES = 8


class _Column(NamedTuple):
    """What is counted: its name, its features, and how to read them.

    ``categories`` is empty for numbers; ``number`` gives their unit, if the head has an encoding.
    """

    name: str
    features: list[int]
    number: NumberColumn | None
    categories: list[str]


def column_drift(head: TrustHead, z: Any, rows: int) -> ColumnDrift | None:
    """Compare the columns of rows with those of the training rows that the head keeps, each column by itself.

    The shift of a column is the total variation between the shares of its categories, or for numbers the largest
    difference of the two distribution functions: at least this share of the rows would have to change. The p-values are
    those of the chi-squared test and of the test of Kolmogorov and Smirnov; a column differs if its p-value is at most
    1 % divided by the number of columns.

    Args:
        head: A head.
        z: The rows, in any form that :meth:`TrustHead.judge` takes.
        rows: Their number.

    Returns:
        None if the head does not know the names of its columns, or keeps no training rows.
    """
    if head.evidence is None or head.feature_names is None:
        return None
    kept = head.evidence.reference_points
    if not len(kept.codes):
        return None
    chosen = np.sort(np.random.default_rng(0).permutation(rows)[:_MOST_ROWS])
    # Relative to the origin and in float32, as the head keeps the training rows: equal values stay equal.
    here = (head.as_tensor(take(z, chosen)).float() - kept.origin.float()).cpu().numpy()
    here = here[np.isfinite(here).all(axis=1)]
    if not len(here):
        return None
    training, origin = kept.offsets.float().cpu().numpy(), kept.origin.double().cpu().numpy()
    shifts = [_shift(column, training, here, origin) for column in _columns(head)]
    shifts = [shift._replace(differs=shift.p_value <= CHANCE / len(shifts)) for shift in shifts]
    shifts.sort(key=lambda shift: (not shift.differs, -shift.shift))
    differ = sum(shift.differs for shift in shifts)
    return ColumnDrift(shifts[:_MOST_COLUMNS], len(training), len(here), differ, len(shifts[_MOST_COLUMNS:]))


def _columns(head: TrustHead) -> list[_Column]:
    """The columns of a head in the order of its features; missing-value indicators are counted by themselves."""
    names = head.feature_names or ()
    if head.encoding is None:
        return [_Column(name, [j], None, []) for j, name in enumerate(names)]
    numbers = head.encoding.numbers
    found = [_Column(column.name, [j], column, []) for j, column in enumerate(numbers)]
    for column in numbers:
        if column.gaps:
            found.append(_Column(f"{column.name} is missing", [len(found)], None, ["(missing)"]))
    start = len(found)
    for each in head.encoding.categories:
        categories = [*each.categories, *["(other)"] * each.other]
        found.append(_Column(each.name, list(range(start, start + len(categories))), None, categories))
        start += len(categories)
    return found


def _shift(column: _Column, training: Array, here: Array, origin: Float[Array, "D"]) -> ColumnShift:
    """The shift of a column; ``differs`` is set later, when the number of columns is known."""
    from scipy.stats import chi2_contingency, ks_2samp

    a, b = training[:, column.features], here[:, column.features]
    name = shortened(column.name)
    if not column.categories:
        found = ks_2samp(a[:, 0], b[:, 0], method="asymp")
        start, scale, mean = float(origin[column.features[0]]), 1.0, 0.0
        if column.number is not None:
            scale, mean = column.number.scale, column.number.mean
        before, now = (float((side.mean(dtype=np.float64) + start) * scale + mean) for side in (a, b))
        wide, wide_now = (float(side.std(dtype=np.float64) * scale) for side in (a, b))
        shift, p_value = float(found.statistic), float(found.pvalue)
        return ColumnShift(name, None, before, now, wide, wide_now, shift, p_value, False)
    # Indicators of categories; what is left is a last category, such as a value that is not missing.
    counts = np.array([np.rint(side + origin[column.features]).sum(axis=0) for side in (a, b)])
    sizes = np.array([[len(a)], [len(b)]])
    counts = np.concatenate([counts, sizes - counts.sum(axis=1, keepdims=True)], axis=1)
    shares = counts / sizes
    most = int(np.abs(shares[1, :-1] - shares[0, :-1]).argmax())
    held = counts.sum(axis=0) > 0
    p_value = float(chi2_contingency(counts[:, held], correction=False).pvalue) if held.sum() > 1 else 1.0
    return ColumnShift(
        name=name,
        category=shortened(column.categories[most]),
        training=float(shares[0, most]),
        here=float(shares[1, most]),
        training_deviation=None,
        here_deviation=None,
        shift=float(0.5 * np.abs(shares[1] - shares[0]).sum()),
        p_value=p_value,
        differs=False,
    )


class ShownValues:
    """Values of rows, for their cards.

    Args:
        head: The head.
        table: The columns of all rows, or None to show the features of the head, if these have names.
        rows: The rows that are shown.
    """

    def __init__(self, head: TrustHead, table: Any, rows: Int[Array, "n"]) -> None:
        self.cells = None if table is None else columns_of(table, rows)
        dates = () if head.encoding is None else head.encoding.dates
        self._dates = {part_name(date.name, part): date.name for date in dates for part in date.parts}

    def of(self, i: int, features: Sequence[FeatureValue]) -> list[Value]:
        """The values of the i-th row, first those that differ most from training rows of its label.

        Args:
            i: The position of the row among the shown ones.
            features: Its features or columns, those first that differ most, as explanations name them.
        """
        found: dict[str, Value] = {}
        for feature in features:
            name = self._dates.get(feature.name, feature.name)
            if name in found or (self.cells is not None and name not in self.cells):
                continue
            if isinstance(feature.value, float) and feature.mean is not None:
                text, usual = figure(feature.value), f"mean {figure(feature.mean)} in its class"
            else:
                text = "(missing)" if feature.value is None else str(feature.value)
                usual = f"{percent(feature.share or 0.0)} of its class"
            if name != feature.name:  # a part of a date
                usual = f"{feature.name}: {usual}"
            if self.cells is not None:
                text = _text(self.cells[name][i])
            found[name] = Value(shortened(name), shortened(text), usual)
        for name, cells in (self.cells or {}).items():
            found.setdefault(name, Value(shortened(name), shortened(_text(cells[i])), ""))
        return list(found.values())[:_MOST_VALUES]


def _text(value: Any) -> str:
    """The text of a cell."""
    if value is None or value != value:  # NaN
        return "(missing)"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
