"""From points to decisions on a CUDA device, in pieces: no memory grows with rows times ellipsoids, no host is asked.

Importing this needs no Triton; it is loaded with the first launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sepc_torch.model import torch_ops
from sepc_torch.model.kernels.bounds import Screen, screen
from sepc_torch.model.kernels.devices import near_together, on_device
from sepc_torch.model.kernels.splitting import Split, block_size, split
from sepc_torch.model.kernels.tables import RuleTables, rule_tables
from sepc_torch.model.rules import TrainingCounts
from sepc_torch.shapes import Float, Int

# Numbers of a piece's distances. They are read two or three times, so the cache need not hold them.
_PIECE = 2**26
# Below these, choosing and computing again cost more than the products that screening saves.
_SCREEN_ROWS = 2**15
_SCREEN_WORK = 2048
# Sums of at most 64 products of numbers up to 2^14, in units of a row: 64 squares of them stay below 2^128.
_MOST_ROW_SCALE = 2.0**27


class Kernels(NamedTuple):
    """What the kernels read: counts, and the ellipsoids by class, accurate and rounded, if they are in float32."""

    tables: RuleTables
    bank: Split | None
    coarse: Screen | None


def kernels_for(
    offsets: Float[Tensor, "K D"],
    whiteners: Float[Tensor, "K D D"],
    prepared: Split | None,
    training: TrainingCounts,
    totals: Int[Tensor, "C"],
) -> Kernels:
    """Lay out a model for the kernels; ``prepared`` are its ellipsoids as they come, where a kernel can take them."""
    tables = rule_tables(training, totals)
    if prepared is None:
        return Kernels(tables, None, None)
    order = tables.order.long()
    as_they_come = bool((order.diff() > 0).all())
    bank = prepared if as_they_come else split(offsets[order], whiteners[order])
    # Squares of the accurate kernel must not overflow where those of the estimate do not.
    wanted = worth_screening(*offsets.shape) and float(bank.row_scale.max()) < _MOST_ROW_SCALE
    return Kernels(tables, bank, screen(bank) if wanted else None)


def judge(
    z: Tensor, given: Int[Tensor, "B"] | None, origin: Float[Tensor, "D"], kernels: Kernels, *, screening: bool
) -> tuple[Int[Tensor, "I B"], Float[Tensor, "F B"]]:
    """Decide for points.

    Args:
        z: The points (B, D) in float32, float16 or bfloat16.
        given: Labels to judge besides the model's own.
        origin: What the centres are relative to.
        kernels: The model.
        screening: Whether distances that cannot matter may be computed in float16, where that is faster.

    Returns:
        Label, rule, nearest and runner-up; trust, distance and margin. With given labels, also the runner-up to them,
        and trust and margin of them.
    """
    tables, bank, coarse = kernels
    if bank is None:
        raise ValueError("These ellipsoids were not laid out in float32.")
    coarse = coarse if screening else None
    if not torch.compiler.is_compiling():  # handing over so many tensors takes longer than a small batch
        return _in_pieces(z, given, origin, bank, coarse, tables)
    rounded, relative = ([], 0.0) if coarse is None else (list(coarse[:-1]), coarse.relative)
    return _judge(z, given, origin, list(bank[:-1]), bank.reach, rounded, relative, *tables)


def decide(
    distance: Float[Tensor, "B K"],
    nearness: Float[Tensor, "B K"] | None,
    given: Int[Tensor, "B"] | None,
    kernels: Kernels,
) -> tuple[Int[Tensor, "I B"], Float[Tensor, "F B"]]:
    """The same from distances that are known, and from what "nearest" means where that is another number."""
    return _decide(distance, nearness, given, *kernels.tables)


def _in_pieces(
    z: Tensor, given: Tensor | None, origin: Tensor, bank: Split, coarse: Screen | None, tables: RuleTables
) -> tuple[Tensor, Tensor]:
    ints, floats = _room(z, origin.dtype, given)
    given = None if given is None else given.contiguous()
    z = near_together(z)
    rows = max(1, _PIECE // bank.centers.shape[0])
    with on_device(z):
        if 0 < z.shape[0] <= rows:
            _judge_piece(z, given, origin, bank, coarse, tables, ints, floats)
            return ints, floats
        for start in range(0, z.shape[0], rows):
            piece = slice(start, start + rows)
            labels = None if given is None else given[piece]
            _judge_piece(z[piece], labels, origin, bank, coarse, tables, ints[:, piece], floats[:, piece])
    return ints, floats


def worth_screening(count: int, dim: int) -> bool:
    """Whether large batches are screened with so many ellipsoids and dims.

    More dims do not fit the registers, and of more ellipsoids a piece has too few rows.

    >>> worth_screening(128, 64), worth_screening(10, 64), worth_screening(128, 65), worth_screening(5000, 64)
    (True, False, False, False)
    """
    block = block_size(dim)
    return dim <= block and count * block >= _SCREEN_WORK and count * _SCREEN_ROWS <= _PIECE


def _judge_piece(
    z: Tensor,
    given: Tensor | None,
    origin: Tensor,
    bank: Split,
    coarse: Screen | None,
    tables: RuleTables,
    ints: Tensor,
    floats: Tensor,
) -> None:
    launches = _launches()
    rows, count = z.shape[0], bank.centers.shape[0]
    if coarse is not None and rows >= _SCREEN_ROWS:
        room, _ = launches.screened(z, given, origin, bank, coarse, tables.starts)
        by_row = False
    else:
        room = launches.room_for(count, rows, origin)
        by_row = launches.better_by_row(count, rows)
        launches.launch_into(room, z, origin, bank, *((count, 1) if by_row else (1, rows)))
    launches.resolve(room, None, given, tables, ints, floats, by_row)


class _Launches(NamedTuple):
    launch_into: Callable[..., None]
    screened: Callable[..., tuple[Tensor, Tensor]]
    better_by_row: Callable[[int, int], bool]
    room_for: Callable[..., Tensor]
    resolve: Callable[..., None]


@functools.cache
def _launches() -> _Launches:
    """What needs Triton, imported with the first launch: to import it in every call takes time."""
    from sepc_torch.model.kernels.fused import launch_into
    from sepc_torch.model.kernels.resolving import better_by_row, resolve, room_for
    from sepc_torch.model.kernels.screening import screened

    return _Launches(launch_into, screened, better_by_row, room_for, resolve)


def _judge_tensors(
    z: Tensor,
    given: Tensor | None,
    origin: Tensor,
    bank: list[Tensor],
    reach: float,
    coarse: list[Tensor],
    relative: float,
    *tables: Any,
) -> tuple[Tensor, Tensor]:
    ellipsoids = Split(*bank, reach)  # type: ignore[call-arg, arg-type]
    rounded = Screen(*coarse, relative) if coarse else None  # type: ignore[call-arg, arg-type]
    return _in_pieces(z, given, origin, ellipsoids, rounded, RuleTables(*tables))


def _judge_shape(z: Tensor, given: Tensor | None, origin: Tensor, *model: object) -> tuple[Tensor, Tensor]:
    return _room(z, origin.dtype, given)


def _decide_pieces(
    distance: Tensor, nearness: Tensor | None, given: Tensor | None, *tables: Any
) -> tuple[Tensor, Tensor]:
    launches = _launches()
    counts = RuleTables(*tables)
    ints, floats = _room(distance, distance.dtype, given)
    given = None if given is None else given.contiguous()
    rows = max(1, _PIECE // distance.shape[1])
    with on_device(distance):
        for start in range(0, len(distance), rows):
            piece = slice(start, start + rows)
            size, count = distance[piece].shape
            by_row = launches.better_by_row(count, size)
            room = launches.room_for(count, size, distance)
            _by_class(distance[piece], counts.order, room, by_row)
            near = None if nearness is None else torch.empty_like(room[:count])
            if nearness is not None and near is not None:
                _by_class(nearness[piece], counts.order, near, by_row)
            labels = None if given is None else given[piece]
            launches.resolve(room, near, labels, counts, ints[:, piece], floats[:, piece], by_row)
    return ints, floats


def _by_class(numbers: Float[Tensor, "B K"], order: Int[Tensor, "K"], out: Tensor, by_row: bool) -> None:
    """Write columns in another order to where ``out`` begins, stored by row or by column."""
    rows, count = numbers.shape
    strides = (count, 1) if by_row else (1, rows)
    torch.index_select(numbers, 1, order, out=out.as_strided((rows, count), strides))


def _decide_shape(
    distance: Tensor, nearness: Tensor | None, given: Tensor | None, *model: object
) -> tuple[Tensor, Tensor]:
    return _room(distance, distance.dtype, given)


def _room(like: Tensor, dtype: torch.dtype, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """Columns for the results: four of integers and three of numbers, and those of the given labels."""
    rows, device = like.shape[0], like.device
    ints = torch.empty(4 if given is None else 5, rows, dtype=torch.int64, device=device)
    return ints, torch.empty(3 if given is None else 5, rows, dtype=dtype, device=device)


_judge = torch_ops.operator(
    "judge(Tensor z, Tensor? given, Tensor origin, Tensor[] bank, float reach, Tensor[] coarse, float relative, "
    "Tensor words, Tensor order, Tensor starts, bool merged, bool double, int most_words, int heavy_words, int digits) "
    "-> (Tensor, Tensor)",
    _judge_tensors,
    _judge_shape,
)
_decide = torch_ops.operator(
    "decide(Tensor distance, Tensor? nearness, Tensor? given, Tensor words, Tensor order, Tensor starts, bool merged, "
    "bool double, int most_words, int heavy_words, int digits) -> (Tensor, Tensor)",
    _decide_pieces,
    _decide_shape,
)
