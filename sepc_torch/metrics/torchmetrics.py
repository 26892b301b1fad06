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

from typing import Any

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from sepc_torch.data.options import check_count
from sepc_torch.metrics import calibration, selective, unknowns
from sepc_torch.metrics.calibration import Binning
from sepc_torch.metrics.unknowns import Positive
from sepc_torch.shapes import Bool, Float


class _PredictionMetric(Metric):
    """Metric of confidences and correctness flags; keeps all of them, because the value depends on their order."""

    full_state_update = False
    is_differentiable = False
    higher_is_better = False
    inputs: tuple[str, ...] = ("confidence", "correct")
    function: staticmethod[..., Tensor]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.options: dict[str, Any] = {}
        for name in self.inputs:
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"]) -> None:
        """Add a batch: the confidence of each prediction, and True where the prediction is right."""
        self._add(confidence, correct)

    def _add(self, confidence: Float[Tensor, "B"], *flags: Bool[Tensor, "B"]) -> None:
        for name, values in zip(self.inputs, (confidence.detach().double(), *flags), strict=True):
            getattr(self, name).append(values)

    def _columns(self) -> list[Tensor]:
        return [dim_zero_cat(getattr(self, name)) for name in self.inputs]

    def compute(self) -> Tensor:
        """The metric of all batches added since the last reset."""
        return self.function(*self._columns(), **self.options)


class _JointMetric(_PredictionMetric):
    """Metric of confidences, correctness flags and flags of unknown samples."""

    inputs = ("confidence", "correct", "unknown")

    def __init__(self, unknown_cost: float = 0.5, **settings: Any) -> None:
        super().__init__(**settings)
        self.options = {"unknown_cost": unknown_cost}

    def update(  # type: ignore[override]
        self, confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"], unknown: Bool[Tensor, "B"]
    ) -> None:
        """Add a batch; the value of ``correct`` is ignored for unknown samples."""
        self._add(confidence, correct, unknown)


class _UnknownMetric(_PredictionMetric):
    """Metric of the confidences of known and of unknown samples."""

    inputs = ("confidence", "unknown")

    def update(self, confidence: Float[Tensor, "B"], unknown: Bool[Tensor, "B"]) -> None:
        """Add a batch: the confidence of each sample, and True where the sample is unknown."""
        self._add(confidence, unknown)

    def compute(self) -> Tensor:
        """The metric of all batches added since the last reset."""
        confidence, unknown = self._columns()
        return self.function(confidence[~unknown], confidence[unknown], **self.options)


class AURC(_PredictionMetric):
    """Area under the risk-coverage curve, see :func:`~sepc_torch.metrics.aurc`."""

    function = staticmethod(selective.aurc)


class EAURC(_PredictionMetric):
    """AURC minus the AURC of the best ranking, see :func:`~sepc_torch.metrics.eaurc`."""

    function = staticmethod(selective.eaurc)


class NAURC(_PredictionMetric):
    """AURC scaled from 0 (best ranking) to 1 (random ranking), see :func:`~sepc_torch.metrics.naurc`."""

    function = staticmethod(selective.naurc)


class AUGRC(_PredictionMetric):
    """Area under the generalised risk-coverage curve, see :func:`~sepc_torch.metrics.augrc`."""

    function = staticmethod(selective.augrc)


class FailureAUROC(_PredictionMetric):
    """AUROC of detecting mistakes, see :func:`~sepc_torch.metrics.failure_auroc`."""

    function = staticmethod(selective.failure_auroc)
    higher_is_better = True


class RiskAtCoverage(_PredictionMetric):
    """Error rate of the most confident predictions, see :func:`~sepc_torch.metrics.risk_at_coverage`."""

    function = staticmethod(selective.risk_at_coverage)

    def __init__(self, coverage: float = 0.8, **settings: Any) -> None:
        super().__init__(**settings)
        self.options = {"coverage": coverage}


class CoverageAtRisk(_PredictionMetric):
    """Largest coverage with at most this error rate, see :func:`~sepc_torch.metrics.coverage_at_risk`."""

    function = staticmethod(selective.coverage_at_risk)
    higher_is_better = True

    def __init__(self, risk: float = 0.05, **settings: Any) -> None:
        super().__init__(**settings)
        self.options = {"risk": risk}


class ECE(_PredictionMetric):
    """Expected calibration error, see :func:`~sepc_torch.metrics.ece`."""

    function = staticmethod(calibration.ece)

    def __init__(self, bins: int = 15, binning: Binning = "width", **settings: Any) -> None:
        super().__init__(**settings)
        self.options = {"bins": check_count(bins, "bins", least=1), "binning": binning}


class Brier(_PredictionMetric):
    """Brier score of the event "the prediction is right", see :func:`~sepc_torch.metrics.brier`."""

    function = staticmethod(calibration.brier)


class SCODAURC(_JointMetric):
    """AURC of rejecting mistakes and unknown samples, see :func:`~sepc_torch.metrics.scod_aurc`."""

    function = staticmethod(selective.scod_aurc)


class SCODAUGRC(_JointMetric):
    """AUGRC of rejecting mistakes and unknown samples, see :func:`~sepc_torch.metrics.scod_augrc`."""

    function = staticmethod(selective.scod_augrc)


class UnknownAUROC(_UnknownMetric):
    """AUROC of separating known samples from unknown ones, see :func:`~sepc_torch.metrics.unknown_auroc`."""

    function = staticmethod(unknowns.unknown_auroc)
    higher_is_better = True


class FPR95(_UnknownMetric):
    """False-positive rate at 95 % recall, by either convention, see :func:`~sepc_torch.metrics.fpr95`."""

    function = staticmethod(unknowns.fpr95)

    def __init__(self, positive: Positive = "known", recall: float = 0.95, **settings: Any) -> None:
        super().__init__(**settings)
        self.options = {"positive": positive, "recall": recall}
