"""Scores of logits, as their authors define them; larger is more to be trusted."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sepc_torch.baselines.parts import check_labels
from sepc_torch.inputs import count, positive
from sepc_torch.shapes import Float, Int


def max_softmax(logits: Float[Tensor, "B C"], temperature: float = 1.0) -> Float[Tensor, "B"]:
    r"""The largest softmax probability (Hendrycks and Gimpel 2017), :math:`\max_c \mathrm{softmax}(l / T)_c`.

    >>> max_softmax(torch.tensor([[0.0, math.log(3.0)]]))
    tensor([0.7500], dtype=torch.float64)
    """
    return (logits.double() / positive(temperature, "temperature", "logits")).softmax(dim=1).amax(dim=1)


def entropy(logits: Float[Tensor, "B C"]) -> Float[Tensor, "B"]:
    r"""Minus the entropy of the softmax, :math:`\sum_c p_c \log p_c`.

    >>> entropy(torch.tensor([[1.0, 1.0]]))
    tensor([-0.6931], dtype=torch.float64)
    """
    return -torch.special.entr(logits.double().softmax(dim=1)).sum(dim=1)


def max_logit(logits: Float[Tensor, "B C"]) -> Float[Tensor, "B"]:
    r"""The largest logit (Hendrycks et al. 2022), :math:`\max_c l_c`.

    >>> max_logit(torch.tensor([[1.0, 4.0]]))
    tensor([4.], dtype=torch.float64)
    """
    return logits.double().amax(dim=1)


def energy(logits: Float[Tensor, "B C"]) -> Float[Tensor, "B"]:
    r"""Minus the free energy (Liu et al. 2020), :math:`\log \sum_c e^{l_c}`.

    >>> energy(torch.tensor([[0.0, 0.0]]))
    tensor([0.6931], dtype=torch.float64)
    """
    return logits.double().logsumexp(dim=1)


def gen(logits: Float[Tensor, "B C"], gamma: float = 0.1, m: int = 100) -> Float[Tensor, "B"]:
    r"""Minus the generalised entropy (Liu et al. 2023), :math:`-\sum_c (p_c (1 - p_c))^\gamma` over the top m.

    >>> gen(torch.tensor([[0.0, 0.0]]), gamma=0.5)
    tensor([-1.], dtype=torch.float64)
    """
    p = logits.double().softmax(dim=1).sort(dim=1, descending=True).values
    # One minus the likeliest is the sum of the others: as a difference its rounding would show in a power below one.
    others = torch.cat([p[:, 1:].sum(dim=1, keepdim=True), 1.0 - p[:, 1:]], dim=1)
    terms = (p * others).pow(gamma)
    return -terms[:, : count(m, "m", least=1)].sum(dim=1)


def fit_temperature(logits: Float[Tensor, "N C"], labels: Int[Tensor, "N"]) -> float:
    r"""The temperature (Guo et al. 2017) of the least :math:`-\sum_i \log \mathrm{softmax}(l_i / T)_{y_i}`.

    The loss is convex in :math:`b = 1 / T`: Newton's steps on its slope, and halves of the bracket where these leave it
    or do not shrink. The bracket spans six decades about one over the spread of the logits. Labels that the logits
    never miss have no best temperature, nor have labels that they always miss: they get a very small or large one.

    >>> logits = torch.tensor([[0.0, math.log(9.0)]]).repeat(4, 1)
    >>> round(fit_temperature(logits, torch.tensor([1, 1, 1, 0])), 6)  # log 9 / log 3: right three times of four
    2.0
    """
    values = logits.detach().double()
    check_labels(labels, len(values))
    own = values.gather(1, labels.long().unsqueeze(1))
    margin = values - own  # to the label; the softmax does not see what is common to a row
    spread = float(values.std(dim=1, correction=0).mean())
    if not spread > 0:
        return 1.0  # equal logits: no temperature changes anything
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
