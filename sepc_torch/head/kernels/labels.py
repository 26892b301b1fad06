"""Label kernels: the network's labels from logits; label -1, trust 0 and margin NaN for rows without a label."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from sepc_torch.model.kernels.launch import Launcher, aligned, int_kind, jit
from sepc_torch.model.kernels.tables import power_of_two
from sepc_torch.shapes import Bool, Float, Int

# Numbers that a program takes at a time, and the largest number of classes among them.
_TILE, _CLASSES = 1024, 64
# Rows of a program that masks them.
_ROWS = 128


@jit(do_not_specialize=["points", "classes", "row_stride", "column_stride"])
def _largest(
    logits, label, missing, points, classes, row_stride, column_stride, rows: tl.constexpr, lanes: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    live = row < points
    lane = tl.arange(0, lanes)
    most = tl.full([rows], float("-inf"), tl.float64)
    found = tl.zeros([rows], tl.int32)
    undefined = tl.zeros([rows], tl.int32)
    equals = tl.zeros([rows], tl.int32)
    for begin in range(0, classes, lanes):
        c = begin + lane
        there = live[:, None] & (c < classes)[None, :]
        spot = row[:, None].to(tl.int64) * row_stride + c[None, :].to(tl.int64) * column_stride
        x = tl.load(logits + spot, mask=there, other=float("-inf")).to(tl.float64)
        undefined += tl.sum((x != x).to(tl.int32), axis=1)
        x = tl.where(x == x, x, float("-inf"))
        largest = tl.max(x, axis=1)
        same = x == largest[:, None]
        # The first of equal logits, and their number.
        first = tl.min(tl.where(same, c[None, :], classes), axis=1)
        found = tl.where(largest > most, first, found)
        number = tl.sum(same.to(tl.int32), axis=1)
        equals = tl.where(largest > most, number, tl.where(largest == most, equals + number, equals))
        most = tl.maximum(most, largest)
    tl.store(label + row, found.to(tl.int64), mask=live)
    gone = (undefined > 0) | (equals > 1) | (most == float("-inf"))
    tl.store(missing + row, gone, mask=live)


@jit(do_not_specialize=["points"])
def _mask(label, trust, margin, missing, label_out, trust_out, margin_out, points, rows: tl.constexpr):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    live = row < points
    gone = tl.load(missing + row, mask=live, other=0).to(tl.int1)
    tl.store(label_out + row, tl.where(gone, -1, tl.load(label + row, mask=live, other=0)), mask=live)
    tl.store(trust_out + row, tl.where(gone, 0.0, tl.load(trust + row, mask=live, other=0.0)), mask=live)
    tl.store(margin_out + row, tl.where(gone, float("nan"), tl.load(margin + row, mask=live, other=0.0)), mask=live)


_launch_largest, _launch_mask = Launcher(_largest), Launcher(_mask)


def largest_logits(logits: Float[Tensor, "B C"]) -> tuple[Int[Tensor, "B"], Bool[Tensor, "B"]]:
    """The class of the largest logit, and the rows whose logits define no class."""
    points, classes = logits.shape
    label = torch.empty(points, dtype=torch.int64, device=logits.device)
    missing = torch.empty(points, dtype=torch.bool, device=logits.device)
    lanes = min(_CLASSES, power_of_two(classes))
    rows = _TILE // lanes
    if points:
        _launch_largest(
            (-(-points // rows), 1, 1),
            (logits.dtype, aligned(logits), *(int_kind(step)[2] for step in logits.stride())),
            (logits, label, missing, points, classes, *logits.stride()), (rows, lanes), num_warps=4,
        )  # fmt: skip
    return label, missing


def mask_missing(
    label: Int[Tensor, "B"], trust: Float[Tensor, "B"], margin: Float[Tensor, "B"], missing: Bool[Tensor, "B"]
) -> list[Tensor]:
    """Label, trust and margin with -1, zero and NaN in the rows without a label."""
    given = tuple(part.contiguous() for part in (label, trust, margin, missing))
    out = [torch.empty_like(part) for part in given[:3]]
    points = len(label)
    if points:
        _launch_mask(
            (-(-points // _ROWS), 1, 1), (trust.dtype, margin.dtype, *map(aligned, given)),
            (*given, *out, points), (_ROWS,), num_warps=4,
        )  # fmt: skip
    return out
