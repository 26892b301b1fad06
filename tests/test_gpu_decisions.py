"""The whole forward on a CUDA device: the decisions of plain torch, without waiting, whatever the shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ellipsoid_models import distances_in_many, model_of, points_for
from synchronisation_checks import waiting_is_an_error

from sepc_torch import SEPC, Prediction
from sepc_torch.ellipsoid import SURFACE_TOLERANCE
from sepc_torch.model import kernels as model_kernels
from sepc_torch.model.kernels import decide_distances
from sepc_torch.model.kernels.decision_tables import rule_tables
from sepc_torch.model.prediction import predict_for_label
from sepc_torch.model.rules import resolve

pytestmark = pytest.mark.gpu
Rng = np.random.Generator


def by_torch(sepc: SEPC) -> SEPC:
    """The same model without kernels, in float64, so that rounding is not what is compared."""
    bank = type(sepc.bank)(
        sepc.bank.offsets.double(), sepc.bank.whiteners.double(), sepc.bank.origin.double(), kernel="torch"
    )
    training = sepc.training_counts
    training = training._replace(
        step_distances=training.step_distances.double(), tail_distances=training.tail_distances.double()
    )
    return SEPC(
        bank, training, sepc.totals, sepc.scale.double(), classes=sepc.classes, nearest=sepc.nearest, nan_policy="flag"
    )


def agree(found: Prediction, wanted: Prediction, unclear: torch.Tensor) -> None:
    """Kernels and float64 torch decide alike in every row, except rows within rounding of a surface or a tie."""
    assert torch.equal(found.label < 0, wanted.label < 0)
    clear = ~unclear & (wanted.label >= 0)
    for field in ("label", "rule", "nearest", "runner_up"):
        assert torch.equal(getattr(found, field)[clear], getattr(wanted, field)[clear]), field
    for field in ("distance", "margin"):
        a, b = getattr(found, field)[clear].double(), getattr(wanted, field)[clear].double()
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True), field
    # A count of training points may differ by one where a point is as far as one of them.
    close = (found.trust[clear] - wanted.trust[clear]).abs() < 1e-5
    assert int((~close).sum()) <= 0.01 * len(close)


def near_a_boundary(reference: SEPC, z: torch.Tensor) -> torch.Tensor:
    """Rows whose distances, in float64, lie within float32 rounding of a surface or of each other (nearest classes)."""
    distance = reference.bank(z.double())
    surface = ((distance - (1.0 + SURFACE_TOLERANCE)).abs() < 1e-5).any(dim=1)
    ordered = torch.nn.functional.pad(distance, (0, 2), value=torch.inf).sort(dim=1).values[:, :-1]
    gaps = ordered[:, 1:] - ordered[:, :-1]
    # Any two distances may matter: a tie of counts goes to the nearest of any classes.
    return surface | (gaps < 1e-5 * ordered[:, :-1].clamp_min(1e-3)).any(dim=1)


@pytest.mark.parametrize(
    ("count", "dim", "classes"),
    [
        (1, 1, 2), (7, 3, 3), (33, 2, 4), (40, 16, 5), (100, 33, 12), (65, 64, 40), (5, 130, 3), (200, 2, 9),
        (300, 2, 3), (1100, 2, 3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mixed", [False, True])
def test_decides_as_torch_does(rng: Rng, count: int, dim: int, classes: int, mixed: bool) -> None:
    sepc = model_of(rng, count, dim, classes, points=1000, mixed=mixed).cuda()
    reference = by_torch(sepc)
    for rows in (1, 3, 1500, 3000, 9000):  # shared by the threads of a program, and in the last a thread each
        z = points_for(rng, sepc, rows).cuda()
        label = torch.from_numpy(rng.integers(0, classes, rows)).cuda()
        torch.full((30 * rows,), 2**40, device="cuda")  # what the allocator hands out next is poisoned
        torch.full((60 * rows,), torch.nan, device="cuda")
        found, wanted = sepc.judge(z, label), reference.judge(z.double(), label)
        # Exactly the decisions of torch from the kernel's own distances, in every row.
        distance = sepc.bank(z)
        resolved = resolve(distance, sepc.training_counts)
        for ours, judged in zip(found, (resolved.label, label), strict=True):
            theirs = predict_for_label(distance, resolved, sepc.training_counts, sepc.totals, judged)
            good = theirs.label >= 0
            for field in ("label", "rule", "runner_up"):
                assert torch.equal(getattr(ours, field)[good], getattr(theirs, field)[good]), (rows, field)
            assert torch.equal(ours.label < 0, theirs.label < 0)
            assert torch.allclose(ours.trust, theirs.trust, rtol=1e-6, atol=0)
            # Of exactly equal distances the kernel takes the first by class, torch the first in the model.
            assert torch.equal(distance.gather(1, ours.nearest[:, None])[good], theirs.distance[good, None])
        unclear = near_a_boundary(reference, z)
        for ours, theirs in zip(found, wanted, strict=True):
            agree(ours, theirs, unclear)
        assert torch.equal(found[1].label, torch.where(found[0].label < 0, -1, label))
        alone = sepc(z)
        for field in Prediction._fields:
            assert torch.equal(getattr(alone, field).nan_to_num(), getattr(found[0], field).nan_to_num()), field
    assert sepc(z[:0]).label.shape == (0,)


@pytest.mark.parametrize("count", [20, 100, 300, 1000, 1100])
def test_counts_where_a_pattern_is_new(rng: Rng, count: int) -> None:
    """In sets of ellipsoids that no training point has; by threads, by a warp to a row and by several."""
    sepc = model_of(rng, count, 2, 5, points=1000, held=2.0).cuda()
    training, totals = sepc.training_counts, sepc.totals
    kernels = model_kernels.Kernels(rule_tables(training, totals), None, None)
    for rows in (1, 60, 300, 3000, 40_000):
        distance = distances_in_many(rng, count, rows).cuda()
        found = resolve(distance, training)
        wanted = predict_for_label(distance, found, training, totals, found.label)
        ints, floats = decide_distances(distance, None, None, kernels)
        for ours, field in zip(ints, ("label", "rule", "nearest", "runner_up"), strict=True):
            assert torch.equal(ours, getattr(wanted, field)), (rows, field)
        for mine, field in zip(floats, ("trust", "distance", "margin"), strict=True):
            assert torch.allclose(mine, getattr(wanted, field), rtol=1e-6, atol=0), (rows, field)


@pytest.mark.parametrize("nearest", ["mahalanobis", "euclidean"])
@pytest.mark.parametrize("steps", [20, 2048])
def test_in_float64_every_decision_is_the_same(rng: Rng, nearest: str, steps: int) -> None:
    """With 20 steps the ellipsoids have a horizon."""
    sepc = model_of(rng, 30, 3, 4, points=1000, steps=steps, dtype=torch.float64, nearest=nearest).cuda()
    for rows in (3000, 9000):
        z = points_for(rng, sepc, rows).cuda()
        found, wanted = sepc(z), by_torch(sepc)(z)
        assert set(wanted.rule.tolist()) == {0, 1, 2, 3}
        good = wanted.label >= 0
        for field in ("label", "rule", "nearest", "runner_up"):
            assert torch.equal(getattr(found, field)[good], getattr(wanted, field)[good]), field
        assert torch.allclose(found.trust, wanted.trust, rtol=1e-12, atol=0)
        assert torch.allclose(found.margin, wanted.margin, rtol=1e-9, atol=0, equal_nan=True)


@pytest.mark.parametrize("steps", [20, 2048])
def test_equally_near(rng: Rng, steps: int) -> None:
    """Twins of different classes: outside them the least and the greatest counts decide."""
    sepc = model_of(rng, 20, 2, 4, points=500, held=0.3, twins=True, steps=steps, dtype=torch.float64).cuda()
    for rows in (2000, 9000):
        z = points_for(rng, sepc, rows).cuda()
        found, wanted = sepc(z), by_torch(sepc)(z)
        assert int((wanted.rule == 3).sum()) > 500
        good = wanted.label >= 0
        for field in ("label", "rule", "runner_up"):
            assert torch.equal(getattr(found, field)[good], getattr(wanted, field)[good]), field
        assert torch.allclose(found.trust, wanted.trust, rtol=1e-12, atol=0)


def test_screening_changes_nothing(rng: Rng) -> None:
    """To the last bit, for every field, on batches large enough to be screened; labels of others are judged too."""
    for count, dim, held in ((64, 32, 1.0), (100, 64, 3.0), (130, 20, 1.0)):
        sepc = model_of(rng, count, dim, 8, points=2000, held=held).cuda()
        z = points_for(rng, sepc, 2**17).cuda()
        label = torch.from_numpy(rng.integers(0, 8, len(z))).cuda()
        screened = sepc.judge(z, label)
        sepc.screen = False
        for ours, exact in zip(screened, sepc.judge(z, label), strict=True):
            for field in Prediction._fields:
                assert torch.equal(getattr(ours, field).nan_to_num(), getattr(exact, field).nan_to_num()), field


def test_screening_is_what_runs(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    screening = model_kernels._triton().screening
    screened_distances = screening.screened_distances

    def spy(z: torch.Tensor, *args: Any) -> Any:
        calls.append(len(z))
        return screened_distances(z, *args)

    monkeypatch.setattr(screening, "screened_distances", spy)
    sepc = model_of(rng, 64, 32, 3).cuda()
    sepc(points_for(rng, sepc, 2**16).cuda())
    sepc(points_for(rng, sepc, 100).cuda())
    assert calls == [2**16]


def test_views_begin_anywhere(rng: Rng) -> None:
    """Points, labels and origin that do not begin at a multiple of sixteen bytes, after some that do, and before."""
    sepc = model_of(rng, 20, 7, 3).cuda()
    z = points_for(rng, sepc, 65).cuda()
    label = torch.from_numpy(rng.integers(0, 3, 65)).cuda()
    wanted = sepc.judge(z, label)
    origin = torch.empty(8, device="cuda")[1:]
    for rows in (slice(1, 65), slice(4, 64), slice(3, 50), slice(0, 65)):
        for ours, whole in zip(sepc.judge(z[rows], label[rows]), wanted, strict=True):
            for field in Prediction._fields:
                assert torch.equal(getattr(ours, field).nan_to_num(), getattr(whole, field)[rows].nan_to_num()), field
        # Another place for the same numbers.
        origin.copy_(sepc.bank.origin)
        sepc.bank.origin, origin = origin, sepc.bank.origin


def test_pieces_do_not_show(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    sepc = model_of(rng, 20, 6, 3).cuda()
    z = points_for(rng, sepc, 1000).cuda()
    label = torch.from_numpy(rng.integers(0, 3, 1000)).cuda()
    whole = sepc.judge(z, label)
    monkeypatch.setattr(model_kernels, "_PIECE", 20 * 128)
    for ours, wanted in zip(sepc.judge(z, label), whole, strict=True):
        for field in ("label", "rule", "nearest", "runner_up"):
            assert torch.equal(getattr(ours, field), getattr(wanted, field)), field
        assert torch.allclose(ours.margin, wanted.margin, rtol=1e-5, equal_nan=True)


def test_memory_does_not_grow_with_rows_times_ellipsoids(rng: Rng) -> None:
    sepc = model_of(rng, 400, 4, 3).cuda()
    peaks = []
    for rows in (2**18, 2**20):
        z = torch.randn(rows, 4, device="cuda")
        sepc(z)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = sepc(z)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del out
    # The results take 44 bytes a row; distances alone would take 1600.
    assert peaks[1] - peaks[0] < 100 * (2**20 - 2**18)


def test_half_precision_and_strides(rng: Rng) -> None:
    sepc = model_of(rng, 12, 5, 3).cuda()
    z = points_for(rng, sepc, 400, bad=False).cuda()
    wide = torch.empty(400, 15, device="cuda")
    wide[:, 1::3] = z
    wanted = sepc(z)
    for same in (wide[:, 1::3], z.T.contiguous().T):
        for field in Prediction._fields:
            assert torch.equal(getattr(sepc(same), field), getattr(wanted, field)), field
    for dtype in (torch.float16, torch.bfloat16):
        narrow = z.to(dtype)
        for field in Prediction._fields:
            assert torch.equal(getattr(sepc(narrow), field), getattr(sepc(narrow.float()), field)), field


def test_rows_without_a_distance(rng: Rng) -> None:
    sepc = model_of(rng, 12, 5, 3).cuda()
    z = points_for(rng, sepc, 300, bad=False).cuda()
    before = sepc(z)
    z[[3, 70, 71], [2, 0, 4]] = torch.tensor([torch.nan, torch.inf, 3e38], device="cuda")
    after = sepc(z)
    assert after.label[[3, 70]].tolist() == [-1, -1]
    assert after.trust[[3, 70]].tolist() == [0.0, 0.0]
    keep = torch.ones(300, dtype=torch.bool)
    keep[[3, 70, 71]] = False
    for field in Prediction._fields:
        assert torch.equal(getattr(after, field)[keep], getattr(before, field)[keep]), field
    sepc.nan_policy = "raise"
    with pytest.raises(ValueError, match="Row 3 holds"):
        sepc(z)


@pytest.mark.parametrize("rows", [1, 100, 2**16])
def test_nothing_waits(rng: Rng, rows: int) -> None:
    sepc = model_of(rng, 64, 32, 3).cuda()
    z = points_for(rng, sepc, rows).cuda()
    label = torch.from_numpy(rng.integers(0, 3, rows)).cuda()
    sepc.warmup(rows)
    with waiting_is_an_error():
        sepc(z)
        sepc.judge(z, label, checked=True)
        sepc.bank(z)


def test_waiting_would_be_seen(rng: Rng) -> None:
    sepc = model_of(rng, 5, 3, 3, nan_policy="raise").cuda()
    z = points_for(rng, sepc, 10, bad=False).cuda()
    sepc(z)
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchron"):
        sepc(z)


@pytest.mark.parametrize("rows", [5, 2**16])
@pytest.mark.parametrize("policy", ["flag", "raise"])
def test_runs_again_from_a_graph(rng: Rng, rows: int, policy: str) -> None:
    sepc = model_of(rng, 64, 32, 3, nan_policy=policy).cuda()
    z = points_for(rng, sepc, rows, bad=False).cuda()
    sepc.warmup(rows)
    held, graph = z.flip(0).contiguous(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sepc(held)
    held.copy_(z)
    graph.replay()
    for field, wanted in sepc(z)._asdict().items():
        assert torch.equal(getattr(out, field), wanted), field


def test_runs_on_the_stream_of_the_caller(rng: Rng) -> None:
    sepc = model_of(rng, 64, 32, 3).cuda()
    z = points_for(rng, sepc, 2**16).cuda()
    wanted = sepc(z)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        moved = torch.empty_like(z).copy_(z)  # only the side stream knows when this is done
        out = sepc(moved)
    side.synchronize()
    for field in ("label", "rule", "nearest", "runner_up", "trust"):
        assert torch.equal(getattr(out, field), getattr(wanted, field)), field


def test_compiles(rng: Rng) -> None:
    sepc = model_of(rng, 12, 5, 3).cuda()
    z = points_for(rng, sepc, 200).cuda()
    compiled = torch.compile(sepc, fullgraph=True, backend="aot_eager")
    for field, wanted in sepc(z)._asdict().items():
        assert torch.equal(getattr(compiled(z), field).nan_to_num(), wanted.nan_to_num()), field


def test_gradients_take_the_other_way(rng: Rng) -> None:
    sepc = model_of(rng, 12, 5, 3).cuda()
    z = points_for(rng, sepc, 200, bad=False).cuda().requires_grad_()
    out = sepc(z)
    (out.distance.sum() + out.margin.clamp_max(10).sum()).backward()
    assert z.grad is not None
    assert z.grad.isfinite().all()
    with torch.no_grad():
        agree(sepc(z), out, torch.zeros(len(z), dtype=torch.bool, device="cuda"))


def test_tables_follow_the_model(rng: Rng, tmp_path: object) -> None:
    """Moved, loaded and saved models decide as the one they came from."""
    first, second = (model_of(rng, 12, 5, 3).cuda() for _ in range(2))
    z = points_for(rng, first, 500).cuda()
    first.load_state_dict(second.state_dict())
    second.save(f"{tmp_path}/model.safetensors")
    third = SEPC.load(f"{tmp_path}/model.safetensors", device="cuda")
    for field, wanted in second(z)._asdict().items():
        assert torch.equal(getattr(first(z), field).nan_to_num(), wanted.nan_to_num()), field
        assert torch.equal(getattr(third(z), field).nan_to_num(), wanted.nan_to_num()), field
    torch.save(second, f"{tmp_path}/module.pt")
    fourth = torch.load(f"{tmp_path}/module.pt", map_location="cpu", weights_only=False)
    assert fourth._kernels is None
    reference = by_torch(fourth)
    agree(fourth(z.cpu()), reference(z.cpu().double()), near_a_boundary(reference, z.cpu()))
    assert second.cpu()._kernels is None
