"""Thresholds of least cost: the bound over many draws, near the best thresholds, heads, edge cases and input errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binom

from sepc_torch import TrustHead
from sepc_torch.head.promises.costs import (
    CostRows,
    cheapest_thresholds,
    cost_bound,
    cost_matrix,
    cost_range,
    row_costs,
    unit_means,
)

Rng = np.random.Generator
# Predicting class 0 for class 1 costs ten times as much as any other mistake.
COSTS = np.array([[0.0, 1.0, 1.0], [10.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
REVIEW = 0.3


def draw_rows(rng: Rng, count: int, costs: Any = COSTS) -> CostRows:
    """Rows whose score is uniform from 1/3 to 1, the probability of the label; the other classes are equally likely."""
    label, score = rng.integers(0, 3, count), rng.uniform(1 / 3, 1, count)
    right = rng.random(count) < score
    truth = np.where(right, label, (label + rng.integers(1, 3, count)) % 3)
    return CostRows(score, costs[truth, label], label, np.arange(count))


def expected_cost(thresholds: Any, costs: Any = COSTS, review: float = REVIEW) -> float:
    """The exact expected cost of a row: a row of class k and score s costs (1 - s) m_k, with the mean cost m_k."""
    lowest = np.clip(np.minimum(thresholds, 1.0), 1 / 3, 1.0)
    mean = costs.sum(axis=0) / 2
    accepted = mean * (1.0 - lowest) ** 2 / 2 / (2 / 3)
    return float((accepted + review * (lowest - 1 / 3) / (2 / 3)).mean())


def best_thresholds(costs: Any = COSTS, review: float = REVIEW) -> Any:
    """Accept where the expected cost of the label is below that of a review."""
    return 1.0 - review / (costs.sum(axis=0) / 2)


@pytest.mark.parametrize(("rows", "draws"), [(60, 100), pytest.param(400, 500, marks=pytest.mark.slow)])
def test_the_bound_holds_in_a_share_1_minus_delta_of_draws(rng: Rng, rows: int, draws: int) -> None:
    delta, failures = 0.1, 0
    for _ in range(draws):
        thresholds = cheapest_thresholds(draw_rows(rng, rows), REVIEW, 3)
        ranked = draw_rows(rng, rows)
        means = unit_means(row_costs(ranked, thresholds, REVIEW), ranked.unit)
        bound = cost_bound(means, *cost_range(COSTS, thresholds, REVIEW), delta)
        failures += bound < expected_cost(thresholds)
    assert binom.sf(failures - 1, draws, delta) > 1e-6


def test_the_bound_holds_for_rare_large_costs(rng: Rng) -> None:
    """A bound by the standard error of the mean fails far more often."""
    draws, delta, failures, naive = 200, 0.1, 0, 0
    for _ in range(draws):
        costs = (rng.random(100) < 0.01) * 10.0
        failures += cost_bound(costs, 0.0, 10.0, delta) < 0.1
        naive += costs.mean() + 1.28 * costs.std() / 10.0 < 0.1
    assert binom.sf(failures - 1, draws, delta) > 1e-6
    assert binom.sf(naive - 1, draws, delta) < 1e-6


def test_the_bound_holds_over_units_whose_rows_are_equal(rng: Rng) -> None:
    draws, delta, failures, of_rows = 100, 0.1, 0, 0
    for _ in range(draws):
        costs, unit = np.repeat(rng.random(60) < 0.1, 20) * 1.0, np.repeat(np.arange(60), 20)
        failures += cost_bound(unit_means(costs, unit), 0.0, 1.0, delta) < 0.1
        of_rows += cost_bound(unit_means(costs, np.arange(1200)), 0.0, 1.0, delta) < 0.1
    assert binom.sf(failures - 1, draws, delta) > 1e-6
    assert binom.sf(of_rows - 1, draws, delta) < 1e-3  # rows are not independent


def test_many_rows_choose_nearly_the_best_thresholds(rng: Rng) -> None:
    best = expected_cost(best_thresholds())
    found = cheapest_thresholds(draw_rows(rng, 100_000), REVIEW, 3)
    assert best <= expected_cost(found) < 1.01 * best
    one = cheapest_thresholds(draw_rows(rng, 100_000)._replace(group=np.zeros(100_000, dtype=int)), REVIEW, 1)
    assert expected_cost(np.repeat(one, 3)) > 1.05 * best


def test_classes_alike_share_one_threshold_in_most_draws(rng: Rng) -> None:
    equal = 1.0 - np.eye(3)
    shared = 0
    for _ in range(40):
        found = cheapest_thresholds(draw_rows(rng, 300, equal), REVIEW, 3)
        shared += sum(np.bincount(np.unique(found, return_inverse=True)[1]) - 1)
    assert shared >= 40  # of 80: at least half of the classes keep the common threshold


def test_edges(rng: Rng) -> None:
    rows = draw_rows(rng, 200)
    assert (cheapest_thresholds(rows, 0.0, 3) == math.inf).all()  # a review is free
    free = cheapest_thresholds(rows._replace(cost=np.zeros(200)), 1.0, 3)
    assert (free == rows.score.min()).all()  # no label costs anything
    assert (cheapest_thresholds(rows._replace(cost=np.zeros(200)), 0.0, 3) == math.inf).all()
    assert cost_bound(np.full(50, 0.3), 0.3, 0.3, 0.05) == 0.3
    nothing = rows._replace(score=np.full(200, np.nan))
    assert (cheapest_thresholds(nothing, 1.0, 3) == math.inf).all()
    assert (row_costs(nothing, np.zeros(3), 1.0) == 1.0).all()


@pytest.fixture(scope="module")
def fitted() -> TrustHead:
    z, y, _ = draw(np.random.default_rng(0), 300)
    return TrustHead.fit(z, y, normalize=None)


@pytest.fixture
def head(fitted: TrustHead) -> TrustHead:
    fitted.promise = None
    return fitted


def draw(rng: Rng, count: int) -> tuple[Any, Any, Any]:
    y = rng.integers(0, 3, count)
    z = rng.normal(size=(count, 6)) + 2.0 * np.eye(3, 6)[y]
    return z, y, 2.0 * z[:, :3]


def mean_cost(head: TrustHead, z: Any, y: Any, logits: Any) -> float:
    out = head.judge(z, logits)
    return float(np.where(out.accept.numpy(), COSTS[y, out.network_label.numpy()], REVIEW).mean())


def test_a_head_keeps_the_bound_and_saves_costs(rng: Rng, head: TrustHead) -> None:
    head.calibrate(*draw(rng, 3000))
    found = head.accept_at(costs=COSTS, review=REVIEW, delta=1e-4)
    cost = mean_cost(head, *draw(rng, 20_000))
    assert found.cost < found.bound
    assert cost < found.bound
    assert cost < min(0.95 * found.cost_of_all, REVIEW)
    assert head.promise is not None
    assert head.promise.bound == found.bound
    assert str(head.promise).startswith(f"the expected cost of a row is at most {found.bound:.3g}, with probability")


def test_ranked_rows_have_the_stated_cost(rng: Rng, head: TrustHead) -> None:
    rows = draw(rng, 800)
    found = head.calibrate(*rows).accept_at(costs=COSTS, review=REVIEW)
    assert head.calibration is not None
    held = head.calibration.network.ranked_rows.numpy()
    z, y, logits = (part[held] for part in rows)
    assert found.cost == pytest.approx(mean_cost(head, z, y, logits))
    assert found.coverage == pytest.approx(float(head.judge(z, logits).accept.double().mean()))


def test_files_state_dicts_and_new_calibrations_keep_the_promise(rng: Rng, head: TrustHead, tmp_path: Path) -> None:
    head.calibrate(*draw(rng, 2000)).accept_at(costs=COSTS, review=REVIEW)
    head.save(tmp_path / "head.safetensors")
    copy = TrustHead.empty()
    copy.load_state_dict(head.state_dict())
    z, _, logits = draw(rng, 500)
    for other in (TrustHead.load(tmp_path / "head.safetensors"), copy):
        assert other.promise == head.promise
        assert torch.equal(other.judge(z, logits).accept, head.judge(z, logits).accept)
        before = other.promise
        other.calibrate(*draw(rng, 2000))
        assert before is not None
        assert other.promise is not None
        assert other.promise.costs == before.costs
        assert other.promise.bound is not None
        assert other.promise.bound != before.bound


def test_a_number_is_the_cost_of_any_mistake_and_tables_are_matched_by_name(rng: Rng, head: TrustHead) -> None:
    head.calibrate(*draw(rng, 600))
    assert head.accept_at(costs=2, review=0.2) == head.accept_at(costs=2 * (1 - np.eye(3)), review=0.2)
    turned = [2, 0, 1]
    table = pd.DataFrame(COSTS[np.ix_(turned, turned)], index=turned, columns=turned)
    by_name, by_place = head.accept_at(costs=table, review=0.2), head.accept_at(costs=COSTS, review=0.2)
    assert by_name == by_place == head.accept_at(costs=torch.tensor(COSTS), review=0.2)
    with pytest.raises(ValueError, match="classes as its index and columns"):
        head.accept_at(costs=table.rename(columns={0: "a"}), review=0.2)


def test_a_free_review_refuses_all_and_says_why(rng: Rng, head: TrustHead) -> None:
    head.calibrate(*draw(rng, 600))
    found = head.accept_at(costs=COSTS, review=0.0)
    assert (found.thresholds, found.coverage, found.bound) == ((math.inf,), 0.0, 0.0)
    explained = head.explain(np.full(6, 1.0), logits=[3.0, 0.0, 0.0])
    assert "a review costs less" in explained.sentence  # type: ignore[union-attr]
    free = head.accept_at(costs=np.zeros((3, 3)), review=1.0)
    assert free.coverage > 0.95
    assert free.cost_of_all == 0.0


def test_units_count_alike(rng: Rng, head: TrustHead) -> None:
    z, y, logits = draw(rng, 1000)
    found = head.calibrate(z, y, logits, units=np.arange(1000) // 10).accept_at(costs=COSTS, review=REVIEW)
    head.promise = None
    rows = head.calibrate(z, y, logits).accept_at(costs=COSTS, review=REVIEW)
    assert found.bound > rows.bound  # fifty units say less than five hundred rows


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"costs": COSTS}, ValueError, "pass both"),
        ({"review": 1.0, "risk": 0.1}, ValueError, "pass both"),
        ({"costs": COSTS, "review": 1.0, "risk": 0.1}, ValueError, "exactly one of risk, flag_rate and costs"),
        ({"costs": COSTS, "review": 1.0, "by": "predicted"}, ValueError, "leave out by"),
        ({"costs": COSTS[:2], "review": 1.0}, ValueError, r"shape \(3, 3\).*got the shape \(2, 3\)"),
        ({"costs": -COSTS, "review": 1.0}, ValueError, "at least 0; add a constant"),
        ({"costs": COSTS * math.nan, "review": 1.0}, ValueError, "finite"),
        ({"costs": "high", "review": 1.0}, TypeError, "a number or a matrix"),
        ({"costs": COSTS, "review": -1.0}, ValueError, "review must be a finite number of at least 0"),
        ({"costs": COSTS, "review": 1.0, "delta": 0.0}, ValueError, "delta must lie between 0 and 1"),
    ],
)
def test_invalid_requests(
    rng: Rng, head: TrustHead, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    head.calibrate(*draw(rng, 100))
    before = head.promise
    with pytest.raises(error, match=message):
        head.accept_at(**given)
    assert head.promise == before


def test_cost_matrices_are_checked() -> None:
    assert (cost_matrix([[0, 1], [2, 0]], ["a", "b"]) == [[0, 1], [2, 0]]).all()
