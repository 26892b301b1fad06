"""What the frozen classifier says of a batch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sepc_torch.rules import Rule
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
