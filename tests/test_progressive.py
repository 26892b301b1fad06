"""Lazily refined ellipsoids: every query gives the answer of the exact ellipsoid, for sets of any shape."""

from __future__ import annotations

import numpy as np
import pytest

from sepc_torch.ellipsoid import Ellipsoid
from sepc_torch.shapes import Array
from sepc_torch.solvers import minimum_volume_ellipsoid
from sepc_torch.solvers.other_points import OtherPoints
from sepc_torch.solvers.progressive import ProgressiveEllipsoid

# Large enough that the ellipsoid of a flat set contains many points at a distance from its hull.
FLOOR = 0.1
TOL = 1e-7
SHAPES = ["full", "stretched", "constant", "dependent", "thin", "line", "point"]
DIMS = [2, 3, 6]


def shaped(rng: np.random.Generator, shape: str, dim: int) -> Array:
    """Points that span all dimensions or only some; "thin" is so flat in one direction that the floor is active."""
    points = rng.normal(size=(int(rng.integers(dim + 2, 60)), dim))
    match shape:
        case "stretched":
            points *= 10.0 ** rng.uniform(-2, 2, size=dim)
        case "constant":
            points[:, -1] = rng.normal()
        case "dependent":
            points[:, -1] = points[:, :-1] @ rng.normal(scale=3.0, size=dim - 1)
        case "thin":
            points[:, -1] = points[:, 0] + 1e-4 * points[:, -1]
        case "line":
            points = np.outer(points[:, 0], rng.normal(size=dim))
        case "point":
            points = np.tile(points[0], (len(points), 1))
    return points


def around(rng: np.random.Generator, e: Ellipsoid, count: int = 60) -> Array:
    """Points in every direction at Mahalanobis distances of 0.5 to 1.5 from the centre."""
    u = rng.normal(size=(count, e.dim))
    u *= rng.uniform(0.5, 1.5, size=(count, 1)) / np.linalg.norm(u, axis=1, keepdims=True)
    return e.center + np.linalg.solve(e.whitener, u.T).T


def holds_more_than(covering: ProgressiveEllipsoid, limit: int, others: Array) -> bool:
    """Whether the query finds more than ``limit`` points inside; it also returns these points, perhaps with others."""
    answer = covering.holds_more_than(limit, OtherPoints(others))
    for enough in (len(others), limit + 2):
        found = covering.intruders(limit, OtherPoints(others), enough)
        assert (found is not None) == answer
        if found is not None:
            inside = {row.tobytes() for row in others[covering.exact().contains(others)]}
            assert limit < len(found) <= max(enough, limit + 1)
            assert inside <= {row.tobytes() for row in found} or len(found) == enough
    return answer


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_counting_gives_the_exact_answer(rng: np.random.Generator, shape: str, dim: int) -> None:
    points = shaped(rng, shape, dim)
    exact = minimum_volume_ellipsoid(points, floor=FLOOR, tol=TOL)
    others = around(rng, exact)
    inside = int(np.count_nonzero(exact.contains(others)))
    assert 0 < inside < len(others)
    for limit in (0, inside - 1, inside, len(others)):
        assert holds_more_than(ProgressiveEllipsoid(points, TOL, FLOOR), limit, others) == (inside > limit)


@pytest.mark.slow
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_intersection_gives_the_exact_answer(rng: np.random.Generator, shape: str, dim: int) -> None:
    """The second set is moved near the distance at which the exact ellipsoids separate, found by bisection."""
    first, second = shaped(rng, shape, dim), shaped(rng, shape, dim)
    second += first.mean(axis=0) - second.mean(axis=0)
    across = first[0] - first.mean(axis=0)
    across = across / np.linalg.norm(across) if np.linalg.norm(across) > 0 else np.eye(dim)[0]
    exact, other = (minimum_volume_ellipsoid(points, floor=FLOOR, tol=TOL) for points in (first, second))
    low, high = 0.0, 1e4
    for _ in range(40):
        middle = 0.5 * (low + high)
        meet = exact.intersects(Ellipsoid(other.center + middle * across, other.whitener))
        low, high = (middle, high) if meet else (low, middle)
    for factor, meet in ((0.0, True), (0.9, True), (0.999, True), (1.001, False), (1.1, False), (3.0, False)):
        moved = second + factor * low * across
        mine, theirs = (ProgressiveEllipsoid(points, TOL, FLOOR) for points in (first, moved))
        assert mine.intersects(theirs) == meet, f"moved by {factor} of the distance at which they separate"
        assert theirs.intersects(mine) == meet


@pytest.mark.parametrize("shape", SHAPES)
def test_the_exact_ellipsoid_after_a_query(rng: np.random.Generator, shape: str) -> None:
    points = shaped(rng, shape, 3)
    begun, exact = ProgressiveEllipsoid(points, TOL, FLOOR), minimum_volume_ellipsoid(points, floor=FLOOR, tol=TOL)
    begun.intruders(3, OtherPoints(around(rng, exact)), 10)
    assert begun.exact().log_volume == pytest.approx(exact.log_volume, abs=1e-5)
    assert begun.exact().contains(points).all()


@pytest.mark.slow
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_nested_subsets_give_the_exact_answers(rng: np.random.Generator, shape: str, dim: int) -> None:
    """Half-spaces repeatedly cut the set, as in the partition algorithm; every answer is the exact one."""
    points = np.concatenate([shaped(rng, shape, dim) for _ in range(5)]) if shape == "full" else shaped(rng, shape, dim)
    covering, direction = ProgressiveEllipsoid(points, TOL, FLOOR), rng.normal(size=dim)
    while len(points) > dim + 3:
        values = points @ (direction + 0.3 * rng.normal(size=dim))
        rows = np.flatnonzero(values <= np.quantile(values, 0.8))
        if len(rows) == len(points):
            break
        points, covering = points[rows], covering.subset(rows)
        exact = minimum_volume_ellipsoid(points, floor=FLOOR, tol=TOL)
        others = around(rng, exact)
        inside = int(np.count_nonzero(exact.contains(others)))
        for limit in (inside - 1, inside):
            assert holds_more_than(covering, limit, others) == (inside > limit)
    assert covering.exact().contains(points).all()
    exact = minimum_volume_ellipsoid(points, floor=FLOOR, tol=TOL)
    assert covering.exact().log_volume == pytest.approx(exact.log_volume, abs=1e-5)
