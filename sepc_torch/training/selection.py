r"""Batch selection by score and diversity: clusters, k-centre, k-means, k-means++, top-k and Gumbel top-k.

The :math:`\beta k` highest scores are the candidates. The batch is spread over the candidates' embeddings, so that it
does not hold near-duplicates.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sepc_torch.data.options import check_count
from sepc_torch.shapes import Float, Int

Method = Literal["clusters", "kcenter", "kmeans", "topk", "kmeans++", "gumbel"]

# Limit on Lloyd's iterations, which keeps the running time predictable.
_ITERATIONS = 20


def select(
    score: Float[Tensor, "B"],
    k: int,
    emb: Float[Tensor, "B D"] | None = None,
    method: Method = "kcenter",
    *,
    labelled_emb: Float[Tensor, "M D"] | None = None,
    beta: float = 5.0,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "k"]:
    r"""Select k samples to label and return their positions; deterministic on every machine and process.

    Args:
        score: Value of labelling each sample; higher is better. Samples with score -inf are selected last, and their
            embeddings are ignored.
        k: Number of samples to select; all samples if there are fewer.
        emb: Embeddings of the samples. All methods except ``"topk"`` and ``"gumbel"`` need them.
        method: ``"kcenter"`` takes the :math:`\beta k` highest scores and repeatedly selects the candidate farthest
            from all selected and labelled samples. ``"kmeans"`` clusters these candidates, weighted by score, and
            selects the candidate nearest to each centre, so typical rather than extreme samples. ``"clusters"``
            selects the highest score of each of these clusters. ``"kmeans++"`` draws from all samples with probability
            proportional to score times squared distance to the selected and labelled samples. ``"topk"`` selects the
            highest scores. ``"gumbel"`` draws from all samples with probability proportional to score.
        labelled_emb: Embeddings of the labelled samples; ``"kcenter"`` and ``"kmeans++"`` keep away from them.
        beta: Candidates per selected sample, for ``"clusters"``, ``"kcenter"`` and ``"kmeans"``.
        generator: Random generator of ``"kmeans++"`` and ``"gumbel"``; by default one with seed 0.

    >>> score = torch.tensor([0.9, 0.9, 0.8, 0.1])
    >>> emb = torch.tensor([[0.0], [0.1], [5.0], [9.0]])
    >>> select(score, 2, emb, method="topk").tolist(), select(score, 2, emb, beta=1.5).tolist()
    ([0, 1], [0, 2])
    """
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(map(repr, get_args(Method)))}, got {method!r}.")
    if not beta >= 1.0:
        raise ValueError(f"beta, the number of candidates per selected sample, must be at least 1; got {beta}.")
    if bool(score.isnan().any()):
        raise ValueError("score holds NaN; expected finite scores, or -inf for samples to select last.")
    if bool(score.isposinf().any()):
        raise ValueError(
            "score holds +inf; expected finite scores, or -inf for samples to select last. Give the samples to select "
            "first the largest finite score."
        )
    k = min(check_count(k, "k", least=1), len(score))
    order = score.argsort(descending=True, stable=True)
    if method == "topk" or k == 0:
        return order[:k]
    if method != "gumbel":
        if emb is None or len(emb) != len(score):
            given = "none" if emb is None else f"{len(emb)}"
            raise ValueError(f"method={method!r} needs an embedding for each of the {len(score)} scores; got {given}.")
        _check_finite(emb[score > -torch.inf], "emb", "Give these samples the score -inf.")
        if labelled_emb is not None:
            _check_finite(labelled_emb, "labelled_emb", "Leave these samples out.")
    wanted = (score > -torch.inf).nonzero().squeeze(1)
    if len(wanted) < len(score) and len(wanted) <= k:  # all finite scores first, then -inf
        return order[:k]
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    score = score[wanted]
    if method == "gumbel":
        return wanted[_gumbel(score, k, generator)]
    assert emb is not None  # checked above
    emb = emb[wanted].double()  # float64, so that rounding does not change the selection between devices
    taken = torch.empty(0, emb.shape[1], dtype=emb.dtype) if labelled_emb is None else labelled_emb.double()
    if method == "kmeans++":
        return wanted[_kmeans_plus_plus(score, k, emb, taken, generator)]
    candidates = score.argsort(descending=True, stable=True)[: min(len(score), round(beta * k))]
    if method in ("clusters", "kmeans"):
        centers, owner = _kmeans(score[candidates], k, emb[candidates])
        chosen = _highest(owner, k) if method == "clusters" else _nearest_to(centers, emb[candidates])
        return wanted[candidates[chosen]]
    return wanted[candidates[_kcenter(k, emb[candidates], taken)]]


def _check_finite(emb: Float[Tensor, "B D"], name: str, advice: str) -> None:
    bad = (~emb.isfinite().all(dim=1)).nonzero().squeeze(1)
    if len(bad):
        raise ValueError(
            f"{name} must be finite to compute distances; {len(bad)} of {len(emb)} rows hold NaN or infinity. {advice}"
        )


def nearest_squared(emb: Float[Tensor, "B D"], others: Float[Tensor, "M D"]) -> Float[Tensor, "B"]:
    """Squared distance from each point to the nearest of ``others``; infinite if ``others`` is empty."""
    nearest = torch.full((len(emb),), torch.inf, dtype=emb.dtype)
    for start in range(0, len(others), 1024):  # blocks of B x 1024 bound the memory
        block = torch.cdist(emb, others[start : start + 1024])
        nearest = torch.minimum(nearest, block.square().amin(dim=1))
    return nearest


def _kcenter(k: int, emb: Float[Tensor, "B D"], taken: Float[Tensor, "M D"]) -> Int[Tensor, "k"]:
    """Greedy k-centre: repeatedly take the point farthest from all points taken so far."""
    distance = nearest_squared(emb, taken)
    chosen: list[int] = []
    for _ in range(k):
        best = int(distance.argmax())  # the first of equal distances, which has the highest score
        chosen.append(best)
        distance = torch.minimum(distance, (emb - emb[best]).square().sum(dim=1))
        distance[best] = -1.0
    return torch.tensor(chosen, dtype=torch.int64)


def _kmeans(
    score: Float[Tensor, "B"], k: int, emb: Float[Tensor, "B D"]
) -> tuple[Float[Tensor, "k D"], Int[Tensor, "B"]]:
    """Centres and the cluster of each point by Lloyd's algorithm, weighted by score and initialised by k-centre."""
    weight = _weights(score)
    centers = emb[_kcenter(k, emb, emb.new_empty(0, emb.shape[1]))]
    owner = torch.cdist(emb, centers).argmin(dim=1)
    for _ in range(_ITERATIONS):
        mass = torch.zeros(k, dtype=emb.dtype).index_add_(0, owner, weight)
        total = torch.zeros_like(centers).index_add_(0, owner, emb * weight[:, None])
        centers = torch.where(
            (mass > 0)[:, None], total / mass.clamp_min(torch.finfo(emb.dtype).tiny)[:, None], centers
        )
        before, owner = owner, torch.cdist(emb, centers).argmin(dim=1)
        if torch.equal(before, owner):
            break
    return centers, owner


def _nearest_to(centers: Float[Tensor, "k D"], emb: Float[Tensor, "B D"]) -> Int[Tensor, "k"]:
    """The point nearest to each centre that no earlier centre took."""
    distance = torch.cdist(centers, emb)
    chosen: list[int] = []
    for row in distance:
        best = int(row.argmin())
        chosen.append(best)
        distance[:, best] = torch.inf
    return torch.tensor(chosen, dtype=torch.int64)


def _highest(owner: Int[Tensor, "B"], k: int) -> Int[Tensor, "k"]:
    """The first point of every cluster of points sorted by score; the next highest scores in place of empty clusters.

    >>> _highest(torch.tensor([1, 1, 0, 1]), 3)
    tensor([0, 2, 1])
    """
    firsts: dict[int, int] = {}
    for i, cluster in enumerate(owner.tolist()):
        firsts.setdefault(cluster, i)
    taken = set(firsts.values())
    rest = (i for i in range(len(owner)) if i not in taken)
    return torch.tensor([*firsts.values(), *rest][:k], dtype=torch.int64)


def _weights(score: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Shift scores to positive weights."""
    low = float(score.amin())
    weight = score.double() - min(low, 0.0)
    return weight + torch.finfo(torch.float64).eps * max(float(weight.amax()), 1.0)


def _kmeans_plus_plus(
    score: Float[Tensor, "B"],
    k: int,
    emb: Float[Tensor, "B D"],
    taken: Float[Tensor, "M D"],
    generator: torch.Generator,
) -> Int[Tensor, "k"]:
    """k-means++ seeding: draw with probability proportional to weight times squared distance to the taken points."""
    weight = _weights(score)
    distance = nearest_squared(emb, taken)
    chosen: list[int] = []
    free = torch.ones(len(score), dtype=torch.bool)
    for _ in range(k):
        chance = weight * torch.where(torch.isfinite(distance), distance, 1.0) * free
        if not float(chance.sum()) > 0:  # only duplicates of taken samples remain
            chance = weight * free
        best = _draw(chance, generator)
        chosen.append(best)
        free[best] = False
        distance = torch.minimum(distance, (emb - emb[best]).square().sum(dim=1))
    return torch.tensor(chosen, dtype=torch.int64)


def _draw(chance: Float[Tensor, "B"], generator: torch.Generator) -> int:
    """Draw one index with probability proportional to ``chance``.

    By inversion of the cumulative sum, because torch.multinomial accepts at most 2**24 categories.
    """
    total = chance.cumsum(0)
    at = torch.rand((), generator=generator, dtype=torch.float64) * total[-1]
    best = int(torch.searchsorted(total, at, right=True).clamp_max(len(chance) - 1))
    return best if chance[best] > 0 else int(chance.argmax())


def _gumbel(score: Float[Tensor, "B"], k: int, generator: torch.Generator) -> Int[Tensor, "k"]:
    """Draw k indices without replacement by the Gumbel top-k trick."""
    noise: Any = -torch.log(
        -torch.log(torch.rand(len(score), generator=generator, dtype=torch.float64).clamp_min(1e-300))
    )
    return (_weights(score).log() + noise).argsort(descending=True, stable=True)[:k]
