"""State of the callback's head: the head, the weights it was fitted to, and its form in a checkpoint."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch.data import files
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.model.sepc import SEPC
from sepc_torch.shapes import Float
from sepc_torch.training.flagging import Head
from sepc_torch.training.lightning.batches import RankZeroError, Rows
from sepc_torch.training.lightning.refitting import fit_head

# Relative tolerance between fingerprints. Another order of summation, as on another device, changes them by less; a
# training step changes them by more.
_SAME_WEIGHTS = 1e-9
# File of the state in the monitor's `dirpath`.
_SNAPSHOT = "monitor.pt"


def head_bytes(head: Head) -> Tensor:
    """Serialise a head to a tensor of bytes in its own file format, so that ``weights_only`` loading accepts it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "head.safetensors"
        head.save(path)
        return torch.from_numpy(np.frombuffer(path.read_bytes(), dtype=np.uint8).copy())


def head_from_bytes(data: Tensor, kind: str) -> Head:
    """Restore a head from the bytes written by :func:`head_bytes`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "head.safetensors"
        path.write_bytes(data.cpu().numpy().tobytes())
        return SEPC.load(path) if kind == "sepc" else TrustHead.load(path)


def head_kind(head: Head) -> str:
    """Name of a head's class in a checkpoint."""
    return "sepc" if isinstance(head, SEPC) else "trust_head"


@torch.no_grad()
def fingerprint(module: nn.Module) -> Float[Tensor, "3"]:
    """Fingerprint of a module's weights: the sums of their values, absolute values and squares."""
    total = torch.zeros(3, dtype=torch.float64)
    for weight in module.parameters():
        if weight.is_floating_point():
            values = weight.detach().double()
            total += torch.stack([values.sum(), values.abs().sum(), values.square().sum()]).cpu()
    return total


def same_weights(a: Float[Tensor, "3"], b: Float[Tensor, "3"]) -> bool:
    """Whether two fingerprints belong to the same weights, up to the order of summation."""
    scale = torch.maximum(a, b)[1].clamp_min(1.0)  # of the absolute values, because the plain sum may cancel
    return bool(((a - b).abs() <= _SAME_WEIGHTS * scale).all())


class HeadState:
    """The head in use, the epoch and step of its fit, and the number of refits and failures.

    Attributes:
        head: The head, or None before the first fit.
        fit_epoch, fit_step: Epoch and global step of the last fit; -1 for a head given by the user.
        refits, failures: Number of fits that succeeded and that failed.
        rows: Embeddings and labels of the last fit; empty after loading a state.
    """

    def __init__(self, head: Head | None) -> None:
        self.head = head
        self.fit_epoch, self.fit_step = -1, -1
        self.refits, self.failures = 0, 0
        self.rows: Rows = {}
        self._weights: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "rows": {}}

    def refit(self, trainer: Any, module: Any, rows: Rows, fit: Any) -> bool:
        """Fit a new head to rows and return whether this succeeded; if it fails, keep the old head and warn."""
        try:
            # On the CPU; `on` moves the head to the device of the embeddings.
            self.head = fit_head(trainer, rows, fit)
        except RankZeroError as error:
            self.failures += 1
            kept = "the previous head stays in use" if self.head is not None else "there is no head yet"
            if trainer.is_global_zero:
                warnings.warn(f"{error} Training continues; {kept}.", stacklevel=2)
            return False
        self.rows = rows
        self.fit_epoch, self.fit_step = int(trainer.current_epoch), int(trainer.global_step)
        self.refits += 1
        self._weights = fingerprint(module)
        return True

    def calibrated(self, head: TrustHead, module: Any) -> None:
        """Use a calibrated copy of the head; its promises hold for the module's current weights."""
        self.head = head
        self._weights = fingerprint(module)

    def on(self, device: torch.device) -> Head:
        """Move the head to a device and return it."""
        assert self.head is not None
        self.head = self.head.to(device)
        return self.head

    def is_stale(self, module: Any) -> bool:
        """Whether the module's weights differ from those that the head was last fitted to or calibrated with."""
        return self._weights is not None and not same_weights(self._weights, fingerprint(module))

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: tensors and plain values only, as ``weights_only`` loading requires."""
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
        """Restore the state of a checkpoint; a checkpoint without a head keeps the current one."""
        self.fit_epoch, self.fit_step = int(state["fit_epoch"]), int(state["fit_step"])
        self.refits, self.failures = int(state["refits"]), int(state["failures"])
        if "head" in state:
            self.head = head_from_bytes(state["head"], state["kind"])
            self._weights = state["weights"].clone() if "weights" in state else None
        self.rows = {}

    def write(self, folder: Path) -> None:
        """Write the state to a folder, through which spawned processes return it to the main process."""
        folder.mkdir(parents=True, exist_ok=True)
        with files.replacing(folder / _SNAPSHOT) as temporary:
            torch.save(self.state_dict(), temporary)

    def read(self, folder: Path) -> None:
        """Read the state from a folder, if there is one."""
        if (folder / _SNAPSHOT).is_file():
            self.load_state_dict(torch.load(folder / _SNAPSHOT, weights_only=True))
