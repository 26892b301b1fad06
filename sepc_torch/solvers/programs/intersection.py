"""Program (3) in cvxpy, an ellipsoid that covers an intersection; also the intersection test and Euclidean distance."""

from __future__ import annotations

from typing import NamedTuple

import cvxpy as cp
import numpy as np
from scipy.linalg import solve_triangular

from sepc_torch.ellipsoid import Ellipsoid, triangular_whitener
from sepc_torch.shapes import Array, Float
from sepc_torch.solvers.programs.solve import ACCEPTED, check_installed, failure, solve

# Ellipsoids that touch once both have grown by this share count as intersecting; solvers find the growth to about 1e-8.
_TOUCHING = 1e-7
_TINY = float(np.finfo(np.float64).tiny)


def intersection_ellipsoid(first: Ellipsoid, second: Ellipsoid, *, solver: str = "CLARABEL") -> Ellipsoid:
    r"""Ellipsoid that covers the intersection of two ellipsoids, program (3) of the paper.

    With the given :math:`E_j = \{z : z^\top A_j z + 2 b_j^\top z + c_j \le 0\}` and the result
    :math:`\{z : z^\top P z + 2 q^\top z + q^\top P^{-1} q \le 1\}`,

    .. math:: \max_{P, q, \tau \ge 0}\ \log\det P \quad \text{s.t.}\quad
        \begin{bmatrix} P & q & 0 \\ q^\top & -1 & q^\top \\ 0 & q & -P \end{bmatrix} \preceq
        \sum_j \tau_j \begin{bmatrix} A_j & b_j & 0 \\ b_j^\top & c_j & 0 \\ 0 & 0 & 0 \end{bmatrix}.

    In the paper's letters :math:`P = A_{Int}^2` and :math:`q = A_{Int} b_{Int}`; the paper prints the inequality with
    :math:`A_{Int}` and :math:`b_{Int}` in place of :math:`P` and :math:`q`. The inequality is sufficient for covering
    but not necessary, so the result can be larger than the smallest covering ellipsoid. At the optimum it is the
    smallest member of the pencil :math:`\sum_j \tau_j (z^\top A_j z + 2 b_j^\top z + c_j) \le 0`: a ball for two balls,
    as in the paper's figure, and the inner ellipsoid for nested ellipsoids. In general it is not a ball. The result is
    built from :math:`\tau`, so it covers the intersection whatever the accuracy of the solver.

    >>> import numpy as np
    >>> e = intersection_ellipsoid(Ellipsoid.ball(np.zeros(2), 1.0), Ellipsoid.ball(np.array([1.2, 0.0]), 1.0))
    >>> e.center.round(4), e.semi_axes.round(4)
    (array([0.6, 0. ]), array([0.8, 0.8]))
    """
    solver = check_installed(solver)
    name, size, dim = "outer ellipsoid of an intersection (3)", f"2 ellipsoids x {first.dim} dims", first.dim
    common = _common_coordinates(first, second)
    if not first.intersects(second):
        raise ValueError("The ellipsoids are disjoint: their intersection is empty. Pass two that intersect.")
    p, q, tau = cp.Variable((dim, dim), symmetric=True), cp.Variable((dim, 1)), cp.Variable(2, nonneg=True)
    one, column, square = np.ones((1, 1)), np.zeros((dim, 1)), np.zeros((dim, dim))
    answer = cp.bmat([[p, q, square], [q.T, -one, q.T], [square, q, -p]])
    given = 0
    for j, e in enumerate(common.ellipsoids):
        a = e.whitener.T @ e.whitener
        b = -a @ e.center[:, None]
        c = np.sum((e.whitener @ e.center) ** 2) - one
        given += tau[j] * np.block([[a, b, square], [b.T, c, column.T], [square, column, square]])
    solve(cp.Problem(cp.Maximize(cp.log_det(p)), [answer << given]), name, size, solver)

    # Complete the square in sum_j tau_j (||W_j (z - c_j)||^2 - 1) <= 0 to find the centre and the whitener.
    roots = np.sqrt(np.maximum(tau.value, 0.0))
    factor = np.concatenate([root * e.whitener for root, e in zip(roots, common.ellipsoids, strict=True)])
    target = np.concatenate([root * e.whitener @ e.center for root, e in zip(roots, common.ellipsoids, strict=True)])
    center = np.linalg.lstsq(factor, target)[0]
    radius_squared = float(roots @ roots - np.sum((factor @ center - target) ** 2))
    if radius_squared > 0:
        ellipsoid = Ellipsoid(center, triangular_whitener(factor / np.sqrt(radius_squared)))
        if abs(ellipsoid.log_volume + 0.5 * np.linalg.slogdet(p.value)[1]) <= dim * ACCEPTED:
            whitener = triangular_whitener(ellipsoid.whitener @ common.scale)
            return Ellipsoid(common.origin + solve_triangular(common.scale, center), whitener)
    raise failure(name, size, solver, "optimal, but the multipliers do not confirm the ellipsoid")


def ellipsoids_intersect(first: Ellipsoid, second: Ellipsoid, *, solver: str = "CLARABEL") -> bool:
    r"""Whether two closed ellipsoids have a point in common, by a program for a separating hyperplane.

    .. math:: \rho = \max_{p, q}\ w^\top (c_2 - c_1) \quad \text{s.t.}\quad
              w = W_1^\top p = W_2^\top q,\ \ \|p\| + \|q\| \le 1

    Along :math:`w` the ellipsoids extend by :math:`\|p\|` and :math:`\|q\|` from their centres. A hyperplane with
    normal :math:`w` separates the ellipsoids exactly if :math:`\rho > 1`. Scaled by the factor :math:`\rho` about their
    centres, the ellipsoids touch at a point given by the multipliers of :math:`W_1^\top p = W_2^\top q`. With
    :math:`\rho \le 1 + 10^{-7}` they count as intersecting.

    >>> import numpy as np
    >>> ball = Ellipsoid.ball(np.zeros(2), 1.0)
    >>> [ellipsoids_intersect(ball, Ellipsoid.ball(np.array([x, 0.0]), 1.0)) for x in (1.9, 2.1)]
    [True, False]
    """
    solver = check_installed(solver)
    name, size = "separation of two ellipsoids", f"2 ellipsoids x {first.dim} dims"
    e1, e2 = _common_coordinates(first, second).ellipsoids
    apart = e2.center - e1.center
    unit = float(np.linalg.norm(apart))
    if unit == 0.0:
        return True
    p, q = cp.Variable(first.dim), cp.Variable(first.dim)
    w = e1.whitener.T @ p
    same = w == e2.whitener.T @ q
    problem = cp.Problem(cp.Maximize(w @ (apart / unit)), [same, cp.norm(p) + cp.norm(q) <= 1])
    solve(problem, name, size, solver)

    # Lower and upper bound on rho: the separation along the normal, and the growth at which both contain the point.
    extent = sum(float(np.linalg.norm(np.linalg.solve(e.whitener.T, w.value))) for e in (e1, e2))
    low = float(w.value @ apart) / max(extent, _TINY)
    point = e2.center - unit * same.dual_value
    high = max(float(e.distance(point[None])[0]) for e in (e1, e2))
    if low <= 1.0 + _TOUCHING < high and high - low > ACCEPTED:
        status = f"optimal, but the ellipsoids touch at a scaling between {low:.6f} and {high:.6f}"
        raise failure(name, size, solver, status)
    return low <= 1.0 + _TOUCHING


class _CommonCoordinates(NamedTuple):
    r"""Two ellipsoids in common coordinates :math:`R (z - o)`, in which their quadratic forms sum to the identity.

    In these coordinates no whitener has a norm above 1, whatever the units of the features and the ratio of the sizes.
    ``scale`` is :math:`R` and ``origin`` is :math:`o`.
    """

    ellipsoids: tuple[Ellipsoid, Ellipsoid]
    origin: Float[Array, "D"]
    scale: Float[Array, "D D"]


def _common_coordinates(first: Ellipsoid, second: Ellipsoid) -> _CommonCoordinates:
    if first.dim != second.dim:
        raise ValueError(f"The ellipsoids have {first.dim} and {second.dim} dimensions; pass two of equal dimension.")
    scale = triangular_whitener(np.concatenate([first.whitener, second.whitener]))
    w1, w2 = (solve_triangular(scale, e.whitener.T, trans="T").T for e in (first, second))
    apart = scale @ (second.center - first.center)
    middle = w2.T @ (w2 @ apart)  # the centre of the summed form, relative to the first centre
    origin = first.center + solve_triangular(scale, middle)
    return _CommonCoordinates((Ellipsoid(-middle, w1), Ellipsoid(apart - middle, w2)), origin, scale)


def distance_to_ellipsoid(
    ellipsoid: Ellipsoid, z: Float[Array, "B D"], *, solver: str = "CLARABEL"
) -> Float[Array, "B"]:
    r"""Euclidean distance from each point to an ellipsoid, zero inside, by a second-order cone program.

    .. math:: \min_t\ \|z - c - W^{-1} t\| \quad \text{s.t.}\quad \|t\| \le 1

    The program has :math:`z` as its parameter; it is compiled once and solved for each point outside. The tangent
    hyperplane at the nearest point gives a lower bound on the distance. If it differs from the distance by more than
    1e-5 of the distance plus the longest semi-axis, :class:`ProgramError` is raised.

    >>> import numpy as np
    >>> e = Ellipsoid(np.zeros(2), np.diag([0.5, 1.0]))
    >>> distance_to_ellipsoid(e, np.array([[5.0, 0.0], [0.0, 3.0], [1.0, 0.0]])).round(6)
    array([3., 2., 0.])
    """
    solver = check_installed(solver)
    name, size = "distance to an ellipsoid", f"1 point x {ellipsoid.dim} dims"
    longest = float(ellipsoid.semi_axes[0])
    axes = np.linalg.inv(ellipsoid.whitener) / longest
    offset, t = cp.Parameter(ellipsoid.dim), cp.Variable(ellipsoid.dim)
    problem = cp.Problem(cp.Minimize(cp.norm(offset - axes @ t)), [cp.norm(t) <= 1])
    distance = np.zeros(len(z))
    for i in np.flatnonzero(ellipsoid.distance(z) > 1.0):
        offset.value = (z[i] - ellipsoid.center) / longest
        solve(problem, name, size, solver)
        gap = offset.value - axes @ (t.value / max(1.0, float(np.linalg.norm(t.value))))
        high = float(np.linalg.norm(gap))
        low = float(gap @ offset.value - np.linalg.norm(axes.T @ gap)) / max(high, _TINY)
        if high - low > ACCEPTED * (1.0 + high):
            raise failure(name, size, solver, f"optimal, but the distance lies only between {low:.7f} and {high:.7f}")
        distance[i] = longest * high
    return distance
