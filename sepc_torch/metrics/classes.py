"""Alias of :mod:`sepc_torch.metrics.torchmetrics`, kept for the documented import path."""

from sepc_torch.metrics.torchmetrics import *  # noqa: F403
