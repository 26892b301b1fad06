"""Partitions: ellipsoids per class, agreement of two solvers, and new partitions with the mistakes put back.

The paper reads a cluster of mistakes in one region as a small disjunct. More mistakes than max_impure call for a new
partition, in which they get an ellipsoid of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch

from experiments.paper.regions import judge
from sepc_torch import SEPC, Kind, Partition, partition, small_disjuncts
from sepc_torch.partitioning.record import PartitionEllipsoid

# The allowed difference of two solvers in log-volume; their certificates may allow more.
TOLERANCE = 1e-6


class Agreement(TypedDict):
    """The solvers, whether every ellipsoid is the same, and the largest difference of log-volumes."""

    solvers: list[str]
    same: bool
    ellipsoids: list[int]
    log_volume_difference: float | None


def ellipsoids_per_class(part: Partition) -> tuple[int, ...]:
    """Ellipsoids of each class; isolated points are not counted."""
    return tuple(
        sum(e.label == c and e.kind is not Kind.ISOLATED for e in part.ellipsoids) for c in part.classes.tolist()
    )


def isolated_per_class(part: Partition) -> tuple[int, ...]:
    return tuple(sum(e.label == c and e.kind is Kind.ISOLATED for e in part.ellipsoids) for c in part.classes.tolist())


def agreement(first: Partition, second: Partition, x: Any) -> Agreement:
    """Compare ellipsoid by ellipsoid: class, iteration, kind, points covered, points of ``x`` inside, log-volume."""
    solvers = [str(part.made["solver"]) for part in (first, second)]
    found: Agreement = {
        "solvers": solvers,
        "same": False,
        "ellipsoids": [len(first), len(second)],
        "log_volume_difference": None,
    }
    if len(first) != len(second):
        return found
    points = np.asarray(x, dtype=np.float64)
    pairs = list(zip(first.ellipsoids, second.ellipsoids, strict=True))
    found["log_volume_difference"] = max(abs(a.log_volume - b.log_volume) for a, b in pairs)
    found["same"] = all(
        abs(a.log_volume - b.log_volume) <= max(TOLERANCE, certified(a), certified(b))
        and (a.label, a.iteration, a.kind, a.covered) == (b.label, b.iteration, b.kind, b.covered)
        and np.array_equal(a.contains(points), b.contains(points))
        for a, b in pairs
    )
    return found


def certified(e: PartitionEllipsoid) -> float:
    r"""The largest excess over the least log-volume, :math:`\frac D2 \log(1 + \varepsilon (D+1)/D)` for a gap."""
    return e.dim / 2 * float(np.log1p(e.gap * (e.dim + 1) / e.dim))


def agreement_of_solvers(part: Partition, x: Any, y: Any) -> Agreement:
    """Compare a partition with that of the other kind of solver, for the same parameters."""
    other = "CLARABEL" if part.made["solver"] == "native" else "native"
    parameters = {name: part.made[name] for name in ("max_impure", "standardize", "floor", "rest")}
    return agreement(part, partition(x, y, solver=other, progress=False, **parameters), x)


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
