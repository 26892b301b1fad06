"""Tests of the assessment of a network's labels: calibrated copies, reasons, numbers, novelty and the stopping rule."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import Tensor

from sepc_torch import TrustHead
from sepc_torch.head.reasons import Reason, refusal_reason
from sepc_torch.training.assessment import (
    assess,
    calibrated_copy,
    class_count,
    is_calibrated,
    judged_of,
    label_numbers,
    no_numbers,
    stage_numbers,
)
from sepc_torch.training.cost import CostMeter
from sepc_torch.training.query import Candidates, discoveries, stopping_rule
from sepc_torch.training.subsets import calibration_half, id_numbers
from sepc_torch.training.trust_table import REASONS

CLASSES = [0, 1, 3]  # label 2 has no training samples


def samples(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings, labels and logits of a network with four outputs."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 3, n)
    z = rng.normal(size=(n, 5)) + 3.0 * np.eye(5)[codes]
    logits = rng.normal(size=(n, 4))
    logits[np.arange(n), np.array(CLASSES)[codes]] += 3.0
    return torch.from_numpy(z).float(), torch.tensor(CLASSES)[codes], torch.from_numpy(logits).float()


@pytest.fixture(scope="module")
def plain() -> TrustHead:
    z, y, _ = samples(150, 0)
    return TrustHead.fit(z, y, dim=3, normalize=None, progress=False)


@pytest.fixture(scope="module")
def calibrated(plain: TrustHead) -> TrustHead:
    found = calibrated_copy(plain, *samples(200, 1), flag_rate=0.1)
    assert found is not None
    return found


class TestCalibration:
    def test_the_head_itself_is_not_changed(self, plain: TrustHead, calibrated: TrustHead) -> None:
        assert class_count(plain) == 4
        assert not is_calibrated(plain, has_logits=True)
        assert is_calibrated(calibrated, has_logits=True)

    def test_unusable_samples_are_left_out(self, plain: TrustHead) -> None:
        z, y, logits = samples(40, 2)
        z[0], logits[1], y[2] = math.nan, math.nan, 2
        found = calibrated_copy(plain, z, y, logits, flag_rate=0.2)
        assert found is not None
        assert found.calibration is not None
        assert len(found.calibration.network.held_joint) == round(37 / 2)
        assert calibrated_copy(plain, z[:22], y[:22], logits[:22], flag_rate=0.2) is None, "19 of 22 are usable"

    def test_the_promised_rate_of_flags(self, plain: TrustHead) -> None:
        """On average over calibration sets; here over the samples of one, within five standard errors."""
        found = calibrated_copy(plain, *samples(1000, 3), flag_rate=0.1)
        assert found is not None
        z, _, logits = samples(2000, 4)
        flagged = float((assess(found, z, logits)["reason"] >= 0).double().mean())
        assert flagged <= 0.1 + 5 * (0.09 / 500 + 0.09 / 2000) ** 0.5

    def test_a_risk_instead_of_a_rate(self, plain: TrustHead) -> None:
        found = calibrated_copy(plain, *samples(600, 5), flag_rate=0.05, risk=0.2)
        assert found is not None
        z, y, logits = samples(1000, 6)
        rows = assess(found, z, logits)
        accepted = rows["reason"] < 0
        assert int(accepted.sum()) > 0
        assert float((rows["network_label"] != y)[accepted].double().mean()) <= 0.2


class TestAssess:
    def test_the_head_decides(self, calibrated: TrustHead) -> None:
        z, _, logits = samples(60, 7)
        rows = assess(calibrated, z, logits)
        known = torch.isin(rows["network_label"], torch.tensor(CLASSES))
        out = calibrated(z, logits=logits[:, CLASSES])
        assert torch.equal(rows["joint"][known], out.joint.float()[known])
        assert torch.equal(rows["reason"][known], refusal_reason(out)[known] - 1)
        assert REASONS == ("no prediction", "novel", "disagrees", "ambiguous")

    def test_a_label_that_the_head_does_not_know(self, calibrated: TrustHead) -> None:
        z, _, logits = samples(5, 8)
        logits[:, 2] = 50.0
        rows = assess(calibrated, z, logits)
        assert rows["network_label"].tolist() == [2] * 5
        assert rows["joint"].tolist() == rows["network_trust"].tolist() == [0.0] * 5
        assert (rows["reason"] >= 0).all()

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_rows_without_a_prediction(self, plain: TrustHead, calibrated: TrustHead, value: float) -> None:
        z, _, logits = samples(3, 9)
        z[1] = value
        rows = assess(calibrated, z, logits)
        assert [REASONS[code] for code in rows["reason"].tolist() if code >= 0][:1] == ["no prediction"]
        assert rows["label"][1] == -1
        assert rows["joint"][1] == 0
        for column in assess(plain, z, logits).values():
            assert not column.isnan().any()
        assert calibrated.sepc.nan_policy == "raise", "the head is as it was"


class TestNumbers:
    def test_the_keys_are_always_the_same(self, calibrated: TrustHead) -> None:
        z, y, logits = samples(30, 10)
        rows = assess(calibrated, z, logits)
        own = torch.tensor(CLASSES)[rows["label"]]
        for network in (True, False):
            full = stage_numbers(rows, rows["reason"], own, y, has_network=network)
            assert list(full) == list(no_numbers(network))
            assert all(math.isfinite(value) for value in full.values())
            unlabelled = stage_numbers(rows, rows["reason"], own, None, has_network=network)
            assert list(unlabelled) == list(full)
            assert math.isnan(unlabelled["aurc" if network else "head_aurc"])
        assert "aurc" not in full, "without a network there is no number about it"

    def test_nothing_accepted(self) -> None:
        no, yes = torch.zeros(3, dtype=torch.bool), torch.ones(3, dtype=torch.bool)
        found = label_numbers(torch.rand(3), no, yes)
        assert found["accepted"] == found["acc_accepted"] == 0.0, "a number that a maximum never prefers"
        assert found["aurc"] == 0.0


class TestNovelty:
    def test_few_false_discoveries(self) -> None:
        """1000 pools of 50 ordinary samples: at most the level, within five standard errors, has any discovery."""
        p_value = torch.from_numpy(np.random.default_rng(0).random((1000, 50)))
        share = np.mean([bool(discoveries(row).any()) for row in p_value])
        assert share <= 0.1 + 5 * (0.09 / 1000) ** 0.5
        assert discoveries(torch.cat([p_value[0], torch.full((30,), 1e-4)]))[-30:].all()
        assert len(discoveries(p_value[0, :0])) == 0

    def test_candidates_of_a_calibrated_head(self, calibrated: TrustHead) -> None:
        z, _, logits = samples(60, 11)
        z[:20] += 40.0  # far away
        rows = assess(calibrated, z, logits)
        found = Candidates.of(judged_of(rows), z, logits, p_value=rows["p_value"])
        assert found.novel[:20].all()
        assert int(found.novel[20:].sum()) <= 8
        plain = Candidates.of(judged_of(rows), z, logits)
        assert torch.equal(plain.ambiguity, found.ambiguity), "ambiguity is the network's margin"


class TestStop:
    @pytest.mark.parametrize(("points", "errors"), [(100, 0), (100, 3), (37, 37), (0, 0)])
    def test_the_bound_is_that_of_clopper_and_pearson(self, points: int, errors: int) -> None:
        accepted = torch.arange(120) < points
        right = torch.arange(120) >= errors
        found = stopping_rule(accepted, right, error=0.1, delta=0.05)
        assert (found.points, found.errors) == (points, errors)
        if errors < points:
            assert binom.cdf(errors, points, found.bound) == pytest.approx(0.05)
        else:
            assert found.bound == 1.0
        assert found.stop == (found.bound <= 0.1)

    @pytest.mark.parametrize("wrong", [{"error": 0.0}, {"error": 1.5}, {"error": 0.1, "delta": 0.0}])
    def test_shares_are_checked(self, wrong: dict[str, Any]) -> None:
        yes = torch.ones(3, dtype=torch.bool)
        with pytest.raises(ValueError, match="must lie between 0 and 1"):
            stopping_rule(yes, yes, **wrong)


class TestCost:
    def test_nested_work_counts_once(self) -> None:
        now = [0.0]
        meter = CostMeter(lambda: now[0])
        assert meter.share() == 0.0
        meter.start()
        now[0] = 8.0
        with meter.paying(), meter.paying():
            now[0] = 10.0
        assert meter.share() == 0.25
        assert not meter.affords(0.15)
        assert meter.affords(None)
        now[0] = 30.0
        assert meter.affords(0.15)


def test_the_calibration_half_depends_on_the_id_only() -> None:
    names = [f"{i}.png" for i in range(500)]
    half = calibration_half(id_numbers(names))
    assert torch.equal(calibration_half(id_numbers(names[100:200])), half[100:200])
    assert 200 < int(half.sum()) < 300


def test_reasons_have_one_definition() -> None:
    assert [Reason(code + 1).text for code in range(len(REASONS))] == list(REASONS)
