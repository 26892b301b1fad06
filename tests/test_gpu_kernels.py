"""The fused kernel on a CUDA device: as accurate as float32, for every shape, and refreshed with its bank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ellipsoid_banks import bank_of

from sepc_torch.model.bank import EllipsoidBank

pytestmark = pytest.mark.gpu
Rng = np.random.Generator
# Numbers are split into 22 bits, 2.4e-7; three such errors, and the rounding of sums, in units of the terms that are
# summed: where they cancel, in thin ellipsoids seen along them, float32 itself has no more digits.
ACCURACY = 2e-6


def banks(rng: Rng, count: int, dim: int) -> tuple[EllipsoidBank, EllipsoidBank, torch.Tensor]:
    """The same float32 ellipsoids with the kernel and in float64, and points around them."""
    centers, whiteners = (numbers.float() for numbers in bank_of(rng, count, dim))
    origin = torch.zeros(dim)  # subtracting another would round, with the kernel and without
    fused = EllipsoidBank(centers, whiteners, origin, kernel="triton").cuda()
    exact = EllipsoidBank(fused.offsets.double(), fused.whiteners.double(), fused.origin.double(), kernel="torch")
    spread = centers.abs().amax(dim=0) + 1e-3
    z = centers[rng.integers(0, count, 500)] + torch.from_numpy(rng.normal(size=(500, dim))).float() * spread
    return fused, exact, z.cuda()


def error(found: torch.Tensor, exact: EllipsoidBank, z: torch.Tensor) -> float:
    r"""The largest error of the distances, relative to :math:`\| |W| |z - c| \|`."""
    assert found.isfinite().all()
    offsets = (z.double()[:, None] - exact.centers).abs()
    terms = torch.linalg.vector_norm((exact.whiteners.abs() @ offsets.unsqueeze(-1)).squeeze(-1), dim=2)
    return float(((found - exact(z.double())).abs() / terms.clamp_min(1e-30)).max())


@pytest.mark.parametrize(
    ("count", "dim"), [(1, 1), (1, 64), (7, 3), (100, 16), (33, 33), (5, 129), (3, 256), (129, 65)]
)
def test_as_accurate_as_float32(rng: Rng, count: int, dim: int) -> None:
    fused, exact, z = banks(rng, count, dim)
    for rows in (1, 17, 500):
        torch.full((rows * count,), torch.nan, device="cuda")  # what the allocator hands out next is poisoned
        assert error(fused(z[:rows]), exact, z[:rows]) < ACCURACY
    assert fused(z[:0]).shape == (0, count)


def test_on_the_surface(rng: Rng) -> None:
    fused, exact, _ = banks(rng, 20, 12)
    u = torch.from_numpy(rng.normal(size=(20, 12))).cuda()
    u /= u.norm(dim=1, keepdim=True)
    z = (exact.centers + torch.linalg.solve(exact.whiteners, u)).float()
    assert error(fused(z), exact, z) < ACCURACY


def test_strides_and_narrow_input(rng: Rng) -> None:
    fused, exact, z = banks(rng, 6, 20)
    wide = torch.full((500, 60), torch.nan, device="cuda")
    wide[:, 1::3] = z
    assert torch.equal(fused(wide[:, 1::3]), fused(z))
    assert torch.equal(fused(z.T.contiguous().T), fused(z))
    for dtype in (torch.float16, torch.bfloat16):
        narrow = (z / z.abs().max()).to(dtype)
        assert error(fused(narrow), exact, narrow) < ACCURACY
        with torch.autocast("cuda", dtype=dtype):
            assert fused(z).dtype == torch.float32
            assert torch.equal(fused(z), fused(z))


def test_rows_without_a_distance(rng: Rng) -> None:
    fused, _, z = banks(rng, 4, 9)
    before = fused(z)
    bad = z.clone()
    bad[3, 2], bad[70, 0], bad[71, 8] = torch.nan, torch.inf, 3e38
    after = fused(bad)
    assert not after[[3, 70]].isfinite().any()
    keep = torch.ones(len(z), dtype=torch.bool)
    keep[[3, 70, 71]] = False
    assert torch.equal(after[keep], before[keep])


def test_gradient(rng: Rng) -> None:
    fused, exact, z = banks(rng, 5, 11)
    weights = torch.from_numpy(rng.normal(size=(500, 5))).cuda()
    grads = []
    for bank, points in ((fused, z.clone()), (exact, z.double())):
        points.requires_grad_()
        (bank(points) * weights).sum().backward()
        assert points.grad is not None
        grads.append(points.grad.double())
    scale = grads[1].abs().amax(dim=0)
    assert float(((grads[0] - grads[1]).abs() / scale).max()) < 1e-4


def test_is_the_choice_on_cuda_and_follows_the_bank(rng: Rng) -> None:
    first, _, z = banks(rng, 4, 7)
    second, exact, _ = banks(rng, 4, 7)
    auto = EllipsoidBank(first.offsets.cpu(), first.whiteners.cpu(), first.origin.cpu())
    assert auto.prepared is None
    auto.cuda()
    assert torch.equal(auto(z), first(z))
    auto.load_state_dict(second.state_dict())
    assert torch.equal(auto(z), second(z))
    assert auto.double().prepared is None
    assert error(auto(z.double()), exact, z) < 1e-9
    plain = EllipsoidBank(first.offsets, first.whiteners, first.origin, kernel="torch")
    assert plain.prepared is None


def test_compiles_and_repeats_in_a_graph(rng: Rng) -> None:
    fused, _, z = banks(rng, 8, 24)
    wanted = fused(z)
    assert torch.equal(torch.compile(fused, fullgraph=True, backend="aot_eager")(z), wanted)
    held, graph = torch.empty_like(z), torch.cuda.CUDAGraph()
    held.copy_(z.flip(0))
    with torch.cuda.graph(graph):
        out = fused(held)
    held.copy_(z)
    graph.replay()
    assert torch.equal(out, wanted)
