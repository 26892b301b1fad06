"""Class counts of the training points in the region of a row: device functions of the decision kernels.

A region is the set of members of a row, or the nearest ellipsoid, expanded to touch the row.
"""

from __future__ import annotations

import triton.language as tl

from sepc_torch.model.kernels.launch import jit
from sepc_torch.model.kernels.nearest import NONE


@jit
def count_within(numbers, size, most, bound, wanted):
    """How many of ``size`` ascending numbers are at most ``bound``, by a four-way search (three pivots per step).

    ``numbers`` is a block of pointers, one sequence per element; ``most`` is the largest size, a scalar. The count lies
    in [low, low + span).
    """
    low = (bound * 0 == 1).to(tl.int32)
    span = most + 1
    while span > 1:
        span = (span + 3) // 4
        passed = low * 0
        for j in tl.static_range(3):
            at = low + (j + 1) * span - 1
            ask = wanted & (at < size)
            number = tl.load(numbers + at, mask=ask, other=0).to(bound.dtype)
            passed += (ask & (number <= bound)).to(tl.int32)
        low += passed * span
    return low


@jit
def expanded_count(
    totals, class_starts, grid_counts, step_ids, step_distances, tail_distances, k, c, bound, wanted, steps, levels
):  # fmt: skip
    """Number of training points of class c within ``bound`` of ellipsoid k.

    k is an index in the model's order, not sorted by class. The steps of a class that an ellipsoid keeps are the first
    of the class's grid. Beyond the horizon, the number of tail distances within ``bound`` gives the share of the
    missing points.
    """
    row = k.to(tl.int64) * steps
    first = tl.load(class_starts + c, mask=wanted, other=0)
    begin, end = first, tl.load(class_starts + c + 1, mask=wanted, other=0)
    if levels > 0:  # the ellipsoids keep different steps
        end = count_within(step_ids + row, steps, steps, end - 1, wanted)
        begin = count_within(step_ids + row, steps, steps, first - 1, wanted)
    size = end - begin
    passed = count_within(step_distances + row + begin, size, tl.max(size, axis=0), bound, wanted)
    count = tl.load(grid_counts + first + passed - 1, mask=wanted & (passed > 0), other=0)
    if levels > 0:
        level = count_within(tail_distances + k.to(tl.int64) * levels, levels, levels, bound, wanted)
        missing = tl.load(totals + c, mask=wanted, other=0) - count
        count += (missing * level // levels).to(tl.int32)
    return count


@jit
def line_count(line_starts, line_classes, line_counts, line, c, wanted):
    """Number of training points of class c in a line of class counts."""
    start = tl.load(line_starts + line, mask=wanted, other=0)
    size = (tl.load(line_starts + line + 1, mask=wanted, other=0) - start).to(tl.int32)
    at = start + count_within(line_classes + start, size, tl.max(size, axis=0), c, wanted) - 1
    there = wanted & (at >= start)
    there = there & (tl.load(line_classes + at, mask=there, other=-1) == c)
    return tl.load(line_counts + at, mask=there, other=0)


@jit
def _popcount(x):
    """Number of bits set in each 32-bit word: sums of pairs, of fours, of eights, and of all."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 63).to(tl.int32, bitcast=True)


@jit
def region_counts(
    distance, members, entry_starts, digits, row, rows, ellipsoids, group, classes, entry_words, digit_count,
    limit: tl.constexpr, span: tl.constexpr, words: tl.constexpr,
):  # fmt: skip
    """For one row and each class of ``group``: number of training points in all members, and in at least one.

    The bits of the entries are combined by AND and OR over the members, and weighted by the binary digits of the
    numbers of points.
    """
    present = group < classes
    start = tl.load(entry_starts + group, mask=present, other=0)[:, None]
    end = tl.load(entry_starts + group + 1, mask=present, other=0)[:, None]
    most = tl.max(tl.max(end - start, axis=1), axis=0)
    in_all = tl.zeros([group.shape[0], words], tl.int32)
    in_any = in_all
    word = 0
    while word < most:
        entry = start + word + tl.arange(0, words)[None, :]
        here = entry < end
        some = tl.zeros([group.shape[0], words], tl.int32)
        every = some - 1
        begin = 0
        while begin < ellipsoids:
            k = begin + tl.arange(0, span)
            d = tl.load(distance + k * rows + row, mask=k < ellipsoids, other=float("inf"))
            member = tl.min(tl.where(d <= limit, k, NONE), axis=0)
            while member < NONE:
                bits = tl.load(members + member * entry_words + entry, mask=here, other=0)
                every &= bits
                some |= bits
                member = tl.min(tl.where((d <= limit) & (k > member), k, NONE), axis=0)
            begin += span
        digit = 0
        while digit < digit_count:
            for u in tl.static_range(4):
                ask = here & (digit + u < digit_count)
                bits = tl.load(digits + (digit + u) * entry_words + entry, mask=ask, other=0)
                in_all += _popcount(every & bits) << (digit + u)
                in_any += _popcount(some & bits) << (digit + u)
            digit += 4
        word += words
    return tl.sum(in_all, axis=1), tl.sum(in_any, axis=1)


@jit
def expanded_counts(
    distance, nearness, order, totals, class_starts, grid_counts, step_ids, step_distances, tail_distances,
    row, rows, ellipsoids, group, classes, steps, levels, within, limit: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    """For one row outside and each class of ``group``: least and greatest count over the equally near ellipsoids.

    A count is the number of training points in an ellipsoid that is expanded to touch the row.
    """
    fewest = group * 0 + NONE
    most = group * 0
    begin = 0
    while begin < ellipsoids:
        k = begin + tl.arange(0, span)
        near = tl.load(nearness + k * rows + row, mask=k < ellipsoids, other=float("inf"))
        equal = (near <= within) & (k < ellipsoids)
        nth = tl.min(tl.where(equal, k, NONE), axis=0)
        while nth < NONE:
            bound = group * 0.0 + tl.load(distance + nth * rows + row) * limit
            found = expanded_count(
                totals, class_starts, grid_counts, step_ids, step_distances, tail_distances, tl.load(order + nth),
                group, bound, group < classes, steps, levels,
            )  # fmt: skip
            fewest, most = tl.minimum(fewest, found), tl.maximum(most, found)
            nth = tl.min(tl.where(equal & (k > nth), k, NONE), axis=0)
        begin += span
    return fewest, most
