r"""Exact binomial search: the level at which a search over thresholds fails with probability at most delta.

- :func:`search_level`: the level of the binomial tests in :func:`~sepc_torch.guarantees.risk_threshold`.
- :func:`least_points`, :func:`least_risk`, :func:`points_needed`: the limits of a promise, for error messages.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from sepc_torch.data.scipy_parts import scipy_part
from sepc_torch.shapes import Array, Float, Int

__all__ = ["binomial_tail", "least_points", "least_risk", "points_needed", "search_level", "upper_bound"]

# What an error message calls the functions here.
_WHAT = "A promised risk (accept_at(risk=...), stop_at)"
# Steps of the search for the least risk and for the number of points: a tenth, since both are estimates.
_STEP = 1.1
# Largest factor on the number of points that is worth naming.
_MOST_FACTOR = 1e4
# Above this number of points the level hardly changes, and computing it takes seconds.
_LARGE = 20_000


@functools.lru_cache(maxsize=4096)
def search_level(points: int, risk: float, delta: float) -> float:
    r"""Highest level :math:`\alpha \le \delta` of the tests that limits the failure of :func:`risk_threshold` to delta.

    .. math:: P\big(\exists\, n \le M : P(\mathrm{Bin}(n, r) \le E_n) \le \alpha\big) \le \delta, \quad
        E_n = e_1 + \dots + e_n, \quad e_i \sim \mathrm{Bernoulli}(r),

    and no :math:`\alpha \le \delta` larger by more than 1 % satisfies the inequality. The left side is the failure
    probability of a useless score of risk r. No other distribution has a larger one. Proof: let B be the set of
    thresholds whose risk exceeds r. For t in B, :math:`P(S \ge t, \mathrm{wrong}) \ge r P(S \ge t)` and
    :math:`P(S \ge t, \mathrm{right}) \le (1 - r) P(S \ge t)`. Each calibration point can therefore be coupled with a
    point of the useless score such that, for all t in B at once, wrong points are accepted at least as often and right
    points at most as often. The tail falls with fewer wrong and with more right points, so the useless score qualifies
    whenever this one does.

    >>> round(search_level(1000, risk=0.05, delta=0.1), 3)
    0.018
    """
    highest = delta
    corners = _fewest_points(points, risk, highest)
    if _chance_to_qualify(corners, risk) <= delta:
        return highest
    # Union bound: at this level the probabilities of the corners sum to at most delta.
    lowest = delta / len(corners)
    while highest > 1.01 * lowest:
        middle = math.sqrt(lowest * highest)
        if _chance_to_qualify(_fewest_points(points, risk, middle), risk) <= delta:
            lowest = middle
        else:
            highest = middle
    return lowest


def binomial_tail(errors: Int[Array, "n"], points: Int[Array, "n"], risk: float) -> Float[Array, "n"]:
    r"""Probability of at most e errors, :math:`P(\mathrm{Bin}(n, r) \le e) = I_{1 - r}(n - e, e + 1)`; 1 for e = n.

    >>> binomial_tail(np.array([0, 1]), np.array([2, 2]), risk=0.1).round(9)
    array([0.81, 0.99])
    """
    betainc = scipy_part("special", _WHAT).betainc
    right = points - errors
    return np.where(right > 0, betainc(np.maximum(right, 1), errors + 1, 1.0 - risk), 1.0)


def upper_bound(errors: int, points: int, level: float) -> float:
    r"""Clopper-Pearson upper bound: the risk at which at most ``errors`` errors have probability ``level``.

    >>> round(upper_bound(0, 29, 0.05), 4)  # the rule of three: about 3 / 29
    0.0981
    """
    betaincinv = scipy_part("special", _WHAT).betaincinv
    return 1.0 if errors == points else float(betaincinv(errors + 1, points - errors, 1.0 - level))


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
    betaincinv = scipy_part("special", _WHAT).betaincinv
    right = accepted - errors
    # At the level delta, which the search level never exceeds, no threshold has a smaller Clopper-Pearson bound.
    bounds = np.where(right > 0, betaincinv(errors + 1, np.maximum(right, 1), 1.0 - delta), 1.0)
    risk = float(bounds.min()) * (1.0 + 1e-9)
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
    60
    >>> points_needed(np.arange(1, 31), np.arange(1, 31), risk=0.05, delta=0.05)
    """
    points = int(accepted[-1])
    rate = errors / accepted
    good = (rate < risk) & (accepted >= 0.1 * points)
    rate, share = rate[good], accepted[good]
    level, found = delta, None
    for _ in range(2):  # the level depends on the number of points, and falls slowly with it
        factor = 1.0
        while factor < _MOST_FACTOR:
            n = np.floor(factor * share).astype(np.int64)
            if (binomial_tail(np.floor(n * rate).astype(np.int64), np.maximum(n, 1), risk) <= level).any():
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
    binom = scipy_part("stats", _WHAT).binom
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
    binom = scipy_part("stats", _WHAT).binom
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
        far = int(np.searchsorted(tail, 1e-13))
        if far:
            qualified += float(tail[far - 1])
            chance = chance[: len(chance) - far]
        if len(chance) == 0:
            break
    return qualified
