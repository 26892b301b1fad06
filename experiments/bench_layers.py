"""Speed of minimum-volume ellipsoid layers: the native backend against cvxpylayers, forward and backward.

Claim: native is at least 15 times faster than cvxpylayers at 100 points x 10 dims in batches of 32 and 40 times at
300 x 30, and never more than 1.5 times slower at any size.

    python experiments/bench_layers.py
    python experiments/bench_layers.py --gpu      # native alone, batches of 256 on a CUDA device; needs no cvxpy

CPU times are of one thread, the least of some repeats, for all sets of a batch together. Both backends get the same
points in the same process, and cvxpylayers builds its program before the timing. At 300 x 30 cvxpylayers would take
minutes for a batch of 32. It solves the sets one after the other, so the table holds the time of one set times the
number of sets (marked "scaled"). On the GPU the script takes wall times and synchronises the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from typing import Any

import numpy as np
import torch
from harness import arguments, cpu_time, environment, write_results

from sepc_torch.layers import MVELayer

SIZES = [(30, 2), (100, 5), (100, 10), (300, 30)]
BATCHES = [1, 8, 32]
GPU_BATCH = 256
# cvxpylayers runs whole batches up to this many numbers; for more, the time of one set is scaled.
MEASURED = 80_000
TARGETS = {(100, 10, 32): 15.0, (300, 30, 1): 40.0, (300, 30, 8): 40.0, (300, 30, 32): 40.0}


def steps(layer: MVELayer, z: torch.Tensor, seed: int) -> tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]:
    """Functions that run the forward and the backward pass of a random linear function of centre and whitener."""
    generator = torch.Generator().manual_seed(seed)
    dim = z.shape[-1]
    a = torch.randn(dim, dim, generator=generator, dtype=torch.float64).to(z.device)
    b = torch.randn(dim, generator=generator, dtype=torch.float64).to(z.device)

    def backward(e: Any) -> torch.Tensor:
        return torch.autograd.grad((a * e.whitener).sum() + (b * e.center).sum(), z, retain_graph=True)[0]

    return lambda: layer(z), backward


def measure(layer: MVELayer, z: torch.Tensor, seed: int, repeats: int) -> dict[str, Any]:
    forward, backward = steps(layer, z, seed)
    forward_s, e = cpu_time(forward, repeats)
    backward_s, grad = cpu_time(lambda: backward(e), repeats)
    return {"forward_s": forward_s, "backward_s": backward_s, "gradient": grad, "log_volume": e.log_volume().detach()}


def side_by_side(points: int, dims: int, batch: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng([seed, points, dims, batch])
    z = torch.from_numpy(rng.normal(size=(batch, points, dims)) @ rng.normal(size=(dims, dims))).requires_grad_()
    stated = MVELayer(points, dims, backend="cvxpylayers")
    stated(z[:1].detach())  # builds the program
    native = measure(MVELayer(points, dims), z, seed, repeats=7)
    whole = batch * points * dims <= MEASURED
    part = z if whole else z[:1].detach().requires_grad_()
    theirs = measure(stated, part, seed, repeats=3 if points * dims <= 1000 else 1)
    times = 1 if whole else batch
    row: dict[str, Any] = {"points": points, "dims": dims, "batch": batch, "scaled": not whole}
    for step in ("forward_s", "backward_s"):
        row[f"native_{step}"], row[f"cvxpylayers_{step}"] = native[step], theirs[step] * times
    row["ratio"] = (row["cvxpylayers_forward_s"] + row["cvxpylayers_backward_s"]) / (
        row["native_forward_s"] + row["native_backward_s"]
    )
    ours = native["gradient"][: len(part)]
    row["gradient_difference"] = float((ours - theirs["gradient"]).norm() / ours.norm())
    row["log_volume_difference"] = float((native["log_volume"][: len(part)] - theirs["log_volume"]).abs().max())
    return row


def wall_time(function: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    best = np.inf
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        result = function()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return float(best), result


def on_gpu(points: int, dims: int, batch: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng([seed, points, dims, batch])
    z = torch.from_numpy(rng.normal(size=(batch, points, dims)) @ rng.normal(size=(dims, dims))).cuda().requires_grad_()
    forward, backward = steps(MVELayer(points, dims), z, seed)
    backward(forward())  # the first call loads libraries
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward_s, e = wall_time(forward, 5)
    backward_s, _ = wall_time(lambda: backward(e), 5)
    outside = float(e.distance(z).detach().max()) - 1.0
    return {
        "points": points,
        "dims": dims,
        "batch": batch,
        "forward_s": forward_s,
        "backward_s": backward_s,
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
        "outside": outside,
    }


def machine() -> dict[str, Any]:
    """Versions and machine; a machine with only torch and NumPy has no version of SciPy."""
    try:
        return environment("torch")
    except PackageNotFoundError:
        return {"torch": torch.__version__, "numpy": np.__version__}


def cpu_rows(options: Any) -> list[dict[str, Any]]:
    rows = []
    print("points  dims batch    native fwd + bwd      cvxpylayers fwd + bwd     ratio  gradients differ by")
    for points, dims in SIZES[:1] if options.smoke else SIZES:
        for batch in BATCHES[:2] if options.smoke else BATCHES:
            row = side_by_side(points, dims, batch, options.seed)
            rows.append(row)
            ours, theirs = (
                f"{row[f'{name}_forward_s'] * 1e3:8.1f} + {row[f'{name}_backward_s'] * 1e3:6.1f} ms"
                for name in ("native", "cvxpylayers")
            )
            mark = "*" if row["scaled"] else " "
            print(
                f"{points:6d} {dims:5d} {batch:5d} {ours}  {theirs:>24s}{mark} {row['ratio']:7.1f}"
                f" {row['gradient_difference']:12.1e}",
                flush=True,
            )
    return rows


def gpu_rows(options: Any) -> list[dict[str, Any]]:
    rows = []
    print(f"{torch.cuda.get_device_name()}\npoints  dims batch     fwd       bwd    peak MiB")
    for points, dims in SIZES[:1] if options.smoke else SIZES:
        row = on_gpu(points, dims, GPU_BATCH, options.seed)
        rows.append(row)
        times = f"{row['forward_s'] * 1e3:7.1f}ms {row['backward_s'] * 1e3:7.1f}ms"
        print(f"{points:6d} {dims:5d} {GPU_BATCH:5d} {times} {row['peak_bytes'] / 2**20:8.0f}", flush=True)
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--gpu", action="store_true", help="measure the native backend on a CUDA device instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = gpu_rows(options) if options.gpu else cpu_rows(options)
    if options.smoke:
        return
    results: dict[str, Any] = {"seed": options.seed, "rows": rows}
    if options.gpu:
        results["device"] = torch.cuda.get_device_name()
        results |= {"command": "python experiments/bench_layers.py --gpu", "environment": machine()}
    else:
        found = {(row["points"], row["dims"], row["batch"]): row["ratio"] for row in rows}
        results["reached"] = {
            **{f"{m} x {d}, batch {b}: ratio >= {t:.0f}": found[m, d, b] >= t for (m, d, b), t in TARGETS.items()},
            "never more than 1.5 times slower": min(found.values()) >= 1 / 1.5,
        }
        for claim, holds in results["reached"].items():
            print(("reached  " if holds else "MISSED   ") + claim)
        packages = ("torch", "cvxpy", "cvxpylayers", "diffcp", "scs")
        results |= {"command": "python experiments/bench_layers.py", "environment": environment(*packages)}
    print(f"written: {write_results('bench_layers_gpu' if options.gpu else 'bench_layers', results).name}")


if __name__ == "__main__":
    main()
