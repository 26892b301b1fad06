r"""Which samples to ask about next: ambiguous ones, spread out, and a few that are new.

The least trusted first is no better than chance, since it picks outliers; the farthest first is worse
(``experiments/active_learning.py``). A query wants samples between classes, and not the same one many times.
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

# Candidates per sample asked for: of 3, 5 and 10 the best in the mean of eight tables (six seeds each, one value for
# all of them).
BETA = 5.0
# Share of a query that goes to samples far outside every ellipsoid.
NOVEL_SHARE = 0.1
# Where more of the pool than this is far outside, being outside says nothing of a sample.
_MOST_NOVEL = 0.5


class Candidates(NamedTuple):
    """Samples that wait for a label: how ambiguous each is and whether it is new (B,), and its embedding (B, D)."""

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
        """Candidates from what a head, and where it is known the network, says of them.

        The head learns from labelled samples alone, the network from what it saw before too; so with logits the
        network says what is ambiguous, and the head what is new.
        """
        ambiguity = head_ambiguity(judged.margin) if logits is None else posterior_ambiguity(logits.softmax(dim=1))
        novel = (judged.rule == int(Rule.OUTSIDE)) & (judged.distance > novel_distance) & (judged.label >= 0)
        return cls(torch.where(judged.label >= 0, ambiguity.double(), 0.0), novel, emb)


def posterior_ambiguity(probability: Float[Tensor, "B C"]) -> Float[Tensor, "B"]:
    r"""One less the gap between the two likeliest classes, :math:`1 - (p_{(1)} - p_{(2)})`; 1 between two classes.

    >>> posterior_ambiguity(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]))
    tensor([1., 0.])
    """
    if probability.shape[1] < 2:
        return torch.zeros(len(probability), dtype=probability.dtype)
    top = probability.topk(2, dim=1).values
    return 1.0 - (top[:, 0] - top[:, 1])


def head_ambiguity(margin: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    r"""The share of the nearer class, :math:`\frac{2}{1 + m}` at most 1, with the margin m of distances.

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
    r"""Positions of k candidates: most of them ambiguous and spread out, a few of them new.

    Args:
        candidates: What waits.
        k: How many; at most all.
        labelled_emb: Embeddings of what is labelled, to keep away from (with ``"kcenter"`` and ``"kmeans++"``).
        method: How to spread, see :func:`select`.
        beta: Candidates per sample taken.
        novel_share: :math:`\lfloor` share times k :math:`\rfloor` samples are the centres of clusters of the new ones,
            as long as those are a minority of the pool.

    >>> emb = torch.tensor([[0.0], [0.1], [5.0], [9.0]])
    >>> few = Candidates(torch.tensor([0.9, 0.8, 0.7, 0.0]), torch.tensor([False, False, False, True]), emb)
    >>> choose(few, 2, beta=1.5, novel_share=0.0).tolist(), choose(few, 2, novel_share=0.5).tolist()
    ([0, 2], [3, 1])
    """
    k = count(k, "k", least=1)
    if not 0.0 <= novel_share <= 1.0:
        raise ValueError(f"novel_share must lie between 0 and 1, got {novel_share}.")
    # A sample without a place can be neither ambiguous nor new: it is taken when nothing else is left.
    placed = candidates.emb.isfinite().all(dim=1)
    ambiguity = torch.where(placed, candidates.ambiguity, -torch.inf)
    if labelled_emb is not None:
        labelled_emb = labelled_emb[labelled_emb.isfinite().all(dim=1)]
    novel = (candidates.novel & placed).nonzero().squeeze(1)
    wanted = min(int(novel_share * k), len(novel))
    chosen = novel[:0]
    if wanted and len(novel) <= _MOST_NOVEL * len(candidates.novel):
        alike = torch.ones(len(novel))
        chosen = novel[select(alike, wanted, candidates.emb[novel], method="kmeans", beta=float(len(novel)))]
    if len(chosen) == k:
        return chosen
    free = torch.ones(len(candidates.novel), dtype=torch.bool)
    free[chosen] = False
    rest = free.nonzero().squeeze(1)
    wanted = k - len(chosen)
    spread = select(ambiguity[rest], wanted, candidates.emb[rest], method, labelled_emb=labelled_emb, beta=beta)
    return torch.cat([chosen, rest[spread]])
