r"""Min-norm point with capped weights, the subproblem of program (4), by an interior-point method with crossover.

Minimise :math:`\tfrac12 \|w\|^2`, :math:`w = b + \sum_i z_i p_i`, over weights :math:`0 \le z_i \le D` whose sum in
each group of points is prescribed. Mehrotra's predictor-corrector follows the optimality conditions

.. math:: p_i^\top w - \lambda_{g(i)} = s_i - t_i, \qquad z_i s_i = 0, \qquad (D - z_i)\, t_i = 0, \qquad s, t \ge 0

along the central path :math:`z_i s_i = (D - z_i) t_i = \mu` to :math:`\mu = 0`. A Newton step costs one factorisation
in the dimension of the points, whatever their number. The crossover then sets the weights near a bound to the bound and
solves the least-squares problem of the other weights exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.linalg.lapack import dgelsy, dpotrf, dpotrs

from sepc_torch.shapes import Array, Bool, Float

# Limit on the predictor-corrector steps; a safeguard.
_MAX_STEPS = 40
# Consecutive steps without a smaller gap after which the method stops.
_PATIENCE = 3
# Largest share of the way to the boundary that a step takes.
_FRACTION = 0.995
# The crossover sets a weight to its bound if it is closer than this share of the cap. The second value is tried if the
# first fails.
_AT_BOUND = (1e-5, 1e-9)
# Limit on the rounds of the crossover, in each of which free weights that leave the box move to the bound they crossed.
_CORRECTIONS = 8
# Singular values of the final least-squares problem below this share of the largest are noise.
_RANK = 1e-13
# Rounding error of the length of a combination, as a share of the summed lengths of its terms. A combination that is 0
# consists of rounding errors only, so its own length is no measure of them.
_ROUNDING = 1e-14


def nearest_combination(
    points: Float[Array, "m D"],
    base: Float[Array, "D"],
    groups: Bool[Array, "m G"],
    sums: Float[Array, "G"],
    cap: float,
    tolerance: float,
) -> Float[Array, "m"] | None:
    """Weights that are feasible, and optimal up to rounding; None if ties prevent the crossover.

    The duality gap of the interior-point method is not enough: only its square root bounds the error of the
    combination. The crossover removes this error, but ties can leave open which weights are at a bound.

    Args:
        points: The points :math:`p_i`. For the difference of two sets, the points of the second set are negated.
        base: The constant term :math:`b`.
        groups: Membership of the points in the groups, one column per group.
        sums: The sum of the weights in each group, above 0 and below the cap times the size of the group.
        cap: The largest weight :math:`D`.
        tolerance: Duality gap at which the interior-point method stops, in squared units of the points.
    """
    member = groups.astype(np.float64)
    z = _interior_point(points, base, member, sums, cap, tolerance)
    attempts = (_crossover(points, base, member, z, cap, share * cap) for share in _AT_BOUND)
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
    room = cap - z  # updated along with z: computed as a difference it would round to 0 near the cap
    best, best_gap, worse = z, np.inf, 0
    for _ in range(_MAX_STEPS):
        gap = float(z @ s + room @ t)
        if gap < best_gap:
            best, best_gap, worse = z, gap, 0
        else:
            worse += 1  # a single increase can lead to dual feasibility; repeated increases are rounding
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
    """Step length along dx: the given fraction of the way to x = 0 or to the upper bound (``room``), at most 1."""
    steepest = float((-dx / x).max())
    if room is not None:
        steepest = max(steepest, float((dx / room).max()))
    return min(1.0, fraction / steepest) if steepest > 0 else 1.0


def _crossover(
    points: Float[Array, "m D"],
    base: Float[Array, "D"],
    member: Float[Array, "m G"],
    z: Float[Array, "m"],
    cap: float,
    near: float,
) -> Float[Array, "m"] | None:
    """Crossover: set weights within ``near`` of a bound to the bound and solve for the free weights.

    Free weights that leave the box move to the bound they crossed, and the remaining weights are solved again. The
    changes of the free weights must sum to 0 in each group. They are computed from the differences of the points from
    their group mean, which give the same combination; the minimum-norm least-squares solution in these differences has
    zero sums automatically. Returns None if no solution within the box is found, or if it is worse than ``z``.
    """
    low, high = z < near, z > cap - near
    for _ in range(_CORRECTIONS):
        free = ~(low | high)
        sizes = member[free].sum(axis=0)
        solved = np.where(low, 0.0, np.where(high, cap, z))
        missing = (z - solved) @ member
        if float(np.abs(missing[sizes == 0]).max(initial=0.0)) > 1e-12 * cap:
            break  # no weight of the group is free to compensate for the changes at the bounds
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
            length, before = (np.linalg.norm(base + weights @ points) for weights in (solved, z))
            terms = np.linalg.norm(base) + z @ np.linalg.norm(points, axis=1)
            return solved if length <= before + _ROUNDING * terms else None
        low, high = low | below, high | above
    return None
