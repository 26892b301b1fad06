r"""Promises for rows that come in units: pixels of a picture, frames of a video, records of a patient.

Rows of a unit are not independent; units are. A unit u has :math:`n_u` rows. At the threshold t it accepts the share
:math:`A_u(t)` of its rows, and the share :math:`W_u(t) \le A_u(t)` of its rows is accepted and wrong.

- :func:`unit_risk_threshold` promises, with probability at least :math:`1 - \delta` over calibration units,

  .. math:: \frac{E[W_u(t)]}{E[A_u(t)]} \le r.

  This is the share of wrong labels among accepted ones if a unit is drawn, and then one of its rows: every unit counts
  alike. For units of one size it is the share among all accepted rows, and for units of one row it is the promise of
  :func:`~sepc_torch.head.promises.conformal.risk_threshold`. The mean of :math:`W_u / A_u`, with 0 for a unit without
  accepted rows, would promise less: a threshold at which one unit in ten accepts anything keeps every risk above 10 %.
  The number of units that are needed is about :math:`\log(1 / \delta) / (r E[A_u] - E[W_u])`: a score that accepts few
  rows of each unit needs many units, because all rows of a rare unit may be accepted and wrong.
- :func:`unit_flag_threshold` promises that a unit has on average at most a share :math:`\alpha` of its rows refused.

Both hold for every number of units and every distribution of units, with any dependence between the rows of a unit.
They assume that calibration units and new units are drawn independently from one distribution, and that the score was
fitted to other units than those that set the threshold.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from sepc_torch.head.promises.conformal import check_share
from sepc_torch.shapes import Array, Bool, Float, Int

# Largest share of the capital that a bet can lose. Less than 1: a unit whose rows are all accepted and wrong would
# otherwise end all bets.
_LARGEST_BET = 0.999
# Candidate thresholds: each accepts one hundredth of the fitted rows more than the one before. A finer sequence ends
# earlier by chance, a coarser one ends further above the lowest threshold that keeps the risk.
_CANDIDATES = 100
# Step of the search for the least risk, which is an estimate.
_STEP = 1.1


class UnitRows(NamedTuple):
    """Scores of rows, higher is safer, whether their labels are right, and the unit of each row (any integers)."""

    score: Float[Array, "n"]
    right: Bool[Array, "n"]
    unit: Int[Array, "n"]


class UnitShares(NamedTuple):
    """Shares of the rows of each of U units that are accepted, and accepted and wrong, at each of T thresholds."""

    accepted: Float[Array, "T U"]
    wrong: Float[Array, "T U"]


def unit_shares(rows: UnitRows, thresholds: Float[Array, "T"]) -> UnitShares:
    """Shares of accepted rows (score at or above a threshold) and of wrong accepted rows, in each unit.

    The order of the units is random, but always the same for the same units: it depends on no score and no label.

    Args:
        rows: The rows; there must be at least one.
        thresholds: Thresholds in descending order.

    >>> rows = UnitRows(np.array([0.9, 0.5]), np.array([True, False]), np.array([7, 7]))
    >>> unit_shares(rows, np.array([0.8, 0.4])).wrong
    array([[0. ],
           [0.5]])
    """
    names, unit = np.unique(rows.unit, return_inverse=True)
    unit = np.random.default_rng(0).permutation(len(names))[unit]
    count, steps = len(names), len(thresholds)
    # The first threshold that accepts each row; rows that none accepts are in the last cells, which are cut.
    first = steps - np.searchsorted(thresholds[::-1], rows.score, side="right")
    cells = first * count + unit
    accepted, wrong = (
        np.bincount(some, minlength=(steps + 1) * count).reshape(steps + 1, count)[:steps].cumsum(axis=0)
        for some in (cells, cells[~rows.right])
    )
    sizes = np.bincount(unit)
    return UnitShares(accepted / sizes, wrong / sizes)


def log_capital(shares: UnitShares, risk: float, delta: float) -> Float[Array, "T"]:
    r"""Largest logarithm of the capital that bets against a risk above r reach, at each threshold.

    .. math:: K_i = \prod_{j \le i} (1 + \lambda_j (r A_j - W_j)), \quad
        \lambda_j = \min\Big(\sqrt{2 \log(1 / \delta) / (U v_{j - 1})}, \frac{c}{1 - r}\Big)

    where :math:`v_{j-1}` is the variance of :math:`Y_i = r + W_i - r A_i \in [0, 1]` over the units before j, with one
    further value of mean 1/2 and variance 1/4 (Waudby-Smith and Ramdas 2024, Journal of the Royal Statistical Society B
    86). If :math:`E[W] > r E[A]`, then :math:`E[Y] > r`, every factor is positive and has an expectation of at most 1
    given the units before, because :math:`\lambda_j` depends only on these. K is then a supermartingale, and by Ville's
    inequality :math:`P(\max_i K_i \ge 1 / \delta) \le \delta`.

    >>> all_right = UnitShares(np.ones((1, 50)), np.zeros((1, 50)))
    >>> bool(log_capital(all_right, risk=0.1, delta=0.05)[0] >= np.log(20))
    True
    """
    gain = risk * shares.accepted - shares.wrong
    loss, units = risk - gain, gain.shape[1]
    known = np.arange(2, units + 2)
    mean = (0.5 + loss.cumsum(axis=1)) / known
    variance = (0.25 + ((loss - mean) ** 2).cumsum(axis=1)) / known
    before = np.concatenate([np.full((len(gain), 1), 0.25), variance[:, :-1]], axis=1)
    bet = np.minimum(np.sqrt(2.0 * math.log(1.0 / delta) / (units * before)), _LARGEST_BET / (1.0 - risk))
    found: Float[Array, "T"] = np.log1p(bet * gain).cumsum(axis=1).max(axis=1)
    return found


def candidates(score: Float[Array, "f"]) -> Float[Array, "T"]:
    """Thresholds to test, in descending order: hundredths of the scores of rows that are not ranked.

    >>> candidates(np.arange(1.0, 1001.0))[[0, 1, -1]]
    array([991., 981.,   1.])
    """
    ranks = np.ceil(np.arange(1, _CANDIDATES + 1) / _CANDIDATES * len(score)).astype(int) - 1
    return np.unique(np.sort(score)[::-1][ranks])[::-1]


def unit_risk_threshold(
    ranked: UnitRows, fitted: UnitRows, thresholds: Float[Array, "T"], risk: float, delta: float
) -> float:
    r"""Threshold that keeps the risk over units, :math:`E[W_u(t)] \le r E[A_u(t)]`; inf if none is found.

    The tests go through the thresholds in descending order. They start where the fitted units show most evidence
    (:func:`log_capital`), and end at the first threshold where the capital of the ranked units stays below
    :math:`1 / \delta`. The threshold before it is returned.

    Proof that the risk is kept with probability at least :math:`1 - \delta`, or nothing is accepted: thresholds and
    start depend on the fitted units only, so they are fixed before a ranked unit is seen. If some tested thresholds
    break the risk, let t be the first of them in the sequence. A threshold that breaks the risk can be returned only if
    t passes its test, and this has a probability of at most :math:`\delta` (:func:`log_capital`). No correction for the
    number of thresholds is needed.

    Args:
        ranked: Rows of the units that set the threshold.
        fitted: Rows of other units, which may have fitted the score.
        thresholds: Thresholds to test, in descending order; they must not depend on ranked rows.
        risk: The allowed share r of wrong labels among the accepted ones.
        delta: The allowed probability :math:`\delta` that the promise fails.

    >>> rng = np.random.default_rng(0)
    >>> def draw(units):
    ...     score = rng.random((units, 20))
    ...     right = rng.random((units, 20)) < 0.6 + score - rng.choice([0.0, 0.2], (units, 1))
    ...     return UnitRows(score.ravel(), right.ravel(), np.repeat(np.arange(units), 20))
    >>> ranked, fitted = draw(200), draw(200)
    >>> round(unit_risk_threshold(ranked, fitted, candidates(fitted.score), risk=0.1, delta=0.05), 1)
    0.1
    """
    risk, delta = check_share(risk, "risk"), check_share(delta, "delta")
    return _tested(unit_shares(ranked, thresholds), unit_shares(fitted, thresholds), thresholds, risk, delta)


def _tested(ranked: UnitShares, fitted: UnitShares, thresholds: Float[Array, "T"], risk: float, delta: float) -> float:
    """The last threshold that passes, in the sequence of tests of :func:`unit_risk_threshold`."""
    start = int(log_capital(fitted, risk, delta).argmax())
    failed = log_capital(ranked, risk, delta)[start:] < math.log(1.0 / delta)
    passed = int(failed.argmax()) if failed.any() else len(failed)
    return float(thresholds[start + passed - 1]) if passed else math.inf


def least_unit_risk(ranked: UnitRows, fitted: UnitRows, thresholds: Float[Array, "T"], delta: float) -> float:
    """Least risk that :func:`unit_risk_threshold` can promise, up to a tenth above; 1 if there is none."""
    shares, others = unit_shares(ranked, thresholds), unit_shares(fitted, thresholds)
    risk = 1.0 - delta ** (1.0 / shares.wrong.shape[1])  # the capital of units without a mistake is (1 - r)^-U
    while risk < 1.0:
        if _tested(shares, others, thresholds, risk, delta) < math.inf:
            return risk
        risk *= _STEP
    return 1.0


def units_needed(ranked: UnitRows, thresholds: Float[Array, "T"], risk: float, delta: float) -> int | None:
    r"""Estimate of the number of ranked units that promise a risk, if further units are like these; None if none do.

    The capital of a constant bet grows by its mean logarithm with each unit, at the best threshold up to
    :math:`1 / \delta`.
    """
    shares = unit_shares(ranked, thresholds)
    gain = risk * shares.accepted - shares.wrong
    bets = np.linspace(0.05, _LARGEST_BET, 20) / (1.0 - risk)
    growth = max(float(np.log1p(bet * gain).mean(axis=1).max()) for bet in bets)
    return math.ceil(math.log(1.0 / delta) / growth) if growth > 0.0 else None


def unit_flag_threshold(score: Float[Array, "n"], unit: Int[Array, "n"], flag_rate: float) -> float:
    r"""Highest threshold at which a new unit has on average at most a share ``flag_rate`` of its rows refused.

    It is the highest score t with :math:`\sum_{u \le U} R_u(t) + 1 \le \alpha (U + 1)`, where :math:`R_u(t)` is the
    share of the rows of unit u with a score below t; -inf if there is none. For units of one row it is
    :func:`~sepc_torch.head.promises.conformal.flag_threshold`.

    Proof (conformal risk control, Angelopoulos et al. 2024): let :math:`t^*` be the highest t with
    :math:`\sum_{u \le U + 1} R_u(t) \le \alpha (U + 1)`, where unit U + 1 is the new one. :math:`t \le t^*`, because a
    share is at most 1, so :math:`R_{U+1}(t) \le R_{U+1}(t^*)`. :math:`t^*` does not depend on the order of the U + 1
    units, so :math:`E[R_{U+1}(t^*)]` is the expectation of their mean share, which is at most :math:`\alpha`.

    Args:
        score: Scores of the rows of the ranked units, higher is safer.
        unit: The unit of each row.
        flag_rate: The share :math:`\alpha` of rows that may be refused.

    >>> unit_flag_threshold(np.arange(1.0, 100.0), np.arange(99), flag_rate=0.05)
    5.0
    >>> unit_flag_threshold(np.arange(1.0, 100.0), np.arange(99) // 11, flag_rate=0.05)  # nine units
    -inf
    """
    flag_rate = check_share(flag_rate, "flag_rate")
    _, unit, sizes = np.unique(unit, return_inverse=True, return_counts=True)
    value, group = np.unique(score, return_inverse=True)
    weight = np.bincount(group, weights=1.0 / sizes[unit])
    refused = np.concatenate([[0.0], weight.cumsum()[:-1]])
    # The factor corrects rounding, also of the sum of shares.
    allowed = np.flatnonzero(refused + 1.0 <= flag_rate * (len(sizes) + 1) * (1.0 + 1e-12))
    return float(value[allowed[-1]]) if len(allowed) else -math.inf
