"""The answers of an unfinished ellipsoid are those of the finished one, whatever shape the points have."""

from __future__ import annotations

import numpy as np
import pytest

from sepc_torch.ellipsoid import Ellipsoid
from sepc_torch.shapes import Array
from sepc_torch.solvers import minimum_volume_ellipsoid
from sepc_torch.solvers.progressive import ProgressiveEllipsoid

# Thick enough that points off the hull of a flat set, but within its ellipsoid, are many and far off.
FLOOR = 0.1
TOL = 1e-7
SHAPES = ["full", "stretched", "constant", "dependent", "thin", "line", "place"]
DIMS = [2, 3, 6]


def shaped(rng: np.random.Generator, shape: str, dim: int) -> Array:
    """Points that span all dimensions, some of them, or (thin) one so little that the floor acts."""
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
        case "place":
            points = np.tile(points[0], (len(points), 1))
    return points


def around(rng: np.random.Generator, e: Ellipsoid, count: int = 60) -> Array:
    """Points in every direction at distances of 0.5 to 1.5 in the ellipsoid's own measure, so as thin as it is."""
    u = rng.normal(size=(count, e.dim))
    u *= rng.uniform(0.5, 1.5, size=(count, 1)) / np.linalg.norm(u, axis=1, keepdims=True)
    return e.center + np.linalg.solve(e.whitener, u.T).T


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_counting_stops_early_with_the_right_answer(rng: np.random.Generator, shape: str, dim: int) -> None:
    points = shaped(rng, shape, dim)
    exact = minimum_volume_ellipsoid(points, floor=FLOOR, tol=TOL)
    others = around(rng, exact)
    inside = int(np.count_nonzero(exact.contains(others)))
    assert 0 < inside < len(others)
    for limit in (0, inside - 1, inside, len(others)):
        assert ProgressiveEllipsoid(points, TOL, FLOOR).holds_more_than(limit, others) == (inside > limit)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_meeting_is_decided_early_with_the_right_answer(rng: np.random.Generator, shape: str, dim: int) -> None:
    """A second set is moved away until the two just do not meet, found by bisection with the exact ellipsoids."""
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
        assert mine.intersects(theirs) == meet, f"moved by {factor} of the distance at which they part"
        assert theirs.intersects(mine) == meet


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_left_open_ends_in_the_exact_ellipsoid(rng: np.random.Generator, shape: str) -> None:
    points = shaped(rng, shape, 3)
    begun, exact = ProgressiveEllipsoid(points, TOL, FLOOR), minimum_volume_ellipsoid(points, floor=FLOOR, tol=TOL)
    begun.holds_more_than(3, around(rng, exact))
    assert begun.exact().log_volume == pytest.approx(exact.log_volume, abs=1e-5)
    assert begun.exact().contains(points).all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_subsets_of_subsets_answer_as_if_begun_anew(rng: np.random.Generator, shape: str, dim: int) -> None:
    """Half spaces cut the set down until little is left, as the partition does; every answer is the exact one."""
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
            assert covering.holds_more_than(limit, others) == (inside > limit)
    assert covering.exact().contains(points).all()
    exact = minimum_volume_ellipsoid(points, floor=FLOOR, tol=TOL)
    assert covering.exact().log_volume == pytest.approx(exact.log_volume, abs=1e-5)
