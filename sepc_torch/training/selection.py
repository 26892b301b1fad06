r"""Choose a batch of samples by a score, without taking the same sample many times over in other words.

The :math:`\beta k` highest scores are the candidates; among them the batch is spread over the embedding space.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sepc_torch.data.arrays import count
from sepc_torch.shapes import Float, Int

Method = Literal["kcenter", "kmeans", "topk", "kmeans++", "gumbel"]

# Lloyd's iterations: the batch no longer changes after a few, and a bound keeps the time predictable.
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
    r"""Positions of k samples to label, the same for the same input on every machine and process.

    Args:
        score: How much each sample is wanted; more is better. One of -inf is taken only when no other is left, and its
            embedding is not looked at.
        k: How many; at most all.
        emb: Where the samples lie; needed by all methods but ``"topk"`` and ``"gumbel"``.
        method: ``"kcenter"`` takes, of the :math:`\beta k` highest scores, again and again the one farthest from all
            taken and labelled. ``"kmeans"`` clusters them, weighted by score, and takes the one nearest to each
            centre: typical rather than extreme samples. ``"kmeans++"`` draws from all samples with probability
            proportional to score times squared distance to those taken and labelled. ``"topk"`` takes the highest.
            ``"gumbel"`` draws from all with probability proportional to score.
        labelled_emb: Where the labelled samples lie, to keep away from.
        beta: Candidates per sample taken.
        generator: For the methods that draw; by default one with seed 0.

    >>> score = torch.tensor([0.9, 0.9, 0.8, 0.1])
    >>> emb = torch.tensor([[0.0], [0.1], [5.0], [9.0]])
    >>> select(score, 2, emb, method="topk").tolist(), select(score, 2, emb, beta=1.5).tolist()
    ([0, 1], [0, 2])
    """
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(map(repr, get_args(Method)))}, got {method!r}.")
    if not beta >= 1.0:
        raise ValueError(f"beta must be at least 1, the candidates per sample taken; got {beta}.")
    if bool(score.isnan().any()):
        raise ValueError("score holds NaN; decide first what such a sample is worth, for instance -inf.")
    if bool(score.isposinf().any()):
        raise ValueError(
            "score holds +inf, which no other score compares with; expected finite ones, or -inf for samples not "
            "wanted. Give such a sample the largest finite score."
        )
    k = min(count(k, "k", least=1), len(score))
    order = score.argsort(descending=True, stable=True)
    if method == "topk" or k == 0:
        return order[:k]
    if method != "gumbel":
        if emb is None or len(emb) != len(score):
            given = "none" if emb is None else f"{len(emb)}"
            raise ValueError(f"method={method!r} needs an embedding for each of the {len(score)} scores; got {given}.")
        _check_finite(emb[score > -torch.inf], "emb", "Give such samples the score -inf.")
        if labelled_emb is not None:
            _check_finite(labelled_emb, "labelled_emb", "Leave such samples out.")
    wanted = (score > -torch.inf).nonzero().squeeze(1)
    if len(wanted) < len(score) and len(wanted) <= k:  # all that are wanted, then some that are not
        return order[:k]
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    score = score[wanted]
    if method == "gumbel":
        return wanted[_gumbel(score, k, generator)]
    assert emb is not None  # checked above
    emb = emb[wanted].double()  # on the CPU and on a GPU, and in any order of summation, the same choice
    taken = torch.empty(0, emb.shape[1], dtype=emb.dtype) if labelled_emb is None else labelled_emb.double()
    if method == "kmeans++":
        return wanted[_kmeans_plus_plus(score, k, emb, taken, generator)]
    candidates = score.argsort(descending=True, stable=True)[: min(len(score), round(beta * k))]
    if method == "kmeans":
        return wanted[candidates[_kmeans(score[candidates], k, emb[candidates])]]
    return wanted[candidates[_kcenter(k, emb[candidates], taken)]]


def _check_finite(emb: Float[Tensor, "B D"], name: str, advice: str) -> None:
    bad = (~emb.isfinite().all(dim=1)).nonzero().squeeze(1)
    if len(bad):
        raise ValueError(
            f"{name} must be finite to measure distances by; {len(bad)} of {len(emb)} rows hold NaN or infinities. "
            f"{advice}"
        )


def nearest_squared(emb: Float[Tensor, "B D"], others: Float[Tensor, "M D"]) -> Float[Tensor, "B"]:
    """Squared distance of every point to the nearest of some others; infinite where there are none."""
    nearest = torch.full((len(emb),), torch.inf, dtype=emb.dtype)
    for start in range(0, len(others), 1024):  # a bounded B x 1024 block at a time
        block = torch.cdist(emb, others[start : start + 1024])
        nearest = torch.minimum(nearest, block.square().amin(dim=1))
    return nearest


def _kcenter(k: int, emb: Float[Tensor, "B D"], taken: Float[Tensor, "M D"]) -> Int[Tensor, "k"]:
    distance = nearest_squared(emb, taken)
    chosen: list[int] = []
    for _ in range(k):
        best = int(distance.argmax())  # the first of equals, and so the one of highest score
        chosen.append(best)
        distance = torch.minimum(distance, (emb - emb[best]).square().sum(dim=1))
        distance[best] = -1.0
    return torch.tensor(chosen, dtype=torch.int64)


def _kmeans(score: Float[Tensor, "B"], k: int, emb: Float[Tensor, "B D"]) -> Int[Tensor, "k"]:
    """Lloyd's algorithm from the k-centre start, weighted by score."""
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
    # Each centre takes its nearest sample; one that is nearest to two centres leaves the second its next.
    distance = torch.cdist(centers, emb)
    chosen: list[int] = []
    for row in distance:
        best = int(row.argmin())
        chosen.append(best)
        distance[:, best] = torch.inf
    return torch.tensor(chosen, dtype=torch.int64)


def _weights(score: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Scores as positive weights."""
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
    weight = _weights(score)
    distance = nearest_squared(emb, taken)
    chosen: list[int] = []
    free = torch.ones(len(score), dtype=torch.bool)
    for _ in range(k):
        chance = weight * torch.where(torch.isfinite(distance), distance, 1.0) * free
        if not float(chance.sum()) > 0:  # only copies of samples already taken are left
            chance = weight * free
        best = _draw(chance, generator)
        chosen.append(best)
        free[best] = False
        distance = torch.minimum(distance, (emb - emb[best]).square().sum(dim=1))
    return torch.tensor(chosen, dtype=torch.int64)


def _draw(chance: Float[Tensor, "B"], generator: torch.Generator) -> int:
    """One index with these chances, by inversion: torch.multinomial stops at 2**24 of them."""
    total = chance.cumsum(0)
    at = torch.rand((), generator=generator, dtype=torch.float64) * total[-1]
    best = int(torch.searchsorted(total, at, right=True).clamp_max(len(chance) - 1))
    return best if chance[best] > 0 else int(chance.argmax())


def _gumbel(score: Float[Tensor, "B"], k: int, generator: torch.Generator) -> Int[Tensor, "k"]:
    noise: Any = -torch.log(
        -torch.log(torch.rand(len(score), generator=generator, dtype=torch.float64).clamp_min(1e-300))
    )
    return (_weights(score).log() + noise).argsort(descending=True, stable=True)[:k]
