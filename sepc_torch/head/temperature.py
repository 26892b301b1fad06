"""Temperature scaling of a network's logits (Guo et al. 2017), for the calibration of a head and for baselines."""

from __future__ import annotations

import math

from torch import Tensor

from sepc_torch.model.queries import check_labels
from sepc_torch.shapes import Float, Int


def fit_temperature(logits: Float[Tensor, "N C"], labels: Int[Tensor, "N"]) -> float:
    r"""Fit the temperature T that minimises the cross-entropy :math:`-\sum_i \log \mathrm{softmax}(l_i / T)_{y_i}`.

    The loss is convex in :math:`b = 1 / T`. The search takes Newton steps on its slope. It bisects the bracket
    (geometric mean) when a Newton step leaves the bracket or does not shrink. The bracket spans six decades around one
    over the mean standard deviation of the logits. If the logits are right for all labels, or wrong for all, no finite
    positive temperature is optimal; the result then lies at an end of the bracket.

    Args:
        logits: Logits :math:`l_i`; finite.
        labels: True classes :math:`y_i`, as indices from 0.

    Returns:
        The temperature; 1.0 if the logits of every row are equal.

    >>> import torch
    >>> logits = torch.tensor([[0.0, math.log(9.0)]]).repeat(4, 1)
    >>> round(fit_temperature(logits, torch.tensor([1, 1, 1, 0])), 6)  # log 9 / log 3: right three times of four
    2.0
    """
    values = logits.detach().double()
    check_labels(labels, len(values))
    own = values.gather(1, labels.long().unsqueeze(1))
    margin = values - own  # relative to the true class: softmax ignores a constant added to a row
    spread = float(values.std(dim=1, correction=0).mean())
    if not spread > 0:
        return 1.0  # equal logits: no temperature changes the softmax
    low, high = 1e-3 / spread, 1e3 / spread
    b, moved = math.sqrt(low * high), math.inf
    for _ in range(200):
        p = (b * margin).softmax(dim=1)
        mean = (p * margin).sum(dim=1)
        slope = float(mean.mean())
        curvature = float(((p * margin.square()).sum(dim=1) - mean.square()).mean())
        low, high = (b, high) if slope < 0 else (low, b)
        newton = b - slope / curvature if curvature > 0 else math.inf
        shrinks = low < newton < high and abs(newton - b) < moved / 2
        following = newton if shrinks else math.sqrt(low * high)
        moved = abs(following - b)
        b = following
        if moved <= 1e-14 * b:
            break
    return 1.0 / b
