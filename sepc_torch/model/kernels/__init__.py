"""The Triton kernels behind :class:`~sepc_torch.model.bank.EllipsoidBank` and :class:`~sepc_torch.SEPC`, as torch operators.

Importing this needs no Triton; it is loaded with the first launch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sepc_torch.model import torch_ops
from sepc_torch.model.kernels.devices import available, near_together, on_device
from sepc_torch.model.kernels.splitting import Split, split
from sepc_torch.shapes import Float

__all__ = ["Kernel", "Split", "available", "fused_distances", "possible", "split"]

Kernel = Literal["auto", "triton", "torch"]


def possible(like: Tensor) -> bool:
    """Whether the kernel of distances can run where a tensor is, in its dtype."""
    return available(like) and like.dtype == torch.float32


def fused_distances(
    z: Tensor,
    origin: Float[Tensor, "D"],
    offsets: Float[Tensor, "K D"],
    whiteners: Float[Tensor, "K D D"],
    bank: Split,
) -> Float[Tensor, "B K"]:
    r"""Mahalanobis distances :math:`\|W_k (z - c_k)\|` on CUDA, as accurate as float32, differentiable in z.

    Args:
        z: Points (B, D) in float32, float16 or bfloat16.
        origin: What centres are relative to.
        offsets: Centres relative to the origin; with the whiteners they serve the gradient.
        whiteners: Whiteners of the ellipsoids.
        bank: The same ellipsoids prepared by :func:`split`.
    """
    return _operator(z, origin, offsets, whiteners, *bank)


def _launch(z: Tensor, origin: Tensor, offsets: Tensor, whiteners: Tensor, *bank: Tensor | float) -> Tensor:
    from sepc_torch.model.kernels.fused import launch

    with on_device(z):
        return launch(near_together(z), origin, Split(*bank))  # type: ignore[arg-type]


def _shape(z: Tensor, origin: Tensor, offsets: Tensor, whiteners: Tensor, *bank: Tensor | float) -> Tensor:
    return offsets.new_empty(z.shape[0], offsets.shape[0])


def _gradient(
    z: Tensor, origin: Tensor, offsets: Tensor, whiteners: Tensor, *rest: Tensor
) -> tuple[Tensor | None, ...]:
    *bank, output, grad = rest
    gradient = torch_ops.distances_gradient(z.float() - origin, offsets, whiteners, output, grad)
    return gradient.to(z.dtype), *[None] * (4 + len(bank))


_operator = torch_ops.operator(
    "fused_distances(Tensor z, Tensor origin, Tensor offsets, Tensor whiteners, Tensor feature_scale, Tensor centers, "
    "Tensor high, Tensor low, Tensor row_scale, float reach) -> Tensor",
    _launch,
    _shape,
)
torch_ops.differentiable("fused_distances", _gradient)
