"""Points to float64 arrays, with checks of their values and scales."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sepc_torch.data.text import printable
from sepc_torch.shapes import Array, Float

# A standard deviation below this share of a feature's largest magnitude is rounding error: the feature is constant.
_CONSTANT = 64 * np.finfo(np.float64).eps
# Values processed at a time: 16 MiB in float64, so that temporary arrays are small next to large data, and products of
# 4096 x 512 matrices still run at full speed.
_CHUNK_VALUES = 2**21


def numeric_points(x: Any, name: str = "X") -> tuple[Float[Array, "N D"], tuple[str, ...] | None]:
    """Convert points to a float64 array; also return the column names if ``x`` is a DataFrame, else None.

    The array is row-major, because sums round differently in another order. It is ``x`` itself, without a copy, if
    ``x`` is such an array already: callers must not write to it, and it may be read-only.

    Raises TypeError for values that are not real numbers, ValueError for NaN, infinity or a wrong shape.
    """
    matrix, names = real_matrix(x, name)
    points = np.ascontiguousarray(float_rows(matrix, 0, matrix.shape[0]), dtype=np.float64)
    if min(points.strides) < 0:  # a single row or column that was reversed; torch refuses negative strides
        points = points.copy()
    check = FiniteCheck(name, names)
    step = rows_per_chunk(points.shape[1])
    for start in range(0, len(points), step):
        check.add(points[start : start + step])
    check.refuse()
    return points, names


def rows_per_chunk(features: int) -> int:
    """Number of rows to process at a time, so that temporary arrays stay small."""
    return max(1, _CHUNK_VALUES // features)


def real_matrix(x: Any, name: str = "X") -> tuple[Any, tuple[str, ...] | None]:
    """Validate the type and shape of points, but not their values; also return the column names of a DataFrame.

    :func:`float_rows` converts rows of the result.
    """
    if np.ma.is_masked(x):
        raise ValueError(f"{name} has masked values. Drop those rows or fill them in.")
    x, names = real_numbers(x, name)
    shape = tuple(x.shape)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"{name} must be a non-empty array of shape (points, features), got shape {shape}.{single_row_hint(shape)}"
        )
    return x, names


def real_numbers(x: Any, name: str = "X") -> tuple[Any, tuple[str, ...] | None]:
    """Validate that points are dense real numbers, of any shape; also return the column names of a DataFrame.

    Tensors and DataFrames are returned as they are, everything else as a NumPy array; nothing with a shape is copied.
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
        refuse_columns(wrong, name)
        refuse_duplicates(names, name)
    elif hasattr(x, "detach"):
        if x.is_sparse:
            raise TypeError(
                f"{name} is a sparse tensor; ellipsoids need dense points. Use {name}.to_dense() if it has few columns."
            )
        if x.is_complex():
            raise TypeError(f"{name} must hold real numbers, got dtype {x.dtype}.")
        if x.is_meta:
            raise TypeError(f"{name} is a tensor on the meta device, which holds no numbers; pass one with values.")
    else:
        try:
            x = np.asarray(x)
        except ValueError:
            raise ValueError(f"{name} has rows of different lengths; pass as many numbers in every row.") from None
        if x.dtype == object and x.ndim == 0:
            raise TypeError(f"{name} must be an array, a table or a list of rows, got {type(x.item()).__name__}.")
        if x.dtype == object:
            raise TypeError(
                f"{name} is an array of Python objects; convert it to numbers first, for example {name}.astype(float)."
            )
        if x.dtype.kind not in "fiub":
            raise TypeError(f"{name} must hold real numbers, got dtype {x.dtype}.")
    return x, names


def single_row_hint(shape: Sequence[int]) -> str:
    """Last sentence of an error message about a shape: how to pass a single row, if the shape is of one."""
    return " Pass a single row as a batch of one: z[None]." if len(shape) == 1 else ""


def refuse_columns(wrong: list[str], name: str = "X") -> None:
    """Raise TypeError if there are columns that do not hold numbers."""
    if wrong:
        listed = ", ".join(map(printable, wrong))
        raise TypeError(f"{name} has columns that are not numbers: {listed}. Encode or drop these columns.")


def refuse_duplicates(columns: Iterable[Any], name: str = "X") -> None:
    """Raise ValueError if two columns have the same name."""
    twice = [column for column, times in Counter(map(str, columns)).items() if times > 1]
    if twice:
        listed = ", ".join(map(repr, twice))
        raise ValueError(f"{name} has more than one column {listed}; give each column a name of its own.")


def float_rows(matrix: Any, start: int, stop: int) -> Float[Array, "n D"]:
    """Rows of a validated matrix (:func:`real_matrix`) in float32 or float64, whichever holds them exactly.

    Rows of arrays and CPU tensors of these dtypes are views.

    >>> float_rows(np.array([[1, 2], [3, 4]]), 1, 2)
    array([[3., 4.]])
    """
    if hasattr(matrix, "detach"):
        part = matrix.detach()[start:stop].cpu()
        # NumPy has no bfloat16; float32 holds every half-precision value.
        rows = (part.float() if part.is_floating_point() and part.element_size() < 4 else part).numpy()
    elif hasattr(matrix, "iloc"):
        # Ask for one float array: mixed column types would give objects, and pandas has missing values of its own.
        rows = matrix.iloc[start:stop].to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        rows = matrix[start:stop]
        rows = rows.to_numpy().astype(np.float64) if hasattr(rows, "to_numpy") else rows
    if rows.dtype in (np.float32, np.float64):
        return rows
    return rows.astype(np.float32 if rows.dtype == np.float16 else np.float64)


class FiniteCheck:
    """Search for NaN and infinite values in points that come in chunks.

    Args:
        name: Name of the points, for the error message.
        names: Names of the features, or None to number them.

    >>> check = FiniteCheck("X")
    >>> check.add(np.zeros((3, 2))), check.add(np.array([[0.0, np.inf]]))
    (True, False)
    >>> check.refuse()
    Traceback (most recent call last):
    ValueError: X holds 1 NaN or infinite values, the first in row 3, column 1. Drop those rows or impute the values.
    """

    def __init__(self, name: str, names: tuple[str, ...] | None = None) -> None:
        self._name, self._names = name, names
        self._rows = self._bad = 0
        self._first: tuple[int, int] | None = None

    def add(self, chunk: Float[Array, "n D"]) -> bool:
        """Search the next rows; return whether all values so far are finite."""
        bad = ~np.isfinite(chunk)
        found = int(np.count_nonzero(bad))
        if found and self._first is None:
            row, column = (int(i) for i in np.argwhere(bad)[0])
            self._first = self._rows + row, column
        self._bad += found
        self._rows += len(chunk)
        return self._first is None

    def refuse(self) -> None:
        """Raise ValueError if a value is not finite."""
        if self._first is not None:
            row, column = self._first
            where = column if self._names is None else self._names[column]
            raise ValueError(
                f"{self._name} holds {self._bad} NaN or infinite values, the first in row {row}, column {where!r}. "
                "Drop those rows or impute the values."
            )


def magnitudes(points: Float[Array, "N D"]) -> Float[Array, "D"]:
    """Largest absolute value of each feature, without a temporary array of the size of the points."""
    return np.maximum(points.max(axis=0), -points.min(axis=0))


def check_feature_scales(magnitude: Float[Array, "D"], name: str = "X", names: tuple[str, ...] | None = None) -> None:
    """Raise ValueError if the magnitude of a feature is beyond the range of :func:`check_scale`."""
    for column in (int(magnitude.argmax()), int(np.where(magnitude > 0, magnitude, np.inf).argmin())):
        where = column if names is None else names[column]
        check_scale(float(magnitude[column]), f"Column {where!r} of {name}")


def check_scale(magnitude: float, name: str, least: float = 1e-100, most: float = 1e100) -> None:
    """Raise ValueError unless a magnitude is zero or lies between ``least`` and ``most``.

    In the default range the cubes of float64 values neither overflow nor underflow.

    >>> check_scale(1e-310, "Column 2 of X")
    Traceback (most recent call last):
    ValueError: Column 2 of X has a scale of 1e-310; rescale the features to between 1e-100 and 1e+100, for example ...
    """
    if magnitude > most or 0 < magnitude < least:
        raise ValueError(
            f"{name} has a scale of {magnitude:.0e}; rescale the features to between {least:g} and {most:g}, for "
            "example to unit standard deviation."
        )


def feature_scale(points: Float[Array, "N D"]) -> Float[Array, "D"]:
    """Standard deviation of each feature; 1 if it is no more than rounding error, as for a constant feature."""
    magnitude = magnitudes(points)
    unit = np.where(magnitude > 0, magnitude, 1.0)  # avoids overflow and underflow of the squares
    return scale_or_one((points / unit).std(axis=0) * unit, magnitude)


def scale_or_one(deviation: Float[Array, "D"], magnitude: Float[Array, "D"]) -> Float[Array, "D"]:
    """The standard deviations, but 1 where a deviation is rounding error of values of the given magnitude."""
    return np.where(deviation > _CONSTANT * magnitude, deviation, 1.0)


def rank_shares(values: Float[Array, "N"]) -> Float[Array, "N"]:
    """For each value the share of the others that are smaller; NaN is the largest.

    >>> rank_shares(np.array([0.2, np.nan, 0.1])).tolist()
    [0.5, 1.0, 0.0]
    """
    filled = np.nan_to_num(values, nan=np.inf, posinf=np.inf)
    return np.searchsorted(np.sort(filled), filled) / max(len(filled) - 1, 1)


def _is_numeric(dtype: Any) -> bool:
    """Whether a DataFrame column holds numbers or booleans: pandas has a kind letter, polars a method."""
    if hasattr(dtype, "is_numeric"):
        return bool(dtype.is_numeric()) or str(dtype) == "Boolean"
    return getattr(dtype, "kind", "O") in "fiub"
