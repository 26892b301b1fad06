"""Decisions from distances that are known, by a kernel of their own."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sepc_torch.kernels.deciding import decide
from sepc_torch.kernels.launching import Launcher, aligned, int_kind
from sepc_torch.kernels.lookup import CLASSES, ELLIPSOIDS, LAYOUT, PAGE, bring_near
from sepc_torch.kernels.overlapping import overlaps, wait_for_previous
from sepc_torch.kernels.splitting import power_of_two
from sepc_torch.kernels.tables import WORD, RuleTables
from sepc_torch.shapes import Float, Int

# From so many rows on a thread takes each, below a warp: with few ellipsoids, and with more of them.
_FEW_ELLIPSOIDS = 128
_MANY_ROWS = 2**12
_MOST_ROWS = 2**15
# Up to so many rows the chip has room for more than a warp to each, which pays with more ellipsoids.
_FEW_ROWS = 128
# A warp to a program: threads that wait for no other, and as many programs as there can be. With a single ellipsoid no
# thread waits for another anyway, and half as many programs are enough.
_TILE = 32
_REGISTERS = 64
# Lanes that share a row of many ellipsoids, and of few rows; classes that the rare cases take at once, and distances
# that a thread asks for before it looks at the first, at most.
_MANY_LANES = 256
_MOST_LANES = 1024
_MOST_CLASSES = 32
_AHEAD = 8
# Pages of the tables that are fetched beforehand, at least.
_PAGES = tl.constexpr(16)


# Compiled once for all sizes: a batch of another size should not wait for a compiler.
@triton.jit(do_not_specialize=["rows", "stride", "pages"])
def _resolve(
    distance, nearness, given, tables, ints, floats, rows, stride, pages,
    euclidean: tl.constexpr, judging: tl.constexpr, merged: tl.constexpr, double: tl.constexpr,
    tile: tl.constexpr, lanes: tl.constexpr, unroll: tl.constexpr, once: tl.constexpr, whole: tl.constexpr,
    class_chunk: tl.constexpr, class_words: tl.constexpr, overlap: tl.constexpr, _layout: tl.constexpr,
):  # fmt: skip
    if lanes == 1:
        ellipsoids, classes = tl.load(tables + ELLIPSOIDS), tl.load(tables + CLASSES)
    else:
        # Few rows wait for every access. The first page, with what most of them need, is read at once; it stays near.
        if overlap:
            bring_near(tables, pages, _PAGES)
        word = tl.arange(0, PAGE)
        page = tl.load(tables + word)
        ellipsoids = tl.sum(tl.where(word == ELLIPSOIDS, page, 0), axis=0)
        classes = tl.sum(tl.where(word == CLASSES, page, 0), axis=0)
    if overlap:
        wait_for_previous()
    begin = tl.program_id(0) * tile
    live = begin + tl.arange(0, tile) < rows
    decide(
        distance, nearness, given, tables, ints, floats, begin, live, rows, stride, ellipsoids, classes,
        euclidean, judging, merged, double, lanes, unroll, once, whole, class_chunk, class_words,
    )  # fmt: skip


_launch = Launcher(_resolve)


def resolve(
    room: Float[Tensor, "R B"],
    nearness: Float[Tensor, "K B"] | None,
    given: Int[Tensor, "B"] | None,
    tables: RuleTables,
    ints: Int[Tensor, "I B"],
    floats: Float[Tensor, "F B"],
) -> None:
    """Decide for every row, into columns of results.

    Args:
        room: Mahalanobis distances to the ellipsoids, which come by class, and below them room for a word of bits for
            every 32 ellipsoids; see :func:`room_for`.
        nearness: What "nearest" means for points outside; by default the distance itself.
        given: Labels to judge besides the model's own; indices of classes.
        tables: From :func:`~sepc_torch.kernels.tables.rule_tables`.
        ints: Takes label, rule, nearest and runner-up, and the runner-up to the given label.
        floats: Takes trust, distance and margin, and trust and margin of the given label.
    """
    ellipsoids, rows = tables.order.shape[0], room.shape[1]
    shape = _program_shape(rows, ellipsoids, tables.starts.shape[0] - 1)
    overlap = overlaps(room.get_device())
    options = {"launch_pdl": True} if overlap else {}
    _launch(
        (-(-rows // shape.tile), 1, 1),
        (room.dtype, None if given is None else (given.dtype, aligned(given)), aligned(ints), aligned(floats),
         int_kind(ints.stride(0))),
        (room, room if nearness is None else nearness, tables.words if given is None else given, tables.words,
         ints, floats, rows, ints.stride(0), tables.pages),
        (nearness is not None, given is not None, tables.merged, tables.double, *shape[:-1], overlap, LAYOUT),
        num_warps=shape.warps, maxnreg=_REGISTERS if shape.tile > 1 and room.dtype == torch.float32 else None,
        **options,
    )  # fmt: skip


def room_for(ellipsoids: int, rows: int, like: Tensor) -> Float[Tensor, "R B"]:
    """Room for distances and patterns, as :func:`resolve` wants it."""
    return torch.empty(ellipsoids + -(-ellipsoids // WORD), rows, dtype=like.dtype, device=like.device)


class _Shape(NamedTuple):
    """Rows of a program, lanes of a row, classes of the rare cases and words of entries of each, and warps.

    A lane asks for ``unroll`` distances at once. Asking once is enough for the words that are taken at a time
    (``once``), and these may be the whole pattern (``whole``).
    """

    tile: int
    lanes: int
    unroll: int
    once: bool
    whole: bool
    class_chunk: int
    class_words: int
    warps: int


@functools.lru_cache(maxsize=1024)
def _program_shape(rows: int, ellipsoids: int, classes: int) -> _Shape:
    """What was fastest on an H200. A row with more ellipsoids is worth a warp also where there are many."""
    chunk = min(_MOST_CLASSES, power_of_two(classes))
    if rows >= (_MANY_ROWS if ellipsoids <= _FEW_ELLIPSOIDS else _MOST_ROWS):
        ahead = min(_AHEAD, power_of_two(ellipsoids))
        warps = 1 if ellipsoids > 1 else 2
        return _Shape(_TILE * warps, 1, ahead, ellipsoids <= ahead, ellipsoids <= WORD, chunk, 2 * WORD // chunk, warps)
    if ellipsoids <= _FEW_ELLIPSOIDS:
        return _Shape(1, max(WORD, power_of_two(ellipsoids)), 1, True, True, chunk, 2 * WORD // chunk, 1)
    if rows > _FEW_ROWS:
        return _Shape(1, _MANY_LANES, 1, True, ellipsoids <= _MANY_LANES, chunk, _MANY_LANES // chunk, 1)
    lanes = min(_MOST_LANES, power_of_two(ellipsoids))
    return _Shape(1, lanes, 1, True, ellipsoids <= lanes, chunk, 2 * _MANY_LANES // chunk, 4)
