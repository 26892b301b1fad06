"""Specialised, certified solvers of the paper's programs, beside their cvxpy statements.

Every function takes ``solver="native"`` (the default, this package) or the name of an installed cvxpy solver such as
``"CLARABEL"``, which runs the statement in :mod:`sepc_torch.solvers.programs`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from sepc_torch.ellipsoid import Ellipsoid, MinimumVolumeEllipsoid, ReducedHullPoints
from sepc_torch.shapes import Array, Float
from sepc_torch.solvers.minimum_volume import minimum_volume
from sepc_torch.solvers.reduced_hull import closest_points

__all__ = ["distance_to_ellipsoid", "ellipsoids_intersect", "minimum_volume_ellipsoid", "reduced_hull_points"]

NATIVE = "native"


def minimum_volume_ellipsoid(
    points: ArrayLike, *, solver: str = NATIVE, tol: float = 1e-7, floor: float = 0.0
) -> MinimumVolumeEllipsoid:
    r"""The ellipsoid of least volume that covers all points, program (2) of the paper.

    .. math:: \min_{A \succ 0,\, b}\ \log\det A^{-1} \quad \text{s.t.}\quad \|A z_i + b\| \le 1,\ \ A \preceq I / \tau

    Args:
        points: The points :math:`z_i`, (N, D).
        solver: ``"native"`` or the name of an installed cvxpy solver.
        tol: Relative gap to prove, an error if arithmetic does not reach ten times that; see
            :class:`~sepc_torch.MinimumVolumeEllipsoid` for what it bounds.
        floor: Least semi-axis :math:`\tau`. Points that do not extend in some direction have no ellipsoid without
            one, so with ``floor=0`` a flat set is given a thickness of 1e-6 of its largest half range.

    >>> import numpy as np
    >>> e = minimum_volume_ellipsoid([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0], [1.5, 1.0]])
    >>> e.center.round(6), e.semi_axes.round(6), e.support
    (array([1., 1.]), array([1.414214, 1.414214]), array([0, 1, 2, 3]))
    """
    z = _points(points, "points")
    if not 0 < tol < 1:
        raise ValueError(f"tol must lie between 0 and 1, got {tol}.")
    if not (np.isfinite(floor) and floor >= 0):
        raise ValueError(f"floor must be a finite length of at least 0, got {floor}.")
    if solver == NATIVE:
        found = minimum_volume(z, tol, floor)
        if found.gap > 10 * tol:
            raise RuntimeError(
                f"Minimum-volume ellipsoid of {z.shape[0]} points x {z.shape[1]} dims: arithmetic ended at a gap of "
                f"{found.gap:.1e}, above tol={tol:.1e}. Ask for no more than that, or give a floor for thin sets."
            )
        return found
    from sepc_torch.solvers import programs

    return programs.minimum_volume_ellipsoid(z, solver=solver, tol=tol, floor=floor)


def reduced_hull_points(
    x: ArrayLike, y: ArrayLike, *, cap: float | None = None, solver: str = NATIVE
) -> ReducedHullPoints:
    r"""The closest points of two reduced convex hulls, program (4) of the paper.

    .. math:: \min_{u, v}\ \tfrac12 \|X^\top u - Y^\top v\|^2 \quad \text{s.t.}\quad
              e^\top u = e^\top v = 1,\ \ 0 \le u, v \le D e

    Args:
        x: Points of the first set, (N, D).
        y: Points of the second set, (M, D).
        cap: The bound :math:`D` on the weights, at least ``1 / min(N, M)``, which is the default and reduces the
            smaller set to its centroid; 1 gives the whole convex hulls.
        solver: ``"native"`` or the name of an installed cvxpy solver.

    >>> r = reduced_hull_points([[0.0, 0.0], [0.0, 2.0]], [[3.0, 1.0], [5.0, 1.0], [7.0, 1.0]])
    >>> r.c, r.d
    (array([0., 1.]), array([4., 1.]))
    """
    x, y = _points(x, "x"), _points(y, "y")
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x has {x.shape[1]} features and y has {y.shape[1]}; both need the same.")
    least = 1.0 / min(len(x), len(y))
    cap = least if cap is None else min(float(cap), 1.0)
    if not cap >= least * (1.0 - 1e-12):
        raise ValueError(
            f"cap={cap} is below 1/min(N, M) = {least}: {min(len(x), len(y))} weights of at most that cannot sum to 1."
        )
    if solver == NATIVE:
        return closest_points(x, y, max(cap, least))
    from sepc_torch.solvers import programs

    return programs.reduced_hull_points(x, y, cap=max(cap, least), solver=solver)


def ellipsoids_intersect(first: Ellipsoid, second: Ellipsoid, *, solver: str = NATIVE) -> bool:
    """Whether two closed ellipsoids have a point in common.

    >>> import numpy as np
    >>> ellipsoids_intersect(Ellipsoid.ball(np.zeros(3), 1.0), Ellipsoid.ball(np.ones(3), 1.0))
    True
    """
    if first.dim != second.dim:
        raise ValueError(f"The ellipsoids live in {first.dim} and {second.dim} dimensions; both need the same.")
    if solver == NATIVE:
        return first.intersects(second)
    from sepc_torch.solvers import programs

    return programs.ellipsoids_intersect(first, second, solver=solver)


def distance_to_ellipsoid(ellipsoid: Ellipsoid, z: ArrayLike, *, solver: str = NATIVE) -> Float[Array, "B"]:
    """Euclidean distance from each point to the ellipsoid, zero inside.

    >>> import numpy as np
    >>> distance_to_ellipsoid(Ellipsoid.ball(np.zeros(2), 1.0), [[3.0, 4.0], [0.5, 0.0]])
    array([4., 0.])
    """
    z = _points(z, "z")
    if z.shape[1] != ellipsoid.dim:
        raise ValueError(f"z has {z.shape[1]} features, the ellipsoid {ellipsoid.dim}.")
    if solver == NATIVE:
        return ellipsoid.euclidean_distance(z)
    from sepc_torch.solvers import programs

    return programs.distance_to_ellipsoid(ellipsoid, z, solver=solver)


def _points(values: ArrayLike, name: str) -> Float[Array, "N D"]:
    points = np.asarray(values, dtype=np.float64)
    if points.ndim != 2 or 0 in points.shape:
        raise ValueError(f"{name} must be a non-empty array of shape (points, features), got shape {points.shape}.")
    if not np.isfinite(points).all():
        row = int(np.flatnonzero(~np.isfinite(points).all(axis=1))[0])
        raise ValueError(f"{name} holds NaN or infinity, first in row {row}. Drop or impute such rows.")
    return points
