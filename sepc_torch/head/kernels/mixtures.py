r"""Density kernels: the log densities that a label's log odds and the largest log density depend on, in float64.

1. ``_estimate`` (:mod:`sepc_torch.model.kernels.screening`) computes the distance to every region by one float16
   product.
2. ``_select`` compares the densities at both ends of the error bound
   (:class:`~sepc_torch.model.kernels.rounded_ellipsoids.Rounded`) and lists the pairs of row and region that can
   matter. A region of the label's class matters if its density may be above :math:`e^{-28}` times the largest one of
   the class. Any other region is compared with the largest one of all other classes.
3. ``_exact`` computes the densities of the listed pairs in float64.
4. ``_mixtures`` sums them for every class. The density of a class without a listed region is zero.

The result of a row does not depend on its batch.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from sepc_torch.head.kernels.tables import RegionTables, WideRegions
from sepc_torch.model.kernels.launch import Launcher, aligned, int_kind, jit
from sepc_torch.model.kernels.rounded_ellipsoids import Rounded
from sepc_torch.model.kernels.screening import estimate_into
from sepc_torch.model.kernels.tables import Split, power_of_two
from sepc_torch.shapes import Float, Int

# Log of the largest density over the densities that are left out: each has less than 10^-12 of the largest one.
_CUT = 28.0
# Rows and regions that a program of _select takes at a time, with few and with many rows, and the number from which
# there are many.
_FEW, _MANY, _MANY_ROWS = (1, 256), (32, 16), 2**13
# Numbers between counters: counters in one cache line would serialise their atomic additions.
_APART = 32
# Rows and features of a product in float64, and the most programs for one region.
_EXACT_ROWS, _EXACT_FEATURES, _PROGRAMS = 64, 16, 64
# Pairs that a program of _mixtures takes at a time, with few and with many rows, and the most regions among them.
_SMALL_TILE, _TILE, _LANES = 128, 1024, 8
# Bytes of the estimates, lists and densities of a piece.
_PIECE_BYTES = 2**29


@jit
def _log1p(x):
    """The log of 1 + x, with the digits of a small x."""
    total = 1.0 + x
    return tl.where(total == 1.0, x, tl.log(total) * (x / tl.where(total == 1.0, 1.0, total - 1.0)))


@jit
def _log_density(d, nu, power, weight, side: tl.constexpr):
    """Log density of Student's t at distance d in float32, rounded down (``side`` 1) or up (-1).

    9.5e-7 (2^-20) covers the rounding errors. The square of a large distance would overflow.
    """
    ratio = d * (1.0 / tl.sqrt(nu))
    fall = power * tl.where(ratio < 1e6, _log1p(ratio * ratio), 2.0 * tl.log(ratio))
    return weight - fall - side * 9.5367431640625e-07 * (tl.abs(weight) + fall)


@jit
def _bound(
    estimate, slope, offset, log_weight, freedom, codes, norm, given, k, row, live, points, count, dim,
    relative: tl.constexpr, side: tl.constexpr,
):  # fmt: skip
    """Log densities of regions k at the largest (``side`` 1) or least (-1) possible distances of rows.

    Also returns whether a region is of the given class, where the estimates are, and whether there are such. Without a
    finite estimate the bound is minus or plus infinity.
    """
    there = k < count
    spot = k[:, None].to(tl.int64) * points + row[None, :]
    inside = there[:, None] & live[None, :]
    d = tl.load(estimate + spot, mask=inside, other=0.0)
    error = tl.load(slope + k, mask=there, other=0.0)[:, None] * norm[None, :]
    error += tl.load(offset + k, mask=there, other=0.0)[:, None] + relative * d
    nu = tl.load(freedom + k, mask=there, other=1.0).to(tl.float32)[:, None]
    weight = tl.load(log_weight + k, mask=there, other=float("-inf")).to(tl.float32)[:, None]
    value = _log_density(tl.maximum(d + side * error, 0.0), nu, (nu + dim) * 0.5, weight, side)
    value = tl.where(d + error < float("inf"), value, -side * float("inf"))
    return value, tl.load(codes + k, mask=there, other=-1)[:, None] == given[None, :], spot, inside


@jit(do_not_specialize=["points", "count", "dim"])
def _select(
    estimate, norms, slope, offset, log_weight, freedom, codes, label, lists, used, points, count, dim,
    relative: tl.constexpr, cut: tl.constexpr, rows: tl.constexpr, lanes: tl.constexpr, apart: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    live = row < points
    lane = tl.arange(0, lanes)
    norm = tl.load(norms + row, mask=live, other=0.0)
    given = tl.maximum(tl.load(label + row, mask=live, other=0), 0)
    unset = float("-inf")
    most_own, most_other = tl.full([rows], unset, tl.float32), tl.full([rows], unset, tl.float32)
    for begin in range(0, count, lanes):
        least, own, _, _ = _bound(
            estimate, slope, offset, log_weight, freedom, codes, norm, given, begin + lane, row, live, points, count,
            dim, relative, 1,
        )  # fmt: skip
        most_own = tl.maximum(most_own, tl.max(tl.where(own, least, unset), axis=0))
        most_other = tl.maximum(most_other, tl.max(tl.where(own, unset, least), axis=0))
    for begin in range(0, count, lanes):
        k = begin + lane
        greatest, own, spot, inside = _bound(
            estimate, slope, offset, log_weight, freedom, codes, norm, given, k, row, live, points, count, dim,
            relative, -1,
        )  # fmt: skip
        matters = inside & ~(greatest < tl.where(own, most_own[None, :], most_other[None, :]) - cut)
        counter = used + k[:, None] * apart + row[None, :] * 0
        position = tl.atomic_add(counter, 1, mask=matters, sem="relaxed")
        tl.store(lists + k[:, None].to(tl.int64) * points + position, row[None, :] + k[:, None] * 0, mask=matters)
        # The estimate is not needed again; the mark tells the last kernel to take the density.
        tl.store(estimate + spot, tl.full([lanes, rows], -1.0, tl.float32), mask=matters)


@jit(do_not_specialize=["points", "dim", "row_stride"])
def _exact(
    z, origin, offsets, whiteners, log_weight, freedom, lists, used, out, points, dim, row_stride,
    rows: tl.constexpr, features: tl.constexpr, apart: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(1).to(tl.int64)
    number = tl.load(used + k * apart)
    i = tl.arange(0, features)
    nu, weight = tl.load(freedom + k), tl.load(log_weight + k)
    for begin in range(tl.program_id(0) * rows, number, tl.num_programs(0) * rows):
        slot = begin + tl.arange(0, rows)
        live = slot < number
        row = tl.load(lists + k * points + slot, mask=live, other=0).to(tl.int64)
        squares = tl.zeros([rows], tl.float64)
        for first in range(0, dim, features):
            y = tl.zeros([rows, features], tl.float64)
            for start in range(first, dim, features):
                there = start + i < dim
                spot = z + row[:, None] * row_stride + (start + i)[None, :]
                x = tl.load(spot, mask=live[:, None] & there[None, :], other=0.0).to(tl.float64)
                x -= tl.load(origin + start + i, mask=there, other=0.0)[None, :]
                x -= tl.load(offsets + k * dim + start + i, mask=there, other=0.0)[None, :]
                entry = whiteners + (k * dim + (first + i)[None, :]) * dim + (start + i)[:, None]
                inside = there[:, None] & (first + i < dim)[None, :]
                y = tl.dot(x, tl.load(entry, mask=inside, other=0.0), y, out_dtype=tl.float64)
            squares += tl.sum(y * y, axis=1)
        each = weight - (nu + dim) * 0.5 * _log1p(squares / nu)
        tl.store(out + k * points + row, each, mask=live)


@jit(do_not_specialize=["points"])
def _mixtures(
    marked, density, order, starts, out, points, classes, rows: tl.constexpr, lanes: tl.constexpr
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
        spot = k[:, None].to(tl.int64) * points + row[None, :]
        matters = tl.load(marked + spot, mask=there[:, None] & live[None, :], other=0.0) < 0.0
        each = tl.load(density + spot, mask=matters, other=float("-inf"))
        # NaN must not vanish in a maximum: it is taken into the sum.
        greatest = tl.maximum(most, tl.max(each, axis=0))
        shift = tl.where(greatest == float("-inf"), 0.0, greatest)
        total = total * tl.exp(most - shift) + tl.sum(tl.exp(each - shift[None, :]), axis=0)
        most = greatest
    tl.store(out + row.to(tl.int64) * classes + c, most + tl.log(total), mask=live)


_launch_select, _launch_exact, _launch_mixtures = Launcher(_select), Launcher(_exact), Launcher(_mixtures)


def log_densities(
    points: Float[Tensor, "B R"],
    label: Int[Tensor, "B"],
    origin: Float[Tensor, "R"],
    bank: Split,
    coarse: Rounded,
    tables: RegionTables,
    wide: WideRegions,
) -> Float[Tensor, "B C"]:
    """Log densities of the classes at points in float32, in float64: those that matter to labels, others -inf.

    Args:
        points: The points; R is the number of coordinates.
        label: The labels as indices into the classes; -1 is taken for 0.
        origin: The origin of the centres in float32.
        bank: The ellipsoids of the regions.
        coarse: The same ellipsoids, rounded.
        tables: The regions by class.
        wide: The ellipsoids in float64.
    """
    count, classes = bank.centers.shape[0], len(tables.starts) - 1
    points, label = points.contiguous(), label.contiguous()
    out = torch.empty(len(points), classes, dtype=torch.float64, device=points.device)
    step = power_of_two(max(64, _PIECE_BYTES // (16 * count)) + 1) // 2  # rounded down, so that pieces fill the chip
    for start in range(0, len(points), step):
        some = slice(start, start + step)
        _piece_into(out[some], points[some], label[some], origin, bank, coarse, tables, wide)
    return out


def _piece_into(
    out: Tensor,
    z: Tensor,
    label: Tensor,
    origin: Tensor,
    bank: Split,
    coarse: Rounded,
    tables: RegionTables,
    wide: WideRegions,
) -> None:
    points, dim = z.shape
    count, classes = bank.centers.shape[0], out.shape[1]
    estimate = torch.empty(count, points, dtype=torch.float32, device=z.device)
    norms = torch.empty(points, dtype=torch.float32, device=z.device)
    lists = torch.empty(count, points, dtype=torch.int32, device=z.device)
    density = torch.empty(count, points, dtype=torch.float64, device=z.device)
    used = torch.zeros(count, _APART, dtype=torch.int32, device=z.device)
    estimate_into(z, origin, bank, coarse, estimate, norms)
    rows, lanes = _MANY if points >= _MANY_ROWS else (_FEW[0], min(_FEW[1], power_of_two(count)))
    _launch_select(
        (-(-points // rows), 1, 1), (label.dtype, aligned(label)),
        (estimate, norms, coarse.slope, coarse.offset, tables.log_weight, tables.freedom, wide.codes, label, lists,
         used, points, count, dim),
        (coarse.relative, _CUT, rows, lanes, _APART), num_warps=4,
    )  # fmt: skip
    _launch_exact(
        (min(_PROGRAMS, -(-points // _EXACT_ROWS)), count, 1), (aligned(z), int_kind(z.stride(0))),
        (z, *wide[1:], tables.log_weight, tables.freedom, lists, used, density, points, dim, z.stride(0)),
        (_EXACT_ROWS, _EXACT_FEATURES, _APART), num_warps=4, num_stages=1,
    )  # fmt: skip
    # As many regions at a time as a class has on average: more would be masked.
    lanes = min(_LANES, power_of_two(-(-count // classes)))
    rows = (_TILE if points >= _MANY_ROWS else _SMALL_TILE) // lanes
    _launch_mixtures(
        (-(-points // rows), classes, 1), (aligned(out), int_kind(classes)),
        (estimate, density, tables.order, tables.starts, out, points, classes), (rows, lanes), num_warps=4,
    )  # fmt: skip
