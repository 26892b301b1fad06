r"""Promises for shifted rows: unlabelled rows of the target say how often each region or class occurs there.

``accept_at(risk=r, target=rows)`` promises, for rows drawn independently like the target rows,

.. math:: P\big(P_{\mathrm{target}}(\mathrm{wrong} \mid \mathrm{accepted}) \le r\big) \ge 1 - \delta

over calibration points *and* target rows. It rests on one of two assumptions, which the promise names:

- ``"covariate"``: within a cell of regions (nearest ellipsoids), scores and the correctness of labels are distributed
  as among the calibration points; only the shares of the cells changed.
- ``"label"``: within a true class they are; only the shares of the classes changed.

**Covariate shift.** Every target row, in a random order, takes the next unused ranked calibration point of its cell
(:func:`match_rows`). *Claim:* if no cell runs out of points, the score and the correctness that the n target rows took
are n independent draws from the target. *Proof.* The cell of a target row is a draw from the target. Given the cells,
each taken point is another independent draw from the distribution of its cell, which is that of the target by the
assumption. So weights need not be estimated: their error is that of n draws, which every exact search counts already.
The searches of :meth:`~sepc_torch.head.calibration.label_calibration.LabelCalibration.risk_threshold`, and conformal
p-values, apply.

If a cell runs out of points, the row counts as accepted and wrong at every threshold, or as the strangest of all. The
binomial tail falls with fewer wrong and with more right points, so a threshold that passes would pass with any other
point in this place, and the promise stays valid. The cells and the number n must not depend on scores, and not on the
matched target rows: points that are not ranked decide the cells, and other target rows and the numbers of ranked points
decide n (:func:`match_size`).

**Label shift.** True classes of target rows are unknown. Their shares :math:`\pi_y` satisfy :math:`\mu_j = \sum_y
M_{jy} \pi_y` for the share :math:`\mu_j` of a symptom j among target rows and its share :math:`M_{jy}` in class y.
Symptoms are the labels, and tails of the scores. Exact intervals of all :math:`\mu_j` and :math:`M_{jy}` fail with
probability at most :math:`\delta / 2` together and leave a polytope of shares (:func:`class_shares`). With N ranked
points, a share :math:`\rho_y` of them in class y, and :math:`g_i = 1 - r` for an accepted and wrong, :math:`-r` for an
accepted and right, 0 for a refused point,

.. math:: K(\pi) = \prod_i \Big(1 - \lambda \frac{\pi_{y_i}}{\rho_{y_i}} g_i\Big), \quad
    E[K(\pi)] = \prod_y \Big(1 - \lambda \frac{\pi_y}{\rho_y} E[g \mid y]\Big)^{N \rho_y}
    \le \exp\Big(-\lambda N \sum_y \pi_y E[g \mid y]\Big) \le 1

if the true :math:`\pi` breaks the risk, :math:`\sum_y \pi_y E[g \mid y] \ge 0`. By Markov's inequality :math:`K(\pi)
\ge 2 / \delta` with probability at most :math:`\delta / 2`. A threshold passes if the least :math:`K` of all shares in
the polytope is at least :math:`2 / \delta` (:func:`least_log_capital` bounds it from below). Thresholds are tested in a
sequence that points which are not ranked and target rows fix, with their :math:`\lambda`, so the first that breaks the
risk passes with probability at most :math:`\delta` (:func:`~sepc_torch.head.promises.conformal.passed_sequence`).

**Refusal.** Both assumptions can be seen to fail without labels. Covariate shift: the scores of a target row and of its
match are exchangeable, so exact sign tests of the pairs compare them (:func:`fit_p_value`). Label shift: no mixture of
the classes explains labels and scores (:func:`mixture_p_value`), or the polytope is empty. Then nothing is accepted. If
the assumption holds, the first test refuses with probability at most 1 %, and the second one with about that
probability and :math:`\delta / 2`. A refusal never breaks a promise. No test proves an assumption: a change that leaves
labels and scores as they are cannot be seen.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data.options import check_choice
from sepc_torch.head.calibration.label_calibration import LabelCalibration, risk_limits, separated, two_digits
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.promises.conformal import (
    check_share,
    conformal_p_value,
    counts_above,
    flag_threshold,
    least_risk,
    passed_sequence,
    points_needed,
)
from sepc_torch.head.promises.groups import merge_smallest, region_gaps
from sepc_torch.model.sepc import SEPC
from sepc_torch.shapes import Array, Bool, Float, Int

Shift = Literal["covariate", "label"]

# Regions are merged until a cell can be expected to hold this many ranked points: fewer are soon used up.
_CELL_POINTS = 20
# Target rows that choose how many rows are matched: this share of them, and at most this many.
_PILOT_SHARE, _MOST_PILOT = 0.3, 1000
# A match may be expected to lack points for this part of the promised risk or rate.
SPARE = 0.02
# If nothing is found, a lack of more than this part of the promised risk is named as the reason.
_MUCH = 0.1
# Probability of a refusal by the test of the fit if the assumption holds.
FIT_LEVEL = 0.01
# Share of points that are called strange, or uncertain, by the tests of the fit.
_TAIL = 0.1
# Quantiles of the scores of points that are not ranked which separate the bins of the test of label shift.
_BINS = (0.1, 0.3, 0.5, 0.7, 0.9)
# A region without calibration points is new if so few would come by chance with this probability.
_CHANCE = 0.01
# Shares of the largest possible bet that are tried, and numbers of classes that are left out.
_BETS, _CUTS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9), 8
# The bounds of shares from ranked points may be larger than planned by this factor before a bet becomes too large.
_MARGIN = 1.2
# Least number of target rows: fewer say nothing about shares.
LEAST_TARGET = 50


class ShareMove(NamedTuple):
    """Shares of a cell of regions, or of a class: among the ranked calibration points, and of the target.

    Attributes:
        members: Numbers of the regions, or the label of the class.
        calibration: The share of the ranked calibration points.
        target: The share of the target rows; for a class, the middle of its interval.
    """

    members: tuple[object, ...]
    calibration: float
    target: float


class TargetAcceptance(NamedTuple):
    """Acceptance for shifted rows.

    Attributes:
        threshold: The head accepts joint scores of at least this value; inf if it accepts nothing.
        coverage: The share of the target rows that are accepted.
        error: The estimated share of wrong labels among the accepted target rows; NaN if none is accepted.
        points: The effective number of calibration points: of matched rows or, with ``shift="label"``, the square of
            the sum of the weights divided by the sum of their squares.
        found: Whether the promise is kept; if not, the head accepts nothing.
        shift: ``"covariate"`` or ``"label"``.
        rows: The number of target rows.
        missing: The share of the matched rows whose cell had no calibration point left; 0 with ``shift="label"``.
        fit: p-value of the test that scores within regions are distributed as among the calibration points; with
            ``shift="label"`` 1, or 0 if no shares of classes explain the target rows.
        moves: The cells or classes whose shares changed, the largest change first.
        limits: Why nothing is accepted; empty if the promise is kept.
    """

    threshold: float
    coverage: float
    error: float
    points: int
    found: bool
    shift: str
    rows: int
    missing: float
    fit: float
    moves: tuple[ShareMove, ...]
    limits: str


def match_rows(target: Int[Array, "n"], ranked: Int[Array, "h"]) -> Int[Array, "n"]:
    """The ranked point that each target row takes: the next unused one of its cell, in the order given; -1 for none.

    >>> match_rows(np.array([1, 0, 1, 1]), np.array([0, 1, 1]))
    array([ 1,  0,  2, -1])
    """
    cells = int(max(target.max(initial=0), ranked.max(initial=0))) + 1
    count = np.bincount(ranked, minlength=cells)
    start, order = count.cumsum() - count, np.argsort(ranked, kind="stable")
    by_cell = np.argsort(target, kind="stable")
    sizes = np.bincount(target, minlength=cells)
    turn = np.empty(len(target), dtype=np.int64)  # how many earlier rows have the same cell
    turn[by_cell] = np.arange(len(target)) - np.repeat(sizes.cumsum() - sizes, sizes)
    taken = turn < count[target]
    return np.where(taken, order[np.where(taken, start[target] + turn, 0)], -1)


def match_size(pilot: Int[Array, "p"], ranked: Int[Array, "h"], most: int, spare: float) -> int:
    """The largest number of rows, up to ``most``, whose match is expected to lack few points: a share of ``spare``.

    The number of rows of a cell is taken as normal, with the variance of its draw and of the pilot's share. Rows of
    cells without a ranked point, which lack one at every number, do not count.

    >>> match_size(np.array([0, 0, 1] * 50), np.repeat([0, 1], [100, 50]), most=1000, spare=0.05)
    151
    """
    from scipy.stats import norm

    cells = int(max(pilot.max(initial=0), ranked.max(initial=0))) + 1
    share, count = np.bincount(pilot, minlength=cells) / len(pilot), np.bincount(ranked, minlength=cells)
    share, count = share[(count > 0) & (share > 0)], count[(count > 0) & (share > 0)]
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        over = middle * share - count
        spread = np.sqrt(middle * share * (1.0 - share) * (1.0 + middle / len(pilot))) + 1e-9
        lacking = spread * norm.pdf(over / spread) + over * norm.cdf(over / spread)
        low, high = (middle, high) if lacking.sum() <= spare * middle else (low, middle - 1)
    return low


def fit_p_value(pairs: Float[Array, "2 n"], others: Float[Array, "2 n"], tails: tuple[float, float]) -> float:
    """p-value of the hypothesis that the two rows of every pair are exchangeable, from four exact sign tests.

    They compare nonconformity and joint scores of the two rows, and how often each of the rows lies in the tail of
    large nonconformity or of low joint scores. Bonferroni's correction combines them.

    Args:
        pairs: Nonconformity and joint scores of the first row of every pair.
        others: Those of the second row.
        tails: The nonconformity from which on a row is strange, and the joint score up to which it is uncertain.

    >>> same = np.array([[0.1, 0.2], [0.5, 0.6]])
    >>> fit_p_value(same, same, (0.5, 0.5))
    1.0
    >>> fit_p_value(np.ones((2, 20)), np.zeros((2, 20)), (2.0, -1.0)) < 1e-4
    True
    """
    from scipy.stats import binomtest

    first = np.concatenate([pairs, [pairs[0] >= tails[0], pairs[1] <= tails[1]]])
    second = np.concatenate([others, [others[0] >= tails[0], others[1] <= tails[1]]])
    above, below = (first > second).sum(axis=1), (first < second).sum(axis=1)
    found = [float(binomtest(int(a), int(a + b)).pvalue) for a, b in zip(above, below, strict=True) if a + b]
    return min(1.0, len(first) * min(found, default=1.0))


class CellMatch(NamedTuple):
    """Target rows matched with ranked calibration points by cells of regions.

    Attributes:
        taken: The place of the ranked point that each of n target rows took; -1 for none.
        pilot: The places of points that are not ranked, of the cells of other target rows; they guide searches.
        fit: The p-value of :func:`fit_p_value`.
        moves: The cells whose shares changed.
        new: Regions that hold target rows, and no calibration point.
    """

    taken: Int[Array, "n"]
    pilot: Int[Array, "p"]
    fit: float
    moves: tuple[ShareMove, ...]
    new: tuple[int, ...]

    @property
    def missing(self) -> float:
        """The share of rows without a point."""
        return float((self.taken < 0).mean())

    def rejected(self) -> str:
        """Why the assumption does not hold; empty if nothing speaks against it."""
        if self.fit > FIT_LEVEL:
            return ""
        return (
            f"within regions the target rows have other scores than the calibration rows (p = {self.fit:.2g}), so "
            "their labels need not be right as often. Label some of the target rows, and calibrate with them"
        )

    def lacking(self) -> str:
        """Which rows have no match; empty if all have one."""
        if not self.missing:
            return ""
        where = f", above all in the regions {', '.join(map(str, self.new[:6]))}" if self.new else ""
        return (
            f"{self.missing:.1%} of the target rows have no calibration point of their region left{where}. Label some "
            "of these rows, and calibrate with them"
        )


def match_regions(labels: LabelCalibration, sepc: SEPC, out: HeadPrediction, spare: float) -> CellMatch:
    """Match target rows with ranked calibration points by cells of regions.

    Args:
        labels: The calibration of the labels.
        sepc: The classifier with the regions.
        out: Predictions for the target rows.
        spare: The share of rows that may be expected to find no point.
    """
    regions, held = labels.point_region.cpu().numpy(), labels.ranked_rows.cpu().numpy()
    if len(regions) == 0:
        raise RuntimeError("The regions of the head changed since the calibration; call head.calibrate again.")
    known = ((out.label >= 0) & (out.network_label >= 0)).numpy()  # rows without a prediction are never accepted
    rows = np.flatnonzero(known)[np.random.default_rng(0).permutation(int(known.sum()))]
    if len(rows) < LEAST_TARGET:
        raise ValueError(f"{len(rows)} target rows with a prediction are too few; pass at least {LEAST_TARGET}.")
    others = np.delete(regions, held)
    gaps = region_gaps(sepc)
    expected = np.bincount(others, minlength=len(gaps)) * (len(held) / len(others))
    cell_of = merge_smallest(expected, gaps, lambda groups: _CELL_POINTS)
    count = int(cell_of.max()) + 1
    nearest, cells = out.nearest.numpy()[rows], cell_of[regions]
    target, ranked, fitted = cell_of[nearest], cells[held], np.delete(cells, held)
    # Regions where the calibration has no point although the target's share of rows makes that unlikely.
    seen, visits = np.bincount(regions, minlength=len(gaps)), np.bincount(nearest, minlength=len(gaps))
    new = (seen == 0) & (len(regions) * np.log1p(-np.minimum(visits / len(rows), 0.99)) <= math.log(_CHANCE))
    pilots = min(int(_PILOT_SHARE * len(rows)), _MOST_PILOT)
    size = match_size(target[:pilots], ranked, len(rows) - pilots, spare)
    taken = match_rows(target[pilots : pilots + size], ranked)
    taken = np.where(new[nearest[pilots : pilots + size]], -1, taken)
    return CellMatch(
        taken,
        _drawn(target[:pilots], fitted),
        _fit(labels, out, rows, np.where(new[nearest], -1, match_rows(target, ranked))),
        _moves([tuple(np.flatnonzero(cell_of == c).tolist()) for c in range(count)], ranked, target),
        tuple(np.flatnonzero(new).tolist()),
    )


def _drawn(target: Int[Array, "p"], fitted: Int[Array, "f"]) -> Int[Array, "q"]:
    """A point that is not ranked, of the cell of each row; rows of cells without one are left out."""
    rng, members = np.random.default_rng(1), {c: np.flatnonzero(fitted == c) for c in np.unique(fitted).tolist()}
    found = [rng.choice(members[c]) for c in target.tolist() if c in members]
    return np.array(found, dtype=np.int64)


def _fit(labels: LabelCalibration, out: HeadPrediction, rows: Int[Array, "m"], taken: Int[Array, "m"]) -> float:
    """The p-value of the fit, from all target rows that find a point of their cell."""
    paired = taken >= 0
    some, points = torch.from_numpy(rows[paired]), torch.from_numpy(taken[paired])
    like = out.nonconformity.dtype  # scores of points, rounded as those of predictions
    ranked = labels.ranked_nonconformity[labels.ranked_place][points], labels.ranked_joint[points]
    fitted = labels.combined_score.combined, labels.fitted_joint
    tails = [float(part.double().to(like).quantile(q)) for part, q in zip(fitted, (1 - _TAIL, _TAIL), strict=True)]
    first = torch.stack([out.nonconformity[some], out.joint[some]]).double().numpy()
    second = torch.stack([part.cpu().to(like) for part in ranked]).double().numpy()
    return fit_p_value(first, second, (tails[0], tails[1]))


def _moves(
    members: list[tuple[object, ...]], ranked: Int[Array, "h"], target: Int[Array, "m"]
) -> tuple[ShareMove, ...]:
    before, after = (np.bincount(part, minlength=len(members)) / len(part) for part in (ranked, target))
    order = np.argsort(-np.abs(after - before), kind="stable")
    return tuple(ShareMove(members[c], float(before[c]), float(after[c])) for c in order.tolist())


class ShareBounds(NamedTuple):
    """Least and largest shares of the classes that explain the symptoms; ``found`` is False if no shares do."""

    low: Float[Array, "C"]
    high: Float[Array, "C"]
    found: bool


def class_shares(
    counts: Float[Array, "J C"], sizes: Float[Array, "C"], seen: Float[Array, "J"], rows: int, delta: float
) -> ShareBounds:
    r"""Bounds of the shares of the classes among the target rows, from how often symptoms occur.

    Exact (Clopper-Pearson) intervals of the share of every symptom in every class and in the target all hold with
    probability at least :math:`1 - \delta`. Then the true shares satisfy the linear inequalities
    :math:`\sum_y L_{jy} \pi_y \le U_j` and :math:`\sum_y U_{jy} \pi_y \ge L_j` of the ends L and U of the intervals;
    linear programs find the least and the largest share of every class.

    Args:
        counts: Number of calibration points with each symptom in each class.
        sizes: Number of calibration points of each class.
        seen: Number of target rows with each symptom.
        rows: Number of target rows.
        delta: The allowed probability that any interval misses.

    >>> counts = np.array([[480.0, 10.0], [20.0, 490.0]])  # two labels, two classes
    >>> found = class_shares(counts, np.array([500.0, 500.0]), np.array([960.0, 40.0]), 1000, delta=0.05)
    >>> bool(found.low[0] > 0.9), bool(found.high[0] > 0.99)
    (True, True)
    >>> class_shares(counts, np.array([500.0, 500.0]), np.array([999.0, 900.0]), 1000, delta=0.05).found
    False
    """
    from scipy.optimize import linprog

    classes, level = len(sizes), delta / (2 * len(counts) * (len(sizes) + 1))
    least, most = _intervals(counts, np.broadcast_to(sizes, counts.shape), level)
    below, above = _intervals(seen, np.full(len(seen), float(rows)), level)
    bounded: dict[str, Any] = {"A_ub": np.concatenate([least, -most]), "b_ub": np.concatenate([above, -below])}
    bounded |= {"A_eq": np.ones((1, classes)), "b_eq": np.ones(1), "bounds": (0.0, 1.0)}
    ends = np.empty((2, classes))
    for c in range(classes):
        for i, sign in enumerate((1.0, -1.0)):
            found = linprog(sign * (np.arange(classes) == c), **bounded)
            if found.status != 0:
                return ShareBounds(np.zeros(classes), np.ones(classes), found=False)
            ends[i, c] = sign * found.fun
    # The solver's tolerance, on the safe side.
    return ShareBounds(np.maximum(ends[0] - 1e-6, 0.0), np.minimum(ends[1] + 1e-6, 1.0), found=True)


def _intervals(
    counts: Float[Array, "*n"], sizes: Float[Array, "*n"], level: float
) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
    """Clopper-Pearson bounds of shares, each of which misses with at most this probability."""
    from scipy.special import betaincinv

    rest = sizes - counts
    low = np.where(counts > 0, betaincinv(np.maximum(counts, 1e-9), rest + 1.0, level), 0.0)
    high = np.where(rest > 0, betaincinv(counts + 1.0, np.maximum(rest, 1e-9), 1.0 - level), 1.0)
    return low, high


def log_capital(
    right: Float[Array, "T C"],
    wrong: Float[Array, "T C"],
    weight: Float[Array, "C"],
    risk: float,
    bet: Float[Array, "T"],
) -> Float[Array, "T C"]:
    r"""The part of each class in the logarithm of the capital :math:`K(\pi)`, at T thresholds; see this module.

    Args:
        right: Number of accepted right labels of each class.
        wrong: Number of accepted wrong labels.
        weight: The weight :math:`\pi_y / \rho_y` of the points of each class.
        risk: The risk r.
        bet: The bet :math:`\lambda`.

    >>> log_capital(np.array([[9.0]]), np.array([[0.0]]), np.ones(1), 0.5, np.ones(1)).round(3)  # 9 log 1.5
    array([[3.649]])
    """
    stake = bet[:, None] * weight
    with np.errstate(divide="ignore", invalid="ignore"):
        lost = np.where(wrong > 0, wrong * np.log(np.maximum(1.0 - stake * (1.0 - risk), 0.0)), 0.0)
    # A factor that can be negative proves nothing, also where no label is wrong.
    lost = np.where(stake * (1.0 - risk) < 1.0, lost, -np.inf)
    found: Float[Array, "T C"] = right * np.log1p(stake * risk) + lost
    return found


def least_log_capital(
    at_low: Float[Array, "T C"], at_high: Float[Array, "T C"], low: Float[Array, "C"], high: Float[Array, "C"]
) -> Float[Array, "T"]:
    r"""Lower bound of :math:`\sum_y f_y(\pi_y)`, :math:`f_y` concave, over :math:`l \le \pi \le h, \sum_y \pi_y = 1`.

    For every :math:`\eta`, :math:`\sum_y f_y(\pi_y) = \eta + \sum_y (f_y(\pi_y) - \eta \pi_y)`, and a concave function
    is least at an end: the bound is :math:`\max_\eta \eta + \sum_y \min_{x \in \{l_y, h_y\}} (f_y(x) - \eta x)`.

    Args:
        at_low: :math:`f_y(l_y)`.
        at_high: :math:`f_y(h_y)`.
        low: The least shares l.
        high: The largest shares h.

    >>> least_log_capital(np.array([[0.0, 0.0]]), np.array([[2.0, -2.0]]), np.array([0.0, 0.2]), np.array([0.8, 1.0]))
    array([-2.])
    """
    blocked = np.isneginf(at_low) | np.isneginf(at_high)
    low_value, high_value = np.where(blocked, 0.0, at_low), np.where(blocked, 0.0, at_high)
    slopes = (high_value - low_value) / np.maximum(high - low, 1e-12)  # the maximum lies at one of these

    def bound(eta: Float[Array, "T"]) -> Float[Array, "T"]:
        ends = [value - eta[:, None] * share for value, share in ((low_value, low), (high_value, high))]
        return eta + np.minimum(*ends).sum(axis=1)

    best = np.max([bound(slopes[:, c]) for c in range(slopes.shape[1])], axis=0)
    return np.where(blocked.any(axis=1), -np.inf, best)


def mixture_p_value(features: Float[Array, "h J"], code: Int[Array, "h"], target: Float[Array, "m J"]) -> float:
    r"""p-value of the hypothesis that the target is a mixture of the classes; approximate, for many rows.

    The means of J features satisfy :math:`\mu = M \pi` for the means M of the classes and unknown shares that sum to
    one. Hansen's statistic, the least :math:`(\hat\mu - \hat M \pi)^T \Sigma^{-1} (\hat\mu - \hat M \pi)` with the
    variance :math:`\Sigma` of the difference, has a :math:`\chi^2` distribution with J - C + 1 degrees of freedom.

    Args:
        features: Features of the ranked points.
        code: Their true classes, as indices from 0; every class has at least two points.
        target: Features of the target rows.

    >>> rng = np.random.default_rng(0)
    >>> code = np.arange(1000) % 2
    >>> features = rng.normal(size=(1000, 3)) + code[:, None]
    >>> mixture_p_value(features, code, features[:500] + 0.0) > 0.01
    True
    >>> mixture_p_value(features, code, features[:500] + np.array([1.0, 0.0, -1.0])) < 1e-6
    True
    """
    from scipy.stats import chi2

    parts = [features[code == c] for c in range(int(code.max()) + 1)]
    means = np.stack([part.mean(axis=0) for part in parts], axis=1)
    spreads = [np.cov(part, rowvar=False) / len(part) for part in parts]
    noise = np.cov(target, rowvar=False) / len(target)
    base, design = target.mean(axis=0) - means[:, -1], means[:, :-1] - means[:, -1:]
    weight = np.eye(len(base))
    for _ in range(3):  # the variance depends on the shares, and the shares a little on the variance
        free = np.linalg.lstsq(design.T @ weight @ design, design.T @ weight @ base, rcond=None)[0]
        shares = np.append(free, 1.0 - free.sum())
        variance = noise + sum(share**2 * spread for share, spread in zip(shares, spreads, strict=True))
        weight = np.linalg.pinv(variance, hermitian=True)
    rest = base - design @ free
    return float(chi2.sf(rest @ weight @ rest, len(base) - len(free)))


class ClassRows(NamedTuple):
    """Calibration points with a joint score, their true classes, their labels and whether these are right."""

    joint: Float[Array, "n"]
    code: Int[Array, "n"]
    label: Int[Array, "n"]
    right: Bool[Array, "n"]

    def symptoms(self, count: int, uncertain: float) -> Float[Array, "J C"]:
        """Number of points with each symptom in each class: the labels, and a low joint score."""
        table = np.zeros((count + 1, count))
        np.add.at(table, (self.label, self.code), 1.0)
        np.add.at(table[count], self.code[self.joint <= uncertain], 1.0)
        return table

    def accepted(self, thresholds: Float[Array, "T"], right: bool, count: int) -> Float[Array, "T C"]:
        """Number of points of each class above each threshold whose label is right, or wrong."""
        found = np.empty((len(thresholds), count))
        for c in range(count):
            scores = np.sort(self.joint[(self.code == c) & (self.right == right)])
            found[:, c] = len(scores) - np.searchsorted(scores, thresholds)
        return found


def accept_for_target(
    labels: LabelCalibration,
    sepc: SEPC,
    out: HeadPrediction,
    shift: Shift,
    risk: float | None,
    delta: float,
    flag_rate: float | None,
) -> TargetAcceptance:
    """Set the threshold of one source of labels for shifted rows; see :meth:`TrustHead.accept_at`.

    Args:
        labels: The calibration of the labels.
        sepc: The classifier with the regions.
        out: Predictions for the target rows.
        shift: The assumption.
        risk: The allowed share of wrong labels among the accepted ones, or None.
        delta: The allowed probability that the promise of the risk fails.
        flag_rate: The allowed share of refused rows, or None.
    """
    check_choice("shift", shift, get_args(Shift))
    risk, delta = None if risk is None else check_share(risk, "risk"), check_share(delta, "delta")
    if shift == "covariate":
        found = _for_regions(labels, sepc, out, risk, delta, flag_rate)
    else:
        if risk is None:
            raise ValueError("shift='label' is for a risk; a flag_rate of shifted rows needs shift='covariate'.")
        found = _for_classes(labels, sepc, out, risk, delta)
    labels.set_table(None, None)
    labels.threshold = labels.threshold.new_tensor(found.threshold)
    accepted = (out.joint.double() >= found.threshold) & (out.network_label >= 0) & (out.label >= 0)
    return found._replace(rows=len(accepted), coverage=float(accepted.double().mean()))


def _for_regions(
    labels: LabelCalibration,
    sepc: SEPC,
    out: HeadPrediction,
    risk: float | None,
    delta: float,
    flag_rate: float | None,
) -> TargetAcceptance:
    """The threshold of a risk or flag rate under covariate shift; rows and coverage are left open."""
    allowed = flag_rate if risk is None else risk
    assert allowed is not None
    match = match_regions(labels, sepc, out, SPARE * allowed)
    taken, drawn = torch.from_numpy(match.taken), torch.from_numpy(match.pilot)
    lost = taken < 0
    # The calibration whose points are the matched rows; a row without a point is accepted and wrong.
    matched = copy.deepcopy(labels).cpu()
    worst = 1.0 if flag_rate is None else 0.0  # for a flag rate it is refused
    matched.ranked_joint = torch.where(lost, worst, matched.ranked_joint[taken])
    matched.ranked_right = ~lost & matched.ranked_right[taken]
    matched.fitted_joint, matched.fitted_right = matched.fitted_joint[drawn], matched.fitted_right[drawn]
    limits, threshold = match.rejected(), math.inf
    if not limits and risk is not None:
        groups = np.zeros(len(taken), dtype=np.int64), np.zeros(len(drawn), dtype=np.int64)
        threshold = matched.risk_threshold(*groups, risk, delta)
        if threshold == math.inf:
            limits = match.lacking() if match.missing > _MUCH * risk else ""
            limits = limits or _too_few(matched, labels, risk, delta)
    elif not limits:
        steps = separated(matched.log_odds())
        threshold = steps.threshold(flag_threshold(steps.scores, allowed))
    accepted = ~lost & (matched.ranked_joint >= threshold)
    number, wrong = int(accepted.sum()), int((accepted & ~matched.ranked_right).sum())
    return TargetAcceptance(
        threshold=threshold,
        coverage=0.0,
        error=wrong / number if number else math.nan,
        points=len(taken),
        found=not limits,
        shift="covariate",
        rows=0,
        missing=match.missing,
        fit=match.fit,
        moves=match.moves,
        limits=limits,
    )


def _too_few(matched: LabelCalibration, labels: LabelCalibration, risk: float, delta: float) -> str:
    """Which risk the matched rows can promise, and how many more calibration points the wanted one needs."""
    _, accepted, errors = counts_above(separated(matched.log_odds()).scores, matched.ranked_right)
    needed, used = points_needed(errors, accepted, risk, delta), len(matched.ranked_joint)
    ranked, points = len(labels.ranked_joint), len(labels.point_label)
    more = None if needed is None else two_digits(math.ceil(max(needed - used, 1) * points / used))
    name = f"{used} matched rows of the target and of {ranked} ranked calibration points"
    text = risk_limits(name, risk, least_risk(errors, accepted, delta), more, "calibration points, and target rows,")
    return text.removesuffix(".")


def _for_classes(
    labels: LabelCalibration, sepc: SEPC, out: HeadPrediction, risk: float, delta: float
) -> TargetAcceptance:
    """The threshold of a risk under label shift; rows and coverage are left open."""
    count, held = len(sepc.classes), labels.ranked_rows.cpu().numpy()
    known = ((out.label >= 0) & (out.network_label >= 0)).numpy()
    rows = int(known.sum())
    if rows < LEAST_TARGET:
        raise ValueError(f"{rows} target rows with a prediction are too few; pass at least {LEAST_TARGET}.")
    joint, correct = labels.ranked_joint, labels.ranked_right
    code, label = labels.point_class.cpu().numpy(), labels.point_label.cpu().numpy()
    fitted_joint, fitted_right = labels.fitted_joint.double().cpu().numpy(), labels.fitted_right.cpu().numpy()
    ranked = ClassRows(joint.double().cpu().numpy(), code[held], label[held], correct.cpu().numpy())
    fitted = ClassRows(fitted_joint, np.delete(code, held), np.delete(label, held), fitted_right)
    uncertain = float(np.quantile(fitted_joint, _TAIL))
    target = out.joint.double().numpy()[known]
    seen = np.bincount(out.network_label.numpy()[known], minlength=count)
    seen = np.append(seen, (target <= uncertain).sum()).astype(float)
    sizes, others = (np.bincount(part.code, minlength=count).astype(float) for part in (ranked, fitted))
    weight = sizes / sizes.sum()
    # What points that are not ranked let expect of the ranked ones.
    scale = np.where(others > 0, sizes / np.maximum(others, 1.0), 0.0)
    thresholds = labels.candidates()
    planned = class_shares(fitted.symptoms(count, uncertain) * scale, sizes, seen, rows, delta / 2)
    right, wrong = (fitted.accepted(thresholds, flag, count) * scale for flag in (True, False))
    some = (right + wrong) / np.maximum((right + wrong).sum(axis=1, keepdims=True), 1e-12)
    # Half an error more than was seen, as in other searches: none among a few points is little evidence.
    plan = _plan(Counts(right, wrong + 0.5 * scale.mean() * some), planned, weight, sizes.sum(), risk)
    found = class_shares(ranked.symptoms(count, uncertain), sizes, seen, rows, delta / 2)
    fit = _mixture_fit(labels, ranked, out, known, count) if found.found else 0.0
    above = Counts(*(ranked.accepted(thresholds, flag, count) for flag in (True, False)))
    capital = _bounded_capital(above, found, weight, sizes.sum(), risk, plan.bet, plan.worst)
    last = passed_sequence(np.exp(-capital), np.exp(-plan.expected), delta / 2) if fit > FIT_LEVEL else None
    middle = (found.low + found.high) / 2
    middle = middle / middle.sum() if found.found else weight
    of_point = np.divide(middle, weight, out=np.zeros(count), where=weight > 0)[ranked.code]
    effective = round(of_point.sum() ** 2 / (of_point**2).sum())
    threshold = math.inf if last is None else float(thresholds[last])
    accepted = ranked.joint >= threshold
    moves = [
        ShareMove((name,), *pair) for name, *pair in zip(sepc.classes, weight.tolist(), middle.tolist(), strict=True)
    ]
    limits = ""
    if fit <= FIT_LEVEL:
        limits = (
            f"no shares of the classes explain the labels and scores of the target rows (p = {fit:.2g}), so that "
            "within a class labels need not be right as often. Label some of the target rows, and calibrate with them"
        )
    elif last is None:
        widest = int((found.high - found.low).argmax())
        limits = (
            f"{len(held)} ranked calibration points, worth {effective} when weighted by class, and {rows} target rows "
            f"cannot promise a risk of {risk:g}: they bound the share of class {sepc.classes[widest]} only between "
            f"{found.low[widest]:.0%} and {found.high[widest]:.0%}. Calibrate with more points of the classes that grew"
        )
    taken = of_point[accepted].sum()
    return TargetAcceptance(
        threshold=threshold,
        coverage=0.0,
        error=float(of_point[accepted & ~ranked.right].sum() / taken) if taken > 0 else math.nan,
        points=effective,
        found=not limits,
        shift="label",
        rows=0,
        missing=0.0,
        fit=fit,
        moves=tuple(sorted(moves, key=lambda move: -abs(move.target - move.calibration))),
        limits=limits,
    )


def _mixture_fit(
    labels: LabelCalibration, ranked: ClassRows, out: HeadPrediction, known: Bool[Array, "m"], count: int
) -> float:
    """The p-value of :func:`mixture_p_value`, of labels and bins of both scores; classes of one point are left out."""
    like, rows = out.nonconformity.dtype, torch.from_numpy(known)
    scores = labels.ranked_nonconformity[labels.ranked_place], labels.ranked_joint
    of_points = [part.cpu().to(like).double().numpy() for part in scores]
    of_rows = [part[rows].double().numpy() for part in (out.nonconformity, out.joint)]
    fitted = [part.double().cpu().numpy() for part in (labels.combined_score.combined, labels.fitted_joint)]
    edges = [np.quantile(part, _BINS) for part in fitted]
    shown = np.unique(ranked.label)[:-1]  # the last one follows from the others

    def features(label: Int[Array, "n"], parts: list[Array]) -> Float[Array, "n J"]:
        bins = [part[:, None] > edge for part, edge in zip(parts, edges, strict=True)]
        return np.concatenate([label[:, None] == shown, *bins], axis=1).astype(float)

    many = np.bincount(ranked.code, minlength=count) > 1
    code, some = np.cumsum(many) - 1, many[ranked.code]
    own = features(ranked.label[some], [part[some] for part in of_points])
    return mixture_p_value(own, code[ranked.code[some]], features(out.network_label.numpy()[known], of_rows))


class Counts(NamedTuple):
    """Number of accepted right, and of accepted wrong, labels of each class at each threshold."""

    right: Float[Array, "T C"]
    wrong: Float[Array, "T C"]


class Plan(NamedTuple):
    """The bet at each threshold, the classes that it takes as wrong throughout, and the capital to expect."""

    bet: Float[Array, "T"]
    worst: Bool[Array, "T C"]
    expected: Float[Array, "T"]


def _plan(counts: Counts, shares: ShareBounds, weight: Float[Array, "C"], points: float, risk: float) -> Plan:
    """Choose the bets with the largest capital to expect.

    A class with few points has a large weight, which a bet must stay below. Its points are then left out, and its share
    counts as accepted and wrong throughout.
    """
    steps, classes = counts.right.shape
    heavy = np.divide(_MARGIN * shares.high, weight, out=np.full(classes, np.inf), where=weight > 0)
    cuts = np.unique(np.quantile(heavy[np.isfinite(heavy)], np.linspace(0.0, 1.0, _CUTS), method="higher"))
    best = Plan(np.zeros(steps), np.zeros((steps, classes), dtype=bool), np.full(steps, -np.inf))
    for cut in cuts.tolist():
        worst = np.broadcast_to(heavy > cut, (steps, classes))
        for share in _BETS:
            bet = np.full(steps, share / (cut * (1.0 - risk)))
            expected = _bounded_capital(counts, shares, weight, points, risk, bet, worst)
            better = expected > best.expected
            best = Plan(
                np.where(better, bet, best.bet),
                np.where(better[:, None], worst, best.worst),
                np.where(better, expected, best.expected),
            )
    return best


def _bounded_capital(
    counts: Counts,
    shares: ShareBounds,
    weight: Float[Array, "C"],
    points: float,
    risk: float,
    bet: Float[Array, "T"],
    worst: Bool[Array, "T C"],
) -> Float[Array, "T"]:
    r"""Least logarithm of the capital over all shares within their bounds.

    The part of a class whose points are left out is :math:`-\lambda N \pi_y (1 - r)`: the proof of this module needs
    no more of it than that its mean of g is at most 1 - r.
    """
    ends = []
    for share in (shares.low, shares.high):
        ratio = np.divide(share, weight, out=np.zeros(len(share)), where=weight > 0)
        part = log_capital(np.where(worst, 0.0, counts.right), np.where(worst, 0.0, counts.wrong), ratio, risk, bet)
        ends.append(np.where(worst, -points * (1.0 - risk) * bet[:, None] * share, part))
    return least_log_capital(ends[0], ends[1], shares.low, shares.high)


class ShiftedPValues(NamedTuple):
    """Conformal p-values of rows against matched calibration points, their number, and why they are not valid."""

    p_value: Float[Tensor, "B"]
    ranked: int
    limits: str


def shifted_p_values(
    labels: LabelCalibration, sepc: SEPC, target: HeadPrediction, out: HeadPrediction, spare: float
) -> ShiftedPValues:
    """Conformal p-values of rows from where the target rows are from, under covariate shift.

    Matched calibration points are draws from the target (see this module), so that the p-values are exact. A row
    without a point counts as the strangest of all, which only raises p-values.

    Args:
        labels: The calibration of the labels.
        sepc: The classifier with the regions.
        target: Predictions for the target rows, which must be others than those of ``out``.
        out: Predictions for the rows to assess.
        spare: The share of target rows that may be expected to find no point.
    """
    match = match_regions(labels, sepc, target, spare)
    taken = torch.from_numpy(match.taken)
    scores = labels.ranked_nonconformity[labels.ranked_place].cpu()[taken].to(out.nonconformity.dtype)
    scores = torch.where(taken < 0, torch.inf, scores)
    return ShiftedPValues(conformal_p_value(scores, out.nonconformity), len(taken), match.rejected())
