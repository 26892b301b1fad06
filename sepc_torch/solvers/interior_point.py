r"""Mehrotra's predictor-corrector for concave functions of the weights of points.

Maximise :math:`F(u) - t \sum_i u_i` over :math:`u \ge 0`. With the gradient :math:`g = \nabla F` the optimum is
where :math:`g_i + s_i = t`, :math:`u_i s_i = 0`, :math:`u, s \ge 0`; the method follows :math:`u_i s_i = \mu` to
:math:`\mu = 0`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from sepc_torch.shapes import Array, Bool, Float
from sepc_torch.solvers.newton import Solve

_MAX_STEPS = 60
# How far, relative to the target, a step across a kink may leave the slacks from what they should be.
_TRUST = 0.3


class Objective(ABC):
    """A concave function of the weights, evaluated at one place at a time."""

    target: float
    g: Float[Array, "M"]
    # Whether the gradient has kinks, beyond which a Newton step may end anywhere and has to be shortened.
    kinked = False

    @abstractmethod
    def move(self, u: Float[Array, "M"]) -> None:
        """Evaluate the gradient ``g`` at u; raise LinAlgError where the function is not defined."""

    @abstractmethod
    def gap(self, u: Float[Array, "M"]) -> float:
        """The certificate at the current place u."""

    @abstractmethod
    def inessential(self, u: Float[Array, "M"], gap: float) -> Bool[Array, "M"] | None:
        """Points that are proven to carry no weight at the optimum, if that is worth acting on."""

    @abstractmethod
    def keep(self, keep: Bool[Array, "M"]) -> None:
        """Forget all other points."""

    @abstractmethod
    def newton(self, d: Float[Array, "M"], accuracy: float) -> Solve:
        """Solver for (H + diag(d)) x = r, where H is the negative Hessian here."""


def interior_point(objective: Objective, u: Float[Array, "M"], tolerance: float, slack: float) -> Float[Array, "M"]:
    """Weights of the best gap seen, from an interior ``u`` and slacks of at least ``slack`` times the target.

    Points proven inessential on the way get weight zero.
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
            break  # at the end of the path weights and slacks span all of float64's range
        du = solve(g - target, None)
        ds = -s - d * du
        predicted = float((u + _step(u, du, 1.0) * du) @ (s + _step(s, ds, 1.0) * ds)) / len(u)
        correction = min(1.0, predicted / mu) ** 3 * mu - du * ds
        du = solve(g - target + correction / u, du)
        ds = (correction - s * du) / u - s
        # Close to the solution the full step is safe and makes convergence superlinear.
        fraction = 0.95 if gap > 1e-2 else min(0.9999, max(0.95, 1.0 - mu * len(u) / target))
        primal, dual = _step(u, du, fraction), _step(s, ds, fraction)
        # At the end of the path the slacks may only get better, or steps go to and fro between the sides of a kink.
        off = max(float(np.abs(target - g - s).max()), min(_TRUST * target, mu * len(u)))
        for _ in range(40):
            try:
                objective.move(u + primal * du)
                after = float(np.abs(target - objective.g - (s + dual * ds)).max())
                if not objective.kinked or after <= off:
                    break
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
    """The longest step of at most 1 that goes at most the given fraction of the way to the boundary."""
    steepest = float((dx / x).min())
    return min(1.0, -fraction / steepest) if steepest < 0 else 1.0
