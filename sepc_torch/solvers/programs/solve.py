"""Running a cvxpy solver so that nothing inaccurate passes silently."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import cvxpy as cp

from sepc_torch.shapes import Array, Float

# The largest relative gap, and the largest distance of a point beyond the surface, that an answer may have.
ACCEPTED = 1e-5


class ProgramError(RuntimeError):
    """A solver failed, or its answer did not pass the checks; names program, size, solver, status and a remedy."""


def _attempts(solver: str, accuracy: float) -> list[dict[str, Any]]:
    """Settings to try one after the other, until one ends with an optimum."""
    if solver == "CLARABEL":
        # Its scaling of rows undoes ours, and its splitting of sparse matrix inequalities the structure of a floor.
        fixed = {"equilibrate_enable": False, "chordal_decomposition_enable": False}
        # Near a floor it gets stuck at the boundary once in fifty times; shorter steps keep it away from there.
        return [
            {"tol_gap_abs": a, "tol_gap_rel": a, "tol_feas": a, "max_step_fraction": step, **fixed}
            for a, step in ((accuracy, 0.99), (1e-8, 0.9), (1e-7, 0.9), (1e-7, 0.8))
        ]
    # First-order methods stop at 1e-4 or 1e-5 unless told otherwise.
    tight = {"eps_abs": 1e-9, "eps_rel": 1e-9}
    return [{"SCS": {**tight, "max_iters": 100_000}, "OSQP": {**tight, "max_iter": 50_000}}.get(solver, {})]


def solve(problem: cp.Problem, name: str, size: str, solver: str, accuracy: float = 1e-10) -> None:
    """Solve a program; whatever is not exactly optimal is an error."""
    status, cause = "", None
    for settings in _attempts(solver, accuracy):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # cvxpy repeats in words what the status says
                problem.solve(solver=solver, **settings)
            status = str(problem.status)
        except cp.SolverError as error:
            status, cause = str(error), error
        if status == cp.OPTIMAL:
            return
    raise failure(name, size, solver, status) from cause


def failure(name: str, size: str, solver: str, status: str) -> ProgramError:
    """The error to raise, with a remedy."""
    other = "SCS" if solver == "CLARABEL" else "CLARABEL"
    return ProgramError(
        f"{name}, {size}: {solver} ended with status: {status.rstrip('.')}. Use solver={other!r}, or solver='native' "
        "where it is offered, which certifies its answers. Fewer dimensions, or a floor for thin sets, help a solver."
    )


@cache
def _installed_solvers() -> list[str]:
    return list(cp.installed_solvers())


def check_installed(solver: str) -> str:
    """The name of an installed solver as cvxpy spells it, or a clear error."""
    installed = _installed_solvers()
    if not isinstance(solver, str) or solver.upper() not in installed:
        raise ValueError(
            f"solver={solver!r} is not an installed cvxpy solver; expected one of {', '.join(installed)}, or 'native' "
            "in the functions of sepc_torch."
        )
    return solver.upper()


def size_of(points: Float[Array, "N D"]) -> str:
    """The size of a program, for messages."""
    return f"{points.shape[0]} points x {points.shape[1]} dims"
