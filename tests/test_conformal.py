"""Conformal guarantees over many draws of the calibration set, exact binomial tails, and input errors."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from scipy.stats import binom
from synchronisation_checks import waiting_is_an_error
from torch import Tensor

from sepc_torch.head.promises.conformal import (
    RiskThreshold,
    average_threshold,
    binomial_tail,
    check_calibration,
    check_correct,
    class_calibration,
    class_p_value,
    conformal_p_value,
    flag_threshold,
    p_value_from_sorted,
    risk_threshold,
    search_level,
    sorted_calibration,
    upper_bound,
)

Rng = np.random.Generator

# Probability that one comparison fails by chance. No test makes a hundred comparisons, so a correct implementation
# fails a test with probability below 1e-6.
CHANCE = 1e-8


def at_most(events: int, draws: int, probability: float) -> bool:
    """Whether a count of events is compatible with a probability of at most ``probability``."""
    return events <= binom.isf(CHANCE, draws, probability)


def about(events: int, draws: int, probability: float) -> bool:
    """Whether a count of events is compatible with exactly this probability."""
    return binom.ppf(CHANCE / 2, draws, probability) <= events <= binom.isf(CHANCE / 2, draws, probability)


# Error probability of each score 0, 1, ...; all scores are equally likely. USELESS: every threshold has the same risk.
# SWINGING: the risk rises, falls and rises again with a decreasing threshold. STEP: one score is always right, the
# other half the time. BAD_ON_TOP: the highest score errs often.
USELESS = np.full(8, 0.1)
SWINGING = np.array([0.25, 0.2, 0.001, 0.02, 0.11, 0.3, 0.02, 0.0])
STEP = np.array([0.5, 0.0])
BAD_ON_TOP = np.array([0.4, 0.2, 0.06, 0.0, 0.0, 0.1, 0.1, 0.35])


@pytest.mark.parametrize("errors", [USELESS, SWINGING, STEP, BAD_ON_TOP], ids=["useless", "swinging", "step", "top"])
@pytest.mark.parametrize("points", [12, 60])
def test_the_average_risk_is_kept(rng: Rng, errors: np.ndarray, points: int) -> None:
    """The share of new points that are accepted and wrong, divided by the accepted share, is at most the risk."""
    risk, draws, found = 0.15, 400, []
    for _ in range(draws):
        level = rng.integers(0, len(errors), points)
        score, right = torch.from_numpy(level).double(), torch.from_numpy(rng.random(points) >= errors[level])
        threshold = average_threshold(score, right, risk)
        accepted = (int((score >= threshold).sum()) + 1) / (points + 1)
        found.append(float(np.where(np.arange(len(errors)) >= threshold, errors, 0.0).mean()) / accepted)
    assert np.mean(found) <= risk + 6.0 * np.std(found) / np.sqrt(draws)
    assert np.max(found) > 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "ties", "points", "risk", "delta", "attained"),
    [
        (USELESS, False, 150, 0.0999, 0.1, True),
        (USELESS, False, 40, 0.0999, 0.3, True),
        (USELESS, True, 150, 0.0999, 0.1, False),
        (SWINGING, True, 150, 0.1, 0.1, False),
        (STEP, True, 60, 0.1, 0.1, False),
        (BAD_ON_TOP, True, 200, 0.15, 0.2, False),
    ],
    ids=["useless", "useless, few points", "useless, ties", "swinging", "step", "bad on top"],
)
def test_risk_thresholds_keep_the_risk(
    rng: Rng, error: np.ndarray, ties: bool, points: int, risk: float, delta: float, attained: bool
) -> None:
    draws, failed, found = 1500, 0, 0
    fresh_risk = error[::-1].cumsum()[::-1] / np.arange(len(error), 0, -1)
    for _ in range(draws):
        score = rng.integers(0, len(error), points)
        correct = torch.from_numpy(rng.random(points) >= error[score])
        given = score if ties else rng.random(points)
        result = risk_threshold(torch.from_numpy(given.astype(np.float32)), correct, risk, delta)
        found += result.found
        lowest = math.ceil(result.threshold) if result.found and ties else 0
        failed += result.found and fresh_risk[lowest] > risk
    assert at_most(failed, draws, delta)
    assert found > 0
    if attained:
        # The failure rate nearly attains delta: no higher level is valid, up to the discreteness of few points.
        assert failed > binom.ppf(CHANCE, draws, 0.85 * delta)


@pytest.mark.parametrize(("risk", "delta"), [(0.3, 0.2), (0.1, 0.4), (0.5, 0.05)])
def test_the_search_level_against_enumeration(risk: float, delta: float) -> None:
    points = 12
    paths = np.array(list(itertools.product([0, 1], repeat=points))).cumsum(axis=1)
    n = np.arange(1, points + 1)
    chance = risk ** paths[:, -1] * (1 - risk) ** (points - paths[:, -1])
    least_tail = binom.cdf(paths, n, risk).min(axis=1)

    def failure(level: float) -> float:
        return float(chance[least_tail <= level].sum())

    level = search_level(points, risk, delta)
    assert level == delta or failure(1.0101 * level) > delta
    assert failure(level) <= delta + 1e-12


def test_the_statistics_describe_the_accepted_points(rng: Rng) -> None:
    for _ in range(30):
        correct = rng.random(400) < 0.85
        score = torch.from_numpy(np.round(rng.normal(size=400) + 2 * correct, int(rng.integers(0, 3))))
        right = torch.from_numpy(correct)
        result = risk_threshold(score, right, risk=0.1, delta=0.1)
        taken = score >= result.threshold
        assert result.accepted == int(taken.sum())
        assert result.errors == int((taken & ~right).sum())
        assert result.coverage == pytest.approx(result.accepted / 400)
        if result.found:
            assert result.threshold in score
            assert result.bound <= 0.1
            assert binom.cdf(result.errors, result.accepted, result.bound) == pytest.approx(result.level, rel=1e-6)
        # No lower threshold qualifies.
        for lower in score.unique()[score.unique() < result.threshold].tolist():
            rest = score >= lower
            assert binom.cdf(int((rest & ~right).sum()), int(rest.sum()), 0.1) > result.level
        order = torch.from_numpy(rng.permutation(400))
        assert risk_threshold(score[order], right[order], risk=0.1, delta=0.1) == result


def test_the_threshold_is_exact_in_the_dtype_of_the_scores(rng: Rng) -> None:
    correct = torch.from_numpy(rng.random(300) < 0.97)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        score = torch.from_numpy(rng.random(300)).to(dtype)
        result = risk_threshold(score, correct, risk=0.1, delta=0.1)
        assert result.found
        assert int((score >= result.threshold).sum()) == result.accepted


@pytest.mark.parametrize(("points", "right"), [(500, False), (44, True), (1, True)], ids=["wrong", "few", "one"])
def test_nothing_qualifies(rng: Rng, points: int, right: bool) -> None:
    """Even if all predictions are right, 45 points are needed: 0.95 ** 44 is 0.105 and 0.95 ** 45 is 0.099."""
    score = torch.from_numpy(rng.normal(size=points))
    result = risk_threshold(score, torch.full((points,), right), risk=0.05, delta=0.1)
    assert result == RiskThreshold(math.inf, 0.0, 0, 0, 1.0, result.level, found=False)
    assert not (score >= result.threshold).any()


def test_just_enough_points_qualify(rng: Rng) -> None:
    score = torch.from_numpy(rng.normal(size=45))
    result = risk_threshold(score, torch.ones(45, dtype=torch.bool), risk=0.05, delta=0.1)
    assert result.found
    assert result.accepted == 45
    assert result.threshold == float(score.min())


def test_scores_of_minus_infinity_are_accepted_last(rng: Rng) -> None:
    score = torch.from_numpy(rng.random(200))
    score[:50] = -torch.inf
    correct = torch.arange(200) >= 50
    result = risk_threshold(score, correct, risk=0.05, delta=0.1)
    assert result.accepted == 150
    assert result.threshold >= 0.0


def test_binomial_tails_are_exact(rng: Rng) -> None:
    points = rng.integers(1, 5000, 300)
    errors = (points * rng.random(300) ** 3).astype(np.int64)
    errors[:5] = points[:5]
    for risk in (0.001, 0.05, 0.5, 0.99):
        exact = binom.cdf(errors, points, risk)
        assert np.allclose(binomial_tail(errors, points, risk), exact, rtol=1e-9, atol=1e-300)
    for e, n in zip(errors.tolist(), points.tolist(), strict=True):
        bound = upper_bound(e, n, 0.02)
        assert bound == 1.0 if e == n else binom.cdf(e, n, bound) == pytest.approx(0.02, rel=1e-6)


@pytest.mark.parametrize(("points", "rate"), [(19, 0.1), (99, 0.29), (50, 0.1), (9, 0.99)])
@pytest.mark.parametrize("ties", [False, True])
def test_the_flag_rate_is_kept(rng: Rng, points: int, rate: float, ties: bool) -> None:
    draws, flagged = 2000, 0
    for _ in range(draws):
        score = torch.from_numpy(rng.geometric(0.3, points + 1) * 1.0 if ties else rng.normal(size=points + 1))
        flagged += bool(score[0] < flag_threshold(score[1:], rate))
    k = math.floor(rate * (points + 1) + 1e-9)
    assert at_most(flagged, draws, rate)
    assert ties or about(flagged, draws, k / (points + 1))


def test_flag_thresholds_need_enough_points(rng: Rng) -> None:
    score = torch.from_numpy(rng.normal(size=19))
    assert flag_threshold(score, 0.05) == float(score.min())  # 0.05 * 20 = 1
    assert flag_threshold(torch.arange(1.0, 100.0), 0.29) == 29.0  # although 0.29 * 100 < 29 in floating point
    assert flag_threshold(score[1:], 0.05) == -math.inf
    assert flag_threshold(score[:1], 0.999) == float(score[0])


def test_p_values_against_counting(rng: Rng) -> None:
    for dtype in (torch.float32, torch.float64):
        calibration = torch.from_numpy(rng.integers(0, 20, 57)).to(dtype)
        scores = torch.from_numpy(rng.integers(-1, 22, 200)).to(dtype)
        scores[:2] = torch.tensor([torch.inf, -torch.inf])
        found = conformal_p_value(calibration, scores)
        counted = (1 + (calibration >= scores[:, None]).sum(dim=1)) / 58
        assert found.dtype == dtype
        assert torch.allclose(found, counted.to(dtype))
        assert torch.equal(p_value_from_sorted(sorted_calibration(calibration), scores), found)
        # A calibration tensor of another dtype, and a non-contiguous one.
        assert torch.equal(conformal_p_value(calibration.double(), scores), found)
        assert torch.equal(conformal_p_value(calibration.repeat_interleave(2)[::2], scores), found)


def test_p_values_of_the_calibration_distribution_are_uniform(rng: Rng) -> None:
    """Every value j / (M + 1) has the same probability; with ties, small values have a smaller one."""
    points, draws = 7, 2000
    smooth, tied = (
        torch.stack([conformal_p_value(row[1:], row[:1])[0] for row in torch.from_numpy(sample)])
        for sample in (rng.normal(size=(draws, points + 1)), rng.integers(0, 4, (draws, points + 1)) * 1.0)
    )
    for j in range(1, points + 2):
        level = j / (points + 1)
        assert about(int((smooth <= level + 1e-9).sum()), draws, level)
        assert at_most(int((tied <= level + 1e-9).sum()), draws, level)
    assert float(smooth.min()) == pytest.approx(1 / (points + 1))


@pytest.mark.slow
def test_p_values_hold_within_every_class(rng: Rng) -> None:
    """The rare class has the larger scores; a p-value against all points together would be too small for it."""
    draws, points, levels = 2000, 60, (0.05, 0.2, 1 / 3, 0.5)
    small = np.zeros((2, 4), dtype=int)
    seen = np.zeros(2, dtype=int)
    for _ in range(draws):
        label = torch.from_numpy((rng.random(points) < 0.1).astype(np.int64))
        c = label[0] = int(rng.integers(2))
        scores = torch.from_numpy(rng.normal(size=points)) + 5.0 * label
        known = class_calibration(scores[1:], label[1:], classes=2)
        seen[c] += 1
        small[c] += float(class_p_value(known, scores[:1], label[:1])) <= np.array(levels) + 1e-9
    for c in range(2):
        for events, level in zip(small[c], levels, strict=True):
            assert at_most(int(events), int(seen[c]), level)


def test_class_p_values_against_counting(rng: Rng) -> None:
    for points in (1, 2, 3, 8, 64, 65):
        label = torch.from_numpy(rng.integers(0, 4, points))
        calibration = torch.from_numpy(rng.integers(0, 9, points) * 1.0)
        known = class_calibration(calibration, label, classes=6)
        assert known.counts.tolist() == torch.bincount(label, minlength=6).tolist()
        scores = torch.from_numpy(rng.integers(-1, 11, 300) * 1.0)
        scores[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
        asked = torch.from_numpy(rng.integers(-1, 7, 300))
        same = label == asked[:, None]
        as_large = same & (calibration >= torch.where(scores.isnan(), torch.inf, scores)[:, None])
        counted = (1 + as_large.sum(dim=1)).double() / (1 + same.sum(dim=1))
        assert torch.equal(class_p_value(known, scores, asked), counted)


def test_a_class_without_calibration_points_has_p_value_one() -> None:
    known = class_calibration(torch.rand(5), torch.zeros(5, dtype=torch.int64), classes=2)
    assert known.counts.tolist() == [5, 0]
    found = class_p_value(known, torch.tensor([0.5, 9.0, torch.nan, 9.0]), torch.tensor([1, 1, 1, -1]))
    assert found.tolist() == [1.0] * 4


def test_nan_counts_as_infinity() -> None:
    calibration = torch.tensor([1.0, 2.0, torch.inf])
    found = conformal_p_value(calibration, torch.tensor([torch.nan, torch.inf, 5.0]))
    assert found.tolist() == [0.5, 0.5, 0.5]
    assert conformal_p_value(calibration[:2], torch.tensor([torch.nan])).tolist() == pytest.approx([1 / 3])


@pytest.mark.gpu
def test_p_values_on_a_gpu_do_not_synchronise(rng: Rng) -> None:
    calibration, scores = (torch.from_numpy(rng.normal(size=n)) for n in (1000, 300))
    label, asked = (torch.from_numpy(rng.integers(0, 5, n)) for n in (1000, 300))
    ordered, known = sorted_calibration(calibration), class_calibration(calibration, label, classes=5)
    on_gpu: list[Tensor] = [t.cuda() for t in (ordered, scores, asked, *known)]
    with waiting_is_an_error():
        plain = p_value_from_sorted(on_gpu[0], on_gpu[1])
        by_class = class_p_value(type(known)(*on_gpu[3:]), on_gpu[1], on_gpu[2])
    # CUDA divides by a scalar by multiplying with its inverse: the last bit may differ.
    assert torch.allclose(plain.cpu(), p_value_from_sorted(ordered, scores), rtol=1e-15, atol=0)
    assert torch.allclose(by_class.cpu(), class_p_value(known, scores, asked), rtol=1e-15, atol=0)


@pytest.mark.slow
def test_p_values_compile_and_the_import_needs_no_scipy() -> None:
    """In a separate process: torch.compile cannot trace the shape checks of the tests."""
    script = textwrap.dedent(
        """
        import sys, torch
        from sepc_torch.head.promises.conformal import ClassCalibration, class_calibration, class_p_value
        from sepc_torch.head.promises.conformal import p_value_from_sorted, sorted_calibration
        assert "scipy" not in sys.modules

        class Judge(torch.nn.Module):
            def __init__(self):
                super().__init__()
                scores, label = torch.randn(100), torch.randint(0, 3, (100,))
                self.register_buffer("plain", sorted_calibration(scores))
                known = class_calibration(scores, label, classes=4)
                self.register_buffer("ordered", known.ordered)
                self.register_buffer("counts", known.counts)

            def forward(self, s, c):
                known = ClassCalibration(self.ordered, self.counts)
                return p_value_from_sorted(self.plain, s), class_p_value(known, s, c)

        judge = Judge()
        compiled = torch.compile(judge, fullgraph=True, backend="aot_eager")
        for n in (50, 7, 9):
            given = torch.randn(n), torch.randint(-1, 4, (n,))
            for a, b in zip(compiled(*given), judge(*given), strict=True):
                assert torch.equal(a, b)
        print("right")
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "right", done.stderr[-2000:]


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 5.0, math.nan])
def test_shares_outside_zero_and_one_are_rejected(share: float) -> None:
    score, correct = torch.rand(50), torch.ones(50, dtype=torch.bool)
    with pytest.raises(ValueError, match="risk must lie between 0 and 1"):
        risk_threshold(score, correct, share, 0.1)
    with pytest.raises(ValueError, match="delta must lie between 0 and 1"):
        risk_threshold(score, correct, 0.1, share)
    with pytest.raises(ValueError, match="flag_rate must lie between 0 and 1"):
        flag_threshold(score, share)


def test_invalid_calibration_points_are_rejected() -> None:
    right = torch.ones(2, dtype=torch.bool)
    holed = torch.tensor([0.5, torch.nan])
    for use in (
        lambda: risk_threshold(holed, right, 0.1, 0.1),
        lambda: flag_threshold(holed, 0.1),
        lambda: conformal_p_value(holed, torch.rand(3)),
        lambda: class_calibration(holed, torch.tensor([0, 1]), classes=2),
    ):
        with pytest.raises(ValueError, match="is NaN"):
            use()
    with pytest.raises(ValueError, match="no calibration points"):
        risk_threshold(torch.zeros(0), right[:0], 0.1, 0.1)
    with pytest.raises(ValueError, match="no sorted calibration points"):
        p_value_from_sorted(torch.zeros(0), torch.rand(3))
    with pytest.raises(ValueError, match="score is inf"):
        risk_threshold(torch.tensor([0.5, torch.inf]), right, 0.1, 0.1)
    with pytest.raises(ValueError, match="from 0 to 1 for 2 classes, got 0 to 2"):
        class_calibration(torch.rand(2), torch.tensor([0, 2]), classes=2)


def test_invalid_shapes_and_types_are_rejected() -> None:
    """Calls the checks directly, because the shape checks of the tests would fail first."""
    with pytest.raises(ValueError, match=r"shape \(M,\); got the shape \(2, 3\)"):
        check_calibration(torch.rand(2, 3))
    for given in ([0.5], np.ones(3), torch.arange(3)):
        with pytest.raises(TypeError, match="tensor of floating-point numbers"):
            check_calibration(given)
    for flags in (torch.tensor([1, 0]), [True, False]):
        with pytest.raises(TypeError, match="boolean tensor"):
            check_correct(flags, torch.rand(2))
    with pytest.raises(ValueError, match=r"got \(2,\) scores and \(3,\)"):
        check_correct(torch.ones(3, dtype=torch.bool), torch.rand(2))
