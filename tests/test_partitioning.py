"""``partition``: coverage, invariance to row order, class names and units, and the results of the paper."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_iris, make_circles, make_moons

from sepc_torch import SEPC, Ellipsoid, Kind, Partition, Rule, partition
from sepc_torch.ellipsoid import SURFACE_TOLERANCE
from sepc_torch.partitioning.record import PartitionEllipsoid
from sepc_torch.shapes import Array

FAMILIES = ["clouds", "grid", "repeated", "constant", "dependent", "units"]
SIZES = [(1, 2), (2, 3), (5, 2)]  # features, classes


def labelled(
    rng: np.random.Generator, family: str, dim: int, classes: int, size: int = 60, spread: float = 1.5
) -> tuple[Array, Array]:
    """Overlapping classes of unequal size, with equal rows, constant or dependent features, or mixed units.

    The centres of the classes are ``spread`` standard deviations of their points apart.
    """
    y = rng.choice(classes, size=size, p=rng.dirichlet(np.full(classes, 8.0)))
    y[: 3 * classes] = np.repeat(np.arange(classes), 3)
    x = rng.normal(size=(size, dim)) + rng.normal(scale=spread, size=(classes, dim))[y]
    match family:
        case "grid":
            x = np.round(x)
        case "repeated":
            x = x[rng.integers(0, size // 3, size=size)]
        case "constant" if dim > 1:
            x[:, -1] = rng.normal()
        case "dependent" if dim > 2:
            x[:, -1] = x[:, 0] - 3 * x[:, 1]
        case "units":
            x = x * 10.0 ** rng.integers(-6, 7, size=dim) + rng.normal(size=dim)
    return x, y


def summary(part: Partition) -> list[tuple[Any, str, int, int]]:
    return [(e.label, str(e.kind), e.iteration, e.covered) for e in part.ellipsoids]


def bits(part: Partition, names: dict[Any, Any] | None = None) -> list[tuple[Any, ...]]:
    """The bytes of all ellipsoids as a sorted list; ``names`` translates the labels."""
    return sorted(
        (
            e.label if names is None else names[e.label],
            e.iteration,
            str(e.kind),
            e.covered,
            e.center.tobytes(),
            e.whitener.tobytes(),
        )
        for e in part.ellipsoids
    )


def assert_same_planes(mine: Partition, theirs: Partition, names: dict[Any, Any] | None = None) -> None:
    """The hyperplanes are bit-identical; with two classes they may belong to the other class, with reversed sign."""
    assert len(mine.hyperplanes) == len(theirs.hyperplanes)
    for h in mine.hyperplanes:
        label = names[h.label] if names is not None else h.label
        (g,) = [
            g for g in theirs.hyperplanes if g.iteration == h.iteration and (g.label == label or len(mine.classes) == 2)
        ]
        sign = 1.0 if g.label == label else -1.0
        np.testing.assert_array_equal(sign * g.w, h.w)
        levels = (g.alpha, g.beta) if sign > 0 else (-g.beta, -g.alpha)
        assert levels == (h.alpha, h.beta)


def held(e: Ellipsoid, points: Array) -> Array:
    r"""Which points satisfy :math:`\|W (z - c)\| \le 1`."""
    return np.linalg.norm((points - e.center) @ e.whitener.T, axis=1) <= 1 + SURFACE_TOLERANCE


def assert_covered(part: Partition, points: Array, labels: Array) -> None:
    own = np.array([held(e, points) & (labels == e.label) for e in part.ellipsoids])
    assert own.any(axis=0).all()


@pytest.mark.parametrize(("dim", "classes"), [*SIZES, (4, 4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_point_is_covered_by_its_own_class(rng: np.random.Generator, family: str, dim: int, classes: int) -> None:
    x, y = labelled(rng, family, dim, classes)
    part = partition(x, y, max_impure=int(rng.integers(0, 4)), standardize=bool(rng.integers(0, 2)))
    assert_covered(part, x, y)
    assert part.classes.tolist() == list(range(classes))
    assert part.class_counts.tolist() == [int(np.count_nonzero(y == label)) for label in range(classes)]
    for label, total in enumerate(part.class_counts.tolist()):
        assert sum(e.covered for e in part.ellipsoids if e.label == label) == total
    for e in part.ellipsoids:
        inside = y[held(e, x)]
        assert e.counts.tolist() == [int(np.count_nonzero(inside == label)) for label in range(classes)]
        assert e.purity == pytest.approx(np.mean(inside == e.label))
        assert e.covered <= e.counts[e.label]
        assert (y[e.support] == e.label).all()


def standardised(e: PartitionEllipsoid, unit: Array) -> Ellipsoid:
    return Ellipsoid(e.center / unit, e.whitener * unit)


@pytest.mark.parametrize(("dim", "classes"), SIZES)
def test_the_support_lies_on_the_surface(rng: np.random.Generator, dim: int, classes: int) -> None:
    """Where the floor does not act: an ellipsoid of the least thickness need not touch a point in that direction."""
    floor = 1e-4
    for _ in range(2):
        x, y = labelled(rng, "clouds", dim, classes)
        part = partition(x, y, floor=floor)
        touched = [e for e in part.ellipsoids if standardised(e, x.std(axis=0)).semi_axes[-1] > 1.01 * floor]
        assert touched
        for e in touched:
            assert len(e.support) > 1
            np.testing.assert_allclose(e.distance(x[e.support]), 1.0, atol=1e-3)


@pytest.mark.parametrize(("dim", "classes"), SIZES)
def test_isolated_points_are_balls_of_the_floor(rng: np.random.Generator, dim: int, classes: int) -> None:
    x, y = labelled(rng, "repeated", dim, classes)
    # One class of a single point, which must stay isolated, far from all others.
    x, y = np.concatenate([x, 50.0 + rng.normal(size=(1, dim))]), np.append(y, classes)
    floor = 10.0 ** rng.uniform(-5, -2)
    part = partition(x, y, floor=floor)
    balls = [e for e in part.ellipsoids if e.kind is Kind.ISOLATED]
    assert any(e.label == classes for e in balls) or dim == 1  # in one dimension a single point is covered
    for e in balls:
        here = np.flatnonzero((x[y == e.label] == x[e.support[0]]).all(axis=1))
        assert len(here) == e.covered
        np.testing.assert_allclose(e.center, x[e.support[0]], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(e.whitener, np.diag(1 / (floor * x.std(axis=0))), rtol=1e-9)


@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize(("dim", "classes"), SIZES)
def test_hyperplanes_in_the_callers_coordinates(
    rng: np.random.Generator, dim: int, classes: int, standardize: bool
) -> None:
    """The ellipsoids of an iteration are supported by points beyond the hyperplane of their class."""
    # The centres are equal: with distant ones every class can lie in one pure ellipsoid, and there is no hyperplane.
    x, y = labelled(rng, "clouds", dim, classes, spread=0.0)
    x = x * rng.uniform(0.1, 10.0, size=dim) + rng.normal(scale=10.0, size=dim)
    part = partition(x, y, standardize=standardize)
    assert part.hyperplanes
    for h in part.hyperplanes:
        assert h.alpha > h.beta
        values = x @ h.w
        slack = 1e-6 * np.ptp(values)
        found = [e for e in part.ellipsoids if e.iteration == h.iteration]
        mine = [e for e in found if e.label == h.label]
        for e in mine:
            assert (values[e.support] >= h.alpha - slack).all()
        beyond = np.count_nonzero(values[y == h.label] >= h.alpha - slack)
        assert sum(e.covered for e in mine) <= beyond
        if classes == 2:
            for e in (e for e in found if e.label != h.label):
                assert (values[e.support] <= h.beta + slack).all()


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "classes"), SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_row_order_does_not_change_the_result(rng: np.random.Generator, family: str, dim: int, classes: int) -> None:
    x, y = labelled(rng, family, dim, classes)
    order = rng.permutation(len(x))
    part, shuffled = partition(x, y), partition(x[order], y[order])
    assert [e.label for e in part.ellipsoids] == [e.label for e in shuffled.ellipsoids]
    for a, b in zip(part.ellipsoids, shuffled.ellipsoids, strict=True):
        np.testing.assert_array_equal(np.unique(x[a.support], axis=0), np.unique(x[order][b.support], axis=0))
    # Apart from the row numbers of the support, the partitions are bit-identical.
    rowless = [
        replace(p, ellipsoids=tuple(replace(e, support=np.zeros(0, dtype=np.int64)) for e in p.ellipsoids))
        for p in (part, shuffled)
    ]
    assert rowless[0] == rowless[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("names", [["b", "a"], ["c", "a", "b"]], ids="".join)
def test_renaming_classes_renames_the_result(rng: np.random.Generator, family: str, names: list[str]) -> None:
    x, y = labelled(rng, family, 3, len(names))
    part, renamed = partition(x, y), partition(x, np.array(names)[y])
    new = dict(enumerate(names))
    assert bits(part, new) == bits(renamed)
    assert_same_planes(part, renamed, new)
    assert {new[k]: n for k, n in enumerate(part.class_counts)} == dict(
        zip(renamed.classes.tolist(), renamed.class_counts, strict=True)
    )


def test_renaming_classes_of_equal_size(rng: np.random.Generator) -> None:
    """With equal sizes and equal first rows, the order of the classes must still not depend on their names."""
    x = np.round(rng.normal(size=(80, 2)), 1)
    y = np.arange(80) % 2
    x[:2] = x.min(axis=0) - 1.0
    part, renamed = partition(x, y), partition(x, 1 - y)
    assert bits(part, {0: 1, 1: 0}) == bits(renamed)
    assert_same_planes(part, renamed, {0: 1, 1: 0})


def test_classes_gives_the_order(rng: np.random.Generator) -> None:
    x, y = labelled(rng, "clouds", 3, 3)
    order = [2, 0, 1]
    plain, ordered = partition(x, y), partition(x, y, classes=order)
    assert ordered.classes.tolist() == order
    assert ordered.class_counts.tolist() == plain.class_counts[order].tolist()
    assert list(dict.fromkeys(e.label for e in ordered.ellipsoids)) == order
    assert bits(ordered) == bits(plain)
    for e in ordered.ellipsoids:
        assert e.counts[order.index(e.label)] == max(
            p.counts[e.label] for p in plain.ellipsoids if (p.center == e.center).all()
        )


def test_the_number_of_processes_does_not_change_the_result(rng: np.random.Generator) -> None:
    x, y = labelled(rng, "clouds", 4, 3, size=150)
    assert partition(x, y, n_jobs=2) == partition(x, y, n_jobs=1)


def test_equal_input_gives_equal_bytes(rng: np.random.Generator, tmp_path: Path) -> None:
    """Files are equal also from another interpreter with another hash seed and another number of threads."""
    x, y = labelled(rng, "clouds", 8, 3, size=300)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    for name in ("first", "second"):
        partition(x, y).save(tmp_path / name)
    code = (
        "import sys; import numpy as np; from sepc_torch import partition; "
        "data = np.load(sys.argv[1]); partition(data['x'], data['y']).save(sys.argv[2])"
    )
    subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path / "data.npz"), str(tmp_path / "third")],
        cwd=Path(__file__).resolve().parent.parent,
        env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "7"},
        check=True,
        timeout=300,
    )
    first = (tmp_path / "first").read_bytes()
    assert first == (tmp_path / "second").read_bytes()
    assert first == (tmp_path / "third").read_bytes()


@pytest.mark.parametrize(
    "dress",
    [
        lambda x: x.tolist(),
        lambda x: x.astype(np.float64),
        np.asfortranarray,
        lambda x: x[:, ::-1].copy()[:, ::-1],
        torch.from_numpy,
        lambda x: torch.from_numpy(x).requires_grad_(),
        lambda x: pd.DataFrame(x).to_numpy(),
        lambda x: np.frombuffer(x.astype(np.float64).tobytes()).reshape(x.shape),
    ],
    ids=["list", "float64", "columns first", "strided", "tensor", "tensor with gradient", "from a frame", "read-only"],
)
def test_every_kind_of_array_is_accepted(rng: np.random.Generator, dress: Callable[[Array], Any]) -> None:
    x, y = labelled(rng, "clouds", 3, 2)
    x = x.astype(np.float32)
    assert partition(dress(x), y.tolist()) == partition(x, y)


def test_integers_are_accepted(rng: np.random.Generator) -> None:
    x, y = labelled(rng, "grid", 3, 2)
    assert partition(x.astype(np.int8), torch.from_numpy(y)) == partition(x, y)


def test_column_names_of_a_data_frame_are_kept(rng: np.random.Generator) -> None:
    x, y = labelled(rng, "clouds", 2, 2)
    frame = pd.DataFrame(x, columns=["length", "width"], index=rng.permutation(len(x)))
    part = partition(frame, pd.Series(y, index=frame.index))
    assert part.feature_names == ("length", "width")
    assert replace(part, feature_names=None) == partition(x, y)


def test_boolean_columns_of_a_data_frame_are_accepted(rng: np.random.Generator) -> None:
    x, y = labelled(rng, "clouds", 2, 2)
    flag = rng.integers(0, 2, size=len(x)).astype(bool)
    part = partition(pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "flag": flag}), y)
    assert replace(part, feature_names=None) == partition(np.column_stack([x, flag]), y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "labels", [(0, 1), (-3, 7), ("no", "yes, really"), (False, True), (0.5, 2.5)], ids=lambda labels: str(labels[1])
)
@pytest.mark.parametrize("container", [np.array, list, pd.Series, lambda y: np.array(y, dtype=object)])
def test_labels_keep_their_type_and_value(
    rng: np.random.Generator, labels: tuple[Any, Any], container: Callable[[list[Any]], Any]
) -> None:
    x, y = labelled(rng, "clouds", 2, 2, size=30)
    part = partition(x, container([labels[i] for i in y]))
    assert part.classes.tolist() == list(labels)
    assert {(type(e.label), e.label) for e in part.ellipsoids} == {(type(label), label) for label in labels}
    assert bits(part) == bits(partition(x, y), dict(enumerate(labels)))


@pytest.mark.parametrize(("dim", "classes"), SIZES)
def test_units_of_the_features_do_not_change_the_result(rng: np.random.Generator, dim: int, classes: int) -> None:
    x, y = labelled(rng, "clouds", dim, classes)
    factor = 10.0 ** rng.integers(-6, 7, size=dim)
    part, scaled = partition(x, y), partition(x * factor, y)
    assert summary(part) == summary(scaled)
    z = rng.normal(scale=3.0, size=(50, dim))
    np.testing.assert_allclose(scaled.distances(z * factor), part.distances(z), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(scaled.cells, part.cells)


def test_units_in_powers_of_two_give_identical_bits(rng: np.random.Generator) -> None:
    x, y = labelled(rng, "clouds", 4, 3)
    factor = 2.0 ** rng.integers(-20, 20, size=4)
    for a, b in zip(partition(x, y).ellipsoids, partition(x * factor, y).ellipsoids, strict=True):
        np.testing.assert_array_equal(a.center * factor, b.center)
        np.testing.assert_array_equal(a.whitener / factor, b.whitener)


@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize("exponent", [-325, 325])
def test_extreme_units_give_identical_bits_in_float64(
    rng: np.random.Generator, exponent: int, standardize: bool
) -> None:
    x, y = labelled(rng, "clouds", 2, 2)
    unit = 2.0**exponent
    part, scaled = partition(x, y, standardize=standardize), partition(x * unit, y, standardize=standardize)
    for a, b in zip(part.ellipsoids, scaled.ellipsoids, strict=True):
        np.testing.assert_array_equal(a.center * unit, b.center)
        np.testing.assert_array_equal(a.whitener / unit, b.whitener)
    sepc = SEPC.from_partition(scaled, dtype=torch.float64)
    assert not (sepc(torch.from_numpy(x * unit)).rule == int(Rule.OUTSIDE)).any()
    with pytest.raises(ValueError, match="exceed the range"):
        SEPC.from_partition(scaled)


@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize("scale", [1e-320, 1e-300, 1e-150, 1e165, 1e300, 1e307])
def test_features_of_extreme_scale_are_refused(rng: np.random.Generator, scale: float, standardize: bool) -> None:
    x, y = labelled(rng, "clouds", 2, 2)
    x[:, 1] *= scale / np.abs(x[:, 1]).max()
    with pytest.raises(ValueError, match=r"Column 'b' of X has a scale of .*; rescale the features"):
        partition(pd.DataFrame(x, columns=["a", "b"]), y, standardize=standardize)


@pytest.mark.parametrize("offset", [1.0, 1e4, 1e8])
def test_a_shift_of_the_points_does_not_change_the_result(rng: np.random.Generator, offset: float) -> None:
    """Up to the rounding of the shifted points, which is 1e-8 for a shift of 1e8."""
    x, y = labelled(rng, "dependent", 3, 2)
    x = np.round(x, 3)
    moved = x + offset * rng.uniform(0.5, 1.0, size=3)
    part = partition(moved, y)
    assert_covered(part, moved, y)
    if offset <= 1e4:
        assert summary(part) == summary(partition(x, y))


@pytest.mark.parametrize("value", [0.0, 7.0, 0.1, 1e6 + 0.1, -1 / 3])
def test_the_value_of_a_constant_feature_does_not_change_the_result(rng: np.random.Generator, value: float) -> None:
    """Rounding can make its standard deviation nonzero; it must still not be used as a scale."""
    x, y = labelled(rng, "clouds", 2, 2)
    flat, lifted = np.column_stack([x, np.zeros(len(x))]), np.column_stack([x, np.full(len(x), value)])
    at_zero, there = partition(flat, y), partition(lifted, y)
    assert summary(at_zero) == summary(there)
    z, shift = rng.normal(size=(30, 3)), np.array([0.0, 0.0, value])
    np.testing.assert_allclose(there.distances(z + shift), at_zero.distances(z), rtol=1e-5)


def test_standardize_has_no_effect_on_standardised_points(rng: np.random.Generator) -> None:
    """Points of unit standard deviation have equal partitions with and without ``standardize``."""
    x, y = labelled(rng, "clouds", 3, 3)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    assert summary(partition(x, y, standardize=True)) == summary(partition(x, y, standardize=False))


@pytest.mark.parametrize("standardize", [True, False])
def test_hyperplanes_of_equally_large_classes_pass_through_the_centroids(
    rng: np.random.Generator, standardize: bool
) -> None:
    x = rng.normal(size=(80, 3)) * [1.0, 10.0, 0.1] + [5.0, 0.0, 1.0]
    y = np.arange(80) % 2
    part = partition(x, y, standardize=standardize)
    unit = x.std(axis=0) if standardize else np.ones(3)
    h = part.hyperplanes[0]
    c, d = x[y == h.label].mean(axis=0), x[y != h.label].mean(axis=0)
    np.testing.assert_allclose(h.w, (c - d) / unit**2, rtol=1e-6)
    assert (h.alpha, h.beta) == pytest.approx((h.w @ c, h.w @ d), rel=1e-6)


def test_xor() -> None:
    part = partition([[0, 0], [1, 1], [0, 1], [1, 0]], ["even", "even", "odd", "odd"])
    assert part.hyperplanes == ()
    assert summary(part) == [("even", "terminal", 1, 2), ("odd", "terminal", 1, 2)]
    assert part.ellipsoids[0].intersects(part.ellipsoids[1])


def test_the_first_iteration_on_wdbc() -> None:
    """As in the paper, the first pair of ellipsoids covers 264 of 357 benign and 95 of 212 malignant records."""
    data = load_breast_cancer()
    part = partition(data.data, data.target_names[data.target], standardize=False, max_impure=2)
    covered = {e.label: e.covered for e in part.ellipsoids if e.iteration == 1}
    assert covered == {"benign": 264, "malignant": 95}
    assert {e.kind for e in part.ellipsoids if e.iteration == 1} == {Kind.FIRST}


def test_a_class_between_others_has_several_ellipsoids() -> None:
    """Iris versicolor lies between the other two classes: reduced hulls intersect, and centroids must separate them."""
    data = load_iris()
    part = partition(data.data, data.target_names[data.target], rest="partitioned")
    parts = {
        label: sum(e.label == label and e.kind is not Kind.ISOLATED for e in part.ellipsoids) for label in part.classes
    }
    assert parts["setosa"] == 1
    assert parts["versicolor"] > 1
    (setosa,) = [e for e in part.ellipsoids if e.label == "setosa"]
    assert (setosa.covered, setosa.purity) == (50, 1.0)


@pytest.mark.parametrize("max_impure", [0, 3])
@pytest.mark.parametrize("classes", [2, 3])
def test_equal_points_with_different_labels(rng: np.random.Generator, classes: int, max_impure: int) -> None:
    places = rng.normal(size=(6, 2))
    x, y = np.repeat(places, 10 * classes, axis=0), np.tile(np.arange(classes), 60)
    part = partition(x, y, max_impure=max_impure)
    assert {e.kind for e in part.ellipsoids} == {Kind.TERMINAL}
    assert [sum(e.covered for e in part.ellipsoids if e.label == c) for c in range(classes)] == [60] * classes


def test_a_class_of_as_many_points_as_features_is_covered(rng: np.random.Generator) -> None:
    """With one point less, its points are isolated."""
    x = rng.normal(size=(40, 4))
    for few, kind in ((4, Kind.TERMINAL), (3, Kind.ISOLATED)):
        part = partition(x, (np.arange(40) < few).astype(int))
        assert {e.kind for e in part.ellipsoids if e.label == 1} == {kind}


def dependent_moons() -> tuple[Array, Array]:
    x, y = make_moons(150, noise=0.15, random_state=3)
    return np.column_stack([x, 5 * x[:, 0] - x[:, 1], np.ones(len(x))]), y


SETS: dict[str, Callable[[], tuple[Array, Array]]] = {
    "moons": lambda: make_moons(200, noise=0.15, random_state=1),
    "circles": lambda: make_circles(200, noise=0.08, factor=0.5, random_state=1),
    "dependent moons": dependent_moons,
    "iris": lambda: load_iris(return_X_y=True),
    "wdbc": lambda: load_breast_cancer(return_X_y=True),
}


@pytest.mark.parametrize("name", [pytest.param(s, marks=pytest.mark.slow if s == "wdbc" else ()) for s in SETS])
def test_a_cvxpy_solver_gives_the_same_partition(name: str) -> None:
    x, y = SETS[name]()
    # With rest="whole" directions depend on how accurately an ellipsoid is known, which differs between solvers.
    native, by_cvxpy = (partition(x, y, solver=solver, rest="partitioned") for solver in ("native", "CLARABEL"))
    assert summary(native) == summary(by_cvxpy)
    for a, b in zip(native.ellipsoids, by_cvxpy.ellipsoids, strict=True):
        assert a.log_volume == pytest.approx(b.log_volume, abs=1e-5)
        assert a.counts.tolist() == b.counts.tolist()
    assert by_cvxpy.made["solver"] == "CLARABEL"


def test_parameters_and_versions_are_recorded(rng: np.random.Generator) -> None:
    x, y = labelled(rng, "clouds", 2, 2)
    part = partition(x, y, max_impure=1, floor=0.01, standardize=False)
    made = dict(part.made)
    assert {"sepc_torch", "numpy"} <= set(made.pop("versions"))
    assert made == {
        "max_impure": 1,
        "solver": "native",
        "standardize": False,
        "floor": 0.01,
        "rest": "whole",
        "max_isolated": None,
        "max_per_class": None,
    }
    assert all(seconds >= 0 for seconds in part.seconds.values())


def test_a_constant_feature_does_not_change_the_ellipsoids(rng: np.random.Generator) -> None:
    """A constant feature adds no dimension, so that no set becomes too small for an ellipsoid."""
    y = rng.integers(0, 2, 200)
    x = rng.normal(size=(200, 3)) + 1.5 * y[:, None]
    plain, wider = partition(x, y), partition(np.column_stack([x, np.full(200, 7.0)]), y)
    assert [e.covered for e in wider.ellipsoids] == [e.covered for e in plain.ellipsoids]
    assert [e.kind for e in wider.ellipsoids] == [e.kind for e in plain.ellipsoids]
