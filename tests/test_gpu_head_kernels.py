"""The kernels of a head on a CUDA device: search, densities, calibrated values, graphs, and one answer per point."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from test_gpu_head import batch as on_the_cpu
from test_gpu_head import calibrated

from sepc_torch import HeadPrediction, TrustHead
from sepc_torch.head.calibration import assess
from sepc_torch.head.evidence.neighbours import Neighbours, as_half

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
Rng = np.random.Generator
# Decisions and promises must be equal; the other fields may differ in the last digits of float32.
EQUAL = ("label", "rule", "trust", "nearest", "network_label", "confidence", "p_value", "class_p_value", "accept")


def accepting(rng: Rng, classes: int = 3, **options: int) -> TrustHead:
    head = calibrated(rng, classes, **options)
    head.accept_at(flag_rate=0.2)
    return head.cuda()


def batch(rng: Rng, rows: int, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    z, logits = on_the_cpu(rng, rows, classes)
    return z.cuda(), logits.cuda()


def same(found: HeadPrediction, expected: HeadPrediction, names: tuple[str, ...] = HeadPrediction._fields) -> None:
    for name in names:
        a, b = getattr(found, name), getattr(expected, name)
        assert torch.equal(a.nan_to_num(-9.0), b.nan_to_num(-9.0)), name


@pytest.mark.parametrize("sizes", [(1,), (500, 3, 64), (2000,), (7,) * 300, tuple(range(1, 90))])
@pytest.mark.parametrize(
    ("dim", "eleven_bits"), [*((dim, False) for dim in (3, 64, 130, 384, 512, 2048)), (64, True), (512, True)]
)
def test_search(rng: Rng, sizes: tuple[int, ...], dim: int, eleven_bits: bool) -> None:
    codes = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
    points = torch.from_numpy(rng.normal(size=(len(codes), dim))).float()
    twin = (sizes[0] - 1) // 64 * 64  # in the same column of a tile as the first point
    points[twin] = points[0]
    z = torch.from_numpy(rng.normal(size=(17_000, dim))).float().cuda()
    near = Neighbours(points, codes, eleven_bits=eleven_bits).cuda()
    assert near.in_half == (eleven_bits and len(codes) > 1)
    z[0], z[1], z[2], z[3] = near.points[-1], 0.0, near.points[0], near.origin
    assert near.tables or dim == 3  # in few dimensions neighbours can be too near for the kernel
    distance, index = near.nearest(z)
    assert int(index[2, 0]) == 0
    assert twin == 0 or not (index == twin).any()
    few = near.nearest(z[:777])  # a batch of this size takes smaller tiles
    assert torch.equal(few[0], distance[:777])
    assert torch.equal(few[1], index[:777])
    offset = z[:2000] - near.origin
    offset = (as_half(offset) if near.in_half else offset).double()
    apart = torch.cdist(offset, near.searched.double(), compute_mode="donot_use_mm_for_euclid_dist")
    of_found = apart.gather(1, index[:2000])
    least = torch.stack([own.amin(dim=1) for own in apart.split(list(sizes), dim=1)], dim=1)
    # Without the kernel, points are compared up to the rounding of products, and so are distances to far classes.
    tolerance, rounding = (0.0, 1e-12) if near.tables else (1e-5, 1e-3)
    assert torch.allclose(distance[:2000].double(), of_found, rtol=1e-6, atol=tolerance)
    assert torch.allclose(of_found, least, rtol=rounding)
    assert torch.equal(near.codes[index], torch.arange(len(sizes), device="cuda").expand(len(z), -1))
    check_labels(near, z, distance)


def check_labels(near: Neighbours, z: torch.Tensor, distance: torch.Tensor) -> None:
    """The search for labels finds the distances to the label's class and to the nearest other class."""
    classes = distance.shape[1]
    label = torch.arange(len(z), device="cuda") % classes
    label[:3] = -1
    found = near.for_labels(z, label)
    own = torch.nn.functional.one_hot(label.clamp_min(0), classes).bool()
    other = distance.masked_fill(own, torch.inf).amin(dim=1)
    assert torch.equal(found[own], distance[own])
    assert torch.equal(found.masked_fill(own, torch.inf).amin(dim=1), other)


@pytest.mark.parametrize("dim", [20, 100])
def test_the_nearest_of_points_that_products_cannot_tell_apart(rng: Rng, dim: int) -> None:
    """Most points lie on a sphere around the first row, with radii that differ by less than the error of a product."""
    codes = torch.from_numpy(np.repeat([0, 1, 2], [3000, 40, 700]))
    z = torch.from_numpy(rng.normal(size=(300, dim))).float()
    steps = rng.normal(size=(len(codes), dim))
    steps *= (0.5 + 1e-7 * rng.random((len(codes), 1))) / np.linalg.norm(steps, axis=1, keepdims=True)
    points = z[0] + torch.from_numpy(steps).float()
    near = Neighbours(points, codes, torch.zeros(dim)).cuda()
    assert near.tables
    distance, index = near.nearest(z.cuda())
    squares = (points.cuda().double() - z.cuda().double()[:, None]).square().sum(dim=2)
    for c, own in enumerate(squares.split([3000, 40, 700], dim=1)):
        assert torch.allclose(squares.gather(1, index[:, c : c + 1])[:, 0], own.amin(dim=1), rtol=1e-14)
        assert torch.equal(distance[:, c], own.amin(dim=1).sqrt().float())
    check_labels(near, z.cuda(), distance)


def test_clusters_far_apart_are_searched_in_float64(rng: Rng) -> None:
    middles = np.repeat([0.0, 1e4], 200)[:, None]
    points = torch.from_numpy(middles + 1e-3 * rng.normal(size=(400, 8))).float()
    near = Neighbours(points, torch.from_numpy(np.repeat([0, 1], 200)))
    expected = near(points)
    near = near.cuda()
    assert near.far_apart
    assert not near.tables
    assert torch.allclose(near(points.cuda()).cpu(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("options", [{}, {"reference_points": 0}, {"reference_points": 40}])
@pytest.mark.parametrize("classes", [2, 3, 12])
def test_kernels_equal_plain_torch(
    rng: Rng, classes: int, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = accepting(rng, classes, **options)
    plain = copy.deepcopy(head)
    assert plain.evidence is not None
    for part in (plain.evidence.reference_points, plain.evidence.white_reference_points):
        part.tables = []
    plain.evidence.densities.bank.prepared = None
    z, logits = batch(rng, 20_000, classes)
    z[3], z[4, 0] = 0.0, torch.nan
    logits[5, 0], logits[6] = torch.nan, -torch.inf
    for given in (logits, None):
        out = head(z, logits=given)
        with monkeypatch.context() as patch:
            patch.setattr(assess, "available", lambda _: False)
            expected = plain(z, logits=given)
        same(out, expected)


@pytest.mark.parametrize("classes", [3, 12])
def test_every_batch_has_the_same_answer(rng: Rng, classes: int) -> None:
    head = accepting(rng, classes)
    z, logits = batch(rng, 40_000, classes)
    whole = head(z, logits=logits)
    for size in (1, 5, 16, 33, 64, 129, 1000, 17_000):
        for start in range(0, min(40_000, 20 * size), size):
            rows = slice(start, start + size)
            out = head(z[rows], logits=logits[rows])
            same(out, HeadPrediction(*(field[rows] for field in whole)), EQUAL)
    same(head(z.double(), logits=logits), whole, EQUAL)


def test_large_batches_go_in_pieces(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    head = accepting(rng)
    z, logits = batch(rng, 3000)
    whole = head(z, logits=logits)
    monkeypatch.setattr("sepc_torch.head.trust_head.GPU_ROWS", 1000)
    monkeypatch.setattr("sepc_torch.head.trust_head.GPU_ROWS", 1000)
    same(head(z, logits=logits), whole)
    same(head(z, labels=whole.network_label), head(z, labels=whole.network_label.clone()))


def test_graphs(rng: Rng) -> None:
    head = accepting(rng)
    z, logits = batch(rng, 64)
    for given in (logits, None):
        graph = head.graphed(64, logits=given is not None)
        whole = head(z, logits=given)
        same(graph(z, given), whole)
        some = graph(z[:7], None if given is None else given[:7])
        same(some, HeadPrediction(*(field[:7] for field in whole)), EQUAL)
    with pytest.raises(ValueError, match="recorded without logits"):
        graph(z, logits)
    with pytest.raises(ValueError, match="at most 64 embeddings"):
        graph(torch.cat([z, z]))


def test_memory_does_not_grow_with_the_batch(rng: Rng) -> None:
    head = accepting(rng)
    added = []
    for rows in (2**18, 2**19):
        z, logits = batch(rng, 2**18)
        z, logits = z.repeat(rows // 2**18, 1), logits.repeat(rows // 2**18, 1)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = head(z, logits=logits)
        kept = sum(field.element_size() * field.numel() for field in out)
        added.append(torch.cuda.max_memory_allocated() - before - 2 * kept)
        del out
    assert added[1] < 2**30
    assert added[1] < 1.5 * max(added[0], 2**27)
