"""Native solver of program (2), the minimum-volume ellipsoid: its D-optimal design dual, in the affine hull."""

from __future__ import annotations

import numpy as np

from sepc_torch.ellipsoid import MinimumVolumeEllipsoid
from sepc_torch.shapes import Array, Float, Int
from sepc_torch.solvers.affine_hull import AffineHull, cover, solve_in_hull
from sepc_torch.solvers.d_optimal import Design, inverse_root
from sepc_torch.solvers.floored import floored_minimum_volume

# Weights below this share of the largest weight are dropped. The certificate is computed afterwards, so it stays valid.
_NEGLIGIBLE = 1e-9


def minimum_volume(
    points: Float[Array, "N D"], tol: float, floor: float, start: Int[Array, "S"] | None = None
) -> MinimumVolumeEllipsoid:
    """Solve program (2) to the relative gap ``tol``; the caller validates the arguments.

    ``start`` holds indices of points that probably support the ellipsoid.
    """
    return solve_in_hull(points, lambda hull: _in_hull(points, hull, tol, floor, start))


def lifted(hull: AffineHull) -> Float[Array, "n N"]:
    """Lifted points :math:`(y_i, 1)` as columns: the coordinates in the hull with a row of ones below."""
    return np.concatenate([hull.coordinates, np.ones((1, hull.coordinates.shape[1]))])


def _in_hull(
    points: Float[Array, "N D"], hull: AffineHull, tol: float, floor: float, start: Int[Array, "S"] | None
) -> MinimumVolumeEllipsoid:
    if hull.rank == 0:
        support, weights = np.zeros(1, dtype=np.int64), np.ones(1)
    else:
        design = Design(lifted(hull), start)
        design.refine(tol)
        support, weights = design.support, design.weights
    plain = from_weights(points, hull, support, weights, floor)
    if floor > 0 and hull.rank and plain.semi_axes[-1] < floor * (1.0 - 1e-9):
        return floored_minimum_volume(points, tol, floor, plain.support, plain.weights, hull.rank)
    return plain


def from_weights(
    points: Float[Array, "N D"],
    hull: AffineHull,
    support: Int[Array, "S"],
    weights: Float[Array, "S"],
    floor: float,
) -> MinimumVolumeEllipsoid:
    r"""Covering ellipsoid of a design, with a certificate computed in the caller's coordinates.

    Let :math:`\Sigma = \sum_i u_i (y_i - c)(y_i - c)^\top`. The least :math:`k` for which all points lie in
    :math:`\{(y - c)^\top \Sigma^{-1} (y - c) \le k^2\}` gives the gap by
    :math:`1 + k^2 = (r + 1)(1 + \mathtt{gap})`.
    """
    kept = weights > _NEGLIGIBLE * weights.max()
    order = np.argsort(support[kept], kind="stable")
    support = support[kept][order]
    weights = weights[kept][order] / weights[kept].sum()
    center = hull.origin + weights @ (points[support] - hull.origin)
    y = hull.coordinates[:, support].T
    root = inverse_root(y - weights @ y, weights) if hull.rank else np.zeros((0, 0))
    whitener, stretch, thickness = cover(points, hull, center, root, floor)
    rank = hull.rank
    gap = max(0.0, (1.0 + stretch**2) / (rank + 1) - 1.0) if rank else 0.0
    bound = 0.5 * rank * float(np.log1p(gap * (rank + 1) / rank)) if rank else 0.0
    return MinimumVolumeEllipsoid(center, whitener, support, weights, gap, bound, rank, thickness)
