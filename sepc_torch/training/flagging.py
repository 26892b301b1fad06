r"""Which samples a person should look at, and why.

A sample is

``novel``
    where it lies outside every ellipsoid, and far: farther than ``novel_distance`` times the nearest reaches;
``disagrees``
    where the network and the head give it different labels;
``ambiguous``
    where classes meet: trust below the threshold, or a class of another label almost as near as its own.

With several reasons the first of these is named. The judged label is the network's where it is known, else the head's.
"""

from __future__ import annotations

import math
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


@dataclass(frozen=True)
class Criteria:
    """When to flag.

    Attributes:
        threshold: Flag trust below this.
        flag_fraction: Instead, flag this share of the samples, those of least safety; then ``threshold`` is None.
        reasons: Which reasons count.
        min_margin: A margin below this is ambiguous; 1 is a point as near to another class as to its own.
        novel_distance: A point outside whose Mahalanobis distance is larger is novel; 1 is the surface. Twice as far
            as the ellipsoid reaches, by default: on CNN features of Fashion-MNIST that is one test picture in ten,
            and 7 to 9 in ten of pictures of digits and letters.
    """

    threshold: float | None = 0.5
    flag_fraction: float | None = None
    reasons: tuple[str, ...] = ("ambiguous", "novel")
    min_margin: float = 1.1
    novel_distance: float = 2.0

    def __post_init__(self) -> None:
        if (self.threshold is None) == (self.flag_fraction is None):
            raise ValueError(
                f"Give threshold or flag_fraction, and None for the other; got threshold={self.threshold} and "
                f"flag_fraction={self.flag_fraction}."
            )
        for name in ("threshold", "flag_fraction"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < 1.0:
                raise ValueError(f"{name} must lie between 0 and 1, both excluded; got {value}.")
        unknown = [reason for reason in self.reasons if reason not in REASONS]
        if unknown or not self.reasons:
            raise ValueError(f"reasons must be some of {', '.join(REASONS)}; got {list(self.reasons)}.")
        if not (self.min_margin >= 0.0 and self.novel_distance >= 1.0):  # in this form NaN is refused too
            raise ValueError(
                "min_margin must be at least 0 and novel_distance at least 1, the surface of an ellipsoid; got "
                f"{self.min_margin} and {self.novel_distance}."
            )


class Judged(NamedTuple):
    """What a head says of a batch, each (B,); the network's fields repeat the head's where it gave no label.

    ``label`` is an index into the head's classes, -1 for an embedding that holds NaN or infinity. ``network_label``
    is the value that the network gave.
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
    """The integers that stand for the head's classes in a batch: the labels themselves, or 0 to C - 1 for text."""
    classes = head.classes
    if all(isinstance(label, int) and not isinstance(label, bool) for label in classes):
        return torch.tensor(classes, dtype=torch.int64)
    return torch.arange(len(classes))


def coordinates(head: Head, z: Float[Tensor, "B D"]) -> Float[Tensor, "B R"]:
    """Embeddings in the coordinates of the ellipsoids."""
    return head.projection(z) if isinstance(head, TrustHead) else z


def in_features(head: Head) -> int:
    """Number of features D of the embeddings that a head takes."""
    return head.in_features if isinstance(head, TrustHead) else head.dim


@torch.no_grad()
def judge(head: Head, z: Float[Tensor, "B D"], network_label: Int[Tensor, "B"] | None = None) -> Judged:
    """Judge a batch of embeddings, and the labels that the network gave; whatever the embeddings hold.

    A label that the head has never seen gets trust 0: no training point vouches for it.
    """
    sepc = head.sepc if isinstance(head, TrustHead) else head
    points = coordinates(head, z)
    values = class_values(head).to(points.device)
    good = torch.isfinite(points).all(dim=1)
    own, given, known = _judge_finite(
        sepc, points[good], values, None if network_label is None else network_label[good]
    )

    def spread(column: Tensor, otherwise: Any) -> Tensor:
        full = torch.full((len(points),), otherwise, dtype=column.dtype, device=column.device)
        full[good] = column
        return full

    label = spread(own.label, -1)
    if network_label is None:
        network_label = torch.where(label >= 0, values[label.clamp_min(0)], -1)
    return Judged(
        label=label,
        trust=spread(own.trust, 0.0),
        rule=spread(own.rule, int(Rule.OUTSIDE)),
        distance=spread(own.distance, torch.inf),
        margin=spread(own.margin, 0.0),
        network_label=network_label,
        network_trust=spread(torch.where(known, given.trust, 0.0), 0.0),
        network_margin=spread(torch.where(known, given.margin, 0.0), 0.0),
    )


def _judge_finite(
    sepc: SEPC, points: Float[Tensor, "n R"], values: Int[Tensor, "C"], network_label: Int[Tensor, "n"] | None
) -> tuple[Prediction, Prediction, Bool[Tensor, "n"]]:
    if network_label is None:
        own, given = sepc.judge(points)
        return own, given, torch.ones(len(points), dtype=torch.bool, device=points.device)
    matches = network_label[:, None] == values
    own, given = sepc.judge(points, matches.to(torch.uint8).argmax(dim=1))
    return own, given, matches.any(dim=1)


def safety(judged: Judged) -> Float[Tensor, "B"]:
    r"""How safe the judged label is, :math:`\min(t, \frac{m}{1 + m})` with trust t and margin m.

    Trust counts training points and is 1 in most places; the share :math:`\frac{m}{1 + m}` of the distance to the next
    class, one half where both are equally near, ranks those.
    """
    share = 1.0 - 1.0 / (1.0 + judged.network_margin)  # in this form an infinite margin gives 1
    return torch.minimum(judged.network_trust, share)


def find_reasons(judged: Judged, criteria: Criteria, agrees: Bool[Tensor, "B"]) -> Int[Tensor, "B"]:
    """The first reason to flag each sample, as an index into ``REASONS``; -1 for none.

    Args:
        judged: The samples; with ``flag_fraction``, all of them.
        criteria: When to flag.
        agrees: Whether the network gave the head's label; true where it gave none.

    >>> tensor, c = torch.tensor, torch.zeros(3, dtype=torch.int64)
    >>> trust, margin, distance = tensor([1.0, 0.3, 1.0]), tensor([5.0, 2.0, 3.0]), tensor([0.5, 0.9, 4.0])
    >>> judged = Judged(c, trust, tensor([0, 1, 3]), distance, margin, c, trust, margin)
    >>> [REASONS[r] if r >= 0 else "" for r in find_reasons(judged, Criteria(), c == 0)]
    ['', 'ambiguous', 'novel']
    """
    novel = ((judged.rule == int(Rule.OUTSIDE)) & (judged.distance > criteria.novel_distance)) | (judged.label < 0)
    if criteria.threshold is None:
        assert criteria.flag_fraction is not None
        least = torch.zeros_like(novel)
        # A hair less, so that 0.1 of 70 is 7 and not, by rounding, 8.
        wanted = math.ceil(criteria.flag_fraction * len(novel) * (1.0 - 1e-12))
        least[safety(judged).argsort(stable=True)[:wanted]] = True
        present = {"novel": novel & least, "disagrees": ~agrees & least, "ambiguous": least}
    else:
        unsure = (judged.network_trust < criteria.threshold) | (judged.network_margin < criteria.min_margin)
        present = {"novel": novel, "disagrees": ~agrees, "ambiguous": unsure}
    reason = torch.full(novel.shape, -1, dtype=torch.int64, device=novel.device)
    for code in reversed(range(len(REASONS))):
        if REASONS[code] in criteria.reasons:
            reason[present[REASONS[code]]] = code
    return reason


def summary(
    trust: Float[Tensor, "B"], reason: Int[Tensor, "B"], right: Bool[Tensor, "B"] | None, finite: Bool[Tensor, "B"]
) -> dict[str, float]:
    """The numbers of one stage: mean and low trust, flags by reason, and accuracy with and without flag.

    ``right`` says where the judged label is the true one. The names are always the same, so that they can be monitored;
    a value that nothing defines is NaN.

    >>> summary(torch.tensor([1.0, 0.5]), torch.tensor([-1, 2]), torch.tensor([True, False]), torch.ones(2) > 0)
    {'n': 2.0, 'mean': 0.75, 'p05': 0.525..., 'flagged': 1.0, 'flagged_frac': 0.5, 'novel_frac': 0.0,
     'disagrees_frac': 0.0, 'ambiguous_frac': 0.5, 'nonfinite': 0.0, 'acc_trusted': 1.0, 'acc_flagged': 0.0}
    """
    flagged = reason >= 0
    n = len(trust)
    found = {
        "n": float(n),
        "mean": float(trust.double().mean()),  # of nothing, torch says NaN
        "p05": float(np.quantile(trust.double().numpy(), 0.05)) if n else math.nan,
        "flagged": float(flagged.sum()),
        "flagged_frac": float(flagged.double().mean()),
    }
    for code, name in enumerate(REASONS):
        found[f"{name}_frac"] = float((reason == code).double().mean())
    found["nonfinite"] = float((~finite).sum())
    for name, chosen in (("acc_trusted", ~flagged), ("acc_flagged", flagged)):
        found[name] = math.nan if right is None else float(right[chosen].double().mean())
    return found


# What a partition tolerates where the head does not say what it was made with.
_MAX_IMPURE = 2


@torch.no_grad()
def confirmed_disjuncts(
    head: Head, emb: Float[Tensor, "N D"], truth: Int[Tensor, "N"], given: Int[Tensor, "N"] | None = None
) -> tuple[SmallDisjunct, ...]:
    """Cells of a head in which more mistakes are confirmed than it was made to tolerate, the worst first.

    Args:
        head: The head in use.
        emb: Embeddings whose label is now known.
        truth: That label, as batches carry it.
        given: The label they had been given; by default the head's own.

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
