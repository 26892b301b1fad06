r"""Whiteners and centres prepared for tensor cores: float32's accuracy from products of float16 numbers.

A number scaled to magnitudes around :math:`2^{14}` is the sum of two float16 numbers, ``high`` with its first eleven
bits and ``low`` with the next eleven, and a product of two such sums needs three of the four partial products:
high times high, high times low and low times high. Scaling by powers of two rounds nothing:

- features by :math:`s_i`, so that all of them have a like part in :math:`(z - c) / s`;
- the rows of the upper triangular :math:`R` with :math:`R^\top R = W^\top W` by :math:`t_j`, so that each uses the
  range of float16,
  :math:`d^2 = \sum_j \bigl(t_j \sum_{i \ge j} \tfrac{R_{ji} s_i}{t_j} \tfrac{z_i - c_i}{s_i}\bigr)^2`;
- each point by a number of its own, in the kernel.

Numbers more than :math:`2^{28}` below the largest of their row lose digits, which is below what float32 keeps of a sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.shapes import Float

# The largest magnitude after scaling: float16 ends at 2^16, and sums of products stay far within float32.
TOP = 2.0**14
# Tensor cores take at least sixteen numbers at a time; beyond 64 features the kernel goes block by block.
SMALLEST_BLOCK = 16
LARGEST_BLOCK = 64


class Split(NamedTuple):
    """What the kernel reads. P is the number of features, padded with zeros to whole blocks.

    ``feature_scale`` (P,) is :math:`1 / s`, ``centers`` (K, P) are in units of s, ``high`` and ``low`` (K, P, P) hold
    :math:`R_{ji} s_i / t_j` at [k, i, j], ``row_scale`` (K, P) is :math:`t`, ``reach`` the largest centre coordinate.
    """

    feature_scale: Float[Tensor, "P"]
    centers: Float[Tensor, "K P"]
    high: Tensor
    low: Tensor
    row_scale: Float[Tensor, "K P"]
    reach: float


def block_size(dim: int) -> int:
    """Features in a block: a power of two, the only kind Triton takes.

    >>> block_size(5), block_size(40), block_size(200)
    (16, 64, 64)
    """
    return min(max(SMALLEST_BLOCK, power_of_two(dim)), LARGEST_BLOCK)


def power_of_two(number: int) -> int:
    """The least power of two that is not below a positive number.

    >>> power_of_two(1), power_of_two(5), power_of_two(8)
    (1, 8, 8)
    """
    return 1 << (number - 1).bit_length()


def split(centers: Float[Tensor, "K D"], whiteners: Float[Tensor, "K D D"]) -> Split:
    """Prepare a bank, in float64; done once, whenever its ellipsoids change."""
    dim = centers.shape[1]
    block = block_size(dim)
    padded = -(-dim // block) * block
    c, w = centers.double(), whiteners.double()
    if bool(w.tril(-1).count_nonzero()):
        w = torch.linalg.qr(w, mode="r")[1]
    # An ellipsoid's half width along a feature, through its centre, is a typical offset from it.
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


def power_of_two_above(x: Tensor) -> Tensor:
    """The least power of two above each number; exact, where a logarithm might round."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(mantissa), exponent)
