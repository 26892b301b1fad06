"""Predictions of the frozen classifier: the :class:`Prediction` record and the functions that build it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.model.rules import Resolution, Rule, TrainingCounts, class_distance
from sepc_torch.model.trust import bayes_trust
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
    bad = bad_rows(distance)
    margin, runner_up = _margin_and_runner_up(distance, training, label)
    trust = bayes_trust(found.counts, totals, label, distance.dtype)
    return Prediction(
        label=torch.where(bad, -1, label),
        trust=torch.where(bad, 0.0, trust),
        rule=found.rule,
        distance=distance.gather(1, found.nearest.unsqueeze(1)).squeeze(1),
        margin=margin,
        nearest=found.nearest,
        runner_up=runner_up,
    )


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
    margin, _ = _margin_and_runner_up(distance, training, prediction.label.clamp_min(0))
    return prediction._replace(distance=distance.gather(1, prediction.nearest.unsqueeze(1)).squeeze(1), margin=margin)


def _margin_and_runner_up(
    distance: Float[Tensor, "B K"], training: TrainingCounts, label: Int[Tensor, "B"]
) -> tuple[Float[Tensor, "B"], Int[Tensor, "B"]]:
    """Ratio of the distance to the nearest other class to the distance to the label's class, and that other class.

    The margin of rows without a finite distance is NaN, and no gradient flows through it.
    """
    bad = bad_rows(distance)
    near = class_distance(torch.where(bad[:, None], 1.0, distance), training)
    own = near.gather(1, label.unsqueeze(1)).squeeze(1)
    other, runner_up = near.scatter(1, label.unsqueeze(1), torch.inf).min(dim=1)
    return torch.where(bad, torch.nan, other / own.clamp_min(torch.finfo(own.dtype).tiny)), runner_up
