r"""One nonconformity score from several kinds, and the typicality of a point.

Every kind j of nonconformity becomes :math:`l_j = -\log p_j`, where :math:`p_j` is the share of calibration points with
a score at least as large. The combined score is

.. math:: s = \sum_j w_j \min(l_j, \log 5) + \sqrt{\sum_j \left(\frac{x_j^2}{1 + x_j}\right)^2},
    \qquad x_j = \max(l_j - \log 5, 0), \quad w_j \ge 0, \quad \sum_j w_j = S.

The sum orders ordinary points, four in five for every kind. Its weights are those of a logistic regression of the
label's mistakes on the calibration points: a kind that says nothing about mistakes, or points the wrong way, gets no
weight. Mistakes stand in for unknowns, which no calibration set has: both lie where the network has seen little. This
needs mistakes to be the exception. With an error e above one half, the weights are mixed with equal ones, whose share
is :math:`2 e - 1`. Examples of unknowns, if there are some, move the weights: a second regression tells them from the
calibration points, with the first weights as the mean of a narrow prior, so that other kinds of unknowns lose little.

The norm gives every kind a say about points beyond four fifths of the calibration points, whatever its weight: a kind
can be blind to mistakes and still be the only one that sees a distant unknown. Its terms rise slowly at first, so that
a kind that points the wrong way does little harm, and then like :math:`x_j`. Kinds that see the same points count less
in a norm than in a sum, so that many kinds change the order of ordinary points little.

Weights and shares are fitted to calibration points that are not ranked, so p-values of s stay exactly valid.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch.head.calibration.confidence import fit_logistic
from sepc_torch.model.precision import as_dtype
from sepc_torch.shapes import Array, Bool, Float

# Fraction of calibration points that form the tail (their mean excess sets its slope), and their least number.
TAIL_FRACTION = 0.1
MIN_TAIL_POINTS = 5
# Share of the calibration points beyond the weighted sum, for every kind.
BULK_END = 0.2
# Width of the prior of the weights from mistakes, around equal weights whose sum is one. Weights from examples of
# unknowns have a narrower one, around the weights from mistakes: a few dozen examples are all of one kind.
_MISTAKES_WIDTH, _EXAMPLES_WIDTH = 1 / 2, 1 / 4
# Scores closer than this, relative to their size, count as equal. Rounding errors, which depend on the batch size, are
# far below.
SCORE_RESOLUTION = 5e-6
# Least log share: finite in float32.
_DEEPEST = -torch.finfo(torch.float32).max


class CombinedScore(nn.Module):
    """Combined nonconformity score and typicality of points, from S kinds of nonconformity.

    Args:
        kinds: Number of kinds S.
        bulk_end: Share of the calibration points beyond the weighted sum, for every kind.

    >>> scores = torch.stack([torch.arange(100.0), torch.arange(100.0).flip(0)], dim=1)
    >>> model = CombinedScore(2)
    >>> model.fit(scores, torch.arange(100) > 80)  # mistakes have a large first and a small second score
    >>> model.weights
    tensor([2., 0.], dtype=torch.float64)
    """

    ordered: Tensor
    weights: Tensor
    combined: Tensor

    def __init__(self, kinds: int, bulk_end: float = BULK_END) -> None:
        super().__init__()
        self.bulk_end = bulk_end
        self.register_buffer("ordered", torch.zeros(kinds, 0, dtype=torch.float64))
        self.register_buffer("weights", torch.ones(kinds, dtype=torch.float64))
        self.register_buffer("combined", torch.zeros(0, dtype=torch.float64))

    def fit(
        self,
        nonconformity: Float[Tensor, "M S"],
        wrong: Bool[Tensor, "M"],
        unknowns: Float[Tensor, "U S"] | None = None,
    ) -> None:
        """Fit shares and weights to calibration points, to whether their labels are wrong, and to unknowns if given."""
        self.ordered = nonconformity.double().T.sort(dim=1).values.contiguous()
        log_share = self._log_share(nonconformity)
        bulk, kinds = self._bulk(log_share), nonconformity.shape[1]
        prior = np.full(kinds, 1.0 / kinds)
        weights, _ = fit_logistic(bulk, wrong.numpy(), prior, _MISTAKES_WIDTH)
        if weights.sum() == 0:  # no kind tells anything about mistakes: no reason to prefer one
            weights = prior
        equal = max(0.0, 2.0 * float(wrong.double().mean()) - 1.0)
        weights = (1.0 - equal) * weights + equal * weights.mean()
        if unknowns is not None:
            both = np.concatenate([bulk, self._bulk(self._log_share(unknowns))])
            moved, _ = fit_logistic(both, np.arange(len(both)) >= len(bulk), weights, _EXAMPLES_WIDTH)
            weights = moved if moved.sum() > 0 else weights
        self.weights = torch.from_numpy(weights * (kinds / weights.sum()))
        self.combined = self._combine(log_share).sort().values

    def _bulk(self, log_share: Float[Tensor, "B S"]) -> Float[Array, "B S"]:
        """The terms of the weighted sum."""
        return (-log_share).clamp_max(-math.log(self.bulk_end)).numpy()

    def forward(self, nonconformity: Float[Tensor, "B S"]) -> tuple[Float[Tensor, "B"], Float[Tensor, "B"]]:
        """Return the combined nonconformity score and the log typicality of every row, in float64."""
        combined = self._combine(self._log_share(nonconformity))
        return combined, log_survival(self.combined.double(), combined)

    def _log_share(self, nonconformity: Float[Tensor, "B S"]) -> Float[Tensor, "B S"]:
        # Contiguous rows: the last digits of sums over the kinds depend on the layout.
        return log_survival(self.ordered.double(), nonconformity.double().T).T.contiguous()

    def _combine(self, log_share: Float[Tensor, "B S"]) -> Float[Tensor, "B"]:
        return combined_score(log_share, self.weights, self.bulk_end)

    def tails(self) -> Float[Tensor, "S1 4"]:
        """Constants of the tails of all kinds and, last, of the combined score; see :func:`tail_constants`.

        They are computed on the CPU: devices round sums differently, and a loaded head must equal the saved one.
        """
        kinds, combined = (tail_constants(x.double().cpu()) for x in (self.ordered, self.combined))
        return torch.cat([kinds, combined.unsqueeze(0)]).to(self.ordered.device)


def combined_score(
    log_share: Float[Tensor, "B S"], weights: Float[Tensor, "S"], bulk_end: float = BULK_END
) -> Float[Tensor, "B"]:
    """The combined score s of this module's formula, from the log share -l of every kind.

    >>> combined_score(torch.tensor([[-1.0, -5.0]]), torch.tensor([2.0, 0.0]), bulk_end=math.exp(-2.0))
    tensor([4.2500], dtype=torch.float64)
    """
    start = math.log(bulk_end)
    bulk = as_dtype(weights, torch.float64) * log_share.clamp_min(start)
    beyond = (start - log_share).clamp_min(0.0)
    return (beyond.square() / (1.0 + beyond)).square().sum(dim=1).sqrt() - bulk.sum(dim=1)


def log_survival(ordered: Float[Tensor, "*K M"], values: Float[Tensor, "*K B"]) -> Float[Tensor, "*K B"]:
    r"""Log of the share of calibration scores that are at least as large as each value, smooth and finite.

    Between two calibration scores the share is interpolated linearly. Beyond the start u of the tail, the
    largest tenth, it falls like :math:`e^{-(s - u) / m}`, where m is the mean excess of the tail. NaN counts as
    infinity. A value counts as slightly smaller than it is, so that rounding errors do not lift it above equal scores.

    >>> log_survival(torch.arange(1.0, 100.0), torch.tensor([50.0, 110.0])).exp()
    tensor([0.5100, 0.0026])
    """
    return survival(ordered, tail_constants(ordered)).log_share(finite_scores(values).contiguous())


def finite_scores(values: Float[Tensor, "*K B"]) -> Float[Tensor, "*K B"]:
    """The largest number instead of infinity and NaN."""
    return values.nan_to_num(nan=torch.finfo(values.dtype).max)


def tail_constants(ordered: Float[Tensor, "*K M"]) -> Float[Tensor, "*K 4"]:
    """Start of the tail, its mean excess, the mean size of a score, and the log share at the start."""
    count = ordered.shape[-1]
    tail = min(max(MIN_TAIL_POINTS, round(TAIL_FRACTION * count)), count - 1)
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
