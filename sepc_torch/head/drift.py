r"""Drift over time: an alarm that is valid at every moment, where the stream changed, and the accuracy to expect.

:class:`DriftMonitor` compares a stream with the ranked calibration points of a head by conformal p-values
of two kinds: of the nonconformity score, and of the occupancy of cells of regions (nearest ellipsoids). The p-values of
:func:`sequential_p_values` are independent and uniform while calibration points and stream are exchangeable. A bet is a
density f on [0, 1]; its capital is multiplied by f(p). :func:`bet` runs a mixture of bets and of their starting times,
so that a late change costs no more than the logarithm of the time that has passed.

Claim: if ranked points and stream are exchangeable, :math:`P(\text{ever an alarm}) \le \alpha`. Proof. (1) Bins, cells
and bets depend only on calibration points that are not ranked. Given these, the p-values of each sequence are
independent and uniform. (2) A bet is a density on [0, 1], so the capital of a sequence is a martingale that starts at
one. (3) By Ville's inequality it ever reaches L with probability at most 1 / L. (4) L is :math:`2 / \alpha` for the
scores and :math:`2 C / \alpha` for each of C cells of regions; the probabilities sum to :math:`\alpha`, whatever the
dependence of the sequences. (5) For W merged workers L is W times as large; that they share the ranked points does not
matter.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data import files
from sepc_torch.data.options import check_count
from sepc_torch.data.text import printable
from sepc_torch.head.calibration.label_calibration import LabelCalibration
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.promises.conformal import check_share
from sepc_torch.head.reading.sources import row_ids
from sepc_torch.head.row_groups import ColumnMove, RowGroup, column_moves, group_rows
from sepc_torch.head.trust_head import TrustHead, checked_head
from sepc_torch.shapes import Array, Float, Int

# Exponents of the bets p ** (k - 1) on small p-values and, mirrored, on large ones.
_EXPONENTS = (0.1, 0.3, 0.6)
POWERS = 2 * len(_EXPONENTS)
# Bets on the traffic of a cell: sixfold, twofold and a third of the expected share, written as factors less one.
GAINS = (5.0, 1.0, -0.67)
# Seeds of monitors with a later reference are this far apart.
_NEXT_SEED = 2**32
# Rows that are processed at once; the bets on them need some megabytes.
_CHUNK = 2048
# Quantiles of the scores that separate bins: even ones, and finer towards strange points.
_QUANTILES = np.unique(np.concatenate([np.linspace(0.0, 1.0, 33), 1.0 - 0.5 ** np.arange(5, 11)]))
# Regions form cells that are expected to hold at least this many calibration points, and at least this share of them.
_CELL_POINTS, _CELL_SHARE = 10, 1 / 40
# A change is listed if its evidence since it began exceeds this logarithm: about one in a thousand.
_LISTED = 7.0
# p-values up to this one are counted to describe bets on scores.
_SMALL = 0.1
# What a monitor compares its stream with.
_REFERENCE = ("score_edges", "shares", "score_start", "cell_start", "accepted_start", "wrong_start")
# Rows around the alarm that a monitor keeps, those of them that come after it, and bytes of an identifier.
_KEPT, _AFTER, _ID_BYTES = 128, 64, 48
# Kinds of a kept identifier: an empty place, the position in the stream, an integer, a text.
_EMPTY, _POSITION, _INTEGER, _TEXT = range(4)
# Stands for an infinite score, which a file of the state cannot hold.
_LARGEST = np.finfo(np.float64).max
# Classes and regions of a change that its line of text names: more of them hide the shares.
_NAMED = 6
# Groups of moved rows that a text describes.
_GROUPS = 4


def sequential_p_values(
    category: Int[Array, "T"], counts: Int[Array, "B"], uniform: Float[Array, "T"]
) -> tuple[Float[Array, "T"], Int[Array, "B"]]:
    r"""Conformal p-values of ordered categories against all earlier points, ties broken at random.

    :math:`p_t = \frac{\#\{i < t : c_i > c_t\} + u_t (1 + \#\{i < t : c_i = c_t\})}{N_t + 1}` for the :math:`N_t`
    points before t. If the points are exchangeable, the :math:`p_t` are independent and uniform: given the *set* of the
    first t points, the last one is any of them with equal probability, whatever the order of the others.

    Args:
        category: Categories of the points of a stream, in their order; a larger one is stranger.
        counts: Number of points of each category before the stream.
        uniform: Random numbers :math:`u_t` between 0 and 1.

    Returns:
        The p-values, and the counts with the stream's points added.

    >>> sequential_p_values(np.array([1, 0]), np.array([3, 0]), np.array([0.5, 0.5]))
    (array([0.125, 0.6  ]), array([4, 1]))
    """
    # past[t, b]: points of category b before t
    taken = category[:, None] == np.arange(len(counts))
    past = counts + taken.cumsum(axis=0) - taken
    stranger = np.where(np.arange(len(counts)) > category[:, None], past, 0).sum(axis=1)
    same = past[np.arange(len(category)), category]
    return (stranger + uniform * (1 + same)) / (past.sum(axis=1) + 1), counts + taken.sum(axis=0)


def uniforms(seed: int, start: int, count: int) -> Float[Array, "T"]:
    """Random numbers between 0 and 1 of positions ``start``, ``start + 1``, ...; the same in any batches (SplitMix64).

    >>> bool((uniforms(0, 0, 6)[2:] == uniforms(0, 2, 4)).all())
    True
    """
    with np.errstate(over="ignore"):
        x = np.uint64(seed) * np.uint64(0xD1342543DE82EF95) + np.arange(start, start + count, dtype=np.uint64)
        x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return ((x >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53


def log_power_bets(p: Float[Array, "T"]) -> Float[Array, "T J"]:
    r"""Logarithms of the densities :math:`k p^{k - 1}` (first half) and :math:`k (1 - p)^{k - 1}` (second half).

    >>> log_power_bets(np.array([0.5])).round(2)
    array([[-1.68, -0.72, -0.23, -1.68, -0.72, -0.23]])
    """
    k = np.array(_EXPONENTS)
    return np.concatenate([np.log(k) + (k - 1.0) * np.log(side)[:, None] for side in (p, 1.0 - p)], axis=1)


def occupancy_p_values(
    cell: Int[Array, "T"], counts: Int[Array, "C"], uniform: Float[Array, "T"]
) -> tuple[Float[Array, "T C"], Int[Array, "C"]]:
    """A sequence of :func:`sequential_p_values` for each cell: points inside the cell are stranger than the others.

    p-values below the share of the cell therefore stand for points inside it.

    >>> occupancy_p_values(np.array([0]), np.array([3, 1]), np.array([0.5]))
    (array([[0.4, 0.6]]), array([4, 1]))
    """
    inside = cell[:, None] == np.arange(len(counts))
    past = counts + inside.cumsum(axis=0) - inside
    points = past.sum(axis=1, keepdims=True)
    u = uniform[:, None]
    p = np.where(inside, u * (1 + past), past + u * (1 + points - past)) / (points + 1)
    return p, counts + inside.sum(axis=0)


def counts_after(cell: Int[Array, "T"], cells: int) -> Int[Array, "T P"]:
    """Number of points of each cell after each position.

    >>> counts_after(np.array([1, 0, 1]), 2)
    array([[1, 1],
           [0, 1],
           [0, 0]])
    """
    taken = (cell[:, None] == np.arange(cells)).astype(np.int64)
    return taken.sum(axis=0) - taken.cumsum(axis=0)


def log_cell_bets(p: Float[Array, "T C"], share: Float[Array, "C"]) -> Float[Array, "T C G"]:
    r"""Logarithms of the densities :math:`\frac{1 + g 1[p < q]}{1 + g q}` for cells of share q, and three gains g.

    >>> log_cell_bets(np.array([[0.2, 0.7]]), np.array([0.5, 0.5])).round(2)
    array([[[ 0.54,  0.29, -0.7 ],
            [-1.25, -0.41,  0.41]]])
    """
    gain = np.array(GAINS)
    inside = (p < share)[:, :, None]
    return np.log1p(gain * inside) - np.log1p(gain * share[:, None])


class Capital(NamedTuple):
    """Logarithms of the capital of each bet after the last point, and of the total of S sequences after every point."""

    bets: Float[Array, "S J"]
    total: Float[Array, "T S"]


def bet(log_capital: Float[Array, "S J"], seen: int, log_factors: Float[Array, "T S J"]) -> Capital:
    r"""Run J bets over T p-values of S sequences; each total capital is a test martingale that starts at one.

    At point t the share :math:`w_t = \frac{\log 2}{\log(t + 2)} - \frac{\log 2}{\log(t + 3)}` of the initial reserve of
    one is split among the bets, :math:`C_j \gets (C_j + w_t / J) f_j(p_t)`. The total is the reserve that is left plus
    all :math:`C_j`. Its expectation never changes: each :math:`f_j` has the integral one.

    Args:
        log_capital: Logarithms of the capital of each bet before the points; -inf at the start.
        seen: Number of points before.
        log_factors: Logarithms of the densities at the p-values.

    >>> bet(np.array([[-np.inf]]), 0, np.zeros((3, 1, 1))).total[:, 0].round(9) + 0.0  # a bet that wins nothing
    array([0., 0., 0.])
    """
    t = seen + np.arange(len(log_factors))
    reserve = math.log(2.0) / np.log(t + 3.0)
    stake = np.log(math.log(2.0) / np.log(t + 2.0) - reserve) - math.log(log_factors.shape[2])
    path = log_factors.cumsum(axis=0)
    before = path - log_factors
    started = np.logaddexp.accumulate(np.concatenate([log_capital[None], stake[:, None, None] - before]), axis=0)[1:]
    capital = path + started
    return Capital(capital[-1], np.logaddexp(np.log(reserve)[:, None], np.logaddexp.reduce(capital, axis=2)))


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


class DriftEvidence(NamedTuple):
    """The rows around the alarm that moved: strange ones if p-values fell, those of regions that gained traffic.

    Attributes:
        kept: Number of rows around the alarm that the monitor kept.
        ids: Identifiers of those that moved, in the order of the stream; positions of rows without an identifier.
        groups: These rows in groups of near ones, the largest first; see
            :func:`~sepc_torch.head.row_groups.group_rows`. Empty without embeddings.
        columns: The columns of a table that differ most between these rows and all training points.
    """

    kept: int
    ids: tuple[int | str, ...]
    groups: tuple[RowGroup, ...]
    columns: tuple[ColumnMove, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain Python values."""
        parts = {"groups": [g.to_dict() for g in self.groups], "columns": [c._asdict() for c in self.columns]}
        return {**self._asdict(), "ids": list(self.ids), **parts}

    @property
    def lines(self) -> list[str]:
        """The evidence in words: how many rows moved, the columns, and the largest groups."""
        found = [f"rows around the alarm that moved: {len(self.ids)} of {self.kept}"]
        if self.columns:
            found.append(f"columns of these rows: {'; '.join(map(str, self.columns))}")
        return found + [str(group) for group in self.groups[:_GROUPS]]


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
        accuracy: Expected accuracy of the accepted points; see :meth:`DriftMonitor.accuracy`. None if the nonconformity
            scores changed: the estimate rests on regions, and does not see that labels within them become wrong.
        evidence: The rows that moved; None without an alarm.
    """

    seen: int
    p_value: float
    alarm: bool
    alarm_at: int | None
    since: int | None
    moves: tuple[Move, ...]
    accepted: float
    accuracy: AccuracyEstimate | None
    evidence: DriftEvidence | None = None

    @property
    def sentence(self) -> str:
        """The state in one sentence."""
        if self.alarm:
            return f"The stream has drifted ({self._where})."
        return f"No drift is shown ({self._where})."

    @property
    def _where(self) -> str:
        """The p-value, the point that raised the alarm, and the number of points."""
        at = "" if self.alarm_at is None else f"alarm at point {self.alarm_at}; "
        return f"{at}p = {self.p_value:.2g} after {self.seen} points"

    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain Python values."""
        moves = [
            {**move._asdict(), "classes": list(move.classes), "regions": list(move.regions)} for move in self.moves
        ]
        evidence = None if self.evidence is None else self.evidence.to_dict()
        accuracy = None if self.accuracy is None else self.accuracy._asdict()
        return {**self._asdict(), "moves": moves, "accuracy": accuracy, "evidence": evidence}

    def __str__(self) -> str:
        state = "drift" if self.alarm else "no drift shown"
        lines = [f"{state}: {self._where}; accepted {self.accepted:.1%}"]
        if self.accuracy is None:
            lines.append("accuracy of the accepted points: not known, since p-values changed; label some of them")
        else:
            accuracy = "{:.1%} ({:.1%} to {:.1%})".format(*self.accuracy)
            lines.append(f"accuracy of the accepted points, if regions keep their risk: {accuracy}")
        for move in self.moves:
            shares = f"from {move.expected:.1%} to {move.share:.1%} since point {move.since}"
            if move.regions:
                where = f"class {_few(map(printable, move.classes))}, regions {_few(map(str, move.regions))}"
                lines.append(f"{where} {move.change} traffic: {shares}")
            else:
                which = "small p-values (up to 0.1)" if move.change == "fell" else "large p-values (from 0.9)"
                lines.append(f"{which} became more frequent: {shares}")
        lines += [] if self.evidence is None else self.evidence.lines
        return "\n".join(lines)


def _few(names: Iterable[str]) -> str:
    """Join names for a line of text; of many names the first ones, and how many more there are.

    >>> _few("abc"), _few(map(str, range(20)))
    ('a, b, c', '0, 1, 2, 3, 4, 5 and 14 more')
    """
    every = list(names)
    rest = len(every) - _NAMED
    return ", ".join(every) if rest <= 1 else f"{', '.join(every[:_NAMED])} and {rest} more"


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


class DriftMonitor:
    """Watches whether a stream still looks like the calibration points of a head.

    Threads can share a monitor. Give every process its own, with its own seed, and merge them.

    Args:
        head: A calibrated head, with its threshold set; its calibration rows must not have come in units.
        alpha: Probability of *ever* raising an alarm without drift.
        seed: Seed of the random numbers that break ties; workers need different ones.

    >>> rng = np.random.default_rng(0)
    >>> y = np.arange(600) % 2
    >>> x = rng.normal(size=(600, 4)) + 3.0 * y[:, None]
    >>> head = TrustHead.fit(x[:200], y[:200]).calibrate(x[200:], y[200:])
    >>> monitor = DriftMonitor(head)
    >>> monitor.update(rng.normal(size=(100, 4)) + 3.0 * y[:100, None]).alarm
    False
    >>> monitor.update(rng.normal(size=(100, 4))).alarm  # only one class is left
    True
    """

    def __init__(self, head: TrustHead, alpha: float = 0.01, seed: int = 0) -> None:
        calibration = checked_head(head).require_calibration()
        self.head, self.alpha, self.seed = head, check_share(alpha, "alpha"), check_count(seed, "seed")
        self._sepc, self._calibration, self.with_logits = head.sepc, calibration, head.takes_logits
        labels = calibration.network if self.with_logits else calibration.own
        if len(labels.point_region) == 0:
            raise RuntimeError("The regions of the head changed since the calibration; call head.calibrate again.")
        if head.promise is not None and not head.promise.exact:
            raise ValueError(
                "Out-of-fold rows calibrated this head (TrustClassifier(cv=...)): their scores are not exchangeable "
                "with those of new rows, and a stream without drift could raise an alarm. Calibrate with held-out "
                "rows (cv=None)."
            )
        if labels.in_units:
            raise ValueError(
                "The calibration rows of this head came in units, whose rows are not independent: a stream without "
                "drift could raise an alarm. Calibrate a copy of the head with one row of each unit, without units=, "
                "and watch one row of each unit."
            )
        if len(labels.group_threshold):
            raise ValueError("The head accepts by given groups, which a stream does not have; use another accept_at.")
        self._score_edges = np.quantile(labels.combined_score.combined.double().cpu().numpy(), _QUANTILES)[1:]
        # Scores of the least and the most strange tenth.
        self._tails = np.quantile(labels.combined_score.combined.double().cpu().numpy(), [_SMALL, 1.0 - _SMALL])
        self._evidence_of: tuple[int, list[int | str], DriftEvidence] | None = None
        self._cell_of, codes = _cells(labels, head)
        self._classes = [tuple(sorted(set(codes[self._cell_of == c].tolist()))) for c in range(self._cell_of.max() + 1)]
        region = labels.point_region[labels.ranked_rows]
        cell = self._cell_of[region.cpu().numpy()]
        self._cell_start = np.bincount(cell, minlength=len(self._classes))
        # As rounded in predictions.
        scores = self._score_bins(labels.ranked_nonconformity.to(head.projection.shift).double().cpu().numpy())
        self._score_start = np.bincount(scores, minlength=len(self._score_edges) + 1)
        # Shares from points that are not ranked: bets must not depend on the ranked ones.
        fitted = np.delete(labels.point_region.cpu().numpy(), labels.ranked_rows.cpu().numpy())
        expected = np.bincount(self._cell_of[fitted], minlength=len(self._classes)) + 0.5
        self._shares = expected / expected.sum()
        accepted = (
            labels.ranked_joint >= labels.least_score(labels.point_label[labels.ranked_rows], region, None)
        ).cpu()
        wrong = accepted & ~labels.ranked_right.cpu()
        self._accepted_start = np.bincount(cell, weights=accepted.numpy(), minlength=len(self._classes))
        self._wrong_start = np.bincount(cell, weights=wrong.numpy(), minlength=len(self._classes))
        self._state, self._lock = self._fresh_state(), threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """All but the lock, which cannot be copied."""
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def update(
        self, z: Any, logits: Any = None, *, layers: Mapping[str, Any] | None = None, ids: Any = None
    ) -> DriftReport:
        """Judge further points of the stream, in their order; return the report.

        Args:
            z: (B, D) embeddings, as in :meth:`TrustHead.judge`.
            logits: (B, C) logits of the network; required if and only if the head was calibrated with logits.
            layers: The activations of the layers that the head was fitted with, by name.
            ids: (B,) identifiers of the points, integers or strings, by which the report names rows that moved; by
                default their positions in the stream. The first 48 bytes of a string are kept.
        """
        z, logits = self.head.with_logits(z, logits)
        self._check_logits(logits is not None)
        z = z if self.head.encoding is None else self.head.encode(z)  # once, and not again for the rows that are kept
        out = self.head.judge(z, logits, layers=layers)
        return self.update_from(out, with_logits=self.with_logits, ids=ids, z=z)

    def update_from(self, out: HeadPrediction, *, with_logits: bool, ids: Any = None, z: Any = None) -> DriftReport:
        """Update with predictions of the head that are already there, so that the head runs once.

        Args:
            out: Predictions of the head, in the order of the stream.
            with_logits: Whether the head was given logits for them, which the predictions do not tell. It must be as in
                the calibration.
            ids: (B,) identifiers of the points, as in :meth:`update`.
            z: (B, D) embeddings of the points; without them the report has no groups of the rows that moved.
        """
        self._check_logits(with_logits)
        names = None if ids is None else row_ids(ids, len(out.label))
        if self.head.calibration is not self._calibration or self.head.sepc is not self._sepc:
            raise RuntimeError(
                "The head was updated or calibrated again, or has another threshold, so counts have a new meaning; "
                "calibrate an updated head, then start a new DriftMonitor."
            )
        score = out.nonconformity.double().cpu().numpy()
        region = out.nearest.clamp_min(0).cpu().numpy()
        accept = out.accept.cpu().numpy()
        points = None if z is None or self._past_alarm() else self.head.as_tensor(z)
        if points is not None and points.shape != (len(score), self.head.in_features):
            raise ValueError(f"Expected z of shape ({len(score)}, {self.head.in_features}), got {tuple(points.shape)}.")
        with self._lock:  # a thread at a time
            for start in range(0, len(score), _CHUNK):
                rows = slice(start, start + _CHUNK)
                self._advance(self._score_bins(score[rows]), self._cell_of[region[rows]], accept[rows])
                of_rows = None if names is None else names[rows]
                self._keep(score[rows], region[rows], of_rows, None if points is None else points[rows])
            return self.report()

    def _check_logits(self, with_logits: bool) -> None:
        """Raise ValueError unless predictions are with logits if and only if the calibration was."""
        if with_logits != self.with_logits:
            wanted = "with" if self.with_logits else "without"
            raise ValueError(f"The head was calibrated {wanted} logits; judge the stream {wanted} them too.")

    def watch(self, chunks: Iterable[Any]) -> Iterator[DriftReport]:
        """Yield a report after each chunk of a stream: embeddings, or pairs of embeddings and logits."""
        for chunk in chunks:
            yield self.update(*chunk) if isinstance(chunk, tuple) else self.update(chunk)

    @property
    def p_value(self) -> float:
        """Anytime-valid p-value: at every moment, and also for the least one so far."""
        return min(1.0, 2.0 * len(self._state["seen"]) * math.exp(-max(float(self._state["peak"].max()), 0.0)))

    def report(self) -> DriftReport:
        """Return the report on all points seen."""
        seen, moves, at = int(self._state["seen"].sum()), self.moves(), self._state["alarm_at"]
        alarm = self.p_value <= self.alpha
        return DriftReport(
            seen=seen,
            p_value=self.p_value,
            alarm=alarm,
            alarm_at=int(at[at >= 0].min()) if alarm and (at >= 0).any() else None,
            since=moves[0].since if moves else None,
            moves=moves,
            accepted=float(self._state["accepted"].sum() / max(seen, 1)),
            accuracy=None if self._scores_changed(moves) else self.accuracy(),
            evidence=self._evidence() if alarm else None,
        )

    def moves(self) -> tuple[Move, ...]:
        """Return the changes that bets have found, strongest first; they describe, and carry no guarantee."""
        workers = range(len(self._state["seen"]))
        return _distinct([move for worker in workers for move in self._moves_of(worker)])

    def _moves_of(self, worker: int) -> tuple[Move, ...]:
        """The changes of one worker's stream, strongest first."""
        state = {name: values[worker] for name, values in self._state.items()}
        evidence = state["path"] - state["low"]
        listed = [j for j in np.argsort(-evidence).tolist() if evidence[j] >= _LISTED]
        return _distinct([self._describe(j, state, float(evidence[j])) for j in listed])

    def _evidence(self) -> DriftEvidence:
        """The kept rows that moved, as each worker's own changes tell; without a listed change, the strange ones."""
        kept, ids, points = 0, [], []
        for worker in range(len(self._state["seen"])):
            state = {name: values[worker] for name, values in self._state.items()}
            moves, at, score, region = (
                self._moves_of(worker),
                state["kept_at"],
                state["kept_score"],
                state["kept_region"],
            )
            moved = np.zeros(_KEPT, dtype=bool) if moves else score > self._tails[1]
            for move in moves:
                which = {"fell": score > self._tails[1], "rose": score < self._tails[0], "lost": np.zeros(_KEPT, bool)}
                mine = which.get(move.change, np.isin(region, move.regions))
                moved |= mine & (at >= move.since)
            slots = np.argsort(at, kind="stable")
            kept += int((at >= 0).sum())
            slots = slots[(moved & (at >= 0))[slots]]
            ids += [_identifier(state["kept_id"][slot], int(at[slot])) for slot in slots]
            points.append(state["kept_z"][slots])
        z = torch.from_numpy(np.concatenate(points))
        if self._evidence_of is None or self._evidence_of[:2] != (kept, ids):
            finite = z.isfinite().all(dim=1)
            z = z[finite].to(self.head.projection.shift)
            groups = group_rows(self.head, z, [name for name, known in zip(ids, finite.tolist(), strict=True) if known])
            columns = column_moves(self.head, z, None) if len(z) else ()
            self._evidence_of = kept, ids, DriftEvidence(kept, tuple(ids), groups, columns)
        return self._evidence_of[2]

    def _scores_changed(self, moves: tuple[Move, ...]) -> bool:
        """Whether the nonconformity scores changed: then labels within regions may be wrong more often than before."""
        limit = math.log(2.0 * len(self._state["seen"]) / self.alpha)
        return bool((self._state["peak"][:, 0] >= limit).any()) or any(not move.regions for move in moves)

    def accuracy(self, level: float = 0.05) -> AccuracyEstimate:
        """Expected accuracy of the accepted points of the stream, without labels; see :func:`expected_accuracy`.

        The estimate does not see a change within a region, such as new label errors there. :meth:`report` therefore
        leaves it out if the nonconformity scores changed.

        Args:
            level: Probability that the interval misses.
        """
        traffic = self._state["accepted"].sum(axis=0)
        return expected_accuracy(traffic, self._accepted_start, self._wrong_start, check_share(level, "level"))

    @property
    def position(self) -> int:
        """Number of points of the stream that :meth:`update` continues."""
        return int(self._state["seen"][0])

    def with_reference(self, score: Float[Array, "T"], region: Int[Array, "T"], first: int) -> DriftMonitor:
        """Return a fresh monitor that compares later rows with rows of the stream instead of calibration points.

        The claim holds if these rows and later ones are exchangeable, and if their number was fixed before they came.
        Without their labels, :attr:`DriftReport.accuracy` has no estimate.

        Args:
            score: Nonconformity scores of the rows.
            region: Their nearest ellipsoids.
            first: Number of the first rows that set bins and bets; the others are the reference.
        """
        fresh = copy.copy(self)
        score = np.nan_to_num(score, nan=np.inf)
        # No interpolation: scores may be infinite.
        fresh._score_edges = np.quantile(score[:first], _QUANTILES, method="inverted_cdf")[1:]
        cell, cells = self._cell_of[np.maximum(region, 0)], len(self._classes)
        expected = np.bincount(cell[:first], minlength=cells) + 0.5
        fresh._shares = expected / expected.sum()
        fresh._cell_start = np.bincount(cell[first:], minlength=cells)
        fresh._score_start = np.bincount(fresh._score_bins(score[first:]), minlength=len(fresh._score_edges) + 1)
        fresh._accepted_start = np.zeros_like(self._accepted_start)
        fresh._wrong_start = np.zeros_like(self._wrong_start)
        fresh._state = fresh._fresh_state()
        fresh.seed += _NEXT_SEED  # the random numbers so far led to the alarm
        return fresh

    def arrays(self) -> dict[str, Array]:
        """Return the state and the reference, for the file of a guard."""
        return {**self._state, **{f"reference.{name}": getattr(self, f"_{name}") for name in _REFERENCE}}

    def load_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Restore what :meth:`arrays` of a monitor with an equal head returned."""
        for name in _REFERENCE:
            if arrays[f"reference.{name}"].shape != getattr(self, f"_{name}").shape:
                raise ValueError(f"the reference of a drift monitor has another shape of {name!r}")
            setattr(self, f"_{name}", arrays[f"reference.{name}"])
        state = {name: torch.from_numpy(arrays[name]) for name in self._state}
        self.load_state_dict({**state, "seed": torch.tensor(self.seed)})

    def merge(self, *others: DriftMonitor) -> DriftMonitor:
        """Return a monitor of several workers' streams; further updates of it continue the first stream.

        All workers must watch with the same head and alpha. The number of workers must be decided before the stream is
        seen: each gets its share of alpha.
        """
        everyone = (self, *others)
        if len({id(monitor) for monitor in everyone}) < len(everyone):
            raise ValueError("A monitor is given twice; its points would count twice. Pass each worker's monitor once.")
        checksum = self._calibration_checksum()
        if any(monitor._calibration_checksum() != checksum or monitor.alpha != self.alpha for monitor in others):
            raise ValueError("Monitors of another head, calibration, threshold or alpha cannot be merged.")
        merged = DriftMonitor(self.head, self.alpha, self.seed)
        states = [monitor.state_dict() for monitor in everyone]
        arrays = {name: torch.cat([state[name] for state in states]) for name in self._state}
        merged.load_state_dict({**states[0], **arrays})
        return merged

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state: counts, capital and at most 128 rows around the alarm, as tensors with a row per worker."""
        arrays = {name: torch.from_numpy(values.copy()) for name, values in self._state.items()}
        return {**arrays, "seed": torch.tensor(self.seed)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state of :meth:`state_dict` of a monitor with an equal head."""
        fresh = self._fresh_state()
        for name, values in fresh.items():
            if name not in state or state[name].shape[1:] != values.shape[1:]:
                given = tuple(state[name].shape) if name in state else "nothing"
                raise ValueError(
                    f"The state of {name!r} should have shape {('workers', *values.shape[1:])}, got {given}; "
                    "load the state of a monitor with the same head."
                )
        self._state = {name: state[name].cpu().numpy().copy() for name in fresh}
        self.seed = int(state["seed"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state, alpha and a checksum of the calibration to a file; the head has a file of its own."""
        metadata = {"alpha": self.alpha, "seed": self.seed, "calibration": self._calibration_checksum()}
        files.write(path, "drift_monitor", self._state, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str], head: TrustHead) -> DriftMonitor:
        """Load a monitor that continues the stream of the saved one.

        Args:
            path: File that :meth:`save` wrote.
            head: The head of the saved monitor, with the same calibration and threshold.
        """
        arrays, metadata = files.read(path, "drift_monitor")
        with files.interpreting(path):
            monitor = cls(head, metadata["alpha"], metadata["seed"])
        if metadata["calibration"] != monitor._calibration_checksum():
            raise ValueError(
                f"{os.fspath(path)!r} belongs to another head, calibration or threshold, so its counts mean nothing "
                "here; load it with the head it was saved with, or start a new DriftMonitor."
            )
        with files.interpreting(path):
            state = {name: torch.from_numpy(array) for name, array in arrays.items()}
            monitor.load_state_dict({**state, "seed": torch.tensor(monitor.seed)})
        return monitor

    def _calibration_checksum(self) -> str:
        """SHA-256 of the bins, cells and counts with which every stream of this calibration starts."""
        starts = (self._cell_start, self._score_start, self._accepted_start, self._wrong_start)
        counts = [self._cell_of, *(start.astype(np.int64) for start in starts)]
        # Bins in float32: the head's dtype, in which a file of the head keeps the scores.
        parts = [*counts, self._score_edges.astype(np.float32)]
        return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()

    def _fresh_state(self) -> dict[str, Array]:
        total = POWERS + len(GAINS) * len(self._classes)
        return {
            "seen": np.zeros(1, np.int64),
            "scores": self._score_start[None].copy(),
            "cells": self._cell_start[None].copy(),
            "accepted": np.zeros((1, len(self._classes)), np.int64),
            "small": np.zeros((1, 2), np.int64),  # p-values of scores up to 0.1, and from 0.9
            "capital": np.full((1, total), -np.inf),
            # The running logarithm of each bet, where it was lowest, and the traffic counted until then.
            "path": np.zeros((1, total)),
            "low": np.zeros((1, total)),
            "low_at": np.zeros((1, total), np.int64),
            "low_count": np.zeros((1, total), np.int64),
            "peak": np.zeros((1, 2)),
            "alarm_at": np.full(1, -1, np.int64),
            # The last rows until some time after the alarm: position, score, region, identifier and embedding.
            "kept_at": np.full((1, _KEPT), -1, np.int64),
            "kept_score": np.zeros((1, _KEPT)),
            "kept_region": np.zeros((1, _KEPT), np.int64),
            "kept_id": np.zeros((1, _KEPT, _ID_BYTES + 1), np.int8),
            "kept_z": np.full((1, _KEPT, self.head.in_features), np.inf, np.float32),
        }

    def _advance(self, score: Int[Array, "T"], cell: Int[Array, "T"], accept: Array) -> None:
        """Add points to the first worker's stream."""
        state = {name: values[0] for name, values in self._state.items()}
        seen, workers, cells = int(state["seen"]), len(self._state["seen"]), len(self._classes)
        noise = [uniforms(2 * self.seed + i, seen, len(score)) for i in range(2)]
        p_score, state["scores"][:] = sequential_p_values(score, state["scores"], noise[0])
        p_cell, state["cells"][:] = occupancy_p_values(cell, state["cells"], noise[1])
        factors = log_power_bets(p_score)[:, None], log_cell_bets(p_cell, self._shares)
        limit = math.log(2.0 * workers / self.alpha)
        for i, part in enumerate((slice(None, POWERS), slice(POWERS, None))):
            sequences = (1, cells)[i]
            capital = bet(state["capital"][part].reshape(sequences, -1), seen, factors[i])
            state["capital"][part] = capital.bets.reshape(-1)
            total = capital.total.max(axis=1) - math.log(sequences)
            state["peak"][i] = max(state["peak"][i], float(total.max()))
            crossed = np.flatnonzero(total >= limit)
            if len(crossed) and not 0 <= self._state["alarm_at"][0] <= seen + crossed[0]:
                self._state["alarm_at"][0] = seen + crossed[0]
        self._keep_lows(state, np.concatenate([f.reshape(len(f), -1) for f in factors], axis=1), p_score, cell, seen)
        state["accepted"] += np.bincount(cell[accept], minlength=len(self._classes))
        state["small"] += np.array([(p_score <= _SMALL).sum(), (p_score >= 1.0 - _SMALL).sum()])
        self._state["seen"][0] = seen + len(score)

    def _keep(
        self, score: Float[Array, "T"], region: Int[Array, "T"], names: Array | None, z: Float[Tensor, "T D"] | None
    ) -> None:
        """Keep the last of the points that :meth:`_advance` added to the first stream, until the alarm is past.

        Args:
            score: Their nonconformity scores.
            region: Their nearest ellipsoids.
            names: Their identifiers, or None.
            z: Their embeddings, or None.
        """
        state = {name: values[0] for name, values in self._state.items()}
        seen, alarm = int(self._state["seen"][0]), int(self._state["alarm_at"][0])
        first = seen - len(score)
        end = seen if alarm < 0 else min(seen, alarm + _AFTER)
        if end <= first:
            return
        rows = np.arange(max(end - _KEPT, first), end)
        slots, rows = rows % _KEPT, rows - first
        state["kept_at"][slots], state["kept_region"][slots] = rows + first, region[rows]
        state["kept_score"][slots] = np.nan_to_num(score[rows], nan=np.inf, posinf=_LARGEST)
        state["kept_id"][slots] = [_coded(None if names is None else names[row]) for row in rows.tolist()]
        points = None if z is None else z[torch.from_numpy(rows).to(z.device)].detach().float().cpu().numpy()
        state["kept_z"][slots] = np.inf if points is None else np.where(np.isnan(points), np.inf, points)

    def _past_alarm(self) -> bool:
        """Whether the first worker's stream keeps no more rows."""
        alarm = int(self._state["alarm_at"][0])
        return alarm >= 0 and int(self._state["seen"][0]) >= alarm + _AFTER

    def _keep_lows(
        self, state: Mapping[str, Any], factors: Float[Array, "T J"], p: Float[Array, "T"], cell: Array, seen: int
    ) -> None:
        """Note where the running logarithm of each bet was lowest, with the traffic counted until there."""
        path = state["path"] + factors.cumsum(axis=0)
        lowest, at = path.min(axis=0), path.argmin(axis=0)
        lower = lowest <= state["low"]
        small = state["small"] + np.stack([p <= _SMALL, p >= 1.0 - _SMALL], axis=1).cumsum(axis=0)
        traffic = (state["cells"] - self._cell_start)[None] - counts_after(cell, len(self._classes))
        counts = np.concatenate([np.repeat(small, POWERS // 2, axis=1), np.repeat(traffic, len(GAINS), axis=1)], axis=1)
        state["low"][lower] = lowest[lower]
        state["low_at"][lower] = seen + at[lower] + 1
        state["low_count"][lower] = counts[at[lower], np.flatnonzero(lower)]
        state["path"][:] = path[-1]

    def _describe(self, j: int, state: Mapping[str, Any], evidence: float) -> Move:
        """Describe the change that bet j stands for."""
        since, half = int(state["low_at"][j]), POWERS // 2
        span = max(int(state["seen"]) - since, 1)
        if j < POWERS:
            share = (state["small"][j // half] - state["low_count"][j]) / span
            return Move(("fell", "rose")[j // half], (), (), _SMALL, float(share), since, evidence)
        c, gain = divmod(j - POWERS, len(GAINS))
        total = state["cells"][c] - self._cell_start[c]
        return Move(
            "lost" if GAINS[gain] < 0 else "gained",
            tuple(self.head.classes[code] for code in self._classes[c]),
            tuple(np.flatnonzero(self._cell_of == c).tolist()),
            float(self._cell_start[c] / self._cell_start.sum()),
            float((total - state["low_count"][j]) / span),
            since,
            evidence,
        )

    def _score_bins(self, score: Float[Array, "T"]) -> Int[Array, "T"]:
        return np.searchsorted(self._score_edges, np.nan_to_num(score, nan=np.inf), side="left")


def _distinct(moves: list[Move]) -> tuple[Move, ...]:
    """The strongest of the moves that describe the same change, strongest first."""
    found: dict[tuple[str, int], Move] = {}
    for move in sorted(moves, key=lambda move: -move.evidence):
        found.setdefault((move.change, -1 if not move.regions else move.regions[0]), move)
    return tuple(found.values())


def _coded(name: Any) -> Array:
    """An identifier as bytes: its kind, then its text, which is cut if it is long."""
    text = b"" if name is None else str(name).encode()[:_ID_BYTES]
    kind = _POSITION if name is None else _INTEGER if isinstance(name, (int, np.integer)) else _TEXT
    return np.frombuffer(bytes([kind]) + text.ljust(_ID_BYTES, b"\0"), dtype=np.int8)


def _identifier(coded: Array, position: int) -> int | str:
    """The identifier that :func:`_coded` wrote; the position of a row without one.

    >>> _identifier(_coded("row é"), 7), _identifier(_coded(12), 7), _identifier(_coded(None), 7)
    ('row é', 12, 7)
    """
    text = coded[1:].tobytes().rstrip(b"\0").decode(errors="ignore")
    return position if coded[0] == _POSITION else int(text) if coded[0] == _INTEGER else text


def _cells(labels: LabelCalibration, head: TrustHead) -> tuple[Int[Array, "K"], Int[Array, "K"]]:
    """Cell of every region, and its class: small regions share a cell, as points that are not ranked say."""
    codes = head.sepc.codes.cpu().numpy()
    regions, held = labels.point_region.cpu().numpy(), labels.ranked_rows.cpu().numpy()
    expected = np.bincount(np.delete(regions, held), minlength=len(codes)).astype(float)
    least = max(_CELL_POINTS, _CELL_SHARE * expected.sum())
    cell_of, cell, inside = np.zeros(len(codes), np.int64), 0, 0.0
    order = np.lexsort((-expected, codes))  # by class, and within a class the largest regions first
    for position, region in enumerate(order):
        cell_of[region] = cell
        inside += expected[region]
        rest = expected[order[position + 1 :]].sum()
        if inside >= least and rest >= least:
            cell, inside = cell + 1, 0.0
    return cell_of, codes
