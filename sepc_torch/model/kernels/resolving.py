"""Decisions from distances that are known, by a kernel of their own."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sepc_torch.model.kernels.counting import entries_ahead
from sepc_torch.model.kernels.deciding import decide
from sepc_torch.model.kernels.lanes import codes_ahead
from sepc_torch.model.kernels.launching import Launcher, aligned, int_kind
from sepc_torch.model.kernels.lookup import CLASSES, ELLIPSOIDS, LAYOUT, bring_near, words_ahead
from sepc_torch.model.kernels.overlapping import overlaps, wait_for_previous
from sepc_torch.model.kernels.splitting import power_of_two
from sepc_torch.model.kernels.tables import LOW_DIGITS, WORD, RuleTables
from sepc_torch.shapes import Float, Int

# From so many rows on a thread takes each, below a warp: with few ellipsoids, or half as many rows with a single one,
# and with more of them.
_FEW_ELLIPSOIDS = 128
_MANY_ROWS = 2**13
_MOST_ROWS = 2**15
# Up to so many rows the chip has room for more than a warp to each, which pays with more ellipsoids.
_FEW_ROWS = 128
# About so many programs of a warp run at once.
_ROWS_AT_ONCE = 2**11
# A warp to a program: threads that wait for no other, and as many programs as there can be. With a single ellipsoid no
# thread waits for another anyway, and half as many programs are enough.
_TILE = 32
_REGISTERS = 64
_MOST_REGISTERS = 255
# Lanes that share a row of many ellipsoids, and of few rows; distances that a thread asks for before it looks at the
# first, at most.
_MANY_LANES = 256
_MOST_LANES = 1024
_AHEAD = 8
# Words of entries that a warp counts at once, at most, and numbers that it reads before it knows whether it counts.
_MOST_ENTRY_WORDS = 256
_AHEAD_NUMBERS = 2048
# Pages of the tables that are fetched beforehand, at least, and programs for it.
_PAGES = tl.constexpr(512)
_FETCHERS = 128


# Compiled once for all sizes: a batch of another size should not wait for a compiler.
@triton.jit(do_not_specialize=["rows", "stride", "pages"])
def _resolve(
    distance, nearness, given, tables, ints, floats, rows, stride, pages,
    euclidean: tl.constexpr, judging: tl.constexpr, merged: tl.constexpr, double: tl.constexpr, by_row: tl.constexpr,
    tile: tl.constexpr, lanes: tl.constexpr, unroll: tl.constexpr, once: tl.constexpr, whole: tl.constexpr,
    class_chunk: tl.constexpr, class_words: tl.constexpr, heavy: tl.constexpr, digits: tl.constexpr,
    overlap: tl.constexpr, _layout: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * tile
    if tile > 1:
        if overlap:
            wait_for_previous()
        ellipsoids, classes = tl.load(tables + ELLIPSOIDS), tl.load(tables + CLASSES)
        decide(
            distance, nearness, given, tables, None, None, None, ints, floats, begin, rows, stride, ellipsoids,
            classes, euclidean, judging, merged, double, by_row, tile, lanes, unroll, once, whole, class_chunk,
            class_words, heavy, digits,
        )  # fmt: skip
    else:
        # A row waits for every access. What can be is read before its distances are there; some programs do no more.
        if overlap:
            bring_near(tables, pages, _PAGES)
        head = words_ahead(tables)
        ellipsoids, classes = head[ELLIPSOIDS], head[CLASSES]
        codes = None
        if whole:
            codes = codes_ahead(tables, head, ellipsoids, lanes, unroll)
        ahead = None
        if digits > 0:
            ahead = entries_ahead(tables, head, classes, class_chunk, class_words, heavy, digits)
        if begin < rows:
            if overlap:
                wait_for_previous()
            decide(
                distance, nearness, given, tables, head, codes, ahead, ints, floats,
                begin, rows, stride, ellipsoids, classes, euclidean, judging, merged, double, by_row, tile, lanes,
                unroll, once, whole, class_chunk, class_words, heavy, digits,
            )  # fmt: skip


_launch = Launcher(_resolve)


def resolve(
    room: Float[Tensor, "R B"],
    nearness: Float[Tensor, "K B"] | None,
    given: Int[Tensor, "B"] | None,
    tables: RuleTables,
    ints: Int[Tensor, "I B"],
    floats: Float[Tensor, "F B"],
    by_row: bool,
) -> None:
    """Decide for every row, into columns of results.

    Args:
        room: Begins with the Mahalanobis distances to the ellipsoids, which come by class; after them there is room for
            a word of bits for every 32 ellipsoids; see :func:`room_for`.
        nearness: What "nearest" means for points outside, stored alike; by default the distance itself.
        given: Labels to judge besides the model's own; indices of classes.
        tables: From :func:`~sepc_torch.model.kernels.tables.rule_tables`.
        ints: Takes label, rule, nearest and runner-up, and the runner-up to the given label.
        floats: Takes trust, distance and margin, and trust and margin of the given label.
        by_row: Whether the distances of a row are side by side, or those to an ellipsoid; see :func:`better_by_row`.
    """
    ellipsoids, rows = tables.order.shape[0], room.shape[1]
    shape = _program_shape(rows, ellipsoids, tables.starts.shape[0] - 1, *tables.entries)
    overlap = overlaps(room.get_device())
    options = {"launch_pdl": True} if overlap else {}
    _launch(
        (max(-(-rows // shape.tile), _FETCHERS if overlap and shape.tile == 1 else 1), 1, 1),
        (room.dtype, None if given is None else (given.dtype, aligned(given)), aligned(ints), aligned(floats),
         int_kind(ints.stride(0))),
        (room, room if nearness is None else nearness, tables.words if given is None else given, tables.words,
         ints, floats, rows, ints.stride(0), tables.pages),
        (nearness is not None, given is not None, tables.merged, tables.double, by_row, *shape[:-1], overlap, LAYOUT),
        num_warps=shape.warps, maxnreg=_registers(shape.tile, room.dtype),
        **options,
    )  # fmt: skip


def _registers(tile: int, dtype: torch.dtype) -> int | None:
    """Registers of a thread, at most: few, if that lets more programs run at once."""
    if tile == 1:
        return _MOST_REGISTERS
    return _REGISTERS if dtype == torch.float32 else None


def room_for(ellipsoids: int, rows: int, like: Tensor) -> Float[Tensor, "R B"]:
    """Room for distances and patterns, as :func:`resolve` wants it."""
    return torch.empty(ellipsoids + -(-ellipsoids // WORD), rows, dtype=like.dtype, device=like.device)


class _Shape(NamedTuple):
    """Rows of a program, lanes of a row; classes, and words of their entries, that are counted at once; warps.

    A lane asks for ``unroll`` distances at once. Asking once is enough for the words that are taken at a time
    (``once``), and these may be the whole pattern (``whole``). So many ``digits`` of the entries' numbers are read
    beforehand, the higher ones, which few words have, as so many ``heavy`` tiles.
    """

    tile: int
    lanes: int
    unroll: int
    once: bool
    whole: bool
    class_chunk: int
    class_words: int
    heavy: int
    digits: int
    warps: int


def better_by_row(ellipsoids: int, rows: int) -> bool:
    """Whether the distances of a row should be side by side: threads that share it read them sooner.

    Of many rows with many ellipsoids they are written so slowly that it does not pay.
    """
    return _shared(rows, ellipsoids) and (rows <= _ROWS_AT_ONCE or ellipsoids <= _FEW_ELLIPSOIDS)


def _shared(rows: int, ellipsoids: int) -> bool:
    """Whether several threads take a row. One with more ellipsoids is worth a warp also where there are many."""
    if ellipsoids > _FEW_ELLIPSOIDS:
        return rows < _MOST_ROWS
    return rows < (_MANY_ROWS if ellipsoids > 1 else _MANY_ROWS // 2)


@functools.lru_cache(maxsize=1024)
def _program_shape(
    rows: int, ellipsoids: int, classes: int, most_words: int, heavy_words: int, digits: int
) -> _Shape:  # fmt: skip
    """What was fastest on an H200."""
    chunk = min(WORD, power_of_two(classes))
    if not _shared(rows, ellipsoids):
        ahead = min(_AHEAD, power_of_two(ellipsoids))
        warps = 1 if ellipsoids > 1 else 2
        words = min(2 * WORD // chunk, power_of_two(most_words))
        return _Shape(_TILE * warps, 1, ahead, ellipsoids <= ahead, ellipsoids <= WORD, chunk, words, 0, 0, warps)
    lanes = max(WORD, min(power_of_two(ellipsoids), _MANY_LANES if rows > _FEW_ROWS else _MOST_LANES))
    warps = 1 if ellipsoids <= _FEW_ELLIPSOIDS or rows > _FEW_ROWS else 4
    words = min(_MOST_ENTRY_WORDS * warps // chunk, power_of_two(most_words))
    # High digits take tiles like those of the low ones. What every thread reads beforehand must fit into its registers.
    heavy = -(-heavy_words * max(0, digits - LOW_DIGITS) // words)
    numbers = chunk * words * (min(digits, LOW_DIGITS) + heavy)
    whole = ellipsoids <= lanes
    unroll = 1
    if whole:
        unroll, lanes = max(1, lanes // (WORD * warps)), WORD * warps
    fits = classes <= chunk and most_words <= words and numbers <= _AHEAD_NUMBERS * warps
    if not (whole and fits and better_by_row(ellipsoids, rows)):
        heavy = digits = 0
    return _Shape(1, lanes, unroll, True, whole, chunk, words, heavy, digits, warps)
