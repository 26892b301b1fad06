"""Speed of minimum-volume ellipsoid layers: the native backend against cvxpylayers, forward and backward.

Claim: native is at least 15 times faster than cvxpylayers at 100 points x 10 dims in batches of 32 and 40 times at
300 x 30, and never more than 1.5 times slower at any size.

    python -m experiments.solvers.bench_layers
    python -m experiments.solvers.bench_layers --gpu    # native alone, batches of 256 on a CUDA device, no cvxpy

CPU times are of one thread, the least of some repeats, for all sets of a batch together. Both backends get the same
points in the same process, and cvxpylayers builds its program before the timing. At 300 x 30 cvxpylayers would take
minutes for a batch of 32. It solves the sets one after the other, so the table holds the time of one set times the
number of sets (marked "scaled"). On the GPU the script takes wall times and synchronises the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from experiments.harness import arguments, cpu_time, wall_time, write_results
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
        "forward_s": min(forward_s),
        "backward_s": min(backward_s),
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
        "outside": outside,
    }


def cpu_rows(options: Any) -> list[dict[str, Any]]:
    rows = []
    for points, dims in SIZES[:1] if options.smoke else SIZES:
        for batch in BATCHES[:2] if options.smoke else BATCHES:
            rows.append(side_by_side(points, dims, batch, options.seed))
            print(rows[-1], flush=True)
    return rows


def gpu_rows(options: Any) -> list[dict[str, Any]]:
    rows = []
    for points, dims in SIZES[:1] if options.smoke else SIZES:
        rows.append(on_gpu(points, dims, GPU_BATCH, options.seed))
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--gpu", action="store_true", help="measure the native backend on a CUDA device instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = gpu_rows(options) if options.gpu else cpu_rows(options)
    if options.smoke:
        return
    if options.gpu:
        device = torch.cuda.get_device_name()
        write_results("bench_layers_gpu", options, ("torch",), {"rows": rows, "device": device})
        return
    found = {(row["points"], row["dims"], row["batch"]): row["ratio"] for row in rows}
    reached = {
        **{f"{m} x {d}, batch {b}: ratio >= {t:.0f}": found[m, d, b] >= t for (m, d, b), t in TARGETS.items()},
        "never more than 1.5 times slower": min(found.values()) >= 1 / 1.5,
    }
    print(reached)
    packages = ("torch", "cvxpy", "cvxpylayers", "diffcp", "scs")
    write_results("bench_layers", options, packages, {"rows": rows, "reached": reached})


if __name__ == "__main__":
    main()
