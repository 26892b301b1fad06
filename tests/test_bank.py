"""Ellipsoid bank against single ellipsoids: dtypes, pieces, gradients, export, precision settings, invalid input."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sepc_torch import Ellipsoid, EllipsoidBank
from sepc_torch.ellipsoid import triangular_whitener
from sepc_torch.model import torch_ops

Rng = np.random.Generator


def draw(rng: Rng, count: int, dim: int, dtype: torch.dtype = torch.float64) -> tuple[EllipsoidBank, list[Ellipsoid]]:
    """A bank and the list of its ellipsoids, away from the origin, with semi-axes from 0.01 to 1."""
    plain = []
    for _ in range(count):
        basis = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
        whitener = triangular_whitener(basis * 10 ** rng.uniform(0, 2, dim))
        plain.append(Ellipsoid(50 + rng.normal(size=dim), whitener))
    centers = torch.from_numpy(np.stack([e.center for e in plain])).to(dtype)
    return EllipsoidBank(centers, torch.from_numpy(np.stack([e.whitener for e in plain])).to(dtype)), plain


def points(rng: Rng, count: int, dim: int) -> Tensor:
    return torch.from_numpy(50 + 2 * rng.normal(size=(count, dim)))


@pytest.mark.parametrize(("b", "k", "dim"), [(1, 1, 1), (17, 5, 3), (300, 40, 16), (7, 200, 33), (0, 3, 4)])
def test_equals_the_distance_of_single_ellipsoids(rng: Rng, b: int, k: int, dim: int) -> None:
    bank, plain = draw(rng, k, dim)
    z = points(rng, b, dim)
    found = bank(z)
    assert found.shape == (b, k)
    for i, e in enumerate(plain):
        assert found[:, i].numpy() == pytest.approx(e.distance(z.numpy()), rel=1e-12)


@pytest.mark.parametrize("count", [12, 100])
def test_pieces_do_not_change_the_result(rng: Rng, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    bank, _ = draw(rng, 30, 8)
    z = points(rng, count, 8)
    whole = bank(z)
    largest = 0
    bmm = torch.bmm

    def watched(a: Tensor, b: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, b.numel() * b.element_size() if count >= 16 else a.numel() * a.element_size())
        return bmm(a, b)

    monkeypatch.setattr(torch, "bmm", watched)
    monkeypatch.setattr(torch_ops, "CPU_BYTES", 30 * 8 * 8 * 7)  # seven rows at a time
    assert torch.allclose(bank(z), whole, rtol=1e-14)
    assert 0 < largest <= torch_ops.CPU_BYTES


def test_float32_is_as_accurate_as_its_input(rng: Rng) -> None:
    """Far from the origin the error of W (z - c) is the input's rounding error; the error of W z + b is much larger."""
    bank, _ = draw(rng, 20, 10)
    z = points(rng, 200, 10).float()
    single = copy.deepcopy(bank).float()
    exact = bank(z.double())
    assert single(z).dtype == torch.float32
    assert float(((single(z).double() - exact) / exact).abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_input_is_computed_in_float32(rng: Rng, dtype: torch.dtype) -> None:
    bank, _ = draw(rng, 5, 4, torch.float32)
    z = (points(rng, 20, 4) - 50).to(dtype)
    shifted = EllipsoidBank(bank.centers - 50, bank.whiteners)
    assert torch.equal(shifted(z), shifted(z.float()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(shifted(z.float()), shifted(z.float()))
        inside = shifted(z.float())
    assert torch.equal(inside, shifted(z.float()))
    assert inside.dtype == torch.float32


def test_half_keeps_float32_buffers(rng: Rng) -> None:
    bank, _ = draw(rng, 5, 4, torch.float32)
    before = bank.whiteners.clone()
    for convert in (bank.half, bank.bfloat16, lambda: bank.to(torch.float16)):
        convert()
        assert bank.whiteners.dtype == torch.float32
        assert torch.equal(bank.whiteners, before)
    assert bank.double().offsets.dtype == torch.float64


def test_has_buffers_and_no_parameters(rng: Rng) -> None:
    bank, _ = draw(rng, 5, 4)
    assert not list(bank.parameters())
    assert set(bank.state_dict()) == {"origin", "offsets", "whiteners"}


def test_gradient(rng: Rng) -> None:
    bank, _ = draw(rng, 6, 5)
    z = points(rng, 4, 5).requires_grad_()
    assert torch.autograd.gradcheck(bank, (z,))


def test_gradient_at_a_centre_is_zero(rng: Rng) -> None:
    bank, _ = draw(rng, 2, 3)
    z = bank.centers[:1].clone().requires_grad_()
    bank(z)[0, 0].backward()
    assert z.grad is not None
    assert torch.equal(z.grad, torch.zeros_like(z))


def test_exports_with_any_batch_size(rng: Rng) -> None:
    bank, _ = draw(rng, 6, 5, torch.float32)
    z = points(rng, 40, 5).float()
    program = torch.export.export(bank, (z,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for rows in (3, 40, 1):
        assert torch.equal(program.module()(z[:rows]), bank(z[:rows]))


@pytest.mark.slow
def test_operators_pass_opcheck(rng: Rng) -> None:
    bank, _ = draw(rng, 6, 5)
    z = points(rng, 9, 5).requires_grad_()
    torch.library.opcheck(torch.ops.sepc_torch.distances.default, (z, bank.offsets, bank.whiteners))


def test_euclidean_distance_equals_that_of_single_ellipsoids(rng: Rng) -> None:
    bank, plain = draw(rng, 12, 6)
    z = points(rng, 80, 6)
    scale = torch.from_numpy(rng.uniform(0.5, 2.0, 6))
    axes = bank.principal_axes(scale)
    wanted = torch.from_numpy(rng.random(80) < 0.7)
    found = torch_ops.euclidean_distances(bank.relative(z) / scale, *axes, wanted)
    assert torch.equal(found[~wanted], torch.zeros_like(found[~wanted]))
    for k, e in enumerate(plain):
        scaled = Ellipsoid(e.center / scale.numpy(), e.whitener * scale.numpy())
        expected = scaled.euclidean_distance((z / scale).numpy())
        assert found[wanted, k].numpy() == pytest.approx(expected[wanted.numpy()], rel=1e-9, abs=1e-9)


def test_refuses_invalid_input(rng: Rng) -> None:
    bank, _ = draw(rng, 6, 5)
    with pytest.raises(ValueError, match=r"shape \(points, 5\), got \(3, 4\)"):
        bank(torch.zeros(3, 4))
    with pytest.raises(TypeError, match=r"z\.float\(\)"):
        bank(torch.zeros(3, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="cpu"):
        bank(torch.zeros(3, 5, device="meta"))
    with pytest.raises(ValueError, match="whiteners of shape"):
        EllipsoidBank(torch.zeros(3, 2), torch.zeros(3, 2, 3))


@pytest.mark.slow
def test_precision_set_per_backend_is_restored() -> None:
    """In a separate process: afterwards torch.get_float32_matmul_precision raises for the rest of the process."""
    script = """
import torch
from sepc_torch import EllipsoidBank
bank = EllipsoidBank(torch.zeros(2, 3), torch.eye(3).repeat(2, 1, 1))
wanted = bank(torch.ones(4, 3))
torch.backends.cuda.matmul.fp32_precision = "tf32"
torch.backends.mkldnn.matmul.fp32_precision = "bf16"
assert torch.equal(bank(torch.ones(4, 3)), wanted)
assert torch.backends.cuda.matmul.fp32_precision == "tf32"
assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[1])


@pytest.mark.parametrize("setting", ["highest", "medium"])
def test_overlapping_contexts_keep_full_precision(setting: str) -> None:
    """Two threads inside at once: the one that leaves first does not end the other's full precision."""
    z, before = torch.zeros(1), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        contexts = []
        for _ in range(2):
            contexts.append(torch_ops.full_precision(z))
            contexts[-1].__enter__()
        for context in contexts:
            assert torch.get_float32_matmul_precision() == "highest"
            context.__exit__(None, None, None)
        assert torch.get_float32_matmul_precision() == setting
    finally:
        torch.set_float32_matmul_precision(before)
