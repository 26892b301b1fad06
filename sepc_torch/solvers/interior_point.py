r"""Mehrotra's predictor-corrector interior-point method for the dual of program (2), with and without a floor.

It maximises :math:`F(u) - t \sum_i u_i` over the weights :math:`u \ge 0`, where :math:`F` is concave with gradient
:math:`g` and :math:`t` is the target of the :class:`Objective`. At the optimum :math:`g_i + s_i = t`,
:math:`u_i s_i = 0` and :math:`u, s \ge 0`. The method follows the central path :math:`u_i s_i = \mu` to
:math:`\mu = 0`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from sepc_torch.shapes import Array, Bool, Float
from sepc_torch.solvers.newton import Solve

# Limit on the predictor-corrector steps; a safeguard.
_MAX_STEPS = 60
# Largest dual residual, relative to the target, that a step across a kink of the gradient may leave.
_KINK_RESIDUAL = 0.3


class Objective(ABC):
    """Concave function of the weights, evaluated at one point u at a time."""

    target: float
    g: Float[Array, "M"]
    # Whether the gradient has kinks. A Newton step across a kink is unreliable, so the method shortens it.
    kinked = False

    @abstractmethod
    def move(self, u: Float[Array, "M"]) -> None:
        """Evaluate the gradient ``g`` at u; raise LinAlgError if the function is not defined there."""

    @abstractmethod
    def gap(self, u: Float[Array, "M"]) -> float:
        """The certified gap at the current point u."""

    @abstractmethod
    def inessential(self, u: Float[Array, "M"], gap: float) -> Bool[Array, "M"] | None:
        """Mask of points proven to have weight 0 at the optimum; None if eliminating them does not pay."""

    @abstractmethod
    def keep(self, keep: Bool[Array, "M"]) -> None:
        """Remove all other points."""

    @abstractmethod
    def newton(self, d: Float[Array, "M"], accuracy: float) -> Solve:
        """Solver for (H + diag(d)) x = r, where H is the negative Hessian at the current point."""


def interior_point(objective: Objective, u: Float[Array, "M"], tolerance: float, slack: float) -> Float[Array, "M"]:
    """Maximise the objective from the interior point ``u``; return the weights with the smallest gap.

    The initial slacks are at least ``slack`` times the target. The method stops at a gap of ``tolerance``, or when the
    gap no longer decreases. Points that are eliminated on the way get weight zero.
    """
    total, target = len(u), objective.target
    alive = np.arange(total)
    objective.move(u)
    s = np.maximum(target - objective.g, slack * target)
    best_gap, best = np.inf, (alive, u)
    worse = 0
    for _ in range(_MAX_STEPS):
        gap = objective.gap(u)
        if gap < best_gap:
            best_gap, best, worse = gap, (alive, u), 0
        else:
            worse += 1
        if gap <= tolerance or worse > (2 if best_gap < 1e-6 else 10):
            break
        drop = objective.inessential(u, gap)
        if drop is not None:
            keep = ~drop
            alive, u, s = alive[keep], u[keep], s[keep]
            objective.keep(keep)
            objective.move(u)
        g = objective.g
        mu = float(u @ s) / len(u)
        d = s / u
        accuracy = 1e-3 if gap > 1e-6 else min(1e-3, max(1e-8, 0.1 * mu * len(u) / target))
        try:
            solve = objective.newton(d, accuracy)
        except np.linalg.LinAlgError:
            break  # near the end of the path, weights and slacks span the whole range of float64
        du = solve(g - target, None)
        ds = -s - d * du
        predicted = float((u + _step(u, du, 1.0) * du) @ (s + _step(s, ds, 1.0) * ds)) / len(u)
        correction = min(1.0, predicted / mu) ** 3 * mu - du * ds
        du = solve(g - target + correction / u, du)
        ds = (correction - s * du) / u - s
        # Close to the solution a nearly full step is safe and makes convergence superlinear.
        fraction = 0.95 if gap > 1e-2 else min(0.9999, max(0.95, 1.0 - mu * len(u) / target))
        primal, dual = _step(u, du, fraction), _step(s, ds, fraction)
        # Near the end of the path the dual residual must not grow, or the steps alternate between two sides of a kink.
        allowed = max(float(np.abs(target - g - s).max()), min(_KINK_RESIDUAL * target, mu * len(u)))
        for _ in range(40):
            try:
                objective.move(u + primal * du)
                residual = float(np.abs(target - objective.g - (s + dual * ds)).max())
                if not objective.kinked or residual <= allowed:
                    break
                # Only a common step length decreases the residual: it leaves (1 - primal) r + (primal - dual) ds.
                primal = dual = min(primal, dual)
                dual *= 0.5
            except np.linalg.LinAlgError:
                pass
            primal *= 0.5
        else:
            break
        u = u + primal * du
        s = s + dual * ds
    weights = np.zeros(total)
    weights[best[0]] = best[1]
    return weights


def _step(x: Float[Array, "M"], dx: Float[Array, "M"], fraction: float) -> float:
    """Step length along dx: the given fraction of the way to the boundary x = 0, at most 1."""
    steepest = float((dx / x).min())
    return min(1.0, -fraction / steepest) if steepest < 0 else 1.0
