r"""Query selection for active learning: ambiguous samples spread over the embedding space, and a few novel ones.

Two simpler queries do not gain on random selection: the lowest trust first, which picks outliers, and, on frozen
features, the farthest first (``experiments/labels``). A good query takes samples between classes and avoids
near-duplicates: the candidates are clustered, and each cluster gives its most ambiguous sample. The most ambiguous
sample of all is therefore always chosen, as margin sampling would.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from scipy.stats import false_discovery_control
from torch import Tensor

from sepc_torch.data.options import check_count
from sepc_torch.head.promises.conformal import check_share, upper_bound
from sepc_torch.shapes import Bool, Float, Int
from sepc_torch.training.flags import Rows, is_novel
from sepc_torch.training.selection import Method, select

# How the ambiguous samples of a query are spread, see :func:`select`.
METHOD: Method = "clusters"
# Candidates per queried sample: more spread the batch better, fewer keep every candidate ambiguous. One value for all
# sets of experiments/active_learning.py, chosen on other seeds than that script reports.
BETA = 5.0
# Fraction of a query reserved for novel samples, far outside every ellipsoid.
NOVEL_SHARE = 0.1
# Allowed share of ordinary samples among those that p-values call novel; a query reserves few places for them.
FALSE_NOVELTY = 0.1
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
    def of(cls, rows: Rows) -> Candidates:
        """Build candidates from the columns of :func:`~sepc_torch.training.flags.assess` and the embeddings ``emb``.

        The head defines novelty: by the p-values of a calibrated head (:func:`discoveries`), otherwise by the distance
        to its ellipsoids. Ambiguity comes from the margin of the network's probabilities if the rows hold its
        ``logits``, otherwise from the head: the head uses the labelled samples only, while the network also carries
        its pretraining.

        >>> from sepc_torch.head.trust_head import TrustHead
        >>> from sepc_torch.training.flags import assess
        >>> head = TrustHead.fit([[0.0], [1.0], [5.0], [6.0]], [0, 0, 1, 1], dim=1, normalize=None)
        >>> z = torch.tensor([[0.5], [3.1], [5.5]])
        >>> logits = torch.tensor([[4.0, 0.0], [0.1, 0.0], [0.0, 4.0]])
        >>> choose(Candidates.of({**assess(head, z, logits), "emb": z, "logits": logits}), k=1)
        tensor([1])
        """
        if "logits" in rows:
            ambiguity = posterior_ambiguity(rows["logits"].softmax(dim=1))
        else:
            ambiguity = head_ambiguity(rows["margin"])
        valid = rows["label"] >= 0
        if "p_value" in rows:
            novel = discoveries(torch.where(valid, rows["p_value"].double(), 1.0)) & valid
        else:
            novel = is_novel(rows)
        return cls(torch.where(valid, ambiguity.double(), 0.0), novel, rows["emb"])


class Stop(NamedTuple):
    """Answer to the question whether to stop labelling; see :func:`stopping_rule`.

    Attributes:
        stop: Whether the bound is at most the allowed error.
        bound: Upper confidence bound of the share of wrong labels among the accepted ones; 1 without points.
        points: Number of labelled held-out samples that the head accepts.
        errors: Number of these whose label is wrong.
    """

    stop: bool
    bound: float
    points: int
    errors: int


def stopping_rule(accepted: Bool[Tensor, "M"], right: Bool[Tensor, "M"], error: float, delta: float = 0.05) -> Stop:
    r"""Decide whether the labels that the head accepts in the rest of the pool are good enough to stop labelling.

    Of n accepted held-out samples e have a wrong label. The Clopper-Pearson bound is the largest share r of wrong
    labels for which at most e errors still have the probability :math:`P(\mathrm{Bin}(n, r) \le e) = \delta`. It holds
    with probability :math:`1 - \delta` for samples drawn like the held-out ones, if these had no part in the training,
    the calibration and the threshold. Every further question has its own :math:`\delta`.

    Args:
        accepted: Whether the head accepts each held-out sample.
        right: Whether its label is right.
        error: The allowed share of wrong labels, above 0.
        delta: The allowed probability that the bound fails.

    >>> yes = torch.ones(59, dtype=torch.bool)
    >>> stopping_rule(yes, yes, error=0.05)
    Stop(stop=True, bound=0.0495..., points=59, errors=0)
    """
    error, delta = check_share(error, "error"), check_share(delta, "delta")
    points, errors = int(accepted.sum()), int((accepted & ~right).sum())
    bound = upper_bound(errors, points, delta)
    return Stop(bound <= error, bound, points, errors)


def discoveries(p_value: Float[Tensor, "B"], level: float = FALSE_NOVELTY) -> Bool[Tensor, "B"]:
    r"""Novel samples by the procedure of Benjamini and Hochberg: on average at most a share ``level`` is not novel.

    The k smallest p-values are chosen, with the largest k for which the k-th is at most :math:`\frac{k}{B}` times the
    level. Conformal p-values keep the promise (Bates et al. 2023). In a pool without novel samples few are chosen,
    however large it is; a fixed threshold of 5 % would choose every twentieth.

    >>> discoveries(torch.tensor([0.001, 0.5, 0.02, 0.9]))
    tensor([ True, False,  True, False])
    """
    if not len(p_value):
        return torch.zeros(0, dtype=torch.bool)
    return torch.from_numpy(false_discovery_control(p_value.double().numpy())) <= level


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
    method: Method = METHOD,
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
    ([0, 2], [3, 0])
    """
    k = check_count(k, "k", least=1)
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
