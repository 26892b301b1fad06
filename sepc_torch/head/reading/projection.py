r"""Projections of embeddings (PCA or LDA) for the partition, the class densities and the whitened distances.

A projection normalises, centres and projects embeddings, and scales every direction to unit variance.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data.arrays import rows_per_chunk, single_row_hint
from sepc_torch.data.warn import warn_user
from sepc_torch.head.kernels.tables import Affine, linear_tables
from sepc_torch.head.reading.coordinates import coordinates, fits, supported
from sepc_torch.head.reading.defaults import default_dim
from sepc_torch.head.reading.moments import EmbeddingMoments
from sepc_torch.model import torch_ops
from sepc_torch.model.derived import Derived
from sepc_torch.shapes import Array, Float, Int

Normalize = Literal["l2", "standardize"] | None  # what a user chooses for the partition
Scaling = Normalize | Literal["polar"]  # the densities and earlier layers use polar coordinates
Method = Literal["pca", "lda"]

# Directions whose standard deviation is below this share of the largest one hold rounding noise.
_NOISE = 1e-6
# Share of the total scatter added to the within-class scatter, so that classes with few points do not make it singular.
_SHRINKAGE = 1e-3
# Below this default dimension, caused by tiny classes, the head warns: a few dimensions represent an embedding poorly.
_FEW_DIMENSIONS = 4


class Projection(Derived):
    r"""Affine map :math:`x \mapsto P (\bar x - m)` from D to R features.

    Computes in float64 and rounds the result to the wider of float32 and the dtype of the embeddings. Sums in float32
    would depend on the batch size; rounded from float64 they do not.

    Args:
        shift: The centre :math:`m` (D,).
        matrix: The matrix :math:`P` (R, D).
        unit_length: Whether :math:`\bar x = x / \|x\|`; otherwise :math:`\bar x = x`. An embedding of zeros has no
            direction and becomes NaN, which the head rejects or flags.
        least_length: With ``unit_length``, a lower bound of the length. :math:`\log \|x\|` then becomes one more
            feature after the direction, and ``shift`` and ``matrix`` have one more column. An embedding of zeros has
            the direction zero and the least length.
    """

    derived = (
        "wide",
        "tables",
    )
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
        self.register_buffer("matrix", matrix.contiguous())  # as in a loaded file: products depend on the layout
        self.register_buffer("least_length", least_length)
        self.unit_length = unit_length
        self.restore()

    def derive(self) -> None:
        """Convert the map to float64, and lay out the tables of the CUDA kernel; none where it cannot run."""
        least = None if self.least_length is None else self.least_length.double()
        self.wide = self.shift.double(), self.matrix.double().T, least
        self.tables: list[Tensor] = []
        if supported(self.shift):
            self.tables = list(linear_tables([(0, self.affine())], self.in_features, self.least()))

    def affine(self) -> Affine:
        """The projection for the tables of a CUDA kernel; the scale of a result is its deviation before scaling."""
        lengths = 0 if not self.unit_length else 1 if self.least_length is None else 2
        matrix = self.matrix.double()
        return Affine(lengths, self.shift, matrix, 1.0 / matrix.norm(dim=1))

    def least(self) -> float:
        """The least length; zero without one."""
        return 0.0 if self.least_length is None else float(self.least_length)

    @property
    def in_features(self) -> int:
        """Number of features D of the embeddings."""
        shift, _, least = self.wide
        return shift.shape[0] - int(least is not None)

    def forward(self, x: Tensor) -> Float[Tensor, "B R"]:
        """Project a batch of embeddings (B, D)."""
        if self.tables and isinstance(x, Tensor) and fits(x, self.tables):
            self._check(x)
            return coordinates(x, self.tables, [len(self.matrix)], [])[0]
        return self._project(x, squares=False)[0]

    def with_square(self, x: Tensor) -> tuple[Float[Tensor, "B R"], Float[Tensor, "B"]]:
        r"""Project a batch of embeddings (B, D), and return also :math:`\|\bar x - m\|^2`; both in float64."""
        coordinates, square = self._project(x, squares=True)
        return coordinates, square

    def _project(self, x: Tensor, *, squares: bool) -> list[Tensor]:
        self._check(x)
        narrow = torch.promote_types(x.dtype, self.shift.dtype) == torch.float32
        return _project(x, *self.wide, self.unit_length, narrow, squares)

    def _check(self, x: Tensor) -> None:
        """Refuse anything but a tensor (B, D)."""
        if not isinstance(x, Tensor):
            raise TypeError(
                f"embeddings must be a tensor, got {type(x).__name__}; use torch.as_tensor, or TrustHead.judge, which "
                "takes arrays."
            )
        if x.dim() != 2 or x.shape[1] != self.in_features:
            wanted, hint = f"(points, {self.in_features})", single_row_hint(x.shape)
            raise ValueError(f"embeddings must have shape {wanted}, got {tuple(x.shape)}.{hint}")


def _coordinates(
    x: Tensor, shift: Tensor, matrix: Tensor, least: Tensor | None, unit_length: bool, narrow: bool, squares: bool
) -> list[Tensor]:
    """Project embeddings in float64.

    Args:
        x: The embeddings (B, D).
        shift: The centre.
        matrix: The transposed matrix.
        least: The least length, or None.
        unit_length: See :class:`Projection`.
        narrow: Whether embeddings and results are in float32; otherwise in float64.
        squares: Whether to return the squared length of the centred features too, and all in float64.
    """
    x = x.double()
    if unit_length:
        # Beyond this length the squares of other computations overflow in the dtype of the embeddings.
        longest = torch.finfo(torch.float32 if narrow else torch.float64).max ** 0.5
        # A zero embedding has no direction. NaN marks the row (zero divided by zero); zeros would be taken for the
        # mean. A row whose length overflows would become zeros and is marked too.
        differentiates = x.requires_grad and torch.is_grad_enabled()
        length = torch.linalg.vector_norm(x.detach() if differentiates else x, dim=1, keepdim=True)
        if differentiates:  # no gradient reaches a marked row
            valid = (length <= longest) if least is not None else (length > 0) & (length <= longest)
            x = torch.where(valid, x, torch.nan)
            length = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        length = torch.where(length <= longest, length, torch.nan)
        if least is None:
            x = x / length
        else:
            length = length.clamp_min(least)
            x = torch.cat([x / length, length.log()], dim=1)
    centred = x - shift
    found = centred @ matrix
    return [found, centred.square().sum(dim=1)] if squares else [found.float() if narrow else found]


def _coordinate_shapes(
    x: Tensor, _shift: Tensor, matrix: Tensor, _least: Tensor | None, _unit: bool, narrow: bool, squares: bool
) -> list[Tensor]:
    dtype = torch.float32 if narrow and not squares else torch.float64
    found = x.new_empty(x.shape[0], matrix.shape[1], dtype=dtype)
    return [found, x.new_empty(x.shape[0], dtype=dtype)] if squares else [found]


_project = torch_ops.opaque(
    "project(Tensor x, Tensor shift, Tensor matrix, Tensor? least, bool unit_length, bool narrow, bool squares) "
    "-> Tensor[]",
    _coordinates,
    _coordinate_shapes,
)


def fit_projection(
    x: Float[Array, "N D"],
    codes: Int[Array, "N"],
    dim: int,
    normalize: Scaling,
    method: Method,
    dtype: torch.dtype = torch.float32,
) -> Projection:
    """Fit the projection on at most ``dim`` directions of unit variance to labelled embeddings in memory.

    Args:
        x: The embeddings.
        codes: The class of each embedding.
        dim: See :func:`projection_from`.
        normalize: See :func:`projection_from`.
        method: See :func:`projection_from`.
        dtype: Dtype of the projection.

    >>> x = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 3.0], [0.0, -3.0]])
    >>> fit_projection(x, np.array([0, 0, 1, 1]), 1, None, "pca")(torch.tensor([[0.0, 3.0]]))
    tensor([[1.4142]])
    """
    moments = EmbeddingMoments(class_features(normalize, method))
    step = rows_per_chunk(x.shape[1])
    for start in range(0, len(x), step):
        moments.add(x[start : start + step], codes[start : start + step])
    moments.finish()
    return projection_from(moments, dim, normalize, method, dtype)


def class_features(normalize: Scaling, method: Method) -> Literal["raw", "direction"] | None:
    """The features whose class sums a projection needs."""
    if method == "pca":
        return None
    return "direction" if normalize == "l2" else "raw"


def projection_from(
    moments: EmbeddingMoments, dim: int, normalize: Scaling, method: Method, dtype: torch.dtype = torch.float32
) -> Projection:
    """Fit the projection on at most ``dim`` directions of unit variance to the moments of embeddings.

    Args:
        moments: The moments, with the class sums of :func:`class_features`.
        dim: Largest number of directions to keep.
        normalize: ``"l2"`` divides embeddings by their length. ``"standardize"`` divides features by their standard
            deviation. ``"polar"`` keeps the direction of an embedding and, as one more feature, the logarithm of its
            length; it has no ``"lda"``.
        method: ``"pca"`` keeps the directions of largest variance. ``"lda"`` keeps the directions in which the class
            means are farthest apart relative to the spread within classes; there are at most C - 1.
        dtype: Dtype of the projection.
    """
    if normalize == "l2":
        features = moments.direction()
    elif normalize == "polar":
        features = moments.polar()
    else:
        features = moments.raw
    unit = moments.feature_scale() if normalize == "standardize" else np.ones_like(features.mean)
    covariance = features.covariance / np.outer(unit, unit)
    if method == "pca":
        rows = _principal(covariance, dim)
    else:
        rows = _discriminant(covariance, moments.class_means() / unit, moments.class_counts, dim)
    rows = rows / np.sqrt(np.einsum("ri,ij,rj->r", rows, covariance, rows, optimize=True))[:, None]
    # The sign of a direction is arbitrary: the largest entry is made positive, so that equal data give equal models.
    rows *= np.sign(rows[np.arange(len(rows)), np.abs(rows).argmax(axis=1)])[:, None]
    return Projection(
        torch.from_numpy(features.mean).to(dtype),
        torch.from_numpy(rows / unit).to(dtype),
        unit_length=normalize in ("l2", "polar"),
        least_length=torch.tensor(moments.least, dtype=dtype) if normalize == "polar" else None,
    )


def _principal(covariance: Float[Array, "D D"], dim: int) -> Float[Array, "R D"]:
    variance, vectors = np.linalg.eigh(covariance)
    variance, vectors = variance[::-1], vectors[:, ::-1]
    if variance[0] <= 0:
        raise ValueError("The embeddings do not vary: all are the same point. Check the encoder.")
    present = int(np.count_nonzero(variance > (_NOISE**2) * variance[0]))
    return vectors[:, : min(dim, present)].T


def _discriminant(
    covariance: Float[Array, "D D"], means: Float[Array, "C D"], counts: Int[Array, "C"], dim: int
) -> Float[Array, "R D"]:
    weighted = np.sqrt(counts / counts.sum())[:, None] * means
    total = np.trace(covariance)
    # The shrinkage is far above the rounding error of the difference.
    scatter = covariance - weighted.T @ weighted + _SHRINKAGE * total / len(covariance) * np.eye(len(covariance))
    values, vectors = np.linalg.eigh(scatter)
    whiten = vectors / np.sqrt(values)
    _, strength, directions = np.linalg.svd(weighted @ whiten, full_matrices=False)
    present = int(np.count_nonzero(strength > _NOISE * strength[0]))
    return (whiten @ directions[: min(dim, len(counts) - 1, present)].T).T


def choose_projection(
    moments: EmbeddingMoments,
    classes: Array,
    sizes: Int[Array, "C"],
    dim: int | None,
    normalize: Normalize,
    method: Method,
) -> Projection:
    """Fit the projection of a trust head: choose or check the dimension, and check the class sizes.

    Args:
        moments: The moments of the training embeddings.
        classes: The classes (C,).
        sizes: The number of points of each class.
        dim: The dimension, or None for :func:`~sepc_torch.head.reading.defaults.default_dim`.
        normalize: See :func:`projection_from`.
        method: See :func:`projection_from`.
    """
    features = moments.features
    if dim is None:
        dim = default_dim(sizes, features)
        if dim < min(_FEW_DIMENSIONS, features):
            warn_user(
                f"The classes have few points ({int(np.median(sizes))} in the median), so embeddings are projected on "
                f"{dim} dimensions. Add data, leave small classes out, or choose dim.",
            )
    elif dim > features:
        raise ValueError(f"dim={dim} is more than the {features} features of the embeddings; choose a smaller dim.")
    if normalize == "l2" and moments.zeros:
        raise ValueError("Some embeddings are all zeros and have no direction; drop them, or choose normalize=None.")
    projection = projection_from(moments, dim, normalize, method)
    dim = len(projection.matrix)
    if sizes.max() < dim:
        raise ValueError(f"No class has {dim} points, one for each dimension; choose dim <= {sizes.max()}.")
    _warn_of_small_classes(sizes, dim, classes)
    return projection


def _warn_of_small_classes(sizes: Int[Array, "C"], dim: int, classes: Array) -> None:
    """Warn of the classes that have too few points for the dimension."""
    small = [(label, size) for label, size in zip(classes.tolist(), sizes.tolist(), strict=True) if size < 2 * dim]
    if small:
        shown = ", ".join(f"{label!r} ({size})" for label, size in small[:5])
        shown += f" and {len(small) - 5} more" if len(small) > 5 else ""
        warn_user(
            f"Classes with fewer than {2 * dim} training rows for {dim} dimensions (rows): {shown}. Many of their rows "
            "will lie in no ellipsoid, which lowers the trust in these labels; choose a smaller dim or add rows.",
        )
