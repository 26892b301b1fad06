"""Densities from distances in float32: their stated accuracy, and that they change no value that a head returns."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from odd_classes import hard_points, odd_classes

from sepc_torch import TrustHead
from sepc_torch.head.calibration import assess as assess_module
from sepc_torch.head.calibration.assess import assess, open_rows, settled
from sepc_torch.head.evidence import densities
from sepc_torch.head.evidence.densities import OpenTables, RegionDensities, fit_densities
from sepc_torch.head.prediction import HeadPrediction

Rng = np.random.Generator
DIM, CLASSES = 12, 4


def draw(rng: Rng, count: int, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings, labels and logits of classes with two modes each."""
    codes, mode = rng.integers(CLASSES, size=count), rng.integers(2, size=count)
    middles = np.random.default_rng(5).normal(size=(CLASSES, 2, DIM))
    z = middles[codes, mode] + 0.4 * spread * rng.normal(size=(count, DIM))
    logits = 2.0 * np.eye(CLASSES)[codes] + rng.normal(size=(count, CLASSES))
    return torch.from_numpy(z).float(), torch.from_numpy(codes), torch.from_numpy(logits).float()


@pytest.fixture(scope="module")
def head() -> TrustHead:
    rng = np.random.default_rng(0)
    found = TrustHead.fit(*draw(rng, 800)[:2], nan_policy="flag", progress=False)
    found.calibrate(*draw(rng, 600))
    found.accept_at(flag_rate=0.1)
    return found


def exact(
    model: RegionDensities, points: torch.Tensor, _label: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return model(points), []


def quick(model: RegionDensities, points: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return model.for_labels(points, torch.zeros(len(points), dtype=torch.int64))


@pytest.mark.parametrize("rows", [32, 64])
def test_the_stated_accuracy_holds(rng: Rng, rows: int) -> None:
    for name, points, codes in odd_classes(rng):
        model, _ = fit_densities(points, codes, np.full(len(codes), -1))
        z = torch.from_numpy(points[rng.permutation(len(codes))[:rows]]).float()
        z[: rows // 2] += 3e-4 * torch.from_numpy(rng.normal(size=(rows // 2, z.shape[1]))).float()
        found, tables = quick(model, z)
        wanted = model(z)
        assert not torch.equal(found, wanted)
        assert ((found - wanted).abs() <= OpenTables(*tables).error).all(), name


@pytest.mark.parametrize("dim", [2, 8, 64])
def test_the_stated_accuracy_holds_for_hard_points(rng: Rng, dim: int) -> None:
    """Of a class whose first and last coordinate are almost equal."""
    codes = np.arange(1000) % 2
    points = rng.normal(size=(1000, dim))
    points[:, -1] = points[:, 0] + 10.0 ** rng.uniform(-3.0, -1.0) * points[:, -1]
    points += rng.normal(size=(2, dim))[codes]
    points = (points - points.mean(axis=0)) / points.std(axis=0)
    model, _ = fit_densities(points, codes, np.full(1000, -1))
    _, offsets, whiteners = model.wide
    z = torch.from_numpy(hard_points(rng, offsets[0].numpy(), whiteners[0].numpy(), 5000)).float()
    found, tables = quick(model, z)
    ratio = (found - model(z)).abs() / OpenTables(*tables).error
    assert 0.02 < float(ratio.max()) <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("worse", [False, True])
@pytest.mark.parametrize("with_logits", [False, True])
def test_no_field_depends_on_float32(
    head: TrustHead, rng: Rng, monkeypatch: pytest.MonkeyPatch, with_logits: bool, worse: bool
) -> None:
    """Also of distant and invalid points and of copies of calibration points; with errors fifty times as large too."""
    z, _, logits = draw(rng, 6000)
    z[:1000] *= torch.logspace(-3, 6, 1000)[:, None]
    z[1000], z[1001] = torch.nan, torch.inf
    z[1002:1500] = draw(np.random.default_rng(0), 800)[0][:498]
    given = {"logits": logits} if with_logits else {}
    real = RegionDensities._with_errors

    def with_large_errors(model: RegionDensities, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        density, error = real(model, points)
        sign = 1 - 2 * ((torch.arange(len(density))[:, None] + torch.arange(CLASSES)) % 2)
        return density + 45.0 * error * sign, 50.0 * error

    if worse:
        monkeypatch.setattr(RegionDensities, "_with_errors", with_large_errors)
    with torch.no_grad():
        found = head(z, **given)
        if worse:
            with monkeypatch.context() as patch:
                patch.setattr(assess_module, "settled", lambda measured, *_: measured)
                assert (head(z, **given).nonconformity != found.nonconformity).sum() > 10, (
                    "the second pass changes nothing"
                )
        few = [head(z[i : i + 7], **{name: part[i : i + 7] for name, part in given.items()}) for i in range(0, 70, 7)]
        monkeypatch.setattr(RegionDensities, "for_labels", exact)
        wanted = head(z, **given)
    for name, a, b in zip(HeadPrediction._fields, found, wanted, strict=True):
        assert torch.equal(a.nan_to_num(-9.0), b.nan_to_num(-9.0)), name
    for name, parts, b in zip(HeadPrediction._fields, zip(*few, strict=True), wanted, strict=True):
        if name not in ("distance", "margin", "network_margin"):  # whose last digits depend on the batch
            assert torch.equal(torch.cat(parts).nan_to_num(-9.0), b[:70].nan_to_num(-9.0)), name


@pytest.mark.parametrize("error", [1e-5, 3e-3])
def test_errors_within_the_bound_change_no_value(head: TrustHead, rng: Rng, error: float) -> None:
    """Errors of opposite sign of the label's density and the others change the log odds most."""
    assert head.evidence is not None
    assert head.calibration is not None
    z, label, _ = draw(rng, 500, spread=3.0)
    wanted, found = head.evidence.measure(z), head.evidence.measure(z, label)
    tables = OpenTables(*found.regions)
    bound = tables.error * (error / tables.error.amin(dim=1, keepdim=True))
    sign = torch.where(torch.nn.functional.one_hot(label, CLASSES) == 1, 1.0, -1.0)
    sign *= torch.from_numpy(rng.choice([-0.95, 0.95], size=(500, 1)))
    off = wanted._replace(density=wanted.density + bound * sign, regions=[*tables._replace(error=bound)])
    labels, valid = head.calibration.own, torch.zeros(500, dtype=torch.bool)
    assert labels.plain is not None
    given = None, label, valid, torch.tensor(0.3).double(), labels.tables(), labels.plain
    for a, b in zip(assess(off, *given), assess(wanted, *given), strict=True):
        assert torch.equal(a, b)
    opened = int(open_rows(off.density, label, bound).sum())
    assert opened < 50 if error < 1e-4 else 50 < opened < 500, opened
    # Only open rows are computed again, and invalid rows never are.
    is_open, again = open_rows(off.density, label, bound), settled(off, label, valid)
    assert again.regions == []
    assert int((again.density != off.density).any(dim=1).sum()) == opened
    assert torch.allclose(again.density[is_open], wanted.density[is_open], rtol=1e-12)
    assert torch.equal(settled(off, label, ~valid).density, off.density)


def test_where_densities_stay_in_float64(head: TrustHead, rng: Rng) -> None:
    """Of few rows, of heads in float64, and of older heads whose bank has an origin."""
    assert head.evidence is not None
    model, z = head.evidence.densities, head.evidence.polar(draw(rng, 40)[0])
    assert quick(model, z)[1]
    assert quick(model, z[: densities._QUICK_ROWS - 1])[1] == []
    points = rng.normal(size=(60, 3))
    wide, _ = fit_densities(points, np.arange(60) % 3, np.full(60, -1), torch.float64)
    assert quick(wide, torch.from_numpy(points))[1] == []
    older, _ = fit_densities(points, np.arange(60) % 3, np.full(60, -1))
    state = older.state_dict()
    older.load_state_dict({**state, "bank.origin": state["bank.origin"] + 0.5})
    found, tables = quick(older, torch.from_numpy(points))
    assert tables == []
    assert torch.equal(found, older(torch.from_numpy(points)))


def test_tables_follow_the_buffers(rng: Rng) -> None:
    points = rng.normal(size=(60, 3))
    model, other = (fit_densities(s * points, np.arange(60) % 3, np.full(60, -1))[0] for s in (1.0, 3.0))
    z = torch.from_numpy(points).float()
    quick(model, z)
    model.load_state_dict(other.state_dict())
    for a, b in zip(quick(model, z)[1], quick(other, z)[1], strict=True):
        assert torch.equal(a, b)


def test_pickles_have_no_derived_tables(head: TrustHead, rng: Rng) -> None:
    assert head.evidence is not None
    model, z = head.evidence.densities, head.evidence.polar(draw(rng, 40)[0])
    quick(model, z)
    data = pickle.dumps(model)
    assert len(data) < 1.5 * sum(tensor.nbytes for tensor in model.state_dict().values()) + 10_000
    again = pickle.loads(data)
    assert torch.equal(quick(again, z)[0], quick(model, z)[0])
    assert torch.equal(copy.deepcopy(model)(z), model(z))
    copy.deepcopy(copy.deepcopy(model).to("meta"))
