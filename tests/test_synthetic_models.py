"""Synthetic models of the benchmark: equal seeds give equal models, with points in no, one and several ellipsoids."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from experiments.speed.synthetic_models import synthetic
from sepc_torch import Rule


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
