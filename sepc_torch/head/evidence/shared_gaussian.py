r"""Mahalanobis distance to the nearest class mean, with one covariance for all classes.

The polar coordinates t of an embedding cover the R directions of largest variance. Within classes they have the pooled
covariance :math:`\Sigma`. The directions outside have the mean variance :math:`\sigma^2` each, and no class is known
there. With the residual r, the length of the part of the features outside the R directions,

.. math:: d^2 = \min_c \, (t - \mu_c)^\top \Sigma^{-1} (t - \mu_c) + \frac{r^2}{\sigma^2}.

This is the Mahalanobis distance of directions (Mahalanobis++, Müller and Hein 2025) with the covariance of
probabilistic principal components, which takes R x R instead of D x D numbers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sepc_torch.head.evidence.densities import ClassSpread
from sepc_torch.model import torch_ops
from sepc_torch.model.derived import Derived
from sepc_torch.model.precision import as_dtype
from sepc_torch.shapes import Array, Float

# Least variance of the directions outside, as a share of the mean variance of all directions: where training embeddings
# never vary, only rounding errors would set the scale.
_LEAST_VARIANCE = 1e-3


class SharedGaussian(Derived):
    """Squared distance to the nearest class mean, in units of the pooled covariance.

    Args:
        whitener: Matrix (R, R) that maps coordinates to unit covariance within classes.
        means: Whitened class means (C, R).
        deviations: Standard deviation (R,) of each coordinate before it was scaled to one.
        outside: Variance of each direction outside the coordinates; infinite if there is none.

    >>> model = SharedGaussian(torch.eye(1), torch.tensor([[0.0], [4.0]]), torch.ones(1), torch.tensor(0.5))
    >>> model(torch.tensor([[3.0]]), torch.tensor([11.0]))  # 1 to the second mean, and 11 - 9 = 2 outside
    tensor([5.], dtype=torch.float64)
    """

    derived = ("wide",)
    whitener: Tensor
    means: Tensor
    deviations: Tensor
    outside: Tensor

    def __init__(
        self,
        whitener: Float[Tensor, "R R"],
        means: Float[Tensor, "C R"],
        deviations: Float[Tensor, "R"],
        outside: Float[Tensor, ""],
    ) -> None:
        super().__init__()
        self.register_buffer("whitener", whitener)
        self.register_buffer("means", means)
        self.register_buffer("deviations", deviations)
        self.register_buffer("outside", outside)
        self.restore()

    def derive(self) -> None:
        """Convert the buffers to float64, and compute minus half of the squared lengths of the means."""
        means = self.means.double()
        lengths = -means.square().sum(dim=1) / 2
        self.wide = [self.whitener.double().T, means, lengths, self.deviations.double(), self.outside.double()]

    def forward(self, coordinates: Float[Tensor, "B R"], square: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Return the squared distance of points in float64.

        Args:
            coordinates: The coordinates, scaled to unit variance.
            square: Squared length of all features relative to their mean, of which the coordinates cover a part.
        """
        return _squared_distance(coordinates, square, self.wide)


def _squares(coordinates: Float[Tensor, "B R"], square: Float[Tensor, "B"], tables: list[Tensor]) -> Float[Tensor, "B"]:
    whitener, means, half_squares, deviations, outside = tables
    coordinates, square = as_dtype(coordinates, torch.float64), as_dtype(square, torch.float64)
    white = coordinates @ whitener
    # The nearest mean by a product, then its distance from differences, which keeps the digits of short ones.
    near = torch.addmm(half_squares, white, means.T).argmax(dim=1)
    inside = (white - means.index_select(0, near)).square().sum(dim=1)
    rest = square - (coordinates * deviations).square().sum(dim=1)
    return inside + rest.clamp_min(0.0) / outside


_squared_distance = torch_ops.opaque(
    "squared_distance(Tensor coordinates, Tensor square, Tensor[] tables) -> Tensor",
    _squares,
    lambda coordinates, square, tables: square.new_empty(square.shape[0], dtype=torch.float64),
)


def shared_gaussian(
    spread: ClassSpread,
    deviations: Float[Array, "R"],
    features: int,
    variance: float,
    dtype: torch.dtype = torch.float32,
) -> SharedGaussian:
    """Build the module from the spread of the coordinates within classes.

    Args:
        spread: Class means and the whitener of the pooled covariance.
        deviations: Standard deviation of each coordinate before it was scaled to one.
        features: Number of all features.
        variance: Sum of the variances of all features.
        dtype: Dtype of the module.
    """
    rest = features - len(deviations)
    outside = float("inf")
    if rest > 0:
        outside = max((variance - float((deviations**2).sum())) / rest, _LEAST_VARIANCE * variance / features)
    arrays = spread.whitener, spread.means @ spread.whitener.T, deviations, np.array(outside)
    whitener, means, scales, variance_outside = (torch.from_numpy(array).to(dtype) for array in arrays)
    return SharedGaussian(whitener, means, scales, variance_outside)
