"""Distances of given ranks: the same bits as those of all distances, sorted within each class."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from sepc_torch import Ellipsoid, minimum_volume_ellipsoid, partition
from sepc_torch.ellipsoid import SURFACE_TOLERANCE, column_norms
from sepc_torch.partitioning import cells
from sepc_torch.partitioning.ranked_distances import _Distances, ranked_distances
from sepc_torch.shapes import Array

Rng = np.random.Generator


def by_definition(e: Ellipsoid, points: Array, bounds: Array, places: Array) -> tuple[Array, Array]:
    """The rows inside, and the distances at the places, from all distances."""
    distance = column_norms(points.T, e.center, e.whitener)
    parts = [np.sort(distance[start:end]) for start, end in pairwise(bounds.tolist())]
    return np.flatnonzero(distance <= 1.0 + SURFACE_TOLERANCE), np.concatenate(parts)[places]


def some_ellipsoids(rng: Rng, points: Array) -> list[Ellipsoid]:
    """Round, thin and flat ellipsoids with points on their surfaces, and small balls, one around equal points."""
    dim, scale = points.shape[1], points.std(axis=0)
    chosen = [points[rng.choice(len(points), size, replace=False)] for size in (3 * dim, 10 * dim, 40 * dim)]
    solid: list[Ellipsoid] = [minimum_volume_ellipsoid(own) for own in chosen]
    if dim > 1:
        solid.append(minimum_volume_ellipsoid(points[:dim], floor=1e-3 * float(scale.min())))
    places = points[rng.choice(len(points), 3, replace=False)]
    return [*solid, *(Ellipsoid(place, np.diag(1e3 / scale)) for place in [*places, points[0]])]


@pytest.mark.parametrize("data", ["distinct", "far", "equal", "integers"])
@pytest.mark.parametrize("dim", [1, 2, 5, 16])
def test_same_bits_as_all_distances(rng: Rng, dim: int, data: str) -> None:
    sizes = rng.integers(300, 900, size=4)
    points = rng.standard_t(5, size=(int(sizes.sum()), dim)) * np.geomspace(1e-3, 1e3, dim)
    if data == "far":
        points += 1e4
    elif data == "equal":
        points[rng.integers(0, len(points), size=400)] = points[0]
    elif data == "integers":
        points = rng.integers(-3, 4, size=points.shape).astype(float)
    points = np.asfortranarray(points)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    places = np.concatenate(
        [np.unique([start, end - 1, *rng.integers(start, end, size=30)]) for start, end in pairwise(bounds.tolist())]
    )
    ellipsoids = some_ellipsoids(rng, points)
    rows, distances = ranked_distances(ellipsoids, points, bounds, places)
    for e, own, found in zip(ellipsoids, rows, distances, strict=True):
        inside, wanted = by_definition(e, points, bounds, places)
        assert own.dtype == np.int32
        assert own.tolist() == inside.tolist()
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(("count", "dim"), [(4097, 1), (4097, 16), (6143, 24), (6143, 32), (2177, 100), (63, 3)])
def test_the_last_block_has_the_same_bits(rng: Rng, count: int, dim: int) -> None:
    """BLAS takes another path for one column, and another one for few columns than for many."""
    points = np.asfortranarray(rng.normal(size=(count, dim)))
    e = Ellipsoid(points[0], np.triu(rng.normal(size=(dim, dim))) + 4.0 * np.eye(dim))
    rows = np.unique([*rng.integers(0, count, size=50), *range(max(count - 70, 0), count)])
    found = _Distances([e], points, diagonal=dim == 1).distances(0, rows)
    assert found.tobytes() == column_norms(points.T, e.center, e.whitener)[rows].tobytes()


def test_few_points_are_measured(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    original, measured = _Distances.distances, []

    def counting(self: _Distances, i: int, rows: Array) -> Array:
        measured.append(len(rows))
        return original(self, i, rows)

    monkeypatch.setattr(_Distances, "distances", counting)
    points = np.asfortranarray(rng.normal(size=(20_000, 8)))
    ellipsoids = [Ellipsoid(points[k], np.triu(rng.normal(size=(8, 8))) + 4.0 * np.eye(8)) for k in range(5)]
    ranked_distances(ellipsoids, points, np.array([0, 9000, 20_000]), np.arange(0, 20_000, 500))
    assert 5 * 40 <= sum(measured) < 5 * 200


def test_an_overflow_is_measured(rng: Rng) -> None:
    """Squares that overflow have no order; the distances are those of the definition."""
    points = np.asfortranarray(rng.normal(size=(300, 2)))
    ellipsoids = [Ellipsoid(points[0], np.array([[1e160, 1e159], [0.0, 1e160]])), Ellipsoid.ball(points[1], 1e-170)]
    bounds, places = np.array([0, 100, 300]), np.array([0, 5, 99, 100, 299])
    with np.errstate(over="ignore", invalid="ignore"):
        rows, distances = ranked_distances(ellipsoids, points, bounds, places)
        for e, own, found in zip(ellipsoids, rows, distances, strict=True):
            inside, wanted = by_definition(e, points, bounds, places)
            assert own.tolist() == inside.tolist()
            assert found.tobytes() == wanted.tobytes()


@pytest.mark.slow
def test_the_ledger_of_a_partition_does_not_change_a_bit(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    y = rng.integers(0, 3, size=17_003)
    x = rng.normal(size=(len(y), 3)) + 3.5 * np.eye(3)[y]
    x[:50] = x[50:100]
    calls = []

    def counting(*query: Any) -> tuple[list[Array], Array]:
        calls.append(query)
        return ranked_distances(*query)

    monkeypatch.setattr(cells, "ranked_distances", counting)
    found = partition(x, y, max_impure=200).ledger
    assert calls, "all distances were measured"
    monkeypatch.setattr(cells, "_MANY_POINTS", len(x))
    plain = partition(x, y, max_impure=200).ledger
    assert [a.tobytes() for a in found] == [a.tobytes() for a in plain]
