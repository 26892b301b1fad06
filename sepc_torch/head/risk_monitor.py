r"""Risk over time: does the error among accepted rows stay below the risk? Late labels of some rows tell.

:class:`RiskMonitor` keeps a confidence sequence of the error among accepted rows by betting (Waudby-Smith and Ramdas
2024; Podkopaev and Ramdas 2021), from labels that were asked for with known probabilities (Xu, Karampatziakis and
Mineiro 2024). Row i is wrong (:math:`L_i = 1`) or right (0) and is asked for with the probability :math:`p_i`;
:math:`Z_i = L_i / p_i` if it was asked for and 0 if not. For a mean m, the capital of a bet is multiplied by
:math:`1 + \theta f_i (Z_i - m)` (a bet that the error is above m) or by :math:`1 + \theta f_i (m - Z_i)` (below m),
where :math:`f_i \le p_i` is the least probability of the row's batch. Bets are fixed in advance, and their capital is
averaged.

Claims, for rows in the order in which they were registered, at all times at once; :math:`\mu_i` is the probability that
row i is wrong, given all earlier rows.

(a) If every :math:`\mu_i \le r`, the state is ever *broken* with probability at most :math:`\alpha`.

(b) The state *holds* appears while the average error so far is at least r with probability at most :math:`\alpha / 2`,
even if the error changes. The average is :math:`\bar\mu_n = \sum_{i \le n} f_i \mu_i / \sum_{i \le n} f_i`, the plain
one if batches have the same f.

(c) If the error is constant, the interval always holds it, with probability :math:`1 - \alpha`.

Proof. (1) :math:`p_i` depends on row i and on earlier rows, :math:`f_i` on the budget and the size of the batch. The
coin that decides is independent of everything. So :math:`E[Z_i \mid \text{earlier rows}] = \mu_i`. (2) No factor is
negative, since :math:`0 \le Z_i \le 1 / f_i`, :math:`\theta m \le 1/2` above, and :math:`\theta \le 1` below. If all
:math:`\mu_i \le r`, the capital above m = r is a supermartingale that starts at one; so are its average over bets and
the mixture over starting times (:func:`~sepc_torch.head.drift.bet`), which finds a late change. By Ville's inequality
the mean of the two ever reaches :math:`1 / \alpha` with probability at most :math:`\alpha`. (3) The capital below m,
divided by :math:`\prod_i (1 + \theta f_i (m - \mu_i))`, is a martingale. The product is at most
:math:`\exp(\theta \sum_i f_i (m - \mu_i))`, hence at most 1 whenever :math:`\bar\mu_n \ge m`. So the capital ever
reaches :math:`2 / \alpha` at such a time with probability at most :math:`\alpha / 2`; m = r is (b). (4) If all
:math:`\mu_i = \mu`, the capital above the least :math:`m \ge \mu` of the grid and the capital below the largest
:math:`m \le \mu` ever reach :math:`2 / \alpha` with probability at most :math:`\alpha / 2` each. The capital above
falls with m and the capital below grows, so otherwise the interval holds :math:`\mu`. (5) The capital after n rows
depends on the first n rows only, and a row is counted when all earlier labels are there. Late labels only choose the
times n at which the monitor looks, *even if wrong rows are labelled earlier or later than right ones*. (6) Factors
above grow with :math:`L_i`, factors below fall. So a label that never comes (:meth:`RiskMonitor.skip`) counts as right
above and as wrong below, and the claims remain. (7) With G groups, all rows together get :math:`\alpha / 2` and each
group :math:`\alpha / (2 G)`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data import files
from sepc_torch.data.labels import label_array, label_codes
from sepc_torch.data.options import check_choice, check_count
from sepc_torch.data.text import printable, text_table
from sepc_torch.head.drift import bet, uniforms
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.promises.conformal import check_share
from sepc_torch.head.promises.groups import observed_groups
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.shapes import Array, Bool, Float, Int

State = Literal["holds", "open", "broken"]

# Bets above a mean: the best one is about the relative excess of the error, from a sixteenth to sixteen times the mean.
_ABOVE = 2.0 ** np.arange(-4, 5)
# Bets below a mean: the best one is about the relative deficit, which is at most one.
_BELOW = np.array([1.0, 0.75, 0.5, 0.25, 0.125, 0.0625])
# Means of the interval: sixteen in a factor of two (steps of 4 %), from a 64th of the risk to 1.
_STEPS, _OCTAVES = 16, 6
# The typical score of rows is known from rows before; at first it counts as this many rows with the error of the risk.
_PRIOR_ROWS = 10
# Coins are other random numbers than those of a drift monitor with the same seed, on which an alarm depends.
_COINS = 2**32
# Entries that are counted at once: some megabytes.
_CHUNK = 1024
_WAITING, _RIGHT, _WRONG, _SKIPPED = -1, 0, 1, 2


def log_above(z: Float[Array, "T"], f: Float[Array, "T"], m: Float[Array, "M"]) -> Float[Array, "T M J"]:
    r"""Logarithms of :math:`1 + \theta f (z - m)` with :math:`\theta = \min(\theta_j, 1 / (2 m))`, for J bets.

    >>> log_above(np.array([0.0, 1.0]), np.ones(2), np.array([0.5]))[:, 0, -1].round(2)
    array([-0.69,  0.41])
    """
    theta = np.minimum(_ABOVE, 0.5 / m[:, None])
    return np.log1p(f[:, None, None] * theta * (z[:, None, None] - m[:, None]))


def log_below(z: Float[Array, "T"], f: Float[Array, "T"], m: Float[Array, "M"]) -> Float[Array, "T M J"]:
    r"""Logarithms of :math:`1 + \theta_j f (m - z)`, for J bets.

    >>> log_below(np.array([0.0, 1.0]), np.ones(2), np.array([0.5]))[:, 0, 0].round(2)
    array([ 0.41, -0.69])
    """
    return np.log1p(f[:, None, None] * _BELOW * (m[:, None] - z[:, None, None]))


def asking_probabilities(
    score: Float[Array, "T"], share: float, explore: float, typical: tuple[float, float]
) -> tuple[Float[Array, "T"], float]:
    r"""Probabilities :math:`p_i = \min(1, \bar p (e + (1 - e) s_i / \bar s_i))`, and their bound :math:`e \bar p`.

    :math:`\bar s_i` is the mean score of the rows before i, so that :math:`p_i` depends on no later row.

    Args:
        score: Scores :math:`s_i` of the rows, in their order.
        share: Share :math:`\bar p` of the rows to ask for.
        explore: Share e of the questions that are spread evenly; all of them as :math:`\bar p` goes to 1.
        typical: Sum and number of the scores of earlier rows.

    >>> asking_probabilities(np.array([1.0, 3.0]), 0.1, 0.5, (1.0, 1.0))
    (array([0.1, 0.2]), 0.05)
    """
    explore = max(explore, share)
    before = (typical[0] + np.cumsum(score) - score) / (typical[1] + np.arange(len(score)))
    return np.minimum(1.0, share * (explore + (1.0 - explore) * score / before)), share * explore


class GroupRisk(NamedTuple):
    """The error among accepted rows of one group, or of all rows (group None).

    Attributes:
        group: Name of the group.
        state: ``"holds"``, ``"open"`` or ``"broken"``.
        rows: Number of accepted rows that are counted, with those that were not asked for.
        labels: Number of labels among them.
        error: Estimate of the share of wrong labels; NaN before the first row.
        low, high: Ends of the interval of this share.
    """

    group: Any
    state: State
    rows: int
    labels: int
    error: float
    low: float
    high: float


class RiskReport(NamedTuple):
    """State of a risk monitor.

    Attributes:
        state: ``"broken"`` if the error was above the risk, in all rows or in a group; ``"holds"`` if the intervals of
            all rows and of all groups lie below the risk; else ``"open"``.
        risk: The risk.
        p_value: Anytime-valid p-value: while the risk is kept, it *ever* falls to u with probability at most u.
        overall: The error among all accepted rows.
        groups: The error in each group.
        waiting: Number of labels that are asked for and not here.
        held: Number of labels that are here and not counted, because an earlier row waits for its label.
        skipped: Number of labels that will not come.
    """

    state: State
    risk: float
    p_value: float
    overall: GroupRisk
    groups: tuple[GroupRisk, ...]
    waiting: int
    held: int
    skipped: int

    @property
    def sentence(self) -> str:
        """The state in one sentence."""
        all_rows, risk = self.overall, f"the risk of {self.risk:.3g}"
        if self.state == "broken":
            where = ["all rows"] if all_rows.state == "broken" else []
            where += [f"group {printable(row.group)}" for row in self.groups if row.state == "broken"]
            start = f"{risk.capitalize()} is broken in {', '.join(where)} (p = {self.p_value:.2g})"
        elif self.state == "holds":
            start = f"{risk.capitalize()} holds"
        else:
            start = f"It is open whether {risk} holds"
        return (
            f"{start}: the error of the accepted rows is between {all_rows.low:.3g} and {all_rows.high:.3g}, "
            f"by {all_rows.labels} labels for {all_rows.rows} rows."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain Python values."""
        return {**self._asdict(), "overall": self.overall._asdict(), "groups": [row._asdict() for row in self.groups]}

    def __str__(self) -> str:
        lines = [self.sentence]
        if self.waiting:
            lines.append(f"{self.waiting} labels are waited for, and {self.held} wait behind them.")
        if self.groups:
            lines.append(text_table(list(GroupRisk._fields), [list(row) for row in self.groups]))
        return "\n".join(lines)


class RiskMonitor:
    """Watches by labels that arrive later whether the error among accepted rows stays below a risk.

    :meth:`ask` chooses rows to label, :meth:`expect` registers rows that all get a label, and :meth:`update` takes the
    labels by id, in any order. Rows are counted in the order in which they were registered, so that it does not matter
    when labels arrive (the docstring of the module has the proof). The state is

    - ``"broken"`` once the error was above the risk: with probability at most ``alpha`` if the risk is always kept;
    - ``"holds"`` while the whole interval of the average error so far lies below the risk;
    - ``"open"`` otherwise.

    Labels of rows that somebody else chose (``update(out, y)``) count as if all rows were labelled: the choice must not
    depend on whether a label is right. Complaints of users are no such labels.

    Args:
        head: The head whose accepted rows are watched; it gives the classes and the default of ``risk``. Without a
            head, labels are the codes of ``out.network_label``.
        risk: The allowed error among accepted rows; by default that of the head's promise.
        alpha: Probability of *ever* being ``"broken"`` although the risk is kept, over all rows and groups together.
        groups: Groups in each of which the risk must hold too: ``"predicted"`` classes or ``"region"`` of a head, or
            names of groups whose codes (0, 1, ...) come with the rows. By default there are none. Classes or regions
            that share a promise of the head (``accept_at(by=...)``) are one group.
        seed: Seed of the random choice of rows; workers need different ones.

    >>> rng = np.random.default_rng(0)
    >>> y = np.arange(2700) % 2
    >>> x = rng.normal(size=(2700, 4)) + 2.0 * y[:, None]
    >>> head = TrustHead.fit(x[:200], y[:200]).calibrate(x[200:700], y[200:700])
    >>> found = head.accept_at(risk=0.1)
    >>> monitor = RiskMonitor(head)
    >>> chosen = monitor.ask(head.judge(x[700:]), budget=400, ids=range(2000))
    >>> monitor.update(chosen, y[700:][chosen]).state
    'holds'
    """

    def __init__(
        self,
        head: TrustHead | None = None,
        risk: float | None = None,
        alpha: float = 0.05,
        groups: Literal["predicted", "region"] | Sequence[Any] | None = None,
        seed: int = 0,
    ) -> None:
        if risk is None:
            if head is None or head.promise is None or head.promise.risk is None:
                raise ValueError(
                    "There is no promised risk to watch: pass risk=, or call head.accept_at(risk=...) first."
                )
            risk = head.promise.risk
        self.risk, self.alpha = check_share(risk, "risk"), check_share(alpha, "alpha")
        self.seed = check_count(seed, "seed")
        self.classes: list[Any] | None = None if head is None else list(head.classes)
        self.by = groups if isinstance(groups, str) else None if groups is None else "given"
        self._group_of = np.zeros(0, np.int64)  # group of each class or region
        if isinstance(groups, str):
            check_choice("groups", groups, ("predicted", "region"))
            if head is None:
                raise ValueError(f"groups={groups!r} needs a head; without one, pass the names of the groups.")
            members, self._group_of = _groups_of(head, self.by)
            groups = [names[0] if len(names) == 1 else ", ".join(map(str, names)) for names in members]
        self.groups: tuple[Any, ...] = () if groups is None else tuple(map(_plain, groups))
        if len(set(self.groups)) < len(self.groups) or (groups is not None and not self.groups):
            raise ValueError(f"groups must name each group once and at least one; got {self.groups[:10]}.")
        steps = np.arange(-_OCTAVES * _STEPS, math.ceil(-math.log2(self.risk) * _STEPS))
        self._means = self.risk * 2.0 ** (steps / _STEPS)
        self._at_risk = _OCTAVES * _STEPS
        self._state, self._queue = self._fresh_state(), self._fresh_queue()
        self._counted = 0
        self._order: Int[Array, "n"] | None = None

    def ask(
        self, out: HeadPrediction, budget: int, ids: Any, *, groups: Any = None, explore: float = 0.5
    ) -> Int[Tensor, "n"]:
        r"""Choose accepted rows to label, and register all accepted rows; return the positions of the chosen rows.

        Each row is chosen by a coin, with a probability that grows with :math:`\sqrt{1 - \mathrm{confidence}}`: this
        makes the variance of the error's estimate least, if confidences are right. The monitor stays valid if they are
        wrong. Pass every row of the stream once: rows that were not chosen count too.

        Args:
            out: Predictions of the head, in the order of the stream.
            budget: Expected number of chosen rows, about. It must not depend on these rows.
            ids: (B,) integers from 0 that name the rows; each id once.
            groups: (B,) codes of groups, if the monitor has names of groups.
            explore: Share of the budget that is spread evenly, above 0. With 1 all rows are alike, which shows soonest
                that the risk holds if errors are very rare; with less, errors of unsure rows are found sooner.
        """
        budget = check_count(budget, "budget", least=1)
        if explore != 1.0:
            explore = check_share(explore, "explore")
        rows = self._accepted(out, ids, groups)
        if len(rows.position) == 0:
            return torch.empty(0, dtype=torch.int64)
        confidence = out.confidence.detach().double().cpu().numpy()[rows.position]
        score = np.sqrt(1.0 - np.nan_to_num(confidence, nan=0.0).clip(0.0, 1.0))
        typical, state = _PRIOR_ROWS * math.sqrt(self.risk), self._state
        known = (typical + float(state["score_sum"]), _PRIOR_ROWS + float(state["drawn"]))
        share = min(1.0, budget / len(score))
        p, least = asking_probabilities(score, share, explore, known)
        chosen = uniforms(_COINS + self.seed, int(state["drawn"]), len(score)) < p
        state["drawn"] += len(score)
        state["score_sum"] += score.sum()
        self._register(rows, p, least, chosen)
        return torch.from_numpy(rows.position[chosen])

    def expect(self, out: HeadPrediction, ids: Any, *, groups: Any = None) -> None:
        """Register accepted rows that will all get a label, as if :meth:`ask` had chosen each of them.

        Args:
            out: Predictions of the head, in the order of the stream; rows that are not accepted are left out.
            ids: (B,) integers from 0 that name the rows; each id once.
            groups: (B,) codes of groups, if the monitor has names of groups.
        """
        rows = self._accepted(out, ids, groups)
        self._register(rows, np.ones(len(rows.position)), 1.0, np.ones(len(rows.position), bool))

    def update(self, ids: Any, y: Any = None, *, groups: Any = None) -> RiskReport:
        """Take labels of registered rows, in any order; return the report. An error leaves the monitor unchanged.

        A label that was given before changes nothing, so that an annotation file can be read again. A label that is not
        one of the head's classes makes a prediction wrong.

        Args:
            ids: Ids of rows that were asked for or expected, with labels ``y``; or a dictionary from ids to codes of
                classes, as ``read_answers`` returns; or predictions of rows whose labels are all here, which are
                registered and counted after all rows before. Of predictions, rows that are not accepted are left out.
            y: The labels, as in :meth:`TrustHead.calibrate`; for a monitor without a head, their codes.
            groups: Codes of groups of predictions, if the monitor has names of groups.
        """
        if isinstance(ids, HeadPrediction):
            rows = self._accepted(ids, None, groups)
            wrong = self._codes(y, len(ids.accept))[rows.position] != rows.label
            self._register(rows, np.ones(len(wrong)), 1.0, np.ones(len(wrong), bool))
            self._queue["answer"][len(self._queue["id"]) - len(wrong) :] = wrong
        else:
            names = checked_ids(list(ids) if isinstance(ids, Mapping) else ids)
            codes = integers(list(ids.values()), "codes") if isinstance(ids, Mapping) else self._codes(y, len(names))
            place, known = self._find(names)
            answer = (codes[known] != self._queue["label"][place]).astype(np.int8)
            self._refuse_unknown(names[~known], codes[~known])
            before = self._queue["answer"][place]
            self._refuse_other(names[known], (before != answer) & (before != _WAITING) & (before != _SKIPPED))
            fresh = place >= self._counted
            self._queue["answer"][place[fresh]] = answer[fresh]
        self._count()
        return self.report()

    def skip(self, ids: Any) -> RiskReport:
        """Give up labels that will never arrive, so that later rows can be counted; return the report.

        Such a row counts as right in the evidence that the risk is broken, and as wrong in the evidence that it holds.
        """
        names = checked_ids(ids)
        place, known = self._find(names)
        if not known.all():
            raise ValueError(f"The ids {names[~known][:5].tolist()} do not wait for a label.")
        self._refuse_other(names, (self._queue["answer"][place] == _RIGHT) | (self._queue["answer"][place] == _WRONG))
        self._queue["answer"][place] = _SKIPPED
        self._count()
        return self.report()

    @property
    def waiting(self) -> Int[Tensor, "n"]:
        """Ids of the rows whose labels are waited for, in the order in which they were asked for."""
        return torch.from_numpy(self._queue["id"][self._queue["answer"] == _WAITING])

    @property
    def state(self) -> State:
        """``"holds"``, ``"open"`` or ``"broken"``."""
        return self.report().state

    @property
    def interval(self) -> tuple[float, float]:
        """Interval of the error of the accepted rows; a constant error always lies in it with probability 1 - alpha."""
        overall = self._row(0)
        return overall.low, overall.high

    def report(self) -> RiskReport:
        """Return the report on all rows that are counted."""
        rows = [self._row(s) for s in range(1 + len(self.groups))]
        states = [row.state for row in rows]
        p = [math.exp(-max(peak, 0.0)) * self.alpha / self._level(s) for s, peak in enumerate(self._state["peak"])]
        later = self._queue["answer"][self._counted :][self._queue["weight"][self._counted :] > 0]
        return RiskReport(
            "broken" if "broken" in states else "holds" if set(states) == {"holds"} else "open",
            *(self.risk, min(1.0, *p), rows[0], tuple(rows[1:])),
            waiting=int((later == _WAITING).sum()),
            held=int((later != _WAITING).sum()),
            skipped=int(self._state["skipped"]),
        )

    def __str__(self) -> str:
        return str(self.report())

    def merge(self, *others: RiskMonitor) -> RiskMonitor:
        """Return a monitor of several workers' streams; further calls of it continue the first stream.

        The claims hold at all times at which the workers are merged if their streams are independent and the times at
        which labels arrive do not depend on whether they are right. Labels that other workers wait for are not in the
        merged monitor: give them to these workers and merge again. Alarms of single workers do not count.
        """
        everyone = (self, *others)
        if len({id(monitor) for monitor in everyone}) < len(everyone):
            raise ValueError("A monitor is given twice; its rows would count twice. Pass each worker's monitor once.")
        if any(monitor.metadata() | {"seed": 0} != self.metadata() | {"seed": 0} for monitor in others):
            raise ValueError("Monitors of another risk, alpha, classes or groups cannot be merged.")
        merged = RiskMonitor.restored(self.metadata())
        merged.load_state_dict(self.state_dict())
        for name in ("rows", "labels", "errors", "skipped", "above", "below"):
            merged._state[name] = np.sum([monitor._state[name] for monitor in everyone], axis=0)
        for name in ("late", "late_seen"):
            merged._state[name] = np.concatenate([monitor._state[name] for monitor in everyone])
        plain = _log_mean(merged._state["above"][:, self._at_risk], -1)
        late = _log_mean(_log_late(merged._state["late"], merged._state["late_seen"]), 0)
        merged._state["peak"] = _log_mean(np.stack([plain, late]), 0)
        return merged

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as tensors: some ten kilobytes per group, and some ten bytes per label."""
        arrays = {**self._state, **{f"queue.{name}": values for name, values in self._queue.items()}}
        return {name: torch.from_numpy(np.array(v)) for name, v in arrays.items()} | {
            "counted": torch.tensor(self._counted),
            "seed": torch.tensor(self.seed),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state of :meth:`state_dict` of a monitor with the same risk, alpha, classes and groups."""
        fresh = {**self._fresh_state(), **{f"queue.{name}": values for name, values in self._fresh_queue().items()}}
        for name, values in {**fresh, "counted": np.array(0), "seed": np.array(0)}.items():
            free = 0 if name in ("above", "below", "rows", "labels", "errors", "peak") else 1  # workers, rows or none
            if name not in state or state[name].shape[free:] != values.shape[free:]:
                given = tuple(state[name].shape) if name in state else "nothing"
                raise ValueError(
                    f"The state of {name!r} should have a shape that ends in {values.shape[free:]}, got {given}; load "
                    "the state of a monitor with the same risk and groups."
                )
        arrays = {name: state[name].cpu().numpy().copy() for name in fresh}
        self._queue = {name: arrays.pop(f"queue.{name}") for name in self._queue}
        self._state, self._counted, self._order = arrays, int(state["counted"]), None
        self.seed = int(state["seed"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a file, with the risk, alpha, classes and groups."""
        arrays = {name: tensor.numpy() for name, tensor in self.state_dict().items() if name != "seed"}
        files.write(path, "risk_monitor", arrays, self.metadata())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RiskMonitor:
        """Load a monitor that continues the stream of the saved one."""
        arrays, metadata = files.read(path, "risk_monitor")
        with files.interpreting(path):
            monitor = cls.restored(metadata)
            state = {name: torch.from_numpy(array) for name, array in arrays.items()}
            monitor.load_state_dict({**state, "seed": torch.tensor(monitor.seed)})
        return monitor

    def metadata(self) -> dict[str, Any]:
        """Return the options, for a file."""
        about = {"risk": self.risk, "alpha": self.alpha, "seed": self.seed, "by": self.by}
        return about | {"groups": list(self.groups), "classes": self.classes, "group_of": self._group_of.tolist()}

    @classmethod
    def restored(cls, metadata: Mapping[str, Any]) -> RiskMonitor:
        """Return a new monitor with given options, without the head."""
        monitor = cls(None, metadata["risk"], metadata["alpha"], metadata["groups"] or None, metadata["seed"])
        monitor.by, monitor.classes = metadata["by"], metadata["classes"]
        monitor._group_of = np.array(metadata["group_of"], np.int64)
        return monitor

    def afresh(self, groups: bool = True) -> RiskMonitor:
        """Return a monitor without rows and with the options of this one, whose coins go on where these end.

        Coins that were thrown before would depend on the labels that led to the new start.
        """
        about = self.metadata()
        fresh = RiskMonitor.restored(about if groups else about | {"by": None, "groups": [], "group_of": []})
        for name in ("drawn", "score_sum"):
            fresh._state[name] = self._state[name].copy()
        return fresh

    def _fresh_state(self) -> dict[str, Array]:
        sequences = 1 + len(self.groups)
        return {
            "rows": np.zeros(sequences, np.int64),
            "labels": np.zeros(sequences, np.int64),
            "errors": np.zeros((sequences, 2)),  # the sums of f Z and of f
            "skipped": np.array(0),
            # Logarithms of the capital of each bet at each mean.
            "above": np.zeros((sequences, len(self._means), len(_ABOVE))),
            "below": np.zeros((sequences, len(self._means), len(_BELOW))),
            # Bets above the risk that start later, by worker, and the entries they have seen.
            "late": np.full((1, sequences, len(_ABOVE)), -np.inf),
            "late_seen": np.zeros((1, sequences), np.int64),
            "peak": np.zeros(sequences),
            "drawn": np.array(0),
            "score_sum": np.array(0.0),
            # Rows that were counted and left the queue, so that repeated labels are known.
            "done_id": np.zeros(0, np.int64),
            "done_label": np.zeros(0, np.int64),
            "done_answer": np.zeros(0, np.int8),
        }

    @staticmethod
    def _fresh_queue() -> dict[str, Array]:
        """Entries in the order of the stream: a row that was asked for, or the end of a batch (weight 0).

        ``gap`` and ``group_gap`` are the numbers of rows before the entry, since the last one, that were not asked for.
        """
        empty = dict.fromkeys(("id", "label", "group", "gap", "group_gap"), np.zeros(0, np.int64))
        return empty | {"weight": np.zeros(0), "least": np.zeros(0), "answer": np.zeros(0, np.int8)}

    def _accepted(self, out: HeadPrediction, ids: Any, groups: Any) -> _Rows:
        """Check predictions, ids and groups; return the accepted rows. Without ids the rows have no name (-1)."""
        if not isinstance(out, HeadPrediction):
            raise TypeError(
                f"Expected predictions of a head (HeadPrediction), got a {type(out).__name__}; pass head.judge(...), "
                "or out.judged of a TrustedModel."
            )
        count = len(out.accept)
        names = np.full(count, -1) if ids is None else checked_ids(ids)
        if len(names) != count:
            raise ValueError(f"There are {count} rows and {len(names)} ids; pass one id for each row.")
        if (groups is not None) != (self.by == "given"):
            wanted = "needs the codes of its groups: pass groups=" if groups is None else "has no groups of its own"
            raise ValueError(f"The monitor {wanted}.")
        label = out.network_label.cpu().numpy()
        codes = {"predicted": label, "region": out.nearest.cpu().numpy()}.get(self.by or "", np.full(count, -1))
        if groups is not None:
            codes = integers(groups, "groups")
            if codes.shape != (count,):
                raise ValueError(f"There are {count} rows and {len(codes)} groups; pass one group for each row.")
        position = np.flatnonzero(out.accept.cpu().numpy())
        names, label, codes = names[position], label[position], codes[position]
        codes = self._group_of[codes] if len(self._group_of) else codes
        if self.by is not None and len(codes) and not 0 <= codes.min() <= codes.max() < len(self.groups):
            raise ValueError(
                f"Groups must be codes from 0 to {len(self.groups) - 1}, got {codes.min()} to {codes.max()}."
            )
        if ids is not None:
            again = np.isin(names, self.every_id)
            if again.any():
                raise ValueError(f"The ids {names[again][:5].tolist()} are registered already; give every row one id.")
        return _Rows(position, names, label, codes)

    def _register(self, rows: _Rows, p: Float[Array, "n"], least: float, chosen: Bool[Array, "n"]) -> None:
        """Append the chosen rows to the queue, and the numbers of the others."""
        at = np.flatnonzero(chosen)
        count, asked = len(chosen), rows.group[at]
        gap = np.diff(at, prepend=-1) - 1
        rest = count - 1 - int(at[-1]) if len(at) else count
        columns = {"id": rows.name[at], "label": rows.label[at], "group": asked, "gap": gap, "weight": 1.0 / p[at]}
        group_gap, ends = np.zeros(len(at), np.int64), [(-1, rest, 0)] if rest else []
        for g in np.unique(rows.group) if self.by is not None else ():
            inside = chosen[rows.group == g]
            mine = np.flatnonzero(inside)
            group_gap[asked == g] = np.diff(mine, prepend=-1) - 1
            tail = len(inside) - 1 - int(mine[-1]) if len(mine) else len(inside)
            ends += [(int(g), 0, tail)] if tail else []
        group, gaps, group_gaps = np.array(ends, np.int64).reshape(-1, 3).T
        blank = np.full(len(ends), -1)
        end = {"id": blank, "label": blank, "group": group, "gap": gaps, "weight": np.zeros(len(ends))}
        columns = {name: np.concatenate([columns[name], end[name]]) for name in columns}
        columns["group_gap"] = np.concatenate([group_gap, group_gaps])
        columns["least"] = np.full(len(columns["id"]), least)
        columns["answer"] = np.repeat(np.array([_WAITING, _RIGHT], np.int8), [len(at), len(ends)])
        self._queue = {name: np.concatenate([self._queue[name], columns[name]]) for name in self._queue}
        self._order = None

    def _codes(self, y: Any, rows: int) -> Int[Array, "n"]:
        """Codes of labels; -1 for labels that are not among the classes."""
        if y is None:
            raise ValueError("y is missing: pass a label for each row, or a dictionary from ids to codes.")
        labels = label_array(y) if rows else np.zeros(0, np.int64)
        if len(labels) != rows:
            raise ValueError(f"There are {rows} rows and {len(labels)} labels; pass one label for each row.")
        return label_codes(labels.tolist(), self.classes) if self.classes is not None else integers(labels, "y")

    @property
    def every_id(self) -> Int[Array, "n"]:
        """Ids of all rows that were asked for or expected."""
        named = self._queue["id"]
        return np.concatenate([self._state["done_id"], named[named >= 0]])

    def _find(self, names: Int[Array, "n"]) -> tuple[Int[Array, "k"], Bool[Array, "n"]]:
        """Positions in the queue of the ids that are in it, and which ones are."""
        if self._order is None:
            self._order = np.argsort(self._queue["id"], kind="stable")
        if len(self._order) == 0:
            return np.zeros(0, np.int64), np.zeros(len(names), bool)
        place = np.searchsorted(self._queue["id"], names, sorter=self._order).clip(max=len(self._order) - 1)
        place = self._order[place]
        known = self._queue["id"][place] == names
        return place[known], known

    def _refuse_unknown(self, names: Int[Array, "n"], codes: Int[Array, "n"]) -> None:
        """Raise ValueError for ids that were never asked for, and for other labels of rows that are counted."""
        if len(names) == 0:
            return
        known = np.isin(names, self._state["done_id"])
        if not known.all():
            raise ValueError(
                f"The ids {names[~known][:5].tolist()} were not asked for: the rows were not chosen, not accepted or "
                "not registered. Give labels of rows that ask() chose or expect() registered."
            )
        done, codes = np.isin(self._state["done_id"], names), codes[np.argsort(names)]
        order = np.argsort(self._state["done_id"][done])
        answer = self._state["done_answer"][done][order]
        wrong = codes != self._state["done_label"][done][order]
        self._refuse_other(np.sort(names), (answer != _SKIPPED) & (answer != wrong))

    @staticmethod
    def _refuse_other(names: Int[Array, "n"], other: Bool[Array, "n"]) -> None:
        if other.any():
            raise ValueError(
                f"The ids {names[other][:5].tolist()} have another label already, and a sequence cannot take back what "
                "it has shown. Keep the first labels, or start a new monitor with the corrected ones."
            )

    def _count(self) -> None:
        """Count the entries before the first one that waits for its label."""
        answers = self._queue["answer"][self._counted :]
        stop = self._counted + (int(np.argmax(answers == _WAITING)) if (answers == _WAITING).any() else len(answers))
        for start in range(self._counted, stop, _CHUNK):
            part = {name: values[start : min(start + _CHUNK, stop)] for name, values in self._queue.items()}
            asked = part["weight"] > 0
            self._state["skipped"] += (part["answer"] == _SKIPPED).sum()
            self._advance(0, part, asked | (part["group"] == -1), "gap")
            for g in np.unique(part["group"][part["group"] >= 0]):
                self._advance(1 + int(g), part, part["group"] == g, "group_gap")
        self._counted = stop
        if self._counted > len(self._queue["id"]) // 2:  # the rest is moved less often than counted
            for name in ("id", "label", "answer"):
                named = self._queue["id"][:stop] >= 0
                done = np.concatenate([self._state[f"done_{name}"], self._queue[name][:stop][named]])
                self._state[f"done_{name}"] = done
            self._queue = {name: values[stop:] for name, values in self._queue.items()}
            self._counted, self._order = 0, None

    def _advance(self, s: int, part: Mapping[str, Array], mine: Bool[Array, "T"], gap: str) -> None:
        """Add entries to sequence s: 0 for all rows, 1 + g for group g."""
        if not mine.any():
            return
        least, answer, weight, before = (part[name][mine] for name in ("least", "answer", "weight", gap))
        asked = weight > 0
        low, high = weight * (answer == _WRONG), weight * (answer >= _WRONG)
        state, m = self._state, self._means
        # Rows with Z = 0 have few different factors: one for each batch.
        f, batch = np.unique(least, return_inverse=True)
        risk = slice(self._at_risk, self._at_risk + 1)
        zero = np.zeros(len(f))
        steps = before[:, None, None] * log_above(zero, f, m[risk])[batch]
        steps = (steps + asked[:, None, None] * log_above(low, least, m[risk]))[:, 0]
        path = state["above"][s, self._at_risk] + steps.cumsum(axis=0)
        for name, log_factors, z in (("above", log_above, low), ("below", log_below, high)):
            rows = np.bincount(batch, weights=before + (asked & (z == 0)), minlength=len(f))
            found = np.tensordot(rows, log_factors(zero, f, m), axes=1)
            for start in range(0, int((z > 0).sum()), 64):
                wrong = np.flatnonzero(z > 0)[start : start + 64]
                found = found + log_factors(z[wrong], least[wrong], m).sum(axis=0)
            state[name][s] += found
        capital = bet(state["late"][0, s][None], int(state["late_seen"][0, s]), steps[:, None])
        others = _log_late(state["late"][1:, s], state["late_seen"][1:, s])
        late = _log_mean(np.column_stack([capital.total, np.tile(others, (len(steps), 1))]), 1)
        state["late"][0, s] = capital.bets[0]
        state["late_seen"][0, s] += len(steps)
        total = _log_mean(np.stack([_log_mean(path, 1), late], axis=1), 1)
        state["peak"][s] = max(state["peak"][s], float(total.max()))
        state["rows"][s] += before.sum() + asked.sum()
        state["labels"][s] += (asked & (answer != _SKIPPED)).sum()
        state["errors"][s] += [(least * low).sum(), (least * (before + asked)).sum()]

    def _level(self, s: int) -> float:
        """Share of alpha of a sequence."""
        return self.alpha if not self.groups else self.alpha / 2 if s == 0 else self.alpha / (2 * len(self.groups))

    def _row(self, s: int) -> GroupRisk:
        limit = math.log(2.0 / self._level(s))
        above = self._means[_log_mean(self._state["above"][s], 1) >= limit]
        below = self._means[_log_mean(self._state["below"][s], 1) >= limit]
        low, high = float(above.max(initial=0.0)), float(below.min(initial=1.0))
        broken = self._state["peak"][s] >= math.log(1.0 / self._level(s))
        wrong, whole = self._state["errors"][s].tolist()
        state: State = "broken" if broken else "holds" if high <= self.risk else "open"
        rows, labels = (int(self._state[name][s]) for name in ("rows", "labels"))
        error = wrong / whole if whole else math.nan
        return GroupRisk(self.groups[s - 1] if s else None, state, rows, labels, error, low, high)


class _Rows(NamedTuple):
    """Accepted rows: positions in their batch, ids, codes of the predicted labels and of groups."""

    position: Int[Array, "n"]
    name: Int[Array, "n"]
    label: Int[Array, "n"]
    group: Int[Array, "n"]


def _groups_of(head: TrustHead, by: Any) -> tuple[Sequence[tuple[Any, ...]], Int[Array, "K"]]:
    """Members of the groups of classes or regions, and the group of each: as in the head's promise, or single ones."""
    promise = head.promise
    if promise is not None and promise.by == by:
        assert promise.risk is not None
        labels = head.require_calibration().labels
        found = observed_groups(labels, head.sepc, promise.risk, promise.delta, by, promise.joint)
        return found.members, found.of_key
    names = head.classes if by == "predicted" else range(len(head.sepc.codes))
    return [(name,) for name in names], np.arange(len(names))


def _plain(name: Any) -> Any:
    """A name of a group as a plain Python value."""
    return name.item() if isinstance(name, np.generic) else name


def _log_mean(logs: Float[Array, "..."], axis: int) -> Any:
    """Logarithm of the mean of values with given logarithms."""
    return np.logaddexp.reduce(logs, axis=axis) - math.log(logs.shape[axis])


def _log_late(bets: Float[Array, "... J"], seen: Int[Array, "..."]) -> Float[Array, "..."]:
    """Logarithms of the totals of bets with late starts, with the reserves that :func:`bet` has left."""
    return np.logaddexp(np.log(math.log(2.0) / np.log(seen + 2.0)), np.logaddexp.reduce(bets, axis=-1))


def integers(values: Any, name: str) -> Int[Array, "n"]:
    """Convert values with this name to a one-dimensional array of integers."""
    found = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if found.size and (found.ndim != 1 or found.dtype.kind not in "iu"):
        raise TypeError(f"{name} must be a list of integers, got {found.dtype} values of shape {found.shape}.")
    return found.reshape(-1).astype(np.int64)


def checked_ids(ids: Any) -> Int[Array, "n"]:
    """Check ids: integers from 0, each once."""
    names = integers(ids, "ids")
    if len(names) and names.min() < 0:
        raise ValueError(f"ids must be integers from 0, got {names.min()}.")
    ordered = np.sort(names)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        raise ValueError(f"The ids {twice[:5].tolist()} occur more than once; pass each id once.")
    return names
