r"""Which training points vouch for a place: the counts that rules and trust are made of, without the points themselves.

A *cell* is a distinct pattern of membership in the ellipsoids. "How many training points of each class lie in all
of these ellipsoids, or in any of them" is a matrix product with the cells and their counts. A point outside every
ellipsoid is judged by an expanded one, so for every ellipsoid and class the sorted distances of the training points
are kept too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sepc_torch.ellipsoid import SURFACE_TOLERANCE, Ellipsoid
from sepc_torch.shapes import Array, Bool, Float, Int

# Distances kept per ellipsoid and class. Classes with more points are thinned evenly by rank.
RESOLUTION = 512


class Ledger(NamedTuple):
    r"""Cells (P, K) with class counts (P, C), and the reach of every ellipsoid.

    ``reach[k, c, q]`` is the distance within which ellipsoid k, expanded, holds ``ranks[c, q]`` training points of
    class c. With at most :data:`RESOLUTION` points in a class every point has its entry and counts are exact;
    otherwise a count read from it is short by at most :attr:`count_error`. Rows end in infinities where a class has
    fewer points.
    """

    cells: Bool[Array, "P K"]
    counts: Int[Array, "P C"]
    reach: Float[Array, "K C Q"]
    ranks: Int[Array, "C Q"]

    @property
    def count_error(self) -> int:
        """The most by which a count read from ``reach`` falls short of the true one."""
        return int(np.diff(self.ranks, axis=1, prepend=0).max()) - 1

    def reached(self, ellipsoid: int, distance: float) -> Int[Array, "C"]:
        """Training points of each class within the given distance of an ellipsoid (its expansion)."""
        found = [
            np.searchsorted(row, distance * (1.0 + SURFACE_TOLERANCE), side="right") for row in self.reach[ellipsoid]
        ]
        padded = np.concatenate([np.zeros((len(self.ranks), 1), dtype=np.int64), self.ranks], axis=1)
        return padded[np.arange(len(found)), found]


def ledger(
    ellipsoids: Sequence[Ellipsoid], points: Float[Array, "N D"], codes: Int[Array, "N"], classes: int
) -> Ledger:
    """Count the training points in the cells of the ellipsoids and measure their reach."""
    totals = np.bincount(codes, minlength=classes)
    resolution = int(min(totals.max(), RESOLUTION))
    steps = np.arange(1, resolution + 1)
    # Evenly spaced ranks that end at the class's last point; every point where there are no more than the resolution.
    ranks = np.where(
        totals[:, None] <= resolution, np.minimum(steps, totals[:, None]), -(-steps * totals[:, None] // resolution)
    )
    beyond = steps[None, :] > totals[:, None]
    inside = np.empty((len(points), len(ellipsoids)), dtype=bool)
    reach = np.empty((len(ellipsoids), classes, resolution))
    members = [np.flatnonzero(codes == c) for c in range(classes)]
    for k, ellipsoid in enumerate(ellipsoids):
        distance = ellipsoid.distance(points)
        inside[:, k] = distance <= 1.0 + SURFACE_TOLERANCE
        for c in range(classes):
            reach[k, c] = np.where(beyond[c], np.inf, np.sort(distance[members[c]])[ranks[c] - 1])
    packed, cell = np.unique(np.packbits(inside, axis=1), axis=0, return_inverse=True)
    cells = np.unpackbits(packed, axis=1, count=len(ellipsoids)).astype(bool)
    counts = np.zeros((len(cells), classes), dtype=np.int64)
    np.add.at(counts, (cell.ravel(), codes), 1)
    return Ledger(cells, counts, reach, ranks.astype(np.int64))
