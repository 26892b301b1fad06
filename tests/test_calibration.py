"""Calibration of a head: optimality of the logistic fit, the joint score, and the split of the points."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from sepc_torch.head.calibration.assess import joint_score
from sepc_torch.head.calibration.calibration import Calibration
from sepc_torch.head.calibration.confidence import Confidence, fit_logistic
from sepc_torch.head.calibration.label_calibration import ODDS_PRICE, UNKNOWN_ODDS, LabelCalibration, affordable_odds
from sepc_torch.head.evidence.evidence import EvidenceValues
from sepc_torch.head.promises.conformal import share_above
from sepc_torch.shapes import Array

Rng = np.random.Generator


def objective(x: Array, right: Array, prior: Array, w: Array) -> tuple[float, Array]:
    """An independent implementation of the penalised cross-entropy and its gradient; the bias comes last."""
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
    """A random problem of one to three columns; some columns oppose the truth, so that their best weight is zero."""
    features = int(rng.integers(1, 4))
    count = int(rng.integers(20, 400)) if count is None else count
    x = rng.normal(size=(count, features)) * rng.choice([0.3, 1.0, 5.0], features) + rng.normal(size=features)
    truth = rng.normal(size=features)
    right = rng.random(count) < 1 / (1 + np.exp(-(x @ truth + rng.normal())))
    return x, right, rng.choice([0.5, 1.0], features)


def check_optimal(x: Array, right: Array, prior: Array) -> Array:
    """Check the Karush-Kuhn-Tucker conditions of the fit; return weights and bias."""
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
        if number == 0:  # evidence that opposes the truth
            right = x[:, 0] < np.median(x[:, 0])
        found = check_optimal(x, right, prior)
        touched += (found[:-1] == 0).any()
        reference = minimize(
            lambda w, x=x, right=right, prior=prior: objective(x, right, prior, w),
            np.append(prior, 0.0),
            jac=True,
            method="SLSQP",
            bounds=[(0.0, None)] * len(prior) + [(None, None)],
            options={"maxiter": 2000, "ftol": 1e-13},
        )
        # Compare losses, not weights: on a flat problem the reference stops early. check_optimal tests optimality.
        assert objective(x, right, prior, found)[0] <= reference.fun + 1e-7 * (1 + abs(reference.fun))
    assert touched > 0, "at least one weight must lie at its bound"


def test_columns_of_very_different_scales(rng: Rng) -> None:
    """L-BFGS-B on unscaled variables can stop early here, far from the optimum."""
    for _ in range(20):
        x = rng.normal(size=(2000, 3)) * rng.choice([1e-3, 0.3, 1.0, 5.0, 100.0], 3) + rng.normal(size=3)
        right = rng.random(2000) < 0.5 * (1 + np.tanh((x @ rng.normal(size=3) + 3 * rng.normal()) / 2))
        check_optimal(x, right, rng.choice([0.5, 1.0], 3))


@pytest.mark.parametrize("all_right", [True, False])
def test_mean_confidence_when_all_labels_are_right_or_all_wrong(rng: Rng, all_right: bool) -> None:
    """For n right labels the mean confidence is about (n + 1) / (n + 2); for n wrong ones it is about 1 / (n + 2)."""
    for count in (20, 100, 1000):
        x = rng.normal(size=(count, 2)) + 1.0
        right = np.full(count, all_right)
        found = check_optimal(x, right, np.array([0.5, 1.0]))
        mean = float(np.mean(1 / (1 + np.exp(-(x @ found[:-1] + found[-1])))))
        # The prior of the bias shifts the mean from its target by 0.01 b / n.
        target = (count + 1) / (count + 2) if all_right else 1 / (count + 2)
        assert mean == pytest.approx(target, abs=0.01 * abs(found[-1]) / count + 1e-6)


def test_separable_labels_have_finite_weights(rng: Rng) -> None:
    for scale in (1e-3, 1.0, 7.0, 100.0):
        x = scale * rng.normal(size=(50, 1))
        found = check_optimal(x, x[:, 0] > 0, np.ones(1))
        assert np.isfinite(found).all()
        assert found[0] > 0


def test_uninformative_evidence_keeps_the_prior(rng: Rng) -> None:
    """Columns of zeros keep the prior weights; fits to twenty points are optimal."""
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


def test_a_new_model_is_fitted_from_its_prior(rng: Rng) -> None:
    x, right = rng.normal(size=(80, 2)), rng.random(80) < 0.6
    model = Confidence(["regions", "neighbours"])
    model.fit(x, right)
    weights, bias = fit_logistic(x, right, np.array([0.5, 1.0]))
    assert model.weights.tolist() == pytest.approx(weights.tolist(), rel=1e-6)
    assert float(model.bias) == pytest.approx(bias, rel=1e-5, abs=1e-7)


def test_the_joint_score_increases_in_confidence_and_typicality(rng: Rng) -> None:
    confidence, share = torch.from_numpy(rng.random((2, 200)))
    odds = torch.tensor(0.1, dtype=torch.float64)
    joint = joint_score(confidence, share.log(), odds)
    assert torch.allclose(joint, confidence * share / (share + 0.1))
    assert ((joint >= 0) & (joint <= confidence)).all()
    up = torch.from_numpy(rng.random(200))
    assert (joint_score(confidence + (1 - confidence) * up, share.log(), odds) >= joint).all()
    assert (joint_score(confidence, (share + (1 - share) * up).log(), odds) >= joint).all()
    assert joint_score(torch.ones(1), torch.tensor([-1e38]), odds).tolist() == [0.0]


def accepted_share(score: Tensor, wrong: Tensor, risk: float) -> float:
    """The share of points that the lowest threshold with at most this error accepts."""
    error = wrong[score.argsort(descending=True)].double().cumsum(0) / torch.arange(1, len(score) + 1)
    return float((error <= risk).nonzero().amax() + 1) / len(score)


@pytest.mark.parametrize("points", [400, 1000])
def test_joint_almost_keeps_the_order_of_confidence(rng: Rng, points: int) -> None:
    """Nonconformity that says nothing about mistakes: at half of the error, joint accepts almost as many points.

    The choice sees the confidence of the points, so its price on new points varies only with the fits.
    """
    losses: list[float] = []
    fixed: list[float] = []
    for _ in range(5):
        x = torch.from_numpy(rng.normal(size=(points + 20_000, 1)))
        right = torch.from_numpy(rng.random(len(x))) < torch.sigmoid(2.0 + 1.5 * x[:, 0])
        values = EvidenceValues(x, torch.from_numpy(rng.exponential(size=(len(x), 3))))
        codes = torch.zeros(points, dtype=torch.int64)
        fitted, held = torch.arange(points).split(points // 2)
        new = slice(points, None)
        for odds, found in ((None, losses), (UNKNOWN_ODDS, fixed)):
            labels = LabelCalibration(["regions"], 3)
            calibrated = EvidenceValues(*(part[:points] for part in values))
            labels.fit(calibrated, right[:points], codes, x[:points], fitted, held, codes, codes, unknown_odds=odds)
            confidence, typicality = labels.ranking(x[new]), labels.combined_score(values.nonconformity[new])[1]
            risk = float((~right[new]).double().mean()) / 2
            joint = labels.joint(x[new], typicality)
            found.append(accepted_share(confidence, ~right[new], risk) - accepted_share(joint, ~right[new], risk))
    assert np.mean(losses) < 2 * ODDS_PRICE
    assert np.mean(fixed) > 0.03, "the largest odds would cost more"


def test_odds_that_cost_nothing_are_the_largest(rng: Rng) -> None:
    """Where the typicality has the order of the confidence; and the price is found for few and equal points too."""
    confidence = torch.from_numpy(rng.random(500)).sort().values
    assert affordable_odds(confidence, torch.linspace(-9.0, 0.0, 500).double()) == UNKNOWN_ODDS
    for same in (0.0, 0.7, 1.0):
        assert affordable_odds(torch.full((5,), same).double(), -torch.arange(5.0).double()) == UNKNOWN_ODDS


def test_a_threshold_lies_between_scores(rng: Rng) -> None:
    """Halfway in log odds between two groups of equal scores, so that rounding errors do not decide."""
    for dtype in (torch.float32, torch.float64):
        labels = LabelCalibration(["regions"], 1)
        labels.ranked_joint = torch.from_numpy(rng.random(999)).to(dtype)
        labels.ranked_right = torch.ones(999, dtype=torch.bool)
        for request in ((None, 0.05, 0.1), (0.05, 0.1, None)):
            found = labels.accept(*request)
            assert found.found
            assert float((labels.ranked_joint >= labels.threshold).double().mean()) == found.coverage
            assert found.threshold not in labels.ranked_joint
            assert found.error == 0.0
        labels.accept(None, 0.05, 0.1)
        # Groups of nearly equal scores stay together: at most a few fewer than the promised share are refused.
        assert 90 <= int((labels.ranked_joint < labels.threshold).sum()) <= 99


def test_no_point_is_both_fitted_and_ranked(rng: Rng) -> None:
    """The fitted models do not depend on the ranked points: changing these changes only the ranked scores."""
    support, nonconformity = torch.from_numpy(rng.normal(size=(60, 1))), torch.from_numpy(rng.random((60, 1)))
    right, codes = torch.from_numpy(rng.random(60) < 0.7), torch.from_numpy(rng.integers(0, 2, 60))

    def fit(support: Tensor, nonconformity: Tensor) -> Calibration:
        model = Calibration(("regions",), 1)
        values, label, region = EvidenceValues(support, nonconformity), {"own": codes}, torch.zeros_like(codes)
        model.fit({"own": values}, {"own": right}, codes, label, region, {"own": support.new_zeros(60, 2)}, 0.4, 3)
        return model

    model = fit(support, nonconformity)
    assert len(model.own.ranked_nonconformity) == len(model.own.ranked_joint) == 24
    assert int(model.own.class_counts.sum()) == 24
    held = np.random.default_rng(3).permutation(60)[:24]
    assert torch.equal(model.own.ranked_right, right[held])
    other, larger = support.clone(), nonconformity.clone()
    other[held], larger[held] = 5.0, 9.0
    again = fit(other, larger)
    for name in (
        "ranking.weights",
        "ranking.bias",
        "combined_score.ordered",
        "combined_score.combined",
        "combined_score.weights",
        "unknown_odds",
    ):
        assert torch.equal(model.own.state_dict()[name], again.own.state_dict()[name])
    assert not torch.equal(model.own.ranked_joint, again.own.ranked_joint)
    assert not model.network.done


@pytest.mark.slow
def test_p_values_stay_valid_with_examples_of_unknowns(rng: Rng) -> None:
    """P(p <= u) <= u for points drawn like the ranked ones, whatever the examples are."""
    draws, points, new = 30, 60, 100
    levels = np.array([0.1, 0.3, 0.5])
    small = np.zeros(3)
    codes = torch.zeros(points, dtype=torch.int64)
    fitted, held = torch.arange(points).split(points // 2)
    for _ in range(draws):
        nonconformity = torch.from_numpy(rng.normal(size=(points + new, 2)))
        right = torch.from_numpy(rng.random(points) < 0.8)
        labels = LabelCalibration(["regions"], 2)
        values = EvidenceValues(nonconformity[:points, :1], nonconformity[:points])
        unknowns = torch.from_numpy(rng.normal(size=(10, 2)) * rng.exponential(size=2))
        labels.fit(values, right, codes, torch.zeros(points, 1).double(), fitted, held, codes, codes, unknowns=unknowns)
        score = labels.combined_score(nonconformity[points:])[0]
        p_value = share_above(labels.ranked_nonconformity, score).numpy()
        small += (p_value[:, None] <= levels + 1e-9).mean(axis=0) / draws
    # Given the ranked points, the true share has a beta distribution, and the observed one is binomial around it.
    variance = levels * (1 - levels) * (1 / (points / 2 + 2) + 1 / new) / draws
    assert (small <= levels + 5.5 * np.sqrt(variance)).all()


def test_beta_calibration_keeps_the_order_and_lowers_the_loss(rng: Rng) -> None:
    """For a true probability that is not logistic in the evidence: 0.99 on one side, 0.5 on the other."""
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
