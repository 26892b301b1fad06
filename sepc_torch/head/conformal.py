r"""What can be promised of fresh points, from points held back for calibration.

All of it is exact for every sample size and every distribution: calibration points and fresh points need only be drawn
independently from the same one. None may have been used to train the network or to fit the partition, and after a shift
of the data the promises no longer hold. The higher the score, the safer; the higher the strangeness, the less so.

Three promises: :func:`conformal_p_value`, how often an ordinary point would be as strange as this one;
:func:`flag_threshold`, at most so many ordinary points are flagged; :func:`risk_threshold`, at most so many of the
accepted predictions are wrong.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch.shapes import Array, Bool, Float, Int


class ClassCalibration(NamedTuple):
    """Strangeness of the calibration points of every class: rows in ascending order, padded with inf, and their counts.

    Both are plain tensors, so that a module can keep them as buffers.
    """

    ordered: Float[Tensor, "C M"]
    counts: Int[Tensor, "C"]


class RiskThreshold(NamedTuple):
    """From which score on predictions are accepted, and what the calibration points say of that.

    ``accepted`` of the calibration points, ``errors`` of them wrong, have at least the ``threshold``; ``coverage`` is
    their share. ``bound`` is the Clopper-Pearson upper bound of the risk there at the confidence 1 - ``level``, the
    level at which every threshold was tested; it is at most the wanted risk. Where no threshold qualifies, ``found`` is
    False, the threshold is inf, nothing is accepted and the bound is 1.
    """

    threshold: float
    coverage: float
    errors: int
    accepted: int
    bound: float
    level: float
    found: bool


def conformal_p_value(calibration: Float[Tensor, "M"], strangeness: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    r"""How often an ordinary point is as strange as this one, :math:`p = \frac{1 + \#\{i : a_i \ge s\}}{M + 1}`.

    For a fresh point from the distribution of the calibration points, :math:`P(p \le u) \le u` for every u, with
    equality at every multiple of :math:`\frac{1}{M + 1}` if there are no ties.

    Args:
        calibration: The strangeness :math:`a_i` of ordinary points held back; inf is allowed, NaN is not.
        strangeness: The strangeness s of the points to judge. NaN is taken for inf, the strangest that can be.

    The calibration points are sorted at every call; sort once with :func:`sorted_calibration` and use
    :func:`p_value_from_sorted` to judge many batches.

    >>> conformal_p_value(torch.tensor([0.3, 0.1, 0.2]), torch.tensor([0.0, 0.2, 9.0]))
    tensor([1.0000, 0.7500, 0.2500])
    """
    return p_value_from_sorted(sorted_calibration(calibration), strangeness)


def sorted_calibration(calibration: Float[Tensor, "M"]) -> Float[Tensor, "M"]:
    """Calibration points in ascending order, for :func:`p_value_from_sorted`; a module can keep them as a buffer.

    >>> sorted_calibration(torch.tensor([0.3, 0.1, 0.2]))
    tensor([0.1000, 0.2000, 0.3000])
    """
    check_calibration(calibration)
    return calibration.detach().sort().values


def p_value_from_sorted(ordered: Float[Tensor, "M"], strangeness: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """The p-value of :func:`conformal_p_value` by binary search; no value is checked, so that a GPU need not wait.

    >>> p_value_from_sorted(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.2, torch.nan]))
    tensor([0.7500, 0.2500])
    """
    _check_line(ordered, "sorted calibration points")
    if not strangeness.is_floating_point():
        strangeness = strangeness.to(ordered.dtype)
    dtype = torch.promote_types(ordered.dtype, strangeness.dtype)
    below = torch.searchsorted(ordered.to(dtype).contiguous(), _nan_is_strangest(strangeness).to(dtype).contiguous())
    m = ordered.shape[0]
    # In float64: float32 could not count more than 17 million points.
    return ((m + 1 - below).double() / (m + 1)).to(strangeness.dtype)


def class_calibration(calibration: Float[Tensor, "M"], label: Int[Tensor, "M"], classes: int) -> ClassCalibration:
    """Calibration points sorted within each of so many classes, for :func:`class_p_value`.

    >>> class_calibration(torch.tensor([0.3, 0.1, 0.2]), torch.tensor([0, 0, 2]), classes=3)
    ClassCalibration(ordered=tensor([[0.1000, 0.3000],
            [   inf,    inf],
            [0.2000,    inf]]), counts=tensor([2, 0, 1]))
    """
    check_calibration(calibration)
    if label.shape != calibration.shape:
        raise ValueError(
            f"Every calibration point needs one label; got {tuple(calibration.shape)} values and {tuple(label.shape)} "
            "labels."
        )
    if int(label.min()) < 0 or int(label.max()) >= classes:
        raise ValueError(
            f"Labels are indices from 0 to {classes - 1} for {classes} classes, got {int(label.min())} to "
            f"{int(label.max())}; leave points without a class out of the calibration."
        )
    count = torch.bincount(label, minlength=classes)
    value, by_value = calibration.detach().sort()
    row, by_class = label[by_value].sort(stable=True)
    column = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
    ordered = value.new_full((classes, int(count.max())), torch.inf)
    ordered[row, column] = value[by_class]
    return ClassCalibration(ordered, count)


def class_p_value(
    calibration: ClassCalibration, strangeness: Float[Tensor, "B"], label: Int[Tensor, "B"]
) -> Float[Tensor, "B"]:
    r"""How often an ordinary point of this class is as strange (Mondrian), :math:`\frac{1 + \#_c}{M_c + 1}`.

    :math:`\#_c` counts the calibration points of the label's class c that are at least as strange, :math:`M_c` all of
    them. So :math:`P(p \le u) \le u` holds within every class, rare ones too.

    Args:
        calibration: From :func:`class_calibration`.
        strangeness: Of the points to judge; NaN is taken for inf, the strangest that can be.
        label: The class that each point is compared with. A class without calibration points (0 in ``counts``) can call
            nothing strange: p is 1. So it is for a label that is no class, such as -1.

    >>> known = class_calibration(torch.tensor([0.3, 0.1, 0.2]), torch.tensor([0, 0, 2]), classes=3)
    >>> class_p_value(known, torch.tensor([0.2, 0.2, 0.9]), torch.tensor([0, 1, 2]))
    tensor([0.6667, 1.0000, 0.5000])
    """
    classes, most = calibration.ordered.shape
    known = (label >= 0) & (label < classes)
    row = torch.where(known, label, 0)
    count = torch.where(known, calibration.counts[row], 0)
    strange = _nan_is_strangest(strangeness)
    # Binary search in each point's own row; a row per point, as searchsorted wants it, would be a (B, M) temporary.
    flat = calibration.ordered.reshape(-1)
    below = torch.zeros_like(row)
    for power in reversed(range(most.bit_length())):
        further = below + 2**power
        value = flat[row * most + further.clamp(max=most) - 1]
        below = torch.where((further <= most) & (value < strange), further, below)
    # A row's padding is never below anything, so below is at most count, but for labels that are no class.
    return ((1 + (count - below).clamp(min=0)).double() / (count + 1)).to(strangeness.dtype)


def flag_threshold(score: Float[Tensor, "M"], flag_rate: float) -> float:
    r"""The threshold below which a fresh ordinary point falls with probability at most ``flag_rate``.

    Split conformal: the k-th smallest calibration score, :math:`k = \lfloor \alpha (M + 1) \rfloor` for the rate
    :math:`\alpha`. The probability is over calibration and fresh point together and is :math:`\frac{k}{M + 1}` if there
    are no ties, less with them. Flag points with ``score < threshold``; NaN is below nothing, so look for it apart.

    Args:
        score: Scores of ordinary points held back, higher is safer; -inf and inf are allowed, NaN is not.
        flag_rate: The share :math:`\alpha` of ordinary points that may be flagged. With :math:`k = 0`, fewer points
            than the rate needs, nothing can be flagged: the threshold is -inf.

    >>> flag_threshold(torch.arange(1.0, 100.0), flag_rate=0.05)
    5.0
    >>> flag_threshold(torch.arange(1.0, 10.0), flag_rate=0.05)
    -inf
    """
    check_calibration(score)
    flag_rate = check_share(flag_rate, "flag_rate")
    # A hair more, so that 0.29 of 100 is 29 and not, by rounding, 28.
    k = math.floor(flag_rate * (len(score) + 1) * (1.0 + 1e-12))
    return -math.inf if k < 1 else float(score.detach().kthvalue(min(k, len(score))).values)


def risk_threshold(score: Float[Tensor, "M"], correct: Bool[Tensor, "M"], risk: float, delta: float) -> RiskThreshold:
    r"""The lowest threshold t for which :math:`P(\mathrm{wrong} \mid \mathrm{score} \ge t) \le r` is proven.

    With probability at least :math:`1 - \delta` over the calibration points the returned threshold keeps the risk r on
    fresh points, or none is found. Accept points with ``score >= threshold``; NaN is never accepted.

    A threshold with n points, e of them wrong, qualifies if the exact binomial tail :math:`P(\mathrm{Bin}(n, r) \le e)`
    is at most a level :math:`\alpha`. :func:`search_level` sets :math:`\alpha` so that the search over all distinct
    scores errs with probability :math:`\delta`.

    Why this one: it holds for all thresholds at once, whatever the distribution, and the level is the highest that
    does, attained by a useless score whose risk is r. In simulations (100 to 10000 points, risk 0.01 to 0.1, error
    0.02 to 0.3, scores of all qualities) it accepted on average 41 % of the points; fixed sequences from 1, 2 or 4
    starts 29, 39 and 38 %, the binary search of selective guaranteed risk 34 %, Bonferroni over halved ranks 33 %.

    Args:
        score: Of predictions held back, higher is safer; -inf for those to accept last, inf is refused. Fresh scores
            must be computed in the same way and dtype.
        correct: Which of these predictions are right.
        risk: The share of wrong ones among the accepted that is allowed, r.
        delta: The probability that the promise may fail, :math:`\delta`.

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
            "A calibration score is inf, which no threshold refuses; use a finite score, such as m / (1 + m)."
        )
    value, group = np.unique(score.detach().cpu().double().numpy(), return_inverse=True)
    wrong = (~correct).cpu().double().numpy()
    # From the highest score down; equal scores are accepted together or not at all.
    accepted = np.bincount(group)[::-1].cumsum()
    errors = np.bincount(group, weights=wrong)[::-1].cumsum().astype(np.int64)
    level = search_level(len(wrong), risk, delta)
    qualified = np.flatnonzero(binomial_tail(errors, accepted, risk) <= level)
    if len(qualified) == 0:
        return RiskThreshold(math.inf, 0.0, 0, 0, 1.0, level, found=False)
    last = qualified[-1]
    e, n = int(errors[last]), int(accepted[last])
    return RiskThreshold(float(value[::-1][last]), n / len(wrong), e, n, upper_bound(e, n, level), level, found=True)


@functools.lru_cache(maxsize=256)
def search_level(points: int, risk: float, delta: float) -> float:
    r"""The level :math:`\alpha` of one test that makes all tests of :func:`risk_threshold` together err at most delta.

    .. math:: P\big(\exists\, n \le M : P(\mathrm{Bin}(n, r) \le E_n) \le \alpha\big) \le \delta, \quad
        E_n = e_1 + \dots + e_n, \quad e_i \sim \mathrm{Bernoulli}(r),

    and no larger :math:`\alpha` does, up to 1 %. This is the probability for a useless score of risk r, and no other
    distribution has a larger one: let B be the thresholds of too high a risk. For t in B,
    :math:`P(S \ge t, \mathrm{wrong}) \ge r P(S \ge t)` and :math:`P(S \ge t, \mathrm{right}) \le (1 - r) P(S \ge t)`.
    So each calibration point can be drawn together with one of the useless score such that, over all t in B at once,
    wrong points are accepted no less and right points no more than there; and the tail falls in both directions.

    >>> round(search_level(1000, risk=0.05, delta=0.1), 3)
    0.018
    """
    highest = delta
    corners = _fewest_points(points, risk, highest)
    if _chance_to_qualify(corners, risk) <= delta:
        return highest
    # At this level the chances of the corners add up to delta at most.
    lowest = delta / len(corners)
    while highest > 1.01 * lowest:
        middle = math.sqrt(lowest * highest)
        if _chance_to_qualify(_fewest_points(points, risk, middle), risk) <= delta:
            lowest = middle
        else:
            highest = middle
    return lowest


def binomial_tail(errors: Int[Array, "n"], points: Int[Array, "n"], risk: float) -> Float[Array, "n"]:
    r"""The chance of so few errors, :math:`P(\mathrm{Bin}(n, r) \le e) = I_{1 - r}(n - e, e + 1)`; 1 for e = n.

    >>> binomial_tail(np.array([0, 1]), np.array([2, 2]), risk=0.1).round(9)
    array([0.81, 0.99])
    """
    from scipy.special import betainc  # here: a frozen model runs without SciPy

    right = points - errors
    return np.where(right > 0, betainc(np.maximum(right, 1), errors + 1, 1.0 - risk), 1.0)


def upper_bound(errors: int, points: int, level: float) -> float:
    r"""Clopper-Pearson: the largest risk for which so few errors have a chance of ``level``.

    >>> round(upper_bound(0, 29, 0.05), 4)  # the rule of three: about 3 / 29
    0.0981
    """
    from scipy.special import betaincinv

    return 1.0 if errors == points else float(betaincinv(errors + 1, points - errors, 1.0 - level))


def check_calibration(values: Any) -> None:
    """A clear error for calibration points that cannot promise anything."""
    _check_line(values, "calibration points")
    if bool(values.isnan().any()):
        raise ValueError(
            "A calibration point is NaN. Decide what such a point is worth, for instance -inf as a score or inf as "
            "strangeness; leaving it out would promise too much."
        )


def check_correct(correct: Any, score: Tensor) -> None:
    """A clear error for anything but one true or false for each score."""
    if not isinstance(correct, Tensor) or correct.dtype != torch.bool:
        given = correct.dtype if isinstance(correct, Tensor) else type(correct).__name__
        raise TypeError(f"What is right is given as a boolean tensor, got {given}; use label == target.")
    if correct.shape != score.shape:
        raise ValueError(
            f"Every score needs one true or false; got {tuple(score.shape)} scores and {tuple(correct.shape)} of those."
        )


def _check_line(values: Any, name: str) -> None:
    if not isinstance(values, Tensor) or not values.is_floating_point():
        given = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(
            f"The {name} are a tensor of floating point numbers, got {given}; use torch.as_tensor(...).double()."
        )
    if values.ndim != 1:
        raise ValueError(f"The {name} are one number each, shape (M,); got the shape {tuple(values.shape)}.")
    if values.shape[0] == 0:
        raise ValueError(f"There are no {name}; hold some points back from training.")


def check_share(value: Any, name: str) -> float:
    """A share between 0 and 1 as a plain number, or a clear error."""
    if isinstance(value, str) or not hasattr(value, "__float__") or getattr(value, "shape", ()) != ():
        raise TypeError(f"{name} must be a number between 0 and 1, got {value!r}.")
    share = float(value)
    if not 0.0 < share < 1.0:  # in this form NaN is refused too
        raise ValueError(f"{name} must lie between 0 and 1, both excluded; got {share}.")
    return share


def _nan_is_strangest(strangeness: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    return torch.where(strangeness.isnan(), torch.inf, strangeness.detach())


def _fewest_points(points: int, risk: float, level: float) -> Int[Array, "E"]:
    """For 0, 1, ... errors, how many points bring the tail down to the level; as far as there are so many points."""
    from scipy.stats import binom

    # The tail grows with the errors: those that qualify with all points come first, up to the quantile of the level.
    errors = np.arange(int(binom.ppf(level, points, risk)) + 1)
    errors = errors[binomial_tail(errors, np.full(len(errors), points), risk) <= level]
    below, enough = errors.copy(), np.full(len(errors), points)
    while (enough - below > 1).any():
        middle = (below + enough) // 2
        reached = binomial_tail(errors, middle, risk) <= level
        below, enough = np.where(reached, below, middle), np.where(reached, middle, enough)
    return enough


def _chance_to_qualify(corners: Int[Array, "E"], risk: float) -> float:
    """The chance of at most e errors in the first ``corners[e]`` points for some e, every point wrong with this risk.

    Goes from corner to corner with the distribution of the errors so far among the paths that have not qualified.
    """
    from scipy.stats import binom

    step_chances: dict[int, Any] = {}
    qualified, errors_from, points = 0.0, 0, 0
    chance = np.ones(1)  # of errors_from, errors_from + 1, ... errors
    for e, corner in enumerate(corners.tolist()):
        step = corner - points
        if step not in step_chances:
            step_chances[step] = binom.pmf(np.arange(min(step, len(corners)) + 1), step, risk)
        chance = np.convolve(chance, step_chances[step])
        points = corner
        cut = e + 1 - errors_from
        qualified += float(chance[:cut].sum())
        # More errors than any corner allows can never qualify.
        chance, errors_from = chance[cut : len(corners) - errors_from], e + 1
        # Far tails are taken for qualified, which is on the safe side, and cost nothing from here on.
        tail = chance[::-1].cumsum()
        far = int(np.searchsorted(tail, 1e-13))
        if far:
            qualified += float(tail[far - 1])
            chance = chance[: len(chance) - far]
        if len(chance) == 0:
            break
    return qualified
