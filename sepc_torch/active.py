"""Alias of :mod:`sepc_torch.training` (active learning), kept for the documented import path."""

from sepc_torch.training import *  # noqa: F403
