"""What comes from outside to be judged, checked: points, a network's logits, labels as indices and by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data.arrays import label_array, label_codes
from sepc_torch.model.device_sync import can_synchronize
from sepc_torch.shapes import Bool, Int


def points_as_tensor(z: Any, feature_names: tuple[str, ...] | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Points of any kind as a floating-point tensor on a device; of a table, the columns that the model knows.

    >>> points_as_tensor([[1, 2]], None, torch.device("cpu"), torch.float32)
    tensor([[1., 2.]], dtype=torch.float64)
    """
    if hasattr(z, "columns") and feature_names is not None:
        missing = [name for name in feature_names if name not in list(z.columns)]
        if missing:
            raise ValueError(f"The table lacks the columns {missing}, which the model was fitted on.")
        z = z[list(feature_names)]
    if not isinstance(z, Tensor):
        z = torch.from_numpy(np.array(z, dtype=np.float64))  # a copy: DataFrames hand out read-only arrays
    z = z.to(device)
    return z if z.is_floating_point() else z.to(dtype)


def check_logits(logits: Any, shape: tuple[int, int], device: torch.device) -> None:
    """A clear error for logits that do not fit; no value is looked at."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a tensor, got {type(logits).__name__}; use torch.as_tensor(logits).")
    if logits.dtype == torch.bool or logits.is_complex():
        raise TypeError(f"logits must be numbers, got {logits.dtype}; labels that are known go into labels=.")
    if logits.shape != shape:
        raise ValueError(f"logits must have shape {shape}, a column for each class, got {tuple(logits.shape)}.")
    if logits.device != device:
        raise ValueError(f"logits are on {logits.device} and embeddings on {device}; move one with .to().")


def rows_without_prediction(logits: Tensor) -> Bool[Tensor, "B"]:
    """Rows that name no class: with NaN, with nothing but -inf, or with inf more than once.

    >>> inf, nan = torch.inf, torch.nan
    >>> rows_without_prediction(torch.tensor([[0.0, -inf], [inf, 0.0], [nan, 0.0], [-inf, -inf], [inf, inf]])).tolist()
    [False, False, True, True, True]
    """
    nothing = (logits == -torch.inf).all(dim=1) | ((logits == torch.inf).sum(dim=1) > 1)
    return nothing | logits.isnan().any(dim=1)


def refuse_rows_without_prediction(silent: Bool[Tensor, "B"], remedy: str) -> None:
    """A clear error where a row of logits names no class; a GPU must have come that far."""
    if bool(silent.any()):
        raise ValueError(
            f"logits hold NaN, -inf alone, or inf more than once in {int(silent.sum())} rows, first in row "
            f"{int(silent.nonzero()[0])}: the network gave no label there. {remedy}"
        )


def refuse_bad(bad: Bool[Tensor, "B"], dtype: torch.dtype) -> None:
    """A clear error where a point has no distance; a GPU must have come that far."""
    if bool(bad.any()):
        raise ValueError(
            f"z holds NaN, infinity, numbers too large for {dtype} or, where embeddings are normalised, nothing but "
            f"zeros in {int(bad.sum())} rows, first in row {int(bad.nonzero()[0])}. Drop such rows, or choose "
            "nan_policy='flag' to give them label -1 and trust 0."
        )


def class_indices(label: Any, classes: list[Any], points: int, device: torch.device) -> Int[Tensor, "B"]:
    """Labels that are given as indices into the classes, or a clear error.

    >>> class_indices([1, 0], ["a", "b"], 2, torch.device("cpu"))
    tensor([1, 0])
    """
    label = torch.as_tensor(label, device=device)
    if label.shape != (points,) or label.is_floating_point() or label.dtype == torch.bool:
        raise ValueError(
            f"label must be {points} indices into classes, got {label.dtype} of shape {tuple(label.shape)}."
        )
    if not can_synchronize(label):  # what could not be looked at must not lead a kernel out of its tables
        return label.long().clamp(0, len(classes) - 1)
    if bool(((label < 0) | (label >= len(classes))).any()):
        raise ValueError(
            f"label must hold indices from 0 to {len(classes) - 1} into classes={classes}, not the labels themselves; "
            f"got values from {int(label.min())} to {int(label.max())}."
        )
    return label.long()


def class_codes(labels: Any, classes: list[Any], points: int, device: torch.device) -> Int[Tensor, "M"]:
    """Labels as indices into the classes, or a clear error.

    >>> class_codes(["b", "a"], ["a", "b"], 2, torch.device("cpu"))
    tensor([1, 0])
    """
    given = label_array(labels, "labels")
    if given.shape != (points,):
        raise ValueError(f"{points} embeddings need {points} labels, got {given.shape}.")
    codes = label_codes(given.tolist(), classes)
    if (codes < 0).any():
        strangers = sorted(map(repr, set(given[codes < 0].tolist())))
        raise ValueError(
            f"The head was not fitted on the labels {', '.join(strangers[:5])}; it knows {len(classes)}, such as "
            f"{classes[0]!r}. Give labels of that type, and leave points of unknown classes out."
        )
    return torch.from_numpy(codes).to(device)


def check_labels(y: Tensor, rows: int) -> None:
    """A clear error for anything but one index for each row."""
    if y.shape != (rows,) or rows == 0:
        raise ValueError(f"Every row needs one label, got {rows} rows and labels of shape {tuple(y.shape)}.")
    if bool((y < 0).any()):
        raise ValueError("Labels are numbered from 0; got a negative one. Leave out samples of no class.")
