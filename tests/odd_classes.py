"""Points of classes whose distances are hard to compute in float32, in coordinates of unit variance."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sepc_torch.shapes import Array


def tight_classes(rng: np.random.Generator, spread: float) -> tuple[Array, Array]:
    """Classes that are small against their distances, and of unequal sizes."""
    codes = np.repeat(np.arange(4), (200, 20, 20, 20))
    points = 2.0 * rng.normal(size=(4, 9))[codes] + spread * rng.normal(size=(260, 9))
    return _unit_variance(points), codes


def thin_classes(rng: np.random.Generator, dim: int, classes: int, spread: float) -> tuple[Array, Array]:
    """Classes that are thin in some directions and wide in others, all of them mixed."""
    codes = np.arange(60 * classes) % classes
    points = rng.normal(size=(len(codes), dim))
    points[:, : classes - 1] *= spread
    points[:, : classes - 1] += rng.normal(size=(classes, classes - 1))[codes]
    return _unit_variance(points) @ np.linalg.qr(rng.normal(size=(dim, dim)))[0], codes


def hard_points(rng: np.random.Generator, center: Array, whitener: Array, count: int) -> Array:
    """Points whose distance from an ellipsoid has a large error: large terms cancel in many of its coordinates.

    They lie in the direction in which the lengths of the columns of the whitener stretch most, plus one coordinate.
    """
    inverse = np.linalg.inv(whitener)
    widest = np.linalg.svd(inverse * np.linalg.norm(whitener, axis=0)[:, None])[2][0]
    other = np.eye(len(center))[np.argmax(np.abs(whitener) @ np.abs(inverse @ widest))]
    signs, size = rng.choice([-1.0, 1.0], size=(2, count, 1)), 10.0 ** rng.uniform(0.0, 2.0, size=(count, 1))
    white = size * (signs[0] * widest + signs[1] * other + 0.02 * rng.normal(size=(count, len(center))))
    return center + white @ inverse.T


def odd_classes(rng: np.random.Generator) -> Iterator[tuple[str, Array, Array]]:
    """Names, points and class codes."""
    for spread in (0.1, 0.01, 0.001):
        yield f"tight {spread}", *tight_classes(rng, spread)
    shapes = (2, 2, 0.03), (4, 2, 1e-3), (9, 4, 1e-3), (9, 4, 1e-2), (16, 10, 1e-3), (6, 3, 0.03), (40, 8, 0.1)
    for dim, classes, spread in shapes:
        yield f"thin {dim, classes, spread}", *thin_classes(rng, dim, classes, spread)


def _unit_variance(points: Array) -> Array:
    return (points - points.mean(axis=0)) / points.std(axis=0)
