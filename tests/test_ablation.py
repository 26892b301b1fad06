"""The ablation: its head is the library's, its pieces, its variants, and the intervals of its changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from experiments.panel import ablation, head_defaults
from experiments.panel.ablation import HALF, HEAD, KINDS, KMEANS, NOTHING, ONE, SUPPORT, Variant
from experiments.panel.cases import Case, Rows
from experiments.panel.scores import fitted, groups, rows_that_fit, tensor
from sepc_torch import TrustHead
from sepc_torch.head.evidence.evidence import EvidenceValues, with_softmax


def blobs(rng: np.random.Generator, count: int, shift: float = 0.0) -> Rows:
    """Two classes of two clumps each, which no plane divides, with the logits of a network that errs."""
    y = np.arange(count) % 2
    clump = rng.integers(0, 2, count)
    centers = 4.0 * np.array([[[1, 0, 2], [0, 1, 2]], [[1, 1, 2], [0, 0, 2]]])
    z = (centers[y, clump] + rng.normal(size=(count, 3)) + shift).astype(np.float32)
    return Rows(z, y, (z[:, :2] + 2.0 * np.eye(2)[y] + rng.normal(size=(count, 2))).astype(np.float32))


@pytest.fixture(scope="module")
def case() -> Case:
    rng = np.random.default_rng(0)
    train, calibration, test = (blobs(rng, count) for count in (200, 150, 90))
    return Case("blobs", train, calibration, test, {"far": blobs(rng, 60, shift=-9.0)}, near=("far",))


@pytest.fixture(scope="module")
def head(case: Case) -> TrustHead:
    return fitted(case)[0]


@pytest.mark.parametrize("seed", [0, 3])
def test_the_variant_without_a_change_is_the_head(case: Case, head: TrustHead, seed: int) -> None:
    measured = ablation.measure(head, case, {})[HEAD]
    fit = rows_that_fit(head, case, seed)
    held = tensor(np.setdiff1d(np.arange(len(case.calibration.y)), fit.numpy()))
    assert head.calibration is not None
    temperature = head.calibration.network.temperature
    values = {}
    for group, rows in {"calibration": case.calibration, **groups(case)}.items():
        logits = tensor(rows.logits).double()
        values[group] = with_softmax(measured[group], logits / temperature, logits.argmax(dim=1))
    found = ablation.scores(case, values, list(SUPPORT), fit, held)
    for group, rows in groups(case).items():
        out = head(tensor(rows.z), tensor(rows.logits))
        torch.testing.assert_close(found[group].confidence, out.confidence.double(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[group].joint, out.joint.double(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(-found[group].typical, out.nonconformity.double(), rtol=1e-4, atol=1e-4)


def test_kmeans_replaces_the_pieces_by_as_many(case: Case, head: TrustHead) -> None:
    counts = ablation.piece_counts(head)
    points, codes = head.projection(tensor(case.train.z)).double().detach().numpy(), case.train.y
    pieces = ablation.kmeans_pieces(points, codes, np.array([2, 3]), seed=0)
    for label, count in enumerate((2, 3)):
        own = pieces[codes == label]
        assert len(np.unique(own[own >= 0])) <= count
        assert not np.isin(own[own >= 0], pieces[codes != label]).any()
    assert (np.bincount(pieces[pieces >= 0])[np.unique(pieces[pieces >= 0])] > points.shape[1]).all()
    assert (ablation.kmeans_pieces(points, codes, np.array([0, 0]), seed=0) == -1).all()
    found = ablation.other_densities(head, case)
    assert len(found[ONE].codes) == 2
    assert len(found[KMEANS].codes) <= 2 + counts.sum()


def test_every_variant_changes_one_thing() -> None:
    found = ablation.variants(("layer1", "layer2"))
    assert found[HEAD] == Variant()
    assert found[NOTHING] == Variant(support=("regions",), kinds=("density",))
    assert found[ablation.LAST].kinds == ("layer layer1", "layer layer2")
    for name in (*SUPPORT, *KINDS, "layer layer1", "layer layer2"):
        assert found[f"without {name}"].support + found[f"without {name}"].kinds == (name,)
    assert [name for name, variant in found.items() if variant.half] == [HALF]
    assert len(set(found.values())) == len(found)


def test_columns_are_left_out_by_name() -> None:
    values = EvidenceValues(torch.arange(6.0).view(2, 3), torch.arange(10.0).view(2, 5))
    found = ablation.columns(values, Variant(support=("regions",), kinds=("energy", "density")), KINDS)
    assert found.support.tolist() == [[0.0, 2.0], [3.0, 5.0]]
    assert found.nonconformity.tolist() == [[1.0, 2.0, 3.0], [6.0, 7.0, 8.0]]


@pytest.mark.slow
def test_every_variant_is_measured_on_the_same_rows(case: Case) -> None:
    rows = ablation.ablate(case, [0, 1])
    assert [row["variant"] for row in rows] == 2 * list(ablation.variants())
    by_name = {row["variant"]: row for row in rows[: len(rows) // 2]}
    for name in SUPPORT:  # support says nothing about unknowns
        assert by_name[f"without {name}"]["unknowns"] == by_name[HEAD]["unknowns"]
    for name in KINDS:  # the confidence uses nonconformity through the joint score alone
        assert by_name[f"without {name}"]["mistakes"] == pytest.approx(by_name[HEAD]["mistakes"], abs=0.05)
    assert by_name[NOTHING]["unknowns"] == by_name["without density"]["unknowns"]
    assert any(by_name[HALF][name] != by_name[HEAD][name] for name in ablation.FIGURES)


def run(name: str, variant: str, seed: int, mistakes: float | None, **unknowns: float) -> dict[str, Any]:
    place = {"set": name, "seed": seed, "variant": variant, "pieces": 1.0, "divided": 0.0}
    return {**place, "mistakes": mistakes, "unknowns": unknowns, "both": {k: 10 * v for k, v in unknowns.items()}}


def test_changes_are_paired_by_network_and_a_network_counts_once() -> None:
    runs = [
        *(run("one", HEAD, 0, 0.2, x=0.8, y=0.6), run("one", HEAD, 1, 0.4, x=0.8, y=0.6)),
        *(run("one", "other", 0, 0.3, x=0.9, y=0.7), run("one", "other", 1, 0.5, x=0.9, y=0.7)),
        *(run("two", HEAD, 0, None, z=0.5), run("two", "other", 0, None, z=0.2)),
    ]
    head, other = ablation.compare(runs)
    assert head["unknowns"]["change"] == [0.0, 0.0, 0.0]
    assert head["unknowns"]["mean"] == pytest.approx(0.6)
    assert other["mistakes"]["change"] == pytest.approx([0.1, 0.1, 0.1])  # network two made no mistake
    mean, low, high = other["unknowns"]["change"]
    assert mean == pytest.approx(-0.1)
    assert high - mean == pytest.approx(12.706 * 0.2, rel=1e-3)
    assert mean - low == pytest.approx(high - mean)


def test_layers_are_compared_over_the_splits() -> None:
    names = [HEAD, *(f"without layer {name}" for name in ablation.LAYERS), ablation.LAST]
    runs = [
        run("net", name, seed, 0.1, a=0.8 - 0.1 * i, b=0.9 - 0.01 * seed)
        for i, name in enumerate(names)
        for seed in (0, 1)
    ]
    rows = ablation.by_layer(runs, near=("a",))
    assert [row["variant"] for row in rows] == names
    assert [row["near"]["mean"] for row in rows] == pytest.approx([0.8, 0.7, 0.6, 0.5, 0.4])
    assert rows[-1]["near"]["change"] == pytest.approx([-0.4, -0.4, -0.4])
    assert rows[-1]["far"]["mean"] == pytest.approx(0.895)


def test_the_defaults_rank_rows_without_a_margin_last(case: Case) -> None:
    """Logits that tie give no label of the network, hence no margin."""
    z, y, logits = (values[case.test.right] for values in case.test)
    tied = np.flatnonzero(y == 1)[:10]
    logits = logits.copy()
    logits[tied] = 0.0
    measured = head_defaults.measure(replace(case, test=Rows(z, y, logits)), {}, seed=0)
    assert measured["auroc_of_margin"] == 1.0
    assert all(np.isfinite(value) for value in measured.values())
