r"""The points of other classes, and a screening of those that can lie in an ellipsoid.

An ellipsoid of one class is tested against the points of all other classes. Most of them lie far away, and a few
directions show it. For orthonormal rows :math:`U`,

.. math:: \|U F (z - c)\| \le \|F (z - c)\|,

so a point whose few coordinates :math:`U F (z - c)` are already too long lies outside. The rows of :math:`U` are the
directions in which the points lie farthest from the centre, measured by the ellipsoid: the eigenvectors of
:math:`F M F^\top` with the largest eigenvalues, where :math:`M` is the second moment of a sample of the points about
:math:`c`. All points meet the first four directions, and those that pass meet more. The screening only removes points
that the full test would reject, so the result of a query is the same with and without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from sepc_torch.shapes import Array, Bool, Float, Int

# Rows screened at a time. Fewer rows spend more time in calls, more rows leave the cache.
_BLOCK_ROWS = 16384
# So few points are not screened: choosing the directions would cost as much as the full test. A sample of as many
# points gives the moments of more.
_FEW_ROWS = 4096
# Directions that all points meet. A pass reads every point whatever their number, and a point that passes costs several
# times as much.
_FIRST_DIRECTIONS = 4
# Number of all directions: half of the dimensions, but at least this many. Fewer leave more points to the full test.
_LEAST_DIRECTIONS = 4
# A point is removed only if it exceeds the level by this share, far above the rounding error of its coordinates.
_MARGIN = 1e-6
# Rounding error of a coordinate along a unit vector, as a share of the largest one; far above that of float64.
_ROUNDING = 1e-12


class OtherPoints:
    """The rows of ``points`` whose class is not ``code``; all rows if there are no ``codes``.

    The array is not copied, so processes that share its memory share the points. A query reads it several times faster
    if it is in Fortran order, one feature after another.

    >>> others = OtherPoints(np.array([[0.0], [1.0], [5.0]]), np.array([0, 1, 1]), 0)
    >>> len(others), [block.tolist() for block in others.near(np.zeros(1), np.eye(1), level=4.0)]
    (2, [[[1.0], [5.0]]])
    """

    def __init__(self, points: Float[Array, "N D"], codes: Int[Array, "N"] | None = None, code: int = 0) -> None:
        self._points = points
        self._other = np.ones(len(points), dtype=bool) if codes is None else codes != code
        self._count = int(np.count_nonzero(self._other))

    def __len__(self) -> int:
        return self._count

    def all(self) -> Float[Array, "M D"]:
        """All points, as one array."""
        return self._points if len(self) == len(self._points) else np.ascontiguousarray(self._points[self._other])

    def near(
        self, center: Float[Array, "D"], factor: Float[Array, "R D"], level: float
    ) -> Iterator[Float[Array, "m D"]]:
        r"""The points with :math:`\|F (z - c)\|^2 \le` ``level``, possibly with others among them.

        Yields blocks in the order of the rows.
        """
        if len(self) <= _FEW_ROWS:
            yield self.all()
            return
        mean, covariance = self._moments
        offset = factor @ (mean - center)
        # Any orthonormal rows give a valid bound, so the accuracy of the eigenvectors does not matter.
        _, basis = np.linalg.eigh(factor @ covariance @ factor.T + np.outer(offset, offset))
        rows = basis[:, : -1 - max(_LEAST_DIRECTIONS, factor.shape[1] // 2) : -1].T @ factor
        limit, shift = level * (1.0 + _MARGIN), (rows @ center)[:, None]
        first, further = slice(_FIRST_DIRECTIONS), slice(_FIRST_DIRECTIONS, None)
        for columns, other in self._blocks():
            squares = _squares(rows[first], columns, shift[first])
            kept = np.flatnonzero((squares <= limit) & other)
            near = columns.T[kept]
            squares = squares[kept] + _squares(rows[further], near.T, shift[further])
            yield np.ascontiguousarray(near[squares <= limit])

    def near_any(self, centers: Float[Array, "m D"], radius: float) -> Float[Array, "q D"]:
        """The points within ``radius`` of one of the centres, possibly with others among them, in the order of rows.

        >>> points = np.arange(10_000.0)[:, None]
        >>> OtherPoints(points).near_any(np.array([[3.0], [7.5]]), 0.6).tolist()
        [[3.0], [7.0], [8.0]]
        """
        if len(self) <= _FEW_ROWS:
            return self.all()
        # All centres share one pass: along a unit vector, a point is at least as near to a centre as in space.
        direction = np.linalg.eigh(self._moments[1])[1][:, -1]
        places = np.append(np.sort(centers @ direction), np.inf)
        found = []
        for columns, other in self._blocks():
            values = direction @ columns
            reach = radius * (1.0 + _MARGIN) + _ROUNDING * float(np.abs(values).max())
            kept = np.flatnonzero((places[np.searchsorted(places, values - reach)] <= values + reach) & other)
            found.append(columns[:, kept].T)
        return np.concatenate(found)

    @cached_property
    def _moments(self) -> tuple[Float[Array, "D"], Float[Array, "D D"]]:
        """Mean and covariance of a sample of all points."""
        sample = np.ascontiguousarray(self._points[:: -(-len(self._points) // _FEW_ROWS)])
        mean = sample.mean(axis=0)
        sample -= mean
        return mean, sample.T @ sample / len(sample)

    def _blocks(self) -> Iterator[tuple[Float[Array, "D B"], Bool[Array, "B"]]]:
        """Blocks of all points, one point in each column, and which of them are of other classes."""
        for start in range(0, len(self._points), _BLOCK_ROWS):
            rows = slice(start, start + _BLOCK_ROWS)
            yield self._points[rows].T, self._other[rows]


def _squares(rows: Float[Array, "k D"], columns: Float[Array, "D B"], shift: Float[Array, "k 1"]) -> Float[Array, "B"]:
    """Squared norms of the columns of ``rows @ columns - shift``."""
    v = rows @ columns
    v -= shift
    v *= v
    squares: Array = v.sum(axis=0)
    return squares
