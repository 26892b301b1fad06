"""The head in use: where it comes from, which weights it belongs to, and how it travels in a checkpoint."""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch.head.trust_head import TrustHead
from sepc_torch.model.sepc import SEPC
from sepc_torch.shapes import Float
from sepc_torch.training.flagging import Head, in_features
from sepc_torch.training.lightning.distributed import RankZeroError, Rows
from sepc_torch.training.lightning.refitting import fit_head

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


class HeadKeeper:
    """A head, when it was fitted, and how often that succeeded."""

    def __init__(self, head: Head | None) -> None:
        self.head = head
        self.fit_epoch, self.fit_step = -1, -1
        self.refits, self.failures = 0, 0
        self.seconds = math.nan  # none yet
        self.rows: Rows = {}
        self._weights: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "rows": {}}

    def refit(self, trainer: Any, module: Any, rows: Rows, fit: Any, stop: bool) -> bool:
        """Fit a new head to rows; where that fails, keep the old one and warn, or stop."""
        begun = time.perf_counter()
        try:
            # Kept on the CPU here; it follows the embeddings to their device when it judges.
            self.head = fit_head(trainer, rows, fit)
        except RankZeroError as error:
            if stop:
                raise
            self.failures += 1
            kept = "the head of before stays" if self.head is not None else "there is no head yet"
            if trainer.is_global_zero:
                warnings.warn(f"{error} Training goes on; {kept}.", stacklevel=2)
            return False
        self.seconds = time.perf_counter() - begun
        self.rows = rows
        self.fit_epoch, self.fit_step = int(trainer.current_epoch), int(trainer.global_step)
        self.refits += 1
        self._weights = fingerprint(module)
        return True

    def on(self, device: torch.device) -> Head:
        """The head on a device."""
        assert self.head is not None
        self.head = self.head.to(device)
        return self.head

    def is_stale(self, module: Any) -> bool:
        """Whether the module's weights are other than those that the head was fitted to."""
        return self._weights is not None and not same_weights(self._weights, fingerprint(module))

    def fits(self, width: int) -> bool:
        """Whether embeddings of this width are what the head takes."""
        return self.head is None or in_features(self.head) == width

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only, which ``weights_only`` loading takes."""
        state: dict[str, Any] = {
            "fit_epoch": self.fit_epoch,
            "fit_step": self.fit_step,
            "refits": self.refits,
            "failures": self.failures,
        }
        if self.head is not None:
            state |= {"head": head_bytes(self.head), "kind": head_kind(self.head)}
        if self._weights is not None:
            state["weights"] = self._weights.clone()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what a checkpoint holds."""
        self.fit_epoch, self.fit_step = int(state["fit_epoch"]), int(state["fit_step"])
        self.refits, self.failures = int(state["refits"]), int(state["failures"])
        if "head" in state:
            self.head = head_from_bytes(state["head"], state["kind"])
            self._weights = state["weights"].clone() if "weights" in state else None
        self.rows = {}
