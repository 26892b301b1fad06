"""Metrics compared with TorchUncertainty 0.13.0, pytorch-ood 0.4.0 and torchmetrics, on scores without ties.

Where the definitions differ, the test states the exact relation. With ties the other libraries use an arbitrary order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from peer_libraries import peer
from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error

from sepc_torch.metrics import (
    augrc,
    aurc,
    brier,
    coverage_at_risk,
    ece,
    fpr95,
    risk_at_coverage,
    scod_augrc,
    scod_aurc,
    unknown_auroc,
)

Rng = np.random.Generator
TU = "torch_uncertainty.metrics.classification"
# Relative tolerance: TorchUncertainty stores errors and coverage in float32.
SINGLE = 1e-5


class Judged(NamedTuple):
    """A network's probabilities, the true classes, and the confidence and correctness that the metrics use."""

    probabilities: Tensor
    target: Tensor
    confidence: Tensor
    correct: Tensor

    @property
    def risks(self) -> Tensor:
        """Selective risk after every accepted prediction."""
        wrong = (~self.correct)[self.confidence.argsort(descending=True)].double()
        return wrong.cumsum(0) / torch.arange(1, len(wrong) + 1)


@pytest.fixture(params=[2, 37, 400])
def judged(request: pytest.FixtureRequest, rng: Rng) -> Judged:
    count: int = request.param
    logits = torch.from_numpy(rng.normal(size=(count, 5)))
    drawn = torch.from_numpy(rng.gumbel(size=(count, 5)) + 2.0 * logits.numpy()).argmax(dim=1)
    probabilities = logits.softmax(dim=1)
    confidence, predicted = probabilities.max(dim=1)
    return Judged(probabilities, drawn, confidence, predicted == drawn)


def test_aurc(judged: Judged) -> None:
    """TorchUncertainty uses trapezoids: half of the first and of the last risk is missing, and it divides by n - 1."""
    n, risks = len(judged.target), judged.risks
    theirs = peer(f"{TU}.risk_coverage").AURC()
    theirs.update(judged.probabilities, judged.target)
    ours = float(aurc(judged.confidence, judged.correct))
    expected = (n * ours - float(risks[0] + risks[-1]) / 2) / (n - 1)
    assert float(theirs.compute()) == pytest.approx(expected, rel=SINGLE, abs=1e-7)


def test_augrc(judged: Judged) -> None:
    """TorchUncertainty's trapezoids start at the first prediction, ours at coverage 0; it divides by n - 1."""
    n, risks = len(judged.target), judged.risks
    theirs = peer(f"{TU}.risk_coverage").AUGRC()
    theirs.update(judged.probabilities, judged.target)
    ours = float(augrc(judged.confidence, judged.correct))
    expected = (n * ours - float(risks[0]) / n / 2) / (n - 1)
    assert float(theirs.compute()) == pytest.approx(expected, rel=SINGLE, abs=1e-7)


def test_aurra_is_one_minus_aurc(judged: Judged) -> None:
    theirs = peer("pytorch_ood.metrics.functional").aurra(judged.confidence, judged.correct)
    assert theirs == pytest.approx(1.0 - float(aurc(judged.confidence, judged.correct)), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("cost", [0.0, 0.3, 0.5, 1.0])
def test_joint_task(judged: Judged, cost: float, rng: Rng) -> None:
    n = len(judged.target)
    unknown = torch.from_numpy(rng.random(n) < 0.4)
    given = (judged.confidence, judged.correct, unknown)
    modules = peer(f"{TU}.scod_risk_coverage")
    loss = torch.where(unknown, cost, (1.0 - cost) * (~judged.correct).double())
    loss = loss[judged.confidence.argsort(descending=True)]
    first, last = float(loss[0]), float(loss.mean())

    theirs = modules.SCODAURC(ood_cost=cost)
    theirs.update(-judged.confidence, ~judged.correct, unknown)
    expected = (n * float(scod_aurc(*given, unknown_cost=cost)) - (first + last) / 2) / (n - 1)
    assert float(theirs.compute()) == pytest.approx(expected, rel=SINGLE, abs=1e-7)

    theirs = modules.SCODAUGRC(ood_cost=cost)
    theirs.update(-judged.confidence, ~judged.correct, unknown)
    expected = (n * float(scod_augrc(*given, unknown_cost=cost)) - first / n / 2) / (n - 1)
    assert float(theirs.compute()) == pytest.approx(expected, rel=SINGLE, abs=1e-7)


# Irrational risks, so that no error rate equals the risk and rounding has no effect.
@pytest.mark.parametrize("risk", [math.sqrt(0.003), math.sqrt(0.05), math.sqrt(0.2)])
def test_coverage_at_risk(judged: Judged, risk: float) -> None:
    """If no coverage is admissible, TorchUncertainty returns NaN and this library 0."""
    theirs = peer(f"{TU}.risk_coverage").CovAtxRisk(risk_threshold=risk)
    theirs.update(judged.probabilities, judged.target)
    found = float(theirs.compute())
    ours = float(coverage_at_risk(judged.confidence, judged.correct, risk=risk))
    assert ours == pytest.approx(0.0 if math.isnan(found) else found, rel=SINGLE)


@pytest.mark.parametrize("coverage", [0.123, 0.8, 1.0])
def test_risk_at_coverage(judged: Judged, coverage: float) -> None:
    theirs = peer(f"{TU}.risk_coverage").RiskAtxCov(cov_threshold=coverage)
    theirs.update(judged.probabilities, judged.target)
    ours = float(risk_at_coverage(judged.confidence, judged.correct, coverage=coverage))
    assert float(theirs.compute()) == pytest.approx(ours, rel=SINGLE)


def test_coverage_is_not_rounded_up_by_floating_point() -> None:
    """0.07 * 100 exceeds 7 in floating point: TorchUncertainty accepts an eighth prediction, this library seven."""
    confidence = torch.linspace(1.0, 0.6, 100, dtype=torch.float64)
    correct = torch.arange(100) < 7
    theirs = peer(f"{TU}.risk_coverage").RiskAtxCov(cov_threshold=0.07)
    theirs.update(torch.stack([confidence, 1.0 - confidence], dim=1), (~correct).long())
    assert float(theirs.compute()) == pytest.approx(1 / 8)
    assert float(risk_at_coverage(confidence, correct, coverage=0.07)) == 0.0


@pytest.mark.parametrize("sizes", [(1, 1), (19, 40), (20, 21), (300, 100)])
@pytest.mark.filterwarnings("ignore:Metric `FPR:UserWarning")
def test_unknowns(sizes: tuple[int, int], rng: Rng) -> None:
    """pytorch-ood treats unknown samples as positive; TorchUncertainty takes an argument."""
    known, unknown = (torch.from_numpy(rng.normal(size=size)) for size in sizes)
    known += 1.0
    both = torch.cat([known, unknown])
    labels = torch.cat([torch.zeros(len(known)), torch.ones(len(unknown))]).long()
    functional = peer("pytorch_ood.metrics.functional")
    assert float(functional.auroc(-both, -labels)) == pytest.approx(float(unknown_auroc(known, unknown)))
    refused = float(fpr95(known, unknown, positive="unknown"))
    assert float(functional.fpr_at_tpr(-both, -labels)) == pytest.approx(refused)
    for scores, positive, expected in ((-both, 1, refused), (both, 0, float(fpr95(known, unknown)))):
        theirs = peer(f"{TU}.fpr").FPRx(recall_level=0.95, pos_label=positive)
        theirs.update(scores, labels)
        assert float(theirs.compute()) == pytest.approx(expected, rel=SINGLE)


def test_brier(judged: Judged) -> None:
    """TorchUncertainty sums over all classes by default; its option for the top class is our definition."""
    theirs = peer(f"{TU}.brier_score").BrierScore(num_classes=5, top_class=True)
    theirs.update(judged.probabilities, judged.target)
    assert float(theirs.compute()) == pytest.approx(float(brier(judged.confidence, judged.correct)), rel=SINGLE)


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_ece_of_equal_width(judged: Judged, bins: int) -> None:
    """torchmetrics, which TorchUncertainty uses, closes bins on the other side; this matters only on the edges."""
    theirs = multiclass_calibration_error(judged.probabilities, judged.target, num_classes=5, n_bins=bins)
    # torchmetrics sums in float32, and the error is a difference of sums.
    ours = float(ece(judged.confidence, judged.correct, bins=bins))
    assert float(theirs) == pytest.approx(ours, rel=SINGLE, abs=1e-6)


@pytest.mark.parametrize("bins", [1, 8, 20])
def test_ece_of_equal_mass(bins: int, rng: Rng) -> None:
    """The bins agree if their number divides the number of predictions; else the last bin of pytorch-ood is larger."""
    confidence = torch.from_numpy(rng.random(400))
    correct = torch.from_numpy(rng.random(400)) < confidence
    functional = peer("pytorch_ood.metrics.functional")
    theirs = functional.calibration_error(confidence, correct, p="1", beta=400 // bins)
    assert theirs == pytest.approx(float(ece(confidence, correct, bins=bins, binning="mass")), rel=1e-12)
