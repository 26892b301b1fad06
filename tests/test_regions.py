"""Shared analysis of the experiments on tabular data: regions, trust, repartition, comparison with other methods."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.tree import DecisionTreeClassifier

from experiments.paper import peers
from experiments.paper.partitions import homes, repartition
from experiments.paper.regions import Judged, by_truth, draw_regions, judge, judge_by_leaf, pooled, regions, summary
from sepc_torch import SEPC, Rule, partition

Data = tuple[np.ndarray, np.ndarray]


@pytest.fixture
def clouds(rng: np.random.Generator) -> Data:
    """Two overlapping classes in the plane."""
    return np.concatenate([rng.normal(size=(80, 2)), rng.normal(size=(60, 2)) + 1.5]), np.repeat([0, 1], [80, 60])


@pytest.mark.slow
def test_judge_equals_the_model(clouds: Data, rng: np.random.Generator) -> None:
    x, y = clouds
    part = partition(x, y, max_impure=4)
    z, truth = rng.normal(size=(300, 2)) * 2.0, rng.integers(2, size=300)
    judged, model = judge(part, z, truth, ("a", "b")), SEPC.from_partition(part, "euclidean", dtype=torch.float64)
    out = model(torch.from_numpy(z))
    np.testing.assert_array_equal(judged.label, out.label.numpy())
    np.testing.assert_allclose(judged.trust, out.trust.numpy(), atol=1e-6)
    np.testing.assert_array_equal(judged.outside, out.rule.numpy() == int(Rule.OUTSIDE))
    assert [name.startswith("near") for name in judged.region] == judged.outside.tolist()


@pytest.mark.slow
def test_shared_counts_points_in_all_ellipsoids_of_a_region(clouds: Data) -> None:
    x, y = clouds
    part = partition(x, y, max_impure=4)
    judged = judge(part, x, y, ("a", "b"))
    inside = np.stack([e.contains(x) for e in part.ellipsoids], axis=1)
    expected = [inside[:, row].all(axis=1).sum() for row in inside]
    np.testing.assert_array_equal(judged.shared, expected)


def test_regions_count_every_point_once(clouds: Data) -> None:
    x, y = clouds
    part = partition(x[::2], y[::2], max_impure=4)
    judged = judge(part, x[1::2], y[1::2], ("a", "b"))
    found = regions(judged)
    assert sum(r.right for r in found) == judged.right.sum()
    assert sum(r.wrong for r in found) == (~judged.right).sum()
    assert [r.outside for r in found] == sorted(r.outside for r in found)
    twice = summary(pooled([judged, judged]))
    once = summary(judged)
    assert twice["points"] == 2 * once["points"]
    assert twice["accuracy"] == pytest.approx(once["accuracy"])


def test_leaves_are_judged_by_their_training_points(clouds: Data) -> None:
    x, y = clouds
    tree = DecisionTreeClassifier(max_depth=3, random_state=0).fit(x, y)
    judged = judge_by_leaf(tree, x, y)
    for region in regions(judged):
        here = judged.region == region.name
        # On its own training points the accuracy of a leaf equals its trust.
        assert region.right / here.sum() == pytest.approx(region.trust)
        assert (judged.shared[here] == here.sum()).all()


def test_summary_of_accepted_predictions() -> None:
    judged = Judged(
        truth=np.array([0, 0, 1, 1]),
        label=np.array([0, 1, 1, 0]),
        trust=np.array([0.99, 0.4, 0.97, 1.0]),
        region=np.array(["a", "a", "b", "near a"]),
        outside=np.array([False, False, False, True]),
        shared=np.array([5, 5, 3, 0]),
    )
    found = summary(judged)
    assert found["accepted"] == {"points": 3, "coverage": 0.75, "accuracy": pytest.approx(2 / 3)}
    assert found["accepted_inside"] == {"points": 2, "coverage": 0.5, "accuracy": 1.0}
    assert (found["wrong"], found["wrong_accepted"], found["wrong_accepted_outside"]) == (2, 1, 1)
    assert found["wrong_with_low_trust"] == 0.5
    assert (found["regions"], found["regions_inside"]) == (3, 2)


def test_a_hidden_cluster_gets_its_own_ellipsoid(rng: np.random.Generator) -> None:
    """A tight cluster of the second class inside the first class, hidden from the first fit, is a small disjunct."""
    ring = rng.normal(size=(200, 2)) * 3.0
    ring = ring[np.linalg.norm(ring - [1.0, 0.0], axis=1) > 0.8]
    cluster, far = rng.normal([1.0, 0.0], 0.1, size=(12, 2)), rng.normal([20.0, 0.0], 1.0, size=(60, 2))
    x = np.concatenate([ring, far, cluster])
    y = np.repeat([0, 1, 1], [len(ring), 60, 12])
    hidden = np.arange(len(x) - 12, len(x))
    found = repartition(x, y, hidden, 2, "native").found
    assert found["right_before"] == 0
    assert sum(d["points"] for d in found["disjuncts"]) == 12
    assert found["right_after"] > 6
    assert found["in_own_ellipsoid"] + found["isolated"] > 6
    assert found["in_own_ellipsoid"] + found["isolated"] + found["among_others"] == 12


def test_points_of_large_ellipsoids_count_as_among_others(clouds: Data) -> None:
    x, y = clouds
    far = np.concatenate([x[y == 0], x[y == 1] + 50.0])  # separable: one ellipsoid a class
    found = homes(partition(far, y), far, y, np.array([3, 90]))
    assert found == {"in_own_ellipsoid": 0, "isolated": 0, "among_others": 2}


def test_every_panel_of_a_row_has_the_same_regions(clouds: Data) -> None:
    x, y = clouds
    judged = judge(partition(x[::2], y[::2]), x[1::2], y[1::2], ("a", "b"))
    figure = draw_regions([by_truth("", judged, {0: "first", 1: "second"})], named=True)
    lower = [part.axes[1] for part in figure.subfigs]
    names = [[text.get_text() for text in ax.get_xticklabels()] for ax in lower]
    assert names[0] == names[1] == [r.name for r in regions(judged)]


def test_mixtures_find_the_class_of_distant_clouds(rng: np.random.Generator) -> None:
    x = np.concatenate([rng.normal(size=(50, 3)), rng.normal(size=(50, 3)) + 9.0])
    y = np.repeat(["a", "b"], 50)
    model = peers.MixtureClassifier().fit(x, y)
    assert (model.predict(x) == y).all()
    np.testing.assert_allclose(model.predict_proba(x).sum(axis=1), 1.0)


def test_standard_error_is_corrected_for_shared_training_points(rng: np.random.Generator) -> None:
    ours, theirs = rng.normal(size=(2, 50))
    gap, error = peers.difference(ours, theirs)
    plain = np.std(ours - theirs, ddof=1) / np.sqrt(50)
    assert gap == pytest.approx(ours.mean() - theirs.mean())
    assert error == pytest.approx(plain * np.sqrt(1 + 50 / 9))


def test_verdict_names_the_sets_where_sepc_is_worse() -> None:
    def row(gap: float) -> dict[str, object]:
        return {"sepc_minus_this": dict.fromkeys(peers.OURS, dict.fromkeys(peers.METRICS, (gap, 0.01)))}

    sets = {"set": {"SEP-C, trust": {}, "SEP-C, margin": {}, "a": row(0.1), "b": row(-0.05), "c": row(0.001)}}
    accuracy, area = (peers.verdict(sets, metric, "SEP-C, trust") for metric in ("accuracy", "aurc"))
    assert accuracy["ours"] == "set -5.0 ± 1.0 points (b)"
    assert accuracy["why"].startswith("Of 3 comparisons SEP-C is better in 1, worse in 1,")
    assert area["ours"] == "set +0.1000 ± 0.0100 (a)"  # more AURC is worse
