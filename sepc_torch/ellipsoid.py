r"""The :class:`Ellipsoid` value :math:`E = \{z : \|W (z - c)\| \le 1\}` and its geometry.

The rest of the package describes an ellipsoid by its centre :math:`c` and its whitener :math:`W`. The distance
:math:`d(z) = \|W (z - c)\|` is not squared, and 1 is the surface. The paper writes the set as
:math:`\{z : \|A z + b\| \le 1\}` with :math:`A = (W^\top W)^{1/2}` and :math:`b = -A c`. The form :math:`W (z - c)` is
more accurate when the data lie away from the origin.

The functions at the end decide whether two ellipsoids are disjoint (:func:`separation`) and compute the Euclidean
distance from a point to an ellipsoid (:func:`euclidean_distance`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from sepc_torch.shapes import Array, Bool, Float, Int

# A point counts as inside an ellipsoid up to this distance beyond the surface. Support points lie on the surface, and
# rounding puts them on either side of it. The tolerance is a hundred times float32's rounding error of a distance near
# 1, so float64 and float32 agree on the training points. It is far below the resolution of any data.
SURFACE_TOLERANCE = 1e-4
# The least semi-axis of an ellipsoid of a partition, in standard deviations of each feature. It is well above float32's
# rounding error of standardised data, so flat ellipsoids contain their points in float32 too. It is below the
# resolution of any data.
DEFAULT_FLOOR = 1e-3
# `whitened_norms` computes this many rows at a time: the block fits in the cache.
BLOCK_ROWS = 2048
# Safeguarded Newton at worst halves its bracket; 60 halvings exhaust float64.
_NEWTON_STEPS = 60
# Touching ellipsoids have f = 1 up to this rounding error. They count as intersecting.
_ROUNDING = 1e-14


class Kind(StrEnum):
    """The step of the partition algorithm that produced an ellipsoid.

    ``first`` and ``further``: a pure ellipsoid of the first or of a later iteration. ``terminal``: an ellipsoid around
    points that cannot be separated further. ``isolated``: a ball around points at a single location.
    """

    FIRST = "first"
    FURTHER = "further"
    TERMINAL = "terminal"
    ISOLATED = "isolated"


@dataclass(frozen=True, eq=False)
class Ellipsoid:
    r"""The ellipsoid :math:`\{z : \|W (z - c)\| \le 1\}` with centre :math:`c` and whitener :math:`W`.

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
        """The ball with the given centre and radius."""
        center = np.asarray(center, dtype=np.float64)
        return Ellipsoid(center, np.eye(len(center)) / radius)

    @property
    def dim(self) -> int:
        """Number of features D."""
        return len(self.center)

    @property
    def log_volume(self) -> float:
        r"""Logarithm of the volume relative to the unit ball, :math:`-\log|\det W|`."""
        return -float(np.linalg.slogdet(self.whitener)[1])

    @property
    def semi_axes(self) -> Float[Array, "D"]:
        """Lengths of the semi-axes, longest first."""
        return 1.0 / np.linalg.svd(self.whitener, compute_uv=False)[::-1]

    def distance(self, z: ArrayLike) -> Float[Array, "B"]:
        r"""Mahalanobis distance :math:`d(z) = \|W (z - c)\|` of points (B, D) or one point (D,); 1 is the surface."""
        return whitened_norms(self._batch(z), self.center, self.whitener)

    def contains(self, z: ArrayLike) -> Bool[Array, "B"]:
        """Whether each point lies inside or on the surface, up to :data:`SURFACE_TOLERANCE`."""
        return self.distance(z) <= 1.0 + SURFACE_TOLERANCE

    def euclidean_distance(self, z: ArrayLike) -> Float[Array, "B"]:
        """Euclidean distance from each point to the ellipsoid, zero inside."""
        return euclidean_distance(self.center, self.whitener, self._batch(z))

    def intersects(self, other: Ellipsoid) -> bool:
        """Whether the two closed ellipsoids have a point in common."""
        return not separation(self.center, self.whitener, other.center, other.whitener).disjoint

    def affine_image(self, matrix: Float[Array, "D D"], offset: Float[Array, "D"]) -> Ellipsoid:
        r"""The image of the ellipsoid under :math:`z \mapsto M z + t`, where :math:`M` is invertible."""
        whitener = np.linalg.solve(matrix.T, self.whitener.T).T
        return Ellipsoid(matrix @ self.center + offset, triangular_whitener(whitener))

    def as_paper(self) -> PaperForm:
        r"""The paper's :math:`(A, b)` with :math:`E = \{z : \|A z + b\| \le 1\}` and :math:`A` symmetric."""
        _, sigma, basis = np.linalg.svd(self.whitener)
        a = (basis.T * sigma) @ basis
        return PaperForm(a, -a @ self.center)

    def _batch(self, z: ArrayLike) -> Float[Array, "B D"]:
        points = np.atleast_2d(np.asarray(z, dtype=np.float64))
        if points.ndim != 2 or points.shape[1] != self.dim:
            raise ValueError(f"z must have shape (points, {self.dim}) or ({self.dim},), got {np.shape(z)}.")
        return points


class PaperForm(NamedTuple):
    r"""The pair :math:`(A, b)` of the paper's form :math:`\{z : \|A z + b\| \le 1\}`."""

    a: Float[Array, "D D"]
    b: Float[Array, "D"]


@dataclass(frozen=True, eq=False)
class MinimumVolumeEllipsoid(Ellipsoid):
    r"""A covering ellipsoid of nearly minimum volume, with its optimality certificate.

    The certificate consists of the dual weights :math:`u` (positive, sum 1) of the ``support`` points. Let
    :math:`x = (y, 1)` be the points lifted within their affine hull of dimension :math:`r` (``rank``), and
    :math:`M = \sum_i u_i x_i x_i^\top`. Then

    .. math:: \max_i x_i^\top M^{-1} x_i = (r + 1)(1 + \mathtt{gap}),

    and the log-volume within the hull exceeds the minimum by at most ``log_volume_bound``
    :math:`= \tfrac r2 \log(1 + \mathtt{gap}\, \tfrac{r+1}{r})`. If the bound has another proof (an active floor, or
    the duality gap of a cvxpy solver), ``gap`` is the value that gives the same bound in this formula.

    ``floor`` is the least semi-axis that was imposed on the ellipsoid: 0 if the points have full rank and no floor is
    active.
    """

    support: Int[Array, "S"]
    weights: Float[Array, "S"]
    gap: float
    log_volume_bound: float
    rank: int
    floor: float


def whitened_norms(
    z: Float[Array, "B D"], center: Float[Array, "D"], whitener: Float[Array, "R D"]
) -> Float[Array, "B"]:
    r"""The norms :math:`\|W (z - c)\|`.

    :meth:`Ellipsoid.distance` and the solvers call this one function. A solver that stretches an ellipsoid until it
    covers a point therefore uses the arithmetic that later decides whether the ellipsoid contains the point.
    """
    squares = np.empty(len(z))
    for start in range(0, len(z), BLOCK_ROWS):
        v = (z[start : start + BLOCK_ROWS] - center) @ whitener.T
        np.einsum("ij,ij->i", v, v, out=squares[start : start + BLOCK_ROWS])
    return np.sqrt(squares)


def column_norms(
    columns: Float[Array, "D B"], center: Float[Array, "D"], whitener: Float[Array, "D D"]
) -> Float[Array, "B"]:
    r"""The norms :math:`\|W (z - c)\|` of the points in the columns: :func:`whitened_norms` up to rounding, but faster.

    Operations along a row of many points are several times faster than along the few features of one point. A ball in
    standardised features has a diagonal whitener and needs no matrix product.

    >>> import numpy as np
    >>> column_norms(np.array([[3.0, 0.0], [4.0, 1.0]]), np.zeros(2), np.diag([1.0, 2.0]))
    array([8.54400375, 2.        ])
    """
    diagonal = np.diagonal(whitener)
    is_diagonal = np.count_nonzero(whitener) == np.count_nonzero(diagonal)
    squares = np.empty(columns.shape[1])
    for start in range(0, len(squares), BLOCK_ROWS):
        v = columns[:, start : start + BLOCK_ROWS] - center[:, None]
        v = np.multiply(v, diagonal[:, None], out=v) if is_diagonal else whitener @ v
        v *= v
        v.sum(axis=0, out=squares[start : start + BLOCK_ROWS])
    return np.sqrt(squares, out=squares)


def triangular_whitener(factor: Float[Array, "R D"]) -> Float[Array, "D D"]:
    r"""The upper triangular :math:`W` with positive diagonal and :math:`W^\top W = F^\top F`.

    The set determines this whitener uniquely, so equal ellipsoids have equal bytes. Householder QR keeps the relative
    accuracy of each column, whatever the units of the features.
    """
    r = np.linalg.qr(factor, mode="r")
    signs = np.where(np.diagonal(r) < 0, -1.0, 1.0)
    return np.triu(r * signs[:, None])


class Separation(NamedTuple):
    r"""The result of :func:`separation`: whether two ellipsoids are disjoint, and the evidence.

    ``margin`` is the last value of :math:`f(s) - 1`, a lower bound on its maximum over :math:`s`. It is positive if the
    ellipsoids are disjoint. ``normal`` is the unit normal of a hyperplane strictly between disjoint ellipsoids. It
    points from the first ellipsoid to the second, and is None if the ellipsoids intersect.
    """

    disjoint: bool
    margin: float
    normal: Float[Array, "D"] | None


def separation(
    center: Float[Array, "D"],
    whitener: Float[Array, "D D"],
    other_center: Float[Array, "D"],
    other_whitener: Float[Array, "D D"],
) -> Separation:
    r"""Decide whether two closed ellipsoids are disjoint.

    Let :math:`Q = (W^\top W)^{-1}` be the shape matrices and :math:`v = c_2 - c_1`. The ellipsoids are disjoint exactly
    when

    .. math:: \max_{0 < s < 1} f(s) > 1, \quad f(s) = v^\top \Big(\frac{Q_1}{1-s} + \frac{Q_2}{s}\Big)^{-1} v.

    A change of coordinates turns the first ellipsoid into the unit ball and the second into an axis-parallel ellipsoid
    with semi-axes :math:`1/\sigma_i`. There
    :math:`f(s) = \sum_i q_i^2 \, s (1-s) \sigma_i^2 / (s \sigma_i^2 + 1 - s)` is a concave function of one variable.
    Newton's method stops at the first :math:`s` with :math:`f(s) > 1`, or as soon as a tangent proves that :math:`f`
    does not exceed 1.

    >>> import numpy as np
    >>> ball = np.eye(2)
    >>> separation(np.zeros(2), ball, np.array([2.5, 0.0]), ball).disjoint
    True
    >>> separation(np.zeros(2), ball, np.array([1.5, 0.0]), ball).disjoint
    False
    """
    # Singular values instead of a generalised eigenproblem: semi-axes are not squared, so thin ellipsoids keep their
    # accuracy.
    _, sigma, basis = np.linalg.svd(np.linalg.solve(whitener.T, other_whitener.T).T)
    q = basis @ (whitener @ (other_center - center))
    q2, s2 = q * q, sigma * sigma
    low, high, s = 0.0, 1.0, 0.5
    margin = -1.0
    for _ in range(_NEWTON_STEPS):
        denominator = s * s2 + (1 - s)
        value = float(np.sum(q2 * s2 / denominator)) * s * (1 - s)
        # d/ds of s(1-s) sigma^2 / (s sigma^2 + 1 - s) = sigma^2 ((1-s)^2 - s^2 sigma^2) / (...)^2
        slope = float(np.sum(q2 * s2 * ((1 - s) ** 2 - s * s * s2) / denominator**2))
        margin = value - 1.0
        if margin > _ROUNDING:
            normal = whitener.T @ (basis.T @ (q * s2 / denominator))
            return Separation(True, margin, normal / np.linalg.norm(normal))
        low, high = (s, high) if slope > 0 else (low, s)
        if value + slope * ((high if slope > 0 else low) - s) <= 1.0 + _ROUNDING:
            break
        curvature = -2.0 * float(np.sum(q2 * s2 * s2 / denominator**3))
        newton = s - slope / curvature if curvature < 0 else low
        s = newton if low < newton < high else 0.5 * (low + high)
    return Separation(False, margin, None)


def euclidean_distance(
    center: Float[Array, "D"], whitener: Float[Array, "D D"], z: Float[Array, "B D"]
) -> Float[Array, "B"]:
    r"""Euclidean distance from each point to the ellipsoid, zero inside.

    In the axes of the ellipsoid (semi-axes :math:`e`, coordinates :math:`y`) the nearest point is
    :math:`x_i = y_i e_i^2 / (e_i^2 + t)`, where :math:`t \ge 0` is the root of the secular equation
    :math:`\sum_i (e_i y_i / (e_i^2 + t))^2 = 1`. Newton's method solves the equation in the form
    :math:`1 - 1/\|\cdot\| = 0`, which is nearly linear in :math:`t`. It converges from the left without a line search,
    for the whole batch at once.

    >>> import numpy as np
    >>> euclidean_distance(np.zeros(2), np.diag([0.5, 1.0]), np.array([[5.0, 0.0], [0.0, 3.0], [1.0, 0.0]]))
    array([3., 2., 0.])
    """
    _, inverse_axes, basis = np.linalg.svd(whitener)
    e = 1.0 / inverse_axes
    y = (z - center) @ basis.T
    outside = np.sum((y / e) ** 2, axis=1) > 1.0
    distance = np.zeros(len(z))
    if not outside.any():
        return distance
    y = np.abs(y[outside])
    t = np.maximum((e * y - e * e).max(axis=1), 0.0)  # one term alone is at least 1: left of the root
    for _ in range(_NEWTON_STEPS):
        denominator = e * e + t[:, None]
        terms = (e * y / denominator) ** 2
        norm = np.sqrt(terms.sum(axis=1))
        # psi(t) = 1 - 1/norm, psi'(t) = (d norm / dt) / norm^2 = -sum(terms / denominator) / norm^3
        step = (norm - 1.0) * norm**2 / np.sum(terms / denominator, axis=1)
        t_next = t + np.maximum(step, 0.0)
        if np.all(t_next <= t * (1 + 4 * np.finfo(float).eps)):
            break
        t = t_next
    distance[outside] = np.linalg.norm(t[:, None] * y / (e * e + t[:, None]), axis=1)
    return distance
