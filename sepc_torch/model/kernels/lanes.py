"""One row whose ellipsoids are all at hand, a few to a thread: which of them hold it, and which are near.

Blocks are warps by 32 lanes. A lane has every 32nd ellipsoid, in all warps together, and a word with a bit for each.
Warps put together what they know once; from then on every warp has all 32 words, and for what these tell none waits
for another. Numbers stay with their threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sepc_torch.model.kernels.lookup import (
    CODES,
    LANE_PATTERNS,
    LIMIT,
    NONE,
    any_of,
    lowest_bit,
    ordered,
    place,
    section,
    xor,
)
from sepc_torch.model.kernels.nearest import nearer, other_class_after, two_least
from sepc_torch.model.kernels.tables import LANE_MIX, LANE_STEP

_STEP = tl.constexpr(LANE_STEP)
_SHIFT, _FACTOR = tl.constexpr(LANE_MIX[0][0]), tl.constexpr(LANE_MIX[0][1])
_SHIFT_2, _FACTOR_2 = tl.constexpr(LANE_MIX[1][0]), tl.constexpr(LANE_MIX[1][1])


@triton.jit
def threads(lanes: tl.constexpr):
    """The numbers of so many threads, as warps by 32 lanes."""
    return tl.arange(0, lanes // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def codes_ahead(tables, head, ellipsoids, lanes: tl.constexpr, unroll: tl.constexpr):
    """The classes of the ellipsoids that threads have."""
    codes = ()
    for u in tl.static_range(unroll):
        k = u * lanes + threads(lanes)
        codes = codes + (tl.load(section(tables, head, CODES) + k, mask=k < ellipsoids, other=0),)  # type: ignore[assignment] # noqa: RUF005 - Triton knows no star
    return codes


@triton.jit
def numbers_of(numbers, row, ellipsoids, rows, by_row: tl.constexpr, lanes: tl.constexpr, unroll: tl.constexpr):
    """What a row has of the ellipsoids of threads, infinite where there is none."""
    found = ()
    # From here on numbers are a known distance apart, if they are side by side.
    start = numbers + place(0, row, ellipsoids, rows, by_row)
    for u in tl.static_range(unroll):
        k = u * lanes + threads(lanes)
        x = tl.load(start + place(k, 0, ellipsoids, rows, by_row), mask=k < ellipsoids, other=float("inf"))
        found = found + (x,)  # type: ignore[assignment] # noqa: RUF005 - Triton knows no star
    return found


@triton.jit
def _nearer_and_held(
    least, where, second, label, other, other_label, word,
    least_2, where_2, second_2, label_2, other_2, other_label_2, word_2,
):  # fmt: skip
    """What two warps found, together, and the ellipsoids that hold."""
    least, where, second, label, other, other_label = nearer(
        least, where, second, label, other, other_label, least_2, where_2, second_2, label_2, other_2, other_label_2
    )
    return least, where, second, label, other, other_label, word | word_2


@triton.jit
def held_and_near(found, codes, lanes: tl.constexpr, unroll: tl.constexpr):
    """What every lane knows of the distances that were found: its nearest ellipsoids, and the word of those that hold.

    The nearest are the least distance, where it is, the second, the class of the least, and the least of another class
    with that class.
    """
    thread = threads(lanes)
    unset = tl.full([lanes // 32, 32], float("inf"), found[0].dtype)
    none = thread * 0
    least, second, where, label, other, other_label, word = unset, unset, none, none, unset, none, none
    for u in tl.static_range(unroll):
        x = ordered(found[u])
        other, other_label, label = other_class_after(x, codes[u], least, label, other, other_label)
        least, where, second = two_least(x, u * lanes + thread, least, where, second)
        word |= tl.where(found[u] <= LIMIT, 1 << (u * (lanes // 32) + thread // 32), 0)
    return tl.reduce((least, where, second, label, other, other_label, word), 0, _nearer_and_held)


@triton.jit
def nearest_by_lane(found, lanes: tl.constexpr, unroll: tl.constexpr):
    """Of other numbers that were found, the least of every thread, where it is, and the second."""
    thread = threads(lanes)
    least = tl.full([lanes // 32, 32], float("inf"), found[0].dtype)
    second, where = least, thread * 0
    for u in tl.static_range(unroll):
        least, where, second = two_least(ordered(found[u]), u * lanes + thread, least, where, second)
    return least, where, second


@triton.jit
def some_finite(found, unroll: tl.constexpr):
    """Whether threads found some number that is finite."""
    finite = (found[0] < float("inf")).to(tl.int32)
    for u in tl.static_range(1, unroll):
        finite |= (found[u] < float("inf")).to(tl.int32)
    return tl.max(tl.max(finite, axis=0), axis=0) > 0


@triton.jit
def hashed_by_lane(word):
    """The hash of the words of lanes; see :func:`sepc_torch.model.kernels.tables.hashed_by_lane`."""
    x = word.to(tl.uint32, bitcast=True) + tl.arange(0, 32).to(tl.uint32) * _STEP
    x = (x ^ (x >> _SHIFT)) * _FACTOR
    x = (x ^ (x >> _SHIFT_2)) * _FACTOR_2
    return tl.reduce((x ^ (x >> _SHIFT)).to(tl.int32, bitcast=True), 0, xor)


@triton.jit
def same_by_lane(tables, head, word, cell, bits: tl.constexpr):
    """Whether the words of lanes are those of a cell, if there is one; words of tables have so many bits."""
    kind: tl.constexpr = tl.uint8 if bits <= 8 else tl.uint16 if bits <= 16 else tl.uint32
    words = section(tables, head, LANE_PATTERNS).to(tl.pointer_type(kind))
    seen = tl.load(words + cell * 32 + tl.arange(0, 32), mask=cell >= 0, other=0).to(tl.uint32)
    return (cell >= 0) & (any_of(seen.to(tl.int32, bitcast=True) ^ word, True) == 0)


@triton.jit
def held_places(word):
    """The ellipsoid of every lane that is the first in its word; NONE for a word without one."""
    return tl.where(word != 0, lowest_bit(word) * 32 + tl.arange(0, 32), NONE)


@triton.jit
def next_two(places, word):
    """The least and the greatest of the ellipsoids that are first in words of lanes; places and words without them.

    They are the same where one lane has some, and NONE and -1 where none has. What lanes have after their first does
    not depend on which of them is taken, and need not wait for it.
    """
    rest = word & (word - 1)
    next_places = held_places(rest)
    least = tl.min(places, axis=0)
    greatest = tl.max(tl.where(word != 0, places, -1), axis=0)
    taken = (places == least) | (places == greatest)
    return least, greatest, tl.where(taken, next_places, places), tl.where(taken, rest, word)
