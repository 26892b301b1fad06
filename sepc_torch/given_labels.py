"""What comes from outside to be judged, checked: a network's logits, and labels as users name them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sepc_torch.inputs import label_array
from sepc_torch.shapes import Bool, Int


def check_logits(logits: Any, shape: tuple[int, int], device: torch.device) -> None:
    """A clear error for logits that do not fit; no value is looked at."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a tensor, got {type(logits).__name__}; use torch.as_tensor(logits).")
    if logits.shape != shape:
        raise ValueError(f"logits must have shape {shape}, a column for each class, got {tuple(logits.shape)}.")
    if logits.device != device:
        raise ValueError(f"logits are on {logits.device} and embeddings on {device}; move one with .to().")


def refuse_nan(silent: Bool[Tensor, "B"]) -> None:
    """A clear error where a row of logits holds NaN; a GPU must have come that far."""
    if bool(silent.any()):
        raise ValueError(
            f"logits hold NaN in {int(silent.sum())} rows, first in row {int(silent.nonzero()[0])}: the network gave "
            "no label there. Drop those rows, or give them to a head with nan_policy='flag', which refuses them."
        )


def class_codes(labels: Any, classes: list[Any], points: int, device: torch.device) -> Int[Tensor, "M"]:
    """Labels as indices into the classes, or a clear error.

    >>> class_codes(["b", "a"], ["a", "b"], 2, torch.device("cpu"))
    tensor([1, 0])
    """
    given = label_array(labels, "labels")
    if given.shape != (points,):
        raise ValueError(f"{points} embeddings need {points} labels, got {given.shape}.")
    place = {label: code for code, label in enumerate(classes)}
    strangers = sorted({repr(label) for label in given.tolist() if label not in place})
    if strangers:
        raise ValueError(
            f"The head was not fitted on the labels {', '.join(strangers[:5])}; it knows {len(classes)}, such as "
            f"{classes[0]!r}. Give labels of that type, and leave points of unknown classes out."
        )
    return torch.tensor([place[label] for label in given.tolist()], device=device)
