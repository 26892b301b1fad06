"""Timing and memory measurement on a CUDA device, and the limits of the chip."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from sepc_torch.model.kernels.tables import block_size


def milliseconds(function: Callable[[], Any], heavy: bool = True) -> float:
    """The median time on the device."""
    from triton.testing import do_bench

    warmup, repeat = (5, 40) if heavy else (5, 10)
    return float(do_bench(function, warmup=warmup, rep=repeat, return_mode="median"))


def in_turns(functions: list[Callable[[], Any]], heavy: bool) -> list[float]:
    """Times of several functions, measured in turns. Small shapes depend on the host, so they take the best of five."""
    rounds = [[milliseconds(function, heavy) for function in functions] for _ in range(1 if heavy else 5)]
    return [min(times) for times in zip(*rounds, strict=True)]


def captured(function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A call captured as a CUDA graph, for replays without Python."""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def on_the_device(functions: list[Callable[[], Any]], heavy: bool) -> list[float]:
    """Device times of several functions, replayed from CUDA graphs."""
    graphs = [captured(function) for function in functions]
    return in_turns([graph.replay for graph in graphs], heavy)


def waits(functions: list[Callable[[], Any]], calls: int = 200) -> list[float]:
    """Median milliseconds from the call of each function to its result, host and device together."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(calls):
        for function, seen in zip(functions, times, strict=True):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            function()
            torch.cuda.synchronize()
            seen.append((time.perf_counter() - begun) * 1e3)
    return [statistics.median(seen) for seen in times]


def is_heavy(rows: int, count: int, dim: int) -> bool:
    """Whether the device takes so much longer than the host that the host does not matter."""
    return rows * count * dim**2 > 2e11


def peak_bytes(function: Callable[[], Any]) -> int:
    """Peak memory of a second call, beyond what was allocated before it; includes the result."""
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


def ceilings() -> dict[str, float]:
    """Rates that the chip reaches: a large float16 product in TFLOP/s, and a copy in TB/s."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    numbers = torch.empty(2**29, device="cuda").normal_()
    copy = torch.empty_like(numbers)
    product, moved = milliseconds(lambda: a @ a), milliseconds(lambda: copy.copy_(numbers))
    return {"float16_tflops": 2 * 8192**3 / product / 1e9, "copy_tb_per_s": 2 * numbers.nbytes / moved / 1e9}


def floor_ms(rows: int, count: int, dim: int, ceiling: dict[str, float]) -> float:
    """Least time for the three float16 products of the visited blocks, or for reading points and writing distances."""
    block = block_size(dim)
    blocks = -(-dim // block)
    products = 3 * 2 * rows * count * block**2 * blocks * (blocks + 1) / 2
    moved = 4 * rows * (dim + count)
    return max(products / ceiling["float16_tflops"] / 1e9, moved / ceiling["copy_tb_per_s"] / 1e9)


def tflops(rows: int, count: int, dim: int, ms: float) -> float:
    """Rate of the arithmetic of the formula: two operations per entry of a whitener."""
    return 2 * rows * count * dim**2 / ms / 1e9
