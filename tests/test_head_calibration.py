"""A calibrated head: guarantees over many draws, acceptance, files, checkpoints, precision and input errors."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from overlapping_classes import batch, draw
from scipy.stats import binom
from torch import Tensor

from sepc_torch import TrustHead
from sepc_torch.head.calibration.calibration import Calibrated
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.shapes import Array

Rng = np.random.Generator
# Whether random points can promise a risk is not the question of these tests.
pytestmark = pytest.mark.filterwarnings("ignore:The head accepts nothing")

# Probability that one comparison fails by chance.
CHANCE = 1e-8


def fit(rng: Rng, count: int = 60, **options: Any) -> TrustHead:
    x, labels, _ = draw(rng, count)
    return TrustHead.fit(x, labels, dim=3, **options)


def same(a: HeadPrediction, b: HeadPrediction) -> bool:
    return all(torch.equal(u.nan_to_num(-9.0), v.nan_to_num(-9.0)) for u, v in zip(a, b, strict=True))


def close(a: HeadPrediction, b: HeadPrediction) -> bool:
    """Whether calibrated values agree up to rounding, which can move a point by one rank in a hundred."""
    apart = {"confidence": 1e-3, "joint": 0.05}
    return all(torch.allclose(getattr(a, n).double(), getattr(b, n).double(), atol=most) for n, most in apart.items())


@pytest.mark.slow
@pytest.mark.parametrize(("with_logits", "reference_points"), [(True, 100), (False, 0)])
def test_guarantees_hold_over_many_draws(rng: Rng, with_logits: bool, reference_points: int) -> None:
    """Calibration sets are drawn with replacement from a pool, so that the true risk is known exactly."""
    head = fit(rng, reference_points=reference_points)
    x, labels, logits = draw(rng, 500)
    z, scores, truth = batch(x), torch.from_numpy(logits), torch.from_numpy(labels)
    given = scores if with_logits else None
    label = head(z, logits=given).network_label
    right = label == truth
    assert head.evidence is not None
    measured, valid = head.evidence.measure(z), torch.zeros_like(right)
    draws, points, delta, rate = 25, 100, 0.3, 0.15
    risk = 0.7 * float((~right).double().mean())  # so that accepting everything violates the risk
    levels = torch.tensor([0.05, 0.1, 0.25, 0.5])
    failed, refused, small, small_in_class = 0, [], [], []
    for _ in range(draws):
        rows = rng.integers(0, len(x), points)
        head.calibrate(x[rows], labels[rows], logits[rows] if with_logits else None, seed=int(rng.integers(1000)))
        assert head.calibration is not None
        acceptance = head.accept_at(risk=risk, delta=delta)
        out = head.calibration(measured, label, valid, given)
        failed += acceptance.found and float((~right[out.accept]).double().mean()) > risk
        head.accept_at(flag_rate=rate)
        refused.append(float((~head.calibration(measured, label, valid, given).accept).double().mean()))
        small.append((out.p_value[:, None] <= levels + 1e-6).double().mean(dim=0).numpy())
        # The class-conditional guarantee holds for the true label of a point.
        p = head.calibration(measured, truth, valid).class_p_value
        small_in_class.append([(p[truth == c, None] <= levels + 1e-6).double().mean(dim=0).numpy() for c in range(3)])
    # Evidence and calibration called separately agree with the head.
    assert torch.allclose(head(z, logits=given).joint, out.joint.float())
    assert failed <= binom.isf(CHANCE, draws, delta)

    def at_most(means: Array, allowed: Array | float) -> bool:
        """Whether the mean share over draws is at most ``allowed``, within seven standard errors."""
        return bool((means.mean(axis=0) <= allowed + 7.0 * means.std(axis=0) / math.sqrt(draws) + 1e-3).all())

    assert at_most(np.array(refused), rate)
    assert at_most(np.array(small), levels.numpy())
    assert at_most(np.array(small_in_class), levels.numpy())


def log_loss(confidence: Tensor, right: Tensor) -> float:
    return float(torch.nn.functional.binary_cross_entropy(confidence.double(), right.double()))


@pytest.mark.slow
def test_a_hundred_points_do_not_overfit(rng: Rng) -> None:
    """The mean log loss of six draws is close to that of the best temperature and bias, chosen on the test labels."""
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
    """In five bins of confidence the accuracy equals the mean confidence, within sampling error plus 0.066."""
    head = fit(rng)
    x, labels, logits = draw(rng, 4000)
    head.calibrate(x[:2000], labels[:2000], logits[:2000])
    out = head(batch(x[2000:]), logits=torch.from_numpy(logits[2000:]))
    right = (out.network_label == torch.from_numpy(labels[2000:])).double()
    for rows in out.confidence.argsort().chunk(5):
        expected, share = float(out.confidence[rows].mean()), float(right[rows].mean())
        assert abs(expected - share) < 6 * math.sqrt(0.25 / len(rows)) + 0.066


def test_unknown_points_are_less_typical(rng: Rng) -> None:
    head = fit(rng)
    x, labels, logits = draw(rng, 400)
    head.calibrate(x, labels, logits)
    opposite = -60.0 * x / np.linalg.norm(x, axis=1, keepdims=True)
    known, far = head(batch(x)), head(batch(opposite))
    assert far.p_value.max() <= 1 / 201 + 1e-6
    assert not far.accept.any()
    assert far.nonconformity.min() > known.nonconformity.max()
    assert float(far.joint.max()) < float(known.joint.median())
    away = head(torch.logspace(1, 6, 20)[:, None] * batch(x[:1]))
    assert (away.nonconformity.diff() > 0).all(), "distant points must have no ties"


@pytest.mark.parametrize("with_logits", [False, True])
def test_acceptance_when_no_threshold_qualifies(rng: Rng, with_logits: bool) -> None:
    head = fit(rng)
    x, labels, logits = draw(rng, 100)
    head.calibrate(x, labels, logits if with_logits else None)
    given = torch.from_numpy(logits) if with_logits else None
    with pytest.warns(UserWarning, match=r"nothing: 100 calibration points \(60 .*\) cannot promise a risk of 0\.0001"):
        acceptance = head.accept_at(risk=1e-4)
    assert not acceptance.found
    assert acceptance.threshold == math.inf
    assert acceptance.coverage == 0.0
    assert math.isnan(acceptance.error)
    assert acceptance.points == 60
    assert not head(batch(x), logits=given).accept.any()
    with pytest.warns(UserWarning, match=r"every point: 100 .* about 1600 more .* at least 0\.0164"):
        everything = head.accept_at(flag_rate=0.001)
    assert everything.threshold == -math.inf
    assert everything.coverage == 1.0
    assert head(batch(x), logits=given).accept.all()


def test_accept_at_reports_coverage_and_error_of_the_ranked_points(rng: Rng) -> None:
    """The ranked points are the first part of a seeded permutation."""
    head = fit(rng)
    x, labels, logits = draw(rng, 300)
    head.calibrate(x, labels, logits, rank_fraction=0.4, seed=7)
    held = np.random.default_rng(7).permutation(300)[:120]
    for request in ({"flag_rate": 0.2}, {"risk": 0.3, "delta": 0.2}):
        acceptance = head.accept_at(**request)
        out = head(batch(x), logits=torch.from_numpy(logits))
        accepted = out.accept[held]
        right = (out.network_label == torch.from_numpy(labels))[held]
        # A score at the threshold may change by a rounding error with the batch size.
        assert float(accepted.double().mean()) == pytest.approx(acceptance.coverage, abs=1.5 / 120)
        assert acceptance.points == 120
        if acceptance.coverage > 0.1:
            assert float((~right[accepted]).double().mean()) == pytest.approx(acceptance.error, abs=0.1)


def test_a_head_in_float64_is_calibrated_in_float64(rng: Rng) -> None:
    """Calibration and use see the same digits of the points, so every ranked joint score is that of a point."""
    head = fit(rng).double()
    x, labels, _ = draw(rng, 100)
    head.calibrate(x, labels)
    assert head.calibration is not None
    held, joint = head.calibration.own.ranked_joint, head(torch.from_numpy(x)).joint
    assert torch.allclose((held[:, None] - joint).abs().amin(dim=1), torch.zeros(len(held)).double(), atol=1e-12)


@pytest.mark.slow
def test_a_lower_risk_accepts_less(rng: Rng) -> None:
    head = fit(rng)
    head.calibrate(*draw(rng, 1000))
    for requests in ([{"risk": r} for r in (0.05, 0.1, 0.2, 0.4)], [{"flag_rate": r} for r in (0.5, 0.2, 0.1, 0.01)]):
        coverage = [head.accept_at(**request).coverage for request in requests]
        assert coverage == sorted(coverage)


def test_before_calibration(rng: Rng) -> None:
    head = fit(rng, count=300)
    x, labels, logits = draw(rng, 1000)
    for out in (head(batch(x)), head(batch(x), logits=torch.from_numpy(logits))):
        for field in (out.p_value, out.class_p_value, out.nonconformity, out.joint):
            assert field.isnan().all()
        assert ((out.confidence > 0) & (out.confidence <= 1)).all()
        assert not out.accept.any()
    right = out.network_label == torch.from_numpy(labels)
    assert float(out.confidence[right].mean()) > float(out.confidence[~right].mean()), "it must rank before calibration"


@pytest.mark.slow
def test_labels_and_logits_of_every_kind(rng: Rng) -> None:
    x, labels, logits = draw(rng, 60)
    train = x + 0.1 * rng.normal(size=x.shape)
    logits = logits.astype(np.float32)  # exact as tensors, arrays and lists
    names = np.array(["ash", "birch", "cherry"])
    z = batch(x)
    expected = None
    for own in (labels, labels * 1.0, names[labels], names[labels].astype(object), labels > 0):
        head = TrustHead.fit(train, own, dim=3, classes=np.unique(own))
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


class TestOrderOfLogits:
    """Columns of logits belong to classes by name, by a stated order or, for classes that are numbers, by position."""

    NAMES = np.array(["plane", "car", "bird"])  # in the order of the network

    @pytest.mark.slow
    def test_names_without_an_order_are_refused(self, rng: Rng, tmp_path: Path) -> None:
        x, labels, logits = draw(rng, 60)
        head = TrustHead.fit(x, self.NAMES[labels], dim=3)
        head.save(tmp_path / "head.safetensors")
        empty = TrustHead.empty()
        empty.load_state_dict(head.state_dict())
        for some in (head, pickle.loads(pickle.dumps(head)), TrustHead.load(tmp_path / "head.safetensors"), empty):
            for given in (logits, torch.from_numpy(logits), pd.DataFrame(logits)):
                with pytest.raises(ValueError, match=r"\['bird', 'car', 'plane'\].*TrustHead.fit\(..., classes="):
                    some.calibrate(x, self.NAMES[labels], given)
            some.calibrate(x + 0.1, self.NAMES[labels])

    @pytest.mark.slow
    def test_every_statement_gives_the_same_answers(self, rng: Rng, tmp_path: Path) -> None:
        x, labels, logits = draw(rng, 60)
        plain = TrustHead.fit(x, labels, dim=3).calibrate(x + 0.1, labels, logits).judge(x + 0.2, logits)
        stated = TrustHead.fit(x, self.NAMES[labels], dim=3, classes=self.NAMES)
        stated.save(tmp_path / "head.safetensors")
        for head in (stated, TrustHead.load(tmp_path / "head.safetensors")):
            out = head.calibrate(x + 0.1, self.NAMES[labels], logits).judge(x + 0.2, logits)
            assert same(out, plain)
        table = pd.DataFrame(logits, columns=self.NAMES)[["car", "plane", "bird"]]
        unstated = TrustHead.fit(x, self.NAMES[labels], dim=3).calibrate(x + 0.1, self.NAMES[labels], table)
        out, sorted_logits = unstated.judge(x + 0.2, table), table[["bird", "car", "plane"]].to_numpy()
        right = np.array(unstated.classes)[out.network_label] == self.NAMES[labels]
        assert (right == (plain.network_label.numpy() == labels)).all()
        assert same(out, unstated.judge(x + 0.2, sorted_logits))
        assert str(unstated.explain(x, 0, logits=table)) == str(unstated.explain(x, 0, logits=sorted_logits))

    @pytest.mark.slow
    def test_numbers_and_positions(self, rng: Rng) -> None:
        x, labels, logits = draw(rng, 60)
        head = TrustHead.fit(x, labels + 5, dim=3).calibrate(x + 0.1, labels + 5, logits)
        expected = head.judge(x, logits)
        assert same(head.judge(x, pd.DataFrame(logits)), expected)
        assert same(head.judge(x, pd.DataFrame(logits, columns=[5, 6, 7])[[7, 5, 6]]), expected)
        assert same(head.judge(x, pd.DataFrame(logits, columns=["5", "6", "7"])[["7", "5", "6"]]), expected)

    @pytest.mark.parametrize("columns", [["bird", "car", "ship"], ["bird", "car", "car"], ["bird", "car"]])
    def test_other_names_are_refused(self, rng: Rng, columns: list[str]) -> None:
        x, labels, logits = draw(rng, 60)
        head = TrustHead.fit(x, self.NAMES[labels], dim=3, classes=self.NAMES)
        table = pd.DataFrame(logits[:, : len(columns)], columns=columns)
        for call in (lambda: head.calibrate(x, self.NAMES[labels], table), lambda: head.judge(x, table)):
            with pytest.raises(ValueError, match=r"The columns of the logits are \['bird', 'car'"):
                call()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x + 5j, "complex128"),
        (lambda x: torch.from_numpy(x + 5j), "torch.complex128"),
        (lambda x: (1e9 * x).astype("M8[ns]"), "must hold real numbers, got dtype datetime64"),
        (lambda x: x.astype(str), "must hold real numbers, got dtype <U"),
        (lambda x: x.astype(object), "array of Python objects"),
        (lambda x: pd.DataFrame(x.astype(str)), "columns that are not numbers"),
    ],
)
def test_judging_refuses_what_fitting_refuses(rng: Rng, change: Any, message: str) -> None:
    x, labels, logits = draw(rng, 60)
    head = TrustHead.fit(x, labels, dim=3).calibrate(x + 0.1, labels, logits)
    for call in (
        lambda: TrustHead.fit(change(x), labels),
        lambda: head.judge(change(x)),
        lambda: head.judge(x, change(logits)),
        lambda: head.explain(change(x)),
        lambda: head.calibrate(change(x), labels),
        lambda: head.calibrate(x + 0.1, labels, change(logits)),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_masked_and_missing_values_are_not_numbers(rng: Rng) -> None:
    x, labels, logits = draw(rng, 60)
    head = TrustHead.fit(x, labels, dim=3, nan_policy="flag").calibrate(x + 0.1, labels, logits)
    masked = np.ma.masked_array(x, np.arange(len(x))[:, None] == [3] * x.shape[1])
    table = pd.DataFrame(x).astype("Float64")
    table.iloc[3] = pd.NA
    holed = x.copy()
    holed[3] = np.nan
    for given in (masked, table):
        assert same(head.judge(given, logits), head.judge(holed, logits))
        assert int(head.judge(given, logits).label[3]) == -1
    assert int(head.judge(x, np.ma.masked_array(logits, logits == logits[5, 0])).network_label[5]) == -1
    head.sepc.nan_policy = "raise"
    with pytest.raises(ValueError, match="holds NaN"):
        head.judge(masked)
    with pytest.raises(ValueError, match="masked values"):
        head.calibrate(masked, labels)


def test_calibrating_again_replaces_the_first_calibration(rng: Rng) -> None:
    head = fit(rng)
    x, labels, logits = draw(rng, 200)
    z, scores = batch(x), torch.from_numpy(logits)
    # Large odds: where the joint score is above the model of confidence, confidence is the joint score.
    options: dict[str, Any] = {"unknown_odds": 0.1}
    once = head.calibrate(x, labels, logits, seed=5, **options)(z, logits=scores)
    assert same(head(z, logits=scores), once), "repeated calls must agree"
    own = head(z)
    head.calibrate(x[:50] + 1.0, labels[:50])
    with pytest.warns(UserWarning, match="calibrated without logits"):
        assert not same(head(z, logits=scores), once)
    assert same(head.calibrate(x, labels, logits, seed=5, **options)(z, logits=scores), once)
    other = head.calibrate(x, labels, logits, seed=6, **options)(z, logits=scores)
    assert not torch.equal(other.joint, once.joint)
    again = head(z)
    model = (again.confidence > again.joint) & (own.confidence > own.joint)
    assert int(model.sum()) > 100
    assert torch.equal(again.confidence[model], own.confidence[model]), "the confidence must be fitted to all points"


@pytest.mark.parametrize(
    "request_", [{"risk": 0.3}, {"flag_rate": 0.3}, {"risk": 0.3, "by": "predicted", "joint": False}]
)
@pytest.mark.filterwarnings("ignore:The risk 0.3 cannot be promised")
def test_calibrating_again_keeps_the_promise(rng: Rng, tmp_path: Path, request_: dict[str, Any]) -> None:
    """The threshold is that of a fresh head that is asked for the same promise, also after loading."""
    head, x = fit(rng), draw(rng, 300)
    fresh = copy.deepcopy(head).calibrate(*x)
    fresh.accept_at(**request_)
    head.calibrate(*draw(rng, 200)).accept_at(**request_)
    head.save(tmp_path / "head")
    for again in (head, TrustHead.load(tmp_path / "head")):
        again.calibrate(*x)
        assert again.promise == fresh.promise
        z, scores = batch(x[0]), torch.from_numpy(x[2])
        assert same(again(z, logits=scores), fresh(z, logits=scores))


@pytest.mark.filterwarnings("ignore:The labels seem to be in another order")
def test_a_promise_that_a_new_calibration_cannot_keep_accepts_nothing(rng: Rng) -> None:
    head = fit(rng)
    x, labels, logits = draw(rng, 400)
    z, scores = batch(x), torch.from_numpy(logits)
    assert head.calibrate(x, labels, logits).accept_at(risk=0.6).found
    with pytest.warns(UserWarning, match="The head accepts nothing: 20 calibration points"):
        head.calibrate(x[:20], (labels[:20] + 1) % 3, logits[:20])
    assert not head(z, logits=scores).accept.any()
    assert head.promise is not None
    assert (head.promise.risk, head.promise.found) == (0.6, False)
    assert head.calibrate(x, labels, logits).promise.found  # type: ignore[union-attr]
    groups = np.arange(400) % 2
    head.accept_at(risk=0.6, by=groups)
    with pytest.warns(UserWarning, match="by given groups.*again"):
        head.calibrate(x[:200], labels[:200], logits[:200])
    assert not head.judge(x, logits, groups=groups).accept.any()
    assert head.accept_at(risk=0.6, by=groups[:200]).found


def test_an_error_in_accept_at_leaves_the_head_as_it_was(rng: Rng) -> None:
    """No threshold of one promise stands beside the words of another one."""
    head = fit(rng).calibrate(*draw(rng, 200))
    x, _, logits = draw(rng, 100)
    head.accept_at(flag_rate=0.2)
    before, promise = head.judge(x, logits), head.promise
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="accepts nothing"):
            head.accept_at(risk=1e-6)
    assert same(head.judge(x, logits), before)
    assert head.promise == promise


def test_thresholds_that_were_set_in_inference_mode_can_be_replaced(rng: Rng) -> None:
    head = fit(rng).calibrate(*draw(rng, 200))
    state = copy.deepcopy(head.state_dict())
    x, _, logits = draw(rng, 100)
    before = head.judge(x, logits)
    with torch.inference_mode():
        head.accept_at(flag_rate=0.4)
    head.load_state_dict(state)
    assert same(head.judge(x, logits), before)


def test_a_default_promise_follows_the_number_of_points(rng: Rng) -> None:
    head = fit(rng)
    assert head.calibrate(*draw(rng, 30), rank_fraction=0.3).promise.flag_rate == 1 / 10  # type: ignore[union-attr]
    assert head.calibrate(*draw(rng, 400)).promise.flag_rate == 0.05  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("points", [30, 60, 400])
def test_joint_is_never_above_the_confidence(rng: Rng, points: int) -> None:
    head = fit(rng, count=200)
    x, _, logits = draw(rng, 2000)
    for seed in range(4):
        head.calibrate(*draw(rng, points), seed=seed)
        for scores in (None, torch.from_numpy(logits)):
            out = head(batch(x), logits=scores)
            assert (out.joint <= out.confidence).all()


@pytest.mark.slow
def test_given_odds_of_unknowns(rng: Rng) -> None:
    """Larger odds lower the joint score of every point; without odds it is a confidence; wrong odds are refused."""
    head, (x, _, logits) = fit(rng), draw(rng, 50)
    points, labels, given = draw(rng, 60)
    joints = []
    for odds in (0.0, 0.01, 1.0):
        head.calibrate(points, labels, given, unknown_odds=odds)
        joints.append(head.judge(x, logits).joint)
    assert (joints[0] > joints[1]).all()
    assert (joints[1] > joints[2]).all()
    far = head.calibrate(points, labels, given, unknown_odds=0.0).judge(1e3 * x, logits)
    assert (far.confidence >= far.joint).all()
    assert (far.joint > 0).all()
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="unknown_odds must be a number from 0 to 1"):
            head.calibrate(points, labels, given, unknown_odds=wrong)


def test_repeated_ids_are_told(rng: Rng) -> None:
    """Several rows of one picture are not independent, so that the promises do not hold for them."""
    head, data = fit(rng), draw(rng, 60)
    with pytest.warns(UserWarning, match="60 calibration points have only 20 different ids.* not independent"):
        head.calibrate(*data, ids=np.arange(60) // 3)
    head.calibrate(*data, ids=[f"row {i}" for i in range(60)])
    with pytest.raises(ValueError, match="Got 3 ids for 60 rows"):
        head.calibrate(*data, ids=[1, 2, 3])


def test_calibration_without_logits(rng: Rng) -> None:
    head = fit(rng)
    x, labels, logits = draw(rng, 150)
    z, scores = batch(x), torch.from_numpy(logits)
    head.calibrate(x, labels)
    alone = head(z)
    assert alone.joint.isfinite().all()
    with pytest.warns(UserWarning, match="calibrated without logits"):
        unknown = head(z, logits=scores)
    head.warmup(1)  # must not warn
    head.calibrate(x, labels, logits)
    assert same(head(z), alone), "logits must not change the calibration of the own labels"
    assert head(z, logits=scores).accept.any()
    for out in (unknown, head(z, labels=alone.label)):
        assert not out.accept.any(), "labels without a calibration must not be accepted"
        assert out.confidence.isnan().all()
        assert out.joint.isnan().all()
        assert torch.equal(out.nonconformity, alone.nonconformity)
        assert torch.equal(out.p_value, alone.p_value)


@pytest.mark.parametrize("normalize", ["l2", None])
def test_flagged_rows_are_not_accepted(rng: Rng, normalize: Any) -> None:
    """NaN, infinity, values that overflow and, with unit length, zeros, which have no direction."""
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
    """Without normalising to unit length, zeros are valid and leave all values finite."""
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
    """Logits of -inf make log odds infinite; confidence, joint score and p-value stay finite."""
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


@pytest.mark.parametrize("reference_points", [0, 100])
@pytest.mark.parametrize("with_logits", [False, True])
def test_files_keep_every_bit(rng: Rng, tmp_path: Path, with_logits: bool, reference_points: int) -> None:
    head = fit(rng, reference_points=reference_points)
    x, labels, logits = draw(rng, 200)
    head.calibrate(x, labels, logits if with_logits else None)
    acceptance = head.accept_at(risk=0.3)
    head.save(tmp_path / "head.safetensors")
    again = TrustHead.load(tmp_path / "head.safetensors")
    z, scores = batch(x), torch.from_numpy(logits) if with_logits else None
    assert same(again(z), head(z))
    assert same(again(z, logits=scores), head(z, logits=scores))
    # The file keeps the ranked scores: another request gives the same threshold.
    assert str(again.accept_at(risk=0.3)) == str(acceptance)
    assert again.accept_at(flag_rate=0.2) == head.accept_at(flag_rate=0.2)
    assert same(again(z, logits=scores), head(z, logits=scores))


@pytest.mark.parametrize("cast", ["float", "half", "bfloat16", "double"])
def test_a_cast_leaves_the_calibration_as_it_is(rng: Rng, tmp_path: Path, cast: str) -> None:
    head = fit(rng)
    x, labels, logits = draw(rng, 200)
    head.calibrate(x, labels, logits)
    assert head.calibration is not None
    z, scores = batch(x), torch.from_numpy(logits)
    before, saved = head(z, logits=scores), {k: v.clone() for k, v in head.calibration.state_dict().items()}
    getattr(head, cast)()
    for name, value in head.calibration.state_dict().items():
        assert value.dtype == saved[name].dtype, name
        assert torch.equal(value, saved[name]), name
    after = head(z, logits=scores)
    assert cast == "double" or same(after, before), "a head is never narrower than float32"
    head.save(tmp_path / "head.safetensors")
    assert same(TrustHead.load(tmp_path / "head.safetensors")(z, logits=scores), after)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "given", "calibrated"), [(80, 40, True), (80, 0, True), (0, 80, True), (80, 0, False), (0, 80, False)]
)
def test_checkpoints_of_other_sizes(rng: Rng, tmp_path: Path, saved: int, given: int, calibrated: bool) -> None:
    """Loading into a head with other or no reference points, other classes, and with or without a calibration."""
    head = fit(rng, reference_points=saved)
    x, labels, logits = draw(rng, 200)
    more, kinds, _ = draw(rng, 200)
    other = TrustHead.fit(more, kinds > 0, dim=2, normalize=None, reference_points=given)
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
    # The loaded head can be calibrated again.
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
    assert same(head.half()(z, logits=scores), expected), "a head must stay in float32"
    rough = head(z.bfloat16(), logits=scores.bfloat16())
    assert rough.confidence.dtype == torch.float32
    assert float((rough.confidence - expected.confidence).abs().mean()) < 0.05
    assert same(head(z.double(), logits=scores), expected), "the dtype of the head decides, not that of the input"
    assert close(head.double()(z, logits=scores), expected)
    head.calibrate(x, labels, logits)
    acceptance = head.accept_at(flag_rate=0.1)
    assert float(head.calibration.network.threshold) == acceptance.threshold  # type: ignore[union-attr]
    assert close(head(z, logits=scores), expected)
    assert close(head.float()(z, logits=scores), expected)


REJECTED: list[tuple[dict[str, Any], str]] = [
    ({"labels": np.full(40, 9)}, r"not fitted on the labels 9; it knows 3 labels, such as 0"),
    ({"labels": np.array(["0"] * 40)}, "not fitted on the labels '0'"),
    ({"labels": np.zeros(39)}, r"40 embeddings need 40 labels, got labels of shape \(39,\)"),
    ({"labels": np.zeros((40, 3))}, "labels"),
    ({"embeddings": np.zeros((40, 4))}, r"shape \(points, 5\), got \(40, 4\)"),
    ({"embeddings": np.zeros(40)}, r"shape \(points, features\)"),
    ({"embeddings": np.full((40, 5), np.nan)}, "embeddings holds 200 NaN"),
    ({"embeddings": np.zeros((40, 5))}, "holds NaN"),
    ({"embeddings": np.ones((19, 5)), "labels": np.zeros(19)}, "19 points are too few to calibrate"),
    ({"logits": np.zeros((40, 2))}, r"logits must have shape \(40, 3\).* got \(40, 2\)"),
    ({"logits": np.zeros((39, 3))}, r"logits must have shape \(40, 3\)"),
    ({"logits": np.full((40, 3), np.nan)}, "logits hold NaN"),
    ({"rank_fraction": 0.0}, "rank_fraction must lie between 0 and 1, both excluded; got 0.0"),
    ({"rank_fraction": 1.0}, "rank_fraction must lie between 0 and 1"),
    ({"rank_fraction": math.nan}, "rank_fraction must lie between 0 and 1"),
    ({"rank_fraction": 0.95}, "leaves 38 to rank and 2 to fit; both need at least 5"),
    ({"rank_fraction": 0.01}, "leaves 0 to rank and 40 to fit; both need at least 5"),
]


def test_rejects_invalid_calibration_points(rng: Rng) -> None:
    head = fit(rng)
    x, labels, logits = draw(rng, 40)
    head.calibrate(x, labels, logits)
    before = head(batch(x))
    for change, message in REJECTED:
        with pytest.raises(ValueError, match=message):
            head.calibrate(**{"embeddings": x, "labels": labels, "logits": logits, **change})
        assert same(head(batch(x)), before), "a failed calibration must change nothing"


def test_accept_at_rejects_invalid_requests(rng: Rng) -> None:
    head = fit(rng)
    x, labels, logits = draw(rng, 40)
    with pytest.raises(RuntimeError, match=r"calibrated first: head\.calibrate"):
        head.accept_at(risk=0.1)
    head.calibrate(x, labels, logits)
    for request in ({}, {"risk": 0.1, "flag_rate": 0.1}):
        with pytest.raises(ValueError, match="Pass exactly one of risk, flag_rate and costs"):
            head.accept_at(**request)
    for request in ({"risk": 0.0}, {"risk": 1.0}, {"risk": 0.1, "delta": 0.0}, {"flag_rate": 0.0}, {"flag_rate": 1.5}):
        with pytest.raises(ValueError, match="must lie between 0 and 1"):
            head.accept_at(**request)


def test_probabilities_in_place_of_logits() -> None:
    """Calibration says so once; it is silent about logits, also about masked classes and one row that sums to one."""
    rng = np.random.default_rng(0)
    head = fit(rng)
    x, labels, logits = draw(rng, 60)
    head.calibrate(x, labels, logits)
    probabilities = torch.from_numpy(logits).softmax(dim=1)
    with pytest.warns(UserWarning, match="look like probabilities"):
        head.calibrate(x, labels, probabilities)
    with pytest.warns(UserWarning, match="look like logarithms of probabilities"):
        head.calibrate(x, labels, probabilities.log())
    mixed = np.concatenate([probabilities.numpy()[:59], logits[59:]])
    head.calibrate(x, labels, mixed)
    head(batch(x), logits=probabilities.log().float())


def test_examples_of_unknowns_are_refused_more_often(rng: Rng) -> None:
    """Examples of one kind of unknowns lower the p-values of other points of this kind; ranked points stay the same."""
    head = fit(rng, normalize=None)
    shift = np.array([0.0, 0.0, 0.0, 2.5, 0.0])
    changes = []
    for _ in range(4):
        points, labels, logits = draw(rng, 400)
        unknown, _, unknown_logits = draw(rng, 300)
        unknown = unknown + shift
        plain = head.calibrate(points, labels, logits).judge(unknown[30:], unknown_logits[30:])
        before = head.require_calibration().network
        head.calibrate(points, labels, logits, unknowns=unknown[:30], unknown_logits=unknown_logits[:30])
        after = head.require_calibration().network
        assert torch.equal(before.ranked_rows, after.ranked_rows)
        assert len(after.ranked_nonconformity) == len(before.ranked_nonconformity)
        assert not torch.equal(before.combined_score.weights, after.combined_score.weights)
        assert torch.equal(before.combined_score.ordered, after.combined_score.ordered)
        shown = head.judge(unknown[30:], unknown_logits[30:])
        changes.append(float(shown.p_value.mean() - plain.p_value.mean()))
    assert np.mean(changes) < 0  # measured: -0.04 with a standard error of 0.02


@pytest.mark.slow
def test_examples_leave_p_values_valid(rng: Rng) -> None:
    """With examples of unknowns, P(p <= u) <= u for ordinary points, over calibration sets; without logits too."""
    head = fit(rng)
    x, labels, logits = draw(rng, 2000)
    strange = rng.normal(size=(10, 5)) * 4.0
    levels, draws, count = np.array([0.05, 0.2, 0.5]), 40, 100
    small = np.zeros(3)
    for number in range(draws):
        rows = rng.permutation(len(x))
        given, new = rows[:count], rows[count : count + 50]
        network = number % 2 == 0
        more: dict[str, Any] = {"unknown_logits": rng.normal(size=(10, 3))} if network else {}
        head.calibrate(x[given], labels[given], logits[given] if network else None, unknowns=strange, **more)
        out = head.judge(x[new], logits[new] if network else None)
        small += (out.p_value.numpy()[:, None] <= levels + 1e-6).mean(axis=0) / draws
    # Given a calibration, the true share has a beta distribution, and the observed one is binomial around it.
    variance = levels * (1 - levels) * (1 / (count / 2 + 2) + 1 / 50) / draws
    assert (small <= levels + 5.0 * np.sqrt(variance)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unknowns": np.zeros((4, 5)) + 1.0, "unknown_logits": np.eye(4, 3)}, "4 examples of unknowns are too few"),
        (
            {"unknowns": np.ones((6, 4)), "unknown_logits": np.zeros((6, 3))},
            r"unknowns of shape \(points, 5\), got \(6, 4\)",
        ),
        ({"unknowns": np.full((6, 5), np.nan), "unknown_logits": np.zeros((6, 3))}, "unknowns"),
        ({"unknowns": np.ones((6, 5))}, "pass unknown_logits"),
        ({"unknown_logits": np.ones((6, 3))}, "beside logits"),
        ({"unknowns": np.ones((6, 5)), "unknown_logits": np.ones((6, 2))}, "shape"),
        ({"unknowns": np.ones((6, 5)), "unknown_logits": np.full((6, 3), np.nan)}, "NaN"),
        ({"unknowns": np.ones((6, 5)), "unknown_logits": np.ones((6, 3)), "logits": None}, "beside logits"),
    ],
)
def test_rejects_invalid_examples(rng: Rng, change: dict[str, Any], message: str) -> None:
    head = fit(rng)
    points, labels, logits = draw(rng, 40)
    with pytest.raises(ValueError, match=message):
        head.calibrate(points, labels, **{"logits": logits, **change})
    assert head.calibration is not None
    assert not head.calibration.done


def test_points_unlike_all_others_are_refused(rng: np.random.Generator) -> None:
    """Also with few calibration points, and where the network is sure of them."""
    labels = np.arange(700) % 2
    x = rng.normal(size=(700, 4)) + 3.0 * labels[:, None]
    for calibrated in (60, 100, 200, 400):
        head = TrustHead.fit(x[:300], labels[:300], normalize=None)
        rows = slice(300, 300 + calibrated)
        head.calibrate(x[rows], labels[rows], 3.0 * np.stack([-x[rows].sum(1), x[rows].sum(1)], axis=1) + [18.0, -18.0])
        far = x[:100] + 200.0
        assert not head.judge(far, np.stack([-far.sum(1), far.sum(1)], axis=1)).accept.any()


def test_columns_in_another_order_are_noticed(rng: np.random.Generator) -> None:
    labels = np.arange(200) % 3
    x = rng.normal(size=(200, 4)) + 3.0 * np.eye(3, 4)[labels]
    head = TrustHead.fit(x[:100], labels[:100], normalize=None)
    for logits, warned in ((x[:, :3], False), (x[:, [2, 1, 0]], True), (rng.normal(size=(200, 3)), False)):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            head.calibrate(x[100:], labels[100:], logits[100:])
        assert any("another order than the columns" in str(one.message) for one in found) == warned
