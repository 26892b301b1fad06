r"""How well a score ranks predictions: selective prediction, where the least confident are left to someone else.

The predictions are accepted in the order of their confidence, :math:`\pi(1), \dots, \pi(n)`; with errors
:math:`e_i \in \{0, 1\}`, accepting the first :math:`j` is coverage :math:`j / n` at the selective risk
:math:`r_j = \frac1j \sum_{i \le j} e_{\pi(i)}` and the generalised risk :math:`g_j = \frac jn r_j`. Predictions of
equal confidence come in no order: every value is the expectation over all of them, so that a score of few distinct
values is neither flattered nor punished by chance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sepc_torch.shapes import Bool, Float


def aurc(confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"]) -> Float[Tensor, ""]:
    r"""Area under the risk-coverage curve, :math:`\frac1n \sum_j r_j`; less is better.

    Summed by predictions, an error in place :math:`j` costs :math:`\frac1n (H_n - H_{j-1})`, harmonic numbers.

    >>> aurc(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([True, True, False]))  # (0 + 0 + 1/3) / 3
    tensor(0.1111, dtype=torch.float64)
    """
    return _area_under_risk(expected_losses(confidence, _errors(correct)))


def optimal_aurc(correct: Bool[Tensor, "B"]) -> Float[Tensor, ""]:
    r"""The least AURC with these errors, all of them last: :math:`\frac1n (m - (n - m)(H_n - H_{n-m}))` for m of n.

    >>> optimal_aurc(torch.tensor([False, True, True]))
    tensor(0.1111, dtype=torch.float64)
    """
    return aurc(correct.double(), correct)


def eaurc(confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"]) -> Float[Tensor, ""]:
    """Excess AURC: what the ranking costs, above the best ranking of the same errors.

    >>> eaurc(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([True, True, False]))
    tensor(0., dtype=torch.float64)
    """
    return aurc(confidence, correct) - optimal_aurc(correct)


def naurc(confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"]) -> Float[Tensor, ""]:
    """Normalised AURC: 0 for the best ranking of the same errors, 1 for a random one; NaN without errors, or only such.

    Other than AURC it can be compared between classifiers of different accuracy.

    >>> naurc(torch.tensor([0.5, 0.5, 0.5]), torch.tensor([True, True, False])).round(decimals=9)
    tensor(1., dtype=torch.float64)
    """
    best = optimal_aurc(correct)
    spread = _errors(correct).mean() - best
    found = (aurc(confidence, correct) - best) / spread
    return torch.where(spread > 0, found, torch.nan)


def augrc(confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"]) -> Float[Tensor, ""]:
    r"""Area under the generalised risk, :math:`\int g\, dc` by trapezoids; less is better.

    With the risk r of all predictions it is :math:`r (1 - r)(1 - a) + r^2 / 2`, a the AUROC of finding errors.

    >>> augrc(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([True, True, False]))  # r^2 / 2, the optimum
    tensor(0.0556, dtype=torch.float64)
    """
    return _area_under_generalised_risk(expected_losses(confidence, _errors(correct)))


def failure_auroc(confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"]) -> Float[Tensor, ""]:
    """How often a right prediction has more confidence than a wrong one, ties counted half; NaN without either.

    >>> failure_auroc(torch.tensor([0.9, 0.8, 0.8]), torch.tensor([True, True, False]))
    tensor(0.7500, dtype=torch.float64)
    """
    check_scores(confidence, correct)
    check_flags(correct)
    return auroc(confidence[correct], confidence[~correct])


def auroc(higher: Float[Tensor, "P"], lower: Float[Tensor, "Q"]) -> Float[Tensor, ""]:
    """How often a value of the first kind is above one of the second, ties counted half; NaN where one is empty.

    >>> auroc(torch.tensor([3.0, 2.0]), torch.tensor([2.0, 1.0]))
    tensor(0.8750, dtype=torch.float64)
    """
    values, block = torch.cat([higher, lower]).unique(return_inverse=True)
    parts = block.split([len(higher), len(lower)])
    top, bottom = (torch.bincount(part, minlength=len(values)).double() for part in parts)
    below = bottom.cumsum(0) - 0.5 * bottom
    return top @ below / (len(higher) * len(lower))


def risk_at_coverage(confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"], coverage: float) -> Float[Tensor, ""]:
    r"""The selective risk of the most confident ``coverage`` of the predictions, rounded up to whole predictions.

    >>> risk_at_coverage(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([True, False, False]), coverage=0.6)
    tensor(0.5000, dtype=torch.float64)
    """
    if not 0.0 < coverage <= 1.0:
        raise ValueError(f"coverage is a share above 0 and at most 1, got {coverage}.")
    errors = expected_losses(confidence, _errors(correct))
    # 0.8 * 5 is a hair above 4 in floating point, and no reason for a fifth prediction.
    accepted = -int(-(coverage * len(errors) * (1.0 - 1e-12)) // 1.0)
    return errors[:accepted].mean()


def coverage_at_risk(confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"], risk: float) -> Float[Tensor, ""]:
    r"""The largest coverage :math:`j / n` with selective risk :math:`r_j` of at most ``risk``, 0 where there is none.

    A threshold accepts all predictions of equal confidence or none, so that only whole groups of them count.

    >>> coverage_at_risk(torch.tensor([0.9, 0.8, 0.7, 0.7]), torch.tensor([True, False, True, True]), risk=0.3)
    tensor(1., dtype=torch.float64)
    """
    if not 0.0 <= risk <= 1.0:
        raise ValueError(f"risk is a share from 0 to 1, got {risk}.")
    check_scores(confidence, correct)
    _, block = confidence.unique(return_inverse=True)
    count = torch.bincount(block).flip(0).cumsum(0)
    wrong = torch.bincount(block, weights=_errors(correct)).flip(0).cumsum(0)
    accepted = torch.where(wrong <= risk * count * (1.0 + 1e-12), count, 0)
    return accepted.amax().double() / len(confidence)


def scod_aurc(
    confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"], unknown: Bool[Tensor, "B"], unknown_cost: float = 0.5
) -> Float[Tensor, ""]:
    r"""AURC of a score that must refuse the network's mistakes and what it never learnt, together.

    Accepting an unknown costs :math:`c`, a mistake on a known one :math:`1 - c`; what ``correct`` says of unknowns does
    not matter. State the share of unknowns with the number: it decides its size.

    >>> known, unknown = torch.tensor([True, False, False]), torch.tensor([False, False, True])
    >>> scod_aurc(torch.tensor([0.9, 0.8, 0.7]), known, unknown)  # (0 + 1/4 + 1/3) / 3
    tensor(0.1944, dtype=torch.float64)
    """
    return _area_under_risk(expected_losses(confidence, _joint_losses(correct, unknown, unknown_cost)))


def scod_augrc(
    confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"], unknown: Bool[Tensor, "B"], unknown_cost: float = 0.5
) -> Float[Tensor, ""]:
    """AUGRC of the same joint task as :func:`scod_aurc`.

    >>> known, unknown = torch.tensor([True, False, False]), torch.tensor([False, False, True])
    >>> scod_augrc(torch.tensor([0.9, 0.8, 0.7]), known, unknown)
    tensor(0.1111, dtype=torch.float64)
    """
    return _area_under_generalised_risk(expected_losses(confidence, _joint_losses(correct, unknown, unknown_cost)))


def expected_losses(confidence: Float[Tensor, "B"], loss: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """The loss to expect in every place of the order, in float64: equal confidences share theirs evenly.

    >>> expected_losses(torch.tensor([0.9, 0.1, 0.1]), torch.tensor([0.0, 1.0, 0.0]))
    tensor([0.0000, 0.5000, 0.5000], dtype=torch.float64)
    """
    check_scores(confidence, loss)
    _, block, size = confidence.unique(return_inverse=True, return_counts=True)
    total = torch.bincount(block, weights=loss.double())
    return (total / size).repeat_interleave(size).flip(0)


def check_scores(confidence: Any, other: Any) -> None:
    """A clear error for what cannot be judged."""
    for given in (confidence, other):
        if not isinstance(given, Tensor):
            raise TypeError(f"Metrics take tensors, got a {type(given).__name__}; convert it with torch.as_tensor.")
    if confidence.ndim != 1 or confidence.shape != other.shape:
        raise ValueError(
            "Confidence, and what is known of each prediction, hold one value for each; got the shapes "
            f"{tuple(confidence.shape)} and {tuple(other.shape)}."
        )
    if len(confidence) == 0:
        raise ValueError("There are no predictions to judge.")
    if confidence.isnan().any():
        raise ValueError("A confidence is NaN; decide first what such a prediction is worth, for instance -inf.")


def _errors(correct: Bool[Tensor, "B"]) -> Float[Tensor, "B"]:
    check_flags(correct)
    return (~correct).double()


def check_flags(flags: Any) -> None:
    """A clear error for numbers in place of true and false: their negation would be another number."""
    if not isinstance(flags, Tensor) or flags.dtype != torch.bool:
        given = flags.dtype if isinstance(flags, Tensor) else type(flags).__name__
        raise TypeError(f"What is right, or unknown, is given as a boolean tensor, got {given}; use label == target.")


def _joint_losses(correct: Bool[Tensor, "B"], unknown: Bool[Tensor, "B"], cost: float) -> Float[Tensor, "B"]:
    if not 0.0 <= cost <= 1.0:
        raise ValueError(f"unknown_cost is a share from 0 to 1, got {cost}.")
    check_flags(unknown)
    return torch.where(unknown, cost, (1.0 - cost) * _errors(correct))


def _area_under_risk(losses: Float[Tensor, "B"]) -> Float[Tensor, ""]:
    n = len(losses)
    reciprocal = 1.0 / torch.arange(1, n + 1, dtype=torch.float64, device=losses.device)
    return losses @ reciprocal.flip(0).cumsum(0).flip(0) / n


def _area_under_generalised_risk(losses: Float[Tensor, "B"]) -> Float[Tensor, ""]:
    n = len(losses)
    # Trapezoids under the running sum: a loss in place j counts for the n - j places after it, and half for its own.
    after = torch.arange(n - 1, -1, -1, dtype=torch.float64, device=losses.device) + 0.5
    return losses @ after / n**2
