"""Min-norm point with capped weights: optimality conditions, several groups, ties, and the origin inside the hull."""

from __future__ import annotations

import numpy as np
import pytest

from sepc_torch.shapes import Array
from sepc_torch.solvers.capped_weights import nearest_combination

Rng = np.random.Generator


def gap(points: Array, base: Array, groups: Array, sums: Array, cap: float, z: Array) -> float:
    """The optimality gap w'w minus the least w'v over all feasible combinations v."""
    w = base + z @ points
    least = float(w @ base)
    for group, total in zip(groups.T, sums, strict=True):
        for value in np.sort(points[group] @ w):
            take = min(cap, total)
            least, total = least + take * float(value), total - take
    return float(w @ w) - least


def assert_optimal(points: Array, base: Array, groups: Array, sums: Array, cap: float) -> Array:
    extent = max(float((points**2).sum(axis=1).max()), float(base @ base))
    z = nearest_combination(points, base, groups, sums, cap, 1e-15 * extent)
    assert z is not None
    assert_feasible_and_optimal(points, base, groups, sums, cap, z)
    return z


def assert_feasible_and_optimal(points: Array, base: Array, groups: Array, sums: Array, cap: float, z: Array) -> None:
    extent = max(float((points**2).sum(axis=1).max()), float(base @ base))
    assert z.min() >= 0.0
    assert z.max() <= cap
    assert z @ groups == pytest.approx(sums, rel=1e-12)
    assert gap(points, base, groups, sums, cap, z) <= 1e-11 * extent


@pytest.mark.parametrize(("count", "dim"), [(5, 2), (40, 1), (300, 7), (600, 32), (31, 32)])
def test_one_group(rng: Rng, count: int, dim: int) -> None:
    points = rng.normal(size=(count, dim)) + rng.normal(size=dim)
    cap = 1.0 / rng.uniform(1.0, count)
    assert_optimal(points, rng.normal(size=dim), np.ones((count, 1), dtype=bool), np.ones(1), cap)


@pytest.mark.parametrize("dim", [2, 9])
def test_two_groups_with_different_sums(rng: Rng, dim: int) -> None:
    points = np.concatenate([rng.normal(size=(60, dim)) + 1.0, -rng.normal(size=(90, dim))])
    groups = np.repeat(np.eye(2, dtype=bool), [60, 90], axis=0)
    assert_optimal(points, np.zeros(dim), groups, np.array([0.7, 1.0]), 1 / 40)


def test_most_weights_end_at_a_bound(rng: Rng) -> None:
    """In D dimensions at most D + 1 weights are strictly between the bounds."""
    points = rng.normal(size=(500, 6)) + 3.0
    z = assert_optimal(points, np.zeros(6), np.ones((500, 1), dtype=bool), np.ones(1), 1 / 50)
    assert np.count_nonzero((z > 0) & (z < 1 / 50)) <= 7


def test_a_hull_that_contains_the_origin_has_norm_zero(rng: Rng) -> None:
    points = rng.normal(size=(400, 5))
    z = assert_optimal(points, np.zeros(5), np.ones((400, 1), dtype=bool), np.ones(1), 1 / 40)
    assert np.linalg.norm(z @ points) <= 1e-10


@pytest.mark.slow
def test_differences_of_hulls_that_meet_have_norm_zero(rng: Rng) -> None:
    """The length of the result is a rounding error, before and after the crossover."""
    groups = np.repeat(np.eye(2, dtype=bool), 30, axis=0)
    for _ in range(100):
        points = rng.normal(size=(60, 2))
        z = assert_optimal(points, np.zeros(2), groups, np.array([0.7, 1.0]), 1 / 15)
        assert np.linalg.norm(z @ points) <= 1e-13


def test_duplicates_and_ties(rng: Rng) -> None:
    """With ties the crossover may fail and return None; a returned result is optimal."""
    for _ in range(10):
        points = rng.integers(0, 2, size=(500, 4)).astype(float) + 1.0
        given = points, np.zeros(4), np.ones((500, 1), dtype=bool), np.ones(1), 1 / 120
        z = nearest_combination(*given, 1e-14)
        if z is not None:
            assert_feasible_and_optimal(*given, z)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_scaling_the_points_does_not_change_the_combination(rng: Rng, scale: float) -> None:
    points, groups = rng.normal(size=(200, 5)) + 1.0, np.ones((200, 1), dtype=bool)
    small = assert_optimal(points, np.zeros(5), groups, np.ones(1), 0.02)
    large = assert_optimal(scale * points, np.zeros(5), groups, np.ones(1), 0.02)
    assert large @ points == pytest.approx(small @ points, abs=1e-6)
