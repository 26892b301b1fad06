r"""A promise that can be suspended: :class:`Guard` judges, watches for drift and for wrong labels, and restores.

A guard goes from *epoch* to epoch. The first one begins with the calibration of the head. An alarm at a row (drift, or
labels that are wrong too often) suspends the promise and begins a new epoch with the next row. The first w rows of an
epoch (``window``), which nobody labels, fix a grid of thresholds :math:`t_1 > \dots > t_K`, some of them as starts s
with shares :math:`\delta_s` of :math:`\delta`. The next w rows are the reference of a new drift monitor. All rows after
the first w can be asked for. A call of :meth:`Guard.ask` in a suspended epoch chooses a threshold :math:`t_a` and asks
for every row with a score of at least :math:`t_a` by a coin of one probability p, for no other row. For each threshold
:math:`t_k \ge t_a`, the capital against "the risk at :math:`t_k` is at least r" is multiplied, for every row with a
score of at least :math:`t_k`, by :math:`1 + \theta p (r - Z)` with :math:`Z = L / p` for a row that was asked for (L is
1 for a wrong label) and 0 for the others, and averaged over bets :math:`\theta`. A threshold passes in the sequence of
start s once its capital and those of all grid thresholds from s down to it have reached :math:`1 / \delta_s`.

Claims, for rows of an epoch that are independent and of one distribution:

(a) The risk at a threshold that passes is at most r, for all thresholds and all times at once, with probability
:math:`1 - \delta`. So :meth:`Guard.recalibrate` may be called after every label. What it restores is a promise over all
rows, also if the head's promise was by group.

(b) If the risk at the present threshold is kept, a suspended epoch is called *broken* with probability at most
:math:`\alpha` (that of the risk monitor).

(c) The drift monitor of the epoch alarms with probability at most its alpha.

Proof. (1) Thresholds, starts and shares depend on the first w rows of the epoch, and :math:`t_a` on earlier calls, so
given these, rows with a score of at least :math:`t_k` among those of a call are independent draws from the rows beyond
:math:`t_k`. p depends on the budget and on their number beyond :math:`t_a`, not on their labels, and the coins are
independent of everything. If the risk at :math:`t_k` is at least r, every factor has an expectation of at most one and
is not negative, since :math:`\theta p r > 0` and :math:`\theta \le 1`: the capital is a supermartingale. (2) By
Ville's inequality it ever reaches :math:`1 / \delta_s` with probability at most :math:`\delta_s`. In the sequence of s,
let :math:`t_k` be the first threshold that breaks the risk. A threshold that breaks it can pass only if :math:`t_k`
does, so no division by the length of the sequence is needed, and the :math:`\delta_s` sum to :math:`\delta`. (3) A row
is counted when all earlier rows that were asked for have their labels, so late labels only choose the times at which
the guard looks. A label that never comes counts as wrong. (4) (b) is the same argument for the bets above r, for which
a label that never comes counts as right. (5) The alarm that begins the epoch depends on earlier rows only, and w does
not depend on the rows, so reference and later rows are exchangeable (:mod:`sepc_torch.head.drift`). (6) If the risk is
kept in every group, it is kept over all rows. So the claims of the risk monitor hold with groups and without.
(7) No random number is used twice: coins and ties have sequences of their own, which go on after an alarm.

If the error changes within an epoch, (a) still holds for the average error of the rows beyond the threshold so far.
Rows between the estimated change point and the alarm are not used: the estimate depends on them, and some can be of the
old kind.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data import files
from sepc_torch.data.labels import label_array, label_codes
from sepc_torch.data.options import check_count
from sepc_torch.data.warn import warn_user
from sepc_torch.head.drift import AccuracyEstimate, DriftMonitor, DriftReport, uniforms
from sepc_torch.head.prediction import HeadPrediction, Promise
from sepc_torch.head.reasons import refusal_reason
from sepc_torch.head.risk_monitor import RiskMonitor, RiskReport, checked_ids, integers, log_above, log_below
from sepc_torch.head.row_metrics import Family, RowMetrics, openmetrics
from sepc_torch.head.trust_head import TrustHead, checked_head
from sepc_torch.shapes import Array, Float, Int

PromiseState = Literal["holds", "unverified", "broken"]
STATES: tuple[PromiseState, ...] = ("holds", "unverified", "broken")
# Rows since the last call of ask that can be chosen: each takes about 50 bytes.
_MOST_RECENT = 100_000
# Shares of the rows that the grid of thresholds accepts: three in a factor of two, down to a 32nd.
_COVERAGES = 2.0 ** (-np.arange(16) / 3)
# Starts of sequences: the present threshold, and these parts of the coverage that the head's scores let expect.
_STARTS = (1.0, 0.5, 0.25)
# Labels that the expectation from the scores counts for, when the number of further labels is estimated.
_PRIOR_LABELS = 20
# Coins of a suspended epoch are other random numbers than those of the monitors.
_COINS = 2**32 + 2**31
_WAITING, _RIGHT, _WRONG, _SKIPPED = -1, 0, 1, 2
# What the guard keeps of rows.
_ROWS = {"id": "i8", "joint": "f8", "confidence": "f8", "score": "f8", "label": "i8", "region": "i8", "accept": "?"}
_NO_ROWS = {name: np.zeros(0, kind) for name, kind in _ROWS.items()}


class GuardedPrediction(NamedTuple):
    """Predictions of a head with the state of its promise.

    Attributes:
        out: The predictions. ``out.accept`` follows the threshold of the guard, and is False throughout if the guard
            refuses.
        state: ``"holds"``, ``"unverified"`` or ``"broken"``, after these rows.
        ids: (B,) ids of the rows, for labels.
        reason: (B,) why labels are refused, as :class:`~sepc_torch.head.reasons.Reason`: ``NO_PROMISE`` if the guard
            refuses.
    """

    out: HeadPrediction
    state: PromiseState
    ids: Int[Tensor, "B"]
    reason: Int[Tensor, "B"]

    def __repr__(self) -> str:
        return f"GuardedPrediction({len(self.ids)} rows, {int(self.out.accept.sum())} accepted, promise: {self.state})"


class Needed(NamedTuple):
    """What a suspended promise needs.

    Attributes:
        labels: About how many further labels restore the promise, if labels are wrong as often as the scores and the
            labels so far let expect. 0 if it holds or can be restored now; None if no threshold seems to keep the risk.
        ids: Rows that were asked for and have no label yet, in the order in which they were asked for. Of a suspended
            promise they are rows since the alarm, as no others restore it.
        rows: Rows that must be judged before any can be asked for.
        coverage: Share of the rows that the restored promise would accept; NaN without an estimate.
    """

    labels: int | None
    ids: Int[Tensor, "n"]
    rows: int
    coverage: float


class Recalibration(NamedTuple):
    """Result of :meth:`Guard.recalibrate`.

    Attributes:
        found: Whether a threshold keeps the risk; if not, nothing changed.
        threshold: The restored threshold of joint scores; inf if none was found.
        coverage: Share of the rows of the epoch's window that it accepts.
        error: Share of wrong labels among the counted labels beyond the threshold.
        labels: Number of these labels.
        since: Position in the stream of the first row that could be asked for.
        promise: The restored promise, or the suspended one.
    """

    found: bool
    threshold: float
    coverage: float
    error: float
    labels: int
    since: int
    promise: Promise


class GuardReport(NamedTuple):
    """State of a guard.

    Attributes:
        state: ``"holds"``, ``"unverified"`` (the stream has drifted, and no labels show that the risk is kept) or
            ``"broken"`` (labels show that it is not kept).
        rows: Number of rows judged.
        accepted: Share of them that was accepted.
        since: Position of the row after the alarm that suspended the promise; None while it holds.
        drift: Report of the drift monitor; None without one. It is about the stream before the alarm until the rows of
            the new reference are complete, and about the epoch since then.
        risk: Report of the risk monitor; None without one.
        accuracy: Expected accuracy of the accepted rows without labels. None where the change is of a kind that the
            estimate cannot see: scores changed, labels contradict it, or the reference has no labels.
        asked: Number of rows that were asked for.
        answered: Number of labels that arrived.
        needed: What restores the promise; None while it holds, and without a risk monitor.
        alarms: How often the promise was suspended.
        restored: Number of rows when labels restored it last; None if they never did.
    """

    state: PromiseState
    rows: int
    accepted: float
    since: int | None
    drift: DriftReport | None
    risk: RiskReport | None
    accuracy: AccuracyEstimate | None
    asked: int
    answered: int
    needed: Needed | None
    alarms: int
    restored: int | None

    @property
    def sentence(self) -> str:
        """The state in one sentence."""
        if self.state == "holds":
            found = f"The promise holds after {self.rows} rows, {self.accepted:.1%} of them accepted."
            if self.restored is None:
                return found
            times = "once" if self.alarms == 1 else f"{self.alarms} times"
            return f"{found} It was suspended {times}, and labels restored it after row {self.restored}."
        why = {
            "unverified": "the stream has drifted, and no labels show that the risk is kept",
            "broken": "labels show that the risk is not kept",
        }[self.state]
        found = f"The promise is {self.state} since row {self.since}: {why}."
        if self.needed is None:
            return found
        if self.needed.rows:
            return f"{found} After {self.needed.rows} more rows, labels can be asked for."
        if self.needed.labels is None:
            return (
                f"{found} No threshold of the present scores seems to keep the risk on these rows, though many of "
                "their labels may be right: calibrate the head with some hundred of them, and start a new guard."
            )
        if self.needed.labels == 0:
            return f"{found} The labels are enough to restore it: call recalibrate()."
        waiting = len(self.needed.ids)
        then = f"{waiting} are waited for" if waiting else "ask(budget) chooses rows to label"
        return (
            f"{found} About {self.needed.labels} more labels restore it for {self.needed.coverage:.0%} of the rows; "
            f"{then}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain Python values."""
        needed = self.needed and {**self.needed._asdict(), "ids": self.needed.ids.tolist()}
        reports = {"drift": self.drift and self.drift.to_dict(), "risk": self.risk and self.risk.to_dict()}
        return {**self._asdict(), **reports, "accuracy": self.accuracy and self.accuracy._asdict(), "needed": needed}

    def __str__(self) -> str:
        lines = [self.sentence, *(part.sentence for part in (self.drift, self.risk) if part is not None)]
        if self.since is not None and self.drift is not None and not self.drift.alarm:
            lines[1] = f"Compared with the rows after the alarm: {lines[1]}"
        return "\n".join(lines)


OnAlarm = str | Callable[[GuardReport], object]


class Guard:
    """A head in operation: it judges, watches its promise, suspends it after an alarm and restores it by labels.

    The state of the promise is

    - ``"holds"`` while neither monitor alarms;
    - ``"unverified"`` after a drift alarm, until labels show that the risk is kept;
    - ``"broken"`` after labels have shown that it is not kept, until :meth:`recalibrate` restores it.

    The guard keeps what it needs of the rows since the last call of :meth:`ask`, at most 100 000 rows of 60 bytes, and
    some hundred bytes for each row that was asked for.

    Args:
        head: A calibrated head with a promise of a risk (:meth:`TrustHead.accept_at`). If it is kept by predicted class
            or region, the risk monitor watches each of these groups, and with ``by="class"`` all rows together. Labels
            restore a promise by group as one over all rows, with one threshold.
        drift: True for a :class:`DriftMonitor` of the head, a monitor, or False for none.
        risk: True for a :class:`RiskMonitor` of the promised risk, another risk, a monitor, or False for none. Without
            one, no labels are asked for, and a suspended promise stays suspended.
        on_alarm: What to do when the promise is suspended: ``"warn"`` (a Python warning), ``"refuse"`` to accept
            nothing until it is restored, or a function of the :class:`GuardReport`.
        window: Number of rows after an alarm that set thresholds, and of those that are the new reference for drift.
        seed: Seed of all random choices; guards of several streams need different ones.

    >>> rng = np.random.default_rng(0)
    >>> y = np.arange(4600) % 2
    >>> x = rng.normal(size=(4600, 4)) + 3.0 * y[:, None]
    >>> head = TrustHead.fit(x[:200], y[:200], normalize=None).calibrate(x[200:600], y[200:600])
    >>> found = head.accept_at(risk=0.05)
    >>> guard = Guard(head, on_alarm="refuse")
    >>> guard.judge(x[600:1600]).state
    'holds'
    >>> found = guard.judge(x[1600:] + 1.0)  # row i of the stream is row 600 + i of the array
    >>> found.state, int(found.out.accept.sum())
    ('unverified', 0)
    >>> chosen = guard.ask(budget=300)
    >>> guard.update(chosen, y[600:][chosen]).needed.labels
    0
    >>> guard.recalibrate().found, guard.state
    (True, 'holds')
    """

    def __init__(
        self,
        head: TrustHead,
        drift: bool | DriftMonitor = True,
        risk: bool | float | RiskMonitor = True,
        *,
        on_alarm: OnAlarm = "warn",
        window: int = 300,
        seed: int = 0,
    ) -> None:
        if not (on_alarm in ("warn", "refuse") if isinstance(on_alarm, str) else callable(on_alarm)):
            raise ValueError(f"on_alarm must be 'warn', 'refuse' or a function of the report, got {on_alarm!r}.")
        if drift is False and risk is False:
            raise ValueError("Without drift and without risk there is nothing to watch; leave one of them True.")
        labels = checked_head(head).require_calibration().labels
        if len(labels.group_threshold):
            raise ValueError(
                "The head accepts by given groups, which a stream does not have. Call head.accept_at(risk=...) without "
                "by=, or with by='predicted', 'region' or 'class'; or with known=False, one threshold for all groups."
            )
        self.head, self.on_alarm = head, on_alarm
        self.window, self.seed = check_count(window, "window", least=20), check_count(seed, "seed")
        self.drift: DriftMonitor | None = None
        if drift is not False:
            self.drift = DriftMonitor(head, seed=seed) if drift is True else drift
            if not isinstance(self.drift, DriftMonitor) or self.drift.head is not head:
                raise ValueError("drift must be True, False or a DriftMonitor of this head.")
        self.risk: RiskMonitor | None = None
        if isinstance(risk, RiskMonitor):
            if risk.by == "given" or risk.classes not in (None, list(head.classes)):
                raise ValueError("The RiskMonitor has groups of its own or other classes; make it with this head.")
            self.risk = risk
        elif risk is not False:
            by: Any = head.promise.by if head.promise is not None else None
            groups = by if by in ("predicted", "region") else None
            self.risk = RiskMonitor(head, None if risk is True else risk, groups=groups, seed=seed)
        promised = head.promise
        self.delta = 0.05 if promised is None or promised.risk is None else promised.delta
        self.state: PromiseState = "holds"
        self.threshold: float | None = None  # of a restored promise; None for the head's own decision
        self._known = head.calibration, head.sepc, head.promise
        self._trial: _Trial | None = None
        # Rows of the epoch's window and reference, as long as they are incomplete; None once the epoch is watched.
        self._collected: dict[str, Array] | None = None
        self._recent, self._closed = dict(_NO_ROWS), np.zeros(0, np.int64)
        self._since, self._next, self._asked, self._answered, self._drawn, self._alarms = 0, 0, 0, 0, 0, 0
        self._restored: int | None = None
        self._counts, self._lock = RowMetrics(), threading.RLock()
        if self.drift is not None and self.drift.p_value <= self.drift.alpha:
            self._suspend("unverified", 0)
        elif self.risk is not None and self.risk.state == "broken":
            self._suspend("broken", 0)

    def judge(
        self, z: Any, logits: Any = None, *, layers: Mapping[str, Any] | None = None, ids: Any = None
    ) -> GuardedPrediction:
        """Judge the next rows of the stream as :meth:`TrustHead.judge` does, and watch them.

        Args:
            z: (B, D) embeddings.
            logits: (B, C) logits of the network; required if and only if the head was calibrated with logits.
            layers: The activations of the layers that the head was fitted with, by name.
            ids: (B,) integers from 0 that name the rows, each once; by default the positions in the stream.
        """
        z, logits = self.head.with_logits(z, logits)
        z = z if self.head.encoding is None else self.head.encode(z)  # once, and not again for the drift monitor
        out = self.head.judge(z, logits, layers=layers)
        return self.watch(out, with_logits=logits is not None, ids=ids, z=z)

    def watch(self, out: HeadPrediction, *, with_logits: bool, ids: Any = None, z: Any = None) -> GuardedPrediction:
        """Watch predictions of the head that are already there; see :meth:`judge`.

        Args:
            out: Predictions of the head, in the order of the stream.
            with_logits: Whether the head was given logits for them. It must be as in the calibration.
            ids: Names of the rows, as in :meth:`judge`.
            z: (B, D) embeddings of the rows; without them the report of drift has no groups of the rows that moved.
        """
        if with_logits != self.head.takes_logits:
            wanted = "with" if self.head.takes_logits else "without"
            raise ValueError(f"The head was calibrated {wanted} logits; judge the stream {wanted} them too.")
        with self._lock:
            now = self.head.calibration, self.head.sepc, self.head.promise
            if any(part is not known for part, known in zip(now, self._known, strict=True)):
                raise RuntimeError("The head was calibrated again, or has another threshold; start a new Guard.")
            count, before = len(out.accept), self.state
            names = np.arange(self._next, self._next + count) if ids is None else checked_ids(ids)
            if len(names) != count:
                raise ValueError(f"There are {count} rows and {len(names)} ids; pass one id for each row.")
            if names.min(initial=self._next) < self._next:
                self._refuse_again(names)
            if self.threshold is not None:
                out = out._replace(accept=(out.joint.double() >= self.threshold) & (out.network_label >= 0))
            self._next = max(self._next, int(names.max(initial=-1)) + 1)
            points = None if z is None or self.drift is None else self.head.encode(z)  # keeps that it is encoded
            self._follow(out, _columns(out, names), points, with_logits)
            if self.on_alarm == "refuse" and self.state != "holds":
                out = out._replace(accept=torch.zeros_like(out.accept))
            self._counts.add(out)
            self._tell(before)
            return GuardedPrediction(out, self.state, torch.from_numpy(names), refusal_reason(out, self.promise))

    def ask(self, budget: int, among: Any = None) -> Int[Tensor, "n"]:
        """Choose rows to label among those judged since the last call; return their ids.

        While the promise holds, the risk monitor chooses among accepted rows (:meth:`RiskMonitor.ask`). While it is
        suspended, rows are chosen evenly beyond the threshold at which the promise can be restored with few labels;
        none are chosen before ``window`` rows have come since the alarm.

        Args:
            budget: Expected number of chosen rows, about. It must not depend on these rows.
            among: Ids of rows that can be labelled; by default all. Others are passed over for good. The choice
                must not depend on whether labels are right.
        """
        budget = check_count(budget, "budget", least=1)
        with self._lock:
            risk, rows = self._require_risk(), self._recent
            if among is not None:
                inside = np.isin(rows["id"], checked_ids(among))
                rows = {name: values[inside] for name, values in rows.items()}
            if self.state != "holds":
                if self._trial is None:
                    return torch.empty(0, dtype=torch.int64)
                self._recent = dict(_NO_ROWS)
                self._drawn += len(rows["id"])
                coins = uniforms(_COINS + self.seed, self._drawn - len(rows["id"]), len(rows["id"]))
                names = self._trial.ask(rows, budget, coins)
            else:
                names = rows["id"][risk.ask(_predictions(rows), budget, rows["id"]).numpy()]
                self._recent = dict(_NO_ROWS)
            self._asked += len(names)
            return torch.from_numpy(names)

    def update(self, ids: Any, y: Any = None) -> GuardReport:
        """Take labels of rows that were asked for, in any order; return the report.

        Labels of rows that were asked for before an alarm arrive late; they count for the risk monitor until the
        promise is restored, and not at all later. An error leaves the guard unchanged.

        Args:
            ids: Ids of rows that :meth:`ask` chose, with labels ``y``; or a dictionary from ids to codes of classes, as
                ``read_answers`` returns.
            y: The labels, as in :meth:`TrustHead.calibrate`.
        """
        names = checked_ids(list(ids) if isinstance(ids, Mapping) else ids)
        if isinstance(ids, Mapping):
            codes = integers(list(ids.values()), "codes")
        else:
            if y is None or len(y) != len(names):
                given = "none" if y is None else len(y)
                raise ValueError(f"There are {len(names)} ids and {given} labels; pass one label for each id.")
            labels = label_array(y) if len(names) else np.zeros(0, np.int64)
            codes = label_codes(labels.tolist(), list(self.head.classes))
        with self._lock:
            return self._answer(names, codes)

    def skip(self, ids: Any) -> GuardReport:
        """Give up labels that will never arrive, so that later rows can be counted; return the report."""
        names = checked_ids(ids)
        with self._lock:
            return self._answer(names, None)

    def needed(self) -> Needed:
        """Say about how many labels restore the promise, and of which rows."""
        with self._lock:
            self._require_risk()
            if self.state == "holds":
                return Needed(0, self.waiting, 0, math.nan)
            if self._trial is None:
                collected = 0 if self._collected is None else len(self._collected["id"])
                return Needed(None, torch.empty(0, dtype=torch.int64), self.window - collected, math.nan)
            labels, coverage = self._trial.forecast()[1:]
            return Needed(labels, torch.from_numpy(self._trial.ids), 0, coverage)

    def recalibrate(self) -> Recalibration:
        """Restore the promise by the labels since the alarm, and say which threshold they allow.

        The scores of the head stay as they are; the lowest threshold that passes its test becomes that of the guard,
        so more labels can accept more rows. The risk monitor starts afresh, and the drift monitor compares with rows
        since the alarm. If no threshold passes, nothing changes; call again after more labels.
        """
        with self._lock:
            risk = self._require_risk()
            if self.state == "holds":
                raise RuntimeError("The promise holds, so there is nothing to restore.")
            trial = self._trial
            place = None if trial is None else trial.passed()
            since = self._since + self.window
            if trial is None or place is None:
                return Recalibration(False, math.inf, 0.0, math.nan, 0, since, self.promise)
            labels, errors = (int(trial.state[name][place]) for name in ("labels", "errors"))
            threshold, coverage = (float(trial.state[name][place]) for name in ("threshold", "coverage"))
            if place != int(trial.state["present"]):
                self.threshold = threshold
            self._resume(risk)
            return Recalibration(True, threshold, coverage, errors / labels, labels, since, self.promise)

    @property
    def promise(self) -> Promise:
        """The promise in force; ``found`` is False while it is suspended and the guard refuses."""
        promise = self.head.promise
        assert promise is not None  # of a calibrated head
        if self._restored is not None:
            assert self.risk is not None
            promise = Promise(self.risk.risk, self.delta, None)
        refused = self.on_alarm == "refuse" and self.state != "holds"
        return promise._replace(found=promise.found and not refused)

    @property
    def waiting(self) -> Int[Tensor, "n"]:
        """Ids of the rows whose labels are waited for."""
        parts = [] if self.risk is None else [self.risk.waiting]
        return torch.cat([*parts, torch.from_numpy(np.zeros(0, np.int64) if self._trial is None else self._trial.ids)])

    def report(self) -> GuardReport:
        """Return the report on all rows judged."""
        with self._lock:
            held = self.state == "holds"
            drift = None if self.drift is None else self.drift.report()
            known = drift is not None and drift.accuracy is not None and not math.isnan(drift.accuracy.estimate)
            return GuardReport(
                self.state,
                self._counts.rows,
                self._counts.accepted / max(self._counts.rows, 1),
                None if held else self._since,
                drift,
                None if self.risk is None else self.risk.report(),
                drift.accuracy if drift is not None and known and self.state != "broken" else None,
                self._asked,
                self._answered,
                None if held or self.risk is None else self.needed(),
                self._alarms,
                self._restored,
            )

    def __str__(self) -> str:
        return str(self.report())

    def metrics(self) -> str:
        """Return numbers about rows, drift, the promise and labels as OpenMetrics text, for ``/metrics`` of a server.

        >>> rng = np.random.default_rng(0)
        >>> x, y = rng.normal(size=(200, 3)) + 3.0 * (np.arange(200) % 2)[:, None], np.arange(200) % 2
        >>> guard = Guard(TrustHead.fit(x[:60], y[:60]).calibrate(x[60:], y[60:]), risk=False)
        >>> print(guard.metrics())
        # TYPE sepc_rows counter
        ...
        sepc_promise{sepc_promise="holds"} 1
        ...
        # EOF
        """
        return openmetrics(self.families())

    def families(self) -> list[Family]:
        """The metrics of :meth:`metrics`."""
        with self._lock:
            found = self._counts.families()
            states = [("", {"sepc_promise": name}, float(name == self.state)) for name in STATES]
            found.append(Family("sepc_promise", "stateset", "State of the promise.", states))
            if self.drift is not None:
                evidence = 0.0 - math.log(max(self.drift.p_value, 1e-300))
                about = "Evidence of drift: minus the logarithm of the anytime-valid p-value."
                found.append(Family("sepc_drift_evidence", "gauge", about, [("", {}, evidence)]))
            if self.risk is not None:
                for name, about, value in (
                    ("asked", "asked for", self._asked),
                    ("answered", "answered", self._answered),
                ):
                    text = f"Labels that were {about}."
                    found.append(Family(f"sepc_labels_{name}", "counter", text, [("_total", {}, value)]))
                row = self.risk.report().overall
                bounds = [("", {"bound": name}, getattr(row, name)) for name in ("low", "high")]
                about = "Interval of the error of the accepted rows."
                found.append(Family("sepc_accepted_error", "gauge", about, bounds))
            return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a file, without pickle; the head has a file of its own, and ``on_alarm`` is not kept."""
        with self._lock:
            arrays = _prefixed("recent.", self._recent)
            if self._collected is not None:
                arrays |= _prefixed("collected.", self._collected)
            if self._trial is not None:
                arrays |= _prefixed("trial.", self._trial.state)
            if self.drift is not None:
                arrays |= _prefixed("drift.", self.drift.arrays())
            # Numbers as arrays: another last digit of a text can be the same number.
            arrays |= _prefixed("counts.", self._counts.state()) | {"closed": self._closed}
            arrays["threshold"] = np.array([] if self.threshold is None else [self.threshold])
            about: dict[str, Any] = {"state": self.state, "window": self.window}
            about |= {"seed": self.seed, "since": self._since, "next": self._next}
            about |= {"asked": self._asked, "answered": self._answered}
            about |= {"drawn": self._drawn, "alarms": self._alarms, "restored": self._restored}
            about["head"] = _checksum(self.head)
            about["drift"] = self.drift and {"alpha": self.drift.alpha, "seed": self.drift.seed}
            about["risk"] = None
            if self.risk is not None:
                tensors, about["risk"] = self.risk.state_dict(), self.risk.metadata()
                arrays |= _prefixed("risk.", {name: t.numpy() for name, t in tensors.items() if name != "seed"})
            files.write(path, "guard", arrays, about)

    @classmethod
    def load(cls, path: str | os.PathLike[str], head: TrustHead, *, on_alarm: OnAlarm = "warn") -> Guard:
        """Load a guard that continues the stream of the saved one.

        Args:
            path: File that :meth:`save` wrote.
            head: The head of the saved guard, with the same calibration and threshold.
            on_alarm: As in :class:`Guard`.
        """
        arrays, about = files.read(path, "guard")
        if about["head"] != _checksum(head):
            raise ValueError(
                f"{os.fspath(path)!r} belongs to another head, calibration or threshold; load it with the head it was "
                "saved with, or start a new Guard."
            )
        with files.interpreting(path):
            drift = about["drift"] and DriftMonitor(head, about["drift"]["alpha"], about["drift"]["seed"])
            risk = about["risk"] and RiskMonitor.restored(about["risk"])
            if risk:
                state = {name: torch.from_numpy(values) for name, values in _part("risk.", arrays).items()}
                risk.load_state_dict({**state, "seed": torch.tensor(risk.seed)})
            options = {"on_alarm": on_alarm, "window": about["window"], "seed": about["seed"]}
            guard = cls(head, drift or False, risk or False, **options)
            if drift:
                drift.load_arrays(_part("drift.", arrays))
            guard.state, guard.threshold = about["state"], next(iter(arrays["threshold"].tolist()), None)
            guard._recent, guard._closed = _part("recent.", arrays), arrays["closed"]
            guard._collected = _part("collected.", arrays) or None
            guard._trial = _Trial(_part("trial.", arrays)) if "trial.threshold" in arrays else None
            guard._since, guard._next = about["since"], about["next"]
            guard._asked, guard._answered = about["asked"], about["answered"]
            guard._drawn, guard._counts = about["drawn"], RowMetrics.of(_part("counts.", arrays))
            guard._alarms, guard._restored = about["alarms"], about["restored"]
        return guard

    def belongs_to(self, head: TrustHead) -> bool:
        """Whether a head has the calibration, the threshold and the promise of the guard's head."""
        return _checksum(head) == _checksum(self.head)

    def __reduce__(self) -> Any:
        raise TypeError("A Guard follows one stream in one process and cannot be pickled; use save and Guard.load.")

    def _require_risk(self) -> RiskMonitor:
        if self.risk is None:
            raise RuntimeError("The guard has no risk monitor, so labels mean nothing to it; make it with risk=True.")
        return self.risk

    def _refuse_again(self, names: Int[Array, "n"]) -> None:
        """Raise ValueError for ids of rows that can be asked for or were."""
        again = np.isin(names, self._recent["id"]) | np.isin(names, self._closed)
        if self._trial is not None:
            again |= np.isin(names, self._trial.every_id)
        if self.risk is not None:
            again |= np.isin(names, self.risk.every_id)
        if again.any():
            raise ValueError(f"The ids {names[again][:5].tolist()} are those of earlier rows; give every row one id.")

    def _follow(
        self, out: HeadPrediction, rows: dict[str, Array], points: Float[Array, "B D"] | None, with_logits: bool
    ) -> None:
        """Go through rows in their order; an alarm among them begins a new epoch with the next row."""
        position, count, first = 0, len(rows["id"]), self._counts.rows
        while position < count:
            end = count
            if self._collected is not None:
                end = min(count, position + 2 * self.window - len(self._collected["id"]))
                self._collect({name: values[position:end] for name, values in rows.items()})
            elif self.drift is not None:
                rest, before = HeadPrediction(*(field[position:] for field in out)), self.drift.position
                names, where = rows["id"][position:], None if points is None else points[position:]
                found = self.drift.update_from(rest, with_logits=with_logits, ids=names, z=where)
                if found.alarm:
                    at = before if found.alarm_at is None else found.alarm_at
                    end = position + min(max(at - before, 0) + 1, len(rest.accept))
                    self._suspend("unverified", first + end)
                else:
                    self._keep({name: values[position:] for name, values in rows.items()})
            else:
                self._keep({name: values[position:] for name, values in rows.items()})
            position = end

    def _collect(self, rows: dict[str, Array]) -> None:
        """Add rows to the window and the reference of the epoch."""
        assert self._collected is not None
        before = len(self._collected["id"])
        self._collected = _joined(self._collected, rows)
        count = len(self._collected["id"])
        if before < self.window <= count and self.risk is not None:
            labels = self.head.require_calibration().labels
            present = float(labels.threshold) if self.threshold is None else self.threshold
            joint = self._collected["joint"][: self.window]
            self._trial = _Trial.of(joint, present, self.risk.risk, self.delta, self.risk.alpha)
        fresh = max(self.window - before, 0)
        self._keep({name: values[fresh:] for name, values in rows.items()})
        if count == 2 * self.window:
            if self.drift is not None:
                score, region = self._collected["score"], self._collected["region"]
                self.drift = self.drift.with_reference(score, region, self.window)
            self._collected = None

    def _keep(self, rows: dict[str, Array]) -> None:
        """Keep rows that :meth:`ask` can choose."""
        if self.risk is not None:
            joined = _joined(self._recent, rows)
            self._recent = {name: values[-_MOST_RECENT:] for name, values in joined.items()}

    def _suspend(self, state: PromiseState, row: int) -> None:
        """Begin an epoch at a row of the stream. A broken promise stays broken."""
        self._close()
        self._alarms += self.state == "holds"
        self.state = "broken" if self.state == "broken" else state
        self._since, self._collected = row, dict(_NO_ROWS)

    def _resume(self, risk: RiskMonitor) -> None:
        """End the suspension; the risk monitor starts afresh."""
        self._close()
        self._closed = np.concatenate([self._closed, risk.every_id])
        promised = self.head.promise
        self.risk = risk.afresh(groups=promised is None or promised.by is None)
        self.state, self._restored = "holds", self._counts.rows

    def _close(self) -> None:
        """Drop the tests of this epoch; labels that still arrive for them are ignored."""
        if self._trial is not None:
            self._closed = np.concatenate([self._closed, self._trial.every_id])
        self._trial, self._recent = None, dict(_NO_ROWS)

    def _answer(self, names: Int[Array, "n"], codes: Int[Array, "n"] | None) -> GuardReport:
        """Take labels (or None for labels that never come), and change the state if they say so."""
        risk, trial, before = self._require_risk(), self._trial, self.state
        mine = np.zeros(len(names), bool) if trial is None else np.isin(names, trial.every_id)
        rest = ~mine & ~np.isin(names, self._closed)
        waiting, skipped = len(self.waiting), 0
        if trial is not None:
            checked = trial.checked(names[mine], None if codes is None else codes[mine])
        if rest.any():
            if codes is None:
                risk.skip(names[rest])
            else:
                risk.update(dict(zip(names[rest].tolist(), codes[rest].tolist(), strict=True)))
        if trial is not None:
            trial.count(checked, names[mine])
        skipped = waiting - len(self.waiting) if codes is None else 0
        self._answered += waiting - len(self.waiting) - skipped
        if risk.state == "broken" and self.state != "broken":
            if self.state == "holds":
                self._suspend("broken", self._counts.rows)
            self.state = "broken"
        elif trial is not None and self.state == "unverified":
            if trial.broken:
                self.state = "broken"
            elif trial.present_holds:
                self._resume(risk)
        self._tell(before)
        return self.report()

    def _tell(self, before: PromiseState) -> None:
        """Do what ``on_alarm`` says if the promise is in another state than before, and not kept."""
        if self.state in ("holds", before) or self.on_alarm == "refuse":
            return
        if callable(self.on_alarm):
            self.on_alarm(self.report())
        else:
            warn_user(self.report().sentence)


class _Trial:
    """Tests of thresholds by labels of the rows of an epoch; the docstring of the module has the proof.

    ``state`` holds, for each of K thresholds in descending order: the threshold, the share of delta that starts there
    (0 for no start), the share of the window's rows beyond it, their expected error, the logarithms of the capital of
    each bet and their peak, counted labels and errors; ``present`` is the place of the present threshold (-1 if no row
    is beyond it), ``above`` and ``above_peak`` belong to bets that its risk is broken. The queue holds the rows that
    were asked for in their order (id, label, answer, level: the first threshold that a row reaches), with p, the place
    of the threshold of their call, and the numbers of rows since the last entry that were not asked for.
    """

    def __init__(self, state: dict[str, Array]) -> None:
        self.state = state

    @classmethod
    def of(cls, joint: Float[Array, "w"], present: float, risk: float, delta: float, alpha: float) -> _Trial:
        """Fix thresholds and starts by the joint scores of the window."""
        ordered = np.sort(joint)[::-1]
        places = np.ceil(_COVERAGES * len(joint)).astype(int) - 1
        # A score of zero marks a row without a label, which is never accepted.
        least = float(np.min(joint[joint > 0], initial=1.0))
        found = np.append(np.maximum(ordered[places], least), present if (joint >= present).any() else least)
        threshold = np.unique(found)[::-1]
        beyond = joint >= threshold[:, None]
        coverage = beyond.mean(axis=1)
        expected = (beyond * (1.0 - joint)).sum(axis=1) / np.maximum(beyond.sum(axis=1), 1)
        at = np.flatnonzero(threshold == present)
        low = int(np.flatnonzero(expected <= risk).max(initial=0))
        starts = [int(np.abs(coverage - part * coverage[low]).argmin()) for part in _STARTS] + at[:1].tolist()
        places = np.unique(starts)
        share = np.zeros(len(threshold))
        share[places] = 1.0 / len(places)
        bets = log_below(np.zeros(1), np.ones(1), np.array([risk])).shape[2]
        gains = log_above(np.zeros(1), np.ones(1), np.array([risk])).shape[2]
        whole = np.zeros(len(threshold), np.int64)
        queue = dict.fromkeys(("queue.id", "queue.label", "queue.level", "queue.target"), np.zeros(0, np.int64))
        done = {"done_id": np.zeros(0, np.int64), "done_label": np.zeros(0, np.int64)}
        return cls(
            {
                "threshold": threshold,
                "share": share,
                "coverage": coverage,
                "expected": expected,
                "below": np.zeros((len(threshold), bets)),
                "peak": np.zeros(len(threshold)),
                "labels": whole,
                "errors": whole.copy(),
                "present": np.array(at[0] if len(at) else -1),
                "above": np.zeros(gains),
                "above_peak": np.array(0.0),
                "levels": np.array([risk, delta, alpha]),
                "done_answer": np.zeros(0, np.int8),
                **done,
                **queue,
                "queue.answer": np.zeros(0, np.int8),
                "queue.p": np.zeros(0),
                "queue.gap": np.zeros((0, len(threshold)), np.int64),
            }
        )

    @property
    def ids(self) -> Int[Array, "n"]:
        """Ids of rows whose labels are waited for."""
        return self.state["queue.id"][self.state["queue.answer"] == _WAITING]

    @property
    def every_id(self) -> Int[Array, "n"]:
        """Ids of all rows that were asked for."""
        named = self.state["queue.id"]
        return np.concatenate([self.state["done_id"], named[named >= 0]])

    @property
    def broken(self) -> bool:
        """Whether labels show that the present threshold breaks the risk."""
        return bool(self.state["above_peak"] >= -math.log(self.state["levels"][2]))

    @property
    def present_holds(self) -> bool:
        """Whether labels show that the present threshold keeps the risk."""
        last, place = self.passed(), int(self.state["present"])
        return last is not None and place >= 0 and self._reaches(place)

    def _limit(self, start: int) -> float:
        return -math.log(self.state["levels"][1] * self.state["share"][start])

    def _runs(self) -> list[tuple[int, int]]:
        """Starts with the places after the last threshold that passes in their sequences."""
        found = []
        for start in np.flatnonzero(self.state["share"]).tolist():
            failed = np.flatnonzero(self.state["peak"][start:] < self._limit(start))
            found.append((start, start + (int(failed[0]) if len(failed) else len(self.state["peak"]) - start)))
        return found

    def _reaches(self, place: int) -> bool:
        return any(start <= place < end for start, end in self._runs())

    def passed(self) -> int | None:
        """Place of the lowest threshold that passes, or None."""
        ends = [end - 1 for start, end in self._runs() if end > start]
        return max(ends) if ends else None

    def forecast(self) -> tuple[int, int | None, float]:
        """Place of the threshold to ask beyond, about how many labels restore the promise, and the coverage then."""
        state, risk = self.state, self.state["levels"][:1]
        passed = self.passed()
        weight = state["labels"] + _PRIOR_LABELS
        error = ((state["errors"] + _PRIOR_LABELS * state["expected"]) / weight)[:, None]
        right, wrong = (log_below(np.array([z]), np.ones(1), risk)[0] for z in (0.0, 1.0))
        rate = (1.0 - error) * right + error * wrong
        coverage = state["coverage"]
        best = np.full(len(coverage), np.inf)
        for start in np.flatnonzero(state["share"]).tolist():
            missing = self._limit(start) + math.log(rate.shape[1]) - state["below"]
            need = np.where(rate > 0, np.maximum(missing, 0.0) / np.where(rate > 0, rate, 1.0), np.inf).min(axis=1)
            need = np.where(state["peak"] >= self._limit(start), 0.0, need)
            for place in range(start, len(coverage)):
                chain = need[start : place + 1] * coverage[place] / np.maximum(coverage[start : place + 1], 1e-9)
                best[place] = min(best[place], float(chain.max()))
        if passed is not None:
            best[: passed + 1] = np.inf  # it can be restored there already
        target = int(np.argmin(best / np.maximum(coverage, 1e-9)))
        if passed is not None:
            return (target if np.isfinite(best[target]) else passed), 0, float(coverage[passed])
        labels = math.ceil(best[target]) if np.isfinite(best[target]) else None
        return target, labels, math.nan if labels is None else float(coverage[target])

    def ask(self, rows: Mapping[str, Array], budget: int, coins: Float[Array, "n"]) -> Int[Array, "m"]:
        """Register rows, and return the ids of those to label: evenly among the rows beyond one threshold."""
        state, target = self.state, self.forecast()[0]
        level = np.searchsorted(-state["threshold"], -rows["joint"], side="left")
        inside = level <= target
        if not inside.any():
            return np.zeros(0, np.int64)
        names, label, level, coins = (values[inside] for values in (rows["id"], rows["label"], level, coins))
        p = min(1.0, budget / len(names))
        at = np.flatnonzero(coins < p)
        again = np.isin(names[at], self.every_id)
        if again.any():
            raise ValueError(f"The ids {names[at][again][:5].tolist()} were asked for already; give every row one id.")
        # Rows beyond each threshold that were not asked for, between the entries; the last entry is the rest.
        beyond = level[:, None] <= np.arange(len(state["threshold"]))
        beyond[at] = False
        total = np.concatenate([np.zeros((1, beyond.shape[1]), np.int64), beyond.cumsum(axis=0)])
        gap = np.diff(total[np.concatenate([[0], at, [len(names)]])], axis=0)
        count = len(at) + 1
        new = {"id": np.append(names[at], -1), "label": np.append(label[at], -1), "level": np.append(level[at], -1)}
        new |= {"target": np.full(count, target), "p": np.full(count, p), "gap": gap}
        new["answer"] = np.append(np.full(len(at), _WAITING, np.int8), np.int8(_RIGHT))
        for name, values in new.items():
            state[f"queue.{name}"] = np.concatenate([state[f"queue.{name}"], values])
        self._fold()
        return names[at]

    def checked(self, names: Int[Array, "n"], codes: Int[Array, "n"] | None) -> Int[Array, "n"]:
        """The answers to rows of this trial; an error if a row has another answer already."""
        known = np.concatenate([self.state["done_id"], self.state["queue.id"]])
        order = np.argsort(known, kind="stable")
        place = order[np.searchsorted(known, names, sorter=order)]
        label, answer = (
            np.concatenate([self.state[f"done_{name}"], self.state[f"queue.{name}"]])[place]
            for name in ("label", "answer")
        )
        found = np.full(len(names), _SKIPPED) if codes is None else np.where(codes == label, _RIGHT, _WRONG)
        counted = place < len(self.state["done_id"])
        other = (answer != found) & (answer != _WAITING) & ((answer != _SKIPPED) | counted)
        other &= ~(counted & (answer == _SKIPPED))
        if other.any():
            raise ValueError(
                f"The ids {names[other][:5].tolist()} have another label already, and a test cannot take back what it "
                "has shown. Keep the first labels."
            )
        return found

    def count(self, answers: Int[Array, "n"], names: Int[Array, "n"]) -> None:
        """Take checked answers, and count all rows before the first one that waits."""
        queue = self.state["queue.id"]
        order = np.argsort(queue, kind="stable")
        place = np.searchsorted(queue, names, sorter=order).clip(max=max(len(queue) - 1, 0))
        if len(queue):
            here = queue[order[place]] == names
            self.state["queue.answer"][order[place[here]]] = answers[here]
            self._fold()

    def _fold(self) -> None:
        """Count the entries before the first one that waits for its label, and drop them from the queue."""
        state = self.state
        waits = state["queue.answer"] == _WAITING
        stop = int(np.argmax(waits)) if waits.any() else len(waits)
        if not stop:
            return
        queue = {name: values[:stop] for name, values in state.items() if name.startswith("queue.")}
        for name in queue:
            state[name] = state[name][stop:]
        answer, p, level, target = (queue[f"queue.{name}"] for name in ("answer", "p", "level", "target"))
        named, places = queue["queue.id"] >= 0, np.arange(len(state["threshold"]))
        for name in ("id", "label", "answer"):
            state[f"done_{name}"] = np.concatenate([state[f"done_{name}"], queue[f"queue.{name}"][named]])
        tested = places <= target[:, None]
        mine = tested & named[:, None] & (level[:, None] <= places)
        gap = np.where(tested, queue["queue.gap"], 0)
        wrong = answer == _WRONG
        state["labels"] = state["labels"] + (mine & (answer != _SKIPPED)[:, None]).sum(axis=0)
        state["errors"] = state["errors"] + (mine & wrong[:, None]).sum(axis=0)
        risk = state["levels"][:1]
        nothing = log_below(np.zeros(stop), p, risk)
        asked = log_below(np.where(answer >= _WRONG, 1.0 / p, 0.0), p, risk)
        path = state["below"] + (gap[:, :, None] * nothing + mine[:, :, None] * asked).cumsum(axis=0)
        state["below"] = path[-1]
        state["peak"] = np.maximum(state["peak"], _log_mean(path).max(axis=0))
        place = int(state["present"])
        if place >= 0:
            nothing, asked = (log_above(z, p, risk)[:, 0] for z in (np.zeros(stop), np.where(wrong, 1.0 / p, 0.0)))
            path = state["above"] + (gap[:, place, None] * nothing + mine[:, place, None] * asked).cumsum(axis=0)
            state["above"] = path[-1]
            state["above_peak"] = np.maximum(state["above_peak"], _log_mean(path).max())


def _log_mean(logs: Float[Array, "... J"]) -> Any:
    """Logarithm of the mean over bets."""
    return np.logaddexp.reduce(logs, axis=-1) - math.log(logs.shape[-1])


def _columns(out: HeadPrediction, names: Int[Array, "B"]) -> dict[str, Array]:
    """What the guard keeps of predictions."""
    fields = {"joint": out.joint, "confidence": out.confidence, "score": out.nonconformity}
    fields |= {"label": out.network_label, "region": out.nearest, "accept": out.accept}
    found = {name: field.detach().cpu().numpy().astype(_ROWS[name]) for name, field in fields.items()}
    found["joint"] = np.nan_to_num(found["joint"], nan=0.0)
    found["confidence"] = np.nan_to_num(found["confidence"], nan=0.0)
    found["score"] = np.nan_to_num(found["score"], nan=np.inf)
    return {"id": names, **found}


def _predictions(rows: Mapping[str, Array]) -> HeadPrediction:
    """Predictions with those fields that a risk monitor reads."""
    fields = dict.fromkeys(HeadPrediction._fields, torch.zeros(len(rows["id"])))
    given = {"network_label": "label", "nearest": "region", "confidence": "confidence", "accept": "accept"}
    fields |= {field: torch.from_numpy(rows[name]) for field, name in given.items()}
    whole = torch.zeros(len(rows["id"]), dtype=torch.int64)
    return HeadPrediction(**fields | dict.fromkeys(("label", "rule", "runner_up"), whole))


def _joined(one: Mapping[str, Array], other: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.concatenate([one[name], other[name]]) for name in _ROWS}


def _prefixed(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {prefix + name: values for name, values in arrays.items()}


def _part(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}


def _checksum(head: TrustHead) -> str:
    """SHA-256 of the ranked points, the thresholds and the promise of a head."""
    labels = head.require_calibration().labels
    tables = (labels.threshold, labels.class_threshold, labels.region_threshold)
    parts = [values.double().cpu().numpy() for values in (labels.ranked_joint, *tables)]
    found = hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts))
    found.update(str(head.promise).encode())
    return found.hexdigest()
