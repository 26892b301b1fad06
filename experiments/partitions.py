"""Counts and comparisons of partitions: ellipsoids per class, and agreement of two solvers."""

from __future__ import annotations

from typing import Any, TypedDict

import numpy as np

from sepc_torch import Kind, Partition, partition
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
