"""Native solver of the closest points of reduced hulls: optimality conditions, closed forms and symmetries."""

from __future__ import annotations

import numpy as np
import pytest

from sepc_torch import reduced_hull_points
from sepc_torch.shapes import Array
from sepc_torch.solvers.reduced_hull import ReducedHullPoints, closest_points

Rng = np.random.Generator


def assert_optimal(found: ReducedHullPoints, x: Array, y: Array, cap: float) -> None:
    """The weights are feasible, and no vertex of either hull is closer along w = c - d than c and d."""
    for points, weights, place in ((x, found.u, found.c), (y, found.v, found.d)):
        assert weights.sum() == pytest.approx(1.0)
        assert weights.min() >= -1e-15
        assert weights.max() <= cap * (1 + 1e-9)
        assert weights @ points == pytest.approx(place, abs=1e-9 * np.abs(points).max())
    w = found.c - found.d
    scale = max(float(np.abs(x).max()), float(np.abs(y).max())) ** 2 * x.shape[1]
    assert found.c @ w - _least(x @ w, cap) <= 1e-10 * scale
    assert _least(-(y @ w), cap) + found.d @ w >= -1e-10 * scale


def _least(values: Array, cap: float) -> float:
    """The least weighted mean of the values for weights of sum 1 up to the cap, by a greedy loop."""
    left, total = 1.0, 0.0
    for value in np.sort(values):
        take = min(cap, left)
        total, left = total + take * value, left - take
        if left <= 0:
            break
    return total


@pytest.mark.parametrize("shift", [0.0, 0.4, 3.0])
@pytest.mark.parametrize("factor", [1.0, 1.7, 5.0, np.inf])
@pytest.mark.parametrize(("n", "m", "dim"), [(30, 50, 2), (200, 90, 8), (40, 41, 15), (25, 1200, 4), (150, 400, 25)])
def test_is_optimal(rng: Rng, n: int, m: int, dim: int, factor: float, shift: float) -> None:
    x, y = rng.normal(size=(n, dim)) + shift, rng.normal(size=(m, dim))
    cap = min(1.0, factor / min(n, m))
    assert_optimal(reduced_hull_points(x, y, cap=cap), x, y, cap)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [6, 20])
@pytest.mark.parametrize("n", [300, 9000])
@pytest.mark.parametrize("shift", [0.3, 1.0])
def test_is_optimal_with_a_moving_band(rng: Rng, n: int, dim: int, shift: float) -> None:
    """Sets so large that the band moves, with and without a guess of the direction."""
    x, y = rng.normal(size=(n, dim)) + shift, rng.standard_t(4, size=(30_000, dim))
    cap = 1.0 / n
    found = reduced_hull_points(x, y)
    assert_optimal(found, x, y, cap)
    again = closest_points(x, y, cap, direction=found.c - found.d + 0.2 * rng.normal(size=dim))
    assert_optimal(again, x, y, cap)
    assert np.linalg.norm(again.c - again.d) == pytest.approx(np.linalg.norm(found.c - found.d), abs=1e-6)


def test_sets_of_equal_size_give_the_centroids(rng: Rng) -> None:
    x, y = rng.normal(size=(70, 5)), rng.normal(size=(70, 5)) + 1
    found = reduced_hull_points(x, y)
    assert found.c == pytest.approx(x.mean(axis=0))
    assert found.d == pytest.approx(y.mean(axis=0))


def test_the_smaller_set_is_reduced_to_its_centroid(rng: Rng) -> None:
    x, y = rng.normal(size=(20, 3)), rng.normal(size=(70, 3)) + 2
    assert reduced_hull_points(x, y).c == pytest.approx(x.mean(axis=0))


def test_swapping_the_sets_swaps_the_points(rng: Rng) -> None:
    x, y = rng.normal(size=(50, 4)), rng.normal(size=(80, 4)) + 1
    a, b = reduced_hull_points(x, y), reduced_hull_points(y, x)
    assert b.d == pytest.approx(a.c, abs=1e-6)
    assert b.c == pytest.approx(a.d, abs=1e-6)


def test_equivariance_under_similarity_transformations(rng: Rng) -> None:
    x, y = rng.normal(size=(50, 4)), rng.normal(size=(80, 4)) + 1
    q, t = np.linalg.qr(rng.normal(size=(4, 4)))[0], 100 * rng.normal(size=4)
    a, b = reduced_hull_points(x, y), reduced_hull_points(7 * x @ q + t, 7 * y @ q + t)
    assert b.c - b.d == pytest.approx(7 * (a.c - a.d) @ q, abs=1e-5)


@pytest.mark.parametrize("exponent", [-325, 325])
def test_units_in_powers_of_two_change_only_the_units(rng: Rng, exponent: int) -> None:
    x, y, unit = rng.normal(size=(50, 4)), rng.normal(size=(80, 4)) + 1, 2.0**exponent
    a, b = reduced_hull_points(x, y), reduced_hull_points(unit * x, unit * y)
    np.testing.assert_array_equal(b.u, a.u)
    np.testing.assert_array_equal(b.v, a.v)


def test_full_hulls(rng: Rng) -> None:
    """With cap=1 the result is the distance between two boxes."""
    corners = np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    inside = rng.random((50, 2))
    found = reduced_hull_points(np.concatenate([corners, inside]), corners + np.array([3.0, 0.25]), cap=1.0)
    assert np.linalg.norm(found.c - found.d) == pytest.approx(2.0)


@pytest.mark.parametrize("dim", [6, 14])
def test_many_ties(rng: Rng, dim: int) -> None:
    """Categorical data: whole groups of points lie at the selection threshold."""
    x, y = rng.integers(0, 2, size=(400, dim)).astype(float), rng.integers(0, 3, size=(900, dim)).astype(float)
    found = reduced_hull_points(x, y)
    assert_optimal(found, x, y, 1 / 400)
    # The difference is unique, so another order of the rows gives the same difference up to rounding.
    again = reduced_hull_points(x[rng.permutation(400)], y[rng.permutation(900)])
    assert again.c - again.d == pytest.approx(found.c - found.d, abs=1e-11)


def test_invalid_input_is_refused(rng: Rng) -> None:
    x, y = rng.normal(size=(20, 3)), rng.normal(size=(30, 3))
    with pytest.raises(ValueError, match="cannot sum to 1"):
        reduced_hull_points(x, y, cap=0.01)
    with pytest.raises(ValueError, match="3 features and y has 2"):
        reduced_hull_points(x, y[:, :2])
    with pytest.raises(ValueError, match="NaN"):
        reduced_hull_points(np.full((3, 3), np.nan), y)
    for scale in (1e-300, 1e-150, 1e165, 1e300):
        with pytest.raises(ValueError, match=r"Column . of x and y has a scale of .*; rescale the features"):
            reduced_hull_points(scale * x, scale * y)
