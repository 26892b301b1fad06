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

from sepc_torch.ellipsoid import SURFACE_TOLERANCE
from sepc_torch.kernels.tables import MULTIPLIER, SECTIONS, SIZES
from sepc_torch.rules import NEAREST_TIE, Rule

LIMIT = tl.constexpr(1.0 + SURFACE_TOLERANCE)
_TIED = tl.constexpr(1.0 + NEAREST_TIE)
_MULTIPLIER = tl.constexpr(MULTIPLIER)
_SINGLE, _OVERLAP = tl.constexpr(int(Rule.SINGLE)), tl.constexpr(int(Rule.OVERLAP))
_UNION, _OUTSIDE = tl.constexpr(int(Rule.UNION)), tl.constexpr(int(Rule.OUTSIDE))

_HEADER = (*SIZES, *SECTIONS)
_ELLIPSOIDS, _CLASSES, _CELLS, _CELL_WORDS, _SIZE, _SLOT_MASK, _PROBES = (tl.constexpr(i) for i in range(len(SIZES)))
_CODES, _ORDER = tl.constexpr(_HEADER.index("codes")), tl.constexpr(_HEADER.index("order"))
_STARTS, _TOTALS = tl.constexpr(_HEADER.index("starts")), tl.constexpr(_HEADER.index("totals"))
_PATTERNS, _KEYS = tl.constexpr(_HEADER.index("words")), tl.constexpr(_HEADER.index("keys"))
_SLOTS, _MEMBERS = tl.constexpr(_HEADER.index("slots")), tl.constexpr(_HEADER.index("members"))
_CELL_COUNTS, _COUNTS = tl.constexpr(_HEADER.index("cell_counts")), tl.constexpr(_HEADER.index("counts"))
_SUMS, _VERDICTS = tl.constexpr(_HEADER.index("sums")), tl.constexpr(_HEADER.index("verdicts"))
_REACH, _RANKS = tl.constexpr(_HEADER.index("reach")), tl.constexpr(_HEADER.index("ranks"))
_MERGED, _MERGED_SUMS = tl.constexpr(_HEADER.index("merged")), tl.constexpr(_HEADER.index("merged_sums"))
_MERGED_OWN = tl.constexpr(_HEADER.index("merged_own"))


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
    nearest = tl.min(tl.where(least == best[:, None], place, 2147483647), axis=1)
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
def _section(tables, name):
    return tables + tl.load(tables + name)


@triton.jit
def _numbers(tables, name, double: tl.constexpr):
    """A section of floating-point numbers."""
    kind: tl.constexpr = tl.float64 if double else tl.float32
    return _section(tables, name).to(tl.pointer_type(kind))


@triton.jit
def _long(tables, name):
    """A section of 64-bit integers."""
    return _section(tables, name).to(tl.pointer_type(tl.int64))


@triton.jit
def _lowest_bit(word):
    """The place of the lowest bit: a power of two tells it in the exponent of a float32. For zero, any place."""
    power = (word & -word).to(tl.uint32, bitcast=True).to(tl.float32)
    return ((power.to(tl.int32, bitcast=True) >> 23) - 127) & 31


@triton.jit
def _bits(word):
    """How many bits of a word are set: sums of pairs, of fours and of eights, and the sum of these."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 63).to(tl.int32, bitcast=True)


@triton.jit
def _hashed(word, w):
    """What a word of a pattern adds to its hash; see :func:`sepc_torch.kernels.tables.hashed`."""
    x = (word.to(tl.int64) & 0xFFFFFFFF) + (w.to(tl.int64) << 32)
    for _ in tl.static_range(2):
        x *= _MULTIPLIER
        x = x ^ ((x >> 32) & 0xFFFFFFFF)
    return tl.where(word != 0, x, 0)


@triton.jit
def _within(numbers, first, count, bound, wanted, lanes: tl.constexpr):
    """How many of ``count`` ascending numbers, from ``first`` on, are within a bound; a round asks every lane for one.

    After a round with a given step the answer is one of so many.
    """
    lane = tl.arange(0, lanes)
    passed = first * 0
    step = count // (lanes + 1) + 1
    while step > 0:
        at = passed[:, None] + (lane[None, :] + 1) * step - 1
        asked = wanted[:, None] & (at < count)
        found = tl.load(numbers + first[:, None] + at, mask=asked, other=float("inf")).to(bound.dtype)
        passed += tl.sum((asked & (found <= bound[:, None])).to(tl.int32), axis=1) * step
        step = tl.where(step == 1, 0, (step + lanes) // (lanes + 1))
    return passed


@triton.jit
def _reached(tables, k, c, bound, wanted, classes, double: tl.constexpr, lanes: tl.constexpr):
    """Training points of class c within a distance of ellipsoid k."""
    size = tl.load(tables + _SIZE)
    passed = _within(_numbers(tables, _REACH, double), (k * classes + c) * size, size, bound, wanted, lanes)
    return tl.load(_section(tables, _RANKS) + c * (size + 1) + passed, mask=wanted, other=0)


@triton.jit
def _expanded(
    tables, k, label, bound, wanted, classes, merged: tl.constexpr, double: tl.constexpr, lanes: tl.constexpr
):
    """Points of the ellipsoid's own class within a distance of it, and the sum over all classes."""
    if merged:
        size = classes * tl.load(tables + _SIZE)
        passed = _within(_numbers(tables, _MERGED, double), k * size, size, bound, wanted, lanes)
        passed += k * (size + 1)
        number = tl.load(_section(tables, _MERGED_OWN) + passed, mask=wanted, other=0)
        products = tl.load(_long(tables, _MERGED_SUMS) + passed, mask=wanted, other=0)
    else:
        number = k * 0
        products = number.to(tl.int64)
        for c in range(classes):
            found = _reached(tables, k, k * 0 + c, bound, wanted, classes, double, lanes)
            number = tl.where(label == c, found, number)
            products += found.to(tl.int64) * tl.load(_section(tables, _TOTALS) + c)
    return number, products


@triton.jit
def _known_cell(tables, pattern, row, rows, key, several, width, lanes: tl.constexpr):
    """The cell with the same pattern as each row that lies in several ellipsoids, or -1."""
    cell = row * 0 - 1
    slots, keys, words = _section(tables, _SLOTS), _long(tables, _KEYS), _section(tables, _PATTERNS)
    cells, slot_mask = tl.load(tables + _CELLS), tl.load(tables + _SLOT_MASK)
    for probe in range(tl.load(tables + _PROBES)):
        looking = several & (cell < 0)
        found = tl.load(slots + ((key + probe) & slot_mask).to(tl.int32), mask=looking, other=-1)
        known = tl.load(keys + found, mask=found >= 0, other=0)
        cell = tl.where((found >= 0) & (known == key), found, cell)
    differ = tl.zeros([row.shape[0], lanes], tl.int32)
    for begin in tl.range(0, width, lanes, loop_unroll_factor=4 if lanes == 1 else 1):
        w = (begin + tl.arange(0, lanes))[None, :]
        asked = (cell >= 0)[:, None] & (w < width)
        seen = tl.load(words + w * cells + cell[:, None], mask=asked, other=0)
        mine = tl.load(pattern + w * rows + row[:, None], mask=asked, other=0)
        differ |= (seen != mine).to(tl.int32)
    return tl.where(tl.max(differ, axis=1) > 0, -1, cell)


@triton.jit
def _count_region(tables, pattern, chosen, rows, group, classes, width, chunk: tl.constexpr, ahead: tl.constexpr):
    """Training points of some classes in all, and in any, of the ellipsoids that hold one row; 32 cells to a word."""
    i = tl.arange(0, 32)
    p = tl.arange(0, chunk)
    members, counts = _section(tables, _MEMBERS), _section(tables, _CELL_COUNTS)
    cell_words = tl.load(tables + _CELL_WORDS)
    everywhere = tl.zeros([chunk, group.shape[0]], tl.int32)
    anywhere = tl.zeros([chunk, group.shape[0]], tl.int32)
    for begin in range(0, cell_words, chunk):
        here = begin + p < cell_words
        every = tl.full([chunk], -1, tl.int32)
        some = tl.zeros([chunk], tl.int32)
        for w in range(0, width, 32):
            mine = tl.load(pattern + (w + i) * rows + chosen, mask=w + i < width, other=0)
            number = tl.sum((mine != 0).to(tl.int32), axis=0)
            while number > 0:
                which = tl.min(tl.where(mine != 0, i, 32), axis=0)
                word = tl.sum(tl.where(i == which, mine, 0), axis=0)
                mine = tl.where(i == which, 0, mine)
                number -= 1
                while word != 0:
                    nth = (w + which) * 32 + _lowest_bit(word)
                    word = word & (word - 1)
                    has = tl.load(members + nth * cell_words + begin + p, mask=here, other=0)
                    every, some = every & has, some | has
        # Every word gives up its cells, the lowest first.
        most_left = tl.max((some != 0).to(tl.int32), axis=0)
        while most_left > 0:
            for _ in tl.static_range(ahead):
                bit = _lowest_bit(some)
                found = tl.load(
                    counts + ((begin + p) * 32 + bit)[:, None] * classes + group[None, :],
                    mask=(some != 0)[:, None] & (group < classes)[None, :],
                    other=0,
                )
                anywhere += found
                everywhere += found * ((every >> bit) & 1)[:, None]
                some = some & (some - 1)
            most_left = tl.max((some != 0).to(tl.int32), axis=0)
    return tl.sum(everywhere, axis=0), tl.sum(anywhere, axis=0)


@triton.jit
def _count_tied(tables, distance, nearness, chosen, rows, group, bound, classes, ellipsoids, double: tl.constexpr):
    """The fewest and the most points of some classes in the expansions of the ellipsoids equally near to one row."""
    i = tl.arange(0, 32)
    fewest = tl.full([group.shape[0]], 2147483647, tl.int32)
    greatest = tl.zeros([group.shape[0]], tl.int32)
    for begin in range(0, ellipsoids, 32):
        column = begin + i
        near = tl.load(nearness + column * rows + chosen, mask=column < ellipsoids, other=float("inf"))
        equal = (near <= bound) & (column < ellipsoids)
        number = tl.sum(equal.to(tl.int32), axis=0)
        while number > 0:
            nth = tl.min(tl.where(equal, column, ellipsoids), axis=0)
            reached_by = tl.load(distance + nth * rows + chosen) * LIMIT + tl.zeros([group.shape[0]], bound.dtype)
            found = _reached(tables, nth, group, reached_by, group < classes, classes, double, 1)
            fewest, greatest = tl.minimum(fewest, found), tl.maximum(greatest, found)
            equal = equal & (column != nth)
            number -= 1
    return fewest, greatest


@triton.jit
def _class_distances(tables, distance, chosen, rows, group, classes, chunk: tl.constexpr):
    """Distance of one row to the nearest ellipsoid of some classes; infinite for a class without one."""
    starts = _section(tables, _STARTS)
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
    starts = _section(tables, _STARTS)
    begin = tl.load(starts + label, mask=wanted, other=0)
    end = tl.load(starts + label + 1, mask=wanted, other=0)
    near = tl.full([row.shape[0], lanes], float("inf"), distance.dtype.element_ty)
    for m in tl.range(0, tl.max(end - begin, axis=0), lanes, loop_unroll_factor=4 if lanes == 1 else 1):
        k = begin[:, None] + m + tl.arange(0, lanes)[None, :]
        found = tl.load(distance + k * rows + row[:, None], mask=k < end[:, None], other=float("inf"))
        near = tl.minimum(near, ordered(found))
    return tl.min(near, axis=1)


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
    double_result: tl.constexpr = number_type == tl.float64
    tiny: tl.constexpr = 2.2250738585072014e-308 if double_result else 1.1754943508222875e-38
    largest: tl.constexpr = 1.7976931348623157e308 if double_result else 3.4028234663852886e38
    # Lanes of a search; for rare rows, words of cells to take at once, and cells to ask for before looking at one.
    askers: tl.constexpr = 32 if lanes >= 32 else lanes
    chunk: tl.constexpr = 32 if lanes >= 32 else 16
    ahead: tl.constexpr = 4 if lanes >= 32 else 1
    t = tl.arange(0, tile)
    row = begin + t
    lane = tl.arange(0, lanes)
    ellipsoids, classes = tl.load(tables + _ELLIPSOIDS), tl.load(tables + _CLASSES)
    width = (ellipsoids + 31) // 32
    pattern = (distance + ellipsoids * rows).to(tl.pointer_type(tl.int32))
    codes = _section(tables, _CODES)
    zero = row * 0

    # Membership as bits, the nearest and the second nearest, and the nearest of another class than the nearest's.
    unset = tl.full([tile, lanes], float("inf"), number_type)
    none = tl.zeros([tile, lanes], tl.int32)
    least, second, place, least_class = unset, unset, none, none
    other, other_class = unset, none
    least_near, second_near, place_near = unset, unset, none
    finite = none
    held_by, first = zero, zero + 2147483647
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
        lowest = tl.where(word != 0, w[None, :] * 32 + _lowest_bit(word), 2147483647)
        first = tl.minimum(first, tl.min(lowest, axis=1))
        held_by += tl.sum(_bits(word), axis=1)
        key += tl.sum(_hashed(word, w[None, :]), axis=1)
    # What the lanes found, together.
    nearest, best, next_best = _of_lanes(least, place, second)
    best_class = tl.load(codes + nearest, mask=live, other=0)
    elsewhere = tl.where(least_class == best_class[:, None], other, least)
    its_class = tl.where(least_class == best_class[:, None], other_class, least_class)
    next_distance = tl.min(elsewhere, axis=1)
    next_class = tl.min(tl.where(elsewhere == next_distance[:, None], its_class, 2147483647), axis=1)
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
        cell = _known_cell(tables, pattern, row, rows, key, several, width, askers)
    listed = single | (cell >= 0)
    line = tl.where(single, first, ellipsoids + cell)
    verdict = tl.load(_section(tables, _VERDICTS) + line, mask=listed, other=0)
    label = tl.where(listed, verdict >> 1, tl.load(codes + nearest, mask=live, other=0))
    by_all = (verdict & 1) == 1
    counts = _section(tables, _COUNTS)
    number = tl.load(counts + line * classes + label, mask=listed, other=0)
    products = tl.load(_long(tables, _SUMS) + line, mask=listed, other=0)

    # Outside: the nearest, expanded.
    bound = nearest_distance * LIMIT
    reached, their_products = _expanded(tables, nearest, label, bound, lonely, classes, merged, double, askers)
    number = tl.where(lonely, reached, number)
    products = tl.where(lonely, their_products, products)
    if judging:
        theirs = tl.load(given + row, mask=live, other=0).to(tl.int32)
        their_number = tl.load(counts + line * classes + theirs, mask=listed, other=0)
        their_number += _reached(tables, nearest, theirs, bound, lonely, classes, double, askers)

    # One row after another: a majority of the points in all of its ellipsoids, else in any, else of the nearest class.
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
        most, most_number, most_class = -1, 0, 0
        most_any, any_number, any_class = -1, 0, 0
        closest = tl.min(tl.min(unset, axis=1), axis=0)
        sum_all, sum_any = left.to(tl.int64) * 0, left.to(tl.int64) * 0
        judged_all, judged_any = 0, 0
        for begin_class in range(0, classes, class_chunk):
            group = begin_class + tl.arange(0, class_chunk)
            if is_tied:
                in_all, in_any = _count_tied(
                    tables, distance, nearness, chosen, rows, group, tied_within, classes, ellipsoids, double
                )
            else:
                in_all, in_any = _count_region(tables, pattern, chosen, rows, group, classes, width, chunk, ahead)
            present = group < classes
            total = tl.load(_section(tables, _TOTALS) + group, mask=present, other=0).to(tl.int64)
            sum_all += tl.sum(tl.where(present, in_all, 0).to(tl.int64) * total, axis=0)
            sum_any += tl.sum(tl.where(present, in_any, 0).to(tl.int64) * total, axis=0)
            judged_all += tl.sum(tl.where(group == judged, in_all, 0), axis=0)
            judged_any += tl.sum(tl.where(group == judged, in_any, 0), axis=0)
            in_all, in_any = tl.where(present, in_all, -1), tl.where(present, in_any, -1)
            top = tl.max(in_all, axis=0)
            top_number = tl.sum((in_all == top).to(tl.int32), axis=0)
            top_class = tl.min(tl.where(in_all == top, group, 2147483647), axis=0)
            most_number = tl.where(top > most, top_number, tl.where(top == most, most_number + top_number, most_number))
            most_class = tl.where(top > most, top_class, most_class)
            most = tl.maximum(most, top)
            top = tl.max(in_any, axis=0)
            top_number = tl.sum((in_any == top).to(tl.int32), axis=0)
            # Distances decide ties. A tied class without an ellipsoid still comes before one that is not tied.
            close = tl.zeros([class_chunk], number_type)
            if (classes > class_chunk) | ((top_number > 1) & (most_number != 1)):
                close = _class_distances(tables, distance, chosen, rows, group, classes, chunk)
            close = tl.where(in_any == top, tl.minimum(close, largest), float("inf"))
            top_close = tl.min(close, axis=0)
            top_class = tl.min(tl.where(close == top_close, group, 2147483647), axis=0)
            closer_class = (top > most_any) | ((top == most_any) & (top_close < closest))
            any_number = tl.where(
                top > most_any, top_number, tl.where(top == most_any, any_number + top_number, any_number)
            )
            any_class = tl.where(closer_class, top_class, any_class)
            closest = tl.where(closer_class, top_close, closest)
            most_any = tl.maximum(most_any, top)
        unique = most_number == 1
        label = tl.where(here, tl.where(unique, most_class, any_class), label)
        number = tl.where(here, tl.where(unique, most, most_any), number)
        products = tl.where(here, tl.where(unique, sum_all, sum_any), products)
        by_all = tl.where(here, unique, by_all)
        if judging:
            their_number = tl.where(here, tl.where(unique, judged_all, judged_any), their_number)
        apart = apart & ~here
        left -= 1

    rule = tl.where(outside, _OUTSIDE, tl.where(held_by == 1, _SINGLE, tl.where(by_all, _OVERLAP, _UNION)))
    stride = stride.to(tl.int64)
    ints += row
    floats += row
    tl.store(ints, tl.where(bad, -1, label).to(tl.int64), mask=live)
    tl.store(ints + stride, rule.to(tl.int64), mask=live)
    tl.store(ints + 2 * stride, tl.load(_section(tables, _ORDER) + nearest, mask=live, other=0).to(tl.int64), mask=live)
    tl.store(floats + stride, nearest_distance, mask=live)
    for judged_one in tl.static_range(2 if judging else 1):
        if judged_one == 1:
            label, number = theirs, their_number
        total = tl.load(_section(tables, _TOTALS) + label, mask=live, other=0)
        trust = _trust(number, total, products)
        own = tl.where(label == best_class, best, next_distance)
        farther = live & (label != best_class) & (label != next_class)
        if tl.max(farther.to(tl.int32), axis=0) > 0:
            own = tl.where(farther, _distance_to_class(tables, distance, row, rows, label, farther, askers), own)
        margin, runner_up = _margin(label, own, best, best_class, next_distance, next_class, tiny)
        tl.store(ints + (3 + judged_one) * stride, runner_up.to(tl.int64), mask=live)
        tl.store(floats + 3 * judged_one * stride, tl.where(bad, 0.0, trust), mask=live)
        tl.store(floats + (2 + 2 * judged_one) * stride, margin, mask=live)
