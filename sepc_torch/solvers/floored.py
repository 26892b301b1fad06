r"""Native solver of program (2) with an active floor (least semi-axis): interior-point method on the dual.

The floor :math:`\tau` is active if the minimum-volume ellipsoid without a floor has a semi-axis below :math:`\tau`. In
units of :math:`\tau` the program is program (2) with :math:`P = A^2 \preceq I`. Let :math:`\lambda \ge 0` be the
multipliers of the points, :math:`\omega = \sum_i \lambda_i`, :math:`c = \sum_i \lambda_i z_i / \omega`, and
:math:`S = \sum_i \lambda_i (z_i - c)(z_i - c)^\top` the scatter matrix with eigenvalues :math:`s_a`. The optimal form
is :math:`P = \min(1, 1/S)` in the eigenvectors of :math:`S`, and the dual is the differentiable concave problem

.. math:: \max_{\lambda \ge 0}\ \tfrac12 \sum_a \psi(s_a) - \tfrac12 \omega, \qquad
          \psi(s) = 1 + \log s\ (s \ge 1), \quad s\ (s < 1).

The gradient of the dual is :math:`\tfrac12 (h_i - 1)` with :math:`h_i = (z_i - c)^\top P (z_i - c)`. The ellipsoid
:math:`P / \max_i h_i` covers all points, and its log-volume exceeds the minimum by at most
:math:`\tfrac D2 \log \max_i h_i + \tfrac12 \sum_i \lambda_i (1 - h_i)`. The method uses a working set of the points.
"""

from __future__ import annotations

import numpy as np

from sepc_torch.ellipsoid import MinimumVolumeEllipsoid, triangular_whitener
from sepc_torch.shapes import Array, Bool, Float, Int
from sepc_torch.solvers.affine_hull import stretched
from sepc_torch.solvers.interior_point import Objective, interior_point
from sepc_torch.solvers.newton import Solve, factored_system

# Limit on the rounds, each with its own working set; a safeguard.
_MAX_ROUNDS = 40
# Steps of the search for a covering ball. They find the radius to about a thousandth; the interior-point method decides
# closer cases.
_BALL_STEPS = 1000


class FlooredLogDeterminant(Objective):
    r"""The objective :math:`\sum_a \psi(s_a)` as a function of the multipliers :math:`\lambda`; its target is 1."""

    target = 1.0
    kinked = True  # where an eigenvalue of the scatter matrix crosses 1

    def __init__(self, z: Float[Array, "M D"]) -> None:
        self.z = z

    def move(self, u: Float[Array, "M"]) -> None:
        """Compute the centre, the eigendecomposition of the scatter matrix, and the gradient h."""
        self.mass = float(u.sum())
        self.center = u @ self.z / self.mass
        offsets = self.z - self.center
        scatter = (offsets * u[:, None]).T @ offsets
        if not np.isfinite(scatter).all():
            raise np.linalg.LinAlgError("the scatter matrix overflows")
        self.s, self.basis = np.linalg.eigh(scatter)
        self.y = offsets @ self.basis
        self.p = 1.0 / np.maximum(self.s, 1.0)
        self.g = (self.y * self.y) @ self.p

    def gap(self, u: Float[Array, "M"]) -> float:
        """The relative gap that corresponds to :meth:`excess`; see :func:`relative_gap`."""
        return relative_gap(self.excess(u), self.z.shape[1])

    def excess(self, u: Float[Array, "M"]) -> float:
        """Upper bound on the log-volume of the covering ellipsoid above the minimum."""
        stretch = max(float(self.g.max()), 1.0)
        return 0.5 * self.z.shape[1] * float(np.log(stretch)) + 0.5 * max(float(u @ (1.0 - self.g)), 0.0)

    def inessential(self, u: Float[Array, "M"], gap: float) -> Bool[Array, "M"] | None:
        """None: the elimination bound of the D-optimal design does not hold with a floor."""
        return None

    def keep(self, keep: Bool[Array, "M"]) -> None:
        """Remove all other points."""
        self.z = self.z[keep]

    def newton(self, d: Float[Array, "M"], accuracy: float) -> Solve:
        r"""Solver for the Newton system, from the divided differences of :math:`p(s) = \min(1, 1/s)`.

        With :math:`\Gamma_{ab} = -(p(s_a) - p(s_b)) / (s_a - s_b)` the negative Hessian is
        :math:`H_{ij} = 2 y_i^\top P y_j / \omega + \sum_{ab} \Gamma_{ab}\, y_{ia} y_{ib} y_{ja} y_{jb}`.
        """
        i, j = np.triu_indices(len(self.s))
        a, b = np.maximum(self.s[i], self.s[j]), np.minimum(self.s[i], self.s[j])
        mixed = (a > 1.0) & (b < 1.0)
        gamma = np.where(b >= 1.0, 1.0 / np.maximum(a * b, 1.0), 0.0)
        gamma[mixed] = (1.0 - 1.0 / a[mixed]) / (a - b)[mixed]
        used = gamma > 0
        i, j, gamma = i[used], j[used], gamma[used]
        pairs = self.y[:, i] * self.y[:, j] * np.sqrt(gamma * np.where(i == j, 1.0, 2.0))
        return factored_system(np.concatenate([self.y * np.sqrt(2.0 * self.p / self.mass), pairs], axis=1), d)


def relative_gap(excess: float, rank: int) -> float:
    r"""The gap for which :math:`\tfrac r2 \log(1 + \mathtt{gap}\,\tfrac{r+1}{r})` equals the excess of log-volume."""
    return float(np.expm1(min(2.0 * excess / rank, 100.0))) * rank / (rank + 1)


def _covering_ball(z: Float[Array, "N D"]) -> Float[Array, "N"] | None:
    """Weights whose mean is the centre of a unit ball that covers all points; None if the search finds no such ball.

    If a unit ball covers the points, no ellipsoid with semi-axes of at least 1 is smaller. All multipliers then vanish
    at the optimum, where the centre c is undefined, so the interior-point method cannot find it. Each step of the
    search moves towards the farthest point. After k steps the radius is within about 1 / k of the smallest (Badoiu and
    Clarkson).
    """
    weights = np.full(len(z), 1.0 / len(z))
    center = weights @ z
    for step in range(_BALL_STEPS):
        squares = np.einsum("ij,ij->i", z - center, z - center)
        farthest = int(squares.argmax())
        if squares[farthest] <= 1.0:
            return weights
        if squares[farthest] > 4.0:
            return None  # the centre lies in the smallest ball, whose radius is thus above 1
        share = 1.0 / (step + 2)
        weights *= 1.0 - share
        weights[farthest] += share
        center += share * (z[farthest] - center)
    return None


def floored_minimum_volume(
    points: Float[Array, "N D"],
    tol: float,
    floor: float,
    support: Int[Array, "S"],
    weights: Float[Array, "S"],
    rank: int,
) -> MinimumVolumeEllipsoid:
    """Solve program (2) with an active floor, starting from the support and weights of the optimum without a floor."""
    dim = points.shape[1]
    origin = weights @ points[support]
    z = (points - origin) / floor
    ball = _covering_ball(z)
    if ball is not None:
        kept = np.flatnonzero(ball)
        center = origin + floor * (ball @ z)
        whitener = stretched(np.eye(dim) / floor, points - center)
        return MinimumVolumeEllipsoid(center, whitener, kept, ball[kept], 0.0, 0.0, rank, floor)
    # The first working set: the support without a floor, and the extreme points along the axes of its ellipsoid.
    u = np.zeros(len(z))
    u[support] = dim * weights
    objective = FlooredLogDeterminant(z[support])
    objective.move(u[support])
    along = (z - objective.center) @ objective.basis
    working = np.unique(np.concatenate([support, along.argmax(axis=0), along.argmin(axis=0)]))
    best: tuple[float, FlooredLogDeterminant, Array, Array] | None = None
    slack, stalled = 0.1, 0
    for _ in range(_MAX_ROUNDS):
        start = (1.0 - slack) * u[working] + slack * u.sum() / len(working)
        inner = 0.5 * tol
        solution = interior_point(FlooredLogDeterminant(z[working]), start, inner, slack)
        kept = solution > 1e-9 * solution.max()
        working_support = working[kept]
        objective = FlooredLogDeterminant(z[working_support])
        objective.move(solution[kept])
        h = ((z - objective.center) @ objective.basis) ** 2 @ objective.p
        excess = 0.5 * dim * float(np.log(max(h.max(), 1.0)))
        excess += 0.5 * max(float(solution[kept] @ (1.0 - h[working_support])), 0.0)
        stalled = 0 if best is None or excess < 0.9 * best[0] else stalled + 1
        if best is None or excess < best[0]:
            best = (excess, objective, working_support, solution[kept])
        if relative_gap(excess, dim) <= tol or stalled >= 4:
            break
        u = np.zeros(len(z))
        u[working_support] = solution[kept]
        violators = np.flatnonzero(h > 1.0)
        worst = violators[np.argsort(-h[violators], kind="stable")[: 2 * dim + len(working_support)]]
        slack = float(np.clip(h.max() - 1.0, 1e-9, 0.3))
        working = np.union1d(working_support, worst)
    assert best is not None
    excess, objective, support, multipliers = best
    center = origin + floor * objective.center
    whitener = stretched(triangular_whitener((objective.basis * np.sqrt(objective.p)).T / floor), points - center)
    weights = multipliers / multipliers.sum()
    return MinimumVolumeEllipsoid(center, whitener, support, weights, relative_gap(excess, dim), excess, rank, floor)
