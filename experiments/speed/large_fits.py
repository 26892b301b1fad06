r"""Cost of fits of 1 and 100 million rows on many workers: coefficients measured on one core, wall time simulated.

A class with n points and m points of other classes takes about :math:`t = a n + b m` seconds: its own points are
covered, the others are screened. The script measures ``ClassTask.run`` at a few n and m in 32 dimensions on one core
and fits a and b, for classes that lie apart and for classes that overlap. It then simulates 10^6 rows of 1000 classes
and 10^8 rows of 1000 and 10 000 classes on 16, 64 and 256 workers: every free worker takes the largest class left. The
simulation extrapolates m far beyond the measured sizes and leaves out the time of sending the points. It is an
estimate, not a measurement.

The script also measures two costs of the calling process: the memory of ``partition`` in copies of the points, and the
time of the counts per point and ellipsoid.

    python -m experiments.speed.large_fits
"""

from __future__ import annotations

import heapq
import tracemalloc
from functools import partial
from typing import Any

import numpy as np
from scipy.optimize import nnls

from experiments.harness import arguments, cpu_time, write_results
from experiments.speed.bench_classes import embeddings
from sepc_torch import Ellipsoid, partition
from sepc_torch.ellipsoid import DEFAULT_FLOOR
from sepc_torch.partitioning.cells import STEPS, ledger
from sepc_torch.partitioning.tasks import ClassTask, in_columns, separate

Array = np.ndarray
DIM = 32
# Rows and classes of the simulated fits.
FITS = ((10**6, 1000), (10**8, 1000), (10**8, 10_000))
WORKERS, CAP = (16, 64, 256), 5000
# Mean length of the noise, where the mean length of a centre is 1: classes that lie apart, and that overlap.
SPREADS = {"apart": 0.45, "overlapping": 1.0}
# Sizes of classes are log-normal with this deviation: the largest of 1000 classes is about 25 times the median.
DEVIATION = 1.0


def measure(x: Array, y: Array, sizes: tuple[int, ...], rests: tuple[int, ...]) -> list[dict[str, Any]]:
    """CPU seconds of the run of class 0, by its number of points and the number of points of other classes."""
    own, rest = x[y == 0], x[y != 0]
    rng = np.random.default_rng(0)
    rows = []
    for size in sizes:
        for others in rests:
            order = rng.permutation(size + others)
            points = in_columns(np.concatenate([own[:size], rest[:others]]), order)
            codes = (order >= size).astype(np.int64)
            parameters = {
                # Tolerated impurity in proportion to the class: 1 in 100, as in bench_partition.py.
                "max_impure": max(2, size // 100),
                "floor": DEFAULT_FLOOR,
                "dim": x.shape[1],
            }
            task = partial(separate, ClassTask, points, codes, 0, parameters)
            seconds, found = cpu_time(task, 2)
            rows.append({"own": size, "rest": others, "cpu_s": seconds, "ellipsoids": len(found.pieces)})
    return rows


def coefficients(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The coefficients a, b >= 0 with the least relative squared error, and the largest relative error."""
    design = np.array([[r["own"], r["rest"]] for r in rows], dtype=np.float64)
    seconds = np.array([r["cpu_s"] for r in rows])
    (own, rest), _ = nnls(design / seconds[:, None], np.ones(len(rows)))
    error = float(np.abs(design @ [own, rest] / seconds - 1.0).max())
    return {"own_s": float(own), "rest_s": float(rest), "largest_error": error}


def class_sizes(rows: int, classes: int, rng: np.random.Generator) -> Array:
    """Log-normal sizes of at least 1 that sum to about ``rows``."""
    weights = rng.lognormal(sigma=DEVIATION, size=classes)
    return np.maximum(np.round(rows * weights / weights.sum()), 1).astype(np.int64)


def wall_time(seconds: Array, workers: int) -> float:
    """The time at which the last worker is done if every free worker takes the longest task left."""
    busy_until = [0.0] * workers
    for task in np.sort(seconds)[::-1].tolist():
        heapq.heapreplace(busy_until, busy_until[0] + task)
    return max(busy_until)


def simulate(cost: dict[str, float], sizes: Array, cap: int | None) -> dict[str, Any]:
    """Wall time on every number of workers, and the bytes of the points that travel to each machine."""
    kept = sizes if cap is None else np.minimum(sizes, cap)
    total = int(kept.sum())
    seconds = cost["own_s"] * kept + cost["rest_s"] * (total - kept)
    return {
        "classes": len(sizes),
        "cap": cap,
        "rows": int(sizes.sum()),
        "fitted_rows": total,
        "points_bytes": total * DIM * 8,
        "cpu_s": float(seconds.sum()),
        "largest_class_s": float(seconds.max()),
        "wall_s": {str(workers): wall_time(seconds, workers) for workers in WORKERS},
    }


def memory_copies(x: Array, y: Array, cap: int) -> float:
    """Largest memory that ``partition`` allocates, as a multiple of the points in float64."""
    tracemalloc.start()
    try:
        partition(x, y, max_per_class=cap, max_impure=cap // 50, progress=False)
        return tracemalloc.get_traced_memory()[1] / (x.size * 8)
    finally:
        tracemalloc.stop()


def count_seconds(x: Array, y: Array, ellipsoids: int) -> float:
    """CPU seconds of the counts for each point and ellipsoid."""
    balls = [Ellipsoid.ball(x[i], 1.0) for i in range(ellipsoids)]
    order = np.argsort(y, kind="stable")
    seconds, _ = cpu_time(lambda: ledger(balls, x[order], y[order], int(y.max()) + 1), 1)
    return seconds / (len(x) * ellipsoids)


def caller(rows: int, classes: int, copies: float, count_s: float) -> dict[str, float]:
    """Memory of the calling process, and memory and CPU time of the counts with one ellipsoid for each class.

    The counts keep the steps of each ellipsoid and, for each point, the index of its own ellipsoid.
    """
    return {
        "rows": rows,
        "classes": classes,
        "memory_bytes": copies * rows * DIM * 8,
        "count_bytes": rows * 12 + classes * STEPS * 12,
        "count_s": count_s * rows * classes,
    }


def main() -> None:
    options = arguments(__doc__).parse_args()
    sizes, rests = ((50, 200), (2500, 5000)) if options.smoke else ((1000, 4000, 8000), (25_000, 100_000, 400_000))
    # Twenty classes: class 0 then has a twentieth of the rows, which is more than the largest size.
    count = 6000 if options.smoke else 450_000
    measured: dict[str, Any] = {}
    for name, spread in SPREADS.items():
        x, y = embeddings(count, DIM, 20, options.seed, spread)
        x = x.astype(np.float64)
        x -= x.mean(axis=0)
        x /= x.std(axis=0)
        rows = measure(x, y, sizes, rests)
        measured[name] = {"rows": rows, "cost": coefficients(rows)}
        print(name, measured[name]["cost"], *rows, sep="\n", flush=True)
    rng = np.random.default_rng(options.seed)
    drawn = [class_sizes(rows, classes, rng) for rows, classes in FITS]
    simulated = [
        {"data": name, **simulate(found["cost"], each, cap)}
        for name, found in measured.items()
        for each in drawn
        for cap in (None, CAP)
    ]
    for row in simulated:
        print(row)
    part = slice(0, count // 2)
    copies = memory_copies(x[part], y[part], cap=100)
    count_s = count_seconds(x[part], y[part], ellipsoids=4 if options.smoke else 20)
    calling = [caller(*shape, copies, count_s) for shape in FITS]
    print(f"{copies:.1f} copies of the points, {count_s:.1e} s for each point and ellipsoid", *calling, sep="\n")
    results = {
        "dim": DIM,
        "runs": measured,
        "simulated": simulated,
        "memory_copies": copies,
        "count_s": count_s,
        "calling_process": calling,
    }
    if not options.smoke:
        write_results("large_fits", options, (), results)


if __name__ == "__main__":
    main()
