r"""The points of other classes, and a screening of those that can lie in an ellipsoid.

An ellipsoid of one class is tested against the points of all other classes. Most of them lie far away, and a few
directions show it. For orthonormal rows :math:`U`,

.. math:: \|U F (z - c)\| \le \|F (z - c)\|,

so a point whose few coordinates :math:`U F (z - c)` are already too long lies outside. The rows of :math:`U` are the
directions in which the ellipsoid is thinnest. The screening only removes points that the full test would reject, so
the result of a query is the same with and without it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sepc_torch.shapes import Array, Float, Int

# Rows screened at a time, so that a block stays in the cache.
_BLOCK_ROWS = 4096
# Number of directions: half of the dimensions, but at least this many. Fewer leave more points to the full test.
_LEAST_DIRECTIONS = 4
# A point is removed only if it exceeds the level by this share, far above the rounding error of its coordinates.
_MARGIN = 1e-6


class OtherPoints:
    """The rows of ``points`` whose class is not ``code``; all rows if there are no ``codes``.

    The array is not copied, so processes that share its memory share the points.

    >>> others = OtherPoints(np.array([[0.0], [1.0], [5.0]]), np.array([0, 1, 1]), 0)
    >>> len(others), [block.tolist() for block in others.near(np.zeros(1), np.eye(1), level=4.0)]
    (2, [[[1.0], [5.0]]])
    """

    def __init__(self, points: Float[Array, "N D"], codes: Int[Array, "N"] | None = None, code: int = 0) -> None:
        self._points, self._codes, self._code = points, codes, code
        self._count = len(points) if codes is None else int(np.count_nonzero(codes != code))

    def __len__(self) -> int:
        return self._count

    def all(self) -> Float[Array, "M D"]:
        """All points, as one array."""
        return self._points if self._codes is None else self._points[self._codes != self._code]

    def near(
        self, center: Float[Array, "D"], factor: Float[Array, "R D"], level: float
    ) -> Iterator[Float[Array, "m D"]]:
        r"""The points with :math:`\|F (z - c)\|^2 \le` ``level``, possibly with others among them.

        Yields blocks in the order of the rows.
        """
        if len(self) <= _BLOCK_ROWS:  # one block: choosing the directions would cost as much as the full test
            yield self.all()
            return
        count = max(_LEAST_DIRECTIONS, factor.shape[1] // 2)
        rows = factor
        if count < len(factor):
            # Any orthonormal rows give a valid bound, so the accuracy of the eigenvectors does not matter.
            rows = np.linalg.eigh(factor @ factor.T)[1][:, -count:].T @ factor
        limit, shift = level * (1.0 + _MARGIN), rows @ center
        for start in range(0, len(self._points), _BLOCK_ROWS):
            block = self._points[start : start + _BLOCK_ROWS]
            v = block @ rows.T
            v -= shift
            kept = np.einsum("ij,ij->i", v, v) <= limit
            if self._codes is not None:
                kept &= self._codes[start : start + _BLOCK_ROWS] != self._code
            yield block[kept]
