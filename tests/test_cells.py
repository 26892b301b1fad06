"""Cells, counts and sorted distances of a ledger against brute force over all points and ellipsoids."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sepc_torch import partition
from sepc_torch.ellipsoid import SURFACE_TOLERANCE, Ellipsoid
from sepc_torch.partitioning.cells import RESOLUTION, Ledger, ledger
from sepc_torch.shapes import Array


@pytest.fixture(params=["numpy", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device | None:
    """NumPy, or torch on a device with batches of a few ellipsoids."""
    monkeypatch.setattr("sepc_torch.partitioning.cells._BATCH", 3000)
    return None if request.param == "numpy" else torch.device(request.param)


def random_ellipsoids(rng: np.random.Generator, count: int, dim: int) -> list[Ellipsoid]:
    return [Ellipsoid(rng.normal(size=dim), np.triu(rng.normal(size=(dim, dim))) + np.eye(dim)) for _ in range(count)]


def brute_cells(
    ellipsoids: list[Ellipsoid], points: Array, codes: Array, classes: int
) -> dict[tuple[bool, ...], list[int]]:
    """Membership pattern -> number of points of each class, one point at a time."""
    table: dict[tuple[bool, ...], list[int]] = {}
    for z, code in zip(points, codes, strict=True):
        pattern = tuple(bool(np.linalg.norm(e.whitener @ (z - e.center)) <= 1 + SURFACE_TOLERANCE) for e in ellipsoids)
        table.setdefault(pattern, [0] * classes)[code] += 1
    return table


def as_table(found: Ledger) -> dict[tuple[bool, ...], list[int]]:
    return {tuple(cell): counts for cell, counts in zip(found.cells.tolist(), found.counts.tolist(), strict=True)}


@pytest.mark.parametrize("ellipsoids", [1, 5, 8, 23])
def test_cells_are_the_distinct_patterns(
    rng: np.random.Generator, ellipsoids: int, device: torch.device | None
) -> None:
    """The numbers of ellipsoids include a multiple of 8, because the patterns are packed into bytes."""
    es = random_ellipsoids(rng, ellipsoids, 3)
    points, codes = rng.normal(size=(300, 3)), rng.integers(0, 4, size=300)
    found = ledger(es, points, codes, 4, device)
    assert as_table(found) == brute_cells(es, points, codes, 4)
    assert len(as_table(found)) == len(found.cells), "a cell occurs twice"


@pytest.mark.parametrize("classes", [2, 3])
def test_the_cells_of_a_partition(rng: np.random.Generator, classes: int) -> None:
    """Every training point is counted once; a point on the surface of an ellipsoid counts as inside."""
    y = np.arange(90) % classes
    x = rng.normal(size=(90, 2)) + y[:, None]
    part = partition(x, y)
    assert part.counts.sum(axis=0).tolist() == part.class_counts.tolist()
    assert as_table(part.ledger) == brute_cells(list(part.ellipsoids), x, y, classes)
    assert part.cells.any(axis=1).all(), "a training point lies in no ellipsoid"


def true_counts(e: Ellipsoid, points: Array, codes: Array, classes: int, distance: float) -> list[int]:
    reached = codes[e.distance(points) <= distance * (1 + SURFACE_TOLERANCE)]
    return [int(np.count_nonzero(reached == c)) for c in range(classes)]


def some_distances(rng: np.random.Generator, e: Ellipsoid, points: Array) -> list[float]:
    """Distances at, just below and just above those of training points, zero, the largest and beyond it."""
    at = rng.choice(e.distance(points), size=12)
    return [0.0, *at, *(at * (1 - 1e-3)), *(at * (1 + 1e-3)), float(e.distance(points).max()), 1e9]


def test_counts_within_a_distance_are_exact_for_small_classes(
    rng: np.random.Generator, device: torch.device | None
) -> None:
    """Classes of different size: the largest size that is kept in full, a small one, and one with equal points."""
    sizes = [RESOLUTION, 7, 60]
    codes = rng.permutation(np.repeat([0, 1, 2], sizes))
    points = rng.normal(size=(len(codes), 2))
    points[codes == 2] = points[codes == 2][rng.integers(0, 5, size=60)]
    es = random_ellipsoids(rng, 3, 2)
    points[0] = es[0].center  # at distance zero
    found = ledger(es, points, codes, 3, device)
    assert found.count_error == 0
    for k, e in enumerate(es):
        for distance in some_distances(rng, e, points):
            assert found.reached(k, distance).tolist() == true_counts(e, points, codes, 3, distance)


@pytest.mark.parametrize("size", [RESOLUTION + 1, 2 * RESOLUTION, 5 * RESOLUTION + 17])
def test_counts_within_a_distance_are_too_low_by_at_most_the_count_error_for_large_classes(
    rng: np.random.Generator, size: int, device: torch.device | None
) -> None:
    codes = rng.permutation(np.repeat([0, 1], [size, 50]))
    points = rng.normal(size=(len(codes), 2))
    es = random_ellipsoids(rng, 2, 2)
    found = ledger(es, points, codes, 2, device)
    assert found.count_error == -(-size // RESOLUTION) - 1, "counts_at is not evenly spaced"
    left_out = np.setdiff1d(np.arange(1, size + 1), found.counts_at[0])
    shortfalls = []
    for k, e in enumerate(es):
        # Counts are too low at the distances of points that were left out.
        between = np.sort(e.distance(points[codes == 0]))[rng.choice(left_out, size=20) - 1]
        for distance in [*some_distances(rng, e, points), *between]:
            large, small = found.reached(k, distance).tolist()
            true_large, true_small = true_counts(e, points, codes, 2, distance)
            shortfalls.append(true_large - large)
            assert small == true_small
        assert found.reached(k, np.inf).tolist() == [size, 50]
    assert min(shortfalls) >= 0
    assert max(shortfalls) <= found.count_error
    assert max(shortfalls) > 0, "no count was too low, so that the bound was not tested"


def test_the_size_of_a_ledger_does_not_grow_with_the_training_set(rng: np.random.Generator) -> None:
    """A ledger keeps at most ``RESOLUTION`` distances per ellipsoid and class, not those of all training points."""
    es = random_ellipsoids(rng, 2, 2)
    shapes = set()
    for size in (4 * RESOLUTION, 8 * RESOLUTION):
        found = ledger(es, rng.normal(size=(size, 2)), np.arange(size) % 2, 2)
        shapes.add((found.sorted_distances.shape, found.counts_at.shape))
    assert shapes == {((2, 2, RESOLUTION), (2, RESOLUTION))}
