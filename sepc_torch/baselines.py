"""Alias of :mod:`sepc_torch.metrics.baselines` (baseline scores), kept for the documented import path."""

from sepc_torch.metrics.baselines import *  # noqa: F403
