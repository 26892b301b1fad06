"""Curves to draw: selective risk over coverage, and accuracy over confidence in bins."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.data.options import check_count
from sepc_torch.metrics.calibration import Binning, bin_numbers, check_probability, wilson_interval
from sepc_torch.metrics.selective import check_flags, expected_losses
from sepc_torch.shapes import Bool, Float, Int


class RiskCoverage(NamedTuple):
    """Selective risk at V coverages, from the most confident predictions to all of them."""

    coverage: Float[Tensor, "V"]
    risk: Float[Tensor, "V"]


class ReliabilityBins(NamedTuple):
    """A reliability diagram in V bins that hold predictions.

    Attributes:
        confidence: Mean confidence of the bin.
        right: Fraction of its predictions that are right.
        low, high: Wilson's 95 % interval of ``right``.
        size: Number of predictions.
    """

    confidence: Float[Tensor, "V"]
    right: Float[Tensor, "V"]
    low: Float[Tensor, "V"]
    high: Float[Tensor, "V"]
    size: Int[Tensor, "V"]


def risk_coverage(confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"], points: int = 200) -> RiskCoverage:
    r"""Selective risk :math:`r_j = \frac1j \sum_{i \le j} e_{\pi(i)}` over the coverage :math:`j / n`.

    Args:
        confidence: The score that ranks the predictions; higher is safer.
        correct: Whether each prediction is right.
        points: Largest number of places j of the ranking that are returned, evenly spaced; the last is n.

    >>> risk_coverage(torch.tensor([0.9, 0.8, 0.7, 0.1]), torch.tensor([True, True, False, False]))
    RiskCoverage(coverage=tensor([0.2500, 0.5000, 0.7500, 1.0000], dtype=torch.float64),
                 risk=tensor([0.0000, 0.0000, 0.3333, 0.5000], dtype=torch.float64))
    """
    check_flags(correct)
    losses = expected_losses(confidence, (~correct).double())
    n = len(losses)
    steps = torch.linspace(1, n, min(n, check_count(points, "points", least=2)), dtype=torch.float64).round().long()
    return RiskCoverage(steps.double() / n, losses.cumsum(0).cpu()[steps - 1] / steps)


def reliability_bins(
    probability: Float[Tensor, "B"], correct: Bool[Tensor, "B"], bins: int = 15, binning: Binning = "width"
) -> ReliabilityBins:
    r"""Accuracy and mean confidence in bins, without empty bins.

    ``binning`` is that of :func:`~sepc_torch.metrics.calibration.ece`, the weighted mean distance of the two in as many
    bins.

    >>> found = reliability_bins(torch.tensor([0.9, 0.9, 0.6, 0.6]), torch.tensor([True, True, True, False]), bins=2)
    >>> found.confidence, found.right, found.size
    (tensor([0.7500], dtype=torch.float64), tensor([0.7500], dtype=torch.float64), tensor([4]))
    """
    check_probability(probability, correct)
    p = probability.double()
    bins = check_count(bins, "bins", least=1)
    bin_of = bin_numbers(p, bins, binning)
    size = torch.bincount(bin_of, minlength=bins)
    held = size > 0
    size = size[held]
    right = torch.bincount(bin_of, weights=correct.double(), minlength=bins)[held] / size
    mean = torch.bincount(bin_of, weights=p, minlength=bins)[held] / size
    return ReliabilityBins(mean, right, *wilson_interval(right, size), size)
