"""Labels to class codes, and training sets: points with their class codes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from sepc_torch.data.arrays import check_feature_scales, magnitudes, numeric_points
from sepc_torch.shapes import Array, Float, Int

# Most characters of a label. NumPy gives every label of an array the size of the longest one.
LONGEST_LABEL = 250


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
    check_feature_scales(magnitudes(points), "X", names)
    labels = label_array(y)
    check_one_label_per_row(len(points), len(labels))
    found, codes = np.unique(labels, return_inverse=True)
    found, order = ordered_classes(found, classes)
    codes = order[codes.ravel()]
    counts = np.bincount(codes)
    least = points.shape[1] if least_per_class is None else least_per_class
    if counts.max() < least:
        raise ValueError(
            f"The largest class has {counts.max()} points in {points.shape[1]} features; an ellipsoid needs at least "
            f"{least} points. Project to fewer dimensions first (for example with PCA) or add data."
        )
    return TrainingSet(points, codes, found, names)


def check_one_label_per_row(rows: int, labels: int) -> None:
    """Raise ValueError unless there are as many labels as rows."""
    if labels != rows:
        raise ValueError(f"There are {rows} rows and {labels} labels; pass one label for each row.")


def ordered_classes(found: Array, classes: Any) -> tuple[Array, Int[Array, "C"]]:
    """Return the classes in the wanted order, and the index in that order of each found class.

    Args:
        found: The labels that occur (C,), sorted.
        classes: The labels in the wanted order, or None for the order of ``found``.

    >>> ordered_classes(np.array([3, 5]), [5, 3])
    (array([5, 3]), array([1, 0]))
    """
    codes = np.arange(len(found))
    if classes is not None:
        found, codes = _reorder(found, label_array(classes, "classes"))
    if len(found) < 2:
        raise ValueError(
            f"The labels hold the single class {found.tolist()[0]!r}; a partition separates at least two classes. "
            "Check the label column, or the filter that selected these rows."
        )
    return found, codes


def _reorder(found: Array, classes: Array) -> tuple[Array, Int[Array, "C"]]:
    """The classes in the caller's order, and the index in that order of each found class."""
    wanted = classes.tolist()
    present = found.tolist()
    named, occurring = set(wanted), set(present)
    if len(named) != len(wanted):
        raise ValueError(f"classes names a label twice: {wanted}. Name each label once.")
    missing = [label for label in wanted if label not in occurring]
    if missing:
        raise ValueError(
            f"classes names {missing}, but no row has these labels; name only labels that occur: {present}."
        )
    unknown = [label for label in present if label not in named]
    if unknown:
        raise ValueError(
            f"The labels {unknown} occur, which classes={wanted} does not name. Add them or drop those rows."
        )
    return classes, label_codes(present, wanted)


def label_array(y: Any, name: str = "y") -> Array:
    """Validate labels and convert them to a one-dimensional array of numbers, strings or booleans."""
    if hasattr(y, "detach"):
        if y.is_meta:
            raise TypeError(f"{name} is a tensor on the meta device, which holds no labels; pass one with values.")
        y = y.detach().cpu()
        y = (y.float() if y.is_floating_point() and y.element_size() < 4 else y).numpy()  # NumPy has no bfloat16
    if isinstance(y, (list, tuple)):
        check_label_texts(y, name)
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
        check_label_texts(labels, name)
        kinds = {type(label).__name__ for label in labels}
        if any(map(_missing, labels)):
            raise ValueError(f"{name} holds missing labels (None or NaN). Drop those rows.")
        alike = any(all(isinstance(label, kind) for label in labels) for kind in ((int, float, np.number), str))
        if len(kinds) > 1 and not alike:
            raise TypeError(f"{name} mixes labels of the types {', '.join(sorted(kinds))}; convert them to one type.")
        labels = np.array(labels.tolist())
    if labels.ndim != 1 or labels.dtype.kind not in "fiubU":
        raise TypeError(f"{name} holds labels of dtype {labels.dtype}; use numbers, strings or booleans.")
    return labels


def check_label_texts(labels: Iterable[Any], name: str = "y") -> None:
    r"""Raise ValueError for a text that is too long for a label, or that ends in a character which NumPy removes.

    >>> check_label_texts(["a", "a\0"])
    Traceback (most recent call last):
    ValueError: y holds the label 'a\x00', which ends in NUL; rename it.
    """
    for label in {label for label in labels if isinstance(label, str)}:
        if len(label) > LONGEST_LABEL:
            raise ValueError(
                f"{name} holds a label of {len(label)} characters, {label[:20]!r}...; labels have at most "
                f"{LONGEST_LABEL}. Check that these are the labels, or shorten them."
            )
        if label.endswith("\0"):
            raise ValueError(f"{name} holds the label {label!r}, which ends in NUL; rename it.")


def _missing(label: Any) -> bool:
    """Whether a label is None, NaN, NaT or pandas' NA. NA and NaT are found by type: comparing NA gives NA."""
    return (
        label is None or type(label).__name__ in ("NAType", "NaTType") or (isinstance(label, float) and label != label)
    )


def label_codes(labels: Iterable[Any], classes: Iterable[Any]) -> Int[Array, "N"]:
    """Index of each label in ``classes``, -1 for a label that is not in ``classes``."""
    code = {label: index for index, label in enumerate(classes)}
    return np.array([code.get(label, -1) for label in labels], dtype=np.int64)
