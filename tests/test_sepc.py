"""The frozen classifier: fields, given labels, files, state dicts, gradients, explanations and invalid input."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sepc_torch import SEPC, Partition, Prediction, Rule, bayes_trust, partition
from sepc_torch.shapes import Array

Rng = np.random.Generator


def blobs(rng: Rng, classes: int = 3, count: int = 240, dim: int = 3) -> tuple[Array, Array]:
    labels = rng.integers(0, classes, count)
    return rng.normal(size=(count, dim)) + 2.0 * rng.normal(size=(classes, dim))[labels], labels


@pytest.fixture(scope="module")
def fitted(module_rng: Rng) -> tuple[SEPC, Partition, Tensor, Array]:
    x, y = blobs(module_rng)
    names = np.array(["ash", "birch", "cedar"])[y]
    part = partition(x, names)
    return SEPC.from_partition(part), part, torch.from_numpy(x).float(), names


@pytest.fixture
def model(fitted: tuple[SEPC, Partition, Tensor, Array]) -> tuple[SEPC, Partition, Tensor, Array]:
    """One partition for the module; each test gets its own copy of the frozen model."""
    sepc, part, x, names = fitted
    return copy.deepcopy(sepc), part, x.clone(), names


def same(a: Prediction, b: Prediction) -> bool:
    return all(torch.equal(u, v) for u, v in zip(a, b, strict=True))


def test_fields(model: tuple[SEPC, Partition, Tensor, Array]) -> None:
    sepc, part, x, _ = model
    out = sepc(x)
    assert Prediction._fields == ("label", "trust", "rule", "distance", "margin", "nearest", "runner_up")
    assert all(field.shape == (len(x),) for field in out)
    distance = sepc.bank(x)
    codes = torch.from_numpy(part.codes)
    tiny = torch.finfo(torch.float32).tiny
    for i in range(len(x)):
        own = codes == out.label[i]
        assert out.distance[i] == distance[i].min()
        assert out.nearest[i] == distance[i].argmin()
        assert out.margin[i] == pytest.approx(float(distance[i, ~own].min() / distance[i, own].min().clamp_min(tiny)))
        assert out.runner_up[i] == codes[~own][distance[i, ~own].argmin()]
    assert ((out.trust > 0) & (out.trust <= 1)).all()


def test_float32_and_float64_agree_on_the_training_points(model: tuple[SEPC, Partition, Tensor, Array]) -> None:
    sepc, part, x, _ = model
    exact = SEPC.from_partition(part, dtype=torch.float64)
    a, b = sepc(x), exact(x.double())
    assert torch.equal(a.rule, b.rule)
    assert torch.equal(a.label, b.label)
    assert a.trust.numpy() == pytest.approx(b.trust.numpy(), rel=1e-6)


def test_given_labels_are_evaluated_in_the_same_region(model: tuple[SEPC, Partition, Tensor, Array]) -> None:
    sepc, _, x, _ = model
    own = sepc(x)
    for label in range(3):
        out = sepc(x, torch.full((len(x),), label))
        assert (out.label == label).all()
        assert torch.equal(out.rule, own.rule)
        assert torch.equal(out.distance, own.distance)
        agree = own.label == label
        assert torch.equal(out.trust[agree], own.trust[agree])
        _, found = sepc._resolve(x)
        assert torch.equal(out.trust, bayes_trust(found.counts, sepc.totals, out.label, torch.float32))


def test_predict_returns_labels_by_name(model: tuple[SEPC, Partition, Tensor, Array]) -> None:
    sepc, _, x, names = model
    for points in (x, x.numpy(), x.tolist()):
        found = sepc.predict(points)
        assert found.shape == names.shape
        assert set(found) <= {"ash", "birch", "cedar"}
    assert (sepc.predict(x) == names).mean() > 0.9


def test_abstain(model: tuple[SEPC, Partition, Tensor, Array]) -> None:
    sepc, _, x, _ = model
    out = sepc(torch.cat([x, x + 30]))
    outside = out.rule == int(Rule.OUTSIDE)
    assert outside.any()
    assert torch.equal(out.abstain(threshold=0.9), (out.trust < 0.9) | outside)
    assert torch.equal(out.abstain(threshold=0.9, outside=False), out.trust < 0.9)


def test_save_and_load(model: tuple[SEPC, Partition, Tensor, Array], tmp_path: Path) -> None:
    _, part, x, _ = model
    for nearest in ("mahalanobis", "euclidean"):
        frozen = SEPC.from_partition(part, nearest, nan_policy="flag")
        frozen.save(tmp_path / "model.safetensors")
        again = SEPC.load(tmp_path / "model.safetensors", device="cpu")
        assert same(frozen(x), again(x))
        assert (again.classes, again.nearest, again.nan_policy) == (frozen.classes, nearest, "flag")
    first = (tmp_path / "model.safetensors").read_bytes()
    frozen.save(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").read_bytes() == first
    part.save(tmp_path / "part.safetensors")
    with pytest.raises(ValueError, match="holds a partition, not a sepc"):
        SEPC.load(tmp_path / "part.safetensors")
    with pytest.raises(ValueError, match=r"cannot be used here in float32: .*\. Choose another, such as 'cpu'\."):
        SEPC.load(tmp_path / "model.safetensors", device=f"cuda:{torch.cuda.device_count()}")
    with pytest.raises(ValueError, match="must name a torch device"):
        SEPC.load(tmp_path / "model.safetensors", device="gpu")


def test_buffers_hold_no_training_point(model: tuple[SEPC, Partition, Tensor, Array]) -> None:
    sepc, part, x, _ = model
    isolated = torch.tensor([e.kind == "isolated" for e in part.ellipsoids])
    stored = [sepc.bank.centers[~isolated], sepc.bank.whiteners[~isolated].flatten(0, 1)]
    for rows in stored:  # isolated points are left out: each is the centre of its own ball by definition
        assert float(torch.cdist(x, rows).min()) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("nearest", ["mahalanobis", "euclidean"])
def test_state_dict_of_another_size(
    rng: Rng, model: tuple[SEPC, Partition, Tensor, Array], nearest: str, tmp_path: Path
) -> None:
    _, part, x, _ = model
    sepc = SEPC.from_partition(part, nearest)  # type: ignore[arg-type]
    more, labels = blobs(rng, classes=4, count=400)
    other = SEPC.from_partition(partition(more, labels))
    assert len(other.bank) != len(sepc.bank)
    torch.save(sepc.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True, map_location="cpu"))
    assert same(other(x), sepc(x))
    assert other.classes == ["ash", "birch", "cedar"]
    holder = torch.nn.ModuleDict({"trust": SEPC.from_partition(partition(more, labels))})
    holder.load_state_dict({f"trust.{key}": value for key, value in sepc.state_dict().items()})
    assert same(holder["trust"](x), sepc(x))


def test_copied_and_converted_models_predict_alike(model: tuple[SEPC, Partition, Tensor, Array]) -> None:
    sepc, _, x, _ = model
    assert same(copy.deepcopy(sepc)(x), sepc(x))
    assert same(pickle.loads(pickle.dumps(sepc))(x), sepc(x))
    assert same(sepc.half()(x), sepc(x))
    assert sepc.double()(x).trust.dtype == torch.float64


def test_the_margin_at_a_centre_has_no_gradient(rng: np.random.Generator) -> None:
    x = rng.normal(size=(80, 3)) + np.repeat([[0.0], [4.0]], 40, axis=0)
    model = SEPC.from_partition(partition(x, np.repeat([0, 1], 40)))
    # The origin is zero, so that the distance to the centre is too.
    model.bank.offsets, model.bank.origin = model.bank.centers, torch.zeros(3)
    z = torch.cat([model.bank.centers[:1], torch.from_numpy(x[:5]).float()]).requires_grad_()
    out = model(z)
    assert out.distance[0] == 0.0
    out.margin.sum().backward()
    assert z.grad is not None
    assert torch.equal(z.grad[0], torch.zeros(3))
    assert z.grad.isfinite().all()
    assert z.grad[1:].abs().sum() > 0


def test_differentiable_in_z(model: tuple[SEPC, Partition, Tensor, Array]) -> None:
    sepc, _, x, _ = model
    z = (x[:5] + 0.1).requires_grad_()
    out = sepc(z)
    (out.distance.sum() + out.margin.log().sum()).backward()
    assert z.grad is not None
    assert torch.isfinite(z.grad).all()
    assert (z.grad != 0).any(dim=1).all()


@pytest.mark.slow
def test_euclidean_nearest_is_the_nearest_surface(rng: Rng) -> None:
    x, y = blobs(rng, classes=2)
    part = partition(x, y)
    sepc = SEPC.from_partition(part, "euclidean", dtype=torch.float64)
    z = 6 * rng.normal(size=(50, 3))
    out = sepc(torch.from_numpy(z))
    for i in np.flatnonzero((out.rule == int(Rule.OUTSIDE)).numpy()):
        gaps = [
            e.affine_image(np.diag(1 / part.scale), np.zeros(3)).euclidean_distance(z[i] / part.scale)[0]
            for e in part.ellipsoids
        ]
        assert gaps[int(out.nearest[i])] == pytest.approx(min(gaps), rel=1e-9)


@pytest.mark.slow
def test_wdbc_accuracies() -> None:
    """Ten-fold accuracies of experiments/paper/nearest.py: 92.1 % with Mahalanobis, 96.0 % with Euclidean nearest."""
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import StratifiedKFold

    x, y = load_breast_cancer(return_X_y=True)
    right = {"mahalanobis": 0, "euclidean": 0}
    for train, test in StratifiedKFold(10, shuffle=True, random_state=0).split(x, y):
        part = partition(x[train], y[train])
        for nearest in right:
            sepc = SEPC.from_partition(part, nearest)  # type: ignore[arg-type]
            right[nearest] += int((sepc.predict(x[test]) == y[test]).sum())
    assert right["mahalanobis"] / 569 == pytest.approx(0.921, abs=0.015)
    assert right["euclidean"] / 569 == pytest.approx(0.960, abs=0.015)


def test_explain(model: tuple[SEPC, Partition, Tensor, Array]) -> None:
    sepc, _, x, _ = model
    z = torch.cat([x[:20], x[:20] + 20])
    out = sepc(z)
    found = sepc.explain(z)
    assert isinstance(found, list)
    for i, e in enumerate(found):
        d = e.details
        assert d["label"] == sepc.classes[int(out.label[i])]
        assert d["trust"] == pytest.approx(float(out.trust[i]))
        assert d["rule"] == Rule(int(out.rule[i])).name
        assert sum(d["posterior"].values()) == pytest.approx(1.0)
        assert d["posterior"][d["label"]] == pytest.approx(d["trust"], rel=1e-5)
        assert float(d["arithmetic"].split("= ")[1]) == pytest.approx(d["trust"], abs=6e-4)
        shares = list(d["features"].values())
        assert sum(map(abs, shares)) == pytest.approx(1.0 if d["distance"] > 0 else 0.0)
        assert max(map(abs, shares)) == abs(shares[0])
        text = str(e)
        assert repr(d["label"]) in text
        assert d["rule"] in text
        assert "runner-up" in text
    assert "of class" in str(found[3]).splitlines()[1]
    assert str(sepc.explain(z, 3)) == str(found[3])
    assert str(sepc.explain(z[3])) == str(found[3])
    assert str(sepc.explain(z, -1)) == str(found[-1])


def test_explanation_uses_feature_names(rng: Rng) -> None:
    import pandas as pd

    x, y = blobs(rng, classes=2)
    frame = pd.DataFrame(x, columns=["height", "width", "depth"])
    sepc = SEPC.from_partition(partition(frame, y))
    found = sepc.explain(x[0])
    assert set(found.details["features"]) == {"height", "width", "depth"}  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="The table has more than one column 'width'; give each"):
        sepc.explain(frame.assign(extra=0.0).rename(columns={"extra": "width"}))


def test_nan_rows(model: tuple[SEPC, Partition, Tensor, Array]) -> None:
    sepc, part, x, _ = model
    z = x[:6].clone()
    z[2, 1] = torch.nan
    z[4, 0] = torch.inf
    with pytest.raises(ValueError, match=r"Row 2 holds NaN.*2 such rows.*nan_policy='flag'"):
        sepc(z)
    flagged = SEPC.from_partition(part, nan_policy="flag")
    out = flagged(z)
    assert out.label[[2, 4]].tolist() == [-1, -1]
    assert out.trust[[2, 4]].tolist() == [0.0, 0.0]
    assert out.abstain(0.0)[[2, 4]].all()
    good = [0, 1, 3, 5]
    assert same(Prediction(*(field[good] for field in out)), flagged(x[good]))
    assert flagged.predict(z)[2] is None


def test_empty_batch(model: tuple[SEPC, Partition, Tensor, Array]) -> None:
    out = model[0](torch.zeros(0, 3))
    assert all(field.shape == (0,) for field in out)


def test_refuses_bad_input(model: tuple[SEPC, Partition, Tensor, Array]) -> None:
    sepc, part, x, _ = model
    with pytest.raises(ValueError, match=r"shape \(points, 3\)"):
        sepc(x[:, :2])
    with pytest.raises(TypeError, match="floating-point"):
        sepc(x.long())
    with pytest.raises(ValueError, match="move one"):
        sepc(x.to("meta"))
    with pytest.raises(ValueError, match="indices into classes"):
        sepc(x, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="dtype must be"):
        SEPC.from_partition(part, dtype=torch.float16)


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
def test_float32_covers_the_training_points_far_from_zero(rng: Rng, offset: float) -> None:
    """The default model rounds the ellipsoids to float32, but not their position: the origin is subtracted first."""
    x, y = blobs(rng, classes=2)
    x += offset
    part = partition(x, y)
    exact = SEPC.from_partition(part, dtype=torch.float64)(torch.from_numpy(x))
    found = SEPC.from_partition(part)(torch.from_numpy(x))
    assert not (exact.rule == int(Rule.OUTSIDE)).any()
    assert torch.equal(found.rule, exact.rule)
    assert torch.equal(found.label, exact.label)


@pytest.mark.slow
def test_a_float32_model_warns_before_it_loses_training_points(rng: Rng) -> None:
    """The float32 model rounds the offset of data far from zero, so the ellipsoids move relative to the points."""
    x, y = blobs(rng, classes=2)
    for exponent in (20, 30, 34, 40):
        offset = 2.0**exponent + 2.0 ** (exponent - 24)  # halfway between two numbers of float32
        part = partition(x + offset, y)
        exact = SEPC.from_partition(part, dtype=torch.float64)
        assert not (exact(torch.from_numpy(x + offset)).rule == int(Rule.OUTSIDE)).any()
        for build in (lambda part=part: SEPC.from_partition(part), exact.float):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                sepc = build()
            warned = any("subtract the mean" in str(warning.message) for warning in caught)
            assert warned or not (sepc(torch.from_numpy(x + offset)).rule == int(Rule.OUTSIDE)).any()
            assert warned or exponent < 40
            assert not warned or exponent > 20


def test_refuses_labels_that_are_not_class_indices(model: tuple[SEPC, Partition, Tensor, Array]) -> None:
    sepc, _, x, _ = model
    for wrong in (torch.full((len(x),), 3), torch.full((len(x),), -1)):
        with pytest.raises(
            ValueError, match=r"indices from 0 to 2 into classes=\['ash', 'birch', 'cedar'\], not the labels"
        ):
            sepc(x, wrong)
    with pytest.raises(ValueError, match=r"indices into classes, got torch\.bool"):
        sepc(x, torch.ones(len(x), dtype=torch.bool))
    as_int32 = sepc(x, torch.zeros(len(x), dtype=torch.int32))
    assert same(as_int32, sepc(x, torch.zeros(len(x), dtype=torch.int64)))


def test_flagged_rows_have_no_explanation_and_nan_posterior(model: tuple[SEPC, Partition, Tensor, Array]) -> None:
    _, part, _, _ = model
    huge = torch.full((1, 3), torch.inf)
    flagged = SEPC.from_partition(part, nan_policy="flag")
    assert flagged(huge).label.tolist() == [-1]
    assert flagged.posterior(huge).isnan().all()
    with pytest.raises(ValueError, match=r"Row 0 holds NaN, infinity.*no prediction to explain"):
        flagged.explain(huge)


def test_data_frame_columns_are_selected_by_name(rng: Rng) -> None:
    import pandas as pd

    x, y = blobs(rng, classes=2)
    frame = pd.DataFrame(x, columns=["a", "b", "c"])
    sepc = SEPC.from_partition(partition(frame, y))
    assert (sepc.predict(frame[["c", "a", "b"]]) == sepc.predict(frame)).all()
    with pytest.raises(ValueError, match=r"lacks the columns \['b'\]"):
        sepc.predict(frame[["a", "c"]])


@pytest.mark.slow
def test_an_incomplete_state_dict_leaves_the_model_usable(
    rng: Rng, model: tuple[SEPC, Partition, Tensor, Array]
) -> None:
    sepc, _, x, _ = model
    before = sepc(x)
    more, labels = blobs(rng, classes=4, count=400)
    state = SEPC.from_partition(partition(more, labels)).state_dict()
    del state["bank.offsets"]
    with pytest.raises(RuntimeError, match=r"bank\.offsets"):
        sepc.load_state_dict(state)
    assert sepc(x).label.shape == before.label.shape, "an incomplete state dict must not mix the buffers of two models"
    assert len(sepc.bank) == len(sepc.codes)


def test_abstain_refuses_a_threshold_above_1(model: tuple[SEPC, Partition, Tensor, Array]) -> None:
    sepc, _, x, _ = model
    with pytest.raises(ValueError, match="between 0 and 1"):
        sepc(x).abstain(threshold=95.0)
