r"""Split ellipsoids: a bank in the memory layout of the distance kernels.

Split ellipsoids (:class:`Split`) give float32 accuracy from float16 tensor cores. A number scaled to magnitudes
around :math:`2^{14}` is the sum of two float16 numbers: ``high`` holds its first eleven bits, ``low`` the next eleven.
A product of two such sums needs three of the four partial products: high x high, high x low and low x high. The scales
are powers of two, so scaling rounds nothing:

- features by :math:`s_i`, so that all features contribute alike to :math:`(z - c) / s`;
- row j of the upper triangular :math:`R` with :math:`R^\top R = W^\top W` by :math:`t_j`, so that each row uses the
  range of float16:
  :math:`d^2 = \sum_j \bigl(t_j \sum_{i \ge j} \tfrac{R_{ji} s_i}{t_j} \tfrac{z_i - c_i}{s_i}\bigr)^2`;
- each point by its own scale, inside the kernel.

Numbers more than :math:`2^{28}` times smaller than the largest of their row lose digits; float32 sums lose them too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.shapes import Float

# The largest magnitude after scaling. Float16 ends at 2^16, and sums of products stay far within float32.
TOP = 2.0**14
# Tensor cores multiply blocks of at least 16; beyond 64 features the kernel works block by block.
_SMALLEST_BLOCK = 16
_LARGEST_BLOCK = 64


class Split(NamedTuple):
    r"""Ellipsoids as pairs of float16 numbers. F is the number of features, padded with zeros to whole blocks.

    ``feature_scale`` (F,) is :math:`1 / s`, ``centers`` (K, F) are in units of s, ``high`` and ``low`` (K, F, F) hold
    :math:`R_{ji} s_i / t_j` at [k, i, j], ``row_scale`` (K, F) is :math:`t`, and ``reach`` is the largest coordinate of
    a centre.
    """

    feature_scale: Float[Tensor, "F"]
    centers: Float[Tensor, "K F"]
    high: Tensor
    low: Tensor
    row_scale: Float[Tensor, "K F"]
    reach: float


def block_size(dim: int) -> int:
    """Features per block: a power of two between 16 and 64.

    >>> block_size(5), block_size(40), block_size(200)
    (16, 64, 64)
    """
    return min(max(_SMALLEST_BLOCK, power_of_two(dim)), _LARGEST_BLOCK)


def power_of_two(number: int) -> int:
    """The least power of two that is not below a positive number.

    >>> power_of_two(1), power_of_two(5), power_of_two(8)
    (1, 8, 8)
    """
    return 1 << (number - 1).bit_length()


def power_of_two_above(x: Tensor) -> Tensor:
    """The least power of two above each number, exactly; a logarithm could round."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(mantissa), exponent)


def upper_triangular(whiteners: Float[Tensor, "K D D"]) -> Float[Tensor, "K D D"]:
    """Upper triangular whiteners of the same ellipsoids.

    >>> upper_triangular(torch.tensor([[[3.0, 0.0], [4.0, 1.0]]])).abs()
    tensor([[[5.0000, 0.8000],
             [0.0000, 0.6000]]])
    """
    if bool(whiteners.tril(-1).count_nonzero()):
        whiteners = torch.linalg.qr(whiteners, mode="r")[1]
    return whiteners.contiguous()


def split(centers: Float[Tensor, "K D"], whiteners: Float[Tensor, "K D D"]) -> Split:
    """Split the ellipsoids of a bank, in float64; runs once, whenever the ellipsoids change."""
    dim = centers.shape[1]
    block = block_size(dim)
    padded = -(-dim // block) * block
    c, w = centers.double(), upper_triangular(whiteners.double())
    # Typical offset from the centre along a feature: half the chord of the ellipsoid through its centre.
    width = 1.0 / torch.linalg.vector_norm(w, dim=1)
    s = power_of_two_above(torch.maximum(c.abs(), width).amax(dim=0))
    r = w * s
    t = power_of_two_above(r.abs().amax(dim=2))
    r = (r * (TOP / t)[:, :, None]).mT
    high = r.half()
    pad = padded - dim
    return Split(
        feature_scale=torch.nn.functional.pad(1.0 / s, (0, pad)).float(),
        centers=torch.nn.functional.pad(c / s, (0, pad)).float().contiguous(),
        high=torch.nn.functional.pad(high, (0, pad, 0, pad)).contiguous(),
        low=torch.nn.functional.pad((r - high.double()).half(), (0, pad, 0, pad)).contiguous(),
        row_scale=torch.nn.functional.pad(t / TOP, (0, pad)).float().contiguous(),
        reach=float((c / s).abs().max()),
    )
