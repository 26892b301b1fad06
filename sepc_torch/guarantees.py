"""Alias of :mod:`sepc_torch.head.conformal`."""

from sepc_torch.head.conformal import *  # noqa: F403
