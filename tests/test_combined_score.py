"""Survival of nonconformity scores, and their combination: formula, weights, tails, uniformity."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import gamma
from torch import Tensor

from sepc_torch.head.calibration.combined_score import SCORE_RESOLUTION, CombinedScore, log_survival
from sepc_torch.shapes import Array

Rng = np.random.Generator


@pytest.mark.parametrize("count", [2, 5, 6, 20, 333])
@pytest.mark.parametrize("ties", [False, True])
def test_survival_decreases_from_one_towards_zero(rng: Rng, count: int, ties: bool) -> None:
    values = rng.integers(0, 6, count).astype(float) if ties else rng.gamma(2.0, size=count)
    ordered = torch.from_numpy(values).sort().values
    grid = torch.cat([torch.linspace(-1.0, 30.0, 5000, dtype=torch.float64), ordered]).sort().values
    found = log_survival(ordered, grid)
    assert found.isfinite().all()
    assert (found.diff() <= 0).all()
    assert (found <= 0).all()
    assert found[0] == 0.0
    beyond = log_survival(ordered, torch.tensor([1e3, 1e6, 1e30, torch.inf, torch.nan], dtype=torch.float64))
    assert beyond.isfinite().all(), "the log survival must be finite"
    assert (beyond.diff() <= 0).all()
    assert beyond[3] == beyond[4]


def lifted(ordered: Tensor, values: Tensor) -> Tensor:
    """Values that count as the given ones: a value counts as smaller by the resolution."""
    shift = SCORE_RESOLUTION * ordered.abs().mean()
    return (values + shift) / (1.0 - torch.where(values >= -shift, 1.0, -1.0).double() * SCORE_RESOLUTION)


def test_survival_is_the_p_value_at_calibration_scores(rng: Rng) -> None:
    """Below the tail, linear between two scores, and continuous at the start of the tail."""
    ordered = torch.from_numpy(rng.normal(size=200)).sort().values
    place = torch.arange(200, dtype=torch.float64)
    start = 200 - 1 - 20
    steepest = float(1 / ordered.diff().min())
    found = log_survival(ordered, lifted(ordered, ordered[: start + 1])).exp()
    assert torch.allclose(found, (201 - place[: start + 1]) / 201, atol=1e-12 * (1 + steepest))
    middle = log_survival(ordered, lifted(ordered, (ordered[:start] + ordered[1 : start + 1]) / 2)).exp()
    assert torch.allclose(middle, (found[:-1] + found[1:]) / 2, atol=1e-9)
    edge = ordered[start]
    gap = 1e-9 * torch.tensor([-1.0, 1.0], dtype=torch.float64)
    before, after = log_survival(ordered, lifted(ordered, edge + gap))
    assert float(before - after) <= 2e-9 * float(steepest / 20 + 10.0)


@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
def test_rounding_errors_do_not_lift_a_value_above_equal_scores(rng: Rng, share: float) -> None:
    """A share of the calibration scores is one value, as for repeated embeddings."""
    scores = rng.normal(size=500)
    scores[: round(500 * share)] = value = rng.choice(scores)
    ordered = torch.from_numpy(np.sort(scores))
    noisy = value * (1.0 + 1e-7 * torch.linspace(-1.0, 1.0, 21, dtype=torch.float64))
    found = log_survival(ordered, noisy)
    at_least = float((ordered >= value).double().mean())
    assert (found.exp() >= 0.95 * at_least).all() or at_least < 0.12  # in the tail the share is a model
    assert float(found.max() - found.min()) < 1e-2


def test_the_tail_is_exponential(rng: Rng) -> None:
    """For exponential scores the mean excess of the 100 largest has a gamma distribution."""
    ordered = torch.from_numpy(rng.exponential(size=1000)).sort().values
    far = log_survival(ordered, torch.tensor([50.0, 51.0], dtype=torch.float64))
    mean_excess = 1.0 / float(far[0] - far[1])
    assert gamma.ppf(1e-8, 100) / 100 < mean_excess < gamma.isf(1e-8, 100) / 100
    start = ordered[1000 - 1 - 100]
    assert mean_excess == pytest.approx(float((ordered[-100:] - start).mean()), rel=2 * SCORE_RESOLUTION)


def test_survival_of_new_points_is_uniform(rng: Rng) -> None:
    """Kolmogorov-Smirnov distance, within the Dvoretzky-Kiefer-Wolfowitz bound of both samples."""
    count = 4000
    bound = 2 * math.sqrt(math.log(2 / 1e-8) / (2 * count))
    for draw in (rng.exponential, rng.normal, rng.lognormal):
        ordered = torch.from_numpy(draw(size=count)).sort().values
        share = log_survival(ordered, torch.from_numpy(draw(size=count))).exp().sort().values
        uniform = torch.arange(1, count + 1) / count
        # A wrong tail could shift the largest tenth by 0.1; an exponential tail of normal scores shifts it by 0.01.
        assert float((share - uniform).abs().max()) < bound + 0.02


def test_equal_scores_give_a_step() -> None:
    ordered = torch.full((50,), 2.0, dtype=torch.float64)
    found = log_survival(ordered, torch.tensor([1.0, 2.0, 2.1], dtype=torch.float64))
    assert found[:2].tolist() == [0.0, 0.0]
    assert found[2] < -1e3


class TestStrangeness:
    def fitted(self, rng: Rng, kinds: int = 3, count: int = 500) -> tuple[CombinedScore, Tensor]:
        """Mistakes are more likely where the sum of the scores, each in its unit, is large."""
        scores = rng.gamma(2.0, size=(count, kinds))
        wrong = rng.random(count) < 1 / (1 + np.exp(3.0 * kinds - scores.sum(axis=1)))
        nonconformity = torch.from_numpy(scores * 10.0 ** np.arange(kinds))
        model = CombinedScore(kinds)
        model.fit(nonconformity, torch.from_numpy(wrong))
        return model, nonconformity

    def test_the_formula(self, rng: Rng) -> None:
        """Against NumPy, with weights from an independent solver."""
        count, kinds = 400, 3
        nonconformity = rng.normal(size=(count, kinds))
        wrong = rng.random(count) < 1 / (1 + np.exp(2.0 - 2.0 * nonconformity[:, 0] - nonconformity[:, 1]))
        model = CombinedScore(kinds)
        model.fit(torch.from_numpy(nonconformity), torch.from_numpy(wrong))
        fresh = 3.0 * rng.normal(size=(100, kinds))

        def surprise(points: Array) -> Array:
            columns = zip(nonconformity.T, points.T, strict=True)
            shares = [log_survival(torch.from_numpy(np.sort(a)), torch.from_numpy(b).contiguous()) for a, b in columns]
            return -torch.stack(shares, dim=1).numpy()

        bulk = np.minimum(surprise(nonconformity), math.log(5))
        target = np.where(wrong, (wrong.sum() + 1) / (wrong.sum() + 2), 1 / ((~wrong).sum() + 2))

        def loss(w: Array) -> float:
            score = bulk @ w[:-1] + w[-1]
            prior = np.sum((w[:-1] - 1 / kinds) ** 2) / (2 * 0.5**2) + w[-1] ** 2 / 200
            return float(np.sum(np.logaddexp(0.0, score) - target * score) + prior)

        bounds = [(0.0, None)] * kinds + [(None, None)]
        found = minimize(loss, np.zeros(kinds + 1), bounds=bounds, method="SLSQP", options={"ftol": 1e-14}).x[:-1]
        assert model.weights.numpy() == pytest.approx(found / found.sum() * kinds, abs=1e-2)
        new = surprise(fresh)
        beyond = np.maximum(new - math.log(5), 0)
        tails = np.linalg.norm(beyond**2 / (1 + beyond), axis=1)
        expected = np.minimum(new, math.log(5)) @ model.weights.numpy() + tails
        assert model(torch.from_numpy(fresh))[0].numpy() == pytest.approx(expected)

    def test_a_kind_that_points_the_wrong_way_counts_only_in_its_tail(self, rng: Rng) -> None:
        doubt = rng.normal(size=2000)
        wrong = rng.random(2000) < 1 / (1 + np.exp(3.0 - 3.0 * doubt))
        nonconformity = torch.from_numpy(np.column_stack([doubt, -doubt + 0.1 * rng.normal(size=2000)]))
        model = CombinedScore(2)
        model.fit(nonconformity, torch.from_numpy(wrong))
        assert model.weights.tolist() == pytest.approx([2.0, 0.0])
        assert model.weights[1] == 0.0
        row = torch.tensor([[0.0, -1.0], [0.0, 0.5], [0.0, 20.0]], dtype=torch.float64)
        ordinary, same, far = model(row)[0].tolist()
        assert ordinary == same < far

    def test_mistakes_that_are_the_rule_say_less(self, rng: Rng) -> None:
        """The weights are those of the mistakes up to an error of one half, and equal if all labels are wrong."""
        doubt = rng.permutation(2000)
        nonconformity = torch.from_numpy(np.column_stack([doubt, rng.normal(size=2000), -doubt]))
        found = []
        for error in (0.2, 0.5, 0.8, 1.0):
            model = CombinedScore(3)
            model.fit(nonconformity, torch.from_numpy(doubt >= round(2000 * (1.0 - error))))
            found.append(model.weights.tolist())
        assert found[0] == pytest.approx([3.0, 0.0, 0.0], abs=0.2)
        assert found[1] == pytest.approx([3.0, 0.0, 0.0], abs=0.2)
        assert found[2] == pytest.approx([0.6 + 0.4 * 3.0, 0.6, 0.6], abs=0.2)
        assert found[3] == pytest.approx([1.0] * 3)

    def test_examples_of_unknowns_move_the_weights_a_little(self, rng: Rng) -> None:
        """Mistakes show in the first kind, unknowns in the second: it gains weight, and the first keeps some."""
        doubt, other = rng.normal(size=(2, 1000))
        wrong = torch.from_numpy(rng.random(1000) < 1 / (1 + np.exp(3.0 - 2.0 * doubt)))
        nonconformity = torch.from_numpy(np.column_stack([doubt, other]))
        unknowns = torch.from_numpy(rng.normal(loc=[0.0, 1.5], size=(30, 2)))
        plain, moved, more = CombinedScore(2), CombinedScore(2), CombinedScore(2)
        plain.fit(nonconformity, wrong)
        moved.fit(nonconformity, wrong, unknowns)
        more.fit(nonconformity, wrong, unknowns.repeat(20, 1))
        assert plain.weights[1] < moved.weights[1] < more.weights[1]
        assert moved.weights[0] > 0.5
        assert torch.equal(plain.ordered, moved.ordered), "shares are those of the calibration points alone"
        assert len(moved.combined) == 1000

    def test_without_mistakes_equal_kinds_have_equal_weights(self, rng: Rng) -> None:
        model = CombinedScore(4)
        model.fit(torch.from_numpy(rng.normal(size=(50, 1))).expand(-1, 4), torch.zeros(50, dtype=torch.bool))
        assert model.weights.tolist() == pytest.approx([1.0] * 4)

    def test_a_single_score(self, rng: Rng) -> None:
        """Below the tail, the survival of the survival equals the survival up to interpolation."""
        model, nonconformity = self.fitted(rng, kinds=1)
        combined, log_typical = model(nonconformity)
        share = log_survival(nonconformity[:, 0].sort().values, nonconformity[:, 0])
        ordinary = share.exp() > 0.25
        assert torch.allclose(combined[ordinary], -share[ordinary])
        assert (combined[share.argsort()].diff() <= 0).all()
        assert torch.allclose(log_typical[ordinary].exp(), share[ordinary].exp(), atol=3.0 / 500)

    def test_typicality_decreases_in_every_score(self, rng: Rng) -> None:
        model, nonconformity = self.fitted(rng)
        for column in range(3):
            more = nonconformity.clone()
            more[:, column] += 10.0**column * torch.from_numpy(rng.random(500) + 0.1)
            (was, typical), (now, less) = model(nonconformity), model(more)
            assert (now >= was).all()
            assert (now > was).float().mean() > 0.9
            assert (less <= typical).all()

    def test_typicality_ignores_the_units_of_scores(self, rng: Rng) -> None:
        model, nonconformity = self.fitted(rng)
        wrong = torch.from_numpy(rng.random(500) < 0.2)
        other = CombinedScore(3)
        unit = torch.tensor([1e-6, 3.0, 1e6], dtype=torch.float64)
        model.fit(nonconformity, wrong)
        other.fit(nonconformity * unit, wrong)
        fresh = torch.from_numpy(rng.gamma(3.0, size=(100, 3)) * [1, 10, 100])
        for a, b in zip(model(fresh), other(fresh * unit), strict=True):
            assert torch.allclose(a, b)

    def test_distant_points_have_no_ties(self, rng: Rng) -> None:
        model, _ = self.fitted(rng)
        far = torch.logspace(2, 12, 40, dtype=torch.float64)[:, None].expand(-1, 3)
        combined, log_typical = model(far.float())
        assert combined.dtype == log_typical.dtype == torch.float64
        assert (combined.diff() > 0).all()
        assert (log_typical.diff() < 0).all()

    def test_nan_has_the_largest_nonconformity(self, rng: Rng) -> None:
        model, nonconformity = self.fitted(rng)
        rows = nonconformity[:2].clone()
        rows[0, 1] = torch.nan
        combined, log_typical = model(rows)
        assert combined[0] > 1e30
        assert log_typical[0].isfinite()
        assert log_typical[0] < -1e30

    def test_typicality_of_new_points_is_uniform(self, rng: Rng) -> None:
        """Also for dependent kinds and with weights: neither changes the share of new points above a score."""
        count = 3000
        bound = 2 * math.sqrt(math.log(2 / 1e-8) / (2 * count))
        model, _ = self.fitted(rng)

        def draw() -> Tensor:
            shared = rng.gamma(2.0, size=(count, 1))
            return torch.from_numpy(shared * [1.0, 2.0, 3.0] + 0.1 * rng.normal(size=(count, 3)))

        model.fit(draw(), torch.from_numpy(rng.random(count) < 0.1))
        share = model(draw())[1].exp().sort().values
        assert float((share - torch.arange(1, count + 1) / count).abs().max()) < bound + 0.02
