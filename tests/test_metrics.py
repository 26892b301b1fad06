"""Metrics: brute force over all orders of ties, closed forms, identities, torchmetrics classes, and input errors."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import brier_score_loss, roc_auc_score
from torch import Tensor

from sepc_torch.metrics import (
    augrc,
    aurc,
    brier,
    coverage_at_risk,
    eaurc,
    ece,
    failure_auroc,
    fpr95,
    naurc,
    optimal_aurc,
    reliability,
    risk_at_coverage,
    scod_augrc,
    scod_aurc,
    unknown_auroc,
)
from sepc_torch.metrics import torchmetrics as as_classes
from sepc_torch.metrics.selective import check_flags

Rng = np.random.Generator


def over_all_orders(confidence: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Mean selective risks over every order that sorts the confidences descending."""
    curves = []
    for order in itertools.permutations(range(len(confidence))):
        if (np.diff(confidence[list(order)]) <= 0).all():
            losses = loss[list(order)]
            curves.append(losses.cumsum() / np.arange(1, len(losses) + 1))
    return np.mean(curves, axis=0)


def scored(rng: Rng, count: int, distinct: int | None = None) -> tuple[Tensor, Tensor]:
    """Confidences that correlate with correctness; ``distinct`` rounds them, which makes ties."""
    correct = rng.random(count) < 0.7
    confidence = rng.normal(size=count) + correct
    if distinct is not None:
        confidence = np.round(confidence * distinct / 4) / distinct
    return torch.from_numpy(confidence), torch.from_numpy(correct)


def test_ties_give_the_mean_over_all_orders(rng: Rng) -> None:
    for _ in range(5):
        confidence, correct = rng.integers(0, 3, 7) / 4, rng.random(7) < 0.6
        unknown = rng.random(7) < 0.3
        given = torch.from_numpy(confidence), torch.from_numpy(correct)
        risks = over_all_orders(confidence, ~correct)
        assert float(aurc(*given)) == pytest.approx(risks.mean(), rel=1e-12)
        for accepted in range(1, 8):
            found = risk_at_coverage(*given, coverage=accepted / 7)
            assert float(found) == pytest.approx(risks[accepted - 1], rel=1e-12)
        joint = over_all_orders(confidence, np.where(unknown, 0.3, 0.7 * ~correct))
        found = scod_aurc(*given, torch.from_numpy(unknown), unknown_cost=0.3)
        assert float(found) == pytest.approx(joint.mean(), rel=1e-12)
        # The generalised risk is the selective risk times coverage; its first trapezoid starts at coverage 0.
        general = np.concatenate([[0.0], joint * np.arange(1, 8) / 7])
        area = scod_augrc(*given, torch.from_numpy(unknown), unknown_cost=0.3)
        assert float(area) == pytest.approx(np.trapezoid(general, dx=1 / 7), rel=1e-12)


def test_constant_and_perfect_scores(rng: Rng) -> None:
    correct = torch.from_numpy(rng.random(500) < 0.8)
    wrong = int((~correct).sum())
    assert float(aurc(torch.ones(500), correct)) == pytest.approx(wrong / 500)
    assert float(naurc(torch.ones(500), correct)) == pytest.approx(1.0)
    # The best ranking accepts all right predictions first; the errors come last.
    harmonic = 1.0 / np.arange(1, 501)
    best = (wrong - (500 - wrong) * harmonic[500 - wrong :].sum()) / 500
    assert float(optimal_aurc(correct)) == pytest.approx(best)
    assert float(eaurc(correct.float(), correct)) == pytest.approx(0.0, abs=1e-15)
    assert float(naurc(correct.float(), correct)) == pytest.approx(0.0, abs=1e-12)
    assert float(augrc(correct.float(), correct)) == pytest.approx((wrong / 500) ** 2 / 2)
    assert float(risk_at_coverage(correct.float(), correct, coverage=1.0)) == pytest.approx(wrong / 500)
    assert float(coverage_at_risk(correct.float(), correct, risk=0.0)) == pytest.approx(1 - wrong / 500)


@pytest.mark.parametrize("value", [True, False])
def test_all_right_or_all_wrong_gives_nan(value: bool) -> None:
    correct = torch.full((5,), value)
    assert naurc(torch.rand(5), correct).isnan()
    assert failure_auroc(torch.rand(5), correct).isnan()
    assert float(aurc(torch.rand(5), correct)) == (0.0 if value else 1.0)


@pytest.mark.parametrize("distinct", [None, 3])
def test_augrc_is_a_function_of_auroc(rng: Rng, distinct: int | None) -> None:
    confidence, correct = scored(rng, 300, distinct)
    risk = float((~correct).double().mean())
    area = float(failure_auroc(confidence, correct))
    assert area == pytest.approx(roc_auc_score(correct, confidence))
    assert float(augrc(confidence, correct)) == pytest.approx(risk * (1 - risk) * (1 - area) + risk**2 / 2)


def test_metrics_depend_only_on_the_order(rng: Rng) -> None:
    confidence, correct = scored(rng, 300)
    for metric in (aurc, eaurc, naurc, augrc, failure_auroc):
        assert float(metric(confidence.exp(), correct)) == pytest.approx(float(metric(confidence, correct)), rel=1e-12)


def test_coverage_at_risk_keeps_ties_together(rng: Rng) -> None:
    confidence, correct = scored(rng, 200, distinct=5)
    for risk in (0.05, 0.2, 0.3, 1.0):
        best = 0.0
        for threshold in confidence.unique():
            accepted = confidence >= threshold
            if float((~correct[accepted]).double().mean()) <= risk:
                best = max(best, float(accepted.double().mean()))
        assert float(coverage_at_risk(confidence, correct, risk)) == pytest.approx(best)


def test_fpr95_by_both_conventions(rng: Rng) -> None:
    known = torch.from_numpy(np.round(rng.normal(size=137) + 1, 1))
    unknown = torch.from_numpy(np.round(rng.normal(size=91), 1))
    truth = np.r_[np.ones(137), np.zeros(91)]
    assert float(unknown_auroc(known, unknown)) == pytest.approx(roc_auc_score(truth, torch.cat([known, unknown])))
    thresholds = torch.cat([known, unknown]).unique()
    accepting = [t for t in thresholds if float((known >= t).double().mean()) >= 0.95]
    assert float(fpr95(known, unknown)) == pytest.approx(min(float((unknown >= t).double().mean()) for t in accepting))
    refusing = [t for t in thresholds if float((unknown <= t).double().mean()) >= 0.95]
    best = min(float((known <= t).double().mean()) for t in refusing)
    assert float(fpr95(known, unknown, positive="unknown")) == pytest.approx(best)


def test_calibrated_probabilities_have_a_small_error(rng: Rng) -> None:
    p = torch.from_numpy(rng.random(40_000))
    correct = torch.from_numpy(rng.random(40_000)) < p
    assert float(ece(p, correct)) < 0.02
    assert float(ece(p, correct, binning="mass")) < 0.02
    assert float(ece(p * 0.5, correct)) == pytest.approx(0.25, abs=0.02)
    assert float(brier(p, correct)) == pytest.approx(brier_score_loss(correct, p))


@pytest.mark.parametrize("binning", ["width", "mass"])
def test_ece_bin_by_bin(rng: Rng, binning: Any) -> None:
    p, correct = np.round(rng.random(300), 2), rng.random(300) < 0.5
    if binning == "width":
        bin_of = np.maximum(np.ceil(np.round(p * 10, 9)), 1) - 1
    else:  # tied predictions share the bin of the first
        order = np.sort(p)
        bin_of = np.array([np.searchsorted(order, value) * 10 // 300 for value in p])
    wanted = sum(abs(correct[bin_of == b].sum() - p[bin_of == b].sum()) for b in range(10)) / 300
    assert float(ece(torch.from_numpy(p), torch.from_numpy(correct), 10, binning)) == pytest.approx(wanted)


def test_reliability_by_value(rng: Rng) -> None:
    p, correct = torch.from_numpy(rng.integers(1, 5, 4000) / 5), torch.from_numpy(rng.random(4000))
    found = reliability(p, correct < p)
    assert found.confidence.tolist() == [0.2, 0.4, 0.6, 0.8]
    assert int(found.size.sum()) == 4000
    assert ((found.low < found.right) & (found.right < found.high)).all()
    # Wilson's limits solve |right - x| = z sqrt(x (1 - x) / n).
    for limit in (found.low, found.high):
        assert torch.allclose((found.right - limit).abs(), 1.959964 * (limit * (1 - limit) / found.size).sqrt())


METRICS: list[tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = [
    (as_classes.AURC, aurc, {}),
    (as_classes.EAURC, eaurc, {}),
    (as_classes.NAURC, naurc, {}),
    (as_classes.AUGRC, augrc, {}),
    (as_classes.FailureAUROC, failure_auroc, {}),
    (as_classes.RiskAtCoverage, risk_at_coverage, {"coverage": 0.6}),
    (as_classes.CoverageAtRisk, coverage_at_risk, {"risk": 0.2}),
    (as_classes.ECE, ece, {"bins": 7, "binning": "mass"}),
    (as_classes.Brier, brier, {}),
]


@pytest.mark.parametrize(("metric", "function", "options"), METRICS)
def test_classes_agree_with_the_functions_over_batches(
    rng: Rng, metric: Callable[..., Any], function: Callable[..., Any], options: dict[str, Any]
) -> None:
    confidence, correct = scored(rng, 90, distinct=6)
    confidence = confidence.sigmoid()
    made = metric(**options)
    for part in torch.arange(90).split(40):
        made.update(confidence[part], correct[part])
    assert float(made.compute()) == pytest.approx(float(function(confidence, correct, **options)), rel=1e-12)
    made.reset()
    made.update(confidence[:50], correct[:50])
    assert float(made.compute()) == pytest.approx(float(function(confidence[:50], correct[:50], **options)), rel=1e-12)


def test_classes_with_unknowns(rng: Rng) -> None:
    confidence, correct = scored(rng, 80)
    unknown = torch.from_numpy(rng.random(80) < 0.4)
    for metric, function in ((as_classes.SCODAURC, scod_aurc), (as_classes.SCODAUGRC, scod_augrc)):
        made = metric(unknown_cost=0.4)
        for part in torch.arange(80).split(30):
            made.update(confidence[part], correct[part], unknown[part])
        assert float(made.compute()) == pytest.approx(float(function(confidence, correct, unknown, 0.4)))
    for found, wanted in (
        (as_classes.UnknownAUROC(), unknown_auroc(confidence[~unknown], confidence[unknown])),
        (as_classes.FPR95("unknown"), fpr95(confidence[~unknown], confidence[unknown], "unknown")),
    ):
        found.update(confidence, unknown)
        assert float(found.compute()) == pytest.approx(float(wanted))


@pytest.mark.slow
def test_classes_gather_over_processes(rng: Rng) -> None:
    """Two processes with different numbers of rows compute the value of one process with all rows."""
    script = textwrap.dedent(
        """
        import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
        from sepc_torch.metrics import aurc
        from sepc_torch.metrics.torchmetrics import AURC

        def work(rank, path):
            dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
            g = torch.Generator().manual_seed(int(sys.argv[1]))
            confidence, correct = torch.rand(50, generator=g), torch.rand(50, generator=g) < 0.7
            metric = AURC()
            mine = slice(0, 31) if rank == 0 else slice(31, 50)
            metric.update(confidence[mine], correct[mine])
            assert abs(float(metric.compute() - aurc(confidence.double(), correct))) < 1e-12
            dist.destroy_process_group()

        if __name__ == "__main__":
            import tempfile, os
            with tempfile.TemporaryDirectory() as folder:
                mp.start_processes(work, (os.path.join(folder, "meet"),), nprocs=2, start_method="fork")
            print("right")
        """
    )
    command = [sys.executable, "-c", script, str(int(rng.integers(2**31)))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "right", done.stderr[-2000:]


@pytest.mark.parametrize("coverage", [0.0, 1.1, -0.5])
def test_fractions_out_of_range_are_rejected(coverage: float) -> None:
    confidence, correct = torch.rand(3), torch.ones(3, dtype=torch.bool)
    with pytest.raises(ValueError, match="coverage must be above 0 and at most 1"):
        risk_at_coverage(confidence, correct, coverage)
    if coverage:
        with pytest.raises(ValueError, match="risk must lie between 0 and 1"):
            coverage_at_risk(confidence, correct, coverage)
        with pytest.raises(ValueError, match="unknown_cost must lie between 0 and 1"):
            scod_aurc(confidence, correct, correct, coverage)


def test_input_errors() -> None:
    right = torch.tensor([True, True])
    with pytest.raises(ValueError, match="NaN"):
        aurc(torch.tensor([0.5, float("nan")]), right)
    with pytest.raises(ValueError, match="no predictions"):
        aurc(torch.zeros(0), torch.zeros(0, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"between 0 and 1, got values from 0\.5 to 3\.0"):
        ece(torch.tensor([0.5, 3.0]), right)
    with pytest.raises(ValueError, match=r"confidences of unknown samples must have shape \(n,\), n >= 1, got \(0,\)"):
        fpr95(torch.rand(3), torch.zeros(0))


def test_flags_must_be_boolean() -> None:
    """Calls check_flags directly, because the tests check annotations first. ~1 is -2, a silent wrong result."""
    for flags in (torch.tensor([1, 0]), torch.tensor([1.0, 0.0]), [True, False]):
        with pytest.raises(TypeError, match="boolean tensor"):
            check_flags(flags)
    check_flags(torch.tensor([True]))
