"""Scores that need the weight and bias of the last layer: ReAct, ASH, SCALE, DICE, NCI and fDBD.

A higher score means more trust. ReAct, ASH and SCALE change the embedding, DICE the weights; the score is then the
energy of the changed logits. Their authors assume activations after a ReLU. The authors of ASH change the activations
before pooling; here, as in OpenOOD, it changes the pooled embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sepc_torch.metrics.baselines.softmax import energy
from sepc_torch.shapes import Float

# Shares as the authors use them: ReAct on ImageNet and CIFAR, ASH-S and SCALE on ImageNet, DICE on CIFAR.
REACT, ASH, SCALE, DICE_SPARSITY = 0.9, 0.9, 0.85, 0.9
# Weight of the norm in OpenOOD's settings of NCI, which its authors wrote.
NCI_ALPHA = 1e-4


def ash(
    z: Float[Tensor, "B D"], weight: Float[Tensor, "C D"], bias: Float[Tensor, "C"], *, pruned: float = ASH
) -> Float[Tensor, "B"]:
    r"""Activation shaping, variant S (ASH-S, Djurisic et al. 2023): the energy of :math:`W e^{s / s'} z' + b`.

    :math:`z'` keeps the largest entries of z and sets the share ``pruned`` to zero; s and s' are the sums of the
    entries of z and z'.

    >>> z, weight = torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    >>> ash(z, weight, torch.zeros(1), pruned=0.5)  # 3 exp(4 / 3)
    tensor([11.3810], dtype=torch.float64)
    """
    points = z.detach().double()
    kept = _largest(points, pruned)
    shaped = torch.zeros_like(points).scatter(1, kept.indices, kept.values)
    return _energy(_stretch(points, kept.values) * shaped, weight, bias)


def scale(
    z: Float[Tensor, "B D"], weight: Float[Tensor, "C D"], bias: Float[Tensor, "C"], *, pruned: float = SCALE
) -> Float[Tensor, "B"]:
    r"""Activation scaling (SCALE, Xu et al. 2024): the energy of :math:`W e^{s / s'} z + b`, without pruning.

    s is the sum of all entries of z and s' that of the largest ones, without the share ``pruned``.

    >>> z, weight = torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 1.0]])
    >>> scale(z, weight, torch.zeros(1), pruned=0.5)  # 4 exp(4 / 3)
    tensor([15.1747], dtype=torch.float64)
    """
    points = z.detach().double()
    return _energy(_stretch(points, _largest(points, pruned).values) * points, weight, bias)


@dataclass(frozen=True, eq=False)
class ReAct:
    r"""Rectified activations (ReAct, Sun et al. 2021): the energy of :math:`W \min(z, c) + b`.

    c is the quantile ``quantile`` of all activations of the training set.

    >>> found = ReAct.fit(torch.tensor([[0.0, 1.0, 2.0]]), torch.ones(1, 3), torch.zeros(1), quantile=0.5)
    >>> found.score(torch.tensor([[5.0, 0.5, 3.0]]))
    tensor([2.5000], dtype=torch.float64)
    """

    limit: float
    weight: Float[Tensor, "C D"]
    bias: Float[Tensor, "C"]

    @classmethod
    def fit(
        cls,
        z: Float[Tensor, "N D"],
        weight: Float[Tensor, "C D"],
        bias: Float[Tensor, "C"],
        *,
        quantile: float = REACT,
    ) -> ReAct:
        """Find the limit from training embeddings."""
        return cls(_quantile(z.detach().double(), _share(quantile, "quantile")), weight, bias)

    def score(self, z: Float[Tensor, "B D"]) -> Float[Tensor, "B"]:
        """Energy of the logits of the clipped embeddings."""
        return _energy(z.detach().double().clamp_max(self.limit), self.weight, self.bias)


@dataclass(frozen=True, eq=False)
class DICE:
    r"""Sparse weights (DICE, Sun and Li 2022): the energy of :math:`(M \odot W) z + b`.

    The mask M keeps a weight :math:`w_{cd}` if its contribution :math:`w_{cd} \bar z_d` is above the quantile
    ``sparsity`` of all contributions, where :math:`\bar z` is the mean training embedding.

    >>> found = DICE.fit(torch.ones(1, 2), torch.tensor([[1.0, 3.0]]), torch.zeros(1), sparsity=0.5)
    >>> found.score(torch.tensor([[5.0, 2.0]]))
    tensor([6.], dtype=torch.float64)
    """

    weight: Float[Tensor, "C D"]
    bias: Float[Tensor, "C"]

    @classmethod
    def fit(
        cls,
        z: Float[Tensor, "N D"],
        weight: Float[Tensor, "C D"],
        bias: Float[Tensor, "C"],
        *,
        sparsity: float = DICE_SPARSITY,
    ) -> DICE:
        """Find the mask from training embeddings."""
        full = weight.detach().double()
        contribution = full * z.detach().double().mean(dim=0)
        return cls(full * (contribution > _quantile(contribution, _share(sparsity, "sparsity"))), bias)

    def score(self, z: Float[Tensor, "B D"]) -> Float[Tensor, "B"]:
        """Energy of the logits of the sparse layer."""
        return _energy(z.detach().double(), self.weight, self.bias)


@dataclass(frozen=True, eq=False)
class NCI:
    r"""Neural-collapse score (NCI, Liu and Qin 2025), :math:`w_p^\top (z - \mu) / \|z - \mu\|_2 + \alpha \|z\|_1`.

    p is the predicted class, :math:`\mu` the mean of the training embeddings. The authors choose :math:`\alpha` with
    examples of unknowns; ``alpha`` is their setting without such a choice.

    >>> found = NCI.fit(torch.zeros(1, 2), torch.eye(2), alpha=0.1)
    >>> found.score(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.0]]))  # 4 / 5 + 0.1 * 7
    tensor([1.5000], dtype=torch.float64)
    """

    mean: Float[Tensor, "D"]
    weight: Float[Tensor, "C D"]
    alpha: float

    @classmethod
    def fit(cls, z: Float[Tensor, "N D"], weight: Float[Tensor, "C D"], *, alpha: float = NCI_ALPHA) -> NCI:
        """Compute the mean of the training embeddings."""
        return cls(z.detach().double().mean(dim=0), weight.detach().double(), alpha)

    def score(self, z: Float[Tensor, "B D"], logits: Float[Tensor, "B C"]) -> Float[Tensor, "B"]:
        """Alignment with the weights of the predicted class, and the norm of the embedding."""
        points = z.detach().double()
        centred = points - self.mean
        aligned = (centred * self.weight[logits.argmax(dim=1)]).sum(dim=1)
        length = centred.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
        return aligned / length + self.alpha * points.abs().sum(dim=1)


@dataclass(frozen=True, eq=False)
class FDBD:
    r"""Distance to the decision boundaries (fDBD, Liu and Qin 2024), relative to the distance from the training mean.

    .. math:: \frac{1}{\|z - \mu\|} \, \frac{1}{C - 1} \sum_{c \ne p} \frac{|l_p - l_c|}{\|w_p - w_c\|}

    p is the predicted class and w_c the weights of the last layer.

    >>> found = FDBD.fit(torch.zeros(1, 2), torch.eye(2))
    >>> found.score(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.0]])).round(decimals=4)
    tensor([0.1414], dtype=torch.float64)
    """

    mean: Float[Tensor, "D"]
    apart: Float[Tensor, "C C"]

    @classmethod
    def fit(cls, z: Float[Tensor, "N D"], weight: Float[Tensor, "C D"]) -> FDBD:
        """Compute the mean of the training embeddings and the distances between the weights of the classes."""
        weight = weight.detach().double()
        return cls(z.detach().double().mean(dim=0), (weight.unsqueeze(1) - weight).norm(dim=2))

    def score(self, z: Float[Tensor, "B D"], logits: Float[Tensor, "B C"]) -> Float[Tensor, "B"]:
        """Mean distance to the boundaries between the predicted class and the others."""
        logits = logits.detach().double()
        best, predicted = logits.max(dim=1, keepdim=True)
        # The boundary of the predicted class with itself counts zero: its logit difference is zero.
        least = 1e-100  # below all distances, and the inverse of its square is finite
        boundaries = ((best - logits) / self.apart[predicted.squeeze(1)].clamp_min(least)).sum(dim=1)
        away = (z.detach().double() - self.mean).norm(dim=1).clamp_min(least)
        return boundaries / max(1, logits.shape[1] - 1) / away


def _energy(z: Float[Tensor, "B D"], weight: Float[Tensor, "C D"], bias: Float[Tensor, "C"]) -> Float[Tensor, "B"]:
    """Energy of the logits of the last layer."""
    return energy(z @ weight.detach().double().T + bias.detach().double())


def _largest(z: Float[Tensor, "B D"], pruned: float) -> torch.return_types.topk:
    """The largest entries of every row, without the share ``pruned`` of them; at least one."""
    dim = z.shape[1]
    return z.topk(max(1, dim - round(dim * _share(pruned, "pruned"))), dim=1)


def _stretch(z: Float[Tensor, "B D"], kept: Float[Tensor, "B k"]) -> Float[Tensor, "B 1"]:
    r"""The factor :math:`e^{s / s'}`; it is at most one for rows whose largest entries have no positive sum."""
    tiny = torch.finfo(torch.float64).tiny
    return (z.sum(dim=1, keepdim=True) / kept.sum(dim=1, keepdim=True).clamp_min(tiny)).exp()


def _quantile(values: Tensor, share: float) -> float:
    """The quantile with linear interpolation, as in NumPy; ``torch.quantile`` takes at most 16 million values."""
    ordered = values.flatten().sort().values
    place = share * (len(ordered) - 1)
    low = int(place)
    return float(torch.lerp(ordered[low], ordered[min(low + 1, len(ordered) - 1)], place - low))


def _share(value: float, name: str) -> float:
    """Check a share of at least 0 and below 1."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}.")
    return float(value)
