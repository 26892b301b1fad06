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

from sepc_torch.shapes import Array, Bool, Float, Int

# Safeguarded Newton halves its bracket at worst: 60 halvings exhaust float64.
_NEWTON_STEPS = 60
# Ellipsoids that touch have f = 1 up to rounding, and count as meeting.
_ROUNDING = 1e-14


class Separation(NamedTuple):
    r"""Whether two ellipsoids are disjoint, and the evidence.

    ``margin`` is :math:`\max_s f(s) - 1` (positive: disjoint) as far as it had to be computed; ``normal`` is, for
    disjoint ellipsoids, the unit normal of a hyperplane strictly between them, pointing from the first to the second.
    """

    disjoint: bool
    margin: float
    normal: Float[Array, "D"] | None


class ReducedHullPoints(NamedTuple):
    r"""The closest points :math:`c = X^\top u` and :math:`d = Y^\top v` of two reduced hulls, with their weights."""

    c: Float[Array, "D"]
    d: Float[Array, "D"]
    u: Float[Array, "N"]
    v: Float[Array, "M"]


def separation(
    center: Float[Array, "D"],
    whitener: Float[Array, "D D"],
    other_center: Float[Array, "D"],
    other_whitener: Float[Array, "D D"],
) -> Separation:
    r"""Decide whether two closed ellipsoids are disjoint.

    With shape matrices :math:`Q = (W^\top W)^{-1}` and :math:`v = c_2 - c_1` they are disjoint exactly when

    .. math:: \max_{0 < s < 1} f(s) > 1, \quad f(s) = v^\top \Big(\frac{Q_1}{1-s} + \frac{Q_2}{s}\Big)^{-1} v.

    In the coordinates that turn the first ellipsoid into the unit ball and the second into an axis-parallel one with
    semi-axes :math:`1/\sigma_i`, :math:`f(s) = \sum_i q_i^2 \, s (1-s) \sigma_i^2 / (s \sigma_i^2 + 1 - s)`, a concave
    function of one variable. Newton's method stops at the first :math:`s` that settles the question: where
    :math:`f(s) > 1`, or where the tangent shows that :math:`f` cannot reach 1.

    >>> import numpy as np
    >>> ball = np.eye(2)
    >>> separation(np.zeros(2), ball, np.array([2.5, 0.0]), ball).disjoint
    True
    >>> separation(np.zeros(2), ball, np.array([1.5, 0.0]), ball).disjoint
    False
    """
    # Singular values instead of a generalised eigenproblem: semi-axes are not squared, so thin ellipsoids survive.
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
    :math:`x_i = y_i e_i^2 / (e_i^2 + t)` with the root :math:`t \ge 0` of the secular equation
    :math:`\sum_i (e_i y_i / (e_i^2 + t))^2 = 1`. Newton's method on :math:`1 - 1/\|\cdot\|`, which is nearly linear
    in :math:`t`, converges from the left without a line search, for the whole batch at once.

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
    t = np.maximum((e * y - e * e).max(axis=1), 0.0)  # here one term alone is at least 1: left of the root
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
