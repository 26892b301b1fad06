"""From evidence to probabilities: optimality of the logistic fit, shares of ordinary points, both in one score."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import gamma
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from sepc_torch.head.calibration import Calibration, Typicality, View, joint_score, log_share
from sepc_torch.head.confidence import Confidence, fit_logistic
from sepc_torch.head.evidence import Facts
from sepc_torch.shapes import Array

Rng = np.random.Generator


def objective(x: Array, right: Array, prior: Array, w: Array) -> tuple[float, Array]:
    """The penalised cross-entropy and its gradient, bias last, written out once more."""
    wins = right.sum()
    target = np.where(right, (wins + 1) / (wins + 2), 1 / (len(right) - wins + 2))
    design = np.column_stack([x, np.ones(len(x))])
    pull = np.append(np.ones(len(prior)), 0.01)
    apart = w - np.append(prior, 0.0)
    score = design @ w
    loss = np.sum(np.logaddexp(0.0, score) - target * score) + np.sum(pull * apart**2) / 2
    gradient = design.T @ (np.exp(-np.logaddexp(0.0, -score)) - target) + pull * apart
    return float(loss), gradient


def problem(rng: Rng, count: int | None = None) -> tuple[Array, Array, Array]:
    """Of one to three columns, some of them against the truth, so that their weight should be zero."""
    features = int(rng.integers(1, 4))
    count = int(rng.integers(20, 400)) if count is None else count
    x = rng.normal(size=(count, features)) * rng.choice([0.3, 1.0, 5.0], features) + rng.normal(size=features)
    truth = rng.normal(size=features)
    right = rng.random(count) < 1 / (1 + np.exp(-(x @ truth + rng.normal())))
    return x, right, rng.choice([0.5, 1.0], features)


def check_optimal(x: Array, right: Array, prior: Array) -> Array:
    """The weights found, after a look at the conditions of Karush, Kuhn and Tucker."""
    weights, bias = fit_logistic(x, right, prior)
    _, gradient = objective(x, right, prior, np.append(weights, bias))
    small = 1e-5 * (1.0 + np.abs(x).sum())
    assert (weights >= 0).all()
    assert abs(gradient[-1]) <= small
    assert (gradient[:-1] >= -small).all()
    assert (np.abs(gradient[:-1])[weights > 0] <= small).all()
    return np.append(weights, bias)


def test_the_logistic_fit_is_optimal(rng: Rng) -> None:
    touched = 0
    for number in range(25):
        x, right, prior = problem(rng)
        if number == 0:  # evidence against the truth
            right = x[:, 0] < np.median(x[:, 0])
        found = check_optimal(x, right, prior)
        touched += (found[:-1] == 0).any()
        reference = minimize(
            lambda w, x=x, right=right, prior=prior: objective(x, right, prior, w),
            np.append(prior, 0.0),
            jac=True,
            method="L-BFGS-B",
            bounds=[(0.0, None)] * len(prior) + [(None, None)],
            options={"maxiter": 2000, "ftol": 1e-13, "gtol": 1e-7},
        )
        # Not the weights: where the problem is flat the reference stops short of them. Optimality is checked above.
        assert objective(x, right, prior, found)[0] <= reference.fun + 1e-7 * (1 + abs(reference.fun))
    assert touched > 0, "some weight must have met its bound"


@pytest.mark.parametrize("all_right", [True, False])
def test_labels_of_one_kind_prove_little(rng: Rng, all_right: bool) -> None:
    """With n labels and no mistake, the mean confidence is about (n + 1) / (n + 2); the other way round as well."""
    for count in (20, 100, 1000):
        x = rng.normal(size=(count, 2)) + 1.0
        right = np.full(count, all_right)
        found = check_optimal(x, right, np.array([0.5, 1.0]))
        mean = float(np.mean(1 / (1 + np.exp(-(x @ found[:-1] + found[-1])))))
        # The bias pulls the mean off its target by 0.01 b / n.
        target = (count + 1) / (count + 2) if all_right else 1 / (count + 2)
        assert mean == pytest.approx(target, abs=0.01 * abs(found[-1]) / count + 1e-6)


def test_separable_labels_have_finite_weights(rng: Rng) -> None:
    for scale in (1e-3, 1.0, 7.0, 100.0):
        x = scale * rng.normal(size=(50, 1))
        found = check_optimal(x, x[:, 0] > 0, np.ones(1))
        assert np.isfinite(found).all()
        assert found[0] > 0


def test_evidence_that_says_nothing_leaves_the_prior(rng: Rng) -> None:
    """Columns of zeros, and data of twenty points: within a prior's width of one."""
    right = rng.random(200) < 0.7
    found = check_optimal(np.zeros((200, 2)), right, np.array([0.5, 1.0]))
    assert found[:2] == pytest.approx([0.5, 1.0])
    wins = right.sum()
    target = np.where(right, (wins + 1) / (wins + 2), 1 / (202 - wins)).mean()
    assert 1 / (1 + math.exp(-found[2])) == pytest.approx(target, abs=1e-3)
    for _ in range(20):
        check_optimal(*problem(rng, 20))


def test_the_order_of_points_and_columns_does_not_matter(rng: Rng) -> None:
    for _ in range(10):
        x, right, prior = problem(rng)
        weights, bias = fit_logistic(x, right, prior)
        order, columns = rng.permutation(len(x)), rng.permutation(len(prior))
        again, same = fit_logistic(x[order][:, columns], right[order], prior[columns])
        assert again == pytest.approx(weights[columns], abs=1e-5)
        assert same == pytest.approx(bias, abs=1e-5)


def test_more_evidence_never_lowers_the_confidence(rng: Rng) -> None:
    for _ in range(10):
        model = Confidence(["softmax", "regions", "neighbours"])
        support = rng.normal(size=(60, 3))
        model.fit(support, rng.random(60) < 0.5)
        less = torch.from_numpy(support)
        assert (model(less + torch.from_numpy(rng.random((60, 3)))) >= model(less)).all()


def test_fitting_again_starts_from_the_prior_of_a_new_model(rng: Rng) -> None:
    x, right = rng.normal(size=(80, 2)), rng.random(80) < 0.6
    model = Confidence(["regions", "neighbours"])
    model.fit(x, right)
    weights, bias = fit_logistic(x, right, np.array([0.5, 1.0]))
    assert model.weights.tolist() == pytest.approx(weights.tolist(), rel=1e-6)
    assert float(model.bias) == pytest.approx(bias, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("count", [2, 5, 6, 20, 333])
@pytest.mark.parametrize("ties", [False, True])
def test_shares_fall_from_one_towards_zero(rng: Rng, count: int, ties: bool) -> None:
    values = rng.integers(0, 6, count).astype(float) if ties else rng.gamma(2.0, size=count)
    ordered = torch.from_numpy(values).sort().values
    grid = torch.cat([torch.linspace(-1.0, 30.0, 5000, dtype=torch.float64), ordered]).sort().values
    found = log_share(ordered, grid)
    assert found.isfinite().all()
    assert (found.diff() <= 0).all()
    assert (found <= 0).all()
    assert found[0] == 0.0
    beyond = log_share(ordered, torch.tensor([1e3, 1e6, 1e30, torch.inf, torch.nan], dtype=torch.float64))
    assert beyond.isfinite().all(), "the log is never minus infinity"
    assert (beyond.diff() <= 0).all()
    assert beyond[3] == beyond[4]


def test_shares_are_p_values_at_the_ordinary_points(rng: Rng) -> None:
    """Below the tail; between two of them a line, and at its start the tail continues it."""
    ordered = torch.from_numpy(rng.normal(size=200)).sort().values
    place = torch.arange(200, dtype=torch.float64)
    start = 200 - 1 - 20
    found = log_share(ordered, ordered[: start + 1]).exp()
    assert torch.allclose(found, (201 - place[: start + 1]) / 201, atol=1e-12)
    middle = log_share(ordered, (ordered[:start] + ordered[1 : start + 1]) / 2).exp()
    assert torch.allclose(middle, (found[:-1] + found[1:]) / 2, atol=1e-9)
    edge = ordered[start]
    gap = 1e-9 * torch.tensor([-1.0, 1.0], dtype=torch.float64)
    before, after = log_share(ordered, edge + gap)
    steepest = 1 / (ordered.diff().min() * 20)
    assert float(before - after) <= 2e-9 * float(steepest + 10.0)


def test_the_tail_is_exponential(rng: Rng) -> None:
    """Of an exponential distribution the share of the strangest is known, and the mean excess of 100 is a gamma."""
    ordered = torch.from_numpy(rng.exponential(size=1000)).sort().values
    far = log_share(ordered, torch.tensor([50.0, 51.0], dtype=torch.float64))
    mean_excess = 1.0 / float(far[0] - far[1])
    assert gamma.ppf(1e-8, 100) / 100 < mean_excess < gamma.isf(1e-8, 100) / 100
    start = ordered[1000 - 1 - 100]
    assert mean_excess == pytest.approx(float((ordered[-100:] - start).mean()))


def test_shares_of_fresh_points_are_uniform(rng: Rng) -> None:
    """Kolmogorov's distance, against the bound of Dvoretzky, Kiefer and Wolfowitz for both samples."""
    count = 4000
    bound = 2 * math.sqrt(math.log(2 / 1e-8) / (2 * count))
    for draw in (rng.exponential, rng.normal, rng.lognormal):
        ordered = torch.from_numpy(draw(size=count)).sort().values
        share = log_share(ordered, torch.from_numpy(draw(size=count))).exp().sort().values
        uniform = torch.arange(1, count + 1) / count
        # In the strangest tenth a wrong tail could move it by a tenth; that of a normal moves it by a hundredth.
        assert float((share - uniform).abs().max()) < bound + 0.02


def test_alike_points_make_a_step() -> None:
    ordered = torch.full((50,), 2.0, dtype=torch.float64)
    found = log_share(ordered, torch.tensor([1.0, 2.0, 2.1], dtype=torch.float64))
    assert found[:2].tolist() == [0.0, 0.0]
    assert found[2] < -1e6


class TestTypicality:
    def fitted(self, rng: Rng, kinds: int = 3, count: int = 500) -> tuple[Typicality, Tensor]:
        empty = torch.zeros(kinds, 0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
        strangeness = torch.from_numpy(rng.gamma(2.0, size=(count, kinds)) * 10.0 ** np.arange(kinds))
        model = Typicality(*empty)
        model.fit(strangeness)
        return model, strangeness

    def test_one_kind_is_a_share_of_its_own(self, rng: Rng) -> None:
        """The share of a share: the same but for interpolation, below the tail."""
        model, strangeness = self.fitted(rng, kinds=1)
        combined, log_typical = model(strangeness)
        share = log_share(strangeness[:, 0].sort().values, strangeness[:, 0])
        assert torch.allclose(combined, -share)
        ordinary = share.exp() > 0.15
        assert torch.allclose(log_typical[ordinary].exp(), share[ordinary].exp(), atol=1e-9)

    def test_stranger_in_any_kind_is_less_typical(self, rng: Rng) -> None:
        model, strangeness = self.fitted(rng)
        for kind in range(3):
            more = strangeness.clone()
            more[:, kind] += 10.0**kind * torch.from_numpy(rng.random(500) + 0.1)
            (was, typical), (now, less) = model(strangeness), model(more)
            assert (now >= was).all()
            assert (now > was).float().mean() > 0.9
            assert (less <= typical).all()

    def test_units_do_not_matter(self, rng: Rng) -> None:
        model, strangeness = self.fitted(rng)
        other, _ = self.fitted(rng)
        unit = torch.tensor([1e-6, 3.0, 1e6], dtype=torch.float64)
        other.fit(strangeness * unit)
        fresh = torch.from_numpy(rng.gamma(3.0, size=(100, 3)) * [1, 10, 100])
        for a, b in zip(model(fresh), other(fresh * unit), strict=True):
            assert torch.allclose(a, b)

    def test_far_away_there_are_no_ties(self, rng: Rng) -> None:
        model, _ = self.fitted(rng)
        far = torch.logspace(2, 12, 40, dtype=torch.float64)[:, None].expand(-1, 3)
        combined, log_typical = model(far.float())
        assert combined.dtype == log_typical.dtype == torch.float32
        assert (combined.diff() > 0).all()
        assert (log_typical.diff() < 0).all()

    def test_nan_is_the_strangest(self, rng: Rng) -> None:
        model, strangeness = self.fitted(rng)
        rows = strangeness[:2].clone()
        rows[0, 1] = torch.nan
        combined, log_typical = model(rows)
        assert combined[0] > 1e30
        assert log_typical[0].isfinite()
        assert log_typical[0] < -1e30

    def test_fresh_points_are_uniform(self, rng: Rng) -> None:
        """Also where the kinds depend on each other, which Fisher's combination alone would not allow."""
        count = 3000
        bound = 2 * math.sqrt(math.log(2 / 1e-8) / (2 * count))
        model, _ = self.fitted(rng)

        def draw() -> Tensor:
            shared = rng.gamma(2.0, size=(count, 1))
            return torch.from_numpy(shared * [1.0, 2.0, 3.0] + 0.1 * rng.normal(size=(count, 3)))

        model.fit(draw())
        share = model(draw())[1].exp().sort().values
        assert float((share - torch.arange(1, count + 1) / count).abs().max()) < bound + 0.02


def test_the_joint_score_rises_with_both(rng: Rng) -> None:
    confidence, share = torch.from_numpy(rng.random((2, 200)))
    joint = joint_score(confidence, share.log())
    assert torch.allclose(joint, confidence * share / (share + 0.1))
    assert ((joint >= 0) & (joint <= confidence)).all()
    up = torch.from_numpy(rng.random(200))
    assert (joint_score(confidence + (1 - confidence) * up, share.log()) >= joint).all()
    assert (joint_score(confidence, (share + (1 - share) * up).log()) >= joint).all()
    assert joint_score(torch.ones(1), torch.tensor([-1e38])).tolist() == [0.0]


def test_a_threshold_is_not_rounded(rng: Rng) -> None:
    """Scores in float64 have a threshold in float64; otherwise the point at the threshold falls on either side."""
    for dtype in (torch.float32, torch.float64):
        view = View(["regions"])
        view.held_joint = torch.from_numpy(rng.random(999)).to(dtype)
        view.held_right = torch.ones(999, dtype=torch.bool)
        for wish in ((None, 0.05, 0.1), (0.05, 0.1, None)):
            found = view.accept(*wish)
            assert found.found
            assert float((view.held_joint >= view.threshold).double().mean()) == found.coverage
            assert found.threshold in view.held_joint
            assert found.error == 0.0
        view.accept(None, 0.05, 0.1)
        assert int((view.held_joint < view.threshold).sum()) == 99


def test_no_point_is_both_fitted_and_ranked(rng: Rng) -> None:
    """The models know nothing of the ranked points: change those and only the ranks change."""
    support, strangeness = torch.from_numpy(rng.normal(size=(60, 1))), torch.from_numpy(rng.random((60, 1)))
    right, codes = torch.from_numpy(rng.random(60) < 0.7), torch.from_numpy(rng.integers(0, 2, 60))

    def fit(support: Tensor, strangeness: Tensor) -> Calibration:
        model = Calibration(("regions",), 1)
        model.fit({"own": Facts(support, strangeness)}, {"own": right}, codes, 2, 0.4, 3)
        return model

    model = fit(support, strangeness)
    assert len(model.held_strangeness) == len(model.own.held_joint) == 24
    assert int(model.class_counts.sum()) == 24
    held = np.random.default_rng(3).permutation(60)[:24]
    assert torch.equal(model.own.held_right, right[held])
    other, stranger = support.clone(), strangeness.clone()
    other[held], stranger[held] = 5.0, 9.0
    again = fit(other, stranger)
    for name in ("own.ranking.weights", "own.ranking.bias", "typicality.ordered", "typicality.combined"):
        assert torch.equal(model.state_dict()[name], again.state_dict()[name])
    assert not torch.equal(model.own.held_joint, again.own.held_joint)
    assert not model.network.done


def test_bending_keeps_the_order_and_mends_the_shape(rng: Rng) -> None:
    """Where truth is no logistic of the evidence: certain on one side, a coin on the other."""
    x = rng.normal(size=(4000, 1)) * 3.0
    chance = np.where(x[:, 0] > 0, 0.99, 0.5)
    right = rng.random(4000) < chance
    plain, bent = Confidence(["regions"]), Confidence(["regions"])
    plain.fit(x, right, bend=False)
    bent.fit(x, right)
    support = torch.linspace(-9.0, 9.0, 400, dtype=torch.float64)[:, None]
    assert (bent(support).diff() >= 0).all()
    truth = torch.from_numpy(chance)
    losses = [binary_cross_entropy(model(torch.from_numpy(x)), truth) for model in (plain, bent)]
    assert float(losses[1]) < float(losses[0])
