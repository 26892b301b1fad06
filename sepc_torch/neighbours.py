r"""The distance to the nearest training point of every class, among points that were kept as witnesses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sepc_torch import ops
from sepc_torch.shapes import Float, Int


class Neighbours(nn.Module):
    """Kept points of every class, and the distance to the nearest of each.

    Points are kept relative to an ``origin`` in their midst: products of numbers far from zero would lose digits.

    Args:
        points: The points (N, D), relative to ``origin`` where that is given.
        codes: Their classes, in ascending order, none left out.
        origin: The origin (D,); by default the mean.
        persistent: Whether files and checkpoints hold the points.

    >>> near = Neighbours(torch.tensor([[0.0, 0.0], [5.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 0, 1]))
    >>> near(torch.tensor([[6.0, 0.0]])).round(decimals=4)
    tensor([[1., 3.]])
    """

    origin: Tensor
    offsets: Tensor
    codes: Tensor
    half_squares: Tensor

    def __init__(
        self,
        points: Float[Tensor, "N D"],
        codes: Int[Tensor, "N"],
        origin: Float[Tensor, "D"] | None = None,
        *,
        persistent: bool = True,
    ) -> None:
        super().__init__()
        if origin is None:
            origin = points.mean(dim=0) if len(points) else points.new_zeros(points.shape[1])
            points = points - origin
        self.register_buffer("origin", origin, persistent=persistent)
        self.register_buffer("offsets", points, persistent=persistent)
        self.register_buffer("codes", codes, persistent=persistent)
        self._derive()
        self.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]

    @property
    def points(self) -> Float[Tensor, "N D"]:
        """The kept points in the caller's coordinates."""
        return self.origin + self.offsets

    def _derive(self) -> None:
        """What follows from the points. Where each class ends are plain numbers: nothing waits for a GPU to tell."""
        self.ends: list[int] = torch.bincount(self.codes).cumsum(0).tolist() if len(self.codes) else []
        self.register_buffer("half_squares", self.offsets.square().sum(dim=1) / 2, persistent=False)

    def forward(self, z: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
        """Euclidean distance to the nearest kept point of each class."""
        dtype = torch.promote_types(z.dtype, self.offsets.dtype)
        offset = z.detach().to(dtype) - self.origin.to(dtype)
        return _nearest(offset, self.offsets.to(dtype), self.half_squares.to(dtype), self.ends)


def _after_loading(module: Neighbours, _keys: Any) -> None:
    module._derive()


def _class_nearest(z: Tensor, points: Tensor, half_squares: Tensor, ends: list[int]) -> Tensor:
    r"""By one product, :math:`\arg\max_i z \cdot x_i - \tfrac12 \|x_i\|^2`, then the difference to the point found.

    The product alone would lose the digits of short distances; the point it finds is the nearest up to rounding.
    """
    out = z.new_empty(len(z), len(ends))
    rows = ops.rows_per_piece(z, len(points))
    with ops.full_precision(z):
        for start in range(0, len(z), rows):
            piece = z[start : start + rows]
            closeness = torch.addmm(half_squares, piece, points.T, beta=-1)
            first = 0
            for c, end in enumerate(ends):
                best = closeness[:, first:end].argmax(dim=1) + first
                out[start : start + rows, c] = torch.linalg.vector_norm(piece - points[best], dim=1)
                first = end
    return out


def _class_nearest_shape(z: Tensor, points: Tensor, half_squares: Tensor, ends: list[int]) -> Tensor:
    return z.new_empty(z.shape[0], len(ends))


_nearest = ops.operator(
    "class_nearest(Tensor z, Tensor points, Tensor half_squares, int[] ends) -> Tensor",
    _class_nearest,
    _class_nearest_shape,
)
