"""Exact part of the search: distances from differences in float64, for the points that estimates leave.

The kernel takes the results of the estimates of :mod:`sepc_torch.head.kernels.search`: for every class and chunk of
tiles the closest point, and the largest closeness in any other lane.
"""

from __future__ import annotations

import triton.language as tl

from sepc_torch.model.kernels.launch import jit


@jit
def _as_half(x):
    """The function :func:`sepc_torch.head.evidence.neighbours.as_half`: to the nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000
    large = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return tl.where(tl.abs(x) < 1.0, x.to(tl.float16).to(tl.float32), large)


@jit
def relative(start, origin, i, live, dim, pairs: tl.constexpr):
    """Features i of rows, relative to the origin, with the digits of the points; zero beyond the last."""
    there = live[:, None] & (i < dim)[None, :]
    part = tl.load(start + i[None, :], mask=there, other=0.0)
    part = tl.where(there, part - tl.load(origin + i, mask=i < dim, other=0.0)[None, :], 0.0)
    return part if pairs else _as_half(part)


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
def _squares(z, origin, offsets, row, live, point, there, dim, row_stride, pairs: tl.constexpr, features: tl.constexpr):
    """Squared distances in float64 between rows and each of their points; infinite where there is no point."""
    squares = tl.zeros([point.shape[0], point.shape[1]], tl.float64)
    for first in range(0, dim, features):
        i = first + tl.arange(0, features)
        x = relative(z + row[:, None].to(tl.int64) * row_stride, origin, i, live, dim, pairs)
        inside = there[:, :, None] & (i < dim)[None, None, :]
        spots = offsets + point[:, :, None].to(tl.int64) * dim + i[None, None, :]
        apart = tl.load(spots, mask=inside, other=0.0).to(tl.float64) - x[:, None, :].to(tl.float64)
        squares += tl.sum(tl.where(inside, apart * apart, 0.0), axis=2)
    return tl.where(there, squares, float("inf"))


@jit
def _nearest_of_all(
    z, origin, offsets, index, chunks, ranges, best, row, given, first_class, end_class, own, least, points, dim,
    row_stride, pairs: tl.constexpr, size: tl.constexpr, beside: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """The nearest point to one row, among the points of classes in chunks with a closeness of at least ``least``.

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
                            z, origin, offsets, rows, rows >= 0, point, point >= 0, dim, row_stride, pairs, features
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
    pairs: tl.constexpr, size: tl.constexpr, beside: tl.constexpr, tiles: tl.constexpr, features: tl.constexpr,
    rows: tl.constexpr,
):  # fmt: skip
    """Squared distance to the nearest point of the given class, or of all others, and its number."""
    chunk, spot = tl.maximum(chunk, 0), tl.maximum(spot, 0)
    first = tl.load(chunks + chunk)[:, None]
    tile = first + tl.arange(0, tiles)[None, :]
    there = live[:, None] & (tile < tl.load(chunks + chunk + 1)[:, None])
    point = tl.load(index + tile * size + (spot % size)[:, None], mask=there, other=2147483647)
    squares = _squares(z, origin, offsets, row, live, point, there, dim, row_stride, pairs, features)
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
            points, dim, row_stride, pairs, size, beside, features,
        )  # fmt: skip
        square = tl.where(slot == one, shortest, square)
        number = tl.where(slot == one, nearest, number)
        unsure = unsure & (slot != one)
    return square, number


@jit(do_not_specialize=["points", "classes"])
def nearest_points(
    z, origin, offsets, index, chunks, ranges, slack, best, runner, place, label, distance, found,
    points, dim, row_stride, classes, labelled: tl.constexpr, pairs: tl.constexpr, size: tl.constexpr,
    beside: tl.constexpr, tiles: tl.constexpr, group: tl.constexpr, features: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Find the nearest point of one class, or (``labelled``) of the label's class and of all others."""
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
        end_class, True, points, dim, row_stride, pairs, size, beside, tiles, features, rows,
    )  # fmt: skip
    if labelled:
        other, number = _settled(
            z, origin, offsets, index, chunks, ranges, slack, best, other_most, other_after, other_chunk, other_spot,
            row, live, given, first_class, end_class, False, points, dim, row_stride, pairs, size, beside, tiles,
            features, rows,
        )  # fmt: skip
        square, other = tl.sqrt(square).to(tl.float32), tl.sqrt(other).to(tl.float32)
        for start in range(first_class, end_class, group):
            c = start + tl.arange(0, group)
            value = tl.where(given[:, None] == c[None, :], square[:, None], other[:, None])
            tl.store(distance + out[:, None] + c[None, :], value, mask=live[:, None] & (c < end_class)[None, :])
    else:
        tl.store(distance + out + first_class, tl.sqrt(square).to(tl.float32), mask=live)
        tl.store(found + out + first_class, number, mask=live)
