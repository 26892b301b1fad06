"""Predictions of the frozen classifier: the :class:`Prediction` record and the functions that build it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.model.rules import Resolution, Rule, TrainingCounts, class_distance
from sepc_torch.model.trust import label_trusts
from sepc_torch.shapes import Bool, Float, Int


class Prediction(NamedTuple):
    """Label, trust, rule and distances of a batch; every field is a tensor (B,).

    Attributes:
        label: Index into the model's ``classes``; -1 for a flagged row, which has no finite distance.
        trust: Probability of the label given the training points in the point's region; 0 for a flagged row.
        rule: The :class:`Rule` that gave the label.
        distance: Mahalanobis distance to the nearest ellipsoid; 1 is its surface.
        margin: Distance to the nearest ellipsoid of another class, divided by the distance to the nearest ellipsoid of
            the label's class.
        nearest: Index of the nearest ellipsoid.
        runner_up: Class of the nearest ellipsoid outside the label's class.
    """

    label: Int[Tensor, "B"]
    trust: Float[Tensor, "B"]
    rule: Int[Tensor, "B"]
    distance: Float[Tensor, "B"]
    margin: Float[Tensor, "B"]
    nearest: Int[Tensor, "B"]
    runner_up: Int[Tensor, "B"]

    @property
    def rule_names(self) -> list[str | None]:
        """Names of the rules, such as ``"SINGLE"``; None in flagged rows."""
        pairs = zip(self.rule.tolist(), self.label.tolist(), strict=True)
        return [None if label < 0 else Rule(code).name for code, label in pairs]

    def abstain(self, threshold: float = 0.5, outside: bool = True) -> Bool[Tensor, "B"]:
        """Mask of predictions to reject.

        Args:
            threshold: Reject trust below this value. Flagged rows are always rejected.
            outside: Also reject points outside every ellipsoid.
        """
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"threshold must lie between 0 and 1, got {threshold}.")
        rejected = (self.trust < threshold) | (self.label < 0)
        return rejected | (self.rule == int(Rule.OUTSIDE)) if outside else rejected


def bad_rows(distance: Float[Tensor, "B K"]) -> Bool[Tensor, "B"]:
    """Mask of rows without a finite distance: their points hold NaN, infinity, or values whose squares overflow."""
    return ~torch.isfinite(distance).any(dim=1)


def predict_for_label(
    distance: Float[Tensor, "B K"],
    found: Resolution,
    training: TrainingCounts,
    totals: Int[Tensor, "C"],
    label: Int[Tensor, "B"],
) -> Prediction:
    """Build the prediction for a label in the region that the rules found.

    Args:
        distance: Mahalanobis distances to all ellipsoids.
        found: Rule, nearest ellipsoid and class counts of each point.
        training: Class counts of the training set.
        totals: Training points of each class.
        label: The label to evaluate: ``found.label``, or labels from another source.

    Rows without a finite distance are flagged: label -1, trust 0, margin NaN.
    """
    return predict_for_labels(distance, found, training, totals, label.unsqueeze(0))[0]


def predict_for_labels(
    distance: Float[Tensor, "B K"],
    found: Resolution,
    training: TrainingCounts,
    totals: Int[Tensor, "C"],
    labels: Int[Tensor, "n B"],
) -> list[Prediction]:
    """Build the predictions for n labels of each point; the arguments are those of :func:`predict_for_label`."""
    bad = None if found.finite else bad_rows(distance)
    margins, runners_up = _margins_and_runners_up(distance, training, labels, bad)
    trusts = label_trusts(found.counts, totals, labels).to(distance.dtype)
    if bad is not None:
        labels, trusts = torch.where(bad, -1, labels), torch.where(bad, 0.0, trusts)
    nearest = found.distance
    if distance.requires_grad:
        nearest = distance.gather(1, found.nearest.unsqueeze(1)).squeeze(1)
    return [
        Prediction(label, trust, found.rule, nearest, margin, found.nearest, runner_up)
        for label, trust, margin, runner_up in zip(
            *(part.unbind() for part in (labels, trusts, margins, runners_up)), strict=True
        )
    ]


def predictions_from_kernel(
    ints: Int[Tensor, "I B"], floats: Float[Tensor, "F B"], label: Int[Tensor, "B"] | None
) -> tuple[Prediction, Prediction]:
    """Build the predictions for the model's own label and for a given label from the output of the kernels.

    Without a given label both predictions are the model's own.
    """
    code, rule, nearest, runner_up, *given_runner_up = ints.unbind()
    trust, distance, margin, *given_floats = floats.unbind()
    own = Prediction(code, trust, rule, distance, margin, nearest, runner_up)
    if label is None:
        return own, own
    given_trust, given_margin = given_floats
    label = torch.where(code < 0, -1, label)
    return own, own._replace(label=label, trust=given_trust, margin=given_margin, runner_up=given_runner_up[0])


def with_gradient(prediction: Prediction, distance: Float[Tensor, "B K"], training: TrainingCounts) -> Prediction:
    """Replace distance and margin by values computed from differentiable distances."""
    labels = prediction.label.clamp_min(0).unsqueeze(0)
    margin = _margins_and_runners_up(distance, training, labels, bad_rows(distance))[0][0]
    return prediction._replace(distance=distance.gather(1, prediction.nearest.unsqueeze(1)).squeeze(1), margin=margin)


def _margins_and_runners_up(
    distance: Float[Tensor, "B K"],
    training: TrainingCounts,
    labels: Int[Tensor, "n B"],
    bad: Bool[Tensor, "B"] | None,
) -> tuple[Float[Tensor, "n B"], Int[Tensor, "n B"]]:
    """Ratio of the distance to the nearest other class to the distance to the label's class, and that other class.

    The margin of ``bad`` rows, without a finite distance, is NaN. No gradient flows through it, nor through the margin
    of a point at the centre of an ellipsoid of the label's class: it would overflow.
    """
    near = class_distance(distance if bad is None else torch.where(bad[:, None], 1.0, distance), training)
    near, index = near.expand(labels.shape[0], -1, -1), labels.unsqueeze(2)
    own = near.gather(2, index).squeeze(2)
    other, runner_up = near.scatter(2, index, torch.inf).min(dim=2)
    tiny = torch.finfo(own.dtype).tiny
    margin = other / own.clamp_min(tiny)
    if margin.requires_grad:
        margin = torch.where(own < tiny**0.5, margin.detach(), margin)
    return margin if bad is None else torch.where(bad, torch.nan, margin), runner_up
