"""The paper's convex programs stated in cvxpy, for any installed cvxpy solver.

These statements are the reference for the native solvers of :mod:`sepc_torch.solvers`. The functions of the same names
there validate their arguments and call these functions if ``solver`` names a cvxpy solver. A solver's status alone is
not trusted: every function verifies covering, optimality or separation afterwards, and raises :class:`ProgramError` if
the check fails.
"""

from __future__ import annotations

try:
    import cvxpy  # noqa: F401 - the modules below need it; here a missing one is explained
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "The paper's programs need cvxpy: pip install 'sepc_torch[cvxpy]'. solver='native' needs no such package.",
        name=error.name,
    ) from error

from sepc_torch.solvers.programs.intersection import distance_to_ellipsoid, ellipsoids_intersect, intersection_ellipsoid
from sepc_torch.solvers.programs.minimum_volume import minimum_volume_ellipsoid
from sepc_torch.solvers.programs.reduced_hull import reduced_hull_points
from sepc_torch.solvers.programs.solve import ProgramError, check_installed

__all__ = [
    "ProgramError",
    "check_installed",
    "distance_to_ellipsoid",
    "ellipsoids_intersect",
    "intersection_ellipsoid",
    "minimum_volume_ellipsoid",
    "reduced_hull_points",
]
