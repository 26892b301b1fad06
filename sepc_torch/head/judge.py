"""Assessment of embeddings a chunk of rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data.arrays import rows_per_chunk
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.shapes import Float, Int

# Rows that a GPU takes at a time: more would take more memory and no less time.
GPU_ROWS = 2**17


def forward_in_pieces(forward: Callable[..., HeadPrediction], *tensors: Tensor | None) -> HeadPrediction:
    """Apply a head's forward to pieces of at most :data:`GPU_ROWS` rows: memory does not grow with the batch."""
    pieces = zip(*(_pieces(tensor, len(tensors[0])) for tensor in tensors), strict=True)  # type: ignore[arg-type]
    columns = zip(*(forward(*piece) for piece in pieces), strict=True)
    return HeadPrediction(*(torch.cat(column) for column in columns))


def _pieces(tensor: Tensor | None, rows: int) -> list[Tensor | None]:
    starts = range(0, rows, GPU_ROWS)
    return [None if tensor is None else tensor[start : start + GPU_ROWS] for start in starts]


def judge_rows(
    forward: Callable[..., HeadPrediction],
    z: Float[Tensor, "B D"],
    logits: Float[Tensor, "B C"] | None,
    device: torch.device,
    groups: Int[Tensor, "B"] | None = None,
) -> HeadPrediction:
    """Apply a head's forward to rows a chunk at a time on a device; the results are on the CPU."""
    step = rows_per_chunk(max(z.shape[1], 1 if logits is None else logits.shape[1]))
    chunks: list[HeadPrediction] = []
    for start in range(0, max(len(z), 1), step):
        rows = slice(start, start + step)
        parts = (None if part is None else part[rows].to(device) for part in (logits, None, groups))
        out = forward(z[rows].to(device), *parts)
        chunks.append(HeadPrediction(*(column.cpu() for column in out)))
    columns: list[Tensor] = [torch.cat(column) for column in zip(*chunks, strict=True)]
    return HeadPrediction(*columns)


def group_indices(groups: Any, rows: int) -> Int[Tensor, "B"] | None:
    """Groups of points as a tensor on the CPU, one for each row; None stays None."""
    if groups is None:
        return None
    # A copy: columns of tables may be read-only, and torch warns of such memory.
    given = groups.cpu() if isinstance(groups, Tensor) else torch.from_numpy(np.array(groups))
    if given.shape != (rows,) or given.is_floating_point() or given.dtype == torch.bool:
        raise ValueError(
            f"Expected {rows} groups, one integer for each row; got {given.dtype} of shape {tuple(given.shape)}."
        )
    return given.long()
