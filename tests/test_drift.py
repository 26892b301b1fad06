"""Drift monitor: false alarms over many streams, changes that it finds, batches, state, merging, and input errors."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binom, kstest

from sepc_torch import DriftMonitor, FileFormatError, TrustHead
from sepc_torch.data.table_encoding import TableEncoding
from sepc_torch.head.drift import (
    DriftReport,
    Move,
    bet,
    log_cell_bets,
    log_power_bets,
    occupancy_p_values,
    poisson_interval,
    sequential_p_values,
    uniforms,
)

Rng = np.random.Generator
CLASSES = 3


def draw(rng: Rng, count: int, shares: tuple[float, ...] = (1 / 3, 1 / 3, 1 / 3)) -> tuple[np.ndarray, ...]:
    """Embeddings, labels and logits of three classes; the network errs at random, more often in the last class."""
    y = rng.choice(CLASSES, count, p=shares)
    x = rng.normal(size=(count, 4)) + 4.0 * np.eye(CLASSES, 4)[y]
    label = np.where(rng.random(count) < np.array([0.01, 0.02, 0.2])[y], (y + 1) % CLASSES, y)
    return x, y, 4.0 * np.eye(CLASSES)[label] + 0.3 * rng.normal(size=(count, CLASSES))


@pytest.fixture(scope="module")
def head() -> TrustHead:
    rng = np.random.default_rng(0)
    x, y, _ = draw(rng, 300)
    return TrustHead.fit(x, y, dim=3, normalize=None, reference_points=0).calibrate(*draw(rng, 1200))


class TestBetting:
    def test_p_values_are_independent_and_uniform(self) -> None:
        """Over draws of calibration points and stream together; one calibration set alone would not do."""
        rng, found = np.random.default_rng(1), []
        for _ in range(400):
            points = rng.choice(6, 30, p=[0.3, 0.3, 0.2, 0.1, 0.05, 0.05])
            counts = np.bincount(points[:20], minlength=6)
            found.append(sequential_p_values(points[20:], counts, rng.random(10))[0])
        p = np.array(found)
        assert kstest(p.ravel(), "uniform").pvalue > 1e-3
        neighbours = np.corrcoef(p[:, :-1].ravel(), p[:, 1:].ravel())[0, 1]
        assert abs(neighbours) < 3.5 / math.sqrt(p[:, 1:].size)

    def test_sequences_agree_with_a_loop(self, rng: Rng) -> None:
        counts, stream, u = rng.integers(0, 9, 5), rng.integers(0, 5, 40), rng.random(40)
        p, after = sequential_p_values(stream, counts, u)
        by_cell, cells = occupancy_p_values(stream, counts, u)
        past = counts.copy()
        for t, c in enumerate(stream):
            assert p[t] == pytest.approx((past[c + 1 :].sum() + u[t] * (1 + past[c])) / (past.sum() + 1))
            for k in range(5):
                inside = c == k
                expected = u[t] * (1 + past[k]) if inside else past[k] + u[t] * (1 + past.sum() - past[k])
                assert by_cell[t, k] == pytest.approx(expected / (past.sum() + 1))
            past[c] += 1
        assert (past == after).all()
        assert (past == cells).all()

    def test_every_bet_has_the_integral_one(self) -> None:
        p = (np.arange(200_000) + 0.5) / 200_000
        # After p = q ** 10 the densities have no pole.
        q, densities = p**10, np.exp(log_power_bets(p**10))[:, :3]
        assert (densities * 10 * (q / p)[:, None]).mean(axis=0) == pytest.approx(1.0, abs=1e-3)
        assert np.allclose(log_power_bets(p)[:, 3:], log_power_bets(1.0 - p)[:, :3])
        two = np.exp(log_cell_bets(np.stack([p, p], axis=1), np.array([0.3, 0.05])))
        assert two.mean(axis=0) == pytest.approx(1.0, abs=1e-4)

    def test_capital_in_pieces(self, rng: Rng) -> None:
        factors = log_cell_bets(rng.random((50, 4)), np.full(4, 0.2))
        whole = bet(np.full((4, 3), -np.inf), 0, factors)
        first = bet(np.full((4, 3), -np.inf), 0, factors[:20])
        second = bet(first.bets, 20, factors[20:])
        assert np.allclose(second.bets, whole.bets)
        assert np.allclose(np.concatenate([first.total, second.total]), whole.total)

    def test_uniform_numbers(self) -> None:
        u = uniforms(7, 0, 20_000)
        assert kstest(u, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(u, uniforms(8, 0, 20_000))[0, 1]) < 0.03
        assert u.min() > 0.0
        assert u.max() < 1.0


@pytest.mark.slow
def test_false_alarms(head: TrustHead) -> None:
    """Streams of 400 points without drift, each with calibration points of its own; the seed is fixed.

    The same bets against one calibration set that is held fixed, or against p-values that ignore the points of the
    stream, would exceed the bound: measured, they alarm in 35 % of the streams.
    """
    rng, alpha, streams = np.random.default_rng(2), 0.2, 300
    monitor = DriftMonitor(head, alpha=alpha)
    scores, cells = len(monitor._score_start), len(monitor._cell_start)
    share = monitor._shares
    alarms = 0
    for seed in range(streams):
        monitor.seed = seed
        monitor._score_start = np.bincount(rng.integers(0, scores, 100), minlength=scores)
        monitor._cell_start = np.bincount(rng.choice(cells, 100, p=share), minlength=cells)
        monitor._state = monitor._fresh_state()
        monitor._advance(rng.integers(0, scores, 400), rng.choice(cells, 400, p=share), np.zeros(400, dtype=bool))
        alarms += monitor.p_value <= alpha
    bound = binom.isf(1e-3, streams, alpha)
    assert bound < 1.5 * alpha * streams
    assert alarms <= bound


def test_an_undrifted_stream(head: TrustHead) -> None:
    rng = np.random.default_rng(3)
    monitor = DriftMonitor(head, alpha=0.01)
    for _ in range(4):
        x, _, logits = draw(rng, 500)
        report = monitor.update(x, logits)
    assert not report.alarm
    assert report.alarm_at is None
    assert report.seen == 2000
    assert report.accepted == pytest.approx(0.95, abs=0.04)
    assert "no drift shown: p = " in str(report)


def test_a_class_that_takes_over(head: TrustHead) -> None:
    """The monitor alarms, names the class and the time, and expects the lower accuracy of that class."""
    rng = np.random.default_rng(4)
    monitor = DriftMonitor(head, alpha=0.01)
    x, _, logits = draw(rng, 600)
    before = monitor.update(x, logits)
    assert not before.alarm
    x, y, logits = draw(rng, 600, (0.1, 0.1, 0.8))
    report = monitor.update(x, logits)
    assert report.alarm
    assert report.alarm_at is not None
    assert 600 < report.alarm_at < 750
    gained = [move for move in report.moves if move.change == "gained"]
    lost = [move for move in report.moves if move.change == "lost"]
    assert gained[0].classes == (2,)
    assert gained[0].share > 1.5 * gained[0].expected
    assert 550 < gained[0].since < 650
    assert {label for move in lost for label in move.classes} <= {0, 1}
    assert report.since is not None
    assert abs(report.since - 600) < 100
    assert report.accuracy is not None
    assert before.accuracy is not None
    assert report.accuracy.estimate < before.accuracy.estimate
    out = head.judge(x, logits)
    right = (out.network_label.numpy() == y)[out.accept.numpy()]
    alone = DriftMonitor(head)
    alone.update(x, logits)
    low, high = alone.accuracy()[1:]
    assert low <= right.mean() <= high
    assert "class 2, regions" in str(report)
    assert f"drift: alarm at point {report.alarm_at}; p = " in str(report)


def test_the_alarm_names_the_point_that_raised_it(head: TrustHead) -> None:
    """The points before it raise no alarm, with it they do, and later points do not move it."""
    x, _, logits = draw(np.random.default_rng(6), 3000, (0.05, 0.05, 0.9))
    report = DriftMonitor(head, alpha=0.01).update(x, logits)
    at = report.alarm_at
    assert at is not None
    assert at < 1000
    assert report.seen == 3000
    assert not DriftMonitor(head, alpha=0.01).update(x[:at], logits[:at]).alarm
    found = DriftMonitor(head, alpha=0.01).update(x[: at + 1], logits[: at + 1])
    assert (found.alarm, found.alarm_at) == (True, at)
    in_pieces = DriftMonitor(head, alpha=0.01)
    for start in range(0, 3000, 700):
        last = in_pieces.update(x[start : start + 700], logits[start : start + 700])
    assert last.alarm_at == at
    for text in (str(report), report.sentence):
        assert f"alarm at point {at}" in text
        assert "after 3000 points" in text


def test_threads_may_update_one_monitor(head: TrustHead) -> None:
    x, _, logits = draw(np.random.default_rng(7), 800)
    monitor = pickle.loads(pickle.dumps(DriftMonitor(head)))
    pieces = [(x[i : i + 5], logits[i : i + 5]) for i in range(0, 800, 5)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda piece: monitor.update(*piece), pieces))
    finally:
        sys.setswitchinterval(before)
    alone = DriftMonitor(head)
    alone.update(x, logits)
    counts = [each.state_dict()["cells"] for each in (monitor, alone)]
    assert monitor.report().seen == 800
    assert torch.equal(*counts), "every point is counted once"


def test_a_line_names_few_of_many_regions() -> None:
    move = Move("lost", (0, 1), tuple(range(54, 154)), 0.4, 0.2, 7, 9.0)
    line = str(DriftReport(100, 0.001, True, 90, 7, (move,), 0.9, None)).splitlines()[-1]
    assert line.startswith("class 0, 1, regions 54, 55, 56, 57, 58, 59 and 94 more lost traffic: from 40.0% to 20.0%")


def test_strange_points(head: TrustHead) -> None:
    rng = np.random.default_rng(5)
    x, _, logits = draw(rng, 400)
    report = DriftMonitor(head).update(x + 1.5 * rng.normal(size=x.shape), logits)
    assert report.alarm
    assert any(move.change == "fell" and move.share > 2 * move.expected for move in report.moves)


def test_no_accuracy_beside_an_alarm_that_it_cannot_see_through(head: TrustHead) -> None:
    """Noise makes labels wrong within regions; the estimate, which rests on regions, would not see it."""
    rng = np.random.default_rng(15)
    monitor = DriftMonitor(head)
    x, _, logits = draw(rng, 600)
    before = monitor.update(x, logits)
    assert before.accuracy is not None
    noisy = x + 2.5 * rng.normal(size=x.shape)
    report = monitor.update(noisy, logits)
    assert report.alarm
    assert report.accuracy is None
    assert report.to_dict()["accuracy"] is None
    assert "accuracy of the accepted points: not known" in str(report)
    assert report.alarm_at is not None
    assert f"alarm at point {report.alarm_at}" in report.sentence


def test_predictions_of_other_labels_are_refused(head: TrustHead) -> None:
    x, _, logits = draw(np.random.default_rng(16), 20)
    monitor = DriftMonitor(head)
    with pytest.raises(ValueError, match="calibrated with logits; judge the stream with them too"):
        monitor.update_from(head.judge(x), with_logits=False)
    assert monitor.report().seen == 0
    assert monitor.update_from(head.judge(x, logits), with_logits=True).seen == 20


def test_only_monitors_of_one_head_are_merged(head: TrustHead) -> None:
    monitor = DriftMonitor(head)
    with pytest.raises(ValueError, match="given twice"):
        monitor.merge(monitor)
    other = copy.deepcopy(head).calibrate(*draw(np.random.default_rng(17), 300))
    for stranger in (DriftMonitor(other), DriftMonitor(head, alpha=0.05)):
        with pytest.raises(ValueError, match="cannot be merged"):
            monitor.merge(stranger)


def test_batches_do_not_matter(head: TrustHead) -> None:
    rng = np.random.default_rng(6)
    x, _, logits = draw(rng, 60, (0.2, 0.3, 0.5))
    out = head.judge(x, logits)
    whole, single = DriftMonitor(head), DriftMonitor(head)
    expected = whole.update_from(out, with_logits=True)
    for i in range(60):
        report = single.update_from(type(out)(*(column[i : i + 1] for column in out)), with_logits=True)
    assert report.p_value == pytest.approx(expected.p_value)
    assert report.seen == expected.seen
    assert [move[:4] for move in report.moves] == [move[:4] for move in expected.moves]
    for name, values in whole.state_dict().items():
        assert torch.allclose(values.double(), single.state_dict()[name].double(), equal_nan=True), name
    chunks = [(x[:30], logits[:30]), (x[30:], logits[30:])]
    *_, last = DriftMonitor(head).watch(chunks)
    assert last.seen == 60


def test_a_state_continues_and_workers_merge(head: TrustHead) -> None:
    rng = np.random.default_rng(7)
    x, _, logits = draw(rng, 300)
    odd, _, strange_logits = draw(rng, 300, (0.0, 0.05, 0.95))
    whole, first = DriftMonitor(head), DriftMonitor(head)
    whole.update(x, logits)
    expected = whole.update(odd, strange_logits)
    first.update(x, logits)
    again = DriftMonitor(head, seed=5)
    again.load_state_dict(first.state_dict())
    assert again.update(odd, strange_logits).p_value == pytest.approx(expected.p_value, rel=1e-6)
    kept = 128 * (first.head.in_features + 52)  # embeddings, identifiers and numbers of the rows around an alarm
    assert sum(values.numel() for values in first.state_dict().values()) < 2000 + kept
    other = DriftMonitor(head, seed=1)
    other.update(odd, strange_logits)
    merged = first.merge(other)
    report = merged.report()
    assert report.seen == 600
    assert report.p_value == pytest.approx(min(1.0, 2 * min(other.p_value, first.p_value)))
    assert report.alarm
    assert report.moves[0].classes == (2,)
    assert report.accepted == pytest.approx((first.report().accepted + other.report().accepted) / 2)
    assert merged.update(x, logits).seen == 900
    saved = merged.state_dict()
    saved["cells"] = saved["cells"][:, 1:]
    with pytest.raises(ValueError, match="load the state of a monitor with the same head"):
        merged.load_state_dict(saved)


def test_a_saved_monitor_continues_with_its_head_only(head: TrustHead, tmp_path: Path) -> None:
    rng, path = np.random.default_rng(7), tmp_path / "stream.safetensors"
    x, _, logits = draw(rng, 200)
    odd, _, strange_logits = draw(rng, 200, (0.0, 0.05, 0.95))
    whole, first = DriftMonitor(head, alpha=0.02, seed=3), DriftMonitor(head, alpha=0.02, seed=3)
    for monitor in (whole, first):
        monitor.update(x, logits)
    first.save(path)
    head.save(tmp_path / "head")
    again = DriftMonitor.load(path, TrustHead.load(tmp_path / "head"))
    assert (again.alpha, again.seed) == (0.02, 3)
    assert again.update(odd, strange_logits) == whole.update(odd, strange_logits)
    fresh = DriftMonitor(head)
    fresh.save(path)  # before the first point
    assert DriftMonitor.load(path, head).report().seen == 0
    calibrated_again = copy.deepcopy(head).calibrate(*draw(rng, 1200))
    other_threshold = copy.deepcopy(head)
    other_threshold.accept_at(flag_rate=0.4)
    for other in (calibrated_again, other_threshold):
        with pytest.raises(ValueError, match="belongs to another head, calibration or threshold"):
            DriftMonitor.load(path, other)
    with pytest.raises(FileFormatError, match="it holds a trust_head, not a drift_monitor"):
        DriftMonitor.load(tmp_path / "head", head)


def test_the_rows_that_moved_are_named(head: TrustHead, tmp_path: Path) -> None:
    """Those of the class that gained traffic, by their identifiers, in any batches, and after a file."""
    rng = np.random.default_rng(21)
    x, _, logits = draw(rng, 300)
    odd, y, odd_logits = draw(rng, 300, (0.05, 0.05, 0.9))
    z, scores, names = np.concatenate([x, odd]), np.concatenate([logits, odd_logits]), [f"row {i}" for i in range(600)]
    whole, single = DriftMonitor(head), DriftMonitor(head)
    assert whole.update(x, logits, ids=names[:300]).evidence is None
    report = whole.update(odd, odd_logits, ids=names[300:])
    for rows in np.array_split(np.arange(600), 90):
        again = single.update(z[rows], scores[rows], ids=[names[i] for i in rows])
    assert report.evidence is not None
    assert again.evidence == report.evidence
    assert report.evidence.kept == 128
    moved = [int(str(name).removeprefix("row ")) for name in report.evidence.ids]
    assert report.since is not None
    assert report.alarm_at is not None
    assert all(report.since <= row < report.alarm_at + 64 for row in moved)
    assert np.mean([y[row - 300] == 2 for row in moved if row >= 300]) > 0.8
    largest = report.evidence.groups[0]
    assert largest.label == 2
    assert set(largest.ids) <= set(report.evidence.ids)
    assert f"{len(largest.ids)} rows near region" in str(report)
    assert report.to_dict()["evidence"]["groups"][0]["ids"] == list(largest.ids)
    whole.save(tmp_path / "state")
    assert DriftMonitor.load(tmp_path / "state", head).report() == report
    merged = whole.merge(DriftMonitor(head, seed=1)).report()
    assert merged.evidence is not None
    assert merged.evidence.ids == report.evidence.ids


def test_rows_without_names_and_embeddings(head: TrustHead) -> None:
    rng = np.random.default_rng(22)
    x, _, logits = draw(rng, 400, (0.0, 0.0, 1.0))
    report = DriftMonitor(head).update_from(head.judge(x, logits), with_logits=True)
    assert report.evidence is not None
    assert set(report.evidence.ids) <= set(range(400))
    assert report.evidence.groups == ()
    numbered = DriftMonitor(head).update(x, logits, ids=np.arange(400) + 2**40)
    assert numbered.evidence is not None
    assert numbered.evidence.ids == tuple(int(i) + 2**40 for i in report.evidence.ids)
    with pytest.raises(ValueError, match="Got 3 ids for 400 rows"):
        DriftMonitor(head).update(x, logits, ids=[1, 2, 3])
    with pytest.raises(ValueError, match="Expected z of shape"):
        DriftMonitor(head).update_from(head.judge(x, logits), with_logits=True, z=x[:5])


def test_the_columns_that_moved() -> None:
    """In the names and the units of a table, with an encoding."""
    rng = np.random.default_rng(23)

    def table(rows: int, years: float) -> tuple[dict[str, np.ndarray], np.ndarray]:
        y = rng.integers(0, 2, rows)
        pet = np.where(rng.random(rows) < 0.5, "cat", "dog").astype(object)
        return {"age": rng.normal(40 + 20 * y + years, 5), "pay": rng.normal(3e4, 5e3, rows), "pet": pet}, y

    given, y = table(600, 0.0)
    encoding = TableEncoding.fit(given, ["age", "pay"], ["pet"])
    head = TrustHead.fit(encoding.encode(given).points, y, normalize=None, encoding=encoding)
    head.calibrate(*table(400, 0.0))
    report = DriftMonitor(head).update(table(300, 30.0)[0])
    assert report.evidence is not None
    first = report.evidence.columns[0]
    assert first.name == "age"
    assert first.mean == pytest.approx(80, abs=6)
    assert first.usual == pytest.approx(50, abs=6)
    assert "age" in str(report.evidence.groups[0])


def test_the_accuracy_interval_covers() -> None:
    """Over draws of calibration errors in cells, with other weights than in the stream; the seed is fixed."""
    rng, missed, draws, level = np.random.default_rng(8), 0, 400, 0.2
    risk, n, w = np.array([0.02, 0.1, 0.3]), np.array([300, 100, 50]), np.array([0.2, 0.5, 0.3])
    for _ in range(draws):
        estimate = float((w * rng.binomial(n, risk) / n).sum())
        low, high = poisson_interval(estimate, math.log(2.0 / level) / float((n / w).min()))
        missed += not low <= float((w * risk).sum()) <= high
    assert missed <= binom.isf(1e-3, draws, level)
    assert poisson_interval(0.0, 0.03)[0] == pytest.approx(0.0)
    assert poisson_interval(0.0, 0.03)[1] == pytest.approx(0.03)


def test_without_logits_and_input_errors(head: TrustHead) -> None:
    rng = np.random.default_rng(9)
    x, y, logits = draw(rng, 100)
    own = TrustHead.fit(x, y, dim=2, reference_points=0)
    with pytest.raises(RuntimeError, match="must be calibrated first"):
        DriftMonitor(own)
    own.calibrate(*draw(rng, 200)[:2])
    assert DriftMonitor(own).update(x).seen == 100
    with pytest.raises(ValueError, match="calibrated without logits"):
        DriftMonitor(own).update(x, logits)
    with pytest.raises(ValueError, match="calibrated with logits"):
        DriftMonitor(head).update(x)
    with pytest.raises(ValueError, match="alpha must lie between 0 and 1"):
        DriftMonitor(head, alpha=0.0)
    accuracy = DriftMonitor(head).report().accuracy
    assert accuracy is not None
    z, labels, logits = draw(rng, 400)
    of_units = TrustHead.fit(x, y, dim=2, reference_points=0).calibrate(z, labels, logits, units=np.arange(400) // 4)
    with pytest.raises(ValueError, match=r"came in units.* one row of each unit, without units="):
        DriftMonitor(of_units)
    DriftMonitor(of_units.calibrate(z[::4], labels[::4], logits[::4])).update(z[1::4], logits[1::4])
    assert math.isnan(accuracy.estimate)


def test_a_new_calibration_or_threshold_needs_a_new_monitor(head: TrustHead) -> None:
    rng = np.random.default_rng(0)
    again = copy.deepcopy(head)
    monitor = DriftMonitor(again)
    z, y, logits = draw(rng, 200)
    monitor.update(z, logits)
    for change in (lambda: again.calibrate(z, y, logits), lambda: again.accept_at(flag_rate=0.3)):
        change()
        with pytest.raises(RuntimeError, match="start a new DriftMonitor"):
            monitor.update(z, logits)
        monitor = DriftMonitor(again)
        assert monitor.update(z[:50], logits[:50]).seen == 50
