"""Explanation of the decision that a trust head takes: accepted or refused, why, and similar training examples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sepc_torch.data.table_encoding import TableEncoding
from sepc_torch.data.text import printable
from sepc_torch.head.calibration.assess import finite_logits
from sepc_torch.head.calibration.combined_score import finite_scores
from sepc_torch.head.evidence.evidence import energies
from sepc_torch.head.evidence.neighbours import Neighbours
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.reasons import Reason, refusal_reason
from sepc_torch.model.explanation import Explanation
from sepc_torch.shapes import Float, Int

if TYPE_CHECKING:
    from sepc_torch.head.trust_head import TrustHead

# Number of training examples of a class, and of features, that an explanation names.
_EXAMPLES = 3
_FEATURES = 3
# A point is unusual in a layer if at most this share of the calibration points is as unusual there.
_UNUSUAL = 0.05


@dataclass(frozen=True)
class Example:
    """A training example: its identifier, its label, and its distance in the space of the embeddings."""

    id: int | str
    label: Any
    distance: float


@dataclass(frozen=True)
class FeatureValue:
    """A feature, or a column of a table: its value, and what is usual among training examples of the label.

    Attributes:
        name: Name of the feature or column; of a date with the part that differs most.
        value: A number in the units of the column, a category, or None for a missing value.
        mean: Mean of these examples; None for a category and a missing value.
        deviations: The difference in standard deviations among these examples.
        share: For a category and a missing value, the share of these examples that have it.
    """

    name: str
    value: float | str | None
    mean: float | None
    deviations: float
    share: float | None = None

    def __str__(self) -> str:
        if self.share is not None:
            shown = "missing" if self.value is None else _show(self.value)
            return f"{printable(self.name)} {shown} (so are {self.share:.1%} of them)"
        return f"{printable(self.name)} {self.value:.4g} (mean {self.mean:.4g}, {self.deviations:+.1f} deviations)"


@dataclass(frozen=True)
class LayerShare:
    """How usual a point is in one layer: the share of calibration points that are at least as unusual there.

    The embedding is the last layer, with the name ``"last"``; its share is the smallest one of its kinds of
    nonconformity.
    """

    name: str
    share: float


@dataclass(frozen=True)
class DecisionExplanation:
    """Explanation of one decision. ``str()`` gives a sentence and the numbers, :meth:`to_dict` all values.

    Attributes:
        accepted: Whether the label is accepted; None if the head is not calibrated for such labels.
        reason: Name of the :class:`~sepc_torch.head.reasons.Reason`, or ``"not calibrated"``.
        sentence: The decision in words.
        source: Whose label is explained: ``"network"``, ``"classifier"`` or ``"head"``.
        label: The label that was assessed; None if there is none.
        head_label: The head's own label; None if there is none.
        softmax: The softmax probability that the network or classifier gives its label; None without logits.
        confidence: Probability that the label is right, provided that the point is of a known kind.
        joint: Probability that the label is right and the point of a known kind.
        threshold: The least accepted joint score; None if the head is not calibrated for such labels.
        p_value: Conformal p-value: share of points like the calibration points that are at least as unusual.
        class_p_value: The same among the calibration points of the label's class.
        trust: Trust in the label: the share of the training points of its region that support it.
        runner_up: The label that is the most likely alternative; None if there is none.
        examples: The nearest training examples of the label.
        runner_up_examples: The nearest training examples of the runner-up.
        features: The features that differ most from training examples of the label, if the head sees named features;
            for a head of a table its columns, once each. Numbers with one value in all of these examples are left out.
        layers: How usual the point is in every layer, the last one at the end, if the head was fitted with layers.
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
    layers: tuple[LayerShare, ...]
    paper: Explanation | None

    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain Python values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("examples", "runner_up_examples", "features", "layers"):
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
        if self.layers:
            named = ", ".join(f"{printable(layer.name)} {layer.share:.2g}" for layer in self.layers)
            lines.append(f"  share of calibration points that are as unusual, by layer: {named}")
        if self.softmax is not None:
            lines.append(f"  {self.source}'s label {_show(self.label)} with softmax {self.softmax:.3f}")
        if self.head_label is not None and self.paper is not None:
            paper = self.paper.details
            lines.append(
                f"  head's label {_show(self.head_label)}, which a share of {paper['trust']:.3f} of the training "
                f"points of its region supports, because {paper['reason']} (rule {paper['rule']})"
            )
        for label, found in ((self.label, self.examples), (self.runner_up, self.runner_up_examples)):
            if found:
                named = ", ".join(f"{_show(item.id)} at {item.distance:.3g}" for item in found)
                lines.append(f"  nearest training examples of {_show(label)} (id at distance): {named}")
        if self.features:
            named = ", ".join(map(str, self.features[:_FEATURES]))
            lines.append(f"  features that differ most from training examples of {_show(self.label)}: {named}")
        return "\n".join(lines)


def explain_decisions(
    head: TrustHead,
    z: Float[Tensor, "B D"],
    logits: Float[Tensor, "B C"] | None,
    out: HeadPrediction,
    groups: Int[Tensor, "B"] | None,
    layers: Mapping[str, Float[Tensor, "B _"]] | None,
    source: str,
) -> list[DecisionExplanation]:
    """Explain the decisions of a head for a batch; without logits, of its own labels. ``source`` has the logits."""
    shares = _layer_shares(head, z, logits, out, layers)
    thresholds: list[float] | None = None
    if head.calibration is not None:
        labels = head.calibration.own if logits is None else head.calibration.network
        if labels.done:
            least = labels.least_score(out.network_label.clamp_min(0), out.nearest, groups)
            thresholds = least.expand(len(z)).tolist()
    projected = head.projection(z)
    softmax = None if logits is None else logits.double().softmax(dim=1)
    reasons = refusal_reason(out, head.promise).tolist()
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
            shares[i],
            "head" if logits is None else source,
        )
        for i, (row, reason) in enumerate(zip(rows, reasons, strict=True))
    ]


def _explain(
    head: TrustHead,
    row: dict[str, Any],
    reason: Reason,
    z: Float[Tensor, "D"],
    paper: Explanation | None,
    softmax: Float[Tensor, "C"] | None,
    threshold: float | None,
    layers: tuple[LayerShare, ...],
    source: str,
) -> DecisionExplanation:
    """Explain the decision for one embedding; ``paper`` explains the head's own label, if there is one."""
    classes = head.sepc.classes
    label, own, other = row["network_label"], row["label"], _alternative(row, softmax)
    name = None if label < 0 else classes[label]
    rival = None if other is None else classes[other]
    probability = None if softmax is None or label < 0 else float(softmax[label])
    calibrated = threshold is not None
    return DecisionExplanation(
        accepted=row["accept"] if calibrated else None,
        reason=reason.text if calibrated or reason == Reason.NO_PREDICTION else "not calibrated",
        sentence=_sentence(
            *(reason, row, name, None if own < 0 else classes[own], rival, f"{source}'s", threshold, layers),
            priced=head.promise is not None and head.promise.costs is not None,
        ),
        source=source,
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
        layers=layers,
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


def _layer_shares(
    head: TrustHead,
    z: Float[Tensor, "B D"],
    logits: Float[Tensor, "B C"] | None,
    out: HeadPrediction,
    layers: Mapping[str, Float[Tensor, "B _"]] | None,
) -> list[tuple[LayerShare, ...]]:
    """How usual every point is in each layer; nothing for a head without layers or without a calibration."""
    labels = None if head.calibration is None else head.calibration.own if logits is None else head.calibration.network
    if layers is None or head.evidence is None or labels is None or labels.plain is None:
        return [()] * len(z)
    kinds = head.evidence.measure(z, layers=list(layers.values())).kinds()
    if logits is not None:
        kinds.append(energies(finite_logits(logits)))
    log_shares = labels.plain.kinds.log_share(finite_scores(torch.stack(kinds)))
    last = len(head.evidence.kinds) - len(layers)
    own = torch.cat([log_shares[:last], log_shares[len(head.evidence.kinds) :]]).amin(dim=0, keepdim=True)
    table = torch.cat([log_shares[last : len(head.evidence.kinds)], own]).exp().T.tolist()
    missing = ((out.label < 0) | (out.network_label < 0)).tolist()
    return [
        () if absent else tuple(LayerShare(name, share) for name, share in zip([*layers, "last"], row, strict=True))
        for row, absent in zip(table, missing, strict=True)
    ]


def _strange_layers(layers: tuple[LayerShare, ...]) -> str:
    """A sentence about the layers in which a point is unusual, and those in which it is not; empty without layers."""
    strange = [layer for layer in layers if layer.share <= _UNUSUAL]
    if not strange:
        return ""
    parts = []
    for layer in sorted(strange, key=lambda layer: layer.share):
        one_in = min(round(1.0 / max(layer.share, 1e-6)), 10**6)
        parts.append(f"{_layer(layer.name)} (the 1 in {one_in:,} most unusual)")
    usual = [_layer(layer.name) for layer in layers if layer.share > _UNUSUAL]
    rest = f"; ordinary in {', '.join(usual)}" if usual else ""
    return f" It is unlike the training data in {', '.join(parts)}{rest}."


def _layer(name: str) -> str:
    return "the last layer" if name == "last" else printable(name)


def _sentence(
    reason: Reason,
    row: dict[str, Any],
    label: Any,
    own: Any,
    rival: Any,
    whose: str,
    threshold: float | None,
    layers: tuple[LayerShare, ...],
    priced: bool,
) -> str:
    """The decision in words; ``priced`` says whether costs set the thresholds."""
    if reason == Reason.NO_PREDICTION:
        return (
            "Refused: there is no prediction, because the embedding or the logits hold NaN, or the logits have no "
            "single largest value."
        )
    if threshold is None:
        return (
            f"Not decided: the head is not calibrated. The {whose} label is {_show(label)}; its share of supporting "
            f"training points is {row['network_trust']:.3f}."
        )
    likely = f"label {_show(label)} is right, and the sample of a known kind, with probability {row['joint']:.0%}"
    if threshold == math.inf:
        why = (
            "a review costs less than this label does at any score"
            if priced
            else "the head accepts nothing: no threshold keeps the wanted risk with these calibration points"
        )
        return f"Refused, because {why}. The {whose} {likely}."
    bar = f"the threshold is {threshold:.0%}"
    if reason == Reason.ACCEPTED:
        return f"Accepted: {likely}; {bar}."
    if reason == Reason.NOVEL:
        return (
            f"Refused, because this sample is new to the head: at most {row['p_value']:.1%} of known samples are as "
            f"unusual.{_strange_layers(layers)} The {whose} label is {_show(label)}."
        )
    if reason == Reason.DISAGREES:
        return (
            f"Refused, because the {whose[:-2]} says {_show(label)} and the training examples nearby say {_show(own)}: "
            f"{likely}; {bar}."
        )
    close = f", and {_show(rival)} is the most likely alternative" if rival is not None else ""
    return f"Refused, because the label is uncertain: {likely}{close}; {bar}."


def _show(value: Any) -> str:
    """A label or identifier on one line, with text in quotes."""
    return printable(repr(value) if isinstance(value, str) else str(value))


def _examples(head: TrustHead, z: Float[Tensor, "D"], label: int) -> tuple[Example, ...]:
    """The nearest reference points of a class, nearest first; none without a label."""
    return () if label < 0 else nearest_examples(head, z, label)


def nearest_examples(head: TrustHead, z: Float[Tensor, "D"], label: int | None = None) -> tuple[Example, ...]:
    """The nearest reference points, of a class or of any, nearest first; none if the head keeps none."""
    if head.evidence is None or head.reference_ids is None:
        return ()
    points = head.evidence.reference_points
    mine = torch.ones_like(points.codes, dtype=torch.bool) if label is None else points.codes == label
    rows = mine.nonzero().squeeze(1)
    distance = torch.linalg.vector_norm(_relative(points, z) - points.offsets[rows].double(), dim=1)
    nearest = distance.sort(stable=True)
    found = zip(nearest.values[:_EXAMPLES].tolist(), rows[nearest.indices[:_EXAMPLES]].tolist(), strict=True)
    return tuple(Example(head.reference_ids[i], head.sepc.classes[int(points.codes[i])], d) for d, i in found)


def _features(head: TrustHead, z: Float[Tensor, "D"], label: int) -> tuple[FeatureValue, ...]:
    """Named features, largest difference from the reference points of the label first.

    A feature with one value in all of these points is left out: it has no deviation to compare a difference with.
    """
    if head.evidence is None or head.feature_names is None or label < 0 or not head.evidence.reference_points.ends:
        return ()
    points = head.evidence.reference_points
    some = points.offsets[points.codes == label].double()
    if head.encoding is not None:
        return _columns(head.encoding, some + points.origin.double(), z.double())
    mean, deviation = some.mean(dim=0), some.std(dim=0, correction=0)
    difference = _relative(points, z) - mean
    score = difference / deviation
    varies = some.amax(dim=0) > some.amin(dim=0)  # the deviation of equal values can be a rounding error
    order = [j for j in score.abs().argsort(descending=True, stable=True).tolist() if varies[j]]
    origin = points.origin.double()
    return tuple(
        FeatureValue(head.feature_names[j], float(z[j]), float(origin[j] + mean[j]), float(score[j])) for j in order
    )


def _columns(
    encoding: TableEncoding, examples: Float[Tensor, "n D"], z: Float[Tensor, "D"]
) -> tuple[FeatureValue, ...]:
    """The columns of a table, largest difference from examples first: each once, in its units or as its category."""
    mean, deviation, value = examples.mean(dim=0).tolist(), examples.std(dim=0, correction=0), z.tolist()
    varies = (examples.amax(dim=0) > examples.amin(dim=0)).tolist()
    found: dict[str, FeatureValue] = {}

    def offer(feature: int, item: FeatureValue) -> None:
        home = encoding.home(feature)  # of the parts of a date the one that differs most
        if home not in found or abs(item.deviations) > abs(found[home].deviations):
            found[home] = item

    def shared(feature: int, name: str, shown: str | None, share: float) -> None:
        least = 0.5 / len(examples)  # a category without examples is no more than rare
        bounded = min(max(share, least), 1.0 - least)
        offer(feature, FeatureValue(name, shown, None, math.sqrt((1.0 - bounded) / bounded), max(share, 0.0)))

    place = len(encoding.numbers)
    for j, column in enumerate(encoding.numbers):
        if column.gaps:
            place += 1
            if value[place - 1] > 0:
                shared(j, column.name, None, mean[place - 1])
                continue
        if varies[j]:
            score = (value[j] - mean[j]) / float(deviation[j])
            offer(j, FeatureValue(column.name, column.original(value[j]), column.original(mean[j]), score))
    for kinds, width in zip(encoding.categories, encoding.widths, strict=True):
        names = [*kinds.categories, *(["(other)"] if kinds.other else [])]
        own = next((k for k in range(width) if value[place + k] > 0), None)
        share = 1.0 - sum(mean[place : place + width]) if own is None else mean[place + own]
        shared(place, kinds.name, "(new)" if own is None else names[own], share)
        place += width
    return tuple(sorted(found.values(), key=lambda item: -abs(item.deviations)))


def _relative(points: Neighbours, z: Float[Tensor, "D"]) -> Float[Tensor, "D"]:
    """An embedding relative to the origin of the reference points, in float64."""
    return z.double() - points.origin.double()
