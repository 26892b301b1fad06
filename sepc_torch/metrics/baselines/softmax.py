"""Scores of logits, as their authors define them; larger is more to be trusted."""

from __future__ import annotations

import torch
from torch import Tensor

from sepc_torch.data.arrays import count, positive
from sepc_torch.shapes import Float


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
