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


def silent_rows(logits: Tensor) -> Bool[Tensor, "B"]:
    """Rows that name no class: with NaN, with nothing but -inf, or with inf more than once.

    >>> inf, nan = torch.inf, torch.nan
    >>> silent_rows(torch.tensor([[0.0, -inf], [inf, 0.0], [nan, 0.0], [-inf, -inf], [inf, inf]])).tolist()
    [False, False, True, True, True]
    """
    nothing = (logits == -torch.inf).all(dim=1) | ((logits == torch.inf).sum(dim=1) > 1)
    return nothing | logits.isnan().any(dim=1)


def refuse_silent(silent: Bool[Tensor, "B"], remedy: str) -> None:
    """A clear error where a row of logits names no class; a GPU must have come that far."""
    if bool(silent.any()):
        raise ValueError(
            f"logits hold NaN, -inf alone, or inf more than once in {int(silent.sum())} rows, first in row "
            f"{int(silent.nonzero()[0])}: the network gave no label there. {remedy}"
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
