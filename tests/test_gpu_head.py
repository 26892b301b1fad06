"""The trust head on a CUDA device: agreement with the CPU, no synchronisation, CUDA graphs and streams."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synchronisation_checks import waiting_is_an_error
from torch import Tensor

from sepc_torch import TrustHead, compare
from sepc_torch.head.evidence.neighbours import Neighbours
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.metrics.baselines import baseline_scores
from sepc_torch.shapes import Array

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The head accepts nothing")]
Rng = np.random.Generator
DIM = 16

# Tolerances (absolute, relative). Distances are float32 sums in another order; thin ellipsoids multiply the rounding
# error of 6e-8 by about a thousand. TF32 products, whose error is 1e-3, are not allowed. Scores are in float64.
FLOAT32 = {
    "trust": (1e-5, 0.0),
    "distance": (3e-4, 3e-5),
    "margin": (1e-4, 2e-4),
    "network_trust": (1e-5, 0.0),
    "network_margin": (1e-4, 2e-4),
    "confidence": (0.0, 2e-7),
    "p_value": (0.0, 2e-7),
    "class_p_value": (0.0, 2e-7),
    "nonconformity": (0.0, 2e-7),
    "joint": (0.0, 2e-7),
}
DECISIONS = ("label", "rule", "nearest", "runner_up", "accept")


def draw(rng: Rng, count: int, classes: int = 3) -> tuple[Array, Array, Array]:
    """Overlapping classes, and the logits of a network that sees the points with noise."""
    means = 2.5 * np.eye(classes, DIM) + 1.0
    labels = rng.permutation(np.arange(count) % classes)
    x = means[labels] + rng.normal(size=(count, DIM))
    seen = x + rng.normal(size=x.shape)
    return x, labels, -((seen[:, None] - means) ** 2).sum(axis=2)


def calibrated(rng: Rng, classes: int = 3, **options: Any) -> TrustHead:
    x, labels, _ = draw(rng, 450, classes)
    head = TrustHead.fit(x, labels, **{"dim": 6, "nan_policy": "flag", **options})
    return head.calibrate(*draw(rng, 500, classes))


def batch(rng: Rng, count: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Embeddings, a fifth of them out of distribution, and logits."""
    x, _, logits = draw(rng, count, classes)
    x[::5] = 4.0 * rng.normal(size=x[::5].shape)
    return torch.from_numpy(x).float(), torch.from_numpy(logits).float()


def agree(found: HeadPrediction, expected: HeadPrediction) -> None:
    """Check that all fields agree within tolerance and all decisions are equal, except in a few rows at a boundary."""
    allowed = 0.001 * len(expected.label)

    def rows(same: Tensor) -> int:
        return int((~same).sum())

    for name in HeadPrediction._fields:
        a, b = getattr(found, name).cpu(), getattr(expected, name).cpu()
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if name in DECISIONS:
            assert rows(a == b) <= allowed, name
        elif name == "network_label":
            assert rows(a == b) <= (allowed if torch.equal(expected.label, expected.network_label) else 0), name
        else:
            atol, rtol = FLOAT32[name]
            assert rows(torch.isclose(a, b, rtol, atol, equal_nan=True)) <= allowed, name


def on(model: TrustHead, device: str = "cuda") -> TrustHead:
    return copy.deepcopy(model).to(device)


class TestAgreesWithTheCpu:
    @pytest.mark.parametrize("classes", [2, 3, 12])
    def test_every_field(self, rng: Rng, classes: int) -> None:
        model = calibrated(rng, classes)
        z, logits = batch(rng, 5000, classes)
        moved = on(model)
        assert {buffer.device.type for buffer in moved.buffers()} == {"cuda"}
        out = moved(z.cuda(), logits=logits.cuda())
        assert {field.device.type for field in out} == {"cuda"}
        agree(out, model(z, logits=logits))
        agree(moved(z.cuda()), model(z))
        labels = torch.from_numpy(rng.integers(0, classes, len(z)))
        agree(moved(z.cuda(), labels=labels.cuda()), model(z, labels=labels))
        assert 0.1 < float(out.accept.float().mean()) < 0.99

    @pytest.mark.parametrize("options", [{"normalize": None}, {"normalize": "standardize"}, {"reference_points": 0}])
    def test_every_kind_of_head(self, rng: Rng, options: dict[str, Any]) -> None:
        model = calibrated(rng, **options)
        z, logits = batch(rng, 5000)
        agree(on(model)(z.cuda(), logits=logits.cuda()), model(z, logits=logits))

    @pytest.mark.parametrize("width", [400, 1536])
    def test_wide_embeddings(self, rng: Rng, width: int) -> None:
        turn = np.linalg.qr(rng.normal(size=(width, DIM)))[0].T
        (x, labels, _), (held, *rest) = draw(rng, 450), draw(rng, 500)
        wide = [part @ turn + 0.01 * rng.normal(size=(len(part), width)) for part in (x, held)]
        model = TrustHead.fit(wide[0], labels, dim=6).calibrate(wide[1], *rest)
        z, logits = batch(rng, 20_000)
        z = z @ torch.from_numpy(turn).float()
        agree(on(model)(z.cuda(), logits=logits.cuda()), model(z, logits=logits))

    @pytest.mark.parametrize("precision", ["high", "medium"])
    def test_every_precision_of_matrix_products(self, rng: Rng, precision: str) -> None:
        model = calibrated(rng)
        z, logits = batch(rng, 5000)
        moved = on(model)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            out = moved(z.cuda(), logits=logits.cuda())
            with torch.autocast("cuda", dtype=torch.bfloat16):
                within = moved(z.cuda(), logits=logits.cuda())
        finally:
            torch.set_float32_matmul_precision(before)
        expected = model(z, logits=logits)
        agree(out, expected)
        agree(within, expected)

    def test_float64_to_nine_digits(self, rng: Rng) -> None:
        model = calibrated(rng).double()
        z, logits = batch(rng, 5000)
        expected = model(z.double(), logits=logits)
        out = on(model)(z.double().cuda(), logits=logits.cuda())
        for name in HeadPrediction._fields:
            a, b = getattr(out, name).cpu(), getattr(expected, name)
            assert a.dtype == b.dtype
            if b.is_floating_point():
                # Interpolating a rank between two close values amplifies the rounding error of their difference.
                assert torch.allclose(a, b, rtol=1e-9, atol=1e-8, equal_nan=True), name
            else:
                assert torch.equal(a, b), name

    def test_before_calibration(self, rng: Rng) -> None:
        x, labels, _ = draw(rng, 300)
        model = TrustHead.fit(x, labels, dim=6)
        z, logits = batch(rng, 2000)
        out = on(model)(z.cuda(), logits=logits.cuda())
        agree(out, model(z, logits=logits))
        assert out.p_value.isnan().all()

    def test_gradients_of_distances(self, rng: Rng) -> None:
        model = calibrated(rng)
        grads = []
        z, _ = batch(rng, 500)
        for head, points in ((model, z.clone()), (on(model), z.cuda())):
            points.requires_grad_()
            head(points).distance.sum().backward()
            assert points.grad is not None
            grads.append(points.grad.cpu())
        apart = (grads[0] - grads[1]).norm(dim=1) > 1e-2 * grads[0].norm(dim=1)
        assert int(apart.sum()) <= 2, "only points between two ellipsoids may differ"


class TestShapesAndNumbers:
    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_small_batches(self, rng: Rng, count: int) -> None:
        model = calibrated(rng)
        moved = on(model)
        z, logits = (tensor[:count] for tensor in batch(rng, 10))
        for out, expected in (
            (moved(z.cuda(), logits=logits.cuda()), model(z, logits=logits)),
            (moved(z.cuda()), model(z)),
        ):
            agree(out, expected)
            assert all(field.shape == (count,) for field in out)

    def test_flagged_rows(self, rng: Rng) -> None:
        """Embeddings of NaN, infinity, zeros (with unit length) and values that overflow, and logits of NaN."""
        model = calibrated(rng)
        z, logits = batch(rng, 1000)
        z[0], z[1, 2], z[2, 0], z[3] = 0.0, torch.nan, torch.inf, 1e30
        logits[4, 1], logits[5] = torch.nan, torch.nan
        out, expected = on(model)(z.cuda(), logits=logits.cuda()), model(z, logits=logits)
        for each in (out, expected):
            assert (each.label[:4] == -1).all()
            assert (each.label[4:] >= 0).all()
            assert (each.network_label[:6] == -1).all()
            assert (each.network_label[6:] >= 0).all()
            for field in (each.network_trust, each.confidence, each.joint):
                assert (field[:6] == 0).all()
            assert each.network_margin[4:6].isnan().all()
            assert each.class_p_value[4:6].isnan().all()
            assert not each.accept[:6].any()
        rest = [HeadPrediction(*(field[6:] for field in each)) for each in (out, expected)]
        agree(rest[0], rest[1])
        for field in ("p_value", "nonconformity"):
            assert torch.allclose(getattr(out, field)[:4].cpu(), getattr(expected, field)[:4])

    def test_the_policy_to_raise(self, rng: Rng) -> None:
        moved = on(calibrated(rng, nan_policy="raise"))
        z, logits = (tensor.cuda() for tensor in batch(rng, 50))
        moved(z, logits=logits)
        with pytest.raises(ValueError, match="holds NaN"):
            moved(torch.where(torch.arange(50, device="cuda")[:, None] == 7, 0.0, z), logits=logits)
        logits[9, 0] = torch.nan
        with pytest.raises(ValueError, match=r"logits hold NaN.* in 1 rows, first in row 9"):
            moved(z, logits=logits)

    def test_logits_on_another_device(self, rng: Rng) -> None:
        z, logits = batch(rng, 10)
        with pytest.raises(ValueError, match="logits are on cpu and embeddings on cuda"):
            on(calibrated(rng))(z.cuda(), logits=logits)

    def test_strides(self, rng: Rng) -> None:
        moved = on(calibrated(rng))
        z, logits = (tensor.cuda() for tensor in batch(rng, 1000))
        expected = moved(z, logits=logits)
        wide = torch.full((1000, 3 * DIM), torch.nan, device="cuda")
        wide[:, 1::3] = z
        agree(moved(wide[:, 1::3], logits=logits.T.contiguous().T), expected)
        agree(moved(z.T.contiguous().T, logits=logits), expected)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_narrow_embeddings(self, rng: Rng, dtype: torch.dtype) -> None:
        model = calibrated(rng)
        z, logits = (tensor.to(dtype) for tensor in batch(rng, 5000))
        out = on(model)(z.cuda(), logits=logits.cuda())
        assert out.confidence.dtype == torch.float32
        agree(out, model(z, logits=logits))

    @pytest.mark.parametrize("sizes", [(300, 1, 40), tuple(range(1, 61))])
    def test_nearest_points_of_few_and_many_classes(self, rng: Rng, sizes: tuple[int, ...]) -> None:
        codes = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        points = torch.from_numpy(rng.normal(size=(len(codes), 7)))
        z = torch.from_numpy(rng.normal(size=(500, 7)))
        z[0], z[1] = torch.nan, points[0]
        near = Neighbours(points, codes)
        expected = near(z)
        found = near.cuda()(z.cuda()).cpu()
        assert torch.allclose(found, expected, rtol=1e-9, equal_nan=True)
        assert found[1, 0] == 0
        rough = near.float()(z.float().cuda()).cpu().double()
        assert torch.allclose(rough[2:], expected[2:], rtol=1e-4, atol=1e-3)
        assert near(z[:0].cuda()).shape == (0, len(sizes))


class TestOnTheDevice:
    def test_save_and_load(self, rng: Rng, tmp_path: Path) -> None:
        moved = on(calibrated(rng))
        acceptance = moved.accept_at(risk=0.2)
        moved.save(tmp_path / "head.safetensors")
        again = TrustHead.load(tmp_path / "head.safetensors", device="cuda")
        for name, buffer in moved.named_buffers():
            other = again.get_buffer(name)
            assert other.device.type == "cuda"
            assert torch.equal(other.nan_to_num(-9.0), buffer.nan_to_num(-9.0)), name
        z, logits = (tensor.cuda() for tensor in batch(rng, 2000))
        agree(again(z, logits=logits), moved(z, logits=logits))
        assert str(again.accept_at(risk=0.2)) == str(acceptance)
        agree(TrustHead.load(tmp_path / "head.safetensors")(z.cpu(), logits=logits.cpu()), moved(z, logits=logits))

    def test_a_checkpoint(self, rng: Rng, tmp_path: Path) -> None:
        """Loading into a head on the device with other classes and sizes."""
        moved, other = on(calibrated(rng)), on(calibrated(rng, 2, reference_points=50))
        torch.save(moved.state_dict(), tmp_path / "head.ckpt")
        other.load_state_dict(torch.load(tmp_path / "head.ckpt", weights_only=True))
        assert {buffer.device.type for buffer in other.buffers()} == {"cuda"}
        z, logits = (tensor.cuda() for tensor in batch(rng, 2000))
        agree(other(z, logits=logits), moved(z, logits=logits))

    def test_calibrate_and_accept_at(self, rng: Rng) -> None:
        x, labels, _ = draw(rng, 450)
        model = TrustHead.fit(x, labels, dim=6, nan_policy="flag")
        moved = on(model)
        held = [torch.from_numpy(array) for array in draw(rng, 500)]
        model.calibrate(*held)
        moved.calibrate(*(tensor.cuda() for tensor in held))
        assert {buffer.device.type for buffer in moved.buffers()} == {"cuda"}
        z, logits = batch(rng, 3000)
        requests: list[dict[str, Any]] = [{"flag_rate": 0.1}, {"risk": 0.2}, {"risk": 0.3, "delta": 0.2}]
        for request in requests:
            expected, acceptance = model.accept_at(**request), moved.accept_at(**request)
            assert acceptance.points == expected.points > 0
            assert acceptance.coverage == expected.coverage
            assert acceptance.threshold == pytest.approx(expected.threshold, rel=1e-9)
            agree(moved(z.cuda(), logits=logits.cuda()), model(z, logits=logits))
        own, there = model.calibrate(*held[:2]), moved.calibrate(*(tensor.cuda() for tensor in held[:2]))
        agree(there(z.cuda()), own(z))

    def test_predict_and_explain(self, rng: Rng) -> None:
        model = calibrated(rng)
        z, _ = batch(rng, 1000)
        moved = on(model)
        assert float((moved.predict(z.cuda()) == model.predict(z)).mean()) > 0.998
        assert float((moved.predict(z.numpy()) == model.predict(z)).mean()) > 0.998
        assert moved.explain(z.cuda(), 3).details["label"] == moved.predict(z[3:4])[0]  # type: ignore[union-attr]

    def test_compare(self, rng: Rng) -> None:
        (x, y, _), (test, truth, logits), (ood, _, far) = (draw(rng, count) for count in (300, 400, 200))
        given = [x, y, test, truth, logits, ood - 8.0]
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in given]
        options: dict[str, Any] = {"show": False, "dim": 6}
        expected = compare(*tensors, logits_ood=torch.from_numpy(far), **options)
        found = compare(*(t.cuda() for t in tensors), logits_ood=torch.from_numpy(far).cuda(), **options)
        assert found.head.sepc.codes.is_cuda
        for a, b in zip(found.rows, expected.rows, strict=True):
            assert a["score"] == b["score"]
            for name, value in b.items():
                if name != "score":
                    # Near ties among 200 rows may change their order.
                    assert a[name] == pytest.approx(value, abs=0.02, nan_ok=True), (a["score"], name)

    def test_baselines(self, rng: Rng) -> None:
        x, y, logits = (torch.from_numpy(array) for array in draw(rng, 300))
        test, truth, scores = (torch.from_numpy(array) for array in draw(rng, 200))
        given = (x, y, test, scores, logits, (scores, truth))
        expected = baseline_scores(*given)
        there = [tuple(t.cuda() for t in part) if isinstance(part, tuple) else part.cuda() for part in given]
        found = baseline_scores(*there)  # type: ignore[arg-type]
        assert set(found) == set(expected)
        for name, values in expected.items():
            assert found[name].is_cuda, name
            assert torch.allclose(found[name].cpu(), values, rtol=1e-5, atol=1e-7), name


class TestDoesNotSynchronise:
    def test_synchronisation_is_detected(self) -> None:
        x = torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError, match="synchroniz"), waiting_is_an_error():
            bool(x.any())
        assert bool(x.any()), "the mode must be restored"

    @pytest.mark.parametrize("classes", [2, 12])
    def test_forward(self, rng: Rng, classes: int) -> None:
        moved = on(calibrated(rng, classes))
        z, logits = (tensor.cuda() for tensor in batch(rng, 3000, classes))
        z[5], z[6] = torch.nan, 0.0
        logits[7] = torch.nan
        for count in (3000, 3, 1, 0):
            expected = moved(z[:count], logits=logits[:count]), moved(z[:count])
            with waiting_is_an_error():
                found = moved(z[:count], logits=logits[:count]), moved(z[:count])
            for a, b in zip(found, expected, strict=True):
                agree(a, b)

    @pytest.mark.parametrize("options", [{"normalize": None}, {"reference_points": 0}])
    def test_other_heads(self, rng: Rng, options: dict[str, Any]) -> None:
        x, labels, _ = draw(rng, 300)
        z, logits = (tensor.cuda() for tensor in batch(rng, 500))
        fresh = TrustHead.fit(x, labels, dim=6, nan_policy="flag", **options).cuda()
        for moved in (on(calibrated(rng, **options)), fresh, on(calibrated(rng, **options).double())):
            moved(z, logits=logits)
            with waiting_is_an_error():
                moved(z, logits=logits)

    def test_with_gradients_and_narrow_embeddings(self, rng: Rng) -> None:
        moved = on(calibrated(rng))
        z, logits = (tensor.cuda() for tensor in batch(rng, 500))

        def step() -> None:
            points = z.clone().requires_grad_()
            moved(points, logits=logits).distance.sum().backward()
            moved(z.bfloat16(), logits=logits.bfloat16())

        step()
        with waiting_is_an_error():
            step()

    def test_after_warming_up(self, rng: Rng) -> None:
        moved = on(calibrated(rng))
        assert moved.warmup() > 0.0
        assert moved.warmup(500) > 0.0
        z, logits = (tensor.cuda() for tensor in batch(rng, 500))
        with waiting_is_an_error():
            moved(z, logits=logits)

    def test_the_policy_to_raise_synchronises(self, rng: Rng) -> None:
        moved = on(calibrated(rng, nan_policy="raise"))
        z, logits = (tensor.cuda() for tensor in batch(rng, 100))
        moved(z, logits=logits)
        with pytest.raises(RuntimeError, match="synchroniz"), waiting_is_an_error():
            moved(z, logits=logits)


class TestGraphsAndStreams:
    @pytest.mark.parametrize(
        ("policy", "with_logits", "classes"), [("flag", True, 3), ("flag", False, 12), ("raise", True, 2)]
    )
    def test_a_graph_repeats_the_head(self, rng: Rng, policy: str, with_logits: bool, classes: int) -> None:
        moved = on(calibrated(rng, classes, nan_policy=policy))
        z, scores = (tensor.cuda() for tensor in batch(rng, 1024, classes))
        logits = scores if with_logits else None
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                moved(z, logits=logits)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = moved(z, logits=logits)
        moved.sepc.nan_policy = "flag"  # a graph flags under every policy
        for holed in (False, False, True):
            points, others = batch(rng, 1024, classes)
            if holed:
                points[3], points[4], others[5, 0] = 0.0, torch.nan, torch.nan
            z.copy_(points)
            scores.copy_(others)
            graph.replay()
            agree(out, moved(points.cuda(), logits=others.cuda() if with_logits else None))
            if holed:
                assert (out.label[3:5] == -1).all()
                assert int(out.network_label[5]) == (-1 if with_logits else int(out.label[5]))
                assert not out.accept[3:5].any()

    def test_other_streams(self, rng: Rng) -> None:
        moved = on(calibrated(rng))
        batches = [tuple(tensor.cuda() for tensor in batch(rng, 2000)) for _ in range(4)]
        expected = [moved(z, logits=logits) for z, logits in batches]
        streams = [torch.cuda.Stream() for _ in batches]
        torch.cuda.synchronize()
        found = []
        for stream, (z, logits) in zip(streams, batches, strict=True):
            with torch.cuda.stream(stream):
                found.append(moved(z, logits=logits))
        torch.cuda.synchronize()
        for a, b in zip(found, expected, strict=True):
            agree(a, b)
