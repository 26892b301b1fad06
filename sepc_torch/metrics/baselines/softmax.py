"""Logit scores: maximum softmax, entropy, maximum logit, energy and GEN; a higher score means more trust."""

from __future__ import annotations

import torch
from torch import Tensor

from sepc_torch.data.options import count, positive
from sepc_torch.shapes import Float


def max_softmax(logits: Float[Tensor, "B C"], temperature: float = 1.0) -> Float[Tensor, "B"]:
    r"""Largest softmax probability (Hendrycks and Gimpel 2017), :math:`\max_c \mathrm{softmax}(l / T)_c`.

    >>> max_softmax(torch.tensor([[1.0, 3.0]]).log())
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
    r"""Largest logit (Hendrycks et al. 2022), :math:`\max_c l_c`.

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
    # 1 - p of the likeliest class is computed as the sum of the other p: a power below one amplifies the rounding error
    # of the difference.
    others = torch.cat([p[:, 1:].sum(dim=1, keepdim=True), 1.0 - p[:, 1:]], dim=1)
    terms = (p * others).pow(gamma)
    return -terms[:, : count(m, "m", least=1)].sum(dim=1)
