"""Distances on a CUDA device: the fused kernel, plain torch, torch.compile and a loop over classes, side by side.

Claims: with float32's accuracy (relative error at most 1e-5 against float64) the kernel is at least 6 times faster than
eager float32 and 3 times faster than torch.compile at 2^20 rows, 128 ellipsoids and 64 dims, and at no shape more than
10 % slower than the plain operator.

    python experiments/bench_gpu.py

Times are medians on the device, output allocated anew in each call, for the whole ``EllipsoidBank.forward``. ``floor``
is the time that the chip would need for the three float16 products of the blocks visited, at the rate that one large
float16 product reaches in the same run, or for reading the points and writing the distances once, whichever is more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from bench_inference import loop
from harness import arguments, environment, write_results
from torch import Tensor

from sepc_torch.bank import EllipsoidBank
from sepc_torch.kernels.splitting import block_size

HEADLINE = (2**20, 128, 64)
DIMS, COUNTS, ROWS = (8, 16, 32, 64, 128, 256), (1, 10, 100, 1000), (1, 1000, 2**20)
# Above so many multiplications the reference takes a second: fewer rows tell the same.
MOST_WORK = 3e12


def bank(count: int, dim: int, kernel: str, seed: int, dtype: torch.dtype = torch.float32) -> EllipsoidBank:
    """Ellipsoids with axes of different lengths around the origin."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(count, dim, generator=generator)
    whiteners = torch.randn(count, dim, dim, generator=generator).triu() / dim**0.5 + torch.eye(dim)
    whiteners *= (2.0 * torch.rand(count, dim, 1, generator=generator)).exp()
    made = EllipsoidBank(centers, whiteners, torch.zeros(dim), kernel=kernel)  # type: ignore[arg-type]
    return made.to("cuda", dtype)


def milliseconds(function: Callable[[], Any], heavy: bool) -> float:
    from triton.testing import do_bench

    warmup, repeat = (5, 40) if heavy else (10, 25)
    return float(do_bench(function, warmup=warmup, rep=repeat, return_mode="median"))


def side_by_side(first: Callable[[], Any], second: Callable[[], Any], heavy: bool) -> tuple[float, float]:
    """The times of two functions. Small shapes wait for the host, which has slow spells: in turns, the best of six."""
    rounds = [(milliseconds(first, heavy), milliseconds(second, heavy)) for _ in range(1 if heavy else 6)]
    return min(a for a, _ in rounds), min(b for _, b in rounds)


def ceilings() -> dict[str, float]:
    """What this chip reaches: a large float16 product in TFLOP/s, and a copy in TB/s."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    numbers = torch.empty(2**29, device="cuda").normal_()
    copy = torch.empty_like(numbers)
    product, moved = milliseconds(lambda: a @ a, True), milliseconds(lambda: copy.copy_(numbers), True)
    return {"float16_tflops": 2 * 8192**3 / product / 1e9, "copy_tb_per_s": 2 * numbers.nbytes / moved / 1e9}


def floor_ms(rows: int, count: int, dim: int, ceiling: dict[str, float]) -> float:
    block = block_size(dim)
    blocks = -(-dim // block)
    products = 3 * 2 * rows * count * block**2 * blocks * (blocks + 1) / 2
    moved = 4 * rows * (dim + count)
    return max(products / ceiling["float16_tflops"] / 1e9, moved / ceiling["copy_tb_per_s"] / 1e9)


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float(((found - exact).abs() / exact).max())


def measure(rows: int, count: int, dim: int, seed: int, ceiling: dict[str, float]) -> dict[str, Any]:
    heavy = rows * count * dim**2 > 2e11
    if rows * count * dim**2 > MOST_WORK:
        rows = 2**17
    z = torch.randn(rows, dim, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    fused, plain = (bank(count, dim, kernel, seed) for kernel in ("triton", "torch"))
    exact = bank(count, dim, "torch", seed, torch.float64)(z[:500].double())
    kernel_ms, torch_ms = side_by_side(lambda: fused(z), lambda: plain(z), heavy)
    row = {
        "rows": rows,
        "ellipsoids": count,
        "dims": dim,
        "kernel_ms": kernel_ms,
        "torch_ms": torch_ms,
        "ratio": torch_ms / kernel_ms,
        "tflops": 2 * rows * count * dim**2 / kernel_ms / 1e9,
        "rows_per_second": rows / kernel_ms * 1e3,
        "floor_ms": floor_ms(rows, count, dim, ceiling),
        "error": relative_error(fused(z[:500]), exact),
        "torch_error": relative_error(plain(z[:500]), exact),
    }
    print(
        f"{rows:8d} x {count:4d} x {dim:3d}  kernel {kernel_ms:9.3f} ms  torch {torch_ms:9.3f} ms  "
        f"x {row['ratio']:5.2f}  error {row['error']:.1e}  floor {row['floor_ms']:.3f} ms",
        flush=True,
    )
    return row


def others(rows: int, count: int, dim: int, seed: int) -> dict[str, float]:
    """Other ways to the same distances: torch.compile of the plain formula, and a loop over classes."""
    z = torch.randn(rows, dim, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    plain = bank(count, dim, "torch", seed)
    centers, whiteners = plain.offsets, plain.whiteners
    precisions = whiteners.mT @ whiteners

    def formula(points: Tensor) -> Tensor:
        return torch.linalg.vector_norm(torch.bmm(points - centers[:, None, :], whiteners.mT), dim=2).T

    compiled = torch.compile(formula)
    found = {}
    for name, precision in (("compile", "highest"), ("compile_tf32", "high")):
        torch.set_float32_matmul_precision(precision)
        # Pieces, since the offsets of all rows to all ellipsoids would not fit.
        found[f"{name}_ms"] = milliseconds(lambda: [compiled(piece) for piece in z.split(2**16)], heavy=True)
    torch.set_float32_matmul_precision("highest")
    found["loop_ms"] = milliseconds(lambda: loop(z, centers, precisions), heavy=True)
    return found


def main() -> None:
    options = arguments(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return
    ceiling = ceilings()
    print({name: round(value, 2) for name, value in ceiling.items()})
    shapes = [HEADLINE] if options.smoke else [HEADLINE, *itertools.product(ROWS, COUNTS, DIMS)]
    rows = [measure(*shape, options.seed, ceiling) for shape in shapes]
    compared = others(*HEADLINE, options.seed)
    print({name: round(value, 2) for name, value in compared.items()})
    if options.smoke:
        return
    results = {
        "command": "python experiments/bench_gpu.py",
        "environment": environment("torch", "triton"),
        "device": torch.cuda.get_device_name(),
        "seed": options.seed,
        "ceilings": ceiling,
        "rows": rows,
        "others": compared,
    }
    print(f"written: {write_results('bench_gpu', results).name}")


if __name__ == "__main__":
    main()
