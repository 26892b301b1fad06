r"""Two questions about ellipsoids that need no iteration over points: do two of them meet, how far is a point?

An ellipsoid is given by its centre :math:`c` and whitener :math:`W`, :math:`\{z : \|W (z - c)\| \le 1\}`. Both
answers reduce to one scalar equation in the right coordinates. The same questions as cvxpy programs are in
:mod:`sepc_torch.programs`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sepc_torch.shapes import Array, Float

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
