r"""Flags of a head that is not calibrated, the reason for each flag, and regions with too many confirmed mistakes.

A calibrated head flags by its joint score instead (:mod:`sepc_torch.training.assessment`). The reasons here are

``no prediction``
    the embedding holds NaN or infinity;
``novel``
    the sample lies outside every ellipsoid, and its Mahalanobis distance to the nearest exceeds ``novel_distance``;
``disagrees``
    the network and the head predict different labels;
``ambiguous``
    trust is below the threshold, or an ellipsoid of another class is almost as near as one of the label's own class.

A sample with several reasons gets the first one in this order. Trust and margin are those of the network's label if the
network's labels are given, otherwise those of the head's label.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch.head.trust_head import TrustHead
from sepc_torch.model.prediction import Prediction
from sepc_torch.model.rules import Rule
from sepc_torch.model.sepc import SEPC
from sepc_torch.partitioning.landscape import SmallDisjunct, mistaken_regions
from sepc_torch.shapes import Array, Bool, Float, Int
from sepc_torch.training.trust_table import REASONS

Head = SEPC | TrustHead

# Mistakes tolerated per region if the head does not record the `max_impure` of its partition.
_MAX_IMPURE = 2


@dataclass(frozen=True)
class Criteria:
    """Settings that decide which samples are flagged.

    Attributes:
        threshold: Flag samples whose trust is below this value. None if ``flag_fraction`` is used.
        flag_fraction: Flag this fraction of the samples, those of lowest :func:`safety`. None if ``threshold`` is used.
        reasons: The reasons that lead to a flag.
        min_margin: A sample whose margin is below this value is ambiguous. At a margin of 1 the sample is as near to
            another class as to its own.
        novel_distance: A sample outside every ellipsoid is novel if its Mahalanobis distance to the nearest exceeds
            this value. The surface has distance 1; the default of 2 is twice the ellipsoid's extent.
    """

    threshold: float | None = 0.5
    flag_fraction: float | None = None
    reasons: tuple[str, ...] = REASONS
    min_margin: float = 1.1
    novel_distance: float = 2.0

    def __post_init__(self) -> None:
        if (self.threshold is None) == (self.flag_fraction is None):
            raise ValueError(
                "Pass exactly one of threshold and flag_fraction, and None for the other; got "
                f"threshold={self.threshold} and flag_fraction={self.flag_fraction}."
            )
        for name in ("threshold", "flag_fraction"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < 1.0:
                raise ValueError(f"{name} must lie strictly between 0 and 1; got {value}.")
        unknown = [reason for reason in self.reasons if reason not in REASONS]
        if unknown or not self.reasons:
            raise ValueError(f"reasons must hold one or more of {', '.join(REASONS)}; got {list(self.reasons)}.")
        if not (self.min_margin >= 0.0 and self.novel_distance >= 1.0):  # this form rejects NaN too
            raise ValueError(
                "min_margin must be at least 0 and novel_distance at least 1 (the surface of an ellipsoid); got "
                f"min_margin={self.min_margin} and novel_distance={self.novel_distance}."
            )


class Judged(NamedTuple):
    """Predictions of a head for a batch, for the head's own label and for the network's label; every field is (B,).

    Attributes:
        label: The head's label, as an index into its classes; -1 for an embedding with NaN or infinity.
        trust: Trust in the head's label.
        rule: The :class:`~sepc_torch.model.rules.Rule` that gave the head's label.
        distance: Mahalanobis distance to the nearest ellipsoid.
        margin: Margin of the head's label.
        network_label: The network's label, as a class value rather than an index.
        network_trust: Trust in the network's label.
        network_margin: Margin of the network's label.

    Without the network's labels the ``network_*`` fields repeat those of the head.
    """

    label: Int[Tensor, "B"]
    trust: Float[Tensor, "B"]
    rule: Int[Tensor, "B"]
    distance: Float[Tensor, "B"]
    margin: Float[Tensor, "B"]
    network_label: Int[Tensor, "B"]
    network_trust: Float[Tensor, "B"]
    network_margin: Float[Tensor, "B"]


def class_values(head: Head) -> Int[Tensor, "C"]:
    """Integer values of the head's classes in a batch; see :func:`label_values`."""
    return label_values(head.classes)


def label_values(classes: Sequence[Any]) -> Int[Tensor, "C"]:
    """Integer values of classes in a batch: the labels if they are integers, otherwise 0 to C - 1.

    >>> label_values([3, 5]), label_values(["cat", "dog"])
    (tensor([3, 5]), tensor([0, 1]))
    """
    if all(isinstance(label, int) and not isinstance(label, bool) for label in classes):
        return torch.tensor(classes, dtype=torch.int64)
    return torch.arange(len(classes))


def coordinates(head: Head, z: Float[Tensor, "B D"]) -> Float[Tensor, "B R"]:
    """Project embeddings into the space of the ellipsoids."""
    return head.projection(z) if isinstance(head, TrustHead) else z


def in_features(head: Head) -> int:
    """Number of features D of the embeddings that a head accepts."""
    return head.in_features if isinstance(head, TrustHead) else head.dim


@torch.no_grad()
def judge(head: Head, z: Float[Tensor, "B D"], network_label: Int[Tensor, "B"] | None = None) -> Judged:
    """Evaluate a head on a batch of embeddings, for its own labels and for the network's labels.

    Embeddings with NaN or infinity are allowed: they get label -1 and trust 0. A network label that is not among the
    head's classes gets trust 0, because no training point supports it.
    """
    sepc = head.sepc if isinstance(head, TrustHead) else head
    points = coordinates(head, z)
    values = class_values(head).to(points.device)
    finite = torch.isfinite(points).all(dim=1)
    own, given, known = _judge_finite(
        sepc, points[finite], values, None if network_label is None else network_label[finite]
    )

    def to_all_rows(column: Tensor, fill: Any) -> Tensor:
        full = torch.full((len(points),), fill, dtype=column.dtype, device=column.device)
        full[finite] = column
        return full

    label = to_all_rows(own.label, -1)
    if network_label is None:
        network_label = torch.where(label >= 0, values[label.clamp_min(0)], -1)
    return Judged(
        label=label,
        trust=to_all_rows(own.trust, 0.0),
        rule=to_all_rows(own.rule, int(Rule.OUTSIDE)),
        distance=to_all_rows(own.distance, torch.inf),
        margin=to_all_rows(own.margin, 0.0),
        network_label=network_label,
        network_trust=to_all_rows(torch.where(known, given.trust, 0.0), 0.0),
        network_margin=to_all_rows(torch.where(known, given.margin, 0.0), 0.0),
    )


def _judge_finite(
    sepc: SEPC, points: Float[Tensor, "n R"], values: Int[Tensor, "C"], network_label: Int[Tensor, "n"] | None
) -> tuple[Prediction, Prediction, Bool[Tensor, "n"]]:
    """Predictions for the head's labels and for the network's labels, and where the head knows the network's label."""
    if network_label is None:
        own, given = sepc.judge(points)
        return own, given, torch.ones(len(points), dtype=torch.bool, device=points.device)
    matches = network_label[:, None] == values
    own, given = sepc.judge(points, matches.to(torch.uint8).argmax(dim=1))
    return own, given, matches.any(dim=1)


def safety(judged: Judged) -> Float[Tensor, "B"]:
    r"""Score of how safe the evaluated label is, :math:`\min(t, \frac{m}{1 + m})` with trust t and margin m.

    Trust is a ratio of counts of training points and equals 1 for most samples. The share :math:`\frac{m}{1 + m}` of
    the distance to the next class ranks the samples of equal trust; it is one half if both classes are equally near.
    """
    share = 1.0 - 1.0 / (1.0 + judged.network_margin)  # this form gives 1 for an infinite margin
    return torch.minimum(judged.network_trust, share)


def find_reasons(judged: Judged, criteria: Criteria, agrees: Bool[Tensor, "B"]) -> Int[Tensor, "B"]:
    """Reason to flag each sample, as an index into ``REASONS``; -1 for samples without a flag.

    Args:
        judged: The samples. With ``flag_fraction`` pass all samples at once, because the fraction is of these.
        criteria: The settings that decide which samples are flagged.
        agrees: Whether the network's label equals the head's; True for samples without a network label.

    >>> tensor, c = torch.tensor, torch.zeros(3, dtype=torch.int64)
    >>> trust, margin, distance = tensor([1.0, 0.3, 1.0]), tensor([5.0, 2.0, 3.0]), tensor([0.5, 0.9, 4.0])
    >>> judged = Judged(c, trust, tensor([0, 1, 3]), distance, margin, c, trust, margin)
    >>> [REASONS[r] if r >= 0 else "" for r in find_reasons(judged, Criteria(), c == 0)]
    ['', 'ambiguous', 'novel']
    """
    invalid = judged.label < 0
    novel = (judged.rule == int(Rule.OUTSIDE)) & (judged.distance > criteria.novel_distance) & ~invalid
    if criteria.threshold is None:
        assert criteria.flag_fraction is not None
        least = torch.zeros_like(novel)
        # Slightly less than the product, so that rounding does not turn 0.1 of 70 into 8.
        wanted = math.ceil(criteria.flag_fraction * len(novel) * (1.0 - 1e-12))
        least[safety(judged).argsort(stable=True)[:wanted]] = True
        present = {"no prediction": invalid, "novel": novel & least, "disagrees": ~agrees & least, "ambiguous": least}
    else:
        unsure = (judged.network_trust < criteria.threshold) | (judged.network_margin < criteria.min_margin)
        present = {"no prediction": invalid, "novel": novel, "disagrees": ~agrees, "ambiguous": unsure}
    reason = torch.full(novel.shape, -1, dtype=torch.int64, device=novel.device)
    for code in reversed(range(len(REASONS))):
        if REASONS[code] in criteria.reasons:
            reason[present[REASONS[code]]] = code
    return reason


@torch.no_grad()
def confirmed_disjuncts(
    head: Head, emb: Float[Tensor, "N D"], truth: Int[Tensor, "N"], given: Int[Tensor, "N"] | None = None
) -> tuple[SmallDisjunct, ...]:
    """Small disjuncts: regions with more confirmed mistakes than the head's ``max_impure``, the worst first.

    Args:
        head: The head in use.
        emb: Embeddings of samples whose true label is now known.
        truth: The true labels, as class values.
        given: The labels that were predicted, as class values; by default those of the head.

    >>> X = torch.tensor([[0.0], [1.0], [2.0], [3.0], [10.0], [11.0], [12.0], [13.0]])
    >>> head = TrustHead.fit(X, [0, 0, 0, 0, 1, 1, 1, 1], dim=1, normalize=None, max_impure=1)
    >>> (found,) = confirmed_disjuncts(head, torch.tensor([[1.4], [1.5], [11.0]]), torch.tensor([1, 1, 1]))
    >>> found.predicted, found.true, found.rows.tolist()
    (0, (1,), [0, 1])
    """
    sepc = head.sepc if isinstance(head, TrustHead) else head
    points = coordinates(head, emb)
    distance = sepc.bank(points).double().cpu().numpy()
    if given is None:
        given = class_values(head)[sepc(points).label.cpu()]
    limit = int(sepc.made.get("max_impure", _MAX_IMPURE))
    return mistaken_regions(distance, _objects(given), _objects(truth), limit)


def _objects(labels: Int[Tensor, "N"]) -> Array:
    return np.array(labels.tolist(), dtype=object)
