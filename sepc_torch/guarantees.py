"""Conformal p-values and thresholds with finite-sample guarantees: an alias of :mod:`sepc_torch.head.conformal`."""

from sepc_torch.head.conformal import *  # noqa: F403
