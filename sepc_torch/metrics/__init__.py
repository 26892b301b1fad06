"""Metrics of trust: does a score rank mistakes, find unknowns, and mean what it says?

Functions of tensors, in O(n log n), exact for scores with ties. :mod:`sepc_torch.metrics.torchmetrics` has the same as
torchmetrics classes.
"""

from __future__ import annotations

from sepc_torch.metrics.calibration import Reliability, brier, ece, reliability
from sepc_torch.metrics.selective import (
    augrc,
    aurc,
    coverage_at_risk,
    eaurc,
    failure_auroc,
    naurc,
    optimal_aurc,
    risk_at_coverage,
    scod_augrc,
    scod_aurc,
)
from sepc_torch.metrics.unknowns import fpr95, unknown_auroc

__all__ = [
    "Reliability",
    "augrc",
    "aurc",
    "brier",
    "coverage_at_risk",
    "eaurc",
    "ece",
    "failure_auroc",
    "fpr95",
    "naurc",
    "optimal_aurc",
    "reliability",
    "risk_at_coverage",
    "scod_augrc",
    "scod_aurc",
    "unknown_auroc",
]
