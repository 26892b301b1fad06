"""Embeddings of three classes that overlap, and the logits of a network that knows them fairly well."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sepc_torch.shapes import Array

MEANS = 1.6 * np.eye(3, 5) + 1.0


def draw(rng: np.random.Generator, count: int) -> tuple[Array, Array, Array]:
    """Classes that overlap, one of them rare, and the logits of a network that is fair but too sure of itself."""
    labels = rng.choice(3, count, p=[0.5, 0.4, 0.1])
    labels[:30] = np.arange(30) % 3  # enough of each
    x = MEANS[labels] + rng.normal(size=(count, 5))
    seen = x + rng.normal(size=x.shape)
    return x, labels, -2.0 * ((seen[:, None] - MEANS) ** 2).sum(axis=2)


def batch(x: Array) -> Tensor:
    return torch.from_numpy(x).float()
