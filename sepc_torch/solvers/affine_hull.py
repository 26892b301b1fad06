r"""The affine hull of a point set, in coordinates in which the points have unit covariance.

The minimum-volume ellipsoid is affinely equivariant, so solving in these coordinates is exact; features of very
different scale, large offsets, and constant or dependent features disappear here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
from scipy.linalg.lapack import dpotrf, dtrtri

from sepc_torch.ellipsoid import triangular_whitener, whitened_norms
from sepc_torch.shapes import Array, Float

T = TypeVar("T")

# A direction counts as absent when its standard deviation, after scaling each feature to half range 1, is below this
# share of the largest: membership at relative thickness t carries an error of 1e-16 / t.
RANK_TOLERANCE = 1e-8
# A feature whose half range is below this many roundings of its magnitude holds nothing but rounding noise.
_CONSTANT = 64 * np.finfo(np.float64).eps


class AffineHull(NamedTuple):
    r"""The points :math:`z_i = o + \ldots` seen from inside their affine hull.

    ``coordinates`` (r, N) are :math:`y_i = T (z_i - o)` with mean zero and unit covariance, stored feature by
    feature (long contiguous rows); ``origin`` is :math:`o` (D,), ``transform`` is :math:`T` (r, D), and the columns
    of ``normals`` (D, D - r) are an orthonormal basis of the directions in which the points do not extend.
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
        """A linear form of the hull's coordinates as one of the caller's that does not see what is across the hull."""
        rows = factor @ self.transform
        return rows - (rows @ self.normals) @ self.normals.T if self.normals.shape[1] else rows


def affine_hull(points: Float[Array, "N D"], tolerance: float = RANK_TOLERANCE) -> AffineHull:
    r"""Centre, scale, rotate and whiten the points, dropping the directions in which they do not extend.

    Two Gram passes: the eigenvectors of the first rotate, the standard deviations are then measured again along
    them (accurate where the eigenvalue is noise), and a Cholesky factor of the second, on rows of unit variance,
    finishes. This has the accuracy of a singular value decomposition at the cost of matrix products.

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
            raise np.linalg.LinAlgError("the points are numerically flat beyond the rank tolerance")
        inverse, _ = dtrtri(lower, lower=1)
        y = inverse @ y
        transform = inverse @ transform
    transform /= scale
    transform[:, ~varies] = 0.0
    return AffineHull(origin, transform, y, _complement(scale[:, None] * rotation[:, present], dim))


def in_flattening_hull(points: Float[Array, "N D"], solve: Callable[[AffineHull], T]) -> T:
    """The result of ``solve`` in the affine hull of the points.

    Where their factorisations fail, a set that passes for full rank is numerically flat; then directions ever less
    thin count as absent.
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
    """Orthonormal basis of what is orthogonal, in the caller's metric, to the given independent directions."""
    rank = directions.shape[1]
    if rank in (0, dim):
        return np.eye(dim)[:, rank:]
    unit = directions / np.linalg.norm(directions, axis=0)
    return np.linalg.svd(unit, full_matrices=True)[0][:, rank:]


# Flat sets need some thickness even when none is asked for: this share of the largest half range.
DEFAULT_THICKNESS = 1e-6
# What counts as flat may still be rounded off its hull; this many times thicker, it changes distances by under 1e-6.
_ROUNDING_MARGIN = 1e3


class Cover(NamedTuple):
    """A whitener that covers every point, the stretch that took, and the thickness across the hull (0: full rank)."""

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
    r"""Take an ellipsoid :math:`\|F (y - y_c)\| \le 1` of the hull to the caller's coordinates and make it cover.

    Across the hull the semi-axis is ``floor``: among all covering ellipsoids with semi-axes of at least the floor
    this one has the least volume, if its axes inside the hull are the least possible and not shorter than the floor
    (Fischer's inequality). With ``floor=0`` a flat set gets :data:`DEFAULT_THICKNESS` of its largest half range.
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
    """The semi-axis across the hull: the floor, unless there is none or rounding is thicker; 0 at full rank."""
    if not hull.normals.shape[1]:
        return 0.0
    across = float(np.abs(offsets @ hull.normals).max())
    extent = 0.5 * float(np.ptp(offsets, axis=0).max()) or max(1.0, float(np.abs(hull.origin).max()))
    return max(floor if floor > 0 else DEFAULT_THICKNESS * extent, _ROUNDING_MARGIN * across)


def stretched(whitener: Float[Array, "D D"], offsets: Float[Array, "N D"]) -> Float[Array, "D D"]:
    """The whitener, scaled until no offset lies outside, in the arithmetic of ``Ellipsoid.distance``."""
    margin, center = 1e-15, np.zeros(offsets.shape[1])
    while (farthest := float(whitened_norms(offsets, center, whitener).max())) > 1.0:
        whitener = whitener / (farthest * (1.0 + margin))
        margin *= 4.0  # scaling rounds too, the more the thinner the set
    return whitener
