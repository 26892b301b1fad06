"""Promises over units of rows: failures over many draws, power, agreement with plain loops, heads, and input errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom

from sepc_torch import TrustHead
from sepc_torch.data import files, schemas
from sepc_torch.head.calibration.label_calibration import LabelCalibration
from sepc_torch.head.promises.conformal import flag_threshold, risk_threshold
from sepc_torch.head.promises.units import (
    UnitRows,
    UnitShares,
    candidates,
    least_unit_risk,
    log_capital,
    unit_flag_threshold,
    unit_risk_threshold,
    unit_shares,
    units_needed,
)

Rng = np.random.Generator
ROWS = 10  # rows of a unit
HARD = 0.1  # share of units where half of the labels are wrong, and no score shows it


def draw_rows(rng: Rng, units: int) -> UnitRows:
    """Rows whose risk above a score t is known: 0.05 + 0.045 (1 - t)."""
    score = rng.random((units, ROWS))
    wrong = rng.random((units, ROWS)) < np.where(rng.random((units, 1)) < HARD, 0.5, 0.1 * (1.0 - score))
    return UnitRows(score.ravel(), ~wrong.ravel(), np.repeat(np.arange(units), ROWS))


def true_risk(threshold: float) -> float:
    return 0.5 * HARD + 0.05 * (1.0 - HARD) * (1.0 - threshold)


def whole_units(rng: Rng, units: int, share: float) -> UnitRows:
    """Units in which all labels are wrong or none, and a score without information."""
    right = np.repeat(rng.random(units) >= share, ROWS)
    return UnitRows(rng.random(units * ROWS), right, np.repeat(np.arange(units), ROWS))


def no_more_than(failures: int, draws: int, delta: float) -> bool:
    """Whether chance explains the failures with a probability above one in a million."""
    return bool(binom.sf(failures - 1, draws, delta) > 1e-6)


@pytest.mark.slow
def test_the_promise_fails_in_at_most_a_share_delta_of_draws(rng: Rng) -> None:
    draws, units, delta, failures = 300, 200, 0.1, 0
    for _ in range(draws):
        ranked, fitted = draw_rows(rng, units), draw_rows(rng, units)
        risk = 0.08  # kept above the score 1 / 3 only
        found = unit_risk_threshold(ranked, fitted, candidates(fitted.score), risk, delta)
        failures += found < math.inf and true_risk(found) > risk
    assert no_more_than(failures, draws, delta)


@pytest.mark.slow
def test_the_promise_holds_if_all_labels_of_a_unit_are_wrong_together(rng: Rng) -> None:
    draws, delta, risk, failures, failures_of_rows = 1000, 0.05, 0.1, 0, 0
    for _ in range(draws):
        ranked, fitted = whole_units(rng, 60, 1.01 * risk), whole_units(rng, 60, 1.01 * risk)
        failures += unit_risk_threshold(ranked, fitted, candidates(fitted.score)[::10], risk, delta) < math.inf
    for _ in range(300):
        score, right, _ = whole_units(rng, 60, 1.01 * risk)
        failures_of_rows += risk_threshold(torch.from_numpy(score), torch.from_numpy(right), risk, delta).found
    assert no_more_than(failures, draws, delta)
    assert failures > 0  # luck finds a threshold, so the test can fail
    assert not no_more_than(failures_of_rows, 300, delta)  # the search for independent rows breaks the promise


def test_200_units_accept_nearly_what_the_known_distribution_allows(rng: Rng) -> None:
    accepted = []
    for _ in range(20):
        ranked, fitted = draw_rows(rng, 200), draw_rows(rng, 200)
        accepted.append(1.0 - unit_risk_threshold(ranked, fitted, candidates(fitted.score), 0.14, 0.05))
    assert np.median(accepted) > 0.9  # at most 9.5 % of all rows are wrong


def test_shares_agree_with_a_loop_over_units(rng: Rng) -> None:
    unit = rng.integers(0, 7, 60) * 11 - 5
    rows = UnitRows(rng.integers(0, 9, 60) / 8.0, rng.random(60) < 0.7, unit)
    thresholds = np.array([1.5, 1.0, 0.5, 0.3, -1.0])
    found = unit_shares(rows, thresholds)
    for t, threshold in enumerate(thresholds):
        taken = rows.score >= threshold
        accepted = sorted(taken[unit == u].mean() for u in np.unique(unit))
        wrong = sorted((taken & ~rows.right)[unit == u].mean() for u in np.unique(unit))
        np.testing.assert_allclose(np.sort(found.accepted[t]), accepted)
        np.testing.assert_allclose(np.sort(found.wrong[t]), wrong)


def test_capital_agrees_with_bets_placed_one_after_the_other(rng: Rng) -> None:
    accepted = rng.random((3, 30))
    wrong = accepted * (rng.random((3, 30)) < 0.1)
    risk, delta = 0.2, 0.05
    for t in range(3):
        capital, best, seen = 1.0, 0.0, [0.5]
        squares = 0.25
        for a, w in zip(accepted[t], wrong[t], strict=True):
            bet = min(math.sqrt(2 * math.log(1 / delta) / (30 * squares / len(seen))), 0.999 / (1 - risk))
            capital *= 1 + bet * (risk * a - w)
            best = max(best, capital)
            seen.append(risk + w - risk * a)
            squares += (seen[-1] - sum(seen) / len(seen)) ** 2
        found = log_capital(UnitShares(accepted[t : t + 1], wrong[t : t + 1]), risk, delta)
        np.testing.assert_allclose(found, math.log(best))


def test_least_risk_is_promised_and_no_smaller_one(rng: Rng) -> None:
    ranked, fitted = draw_rows(rng, 100), draw_rows(rng, 100)
    thresholds = candidates(fitted.score)
    least = least_unit_risk(ranked, fitted, thresholds, 0.05)
    assert unit_risk_threshold(ranked, fitted, thresholds, least, 0.05) < math.inf
    assert unit_risk_threshold(ranked, fitted, thresholds, 0.9 * least, 0.05) == math.inf


def test_units_needed_are_about_enough(rng: Rng) -> None:
    # One estimate from 50 units varies by a factor of several, so that the median of many is tested.
    draws = [draw_rows(rng, 50) for _ in range(15)]
    estimates = [units_needed(few, candidates(few.score), 0.15, 0.05) for few in draws]
    needed = round(float(np.median([math.inf if some is None else some for some in estimates])))
    found = [
        unit_risk_threshold(draw_rows(rng, 2 * needed), fitted, candidates(fitted.score), 0.15, 0.05)
        for fitted in (draw_rows(rng, 100) for _ in range(15))
    ]
    assert np.median(found) < math.inf
    wrong = whole_units(rng, 50, 0.5)
    assert (
        units_needed(wrong._replace(right=np.zeros(len(wrong.right), dtype=bool)), np.array([0.5]), 0.1, 0.05) is None
    )


def test_a_unit_is_refused_at_the_flag_rate_on_average(rng: Rng) -> None:
    refused = []
    for _ in range(1500):
        level = rng.normal(size=(41, 1))  # units of rows with nearly equal scores
        score = level + 0.1 * rng.normal(size=(41, 6))
        threshold = unit_flag_threshold(score[:40].ravel(), np.repeat(np.arange(40), 6), 0.2)
        refused.append((score[40] < threshold).mean())
    error = np.std(refused) / math.sqrt(len(refused))
    assert 0.15 < np.mean(refused) < 0.2 + 5 * error


def test_units_of_one_row_have_the_flag_threshold_of_rows(rng: Rng) -> None:
    score = rng.integers(0, 50, 99) / 7.0
    for rate in (0.005, 0.05, 0.29, 0.9):
        rows = flag_threshold(torch.from_numpy(score), rate)
        assert unit_flag_threshold(score, np.arange(99), rate) == rows


def draw(rng: Rng, pictures: int, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Embeddings, labels, logits and pictures; in one picture of ten half of the labels are wrong."""
    picture = np.repeat(np.arange(pictures), rows)
    label = rng.integers(0, 3, len(picture))
    z = rng.normal(size=(len(picture), 5)) + 4.0 * np.eye(3, 5)[label]
    hard = (rng.random(pictures) < HARD)[picture]
    y = np.where(hard & (rng.random(len(picture)) < 0.5), (label + 1) % 3, label)
    return z, y, 4.0 * np.eye(3)[label] + 0.5 * rng.normal(size=(len(picture), 3)), picture


@pytest.fixture(scope="module")
def fitted_head(module_rng: Rng) -> TrustHead:
    z, y, _, _ = draw(module_rng, 30)
    return TrustHead.fit(z, y, dim=3, normalize=None)


@pytest.fixture
def head(fitted_head: TrustHead) -> TrustHead:
    """A head without a promise of an earlier test."""
    fitted_head.promise = None
    return fitted_head


def labels_of(head: TrustHead) -> LabelCalibration:
    return head.require_calibration().network


@pytest.mark.slow
def test_a_head_promises_over_the_units_of_its_calibration(rng: Rng, head: TrustHead, tmp_path: Path) -> None:
    *data, picture = draw(rng, 200)
    names = [f"picture {p}" for p in picture]
    head.calibrate(*data, units=names)
    ranked = labels_of(head).ranked_rows.numpy()
    assert not np.intersect1d(picture[ranked], np.delete(picture, ranked)).size
    assert len(np.unique(picture[ranked])) == 160
    assert "on average over units" in str(head.promise)

    found = head.accept_at(risk=0.15, delta=0.1)
    assert head.accept_at(risk=0.15, delta=0.1, units=picture) == found
    assert str(head.promise) == (
        "at most 15 % of the accepted labels are wrong over units, with probability 90 % over calibration sets"
    )
    assert found.found
    assert found.points == 160 * ROWS
    accept = head.judge(data[0], data[2]).accept.numpy()
    by_unit = accept[ranked].reshape(160, ROWS).mean(axis=1)
    assert found.coverage == pytest.approx(by_unit.mean())
    assert found.coverage > 0.5

    head.save(tmp_path / "head.safetensors")
    loaded = TrustHead.load(tmp_path / "head.safetensors")
    assert loaded.promise == head.promise
    assert loaded.accept_at(risk=0.15, delta=0.1) == found
    copied = TrustHead.empty()
    copied.load_state_dict(head.state_dict())
    assert copied.accept_at(risk=0.15, delta=0.1) == found


def test_the_refused_share_is_a_mean_over_units(rng: Rng, head: TrustHead) -> None:
    z, y, logits, picture = draw(rng, 60)
    large = np.concatenate([np.arange(len(z)), np.tile(np.flatnonzero(picture < 10), 9)])  # pictures of 10 and 100 rows
    head.calibrate(z[large], y[large], logits[large], units=picture[large])
    found = head.accept_at(flag_rate=0.3)
    rows, _ = labels_of(head).unit_rows()
    refused = [(rows.score[rows.unit == u] < found.threshold).mean() for u in np.unique(rows.unit)]
    assert 1.0 - found.coverage == pytest.approx(np.mean(refused))
    assert sum(refused) + 1.0 <= 0.3 * (len(refused) + 1) * (1 + 1e-9)
    with pytest.warns(UserWarning, match=r"60 units with .* are too few for flag_rate=0.01; about \d+ more units"):
        head.accept_at(flag_rate=0.01)


@pytest.mark.slow
def test_a_new_calibration_keeps_the_promise_over_units(rng: Rng, head: TrustHead) -> None:
    *data, picture = draw(rng, 200)
    head.calibrate(*data, units=picture).accept_at(risk=0.2)
    *again, other = draw(rng, 200)
    head.calibrate(*again, units=other)
    assert head.promise is not None
    assert head.promise.units
    assert head.promise.risk == 0.2
    threshold = float(labels_of(head).threshold)
    assert head.accept_at(risk=0.2).threshold == threshold

    with pytest.warns(UserWarning, match=r"accepts nothing: its promise is over units.*calibrate\(\.\.\., units=ids\)"):
        head.calibrate(*again)
    assert not head.judge(again[0], again[2]).accept.any()
    assert str(head.promise) == "nothing is accepted: no threshold keeps a risk of 20 % over units"
    head.accept_at(risk=0.2, by="predicted")
    with pytest.warns(UserWarning, match=r"accepts nothing: its promise is by group.*without by="):
        head.calibrate(*again, units=other)
    assert not head.judge(again[0], again[2]).accept.any()


def test_too_few_units_are_told_with_the_number_that_is_needed(rng: Rng, head: TrustHead) -> None:
    *data, picture = draw(rng, 40)
    head.calibrate(*data, units=picture)
    with pytest.warns(UserWarning, match=r"40 units with 400 calibration points \(20 of them set thresholds\) cannot"):
        assert not head.accept_at(risk=0.01).found


def test_units_of_one_row_are_independent_rows(rng: Rng, head: TrustHead) -> None:
    *data, _ = draw(rng, 600, 1)
    rows = head.calibrate(*data).accept_at(risk=0.2)
    names = np.arange(600)[::-1].astype(str)
    assert head.accept_at(risk=0.2, units=names) == rows
    assert head.calibrate(*data, units=names).accept_at(risk=0.2) == rows
    assert head.promise is not None
    assert not head.promise.units


@pytest.mark.slow
def test_unusable_units_are_refused(rng: Rng, head: TrustHead) -> None:
    *data, picture = draw(rng, 60)
    head.calibrate(*data)
    with pytest.raises(ValueError, match=r"other units or none. Call calibrate\(\.\.\., units=ids\)"):
        head.accept_at(risk=0.2, units=picture)
    head.calibrate(*data, units=picture)
    with pytest.raises(ValueError, match=r"\d+ of the given units do both. Call calibrate"):
        head.accept_at(risk=0.2, units=picture // 10)
    arguments: list[dict[str, Any]] = [{"units": picture, "by": "class"}, {"by": "predicted"}]
    for given in arguments:
        with pytest.raises(ValueError, match=r"by group hold for independent points.*Leave out by="):
            head.accept_at(risk=0.2, **given)
    with pytest.raises(ValueError, match="Got 3 units for 600 rows"):
        head.calibrate(*data, units=[1, 2, 3])
    with pytest.raises(TypeError, match="units must be integers or strings"):
        head.calibrate(*data, units=picture / 2.0)
    with pytest.raises(ValueError, match=r"600 points in 1 units leaves 0 to rank.*Give more units"):
        head.calibrate(*data, units=np.zeros(600, dtype=int))
    with pytest.warns(UserWarning, match=r"600 calibration points have only 60 different ids.*Pass units=ids"):
        head.calibrate(*data, ids=picture)
    head.calibrate(*data, ids=picture, units=picture)


def test_a_file_with_the_units_of_some_points_is_refused(rng: Rng, head: TrustHead, tmp_path: Path) -> None:
    *data, picture = draw(rng, 60)
    head.calibrate(*data, units=picture).save(tmp_path / "head.safetensors")
    arrays, options = files.read(tmp_path / "head.safetensors", "trust_head")
    for name, what in (("point_unit", "units of the calibration"), ("fitted_joint", "scores of the fitted")):
        damaged = arrays | {f"calibration.own.{name}": arrays[f"calibration.own.{name}"][:-1]}
        damaged["calibration.own.fitted_right"] = np.ones(len(damaged["calibration.own.fitted_joint"]), dtype=bool)
        with pytest.raises(ValueError, match=f"{what} points are not complete"):
            schemas.check("trust_head", damaged, options)
