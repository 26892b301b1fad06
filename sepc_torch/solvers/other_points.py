r"""The points of other classes, and a screening of those that can lie in an ellipsoid.

An ellipsoid of one class is tested against the points of all other classes. Most of them lie far away, and a few
directions show it. For orthonormal rows :math:`U`,

.. math:: \|U F (z - c)\| \le \|F (z - c)\|,

so a point whose few coordinates :math:`U F (z - c)` are already too long lies outside. The rows of :math:`U` are the
directions in which the ellipsoid is thinnest. The screening only removes points that the full test would reject, so
the result of a query is the same with and without it.
"""

from __future__ import annotations

import numpy as np

from sepc_torch.shapes import Array, Float

# Fewer points than this are tested at once: choosing the directions would cost as much as the test.
_FEW_POINTS = 2048
# Rows screened at a time, so that a block stays in the cache.
_BLOCK_ROWS = 4096
# Number of directions: a quarter of the dimensions, but at least this many.
_LEAST_DIRECTIONS = 4
# A point is removed only if it exceeds the level by this share, far above the rounding error of its coordinates.
_MARGIN = 1e-6


class OtherPoints:
    """All rows of ``points`` except those from ``start`` to ``stop``, the rows of the class itself.

    The array is not copied, so processes that share its memory share the points.

    >>> others = OtherPoints(np.array([[0.0], [1.0], [5.0]]), 0, 1)
    >>> len(others), others.within(np.zeros(1), np.eye(1), level=4.0)
    (2, array([[1.],
           [5.]]))
    """

    def __init__(self, points: Float[Array, "N D"], start: int = 0, stop: int = 0) -> None:
        self._parts = [part for part in (points[:start], points[stop:]) if len(part)]
        self._empty = points[:0]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def all(self) -> Float[Array, "M D"]:
        """All points, as one array."""
        return self._parts[0] if len(self._parts) == 1 else np.concatenate([self._empty, *self._parts])

    def within(self, center: Float[Array, "D"], factor: Float[Array, "R D"], level: float) -> Float[Array, "M D"]:
        r"""The points with :math:`\|F (z - c)\|^2 \le` ``level``, in their order, possibly with others among them."""
        if len(self) <= _FEW_POINTS:
            return self.all()
        count = max(_LEAST_DIRECTIONS, factor.shape[1] // 4)
        rows = factor
        if count < len(factor):
            # Any orthonormal rows give a valid bound, so the accuracy of the eigenvectors does not matter.
            rows = np.linalg.eigh(factor @ factor.T)[1][:, -count:].T @ factor
        limit, shift = level * (1.0 + _MARGIN), rows @ center
        near = [self._empty]
        for part in self._parts:
            for start in range(0, len(part), _BLOCK_ROWS):
                block = part[start : start + _BLOCK_ROWS]
                v = block @ rows.T
                v -= shift
                near.append(block[np.einsum("ij,ij->i", v, v) <= limit])
        return np.concatenate(near)
