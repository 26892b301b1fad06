"""Majority kernel: decides the pending rows by counting the training points of their regions."""

from __future__ import annotations

import triton.language as tl

from sepc_torch.model.kernels.class_counts import expanded_counts, region_counts
from sepc_torch.model.kernels.launch import jit
from sepc_torch.model.kernels.nearest import NONE, margin_of, nearest_of_classes
from sepc_torch.model.kernels.result_columns import (
    OUTSIDE,
    OVERLAP,
    PENDING_INSIDE,
    PENDING_OUTSIDE,
    UNION,
    store_columns,
    store_given,
    trust_of,
)


# Triton must not specialise on sizes: every new batch or model size would compile again.
@jit(do_not_specialize=["rows", "stride", "ellipsoids", "steps", "levels", "classes", "entry_words", "digit_count"])
def count_rows(
    distance, nearness, given, ints, floats,
    order, starts, totals, class_starts, grid_counts, step_ids, step_distances, tail_distances,
    members, entry_starts, digits,
    rows, stride, ellipsoids, steps, levels, classes, entry_words, digit_count,
    limit: tl.constexpr, tie: tl.constexpr, judging: tl.constexpr,
    tile: tl.constexpr, span: tl.constexpr, class_chunk: tl.constexpr, words: tl.constexpr,
):  # fmt: skip
    """Decide the pending rows of a tile one after another, by counting training points."""
    t = tl.arange(0, tile)
    first = tl.program_id(0) * tile
    marks = tl.load(ints + first + t, mask=first + t < rows, other=0)
    stride = stride.to(tl.int64)
    at = tl.min(tl.where(marks <= PENDING_INSIDE, t, NONE), axis=0)
    while at < NONE:
        # Values of the row are scalars in this loop. ``row`` is a block of one element, because the shared functions
        # take blocks.
        i = first + at
        row = i + tl.arange(0, 1)
        outside = tl.load(ints + i) == PENDING_OUTSIDE
        nearest = tl.load(ints + 2 * stride + i).to(tl.int32)
        within = tl.load(nearness + nearest * rows + i) * tie
        judged = at * 0
        if judging:
            judged = tl.load(given + i).to(tl.int32)

        # Inside, narrow counts are points in all members, wide counts points in any member. Outside, they are the least
        # and the greatest count over the expanded ellipsoids. The loop keeps the largest count of each, its class
        # (first class for narrow, nearest class for wide), and the number of classes that share the largest narrow
        # count.
        narrow_most, wide_most = at * 0 - 1, at * 0 - 1
        narrow_ties, narrow_class, wide_class = at * 0, at * 0, at * 0
        closest = within * 0 + float("inf")
        narrow_sum = at.to(tl.int64) * 0
        wide_sum, narrow_judged, wide_judged = narrow_sum, narrow_sum, narrow_sum
        begin = at * 0
        while begin < classes:
            group = begin + tl.arange(0, class_chunk)
            present = group < classes
            if outside:
                narrow, wide = expanded_counts(
                    distance, nearness, order, totals, class_starts, grid_counts, step_ids, step_distances,
                    tail_distances, i, rows, ellipsoids, group, classes, steps, levels, within, limit, span,
                )  # fmt: skip
            else:
                narrow, wide = region_counts(
                    distance, members, entry_starts, digits, i, rows, ellipsoids, group, classes, entry_words,
                    digit_count, limit, span, words,
                )  # fmt: skip
            total = tl.load(totals + group, mask=present, other=0)
            narrow_sum += tl.sum(narrow * total, axis=0)
            wide_sum += tl.sum(wide * total, axis=0)
            narrow_judged += tl.sum(tl.where(group == judged, narrow, 0).to(tl.int64), axis=0)
            wide_judged += tl.sum(tl.where(group == judged, wide, 0).to(tl.int64), axis=0)

            top = tl.max(tl.where(present, narrow, -1), axis=0)
            have = present & (narrow == top)
            ties = tl.sum(have.to(tl.int32), axis=0)
            narrow_ties = tl.where(top > narrow_most, ties, narrow_ties + tl.where(top == narrow_most, ties, 0))
            narrow_class = tl.where(top > narrow_most, tl.min(tl.where(have, group, NONE), axis=0), narrow_class)
            narrow_most = tl.maximum(narrow_most, top)

            top = tl.max(tl.where(present, wide, -1), axis=0)
            have = present & (wide == top)
            nth, close = tl.min(tl.where(have, group, NONE), axis=0), closest * 0 + float("inf")
            if (tl.sum(have.to(tl.int32), axis=0) > 1) | (classes > class_chunk):
                nth, close = nearest_of_classes(distance, starts, i, rows, group, have)
            wins = (top > wide_most) | ((top == wide_most) & (close < closest))
            wide_class, closest = tl.where(wins, nth, wide_class), tl.where(wins, close, closest)
            wide_most = tl.maximum(wide_most, top)
            begin += class_chunk

        by_narrow = narrow_ties == 1
        label = row * 0 + tl.where(by_narrow, narrow_class, wide_class)
        count = tl.where(by_narrow, narrow_most, wide_most).to(tl.float64)
        weighted = tl.where(by_narrow, narrow_sum, wide_sum).to(tl.float64)
        rule = tl.where(outside, OUTSIDE, tl.where(by_narrow, OVERLAP, UNION))
        live = row >= 0
        least, other = tl.load(floats + row), tl.load(floats + 2 * stride + row)
        least_class = tl.load(ints + stride + row).to(tl.int32)
        other_class = tl.load(ints + 3 * stride + row).to(tl.int32)
        margin, runner_up = margin_of(
            distance, starts, row, rows, live, label, least, least_class, other, other_class, 4
        )  # fmt: skip
        store_columns(
            ints, floats, stride, row, live, label, row * 0 + rule, tl.load(order + nearest + row * 0), runner_up,
            trust_of(count, tl.load(totals + label).to(tl.float64), weighted), tl.load(floats + stride + row), margin,
        )  # fmt: skip
        if judging:
            theirs = row * 0 + judged
            count = tl.where(by_narrow, narrow_judged, wide_judged).to(tl.float64)
            margin, runner_up = margin_of(
                distance, starts, row, rows, live, theirs, least, least_class, other, other_class, 4
            )  # fmt: skip
            trust = trust_of(count, tl.load(totals + theirs).to(tl.float64), weighted)
            store_given(ints, floats, stride, row, live, runner_up, trust, margin)
        at = tl.min(tl.where((marks <= PENDING_INSIDE) & (t > at), t, NONE), axis=0)
