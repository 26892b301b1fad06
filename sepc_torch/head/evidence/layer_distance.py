r"""Earlier layers of a network: one Mahalanobis distance each, as a further kind of nonconformity.

The last layer of a network keeps what tells the known classes apart and drops the rest. An unknown of another kind of
picture can therefore look ordinary there and strange in an earlier layer. Each layer has the distance of
:mod:`sepc_torch.head.evidence.shared_gaussian`: directions and lengths of its activations, one covariance within
classes, the nearest class mean. Maps (B, C, H, W) and tokens (B, T, C) are averaged over their positions first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sepc_torch.head.evidence.densities import ClassSpread, pooled_prior
from sepc_torch.head.evidence.shared_gaussian import SharedGaussian, shared_gaussian
from sepc_torch.head.kernels.tables import Affine, linear_tables
from sepc_torch.head.reading.coordinates import coordinates, fits, supported
from sepc_torch.head.reading.layers import LayerMoments
from sepc_torch.head.reading.moments import EmbeddingMoments
from sepc_torch.head.reading.passes import MAX_DIRECTIONS
from sepc_torch.head.reading.projection import Projection, projection_from
from sepc_torch.model.derived import Derived
from sepc_torch.shapes import Array, Float, Int

# Variance of directions and log lengths below this is rounding: the activations are all the same.
_LEAST_SPREAD = 1e-12


class LayerDistance(Derived):
    """Squared Mahalanobis distance of the activations of a layer to the nearest class mean.

    Args:
        polar: Projection from activations to coordinates: direction and log length.
        gaussian: Class means and pooled covariance in these coordinates.
    """

    derived = ("tables", "gaussian_tables")

    def __init__(self, polar: Projection, gaussian: SharedGaussian) -> None:
        super().__init__()
        self.polar, self.gaussian = polar, gaussian
        self.restore()

    def derive(self) -> None:
        """Lay out the tables of the CUDA kernel; none where it cannot run."""
        self.tables, self.gaussian_tables = gaussian_kernel_tables(self.polar, self.gaussian, [])

    def forward(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "B"]:
        """Return the squared distances in float64, without gradients."""
        x = x.detach()
        if fits(x, self.tables):
            return coordinates(x, self.tables, [len(self.polar.matrix)], self.gaussian_tables)[-1]
        return self.gaussian(*self.polar.with_square(x))


def gaussian_kernel_tables(
    polar: Projection, gaussian: SharedGaussian, others: list[Projection]
) -> tuple[list[Tensor], list[Tensor]]:
    """Tables of the CUDA kernel for the coordinates, further projections, and the distance; empty without kernels."""
    if not supported(polar.shift):
        return [], []
    first = polar.affine()._replace(scale=gaussian.deviations)
    maps = [(0, first), *((1, other.affine()) for other in others)]
    matrix = gaussian.whitener.double() @ first.matrix
    maps.append((2, Affine(first.lengths, first.shift, matrix, first.scale)))
    means = [gaussian.means.double(), gaussian.outside.double().reshape(1)]
    return list(linear_tables(maps, polar.in_features, polar.least())), means


def fit_layers(
    moments: LayerMoments, classes: Sequence[Any], dtype: torch.dtype = torch.float32
) -> dict[str, LayerDistance]:
    """Fit the distance of every layer, for classes in the given order.

    >>> moments = LayerMoments()
    >>> moments.add({"conv": np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 0.1], [0.1, 2.0]])}, ["a", "b", "a", "b"])
    >>> fit_layers(moments, ["a", "b"])["conv"](torch.tensor([[1.0, 0.1], [-1.0, 0.0]])).argmax()
    tensor(1)
    """
    order = np.array([moments.index[label] for label in classes], dtype=np.int64)
    found = {}
    for name, of_layer in moments.finished().items():
        if not float(np.trace(of_layer.polar().covariance)) > _LEAST_SPREAD:
            raise ValueError(f"The layer {name!r} does not vary: all rows are the same. Leave it out.")
        found[name] = _layer_distance(of_layer, order, dtype)
    return found


def _layer_distance(moments: EmbeddingMoments, order: Int[Array, "C"], dtype: torch.dtype) -> LayerDistance:
    """Fit the distance of a layer to the moments of its polar features; ``order`` holds the number of each class."""
    polar = projection_from(moments, MAX_DIRECTIONS, "polar", "pca", dtype)
    features, matrix = moments.polar(), polar.matrix.double().numpy()
    means, counts = moments.class_means()[order] @ matrix.T, moments.class_counts[order]
    within = matrix @ features.scatter @ matrix.T - (counts * means.T) @ means
    prior = pooled_prior(within, features.count, len(order))
    spread = ClassSpread(means, np.linalg.inv(np.linalg.cholesky(prior)))
    variance = float(np.trace(features.covariance))
    deviations = 1.0 / np.linalg.norm(matrix, axis=1)
    return LayerDistance(polar, shared_gaussian(spread, deviations, len(features.mean), variance, dtype))
