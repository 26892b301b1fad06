r"""Search kernels: the nearest reference point of every class, without a matrix of all products.

1. ``_split_rows`` splits every row into a pair of float16 numbers and finds its scale.
2. ``_closest`` maximises the closeness :math:`z \cdot x_i - \tfrac12 \|x_i\|^2` over the points of every class in every
   chunk of tiles, from three float16 products, with 21 bits. Rows and points with the digits of float16 need
   one product.
3. ``_class_distance`` takes the best point of every class and computes its distance from differences, with sums in
   float64.

Every batch uses the same tiles, so the results of a row do not depend on the batch. Of equal points the first one is
found.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from sepc_torch.head.kernels.tables import CHUNK, SearchTables
from sepc_torch.model.kernels.distances import power_of_two_above, split_float
from sepc_torch.model.kernels.launch import Launcher, aligned, jit
from sepc_torch.model.kernels.tables import TOP, block_size, power_of_two
from sepc_torch.shapes import Float, Int

# Rows of a program of the first two kernels. From _MANY rows on, a program of the second one takes twice as many.
_SPLIT_ROWS, _FEW_ROWS = 32, 64
_MANY = 2**14
# Rows, most classes and features that a program of the third kernel takes at a time; measured on an H200.
_DISTANCE_ROWS, _CLASSES, _FEATURES = 16, 4, 32
# Programs that occupy a chip of 132 multiprocessors (H200) about twice.
_PROGRAMS = 256
# Bytes of the split rows of a piece, and of the best values and places of all its chunks.
_PIECE_BYTES = 2**27


@jit
def _relative(start, origin, i, live, dim):
    """Features i of rows, relative to the origin; zero beyond the last."""
    there = live[:, None] & (i < dim)[None, :]
    part = tl.load(start + i[None, :], mask=there, other=0.0)
    return tl.where(there, part - tl.load(origin + i, mask=i < dim, other=0.0)[None, :], 0.0)


@jit(do_not_specialize=["points"])
def _split_rows(
    z, origin, scale_of_points, high, low, factor, points, dim, row_stride,
    top: tl.constexpr, block: tl.constexpr, blocks: tl.constexpr, pairs: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    live = row < points
    start = z + row[:, None].to(tl.int64) * row_stride
    of_points = tl.load(scale_of_points)
    # Far below the points a row counts as zero: its own scale would overflow the factor. 9.1e-13 is 2^-40.
    largest = tl.maximum(tl.full([rows], 1e-30, tl.float32), of_points * 9.094947017729282e-13)
    for b in tl.static_range(blocks):
        i = b * block + tl.arange(0, block)
        part = _relative(start, origin, i, live, dim)
        largest = tl.maximum(largest, tl.max(tl.abs(part), axis=1))
    scale = power_of_two_above(largest)
    tl.store(factor + row, top * (top * (of_points / scale)), mask=live)
    out = row[:, None].to(tl.int64) * (block * blocks)
    for b in tl.static_range(blocks):
        i = b * block + tl.arange(0, block)
        part = _relative(start, origin, i, live, dim)
        first, second = split_float(part * (top / scale)[:, None])
        tl.store(high + out + i[None, :], first, mask=live[:, None])
        if pairs:
            tl.store(low + out + i[None, :], second, mask=live[:, None])


@jit(do_not_specialize=["points", "count", "per"])
def _closest(
    high, low, factor, tile_high, tile_low, half, chunks, best, place,
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
                y = tl.dot(x_high, p_high, y)
                if pairs:
                    y = tl.dot(x_low, p_high, y)
                    y = tl.dot(x_high, tl.load(tile_low + tiles + spot), y)
            y -= weight * tl.load(half + (first + t) * size + n)[None, :]
            # The number of the tile replaces the last bits, so that one maximum finds the closeness and the tile.
            most = tl.maximum(most, ((y.to(tl.int32, bitcast=True) & ~last) | t).to(tl.float32, bitcast=True))
        # The best of every class of the tiles.
        most = tl.reshape(most, [rows, beside, size // beside])
        found = tl.max(most, axis=2)
        lane = tl.reshape(tl.broadcast_to(n[None, :], [rows, size]), [rows, beside, size // beside])
        lane = tl.min(tl.where(most == found[:, :, None], lane, size), axis=2)
        spots = (first + (found.to(tl.int32, bitcast=True) & last)) * size + lane
        spots = tl.where(lane < size, spots, first * size)  # NaN equals nothing
        out = (q * beside + tl.arange(0, beside)).to(tl.int64)[None, :] * points + row[:, None]
        tl.store(best + out, found, mask=live[:, None])
        tl.store(place + out, spots, mask=live[:, None])


@jit(do_not_specialize=["points", "classes"])
def _class_distance(
    z, origin, offsets, index, ranges, best, place, distance, found,
    points, dim, row_stride, classes, beside: tl.constexpr,
    group: tl.constexpr, features: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    c = tl.program_id(1) * group + tl.arange(0, group)
    live = (row < points)[:, None] & (c < classes)[None, :]
    begin = tl.load(ranges + 2 * c, mask=c < classes, other=0)
    end = tl.load(ranges + 2 * c + 1, mask=c < classes, other=0)
    column = begin.to(tl.int64)[None, :] * points + row[:, None]
    spot = tl.load(place + column, mask=live, other=0)
    most = tl.load(best + column, mask=live, other=0.0)
    for further in range(beside, tl.max(end - begin, axis=0), beside):
        there = live & (begin + further < end)[None, :]
        y = tl.load(best + column + further * points, mask=there, other=float("-inf"))
        spot = tl.where(y > most, tl.load(place + column + further * points, mask=there, other=0), spot)
        most = tl.maximum(most, y)
    point = tl.load(index + spot, mask=live, other=0).to(tl.int64)
    squares = tl.zeros([rows, group], tl.float64)
    for first in range(0, dim, features):
        i = first + tl.arange(0, features)
        x = _relative(z + row[:, None].to(tl.int64) * row_stride, origin, i, row < points, dim)
        spots = offsets + point[:, :, None] * dim + i[None, None, :]
        there = live[:, :, None] & (i < dim)[None, None, :]
        apart = (tl.load(spots, mask=there, other=0.0) - x[:, None, :]).to(tl.float64)
        squares += tl.sum(apart * apart, axis=2)
    out = row[:, None].to(tl.int64) * classes + c[None, :]
    tl.store(distance + out, tl.sqrt(squares).to(tl.float32), mask=live)
    tl.store(found + out, point, mask=live)


_launch_split, _launch_closest, _launch_distance = Launcher(_split_rows), Launcher(_closest), Launcher(_class_distance)


def nearest_into(
    z: Float[Tensor, "B D"],
    origin: Float[Tensor, "D"],
    offsets: Float[Tensor, "N D"],
    tables: SearchTables,
    distance: Float[Tensor, "B C"],
    index: Int[Tensor, "B C"],
) -> None:
    """Write the distance to the nearest point of every class, and the point's number, for rows in float32.

    The points are ``origin`` plus ``offsets``; ``z`` and ``offsets`` are contiguous. For tables without
    ``low`` the rows have the digits of float16 too, and the origin is zero.
    """
    row_bytes = 8 * (len(tables.chunks) - 1) * tables.beside + 4 * tables.high.shape[1]
    step = max(_FEW_ROWS, _PIECE_BYTES // row_bytes)
    for start in range(0, len(z), step):
        rows = slice(start, start + step)
        _piece_into(z[rows], origin, offsets, tables, distance[rows], index[rows])


def _piece_into(
    z: Tensor, origin: Tensor, offsets: Tensor, tables: SearchTables, distance: Tensor, index: Tensor
) -> None:
    points, dim = z.shape
    _, padded, size = tables.high.shape
    block, beside = block_size(dim), tables.beside
    blocks, chunks, classes = padded // block, len(tables.chunks) - 1, len(tables.ranges)
    pairs = tables.low.numel() > 0
    high = torch.empty(points, padded, dtype=torch.float16, device=z.device)
    low = torch.empty_like(high) if pairs else high
    factor = torch.empty(points, dtype=torch.float32, device=z.device)
    best = torch.empty(chunks * beside, points, dtype=torch.float32, device=z.device)
    place = torch.empty(chunks * beside, points, dtype=torch.int32, device=z.device)
    _launch_split(
        (-(-points // _SPLIT_ROWS), 1, 1), (dim, aligned(z), aligned(origin)),
        (z, origin, tables.scale, high, low, factor, points, dim, dim),
        (TOP, block, blocks, pairs, _SPLIT_ROWS), num_warps=4,
    )  # fmt: skip
    rows = _FEW_ROWS if points < _MANY else 2 * _FEW_ROWS
    # With few rows a program takes one chunk, so that more programs run; with many it keeps its rows for all chunks.
    per = min(chunks, max(1, chunks * -(-points // rows) // _PROGRAMS))
    _launch_closest(
        (-(-points // rows), -(-chunks // per), 1), (),
        (high, low, factor, tables.high, tables.low, tables.half, tables.chunks, best, place, points, chunks, per),
        (block, blocks, pairs, size, beside, CHUNK // size - 1, rows),
        num_warps=8 if blocks > 1 and rows > _FEW_ROWS else 4, num_stages=3,
    )  # fmt: skip
    group = min(_CLASSES, power_of_two(classes))
    _launch_distance(
        (-(-points // _DISTANCE_ROWS), -(-classes // group), 1), (dim, aligned(z), aligned(origin)),
        (z, origin, offsets, tables.number, tables.ranges, best, place, distance, index,
         points, dim, dim, classes),
        (beside, group, _FEATURES, _DISTANCE_ROWS), num_warps=4,
    )  # fmt: skip
