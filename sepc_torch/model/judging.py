"""Predictions for a model's own and for given labels from distances, as one opaque operator in compiled code."""

from __future__ import annotations

import torch
from torch import Tensor

from sepc_torch.model import torch_ops
from sepc_torch.model.prediction import Prediction, predict_for_labels
from sepc_torch.model.rules import TrainingCounts, resolve
from sepc_torch.shapes import Float, Int


def judge_distances(
    distance: Float[Tensor, "B K"],
    nearness: Float[Tensor, "B K"] | None,
    label: Int[Tensor, "B"] | None,
    training: TrainingCounts,
    totals: Int[Tensor, "C"],
) -> tuple[Prediction, Prediction]:
    """Predict for the model's own labels and for given labels, by default the model's own.

    Args:
        distance: Mahalanobis distances to all ellipsoids.
        nearness: Distances that define the nearest ellipsoid of a point outside; by default ``distance``.
        label: The given labels.
        training: Class counts of the training set.
        totals: Training points of each class.
    """
    if torch.compiler.is_compiling() and not (torch.is_grad_enabled() and distance.requires_grad):
        ints, floats = _judged(distance, [] if nearness is None else [nearness], label, list(training), totals)
        code, rule, nearest, runner_up, *given_ints = ints.unbind()
        trust, length, margin, *given_floats = floats.unbind()
        own = Prediction(code, trust, rule, length, margin, nearest, runner_up)
        if label is None:
            return own, own
        changed = zip(("label", "runner_up", "trust", "margin"), (*given_ints, *given_floats), strict=True)
        return own, own._replace(**dict(changed))
    return _judge(distance, nearness, label, training, totals)


def _judge(
    distance: Float[Tensor, "B K"],
    nearness: Float[Tensor, "B K"] | None,
    label: Int[Tensor, "B"] | None,
    training: TrainingCounts,
    totals: Int[Tensor, "C"],
) -> tuple[Prediction, Prediction]:
    found = resolve(distance.detach(), training, nearness)
    labels = found.label.unsqueeze(0) if label is None else torch.stack([found.label, label])
    own, *given = predict_for_labels(distance, found, training, totals, labels)
    return own, given[0] if given else own


def _packed(
    distance: Tensor, nearness: list[Tensor], label: Tensor | None, training: list[Tensor], totals: Tensor
) -> tuple[Tensor, Tensor]:
    """The predictions as two tensors: the model's own, then what differs for given labels."""
    own, given = _judge(distance, nearness[0] if nearness else None, label, TrainingCounts(*training), totals)
    more = ([], []) if label is None else ([given.label, given.runner_up], [given.trust, given.margin])
    ints = torch.stack([own.label, own.rule, own.nearest, own.runner_up, *more[0]])
    return ints, torch.stack([own.trust, own.distance, own.margin, *more[1]])


def _shapes(
    distance: Tensor, _nearness: list[Tensor], label: Tensor | None, _training: list[Tensor], _totals: Tensor
) -> tuple[Tensor, Tensor]:
    count, more = distance.shape[0], 0 if label is None else 2
    return distance.new_empty(4 + more, count, dtype=torch.int64), distance.new_empty(3 + more, count)


_judged = torch_ops.opaque(
    "judge_distances(Tensor distance, Tensor[] nearness, Tensor? label, Tensor[] training, Tensor totals) "
    "-> (Tensor, Tensor)",
    _packed,
    _shapes,
)
