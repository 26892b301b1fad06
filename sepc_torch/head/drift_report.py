"""Report of a drift monitor: the changes of a stream, and the accuracy to expect among its accepted points."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from sepc_torch.shapes import Array, Float


class Move(NamedTuple):
    """One change of the stream.

    Attributes:
        change: ``"gained"`` or ``"lost"`` traffic, or p-values that ``"fell"`` or ``"rose"``.
        classes: Labels of the classes whose regions changed; empty for p-values.
        regions: Numbers of these regions (ellipsoids).
        expected: Share of the traffic among the calibration points; for p-values, of those up to (from) 0.1 (0.9).
        share: This share in the stream since the change.
        since: Position in the stream at which the change seems to have begun.
        evidence: Logarithm of the likelihood ratio since then.
    """

    change: str
    classes: tuple[Any, ...]
    regions: tuple[int, ...]
    expected: float
    share: float
    since: int
    evidence: float


class AccuracyEstimate(NamedTuple):
    """Expected accuracy of accepted points with an interval, if the risk within each cell of regions is unchanged."""

    estimate: float
    low: float
    high: float


class DriftReport(NamedTuple):
    """State of a drift monitor.

    Attributes:
        seen: Number of points seen.
        p_value: Anytime-valid p-value: without drift it *ever* falls to u with probability at most u.
        alarm: Whether ``p_value`` has ever been at most alpha.
        alarm_at: Position of the point that raised the alarm, in its worker's stream; None without an alarm.
        since: Position at which the strongest change seems to have begun; None if no change is listed.
        moves: Changes, strongest first.
        accepted: Share of the points that the head accepted.
        accuracy: Expected accuracy of the accepted points; see :meth:`DriftMonitor.accuracy`.
    """

    seen: int
    p_value: float
    alarm: bool
    alarm_at: int | None
    since: int | None
    moves: tuple[Move, ...]
    accepted: float
    accuracy: AccuracyEstimate

    @property
    def sentence(self) -> str:
        """The state in one sentence."""
        if self.alarm:
            return f"The stream has drifted (p = {self.p_value:.2g} after {self.seen} points)."
        return f"No drift is shown (p = {self.p_value:.2g} after {self.seen} points)."

    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain Python values."""
        moves = [
            {**move._asdict(), "classes": list(move.classes), "regions": list(move.regions)} for move in self.moves
        ]
        return {**self._asdict(), "moves": moves, "accuracy": self.accuracy._asdict()}

    def __str__(self) -> str:
        state = "drift" if self.alarm else "no drift shown"
        accuracy = "{:.1%} ({:.1%} to {:.1%})".format(*self.accuracy)
        lines = [f"{state} after {self.seen} points, p = {self.p_value:.2g}; accepted {self.accepted:.1%}"]
        lines.append(f"accuracy of the accepted points, if regions keep their risk: {accuracy}")
        for move in self.moves:
            shares = f"from {move.expected:.1%} to {move.share:.1%} since point {move.since}"
            if move.regions:
                where = f"class {', '.join(map(str, move.classes))}, regions {', '.join(map(str, move.regions))}"
                lines.append(f"{where} {move.change} traffic: {shares}")
            else:
                which = "small p-values (up to 0.1)" if move.change == "fell" else "large p-values (from 0.9)"
                lines.append(f"{which} became more frequent: {shares}")
        return "\n".join(lines)


def expected_accuracy(
    traffic: Array, accepted: Float[Array, "C"], wrong: Float[Array, "C"], level: float
) -> AccuracyEstimate:
    r"""Expected accuracy of the accepted points of a stream from their cells, without labels, with an interval.

    Assumption: within each cell of regions the share of wrong labels among accepted points is that of the calibration
    distribution. The estimate weights the errors :math:`\hat r_c` of the calibration points in cell c with the share
    :math:`w_c` of the stream's accepted points, :math:`\hat r = \sum_c w_c \hat r_c`. The interval holds with
    probability 1 - ``level`` over the calibration points, by a Chernoff bound:
    :math:`\hat r \log \frac{\hat r}{r} - \hat r + r \le \frac{1}{m} \log \frac{2}{\mathrm{level}}`,
    :math:`m = \min_c n_c / w_c`. Traffic in cells without accepted calibration points may be right or wrong.

    Args:
        traffic: Number of accepted points of the stream in each cell.
        accepted: Number of accepted calibration points in each cell.
        wrong: Number of those whose label is wrong.
        level: Probability that the interval misses.

    >>> import numpy as np
    >>> found = expected_accuracy(np.array([10, 30]), np.array([100.0, 200.0]), np.array([10.0, 2.0]), level=0.05)
    >>> [round(value, 3) for value in found]
    [0.968, 0.928, 0.989]
    """
    if traffic.sum() == 0:
        return AccuracyEstimate(math.nan, 0.0, 1.0)
    weight, known = traffic / traffic.sum(), accepted > 0
    blind = float(weight[~known].sum())
    used = known & (weight > 0)
    if not used.any():
        return AccuracyEstimate(math.nan, 0.0, 1.0)
    n, w = accepted[used], weight[used]
    risk = float((w * wrong[used] / n).sum())
    low, high = poisson_interval(risk, math.log(2.0 / level) / float((n / w).min()))
    estimate = 1.0 - risk / float(w.sum())
    return AccuracyEstimate(estimate, max(0.0, 1.0 - high - blind), min(1.0, 1.0 - low))


def poisson_interval(risk: float, bound: float) -> tuple[float, float]:
    """Least and largest r with risk * log(risk / r) - risk + r <= bound."""
    ends = []
    for inside, outside in ((risk, 0.0), (risk, risk + 2 * bound + math.sqrt(2 * bound * risk))):
        for _ in range(60):
            r = (inside + outside) / 2
            near = r == 0.0 or (risk * math.log(risk / r) if risk > 0 else 0.0) - risk + r <= bound
            inside, outside = (r, outside) if near else (inside, r)
        ends.append(outside)
    return ends[0], ends[1]
