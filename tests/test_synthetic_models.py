"""Synthetic models of the benchmark: counts as in a partition, and points in no, one and several ellipsoids."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from synthetic_models import synthetic, training_counts

from sepc_torch import Rule
from sepc_torch.ellipsoid import Ellipsoid
from sepc_torch.partitioning.cells import ledger


# Fewer and more points than the ledger keeps of a class.
@pytest.mark.parametrize("points", [100, 3000])
def test_counts_are_those_of_the_ledger(rng: np.random.Generator, points: int) -> None:
    model = synthetic(7, 3, int(rng.integers(2**31)), "cpu", points=200)
    z = model.points(points, int(rng.integers(2**31))).double()
    labels = np.concatenate([np.arange(7), rng.choice(7, size=points - 7, p=np.arange(1, 8) / 28)])
    totals = np.bincount(labels)
    found = training_counts(
        model.bank("torch", torch.float64)(z),
        model.training.codes,
        torch.from_numpy(labels),
        torch.from_numpy(totals),
    )
    ellipsoids = [
        Ellipsoid(center, whitener)
        for center, whitener in zip(model.centers.double().numpy(), model.whiteners.double().numpy(), strict=True)
    ]
    expected = ledger(ellipsoids, z.numpy(), labels, 7)
    np.testing.assert_array_equal(found.cells, expected.cells)
    np.testing.assert_array_equal(found.counts, expected.counts)
    np.testing.assert_array_equal(found.counts_at, expected.counts_at)
    np.testing.assert_allclose(found.sorted_distances, expected.sorted_distances, rtol=1e-6)
    inside = np.stack([ellipsoid.contains(z.numpy()) for ellipsoid in ellipsoids], axis=1)
    np.testing.assert_array_equal(found.held, inside.T.astype(int) @ np.eye(7, dtype=int)[labels])


@pytest.mark.parametrize(("count", "dim"), [(10, 8), (40, 8), (10, 64)])
def test_points_lie_in_none_one_and_several(rng: np.random.Generator, count: int, dim: int) -> None:
    seed = int(rng.integers(2**31))
    model = synthetic(count, dim, seed, "cpu", points=2000)
    out = model.sepc()(model.points(2000, seed + 1))
    none, one = (float((out.rule == rule).double().mean()) for rule in (Rule.OUTSIDE, Rule.SINGLE))
    assert 0.25 < none < 0.5
    assert 0.2 < one < 0.45
    again = synthetic(count, dim, seed, "cpu", points=2000)
    assert torch.equal(again.whiteners, model.whiteners)


def test_one_ellipsoid_leaves_a_class_without(rng: np.random.Generator) -> None:
    model = synthetic(1, 5, int(rng.integers(2**31)), "cpu", points=300)
    out = model.sepc()(model.points(100, 1))
    assert len(model.totals) == 2
    assert bool(torch.isinf(out.margin[out.label == 0]).all())
