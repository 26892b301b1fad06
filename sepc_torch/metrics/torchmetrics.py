"""Torchmetrics classes of the metrics (extra ``lightning``), accumulated over batches and processes.

Each class wraps the function of that name in :mod:`sepc_torch.metrics` and takes any score.

>>> import torch
>>> metric = AURC()
>>> metric.update(torch.tensor([0.9, 0.8]), torch.tensor([True, True]))
>>> metric.update(torch.tensor([0.7]), torch.tensor([False]))
>>> metric.compute()
tensor(0.1111, dtype=torch.float64)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from sepc_torch.data.options import count
from sepc_torch.metrics import calibration, selective, unknowns
from sepc_torch.metrics.calibration import Binning
from sepc_torch.metrics.unknowns import Positive
from sepc_torch.shapes import Bool, Float


class _PredictionMetric(Metric):
    """Metric of confidences and correctness flags; keeps all of them, because the value depends on their order."""

    full_state_update = False
    is_differentiable = False
    higher_is_better = False
    confidence: list[Tensor]
    correct: list[Tensor]

    def __init__(self, function: Callable[..., Tensor], options: dict[str, Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.function, self.options = function, options
        for name in ("confidence", "correct"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"]) -> None:
        """Add a batch: the confidence of each prediction, and True where the prediction is right."""
        self.confidence.append(confidence.detach().double())
        self.correct.append(correct)

    def compute(self) -> Tensor:
        """The metric of all batches added since the last reset."""
        return self.function(dim_zero_cat(self.confidence), dim_zero_cat(self.correct), **self.options)


class _JointMetric(_PredictionMetric):
    """Metric of confidences, correctness flags and flags of unknown samples."""

    unknown: list[Tensor]

    def __init__(self, function: Callable[..., Tensor], options: dict[str, Any], **settings: Any) -> None:
        super().__init__(function, options, **settings)
        self.add_state("unknown", default=[], dist_reduce_fx="cat")

    def update(  # type: ignore[override]
        self, confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"], unknown: Bool[Tensor, "B"]
    ) -> None:
        """Add a batch; the value of ``correct`` is ignored for unknown samples."""
        super().update(confidence, correct)
        self.unknown.append(unknown)

    def compute(self) -> Tensor:
        """The metric of all batches added since the last reset."""
        columns = (dim_zero_cat(column) for column in (self.confidence, self.correct, self.unknown))
        return self.function(*columns, **self.options)


class AURC(_PredictionMetric):
    """Area under the risk-coverage curve, see :func:`~sepc_torch.metrics.aurc`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(selective.aurc, {}, **settings)


class EAURC(_PredictionMetric):
    """AURC minus the AURC of the best ranking, see :func:`~sepc_torch.metrics.eaurc`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(selective.eaurc, {}, **settings)


class NAURC(_PredictionMetric):
    """AURC scaled from 0 (best ranking) to 1 (random ranking), see :func:`~sepc_torch.metrics.naurc`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(selective.naurc, {}, **settings)


class AUGRC(_PredictionMetric):
    """Area under the generalised risk-coverage curve, see :func:`~sepc_torch.metrics.augrc`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(selective.augrc, {}, **settings)


class FailureAUROC(_PredictionMetric):
    """AUROC of detecting mistakes, see :func:`~sepc_torch.metrics.failure_auroc`."""

    higher_is_better = True

    def __init__(self, **settings: Any) -> None:
        super().__init__(selective.failure_auroc, {}, **settings)


class RiskAtCoverage(_PredictionMetric):
    """Error rate of the most confident predictions, see :func:`~sepc_torch.metrics.risk_at_coverage`."""

    def __init__(self, coverage: float = 0.8, **settings: Any) -> None:
        super().__init__(selective.risk_at_coverage, {"coverage": coverage}, **settings)


class CoverageAtRisk(_PredictionMetric):
    """Largest coverage with at most this error rate, see :func:`~sepc_torch.metrics.coverage_at_risk`."""

    higher_is_better = True

    def __init__(self, risk: float = 0.05, **settings: Any) -> None:
        super().__init__(selective.coverage_at_risk, {"risk": risk}, **settings)


class ECE(_PredictionMetric):
    """Expected calibration error, see :func:`~sepc_torch.metrics.ece`."""

    def __init__(self, bins: int = 15, binning: Binning = "width", **settings: Any) -> None:
        super().__init__(calibration.ece, {"bins": count(bins, "bins", least=1), "binning": binning}, **settings)


class Brier(_PredictionMetric):
    """Brier score of the event "the prediction is right", see :func:`~sepc_torch.metrics.brier`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(calibration.brier, {}, **settings)


class SCODAURC(_JointMetric):
    """AURC of rejecting mistakes and unknown samples, see :func:`~sepc_torch.metrics.scod_aurc`."""

    def __init__(self, unknown_cost: float = 0.5, **settings: Any) -> None:
        super().__init__(selective.scod_aurc, {"unknown_cost": unknown_cost}, **settings)


class SCODAUGRC(_JointMetric):
    """AUGRC of rejecting mistakes and unknown samples, see :func:`~sepc_torch.metrics.scod_augrc`."""

    def __init__(self, unknown_cost: float = 0.5, **settings: Any) -> None:
        super().__init__(selective.scod_augrc, {"unknown_cost": unknown_cost}, **settings)


class _UnknownMetric(Metric):
    """Metric of the confidences of known and of unknown samples."""

    full_state_update = False
    is_differentiable = False
    confidence: list[Tensor]
    unknown: list[Tensor]

    def __init__(self, function: Callable[..., Tensor], options: dict[str, Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.function, self.options = function, options
        for name in ("confidence", "unknown"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, confidence: Float[Tensor, "B"], unknown: Bool[Tensor, "B"]) -> None:
        """Add a batch: the confidence of each sample, and True where the sample is unknown."""
        self.confidence.append(confidence.detach().double())
        self.unknown.append(unknown)

    def compute(self) -> Tensor:
        """The metric of all batches added since the last reset."""
        confidence, unknown = dim_zero_cat(self.confidence), dim_zero_cat(self.unknown)
        return self.function(confidence[~unknown], confidence[unknown], **self.options)


class UnknownAUROC(_UnknownMetric):
    """AUROC of separating known samples from unknown ones, see :func:`~sepc_torch.metrics.unknown_auroc`."""

    higher_is_better = True

    def __init__(self, **settings: Any) -> None:
        super().__init__(unknowns.unknown_auroc, {}, **settings)


class FPR95(_UnknownMetric):
    """False-positive rate at 95 % recall, by either convention, see :func:`~sepc_torch.metrics.fpr95`."""

    higher_is_better = False

    def __init__(self, positive: Positive = "known", recall: float = 0.95, **settings: Any) -> None:
        super().__init__(unknowns.fpr95, {"positive": positive, "recall": recall}, **settings)
