"""How large and how fast is a head in ONNX Runtime, beside the head itself, and are the answers identical?

A head for a network with logits is written as ONNX, in float32 and in float64. ONNX Runtime and torch score the same
rows on one thread of the CPU. Latency is the median CPU time of a call, after a warm-up.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.harness import arguments, write_results
from sepc_torch import HeadPrediction, TrustHead, to_onnx
from sepc_torch.serving.export import OPSET

BATCHES = (1, 32, 1024)
# Fields whose values must not differ at all, and those that are compared by their largest difference.
EXACT = ("label", "rule", "network_label", "accept", "p_value", "class_p_value")
CLOSE = ("confidence", "nonconformity", "joint")


def made_head(smoke: bool, seed: int) -> tuple[TrustHead, Callable[[int], tuple[np.ndarray, np.ndarray]]]:
    """A calibrated head, and a function that draws rows: embeddings and logits."""
    features, classes, train = (8, 3, 300) if smoke else (128, 10, 4000)
    rng = np.random.default_rng(seed)
    centres = 2.0 * rng.normal(size=(classes, features)) / np.sqrt(features / 8)

    def labelled(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        y = rng.integers(0, classes, count)
        z = rng.normal(size=(count, features)) + centres[y]
        return z, y, -((z[:, None] - centres) ** 2).sum(axis=2) / 2 + rng.normal(size=(count, classes))

    def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
        parts = [labelled(min(4096, count - start)) for start in range(0, count, 4096)]
        z, _, logits = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        z[::5] *= 3.0  # a fifth of the rows are far from the training points
        return z, logits

    z, y, _ = labelled(train)
    head = TrustHead.fit(z, y, dim=4 if smoke else None, reference_points=100 if smoke else 2000, progress=False)
    return head.calibrate(*labelled(100 if smoke else 2000)), rows


def latency(function: Callable[[], object], seconds: float) -> float:
    """The median CPU time of a call in milliseconds, over calls of at least ``seconds`` together."""
    function()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 5:
        begun = time.process_time()
        function()
        times.append(time.process_time() - begun)
    return 1e3 * float(np.median(times))


def differences(got: HeadPrediction, want: HeadPrediction) -> dict[str, dict[str, float]]:
    """Rows whose answers differ in each exact field, and the largest difference of each score."""
    return {
        "different": {name: int((getattr(got, name) != getattr(want, name)).sum()) for name in EXACT},
        "apart": {name: float((getattr(got, name) - getattr(want, name)).abs().max()) for name in CLOSE},
    }


def compare(head: TrustHead, path: Path, z: np.ndarray, logits: np.ndarray, smoke: bool) -> dict[str, Any]:
    """Write a head as ONNX; return seconds of the export, sizes, differences of the answers and latencies."""
    import onnxruntime

    seconds = 0.1 if smoke else 2.0
    begun = time.process_time()
    to_onnx(head, path)
    export = time.process_time() - begun
    head.save(path.with_suffix(".safetensors"))
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    dtype = head.projection.shift.dtype
    rows = {"z": torch.from_numpy(z).to(dtype), "logits": torch.from_numpy(logits).to(dtype)}
    given = {name: values.numpy() for name, values in rows.items()}
    parts = [
        session.run(None, {name: values[start : start + 1024] for name, values in given.items()})
        for start in range(0, len(z), 1024)
    ]
    got = HeadPrediction(*(torch.from_numpy(np.concatenate(columns)) for columns in zip(*parts, strict=True)))
    want = head.judge(rows["z"], rows["logits"])
    times = {}
    for size in BATCHES:
        some = {name: values[:size] for name, values in rows.items()}
        arrays = {name: values[:size] for name, values in given.items()}
        times[str(size)] = {
            "torch_ms": latency(partial(head, **some), seconds),
            "onnxruntime_ms": latency(partial(session.run, None, arrays), seconds),
        }
    return {
        "export_cpu_s": export,
        "onnx_bytes": path.stat().st_size,
        "safetensors_bytes": path.with_suffix(".safetensors").stat().st_size,
        "rows": len(z),
        **differences(got, want),
        "latency": times,
    }


def by_dtype(
    compare: Callable[[TrustHead, Path, np.ndarray, np.ndarray, bool], dict[str, Any]], smoke: bool, seed: int
) -> dict[str, Any]:
    """What a comparison finds for a head in float64 and, unless ``smoke``, in float32; and the size of the head."""
    head, rows = made_head(smoke, seed)
    z, logits = rows(1000 if smoke else 100_000)
    found = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for dtype in (torch.float64,) if smoke else (torch.float32, torch.float64):
            name = str(dtype).removeprefix("torch.")
            found[name] = compare(head.to(dtype), Path(folder) / f"{name}.onnx", z, logits, smoke)
            print(name, found[name], flush=True)
    size = {"features": head.in_features, "classes": len(head.classes), "ellipsoids": len(head.sepc.bank)}
    return {"opset": OPSET, **size, "dtypes": found}


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    results = by_dtype(compare, options.smoke, options.seed)
    if any(results["dtypes"]["float64"]["different"].values()):
        raise SystemExit("ONNX Runtime does not give the answers of the head in float64.")
    if not options.smoke:
        write_results("onnx_files", options, ("torch", "onnx", "onnxscript", "onnxruntime"), results)


if __name__ == "__main__":
    main()
