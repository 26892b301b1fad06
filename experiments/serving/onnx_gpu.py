"""Does ONNX Runtime on a CUDA device give the answers of the head, and how fast?

A head for a network with logits is written as ONNX, in float32 and in float64. ONNX Runtime's CUDA provider and the
head on the same device score rows that lie on the device; the head on the CPU scores them too. ``different`` counts
the rows whose answers differ, ``apart`` is the largest difference of a score. A time is the median from a call to its
result, host and device together.

The script needs a CUDA device and ``pip install onnxruntime-gpu``, and says so where one is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.harness import arguments, wall_time, write_results
from experiments.serving.onnx_files import by_dtype, differences
from sepc_torch import HeadPrediction, TrustHead, to_onnx

BATCHES = (1, 1024, 65_536)
# Rows of a call while answers are compared: the graph needs about rows x ellipsoids x dimensions x 8 bytes.
PIECE = 16_384
# TF32, the default of the provider, keeps 10 bits of a float32 product.
CUDA = ("CUDAExecutionProvider", {"use_tf32": "0"})


def cuda_session(path: Path) -> Any:
    """An ONNX Runtime session on the CUDA device; RuntimeError with the reason where this is not possible."""
    import onnxruntime

    if CUDA[0] not in onnxruntime.get_available_providers():
        raise RuntimeError("onnxruntime has no CUDA provider: pip install onnxruntime-gpu, without onnxruntime.")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=[CUDA, "CPUExecutionProvider"])
    if CUDA[0] not in session.get_providers():
        raise RuntimeError(
            "ONNX Runtime found no usable CUDA device or CUDA libraries of another version; torch and onnxruntime-gpu "
            "must be built for one CUDA version."
        )
    return session


def bound(session: Any, rows: dict[str, Tensor]) -> Any:
    """Inputs and outputs of a call that stay on the device."""
    binding = session.io_binding()
    for name, values in rows.items():
        dtype = np.float64 if values.dtype == torch.float64 else np.float32
        binding.bind_input(name, "cuda", 0, dtype, tuple(values.shape), values.data_ptr())
    for output in session.get_outputs():
        binding.bind_output(output.name, "cuda")
    return binding


def answers(session: Any, rows: dict[str, Tensor]) -> HeadPrediction:
    """The answers of a session for rows on the device, on the CPU."""
    parts = []
    for start in range(0, len(rows["z"]), PIECE):
        piece = {name: values[start : start + PIECE].contiguous() for name, values in rows.items()}
        torch.cuda.synchronize()  # ONNX Runtime has a stream of its own
        binding = bound(session, piece)
        session.run_with_iobinding(binding)
        parts.append(binding.copy_outputs_to_cpu())
    return HeadPrediction(*(torch.from_numpy(np.concatenate(columns)) for columns in zip(*parts, strict=True)))


def compare(head: TrustHead, path: Path, z: np.ndarray, logits: np.ndarray, smoke: bool) -> dict[str, Any]:
    """Write a head as ONNX; return differences of the answers on the device, and times."""
    to_onnx(head, path)
    session = cuda_session(path)
    dtype = head.projection.shift.dtype
    on_cpu = {name: torch.from_numpy(values).to(dtype) for name, values in (("z", z), ("logits", logits))}
    rows = {name: values.cuda() for name, values in on_cpu.items()}
    got = answers(session, rows)
    by_cpu = head.judge(on_cpu["z"], on_cpu["logits"])
    on_device = head.cuda()
    by_cuda = on_device.judge(rows["z"], rows["logits"])
    times = {}
    for size in BATCHES[:2] if smoke else BATCHES:
        some = {name: values[:size].contiguous() for name, values in rows.items()}
        calls: list[Callable[[], Any]] = [
            partial(on_device, some["z"], logits=some["logits"]),
            partial(session.run_with_iobinding, bound(session, some)),
        ]
        for call in calls:
            call()
        head_ms, onnx_ms = (1e3 * median(wall_time(call, 5 if smoke else 50)[0]) for call in calls)
        times[str(size)] = {"torch_ms": head_ms, "onnxruntime_ms": onnx_ms}
    head.cpu()
    return {
        "rows": len(z),
        "from_cuda": differences(got, by_cuda),
        "from_cpu": differences(got, by_cpu),
        "latency": times,
    }


def main() -> None:
    options = arguments(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return
    results = by_dtype(compare, options.smoke, options.seed)
    if not options.smoke:
        results["device"] = torch.cuda.get_device_name()
        write_results("onnx_gpu", options, ("torch", "onnx", "onnxscript", "onnxruntime-gpu"), results)


if __name__ == "__main__":
    main()
