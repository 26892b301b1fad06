"""Input checks: points and labels to float64 arrays and class codes; also numbers, choices and torch devices."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sepc_torch.shapes import Array, Float, Int

if TYPE_CHECKING:
    import torch

# A standard deviation below this share of a feature's largest magnitude is rounding error: the feature is constant.
_CONSTANT = 64 * np.finfo(np.float64).eps


class TrainingSet(NamedTuple):
    """Points (N, D), class codes (N,) as indices into ``classes``, classes (C,) and feature names."""

    points: Float[Array, "N D"]
    codes: Int[Array, "N"]
    classes: Array
    feature_names: tuple[str, ...] | None


def training_set(x: Any, y: Any, classes: Any = None, least_per_class: int | None = None) -> TrainingSet:
    """Validate points and labels and convert them to a :class:`TrainingSet`.

    Args:
        x: (N, D) numbers: an array, a list of rows, a torch tensor or a DataFrame. The column names of a DataFrame are
            kept.
        y: (N,) labels: numbers, strings or booleans.
        classes: The labels in the wanted order. Every label must occur in ``y``. Default: all labels of ``y``, sorted.
        least_per_class: The least number of points that the largest class must have. Default: the number of features.

    >>> training_set([[0.0], [2.0], [3.0]], ["b", "a", "b"]).codes
    array([1, 0, 1])
    """
    points, names = numeric_points(x)
    labels = label_array(y)
    if len(labels) != len(points):
        raise ValueError(f"X has {len(points)} rows and y has {len(labels)} labels; pass one label per row.")
    found, codes = np.unique(labels, return_inverse=True)
    codes = codes.ravel().astype(np.int64)
    if classes is not None:
        found, codes = _reorder(found, codes, label_array(classes, "classes"))
    if len(found) < 2:
        raise ValueError(
            f"y holds the single class {found.tolist()[0]!r}; a partition separates at least two classes. "
            "Check the label column, or the filter that selected these rows."
        )
    counts = np.bincount(codes)
    least = points.shape[1] if least_per_class is None else least_per_class
    if counts.max() < least:
        raise ValueError(
            f"The largest class has {counts.max()} points in {points.shape[1]} features; an ellipsoid needs at least "
            f"{least} points. Project to fewer dimensions first (for example with PCA) or add data."
        )
    return TrainingSet(points, codes, found, names)


def numeric_points(x: Any, name: str = "X") -> tuple[Float[Array, "N D"], tuple[str, ...] | None]:
    """Convert points to a float64 array; also return the column names if ``x`` is a DataFrame, else None.

    Raises TypeError for values that are not real numbers, ValueError for NaN, infinity or a wrong shape.
    """
    if hasattr(x, "tocsr") or hasattr(x, "tocoo"):
        raise TypeError(
            f"{name} is a sparse matrix; ellipsoids need dense points. Use {name}.toarray() if it has few columns, or "
            "project it first (sklearn.decomposition.TruncatedSVD)."
        )
    names: tuple[str, ...] | None = None
    if hasattr(x, "columns") and hasattr(x, "dtypes"):
        names = tuple(str(column) for column in x.columns)
        wrong = [column for column, dtype in zip(names, list(x.dtypes), strict=True) if not _is_numeric(dtype)]
        if wrong:
            raise TypeError(
                f"{name} has columns that are not numbers: {', '.join(wrong)}. Encode or drop these columns."
            )
        # Ask for one float array: mixed column types would give objects, and pandas has missing values of its own.
        x = x.to_numpy(dtype=np.float64, na_value=np.nan) if hasattr(x, "iloc") else x.to_numpy().astype(np.float64)
    elif hasattr(x, "detach"):
        x = _from_tensor(x)
    if np.ma.is_masked(x):
        raise ValueError(f"{name} has masked values. Drop those rows or fill them in.")
    points = np.asarray(x)
    if points.dtype == object:
        raise TypeError(
            f"{name} is an array of Python objects; convert it to numbers first, for example {name}.astype(float)."
        )
    if points.dtype.kind not in "fiub":
        raise TypeError(f"{name} must hold real numbers, got dtype {points.dtype}.")
    if points.ndim != 2 or 0 in points.shape:
        raise ValueError(f"{name} must be a non-empty array of shape (points, features), got shape {points.shape}.")
    # Always a copy in row-major order: a DataFrame returns read-only arrays in column-major order, in which sums round
    # differently.
    points = np.array(points, dtype=np.float64, order="C")
    bad = ~np.isfinite(points)
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        where = names[column] if names is not None else column
        raise ValueError(
            f"{name} holds {int(bad.sum())} NaN or infinite values, the first in row {row}, column {where!r}. "
            "Drop those rows or impute the values."
        )
    return points, names


def feature_scale(points: Float[Array, "N D"]) -> Float[Array, "D"]:
    """Standard deviation of each feature, 1 for a constant feature.

    A feature is constant if its computed deviation is no more than rounding error.

    >>> feature_scale(np.array([[1.0, 0.1], [3.0, 0.1], [1.0, 0.1], [3.0, 0.1]]))
    array([1., 1.])
    """
    magnitude = np.abs(points).max(axis=0)
    unit = np.where(magnitude > 0, magnitude, 1.0)  # avoids overflow and underflow of the squares
    deviation = (points / unit).std(axis=0)
    return np.where(deviation > _CONSTANT, deviation * unit, 1.0)


def positive(value: Any, name: str, unit: str) -> float:
    """Validate a positive finite number; ``name`` and ``unit`` are for the error message."""
    if isinstance(value, (bool, str)) or not isinstance(value, (int, float, np.number)):
        raise TypeError(f"{name} must be a positive number of {unit}, got {value!r}.")
    if not (np.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number of {unit}, got {value!r}.")
    return float(value)


def count(value: Any, name: str, least: int = 0) -> int:
    """Validate an integer of at least ``least``; ``name`` is for the error message."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}.") from None
    if isinstance(value, (bool, np.bool_)) or number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")
    return number


def float64_device(device: torch.device | str) -> torch.device:
    """Validate a torch device that must be available and support float64."""
    return usable_device(device, "float64", "Choose another device, or omit device to compute with NumPy.")


def usable_device(
    device: torch.device | str, dtype: str = "float32", advice: str = "Choose another, such as 'cpu'."
) -> torch.device:
    """Validate a torch device that must be available and support ``dtype``, by running a small sum on it.

    >>> usable_device("cpu")
    device(type='cpu')
    """
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must name a torch device, such as 'cuda' or 'cpu', got {device!r}.") from error
    try:
        torch.ones(1, dtype=getattr(torch, dtype), device=found).sum().item()
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        raise ValueError(f"device {str(found)!r} cannot be used here in {dtype}: {reason}. {advice}") from error
    return found


def _is_numeric(dtype: Any) -> bool:
    """Whether a DataFrame column holds numbers or booleans: pandas has a kind letter, polars a method."""
    if hasattr(dtype, "is_numeric"):
        return bool(dtype.is_numeric()) or str(dtype) == "Boolean"
    return getattr(dtype, "kind", "O") in "fiub"


def _from_tensor(x: Any) -> Array:
    x = x.detach().cpu()
    if x.is_sparse:
        raise TypeError("X is a sparse tensor; ellipsoids need dense points. Use X.to_dense() if it has few columns.")
    return (x.double() if x.is_floating_point() else x).numpy()


def _missing(label: Any) -> bool:
    """Whether a label is None, NaN, NaT or pandas' NA. NA and NaT are found by type: comparing NA gives NA."""
    return (
        label is None or type(label).__name__ in ("NAType", "NaTType") or (isinstance(label, float) and label != label)
    )


def label_array(y: Any, name: str = "y") -> Array:
    """Validate labels and convert them to a one-dimensional array of numbers, strings or booleans."""
    if hasattr(y, "detach"):
        y = y.detach().cpu().numpy()
    mixed = isinstance(y, (list, tuple)) and len({type(label) for label in y}) > 1
    labels = np.asarray(y, dtype=object if mixed else None)  # else NumPy converts numbers to text
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, one label per point, got shape {labels.shape}.")
    if len(labels) == 0:
        raise ValueError(f"{name} is empty.")
    if labels.dtype.kind == "f" and not np.isfinite(labels).all():
        raise ValueError(f"{name} holds missing labels (NaN). Drop those rows.")
    if labels.dtype == object:
        kinds = {type(label).__name__ for label in labels}
        if any(map(_missing, labels)):
            raise ValueError(f"{name} holds missing labels (None or NaN). Drop those rows.")
        if len(kinds) > 1 and not all(isinstance(label, (int, float, np.number)) for label in labels):
            raise TypeError(f"{name} mixes labels of the types {', '.join(sorted(kinds))}; convert them to one type.")
        labels = np.array(labels.tolist())
    if labels.ndim != 1 or labels.dtype.kind not in "fiubU":
        raise TypeError(f"{name} holds labels of dtype {labels.dtype}; use numbers, strings or booleans.")
    return labels


def label_codes(labels: Iterable[Any], classes: Iterable[Any]) -> Int[Array, "N"]:
    """Index of each label in ``classes``, -1 for a label that is not in ``classes``.

    >>> label_codes(["b", "a", "z"], ["a", "b"])
    array([ 1,  0, -1])
    """
    code = {label: index for index, label in enumerate(classes)}
    return np.array([code.get(label, -1) for label in labels], dtype=np.int64)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError if ``value`` is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def _reorder(found: Array, codes: Int[Array, "N"], classes: Array) -> tuple[Array, Int[Array, "N"]]:
    """The classes in the caller's order and the codes that refer to them, from the sorted classes and their codes."""
    wanted = classes.tolist()
    present = found.tolist()
    if len(set(wanted)) != len(wanted):
        raise ValueError(f"classes names a label twice: {wanted}. Name each label once.")
    missing = [label for label in wanted if label not in present]
    if missing:
        raise ValueError(
            f"classes names {missing}, but y holds no points with these labels; name only labels of y: {present}."
        )
    unknown = [label for label in present if label not in wanted]
    if unknown:
        raise ValueError(
            f"y holds the labels {unknown}, which classes={wanted} does not name. Add them or drop those rows."
        )
    return classes, label_codes(present, wanted)[codes]
