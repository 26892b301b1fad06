"""Metrics of selective prediction: against brute force over all orders of ties, closed forms, and bad input."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from sepc_torch.metrics import aurc, risk_at_coverage


def over_all_orders(confidence: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """The mean selective risks over every order that sorts the confidences."""
    curves = []
    for order in itertools.permutations(range(len(confidence))):
        if (np.diff(confidence[list(order)]) <= 0).all():
            errors = ~correct[list(order)]
            curves.append(errors.cumsum() / np.arange(1, len(errors) + 1))
    return np.mean(curves, axis=0)


def test_ties_are_an_expectation(rng: np.random.Generator) -> None:
    for _ in range(10):
        confidence, correct = rng.integers(0, 3, 7) / 4, rng.random(7) < 0.6
        risks = over_all_orders(confidence, correct)
        given = torch.from_numpy(confidence), torch.from_numpy(correct)
        assert float(aurc(*given)) == pytest.approx(risks.mean(), rel=1e-12)
        for accepted in range(1, 8):
            found = risk_at_coverage(*given, coverage=accepted / 7)
            assert float(found) == pytest.approx(risks[accepted - 1], rel=1e-12)


def test_constant_and_perfect_scores(rng: np.random.Generator) -> None:
    correct = torch.from_numpy(rng.random(500) < 0.8)
    errors = int((~correct).sum())
    assert float(aurc(torch.ones(500), correct)) == pytest.approx(errors / 500)
    # The oracle accepts all the right ones first: only the last places err.
    harmonic = 1.0 / np.arange(1, 501)
    best = (errors - (500 - errors) * harmonic[500 - errors :].sum()) / 500
    assert float(aurc(correct.float(), correct)) == pytest.approx(best)
    assert float(risk_at_coverage(correct.float(), correct, coverage=1.0)) == pytest.approx(errors / 500)


def test_only_the_order_matters(rng: np.random.Generator) -> None:
    confidence, correct = torch.from_numpy(rng.standard_normal(300)), torch.from_numpy(rng.random(300) < 0.7)
    assert float(aurc(confidence.exp(), correct)) == pytest.approx(float(aurc(confidence, correct)), rel=1e-12)


@pytest.mark.parametrize("coverage", [0.0, 1.1, -0.5])
def test_coverage_is_a_share(coverage: float) -> None:
    with pytest.raises(ValueError, match="coverage is a share"):
        risk_at_coverage(torch.rand(3), torch.ones(3, dtype=torch.bool), coverage)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="NaN"):
        aurc(torch.tensor([0.5, float("nan")]), torch.tensor([True, True]))
    with pytest.raises(ValueError, match="no predictions"):
        aurc(torch.zeros(0), torch.zeros(0, dtype=torch.bool))
