"""Alias of :mod:`sepc_torch.training.lightning`."""

from sepc_torch.training.lightning import *  # noqa: F403
