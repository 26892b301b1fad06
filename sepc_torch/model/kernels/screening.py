r"""Distances that decide, at the speed of float16: screen all, compute again the few that matter.

Three kernels take turns. The first estimates every distance by one product of float16 numbers. The second holds each
estimate against its bound (:mod:`sepc_torch.model.kernels.bounds`) and lists the pairs of row and ellipsoid for which the
exact number matters. The third computes these with the arithmetic of :mod:`sepc_torch.model.kernels.fused` and writes them
over the estimates. Whoever reads the result as if all of it were exact decides as if it were; a pair matters if

- the estimate leaves open whether the ellipsoid holds the row,
- it may be the nearest of its class, and that class the nearest or the second, or the class of the given label,
- it may be the nearest of its class, and the row may lie in several ellipsoids or be equally near to several: then the
  label is that of a majority, which may be of any class.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sepc_torch.model.kernels.bounds import Screen
from sepc_torch.model.kernels.fused import program_shape, tile_distance, tile_size
from sepc_torch.model.kernels.lookup import LAYOUT, LIMIT
from sepc_torch.model.kernels.nearest import two_least
from sepc_torch.model.kernels.resolving import room_for
from sepc_torch.model.kernels.splitting import TOP, Split
from sepc_torch.model.rules import NEAREST_TIE
from sepc_torch.shapes import Float, Int

# What may be equally near, with the rounding of this comparison itself.
_SLACK = 1.0 + 4.0 * NEAREST_TIE
# Programs of the last kernel for all ellipsoids together, and for one of them.
_PROGRAMS = 16384
_MOST_OF_ONE = 256
_ROWS = 128
_ESTIMATE_ROWS = 128
_WARPS = 4
# Counters stand so many numbers apart: in one cache line they would all wait for each other.
_APART = 32


@triton.jit(do_not_specialize=["points", "count"])
def _estimate(
    z, origin, feature_scale, matrix, bias, unit, out, norms,
    reach, points, count, dim, row_stride, column_stride,
    top: tl.constexpr, block: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    live = row < points
    i = tl.arange(0, block)
    start = z + row[:, None].to(tl.int64) * row_stride
    size, norm, whole = tile_size(start, live, origin, feature_scale, dim, column_stride, reach, block, 1)
    factor = (top / size)[:, None]
    x = (whole * factor).to(tl.float16)
    tl.store(norms + row, norm, mask=live)
    for k in range(count):
        y = tl.dot(x, tl.load(matrix + k * block * block + i[:, None] * block + i[None, :]))
        y -= factor * tl.load(bias + k * block + i)[None, :]
        estimate = tl.sqrt(tl.sum(y * y, axis=1)) * (size / top) * tl.load(unit + k)
        tl.store(out + k * points + row, estimate, mask=live)


@triton.jit
def _bounded(d, norm, slope, offset, k, relative: tl.constexpr):
    """The least and the greatest that the distances behind estimates can be; what is not a number may be anything."""
    error = tl.load(slope + k) * norm + tl.load(offset + k) + relative * d
    least, greatest = d - error, d + error
    least = tl.where(least == least, least, float("-inf"))
    return least, tl.where(greatest == greatest, greatest, float("inf"))


@triton.jit(do_not_specialize=["rows", "classes"])
def _select(
    estimate, norms, slope, offset, given, starts, upper, lists, used,
    rows, classes,
    relative: tl.constexpr, slack: tl.constexpr, judging: tl.constexpr, tile: tl.constexpr, apart: tl.constexpr,
    _layout: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    live = row < rows
    norm = tl.load(norms + row, mask=live, other=0.0)
    unset = tl.full([tile], float("inf"), tl.float32)
    zero = row * 0

    # The two least lower bounds, of every class the least upper bound, and the two least of these.
    least, second, place = unset, unset, zero
    nearest_class, second_class = unset, unset
    possible, certain = zero, zero
    for c in range(classes):
        bound = unset
        for k in tl.range(tl.load(starts + c), tl.load(starts + c + 1), loop_unroll_factor=4):
            d = tl.load(estimate + k * rows + row, mask=live, other=0.0)
            low, high = _bounded(d, norm, slope, offset, k, relative)
            possible += (low <= LIMIT).to(tl.int32)
            certain += (high <= LIMIT).to(tl.int32)
            least, place, second = two_least(low, k, least, place, second)
            bound = tl.minimum(bound, high)
        tl.store(upper + c * rows + row, bound, mask=live)
        second_class = tl.minimum(second_class, tl.maximum(nearest_class, bound))
        nearest_class = tl.minimum(nearest_class, bound)

    single = (possible == 1) & (certain == 1)
    any_class = (possible > 1) | (~single & (second <= nearest_class * slack))
    theirs = zero - 1
    if judging:
        theirs = tl.load(given + row, mask=live, other=-1).to(tl.int32)
    for c in range(classes):
        enough = tl.load(upper + c * rows + row, mask=live, other=0.0)
        enough = tl.where(any_class | (theirs == c), enough, tl.minimum(enough, second_class)) * slack
        for k in tl.range(tl.load(starts + c), tl.load(starts + c + 1), loop_unroll_factor=4):
            d = tl.load(estimate + k * rows + row, mask=live, other=0.0)
            low, high = _bounded(d, norm, slope, offset, k, relative)
            matters = live & ((low <= enough) | ((low <= LIMIT) & (high > LIMIT)))
            position = tl.atomic_add(used + k * apart + zero, 1, mask=matters, sem="relaxed")
            tl.store(lists + k * rows + position, row, mask=matters)


@triton.jit(do_not_specialize=["points"])
def _refine(
    z, origin, feature_scale, centers, high, low, row_scale, lists, used, out,
    reach, points, dim, row_stride, column_stride,
    top: tl.constexpr, block: tl.constexpr, rows: tl.constexpr, apart: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(1)
    number = tl.load(used + k * apart)
    for begin in range(tl.program_id(0) * rows, number, tl.num_programs(0) * rows):
        at = begin + tl.arange(0, rows)
        live = at < number
        row = tl.load(lists + k * points + at, mask=live, other=0)
        start = z + row[:, None].to(tl.int64) * row_stride
        size, _, whole = tile_size(start, live, origin, feature_scale, dim, column_stride, reach, block, 1)
        distance = tile_distance(
            start, live, whole, size, k, origin, feature_scale, centers, high, low, row_scale, dim, column_stride,
            top, block, 1,
        )  # fmt: skip
        tl.store(out + k * points + row, distance, mask=live)


def estimate(
    z: Tensor,
    origin: Float[Tensor, "D"],
    bank: Split,
    coarse: Screen,
    out: Float[Tensor, "K B"],
    norms: Float[Tensor, "B"],
) -> None:
    """Distances from one product of float16 numbers, and the norms of the points, which bounds need."""
    points, dim = z.shape
    count, block = bank.centers.shape
    _estimate[(-(-points // _ESTIMATE_ROWS),)](
        z, origin, bank.feature_scale, coarse.matrix, coarse.bias, coarse.unit, out, norms,
        bank.reach, points, count, dim, z.stride(0), z.stride(1),
        top=TOP, block=block, rows=_ESTIMATE_ROWS, num_warps=_WARPS, num_stages=3,
    )  # fmt: skip


def screened(
    z: Tensor,
    given: Int[Tensor, "B"] | None,
    origin: Float[Tensor, "D"],
    bank: Split,
    coarse: Screen,
    starts: Int[Tensor, "S"],
) -> tuple[Float[Tensor, "R B"], Int[Tensor, "K"]]:
    """Distances of which those that matter are accurate, with room for patterns, and how many of every ellipsoid are.

    Args:
        z: Points.
        given: Labels whose margin matters too.
        origin: What the centres are relative to.
        bank: Ellipsoids by class, of at most 64 dimensions: more do not fit the first kernel's registers.
        coarse: The same, rounded.
        starts: Where each class begins.
    """
    points, dim = z.shape
    count, block = bank.centers.shape
    classes = len(starts) - 1
    out = room_for(count, points, origin)
    room = torch.empty(classes + 1, points, dtype=torch.float32, device=z.device)
    lists = torch.empty(count, points, dtype=torch.int32, device=z.device)
    used = torch.zeros(count, _APART, dtype=torch.int32, device=z.device)
    estimate(z, origin, bank, coarse, out, room[classes])
    _select[(-(-points // _ROWS),)](
        out, room[classes], coarse.slope, coarse.offset, starts if given is None else given, starts, room, lists, used,
        points, classes,
        relative=coarse.relative, slack=_SLACK, judging=given is not None, tile=_ROWS, apart=_APART, _layout=LAYOUT,
        num_warps=_WARPS,
    )  # fmt: skip
    shape = program_shape(points, count, blocks=1)
    programs = min(_MOST_OF_ONE, max(1, _PROGRAMS // count), -(-points // shape.rows))
    _refine[(programs, count)](
        z, origin, bank.feature_scale, bank.centers, bank.high, bank.low, bank.row_scale, lists, used, out,
        bank.reach, points, dim, z.stride(0), z.stride(1),
        top=TOP, block=block, rows=shape.rows, apart=_APART, num_warps=shape.warps,
        num_stages=shape.stages,
    )  # fmt: skip
    return out, used[:, 0]
