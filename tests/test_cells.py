"""Cells, class counts and steps of a ledger against brute force over all points and ellipsoids."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import numpy as np
import pytest
import torch

from sepc_torch import partition
from sepc_torch.ellipsoid import SURFACE_TOLERANCE, Ellipsoid
from sepc_torch.partitioning import cells
from sepc_torch.partitioning.cells import STEPS, TAIL, Ledger, count_grid, ledger
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
    """The patterns of a ledger are those of the points, each occurs once, and members and entries are ascending."""
    es = random_ellipsoids(rng, ellipsoids, 3)
    points, codes = rng.normal(size=(300, 3)), np.sort(rng.integers(0, 4, size=300))
    found = ledger(es, points, codes, 4, device)
    assert as_table(found) == brute_cells(es, points, codes, 4)
    assert len(as_table(found)) == len(found.cell_sizes), "a cell occurs twice"
    ends = np.cumsum(found.cell_sizes)
    assert all((np.diff(members) > 0).all() for members in np.split(found.cell_members, ends[:-1]))
    assert (np.diff(found.entry_cells.astype(int) * 4 + found.entry_classes) > 0).all()
    assert (found.entry_counts > 0).all()
    inside = np.array([e.contains(points) for e in es])
    assert found.held.tolist() == [np.bincount(codes[own], minlength=4).tolist() for own in inside]


@pytest.mark.parametrize("pairs", [1, 7, 2**22])
def test_counts_in_ellipsoids_do_not_depend_on_the_size_of_pieces(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, pairs: int
) -> None:
    monkeypatch.setattr(cells, "_PAIRS", pairs)
    es = random_ellipsoids(rng, 6, 2)
    points, codes = rng.normal(size=(80, 2)), np.arange(80) // 30
    found = ledger(es, points, codes, 3)
    assert (found.held == found.cells.T.astype(int) @ found.counts).all()


def test_the_order_of_rows_does_not_matter(rng: np.random.Generator) -> None:
    es = random_ellipsoids(rng, 9, 2)
    points, codes = rng.normal(size=(200, 2)), np.arange(200) // 60
    order = np.lexsort((rng.random(200), codes))
    found, other = ledger(es, points, codes, 4), ledger(es, points[order], codes, 4)
    for name, mine, theirs in zip(Ledger._fields, found, other, strict=True):
        # Points in another place can be rounded differently by a matrix product.
        np.testing.assert_allclose(mine, theirs, rtol=1e-12 if "distances" in name else 0, err_msg=name)


def test_equal_hashes_of_different_sets_are_noticed(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first two seeds all sets of equal size have equal hashes, or all sets."""
    es = random_ellipsoids(rng, 9, 2)
    points, codes = rng.normal(size=(200, 2)), np.arange(200) // 100
    tried, hashes = [], cells.ellipsoid_hashes

    def colliding(count: int, seed: int = 0) -> Array:
        tried.append(seed)
        return hashes(count, seed) if seed > 1 else np.full(count, seed, dtype=np.int64)

    monkeypatch.setattr(cells, "ellipsoid_hashes", colliding)
    assert as_table(ledger(es, points, codes, 2)) == brute_cells(es, points, codes, 2)
    assert tried == [0, 1, 2]


@pytest.mark.parametrize("codes", [[0, 1, 0], [0, 0, 2], [0, 2, 3]])
def test_points_that_are_not_sorted_by_class_are_refused(rng: np.random.Generator, codes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"codes must be ascending and contain each of the 3 classes 0 to 2; got"):
        ledger(random_ellipsoids(rng, 1, 2), rng.normal(size=(3, 2)), np.array(codes), 3)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_cells_of_a_partition(rng: np.random.Generator, classes: int) -> None:
    """Every training point is counted once; a point on the surface of an ellipsoid counts as inside."""
    y = np.arange(90) % classes
    x = rng.normal(size=(90, 2)) + y[:, None]
    part = partition(x, y)
    assert part.counts.sum(axis=0).tolist() == part.class_counts.tolist()
    assert as_table(part.ledger) == brute_cells(list(part.ellipsoids), x, y, classes)
    assert part.cells.any(axis=1).all(), "a training point lies in no ellipsoid"


def true_counts(e: Ellipsoid, points: Array, codes: Array, classes: int, distance: float) -> Array:
    return np.bincount(codes[e.distance(points) <= distance * (1 + SURFACE_TOLERANCE)], minlength=classes)


def some_distances(rng: np.random.Generator, e: Ellipsoid, points: Array) -> list[float]:
    """Distances at, just below and just above those of training points, zero, the largest and beyond it."""
    at = rng.choice(e.distance(points), size=12)
    return [0.0, *at, *(at * (1 - 1e-3)), *(at * (1 + 1e-3)), float(e.distance(points).max()), 1e9]


def test_counts_within_a_distance_are_exact_for_few_points(
    rng: np.random.Generator, device: torch.device | None
) -> None:
    """As many points as there may be steps, in classes of different size, of which one has equal points."""
    codes = np.repeat([0, 1, 2], [STEPS - 67, 7, 60])
    points = rng.normal(size=(len(codes), 2))
    points[codes == 2] = points[codes == 2][rng.integers(0, 5, size=60)]
    es = random_ellipsoids(rng, 3, 2)
    points[0] = es[0].center  # at distance zero
    found = ledger(es, points, codes, 3, device)
    assert found.relative_count_error == 0
    assert found.totals.tolist() == [STEPS - 67, 7, 60]
    for k, e in enumerate(es):
        for distance in some_distances(rng, e, points):
            assert found.reached(k, distance).tolist() == true_counts(e, points, codes, 3, distance).tolist()


@pytest.mark.parametrize("sizes", [[STEPS - 49, 50], [5 * STEPS + 17, 50], [700] * 20], ids=str)
def test_counts_within_a_distance_are_too_low_by_at_most_the_relative_error(
    rng: np.random.Generator, sizes: list[int], device: torch.device | None
) -> None:
    classes = len(sizes)
    codes = np.repeat(np.arange(classes), sizes)
    points = rng.normal(size=(len(codes), 2))
    es = random_ellipsoids(rng, 2, 2)
    found = ledger(es, points, codes, classes, device)
    assert found.step_distances.shape[1] <= STEPS
    assert found.tail_distances.shape == (2, 0)
    shares = []
    grid = found.grid_counts[found.grid_classes == 0]
    for k, e in enumerate(es):
        # Where one point of the first class is missing to the next count of its grid, the error is largest.
        worst = np.sort(e.distance(points[codes == 0]))[grid[grid > 1] - 2] if k == 0 else np.zeros(0)
        # Just above the distance of that point, after the tolerance is added, and so below that of the next.
        for distance in [*some_distances(rng, e, points), *(worst * (1 + 1e-12) / (1 + SURFACE_TOLERANCE))]:
            read, true = found.reached(k, distance), true_counts(e, points, codes, classes, distance)
            assert (read <= true).all()
            shares.append(float(((true - read) / np.maximum(true, 1)).max()))
        assert found.reached(k, np.inf).tolist() == sizes
    assert max(shares) == found.relative_count_error > 0


@pytest.mark.parametrize(
    ("sizes", "spacing"),
    [([2000], 0.0), ([2049], 0.01), ([10**5] * 3, 0.02), ([1300] * 30, 0.1), ([1300] * 170, 1.0)],
    ids=str,
)
def test_grids_are_as_fine_as_fits(sizes: list[int], spacing: float) -> None:
    """The grids of the given spacing, and one that is finer would not fit."""

    def grid(total: int, eta: float) -> list[int]:
        counts = [1]
        while counts[-1] < total:
            # Rounding before the ceiling removes the error of the product in floating point.
            counts.append(min(total, max(counts[-1] + 1, math.ceil(round((1 + eta) * counts[-1], 6)))))
        return counts

    grid_classes, grid_counts = count_grid(np.array(sizes))
    for c, total in enumerate(sizes):
        assert grid_counts[grid_classes == c].tolist() == grid(total, spacing)
    assert len(grid_counts) <= STEPS or spacing == 1.0
    ladder = [0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
    for finer in ladder[: ladder.index(spacing)]:
        assert sum(len(grid(total, finer)) for total in sizes) > STEPS


def test_counts_before_and_beyond_the_horizon(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, device: torch.device | None
) -> None:
    """Too many classes for all steps: nearest steps, lower bounds up to the horizon, and the formula beyond it."""
    monkeypatch.setattr(cells, "STEPS", 64)
    sizes = rng.integers(20, 60, size=30)
    codes = np.repeat(np.arange(30), sizes)
    points = rng.normal(size=(len(codes), 2))
    es = random_ellipsoids(rng, 4, 2)
    found = ledger(es, points, codes, 30, device)
    assert found.step_distances.shape == (4, 64)
    assert found.tail_distances.shape == (4, TAIL)
    grid = [[*(2**j for j in range(6) if 2**j < size), int(size)] for size in sizes]
    for k, e in enumerate(es):
        distance = np.sort(e.distance(points))
        ordered = [np.sort(e.distance(points[codes == c])) for c in range(30)]
        steps = sorted((float(ordered[c][n - 1]), c, n) for c in range(30) for n in grid[c])[:64]
        kept = {(int(found.grid_classes[i]), int(found.grid_counts[i])) for i in found.step_ids[k]}
        assert kept == {(c, n) for _, c, n in steps}
        assert (np.diff(found.step_ids[k]) > 0).all()
        np.testing.assert_allclose(np.sort(found.step_distances[k]), [d for d, _, _ in steps], rtol=1e-12)
        horizon = steps[-1][0]
        for d in [0.0, *np.linspace(0, horizon, 30)[:-1]]:
            read, true = found.reached(k, d), true_counts(e, points, codes, 30, d)
            assert read.tolist() == [max((n for n in grid[c] if n <= true[c]), default=0) for c in range(30)]
            assert (true - read <= found.relative_count_error * true).all()
        at_horizon = found.reached(k, horizon)
        beyond = distance[distance > horizon * (1 + 1e-9)]
        levels = [float(beyond[math.ceil(j * len(beyond) / TAIL) - 1]) for j in range(1, TAIL + 1)]
        for j, (low, high) in enumerate(itertools.pairwise([horizon, *levels, 2 * levels[-1]])):
            expected = [b + (n - b) * j // TAIL for b, n in zip(at_horizon.tolist(), sizes.tolist(), strict=True)]
            assert found.reached(k, low).tolist() == expected
            assert found.reached(k, low + 0.9 * (high - low)).tolist() == expected
        assert found.reached(k, levels[-1]).tolist() == sizes.tolist()
        assert found.reached(k, levels[-2]).sum() < len(points)


def test_all_points_at_one_distance_lie_within_the_horizon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No point lies beyond the horizon, so that all of them are inside at its distance, and none before."""
    monkeypatch.setattr(cells, "STEPS", 10)
    codes = np.repeat(np.arange(8), 5)
    found = ledger([Ellipsoid(np.zeros(2), np.eye(2))], np.tile([3.0, 4.0], (40, 1)), codes, 8)
    assert found.reached(0, 5.0).tolist() == [5] * 8
    assert found.reached(0, 4.9).tolist() == [0] * 8


def test_processes_do_not_change_the_ledger(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    es = random_ellipsoids(rng, 11, 3)
    points, codes = rng.normal(size=(2500, 3)), np.sort(rng.integers(0, 5, size=2500))
    alone = ledger(es, points, codes, 5)
    monkeypatch.setattr(cells, "_PARALLEL_WORK", 0)
    together = ledger(es, points, codes, 5, n_jobs=2)
    for name, mine, theirs in zip(Ledger._fields, alone, together, strict=True):
        assert mine.dtype == theirs.dtype, name
        np.testing.assert_array_equal(mine, theirs, err_msg=name)


def test_the_size_of_a_ledger_does_not_grow_with_points_or_classes(rng: np.random.Generator) -> None:
    """A model of 100 classes keeps 16 KiB of steps per ellipsoid, in float32 with int32 indices."""
    es = random_ellipsoids(rng, 2, 2)
    for size, classes in ((4 * STEPS, 2), (8 * STEPS, 100), (8 * STEPS, 1000)):
        found = ledger(es, rng.normal(size=(size, 2)), np.sort(np.arange(size) % classes), classes)
        assert found.step_ids.shape[1] <= STEPS
        assert found.step_ids.dtype == np.int32
        assert found.tail_distances.shape[1] <= TAIL
        assert found.step_ids[0].nbytes + found.step_distances[0].astype(np.float32).nbytes <= 16 * 1024


@pytest.mark.slow
def test_memory_while_counting_is_less_than_one_byte_per_point_and_ellipsoid(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "STEPS", 128)
    size, count = 30_000, 500
    es = [Ellipsoid.ball(center, 0.05) for center in rng.normal(size=(count, 2))]
    points, codes = rng.normal(size=(size, 2)), np.arange(size) // (size // 3)
    tracemalloc.start()
    try:
        ledger(es, points, codes, 3)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 0.6 * size * count
