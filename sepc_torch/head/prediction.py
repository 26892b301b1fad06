"""The records of a trust head: its predictions, with its assessment of the network's labels, and its promise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from sepc_torch.model.prediction import Prediction
from sepc_torch.shapes import Bool, Float, Int

_SHIFTS = {
    "covariate": "; this is about rows like the target rows, if labels in a region are as right as before",
    "label": "; this is about rows like the target rows, if labels of a true class are as right as before",
}
_GROUPS = {"predicted": "predicted class", "class": "true class", "environment": "group"}


class Promise(NamedTuple):
    """The request that set the threshold: a risk with its probability to fail, a share that may be refused, or costs.

    Attributes:
        risk: The allowed share of wrong labels among the accepted ones, or None.
        delta: The allowed probability that ``risk`` or ``bound`` is exceeded.
        flag_rate: The allowed share of refused points of the calibration distribution, or None.
        by: The groups in each of which the risk holds: ``"predicted"``, ``"region"``, ``"class"``, ``"group"``, or
            ``"environment"`` for groups that are not known of new points; None for all points together.
        found: Whether a threshold keeps the promise; if not, the head accepts nothing (in no group, with ``by``).
        joint: With ``by``, whether ``delta`` is the probability that any group fails, or each single group.
        exact: Whether the promise is proved. After a calibration with out-of-fold rows it is an estimate.
        chosen: Whether :meth:`TrustHead.accept_at` asked for it; if not, it is the default of a calibration.
        units: Whether the promise is over units of rows, such as pictures, which count alike; if not, over rows.
        average: Whether the risk is promised on average over calibration sets, without ``delta``.
        costs: The costs of accepted labels: that of any mistake, or a row of costs for each true class; or None.
        review: The cost of a refused row, or None.
        bound: The upper bound of the expected cost of a row, for the labels that the head was calibrated for; or None.
        shift: For a promise about shifted rows, its assumption: ``"covariate"`` or ``"label"``; None otherwise.
        groups: With ``by``, the number of groups if classes or regions were merged; the risk then holds in each of
            these groups. None if every class or region is a group of its own.
    """

    risk: float | None
    delta: float
    flag_rate: float | None
    by: str | None = None
    found: bool = True
    joint: bool = True
    exact: bool = True
    chosen: bool = True
    units: bool = False
    average: bool = False
    costs: float | tuple[tuple[float, ...], ...] | None = None
    review: float | None = None
    bound: float | None = None
    shift: str | None = None
    groups: int | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> Promise | None:
        """Restore a promise from a file; None for a head without a calibration."""
        if options is None:
            return None
        numbers = ("risk", "flag_rate", "review", "bound")
        risk, flag_rate, review, bound = (None if options[name] is None else float(options[name]) for name in numbers)
        by, costs = options["by"], options["costs"]
        flags: dict[str, Any] = {
            name: bool(options[name]) for name in ("found", "joint", "exact", "chosen", "units", "average")
        }
        if costs is not None:
            costs = tuple(tuple(map(float, row)) for row in costs) if isinstance(costs, (list, tuple)) else float(costs)
        kind, shift = (None if name is None else str(name) for name in (by, options["shift"]))
        groups = None if options["groups"] is None else int(options["groups"])
        flags |= {"costs": costs, "review": review, "bound": bound, "shift": shift, "groups": groups}
        return cls(risk, float(options["delta"]), flag_rate, kind, **flags)

    def __str__(self) -> str:
        """The promise as the end of a sentence.

        >>> str(Promise(0.01, 0.05, None))
        'at most 1 % of the accepted labels are wrong, with probability 95 % over calibration sets'
        """
        about_target = "" if self.shift is None else _SHIFTS[self.shift]
        return f"{self._text()}{about_target if self.found else ''}"

    def _text(self) -> str:
        """The promise without its assumption about shifted rows."""
        over = " over units" if self.units else ""
        rate = (self.flag_rate or 0.0) * 100
        if not self.found:
            wanted = f"flag rate of {rate:.3g} %" if self.risk is None else f"risk of {self.risk * 100:.3g} %"
            wanted = wanted if self.costs is None else "bound of the cost"
            shifted = "" if self.shift is None else " for rows like the target rows"
            return f"nothing is accepted: no threshold keeps a {wanted}{over}{shifted}"
        about = "" if self.exact else " (an estimate: out-of-fold rows calibrated the head)"
        drawn = "calibration sets" if self.shift is None else "calibration sets and target rows"
        sure = f"with probability {(1 - self.delta) * 100:.3g} % over {drawn}{about}"
        if self.bound is not None:
            return f"the expected cost of a row{over} is at most {self.bound:.3g}, {sure}"
        if self.risk is not None:
            if self.average:
                return f"on average at most {self.risk * 100:.3g} % of the accepted labels are wrong{about}"
            where = "" if self.by is None else f" of each {_GROUPS.get(self.by, self.by)}"
            if self.groups is not None:
                several = {"predicted": "predicted classes", "class": "true classes"}.get(self.by or "", "regions")
                many = f" in each of {self.groups} groups of {several}"
                where = many if self.groups > 1 else f", all {several} together,"
            return f"at most {self.risk * 100:.3g} % of the accepted labels{where} are wrong{over}, {sure}"
        drawn = "of the calibration distribution" if self.shift is None else "like the target rows"
        return f"on average{over} at most {rate:.3g} % of the points {drawn} are refused{about}"


class HeadPrediction(NamedTuple):
    """Predictions of a :class:`~sepc_torch.TrustHead` for a batch; every field is a tensor of shape (B,).

    The first seven fields are those of :class:`~sepc_torch.Prediction`, for the head's own label. The other fields
    assess the network's label. Without logits and labels they assess the head's own label.

    Before :meth:`TrustHead.calibrate` the confidence is only a ranking score, the p-values, ``nonconformity`` and
    ``joint`` are NaN, and nothing is accepted.

    A flagged embedding has the label -1 in both label fields and the largest nonconformity score. A row of logits is
    flagged if it holds NaN or if its largest value is not unique, as in a row of zeros; the latter under
    ``nan_policy="raise"`` too. It has no network label: ``network_label`` is -1; ``network_trust``, ``confidence`` and
    ``joint`` are 0; ``network_margin`` and ``class_p_value`` are NaN; the nonconformity score is the largest; the row
    is not accepted. The fields of the head's own label keep their values in these rows.

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
        class_p_value: Conformal p-value among the calibration points of the label's class. It is valid if the label is
            the true class: among points of a class, it is at most u with probability at most u. Over points with
            predicted labels it can be small more often.
        nonconformity: Nonconformity score that the p-values rank; larger is less typical. Distant points have no ties.
            With logits it also uses their energy, so it differs from the score without logits.
        joint: Probability that the label is right *and* the point is of a known kind; at most ``confidence``. The
            calibration points that are not ranked fit this score.
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
    nonconformity: Float[Tensor, "B"]
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
