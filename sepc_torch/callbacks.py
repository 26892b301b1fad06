"""Alias of :mod:`sepc_torch.training.lightning` (Lightning callbacks), kept for the documented import path."""

from sepc_torch.training.lightning import *  # noqa: F403
