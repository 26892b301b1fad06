"""The numbers of a report: plain records that a page shows and a JSON file holds."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from sepc_torch.metrics.class_table import ClassRow

# What a report says about the promise of a head.
State = Literal["kept", "open", "broken", "does not apply", "not checked", "no promise"]


class PromiseState(NamedTuple):
    """Whether the promise of the head holds on the rows.

    Attributes:
        state: ``"kept"``: the promised number is not exceeded. ``"open"``: it is exceeded, and chance explains that.
            ``"broken"``: chance does not. ``"does not apply"``: the rows are not drawn like the calibration points, or
            the head has changed since. ``"not checked"``: no labels were given or accepted. ``"no promise"``: there is
            none.
        sentence: The state in words.
        next_step: What to do now.
    """

    state: State
    sentence: str
    next_step: str


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


class Confusion(NamedTuple):
    """Accepted labels by true class, with a column for refused rows.

    Attributes:
        codes: Class indices of the columns, and of the rows; a last row -1 holds rows of unknown classes, if any.
        counts: For each row, the numbers of accepted labels of each column, of accepted labels of classes that have no
            column, and of refused rows.
        left_out: Number of classes without a row and a column.
    """

    codes: list[int]
    counts: list[list[int]]
    left_out: int


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


class ColumnShift(NamedTuple):
    """How far the values of a column moved from the training rows to the rows of the report.

    Attributes:
        name: The column, or what is counted: "age is missing".
        category: The category whose share changed most; None for a column of numbers.
        training, here: The means of a column of numbers, the shares of ``category`` otherwise.
        training_deviation, here_deviation: The standard deviations of a column of numbers; None otherwise.
        shift: Least share of the rows whose value would have to change to make the distributions equal.
        p_value: Probability of at least this shift by chance, if the rows are drawn like the training rows.
        differs: Whether chance explains the shift with less than 1 % for all columns together.
    """

    name: str
    category: str | None
    training: float
    here: float
    training_deviation: float | None
    here_deviation: float | None
    shift: float
    p_value: float
    differs: bool


class ColumnDrift(NamedTuple):
    """The columns that moved most, the numbers of rows compared, and of columns that differ and that are left out."""

    columns: list[ColumnShift]
    training_rows: int
    rows: int
    differ: int
    left_out: int


class Value(NamedTuple):
    """A value of a row: its column, its text, and what is usual among training rows of the label, or an empty text."""

    name: str
    text: str
    usual: str


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
        joint, confidence, p_value, nonconformity, trust: Fields of the prediction; ``trust`` is the network label's.
        softmax: Largest softmax; None without logits.
        why: The decision in words.
        values: Values of columns, those first that differ most from training rows of the label.
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
    nonconformity: float
    trust: float
    softmax: float | None
    why: str
    values: list[Value]
    nearest: list[Nearest]


class MovedGroup(NamedTuple):
    """Rows near each other that moved.

    Attributes:
        region: Number of the nearest ellipsoid.
        code: Index of its class.
        size: Number of rows.
        ids: Names of the first rows, the most central one first.
        rows: Their row numbers, if they are rows of this report.
        nearest: Identifiers of the nearest training examples of the most central row.
        columns: The columns of a table that moved most, in words.
    """

    region: int
    code: int
    size: int
    ids: list[str]
    rows: list[int]
    nearest: list[str]
    columns: list[str]


class MovedSection(NamedTuple):
    """Rows around an alarm: how many the monitor kept, how many of them moved, columns in words, and groups."""

    kept: int
    moved: int
    columns: list[str]
    groups: list[MovedGroup]


class Record(NamedTuple):
    """All numbers of a report, in the order of the page.

    ``intervals`` holds exact 95 % intervals of the shares of ``totals``, by name.
    """

    title: str
    model: str | None
    data: str | None
    date: str
    earlier: list[tuple[str, str]]
    promise: PromiseState
    verdict: list[str]
    promised_risk: float | None
    totals: Totals
    intervals: dict[str, tuple[float, float]]
    risk: RiskSection | None
    reliability: list[Diagram]
    class_names: list[str]
    classes: list[ClassRow]
    classes_left_out: int
    confusion: Confusion | None
    columns: ColumnDrift | None
    map: MapSection
    regions: list[Region]
    samples: list[Sample]
    ids: dict[int, str]
    made: list[tuple[str, str]]
    drift: dict[str, Any] | None
    moved: MovedSection | None
