"""Algorithms 1 and 2 on two sets: invariants of every iteration, checked by plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from sepc_torch import Kind
from sepc_torch.ellipsoid import SURFACE_TOLERANCE, Ellipsoid
from sepc_torch.partitioning.algorithm import Separator
from sepc_torch.partitioning.steps import Hyperplane, Separation
from sepc_torch.shapes import Array

FLOOR = 1e-3
FAMILIES = ["clouds", "nested", "grid", "constant", "dependent", "few places", "far apart"]
DIMS = [1, 2, 5]


def two_sets(rng: np.random.Generator, family: str, dim: int) -> tuple[Array, Array]:
    """Two sets of 15 to 50 points of unit scale: overlapping, nested, flat, with equal points, or far apart."""
    n, m = (int(size) for size in rng.integers(15, 50, size=2))
    x, y = rng.normal(size=(n, dim)), rng.normal(size=(m, dim))
    match family:
        case "clouds":
            y[:, 0] += rng.uniform(0.5, 2.0)
        case "nested":
            y /= 4.0
        case "grid":
            x, y = np.round(x), np.round(y)
        case "constant":
            x[:, -1] = y[:, -1] = rng.normal()
            y[:, 0] += 1.0
        case "dependent" if dim > 1:
            x[:, -1], y[:, -1] = x[:, 0] - 2 * x[:, 1], y[:, 0] - 2 * y[:, 1]
        case "few places":
            places = rng.normal(size=(3, dim))
            x, y = places[rng.integers(0, 3, size=n)], places[rng.integers(0, 3, size=m)]
        case "far apart":
            y += 20.0
    return x, y


class Watch:
    """Progress callback that fails if the loop makes no progress.

    A run reports each set once per iteration and once after the loop, so the number of calls is bounded.
    """

    def __init__(self, points: int) -> None:
        self.calls_left = 2 * points + 4

    def __call__(self, points: int) -> None:
        self.calls_left -= 1
        assert self.calls_left > 0, f"the loop continues without covering points (the last call had {points} points)"


def separate(x: Array, y: Array, max_impure: int = 2, metric: Array | None = None) -> Separation:
    watch = Watch(len(x) + len(y))
    return Separator(max_impure=max_impure, floor=FLOOR, metric=metric, tick=watch).separate(x, y)


def held(e: Ellipsoid, points: Array) -> set[int]:
    r"""The rows with :math:`\|W (z - c)\| \le 1`, one by one."""
    return {row for row, z in enumerate(points) if np.linalg.norm(e.whitener @ (z - e.center)) <= 1 + SURFACE_TOLERANCE}


def plane_of(found: Separation, iteration: int) -> Hyperplane:
    (plane,) = [h for h in found.hyperplanes if h.iteration == iteration]
    return plane


@pytest.mark.parametrize("max_impure", [0, 2])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_point_is_covered_once_by_a_pure_enough_ellipsoid(
    rng: np.random.Generator, family: str, dim: int, max_impure: int
) -> None:
    """The ellipsoid of a point holds it and at most ``max_impure`` remaining points of the other set."""
    sets = two_sets(rng, family, dim)
    found = separate(*sets, max_impure)
    left = [set(range(len(points))) for points in sets]
    assert [h.iteration for h in found.hyperplanes] == list(range(1, len(found.hyperplanes) + 1))
    for iteration in sorted({piece.iteration for piece in found.pieces}):
        before = [set(rows) for rows in left]
        for piece in (piece for piece in found.pieces if piece.iteration == iteration):
            own, others = sets[piece.side], sets[1 - piece.side]
            assert set(piece.members.tolist()) <= left[piece.side], "a point is covered twice, or is not in the set"
            left[piece.side] -= set(piece.members.tolist())
            assert set(piece.support.tolist()) <= set(piece.members.tolist())
            assert set(piece.members.tolist()) <= held(piece.ellipsoid, own)
            impure = len(held(piece.ellipsoid, others) & before[1 - piece.side])
            in_loop = iteration <= len(found.hyperplanes)
            match piece.kind:
                case Kind.FIRST | Kind.FURTHER:
                    assert impure <= max_impure
                    assert in_loop
                    assert (piece.kind is Kind.FIRST) == (iteration == 1)
                case Kind.ISOLATED:
                    assert impure <= max_impure
                case Kind.TERMINAL:
                    # After the loop all remaining points are terminal; in the loop, only a set that cannot shrink.
                    assert not in_loop or impure > max_impure
    assert left == [set(), set()]


@pytest.mark.parametrize("dim", [2, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_covered_points_lie_beyond_the_hyperplanes(rng: np.random.Generator, family: str, dim: int) -> None:
    x, y = two_sets(rng, family, dim)
    metric = rng.uniform(0.5, 2.0, size=dim)
    found = separate(x, y, metric=metric)
    for piece in found.pieces:
        if piece.iteration > len(found.hyperplanes):
            continue
        h = plane_of(found, piece.iteration)
        assert h.alpha > h.beta
        values = (np.concatenate([x, y]) * metric) @ h.w
        slack = 1e-6 * np.ptp(values)
        if piece.side == 0:
            assert ((x[piece.members] * metric) @ h.w).min() >= h.alpha - slack
        else:
            assert ((y[piece.members] * metric) @ h.w).max() <= h.beta + slack


@pytest.mark.parametrize("dim", DIMS)
def test_hyperplanes_of_equally_large_sets_pass_through_the_centroids(rng: np.random.Generator, dim: int) -> None:
    x = rng.normal(size=(30, dim))
    y = rng.normal(size=(30, dim)) + 0.5
    metric = rng.uniform(0.2, 5.0, size=dim)
    c, d = (x * metric).mean(axis=0), (y * metric).mean(axis=0)
    h = separate(x, y, metric=metric).hyperplanes[0]
    np.testing.assert_allclose(h.w, c - d, rtol=1e-9, atol=1e-12)
    assert (h.alpha, h.beta) == pytest.approx((c @ (c - d), d @ (c - d)), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("dim", DIMS)
def test_disjoint_sets_take_one_iteration(rng: np.random.Generator, dim: int) -> None:
    """The hyperplanes touch the two hulls and are orthogonal to the shortest segment between them."""
    x, y = two_sets(rng, "far apart", dim)
    found = separate(x, y)
    assert [(piece.kind, len(piece.members)) for piece in found.pieces] == [(Kind.FIRST, len(x)), (Kind.FIRST, len(y))]
    (h,) = found.hyperplanes
    assert float((x @ h.w).min()) == pytest.approx(h.alpha, rel=1e-6)
    assert float((y @ h.w).max()) == pytest.approx(h.beta, rel=1e-6)
    assert h.alpha - h.beta == pytest.approx(float(h.w @ h.w), rel=1e-9)


def test_xor_has_no_hyperplane() -> None:
    found = separate(np.array([[0.0, 0.0], [1.0, 1.0]]), np.array([[0.0, 1.0], [1.0, 0.0]]), max_impure=0)
    assert found.hyperplanes == ()
    assert [(piece.side, piece.kind) for piece in found.pieces] == [(0, Kind.TERMINAL), (1, Kind.TERMINAL)]
    assert found.pieces[0].ellipsoid.intersects(found.pieces[1].ellipsoid)


@pytest.mark.parametrize("sizes", [(20, 20), (20, 45)])
def test_sets_with_the_same_centroid_cannot_be_separated(rng: np.random.Generator, sizes: tuple[int, int]) -> None:
    """XOR with clouds: every point is mirrored at the origin, so that the centroids coincide and hulls intersect."""
    x, y = (at + 0.2 * rng.normal(size=(n, 2)) for at, n in zip([(2.0, 2.0), (2.0, -2.0)], sizes, strict=True))
    found = separate(np.concatenate([x, -x]), np.concatenate([y, -y]))
    assert found.hyperplanes == ()
    assert [piece.kind for piece in found.pieces] == [Kind.TERMINAL, Kind.TERMINAL]
    assert [len(piece.members) for piece in found.pieces] == [2 * sizes[0], 2 * sizes[1]]


@pytest.mark.parametrize("max_impure", [0, 3])
def test_equal_points_of_both_sets_end_the_loop(rng: np.random.Generator, max_impure: int) -> None:
    """Both sets are copies of one point. The rounding error of the mean must not count as a distance between them."""
    for _ in range(40):
        dim = int(rng.integers(1, 5))
        n, m = rng.integers(dim + 1, 40, size=2)
        place = rng.normal(size=dim)
        found = separate(np.tile(place, (n, 1)), np.tile(place, (m, 1)), max_impure)
        assert sum(len(piece.members) for piece in found.pieces) == n + m
        assert {piece.kind for piece in found.pieces} == {Kind.TERMINAL}


@pytest.mark.parametrize("dim", [2, 3, 6])
def test_few_points_stay_isolated(rng: np.random.Generator, dim: int) -> None:
    """Each of fewer points than dimensions gets a ball whose radius is the least semi-axis."""
    x, y = rng.normal(size=(dim - 1, dim)), rng.normal(size=(30, dim))
    mine = [piece for piece in separate(x, y).pieces if piece.side == 0]
    assert [piece.kind for piece in mine] == [Kind.ISOLATED] * len(x)
    assert sorted(int(piece.members[0]) for piece in mine) == list(range(len(x)))
    for piece in mine:
        np.testing.assert_array_equal(piece.ellipsoid.center, x[piece.members[0]])
        np.testing.assert_allclose(piece.ellipsoid.semi_axes, FLOOR, rtol=1e-12)


def test_equal_isolated_points_share_a_ball(rng: np.random.Generator) -> None:
    x = np.repeat(rng.normal(size=(2, 5)), 2, axis=0)
    mine = [piece for piece in separate(x, 3.0 + rng.normal(size=(30, 5))).pieces if piece.side == 0]
    assert sorted(piece.members.tolist() for piece in mine) == [[0, 1], [2, 3]]


def test_only_the_kept_side_is_returned(rng: np.random.Generator) -> None:
    x, y = two_sets(rng, "clouds", 3)
    both = Separator(max_impure=2, floor=FLOOR).separate(x, y).pieces
    for side in (0, 1):
        alone = Separator(max_impure=2, floor=FLOOR, keep=(side == 0, side == 1)).separate(x, y).pieces
        wanted = [piece for piece in both if piece.side == side]
        assert [piece.members.tolist() for piece in alone] == [piece.members.tolist() for piece in wanted]
        assert [piece.kind for piece in alone] == [piece.kind for piece in wanted]
