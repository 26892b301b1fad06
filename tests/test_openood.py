"""Networks by OpenOOD's recipe: the split, augmentation, training and its continuation, stored samples, figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from experiments.panel import openood, tables
from experiments.panel.openood import PADDING, STAGES, Network, Pictures, ResNet18

CPU = torch.device("cpu")
WIDTH = 4


@pytest.fixture(scope="module")
def pictures() -> Pictures:
    return openood.random_pictures(np.random.default_rng(0))


@pytest.fixture(scope="module")
def network(pictures: Pictures) -> Network:
    model = openood.trained(pictures, "cifar100", 0, 1, CPU, kept=None, width=WIDTH)
    return openood.activations(model, pictures, CPU)


def test_every_test_picture_either_calibrates_or_tests(rng: np.random.Generator) -> None:
    x = rng.integers(0, 256, (200, 32, 32, 3), dtype=np.uint8)
    y = rng.integers(0, 5, 200)
    parts = openood.split(x[:100], y[:100], x[100:], y[100:], {"tin": x[:7]})
    sizes = {part: len(found) for part, found in parts.x.items()}
    assert sizes == {"train": 100, "calibration": 10, "test": 90, "tin": 7}
    found = np.concatenate([parts.x["calibration"], parts.x["test"]])
    labels = np.concatenate([parts.y["calibration"], parts.y["test"]])
    order = [int((x[100:] == picture).all(axis=(1, 2, 3)).argmax()) for picture in found]
    assert sorted(order) == list(range(100))
    np.testing.assert_array_equal(labels, y[100:][order])
    assert (parts.y["tin"] == -1).all()
    again = openood.split(x[:100], y[:100], x[100:], y[100:], {})
    np.testing.assert_array_equal(again.x["calibration"], parts.x["calibration"])


def test_pictures_of_another_shape_are_refused() -> None:
    x, y = np.zeros((4, 32, 32, 3), np.uint8), np.zeros(4, int)
    with pytest.raises(ValueError, match=r"tin pictures as bytes of shape .*, got uint8 of shape \(4, 28, 28"):
        openood.split(x, y, x, y, {"tin": np.zeros((4, 28, 28, 3), np.uint8)})
    with pytest.raises(ValueError, match="got float32"):
        openood.split(x.astype(np.float32), y, x, y, {})


def test_missing_pictures_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no cifar10.npz, cifar100.npz, tin.npz"):
        openood.read_pictures(tmp_path, "cifar10")


def test_augmentation_keeps_labels_and_shows_a_window_of_the_picture(rng: np.random.Generator) -> None:
    # Red is the label, green the row and blue the column of a pixel, from 1; the margin is 0.
    count = 40
    x = np.zeros((count, 32, 32, 3), np.uint8)
    x[..., 0] = np.arange(1, count + 1)[:, None, None]
    x[..., 1] = np.arange(1, 33)[:, None]
    x[..., 2] = np.arange(1, 33)
    padded = torch.nn.functional.pad(torch.from_numpy(x), (0, 0, *[PADDING] * 4))
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    [(found, labels)] = openood.batches(padded, torch.arange(1, count + 1), generator)
    assert found.shape == (count, 32, 32, 3)
    assert found.dtype == torch.uint8
    assert sorted(labels.tolist()) == list(range(1, count + 1))
    assert (found[..., 0].amax(dim=(1, 2)) == labels).all()
    windows, steps = set(), set()
    for picture in found.int():
        inside = picture[..., 0] > 0
        down, across = picture[..., 1].amax(dim=1), picture[..., 2].amax(dim=0)
        rows, columns = down[down > 0], across[across > 0]
        assert len(rows) >= 32 - PADDING
        assert len(columns) >= 32 - PADDING
        assert int(inside.sum()) == len(rows) * len(columns)
        assert (rows.diff() == 1).all()
        step = int(columns[1] - columns[0])
        assert (columns.diff() == step).all()
        steps.add(step)
        windows.add((tuple(down.tolist()), tuple(across.tolist())))
    assert steps == {-1, 1}
    assert len(windows) > count // 2  # of 162 windows


def test_an_epoch_has_full_batches_and_no_picture_twice() -> None:
    count = 2 * openood.BATCH + 5
    x = torch.zeros(count, 2 + 2 * PADDING, 2 + 2 * PADDING, 3, dtype=torch.uint8)
    found = [labels for _, labels in openood.batches(x, torch.arange(count), torch.Generator().manual_seed(0))]
    assert [len(labels) for labels in found] == [openood.BATCH] * 2
    assert len(torch.cat(found).unique()) == 2 * openood.BATCH


def test_the_network_is_openoods_resnet18() -> None:
    network = ResNet18(100, openood.COLOURS["cifar100"])
    assert sum(parameter.numel() for parameter in network.parameters()) == 11_220_132  # ResNet18_32x32 with 100 classes
    found = network.eval().activations(torch.zeros(1, 32, 32, 3, dtype=torch.uint8))
    assert [stage.shape[1] for stage in found] == [64, 128, 256, 512]


def test_all_pictures_have_activations_and_the_logits_of_the_last_layer(pictures: Pictures, network: Network) -> None:
    weight, bias = network.classifier
    for part, rows in network.parts.items():
        assert [rows.stages[stage].shape for stage in STAGES] == [
            (len(pictures.x[part]), WIDTH * 2**stage) for stage in range(4)
        ]
        assert all((rows.stages[stage] >= 0).all() for stage in STAGES)
        torch.testing.assert_close(rows.logits, rows.z @ weight.T + bias)


def test_a_training_continues_from_its_checkpoint(
    pictures: Pictures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openood, "KEPT", 1)
    few = Pictures({"train": pictures.x["train"][:32]}, {"train": pictures.y["train"][:32]})
    kept = tmp_path / "kept.pt"
    whole = openood.trained(few, "cifar10", 3, 2, CPU, kept=None, width=WIDTH)

    class Killed(Exception):
        pass

    replace = Path.replace

    def killed(part: Path, target: Path) -> None:
        replace(part, target)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(Killed):
            openood.trained(few, "cifar10", 3, 2, CPU, kept=kept, width=WIDTH)
    assert torch.load(kept, weights_only=True)["epoch"] == 1
    continued = openood.trained(few, "cifar10", 3, 2, CPU, kept=kept, width=WIDTH)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(continued.state_dict()[name], value, rtol=0, atol=0)
    with pytest.raises(ValueError, match="a training of 2 epochs, not 5"):
        openood.trained(few, "cifar10", 3, 5, CPU, kept=kept, width=WIDTH)


def test_a_stored_sample_is_balanced_and_close_to_the_activations(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openood, "SAMPLE", {"train": 62, "calibration": 1000, "test": 1000})
    openood.store(network, 7, tmp_path / "cifar100_0.npz", np.random.default_rng(0))
    found, epochs = openood.stored(tmp_path / "cifar100_0.npz")
    assert epochs == 7
    assert set(found.parts) == set(network.parts)
    assert sorted(found.parts["train"].y.bincount().tolist()) == [15, 15, 16, 16]
    torch.testing.assert_close(found.classifier, network.classifier)
    for stage in STAGES:
        highest = max(float(rows.stages[stage].max()) for rows in network.parts.values())
        for part, rows in found.parts.items():
            original = network.parts[part].stages[stage]
            # The nearest original row of each stored one; half a step of 255 in the root is at most 1/255 of the range.
            assert torch.cdist(rows.stages[stage], original, p=math.inf).amin(dim=1).max() <= 1.01 / 255 * highest
        assert len(found.parts["test"].stages[stage]) == len(network.parts["test"].y)


def test_figures_of_two_trainings_become_a_table(network: Network) -> None:
    run: dict[str, Any] = {"set": "cifar100", "seed": 0, "epochs": 1} | openood.figures(network)
    assert set(run["scores"]) == {*openood.OTHERS, *openood.HEADS}
    assert set(run["scores"]["head"]["unknowns"]) == {"cifar10", "tin", "textures", "mnist"}
    other = json.loads(json.dumps(run))
    for group in ("cifar10", "tin"):
        other["scores"]["head"]["unknowns"][group]["auroc"] += 2.0
    rows = openood.summarise([run, other])
    head = next(row for row in rows if row["score"] == "head")
    near = np.mean([run["scores"]["head"]["unknowns"][group]["auroc"] for group in ("cifar10", "tin")])
    assert head["near_auroc"] == pytest.approx((near + 1.0, math.sqrt(2.0)))
    assert head["far_auroc"][1] == 0.0
    text = tables.openood({"rows": rows, "runs": [run, other]})
    own = run["scores"]["head"]["unknowns"]["cifar10"]["auroc"] + 1
    assert f"| SEP-C, last layer | {near + 1:.1f} ± 1.4 |  | {own:.1f} ± 1.4 |" in text
    assert "± 0.0 | 80.3 | " in text  # OpenOOD's near figure of max softmax
    assert "CIFAR-100, 2 trainings of 1 epochs, " in text


def test_the_head_gets_the_earlier_layers_of_the_same_rows(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openood, "ROWS", 50)
    seen: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []

    class Head:
        """Records the rows and layers of every call."""

        @classmethod
        def fit(cls, z: torch.Tensor, _y: torch.Tensor, *, layers: dict[str, torch.Tensor], **_options: Any) -> Head:
            seen.append((z, layers))
            return cls()

        def to(self, device: torch.device) -> Head:
            return self

        def calibrate(
            self, z: torch.Tensor, y: torch.Tensor, logits: torch.Tensor, *, layers: dict[str, torch.Tensor]
        ) -> None:
            seen.append((z, layers))

        def __call__(self, z: torch.Tensor, logits: torch.Tensor, *, layers: dict[str, torch.Tensor]) -> Any:
            seen.append((z, layers))
            return SimpleNamespace(confidence=z[:, 0], nonconformity=z[:, 0], joint=z[:, 0])

    monkeypatch.setattr(openood, "TrustHead", Head)
    found = openood.head_scores(network, layers=True)
    order = ["train", "calibration", *openood.judged(network)]
    for stage in STAGES[:-1]:
        everything = torch.cat([network.parts[part].stages[stage] for part in order])
        torch.testing.assert_close(torch.cat([layers[stage] for _, layers in seen]), everything, rtol=0, atol=0)
    assert all(set(layers) == set(STAGES[:-1]) for _, layers in seen)
    torch.testing.assert_close(found["unknowns"]["tin"], -network.parts["tin"].z[:, 0])


def test_without_any_training_the_command_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEPC_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="train` on a GPU first"):
        openood.collect(tmp_path / "none")


def test_samples_in_the_data_folder_are_measured(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEPC_DATA", str(tmp_path))
    (tmp_path / "openood").mkdir()
    openood.store(network, 1, tmp_path / "openood" / "cifar100_7.npz", np.random.default_rng(0))
    [run] = openood.collect(tmp_path / "none")
    assert (run["set"], run["seed"], run["rows"]["test"]) == ("cifar100", 7, len(network.parts["test"].y))
