"""Novelties of a batch: the false discovery rate by simulation, power, records and errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import binom

from sepc_torch import TrustHead
from sepc_torch.head.promises.conformal import conformal_p_value
from sepc_torch.head.promises.novelties import find_novelties, ordinary_share, unknown_share
from sepc_torch.shapes import Array

Rng = np.random.Generator


def false_share(novel: torch.Tensor, ordinary: int) -> float:
    """Share of the first ``ordinary`` samples among those declared novel."""
    return float(novel[:ordinary].sum()) / max(1, int(novel.sum()))


@pytest.mark.slow
@pytest.mark.parametrize(("fdr", "shift"), [(0.1, 2.0), (0.2, 4.0)])
def test_false_discoveries_are_as_promised(fdr: float, shift: float) -> None:
    """The rate is just below its bound, so a procedure that breaks it by a factor of 1.5 fails."""
    random = torch.Generator().manual_seed(0)
    found = []
    for _ in range(1500):
        calibration, scores = torch.randn(199, generator=random), torch.randn(60, generator=random)
        scores[45:] += shift
        found.append(false_share(find_novelties(conformal_p_value(calibration, scores), 199, fdr).novel, 45))
    assert 0.8 * fdr < np.mean(found) < 1.1 * fdr


def test_small_batches_do_not_estimate_the_share() -> None:
    """The estimate adds one sample, which would cost a batch of two samples half of its level."""
    found = find_novelties(torch.tensor([0.04, 0.8]), ranked=99, fdr=0.1)
    assert found.novel.tolist() == [True, False]
    assert repr(found) == "Novelties(1 of 2 samples are novel, threshold=0.04, least=1, ordinary=1)"


@pytest.mark.parametrize("novel", [0, 30, 60])
def test_the_estimated_share_of_ordinary_samples(novel: int) -> None:
    """It is close to the share, and on average not below it. The record cuts it at one; its limits do not."""
    random = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(300):
        calibration, scores = torch.randn(199, generator=random), torch.randn(60, generator=random)
        scores[60 - novel :] += 6.0
        p_value = conformal_p_value(calibration, scores).double()
        shares.append(ordinary_share(p_value, 199))
        found = find_novelties(p_value, 199, 0.1)
        assert found.ordinary == min(1.0, shares[-1])
        assert found.least == math.ceil(60 * shares[-1] / (0.1 * 200))
    assert 1 - novel / 60 <= np.mean(shares) < 1 - novel / 60 + 0.06


@pytest.mark.slow
def test_false_discoveries_with_ties_stay_below_the_bound() -> None:
    random = torch.Generator().manual_seed(0)
    found = []
    for _ in range(800):
        calibration, scores = torch.randn(199, generator=random), torch.randn(60, generator=random)
        scores[45:] += 3.0
        p_value = conformal_p_value((2 * calibration).round(), (2 * scores).round())
        found.append(false_share(find_novelties(p_value, 199, 0.2).novel, 45))
    assert np.mean(found) < 1.1 * 0.2


def test_p_values_of_a_batch_alone_would_break_the_promise() -> None:
    """The bound in the tests above is sharp enough: without the correction the rate is far above it."""
    random = torch.Generator().manual_seed(0)
    found = []
    for _ in range(300):
        p_value = conformal_p_value(torch.randn(199, generator=random), torch.randn(60, generator=random))
        found.append(float((p_value <= 0.1).any()))
    assert np.mean(found) > 0.9


def points(rng: np.random.Generator, rows: int) -> tuple[Array, Array]:
    y = np.arange(rows) % 2
    return rng.normal(size=(rows, 4)) + 4.0 * y[:, None], y


@pytest.fixture(scope="module")
def head() -> TrustHead:
    rng = np.random.default_rng(0)
    return TrustHead.fit(*points(rng, 200), normalize=None).calibrate(*points(rng, 400))


@pytest.mark.slow
def test_false_discoveries_of_a_head(head: TrustHead) -> None:
    """Fresh calibration points and samples for one head; the bound is 0.2."""
    rng = np.random.default_rng(1)
    other = TrustHead(head.projection, head.sepc, head.evidence)
    found, power = [], []
    for _ in range(40):
        other.calibrate(*points(rng, 120))
        z = np.concatenate([points(rng, 30)[0], rng.normal(size=(10, 4)) + np.array([9.0, -9.0, 0.0, 0.0])])
        novel = other.novelties(z, fdr=0.2).novel
        found.append(false_share(novel, 30))
        power.append(float(novel[30:].double().mean()))
    assert np.mean(found) < 1.2 * 0.2  # the standard error is about 0.02
    assert np.mean(power) > 0.9


def test_new_kinds_are_proposed_as_groups(head: TrustHead) -> None:
    """Two new kinds are two groups, with the nearest training rows; the order of the rows does not matter."""
    rng = np.random.default_rng(7)
    z = np.concatenate([points(rng, 40)[0], rng.normal(size=(25, 4)), rng.normal(size=(15, 4))])
    z[40:65, 0] += 30.0
    z[65:, 1] -= 30.0
    found = head.novelties(z, fdr=0.1)
    assert [set(group.ids) for group in found.groups[:2]] == [set(range(40, 65)), set(range(65, 80))]
    assert sum(len(group.ids) for group in found.groups) == int(found.novel.sum())
    assert len(found.groups[0].examples) == 3
    assert "groups, the largest of 25" in repr(found)
    order = rng.permutation(80)
    again = head.novelties(z[order], fdr=0.1)
    assert [{int(order[int(i)]) for i in group.ids} for group in again.groups[:2]] == [
        set(g.ids) for g in found.groups[:2]
    ]
    assert head.novelties(z[:40], fdr=0.001).groups == ()


def test_groups_without_reference_points_are_regions() -> None:
    rng = np.random.default_rng(8)
    other = TrustHead.fit(*points(rng, 300), normalize=None, reference_points=0).calibrate(*points(rng, 400))
    z = rng.normal(size=(20, 4)) + 40.0
    found = other.novelties(z, fdr=0.1)
    regions = other.judge(z).nearest
    assert {group.region for group in found.groups} == set(regions.tolist())
    assert all(group.examples == () for group in found.groups)


def test_the_record(head: TrustHead) -> None:
    rng = np.random.default_rng(2)
    z = np.concatenate([points(rng, 20)[0], np.full((5, 4), 50.0)])
    found = head.novelties(z, fdr=0.1)
    p_values = len(head.require_calibration().own.ranked_joint) + 1
    assert found.novel[20:].all()
    np.testing.assert_array_equal(found.novel, found.adjusted <= 0.1)
    np.testing.assert_allclose(found.p_value, head.judge(z).p_value, rtol=1e-6)
    assert found.threshold == float(found.p_value[found.novel].max())
    assert found.least == math.ceil(25 * found.ordinary / (0.1 * p_values))
    stricter = head.novelties(z, fdr=0.01)
    assert not (stricter.novel & ~found.novel).any()
    assert stricter.least == math.ceil(25 * found.ordinary / (0.01 * p_values))
    nothing = head.novelties(np.full((2, 4), 4.0), fdr=0.01)  # the centre of a class
    assert nothing.threshold == 0.0
    empty = head.novelties(np.zeros((0, 4)))
    assert (len(empty.novel), empty.threshold) == (0, 0.0)


def test_with_logits() -> None:
    """The p-values are those of the network's calibration; without its logits, those of the head's own labels."""
    rng = np.random.default_rng(3)
    z, y = points(rng, 300)
    logits = 3.0 * np.eye(2)[y] + rng.normal(size=(300, 2))
    both = TrustHead.fit(z[:100], y[:100], normalize=None).calibrate(z[100:], y[100:], logits[100:])
    for given in (None, logits):
        np.testing.assert_allclose(both.novelties(z, given).p_value, both.judge(z, given).p_value, rtol=1e-6)


def test_exact_ranks_decide() -> None:
    """0.3 in float32 is above 0.3: rounding must not hide a discovery at the bound."""
    found = find_novelties(torch.tensor([0.3, 0.3, 0.3], dtype=torch.float32), ranked=9, fdr=0.3)
    assert found.novel.all()


def test_errors(head: TrustHead) -> None:
    with pytest.raises(ValueError, match="fdr must lie between 0 and 1"):
        head.novelties(np.zeros((2, 4)), fdr=1.0)
    with pytest.raises(RuntimeError, match="calibrated first"):
        TrustHead(head.projection, head.sepc, head.evidence).novelties(np.zeros((2, 4)))


@pytest.mark.slow
@pytest.mark.parametrize(("share", "distance"), [(0.0, 0.0), (0.1, 6.0), (0.3, 6.0), (0.3, 1.0)])
def test_the_interval_holds_the_share_of_unknowns(rng: Rng, share: float, distance: float) -> None:
    """Each bound fails in at most half of delta of the draws; unknowns near the known points only weaken the lower."""
    ranked, rows, delta, draws = 300, 400, 0.2, 300
    below, above, found = 0, 0, []
    for _ in range(draws):
        known = np.sort(rng.normal(size=ranked))
        scores = rng.normal(size=rows) + distance * (rng.random(rows) < share)
        p_value = (1 + ranked - np.searchsorted(known, scores)) / (ranked + 1)
        result = unknown_share(torch.from_numpy(p_value), ranked, delta)
        assert 0.0 <= result.lower <= result.share <= result.upper <= 1.0
        below += result.lower > share
        above += result.upper < share and distance > 3.0
        found.append(result.lower > 0)
    most = binom.isf(1e-8, draws, delta / 2)
    assert below <= most
    assert above <= most
    if distance > 3.0:
        assert np.mean(found) > 0.5, "a clear share is told apart from zero"


def test_the_text_says_whether_there_are_unknowns() -> None:
    ordinary = unknown_share(torch.arange(1, 101) / 100, ranked=199)
    assert "cannot be told apart from zero" in str(ordinary)
    strange = unknown_share(torch.full((50,), 1 / 200), ranked=199)
    assert strange.upper == strange.share == 1.0
    assert "About 100.0% of 50 rows" in strange.text
    for few in (1, 5, 20):
        assert unknown_share(torch.ones(3), few).lower == 0.0
    with pytest.raises(ValueError, match="at least one row"):
        unknown_share(torch.zeros(0), 10)
    with pytest.raises(ValueError, match="delta"):
        unknown_share(torch.ones(3), 10, delta=1.0)
