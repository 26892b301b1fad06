r"""Conformal p-values and thresholds with finite-sample guarantees, from a calibration set.

- :func:`conformal_p_value`: how often a point of the calibration distribution has a nonconformity score at least as
  large.
- :func:`flag_threshold`: flags at most a chosen share of the points of the calibration distribution.
- :func:`risk_threshold`: at most a chosen share of the accepted predictions are wrong; :func:`search_level` is the
  level of its binomial tests. :func:`passed_sequence` is the search in a fixed order, :func:`average_threshold` the
  promise on average.
- :func:`least_points`, :func:`least_risk`, :func:`points_needed`: the limits of a promise, for error messages.

All guarantees are exact for every sample size and every distribution. They assume that calibration points and new
points are drawn independently from one distribution. No calibration point may have been used to train the network or to
fit the partition. After a distribution shift the guarantees no longer hold. A higher score is safer; a higher
nonconformity score is less safe.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch.model.precision import as_dtype
from sepc_torch.shapes import Array, Bool, Float, Int

# Steps of the search for the least risk and for the number of points: a tenth, since both are estimates.
_STEP = 1.1
# Largest factor on the number of points that is worth naming.
_MOST_FACTOR = 1e4
# Above this number of points the level hardly changes, and computing it takes seconds.
_LARGE = 20_000
# Tails of a distribution that are not followed further, and the least delta whose level they do not decide.
_FAR_TAIL, _FINEST = 1e-13, 1e-9
# Largest (B, M) temporary of a class p-value, in numbers: one call then replaces a dozen.
_FEW_VALUES = 2**16


@functools.lru_cache(maxsize=4096)
def search_level(points: int, risk: float, delta: float) -> float:
    r"""Highest level :math:`\alpha \le \delta` of the tests that limits the failure of :func:`risk_threshold` to delta.

    .. math:: P\big(\exists\, n \le M : P(\mathrm{Bin}(n, r) \le E_n) \le \alpha\big) \le \delta, \quad
        E_n = e_1 + \dots + e_n, \quad e_i \sim \mathrm{Bernoulli}(r),

    and no :math:`\alpha \le \delta` larger by more than 1 % satisfies the inequality. For :math:`\delta < 10^{-9}` the
    level is the smaller one of a union bound. The left side is the failure probability of a useless score of risk r. No
    other distribution has a larger one. Proof: let B be the set of thresholds whose risk exceeds r. For t in B,
    :math:`P(S \ge t, \mathrm{wrong}) \ge r P(S \ge t)` and :math:`P(S \ge t, \mathrm{right}) \le (1 - r) P(S \ge t)`.
    Each calibration point can therefore be coupled with a point of the useless score such that, for all t in B at once,
    wrong points are accepted at least as often and right points at most as often. The tail falls with fewer wrong and
    with more right points, so the useless score qualifies whenever this one does.

    >>> round(search_level(1000, risk=0.05, delta=0.1), 3)
    0.018
    """
    highest = delta
    corners = _fewest_points(points, risk, highest)
    # Union bound: at this level the probabilities of the corners sum to at most delta.
    lowest = delta / max(len(corners), 1)
    if delta < _FINEST:
        return lowest
    if _chance_to_qualify(corners, risk) <= delta:
        return highest
    while highest > 1.01 * lowest:
        middle = math.sqrt(lowest * highest)
        if _chance_to_qualify(_fewest_points(points, risk, middle), risk) <= delta:
            lowest = middle
        else:
            highest = middle
    return lowest


def binomial_tail(
    errors: Int[Array, "*n"] | Float[Array, "*n"], points: Int[Array, "*n"] | Float[Array, "*n"], risk: float
) -> Float[Array, "*n"]:
    r"""Probability of at most e errors, :math:`P(\mathrm{Bin}(n, r) \le e) = I_{1 - r}(n - e, e + 1)`; 1 for e = n.

    Between integers the right side interpolates.

    >>> binomial_tail(np.array([0, 1]), np.array([2, 2]), risk=0.1).round(9)
    array([0.81, 0.99])
    """
    from scipy.special import betainc

    right = points - errors
    return np.where(right > 0, betainc(np.where(right > 0, right, 1), errors + 1, 1.0 - risk), 1.0)


def upper_bound(errors: int, points: int, level: float) -> float:
    r"""Clopper-Pearson upper bound: the risk at which at most ``errors`` errors have probability ``level``.

    >>> round(upper_bound(0, 29, 0.05), 4)  # the rule of three: about 3 / 29
    0.0981
    """
    return float(upper_bounds(np.array([errors]), np.array([points]), level)[0])


def upper_bounds(errors: Int[Array, "n"], points: Int[Array, "n"], level: float) -> Float[Array, "n"]:
    """The bounds of :func:`upper_bound` for many counts."""
    from scipy.special import betaincinv

    right = points - errors
    return np.where(right > 0, betaincinv(errors + 1, np.maximum(right, 1), 1.0 - level), 1.0)


def least_points(risk: float, delta: float) -> int:
    r"""Least number of points that can promise a risk, all of them right: :math:`\lceil \log_{1 - r} \delta \rceil`.

    >>> least_points(risk=0.05, delta=0.05)
    59
    """
    # The factor corrects rounding, as in 0.5 ** 3 == 0.125.
    return math.ceil(math.log(delta) / math.log1p(-risk) * (1.0 - 1e-12))


def least_risk(errors: Int[Array, "n"], accepted: Int[Array, "n"], delta: float) -> float:
    """Least risk that some threshold can promise, up to a tenth above; 1 if there is none.

    Args:
        errors: Wrong predictions above each threshold, in the order of decreasing thresholds.
        accepted: Predictions above each threshold; the last entry is the number of points.
        delta: The allowed probability that the guarantee fails.

    >>> round(least_risk(np.zeros(50, dtype=int), np.arange(1, 51), delta=0.05), 3)  # about 3 / 50
    0.058
    """
    # At the level delta, which the search level never exceeds, no threshold has a smaller Clopper-Pearson bound.
    risk = float(upper_bounds(errors, accepted, delta).min()) * (1.0 + 1e-9)
    while risk < 1.0:
        if (binomial_tail(errors, accepted, risk) <= search_level(int(accepted[-1]), risk, delta)).any():
            return risk
        risk *= _STEP
    return 1.0


def points_needed(errors: Int[Array, "n"], accepted: Int[Array, "n"], risk: float, delta: float) -> int | None:
    """Estimate of the number of points that promise a risk, if further points err like these; None if none do.

    The error rate above a threshold is its share of wrong points. Thresholds with fewer than a tenth of the points are
    left out: their shares say little.

    Args:
        errors: Wrong predictions above each threshold, in the order of decreasing thresholds.
        accepted: Predictions above each threshold; the last entry is the number of points.
        risk: The wanted risk.
        delta: The allowed probability that the guarantee fails.

    >>> points_needed(np.zeros(30, dtype=int), np.arange(1, 31), risk=0.05, delta=0.05)
    59
    >>> points_needed(np.arange(1, 31), np.arange(1, 31), risk=0.05, delta=0.05)
    """
    points = int(accepted[-1])
    good = (errors / accepted < risk) & (accepted >= 0.1 * points)
    wrong, given = errors[good], accepted[good]
    level, found = delta, None
    for _ in range(2):  # the level depends on the number of points, and falls slowly with it
        factor = 1.0
        while factor < _MOST_FACTOR:
            if (binomial_tail(factor * wrong, factor * given, risk) <= level).any():
                break
            factor *= _STEP**0.25
        else:
            return None
        found = math.ceil(factor * points)
        level = search_level(min(found, _LARGE), risk, delta)
    return found


def _fewest_points(points: int, risk: float, level: float) -> Int[Array, "E"]:
    """For e = 0, 1, ... errors, the least number of points whose binomial tail is at most the level.

    The array ends at the last e for which the given number of points is enough.
    """
    from scipy.stats import binom

    # The tail increases with the errors, so the e that qualify with all points end at the quantile of the level.
    errors = np.arange(int(binom.ppf(level, points, risk)) + 1)
    errors = errors[binomial_tail(errors, np.full(len(errors), points), risk) <= level]
    below, enough = errors.copy(), np.full(len(errors), points)  # brackets of a binary search for every e
    while (enough - below > 1).any():
        middle = (below + enough) // 2
        reached = binomial_tail(errors, middle, risk) <= level
        below, enough = np.where(reached, below, middle), np.where(reached, middle, enough)
    return enough


def _chance_to_qualify(corners: Int[Array, "E"], risk: float) -> float:
    """Probability that, for some e, the first ``corners[e]`` points hold at most e errors; each errs with ``risk``.

    Goes from corner to corner with the distribution of the error count over the paths that have not qualified yet.
    """
    from scipy.stats import binom

    step_chances: dict[int, Any] = {}
    qualified, errors_from, points = 0.0, 0, 0
    chance = np.ones(1)  # chance[i]: probability of errors_from + i errors
    for e, corner in enumerate(corners.tolist()):
        step = corner - points
        if step not in step_chances:
            step_chances[step] = binom.pmf(np.arange(min(step, len(corners)) + 1), step, risk)
        chance = np.convolve(chance, step_chances[step])
        points = corner
        cut = e + 1 - errors_from
        qualified += float(chance[:cut].sum())
        # Paths with more errors than the last corner allows can never qualify.
        chance, errors_from = chance[cut : len(corners) - errors_from], e + 1
        # Count far tails as qualified: this is conservative and keeps the convolutions short.
        tail = chance[::-1].cumsum()
        far = int(np.searchsorted(tail, _FAR_TAIL))
        if far:
            qualified += float(tail[far - 1])
            chance = chance[: len(chance) - far]
        if len(chance) == 0:
            break
    return qualified


class ClassCalibration(NamedTuple):
    """Nonconformity scores of the calibration points of each class.

    ``ordered`` holds a row per class, in ascending order and padded with inf; ``counts`` holds the number of points of
    each class. Both are plain tensors, so that a module can register them as buffers.
    """

    ordered: Float[Tensor, "C M"]
    counts: Int[Tensor, "C"]


class RiskThreshold(NamedTuple):
    """Acceptance threshold that keeps a risk, with its statistics on the calibration points.

    ``accepted`` calibration points have a score of at least ``threshold``; ``errors`` of them are wrong, and
    ``coverage`` is their share of all points. ``level`` is the level at which each threshold is tested. ``bound`` is
    the Clopper-Pearson upper bound of the risk at confidence 1 - ``level``; it is at most the wanted risk. If no
    threshold qualifies, ``found`` is False, the threshold is inf, nothing is accepted and the bound is 1.
    """

    threshold: float
    coverage: float
    errors: int
    accepted: int
    bound: float
    level: float
    found: bool


def conformal_p_value(calibration: Float[Tensor, "M"], nonconformity: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    r"""Conformal p-value of each nonconformity score, :math:`p = \frac{1 + \#\{i : a_i \ge s\}}{M + 1}`.

    For a new point from the distribution of the calibration points, :math:`P(p \le u) \le u` for every u, with
    equality at every multiple of :math:`\frac{1}{M + 1}` if there are no ties.

    Args:
        calibration: Nonconformity scores :math:`a_i` of the calibration points; inf is allowed, NaN is not.
        nonconformity: Nonconformity scores s of the points to assess. NaN counts as inf.

    Every call sorts the calibration points. For many batches, sort once with :func:`sorted_calibration` and call
    :func:`p_value_from_sorted`.

    >>> conformal_p_value(torch.tensor([0.3, 0.1, 0.2]), torch.tensor([0.0, 0.2, 9.0]))
    tensor([1.0000, 0.7500, 0.2500])
    """
    return p_value_from_sorted(sorted_calibration(calibration), nonconformity)


def sorted_calibration(calibration: Float[Tensor, "M"]) -> Float[Tensor, "M"]:
    """Sort calibration scores in ascending order, for :func:`p_value_from_sorted`.

    >>> sorted_calibration(torch.tensor([0.3, 0.1, 0.2]))
    tensor([0.1000, 0.2000, 0.3000])
    """
    check_calibration(calibration)
    return calibration.detach().sort().values


def p_value_from_sorted(ordered: Float[Tensor, "M"], nonconformity: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Conformal p-values by binary search in sorted calibration scores; does not synchronise with the device.

    Values are not checked, since a check would synchronise.

    >>> p_value_from_sorted(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.2, torch.nan]))
    tensor([0.7500, 0.2500])
    """
    _check_vector(ordered, "sorted calibration points")
    if not nonconformity.is_floating_point():
        nonconformity = nonconformity.to(ordered.dtype)
    dtype = torch.promote_types(ordered.dtype, nonconformity.dtype)
    scores = _nan_to_inf(nonconformity).to(dtype).contiguous()
    return share_above(ordered.to(dtype).contiguous(), scores).to(nonconformity.dtype)


def share_above(ordered: Float[Tensor, "M"], scores: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """The p-value of :func:`p_value_from_sorted` in float64, without checks: tensors of one dtype, and no NaN.

    >>> share_above(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.2]))
    tensor([0.7500], dtype=torch.float64)
    """
    m = ordered.shape[0]
    # float64: float32 counts exactly only up to 2**24, about 17 million points.
    return (m + 1 - torch.searchsorted(ordered, scores)).double() / (m + 1)


def class_calibration(calibration: Float[Tensor, "M"], label: Int[Tensor, "M"], classes: int) -> ClassCalibration:
    """Sort calibration scores within each class, for :func:`class_p_value`.

    Args:
        calibration: Nonconformity scores of the calibration points; inf is allowed, NaN is not.
        label: The class of each point, as an index from 0.
        classes: Number of classes.

    >>> class_calibration(torch.tensor([0.3, 0.1, 0.2]), torch.tensor([0, 0, 2]), classes=3)
    ClassCalibration(ordered=tensor([[0.1000, 0.3000],
            [   inf,    inf],
            [0.2000,    inf]]), counts=tensor([2, 0, 1]))
    """
    check_calibration(calibration)
    if label.shape != calibration.shape:
        raise ValueError(
            f"Expected one label for each calibration point; got {tuple(calibration.shape)} values and "
            f"{tuple(label.shape)} labels."
        )
    if int(label.min()) < 0 or int(label.max()) >= classes:
        raise ValueError(
            f"Labels must be indices from 0 to {classes - 1} for {classes} classes, got {int(label.min())} to "
            f"{int(label.max())}. Leave points without a class out of the calibration."
        )
    count = torch.bincount(label, minlength=classes)
    value, by_value = calibration.detach().sort()
    row, by_class = label[by_value].sort(stable=True)
    column = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
    ordered = value.new_full((classes, int(count.max())), torch.inf)
    ordered[row, column] = value[by_class]
    return ClassCalibration(ordered, count)


def class_p_value(
    calibration: ClassCalibration, nonconformity: Float[Tensor, "B"], label: Int[Tensor, "B"]
) -> Float[Tensor, "B"]:
    r"""Class-conditional (Mondrian) conformal p-value, :math:`p = \frac{1 + \#_c}{M_c + 1}`.

    :math:`\#_c` counts the calibration points of the label's class c whose nonconformity score is at least as large;
    :math:`M_c` counts all calibration points of the class. :math:`P(p \le u) \le u` holds for the points of every class
    that are compared with their own class, also a rare one. It does not hold for predicted labels, which can be wrong.

    Args:
        calibration: The result of :func:`class_calibration`.
        nonconformity: Nonconformity scores of the points to assess. NaN counts as inf.
        label: The class that each point is compared with. p is 1 for a class without calibration points (0 in
            ``counts``), and for a label outside the classes, such as -1.

    >>> known = class_calibration(torch.tensor([0.3, 0.1, 0.2]), torch.tensor([0, 0, 2]), classes=3)
    >>> class_p_value(known, torch.tensor([0.2, 0.2, 0.9]), torch.tensor([0, 1, 2]))
    tensor([0.6667, 1.0000, 0.5000])
    """
    known = (label >= 0) & (label < calibration.ordered.shape[0])
    found = class_share_above(calibration, _nan_to_inf(nonconformity), torch.where(known, label, 0))
    return torch.where(known, found, 1.0).to(nonconformity.dtype)


def class_share_above(
    calibration: ClassCalibration, scores: Float[Tensor, "B"], row: Int[Tensor, "B"]
) -> Float[Tensor, "B"]:
    """The p-value of :func:`class_p_value` in float64, without checks: classes from 0 on, and no NaN."""
    most = calibration.ordered.shape[1]
    count = calibration.counts.index_select(0, row)
    if not torch.compiler.is_compiling() and len(row) * most <= _FEW_VALUES:
        ordered = calibration.ordered.index_select(0, row)
        below = torch.searchsorted(ordered, as_dtype(scores, ordered.dtype).unsqueeze(1)).squeeze(1)
    else:
        # Binary search in the row of each point's class. torch.searchsorted needs a row per point, a (B, M) temporary.
        flat = calibration.ordered.reshape(-1)
        below = torch.zeros_like(row)
        for power in reversed(range(most.bit_length())):
            further = below + 2**power
            value = flat[row * most + further.clamp(max=most) - 1]
            below = torch.where((further <= most) & (value < scores), further, below)
    # The padding (inf) is never below a score, so below <= count.
    total = count + 1
    return (total - below).double() / total


def flag_threshold(score: Float[Tensor, "M"], flag_rate: float) -> float:
    r"""Threshold that flags a new point of the calibration distribution with probability at most ``flag_rate``.

    Split conformal prediction: the threshold is the k-th smallest calibration score,
    :math:`k = \lfloor \alpha (M + 1) \rfloor` for the rate :math:`\alpha`. The probability is over the calibration set
    and the new point together. It is :math:`\frac{k}{M + 1}` without ties, and less with ties. Flag points with
    ``score < threshold``. This comparison is False for NaN; test for NaN separately.

    Args:
        score: Scores of the calibration points, higher is safer; -inf and inf are allowed, NaN is not.
        flag_rate: The share :math:`\alpha` of points that may be flagged. With too few points for the rate
            (:math:`k = 0`) the threshold is -inf and flags nothing.

    >>> flag_threshold(torch.arange(1.0, 100.0), flag_rate=0.05)
    5.0
    >>> flag_threshold(torch.arange(1.0, 10.0), flag_rate=0.05)
    -inf
    """
    check_calibration(score)
    flag_rate = check_share(flag_rate, "flag_rate")
    # The factor corrects rounding: 0.29 * 100 is slightly less than 29 in floating point.
    k = math.floor(flag_rate * (len(score) + 1) * (1.0 + 1e-12))
    return -math.inf if k < 1 else float(score.detach().kthvalue(min(k, len(score))).values)


def risk_threshold(score: Float[Tensor, "M"], correct: Bool[Tensor, "M"], risk: float, delta: float) -> RiskThreshold:
    r"""Lowest threshold t that provably keeps the risk, :math:`P(\mathrm{wrong} \mid \mathrm{score} \ge t) \le r`.

    With probability at least :math:`1 - \delta` over the calibration points, the returned threshold keeps the risk r on
    new points, or no threshold is found. Accept points with ``score >= threshold``; NaN is never accepted.

    A threshold with n accepted points, e of them wrong, qualifies if the exact binomial tail
    :math:`P(\mathrm{Bin}(n, r) \le e)` is at most a level :math:`\alpha`. :func:`search_level` sets :math:`\alpha` so
    that the search over all distinct scores fails with probability at most :math:`\delta`. The guarantee holds for all
    thresholds at once and for every distribution. Up to 1 %, no higher level :math:`\alpha \le \delta` has this
    property: the search over a useless score of risk r would fail with a probability above :math:`\delta`.

    Args:
        score: Scores of the calibration predictions, higher is safer; -inf is allowed and is accepted last, inf raises
            an error. New scores must be computed in the same way and dtype.
        correct: Whether each of these predictions is right.
        risk: The allowed share r of wrong predictions among the accepted ones.
        delta: The allowed probability :math:`\delta` that the guarantee fails.

    >>> score, correct = torch.linspace(1.0, 0.0, 101), torch.arange(101) < 80
    >>> found = risk_threshold(score, correct, risk=0.1, delta=0.1)
    >>> found.found, found.accepted, found.errors, round(found.bound, 3)
    (True, 83, 3, 0.094)
    """
    risk, delta = check_share(risk, "risk"), check_share(delta, "delta")
    check_calibration(score)
    check_correct(correct, score)
    if bool((score == torch.inf).any()):
        raise ValueError(
            "A calibration score is inf, so every threshold would accept it. Use a finite score, for instance "
            "1 - 1 / (1 + s) for s >= 0."
        )
    value, accepted, errors = counts_above(score, correct)
    level = search_level(len(score), risk, delta)
    qualified = np.flatnonzero(binomial_tail(errors, accepted, risk) <= level)
    if len(qualified) == 0:
        return RiskThreshold(math.inf, 0.0, 0, 0, 1.0, level, found=False)
    last = qualified[-1]
    e, n = int(errors[last]), int(accepted[last])
    return RiskThreshold(float(value[last]), n / len(score), e, n, upper_bound(e, n, level), level, found=True)


def passed_sequence(tails: Float[Array, "T"], expected: Float[Array, "T"], delta: float) -> int | None:
    r"""Index of the last threshold that passes its test in a fixed sequence of tests; None if the first one fails.

    The thresholds :math:`t_1 > t_2 > \dots` and the :math:`expected` tails come from points that are not ranked. The
    sequence starts at the least expected tail and goes down. It ends at the first threshold whose tail exceeds
    :math:`\delta`.

    The returned threshold keeps the risk with probability at least :math:`1 - \delta`, although every test has the
    level :math:`\delta`. Proof: the sequence is fixed before a ranked point is seen. If some of its thresholds break
    the risk, let t be the first of them. A threshold that breaks the risk can be returned only if t passes, and then
    :math:`P(\mathrm{Bin}(n, r) \le e) \le \delta` for n accepted and e wrong points, where e given n is
    stochastically larger than :math:`\mathrm{Bin}(n, r)`: this has a probability of at most :math:`\delta`. If a
    threshold must keep the risk in several groups, its tail is the largest one of the groups: a threshold that breaks
    the risk in some group passes the test of this group with probability at most :math:`\delta`.

    Args:
        tails: Binomial tails of the ranked points at each threshold, in the order of descending thresholds.
        expected: The tails that points which are not ranked let expect.
        delta: The allowed probability that the promise fails.

    >>> passed_sequence(np.array([0.2, 0.01, 0.03, 0.3, 0.01]), np.array([0.5, 0.02, 0.1, 0.2, 0.3]), delta=0.05)
    2
    """
    start = int(np.argmin(expected))
    failed = np.flatnonzero(~(tails[start:] <= delta))
    last = start + (int(failed[0]) if len(failed) else len(tails) - start) - 1
    return last if last >= start else None


def average_threshold(score: Float[Tensor, "M"], correct: Bool[Tensor, "M"], risk: float) -> float:
    r"""Lowest threshold t with :math:`\frac{e(t) + 1}{n(t) + 1} \le r`; inf if there is none.

    n(t) counts the calibration points with a score of at least t, and e(t) the wrong ones among them. For a new point
    and the share :math:`q = \frac{n(t) + 1}{M + 1}` of accepted calibration points, on average over calibration sets,

    .. math:: E\left[\frac{P(\mathrm{wrong}, \mathrm{score} \ge t)}{q}\right] \le r.

    The numerator is the share of all new points that are accepted and wrong; divided by the share that is accepted it
    would be the risk. The risk of a single calibration set exceeds r about as often as not.

    Proof. Let the new point be wrong and accepted at t. Counted with it, t is the lowest threshold with
    :math:`e' \le r n'` below its score, a symmetric function of the W wrong points among all M + 1 points. Given the
    points without their order, the new one is each of the W with equal probability, so that
    :math:`E[1\{\mathrm{accepted}\} / e'(t) \mid \mathrm{wrong}] \le 1 / W`. By exchangeability
    :math:`E[1\{\mathrm{wrong}\} / W] \le 1 / (M + 1)`. With :math:`1 / n' \le r / e'`, the expectation of
    :math:`1\{\mathrm{wrong}, \mathrm{accepted}\} / n'` is at most :math:`r / (M + 1)`.

    Args:
        score: Scores of the calibration predictions, higher is safer.
        correct: Whether each of these predictions is right.
        risk: The allowed share r.

    >>> average_threshold(torch.linspace(1.0, 0.0, 101), torch.arange(101) < 80, risk=0.1)
    0.14...
    """
    risk = check_share(risk, "risk")
    check_calibration(score)
    check_correct(correct, score)
    value, accepted, errors = counts_above(score, correct)
    good = np.flatnonzero(errors + 1 <= risk * (accepted + 1) * (1.0 + 1e-12))
    return float(value[good[-1]]) if len(good) else math.inf


def counts_above(
    score: Float[Tensor, "M"], correct: Bool[Tensor, "M"]
) -> tuple[Float[Array, "T"], Int[Array, "T"], Int[Array, "T"]]:
    """Distinct scores from the highest down, with the number of points and of wrong points at or above each.

    >>> value, accepted, errors = counts_above(torch.tensor([0.5, 0.9, 0.5]), torch.tensor([True, True, False]))
    >>> accepted, errors
    (array([1, 3]), array([0, 1]))
    """
    value, group = np.unique(score.detach().cpu().double().numpy(), return_inverse=True)
    wrong = (~correct).cpu().double().numpy()
    # Equal scores are accepted together.
    accepted = np.bincount(group)[::-1].cumsum()
    errors = np.bincount(group, weights=wrong)[::-1].cumsum().astype(np.int64)
    return value[::-1], accepted, errors


def check_calibration(values: Any) -> None:
    """Raise an error unless the calibration points are a 1-D floating-point tensor without NaN."""
    _check_vector(values, "calibration points")
    if bool(values.isnan().any()):
        raise ValueError(
            "A calibration point is NaN. Replace NaN by -inf in a score, or by inf in a nonconformity score. Dropping "
            "the point would make the guarantee too optimistic."
        )


def check_correct(correct: Any, score: Tensor) -> None:
    """Raise an error unless ``correct`` is a boolean tensor with one element per score."""
    if not isinstance(correct, Tensor) or correct.dtype != torch.bool:
        given = correct.dtype if isinstance(correct, Tensor) else type(correct).__name__
        raise TypeError(f"correct must be a boolean tensor, got {given}; use label == target.")
    if correct.shape != score.shape:
        raise ValueError(
            f"Expected one element of correct for each score; got {tuple(score.shape)} scores and "
            f"{tuple(correct.shape)} elements."
        )


def _check_vector(values: Any, name: str) -> None:
    if not isinstance(values, Tensor) or not values.is_floating_point():
        given = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(
            f"The {name} must be a tensor of floating-point numbers, got {given}; use torch.as_tensor(...).double()."
        )
    if values.ndim != 1:
        raise ValueError(f"The {name} must have shape (M,); got the shape {tuple(values.shape)}.")
    if values.shape[0] == 0:
        raise ValueError(f"There are no {name}; hold out some points from training.")


def check_share(value: Any, name: str) -> float:
    """Return a share strictly between 0 and 1 as a float, or raise an error."""
    if isinstance(value, str) or not hasattr(value, "__float__") or getattr(value, "shape", ()) != ():
        raise TypeError(f"{name} must be a number between 0 and 1, got {value!r}.")
    share = float(value)
    if not 0.0 < share < 1.0:  # written so that NaN fails too
        raise ValueError(f"{name} must lie between 0 and 1, both excluded; got {share}.")
    return share


def _nan_to_inf(nonconformity: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    return torch.where(nonconformity.isnan(), torch.inf, nonconformity.detach())
