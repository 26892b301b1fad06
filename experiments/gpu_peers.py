"""Other methods for Mahalanobis distances: on the same device, and scikit-learn on the CPU of the same machine."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_inference import loop, mixture
from gpu_timing import milliseconds, tflops
from lone_modules import lone_module
from sklearn.covariance import EmpiricalCovariance
from synthetic_models import Synthetic, synthetic
from torch import Tensor

# scikit-learn gets fewer rows: rates need no more. Its Mahalanobis distance runs on one core.
MIXTURE_ROWS, COVARIANCE_ROWS = 2**15, 2**11


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
    for name, rate in found.items():
        print(
            f"{rows:8d} x {count:4d} x {dim:3d}  {name:12s} {rate['ms']:9.3f} ms for {rate['rows']:7d} rows  "
            f"{rate['rows_per_second']:.3g} rows/s  {rate['tflops']:.3g} TFLOP/s",
            flush=True,
        )
    return {"rows": rows, "ellipsoids": count, "dims": dim, "methods": found}


def what_they_are() -> dict[str, str]:
    """What is computed under each name, for the JSON."""
    found = {
        "distances": "ours, all distances",
        "forward": "ours, the whole forward",
        "eager": "the same module with kernel='torch'",
        "compile": "torch.compile of the formula, float32",
        "compile_tf32": "torch.compile of the formula, TF32",
        "loop": "a loop over the ellipsoids with their precision matrices",
        "mixture": "sklearn.mixture.GaussianMixture.score_samples, float32, all cores",
        "covariance": "sklearn.covariance.EmpiricalCovariance.mahalanobis for each ellipsoid, float64, one core",
    }
    try:
        package = Path(lone_module("pytorch_ood.detector.mahalanobis").__file__).parents[1]
    except ModuleNotFoundError:
        return found
    tree = ast.parse((package / "__init__.py").read_text())
    version = next(
        ast.literal_eval(line.value)
        for line in tree.body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "__version__"
    )
    text = f"pytorch_ood.detector.Mahalanobis {version}, a loop over the classes with one matrix for all of them"
    return {**found, "pytorch_ood": text}


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
    return _cpu_milliseconds(lambda: other.score_samples(points))


def _covariance(model: Synthetic, z: Tensor) -> float:
    points = z.double().cpu().numpy()
    others = []
    for center, precision in zip(
        model.centers.double(), model.whiteners.double().mT @ model.whiteners.double(), strict=True
    ):
        one = EmpiricalCovariance()
        one.location_, one.precision_ = center.cpu().numpy(), precision.cpu().numpy()
        others.append(one)
    return _cpu_milliseconds(lambda: [one.mahalanobis(points) for one in others])


def _cpu_milliseconds(function: Callable[[], Any]) -> float:
    """The best of three; the first call loads what is not loaded yet."""
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - begun))
    return min(times)
