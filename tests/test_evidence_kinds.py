"""Variants of nonconformity: kinds more and fewer, the head's own score, changes paired by set, the verdict's words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from experiments.panel import evidence_kinds, tables
from experiments.panel.cases import Case, Rows
from experiments.panel.evidence_kinds import HEAD, IN_PLACE, MORE
from experiments.panel.scores import fitted, rows_that_fit, tensor
from sepc_torch import TrustHead

PRESENT = ("density", "nearest", "nearest_white", "mahalanobis", "energy")


def blobs(rng: np.random.Generator, count: int, shift: float = 0.0) -> Rows:
    """Three overlapping classes in five dimensions, with the logits of a linear classifier."""
    y = np.arange(count) % 3
    z = (rng.normal(size=(count, 5)) + 2.0 * np.eye(3, 5)[y] + shift).astype(np.float32)
    return Rows(z, y, 2.0 * z[:, :3])


@pytest.fixture(scope="module")
def case() -> Case:
    rng = np.random.default_rng(0)
    train, calibration, test = (blobs(rng, count) for count in (150, 120, 90))
    layer = 2.0 * np.eye(3, 5, dtype=np.float32), np.zeros(3, dtype=np.float32)
    return Case("blobs", train, calibration, test, {"far": blobs(rng, 60, shift=-2.0)}, classifier=layer)


@pytest.fixture(scope="module")
def head(case: Case) -> TrustHead:
    """A head that tests may calibrate: what they measure besides does not depend on the calibration."""
    return fitted(case)[0]


def test_a_variant_differs_from_the_head_by_one_kind() -> None:
    found = evidence_kinds.variants(PRESENT)
    assert found.pop(HEAD) == PRESENT
    assert len(found) == len(MORE) + len(IN_PLACE) + len(PRESENT)
    for name, kinds in found.items():
        added, removed = set(kinds) - set(PRESENT), set(PRESENT) - set(kinds)
        assert len(set(kinds)) == len(kinds)
        if name.startswith("with "):
            assert (name, removed) == (f"with {''.join(added)}", set())
        elif name.startswith("without "):
            assert (name, added) == (f"without {''.join(removed)}", set())
        else:
            assert name == f"{''.join(added)} in place of {''.join(removed)}"


@pytest.mark.parametrize("seed", [0, 3])
def test_the_kinds_of_the_head_give_its_nonconformity(case: Case, head: TrustHead, seed: int) -> None:
    assert head.evidence is not None
    measured = evidence_kinds.measure(case, head.evidence)
    assert set(measured) == {"calibration", "test", "far"}
    assert tuple(measured["test"]) == (*PRESENT, *MORE)
    fit_rows = rows_that_fit(head, case, seed)
    combined = evidence_kinds.combine(measured, PRESENT, tensor(~case.calibration.right), fit_rows)
    for name, rows in {"test": case.test, **case.unknown}.items():
        out = head(tensor(rows.z), tensor(rows.logits))
        torch.testing.assert_close(combined[name], out.nonconformity.double(), rtol=1e-4, atol=1e-4)


def test_directions_ignore_the_length_of_an_embedding(case: Case, head: TrustHead) -> None:
    assert head.evidence is not None
    more = evidence_kinds.added_kinds(case, head.evidence.reference_points)
    z, logits = tensor(case.test.z), tensor(case.test.logits)
    once, twice = more(z, logits), more(2.0 * z, logits)
    for kind in ("nearest direction", "10th nearest direction", "relative Mahalanobis++", "GEN"):
        torch.testing.assert_close(once[kind], twice[kind], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(once["relative Mahalanobis"], twice["relative Mahalanobis"])
    points = torch.nn.functional.normalize(head.evidence.reference_points.points)
    nearest = torch.cdist(torch.nn.functional.normalize(z), points, compute_mode="donot_use_mm_for_euclid_dist")
    torch.testing.assert_close(once["nearest direction"], nearest.amin(dim=1), rtol=1e-4, atol=1e-4)


def measured_row(name: str, group: str, near: bool, seed: int, head: float, other: float, *peers: float) -> Any:
    place = {"set": name, "unknowns": group, "near": near, "seed": seed}
    return {**place, "auroc": {HEAD: head, "other": other}, "peers": dict(zip("ab", peers, strict=True))}


def test_changes_are_paired_by_set_and_the_best_peer_is_that_of_the_mean() -> None:
    runs = [
        measured_row("one", "x", True, 0, 0.8, 0.9, 0.95, 0.85),
        measured_row("one", "x", True, 1, 0.6, 0.7, 0.65, 0.85),  # peer b has the larger mean
        measured_row("one", "y", False, 0, 0.5, 0.3, 0.7, 0.1),
        measured_row("two", "z", False, 0, 0.5, 0.6, 0.5, 0.4),
    ]
    sets = evidence_kinds.mean_of_seeds(runs)
    assert [row["seeds"] for row in sets] == [2, 1, 1]
    assert (sets[0]["best"], sets[0]["theirs"]) == ("b", pytest.approx(0.85))
    head, other = evidence_kinds.compare(sets)
    assert head["change"]["all"] == [0.0, 0.0]
    assert other["change"]["all"] == pytest.approx([0.0, 0.1])  # changes .1, -.2, .1
    assert other["change"]["near"] == [pytest.approx(0.1), None]
    assert other["change"]["far"] == pytest.approx([-0.05, 0.15])
    assert other["gap"] == pytest.approx((0.05 + 0.4 - 0.1) / 3)
    assert other["worst"] == {"set": "one", "unknowns": "y", "value": pytest.approx(0.4)}
    assert other["loss"] == {"set": "one", "unknowns": "y", "value": pytest.approx(-0.2)}
    assert other["gain"]["value"] == pytest.approx(0.1)
    assert (other["better"], other["networks"]) == (1, 2)  # the mean of network one falls


def row_of_variant(name: str, mean: float, error: float, worst: float) -> dict[str, Any]:
    return {"variant": name, "change": {"all": [mean, error]}, "worst": {"value": worst}}


def test_the_verdict_names_variants_by_their_numbers() -> None:
    head = row_of_variant(HEAD, 0.0, 0.0, 0.08)
    better, worse = row_of_variant("better", 0.03, 0.01, 0.06), row_of_variant("worse", -0.03, 0.01, 0.075)
    noise = row_of_variant("noise", 0.01, 0.01, 0.09)
    lines = tables.verdict([head, better, worse, noise]).splitlines()
    assert lines[0].endswith("above the head's: better.")
    assert lines[1].endswith("standard errors: noise (+0.0100 ± 0.0100).")
    assert lines[2].endswith("below it: worse.")
    assert lines[3].endswith(": better (0.060, mean change +0.0300 ± 0.0100); the head has 0.080.")
    assert tables.verdict([head]).count("none") == 4
