r"""The paper's convex programs, each stated once in cvxpy, for any installed cvxpy solver.

They are what the specialised solvers of :mod:`sepc_torch.solvers` are measured against; the functions of the same
names there check their arguments and call these when a cvxpy solver is named. A solver's word is not taken for its
answer: covering, optimality and separation are measured afterwards, and what fails is a :class:`ProgramError`.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, NamedTuple

import cvxpy as cp
import numpy as np
from scipy.linalg import qr, solve_triangular

from sepc_torch.affine_hull import RANK_TOLERANCE, AffineHull, affine_hull, cover, stretched
from sepc_torch.ellipsoid import Ellipsoid, MinimumVolumeEllipsoid, triangular_whitener
from sepc_torch.geometry import ReducedHullPoints
from sepc_torch.shapes import Array, Float, Int

# The largest relative gap, and the largest distance of a point beyond the surface, that an answer may have.
_ACCEPTED = 1e-5
# A multiplier below this share of their sum is an interior-point method's zero: those are about 1e-8.
_NEGLIGIBLE = 1e-7
# Ellipsoids that meet once both have grown by this share count as meeting; solvers find the growth to about 1e-8.
_TOUCHING = 1e-7
_TINY = float(np.finfo(np.float64).tiny)


class ProgramError(RuntimeError):
    """A solver failed, or its answer did not pass the checks; names program, size, solver, status and a remedy."""


def minimum_volume_ellipsoid(
    points: Float[Array, "N D"], *, solver: str = "CLARABEL", tol: float = 1e-7, floor: float = 0.0
) -> MinimumVolumeEllipsoid:
    r"""The ellipsoid of least volume that covers all points, program (2) of the paper.

    .. math:: \max_{F, b}\ \sum_k \log F_{kk} \quad \text{s.t.}\quad \|F y_i - b\| \le 1,\ \ \|F T\|_2 \le 1 / \tau

    Here :math:`y_i = T (z_i - o)` are the points in whitened coordinates of their affine hull, and :math:`F` is
    triangular: an ellipsoid has one such factor just as it has one symmetric :math:`A`, and the objective then needs no
    matrix cone. The last constraint is the symmetric form's :math:`A \preceq I / \tau`; it is stated only if the floor
    acts inside the hull. Across the hull the semi-axis is :math:`\tau` (see :func:`~sepc_torch.affine_hull.cover`).

    Constraints are generated: the program holds the outermost points and takes in the worst of those left outside until
    none is. ``weights`` are the multipliers of the constraints, ``log_volume_bound`` is the distance to the dual value
    that they prove, and ``gap`` is the relative gap that amounts to this bound.

    Args:
        points: The points :math:`z_i`, (N, D).
        solver: An installed cvxpy solver with exponential and second-order cones (CLARABEL, SCS, MOSEK, ...); a floor
            that acts inside the hull needs matrix cones too.
        tol: Relative gap asked for: decides which points count as outside. More than it and 1e-5 is an error.
        floor: Least semi-axis :math:`\tau`.

    >>> import numpy as np
    >>> e = minimum_volume_ellipsoid(np.array([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0], [1.5, 1.0]]))
    >>> e.center.round(4), e.semi_axes.round(4), e.support
    (array([1., 1.]), array([1.4142, 1.4142]), array([0, 1, 2, 3]))
    """
    solver = _installed(solver)
    hull = _robust_hull(points)
    rank = hull.rank
    if rank == 0:
        whitener, _, thickness = cover(points, hull, points[0], np.zeros((0, 0)), floor)
        return MinimumVolumeEllipsoid(points[0], whitener, np.zeros(1, np.int64), np.ones(1), 0.0, 0.0, 0, thickness)

    found = _generate_constraints(points, hull.coordinates, None, tol, solver)
    whitener, stretch, thickness = cover(points, hull, found.center, found.factor, floor)
    # The part of T that acts inside the hull, in the caller's metric.
    inside = hull.transform - (hull.transform @ hull.normals) @ hull.normals.T
    if floor * np.linalg.norm(found.factor @ inside, 2) / stretch > 1.0 + 1e-9:
        # The program is well scaled where its answer is near the unit ball: along principal axes, each divided by the
        # floor or by the root of the rank times the standard deviation, whichever is larger.
        basis, inverse_deviation, _ = np.linalg.svd(inside, full_matrices=False)
        scaling = (basis * np.minimum(rank**-0.5, 1.0 / (floor * inverse_deviation))).T
        limit = triangular_whitener((floor * scaling @ inside).T).T
        found = _generate_constraints(points, scaling @ hull.coordinates, limit, tol, solver)
        # Only ever grow: shrinking to the outermost point, where there is room, would break the floor.
        stretch = max(1.0, found.farthest, float(np.linalg.norm(found.factor @ limit, 2)))
        form = np.concatenate([found.factor @ scaling @ inside / stretch, hull.normals.T / floor])
        whitener, thickness = stretched(triangular_whitener(form), points - found.center), floor

    bound = max(0.0, found.excess + rank * float(np.log(stretch)))
    gap = float(np.expm1(2.0 * bound / rank)) * rank / (rank + 1)
    if gap > max(tol, _ACCEPTED):
        raise _failure(_MVE, _size(points), solver, f"optimal, but with a relative gap of {gap:.1e}")
    carried = found.multipliers > _NEGLIGIBLE * rank
    support, weights = found.working[carried], found.multipliers[carried]
    if len(support) == 0:  # a ball of the floor's radius that no point touches: one point stands for all
        support, weights = found.working[:1], np.ones(1)
    weights = weights / weights.sum()
    return MinimumVolumeEllipsoid(found.center, whitener, support, weights, gap, bound, rank, thickness)


_MVE = "minimum-volume ellipsoid (2)"


class _Found(NamedTuple):
    r"""A solution of program (2): factor :math:`F` in the coordinates of the program, centre in the caller's.

    ``excess`` bounds the log-volume above the minimum before stretching to the ``farthest`` point's distance.
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
    r"""Solve program (2) in coordinates ``y`` on a working set that grows; ``limit`` is :math:`\tau T` if the floor acts.

    A stretch by :math:`1 + \epsilon` costs a gap below :math:`2 \epsilon`: within ``tol / 2`` of the surface is covered.
    """
    rank = len(y)
    working = _distinct(points, _outermost(y))
    while True:
        factor = cp.vec_to_upper_tri(cp.Variable(rank * (rank + 1) // 2))
        b = cp.Variable((rank, 1))
        covers = cp.norm(factor @ y[:, working] - b, axis=0) <= 1
        floored = [] if limit is None else [cp.sigma_max(factor @ limit) <= 1]
        problem = cp.Problem(cp.Maximize(cp.sum(cp.log(cp.diag(factor)))), [covers, *floored])
        _solve(problem, _MVE, _size(points), solver)

        distance = np.linalg.norm(factor.value @ y - b.value, axis=0)
        outside = np.flatnonzero(distance > 1.0 + 0.5 * tol)
        outside = np.setdiff1d(outside, working)
        worst = outside[np.argsort(-distance[outside], kind="stable")[: 2 * (rank + 1)]]
        grown = _distinct(points, np.concatenate([working, worst]))
        if len(grown) == len(working):  # nothing is outside but points of the working set and their copies
            break
        working = grown
    farthest = float(distance.max())
    if farthest > 1.0 + _ACCEPTED:
        status = f"optimal, but with a point {farthest - 1.0:.1e} beyond the surface"
        raise _failure(_MVE, _size(points), solver, status)

    multipliers = np.maximum(covers.dual_value, 0.0)
    # The centre is the affine combination of the points nearest to their weights: exact in features of any unit.
    lifted = np.concatenate([y[:, working], np.ones((1, len(working)))])
    target = np.append(np.linalg.solve(factor.value, b.value[:, 0]), 1.0)
    combination = multipliers / max(float(multipliers.sum()), _TINY)
    combination += np.linalg.lstsq(lifted, target - lifted @ combination)[0]
    origin = points[working].mean(axis=0)
    center = origin + combination @ (points[working] - origin)
    excess = _excess(factor.value @ y[:, working], multipliers, None if limit is None else factor.value @ limit)
    return _Found(factor.value, center, farthest, working, multipliers, excess)


def _excess(v: Float[Array, "R M"], multipliers: Float[Array, "M"], limited: Float[Array, "R R"] | None) -> float:
    r"""How far the log-volume of a solution :math:`F` of program (2) can lie above the minimum, by duality.

    With multipliers :math:`\lambda_i \ge 0` of the points and :math:`Z \succeq 0` of the floor
    :math:`L^\top P L \preceq I`, let :math:`K = \sum_i \lambda_i (y_i - \bar y)(y_i - \bar y)^\top + L Z L^\top`. The form
    :math:`P` of a feasible ellipsoid has :math:`\operatorname{tr} P K \le \omega = \sum_i \lambda_i + \operatorname{tr} Z`,
    hence :math:`-\tfrac12 \log\det P \ge \tfrac12 \log\det K - \tfrac r2 \log(\omega / r)`. In coordinates
    :math:`v = F y`, in which the solution is the unit ball, this lies below its own log-volume by

    .. math:: \tfrac r2 \log(\omega / r) - \tfrac12 \log\det F K F^\top.

    At the optimum :math:`F K F^\top = I`: so :math:`Z` is what :math:`\lambda` leaves of the identity in the directions in
    which the floor acts, the singular vectors of :math:`F L` for the value 1.
    """
    rank, mass = len(v), float(multipliers.sum())
    offsets = v - (v @ multipliers / max(mass, _TINY))[:, None]
    k = (offsets * multipliers) @ offsets.T
    if limited is not None:
        basis, sigma, _ = np.linalg.svd(limited)
        acting = sigma > 1.0 - 1e-6  # solvers reach the floor to about 1e-8
        basis, sigma = basis[:, acting], sigma[acting]
        missing, rotation = np.linalg.eigh(np.eye(len(sigma)) - basis.T @ k @ basis)
        z, directions = np.maximum(missing, 0.0), (basis * sigma) @ rotation
        mass += float(z.sum())
        k += (directions * z) @ directions.T
    return 0.5 * rank * float(np.log(mass / rank)) - 0.5 * float(np.linalg.slogdet(k)[1])


def _outermost(y: Float[Array, "R N"]) -> Int[Array, "M"]:
    """The points farthest out and the extremes along the axes: few, but not flat."""
    rank, count = y.shape
    few = 4 * (rank + 1)
    if count <= 2 * few:
        return np.arange(count)
    radius = np.einsum("ij,ij->j", y, y)
    chosen = np.unique(np.concatenate([np.argpartition(-radius, few)[:few], y.argmax(axis=1), y.argmin(axis=1)]))
    lifted = np.concatenate([y, np.ones((1, count))])
    # Copies and lumps can fill the choice and leave it flat, thinner than the whole set is on average. Pivoting spans.
    thinnest = np.linalg.eigvalsh(lifted @ lifted.T)[0] / count
    if np.linalg.norm(lifted[:, chosen], -2) ** 2 < thinnest:
        chosen = np.union1d(chosen, qr(lifted, mode="r", pivoting=True)[1][: 2 * (rank + 1)])
    return chosen


def _distinct(points: Float[Array, "N D"], chosen: Int[Array, "M"]) -> Int[Array, "K"]:
    """One of each group of equal points: a constraint stated twice has no unique multiplier, and solvers stall."""
    return np.sort(chosen[np.unique(points[chosen], axis=0, return_index=True)[1]])


def _robust_hull(points: Float[Array, "N D"]) -> AffineHull:
    tolerance = RANK_TOLERANCE
    while True:
        try:
            return affine_hull(points, tolerance)
        except np.linalg.LinAlgError:  # numerically flat: count more directions as absent
            if tolerance >= 1e-3:
                raise
            tolerance *= 100


def intersection_ellipsoid(first: Ellipsoid, second: Ellipsoid, *, solver: str = "CLARABEL") -> Ellipsoid:
    r"""An ellipsoid that covers the intersection of two ellipsoids, program (3) of the paper.

    With the given :math:`E_j = \{z : z^\top A_j z + 2 b_j^\top z + c_j \le 0\}` and the answer
    :math:`\{z : z^\top P z + 2 q^\top z + q^\top P^{-1} q \le 1\}`,

    .. math:: \max_{P, q, \tau \ge 0}\ \log\det P \quad \text{s.t.}\quad
        \begin{bmatrix} P & q & 0 \\ q^\top & -1 & q^\top \\ 0 & q & -P \end{bmatrix} \preceq
        \sum_j \tau_j \begin{bmatrix} A_j & b_j & 0 \\ b_j^\top & c_j & 0 \\ 0 & 0 & 0 \end{bmatrix}.

    In the paper's letters :math:`P = A_{Int}^2` and :math:`q = A_{Int} b_{Int}`; it prints the inequality with
    :math:`A_{Int}` and :math:`b_{Int}` in their places. The inequality is sufficient for covering, not necessary: the
    answer is larger than it need be. At the optimum it is the best member of the pencil
    :math:`\sum_j \tau_j (z^\top A_j z + 2 b_j^\top z + c_j) \le 0`: a ball for two balls, as in the paper's figure, and
    otherwise hardly ever; of two nested ellipsoids the inner one. It is built from :math:`\tau`, so that it covers the
    intersection however accurate the solver was.

    >>> import numpy as np
    >>> e = intersection_ellipsoid(Ellipsoid.ball(np.zeros(2), 1.0), Ellipsoid.ball(np.array([1.2, 0.0]), 1.0))
    >>> e.center.round(4), e.semi_axes.round(4)
    (array([0.6, 0. ]), array([0.8, 0.8]))
    """
    solver = _installed(solver)
    name, size, dim = "outer ellipsoid of an intersection (3)", f"2 ellipsoids x {first.dim} dims", first.dim
    shared = _shared(first, second)
    if not first.intersects(second):
        raise ValueError("The ellipsoids are disjoint: their intersection is empty, and nothing is to be covered.")
    p, q, tau = cp.Variable((dim, dim), symmetric=True), cp.Variable((dim, 1)), cp.Variable(2, nonneg=True)
    one, column, square = np.ones((1, 1)), np.zeros((dim, 1)), np.zeros((dim, dim))
    answer = cp.bmat([[p, q, square], [q.T, -one, q.T], [square, q, -p]])
    given = 0
    for j, e in enumerate(shared.ellipsoids):
        a = e.whitener.T @ e.whitener
        b = -a @ e.center[:, None]
        c = np.sum((e.whitener @ e.center) ** 2) - one
        given += tau[j] * np.block([[a, b, square], [b.T, c, column.T], [square, column, square]])
    _solve(cp.Problem(cp.Maximize(cp.log_det(p)), [answer << given]), name, size, solver)

    # sum_j tau_j (||W_j (z - c_j)||^2 - 1) <= 0, completed to a square around the centre.
    roots = np.sqrt(np.maximum(tau.value, 0.0))
    factor = np.concatenate([root * e.whitener for root, e in zip(roots, shared.ellipsoids, strict=True)])
    target = np.concatenate([root * e.whitener @ e.center for root, e in zip(roots, shared.ellipsoids, strict=True)])
    center = np.linalg.lstsq(factor, target)[0]
    radius_squared = float(roots @ roots - np.sum((factor @ center - target) ** 2))
    if radius_squared > 0:
        ellipsoid = Ellipsoid(center, triangular_whitener(factor / np.sqrt(radius_squared)))
        if abs(ellipsoid.log_volume + 0.5 * np.linalg.slogdet(p.value)[1]) <= dim * _ACCEPTED:
            whitener = triangular_whitener(ellipsoid.whitener @ shared.scale)
            return Ellipsoid(shared.origin + solve_triangular(shared.scale, center), whitener)
    raise _failure(name, size, solver, "optimal, but with an ellipsoid that its multipliers do not confirm")


def reduced_hull_points(
    x: Float[Array, "N D"], y: Float[Array, "M D"], *, cap: float | None = None, solver: str = "CLARABEL"
) -> ReducedHullPoints:
    r"""The closest points of two reduced convex hulls, program (4) of the paper.

    .. math:: \min_{u, v}\ \tfrac12 \|X^\top u - Y^\top v\|^2 \quad \text{s.t.}\quad
              e^\top u = e^\top v = 1,\ \ 0 \le u, v \le D e

    The difference :math:`w = c - d` is unique, :math:`c` and :math:`d` need not be. Accepted is an answer for which
    :math:`\|w\|^2` exceeds the least :math:`w^\top (c' - d')` of the two hulls, and so bounds the squared error of
    :math:`w`, by no more than 1e-8 of the squared extent of the data.

    Args:
        x: Points of the first set, (N, D).
        y: Points of the second set, (M, D).
        cap: The bound :math:`D` on the weights, at least ``1 / min(N, M)``, which is the default.
        solver: An installed cvxpy solver for quadratic programs (CLARABEL, OSQP, HIGHS, SCS, ...).

    >>> import numpy as np
    >>> r = reduced_hull_points(np.array([[0.0, 0.0], [0.0, 2.0]]), np.array([[3.0, 1.0], [5.0, 1.0], [7.0, 1.0]]))
    >>> r.c.round(6), r.d.round(6)
    (array([0., 1.]), array([4., 1.]))
    """
    solver = _installed(solver)
    name, size = "closest points of reduced hulls (4)", f"{len(x)} + {_size(y)}"
    least = 1.0 / min(len(x), len(y))
    cap = least if cap is None else min(float(cap), 1.0)
    if not cap >= least * (1.0 - 1e-12):
        raise ValueError(
            f"cap={cap} is below 1/min(N, M) = {least}: {min(len(x), len(y))} weights of at most that cannot sum to 1."
        )
    cap = max(cap, least)
    # Neither the weights nor the conditions change when both sets are moved and scaled together.
    origin = 0.5 * (x.mean(axis=0) + y.mean(axis=0))
    extent = max(float(np.abs(x - origin).max()), float(np.abs(y - origin).max()), _TINY)
    x, y = (x - origin) / extent, (y - origin) / extent

    u, v = cp.Variable(len(x)), cp.Variable(len(y))
    constraints = [cp.sum(u) == 1, cp.sum(v) == 1, u >= 0, v >= 0, u <= cap, v <= cap]
    problem = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(x.T @ u - y.T @ v)), constraints)
    _solve(problem, name, size, solver)

    u, v = (np.clip(weights.value, 0.0, cap) for weights in (u, v))
    u, v = u / u.sum(), v / v.sum()
    c, d = u @ x, v @ y
    w = c - d
    gap = float(w @ w) - _least_mean(x @ w, cap) - _least_mean(-(y @ w), cap)
    if gap > 1e-8:
        raise _failure(name, size, solver, f"optimal, but the optimality conditions fail by {gap:.1e}")
    return ReducedHullPoints(origin + extent * c, origin + extent * d, u, v)


def _least_mean(values: Float[Array, "N"], cap: float) -> float:
    """The least weighted mean for weights of at most the cap: the smallest values take all they can."""
    return float(np.sort(values) @ np.clip(1.0 - cap * np.arange(len(values)), 0.0, cap))


def ellipsoids_intersect(first: Ellipsoid, second: Ellipsoid, *, solver: str = "CLARABEL") -> bool:
    r"""Whether two closed ellipsoids have a point in common, by the hyperplane that would separate them.

    .. math:: \rho = \max_{p, q}\ w^\top (c_2 - c_1) \quad \text{s.t.}\quad
              w = W_1^\top p = W_2^\top q,\ \ \|p\| + \|q\| \le 1

    Along :math:`w` the ellipsoids reach :math:`\|p\|` and :math:`\|q\|` from their centres, so a hyperplane with this
    normal separates them exactly if :math:`\rho > 1`. Grown by the factor :math:`\rho` about their centres they touch,
    in a point given by the multipliers of :math:`W_1^\top p = W_2^\top q`; with :math:`\rho \le 1 + 10^{-7}` they count
    as meeting.

    >>> import numpy as np
    >>> ball = Ellipsoid.ball(np.zeros(2), 1.0)
    >>> [ellipsoids_intersect(ball, Ellipsoid.ball(np.array([x, 0.0]), 1.0)) for x in (1.9, 2.1)]
    [True, False]
    """
    solver = _installed(solver)
    name, size = "separation of two ellipsoids", f"2 ellipsoids x {first.dim} dims"
    e1, e2 = _shared(first, second).ellipsoids
    apart = e2.center - e1.center
    unit = float(np.linalg.norm(apart))
    if unit == 0.0:
        return True
    p, q = cp.Variable(first.dim), cp.Variable(first.dim)
    w = e1.whitener.T @ p
    same = w == e2.whitener.T @ q
    problem = cp.Problem(cp.Maximize(w @ (apart / unit)), [same, cp.norm(p) + cp.norm(q) <= 1])
    _solve(problem, name, size, solver)

    # Both sides of the answer: how far the normal keeps the two apart, and how far they grow to hold the point.
    reach = sum(float(np.linalg.norm(np.linalg.solve(e.whitener.T, w.value))) for e in (e1, e2))
    low = float(w.value @ apart) / max(reach, _TINY)
    point = e2.center - unit * same.dual_value
    high = max(float(e.distance(point[None])[0]) for e in (e1, e2))
    if low <= 1.0 + _TOUCHING < high and high - low > _ACCEPTED:
        raise _failure(name, size, solver, f"optimal, but they touch at a growth between {low:.6f} and {high:.6f}")
    return low <= 1.0 + _TOUCHING


class _Shared(NamedTuple):
    r"""Two ellipsoids in coordinates :math:`R (z - o)` in which their quadratic forms add up to the identity.

    Neither whitener has a norm above 1 there, whatever the units of the features and the ratio of the sizes.
    """

    ellipsoids: tuple[Ellipsoid, Ellipsoid]
    origin: Float[Array, "D"]
    scale: Float[Array, "D D"]


def _shared(first: Ellipsoid, second: Ellipsoid) -> _Shared:
    if first.dim != second.dim:
        raise ValueError(f"The ellipsoids live in {first.dim} and {second.dim} dimensions; both need the same.")
    scale = triangular_whitener(np.concatenate([first.whitener, second.whitener]))
    w1, w2 = (solve_triangular(scale, e.whitener.T, trans="T").T for e in (first, second))
    apart = scale @ (second.center - first.center)
    middle = w2.T @ (w2 @ apart)  # the centre of the sum of the forms, seen from the first centre
    origin = first.center + solve_triangular(scale, middle)
    return _Shared((Ellipsoid(-middle, w1), Ellipsoid(apart - middle, w2)), origin, scale)


def distance_to_ellipsoid(
    ellipsoid: Ellipsoid, z: Float[Array, "B D"], *, solver: str = "CLARABEL"
) -> Float[Array, "B"]:
    r"""Euclidean distance from each point to an ellipsoid, zero inside.

    .. math:: \min_t\ \|z - c - W^{-1} t\| \quad \text{s.t.}\quad \|t\| \le 1

    One program with :math:`z` as its parameter, compiled once and solved for each point outside. Accepted is an answer
    that the hyperplane through the nearest point confirms, to 1e-5 of the distance plus the longest semi-axis.

    >>> import numpy as np
    >>> e = Ellipsoid(np.zeros(2), np.diag([0.5, 1.0]))
    >>> distance_to_ellipsoid(e, np.array([[5.0, 0.0], [0.0, 3.0], [1.0, 0.0]])).round(6)
    array([3., 2., 0.])
    """
    solver = _installed(solver)
    name, size = "distance to an ellipsoid", f"1 point x {ellipsoid.dim} dims"
    longest = float(ellipsoid.semi_axes[0])
    axes = np.linalg.inv(ellipsoid.whitener) / longest
    offset, t = cp.Parameter(ellipsoid.dim), cp.Variable(ellipsoid.dim)
    problem = cp.Problem(cp.Minimize(cp.norm(offset - axes @ t)), [cp.norm(t) <= 1])
    distance = np.zeros(len(z))
    for i in np.flatnonzero(ellipsoid.distance(z) > 1.0):
        offset.value = (z[i] - ellipsoid.center) / longest
        _solve(problem, name, size, solver)
        gap = offset.value - axes @ (t.value / max(1.0, float(np.linalg.norm(t.value))))
        high = float(np.linalg.norm(gap))
        low = float(gap @ offset.value - np.linalg.norm(axes.T @ gap)) / max(high, _TINY)
        if high - low > _ACCEPTED * (1.0 + high):
            raise _failure(name, size, solver, f"optimal, but the distance lies between {low:.7f} and {high:.7f}")
        distance[i] = longest * high
    return distance


# Settings to try, in this order. The optima of these programs are flat, 1e-8 in the objective is 1e-4 in the answer, so
# Clarabel is asked for more, and for its default only where arithmetic does not allow that. (Left on, its splitting of
# sparse matrix inequalities fails on every third floor.) The first-order methods stop at 1e-4 or 1e-5 by themselves.
_SETTINGS: dict[str, list[dict[str, Any]]] = {
    "CLARABEL": [
        {"tol_gap_abs": a, "tol_gap_rel": a, "tol_feas": a, "chordal_decomposition_enable": False}
        for a in (1e-11, 1e-9, 1e-8)
    ],
    "SCS": [{"eps_abs": 1e-9, "eps_rel": 1e-9, "max_iters": 100_000}],
    "OSQP": [{"eps_abs": 1e-9, "eps_rel": 1e-9, "max_iter": 50_000}],
}


def _solve(problem: cp.Problem, name: str, size: str, solver: str) -> None:
    """Solve a program; whatever is not exactly optimal is an error."""
    status, cause = "", None
    for settings in _SETTINGS.get(solver, [{}]):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # cvxpy repeats in words what the status says
                problem.solve(solver=solver, **settings)
            status = str(problem.status)
        except cp.SolverError as error:
            status, cause = str(error), error
        if status == cp.OPTIMAL:
            return
    raise _failure(name, size, solver, status) from cause


def _failure(name: str, size: str, solver: str, status: str) -> ProgramError:
    others = ", ".join(repr(other) for other in _installed_solvers() if other != solver)
    return ProgramError(
        f"{name}, {size}: {solver} ended with status: {status.rstrip('.')}. Use solver='native', which certifies what "
        f"it returns, or another cvxpy solver ({others}). Fewer dimensions, or a floor for thin sets, help a solver."
    )


@cache
def _installed_solvers() -> list[str]:
    return list(cp.installed_solvers())


def _installed(solver: str) -> str:
    installed = _installed_solvers()
    if solver.upper() not in installed:
        raise ValueError(
            f"solver={solver!r} is not an installed cvxpy solver; expected one of {', '.join(installed)}, or 'native' "
            "in the functions of sepc_torch."
        )
    return solver.upper()


def _size(points: Float[Array, "N D"]) -> str:
    return f"{points.shape[0]} points x {points.shape[1]} dims"
