"""What a kernel reads from the tables of :mod:`sepc_torch.model.kernels.tables`, for a tile of rows or for one row of it."""

from __future__ import annotations

import zlib

import triton
import triton.language as tl

from sepc_torch.ellipsoid import SURFACE_TOLERANCE
from sepc_torch.model.kernels.tables import GUIDE as GUIDE_NUMBERS
from sepc_torch.model.kernels.tables import LANE_MIX, LANE_STEP, LOW_DIGITS, MULTIPLIER, SECTIONS, SIZES
from sepc_torch.model.kernels.tables import PAGE as PAGE_WORDS
from sepc_torch.model.rules import NEAREST_TIE, Rule

LIMIT = tl.constexpr(1.0 + SURFACE_TOLERANCE)
_MULTIPLIER = tl.constexpr(MULTIPLIER)
PAGE = tl.constexpr(PAGE_WORDS)
_GUIDE = tl.constexpr(GUIDE_NUMBERS)
_HEAD = tl.constexpr(len(SIZES) + len(SECTIONS))
NONE = tl.constexpr(2**31 - 1)
# A number for what kernels take from the globals of other modules and that may change. Triton before 3.5 keeps compiled
# kernels by their source alone, and would run an old one with a new layout; so kernels take this as an argument that
# they do not use.
_GLOBALS = (
    SIZES, SECTIONS, PAGE_WORDS, GUIDE_NUMBERS, LOW_DIGITS, MULTIPLIER, LANE_STEP, LANE_MIX,
    SURFACE_TOLERANCE, NEAREST_TIE, [*Rule],
)  # fmt: skip
LAYOUT = zlib.crc32(repr(_GLOBALS).encode())


def _at(name: str) -> tl.constexpr:
    """Where the tables begin with the size of this name, or with the place of the section."""
    return tl.constexpr((*SIZES, *SECTIONS).index(name))


ELLIPSOIDS, CLASSES, _SIZE = _at("ellipsoids"), _at("classes"), _at("size")
MOST_WORDS, DIGITS, _SLOT_MASK, _PROBES = _at("most_words"), _at("digits"), _at("slot_mask"), _at("probes")
CODES, ORDER = _at("codes"), _at("order")
STARTS, TOTALS = _at("starts"), _at("totals")
VERDICTS, TRUSTS, COUNTS, SUMS = _at("verdicts"), _at("trusts"), _at("counts"), _at("sums")
_PATTERNS, _KEYS, _SLOTS = _at("patterns"), _at("keys"), _at("slots")
LANE_PATTERNS, _LANE_KEYS, _LANE_SLOTS = _at("lane_patterns"), _at("lane_keys"), _at("lane_slots")
_LANE_SLOT_MASK = _at("lane_slot_mask")
MEMBERS, ENTRY_STARTS, NUMBERS = _at("members"), _at("entry_starts"), _at("numbers")
_REACH, _RANKS = _at("reach"), _at("ranks")
_GUIDES, _MERGED, _MERGED_TRUSTS, _MERGED_SUMS = (
    _at("guide"), _at("merged"), _at("merged_trusts"), _at("merged_sums"),
)  # fmt: skip


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
def words_ahead(tables):
    """The words that the tables begin with, all at hand."""
    head = ()
    for i in tl.static_range(_HEAD):
        head = head + (tl.load(tables + i),)  # type: ignore[assignment] # noqa: RUF005 - Triton knows no star
    return head


@triton.jit
def place(i, row, count, rows, by_row: tl.constexpr):
    """Where a matrix has number i of a row, if it is stored by rows of so many numbers, or by columns of rows."""
    if by_row:
        return row * count + i
    else:
        return i * rows + row


@triton.jit
def size_of(tables, head, name: tl.constexpr):
    """A size that the tables begin with, or where a section begins; ``head`` are these words, if they are at hand."""
    if head is None:
        return tl.load(tables + name)
    else:
        return head[name]


@triton.jit
def section(tables, head, name: tl.constexpr):
    """Where a section of 32-bit integers begins."""
    return tables + size_of(tables, head, name)


@triton.jit
def section_of(tables, head, name: tl.constexpr, kind: tl.constexpr):
    """Where a section of numbers of another kind begins."""
    return section(tables, head, name).to(tl.pointer_type(kind))


# A program takes many rows, a thread each, or ``one`` row, which its lanes share: what is of the row is then a scalar.
@triton.jit
def least_of(x, one: tl.constexpr):
    """The least that the lanes of a row have."""
    if one:
        return tl.min(x if len(x.shape) == 1 else tl.min(x, axis=0), axis=0)
    else:
        return x


@triton.jit
def most_of(x, one: tl.constexpr):
    """The greatest that the lanes of a row have."""
    return tl.max(x, axis=0) if one else x


@triton.jit
def sum_of(x, one: tl.constexpr):
    """The sum of what the lanes of a row have."""
    return tl.sum(x, axis=0) if one else x


@triton.jit
def _or(x, y):
    return x | y


@triton.jit
def any_of(x, one: tl.constexpr):
    """The bits that some lane of a row has."""
    return tl.reduce(x, 0, _or) if one else x


@triton.jit
def any_row(x, one: tl.constexpr):
    """Whether something holds for some row."""
    return x if one else tl.max(x.to(tl.int32), axis=0) > 0


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
    """What a word of a pattern adds to its hash; see :func:`sepc_torch.model.kernels.tables.hashed`."""
    x = (word.to(tl.int64) & 0xFFFFFFFF) + (w.to(tl.int64) << 32)
    for _ in tl.static_range(2):
        x *= _MULTIPLIER
        x = x ^ ((x >> 32) & 0xFFFFFFFF)
    return tl.where(word != 0, x, 0)


@triton.jit
def xor(x, y):
    """Exclusive or, for reductions."""
    return x ^ y


@triton.jit
def _joined(x, here):
    """The 64-bit integers that are here, exclusive or. For halves of them a chip has an instruction."""
    low = tl.reduce(tl.where(here, x.to(tl.int32), 0), 0, xor)
    high = tl.reduce(tl.where(here, (x >> 32).to(tl.int32), 0), 0, xor)
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _within(numbers, first, count, bound, wanted, lanes: tl.constexpr):
    """How many of ``count`` ascending numbers, from ``first`` on, are within a bound."""
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
        passed, _ = _narrowed(numbers + first, passed, count + 1, count, bound, 1, lanes)
    return passed


@triton.jit
def _narrowed(numbers, passed, step, count, bound, enough: tl.constexpr, lanes: tl.constexpr):
    """How many of ``count`` ascending numbers are within a bound: at least ``passed``, less than ``passed + step``.

    Narrows this down until the step is small enough. Every lane asks for a number; the last one within the bound tells
    how many are.
    """
    lane = tl.arange(0, lanes)
    while step > enough:
        step = (step + lanes) // (lanes + 1)
        at = passed + (lane + 1) * step - 1
        found = tl.load(numbers + at, mask=at < count, other=float("inf")).to(bound.dtype)
        passed += tl.max(tl.where((found <= bound) & (at < count), lane + 1, 0), axis=0) * step
    return passed, step


@triton.jit
def _guided(tables, head, k, size, bound, judging: tl.constexpr, kind: tl.constexpr):
    """What goes with the merged distances of one ellipsoid within a bound: first those that guide, then a part of all.

    Returns the trust, and, for judging, the sum; both are asked for with the last distances.
    """
    lane, guide = tl.arange(0, 32), tl.arange(0, _GUIDE)
    numbers = section_of(tables, head, _MERGED, kind) + k * size
    guides = tl.multiple_of(section_of(tables, head, _GUIDES, kind) + k * _GUIDE, 16)
    found = tl.load(guides + guide).to(bound.dtype)
    step = size // (_GUIDE + 1) + 1
    passed = tl.minimum(tl.max(tl.where(found <= bound, guide + 1, 0), axis=0) * step, size)
    passed, step = _narrowed(numbers, passed, step, size, bound, 32, 32)
    step = tl.minimum(step, size - passed + 1)
    at = passed + lane
    first = k * (size + 1)
    found = tl.load(numbers + at, mask=lane < step - 1, other=float("inf")).to(bound.dtype)
    trusts = tl.load(section_of(tables, head, _MERGED_TRUSTS, tl.int64) + first + at, mask=lane < step, other=0)
    last = lane == tl.max(tl.where((found <= bound) & (lane < step - 1), lane + 1, 0), axis=0)
    products = k.to(tl.int64) * 0
    if judging:
        sums = tl.load(section_of(tables, head, _MERGED_SUMS, tl.int64) + first + at, mask=lane < step, other=0)
        products = _joined(sums, last)
    return _joined(trusts, last).to(tl.float64, bitcast=True), products


@triton.jit
def reached(tables, head, k, c, bound, wanted, classes, kind: tl.constexpr, lanes: tl.constexpr):
    """Training points of class c within a distance of ellipsoid k."""
    size = size_of(tables, head, _SIZE)
    passed = _within(section_of(tables, head, _REACH, kind), (k * classes + c) * size, size, bound, wanted, lanes)
    return tl.load(section(tables, head, _RANKS) + c * (size + 1) + passed, mask=wanted, other=0)


@triton.jit
def trust(number, total, sum_of_products):
    """The share of one class, the point counted as its own, in the sum over all; in float64."""
    own = (number + 1).to(tl.float64) * (total + 1).to(tl.float64)
    others = (sum_of_products - number.to(tl.int64) * total.to(tl.int64)).to(tl.float64)
    return own / (own + others)


@triton.jit
def expanded(
    tables, head, k, label, bound, wanted, classes,
    judging: tl.constexpr, merged: tl.constexpr, kind: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """The trust in ellipsoid k's own class within a distance of it, and, for judging, the sum over all classes."""
    products = k.to(tl.int64) * 0
    if merged:
        size = classes * size_of(tables, head, _SIZE)
        if lanes > 1:
            return _guided(tables, head, k, size, bound, judging, kind)
        else:
            passed = _within(section_of(tables, head, _MERGED, kind), k * size, size, bound, wanted, 1)
            passed += k * (size + 1)
            found = tl.load(section_of(tables, head, _MERGED_TRUSTS, tl.float64) + passed, mask=wanted, other=0.0)
            if judging:
                products = tl.load(section_of(tables, head, _MERGED_SUMS, tl.int64) + passed, mask=wanted, other=0)
            return found, products
    else:
        number = k * 0
        total = number
        for c in range(classes):
            within = reached(tables, head, k, k * 0 + c, bound, wanted, classes, kind, lanes)
            of_class = tl.load(section(tables, head, TOTALS) + c)
            number = tl.where(label == c, within, number)
            total = tl.where(label == c, of_class, total)
            products += within.to(tl.int64) * of_class
        return trust(number, total, products), products


@triton.jit
def cells_at(tables, head, key, probe, several, one: tl.constexpr, by_lane: tl.constexpr):
    """The cells so far from where those with this hash belong, and their hashes, for rows in several ellipsoids.

    The lanes of one row take as many as they are.
    """
    kind: tl.constexpr = tl.int32 if by_lane else tl.int64
    probe += tl.arange(0, 32) if one else 0
    at = (key + probe) & size_of(tables, head, _LANE_SLOT_MASK if by_lane else _SLOT_MASK)
    cells = tl.load(section(tables, head, _LANE_SLOTS if by_lane else _SLOTS) + at, mask=several, other=-1)
    keys = section_of(tables, head, _LANE_KEYS if by_lane else _KEYS, kind)
    return cells, tl.load(keys + at, mask=several, other=0)


@triton.jit
def likely_cell(tables, head, first, key, several, one: tl.constexpr, by_lane: tl.constexpr):
    """The cell with the same hash as each row that lies in several ellipsoids, or -1; ``first`` are those near by."""
    lanes: tl.constexpr = 32 if one else 1
    cell = tl.where(first[1] == key, first[0], -1)
    if not by_lane:
        for probe in range(lanes, size_of(tables, head, _PROBES), lanes):
            cells, keys = cells_at(tables, head, key, probe, several, one, by_lane)
            cell = tl.maximum(cell, tl.where(keys == key, cells, -1))
    return most_of(cell, one)


@triton.jit
def same_pattern(tables, head, pattern, row, rows, cell, width, by_row: tl.constexpr, one: tl.constexpr):
    """Whether each row's pattern is that of its cell, if it has one."""
    lanes: tl.constexpr = 32 if one else 1
    lane = tl.arange(0, lanes) if one else 0
    words = section(tables, head, _PATTERNS)
    differ = (lane + cell) * 0
    for begin in tl.range(0, width, lanes, loop_unroll_factor=1 if one else 4):
        w = begin + lane
        asked = (cell >= 0) & (w < width)
        seen = tl.load(words + cell * width + w, mask=asked, other=0)
        mine = tl.load(pattern + place(w, row, width, rows, by_row), mask=asked, other=0)
        differ |= seen ^ mine
    return (cell >= 0) & (any_of(differ, one) == 0)


@triton.jit
def same_word(tables, head, word, cell):
    """The same for patterns of one word."""
    seen = tl.load(section(tables, head, _PATTERNS) + cell, mask=cell >= 0, other=0)
    return (cell >= 0) & (seen == word)
