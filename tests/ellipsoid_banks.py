"""Banks of ellipsoids for the tests of the kernel."""

from __future__ import annotations

import numpy as np
import torch


def bank_of(
    rng: np.random.Generator, count: int, dim: int, triangular: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Centres and whiteners with axes of very different lengths and features of very different scale."""
    scale = 10.0 ** rng.uniform(-3, 3, size=dim)
    whiteners = rng.normal(size=(count, dim, dim)) / np.sqrt(dim) + 2 * np.eye(dim)
    whiteners *= 10.0 ** rng.uniform(-2, 2, size=(count, dim, 1))
    if triangular:
        whiteners = np.triu(whiteners)
    return torch.from_numpy(rng.normal(size=(count, dim)) * scale), torch.from_numpy(whiteners / scale)
