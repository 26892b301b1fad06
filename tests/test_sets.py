"""Prediction sets and class probabilities: coverage by simulation, consistency with confidence and joint, odd rows."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments.promises import set_sizes
from sepc_torch import TrustHead
from sepc_torch.head.calibration.label_calibration import LabelCalibration
from sepc_torch.head.promises.sets import PredictionSets, set_thresholds
from sepc_torch.shapes import Array

Rng = np.random.Generator
CLASSES = ("cat", "dog", "owl")


def labels_of(truth: Tensor, of_class: Tensor) -> LabelCalibration:
    """A calibration whose ranked points have these scores of their true classes."""
    labels = LabelCalibration(["regions"], 1)
    labels.ranked_truth, labels.ranked_rows = truth, torch.arange(len(truth))
    labels.point_class, labels.class_counts = of_class, torch.bincount(of_class)
    return labels


def draw(rng: Rng, count: int, spread: float = 1.0) -> tuple[Array, Array, Array]:
    """Embeddings of three overlapping classes, their labels, and logits of a network that is right in most rows."""
    y = rng.integers(0, 3, count)
    x = spread * rng.normal(size=(count, 6)) + 2.5 * np.eye(3, 6)[y]
    return x, y, 2.0 * x[:, :3] + 0.5 * rng.normal(size=(count, 3))


def calibrated(rng: Rng, points: int = 400, logits: bool = True, **options: Any) -> TrustHead:
    """A head of three named classes, calibrated with fresh points."""
    x, y, _ = draw(rng, 300)
    head = TrustHead.fit(x, np.array(CLASSES)[y], normalize=None, classes=CLASSES, **options)
    x, y, scores = draw(rng, points)
    return head.calibrate(x, np.array(CLASSES)[y], scores if logits else None)


@pytest.mark.parametrize(("points", "coverage"), [(99, 0.9), (57, 0.8)])
@pytest.mark.parametrize("per_class", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_coverage_is_promised_and_not_much_exceeded(rng: Rng, points: int, coverage: float, per_class: bool) -> None:
    """Over 1000 calibrations the coverage is at most 1 / (n + 1) above the wanted one, and never below."""
    counts = [points, points // 2] if per_class else [points]
    of_class = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    labels, covered = labels_of(torch.zeros(len(of_class)).double(), of_class), []
    for _ in range(1000):
        labels.ranked_truth = torch.from_numpy(rng.random(len(of_class)))
        least = set_thresholds(labels, coverage, per_class)
        # The score of a new point is uniform, so the coverage given the threshold is known.
        covered.append((1.0 - least).expand(len(counts)).numpy())
    mean, noise = np.mean(covered, axis=0), 4.0 * np.std(covered, axis=0) / 1000**0.5
    assert (mean >= coverage - noise).all()
    assert (mean <= coverage + 1.0 / (np.array(counts) + 1) + noise).all()


def test_equal_scores_are_covered_together() -> None:
    """A threshold among ties includes all of them: no more than the wanted share is missed."""
    truth = torch.tensor([0.2] * 5 + [0.6] * 90 + [0.8] * 4, dtype=torch.float64)
    labels = labels_of(truth, torch.zeros(99, dtype=torch.int64))
    for coverage, missed in ((0.9, 5), (0.94, 5), (0.96, 0), (0.02, 95)):
        assert int((truth < set_thresholds(labels, coverage)).sum()) == missed


def test_peers_follow_their_formulas() -> None:
    """LAC, APS and RAPS for three probabilities, and the conformal quantile of 99 scores."""
    p, zero = np.array([[0.3, 0.5, 0.2]]), np.zeros(1)
    np.testing.assert_allclose(set_sizes.lac(p, zero), [[0.7, 0.5, 0.8]])
    np.testing.assert_allclose(set_sizes.aps(p, zero), [[0.8, 0.5, 1.0]])
    np.testing.assert_allclose(set_sizes.aps(p, zero + 1.0), [[0.5, 0.0, 0.8]], atol=1e-12)
    np.testing.assert_allclose(set_sizes.raps(0.1, 1)(p, zero), [[0.9, 0.5, 1.2]])
    assert set_sizes.threshold(np.arange(1.0, 100.0), 0.9) == 90.0
    assert set_sizes.threshold(np.arange(1.0, 10.0), 0.95) == np.inf


@pytest.mark.slow
@pytest.mark.parametrize("with_logits", [True, False])
def test_sets_of_a_head_cover_new_points(rng: Rng, with_logits: bool) -> None:
    """Over calibrations of one head, new points are covered as promised, on average and in each class."""
    head, missed = calibrated(rng, logits=with_logits), []
    x, y, scores = draw(rng, 1000)
    for _ in range(40):
        held, truth, logits = draw(rng, 200)
        head.calibrate(held, np.array(CLASSES)[truth], logits if with_logits else None)
        row = []
        for per_class in (False, True):
            found = head.sets(x, scores if with_logits else None, coverage=0.85, per_class=per_class).sets
            inside = found[torch.arange(len(y)), torch.from_numpy(y)].double().numpy()
            row += [inside[y == c].mean() for c in range(3)] if per_class else [inside.mean()]
        missed.append(row)
    # The calibrations differ, and the new points are the same for all of them.
    points = np.array([len(y), *np.bincount(y, minlength=3)])
    mean, noise = np.mean(missed, axis=0), 4.0 * np.sqrt(np.var(missed, axis=0) / 40 + 0.85 * 0.15 / points)
    assert (mean >= 0.85 - noise).all()
    assert (mean <= 0.85 + 1.0 / np.array([101, 25, 25, 25]) + noise).all()


@pytest.mark.parametrize("with_logits", [True, False])
def test_sets_are_nested_and_agree_with_the_joint_score(rng: Rng, with_logits: bool) -> None:
    """A larger coverage adds classes only; the label is in the set if its joint score reaches the threshold."""
    head = calibrated(rng, logits=with_logits)
    x, _, scores = draw(rng, 200, spread=3.0)
    logits = scores if with_logits else None
    out = head.judge(x, logits)
    assert head.calibration is not None
    before = torch.zeros(200, 3, dtype=torch.bool)
    for coverage in (0.5, 0.8, 0.95):
        found = head.sets(x, logits, coverage=coverage)
        assert bool((found.sets >= before).all())
        least = float(set_thresholds(head.calibration.labels, coverage))
        clear = (out.joint - least).abs() > 1e-4
        inside = found.sets[torch.arange(200), out.network_label]
        assert torch.equal(inside[clear], (out.joint >= least)[clear])
        before = found.sets


def test_far_points_have_empty_sets(rng: Rng) -> None:
    """An empty set says unknown: far points have one at every coverage that the points allow; most others do not."""
    head = calibrated(rng)
    x, _, scores = draw(rng, 200)
    assert int(head.sets(x + 100.0, scores, coverage=0.98).size.sum()) == 0
    assert float((head.sets(x, scores, coverage=0.98).size > 0).double().mean()) > 0.9


@pytest.mark.parametrize("with_logits", [True, False])
def test_probabilities_agree_with_confidence(rng: Rng, with_logits: bool) -> None:
    """Rows sum to one, and the probability of the label is its confidence, bit for bit."""
    head = calibrated(rng)
    x, _, scores = draw(rng, 300)
    logits = scores if with_logits else None
    found, out = head.predict_proba(x, logits), head.judge(x, logits)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(300))
    assert torch.equal(found[torch.arange(300), out.network_label], out.confidence)
    assert bool((found >= 0).all())


def test_the_other_classes_share_like_tempered_softmax(rng: Rng) -> None:
    """Ratios of two classes that are not the label's are those of softmax at the temperature of the calibration."""
    head = calibrated(rng)
    x, _, scores = draw(rng, 50)
    assert head.calibration is not None
    temperature = float(head.calibration.network.temperature)
    found, given = head.predict_proba(x, scores).double(), torch.from_numpy(scores).float().double() / temperature
    order = given.argsort(dim=1)
    low, middle = (given.gather(1, order[:, i : i + 1]) for i in (0, 1))
    shares = found.gather(1, order[:, 1:2]).log() - found.gather(1, order[:, :1]).log()
    torch.testing.assert_close(shares, middle - low, rtol=1e-4, atol=1e-4)


def test_rows_without_a_prediction_have_all_classes(rng: Rng) -> None:
    """NaN in an embedding or in logits, and a tie of the largest logits, tell nothing about the class."""
    head = calibrated(rng, nan_policy="flag")
    x, _, scores = draw(rng, 4)
    x[0, 1], scores[1, 2], scores[2] = np.nan, np.nan, 1.0
    assert head.sets(x, scores, coverage=0.5).size[:3].tolist() == [3, 3, 3]
    found = head.predict_proba(x, scores)
    torch.testing.assert_close(found[:3], torch.full((3, 3), 1 / 3))
    assert head.sets(x[:1], coverage=0.5).size.tolist() == [3]
    strict = calibrated(rng)
    with pytest.raises(ValueError, match="Drop those rows"):
        strict.sets(draw(rng, 4)[0], scores)


def test_masked_classes_are_possible(rng: Rng) -> None:
    """A class that the network masks with -inf has no probability, and the rest is finite."""
    head = calibrated(rng)
    x, _, scores = draw(rng, 20)
    scores[:, 0] = -np.inf
    found = head.predict_proba(x, scores)
    assert bool(found.isfinite().all())
    assert bool((found[:, 0] == 0).all())
    assert not head.sets(x, scores).sets[:, 0].any()


def test_layers_and_no_reference_points(rng: Rng) -> None:
    """Heads with layers need their rows; heads without reference points share by densities."""
    (x, y, _), (held, truth, logits) = draw(rng, 300), draw(rng, 300)
    head = TrustHead.fit(x, y, normalize=None, layers={"early": x[:, :3]}, reference_points=0)
    head.calibrate(held, truth, logits, layers={"early": held[:, :3]})
    for given in (logits, None):
        sets = head.sets(held, given, layers={"early": held[:, :3]})
        assert float(sets.sets[torch.arange(300), torch.from_numpy(truth)].double().mean()) > 0.85
        found = head.predict_proba(held, given, layers={"early": held[:, :3]})
        torch.testing.assert_close(found.sum(dim=1), torch.ones(300))
    with pytest.raises(ValueError, match="early"):
        head.sets(held, logits)


def test_files_keep_the_sets(rng: Rng, tmp_path: Path) -> None:
    """A loaded head gives the same sets."""
    head = calibrated(rng)
    x, _, scores = draw(rng, 50)
    head.save(tmp_path / "head.safetensors")
    again = TrustHead.load(tmp_path / "head.safetensors")
    for per_class in (False, True):
        first, second = (h.sets(x, scores, coverage=0.8, per_class=per_class) for h in (head, again))
        assert torch.equal(first.sets, second.sets)
    assert torch.equal(head.predict_proba(x), again.predict_proba(x))


def test_units_and_groups(rng: Rng) -> None:
    """Over units the coverage is that of units; acceptance by given groups changes nothing."""
    x, y, scores = draw(rng, 400)
    head = TrustHead.fit(*draw(rng, 300)[:2], normalize=None).calibrate(x, y, scores, units=np.arange(400) // 4)
    inside = head.sets(x, scores).sets[torch.arange(400), torch.from_numpy(y)].double()
    assert float(inside.mean()) > 0.85
    with pytest.raises(ValueError, match="came in units"):
        head.sets(x, scores, per_class=True)
    head.calibrate(x, y, scores)
    before = head.sets(x, scores).sets, head.predict_proba(x, scores)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # groups without a promise
        head.accept_at(risk=0.2, by=np.arange(400) % 2)
    assert torch.equal(before[0], head.sets(x, scores).sets)
    assert torch.equal(before[1], head.predict_proba(x, scores))


def test_too_few_points_warn(rng: Rng) -> None:
    """Sets of all classes come with the number of points that the coverage needs."""
    head = calibrated(rng, points=40)
    x, _, scores = draw(rng, 5)
    with pytest.warns(UserWarning, match="20 ranked calibration points are too few for a coverage of 0.99, which.* 99"):
        assert head.sets(x, scores, coverage=0.99).size.tolist() == [3] * 5
    with pytest.warns(UserWarning, match="3 of 3 classes are in every set"):
        assert head.sets(x, scores, coverage=0.96, per_class=True).size.tolist() == [3] * 5


def test_errors_say_what_to_do(rng: Rng) -> None:
    """Uncalibrated heads, missing logits and shares outside of 0 to 1 are refused."""
    x, y, scores = draw(rng, 100)
    head = TrustHead.fit(x, y, normalize=None)
    with pytest.raises(RuntimeError, match="must be calibrated first"):
        head.sets(x)
    torch.testing.assert_close(head.predict_proba(x, scores).sum(dim=1), torch.ones(100))
    head.calibrate(x + 0.1, y)
    for method in (head.sets, head.predict_proba):
        with pytest.raises(ValueError, match="calibrated without logits"):
            method(x, scores)
        with pytest.raises(ValueError, match="Expected embeddings of shape"):
            method(x[0])
    with pytest.raises(ValueError, match="coverage must lie between 0 and 1"):
        head.sets(x, coverage=1.0)


def test_names_and_an_empty_batch(rng: Rng) -> None:
    """Names are those of the classes in the order of the columns; a batch without rows has no sets."""
    head = calibrated(rng)
    found = head.sets(draw(rng, 30)[0])
    assert found.names == [tuple(np.array(CLASSES)[row].tolist()) for row in found.sets.numpy()]
    assert head.sets(np.zeros((0, 6))).sets.shape == head.predict_proba(np.zeros((0, 6))).shape == (0, 3)
    assert repr(PredictionSets(torch.ones(2, 3).bool(), 0.9, True, CLASSES)) == (
        "PredictionSets(2 points, coverage 0.9 in each class: 0 empty, 0 of one class, 3.00 classes on average)"
    )
