r"""Test martingales against exchangeability: sequential conformal p-values, and bets on them.

The p-values of :func:`sequential_p_values` are independent and uniform while calibration points and stream are
exchangeable. A bet is a density f on [0, 1]; its capital is multiplied by f(p). :func:`bet` runs a mixture of bets and
of their starting times, so that a late change costs no more than the logarithm of the time that has passed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from sepc_torch.shapes import Array, Float, Int

# Exponents of the bets p ** (k - 1) on small p-values and, mirrored, on large ones.
_EXPONENTS = (0.1, 0.3, 0.6)
POWERS = 2 * len(_EXPONENTS)
# Bets on the traffic of a cell: sixfold, twofold and a third of the expected share, written as factors less one.
GAINS = (5.0, 1.0, -0.67)


def sequential_p_values(
    category: Int[Array, "T"], counts: Int[Array, "B"], uniform: Float[Array, "T"]
) -> tuple[Float[Array, "T"], Int[Array, "B"]]:
    r"""Conformal p-values of ordered categories against all earlier points, ties broken at random.

    :math:`p_t = \frac{\#\{i < t : c_i > c_t\} + u_t (1 + \#\{i < t : c_i = c_t\})}{N_t + 1}` for the :math:`N_t`
    points before t. If the points are exchangeable, the :math:`p_t` are independent and uniform: given the *set* of the
    first t points, the last one is any of them with equal probability, whatever the order of the others.

    Args:
        category: Categories of the points of a stream, in their order; a larger one is stranger.
        counts: Number of points of each category before the stream.
        uniform: Random numbers :math:`u_t` between 0 and 1.

    Returns:
        The p-values, and the counts with the stream's points added.

    >>> sequential_p_values(np.array([1, 0]), np.array([3, 0]), np.array([0.5, 0.5]))
    (array([0.125, 0.6  ]), array([4, 1]))
    """
    # past[t, b]: points of category b before t
    taken = category[:, None] == np.arange(len(counts))
    past = counts + taken.cumsum(axis=0) - taken
    stranger = np.where(np.arange(len(counts)) > category[:, None], past, 0).sum(axis=1)
    same = past[np.arange(len(category)), category]
    return (stranger + uniform * (1 + same)) / (past.sum(axis=1) + 1), counts + taken.sum(axis=0)


def uniforms(seed: int, start: int, count: int) -> Float[Array, "T"]:
    """Random numbers between 0 and 1 of positions ``start``, ``start + 1``, ...; the same in any batches (SplitMix64).

    >>> bool((uniforms(0, 0, 6)[2:] == uniforms(0, 2, 4)).all())
    True
    """
    with np.errstate(over="ignore"):
        x = np.uint64(seed) * np.uint64(0xD1342543DE82EF95) + np.arange(start, start + count, dtype=np.uint64)
        x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return ((x >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53


def log_power_bets(p: Float[Array, "T"]) -> Float[Array, "T J"]:
    r"""Logarithms of the densities :math:`k p^{k - 1}` (first half) and :math:`k (1 - p)^{k - 1}` (second half).

    >>> log_power_bets(np.array([0.5])).round(2)
    array([[-1.68, -0.72, -0.23, -1.68, -0.72, -0.23]])
    """
    k = np.array(_EXPONENTS)
    return np.concatenate([np.log(k) + (k - 1.0) * np.log(side)[:, None] for side in (p, 1.0 - p)], axis=1)


def occupancy_p_values(
    cell: Int[Array, "T"], counts: Int[Array, "C"], uniform: Float[Array, "T"]
) -> tuple[Float[Array, "T C"], Int[Array, "C"]]:
    """A sequence of :func:`sequential_p_values` for each cell: points inside the cell are stranger than the others.

    p-values below the share of the cell therefore stand for points inside it.

    >>> occupancy_p_values(np.array([0]), np.array([3, 1]), np.array([0.5]))
    (array([[0.4, 0.6]]), array([4, 1]))
    """
    inside = cell[:, None] == np.arange(len(counts))
    past = counts + inside.cumsum(axis=0) - inside
    points = past.sum(axis=1, keepdims=True)
    u = uniform[:, None]
    p = np.where(inside, u * (1 + past), past + u * (1 + points - past)) / (points + 1)
    return p, counts + inside.sum(axis=0)


def counts_after(cell: Int[Array, "T"], cells: int) -> Int[Array, "T P"]:
    """Number of points of each cell after each position.

    >>> counts_after(np.array([1, 0, 1]), 2)
    array([[1, 1],
           [0, 1],
           [0, 0]])
    """
    taken = (cell[:, None] == np.arange(cells)).astype(np.int64)
    return taken.sum(axis=0) - taken.cumsum(axis=0)


def log_cell_bets(p: Float[Array, "T C"], share: Float[Array, "C"]) -> Float[Array, "T C G"]:
    r"""Logarithms of the densities :math:`\frac{1 + g 1[p < q]}{1 + g q}` for cells of share q, and three gains g.

    >>> log_cell_bets(np.array([[0.2, 0.7]]), np.array([0.5, 0.5])).round(2)
    array([[[ 0.54,  0.29, -0.7 ],
            [-1.25, -0.41,  0.41]]])
    """
    gain = np.array(GAINS)
    inside = (p < share)[:, :, None]
    return np.log1p(gain * inside) - np.log1p(gain * share[:, None])


class Capital(NamedTuple):
    """Logarithms of the capital of each bet after the last point, and of the total of S sequences after every point."""

    bets: Float[Array, "S J"]
    total: Float[Array, "T S"]


def bet(log_capital: Float[Array, "S J"], seen: int, log_factors: Float[Array, "T S J"]) -> Capital:
    r"""Run J bets over T p-values of S sequences; each total capital is a test martingale that starts at one.

    At point t the share :math:`w_t = \frac{\log 2}{\log(t + 2)} - \frac{\log 2}{\log(t + 3)}` of the initial reserve of
    one is split among the bets, :math:`C_j \gets (C_j + w_t / J) f_j(p_t)`. The total is the reserve that is left plus
    all :math:`C_j`. Its expectation never changes: each :math:`f_j` has the integral one.

    Args:
        log_capital: Logarithms of the capital of each bet before the points; -inf at the start.
        seen: Number of points before.
        log_factors: Logarithms of the densities at the p-values.

    >>> bet(np.array([[-np.inf]]), 0, np.zeros((3, 1, 1))).total[:, 0].round(9) + 0.0  # a bet that wins nothing
    array([0., 0., 0.])
    """
    t = seen + np.arange(len(log_factors))
    reserve = math.log(2.0) / np.log(t + 3.0)
    stake = np.log(math.log(2.0) / np.log(t + 2.0) - reserve) - math.log(log_factors.shape[2])
    path = log_factors.cumsum(axis=0)
    before = path - log_factors
    started = np.logaddexp.accumulate(np.concatenate([log_capital[None], stake[:, None, None] - before]), axis=0)[1:]
    capital = path + started
    return Capital(capital[-1], np.logaddexp(np.log(reserve)[:, None], np.logaddexp.reduce(capital, axis=2)))
