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
from sepc_torch.kernels.lookup import LAYOUT
from sepc_torch.kernels.splitting import power_of_two
from sepc_torch.kernels.tables import WORD, RuleTables
from sepc_torch.shapes import Float, Int

# From so many rows on a thread takes each, below a warp: with few ellipsoids, and with more of them.
_FEW_ELLIPSOIDS = 128
_MANY_ROWS = 2**12
_MOST_ROWS = 2**15
# A warp to a program: threads that wait for no other, and as many programs as there can be.
_TILE = 32
_REGISTERS = 64
# Lanes that share a row, classes that the rare cases take at once, and distances that a thread asks for before it looks
# at the first, at most.
_MOST_LANES = 256
_MOST_CLASSES = 32
_AHEAD = 8


# Compiled once for all sizes: a batch of another size should not wait for a compiler.
@triton.jit(do_not_specialize=["rows", "stride"])
def _resolve(
    distance, nearness, given, tables, ints, floats, rows, stride,
    euclidean: tl.constexpr, judging: tl.constexpr, merged: tl.constexpr, double: tl.constexpr,
    tile: tl.constexpr, lanes: tl.constexpr, unroll: tl.constexpr, class_chunk: tl.constexpr, _layout: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * tile
    live = begin + tl.arange(0, tile) < rows
    decide(
        distance, nearness, given, tables, ints, floats, begin, live, rows, stride,
        euclidean, judging, merged, double, lanes, unroll, class_chunk,
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
    _launch(
        (-(-rows // shape.tile), 1, 1),
        (room.dtype, None if given is None else (given.dtype, aligned(given)), aligned(ints), aligned(floats),
         int_kind(ints.stride(0))),
        (room, room if nearness is None else nearness, tables.words if given is None else given, tables.words,
         ints, floats, rows, ints.stride(0)),
        (nearness is not None, given is not None, tables.merged, tables.double, *shape, LAYOUT),
        num_warps=1, maxnreg=_REGISTERS if shape.tile > 1 and room.dtype == torch.float32 else None,
    )  # fmt: skip


def room_for(ellipsoids: int, rows: int, like: Tensor) -> Float[Tensor, "R B"]:
    """Room for distances and patterns, as :func:`resolve` wants it."""
    return torch.empty(ellipsoids + -(-ellipsoids // WORD), rows, dtype=like.dtype, device=like.device)


class _Shape(NamedTuple):
    """Rows of a program and lanes of a row, distances that a lane asks for at once, and classes of the rare cases."""

    tile: int
    lanes: int
    unroll: int
    class_chunk: int


@functools.lru_cache(maxsize=1024)
def _program_shape(rows: int, ellipsoids: int, classes: int) -> _Shape:
    """What was fastest on an H200. A row with more ellipsoids is worth a warp also where there are many."""
    chunk = min(_MOST_CLASSES, power_of_two(classes))
    if rows >= (_MANY_ROWS if ellipsoids <= _FEW_ELLIPSOIDS else _MOST_ROWS):
        return _Shape(_TILE, 1, min(_AHEAD, power_of_two(ellipsoids)), chunk)
    return _Shape(1, min(max(WORD, power_of_two(ellipsoids)), _MOST_LANES), 1, chunk)
