"""The training points of every class in the ellipsoids of one row, counted.

A row is taken by all threads of a program together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sepc_torch.model.kernels.lanes import held_places, next_two
from sepc_torch.model.kernels.lookup import (
    DIGITS,
    ENTRY_STARTS,
    LIMIT,
    MEMBERS,
    MOST_WORDS,
    NONE,
    NUMBERS,
    TOTALS,
    bits_of,
    lowest_place,
    place,
    reached,
    section,
    size_of,
)
from sepc_torch.model.kernels.tables import LOW_DIGITS, WORD

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
def _members_of(members, nth, other, here, entry_words):
    """Words of entries that two ellipsoids have, which are waited for together; the second may be missing.

    ``members`` is where the first ellipsoid has them.
    """
    other = tl.where(other < NONE, other, nth)
    has = tl.load(members + nth * entry_words, mask=here, other=0)
    return has, tl.load(members + other * entry_words, mask=here, other=0)


@triton.jit
def _members(members, words, first, every, some, here, entry_words):
    """Words of entries in every ellipsoid and in some of them, once those that words of a pattern have are added."""
    nth = _first_held(words, first)
    while nth < NONE:
        words = _without(words, first, nth)
        other = _first_held(words, first)
        has, others = _members_of(members, nth, other, here, entry_words)
        every, some = every & has & others, some | has | others
        words = _without(words, first, other)
        nth = _first_held(words, first)
    return every, some


@triton.jit
def _all_and_none(here):
    """Words of entries that all, and that no ellipsoids have."""
    none = tl.zeros(here.shape, tl.int32)
    return none - 1, none


@triton.jit
def _left(word):
    """How many ellipsoids lanes have in their words."""
    return tl.sum(bits_of(word), axis=0)


@triton.jit
def _members_by_lane(members, early, word, here, entry_words):
    """Words of entries in every one, and in some, of the ellipsoids of lanes; ``early`` are those of the first."""
    if early is None:
        every, some = _all_and_none(here)
    else:
        every, some = early[0] & early[1] & early[2] & early[3], early[0] | early[1] | early[2] | early[3]
        if early[6] > 0:
            every, some = every & early[4] & early[5], some | early[4] | early[5]
        word = early[7]
    while _left(word) > 0:
        nth, other, places, word = next_two(held_places(word), word)
        third, fourth, _, word = next_two(places, word)
        third, fourth = tl.where(third < NONE, third, nth), tl.where(fourth >= 0, fourth, nth)
        has, others = _members_of(members, nth, other, here, entry_words)
        has_2, others_2 = _members_of(members, third, fourth, here, entry_words)
        every, some = every & has & others & has_2 & others_2, some | has | others | has_2 | others_2
    return every, some


@triton.jit
def _entries(tables, head, group, offset, classes):
    """Places of some words of entries of some classes, and whether these have so many."""
    starts = section(tables, head, ENTRY_STARTS)
    start = tl.load(starts + group, mask=group < classes, other=0)[:, None]
    end = tl.load(starts + group + 1, mask=group < classes, other=0)[:, None]
    entry = start + offset[None, :]
    return entry, entry < end


@triton.jit
def _entry_words(tables, head, classes):
    """The words of all entries."""
    return tl.load(section(tables, head, ENTRY_STARTS) + classes)


@triton.jit
def totals_of(tables, head, group, classes):
    """The training points of some classes."""
    return tl.load(section(tables, head, TOTALS) + group, mask=group < classes, other=0)


@triton.jit
def _high_digits(tile, words: tl.constexpr, digits: tl.constexpr):
    """Which word of a class, and which digit of its numbers, the columns of a tile of high digits stand for."""
    column = tile * words + tl.arange(0, words)
    high: tl.constexpr = digits - _LOW_DIGITS
    return tl.minimum(column // high, words - 1), column % high + _LOW_DIGITS, column // high < words


@triton.jit
def entries_ahead(
    tables, head, classes, class_chunk: tl.constexpr, words: tl.constexpr, heavy: tl.constexpr, digits: tl.constexpr
):  # fmt: skip
    """What counting reads whatever the row is, if all classes are taken at once.

    The totals of the classes and the words of all entries; where the first ellipsoid has them and the low digits of
    their numbers, a tile of classes by words each; so many tiles of the high digits, which only the first words have.
    """
    group = tl.arange(0, class_chunk)
    entry, here = _entries(tables, head, group, tl.arange(0, words), classes)
    entry_words = _entry_words(tables, head, classes)
    members = section(tables, head, MEMBERS) + entry
    ahead = (totals_of(tables, head, tl.arange(0, MOST_CLASSES), classes), entry_words, members, here)
    numbers = section(tables, head, NUMBERS)
    low: tl.constexpr = digits if digits < _LOW_DIGITS else _LOW_DIGITS
    for digit in tl.static_range(low):
        bits = tl.load(numbers + digit * entry_words + entry, mask=here, other=0)
        ahead = ahead + (bits,)  # type: ignore[assignment] # noqa: RUF005 - Triton knows no star
    for tile in tl.static_range(heavy):
        word, digit, present = _high_digits(tile, words, digits)
        entry, here = _entries(tables, head, group, word, classes)
        bits = tl.load(numbers + (digit * entry_words)[None, :] + entry, mask=here & present[None, :], other=0)
        ahead = ahead + (bits,)  # type: ignore[assignment] # noqa: RUF005 - Triton knows no star
    return ahead


@triton.jit
def members_ahead(ahead, word):
    """Words of the entries of six ellipsoids of lanes, asked for before it is known whether they count.

    There are two or more; of fewer than four, some come twice. The last are how many there are after the first four,
    and the words of lanes without these six.
    """
    entry_words, members, here = ahead[1], ahead[2], ahead[3]
    nth, other, places, word = next_two(held_places(word), word)
    third, fourth, places, word = next_two(places, word)
    left = _left(word)
    fifth, sixth, _, word = next_two(places, word)
    third, fourth = tl.where(third < NONE, third, nth), tl.where(fourth >= 0, fourth, nth)
    a, b = _members_of(members, nth, other, here, entry_words)
    c, d = _members_of(members, third, fourth, here, entry_words)
    e, f = _members_of(members, fifth, sixth, here & (left > 0), entry_words)
    return a, b, c, d, e, f, left, word


@triton.jit
def nothing_ahead(ahead, word):
    """The same for a row without ellipsoids to count."""
    none = tl.zeros(ahead[3].shape, tl.int32)
    return none, none, none, none, none, none, 0, word


@triton.jit
def count_ahead(ahead, early, word, heavy: tl.constexpr, digits: tl.constexpr):
    """Training points of all classes in all, and in any, of the ellipsoids of lanes that hold one row.

    Entries are 32 to a word, and counted a binary digit after another.
    """
    every, some = _members_by_lane(ahead[2], early, word, ahead[3], ahead[1])
    in_all, in_any = every * 0, every * 0
    low: tl.constexpr = digits if digits < _LOW_DIGITS else _LOW_DIGITS
    for digit in tl.static_range(low):
        in_all += bits_of(every & ahead[4 + digit]) << digit
        in_any += bits_of(some & ahead[4 + digit]) << digit
    for tile in tl.static_range(heavy):
        first, digit, _ = _high_digits(tile, every.shape[1], digits)
        first = tl.broadcast_to(first[None, :], every.shape)
        bits = ahead[4 + low + tile]
        in_all += bits_of(tl.gather(every, first, 1) & bits) << digit[None, :]
        in_any += bits_of(tl.gather(some, first, 1) & bits) << digit[None, :]
    return _by_lane(tl.sum(in_all, axis=1), tl.sum(in_any, axis=1))


@triton.jit
def _by_lane(in_all, in_any):
    """Numbers of classes as numbers of lanes, which every warp has; lanes without a class have any. Both go at once."""
    both = (in_all.to(tl.int64) << 32) | in_any.to(tl.int64)
    both = tl.gather(both, tl.arange(0, MOST_CLASSES) % in_all.shape[0], 0)
    return (both >> 32).to(tl.int32), both.to(tl.int32)


@triton.jit
def count_region(
    tables, head, pattern, word, chosen, rows, group, classes, ellipsoids,
    kept: tl.constexpr, by_row: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Training points of some classes in all, and in any, of the ellipsoids of one row, so many words of each at once.

    Lanes have the row's ellipsoids (``kept``), or its pattern is read from where patterns are.
    """
    i = tl.arange(0, 32)
    width = (ellipsoids + 31) // 32
    in_all = tl.zeros([group.shape[0], chunk], tl.int32)
    in_any = tl.zeros([group.shape[0], chunk], tl.int32)
    entry_words = _entry_words(tables, head, classes)
    for begin in range(0, size_of(tables, head, MOST_WORDS), chunk):
        entry, here = _entries(tables, head, group, begin + tl.arange(0, chunk), classes)
        members = section(tables, head, MEMBERS) + entry
        if kept:
            every, some = _members_by_lane(members, None, word, here, entry_words)
        else:
            every, some = _all_and_none(here)
            for w in range(0, width, 32):
                at = place(w + i, chosen, width, rows, by_row)
                words = tl.load(pattern + at, mask=w + i < width, other=0)
                every, some = _members(members, words, w, every, some, here, entry_words)
        for digit in tl.range(0, size_of(tables, head, DIGITS), loop_unroll_factor=4):
            bits = tl.load(section(tables, head, NUMBERS) + digit * entry_words + entry, mask=here, other=0)
            in_all += bits_of(every & bits) << digit
            in_any += bits_of(some & bits) << digit
    return _by_lane(tl.sum(in_all, axis=1), tl.sum(in_any, axis=1))


@triton.jit
def count_tied(
    tables, head, distance, nearness, chosen, rows, group, present, bound, classes, ellipsoids,
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
            found = reached(tables, head, nth, group, reached_by, present, classes, kind, 1)
            fewest, greatest = tl.minimum(fewest, found), tl.maximum(greatest, found)
            equal = equal & (column != nth)
            number -= 1
    return fewest, greatest
