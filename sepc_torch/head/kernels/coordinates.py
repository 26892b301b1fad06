r"""Coordinate kernels: all projections of embeddings in one launch, the distance to the nearest mean, means of maps.

A program of ``_project`` takes a block of rows and a block of output columns, in float64. Every batch uses the same
tiles, so the coordinates of a row do not depend on its batch. ``_nearest_mean`` compares one row with all class means.
``_average`` takes the mean of some channels of one map or sequence over its positions.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from sepc_torch.head.kernels.tables import COLUMNS, GaussianTables, LinearTables
from sepc_torch.model.kernels.launch import Launcher, aligned, int_kind, jit
from sepc_torch.shapes import Float

# Rows of a program and features of a product: the fastest tiles for a row and for 2^17 rows (measured on an H200).
_ROWS, _FEATURES = 16, 16
# Class means that are compared at a time.
_MEANS = 16
# Channels and positions of a tile of a map: among the fastest for maps of 8 to 64 pixels in either layout, 2 to 6
# times as fast as torch's mean in float64 (measured on an H200).
_CHANNELS, _POSITIONS = 16, 64


@jit(do_not_specialize=["points", "dim", "row_stride"])
def _project(
    z, matrix, shift, scale, blocks, bounds, first, second, wide, square, covered, points, dim, row_stride,
    columns: tl.constexpr, features: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    live = row < points
    b = tl.program_id(1)
    lengths, width = tl.load(blocks + 5 * b), tl.load(blocks + 5 * b + 1)
    target, column, stride = tl.load(blocks + 5 * b + 2), tl.load(blocks + 5 * b + 3), tl.load(blocks + 5 * b + 4)
    start = z + row.to(tl.int64) * row_stride
    least, longest = tl.load(bounds), tl.load(bounds + 1)
    length = tl.zeros([rows], tl.float64) + 1.0
    k = tl.arange(0, features)
    if lengths > 0:
        squares = tl.zeros([rows], tl.float64)
        for begin in range(0, dim, features):
            there = live[:, None] & (begin + k < dim)[None, :]
            x = tl.load(start[:, None] + begin + k[None, :], mask=there, other=0.0).to(tl.float64)
            squares += tl.sum(x * x, axis=1)
        length = tl.sqrt(squares)
        valid = length <= longest
        if lengths == 1:
            valid = valid & (length > 0.0)
        else:
            length = tl.maximum(length, least)
        length = tl.where(valid, length, float("nan"))
    factor = 1.0 / length
    i = tl.arange(0, columns)
    weights = matrix + b.to(tl.int64) * (dim + 1) * columns + i
    centre = shift + b.to(tl.int64) * (dim + 1)
    y = tl.zeros([rows, columns], tl.float64)
    total = tl.zeros([rows], tl.float64)
    for begin in range(0, dim, features):
        there = begin + k < dim
        x = tl.load(start[:, None] + begin + k[None, :], mask=live[:, None] & there[None, :], other=0.0).to(tl.float64)
        feature = x * factor[:, None] - tl.load(centre + begin + k, mask=there, other=0.0)[None, :]
        weight = tl.load(weights[None, :] + (begin + k)[:, None] * columns, mask=there[:, None], other=0.0)
        y = tl.dot(feature, weight, y, out_dtype=tl.float64)
        total += tl.sum(feature * feature, axis=1)
    if lengths == 2:
        feature = tl.log(length) - tl.load(centre + dim)
        y += feature[:, None] * tl.load(weights + dim * columns)[None, :]
        total += feature * feature
    place = row[:, None].to(tl.int64) * stride + column + i[None, :]
    inside = live[:, None] & (i < width)[None, :]
    if target == 0:
        tl.store(first + place, y.to(tl.float32), mask=inside)
        part = y * tl.load(scale + b * columns + i)[None, :]
        tl.store(covered + b.to(tl.int64) * points + row, tl.sum(part * part, axis=1), mask=live)
        if column == 0:
            tl.store(square + row, total, mask=live)
    elif target == 1:
        tl.store(second + place, y.to(tl.float32), mask=inside)
    else:
        tl.store(wide + place, y, mask=inside)


@jit(do_not_specialize=["points", "classes", "parts", "dim"])
def _nearest_mean(
    white, means, square, covered, outside, out, points, classes, parts, dim,
    columns: tl.constexpr, rows: tl.constexpr, one_tile: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i, c = tl.arange(0, columns), tl.arange(0, rows)
    if one_tile:
        squares = _squares(white + row * dim, means, c, i, classes, dim)
        least = tl.where(c < classes, squares, float("inf"))
    else:
        least = tl.full([rows], float("inf"), tl.float64)
        for begin in range(0, classes, rows):
            squares = tl.zeros([rows], tl.float64)
            for start in range(0, dim, columns):
                squares += _squares(white + row * dim, means, begin + c, start + i, classes, dim)
            least = tl.minimum(least, tl.where(begin + c < classes, squares, float("inf")))
    rest = tl.load(square + row)
    valid = rest == rest
    spot = covered + row
    for _ in range(parts):
        rest -= tl.load(spot)
        spot += points
    value = tl.min(least, axis=0) + tl.maximum(rest, 0.0) / tl.load(outside)
    tl.store(out + row, tl.where(valid, value, float("nan")))


@jit
def _squares(white, means, c, i, classes, dim):
    """Squared distance of a row to means c, of features i."""
    x = tl.load(white + i, mask=i < dim, other=0.0)
    there = (c < classes)[:, None] & (i < dim)[None, :]
    apart = tl.load(means + c[:, None] * dim + i[None, :], mask=there, other=0.0) - x[None, :]
    return tl.sum(apart * apart, axis=1)


@jit(do_not_specialize=["channels", "positions", "step", "channel_step", "position_step"])
def _average(
    x, out, channels, positions, step, channel_step, position_step,
    dense: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * rows + tl.arange(0, rows)
    p = tl.arange(0, columns)
    # Steps of 1 that the compiler knows let it load neighbours together.
    beside_c = c.to(tl.int64) if dense == 1 else c.to(tl.int64) * channel_step
    total = tl.zeros([rows, columns], tl.float64)
    for begin in range(0, positions, columns):
        there = (c < channels)[:, None] & (begin + p < positions)[None, :]
        beside_p = (begin + p).to(tl.int64) if dense == 2 else (begin + p).to(tl.int64) * position_step
        total += tl.load(x + b * step + beside_c[:, None] + beside_p[None, :], mask=there, other=0.0).to(tl.float64)
    mean = tl.sum(total, axis=1) / positions
    tl.store(out + b * channels + c, mean.to(tl.float32), mask=c < channels)


_launch_project, _launch_mean, _launch_average = Launcher(_project), Launcher(_nearest_mean), Launcher(_average)


def mean_of_positions(x: Float[Tensor, "B C P"]) -> Float[Tensor, "B C"]:
    """The mean over the positions, summed in float64 in an order that does not depend on the batch."""
    count, channels, positions = x.shape
    out = torch.empty(count, channels, dtype=x.dtype, device=x.device)
    steps = x.stride()
    dense = 2 if steps[2] == 1 else 1 if steps[1] == 1 else 0
    if count:
        _launch_average(
            (count, -(-channels // _CHANNELS), 1), (x.dtype, aligned(x), *(int_kind(step)[2] for step in steps)),
            (x, out, channels, positions, *steps), (dense, _CHANNELS, _POSITIONS), num_warps=4,
        )  # fmt: skip
    return out


def project(
    z: Float[Tensor, "B D"], tables: LinearTables, widths: list[int], gaussian: GaussianTables | None
) -> list[Tensor]:
    """Coordinates of one or two projections (B, R) in float32 and, with a Gaussian, squared distances (B,) in float64.

    Args:
        z: The embeddings in float32.
        tables: The projections.
        widths: Numbers of coordinates of the projections.
        gaussian: Class means in coordinates that the tables have as a last, wide projection.
    """
    points, dim = z.shape
    z = z if z.stride(1) == 1 else z.contiguous()
    narrow = [torch.empty(points, width, dtype=torch.float32, device=z.device) for width in widths]
    parts = -(-widths[0] // COLUMNS)
    white = torch.empty(points if gaussian else 1, widths[0], dtype=torch.float64, device=z.device)
    sums = torch.empty(1 + parts, points, dtype=torch.float64, device=z.device)
    if points == 0:
        return [*narrow, sums[0]] if gaussian else narrow
    _launch_project(
        (-(-points // _ROWS), len(tables.blocks), 1), (aligned(z), points % 2 == 0),
        (z, *tables, narrow[0], narrow[-1], white, sums[0], sums[1:], points, dim, z.stride(0)),
        (COLUMNS, _FEATURES, _ROWS), num_warps=2, num_stages=1,
    )  # fmt: skip
    if not gaussian:
        return narrow
    out = torch.empty(points, dtype=torch.float64, device=z.device)
    one_tile = len(gaussian.means) <= _MEANS and widths[0] <= 2 * COLUMNS  # a loop would double the time
    _launch_mean(
        (points, 1, 1), (points % 2 == 0,),
        (white, gaussian.means, sums[0], sums[1:], gaussian.outside, out,
         points, len(gaussian.means), parts, widths[0]),
        (2 * COLUMNS, _MEANS, one_tile), num_warps=1,
    )  # fmt: skip
    return [*narrow, out]
