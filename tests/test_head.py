"""The trust head: projection, kinds of input, the network's labels, files and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sepc_torch import Prediction, TrustHead
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.reading.defaults import default_dim
from sepc_torch.head.reading.projection import fit_projection
from sepc_torch.shapes import Array

Rng = np.random.Generator


def embeddings(rng: Rng, count: int = 400, dim: int = 12, classes: int = 3) -> tuple[Array, Array]:
    labels = rng.integers(0, classes, count)
    directions = np.eye(classes, dim)
    return 4 * directions[labels] + rng.normal(size=(count, dim)) * np.linspace(1, 0.2, dim), labels


def same(a: HeadPrediction, b: HeadPrediction) -> bool:
    return all(torch.equal(u.nan_to_num(-9.0), v.nan_to_num(-9.0)) for u, v in zip(a, b, strict=True))


class TestProjection:
    @pytest.mark.parametrize("normalize", ["l2", "standardize", None])
    @pytest.mark.parametrize("method", ["pca", "lda"])
    def test_output_is_white(self, rng: Rng, normalize: str | None, method: str) -> None:
        x, y = embeddings(rng)
        project = fit_projection(x, y, 2, normalize, method, torch.float64)  # type: ignore[arg-type]
        z = project(torch.from_numpy(x)).numpy()
        assert z.shape == (400, 2)
        assert z.mean(axis=0) == pytest.approx(np.zeros(2), abs=1e-10)
        assert z.var(axis=0) == pytest.approx(np.ones(2))
        if method == "pca":
            assert np.cov(z.T)[0, 1] == pytest.approx(0.0, abs=1e-8)

    def test_pca_keeps_the_most_variance(self, rng: Rng) -> None:
        x, y = embeddings(rng)
        project = fit_projection(x, y, 4, None, "pca", torch.float64)
        centred = x - x.mean(axis=0)
        values = np.linalg.svd(centred, compute_uv=False) ** 2
        directions = np.linalg.qr(project.matrix.numpy().T)[0]
        assert np.sum((centred @ directions) ** 2) == pytest.approx(values[:4].sum())

    def test_lda_separates_better_than_pca(self, rng: Rng) -> None:
        """The class means differ along the direction of least variance: PCA misses it, LDA finds it."""
        y = rng.integers(0, 2, 600)
        x = rng.normal(size=(600, 6)) * [10, 8, 6, 5, 4, 0.3]
        x[:, 5] += 2.0 * y

        def gap(method: str) -> float:
            project = fit_projection(x, y, 1, None, method, torch.float64)  # type: ignore[arg-type]
            z = project(torch.from_numpy(x)).numpy()
            return float(np.abs(z[y == 1].mean() - z[y == 0].mean()))

        assert gap("lda") > 1.8  # two unit-variance halves cannot be farther apart than 2
        assert gap("pca") < 0.5

    @pytest.mark.parametrize("normalize", ["l2", "standardize", None])
    def test_lda_solves_the_generalised_eigenproblem(self, rng: Rng, normalize: str | None) -> None:
        """Scatter between classes against shrunken scatter within classes, which is computed class by class here."""
        x, y = embeddings(rng, classes=4)
        z = x / np.linalg.norm(x, axis=1, keepdims=True) if normalize == "l2" else x
        unit = z.std(axis=0) if normalize == "standardize" else np.ones(12)
        z = (z - z.mean(axis=0)) / unit
        own = [z[y == c] for c in range(4)]
        within = sum(np.cov(part.T, bias=True) * len(part) for part in own) / len(z)
        between = sum(len(part) * np.outer(part.mean(axis=0), part.mean(axis=0)) for part in own) / len(z)
        within = within + 1e-3 * np.mean(z**2) * np.eye(12)
        vectors = scipy.linalg.eigh(between, within)[1][:, :-4:-1].T
        expected = vectors / np.sqrt(np.mean((z @ vectors.T) ** 2, axis=0))[:, None]
        found = fit_projection(x, y, 3, normalize, "lda", torch.float64).matrix.numpy() * unit  # type: ignore[arg-type]
        signs = np.sign(np.sum(found * expected, axis=1, keepdims=True))
        assert found == pytest.approx(signs * expected, rel=1e-6, abs=1e-6)

    def test_scale_of_the_input_does_not_matter(self, rng: Rng) -> None:
        x, y = embeddings(rng)
        for normalize in ("l2", "standardize"):
            a = fit_projection(x, y, 3, normalize, "pca", torch.float64)
            b = fit_projection(1e4 * x, y, 3, normalize, "pca", torch.float64)
            assert torch.allclose(a(torch.from_numpy(x)), b(torch.from_numpy(1e4 * x)), atol=1e-8)

    def test_constant_and_dependent_features_are_dropped(self, rng: Rng) -> None:
        x, y = embeddings(rng, dim=4)
        wide = np.concatenate([x, x[:, :2] + x[:, 2:], np.full((len(x), 1), 3.0)], axis=1)
        project = fit_projection(wide, y, 7, "standardize", "pca")
        assert project.matrix.shape == (4, 7)
        assert torch.isfinite(project.matrix).all()


def test_accepts_arrays_and_tensors(rng: Rng) -> None:
    x, y = embeddings(rng)
    z = torch.from_numpy(x[:50]).float()
    expected = TrustHead.fit(x.astype(np.float32), y)(z)
    for a, b in ((torch.from_numpy(x).float(), torch.from_numpy(y)), (x.astype(np.float32).tolist(), y.tolist())):
        assert same(TrustHead.fit(a, b)(z), expected)


def test_fits_from_a_loader_and_an_encoder(rng: Rng) -> None:
    x, y = embeddings(rng)
    encoder = nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.5), nn.Tanh())
    data = TensorDataset(torch.from_numpy(x).float(), torch.from_numpy(y))
    head = TrustHead.fit(DataLoader(data, batch_size=64), encoder=encoder)
    assert encoder.training, "the encoder must be in training mode again"
    encoder.eval()
    with torch.no_grad():
        z = encoder(data.tensors[0])
    encoder.train()
    assert same(head(z), TrustHead.fit(z, y)(z))


def test_the_networks_label_is_assessed(rng: Rng) -> None:
    x, y = embeddings(rng)
    head = TrustHead.fit(x, y)
    z = torch.from_numpy(x).float()
    alone = head(z)
    assert torch.equal(alone.network_label, alone.label)
    assert torch.equal(alone.network_trust, alone.trust)
    wrong = (alone.label + 1) % 3
    out = head(z, labels=wrong)
    assert same(HeadPrediction(*out[:7], *alone[7:]), alone)
    assert torch.equal(out.network_label, wrong)
    assert float((out.network_trust < alone.trust).float().mean()) > 0.95
    assert float((out.network_margin < 1).float().mean()) > 0.9
    logits = nn.functional.one_hot(wrong, 3).float()
    assert same(HeadPrediction(*head(z, logits=logits)[:10], *out[10:]), out), "logits affect the confidence only"
    judged = Prediction(*out[:7])._replace(label=out.network_label, trust=out.network_trust)
    assert torch.equal(out.abstain(0.7), judged.abstain(0.7))


def test_accuracy_and_distance_of_unknown_points(rng: Rng) -> None:
    x, y = embeddings(rng, count=1500)
    head = TrustHead.fit(x[:1000], y[:1000])
    out = head(torch.from_numpy(x[1000:]).float())
    assert float((out.label.numpy() == y[1000:]).mean()) > 0.9
    unknown = torch.from_numpy(-4 * np.eye(3, 12)[y[1000:]] + rng.normal(size=(500, 12))).float()
    assert float(head(unknown).distance.median()) > 1.5 * float(out.distance.median())


def test_default_sizes() -> None:
    assert default_dim(np.array([5500, 6000]), 64) == 32
    assert default_dim(np.array([30, 200]), 384) == 15
    assert default_dim(np.array([5000]), 4) == 4
    assert default_dim(np.array([1, 50]), 30) == 25, "one tiny class decides"
    assert default_dim(np.array([3, 3]), 30) == 1


def test_warns_of_classes_too_small_for_the_dimension(rng: Rng) -> None:
    x, y = embeddings(rng, classes=2)
    y[:5] = 7
    with pytest.warns(UserWarning, match=r"Classes with fewer than 12 training rows .*: 7 \(\d+\)\. .*smaller dim"):
        TrustHead.fit(x, y, dim=6)


@pytest.mark.slow
def test_save_and_load(rng: Rng, tmp_path: Path) -> None:
    x, y = embeddings(rng)
    z = torch.from_numpy(x).float()
    for normalize in ("l2", "standardize", None):
        head = TrustHead.fit(x, np.array(["a", "b", "c"])[y], normalize=normalize)
        head.save(tmp_path / "head.safetensors")
        again = TrustHead.load(tmp_path / "head.safetensors")
        assert same(again(z), head(z))
        assert again.classes == ["a", "b", "c"]
        assert (again.predict(x) == head.predict(z)).all()
    with pytest.raises(ValueError, match="cannot be used here in float32"):
        TrustHead.load(tmp_path / "head.safetensors", device=f"cuda:{torch.cuda.device_count()}")


@pytest.mark.slow
def test_a_checkpoint_of_another_size(rng: Rng, tmp_path: Path) -> None:
    """A module with a head of another size loads the checkpoint with weights_only, including metadata."""

    class Model(nn.Module):
        def __init__(self, head: TrustHead) -> None:
            super().__init__()
            self.encoder = nn.Linear(12, 12)
            self.head = head

        def forward(self, x: Tensor) -> HeadPrediction:
            return self.head(self.encoder(x))

    x, y = embeddings(rng)
    fewer, labels = embeddings(rng, classes=2)
    model = Model(TrustHead.fit(x, y))
    other = Model(TrustHead.fit(fewer, labels, dim=3, normalize=None))
    torch.save(model.state_dict(), tmp_path / "model.ckpt")
    other.load_state_dict(torch.load(tmp_path / "model.ckpt", weights_only=True))
    z = torch.from_numpy(x).float()
    assert same(other(z), model(z))
    assert other.head.classes == [0, 1, 2]
    assert not list(model.head.parameters()), "a head must have no trainable parameters"


def test_half_precision_and_autocast(rng: Rng) -> None:
    x, y = embeddings(rng)
    head = TrustHead.fit(x, y)
    z = torch.from_numpy(x).float()
    expected = head(z)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(head(z), expected)
    assert same(head.half()(z), expected)
    rounded = head(z.bfloat16())
    assert rounded.trust.dtype == torch.float32
    assert float((rounded.label == expected.label).float().mean()) > 0.95


def test_explain(rng: Rng) -> None:
    x, y = embeddings(rng)
    head = TrustHead.fit(x, y)
    found = head.explain(x[:3], 1)
    assert str(found) == str(head.explain(x[1]))
    assert found.details["label"] == head.predict(x[:3])[1]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"labels": None}, ValueError, "labels are missing"),
        ({"dim": 0}, ValueError, "dim must be an integer of at least 1"),
        ({"embeddings": iter([])}, TypeError, "batches need an encoder"),
        ({"encoder": nn.Identity()}, ValueError, "do not give labels as well"),
        ({"encoder": nn.Identity(), "labels": None, "embeddings": []}, ValueError, "batches are empty"),
    ],
)
def test_rejects_invalid_input(rng: Rng, change: dict[str, object], error: type[Exception], message: str) -> None:
    x, y = embeddings(rng)
    with pytest.raises(error, match=message):
        TrustHead.fit(**{"embeddings": x, "labels": y, **change})  # type: ignore[arg-type]


def test_rejects_inputs_of_the_wrong_shape(rng: Rng) -> None:
    x, y = embeddings(rng)
    head = TrustHead.fit(x, y)
    z = torch.from_numpy(x).float()
    with pytest.raises(ValueError, match=r"embeddings must have shape \(points, 12\)"):
        head(z[:, :5])
    with pytest.raises(ValueError, match="a column for each class"):
        head(z, logits=torch.zeros(len(z), 4))
    with pytest.raises(ValueError, match="not both"):
        head(z, logits=torch.zeros(len(z), 3), labels=torch.zeros(len(z), dtype=torch.int64))


def test_a_zero_embedding_has_no_direction(rng: Rng) -> None:
    x, y = embeddings(rng)
    head = TrustHead.fit(x, y, nan_policy="flag")
    out = head(torch.cat([torch.zeros(1, 12), torch.from_numpy(x[:1]).float()]))
    assert out.label[0] == -1
    assert out.abstain(0.0).tolist()[0]
    assert out.label[1] >= 0
    with pytest.raises(ValueError, match="holds NaN"):
        TrustHead.fit(x, y)(torch.zeros(1, 12))
    x[3] = 0.0
    with pytest.raises(ValueError, match="all zeros"):
        TrustHead.fit(x, y)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": 1, "y": 2}, "got a dict"),
        ((1, 2, 3), "got a tuple of 3"),
        ((torch.zeros(2, 3), torch.zeros(2)), "got a dict"),
    ],
)
def test_rejects_invalid_batches(batch: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        TrustHead.fit([batch], encoder=lambda x: {"z": x})


def test_rejects_invalid_sizes_and_logits(rng: Rng) -> None:
    x, y = embeddings(rng)
    with pytest.raises(ValueError, match="dim=20 is more than the 12 features"):
        TrustHead.fit(x, y, dim=20)
    with pytest.raises(ValueError, match="do not vary"):
        TrustHead.fit(np.ones((40, 3)), np.repeat([0, 1], 20), normalize=None, dim=2)
    head, z = TrustHead.fit(x, y, dim=3), torch.from_numpy(x).float()
    with pytest.raises(ValueError, match="logits hold NaN"):
        head(z, logits=torch.full((400, 3), torch.nan))
    with pytest.raises(
        TypeError, match=r"logits must be numbers, got torch.bool; labels that are known go into labels="
    ):
        head(z, logits=torch.ones(400, 3, dtype=torch.bool))
    rows = np.concatenate([np.flatnonzero(y == c)[:5] for c in range(3)])
    with pytest.warns(
        UserWarning, match=r"few points \(5 in the median\), so embeddings are projected on 2 dimensions"
    ):
        TrustHead.fit(x[rows], y[rows])


@pytest.mark.slow
@pytest.mark.parametrize("columns", [["a", "b", "c", "d"], [0, 1, 2, 3]])
def test_a_head_over_a_table(rng: Rng, tmp_path: Path, columns: list[Any]) -> None:
    """The columns are found by name, in any order and among others; a missing one is named."""
    import pandas as pd

    y = np.arange(120) % 2
    frame = pd.DataFrame(rng.normal(size=(120, 4)) + 2.0 * y[:, None], columns=columns)
    head = TrustHead.fit(frame, y, normalize="standardize")
    assert head.feature_names == tuple(map(str, columns))
    expected = head.predict(frame.to_numpy())
    mixed = frame[columns[::-1]].assign(more=1.0)
    head.save(tmp_path / "head")
    other = TrustHead.fit(frame.to_numpy(), y, normalize="standardize")
    assert other.feature_names is None
    other.load_state_dict(head.state_dict())
    for model in (head, TrustHead.load(tmp_path / "head"), other):
        assert np.array_equal(model.predict(mixed), expected)
        assert str(model.explain(mixed, 3)) == str(model.explain(frame.to_numpy(), 3))
        model.calibrate(mixed + 0.1 * rng.normal(size=mixed.shape), y)
        with pytest.raises(ValueError, match=rf"lacks the columns \['{columns[1]}'\]"):
            model.predict(frame.drop(columns=columns[1]))


def test_a_graph_needs_a_cuda_device(rng: Rng) -> None:
    head = TrustHead.fit(rng.normal(size=(60, 4)), np.arange(60) % 2, dim=2)
    with pytest.raises(ValueError, match=r"The head is on cpu; .* head\.to\('cuda'\)"):
        head.graphed(8)


@pytest.mark.slow
@pytest.mark.parametrize("normalize", ["l2", "standardize", None])
def test_embeddings_far_from_zero_are_told(rng: Rng, normalize: Any) -> None:
    """float32 has no digits left for them: half of the features decide, not a single time stamp."""
    y = np.arange(120) % 3
    x = rng.normal(size=(120, 5)) + 3.0 * np.eye(3, 5)[y]
    with pytest.raises(ValueError, match=r"far from zero.*Subtract the mean"):
        TrustHead.fit(x + 1e8, y, dim=2, normalize=normalize)
    with pytest.warns(UserWarning, match="Scores are coarse otherwise"):
        TrustHead.fit(x + 2e6, y, dim=2, normalize=normalize)
    x[:, 0] += 1e9
    TrustHead.fit(x, y, dim=2, normalize="standardize")
