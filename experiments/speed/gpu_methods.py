"""Timing on a CUDA device, the limits of the chip, and other methods for Mahalanobis distances.

The other methods run on the same device, and scikit-learn on the CPU of the same machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sklearn.covariance import EmpiricalCovariance
from torch import Tensor

from experiments.harness import wall_time
from experiments.speed.bench_inference import loop, mixture
from experiments.speed.lone_modules import lone_module
from experiments.speed.synthetic_models import Synthetic, synthetic
from sepc_torch.model.kernels.tables import block_size

# scikit-learn gets fewer rows: rates need no more. Its Mahalanobis distance runs on one core.
MIXTURE_ROWS, COVARIANCE_ROWS = 2**15, 2**11


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


def compare(rows: int, count: int, dim: int, seed: int) -> dict[str, Any]:
    """Times, rows per second and TFLOP/s of every method at one shape."""
    model = synthetic(count, dim, seed, "cuda")
    z = model.points(rows, seed + 1)
    found = {name: _rates(rows, count, dim, milliseconds(partial(method, z))) for name, method in _ours(model).items()}
    found |= {name: _rates(rows, count, dim, ms) for name, ms in _compiled(model, z).items()}
    precisions = model.whiteners.mT @ model.whiteners
    found["loop"] = _rates(rows, count, dim, milliseconds(lambda: loop(z, model.centers, precisions)))
    try:
        detector = _pytorch_ood(z, count)
        found["pytorch_ood"] = _rates(rows, count, dim, milliseconds(lambda: detector.predict_features(z)))
    except ModuleNotFoundError as missing:
        print(f"left out: {missing}")
    for name, measure, most in (("mixture", _mixture, MIXTURE_ROWS), ("covariance", _covariance, COVARIANCE_ROWS)):
        found[name] = _rates(min(rows, most), count, dim, measure(model, z[:most]))
    print(found, flush=True)
    return {"rows": rows, "ellipsoids": count, "dims": dim, "methods": found}


def _rates(rows: int, count: int, dim: int, ms: float) -> dict[str, Any]:
    return {"rows": rows, "ms": ms, "rows_per_second": rows / ms * 1e3, "tflops": tflops(rows, count, dim, ms)}


def _ours(model: Synthetic) -> dict[str, Callable[[Tensor], Any]]:
    return {"distances": model.bank("triton"), "forward": model.sepc("triton"), "eager": model.bank("torch")}


def _compiled(model: Synthetic, z: Tensor) -> dict[str, float]:
    centers, whiteners = model.centers, model.whiteners

    def formula(points: Tensor) -> Tensor:
        return torch.linalg.vector_norm(torch.bmm(points - centers[:, None, :], whiteners.mT), dim=2).T

    def in_pieces(compiled: Callable[[Tensor], Tensor]) -> None:
        for piece in z.split(2**16):  # the offsets of all rows to all ellipsoids would not fit
            compiled(piece)

    found = {}
    for name, precision in (("compile", "highest"), ("compile_tf32", "high")):
        torch.set_float32_matmul_precision(precision)
        torch.compiler.reset()  # a second shape would else be compiled for all shapes
        found[name] = milliseconds(partial(in_pieces, torch.compile(formula, dynamic=False)))
    torch.set_float32_matmul_precision("highest")
    return found


def _pytorch_ood(z: Tensor, classes: int) -> Any:
    """The detector fitted to points with as many classes as there are ellipsoids; what they are does not matter."""
    fitted_to = z[: max(2**14, 2 * classes)]
    labels = torch.arange(len(fitted_to), device=z.device) % classes
    return lone_module("pytorch_ood.detector.mahalanobis").Mahalanobis(None).fit_features(fitted_to, labels)


def _mixture(model: Synthetic, z: Tensor) -> float:
    other, points = mixture(model.centers.cpu().numpy(), model.whiteners.cpu().numpy()), z.cpu().numpy()
    return 1e3 * min(wall_time(lambda: other.score_samples(points), 3)[0])


def _covariance(model: Synthetic, z: Tensor) -> float:
    points = z.double().cpu().numpy()
    others = []
    for center, precision in zip(
        model.centers.double(), model.whiteners.double().mT @ model.whiteners.double(), strict=True
    ):
        one = EmpiricalCovariance()
        one.location_, one.precision_ = center.cpu().numpy(), precision.cpu().numpy()
        others.append(one)
    return 1e3 * min(wall_time(lambda: [one.mahalanobis(points) for one in others], 3)[0])
