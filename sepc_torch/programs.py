"""Alias of :mod:`sepc_torch.solvers.programs` (the paper's convex programs), kept for the documented import path."""

from sepc_torch.solvers.programs import *  # noqa: F403
