"""Risk monitor: false alarms, power, late labels in any order, groups, merging, files, and input errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom

from sepc_torch import FileFormatError, HeadPrediction, LabelPool, RiskMonitor, TrustHead
from sepc_torch.head.risk_monitor import RiskReport, asking_probabilities, log_above, log_below
from sepc_torch.training.annotation_files import read_answers

Rng = np.random.Generator
RISK = 0.1


def predictions(confidence: np.ndarray, accept: np.ndarray | None = None, nearest: Any = 0) -> HeadPrediction:
    """Predictions of class 0 with given confidences."""
    count = len(confidence)
    whole, real = torch.zeros(count, dtype=torch.int64), torch.zeros(count)
    fields: dict[str, torch.Tensor] = dict.fromkeys(HeadPrediction._fields, real)
    fields |= dict.fromkeys(("label", "rule", "nearest", "runner_up", "network_label"), whole)
    fields |= {"confidence": torch.from_numpy(confidence).float(), "nearest": whole + torch.as_tensor(nearest)}
    accepted = np.ones(count, bool) if accept is None else accept
    return HeadPrediction(**{**fields, "accept": torch.from_numpy(accepted)})


def stream(rng: Rng, count: int, error: float, informative: bool = True) -> tuple[HeadPrediction, np.ndarray]:
    """Predictions of class 0 and true labels: 0 with the confidence as probability, which averages to 1 - error."""
    hard = rng.random(count) < 0.2
    wrong = np.where(hard, 4.0 * error, 0.25 * error) if informative else np.full(count, error)
    return predictions(1.0 - wrong), (rng.random(count) < wrong).astype(np.int64)


def compare(a: RiskReport, b: RiskReport) -> None:
    """Equal reports up to rounding."""
    assert (a.state, a.waiting, a.held, a.skipped) == (b.state, b.waiting, b.held, b.skipped)
    assert a.p_value == pytest.approx(b.p_value)
    for mine, other in zip((a.overall, *a.groups), (b.overall, *b.groups), strict=True):
        assert mine[:4] == other[:4]
        assert mine[4:] == pytest.approx(other[4:], nan_ok=True)


class TestBets:
    def test_factors_are_fair_at_the_mean_and_positive(self, rng: Rng) -> None:
        """Over the coin and the loss, every factor has the expectation one if the error is the mean."""
        m, least = rng.uniform(0.01, 0.6, 20), rng.uniform(0.02, 1.0)
        p = rng.uniform(least, 1.0)
        for log_factors in (log_above, log_below):
            asked, nothing = (np.exp(log_factors(np.array([z]), np.array([least]), m))[0] for z in (1.0 / p, 0.0))
            expected = p * (m[:, None] * asked + (1.0 - m[:, None]) * nothing) + (1.0 - p) * nothing
            assert np.allclose(expected, 1.0)
            assert min(asked.min(), nothing.min()) > 0.0

    def test_capital_is_monotone_in_the_mean(self, rng: Rng) -> None:
        """So the rejected means of a side have no gaps."""
        m, z = np.sort(rng.uniform(0.001, 0.999, 50)), np.array([0.0, 1.0, 7.0])
        assert (np.diff(log_above(z, np.full(3, 0.1), m), axis=1) <= 1e-12).all()
        assert (np.diff(log_below(z, np.full(3, 0.1), m), axis=1) >= -1e-12).all()

    def test_probabilities_depend_on_no_later_row(self, rng: Rng) -> None:
        score = rng.random(300)
        p, least = asking_probabilities(score, 0.1, 0.5, (3.0, 10.0))
        first, _ = asking_probabilities(score[:100], 0.1, 0.5, (3.0, 10.0))
        later, _ = asking_probabilities(score[100:], 0.1, 0.5, (3.0 + score[:100].sum(), 110.0))
        assert np.allclose(p, np.concatenate([first, later]))
        assert least == pytest.approx(0.05)
        assert p.min() >= least
        assert p.sum() == pytest.approx(30.0, rel=0.2)
        assert (asking_probabilities(score, 1.0, 0.5, (3.0, 10.0))[0] == 1.0).all()


def reference(rows: list[tuple[float, float, float]], risk: float, alpha: float) -> tuple[float, float, list[float]]:
    """Interval from a plain loop over rows (f, Z); means are those of the monitor."""
    means = RiskMonitor(risk=risk)._means
    above, below = 0.0, 0.0
    for f, z, _ in rows:
        above = above + log_above(np.array([z]), np.array([f]), means)[0]
        below = below + log_below(np.array([z]), np.array([f]), means)[0]
    limit = 2.0 / alpha
    low = means[np.exp(above).mean(axis=1) >= limit].max(initial=0.0)
    high = means[np.exp(below).mean(axis=1) >= limit].min(initial=1.0)
    return float(low), float(high), [row[2] for row in rows]


class TestCounting:
    def test_agrees_with_a_loop_over_all_rows(self, rng: Rng) -> None:
        """Rows that were not asked for are counted together, by group and over batches of different budgets."""
        monitor, rows, ids = RiskMonitor(risk=RISK, groups=["a", "b", "c"]), [], 0
        for batch, budget in ((300, 60), (50, 25), (400, 4), (20, 20)):
            out, y = stream(rng, batch, 0.2)
            group = rng.integers(0, 3, batch)
            before = float(monitor._state["score_sum"]), float(monitor._state["drawn"])
            chosen = monitor.ask(out, budget, ids + np.arange(batch), groups=group).numpy()
            score = np.sqrt(1.0 - out.confidence.double().numpy())
            known = (10 * math.sqrt(RISK) + before[0], 10 + before[1])
            p, least = asking_probabilities(score, min(1.0, budget / batch), 0.5, known)
            z = np.zeros(batch)
            z[chosen] = y[chosen] / p[chosen]
            rows += list(zip([least] * batch, z.tolist(), group.tolist(), strict=True))
            report = monitor.update(ids + chosen, y[chosen])
            ids += batch
        assert report.overall.rows == 770
        for found, mine, share in ((report.overall, range(3), 2), *((report.groups[g], [g], 6) for g in range(3))):
            part = [row for row in rows if row[2] in mine]
            assert found.rows == len(part)
            assert (found.low, found.high) == pytest.approx(reference(part, RISK, 0.05 / share)[:2])
            f, z = np.array([row[:2] for row in part]).T
            assert found.error == pytest.approx((f * z).sum() / f.sum())

    def test_the_order_of_labels_does_not_matter(self, rng: Rng) -> None:
        """Labels in one call in order, or one by one in any order: the answer is the same in the end."""
        out, y = stream(rng, 400, 0.2)
        group = rng.integers(0, 2, 400)
        monitors = [RiskMonitor(risk=RISK, groups=["a", "b"]) for _ in range(2)]
        for monitor in monitors:
            chosen = monitor.ask(out, 80, np.arange(400), groups=group)
        whole = monitors[0].update(chosen, y[chosen])
        for i in chosen[torch.randperm(len(chosen))].tolist():
            late = monitors[1].update([i], [y[i]])
        compare(whole, late)
        assert (late.waiting, late.held) == (0, 0)

    def test_the_size_of_chunks_does_not_matter(self, rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
        """Chunks of one entry: some hold only the end of a batch of one group."""
        out, y = stream(rng, 60, 0.2)
        group, found = rng.integers(0, 5, 60), []
        for chunk in (1024, 1):
            monkeypatch.setattr("sepc_torch.head.risk_monitor._CHUNK", chunk)
            monitor = RiskMonitor(risk=RISK, groups=range(5))
            chosen = monitor.ask(out, 20, np.arange(60), groups=group)
            found.append(monitor.update(chosen, y[chosen]))
        compare(*found)

    def test_wrong_rows_that_are_labelled_first_raise_no_alarm(self) -> None:
        """A monitor that counted labels as they arrive would be broken after a few of them."""
        y = (np.arange(2000) % 20 == 0).astype(np.int64)  # 5 % are wrong
        monitor = RiskMonitor(risk=RISK)
        monitor.expect(predictions(np.full(2000, 0.9)), np.arange(2000))
        wrong = np.flatnonzero(y)
        report = monitor.update(wrong, y[wrong])
        assert report.overall.rows == 1
        assert (report.waiting, report.held) == (1900, 99)
        assert report.state == "open"
        assert monitor.waiting[0] == 1
        right = np.flatnonzero(y == 0)
        assert monitor.update(right, y[right]).state == "holds"

    def test_a_skipped_label_is_the_worst_of_both(self, rng: Rng) -> None:
        out, y = stream(rng, 300, 0.15)
        found = []
        for answer in (0, 1, None):
            monitor = RiskMonitor(risk=RISK)
            monitor.expect(out, np.arange(300))
            monitor.update(np.arange(20, 300), y[20:])
            found.append(monitor.skip(range(20)) if answer is None else monitor.update(range(20), [answer] * 20))
        right, wrong, skipped = found
        assert skipped.overall.low == right.overall.low <= wrong.overall.low
        assert skipped.overall.high == wrong.overall.high >= right.overall.high
        assert skipped.p_value == right.p_value
        assert skipped.skipped == 20

    def test_rows_that_are_not_accepted_do_not_count(self, rng: Rng) -> None:
        accept = rng.random(500) < 0.5
        out = predictions(np.full(500, 0.9), accept)
        monitor = RiskMonitor(risk=RISK)
        chosen = monitor.ask(out, 50, np.arange(500))
        assert accept[chosen].all()
        with pytest.raises(ValueError, match="were not asked for"):
            monitor.update([int(np.flatnonzero(~accept)[0])], [0])
        report = monitor.update(chosen, np.zeros(len(chosen), np.int64))
        assert report.overall.rows == accept.sum()
        direct = RiskMonitor(risk=RISK).update(out, np.where(accept, 0, 1))
        assert direct.overall.error == 0.0
        assert RiskMonitor(risk=RISK).update(predictions(np.ones(3), np.zeros(3, bool)), [0, 0, 0]).overall.rows == 0

    def test_the_budget_is_kept(self, rng: Rng) -> None:
        monitor, total = RiskMonitor(risk=RISK), 0
        for i in range(20):
            out, _ = stream(rng, 500, 0.1)
            total += len(monitor.ask(out, 50, 500 * i + np.arange(500)))
        assert abs(total - 1000) < 4.5 * math.sqrt(1000)


def ever_broken(rng: Rng, kind: str, streams: int, error: float = RISK) -> float:
    """Share of streams that are ever broken."""
    broken = 0
    for seed in range(streams):
        groups = ["a", "b"] if kind == "groups" else None
        monitor = RiskMonitor(risk=RISK, alpha=0.1, seed=seed, groups=groups)
        out, y = stream(rng, 1000, error, informative=kind != "all")
        given = rng.integers(0, 2, 1000) if groups else None
        if kind == "all":
            report = monitor.update(out, y)
        else:
            chosen = monitor.ask(out, 200, np.arange(1000), groups=given)
            report = monitor.update(chosen, y[chosen])
        broken += report.state == "broken"
    return broken / streams


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", "asked", "groups"])
def test_false_alarms(kind: str) -> None:
    """Streams with the error exactly at the risk; alpha is 0.1 and the seed is fixed."""
    streams = 1000
    assert ever_broken(np.random.default_rng(5), kind, streams) * streams <= 0.1 * streams + 3 * math.sqrt(90)


@pytest.mark.slow
def test_the_interval_holds_the_error_at_all_times() -> None:
    rng, missed = np.random.default_rng(6), 0
    for seed in range(200):
        monitor, outside = RiskMonitor(risk=RISK, alpha=0.2, seed=seed), False
        for batch in range(20):
            out, y = stream(rng, 100, 0.13)
            chosen = monitor.ask(out, 30, 100 * batch + np.arange(100))
            monitor.update(100 * batch + chosen, y[chosen])
            low, high = monitor.interval
            outside |= not low <= 0.13 <= high
        missed += outside
    assert missed <= binom.isf(1e-3, 200, 0.2)


def labels_until_broken(rng: Rng, seed: int, explore: float) -> int:
    """Labels until a monitor is broken, in a stream with twice the risk, a tenth of which is asked for."""
    monitor = RiskMonitor(risk=0.05, seed=seed)
    for batch in range(100):
        out, y = stream(rng, 200, 0.1)
        chosen = monitor.ask(out, 20, 200 * batch + np.arange(200), explore=explore)
        report = monitor.update(200 * batch + chosen, y[chosen])
        if report.state == "broken":
            break
    return report.overall.labels


class TestPower:
    def test_twice_the_risk_is_found(self, rng: Rng) -> None:
        """The best bet needs about 5 / (0.05 (2 log 2 - 1)) = 260 labels for the evidence 2 / alpha times its bets."""
        labels = [labels_until_broken(rng, seed, explore=1.0) for seed in range(10)]
        assert np.median(labels) < 600

    @pytest.mark.slow
    def test_unsure_rows_tell_more(self) -> None:
        """Four errors of five are in a fifth of the rows, and the confidence knows it."""
        rng = np.random.default_rng(7)
        active, even = ([labels_until_broken(rng, seed, explore) for seed in range(60)] for explore in (0.5, 1.0))
        assert np.median(active) < 0.85 * np.median(even)

    def test_a_late_change_is_found(self, rng: Rng) -> None:
        """After 5000 good labels; bets that all start at the first row would have lost nearly everything."""
        monitor = RiskMonitor(risk=0.05)
        assert monitor.update(*stream(rng, 5000, 0.02, informative=False)).state == "holds"
        report = monitor.update(*stream(rng, 600, 0.25, informative=False))
        assert report.state == "broken"
        assert report.overall.low < 0.05  # the average of all rows does not show it

    def test_one_group_is_named(self, rng: Rng) -> None:
        group = rng.integers(0, 3, 3000)
        wrong = np.where(group == 1, 0.25, 0.01)
        monitor = RiskMonitor(risk=RISK, groups=["x", "y", "z"])
        report = monitor.update(predictions(1.0 - wrong), (rng.random(3000) < wrong).astype(int), groups=group)
        assert [row.state for row in report.groups] == ["holds", "broken", "holds"]
        assert report.state == "broken"
        assert "broken in group y" in report.sentence
        assert "group  state" in str(monitor)
        assert report.to_dict()["groups"][1]["group"] == "y"


class TestState:
    def halves(self, rng: Rng) -> tuple[RiskMonitor, HeadPrediction, np.ndarray, np.ndarray]:
        """A monitor that waits for some labels, the last batch, its labels and the ids that it waits for."""
        monitor = RiskMonitor(risk=RISK, groups=["a", "b"], seed=3)
        out, y = stream(rng, 500, 0.2)
        chosen = monitor.ask(out, 100, np.arange(500), groups=np.arange(500) % 2).numpy()
        monitor.update(chosen[::2], y[chosen[::2]])
        return monitor, out, y, chosen[1::2]

    def test_a_saved_monitor_goes_on(self, rng: Rng, tmp_path: Path) -> None:
        monitor, out, y, later = self.halves(rng)
        monitor.save(tmp_path / "risk.safetensors")
        loaded = RiskMonitor.load(tmp_path / "risk.safetensors")
        copied = RiskMonitor(risk=RISK, groups=["a", "b"])
        copied.load_state_dict(monitor.state_dict())
        reports = []
        for one in (monitor, loaded, copied):
            one.update(later, y[later])
            chosen = one.ask(out, 40, 1000 + np.arange(500), groups=np.arange(500) % 2)
            reports.append(one.update(1000 + chosen, y[chosen]))
        compare(reports[0], reports[1])
        compare(reports[0], reports[2])

    def test_files_of_other_kinds_and_states_of_other_monitors(self, rng: Rng, tmp_path: Path) -> None:
        monitor = self.halves(rng)[0]
        with pytest.raises(ValueError, match="same risk and groups"):
            RiskMonitor(risk=RISK).load_state_dict(monitor.state_dict())
        LabelPool([0, 1]).save(tmp_path / "pool")
        with pytest.raises(FileFormatError, match=r"Read it with LabelPool\.restore"):
            RiskMonitor.load(tmp_path / "pool")

    def test_merged_workers_are_one_sequence(self, rng: Rng) -> None:
        """The interval is that of one monitor of all rows; the evidence is the mean of it and of the late bets."""
        out, y = stream(rng, 900, 0.2)
        parts = [slice(0, 300), slice(300, 500), slice(500, 900)]
        workers = [RiskMonitor(risk=RISK, seed=i) for i in range(3)]
        for worker, part in zip(workers, parts, strict=True):
            worker.update(HeadPrediction(*(field[part] for field in out)), y[part])
        merged, whole = workers[0].merge(*workers[1:]), RiskMonitor(risk=RISK)
        whole.update(out, y)
        assert merged.interval == pytest.approx(whole.interval)
        assert merged.report().overall.error == pytest.approx(y.mean())
        assert merged.state == "broken"
        merged.update(out, y)
        assert merged.report().overall.rows == 1800
        assert workers[0].report().overall.rows == 300

    def test_merging_does_not_create_evidence(self) -> None:
        """Of fresh monitors the evidence is one, and merging one monitor keeps the current evidence."""
        fresh = [RiskMonitor(risk=RISK, seed=i) for i in range(3)]
        assert fresh[0].merge(*fresh[1:]).report().p_value == 1.0
        alone = RiskMonitor(risk=RISK)
        alone.update(predictions(np.full(8, 0.9)), np.ones(8, np.int64))
        compare(alone.merge().report(), alone.report())
        with pytest.raises(ValueError, match="given twice"):
            alone.merge(alone)
        with pytest.raises(ValueError, match="another risk"):
            alone.merge(RiskMonitor(risk=0.2))

    @pytest.mark.slow
    def test_a_million_rows_need_little_memory(self, rng: Rng, tmp_path: Path) -> None:
        monitor = RiskMonitor(risk=RISK)
        for batch in range(10):
            out, y = stream(rng, 100_000, 0.05)
            chosen = monitor.ask(out, 1000, 100_000 * batch + np.arange(100_000))
            monitor.update(100_000 * batch + chosen, y[chosen])
        assert monitor.state == "holds"
        monitor.save(tmp_path / "risk")
        assert (tmp_path / "risk").stat().st_size < 500_000


class TestUse:
    def test_with_a_head_a_pool_and_annotation_files(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(8)
        names = np.array(["cat", "dog"])
        y = rng.integers(0, 2, 1500)
        x = rng.normal(size=(1500, 4)) + 2.0 * y[:, None]
        head = TrustHead.fit(x[:200], names[y[:200]]).calibrate(x[200:900], names[y[200:900]])
        head.accept_at(risk=0.1)
        monitors = [RiskMonitor(head, groups="predicted") for _ in range(2)]
        assert monitors[0].risk == 0.1
        assert monitors[0].groups == ("cat", "dog")
        pool = LabelPool(list(range(600)))
        out = head.judge(x[900:])
        ids, _ = (monitor.ask(out, 150, pool.pool_ids) for monitor in monitors)
        pool.label(ids, y[900:][ids])
        path = tmp_path / "questions.csv"
        path.write_text("id,answer\n" + "".join(f"{i},{names[y[900 + i]]}\n" for i in ids.tolist()))
        answers = read_answers(path, classes=head.classes)
        first = monitors[0].update(answers)
        compare(first, monitors[1].update(ids, names[pool.labels_of(ids)]))
        compare(first, monitors[1].update(dict(zip(ids.tolist(), pool.labels_of(ids).tolist(), strict=True))))
        compare(first, monitors[0].update(answers))  # reading a file again changes nothing
        assert first.overall.labels == len(ids)

    def test_a_region_is_a_group(self) -> None:
        y = np.arange(120) % 2
        x = np.random.default_rng(0).normal(size=(120, 2)) + 4.0 * y[:, None]
        head = TrustHead.fit(x, y)
        monitor = RiskMonitor(head, risk=0.1, groups="region")
        count = len(head.sepc.codes)
        out = predictions(np.full(50, 0.9), nearest=count - 1)
        assert [row.rows for row in monitor.update(out, np.zeros(50, int)).groups] == [0] * (count - 1) + [50]

    def test_groups_that_share_a_promise_are_one(self, tmp_path: Path) -> None:
        """Classes with few calibration points are merged, as accept_at says; another head watches each of them."""
        rng = np.random.default_rng(1)
        y = rng.choice(4, 1800, p=[0.45, 0.45, 0.05, 0.05])
        x = rng.normal(size=(1800, 4)) + 6.0 * np.eye(4)[y]
        names = np.array(["a", "b", "c", "d"])[y]
        head = TrustHead.fit(x[:400], names[:400], normalize=None).calibrate(x[400:], names[400:])
        head.accept_at(risk=0.1)
        assert RiskMonitor(head, groups="predicted").groups == ("a", "b", "c", "d")
        table = head.accept_at(risk=0.1, by="predicted")
        assert any(len(row.group) > 1 for row in table.groups)
        monitor = RiskMonitor(head, groups="predicted")
        assert monitor.groups == tuple(", ".join(row.group) for row in table.groups)
        monitor.save(tmp_path / "risk")
        for one in (monitor, RiskMonitor.load(tmp_path / "risk"), monitor.afresh()):
            out = head.judge(x[400:], None)
            label = np.array(head.classes)[out.network_label.numpy()][out.accept.numpy()]
            rows = [int(np.isin(label, row.group).sum()) for row in table.groups]
            assert [row.rows for row in one.update(out, names[400:]).groups] == rows

    def test_names_of_groups_from_an_array(self, tmp_path: Path) -> None:
        monitor = RiskMonitor(risk=RISK, groups=list(np.array([2, 5])))
        monitor.update(predictions(np.full(4, 0.9)), np.zeros(4, int), groups=[0, 1, 1, 1])
        monitor.save(tmp_path / "risk")
        assert RiskMonitor.load(tmp_path / "risk").report() == monitor.report()

    def test_a_label_that_is_no_class_is_an_error(self) -> None:
        report = RiskMonitor(risk=RISK).update(predictions(np.full(3, 0.9)), [0, 7, 0])
        assert report.overall.error == pytest.approx(1 / 3)

    def test_answers_twice(self, rng: Rng) -> None:
        """Equal ones change nothing, other ones are errors, before and after the row is counted."""
        monitor = RiskMonitor(risk=RISK)
        monitor.expect(predictions(np.full(30, 0.9)), np.arange(30))
        before = monitor.update([5, 6], [1, 0])
        compare(before, monitor.update([6, 5], [0, 1]))
        with pytest.raises(ValueError, match=r"\[5\] have another label"):
            monitor.update([4, 5], [0, 0])
        assert monitor.report().waiting == 28  # the error changed nothing
        monitor.update(np.delete(np.arange(30), [5, 6]), np.zeros(28, int))
        compare(monitor.report(), monitor.update([5, 29], [1, 0]))
        with pytest.raises(ValueError, match=r"\[29\] have another label"):
            monitor.update([5, 29], [1, 1])

    def test_an_empty_batch(self) -> None:
        monitor = RiskMonitor(risk=RISK)
        assert len(monitor.ask(predictions(np.zeros(0)), 5, [])) == 0
        report = monitor.update([], [])
        assert report.state == "open"
        assert math.isnan(report.overall.error)
        assert (report.overall.low, report.overall.high) == (0.0, 1.0)
        assert "0 labels for 0 rows" in str(monitor)

    def test_wrong_arguments(self) -> None:
        out, monitor = predictions(np.full(3, 0.9)), RiskMonitor(risk=RISK)
        with pytest.raises(ValueError, match="no promised risk"):
            RiskMonitor()
        with pytest.raises(ValueError, match="needs a head"):
            RiskMonitor(risk=RISK, groups="predicted")
        with pytest.raises(ValueError, match="name each group once"):
            RiskMonitor(risk=RISK, groups=["a", "a"])
        with pytest.raises(ValueError, match="between 0 and 1"):
            RiskMonitor(risk=1.5)
        with pytest.raises(TypeError, match="HeadPrediction"):
            monitor._accepted([1, 2], [0, 1], None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="3 rows and 2 ids"):
            monitor.expect(out, [0, 1])
        with pytest.raises(ValueError, match="more than once"):
            monitor.expect(out, [0, 1, 1])
        with pytest.raises(ValueError, match="from 0, got -1"):
            monitor.expect(out, [-1, 0, 1])
        with pytest.raises(TypeError, match="list of integers"):
            monitor.expect(out, ["a", "b", "c"])
        with pytest.raises(ValueError, match="at least 1"):
            monitor.ask(out, 0, [0, 1, 2])
        with pytest.raises(ValueError, match="explore must lie"):
            monitor.ask(out, 1, [0, 1, 2], explore=0.0)
        with pytest.raises(ValueError, match="no groups of its own"):
            monitor.expect(out, [0, 1, 2], groups=[0, 0, 0])
        grouped = RiskMonitor(risk=RISK, groups=["a", "b"])
        with pytest.raises(ValueError, match="pass groups="):
            grouped.expect(out, [0, 1, 2])
        with pytest.raises(ValueError, match="from 0 to 1, got 0 to 2"):
            grouped.expect(out, [0, 1, 2], groups=[0, 1, 2])
        monitor.expect(out, [0, 1, 2])
        with pytest.raises(ValueError, match="registered already"):
            monitor.expect(out, [2, 3, 4])
        with pytest.raises(ValueError, match=r"NaN"):
            monitor.update([0], [math.nan])
        with pytest.raises(ValueError, match="1 rows and 2 labels"):
            monitor.update([0], [0, 1])
        with pytest.raises(ValueError, match="y is missing"):
            monitor.update([0])
        with pytest.raises(ValueError, match="do not wait"):
            monitor.skip([9])
        assert monitor.report().overall.rows == 0
