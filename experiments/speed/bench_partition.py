"""Time of a whole partition by number of points and dimensions.

Claim: 50 000 real embeddings in 16 dimensions, 10 classes, max_impure 50, take under 60 CPU seconds, and CPU time
grows close to linearly in the number of points: an exponent of at most 1.25 from 10 000 to 50 000. Synthetic
embeddings have 10 classes; the smaller sets of a draw are the first points of the largest, and three draws show the
spread. Real embeddings are read from SEPC_DATA and left out without it.

    SEPC_DATA=... python -m experiments.speed.bench_partition

The share of time per program is measured inside the same runs: ``cover`` is minimum-volume ellipsoids and queries of
them, ``hulls`` the closest points of reduced hulls.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import numpy as np

from experiments.datasets import FASHION, stored_arrays
from experiments.harness import arguments, write_results
from sepc_torch import partition
from sepc_torch.partitioning.steps import Steps
from sepc_torch.solvers.progressive import ProgressiveEllipsoid

LARGEST = 50_000
DRAWS = 3
# The functions of each phase.
Phases = dict[str, tuple[tuple[Any, str], ...]]
PROGRAMS: Phases = {
    "cover": ((Steps, "_cover"), (ProgressiveEllipsoid, "intruders"), (ProgressiveEllipsoid, "subset")),
    "hulls": ((Steps, "_closest"),),
}


def embeddings(count: int, dim: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Synthetic embeddings of ten overlapping classes: curved, anisotropic clusters with heavy tails."""
    labels = rng.integers(0, 10, count)
    centers = rng.normal(size=(10, dim)) * 1.6 / np.sqrt(dim / 8)
    shapes = rng.normal(size=(10, dim, dim)) / np.sqrt(dim)
    tails = rng.standard_gamma(3.0, size=(count, 1)) / 3.0
    z = np.einsum("nij,nj->ni", shapes[labels], rng.normal(size=(count, dim))) / np.sqrt(tails)
    z[:, 0] += 0.3 * z[:, 1] ** 2
    return centers[labels] + z, labels


def fashion(dim: int) -> tuple[np.ndarray, np.ndarray] | None:
    """50 000 embeddings of a small CNN, projected onto their first principal components."""
    file = stored_arrays(FASHION)
    if file is None:
        return None
    train = np.flatnonzero(file["split"] == 0)[:50_000]
    x, y = file["X"][train].astype(np.float64), file["y"][train]
    x -= x.mean(axis=0)
    _, vectors = np.linalg.eigh(x.T @ x)
    return x @ vectors[:, ::-1][:, :dim], y


class PhaseClock:
    """CPU seconds of each phase of a partition and of the rest, and the calls of each function.

    Time in a function of another phase counts only there.
    """

    def __init__(self, phases: Phases) -> None:
        self.phases = phases
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._phases, self._since = ["rest"], 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the partitions within the context."""
        with ExitStack() as stack:
            for phase, places in self.phases.items():
                for owner, name in places:
                    stack.enter_context(patch.object(owner, name, self._timed(phase, name, getattr(owner, name))))
            self._since = time.process_time()
            yield
            self._book()

    def _timed(self, phase: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._book()
            self._phases.append(phase)
            self.calls[name] += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._book()
                self._phases.pop()

        return timed

    def _book(self) -> None:
        """Book the seconds since the last call on the present phase."""
        now = time.process_time()
        self.seconds[self._phases[-1]] += now - self._since
        self._since = now


def measure(name: str, x: np.ndarray, y: np.ndarray, max_impure: int) -> dict[str, Any]:
    clock = PhaseClock(PROGRAMS)
    wall, cpu = time.perf_counter(), time.process_time()
    with clock.running():
        found = partition(x, y, max_impure=max_impure, progress=False)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    row = {
        "data": name,
        "points": len(x),
        "dims": x.shape[1],
        "max_impure": max_impure,
        "wall_s": wall,
        "cpu_s": cpu,
        "ellipsoids": sum(e.kind != "isolated" for e in found.ellipsoids),
        "isolated": sum(e.kind == "isolated" for e in found.ellipsoids),
        "cells": len(found.ledger.cell_sizes),
        "share": {program: clock.seconds[program] / cpu for program in PROGRAMS},
    }
    print(row, flush=True)
    return row


def main() -> None:
    options = arguments(__doc__).parse_args()
    rows = []
    growth: dict[str, list[float]] = {}
    for dim in (8,) if options.smoke else (8, 16, 32):
        for draw in range(1 if options.smoke else DRAWS):
            x, y = embeddings(LARGEST, dim, np.random.default_rng([options.seed, dim, draw]))
            spent = {}
            for count in (500,) if options.smoke else (2000, 10_000, LARGEST) if draw == 0 else (10_000, LARGEST):
                # Tolerated impurity in proportion to the class: 1 in 100.
                row = measure("synthetic", x[:count], y[:count], max_impure=max(2, count // 1000))
                rows.append(row | {"draw": draw})
                spent[count] = row["cpu_s"]
            if not options.smoke:
                exponent = float(np.log(spent[LARGEST] / spent[10_000]) / np.log(LARGEST / 10_000))
                growth.setdefault(str(dim), []).append(exponent)
    if options.smoke:
        return
    for dim in (16, 32):
        real = fashion(dim)
        if real is None:
            print(f"real embeddings: left out, SEPC_DATA has no {FASHION}")
            break
        rows.append(measure("fashion", *real, max_impure=50))
    for dims, exponents in growth.items():
        print(f"{dims:>2s} dims, 10 000 to {LARGEST}: exponents {', '.join(f'{e:.2f}' for e in exponents)}")
    write_results("bench_partition", options, (), {"rows": rows, "growth": growth})


if __name__ == "__main__":
    main()
