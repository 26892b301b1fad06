r"""Density kernels: log densities of all classes, from points or from distances to the regions.

The distances come from the kernel of the ellipsoid bank, always in tiles of the same shape, so the densities of a point
do not depend on its batch. ``_mixtures`` then sums the densities of the regions of each class, in float64.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from sepc_torch.head.kernels.tables import RegionTables
from sepc_torch.model.kernels.distances import distances_into
from sepc_torch.model.kernels.launch import Launcher, aligned, jit, within_32_bits
from sepc_torch.model.kernels.tables import Split, power_of_two
from sepc_torch.shapes import Float

# Distances that a program takes at a time, and the largest number of regions among them.
_TILE, _LANES = 128, 16
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
        each = weight[:, None] - (nu + dim)[:, None] * 0.5 * tl.log(1.0 + d * d / nu[:, None])
        # NaN must not vanish in a maximum: it is taken into the sum.
        greatest = tl.maximum(most, tl.max(each, axis=0))
        shift = tl.where(greatest == float("-inf"), 0.0, greatest)
        total = total * tl.exp(most - shift) + tl.sum(tl.exp(each - shift[None, :]), axis=0)
        most = greatest
    tl.store(out + row.to(tl.int64) * classes + c, most + tl.log(total), mask=live)


_launch = Launcher(_mixtures)


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
