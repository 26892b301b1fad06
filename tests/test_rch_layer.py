"""``RCHLayer`` against the offline solver, finite differences and closed forms."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from sepc_torch import RCHLayer, reduced_hull_points

Rng = np.random.Generator

# Caps whose inverse is not an integer: a vertex where exactly 1 / cap points share the weight is a kink.
CASES = [(15, 12, 2, None), (15, 12, 2, 0.23), (30, 25, 4, 0.11), (20, 20, 3, 1.0), (25, 25, 3, None)]


def pair(rng: Rng, first: int, second: int, dim: int) -> tuple[Tensor, Tensor]:
    """Two sets with disjoint hulls."""
    x, y = rng.normal(size=(first, dim)), rng.normal(size=(second, dim))
    direction = rng.normal(size=dim)
    direction /= np.linalg.norm(direction)
    shift = (y @ direction).max() - (x @ direction).min() + 0.5
    return torch.from_numpy(x + shift * direction), torch.from_numpy(y)


@pytest.mark.parametrize(("first", "second", "dim", "cap"), CASES)
def test_equals_the_offline_solver(rng: Rng, first: int, second: int, dim: int, cap: float | None) -> None:
    x, y = pair(rng, first, second, dim)
    found = RCHLayer(first, second, dim, cap)(x, y)
    offline = reduced_hull_points(x.numpy(), y.numpy(), cap=cap)
    assert (found.c - found.d).numpy() == pytest.approx(offline.c - offline.d, abs=1e-5)
    assert float(found.distance()) == pytest.approx(np.linalg.norm(offline.c - offline.d), rel=1e-6)
    for weights in (found.u, found.v):
        assert float(weights.sum()) == pytest.approx(1.0)
        assert float(weights.min()) >= -1e-7
        assert float(weights.max()) <= (cap or 1 / min(first, second)) + 1e-7


@pytest.mark.parametrize(("first", "second", "dim", "cap"), CASES)
def test_gradient_equals_finite_differences(rng: Rng, first: int, second: int, dim: int, cap: float | None) -> None:
    layer = RCHLayer(first, second, dim, cap)
    a = rng.normal(size=dim)

    def offline(x: Tensor, y: Tensor) -> float:
        found = reduced_hull_points(x.numpy(), y.numpy(), cap=cap)
        return float(a @ (found.c - found.d))

    step, errors = 1e-5, []
    for _ in range(5):  # a step may cross a kink, where the difference quotient is wrong
        x, y = pair(rng, first, second, dim)
        dx, dy = (torch.from_numpy(rng.normal(size=tuple(z.shape))) for z in (x, y))
        measured = (offline(x + step * dx, y + step * dy) - offline(x - step * dx, y - step * dy)) / (2 * step)
        found = layer(x.requires_grad_(), y.requires_grad_())
        gx, gy = torch.autograd.grad(((found.c - found.d) * torch.from_numpy(a)).sum(), (x, y))
        errors.append(abs(float((gx * dx).sum() + (gy * dy).sum()) - measured) / max(1.0, abs(measured)))
    assert np.median(errors) <= 1e-5


def test_distance_has_the_gradient_of_the_envelope_theorem(rng: Rng) -> None:
    x, y = (z.requires_grad_() for z in pair(rng, 20, 15, 3))
    found = RCHLayer(20, 15, 3, 0.3)(x, y)
    gx, gy = torch.autograd.grad(found.distance(), (x, y))
    normal = ((found.c - found.d) / found.distance()).detach()
    torch.testing.assert_close(gx, found.u.detach()[:, None] * normal, atol=1e-4, rtol=0)
    torch.testing.assert_close(gy, -found.v.detach()[:, None] * normal, atol=1e-4, rtol=0)


def test_a_batch_equals_its_pairs_and_shifts_do_not_change_the_difference(rng: Rng) -> None:
    pairs = [pair(rng, 12, 10, 3) for _ in range(3)]
    x, y = (torch.stack(z) for z in zip(*pairs, strict=True))
    layer = RCHLayer(12, 10, 3, 0.27)
    found = layer(x, y)
    shift = torch.full((3,), 1e4, dtype=torch.float64)
    moved = layer(x + shift, y + shift)
    for number, (a, b) in enumerate(pairs):
        torch.testing.assert_close(
            found.c[number] - found.d[number], (lambda r: r.c - r.d)(layer(a, b)), atol=1e-6, rtol=0
        )
    torch.testing.assert_close(moved.c - moved.d, found.c - found.d, atol=1e-6, rtol=0)


def test_dtypes_no_grad_and_state(rng: Rng) -> None:
    x, y = (z.float() for z in pair(rng, 10, 8, 2))
    layer = RCHLayer(10, 8, 2, 0.3)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(x, y)
    assert found.c.dtype == torch.float32
    assert not layer.state_dict()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(other(x, y).c, found.c)


@pytest.mark.parametrize("cap", [None, 0.5])
def test_a_batch_of_no_pairs(cap: float | None) -> None:
    x, y = torch.zeros(0, 5, 2, requires_grad=True), torch.zeros(0, 4, 2)
    found = RCHLayer(5, 4, 2, cap)(x, y)
    assert [tuple(t.shape) for t in found] == [(0, 2), (0, 2), (0, 5), (0, 4)]
    found.distance().sum().backward()


def test_raises_no_third_party_warning_and_refuses_second_derivatives(rng: Rng) -> None:
    x, y = pair(rng, 10, 8, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = RCHLayer(10, 8, 2, 0.3)(x.requires_grad_(), y)
        (first,) = torch.autograd.grad(found.u.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        first.square().sum().backward()


def test_intersecting_hulls_are_an_error(rng: Rng) -> None:
    x = torch.from_numpy(rng.normal(size=(2, 30, 2)))
    y = torch.from_numpy(rng.normal(size=(2, 30, 2)))
    y[1] += 100.0
    with pytest.raises(ValueError, match=r"pairs \[0\] of the batch intersect.*smaller cap"):
        RCHLayer(30, 30, 2, 0.9)(x, y)


def test_refuses_bad_input(rng: Rng) -> None:
    with pytest.raises(ValueError, match=r"cap=0.05 is below 1/min\(first, second\) = 0.1"):
        RCHLayer(10, 20, 2, cap=0.05)
    layer = RCHLayer(4, 5, 2)
    x, y = pair(rng, 4, 5, 2)
    with pytest.raises(ValueError, match=r"y must have shape \(5, 2\), or \(B, 5, 2\).*got \(4, 2\)"):
        layer(x, y[:4])
    with pytest.raises(ValueError, match="x holds NaN or infinity"):
        layer(x * torch.nan, y)
