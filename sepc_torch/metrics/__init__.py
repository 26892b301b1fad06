"""Evaluation of trust scores: metrics, baselines, and the one-call comparison.

The metrics measure whether a score ranks mistakes last (:mod:`~sepc_torch.metrics.selective`), separates unknown
samples from known ones (:mod:`~sepc_torch.metrics.unknowns`), and is a calibrated probability
(:mod:`~sepc_torch.metrics.calibration`). They are functions of tensors, take O(n log n) time, and are exact for scores
with ties. :mod:`sepc_torch.metrics.torchmetrics` wraps them as torchmetrics classes.
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
