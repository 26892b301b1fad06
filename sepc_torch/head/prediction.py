"""The record that a trust head returns: its own prediction, and its assessment of the network's labels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sepc_torch.model.prediction import Prediction
from sepc_torch.shapes import Bool, Float, Int


class HeadPrediction(NamedTuple):
    """Predictions of a :class:`~sepc_torch.TrustHead` for a batch; every field is a tensor of shape (B,).

    The first seven fields are those of :class:`~sepc_torch.Prediction`, for the head's own label. The other fields
    assess the network's label. Without logits and labels they assess the head's own label.

    Before :meth:`TrustHead.calibrate` the confidence is only a ranking score, the p-values, ``strangeness`` and
    ``joint`` are NaN, and nothing is accepted.

    A flagged embedding has the label -1 in both label fields and the largest nonconformity score. A flagged row of
    logits (NaN, or no single largest value) has no network label: ``network_label`` is -1; ``network_trust``,
    ``confidence`` and ``joint`` are 0; ``network_margin`` and ``class_p_value`` are NaN; the nonconformity score is the
    largest; the row is not accepted. The fields of the head's own label keep their values in these rows.

    ``repr`` counts the rows and names the fields; print a field to see its values.

    >>> from sepc_torch import TrustHead
    >>> head = TrustHead.fit([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 2.0]], [0, 0, 1, 1], dim=1)
    >>> out = head.judge([[3.0, 0.0], [0.0, 3.0]])
    >>> out
    HeadPrediction(2 rows, 0 accepted, fields: label, trust, ...)
    >>> out.rule_names
    ['SINGLE', 'SINGLE']

    Attributes:
        label, trust, rule, distance, margin, nearest, runner_up: As in ``Prediction``.
        network_label: The label that the network predicted; -1 in flagged rows.
        network_trust: Trust in the network's label.
        network_margin: Distance to the nearest ellipsoid of another class, divided by the distance to the nearest
            ellipsoid of the network's label.
        confidence: Probability that the label is right, provided that the point is of a known kind.
        p_value: Conformal p-value of the point. For a point of the calibration distribution it is at most u with
            probability at most u.
        class_p_value: Conformal p-value among the calibration points of the label's class.
        strangeness: Nonconformity score that the p-values rank; larger is less typical. Distant points have no ties.
            With logits it also uses their energy, so it differs from the score without logits.
        joint: Probability that the label is right *and* the point is of a known kind. The calibration points that
            are not ranked fit this score.
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

    @property
    def rule_names(self) -> list[str | None]:
        """Names of the rules, such as ``"SINGLE"``; None in flagged rows. The class :class:`Rule` describes them."""
        return Prediction(*self[:7]).rule_names

    def __repr__(self) -> str:
        # A tensor without values, as in a trace, is of a subclass.
        accepted = f"{int(self.accept.sum())} accepted, " if type(self.accept) is Tensor else ""
        return f"HeadPrediction({self.accept.shape[0]} rows, {accepted}fields: {', '.join(self._fields)})"

    def abstain(self, threshold: float = 0.5, outside: bool = True) -> Tensor:
        """Return which of the network's labels to refuse: low trust, or a point outside every ellipsoid.

        Args:
            threshold: Refuse labels with a trust below this value.
            outside: Whether to refuse all points outside every ellipsoid.
        """
        own = Prediction(*self[:7])._replace(label=self.network_label, trust=self.network_trust)
        return own.abstain(threshold, outside)
