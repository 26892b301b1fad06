r"""Thresholds of least expected cost, with a bound of that cost.

Accepting the label of a row costs :math:`c`, such as an entry of a matrix of costs, and refusing it costs :math:`q`,
the price of a review. With the threshold :math:`t_g` of the group g of a row (its predicted class), the row costs

.. math:: Y = c \, [s \ge t_g] + q \, [s < t_g] \in [0, m].

Rows that fit the score choose the thresholds (:func:`cheapest_thresholds`); the ranked rows bound the expected cost
(:func:`cost_bound`). Proof that the bound holds with probability at least :math:`1 - \delta`: the thresholds do not
depend on ranked rows, so given the thresholds the costs of the ranked rows are independent draws of Y, and the bound is
valid for the mean of such draws. However many thresholds were compared, there is nothing to correct for. In units the
same holds for the mean cost of the rows of a unit.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from sepc_torch.head.promises.conformal import check_share
from sepc_torch.head.promises.units import UnitShares, log_capital
from sepc_torch.shapes import Array, Float, Int

# Parts of the rows that choose the thresholds; each part judges thresholds of the others.
_PARTS = 5
# Standard errors by which a threshold of its own must be cheaper: of groups alike, about one in forty then has one.
_CLEARLY = 2.0
# Steps of the bisection of the bound: its error is at most 2^-20 of the largest cost, on the safe side.
_HALVINGS = 20


class CostAcceptance(NamedTuple):
    """Acceptance at the least expected cost; costs are means over the ranked points.

    If the calibration points came in units, every unit counts alike in all shares and costs.

    Attributes:
        thresholds: The head accepts joint scores of at least this value: one for all points, or one for each predicted
            class, in the order of the classes. inf accepts nothing.
        coverage: The share of the ranked points that are accepted.
        error: The share of the accepted points whose label is wrong; NaN if no point is accepted.
        points: The number of ranked points.
        cost: The mean cost of a point.
        bound: Upper bound of the expected cost of a new point; it holds with probability 1 - ``delta``.
        cost_of_all: The mean cost of a point if every label were accepted. If all were refused, it is ``review``.
    """

    thresholds: tuple[float, ...]
    coverage: float
    error: float
    points: int
    cost: float
    bound: float
    cost_of_all: float


class CostRows(NamedTuple):
    """Rows with their scores (NaN is never accepted), the costs of accepting them, their groups and their units."""

    score: Float[Array, "n"]
    cost: Float[Array, "n"]
    group: Int[Array, "n"]
    unit: Int[Array, "n"]


def cost_matrix(costs: Any, classes: list[Any]) -> Float[Array, "C C"]:
    """Check the costs of labels: rows are true classes, columns predicted ones; a number is the cost of any mistake.

    >>> cost_matrix(5, ["cat", "dog"])
    array([[0., 5.],
           [5., 0.]])
    """
    count = len(classes)
    if hasattr(costs, "loc"):
        try:
            costs = costs.loc[classes, classes]  # the order of a table is that of its names
        except KeyError as error:
            raise ValueError(f"costs must have the classes as its index and columns: {error.args[0]}.") from None
    given = costs.detach().cpu() if hasattr(costs, "detach") else costs
    try:
        matrix = np.array(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"costs must be a number or a matrix of numbers, got {type(costs).__name__}.") from None
    if matrix.shape not in ((), (count, count)):
        raise ValueError(
            f"costs must have the shape ({count}, {count}), a row for each true class and a column for each predicted "
            f"class, or be the cost of any mistake as a number; got the shape {matrix.shape}."
        )
    if not (np.isfinite(matrix) & (matrix >= 0)).all():
        raise ValueError("costs must be finite numbers of at least 0; add a constant to all of them and to review.")
    return matrix if matrix.shape else float(matrix) * (1.0 - np.eye(count))


def cheapest_thresholds(rows: CostRows, review: float, groups: int) -> Float[Array, "G"]:
    """Thresholds of the groups with the least mean cost on these rows; of equally cheap ones the highest.

    A group has a threshold of its own if a cross-validation finds that cheaper than one for all, by more than twice the
    standard error of the difference; the other groups share one.

    Args:
        rows: The rows that choose.
        review: The cost of a refused row.
        groups: The number of groups.

    >>> score = np.array([0.9, 0.8, 0.7, 0.6])
    >>> rows = CostRows(score, np.array([0.0, 0.0, 5.0, 5.0]), np.zeros(4, dtype=int), np.arange(4))
    >>> cheapest_thresholds(rows, review=1.0, groups=1)
    array([0.8])
    """
    known = ~np.isnan(rows.score)
    _, unit, sizes = np.unique(rows.unit, return_inverse=True, return_counts=True)
    part = (np.random.default_rng(0).permutation(len(sizes)) % _PARTS)[unit][known]
    score, group = rows.score[known], rows.group[known]
    gain = ((rows.cost - review) / sizes[unit])[known]  # what accepting costs more than refusing
    shared = _cheapest(score, gain)
    found = np.full(groups, shared)
    if groups == 1:
        return found
    members = np.split(np.argsort(group, kind="stable"), np.bincount(group, minlength=groups).cumsum()[:-1])
    saved, squares = np.zeros(groups), np.zeros(groups)
    for p in range(_PARTS):
        others = _cheapest(score[part != p], gain[part != p])
        for g, mine in enumerate(members):
            judged, choosing = mine[part[mine] == p], mine[part[mine] != p]
            own = _cheapest(score[choosing], gain[choosing])
            less = gain[judged] * ((score[judged] >= others) * 1.0 - (score[judged] >= own))
            saved[g] += less.sum()
            squares[g] += (less**2).sum()
    for g in np.flatnonzero(saved > _CLEARLY * np.sqrt(squares)).tolist():
        found[g] = _cheapest(score[members[g]], gain[members[g]])
    return found


def row_costs(rows: CostRows, thresholds: Float[Array, "G"], review: float) -> Float[Array, "n"]:
    """The cost of each row: its own if it is accepted, that of a review otherwise."""
    return np.where(rows.score >= thresholds[rows.group], rows.cost, review)


def cost_range(costs: Float[Array, "C C"], thresholds: Float[Array, "C"], review: float) -> tuple[float, float]:
    """The least and the largest possible cost of a row, with a threshold for each predicted class."""
    possible = np.append(costs[:, thresholds < math.inf], review)
    return float(possible.min()), float(possible.max())


def unit_means(values: Float[Array, "n"], unit: Int[Array, "n"]) -> Float[Array, "U"]:
    """The mean of the values of each unit, in a random order of the units that depends on no value."""
    _, unit, sizes = np.unique(unit, return_inverse=True, return_counts=True)
    return (np.bincount(unit, weights=values) / sizes)[np.random.default_rng(0).permutation(len(sizes))]


def cost_bound(costs: Float[Array, "U"], least: float, most: float, delta: float) -> float:
    r"""Upper bound of the mean of independent costs in :math:`[l, m]`, at confidence :math:`1 - \delta`.

    It is the least mean that bets refute (:func:`~sepc_torch.head.promises.units.log_capital` with all rows accepted
    and :math:`W = \frac{Y - l}{m - l}`). Proof: let r be a mean of W, and suppose that the mean of W is at least r. The
    capital against r reaches :math:`1 / \delta` with probability at most :math:`\delta`. Every factor
    :math:`1 + \lambda (r - W)` increases with r, also where the bet is capped at :math:`c / (1 - r)`, because the
    variance that sets the bet does not depend on r. So all means above a refuted one are refuted, and a bound below the
    true mean refutes the true mean too.

    Args:
        costs: The costs of rows or units, in an order that does not depend on them.
        least: The least possible cost l.
        most: The largest possible cost m.
        delta: The allowed probability that the bound fails.

    >>> round(cost_bound(np.zeros(59), least=0.0, most=1.0, delta=0.05), 3)  # about 3 / 59
    0.05
    """
    delta = check_share(delta, "delta")
    if least == most:
        return most
    shares = UnitShares(np.ones((1, len(costs))), (costs[None, :] - least) / (most - least))
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if log_capital(shares, middle, delta)[0] >= math.log(1.0 / delta):
            high = middle
        else:
            low = middle
    return least + high * (most - least)


def _cheapest(score: Float[Array, "n"], gain: Float[Array, "n"]) -> float:
    """The threshold with the least sum of gains at or above it, the highest of equals; inf if no sum is negative."""
    if len(score) == 0:
        return math.inf
    value, place = np.unique(score, return_inverse=True)
    sums = np.bincount(place, weights=gain)[::-1].cumsum()
    best = int(sums.argmin())
    return float(value[len(value) - 1 - best]) if sums[best] < 0 else math.inf
