r"""Baseline confidence scores from the literature, each as its authors define it.

A score is one float64 value per sample; a higher score means more trust. Scores of logits are functions
(:mod:`~sepc_torch.metrics.baselines.softmax`). Scores of embeddings are classes: ``fit(z, y)`` learns from training
embeddings and labels, ``score(z, predicted)`` scores new embeddings; most classes ignore ``predicted``. Labels are
0 to C - 1, and every class must occur in the training set. :func:`baseline_scores` computes all scores in one call.
"""

from __future__ import annotations

from torch import Tensor

from sepc_torch.head.temperature import fit_temperature
from sepc_torch.metrics.baselines.combined import FDBD, SIRC, NNGuide
from sepc_torch.metrics.baselines.distances import Gaussians, Mahalanobis, OneEllipsoid, RelativeMahalanobis, ViM
from sepc_torch.metrics.baselines.neighbours import NearestNeighbours, TrustScore
from sepc_torch.metrics.baselines.softmax import energy, entropy, gen, max_logit, max_softmax
from sepc_torch.shapes import Float, Int

__all__ = [
    "FDBD",
    "SIRC",
    "Gaussians",
    "Mahalanobis",
    "NNGuide",
    "NearestNeighbours",
    "OneEllipsoid",
    "RelativeMahalanobis",
    "TrustScore",
    "ViM",
    "baseline_scores",
    "energy",
    "entropy",
    "fit_temperature",
    "gen",
    "max_logit",
    "max_softmax",
]


def baseline_scores(
    train_z: Float[Tensor, "N D"],
    train_y: Int[Tensor, "N"],
    test_z: Float[Tensor, "B D"],
    test_logits: Float[Tensor, "B C"],
    train_logits: Float[Tensor, "N C"] | None = None,
    calibration: tuple[Float[Tensor, "M C"], Int[Tensor, "M"]] | None = None,
    classifier: tuple[Float[Tensor, "C D"], Float[Tensor, "C"]] | None = None,
) -> dict[str, Float[Tensor, "B"]]:
    """Compute every baseline score that the inputs allow.

    Args:
        train_z: Training embeddings.
        train_y: Training labels.
        test_z: Embeddings to score.
        test_logits: Logits of ``test_z``; the predicted label is their argmax.
        train_logits: Logits of ``train_z``; needed for ``vim`` and ``nnguide``.
        calibration: Logits and labels of held-out samples; needed for ``scaled_softmax``.
        classifier: Weight and bias of the last layer; needed for ``fdbd``. Without it the origin of ``vim`` is the mean
            embedding.

    Returns:
        The scores by name; a higher score means more trust.

    >>> import torch
    >>> generator = torch.Generator().manual_seed(0)
    >>> y = torch.arange(60) % 2
    >>> z = torch.randn(60, 3, generator=generator) + 4.0 * y.unsqueeze(1)
    >>> scores = baseline_scores(z[:40], y[:40], z[40:], z[40:, :2])
    >>> len(scores), scores["trust_score"].shape
    (15, torch.Size([20]))
    """
    test_logits = test_logits.detach()
    predicted = test_logits.argmax(dim=1)
    found = {
        "max_softmax": max_softmax(test_logits),
        "entropy": entropy(test_logits),
        "max_logit": max_logit(test_logits),
        "energy": energy(test_logits),
        "gen": gen(test_logits),
    }
    if calibration is not None:
        found["scaled_softmax"] = max_softmax(test_logits, fit_temperature(*calibration))
    for suffix, unit_length in (("", False), ("++", True)):
        relative = RelativeMahalanobis.fit(train_z, train_y, unit_length=unit_length)
        found[f"mahalanobis{suffix}"] = relative.within.score(test_z)
        found[f"relative_mahalanobis{suffix}"] = found[f"mahalanobis{suffix}"] - relative.background.score(test_z)
    found["gaussians"] = Gaussians.fit(train_z, train_y).score(test_z)
    found["knn"] = NearestNeighbours.fit(train_z, train_y).score(test_z)
    found["sirc"] = SIRC.fit(train_z).score(test_z, test_logits)
    found["trust_score"] = TrustScore.fit(train_z, train_y).score(test_z, predicted)
    if train_logits is not None:
        found["vim"] = ViM.fit(train_z, train_logits, classifier=classifier).score(test_z, test_logits)
        found["nnguide"] = NNGuide.fit(train_z, train_logits).score(test_z, test_logits)
    if classifier is not None:
        found["fdbd"] = FDBD.fit(train_z, classifier[0]).score(test_z, test_logits)
    ellipsoids = OneEllipsoid.fit(train_z, train_y)
    found["ellipsoid_distance"] = ellipsoids.distance(test_z, predicted)
    found["ellipsoid_ratio"] = ellipsoids.score(test_z, predicted)
    return found
