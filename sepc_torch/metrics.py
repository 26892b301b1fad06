r"""How well a score ranks predictions: selective prediction, where the least confident are left to someone else.

The predictions are accepted in the order of their confidence, :math:`\pi(1), \dots, \pi(n)`; with errors
:math:`e_i \in \{0, 1\}`, accepting the first :math:`j` is coverage :math:`j / n` at the selective risk
:math:`r_j = \frac1j \sum_{i \le j} e_{\pi(i)}`. Predictions of equal confidence come in no order: every value is the
expectation over all of them, so that a score of few distinct values is neither flattered nor punished by chance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sepc_torch.shapes import Bool, Float


def aurc(confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"]) -> Float[Tensor, ""]:
    r"""Area under the risk-coverage curve, :math:`\frac1n \sum_j r_j`; less is better.

    Summed by predictions, an error in place :math:`j` costs :math:`\frac1n (H_n - H_{j-1})`, harmonic numbers.

    >>> aurc(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([True, True, False]))  # (0 + 0 + 1/3) / 3
    tensor(0.1111, dtype=torch.float64)
    """
    errors = _expected_errors(confidence, correct)
    n = len(errors)
    reciprocal = 1.0 / torch.arange(1, n + 1, dtype=torch.float64, device=errors.device)
    return errors @ reciprocal.flip(0).cumsum(0).flip(0) / n


def risk_at_coverage(confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"], coverage: float) -> Float[Tensor, ""]:
    r"""The selective risk of the most confident ``coverage`` of the predictions, rounded up to whole predictions.

    >>> risk_at_coverage(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([True, False, False]), coverage=0.6)
    tensor(0.5000, dtype=torch.float64)
    """
    if not 0.0 < coverage <= 1.0:
        raise ValueError(f"coverage is a share above 0 and at most 1, got {coverage}.")
    errors = _expected_errors(confidence, correct)
    # 0.8 * 5 is a hair above 4 in floating point, and no reason for a fifth prediction.
    accepted = -int(-(coverage * len(errors) * (1.0 - 1e-12)) // 1.0)
    return errors[:accepted].mean()


def _expected_errors(confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"]) -> Float[Tensor, "B"]:
    """The chance of an error in every place of the order, in float64: equal confidences share their errors evenly."""
    if confidence.ndim != 1 or confidence.shape != correct.shape:
        raise ValueError(
            f"confidence and correct hold one value for each prediction; got shapes {tuple(confidence.shape)} and "
            f"{tuple(correct.shape)}."
        )
    if len(confidence) == 0:
        raise ValueError("There are no predictions to judge.")
    if confidence.isnan().any():
        raise ValueError("A confidence is NaN; decide first what such a prediction is worth, for instance -inf.")
    values, block, size = confidence.unique(return_inverse=True, return_counts=True)
    mistakes = torch.zeros(len(values), dtype=torch.float64, device=confidence.device)
    mistakes.index_add_(0, block, (~correct).double())
    return (mistakes / size).repeat_interleave(size).flip(0)
