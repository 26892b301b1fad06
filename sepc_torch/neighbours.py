r"""The distance to the nearest training point of every class, among points that were kept as witnesses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sepc_torch import ops
from sepc_torch.shapes import Float, Int


class Neighbours(nn.Module):
    """Kept points of every class, and the distance to the nearest of each.

    Args:
        points: The points (N, D).
        codes: Their classes, in ascending order, none left out.
        persistent: Whether files and checkpoints hold the points.

    >>> near = Neighbours(torch.tensor([[0.0, 0.0], [5.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 0, 1]))
    >>> near(torch.tensor([[6.0, 0.0]]))
    tensor([[1., 3.]])
    """

    points: Tensor
    codes: Tensor

    def __init__(self, points: Float[Tensor, "N D"], codes: Int[Tensor, "N"], *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("points", points, persistent=persistent)
        self.register_buffer("codes", codes, persistent=persistent)
        self._find_ends()
        self.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]

    def _find_ends(self) -> None:
        """Where each class ends among the points, as plain numbers: nothing waits for a GPU to tell."""
        self.ends: list[int] = torch.bincount(self.codes).cumsum(0).tolist() if len(self.codes) else []

    def forward(self, z: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
        """Euclidean distance to the nearest kept point of each class."""
        dtype = torch.promote_types(z.dtype, self.points.dtype)
        return _nearest(z.detach().to(dtype), self.points.to(dtype), self.ends)


def _after_loading(module: Neighbours, _keys: Any) -> None:
    module._find_ends()


def _class_nearest(z: Tensor, points: Tensor, ends: list[int]) -> Tensor:
    r"""By one product, :math:`\arg\max_i z \cdot x_i - \tfrac12 \|x_i\|^2`, then the difference to the point found.

    The product alone would lose the digits of short distances; the point it finds is the nearest up to rounding.
    """
    out = z.new_empty(len(z), len(ends))
    origin = points.mean(dim=0)
    centred = points - origin
    half = centred.square().sum(dim=1) / 2
    rows = ops.rows_per_piece(z, len(points))
    with ops.full_precision(z):
        for start in range(0, len(z), rows):
            piece = z[start : start + rows]
            closeness = torch.addmm(half, piece - origin, centred.T, beta=-1)
            first = 0
            for c, end in enumerate(ends):
                best = closeness[:, first:end].argmax(dim=1) + first
                out[start : start + rows, c] = torch.linalg.vector_norm(piece - points[best], dim=1)
                first = end
    return out


def _class_nearest_shape(z: Tensor, points: Tensor, ends: list[int]) -> Tensor:
    return z.new_empty(z.shape[0], len(ends))


_nearest = ops.operator(
    "class_nearest(Tensor z, Tensor points, int[] ends) -> Tensor", _class_nearest, _class_nearest_shape
)
