"""Assessment of a network's labels by a head while the network trains: calibration, scores, reasons and numbers.

A calibrated head decides by its joint score. A head that cannot be calibrated, with too few labelled samples or without
evidence, falls back to trust and margins (:mod:`sepc_torch.training.flagging`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from sepc_torch.head.calibration_set import LEAST_CALIBRATION
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.reasons import Reason, refusal_reason
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.metrics.selective import aurc, risk_at_coverage
from sepc_torch.model.queries import rows_without_prediction
from sepc_torch.shapes import Bool, Float, Int
from sepc_torch.training.flagging import Head, Judged, class_values, coordinates, judge, safety
from sepc_torch.training.trust_table import REASONS

Rows = dict[str, Tensor]
Seen = Callable[[HeadPrediction, bool], None]

# Columns that only a calibrated head gives.
CALIBRATED = ("joint", "confidence", "p_value", "reason")
# Coverage at which accuracy is reported: four of five labels are used, one goes to a person.
_COVERAGE = 0.8
# Names of the numbers about labels, which need the true ones.
_LABEL_NUMBERS = ("aurc", "acc_at_80", "accepted", "acc_accepted", "acc")


def is_calibrated(head: Head | None, has_logits: bool) -> bool:
    """Whether a head is calibrated for the network's labels or, without logits, for its own."""
    if not isinstance(head, TrustHead) or head.calibration is None:
        return False
    return head.calibration.network.done if has_logits else head.calibration.done


def class_count(head: Head) -> int:
    """Number of logits that a network with the head's classes has: the largest label plus one.

    >>> class_count(TrustHead.fit([[0.0], [1.0], [5.0], [6.0]], [0, 0, 2, 2], dim=1, normalize=None))
    3
    """
    values = class_values(head)
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
    """Calibrate a copy of a head; None if fewer than 20 usable samples remain.

    Samples are left out if their class is unknown to the head, their embedding has no direction, or their logits give
    no label.

    Args:
        head: The head; it is not changed.
        z: Embeddings that neither the network nor the head was fitted on.
        labels: True labels as class values.
        logits: The network's logits, column c for label c; None to calibrate the head's own labels.
        flag_rate: Share of the samples that may be flagged; raised to the least rate that the samples can promise.
        risk: Instead of the flag rate, the allowed share of wrong labels among the accepted ones.
    """
    if head.evidence is None:
        return None
    values = class_values(head)
    device = next(head.buffers()).device
    usable = torch.isin(labels, values) & torch.isfinite(coordinates(head, z.to(device))).all(dim=1).cpu()
    usable &= z.isfinite().all(dim=1) & (z != 0).any(dim=1)
    if logits is not None:
        logits = logits[:, values]
        usable &= ~rows_without_prediction(logits)
    if int(usable.sum()) < LEAST_CALIBRATION:
        return None
    codes = (labels[usable, None] == values).to(torch.uint8).argmax(dim=1)
    names = np.array(head.classes, dtype=object)[codes.numpy()]
    found = _shared_copy(head).calibrate(z[usable], names, None if logits is None else logits[usable])
    assert found.calibration is not None
    labels_of = found.calibration.own if logits is None else found.calibration.network
    if risk is not None:
        found.accept_at(risk=risk)
    else:
        found.accept_at(flag_rate=labels_of.least_flag_rate(flag_rate))
    return found


def _shared_copy(head: TrustHead) -> TrustHead:
    """A head to calibrate that shares every other part with the given one: calibration replaces its part."""
    found = copy.copy(head)
    found._modules, found._buffers = dict(head._modules), dict(head._buffers)
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
def assess(head: Head, z: Float[Tensor, "B D"], logits: Float[Tensor, "B L"] | None, seen: Seen | None = None) -> Rows:
    """Columns of a batch, on the CPU: the fields of ``Judged`` and, of a calibrated head, those of ``CALIBRATED``.

    ``joint``, ``confidence``, ``p_value`` and ``reason`` assess the network's label; without logits the head's own.
    A network label that the head does not know has joint score 0. ``seen`` is called with the head's predictions and
    whether there are logits, so that a drift monitor need not run the head again.
    """
    network = None if logits is None else logits.argmax(dim=1)
    if not is_calibrated(head, logits is not None):
        return _columns(judge(head, z, network)._asdict())
    assert isinstance(head, TrustHead)
    values = class_values(head).to(z.device)
    with _flagging(head):
        out = head(z, logits=None if logits is None else logits[:, values])
    if seen is not None:
        seen(out, logits is not None)
    reason = refusal_reason(out) - 1  # -1 for accepted labels, otherwise an index into REASONS
    own = torch.where(out.label >= 0, values[out.label.clamp_min(0)], -1)
    given = own if network is None else network
    known = torch.isin(given, values)
    reason = torch.where(known | (reason >= 0), reason, REASONS.index(Reason.DISAGREES.text))
    judged = Judged(
        label=out.label,
        trust=out.trust,
        rule=out.rule,
        distance=out.distance.nan_to_num(nan=torch.inf),
        margin=out.margin.nan_to_num(nan=0.0, posinf=torch.inf),
        network_label=given,
        network_trust=torch.where(known, out.network_trust, 0.0),
        network_margin=torch.where(known, out.network_margin.nan_to_num(nan=0.0, posinf=torch.inf), 0.0),
    )
    scores = {
        "joint": torch.where(known, out.joint, 0.0),
        "confidence": torch.where(known, out.confidence, 0.0),
        "p_value": out.p_value,
        "reason": reason,
    }
    return _columns({**judged._asdict(), **scores})


def _columns(columns: Rows) -> Rows:
    """Columns on the CPU, in float32 and int64."""
    return {
        name: column.cpu().float() if column.is_floating_point() else column.cpu().long()
        for name, column in columns.items()
    }


def judged_of(rows: Rows) -> Judged:
    """The fields of ``Judged`` of the columns of :func:`assess`."""
    return Judged(**{name: rows[name] for name in Judged._fields})


def stage_numbers(
    rows: Rows,
    reason: Int[Tensor, "B"],
    own: Int[Tensor, "B"],
    target: Int[Tensor, "B"] | None,
    has_network: bool,
) -> dict[str, float]:
    """Numbers of one stage, under the same keys for every stage.

    ``aurc``, ``acc_at_80``, ``accepted``, ``acc_accepted`` and ``acc`` are about the network's labels. Their keys begin
    with ``head_`` if there are no logits, so that a number about the network is never one about the head. ``head_acc``
    is the accuracy of the head's labels, ``head_trust`` and ``head_trust_p05`` are mean and 5 % quantile of its trust.
    Numbers that need true labels are NaN without them, except that ``acc_accepted`` is 0 if no label is accepted.

    Args:
        rows: Columns of :func:`assess`.
        reason: Index into ``REASONS`` for flagged samples, -1 for accepted ones.
        own: The head's labels as class values.
        target: True labels, or None.
        has_network: Whether the assessed labels are the network's.
    """
    judged, accepted = judged_of(rows), reason < 0
    score = rows["joint"] if "joint" in rows else safety(judged)
    n = len(reason)
    found = {"n": float(n), "nonfinite": float((judged.label < 0).sum())}
    found |= {name.replace(" ", "_"): float((reason == code).double().mean()) for code, name in enumerate(REASONS)}
    prefix = "" if has_network else "head_"
    right = None if target is None or n == 0 else judged.network_label == target
    labels = dict.fromkeys(_LABEL_NUMBERS, math.nan) | {"accepted": float(accepted.double().mean())}
    if right is not None:
        labels |= label_numbers(score, accepted, right)
    found |= {f"{prefix}{name}": value for name, value in labels.items()}
    if has_network:
        found["head_acc"] = math.nan if target is None else float((own == target).double().mean())
    trust = judged.trust.double()
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
    codes = ("id", "label", "rule", "network_label")
    return {
        name: torch.empty(0, dtype=torch.int64 if name in codes else torch.float32) for name in ("id", *Judged._fields)
    }


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
    unknown = ("acc_", "aurc")
    known = {key: value for key, value in numbers.items() if not key.removeprefix("head_").startswith(unknown)}
    return logged_names("pool", {key: value for key, value in known.items() if key not in ("acc", "head_acc")})
