"""Speed and memory of batched distances on the CPU, compared with other methods in the same process.

Claim: ``EllipsoidBank`` is at least 5 times faster than a loop over classes that forms an N x N product to take its
diagonal, and faster than scikit-learn's ``GaussianMixture`` density with as many components, in less memory.

    python -m experiments.speed.bench_inference

``n_by_n`` is the loop with the N x N product, as in pytorch-ood until its issue 146. ``loop`` is the loop over classes
without the product, as in pytorch-ood 0.4.0, here with a matrix per class. ``mixture`` is scikit-learn. All methods get
float32 and the same centres and matrices. The script checks that the distances agree to float32's accuracy.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.mixture import GaussianMixture
from torch import Tensor

from experiments.harness import arguments, wall_time, write_results
from experiments.provenance import ROOT
from sepc_torch import EllipsoidBank
from sepc_torch.ellipsoid import triangular_whitener

SIZES = [(2000, 10, 16), (2000, 10, 64), (2000, 100, 32), (20_000, 10, 32), (20_000, 100, 32), (100_000, 128, 64)]
SMOKE = [(200, 10, 8)]
# With more rows the N x N product does not fit into the memory of a small machine.
MOST_ROWS_N_BY_N = 20_000


def loop(z: Tensor, centers: Tensor, precisions: Tensor) -> Tensor:
    """Distances by a loop over classes, without the N x N product."""
    scores = []
    for center, precision in zip(centers, precisions, strict=True):
        centred = z - center
        scores.append(((centred @ precision) * centred).sum(dim=1))
    return torch.stack(scores, dim=1).sqrt()


def n_by_n(z: Tensor, centers: Tensor, precisions: Tensor) -> Tensor:
    """Distances by a loop over classes that takes the diagonal of an N x N product."""
    scores = []
    for center, precision in zip(centers, precisions, strict=True):
        centred = z - center
        scores.append(torch.diag(centred @ precision @ centred.T))
    return torch.stack(scores, dim=1).sqrt()


def mixture(centers: np.ndarray, whiteners: np.ndarray) -> GaussianMixture:
    """A mixture with the given components, as if fitted."""
    model = GaussianMixture(len(centers), covariance_type="full")
    model.means_ = centers
    model.precisions_cholesky_ = whiteners.transpose(0, 2, 1).copy()
    model.weights_ = np.full(len(centers), 1 / len(centers), dtype=centers.dtype)
    model.covariances_ = np.empty_like(whiteners)
    return model


def peak_bytes(kind: str, rows: int, count: int, dim: int, seed: int) -> int:
    """The largest growth of a fresh process's resident memory while it evaluates one method."""
    given = ["--peak-of", kind, *map(str, (rows, count, dim)), "--seed", str(seed)]
    command = [sys.executable, "-m", "experiments.speed.bench_inference", *given]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()[-1])


def report_peak(kind: str, rows: int, count: int, dim: int, rng: np.random.Generator) -> None:
    methods, z = prepare(rows, count, dim, rng)
    methods[kind](z[:10])  # the first call loads libraries
    before = most = resident_bytes()
    worker = threading.Thread(target=methods[kind], args=(z,))
    worker.start()
    while worker.is_alive():
        most = max(most, resident_bytes())
        time.sleep(2e-4)
    print(most - before)


def resident_bytes() -> int:
    """The resident memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def prepare(
    rows: int, count: int, dim: int, rng: np.random.Generator
) -> tuple[dict[str, Callable[[Tensor], Any]], Tensor]:
    """All methods with the same centres and matrices, and points to evaluate them on."""
    centers = rng.normal(size=(count, dim)).astype(np.float32)
    factors = np.eye(dim) + 0.3 * rng.normal(size=(count, dim, dim)) / np.sqrt(dim)
    whiteners = np.stack([triangular_whitener(factor) for factor in factors]).astype(np.float32)
    bank = EllipsoidBank(torch.from_numpy(centers), torch.from_numpy(whiteners))
    precisions = bank.whiteners.mT @ bank.whiteners
    other = mixture(centers, whiteners)
    methods: dict[str, Callable[[Tensor], Any]] = {
        "bank": bank,
        "n_by_n": lambda z: n_by_n(z, bank.centers, precisions),
        "loop": lambda z: loop(z, bank.centers, precisions),
        "mixture": lambda z: other.score_samples(z.numpy()),
    }
    z = torch.from_numpy(rng.normal(size=(rows, dim)).astype(np.float32))
    exact = EllipsoidBank(bank.centers.double(), bank.whiteners.double())(z[:200].double())
    for kind in ("bank", "n_by_n", "loop"):
        assert torch.allclose(methods[kind](z[:200]).double(), exact, rtol=1e-4), kind
    return methods, z


def measure(rows: int, count: int, dim: int, rng: np.random.Generator, repeats: int, seed: int) -> dict[str, Any]:
    methods, z = prepare(rows, count, dim, rng)
    if rows > MOST_ROWS_N_BY_N or rows * rows * count > 2e10:
        del methods["n_by_n"]
    row: dict[str, Any] = {"rows": rows, "ellipsoids": count, "dims": dim}
    for kind, method in methods.items():
        times, _ = wall_time(partial(method, z), 2 if kind == "n_by_n" else repeats + 1)
        row[f"{kind}_s"] = float(np.median(times[1:]))
        row[f"{kind}_bytes"] = peak_bytes(kind, rows, count, dim, seed)
        row[f"ratio_{kind}"] = row[f"{kind}_s"] / row["bank_s"]
    row["rows_per_second"] = rows / row["bank_s"]
    return row


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--peak-of", nargs=4, metavar=("METHOD", "ROWS", "K", "D"), help="print one method's memory")
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    torch.set_num_threads(1)
    if options.peak_of:
        kind, rows, count, dim = options.peak_of
        report_peak(kind, int(rows), int(count), int(dim), rng)
        return
    results = []
    for size in SMOKE if options.smoke else SIZES:
        results.append(measure(*size, rng, repeats=2 if options.smoke else 5, seed=options.seed))
        print(results[-1], flush=True)
    if options.smoke:
        return
    reached = {
        "5x over the loop with the N x N product": all(r.get("ratio_n_by_n", 5) >= 5 for r in results),
        "faster than GaussianMixture": all(r["ratio_mixture"] > 1 for r in results),
    }
    print(reached)
    write_results("bench_inference", options, ("torch", "scikit-learn"), {"rows": results, "reached": reached})


if __name__ == "__main__":
    main()
