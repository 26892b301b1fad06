"""Alias of :mod:`sepc_torch.training`."""

from sepc_torch.training import *  # noqa: F403
