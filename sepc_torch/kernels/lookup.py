"""What a kernel reads from the tables of :mod:`sepc_torch.kernels.tables`, for a tile of rows or for one row of it."""

from __future__ import annotations

import zlib

import triton
import triton.language as tl

from sepc_torch.ellipsoid import SURFACE_TOLERANCE
from sepc_torch.kernels.tables import MULTIPLIER, SECTIONS, SIZES
from sepc_torch.rules import NEAREST_TIE, Rule

LIMIT = tl.constexpr(1.0 + SURFACE_TOLERANCE)
_MULTIPLIER = tl.constexpr(MULTIPLIER)
# A number for all that kernels take from Python's globals. Triton before 3.5 keeps compiled kernels by their source
# alone, and would run an old one with a new layout; so kernels take this as an argument that they do not use.
LAYOUT = zlib.crc32(repr((SIZES, SECTIONS, MULTIPLIER, SURFACE_TOLERANCE, NEAREST_TIE, [*Rule])).encode())


def _at(name: str) -> tl.constexpr:
    """Where the tables begin with the size of this name, or with the place of the section."""
    return tl.constexpr((*SIZES, *SECTIONS).index(name))


ELLIPSOIDS, CLASSES, _CELLS, _CELL_WORDS = _at("ellipsoids"), _at("classes"), _at("cells"), _at("cell_words")
_SIZE, _SLOT_MASK, _PROBES = _at("size"), _at("slot_mask"), _at("probes")
CODES, ORDER, STARTS, TOTALS = _at("codes"), _at("order"), _at("starts"), _at("totals")
COUNTS, SUMS, VERDICTS = _at("counts"), _at("sums"), _at("verdicts")
_PATTERNS, _KEYS, _SLOTS, _MEMBERS, _CELL_COUNTS = (
    _at("patterns"), _at("keys"), _at("slots"), _at("members"), _at("cell_counts")
)  # fmt: skip
_REACH, _RANKS, _MERGED = _at("reach"), _at("ranks"), _at("merged")
_MERGED_SUMS, _MERGED_OWN = _at("merged_sums"), _at("merged_own")


@triton.jit
def section(tables, name):
    """Where a section of 32-bit integers begins."""
    return tables + tl.load(tables + name)


@triton.jit
def _numbers(tables, name, double: tl.constexpr):
    """Where a section of floating-point numbers begins."""
    kind: tl.constexpr = tl.float64 if double else tl.float32
    return section(tables, name).to(tl.pointer_type(kind))


@triton.jit
def long_section(tables, name):
    """Where a section of 64-bit integers begins."""
    return section(tables, name).to(tl.pointer_type(tl.int64))


@triton.jit
def lowest_bit(word):
    """The place of the lowest bit: a power of two tells it in the exponent of a float32. For zero, any place."""
    power = (word & -word).to(tl.uint32, bitcast=True).to(tl.float32)
    return ((power.to(tl.int32, bitcast=True) >> 23) - 127) & 31


@triton.jit
def bits_of(word):
    """How many bits of a word are set: sums of pairs, of fours and of eights, and the sum of these."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 63).to(tl.int32, bitcast=True)


@triton.jit
def hashed(word, w):
    """What a word of a pattern adds to its hash; see :func:`sepc_torch.kernels.tables.hashed`."""
    x = (word.to(tl.int64) & 0xFFFFFFFF) + (w.to(tl.int64) << 32)
    for _ in tl.static_range(2):
        x *= _MULTIPLIER
        x = x ^ ((x >> 32) & 0xFFFFFFFF)
    return tl.where(word != 0, x, 0)


@triton.jit
def _within(numbers, first, count, bound, wanted, lanes: tl.constexpr):
    """How many of ``count`` ascending numbers, from ``first`` on, are within a bound; a round asks every lane for one.

    After every round the answer is at least ``passed`` and less than ``passed + step``.
    """
    lane = tl.arange(0, lanes)
    passed = first * 0
    step = count // (lanes + 1) + 1
    while step > 0:
        at = passed[:, None] + (lane[None, :] + 1) * step - 1
        asked = wanted[:, None] & (at < count)
        found = tl.load(numbers + first[:, None] + at, mask=asked, other=float("inf")).to(bound.dtype)
        passed += tl.sum((asked & (found <= bound[:, None])).to(tl.int32), axis=1) * step
        step = tl.where(step == 1, 0, (step + lanes) // (lanes + 1))
    return passed


@triton.jit
def reached(tables, k, c, bound, wanted, classes, double: tl.constexpr, lanes: tl.constexpr):
    """Training points of class c within a distance of ellipsoid k."""
    size = tl.load(tables + _SIZE)
    passed = _within(_numbers(tables, _REACH, double), (k * classes + c) * size, size, bound, wanted, lanes)
    return tl.load(section(tables, _RANKS) + c * (size + 1) + passed, mask=wanted, other=0)


@triton.jit
def expanded(tables, k, label, bound, wanted, classes, merged: tl.constexpr, double: tl.constexpr, lanes: tl.constexpr):
    """Points of the ellipsoid's own class within a distance of it, and the sum over all classes."""
    if merged:
        size = classes * tl.load(tables + _SIZE)
        passed = _within(_numbers(tables, _MERGED, double), k * size, size, bound, wanted, lanes)
        passed += k * (size + 1)
        number = tl.load(section(tables, _MERGED_OWN) + passed, mask=wanted, other=0)
        products = tl.load(long_section(tables, _MERGED_SUMS) + passed, mask=wanted, other=0)
    else:
        number = k * 0
        products = number.to(tl.int64)
        for c in range(classes):
            found = reached(tables, k, k * 0 + c, bound, wanted, classes, double, lanes)
            number = tl.where(label == c, found, number)
            products += found.to(tl.int64) * tl.load(section(tables, TOTALS) + c)
    return number, products


@triton.jit
def known_cell(tables, pattern, row, rows, key, several, width, lanes: tl.constexpr):
    """The cell with the same pattern as each row that lies in several ellipsoids, or -1."""
    cell = row * 0 - 1
    slots, keys, words = section(tables, _SLOTS), long_section(tables, _KEYS), section(tables, _PATTERNS)
    cells, slot_mask = tl.load(tables + _CELLS), tl.load(tables + _SLOT_MASK)
    for probe in range(tl.load(tables + _PROBES)):
        looking = several & (cell < 0)
        found = tl.load(slots + ((key + probe) & slot_mask).to(tl.int32), mask=looking, other=-1)
        known = tl.load(keys + found, mask=found >= 0, other=0)
        cell = tl.where((found >= 0) & (known == key), found, cell)
    differ = tl.zeros([row.shape[0], lanes], tl.int32)
    for begin in tl.range(0, width, lanes, loop_unroll_factor=4 if lanes == 1 else 1):
        w = (begin + tl.arange(0, lanes))[None, :]
        asked = (cell >= 0)[:, None] & (w < width)
        seen = tl.load(words + w * cells + cell[:, None], mask=asked, other=0)
        mine = tl.load(pattern + w * rows + row[:, None], mask=asked, other=0)
        differ |= (seen != mine).to(tl.int32)
    return tl.where(tl.max(differ, axis=1) > 0, -1, cell)


@triton.jit
def count_region(tables, pattern, chosen, rows, group, classes, ellipsoids, chunk: tl.constexpr, ahead: tl.constexpr):
    """Training points of some classes in all, and in any, of the ellipsoids that hold one row; 32 cells to a word."""
    i = tl.arange(0, 32)
    p = tl.arange(0, chunk)
    members, counts = section(tables, _MEMBERS), section(tables, _CELL_COUNTS)
    cell_words = tl.load(tables + _CELL_WORDS)
    width = (ellipsoids + 31) // 32
    everywhere = tl.zeros([chunk, group.shape[0]], tl.int32)
    anywhere = tl.zeros([chunk, group.shape[0]], tl.int32)
    for begin in range(0, cell_words, chunk):
        here = begin + p < cell_words
        every = tl.full([chunk], -1, tl.int32)
        some = tl.zeros([chunk], tl.int32)
        for w in range(0, width, 32):
            mine = tl.load(pattern + (w + i) * rows + chosen, mask=w + i < width, other=0)
            number = tl.sum((mine != 0).to(tl.int32), axis=0)
            while number > 0:
                which = tl.min(tl.where(mine != 0, i, 32), axis=0)
                word = tl.sum(tl.where(i == which, mine, 0), axis=0)
                mine = tl.where(i == which, 0, mine)
                number -= 1
                while word != 0:
                    nth = (w + which) * 32 + lowest_bit(word)
                    word = word & (word - 1)
                    has = tl.load(members + nth * cell_words + begin + p, mask=here, other=0)
                    every, some = every & has, some | has
        # Every word gives up its cells, the lowest first.
        most_left = tl.max((some != 0).to(tl.int32), axis=0)
        while most_left > 0:
            for _ in tl.static_range(ahead):
                bit = lowest_bit(some)
                found = tl.load(
                    counts + ((begin + p) * 32 + bit)[:, None] * classes + group[None, :],
                    mask=(some != 0)[:, None] & (group < classes)[None, :],
                    other=0,
                )
                anywhere += found
                everywhere += found * ((every >> bit) & 1)[:, None]
                some = some & (some - 1)
            most_left = tl.max((some != 0).to(tl.int32), axis=0)
    return tl.sum(everywhere, axis=0), tl.sum(anywhere, axis=0)


@triton.jit
def count_tied(tables, distance, nearness, chosen, rows, group, bound, classes, ellipsoids, double: tl.constexpr):
    """The fewest and the most points of some classes in the expansions of the ellipsoids equally near to one row."""
    i = tl.arange(0, 32)
    fewest = tl.full([group.shape[0]], 2147483647, tl.int32)
    greatest = tl.zeros([group.shape[0]], tl.int32)
    for begin in range(0, ellipsoids, 32):
        column = begin + i
        near = tl.load(nearness + column * rows + chosen, mask=column < ellipsoids, other=float("inf"))
        equal = (near <= bound) & (column < ellipsoids)
        number = tl.sum(equal.to(tl.int32), axis=0)
        while number > 0:
            nth = tl.min(tl.where(equal, column, ellipsoids), axis=0)
            reached_by = tl.load(distance + nth * rows + chosen) * LIMIT + tl.zeros([group.shape[0]], bound.dtype)
            found = reached(tables, nth, group, reached_by, group < classes, classes, double, 1)
            fewest, greatest = tl.minimum(fewest, found), tl.maximum(greatest, found)
            equal = equal & (column != nth)
            number -= 1
    return fewest, greatest
