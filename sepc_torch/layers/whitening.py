"""Coordinates in which a batch of point sets has unit covariance: the torch side of :mod:`sepc_torch.affine_hull`.

The minimum-volume ellipsoid is affinely equivariant, so solving in any fixed coordinates is exact, and so is the
gradient when the change of coordinates counts as a constant. Without it, cone solvers lose their gradients altogether
on points with an offset of 1e3 or a scale of 1e-4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.shapes import Bool, Float

# A set is flat where some direction, with every feature scaled to unit spread, is thinner than this: the squares that a
# Gram matrix holds are rounded at 1e-16, so that whitening by it ends near the root of that.
_FLAT = 3e-8
# Rounding puts points off their hull by at most half a rounding of their magnitude; this many are flat for certain.
_ROUNDINGS = 16


class Whitening(NamedTuple):
    r"""The constant map :math:`y = T (z - o)` of each set, and which sets are too flat to have one.

    T is upper triangular with positive diagonal, so that a whitener of that form in y gives one in z.
    """

    origin: Float[Tensor, "B 1 D"]
    transform: Float[Tensor, "B D D"]
    flat: Bool[Tensor, "B"]

    def coordinates(self, z: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
        """The points in these coordinates, with zeros where the mask is off; differentiable in z."""
        return _masked(z - self.origin, mask) @ self.transform.mT


@torch.no_grad()
def whiten(z: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], given: torch.dtype) -> Whitening:
    """Whiten each set by two Gram passes, the second on what the first has made nearly orthonormal.

    ``given`` is the dtype in which the points came: what is within its rounding of a flat set counts as flat.
    """
    # Narrower types than float32 round points off their hull for good: what they give is not flat.
    eps = torch.finfo(torch.float64 if given == torch.float64 else torch.float32).eps
    count = mask.sum(-1).clamp_min(1).to(z.dtype)[:, None, None]
    origin = _masked(z, mask).sum(-2, keepdim=True) / count
    offsets = _masked(z - origin, mask)
    largest = _masked(z, mask).abs().amax(-2)
    spread = (offsets.square().sum(-2) / count[:, 0]).sqrt()
    constant = spread <= _ROUNDINGS * eps * largest
    scale = torch.where(constant, torch.ones_like(spread), spread)

    y = offsets / scale.unsqueeze(-2)
    first, failed = _upper_inverse_root(y.mT @ y / count)
    y = y @ first.mT
    # Where a pivot is noise the direction is good all the same, and the spread measured along it tells.
    along = (y.square().sum(-2) / count[:, 0]).sqrt()
    rounding = _ROUNDINGS * eps * (first * (largest / scale).unsqueeze(-2)).norm(dim=-1)
    thin = (along <= _FLAT * first.norm(dim=-1)) | (along <= rounding)
    second, failed_again = _upper_inverse_root(y.mT @ y / count)
    flat = constant.any(-1) | thin.any(-1) | failed | failed_again | (mask.sum(-1) <= z.shape[-1])
    transform = (second @ first) / scale.unsqueeze(-2)
    flat |= ~transform.isfinite().flatten(1).all(-1)
    eye = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
    return Whitening(origin, torch.where(flat[:, None, None], eye, transform), flat)


def _masked(z: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
    """Zeros where the mask is off, whatever stood there."""
    return torch.where(mask.unsqueeze(-1), z, torch.zeros_like(z))


def _upper_inverse_root(covariance: Float[Tensor, "B D D"]) -> tuple[Float[Tensor, "B D D"], Bool[Tensor, "B"]]:
    r"""The upper triangular T with :math:`T C T^\top = I`, and where there is none."""
    # The Cholesky factor of the matrix with both axes reversed is, reversed back, an upper triangular root.
    lower, info = torch.linalg.cholesky_ex(covariance.flip(-2, -1))
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device).expand_as(covariance)
    lower = torch.where(info[:, None, None] > 0, eye, lower)
    return torch.linalg.solve_triangular(lower, eye, upper=False).flip(-2, -1), info > 0
