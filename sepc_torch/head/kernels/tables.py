r"""Reference points, regions and projections in the memory layout of the kernels.

The reference points of a class fill whole tiles of equal size; the last tile of a class is filled up with points at
infinity. Tiles are stored as pairs of float16 numbers, ``high`` and ``low``, whose sum has 22 bits of a point
(:mod:`sepc_torch.model.kernels.tables` explains such pairs). A *chunk* is a run of tiles of one class: the unit of work
that a small batch spreads over the chip.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.model.kernels.tables import TOP, block_size, power_of_two_above
from sepc_torch.shapes import Float, Int

# Points of a tile: classes with fewer points than the larger size take the smaller one, which wastes less.
LARGE_TILE, SMALL_TILE = 64, 16
# Tiles of a chunk.
_CHUNK = 8
# Coordinates of a block.
COLUMNS = 32


class RegionTables(NamedTuple):
    """Regions sorted by class (``order``), the first of every class (``starts``), weights and freedom in float64."""

    order: Int[Tensor, "K"]
    starts: Int[Tensor, "C"]
    log_weight: Float[Tensor, "K"]
    freedom: Float[Tensor, "K"]


class SearchTables(NamedTuple):
    """Reference points for the search kernel.

    ``high`` and ``low`` (T, F, n) hold tiles of n points with F padded features, in units of ``scale``. ``half`` (T n)
    holds half of the squared length of every point, infinite where a tile is filled up. ``number`` (T n) holds the
    number of every point. ``chunks`` (Q + 1) holds the first tile of every chunk, ``classes`` (C + 1) the first chunk
    of every class. ``scale`` (1,) is a power of two.
    """

    high: Tensor
    low: Tensor
    half: Float[Tensor, "N"]
    number: Int[Tensor, "N"]
    chunks: Int[Tensor, "Q"]
    classes: Int[Tensor, "C"]
    scale: Float[Tensor, "1"]


def search_tables(points: Float[Tensor, "N D"], ends: list[int]) -> SearchTables:
    """Lay out points that are sorted by class; ``ends`` are the ends of the classes.

    >>> tables = search_tables(torch.tensor([[1.0], [2.0], [3.0]]), [1, 3])
    >>> tables.high.shape, tables.chunks.tolist(), tables.classes.tolist()
    (torch.Size([2, 16, 16]), [0, 1, 2], [0, 1, 2])
    >>> tables.number.view(2, 16)[:, :3].tolist()
    [[0, 0, 0], [1, 2, 2]]
    """
    dim, block = points.shape[1], block_size(points.shape[1])
    padded = -(-dim // block) * block
    last = torch.tensor(ends)
    first = torch.nn.functional.pad(last[:-1], (1, 0))
    size = LARGE_TILE if len(points) >= LARGE_TILE * len(ends) else SMALL_TILE
    tiles = -(-(last - first) // size)
    owner = torch.repeat_interleave(torch.arange(len(ends)), tiles)
    tile = torch.arange(len(owner)) - (tiles.cumsum(0) - tiles)[owner]
    place = first[owner, None] + size * tile[:, None] + torch.arange(size)
    index = torch.minimum(place, last[owner, None] - 1).flatten()
    exact = points.double()
    scale = power_of_two_above(exact.abs().max().clamp_min(torch.finfo(torch.float32).tiny).reshape(1))
    half = exact.square().sum(dim=1)[index.to(points.device)] / 2
    beyond = (place >= last[owner, None]).flatten().to(points.device)
    index = index.to(points.device)
    numbers = torch.nn.functional.pad(exact * (TOP / scale), (0, padded - dim))[index]
    numbers = numbers.view(len(owner), size, padded).mT
    high = numbers.half()
    per_class = -(-tiles // _CHUNK)
    chunk_owner = torch.repeat_interleave(torch.arange(len(ends)), per_class)
    chunk = torch.arange(len(chunk_owner)) - (per_class.cumsum(0) - per_class)[chunk_owner]
    starts = (tiles.cumsum(0) - tiles)[chunk_owner] + _CHUNK * chunk
    return SearchTables(
        high=high.contiguous(),
        low=(numbers - high.double()).half().contiguous(),
        half=torch.where(beyond, torch.inf, half).float(),
        number=index.int(),
        chunks=torch.cat([starts, tiles.sum().reshape(1)]).int().to(points.device),
        classes=torch.nn.functional.pad(per_class.cumsum(0), (1, 0)).int().to(points.device),
        scale=scale.float(),
    )


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
