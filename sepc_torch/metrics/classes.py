"""Alias of :mod:`sepc_torch.metrics.torchmetrics`."""

from sepc_torch.metrics.torchmetrics import *  # noqa: F403
