"""Thresholds with a promise for any score: :func:`accept_scores` needs scores, and which predictions are right."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from sepc_torch.data.options import check_not_negative
from sepc_torch.data.text import text_table
from sepc_torch.data.warn import warn_user
from sepc_torch.head.calibration.calibration import LEAST_CALIBRATION
from sepc_torch.head.calibration.label_calibration import risk_limits, two_digits
from sepc_torch.head.prediction import Promise
from sepc_torch.head.promises.conformal import (
    average_threshold,
    check_share,
    counts_above,
    flag_threshold,
    least_risk,
    points_needed,
    risk_threshold,
    upper_bounds,
)
from sepc_torch.head.promises.costs import CostRows, cheapest_thresholds, cost_bound, row_costs, unit_means
from sepc_torch.head.promises.groups import GroupPromise, promised_delta
from sepc_torch.head.promises.units import (
    UnitRows,
    candidates,
    least_unit_risk,
    unit_flag_threshold,
    unit_risk_threshold,
    units_needed,
)
from sepc_torch.head.reading.sources import row_ids
from sepc_torch.shapes import Array, Bool, Float, Int

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Groups that a legend names; more would cover the picture.
_NAMED_GROUPS = 10


class ScoreCurve(NamedTuple):
    """Risk over coverage of one group of rows, at hundredths of the scores from the highest down.

    Attributes:
        threshold: The thresholds.
        coverage: The share of the rows that each of them accepts.
        risk: The share of wrong predictions among the accepted ones.
        bound: Clopper-Pearson upper bound of the risk of each single threshold, for a risk at the level of the search
            for the threshold, otherwise at ``delta``; None for rows in units, which are not independent.
    """

    threshold: Float[Array, "T"]
    coverage: Float[Array, "T"]
    risk: Float[Array, "T"]
    bound: Float[Array, "T"] | None


@dataclass(frozen=True)
class ScoreAcceptance:
    """A rule that accepts predictions by their scores: the result of :func:`accept_scores`.

    Call it with new scores to decide. All shares are those of the rows that set the threshold or bound the cost; in
    units, every unit counts alike.

    Attributes:
        threshold: Scores of at least this value are accepted: inf accepts nothing, -inf all but NaN. None with ``by``.
        found: Whether the promise can be kept; if not, nothing is accepted (with ``by``, in no group).
        coverage: The share of the rows that are accepted.
        error: The share of the accepted rows whose prediction is wrong; NaN if none is accepted or ``right`` is None.
        points: The number of these rows.
        cost: The mean cost of a row; None without ``costs``. The promise has its bound.
        promise: The promise; ``str(promise)`` is the end of a sentence.
        groups: With ``by``, the threshold and the shares of each group.
        curves: The curve of each group, or of all rows; empty without ``right``.
    """

    threshold: float | None
    found: bool
    coverage: float
    error: float
    points: int
    cost: float | None
    promise: Promise
    groups: tuple[GroupPromise, ...]
    curves: tuple[ScoreCurve, ...] = field(repr=False)

    def __call__(self, score: Any, by: Any = None) -> Bool[Array, "B"]:
        """Return which of the new predictions to accept; never a score that is NaN or a group that was not given.

        Args:
            score: (B,) scores, computed as those before.
            by: (B,) groups of the predictions, if the rule is by group.
        """
        given = _numbers(score, "score")
        if (by is None) != (self.threshold is not None):
            raise ValueError(
                "This rule has a threshold for each group: pass by=, the group of each score."
                if by is None
                else "This rule has one threshold; leave out by=, or pass by= to accept_scores."
            )
        if self.threshold is not None:
            accepted: Bool[Array, "B"] = given >= self.threshold
            return accepted
        names = row_ids(by, len(given), "by")
        accepted = np.zeros(len(given), dtype=bool)
        for row in self.groups:
            accepted |= (names == row.group[0]) & (given >= row.threshold)
        return accepted

    def __str__(self) -> str:
        text = f"{self.coverage:.1%} of {self.points} rows are accepted"
        text += f" (score >= {self.threshold:.6g})" if self.found and self.threshold is not None else ""
        text += "" if math.isnan(self.error) else f"; {self.error:.1%} of the accepted ones are wrong"
        text += "." if self.cost is None else f". A row costs {self.cost:.3g} on average."
        text += f"\nPromise: {self.promise}."
        if not self.groups:
            return text
        rows = [[row.group[0], *row[1:5], "yes" if row.found else "no"] for row in self.groups]
        return f"{text}\n\n{text_table(list(GroupPromise._fields), rows)}"

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the risk over the coverage, its bound, the promised risk and what is accepted; needs Matplotlib.

        Args:
            ax: Axes to draw on; new axes by default.
        """
        if not self.curves:
            raise ValueError("The picture needs to know which predictions are right; pass right to accept_scores.")
        if ax is None:
            from matplotlib import pyplot

            ax = pyplot.subplots(figsize=(6.0, 4.0))[1]
        rows = self.groups or (GroupPromise((), self.points, 0.0, self.coverage, self.error, self.found),)
        for row, curve in zip(rows, self.curves, strict=True):
            name = ", ".join(map(str, row.group)) or "wrong among the accepted rows"
            line = ax.plot(curve.coverage, curve.risk, lw=2, label=name)[0]
            if curve.bound is not None:
                label = "upper bound" if not self.groups else None
                ax.plot(curve.coverage, curve.bound, color=line.get_color(), lw=1, ls=":", label=label)
            if row.coverage > 0:
                ax.plot([row.coverage], [row.error], "o", color=line.get_color(), mfc="white", ms=8, mew=2)
        if self.promise.risk is not None:
            ax.axhline(self.promise.risk, color="0.3", ls="--", lw=1.2, label=f"risk {self.promise.risk:.3g}")
        ax.set(xlim=(0, 1), ylim=(0, 1.3 * max(curve.risk.max(initial=0.0) for curve in self.curves) + 0.01))
        ax.set(xlabel="coverage: accepted share", ylabel="risk: wrong among the accepted")
        ax.grid(alpha=0.25)
        if len(rows) <= _NAMED_GROUPS:
            ax.legend(frameon=False, loc="upper left")
        return ax


class _Rows(NamedTuple):
    """Rows with their scores (NaN is refused), whether they are right, their groups, units and costs if accepted."""

    score: Float[Array, "n"]
    right: Bool[Array, "n"]
    group: Int[Array, "n"]
    unit: Int[Array, "n"]
    cost: Float[Array, "n"]

    def take(self, rows: Any) -> _Rows:
        """Some of the rows."""
        return _Rows(*(part[rows] for part in self))

    def in_units(self) -> UnitRows:
        """The rows for searches over units; NaN becomes -inf."""
        return UnitRows(np.where(np.isnan(self.score), -np.inf, self.score), self.right, self.unit)


def accept_scores(
    score: Any,
    right: Any = None,
    *,
    risk: float | None = None,
    delta: float = 0.05,
    flag_rate: float | None = None,
    by: Any = None,
    units: Any = None,
    costs: Any = None,
    review: float | None = None,
    average: bool = False,
) -> ScoreAcceptance:
    """Find the threshold of any score that keeps a promise about the accepted predictions.

    The rows must be drawn independently, as the rows in use, and must not have trained the model or fitted the score.
    Pass one of ``risk``, ``flag_rate`` and ``costs``. The searches, their promises and their proofs are those of
    :meth:`TrustHead.accept_at`.

    Args:
        score: (M,) scores, higher is safer: an array, a tensor, a list or a column of a table. Negate distances and
            uncertainties. A row whose score is NaN is refused, here and in use.
        right: (M,) booleans: whether the prediction of each row is right; for a detector of unknowns, whether the row
            is known. Only ``flag_rate`` does without.
        risk: The allowed share of wrong predictions among the accepted ones, with probability 1 - ``delta`` over these
            rows. If no threshold keeps it, nothing is accepted, and a warning says which risk could be promised.
        delta: The allowed probability that the promise of ``risk`` or ``costs`` fails.
        flag_rate: The share of rows like these that may be refused, on average.
        by: (M,) groups of the rows, integers or strings, such as predicted classes or hospitals. The risk then holds in
            every group at once, with a threshold for each. With ``costs``, a group has a threshold of its own where
            that is clearly cheaper.
        units: (M,) units of the rows, integers or strings, such as pictures or patients. Units must be drawn
            independently; the rows of a unit need not be. Half of the units, chosen at random, set the threshold of a
            risk in the order that the other half proposes.
        costs: The cost of accepting a wrong prediction, or (M,) costs of accepting each row; no row in use may cost
            more than the largest of them. A random half of the rows chooses the thresholds with the least mean cost;
            the other half bounds the expected cost.
        review: The cost of a refused row; needed with ``costs``.
        average: Promise ``risk`` on average over calibration sets, without ``delta``, as :meth:`TrustHead.accept_at`
            does. Not with ``by`` or ``units``.

    Returns:
        The rule: call it with new scores.

    >>> rng = np.random.default_rng(0)
    >>> score = rng.random(2000)
    >>> rule = accept_scores(score, rng.random(2000) < 0.5 + score / 2, risk=0.1)
    >>> print(rule.promise)
    at most 10 % of the accepted labels are wrong, with probability 95 % over calibration sets
    >>> 0.6 < rule.threshold < 0.75, rule.error < 0.1
    (True, True)
    >>> rule([0.95, 0.2, float("nan")])
    array([ True, False, False])
    """
    if sum(given is not None for given in (risk, flag_rate, costs)) != 1:
        raise ValueError("Pass exactly one of risk, flag_rate and costs.")
    if (costs is None) != (review is None):
        raise ValueError("costs are those of accepted rows, review is that of a refused one: pass both.")
    if by is not None and (flag_rate is not None or (units is not None and risk is not None)):
        raise ValueError("by keeps a risk in every group of independent rows; leave out flag_rate and units, or by.")
    if average and (risk is None or by is not None or units is not None):
        raise ValueError("average=True is for a risk over independent rows: leave out flag_rate, costs, by and units.")
    for name, share in (("risk", risk), ("flag_rate", flag_rate), ("delta", delta)):
        if share is not None:
            check_share(share, name)
    rows, names = _checked(score, right, by, units, costs, flag_rate is not None)
    over = units is not None and len(np.unique(rows.unit)) < len(rows.unit)  # units of one row are rows
    promise = Promise(
        risk, delta, flag_rate, None if by is None or risk is None else "group", units=over, average=average
    )
    levels, mean = np.full(len(names), delta), None
    if costs is not None:
        price = check_not_negative(review, "review")
        choosing, rows = _halves(rows)
        thresholds = cheapest_thresholds(_cost_rows(choosing), price, len(names))
        judged = _cost_rows(rows)
        paid = unit_means(row_costs(judged, thresholds, price), rows.unit)
        possible = (
            [price] if np.isinf(thresholds).all() else [price, 0.0, float(max(rows.cost.max(), choosing.cost.max()))]
        )
        mean = float(paid.mean())
        number = float(costs) if np.ndim(costs) == 0 else None
        bound = cost_bound(paid, min(possible), max(possible), delta)
        promise = promise._replace(costs=number, review=price, bound=bound)
    elif flag_rate is not None:
        thresholds = np.array([_flag_threshold(rows, flag_rate, over)])
    elif average:
        assert risk is not None
        known = rows.take(~np.isnan(rows.score))
        thresholds = np.array([average_threshold(torch.from_numpy(known.score), torch.from_numpy(known.right), risk)])
        if thresholds[0] == math.inf:
            less = "Pass more rows, a larger risk or another score."
            warn_user(f"Nothing is accepted: no threshold keeps a risk of {risk:g} on average. {less}")
    elif over:
        assert risk is not None
        fitted, rows = _halves(rows)
        thresholds = np.array([_unit_threshold(rows.in_units(), fitted.in_units(), risk, delta)])
    else:
        assert risk is not None
        thresholds, levels = _risk_thresholds(rows, names, risk, delta)
    if risk is not None:
        promise = promise._replace(found=bool((thresholds < math.inf).any()))
    return _described(rows, thresholds, names if by is not None else None, promise, mean, levels, right is not None)


def _checked(score: Any, right: Any, by: Any, units: Any, costs: Any, flagging: bool) -> tuple[_Rows, list[Any]]:
    """The rows, checked, and the names of their groups."""
    values = _numbers(score, "score")
    count = len(values)
    if count == 0:
        raise ValueError("There are no scores; pass rows that the model was not trained on.")
    if right is None and not flagging:
        raise ValueError("A risk and costs need right, whether each prediction is right; only flag_rate does without.")
    flags = np.ones(count, dtype=bool) if right is None else _booleans(right)
    if len(flags) != count:
        raise ValueError(f"Got {count} scores and {len(flags)} values of right; pass one of each for every row.")
    known = values[~np.isnan(values)]
    if len(known) == 0 or (known == known[0]).all():
        what = "All scores are NaN" if len(known) == 0 else f"All scores are equal ({known[0]:g})"
        raise ValueError(f"{what}, so that no threshold tells rows apart; pass another score.")
    if not flags.any():
        raise ValueError("No prediction is right. Is right inverted? It must be True where the prediction is right.")
    names, group = np.unique(
        np.zeros(count, dtype=int) if by is None else row_ids(by, count, "by"), return_inverse=True
    )
    unit = np.arange(count) if units is None else np.unique(row_ids(units, count, "units"), return_inverse=True)[1]
    cost = _row_prices(costs, flags) if costs is not None else np.zeros(count)
    return _Rows(values, flags, group, unit, cost), names.tolist()


def _row_prices(costs: Any, right: Bool[Array, "M"]) -> Float[Array, "M"]:
    """The cost of accepting each row."""
    if np.ndim(costs) == 0:
        return np.where(right, 0.0, check_not_negative(costs, "costs"))
    given = _numbers(costs, "costs")
    if len(given) != len(right):
        raise ValueError(
            f"costs must be the cost of a wrong prediction as a number, or a cost for each of the {len(right)} rows; "
            f"got {len(given)} costs."
        )
    if not (np.isfinite(given) & (given >= 0)).all():
        raise ValueError("costs must be finite numbers of at least 0; add a constant to all of them and to review.")
    return given


def _halves(rows: _Rows) -> tuple[_Rows, _Rows]:
    """Two random halves of the units, always the same for the same units."""
    units, unit = np.unique(rows.unit, return_inverse=True)
    if len(units) < LEAST_CALIBRATION:
        raise ValueError(
            f"{len(units)} rows or units are too few: one half chooses the thresholds, and the other half is what the "
            f"promise rests on. Pass at least {LEAST_CALIBRATION}."
        )
    first = (np.random.default_rng(0).permutation(len(units)) < len(units) // 2)[unit]
    return rows.take(first), rows.take(~first)


def _cost_rows(rows: _Rows) -> CostRows:
    return CostRows(rows.score, rows.cost, rows.group, rows.unit)


def _flag_threshold(rows: _Rows, flag_rate: float, over_units: bool) -> float:
    """The threshold of a flag rate; a row without a score counts as refused."""
    score = rows.in_units().score
    found = (
        unit_flag_threshold(score, rows.unit, flag_rate)
        if over_units
        else flag_threshold(torch.from_numpy(score), flag_rate)
    )
    missing = int(np.isnan(rows.score).sum())
    if found == -math.inf and missing:
        raise ValueError(
            f"{missing} of {len(score)} scores are NaN, and such rows are refused: these rows cannot promise a flag "
            f"rate of {flag_rate:g}. Choose a larger one, pass more rows, or score all rows."
        )
    return found


def _risk_thresholds(
    rows: _Rows, names: list[Any], risk: float, delta: float
) -> tuple[Float[Array, "G"], Float[Array, "G"]]:
    """The threshold of each group, found by the search of heads, and the level of its search.

    Rows without a score are left out: they are never accepted, and the risk is that of the accepted rows.
    """
    known = rows.take(~np.isnan(rows.score))
    sizes = np.bincount(known.group, minlength=len(names))
    share = promised_delta(sizes, risk, delta)
    parts = [known.take(known.group == g) for g in range(len(names))]
    found = [
        risk_threshold(torch.from_numpy(part.score), torch.from_numpy(part.right), risk, share)
        if len(part.score)
        else None
        for part in parts
    ]
    thresholds = np.array([math.inf if one is None else one.threshold for one in found])
    lacking = np.flatnonzero(thresholds == math.inf)
    if len(lacking):
        g = int(lacking[sizes[lacking].argmax()])
        few = _shortfall(parts[g], risk, share)
        if len(names) == 1:
            text = f"Nothing is accepted: {few}"
        else:
            text = (
                f"The risk {risk:g} cannot be promised in {len(lacking)} of {len(names)} groups, of which nothing is "
            )
            text += f"accepted. For example, group {names[g]}: {few}"
        warn_user(text)
    return thresholds, np.array([share if one is None else one.level for one in found])


def _shortfall(rows: _Rows, risk: float, delta: float) -> str:
    """Which risk independent rows can promise, and how many more the wanted one needs."""
    if not len(rows.score):
        return "it has no rows with a score."
    _, accepted, errors = counts_above(torch.from_numpy(rows.score), torch.from_numpy(rows.right))
    needed = points_needed(errors, accepted, risk, delta)
    more = None if needed is None else two_digits(max(needed - len(rows.score), 1))
    return risk_limits(f"{len(rows.score)} rows", risk, least_risk(errors, accepted, delta), more, "rows")


def _unit_threshold(ranked: UnitRows, fitted: UnitRows, risk: float, delta: float) -> float:
    """The threshold of a risk over units; rows without a score are never accepted."""
    proposed = candidates(fitted.score)
    proposed = proposed[proposed > -np.inf]
    found = unit_risk_threshold(ranked, fitted, proposed, risk, delta) if len(proposed) else math.inf
    if found == math.inf and len(proposed):
        needed = units_needed(ranked, proposed, risk, delta)
        units = len(np.unique(ranked.unit))
        more = None if needed is None else two_digits(2 * max(needed - units, 1))
        least = least_unit_risk(ranked, fitted, proposed, delta)
        text = risk_limits(f"{units} units that set the threshold", risk, least, more, "units")
        warn_user(f"Nothing is accepted: {text}")
    return found


def _described(
    rows: _Rows,
    thresholds: Float[Array, "G"],
    names: list[Any] | None,
    promise: Promise,
    cost: float | None,
    levels: Float[Array, "G"],
    labelled: bool,
) -> ScoreAcceptance:
    """The rule of thresholds, with the shares and curves of the rows."""
    accepted = rows.score >= thresholds[rows.group]
    coverage, error = _shares(rows, accepted)
    groups, parts = [], [rows]
    if names is not None:
        masks = [rows.group == g for g in range(len(names))]
        parts = [rows.take(mask) for mask in masks]
        for name, part, mask, threshold in zip(names, parts, masks, thresholds.tolist(), strict=True):
            of_group = _shares(part, accepted[mask])
            groups.append(GroupPromise((name,), len(part.score), threshold, *of_group, threshold < math.inf))
    curves = []
    if labelled:
        wanted = [None] * len(parts) if promise.units else levels.tolist()
        curves = [_curve(part, level) for part, level in zip(parts, wanted, strict=True)]
    return ScoreAcceptance(
        threshold=float(thresholds[0]) if names is None else None,
        found=promise.found,
        coverage=coverage,
        error=error if labelled else math.nan,
        points=len(rows.score),
        cost=cost,
        promise=promise,
        groups=tuple(groups),
        curves=tuple(curves),
    )


def _weights(rows: _Rows) -> Float[Array, "n"]:
    """Weights of the rows that sum to one, the same for every unit."""
    _, unit, sizes = np.unique(rows.unit, return_inverse=True, return_counts=True)
    return 1.0 / (sizes[unit] * len(sizes))


def _shares(rows: _Rows, accepted: Bool[Array, "n"]) -> tuple[float, float]:
    """The share of accepted rows, and of wrong ones among them; NaN for the share of nothing."""
    if not len(rows.score):
        return math.nan, math.nan
    coverage, wrong = (
        float(unit_means(flags.astype(float), rows.unit).mean()) for flags in (accepted, accepted & ~rows.right)
    )
    return coverage, wrong / coverage if coverage else math.nan


def _curve(rows: _Rows, level: float | None) -> ScoreCurve:
    """The curve of some rows; without a level it has no bound."""
    known = ~np.isnan(rows.score)
    order = np.flatnonzero(known)[np.argsort(-rows.score[known], kind="stable")]
    if not len(order):
        return ScoreCurve(np.zeros(0), np.zeros(0), np.zeros(0), None)
    weight = _weights(rows)[order]
    thresholds = candidates(rows.score[known])
    last = len(order) - np.searchsorted(rows.score[order][::-1], thresholds) - 1
    coverage = weight.cumsum()[last]
    wrong = (weight * ~rows.right[order]).cumsum()[last]
    bound = None
    if level is not None:
        bound = upper_bounds((~rows.right[order]).cumsum()[last], last + 1, level)
    return ScoreCurve(thresholds, coverage, wrong / coverage, bound)


def _numbers(values: Any, name: str) -> Float[Array, "M"]:
    """A column of numbers as float64."""
    given = values.detach().cpu().double() if isinstance(values, torch.Tensor) else values
    found = np.asarray(given)
    if found.dtype.kind not in "fiu":
        raise TypeError(f"{name} must hold numbers, got {found.dtype}; convert it with astype(float) first.")
    if found.ndim != 1:
        raise ValueError(f"{name} must have the shape (rows,), a number for each row; got the shape {found.shape}.")
    return found.astype(np.float64)


def _booleans(right: Any) -> Bool[Array, "M"]:
    """Whether each prediction is right, as booleans; nothing else is taken for them."""
    given = right.detach().cpu() if isinstance(right, torch.Tensor) else right
    found = np.asarray(given)
    if found.dtype == object and all(isinstance(value, (bool, np.bool_)) for value in found.ravel()):
        found = found.astype(bool)
    if found.dtype != bool:
        raise TypeError(f"right must hold booleans, got {found.dtype}; use predicted == true.")
    if found.ndim != 1:
        raise ValueError(f"right must have the shape (rows,), a boolean for each row; got the shape {found.shape}.")
    return found
