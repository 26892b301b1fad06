"""The same metrics as torchmetrics classes (extra ``lightning``): for any score, over batches, epochs and processes.

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

from sepc_torch.data.arrays import count
from sepc_torch.metrics import calibration, selective, unknowns
from sepc_torch.metrics.calibration import Binning
from sepc_torch.metrics.unknowns import Positive
from sepc_torch.shapes import Bool, Float


class _OfPredictions(Metric):
    """A function of all confidences and of what is known of each prediction; its value needs all of them at once."""

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
        """Add a batch: how sure of each prediction, and which are right."""
        self.confidence.append(confidence.detach().double())
        self.correct.append(correct)

    def compute(self) -> Tensor:
        """The value over all that was added."""
        return self.function(dim_zero_cat(self.confidence), dim_zero_cat(self.correct), **self.options)


class _Joint(_OfPredictions):
    """The same where some samples are of a kind never seen in training."""

    unknown: list[Tensor]

    def __init__(self, function: Callable[..., Tensor], options: dict[str, Any], **settings: Any) -> None:
        super().__init__(function, options, **settings)
        self.add_state("unknown", default=[], dist_reduce_fx="cat")

    def update(  # type: ignore[override]
        self, confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"], unknown: Bool[Tensor, "B"]
    ) -> None:
        """Add a batch; what ``correct`` says of unknown samples does not matter."""
        super().update(confidence, correct)
        self.unknown.append(unknown)

    def compute(self) -> Tensor:
        """The value over all that was added."""
        columns = (dim_zero_cat(column) for column in (self.confidence, self.correct, self.unknown))
        return self.function(*columns, **self.options)


class AURC(_OfPredictions):
    """Area under the risk-coverage curve, see :func:`~sepc_torch.metrics.aurc`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(selective.aurc, {}, **settings)


class EAURC(_OfPredictions):
    """AURC above the best ranking, see :func:`~sepc_torch.metrics.eaurc`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(selective.eaurc, {}, **settings)


class NAURC(_OfPredictions):
    """AURC between the best ranking (0) and a random one (1), see :func:`~sepc_torch.metrics.naurc`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(selective.naurc, {}, **settings)


class AUGRC(_OfPredictions):
    """Area under the generalised risk, see :func:`~sepc_torch.metrics.augrc`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(selective.augrc, {}, **settings)


class FailureAUROC(_OfPredictions):
    """AUROC of finding mistakes, see :func:`~sepc_torch.metrics.failure_auroc`."""

    higher_is_better = True

    def __init__(self, **settings: Any) -> None:
        super().__init__(selective.failure_auroc, {}, **settings)


class RiskAtCoverage(_OfPredictions):
    """Error rate of the most confident share, see :func:`~sepc_torch.metrics.risk_at_coverage`."""

    def __init__(self, coverage: float = 0.8, **settings: Any) -> None:
        super().__init__(selective.risk_at_coverage, {"coverage": coverage}, **settings)


class CoverageAtRisk(_OfPredictions):
    """Largest share with an error rate, see :func:`~sepc_torch.metrics.coverage_at_risk`."""

    higher_is_better = True

    def __init__(self, risk: float = 0.05, **settings: Any) -> None:
        super().__init__(selective.coverage_at_risk, {"risk": risk}, **settings)


class ECE(_OfPredictions):
    """Expected calibration error, see :func:`~sepc_torch.metrics.ece`."""

    def __init__(self, bins: int = 15, binning: Binning = "width", **settings: Any) -> None:
        super().__init__(calibration.ece, {"bins": count(bins, "bins", least=1), "binning": binning}, **settings)


class Brier(_OfPredictions):
    """Brier score of being right, see :func:`~sepc_torch.metrics.brier`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(calibration.brier, {}, **settings)


class SCODAURC(_Joint):
    """AURC of refusing mistakes and unknowns together, see :func:`~sepc_torch.metrics.scod_aurc`."""

    def __init__(self, unknown_cost: float = 0.5, **settings: Any) -> None:
        super().__init__(selective.scod_aurc, {"unknown_cost": unknown_cost}, **settings)


class SCODAUGRC(_Joint):
    """AUGRC of refusing mistakes and unknowns together, see :func:`~sepc_torch.metrics.scod_augrc`."""

    def __init__(self, unknown_cost: float = 0.5, **settings: Any) -> None:
        super().__init__(selective.scod_augrc, {"unknown_cost": unknown_cost}, **settings)


class _OfUnknowns(Metric):
    """A function of the confidences of known and of unknown samples."""

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
        """Add a batch: how sure of each sample, and which are unknown."""
        self.confidence.append(confidence.detach().double())
        self.unknown.append(unknown)

    def compute(self) -> Tensor:
        """The value over all that was added."""
        confidence, unknown = dim_zero_cat(self.confidence), dim_zero_cat(self.unknown)
        return self.function(confidence[~unknown], confidence[unknown], **self.options)


class UnknownAUROC(_OfUnknowns):
    """AUROC of finding unknowns, see :func:`~sepc_torch.metrics.unknown_auroc`."""

    higher_is_better = True

    def __init__(self, **settings: Any) -> None:
        super().__init__(unknowns.unknown_auroc, {}, **settings)


class FPR95(_OfUnknowns):
    """False positives at 95 % recall, by either convention, see :func:`~sepc_torch.metrics.fpr95`."""

    higher_is_better = False

    def __init__(self, positive: Positive = "known", recall: float = 0.95, **settings: Any) -> None:
        super().__init__(unknowns.fpr95, {"positive": positive, "recall": recall}, **settings)
