"""Alias of :mod:`sepc_torch.head.conformal` (p-values and thresholds), kept for the documented import path."""

from sepc_torch.head.conformal import *  # noqa: F403
