r"""Ellipsoids as values: :math:`E = \{z : \|W (z - c)\| \le 1\}`.

Every other module speaks in these terms. The distance :math:`d(z) = \|W (z - c)\|` is not squared and 1 is the
surface. The paper's :math:`\{z : \|A z + b\| \le 1\}` is the same set with :math:`A = (W^\top W)^{1/2}`,
:math:`b = -A c`; :math:`W (z - c)` is the more accurate way to evaluate it when data lie away from the origin.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from sepc_torch.geometry import euclidean_distance, separation
from sepc_torch.shapes import Array, Bool, Float, Int

# Training points that support an ellipsoid lie on its surface, and rounding puts them on either side. Everything
# within this distance of the surface counts as inside: a hundred times float32's rounding of a distance near 1, so
# that float64 and float32 agree on the training points, and far below what any data resolve.
SURFACE_TOLERANCE = 1e-4


# The least semi-axis of an ellipsoid of the partition, in standard deviations of each feature: well above float32's
# rounding of standardised data, so that flat ellipsoids hold their points in float32 too, and below what data resolve.
DEFAULT_FLOOR = 1e-3


class Kind(StrEnum):
    """How an ellipsoid of a partition came about."""

    FIRST = "first"
    FURTHER = "further"
    TERMINAL = "terminal"
    ISOLATED = "isolated"


@dataclass(frozen=True, eq=False)
class Ellipsoid:
    r"""The set :math:`\{z : \|W (z - c)\| \le 1\}` with centre :math:`c` and whitener :math:`W`.

    >>> import numpy as np
    >>> e = Ellipsoid(np.array([1.0, 0.0]), np.diag([0.5, 1.0]))
    >>> e.distance(np.array([[1.0, 0.0], [3.0, 0.0], [1.0, 2.0]]))
    array([0., 1., 2.])
    >>> e.semi_axes
    array([2., 1.])
    >>> e.intersects(Ellipsoid.ball(np.array([5.0, 0.0]), radius=1.5))
    False
    """

    center: Float[Array, "D"]
    whitener: Float[Array, "D D"]

    @classmethod
    def ball(cls, center: Float[Array, "D"], radius: float) -> Ellipsoid:
        """The ball of the given radius."""
        center = np.asarray(center, dtype=np.float64)
        return Ellipsoid(center, np.eye(len(center)) / radius)

    @property
    def dim(self) -> int:
        """Number of features D."""
        return len(self.center)

    def distance(self, z: ArrayLike) -> Float[Array, "B"]:
        r"""Mahalanobis distance :math:`d(z) = \|W (z - c)\|` of points (B, D) or one point (D,); 1 is the surface."""
        return whitened_norms(self._batch(z), self.center, self.whitener)

    def contains(self, z: ArrayLike) -> Bool[Array, "B"]:
        """Which points lie inside, the surface (within :data:`SURFACE_TOLERANCE`) included."""
        return self.distance(z) <= 1.0 + SURFACE_TOLERANCE

    def euclidean_distance(self, z: ArrayLike) -> Float[Array, "B"]:
        """Euclidean distance from each point to the ellipsoid, zero inside."""
        return euclidean_distance(self.center, self.whitener, self._batch(z))

    def intersects(self, other: Ellipsoid) -> bool:
        """Whether the two closed ellipsoids have a point in common."""
        return not separation(self.center, self.whitener, other.center, other.whitener).disjoint

    def _batch(self, z: ArrayLike) -> Float[Array, "B D"]:
        points = np.atleast_2d(np.asarray(z, dtype=np.float64))
        if points.ndim != 2 or points.shape[1] != self.dim:
            raise ValueError(f"z must have shape (points, {self.dim}) or ({self.dim},), got {np.shape(z)}.")
        return points

    @property
    def log_volume(self) -> float:
        r"""Log-volume in units of the unit ball, :math:`-\log|\det W|`."""
        return -float(np.linalg.slogdet(self.whitener)[1])

    @property
    def semi_axes(self) -> Float[Array, "D"]:
        """Lengths of the semi-axes, longest first."""
        return 1.0 / np.linalg.svd(self.whitener, compute_uv=False)[::-1]

    def affine_image(self, matrix: Float[Array, "D D"], offset: Float[Array, "D"]) -> Ellipsoid:
        r"""The image under :math:`z \mapsto M z + t` for invertible :math:`M`."""
        whitener = np.linalg.solve(matrix.T, self.whitener.T).T
        return Ellipsoid(matrix @ self.center + offset, triangular_whitener(whitener))

    def as_paper(self) -> PaperForm:
        r"""The paper's :math:`(A, b)` with :math:`E = \{z : \|A z + b\| \le 1\}` and :math:`A` symmetric."""
        _, sigma, basis = np.linalg.svd(self.whitener)
        a = (basis.T * sigma) @ basis
        return PaperForm(a, -a @ self.center)


class PaperForm(NamedTuple):
    r"""The pair :math:`(A, b)` of the paper."""

    a: Float[Array, "D D"]
    b: Float[Array, "D"]


@dataclass(frozen=True, eq=False)
class MinimumVolumeEllipsoid(Ellipsoid):
    r"""A covering ellipsoid together with the proof that hardly any smaller one covers.

    The dual weights :math:`u` (positive, sum 1) of the ``support`` points certify optimality: with the points lifted to
    :math:`x = (y, 1)` in the :math:`r`-dimensional affine hull and :math:`M = \sum_i u_i x_i x_i^\top`,

    .. math:: \max_i x_i^\top M^{-1} x_i = (r + 1)(1 + \mathtt{gap})

    bounds the log-volume within the hull to ``log_volume_bound``
    :math:`= \tfrac r2 \log(1 + \mathtt{gap}\, \tfrac{r+1}{r})` above the minimum. Where that bound was proven in
    another way (a floor that acts, or the duality gap of a cvxpy solver) ``gap`` is the number that amounts to it.
    """

    support: Int[Array, "S"]
    weights: Float[Array, "S"]
    gap: float
    log_volume_bound: float
    rank: int
    floor: float


# Rows at a time: small enough to stay in the cache.
_ROWS = 2048


def whitened_norms(
    z: Float[Array, "B D"], center: Float[Array, "D"], whitener: Float[Array, "R D"]
) -> Float[Array, "B"]:
    r"""The norms :math:`\|W (z - c)\|`, always in the same arithmetic, for those who stretch ellipsoids to cover."""
    squares = np.empty(len(z))
    for start in range(0, len(z), _ROWS):
        v = (z[start : start + _ROWS] - center) @ whitener.T
        np.einsum("ij,ij->i", v, v, out=squares[start : start + _ROWS])
    return np.sqrt(squares)


def triangular_whitener(factor: Float[Array, "R D"]) -> Float[Array, "D D"]:
    r"""The upper triangular :math:`W` with positive diagonal and :math:`W^\top W = F^\top F`.

    A set determines this whitener uniquely, so equal ellipsoids have equal bytes; Householder QR keeps each column
    to its own relative accuracy, whatever the units of the features.
    """
    r = np.linalg.qr(factor, mode="r")
    signs = np.where(np.diagonal(r) < 0, -1.0, 1.0)
    return np.triu(r * signs[:, None])
