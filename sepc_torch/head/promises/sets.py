r"""Prediction sets: the classes that a point may have, with a promised coverage.

The set of a point x is :math:`C(x) = \{c : s(x, c) \ge t\}` with the scores s of
:meth:`~sepc_torch.head.calibration.label_calibration.LabelCalibration.class_scores`. The threshold t is the k-th
smallest score :math:`s(x_i, y_i)` of the n ranked calibration points and their true classes,
:math:`k = \lfloor (1 - q) (n + 1) \rfloor`, for the coverage q. For a new point (x, y) of the calibration distribution,

.. math:: q \le P(y \in C(x)) \le q + \frac{1}{n + 1},

over the calibration points and the new point; the second inequality needs scores without ties.

Proof. No ranked point fitted s: the ranking, the typicality, the odds of unknowns and the temperature are those of the
other calibration points. Given these, the n ranked points and the new one are exchangeable, and so are their n + 1
scores of the true class. The new score is below the k-th smallest of the n others only if it is among the k smallest of
all n + 1, which has a probability of at most :math:`\frac{k}{n + 1} \le 1 - q`. Without ties the probability is
:math:`\frac{k}{n + 1} > 1 - q - \frac{1}{n + 1}`. With ties the new score is below the k-th smallest less often. If
k = 0, the points are too few, and the set holds every class.

Per class, the same holds among the points of each true class y, with the threshold :math:`t_y` of the ranked points of
that class, and :math:`C(x) = \{c : s(x, c) \ge t_c\}`: whether y is in the set depends on :math:`t_y` only.

For points in units, the coverage is the mean over units of the covered share of their points; t is that of
:func:`~sepc_torch.head.promises.units.unit_flag_threshold`, whose proof applies with s(x, y) in place of the score.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data.warn import warn_user
from sepc_torch.head.calibration.calibration_tables import RESOLUTION
from sepc_torch.head.calibration.label_calibration import LabelCalibration, Steps, log_odds, separated
from sepc_torch.head.promises.conformal import check_share, flag_threshold
from sepc_torch.head.promises.units import unit_flag_threshold
from sepc_torch.shapes import Bool, Float, Int


class PredictionSets(NamedTuple):
    """The classes that each point of a batch may have.

    An empty set says that the point is like none of the known ones; a set of one class can be accepted. ``repr`` counts
    both.

    Attributes:
        sets: Whether each class is in the set of each point.
        coverage: The promised share of points, drawn like the calibration points, whose true class is in their set.
        per_class: Whether the coverage holds among the points of each true class.
        classes: The labels, in the order of the columns.

    >>> found = PredictionSets(torch.tensor([[True, False], [True, True], [False, False]]), 0.9, False, ("cat", "dog"))
    >>> found
    PredictionSets(3 points, coverage 0.9: 1 empty, 1 of one class, 1.00 classes on average)
    >>> found.size.tolist(), found.names
    ([1, 2, 0], [('cat',), ('cat', 'dog'), ()])
    """

    sets: Bool[Tensor, "B C"]
    coverage: float
    per_class: bool
    classes: tuple[Any, ...]

    @property
    def size(self) -> Int[Tensor, "B"]:
        """The number of classes in each set."""
        return self.sets.sum(dim=1)

    @property
    def names(self) -> list[tuple[Any, ...]]:
        """The labels in each set."""
        rows: list[tuple[Any, ...]] = [()] * len(self.sets)
        for row, column in self.sets.nonzero().tolist():
            rows[row] = (*rows[row], self.classes[column])
        return rows

    def __repr__(self) -> str:
        size, where = self.size, "in each class" if self.per_class else ""
        mean = float(size.double().mean()) if len(size) else math.nan
        counts = f"{int((size == 0).sum())} empty, {int((size == 1).sum())} of one class, {mean:.2f} classes on average"
        return f"PredictionSets({len(size)} points, coverage {self.coverage:g}{' ' * bool(where)}{where}: {counts})"


def set_thresholds(labels: LabelCalibration, coverage: float, per_class: bool = False) -> Float[Tensor, "*C"]:
    """Least scores of the classes in a set: one for all classes, or one for each; see this module for the proof.

    Args:
        labels: The calibration of the labels.
        coverage: The wanted coverage q.
        per_class: Whether to keep the coverage among the points of each true class.
    """
    missed = 1.0 - check_share(coverage, "coverage")
    needed = math.ceil((1.0 / missed) * (1.0 - 1e-12)) - 1  # the factor corrects rounding
    truth, device = log_odds(labels.ranked_truth).cpu(), labels.ranked_truth.device
    if not per_class:
        steps = separated(truth)
        if labels.in_units:
            found = unit_flag_threshold(steps.scores.numpy(), labels.unit_rows()[0].unit, missed)
        else:
            found = flag_threshold(steps.scores, missed)
        if found == -math.inf:
            warn_user(
                f"Every set holds every class: {labels.ranked_count} ranked calibration {labels.ranked_name} are too "
                f"few for a coverage of {coverage:g}, which needs {needed}. Calibrate with more, or ask for less.",
            )
        return torch.tensor(_just_below(steps, found), dtype=torch.float64, device=device)
    if labels.in_units:
        raise ValueError(
            "The coverage of each class is promised for independent points, and the calibration points came in units. "
            "Leave out per_class, or calibrate with one point of each unit and without units=."
        )
    of_class = labels.point_class[labels.ranked_rows].cpu()
    least = np.full(len(labels.class_counts), -math.inf)
    for c in of_class.unique().tolist():
        steps = separated(truth[of_class == c])
        least[c] = _just_below(steps, flag_threshold(steps.scores, missed))
    everywhere = int(np.isneginf(least).sum())
    if everywhere:
        warn_user(
            f"{everywhere} of {len(least)} classes are in every set: they have fewer than the {needed} ranked "
            f"calibration points that a coverage of {coverage:g} in each class needs. Calibrate with more, or leave "
            "out per_class.",
        )
    return torch.from_numpy(least).to(device)


def _just_below(steps: Steps, score: float) -> float:
    """Threshold just below a group of log odds, as a probability.

    The step is half of the resolution: far above rounding errors, and so small that the coverage hardly grows.
    """
    near = torch.tensor(score - RESOLUTION / 2 * (1.0 + abs(score)), dtype=torch.float64).sigmoid()
    return score if score == -math.inf else max(steps.threshold(score), float(near))
