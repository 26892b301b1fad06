r"""Which samples of a batch are of a new kind, with the false discovery rate controlled; and how many there are."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.head.promises.conformal import check_share
from sepc_torch.head.row_groups import RowGroup
from sepc_torch.shapes import Bool, Float

# Relative rounding error of products of p-values and ranks.
_ROUNDING = 1e-12
# Batches of fewer samples do not estimate the share of ordinary samples: the estimate adds one sample, which costs more
# than it gains.
_LEAST_BATCH = 20
# Shares of ordinary samples beyond a threshold: the thresholds that a lower bound of the share of unknowns may use.
_BEYOND = (0.5, 0.2, 0.1, 0.05, 0.02)


class Novelties(NamedTuple):
    """Samples that are declared novel.

    Attributes:
        novel: Whether each sample is declared novel: whether ``adjusted`` is at most the wanted rate.
        adjusted: Adjusted p-value: the least false discovery rate at which the sample would be declared novel.
        p_value: Conformal p-value of each sample.
        threshold: The largest p-value that is declared novel; 0 if none is.
        least: The least number of novelties in such a batch that the calibration points can show. With fewer, nothing
            is declared novel, because a p-value is at least 1 / (M + 1) for M ranked calibration points.
        ordinary: Estimated share of ordinary samples in the batch, at most 1; 1 for fewer than 20 samples. ``adjusted``
            and ``least`` use the estimate before it is cut at 1.
        groups: Clusters of the novel samples, the largest first, as proposals of new classes; ``ids`` are row numbers.
            Only :meth:`TrustHead.novelties` fills them.
    """

    novel: Bool[Tensor, "B"]
    adjusted: Float[Tensor, "B"]
    p_value: Float[Tensor, "B"]
    threshold: float
    least: int
    ordinary: float
    groups: tuple[RowGroup, ...] = ()

    def __repr__(self) -> str:
        limits = f"threshold={self.threshold:.3g}, least={self.least}, ordinary={self.ordinary:.3g}"
        sizes = [len(group.ids) for group in self.groups]
        largest = f" in {len(sizes)} groups, the largest of {sizes[0]}" if sizes else ""
        return f"Novelties({int(self.novel.sum())} of {len(self.novel)} samples are novel{largest}, {limits})"


def find_novelties(p_value: Float[Tensor, "B"], ranked: int, fdr: float) -> Novelties:
    r"""Declare samples novel by the procedure of Benjamini and Hochberg on conformal p-values, with Storey's estimate.

    .. math:: \mathrm{FDR} = E\left[\frac{\#\{\text{ordinary samples declared novel}\}}
        {\max(1, \#\{\text{samples declared novel}\})}\right] \le \alpha

    for ordinary samples drawn, like the M ranked calibration points, from one distribution. The procedure declares the
    R smallest p-values novel, for the largest R with :math:`p_{(R)} \le \alpha R / (m \hat\pi)`. Of m samples,
    :math:`\hat\pi = \frac{1 + \#\{i : p_i \ge \lambda\}}{m (1 - \lambda)}` estimates the share of ordinary ones,
    with :math:`\lambda = K / (M + 1)`, about one half. In batches of fewer than 20 samples :math:`\hat\pi` is 1, and
    the rate is at most :math:`\alpha m_0 / m` for :math:`m_0` ordinary samples.

    Proof. All p-values share the calibration points, but this does not matter (Bates, Candès, Lei, Romano and Sesia
    2023, Annals of Statistics 51). (1) Fix an ordinary sample j, the set W of its score and the M calibration scores
    without their order, and all other scores. Every order of W is equally likely, so :math:`P(p_j \le u \mid W) \le u`.
    (2) If the score of j falls within W, :math:`p_j` rises, and a larger score returns to the calibration points, so no
    other p-value falls. R and :math:`1 / \hat\pi` are thus non-increasing functions of :math:`p_j`. (3) Let
    :math:`p^*` be the largest value with :math:`p^* \le \alpha R(p^*) / (m \hat\pi(p^*))`. Then
    :math:`E[1\{j \text{ declared}\} / R \mid W] \le P(p_j \le p^* \mid W) / R(p^*) \le \alpha / (m \hat\pi(p^*)) \le
    \alpha (1 - \lambda) / (1 + N)`, where N counts the other ordinary samples with :math:`p_i \ge \lambda` when j has
    the largest score of W: those at or below the K-th largest of W. (4) Given W, N is binomial,
    :math:`\mathrm{Bin}(m_0 - 1, \theta)`, so :math:`E[1 / (1 + N)] \le E[1 / \theta] / m_0`. The distribution
    function at the K-th largest of M + 1 points is :math:`\mathrm{Beta}(M + 2 - K, K)`, and
    :math:`E[1 / \theta] = \frac{M + 1}{M + 1 - K} = \frac{1}{1 - \lambda}`. (5) Each of the :math:`m_0` ordinary
    samples contributes at most :math:`\alpha / m_0`. Ties only raise p-values.

    Args:
        p_value: Conformal p-values of the samples, all from the same calibration points.
        ranked: Number M of ranked calibration points.
        fdr: The wanted rate :math:`\alpha`.

    >>> found = find_novelties(torch.tensor([0.01, 0.5, 0.02, 0.9]), ranked=99, fdr=0.1)
    >>> found.novel.tolist(), found.threshold, found.adjusted.tolist(), found.least
    ([True, False, True, False], 0.02, [0.04, 0.6666666666666666, 0.04, 0.9], 1)
    """
    from scipy.stats import false_discovery_control

    fdr = check_share(fdr, "fdr")
    # A p-value is a multiple of 1 / (M + 1), which float32 rounds.
    exact = (p_value.detach().cpu().double() * (ranked + 1)).round() / (ranked + 1)
    if not len(exact):
        return Novelties(torch.zeros(0, dtype=torch.bool), exact, exact, 0.0, 0, 1.0)
    share = ordinary_share(exact, ranked) if len(exact) >= _LEAST_BATCH else 1.0
    # Unlike p-values, the products can exceed one.
    adjusted = (torch.from_numpy(false_discovery_control(exact.numpy(), method="bh")) * share).clamp_max(1.0)
    novel = adjusted <= fdr * (1.0 + _ROUNDING)
    threshold = float(exact[novel].max()) if bool(novel.any()) else 0.0
    least = math.ceil(len(exact) * share / (fdr * (ranked + 1)) * (1.0 - _ROUNDING))
    return Novelties(novel, adjusted, exact, threshold, least, min(share, 1.0))


def ordinary_share(p_value: Float[Tensor, "B"], ranked: int) -> float:
    r"""Storey's estimate :math:`\hat\pi`; it is not cut at one, since the proof counts on batches where it is larger.

    >>> ordinary_share(torch.tensor([0.25, 0.5, 0.75, 1.0]), ranked=3)
    2.0
    """
    half = (ranked + 1) // 2 / (ranked + 1)
    return float(1 + (p_value >= half * (1.0 - _ROUNDING)).sum()) / (len(p_value) * (1.0 - half))


class UnknownShare(NamedTuple):
    """Share of samples of unknown kinds in a batch, with its interval.

    Attributes:
        share: Storey's estimate: the share that is missing among the less strange half of the ordinary samples. It
            counts unknowns only if they are stranger than half of the ordinary samples.
        lower: Lower bound of the share of unknowns, whatever they look like.
        upper: Upper bound of the share of unknowns if all of them are stranger than half of the ordinary samples.
            Nothing bounds the number of unknowns that look ordinary.
        rows: Number of samples.
        delta: The probability that one of the bounds fails is at most this value.
    """

    share: float
    lower: float
    upper: float
    rows: int
    delta: float

    @property
    def text(self) -> str:
        """The estimate in a sentence."""
        interval = f"{self.lower:.1%} to {self.upper:.1%} with probability {1.0 - self.delta:g}"
        if self.lower == 0.0:
            return f"The share of unknown kinds among {self.rows} rows cannot be told apart from zero ({interval})."
        return f"About {self.share:.1%} of {self.rows} rows are of unknown kinds ({interval})."

    def __str__(self) -> str:
        return self.text


def unknown_share(p_value: Float[Tensor, "B"], ranked: int, delta: float = 0.05) -> UnknownShare:
    r"""Estimate the share of samples of unknown kinds in a batch from conformal p-values.

    Of m samples, drawn independently, a share :math:`\pi` is unknown and the others are drawn like the M ranked
    calibration points. Beyond the k-th largest calibration score, where :math:`p \le k / (M + 1)`, lie a share g of the
    samples and a share h of the ordinary ones, so :math:`g \le (1 - \pi) h + \pi`, or

    .. math:: \pi \ge \theta_k = \frac{g - h}{1 - h},

    with equality if all unknowns lie beyond. The number of samples beyond is binomial with the chance g, and h has the
    distribution :math:`\mathrm{Beta}(k, M + 1 - k)` (Clopper and Pearson bounds g, a quantile bounds h). The lower
    bound is the largest one of five values of k, from one half to a fiftieth of the points; each bound of g and of h
    fails with probability at most :math:`\delta / 20`. The upper bound is that of :math:`\theta_k` for one half; both
    of its parts fail with probability at most :math:`\delta / 4`. Equal calibration scores lower h: the lower bound
    stays valid, and the upper bound needs scores without ties.

    Args:
        p_value: Conformal p-values of the samples, all from the same calibration points.
        ranked: Number M of ranked calibration points.
        delta: The allowed probability that the true share lies outside of the interval.

    >>> p_value = torch.cat([torch.arange(1, 901) / 900, torch.full((100,), 0.001)])  # a tenth is unknown
    >>> unknown_share(p_value, ranked=999).text
    'About 10.0% of 1000 rows are of unknown kinds (5.8% to 22.6% with probability 0.95).'
    """
    from scipy.special import betaincinv

    delta = check_share(delta, "delta")
    rows = len(p_value)
    if not rows:
        raise ValueError("The share of unknowns needs at least one row, got none.")
    place = (p_value.detach().cpu().double() * (ranked + 1)).round()

    def bounds(k: int, chance: float) -> tuple[float, float]:
        """Lower and upper bound of theta; each part of a bound fails with at most this probability."""
        beyond = int((place <= k).sum())
        least = float(betaincinv(beyond, rows - beyond + 1, chance)) if beyond else 0.0
        most = float(betaincinv(beyond + 1, rows - beyond, 1.0 - chance)) if beyond < rows else 1.0
        low, high = (float(betaincinv(k, ranked + 1 - k, level)) for level in (chance, 1.0 - chance))
        return (least - high) / (1.0 - high), (most - low) / (1.0 - low)

    half = max((ranked + 1) // 2, 1)
    places = {max(round(share * (ranked + 1)), 1) for share in _BEYOND[1:]} | {half}
    lower = max(0.0, *(bounds(k, delta / (4 * len(_BEYOND)))[0] for k in places))
    upper = min(max(bounds(half, delta / 4)[1], lower), 1.0)
    share = 1.0 - float((place > half).double().mean()) / (1.0 - half / (ranked + 1))
    return UnknownShare(min(max(share, lower), upper), lower, upper, rows, delta)
