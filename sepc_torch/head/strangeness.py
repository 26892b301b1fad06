r"""One nonconformity score from several kinds, and the typicality of a point.

Every kind j of nonconformity becomes :math:`l_j = -\log p_j`, where :math:`p_j` is the share of calibration points with
a score at least as large. The combined score is

.. math:: s = \sum_j w_j \min(l_j, \log 10) + \sum_j \max(l_j - \log 10, 0), \qquad w_j \ge 0, \quad \sum_j w_j = S.

The first sum orders ordinary points, nine in ten for every kind. Its weights are those of a logistic regression of the
label's mistakes on the calibration points: a kind that says nothing about mistakes, or points the wrong way, gets no
weight. Mistakes stand in for unknowns, which no calibration set has: both lie where the network has seen little. The
second sum gives every kind a say about points beyond nine tenths of the calibration points, whatever its weight: a
kind can be blind to mistakes and still be the only one that sees a distant unknown.

Weights and shares are fitted to calibration points that are not ranked, so p-values of s stay exactly valid.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch.head.confidence import fit_logistic
from sepc_torch.model.precision import as_dtype
from sepc_torch.shapes import Bool, Float

# Fraction of calibration points that form the tail (their mean excess sets its slope), and their least number.
TAIL_FRACTION = 0.1
MIN_TAIL_POINTS = 5
# Scores closer than this, relative to their size, count as equal. Rounding errors, which depend on the batch size, are
# far below.
SCORE_RESOLUTION = 5e-6
# Least log share: finite in float32.
_DEEPEST = -torch.finfo(torch.float32).max


class Strangeness(nn.Module):
    """Combined nonconformity score and typicality of points, from S kinds of nonconformity.

    Args:
        kinds: Number of kinds S.
        tail: Share of the calibration points that belong to the tail of a kind.

    >>> scores = torch.stack([torch.arange(100.0), torch.arange(100.0).flip(0)], dim=1)
    >>> model = Strangeness(2)
    >>> model.fit(scores, torch.arange(100) > 80)  # mistakes have a large first and a small second score
    >>> model.weights
    tensor([2., 0.], dtype=torch.float64)
    """

    ordered: Tensor
    weights: Tensor
    combined: Tensor

    def __init__(self, kinds: int, tail: float = TAIL_FRACTION) -> None:
        super().__init__()
        self.tail = tail
        self.register_buffer("ordered", torch.zeros(kinds, 0, dtype=torch.float64))
        self.register_buffer("weights", torch.ones(kinds, dtype=torch.float64))
        self.register_buffer("combined", torch.zeros(0, dtype=torch.float64))

    def fit(self, nonconformity: Float[Tensor, "M S"], wrong: Bool[Tensor, "M"]) -> None:
        """Fit shares and weights to calibration points, and to whether their labels are wrong."""
        self.ordered = nonconformity.double().T.sort(dim=1).values.contiguous()
        log_share = self._log_share(nonconformity)
        bulk = (-log_share).clamp_max(-math.log(self.tail)).numpy()
        kinds = bulk.shape[1]
        weights, _ = fit_logistic(bulk, wrong.numpy(), np.full(kinds, 1.0 / kinds))
        if weights.sum() == 0:  # no kind tells anything about mistakes: no reason to prefer one
            weights = np.ones(kinds)
        self.weights = torch.from_numpy(weights * (kinds / weights.sum()))
        self.combined = self._combine(log_share).sort().values

    def forward(self, nonconformity: Float[Tensor, "B S"]) -> tuple[Float[Tensor, "B"], Float[Tensor, "B"]]:
        """Return the combined nonconformity score and the log typicality of every row, in float64."""
        combined = self._combine(self._log_share(nonconformity))
        return combined, log_survival(self.combined.double(), combined, self.tail)

    def _log_share(self, nonconformity: Float[Tensor, "B S"]) -> Float[Tensor, "B S"]:
        # Contiguous rows: the last digits of sums over the kinds depend on the layout.
        return log_survival(self.ordered.double(), nonconformity.double().T, self.tail).T.contiguous()

    def _combine(self, log_share: Float[Tensor, "B S"]) -> Float[Tensor, "B"]:
        return combined_score(log_share, self.weights, self.tail)

    def tails(self) -> Float[Tensor, "S1 4"]:
        """Constants of the tails of all kinds and, last, of the combined score; see :func:`tail_constants`."""
        kinds = tail_constants(self.ordered.double(), self.tail)
        return torch.cat([kinds, tail_constants(self.combined.double(), self.tail).unsqueeze(0)])


def combined_score(
    log_share: Float[Tensor, "B S"], weights: Float[Tensor, "S"], tail: float = TAIL_FRACTION
) -> Float[Tensor, "B"]:
    """The combined score s of this module's formula, from the log share -l of every kind.

    >>> combined_score(torch.tensor([[-1.0, -5.0]]), torch.tensor([2.0, 0.0]), tail=0.1)
    tensor([4.6974], dtype=torch.float64)
    """
    start = math.log(tail)
    bulk = as_dtype(weights, torch.float64) * log_share.clamp_min(start)
    return (start - log_share).clamp_min(0.0).sum(dim=1) - bulk.sum(dim=1)


def log_survival(
    ordered: Float[Tensor, "*K M"], values: Float[Tensor, "*K B"], tail_fraction: float = TAIL_FRACTION
) -> Float[Tensor, "*K B"]:
    r"""Log of the share of calibration scores that are at least as large as each value, smooth and finite.

    Between two calibration scores the share is interpolated linearly. Beyond the start u of the tail, by default the
    largest tenth, it falls like :math:`e^{-(s - u) / m}`, where m is the mean excess of the tail. NaN counts as
    infinity. A value counts as slightly smaller than it is, so that rounding errors do not lift it above equal scores.

    >>> log_survival(torch.arange(1.0, 100.0), torch.tensor([50.0, 110.0])).exp()
    tensor([0.5100, 0.0026])
    """
    return survival(ordered, tail_constants(ordered, tail_fraction)).log_share(finite_scores(values).contiguous())


def finite_scores(values: Float[Tensor, "*K B"]) -> Float[Tensor, "*K B"]:
    """The largest number instead of infinity and NaN."""
    return values.nan_to_num(nan=torch.finfo(values.dtype).max)


def tail_constants(ordered: Float[Tensor, "*K M"], tail_fraction: float = TAIL_FRACTION) -> Float[Tensor, "*K 4"]:
    """Start of the tail, its mean excess, the mean size of a score, and the log share at the start."""
    count = ordered.shape[-1]
    tail = min(max(MIN_TAIL_POINTS, round(tail_fraction * count)), count - 1)
    start = ordered[..., count - 1 - tail]
    # Equal calibration scores would make the slope infinite.
    scale = ordered.abs().mean(dim=-1).clamp_min(torch.finfo(ordered.dtype).tiny)
    excess = (ordered[..., count - tail :] - start.unsqueeze(-1)).mean(dim=-1)
    excess = excess.clamp_min(SCORE_RESOLUTION * (scale + start.abs()))
    share = torch.full_like(start, math.log((tail + 2) / (count + 1)))
    return torch.stack([start, excess, scale, share], dim=-1)


class Survival(NamedTuple):
    r"""Sorted calibration scores, and the constants of :func:`log_survival` between each two of them.

    With a of the M scores below a value s, the interval a has ``constants[:, ..., a]`` = (b, l, w), and
    :math:`x = b + (s - l) / w` is the rank of the value or, in the tail, its excess in units of the mean excess.
    ``start``, ``scale`` and ``share`` are those of :func:`tail_constants`.
    """

    ordered: Float[Tensor, "*K M"]
    constants: Float[Tensor, "3 *K M1"]
    start: Float[Tensor, "*K 1"]
    scale: Float[Tensor, "*K 1"]
    share: Float[Tensor, "*K 1"]

    def log_share(self, values: Float[Tensor, "*K B"]) -> Float[Tensor, "*K B"]:
        """:func:`log_survival` of finite values."""
        count = self.ordered.shape[-1]
        values = values - SCORE_RESOLUTION * (self.scale + values.abs())
        above = torch.searchsorted(self.ordered, values)
        base, lower, width = self.constants.gather(-1, above.expand(3, *above.shape)).unbind()
        place = base + (values - lower) / width
        inside = torch.log((count + 1 - place) / (count + 1))
        return torch.where(values > self.start, self.share - place, inside).clamp_min(_DEEPEST)


def survival(ordered: Float[Tensor, "*K M"], constants: Float[Tensor, "*K 4"]) -> Survival:
    """Lay out sorted scores with the constants of their tails, of the same dtype."""
    start, excess, scale, share = constants.unsqueeze(-1).unbind(dim=-2)
    ranks = torch.arange(ordered.shape[-1], dtype=ordered.dtype, device=ordered.device).expand_as(ordered)
    # Values in the tail are above its start; the last interval is one of them, so its width does not matter.
    tail = ordered >= start
    inner = torch.where(
        tail,
        torch.stack([torch.zeros_like(ordered), start.expand_as(ordered), excess.expand_as(ordered)]),
        torch.stack([ranks, ordered, torch.cat([ordered[..., 1:], ordered[..., -1:]], dim=-1) - ordered]),
    )
    zero = torch.zeros_like(start)
    first = torch.stack([zero, zero, torch.full_like(start, torch.inf)])  # below the first score the rank is zero
    return Survival(ordered, torch.cat([first, inner], dim=-1), start, scale, share)
