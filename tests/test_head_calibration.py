"""A calibrated head: promises kept over many draws, refusals, files and checkpoints and precision."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from overlapping_classes import batch, draw
from scipy.stats import binom
from torch import Tensor

from sepc_torch import TrustHead
from sepc_torch.head.calibration import Calibrated
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.shapes import Array

Rng = np.random.Generator

# Of failing one comparison by chance.
CHANCE = 1e-8


def fit(rng: Rng, count: int = 60, **options: Any) -> TrustHead:
    x, labels, _ = draw(rng, count)
    return TrustHead.fit(x, labels, dim=3, **options)


def same(a: HeadPrediction, b: HeadPrediction) -> bool:
    return all(torch.equal(u.nan_to_num(-9.0), v.nan_to_num(-9.0)) for u, v in zip(a, b, strict=True))


def close(a: HeadPrediction, b: HeadPrediction) -> bool:
    """What calibration says, up to rounding, which can move a point by one rank of a hundred where two lie close."""
    apart = {"confidence": 1e-3, "joint": 0.05}
    return all(torch.allclose(getattr(a, n).double(), getattr(b, n).double(), atol=most) for n, most in apart.items())


@pytest.mark.parametrize(("with_logits", "witnesses"), [(True, 100), (False, 0)])
def test_promises_hold_over_many_draws(rng: Rng, with_logits: bool, witnesses: int) -> None:
    """The points to judge are a pool, drawn from with replacement to calibrate, so that the truth is known exactly."""
    head = fit(rng, witnesses=witnesses)
    x, labels, logits = draw(rng, 500)
    z, scores, truth = batch(x), torch.from_numpy(logits), torch.from_numpy(labels)
    given = scores if with_logits else None
    label = head(z, logits=given).network_label
    right = label == truth
    assert head.evidence is not None
    own, facts = head.evidence(z, truth), head.evidence(z, label)
    draws, points, delta, rate = 25, 100, 0.3, 0.15
    risk = 0.7 * float((~right).double().mean())  # not kept by accepting everything
    levels = torch.tensor([0.05, 0.1, 0.25, 0.5])
    failed, refused, small, small_in_class = 0, [], [], []
    for _ in range(draws):
        rows = rng.integers(0, len(x), points)
        head.calibrate(x[rows], labels[rows], logits[rows] if with_logits else None, seed=int(rng.integers(1000)))
        assert head.calibration is not None
        granted = head.accept_at(risk=risk, delta=delta)
        out = head.calibration(facts, label, given)
        failed += granted.found and float((~right[out.accept]).double().mean()) > risk
        head.accept_at(flag_rate=rate)
        refused.append(float((~head.calibration(facts, label, given).accept).double().mean()))
        small.append((out.p_value[:, None] <= levels + 1e-6).double().mean(dim=0).numpy())
        # Within a class, for points of that class: the true labels are judged.
        p = head.calibration(own, truth).class_p_value
        small_in_class.append([(p[truth == c, None] <= levels + 1e-6).double().mean(dim=0).numpy() for c in range(3)])
    # What was judged in parts is what the head says.
    assert torch.allclose(head(z, logits=given).joint, out.joint)
    assert failed <= binom.isf(CHANCE, draws, delta)

    def at_most(means: Array, allowed: Array | float) -> bool:
        """Whether shares, one for every draw, have an expectation of at most so much: seven standard errors."""
        return bool((means.mean(axis=0) <= allowed + 7.0 * means.std(axis=0) / math.sqrt(draws) + 1e-3).all())

    assert at_most(np.array(refused), rate)
    assert at_most(np.array(small), levels.numpy())
    assert at_most(np.array(small_in_class), levels.numpy())


def log_loss(confidence: Tensor, right: Tensor) -> float:
    return float(torch.nn.functional.binary_cross_entropy(confidence.double(), right.double()))


def test_a_hundred_points_do_not_overfit(rng: Rng) -> None:
    """On average over six draws hardly worse than the best of all temperatures and biases, chosen with the truth."""
    head = fit(rng)
    x, labels, logits = draw(rng, 1000)
    z, scores = batch(x), torch.from_numpy(logits)
    right = scores.argmax(dim=1) == torch.from_numpy(labels)
    sure = scores.softmax(dim=1).amax(dim=1).clamp(1e-12, 1 - 1e-12).logit()
    best = min(
        log_loss(torch.sigmoid(sure / temperature + bias), right)
        for temperature in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
        for bias in (-2.0, -1.0, 0.0, 1.0, 2.0)
    )
    losses = []
    for _ in range(6):
        rows = rng.integers(0, len(x), 100)
        head.calibrate(x[rows], labels[rows], logits[rows])
        losses.append(log_loss(head(z, logits=scores).confidence, right))
    assert np.mean(losses) < best + 0.15
    assert max(losses) < best + 0.3


def test_confidence_is_calibrated_with_many_points(rng: Rng) -> None:
    """Among points of like confidence that share is right, within what a count of them allows and a fifteenth."""
    head = fit(rng)
    x, labels, logits = draw(rng, 4000)
    head.calibrate(x[:2000], labels[:2000], logits[:2000])
    out = head(batch(x[2000:]), logits=torch.from_numpy(logits[2000:]))
    right = (out.network_label == torch.from_numpy(labels[2000:])).double()
    for rows in out.confidence.argsort().chunk(5):
        expected, share = float(out.confidence[rows].mean()), float(right[rows].mean())
        assert abs(expected - share) < 6 * math.sqrt(0.25 / len(rows)) + 0.066


def test_strangers_are_strange(rng: Rng) -> None:
    head = fit(rng)
    x, labels, logits = draw(rng, 400)
    head.calibrate(x, labels, logits)
    known, far = head(batch(x)), head(batch(-20.0 * x))
    assert far.p_value.max() <= 1 / 201 + 1e-6
    assert not far.accept.any()
    assert far.strangeness.min() > known.strangeness.max()
    assert float(far.joint.max()) < float(known.joint.median())
    away = head(torch.logspace(1, 6, 20)[:, None] * batch(x[:1]))
    assert (away.strangeness.diff() > 0).all(), "no ties, however far"


@pytest.mark.parametrize("with_logits", [False, True])
def test_where_nothing_qualifies_nothing_is_accepted(rng: Rng, with_logits: bool) -> None:
    head = fit(rng)
    x, labels, logits = draw(rng, 100)
    head.calibrate(x, labels, logits if with_logits else None)
    given = torch.from_numpy(logits) if with_logits else None
    granted = head.accept_at(risk=1e-4)
    assert not granted.found
    assert granted.threshold == math.inf
    assert granted.coverage == 0.0
    assert math.isnan(granted.error)
    assert granted.points == 50
    assert not head(batch(x), logits=given).accept.any()
    with pytest.warns(UserWarning, match=r"50 ranked points are too few .* at least 0\.0196"):
        everything = head.accept_at(flag_rate=0.001)
    assert everything.threshold == -math.inf
    assert everything.coverage == 1.0
    assert head(batch(x), logits=given).accept.all()


def test_what_accept_at_says_is_what_it_does(rng: Rng) -> None:
    """On the points that were held out: those of the permutation's first part."""
    head = fit(rng)
    x, labels, logits = draw(rng, 300)
    head.calibrate(x, labels, logits, hold_out=0.4, seed=7)
    held = np.random.default_rng(7).permutation(300)[:120]
    for wish in ({"flag_rate": 0.2}, {"risk": 0.3, "delta": 0.2}):
        granted = head.accept_at(**wish)
        out = head(batch(x), logits=torch.from_numpy(logits))
        accepted = out.accept[held]
        right = (out.network_label == torch.from_numpy(labels))[held]
        # A score at the threshold may move by a rounding error with the size of the batch.
        assert float(accepted.double().mean()) == pytest.approx(granted.coverage, abs=1.5 / 120)
        assert granted.points == 120
        if granted.coverage > 0.1:
            assert float((~right[accepted]).double().mean()) == pytest.approx(granted.error, abs=0.1)


def test_a_lower_risk_accepts_less(rng: Rng) -> None:
    head = fit(rng)
    head.calibrate(*draw(rng, 1000))
    for wishes in ([{"risk": r} for r in (0.05, 0.1, 0.2, 0.4)], [{"flag_rate": r} for r in (0.5, 0.2, 0.1, 0.01)]):
        coverage = [head.accept_at(**wish).coverage for wish in wishes]
        assert coverage == sorted(coverage)


def test_before_calibration_nothing_is_promised(rng: Rng) -> None:
    head = fit(rng, count=300)
    x, labels, logits = draw(rng, 1000)
    for out in (head(batch(x)), head(batch(x), logits=torch.from_numpy(logits))):
        for field in (out.p_value, out.class_p_value, out.strangeness, out.joint):
            assert field.isnan().all()
        assert ((out.confidence > 0) & (out.confidence <= 1)).all()
        assert not out.accept.any()
    right = out.network_label == torch.from_numpy(labels)
    assert float(out.confidence[right].mean()) > float(out.confidence[~right].mean()), "it ranks all the same"


def test_labels_and_logits_of_every_kind(rng: Rng) -> None:
    x, labels, logits = draw(rng, 60)
    train = x + 0.1 * rng.normal(size=x.shape)
    logits = logits.astype(np.float32)  # as lists of numbers become
    names = np.array(["ash", "birch", "cherry"])
    z = batch(x)
    expected = None
    for own in (labels, labels * 1.0, names[labels], names[labels].astype(object), labels > 0):
        head = TrustHead.fit(train, own, dim=3)
        columns = logits[:, : len(head.classes)]
        kinds: list[tuple[Any, Any]] = [(own, columns), (own.tolist(), columns.tolist())]
        if own.dtype.kind not in "UO":
            kinds.append((torch.from_numpy(own), torch.from_numpy(columns)))
        found = [
            head.calibrate(points, given, scores)(z, logits=torch.from_numpy(columns))
            for points, (given, scores) in zip((x, z, x.tolist()), kinds, strict=False)
        ]
        assert all(same(found[0], other) for other in found[1:])
        if len(head.classes) == 3:
            assert expected is None or same(found[0], expected)
            expected = found[0]


def test_calibrating_again_forgets_the_first_time(rng: Rng) -> None:
    head = fit(rng)
    x, labels, logits = draw(rng, 200)
    z, scores = batch(x), torch.from_numpy(logits)
    once = head.calibrate(x, labels, logits, seed=5)(z, logits=scores)
    assert same(head(z, logits=scores), once), "the same at every call"
    own = head(z)
    head.accept_at(risk=0.3)
    head.calibrate(x[:50] + 1.0, labels[:50])
    with pytest.warns(UserWarning, match="calibrated without logits"):
        assert not same(head(z, logits=scores), once)
    assert same(head.calibrate(x, labels, logits, seed=5)(z, logits=scores), once)
    other = head.calibrate(x, labels, logits, seed=6)(z, logits=scores)
    assert not torch.equal(other.joint, once.joint)
    assert torch.equal(head(z).confidence, own.confidence), "the confidence is fitted to all points"


def test_without_logits_the_own_view_judges(rng: Rng) -> None:
    head = fit(rng)
    x, labels, logits = draw(rng, 150)
    z, scores = batch(x), torch.from_numpy(logits)
    head.calibrate(x, labels)
    alone = head(z)
    assert alone.joint.isfinite().all()
    with pytest.warns(UserWarning, match="calibrated without logits"):
        unknown = head(z, logits=scores)
    head.warmup(1)  # without a warning
    head.calibrate(x, labels, logits)
    assert same(head(z), alone), "the own labels are judged as before"
    assert head(z, logits=scores).accept.any()
    for out in (unknown, head(z, labels=alone.label)):
        assert not out.accept.any(), "a calibration that did not see such labels promises nothing of them"
        assert out.confidence.isnan().all()
        assert out.joint.isnan().all()
        assert torch.equal(out.strangeness, alone.strangeness)
        assert torch.equal(out.p_value, alone.p_value)


@pytest.mark.parametrize("normalize", ["l2", None])
def test_flagged_rows_get_nothing(rng: Rng, normalize: Any) -> None:
    """NaN, infinity and numbers too large, and on the unit sphere zeros, which have no direction."""
    head = fit(rng, nan_policy="flag", normalize=normalize)
    x, labels, logits = draw(rng, 100)
    head.calibrate(x, labels, logits)
    head.accept_at(risk=0.99)
    z = batch(x[:6])
    z[0], z[1, 2], z[2], z[3, 0] = 0.0, torch.nan, 1e25, torch.inf
    for out in (head(z), head(z, logits=torch.from_numpy(logits[:6]))):
        first = 0 if normalize == "l2" else 1
        assert out.accept[1:].tolist() == [False] * 3 + [True] * 2
        assert (out.confidence[first:4] == 0).all()
        assert (out.joint[first:4] == 0).all()
        assert (out.p_value[first:4] <= 1 / 51 + 1e-6).all()
        assert (out.confidence[4:] > 0).all()
        assert (out.label[first:4] == -1).all()


def test_zeros_among_the_training_points(rng: Rng) -> None:
    """Without the unit sphere they are points like others, and spoil nobody's confidence."""
    x, labels, logits = draw(rng, 60)
    for normalize in ("standardize", None):
        holed = x.copy()
        holed[5] = 0.0
        head = TrustHead.fit(holed - 0.01 * (holed != 0), labels, dim=3, normalize=normalize)
        head.calibrate(x, labels, logits)
        out = head(batch(x), logits=torch.from_numpy(logits))
        assert all(field.double().isfinite().all() for field in out[10:])
        again = head.calibrate(holed, labels)(batch(holed))
        assert all(field.double().isfinite().all() for field in again[10:])


def test_logits_that_mask_classes(rng: Rng) -> None:
    """With -inf for what is ruled out, log odds are infinite; the confidence is not."""
    head = fit(rng)
    x, labels, logits = draw(rng, 200)
    logits[:, 2] = -np.inf
    logits[:20, :2] = [0.0, -np.inf]
    out = head.calibrate(x, labels, logits)(batch(x), logits=torch.from_numpy(logits))
    assert all(field.isfinite().all() for field in (out.confidence, out.joint, out.p_value))


def test_a_head_without_evidence(rng: Rng, tmp_path: Path) -> None:
    whole = fit(rng)
    head = TrustHead(whole.projection, whole.sepc)
    x, labels, logits = draw(rng, 50)
    out = head(batch(x), logits=torch.from_numpy(logits))
    assert torch.equal(out.network_trust, whole(batch(x), logits=torch.from_numpy(logits)).network_trust)
    empty = Calibrated(*out[10:])
    assert all(field.isnan().all() for field in empty[:5])
    assert not empty.accept.any()
    with pytest.raises(RuntimeError, match=r"no evidence to calibrate; make it with TrustHead\.fit"):
        head.calibrate(x, labels)
    with pytest.raises(RuntimeError, match="must be calibrated first"):
        head.accept_at(risk=0.1)
    head.save(tmp_path / "head.safetensors")
    assert same(TrustHead.load(tmp_path / "head.safetensors")(batch(x)), head(batch(x)))


@pytest.mark.parametrize("witnesses", [0, 100])
@pytest.mark.parametrize("with_logits", [False, True])
def test_files_keep_every_bit(rng: Rng, tmp_path: Path, with_logits: bool, witnesses: int) -> None:
    head = fit(rng, witnesses=witnesses)
    x, labels, logits = draw(rng, 200)
    head.calibrate(x, labels, logits if with_logits else None)
    granted = head.accept_at(risk=0.3)
    head.save(tmp_path / "head.safetensors")
    again = TrustHead.load(tmp_path / "head.safetensors")
    z, scores = batch(x), torch.from_numpy(logits) if with_logits else None
    assert same(again(z), head(z))
    assert same(again(z, logits=scores), head(z, logits=scores))
    # What was ranked is kept: another wish gives the same answer.
    assert str(again.accept_at(risk=0.3)) == str(granted)
    assert again.accept_at(flag_rate=0.2) == head.accept_at(flag_rate=0.2)
    assert same(again(z, logits=scores), head(z, logits=scores))


def test_files_keep_float64(rng: Rng, tmp_path: Path) -> None:
    head = fit(rng)
    x, labels, logits = draw(rng, 200)
    head = head.double().calibrate(x, labels, logits).double()
    head.save(tmp_path / "head.safetensors")
    again = TrustHead.load(tmp_path / "head.safetensors")
    saved, read = head.state_dict(), again.state_dict()
    for name, value in saved.items():
        if isinstance(value, torch.Tensor):
            assert read[name].dtype == value.dtype, name
            assert torch.equal(read[name], value), name
    z, scores = torch.from_numpy(x), torch.from_numpy(logits)
    assert same(again(z, logits=scores), head(z, logits=scores))


@pytest.mark.parametrize(
    ("saved", "given", "calibrated"), [(80, 40, True), (80, 0, True), (0, 80, True), (80, 0, False), (0, 80, False)]
)
def test_checkpoints_of_other_sizes(rng: Rng, tmp_path: Path, saved: int, given: int, calibrated: bool) -> None:
    """Into a head with other witnesses, classes and calibration, or none, and the other way round."""
    head = fit(rng, witnesses=saved)
    x, labels, logits = draw(rng, 200)
    more, kinds, _ = draw(rng, 200)
    other = TrustHead.fit(more, kinds > 0, dim=2, normalize=None, witnesses=given)
    if calibrated:
        head.calibrate(x, labels, logits).accept_at(risk=0.3)
    else:
        other.calibrate(x[:70], labels[:70] > 0)
    torch.save(head.state_dict(), tmp_path / "head.ckpt")
    other.load_state_dict(torch.load(tmp_path / "head.ckpt", weights_only=True))
    z, scores = batch(x), torch.from_numpy(logits)
    assert same(other(z), head(z))
    assert same(other(z, logits=scores), head(z, logits=scores))
    if calibrated:
        assert other.accept_at(flag_rate=0.1) == head.accept_at(flag_rate=0.1)
    else:
        with pytest.raises(RuntimeError, match="must be calibrated first"):
            other.accept_at(flag_rate=0.1)
    # And it can be calibrated as if it had been fitted so.
    assert same(
        other.calibrate(x, labels, logits)(z, logits=scores), head.calibrate(x, labels, logits)(z, logits=scores)
    )


def test_other_precisions(rng: Rng) -> None:
    head = fit(rng)
    x, labels, logits = draw(rng, 200)
    z, scores = batch(x), torch.from_numpy(logits)
    expected = head.calibrate(x, labels, logits)(z, logits=scores)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(head(z, logits=scores), expected)
    assert same(head.half()(z, logits=scores), expected), "never below float32"
    rough = head(z.bfloat16(), logits=scores.bfloat16())
    assert rough.confidence.dtype == torch.float32
    assert float((rough.confidence - expected.confidence).abs().mean()) < 0.05
    wide = head(z.double(), logits=scores)
    assert wide.confidence.dtype == torch.float64
    assert close(wide, expected)
    assert close(head.double()(z, logits=scores), expected)
    # Calibrated in float64 it promises in float64: the score at the threshold is accepted.
    head.calibrate(x, labels, logits)
    granted = head.accept_at(flag_rate=0.1)
    assert float(head.calibration.network.threshold) == granted.threshold  # type: ignore[union-attr]
    assert close(head(z, logits=scores), expected)
    assert close(head.float()(z, logits=scores), expected)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"labels": np.full(40, 9)}, r"not fitted on the labels 9; it knows 3, such as 0"),
    ({"labels": np.array(["0"] * 40)}, "not fitted on the labels '0'"),
    ({"labels": np.zeros(39)}, r"40 embeddings need 40 labels, got \(39,\)"),
    ({"labels": np.zeros((40, 3))}, "labels"),
    ({"embeddings": np.zeros((40, 4))}, r"shape \(points, 5\), got \(40, 4\)"),
    ({"embeddings": np.zeros(40)}, r"shape \(points, features\)"),
    ({"embeddings": np.full((40, 5), np.nan)}, "embeddings holds 200 NaN"),
    ({"embeddings": np.zeros((40, 5))}, "holds NaN"),
    ({"embeddings": np.ones((19, 5)), "labels": np.zeros(19)}, "19 points are too few to calibrate"),
    ({"logits": np.zeros((40, 2))}, r"logits must have shape \(40, 3\).* got \(40, 2\)"),
    ({"logits": np.zeros((39, 3))}, r"logits must have shape \(40, 3\)"),
    ({"logits": np.full((40, 3), np.nan)}, "logits hold NaN"),
    ({"hold_out": 0.0}, "hold_out must lie between 0 and 1, both excluded; got 0.0"),
    ({"hold_out": 1.0}, "hold_out must lie between 0 and 1"),
    ({"hold_out": math.nan}, "hold_out must lie between 0 and 1"),
    ({"hold_out": 0.95}, "leaves 38 to rank and 2 to fit; both need at least 5"),
    ({"hold_out": 0.01}, "leaves 0 to rank and 40 to fit; both need at least 5"),
]


def test_refuses_what_cannot_calibrate(rng: Rng) -> None:
    head = fit(rng)
    x, labels, logits = draw(rng, 40)
    head.calibrate(x, labels, logits)
    before = head(batch(x))
    for change, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            head.calibrate(**{"embeddings": x, "labels": labels, "logits": logits, **change})
        assert same(head(batch(x)), before), "a refused calibration changes nothing"


def test_refuses_wishes_that_make_no_sense(rng: Rng) -> None:
    head = fit(rng)
    x, labels, logits = draw(rng, 40)
    with pytest.raises(RuntimeError, match=r"calibrated first: head\.calibrate"):
        head.accept_at(risk=0.1)
    head.calibrate(x, labels, logits)
    for wish in ({}, {"risk": 0.1, "flag_rate": 0.1}):
        with pytest.raises(ValueError, match="Give risk or flag_rate, one of them"):
            head.accept_at(**wish)
    for wish in ({"risk": 0.0}, {"risk": 1.0}, {"risk": 0.1, "delta": 0.0}, {"flag_rate": 0.0}, {"flag_rate": 1.5}):
        with pytest.raises(ValueError, match="must lie between 0 and 1"):
            head.accept_at(**wish)
