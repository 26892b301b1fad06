"""Time of a partition with a CUDA device, compared with the CPU's cores alone, and the limit of a port.

Claim: with ``device="cuda"`` the partition finds bit-identical ellipsoids and the same cells. Counting the training
points, a quarter of the time on 16 cores, is at least 10 times faster. The whole is not 5 times faster, and cannot be
with this algorithm in torch's operators: separating a class is a sequence of thousands of Newton steps on a few hundred
points, and each step needs the previous one. The arithmetic of the longest sequence alone, for all classes at once and
without decisions, takes the device more than a fifth of the time of 16 cores.

    python experiments/bench_partition_gpu.py

The data are 50 000 x 32 synthetic points of ten classes, with max_impure 50. Processes and device are warm, and times
are the best of two runs. :mod:`partition_chain` records the class that takes longest in one more run on the CPU, and
replays its steps on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import joblib
import numpy as np
import torch
from bench_partition import LARGEST, embeddings
from harness import arguments, environment, write_results
from partition_chain import record, replay, summary

from sepc_torch import SEPC, Kind, Partition, TrustHead, partition
from sepc_torch.data.arrays import feature_scale
from sepc_torch.ellipsoid import DEFAULT_FLOOR
from sepc_torch.partitioning.fit import _tasks
from sepc_torch.solvers.affine_hull import affine_hull

CORES = 16
WANTED = 5.0
FRESH = 20_000
# The gap to which the partition's ellipsoids are certified; see Separator.
TOLERANCE = 1e-7


def best(function: Callable[[], Partition], repeats: int) -> dict[str, Any]:
    """The partition of the fastest of some runs, with its seconds."""
    rows = []
    for _ in range(repeats):
        begun = time.perf_counter()
        found = function()
        rows.append({"wall_s": time.perf_counter() - begun, **found.seconds, "partition": found})
    return min(rows, key=lambda row: row["wall_s"])


def certified(part: Partition) -> dict[str, Any]:
    """The largest proven gap, and whether every training point lies in an ellipsoid of its own class."""
    own = part.codes[None, :] == np.arange(len(part.classes))[:, None]
    covered = all(part.cells[part.counts[:, c] > 0][:, mine].any(axis=1).all() for c, mine in enumerate(own))
    gap = max(e.gap for e in part.ellipsoids)
    return {"gap": gap, "certified": gap <= 10 * TOLERANCE, "covers": bool(covered)}


def agreement(mine: Partition, theirs: Partition, fresh: np.ndarray) -> dict[str, Any]:
    """Whether two partitions have the same ellipsoids, cells and predictions."""
    z = torch.from_numpy(fresh).float()
    labels = [SEPC.from_partition(part)(z).label for part in (mine, theirs)]
    pairs = list(zip(mine.ellipsoids, theirs.ellipsoids, strict=False))
    finite = np.isfinite(mine.ledger.sorted_distances)
    reach, theirs_reach = (part.ledger.sorted_distances[finite] for part in (mine, theirs))
    same_cells = np.array_equal(mine.cells, theirs.cells) and np.array_equal(mine.counts, theirs.counts)
    return {
        "ellipsoids": [sum(e.kind != Kind.ISOLATED for e in part.ellipsoids) for part in (mine, theirs)],
        "isolated": [sum(e.kind == Kind.ISOLATED for e in part.ellipsoids) for part in (mine, theirs)],
        "same_ellipsoids": len(mine.ellipsoids) == len(theirs.ellipsoids)
        and all(np.array_equal(a.center, b.center) and np.array_equal(a.whitener, b.whitener) for a, b in pairs),
        "same_cells": same_cells,
        "reach_error": float((np.abs(theirs_reach - reach) / (1.0 + reach)).max()),
        "labels": float((labels[0] == labels[1]).double().mean()),
    }


def floor(x: np.ndarray, y: np.ndarray, max_impure: int, jobs: int, device: torch.device, seed: int) -> dict[str, Any]:
    """The recorded steps of all classes on the CPU, and the arithmetic of the longest sequence on the device."""
    standard = np.ascontiguousarray((x - x.mean(axis=0)) / feature_scale(x))
    rank = affine_hull(standard).rank
    parameters = {"max_impure": max_impure, "floor": DEFAULT_FLOOR, "dim": rank, "solver": "native", "metric": None}
    tasks = _tasks(standard, y, np.unique(y), parameters)
    chains = joblib.Parallel(n_jobs=jobs)(joblib.delayed(record)(task) for task in tasks)
    longest = max(chains, key=lambda chain: chain.seconds)
    return {
        "seconds_by_class": [chain.seconds for chain in chains],
        "longest": {
            "seconds": longest.seconds,
            "in_steps": longest.in_steps,
            "in_passes": longest.in_passes,
            "kinds": summary(longest),
        },
        "device": replay(longest, device, len(tasks), seed),
    }


def show(rows: dict[str, dict[str, Any]], found: dict[str, Any]) -> None:
    for name, row in rows.items():
        print(f"{name:12s} {row['wall_s']:7.2f} s   separate {row['separate']:7.2f} s   count {row['count']:6.3f} s")
    longest, replayed = found["longest"], found["device"]
    print(
        f"longest chain on the CPU: {longest['seconds']:.2f} s, {longest['in_steps']:.2f} s of it in steps, "
        f"{longest['in_passes']:.2f} s in passes over many points"
    )
    for kind, seconds in replayed["seconds"].items():
        row = longest["kinds"].get(kind, {"count": 0, "median_rows": 0.0})
        print(f"  {kind:16s} {row['count']:6d}, median {row['median_rows']:6.0f} rows   {seconds:7.3f} s on the device")
    captured = replayed["hull_steps_captured"]
    print(
        f"floor {replayed['floor']:.2f} s; hull steps with their vectors {replayed['hull_steps_whole']:.2f} s, "
        f"as a CUDA graph {'-' if captured is None else format(captured, '.2f')} s; "
        f"decisions {replayed['decisions']:.2f} s"
    )


def main() -> None:
    options = arguments(__doc__).parse_args()
    if not (options.smoke or torch.cuda.is_available()):
        print("no CUDA device: nothing to measure")
        return
    if options.smoke:
        torch.set_num_threads(1)  # with few cores, more threads are slower here
    device = torch.device("cpu" if options.smoke else "cuda")
    count, dim, fresh = (1000, 12, 200) if options.smoke else (LARGEST, 32, FRESH)
    jobs, repeats = (1, 1) if options.smoke else (CORES, 2)
    max_impure = max(2, count // 1000)
    x, y = embeddings(count + fresh, dim, np.random.default_rng([options.seed, dim]))
    x, y, unseen = x[:count], y[:count], x[count:]

    def run(where: torch.device | None, rows: slice = slice(None)) -> Partition:
        return partition(x[rows], y[rows], max_impure=max_impure, n_jobs=jobs, progress=False, device=where)

    for where in (None, device):
        run(where, slice(count // 10))  # warms up the processes and the device
    rows = {"cpu": best(lambda: run(None), repeats), "with device": best(lambda: run(device), repeats)}
    mine, theirs = (row.pop("partition") for row in rows.values())
    checks = {name: certified(part) for name, part in (("cpu", mine), ("with device", theirs))}
    same = agreement(mine, theirs, unseen)
    head = {}
    for name, where in (("cpu", None), ("with device", device)):
        begun = time.perf_counter()
        TrustHead.fit(x, y, dim=dim, normalize="standardize", n_jobs=jobs, progress=False, device=where)
        head[name] = time.perf_counter() - begun
    found = floor(x, y, max_impure, jobs, device, options.seed)
    replayed = found["device"]
    # A lower bound for a port: the replay with whole hull steps, and the counting.
    whole = replayed["floor"] - replayed["seconds"]["hull steps"] + replayed["hull_steps_whole"]
    least = {
        "algebra_s": replayed["floor"] + rows["with device"]["count"],
        "with_vectors_s": whole + rows["with device"]["count"],
        "with_decisions_s": whole + replayed["decisions"] + rows["with device"]["count"],
    }
    if replayed["hull_steps_captured"] is not None:  # a port in CUDA graphs: the hull steps alone
        least["hull_steps_in_graphs_s"] = replayed["hull_steps_captured"] + rows["with device"]["count"]
    verdict = {
        "speedup": rows["cpu"]["wall_s"] / rows["with device"]["wall_s"],
        "count_speedup": rows["cpu"]["count"] / rows["with device"]["count"],
        "head_speedup": head["cpu"] / head["with device"],
        "wanted_s": rows["cpu"]["wall_s"] / WANTED,
        "most_if_only_steps_were_left": found["longest"]["seconds"] / found["longest"]["in_steps"],
        "port_needs_at_least": least,
        "possible": {name: seconds <= rows["cpu"]["wall_s"] / WANTED for name, seconds in least.items()},
    }
    show(rows, found)
    print({name: round(value, 2) for name, value in head.items()}, same, checks, verdict, sep="\n")
    assert same["same_ellipsoids"], "the device changed the ellipsoids"
    assert all(check["certified"] and check["covers"] for check in checks.values()), checks
    if options.smoke:
        return
    results = {
        "command": "python experiments/bench_partition_gpu.py",
        "environment": environment("torch", "joblib"),
        "device": torch.cuda.get_device_name(),
        "seed": options.seed,
        "points": count,
        "dims": dim,
        "max_impure": max_impure,
        "jobs": jobs,
        "runs": rows,
        "head_s": head,
        "certificates": checks,
        "agreement": same,
        "chain": found,
        "verdict": verdict,
    }
    print(f"written: {write_results('bench_partition_gpu', results).name}")


if __name__ == "__main__":
    main()
