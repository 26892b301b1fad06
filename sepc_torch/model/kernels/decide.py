r"""Decision kernels, the rules on CUDA: label, rule, trust, margin, nearest and runner-up, from distances.

Two kernels give the results of :func:`sepc_torch.model.rules.resolve` without a matrix product over the cells and
without synchronising with the host.

A row is one point. Its *members* are the ellipsoids that contain it.

1. ``_decide_rows`` passes once over the distances of a row. The kernel finds the members, the nearest ellipsoid, and
   the nearest ellipsoid of another class. Then it looks the row up in the rule tables
   (:class:`~sepc_torch.model.kernels.tables.RuleTables`).
2. ``_count_rows`` takes the rows that the first kernel left pending: rows whose set of members is that of no training
   point, rows for which several classes tie for the majority, and rows outside that are equally near to several
   ellipsoids. It counts the training points of the region and applies the majority rules.

Per-row values are blocks of shape [tile]. Distances are stored ellipsoid by ellipsoid, (K, B).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from sepc_torch.ellipsoid import SURFACE_TOLERANCE
from sepc_torch.model.kernels.launch import Launcher, aligned, jit
from sepc_torch.model.kernels.tables import RuleTables, power_of_two
from sepc_torch.model.rules import NEAREST_TIE, Rule
from sepc_torch.model.trust import trust_ratio
from sepc_torch.shapes import Float, Int

_LIMIT = 1.0 + SURFACE_TOLERANCE
_TIE = 1.0 + NEAREST_TIE
_SINGLE, _OVERLAP = tl.constexpr(int(Rule.SINGLE)), tl.constexpr(int(Rule.OVERLAP))
_UNION, _OUTSIDE = tl.constexpr(int(Rule.UNION)), tl.constexpr(int(Rule.OUTSIDE))
# Labels that mark a row as pending for the second kernel: inside several ellipsoids, and outside all of them.
_PENDING_INSIDE = tl.constexpr(-2)
_PENDING_OUTSIDE = tl.constexpr(-3)
_NONE = tl.constexpr(2**31 - 1)

_trust = jit(trust_ratio)


@jit
def ordered(x):
    """Replace NaN by minus infinity, so that NaN counts as the minimum, as in torch."""
    return tl.where(x == x, x, float("-inf"))


@jit
def two_least(x, k, least, where, second):
    """Update the least number so far, its index, and the second least with numbers x at index k."""
    where = tl.where(x < least, k, where)
    return tl.minimum(least, x), where, tl.minimum(second, tl.maximum(least, x))


@jit
def _nearer(
    least, where, second, label, other, other_label, least_2, where_2, second_2, label_2, other_2, other_label_2
):  # fmt: skip
    """Combine two partial results of :func:`_scan`; ties go to the lower index."""
    swap = (least_2 < least) | ((least_2 == least) & (where_2 < where))
    least, least_2 = tl.where(swap, least_2, least), tl.where(swap, least, least_2)
    label, label_2 = tl.where(swap, label_2, label), tl.where(swap, label, label_2)
    other, other_2 = tl.where(swap, other_2, other), tl.where(swap, other, other_2)
    other_label, other_label_2 = tl.where(swap, other_label_2, other_label), tl.where(swap, other_label, other_label_2)
    apart = label != label_2
    other_2, other_label_2 = tl.where(apart, least_2, other_2), tl.where(apart, label_2, other_label_2)
    takes = (other_2 < other) | ((other_2 == other) & (other_label_2 < other_label))
    return (
        least, tl.where(swap, where_2, where), tl.minimum(tl.where(swap, second_2, second), least_2), label,
        tl.where(takes, other_2, other), tl.where(takes, other_label_2, other_label),
    )  # fmt: skip


@jit
def _scan(
    distance, codes, hashes, row, live, rows, ellipsoids,
    limit: tl.constexpr, lanes: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    """One pass over the distances of a tile of rows, ``lanes`` ellipsoids at a time.

    Returns, for each row: the least distance, its ellipsoid, the second least distance, the class of the nearest
    ellipsoid, the least distance to an ellipsoid of another class, and that class; the number of members, the sum of
    their indices, their hash; and whether any distance is finite.
    """
    lane = tl.arange(0, lanes)
    unset = tl.full([row.shape[0], lanes], float("inf"), distance.dtype.element_ty)
    none = tl.zeros([row.shape[0], lanes], tl.int32)
    least, second, other = unset, unset, unset
    where, label, other_label = none, none, none
    number, indices, finite = none, none, none
    key = none.to(tl.int64)
    begin = 0
    while begin < ellipsoids:
        for u in tl.static_range(unroll):
            k = (begin + u * lanes + lane)[None, :]
            there = k < ellipsoids
            d = tl.load(distance + k * rows + row[:, None], mask=live[:, None] & there, other=float("inf"))
            code = tl.load(codes + k, mask=there, other=0)
            inside = d <= limit
            number += inside.to(tl.int32)
            indices += tl.where(inside, k, 0)
            key += tl.where(inside, tl.load(hashes + k, mask=there, other=0), 0)
            finite |= (d < float("inf")).to(tl.int32)
            x = ordered(d)
            closer = x < least
            takes = (code != label) & (closer | (x < other))
            other = tl.where(takes, tl.where(closer, least, x), other)
            other_label = tl.where(takes, tl.where(closer, label, code), other_label)
            label = tl.where(closer, code, label)
            least, where, second = two_least(x, k, least, where, second)
        begin += unroll * lanes
    least, where, second, label, other, other_label = tl.reduce(
        (least, where, second, label, other, other_label), 1, _nearer
    )
    return (
        least, where, second, label, other, other_label,
        tl.sum(number, axis=1), tl.sum(indices, axis=1), tl.sum(key, axis=1), tl.max(finite, axis=1) > 0,
    )  # fmt: skip


@jit
def _two_nearest(numbers, row, live, rows, ellipsoids, lanes: tl.constexpr, unroll: tl.constexpr):
    """The least number of each row, its index, and the second least; ties go to the lower index."""
    lane = tl.arange(0, lanes)
    least = tl.full([row.shape[0], lanes], float("inf"), numbers.dtype.element_ty)
    second = least
    where = tl.zeros([row.shape[0], lanes], tl.int32)
    begin = 0
    while begin < ellipsoids:
        for u in tl.static_range(unroll):
            k = (begin + u * lanes + lane)[None, :]
            mask = live[:, None] & (k < ellipsoids)
            x = ordered(tl.load(numbers + k * rows + row[:, None], mask=mask, other=float("inf")))
            least, where, second = two_least(x, k, least, where, second)
        begin += unroll * lanes
    best = tl.min(least, axis=1)
    nearest = tl.min(tl.where(least == best[:, None], where, _NONE), axis=1)
    rest = tl.where((least == best[:, None]) & (where == nearest[:, None]), second, least)
    return best, nearest, tl.min(rest, axis=1)


@jit
def _nearest(
    distance, nearness, codes, row, live, rows, ellipsoids, least, where, second, label, outside,
    tie: tl.constexpr, euclidean: tl.constexpr, lanes: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    """Nearest ellipsoid, its class and distance, and whether no other ellipsoid is equally near.

    Rows outside every ellipsoid use ``nearness`` if it differs from the distance (``euclidean``).
    """
    nearest_distance = tl.where(least == float("-inf"), float("nan"), least)
    if euclidean:
        least, outer, second = _two_nearest(nearness, row, live, rows, ellipsoids, lanes, unroll)
        where = tl.where(outside, outer, where)
        label = tl.load(codes + where, mask=live, other=0)
        nearest_distance = tl.load(distance + where * rows + row, mask=live, other=0.0)
    return where, label, nearest_distance, (second > least * tie) | (ellipsoids == 1)


@jit
def _count_within(numbers, size, most, bound, wanted):
    """How many of ``size`` ascending numbers are at most ``bound``, by a four-way search (three pivots per step).

    ``numbers`` is a block of pointers, one sequence per element; ``most`` is the largest size, a scalar. The count lies
    in [low, low + span).
    """
    low = (bound * 0 == 1).to(tl.int32)
    span = most + 1
    while span > 1:
        span = (span + 3) // 4
        passed = low * 0
        for j in tl.static_range(3):
            at = low + (j + 1) * span - 1
            ask = wanted & (at < size)
            number = tl.load(numbers + at, mask=ask, other=0).to(bound.dtype)
            passed += (ask & (number <= bound)).to(tl.int32)
        low += passed * span
    return low


@jit
def _expanded_count(
    totals, class_starts, grid_counts, step_ids, step_distances, tail_distances, k, c, bound, wanted, steps, levels
):  # fmt: skip
    """Number of training points of class c within ``bound`` of ellipsoid k.

    k is an index in the model's order, not sorted by class. The steps of a class that an ellipsoid keeps are the first
    of the class's grid. Beyond the horizon, the number of tail distances within ``bound`` gives the share of the
    missing points.
    """
    row = k.to(tl.int64) * steps
    first = tl.load(class_starts + c, mask=wanted, other=0)
    begin, end = first, tl.load(class_starts + c + 1, mask=wanted, other=0)
    if levels > 0:  # the ellipsoids keep different steps
        end = _count_within(step_ids + row, steps, steps, end - 1, wanted)
        begin = _count_within(step_ids + row, steps, steps, first - 1, wanted)
    size = end - begin
    passed = _count_within(step_distances + row + begin, size, tl.max(size, axis=0), bound, wanted)
    count = tl.load(grid_counts + first + passed - 1, mask=wanted & (passed > 0), other=0)
    if levels > 0:
        level = _count_within(tail_distances + k.to(tl.int64) * levels, levels, levels, bound, wanted)
        missing = tl.load(totals + c, mask=wanted, other=0) - count
        count += (missing * level // levels).to(tl.int32)
    return count


@jit
def _line_count(line_starts, line_classes, line_counts, line, c, wanted):
    """Number of training points of class c in a line of class counts."""
    start = tl.load(line_starts + line, mask=wanted, other=0)
    size = (tl.load(line_starts + line + 1, mask=wanted, other=0) - start).to(tl.int32)
    at = start + _count_within(line_classes + start, size, tl.max(size, axis=0), c, wanted) - 1
    there = wanted & (at >= start)
    there = there & (tl.load(line_classes + at, mask=there, other=-1) == c)
    return tl.load(line_counts + at, mask=there, other=0)


@jit
def _class_distance(distance, starts, row, rows, label, wanted, unroll: tl.constexpr):
    """Distance of each row to the nearest ellipsoid of its label's class; infinity for a class without one."""
    begin = tl.load(starts + label, mask=wanted, other=0)
    number = tl.load(starts + label + 1, mask=wanted, other=0) - begin
    near = tl.full([row.shape[0]], float("inf"), distance.dtype.element_ty)
    most = tl.max(number, axis=0)
    i = 0
    while i < most:
        for u in tl.static_range(unroll):
            d = tl.load(distance + (begin + i + u) * rows + row, mask=i + u < number, other=float("inf"))
            near = tl.minimum(near, ordered(d))
        i += unroll
    return near


@jit
def _margin(distance, starts, row, rows, live, label, least, least_class, other, other_class, unroll: tl.constexpr):
    """Distance to the nearest other class over that to the label's own class, and the other class."""
    tiny: tl.constexpr = 2.0**-1022 if distance.dtype.element_ty == tl.float64 else 2.0**-126
    nearest_is_own = least_class == label
    own = tl.where(nearest_is_own, least, other)
    # The label's class is nearly always that of the nearest ellipsoid or of the runner-up.
    farther = live & (label >= 0) & ~nearest_is_own & (label != other_class)
    if tl.max(farther.to(tl.int32), axis=0) > 0:
        own = tl.where(farther, _class_distance(distance, starts, row, rows, label, farther, unroll), own)
    rival = tl.where(nearest_is_own, other, least)
    runner_up = tl.where(nearest_is_own, other_class, least_class)
    runner_up = tl.where(rival == float("inf"), 0, runner_up)
    own = tl.where(own == float("-inf"), float("nan"), own)
    rival = tl.where(rival == float("-inf"), float("nan"), rival)
    return rival / tl.where(own < tiny, tiny, own), runner_up


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


@jit
def _store(ints, floats, stride, row, wanted, label, rule, nearest, runner_up, trust, nearest_distance, margin):
    """Write the results for the model's own label."""
    tl.store(ints + row, label.to(tl.int64), mask=wanted)
    tl.store(ints + stride + row, rule.to(tl.int64), mask=wanted)
    tl.store(ints + 2 * stride + row, nearest.to(tl.int64), mask=wanted)
    tl.store(ints + 3 * stride + row, runner_up.to(tl.int64), mask=wanted)
    tl.store(floats + row, trust, mask=wanted)
    tl.store(floats + stride + row, nearest_distance, mask=wanted)
    tl.store(floats + 2 * stride + row, margin, mask=wanted)


@jit
def _store_given(ints, floats, stride, row, wanted, runner_up, trust, margin):
    """Write the results for a given label."""
    tl.store(ints + 4 * stride + row, runner_up.to(tl.int64), mask=wanted)
    tl.store(floats + 3 * stride + row, trust, mask=wanted)
    tl.store(floats + 4 * stride + row, margin, mask=wanted)


# Triton must not specialise on sizes: every new batch or model size would compile again.
@jit(do_not_specialize=["rows", "stride", "ellipsoids", "steps", "levels", "slot_mask", "probes"])
def _decide_rows(
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
    least, where, second, label, other, other_class, number, indices, key, finite = _scan(
        distance, codes, hashes, row, live, rows, ellipsoids, limit, lanes, unroll
    )
    least_class = label
    bad = ~finite
    outside, single, several = number == 0, live & (number == 1), live & (number > 1)
    nearest, label, nearest_distance, alone = _nearest(
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
    passed = _count_within(merged + place, steps + levels, steps + levels, bound, expands)
    place += nearest + passed
    count += tl.load(merged_counts + place, mask=expands, other=0)
    weighted += tl.load(merged_sums + place, mask=expands, other=0)

    decided = settled | expands | bad
    label = tl.where(bad, -1, label)
    total = tl.load(totals + label, mask=live & ~bad, other=0)
    trust = tl.where(bad, 0.0, _trust(count.to(tl.float64), total.to(tl.float64), weighted.to(tl.float64)))
    rule = tl.where(outside, _OUTSIDE, tl.where(single, _SINGLE, tl.where((verdict & 1) == 1, _OVERLAP, _UNION)))
    margin, runner_up = _margin(
        distance, starts, row, rows, live, label, least, least_class, other, other_class, 4
    )  # fmt: skip
    place = tl.load(order + nearest, mask=live, other=0)
    stride = stride.to(tl.int64)
    # The result columns of a pending row pass values to the second kernel: rule holds the class at the least distance,
    # nearest the sorted index of the nearest ellipsoid, runner-up the nearest other class, trust the least distance,
    # margin the distance to the other class.
    _store(
        ints, floats, stride, row, live, tl.where(decided, label, tl.where(outside, _PENDING_OUTSIDE, _PENDING_INSIDE)),
        tl.where(decided, rule, least_class), tl.where(decided, place, nearest),
        tl.where(decided, runner_up, other_class), tl.where(decided, trust, least), nearest_distance,
        tl.where(decided, margin, other),
    )  # fmt: skip
    if judging:
        theirs = tl.load(given + row, mask=live, other=0).to(tl.int32)
        count = _line_count(line_starts, line_classes, line_counts, line, theirs, settled)
        count += _expanded_count(
            totals, class_starts, grid_counts, step_ids, step_distances, tail_distances, place, theirs, bound, expands,
            steps, levels,
        )  # fmt: skip
        total = tl.load(totals + theirs, mask=live, other=0)
        trust = tl.where(bad, 0.0, _trust(count.to(tl.float64), total.to(tl.float64), weighted.to(tl.float64)))
        margin, runner_up = _margin(
            distance, starts, row, rows, live, theirs, least, least_class, other, other_class, 4
        )  # fmt: skip
        _store_given(ints, floats, stride, row, live, runner_up, trust, margin)


@jit
def _popcount(x):
    """Number of bits set in each 32-bit word: sums of pairs, of fours, of eights, and of all."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 63).to(tl.int32, bitcast=True)


@jit
def _region_counts(
    distance, members, entry_starts, digits, row, rows, ellipsoids, group, classes, entry_words, digit_count,
    limit: tl.constexpr, span: tl.constexpr, words: tl.constexpr,
):  # fmt: skip
    """For one row and each class of ``group``: number of training points in all members, and in at least one.

    The bits of the entries are combined by AND and OR over the members, and weighted by the binary digits of the
    numbers of points.
    """
    present = group < classes
    start = tl.load(entry_starts + group, mask=present, other=0)[:, None]
    end = tl.load(entry_starts + group + 1, mask=present, other=0)[:, None]
    most = tl.max(tl.max(end - start, axis=1), axis=0)
    in_all = tl.zeros([group.shape[0], words], tl.int32)
    in_any = in_all
    word = 0
    while word < most:
        entry = start + word + tl.arange(0, words)[None, :]
        here = entry < end
        some = tl.zeros([group.shape[0], words], tl.int32)
        every = some - 1
        begin = 0
        while begin < ellipsoids:
            k = begin + tl.arange(0, span)
            d = tl.load(distance + k * rows + row, mask=k < ellipsoids, other=float("inf"))
            member = tl.min(tl.where(d <= limit, k, _NONE), axis=0)
            while member < _NONE:
                bits = tl.load(members + member * entry_words + entry, mask=here, other=0)
                every &= bits
                some |= bits
                member = tl.min(tl.where((d <= limit) & (k > member), k, _NONE), axis=0)
            begin += span
        digit = 0
        while digit < digit_count:
            for u in tl.static_range(4):
                ask = here & (digit + u < digit_count)
                bits = tl.load(digits + (digit + u) * entry_words + entry, mask=ask, other=0)
                in_all += _popcount(every & bits) << (digit + u)
                in_any += _popcount(some & bits) << (digit + u)
            digit += 4
        word += words
    return tl.sum(in_all, axis=1), tl.sum(in_any, axis=1)


@jit
def _expanded_counts(
    distance, nearness, order, totals, class_starts, grid_counts, step_ids, step_distances, tail_distances,
    row, rows, ellipsoids, group, classes, steps, levels, within, limit: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    """For one row outside and each class of ``group``: least and greatest count over the equally near ellipsoids.

    A count is the number of training points in an ellipsoid that is expanded to touch the row.
    """
    fewest = group * 0 + _NONE
    most = group * 0
    begin = 0
    while begin < ellipsoids:
        k = begin + tl.arange(0, span)
        near = tl.load(nearness + k * rows + row, mask=k < ellipsoids, other=float("inf"))
        equal = (near <= within) & (k < ellipsoids)
        nth = tl.min(tl.where(equal, k, _NONE), axis=0)
        while nth < _NONE:
            bound = group * 0.0 + tl.load(distance + nth * rows + row) * limit
            found = _expanded_count(
                totals, class_starts, grid_counts, step_ids, step_distances, tail_distances, tl.load(order + nth),
                group, bound, group < classes, steps, levels,
            )  # fmt: skip
            fewest, most = tl.minimum(fewest, found), tl.maximum(most, found)
            nth = tl.min(tl.where(equal & (k > nth), k, _NONE), axis=0)
        begin += span
    return fewest, most


@jit
def _nearest_of_classes(distance, starts, row, rows, group, tied):
    """The nearest of the tied classes of a group to one row, and its distance; ties go to the lower class."""
    lane = tl.arange(0, 32)[None, :]
    largest: tl.constexpr = 1.7976931348623157e308 if distance.dtype.element_ty == tl.float64 else 3.4028234663852886e38
    begin = tl.load(starts + group, mask=tied, other=0)[:, None]
    number = tl.load(starts + group + 1, mask=tied, other=0)[:, None] - begin
    most = tl.max(tl.max(number, axis=1), axis=0)
    near = tl.full([group.shape[0], 32], float("inf"), distance.dtype.element_ty)
    i = 0
    while i < most:
        d = tl.load(distance + (begin + i + lane) * rows + row, mask=i + lane < number, other=float("inf"))
        near = tl.minimum(near, ordered(d))
        i += 32
    # The finite maximum lets a tied class without an ellipsoid win against classes that are not tied (infinity).
    close = tl.where(tied, tl.minimum(tl.min(near, axis=1), largest), float("inf"))
    closest = tl.min(close, axis=0)
    return tl.min(tl.where(tied & (close == closest), group, _NONE), axis=0), closest


@jit(do_not_specialize=["rows", "stride", "ellipsoids", "steps", "levels", "classes", "entry_words", "digit_count"])
def _count_rows(
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
    at = tl.min(tl.where(marks <= _PENDING_INSIDE, t, _NONE), axis=0)
    while at < _NONE:
        # Values of the row are scalars in this loop. ``row`` is a block of one element, because the shared functions
        # take blocks.
        i = first + at
        row = i + tl.arange(0, 1)
        outside = tl.load(ints + i) == _PENDING_OUTSIDE
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
                narrow, wide = _expanded_counts(
                    distance, nearness, order, totals, class_starts, grid_counts, step_ids, step_distances,
                    tail_distances, i, rows, ellipsoids, group, classes, steps, levels, within, limit, span,
                )  # fmt: skip
            else:
                narrow, wide = _region_counts(
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
            narrow_class = tl.where(top > narrow_most, tl.min(tl.where(have, group, _NONE), axis=0), narrow_class)
            narrow_most = tl.maximum(narrow_most, top)

            top = tl.max(tl.where(present, wide, -1), axis=0)
            have = present & (wide == top)
            nth, close = tl.min(tl.where(have, group, _NONE), axis=0), closest * 0 + float("inf")
            if (tl.sum(have.to(tl.int32), axis=0) > 1) | (classes > class_chunk):
                nth, close = _nearest_of_classes(distance, starts, i, rows, group, have)
            wins = (top > wide_most) | ((top == wide_most) & (close < closest))
            wide_class, closest = tl.where(wins, nth, wide_class), tl.where(wins, close, closest)
            wide_most = tl.maximum(wide_most, top)
            begin += class_chunk

        by_narrow = narrow_ties == 1
        label = row * 0 + tl.where(by_narrow, narrow_class, wide_class)
        count = tl.where(by_narrow, narrow_most, wide_most).to(tl.float64)
        weighted = tl.where(by_narrow, narrow_sum, wide_sum).to(tl.float64)
        rule = tl.where(outside, _OUTSIDE, tl.where(by_narrow, _OVERLAP, _UNION))
        live = row >= 0
        least, other = tl.load(floats + row), tl.load(floats + 2 * stride + row)
        least_class = tl.load(ints + stride + row).to(tl.int32)
        other_class = tl.load(ints + 3 * stride + row).to(tl.int32)
        margin, runner_up = _margin(
            distance, starts, row, rows, live, label, least, least_class, other, other_class, 4
        )  # fmt: skip
        _store(
            ints, floats, stride, row, live, label, row * 0 + rule, tl.load(order + nearest + row * 0), runner_up,
            _trust(count, tl.load(totals + label).to(tl.float64), weighted), tl.load(floats + stride + row), margin,
        )  # fmt: skip
        if judging:
            theirs = row * 0 + judged
            count = tl.where(by_narrow, narrow_judged, wide_judged).to(tl.float64)
            margin, runner_up = _margin(
                distance, starts, row, rows, live, theirs, least, least_class, other, other_class, 4
            )  # fmt: skip
            trust = _trust(count, tl.load(totals + theirs).to(tl.float64), weighted)
            _store_given(ints, floats, stride, row, live, runner_up, trust, margin)
        at = tl.min(tl.where((marks <= _PENDING_INSIDE) & (t > at), t, _NONE), axis=0)


_launch_decide = Launcher(_decide_rows)
_launch_count = Launcher(_count_rows)


def decide_into(
    distance: Float[Tensor, "K B"],
    nearness: Float[Tensor, "K B"] | None,
    given: Int[Tensor, "B"] | None,
    tables: RuleTables,
    ints: Int[Tensor, "I B"],
    floats: Float[Tensor, "F B"],
) -> None:
    """Decide for every row and write the results.

    Args:
        distance: Mahalanobis distances to the ellipsoids, sorted by class.
        nearness: Distances that define the nearest ellipsoid of rows outside; by default ``distance``.
        given: Class indices to judge besides the model's own label; contiguous.
        tables: The rule tables of the model.
        ints: Receives label, rule, nearest and runner-up, and the runner-up to the given label.
        floats: Receives trust, distance and margin, and trust and margin of the given label.
    """
    ellipsoids, rows = distance.shape
    classes = len(tables.totals)
    near = distance if nearness is None else nearness
    labels = tables.codes if given is None else given
    variant = (
        distance.dtype, aligned(distance), tables.merged.dtype, labels.dtype, aligned(labels), aligned(ints),
        aligned(floats),
    )  # fmt: skip
    sizes = (rows, ints.stride(0), ellipsoids, tables.step_ids.shape[1], tables.tail_distances.shape[1])
    look = lookup_shape(rows, ellipsoids)
    _launch_decide(
        (-(-rows // look.tile), 1, 1),
        variant,
        (distance, near, labels, ints, floats, *tables[:23],
         *sizes, len(tables.slots) - 1, tables.probes),
        (_LIMIT, _TIE, nearness is not None, given is not None, look.tile, look.lanes, look.unroll),
        num_warps=look.warps,
    )  # fmt: skip
    if ellipsoids > 1:  # a single ellipsoid leaves no row pending
        count = count_shape(rows, ellipsoids, classes, tables.most_words)
        _launch_count(
            (-(-rows // count.tile), 1, 1),
            variant,
            (distance, near, labels, ints, floats, *tables[1:4], *tables[18:26],
             *sizes, classes, tables.digits.shape[1], tables.digits.shape[0]),
            (_LIMIT, _TIE, given is not None, count.tile, count.span, count.class_chunk, count.words),
            num_warps=count.warps,
        )  # fmt: skip


class LookupShape(NamedTuple):
    """Launch shape of the first kernel: rows per program, ellipsoids per load, unrolled loads, warps."""

    tile: int
    lanes: int
    unroll: int
    warps: int


class CountShape(NamedTuple):
    """Launch shape of the second kernel.

    Rows per program; ellipsoids, classes and entry words (per class) at a time; warps.
    """

    tile: int
    span: int
    class_chunk: int
    words: int
    warps: int


# The shapes below were the fastest on an H200 (experiments/bench_gpu.py). Large batches use one thread per row. Smaller
# batches would leave the chip idle, so several threads share a row.
_MANY_ROWS, _MANY_ROWS_OF_MANY = 2**13, 2**15  # with up to 128 ellipsoids, and with more


@functools.lru_cache(maxsize=1024)
def lookup_shape(rows: int, ellipsoids: int) -> LookupShape:
    """Shape of the first kernel."""
    lanes = min(1024, max(32, power_of_two(ellipsoids)))
    if rows >= (_MANY_ROWS if ellipsoids <= 128 else _MANY_ROWS_OF_MANY):
        return LookupShape(128, 1, min(4, power_of_two(ellipsoids)), warps=4)
    if rows > 2048:
        return LookupShape(8, 32, min(4, lanes // 32), warps=2)
    if rows > 128 or ellipsoids <= 128:
        return LookupShape(1, min(lanes, 256), 1, warps=1)
    return LookupShape(1, lanes, 1, warps=4)


@functools.lru_cache(maxsize=1024)
def count_shape(rows: int, ellipsoids: int, classes: int, most_words: int) -> CountShape:
    """Shape of the second kernel. A program counts the pending rows of its tile one after another."""
    chunk = min(32, power_of_two(classes))
    words = min(512 // chunk, power_of_two(most_words))
    span = min(256, max(32, power_of_two(ellipsoids)))
    many = rows >= (_MANY_ROWS if ellipsoids <= 128 else _MANY_ROWS_OF_MANY)
    return CountShape(64 if many else 1, span, chunk, words, warps=1 if ellipsoids <= 128 else 4)


__all__ = ["count_shape", "decide_into", "lookup_shape", "two_least"]
