r"""Distance kernel: Mahalanobis distances of points to all ellipsoids in one pass.

Each program takes a block of points and a range of ellipsoids. For each ellipsoid it computes :math:`z - c_k` in
float32, splits the result into two float16 numbers (:func:`~sepc_torch.model.kernels.tables.split`), multiplies them on
tensor cores with the triangular factor, and writes one distance per point. It visits only the blocks on and above the
diagonal of the factor.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from sepc_torch.model.kernels.launch import Launcher, aligned, int_kind, jit
from sepc_torch.model.kernels.tables import TOP, Split, block_size
from sepc_torch.shapes import Float

# Programs that occupy a chip of 132 multiprocessors (H200) about twice.
_PROGRAMS = 512


@jit
def power_of_two_above(x):
    """The power of two above a positive float32 number, from its exponent bits."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits & 0x7F800000) + 0x00800000).to(tl.float32, bitcast=True)


@jit
def split_float(x):
    """A float32 block as the sum of two float16 blocks."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@jit
def load_features(start, live, origin, feature_scale, feature, dim, column_stride):
    """Features of a tile of rows, relative to the origin and in units of ``1 / feature_scale``."""
    present = feature < dim
    part = tl.load(start + feature[None, :] * column_stride, mask=live[:, None] & present[None, :], other=0.0)
    part = part.to(tl.float32) - tl.load(origin + feature, mask=present, other=0.0)[None, :]
    # Masked rows would hold minus the origin, which may overflow.
    return tl.where(live[:, None], part, 0.0) * tl.load(feature_scale + feature)[None, :]


@jit
def tile_scale(
    start, live, origin, feature_scale, dim, column_stride, reach, block: tl.constexpr, blocks: tl.constexpr
):  # fmt: skip
    """Scale of every row, its norm, and its last block of features.

    The scale is a power of two above every coordinate of :math:`z - c_k` for every k; ``reach`` is the largest
    coordinate of a centre. The lower limit 8.7e-19 (2^-60) keeps it positive for points and centres at zero.
    """
    i = tl.arange(0, block)
    largest = tl.zeros([live.shape[0]], tl.float32)
    squares = tl.zeros([live.shape[0]], tl.float32)
    for b in tl.static_range(blocks):
        part = load_features(start, live, origin, feature_scale, b * block + i, dim, column_stride)
        largest = tl.maximum(largest, tl.max(tl.abs(part), axis=1))
        squares += tl.sum(part * part, axis=1)
    return power_of_two_above(tl.maximum(largest + reach, 8.7e-19)), tl.sqrt(squares), part


@jit
def tile_distance(
    start, live, whole, scale, k, origin, feature_scale, centers, high, low, row_scale, dim, column_stride,
    top: tl.constexpr, block: tl.constexpr, blocks: tl.constexpr,
):  # fmt: skip
    """Distances of a tile of rows to ellipsoid k.

    With one block of features, ``whole`` holds it. With several blocks the features are loaded again for each.
    """
    i = tl.arange(0, block)
    factor = top / scale
    padded: tl.constexpr = block * blocks
    matrix = k.to(tl.int64) * padded * padded
    squares = tl.zeros([live.shape[0]], tl.float32)
    for j in tl.static_range(blocks):
        y = tl.zeros([live.shape[0], block], tl.float32)
        for b in tl.static_range(j, blocks):
            feature = b * block + i
            c = tl.load(centers + k * padded + feature)
            if blocks == 1:
                x = whole * factor[:, None] - factor[:, None] * c[None, :]
            else:
                part = load_features(start, live, origin, feature_scale, feature, dim, column_stride)
                x = (part - c[None, :]) * factor[:, None]
            x_high, x_low = split_float(x)
            place = matrix + feature[:, None] * padded + (j * block + i)[None, :]
            r_high = tl.load(high + place)
            y = tl.dot(x_high, r_high, y)
            y = tl.dot(x_low, r_high, y)
            y = tl.dot(x_high, tl.load(low + place), y)
        y *= tl.load(row_scale + k * padded + j * block + i)[None, :]
        squares += tl.sum(y * y, axis=1)
    return tl.sqrt(squares) * (scale / top)


@jit(do_not_specialize=["points", "count"], do_not_specialize_on_alignment=["out_row", "out_column"])
def _distances(
    z, origin, feature_scale, centers, high, low, row_scale, out,
    reach, points, count, dim, row_stride, column_stride, out_row, out_column,
    top: tl.constexpr, block: tl.constexpr, blocks: tl.constexpr, rows: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    live = row < points
    start = z + row[:, None].to(tl.int64) * row_stride
    scale, _, whole = tile_scale(start, live, origin, feature_scale, dim, column_stride, reach, block, blocks)
    for g in range(group):
        k = tl.minimum(tl.program_id(1) * group + g, count - 1)
        distance = tile_distance(
            start, live, whole, scale, k, origin, feature_scale, centers, high, low, row_scale, dim, column_stride,
            top, block, blocks,
        )  # fmt: skip
        tl.store(out + row.to(tl.int64) * out_row + k * out_column, distance, mask=live)


_launch = Launcher(_distances)


def distances(z: Tensor, origin: Float[Tensor, "D"], bank: Split) -> Float[Tensor, "B K"]:
    """Distances of points (B, D) in float32, float16 or bfloat16 to the ellipsoids of a bank around an origin."""
    count = bank.centers.shape[0]
    out = torch.empty(z.shape[0], count, dtype=torch.float32, device=z.device)
    distances_into(out, z, origin, bank, count, 1)
    return out


def distances_into(
    out: Tensor,
    z: Tensor,
    origin: Float[Tensor, "D"],
    bank: Split,
    row: int,
    column: int,
) -> None:
    """Write the distances to ``out``, with ``row`` numbers between rows and ``column`` between ellipsoids."""
    points, dim = z.shape
    if points == 0:
        return
    count, padded = bank.centers.shape
    block = block_size(dim)
    shape = program_shape(points, count, padded // block)
    row_stride, column_stride = z.stride()
    _launch(
        (-(-points // shape.rows), -(-count // shape.group), 1),
        (z.dtype, aligned(z), aligned(origin), aligned(out), dim, int_kind(row_stride), int_kind(column_stride),
         int_kind(row), int_kind(column)),
        (z, origin, bank.feature_scale, bank.centers, bank.high, bank.low, bank.row_scale, out,
         bank.reach, points, count, dim, row_stride, column_stride, row, column),
        (TOP, block, padded // block, shape.rows, shape.group),
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip


class Shape(NamedTuple):
    """Points and ellipsoids of a program, its warps, and its pipeline stages."""

    rows: int
    group: int
    warps: int
    stages: int


@functools.lru_cache(maxsize=1024)
def program_shape(points: int, count: int, blocks: int) -> Shape:
    """The program shape that was fastest on an H200.

    Few points take small tiles, so that more programs run. With several blocks of features, two pipeline stages exceed
    the shared memory.
    """
    if blocks == 1:
        rows = next((rows for rows in (16, 32) if points <= rows), 64)
        return Shape(rows, _group(points, count, rows), warps=4, stages=2)
    rows = next((rows for rows in (16, 32, 64) if points <= 64 * rows), 128)
    return Shape(rows, _group(points, count, rows), warps=8 if rows == 128 and blocks > 2 else 4, stages=1)


def _group(points: int, count: int, rows: int) -> int:
    """Ellipsoids per program: all of them if the points alone occupy the chip, else fewer, a power of two."""
    tiles = -(-points // rows)
    return count if tiles >= _PROGRAMS else 1 << (max(1, count * tiles // _PROGRAMS).bit_length() - 1)
