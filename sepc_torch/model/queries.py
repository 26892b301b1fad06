"""Validation of inference inputs: points, a network's logits, and labels as class indices or by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data.arrays import float_rows, real_numbers, refuse_duplicates
from sepc_torch.data.labels import label_array, label_codes
from sepc_torch.data.text import printable
from sepc_torch.model.device_sync import can_synchronize
from sepc_torch.shapes import Bool, Float, Int


def points_as_tensor(
    z: Any, feature_names: tuple[str, ...] | None, device: torch.device, dtype: torch.dtype, name: str = "z"
) -> Tensor:
    """Convert points to a floating-point tensor on a device; from a table, select the model's feature columns.

    Masked and missing values become NaN. TypeError for values that are not real numbers.

    >>> points_as_tensor([[1, 2]], None, torch.device("cpu"), torch.float32)
    tensor([[1., 2.]], dtype=torch.float64)
    """
    z = feature_columns(z, feature_names)
    numbers, names = real_numbers(z, name)
    if not isinstance(z, Tensor):
        rows = numbers if names is None else float_rows(numbers, 0, len(numbers))
        values = np.array(rows, dtype=np.float64)  # copy: arrays of DataFrames can be read-only
        if np.ma.is_masked(z):
            values[np.ma.getmaskarray(z)] = np.nan
        z = torch.from_numpy(values)
    z = z.to(device)
    return z if z.is_floating_point() else z.to(dtype)


def feature_columns(z: Any, feature_names: tuple[str, ...] | None) -> Any:
    """The columns of a table that a model was fitted on, in that order; anything else is returned as it is."""
    if not hasattr(z, "columns") or feature_names is None:
        return z
    by_name = {str(column): column for column in z.columns}
    missing = [name for name in feature_names if name not in by_name]
    if missing:
        raise ValueError(f"The table lacks the columns {missing}, which the model was fitted on. Add or rename them.")
    chosen = z[[by_name[name] for name in feature_names]]
    refuse_duplicates([str(column) for column in chosen.columns], "The table")
    return chosen


def class_columns(logits: Any, classes: list[Any]) -> tuple[Any, bool]:
    """The logits with columns in the order of the classes, and whether names of columns gave this order.

    The columns of a table are matched by name. The names 0, 1, 2, ... are those of a table without names.
    """
    if not hasattr(logits, "columns") or list(logits.columns) == list(range(len(logits.columns))):
        return logits, False
    by_name, wanted = {str(column): column for column in logits.columns}, [str(label) for label in classes]
    if sorted(map(str, logits.columns)) != sorted(wanted):
        raise ValueError(
            f"The columns of the logits are {_listed(list(logits.columns))}, and the classes {_listed(classes)}. Name "
            "each column by its class, or pass an array with a column for each class in this order."
        )
    return logits[[by_name[name] for name in wanted]], True


def unstated_order(classes: list[Any], call: str) -> ValueError:
    """The error for logits without names, if the classes are names and nobody said which column is which.

    Args:
        classes: The classes, sorted.
        call: The function that takes ``classes=``.
    """
    return ValueError(
        "Which column of the logits belongs to which class? The classes are names; sorted, they are "
        f"{_listed(classes)}, which need not be the order of the network. State the order of the columns with "
        f"{call}(..., classes=[...]), or pass a table (DataFrame) whose columns are named by the classes."
    )


def _listed(names: list[Any]) -> str:
    """The first eight names."""
    return printable(names) if len(names) <= 8 else f"{printable(names[:8])[:-1]}, ...]"


def select_row(points: Tensor, i: int | None) -> tuple[Float[Tensor, "B D"], int | None]:
    """One point or row i of a batch as a batch of one, with its row number; a whole batch, with None, if i is None.

    >>> select_row(torch.tensor([[1.0], [2.0]]), -1)
    (tensor([[2.]]), 1)
    """
    if points.dim() == 1:
        if i not in (None, 0):
            raise IndexError(f"There is no row {i}: z is a single point. Leave out i or pass 0.")
        return points.unsqueeze(0), 0
    if i is None:
        return points, None
    if not -len(points) <= i < len(points):
        raise IndexError(f"There is no row {i}: z has {len(points)} rows, numbered from 0.")
    row = i % len(points)
    return points[row : row + 1], row


def check_logits(logits: Any, shape: tuple[int, int], device: torch.device) -> None:
    """Raise an error for logits of the wrong type, shape or device; never synchronises."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a tensor, got {type(logits).__name__}; use torch.as_tensor(logits).")
    if logits.dtype == torch.bool or logits.is_complex():
        raise TypeError(f"logits must be numbers, got {logits.dtype}; labels that are known go into labels=.")
    if logits.shape != shape:
        hint = " Pass the logits of a single row as logits[None]." if logits.dim() == 1 else ""
        raise ValueError(f"logits must have shape {shape}, a column for each class, got {tuple(logits.shape)}.{hint}")
    if logits.device != device:
        raise ValueError(f"logits are on {logits.device} and embeddings on {device}; move one with .to().")


def rows_without_prediction(logits: Tensor) -> Bool[Tensor, "B"]:
    """Mask of rows whose logits define no class: rows that hold NaN, or whose largest logit is not unique.

    >>> inf, nan = torch.inf, torch.nan
    >>> rows_without_prediction(torch.tensor([[0.0, -inf], [inf, 0.0], [nan, 0.0], [-inf, -inf], [1.0, 1.0]])).tolist()
    [False, False, True, True, True]
    """
    tied = (logits == logits.amax(dim=1, keepdim=True)).sum(dim=1) > 1
    return tied | undefined_logits(logits)


def undefined_logits(logits: Tensor) -> Bool[Tensor, "B"]:
    """Mask of rows of logits that a sound network does not give: with NaN, -inf alone, or inf more than once."""
    infinite = (logits == -torch.inf).all(dim=1) | ((logits == torch.inf).sum(dim=1) > 1)
    return infinite | logits.isnan().any(dim=1)


def refuse_undefined_logits(logits: Tensor, remedy: str) -> None:
    """Raise an error if any row of logits is undefined; synchronises with a GPU.

    Args:
        logits: The logits (B, C).
        remedy: Last sentence of the error message: what the caller can do.
    """
    undefined = undefined_logits(logits)
    if bool(undefined.any()):
        raise ValueError(
            f"logits hold NaN, -inf alone, or inf more than once in {int(undefined.sum())} rows, first in row "
            f"{int(undefined.nonzero()[0])}: the network gave no label there. {remedy}"
        )


def refuse_bad_rows(bad: Bool[Tensor, "B"], dtype: torch.dtype) -> None:
    """Raise an error if any point has no finite distance; synchronises with a GPU."""
    if bool(bad.any()):
        raise ValueError(
            f"Row {int(bad.nonzero()[0])} holds NaN, infinity, numbers too large for {dtype} or, if embeddings are "
            f"normalised, only zeros; there are {int(bad.sum())} such rows. Drop them, or choose nan_policy='flag' to "
            "give them label -1 and trust 0."
        )


def class_indices(label: Any, classes: list[Any], points: int, device: torch.device) -> Int[Tensor, "B"]:
    """Validate labels that are given as indices into the classes; return them as int64 on the device.

    The check of the values synchronises with a GPU. Inside a graph, which cannot synchronise, values outside the range
    are clamped instead: a kernel must not read outside its tables.

    >>> class_indices([1, 0], ["a", "b"], 2, torch.device("cpu"))
    tensor([1, 0])
    """
    label = torch.as_tensor(label, device=device)
    if label.shape != (points,) or label.is_floating_point() or label.dtype == torch.bool:
        raise ValueError(
            f"label must hold {points} integer indices into classes, got {label.dtype} of shape {tuple(label.shape)}. "
            "Pass one class index per point."
        )
    if not can_synchronize(label):
        return label.long().clamp(0, len(classes) - 1)
    if bool(((label < 0) | (label >= len(classes))).any()):
        raise ValueError(
            f"label must hold indices from 0 to {len(classes) - 1} into classes={classes}, not the labels themselves; "
            f"got values from {int(label.min())} to {int(label.max())}."
        )
    return label.long()


def class_codes(labels: Any, classes: list[Any], points: int, device: torch.device) -> Int[Tensor, "M"]:
    """Convert labels by name to indices into the classes.

    >>> class_codes(["b", "a"], ["a", "b"], 2, torch.device("cpu"))
    tensor([1, 0])
    """
    given = label_array(labels, "labels")
    if given.shape != (points,):
        raise ValueError(f"{points} embeddings need {points} labels, got labels of shape {given.shape}.")
    codes = label_codes(given.tolist(), classes)
    if (codes < 0).any():
        unknown = sorted(map(repr, set(given[codes < 0].tolist())))
        raise ValueError(
            f"The head was not fitted on the labels {', '.join(unknown[:5])}; it knows {len(classes)} labels, such as "
            f"{classes[0]!r}. Pass labels of that type, and leave out points of unknown classes."
        )
    return torch.from_numpy(codes).to(device)


def check_labels(y: Tensor, rows: int) -> None:
    """Raise an error unless there is one class index per row and at least one row."""
    if y.shape != (rows,) or rows == 0:
        raise ValueError(
            f"Every row needs one label, and there must be rows; got {rows} rows and labels of shape {tuple(y.shape)}."
        )
    if bool((y < 0).any()):
        raise ValueError(
            "Labels must be class indices from 0 on, got a negative label. Leave out samples without a class."
        )
