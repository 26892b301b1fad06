"""Alias of :mod:`sepc_torch.solvers.programs`."""

from sepc_torch.solvers.programs import *  # noqa: F403
