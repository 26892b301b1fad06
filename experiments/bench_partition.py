"""Time of a whole partition by number of points and dimensions.

Claim: 50 000 real embeddings in 16 dimensions, 10 classes, max_impure 50, take under 60 CPU seconds, and CPU time
grows close to linearly in the number of points: an exponent of at most 1.25 from 10 000 to 50 000. Synthetic
embeddings have 10 classes; the smaller sets of a draw are the first points of the largest, and three draws show the
spread. Real embeddings are read from SEPC_DATA and left out without it.

    SEPC_DATA=... python experiments/bench_partition.py

The share of time per program is measured inside the same runs: ``cover`` is minimum-volume ellipsoids and queries of
them, ``hulls`` the closest points of reduced hulls.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from harness import arguments, environment, write_results

from sepc_torch import partition
from sepc_torch.partitioning.steps import Steps
from sepc_torch.solvers.progressive import ProgressiveEllipsoid

LARGEST = 50_000
DRAWS = 3
PROGRAMS = {
    (Steps, "_cover"): "cover",
    (ProgressiveEllipsoid, "intruders"): "cover",
    (ProgressiveEllipsoid, "subset"): "cover",
    (Steps, "_closest"): "hulls",
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
    folder = os.environ.get("SEPC_DATA")
    if folder is None or not (Path(folder) / "fashion_mnist_cnn_features.npz").is_file():
        return None
    file = np.load(Path(folder) / "fashion_mnist_cnn_features.npz")
    train = np.flatnonzero(file["split"] == 0)[:50_000]
    x, y = file["X"][train].astype(np.float64), file["y"][train]
    x -= x.mean(axis=0)
    _, vectors = np.linalg.eigh(x.T @ x)
    return x @ vectors[:, ::-1][:, :dim], y


@contextmanager
def measured(spent: dict[str, float], calls: dict[str, int]) -> Iterator[None]:
    """Record the time and the calls of each program inside the separator."""
    originals = {(owner, name): getattr(owner, name) for owner, name in PROGRAMS}
    depth = 0

    def timed(program: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            begun = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1
                if depth == 0:  # a program that calls another counts once
                    spent[program] += time.process_time() - begun
                    calls[program] += 1

        return call

    for (owner, name), function in originals.items():
        setattr(owner, name, timed(PROGRAMS[owner, name], function))
    try:
        yield
    finally:
        for (owner, name), function in originals.items():
            setattr(owner, name, function)


def measure(name: str, x: np.ndarray, y: np.ndarray, max_impure: int) -> dict[str, Any]:
    spent: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    wall, cpu = time.perf_counter(), time.process_time()
    with measured(spent, calls):
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
        "calls": dict(calls),
        "share": {program: seconds / cpu for program, seconds in spent.items()}
        | {"count": found.seconds["count"] / wall},
    }
    shares = "  ".join(f"{program} {share:4.0%}" for program, share in row["share"].items())
    print(
        f"{name:10s} {len(x):7d} x {x.shape[1]:3d}  wall {wall:7.2f} s  cpu {cpu:7.2f} s  "
        f"{row['ellipsoids']:4d} ellipsoids {row['isolated']:5d} isolated {row['cells']:6d} cells   {shares}",
        flush=True,
    )
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
            print("real embeddings: left out, SEPC_DATA has no fashion_mnist_cnn_features.npz")
            break
        rows.append(measure("fashion", *real, max_impure=50))
    for dims, exponents in growth.items():
        print(f"{dims:>2s} dims, 10 000 to {LARGEST}: exponents {', '.join(f'{e:.2f}' for e in exponents)}")
    path = write_results(
        "bench_partition",
        {
            "command": "python experiments/bench_partition.py",
            "environment": environment(),
            "seed": options.seed,
            "rows": rows,
            "growth": growth,
        },
    )
    print(f"written: {path.name}")


if __name__ == "__main__":
    main()
