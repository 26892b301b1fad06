"""Lookup kernel: decides the rows that the rule tables cover, and marks the other rows as pending."""

from __future__ import annotations

import triton.language as tl

from sepc_torch.model.kernels.class_counts import count_within, expanded_count, line_count
from sepc_torch.model.kernels.launch import jit
from sepc_torch.model.kernels.nearest import margin_of, nearest_ellipsoid, scan_ellipsoids
from sepc_torch.model.kernels.result_columns import (
    OUTSIDE,
    OVERLAP,
    PENDING_INSIDE,
    PENDING_OUTSIDE,
    SINGLE,
    UNION,
    store_columns,
    store_given,
    trust_of,
)


@jit
def _known_cell(
    distance, keys, slots, cell_starts, cell_members, row, rows, several, key, number, slot_mask, probes,
    limit: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    """For each row in several ellipsoids, the cell with exactly its members; -1 if there is none.

    A cell with the same hash and as many members is checked member by member.
    """
    cell = row * 0 - 1
    probe = 0
    while probe < probes:
        for u in tl.static_range(unroll):
            slot = (key + probe + u) & slot_mask
            found = tl.load(slots + slot, mask=several, other=-1)
            cell = tl.where(several & (tl.load(keys + slot, mask=several, other=0) == key), found, cell)
        probe += unroll
    start = tl.load(cell_starts + cell, mask=cell >= 0, other=0)
    size = tl.load(cell_starts + cell + 1, mask=cell >= 0, other=0) - start
    known = (cell >= 0) & (size == number)
    most = tl.max(tl.where(known, size, 0), axis=0)
    i = 0
    while i < most:
        for u in tl.static_range(unroll):
            ask = known & (i + u < size)
            member = tl.load(cell_members + start + i + u, mask=ask, other=0)
            known = known & (tl.load(distance + member * rows + row, mask=ask, other=0.0) <= limit)
        i += unroll
    return tl.where(known, cell, -1)


# Triton must not specialise on sizes: every new batch or model size would compile again.
@jit(do_not_specialize=["rows", "stride", "ellipsoids", "steps", "levels", "slot_mask", "probes"])
def decide_rows(
    distance, nearness, given, ints, floats,
    codes, order, starts, totals, hashes, keys, slots, cell_starts, cell_members, verdicts, verdict_counts, sums,
    line_starts, line_classes, line_counts, merged, merged_counts, merged_sums,
    class_starts, grid_counts, step_ids, step_distances, tail_distances,
    rows, stride, ellipsoids, steps, levels, slot_mask, probes,
    limit: tl.constexpr, tie: tl.constexpr, euclidean: tl.constexpr, judging: tl.constexpr,
    tile: tl.constexpr, lanes: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    """Decide the rows of a tile that the tables cover; mark the other rows as pending."""
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    live = row < rows
    least, where, second, label, other, other_class, number, indices, key, finite = scan_ellipsoids(
        distance, codes, hashes, row, live, rows, ellipsoids, limit, lanes, unroll
    )
    least_class = label
    bad = ~finite
    outside, single, several = number == 0, live & (number == 1), live & (number > 1)
    nearest, label, nearest_distance, alone = nearest_ellipsoid(
        distance, nearness, codes, row, live, rows, ellipsoids, least, where, second, label, outside,
        tie, euclidean, lanes, unroll,
    )  # fmt: skip

    # Inside: look up a line of the tables. With one member, the sum of the member indices is the index of that member.
    cell = row * 0 - 1
    if tl.max(several.to(tl.int32), axis=0) > 0:
        cell = _known_cell(
            distance, keys, slots, cell_starts, cell_members, row, rows, several, key, number, slot_mask, probes,
            limit, 4,
        )  # fmt: skip
    line = tl.where(single, indices, tl.where(cell >= 0, ellipsoids + cell, 0))
    verdict = tl.load(verdicts + line, mask=single | (cell >= 0), other=-1)
    settled = verdict >= 0
    label = tl.where(settled, verdict >> 1, label)
    count = tl.load(verdict_counts + line, mask=settled, other=0)
    weighted = tl.load(sums + line, mask=settled, other=0)

    # Outside with one nearest ellipsoid: expand this ellipsoid to touch the row.
    expands = live & outside & alone
    bound = nearest_distance * limit
    place = nearest.to(tl.int64) * (steps + levels)
    passed = count_within(merged + place, steps + levels, steps + levels, bound, expands)
    place += nearest + passed
    count += tl.load(merged_counts + place, mask=expands, other=0)
    weighted += tl.load(merged_sums + place, mask=expands, other=0)

    decided = settled | expands | bad
    label = tl.where(bad, -1, label)
    total = tl.load(totals + label, mask=live & ~bad, other=0)
    trust = tl.where(bad, 0.0, trust_of(count.to(tl.float64), total.to(tl.float64), weighted.to(tl.float64)))
    rule = tl.where(outside, OUTSIDE, tl.where(single, SINGLE, tl.where((verdict & 1) == 1, OVERLAP, UNION)))
    margin, runner_up = margin_of(
        distance, starts, row, rows, live, label, least, least_class, other, other_class, 4
    )  # fmt: skip
    place = tl.load(order + nearest, mask=live, other=0)
    stride = stride.to(tl.int64)
    # The result columns of a pending row pass values to the second kernel: rule holds the class at the least distance,
    # nearest the sorted index of the nearest ellipsoid, runner-up the nearest other class, trust the least distance,
    # margin the distance to the other class.
    store_columns(
        ints, floats, stride, row, live, tl.where(decided, label, tl.where(outside, PENDING_OUTSIDE, PENDING_INSIDE)),
        tl.where(decided, rule, least_class), tl.where(decided, place, nearest),
        tl.where(decided, runner_up, other_class), tl.where(decided, trust, least), nearest_distance,
        tl.where(decided, margin, other),
    )  # fmt: skip
    if judging:
        theirs = tl.load(given + row, mask=live, other=0).to(tl.int32)
        count = line_count(line_starts, line_classes, line_counts, line, theirs, settled)
        count += expanded_count(
            totals, class_starts, grid_counts, step_ids, step_distances, tail_distances, place, theirs, bound, expands,
            steps, levels,
        )  # fmt: skip
        total = tl.load(totals + theirs, mask=live, other=0)
        trust = tl.where(bad, 0.0, trust_of(count.to(tl.float64), total.to(tl.float64), weighted.to(tl.float64)))
        margin, runner_up = margin_of(
            distance, starts, row, rows, live, theirs, least, least_class, other, other_class, 4
        )  # fmt: skip
        store_given(ints, floats, stride, row, live, runner_up, trust, margin)
