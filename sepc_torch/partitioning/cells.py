r"""The :class:`Ledger` of a partition: class counts in each region (cell), sorted distances to each ellipsoid.

A *cell* is a distinct pattern of membership in the ellipsoids that occurs among the training points. For any set
of ellipsoids, a matrix product of cells and counts gives the training points of each class in their intersection and in
their union. A point outside every ellipsoid is classified by expanded ellipsoids. To count in them, the ledger keeps
the sorted distances of the training points, by ellipsoid and class. It does not keep the training points themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sepc_torch.ellipsoid import SURFACE_TOLERANCE, Ellipsoid
from sepc_torch.shapes import Array, Bool, Float, Int

if TYPE_CHECKING:
    import torch

# Largest number of distances kept per ellipsoid and class. The distances of a class with more points are thinned evenly
# by rank.
RESOLUTION = 512
# Float64 values in one batch of differences on a device: half a GiB.
_BATCH = 2**26


class Ledger(NamedTuple):
    r"""Cells (P, K) with their class counts (P, C), and sorted distances to every ellipsoid.

    ``sorted_distances[k, c, q]`` is the distance to which ellipsoid k must be expanded to hold ``counts_at[c, q]``
    training points of class c. A class with at most :data:`RESOLUTION` points has one entry per point, and counts read
    from the table are exact. For larger classes they are too low by at most :attr:`count_error`. The row of a class
    with fewer than Q points is padded with infinities.
    """

    cells: Bool[Array, "P K"]
    counts: Int[Array, "P C"]
    sorted_distances: Float[Array, "K C Q"]
    counts_at: Int[Array, "C Q"]

    @property
    def count_error(self) -> int:
        """Largest amount by which a count read from ``sorted_distances`` can be below the true count."""
        return int(np.diff(self.counts_at, axis=1, prepend=0).max()) - 1

    def reached(self, ellipsoid: int, distance: float) -> Int[Array, "C"]:
        """Number of training points of each class within the given distance of an ellipsoid."""
        found = [
            np.searchsorted(row, distance * (1.0 + SURFACE_TOLERANCE), side="right")
            for row in self.sorted_distances[ellipsoid]
        ]
        padded = np.concatenate([np.zeros((len(self.counts_at), 1), dtype=np.int64), self.counts_at], axis=1)
        return padded[np.arange(len(found)), found]


def ledger(
    ellipsoids: Sequence[Ellipsoid],
    points: Float[Array, "N D"],
    codes: Int[Array, "N"],
    classes: int,
    device: torch.device | None = None,
) -> Ledger:
    """Count the training points of each class in the cells of the ellipsoids and sort their distances.

    Args:
        ellipsoids: The K ellipsoids.
        points: The training points.
        codes: The class of each training point, from 0 to ``classes`` - 1.
        classes: Number of classes C.
        device: Torch device that computes the distances in float64; by default NumPy does.
    """
    totals = np.bincount(codes, minlength=classes)
    resolution = int(min(totals.max(), RESOLUTION))
    steps = np.arange(1, resolution + 1)
    # Evenly spaced counts up to the class size; every count if the class has at most ``resolution`` points.
    counts_at = np.where(
        totals[:, None] <= resolution, np.minimum(steps, totals[:, None]), -(-steps * totals[:, None] // resolution)
    )
    members = [np.flatnonzero(codes == c) for c in range(classes)]
    if device is None:
        inside, sorted_distances = _measure(ellipsoids, points, members, counts_at)
    else:
        inside, sorted_distances = _measure_on(device, ellipsoids, points, members, counts_at)
    sorted_distances[:, steps[None, :] > totals[:, None]] = np.inf
    packed, cell = _distinct(np.packbits(inside, axis=1))
    cells = np.unpackbits(packed, axis=1, count=len(ellipsoids)).astype(bool)
    counts = np.zeros((len(cells), classes), dtype=np.int64)
    np.add.at(counts, (cell, codes), 1)
    return Ledger(cells, counts, sorted_distances, counts_at.astype(np.int64))


def _measure(
    ellipsoids: Sequence[Ellipsoid], points: Float[Array, "N D"], members: list[Array], counts_at: Int[Array, "C Q"]
) -> tuple[Bool[Array, "N K"], Float[Array, "K C Q"]]:
    """Membership of the points in the ellipsoids, and for each class the distances at the ranks ``counts_at``."""
    inside = np.empty((len(points), len(ellipsoids)), dtype=bool)
    sorted_distances = np.empty((len(ellipsoids), *counts_at.shape))
    for k, ellipsoid in enumerate(ellipsoids):
        distance = ellipsoid.distance(points)
        inside[:, k] = distance <= 1.0 + SURFACE_TOLERANCE
        for c, rows in enumerate(members):
            sorted_distances[k, c] = np.sort(distance[rows])[counts_at[c] - 1]
    return inside, sorted_distances


def _measure_on(
    device: torch.device,
    ellipsoids: Sequence[Ellipsoid],
    points: Float[Array, "N D"],
    members: list[Array],
    counts_at: Int[Array, "C Q"],
) -> tuple[Bool[Array, "N K"], Float[Array, "K C Q"]]:
    """Compute the results of :func:`_measure` in torch, in batches of ellipsoids."""
    import torch

    centers = torch.from_numpy(np.stack([e.center for e in ellipsoids])).to(device)
    whiteners = torch.from_numpy(np.stack([e.whitener for e in ellipsoids])).to(device)
    z = torch.from_numpy(points).to(device)
    rows = [torch.from_numpy(own).to(device) for own in members]
    places = torch.from_numpy(counts_at - 1).to(device)
    inside, sorted_distances = [], []
    for c, w in zip(*(t.split(max(1, _BATCH // z.numel())) for t in (centers, whiteners)), strict=True):
        distance = torch.linalg.vector_norm((z - c[:, None]) @ w.mT, dim=2)
        inside.append((distance <= 1.0 + SURFACE_TOLERANCE).T.contiguous().cpu())
        ordered = (distance[:, own].sort(dim=1).values for own in rows)
        sorted_distances.append(
            torch.stack([d[:, place] for d, place in zip(ordered, places, strict=True)], dim=1).cpu()
        )
    return torch.cat(inside, dim=1).numpy(), torch.cat(sorted_distances).numpy()


def _distinct(rows: Array) -> tuple[Array, Int[Array, "N"]]:
    """The distinct rows of bytes, sorted, and the index of each row among them.

    The rows are compared as byte strings, which is much faster than ``np.unique(axis=0)``.
    """
    text = np.ascontiguousarray(rows).view(f"S{rows.shape[1]}").ravel()
    _, first, place = np.unique(text, return_index=True, return_inverse=True)
    return rows[first], place.ravel()
