r"""Search for the nearest point of every class in plain torch, by one matrix product.

The nearest point to a row z is :math:`\arg\max_i z \cdot x_i - \tfrac12 \|x_i\|^2`, the largest *closeness*. On a CPU,
rows for which the rounding of float32 leaves several points of a class are searched again in float64; elsewhere points
are compared up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sepc_torch.model import torch_ops
from sepc_torch.model.device_sync import readable
from sepc_torch.model.precision import as_dtype
from sepc_torch.shapes import Bool, Float, Int

# Above this number of classes, or up to this number of products, classes of similar size are searched together: copying
# the products into groups then takes less time than one argmax call for each class.
_MANY_CLASSES = 32
_FEW_PRODUCTS = 2**16
# Values of a block of the search for the largest one. A CPU searches in blocks above these numbers of points of a class
# on average, and of products.
_BLOCK, _MANY_POINTS, _MANY_PRODUCTS = 64, 512, 2**17
# Number of nearest classes whose distances are then computed from differences: the label's and the nearest other class
# are among them, unless the label is wrong.
_RECOMPUTED = 8


class Groups(NamedTuple):
    """Layout of groups of classes of similar size, each searched with one argmax.

    A group is a table with a row per class and a fixed number of places per row. ``slots`` holds the point index of
    every place, group after group. ``shapes`` holds, for each group in turn, the number of classes and the number of
    places. ``columns`` holds the position of each class in this order. A class with fewer points than places repeats
    its last point, which does not change the nearest distance.
    """

    slots: Int[Tensor, "n"]
    columns: Int[Tensor, "C"]
    shapes: list[int]


def group_classes(ends: list[int]) -> Groups:
    """Group classes by their size rounded up to a power of two; less than half of the places repeat a point.

    >>> group_classes([1, 5, 8])
    Groups(slots=tensor([0, 1, 2, 3, 4, 5, 6, 7, 7]), columns=tensor([0, 1, 2]), shapes=[1, 1, 2, 4])
    """
    starts = [0, *ends[:-1]]
    members: dict[int, list[int]] = {}
    for c, (start, end) in enumerate(zip(starts, ends, strict=False)):
        members.setdefault((end - start - 1).bit_length(), []).append(c)
    slots, shapes = [torch.zeros(0, dtype=torch.int64)], []
    for group in members.values():
        first, last = (torch.tensor([where[c] for c in group]).unsqueeze(1) for where in (starts, ends))
        width = int((last - first).max())
        slots.append(torch.minimum(first + torch.arange(width), last - 1).flatten())
        shapes += [len(group), width]
    order = torch.tensor([c for group in members.values() for c in group], dtype=torch.int64)
    return Groups(torch.cat(slots), order.argsort(), shapes)


def _class_nearest(
    z: Tensor,
    points: Tensor,
    half_squares: Tensor,
    ends: list[int],
    slots: Tensor,
    columns: Tensor,
    shapes: list[int],
) -> tuple[Tensor, Tensor]:
    """Find the nearest points by a matrix product, then compute short distances from differences.

    A distance computed from the product loses the digits of short distances. With few classes all distances are
    computed from differences; with many classes, only those of the nearest classes.
    """
    if not ends:
        return _class_nearest_shape(z, points, half_squares, ends)
    groups = Groups(slots, columns, shapes)
    many = len(ends) > _MANY_CLASSES
    large = len(points) > _MANY_POINTS * len(ends) and len(z) * len(points) > _MANY_PRODUCTS
    if large and not (many or z.is_cuda):
        values, search = _block_search(z, points, half_squares, ends)
    else:
        values, search = _plain_search(z, points, half_squares, ends, groups)
    slack = _slack(z, half_squares) if _checked(z) else None
    exact = min(len(ends), _RECOMPUTED) if many else len(ends)
    distances, places, doubts = [], [], []
    rows = torch_ops.rows_per_piece(z, max(values, exact * z.shape[1]))
    with torch_ops.full_precision(z):
        for start in range(0, max(len(z), 1), rows):
            piece = z[start : start + rows]
            best, closeness, unsure = search(piece, None if slack is None else slack[start : start + rows])
            if many:
                squares = piece.square().sum(dim=1, keepdim=True) - 2.0 * closeness
                near = squares.topk(exact, dim=1, largest=False).indices
                found = squares.clamp_min_(0).sqrt_()
                found.scatter_(1, near, _apart(piece, points, best.gather(1, near)))
            else:
                found = _apart(piece, points, best)
            distances.append(found)
            places.append(best)
            doubts.append(unsure)
    distance, index = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (distances, places))
    if slack is not None:
        unsure = torch.cat([some for some in doubts if some is not None]).nonzero().squeeze(1)
        for some in unsure.split(rows) if len(unsure) else ():
            index[some] = _search_again(z[some], points, half_squares, ends, groups, slack[some])
            distance[some] = _apart(z[some], points, index[some])
    return distance, index


# Maps rows and their slack, if any, to the indices of the closest points, their closeness, and whether a row is unsure.
_Found = tuple[Int[Tensor, "b C"], Float[Tensor, "b C"], Bool[Tensor, "b"] | None]
_Search = Callable[[Tensor, Tensor | None], _Found]


def _checked(z: Tensor) -> bool:
    """Whether to look for rows for which rounding leaves several points; the host has to read values."""
    return z.dtype == torch.float32 and readable(z)


def _slack(z: Float[Tensor, "B D"], half_squares: Float[Tensor, "N"]) -> Float[Tensor, "B 1"]:
    r"""Twice the largest error of a closeness in float32.

    A sum of n products has an error of at most :math:`n \, 2^{-24}` times the sum of their magnitudes, in any order of
    additions; here that sum is at most :math:`\|z\| X + \tfrac12 X^2` with the length X of the longest point. Products
    below the range of float32 are lost. The slack is NaN, with which nothing compares, where sums can overflow.
    """
    half, terms = half_squares.amax(), z.shape[1] + 4
    reach = torch.linalg.vector_norm(z, dim=1, keepdim=True) * (2.0 * half).sqrt() + half
    slack = reach * (2.01 * terms * 2.0**-24) + 2.0 * terms * torch.finfo(torch.float32).tiny
    return torch.where(reach < torch.inf, slack, torch.nan)


def _search_again(
    z: Float[Tensor, "b D"],
    points: Float[Tensor, "N D"],
    half_squares: Float[Tensor, "N"],
    ends: list[int],
    groups: Groups,
    slack: Float[Tensor, "b 1"],
) -> Int[Tensor, "b C"]:
    """Compare all points that can be the nearest by their distances in float64; the first of equal ones is found."""
    with torch_ops.full_precision(z):
        closeness = torch.addmm(half_squares, z, points.T, beta=-1)
    least = closeness.gather(1, _best_together(closeness, *groups)) - slack
    codes = _codes(ends, z.device)
    row, point = (closeness >= least.index_select(1, codes)).nonzero().unbind(dim=1)
    few = torch_ops.rows_per_piece(z, 2 * z.shape[1])
    pairs = zip(row.split(few), point.split(few), strict=True)
    apart = torch.cat([(points[p].double() - z[r].double()).square().sum(dim=1) for r, p in pairs])
    cell = row * len(ends) + codes[point]
    shortest = torch.full((len(z) * len(ends),), torch.inf, dtype=torch.float64, device=z.device)
    shortest = shortest.scatter_reduce(0, cell, apart, "amin")
    nearest = torch.where(apart == shortest[cell], point, len(points))
    found = torch.full(shortest.shape, len(points), device=z.device)
    return found.scatter_reduce(0, cell, nearest, "amin").view(len(z), -1)


def _codes(ends: list[int], device: torch.device) -> Int[Tensor, "N"]:
    """The class of every point."""
    sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return torch.repeat_interleave(torch.tensor(sizes, device=device), output_size=ends[-1])


def _plain_search(
    z: Tensor, points: Float[Tensor, "N D"], half_squares: Float[Tensor, "N"], ends: list[int], groups: Groups
) -> tuple[int, _Search]:
    """Search with a matrix of the closeness of all points; returns also its values for a row."""
    many = len(ends) > _MANY_CLASSES
    values = len(points) + (len(groups.slots) if many else 0)
    together = many or min(len(z), torch_ops.rows_per_piece(z, values)) * len(points) <= _FEW_PRODUCTS
    codes = _codes(ends, z.device) if len(ends) > 1 and _checked(z) else None

    def search(piece: Tensor, slack: Tensor | None) -> _Found:
        closeness = torch.addmm(half_squares, piece, points.T, beta=-1)
        best = _best_together(closeness, *groups) if together else _best_of_each(closeness, ends)
        most = closeness.gather(1, best)
        if slack is None:
            return best, most, None
        least = most - slack
        near = closeness >= (least if codes is None else least.index_select(1, codes))
        return best, most, near.sum(dim=1) > len(ends)

    return values, search


def _block_search(
    z: Tensor, points: Float[Tensor, "N D"], half_squares: Float[Tensor, "N"], ends: list[int]
) -> tuple[int, _Search]:
    """Search for few classes of many points, on a CPU; returns also the values for a row.

    Every class fills whole blocks of a table. ``amax`` of blocks takes a fraction of the time of ``argmax``, which then
    searches the best block of every class. Half of the squared length is one more feature of a point, and -1 of a row;
    it is infinite in places that no point takes.
    """
    starts = [0, *ends[:-1]]
    counts = [-(-(end - start) // _BLOCK) for start, end in zip(starts, ends, strict=True)]
    index = torch.cat([torch.arange(start, start + _BLOCK * n) for start, n in zip(starts, counts, strict=True)])
    codes = torch.repeat_interleave(torch.tensor(counts))
    last = torch.tensor(ends).sub_(1).index_select(0, codes).repeat_interleave(_BLOCK)
    half = torch.where(index > last, torch.inf, half_squares.index_select(0, torch.minimum(index, last)))
    index = torch.minimum(index, last)
    table = torch.cat([points.index_select(0, index), half.unsqueeze(1)], dim=1).T
    layout = group_classes(list(accumulate(counts)))
    values = table.shape[1]
    products = z.new_empty(min(len(z), torch_ops.rows_per_piece(z, values)), values)
    first = torch.arange(len(products)).unsqueeze(1) * len(codes)

    def search(piece: Tensor, slack: Tensor | None) -> _Found:
        some = products[: len(piece)]
        torch.mm(torch.nn.functional.pad(piece, (0, 1), value=-1.0), table, out=some)
        blocks = some.view(-1, _BLOCK)
        tops = blocks.amax(dim=1).view(len(piece), -1)
        block = _best_together(tops, *layout)
        inside = torch.embedding(blocks, first[: len(piece)] + block)
        place = inside.argmax(dim=2)
        best, most = torch.take(index, block * _BLOCK + place), tops.gather(1, block)
        if slack is None:
            return best, most, None
        least = most - slack
        other_blocks = (tops >= least.index_select(1, codes)).sum(dim=1)
        return best, most, other_blocks + (inside >= least.unsqueeze(2)).sum(dim=(1, 2)) > 2 * len(ends)

    return values, search


def _apart(z: Float[Tensor, "b D"], points: Float[Tensor, "N D"], index: Int[Tensor, "b n"]) -> Float[Tensor, "b n"]:
    """Distances between every row and the points of its indices, from differences in float64."""
    apart = torch.embedding(points, index).double()
    apart -= z.unsqueeze(1)
    return as_dtype(torch.linalg.vector_norm(apart, dim=2), z.dtype)


def _best_of_each(closeness: Float[Tensor, "b N"], ends: list[int]) -> Int[Tensor, "b C"]:
    """Index of the closest point of every class, with one argmax for each class."""
    starts = [0, *ends[:-1]]
    found = [closeness[:, start:end].argmax(dim=1).add_(start) for start, end in zip(starts, ends, strict=True)]
    return torch.stack(found, dim=1)


def _best_together(
    closeness: Float[Tensor, "b N"], slots: Int[Tensor, "n"], columns: Int[Tensor, "C"], shapes: list[int]
) -> Int[Tensor, "b C"]:
    """Index of the closest point of every class, with one argmax for each group of classes."""
    if shapes[0] == 1 and len(shapes) == 2:
        return closeness.argmax(dim=1, keepdim=True)
    counts, widths = shapes[::2], shapes[1::2]
    groups = slots.split([count * width for count, width in zip(counts, widths, strict=True)])
    # A class is a run of points, and repeats its last point behind them, where argmax does not look.
    found = [
        closeness.index_select(1, places).view(-1, count, width).argmax(dim=2) + places[::width]
        for places, count, width in zip(groups, counts, widths, strict=True)
    ]
    return found[0] if len(found) == 1 else torch.cat(found, dim=1).index_select(1, columns)  # one group is in order


def _class_nearest_shape(
    z: Tensor, _points: Tensor, _half_squares: Tensor, ends: list[int], *_layout: Any
) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape[0], len(ends)), z.new_empty(z.shape[0], len(ends), dtype=torch.int64)


# Distances and indices (B, C) for rows and points relative to an origin, with the layout of group_classes.
class_nearest = torch_ops.operator(
    "class_nearest(Tensor z, Tensor points, Tensor half_squares, int[] ends, Tensor slots, Tensor columns, "
    "int[] shapes) -> (Tensor, Tensor)",
    _class_nearest,
    _class_nearest_shape,
)
