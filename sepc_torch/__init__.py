"""Sequential ellipsoidal partitioning classifier (SEP-C): a label for each sample, and how far to trust it.

The folders, in the order of the data: ``data`` checks arrays, ``solvers`` solves the convex programs, ``partitioning``
covers labelled points with ellipsoids, ``model`` is the frozen torch classifier, ``head`` turns a network's embeddings
into calibrated trust, ``metrics`` evaluates trust scores, ``training`` uses them in active learning, Lightning and
transformers. ``layers`` holds the differentiable fits. ``serving`` runs heads in other processes. ``sklearn``,
``plot``, ``cli`` and ``demo`` build on all of them.

Public names are imported on first use, so a frozen model runs where only torch and NumPy are installed. Type checkers
read them from ``__init__.pyi``, which ``python tests/test_public_names.py`` writes.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.3.0"

# The public names of each module.
_NAMES = {
    "data.files": ["FileFormatError"],
    "ellipsoid": ["Ellipsoid", "Kind", "MinimumVolumeEllipsoid"],
    "head.drift": ["DriftMonitor"],
    "head.guard": ["Guard"],
    "head.label_errors": ["SuspiciousLabels", "suspicious_labels"],
    "head.promises.novelties": ["Novelties", "UnknownShare"],
    "head.promises.scores": ["ScoreAcceptance", "accept_scores"],
    "head.prediction": ["HeadPrediction"],
    "head.risk_monitor": ["RiskMonitor"],
    "head.trust_head": ["TrustHead"],
    "head.trusted_model": ["TrustedModel", "TrustedPrediction"],
    "layers": ["EllipsoidLoss", "MVELayer", "RCHLayer"],
    "metrics.compare": ["compare"],
    "metrics.comparison": ["Comparison"],
    "model.bank": ["EllipsoidBank"],
    "model.prediction": ["Prediction"],
    "model.rules": ["Rule", "resolve"],
    "model.sepc": ["SEPC"],
    "model.trust": ["bayes_trust", "odds", "posterior"],
    "partitioning.fit": ["partition"],
    "partitioning.landscape": ["Landscape", "landscape", "small_disjuncts"],
    "partitioning.record": ["Partition"],
    "report": ["write_report"],
    "serving.export": ["export", "to_onnx"],
    "serving.scorer": ["Scorer"],
    "sklearn.estimator": ["SEPClassifier"],
    "sklearn.trust_classifier": ["TrustClassifier"],
    "solvers": ["distance_to_ellipsoid", "ellipsoids_intersect", "minimum_volume_ellipsoid", "reduced_hull_points"],
    "training": ["LabelPool", "select"],
    "training.lightning": ["PoolDataModule", "TrustMonitor"],
    "training.transformers": ["TrustCallback"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}.")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
