r"""Selective prediction metrics: how well a confidence score ranks right predictions above wrong ones.

The classifier accepts predictions in descending order of confidence, :math:`\pi(1), \dots, \pi(n)`, and abstains from
the rest. Let :math:`e_i \in \{0, 1\}` be the errors. Accepting the first :math:`j` predictions gives coverage
:math:`j / n`, selective risk :math:`r_j = \frac1j \sum_{i \le j} e_{\pi(i)}` and generalised risk
:math:`g_j = \frac jn r_j`.

Ties have no order. Every metric is the expectation over all orders of tied predictions, so its value does not depend on
the order of the rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sepc_torch.shapes import Bool, Float


def aurc(confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"]) -> Float[Tensor, ""]:
    r"""Area under the risk-coverage curve (AURC), :math:`\frac1n \sum_j r_j`; lower is better.

    An error in place :math:`j` contributes :math:`\frac1n (H_n - H_{j-1})`, where :math:`H` are the harmonic numbers.

    >>> aurc(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([True, True, False]))  # (0 + 0 + 1/3) / 3
    tensor(0.1111, dtype=torch.float64)
    """
    return _area_under_risk(expected_losses(confidence, _errors(correct)))


def optimal_aurc(correct: Bool[Tensor, "B"]) -> Float[Tensor, ""]:
    r"""Lowest AURC possible with m errors of n, all ranked last: :math:`\frac1n (m - (n - m)(H_n - H_{n-m}))`.

    >>> optimal_aurc(torch.tensor([False, True, True]))
    tensor(0.1111, dtype=torch.float64)
    """
    return aurc(correct.double(), correct)


def eaurc(confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"]) -> Float[Tensor, ""]:
    """Excess AURC: AURC minus the AURC of the best ranking of these errors; lower is better.

    >>> eaurc(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([True, True, False]))
    tensor(0., dtype=torch.float64)
    """
    return aurc(confidence, correct) - optimal_aurc(correct)


def naurc(confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"]) -> Float[Tensor, ""]:
    """Normalised AURC: 0 for the best ranking of these errors, 1 for a random ranking; lower is better.

    Unlike AURC, the value can be compared between classifiers of different accuracy. NaN if all predictions are right
    or all are wrong.

    >>> naurc(torch.tensor([0.5, 0.5, 0.5]), torch.tensor([True, True, False])).round(decimals=9)
    tensor(1., dtype=torch.float64)
    """
    best = optimal_aurc(correct)
    spread = _errors(correct).mean() - best
    found = (aurc(confidence, correct) - best) / spread
    return torch.where(spread > 0, found, torch.nan)


def augrc(confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"]) -> Float[Tensor, ""]:
    r"""Area under the generalised risk-coverage curve (AUGRC), :math:`\int g\, dc` by trapezoids; lower is better.

    It equals :math:`r (1 - r)(1 - a) + r^2 / 2`, where r is the error rate of all predictions and a is
    :func:`failure_auroc`.

    >>> augrc(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([True, True, False]))  # r^2 / 2, the optimum
    tensor(0.0556, dtype=torch.float64)
    """
    return _area_under_generalised_risk(expected_losses(confidence, _errors(correct)))


def failure_auroc(confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"]) -> Float[Tensor, ""]:
    """AUROC of detecting mistakes: probability that a right prediction has more confidence than a wrong one.

    Ties count one half. NaN if all predictions are right or all are wrong.

    >>> failure_auroc(torch.tensor([0.9, 0.8, 0.8]), torch.tensor([True, True, False]))
    tensor(0.7500, dtype=torch.float64)
    """
    check_scores(confidence, correct)
    check_flags(correct)
    return auroc(confidence[correct], confidence[~correct])


def auroc(higher: Float[Tensor, "P"], lower: Float[Tensor, "Q"]) -> Float[Tensor, ""]:
    """Probability that a value of ``higher`` exceeds one of ``lower``; ties count one half; NaN if either is empty."""
    values, block = torch.cat([higher, lower]).unique(return_inverse=True)
    parts = block.split([len(higher), len(lower)])
    top, bottom = (torch.bincount(part, minlength=len(values)).double() for part in parts)
    below = bottom.cumsum(0) - 0.5 * bottom
    return top @ below / (len(higher) * len(lower))


def risk_at_coverage(confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"], coverage: float) -> Float[Tensor, ""]:
    r"""Selective risk at a coverage: error rate of the most confident predictions, their number rounded up.

    >>> risk_at_coverage(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([True, False, False]), coverage=0.6)
    tensor(0.5000, dtype=torch.float64)
    """
    if not 0.0 < coverage <= 1.0:
        raise ValueError(f"coverage must be above 0 and at most 1, got {coverage}.")
    errors = expected_losses(confidence, _errors(correct))
    # 0.07 * 100 exceeds 7 in floating point; the factor prevents the ceiling from accepting an eighth prediction.
    accepted = -int(-(coverage * len(errors) * (1.0 - 1e-12)) // 1.0)
    return errors[:accepted].mean()


def coverage_at_risk(confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"], risk: float) -> Float[Tensor, ""]:
    r"""Largest coverage :math:`j / n` whose selective risk :math:`r_j` is at most ``risk``; 0 if there is none.

    A threshold accepts all predictions of equal confidence or none, so only coverages that keep ties together count.

    >>> coverage_at_risk(torch.tensor([0.9, 0.8, 0.7, 0.7]), torch.tensor([True, False, True, True]), risk=0.3)
    tensor(1., dtype=torch.float64)
    """
    if not 0.0 <= risk <= 1.0:
        raise ValueError(f"risk must lie between 0 and 1, got {risk}.")
    check_scores(confidence, correct)
    _, block = confidence.unique(return_inverse=True)
    count = torch.bincount(block).flip(0).cumsum(0)
    wrong = torch.bincount(block, weights=_errors(correct)).flip(0).cumsum(0)
    accepted = torch.where(wrong <= risk * count * (1.0 + 1e-12), count, 0)
    return accepted.amax().double() / len(confidence)


def scod_aurc(
    confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"], unknown: Bool[Tensor, "B"], unknown_cost: float = 0.5
) -> Float[Tensor, ""]:
    r"""AURC of the joint task: reject the network's mistakes and samples of unknown classes.

    SCOD is selective classification with out-of-distribution detection. Accepting an unknown sample costs :math:`c`
    (``unknown_cost``), accepting a mistake on a known sample costs :math:`1 - c`. The value of ``correct`` is ignored
    for unknown samples. Report the fraction of unknown samples with the value, because the value depends on it.

    >>> known, unknown = torch.tensor([True, False, False]), torch.tensor([False, False, True])
    >>> scod_aurc(torch.tensor([0.9, 0.8, 0.7]), known, unknown)  # (0 + 1/4 + 1/3) / 3
    tensor(0.1944, dtype=torch.float64)
    """
    return _area_under_risk(expected_losses(confidence, _joint_losses(correct, unknown, unknown_cost)))


def scod_augrc(
    confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"], unknown: Bool[Tensor, "B"], unknown_cost: float = 0.5
) -> Float[Tensor, ""]:
    """AUGRC of the joint task of :func:`scod_aurc`.

    >>> known, unknown = torch.tensor([True, False, False]), torch.tensor([False, False, True])
    >>> scod_augrc(torch.tensor([0.9, 0.8, 0.7]), known, unknown)
    tensor(0.1111, dtype=torch.float64)
    """
    return _area_under_generalised_risk(expected_losses(confidence, _joint_losses(correct, unknown, unknown_cost)))


def expected_losses(confidence: Float[Tensor, "B"], loss: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Expected loss at each place of the ranking, in float64; tied predictions share their mean loss."""
    check_scores(confidence, loss)
    _, block, size = confidence.unique(return_inverse=True, return_counts=True)
    total = torch.bincount(block, weights=loss.double())
    return (total / size).repeat_interleave(size).flip(0)


def check_scores(confidence: Any, other: Any) -> None:
    """Raise an error unless both are one-dimensional tensors of equal length, with at least one value and no NaN."""
    for given in (confidence, other):
        if not isinstance(given, Tensor):
            raise TypeError(f"Metrics take tensors, got a {type(given).__name__}; convert it with torch.as_tensor.")
    if confidence.ndim != 1 or confidence.shape != other.shape:
        raise ValueError(
            "The confidences and the flags or losses must be one-dimensional and of equal length; got the shapes "
            f"{tuple(confidence.shape)} and {tuple(other.shape)}."
        )
    if len(confidence) == 0:
        raise ValueError("There are no predictions; pass at least one.")
    if confidence.isnan().any():
        raise ValueError(
            "A confidence is NaN. Replace NaN first, for example with -inf, which ranks the prediction last."
        )


def _errors(correct: Bool[Tensor, "B"]) -> Float[Tensor, "B"]:
    check_flags(correct)
    return (~correct).double()


def check_flags(flags: Any) -> None:
    """Raise an error unless the flags are boolean; the negation of an integer tensor is another integer tensor."""
    if not isinstance(flags, Tensor) or flags.dtype != torch.bool:
        given = flags.dtype if isinstance(flags, Tensor) else type(flags).__name__
        raise TypeError(f"The flags must be a boolean tensor, got {given}; compute them with label == target.")


def _joint_losses(correct: Bool[Tensor, "B"], unknown: Bool[Tensor, "B"], cost: float) -> Float[Tensor, "B"]:
    if not 0.0 <= cost <= 1.0:
        raise ValueError(f"unknown_cost must lie between 0 and 1, got {cost}.")
    check_flags(unknown)
    return torch.where(unknown, cost, (1.0 - cost) * _errors(correct))


def _area_under_risk(losses: Float[Tensor, "B"]) -> Float[Tensor, ""]:
    n = len(losses)
    reciprocal = 1.0 / torch.arange(1, n + 1, dtype=torch.float64, device=losses.device)
    return losses @ reciprocal.flip(0).cumsum(0).flip(0) / n


def _area_under_generalised_risk(losses: Float[Tensor, "B"]) -> Float[Tensor, ""]:
    n = len(losses)
    # Trapezoids under the cumulative sum: a loss in place j counts for the n - j later places, plus one half.
    after = torch.arange(n - 1, -1, -1, dtype=torch.float64, device=losses.device) + 0.5
    return losses @ after / n**2
