r"""The combination of points nearest to the origin, with weights between 0 and a cap, by an interior point.

Minimise :math:`\tfrac12 \|w\|^2`, :math:`w = b + \sum_i z_i p_i`, over :math:`0 \le z_i \le D` with prescribed sums of
the weights in each group of points. The optimality conditions

.. math:: p_i^\top w - \lambda_{g(i)} = s_i - t_i, \qquad z_i s_i = 0, \qquad (D - z_i)\, t_i = 0, \qquad s, t \ge 0

are followed from :math:`z_i s_i = (D - z_i) t_i = \mu` to :math:`\mu = 0` by Mehrotra's predictor-corrector. A
Newton step costs one factorisation in the dimension of the points, however many there are. At the end the weights
that lie at a bound are put there, and the others solve their least-squares problem exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.linalg.lapack import dgelsy, dpotrf, dpotrs

from sepc_torch.shapes import Array, Bool, Float

_MAX_STEPS = 40
_PATIENCE = 3
# Share of the way to the boundary that a step may go.
_FRACTION = 0.995
# A weight closer to its bound than this share of the cap is at it; if that leads astray, closer than the second.
_AT_BOUND = (1e-5, 1e-9)
# How often free weights that leave the box are put at the bound they crossed.
_CORRECTIONS = 8
# Tells noise from rank in the last least-squares problem.
_RANK = 1e-13


def nearest_combination(
    points: Float[Array, "m D"],
    base: Float[Array, "D"],
    groups: Bool[Array, "m G"],
    sums: Float[Array, "G"],
    cap: float,
    tolerance: float,
) -> Float[Array, "m"] | None:
    """Weights that are feasible and optimal to rounding, or None where ties leave open which of them are at a bound.

    A duality gap alone would not do: its square root bounds the error of the combination.

    Args:
        points: The points, of both signs if differences of sets are meant.
        base: What the sum begins with.
        groups: Which group each point belongs to, one column for each group.
        sums: The sum of the weights in each group, more than 0 and less than the cap times its size.
        cap: The largest weight.
        tolerance: Duality gap at which the interior point stops, in squared units of the points.
    """
    member = groups.astype(np.float64)
    z = _interior_point(points, base, member, sums, cap, tolerance)
    attempts = (_at_bounds(points, base, member, z, cap, share * cap) for share in _AT_BOUND)
    return next((solved for solved in attempts if solved is not None), None)


def _interior_point(
    points: Float[Array, "m D"],
    base: Float[Array, "D"],
    member: Float[Array, "m G"],
    sums: Float[Array, "G"],
    cap: float,
    tolerance: float,
) -> Float[Array, "m"]:
    z = member @ (sums / member.sum(axis=0))
    value = points @ (base + z @ points)
    multiplier = (value @ member) / member.sum(axis=0)
    reduced = value - member @ multiplier
    typical = max(float(np.abs(reduced).mean()), np.finfo(np.float64).tiny)
    s, t = np.maximum(reduced, 0.0) + typical, np.maximum(-reduced, 0.0) + typical
    room = cap - z  # carried along: as a difference it would round to 0 close to the cap
    best, best_gap, worse = z, np.inf, 0
    for _ in range(_MAX_STEPS):
        gap = float(z @ s + room @ t)
        if gap < best_gap:
            best, best_gap, worse = z, gap, 0
        else:
            worse += 1  # once is the way to dual feasibility, over and over is rounding
        if gap <= tolerance or worse > _PATIENCE:
            break
        mu = gap / (2 * len(z))
        residual = points @ (base + z @ points) - member @ multiplier - s + t
        try:
            solve = _newton(points, member, s / z + t / room)
        except np.linalg.LinAlgError:
            break
        dz, _ = solve(-residual - s + t)
        ds, dt = -s - s * dz / z, -t + t * dz / room
        primal, dual = _step(z, dz, room, 1.0), min(_step(s, ds, None, 1.0), _step(t, dt, None, 1.0))
        predicted = float((z + primal * dz) @ (s + dual * ds) + (room - primal * dz) @ (t + dual * dt))
        center = (predicted / gap) ** 3 * mu
        lower, upper = center - dz * ds, center + dz * dt
        dz, shift = solve(-residual - s + t + lower / z - upper / room)
        ds, dt = (lower - s * dz) / z - s, (upper + t * dz) / room - t
        primal = _step(z, dz, room, _FRACTION)
        dual = min(_step(s, ds, None, _FRACTION), _step(t, dt, None, _FRACTION))
        z, room, multiplier = z + primal * dz, room - primal * dz, multiplier + dual * shift
        s, t = s + dual * ds, t + dual * dt
    return np.minimum(best, cap)


def _newton(
    points: Float[Array, "m D"], member: Float[Array, "m G"], d: Float[Array, "m"]
) -> Callable[[Array], tuple[Array, Array]]:
    r"""Solver for :math:`(P P^\top + \mathrm{diag}(d))\, x - E \lambda = r,\ E^\top x = 0`."""
    over = points / d[:, None]
    small = points.T @ over
    small.ravel()[:: len(small) + 1] += 1.0
    factor, failed = dpotrf(small, lower=1)
    if failed:
        raise np.linalg.LinAlgError("the Newton matrix is not positive definite")

    def without_sums(r: Array) -> Array:
        x = (r.T / d).T
        return x - over @ dpotrs(factor, points.T @ x, lower=1)[0]

    along = without_sums(member)
    schur = member.T @ along

    def solve(r: Array) -> tuple[Array, Array]:
        x = without_sums(r)
        multiplier = np.linalg.solve(schur, -(member.T @ x))
        return x + along @ multiplier, multiplier

    return solve


def _step(x: Float[Array, "m"], dx: Float[Array, "m"], room: Float[Array, "m"] | None, fraction: float) -> float:
    """The longest step of at most 1 that goes at most the given fraction of the way to 0, or to 0 room above."""
    steepest = float((-dx / x).max())
    if room is not None:
        steepest = max(steepest, float((dx / room).max()))
    return min(1.0, fraction / steepest) if steepest > 0 else 1.0


def _at_bounds(
    points: Float[Array, "m D"],
    base: Float[Array, "D"],
    member: Float[Array, "m G"],
    z: Float[Array, "m"],
    cap: float,
    near: float,
) -> Float[Array, "m"] | None:
    """Weights clearly at a bound go there, the free ones solve their problem; those that leave the box go to its side.

    For weights of sum 0 within each group, differences from the group's mean give the same combination, and the
    least-squares solution of least norm in these differences has such sums by itself. Where that leads astray there is
    no answer.
    """
    low, high = z < near, z > cap - near
    for _ in range(_CORRECTIONS):
        free = ~(low | high)
        sizes = member[free].sum(axis=0)
        solved = np.where(low, 0.0, np.where(high, cap, z))
        missing = (z - solved) @ member
        if float(np.abs(missing[sizes == 0]).max(initial=0.0)) > 1e-12 * cap:
            break  # none is free to make up for what went to the bounds
        solved += free * (member @ (missing / np.maximum(sizes, 1.0)))
        if free.any():
            own = points[free]
            offsets = own - member[free] @ ((member[free].T @ own) / np.maximum(sizes, 1.0)[:, None])
            count, dim = offsets.shape
            right = np.zeros(max(count, dim))
            right[:dim] = -(base + solved @ points)
            _, change, *_ = dgelsy(offsets.T, right, np.zeros(count, dtype=np.int32), _RANK, 8 * (count + dim) + 64)
            solved[free] += change[:count]
        below, above = solved < 0.0, solved > cap
        if not (below | above).any():
            better = np.linalg.norm(base + solved @ points) <= np.linalg.norm(base + z @ points) * (1.0 + 1e-14)
            return solved if better else None
        low, high = low | below, high | above
    return None
