"""Sequential ellipsoidal partitioning classifier (SEP-C): a label for each sample, and how far to trust it.

The folders, in the order of the data: ``data`` checks arrays, ``solvers`` solves the convex programs, ``partitioning``
covers labelled points with ellipsoids, ``model`` is the frozen torch classifier, ``head`` turns a network's embeddings
into calibrated trust, ``metrics`` evaluates trust scores, ``training`` uses them in active learning and in Lightning.
``layers`` holds the differentiable fits. ``serving`` runs heads in other processes. ``estimator`` (scikit-learn),
``mlflow``, ``plot``, ``cli`` and ``demo`` build on all of them.

Public names are imported on first use, so a frozen model runs where only torch and NumPy are installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sepc_torch.data.files import FileFormatError as FileFormatError
    from sepc_torch.ellipsoid import Ellipsoid as Ellipsoid
    from sepc_torch.ellipsoid import Kind as Kind
    from sepc_torch.ellipsoid import MinimumVolumeEllipsoid as MinimumVolumeEllipsoid
    from sepc_torch.head.drift import DriftMonitor as DriftMonitor
    from sepc_torch.head.label_errors import SuspiciousLabels as SuspiciousLabels
    from sepc_torch.head.label_errors import suspicious_labels as suspicious_labels
    from sepc_torch.head.novelties import Novelties as Novelties
    from sepc_torch.head.prediction import HeadPrediction as HeadPrediction
    from sepc_torch.head.trust_head import TrustHead as TrustHead
    from sepc_torch.layers import EllipsoidLoss as EllipsoidLoss
    from sepc_torch.layers import MVELayer as MVELayer
    from sepc_torch.layers import RCHLayer as RCHLayer
    from sepc_torch.metrics.compare import compare as compare
    from sepc_torch.metrics.comparison import Comparison as Comparison
    from sepc_torch.model.bank import EllipsoidBank as EllipsoidBank
    from sepc_torch.model.prediction import Prediction as Prediction
    from sepc_torch.model.rules import Rule as Rule
    from sepc_torch.model.rules import resolve as resolve
    from sepc_torch.model.sepc import SEPC as SEPC
    from sepc_torch.model.trust import bayes_trust as bayes_trust
    from sepc_torch.model.trust import odds as odds
    from sepc_torch.model.trust import posterior as posterior
    from sepc_torch.partitioning.fit import partition as partition
    from sepc_torch.partitioning.landscape import Landscape as Landscape
    from sepc_torch.partitioning.landscape import landscape as landscape
    from sepc_torch.partitioning.landscape import small_disjuncts as small_disjuncts
    from sepc_torch.partitioning.record import Partition as Partition
    from sepc_torch.serving.scorer import Scorer as Scorer
    from sepc_torch.solvers import distance_to_ellipsoid as distance_to_ellipsoid
    from sepc_torch.solvers import ellipsoids_intersect as ellipsoids_intersect
    from sepc_torch.solvers import minimum_volume_ellipsoid as minimum_volume_ellipsoid
    from sepc_torch.solvers import reduced_hull_points as reduced_hull_points
    from sepc_torch.training import LabelPool as LabelPool
    from sepc_torch.training import select as select
    from sepc_torch.training.lightning import PoolDataModule as PoolDataModule
    from sepc_torch.training.lightning import TrustMonitor as TrustMonitor
    from sepc_torch.trust_classifier import TrustClassifier as TrustClassifier

__version__ = "0.2.0"

_HOME = {
    "SEPC": "model.sepc",
    "Comparison": "metrics.comparison",
    "DriftMonitor": "head.drift",
    "Ellipsoid": "ellipsoid",
    "EllipsoidBank": "model.bank",
    "EllipsoidLoss": "layers",
    "FileFormatError": "data.files",
    "HeadPrediction": "head.prediction",
    "Kind": "ellipsoid",
    "LabelPool": "training",
    "Landscape": "partitioning.landscape",
    "MVELayer": "layers",
    "MinimumVolumeEllipsoid": "ellipsoid",
    "Novelties": "head.novelties",
    "Partition": "partitioning.record",
    "PoolDataModule": "training.lightning",
    "Prediction": "model.prediction",
    "RCHLayer": "layers",
    "Rule": "model.rules",
    "Scorer": "serving.scorer",
    "SuspiciousLabels": "head.label_errors",
    "TrustClassifier": "trust_classifier",
    "TrustHead": "head.trust_head",
    "TrustMonitor": "training.lightning",
    "bayes_trust": "model.trust",
    "compare": "metrics.compare",
    "distance_to_ellipsoid": "solvers",
    "ellipsoids_intersect": "solvers",
    "landscape": "partitioning.landscape",
    "minimum_volume_ellipsoid": "solvers",
    "odds": "model.trust",
    "partition": "partitioning.fit",
    "posterior": "model.trust",
    "reduced_hull_points": "solvers",
    "resolve": "model.rules",
    "select": "training",
    "small_disjuncts": "partitioning.landscape",
    "suspicious_labels": "head.label_errors",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}.")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
