r"""A plane to look at a partition of many dimensions: points on it, and the exact shadows of ellipsoids."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.model.bank import EllipsoidBank
from sepc_torch.model.sepc import SEPC
from sepc_torch.shapes import Float


class Shadows(NamedTuple):
    r"""Ellipses :math:`\{m_k + S_k^{1/2} u : \|u\| \le 1\}`: centres (K, 2) and matrices (K, 2, 2), in float64."""

    centers: Float[Tensor, "K 2"]
    matrices: Float[Tensor, "K 2 2"]


class Plane(NamedTuple):
    """Orthogonal projection of R dimensions on two: an origin (R,) and two orthonormal axes (2, R), in float64."""

    origin: Float[Tensor, "R"]
    axes: Float[Tensor, "2 R"]

    def points(self, z: Tensor) -> Float[Tensor, "B 2"]:
        """Coordinates on the plane of points (B, R)."""
        return (z.detach().cpu().double() - self.origin) @ self.axes.T

    def shadows(self, bank: EllipsoidBank) -> Shadows:
        r"""Orthogonal projections of the ellipsoids :math:`\|W_k (z - c_k)\| \le 1`.

        The image of an ellipsoid under the axes A is the ellipse of :math:`S_k = A W_k^{-1} W_k^{-\top} A^\top`. A
        point in the shadow of an ellipsoid can lie outside the ellipsoid, in the dimensions that the plane leaves out.
        """
        inverse = torch.linalg.inv(bank.whiteners.detach().cpu().double())
        half = self.axes @ inverse
        return Shadows(self.points(bank.centers), half @ half.transpose(1, 2))


def viewing_plane(sepc: SEPC) -> Plane:
    """The plane on which the centres of the ellipsoids spread most, each weighted with its training points.

    The plane depends on the model only, so pictures of several data sets can be compared.

    >>> from sepc_torch import SEPC, partition
    >>> points = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
    >>> sepc = SEPC.from_partition(partition([*points.tolist(), *(points + 9).tolist()], [0] * 4 + [1] * 4))
    >>> viewing_plane(sepc).axes[0].abs().round(decimals=2)
    tensor([0.5800, 0.5800, 0.5800], dtype=torch.float64)
    """
    centers = sepc.bank.centers.detach().cpu().double()
    weight = sepc.held.detach().cpu().double().sum(dim=1).clamp_min(1.0)
    origin = (weight @ centers) / weight.sum()
    if sepc.dim == 1:  # a line has one axis; the other shows nothing
        return Plane(origin, torch.tensor([[1.0], [0.0]], dtype=torch.float64))
    if sepc.dim == 2:
        return Plane(torch.zeros_like(origin), torch.eye(2, dtype=torch.float64))
    # The identity, far below any spread, completes the axes where fewer than two directions spread.
    spread = torch.cat([weight.sqrt()[:, None] * (centers - origin), 1e-9 * torch.eye(sepc.dim, dtype=torch.float64)])
    axes = torch.linalg.svd(spread, full_matrices=False).Vh[:2]
    # The sign of a singular vector is arbitrary; the largest coordinate is made positive.
    largest = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True))
    return Plane(origin, axes * largest.sign())
