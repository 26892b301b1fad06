"""Program (4) in cvxpy: the closest points of two reduced convex hulls, a quadratic program."""

from __future__ import annotations

from collections.abc import Sequence

import cvxpy as cp
import numpy as np

from sepc_torch.shapes import Array, Float
from sepc_torch.solvers.programs.solve import check_installed, failure, size_of, solve
from sepc_torch.solvers.reduced_hull import ReducedHullPoints

_TINY = float(np.finfo(np.float64).tiny)


def reduced_hull_points(
    x: Float[Array, "N D"], y: Float[Array, "M D"], *, cap: float | None = None, solver: str = "CLARABEL"
) -> ReducedHullPoints:
    r"""Closest points of two reduced convex hulls, program (4) of the paper.

    .. math:: \min_{u, v}\ \tfrac12 \|X^\top u - Y^\top v\|^2 \quad \text{s.t.}\quad
              e^\top u = e^\top v = 1,\ \ 0 \le u, v \le D e

    The difference :math:`w = c - d` is unique; :math:`c` and :math:`d` need not be. The gap between :math:`\|w\|^2` and
    the least :math:`w^\top (c' - d')` over the two hulls bounds the squared error of :math:`w`. A gap above 1e-8 of the
    squared extent of the data raises :class:`ProgramError`.

    Args:
        x: Points of the first set, (N, D).
        y: Points of the second set, (M, D).
        cap: The bound :math:`D` on the weights, at least ``1 / min(N, M)``. The default is this least value.
        solver: An installed cvxpy solver for quadratic programs (CLARABEL, OSQP, SCS, MOSEK, ...).

    >>> import numpy as np
    >>> r = reduced_hull_points(np.array([[0.0, 0.0], [0.0, 2.0]]), np.array([[3.0, 1.0], [5.0, 1.0], [7.0, 1.0]]))
    >>> r.c.round(6), r.d.round(6)
    (array([0., 1.]), array([4., 1.]))
    """
    solver = check_installed(solver)
    name, size = "closest points of reduced hulls (4)", f"{len(x)} + {size_of(y)}"
    least = 1.0 / min(len(x), len(y))
    cap = least if cap is None else min(float(cap), 1.0)
    if not cap >= least * (1.0 - 1e-12):
        raise ValueError(
            f"cap={cap} is below 1/min(N, M) = {least}: {min(len(x), len(y))} weights up to this cap cannot sum to 1. "
            "Increase cap."
        )
    cap = max(cap, least)
    # A common shift and scaling of both sets changes neither the optimal weights nor the optimality conditions.
    origin = 0.5 * (x.mean(axis=0) + y.mean(axis=0))
    extent = max(float(np.abs(x - origin).max()), float(np.abs(y - origin).max()), _TINY)
    x, y = (x - origin) / extent, (y - origin) / extent

    u, v, difference, constraints = weights_and_difference(x, y, [cap, cap])
    problem = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(difference)), constraints)
    # The squared norm is flat at its minimum: an error of 1e-8 there is an error of 1e-4 in w.
    solve(problem, name, size, solver, accuracy=1e-12)

    u, v = _feasible(u.value, cap), _feasible(v.value, cap)
    c, d = u @ x, v @ y
    w = c - d
    gap = float(w @ w) - least_mean(x @ w, cap) - least_mean(-(y @ w), cap)
    if gap > 1e-8:
        raise failure(name, size, solver, f"optimal, but the optimality conditions fail by {gap:.1e}")
    return ReducedHullPoints(origin + extent * c, origin + extent * d, u, v)


def weights_and_difference(
    x: Float[Array, "N D"] | cp.Parameter, y: Float[Array, "M D"] | cp.Parameter, caps: Sequence[float | None]
) -> tuple[cp.Variable, cp.Variable, cp.Expression, list[cp.Constraint]]:
    r"""The weights :math:`u, v` of program (4), the difference :math:`X^\top u - Y^\top v` and the constraints.

    :class:`~sepc_torch.RCHLayer` states the program with it too, with the points as parameters.

    Args:
        x: Points of the first set, (N, D), as an array or a parameter.
        y: Points of the second set, (M, D), as an array or a parameter.
        caps: The bound on the weights of each set; None for no bound.
    """
    u, v = cp.Variable(x.shape[0]), cp.Variable(y.shape[0])
    constraints = [cp.sum(u) == 1, cp.sum(v) == 1, u >= 0, v >= 0]
    constraints += [weights <= cap for weights, cap in zip((u, v), caps, strict=True) if cap is not None]
    return u, v, x.T @ u - y.T @ v, constraints


def _feasible(weights: Float[Array, "N"], cap: float) -> Float[Array, "N"]:
    """The nearest weights between 0 and the cap that sum to 1: shifted by a common amount (bisection) and clipped."""
    low, high = -float(weights.max()), cap - float(weights.min())
    while low < (middle := 0.5 * (low + high)) < high:
        low, high = (middle, high) if np.clip(weights + middle, 0.0, cap).sum() < 1.0 else (low, middle)
    return np.clip(weights + high, 0.0, cap)


def least_mean(values: Float[Array, "N"], cap: float) -> float:
    """The least weighted mean of the values for weights up to the cap: the smallest values get the largest weights."""
    return float(np.sort(values) @ np.clip(1.0 - cap * np.arange(len(values)), 0.0, cap))
