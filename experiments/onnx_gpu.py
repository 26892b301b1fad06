"""Does ONNX Runtime on a CUDA device give the answers of the head, and how fast?

A head for a network with logits is written as ONNX, in float32 and in float64. ONNX Runtime's CUDA provider and the
head on the same device score rows that lie on the device; the head on the CPU scores them too. ``different`` counts
the rows whose answers differ, ``apart`` is the largest difference of a score. A time is the median from a call to its
result, host and device together. ``nodes`` says how many operators of the graph ran on which provider.

The script needs a CUDA device and ``pip install onnxruntime-gpu``, and says so where one is missing.
"""

from __future__ import annotations

import collections
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import arguments, environment, write_results
from onnx_files import differences, made_head
from torch import Tensor

from sepc_torch import HeadPrediction, TrustHead
from sepc_torch.serving.export import OPSET

BATCHES = (1, 1024, 65_536)
# Rows of a call while answers are compared: the graph needs about rows x ellipsoids x dimensions x 8 bytes.
PIECE = 16_384
# TF32, the default of the provider, keeps 10 bits of a float32 product.
CUDA = ("CUDAExecutionProvider", {"use_tf32": "0"})


def cuda_session(path: Path, profile: Path | None = None) -> Any:
    """An ONNX Runtime session on the CUDA device; RuntimeError with the reason where this is not possible."""
    import onnxruntime

    if CUDA[0] not in onnxruntime.get_available_providers():
        raise RuntimeError("onnxruntime has no CUDA provider: pip install onnxruntime-gpu, without onnxruntime.")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
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


def nodes_by_provider(path: Path, rows: dict[str, Tensor], folder: Path) -> dict[str, int]:
    """Number of operators that ran on each provider in one call."""
    session = cuda_session(path, folder / "profile")
    session.run_with_iobinding(bound(session, {name: values[:64] for name, values in rows.items()}))
    events = json.loads(Path(session.end_profiling()).read_text())
    return collections.Counter(
        event["args"]["provider"] for event in events if event.get("cat") == "Node" and event["args"].get("provider")
    )


def compare(head: TrustHead, path: Path, z: np.ndarray, logits: np.ndarray, smoke: bool) -> dict[str, Any]:
    """Write a head as ONNX; return differences of the answers on the device, and times."""
    from gpu_timing import waits

    head.to_onnx(path)
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
        head_ms, onnx_ms = waits(calls, 5 if smoke else 50)
        times[str(size)] = {"torch_ms": head_ms, "onnxruntime_ms": onnx_ms}
    head.cpu()
    return {
        "rows": len(z),
        "from_cuda": differences(got, by_cuda),
        "from_cpu": differences(got, by_cpu),
        "latency": times,
        "nodes": nodes_by_provider(path, rows, path.parent),
    }


def main() -> None:
    options = arguments(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return
    head, rows = made_head(options.smoke, options.seed)
    z, logits = rows(1000 if options.smoke else 100_000)
    found = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for dtype in (torch.float32, torch.float64):
            name = str(dtype).removeprefix("torch.")
            found[name] = compare(head.to(dtype), Path(folder) / f"{name}.onnx", z, logits, options.smoke)
            print(name, json.dumps(found[name]), flush=True)
    if not options.smoke:
        results = {
            "command": "python experiments/onnx_gpu.py",
            "device": torch.cuda.get_device_name(),
            "environment": environment("torch", "onnx", "onnxscript", "onnxruntime-gpu"),
            "seed": options.seed,
            "opset": OPSET,
            "features": head.in_features,
            "classes": len(head.classes),
            "ellipsoids": len(head.sepc.bank),
            "dtypes": found,
        }
        print(f"written: {write_results('onnx_gpu', results).name}")


if __name__ == "__main__":
    main()
