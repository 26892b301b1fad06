"""AURC and AUROC of many bootstrap resamples at once; a resample is given by its count of every row."""

from __future__ import annotations

import numpy as np
from torch import Tensor, cat


def resampled_aurc(score: Tensor, loss: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The area under the risk-coverage curve of every resample, from its counts of the rows."""
    order = score.argsort(descending=True, stable=True).numpy()
    held = counts[:, order]
    risk = (held * loss[order]).cumsum(axis=1) / np.maximum(held.cumsum(axis=1), 1)
    return (held * risk).sum(axis=1) / held.sum(axis=1)


def resampled_auroc(known: Tensor, unknown: Tensor, counts: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The share of pairs in which the known row scores above the unknown one, for every resample."""
    order = cat([unknown, known]).argsort(stable=True).numpy()
    unknown_counts = np.hstack([others, np.zeros_like(counts)])[:, order]
    known_counts = np.hstack([np.zeros_like(others), counts])[:, order]
    wins = (known_counts * unknown_counts.cumsum(axis=1)).sum(axis=1)
    return wins / (counts.sum(axis=1) * others.sum(axis=1))
