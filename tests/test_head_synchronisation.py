"""A head without device synchronisation: logits with NaN, the operators it runs, warm-up and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from overlapping_classes import batch, draw
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sepc_torch import SEPC, TrustHead
from sepc_torch.head import network_labels, trust_head
from sepc_torch.head.calibration import assess
from sepc_torch.head.evidence import class_search, densities, neighbours
from sepc_torch.head.explanation import DecisionExplanation
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.reading.projection import Normalize, fit_projection
from sepc_torch.head.standard_operators import StandardOperators
from sepc_torch.model import device_sync

Rng = np.random.Generator
# Whether random points can promise a risk is not the question of these tests.
pytestmark = pytest.mark.filterwarnings("ignore:The head accepts nothing")


def fit(rng: Rng, **options: Any) -> TrustHead:
    x, labels, _ = draw(rng, 90)
    return TrustHead.fit(x, labels, dim=3, **{"nan_policy": "flag", **options})


def calibrated(rng: Rng, **options: Any) -> TrustHead:
    return fit(rng, **options).calibrate(*draw(rng, 100))


def with_holes(logits: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
    """Logits with NaN in one column, in all columns and at the maximum, and a mask of these rows."""
    holed = torch.from_numpy(logits).clone()
    holed[2, 0], holed[5], holed[7, holed[7].argmax()] = torch.nan, torch.nan, torch.nan
    return holed, holed.isnan().any(dim=1)


def equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(-9.0), b.nan_to_num(-9.0))


class TestLogitsThatHoldNaN:
    @pytest.mark.parametrize("make", [fit, calibrated])
    def test_are_flagged_row_by_row(self, rng: Rng, make: Callable[..., TrustHead]) -> None:
        model = make(rng)
        x, _, logits = draw(rng, 60)
        if make is calibrated:
            model.accept_at(risk=0.99)
        holed, missing = with_holes(logits)
        whole, out = model(batch(x), logits=torch.from_numpy(logits)), model(batch(x), logits=holed)
        assert (out.network_label[missing] == -1).all()
        for field in (out.network_trust, out.confidence, out.joint):
            assert (field[missing] == 0).all()
        assert out.network_margin[missing].isnan().all()
        assert out.class_p_value[missing].isnan().all()
        assert not out.accept[missing].any()
        assert out.abstain(0.0)[missing].all()
        # Fields of the head's own label, and all other rows, are unchanged.
        for name in HeadPrediction._fields[:7]:
            assert equal(getattr(out, name), getattr(whole, name)), name
        for name in HeadPrediction._fields:
            assert equal(getattr(out, name)[~missing], getattr(whole, name)[~missing]), name
        if make is calibrated:
            assert whole.accept.any()
            assert (out.p_value[missing] == out.p_value.amin()).all()
            assert (out.nonconformity[missing] > out.nonconformity[~missing].amax()).all()

    def test_together_with_flagged_embeddings(self, rng: Rng) -> None:
        model = calibrated(rng)
        x, _, logits = draw(rng, 60)
        z, (holed, missing) = batch(x), with_holes(logits)
        z[2], z[3] = torch.nan, 0.0
        out = model(z, logits=holed)
        refused = missing.clone()
        refused[3] = True
        assert torch.equal(out.network_label < 0, refused)
        assert (out.label[[2, 3]] == -1).all()
        assert (out.p_value[[2, 3]] <= 1 / 51 + 1e-6).all()
        assert torch.equal(out.confidence == 0, refused)
        assert not out.accept[refused].any()

    def test_without_evidence(self, rng: Rng) -> None:
        whole = fit(rng)
        x, _, logits = draw(rng, 60)
        holed, missing = with_holes(logits)
        out = TrustHead(whole.projection, whole.sepc)(batch(x), logits=holed)
        assert torch.equal(out.network_label < 0, missing)
        assert (out.network_trust[missing] == 0).all()
        assert out.confidence.isnan().all()
        assert not out.accept.any()

    def test_raise_under_the_policy_to_raise(self, rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
        model = calibrated(rng, nan_policy="raise")
        x, labels, logits = draw(rng, 60)
        holed, missing = with_holes(logits)
        with pytest.raises(ValueError, match=r"logits hold NaN.* in 3 rows, first in row 2: .* nan_policy='flag'"):
            model(batch(x), logits=holed)
        with pytest.raises(ValueError, match="logits hold NaN"):
            calibrated(rng).calibrate(x, labels, holed)  # under every policy
        # A CUDA graph cannot raise while it is recorded: every policy flags.
        monkeypatch.setattr(trust_head, "can_synchronize", lambda _: False)
        out = model(batch(x), logits=holed)
        assert torch.equal(out.network_label < 0, missing)
        assert not out.accept[missing].any()

    def test_are_flagged_in_compiled_code(self, rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
        model = calibrated(rng, nan_policy="raise")
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        x, _, logits = draw(rng, 60)
        holed, missing = with_holes(logits)
        assert torch.equal(model(batch(x), logits=holed).network_label < 0, missing)


def test_logits_on_another_device(rng: Rng) -> None:
    model = fit(rng)
    with pytest.raises(ValueError, match=r"logits are on meta and embeddings on cpu; move one with \.to\(\)"):
        model(torch.zeros(4, 5), logits=torch.zeros(4, 3, device="meta"))


class NoSynchronisation(TorchDispatchMode):
    """Fails on operators that synchronise with a GPU: those that read values, or whose output size depends on values.

    Copies from host memory also synchronise, but only a GPU can detect them.
    """

    SYNCHRONISING = (
        "_local_scalar_dense",
        "bincount",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "repeat_interleave",
        "unique",
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allowed = False

    @contextmanager
    def allow(self) -> Iterator[None]:
        self.allowed = True
        try:
            yield
        finally:
            self.allowed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if not self.allowed:
            plain = name.removeprefix("aten::").partition(".")[0]
            assert not any(plain.startswith(prefix) for prefix in self.SYNCHRONISING), f"{name} synchronises"
            if plain in ("index", "index_put", "index_put_"):
                masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
                assert not masks, f"{name} with a mask synchronises"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "synchronise",
    [
        lambda x: bool(x.any()),
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: x.tolist() and x[0].tolist() and float(x[0]),
    ],
)
def test_synchronisation_is_detected(synchronise: Callable[[Tensor], object]) -> None:
    with pytest.raises(AssertionError, match="synchronises"), NoSynchronisation():
        synchronise(torch.ones(3))


@pytest.mark.parametrize(("reference_points", "many"), [(0, 32), (None, 32), (None, 2)])
def test_nothing_but_the_partition_synchronises(
    rng: Rng, monkeypatch: pytest.MonkeyPatch, reference_points: int | None, many: int
) -> None:
    """On a CPU the partition may read values, which costs nothing; no other part may."""
    monkeypatch.setattr(class_search, "_MANY_CLASSES", many)
    model = calibrated(rng, reference_points=reference_points)
    x, _, logits = draw(rng, 60)
    z, scores = batch(x), torch.from_numpy(logits)
    expected = [model(z), model(z, logits=scores)]
    mode, judge = NoSynchronisation(), SEPC.judge

    def allowed(*args: Any, **options: Any) -> Any:
        with mode.allow():
            return judge(*args, **options)

    monkeypatch.setattr(SEPC, "judge", allowed)
    for module in (device_sync, assess, class_search, densities, neighbours, network_labels):
        monkeypatch.setattr(module, "readable", lambda _: False)  # as on a CUDA device
    # Call the implementations of the custom operators directly, so that their inner operators are checked too.
    monkeypatch.setattr(neighbours, "class_nearest", class_search._class_nearest)
    monkeypatch.setattr(densities, "_log_densities", densities._class_log_densities)
    with mode:
        found = [model(z), model(z, logits=scores)]
    for a, b in zip(expected, found, strict=True):
        assert all(equal(u, v) for u, v in zip(a, b, strict=True))


def test_the_gradient_of_a_projection(rng: Rng) -> None:
    x, labels, _ = draw(rng, 60)
    for normalize in ("l2", "polar", None):
        project = fit_projection(x, labels, 3, normalize, "pca", torch.float64)
        assert torch.autograd.gradcheck(project, (torch.from_numpy(x[:4]).requires_grad_(),))


class TestWarmup:
    def test_runs_every_size_with_and_without_logits(self, rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
        model = calibrated(rng, nan_policy="raise").double()
        seen: list[tuple[int, bool]] = []
        forward = TrustHead.forward

        def spy(self: TrustHead, z: Tensor, logits: Tensor | None = None, layers: None = None) -> HeadPrediction:
            assert layers is None
            assert z.dtype == torch.float64
            assert not torch.is_grad_enabled()
            seen.append((len(z), logits is not None))
            return forward(self, z, logits)

        monkeypatch.setattr(TrustHead, "forward", spy)
        state = torch.get_rng_state()
        assert 0.0 < model.warmup(2, 7) < 60.0
        assert seen == [(2, False), (2, True), (7, False), (7, True)]
        seen.clear()
        model.warmup()
        assert [size for size, _ in seen] == [1, 1, 4096, 4096]
        assert torch.equal(torch.get_rng_state(), state), "the global random state must not change"

    @pytest.mark.slow
    def test_changes_nothing(self, rng: Rng) -> None:
        for model in (fit(rng, nan_policy="raise"), calibrated(rng), fit(rng, reference_points=0)):
            z = batch(draw(rng, 40)[0])
            before = model(z)
            model.warmup(5)
            assert all(equal(a, b) for a, b in zip(before, model(z), strict=True))

    @pytest.mark.parametrize("rows", [0, -1])
    def test_rejects_invalid_batch_sizes(self, rng: Rng, rows: int) -> None:
        with pytest.raises(ValueError, match="rows must be an integer of at least 1"):
            fit(rng).warmup(8, rows)


@pytest.mark.parametrize("normalize", ["l2", "standardize"])
def test_flagged_rows_do_not_change_other_gradients(rng: Rng, normalize: Normalize) -> None:
    """Zero, overflowing, infinite and NaN rows outside the loss do not change the gradients of the other rows."""
    labels = rng.integers(0, 3, 200)
    train = rng.normal(size=(200, 6)) + 3.0 * np.eye(3, 6)[labels]
    judge = TrustHead.fit(train, labels, normalize=normalize, nan_policy="flag", reference_points=0)
    z = torch.from_numpy(rng.normal(size=(20, 6)) + 1.0)
    grads = []
    for rows in (slice(5, None), slice(None)):
        points = z.float()
        points[0], points[1], points[2, 3], points[3, 0] = 0.0, 1e30, torch.inf, torch.nan
        points = points[rows].requires_grad_()
        out = judge(points)
        good = torch.arange(len(points)) >= len(points) - 15
        (out.distance[good].sum() + out.margin[good].clamp_max(5.0).sum()).backward()
        assert points.grad is not None
        grads.append(points.grad)
    assert torch.equal(grads[1][:5], torch.zeros(5, 6))
    assert torch.allclose(grads[1][5:], grads[0], rtol=1e-5, atol=1e-6)
    assert float(grads[0].abs().max()) > 0


def test_logits_without_a_single_maximum(rng: Rng) -> None:
    """Rows of only -inf, and rows with inf twice, are flagged like NaN; a single inf, and a masked class, are valid."""
    labels = np.arange(300) % 3
    train = rng.normal(size=(300, 6)) + 3.0 * np.eye(3, 6)[labels]
    judge = TrustHead.fit(train, labels, normalize=None, nan_policy="flag")
    judge.calibrate(train + rng.normal(size=train.shape), labels, train[:, :3])
    z, logits = torch.from_numpy(train[:5]).float(), torch.from_numpy(train[:5, :3]).float()
    logits[0], logits[1, 1:], logits[2, 0], logits[3, 1] = -torch.inf, torch.inf, torch.inf, -torch.inf
    out = judge(z, logits=logits)
    assert (out.network_label < 0).tolist() == [True, True, False, False, False]
    assert not out.accept[:2].any()
    assert out.confidence[:2].tolist() == [0.0, 0.0]
    judge.sepc.nan_policy = "raise"
    with pytest.raises(ValueError, match=r"-inf alone, or inf more than once in 2 rows, first in row 0"):
        judge(z, logits=logits)
    with pytest.raises(ValueError, match="Drop those rows"):
        judge.calibrate(train[:40] + 1.0, labels[:40], np.full((40, 3), -np.inf))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tied_logits_are_never_accepted(rng: Rng, dtype: torch.dtype) -> None:
    """A row whose largest logit is not unique has no label, in every batch, dtype and graph; it raises no error."""
    labels = np.arange(300) % 3
    train = rng.normal(size=(300, 6)) + 3.0 * np.eye(3, 6)[labels]
    held = train + rng.normal(size=train.shape)
    logits = torch.from_numpy(held[:, :3]).round().to(dtype)  # many ties
    logits[:2], logits[2, 0] = 0.0, -torch.inf
    judge = TrustHead.fit(train, labels, normalize=None).calibrate(held, labels, logits)
    judge.accept_at(flag_rate=0.5)
    z, tied = torch.from_numpy(held).float(), (logits == logits.amax(dim=1, keepdim=True)).sum(dim=1) > 1
    assert 10 < int(tied.sum()) < 150
    one = HeadPrediction(*map(torch.cat, zip(*(judge(z[[i]], logits=logits[[i]]) for i in range(40)), strict=True)))
    with StandardOperators():
        standard = judge(z, logits=logits)
    for out in (judge(z, logits=logits), one, standard, judge.judge(held, logits)):
        assert torch.equal(out.network_label < 0, tied[: len(out.label)])
        assert out.accept.any()
        assert not (out.accept & tied[: len(out.label)]).any()
    refused = judge.explain(held[0], logits=logits[0])
    assert isinstance(refused, DecisionExplanation)
    assert refused.sentence.startswith("Refused: there is no prediction")


@pytest.mark.slow
def test_tied_logits_of_calibration_points_keep_the_promises(rng: Rng) -> None:
    """Rows with tied logits are wrong, and as strange as new rows with tied logits: p-values stay valid."""
    labels = np.arange(600) % 3
    z = rng.normal(size=(1200, 6)) + 3.0 * np.eye(3, 6)[np.tile(labels, 2)]
    judge = TrustHead.fit(z[:600], labels, normalize=None)
    logits = z[600:, :3].copy()
    tied = rng.random(600) < 0.3
    logits[tied] = 0.0
    judge.calibrate(z[600:], labels, logits)
    assert judge.calibration is not None
    network = judge.calibration.network
    assert not network.ranked_right[torch.from_numpy(tied)[network.ranked_rows]].any()
    out = judge.judge(z[600:], logits)
    share = tied[network.ranked_rows.numpy()].mean()
    assert float(out.p_value[torch.from_numpy(tied)].min()) >= share
    judge.accept_at(flag_rate=0.5)
    refused = ~judge.judge(z[600:], logits).accept.numpy()[network.ranked_rows.numpy()]
    assert refused.mean() <= 0.5
