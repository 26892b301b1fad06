"""What the frozen classifier says of a batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.model.rules import Resolution, Rule, TrainingCounts, class_distance
from sepc_torch.model.trust import bayes_trust
from sepc_torch.shapes import Bool, Float, Int


class Prediction(NamedTuple):
    """What SEP-C says of a batch; every field is a tensor (B,).

    Attributes:
        label: Index into the model's ``classes``; -1 for a flagged row that holds NaN.
        trust: Probability of the label given the training points that share the point's region.
        rule: The :class:`Rule` that gave the label.
        distance: Mahalanobis distance to the nearest ellipsoid; 1 is its surface.
        margin: Distance to the nearest ellipsoid of another class over that to the nearest of the label's own.
        nearest: Index of the nearest ellipsoid.
        runner_up: The class of the nearest ellipsoid that is not of the label's.
    """

    label: Int[Tensor, "B"]
    trust: Float[Tensor, "B"]
    rule: Int[Tensor, "B"]
    distance: Float[Tensor, "B"]
    margin: Float[Tensor, "B"]
    nearest: Int[Tensor, "B"]
    runner_up: Int[Tensor, "B"]

    def abstain(self, threshold: float = 0.5, outside: bool = True) -> Bool[Tensor, "B"]:
        """Which predictions to refuse: trust below the threshold, and points outside every ellipsoid unless allowed."""
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"threshold must lie between 0 and 1, got {threshold}.")
        refused = (self.trust < threshold) | (self.label < 0)
        return refused | (self.rule == int(Rule.OUTSIDE)) if outside else refused


def bad_rows(distance: Float[Tensor, "B K"]) -> Bool[Tensor, "B"]:
    """Rows without a distance: they hold NaN or infinity, or numbers whose squares overflow."""
    return ~torch.isfinite(distance).any(dim=1)


def verdict(
    distance: Float[Tensor, "B K"],
    found: Resolution,
    training: TrainingCounts,
    totals: Int[Tensor, "C"],
    label: Int[Tensor, "B"],
) -> Prediction:
    """The prediction for a label, by the rules' own or someone else's; rows without a distance are flagged."""
    bad = bad_rows(distance)
    margin, runner_up = _margin(distance, training, label)
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


def from_columns(
    ints: Int[Tensor, "I B"], floats: Float[Tensor, "F B"], label: Int[Tensor, "B"] | None
) -> tuple[Prediction, Prediction]:
    """The predictions for the rules' own label and for a given one, from what the kernels wrote."""
    code, rule, nearest, runner_up, *their_runner_up = ints.unbind()
    trust, distance, margin, *theirs = floats.unbind()
    own = Prediction(code, trust, rule, distance, margin, nearest, runner_up)
    if label is None:
        return own, own
    label = torch.where(code < 0, -1, label)
    return own, own._replace(label=label, trust=theirs[0], margin=theirs[1], runner_up=their_runner_up[0])


def differentiable(judged: Prediction, distance: Float[Tensor, "B K"], training: TrainingCounts) -> Prediction:
    """The prediction with distance and margin taken from distances that know their gradient."""
    margin, _ = _margin(distance, training, judged.label.clamp_min(0))
    return judged._replace(distance=distance.gather(1, judged.nearest.unsqueeze(1)).squeeze(1), margin=margin)


def _margin(
    distance: Float[Tensor, "B K"], training: TrainingCounts, label: Int[Tensor, "B"]
) -> tuple[Float[Tensor, "B"], Int[Tensor, "B"]]:
    """Distance to the nearest other class over that to the label's own, and which class that is.

    Rows without a distance have NaN, and no gradient passes through it.
    """
    bad = bad_rows(distance)
    near = class_distance(torch.where(bad[:, None], 1.0, distance), training)
    own = near.gather(1, label.unsqueeze(1)).squeeze(1)
    other, runner_up = near.scatter(1, label.unsqueeze(1), torch.inf).min(dim=1)
    return torch.where(bad, torch.nan, other / own.clamp_min(torch.finfo(own.dtype).tiny)), runner_up
