"""Acceptance by group: promises over many draws, merging, files, compiled heads, and input errors."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom

from sepc_torch import TrustHead
from sepc_torch.head.calibration.label_calibration import LabelCalibration
from sepc_torch.head.promises.conformal import (
    _chance_to_qualify,
    _fewest_points,
    binomial_tail,
    counts_above,
    least_points,
    least_risk,
    points_needed,
    risk_threshold,
    search_level,
)
from sepc_torch.head.promises.groups import (
    By,
    GroupAcceptance,
    accept_by_group,
    class_gaps,
    merge_thin,
    promised_delta,
    region_gaps,
)

Rng = np.random.Generator
Array = np.ndarray
CLASSES = 4
# Errors of the network, which is worst in the last class.
ERROR = np.array([0.01, 0.02, 0.05, 0.3])


def draw(rng: Rng, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Embeddings of four classes, labels, and logits of a network that errs more often in later classes."""
    y = rng.integers(0, CLASSES, count)
    x = rng.normal(size=(count, 5)) + 4.0 * np.eye(CLASSES, 5)[y]
    wrong = rng.random(count) < ERROR[y]
    label = np.where(wrong, (y + rng.integers(1, CLASSES, count)) % CLASSES, y)
    logits = rng.normal(size=(count, CLASSES)) + np.eye(CLASSES)[label] * np.where(wrong, 3.0, 5.0)[:, None]
    return x, y, logits


@pytest.fixture(scope="module")
def head() -> TrustHead:
    """A head with several ellipsoids per class, calibrated with 2000 points."""
    rng = np.random.default_rng(0)
    x, y, _ = draw(rng, 400)
    return TrustHead.fit(x, y, dim=3, normalize=None).calibrate(*draw(rng, 2000))


@pytest.fixture(scope="module")
def fresh() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New points of the calibration distribution: embeddings, labels and logits."""
    x, y, logits = draw(np.random.default_rng(1), 3000)
    return torch.from_numpy(x).float(), torch.from_numpy(y), torch.from_numpy(logits).float()


@pytest.mark.parametrize("by", ["predicted", "class", "region"])
def test_a_promise_names_merged_groups(by: By, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    x, y, _ = draw(rng, 400)
    head = TrustHead.fit(x, y, dim=3, normalize=None).calibrate(*draw(rng, 300))
    several = {"predicted": "predicted classes", "class": "true classes", "region": "regions"}[by]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of groups without a promise
        for risk, text in ((0.1, f"in each of 3 groups of {several} are"), (0.05, f", all {several} together, are")):
            table = head.accept_at(risk=risk, delta=0.2, by=by)
            assert isinstance(table, GroupAcceptance)
            assert head.promise is not None
            assert head.promise.groups == len(table.groups) < CLASSES
            assert text in str(head.promise._replace(found=True))
            head.save(tmp_path / "head.safetensors")
            assert TrustHead.load(tmp_path / "head.safetensors").promise == head.promise


def labels_of(group: np.ndarray, joint: np.ndarray, right: np.ndarray) -> LabelCalibration:
    """A calibration with given ranked points; as many further points of the same groups are not ranked."""
    labels = LabelCalibration(["regions"], 1)
    labels.ranked_joint = torch.from_numpy(joint)
    labels.ranked_right = torch.from_numpy(right)
    labels.ranked_rows = torch.arange(len(group))
    both = torch.from_numpy(np.concatenate([group, group]))
    labels.point_label, labels.point_class, labels.point_region = both, both, torch.zeros_like(both)
    others = np.random.default_rng(len(group))
    labels.fitted_joint = torch.from_numpy(others.random(len(group)))
    labels.fitted_right = torch.from_numpy(others.random(len(group)) < 0.95)
    return labels


@pytest.mark.slow
@pytest.mark.parametrize(("by", "joint"), [("given", True), ("given", False), ("class", True)])
def test_promises_hold_in_every_group(head: TrustHead, by: str, joint: bool) -> None:
    """Useless scores of exactly the risk: every promise that is found is broken, so failures attain delta at most.

    The seed is fixed. Failures half as frequent again as delta would give a count beyond the bound.
    """
    rng, draws, points, risk, delta = np.random.default_rng(3), 200, 600, 0.1, 0.2
    failed = np.zeros(3)
    for _ in range(draws):
        group = np.arange(points) % 3  # equal sizes: the level of the tests is computed once
        right = rng.random(points) >= risk * 1.0001
        labels = labels_of(group, rng.random(points), right)
        given: Any = np.concatenate([group, group]) if by == "given" else by
        found = accept_by_group(labels, head.sepc, risk, delta, given, joint)
        broken = [row.found for row in found.groups]
        failed[: len(broken)] += broken
        failed[0] += joint and by == "given" and sum(broken[1:]) > 0 and not broken[0]
    bound = binom.isf(1e-3, draws, delta)
    assert bound < 1.5 * delta * draws
    if by == "given" and joint:
        assert failed[0] <= bound, "any group"
        assert (failed[1:] <= binom.isf(1e-3, draws, delta / 3)).all()
        assert failed[0] > 0.5 * delta * draws, "the promise is not much stronger than asked for"
    else:
        assert (failed <= bound).all()
        assert by == "class" or (failed > 0.5 * delta * draws).all()


def drawn_labels(rng: Rng, points: int, fitted: int, error: Array) -> LabelCalibration:
    """A calibration with scores that are uniform, and labels that are wrong with probability ``error`` at a score."""
    labels = LabelCalibration(["regions"], 1)
    joint = [rng.random(count) for count in (points, fitted)]
    right = [rng.random(len(part)) >= error[(part * len(error)).astype(int)] for part in joint]
    labels.ranked_joint, labels.fitted_joint = map(torch.from_numpy, joint)
    labels.ranked_right, labels.fitted_right = map(torch.from_numpy, right)
    labels.ranked_rows = torch.arange(points)
    return labels


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [np.linspace(0.3, 0.0, 100) ** 2 * 4, np.full(100, 0.0501), np.r_[np.full(50, 0.2), np.full(50, 0.0)]],
    ids=["falling", "useless", "step"],
)
def test_a_sequence_of_tests_keeps_the_risk_and_accepts_more(rng: Rng, error: Array) -> None:
    """Over many draws: broken with probability delta at most, and often enough to be worth the choice."""
    draws, points, risk, delta = 300, 2000, 0.05, 0.2
    above = error[::-1].cumsum()[::-1] / np.arange(len(error), 0, -1)  # risk of the threshold at the foot of each bin
    broken, shares = 0, np.zeros(2)
    nobody = np.zeros(0, dtype=np.int64)
    for _ in range(draws):
        labels = drawn_labels(rng, points, 500, error)
        for k, others in enumerate((np.zeros(500, dtype=np.int64), nobody)):
            threshold = labels.risk_threshold(np.zeros(points, dtype=np.int64), others, risk, delta)
            shares[k] += max(1.0 - threshold, 0.0) / draws
            if k == 0 and threshold < 1.0:
                broken += bool(above[int(threshold * len(error))] > risk)
    assert broken <= binom.isf(1e-6, draws, delta)
    if error[0] != error[-1]:
        assert shares[0] > shares[1] > 0.3


def test_groups_that_are_not_known_share_one_threshold(head: TrustHead, fresh: Any, tmp_path: Path) -> None:
    group = np.arange(2000) % 4
    table = head.accept_at(risk=0.1, by=group, known=False)
    assert len({row.threshold for row in table.groups}) == 1
    assert all(row.error <= 0.1 for row in table.groups)
    assert str(head.promise).startswith("at most 10 % of the accepted labels of each group are wrong")
    assert bool(head(fresh[0], logits=fresh[2]).accept.any())  # without groups
    head.save(tmp_path / "head.safetensors")
    loaded = TrustHead.load(tmp_path / "head.safetensors")
    assert torch.equal(loaded(fresh[0], logits=fresh[2]).accept, head(fresh[0], logits=fresh[2]).accept)
    with pytest.raises(ValueError, match="known=False is for given groups"):
        head.accept_at(risk=0.1, by="class", known=False)
    head.accept_at(flag_rate=0.05)


def test_a_risk_on_average_accepts_more(head: TrustHead, tmp_path: Path) -> None:
    kept = head.accept_at(risk=0.02)
    found = head.accept_at(risk=0.02, average=True)
    assert found.coverage > kept.coverage
    assert found.error <= 0.02
    assert str(head.promise) == "on average at most 2 % of the accepted labels are wrong"
    head.save(tmp_path / "head.safetensors")
    assert TrustHead.load(tmp_path / "head.safetensors").promise == head.promise
    for other in ({"flag_rate": 0.1}, {"risk": 0.1, "by": "class"}):
        with pytest.raises(ValueError, match="average=True is for a risk over independent points"):
            head.accept_at(average=True, **other)
    head.accept_at(flag_rate=0.05)


@pytest.mark.parametrize(
    ("sizes", "risk", "delta"),
    [
        ([65] * 20, 0.05, 0.05),
        ([60] * 100, 0.05, 0.05),
        ([10] * 20, 0.2, 0.2),
        ([320] * 10, 0.01, 0.05),
        ([100] * 10, 0.05, 0.05),
        ([120] * 10 + [3], 0.05, 0.05),
        ([500, 100, 70, 60, 60, 60], 0.05, 0.05),
    ],
)
def test_groups_share_delta_however_many_there_are(sizes: list[int], risk: float, delta: float) -> None:
    """The exact probability that useless scores of the risk get a promise in any group is at most delta."""
    share = promised_delta(np.array(sizes), risk, delta)
    kept = 1.0
    for size in sizes:
        corners = _fewest_points(size, risk, search_level(size, risk, share))
        kept *= 1.0 - (_chance_to_qualify(corners, risk) if len(corners) else 0.0)
    assert 1.0 - kept <= delta


@pytest.mark.parametrize("by", ["predicted", "region", "class"])
def test_a_bad_group_is_refused_or_kept_within_the_risk(
    head: TrustHead, fresh: tuple[torch.Tensor, torch.Tensor, torch.Tensor], by: By
) -> None:
    z, y, logits = fresh
    risk = 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = head.accept_at(risk=risk, delta=0.05, by=by)
    out = head(z, logits=logits)
    keys = {"predicted": out.network_label, "region": out.nearest, "class": y}[by]
    assert sum(row.points for row in table.groups) == table.points == 1600
    for row in table.groups:
        mine = torch.isin(keys, torch.tensor(row.group))
        accepted = mine & out.accept
        assert bool(accepted.any()) == row.found
        if row.found:
            assert float((out.joint[accepted]).min()) >= row.threshold
            assert row.error <= risk
            # Fixed seed: the promise holds for this calibration set, up to the noise of 3000 test points.
            assert float((out.network_label != y)[accepted].double().mean()) <= risk + 0.02
            assert float(accepted.sum() / mine.sum()) == pytest.approx(row.coverage, abs=0.1)
    assert table.found
    assert float(out.accept.double().mean()) == pytest.approx(table.coverage, abs=0.05)
    assert str(table).splitlines()[0].split() == ["group", "points", "threshold", "coverage", "error", "found"]


def test_one_threshold_fails_where_groups_do_not(
    head: TrustHead, fresh: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    """Given groups by the network's error: the group of the worst points exceeds the risk under one threshold."""
    rng = np.random.default_rng(4)
    z, y, logits = fresh
    x, labels, scores = draw(rng, 2000)
    other = TrustHead.fit(*draw(rng, 400)[:2], dim=3, normalize=None, reference_points=0).calibrate(x, labels, scores)
    risk, group = 0.08, (labels == CLASSES - 1).astype(int)
    other.accept_at(risk=risk)
    worst = y == CLASSES - 1
    out = other.judge(z, logits)
    single = float((out.network_label != y)[worst & out.accept].double().mean())
    table = other.accept_at(risk=risk, by=group)
    with pytest.raises(ValueError, match="pass groups="):
        other(z, logits=logits)
    out = other.judge(z, logits, groups=worst.long().numpy())
    by_group = float((out.network_label != y)[worst & out.accept].double().mean())
    assert table.found
    assert by_group <= risk + 0.02 < single
    unknown = other.judge(z[:4], logits[:4], groups=[-1, 0, 2, 7])
    assert not unknown.accept[[0, 2, 3]].any()
    with pytest.raises(ValueError, match="one integer for each row"):
        other.judge(z[:4], logits[:4], groups=[0.5, 0.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="does not accept by given groups"):
        head(z[:4], logits=logits[:4], groups=torch.zeros(4, dtype=torch.int64))
    other.accept_at(risk=risk)
    assert other(z, logits=logits).accept.any()


@pytest.mark.parametrize("by", ["predicted", "region", "given"])
def test_files_and_checkpoints_keep_the_thresholds(
    head: TrustHead, fresh: tuple[torch.Tensor, torch.Tensor, torch.Tensor], tmp_path: Path, by: str
) -> None:
    z, _, logits = fresh
    groups = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if by == "given":
            head.accept_at(risk=0.1, by=np.arange(2000) % 3)
            groups = torch.arange(len(z)) % 3
        else:
            head.accept_at(risk=0.1, by=by)
    expected = head(z, logits, None, groups).accept
    assert expected.any()
    head.save(tmp_path / "head")
    loaded = TrustHead.load(tmp_path / "head")
    x, y, _ = draw(np.random.default_rng(9), 60)
    other = TrustHead.fit(x, y, dim=2)
    other.load_state_dict(head.state_dict())
    for model in (loaded, other):
        assert torch.equal(model(z, logits, None, groups).accept, expected)
        # An ordinary request empties the table.
        assert model.accept_at(flag_rate=0.1) == loaded.accept_at(flag_rate=0.1)
        assert float(model(z, logits).accept.double().mean()) > 0.8
    head.accept_at(flag_rate=0.05)


def test_a_decision_does_not_synchronise() -> None:
    """Meta tensors have no values: an operation that needs one raises an error."""
    labels = LabelCalibration(["regions"], 1)
    labels.region_threshold = torch.zeros(7, dtype=torch.float64)
    places = torch.zeros(5, dtype=torch.int64, device="meta")
    assert labels.to("meta").least_score(places, places, None).shape == (5,)


class TestMerging:
    def test_thin_groups_join_their_nearest_neighbour(self, rng: Rng) -> None:
        for _ in range(20):
            k = int(rng.integers(1, 40))
            places = rng.normal(size=(k, 2))
            gaps = np.linalg.norm(places[:, None] - places, axis=2)
            expected = rng.integers(0, 300, k).astype(float)
            joint = bool(rng.random() < 0.5)
            group = merge_thin(expected, gaps, 0.05, 0.1, joint)
            count = int(group.max()) + 1
            sizes = np.bincount(group, weights=expected)
            assert sorted(set(group)) == list(range(count))
            assert count == 1 or sizes.min() >= 2 * least_points(0.05, 0.1 / count if joint else 0.1)

    def test_large_groups_stay(self) -> None:
        assert merge_thin(np.full(5, 1e4), np.ones((5, 5)), 0.05, 0.05, True).tolist() == [0, 1, 2, 3, 4]

    def test_regions_of_a_class_come_first(self, head: TrustHead) -> None:
        gaps, codes = region_gaps(head.sepc), head.sepc.codes.numpy()
        same = codes[:, None] == codes
        assert gaps[same].max() < gaps[~same].min()
        assert np.allclose(gaps, gaps.T)
        between = class_gaps(head.sepc)
        assert between.shape == (CLASSES, CLASSES)
        assert np.allclose(np.diag(between), 0.0, atol=1e-6)

    def test_merging_ignores_the_ranked_points(self, head: TrustHead) -> None:
        """Whether ranked labels are right, and which classes ranked points have, changes no group."""
        rng = np.random.default_rng(5)
        group = rng.integers(0, CLASSES, 500)
        labels = labels_of(group, rng.random(500), rng.random(500) < 0.95)
        with_errors = accept_by_group(labels, head.sepc, 0.1, 0.1, "predicted", True)
        labels.ranked_right = torch.ones(500, dtype=torch.bool)
        labels.point_label[:500] = torch.from_numpy(rng.integers(0, CLASSES, 500))
        assert [row.group for row in accept_by_group(labels, head.sepc, 0.1, 0.1, "predicted", True).groups] == [
            row.group for row in with_errors.groups
        ]


def test_thin_given_groups_refuse(head: TrustHead) -> None:
    group = np.r_[np.zeros(1980), np.ones(19), 2].astype(int)
    with pytest.warns(UserWarning, match="cannot be promised in 2 of 3 groups"):
        table = head.accept_at(risk=0.1, by=group)
    assert isinstance(table, GroupAcceptance)
    assert [row.found for row in table.groups] == [True, False, False]
    assert table.groups[1].threshold == math.inf
    assert math.isnan(table.groups[1].error)
    # The thin groups can promise nothing, so they take no share of delta.
    assert table.groups[0].threshold == pytest.approx(head.accept_at(risk=0.1).threshold, rel=0.1)
    head.accept_at(flag_rate=0.05)


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ({"risk": 0.1, "by": "colour"}, ValueError, "by must be"),
        ({"risk": 0.1, "by": [0, 1]}, ValueError, "one group for each of the 2000 calibration points"),
        ({"risk": 0.1, "by": np.zeros(2000)}, TypeError, "Groups are integers from 0"),
        ({"risk": 0.1, "by": np.full(2000, -1)}, TypeError, "Groups are integers from 0"),
        ({"risk": 0.1, "by": np.full(2000, 10**9)}, ValueError, "number them from 0"),
        ({"flag_rate": 0.1, "by": "region"}, ValueError, "pass risk, not flag_rate"),
        ({"risk": 1.0, "by": "region"}, ValueError, "must lie between 0 and 1"),
    ],
)
def test_invalid_requests(head: TrustHead, request_: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        head.accept_at(**request_)


class TestLimits:
    """What the warning of a request that cannot be met says."""

    def test_least_risk_is_promised(self, rng: Rng) -> None:
        for _ in range(5):
            score, right = torch.from_numpy(rng.random(200)), torch.from_numpy(rng.random(200) < 0.9)
            _, accepted, errors = counts_above(score, right)
            least = least_risk(errors, accepted, 0.1)
            assert least == 1.0 or risk_threshold(score, right, least, 0.1).found
            assert not risk_threshold(score, right, 0.7 * least, 0.1).found

    def test_points_needed(self) -> None:
        zeros, accepted = np.zeros(40, dtype=int), np.arange(1, 41)
        needed = points_needed(zeros, accepted, 0.02, 0.05)
        assert needed is not None
        assert least_points(0.02, 0.05) <= needed <= 1.3 * least_points(0.02, 0.05)
        assert points_needed(accepted, accepted, 0.02, 0.05) is None

    @pytest.mark.slow
    def test_more_points_are_needed_if_these_promise_nothing(self) -> None:
        # In floating point, 49 * (1 / 49) < 1 and 98 * (2 / 98) < 2: rounding down would lose an error.
        for wrong, points in ((1, 49), (2, 98), (3, 147), (4, 196)):
            mistakes = np.repeat([True, False, True], [wrong, points - wrong, points])
            errors, accepted = mistakes.cumsum(), np.arange(1, len(mistakes) + 1)
            level = search_level(len(mistakes), risk := 0.9 * least_risk(errors, accepted, 0.05), 0.05)
            for factor in (1.0, 0.95, 0.9):
                assert (binomial_tail(errors, accepted, factor * risk) > level).all()
                needed = points_needed(errors, accepted, factor * risk, 0.05)
                assert needed is not None
                assert needed > len(mistakes)

    @pytest.mark.parametrize("delta", [1e-300, 1e-30, 1e-3])
    def test_as_many_points_promise_the_risk(self, delta: float) -> None:
        needed = points_needed(np.array([7]), np.array([280]), 0.1, delta)
        assert needed is not None
        assert needed > least_points(0.1, delta)
        mistakes = np.arange(round(1.1 * needed)) % 40 == 39
        assert risk_threshold(torch.zeros(len(mistakes)), torch.from_numpy(~mistakes), 0.1, delta).found

    def test_the_warning_names_them(self) -> None:
        rng = np.random.default_rng(6)
        x, y, _ = draw(rng, 200)
        small = TrustHead.fit(x, y, dim=2).calibrate(*draw(rng, 80))
        with pytest.warns(UserWarning, match=r"80 calibration points .* can promise a risk of .* more calib"):
            assert not small.accept_at(risk=0.06).found


@pytest.mark.filterwarnings("ignore:The . classes have too few points")
@pytest.mark.parametrize("by", ["class", "given"])
def test_a_group_without_a_promise_is_told_what_it_lacks(head: TrustHead, by: str) -> None:
    """The risk that its points can promise, and about how many more points it needs."""
    rng = np.random.default_rng(8)
    other = TrustHead.fit(*draw(rng, 500)[:2], dim=3, normalize=None, reference_points=0).calibrate(*draw(rng, 600))
    groups: Any = by if by == "class" else np.arange(600) % 5
    with pytest.warns(UserWarning, match=r"For example, group .* can promise .*; (about \d+ more|more of them)"):
        table = other.accept_at(risk=0.005, by=groups)
    assert not table.found
    assert table.limits.startswith("group ")
    assert head.accept_at(risk=0.6, by="predicted").limits == ""
