"""Bayes trust: the paper's worked examples, exact arithmetic and limits."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from sepc_torch import bayes_trust, odds, posterior
from sepc_torch.model.trust import trust_from_sums


def one(counts: list[int], totals: list[int], label: int) -> float:
    return float(bayes_trust(torch.tensor([counts]), torch.tensor(totals), torch.tensor([label])))


def test_the_papers_worked_example() -> None:
    """For n, m = 1, 5, N, M = 547, 256 and label -1 the paper prints 73.7 %: its prior counts the point twice."""
    assert one([1, 5], [547, 256], 1) == pytest.approx(6 * 257 / (6 * 257 + 1 * 547))
    assert one([1, 5], [547, 256], 1) == pytest.approx(0.738, abs=5e-4)


@pytest.mark.parametrize(("n", "impure", "total", "other"), [(30, 2, 100, 90), (5, 5, 50, 50), (1, 0, 10, 3)])
def test_rule_1_as_the_paper_simplifies_it(n: int, impure: int, total: int, other: int) -> None:
    """Equation (9): 1 / (1 + n_Imp M / ((n + 1)(N + 1)))."""
    assert one([n, impure], [total, other], 0) == pytest.approx(1 / (1 + impure * other / ((n + 1) * (total + 1))))


def test_limits() -> None:
    assert one([40, 0], [100, 100], 0) == 1.0
    assert one([0, 40], [100, 100], 0) < 0.03
    # Equal counts in classes of equal size: the trust exceeds 1/2 only by the count of the point itself.
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


def test_trust_from_sums_is_the_rounded_fraction(rng: np.random.Generator) -> None:
    """Any shape, broadcast totals and narrow integers give the correctly rounded quotient."""
    counts = torch.from_numpy(rng.integers(0, 60_000, (4, 6, 3)))
    totals = torch.tensor([60_000, 70_000, 90_000])
    weighted_sum = (counts * totals).sum(dim=2, keepdim=True)
    found = trust_from_sums(counts.int(), totals.int(), weighted_sum)
    assert found.shape == counts.shape
    assert found.dtype == torch.float64
    for count, total, s, trust in zip(
        counts.flatten().tolist(),
        totals.expand_as(counts).flatten().tolist(),
        weighted_sum.expand_as(counts).flatten().tolist(),
        found.flatten().tolist(),
        strict=True,
    ):
        own = (count + 1) * (total + 1)
        assert trust == float(Fraction(own, own + s - count * total))


def test_counts_beyond_float32() -> None:
    big = 30_000_000
    assert one([big, 1], [2 * big, 2 * big], 0) == pytest.approx(1 - 1 / big, rel=1e-12)
