r"""The paper's convex programs, each stated once in cvxpy, for any installed cvxpy solver.

They are what the specialised solvers of :mod:`sepc_torch.solvers` are measured against; the functions of the same
names there check their arguments and call these when a cvxpy solver is named. A solver's word is not taken for its
answer: covering, optimality and separation are measured afterwards, and what fails is a :class:`ProgramError`.
"""

from __future__ import annotations

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
