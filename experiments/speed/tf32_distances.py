"""Distances by a plain fused Triton kernel with three TF32 products each, for comparison in ``bench_gpu.py``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _distances(z, centers, transposed, out, points, count: tl.constexpr, dim: tl.constexpr, rows: tl.constexpr):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    live = row < points
    i = tl.arange(0, dim)
    x = tl.load(z + row[:, None].to(tl.int64) * dim + i[None, :], mask=live[:, None], other=0.0)
    for k in range(count):
        c = tl.load(centers + k * dim + i)
        w = tl.load(transposed + k * dim * dim + i[:, None] * dim + i[None, :])
        y = tl.dot(x - c[None, :], w, input_precision="tf32x3")
        tl.store(out + row.to(tl.int64) * count + k, tl.sqrt(tl.sum(y * y, axis=1)), mask=live)


def tf32_distances(z: Tensor, centers: Tensor, transposed: Tensor, rows: int, warps: int) -> Tensor:
    """Distances (B, K) of contiguous float32 points; D and ``rows`` must be powers of two.

    Args:
        z: Points (B, D).
        centers: Centres (K, D).
        transposed: Whiteners transposed, (K, D, D) contiguous.
        rows: Points of one program.
        warps: Warps of one program.
    """
    points, dim = z.shape
    out = torch.empty(points, len(centers), dtype=torch.float32, device=z.device)
    grid = (-(-points // rows),)
    _distances[grid](z, centers, transposed, out, points, count=len(centers), dim=dim, rows=rows, num_warps=warps)
    return out
