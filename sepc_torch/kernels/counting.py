"""Rows that no table has: the points of every class in their region are counted, and the majority of them found.

A row is taken by all threads of a program together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sepc_torch.kernels.lookup import (
    DIGITS,
    ENTRY_STARTS,
    LIMIT,
    MEMBERS,
    MOST_WORDS,
    NONE,
    NUMBERS,
    STARTS,
    TOTALS,
    bits_of,
    lowest_place,
    ordered,
    reached,
    section,
)


@triton.jit
def _first_held(words, first):
    """The first of the ellipsoids that some words of a pattern have; NONE if there is none."""
    return tl.min(lowest_place(words, first + tl.arange(0, words.shape[0])), axis=0)


@triton.jit
def _without(words, first, nth):
    """Words without their lowest bit, if that is of this ellipsoid."""
    i = first + tl.arange(0, words.shape[0])
    return tl.where((i == nth >> 5) & (words & (1 << (nth & 31)) != 0), words & (words - 1), words)


@triton.jit
def _members(tables, words, first, every, some, entry, here, entry_words):
    """Words of entries in every ellipsoid and in some of them, once those that words of a pattern have are added."""
    members = section(tables, MEMBERS)
    nth = _first_held(words, first)
    while nth < NONE:
        # Two at a time, so that they are waited for together; the last may be alone.
        words = _without(words, first, nth)
        other = _first_held(words, first)
        other = tl.where(other < NONE, other, nth)
        has = tl.load(members + nth * entry_words + entry, mask=here, other=0)
        others = tl.load(members + other * entry_words + entry, mask=here, other=0)
        words = _without(words, first, other)
        nth = _first_held(words, first)
        every, some = every & has & others, some | has | others
    return every, some


@triton.jit
def _count_region(
    tables, pattern, words, chosen, rows, group, classes, ellipsoids, known: tl.constexpr, chunk: tl.constexpr
):  # fmt: skip
    """Training points of some classes in all, and in any, of the ellipsoids that hold one row; 32 entries to a word.

    The row's pattern is known as ``words``, or read from where patterns are. Classes are taken side by side, so many
    words of each at once.
    """
    i = tl.arange(0, 32)
    starts, numbers = section(tables, ENTRY_STARTS), section(tables, NUMBERS)
    digits = tl.load(tables + DIGITS)
    entry_words = tl.load(starts + classes)
    start = tl.load(starts + group, mask=group < classes, other=0)[:, None]
    end = tl.load(starts + group + 1, mask=group < classes, other=0)[:, None]
    number_all = tl.zeros([group.shape[0], chunk], tl.int32)
    number_any = tl.zeros([group.shape[0], chunk], tl.int32)
    for begin in range(0, tl.load(tables + MOST_WORDS), chunk):
        entry = start + (begin + tl.arange(0, chunk))[None, :]
        here = entry < end
        every = tl.full([group.shape[0], chunk], -1, tl.int32)
        some = tl.zeros([group.shape[0], chunk], tl.int32)
        if known:
            every, some = _members(tables, words, 0, every, some, entry, here, entry_words)
        else:
            for w in range(0, (ellipsoids + 31) // 32, 32):
                stored = tl.load(pattern + (w + i) * rows + chosen, mask=(w + i) * 32 < ellipsoids, other=0)
                every, some = _members(tables, stored, w, every, some, entry, here, entry_words)
        for digit in tl.range(0, digits, loop_unroll_factor=4):
            has = tl.load(numbers + digit * entry_words + entry, mask=here, other=0)
            number_all += bits_of(every & has) << digit
            number_any += bits_of(some & has) << digit
    return tl.sum(number_all, axis=1), tl.sum(number_any, axis=1)


@triton.jit
def _count_tied(tables, distance, nearness, chosen, rows, group, bound, classes, ellipsoids, kind: tl.constexpr):
    """The fewest and the most points of some classes in the expansions of the ellipsoids equally near to one row."""
    i = tl.arange(0, 32)
    fewest = tl.full([group.shape[0]], NONE, tl.int32)
    greatest = tl.zeros([group.shape[0]], tl.int32)
    for begin in range(0, ellipsoids, 32):
        column = begin + i
        near = tl.load(nearness + column * rows + chosen, mask=column < ellipsoids, other=float("inf"))
        equal = (near <= bound) & (column < ellipsoids)
        number = tl.sum(equal.to(tl.int32), axis=0)
        while number > 0:
            nth = tl.min(tl.where(equal, column, ellipsoids), axis=0)
            reached_by = tl.load(distance + nth * rows + chosen) * LIMIT + tl.zeros([group.shape[0]], bound.dtype)
            found = reached(tables, nth, group, reached_by, group < classes, classes, kind, 1)
            fewest, greatest = tl.minimum(fewest, found), tl.maximum(greatest, found)
            equal = equal & (column != nth)
            number -= 1
    return fewest, greatest


@triton.jit
def _class_distances(tables, distance, chosen, rows, group, classes):
    """Distance of one row to the nearest ellipsoid of some classes; infinite for a class without one."""
    starts = section(tables, STARTS)
    begin = tl.load(starts + group, mask=group < classes, other=0)
    end = tl.load(starts + group + 1, mask=group < classes, other=0)
    p = tl.arange(0, 16)
    near = tl.full([group.shape[0], 16], float("inf"), distance.dtype.element_ty)
    for m in range(0, tl.max(end - begin, axis=0), 16):
        k = begin[:, None] + m + p[None, :]
        found = tl.load(distance + k * rows + chosen, mask=k < end[:, None], other=float("inf"))
        near = tl.minimum(near, ordered(found))
    return tl.min(near, axis=1)


@triton.jit
def majority(
    tables, distance, nearness, pattern, words, chosen, rows, is_tied, tied_within, nearest_class, judged, ellipsoids,
    classes, judging: tl.constexpr, kind: tl.constexpr, known: tl.constexpr,
    class_chunk: tl.constexpr, class_words: tl.constexpr,
):  # fmt: skip
    """The majority of the points in all ellipsoids of one row, else of those in any, else the nearest class of a tie.

    ``nearest_class`` is that of the least distance; a tie that it is in, it wins. Returns the majority's class and
    points, the sum over classes, whether it is that in all, and the points of class ``judged``.
    """
    number_type: tl.constexpr = distance.dtype.element_ty
    largest: tl.constexpr = 1.7976931348623157e308 if number_type == tl.float64 else 3.4028234663852886e38
    most, most_number, most_class = -1, 0, 0
    most_any, any_class = -1, 0
    unset = tl.min(tl.full([class_chunk], float("inf"), number_type), axis=0)
    closest = unset
    sum_all, sum_any = chosen.to(tl.int64) * 0, chosen.to(tl.int64) * 0
    judged_all, judged_any = 0, 0
    for begin in range(0, classes, class_chunk):
        group = begin + tl.arange(0, class_chunk)
        present = group < classes
        if is_tied:
            in_all, in_any = _count_tied(
                tables, distance, nearness, chosen, rows, group, tied_within, classes, ellipsoids, kind
            )
        else:
            in_all, in_any = _count_region(
                tables, pattern, words, chosen, rows, group, classes, ellipsoids, known, class_words
            )
        total = tl.load(section(tables, TOTALS) + group, mask=present, other=0).to(tl.int64)
        sum_all += tl.sum(tl.where(present, in_all, 0).to(tl.int64) * total, axis=0)
        sum_any += tl.sum(tl.where(present, in_any, 0).to(tl.int64) * total, axis=0)
        if judging:
            judged_all += tl.sum(tl.where(group == judged, in_all, 0), axis=0)
            judged_any += tl.sum(tl.where(group == judged, in_any, 0), axis=0)

        in_all = tl.where(present, in_all, -1)
        top = tl.max(in_all, axis=0)
        number = tl.sum((in_all == top).to(tl.int32), axis=0)
        most_number = tl.where(top > most, number, tl.where(top == most, most_number + number, most_number))
        top_class = tl.min(tl.where(in_all == top, group, NONE), axis=0)
        most_class = tl.where(top > most, top_class, most_class)
        most = tl.maximum(most, top)

        in_any = tl.where(present, in_any, -1)
        top = tl.max(in_any, axis=0)
        number = tl.sum((in_any == top).to(tl.int32), axis=0)
        # Distances decide ties. A tied class without an ellipsoid still comes before one that is not tied.
        has_nearest = tl.max(((in_any == top) & (group == nearest_class)).to(tl.int32), axis=0) > 0
        top_class = tl.min(tl.where(in_any == top, group, NONE), axis=0)
        top_class, top_close = tl.where(has_nearest, nearest_class, top_class), unset
        if (classes > class_chunk) | ((number > 1) & (most_number != 1) & (not has_nearest)):
            close = tl.minimum(_class_distances(tables, distance, chosen, rows, group, classes), largest)
            close = tl.where(in_any == top, close, float("inf"))
            top_close = tl.min(close, axis=0)
            top_class = tl.min(tl.where(close == top_close, group, NONE), axis=0)
        closer = (top > most_any) | ((top == most_any) & (top_close < closest))
        any_class, closest = tl.where(closer, top_class, any_class), tl.where(closer, top_close, closest)
        most_any = tl.maximum(most_any, top)
    unique = most_number == 1
    return (
        tl.where(unique, most_class, any_class), tl.where(unique, most, most_any), tl.where(unique, sum_all, sum_any),
        unique, tl.where(unique, judged_all, judged_any),
    )  # fmt: skip
