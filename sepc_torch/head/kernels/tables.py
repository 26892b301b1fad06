r"""Reference points, regions and projections in the memory layout of the kernels.

The reference points of a class fill whole tiles of equal size. Small classes lie side by side in the tiles, in parts of
equal width. What a class does not fill repeats its last point. Tiles are stored as pairs of float16 numbers, ``high``
and ``low``, whose sum has 22 bits of a point (:mod:`sepc_torch.model.kernels.tables` explains such pairs). A *chunk* is
a run of tiles of the same classes: the unit of work that a small batch spreads over the chip.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.model.kernels.tables import TOP, block_size, power_of_two_above
from sepc_torch.shapes import Float, Int

# Points of a tile, with one block of features and with several: the fastest ones (measured on an H200).
_TILE, _WIDE_TILE = 64, 128
# Points of one class in a tile, if classes have fewer points than a tile on average.
_PART = 16
# Points of a chunk. Its tiles are counted in the last bits of a float32 number (3 bits for 8 tiles).
CHUNK = 512
# Coordinates of a block.
COLUMNS = 32


class RegionTables(NamedTuple):
    """Regions sorted by class (``order``), the first of every class (``starts``), weights and freedom in float64."""

    order: Int[Tensor, "K"]
    starts: Int[Tensor, "C"]
    log_weight: Float[Tensor, "K"]
    freedom: Float[Tensor, "K"]


class WideRegions(NamedTuple):
    """The class of every region, and the ellipsoids in float64, with upper triangular whiteners."""

    codes: Int[Tensor, "K"]
    origin: Float[Tensor, "R"]
    offsets: Float[Tensor, "K R"]
    whiteners: Float[Tensor, "K R R"]


class SearchTables(NamedTuple):
    """Reference points for the search kernel.

    ``high`` and ``low`` (T, F, n) hold tiles of n points with F padded features, in units of ``scale``. Points with the
    digits of float16 have an empty ``low``. ``half`` (T, G, n / G) holds half of the squared length of every point of
    the G classes of a tile, in units of ``scale`` squared. ``number`` (T n) holds the number of every point. ``chunks``
    (Q + 1) holds the first tile of every chunk. The parts of the chunks are numbered, G for each chunk; ``ranges``
    (C, 2) holds, for every class, the number of its first part and a bound of the numbers, which increase by G.
    ``scale`` (1,) is a power of two. ``longest`` (1,) is the length of the longest point, in units of ``scale``.
    """

    high: Tensor
    low: Tensor
    half: Float[Tensor, "T G n"]
    number: Int[Tensor, "N"]
    chunks: Int[Tensor, "Q"]
    ranges: Int[Tensor, "C 2"]
    scale: Float[Tensor, "1"]
    longest: Float[Tensor, "1"]

    @property
    def beside(self) -> int:
        """Number of classes side by side in a tile."""
        return self.half.shape[1]


def search_tables(
    points: Float[Tensor, "N D"], kept: Int[Tensor, "n"], ends: list[int], *, pairs: bool = True
) -> SearchTables:
    """Lay out points that are sorted by class, as far as they differ.

    Args:
        points: All points; points with the digits of float16 need no pairs.
        kept: The numbers of the points that are laid out, from :func:`distinct_points`.
        ends: The ends of the classes among these.
        pairs: Whether to lay out pairs of float16 numbers.

    >>> tables = search_tables(torch.tensor([[1.0], [2.0], [3.0]]), torch.arange(3), [1, 3])
    >>> tables.high.shape, tables.beside, tables.chunks.tolist(), tables.ranges.tolist()
    (torch.Size([1, 16, 64]), 4, [0, 1], [[1, 4], [0, 4]])
    >>> tables.number.view(4, 16)[:, :3].tolist()
    [[1, 2, 2], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    """
    points = points[kept]
    dim, block = points.shape[1], block_size(points.shape[1])
    padded = -(-dim // block) * block
    size = _TILE if padded == block else _WIDE_TILE
    beside = 1 if len(points) >= size * len(ends) else size // _PART
    width = size // beside
    last = torch.tensor(ends)
    first = torch.nn.functional.pad(last[:-1], (1, 0))
    # Classes of similar sizes share tiles; places that no class takes belong to an empty class.
    order = (last - first).argsort(descending=True, stable=True)
    groups = -(-len(ends) // beside)
    empty = (0, groups * beside - len(ends))
    first, last = (torch.nn.functional.pad(some[order], empty).view(groups, beside, 1) for some in (first, last))
    tiles = (-(-(last - first) // width)).amax(dim=(1, 2))
    owner, tile = _places(tiles)
    place = first[owner] + width * tile[:, None, None] + torch.arange(width)
    index = torch.minimum(place, (last[owner] - 1).clamp_min(0)).flatten().to(points.device)
    exact = points.double()
    scale = power_of_two_above(exact.abs().max().clamp_min(torch.finfo(torch.float32).tiny).reshape(1))
    squares = (exact / scale).square().sum(dim=1)
    half = (squares[index] / 2).view(place.shape)
    numbers = torch.nn.functional.pad(exact * (TOP / scale), (0, padded - dim))[index]
    numbers = numbers.view(len(owner), size, padded).mT
    high = numbers.half()
    per_chunk = CHUNK // size
    per_group = -(-tiles // per_chunk)
    chunk_owner, chunk = _places(per_group)
    starts = (tiles.cumsum(0) - tiles)[chunk_owner] + per_chunk * chunk
    begin, end = per_group.cumsum(0) - per_group, per_group.cumsum(0)
    rank = order.argsort()
    ranges = torch.stack([beside * begin[rank // beside] + rank % beside, beside * end[rank // beside]], dim=1)
    return SearchTables(
        high=high.contiguous(),
        low=(numbers - high.double()).half().contiguous() if pairs else high.new_empty(0),
        half=half.float(),
        number=kept[index].int(),
        chunks=torch.cat([starts, tiles.sum().reshape(1)]).int().to(points.device),
        ranges=ranges.int().to(points.device),
        scale=scale.float(),
        longest=squares.max().sqrt().mul(1.0 + 1e-6).float().reshape(1),
    )


def distinct_points(points: Float[Tensor, "N D"], ends: list[int]) -> tuple[Int[Tensor, "n"], list[int]]:
    """Numbers of the points without those that equal an earlier one of their class, and the ends of the classes.

    >>> distinct_points(torch.tensor([[1.0], [2.0], [1.0], [1.0]]), [3, 4])
    (tensor([0, 1, 3]), [2, 3])
    """
    last = torch.tensor(ends, device=points.device)
    # Few points have equal projections to a line, unless they are equal; only those are compared.
    line = torch.arange(1.0, 1.0 + points.shape[1], dtype=points.dtype, device=points.device).sin_()
    # A sum of products, not a matrix product, in which the rounding of a row would depend on its place.
    _, key, counts = torch.unique((points * line).sum(dim=1), return_inverse=True, return_counts=True)
    some = (counts[key] > 1).nonzero().squeeze(1)
    code = torch.bucketize(some, last, right=True)
    rows = torch.cat([code.double().unsqueeze(1), points[some].double()], dim=1)
    _, group = torch.unique(rows, dim=0, return_inverse=True)
    first = torch.full_like(some, len(points)).scatter_reduce(0, group, some, "amin")[group]
    kept = torch.ones(len(points), dtype=torch.bool, device=points.device)
    kept[some] = first == some
    numbers = kept.nonzero().squeeze(1)
    return numbers, torch.bucketize(last, numbers).tolist()


def _places(counts: Int[Tensor, "G"]) -> tuple[Int[Tensor, "n"], Int[Tensor, "n"]]:
    """Owner of every place, and its position among the places of its owner.

    >>> _places(torch.tensor([2, 1]))
    (tensor([0, 0, 1]), tensor([0, 1, 0]))
    """
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return owner, torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]


class LinearTables(NamedTuple):
    """Projections in blocks of ``COLUMNS`` coordinates, in float64.

    ``matrix`` (Q, E, COLUMNS) holds the columns of every block for D features and the log length, ``shift`` (Q, E) the
    centre, ``scale`` (Q, COLUMNS) the deviation of every coordinate. ``blocks`` (Q, 5) holds, for every block: the use
    of lengths (0: none, 1: unit length, 2: unit length, with the log length as a feature), the number of columns, the
    target, the first column there, and the number of columns there. ``bounds`` holds the least and the largest length.
    """

    matrix: Float[Tensor, "Q E n"]
    shift: Float[Tensor, "Q E"]
    scale: Float[Tensor, "Q n"]
    blocks: Int[Tensor, "Q 5"]
    bounds: Float[Tensor, "2"]


class GaussianTables(NamedTuple):
    """Whitened class means (C, R), and the variance of each direction outside the coordinates, in float64."""

    means: Float[Tensor, "C R"]
    outside: Float[Tensor, "1"]


class Affine(NamedTuple):
    """Affine map of features: ``lengths`` as in :class:`LinearTables`, centre, matrix, and the scale of its results."""

    lengths: int
    shift: Float[Tensor, "E"]
    matrix: Float[Tensor, "R E"]
    scale: Float[Tensor, "R"]


def linear_tables(maps: list[tuple[int, Affine]], features: int, least: float) -> LinearTables:
    """Lay out affine maps with their targets, on the device of the first map.

    >>> one = Affine(0, torch.zeros(2), torch.eye(2), torch.ones(2))
    >>> linear_tables([(0, one)], 2, 0.0).blocks.tolist()
    [[0, 2, 0, 0, 2]]
    """
    device = maps[0][1].matrix.device
    matrices, shifts, scales, blocks = [], [], [], []
    for target, affine in maps:
        width = len(affine.matrix)
        for first in range(0, width, COLUMNS):
            some = affine.matrix[first : first + COLUMNS].double()
            padded = COLUMNS - len(some)
            beyond = features + 1 - some.shape[1]
            matrices.append(torch.nn.functional.pad(some, (0, beyond, 0, padded)).T)
            shifts.append(torch.nn.functional.pad(affine.shift.double(), (0, beyond)))
            scales.append(torch.nn.functional.pad(affine.scale[first : first + COLUMNS].double(), (0, padded)))
            blocks.append([affine.lengths, len(some), target, first, width])
    longest = torch.finfo(torch.float32).max ** 0.5
    return LinearTables(
        torch.stack(matrices).contiguous(),
        torch.stack(shifts),
        torch.stack(scales),
        torch.tensor(blocks, dtype=torch.int32, device=device),
        torch.tensor([least, longest], dtype=torch.float64, device=device),
    )
