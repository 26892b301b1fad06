"""The frozen model on a CUDA device gives what it gives on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sepc_torch import SEPC, Rule, TrustHead, partition

pytestmark = pytest.mark.gpu


@pytest.fixture
def model(rng: np.random.Generator) -> tuple[SEPC, torch.Tensor]:
    labels = rng.integers(0, 4, 2000)
    # Classes so near to each other that every rule is met, the rarest some fifty times.
    x = rng.normal(size=(2000, 6)) + 0.8 * rng.normal(size=(4, 6))[labels] + 20.0
    sepc = SEPC.from_partition(partition(x, labels, max_impure=5))
    z = np.concatenate([x, 20.0 + 3.0 * rng.normal(size=(20_000, 6))])
    return sepc, torch.from_numpy(z).float()


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_agrees_with_the_cpu(model: tuple[SEPC, torch.Tensor], precision: str) -> None:
    sepc, z = model
    on_cpu = sepc(z)
    assert set(on_cpu.rule.tolist()) == {0, 1, 2, 3}
    # Rounding is relative to the terms of the sum, |W| |z - c|, which cancel in thin ellipsoids.
    offsets = (z - sepc.bank.centers[on_cpu.nearest]).abs().unsqueeze(2)
    terms = (sepc.bank.whiteners[on_cpu.nearest].abs() @ offsets).norm(dim=(1, 2))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        on_gpu = sepc.to("cuda")(z.cuda())
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    agree = on_gpu.nearest.cpu() == on_cpu.nearest
    assert ((on_gpu.distance.cpu() - on_cpu.distance).abs()[agree] <= 1e-6 + 4e-6 * terms[agree]).all()
    # Rounding may put a point of 22 000 on the other side of a surface, or at another of two equally near ellipsoids.
    for field in ("label", "rule", "nearest"):
        same = (getattr(on_gpu, field).cpu() == getattr(on_cpu, field)).float().mean()
        assert float(same) > 0.999, field


def test_float64_agrees_exactly_in_every_decision(model: tuple[SEPC, torch.Tensor]) -> None:
    sepc, z = model
    sepc = sepc.double()
    on_cpu, on_gpu = sepc(z.double()), sepc.to("cuda")(z.double().cuda())
    for field in ("label", "rule", "nearest", "runner_up"):
        assert torch.equal(getattr(on_gpu, field).cpu(), getattr(on_cpu, field)), field


def test_euclidean_nearest(rng: np.random.Generator) -> None:
    labels = rng.integers(0, 2, 500)
    x = rng.normal(size=(500, 4)) + 2.0 * labels[:, None]
    sepc = SEPC.from_partition(partition(x, labels), "euclidean", dtype=torch.float64)
    z = torch.from_numpy(4.0 * rng.normal(size=(2000, 4)))
    on_cpu, on_gpu = sepc(z), sepc.to("cuda")(z.cuda())
    assert (on_cpu.rule == int(Rule.OUTSIDE)).any()
    assert torch.equal(on_gpu.nearest.cpu(), on_cpu.nearest)
    assert torch.equal(on_gpu.label.cpu(), on_cpu.label)


def test_autocast_and_gradients(model: tuple[SEPC, torch.Tensor]) -> None:
    sepc, z = model
    sepc = sepc.to("cuda")
    z = z[:500].cuda().requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = sepc(z)
    assert torch.equal(out.distance, sepc(z).distance)
    out.distance.sum().backward()
    assert z.grad is not None
    assert torch.isfinite(z.grad).all()


def test_a_head_fitted_from_cuda_tensors(rng: np.random.Generator) -> None:
    labels = rng.integers(0, 3, 600)
    x = torch.from_numpy(rng.normal(size=(600, 8)) + 3.0 * np.eye(3, 8)[labels]).float()
    head = TrustHead.fit(x.cuda(), torch.from_numpy(labels).cuda())
    on_cpu = head(x)
    on_gpu = head.to("cuda")(x.cuda(), logits=torch.randn(600, 3, device="cuda"))
    assert float((on_gpu.label.cpu() == on_cpu.label).float().mean()) > 0.99
