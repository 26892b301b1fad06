"""Public names for type checkers; written by ``python tests/test_public_names.py``."""

from sepc_torch.data.files import FileFormatError as FileFormatError
from sepc_torch.ellipsoid import Ellipsoid as Ellipsoid
from sepc_torch.ellipsoid import Kind as Kind
from sepc_torch.ellipsoid import MinimumVolumeEllipsoid as MinimumVolumeEllipsoid
from sepc_torch.head.drift import DriftMonitor as DriftMonitor
from sepc_torch.head.guard import Guard as Guard
from sepc_torch.head.label_errors import SuspiciousLabels as SuspiciousLabels
from sepc_torch.head.label_errors import suspicious_labels as suspicious_labels
from sepc_torch.head.prediction import HeadPrediction as HeadPrediction
from sepc_torch.head.promises.novelties import Novelties as Novelties
from sepc_torch.head.promises.novelties import UnknownShare as UnknownShare
from sepc_torch.head.promises.scores import ScoreAcceptance as ScoreAcceptance
from sepc_torch.head.promises.scores import accept_scores as accept_scores
from sepc_torch.head.risk_monitor import RiskMonitor as RiskMonitor
from sepc_torch.head.trust_head import TrustHead as TrustHead
from sepc_torch.head.trusted_model import TrustedModel as TrustedModel
from sepc_torch.head.trusted_model import TrustedPrediction as TrustedPrediction
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
from sepc_torch.report import write_report as write_report
from sepc_torch.serving.export import export as export
from sepc_torch.serving.export import to_onnx as to_onnx
from sepc_torch.serving.scorer import Scorer as Scorer
from sepc_torch.sklearn.estimator import SEPClassifier as SEPClassifier
from sepc_torch.sklearn.trust_classifier import TrustClassifier as TrustClassifier
from sepc_torch.solvers import distance_to_ellipsoid as distance_to_ellipsoid
from sepc_torch.solvers import ellipsoids_intersect as ellipsoids_intersect
from sepc_torch.solvers import minimum_volume_ellipsoid as minimum_volume_ellipsoid
from sepc_torch.solvers import reduced_hull_points as reduced_hull_points
from sepc_torch.training import LabelPool as LabelPool
from sepc_torch.training import select as select
from sepc_torch.training.lightning import PoolDataModule as PoolDataModule
from sepc_torch.training.lightning import TrustMonitor as TrustMonitor
from sepc_torch.training.transformers import TrustCallback as TrustCallback

__version__: str
__all__: list[str]
_HOME: dict[str, str]
