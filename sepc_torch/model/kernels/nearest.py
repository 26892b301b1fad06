"""What is near rows, and what holds them: the nearest ellipsoid, the nearest of another class, and the margin."""

from __future__ import annotations

import triton
import triton.language as tl

from sepc_torch.model.kernels.lookup import LIMIT, NONE, STARTS, any_row, least_of, ordered, place, section, sum_of

# Lanes of a row that are in one warp, at most.
_OF_A_WARP = tl.constexpr(256)


@triton.jit
def two_least(x, k, least, where, second):
    """The least so far, where it is and the second least, after the numbers x of place k."""
    where = tl.where(x < least, k, where)
    return tl.minimum(least, x), where, tl.minimum(second, tl.maximum(least, x))


@triton.jit
def nearer(
    least, where, second, label, other, other_label, least_2, where_2, second_2, label_2, other_2, other_label_2
):  # fmt: skip
    """What two lanes found, together: the least, where it is, the second, and the least of another class.

    Of equals the first is the least.
    """
    swap = (least_2 < least) | ((least_2 == least) & (where_2 < where))
    # The lesser of the two comes first from here on.
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


@triton.jit
def nearest_of_lanes(least, where, second, label, other, other_label, one: tl.constexpr):
    """The same over all lanes of a row. Within a warp a chip finds the least of integers by an instruction."""
    by_integers: tl.constexpr = least.dtype == tl.float32
    in_a_warp: tl.constexpr = least.shape[0] <= _OF_A_WARP
    if not one:
        return least, where, second, label, other, other_label
    elif by_integers and in_a_warp:
        # Distances are not negative, and what stands for no number is: integers of the same bits are in the same order.
        nearness, others = least.to(tl.int32, bitcast=True), other.to(tl.int32, bitcast=True)
        best = tl.min(nearness, axis=0)
        first = nearness == best
        # Ellipsoids come by class: the first of equals is of the first class.
        nearest, best_label = tl.min(tl.where(first, where, NONE), axis=0), tl.min(tl.where(first, label, NONE), axis=0)
        itself = first & (where == nearest)
        next_best = tl.min(tl.where(itself, second.to(tl.int32, bitcast=True), nearness), axis=0)
        same = label == best_label
        others, other_label = tl.where(same, others, nearness), tl.where(same, other_label, label)
        next_other = tl.min(others, axis=0)
        next_label = tl.min(tl.where(others == next_other, other_label, NONE), axis=0)
        return (
            best.to(tl.float32, bitcast=True), nearest, next_best.to(tl.float32, bitcast=True), best_label,
            next_other.to(tl.float32, bitcast=True), next_label,
        )  # fmt: skip
    else:
        return tl.reduce((least, where, second, label, other, other_label), 0, nearer)


@triton.jit
def two_nearest(least, where, second, one: tl.constexpr):
    """The least over all lanes of a row, where it is, and the second; of equals the first is the least."""
    best = least_of(least, one)
    nearest = least_of(tl.where(least == best, where, NONE), one)
    return best, nearest, least_of(tl.where((least == best) & (where == nearest), second, least), one)


@triton.jit
def other_class_after(x, c, least, least_class, other, other_class):
    """The least of another class than that of the least, after the numbers x of class c; and the class of the least."""
    closer = x < least
    takes = (c != least_class) & (closer | (x < other))
    other = tl.where(takes, tl.where(closer, least, x), other)
    other_class = tl.where(takes, tl.where(closer, least_class, c), other_class)
    return other, other_class, tl.where(closer, c, least_class)


@triton.jit
def word_by_word(
    distance, nearness, codes, pattern, row, rows, live, ellipsoids,
    euclidean: tl.constexpr, by_row: tl.constexpr, tile: tl.constexpr, lanes: tl.constexpr, unroll: tl.constexpr,
    once: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """What is near rows, and what holds them, a word of ellipsoids after another, or as many as there are lanes for.

    Patterns are stored, unless these words are the ``whole``. Returns the nearest as every lane knows it (see
    :func:`nearer`), the last words, how many ellipsoids hold a row, two standing for more,
    whether a distance is finite, and what is nearest by another measure.
    """
    one: tl.constexpr = tile == 1
    threads: tl.constexpr = lanes if one else tile
    lane = tl.arange(0, lanes) if one else 0
    width = (ellipsoids + 31) // 32
    unset = tl.full([threads], float("inf"), distance.dtype.element_ty)
    none = tl.zeros([threads], tl.int32)
    least, second, where, least_class = unset, unset, none, none
    other, other_class = unset, none
    least_near, second_near, where_near = unset, unset, none
    finite = none
    held_by = row * 0
    span: tl.constexpr = lanes if one else 32
    words: tl.constexpr = span // 32
    word = tl.zeros([words if one else tile], tl.int32)
    for begin_word in tl.range(0, 1 if whole else width, words, loop_unroll_factor=2 if one else 1):
        w = begin_word + tl.arange(0, words) if one else begin_word
        word = tl.zeros([words if one else tile], tl.int32)
        for bits in range(0, 1 if once else tl.minimum(span, ellipsoids - begin_word * 32), lanes * unroll):
            for u in tl.static_range(unroll):
                k = begin_word * 32 + bits + u * lanes + lane
                at = place(k, row, ellipsoids, rows, by_row)
                wanted = live & (k < ellipsoids)
                d = tl.load(distance + at, mask=wanted, other=float("inf"))
                c = tl.load(codes + k, mask=k < ellipsoids, other=0)
                finite |= (d < float("inf")).to(tl.int32)
                bit = (d <= LIMIT).to(tl.int32) << (k & 31)
                word |= tl.sum(tl.reshape(bit, [words, lanes // words]), axis=1) if one else bit
                x = ordered(d)
                other, other_class, least_class = other_class_after(x, c, least, least_class, other, other_class)
                least, where, second = two_least(x, k, least, where, second)
                if euclidean:
                    n = ordered(tl.load(nearness + at, mask=wanted, other=float("inf")))
                    least_near, where_near, second_near = two_least(n, k, least_near, where_near, second_near)
        if not whole:
            tl.store(pattern + place(w, row, width, rows, by_row), word, mask=live & (w < width))
        # A word with several bits counts for two.
        held_by += sum_of((word != 0).to(tl.int32) + ((word & (word - 1)) != 0).to(tl.int32), one)
    return (
        least, where, second, least_class, other, other_class, word, held_by, finite,
        least_near, where_near, second_near,
    )  # fmt: skip


@triton.jit
def _distance_to_class(
    tables, head, distance, row, rows, label, wanted, ellipsoids, by_row: tl.constexpr, one: tl.constexpr
):  # fmt: skip
    """Distance of rows to the nearest ellipsoid of a class, each of its own."""
    lanes: tl.constexpr = 32 if one else 1
    lane = tl.arange(0, lanes) if one else 0
    starts = section(tables, head, STARTS)
    begin = tl.load(starts + label, mask=wanted, other=0)
    number = tl.load(starts + label + 1, mask=wanted, other=0) - begin
    most = number if one else tl.max(number, axis=0)
    near = (lane + row) * 0.0 + float("inf")
    near = near.to(distance.dtype.element_ty)
    for m in tl.range(0, most, lanes, loop_unroll_factor=1 if one else 4):
        at = place(begin + m + lane, row, ellipsoids, rows, by_row)
        near = tl.minimum(near, ordered(tl.load(distance + at, mask=m + lane < number, other=float("inf"))))
    return least_of(near, one)


@triton.jit
def _least_of_class(found, codes, label, unroll: tl.constexpr):
    """The least of the numbers of one class that threads found."""
    least = tl.where(codes[0] == label, ordered(found[0]), float("inf"))
    for u in tl.static_range(1, unroll):
        least = tl.minimum(least, tl.where(codes[u] == label, ordered(found[u]), float("inf")))
    return tl.min(tl.min(least, axis=0), axis=0)


@triton.jit
def own_distance(
    tables, head, distance, found, lane_codes, row, rows, label, best, best_class, next_distance, next_class, live,
    ellipsoids, by_row: tl.constexpr, kept: tl.constexpr, one: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    """Distance of rows to their label's own class, which mostly is that of the nearest or the second."""
    own = tl.where(label == best_class, best, next_distance)
    farther = live & (label != best_class) & (label != next_class)
    if any_row(farther, one):
        if kept:
            their_own = _least_of_class(found, lane_codes, label, unroll)
        else:
            their_own = _distance_to_class(tables, head, distance, row, rows, label, farther, ellipsoids, by_row, one)
        own = tl.where(farther, their_own, own)
    return own


@triton.jit
def margin_of(label, own, least, least_class, other, other_class, tiny: tl.constexpr):
    """Distance to the nearest other class over that to the label's own, and which class that is."""
    nearest_is_own = least_class == label
    other = tl.where(nearest_is_own, other, least)
    runner_up = tl.where(nearest_is_own, other_class, least_class)
    runner_up = tl.where(other == float("inf"), 0, runner_up)
    own = tl.where(own == float("-inf"), float("nan"), own)
    other = tl.where(other == float("-inf"), float("nan"), other)
    return other / tl.where(own < tiny, tiny, own), runner_up
