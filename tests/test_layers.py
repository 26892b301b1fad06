"""``MVELayer``: optimality, gradients, masks, both backends, flat sets, floor and smoothing."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sepc_torch import Ellipsoid, MVELayer, minimum_volume_ellipsoid
from sepc_torch.data.options import check_count, check_not_negative
from sepc_torch.layers import RefittedEllipsoid
from sepc_torch.layers.dual import FlooredForm, Form, PlainForm
from sepc_torch.layers.implicit import solve
from sepc_torch.layers.interior_point import Solution, crossover, interior_point, screened
from sepc_torch.layers.native import whiten

Rng = np.random.Generator

SIZES = [(12, 1), (12, 2), (20, 3), (30, 5), (60, 10)]


def gaussian(rng: Rng, *shape: int) -> Tensor:
    """Correlated points (..., M, D) away from the origin."""
    dim = shape[-1]
    return torch.from_numpy(rng.normal(size=shape) @ rng.normal(size=(dim, dim)) + 3 * rng.normal(size=dim))


def some_mask(rng: Rng, *shape: int, at_least: int) -> Tensor:
    mask = torch.from_numpy(rng.random(shape) < 0.7)
    mask[..., :at_least] = True
    return mask


def functional(rng: Rng, e: RefittedEllipsoid) -> Callable[[RefittedEllipsoid], Tensor]:
    """A random linear function of centre and whitener."""
    a, b = (torch.from_numpy(rng.normal(size=tuple(t.shape))) for t in (e.whitener, e.center))
    return lambda e: (a * e.whitener).sum() + (b * e.center).sum()


def gradient(
    layer: MVELayer, z: Tensor, value: Callable[[RefittedEllipsoid], Tensor], mask: Tensor | None = None
) -> Tensor:
    z = z.clone().requires_grad_()
    value(layer(z, mask)).backward()
    assert z.grad is not None
    return z.grad


def everything(e: RefittedEllipsoid) -> tuple[Tensor, ...]:
    return e.center, e.whitener, e.log_volume()


def whitened(z: Tensor) -> tuple[Tensor, Tensor]:
    mask = torch.ones(z.shape[:2], dtype=torch.bool)
    return whiten(z, mask, z.dtype).coordinates(z, mask), mask


def solution(z: Tensor) -> Solution:
    y, mask = whitened(z)
    return solve(PlainForm, y, mask, 0.0)


@pytest.mark.parametrize(("count", "dim"), [*SIZES, (500, 4), (200, 30)])
def test_equals_the_offline_solver(rng: Rng, count: int, dim: int) -> None:
    z = gaussian(rng, 3, count, dim)
    e = MVELayer(count, dim)(z)
    for points, center, whitener in zip(z, e.center, e.whitener, strict=True):
        offline = minimum_volume_ellipsoid(points.numpy(), tol=1e-10)
        # The offline solver stops at a gap of 1e-10. The error of weights, unlike that of volumes, is its square root.
        scale = float(np.abs(offline.whitener).max())
        assert whitener.numpy() == pytest.approx(offline.whitener, abs=1e-5 * scale)
        assert center.numpy() == pytest.approx(offline.center, abs=1e-5 * float(points.abs().max()))
        assert -float(torch.logdet(whitener)) == pytest.approx(offline.log_volume, abs=1e-8)


@pytest.mark.parametrize(("count", "dim"), [*SIZES, (300, 4), (100, 30)])
def test_satisfies_johns_conditions_to_rounding(rng: Rng, count: int, dim: int) -> None:
    r"""Multipliers on the surface with :math:`\sum u v = 0` and :math:`\sum u v v^T = I` in v = W (z - c)."""
    z = gaussian(rng, 4, count, dim)
    found = solution(z)
    e = MVELayer(count, dim)(z)
    assert found.solved.all()
    assert (found.u >= 0).all()
    assert e.distance(z).max() <= 1 + 1e-10
    assert e.distance(z)[found.u > 0].sub(1).abs().max() <= 1e-9
    v = (z - e.center.unsqueeze(1)) @ e.whitener.mT
    torch.testing.assert_close(found.u.unsqueeze(1) @ v, torch.zeros(4, 1, dim).double(), atol=1e-9, rtol=0)
    moment = (found.u.unsqueeze(-1) * v).mT @ v
    torch.testing.assert_close(moment, torch.eye(dim).double().expand(4, -1, -1), atol=1e-9, rtol=0)


@pytest.mark.parametrize(("count", "dim"), [(30, 2), (40, 5), (100, 10), (250, 3), (60, 20)])
def test_batched_and_one_by_one_agree(rng: Rng, count: int, dim: int) -> None:
    """The batched interior-point method, which GPUs use, finds the weights of the offline solver (here on the CPU)."""
    y, mask = whitened(gaussian(rng, 5, count, dim))
    batched = crossover(PlainForm, y, mask, screened(PlainForm, y, mask))
    assert batched.solved.all()
    torch.testing.assert_close(batched.u, solve(PlainForm, y, mask, 0.0).u, atol=1e-10, rtol=0)


@pytest.mark.slow
def test_a_working_set_does_not_change_the_weights(rng: Rng) -> None:
    y, mask = whitened(gaussian(rng, 2, 600, 4))
    mask = mask & some_mask(rng, 2, 600, at_least=10)
    y = y * mask.unsqueeze(-1)
    few, all_points = (crossover(PlainForm, y, mask, f(PlainForm, y, mask)) for f in (screened, interior_point))
    assert few.solved.all()
    torch.testing.assert_close(few.u, all_points.u, atol=1e-10, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "dim"), SIZES)
def test_gradcheck(rng: Rng, count: int, dim: int) -> None:
    layer, mask = MVELayer(count, dim), some_mask(rng, 2, count, at_least=dim + 3)
    # Finite differences across a kink are wrong: draw points whose support does not change within a step.
    z = away_from_kinks(lambda: gaussian(rng, 2, count, dim), mask, 1e-5)
    assert torch.autograd.gradcheck(
        lambda z: everything(layer(z, mask)), z.requires_grad_(), eps=1e-6, atol=1e-6, fast_mode=dim > 2
    )


def away_from_kinks(draw: Callable[[], Tensor], mask: Tensor | None, step: float) -> Tensor:
    """Points for which max(multiplier, slack) is so large that a step cannot change the active set."""
    for _ in range(200):
        z = draw()
        exists = torch.ones(z.shape[:2], dtype=torch.bool) if mask is None else mask
        y = whiten(z, exists, z.dtype).coordinates(z, exists)
        found = solve(PlainForm, y, exists, 0.0)
        if float(torch.maximum(found.u, found.s)[exists].min()) > 100 * step:
            return z
    raise AssertionError("all 200 draws were near a kink")


@pytest.mark.parametrize(("count", "dim"), [(30, 2), (100, 5), (100, 10), (150, 20)])
def test_gradient_equals_finite_differences(rng: Rng, count: int, dim: int) -> None:
    """Relative error of 1e-7 in a random direction, by a four-point stencil with an error of fourth order."""
    step = 1e-5
    layer = MVELayer(count, dim)
    z = away_from_kinks(lambda: torch.from_numpy(rng.normal(size=(1, count, dim))), None, step)
    value = functional(rng, layer(z))
    exact = gradient(layer, z, value)
    direction = exact / exact.norm() + torch.from_numpy(rng.normal(size=z.shape)) / z.numel() ** 0.5
    at = {k: float(value(layer(z + k * step * direction))) for k in (-2, -1, 1, 2)}
    measured = (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * step)
    assert float((exact * direction).sum()) == pytest.approx(measured, rel=1e-7)


def test_log_volume_has_the_gradient_of_the_envelope_theorem(rng: Rng) -> None:
    r"""The gradient is :math:`u_i P (z_i - c)`, without derivatives of the multipliers."""
    z = gaussian(rng, 3, 50, 4)
    layer = MVELayer(50, 4)
    e, u = layer(z), solution(z).u
    expected = u.unsqueeze(-1) * ((z - e.center.unsqueeze(1)) @ (e.whitener.mT @ e.whitener))
    torch.testing.assert_close(gradient(layer, z, lambda e: e.log_volume().sum()), expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(("count", "dim"), [(40, 2), (80, 5), (400, 3)])
def test_points_inside_have_gradient_exactly_zero(rng: Rng, count: int, dim: int) -> None:
    z = gaussian(rng, 2, count, dim)
    layer = MVELayer(count, dim)
    e = layer(z)
    grad = gradient(layer, z, functional(rng, e))
    inside = e.distance(z) < 1 - 1e-6
    assert (grad[inside] == 0).all()
    assert (grad[solution(z).u > 0] != 0).any(-1).all()


def test_affine_equivariance_of_value_and_gradient(rng: Rng) -> None:
    z, layer = gaussian(rng, 60, 4), MVELayer(60, 4)
    matrix = torch.from_numpy(rng.normal(size=(4, 4)) * 10.0 ** rng.uniform(-2, 2, size=(4, 1)))
    shift = torch.from_numpy(1e3 * rng.normal(size=4))
    anywhere = torch.from_numpy(3 * rng.normal(size=(50, 4)))
    e, image = layer(z), layer(z @ matrix.T + shift)
    torch.testing.assert_close(image.distance(anywhere @ matrix.T + shift), e.distance(anywhere), rtol=1e-7, atol=0)

    def mean(at: Tensor) -> Callable[[RefittedEllipsoid], Tensor]:
        return lambda e: e.distance(at).mean()

    here = gradient(layer, z, mean(anywhere))
    there = gradient(layer, z @ matrix.T + shift, mean(anywhere @ matrix.T + shift))
    torch.testing.assert_close(there @ matrix, here, rtol=1e-6, atol=1e-7 * float(here.abs().max()))


@pytest.mark.parametrize("backend", ["native", "cvxpylayers"])
def test_padding_does_not_change_the_result(rng: Rng, backend: Any) -> None:
    z = gaussian(rng, 25, 3)
    e = MVELayer(25, 3, backend=backend)(z)
    value = functional(rng, e)
    padded = torch.full((40, 3), torch.nan, dtype=torch.float64)
    place = torch.from_numpy(np.sort(rng.permutation(40)[:25]))
    padded[place] = z
    mask = torch.zeros(40, dtype=torch.bool).index_fill(0, place, True)
    layer = MVELayer(40, 3, backend=backend)
    f = layer(padded, mask)
    exact = backend == "native"
    tolerance = 1e-10 if exact else 1e-6
    torch.testing.assert_close(f.center, e.center, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(f.whitener, e.whitener, atol=tolerance, rtol=tolerance)
    grad = gradient(layer, padded, value, mask)
    assert (grad[~mask] == 0).all()
    expected = gradient(MVELayer(25, 3, backend=backend), z, value)
    error = float((grad[mask] - expected).norm() / expected.norm())
    assert error <= (1e-9 if exact else 1e-3)


@pytest.mark.parametrize(("count", "dim"), [(20, 1), (30, 2), (40, 4), (60, 8)])
def test_the_backends_agree(rng: Rng, count: int, dim: int) -> None:
    z, mask = gaussian(rng, 2, count, dim), some_mask(rng, 2, count, at_least=dim + 3)
    z = away_from_kinks(lambda: gaussian(rng, 2, count, dim), mask, 1e-5)
    native, other = MVELayer(count, dim), MVELayer(count, dim, backend="cvxpylayers")
    e, f = native(z, mask), other(z, mask)
    scale = float(e.whitener.abs().max())
    torch.testing.assert_close(f.whitener, e.whitener, atol=1e-5 * scale, rtol=0)
    torch.testing.assert_close(f.center, e.center, atol=1e-5 * float(z.abs().max()), rtol=0)
    value = functional(rng, e)
    ours, theirs = gradient(native, z, value, mask), gradient(other, z, value, mask)
    assert float((ours - theirs).norm() / ours.norm()) <= 1e-2  # LSQR is inaccurate near ties


@pytest.mark.slow
def test_optimal_solutions_pass_the_checks(rng: Rng) -> None:
    """Multipliers on points just below the surface would make the certificate fail for some of these sets."""
    z = gaussian(rng, 150, 25, 2)
    found = MVELayer(32, 2, backend="cvxpylayers")(z)
    torch.testing.assert_close(found.log_volume(), MVELayer(25, 2)(z).log_volume(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("backend", ["native", "cvxpylayers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_and_autocast(rng: Rng, backend: Any, dtype: torch.dtype) -> None:
    """Computes in float64 under autocast, and returns the caller's dtype (float32 for half precision)."""
    layer = MVELayer(30, 3, backend=backend)
    z = torch.from_numpy(rng.normal(size=(30, 3))).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        e = layer(z)
        distance, overlap = e.distance(z), e.overlap(e)
    exact = layer(z.detach().double())
    expected = torch.promote_types(dtype, torch.float32)
    for ours, wide in ((e.center, exact.center), (e.whitener, exact.whitener), (distance, exact.distance(z.detach()))):
        assert ours.dtype == expected
        torch.testing.assert_close(ours.detach().double(), wide, rtol=1e-5, atol=1e-5)
    assert overlap.item() == 1.0
    (distance.sum() + e.log_volume()).backward()
    assert z.grad is not None
    assert z.grad.dtype == dtype
    assert z.grad.isfinite().all()


@pytest.mark.parametrize("backend", ["native", "cvxpylayers"])
def test_without_gradients(rng: Rng, backend: Any) -> None:
    layer, z = MVELayer(20, 2, backend=backend), gaussian(rng, 20, 2).requires_grad_()
    expected = layer(z)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            e = layer(z)
        assert not e.center.requires_grad
        torch.testing.assert_close(e.whitener, expected.whitener, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("backend", ["native", "cvxpylayers"])
def test_is_deterministic_and_has_no_state(rng: Rng, backend: Any) -> None:
    layer, z = MVELayer(25, 3, backend=backend), gaussian(rng, 2, 25, 3)
    e = layer(z)
    value = functional(rng, e)
    grad = gradient(layer, z, value)
    assert not layer.state_dict()
    for other in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.to(torch.bfloat16)):
        assert torch.equal(other(z).whitener, e.whitener)
        assert torch.equal(gradient(other, z, value), grad)
    assert backend in repr(layer)


@pytest.mark.parametrize("backend", ["native", "cvxpylayers"])
def test_threads_do_not_disturb_each_other(rng: Rng, backend: Any) -> None:
    layer = MVELayer(15, 2, backend=backend)
    sets = [gaussian(rng, 2, 15, 2) for _ in range(3)]
    alone = [gradient(layer, z, lambda e: e.whitener.sum()) for z in sets]
    together: dict[int, Tensor] = {}

    def work(number: int) -> None:
        together[number] = gradient(layer, sets[number], lambda e: e.whitener.sum())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(3):
        assert torch.equal(together[number], alone[number])


@pytest.mark.parametrize(
    "settings", [{}, {"backend": "cvxpylayers"}, {"floor": 100.0}], ids=["native", "cvxpylayers", "ball"]
)
def test_second_derivatives_are_refused(rng: Rng, settings: dict[str, Any]) -> None:
    z, factor = gaussian(rng, 20, 2).requires_grad_(), torch.ones(2, dtype=torch.float64, requires_grad=True)
    e = MVELayer(20, 2, **settings)(z)
    for value in (e.distance(z).square().sum(), (factor * e.center).sum()):
        (first,) = torch.autograd.grad(value, z, create_graph=True)
        with pytest.raises(RuntimeError, match="first derivatives only"):
            torch.autograd.grad(first.square().sum(), z, retain_graph=True)
    # The gradient may not be differentiated with respect to anything else that it depends on either.
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(first.square().sum(), factor)


def test_a_graph_of_cvxpylayers_can_be_retained_and_is_freed(rng: Rng) -> None:
    z = gaussian(rng, 20, 2).requires_grad_()
    value = MVELayer(20, 2, backend="cvxpylayers")(z).log_volume()
    first, again = (torch.autograd.grad(value, z, retain_graph=keep)[0] for keep in (True, False))
    assert torch.equal(first, again)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(value, z)


def test_cvxpylayers_raises_no_warning(rng: Rng) -> None:
    z = gaussian(rng, 20, 2).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MVELayer(20, 2, backend="cvxpylayers")(z).log_volume().backward()


@pytest.mark.parametrize("settings", [{}, {"backend": "cvxpylayers"}, {"floor": 0.1}, {"smoothing": 0.1}])
def test_a_batch_of_no_sets(settings: dict[str, Any]) -> None:
    z = torch.zeros(0, 5, 2, requires_grad=True)
    e = MVELayer(5, 2, **settings)(z)
    assert e.center.shape == (0, 2)
    assert e.whitener.shape == (0, 2, 2)
    e.center.sum().backward()
    assert z.grad is not None


@pytest.mark.slow
def test_is_not_compiled() -> None:
    """The solver runs uncompiled inside a compiled function.

    The test runs in its own process, because the shape checks of the test suite cannot be compiled.
    """
    code = """
import torch
from sepc_torch import MVELayer
layer, z, graphs = MVELayer(30, 3), torch.randn(30, 3, generator=torch.Generator().manual_seed(1)), []
def count(graph, inputs):
    graphs.append(len(graph.graph.nodes))
    return graph.forward
compiled = torch.compile(lambda z: 2 * layer(3 * z).log_volume(), backend=count)
for _ in range(3):
    torch.testing.assert_close(compiled(z), 2 * layer(3 * z).log_volume())
assert len(graphs) <= 4 and sum(graphs) < 40, graphs
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.parametrize("backend", ["native", "cvxpylayers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flat_sets_are_an_error(rng: Rng, backend: Any, dtype: torch.dtype) -> None:
    layer = MVELayer(20, 3, backend=backend)
    normal = torch.from_numpy(rng.normal(size=(20, 3)))
    basis = torch.from_numpy(np.linalg.qr(rng.normal(size=(3, 3)))[0])
    for flat in (
        normal * torch.tensor([1.0, 0.0, 1.0]) + 0.1,
        (normal * torch.tensor([1.0, 2.0, 0.0])) @ basis + 5.0,
        normal[:3],
        torch.ones(20, 3) * 0.1,
    ):
        both = torch.stack([normal[: len(flat)], flat]).to(dtype)
        which = r"\[0, 1\]" if len(flat) < 4 else r"\[1\]"
        with pytest.raises(ValueError, match=rf"sets {which} of the batch.*do not span all 3 dimensions.*floor"):
            layer(both)
    mask = torch.arange(20) < torch.tensor([[20], [3]])
    with pytest.raises(ValueError, match=r"of \[3\] points"):
        layer(torch.stack([normal, normal]), mask)


def thin_sets(rng: Rng) -> dict[str, Tensor]:
    basis = torch.from_numpy(np.linalg.qr(rng.normal(size=(4, 4)))[0])
    normal = torch.from_numpy(rng.normal(size=(60, 4)))
    return {
        "thin": (normal * torch.tensor([1.0, 2.0, 0.05, 0.01])) @ basis + 1.0,
        "flat": (normal * torch.tensor([1.0, 2.0, 0.0, 0.0])) @ basis + 1.0,
        "few": normal[:3],
        "two": normal[:2],
        "thick": normal,
    }


@pytest.mark.parametrize("kind", ["thin", "flat", "few", "two", "thick"])
def test_a_floor_gives_the_offline_solvers_ellipsoid(rng: Rng, kind: str) -> None:
    z = thin_sets(rng)[kind]
    e = MVELayer(60, 4, floor=0.1)(z)
    offline = minimum_volume_ellipsoid(z.numpy(), floor=0.1, tol=1e-9)
    assert float(e.log_volume()) == pytest.approx(offline.log_volume, abs=1e-7)
    assert float(e.distance(z).max()) <= 1 + 1e-9
    axes = 1 / torch.linalg.svdvals(e.whitener)
    assert axes.numpy()[::-1] == pytest.approx(offline.semi_axes, rel=1e-4)
    assert torch.equal(e.whitener, e.whitener.triu())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["thin", "flat", "few"])
def test_gradcheck_with_a_floor(rng: Rng, kind: str) -> None:
    z = thin_sets(rng)[kind][:12]
    layer = MVELayer(12, 4, floor=0.1)
    assert torch.autograd.gradcheck(
        lambda z: everything(layer(z)), z.requires_grad_(), eps=1e-6, atol=1e-5, fast_mode=True
    )


def test_a_floor_in_a_mixed_batch(rng: Rng) -> None:
    """Each set of a batch has the result that it has alone, whether or not the floor acts on it."""
    sets = thin_sets(rng)
    z = torch.zeros(5, 60, 4, dtype=torch.float64)
    mask = torch.zeros(5, 60, dtype=torch.bool)
    for number, points in enumerate(sets.values()):
        z[number, : len(points)], mask[number, : len(points)] = points, True
    layer = MVELayer(60, 4, floor=0.1)
    e = layer(z, mask)
    value = functional(rng, e)
    grad = gradient(layer, z, value, mask)
    assert grad.isfinite().all()
    for number, points in enumerate(sets.values()):
        alone = layer(points)
        torch.testing.assert_close(e.center[number], alone.center, atol=1e-8, rtol=1e-8)
        torch.testing.assert_close(e.whitener[number], alone.whitener, atol=1e-7, rtol=1e-7)


def test_equal_points_with_a_floor_are_a_ball() -> None:
    z = torch.full((5, 3), 0.1, dtype=torch.float64, requires_grad=True)
    e = MVELayer(5, 3, floor=0.5)(z)
    torch.testing.assert_close(e.whitener, 2.0 * torch.eye(3).double())
    torch.testing.assert_close(e.center, torch.full((3,), 0.1).double())
    e.center.sum().backward()
    assert z.grad is not None
    torch.testing.assert_close(z.grad, torch.full((5, 3), 0.2).double())


def test_a_large_set_within_the_floor_is_a_ball_and_needs_no_long_solve(rng: Rng) -> None:
    """A solve of the dual with 20000 points would exceed the time limit by far."""
    z = torch.from_numpy(rng.normal(size=(20000, 8))).requires_grad_()
    began = time.perf_counter()
    e = MVELayer(20000, 8, floor=7.5)(z)
    e.center.sum().backward()
    assert time.perf_counter() - began < 10
    assert torch.equal(e.whitener, torch.eye(8).double() / 7.5)
    assert e.distance(z).max() < 1
    assert z.grad is not None
    torch.testing.assert_close(z.grad.sum(0), torch.ones(8).double())  # the centre moves with the points


@pytest.mark.parametrize("floor", [3.5, 2.5, 1.0])
def test_a_large_set_on_which_a_floor_acts(rng: Rng, floor: float) -> None:
    """The floor acts in all dimensions but one, in some, and in the thinnest only."""
    z = torch.from_numpy(rng.normal(size=(2000, 4)) * np.array([1.5, 1.0, 1.0, 0.3]))
    e = MVELayer(2000, 4, floor=floor)(z)
    offline = minimum_volume_ellipsoid(z.numpy(), floor=floor, tol=1e-8)
    assert float(e.log_volume()) == pytest.approx(offline.log_volume, abs=1e-7)
    assert float(e.distance(z).max()) <= 1 + 1e-9


@pytest.mark.parametrize(("count", "dim", "room"), [(1, 2, 1.0), (12, 3, 0.5), (40, 2, 1e-2), (9, 4, 1e-4)])
def test_gradcheck_of_a_ball(rng: Rng, count: int, dim: int, room: float) -> None:
    """The centre is smooth in all points and the whitener is constant, even if points nearly touch the surface."""
    z = gaussian(rng, 2, count, dim)
    mask = some_mask(rng, 2, count, at_least=1)
    # A ball with the longest semi-axis as radius covers the ellipsoid and so the points.
    least = MVELayer(count, dim, floor=1e-3)(z, mask)
    longest = float((1 / torch.linalg.svdvals(least.whitener)).max())
    layer = MVELayer(count, dim, floor=(1 + room) * longest)
    e = layer(z, mask)
    torch.testing.assert_close(e.whitener, torch.eye(dim).double().expand(2, -1, -1) / layer.floor)
    assert torch.autograd.gradcheck(
        lambda z: everything(layer(z, mask)), z.requires_grad_(), eps=1e-7, atol=1e-5, fast_mode=True
    )


def circle(count: int) -> Tensor:
    angle = torch.arange(count, dtype=torch.float64) * (2 * torch.pi / count)
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


def cube(dim: int) -> Tensor:
    return torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * dim)


@pytest.mark.parametrize("points", [circle(8), cube(3)], ids=["circle", "cube"])
def test_sets_without_a_unique_support(points: Tensor) -> None:
    """Without smoothing the volume is exact and the gradient finite; with smoothing the gradient is exact."""
    count, dim = points.shape
    exact = MVELayer(count, dim)
    assert float(exact(points).log_volume()) == pytest.approx(dim * np.log(points[0].norm().item()), abs=1e-9)
    assert gradient(exact, points, lambda e: e.whitener.sum() + e.center.sum()).isfinite().all()
    for smoothing in (1e-2, 1e-3):
        layer = MVELayer(count, dim, smoothing=smoothing)
        z = points.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda z, f=layer: everything(f(z)), z, eps=1e-6, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("smoothing", [1e-1, 1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize(("count", "dim"), [(15, 1), (30, 2), (40, 6)])
def test_smoothing_covers_and_is_bounded(rng: Rng, count: int, dim: int, smoothing: float) -> None:
    z = gaussian(rng, 8, count, dim)
    e, best = MVELayer(count, dim, smoothing=smoothing)(z), MVELayer(count, dim)(z)
    assert (e.distance(z) < 1).all()
    excess = e.log_volume() - best.log_volume()
    assert (excess > 0).all()
    assert (excess <= 0.5 * count * smoothing * (1 + 1e-6)).all()


@pytest.mark.parametrize("form", [PlainForm, FlooredForm])
@pytest.mark.parametrize("mu", [0.0, 1e-1, 1e-3, 1e-5, 1e-9])
def test_the_interior_point_method_reaches_every_barrier_parameter(rng: Rng, form: type[Form], mu: float) -> None:
    y, mask = whitened(gaussian(rng, 64, 12, 3))
    found = interior_point(form, y, mask, mu)
    assert found.solved.all()
    assert (found.u * found.s - mu).abs().max() <= max(1e-9, 1e-3 * mu)
    assert (1 - form(y, mask, found.u).h - found.s).abs().max() <= 1e-6


def test_distance_and_volume_are_those_of_an_ellipsoid(rng: Rng) -> None:
    e = MVELayer(30, 4)(gaussian(rng, 2, 30, 4))
    z = gaussian(rng, 2, 50, 4)
    for number in range(2):
        same = Ellipsoid(e.center[number].numpy(), e.whitener[number].numpy())
        assert e.distance(z)[number].numpy() == pytest.approx(same.distance(z[number].numpy()))
        assert e.distance(z[0])[number].numpy() == pytest.approx(same.distance(z[0].numpy()))
        assert float(e.log_volume()[number]) == pytest.approx(same.log_volume)
    center = e.center[0].clone().requires_grad_()
    RefittedEllipsoid(e.center[0], e.whitener[0]).distance(center[None]).sum().backward()
    assert center.grad is not None
    assert (center.grad == 0).all()


@pytest.mark.slow
def test_overlap_agrees_with_intersects_and_scales(rng: Rng) -> None:
    layer = MVELayer(20, 3)
    first, second = layer(gaussian(rng, 60, 20, 3)), layer(gaussian(rng, 60, 20, 3))
    overlap = first.overlap(second)
    torch.testing.assert_close(second.overlap(first), overlap)
    signs = set()
    for number in range(60):
        a, b = (Ellipsoid(e.center[number].numpy(), e.whitener[number].numpy()) for e in (first, second))
        signs.add(a.intersects(b))
        assert a.intersects(b) == bool(overlap[number] >= 0)
    # Scaled about their centres by the square root of the maximum, the ellipsoids touch.
    touching = (1 - overlap).sqrt()[:, None, None]
    scaled = [RefittedEllipsoid(e.center, e.whitener / touching) for e in (first, second)]
    torch.testing.assert_close(scaled[0].overlap(scaled[1]), torch.zeros(60).double(), atol=1e-9, rtol=0)


@pytest.mark.parametrize("ratio", [1e8, 1e-8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_overlap_of_very_different_sizes(ratio: float, dtype: torch.dtype) -> None:
    """Balls whose centres are 1.27 times the sum of the radii apart; in float32 the maximising s would round to 1."""
    eye, away = torch.eye(2, dtype=dtype), torch.tensor([1.27 * (1 + ratio), 0.0], dtype=dtype)
    a, b = RefittedEllipsoid(torch.zeros_like(away), eye), RefittedEllipsoid(away, eye / ratio)
    for overlap in (a.overlap(b), b.overlap(a)):
        assert overlap.dtype == dtype
        assert float(overlap) == pytest.approx(1 - 1.27**2, abs=1e-5)


def test_gradcheck_of_distance_and_overlap(rng: Rng) -> None:
    layer = MVELayer(15, 3)
    x, y = (away_from_kinks(lambda: gaussian(rng, 2, 15, 3), None, 1e-5) for _ in range(2))
    w = gaussian(rng, 4, 3)

    def both(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first, second = layer(x), layer(y)
        return first.distance(w), first.overlap(second)

    assert torch.autograd.gradcheck(
        both, (x.requires_grad_(), y.requires_grad_(), w.requires_grad_()), eps=1e-6, atol=1e-6, fast_mode=True
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"points": 0, "features": 2}, "points must be an integer of at least 1, got 0"),
        ({"points": 5, "features": -1}, "features must be an integer of at least 1"),
        ({"points": 5, "features": 2, "floor": -1.0}, "floor must be a finite number of at least 0, got -1.0"),
        ({"points": 5, "features": 2, "smoothing": float("nan")}, "smoothing must be"),
        ({"points": 5, "features": 2, "floor": 0.1, "backend": "cvxpylayers"}, "floor=0.1 needs backend='native'"),
    ],
)
def test_refuses_bad_settings(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MVELayer(**arguments)


@pytest.mark.parametrize("value", ["3", None, 2.0])
def test_refuses_values_that_are_not_integers(value: Any) -> None:
    with pytest.raises(TypeError, match=f"points must be an integer, got {value!r}"):
        check_count(value, "points", 1)


@pytest.mark.parametrize("value", ["0.1", None, [1.0, 2.0]])
def test_refuses_values_that_are_not_numbers(value: Any) -> None:
    with pytest.raises(TypeError, match="floor must be a finite number of at least 0, got"):
        check_not_negative(value, "floor")


def test_refuses_transforms_of_torch_func(rng: Rng) -> None:
    layer = MVELayer(10, 2)
    with pytest.raises(RuntimeError, match=r"MVELayer cannot run inside a torch\.func transform.*backward\(\)"):
        torch.func.grad(lambda z: layer(z).log_volume())(gaussian(rng, 10, 2))


def test_refuses_bad_points(rng: Rng) -> None:
    layer, z = MVELayer(10, 2), gaussian(rng, 3, 10, 2)
    with pytest.raises(ValueError, match=r"shape \(M, 2\) or \(B, M, 2\) with M from 1 to 10, got \(3, 11, 2\)"):
        layer(gaussian(rng, 3, 11, 2))
    with pytest.raises(ValueError, match=r"no points: leave them out"):
        layer(z, torch.tensor([True, False, True])[:, None].expand(3, 10))
    for dtype in (torch.int64, torch.float32):  # in tests, the annotation of the layer itself already rejects these
        with pytest.raises(TypeError, match=rf"mask must be a tensor of torch\.bool.*got {dtype}; .*mask\.bool\(\)"):
            layer._check(z, torch.ones(3, 10, dtype=dtype))
    z[1, 4, 0] = torch.nan
    with pytest.raises(ValueError, match=r"sets \[1\] of the batch hold NaN or infinity"):
        layer(z)


@pytest.mark.filterwarnings("ignore:Solved/Inaccurate:UserWarning")  # the only report from diffcp
def test_a_solution_that_is_not_optimal_is_refused(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """Diffcp raises no error if SCS stops early, so the layer must check the solution."""
    from sepc_torch.layers import cvxpylayers_backend

    layer, z = MVELayer(40, 4, backend="cvxpylayers"), gaussian(rng, 2, 40, 4)
    monkeypatch.setitem(cvxpylayers_backend._SOLVER, "max_iters", 5)
    with pytest.raises(RuntimeError, match="SCS failed, or its solution did not pass the checks"):
        layer(z)


@pytest.mark.slow
def test_native_needs_no_cvxpy() -> None:
    """None in sys.modules makes an import fail as if the package were missing. The batched method needs no SciPy."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['cvxpy', 'cvxpylayers', 'diffcp', 'SCIPY'])); import torch\n"
        "from sepc_torch import EllipsoidLoss, MVELayer, RCHLayer\n"
        "z = torch.randn(2, 20, 3, requires_grad=True); layer = MVELayer(20, 3, smoothing=SMOOTHING)\n"
        "layer(z).log_volume().sum().backward(); print(bool(z.grad.any()))"
    )
    for scipy, smoothing in (("cvxpy", "0.0"), ("scipy", "1e-3")):
        script = code.replace("SCIPY", scipy).replace("SMOOTHING", smoothing)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert done.stdout.strip() == "True", done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"smoothing": 1e-3}, {"floor": 0.1}], ids=["plain", "smoothed", "floored"])
@pytest.mark.parametrize(("count", "dim"), [(40, 3), (100, 10), (500, 4)])
def test_cuda_agrees_with_the_cpu(rng: Rng, count: int, dim: int, settings: dict[str, float]) -> None:
    z, mask = gaussian(rng, 5, count, dim), some_mask(rng, 5, count, at_least=dim + 3)
    layer = MVELayer(count, dim, **settings)  # type: ignore[arg-type]
    e = layer(z, mask)
    value = functional(rng, e)
    there = z.cuda().requires_grad_()
    f = layer(there, mask.cuda())
    assert f.center.is_cuda
    torch.testing.assert_close(f.whitener.detach().cpu(), e.whitener, atol=1e-9, rtol=1e-8)
    value(RefittedEllipsoid(f.center.cpu(), f.whitener.cpu())).backward()
    assert there.grad is not None
    expected = gradient(layer, z, value, mask)
    torch.testing.assert_close(there.grad.cpu(), expected, atol=1e-7 * float(expected.abs().max()), rtol=1e-6)


@pytest.mark.gpu
def test_cvxpylayers_takes_and_returns_cuda_tensors(rng: Rng) -> None:
    pytest.importorskip("cvxpylayers")
    z = gaussian(rng, 2, 20, 2)
    layer = MVELayer(20, 2, backend="cvxpylayers")
    there = z.cuda().requires_grad_()
    e = layer(there)
    assert e.whitener.is_cuda
    torch.testing.assert_close(e.whitener.detach().cpu(), layer(z).whitener)
    e.whitener.sum().backward()
    assert there.grad is not None
    assert there.grad.isfinite().all()


@pytest.mark.gpu
def test_autocast_on_cuda(rng: Rng) -> None:
    z = torch.from_numpy(rng.normal(size=(4, 60, 5))).float().cuda().requires_grad_()
    layer = MVELayer(60, 5)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        e = layer(z)
        loss = e.log_volume().sum() + e.distance(z[0]).mean()
    assert loss.dtype == torch.float32
    loss.backward()
    assert z.grad is not None
    assert z.grad.isfinite().all()
