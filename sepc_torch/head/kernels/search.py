r"""Search kernels: the nearest reference point of every class, without a matrix of all products.

1. ``_split_rows`` splits every row into a pair of float16 numbers and finds its scale.
2. ``_closest`` maximises the closeness :math:`z \cdot x_i - \tfrac12 \|x_i\|^2` over every chunk of tiles, from three
   float16 products with the accuracy of float32.
3. ``_class_distance`` takes the best point of every class and computes its distance from differences, with sums in
   float64.

Every batch uses the same tiles, so the results of a row do not depend on the batch. Equal closeness goes to the lower
index.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from sepc_torch.head.kernels.tables import SearchTables
from sepc_torch.model.kernels.distances import power_of_two_above, split_float
from sepc_torch.model.kernels.launch import Launcher, aligned, jit
from sepc_torch.model.kernels.tables import TOP, block_size
from sepc_torch.shapes import Float, Int

# Rows of a program of each kernel. From _MANY rows on, a program of the second one takes twice as many.
_SPLIT_ROWS, _FEW_ROWS, _DISTANCE_ROWS = 32, 64, 32
_MANY = 2**14
# Programs that occupy a chip of 132 multiprocessors (H200) about twice.
_PROGRAMS = 256
# Bytes of the best values and places of all chunks of a piece.
_PIECE_BYTES = 2**27


@jit(do_not_specialize=["points"])
def _split_rows(
    z, scale_of_points, high, low, factor, points, dim, row_stride,
    top: tl.constexpr, block: tl.constexpr, blocks: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    live = row < points
    start = z + row[:, None].to(tl.int64) * row_stride
    largest = tl.full([rows], 1e-30, tl.float32)
    for b in tl.static_range(blocks):
        i = b * block + tl.arange(0, block)
        part = tl.load(start + i[None, :], mask=live[:, None] & (i < dim)[None, :], other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(part), axis=1))
    scale = power_of_two_above(largest)
    tl.store(factor + row, (top / scale) * (top / tl.load(scale_of_points)), mask=live)
    out = row[:, None].to(tl.int64) * (block * blocks)
    for b in tl.static_range(blocks):
        i = b * block + tl.arange(0, block)
        part = tl.load(start + i[None, :], mask=live[:, None] & (i < dim)[None, :], other=0.0)
        first, second = split_float(part * (top / scale)[:, None])
        tl.store(high + out + i[None, :], first, mask=live[:, None])
        tl.store(low + out + i[None, :], second, mask=live[:, None])


@jit(do_not_specialize=["points", "count", "per"])
def _closest(
    high, low, factor, tile_high, tile_low, half, chunks, best, place,
    points, count, per,
    block: tl.constexpr, blocks: tl.constexpr, size: tl.constexpr, rows: tl.constexpr,
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
        x_low = tl.load(low + start, mask=live[:, None], other=0.0)
    for q in range(tl.program_id(1) * per, tl.minimum(tl.program_id(1) * per + per, count)):
        most = tl.full([rows, size], float("-inf"), tl.float32)
        where = tl.zeros([rows, size], tl.int32)
        for t in range(tl.load(chunks + q), tl.load(chunks + q + 1)):
            y = tl.zeros([rows, size], tl.float32)
            for b in tl.static_range(blocks):
                if blocks > 1:
                    x_high = tl.load(high + start + b * block, mask=live[:, None], other=0.0)
                    x_low = tl.load(low + start + b * block, mask=live[:, None], other=0.0)
                spot = t * (padded * size) + (b * block + i)[:, None] * size + n[None, :]
                p_high = tl.load(tile_high + spot)
                y = tl.dot(x_high, p_high, y)
                y = tl.dot(x_low, p_high, y)
                y = tl.dot(x_high, tl.load(tile_low + spot), y)
            y -= weight * tl.load(half + t * size + n)[None, :]
            better = y > most
            most = tl.where(better, y, most)
            where = tl.where(better, t, where)
        found = tl.max(most, axis=1)
        spots = tl.where(most == found[:, None], where * size + n[None, :], 2147483647)
        tl.store(best + q * points + row, found, mask=live)
        tl.store(place + q * points + row, tl.min(spots, axis=1), mask=live)


@jit(do_not_specialize=["points"])
def _class_distance(
    z, offsets, index, classes, best, place, distance, found,
    points, dim, row_stride, class_count,
    block: tl.constexpr, blocks: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    live = row < points
    c = tl.program_id(1)
    most = tl.full([rows], float("-inf"), tl.float32)
    begin = tl.load(classes + c)
    spot = tl.load(place + begin * points + row, mask=live, other=0)
    for q in range(begin, tl.load(classes + c + 1)):
        y = tl.load(best + q * points + row, mask=live, other=0.0)
        spot = tl.where(y > most, tl.load(place + q * points + row, mask=live, other=0), spot)
        most = tl.maximum(most, y)
    point = tl.load(index + spot, mask=live, other=0).to(tl.int64)
    squares = tl.zeros([rows], tl.float64)
    for b in tl.static_range(blocks):
        i = b * block + tl.arange(0, block)
        there = live[:, None] & (i < dim)[None, :]
        x = tl.load(z + row[:, None].to(tl.int64) * row_stride + i[None, :], mask=there, other=0.0)
        apart = (tl.load(offsets + point[:, None] * dim + i[None, :], mask=there, other=0.0) - x).to(tl.float64)
        squares += tl.sum(apart * apart, axis=1)
    out = row.to(tl.int64) * class_count + c
    tl.store(distance + out, tl.sqrt(squares).to(tl.float32), mask=live)
    tl.store(found + out, point, mask=live)


_launch_split, _launch_closest, _launch_distance = Launcher(_split_rows), Launcher(_closest), Launcher(_class_distance)


def nearest_into(
    z: Float[Tensor, "B D"],
    offsets: Float[Tensor, "N D"],
    tables: SearchTables,
    distance: Float[Tensor, "B C"],
    index: Int[Tensor, "B C"],
) -> None:
    """Write the distance to the nearest point of every class, and the point's number, for rows in float32.

    ``z`` and ``offsets`` are contiguous and relative to one origin.
    """
    chunks = len(tables.chunks) - 1
    step = max(_FEW_ROWS, _PIECE_BYTES // (8 * chunks))
    for start in range(0, len(z), step):
        rows = slice(start, start + step)
        _piece_into(z[rows], offsets, tables, distance[rows], index[rows])


def _piece_into(z: Tensor, offsets: Tensor, tables: SearchTables, distance: Tensor, index: Tensor) -> None:
    points, dim = z.shape
    _, padded, size = tables.high.shape
    block = block_size(dim)
    blocks, chunks, classes = padded // block, len(tables.chunks) - 1, len(tables.classes) - 1
    high, low = (torch.empty(points, padded, dtype=torch.float16, device=z.device) for _ in range(2))
    factor = torch.empty(points, dtype=torch.float32, device=z.device)
    best = torch.empty(chunks, points, dtype=torch.float32, device=z.device)
    place = torch.empty(chunks, points, dtype=torch.int32, device=z.device)
    _launch_split(
        (-(-points // _SPLIT_ROWS), 1, 1), (dim, aligned(z)),
        (z, tables.scale, high, low, factor, points, dim, z.stride(0)),
        (TOP, block, blocks, _SPLIT_ROWS), num_warps=4,
    )  # fmt: skip
    rows = _FEW_ROWS if points < _MANY else 2 * _FEW_ROWS
    # With few rows a program takes one chunk, so that more programs run; with many it keeps its rows for all chunks.
    per = min(chunks, max(1, chunks * -(-points // rows) // _PROGRAMS))
    _launch_closest(
        (-(-points // rows), -(-chunks // per), 1), (),
        (high, low, factor, tables.high, tables.low, tables.half, tables.chunks, best, place, points, chunks, per),
        (block, blocks, size, rows), num_warps=4 if rows == _FEW_ROWS else 8, num_stages=2 if blocks > 1 else 3,
    )  # fmt: skip
    _launch_distance(
        (-(-points // _DISTANCE_ROWS), classes, 1), (dim, aligned(z), classes == 1, classes % 16 == 0),
        (z, offsets, tables.number, tables.classes, best, place, distance, index, points, dim, z.stride(0), classes),
        (block, blocks, _DISTANCE_ROWS), num_warps=4,
    )  # fmt: skip
