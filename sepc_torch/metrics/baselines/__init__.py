r"""Baseline confidence scores from the literature, each as its authors define it.

A score is one float64 value per sample; a higher score means more trust. Scores of logits are functions
(:mod:`~sepc_torch.metrics.baselines.softmax`). Scores of embeddings are classes: ``fit(z, y)`` learns from training
embeddings and labels, ``score(z, predicted)`` scores new embeddings; most classes ignore ``predicted``. Labels are
0 to C - 1, and every class must occur in the training set. :func:`baseline_scores` computes all scores in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache

from torch import Tensor

from sepc_torch.head.calibration.confidence import fit_temperature
from sepc_torch.metrics.baselines.combined import SHE, SIRC, NNGuide
from sepc_torch.metrics.baselines.distances import Gaussians, Mahalanobis, OneEllipsoid, RelativeMahalanobis, ViM
from sepc_torch.metrics.baselines.last_layer import DICE, FDBD, NCI, ReAct, ash, scale
from sepc_torch.metrics.baselines.neighbours import NearestNeighbours, TrustScore
from sepc_torch.metrics.baselines.softmax import (
    KLMatching,
    MaxLogitPNorm,
    energy,
    entropy,
    gen,
    margin,
    max_logit,
    max_softmax,
)
from sepc_torch.shapes import Float, Int

__all__ = [
    "DICE",
    "FDBD",
    "NCI",
    "SHE",
    "SIRC",
    "Gaussians",
    "KLMatching",
    "Mahalanobis",
    "MaxLogitPNorm",
    "NNGuide",
    "NearestNeighbours",
    "OneEllipsoid",
    "ReAct",
    "RelativeMahalanobis",
    "TrustScore",
    "ViM",
    "ash",
    "baseline_scores",
    "energy",
    "entropy",
    "fit_temperature",
    "gen",
    "margin",
    "max_logit",
    "max_softmax",
    "scale",
]


def baseline_scores(
    train_z: Float[Tensor, "N D"],
    train_y: Int[Tensor, "N"],
    test_z: Float[Tensor, "B D"],
    test_logits: Float[Tensor, "B C"],
    train_logits: Float[Tensor, "N C"] | None = None,
    calibration: tuple[Float[Tensor, "M C"], Int[Tensor, "M"]] | None = None,
    classifier: tuple[Float[Tensor, "C D"], Float[Tensor, "C"]] | None = None,
    names: Collection[str] | None = None,
) -> dict[str, Float[Tensor, "B"]]:
    """Compute the baseline scores that the inputs allow.

    Args:
        train_z: Training embeddings.
        train_y: Training labels.
        test_z: Embeddings to score.
        test_logits: Logits of ``test_z``; the predicted label is their argmax.
        train_logits: Logits of ``train_z``; needed for ``vim``, ``nnguide`` and ``she``.
        calibration: Logits and labels of held-out samples; needed for ``scaled_softmax``, ``kl_matching`` and
            ``max_logit_p_norm``.
        classifier: Weight and bias of the last layer; needed for ``react``, ``ash``, ``scale``, ``dice``, ``nci``,
            ``fdbd`` and ``geometric_margin``. Without it the origin of ``vim`` is the mean embedding.
        names: The scores to compute, by default all.

    Returns:
        The scores by name; a higher score means more trust.

    >>> import torch
    >>> generator = torch.Generator().manual_seed(0)
    >>> y = torch.arange(60) % 2
    >>> z = torch.randn(60, 3, generator=generator) + 4.0 * y.unsqueeze(1)
    >>> scores = baseline_scores(z[:40], y[:40], z[40:], z[40:, :2])
    >>> len(scores), scores["trust_score"].shape
    (16, torch.Size([20]))
    """
    logits = test_logits.detach()
    predicted = logits.argmax(dim=1)

    @cache
    def gaussian(unit_length: bool) -> RelativeMahalanobis:
        return RelativeMahalanobis.fit(train_z, train_y, unit_length=unit_length)

    @cache
    def ellipsoids() -> OneEllipsoid:
        return OneEllipsoid.fit(train_z, train_y)

    scores: dict[str, Callable[[], Tensor]] = {
        "max_softmax": lambda: max_softmax(logits),
        "entropy": lambda: entropy(logits),
        "max_logit": lambda: max_logit(logits),
        "energy": lambda: energy(logits),
        "gen": lambda: gen(logits),
        "logit_margin": lambda: margin(logits),
        "mahalanobis": lambda: gaussian(False).within.score(test_z),
        "relative_mahalanobis": lambda: gaussian(False).score(test_z),
        "mahalanobis++": lambda: gaussian(True).within.score(test_z),
        "relative_mahalanobis++": lambda: gaussian(True).score(test_z),
        "gaussians": lambda: Gaussians.fit(train_z, train_y).score(test_z),
        "knn": lambda: NearestNeighbours.fit(train_z, train_y).score(test_z),
        "sirc": lambda: SIRC.fit(train_z).score(test_z, logits),
        "trust_score": lambda: TrustScore.fit(train_z, train_y).score(test_z, predicted),
        "ellipsoid_distance": lambda: ellipsoids().distance(test_z, predicted),
        "ellipsoid_ratio": lambda: ellipsoids().score(test_z, predicted),
    }
    if calibration is not None:
        scores |= {
            "scaled_softmax": lambda: max_softmax(logits, fit_temperature(*calibration)),
            "kl_matching": lambda: KLMatching.fit(calibration[0]).score(logits),
            "max_logit_p_norm": lambda: MaxLogitPNorm.fit(*calibration).score(logits),
        }
    if train_logits is not None:
        scores |= {
            "vim": lambda: ViM.fit(train_z, train_logits, classifier=classifier).score(test_z, logits),
            "nnguide": lambda: NNGuide.fit(train_z, train_logits).score(test_z, logits),
            "she": lambda: SHE.fit(train_z, train_y, train_logits).score(test_z, logits),
        }
    if classifier is not None:
        weight, bias = classifier
        scores |= {
            "react": lambda: ReAct.fit(train_z, weight, bias).score(test_z),
            "ash": lambda: ash(test_z, weight, bias),
            "scale": lambda: scale(test_z, weight, bias),
            "dice": lambda: DICE.fit(train_z, weight, bias).score(test_z),
            "nci": lambda: NCI.fit(train_z, weight).score(test_z, logits),
            "fdbd": lambda: FDBD.fit(train_z, weight).score(test_z, logits),
            "geometric_margin": lambda: margin(logits, classifier=classifier),
        }
    if unknown := sorted(set(names or ()) - set(scores)):
        raise ValueError(f"There is no score {unknown[0]!r} with these inputs; there are {', '.join(scores)}.")
    return {name: score() for name, score in scores.items() if names is None or name in names}
