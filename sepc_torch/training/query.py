r"""Query selection for active learning: ambiguous samples spread over the embedding space, and a few novel ones.

Two simpler queries do not gain on random selection: the lowest trust first, which picks outliers, and, on frozen
features, the farthest first (``experiments/active_learning.py``). A good query takes samples between classes and avoids
near-duplicates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.data.arrays import count
from sepc_torch.model.rules import Rule
from sepc_torch.shapes import Bool, Float, Int
from sepc_torch.training.flagging import Criteria, Judged
from sepc_torch.training.selection import Method, select

# Candidates per queried sample: more spread the batch better, fewer keep every candidate ambiguous. One value for all
# sets of experiments/active_learning.py, chosen on other seeds than that script reports.
BETA = 5.0
# Fraction of a query reserved for novel samples, far outside every ellipsoid.
NOVEL_SHARE = 0.1
# If a larger fraction of the pool is novel, novelty does not distinguish samples, and the query ignores it.
_MOST_NOVEL = 0.5


class Candidates(NamedTuple):
    """Unlabelled samples to choose from.

    Attributes:
        ambiguity: Ambiguity score (B,), from 0 to 1.
        novel: Whether each sample is novel (B,).
        emb: Embeddings (B, D).
    """

    ambiguity: Float[Tensor, "B"]
    novel: Bool[Tensor, "B"]
    emb: Float[Tensor, "B D"]

    @classmethod
    def of(
        cls,
        judged: Judged,
        emb: Float[Tensor, "B D"],
        logits: Float[Tensor, "B C"] | None = None,
        novel_distance: float = Criteria.novel_distance,
    ) -> Candidates:
        """Build candidates from a head's predictions and, if given, the network's logits.

        The head defines novelty. Ambiguity comes from the logits if they are given, otherwise from the head: the head
        uses the labelled samples only, while the network also carries its pretraining.
        """
        ambiguity = head_ambiguity(judged.margin) if logits is None else posterior_ambiguity(logits.softmax(dim=1))
        novel = (judged.rule == int(Rule.OUTSIDE)) & (judged.distance > novel_distance) & (judged.label >= 0)
        return cls(torch.where(judged.label >= 0, ambiguity.double(), 0.0), novel, emb)


def posterior_ambiguity(probability: Float[Tensor, "B C"]) -> Float[Tensor, "B"]:
    r"""Ambiguity from class probabilities, :math:`1 - (p_{(1)} - p_{(2)})`; 1 if the two likeliest classes tie.

    >>> posterior_ambiguity(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]))
    tensor([1., 0.])
    """
    if probability.shape[1] < 2:
        return torch.zeros(len(probability), dtype=probability.dtype)
    top = probability.topk(2, dim=1).values
    return 1.0 - (top[:, 0] - top[:, 1])


def head_ambiguity(margin: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    r"""Ambiguity from the head's margin m, :math:`\min(1, \frac{2}{1 + m})`; 1 if two classes are equally near.

    >>> head_ambiguity(torch.tensor([1.0, 3.0, torch.inf]))
    tensor([1.0000, 0.5000, 0.0000])
    """
    return (2.0 / (1.0 + margin)).clamp_max(1.0)


def choose(
    candidates: Candidates,
    k: int,
    labelled_emb: Float[Tensor, "M D"] | None = None,
    *,
    method: Method = "kmeans",
    beta: float = BETA,
    novel_share: float = NOVEL_SHARE,
) -> Int[Tensor, "n"]:
    r"""Choose k candidates to label: most of them ambiguous and spread out, a few of them novel.

    Returns the positions of the chosen candidates; of all candidates if there are fewer than k.

    Args:
        candidates: The unlabelled samples.
        k: Number of samples to choose.
        labelled_emb: Embeddings of the labelled samples; ``"kcenter"`` and ``"kmeans++"`` keep away from them.
        method: How to spread the ambiguous samples, see :func:`select`.
        beta: Candidates per chosen sample, see :func:`select`.
        novel_share: Fraction of the query for novel samples. :math:`\lfloor` ``novel_share`` times k :math:`\rfloor`
            samples are the cluster centres of the novel candidates, unless these are more than half of the pool.

    >>> emb = torch.tensor([[0.0], [0.1], [5.0], [9.0]])
    >>> few = Candidates(torch.tensor([0.9, 0.8, 0.7, 0.0]), torch.tensor([False, False, False, True]), emb)
    >>> choose(few, 2, beta=1.5, novel_share=0.0).tolist(), choose(few, 2, novel_share=0.5).tolist()
    ([0, 2], [3, 1])
    """
    k = count(k, "k", least=1)
    if not 0.0 <= novel_share <= 1.0:
        raise ValueError(f"novel_share must lie between 0 and 1; got {novel_share}.")
    # A sample whose embedding is not finite is neither ambiguous nor novel: it is chosen last.
    finite = candidates.emb.isfinite().all(dim=1)
    ambiguity = torch.where(finite, candidates.ambiguity, -torch.inf)
    if labelled_emb is not None:
        labelled_emb = labelled_emb[labelled_emb.isfinite().all(dim=1)]
    novel = (candidates.novel & finite).nonzero().squeeze(1)
    wanted = min(int(novel_share * k), len(novel))
    chosen = novel[:0]
    if wanted and len(novel) <= _MOST_NOVEL * len(candidates.novel):
        equal = torch.ones(len(novel))
        chosen = novel[select(equal, wanted, candidates.emb[novel], method="kmeans", beta=float(len(novel)))]
    if len(chosen) == k:
        return chosen
    free = torch.ones(len(candidates.novel), dtype=torch.bool)
    free[chosen] = False
    rest = free.nonzero().squeeze(1)
    wanted = k - len(chosen)
    spread = select(ambiguity[rest], wanted, candidates.emb[rest], method, labelled_emb=labelled_emb, beta=beta)
    return torch.cat([chosen, rest[spread]])
