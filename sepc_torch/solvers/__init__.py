"""Solvers of the paper's convex programs: fast native methods with certificates, and the same programs in cvxpy.

Every function takes ``solver="native"`` (the default) or the name of an installed cvxpy solver such as ``"CLARABEL"``.
The native methods are modules of this package. A cvxpy solver gets the statement of the program in
:mod:`sepc_torch.solvers.programs`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from sepc_torch.data.arrays import check_feature_scales, magnitudes
from sepc_torch.ellipsoid import Ellipsoid, MinimumVolumeEllipsoid
from sepc_torch.shapes import Array, Float
from sepc_torch.solvers.minimum_volume import minimum_volume
from sepc_torch.solvers.reduced_hull import ReducedHullPoints, closest_points

__all__ = ["distance_to_ellipsoid", "ellipsoids_intersect", "minimum_volume_ellipsoid", "reduced_hull_points"]

NATIVE = "native"


def minimum_volume_ellipsoid(
    points: ArrayLike, *, solver: str = NATIVE, tol: float = 1e-7, floor: float = 0.0
) -> MinimumVolumeEllipsoid:
    r"""Minimum-volume ellipsoid that covers all points, program (2) of the paper.

    .. math:: \min_{A \succ 0,\, b}\ \log\det A^{-1} \quad \text{s.t.}\quad \|A z_i + b\| \le 1,\ \ A \preceq I / \tau

    Args:
        points: The points :math:`z_i`, (N, D).
        solver: ``"native"`` or the name of an installed cvxpy solver.
        tol: Relative gap to certify. :class:`~sepc_torch.MinimumVolumeEllipsoid` describes the bound that the gap
            gives. A gap above ``10 * tol``, which rounding can cause, raises RuntimeError.
        floor: Least semi-axis :math:`\tau`. A flat set, without extent in some direction, has no ellipsoid of positive
            volume; with ``floor=0`` its semi-axes across the hull are 1e-6 of its largest half range.

    >>> import numpy as np
    >>> e = minimum_volume_ellipsoid([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0], [1.5, 1.0]])
    >>> e.center.round(6), e.semi_axes.round(6), e.support
    (array([1., 1.]), array([1.414214, 1.414214]), array([0, 1, 2, 3]))
    """
    z = _points(points, "points")
    check_feature_scales(magnitudes(z), "points")
    if not 0 < tol < 1:
        raise ValueError(f"tol must lie strictly between 0 and 1, got {tol}.")
    if not (np.isfinite(floor) and floor >= 0):
        raise ValueError(f"floor must be a finite length of at least 0, got {floor}.")
    if solver == NATIVE:
        found = minimum_volume(z, tol, floor)
        if found.gap > 10 * tol:
            raise RuntimeError(
                f"Minimum-volume ellipsoid of {z.shape[0]} points x {z.shape[1]} dims: rounding stopped the solver at "
                f"a gap of {found.gap:.1e}, above tol={tol:.1e}. Increase tol, or pass a floor if the set is thin."
            )
        return found
    from sepc_torch.solvers import programs

    return programs.minimum_volume_ellipsoid(z, solver=solver, tol=tol, floor=floor)


def reduced_hull_points(
    x: ArrayLike, y: ArrayLike, *, cap: float | None = None, solver: str = NATIVE
) -> ReducedHullPoints:
    r"""Closest points of two reduced convex hulls, program (4) of the paper.

    .. math:: \min_{u, v}\ \tfrac12 \|X^\top u - Y^\top v\|^2 \quad \text{s.t.}\quad
              e^\top u = e^\top v = 1,\ \ 0 \le u, v \le D e

    Args:
        x: Points of the first set, (N, D).
        y: Points of the second set, (M, D).
        cap: The bound :math:`D` on the weights, at least ``1 / min(N, M)``. The default is this least value, which
            reduces the smaller set to its centroid; 1 gives the full convex hulls.
        solver: ``"native"`` or the name of an installed cvxpy solver.

    >>> r = reduced_hull_points([[0.0, 0.0], [0.0, 2.0]], [[3.0, 1.0], [5.0, 1.0], [7.0, 1.0]])
    >>> r.c, r.d
    (array([0., 1.]), array([4., 1.]))
    """
    x, y = _points(x, "x"), _points(y, "y")
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x has {x.shape[1]} features and y has {y.shape[1]}; pass sets with the same features.")
    check_feature_scales(np.maximum(magnitudes(x), magnitudes(y)), "x and y")
    least = 1.0 / min(len(x), len(y))
    cap = least if cap is None else min(float(cap), 1.0)
    if not cap >= least * (1.0 - 1e-12):
        raise ValueError(
            f"cap={cap} is below 1/min(N, M) = {least}: {min(len(x), len(y))} weights up to this cap cannot sum to 1. "
            "Increase cap."
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
        raise ValueError(f"The ellipsoids have {first.dim} and {second.dim} dimensions; pass two of equal dimension.")
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
        raise ValueError(f"z must have {ellipsoid.dim} features like the ellipsoid, got {z.shape[1]}.")
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
        raise ValueError(f"{name} holds NaN or infinity, first in row {row}. Drop those rows or impute the values.")
    return points
