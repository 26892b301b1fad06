r"""Search kernels: the nearest reference point of every class, without a matrix of all products.

1. ``_split_rows`` splits every row into a pair of float16 numbers, finds its scale, and bounds the error of the next
   step.
2. ``_closest`` estimates the closeness :math:`z \cdot x_i - \tfrac12 \|x_i\|^2` of all points from three float16
   products; rows and points with the digits of float16 need one. A point has a place in a tile: its lane. For every
   class and chunk of tiles the kernel finds the closest point, and the largest closeness in any other lane.
3. :mod:`sepc_torch.head.kernels.exact_search` computes distances from differences in float64. It compares the
   distances to the points in the lane of the closest point. If the error bound does not rule out another lane, it
   compares the distances to all points of the chunks that can hold the nearest one.

The result is the nearest point, up to the rounding of float64; of points at equal distances the first one is found. It
does not depend on the batch.

The error of a closeness is at most :math:`\kappa (\|z\| X + \tfrac12 X^2)` with the length X of the longest point
(:func:`_largest_error`).
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from sepc_torch.head.kernels.exact_search import nearest_points, relative
from sepc_torch.head.kernels.tables import CHUNK, SearchTables
from sepc_torch.model.kernels.distances import power_of_two_above, split_float
from sepc_torch.model.kernels.launch import Launcher, aligned, jit
from sepc_torch.model.kernels.tables import TOP, block_size, power_of_two
from sepc_torch.shapes import Float, Int

# Rows of a program of the three kernels. From _MANY rows on, a program of the second one takes twice as many, of the
# third one four times.
_SPLIT_ROWS, _FEW_ROWS, _DISTANCE_ROWS = 32, 64, 4
_MANY = 2**14
# Most classes and features that a program of the third kernel takes at a time; measured on an H200.
_CLASSES, _FEATURES = 16, 16
# Programs that occupy a chip of 132 multiprocessors (H200) about twice.
_PROGRAMS = 256
# Bytes of the split rows of a piece, and of the best values and places of all its chunks.
_PIECE_BYTES = 2**27


@jit(do_not_specialize=["points"])
def _split_rows(
    z, origin, scale_of_points, longest, high, low, factor, slack, points, dim, row_stride,
    top: tl.constexpr, twice: tl.constexpr, floor: tl.constexpr,
    block: tl.constexpr, blocks: tl.constexpr, pairs: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    live = row < points
    start = z + row[:, None].to(tl.int64) * row_stride
    of_points = tl.load(scale_of_points)
    # Far below the points a row counts as zero: its own scale would overflow the factor. 9.1e-13 is 2^-40.
    largest = tl.maximum(tl.full([rows], 1e-30, tl.float32), of_points * 9.094947017729282e-13)
    for b in tl.static_range(blocks):
        i = b * block + tl.arange(0, block)
        part = relative(start, origin, i, live, dim, pairs)
        largest = tl.maximum(largest, tl.max(tl.abs(part), axis=1))
    scale = power_of_two_above(largest)
    weight = top * (top * (of_points / scale))
    tl.store(factor + row, weight, mask=live)
    squares = tl.zeros([rows], tl.float32)
    out = row[:, None].to(tl.int64) * (block * blocks)
    for b in tl.static_range(blocks):
        i = b * block + tl.arange(0, block)
        part = relative(start, origin, i, live, dim, pairs)
        part *= (top / scale)[:, None]
        squares += tl.sum(part * part, axis=1)
        first, second = split_float(part)
        tl.store(high + out + i[None, :], first, mask=live[:, None])
        if pairs:
            tl.store(low + out + i[None, :], second, mask=live[:, None])
    length = tl.load(longest)
    reach = tl.sqrt(squares) * (top * length) + weight * (0.5 * length * length)
    tl.store(slack + row, twice * reach + floor * (top * length), mask=live)


@jit(do_not_specialize=["points", "count", "per"])
def _closest(
    high, low, factor, tile_high, tile_low, half, chunks, best, runner, place,
    points, count, per,
    block: tl.constexpr, blocks: tl.constexpr, pairs: tl.constexpr, size: tl.constexpr, beside: tl.constexpr,
    last: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    live = row < points
    i = tl.arange(0, block)
    n = tl.arange(0, size)
    padded: tl.constexpr = block * blocks
    weight = tl.load(factor + row, mask=live, other=0.0)[:, None]
    start = row[:, None].to(tl.int64) * padded + i[None, :]
    if blocks == 1:
        x_high = tl.load(high + start, mask=live[:, None], other=0.0)
        if pairs:
            x_low = tl.load(low + start, mask=live[:, None], other=0.0)
    for q in range(tl.program_id(1) * per, tl.minimum(tl.program_id(1) * per + per, count)):
        most = tl.full([rows, size], float("-inf"), tl.float32)
        first = tl.load(chunks + q)
        tiles = first.to(tl.int64) * (padded * size)
        for t in range(tl.load(chunks + q + 1) - first):
            y = tl.zeros([rows, size], tl.float32)
            # A loop, not unrolled: unrolled, rows and tiles of all blocks would need more shared memory than there is.
            for b in range(blocks):
                if blocks > 1:
                    x_high = tl.load(high + start + b * block, mask=live[:, None], other=0.0)
                    if pairs:
                        x_low = tl.load(low + start + b * block, mask=live[:, None], other=0.0)
                spot = t * (padded * size) + (b * block + i)[:, None] * size + n[None, :]
                p_high = tl.load(tile_high + tiles + spot)
                if pairs:  # the small products first: sums of small numbers round less
                    y = tl.dot(x_low, p_high, y)
                    y = tl.dot(x_high, tl.load(tile_low + tiles + spot), y)
                y = tl.dot(x_high, p_high, y)
            y -= weight * tl.load(half + (first + t) * size + n)[None, :]
            # The number of the tile replaces the last bits, so that one maximum finds the closeness and the tile.
            most = tl.maximum(most, ((y.to(tl.int32, bitcast=True) & ~last) | t).to(tl.float32, bitcast=True))
        # The best of every class of the tiles, and the best of its other lanes.
        most = tl.reshape(most, [rows, beside, size // beside])
        found = tl.max(most, axis=2)
        lanes = tl.reshape(tl.broadcast_to(n[None, :], [rows, size]), [rows, beside, size // beside])
        lane = tl.min(tl.where(most == found[:, :, None], lanes, size), axis=2)
        after = tl.max(tl.where(lanes == lane[:, :, None], float("-inf"), most), axis=2)
        spots = (first + (found.to(tl.int32, bitcast=True) & last)) * size + lane
        # NaN equals nothing.
        spots = tl.where(lane < size, spots, first * size + (size // beside) * tl.arange(0, beside)[None, :])
        out = (q * beside + tl.arange(0, beside)).to(tl.int64)[None, :] * points + row[:, None]
        tl.store(best + out, found, mask=live[:, None])
        tl.store(runner + out, after, mask=live[:, None])
        tl.store(place + out, spots, mask=live[:, None])


_launch_split, _launch_closest, _launch_nearest = Launcher(_split_rows), Launcher(_closest), Launcher(nearest_points)


def _largest_error(padded: int, size: int, pairs: bool) -> float:
    r"""The error :math:`\kappa` of a closeness, as a share of the largest possible sum of its terms.

    It covers the bits that hold the number of the tile, the rounding of half of the squared length, of the pairs and of
    their low parts' product, and of sums on tensor cores: six float32 units for every addition of 16 terms.
    """
    additions = padded / 16 * (3 if pairs and padded > block_size(padded) else 1) + 2
    return (CHUNK // size + 2 + 6 * additions + (6 if pairs else 0)) * 2.0**-23


def nearest_into(
    z: Float[Tensor, "B D"],
    origin: Float[Tensor, "D"],
    offsets: Float[Tensor, "N D"],
    tables: SearchTables,
    distance: Float[Tensor, "B C"],
    index: Int[Tensor, "B C"],
    label: Int[Tensor, "B"] | None = None,
) -> None:
    """Write the distance to the nearest point of every class, and the point's number, for rows in float32.

    The points are ``origin`` plus ``offsets``; ``z`` and ``offsets`` are contiguous. For tables without ``low`` the
    offsets have the digits of float16, and the rows, relative to the origin, are rounded to them.

    With labels, as indices into the classes (-1 is taken for 0), the distance for every class but the label's is that
    to the nearest point of all of them, and no number is written.
    """
    row_bytes = 12 * (len(tables.chunks) - 1) * tables.beside + 4 * tables.high.shape[1]
    step = max(_FEW_ROWS, _PIECE_BYTES // row_bytes)
    for start in range(0, len(z), step):
        some = slice(start, start + step)
        given = None if label is None else label[some]
        _piece_into(z[some], origin, offsets, tables, distance[some], index[some], given)


def _piece_into(
    z: Tensor,
    origin: Tensor,
    offsets: Tensor,
    tables: SearchTables,
    distance: Tensor,
    index: Tensor,
    label: Tensor | None,
) -> None:
    points, dim = z.shape
    _, padded, size = tables.high.shape
    block, beside = block_size(dim), tables.beside
    blocks, chunks, classes = padded // block, len(tables.chunks) - 1, len(tables.ranges)
    pairs = tables.low.numel() > 0
    high = torch.empty(points, padded, dtype=torch.float16, device=z.device)
    low = torch.empty_like(high) if pairs else high
    factor, slack = torch.empty(2, points, dtype=torch.float32, device=z.device)
    best, runner = torch.empty(2, chunks * beside, points, dtype=torch.float32, device=z.device)
    place = torch.empty(chunks * beside, points, dtype=torch.int32, device=z.device)
    _launch_split(
        (-(-points // _SPLIT_ROWS), 1, 1), (dim, aligned(z), aligned(origin), aligned(slack)),
        (z, origin, tables.scale, tables.longest, high, low, factor, slack, points, dim, dim),
        (TOP, 2.001 * _largest_error(padded, size, pairs), 2.0**-22 * padded**0.5, block, blocks, pairs, _SPLIT_ROWS),
        num_warps=4,
    )  # fmt: skip
    rows = _FEW_ROWS if points < _MANY else 2 * _FEW_ROWS
    # With few rows a program takes one chunk, so that more programs run; with many it keeps its rows for all chunks.
    per = min(chunks, max(1, chunks * -(-points // rows) // _PROGRAMS))
    _launch_closest(
        (-(-points // rows), -(-chunks // per), 1), (aligned(runner),),
        (high, low, factor, tables.high, tables.low, tables.half, tables.chunks, best, runner, place,
         points, chunks, per),
        (block, blocks, pairs, size, beside, CHUNK // size - 1, rows),
        num_warps=8 if blocks > 1 and rows > _FEW_ROWS else 4, num_stages=3,
    )  # fmt: skip
    rows = _DISTANCE_ROWS if points < _MANY else 4 * _DISTANCE_ROWS
    given, group = (index, 1) if label is None else (label, min(_CLASSES, power_of_two(classes)))
    _launch_nearest(
        (-(-points // rows), classes if label is None else 1, 1),
        (dim, *map(aligned, (z, origin, offsets, slack, runner, distance, index, given)), given.dtype),
        (z, origin, offsets, tables.number, tables.chunks, tables.ranges, slack, best, runner, place, given, distance,
         index, points, dim, dim, classes),
        (label is not None, pairs, size, beside, CHUNK // size, group, _FEATURES, rows), num_warps=4,
    )  # fmt: skip
