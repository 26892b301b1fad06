"""Promises for any score: the searches are those of heads, promises over many draws, NaN, forms, pictures, errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binom

from sepc_torch import ScoreAcceptance, accept_scores
from sepc_torch.head.promises import scores
from sepc_torch.head.promises.conformal import average_threshold, flag_threshold, risk_threshold
from sepc_torch.head.promises.groups import promised_delta

Rng = np.random.Generator


def draw(rng: Rng, count: int) -> tuple[Any, Any]:
    """Uniform scores; a prediction of score s is wrong with probability (1 - s) / 2, so above t (1 - t) / 4 are."""
    score = rng.random(count)
    return score, rng.random(count) >= (1.0 - score) / 2


def test_the_search_is_that_of_heads(rng: Rng) -> None:
    score, right = draw(rng, 1000)
    rule = accept_scores(score, right, risk=0.2, delta=0.1)
    found = risk_threshold(torch.from_numpy(score), torch.from_numpy(right), 0.2, 0.1)
    assert found.found
    assert (rule.threshold, rule.found) == (found.threshold, True)
    assert rule.coverage == pytest.approx(found.coverage)
    assert rule.error == pytest.approx(found.errors / found.accepted)
    rate = accept_scores(score, flag_rate=0.1)
    assert rate.threshold == flag_threshold(torch.from_numpy(score), 0.1)
    assert math.isnan(rate.error)
    assert rate.curves == ()


def test_a_risk_on_average_accepts_more(rng: Rng) -> None:
    score, right = draw(rng, 1000)
    rule = accept_scores(np.append(score, np.nan), np.append(right, False), risk=0.2, average=True)
    assert rule.threshold == average_threshold(torch.from_numpy(score), torch.from_numpy(right), 0.2)
    assert str(rule.promise) == "on average at most 20 % of the accepted labels are wrong"
    assert (rule(score) >= accept_scores(score, right, risk=0.2)(score)).all()
    with pytest.warns(UserWarning, match=r"no threshold keeps a risk of 0\.01 on average") as told:
        assert not accept_scores(score[:20], right[:20], risk=0.01, average=True).found
    assert told[0].filename == __file__
    for other in ({"flag_rate": 0.1}, {"risk": 0.2, "units": np.arange(1000)}):
        with pytest.raises(ValueError, match="over independent rows"):
            accept_scores(score, right, average=True, **other)


@pytest.mark.filterwarnings("ignore:.*cannot be promised in")
def test_the_risk_is_kept_in_every_group_at_once(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors do not depend on the score, at just above the risk: every threshold that is found breaks the promise."""
    monkeypatch.setattr(scores, "_shortfall", lambda *_: "")  # how many rows are lacking takes time to estimate
    draws, delta, risk, broken, alone = 150, 0.2, 0.1, 0, 0
    by = np.array(["a", "b", "c"])[np.arange(300) % 3]
    for _ in range(draws):
        score, right = rng.random(300), rng.random(300) >= 1.01 * risk
        broken += accept_scores(score, right, risk=risk, delta=delta, by=by).found
        parts = [by == name for name in "abc"]
        alone += any(
            risk_threshold(torch.from_numpy(score[p]), torch.from_numpy(right[p]), risk, delta).found for p in parts
        )
    assert binom.sf(broken - 1, draws, delta) > 1e-6
    assert binom.sf(alone - 1, draws, delta) < 1e-3  # groups that do not share delta break the promise


def test_groups_have_thresholds_of_their_own(rng: Rng) -> None:
    score, right = draw(rng, 3000)
    by = np.where(np.arange(3000) % 2, "easy", "hard")
    right |= by == "easy"
    rule = accept_scores(score, right, risk=0.15, by=by)
    level = promised_delta(np.array([1500, 1500]), 0.15, 0.05)
    for row in rule.groups:
        mine = by == row.group[0]
        found = risk_threshold(torch.from_numpy(score[mine]), torch.from_numpy(right[mine]), 0.15, level)
        assert row.threshold == found.threshold
        assert (rule(score, by=by)[mine] == (score[mine] >= found.threshold)).all()
    assert rule.groups[0].coverage > 0.99 > 0.8 > rule.groups[1].coverage
    assert rule([1.0, 1.0], by=["hard", "elsewhere"]).tolist() == [True, False]
    assert "hard" in str(rule)


def test_nan_is_refused_and_changes_no_risk(rng: Rng) -> None:
    score, right = draw(rng, 1000)
    with_nan, flags = np.append(score, np.full(1000, np.nan)), np.append(right, np.zeros(1000, dtype=bool))
    rule, plain = accept_scores(with_nan, flags, risk=0.2), accept_scores(score, right, risk=0.2)
    assert rule.threshold == plain.threshold
    assert rule.error == plain.error
    assert rule.coverage == pytest.approx(plain.coverage / 2)
    assert not rule(np.full(3, np.nan)).any()
    few = with_nan[:1005]  # five rows without a score are among the refused ones
    assert accept_scores(few, flag_rate=0.1).threshold == np.sort(score)[math.floor(0.1 * 1006) - 1 - 5]
    with pytest.raises(ValueError, match="1000 of 2000 scores are NaN"):
        accept_scores(with_nan, flag_rate=0.1)


def test_every_form_of_rows_has_the_same_rule(rng: Rng) -> None:
    score, right = draw(rng, 1000)
    score = score.astype(np.float32)
    table = pd.DataFrame({"score": score, "right": right})
    forms: list[tuple[Any, Any]] = [
        (score.tolist(), right.tolist()),
        (torch.from_numpy(score), torch.from_numpy(right)),
        (table["score"], table["right"]),
        (table["score"], table["right"].astype("boolean")),
    ]
    wanted = accept_scores(score, right, risk=0.2)
    for given in forms:
        rule = accept_scores(*given, risk=0.2)
        assert rule.threshold == wanted.threshold
        assert (rule(given[0]) == (score >= np.float32(wanted.threshold or 0.0))).all()


@pytest.mark.filterwarnings("ignore:Nothing is accepted")
def test_units_that_are_wrong_together_break_no_promise(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "least_unit_risk", lambda *_: 1.0)  # it takes time, and only a warning needs it
    draws, delta, risk, broken = 100, 0.1, 0.1, 0
    unit = np.repeat(np.arange(100), 10)
    for _ in range(draws):
        right = np.repeat(rng.random(100) >= 1.01 * risk, 10)
        score = rng.random(1000)
        broken += accept_scores(score, right, risk=risk, delta=delta, units=unit).found
    assert binom.sf(broken - 1, draws, delta) > 1e-6
    score, right = draw(rng, 4000)
    rule = accept_scores(score, right, risk=0.15, units=np.arange(4000) // 10)
    assert rule.found
    assert rule.promise.units
    assert rule.points == 2000  # half of the units set the threshold
    assert rule.curves[0].bound is None
    one_each = accept_scores(score, right, risk=0.15, units=np.arange(4000))
    assert one_each.threshold == accept_scores(score, right, risk=0.15).threshold


def test_the_bound_of_the_cost_holds_and_the_cost_is_near_the_least(rng: Rng) -> None:
    """A row of score s costs (1 - s) / 2 times 4; a review of 1 is cheaper below 0.5."""

    def cost(threshold: float) -> float:
        return threshold + (1.0 - threshold) ** 2

    draws, delta, broken = 100, 0.1, 0
    for _ in range(draws):
        rule = accept_scores(*draw(rng, 200), costs=4.0, review=1.0, delta=delta)
        assert rule.threshold is not None
        assert rule.promise.bound is not None
        broken += cost(min(max(rule.threshold, 0.0), 1.0)) > rule.promise.bound
    assert binom.sf(broken - 1, draws, delta) > 1e-6
    many = accept_scores(*draw(rng, 100_000), costs=4.0, review=1.0)
    assert cost(0.5) <= cost(many.threshold or 0.0) < 1.01 * cost(0.5)
    assert many.cost == pytest.approx(cost(0.5), rel=0.05)


def test_costs_of_rows_are_those_of_mistakes(rng: Rng) -> None:
    score, right = draw(rng, 600)
    by = np.arange(600) % 3
    one = accept_scores(score, right, costs=4.0, review=1.0, by=by)
    assert one.groups == accept_scores(score, right, costs=np.where(right, 0.0, 4.0), review=1.0, by=by).groups
    free = accept_scores(score, right, costs=4.0, review=0.0)
    assert (free.threshold, free.cost, free.promise.bound) == (math.inf, 0.0, 0.0)
    assert not free(score).any()


def test_the_curve_and_its_picture(rng: Rng) -> None:
    score, right = draw(rng, 1000)
    rule = accept_scores(score, right, risk=0.2)
    (curve,) = rule.curves
    assert "array" not in repr(rule)  # the numbers of the curve would fill the screen
    for t, coverage, risk, bound in zip(*(part[[3, 50, 99]] for part in curve if part is not None), strict=True):
        taken = score >= t
        assert (coverage, risk) == (pytest.approx(taken.mean()), pytest.approx((~right[taken]).mean()))
        assert bound > risk
    # The bound passes the risk where the threshold lies.
    assert curve.bound is not None
    assert curve.bound[curve.threshold >= (rule.threshold or 0.0)][-1] <= 0.2 + 0.01
    assert (curve.bound[curve.threshold < (rule.threshold or 0.0)] > 0.2).all()
    ax = rule.plot()
    assert len(ax.lines) == 4  # risk, bound, the chosen threshold, the promised risk
    assert accept_scores(score, right, risk=0.3, by=np.arange(1000) % 2).plot(ax) is ax
    with pytest.raises(ValueError, match="pass right"):
        accept_scores(score, flag_rate=0.1).plot()


def test_too_few_rows_are_told_what_they_lack(rng: Rng) -> None:
    score, right = draw(rng, 60)
    with pytest.warns(UserWarning, match=r"Nothing is accepted: 60 rows cannot promise a risk of 0.01"):
        rule = accept_scores(score, right, risk=0.01)
    assert (rule.found, rule.threshold, rule.coverage) == (False, math.inf, 0.0)
    assert str(rule.promise).startswith("nothing is accepted")
    with pytest.warns(UserWarning, match="units that set the threshold cannot promise"):
        assert not accept_scores(score, right, risk=0.01, units=np.arange(60) // 2).found


def rule(**options: Any) -> ScoreAcceptance:
    """A rule of 40 rows; the options replace what is given."""
    score = np.linspace(0.0, 1.0, 40)
    return accept_scores(**{"score": score, "right": score > 0.1, "risk": 0.2, **options})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"right": [True]}, ValueError, "Got 40 scores and 1 values of right"),
        ({"right": np.ones(40)}, TypeError, "right must hold booleans, got float64; use predicted == true"),
        ({"right": [True] * 39 + [None]}, TypeError, "right must hold booleans"),
        ({"right": np.zeros(40, dtype=bool)}, ValueError, "No prediction is right. Is right inverted"),
        ({"right": None}, ValueError, "need right"),
        ({"score": np.ones(40)}, ValueError, r"All scores are equal \(1\)"),
        ({"score": np.full(40, np.nan)}, ValueError, "All scores are NaN"),
        ({"score": np.ones((40, 2))}, ValueError, r"got the shape \(40, 2\)"),
        ({"score": ["a"] * 40}, TypeError, "score must hold numbers"),
        ({"score": []}, ValueError, "There are no scores"),
        ({"score": np.append(np.linspace(0, 1, 39), np.inf)}, ValueError, "Use a finite score"),
        ({"risk": 1.5}, ValueError, "risk must lie between 0 and 1"),
        ({"delta": 0.0}, ValueError, "delta must lie between 0 and 1"),
        ({"flag_rate": 0.1}, ValueError, "exactly one of risk, flag_rate and costs"),
        ({"by": np.zeros(40, dtype=int), "units": np.arange(40)}, ValueError, "leave out flag_rate and units"),
        ({"by": [1, 2]}, ValueError, "Got 2 by for 40 rows"),
        ({"units": np.arange(40) // 4}, ValueError, "10 rows or units are too few"),
        ({"risk": None, "costs": 1.0}, ValueError, "pass both"),
        ({"risk": None, "costs": [1.0], "review": 1.0}, ValueError, "each of the 40 rows; got 1"),
        ({"risk": None, "costs": -1.0, "review": 1.0}, ValueError, "costs must be a finite number of at least 0"),
        ({"risk": None, "costs": -np.ones(40), "review": 1.0}, ValueError, "add a constant"),
    ],
)
def test_invalid_requests(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rule(**options)


def test_a_rule_takes_groups_only_if_it_has_them() -> None:
    with pytest.raises(ValueError, match="leave out by="):
        rule()([0.5], by=[0])
    with pytest.raises(ValueError, match="pass by="):
        rule(risk=0.5, by=np.zeros(40, dtype=int))([0.5])
