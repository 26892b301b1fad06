"""Figures of many resamples at once: each is given by how often it holds every row."""

from __future__ import annotations

import numpy as np
from torch import Tensor, cat


def resampled_aurc(score: Tensor, loss: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The area under the risk of every resample, given how often it holds each row."""
    order = score.argsort(descending=True, stable=True).numpy()
    held = counts[:, order]
    risk = (held * loss[order]).cumsum(axis=1) / np.maximum(held.cumsum(axis=1), 1)
    return (held * risk).sum(axis=1) / held.sum(axis=1)


def resampled_auroc(known: Tensor, unknown: Tensor, counts: np.ndarray, others: np.ndarray) -> np.ndarray:
    """How often a known row of a resample has more than an unknown one."""
    order = cat([unknown, known]).argsort(stable=True).numpy()
    strange = np.hstack([others, np.zeros_like(counts)])[:, order]
    usual = np.hstack([np.zeros_like(others), counts])[:, order]
    wins = (usual * strange.cumsum(axis=1)).sum(axis=1)
    return wins / (counts.sum(axis=1) * others.sum(axis=1))
