r"""Which samples of a batch are of a new kind, with the false discovery rate controlled."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.data.scipy_parts import scipy_part
from sepc_torch.head.conformal import check_share
from sepc_torch.shapes import Bool, Float

# Relative rounding error of products of p-values and ranks.
_ROUNDING = 1e-12


class Novelties(NamedTuple):
    """Samples that are declared novel.

    Attributes:
        novel: Whether each sample is declared novel: whether ``adjusted`` is at most the wanted rate.
        adjusted: Adjusted p-value: the least false discovery rate at which the sample would be declared novel.
        p_value: Conformal p-value of each sample.
        threshold: The largest p-value that is declared novel; 0 if none is.
        least: The least number of novelties in such a batch that the calibration points can show. With fewer, nothing
            is declared novel, because a p-value is at least 1 / (M + 1) for M ranked calibration points.
    """

    novel: Bool[Tensor, "B"]
    adjusted: Float[Tensor, "B"]
    p_value: Float[Tensor, "B"]
    threshold: float
    least: int


def find_novelties(p_value: Float[Tensor, "B"], ranked: int, fdr: float) -> Novelties:
    r"""Declare samples novel by the procedure of Benjamini and Hochberg on conformal p-values.

    .. math:: \mathrm{FDR} = E\left[\frac{\#\{\text{ordinary samples declared novel}\}}
        {\max(1, \#\{\text{samples declared novel}\})}\right] \le \alpha \frac{m_0}{m}

    for m samples, :math:`m_0` of them ordinary: drawn, like the M ranked calibration points, from one distribution.

    Proof. All p-values share the calibration points, but they are positively dependent (PRDS: Bates, Candès, Lei,
    Romano and Sesia 2023, Annals of Statistics 51). Directly: fix an ordinary sample j, the set W of its score and the
    M calibration scores without their order, and all other scores. Every order of W is equally likely, so
    :math:`P(p_j \le u \mid W) \le u`. If the score of j falls within W, :math:`p_j` rises, and a larger score
    returns to the calibration points, so no other p-value falls. The number R of discoveries is thus a non-increasing
    function :math:`r(p_j)`. Let :math:`p^*` be the largest value with :math:`p^* \le \alpha r(p^*) / m`. Then
    :math:`E[1\{p_j \le \alpha R / m\} / R \mid W] \le P(p_j \le p^* \mid W) / r(p^*) \le p^* / r(p^*) \le \alpha / m`,
    and the sum over the ordinary samples is the bound. Ties only raise p-values.

    Args:
        p_value: Conformal p-values of the samples, all from the same calibration points.
        ranked: Number M of ranked calibration points.
        fdr: The wanted rate :math:`\alpha`.

    >>> found = find_novelties(torch.tensor([0.01, 0.5, 0.02, 0.9]), ranked=99, fdr=0.1)
    >>> found.novel.tolist(), found.threshold, found.adjusted.tolist(), found.least
    ([True, False, True, False], 0.02, [0.04, 0.6666666666666666, 0.04, 0.9], 1)
    """
    control = scipy_part("stats", "The false discovery rate (novelties)").false_discovery_control
    fdr = check_share(fdr, "fdr")
    # A p-value is a multiple of 1 / (M + 1), which float32 rounds.
    exact = (p_value.detach().cpu().double() * (ranked + 1)).round() / (ranked + 1)
    if not len(exact):
        return Novelties(torch.zeros(0, dtype=torch.bool), exact, exact, 0.0, 0)
    adjusted = torch.from_numpy(control(exact.numpy(), method="bh"))
    novel = adjusted <= fdr * (1.0 + _ROUNDING)
    threshold = float(exact[novel].max()) if bool(novel.any()) else 0.0
    least = math.ceil(len(exact) / (fdr * (ranked + 1)) * (1.0 - _ROUNDING))
    return Novelties(novel, adjusted, exact, threshold, least)
