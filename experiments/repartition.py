"""Repartition with misclassified points put back with their labels, to find small disjuncts.

The paper reads a cluster of mistakes in one region as a small disjunct. More mistakes than max_impure call for a new
partition, in which they get an ellipsoid of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from partitions import ellipsoids_per_class
from regions import judge

from sepc_torch import SEPC, Partition, partition, small_disjuncts
from sepc_torch.ellipsoid import Kind


class Repartition(NamedTuple):
    """The partitions without and with the mistakes, and numbers on the mistakes' new places."""

    before: Partition
    after: Partition
    found: dict[str, Any]


def repartition(x: np.ndarray, y: np.ndarray, mistakes: np.ndarray, max_impure: int, solver: str) -> Repartition:
    """Partition without and with some points; ``mistakes`` are their rows."""
    rest = np.setdiff1d(np.arange(len(y)), mistakes)
    names = [str(label) for label in np.unique(y)]
    before = partition(x[rest], y[rest], max_impure=max_impure, solver=solver)
    after = partition(x, y, max_impure=max_impure, solver=solver)
    first, second = (judge(part, x[mistakes], y[mistakes], names) for part in (before, after))
    given = SEPC.from_partition(before, "euclidean", dtype=torch.float64).predict(x[mistakes])
    disjuncts = small_disjuncts(before, x[mistakes], y[mistakes], given)
    found = {
        "mistakes": len(mistakes),
        "right_before": int(first.right.sum()),
        "right_after": int(second.right.sum()),
        "inside_before": int((~first.outside).sum()),
        "ellipsoids_before": ellipsoids_per_class(before),
        "ellipsoids_after": ellipsoids_per_class(after),
        **homes(after, x, y, mistakes),
        "disjuncts": [
            {
                "ellipsoids": [int(k) for k in d.ellipsoids],
                "predicted": d.predicted,
                "true": list(d.true),
                "points": len(d.rows),
                "mean_trust": float(first.trust[d.rows].mean()),
                "right_after": int(second.right[d.rows].sum()),
                **homes(after, x, y, mistakes[d.rows]),
            }
            for d in disjuncts
        ],
    }
    return Repartition(before, after, found)


def homes(part: Partition, x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> dict[str, int]:
    """The numbers of points in an ellipsoid of their own, isolated, and among others of their class.

    An ellipsoid is their own if they are at least half of the points of its class inside.
    """
    returned = np.isin(np.arange(len(y)), rows)
    own, isolated = np.zeros(len(y), dtype=bool), np.zeros(len(y), dtype=bool)
    for e in part.ellipsoids:
        held = e.contains(x) & (y == e.label)
        if e.kind is Kind.ISOLATED:
            isolated |= held & returned
        elif 2 * np.count_nonzero(held & returned) >= np.count_nonzero(held):
            own |= held & returned
    isolated &= ~own
    return {
        "in_own_ellipsoid": int(own.sum()),
        "isolated": int(isolated.sum()),
        "among_others": len(rows) - int(own.sum()) - int(isolated.sum()),
    }
