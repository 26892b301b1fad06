"""The conventions of the package: distance, surface, volume, whitener and the paper's form."""

from __future__ import annotations

import jaxtyping
import numpy as np
import pytest

from sepc_torch.ellipsoid import SURFACE_TOLERANCE, Ellipsoid, triangular_whitener
from sepc_torch.shapes import Array

DIMS = [1, 2, 3, 7, 20]


def random_whitener(rng: np.random.Generator, dim: int) -> Array:
    """A full matrix with singular values between 1/3 and 3."""
    left, right = (np.linalg.qr(rng.normal(size=(dim, dim)))[0] for _ in range(2))
    return (left * 3.0 ** rng.uniform(-1, 1, dim)) @ right


def random_ellipsoid(rng: np.random.Generator, dim: int) -> Ellipsoid:
    return Ellipsoid(rng.normal(scale=3.0, size=dim), random_whitener(rng, dim))


def directions(rng: np.random.Generator, count: int, dim: int) -> Array:
    u = rng.normal(size=(count, dim))
    return u / np.linalg.norm(u, axis=1, keepdims=True)


def surface(rng: np.random.Generator, e: Ellipsoid, count: int = 200) -> Array:
    """Points on the surface, where W (z - c) has length one."""
    return e.center + np.linalg.solve(e.whitener, directions(rng, count, e.dim).T).T


@pytest.mark.parametrize("dim", DIMS)
def test_distance_is_not_squared(rng: np.random.Generator, dim: int) -> None:
    e = random_ellipsoid(rng, dim)
    offset = rng.normal(size=dim)
    factors = rng.uniform(0, 10, size=8)
    d = e.distance(e.center + factors[:, None] * offset)
    np.testing.assert_allclose(d, factors * e.distance((e.center + offset)[None]), rtol=1e-10, atol=1e-12)
    ball = Ellipsoid.ball(e.center, radius=2.0)
    np.testing.assert_allclose(ball.distance((e.center + offset)[None]), np.linalg.norm(offset) / 2, rtol=1e-12)


@pytest.mark.parametrize("dim", DIMS)
def test_one_is_the_surface(rng: np.random.Generator, dim: int) -> None:
    e = random_ellipsoid(rng, dim)
    tip = e.center + e.semi_axes[0] * np.linalg.svd(e.whitener)[2][-1]  # the end of the longest semi-axis
    np.testing.assert_allclose(e.distance(tip[None]), 1.0, rtol=1e-12)
    rim = surface(rng, e)
    np.testing.assert_allclose(e.distance(rim), 1.0, rtol=1e-12)
    np.testing.assert_allclose(e.euclidean_distance(rim), 0.0, atol=1e-12)
    np.testing.assert_allclose(e.distance(e.center[None]), 0.0, atol=1e-15)


@pytest.mark.parametrize("dim", DIMS)
def test_log_volume_is_minus_log_det(rng: np.random.Generator, dim: int) -> None:
    e = random_ellipsoid(rng, dim)
    assert e.log_volume == pytest.approx(-np.log(abs(np.linalg.det(e.whitener))), abs=1e-10)
    assert e.log_volume == pytest.approx(np.log(e.semi_axes).sum(), abs=1e-10)
    radius = rng.uniform(0.1, 10)
    assert Ellipsoid.ball(e.center, radius).log_volume == pytest.approx(dim * np.log(radius), abs=1e-10)
    scaled = e.affine_image(radius * np.eye(dim), np.zeros(dim))
    assert scaled.log_volume - e.log_volume == pytest.approx(dim * np.log(radius), abs=1e-10)


@pytest.mark.parametrize("dim", DIMS)
def test_the_papers_form_is_symmetric_and_describes_the_same_set(rng: np.random.Generator, dim: int) -> None:
    e = random_ellipsoid(rng, dim)
    a, b = e.as_paper()
    np.testing.assert_allclose(a, a.T, atol=1e-14)
    assert np.linalg.eigvalsh(a).min() > 0
    z = rng.normal(scale=5.0, size=(50, dim))
    np.testing.assert_allclose(np.linalg.norm(z @ a + b, axis=1), e.distance(z), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dim", DIMS)
def test_the_surface_counts_as_inside_in_float64_and_float32(rng: np.random.Generator, dim: int) -> None:
    e = random_ellipsoid(rng, dim)
    rim = surface(rng, e)
    assert e.contains(rim).all()
    assert e.contains(rim.astype(np.float32)).all()
    in_single = (rim.astype(np.float32) - e.center.astype(np.float32)) @ e.whitener.astype(np.float32).T
    assert in_single.dtype == np.float32
    assert (np.linalg.norm(in_single, axis=1) <= 1 + SURFACE_TOLERANCE).all()


@pytest.mark.parametrize("dim", DIMS)
def test_points_count_as_inside_up_to_the_surface_tolerance(rng: np.random.Generator, dim: int) -> None:
    e = random_ellipsoid(rng, dim)
    rays = surface(rng, e) - e.center
    assert e.contains(e.center + (1 + 0.9 * SURFACE_TOLERANCE) * rays).all()
    assert not e.contains(e.center + (1 + 1.1 * SURFACE_TOLERANCE) * rays).any()


@pytest.mark.parametrize("dim", DIMS)
def test_triangular_whitener_is_a_unique_form_of_the_set(rng: np.random.Generator, dim: int) -> None:
    tall = rng.normal(size=(dim + 3, dim))
    rotation = np.linalg.qr(rng.normal(size=(dim + 3, dim + 3)))[0]
    w = triangular_whitener(tall)
    assert w.shape == (dim, dim)
    np.testing.assert_array_equal(w, np.triu(w))
    assert (np.diagonal(w) > 0).all()
    scale = float(np.linalg.norm(tall, 2)) ** 2
    np.testing.assert_allclose(w.T @ w, tall.T @ tall, atol=1e-13 * scale)
    np.testing.assert_allclose(triangular_whitener(rotation @ tall), w, rtol=1e-7, atol=1e-9 * scale**0.5)
    np.testing.assert_allclose(triangular_whitener(w), w, rtol=1e-12)


def test_triangular_whitener_is_accurate_in_any_units(rng: np.random.Generator) -> None:
    """The units of the features differ by up to 1e12; every column keeps its relative accuracy."""
    factor = rng.normal(size=(6, 4))
    units = np.array([1e-6, 1.0, 1e6, 1e3])
    np.testing.assert_allclose(triangular_whitener(factor * units) / units, triangular_whitener(factor), atol=1e-10)


@pytest.mark.parametrize("dim", DIMS)
def test_distances_are_invariant_under_affine_maps(rng: np.random.Generator, dim: int) -> None:
    e = random_ellipsoid(rng, dim)
    matrix, offset = random_whitener(rng, dim), rng.normal(size=dim)
    z = rng.normal(scale=5.0, size=(50, dim))
    image = e.affine_image(matrix, offset)
    np.testing.assert_allclose(image.distance(z @ matrix.T + offset), e.distance(z), rtol=1e-9, atol=1e-11)
    assert image.log_volume == pytest.approx(e.log_volume + np.linalg.slogdet(matrix)[1], abs=1e-9)


def test_semi_axes_are_sorted_longest_first(rng: np.random.Generator) -> None:
    lengths = np.sort(rng.uniform(0.1, 10, size=5))[::-1]
    rotation = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    e = Ellipsoid(np.zeros(5), (rotation / lengths) @ rotation.T)
    np.testing.assert_allclose(e.semi_axes, lengths, rtol=1e-12)


def test_shape_annotations_are_checked_in_tests() -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match="whitener"):
        Ellipsoid(np.zeros(2), np.eye(3))
