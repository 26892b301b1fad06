r"""Density kernels: log densities of all classes, of all points in float32 and of few points in float64.

For all points the distances come from the kernel of the ellipsoid bank, always in tiles of the same shape, so the
densities of a point do not depend on its batch. ``_mixtures`` then sums the densities of the regions of each class;
logarithms are in float64. ``_exact_mixtures`` computes everything in float64, for a list of rows.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from sepc_torch.head.kernels.tables import OpenTables, RegionTables
from sepc_torch.model.kernels.distances import distances_into
from sepc_torch.model.kernels.launch import Launcher, aligned, int_kind, jit, within_32_bits
from sepc_torch.model.kernels.tables import Split, power_of_two
from sepc_torch.shapes import Float, Int

# Distances that a program takes at a time, and the largest number of regions among them.
_TILE, _LANES = 256, 16
# Rows and features of a product in float64.
_EXACT_ROWS, _EXACT_FEATURES = 64, 16
# Bytes of the distances of a piece.
_PIECE_BYTES = 2**28


@jit(do_not_specialize=["points", "dim"])
def _mixtures(
    distance, order, starts, log_weight, freedom, out, points, dim, classes,
    rows: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    live = row < points
    c = tl.program_id(1)
    lane = tl.arange(0, lanes)
    end = tl.load(starts + c + 1)
    most = tl.full([rows], float("-inf"), tl.float64)
    total = tl.zeros([rows], tl.float64)
    for begin in range(tl.load(starts + c), end, lanes):
        there = begin + lane < end
        k = tl.load(order + begin + lane, mask=there, other=0)
        nu = tl.load(freedom + k, mask=there, other=1.0)
        weight = tl.load(log_weight + k, mask=there, other=float("-inf"))
        spot = k[:, None].to(tl.int64) * points + row[None, :]
        d = tl.load(distance + spot, mask=there[:, None] & live[None, :], other=0.0).to(tl.float64)
        each = weight[:, None] - (nu + dim)[:, None] * 0.5 * tl.log(1.0 + d * d * (1.0 / nu)[:, None])
        # NaN must not vanish in a maximum: it is taken into the sum.
        greatest = tl.maximum(most, tl.max(each, axis=0))
        shift = tl.where(greatest == float("-inf"), 0.0, greatest)
        # Errors of exponentials in float32 are far below those of the distances.
        shares = tl.sum(tl.exp((each - shift[None, :]).to(tl.float32)), axis=0)
        total = total * tl.exp((most - shift).to(tl.float32)).to(tl.float64) + shares
        most = greatest
    tl.store(out + row.to(tl.int64) * classes + c, most + tl.log(total), mask=live)


@jit(do_not_specialize=["dim", "row_stride"])
def _exact_mixtures(
    z, origin, offsets, whiteners, order, starts, log_weight, freedom, listed, number, out, dim, row_stride, classes,
    rows: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    count = tl.load(number)
    if tl.program_id(0) * rows >= count:
        return
    slot = tl.program_id(0) * rows + tl.arange(0, rows)
    live = slot < count
    row = tl.load(listed + slot, mask=live, other=0).to(tl.int64)
    c = tl.program_id(1)
    i = tl.arange(0, features)
    most = tl.full([rows], float("-inf"), tl.float64)
    total = tl.zeros([rows], tl.float64)
    for place in range(tl.load(starts + c), tl.load(starts + c + 1)):
        k = tl.load(order + place).to(tl.int64)
        squares = tl.zeros([rows], tl.float64)
        for first in range(0, dim, features):
            y = tl.zeros([rows, features], tl.float64)
            for begin in range(first, dim, features):
                there = begin + i < dim
                spot = z + row[:, None] * row_stride + (begin + i)[None, :]
                x = tl.load(spot, mask=live[:, None] & there[None, :], other=0.0).to(tl.float64)
                x -= tl.load(origin + begin + i, mask=there, other=0.0)[None, :]
                x -= tl.load(offsets + k * dim + begin + i, mask=there, other=0.0)[None, :]
                entry = whiteners + (k * dim + (first + i)[None, :]) * dim + (begin + i)[:, None]
                inside = there[:, None] & (first + i < dim)[None, :]
                y = tl.dot(x, tl.load(entry, mask=inside, other=0.0), y, out_dtype=tl.float64)
            squares += tl.sum(y * y, axis=1)
        nu = tl.load(freedom + k)
        each = tl.load(log_weight + k) - (nu + dim) * 0.5 * tl.log(1.0 + squares / nu)
        greatest = tl.maximum(most, each)
        shift = tl.where(greatest == float("-inf"), 0.0, greatest)
        total = total * tl.exp(most - shift) + tl.exp(each - shift)
        most = greatest
    tl.store(out + row * classes + c, most + tl.log(total), mask=live)


_launch, _launch_exact = Launcher(_mixtures), Launcher(_exact_mixtures)


def log_densities(
    points: Float[Tensor, "B R"], origin: Float[Tensor, "R"], bank: Split, tables: RegionTables
) -> Float[Tensor, "B C"]:
    """Log density of each class at points in float32, in float64."""
    count, dim = bank.centers.shape[0], points.shape[1]
    classes = len(tables.starts) - 1
    points = within_32_bits(points)
    out = torch.empty(len(points), classes, dtype=torch.float64, device=points.device)
    step = max(64, _PIECE_BYTES // (4 * count))
    # As many regions at a time as a class has on average: more would be masked.
    lanes = min(_LANES, power_of_two(-(-count // classes)))
    tile = _TILE // lanes, lanes
    for start in range(0, len(points), step):
        piece = points[start : start + step]
        rows = len(piece)
        distance = torch.empty(count, rows, dtype=torch.float32, device=points.device)
        distances_into(distance, piece, origin, bank, 1, rows, one_shape=True)
        _launch(
            (-(-rows // tile[0]), classes, 1), (aligned(out[start : start + step]), classes == 1, classes % 16 == 0),
            (distance, *tables, out[start : start + step], rows, dim, classes), tile, num_warps=4,
        )  # fmt: skip
    return out


def exact_log_densities(
    out: Float[Tensor, "B C"], rows: Int[Tensor, "B"], number: Int[Tensor, "1"], tables: OpenTables
) -> None:
    """Write the log densities of the first ``number`` of the listed rows to ``out``, from distances in float64."""
    points, classes = tables.points, out.shape[1]
    _launch_exact(
        (-(-len(points) // _EXACT_ROWS), classes, 1), (int_kind(classes), aligned(points), aligned(out)),
        (points, tables.origin, tables.offsets, tables.whiteners,
         tables.order, tables.starts, tables.log_weight, tables.freedom, rows, number, out,
         points.shape[1], points.stride(0), classes),
        (_EXACT_ROWS, _EXACT_FEATURES), num_warps=4, num_stages=1,
    )  # fmt: skip
