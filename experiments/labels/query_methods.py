"""Query methods that ``active_learning.py`` compares; each gets the same information."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from sklearn.cluster import MiniBatchKMeans
from sklearn.neighbors import NearestNeighbors

from sepc_torch import TrustHead, select
from sepc_torch.training.flags import assess, calibrated_copy
from sepc_torch.training.query import NOVEL_SHARE, Candidates, choose, posterior_ambiguity

Array = np.ndarray
# TypiClust's published values: neighbours that define typicality, and the smallest cluster that it uses.
NEIGHBOURS, SMALLEST = 20, 5
# Share of ordinary samples that may be flagged: the default of ``TrustMonitor``. Queries do not depend on it.
FLAG_RATE = 0.05


class Situation(NamedTuple):
    """The information that a query method gets.

    ``emb`` (n, d) and ``probability`` (n, C) are the network's embeddings and probabilities of the unlabelled samples,
    ``raw`` (n, p) the network's inputs. ``labelled_emb``, ``labelled_raw`` and ``labelled_y`` belong to the labelled
    samples; ``val_emb``, ``val_probability`` and ``val_y`` to the validation samples, which train no network. ``k`` is
    the number of samples to choose.
    """

    emb: Array
    probability: Array
    raw: Array
    labelled_emb: Array
    labelled_raw: Array
    labelled_y: Array
    val_emb: Array
    val_probability: Array
    val_y: Array
    k: int
    rng: np.random.Generator


def chance(s: Situation) -> Array:
    return s.rng.permutation(len(s.emb))[: s.k]


def margin(s: Situation) -> Array:
    top = np.sort(s.probability, axis=1)
    return np.argsort(top[:, -1] - top[:, -2], kind="stable")[: s.k]


def entropy(s: Situation) -> Array:
    p = np.clip(s.probability, 1e-12, 1.0)
    return np.argsort((p * np.log(p)).sum(axis=1), kind="stable")[: s.k]


def core_set(s: Situation) -> Array:
    """Greedy core-set of Sener and Savarese 2018: the farthest from all labelled and chosen samples."""
    everyone = torch.ones(len(s.emb))
    emb, labelled = torch.from_numpy(s.emb), torch.from_numpy(s.labelled_emb)
    return select(everyone, s.k, emb, "kcenter", labelled_emb=labelled, beta=float(len(s.emb))).numpy()


def badge(s: Situation) -> Array:
    """BADGE, Ash et al. 2020: k-means++ on the last layer's gradients for the predicted label, g = (p - e) (x, 1)."""
    error = s.probability.copy()
    error[np.arange(len(error)), error.argmax(axis=1)] -= 1.0
    inputs = np.hstack([s.emb, np.ones((len(s.emb), 1))])
    size = (error**2).sum(axis=1) * (inputs**2).sum(axis=1)

    def distance(i: int) -> Array:
        return np.maximum(size + size[i] - 2.0 * (error @ error[i]) * (inputs @ inputs[i]), 0.0)

    chosen = [int(size.argmax())]
    nearest = distance(chosen[0])
    while len(chosen) < s.k:
        nearest[chosen] = 0.0
        total = nearest.sum()
        free = np.setdiff1d(np.arange(len(size)), chosen)
        new = int(s.rng.choice(len(size), p=nearest / total)) if total > 0 else int(s.rng.choice(free))
        chosen.append(new)
        nearest = np.minimum(nearest, distance(new))
    return np.array(chosen)


def typiclust(s: Situation) -> Array:
    """TypiClust, Hacohen et al. 2022: the most typical samples of the largest unlabelled clusters, on raw features."""
    both = np.vstack([s.raw, s.labelled_raw])
    clusters = min(len(s.labelled_raw) + s.k, len(both) // 2)
    seed = int(s.rng.integers(2**31))
    owner = MiniBatchKMeans(clusters, n_init=1, random_state=seed, batch_size=1024).fit_predict(both)
    waiting, labelled = owner[: len(s.raw)], owner[len(s.raw) :]
    chosen: list[int] = []
    taken = np.bincount(labelled, minlength=clusters)
    while len(chosen) < s.k:
        free = waiting.copy()
        free[chosen] = -1
        size = np.bincount(free[free >= 0], minlength=clusters)
        # Clusters with the fewest labels first, the largest of them first, tiny clusters last.
        order = np.lexsort((-size, taken, size < SMALLEST))
        cluster = next(int(c) for c in order if size[c] > 0)
        members = np.flatnonzero(free == cluster)
        neighbours = min(NEIGHBOURS, len(members) - 1)
        if neighbours > 0:
            found = NearestNeighbors(n_neighbors=neighbours + 1).fit(s.raw[members])
            spread = found.kneighbors(s.raw[members])[0][:, 1:].mean(axis=1)
            chosen.append(int(members[spread.argmin()]))
        else:
            chosen.append(int(members[0]))
        taken[cluster] += 1
    return np.array(chosen)


def fitted_head(s: Situation) -> TrustHead:
    """A head that is fitted to the labelled samples, as the monitor fits it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about small classes, which are expected here
        return TrustHead.fit(s.labelled_emb, s.labelled_y, progress=False)


def logits_of(probability: Array) -> torch.Tensor:
    return torch.from_numpy(np.log(np.clip(probability, 1e-12, 1.0)))


def proposed(s: Situation, *, network: bool) -> Array:
    """The query of ``TrustMonitor``: a head is fitted, calibrated on the validation samples, and asked.

    Args:
        s: The situation.
        network: Whether the monitor finds the network's logits.
    """
    emb, head = torch.from_numpy(s.emb), fitted_head(s)
    logits, val_logits = (logits_of(p).float() if network else None for p in (s.probability, s.val_probability))
    val = torch.from_numpy(s.val_emb).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about few calibration samples
        head = calibrated_copy(head, val, torch.from_numpy(s.val_y), val_logits, flag_rate=FLAG_RATE) or head
    rows = {**assess(head, emb.float(), logits), "emb": emb}
    if network:
        rows["logits"] = logits_of(s.probability)
    return choose(Candidates.of(rows), s.k, torch.from_numpy(s.labelled_emb)).numpy()


def ours(s: Situation) -> Array:
    """``TrustMonitor.query``; the head is fitted only if the query has a place for novel samples."""
    if int(NOVEL_SHARE * s.k):
        return proposed(s, network=True)
    ambiguity = posterior_ambiguity(logits_of(s.probability).softmax(dim=1)).double()
    none = torch.zeros(len(s.emb), dtype=torch.bool)
    return choose(Candidates(ambiguity, none, torch.from_numpy(s.emb)), s.k).numpy()


def ours_head_alone(s: Situation) -> Array:
    """``TrustMonitor(logits=False).query``, without the network's logits."""
    return proposed(s, network=False)


def least_trusted(s: Situation) -> Array:
    """The lowest trust first: a method that is known to choose outliers."""
    rows = assess(fitted_head(s), torch.from_numpy(s.emb).float())
    return np.lexsort((rows["margin"].numpy(), rows["trust"].numpy()))[: s.k]


METHODS: dict[str, Callable[[Situation], Array]] = {
    "random": chance,
    "margin": margin,
    "entropy": entropy,
    "core-set": core_set,
    "BADGE": badge,
    "TypiClust": typiclust,
    "ours": ours,
}
# Only for trained networks: the frozen track begins with one label per class, too few for a head.
EXTRA: dict[str, Callable[[Situation], Array]] = {"ours, head alone": ours_head_alone, "least trusted": least_trusted}
