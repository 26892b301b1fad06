"""Program (2) in cvxpy: the minimum-volume ellipsoid, by constraint generation in the affine hull."""

from __future__ import annotations

from typing import NamedTuple

import cvxpy as cp
import numpy as np
from scipy.linalg import qr

from sepc_torch.ellipsoid import MinimumVolumeEllipsoid, triangular_whitener
from sepc_torch.shapes import Array, Float, Int
from sepc_torch.solvers.affine_hull import cover, solve_in_hull, stretched
from sepc_torch.solvers.programs.solve import ACCEPTED, check_installed, failure, size_of, solve

# A multiplier below this share of the sum counts as zero: interior-point methods leave about 1e-8 instead of zero.
_NEGLIGIBLE = 1e-7
_TINY = float(np.finfo(np.float64).tiny)
# The name of the program in error messages.
_MVE = "minimum-volume ellipsoid (2)"


def minimum_volume_ellipsoid(
    points: Float[Array, "N D"], *, solver: str = "CLARABEL", tol: float = 1e-7, floor: float = 0.0
) -> MinimumVolumeEllipsoid:
    r"""Minimum-volume ellipsoid that covers all points, program (2) of the paper.

    .. math:: \max_{F, b}\ \sum_k \log F_{kk} \quad \text{s.t.}\quad \|F y_i - b\| \le 1,\ \ \|F T\|_2 \le 1 / \tau

    Here :math:`y_i = T (z_i - o)` are the points in whitened coordinates of their affine hull, and :math:`F` is
    triangular. An ellipsoid has exactly one triangular factor :math:`F`, as it has exactly one symmetric :math:`A`;
    with :math:`F` the objective needs no matrix cone. The last constraint corresponds to :math:`A \preceq I / \tau`. It
    is stated only if the floor is active within the hull. Across the hull the semi-axis is :math:`\tau` (see
    :func:`~sepc_torch.solvers.affine_hull.cover`).

    Constraint generation: the program starts with the outermost points and adds the farthest uncovered points until all
    points are covered. ``weights`` are the normalised multipliers of the constraints, ``log_volume_bound`` is the
    distance to the dual bound that the multipliers prove, and ``gap`` is the relative gap with this bound.

    Args:
        points: The points :math:`z_i`, (N, D).
        solver: An installed cvxpy solver with exponential and second-order cones (CLARABEL, SCS, MOSEK, ...). A floor
            that is active within the hull also needs matrix cones.
        tol: Wanted relative gap; it decides which points count as uncovered. A gap above both ``tol`` and 1e-5 raises
            :class:`ProgramError`.
        floor: Least semi-axis :math:`\tau`.

    >>> import numpy as np
    >>> e = minimum_volume_ellipsoid(np.array([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0], [1.5, 1.0]]))
    >>> e.center.round(4), e.semi_axes.round(4), e.support
    (array([1., 1.]), array([1.4142, 1.4142]), array([0, 1, 2, 3]))
    """
    solver = check_installed(solver)
    hull = solve_in_hull(points, lambda hull: hull)
    rank = hull.rank
    if rank == 0:
        center = points[0].copy()
        whitener, _, thickness = cover(points, hull, center, np.zeros((0, 0)), floor)
        return MinimumVolumeEllipsoid(center, whitener, np.zeros(1, np.int64), np.ones(1), 0.0, 0.0, 0, thickness)

    found = _generate_constraints(points, hull.coordinates, None, tol, solver)
    whitener, stretch, thickness = cover(points, hull, found.center, found.factor, floor)
    # The part of T that acts within the hull, in the caller's metric.
    inside = hull.transform - (hull.transform @ hull.normals) @ hull.normals.T
    if floor * np.linalg.norm(found.factor @ inside, 2) / stretch > 1.0 + 1e-9:
        # The program is well scaled if its solution is near the unit ball. So each principal axis is divided by the
        # floor or by the square root of the rank times the standard deviation, whichever is larger.
        basis, inverse_deviation, _ = np.linalg.svd(inside, full_matrices=False)
        scaling = (basis * np.minimum(rank**-0.5, 1.0 / (floor * inverse_deviation))).T
        limit = triangular_whitener((floor * scaling @ inside).T).T
        found = _generate_constraints(points, scaling @ hull.coordinates, limit, tol, solver)
        # Only enlarge the ellipsoid: shrinking it to the farthest point would violate the floor.
        stretch = max(1.0, found.farthest, float(np.linalg.norm(found.factor @ limit, 2)))
        thickness = max(thickness, floor)
        form = np.concatenate([found.factor @ scaling @ inside / stretch, hull.normals.T / thickness])
        whitener = stretched(triangular_whitener(form), points - found.center)

    bound = max(0.0, found.excess + rank * float(np.log(stretch)))
    gap = float(np.expm1(min(2.0 * bound / rank, 100.0))) * rank / (rank + 1)  # the limit avoids overflow
    if gap > max(tol, ACCEPTED):
        raise failure(_MVE, size_of(points), solver, f"optimal, but with a relative gap of {gap:.1e}")
    kept = found.multipliers > _NEGLIGIBLE * rank
    support, weights = found.working[kept], found.multipliers[kept]
    if len(support) == 0:  # a ball with the floor as radius that no point touches: name one point as support
        support, weights = found.working[:1], np.ones(1)
    weights = weights / weights.sum()
    return MinimumVolumeEllipsoid(found.center, whitener, support, weights, gap, bound, rank, thickness)


class _Found(NamedTuple):
    r"""Solution of program (2): factor :math:`F` in the coordinates of the program, centre in the caller's coordinates.

    ``farthest`` is the largest distance of a point. ``excess`` bounds the log-volume above the minimum before the
    ellipsoid is stretched to the farthest point. ``multipliers`` belong to the points in ``working``.
    """

    factor: Float[Array, "R R"]
    center: Float[Array, "D"]
    farthest: float
    working: Int[Array, "M"]
    multipliers: Float[Array, "M"]
    excess: float


def _generate_constraints(
    points: Float[Array, "N D"], y: Float[Array, "R N"], limit: Float[Array, "R R"] | None, tol: float, solver: str
) -> _Found:
    r"""Solve program (2) in coordinates ``y`` on a growing working set; an active floor gives ``limit`` :math:`\tau T`.

    A stretch by :math:`1 + \epsilon` adds less than :math:`2 \epsilon` to the gap, so points up to ``tol / 2`` beyond
    the surface count as covered.
    """
    rank = len(y)
    working = _distinct(points, _outermost(y))
    while True:
        factor = cp.vec_to_upper_tri(cp.Variable(rank * (rank + 1) // 2))
        b = cp.Variable((rank, 1))
        covers = cp.norm(factor @ y[:, working] - b, axis=0) <= 1
        floored = [] if limit is None else [cp.sigma_max(factor @ limit) <= 1]
        problem = cp.Problem(cp.Maximize(cp.sum(cp.log(cp.diag(factor)))), [covers, *floored])
        solve(problem, _MVE, size_of(points), solver)

        distance = np.linalg.norm(factor.value @ y - b.value, axis=0)
        outside = np.flatnonzero(distance > 1.0 + 0.5 * tol)
        outside = np.setdiff1d(outside, working)
        worst = outside[np.argsort(-distance[outside], kind="stable")[: 2 * (rank + 1)]]
        grown = _distinct(points, np.concatenate([working, worst]))
        if len(grown) == len(working):  # all uncovered points are in the working set, or are copies of its points
            break
        working = grown
    farthest = float(distance.max())
    if farthest > 1.0 + ACCEPTED:
        status = f"optimal, but with a point {farthest - 1.0:.1e} beyond the surface"
        raise failure(_MVE, size_of(points), solver, status)

    multipliers = np.maximum(covers.dual_value, 0.0)
    # The centre is an affine combination of the points, with coefficients near the weights: accurate in any units.
    lifted = np.concatenate([y[:, working], np.ones((1, len(working)))])
    target = np.append(np.linalg.solve(factor.value, b.value[:, 0]), 1.0)
    combination = multipliers / max(float(multipliers.sum()), _TINY)
    combination += np.linalg.lstsq(lifted, target - lifted @ combination)[0]
    origin = points[working].mean(axis=0)
    center = origin + combination @ (points[working] - origin)
    excess = _excess(factor.value @ y[:, working], multipliers, None if limit is None else factor.value @ limit)
    return _Found(factor.value, center, farthest, working, multipliers, excess)


def _excess(v: Float[Array, "R M"], multipliers: Float[Array, "M"], limited: Float[Array, "R R"] | None) -> float:
    r"""Upper bound on the log-volume of a solution :math:`F` of program (2) above the minimum, by duality.

    Let :math:`\lambda_i \ge 0` be multipliers of the points, :math:`Z \succeq 0` a multiplier of the floor
    :math:`L^\top P L \preceq I`, and :math:`K = \sum_i \lambda_i (y_i - \bar y)(y_i - \bar y)^\top + L Z L^\top`. The
    form :math:`P` of any feasible ellipsoid has :math:`\operatorname{tr} P K \le \omega`, where
    :math:`\omega = \sum_i \lambda_i + \operatorname{tr} Z`, and therefore the log-volume
    :math:`-\tfrac12 \log\det P \ge \tfrac12 \log\det K - \tfrac r2 \log(\omega / r)`. In coordinates :math:`v = F y`,
    in which the solution is the unit ball, the log-volume of the solution exceeds this bound by

    .. math:: \tfrac r2 \log(\omega / r) - \tfrac12 \log\det F K F^\top.

    At the optimum :math:`F K F^\top = I`. So :math:`Z` is chosen as the difference between the identity and the part of
    :math:`\lambda`, in the directions in which the floor is active: the singular vectors of :math:`F L` with singular
    value 1.
    """
    rank, mass = len(v), float(multipliers.sum())
    offsets = v - (v @ multipliers / max(mass, _TINY))[:, None]
    k = (offsets * multipliers) @ offsets.T
    if limited is not None:
        basis, sigma, _ = np.linalg.svd(limited)
        acting = sigma > 1.0 - 1e-6  # solvers satisfy the floor to about 1e-8
        basis, sigma = basis[:, acting], sigma[acting]
        missing, rotation = np.linalg.eigh(np.eye(len(sigma)) - basis.T @ k @ basis)
        z, directions = np.maximum(missing, 0.0), (basis * sigma) @ rotation
        mass += float(z.sum())
        k += (directions * z) @ directions.T
    return 0.5 * rank * float(np.log(max(mass, _TINY) / rank)) - 0.5 * float(np.linalg.slogdet(k)[1])


def _outermost(y: Float[Array, "R N"]) -> Int[Array, "M"]:
    """A first working set: the points farthest from the mean and the extremes along the axes, of full rank."""
    rank, count = y.shape
    few = 4 * (rank + 1)
    if count <= 2 * few:
        return np.arange(count)
    radius = np.einsum("ij,ij->j", y, y)
    chosen = np.unique(np.concatenate([np.argpartition(-radius, few)[:few], y.argmax(axis=1), y.argmin(axis=1)]))
    lifted = np.concatenate([y, np.ones((1, count))])
    # Copies and clusters can fill the choice and leave it flatter than the average of the set. Pivoted QR adds points
    # that span the space.
    thinnest = np.linalg.eigvalsh(lifted @ lifted.T)[0] / count
    if np.linalg.norm(lifted[:, chosen], -2) ** 2 < thinnest:
        chosen = np.union1d(chosen, qr(lifted, mode="r", pivoting=True)[1][: 2 * (rank + 1)])
    return chosen


def _distinct(points: Float[Array, "N D"], chosen: Int[Array, "M"]) -> Int[Array, "K"]:
    """One of each group of equal points: a repeated constraint has no unique multiplier, and solvers stall."""
    return np.sort(chosen[np.unique(points[chosen], axis=0, return_index=True)[1]])
