r"""One pass from distances to decisions: rule, label, trust, margin, nearest and runner-up of every row.

The kernel gives what :func:`sepc_torch.rules.resolve` gives, without a matrix product over the cells and without asking
the host anything. Every thread takes a row, and matrices are stored with the rows side by side, so that threads read
neighbouring numbers and need nothing from each other. A point in one ellipsoid takes that one's counts, a point in
several looks its pattern up, a point outside searches the reach of the nearest. Two rare cases are taken one row after
another, by all threads of a program together: a pattern that no training point has, and several that are equally near.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sepc_torch.ellipsoid import SURFACE_TOLERANCE
from sepc_torch.kernels.tables import MULTIPLIER, RuleTables
from sepc_torch.rules import NEAREST_TIE, Rule
from sepc_torch.shapes import Float, Int

LIMIT = 1.0 + SURFACE_TOLERANCE
_TIED = 1.0 + NEAREST_TIE
# A warp to a program: threads that wait for no other, and as many programs as there can be.
_ROWS = 32
_WARPS = 1
# Words of cells, and classes, that the rare cases take at once.
_CELL_WORDS = 16
_CLASSES = 32


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
def _lowest_bit(word):
    """The place of the lowest bit: a power of two tells it in the exponent of a float32. For zero, any place."""
    power = (word & -word).to(tl.uint32, bitcast=True).to(tl.float32)
    return ((power.to(tl.int32, bitcast=True) >> 23) - 127) & 31


@triton.jit
def _reached(reach, ranks, k, c, within, wanted, classes, size, search: tl.constexpr):
    """Training points of class c within a distance of ellipsoid k, by binary search."""
    first = (k * classes + c) * size
    low = first * 0
    high = low + size
    for _ in range(search):
        middle = (low + high) // 2
        found = tl.load(reach + first + tl.minimum(middle, size - 1), mask=wanted, other=float("inf"))
        passed = (middle < size) & (found <= within)
        low, high = tl.where(passed, middle + 1, low), tl.where(passed, high, middle)
    return tl.load(ranks + c * (size + 1) + low, mask=wanted, other=0)


@triton.jit
def _counts(
    row, c, first, single, nearest, lonely, within, cell, extra, apart, held, in_all, in_any, reach, ranks,
    rows, classes, size, search: tl.constexpr,
):  # fmt: skip
    """Training points of class c that vouch for every row: in all of its ellipsoids, and in any of them."""
    alone = tl.load(held + first * classes + c, mask=single, other=0)
    alone += _reached(reach, ranks, nearest, c, within, lonely, classes, size, search)
    narrow = alone + tl.load(in_all + cell * classes + c, mask=cell >= 0, other=0)
    wide = alone + tl.load(in_any + cell * classes + c, mask=cell >= 0, other=0)
    narrow += tl.load(extra + c * rows + row, mask=apart, other=0)
    wide += tl.load(extra + (classes + c) * rows + row, mask=apart, other=0)
    return narrow, wide


@triton.jit
def _trust(number, total, sum_of_products):
    """The share of one class, the point counted as its own, in the sum over all; in float64."""
    own = (number + 1).to(tl.float64) * (total + 1).to(tl.float64)
    others = (sum_of_products - number.to(tl.int64) * total.to(tl.int64)).to(tl.float64)
    return own / (own + others)


@triton.jit
def _margin(label, own, least, least_class, second, second_class, tiny: tl.constexpr):
    """Distance to the nearest other class over that to the label's own, and which class that is."""
    nearest_is_own = least_class == label
    other = tl.where(nearest_is_own, second, least)
    runner_up = tl.where(nearest_is_own, second_class, least_class)
    runner_up = tl.where(other == float("inf"), 0, runner_up)
    own = tl.where(own == float("-inf"), float("nan"), own)
    other = tl.where(other == float("-inf"), float("nan"), other)
    return other / tl.where(own < tiny, tiny, own), runner_up


# Compiled once for all sizes: a batch of another size should not wait for a compiler.
@triton.jit(
    do_not_specialize=[
        "rows", "stride", "ellipsoids", "classes", "cells", "cell_words", "width", "size", "slot_mask", "probes"
    ]
)  # fmt: skip
def _resolve(
    distance, nearness, given,
    codes, order, starts, words, keys, slots, members, counts, in_all, in_any, held, reach, ranks, totals,
    near, pattern, extra, ints, floats,
    rows, stride, ellipsoids, classes, cells, cell_words, width, size, slot_mask, probes,
    euclidean: tl.constexpr, judging: tl.constexpr, tile: tl.constexpr, word_chunk: tl.constexpr,
    class_chunk: tl.constexpr, search: tl.constexpr, limit: tl.constexpr, tied_by: tl.constexpr, tiny: tl.constexpr,
    largest: tl.constexpr, multiplier: tl.constexpr,
    rule_outside: tl.constexpr, rule_single: tl.constexpr, rule_overlap: tl.constexpr, rule_union: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, tile)
    row = tl.program_id(0) * tile + t
    live = row < rows
    unset = tl.full([tile], float("inf"), distance.dtype.element_ty)
    zero = row * 0

    # Membership as bits, and the nearest.
    least, second, place = unset, unset, zero
    least_near, second_near, place_near = unset, unset, zero
    held_by, finite, first = zero, zero, zero
    key = zero.to(tl.int64)
    for w in range(width):
        word = zero
        for bit in tl.range(0, 32, loop_unroll_factor=16):
            k = w * 32 + bit
            wanted = live & (k < ellipsoids)
            d = tl.load(distance + k * rows + row, mask=wanted, other=float("inf"))
            inside = d <= limit
            first = tl.where(inside & (held_by == 0), k, first)
            held_by += inside.to(tl.int32)
            finite += (d < float("inf")).to(tl.int32)
            word |= inside.to(tl.int32) << bit
            least, place, second = two_least(ordered(d), k, least, place, second)
            if euclidean:
                n = tl.load(nearness + k * rows + row, mask=wanted, other=float("inf"))
                least_near, place_near, second_near = two_least(ordered(n), k, least_near, place_near, second_near)
        tl.store(pattern + w * rows + row, word, mask=live)
        key = (key ^ word.to(tl.int64)) * multiplier
        key = key ^ ((key >> 32) & 0xFFFFFFFF)
    if not euclidean:
        least_near, place_near, second_near = least, place, second

    # The nearest of every class, and the two nearest classes.
    best, best_class, next_best, next_class = unset, zero, unset, zero
    for c in range(classes):
        low = unset
        for k in tl.range(tl.load(starts + c), tl.load(starts + c + 1), loop_unroll_factor=8):
            low = tl.minimum(low, ordered(tl.load(distance + k * rows + row, mask=live, other=float("inf"))))
        tl.store(near + c * rows + row, low, mask=live)
        first_of_all, before_second = low < best, low < next_best
        next_class = tl.where(first_of_all, best_class, tl.where(before_second, c, next_class))
        next_best = tl.where(first_of_all, best, tl.where(before_second, low, next_best))
        best_class, best = tl.where(first_of_all, c, best_class), tl.where(first_of_all, low, best)

    bad = finite == 0
    outside, single, several = held_by == 0, held_by == 1, held_by > 1
    nearest = tl.where(outside, place_near, place)
    alone = single | (outside & (second_near > least_near * tied_by))
    nearest_distance = tl.load(distance + nearest * rows + row, mask=live, other=0.0)
    within = nearest_distance * limit

    # In several: the same pattern, if a training point has it.
    cell = zero - 1
    for probe in range(probes):
        looking = several & live & (cell < 0)
        slot = ((key + probe) & slot_mask).to(tl.int32)
        found = tl.load(slots + slot, mask=looking, other=-1)
        known = tl.load(keys + found, mask=found >= 0, other=0)
        cell = tl.where((found >= 0) & (known == key), found, cell)
    for w in range(width):
        seen = tl.load(words + w * cells + cell, mask=cell >= 0, other=0)
        mine = tl.load(pattern + w * rows + row, mask=cell >= 0, other=0)
        cell = tl.where(seen == mine, cell, -1)
    tl.debug_barrier()  # what other threads stored is read from here on

    # A pattern of its own: one row after another, against the cells in each of its ellipsoids, 32 cells to a word.
    unseen = several & live & (cell < 0)
    open_rows = unseen
    left = tl.sum(open_rows.to(tl.int32), axis=0)
    i = tl.arange(0, 32)
    p = tl.arange(0, word_chunk)
    while left > 0:
        at = tl.min(tl.where(open_rows, t, tile), axis=0)
        chosen = tl.program_id(0) * tile + at
        for begin_class in range(0, classes, class_chunk):
            group = begin_class + tl.arange(0, class_chunk)
            everywhere = tl.zeros([word_chunk, class_chunk], tl.int32)
            anywhere = tl.zeros([word_chunk, class_chunk], tl.int32)
            for begin in range(0, cell_words, word_chunk):
                here = begin + p < cell_words
                every = tl.full([word_chunk], -1, tl.int32)
                some = tl.zeros([word_chunk], tl.int32)
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
            tl.store(extra + group * rows + chosen, tl.sum(everywhere, axis=0), mask=group < classes)
            tl.store(extra + (classes + group) * rows + chosen, tl.sum(anywhere, axis=0), mask=group < classes)
        open_rows = open_rows & (t != at)
        left -= 1

    # Several equally near: the least and the greatest of their counts.
    tied = outside & live & ~alone & ~bad
    open_rows = tied
    left = tl.sum(open_rows.to(tl.int32), axis=0)
    while left > 0:
        at = tl.min(tl.where(open_rows, t, tile), axis=0)
        chosen = tl.program_id(0) * tile + at
        bound = tl.min(tl.where(t == at, least_near, float("inf")), axis=0) * tied_by
        for begin_class in range(0, classes, class_chunk):
            group = begin_class + tl.arange(0, class_chunk)
            fewest = tl.full([class_chunk], 2147483647, tl.int32)
            greatest = tl.zeros([class_chunk], tl.int32)
            for w in range(width):
                column = w * 32 + i
                if euclidean:
                    n = tl.load(nearness + column * rows + chosen, mask=column < ellipsoids, other=float("inf"))
                else:
                    n = tl.load(distance + column * rows + chosen, mask=column < ellipsoids, other=float("inf"))
                equal = (n <= bound) & (column < ellipsoids)
                number = tl.sum(equal.to(tl.int32), axis=0)
                while number > 0:
                    nth = tl.min(tl.where(equal, column, ellipsoids), axis=0)
                    reached_by = tl.load(distance + nth * rows + chosen) * limit
                    found = _reached(reach, ranks, nth, group, reached_by, group < classes, classes, size, search)
                    fewest, greatest = tl.minimum(fewest, found), tl.maximum(greatest, found)
                    equal = equal & (column != nth)
                    number -= 1
            tl.store(extra + group * rows + chosen, fewest, mask=group < classes)
            tl.store(extra + (classes + group) * rows + chosen, greatest, mask=group < classes)
        open_rows = open_rows & (t != at)
        left -= 1
    tl.debug_barrier()

    # Majorities, class by class, with the sums that trust divides by.
    lonely = outside & alone & live & ~bad
    apart = unseen | tied
    single = single & live
    most, most_number, most_class = zero - 1, zero, zero
    most_wide, wide_number, wide_class = zero - 1, zero, zero
    closest, closest_class = unset, zero
    sum_narrow, sum_wide = key * 0, key * 0
    for c in range(classes):
        narrow, wide = _counts(
            row, c, first, single, nearest, lonely, within, cell, extra, apart, held, in_all, in_any, reach, ranks,
            rows, classes, size, search,
        )  # fmt: skip
        total = tl.load(totals + c).to(tl.int64)
        sum_narrow += narrow.to(tl.int64) * total
        sum_wide += wide.to(tl.int64) * total
        most_class = tl.where(narrow > most, c, most_class)
        most_number = tl.where(narrow > most, 1, most_number + (narrow == most).to(tl.int32))
        most = tl.maximum(most, narrow)
        # A tied class without an ellipsoid still comes before one that is not tied.
        close = tl.minimum(tl.load(near + c * rows + row, mask=live, other=float("inf")), largest)
        closer = (wide > most_wide) | ((wide == most_wide) & (close < closest))
        closest, closest_class = tl.where(closer, close, closest), tl.where(closer, c, closest_class)
        wide_class = tl.where(wide > most_wide, c, wide_class)
        wide_number = tl.where(wide > most_wide, 1, wide_number + (wide == most_wide).to(tl.int32))
        most_wide = tl.maximum(most_wide, wide)
    by_narrow, by_wide = most_number == 1, wide_number == 1
    alone_code = tl.load(codes + tl.where(single, first, nearest), mask=live, other=0)
    majority = tl.where(by_narrow, most_class, tl.where(by_wide, wide_class, closest_class))
    label = tl.where(alone, alone_code, majority)
    rule = tl.where(by_narrow, rule_overlap, rule_union)
    rule = tl.where(outside, rule_outside, tl.where(held_by == 1, rule_single, rule))
    by_narrow = alone | by_narrow
    products = tl.where(by_narrow, sum_narrow, sum_wide)

    # Columns of int64 and of floating-point results, one below the other.
    stride = stride.to(tl.int64)
    ints += row
    floats += row
    tl.store(ints, tl.where(bad, -1, label).to(tl.int64), mask=live)
    tl.store(ints + stride, rule.to(tl.int64), mask=live)
    tl.store(ints + 2 * stride, tl.load(order + nearest, mask=live, other=0).to(tl.int64), mask=live)
    tl.store(floats + stride, nearest_distance, mask=live)
    for judged in tl.static_range(2 if judging else 1):
        if judged == 1:
            label = tl.load(given + row, mask=live, other=0).to(tl.int32)
        narrow, wide = _counts(
            row, label, first, single, nearest, lonely, within, cell, extra, apart, held, in_all, in_any, reach, ranks,
            rows, classes, size, search,
        )  # fmt: skip
        number = tl.where(by_narrow, narrow, wide)
        trust = _trust(number, tl.load(totals + label, mask=live, other=0), products)
        own = tl.load(near + label * rows + row, mask=live, other=0.0)
        margin, runner_up = _margin(label, own, best, best_class, next_best, next_class, tiny)
        tl.store(ints + (3 + judged) * stride, runner_up.to(tl.int64), mask=live)
        tl.store(floats + 3 * judged * stride, tl.where(bad, 0.0, trust), mask=live)
        tl.store(floats + (2 + 2 * judged) * stride, margin, mask=live)


def resolve(
    distance: Float[Tensor, "K B"],
    nearness: Float[Tensor, "K B"] | None,
    given: Int[Tensor, "B"] | None,
    tables: RuleTables,
    ints: Int[Tensor, "I B"],
    floats: Float[Tensor, "F B"],
) -> None:
    """Decide for every row, into columns of results.

    Args:
        distance: Mahalanobis distances to the ellipsoids, which come by class.
        nearness: What "nearest" means for points outside; by default the distance itself.
        given: Labels to judge besides the model's own; indices of classes.
        tables: From :func:`~sepc_torch.kernels.tables.rule_tables`.
        ints: Takes label, rule, nearest and runner-up, and the runner-up to the given label.
        floats: Takes trust, distance and margin, and trust and margin of the given label.
    """
    ellipsoids, rows = distance.shape
    classes, size = tables.reach.shape[1:]
    width, cells = tables.words.shape
    near = distance.new_empty(classes, rows)
    scratch = tables.codes.new_empty(width + 2 * classes, rows)
    limits = torch.finfo(distance.dtype)
    _resolve[(-(-rows // _ROWS),)](
        distance, distance if nearness is None else nearness, tables.codes if given is None else given,
        tables.codes, tables.order, tables.starts, tables.words, tables.keys, tables.slots, tables.members,
        tables.counts, tables.in_all, tables.in_any, tables.held, tables.reach, tables.ranks, tables.totals,
        near, scratch, scratch[width:], ints, floats,
        rows, ints.stride(0), ellipsoids, classes, cells, tables.members.shape[1], width, size,
        len(tables.slots) - 1, tables.probes,
        euclidean=nearness is not None, judging=given is not None, tile=_ROWS, word_chunk=_CELL_WORDS,
        class_chunk=min(_CLASSES, triton.next_power_of_2(classes)), search=size.bit_length(),
        limit=LIMIT, tied_by=_TIED, tiny=limits.tiny, largest=limits.max, multiplier=MULTIPLIER,
        rule_outside=int(Rule.OUTSIDE), rule_single=int(Rule.SINGLE), rule_overlap=int(Rule.OVERLAP),
        rule_union=int(Rule.UNION), num_warps=_WARPS,
    )  # fmt: skip
