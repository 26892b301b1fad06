"""Alias of :mod:`sepc_torch.metrics.baselines`."""

from sepc_torch.metrics.baselines import *  # noqa: F403
