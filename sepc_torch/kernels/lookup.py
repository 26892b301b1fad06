"""What a kernel reads from the tables of :mod:`sepc_torch.kernels.tables`, for a tile of rows or for one row of it."""

from __future__ import annotations

import zlib

import triton
import triton.language as tl

from sepc_torch.ellipsoid import SURFACE_TOLERANCE
from sepc_torch.kernels.tables import MULTIPLIER, SECTIONS, SIZES
from sepc_torch.kernels.tables import PAGE as PAGE_WORDS
from sepc_torch.rules import NEAREST_TIE, Rule

LIMIT = tl.constexpr(1.0 + SURFACE_TOLERANCE)
_MULTIPLIER = tl.constexpr(MULTIPLIER)
PAGE = tl.constexpr(PAGE_WORDS)
NONE = tl.constexpr(2**31 - 1)
# A number for all that kernels take from Python's globals and that may change. Triton before 3.5 keeps compiled kernels
# by their source alone, and would run an old one with a new layout; so kernels take this as an argument that they do
# not use.
LAYOUT = zlib.crc32(repr((SIZES, SECTIONS, PAGE_WORDS, MULTIPLIER, SURFACE_TOLERANCE, NEAREST_TIE, [*Rule])).encode())


def _at(name: str) -> tl.constexpr:
    """Where the tables begin with the size of this name, or with the place of the section."""
    return tl.constexpr((*SIZES, *SECTIONS).index(name))


ELLIPSOIDS, CLASSES, _CELLS, _SIZE = _at("ellipsoids"), _at("classes"), _at("cells"), _at("size")
MOST_WORDS, DIGITS, _SLOT_MASK, _PROBES = _at("most_words"), _at("digits"), _at("slot_mask"), _at("probes")
CODES, ORDER, STARTS, TOTALS = _at("codes"), _at("order"), _at("starts"), _at("totals")
VERDICTS, TRUSTS, COUNTS, SUMS = _at("verdicts"), _at("trusts"), _at("counts"), _at("sums")
_PATTERNS, _KEYS, _SLOTS = _at("patterns"), _at("keys"), _at("slots")
MEMBERS, ENTRY_STARTS, NUMBERS = _at("members"), _at("entry_starts"), _at("numbers")
_REACH, _RANKS = _at("reach"), _at("ranks")
_MERGED, _MERGED_TRUSTS, _MERGED_SUMS = _at("merged"), _at("merged_trusts"), _at("merged_sums")


@triton.jit
def bring_near(tables, pages, fewest: tl.constexpr):
    """Begin to fetch the tables into the cache: every program a page of them, and all together no fewer than that."""
    lane = tl.arange(0, 32)
    programs = tl.num_programs(0)
    for page in range(tl.program_id(0), tl.minimum(pages, tl.maximum(programs, fewest)), programs):
        line = (tables + page * PAGE + lane * (PAGE // 32)).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def section(tables, name):
    """Where a section of 32-bit integers begins."""
    return tables + tl.load(tables + name)


@triton.jit
def section_of(tables, name, kind: tl.constexpr):
    """Where a section of numbers of another kind begins."""
    return section(tables, name).to(tl.pointer_type(kind))


@triton.jit
def ordered(x):
    """Numbers with NaN below all, which is where torch's minimum finds it."""
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def lowest_bit(word):
    """The place of the lowest bit: a power of two tells it in the exponent of a float32. For zero, any place."""
    power = (word & -word).to(tl.uint32, bitcast=True).to(tl.float32)
    return ((power.to(tl.int32, bitcast=True) >> 23) - 127) & 31


@triton.jit
def lowest_place(word, w):
    """The place of the lowest bit of words w in a pattern; NONE for a word without one."""
    return tl.where(word != 0, w * 32 + lowest_bit(word), NONE)


# Whether there is a compiler, or an interpreter, which does not know the instructions of a chip.
_COMPILED = tl.constexpr(isinstance(lowest_bit, triton.JITFunction))


@triton.jit
def power_of_two_within(count):
    """The largest power of two that is not above a positive integer below 2^24, which float32 has exactly."""
    return 1 << ((count.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127)


@triton.jit
def bits_of(word):
    """How many bits of a word are set: an instruction, or sums of pairs, fours and eights, and the sum of these."""
    if _COMPILED:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)
    else:
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
    """How many of ``count`` ascending numbers, from ``first`` on, are within a bound."""
    lane = tl.arange(0, lanes)
    passed = first * 0
    if lanes == 1:
        # Halving: the number so many farther on, or the last one, is asked for; rows that want none ask for the same.
        first = tl.where(wanted, first, 0)
        bound = tl.where(wanted, bound, float("-inf"))
        step = power_of_two_within(count)
        while step > 0:
            found = tl.load(numbers + (first + tl.minimum(passed + step, count) - 1)).to(bound.dtype)
            passed += tl.where(found <= bound, step, 0)
            step = step >> 1
        passed = tl.minimum(passed, count)
    else:
        # A round asks every lane for one; after it the answer is at least ``passed`` and less than ``passed + step``.
        step = count // (lanes + 1) + 1
        while step > 0:
            at = passed[:, None] + (lane[None, :] + 1) * step - 1
            asked = wanted[:, None] & (at < count)
            found = tl.load(numbers + first[:, None] + at, mask=asked, other=float("inf")).to(bound.dtype)
            passed += tl.sum((asked & (found <= bound[:, None])).to(tl.int32), axis=1) * step
            step = tl.where(step == 1, 0, (step + lanes) // (lanes + 1))
    return passed


@triton.jit
def reached(tables, k, c, bound, wanted, classes, kind: tl.constexpr, lanes: tl.constexpr):
    """Training points of class c within a distance of ellipsoid k."""
    size = tl.load(tables + _SIZE)
    passed = _within(section_of(tables, _REACH, kind), (k * classes + c) * size, size, bound, wanted, lanes)
    return tl.load(section(tables, _RANKS) + c * (size + 1) + passed, mask=wanted, other=0)


@triton.jit
def trust(number, total, sum_of_products):
    """The share of one class, the point counted as its own, in the sum over all; in float64."""
    own = (number + 1).to(tl.float64) * (total + 1).to(tl.float64)
    others = (sum_of_products - number.to(tl.int64) * total.to(tl.int64)).to(tl.float64)
    return own / (own + others)


@triton.jit
def expanded(
    tables, k, label, bound, wanted, classes,
    judging: tl.constexpr, merged: tl.constexpr, kind: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """The trust in ellipsoid k's own class within a distance of it, and, for judging, the sum over all classes."""
    products = k.to(tl.int64) * 0
    if merged:
        size = classes * tl.load(tables + _SIZE)
        passed = _within(section_of(tables, _MERGED, kind), k * size, size, bound, wanted, lanes)
        passed += k * (size + 1)
        found = tl.load(section_of(tables, _MERGED_TRUSTS, tl.float64) + passed, mask=wanted, other=0.0)
        if judging:
            products = tl.load(section_of(tables, _MERGED_SUMS, tl.int64) + passed, mask=wanted, other=0)
        return found, products
    else:
        number = k * 0
        total = number
        for c in range(classes):
            within = reached(tables, k, k * 0 + c, bound, wanted, classes, kind, lanes)
            of_class = tl.load(section(tables, TOTALS) + c)
            number = tl.where(label == c, within, number)
            total = tl.where(label == c, of_class, total)
            products += within.to(tl.int64) * of_class
        return trust(number, total, products), products


@triton.jit
def likely_cell(tables, key, several, lanes: tl.constexpr):
    """The cell with the same hash as each row that lies in several ellipsoids, or -1."""
    slots, keys = section(tables, _SLOTS), section_of(tables, _KEYS, tl.int64)
    slot_mask = tl.load(tables + _SLOT_MASK)
    cell = tl.full([key.shape[0], lanes], -1, tl.int32)
    for probe in range(0, tl.load(tables + _PROBES), lanes):
        place = ((key[:, None] + (probe + tl.arange(0, lanes))[None, :]) & slot_mask).to(tl.int32)
        found = tl.load(slots + place, mask=several[:, None], other=-1)
        known = tl.load(keys + place, mask=several[:, None], other=0)
        cell = tl.maximum(cell, tl.where((found >= 0) & (known == key[:, None]), found, -1))
    return tl.max(cell, axis=1)


@triton.jit
def same_pattern(tables, pattern, row, rows, cell, width, lanes: tl.constexpr):
    """Whether each row's pattern is that of its cell, if it has one."""
    words, cells = section(tables, _PATTERNS), tl.load(tables + _CELLS)
    differ = tl.zeros([row.shape[0], lanes], tl.int32)
    for begin in tl.range(0, width, lanes, loop_unroll_factor=4 if lanes == 1 else 1):
        w = (begin + tl.arange(0, lanes))[None, :]
        asked = (cell >= 0)[:, None] & (w < width)
        seen = tl.load(words + w * cells + cell[:, None], mask=asked, other=0)
        mine = tl.load(pattern + w * rows + row[:, None], mask=asked, other=0)
        differ |= (seen != mine).to(tl.int32)
    return (cell >= 0) & (tl.max(differ, axis=1) == 0)


@triton.jit
def same_words(tables, word, cell, width):
    """The same for a pattern that is known as a whole."""
    words, cells = section(tables, _PATTERNS), tl.load(tables + _CELLS)
    w = tl.arange(0, word.shape[1])[None, :]
    asked = (cell >= 0)[:, None] & (w < width)
    seen = tl.load(words + w * cells + cell[:, None], mask=asked, other=0)
    return (cell >= 0) & (tl.max((asked & (seen != word)).to(tl.int32), axis=1) == 0)
