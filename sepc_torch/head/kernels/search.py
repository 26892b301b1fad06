r"""Search kernels: the nearest reference point of every class, without a matrix of all products.

1. ``_split_rows`` splits every row into a pair of float16 numbers, finds its scale, and bounds the error of the next
   step.
2. ``_closest`` estimates the closeness :math:`z \cdot x_i - \tfrac12 \|x_i\|^2` of all points from three float16
   products; rows and points with the digits of float16 need one. A point has a place in a tile: its lane. For every
   class and chunk of tiles the kernel finds the closest point, and the largest closeness in any other lane.
3. ``_nearest`` computes distances from differences in float64. It compares the distances to the points in the lane of
   the closest point. If the error bound does not rule out another lane, it compares the distances to all points of the
   chunks that can hold the nearest one.

The result is the nearest point, up to the rounding of float64; of points at equal distances the first one is found. It
does not depend on the batch.

The error of a closeness is at most :math:`\kappa (\|z\| X + \tfrac12 X^2)` with the length X of the longest point
(:func:`_largest_error`).
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
_DISTANCE_ROWS, _CLASSES, _FEATURES = 16, 16, 16
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
        part = _relative(start, origin, i, live, dim)
        largest = tl.maximum(largest, tl.max(tl.abs(part), axis=1))
    scale = power_of_two_above(largest)
    weight = top * (top * (of_points / scale))
    tl.store(factor + row, weight, mask=live)
    squares = tl.zeros([rows], tl.float32)
    out = row[:, None].to(tl.int64) * (block * blocks)
    for b in tl.static_range(blocks):
        i = b * block + tl.arange(0, block)
        part = _relative(start, origin, i, live, dim)
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


@jit
def _better(most, after, chunk, spot, y, y_after, y_chunk, y_spot):
    """The best of two parts: largest closeness, largest one in another lane, chunk and place of the best point.

    Where there is no part yet, the place is -1.
    """
    after = tl.maximum(tl.maximum(after, y_after), tl.minimum(most, y))
    better = (y > most) | ((spot < 0) & (y_spot >= 0))
    return tl.maximum(most, y), after, tl.where(better, y_chunk, chunk), tl.where(better, y_spot, spot)


@jit
def _best_of(most, after, chunk, spot, c, among):
    """The best of the classes c in the mask ``among``, for every row, as in :func:`_better`."""
    most = tl.where(among, most, float("-inf"))
    top = tl.max(most, axis=1)
    first = among & ((most == top[:, None]) | (most != most))
    winner = tl.min(tl.where(first, c[None, :], 2147483647), axis=1)
    wins = c[None, :] == winner[:, None]
    chunk, spot = tl.max(tl.where(wins, chunk, -1), axis=1), tl.max(tl.where(wins, spot, -1), axis=1)
    return top, tl.max(tl.where(wins, after, most), axis=1), chunk, spot


@jit
def _first_nearest(squares, point):
    """The least squared distance of a row and the point; of equal distances the one with the least number."""
    least = tl.min(squares, axis=1)
    return least, tl.min(tl.where(squares == least[:, None], point, 2147483647), axis=1)


@jit
def _squares(z, origin, offsets, row, point, there, dim, row_stride, features: tl.constexpr):
    """Squared distances in float64 between rows and each of their points; infinite where there is no point."""
    squares = tl.zeros([point.shape[0], point.shape[1]], tl.float64)
    for first in range(0, dim, features):
        i = first + tl.arange(0, features)
        x = tl.load(z + row[:, None].to(tl.int64) * row_stride + i[None, :], mask=(i < dim)[None, :], other=0.0)
        x -= tl.load(origin + i, mask=i < dim, other=0.0)[None, :]
        inside = there[:, :, None] & (i < dim)[None, None, :]
        spots = offsets + point[:, :, None].to(tl.int64) * dim + i[None, None, :]
        apart = tl.load(spots, mask=inside, other=0.0).to(tl.float64) - x[:, None, :].to(tl.float64)
        squares += tl.sum(tl.where(inside, apart * apart, 0.0), axis=2)
    return tl.where(there, squares, float("inf"))


@jit
def _nearest_of_all(
    z, origin, offsets, index, chunks, ranges, best, row, given, first_class, end_class, own, least, points, dim,
    row_stride, size: tl.constexpr, beside: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """The nearest point to one row of classes, in chunks with a closeness of at least ``least``.

    The classes are the given one (``own``) or all others.
    """
    width: tl.constexpr = size // beside
    shortest = tl.full([1], float("inf"), tl.float64)
    nearest = tl.full([1], 2147483647, tl.int32)
    rows = row + tl.zeros([1], tl.int32)
    for c in range(first_class, end_class):
        if (c == given) == own:
            for part in range(tl.load(ranges + 2 * c), tl.load(ranges + 2 * c + 1), beside):
                if tl.load(best + part * points + row) >= least:
                    for tile in range(tl.load(chunks + part // beside), tl.load(chunks + part // beside + 1)):
                        lane = tile * size + (part % beside) * width + tl.arange(0, width)
                        point = tl.load(index + lane)[None, :]
                        squares = _squares(
                            z, origin, offsets, rows, point, point >= 0, dim, row_stride, features
                        )  # fmt: skip
                        square, number = _first_nearest(squares, point)
                        closer = (square < shortest) | ((square == shortest) & (number < nearest))
                        nearest = tl.where(closer, number, nearest)
                        shortest = tl.where(closer, square, shortest)
    return tl.max(shortest, axis=0), tl.max(nearest, axis=0)


@jit
def _settled(
    z, origin, offsets, index, chunks, ranges, slack, best, most, after, chunk, spot, row, live, given, first_class,
    end_class, own, points, dim, row_stride,
    size: tl.constexpr, beside: tl.constexpr, tiles: tl.constexpr, features: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Squared distance to the nearest point of the given class, or of all others, and its number."""
    chunk, spot = tl.maximum(chunk, 0), tl.maximum(spot, 0)
    first = tl.load(chunks + chunk)[:, None]
    tile = first + tl.arange(0, tiles)[None, :]
    there = live[:, None] & (tile < tl.load(chunks + chunk + 1)[:, None])
    point = tl.load(index + tile * size + (spot % size)[:, None], mask=there, other=2147483647)
    squares = _squares(z, origin, offsets, tl.where(live, row, 0), point, there, dim, row_stride, features)
    square, number = _first_nearest(squares, point)
    undefined = tl.max((squares != squares).to(tl.int32), axis=1) > 0
    square = tl.where(undefined, float("nan"), square)
    number = tl.where(undefined, tl.load(index + spot), number)
    margin = tl.load(slack + row, mask=live, other=0.0)
    least = most - margin
    unsure = live & (after >= least) & (margin < float("inf"))
    slot = tl.arange(0, rows)
    for _ in range(tl.sum(unsure.to(tl.int32), axis=0)):
        one = tl.max(tl.where(unsure, slot, -1), axis=0)
        its_class = tl.max(tl.where(slot == one, given, -1), axis=0)
        its_least = tl.max(tl.where(slot == one, least, float("-inf")), axis=0)
        its_row = tl.max(tl.where(slot == one, row, -1), axis=0)
        shortest, nearest = _nearest_of_all(
            z, origin, offsets, index, chunks, ranges, best, its_row, its_class, first_class, end_class, own, its_least,
            points, dim, row_stride, size, beside, features,
        )  # fmt: skip
        square = tl.where(slot == one, shortest, square)
        number = tl.where(slot == one, nearest, number)
        unsure = unsure & (slot != one)
    return square, number


@jit(do_not_specialize=["points", "classes"])
def _nearest(
    z, origin, offsets, index, chunks, ranges, slack, best, runner, place, label, distance, found,
    points, dim, row_stride, classes, labelled: tl.constexpr, size: tl.constexpr, beside: tl.constexpr,
    tiles: tl.constexpr, group: tl.constexpr, features: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    live = row < points
    unset = float("-inf")
    most, after = tl.full([rows], unset, tl.float32), tl.full([rows], unset, tl.float32)
    chunk, spot = tl.full([rows], -1, tl.int32), tl.full([rows], -1, tl.int32)
    out = row.to(tl.int64) * classes
    first_class, end_class = 0, classes
    if labelled:
        given = tl.maximum(tl.load(label + row, mask=live, other=0), 0).to(tl.int32)
        other_most, other_after, other_chunk, other_spot = most, after, chunk, spot
    else:
        first_class = tl.program_id(1)
        end_class = first_class + 1
        given = first_class + tl.zeros([rows], tl.int32)
    for start in range(first_class, end_class, group):
        c = start + tl.arange(0, group)
        begin = tl.load(ranges + 2 * c, mask=c < end_class, other=0)
        end = tl.load(ranges + 2 * c + 1, mask=c < end_class, other=0)
        y, y_after = tl.full([rows, group], unset, tl.float32), tl.full([rows, group], unset, tl.float32)
        y_chunk, y_spot = tl.full([rows, group], -1, tl.int32), tl.full([rows, group], -1, tl.int32)
        for further in range(0, tl.max(end - begin, axis=0), beside):
            part = begin + further
            there = live[:, None] & (part < end)[None, :]
            column = part[None, :] * points + row[:, None]
            y, y_after, y_chunk, y_spot = _better(
                y, y_after, y_chunk, y_spot,
                tl.load(best + column, mask=there, other=unset), tl.load(runner + column, mask=there, other=unset),
                (part // beside)[None, :], tl.load(place + column, mask=there, other=-1),
            )  # fmt: skip
        own = given[:, None] == c[None, :]
        most, after, chunk, spot = _better(most, after, chunk, spot, *_best_of(y, y_after, y_chunk, y_spot, c, own))
        if labelled:
            others = (given[:, None] != c[None, :]) & (c < end_class)[None, :]
            other_most, other_after, other_chunk, other_spot = _better(
                other_most, other_after, other_chunk, other_spot, *_best_of(y, y_after, y_chunk, y_spot, c, others)
            )
    square, number = _settled(
        z, origin, offsets, index, chunks, ranges, slack, best, most, after, chunk, spot, row, live, given, first_class,
        end_class, True, points, dim, row_stride, size, beside, tiles, features, rows,
    )  # fmt: skip
    if labelled:
        other, number = _settled(
            z, origin, offsets, index, chunks, ranges, slack, best, other_most, other_after, other_chunk, other_spot,
            row, live, given, first_class, end_class, False, points, dim, row_stride, size, beside, tiles, features,
            rows,
        )  # fmt: skip
        square, other = tl.sqrt(square).to(tl.float32), tl.sqrt(other).to(tl.float32)
        for start in range(first_class, end_class, group):
            c = start + tl.arange(0, group)
            value = tl.where(given[:, None] == c[None, :], square[:, None], other[:, None])
            tl.store(distance + out[:, None] + c[None, :], value, mask=live[:, None] & (c < end_class)[None, :])
    else:
        tl.store(distance + out + first_class, tl.sqrt(square).to(tl.float32), mask=live)
        tl.store(found + out + first_class, number, mask=live)


_launch_split, _launch_closest, _launch_nearest = Launcher(_split_rows), Launcher(_closest), Launcher(_nearest)


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

    The points are ``origin`` plus ``offsets``; ``z`` and ``offsets`` are contiguous. For tables without
    ``low`` the rows have the digits of float16 too, and the origin is zero.

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
    given, group = (index, 1) if label is None else (label, min(_CLASSES, power_of_two(classes)))
    _launch_nearest(
        (-(-points // _DISTANCE_ROWS), classes if label is None else 1, 1),
        (dim, *map(aligned, (z, origin, offsets, slack, runner, distance, index, given)), given.dtype),
        (z, origin, offsets, tables.number, tables.chunks, tables.ranges, slack, best, runner, place, given, distance,
         index, points, dim, dim, classes),
        (label is not None, size, beside, CHUNK // size, group, _FEATURES, _DISTANCE_ROWS), num_warps=4,
    )  # fmt: skip
