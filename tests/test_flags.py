"""Tests of flags: calibrated copies, heads without calibration, reasons, numbers, novelty and the stopping rule."""

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
from sepc_torch.shapes import Array
from sepc_torch.training.flags import (
    as_trust_head,
    assess,
    calibrated_copy,
    class_count,
    find_reasons,
    is_calibrated,
    label_numbers,
    no_numbers,
    own_labels,
    safety,
    stage_numbers,
)
from sepc_torch.training.query import Candidates, discoveries, stopping_rule
from sepc_torch.training.subsets import calibration_half, id_numbers
from sepc_torch.training.trust_table import REASONS

Rng = np.random.Generator
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
        assert len(found.calibration.network.ranked_joint) == round(37 / 2)
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
        assert REASONS == ("no prediction", "no promise", "novel", "disagrees", "ambiguous")

    @pytest.mark.filterwarnings("ignore:The head accepts nothing")
    def test_without_a_promise_every_label_says_so(self, plain: TrustHead) -> None:
        found = calibrated_copy(plain, *samples(40, 2), flag_rate=0.1, risk=1e-6)
        assert found is not None
        z, _, logits = samples(20, 7)
        z[0] = math.nan
        rows = assess(found, z, logits)
        assert [REASONS[code] for code in rows["reason"].tolist()] == ["no prediction"] + ["no promise"] * 19

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


def clouds(rng: Rng, labels: tuple[int, ...] = (3, 8)) -> tuple[Array, Array]:
    """Two clouds of forty points each, six standard deviations apart."""
    y = np.repeat(labels, 40)
    x = rng.normal(size=(80, 3))
    x[40:, 0] += 6.0
    return x, y


def head_of(x: Array, y: Array) -> TrustHead:
    return TrustHead.fit(x, y, dim=3, normalize=None, progress=False)


def names(reason: Tensor) -> list[str]:
    return ["" if code < 0 else REASONS[code] for code in reason.tolist()]


def logits_of(labels: Array) -> Tensor:
    """Logits of a network with ten outputs that predicts these labels."""
    return torch.nn.functional.one_hot(torch.from_numpy(labels), 10).float()


def reasons(head: TrustHead, rows: dict[str, Tensor], flag_rate: float) -> list[str]:
    return names(find_reasons(rows, own_labels(head.classes, rows["label"]), flag_rate))


class TestWithoutCalibration:
    def test_agrees_with_the_head(self, rng: Rng) -> None:
        x, y = clouds(rng)
        head = head_of(x, y)
        z = torch.from_numpy(x).float()
        given = rng.permutation(y)
        found, out = assess(head, z, logits_of(given)), head(z, labels=torch.from_numpy(given == 8).long())
        for name in ("label", "trust", "network_trust", "network_margin"):
            assert torch.equal(found[name], getattr(out, name)), name
        assert torch.equal(found["network_label"], torch.from_numpy(given))
        alone = assess(head, z)
        assert torch.equal(alone["network_label"], torch.tensor([3, 8])[alone["label"]])
        inner = assess(as_trust_head(head.sepc), head.projection(z), logits_of(given))
        assert all(torch.equal(inner[name], found[name]) for name in found)

    def test_an_unknown_label_has_trust_zero(self, rng: Rng) -> None:
        """With few labels, the network may have classes that the head lacks."""
        x, y = clouds(rng)
        found = assess(head_of(x, y), torch.from_numpy(x).float(), logits_of(np.full(80, 5)))
        assert bool((found["network_trust"] == 0).all())
        assert bool((found["network_margin"] == 0).all())
        assert bool((found["trust"] > 0).all())

    def test_nan_and_infinity_have_no_prediction(self, rng: Rng) -> None:
        x, y = clouds(rng)
        head, z = head_of(x, y), torch.from_numpy(x).float()
        expected = assess(head, z)
        z[[2, 7], 1] = torch.tensor([torch.nan, torch.inf])
        found = assess(head, z)
        assert found["label"][[2, 7]].tolist() == found["network_label"][[2, 7]].tolist() == [-1, -1]
        assert found["trust"][[2, 7]].tolist() == [0.0, 0.0]
        others = [i for i in range(80) if i not in (2, 7)]
        assert all(torch.equal(found[name][others], expected[name][others]) for name in found)
        assert reasons(head, found, 0.01)[2] == "no prediction"

    def test_text_labels_have_index_values(self, rng: Rng) -> None:
        x, y = clouds(rng)
        head = head_of(x, np.where(y == 3, "cat", "dog"))
        found = assess(head, torch.from_numpy(x).float())
        assert found["network_label"].tolist() == found["label"].tolist()


class TestReasons:
    def test_reason_by_location(self, rng: Rng) -> None:
        x, y = clouds(rng)
        head = head_of(x, y)
        centers = x[:40].mean(axis=0), x[40:].mean(axis=0)
        line = np.linspace(*centers, 101)
        between = line[int(assess(head, torch.from_numpy(line).float())["margin"].argmin())]
        far = np.array([0.0, 100.0, 0.0])
        z = torch.from_numpy(np.stack([centers[0], between, far])).float()
        own = torch.tensor([3, 8])[assess(head, z)["label"]].numpy()
        found = assess(head, z, logits_of(np.array([8, *own[1:]])))
        rows = {**found, "distance": found["distance"] / torch.tensor([1.0, 10.0, 1.0])}  # the second is not novel
        assert reasons(head, rows, 0.99) == ["disagrees", "ambiguous", "novel"]
        assert sorted(reasons(head, rows, 0.3)) == ["", "", "disagrees"]

    @pytest.mark.parametrize("fraction", [0.05, 0.1, 0.5])
    def test_the_least_safe_are_flagged(self, rng: Rng, fraction: float) -> None:
        x, y = clouds(rng)
        head = head_of(x, y)
        found = assess(head, torch.from_numpy(x + rng.normal(size=x.shape)).float())
        flagged = torch.tensor([bool(name) for name in reasons(head, found, fraction)])
        assert int(flagged.sum()) == np.ceil(fraction * 80)
        assert float(safety(found)[flagged].max()) <= float(safety(found)[~flagged].min())

    def test_safety_ranks_samples_of_equal_trust(self) -> None:
        rows = {"network_trust": torch.ones(3), "network_margin": torch.tensor([1.0, 3.0, torch.inf])}
        assert safety(rows).tolist() == [0.5, 0.75, 1.0]
        assert safety({**rows, "network_trust": torch.full((3,), 0.2)}).tolist() == pytest.approx([0.2, 0.2, 0.2])


class TestNumbers:
    def test_the_keys_are_always_the_same(self, calibrated: TrustHead) -> None:
        z, y, logits = samples(30, 10)
        rows = assess(calibrated, z, logits)
        own = torch.tensor(CLASSES)[rows["label"]]
        for network in (True, False):
            full = stage_numbers(rows, rows["reason"], own, y, has_network=network)
            assert list(full) == list(no_numbers(network))
            assert {name for name, value in full.items() if not math.isfinite(value)} == {"unknown_accepted"}
            unlabelled = stage_numbers(rows, rows["reason"], own, None, has_network=network)
            assert list(unlabelled) == list(full)
            assert math.isnan(unlabelled["aurc" if network else "head_aurc"])
        assert "aurc" not in full, "without a network there is no number about it"

    @pytest.mark.parametrize("network", [True, False])
    def test_unknown_classes_are_counted_apart(self, calibrated: TrustHead, network: bool) -> None:
        """Numbers about labels are those of the samples of known classes alone."""
        z, y, logits = samples(30, 10)
        rows = assess(calibrated, z, logits)
        own, known = torch.tensor(CLASSES)[rows["label"]], torch.arange(30) < 20
        few = {name: column[known] for name, column in rows.items()}
        alone = stage_numbers(few, few["reason"], own[known], y[known], has_network=network)
        found = stage_numbers(rows, rows["reason"], own, torch.where(known, y, -1), has_network=network)
        for name in alone:
            if name.removeprefix("head_").startswith(("acc", "aurc")):
                assert found[name] == alone[name]
        assert (found["n"], found["unknown"]) == (30.0, 10.0)
        assert found["unknown_accepted"] == pytest.approx(float((rows["reason"] < 0)[~known].double().mean()))
        nothing = stage_numbers(rows, rows["reason"], own, torch.full((30,), -1), has_network=network)
        assert math.isnan(nothing["acc" if network else "head_acc"])

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
        rows |= {"emb": z, "logits": logits}
        found = Candidates.of(rows)
        assert found.novel[:20].all()
        assert int(found.novel[20:].sum()) <= 8
        plain = Candidates.of({name: column for name, column in rows.items() if name != "p_value"})
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


def test_the_calibration_half_depends_on_the_id_only() -> None:
    names = [f"{i}.png" for i in range(500)]
    half = calibration_half(id_numbers(names))
    assert torch.equal(calibration_half(id_numbers(names[100:200])), half[100:200])
    assert 200 < int(half.sum()) < 300


def test_reasons_have_one_definition() -> None:
    assert [Reason(code + 1).text for code in range(len(REASONS))] == list(REASONS)
