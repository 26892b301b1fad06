"""Networks that nobody tuned on: stored embeddings, rows in turn, the linear probe, a feature file and its figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from experiments.panel import features, networks, tables
from experiments.panel.features import IMAGENET, CifarResNet, Recipe
from experiments.panel.openood import dequantised, in_turn, quantised
from experiments.panel.scores import PEERS, fitted, peer_scores, summarise

CPU = torch.device("cpu")


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("levels", [255, 23])
def test_stored_embeddings_are_within_half_a_step(rng: np.random.Generator, levels: int, signed: bool) -> None:
    parts = {part: rng.gamma(0.5, 2.0, (40, 6)).astype(np.float32) for part in ("train", "test")}
    if signed:
        parts = {part: z * rng.choice([-1, 1], z.shape) for part, z in parts.items()}
    parts["test"][:, 3] = parts["train"][:, 3] = 0.0
    stored, scale = quantised(parts, levels)
    for part, z in parts.items():
        assert stored[part].dtype == (np.int8 if signed else np.uint8)
        assert np.abs(stored[part].astype(int)).max() <= (levels // 2 if signed else levels)
        found = dequantised(stored[part], scale)
        assert (found * z >= 0).all()
        error = np.abs(np.sqrt(np.abs(found)) - np.sqrt(np.abs(z)))
        assert (error <= 0.5001 * scale + 1e-6).all()
        again, same = quantised({"all": np.concatenate([dequantised(own, scale) for own in stored.values()])}, levels)
        np.testing.assert_allclose(same, scale, rtol=1e-5)
        np.testing.assert_array_equal(again["all"], np.concatenate(list(stored.values())))


def test_rows_come_from_every_class_in_turn(rng: np.random.Generator) -> None:
    y = rng.integers(0, 5, 200)
    rows = in_turn(y, 33)
    assert len(np.unique(rows)) == 33
    assert np.ptp(np.bincount(y[rows], minlength=5)) <= 1
    for label in range(5):
        own = np.flatnonzero(y == label)
        np.testing.assert_array_equal(rows[y[rows] == label], own[: np.sum(y[rows] == label)])
    assert len(in_turn(y, 1000)) == 200
    # A file that holds only the chosen rows gives the same ones.
    kept = np.sort(rows)
    np.testing.assert_array_equal(kept[in_turn(y[kept], 33)], rows)


def test_the_probe_is_that_of_scikit_learn(rng: np.random.Generator) -> None:
    y = np.arange(90) % 3
    z = (rng.normal(size=(90, 4)) + np.eye(4)[y]).astype(np.float32)
    weight, bias = features.linear_probe(z, y)
    other = LogisticRegression(C=features.PROBE_C, tol=1e-8, max_iter=1000).fit(z, y)
    np.testing.assert_allclose(weight, other.coef_, atol=1e-3)
    np.testing.assert_allclose(bias - bias.mean(), other.intercept_ - other.intercept_.mean(), atol=1e-3)


def pictures(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Noisy pictures with a brightness per class, in random order."""
    y = rng.permutation(np.arange(count) % 5)
    x = 50.0 * y[:, None, None, None] + rng.normal(0, 40, (count, 10, 10, 3))
    return {"x": np.clip(x, 0, 255).astype(np.uint8), "y": y}


@pytest.fixture(scope="module")
def feature_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    files: dict[str, Mapping[str, np.ndarray]] = {name: pictures(rng, 500) for name in ("known", "near", "far")}
    recipe = Recipe("known", "", lambda: CifarResNet(1), 12, IMAGENET, ("near",), ("far",), 8)
    recipe = replace(recipe, left_out=1, rows=(150, 100, 120, 30))
    path = tmp_path_factory.mktemp("features") / "tiny.npz"
    about = features.of_pictures(recipe, files.__getitem__, recipe.make(), path, CPU)
    assert about["rows"] == {
        "train": 150, "calibration": 100, "test": 120, "ood_left_out": 30, "ood_near": 30, "ood_far": 30
    }  # fmt: skip
    return path


def test_a_feature_file_is_a_case(feature_file: Path) -> None:
    case = networks.stored_case(feature_file)
    assert case.name == "tiny"
    assert case.near == ("left_out", "near")
    assert list(case.unknown) == ["left_out", "near", "far"]
    assert case.classifier is not None
    weight, bias = case.classifier
    for rows in (case.train, case.calibration, case.test, *case.unknown.values()):
        np.testing.assert_allclose(rows.logits, rows.z @ weight.T + bias, rtol=1e-5)
    assert set(case.train.y) == {0, 1, 2, 3}
    assert (case.unknown["left_out"].y == -1).all()


def test_a_seed_redraws_calibration_and_test_rows(feature_file: Path) -> None:
    case = networks.stored_case(feature_file)
    drawn = networks.redrawn(case, 1)
    before, after = (np.concatenate([one.calibration.z, one.test.z]) for one in (case, drawn))
    assert len(drawn.calibration.y) == len(case.calibration.y)
    np.testing.assert_array_equal(before[np.lexsort(before.T)], after[np.lexsort(after.T)])
    assert not np.array_equal(case.test.z, drawn.test.z)
    np.testing.assert_array_equal(networks.redrawn(case, 1).test.z, drawn.test.z)


def test_scores_without_calibration_rows_are_those_of_the_draw(feature_file: Path) -> None:
    case = networks.stored_case(feature_file)
    for seed, found in zip([3, 4], networks.peers_of_draws(case, [3, 4]), strict=True):
        expected = peer_scores(networks.redrawn(case, seed))
        assert set(found) == set(expected)
        for name, parts in expected.items():
            for group, score in parts.items():
                torch.testing.assert_close(found[name][group], score, rtol=1e-4, atol=1e-4, msg=f"{name}, {group}")


def test_figures_and_promises_become_a_table(feature_file: Path) -> None:
    case = networks.stored_case(feature_file)
    runs = networks.run(case, [0], 5)
    assert {"mistakes", "unknowns: far", "both: left_out"} <= set(runs[0]["figures"])
    head, _ = fitted(case)
    drawn = networks.redrawn(case, 0)
    head.calibrate(drawn.calibration.z, drawn.calibration.y, drawn.calibration.logits, seed=0)
    for found in networks.promise(head, drawn).values():
        assert 0.0 <= found["accepted"] <= 1.0
        assert not found["broken"] or found["accepted"] > 0.0
    parts = {"tiny": {"rows": summarise(runs), "runs": runs}}
    results = {"seeds": [0], "share": 0.5, "delta": 0.1, "peers": PEERS, "parts": parts}
    text = tables.held_out(results)
    assert "| tiny |" in text
    assert all(question.title in text for question in tables.QUESTIONS)


def test_losses_are_named() -> None:
    questions = {question.title: question for question in tables.QUESTIONS}
    rows = [
        {"question": questions["mistakes"], "change": [0.02, 0.01, 0.03]},
        {"question": questions["near unknowns"], "change": [-0.02, -0.05, 0.01]},
        {"question": questions["far unknowns"], "change": [0.02, 0.01, 0.03]},
    ]
    assert "mistakes (clearly), near unknowns (within the interval).**" in tables.losses(rows)
    assert "none of the questions" in tables.losses(rows[2:])
    lower = [{"question": questions["both"], "change": [-0.02, -0.03, -0.01]}]
    assert "none of the questions" in tables.losses(lower)


def test_a_folder_without_feature_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no feature files"):
        networks.feature_files(tmp_path)


def test_other_weights_are_refused(tmp_path: Path) -> None:
    network = CifarResNet(1)
    torch.save(
        {"state_dict": {f"module.{name}": value for name, value in network.state_dict().items()}}, tmp_path / "a"
    )
    features.load_weights(CifarResNet(1), tmp_path / "a")
    with pytest.raises(ValueError, match="a has other weights than expected: layer1"):
        features.load_weights(CifarResNet(2), tmp_path / "a")
