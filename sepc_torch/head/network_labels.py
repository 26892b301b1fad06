"""The network's labels of a batch, and rows without one; each step is one opaque operator in compiled code."""

from __future__ import annotations

import torch
from torch import Tensor

from sepc_torch.model import torch_ops
from sepc_torch.model.device_sync import readable
from sepc_torch.model.kernels.launch import available, on_device
from sepc_torch.model.prediction import Prediction
from sepc_torch.model.queries import rows_without_prediction
from sepc_torch.shapes import Bool, Float, Int

# Dtypes of logits for which there is a CUDA kernel.
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def network_labels(logits: Float[Tensor, "B C"]) -> tuple[Int[Tensor, "B"], Bool[Tensor, "B"] | None]:
    """The class of the largest logit, and the rows whose logits define no class; None if it is known that all do.

    The class of a row without a prediction is a valid index too.

    >>> network_labels(torch.tensor([[0.0, 2.0], [1.0, torch.nan], [3.0, 3.0]]))
    (tensor([1, 1, 0]), tensor([False,  True,  True]))
    """
    if readable(logits):
        most, label = logits.max(dim=1)
        if bool(((logits == most.unsqueeze(1)).sum(dim=1) == 1).all()):
            return label, None
    label, missing = _labels(logits)
    return label, missing


def without_missing(given: Prediction, missing: Bool[Tensor, "B"]) -> Prediction:
    """The predictions with the label -1, no trust and no margin in the rows whose logits define no class."""
    label, trust, margin = _masked(given.trust, given.margin, given.label, missing)
    return given._replace(label=label, trust=trust, margin=margin)


def _largest(logits: Float[Tensor, "B C"]) -> tuple[Int[Tensor, "B"], Bool[Tensor, "B"]]:
    if logits.dtype in _KERNEL_DTYPES and available(logits):
        from sepc_torch.head.kernels.labels import largest_logits

        with on_device(logits):
            return largest_logits(logits)
    return logits.argmax(dim=1), rows_without_prediction(logits)


def _mask(
    trust: Float[Tensor, "B"], margin: Float[Tensor, "B"], label: Int[Tensor, "B"], missing: Bool[Tensor, "B"]
) -> list[Tensor]:
    differentiated = torch.is_grad_enabled() and (trust.requires_grad or margin.requires_grad)
    if available(label) and not differentiated:
        from sepc_torch.head.kernels.labels import mask_missing

        with on_device(label):
            return mask_missing(label, trust, margin, missing)
    return [
        torch.where(missing, -1, label),
        torch.where(missing, 0.0, trust),
        torch.where(missing, torch.nan, margin),
    ]


_labels = torch_ops.opaque(
    "network_labels(Tensor logits) -> (Tensor, Tensor)",
    _largest,
    lambda logits: tuple(logits.new_empty(logits.shape[0], dtype=dtype) for dtype in (torch.int64, torch.bool)),
)
_masked = torch_ops.opaque(
    "without_missing(Tensor trust, Tensor margin, Tensor label, Tensor missing) -> Tensor[]",
    _mask,
    lambda trust, margin, label, missing: [torch.empty_like(part) for part in (label, trust, margin)],
)
# Whether the row of a label is flagged.
flagged = torch_ops.opaque(
    "flagged(Tensor label) -> Tensor",
    lambda label: label < 0,
    lambda label: torch.empty_like(label, dtype=torch.bool),
)
