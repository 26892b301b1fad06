"""Calibration metrics: expected calibration error, Brier score and reliability diagram."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sepc_torch.data.options import check_count
from sepc_torch.metrics.selective import check_flags, check_scores
from sepc_torch.shapes import Bool, Float, Int

Binning = Literal["width", "mass"]
# The 97.5 % quantile of the standard normal distribution, for a two-sided 95 % interval.
_NORMAL = 1.959963984540054


class Reliability(NamedTuple):
    """A reliability diagram: one entry for each of the V distinct confidences.

    Attributes:
        confidence: The distinct confidences, ascending.
        size: Number of predictions with that confidence.
        right: Fraction of those predictions that are right.
        low, high: Wilson's 95 % interval of ``right``.
    """

    confidence: Float[Tensor, "V"]
    size: Int[Tensor, "V"]
    right: Float[Tensor, "V"]
    low: Float[Tensor, "V"]
    high: Float[Tensor, "V"]


def ece(
    probability: Float[Tensor, "B"], correct: Bool[Tensor, "B"], bins: int = 15, binning: Binning = "width"
) -> Float[Tensor, ""]:
    r"""Expected calibration error, :math:`\sum_b \frac{n_b}{n} |\mathrm{right}_b - \mathrm{confidence}_b|`.

    Args:
        probability: The confidence, from 0 to 1.
        correct: True where the prediction is right.
        bins: Number of bins.
        binning: ``"width"``: bins :math:`(\frac{b - 1}{B}, \frac bB]` of equal width. ``"mass"``: bins with equally
            many predictions, in the order of confidence; predictions of equal confidence share the bin of the first.

    >>> ece(torch.tensor([0.9, 0.9, 0.6, 0.6]), torch.tensor([True, True, True, False]))
    tensor(0.1000, dtype=torch.float64)
    """
    check_probability(probability, correct)
    bins = check_count(bins, "bins", least=1)
    p = probability.double()
    bin_of = bin_numbers(p, bins, binning)
    total = torch.bincount(bin_of, weights=correct.double() - p, minlength=bins)
    return total.abs().sum() / len(p)


def bin_numbers(p: Float[Tensor, "B"], bins: int, binning: Binning) -> Int[Tensor, "B"]:
    """The bin of every probability; see :func:`ece`."""
    if binning == "width":
        # Compare with the edges instead of multiplying by `bins`, so that 0.2 falls into the bin that ends at 0.2.
        edges = torch.linspace(0.0, 1.0, bins + 1, dtype=torch.float64, device=p.device)[1:-1]
        return torch.bucketize(p, edges)
    _, block, size = p.unique(return_inverse=True, return_counts=True)
    first = size.cumsum(0) - size
    return (first * bins // len(p))[block]


def brier(probability: Float[Tensor, "B"], correct: Bool[Tensor, "B"]) -> Float[Tensor, ""]:
    r"""Brier score of the event "the prediction is right", :math:`\frac1n \sum_i (p_i - [\mathrm{right}_i])^2`.

    >>> brier(torch.tensor([1.0, 0.5]), torch.tensor([True, False]))
    tensor(0.1250, dtype=torch.float64)
    """
    check_probability(probability, correct)
    return (probability.double() - correct.double()).square().mean()


def reliability(probability: Float[Tensor, "B"], correct: Bool[Tensor, "B"]) -> Reliability:
    """Accuracy at each distinct confidence, with Wilson's 95 % interval.

    This is the reliability diagram of a score with few distinct values.

    >>> found = reliability(torch.tensor([0.9, 0.5, 0.5]), torch.tensor([True, True, False]))
    >>> found.confidence.tolist(), found.size.tolist(), found.right.tolist()
    ([0.5, 0.899...], [2, 1], [0.5, 1.0])
    """
    check_probability(probability, correct)
    values, block, size = probability.double().unique(return_inverse=True, return_counts=True)
    right = torch.bincount(block, weights=correct.double()) / size
    return Reliability(values, size, right, *wilson_interval(right, size))


def wilson_interval(share: Float[Tensor, "V"], size: Int[Tensor, "V"]) -> tuple[Float[Tensor, "V"], Float[Tensor, "V"]]:
    """Lower and upper end of Wilson's 95 % interval of a share of ``size`` trials."""
    z = _NORMAL**2 / size
    middle, half = (share + z / 2) / (1 + z), (z * (share * (1 - share) + z / 4)).sqrt() / (1 + z)
    return (middle - half).clamp_min(0.0), (middle + half).clamp_max(1.0)


def check_probability(probability: Tensor, correct: Tensor) -> None:
    """Raise an error unless the probabilities lie between 0 and 1 and the flags are booleans, one for each."""
    check_scores(probability, correct)
    check_flags(correct)
    if bool(((probability < 0) | (probability > 1)).any()):
        raise ValueError(
            f"Probabilities must lie between 0 and 1, got values from {float(probability.min())} to "
            f"{float(probability.max())}. Use a ranking metric, such as aurc, for scores that are not probabilities."
        )
