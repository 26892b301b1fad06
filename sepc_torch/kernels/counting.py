"""Rows that a line of a table does not settle: counted or read, the points of every class, and their majority.

A row is taken by all threads of a program together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sepc_torch.kernels.lookup import (
    CODES,
    COUNTS,
    DIGITS,
    ENTRY_STARTS,
    LIMIT,
    MEMBERS,
    MOST_WORDS,
    NONE,
    NUMBERS,
    TOTALS,
    bits_of,
    lowest_bit,
    lowest_place,
    ordered,
    place,
    reached,
    section,
    size_of,
    trust,
)
from sepc_torch.kernels.tables import LOW_DIGITS, WORD

# Classes that are taken at once, at most: a bit of a word each.
MOST_CLASSES = tl.constexpr(WORD)
_LOW_DIGITS = tl.constexpr(LOW_DIGITS)


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
def _members_of(tables, head, nth, other, entry, here, entry_words):
    """Words of entries that two ellipsoids have, which are waited for together; the second may be missing."""
    members = section(tables, head, MEMBERS)
    other = tl.where(other < NONE, other, nth)
    has = tl.load(members + nth * entry_words + entry, mask=here, other=0)
    return has, tl.load(members + other * entry_words + entry, mask=here, other=0)


@triton.jit
def _members(tables, head, words, first, every, some, entry, here, entry_words):
    """Words of entries in every ellipsoid and in some of them, once those that words of a pattern have are added."""
    nth = _first_held(words, first)
    while nth < NONE:
        words = _without(words, first, nth)
        other = _first_held(words, first)
        has, others = _members_of(tables, head, nth, other, entry, here, entry_words)
        every, some = every & has & others, some | has | others
        words = _without(words, first, other)
        nth = _first_held(words, first)
    return every, some


@triton.jit
def _next_two(held):
    """The first two ellipsoids that lanes have, and what they have without them; NONE where they have none."""
    nth = tl.min(held, axis=0)
    held = tl.where(held == nth, NONE, held)
    other = tl.min(held, axis=0)
    return nth, other, tl.where(held == other, NONE, held)


@triton.jit
def _next_four(held):
    """The first four, and what lanes have without them; the first instead of those that are missing."""
    nth, other, held = _next_two(held)
    third, fourth, held = _next_two(held)
    return nth, other, tl.where(third < NONE, third, nth), fourth, held


@triton.jit
def _members_of_four(tables, head, nth, other, third, fourth, every, some, entry, here, entry_words):
    """Words of entries in every ellipsoid and in some of them, once four are added."""
    has, others = _members_of(tables, head, nth, other, entry, here, entry_words)
    has_2, others_2 = _members_of(tables, head, third, fourth, entry, here, entry_words)
    return every & has & others & has_2 & others_2, some | has | others | has_2 | others_2


@triton.jit
def _members_by_lane(tables, head, held, number, every, some, entry, here, entry_words):
    """The same for so many that lanes have."""
    while number > 0:
        nth, other, third, fourth, held = _next_four(held)
        every, some = _members_of_four(
            tables, head, nth, other, third, fourth, every, some, entry, here, entry_words
        )  # fmt: skip
        number -= 4
    return every, some


@triton.jit
def _entries(tables, head, group, begin, classes, words: tl.constexpr):
    """Places of some words of entries of some classes, whether these have so many, and the words of all entries."""
    starts = section(tables, head, ENTRY_STARTS)
    start = tl.load(starts + group, mask=group < classes, other=0)[:, None]
    end = tl.load(starts + group + 1, mask=group < classes, other=0)[:, None]
    entry = start + (begin + tl.arange(0, words))[None, :]
    return entry, entry < end, tl.load(starts + classes)


@triton.jit
def _totals(tables, head, group, classes):
    """The training points of some classes."""
    return tl.load(section(tables, head, TOTALS) + group, mask=group < classes, other=0)


@triton.jit
def entries_ahead(
    tables, head, classes, class_chunk: tl.constexpr, words: tl.constexpr, heavy: tl.constexpr, digits: tl.constexpr
):  # fmt: skip
    """What counting reads whatever the row is, if all classes are taken at once.

    The totals of the classes and the words of all entries; the places of the entries and the low digits of their
    numbers; the places of the heavy ones and the high digits.
    """
    group = tl.arange(0, class_chunk)
    entry, here, entry_words = _entries(tables, head, group, 0, classes, words)
    heavy_entry, heavy_here, _ = _entries(tables, head, group, 0, classes, heavy)
    ahead = (_totals(tables, head, group, classes), entry_words, entry, here, heavy_entry, heavy_here)
    for digit in tl.static_range(digits):
        at = section(tables, head, NUMBERS) + digit * entry_words
        if digit < _LOW_DIGITS:
            bits = tl.load(at + entry, mask=here, other=0)
        else:
            bits = tl.load(at + heavy_entry, mask=heavy_here, other=0)
        ahead = ahead + (bits,)  # type: ignore[assignment] # noqa: RUF005 - Triton knows no star
    return ahead


@triton.jit
def _count_ahead(tables, head, ahead, held, number, digits: tl.constexpr):
    """Training points of all classes in all, and in any, of the ellipsoids that hold one row: so many that lanes have.

    Entries are 32 to a word, and counted a binary digit after another.
    """
    zero, heavy_zero = ahead[2] * 0, ahead[4] * 0
    every, some, heavy_every, heavy_some = zero - 1, zero, heavy_zero - 1, heavy_zero
    while number > 0:
        nth, other, third, fourth, held = _next_four(held)
        every, some = _members_of_four(
            tables, head, nth, other, third, fourth, every, some, ahead[2], ahead[3], ahead[1]
        )  # fmt: skip
        heavy_every, heavy_some = _members_of_four(
            tables, head, nth, other, third, fourth, heavy_every, heavy_some, ahead[4], ahead[5], ahead[1]
        )  # fmt: skip
        number -= 4
    in_all, in_any, heavy_all, heavy_any = zero, zero, heavy_zero, heavy_zero
    for digit in tl.static_range(digits):
        if digit < _LOW_DIGITS:
            in_all += bits_of(every & ahead[6 + digit]) << digit
            in_any += bits_of(some & ahead[6 + digit]) << digit
        else:
            heavy_all += bits_of(heavy_every & ahead[6 + digit]) << digit
            heavy_any += bits_of(heavy_some & ahead[6 + digit]) << digit
    return tl.sum(in_all, axis=1) + tl.sum(heavy_all, axis=1), tl.sum(in_any, axis=1) + tl.sum(heavy_any, axis=1)


@triton.jit
def _count_region(
    tables, head, pattern, held, held_by, chosen, rows, group, classes, ellipsoids,
    kept: tl.constexpr, by_row: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """The same of some classes, so many words of each at once.

    Lanes have the row's ellipsoids, ``held_by`` many (``kept``), or its pattern is read from where patterns are.
    """
    i = tl.arange(0, 32)
    width = (ellipsoids + 31) // 32
    in_all = tl.zeros([group.shape[0], chunk], tl.int32)
    in_any = tl.zeros([group.shape[0], chunk], tl.int32)
    for begin in range(0, size_of(tables, head, MOST_WORDS), chunk):
        entry, here, entry_words = _entries(tables, head, group, begin, classes, chunk)
        every = tl.full([group.shape[0], chunk], -1, tl.int32)
        some = tl.zeros([group.shape[0], chunk], tl.int32)
        if kept:
            every, some = _members_by_lane(tables, head, held, held_by, every, some, entry, here, entry_words)
        else:
            for w in range(0, width, 32):
                at = place(w + i, chosen, width, rows, by_row)
                words = tl.load(pattern + at, mask=w + i < width, other=0)
                every, some = _members(tables, head, words, w, every, some, entry, here, entry_words)
        for digit in tl.range(0, size_of(tables, head, DIGITS), loop_unroll_factor=4):
            bits = tl.load(section(tables, head, NUMBERS) + digit * entry_words + entry, mask=here, other=0)
            in_all += bits_of(every & bits) << digit
            in_any += bits_of(some & bits) << digit
    return tl.sum(in_all, axis=1), tl.sum(in_any, axis=1)


@triton.jit
def _count_tied(
    tables, head, distance, nearness, chosen, rows, group, bound, classes, ellipsoids,
    by_row: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """The fewest and the most points of some classes in the expansions of the ellipsoids equally near to one row."""
    i = tl.arange(0, 32)
    fewest = tl.full([group.shape[0]], NONE, tl.int32)
    greatest = tl.zeros([group.shape[0]], tl.int32)
    for begin in range(0, ellipsoids, 32):
        column = begin + i
        at = place(column, chosen, ellipsoids, rows, by_row)
        near = tl.load(nearness + at, mask=column < ellipsoids, other=float("inf"))
        equal = (near <= bound) & (column < ellipsoids)
        number = tl.sum(equal.to(tl.int32), axis=0)
        while number > 0:
            nth = tl.min(tl.where(equal, column, ellipsoids), axis=0)
            reached_by = tl.load(distance + place(nth, chosen, ellipsoids, rows, by_row)) * LIMIT
            reached_by += tl.zeros([group.shape[0]], bound.dtype)
            found = reached(tables, head, nth, group, reached_by, group < classes, classes, kind, 1)
            fewest, greatest = tl.minimum(fewest, found), tl.maximum(greatest, found)
            equal = equal & (column != nth)
            number -= 1
    return fewest, greatest


@triton.jit
def _nearest_of(
    tables, head, distance, near, codes, some, first, chosen, rows, ellipsoids, by_row: tl.constexpr, kept: tl.constexpr
):  # fmt: skip
    """Of the classes that are bits of a word, from class ``first`` on, the one nearest to one row, and how near it is.

    The row's distances and the classes of the ellipsoids may still be there (``kept``). Classes without an ellipsoid
    are as far as can be; of equals the first is nearest.
    """
    largest: tl.constexpr = 1.7976931348623157e308 if distance.dtype.element_ty == tl.float64 else 3.4028234663852886e38
    if kept:
        own = _has(some, codes - first)
        least = tl.min(tl.where(own, near, float("inf")), axis=0)
        label = tl.min(tl.where(own & (near == least), codes, NONE), axis=0)
    else:
        k = tl.arange(0, 128)
        nearest = tl.full([128], float("inf"), distance.dtype.element_ty)
        its_class = tl.full([128], NONE, tl.int32)
        for begin in range(0, ellipsoids, 128):
            there = begin + k < ellipsoids
            at = place(begin + k, chosen, ellipsoids, rows, by_row)
            found = ordered(tl.load(distance + at, mask=there, other=float("inf")))
            code = tl.load(section(tables, head, CODES) + begin + k, mask=there, other=NONE)
            closer = _has(some, code - first) & (found < nearest)
            nearest, its_class = tl.where(closer, found, nearest), tl.where(closer, code, its_class)
        least = tl.min(nearest, axis=0)
        label = tl.min(tl.where(nearest == least, its_class, NONE), axis=0)
    return tl.where(least < largest, label, first + lowest_bit(some)), tl.minimum(least, largest)


@triton.jit
def _has(word, i):
    """Whether a word has bit i, whatever i is."""
    return (i >= 0) & (i < 32) & (((word >> (i & 31)) & 1) != 0)


@triton.jit
def _added(
    top, winners, products, top_any, winners_any, products_any, top_2, winners_2, products_2, top_any_2, winners_any_2,
    products_any_2,
):  # fmt: skip
    """The greatest of two numbers, which classes have it, as bits, and the sum of two products; and again."""
    return (
        tl.maximum(top, top_2), tl.where(top >= top_2, winners, 0) | tl.where(top_2 >= top, winners_2, 0),
        products + products_2, tl.maximum(top_any, top_any_2),
        tl.where(top_any >= top_any_2, winners_any, 0) | tl.where(top_any_2 >= top_any, winners_any_2, 0),
        products_any + products_any_2,
    )  # fmt: skip


@triton.jit
def majority(
    tables, head, ahead, distance, nearness, pattern, held, held_by, near, codes, chosen, rows, is_tied, tied_within,
    torn_line, torn_counts, nearest_class, judged, ellipsoids, classes,
    judging: tl.constexpr, kind: tl.constexpr, by_row: tl.constexpr, kept: tl.constexpr,
    class_chunk: tl.constexpr, class_words: tl.constexpr, digits: tl.constexpr,
):  # fmt: skip
    """The majority of the points in all ellipsoids of one row, else of those in any, else the nearest class of a tie.

    Rows that are known to have no majority come with their line of the tables, others with -1, and with the counts in
    it, where all classes are taken at once. ``nearest_class`` is that of the least distance; a tie that it is in, it
    wins. Returns the majority's class, the trust in it, whether it is the majority in all, the sum over classes, and
    the points of class ``judged``.
    """
    most, most_class, unique = -1, 0, False
    most_any, any_class = -1, 0
    unset = tl.min(tl.full([class_chunk], float("inf"), distance.dtype.element_ty), axis=0)
    closest = unset
    sum_all, sum_any = chosen.to(tl.int64) * 0, chosen.to(tl.int64) * 0
    judged_all, judged_any = 0, 0
    for begin in range(0, classes if torn_counts is None else class_chunk, class_chunk):
        group = begin + tl.arange(0, class_chunk)
        present = group < classes
        if is_tied:
            in_all, in_any = _count_tied(
                tables, head, distance, nearness, chosen, rows, group, tied_within, classes, ellipsoids, by_row, kind
            )
        elif torn_line >= 0:
            in_any = torn_counts
            if torn_counts is None:
                in_any = tl.load(section(tables, head, COUNTS) + torn_line * classes + group, mask=present, other=0)
            in_all = group * 0
        elif ahead is not None:
            in_all, in_any = _count_ahead(tables, head, ahead, held, held_by, digits)
        else:
            in_all, in_any = _count_region(
                tables, head, pattern, held, held_by, chosen, rows, group, classes, ellipsoids,
                kept, by_row, class_words,
            )  # fmt: skip
        total = (_totals(tables, head, group, classes) if ahead is None else ahead[0]).to(tl.int64)
        if judging:
            judged_all += tl.sum(tl.where(group == judged, in_all, 0), axis=0)
            judged_any += tl.sum(tl.where(group == judged, in_any, 0), axis=0)
        bit = 1 << (group - begin)
        top, winners, products, top_any, winners_any, products_any = tl.reduce(
            (
                tl.where(present, in_all, -1), bit, tl.where(present, in_all, 0) * total,
                tl.where(present, in_any, -1), bit, tl.where(present, in_any, 0) * total,
            ), 0, _added,
        )  # fmt: skip
        sum_all += products
        sum_any += products_any

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
                tables, head, distance, near, codes, winners_any, begin, chosen, rows, ellipsoids, by_row, kept
            )
        closer = (top_any > most_any) | ((top_any == most_any) & (top_close < closest))
        any_class, closest = tl.where(closer, top_class, any_class), tl.where(closer, top_close, closest)
        most_any = tl.maximum(most_any, top_any)
    label = tl.where(unique, most_class, any_class)
    if ahead is None:
        its_total = tl.load(section(tables, head, TOTALS) + label)
    else:
        its_total = tl.sum(tl.where(tl.arange(0, class_chunk) == label, ahead[0], 0), axis=0)
    products = tl.where(unique, sum_all, sum_any)
    vouched = trust(tl.where(unique, most, most_any), its_total, products)
    return label, vouched, unique, products, tl.where(unique, judged_all, judged_any)
