"""Separation of ellipsoids and Euclidean distance, checked on constructions with a known answer."""

from __future__ import annotations

import numpy as np
import pytest

from sepc_torch.ellipsoid import Ellipsoid, column_norms, euclidean_distance, separation
from sepc_torch.shapes import Array

DIMS = [1, 2, 3, 8, 25]


def random_rotation(rng: np.random.Generator, dim: int) -> Array:
    return np.linalg.qr(rng.normal(size=(dim, dim)))[0]


def random_ellipsoid(rng: np.random.Generator, dim: int, spread: float = 10.0) -> Ellipsoid:
    """Semi-axes between 1/spread and spread, any orientation; the whitener is a full matrix."""
    inverse_axes = spread ** rng.uniform(-1, 1, dim)
    whitener = (random_rotation(rng, dim) * inverse_axes) @ random_rotation(rng, dim)
    return Ellipsoid(rng.normal(scale=3.0, size=dim), whitener)


def random_direction(rng: np.random.Generator, dim: int) -> Array:
    u = rng.normal(size=dim)
    return u / np.linalg.norm(u)


def reach(e: Ellipsoid, normal: Array) -> float:
    r"""The extent of the ellipsoid from its centre along a unit normal, :math:`\|W^{-\top} n\|`."""
    return float(np.linalg.norm(np.linalg.solve(e.whitener.T, normal)))


def support(e: Ellipsoid, normal: Array) -> Array:
    r"""The point of the ellipsoid farthest along a normal, :math:`c + (W^\top W)^{-1} n / \|W^{-\top} n\|`."""
    u = np.linalg.solve(e.whitener.T, normal)
    return e.center + np.linalg.solve(e.whitener, u) / np.linalg.norm(u)


def at_gap(rng: np.random.Generator, e: Ellipsoid, gap: float) -> Ellipsoid:
    """A random ellipsoid that touches ``e`` in one point, then moved away along the common normal by ``gap`` > 0."""
    normal = random_direction(rng, e.dim)
    other = random_ellipsoid(rng, e.dim)
    return Ellipsoid(support(e, normal) + gap * normal + support(other, normal) - other.center, other.whitener)


def at_depth(rng: np.random.Generator, e: Ellipsoid, depth: float) -> Ellipsoid:
    r"""A random ellipsoid that touches ``e`` in one point, then moved inward by a share of its chord there.

    The chord of ``e`` along its normal :math:`n` has length :math:`2 / (\|W^{-\top} n\| \|W n\|^2)`. The moved tip
    stays on the chord, so the two ellipsoids have a point in common.
    """
    normal = random_direction(rng, e.dim)
    other = random_ellipsoid(rng, e.dim)
    chord = 2 / (reach(e, normal) * float(np.sum((e.whitener @ normal) ** 2)))
    tip = support(e, normal) - depth * chord * normal
    return Ellipsoid(tip + support(other, normal) - other.center, other.whitener)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("gap", [1e-7, 1e-3, 0.1, 10.0])
def test_disjoint_ellipsoids_do_not_intersect(rng: np.random.Generator, dim: int, gap: float) -> None:
    e = random_ellipsoid(rng, dim)
    other = at_gap(rng, e, gap)
    assert not e.intersects(other)
    assert not other.intersects(e)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("depth", [1e-6, 1e-3, 0.1, 0.9])
def test_overlapping_ellipsoids_intersect(rng: np.random.Generator, dim: int, depth: float) -> None:
    e = random_ellipsoid(rng, dim)
    other = at_depth(rng, e, depth)
    assert e.intersects(other)
    assert other.intersects(e)


@pytest.mark.parametrize("dim", DIMS)
def test_common_point_means_intersection(rng: np.random.Generator, dim: int) -> None:
    """Two ellipsoids are placed so that both contain one point, deep inside or barely."""
    point = rng.normal(size=dim)
    for depth in [0.0, 0.5, 0.999999]:
        pair = []
        for _ in range(2):
            e = random_ellipsoid(rng, dim)
            offset = np.linalg.solve(e.whitener, depth * random_direction(rng, dim))
            pair.append(Ellipsoid(point - offset, e.whitener))
        assert pair[0].intersects(pair[1])


@pytest.mark.parametrize("dim", DIMS)
def test_nested_ellipsoids_intersect(rng: np.random.Generator, dim: int) -> None:
    e = random_ellipsoid(rng, dim)
    tiny = Ellipsoid.ball(e.center + np.linalg.solve(e.whitener, 0.9 * random_direction(rng, dim)), radius=1e-9)
    assert e.intersects(tiny)
    assert tiny.intersects(e)
    assert e.intersects(e)


@pytest.mark.parametrize("dim", DIMS)
def test_separating_normal_separates(rng: np.random.Generator, dim: int) -> None:
    for gap in [1e-6, 1e-2, 5.0]:
        e = random_ellipsoid(rng, dim)
        other = at_gap(rng, e, gap)
        result = separation(e.center, e.whitener, other.center, other.whitener)
        assert result.disjoint
        assert result.margin > 0
        n = result.normal
        assert n is not None
        assert np.linalg.norm(n) == pytest.approx(1.0)
        assert n @ other.center - reach(other, n) > n @ e.center + reach(e, n)


@pytest.mark.parametrize("dim", DIMS)
def test_intersecting_ellipsoids_have_no_separating_normal(rng: np.random.Generator, dim: int) -> None:
    e = random_ellipsoid(rng, dim)
    other = at_depth(rng, e, depth=0.01)
    result = separation(e.center, e.whitener, other.center, other.whitener)
    assert not result.disjoint
    assert result.margin <= 0
    assert result.normal is None


@pytest.mark.parametrize("dim", DIMS)
def test_intersection_is_symmetric_and_affine_invariant(rng: np.random.Generator, dim: int) -> None:
    """On pairs with random centres, of which some intersect and some do not."""
    for _ in range(30):
        e, other = random_ellipsoid(rng, dim), random_ellipsoid(rng, dim)
        matrix = random_ellipsoid(rng, dim).whitener
        offset = rng.normal(scale=5.0, size=dim)
        answer = e.intersects(other)
        assert other.intersects(e) == answer
        assert e.affine_image(matrix, offset).intersects(other.affine_image(matrix, offset)) == answer


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("relative_gap", [-1e-9, 1e-9, -0.3, 0.3])
def test_balls_intersect_if_their_radii_reach(rng: np.random.Generator, dim: int, relative_gap: float) -> None:
    r1, r2 = 10.0 ** rng.uniform(-3, 3, size=2)
    center = rng.normal(size=dim)
    other = center + (r1 + r2) * (1 + relative_gap) * random_direction(rng, dim)
    assert Ellipsoid.ball(center, r1).intersects(Ellipsoid.ball(other, r2)) == (relative_gap < 0)


def test_touching_balls_intersect() -> None:
    """The sets are closed. Equal radii that are powers of two avoid rounding, so the balls touch exactly."""
    for dim in DIMS:
        for radius in [0.25, 1.0, 8.0]:
            ball = Ellipsoid.ball(np.zeros(dim), radius)
            other = Ellipsoid.ball(2 * radius * np.eye(dim)[0], radius)
            assert ball.intersects(other), (dim, radius)
            assert other.intersects(ball), (dim, radius)


@pytest.mark.parametrize("dim", [2, 3, 8])
@pytest.mark.parametrize("thickness", [1e-3, 1e-6])
def test_thin_parallel_ellipsoids(rng: np.random.Generator, dim: int, thickness: float) -> None:
    """Two parallel discs about twice their half thickness apart, in any orientation and away from the origin."""
    rotation = random_rotation(rng, dim)
    axes = np.append(rng.uniform(0.5, 2.0, dim - 1), thickness)
    whitener = (rotation / axes) @ rotation.T
    center = rng.normal(size=dim)
    across = rotation[:, -1]
    disc = Ellipsoid(center, whitener)
    for factor, meet in [(1.9, True), (1.999, True), (2.001, False), (2.1, False), (100.0, False)]:
        other = Ellipsoid(center + factor * thickness * across, whitener)
        assert disc.intersects(other) == meet, factor
        assert other.intersects(disc) == meet, factor


@pytest.mark.parametrize("thickness", [1e-3, 1e-6])
def test_crossing_needles(rng: np.random.Generator, thickness: float) -> None:
    """Two needles at right angles in three dimensions touch at a distance of twice their half thickness."""
    rotation, center = random_rotation(rng, 3), rng.normal(size=3)
    for factor, meet in [(1.9, True), (2.1, False)]:
        along_x = Ellipsoid(center, (np.diag([1.0, 1 / thickness, 1 / thickness])) @ rotation.T)
        along_y = Ellipsoid(
            center + factor * thickness * rotation[:, 2], np.diag([1 / thickness, 1.0, 1 / thickness]) @ rotation.T
        )
        assert along_x.intersects(along_y) == meet
        assert along_y.intersects(along_x) == meet


@pytest.mark.parametrize("dim", DIMS)
def test_distance_of_points_moved_along_their_normals(rng: np.random.Generator, dim: int) -> None:
    r"""A point moved from the surface along its normal by :math:`t` is at distance :math:`t`.

    By the optimality condition, :math:`x` on the surface is the nearest point to :math:`z` exactly if :math:`z - x` is
    a nonnegative multiple of the normal :math:`W^\top W (x - c)`.
    """
    e = random_ellipsoid(rng, dim)
    normals = np.array([random_direction(rng, dim) for _ in range(40)])
    feet = np.array([support(e, n) for n in normals])
    t = 10.0 ** rng.uniform(-6, 6, size=40)
    np.testing.assert_allclose(e.euclidean_distance(feet + t[:, None] * normals), t, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("dim", [2, 3, 8])
def test_the_nearest_point_satisfies_the_optimality_condition(rng: np.random.Generator, dim: int) -> None:
    """The gradient of the distance gives the nearest point, which lies on the surface with this gradient as normal."""
    e = random_ellipsoid(rng, dim, spread=3.0)
    h = 1e-5  # central differences of a function with curvature of order 1: errors of order 1e-10
    for _ in range(5):
        z = e.center + np.linalg.solve(e.whitener, rng.uniform(2.0, 4.0) * random_direction(rng, dim))
        steps = h * np.eye(dim)
        gradient = (e.euclidean_distance(z + steps) - e.euclidean_distance(z - steps)) / (2 * h)
        foot = z - e.euclidean_distance(z[None])[0] * gradient
        assert e.distance(foot[None])[0] == pytest.approx(1.0, abs=1e-6)
        normal = e.whitener.T @ (e.whitener @ (foot - e.center))
        np.testing.assert_allclose(gradient, normal / np.linalg.norm(normal), atol=1e-5)


@pytest.mark.parametrize("dim", DIMS)
def test_distance_agrees_with_projected_gradients(rng: np.random.Generator, dim: int) -> None:
    """An independent reference without the secular equation: min ||c + W^-1 u - z|| over the unit ball of u."""
    e = random_ellipsoid(rng, dim, spread=2.0)
    z = e.center + rng.normal(scale=4.0, size=(20, dim))
    inverse = np.linalg.inv(e.whitener)
    step = 1 / np.linalg.norm(inverse, 2) ** 2
    u = np.zeros_like(z)
    # The ratio of the squared semi-axes is at most 16, so each step reduces the error by at least 1/16.
    for _ in range(1000):
        u -= step * (e.center + u @ inverse.T - z) @ inverse
        u /= np.maximum(np.linalg.norm(u, axis=1, keepdims=True), 1.0)
    reference = np.linalg.norm(e.center + u @ inverse.T - z, axis=1)
    np.testing.assert_allclose(e.euclidean_distance(z), reference, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dim", DIMS)
def test_distance_is_zero_inside_and_positive_outside(rng: np.random.Generator, dim: int) -> None:
    e = random_ellipsoid(rng, dim)
    inside = np.array([np.linalg.solve(e.whitener, 0.999 * random_direction(rng, dim)) for _ in range(30)])
    assert (e.euclidean_distance(e.center + inside * rng.uniform(0, 1, size=(30, 1))) == 0).all()
    assert e.euclidean_distance(e.center[None]) == 0
    assert (e.euclidean_distance(e.center + inside * 1.01) > 0).all()


@pytest.mark.parametrize("dim", DIMS)
def test_distance_to_a_ball(rng: np.random.Generator, dim: int) -> None:
    radius = 10.0 ** rng.uniform(-3, 3)
    center = rng.normal(size=dim)
    z = center + radius * rng.normal(scale=2.0, size=(50, dim))
    expected = np.maximum(np.linalg.norm(z - center, axis=1) - radius, 0)
    np.testing.assert_allclose(
        Ellipsoid.ball(center, radius).euclidean_distance(z), expected, atol=1e-12 * (1 + radius)
    )


@pytest.mark.parametrize("dim", DIMS)
def test_distance_under_rigid_motion_and_scaling(rng: np.random.Generator, dim: int) -> None:
    """Rotation and translation leave the distance unchanged; scaling by s multiplies it by s."""
    e = random_ellipsoid(rng, dim)
    z = e.center + rng.normal(scale=8.0, size=(20, dim))
    rotation, offset, scale = random_rotation(rng, dim), rng.normal(size=dim), 10.0 ** rng.uniform(-2, 2)
    moved = e.affine_image(scale * rotation, offset).euclidean_distance(scale * z @ rotation.T + offset)
    np.testing.assert_allclose(moved, scale * e.euclidean_distance(z), rtol=1e-9, atol=1e-11 * scale)


@pytest.mark.parametrize("dim", DIMS)
def test_distance_of_a_batch_equals_that_of_its_points(rng: np.random.Generator, dim: int) -> None:
    e = random_ellipsoid(rng, dim)
    z = e.center + rng.normal(scale=3.0, size=(40, dim)) * 10.0 ** rng.uniform(-3, 3, size=(40, 1))
    one_by_one = np.concatenate([e.euclidean_distance(point[None]) for point in z])
    np.testing.assert_allclose(e.euclidean_distance(z), one_by_one, rtol=1e-12, atol=1e-14)
    assert e.euclidean_distance(z[:0]).shape == (0,)


def test_distance_on_the_axes(rng: np.random.Generator) -> None:
    """Coordinates that are exactly zero vanish from the secular equation."""
    axes = 10.0 ** rng.uniform(-2, 2, size=6)
    outward = axes * rng.uniform(1.1, 50, size=6)
    z = np.diag(outward)
    np.testing.assert_allclose(euclidean_distance(np.zeros(6), np.diag(1 / axes), z), outward - axes, rtol=1e-10)
    np.testing.assert_allclose(euclidean_distance(np.zeros(6), np.diag(1 / axes), -z), outward - axes, rtol=1e-10)


@pytest.mark.parametrize("thickness", [1e-3, 1e-6])
def test_distance_to_a_thin_disc(rng: np.random.Generator, thickness: float) -> None:
    """Points moved along their normals as above, from every part of the rim, far away and close."""
    rotation, center = random_rotation(rng, 3), rng.normal(size=3)
    disc = Ellipsoid(center, (rotation / np.array([1.0, 2.0, thickness])) @ rotation.T)
    normals = np.array([random_direction(rng, 3) for _ in range(60)])
    feet = np.array([support(disc, n) for n in normals])
    t = 10.0 ** rng.uniform(-3, 3, size=60)
    # Rounding the whitener to a dense matrix already moves the rim by this much.
    rounding = 10 * np.finfo(float).eps / thickness
    np.testing.assert_allclose(disc.euclidean_distance(feet + t[:, None] * normals), t, rtol=1e-9, atol=rounding)


@pytest.mark.parametrize("gap", [-1.0, -1e-6, 1e-6, 1.0])
def test_intervals_in_one_dimension(rng: np.random.Generator, gap: float) -> None:
    (r1, r2), (c,) = rng.uniform(0.1, 5.0, size=2), rng.normal(size=1)
    gap = max(gap, -min(r1, r2))  # a partial overlap: neither interval contains the other
    left = Ellipsoid(np.array([c]), np.array([[-1 / r1]]))
    right = Ellipsoid(np.array([c + r1 + r2 + gap]), np.array([[1 / r2]]))
    assert left.intersects(right) == (gap < 0)
    z = rng.normal(scale=10.0, size=(30, 1))
    np.testing.assert_allclose(left.euclidean_distance(z), np.maximum(np.abs(z[:, 0] - c) - r1, 0), atol=1e-13)


@pytest.mark.parametrize("dim", DIMS)
def test_norms_of_columns_are_those_of_rows(rng: np.random.Generator, dim: int) -> None:
    """Several blocks of points, an ellipsoid and a ball; whatever the order of the array."""
    z = rng.normal(scale=3.0, size=(5000, dim))
    for e in (random_ellipsoid(rng, dim), Ellipsoid.ball(rng.normal(size=dim), 1e-3)):
        for columns in (z.T, np.ascontiguousarray(z.T)):
            np.testing.assert_allclose(column_norms(columns, e.center, e.whitener), e.distance(z), rtol=1e-9)
