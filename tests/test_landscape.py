"""``landscape`` against closed forms and the paper's numbers, and ``small_disjuncts`` against planted mistakes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sepc_torch import Kind, landscape, minimum_volume_ellipsoid, partition, small_disjuncts
from sepc_torch.shapes import Array

SQUARE = np.array([[-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]])


def test_identical_squares_overlap_wholly(rng: np.random.Generator) -> None:
    points = SQUARE * rng.uniform(0.1, 10, size=2) + rng.normal(size=2)
    found = landscape(np.tile(points, (2, 1)), [0] * 4 + [1] * 4)
    assert found.overlap_ratio == pytest.approx({0: 1.0, 1: 1.0}, abs=1e-5)
    assert (found.inside, found.outside) == ({0: 4, 1: 4}, {0: 0, 1: 0})
    assert found.pairs[0, 1].points == 8
    assert found.pairs[0, 1].meet


def test_squares_far_apart_do_not_overlap() -> None:
    found = landscape(np.concatenate([SQUARE, SQUARE + 9.0]), [0] * 4 + [1] * 4)
    assert found.overlap_ratio == {0: 0.0, 1: 0.0}
    assert (found.inside, found.outside) == ({0: 0, 1: 0}, {0: 4, 1: 4})
    assert found.pairs[0, 1] == (0, (0.0, 0.0), False)


def test_a_square_within_a_square(rng: np.random.Generator) -> None:
    """The overlap is the inner circle: ratio 1 for the small square, the squared ratio of sides for the large one."""
    side = rng.uniform(0.1, 0.9)
    found = landscape(np.concatenate([SQUARE, side * SQUARE]), ["large"] * 4 + ["small"] * 4)
    assert found.overlap_ratio == pytest.approx({"large": side**2, "small": 1.0}, rel=1e-5)
    assert found.inside == {"large": 0, "small": 4}
    assert found.pairs["large", "small"].ratio == pytest.approx((side**2, 1.0), rel=1e-5)


def three_clouds(rng: np.random.Generator, dim: int = 3) -> tuple[Array, Array]:
    y = np.repeat([0, 1, 2], [40, 50, 60])
    return rng.normal(size=(150, dim)) + np.array([0.0, 1.5, 40.0])[y, None], y


@pytest.mark.slow
def test_ratios_do_not_depend_on_coordinates(rng: np.random.Generator) -> None:
    x, y = three_clouds(rng)
    matrix = rng.normal(size=(3, 3)) + 3 * np.eye(3)
    moved = x @ matrix.T + rng.normal(scale=10, size=3)
    here, there = landscape(x, y), landscape(moved, y)
    assert here.overlap_ratio == pytest.approx(there.overlap_ratio, rel=1e-4)
    assert (here.inside, here.outside) == (there.inside, there.outside)
    assert {pair: found.points for pair, found in here.pairs.items()} == {
        pair: found.points for pair, found in there.pairs.items()
    }


def test_pairs_of_three_classes(rng: np.random.Generator) -> None:
    x, y = three_clouds(rng)
    found = landscape(x, y, classes=[2, 0, 1])
    assert list(found.pairs) == list(combinations([2, 0, 1], 2))
    own = {label: minimum_volume_ellipsoid(x[y == label]) for label in range(3)}
    for (a, b), pair in found.pairs.items():
        both = own[a].contains(x) & own[b].contains(x)
        assert pair.points == int(both.sum())
        assert pair.meet == own[a].intersects(own[b])
        if both.any():
            joint = minimum_volume_ellipsoid(x[both])
            volumes = [np.exp(joint.log_volume - own[label].log_volume) for label in (a, b)]
            assert pair.ratio == pytest.approx(tuple(volumes), rel=1e-4)
        else:
            assert pair.ratio == (0.0, 0.0)
    assert not found.pairs[2, 0].meet
    assert found.pairs[0, 1].meet
    for label in range(3):
        others = np.any([own[other].contains(x[y == label]) for other in range(3) if other != label], axis=0)
        assert found.inside[label] == int(others.sum())
        assert found.inside[label] + found.outside[label] == found.points[label] == int(np.count_nonzero(y == label))


def test_the_ellipsoids_of_the_partition_are_counted(rng: np.random.Generator) -> None:
    x, y = three_clouds(rng)
    part = partition(x, y, max_impure=1)
    found = landscape(x, y, partition=part)
    for label in range(3):
        mine = [e for e in part.ellipsoids if e.label == label]
        assert found.isolated[label] == sum(e.kind is Kind.ISOLATED for e in mine)
        for iteration, number in found.ellipsoids[label].items():
            assert number == sum(e.iteration == iteration and e.kind is not Kind.ISOLATED for e in mine)
        assert sum(found.ellipsoids[label].values()) + found.isolated[label] == len(mine)


def test_vertebral_column(data_dir: Path) -> None:
    """The paper's landscape: 7 normal and 157 abnormal points outside the overlap, volume ratios 0.667 and 0.0056."""
    frame = pd.read_csv(data_dir / "vertebral_column_2c.csv")
    found = landscape(frame.iloc[:, :6].round(2), frame["class"])
    assert found.points == {"AB": 210, "NO": 100}
    assert found.outside == {"AB": 157, "NO": 7}
    assert found.inside == {"AB": 53, "NO": 93}
    assert {label: f"{ratio:.3g}" for label, ratio in found.overlap_ratio.items()} == {"NO": "0.667", "AB": "0.00562"}


@pytest.fixture
def planted(rng: np.random.Generator) -> tuple[Array, list[str], Array]:
    """Two clouds far apart with their labels, and a small cluster in the middle of the first."""
    x = rng.normal(size=(120, 2))
    x[60:] += 12.0
    return x, ["calm"] * 60 + ["a storm"] * 60, x[:60].mean(axis=0) + 0.05 * rng.normal(size=(8, 2))


@pytest.mark.parametrize(
    "container",
    [
        list,
        np.array,
        pd.Series,
        lambda labels: np.array(labels, dtype=object),
        lambda labels: np.array(labels)[:, None],
    ],
    ids=["list", "array", "Series", "objects", "column"],
)
@pytest.mark.parametrize("name", ["a storm", "new"])
def test_planted_mistakes_are_found(
    planted: tuple[Array, list[str], Array], container: Callable[[list[str]], Any], name: str
) -> None:
    """For every container of labels, and for true labels inside and outside the classes of the partition."""
    x, y, cluster = planted
    part = partition(x, y)
    home = [k for k, e in enumerate(part.ellipsoids) if e.contains(cluster).all()]
    (found,) = small_disjuncts(part, np.concatenate([x, cluster]), container(y + [name] * 8))
    assert found.ellipsoids == tuple(home)
    assert (found.predicted, found.true) == ("calm", (name,))
    assert found.rows.tolist() == list(range(120, 128))


def test_true_labels_may_be_shorter_than_predicted_ones(planted: tuple[Array, list[str], Array]) -> None:
    x, y, cluster = planted
    (found,) = small_disjuncts(partition(x, y), cluster, ["?"] * 8)
    assert (found.predicted, found.true, len(found.rows)) == ("calm", ("?",), 8)


def test_labels_may_be_booleans(planted: tuple[Array, list[str], Array]) -> None:
    x, y, cluster = planted
    part = partition(x, [label == "calm" for label in y])
    (found,) = small_disjuncts(part, cluster, [False] * 8)
    assert (found.predicted, found.true) == (True, (False,))


@pytest.mark.slow
def test_a_new_partition_gives_small_disjuncts_their_own_ellipsoids(planted: tuple[Array, list[str], Array]) -> None:
    x, y, cluster = planted
    everything, labels = np.concatenate([x, cluster]), y + ["a storm"] * 8
    part = partition(x, y)
    assert len(small_disjuncts(part, everything, labels)) == 1
    again = partition(everything, labels)
    theirs = [e for e in again.ellipsoids if e.label == "a storm" and e.contains(cluster).any()]
    assert all(e.purity > 0.5 for e in theirs if e.kind is not Kind.TERMINAL)  # terminal ones may hold any points
    assert np.any([e.contains(cluster) for e in theirs], axis=0).all()
    assert small_disjuncts(again, everything, labels) == ()


def test_up_to_max_impure_mistakes_are_tolerated(planted: tuple[Array, list[str], Array]) -> None:
    x, y, cluster = planted
    for limit in (2, 5):
        part = partition(x, y, max_impure=limit)
        assert small_disjuncts(part, cluster[:limit], ["a storm"] * limit) == ()
        assert len(small_disjuncts(part, cluster[: limit + 1], ["a storm"] * (limit + 1))) == 1
    assert len(small_disjuncts(part, cluster[:1], ["a storm"], max_impure=0)) == 1


def test_predicted_labels_replace_the_majority_of_the_region(planted: tuple[Array, list[str], Array]) -> None:
    """The mistakes of another model are reported, and the region with the most mistakes comes first."""
    x, y, cluster = planted
    part = partition(x, y)
    points = np.concatenate([cluster, x[60:64]])
    truth = ["calm"] * 8 + ["a storm"] * 4
    assert small_disjuncts(part, points, truth) == ()
    wrong = small_disjuncts(part, points, truth, predicted=["a storm"] * 8 + ["calm"] * 4)
    assert [(d.predicted, len(d.rows)) for d in wrong] == [("a storm", 8), ("calm", 4)]


def test_several_true_labels_come_most_frequent_first(planted: tuple[Array, list[str], Array]) -> None:
    x, y, cluster = planted
    (found,) = small_disjuncts(partition(x, y), cluster, ["rare"] * 3 + ["often"] * 5)
    assert found.true == ("often", "rare")


def test_points_in_regions_without_training_points_are_left_out(planted: tuple[Array, list[str], Array]) -> None:
    x, y, _ = planted
    assert small_disjuncts(partition(x, y), np.full((9, 2), 500.0), ["calm"] * 9) == ()


def test_mistakes_far_apart_outside_are_not_one_disjunct(rng: np.random.Generator) -> None:
    """Outside every ellipsoid a region is defined by the nearest ellipsoid, so that distant mistakes do not add up."""
    x = rng.normal(size=(80, 2))
    x[40:] += 40.0
    part = partition(x, ["calm"] * 40 + ["a storm"] * 40, max_impure=2)
    beyond = rng.uniform(8.0, 12.0, size=(20, 2))  # far beyond normal points, so that both groups lie outside
    points = np.concatenate([-beyond, 40.0 + beyond])
    nearest = part.distances(points).argmin(axis=1)
    found = small_disjuncts(part, points, ["rain"] * 40, predicted=["calm"] * 40, max_impure=0)
    assert sorted(sorted(d.rows.tolist()) for d in found) == [list(range(20)), list(range(20, 40))]
    for d in found:
        assert d.ellipsoids == ()
        assert d.nearest is not None
        assert d.place == f"near {d.nearest}"
        assert (nearest[d.rows] == d.nearest).all()


def test_bad_input_to_small_disjuncts_is_an_error(planted: tuple[Array, list[str], Array]) -> None:
    x, y, cluster = planted
    part = partition(x, y)
    with pytest.raises(ValueError, match=r"8 rows.*7"):
        small_disjuncts(part, cluster, ["calm"] * 7)
    with pytest.raises(ValueError, match=r"(?s)3.*features.*2|2.*features.*3"):
        small_disjuncts(part, np.zeros((8, 3)), ["calm"] * 8)
    with pytest.raises(ValueError, match="NaN"):
        small_disjuncts(part, np.full((8, 2), np.nan), ["calm"] * 8)
    with pytest.raises(ValueError, match=r"predicted.*7|7.*predicted"):
        small_disjuncts(part, cluster, ["calm"] * 8, predicted=["calm"] * 7)


def test_str_is_a_table_of_classes_and_one_of_disjuncts(planted: tuple[Array, list[str], Array]) -> None:
    x, y, cluster = planted
    part = partition(x, y)
    found = landscape(np.concatenate([x, cluster]), y + ["a storm"] * 8, partition=part)
    assert "\n" not in repr(found)
    head, classes, disjuncts = str(found).split("\n\n")
    assert head == repr(found)
    for line, label in zip(classes.splitlines()[1:], found.classes.tolist(), strict=True):
        assert line.startswith(label)
        numbers = line[len(label) :].split()
        assert numbers[:3] == [str(found.points[label]), str(found.inside[label]), str(found.outside[label])]
        assert float(numbers[3]) == pytest.approx(found.overlap_ratio[label], rel=1e-3)
    assert disjuncts.splitlines()[1].split("  ")[-1].strip() == "8"
    assert "calm" in disjuncts


@pytest.mark.slow
def test_str_includes_pairs_for_more_than_two_classes(rng: np.random.Generator) -> None:
    x, y = three_clouds(rng)
    found = landscape(x, np.array(["red", "green", "blue"])[y])
    meeting = str(found).split("\n\n")[2].splitlines()
    assert [line.split()[:2] for line in meeting[1:]] == [["green", "red"]]
