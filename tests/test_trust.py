"""Bayes trust: the paper's worked examples and its limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sepc_torch import bayes_trust, odds, posterior


def one(counts: list[int], totals: list[int], label: int) -> float:
    return float(bayes_trust(torch.tensor([counts]), torch.tensor(totals), torch.tensor([label])))


def test_the_papers_worked_example() -> None:
    """With n, m = 1, 5 of N, M = 547, 256 and label -1 the paper prints 73.7 %: its prior counts the point twice."""
    assert one([1, 5], [547, 256], 1) == pytest.approx(6 * 257 / (6 * 257 + 1 * 547))
    assert one([1, 5], [547, 256], 1) == pytest.approx(0.738, abs=5e-4)


@pytest.mark.parametrize(("n", "impure", "total", "other"), [(30, 2, 100, 90), (5, 5, 50, 50), (1, 0, 10, 3)])
def test_rule_1_as_the_paper_simplifies_it(n: int, impure: int, total: int, other: int) -> None:
    """Equation (9): 1 / (1 + n_Imp M / ((n + 1)(N + 1)))."""
    assert one([n, impure], [total, other], 0) == pytest.approx(1 / (1 + impure * other / ((n + 1) * (total + 1))))


def test_limits() -> None:
    assert one([40, 0], [100, 100], 0) == 1.0
    assert one([0, 40], [100, 100], 0) < 0.03
    # Equal counts of equal classes: the odds are nearly even, the point itself tips them.
    assert one([1000, 1000], [5000, 5000], 0) == pytest.approx(0.5, abs=1e-3)


def test_many_classes_and_given_labels(rng: np.random.Generator) -> None:
    counts = torch.from_numpy(rng.integers(0, 50, (20, 5)))
    totals = torch.from_numpy(rng.integers(50, 5000, 5))
    for label in range(5):
        given = torch.full((20,), label)
        found = posterior(counts, totals, given)
        assert found.sum(dim=1).numpy() == pytest.approx(np.ones(20))
        for i in range(20):
            weight = [
                (int(n) + (c == label)) * (int(t) + (c == label))
                for c, (n, t) in enumerate(zip(counts[i], totals, strict=True))
            ]
            assert found[i].numpy() == pytest.approx(np.array(weight) / sum(weight))
        assert torch.equal(bayes_trust(counts, totals, given), found[:, label])
        others = found.clone()
        others[:, label] = 0
        assert odds(found, given).numpy() == pytest.approx((found[:, label] / others.amax(1)).numpy())


def test_counts_beyond_float32() -> None:
    big = 30_000_000
    assert one([big, 1], [2 * big, 2 * big], 0) == pytest.approx(1 - 1 / big, rel=1e-12)
