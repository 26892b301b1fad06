"""Explanation of the decision that a trust head takes: accepted or refused, why, and similar training examples."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sepc_torch.data.text_table import printable
from sepc_torch.head.evidence import Evidence
from sepc_torch.head.neighbours import Neighbours
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.projection import Projection
from sepc_torch.head.reasons import Reason, refusal_reason
from sepc_torch.model.explanation import Explanation
from sepc_torch.model.sepc import SEPC
from sepc_torch.shapes import Float

# Number of training examples of a class, and of features, that an explanation names.
_EXAMPLES = 3
_FEATURES = 3


@dataclass(frozen=True)
class Example:
    """A training example: its identifier, its label, and its distance in the space of the embeddings."""

    id: int | str
    label: Any
    distance: float


@dataclass(frozen=True)
class FeatureValue:
    """A feature of a table: its value, its mean among training examples of the label, and the difference in deviations.

    The deviation is the standard deviation of the feature among these examples; the difference is infinite if they all
    have one value.
    """

    name: str
    value: float
    mean: float
    deviations: float


@dataclass(frozen=True)
class DecisionExplanation:
    """Explanation of one decision. ``str()`` gives a sentence and the numbers, :meth:`to_dict` all values.

    Attributes:
        accepted: Whether the label is accepted; None if the head is not calibrated for such labels.
        reason: Name of the :class:`~sepc_torch.head.reasons.Reason`, or ``"not calibrated"``.
        sentence: The decision in words.
        source: Whose label is explained: ``"network"`` or ``"head"``.
        label: The label that was assessed; None if there is none.
        head_label: The head's own label; None if there is none.
        softmax: The network's softmax probability of its label; None without logits.
        confidence: Probability that the label is right, provided that the point is of a known kind.
        joint: Probability that the label is right and the point of a known kind.
        threshold: The least accepted joint score; None if the head is not calibrated for such labels.
        p_value: Conformal p-value: share of points like the calibration points that are at least as unusual.
        class_p_value: The same among the calibration points of the label's class.
        trust: The paper's trust in the label.
        runner_up: The label that is the most likely alternative; None if there is none.
        examples: The nearest training examples of the label.
        runner_up_examples: The nearest training examples of the runner-up.
        features: The features that differ most from training examples of the label, if the head sees named features.
        paper: The paper's explanation of the head's own label: rule, ellipsoids and counts of training points.
    """

    accepted: bool | None
    reason: str
    sentence: str
    source: str
    label: Any
    head_label: Any
    softmax: float | None
    confidence: float
    joint: float
    threshold: float | None
    p_value: float
    class_p_value: float
    trust: float
    runner_up: Any
    examples: tuple[Example, ...]
    runner_up_examples: tuple[Example, ...]
    features: tuple[FeatureValue, ...]
    paper: Explanation | None

    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain Python values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("examples", "runner_up_examples", "features"):
            values[name] = [asdict(item) for item in values[name]]
        return {**values, "paper": None if self.paper is None else self.paper.details}

    @property
    def details(self) -> dict[str, Any]:
        """The dictionary of :meth:`to_dict`, with the rule of the head's own label under ``"rule"``."""
        return {**self.to_dict(), "rule": None if self.paper is None else self.paper.details["rule"]}

    def __str__(self) -> str:
        lines = [self.sentence]
        if self.threshold is not None:
            relation = ">=" if self.joint >= self.threshold else "<"
            lines += [
                f"  confidence {self.confidence:.3f}: probability that label {_show(self.label)} is right, for a point "
                "of a known kind",
                f"  joint {self.joint:.3f} {relation} {self.threshold:.3f}, the acceptance threshold",
                f"  p-value {self.p_value:.3f}: share of points like the calibration points that are as unusual; "
                f"{self.class_p_value:.3f} within the class",
            ]
        if self.softmax is not None:
            lines.append(f"  network's label {_show(self.label)} with softmax {self.softmax:.3f}")
        if self.head_label is not None and self.paper is not None:
            paper = self.paper.details
            lines.append(
                f"  head's label {_show(self.head_label)} with the paper's trust {paper['trust']:.3f}, because "
                f"{paper['reason']} (rule {paper['rule']})"
            )
        for label, found in ((self.label, self.examples), (self.runner_up, self.runner_up_examples)):
            if found:
                named = ", ".join(f"{_show(item.id)} at {item.distance:.3g}" for item in found)
                lines.append(f"  nearest training examples of {_show(label)} (id at distance): {named}")
        if self.features:
            named = ", ".join(
                f"{printable(f.name)} {f.value:.4g} (mean {f.mean:.4g}, {f.deviations:+.1f} deviations)"
                for f in self.features[:_FEATURES]
            )
            lines.append(f"  features that differ most from training examples of {_show(self.label)}: {named}")
        return "\n".join(lines)


class ExplainedHead(NamedTuple):
    """The parts of a head that an explanation reads; ``own`` tells that the labels are the head's."""

    projection: Projection
    sepc: SEPC
    evidence: Evidence | None
    reference_ids: tuple[int | str, ...] | None
    feature_names: tuple[str, ...] | None
    own: bool


def explain_decisions(
    head: ExplainedHead,
    z: Float[Tensor, "B D"],
    logits: Float[Tensor, "B C"] | None,
    out: HeadPrediction,
    thresholds: list[float] | None,
) -> list[DecisionExplanation]:
    """Explain the decisions of a head for a batch of embeddings.

    Args:
        head: The parts of the head.
        z: The embeddings.
        logits: The network's logits, or None if the head's own labels are explained.
        out: The predictions of the head.
        thresholds: The least accepted joint score of every row; None if the head is not calibrated for such labels.
    """
    projected = head.projection(z)
    softmax = None if logits is None else logits.double().softmax(dim=1)
    reasons = refusal_reason(out).tolist()
    rows = [{name: column[i].item() for name, column in out._asdict().items()} for i in range(len(z))]
    valid = (out.label >= 0).nonzero().squeeze(1)
    papers = head.sepc.explain(projected[valid]) if len(valid) else []
    assert isinstance(papers, list)  # a batch has a list
    paper_of = dict(zip(valid.tolist(), papers, strict=True))
    return [
        _explain(
            head,
            row,
            Reason(reason),
            z[i],
            paper_of.get(i),
            None if softmax is None else softmax[i],
            None if thresholds is None else thresholds[i],
        )
        for i, (row, reason) in enumerate(zip(rows, reasons, strict=True))
    ]


def _explain(
    head: ExplainedHead,
    row: dict[str, Any],
    reason: Reason,
    z: Float[Tensor, "D"],
    paper: Explanation | None,
    softmax: Float[Tensor, "C"] | None,
    threshold: float | None,
) -> DecisionExplanation:
    """Explain the decision for one embedding; ``paper`` explains the head's own label, if there is one."""
    classes = head.sepc.classes
    label, own, other = row["network_label"], row["label"], _alternative(row, softmax)
    name = None if label < 0 else classes[label]
    rival = None if other is None else classes[other]
    probability = None if softmax is None or label < 0 else float(softmax[label])
    calibrated = threshold is not None
    whose = "head's" if head.own else "network's"
    return DecisionExplanation(
        accepted=row["accept"] if calibrated else None,
        reason=reason.text if calibrated or reason == Reason.NO_PREDICTION else "not calibrated",
        sentence=_sentence(reason, row, name, None if own < 0 else classes[own], rival, whose, threshold),
        source="head" if head.own else "network",
        label=name,
        head_label=None if own < 0 else classes[own],
        softmax=probability,
        confidence=row["confidence"],
        joint=row["joint"],
        threshold=threshold,
        p_value=row["p_value"],
        class_p_value=row["class_p_value"],
        trust=row["network_trust"],
        runner_up=rival,
        examples=_examples(head, z, label),
        runner_up_examples=() if other is None else _examples(head, z, other),
        features=_features(head, z, label),
        paper=paper,
    )


def _alternative(row: dict[str, Any], softmax: Float[Tensor, "C"] | None) -> int | None:
    """Class of the most likely alternative: the head's label if it differs, else the network's second, else the rival.

    The rival is the class of the nearest ellipsoid of another class.
    """
    label, own = row["network_label"], row["label"]
    if label < 0 or own < 0:
        return None
    if own != label:
        return int(own)
    if softmax is not None and len(softmax) > 1:
        return int(softmax.index_fill(0, torch.tensor(label, device=softmax.device), -1.0).argmax())
    return int(row["runner_up"]) if row["runner_up"] not in (-1, label) else None


def _sentence(
    reason: Reason, row: dict[str, Any], label: Any, own: Any, rival: Any, whose: str, threshold: float | None
) -> str:
    """The decision in words."""
    if reason == Reason.NO_PREDICTION:
        return "Refused: there is no prediction, because the embedding or the logits hold NaN or have no largest value."
    if threshold is None:
        return (
            f"Not decided: the head is not calibrated. The {whose} label is {_show(label)}; the paper's trust in it is "
            f"{row['network_trust']:.3f}."
        )
    likely = f"label {_show(label)} is right, and the sample of a known kind, with probability {row['joint']:.0%}"
    if threshold == math.inf:
        return (
            "Refused, because the head accepts nothing: no threshold keeps the wanted risk with these calibration "
            f"points. The {whose} {likely}."
        )
    bar = f"the threshold is {threshold:.0%}"
    if reason == Reason.ACCEPTED:
        return f"Accepted: {likely}; {bar}."
    if reason == Reason.NOVEL:
        return (
            f"Refused, because this sample is new to the head: at most {row['p_value']:.1%} of known samples are as "
            f"unusual. The {whose} label is {_show(label)}."
        )
    if reason == Reason.DISAGREES:
        return (
            f"Refused, because the network says {_show(label)} and the training examples nearby say {_show(own)}: "
            f"{likely}; {bar}."
        )
    close = f", and {_show(rival)} is the most likely alternative" if rival is not None else ""
    return f"Refused, because the label is uncertain: {likely}{close}; {bar}."


def _show(value: Any) -> str:
    """A label or identifier on one line, with text in quotes."""
    return printable(repr(value) if isinstance(value, str) else str(value))


def _examples(head: ExplainedHead, z: Float[Tensor, "D"], label: int) -> tuple[Example, ...]:
    """The nearest reference points of a class, nearest first."""
    if head.evidence is None or head.reference_ids is None or label < 0:
        return ()
    points = head.evidence.reference_points
    rows = (points.codes == label).nonzero().squeeze(1)
    distance = torch.linalg.vector_norm(_relative(points, z) - points.offsets[rows].double(), dim=1)
    nearest = distance.sort(stable=True)
    found = zip(nearest.values[:_EXAMPLES].tolist(), rows[nearest.indices[:_EXAMPLES]].tolist(), strict=True)
    return tuple(Example(head.reference_ids[i], head.sepc.classes[label], d) for d, i in found)


def _features(head: ExplainedHead, z: Float[Tensor, "D"], label: int) -> tuple[FeatureValue, ...]:
    """Named features, largest difference from the reference points of the label first."""
    if head.evidence is None or head.feature_names is None or label < 0 or not head.evidence.reference_points.ends:
        return ()
    points = head.evidence.reference_points
    some = points.offsets[points.codes == label].double()
    mean, deviation = some.mean(dim=0), some.std(dim=0, correction=0)
    difference = _relative(points, z) - mean
    # 0/0 for a feature that equals the only value of the examples: no difference.
    score = (difference / deviation).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    order = score.abs().argsort(descending=True, stable=True).tolist()
    origin = points.origin.double()
    return tuple(
        FeatureValue(head.feature_names[j], float(z[j]), float(origin[j] + mean[j]), float(score[j])) for j in order
    )


def _relative(points: Neighbours, z: Float[Tensor, "D"]) -> Float[Tensor, "D"]:
    """An embedding relative to the origin of the reference points, in float64."""
    return z.double() - points.origin.double()
