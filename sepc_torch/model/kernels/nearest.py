"""Nearest ellipsoids and classes of a row, its members and its margin: device functions of the decision kernels."""

from __future__ import annotations

import triton.language as tl

from sepc_torch.model.kernels.launch import jit

# Larger than every index: the minimum over no index at all.
NONE = tl.constexpr(2**31 - 1)


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
    """Combine two partial results of :func:`scan_ellipsoids`; ties go to the lower index."""
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
def scan_ellipsoids(
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
    nearest = tl.min(tl.where(least == best[:, None], where, NONE), axis=1)
    rest = tl.where((least == best[:, None]) & (where == nearest[:, None]), second, least)
    return best, nearest, tl.min(rest, axis=1)


@jit
def nearest_ellipsoid(
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
def margin_of(distance, starts, row, rows, live, label, least, least_class, other, other_class, unroll: tl.constexpr):
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
def nearest_of_classes(distance, starts, row, rows, group, tied):
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
    return tl.min(tl.where(tied & (close == closest), group, NONE), axis=0), closest
