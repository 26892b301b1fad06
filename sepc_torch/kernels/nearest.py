"""What is near rows: the nearest ellipsoid, the nearest of another class, and the margin between the two classes."""

from __future__ import annotations

import triton
import triton.language as tl

from sepc_torch.kernels.lookup import NONE, STARTS, any_row, least_of, ordered, place, section


@triton.jit
def two_least(x, k, least, where, second):
    """The least so far, where it is and the second least, after the numbers x of place k."""
    where = tl.where(x < least, k, where)
    return tl.minimum(least, x), where, tl.minimum(second, tl.maximum(least, x))


@triton.jit
def _nearer(
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
    """The same over all lanes of a row."""
    if one:
        return tl.reduce((least, where, second, label, other, other_label), 0, _nearer)
    else:
        return least, where, second, label, other, other_label


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
def own_distance(
    tables, head, distance, near, lane_codes, row, rows, label, best, best_class, next_distance, next_class, live,
    ellipsoids, by_row: tl.constexpr, kept: tl.constexpr, one: tl.constexpr,
):  # fmt: skip
    """Distance of rows to their label's own class, which mostly is that of the nearest or the second."""
    own = tl.where(label == best_class, best, next_distance)
    farther = live & (label != best_class) & (label != next_class)
    if any_row(farther, one):
        if kept:
            their_own = tl.min(tl.where(lane_codes == label, near, float("inf")), axis=0)
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
