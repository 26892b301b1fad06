r"""Screening kernels: float16 estimates of all distances, and accurate distances where the decision needs them.

1. ``_estimate`` computes every distance by one float16 product.
2. ``_select`` compares each estimate with its error bound
   (:class:`~sepc_torch.model.kernels.rounded_ellipsoids.Rounded`) and lists the pairs of row and ellipsoid whose
   accurate distance can matter.
3. ``_refine`` computes the listed distances with the arithmetic of :mod:`sepc_torch.model.kernels.distances` and
   overwrites the estimates.

Decisions from the resulting distances equal decisions from accurate distances. A pair can matter if

- the estimate leaves open whether the ellipsoid holds the row,
- the ellipsoid may be the nearest of its class, and the class may be the nearest, the second nearest, or that of the
  given label,
- the ellipsoid may be the nearest of its class, and the row may lie in several ellipsoids or be equally near to
  several: then the label is that of a majority, which may be any class.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from sepc_torch.ellipsoid import SURFACE_TOLERANCE
from sepc_torch.model.kernels.distances import load_features, program_shape, tile_distance, tile_scale
from sepc_torch.model.kernels.launch import Launcher, aligned, int_kind, jit
from sepc_torch.model.kernels.nearest import two_least
from sepc_torch.model.kernels.rounded_ellipsoids import Rounded
from sepc_torch.model.kernels.tables import TOP, Split, block_size
from sepc_torch.model.rules import NEAREST_TIE
from sepc_torch.shapes import Float, Int

_LIMIT = 1.0 + SURFACE_TOLERANCE
# Distances that may be equally near, with the rounding of the comparison itself.
_SLACK = 1.0 + 4.0 * NEAREST_TIE
# Program shapes that were fastest on an H200: rows and warps of a program, programs of the last kernel in all and per
# ellipsoid.
_ROWS = 128
_WARPS = 4
_PROGRAMS = 16384
_PROGRAMS_PER_ELLIPSOID = 256
# Programs of the first kernel that occupy a chip of 132 multiprocessors (H200) about twice.
_ESTIMATE_PROGRAMS = 512
# Numbers between counters: counters in one cache line would serialise their atomic additions.
_COUNTER_STRIDE = 32


@jit(do_not_specialize=["points", "count", "per"])
def _estimate(
    z, origin, feature_scale, matrix, bias, unit, out, norms,
    reach, points, count, per, dim, row_stride, column_stride,
    top: tl.constexpr, block: tl.constexpr, blocks: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    live = row < points
    i = tl.arange(0, block)
    start = z + row[:, None].to(tl.int64) * row_stride
    scale, norm, whole = tile_scale(start, live, origin, feature_scale, dim, column_stride, reach, block, blocks)
    factor = (top / scale)[:, None]
    x = (whole * factor).to(tl.float16)
    tl.store(norms + row, norm, mask=live)
    padded: tl.constexpr = block * blocks
    for g in range(per):
        k = tl.minimum(tl.program_id(1) * per + g, count - 1).to(tl.int64)
        squares = tl.zeros([rows], tl.float32)
        for j in tl.static_range(blocks):
            y = tl.zeros([rows, block], tl.float32)
            for b in tl.static_range(j, blocks):
                if blocks > 1:
                    part = load_features(start, live, origin, feature_scale, b * block + i, dim, column_stride)
                    x = (part * factor).to(tl.float16)
                spot = k * (padded * padded) + (b * block + i)[:, None] * padded + (j * block + i)[None, :]
                y = tl.dot(x, tl.load(matrix + spot), y)
            y -= factor * tl.load(bias + k * padded + j * block + i)[None, :]
            squares += tl.sum(y * y, axis=1)
        estimate = tl.sqrt(squares) * (scale / top) * tl.load(unit + k)
        tl.store(out + k * points + row, estimate, mask=live)


_launch_estimate = Launcher(_estimate)


@jit
def _bounds(d, norm, slope, offset, k, relative: tl.constexpr):
    """Lower and upper bound of the distances behind estimates; infinite bounds if the estimate is NaN."""
    error = tl.load(slope + k) * norm + tl.load(offset + k) + relative * d
    least, greatest = d - error, d + error
    least = tl.where(least == least, least, float("-inf"))
    return least, tl.where(greatest == greatest, greatest, float("inf"))


@jit(do_not_specialize=["rows", "classes"])
def _select(
    estimate, norms, slope, offset, given, starts, upper, lists, used,
    rows, classes,
    relative: tl.constexpr, limit: tl.constexpr, slack: tl.constexpr, judging: tl.constexpr, tile: tl.constexpr,
    apart: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    live = row < rows
    norm = tl.load(norms + row, mask=live, other=0.0)
    unset = tl.full([tile], float("inf"), tl.float32)
    zero = row * 0

    # The two least lower bounds of all ellipsoids; the least upper bound of each class, and the two least of those.
    least, second, place = unset, unset, zero
    nearest_class, second_class = unset, unset
    possible, certain = zero, zero
    for c in range(classes):
        bound = unset
        for k in tl.range(tl.load(starts + c), tl.load(starts + c + 1), loop_unroll_factor=4):
            d = tl.load(estimate + k * rows + row, mask=live, other=0.0)
            low, high = _bounds(d, norm, slope, offset, k, relative)
            possible += (low <= limit).to(tl.int32)
            certain += (high <= limit).to(tl.int32)
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
            low, high = _bounds(d, norm, slope, offset, k, relative)
            matters = live & ((low <= enough) | ((low <= limit) & (high > limit)))
            position = tl.atomic_add(used + k * apart + zero, 1, mask=matters, sem="relaxed")
            tl.store(lists + k * rows + position, row, mask=matters)


@jit(do_not_specialize=["points"])
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
        scale, _, whole = tile_scale(start, live, origin, feature_scale, dim, column_stride, reach, block, 1)
        distance = tile_distance(
            start, live, whole, scale, k, origin, feature_scale, centers, high, low, row_scale, dim, column_stride,
            top, block, 1,
        )  # fmt: skip
        tl.store(out + k * points + row, distance, mask=live)


def estimate_into(
    z: Tensor,
    origin: Float[Tensor, "D"],
    bank: Split,
    coarse: Rounded,
    out: Float[Tensor, "K B"],
    norms: Float[Tensor, "B"],
) -> None:
    """Write the float16 estimates of all distances, and the norms of the points, which the error bounds need.

    Every batch is multiplied in tiles of the same shape, so an estimate does not depend on the batch.
    """
    points, dim = z.shape
    count, padded = bank.centers.shape
    block = block_size(dim)
    tiles = -(-points // _ROWS)
    # With few rows a program takes few ellipsoids, so that more programs run.
    per = max(1, min(count, count * tiles // _ESTIMATE_PROGRAMS))
    row_stride, column_stride = z.stride()
    _launch_estimate(
        (tiles, -(-count // per), 1),
        (z.dtype, aligned(z), aligned(origin), aligned(out), dim, int_kind(row_stride), int_kind(column_stride)),
        (z, origin, bank.feature_scale, coarse.matrix, coarse.bias, coarse.unit, out, norms,
         bank.reach, points, count, per, dim, row_stride, column_stride),
        (TOP, block, padded // block, _ROWS), num_warps=_WARPS if padded == block else 2 * _WARPS,
        num_stages=3 if padded == block else 1,
    )  # fmt: skip


def screened_distances(
    z: Tensor,
    given: Int[Tensor, "B"] | None,
    origin: Float[Tensor, "D"],
    bank: Split,
    coarse: Rounded,
    starts: Int[Tensor, "S"],
) -> tuple[Float[Tensor, "K B"], Int[Tensor, "K"]]:
    """Distances that are accurate wherever the decision needs them, and the number of accurate ones per ellipsoid.

    Args:
        z: Points.
        given: Labels whose margin is needed too.
        origin: The origin of the centres.
        bank: Ellipsoids sorted by class, of at most 64 dimensions: more do not fit the registers of the first kernel.
        coarse: The same ellipsoids, rounded.
        starts: First ellipsoid of each class.
    """
    points, dim = z.shape
    count, block = bank.centers.shape
    classes = len(starts) - 1
    out = torch.empty(count, points, dtype=torch.float32, device=z.device)
    upper = torch.empty(classes, points, dtype=torch.float32, device=z.device)
    norms = torch.empty(points, dtype=torch.float32, device=z.device)
    lists = torch.empty(count, points, dtype=torch.int32, device=z.device)
    used = torch.zeros(count, _COUNTER_STRIDE, dtype=torch.int32, device=z.device)
    estimate_into(z, origin, bank, coarse, out, norms)
    _select[(-(-points // _ROWS),)](
        out, norms, coarse.slope, coarse.offset, starts if given is None else given, starts, upper, lists, used,
        points, classes,
        relative=coarse.relative, limit=_LIMIT, slack=_SLACK, judging=given is not None, tile=_ROWS,
        apart=_COUNTER_STRIDE, num_warps=_WARPS,
    )  # fmt: skip
    shape = program_shape(points, count, blocks=1)
    programs = min(_PROGRAMS_PER_ELLIPSOID, max(1, _PROGRAMS // count), -(-points // shape.rows))
    _refine[(programs, count)](
        z, origin, bank.feature_scale, bank.centers, bank.high, bank.low, bank.row_scale, lists, used, out,
        bank.reach, points, dim, z.stride(0), z.stride(1),
        top=TOP, block=block, rows=shape.rows, apart=_COUNTER_STRIDE, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out, used[:, 0]
