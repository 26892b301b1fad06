r"""Embeddings brought into the coordinates in which they are partitioned: normalise, centre, project, whiten."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch.data.arrays import feature_scale
from sepc_torch.model import torch_ops
from sepc_torch.model.buffers import at_least_float32
from sepc_torch.shapes import Array, Float, Int

Normalize = Literal["l2", "standardize", "polar"] | None
Method = Literal["pca", "lda"]

# Directions with less than this share of the largest standard deviation hold rounding noise.
_NOISE = 1e-6
# Shorter embeddings than this share of the median length are taken for that long: the logarithm of zero is no number.
_SHORT = 1e-3
# Share of the total scatter added to the within-class scatter, so that classes with few points do not make it singular.
_SHRINKAGE = 1e-3


# More dimensions than this gained nothing on any data set tried, and cost time (experiments/head_defaults.py).
_MOST_DIMENSIONS = 32


class Projection(nn.Module):
    r"""The map :math:`x \mapsto P (\bar x - m)`, with :math:`\bar x = x / \|x\|` if so chosen, from D to R features.

    An embedding of zeros has no direction and becomes NaN, which the head refuses or flags. With ``least_length`` the
    length is not lost: :math:`\log \|x\|` becomes one more feature beside the direction, from that length on; of zeros
    the direction is then zero. ``shift`` is :math:`m` (D,), ``matrix`` is :math:`P` (R, D), each with a column for the
    length where it counts. Computed in at least float32, whatever autocast and TF32 settings say.
    """

    shift: Tensor
    matrix: Tensor
    least_length: Tensor | None

    def __init__(
        self,
        shift: Float[Tensor, "D"],
        matrix: Float[Tensor, "R D"],
        *,
        unit_length: bool,
        least_length: Float[Tensor, ""] | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("shift", shift)
        self.register_buffer("matrix", matrix)
        self.register_buffer("least_length", least_length)
        self.unit_length = unit_length

    @property
    def in_features(self) -> int:
        """Number of features D of the embeddings."""
        return self.shift.shape[0] - int(self.least_length is not None)

    def forward(self, x: Tensor) -> Float[Tensor, "B R"]:
        """Project a batch of embeddings (B, D)."""
        if not isinstance(x, Tensor):
            raise TypeError(f"embeddings must be a tensor, got {type(x).__name__}; use torch.as_tensor, or predict.")
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"embeddings must have shape (points, {self.in_features}), got {tuple(x.shape)}.")
        dtype = torch.promote_types(x.dtype, self.shift.dtype)
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(dtype)
            if self.unit_length:
                # A zero embedding has no direction: NaN marks it, so that it is refused and not taken for the mean.
                # One whose length overflows would become zeros: it is marked as well. No gradient reaches either.
                if self.least_length is None:
                    length = torch.linalg.vector_norm(x.detach(), dim=1, keepdim=True)
                    marked = (length == 0) | ~length.isfinite()
                    x = torch.where(marked, 1.0, x)
                    x = torch.where(marked, torch.nan, x / torch.linalg.vector_norm(x, dim=1, keepdim=True))
                else:
                    length = torch.linalg.vector_norm(x, dim=1, keepdim=True)
                    length = torch.where(length.isinf(), torch.nan, length)
                    length = length.clamp_min(self.least_length.to(dtype))
                    x = torch.cat([x / length, length.log()], dim=1)
            return _product(x - self.shift.to(dtype), self.matrix.to(dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Projection:
        return super()._apply(at_least_float32(fn), recurse)  # type: ignore[no-untyped-call]


def _exact_product(x: Tensor, matrix: Tensor) -> Tensor:
    with torch_ops.full_precision(x):
        return x @ matrix.T


def _product_shape(x: Tensor, matrix: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], matrix.shape[0])


# An operator, since a compiler cannot see through a change of settings.
_product = torch_ops.operator("exact_product(Tensor x, Tensor matrix) -> Tensor", _exact_product, _product_shape)
torch_ops.differentiable("exact_product", lambda x, matrix, output, grad: (_product(grad, matrix.T), None))


def fit_projection(
    x: Float[Array, "N D"],
    codes: Int[Array, "N"],
    dim: int,
    normalize: Normalize,
    method: Method,
    dtype: torch.dtype = torch.float32,
) -> Projection:
    """Learn the projection on at most ``dim`` directions of unit variance from labelled embeddings.

    ``"pca"`` keeps the directions of largest variance. ``"lda"`` keeps those in which the class means are farthest
    apart relative to the spread within classes; there are at most C - 1 of them. ``"polar"`` keeps the direction of an
    embedding and, as one more feature, the logarithm of its length.
    """
    least = float(np.finfo(np.float64).tiny)
    if normalize in ("l2", "polar"):
        length = np.linalg.norm(x, axis=1, keepdims=True)
        if normalize == "polar":
            least = max(least, _SHORT * float(np.median(length)))
        length = np.maximum(length, least)
        x = x / length
        if normalize == "polar":
            x = np.hstack([x, np.log(length)])
    mean = x.mean(axis=0)
    centred = x - mean
    unit = np.ones_like(mean)
    if normalize == "standardize":
        unit = feature_scale(x)
        centred = centred / unit
    rows = _principal(centred, dim) if method == "pca" else _discriminant(centred, codes, dim)
    rows = rows / np.sqrt(np.mean((centred @ rows.T) ** 2, axis=0))[:, None]
    # Signs are arbitrary; the largest entry of each direction is made positive so that equal data give equal models.
    rows *= np.sign(rows[np.arange(len(rows)), np.abs(rows).argmax(axis=1)])[:, None]
    return Projection(
        torch.from_numpy(mean).to(dtype),
        torch.from_numpy(rows / unit).to(dtype),
        unit_length=normalize in ("l2", "polar"),
        least_length=torch.tensor(least, dtype=dtype) if normalize == "polar" else None,
    )


def _principal(centred: Float[Array, "N D"], dim: int) -> Float[Array, "R D"]:
    variance, vectors = np.linalg.eigh(centred.T @ centred / len(centred))
    variance, vectors = variance[::-1], vectors[:, ::-1]
    if variance[0] <= 0:
        raise ValueError("The embeddings do not vary: all are the same point.")
    present = int(np.count_nonzero(variance > (_NOISE**2) * variance[0]))
    return vectors[:, : min(dim, present)].T


def _discriminant(centred: Float[Array, "N D"], codes: Int[Array, "N"], dim: int) -> Float[Array, "R D"]:
    classes = int(codes.max()) + 1
    counts = np.bincount(codes, minlength=classes)
    sums = np.zeros((classes, centred.shape[1]))
    np.add.at(sums, codes, centred)
    means = sums / counts[:, None]
    within = centred - means[codes]
    scatter = within.T @ within / len(centred)
    total = np.trace(centred.T @ centred) / len(centred)
    scatter += _SHRINKAGE * total / len(scatter) * np.eye(len(scatter))
    values, vectors = np.linalg.eigh(scatter)
    whiten = vectors / np.sqrt(values)
    _, strength, directions = np.linalg.svd(np.sqrt(counts)[:, None] * means @ whiten, full_matrices=False)
    present = int(np.count_nonzero(strength > _NOISE * strength[0]))
    return (whiten @ directions[: min(dim, classes - 1, present)].T).T


def default_dim(sizes: Int[Array, "C"], features: int) -> int:
    r"""Dimensions to project on, :math:`\min(32, \lfloor\sqrt{n}\rfloor, D)` for the smallest class's n.

    >>> default_dim(np.array([100, 900]), 64)
    10
    """
    return int(max(1, min(_MOST_DIMENSIONS, np.sqrt(sizes.min()), features)))


def warn_of_small_classes(sizes: Int[Array, "C"], dim: int, classes: Array) -> None:
    """Say which classes have too few points for so many dimensions."""
    small = [label for label, size in zip(classes.tolist(), sizes.tolist(), strict=True) if size < 2 * dim]
    if small:
        shown = ", ".join(map(repr, small[:5])) + (f" and {len(small) - 5} more" if len(small) > 5 else "")
        warnings.warn(
            f"{len(small)} classes have fewer than {2 * dim} points for {dim} dimensions: {shown}. Many of their "
            "points will stay isolated; choose a smaller dim or add data.",
            stacklevel=3,
        )
