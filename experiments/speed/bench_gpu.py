"""Speed, memory and exactness of the CUDA kernels: distances and the whole classifier, compared with other methods.

Claims: distances have float32 accuracy (relative error at most 1e-5 against float64). At 2^20 rows, 128 ellipsoids and
64 dimensions they take at most 9.5 ms, at least 6 times less than eager float32 and 3 times less than torch.compile. At
no shape are they more than 10 % slower than the plain operator. A whole forward takes at most 5.5 ms there; at every
shape it takes at most 1.5 times as long as its distances or at most 20 microseconds more. Its memory does not grow with
the ellipsoids. Screening in float16 changes no decision, and makes the forward at least twice as fast as distances from
three TF32 products.

    python -m experiments.speed.bench_gpu
    python -m experiments.speed.bench_gpu --only exact,compile    # measure only these parts

Times are medians on the device of ``EllipsoidBank.forward`` and ``SEPC.forward``, with caches emptied before each call
and new output tensors. A forward and its distances are replayed from CUDA graphs, so that the device does not wait for
Python between the kernels of a small batch. ``floor`` is the time of the three float16 products of the visited blocks,
at the rate that one large float16 product reaches in the same run, or of reading the points and writing the distances
once, whichever is more. Models are synthetic (synthetic_models.py).
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.harness import arguments, environment, load, wall_time, write_results
from experiments.provenance import ROOT
from experiments.speed.gpu_methods import (
    ceilings,
    compare,
    floor_ms,
    in_turns,
    is_heavy,
    milliseconds,
    on_the_device,
    peak_bytes,
    tflops,
)
from experiments.speed.synthetic_models import Synthetic, synthetic
from sepc_torch import Prediction

HEADLINE = (2**20, 128, 64)
DIMS, COUNTS, ROWS = (8, 16, 32, 64, 128, 256), (1, 10, 100, 1000), (1, 1000, 2**20)
PEER_SHAPES = (HEADLINE, (2**20, 10, 64), (2**20, 100, 32))
# Above this number of multiplications the reference takes a second; such shapes are timed with fewer rows.
MOST_WORK = 3e12
# Batches of 2^20 rows: more than ten million rows in all.
BATCHES = 10
# Ellipsoids, dimensions and options of the models whose decisions are compared.
COMPARED: dict[str, tuple[int, int, dict[str, float]]] = {
    "as timed": (128, 64, {}),
    "overlapping": (200, 8, {"apart": 0.5, "outside": 0.1}),
    "anisotropic": (128, 64, {"stretch": 100.0}),
}
DECISIONS = ("label", "rule", "nearest", "runner_up", "trust")


def by_model(smoke: bool) -> list[tuple[int, int, list[int]]]:
    """Ellipsoids and dimensions of every model, with the batch sizes to time."""
    headline = (*HEADLINE[1:], [HEADLINE[0]])
    if smoke:
        return [headline]
    return [headline] + [
        (count, dim, [2**17 if rows * count * dim**2 > MOST_WORK else rows for rows in ROWS])
        for count, dim in itertools.product(COUNTS, DIMS)
    ]


def distances(seed: int, smoke: bool) -> dict[str, Any]:
    """Time the distance kernel and plain torch at every shape."""
    ceiling = ceilings()
    found = []
    for count, dim, sizes in by_model(smoke):
        model = synthetic(count, dim, seed, "cuda")
        found += [distances_at(model, rows, seed, ceiling) for rows in sizes]
    return {"ceilings": ceiling, "rows": found}


def distances_at(model: Synthetic, rows: int, seed: int, ceiling: dict[str, float]) -> dict[str, Any]:
    count, dim = model.centers.shape
    z = model.points(rows, seed + 1)
    fused, plain = model.bank("triton"), model.bank("torch")
    exact = model.bank("torch", torch.float64)(z[:500].double())
    kernel_ms, torch_ms = in_turns([lambda: fused(z), lambda: plain(z)], is_heavy(rows, count, dim))
    row = {
        "rows": rows,
        "ellipsoids": count,
        "dims": dim,
        "kernel_ms": kernel_ms,
        "torch_ms": torch_ms,
        "ratio": torch_ms / kernel_ms,
        "tflops": tflops(rows, count, dim, kernel_ms),
        "rows_per_second": rows / kernel_ms * 1e3,
        "floor_ms": floor_ms(rows, count, dim, ceiling),
        "error": relative_difference(fused(z[:500]), exact),
        "torch_error": relative_difference(plain(z[:500]), exact),
    }
    print(row, flush=True)
    return row


def relative_difference(found: Tensor, exact: Tensor) -> float:
    return float(torch.where(found == exact, 0.0, (found - exact).abs() / exact.abs()).max())


def forward(seed: int, smoke: bool) -> dict[str, Any]:
    """Time the whole forward and its distances at every shape; measure its memory and the gain of screening."""
    found = []
    for count, dim, sizes in by_model(smoke):
        model = synthetic(count, dim, seed, "cuda")
        found += [forward_at(model, rows, seed) for rows in sizes]
    return {
        "rows": found,
        "memory": [memory(count, seed) for count in (COUNTS[:1] if smoke else COUNTS)],
        "headline": low_precision(seed),
    }


def forward_at(model: Synthetic, rows: int, seed: int) -> dict[str, Any]:
    count, dim = model.centers.shape
    z = model.points(rows, seed + 1)
    bank, sepc = model.bank("triton"), model.sepc("triton")
    both: list[Callable[[], Any]] = [lambda: bank(z), lambda: sepc(z)]
    heavy = is_heavy(rows, count, dim)
    distances_ms, forward_ms = on_the_device(both, heavy)
    most = peak_bytes(lambda: sepc(z))
    row = {
        "rows": rows,
        "ellipsoids": count,
        "dims": dim,
        "distances_ms": distances_ms,
        "forward_ms": forward_ms,
        "ratio": forward_ms / distances_ms,
        "rows_per_second": rows / forward_ms * 1e3,
        "peak_bytes": most,
        "bytes_per_row": most / rows,
    }
    print(row, flush=True)
    return row


def rule_shares(out: Prediction) -> list[float]:
    return (out.rule.bincount(minlength=4) / len(out.rule)).tolist()


def memory(count: int, seed: int, dim: int = 32) -> dict[str, Any]:
    """Peak memory of a forward at two batch sizes, and the memory per additional row."""
    model = synthetic(count, dim, seed, "cuda")
    sepc = model.sepc("triton")
    sizes = (2**21, 2**23)
    few, many = (peak_bytes(partial(sepc, model.points(rows, seed + 1))) for rows in sizes)
    added = (many - few) / (sizes[1] - sizes[0])
    return {"ellipsoids": count, "dims": dim, "rows": sizes, "bytes": (few, many), "added_per_row": added}


def low_precision(seed: int) -> dict[str, float]:
    """Time the whole forward with and without screening, and distances from three TF32 products."""
    from experiments.speed.tf32_distances import tf32_distances

    rows, count, dim = HEADLINE
    model = synthetic(count, dim, seed, "cuda")
    z = model.points(rows, seed + 1)
    screened, full, plain = model.sepc("triton"), model.sepc("triton"), model.sepc("torch")
    full.screen = False
    transposed = model.whiteners.mT.contiguous()
    tf32_ms, best = min(
        (milliseconds(partial(tf32_distances, z, model.centers, transposed, *shape)), shape)
        for shape in itertools.product((64, 128), (4, 8))
    )
    screened_ms, full_ms, plain_ms = in_turns([lambda: screened(z), lambda: full(z), lambda: plain(z)], heavy=True)
    exact = model.bank("torch", torch.float64)(z[:500].double())
    found = {
        "screened_ms": screened_ms,
        "unscreened_ms": full_ms,
        "torch_ms": plain_ms,
        "tf32x3_distances_ms": tf32_ms,
        "tf32x3_error": relative_difference(tf32_distances(z[:500], model.centers, transposed, *best), exact),
    }
    print(found)
    return found


def exact(seed: int, smoke: bool) -> dict[str, Any]:
    """Compare the decisions with screening, without it, and of plain torch, on ten million rows."""
    batches = 1 if smoke else BATCHES
    found = {}
    for name, (count, dim, options) in COMPARED.items():
        model = synthetic(count, dim, seed, "cuda", **options)  # type: ignore[arg-type]
        found[name] = {
            "ellipsoids": count,
            "dims": dim,
            "condition": model.condition,
            "cells": len(model.training.cell_sizes),
            **decisions(model, [seed + 1 + batch for batch in range(batches)]),
        }
        print(f"{name}: {found[name]}", flush=True)
    return {"rows": batches * HEADLINE[0], "models": found}


def decisions(model: Synthetic, seeds: list[int]) -> dict[str, Any]:
    """Rows that differ in each decision, and the largest difference of distances and margins; one batch per seed."""
    screened, full, plain = model.sepc("triton"), model.sepc("triton"), model.sepc("torch")
    full.screen = False
    differ, torch_differs = Counter[str](), Counter[str]()
    largest = {"distance": 0.0, "margin": 0.0}
    for seed in seeds:
        z = model.points(HEADLINE[0], seed)
        reference, quick, other = full(z), screened(z), plain(z)
        differ.update(unequal(quick, reference))
        torch_differs.update(unequal(other, reference))
        for name in largest:
            largest[name] = max(largest[name], relative_difference(getattr(quick, name), getattr(reference, name)))
    compared = {"differ": dict(differ), "torch_differs": dict(torch_differs)}
    return {"rules": rule_shares(reference), "largest": largest, **compared}


def unequal(first: Prediction, second: Prediction) -> dict[str, int]:
    """Number of rows that differ in each decision, and in any of them."""
    rows = {name: getattr(first, name) != getattr(second, name) for name in DECISIONS}
    rows["any"] = torch.stack(list(rows.values())).any(dim=0)
    return {name: int(differ.sum()) for name, differ in rows.items()}


def peers(seed: int, smoke: bool) -> dict[str, Any]:
    """Time other methods to compute the distances."""
    shapes = PEER_SHAPES[:1] if smoke else PEER_SHAPES
    return {"shapes": [compare(*shape, seed) for shape in shapes]}


def compiling(seed: int, _smoke: bool) -> dict[str, float]:
    """Seconds of the first forward of a process: without compiled kernels, with kernels on disk, and after warm-up."""
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as other:
        cold = in_a_process("forward", empty, seed)
        cached = in_a_process("forward", empty, seed)
        warm = in_a_process("warmup", other, seed)
    found = {
        "first_s": cold["first_s"],
        "second_s": cold["second_s"],
        "first_cached_s": cached["first_s"],
        "warmup_s": warm["warmup_s"],
        "first_after_warmup_s": warm["first_s"],
    }
    print(found)
    return found


def in_a_process(begin: str, cache: str, seed: int) -> dict[str, float]:
    command = [sys.executable, "-m", "experiments.speed.bench_gpu", "--first-call", begin, "--seed", str(seed)]
    environ = {**os.environ, "TRITON_CACHE_DIR": cache}
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environ, cwd=ROOT)
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def report_first_call(begin: str, seed: int) -> None:
    """Print the seconds of the first calls in this process."""
    rows, count, dim = HEADLINE
    model = synthetic(count, dim, seed, "cuda")
    sepc, z = model.sepc("triton"), model.points(rows, seed + 1)
    found = {"warmup_s": sepc.warmup(rows)} if begin == "warmup" else {}
    (first, second), _ = wall_time(lambda: sepc(z), 2)
    print(json.dumps(found | {"first_s": first, "second_s": second}))


def graphs(seed: int, smoke: bool) -> dict[str, Any]:
    """Time small batches, where the host takes most of the time: plain calls, and replays of a CUDA graph."""
    model = synthetic(100, 32, seed, "cuda")
    bank, sepc = model.bank("triton"), model.sepc("triton")
    found = []
    for rows in (1,) if smoke else (1, 1000):
        z = model.points(rows, seed + 1)
        sepc.warmup(rows)
        bank.warmup(rows)
        both: list[Callable[[], Any]] = [partial(bank, z), partial(sepc, z)]
        times = in_turns(both, heavy=False) + on_the_device(both, heavy=False)
        names = ("distances_ms", "forward_ms", "distances_graph_ms", "forward_graph_ms")
        found.append({"rows": rows, "ellipsoids": 100, "dims": 32, **dict(zip(names, times, strict=True))})
        print(found[-1])
    return {"rows": found}


def stored(where: dict[str, Any]) -> dict[str, Any]:
    """The stored parts, if they were measured on the same device, with the same versions and seed; else none."""
    before = load("bench_gpu")
    same = all(before.get(name) == value for name, value in where.items())
    return before.get("parts", {}) if same else {}


PARTS: dict[str, Callable[[int, bool], dict[str, Any]]] = {
    "distances": distances,
    "forward": forward,
    "exact": exact,
    "peers": peers,
    "compile": compiling,
    "graphs": graphs,
}


def main() -> None:
    parser = arguments(__doc__, parts=PARTS)
    parser.add_argument(
        "--first-call", choices=("forward", "warmup"), help="print the seconds of a process's first call"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        model = synthetic(10, 8, options.seed, "cpu", points=500)
        shares = [round(share, 2) for share in rule_shares(model.sepc()(model.points(1000, options.seed + 1)))]
        print(f"no CUDA device: nothing to measure; the four rules on a synthetic model: {shares}")
        return
    if options.first_call:
        report_first_call(options.first_call, options.seed)
        return
    packages = ("torch", "triton", "scikit-learn")
    device = {"device": torch.cuda.get_device_name()}
    parts = stored({**device, "environment": environment(*packages), "seed": options.seed})
    for name in options.only:
        parts[name] = PARTS[name](options.seed, options.smoke)
        torch.cuda.empty_cache()
        if not options.smoke:
            write_results("bench_gpu", options, packages, {**device, "parts": parts}, measured=[name])


if __name__ == "__main__":
    main()
