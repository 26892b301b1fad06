r"""Assessment of a network's labels by a head while the network trains: calibration, scores, flags and numbers.

A calibrated head flags by its joint score. A head that cannot be calibrated, with too few labelled samples or without
evidence, flags a share of the samples, those of lowest :func:`safety`. Its reasons are

``no prediction``
    the embedding holds NaN or infinity; such a sample is always flagged;
``novel``
    the sample lies outside every ellipsoid, at a Mahalanobis distance above 2 to the nearest;
``disagrees``
    the network and the head predict different labels;
``ambiguous``
    none of these.

A sample with several reasons gets the first one in this order. Trust and margin are those of the network's label if the
network's labels are given, otherwise those of the head's label.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sepc_torch.head.calibration.calibration import LEAST_CALIBRATION
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.reading.projection import Projection
from sepc_torch.head.reasons import Reason, refusal_reason
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.metrics.selective import aurc, risk_at_coverage
from sepc_torch.model.queries import undefined_logits
from sepc_torch.model.rules import Rule
from sepc_torch.model.sepc import SEPC
from sepc_torch.partitioning.landscape import SmallDisjunct, mistaken_regions
from sepc_torch.shapes import Array, Bool, Float, Int
from sepc_torch.training.trust_table import REASONS

Rows = dict[str, Tensor]
Seen = Callable[[HeadPrediction, bool], None]

# Columns of every head and their dtypes, and those that only a calibrated head gives.
COLUMNS = {
    "label": torch.int64,
    "trust": torch.float32,
    "rule": torch.int64,
    "distance": torch.float32,
    "margin": torch.float32,
    "network_label": torch.int64,
    "network_trust": torch.float32,
    "network_margin": torch.float32,
}
CALIBRATED = ("joint", "confidence", "p_value", "reason")
# Coverage at which accuracy is reported: four of five labels are used, one goes to a person.
_COVERAGE = 0.8
# Names of the numbers about labels, which need the true ones.
_LABEL_NUMBERS = ("aurc", "acc_at_80", "accepted", "acc_accepted", "acc")
# Mahalanobis distance beyond which a sample outside every ellipsoid is novel: twice the ellipsoid's extent.
_NOVEL_DISTANCE = 2.0
# Mistakes tolerated per region if the head does not record the `max_impure` of its partition.
_MAX_IMPURE = 2


def as_trust_head(head: SEPC | TrustHead) -> TrustHead:
    """The head itself; an SEPC on embeddings becomes a head that projects nothing and cannot be calibrated."""
    if isinstance(head, TrustHead):
        return head
    like = head.bank.offsets
    axes = torch.eye(head.dim, dtype=like.dtype, device=like.device)
    return TrustHead(Projection(torch.zeros_like(axes[0]), axes, unit_length=False), head)


def is_calibrated(head: TrustHead | None, has_logits: bool) -> bool:
    """Whether a head is calibrated for the network's labels or, without logits, for its own."""
    if head is None or head.calibration is None:
        return False
    return head.calibration.network.done if has_logits else head.calibration.done


def label_values(classes: Sequence[Any]) -> Int[Tensor, "C"]:
    """Integer values of classes in a batch: the labels if they are integers, otherwise 0 to C - 1.

    >>> label_values([3, 5]), label_values(["cat", "dog"])
    (tensor([3, 5]), tensor([0, 1]))
    """
    if all(isinstance(label, int) and not isinstance(label, bool) for label in classes):
        return torch.tensor(classes, dtype=torch.int64)
    return torch.arange(len(classes))


def own_labels(classes: Sequence[Any], label: Int[Tensor, "B"]) -> Int[Tensor, "B"]:
    """The head's labels as class values, from indices into its classes; -1 for samples without a prediction."""
    return torch.where(label >= 0, label_values(classes).to(label.device)[label.clamp_min(0)], -1)


def class_count(head: TrustHead) -> int:
    """Number of logits that a network with the head's classes has: the largest label plus one.

    >>> class_count(TrustHead.fit([[0.0], [1.0], [5.0], [6.0]], [0, 0, 2, 2], dim=1, normalize=None))
    3
    """
    values = label_values(head.classes)
    return max(len(values), int(values.max()) + 1)


def binary_logits(logits: Float[Tensor, "B L"], classes: int) -> Float[Tensor, "B M"]:
    """Logits with one column per class: a single column of two classes becomes the columns [0, logit].

    >>> binary_logits(torch.tensor([[2.0], [-1.0]]), 2).argmax(dim=1)
    tensor([1, 0])
    """
    return torch.nn.functional.pad(logits, (1, 0)) if logits.shape[1] == 1 and classes == 2 else logits


@torch.no_grad()
def calibrated_copy(
    head: TrustHead,
    z: Float[Tensor, "M D"],
    labels: Int[Tensor, "M"],
    logits: Float[Tensor, "M L"] | None,
    *,
    flag_rate: float,
    risk: float | None = None,
) -> TrustHead | None:
    """Calibrate a copy of a head for a flag rate or a risk; None if fewer than 20 usable samples remain.

    Labels are class values, and column c of the logits belongs to label c; without logits the head's own labels are
    calibrated. Samples are left out if their class is unknown to the head, their embedding has no direction, or their
    logits give no label. The flag rate is raised to the least one that the samples can promise.
    """
    if head.evidence is None:
        return None
    values = label_values(head.classes)
    device = next(head.buffers()).device
    usable = torch.isin(labels, values) & torch.isfinite(head.projection(z.to(device))).all(dim=1).cpu()
    usable &= z.isfinite().all(dim=1) & (z != 0).any(dim=1)
    if logits is not None:
        logits = logits[:, values]
        usable &= ~undefined_logits(logits)
    if int(usable.sum()) < LEAST_CALIBRATION:
        return None
    codes = (labels[usable, None] == values).to(torch.uint8).argmax(dim=1)
    names = np.array(head.classes, dtype=object)[codes.numpy()]
    found = copy.copy(head)  # shares every part with the head but its calibration, which is replaced
    found._modules, found._buffers = dict(head._modules), dict(head._buffers)
    found.order_stated = True  # column c is that of label c
    found.calibrate(z[usable], names, None if logits is None else logits[usable])
    assert found.calibration is not None
    labels_of = found.calibration.own if logits is None else found.calibration.network
    if risk is not None:
        found.accept_at(risk=risk)
    else:
        found.accept_at(flag_rate=labels_of.least_flag_rate(flag_rate))
    return found


@contextmanager
def _flagging(head: TrustHead) -> Iterator[None]:
    """Flag rows without a prediction instead of raising an error."""
    policy = head.sepc.nan_policy
    head.sepc.nan_policy = "flag"
    try:
        yield
    finally:
        head.sepc.nan_policy = policy


@torch.no_grad()
def assess(
    head: TrustHead, z: Float[Tensor, "B D"], logits: Float[Tensor, "B L"] | None = None, seen: Seen | None = None
) -> Rows:
    """Columns of a batch, on the CPU: those of ``COLUMNS`` and, of a calibrated head, those of ``CALIBRATED``.

    ``label`` is the head's label as an index into its classes, ``network_label`` the network's as a class value.
    Columns of the network's label, and those of ``CALIBRATED``, are those of the head's own label without logits. A
    network label that the head does not know has trust, margin and joint score 0. ``seen`` is called with the
    predictions of a calibrated head and whether there are logits, so that a drift monitor need not run the head again.
    """
    calibrated = is_calibrated(head, logits is not None)
    values = label_values(head.classes).to(z.device)
    network = None if logits is None else logits.argmax(dim=1)
    with _flagging(head):
        if network is None or calibrated:
            out = head(z, logits=None if logits is None else logits[:, values])
        else:
            out = head(z, labels=(network[:, None] == values).to(torch.uint8).argmax(dim=1))
    given = own_labels(head.classes, out.label) if network is None else network
    known = torch.isin(given, values)
    columns = {
        "label": out.label,
        "trust": out.trust,
        "rule": out.rule if calibrated else torch.where(out.label >= 0, out.rule, int(Rule.OUTSIDE)),
        "distance": out.distance.nan_to_num(nan=torch.inf),
        "margin": out.margin.nan_to_num(nan=0.0, posinf=torch.inf),
        "network_label": given,
        "network_trust": torch.where(known, out.network_trust, 0.0),
        "network_margin": torch.where(known, out.network_margin.nan_to_num(nan=0.0, posinf=torch.inf), 0.0),
    }
    if calibrated:
        if seen is not None:
            seen(out, logits is not None)
        reason = refusal_reason(out, head.promise) - 1  # -1 for accepted labels, otherwise an index into REASONS
        columns |= {
            "joint": torch.where(known, out.joint, 0.0),
            "confidence": torch.where(known, out.confidence, 0.0),
            "p_value": out.p_value,
            "reason": torch.where(known | (reason >= 0), reason, REASONS.index(Reason.DISAGREES.text)),
        }
    return {
        name: column.cpu().float() if column.is_floating_point() else column.cpu().long()
        for name, column in columns.items()
    }


def safety(rows: Rows) -> Float[Tensor, "B"]:
    r"""Score of how safe the evaluated label is, :math:`\min(t, \frac{m}{1 + m})` with trust t and margin m.

    Trust is a ratio of counts of training points and equals 1 for most samples. The share :math:`\frac{m}{1 + m}` of
    the distance to the next class ranks the samples of equal trust; it is one half if both classes are equally near.
    """
    share = 1.0 - 1.0 / (1.0 + rows["network_margin"])  # this form gives 1 for an infinite margin
    return torch.minimum(rows["network_trust"], share)


def is_novel(rows: Rows) -> Bool[Tensor, "B"]:
    """Whether each sample is novel by its distance to the ellipsoids, for a head that is not calibrated."""
    return (rows["rule"] == int(Rule.OUTSIDE)) & (rows["distance"] > _NOVEL_DISTANCE) & (rows["label"] >= 0)


def find_reasons(rows: Rows, own: Int[Tensor, "B"], flag_rate: float) -> Int[Tensor, "B"]:
    """Reason of a head that is not calibrated to flag each sample, as an index into ``REASONS``; -1 without a flag.

    ``rows`` are columns of :func:`assess`, of all samples at once, because the rate is of these; ``own`` holds the
    head's labels as class values.

    >>> c, tensor = torch.zeros(3, dtype=torch.int64), torch.tensor
    >>> rows = {"label": c, "rule": tensor([0, 1, 3]), "distance": tensor([0.5, 0.9, 4.0]), "network_label": c}
    >>> rows |= {"network_trust": tensor([1.0, 0.3, 1.0]), "network_margin": tensor([5.0, 2.0, 0.5])}
    >>> [REASONS[r] if r >= 0 else "" for r in find_reasons(rows, c, 0.6)]
    ['', 'ambiguous', 'novel']
    """
    invalid = rows["label"] < 0
    least = torch.zeros_like(invalid)
    # Slightly less than the product, so that rounding does not turn 0.1 of 70 into 8.
    least[safety(rows).argsort(stable=True)[: math.ceil(flag_rate * len(least) * (1.0 - 1e-12))]] = True
    disagrees = (rows["network_label"] != own) & ~invalid
    reason = torch.full(least.shape, -1, dtype=torch.int64, device=least.device)
    for name, present in (
        (Reason.AMBIGUOUS, least),
        (Reason.DISAGREES, disagrees & least),
        (Reason.NOVEL, is_novel(rows) & least),
        (Reason.NO_PREDICTION, invalid),
    ):
        reason[present] = REASONS.index(name.text)
    return reason


def stage_numbers(
    rows: Rows, reason: Int[Tensor, "B"], own: Int[Tensor, "B"], target: Int[Tensor, "B"] | None, has_network: bool
) -> dict[str, float]:
    """Numbers of one stage, under the same keys for every stage.

    ``aurc``, ``acc_at_80``, ``accepted``, ``acc_accepted`` and ``acc`` are about the network's labels. Their keys begin
    with ``head_`` if there are no logits, so that a number about the network is never one about the head. ``head_acc``
    is the accuracy of the head's labels, ``head_trust`` and ``head_trust_p05`` are mean and 5 % quantile of its trust.
    Numbers that need true labels are NaN without them, except that ``acc_accepted`` is 0 if no label is accepted.
    Samples with a negative target are of unknown classes: no label of them is right, so these numbers leave them out;
    ``unknown`` is their number, and ``unknown_accepted`` the share of them that is accepted.
    ``rows`` are columns of :func:`assess`, ``reason`` those of :func:`find_reasons`, ``own`` the head's class values.
    """
    n, accepted = len(reason), reason < 0
    known = torch.ones_like(accepted) if target is None else target >= 0
    found = {"n": float(n), "nonfinite": float((rows["label"] < 0).sum())}
    found["unknown"] = math.nan if target is None else float((~known).sum())
    found["unknown_accepted"] = math.nan if target is None else float(accepted[~known].double().mean())
    found |= {name.replace(" ", "_"): float((reason == code).double().mean()) for code, name in enumerate(REASONS)}
    labels = dict.fromkeys(_LABEL_NUMBERS, math.nan) | {"accepted": float(accepted.double().mean())}
    if target is not None and bool(known.any()):
        score = rows["joint"] if "joint" in rows else safety(rows)
        labels |= label_numbers(score[known], accepted[known], (rows["network_label"] == target)[known])
    found |= {name if has_network else f"head_{name}": value for name, value in labels.items()}
    if has_network:
        found["head_acc"] = math.nan if target is None else float((own == target)[known].double().mean())
    trust = rows["trust"].double()
    found["head_trust"] = float(trust.mean())
    found["head_trust_p05"] = float(np.quantile(trust.numpy(), 0.05)) if n else math.nan
    return found


def label_numbers(score: Float[Tensor, "B"], accepted: Bool[Tensor, "B"], right: Bool[Tensor, "B"]) -> dict[str, float]:
    """AURC, accuracy at 80 % coverage, share of accepted labels, and accuracy of the accepted and of all labels.

    >>> label_numbers(torch.tensor([0.9, 0.2]), torch.tensor([True, False]), torch.tensor([True, False]))
    {'aurc': 0.25, 'acc_at_80': 0.5, 'accepted': 0.5, 'acc_accepted': 1.0, 'acc': 0.5}
    """
    return {
        "aurc": float(aurc(score, right)),
        "acc_at_80": 1.0 - float(risk_at_coverage(score, right, _COVERAGE)),
        "accepted": float(accepted.double().mean()),
        "acc_accepted": float(right[accepted].double().mean()) if bool(accepted.any()) else 0.0,
        "acc": float(right.double().mean()),
    }


def no_numbers(has_network: bool) -> dict[str, float]:
    """The numbers of a stage without a head: every key of :func:`stage_numbers`, with NaN."""
    none = torch.empty(0, dtype=torch.int64)
    return dict.fromkeys(stage_numbers(no_rows(), none, none, none, has_network), math.nan)


def no_rows() -> Rows:
    """All columns of an uncalibrated head with zero rows, so that an empty table has the usual columns."""
    return {name: torch.empty(0, dtype=dtype) for name, dtype in {"id": torch.int64, **COLUMNS}.items()}


def logged_names(stage: str, numbers: Mapping[str, float]) -> dict[str, float]:
    """Numbers of a stage under their logged names.

    >>> logged_names("val", {"aurc": 0.1, "head_acc": 0.9})
    {'val_aurc': 0.1, 'head_val_acc': 0.9}
    """
    return {
        f"head_{stage}_{key.removeprefix('head_')}" if key.startswith("head_") else f"{stage}_{key}": value
        for key, value in numbers.items()
    }


def pool_numbers(numbers: Mapping[str, float]) -> dict[str, float]:
    """Numbers of a pool under their logged names, without those that need true labels."""
    labelled = ("acc_", "aurc", "unknown")
    known = {key: value for key, value in numbers.items() if not key.removeprefix("head_").startswith(labelled)}
    return logged_names("pool", {key: value for key, value in known.items() if key not in ("acc", "head_acc")})


@torch.no_grad()
def confirmed_disjuncts(
    head: SEPC | TrustHead, emb: Float[Tensor, "N D"], truth: Int[Tensor, "N"], given: Int[Tensor, "N"] | None = None
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
    head = as_trust_head(head)
    points = head.projection(emb)
    distance = head.sepc.bank(points).double().cpu().numpy()
    if given is None:
        given = own_labels(head.classes, head.sepc(points).label.cpu())
    limit = int(head.sepc.made.get("max_impure", _MAX_IMPURE))
    return mistaken_regions(distance, _objects(given), _objects(truth), limit)


def _objects(labels: Int[Tensor, "N"]) -> Array:
    return np.array(labels.tolist(), dtype=object)
