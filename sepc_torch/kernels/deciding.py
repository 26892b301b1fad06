r"""From distances to decisions: rule, label, trust, margin, nearest and runner-up of every row of a tile.

What is here runs inside a kernel and gives what :func:`sepc_torch.rules.resolve` gives, without a matrix product over
the cells and without asking the host anything. Matrices are stored with the rows side by side. A row is taken by one
thread, if there are rows enough to keep a chip busy, or by 32 ``lanes`` or more that share its ellipsoids. One pass
over the distances finds which ellipsoids hold the row, the nearest, and the nearest of another class; the rest is
looked up (:mod:`sepc_torch.kernels.tables`). Rows that have no line in the tables are rare and taken one after another,
by all threads of a program together: those with a pattern that no training point has, or a tie between classes that
are not near, and those that are equally near to several ellipsoids.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sepc_torch.kernels.counting import majority
from sepc_torch.kernels.lookup import (
    CODES,
    COUNTS,
    LIMIT,
    NONE,
    ORDER,
    STARTS,
    SUMS,
    TOTALS,
    TRUSTS,
    VERDICTS,
    expanded,
    hashed,
    likely_cell,
    lowest_place,
    ordered,
    reached,
    same_pattern,
    same_words,
    section,
    section_of,
    trust,
)  # fmt: skip
from sepc_torch.rules import NEAREST_TIE, Rule

_TIED = tl.constexpr(1.0 + NEAREST_TIE)
_SINGLE, _OVERLAP = tl.constexpr(int(Rule.SINGLE)), tl.constexpr(int(Rule.OVERLAP))
_UNION, _OUTSIDE = tl.constexpr(int(Rule.UNION)), tl.constexpr(int(Rule.OUTSIDE))


@triton.jit
def two_least(x, k, least, place, second):
    """The least so far, its place and the second least, after the numbers x of place k."""
    place = tl.where(x < least, k, place)
    return tl.minimum(least, x), place, tl.minimum(second, tl.maximum(least, x))


@triton.jit
def _of_lanes(least, place, second):
    """Place and distance of the nearest, and the second distance, over all lanes; of equals the first is nearest."""
    best = tl.min(least, axis=1)
    nearest = tl.min(tl.where(least == best[:, None], place, NONE), axis=1)
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
def _tie_break(tables, line, label, torn, best_class, next_class, next_distance, classes):
    """The nearest class with as many points as the label, if it is one of the two nearest, and the trust in it."""
    counts = section(tables, COUNTS) + line * classes
    number = tl.load(counts + label, mask=torn, other=0)
    other = torn & (next_distance < float("inf"))
    by_best = tl.load(counts + best_class, mask=torn, other=-1) == number
    by_next = tl.load(counts + next_class, mask=other, other=-1) == number
    label = tl.where(by_best, best_class, next_class)
    decides = (torn & by_best) | (other & by_next)
    total = tl.load(section(tables, TOTALS) + label, mask=decides, other=0)
    products = tl.load(section_of(tables, SUMS, tl.int64) + line, mask=decides, other=0)
    return decides, label, trust(number, total, products)


@triton.jit
def _identified(word, w, key, first):
    """The hash of patterns and their first bit, after the words w."""
    lowest = tl.min(lowest_place(word, w[None, :]), axis=1)
    return key + tl.sum(hashed(word, w[None, :]), axis=1), tl.minimum(first, lowest)


@triton.jit
def _own_distance(
    tables, distance, row, rows, label, best, best_class, next_distance, next_class, live, lanes: tl.constexpr
):  # fmt: skip
    """Distance of rows to their label's own class, which mostly is that of the nearest or the second."""
    own = tl.where(label == best_class, best, next_distance)
    farther = live & (label != best_class) & (label != next_class)
    if tl.max(farther.to(tl.int32), axis=0) > 0:
        own = tl.where(farther, _distance_to_class(tables, distance, row, rows, label, farther, lanes), own)
    return own


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
    distance, nearness, given, tables, ints, floats, begin, live, rows, stride, ellipsoids, classes,
    euclidean: tl.constexpr, judging: tl.constexpr, merged: tl.constexpr, double: tl.constexpr,
    lanes: tl.constexpr, unroll: tl.constexpr, once: tl.constexpr, whole: tl.constexpr,
    class_chunk: tl.constexpr, class_words: tl.constexpr,
):  # fmt: skip
    """Decide for the rows of a tile, from ``begin`` on, into columns of results ``stride`` apart.

    Below the distances there is room for the patterns.
    """
    tile: tl.constexpr = live.shape[0]
    number_type: tl.constexpr = distance.dtype.element_ty
    tiny: tl.constexpr = 2.0**-1022 if number_type == tl.float64 else 2.0**-126
    kind: tl.constexpr = tl.float64 if double else tl.float32
    # Lanes that ask for words, and for numbers.
    askers: tl.constexpr = 32 if lanes > 1 else 1
    searchers: tl.constexpr = 128 if lanes > 1 else 1
    t = tl.arange(0, tile)
    row = begin + t
    lane = tl.arange(0, lanes)
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
    held_by = zero
    # A word at a time, or as many words as there are lanes for; of a ``whole`` pattern these are all.
    span: tl.constexpr = lanes if lanes > 32 else 32
    words: tl.constexpr = span // 32
    word = tl.zeros([tile, words], tl.int32)
    known: tl.constexpr = whole and tile == 1
    unstored: tl.constexpr = whole and tile > 1
    for begin_word in tl.range(0, 1 if whole else width, words, loop_unroll_factor=2 if lanes > 1 else 1):
        w = begin_word + tl.arange(0, words)
        word = tl.zeros([tile, words], tl.int32)
        for bits in range(0, 1 if once else tl.minimum(span, ellipsoids - begin_word * 32), lanes * unroll):
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
        if not whole:
            tl.store(pattern + w[None, :] * rows + row[:, None], word, mask=live[:, None] & (w < width)[None, :])
        # A word with several bits counts for two.
        held_by += tl.sum((word != 0).to(tl.int32) + ((word & (word - 1)) != 0).to(tl.int32), axis=1)
    # What the lanes found, together.
    nearest, best, next_best = _of_lanes(least, place, second)
    best_class = tl.load(codes + nearest, mask=live, other=0)
    elsewhere = tl.where(least_class == best_class[:, None], other, least)
    its_class = tl.where(least_class == best_class[:, None], other_class, least_class)
    next_distance = tl.min(elsewhere, axis=1)
    next_class = tl.min(tl.where(elsewhere == next_distance[:, None], its_class, NONE), axis=1)
    bad = best == float("inf")
    outside, single, several = held_by == 0, live & (held_by == 1), live & (held_by > 1)
    holder, nearest_class = nearest, best_class
    nearest_distance = tl.where(best == float("-inf"), float("nan"), best)
    least_outside, second_outside = best, next_best
    if euclidean:
        near_place, least_outside, second_outside = _of_lanes(least_near, place_near, second_near)
        nearest = tl.where(outside, near_place, nearest)
        nearest_class = tl.load(codes + nearest, mask=live, other=0)
        nearest_distance = tl.load(distance + nearest * rows + row, mask=live, other=0.0)
    before = tl.load(section(tables, ORDER) + nearest, mask=live, other=0)
    alone = (second_outside > least_outside * _TIED) | (ellipsoids == 1)
    lonely = outside & alone & live
    tied = outside & ~alone & live & ~bad
    # Rows that need more than one line of a table. Of the others the label is that of the nearest.
    if once and lanes * unroll == 1:
        some_unusual: tl.constexpr = False  # a single ellipsoid
        bad |= best == float("-inf")
    else:
        unusual = several | tied | (live & (best == float("-inf")))
        if euclidean:
            unusual |= outside & live
        some_unusual = tl.max(unusual.to(tl.int32), axis=0) > 0

    # A line of the tables, for rows in one ellipsoid and in a pattern that is known.
    cell = zero - 1
    if some_unusual:
        bad |= (best == float("-inf")) & (tl.max(finite, axis=1) == 0)
        tied &= ~bad
        key = zero.to(tl.int64)
        first = zero + NONE
        if whole:
            key, first = _identified(word, tl.arange(0, words), key, first)
        else:
            tl.debug_barrier()  # patterns that other threads stored are read from here on
            for begin_word in range(0, width, askers):
                w = begin_word + tl.arange(0, askers)
                stored = live[:, None] & (w < width)[None, :]
                own_words = tl.load(pattern + w[None, :] * rows + row[:, None], mask=stored, other=0)
                key, first = _identified(own_words, w, key, first)
        holder = tl.where(single, first, holder)  # the nearest, unless some distances are no numbers
        cell = likely_cell(tables, key, several, askers)
    line = tl.where(single, holder, ellipsoids + cell)
    listed = single | (cell >= 0)
    verdict = tl.load(section(tables, VERDICTS) + line, mask=listed, other=0)
    vouched = tl.load(section_of(tables, TRUSTS, tl.float64) + line, mask=listed, other=0.0)
    if some_unusual:
        if whole:
            same = same_words(tables, word, cell, width)
        else:
            same = same_pattern(tables, pattern, row, rows, cell, width, askers)
        listed = single | same
    label = tl.where(listed, verdict >> 2, nearest_class)
    by_all = (verdict & 1) == 1
    if some_unusual:
        torn = listed & ((verdict & 2) != 0)
        if tl.max(torn.to(tl.int32), axis=0) > 0:
            decides, its_label, its_trust = _tie_break(
                tables, line, label, torn, best_class, next_class, next_distance, classes
            )  # fmt: skip
            label = tl.where(decides, its_label, label)
            vouched = tl.where(decides, its_trust, vouched)
            listed = listed & (decides | ~torn)

    if judging:
        theirs = tl.load(given + row, mask=live, other=0).to(tl.int32)
        their_number = tl.load(section(tables, COUNTS) + line * classes + theirs, mask=listed, other=0)
        products = tl.load(section_of(tables, SUMS, tl.int64) + line, mask=listed, other=0)

    # Outside: the nearest, expanded. Of many rows some are.
    if (lanes == 1) | (tl.max(lonely.to(tl.int32), axis=0) > 0):
        bound = nearest_distance * LIMIT
        reach_trust, reach_products = expanded(
            tables, nearest, label, bound, lonely, classes, judging, merged, kind, searchers
        )  # fmt: skip
        vouched = tl.where(lonely, reach_trust, vouched)
        if judging:
            their_number += reached(tables, nearest, theirs, bound, lonely, classes, kind, searchers)
            products = tl.where(lonely, reach_products, products)

    # The rest, one row after another.
    own = tl.where(label == best_class, best, next_distance)
    if some_unusual:
        apart = (several & ~listed) | tied
        left = tl.sum(apart.to(tl.int32), axis=0)
        if unstored and left > 0:
            w = tl.arange(0, words)[None, :]
            tl.store(pattern + w * rows + row[:, None], word, mask=live[:, None] & (w < width))
            tl.debug_barrier()
        while left > 0:
            at = tl.min(tl.where(apart, t, tile), axis=0)
            chosen = begin + at
            here = t == at
            is_tied = tl.max((tied & here).to(tl.int32), axis=0) > 0
            tied_within = tl.min(tl.where(here, least_outside, float("inf")), axis=0) * _TIED
            its_nearest = tl.sum(tl.where(here, best_class, 0), axis=0)
            judged = 0
            if judging:
                judged = tl.sum(tl.where(here, theirs, 0), axis=0)
            its_label, its_number, its_products, unique, judged_number = majority(
                tables, distance, nearness, pattern, tl.reshape(word, [tile * words]), chosen, rows, is_tied,
                tied_within, its_nearest, judged, ellipsoids, classes, judging, kind, known, class_chunk, class_words,
            )  # fmt: skip
            its_trust = trust(its_number, tl.load(section(tables, TOTALS) + its_label), its_products)
            label = tl.where(here, its_label, label)
            vouched = tl.where(here, its_trust, vouched)
            by_all = tl.where(here, unique, by_all)
            if judging:
                their_number = tl.where(here, judged_number, their_number)
                products = tl.where(here, its_products, products)
            apart = apart & ~here
            left -= 1
        own = _own_distance(
            tables, distance, row, rows, label, best, best_class, next_distance, next_class, live, askers
        )  # fmt: skip

    rule = tl.where(outside, _OUTSIDE, tl.where(held_by == 1, _SINGLE, tl.where(by_all, _OVERLAP, _UNION)))
    margin, runner_up = _margin(label, own, best, best_class, next_distance, next_class, tiny)
    stride = stride.to(tl.int64)
    tl.store(ints + row, tl.where(bad, -1, label).to(tl.int64), mask=live)
    tl.store(ints + stride + row, rule.to(tl.int64), mask=live)
    tl.store(ints + 2 * stride + row, before.to(tl.int64), mask=live)
    tl.store(ints + 3 * stride + row, runner_up.to(tl.int64), mask=live)
    tl.store(floats + row, tl.where(bad, 0.0, vouched), mask=live)
    tl.store(floats + stride + row, nearest_distance, mask=live)
    tl.store(floats + 2 * stride + row, margin, mask=live)
    if judging:
        own = _own_distance(
            tables, distance, row, rows, theirs, best, best_class, next_distance, next_class, live, askers
        )  # fmt: skip
        margin, runner_up = _margin(theirs, own, best, best_class, next_distance, next_class, tiny)
        vouched = trust(their_number, tl.load(section(tables, TOTALS) + theirs, mask=live, other=0), products)
        tl.store(ints + 4 * stride + row, runner_up.to(tl.int64), mask=live)
        tl.store(floats + 3 * stride + row, tl.where(bad, 0.0, vouched), mask=live)
        tl.store(floats + 4 * stride + row, margin, mask=live)
