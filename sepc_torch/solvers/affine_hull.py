r"""Affine hull of a point set in whitened coordinates, the preprocessing step of program (2).

In these coordinates the points have mean zero and unit covariance. The minimum-volume ellipsoid is affinely
equivariant, so a solution in these coordinates is exact. They remove differences in the scale of the features, large
offsets, and constant or dependent features. :func:`cover` transforms an ellipsoid back to the caller's coordinates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
from scipy.linalg.lapack import dpotrf, dtrtri

from sepc_torch.ellipsoid import triangular_whitener, whitened_norms
from sepc_torch.shapes import Array, Float

T = TypeVar("T")

# The set is flat in a direction if the standard deviation there, after scaling each feature to half range 1, is below
# this share of the largest. The distance to an ellipsoid of relative thickness t has a rounding error of 1e-16 / t.
RANK_TOLERANCE = 1e-8
# A feature is constant if its half range is below this share of its magnitude: rounding error.
_CONSTANT = 64 * np.finfo(np.float64).eps
# Thickness of a flat set if no floor is given, as a share of its largest half range.
DEFAULT_THICKNESS = 1e-6
# The thickness is at least this many times the distance by which rounding moved points off the hull. Then the
# displacement changes the distance to the ellipsoid by less than 1e-6.
_ROUNDING_MARGIN = 1e3


class AffineHull(NamedTuple):
    r"""Whitened coordinates :math:`y_i = T (z_i - o)` of points in their affine hull of dimension r.

    ``coordinates`` (r, N) holds the :math:`y_i` as columns, with mean zero and unit covariance; rows are contiguous.
    ``origin`` is :math:`o` (D,) and ``transform`` is :math:`T` (r, D). The columns of ``normals`` (D, D - r) are an
    orthonormal basis of the directions across the hull, in which the points have no extent.
    """

    origin: Float[Array, "D"]
    transform: Float[Array, "R D"]
    coordinates: Float[Array, "R N"]
    normals: Float[Array, "D Q"]

    @property
    def rank(self) -> int:
        """Dimension r of the hull."""
        return len(self.transform)

    def in_callers_coordinates(self, factor: Float[Array, "Q R"]) -> Float[Array, "Q D"]:
        """Rewrite linear forms of the hull's coordinates as forms of the caller's that vanish across the hull."""
        rows = factor @ self.transform
        return rows - (rows @ self.normals) @ self.normals.T if self.normals.shape[1] else rows


def affine_hull(points: Float[Array, "N D"], tolerance: float = RANK_TOLERANCE) -> AffineHull:
    r"""Compute the affine hull: centre, scale, rotate and whiten the points, and drop the flat directions.

    Two Gram matrices give the accuracy of a singular value decomposition at the cost of matrix products. The
    eigenvectors of the first Gram matrix rotate the points. The standard deviations are computed again along these
    directions, because small eigenvalues are inaccurate. After scaling to unit variance, a Cholesky factor of the
    second Gram matrix completes the whitening.

    Raises LinAlgError if the points are numerically flat although no deviation is below ``tolerance``.

    >>> import numpy as np
    >>> square = np.array([[0.0, 0.0, 7.0], [1.0, 0.0, 7.0], [0.0, 1.0, 7.0], [1.0, 1.0, 7.0]])
    >>> hull = affine_hull(square)
    >>> hull.rank, np.abs(hull.normals.ravel())
    (2, array([0., 0., 1.]))
    """
    count, dim = points.shape
    y = np.array(points.T, dtype=np.float64, order="C")
    low, high = y.min(axis=1), y.max(axis=1)
    origin = y.mean(axis=1)
    half_range = np.maximum(high - origin, origin - low)
    varies = half_range > _CONSTANT * np.maximum(np.abs(low), np.abs(high))
    scale = np.where(varies, half_range, 1.0)
    y -= origin[:, None]
    y /= scale[:, None]
    y[~varies] = 0.0

    _, rotation = np.linalg.eigh(y @ y.T)
    y = rotation.T @ y
    deviation = np.sqrt(np.einsum("ij,ij->i", y, y) / count)
    present = deviation > tolerance * max(float(deviation.max(initial=0.0)), np.finfo(np.float64).tiny)
    present[np.argsort(-deviation, kind="stable")[count - 1 :]] = False  # N points span at most N - 1 dimensions
    if not present.all():
        y = np.ascontiguousarray(y[present])
    transform = (rotation[:, present] / deviation[present]).T
    if present.any():
        y /= deviation[present][:, None]
        lower, failed = dpotrf(y @ y.T / count, lower=1, clean=1)
        if failed:
            raise np.linalg.LinAlgError("the points are numerically flat although they pass the rank tolerance")
        inverse, _ = dtrtri(lower, lower=1)
        y = inverse @ y
        transform = inverse @ transform
    transform /= scale
    transform[:, ~varies] = 0.0
    return AffineHull(origin, transform, y, _complement(scale[:, None] * rotation[:, present], dim))


def solve_in_hull(points: Float[Array, "N D"], solve: Callable[[AffineHull], T]) -> T:
    """The result of ``solve`` in the affine hull of the points.

    If a factorisation fails, the set is numerically flatter than its rank. The function then retries with a larger rank
    tolerance, which removes more directions.
    """
    tolerance = RANK_TOLERANCE
    while True:
        try:
            return solve(affine_hull(points, tolerance))
        except np.linalg.LinAlgError:
            if tolerance >= 1e-3:
                raise
            tolerance *= 100


def _complement(directions: Float[Array, "D R"], dim: int) -> Float[Array, "D Q"]:
    """Orthonormal basis of the orthogonal complement, in the caller's metric, of independent directions."""
    rank = directions.shape[1]
    if rank in (0, dim):
        return np.eye(dim)[:, rank:]
    unit = directions / np.linalg.norm(directions, axis=0)
    return np.linalg.svd(unit, full_matrices=True)[0][:, rank:]


class Cover(NamedTuple):
    """Whitener of a covering ellipsoid, the factor it was stretched by, and its thickness (0 at full rank)."""

    whitener: Float[Array, "D D"]
    stretch: float
    thickness: float


def cover(
    points: Float[Array, "N D"],
    hull: AffineHull,
    center: Float[Array, "D"],
    factor: Float[Array, "R R"],
    floor: float = 0.0,
) -> Cover:
    r"""Stretch an ellipsoid :math:`\|F (y - y_c)\| \le 1` of the hull to cover all points, in the caller's coordinates.

    The semi-axes across the hull equal ``floor``. If the ellipsoid has minimum volume within the hull and no semi-axis
    there is shorter than the floor, the result has minimum volume among all covering ellipsoids with semi-axes of at
    least the floor (Fischer's inequality). With ``floor=0`` a flat set gets the thickness :data:`DEFAULT_THICKNESS`
    times its largest half range.
    """
    inside = hull.in_callers_coordinates(factor)
    offsets = points - center
    stretch = 1.0
    if len(inside):
        stretch = float(np.linalg.norm(offsets @ inside.T, axis=1).max())
        inside /= stretch
    across = thickness(offsets, hull, floor)
    if across:
        inside = np.concatenate([inside, hull.normals.T / across])
    whitener = triangular_whitener(inside)
    return Cover(stretched(whitener, offsets), stretch, across)


def thickness(offsets: Float[Array, "N D"], hull: AffineHull, floor: float) -> float:
    """The semi-axis across the hull: the floor or its default, enlarged if rounding requires it; 0 at full rank."""
    if not hull.normals.shape[1]:
        return 0.0
    across = float(np.abs(offsets @ hull.normals).max())
    extent = 0.5 * float(np.ptp(offsets, axis=0).max()) or max(1.0, float(np.abs(hull.origin).max()))
    return max(floor if floor > 0 else DEFAULT_THICKNESS * extent, _ROUNDING_MARGIN * across)


def stretched(whitener: Float[Array, "D D"], offsets: Float[Array, "N D"]) -> Float[Array, "D D"]:
    """Scale the whitener until the ellipsoid covers all offsets from its centre, as ``Ellipsoid.distance`` rounds."""
    margin, center = 1e-15, np.zeros(offsets.shape[1])
    while (farthest := float(whitened_norms(offsets, center, whitener).max())) > 1.0:
        whitener = whitener / (farthest * (1.0 + margin))
        margin *= 4.0  # the scaling itself rounds, the more the thinner the ellipsoid
    return whitener
