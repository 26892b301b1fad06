"""Dense tables of file formats 1 and 2, made from distances as their writers made them, and their counts."""

from __future__ import annotations

import numpy as np

from sepc_torch.ellipsoid import SURFACE_TOLERANCE
from sepc_torch.partitioning.cells import Ledger
from sepc_torch.shapes import Array


def old_tables(distance: Array, codes: Array, resolution: int) -> dict[str, Array]:
    """Tables of training points with distances (N, K); classes above ``resolution`` are thinned evenly by rank."""
    inside = distance <= 1 + SURFACE_TOLERANCE
    totals = np.bincount(codes)
    cells, cell = np.unique(inside, axis=0, return_inverse=True)
    counts = np.zeros((len(cells), len(totals)), dtype=np.int64)
    np.add.at(counts, (cell.ravel(), codes), 1)
    size = min(int(totals.max()), resolution)
    counts_at = np.zeros((len(totals), size), dtype=np.int64)
    sorted_distances = np.full((distance.shape[1], len(totals), size), np.inf)
    for c, total in enumerate(totals):
        for q in range(size):
            counts_at[c, q] = min(q + 1, total) if total <= size else -(-(q + 1) * total // size)
            if q < total:
                sorted_distances[:, c, q] = np.sort(distance[codes == c], axis=0)[counts_at[c, q] - 1]
    return {"cells": cells, "counts": counts, "sorted_distances": sorted_distances, "counts_at": counts_at}


def old_count(tables: dict[str, Array], ellipsoid: int, distance: float) -> list[int]:
    """Class counts within a distance of an ellipsoid, read from the old tables."""
    found = []
    for row, counts in zip(tables["sorted_distances"][ellipsoid], tables["counts_at"], strict=True):
        passed = int(np.count_nonzero(row <= distance * (1 + SURFACE_TOLERANCE)))
        found.append(int(counts[passed - 1]) if passed else 0)
    return found


def dense_tables(ledger: Ledger) -> dict[str, Array]:
    """The old tables of a small training set, from a ledger that keeps every count."""
    assert ledger.relative_count_error == 0
    totals = ledger.totals
    counts_at = np.minimum(np.arange(1, totals.max() + 1), totals[:, None])
    sorted_distances = np.full((len(ledger.step_ids), *counts_at.shape), np.inf, dtype=ledger.step_distances.dtype)
    sorted_distances[:, ledger.grid_classes, ledger.grid_counts - 1] = ledger.step_distances
    return {
        "cells": ledger.cells,
        "counts": ledger.counts,
        "sorted_distances": sorted_distances,
        "counts_at": counts_at,
    }
