"""Scores of embeddings and logits together: NNGuide, SHE and SIRC; a higher score means more trust."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sepc_torch.data.options import check_count
from sepc_torch.metrics.baselines.shared import ENTRIES, class_means, training, unit
from sepc_torch.metrics.baselines.softmax import energy
from sepc_torch.shapes import Float, Int


@dataclass(frozen=True, eq=False)
class NNGuide:
    r"""Nearest-neighbour guidance (Park et al. 2023): the energy times a mean of energy-weighted cosines.

    .. math:: E(z) \, \frac1k \sum_{i \in N_k} E(z_i) \cos(z, z_i)

    :math:`N_k` are the k training points with the largest products :math:`E(z_i) \cos(z, z_i)`. The authors take k = 10
    and, for ImageNet, 1 % of the training points; here all are used.

    >>> z, logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[3.0, -50.0], [-50.0, 2.0]])
    >>> NNGuide.fit(z, logits, k=1).score(torch.tensor([[1.0, 1.0]]), logits[:1]).round(decimals=4)
    tensor([6.3640], dtype=torch.float64)
    """

    bank: Float[Tensor, "N D"]
    k: int

    @classmethod
    def fit(cls, z: Float[Tensor, "N D"], logits: Float[Tensor, "N C"], *, k: int = 10) -> NNGuide:
        """Store the directions of the training embeddings, times the energy of their logits; k is capped at N."""
        bank = unit(z.detach().double()) * energy(logits).unsqueeze(1)
        return cls(bank, min(check_count(k, "k", least=1), len(bank)))

    def score(self, z: Float[Tensor, "B D"], logits: Float[Tensor, "B C"]) -> Float[Tensor, "B"]:
        """The energy of the logits times the guidance of the neighbours."""
        pieces = unit(z.detach().double()).split(max(1, ENTRIES // len(self.bank)))
        guidance = [(piece @ self.bank.T).topk(self.k, dim=1).values.mean(dim=1) for piece in pieces]
        return energy(logits) * torch.cat(guidance)


@dataclass(frozen=True, eq=False)
class SHE:
    r"""Simplified Hopfield energy (SHE, Zhang et al. 2023), :math:`z^\top s_p`.

    p is the predicted class. The pattern :math:`s_c` is the mean of the training embeddings of class c that the network
    labels correctly; of all embeddings of the class if it labels none correctly.

    >>> z, logits = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 1.0]]), torch.eye(2)[[0, 0, 1]]
    >>> SHE.fit(z, torch.tensor([0, 0, 1]), logits).score(torch.tensor([[1.0, 1.0]]), logits[:1])
    tensor([2.], dtype=torch.float64)
    """

    patterns: Float[Tensor, "C D"]

    @classmethod
    def fit(cls, z: Float[Tensor, "N D"], y: Int[Tensor, "N"], logits: Float[Tensor, "N C"]) -> SHE:
        """Store a pattern for every class."""
        points, labels, classes = training(z, y)
        right = logits.argmax(dim=1) == labels
        used = right | (torch.bincount(labels[right], minlength=classes)[labels] == 0)
        return cls(class_means(points[used], labels[used], classes))

    def score(self, z: Float[Tensor, "B D"], logits: Float[Tensor, "B C"]) -> Float[Tensor, "B"]:
        """Inner product with the pattern of the predicted class."""
        return (z.detach().double() * self.patterns[logits.argmax(dim=1)]).sum(dim=1)


@dataclass(frozen=True, eq=False)
class SIRC:
    r"""Softmax information retaining combination (Xia and Bouganis 2022), of max softmax and the L1 norm of embeddings.

    .. math:: -(1 - p_{\max}) \left(1 + e^{-b (\|z\|_1 - a)}\right), \qquad a = \mu - 3 \sigma, \quad b = 1 / \sigma,

    where :math:`\mu` and :math:`\sigma` are mean and standard deviation of the norms of training embeddings. The score
    here is minus the logarithm of minus this, which has the same order.

    >>> found = SIRC.fit(torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    >>> found.score(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 1.0]])).round(decimals=4)
    tensor([0.6446], dtype=torch.float64)
    """

    a: float
    b: float

    @classmethod
    def fit(cls, z: Float[Tensor, "N D"]) -> SIRC:
        """Compute the two parameters from training embeddings."""
        norms = z.detach().double().abs().sum(dim=1)
        deviation = float(norms.std(correction=0).clamp_min(torch.finfo(torch.float64).tiny))
        return cls(float(norms.mean()) - 3.0 * deviation, 1.0 / deviation)

    def score(self, z: Float[Tensor, "B D"], logits: Float[Tensor, "B C"]) -> Float[Tensor, "B"]:
        """Minus the log of the combined score."""
        probabilities = logits.detach().double().softmax(dim=1)
        # 1 - p is the sum of the other probabilities: the difference would round to zero for sure predictions.
        others = probabilities.scatter(1, probabilities.argmax(dim=1, keepdim=True), 0.0).sum(dim=1)
        norms = z.detach().double().abs().sum(dim=1)
        excess = torch.nn.functional.softplus(-self.b * (norms - self.a), threshold=torch.inf)
        return -others.clamp_min(torch.finfo(torch.float64).tiny).log() - excess
