r"""From distances to decisions: rule, label, trust, margin, nearest and runner-up of every row of a tile.

What is here runs inside a kernel and gives what :func:`sepc_torch.model.rules.resolve` gives, without a matrix product over
the cells and without asking the host anything. A row is taken by one thread, if there are rows enough to keep a chip
busy, or by 32 ``lanes`` or more that share its ellipsoids. One pass over the distances finds which ellipsoids hold the
row, the nearest, and the nearest of another class; the rest is looked up (:mod:`sepc_torch.model.kernels.tables`). Few rows
need more and are taken one after another, by all threads of a program together (:mod:`sepc_torch.model.kernels.majority`):
those with a pattern that no training point has, or with a tie between classes, and those that are equally near to
several ellipsoids.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sepc_torch.model.kernels.counting import MOST_CLASSES, members_ahead, nothing_ahead
from sepc_torch.model.kernels.lanes import (
    hashed_by_lane,
    held_and_near,
    held_places,
    nearest_by_lane,
    numbers_of,
    same_by_lane,
    some_finite,
)
from sepc_torch.model.kernels.lookup import (
    CODES,
    COUNTS,
    LIMIT,
    NONE,
    ORDER,
    SUMS,
    TOTALS,
    TRUSTS,
    VERDICTS,
    any_row,
    bits_of,
    cells_at,
    expanded,
    hashed,
    least_of,
    likely_cell,
    lowest_place,
    most_of,
    place,
    reached,
    same_pattern,
    same_word,
    section,
    section_of,
    sum_of,
    trust,
)  # fmt: skip
from sepc_torch.model.kernels.majority import LARGEST, LARGEST_DOUBLE, majority
from sepc_torch.model.kernels.nearest import (
    margin_of,
    nearest_of_lanes,
    own_distance,
    two_nearest,
    word_by_word,
)
from sepc_torch.model.rules import NEAREST_TIE, Rule

_TIED = tl.constexpr(1.0 + NEAREST_TIE)
_SINGLE, _OVERLAP = tl.constexpr(int(Rule.SINGLE)), tl.constexpr(int(Rule.OVERLAP))
_UNION, _OUTSIDE = tl.constexpr(int(Rule.UNION)), tl.constexpr(int(Rule.OUTSIDE))


@triton.jit
def _tie_break(tables, head, line, label, torn, best_class, next_class, next_distance, classes):
    """The nearest class with as many points as the label, if it is one of the two nearest, and the trust in it."""
    counts = section(tables, head, COUNTS) + line * classes
    number = tl.load(counts + label, mask=torn, other=0)
    other = torn & (next_distance < float("inf"))
    by_best = tl.load(counts + best_class, mask=torn, other=-1) == number
    by_next = tl.load(counts + next_class, mask=other, other=-1) == number
    label = tl.where(by_best, best_class, next_class)
    decides = (torn & by_best) | (other & by_next)
    total = tl.load(section(tables, head, TOTALS) + label, mask=decides, other=0)
    products = tl.load(section_of(tables, head, SUMS, tl.int64) + line, mask=decides, other=0)
    return decides, label, trust(number, total, products)


@triton.jit
def _identified(word, w, key, first, one: tl.constexpr):
    """The hash of patterns and their first bit, after the words w."""
    lowest = least_of(lowest_place(word, w), one)
    return key + sum_of(hashed(word, w), one), tl.minimum(first, lowest)


@triton.jit
def _of(here, x):
    """The number of the one row that is here."""
    return tl.sum(tl.where(here, x, 0), axis=0)


@triton.jit
def decide(
    distance, nearness, given, tables, head, lane_codes, ahead, ints, floats, begin, rows, stride,
    ellipsoids, classes,
    euclidean: tl.constexpr, judging: tl.constexpr, merged: tl.constexpr, double: tl.constexpr, by_row: tl.constexpr,
    tile: tl.constexpr, lanes: tl.constexpr, unroll: tl.constexpr, once: tl.constexpr, whole: tl.constexpr,
    class_chunk: tl.constexpr, class_words: tl.constexpr, heavy: tl.constexpr, digits: tl.constexpr,
):  # fmt: skip
    """Decide for the rows of a tile, from ``begin`` on, into columns of results ``stride`` apart.

    After the distances there is room for the patterns. What is of a row is a number of a tile or, in a tile of one row,
    a scalar, and what is of a lane is a number of its lanes. For one row what does not depend on it is read beforehand:
    ``head``, the classes of the ellipsoids that lanes have, and what counting needs.
    """
    one: tl.constexpr = tile == 1
    number_type: tl.constexpr = distance.dtype.element_ty
    tiny: tl.constexpr = 2.0**-1022 if number_type == tl.float64 else 2.0**-126
    kind: tl.constexpr = tl.float64 if double else tl.float32
    askers: tl.constexpr = 32 if one else 1
    searchers: tl.constexpr = 128 if one else 1
    if one:
        row, live = begin, tl.full([], True, tl.int1)
    else:
        t = tl.arange(0, tile)
        row = begin + t
        live = row < rows
    width = (ellipsoids + 31) // 32
    pattern = (distance + ellipsoids * rows).to(tl.pointer_type(tl.int32))
    codes = section(tables, head, CODES)
    zero = row * 0

    # Membership as bits, the nearest and the second nearest, and the nearest of another class than the nearest's.
    # Lanes of one row may have all its ellipsoids, and keep what they know of them.
    kept: tl.constexpr = whole and one
    unstored: tl.constexpr = whole and not one
    # If all classes are counted at once, the counts of a line are asked for with the rest of it.
    at_once: tl.constexpr = one and class_chunk < MOST_CLASSES
    found = None
    if kept:
        found = numbers_of(distance, row, ellipsoids, rows, by_row, lanes, unroll)
        least, where, second, least_class, other, other_class, word = held_and_near(found, lane_codes, lanes, unroll)
        held_by = tl.sum(bits_of(word), axis=0)
        if euclidean:
            found_near = numbers_of(nearness, row, ellipsoids, rows, by_row, lanes, unroll)
            least_near, where_near, second_near = nearest_by_lane(found_near, lanes, unroll)
    else:
        (
            least, where, second, least_class, other, other_class, word, held_by, finite,
            least_near, where_near, second_near,
        ) = word_by_word(
            distance, nearness, codes, pattern, row, rows, live, ellipsoids,
            euclidean, by_row, tile, lanes, unroll, once, whole,
        )  # fmt: skip
    best, nearest, next_best, best_class, next_distance, next_class = nearest_of_lanes(
        least, where, second, least_class, other, other_class, one
    )
    bad = best == float("inf")
    outside, single, several = held_by == 0, live & (held_by == 1), live & (held_by > 1)
    holder, nearest_class = nearest, best_class
    nearest_distance = tl.where(best == float("-inf"), float("nan"), best)
    least_outside, second_outside = best, next_best
    if euclidean:
        least_outside, outer, second_outside = two_nearest(least_near, where_near, second_near, one)
        nearest = tl.where(outside, outer, nearest)
        nearest_class = tl.load(codes + nearest, mask=live, other=0)
        nearest_distance = tl.load(distance + place(nearest, row, ellipsoids, rows, by_row), mask=live, other=0.0)
    before = tl.load(section(tables, head, ORDER) + nearest, mask=live, other=0)
    alone = (second_outside > least_outside * _TIED) | (ellipsoids == 1)
    lonely = outside & alone & live
    tied = outside & ~alone & live & ~bad
    # What to look up depends on the pattern alone, where lanes have it. Several warps then also ask for what they count
    # if they look it up in vain.
    early = None
    near_by = None
    if kept:
        key = hashed_by_lane(word)
        near_by = cells_at(tables, head, key, 0, several, one, kept)
        if ahead is not None and lanes > 32:
            early = nothing_ahead(ahead, word)
            if several:
                early = members_ahead(ahead, word)
    # Rows that need more than one line of a table. Of the others the label is that of the nearest.
    if once and lanes * unroll == 1:
        some_unusual: tl.constexpr = False  # a single ellipsoid
        bad |= best == float("-inf")
    else:
        unusual = several | tied | (live & (best == float("-inf")))
        if euclidean:
            unusual |= outside & live
        some_unusual = any_row(unusual, one)

    # A line of the tables, for rows in one ellipsoid and in a pattern that is known.
    cell = zero - 1
    if some_unusual:
        first = zero + NONE
        if not kept:
            key = zero.to(tl.int64)
        if unstored:
            key, first = _identified(word, zero, key, first, one)
        elif not kept:
            tl.debug_barrier()  # patterns that other threads stored are read from here on
            for begin_word in range(0, width, askers):
                w = begin_word + (tl.arange(0, askers) if one else zero)
                stored = live & (w < width)
                own_words = tl.load(pattern + place(w, row, width, rows, by_row), mask=stored, other=0)
                key, first = _identified(own_words, w, key, first, one)
        # Some distances are no numbers: then the nearest need not be what holds the row.
        if any_row(best == float("-inf"), one):
            if kept:
                bad |= ~some_finite(found, unroll)
                first = tl.min(held_places(word), axis=0)
            else:
                bad |= (best == float("-inf")) & (most_of(finite, one) == 0)
            tied &= ~bad
            holder = tl.where(single, first, holder)
        if kept:
            cell = likely_cell(tables, head, near_by, key, several, one, kept)
        else:
            near = cells_at(tables, head, key, 0, several, one, kept)
            cell = likely_cell(tables, head, near, key, several, one, kept)
    listed = single | (cell >= 0)
    line = tl.where(single, holder, tl.where(listed, ellipsoids + cell, 0))
    verdict, vouched = zero, zero.to(tl.float64)
    line_counts = None
    if at_once:
        group = tl.arange(0, MOST_CLASSES)
        line_counts = group * 0
    some_listed = listed if one else True
    some_cell = cell >= 0 if one else some_unusual
    if some_listed:
        verdict = tl.load(section(tables, head, VERDICTS) + line)
        vouched = tl.load(section_of(tables, head, TRUSTS, tl.float64) + line)
        if some_cell:
            if at_once:
                in_line = section(tables, head, COUNTS) + line * classes + group
                line_counts = tl.load(in_line, mask=group < classes, other=0)
            if kept:
                same = same_by_lane(tables, head, word, cell, unroll * lanes // 32)
            elif whole:
                same = same_word(tables, head, word, cell)
            else:
                same = same_pattern(tables, head, pattern, row, rows, cell, width, by_row, one)
            listed = single | same
    label = tl.where(listed, verdict >> 2, nearest_class)
    by_all = (verdict & 1) == 1
    torn = listed & ((verdict & 2) != 0)
    if some_unusual:
        if not one and any_row(torn, one):
            decides, its_label, its_trust = _tie_break(
                tables, head, line, label, torn, best_class, next_class, next_distance, classes
            )  # fmt: skip
            label = tl.where(decides, its_label, label)
            vouched = tl.where(decides, its_trust, vouched)
            torn &= ~decides
        listed &= ~torn

    if judging:
        theirs = tl.load(given + row, mask=live, other=0).to(tl.int32)
        their_number = tl.load(section(tables, head, COUNTS) + line * classes + theirs, mask=listed, other=0)
        products = tl.load(section_of(tables, head, SUMS, tl.int64) + line, mask=listed, other=0)

    # Outside: the nearest, expanded. Of many rows some are.
    some_lonely = lonely if one else True
    if some_lonely:
        bound = nearest_distance * LIMIT
        reach_trust, reach_products = expanded(
            tables, head, nearest, label, bound, lonely, classes, judging, merged, kind, searchers
        )  # fmt: skip
        vouched = tl.where(lonely, reach_trust, vouched)
        if judging:
            their_number += reached(tables, head, nearest, theirs, bound, lonely, classes, kind, searchers)
            products = tl.where(lonely, reach_products, products)

    # What has no line, and ties, one row after another.
    own = tl.where(label == best_class, best, next_distance)
    if some_unusual:
        tie_class = tl.where(best < (LARGEST_DOUBLE if number_type == tl.float64 else LARGEST), best_class, -1)
        apart = (several & ~listed) | tied
        if one:
            if apart:
                label, vouched, by_all, its_products, judged_number = majority(
                    tables, head, ahead, early, distance, nearness, pattern, word, found, lane_codes, row, rows, tied,
                    least_outside * _TIED, tl.where(torn, line, -1), line_counts, tie_class,
                    theirs if judging else 0, ellipsoids, classes,
                    judging, kind, by_row, kept, unroll, class_chunk, class_words, heavy, digits,
                )  # fmt: skip
                if judging:
                    their_number, products = judged_number, its_products
        else:
            left = tl.sum(apart.to(tl.int32), axis=0)
            if unstored and left > 0:
                tl.store(pattern + row, word, mask=live)  # of one word
                tl.debug_barrier()
            while left > 0:
                at = tl.min(tl.where(apart, t, tile), axis=0)
                here = t == at
                its_label, its_trust, its_by_all, its_products, judged_number = majority(
                    tables, head, ahead, early, distance, nearness, pattern, word, found, lane_codes, begin + at, rows,
                    any_row(tied & here, one), _of(here, least_outside) * _TIED,
                    tl.max(tl.where(here & torn, line, -1), axis=0), line_counts, _of(here, tie_class),
                    _of(here, theirs) if judging else 0, ellipsoids, classes,
                    judging, kind, by_row, kept, unroll, class_chunk, class_words, heavy, digits,
                )  # fmt: skip
                label = tl.where(here, its_label, label)
                vouched = tl.where(here, its_trust, vouched)
                by_all = tl.where(here, its_by_all, by_all)
                if judging:
                    their_number = tl.where(here, judged_number, their_number)
                    products = tl.where(here, its_products, products)
                apart = apart & ~here
                left -= 1
        own = own_distance(
            tables, head, distance, found, lane_codes, row, rows, label, best, best_class, next_distance, next_class,
            live, ellipsoids, by_row, kept, one, unroll,
        )  # fmt: skip

    rule = tl.where(outside, _OUTSIDE, tl.where(held_by == 1, _SINGLE, tl.where(by_all, _OVERLAP, _UNION)))
    margin, runner_up = margin_of(label, own, best, best_class, next_distance, next_class, tiny)
    stride = stride.to(tl.int64)
    tl.store(ints + row, tl.where(bad, -1, label).to(tl.int64), mask=live)
    tl.store(ints + stride + row, rule.to(tl.int64), mask=live)
    tl.store(ints + 2 * stride + row, before.to(tl.int64), mask=live)
    tl.store(ints + 3 * stride + row, runner_up.to(tl.int64), mask=live)
    tl.store(floats + row, tl.where(bad, 0.0, vouched), mask=live)
    tl.store(floats + stride + row, nearest_distance, mask=live)
    tl.store(floats + 2 * stride + row, margin, mask=live)
    if judging:
        own = own_distance(
            tables, head, distance, found, lane_codes, row, rows, theirs, best, best_class, next_distance, next_class,
            live, ellipsoids, by_row, kept, one, unroll,
        )  # fmt: skip
        margin, runner_up = margin_of(theirs, own, best, best_class, next_distance, next_class, tiny)
        vouched = trust(their_number, tl.load(section(tables, head, TOTALS) + theirs, mask=live, other=0), products)
        tl.store(ints + 4 * stride + row, runner_up.to(tl.int64), mask=live)
        tl.store(floats + 3 * stride + row, tl.where(bad, 0.0, vouched), mask=live)
        tl.store(floats + 4 * stride + row, margin, mask=live)
