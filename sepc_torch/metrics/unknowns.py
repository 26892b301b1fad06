"""Out-of-distribution metrics: how well a confidence score separates known samples from unknown ones."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from sepc_torch.metrics.selective import auroc
from sepc_torch.shapes import Float

Positive = Literal["known", "unknown"]


def unknown_auroc(known: Float[Tensor, "P"], unknown: Float[Tensor, "Q"]) -> Float[Tensor, ""]:
    """AUROC: probability that a known sample has more confidence than an unknown one; ties count one half.

    >>> import torch
    >>> unknown_auroc(torch.tensor([0.9, 0.8]), torch.tensor([0.1, 0.8]))
    tensor(0.8750, dtype=torch.float64)
    """
    _check(known, unknown)
    return auroc(known, unknown)


def fpr95(
    known: Float[Tensor, "P"], unknown: Float[Tensor, "Q"], positive: Positive = "known", recall: float = 0.95
) -> Float[Tensor, ""]:
    """False-positive rate at the threshold with 95 % true positives; lower is better.

    Two conventions are in use, and their values differ. With ``positive="known"`` the threshold accepts at least 95 %
    of the known samples, and the value is the fraction of unknown samples accepted (classic papers). With
    ``positive="unknown"`` the threshold rejects at least 95 % of the unknown samples, and the value is the fraction of
    known samples rejected (OpenOOD, pytorch-ood).

    >>> import torch
    >>> known, unknown = torch.tensor([0.9, 0.8, 0.7, 0.2]), torch.tensor([0.1, 0.3, 0.75])
    >>> fpr95(known, unknown).item(), fpr95(known, unknown, positive="unknown").item()
    (0.66..., 0.5)
    """
    _check(known, unknown)
    if not 0.0 < recall <= 1.0:
        raise ValueError(f"recall must be above 0 and at most 1, got {recall}.")
    if positive == "known":
        threshold = known.sort(descending=True).values[_at_least(recall, len(known)) - 1]
        return (unknown >= threshold).double().mean()
    threshold = unknown.sort().values[_at_least(recall, len(unknown)) - 1]
    return (known <= threshold).double().mean()


def _at_least(share: float, count: int) -> int:
    """Smallest number that is at least this fraction of ``count``; 0.95 of 20 is 19 despite floating-point rounding."""
    return max(1, math.ceil(share * count * (1.0 - 1e-12)))


def _check(known: Tensor, unknown: Tensor) -> None:
    for name, scores in (("known", known), ("unknown", unknown)):
        if scores.ndim != 1 or len(scores) == 0:
            raise ValueError(
                f"The confidences of {name} samples must have shape (n,), n >= 1, got {tuple(scores.shape)}."
            )
        if scores.isnan().any():
            raise ValueError(
                f"A confidence of the {name} samples is NaN. Replace it first, for example by -inf, which ranks the "
                "sample last."
            )
