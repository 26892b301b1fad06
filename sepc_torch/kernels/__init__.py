"""The Triton kernel behind :class:`~sepc_torch.bank.EllipsoidBank`, as a torch operator.

Importing this needs no Triton; it is loaded with the first launch.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from sepc_torch import ops
from sepc_torch.kernels.splitting import Split, split
from sepc_torch.shapes import Float

__all__ = ["Kernel", "Split", "fused_distances", "possible", "split"]

Kernel = Literal["auto", "triton", "torch"]


def possible(like: Tensor) -> bool:
    """Whether the kernel can run where a tensor is, in its dtype."""
    return like.is_cuda and like.dtype == torch.float32 and find_spec("triton") is not None


def fused_distances(
    z: Float[Tensor, "B D"], offsets: Float[Tensor, "K D"], whiteners: Float[Tensor, "K D D"], bank: Split
) -> Float[Tensor, "B K"]:
    r"""Mahalanobis distances :math:`\|W_k (z - c_k)\|` on CUDA, as accurate as float32, differentiable in z.

    Args:
        z: Points relative to the bank's origin.
        offsets: Centres relative to the same origin; with the whiteners they serve the gradient.
        whiteners: Whiteners of the ellipsoids.
        bank: The same ellipsoids prepared by :func:`split`.
    """
    return _operator(z, offsets, whiteners, *bank)


def _launch(z: Tensor, offsets: Tensor, whiteners: Tensor, *bank: Tensor | float) -> Tensor:
    from sepc_torch.kernels.fused import launch

    return launch(z, Split(*bank))  # type: ignore[arg-type]


def _shape(z: Tensor, offsets: Tensor, whiteners: Tensor, *bank: Tensor | float) -> Tensor:
    return z.new_empty(z.shape[0], offsets.shape[0])


_operator = ops.operator(
    "fused_distances(Tensor z, Tensor offsets, Tensor whiteners, Tensor feature_scale, Tensor centers, Tensor high, "
    "Tensor low, Tensor row_scale, float reach) -> Tensor",
    _launch,
    _shape,
)
ops.differentiate_distances("fused_distances", unused=6)
