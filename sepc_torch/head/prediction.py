"""The record that a trust head returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sepc_torch.model.prediction import Prediction
from sepc_torch.shapes import Bool, Float, Int


class HeadPrediction(NamedTuple):
    """What the head says of a batch; every field is a tensor (B,).

    The first seven are those of :class:`~sepc_torch.Prediction`, for the head's own label. The others judge the
    network's label in the same place; without logits or labels they judge the head's own.

    Before :meth:`TrustHead.calibrate` the confidence only ranks, p-values, strangeness and joint are NaN, and nothing
    is accepted.

    An embedding that is flagged has the labels -1, and is as strange as can be. Logits with NaN in them, where those
    are flagged, name no label: ``network_label`` is -1, ``network_trust``, ``confidence`` and ``joint`` are 0,
    ``network_margin`` and ``class_p_value`` are NaN, and the row is not accepted; what is said of the point itself, and
    of the head's own label, stands.

    Attributes:
        label, trust, rule, distance, margin, nearest, runner_up: As in ``Prediction``.
        network_label: The label the network gave; -1 in flagged rows.
        network_trust: Trust in that label.
        network_margin: Distance to the nearest ellipsoid of another class over that to the nearest of the network's.
        confidence: The probability that the label is right, if the point is of a known kind.
        p_value: How often an ordinary point is as strange as this one: at most u with probability at most u.
        class_p_value: The same among the points of the label's class.
        strangeness: What the p-values rank, larger is stranger; no ties far from the training points.
        joint: The probability that the label is right *and* the point of a known kind; fitted to half of the points.
        accept: Whether the joint score reaches the threshold of :meth:`TrustHead.accept_at`.
    """

    label: Int[Tensor, "B"]
    trust: Float[Tensor, "B"]
    rule: Int[Tensor, "B"]
    distance: Float[Tensor, "B"]
    margin: Float[Tensor, "B"]
    nearest: Int[Tensor, "B"]
    runner_up: Int[Tensor, "B"]
    network_label: Int[Tensor, "B"]
    network_trust: Float[Tensor, "B"]
    network_margin: Float[Tensor, "B"]
    confidence: Float[Tensor, "B"]
    p_value: Float[Tensor, "B"]
    class_p_value: Float[Tensor, "B"]
    strangeness: Float[Tensor, "B"]
    joint: Float[Tensor, "B"]
    accept: Bool[Tensor, "B"]

    def abstain(self, threshold: float = 0.5, outside: bool = True) -> Tensor:
        """Which of the network's labels to refuse: low trust in them, or a point outside every ellipsoid."""
        own = Prediction(*self[:7])._replace(label=self.network_label, trust=self.network_trust)
        return own.abstain(threshold, outside)
