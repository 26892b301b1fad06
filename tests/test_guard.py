"""Guard: states, refusals, tests of thresholds, restored promises, late labels, files, metrics, servers, and errors."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from prometheus_client.openmetrics import parser
from scipy.stats import binom

from sepc_torch import (
    DriftMonitor,
    FileFormatError,
    Guard,
    HeadPrediction,
    RiskMonitor,
    Scorer,
    TrustHead,
)
from sepc_torch.data.table_encoding import TableEncoding
from sepc_torch.head.drift import uniforms
from sepc_torch.head.guard import GuardedPrediction, GuardReport, _Trial
from sepc_torch.head.prediction import Promise
from sepc_torch.head.reasons import Reason
from sepc_torch.head.risk_monitor import log_above, log_below
from sepc_torch.head.row_metrics import RowMetrics, openmetrics
from sepc_torch.head.trust_head import checked_head

Rng = np.random.Generator
RISK, CLASSES, WINDOW = 0.1, 2, 60


def draw(rng: Rng, count: int, shift: float = 0.0, wrong: float = 0.0) -> tuple[np.ndarray, ...]:
    """Embeddings, labels and logits of two classes; some labels are wrong at random."""
    y = rng.integers(0, CLASSES, count)
    z = rng.normal(size=(count, 3)) + 4.0 * y[:, None]
    z[:, 0] += shift
    logits = 5.0 * np.eye(CLASSES)[y] + rng.normal(size=(count, CLASSES))
    return z, np.where(rng.random(count) < wrong, 1 - y, y), logits


@pytest.fixture(scope="module")
def head() -> TrustHead:
    rng = np.random.default_rng(0)
    z, y, _ = draw(rng, 200)
    found = TrustHead.fit(z, y, normalize=None, reference_points=0).calibrate(*draw(rng, 500))
    found.accept_at(risk=RISK)
    return found


def families(text: str) -> list[Any]:
    """The metrics that Prometheus reads from a text."""
    return list(parser.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]


class Stream:
    """A guard with the true labels of all rows that it has judged."""

    def __init__(self, guard: Guard, seed: int) -> None:
        self.guard, self.rng, self.y = guard, np.random.default_rng(seed), np.zeros(0, np.int64)

    def judge(self, count: int, shift: float = 0.0, wrong: float = 0.0) -> GuardedPrediction:
        z, y, logits = draw(self.rng, count, shift, wrong)
        self.y = np.concatenate([self.y, y])
        return self.guard.judge(z, logits)

    def label(self, budget: int) -> GuardReport:
        chosen = self.guard.ask(budget)
        return self.guard.update(chosen, self.y[chosen])

    def suspended(self) -> Stream:
        """The stream after a drift alarm, with a complete window."""
        assert self.judge(400, shift=3.0).state == "unverified"
        return self


def quiet(head: TrustHead, **options: Any) -> Guard:
    return Guard(head, on_alarm="refuse", **{"window": WINDOW} | options)


class TestStates:
    def test_it_holds_and_judges_as_the_head(self, head: TrustHead, rng: Rng) -> None:
        guard, (z, y, logits) = quiet(head), draw(rng, 300)
        found, plain = guard.judge(z, logits), head.judge(z, logits)
        for mine, other in zip(found.out, plain, strict=True):
            assert torch.equal(mine.nan_to_num(), other.nan_to_num())
        assert found.state == "holds"
        assert found.ids.tolist() == list(range(300))
        assert torch.equal(found.reason == Reason.ACCEPTED, plain.accept)
        chosen = guard.ask(100)
        assert plain.accept[chosen].all()
        report = guard.update(chosen, y[chosen])
        assert report.answered == report.asked == len(chosen)
        assert report.accuracy is not None
        assert report.needed is None
        assert "The promise holds after 300 rows" in report.sentence
        assert guard.promise == head.promise

    def test_drift_suspends_and_refuses(self, head: TrustHead) -> None:
        guard = quiet(head)
        stream = Stream(guard, 1)
        stream.judge(200)
        for _ in range(20):
            found = stream.judge(20, shift=3.0)
            if found.state != "holds":
                break
        assert found.state == "unverified"
        assert not found.out.accept.any()
        assert set(found.reason.tolist()) == {int(Reason.NO_PROMISE)}
        report = guard.report()
        assert report.since is not None
        assert 200 < report.since <= 400
        assert report.drift is not None
        assert report.drift.alarm
        assert report.accuracy is None  # scores changed
        assert not guard.promise.found
        assert "unverified since row" in str(guard)

    def test_warnings_and_functions(self, head: TrustHead) -> None:
        warned = Stream(Guard(head, window=WINDOW), 2)
        with pytest.warns(UserWarning, match="The promise is unverified since row"):
            found = warned.judge(300, shift=3.0)
        assert found.out.accept.any()  # it goes on accepting
        told: list[GuardReport] = []
        called = Stream(Guard(head, on_alarm=told.append, window=WINDOW), 2)
        called.judge(300, shift=3.0)
        called.judge(300, shift=3.0)
        assert [report.state for report in told] == ["unverified"]

    def test_wrong_labels_break_it_without_drift(self, head: TrustHead) -> None:
        guard = quiet(head)
        stream = Stream(guard, 3)
        for _ in range(20):
            stream.judge(100, wrong=0.5)
            if stream.label(50).state == "broken":
                break
        assert guard.state == "broken"
        report = guard.report()
        assert report.accuracy is None
        assert report.risk is not None
        assert report.risk.state == "broken"
        assert "labels show that the risk is not kept" in report.sentence

    def test_labels_show_that_a_drifted_stream_keeps_the_risk(self, head: TrustHead) -> None:
        """Without a call of recalibrate the threshold stays as it is."""
        guard = quiet(head)
        stream = Stream(guard, 4)
        stream.judge(300, shift=2.0)
        for _ in range(20):
            stream.judge(100, shift=2.0)
            if stream.label(60).state == "holds":
                break
        assert guard.state == "holds"
        assert guard.threshold is None
        assert stream.judge(100, shift=2.0).out.accept.any()

    def test_the_risk_that_labels_have_shown_is_promised(self, head: TrustHead) -> None:
        """A guard of another risk than the head's restores that one."""
        guard = quiet(head, risk=0.4)
        stream = Stream(guard, 33)
        stream.judge(300, shift=2.0, wrong=0.2)
        assert guard.promise.risk == RISK
        for _ in range(20):
            stream.judge(100, shift=2.0, wrong=0.2)
            if stream.label(60).state == "holds":
                break
        assert guard.threshold is None
        assert guard.promise == Promise(0.4, 0.05, None)

    def test_random_numbers_are_not_used_twice(self, head: TrustHead) -> None:
        """Coins and ties must not depend on what led to an alarm: neither on earlier ones, nor on each other."""
        guard = quiet(head)
        assert guard.risk is not None
        assert guard.drift is not None
        rows = HeadPrediction(
            *(field[:1].expand(200) for field in head.judge(*draw(np.random.default_rng(34), 1)[::2]))
        )
        rows = rows._replace(accept=torch.ones(200, dtype=torch.bool))
        first = guard.risk.ask(rows, 60, range(200))
        ties = [torch.from_numpy(np.flatnonzero(uniforms(i, 0, 200) < 0.3)) for i in range(2)]
        fresh = guard.risk.afresh()
        again = [fresh.ask(rows, 60, range(start, start + 200)) for start in (0, 200)]
        assert len({tuple(part.tolist()) for part in (first, *again, *ties)}) == 5
        assert guard.drift.with_reference(np.arange(200.0), np.zeros(200, int), 100).seed != guard.drift.seed

    def test_labels_break_an_unverified_promise(self, head: TrustHead) -> None:
        guard = quiet(head)
        stream = Stream(guard, 5)
        stream.judge(300, shift=2.0, wrong=0.6)
        assert guard.report().state == "unverified"
        for _ in range(20):
            stream.judge(100, shift=2.0, wrong=0.6)
            stream.label(60)
        assert guard.state == "broken"
        needed = guard.needed()
        assert needed.labels is None
        assert "No threshold of the present scores seems to keep the risk" in guard.report().sentence

    def test_a_new_alarm_begins_a_new_epoch(self, head: TrustHead) -> None:
        guard = quiet(head)
        stream = Stream(guard, 6).suspended()
        first = guard.report().since
        stale = guard.ask(50)
        stream.judge(300, shift=-4.0)
        second = guard.report().since
        assert first is not None
        assert second is not None
        assert second >= 400 > first
        guard.update(stale, stream.y[stale])  # late labels of the epoch before are ignored
        assert guard.needed().rows == 0
        assert guard._trial is not None
        assert guard._trial.state["labels"].sum() == 0

    def test_batches_do_not_matter(self, head: TrustHead) -> None:
        """One batch or many: the epoch begins at the same row, and the same rows are asked for."""
        rng, found = np.random.default_rng(7), []
        z, y, logits = (np.concatenate(parts) for parts in zip(draw(rng, 150), draw(rng, 500, 3.0), strict=True))
        for step in (650, 37):
            guard = quiet(head)
            for start in range(0, 650, step):
                guard.judge(z[start : start + step], logits[start : start + step])
            chosen = guard.ask(80)
            found.append((guard.report().since, chosen.tolist(), guard.update(chosen, y[chosen]).needed))
        assert found[0][:2] == found[1][:2]
        assert found[0][2] is not None
        assert found[1][2] is not None
        assert found[0][2].labels == found[1][2].labels


class TestRestoring:
    def test_labels_restore_the_promise(self, head: TrustHead) -> None:
        guard = quiet(head)
        stream = Stream(guard, 8).suspended()
        needed = guard.needed()
        assert needed.labels is not None
        assert 30 < needed.labels < 400
        stream.judge(1500, shift=3.0)
        chosen = guard.ask(2 * needed.labels)
        assert guard.needed().ids.tolist() == chosen.tolist()
        found = guard.update(chosen, stream.y[chosen])
        if guard.state != "holds":  # the present threshold is not shown to keep the risk
            assert found.needed is not None
            assert found.needed.labels == 0
            restored = guard.recalibrate()
            assert restored.found
            assert restored.labels > 20
            assert restored.promise.risk == RISK
            assert guard.threshold == restored.threshold
        report = guard.report()
        assert (report.state, report.alarms, report.restored) == ("holds", 1, report.rows)
        assert f"suspended once, and labels restored it after row {report.rows}" in report.sentence
        later = stream.judge(300, shift=3.0)
        assert "300 rows" in repr(later)
        assert "promise: holds" in repr(later)
        assert later.state == "holds"  # the reference for drift is the shifted stream now
        assert later.out.accept.any()
        stream.judge(300)
        assert guard.state == "unverified"  # and the old rows are another kind

    def test_more_labels_accept_more(self) -> None:
        """Capital at lower thresholds comes later; a passed threshold stays passed."""
        trial, rng, passed = (
            _Trial.of(np.linspace(0.02, 0.999, 100), 2.0, RISK, 0.05, 0.05),
            np.random.default_rng(9),
            [],
        )
        for batch in range(40):
            rows = simulated(rng, 200, batch, lambda s: 0.3 * (1.0 - s))
            names = trial.ask(rows, 30, rng.random(200))
            trial.count(trial.checked(names, wrong_codes(rows, names)), names)
            passed.append(-1 if trial.passed() is None else trial.passed())
        assert passed == sorted(passed)  # type: ignore[type-var]
        assert passed[-1] is not None
        assert passed[-1] > 3

    @pytest.mark.slow
    def test_a_threshold_that_breaks_the_risk_rarely_passes(self) -> None:
        """The error beyond every threshold is the risk or more, all times are looked at; delta is 0.1."""
        streams, failed = 600, 0
        for seed in range(streams):
            rng = np.random.default_rng(seed)
            trial = _Trial.of(rng.random(50), 0.5, RISK, 0.1, 0.1)
            for batch in range(8):
                rows = simulated(rng, 100, batch, lambda _: RISK)
                names = trial.ask(rows, 40, rng.random(100))
                trial.count(trial.checked(names, wrong_codes(rows, names)), names)
            failed += trial.passed() is not None
        assert failed <= binom.isf(1e-3, streams, 0.1)

    @pytest.mark.slow
    def test_a_kept_risk_is_rarely_called_broken(self) -> None:
        streams, failed = 600, 0
        for seed in range(streams):
            rng = np.random.default_rng(seed)
            trial = _Trial.of(rng.random(50), 0.5, RISK, 0.1, 0.1)
            for batch in range(8):
                rows = simulated(rng, 100, batch, lambda _: RISK)
                names = trial.ask(rows, 40, rng.random(100))
                trial.count(trial.checked(names, wrong_codes(rows, names)), names)
            failed += trial.broken
        assert failed <= binom.isf(1e-3, streams, 0.1)

    def test_capital_agrees_with_a_loop_over_rows(self) -> None:
        rng = np.random.default_rng(10)
        trial = _Trial.of(rng.random(40), 0.6, RISK, 0.05, 0.05)
        threshold, loop = trial.state["threshold"], np.zeros_like(trial.state["below"])
        above, place = np.zeros_like(trial.state["above"]), int(trial.state["present"])
        for batch, budget in enumerate((30, 80, 5)):
            rows, coins = simulated(rng, 80, batch, lambda s: 1.0 - s), rng.random(80)
            target = trial.forecast()[0]
            inside = rows["joint"] >= threshold[target]
            p = min(1.0, budget / max(inside.sum(), 1))
            names = trial.ask(rows, budget, coins)
            assert set(names.tolist()) == set(rows["id"][inside & (coins < p)].tolist())
            codes = wrong_codes(rows, names)
            wrong = dict(zip(names.tolist(), codes.tolist(), strict=True))
            for i in np.flatnonzero(inside):
                z = np.array([wrong.get(int(rows["id"][i]), 0) / p])
                for k in range(target + 1):
                    if rows["joint"][i] >= threshold[k]:
                        loop[k] += log_below(z, np.array([p]), np.array([RISK]))[0, 0]
                        if k == place:
                            above += log_above(z, np.array([p]), np.array([RISK]))[0, 0]
            order = rng.permutation(len(names))  # labels arrive in any order
            for part in np.array_split(order, 4):
                trial.count(trial.checked(names[part], codes[part]), names[part])
        assert np.allclose(trial.state["below"], loop)
        assert np.allclose(trial.state["above"], above)
        assert len(trial.ids) == 0

    def test_a_skipped_label_is_the_worst_of_both(self) -> None:
        found = []
        for answer in (0, 1, None):
            rng = np.random.default_rng(11)
            trial = _Trial.of(np.linspace(0.1, 0.9, 40), 0.1, RISK, 0.05, 0.05)
            rows = simulated(rng, 60, 0, lambda s: 0.2)
            names = trial.ask(rows, 60, rng.random(60))
            codes = wrong_codes(rows, names)
            codes[:10] = 0 if answer is None else answer
            if answer is None:
                trial.count(trial.checked(names[:10], None), names[:10])
                trial.count(trial.checked(names[10:], codes[10:]), names[10:])
            else:
                trial.count(trial.checked(names, codes), names)
            found.append(trial.state)
        right, wrong, skipped = found
        assert np.array_equal(skipped["below"], wrong["below"])
        assert np.array_equal(skipped["above"], right["above"])

    def test_wrong_rows_that_are_labelled_late_count(self) -> None:
        """Right labels first: nothing passes before the rows that wait are there."""
        rng = np.random.default_rng(12)
        trial = _Trial.of(np.linspace(0.1, 0.9, 40), 0.1, RISK, 0.05, 0.05)
        rows = simulated(rng, 600, 0, lambda s: 0.3)
        names = trial.ask(rows, 600, rng.random(600))
        codes = wrong_codes(rows, names)
        right = codes == 0
        trial.count(trial.checked(names[right], codes[right]), names[right])
        assert trial.passed() is None
        trial.count(trial.checked(names[~right], codes[~right]), names[~right])
        assert trial.passed() is None

    def test_nothing_is_asked_for_in_the_window(self, head: TrustHead) -> None:
        guard = quiet(head, window=1000)
        stream = Stream(guard, 13)
        stream.judge(300, shift=3.0)
        assert len(guard.ask(50)) == 0
        needed = guard.needed()
        assert needed.labels is None
        assert 0 < needed.rows < 1000
        assert f"After {needed.rows} more rows" in guard.report().sentence
        assert not guard.recalibrate().found


def simulated(rng: Rng, count: int, batch: int, error: Callable[[Any], Any]) -> dict[str, np.ndarray]:
    """Rows of predicted class 0 with uniform scores; the true code is 1 with the probability that the score has."""
    joint = rng.random(count)
    wrong = (rng.random(count) < error(joint)).astype(np.int64)
    ids = 10_000 * batch + 2 * np.arange(count) + wrong  # an odd id is a wrong row
    return {"id": ids, "joint": joint, "label": np.zeros(count, np.int64)}


def wrong_codes(rows: dict[str, np.ndarray], names: np.ndarray) -> np.ndarray:
    assert np.isin(names, rows["id"]).all()
    return names % 2


class TestFiles:
    def test_a_saved_guard_goes_on(self, head: TrustHead, tmp_path: Path) -> None:
        """In every phase: watching, in the window, in the reference, with labels that are waited for, restored."""
        guard = quiet(head)
        stream = Stream(guard, 14)
        phases: list[Callable[[], object]] = [
            lambda: stream.judge(50),
            lambda: stream.guard.ask(10),
            lambda: stream.judge(60, shift=3.0),
            lambda: stream.judge(40, shift=3.0),
            lambda: stream.judge(200, shift=3.0),
            lambda: stream.guard.ask(60),
            lambda: stream.guard.update(stream.guard.waiting[::2], stream.y[stream.guard.waiting[::2]]),
            lambda: stream.judge(500, shift=3.0),
            lambda: stream.guard.update(stream.guard.waiting, stream.y[stream.guard.waiting]),
            lambda: stream.label(300),
            lambda: stream.guard.state != "holds" and stream.guard.recalibrate(),
            lambda: stream.judge(50, shift=3.0),
        ]
        for phase in phases:
            phase()
            path = tmp_path / "guard.safetensors"
            stream.guard.save(path)
            loaded = Guard.load(path, head, on_alarm="refuse")
            assert str(loaded.report()) == str(stream.guard.report())
            assert loaded.metrics() == stream.guard.metrics()
            loaded.save(tmp_path / "again")
            assert (tmp_path / "again").read_bytes() == path.read_bytes()
            stream.guard = loaded
        assert stream.guard.state == "holds"
        assert path.stat().st_size < 300_000

    def test_files_of_others(self, head: TrustHead, tmp_path: Path) -> None:
        guard = quiet(head, drift=False)
        guard.save(tmp_path / "guard")
        other = TrustHead.load(save_head(head, tmp_path))
        assert Guard.load(tmp_path / "guard", other).drift is None
        other.accept_at(risk=0.2)
        with pytest.raises(ValueError, match="another head, calibration or threshold"):
            Guard.load(tmp_path / "guard", other)
        with pytest.raises(FileFormatError, match=r"Read it with Guard\.load"):
            RiskMonitor.load(tmp_path / "guard")
        with pytest.raises(TypeError, match="one stream in one process"):
            pickle.dumps(guard)


def save_head(head: TrustHead, folder: Path) -> Path:
    head.save(folder / "head.safetensors")
    return folder / "head.safetensors"


class TestGroups:
    @pytest.mark.parametrize("by", ["predicted", "region", "class"])
    def test_a_promise_by_group(
        self, head: TrustHead, tmp_path: Path, by: Literal["predicted", "region", "class"]
    ) -> None:
        """Wrong labels of one group are noticed, and labels restore one threshold for all rows."""
        head = copy.deepcopy(head)
        assert head.accept_at(risk=RISK, by=by).found
        guard = quiet(head)
        stream = Stream(guard, 35)
        out = stream.judge(900).out
        assert torch.equal(out.accept, head.judge(*draw(np.random.default_rng(35), 900)[::2]).accept)
        assert guard.promise.by == by
        place = out.nearest if by == "region" else out.network_label
        stream.y = np.where(place.numpy() == 0, 1 - out.network_label.numpy(), out.network_label.numpy())
        report = stream.label(400)
        assert report.state == "broken"
        assert report.risk is not None
        states = [row.state for row in report.risk.groups]
        assert states[:1] == ([] if by == "class" else ["broken"])
        assert "broken" not in states[1:]
        guard.save(tmp_path / "guard")
        guard = stream.guard = Guard.load(tmp_path / "guard", head, on_alarm="refuse")
        for _ in range(30):
            stream.judge(200)
            stream.label(100)
            if guard.needed().labels == 0:
                break
        restored = guard.recalibrate()
        assert restored.found
        assert restored.promise == guard.promise == Promise(RISK, 0.05, None)
        found = stream.judge(300)
        assert torch.equal(found.out.accept, found.out.joint.double() >= restored.threshold)
        assert guard.risk is not None
        assert guard.risk.groups == ()
        other = copy.deepcopy(head)
        other.accept_at(risk=0.3, by=by)
        with pytest.raises(ValueError, match="another head, calibration or threshold"):
            Guard.load(tmp_path / "guard", other)

    @pytest.mark.slow
    def test_a_kept_risk_in_every_group_is_rarely_called_broken(self, head: TrustHead) -> None:
        """The error of every group is the risk: at most alpha of the streams break, and hardly more in 100 (1e-6)."""
        head = copy.deepcopy(head)
        head.accept_at(risk=RISK, by="predicted")
        rng, broken = np.random.default_rng(36), 0
        pool = head.judge(*draw(rng, 2000)[::2])
        for seed in range(100):
            guard = quiet(head, drift=False, seed=seed)
            for _ in range(6):
                out = HeadPrediction(*(field[torch.from_numpy(rng.integers(0, 2000, 150))] for field in pool))
                label = out.network_label.numpy()
                found = guard.watch(out, with_logits=True)
                y = dict(
                    zip(found.ids.tolist(), np.where(rng.random(150) < RISK, 1 - label, label).tolist(), strict=True)
                )
                guard.update({i: y[i] for i in guard.ask(60).tolist()})
            broken += guard.state == "broken"
        assert broken <= binom.ppf(1 - 1e-6, 100, 0.05)


class TestMetrics:
    def test_prometheus_reads_them(self, head: TrustHead) -> None:
        guard = quiet(head)
        stream = Stream(guard, 15)
        out = stream.judge(200).out
        chosen = guard.ask(50)
        guard.update(chosen[:10], stream.y[chosen[:10]])
        found = {family.name: family for family in families(guard.metrics())}
        values = {s.name: s.value for family in found.values() for s in family.samples if len(s.labels) == 0}
        assert values["sepc_rows_total"] == 200
        assert values["sepc_accepted_rows_total"] == int(out.accept.sum())
        assert values["sepc_labels_asked_total"] == len(chosen)
        assert values["sepc_labels_answered_total"] == 10
        assert values["sepc_p_value_count"] == 200
        assert values["sepc_p_value_sum"] == pytest.approx(float(out.p_value.sum()), rel=1e-4)
        quantiles = {s.labels["quantile"]: s.value for s in found["sepc_p_value"].samples if s.labels}
        assert quantiles["0.5"] == pytest.approx(float(out.p_value.median()), abs=0.02)
        states = {s.labels["sepc_promise"]: s.value for s in found["sepc_promise"].samples}
        assert states == {"holds": 1.0, "unverified": 0.0, "broken": 0.0}
        before = values["sepc_drift_evidence"]
        while stream.judge(20, shift=3.0).state == "holds":
            pass
        found = {family.name: family for family in families(guard.metrics())}
        assert found["sepc_drift_evidence"].samples[0].value > max(before, -math.log(0.01) - 1e-9)
        assert [s.value for s in found["sepc_promise"].samples] == [0.0, 1.0, 0.0]

    def test_no_rows(self, head: TrustHead) -> None:
        assert families(openmetrics(RowMetrics().families()))
        assert families(Guard(head, drift=False).metrics())

    def test_a_scorer_without_a_guard(self, head: TrustHead, tmp_path: Path, rng: Rng) -> None:
        scorer = Scorer(save_head(head, tmp_path), "cpu")
        z, _, logits = draw(rng, 40)
        scorer({"z": z, "logits": logits})
        assert "sepc_rows_total 40\n" in scorer.metrics()
        assert "sepc_rows_total 0\n" in pickle.loads(pickle.dumps(scorer)).metrics()


class TestServing:
    def test_a_scorer_with_a_guard(self, head: TrustHead, tmp_path: Path, rng: Rng) -> None:
        path = save_head(head, tmp_path)
        loaded = TrustHead.load(path)
        guard = quiet(loaded)
        scorer = Scorer(path, "cpu", batch_size=64, guard=guard)
        z, y, logits = draw(rng, 200)
        columns = scorer({"z": z, "logits": logits})
        assert np.array_equal(columns["accept"], head.judge(z, logits).accept.numpy())
        assert columns["row"].tolist() == list(range(200))
        assert set(columns["promise"]) == {"holds"}
        chosen = guard.ask(50)
        assert guard.update(chosen, y[chosen]).answered == len(chosen)
        z, _, logits = draw(rng, 300, shift=3.0)
        columns = scorer({"z": z, "logits": logits})
        refused = columns["promise"] == "unverified"
        assert refused[-1]
        assert set(columns["reason"][refused]) == {"no promise"}
        assert not columns["accept"][refused].any()
        assert scorer.metrics() == guard.metrics()
        with pytest.raises(TypeError, match="one stream in one process"):
            pickle.dumps(scorer)
        other = TrustHead.load(path)
        other.accept_at(risk=0.2)
        other.save(path)
        with pytest.raises(ValueError, match="The guard belongs to another head"):
            Scorer(path, "cpu", guard=guard)

    def test_a_batch_with_a_wrong_row_is_no_part_of_the_stream(self, head: TrustHead, tmp_path: Path, rng: Rng) -> None:
        path = save_head(head, tmp_path)
        guard = quiet(TrustHead.load(path))
        scorer = Scorer(path, "cpu", batch_size=16, guard=guard)
        z, _, logits = draw(rng, 60)
        wrong = z.copy()
        wrong[50, 0] = np.nan
        with pytest.raises(ValueError, match="NaN"):
            scorer({"z": wrong, "logits": logits})
        assert guard.report().rows == 0
        assert scorer({"z": z, "logits": logits})["row"].tolist() == list(range(60))

    def test_the_server(self, head: TrustHead, tmp_path: Path, rng: Rng) -> None:
        """500 requests at once, some of them malformed; then labels, the report and the metrics."""
        from sepc_torch.serving.server import create_app

        path = save_head(head, tmp_path)
        guard = quiet(TrustHead.load(path))
        app = create_app(Scorer(path, "cpu", guard=guard), most=256)
        z, y, logits = draw(rng, 500)
        bodies: list[Any] = [{"z": a.tolist(), "logits": b.tolist()} for a, b in zip(z, logits, strict=True)]
        bodies[7], bodies[300] = {"z": [1.0]}, "no JSON"
        bodies[400] = {"z": z[400].tolist(), "logits": "text"}

        async def everything() -> tuple[list[tuple[int, bytes]], dict[str, tuple[int, bytes]]]:
            found = await asyncio.gather(*(request(app, "POST", "/score", body) for body in bodies))
            rows = sorted(json.loads(content)["row"] for status, content in found if status == 200)
            assert rows == list(range(497))
            other = {"promise": await request(app, "GET", "/promise"), "ask": await request(app, "POST", "/ask", {})}
            other["asked"] = await request(app, "POST", "/ask", {"budget": 30})
            of_row = {
                json.loads(content)["row"]: int(y[i]) for i, (status, content) in enumerate(found) if status == 200
            }
            asked = json.loads(other["asked"][1])["rows"]
            labels = {"rows": asked, "labels": [of_row[row] for row in asked]}
            other["labels"] = await request(app, "POST", "/labels", labels)
            other["recalibrate"] = await request(app, "POST", "/recalibrate")
            other["metrics"] = await request(app, "GET", "/metrics")
            return list(found), other

        found, other = asyncio.run(everything())
        assert [i for i, (status, _) in enumerate(found) if status == 422] == [7, 300, 400]
        assert app.state.batcher.batches < 20
        want = head.judge(z, logits)
        for i, (status, content) in enumerate(found):
            if status == 200:
                assert json.loads(content)["accept"] == bool(want.accept[i])
        assert json.loads(other["promise"][1])["state"] == "holds"
        assert other["ask"][0] == 422
        assert b"lacks 'budget'" in other["ask"][1]
        asked = json.loads(other["asked"][1])["rows"]
        assert json.loads(other["labels"][1])["answered"] == len(asked)
        assert other["recalibrate"][0] == 422
        assert b"nothing to restore" in other["recalibrate"][1]
        text = other["metrics"][1].decode()
        assert "sepc_rows_total 497\n" in text
        assert families(text)


async def request(app: Any, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """Send one request to an ASGI application."""
    content = b"" if body is None else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
    }
    scope |= {"raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http"}
    scope |= {"headers": [(b"content-type", b"application/json")], "client": ("test", 1), "server": ("test", 80)}
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    status = next(message["status"] for message in sent if message["type"] == "http.response.start")
    return status, b"".join(message.get("body", b"") for message in sent)


class TestUse:
    def test_a_head_of_a_table_is_given_tables(self, rng: Rng) -> None:
        table = {"a": rng.normal(size=900), "city": rng.choice(["Oslo", "Rome"], 900)}
        labels = np.where(table["a"] > 0, "high", "low")
        encoding = TableEncoding.fit(table, ["a"], ["city"])
        head = TrustHead.fit(encoding.encode(table).points[:200], labels[:200], normalize=None, encoding=encoding)

        def part(rows: slice) -> dict[str, np.ndarray]:
            return {name: column[rows] for name, column in table.items()}

        head.calibrate(part(slice(200, 700)), labels[200:700]).accept_at(risk=0.2)
        found = Guard(head).judge(part(slice(700, 900)))
        assert found.state == "holds"
        assert found.out.accept.tolist() == head.judge(part(slice(700, 900))).accept.tolist()

    def test_other_objects_are_refused(self, head: TrustHead) -> None:
        """The shape checks of the tests refuse them before Guard, DriftMonitor and write_report do."""
        assert checked_head(head) is head
        with pytest.raises(TypeError, match=r"got a SimpleNamespace\. Pass its \.head, and the rows that it reads"):
            checked_head(SimpleNamespace(head=head))  # as a TrustedModel has it
        with pytest.raises(TypeError, match="Expected a TrustHead, got a str"):
            checked_head("head.safetensors")

    def test_ids_of_the_caller(self, head: TrustHead, rng: Rng) -> None:
        guard, (z, y, logits) = quiet(head), draw(rng, 100)
        names = 7 * np.arange(100) + 3
        found = guard.judge(z, logits, ids=names)
        assert found.ids.tolist() == names.tolist()
        assert guard.judge(z[:5], logits[:5]).ids.tolist() == [697, 698, 699, 700, 701]
        chosen = guard.ask(40)
        answers = {int(i): int(y[(i - 3) // 7]) for i in chosen.tolist() if i < 697}
        assert guard.update(answers).answered == len(answers)
        assert guard.update(answers).answered == len(answers)  # reading a file again changes nothing
        assert guard.waiting.tolist() == [i for i in chosen.tolist() if i >= 697]
        assert guard.skip(guard.waiting).answered == len(answers)
        with pytest.raises(ValueError, match="100 rows and 2 ids"):
            guard.judge(z, logits, ids=[1, 2])

    def test_ids_of_earlier_rows_are_refused(self, head: TrustHead, rng: Rng) -> None:
        """They are rows that can be asked for, that were, or that were before an alarm; the guard goes on."""
        guard = quiet(head)
        stream = Stream(guard, 30)
        z, _, logits = draw(rng, 10)
        stream.judge(100)
        chosen = torch.zeros(0)
        for step in ("judged", "asked", "suspended", "asked again"):
            if step == "suspended":
                stream.judge(400, shift=3.0)
            if step != "suspended":
                chosen = guard.ask(40) if "asked" in step else torch.arange(10)
            before = guard.report()
            with pytest.raises(ValueError, match="are those of earlier rows"):
                guard.judge(z, logits, ids=[10**6 + i for i in range(9)] + chosen[-1:].tolist())
            assert str(guard.report()) == str(before)
        assert guard.judge(z, logits).ids.tolist() == list(range(500, 510))

    def test_counters_never_fall(self, head: TrustHead, tmp_path: Path) -> None:
        """Labels that were skipped, that an alarm overtook or that a restored promise leaves behind were asked for."""
        guard, asked = quiet(head), 0
        stream = Stream(guard, 31)

        def counted() -> tuple[int, int]:
            found = {family.name: family.samples[0].value for family in families(guard.metrics())}
            report = guard.report()
            assert (found["sepc_labels_asked"], found["sepc_labels_answered"]) == (report.asked, report.answered)
            return report.asked, report.answered

        for shift in (0.0, 3.0, 3.0, -4.0, -4.0):
            stream.judge(400, shift=shift)
            chosen = guard.ask(60)
            asked += len(chosen)
            guard.skip(chosen[:5])
            before = counted()[1]
            guard.update(chosen[5:20], stream.y[chosen[5:20]])
            if guard.state != "holds":
                guard.recalibrate()
            assert counted() == (asked, before + len(chosen[5:20]))
            guard.save(tmp_path / "guard")
            guard = stream.guard = Guard.load(tmp_path / "guard", head, on_alarm="refuse")

    def test_single_rows(self, head: TrustHead) -> None:
        guard = quiet(head)
        stream = Stream(guard, 38)
        for i in range(20):
            accepted = bool(stream.judge(1).out.accept)
            assert guard.ask(5).tolist() == [i] * accepted

    def test_answers_can_be_read_again(self, head: TrustHead) -> None:
        """A file with all labels so far, also those from before the promise was restored."""
        guard, answers = quiet(head), dict[int, int]()
        stream = Stream(guard, 37)
        for shift in (0.0, *[3.0] * 20):
            stream.judge(200, shift=shift)
            fresh = guard.ask(80).tolist()
            answers |= {i: int(stream.y[i]) for i in fresh}
            before = guard.report()
            assert guard.update(answers).answered == before.answered + len(fresh)
            if guard.state != "holds" and guard.recalibrate().found:
                break
        assert guard.report().restored is not None
        assert guard.update(answers).answered == len(answers)

    def test_only_labels_since_the_alarm_are_needed(self, head: TrustHead) -> None:
        guard = quiet(head)
        stream = Stream(guard, 32)
        stream.judge(200)
        stale = guard.ask(50)
        assert guard.needed().ids.tolist() == stale.tolist()
        stream.suspended()
        assert len(guard.needed().ids) == 0
        chosen = guard.ask(30)
        assert guard.needed().ids.tolist() == chosen.tolist()
        assert guard.waiting.tolist() == [*stale.tolist(), *chosen.tolist()]

    def test_labels_of_a_suspended_epoch(self, head: TrustHead) -> None:
        guard = quiet(head)
        stream = Stream(guard, 16).suspended()
        chosen = guard.ask(40)
        y = stream.y[chosen]
        before = guard.update(chosen[:5], y[:5])
        assert guard.update(chosen[:5], y[:5]).answered == before.answered == 5
        with pytest.raises(ValueError, match="another label already"):
            guard.update(chosen[:5], 1 - y[:5])
        with pytest.raises(ValueError, match="were not asked for"):
            guard.update([10**6], [0])
        report = guard.skip(chosen[5:])
        assert (report.answered, report.asked) == (5, len(chosen))

    def test_monitors_of_the_caller(self, head: TrustHead) -> None:
        drift, risk = DriftMonitor(head, alpha=0.001), RiskMonitor(head, risk=0.3, groups="predicted")
        guard = Guard(head, drift, risk, on_alarm="refuse", window=WINDOW)
        assert guard.drift is drift
        assert guard.risk is risk
        z, _, logits = draw(np.random.default_rng(17), 400, shift=4.0)
        drift.update(z, logits)
        late = Guard(head, drift, risk, on_alarm="refuse")
        assert late.state == "unverified"
        assert Guard(head, False, 0.3).risk is not None
        alone = Guard(head, risk=False, window=WINDOW)
        with pytest.warns(UserWarning, match="unverified"):
            alone.judge(z, logits)
        assert alone.report().needed is None
        assert "unverified" in alone.report().sentence

    def test_the_report_is_plain(self, head: TrustHead) -> None:
        guard = quiet(head)
        Stream(guard, 18).suspended()
        assert json.loads(json.dumps(guard.report().to_dict()))["state"] == "unverified"

    def test_wrong_arguments(self, head: TrustHead, rng: Rng, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="on_alarm must be"):
            Guard(head, on_alarm="stop")
        with pytest.raises(ValueError, match="nothing to watch"):
            Guard(head, drift=False, risk=False)
        with pytest.raises(ValueError, match="at least 20"):
            Guard(head, window=3)
        other = TrustHead.load(save_head(head, tmp_path))
        with pytest.raises(ValueError, match="DriftMonitor of this head"):
            Guard(other, DriftMonitor(head))
        with pytest.raises(ValueError, match="groups of its own"):
            Guard(head, risk=RiskMonitor(risk=0.1, groups=["a"]))
        guard, (z, _, logits) = quiet(other), draw(rng, 50)
        with pytest.raises(ValueError, match="calibrated with logits"):
            guard.judge(z)
        with pytest.raises(RuntimeError, match="nothing to restore"):
            guard.recalibrate()
        assert guard.needed().labels == 0
        with pytest.raises(ValueError, match="2 ids and 1 labels"):
            guard.update([1, 2], [0])
        with pytest.raises(ValueError, match="2 ids and none labels"):
            guard.update([1, 2])
        with pytest.raises(RuntimeError, match="no risk monitor"):
            Guard(other, risk=False).ask(5)
        other.accept_at(flag_rate=0.1)
        with pytest.raises(RuntimeError, match="start a new Guard"):
            guard.judge(z, logits)
        with pytest.raises(ValueError, match="no promised risk"):
            Guard(other)
        other.accept_at(risk=RISK, by=np.zeros(500, int))
        with pytest.raises(ValueError, match="accepts by given groups"):
            Guard(other, drift=False)

    def test_an_empty_batch(self, head: TrustHead) -> None:
        guard = quiet(head)
        found = guard.judge(np.zeros((0, 3)), np.zeros((0, 2)))
        assert found.state == "holds"
        assert len(guard.ask(5)) == 0
        assert isinstance(found.out, HeadPrediction)
