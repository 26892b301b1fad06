"""Assessment of embeddings a chunk of rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sepc_torch.data.arrays import rows_per_chunk
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.shapes import Float


def judge_rows(
    forward: Callable[[Tensor, Tensor | None], HeadPrediction],
    z: Float[Tensor, "B D"],
    logits: Float[Tensor, "B C"] | None,
    device: torch.device,
) -> HeadPrediction:
    """Apply a head's forward to rows a chunk at a time on a device; the results are on the CPU."""
    step = rows_per_chunk(max(z.shape[1], 1 if logits is None else logits.shape[1]))
    chunks: list[HeadPrediction] = []
    for start in range(0, max(len(z), 1), step):
        rows = slice(start, start + step)
        out = forward(z[rows].to(device), None if logits is None else logits[rows].to(device))
        chunks.append(HeadPrediction(*(column.cpu() for column in out)))
    columns: list[Tensor] = [torch.cat(parts) for parts in zip(*chunks, strict=True)]
    return HeadPrediction(*columns)
