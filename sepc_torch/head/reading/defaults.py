"""Default settings of a fit that depend on the data: dimension, sample size, impurity and reference points.

``experiments/panel/head_defaults.py`` compares them with other choices.
"""

from __future__ import annotations

import numpy as np

from sepc_torch.shapes import Array, Int

# Largest default dimension: time and memory of an ellipsoid grow with its square.
_MAX_DIMENSIONS = 32
# Share of the points in classes that are large enough for the default dimension.
_MOST_POINTS = 0.9
# Number of points that the ellipsoids are fitted to. Every class is compared with the points of all others, so the time
# of a fit grows faster than its points.
_MAX_FITTED = 2**18
# Least sample of a class: several times as many points as the largest default dimension.
_LEAST_SAMPLE = 128
# Default number of reference points, and a bound of their coordinates: 2**23 float32 values are 32 MiB.
_REFERENCE_POINTS = 16384
_REFERENCE_COORDINATES = 2**23


def default_dim(sizes: Int[Array, "C"], features: int) -> int:
    r"""Default dimension :math:`\min(32, \lfloor n / 2 \rfloor, D)` of a projection.

    Here :math:`n` is the largest size for which the classes of at least that size hold 90 % of the points, so that a
    few tiny classes do not decide. An ellipsoid needs more points than dimensions; with twice as many, classes were
    separated best.

    >>> default_dim(np.array([80, 900]), 64), default_dim(np.array([20, 20, 20]), 64)
    (32, 10)
    """
    large = np.sort(sizes)[::-1]
    size = large[np.searchsorted(np.cumsum(large), _MOST_POINTS * large.sum())]
    return int(max(1, min(_MAX_DIMENSIONS, size // 2, features)))


def default_max_per_class(sizes: Int[Array, "C"]) -> int | None:
    r"""Largest :math:`m` with :math:`\sum_k \min(n_k, m) \le 2^{18}`, at least 128; None if all points are fewer.

    >>> default_max_per_class(np.array([6000] * 10)), default_max_per_class(np.full(1000, 1281))
    (None, 262)
    """
    if sizes.sum() <= _MAX_FITTED:
        return None
    ordered = np.sort(sizes)
    rest = len(sizes) - np.arange(len(sizes))  # number of classes of at least this size
    whole = ordered.cumsum() - ordered  # points of the smaller classes
    first = int(np.argmax(whole + rest * ordered > _MAX_FITTED))  # the smallest class that is sampled
    return int(max(_LEAST_SAMPLE, (_MAX_FITTED - whole[first]) // rest[first]))


def default_max_impure(sizes: Int[Array, "C"], max_per_class: int | None) -> int:
    """1 % of the fitted points of the median class, and at least 2.

    >>> default_max_impure(np.array([100, 1000, 9000]), None), default_max_impure(np.array([100, 1000, 9000]), 500)
    (10, 5)
    """
    fitted = sizes if max_per_class is None else np.minimum(sizes, max_per_class)
    return max(2, round(float(np.median(fitted)) / 100))


def default_reference_points(features: int) -> int:
    """16 384, and fewer above 512 features.

    >>> default_reference_points(64), default_reference_points(2048)
    (16384, 4096)
    """
    return min(_REFERENCE_POINTS, _REFERENCE_COORDINATES // features)
