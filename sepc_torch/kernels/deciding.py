r"""From distances to decisions: rule, label, trust, margin, nearest and runner-up of every row of a tile.

What is here runs inside a kernel and gives what :func:`sepc_torch.rules.resolve` gives, without a matrix product over
the cells and without asking the host anything. Matrices are stored with the rows side by side. A row is taken by one
thread, if there are rows enough to keep a chip busy, or by 32 ``lanes`` or more that share its ellipsoids. One pass
over the distances finds which ellipsoids hold the row, the nearest, and the nearest of another class; the rest is
looked up (:mod:`sepc_torch.kernels.tables`). Rows that have no line in the tables are rare and taken one after another,
by all threads of a program together: those with a pattern that no training point has, or a tied majority, and those
that are equally near to several ellipsoids.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sepc_torch.kernels.lookup import (
    CLASSES,
    CODES,
    COUNTS,
    ELLIPSOIDS,
    LIMIT,
    ORDER,
    STARTS,
    SUMS,
    TOTALS,
    VERDICTS,
    bits_of,
    count_region,
    count_tied,
    expanded,
    hashed,
    known_cell,
    long_section,
    lowest_bit,
    reached,
    section,
)  # fmt: skip
from sepc_torch.rules import NEAREST_TIE, Rule

_TIED = tl.constexpr(1.0 + NEAREST_TIE)
_SINGLE, _OVERLAP = tl.constexpr(int(Rule.SINGLE)), tl.constexpr(int(Rule.OVERLAP))
_UNION, _OUTSIDE = tl.constexpr(int(Rule.UNION)), tl.constexpr(int(Rule.OUTSIDE))
_LARGEST_INT = tl.constexpr(2**31 - 1)


@triton.jit
def ordered(x):
    """Numbers with NaN below all, which is where torch's minimum finds it."""
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def two_least(x, k, least, place, second):
    """The least so far, its place and the second least, after the numbers x of place k."""
    place = tl.where(x < least, k, place)
    return tl.minimum(least, x), place, tl.minimum(second, tl.maximum(least, x))


@triton.jit
def _of_lanes(least, place, second):
    """Place and distance of the nearest, and the second distance, over all lanes; of equals the first is nearest."""
    best = tl.min(least, axis=1)
    nearest = tl.min(tl.where(least == best[:, None], place, _LARGEST_INT), axis=1)
    wins = (least == best[:, None]) & (place == nearest[:, None])
    return nearest, best, tl.min(tl.where(wins, second, least), axis=1)


@triton.jit
def _other_class(x, c, least, least_class, other, other_class):
    """The least of another class than that of the least, after the numbers x of class c; and the class of the least."""
    closer = x < least
    takes = (c != least_class) & (closer | (x < other))
    other = tl.where(takes, tl.where(closer, least, x), other)
    other_class = tl.where(takes, tl.where(closer, least_class, c), other_class)
    return other, other_class, tl.where(closer, c, least_class)


@triton.jit
def _class_distances(tables, distance, chosen, rows, group, classes, chunk: tl.constexpr):
    """Distance of one row to the nearest ellipsoid of some classes; infinite for a class without one."""
    starts = section(tables, STARTS)
    begin = tl.load(starts + group, mask=group < classes, other=0)
    end = tl.load(starts + group + 1, mask=group < classes, other=0)
    p = tl.arange(0, chunk)
    near = tl.full([chunk, group.shape[0]], float("inf"), distance.dtype.element_ty)
    for m in range(0, tl.max(end - begin, axis=0), chunk):
        k = begin[None, :] + m + p[:, None]
        found = tl.load(distance + k * rows + chosen, mask=k < end[None, :], other=float("inf"))
        near = tl.minimum(near, ordered(found))
    return tl.min(near, axis=0)


@triton.jit
def _distance_to_class(tables, distance, row, rows, label, wanted, lanes: tl.constexpr):
    """Distance of rows to the nearest ellipsoid of a class, each of its own."""
    starts = section(tables, STARTS)
    begin = tl.load(starts + label, mask=wanted, other=0)
    end = tl.load(starts + label + 1, mask=wanted, other=0)
    near = tl.full([row.shape[0], lanes], float("inf"), distance.dtype.element_ty)
    for m in tl.range(0, tl.max(end - begin, axis=0), lanes, loop_unroll_factor=4 if lanes == 1 else 1):
        k = begin[:, None] + m + tl.arange(0, lanes)[None, :]
        found = tl.load(distance + k * rows + row[:, None], mask=k < end[:, None], other=float("inf"))
        near = tl.minimum(near, ordered(found))
    return tl.min(near, axis=1)


@triton.jit
def _majority(
    tables, distance, nearness, pattern, chosen, rows, is_tied, tied_within, judged, ellipsoids, classes,
    double: tl.constexpr, class_chunk: tl.constexpr, chunk: tl.constexpr, ahead: tl.constexpr,
):  # fmt: skip
    """The majority of the points in all ellipsoids of one row, else of those in any, else the nearest class of a tie.

    Returns its class and points, the sum over classes, whether it is that in all, and the points of class ``judged``.
    """
    number_type: tl.constexpr = distance.dtype.element_ty
    largest: tl.constexpr = 1.7976931348623157e308 if number_type == tl.float64 else 3.4028234663852886e38
    most, most_number, most_class = -1, 0, 0
    most_any, any_class = -1, 0
    closest = tl.min(tl.full([class_chunk], float("inf"), number_type), axis=0)
    sum_all, sum_any = chosen.to(tl.int64) * 0, chosen.to(tl.int64) * 0
    judged_all, judged_any = 0, 0
    for begin in range(0, classes, class_chunk):
        group = begin + tl.arange(0, class_chunk)
        present = group < classes
        if is_tied:
            in_all, in_any = count_tied(
                tables, distance, nearness, chosen, rows, group, tied_within, classes, ellipsoids, double
            )
        else:
            in_all, in_any = count_region(tables, pattern, chosen, rows, group, classes, ellipsoids, chunk, ahead)
        total = tl.load(section(tables, TOTALS) + group, mask=present, other=0).to(tl.int64)
        sum_all += tl.sum(tl.where(present, in_all, 0).to(tl.int64) * total, axis=0)
        sum_any += tl.sum(tl.where(present, in_any, 0).to(tl.int64) * total, axis=0)
        judged_all += tl.sum(tl.where(group == judged, in_all, 0), axis=0)
        judged_any += tl.sum(tl.where(group == judged, in_any, 0), axis=0)

        in_all = tl.where(present, in_all, -1)
        top = tl.max(in_all, axis=0)
        number = tl.sum((in_all == top).to(tl.int32), axis=0)
        most_number = tl.where(top > most, number, tl.where(top == most, most_number + number, most_number))
        top_class = tl.min(tl.where(in_all == top, group, _LARGEST_INT), axis=0)
        most_class = tl.where(top > most, top_class, most_class)
        most = tl.maximum(most, top)

        in_any = tl.where(present, in_any, -1)
        top = tl.max(in_any, axis=0)
        number = tl.sum((in_any == top).to(tl.int32), axis=0)
        # Distances decide ties. A tied class without an ellipsoid still comes before one that is not tied.
        close = tl.zeros([class_chunk], number_type)
        if (classes > class_chunk) | ((number > 1) & (most_number != 1)):
            close = _class_distances(tables, distance, chosen, rows, group, classes, chunk)
        close = tl.where(in_any == top, tl.minimum(close, largest), float("inf"))
        top_close = tl.min(close, axis=0)
        top_class = tl.min(tl.where(close == top_close, group, _LARGEST_INT), axis=0)
        closer = (top > most_any) | ((top == most_any) & (top_close < closest))
        any_class, closest = tl.where(closer, top_class, any_class), tl.where(closer, top_close, closest)
        most_any = tl.maximum(most_any, top)
    unique = most_number == 1
    return (
        tl.where(unique, most_class, any_class), tl.where(unique, most, most_any), tl.where(unique, sum_all, sum_any),
        unique, tl.where(unique, judged_all, judged_any),
    )  # fmt: skip


@triton.jit
def _trust(number, total, sum_of_products):
    """The share of one class, the point counted as its own, in the sum over all; in float64."""
    own = (number + 1).to(tl.float64) * (total + 1).to(tl.float64)
    others = (sum_of_products - number.to(tl.int64) * total.to(tl.int64)).to(tl.float64)
    return own / (own + others)


@triton.jit
def _margin(label, own, least, least_class, other, other_class, tiny: tl.constexpr):
    """Distance to the nearest other class over that to the label's own, and which class that is."""
    nearest_is_own = least_class == label
    other = tl.where(nearest_is_own, other, least)
    runner_up = tl.where(nearest_is_own, other_class, least_class)
    runner_up = tl.where(other == float("inf"), 0, runner_up)
    own = tl.where(own == float("-inf"), float("nan"), own)
    other = tl.where(other == float("-inf"), float("nan"), other)
    return other / tl.where(own < tiny, tiny, own), runner_up


@triton.jit
def decide(
    distance, nearness, given, tables, ints, floats, begin, live, rows, stride,
    euclidean: tl.constexpr, judging: tl.constexpr, merged: tl.constexpr, double: tl.constexpr,
    lanes: tl.constexpr, unroll: tl.constexpr, class_chunk: tl.constexpr,
):  # fmt: skip
    """Decide for the rows of a tile, from ``begin`` on, into columns of results ``stride`` apart.

    Below the distances there is room for the patterns.
    """
    tile: tl.constexpr = live.shape[0]
    number_type: tl.constexpr = distance.dtype.element_ty
    tiny: tl.constexpr = 2.0**-1022 if number_type == tl.float64 else 2.0**-126
    # Lanes of a search; for rare rows, words of cells to take at once, and cells to ask for before looking at one.
    askers: tl.constexpr = 32 if lanes >= 32 else lanes
    chunk: tl.constexpr = 32 if lanes >= 32 else 16
    ahead: tl.constexpr = 4 if lanes >= 32 else 1
    t = tl.arange(0, tile)
    row = begin + t
    lane = tl.arange(0, lanes)
    ellipsoids, classes = tl.load(tables + ELLIPSOIDS), tl.load(tables + CLASSES)
    width = (ellipsoids + 31) // 32
    pattern = (distance + ellipsoids * rows).to(tl.pointer_type(tl.int32))
    codes = section(tables, CODES)
    zero = row * 0

    # Membership as bits, the nearest and the second nearest, and the nearest of another class than the nearest's.
    unset = tl.full([tile, lanes], float("inf"), number_type)
    none = tl.zeros([tile, lanes], tl.int32)
    least, second, place, least_class = unset, unset, none, none
    other, other_class = unset, none
    least_near, second_near, place_near = unset, unset, none
    finite = none
    held_by, first = zero, zero + _LARGEST_INT
    key = zero.to(tl.int64)
    # A word at a time, or as many words as there are lanes for.
    span: tl.constexpr = lanes if lanes > 32 else 32
    words: tl.constexpr = span // 32
    for begin_word in range(0, width, words):
        w = begin_word + tl.arange(0, words)
        word = tl.zeros([tile, words], tl.int32)
        for bits in range(0, tl.minimum(span, ellipsoids - begin_word * 32), lanes * unroll):
            for u in tl.static_range(unroll):
                k = (begin_word * 32 + bits + u * lanes + lane)[None, :]
                wanted = live[:, None] & (k < ellipsoids)
                d = tl.load(distance + k * rows + row[:, None], mask=wanted, other=float("inf"))
                c = tl.load(codes + k, mask=k < ellipsoids, other=0)
                finite |= (d < float("inf")).to(tl.int32)
                bit = (d <= LIMIT).to(tl.int32) << (k & 31)
                word |= tl.sum(tl.reshape(bit, [tile, words, lanes // words]), axis=2)
                x = ordered(d)
                other, other_class, least_class = _other_class(x, c, least, least_class, other, other_class)
                least, place, second = two_least(x, k, least, place, second)
                if euclidean:
                    n = ordered(tl.load(nearness + k * rows + row[:, None], mask=wanted, other=float("inf")))
                    least_near, place_near, second_near = two_least(n, k, least_near, place_near, second_near)
        tl.store(pattern + w[None, :] * rows + row[:, None], word, mask=live[:, None] & (w < width)[None, :])
        lowest = tl.where(word != 0, w[None, :] * 32 + lowest_bit(word), _LARGEST_INT)
        first = tl.minimum(first, tl.min(lowest, axis=1))
        held_by += tl.sum(bits_of(word), axis=1)
        key += tl.sum(hashed(word, w[None, :]), axis=1)
    # What the lanes found, together.
    nearest, best, next_best = _of_lanes(least, place, second)
    best_class = tl.load(codes + nearest, mask=live, other=0)
    elsewhere = tl.where(least_class == best_class[:, None], other, least)
    its_class = tl.where(least_class == best_class[:, None], other_class, least_class)
    next_distance = tl.min(elsewhere, axis=1)
    next_class = tl.min(tl.where(elsewhere == next_distance[:, None], its_class, _LARGEST_INT), axis=1)
    bad = tl.max(finite, axis=1) == 0
    outside, single, several = held_by == 0, live & (held_by == 1), live & (held_by > 1)
    least_outside, second_outside = best, next_best
    if euclidean:
        near_place, least_outside, second_outside = _of_lanes(least_near, place_near, second_near)
        nearest = tl.where(outside, near_place, nearest)
    alone = second_outside > least_outside * _TIED
    lonely = outside & alone & live & ~bad
    tied = outside & ~alone & live & ~bad
    nearest_distance = tl.load(distance + nearest * rows + row, mask=live, other=0.0)
    tl.debug_barrier()  # patterns that other threads stored are read from here on

    # A line of the tables, for rows in one ellipsoid and in a pattern that is known.
    cell = zero - 1
    if tl.max(several.to(tl.int32), axis=0) > 0:
        cell = known_cell(tables, pattern, row, rows, key, several, width, askers)
    listed = single | (cell >= 0)
    line = tl.where(single, first, ellipsoids + cell)
    verdict = tl.load(section(tables, VERDICTS) + line, mask=listed, other=0)
    label = tl.where(listed, verdict >> 1, tl.load(codes + nearest, mask=live, other=0))
    by_all = (verdict & 1) == 1
    counts = section(tables, COUNTS)
    number = tl.load(counts + line * classes + label, mask=listed, other=0)
    products = tl.load(long_section(tables, SUMS) + line, mask=listed, other=0)

    # Outside: the nearest, expanded.
    bound = nearest_distance * LIMIT
    near_number, near_products = expanded(tables, nearest, label, bound, lonely, classes, merged, double, askers)
    number = tl.where(lonely, near_number, number)
    products = tl.where(lonely, near_products, products)
    if judging:
        theirs = tl.load(given + row, mask=live, other=0).to(tl.int32)
        their_number = tl.load(counts + line * classes + theirs, mask=listed, other=0)
        their_number += reached(tables, nearest, theirs, bound, lonely, classes, double, askers)

    # The rest, one row after another.
    apart = (several & (cell < 0)) | tied
    left = tl.sum(apart.to(tl.int32), axis=0)
    while left > 0:
        at = tl.min(tl.where(apart, t, tile), axis=0)
        chosen = begin + at
        here = t == at
        is_tied = tl.max((tied & here).to(tl.int32), axis=0) > 0
        tied_within = tl.min(tl.where(here, least_outside, float("inf")), axis=0) * _TIED
        judged = 0
        if judging:
            judged = tl.sum(tl.where(here, theirs, 0), axis=0)
        its_label, its_number, its_products, unique, judged_number = _majority(
            tables, distance, nearness, pattern, chosen, rows, is_tied, tied_within, judged, ellipsoids, classes,
            double, class_chunk, chunk, ahead,
        )  # fmt: skip
        label = tl.where(here, its_label, label)
        number = tl.where(here, its_number, number)
        products = tl.where(here, its_products, products)
        by_all = tl.where(here, unique, by_all)
        if judging:
            their_number = tl.where(here, judged_number, their_number)
        apart = apart & ~here
        left -= 1

    rule = tl.where(outside, _OUTSIDE, tl.where(held_by == 1, _SINGLE, tl.where(by_all, _OVERLAP, _UNION)))
    stride = stride.to(tl.int64)
    ints += row
    floats += row
    tl.store(ints, tl.where(bad, -1, label).to(tl.int64), mask=live)
    tl.store(ints + stride, rule.to(tl.int64), mask=live)
    tl.store(ints + 2 * stride, tl.load(section(tables, ORDER) + nearest, mask=live, other=0).to(tl.int64), mask=live)
    tl.store(floats + stride, nearest_distance, mask=live)
    for judged_one in tl.static_range(2 if judging else 1):
        if judged_one == 1:
            label, number = theirs, their_number
        total = tl.load(section(tables, TOTALS) + label, mask=live, other=0)
        trust = _trust(number, total, products)
        own = tl.where(label == best_class, best, next_distance)
        farther = live & (label != best_class) & (label != next_class)
        if tl.max(farther.to(tl.int32), axis=0) > 0:
            own = tl.where(farther, _distance_to_class(tables, distance, row, rows, label, farther, askers), own)
        margin, runner_up = _margin(label, own, best, best_class, next_distance, next_class, tiny)
        tl.store(ints + (3 + judged_one) * stride, runner_up.to(tl.int64), mask=live)
        tl.store(floats + 3 * judged_one * stride, tl.where(bad, 0.0, trust), mask=live)
        tl.store(floats + (2 + 2 * judged_one) * stride, margin, mask=live)
