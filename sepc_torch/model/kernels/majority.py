"""Rows that a line of a table does not settle: the majority of the points that were counted, and ties.

A row is taken by all threads of a program together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sepc_torch.model.kernels.counting import MOST_CLASSES, count_ahead, count_region, count_tied, totals_of
from sepc_torch.model.kernels.lookup import (
    CODES,
    COUNTS,
    NONE,
    TOTALS,
    any_of,
    least_of,
    lowest_bit,
    ordered,
    place,
    section,
    trust,
)

# What is as far as a number can be is as far as what has no distance.
LARGEST, LARGEST_DOUBLE = (tl.constexpr(torch.finfo(dtype).max) for dtype in (torch.float32, torch.float64))
# So many bits that sums of 32 numbers have 32.
_PART = tl.constexpr(2**27 - 1)


@triton.jit
def _nearest_of(
    tables, head, distance, found, codes, some, first, chosen, rows, ellipsoids,
    largest: tl.constexpr, by_row: tl.constexpr, kept: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    """Of the classes that are bits of a word, from class ``first`` on, the one nearest to one row, and how near it is.

    The row's distances and the classes of the ellipsoids may still be there (``kept``). Classes without an ellipsoid
    are as far as the ``largest`` number; of equals the first is nearest.
    """
    if kept:
        nearest = tl.full(found[0].shape, float("inf"), found[0].dtype)
        its_class = codes[0] * 0 + NONE
        for u in tl.static_range(unroll):
            near = ordered(found[u])
            closer = _has(some, codes[u] - first) & (near < nearest)
            nearest, its_class = tl.where(closer, near, nearest), tl.where(closer, codes[u], its_class)
    else:
        k = tl.arange(0, 128)
        nearest = tl.full([128], float("inf"), distance.dtype.element_ty)
        its_class = tl.full([128], NONE, tl.int32)
        for begin in range(0, ellipsoids, 128):
            there = begin + k < ellipsoids
            at = place(begin + k, chosen, ellipsoids, rows, by_row)
            near = ordered(tl.load(distance + at, mask=there, other=float("inf")))
            code = tl.load(section(tables, head, CODES) + begin + k, mask=there, other=NONE)
            closer = _has(some, code - first) & (near < nearest)
            nearest, its_class = tl.where(closer, near, nearest), tl.where(closer, code, its_class)
    least = least_of(nearest, True)
    label = least_of(tl.where(nearest == least, its_class, NONE), True)
    return tl.where(least < largest, label, first + lowest_bit(some)), tl.minimum(least, largest)


@triton.jit
def _has(word, i):
    """Whether a word has bit i, whatever i is."""
    return (i >= 0) & (i < 32) & (((word >> (i & 31)) & 1) != 0)


@triton.jit
def _total_of(products):
    """The sum over lanes of integers below 2^62. A chip adds those of 32 bits by an instruction: three parts do."""
    low = tl.sum((products & _PART).to(tl.uint32), axis=0).to(tl.int64)
    middle = tl.sum(((products >> 27) & _PART).to(tl.uint32), axis=0).to(tl.int64)
    return low + (middle << 27) + (tl.sum((products >> 54).to(tl.int32), axis=0).to(tl.int64) << 54)


@triton.jit
def _greatest(numbers, present):
    """The greatest of the numbers of lanes, and which lanes have it, as bits."""
    top = tl.max(tl.where(present, numbers, -1), axis=0)
    return top, any_of(tl.where(present & (numbers == top), 1 << tl.arange(0, MOST_CLASSES), 0), True)


@triton.jit
def majority(
    tables, head, ahead, early, distance, nearness, pattern, word, found, codes, chosen, rows, is_tied, tied_within,
    torn_line, torn_counts, nearest_class, judged, ellipsoids, classes,
    judging: tl.constexpr, kind: tl.constexpr, by_row: tl.constexpr, kept: tl.constexpr, unroll: tl.constexpr,
    class_chunk: tl.constexpr, class_words: tl.constexpr, heavy: tl.constexpr, digits: tl.constexpr,
):  # fmt: skip
    """The majority of the points in all ellipsoids of one row, else of those in any, else the nearest class of a tie.

    Rows that are known to have no majority come with their line of the tables, others with -1, and with the counts in
    it, where all classes are taken at once. ``nearest_class`` is that of the least distance, or -1; a tie that it is
    in, it wins. Returns the majority's class, the trust in it, whether it is the majority in all, the sum over classes,
    and the points of class ``judged``.
    """
    largest: tl.constexpr = LARGEST_DOUBLE if distance.dtype.element_ty == tl.float64 else LARGEST
    most, most_class, unique = -1, 0, False
    most_any, any_class = -1, 0
    unset = tl.min(tl.full([MOST_CLASSES], float("inf"), distance.dtype.element_ty), axis=0)
    closest = unset
    sum_all, sum_any = chosen.to(tl.int64) * 0, chosen.to(tl.int64) * 0
    judged_all, judged_any = 0, 0
    for begin in range(0, classes if torn_counts is None else class_chunk, class_chunk):
        lane = tl.arange(0, MOST_CLASSES)
        group = begin + lane
        present = (lane < class_chunk) & (group < classes)
        if is_tied:
            in_all, in_any = count_tied(
                tables, head, distance, nearness, chosen, rows, group, present, tied_within, classes, ellipsoids,
                by_row, kind,
            )  # fmt: skip
        elif torn_line >= 0:
            in_any = torn_counts
            if torn_counts is None:
                in_any = tl.load(section(tables, head, COUNTS) + torn_line * classes + group, mask=present, other=0)
            in_all = group * 0
        elif ahead is not None:
            in_all, in_any = count_ahead(ahead, early, word, heavy, digits)
        else:
            in_all, in_any = count_region(
                tables, head, pattern, word, chosen, rows, begin + tl.arange(0, class_chunk), classes,
                ellipsoids, kept, by_row, class_words,
            )  # fmt: skip
        total = (totals_of(tables, head, group, classes) if ahead is None else ahead[0]).to(tl.int64)
        if judging:
            judged_all += tl.sum(tl.where(group == judged, in_all, 0), axis=0)
            judged_any += tl.sum(tl.where(group == judged, in_any, 0), axis=0)
        in_all, in_any = tl.where(present, in_all, 0), tl.where(present, in_any, 0)
        top, winners = _greatest(in_all, present)
        top_any, winners_any = _greatest(in_any, present)
        sum_all += _total_of(in_all * total)
        sum_any += _total_of(in_any * total)

        more = top > most
        unique = (more & (winners & (winners - 1) == 0)) | (unique & (top < most))
        most_class = tl.where(more, begin + lowest_bit(winners), most_class)
        most = tl.maximum(most, top)

        # Distances decide ties. A tied class without an ellipsoid still comes before one that is not tied.
        by_nearest = _has(winners_any, nearest_class - begin)
        top_class, top_close = tl.where(by_nearest, nearest_class, begin + lowest_bit(winners_any)), unset
        undecided = (winners_any & (winners_any - 1) != 0) & (not unique) & (not by_nearest)
        if torn_counts is None:
            undecided |= classes > class_chunk
        if undecided:
            top_class, top_close = _nearest_of(
                tables, head, distance, found, codes, winners_any, begin, chosen, rows, ellipsoids,
                largest, by_row, kept, unroll,
            )  # fmt: skip
        closer = (top_any > most_any) | ((top_any == most_any) & (top_close < closest))
        any_class, closest = tl.where(closer, top_class, any_class), tl.where(closer, top_close, closest)
        most_any = tl.maximum(most_any, top_any)
    label = tl.where(unique, most_class, any_class)
    if ahead is None:
        its_total = tl.load(section(tables, head, TOTALS) + label)
    else:
        its_total = tl.sum(tl.where(tl.arange(0, MOST_CLASSES) == label, ahead[0], 0), axis=0)
    products = tl.where(unique, sum_all, sum_any)
    vouched = trust(tl.where(unique, most, most_any), its_total, products)
    return label, vouched, unique, products, tl.where(unique, judged_all, judged_any)
