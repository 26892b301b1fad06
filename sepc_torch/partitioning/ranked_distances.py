r"""Distances of given ranks within each class, and the points inside, for many ellipsoids and few ranks.

A squared distance is linear in products of features,

.. math:: \|W (z - c)\|^2 = \sum_{i \le j} \theta_{ij} z_i z_j + \sum_i \theta_i z_i + \theta_0 ,

so one matrix product approximates the squared distances of the points of a class from many ellipsoids, with a bounded
rounding error. A point whose neighbours in the approximate order are farther away than the bound has the same rank in
the exact order, so only the points of the wanted ranks need :func:`~sepc_torch.ellipsoid.column_norms`. Where
neighbours are too near, they are measured too. The result is that of measuring all points, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sepc_torch.ellipsoid import BLOCK_ROWS, SURFACE_TOLERANCE, Ellipsoid, column_norms
from sepc_torch.shapes import Array, Float, Int

# Approximate squares of one batch of ellipsoids from the points of a class: 2 MiB, or the size of these points if that
# is more.
_BATCH = 2**18
# Products of features of one block of points: 1 MiB.
_PRODUCTS = 2**17
# BLAS computes columns in tiles, and rounds those after the last full tile in a way that depends on all columns of the
# product; for these the last block of column_norms is measured again. A multiple of common tiles.
_TILE = 64


def ranked_distances(
    ellipsoids: Sequence[Ellipsoid], points: Float[Array, "N D"], bounds: Int[Array, "b"], places: Int[Array, "T"]
) -> tuple[list[Array], Float[Array, "K T"]]:
    """The rows inside each ellipsoid, and the distances at some places if each class is sorted by distance.

    Args:
        ellipsoids: The K ellipsoids.
        points: The points, sorted by class, in Fortran order.
        bounds: First row of each class, and the number of rows.
        places: The wanted places, class after class: first row of the class, plus a rank from 0.

    >>> points = np.asfortranarray([[3.0], [0.5], [2.0], [4.0]])
    >>> ranked_distances([Ellipsoid.ball(np.zeros(1), 1.0)], points, np.array([0, 2, 4]), np.array([0, 3]))
    ([array([1], dtype=int32)], array([[0.5, 4. ]]))
    """
    rows = [np.empty(0, dtype=np.int32) for _ in ellipsoids]
    distances = np.empty((len(ellipsoids), len(places)))
    starts = np.searchsorted(places, bounds)
    # Balls in standardised features have diagonal whiteners and need no mixed products.
    is_diagonal = [np.count_nonzero(e.whitener) == np.count_nonzero(np.diagonal(e.whitener)) for e in ellipsoids]
    for diagonal in (True, False):
        group = [k for k, is_so in enumerate(is_diagonal) if is_so == diagonal]
        if not group:
            continue
        measured = _Distances([ellipsoids[k] for k in group], points, diagonal)
        at, ties = np.empty((len(group), len(places)), dtype=np.int64), []
        for code in range(len(bounds) - 1):
            here = slice(starts[code], starts[code + 1])
            found = measured.ranked(int(bounds[code]), int(bounds[code + 1]), places[here] - bounds[code])
            at[:, here] = found[0]
            ties += [(i, starts[code] + which, values) for i, which, values in found[1]]
        for i, (k, inside) in enumerate(zip(group, measured.inside(), strict=True)):
            rows[k], distances[k] = inside, measured.distances(i, at[i])
        for i, which, values in ties:
            distances[group[i], which] = values
    return rows, distances


class _Distances:
    """Ellipsoids whose whiteners are all diagonal or not, and the points that may lie inside them."""

    def __init__(self, ellipsoids: list[Ellipsoid], points: Float[Array, "N D"], diagonal: bool) -> None:
        self._ellipsoids, self._points, self._diagonal = ellipsoids, points, diagonal
        self._origin = points.mean(axis=0)
        unit = np.maximum(points.max(axis=0) - self._origin, self._origin - points.min(axis=0))
        self._unit = np.where(unit > 0, unit, 1.0)
        # Ellipsoid, row and square of the pairs of which the point may lie inside.
        self._near: list[tuple[Array, Array, Array]] = []
        dim = points.shape[1]
        i, j = (np.arange(dim), np.arange(dim)) if diagonal else np.triu_indices(dim)
        self._theta, self._errors = np.empty((len(ellipsoids), len(i) + dim + 1)), np.empty((len(ellipsoids), 1))
        for theta, error, ellipsoid in zip(self._theta, self._errors, ellipsoids, strict=True):
            factor, center = ellipsoid.whitener * self._unit, (ellipsoid.center - self._origin) / self._unit
            form = factor.T @ factor
            theta[: len(i)] = np.where(i == j, 1.0, 2.0) * form[i, j]
            theta[len(i) : -1] = -2.0 * form @ center
            theta[-1] = center @ form @ center
            # Features lie within [-1, 1]. The matrix product rounds once for each summand. Theta and the exact squares
            # have fewer than 10 D + 20 roundings of at most ``terms`` together. The factor 2 covers products of them.
            terms = float(np.sum((np.abs(factor) @ (1.0 + np.abs(center))) ** 2))
            most = 2.0 * np.finfo(float).eps * (len(theta) * float(np.abs(theta).sum()) + (10 * dim + 20) * terms)
            theta[-1] += most  # no approximate square is negative
            error[0] = 2.0 * most

    def ranked(
        self, start: int, end: int, ranks: Int[Array, "t"]
    ) -> tuple[Int[Array, "k t"], list[tuple[int, Int[Array, "u"], Float[Array, "u"]]]]:
        """The rows of the given ranks by distance, among the rows from ``start`` to ``end``, for each ellipsoid.

        The list holds the ranks whose rows are uncertain: ellipsoid, indices of the ranks, and distances.
        """
        rows, ties = np.empty((len(self._ellipsoids), len(ranks)), dtype=np.int64), []
        # The last bits of a square are replaced by the index of the point, so that a plain sort keeps it.
        bits = (end - start).bit_length()
        mask, cut, last = 2**bits - 1, 2.0 ** (bits - 51), end - start - 1
        size = max(_BATCH // (end - start), self._points.shape[1])
        for first in range(0, len(rows), size):
            squares, error = self._squares(first, first + size, start, end), self._errors[first : first + size]
            # A comparison with NaN, after an overflow, leaves a point undecided.
            near = np.flatnonzero(~(squares > (1.0 + SURFACE_TOLERANCE) ** 2 * (1.0 + 1e-12) + error))
            places = first + near // (end - start), start + near % (end - start)
            self._near.append((places[0].astype(np.int32), places[1].astype(np.int32), squares.ravel()[near]))
            keys = squares.view(np.int64)  # the bits of numbers that are not negative have the order of the numbers
            keys &= ~mask
            keys |= np.arange(end - start)
            keys.sort(axis=1)
            rows[first : first + size] = start + (keys[:, ranks] & mask)
            value = (keys[:, ranks] & ~mask).view(np.float64)
            below = (keys[:, np.maximum(ranks - 1, 0)] & ~mask).view(np.float64)
            above = (keys[:, np.minimum(ranks + 1, last)] & ~mask).view(np.float64)
            slack = 2.0 * error + cut * value
            certain = ((value - below > slack) | (ranks == 0)) & ((above - value > slack) | (ranks == last))
            for i in np.flatnonzero(~certain.all(axis=1)).tolist():
                # Runs of points that are too near to each other for their order to be certain.
                which, own = np.flatnonzero(~certain[i]), (keys[i] & ~mask).view(np.float64)
                run = np.append(0, np.cumsum(np.diff(own) > 2.0 * error[i] + cut * own[1:]))
                among = np.flatnonzero(np.isin(run, run[ranks[which]]))
                exact = self.distances(first + i, start + (keys[i, among] & mask))
                exact = exact[np.lexsort((exact, run[among]))]
                ties.append((first + i, which, exact[np.searchsorted(among, ranks[which])]))
        return rows, ties

    def inside(self) -> list[Int[Array, "n"]]:
        """The rows inside each ellipsoid, of the points that were ranked."""
        ellipsoid, row, squares = (np.concatenate(parts) for parts in zip(*self._near, strict=True))
        order = np.argsort(ellipsoid, kind="stable")
        ends = np.searchsorted(ellipsoid[order], np.arange(1, len(self._ellipsoids)))
        found = []
        for i, (rows, own) in enumerate(zip(np.split(row[order], ends), np.split(squares[order], ends), strict=True)):
            held = own < (1.0 + SURFACE_TOLERANCE) ** 2 * (1.0 - 1e-12) - self._errors[i]
            unsure = np.flatnonzero(~held)
            held[unsure] = self.distances(i, rows[unsure]) <= 1.0 + SURFACE_TOLERANCE
            found.append(rows[held])
        return found

    def distances(self, i: int, rows: Int[Array, "n"]) -> Float[Array, "n"]:
        """The distances of some points from an ellipsoid, with the bits that they have among all points."""
        center, whitener = self._ellipsoids[i].center, self._ellipsoids[i].whitener
        filled = np.append(rows, np.zeros(-len(rows) % _TILE, dtype=rows.dtype))
        found = column_norms(np.ascontiguousarray(self._points[filled].T), center, whitener)[: len(rows)]
        late = np.flatnonzero(rows >= len(self._points) // _TILE * _TILE)
        if len(late):
            first = (len(self._points) - 1) // BLOCK_ROWS * BLOCK_ROWS
            found[late] = column_norms(self._points[first:].T, center, whitener)[rows[late] - first]
        return found

    def _squares(self, first: int, stop: int, start: int, end: int) -> Float[Array, "k n"]:
        """Approximate squared distances of the rows from ``start`` to ``end`` from some of the ellipsoids."""
        theta, dim = self._theta[first:stop], len(self._unit)
        squares, size = np.empty((len(theta), end - start)), max(256, _PRODUCTS // theta.shape[1])
        for begin in range(start, end, size):
            z = (self._points[begin : min(begin + size, end)] - self._origin).T / self._unit[:, None]
            products = np.ones((theta.shape[1], z.shape[1]))
            products[-1 - dim : -1] = z
            if self._diagonal:
                np.multiply(z, z, out=products[:dim])
            else:
                for f, stop in enumerate(np.cumsum(np.arange(dim, 0, -1)).tolist()):
                    np.multiply(z[f], z[f:], out=products[stop - dim + f : stop])
            np.matmul(theta, products, out=squares[:, begin - start : begin - start + z.shape[1]])
        return squares
