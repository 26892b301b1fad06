"""Calls of cvxpy solvers with tight settings, retries, and an error for every result that is not optimal."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import cvxpy as cp

from sepc_torch.data.shared_setting import SharedSetting
from sepc_torch.shapes import Array, Float

# The largest accepted relative gap, and the largest accepted distance of a point beyond the surface.
ACCEPTED = 1e-5


class ProgramError(RuntimeError):
    """A cvxpy solver failed or its result did not pass the checks.

    The message names the program, its size, the solver, the status and a remedy.
    """


def _attempts(solver: str, accuracy: float) -> list[dict[str, Any]]:
    """Solver settings, tried in order until one gives the status ``optimal``."""
    if solver == "CLARABEL":
        # The programs are already scaled, which equilibration would undo. Chordal decomposition would break up the
        # matrix inequality of a floor.
        fixed = {"equilibrate_enable": False, "chordal_decomposition_enable": False}
        # With an active floor Clarabel can stall at the boundary; the later attempts take shorter steps to avoid it.
        return [
            {"tol_gap_abs": a, "tol_gap_rel": a, "tol_feas": a, "max_step_fraction": step, **fixed}
            for a, step in ((accuracy, 0.99), (1e-8, 0.9), (1e-7, 0.9), (1e-7, 0.8))
        ]
    # First-order methods stop at 1e-4 or 1e-5 by default. The optimality conditions of reduced hulls, which are checked
    # to 1e-8, fail by up to ten times the tolerance of OSQP (1500 random pairs of sets).
    settings = {
        "SCS": {"eps_abs": 1e-9, "eps_rel": 1e-9, "max_iters": 100_000},
        "OSQP": {"eps_abs": 1e-10, "eps_rel": 1e-10, "max_iter": 50_000},
    }
    return [settings.get(solver, {})]


@contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warnings of cvxpy repeat the status
        yield


_WITHOUT_WARNINGS = SharedSetting(_without_warnings)


def solve(problem: cp.Problem, name: str, size: str, solver: str, accuracy: float = 1e-10) -> None:
    """Solve a program in place; raise ProgramError unless the status is exactly ``optimal``."""
    status, cause = "", None
    for settings in _attempts(solver, accuracy):
        try:
            with _WITHOUT_WARNINGS:
                problem.solve(solver=solver, **settings)
            status = str(problem.status)
        except cp.SolverError as error:
            status, cause = str(error), error
        if status == cp.OPTIMAL:
            return
    raise failure(name, size, solver, status) from cause


def failure(name: str, size: str, solver: str, status: str) -> ProgramError:
    """The :class:`ProgramError` for a program, with a remedy."""
    other = "SCS" if solver == "CLARABEL" else "CLARABEL"
    return ProgramError(
        f"{name}, {size}: {solver} ended with status: {status.rstrip('.')}. Use solver={other!r}, or solver='native' "
        "if the function offers it. Fewer dimensions, or a floor for thin sets, also help."
    )


@cache
def _installed_solvers() -> list[str]:
    return list(cp.installed_solvers())


def check_installed(solver: str) -> str:
    """The cvxpy spelling of a solver's name; raises ValueError if the solver is not installed."""
    installed = _installed_solvers()
    if not isinstance(solver, str) or solver.upper() not in installed:
        raise ValueError(
            f"solver={solver!r} is not an installed cvxpy solver; expected one of {', '.join(installed)}, or 'native' "
            "in the functions of sepc_torch."
        )
    return solver.upper()


def size_of(points: Float[Array, "N D"]) -> str:
    """The size of a program, for error messages."""
    return f"{points.shape[0]} points x {points.shape[1]} dims"
