"""SEP-C: which predictions to trust, from sequential ellipsoidal partitioning.

Names load on first use, so that a machine with only torch and NumPy can run a frozen model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sepc_torch.active import LabelPool as LabelPool
    from sepc_torch.active import select as select
    from sepc_torch.bank import EllipsoidBank as EllipsoidBank
    from sepc_torch.callbacks import PoolDataModule as PoolDataModule
    from sepc_torch.callbacks import TrustMonitor as TrustMonitor
    from sepc_torch.comparing import compare as compare
    from sepc_torch.comparison_record import Comparison as Comparison
    from sepc_torch.ellipsoid import Ellipsoid as Ellipsoid
    from sepc_torch.ellipsoid import Kind as Kind
    from sepc_torch.ellipsoid import MinimumVolumeEllipsoid as MinimumVolumeEllipsoid
    from sepc_torch.head import TrustHead as TrustHead
    from sepc_torch.layers import EllipsoidLoss as EllipsoidLoss
    from sepc_torch.layers import MVELayer as MVELayer
    from sepc_torch.layers import RCHLayer as RCHLayer
    from sepc_torch.overlap import Landscape as Landscape
    from sepc_torch.overlap import landscape as landscape
    from sepc_torch.overlap import small_disjuncts as small_disjuncts
    from sepc_torch.partition_record import Partition as Partition
    from sepc_torch.partitioning import partition as partition
    from sepc_torch.prediction import HeadPrediction as HeadPrediction
    from sepc_torch.prediction import Prediction as Prediction
    from sepc_torch.rules import Rule as Rule
    from sepc_torch.rules import resolve as resolve
    from sepc_torch.sepc import SEPC as SEPC
    from sepc_torch.solvers import distance_to_ellipsoid as distance_to_ellipsoid
    from sepc_torch.solvers import ellipsoids_intersect as ellipsoids_intersect
    from sepc_torch.solvers import minimum_volume_ellipsoid as minimum_volume_ellipsoid
    from sepc_torch.solvers import reduced_hull_points as reduced_hull_points
    from sepc_torch.trust import bayes_trust as bayes_trust
    from sepc_torch.trust import odds as odds
    from sepc_torch.trust import posterior as posterior

__version__ = "0.1.0"

_HOME = {
    "SEPC": "sepc",
    "Comparison": "comparison_record",
    "Ellipsoid": "ellipsoid",
    "EllipsoidBank": "bank",
    "EllipsoidLoss": "layers",
    "HeadPrediction": "prediction",
    "Kind": "ellipsoid",
    "LabelPool": "active",
    "Landscape": "overlap",
    "MVELayer": "layers",
    "MinimumVolumeEllipsoid": "ellipsoid",
    "Partition": "partition_record",
    "PoolDataModule": "callbacks",
    "Prediction": "prediction",
    "RCHLayer": "layers",
    "Rule": "rules",
    "TrustHead": "head",
    "TrustMonitor": "callbacks",
    "bayes_trust": "trust",
    "compare": "comparing",
    "distance_to_ellipsoid": "solvers",
    "ellipsoids_intersect": "solvers",
    "landscape": "overlap",
    "minimum_volume_ellipsoid": "solvers",
    "odds": "trust",
    "partition": "partitioning",
    "posterior": "trust",
    "reduced_hull_points": "solvers",
    "resolve": "rules",
    "select": "active",
    "small_disjuncts": "overlap",
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
