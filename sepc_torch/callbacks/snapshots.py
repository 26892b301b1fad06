"""A head as plain bytes for a checkpoint, and the weights that it was fitted to."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch.flagging import Head
from sepc_torch.head import TrustHead
from sepc_torch.sepc import SEPC
from sepc_torch.shapes import Float

# Sums over all weights in another order, on another device, differ by less than this; a step of training by more.
_SAME_WEIGHTS = 1e-9


def head_bytes(head: Head) -> Tensor:
    """The head's own file format as a tensor of bytes: no pickle, and ``weights_only`` loading takes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "head.safetensors"
        head.save(path)
        return torch.from_numpy(np.frombuffer(path.read_bytes(), dtype=np.uint8).copy())


def head_from_bytes(data: Tensor, kind: str) -> Head:
    """The head that :func:`head_bytes` wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "head.safetensors"
        path.write_bytes(data.cpu().numpy().tobytes())
        return SEPC.load(path) if kind == "sepc" else TrustHead.load(path)


def head_kind(head: Head) -> str:
    """Which class reads it back."""
    return "sepc" if isinstance(head, SEPC) else "trust_head"


@torch.no_grad()
def fingerprint(module: nn.Module) -> Float[Tensor, "3"]:
    """Three sums over all weights, of their values, sizes and squares: enough to tell whether they are the same."""
    total = torch.zeros(3, dtype=torch.float64)
    for weight in module.parameters():
        if weight.is_floating_point():
            values = weight.detach().double()
            total += torch.stack([values.sum(), values.abs().sum(), values.square().sum()]).cpu()
    return total


def same_weights(a: Float[Tensor, "3"], b: Float[Tensor, "3"]) -> bool:
    """Whether two fingerprints are of the same weights, up to the order of summation."""
    scale = torch.maximum(a, b)[1].clamp_min(1.0)  # the plain sum may cancel, so all are compared on one scale
    return bool(((a - b).abs() <= _SAME_WEIGHTS * scale).all())
