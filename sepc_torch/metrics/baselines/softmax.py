"""Logit scores: softmax, entropy, largest logit, energy, GEN, margins, KL matching; a higher score means more trust."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sepc_torch.data.options import check_count, check_positive
from sepc_torch.metrics.selective import aurc
from sepc_torch.shapes import Float, Int

# Exponents among which the authors of MaxLogit-pNorm choose. The norm with exponent 0 counts the logits.
_EXPONENTS = range(10)


def max_softmax(logits: Float[Tensor, "B C"], temperature: float = 1.0) -> Float[Tensor, "B"]:
    r"""Largest softmax probability (Hendrycks and Gimpel 2017), :math:`\max_c \mathrm{softmax}(l / T)_c`.

    >>> max_softmax(torch.tensor([[1.0, 3.0]]).log())
    tensor([0.7500], dtype=torch.float64)
    """
    return (logits.double() / check_positive(temperature, "temperature", "logits")).softmax(dim=1).amax(dim=1)


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
    return -terms[:, : check_count(m, "m", least=1)].sum(dim=1)


def margin(
    logits: Float[Tensor, "B C"],
    *,
    classifier: tuple[Float[Tensor, "C D"], Float[Tensor, "C"]] | None = None,
) -> Float[Tensor, "B"]:
    r"""Margin of the logits (RL-conf-M, Liang, Peng and Sun 2024), the largest minus the second largest logit.

    With ``classifier``, weight and bias of the last layer, the geometric margin (RL-geo-M): the same difference of
    :math:`l_c / \|(w_c, b_c)\|_2`, as in the authors' code.

    >>> logits = torch.tensor([[1.0, 4.0, 2.0]])
    >>> margin(logits), margin(logits, classifier=(torch.tensor([[1.0], [4.0], [1.0]]), torch.zeros(3)))
    (tensor([2.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    values = logits.detach().double()
    if classifier is not None:
        weight, bias = (part.detach().double() for part in classifier)
        lengths = torch.cat([weight, bias.unsqueeze(1)], dim=1).norm(dim=1)
        values = values / lengths.clamp_min(torch.finfo(torch.float64).tiny)
    if values.shape[1] == 1:
        return values.squeeze(1)
    first, second = values.topk(2, dim=1).values.unbind(dim=1)
    return first - second


@dataclass(frozen=True, eq=False)
class MaxLogitPNorm:
    r"""MaxLogit-pNorm (Cattelan and Silva 2024), the largest centred logit divided by the p-norm of all.

    .. math:: \max_c (l_c - \bar l) \,/\, \|l - \bar l\|_p

    ``fit`` chooses p from 0 to 9 by the AURC of held-out rows, as the authors do. As there, the score is max softmax
    (p is None) if no p has a lower AURC.

    >>> MaxLogitPNorm(2).score(torch.tensor([[3.0, -1.0, -2.0]])).round(decimals=4)  # 3 / sqrt(14)
    tensor([0.8018], dtype=torch.float64)
    """

    p: int | None

    @classmethod
    def fit(cls, logits: Float[Tensor, "M C"], labels: Int[Tensor, "M"]) -> MaxLogitPNorm:
        """Choose p from logits and labels of held-out rows; among equal AURC the first of max softmax, 0, 1, ..."""
        right = logits.argmax(dim=1) == labels
        choices = [cls(None), *map(cls, _EXPONENTS)]
        return min(choices, key=lambda choice: float(aurc(choice.score(logits), right)))

    def score(self, logits: Float[Tensor, "B C"]) -> Float[Tensor, "B"]:
        """The normalised largest logit; 0 for a row of equal logits."""
        if self.p is None:
            return max_softmax(logits)
        centred = logits.detach().double()
        centred = centred - centred.mean(dim=1, keepdim=True)
        length = float(centred.shape[1]) if self.p == 0 else centred.norm(p=self.p, dim=1)
        ratio = centred.amax(dim=1) / torch.as_tensor(length).clamp_min(torch.finfo(torch.float64).tiny)
        # With two or three classes the ratio is equal in many rows, which rounding errors must not rank.
        return ratio.round(decimals=12)


@dataclass(frozen=True, eq=False)
class KLMatching:
    r"""KL matching (Hendrycks et al. 2022), :math:`-\min_k D_{KL}(p \| d_k)`.

    p is the softmax; :math:`d_k` is the mean softmax of the held-out rows that the network labels k. Classes that it
    never predicts there are left out.

    >>> found = KLMatching.fit(torch.tensor([[0.75, 0.25], [0.25, 0.75]]).log())
    >>> found.score(torch.tensor([[0.5, 0.5]]).log()).round(decimals=4)  # log(1 / 0.75) / 2
    tensor([-0.1438], dtype=torch.float64)
    """

    log_typical: Float[Tensor, "K C"]

    @classmethod
    def fit(cls, logits: Float[Tensor, "M C"]) -> KLMatching:
        """Store the logarithm of the mean softmax of every predicted class."""
        logs = logits.detach().double().log_softmax(dim=1)
        predicted = logs.argmax(dim=1)
        rows = [logs[predicted == label] for label in predicted.unique()]
        return cls(torch.stack([own.logsumexp(dim=0) - math.log(len(own)) for own in rows]))

    def score(self, logits: Float[Tensor, "B C"]) -> Float[Tensor, "B"]:
        """Minus the divergence from the closest mean softmax."""
        logs = logits.detach().double().log_softmax(dim=1)
        p = logs.exp()
        return ((p @ self.log_typical.T).amax(dim=1) - (p * logs).sum(dim=1)).clamp_max(0.0)
