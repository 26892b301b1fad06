"""The numbers of a report: plain records that a page shows and a JSON file holds."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from sepc_torch.metrics.class_table import ClassRow

# Digits of a number in JSON: more than any page shows, and half the length of a float64.
_DIGITS = 6


class Totals(NamedTuple):
    """Numbers of all rows; the last five are None without true labels.

    Attributes:
        rows: Number of rows N.
        accepted: Number of accepted labels.
        reasons: Number of rows by the reason of their refusal.
        unknown: Number of rows of no known class.
        wrong: Number of wrong labels; a label of a row of no known class is wrong.
        wrong_accepted: Number of labels that are accepted and wrong.
        softmax_wrong: Number of wrong labels among as many rows as the head accepts, those with the largest softmax;
            None without logits.
        known_accepted: Number of accepted labels of rows of known classes; the wrong ones among them are
            ``wrong_accepted`` less the accepted rows of no known class.
    """

    rows: int
    accepted: int
    reasons: dict[str, int]
    unknown: int | None
    wrong: int | None
    wrong_accepted: int | None
    softmax_wrong: float | None
    known_accepted: int | None

    @property
    def coverage(self) -> float:
        """Share of rows whose label is accepted."""
        return self.accepted / max(self.rows, 1)

    @property
    def error(self) -> float | None:
        """Share of wrong labels."""
        return None if self.wrong is None else self.wrong / max(self.rows, 1)

    @property
    def known_accepted_error(self) -> float | None:
        """Share of wrong labels among the accepted ones of rows of known classes."""
        if self.wrong_accepted is None or not self.known_accepted:
            return None
        return (self.wrong_accepted - (self.accepted - self.known_accepted)) / self.known_accepted

    @property
    def accepted_error(self) -> float | None:
        """Share of wrong labels among the accepted ones."""
        return None if self.wrong_accepted is None or not self.accepted else self.wrong_accepted / self.accepted


class Curve(NamedTuple):
    """Selective risk over coverage of one score, with the area under the curve (AURC)."""

    name: str
    coverage: list[float]
    risk: list[float]
    aurc: float


class RiskSection(NamedTuple):
    """Curves of the joint score and of softmax, on the rows (``source`` "rows") or on calibration points."""

    source: str
    curves: list[Curve]


class Diagram(NamedTuple):
    """Reliability diagram of one probability with its expected calibration error (ECE)."""

    name: str
    ece: float
    confidence: list[float]
    right: list[float]
    low: list[float]
    high: list[float]
    size: list[int]


class MapSection(NamedTuple):
    """Sampled rows on the plane of the head, and the ellipses that the ellipsoids project to.

    Attributes:
        row, x, y: Row number and coordinates of each point.
        code: Class index of its label; -1 without a label.
        reason: Index of the reason in :class:`~sepc_torch.head.reasons.Reason`.
        rank: Share of the rows that are less strange.
        ellipses: (region, class index, x, y, S00, S01, S11) of each ellipse; see :mod:`sepc_torch.model.plane`.
        regions: Number of ellipsoids of the head; only the largest are drawn.
    """

    row: list[int]
    x: list[float]
    y: list[float]
    code: list[int]
    reason: list[int]
    rank: list[float]
    ellipses: list[tuple[int, int, float, float, float, float, float]]
    regions: int


class Region(NamedTuple):
    """An ellipsoid that deserves a look, with the rows that are nearest to it.

    Attributes:
        region: Number of the ellipsoid.
        code: Index of its class.
        why: Reasons to look at the region.
        training: Training points inside the ellipsoid.
        purity: Share of them of the ellipsoid's class.
        rows: Rows to which no ellipsoid is nearer.
        refused: Refused labels among them.
        outside: Rows among them that lie outside the ellipsoid.
        wrong: Wrong labels among them; None without true labels.
        wrong_accepted: Labels that are accepted and wrong; None without true labels.
        examples: Row numbers of the nearest rows, refused ones first.
    """

    region: int
    code: int
    why: list[str]
    training: int
    purity: float
    rows: int
    refused: int
    outside: int
    wrong: int | None
    wrong_accepted: int | None
    examples: list[int]


class Nearest(NamedTuple):
    """Identifiers of the nearest training examples of a class, the nearest first."""

    label: str
    ids: list[str]


class Sample(NamedTuple):
    """A row worth a look.

    Attributes:
        row: Row number.
        kind: The reason of the refusal in words, or "accepted but wrong".
        label: Class index of the assessed label; -1 without a label.
        own: Class index of the head's own label; -1 without a label.
        truth: The true class in words; None if no true label is known.
        joint, confidence, p_value, strangeness, trust: Fields of the prediction; ``trust`` is the network label's.
        softmax: Largest softmax; None without logits.
        why: The decision in words.
        nearest: The nearest training examples of the label and of its alternative; empty if the head keeps none.
    """

    row: int
    kind: str
    label: int
    own: int
    truth: str | None
    joint: float
    confidence: float
    p_value: float
    strangeness: float
    trust: float
    softmax: float | None
    why: str
    nearest: list[Nearest]


class Record(NamedTuple):
    """All numbers of a report, in the order of the page."""

    title: str
    earlier: list[tuple[str, str]]
    written: str
    verdict: list[str]
    promised_risk: float | None
    totals: Totals
    risk: RiskSection | None
    reliability: list[Diagram]
    class_names: list[str]
    classes: list[ClassRow]
    classes_left_out: int
    map: MapSection
    regions: list[Region]
    samples: list[Sample]
    ids: dict[int, str]
    made: list[tuple[str, str]]
    drift: dict[str, Any] | None


def to_json(value: Any) -> Any:
    """A record as dictionaries, lists and numbers that JSON can hold: NaN and infinity become None.

    >>> to_json(Curve("ours", [0.5], [float("nan")], 1 / 3))
    {'name': 'ours', 'coverage': [0.5], 'risk': [None], 'aurc': 0.333333}
    """
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: to_json(item) for name, item in value._asdict().items()}
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value
