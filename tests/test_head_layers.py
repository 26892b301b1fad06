"""Trust heads with earlier layers of a network: distances, p-values, forms of input, and every way out of the head."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sepc_torch import DriftMonitor, Scorer, TrustHead, write_report
from sepc_torch.head.evidence.layer_distance import fit_layers
from sepc_torch.head.explanation import DecisionExplanation
from sepc_torch.head.reading.layers import layer_rows, read_layers

Rng = np.random.Generator
CLASSES = 3
WIDTHS = {"stem": 5, "block.1": 7}


def draw(rng: Rng, rows: int, shift: float = 0.0) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Embeddings, labels, logits, and two layers; ``shift`` moves the first layer only."""
    y = rng.integers(0, CLASSES, rows)
    z = rng.normal(size=(rows, 6)) + 3.0 * np.eye(CLASSES, 6)[y]
    logits = rng.normal(size=(rows, CLASSES)) + 4.0 * np.eye(CLASSES)[y]
    layers = {name: rng.normal(size=(rows, width)) + 2.0 * np.eye(CLASSES, width)[y] for name, width in WIDTHS.items()}
    layers["stem"][:, -1] += shift
    return z, y, logits, layers


def fitted(rng: Rng, **options: Any) -> TrustHead:
    z, y, _, layers = draw(rng, 240)
    head = TrustHead.fit(z, y, layers=layers, dim=3, **options)
    z, y, logits, layers = draw(rng, 200)
    return head.calibrate(z, y, logits, layers=layers)


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(u.nan_to_num(-1.0), v.nan_to_num(-1.0)) for u, v in zip(a, b, strict=True))


def tensors(layers: dict[str, Any], rows: slice = slice(None)) -> dict[str, Tensor]:
    return {name: torch.from_numpy(x[rows]).float() for name, x in layers.items()}


def test_the_distance_is_that_of_the_definition(rng: Rng) -> None:
    """Directions and log lengths, the covariance within classes with its least variance, the nearest mean."""
    _, y, _, layers = draw(rng, 400)
    x = layers["block.1"]
    model = fit_layers(read_layers({"block.1": x}, y), list(range(CLASSES)), torch.float64)["block.1"]

    def polar(rows: Any) -> Any:
        length = np.linalg.norm(rows, axis=1, keepdims=True)
        return np.column_stack([rows / length, np.log(length)])

    features = polar(x)
    means = np.stack([features[y == c].mean(axis=0) for c in range(CLASSES)])
    # Coordinates of unit variance, in which the least variance is added.
    values, vectors = np.linalg.eigh(np.cov(features.T, bias=True))
    scale = vectors / np.sqrt(values)
    inside = (features - means[y]) @ scale
    within = inside.T @ inside / (len(x) - CLASSES)
    within += (1e-3 * np.trace(within) / len(within) + 1e-6) * np.eye(len(within))
    new = draw(rng, 50)[3]["block.1"]
    apart = ((polar(new)[:, None] - means) @ scale) @ np.linalg.inv(np.linalg.cholesky(within)).T
    expected = (apart**2).sum(axis=2).min(axis=1)
    assert np.allclose(model(torch.from_numpy(new)).numpy(), expected, rtol=1e-8)


def test_turned_and_scaled_activations_have_the_same_distances(rng: Rng) -> None:
    _, y, _, layers = draw(rng, 300)
    turn = 7.0 * np.linalg.qr(rng.normal(size=(5, 5)))[0]
    new = draw(rng, 40)[3]["stem"]
    found = [
        fit_layers(read_layers({"stem": x}, y), list(range(CLASSES)), torch.float64)["stem"](torch.from_numpy(rows))
        for x, rows in ((layers["stem"], new), (layers["stem"] @ turn, new @ turn))
    ]
    assert torch.allclose(found[0], found[1], rtol=1e-8)


@pytest.mark.slow
def test_p_values_stay_valid_and_see_what_only_an_early_layer_shows(rng: Rng) -> None:
    head = fitted(rng)
    z, _, logits, layers = draw(rng, 2000)
    p_value = head.judge(z, logits, layers=layers).p_value
    ranked = len(head.calibration.network.ranked_rows)  # type: ignore[union-attr]
    for level in (0.05, 0.1, 0.3):
        # The share over one calibration set has a beta distribution; five of its deviations.
        assert float((p_value <= level).double().mean()) <= level + 5.0 * (level * (1.0 - level) / ranked) ** 0.5
    z, _, logits, layers = draw(rng, 200, shift=15.0)
    strange = head.judge(z, logits, layers=layers)
    assert float((strange.p_value <= 0.05).double().mean()) > 0.4
    without = TrustHead.fit(*draw(rng, 240)[:2], dim=3)
    cz, cy, clogits, _ = draw(rng, 200)
    assert float((without.calibrate(cz, cy, clogits).judge(z, logits).p_value <= 0.05).double().mean()) < 0.25


def test_an_explanation_names_the_layer(rng: Rng) -> None:
    head = fitted(rng)
    z, _, logits, layers = draw(rng, 30, shift=15.0)
    rows = head.explain(z, logits=logits, layers=layers)
    assert isinstance(rows, list)
    found = next(row for row in rows if row.reason == "novel")
    assert "unlike the training data in stem (the 1 in" in found.sentence
    shares = {layer.name: layer.share for layer in found.layers}
    assert list(shares) == ["stem", "block.1", "last"]
    assert min(shares, key=shares.__getitem__) == "stem"
    i = rows.index(found)
    one = head.explain(z, i, logits=logits, layers=layers)
    single = head.explain(z[i], logits=logits[i], layers={name: x[i] for name, x in layers.items()})
    stem, block = (layers[name][i] for name in WIDTHS)
    maps = {"stem": np.tile(stem[:, None, None], (1, 2, 3)), "block.1": np.tile(block, (4, 1))}
    of_maps = head.explain(z[i], logits=logits[i], layers=maps)
    batched = head.explain(z[i], logits=logits[i], layers={name: x[None] for name, x in maps.items()})
    assert isinstance(one, DecisionExplanation)
    assert isinstance(single, DecisionExplanation)
    assert isinstance(of_maps, DecisionExplanation)
    assert isinstance(batched, DecisionExplanation)
    for other in (one, single, of_maps, batched):
        assert other.sentence == found.sentence
        assert [layer.name for layer in other.layers] == list(shares)
        assert [layer.share for layer in other.layers] == pytest.approx(list(shares.values()), rel=1e-9)
    assert found.to_dict()["layers"][0] == {"name": "stem", "share": shares["stem"]}


@pytest.mark.slow
def test_batches_dtypes_and_the_order_of_layers_change_nothing(rng: Rng) -> None:
    head = fitted(rng)
    z, _, logits, layers = draw(rng, 60)
    logits = logits.astype(np.float32)
    whole = head.judge(z, logits, layers=layers)
    mixed = {name: layers[name].astype(np.float32) for name in reversed(layers)}
    assert same(head.judge(z.astype(np.float32), logits, layers=mixed), whole)
    for size in (1, 7):
        parts = [
            head(torch.from_numpy(z[i : i + size]).float(), torch.from_numpy(logits[i : i + size]), layers=some)
            for i in range(0, len(z), size)
            for some in [tensors(layers, slice(i, i + size))]
        ]
        together = [torch.cat(columns) for columns in zip(*parts, strict=True)]
        assert torch.equal(together[-1], whole.accept)
        assert torch.equal(together[-5], whole.p_value)
        assert torch.allclose(together[-2], whole.joint, rtol=1e-6)


@pytest.mark.slow
def test_maps_and_tokens_are_averaged_over_positions(rng: Rng) -> None:
    z, y, logits, layers = draw(rng, 240)
    maps = {name: x[:, :, None] + rng.normal(size=(*x.shape, 12)) for name, x in layers.items()}
    given = {"stem": maps["stem"].reshape(len(z), 5, 3, 4), "block.1": maps["block.1"].transpose(0, 2, 1)}
    means = {name: x.mean(axis=2) for name, x in maps.items()}

    def rows(layers: dict[str, Any], part: slice) -> dict[str, Any]:
        return {name: x[part] for name, x in layers.items()}

    first, second = slice(120), slice(120, 240)
    outs = []
    for some in (given, means):
        head = TrustHead.fit(z[first], y[first], layers=rows(some, first), dim=3)
        head.calibrate(z[second], y[second], logits[second], layers=rows(some, second))
        outs += [head.judge(z, logits, layers=layers) for layers in (given, means)]
    for out in outs[1:]:
        assert torch.allclose(out.joint, outs[0].joint, atol=1e-5)


def test_an_encoder_returns_layers(rng: Rng) -> None:
    z, y, _, layers = draw(rng, 120)
    inputs = torch.from_numpy(np.column_stack([z, *layers.values()]))

    class Encoder(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return x[:, :6], {"stem": x[:, 6:11], "block.1": x[:, 11:]}

    batches = [(inputs[i : i + 50], torch.from_numpy(y[i : i + 50])) for i in range(0, 120, 50)]
    expected = TrustHead.fit(z.astype(np.float32), y, layers=layers, dim=3).state_dict()
    for source in (batches, iter(batches)):
        found = TrustHead.fit(source, encoder=Encoder(), dim=3)
        assert found.layer_names == ("stem", "block.1")
        for name, value in found.state_dict().items():
            assert not name.startswith("evidence.layers") or torch.allclose(value, expected[name], rtol=1e-4, atol=1e-5)


def test_files_state_dicts_and_copies(rng: Rng, tmp_path: Path) -> None:
    head = fitted(rng)
    z, _, logits, layers = draw(rng, 40)
    expected = head.judge(z, logits, layers=layers)
    head.save(tmp_path / "head.safetensors")
    empty, plain = TrustHead.empty(), TrustHead.fit(*draw(rng, 90)[:2], dim=2)
    for other in (empty, plain):
        other.load_state_dict(head.state_dict())
    for other in (TrustHead.load(tmp_path / "head.safetensors"), empty, plain, copy.deepcopy(head)):
        assert other.layer_names == head.layer_names
        assert same(other.judge(z, logits, layers=layers), expected)
    head.load_state_dict(TrustHead.fit(*draw(rng, 90)[:2], dim=2).state_dict())
    assert head.layer_names == ()
    head.judge(z)


def test_updates_keep_the_layers(rng: Rng) -> None:
    head = fitted(rng, keep_points=True)
    z, y, logits, layers = draw(rng, 20)
    head.update(z, y)
    assert head.layer_names == ("stem", "block.1")
    z, y, logits, layers = draw(rng, 60)
    assert len(head.calibrate(z, y, logits, layers=layers).judge(z, logits, layers=layers).accept) == 60


# Shape checks wrap functions in Python code that the compiler and the exporter cannot trace: a process without them.
EXPORT = """
import sys
import numpy as np, onnxruntime, torch
sys.path.insert(0, {tests!r})
from test_head_layers import draw, fitted, tensors
from sepc_torch import export, to_onnx
rng = np.random.default_rng({seed})
head = fitted(rng, nan_policy="flag")
z, _, logits, layers = draw(rng, 50)
expected = head.judge(z, logits, layers=layers)
given = torch.from_numpy(z).float(), torch.from_numpy(logits).float()
compiled = torch.compile(head, fullgraph=True, backend="aot_eager")(*given, layers=tensors(layers))
export(head, {folder!r} + "/head.pt2")
fields = torch.export.load({folder!r} + "/head.pt2").module()(*given, *tensors(layers).values())
to_onnx(head, {folder!r} + "/head.onnx")
session = onnxruntime.InferenceSession({folder!r} + "/head.onnx")
inputs = dict(z=given[0], logits=given[1], **tensors(layers))
assert [one.name for one in session.get_inputs()] == list(inputs)
found = session.run(["accept", "p_value"], {{name: x.numpy() for name, x in inputs.items()}})
ways = [(compiled.accept, compiled.p_value), (fields["accept"], fields["p_value"]), map(torch.from_numpy, found)]
for accept, p_value in ways:
    assert torch.equal(accept, expected.accept)
    assert torch.allclose(p_value, expected.p_value, atol=1e-6)
"""


@pytest.mark.slow
def test_compiled_and_exported_heads_take_the_layers(rng: Rng, tmp_path: Path) -> None:
    tests, seed = str(Path(__file__).parent), int(rng.integers(2**31))
    script = EXPORT.format(tests=tests, seed=seed, folder=str(tmp_path))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_scorer_monitor_novelties_and_report(rng: Rng, tmp_path: Path) -> None:
    head = fitted(rng)
    z, _, logits, layers = draw(rng, 80)
    expected = head.judge(z, logits, layers=layers)
    head.save(tmp_path / "head.safetensors")
    scorer = Scorer(tmp_path / "head.safetensors", "cpu", batch_size=32)
    columns = scorer({"z": z, "logits": logits, **layers})
    assert (columns["accept"] == expected.accept.numpy()).all()
    with pytest.raises(ValueError, match=r"no columns \['stem'\]"):
        scorer({"z": z, "logits": logits, "block.1": layers["block.1"]})
    report = DriftMonitor(head).update(z, logits, layers=layers)
    direct = DriftMonitor(head).update_from(expected, with_logits=True)
    assert str(report) == str(direct)
    far = draw(rng, 80, shift=15.0)
    found = [head.novelties(rows[0], rows[2], layers=rows[3]) for rows in (far, (z, None, logits, layers))]
    assert int(found[0].novel.sum()) > int(found[1].novel.sum())
    page = write_report(head, far[0], far[1], far[2], tmp_path / "report.html", layers=far[3]).read_text()
    assert "unlike the training data in stem" in page


def test_rows_without_a_layer_are_refused(rng: Rng) -> None:
    head = fitted(rng)
    z, y, logits, layers = draw(rng, 30)
    layers["stem"][4, 2] = np.nan
    out = head.judge(z, logits, layers=layers)
    assert not bool(out.accept[4])
    assert float(out.joint[4]) == 0.0
    layers["stem"][4] = 0.0
    assert bool(head.judge(z, logits, layers=layers).joint.isfinite().all())
    layers["stem"][4, 2] = np.inf
    with pytest.raises(ValueError, match="Row 4 of layers"):
        head.calibrate(z, y, logits, layers=layers)
    with pytest.raises(ValueError, match="layer 'stem' holds NaN or infinity"):
        TrustHead.fit(z, y, layers=layers, dim=2)


def test_what_is_missing_is_named(rng: Rng) -> None:
    head = fitted(rng)
    z, y, logits, layers = draw(rng, 30)
    y = np.arange(30) % CLASSES
    some = {"stem": layers["stem"]}
    for call in (head.judge, lambda *given, **named: head.calibrate(z, y, logits, **named), head.novelties):
        for given in (None, some):
            with pytest.raises(ValueError, match=r"layers= lacks .*'block.1'\]"):
                call(z, logits, layers=given)
    with pytest.raises(ValueError, match=r"holds \['other'\]"):
        head.judge(z, logits, layers={**layers, "other": z})
    with pytest.raises(ValueError, match="without layers, and layers= holds"):
        TrustHead.fit(z, y, dim=2).judge(z, layers=some)
    with pytest.raises(TypeError, match="dictionary from names"):
        TrustHead.fit(z, y, layers=[z], dim=2)
    with pytest.raises(ValueError, match=r"shape \(30, 6\), expected \(30, 5\)"):
        head.judge(z, logits, layers={**layers, "stem": z})
    with pytest.raises(ValueError, match="has 29 rows for 30 labels"):
        TrustHead.fit(z, y, layers={"stem": z[:29]}, dim=2)
    with pytest.raises(ValueError, match="does not vary"):
        TrustHead.fit(z, y, layers={"stem": np.ones((30, 4))}, dim=2)
    with pytest.raises(ValueError, match=r"maps \(B, C, H, W\)"):
        TrustHead.fit(z, y, layers={"stem": np.ones(30)}, dim=2)
    with pytest.raises(ValueError, match="layers= goes with embeddings in an array"):
        TrustHead.fit([(torch.ones(2, 3), torch.tensor([0, 1]))], encoder=nn.Identity(), layers=some)


@pytest.mark.gpu
def test_the_gpu_agrees_and_records_a_graph(rng: Rng) -> None:
    head = fitted(rng, nan_policy="flag")
    z, _, logits, layers = draw(rng, 3000)
    expected = head.judge(z, logits, layers=layers)
    on_gpu = copy.deepcopy(head).cuda()
    found = on_gpu.judge(z, logits, layers=layers)
    for name in ("accept", "p_value", "class_p_value", "label", "network_label"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.allclose(found.joint, expected.joint, rtol=1e-6)
    given = [torch.from_numpy(x).float().cuda() for x in (z[:100], logits[:100])]
    some = {name: x.cuda() for name, x in tensors(layers, slice(100)).items()}
    replayed = on_gpu.graphed(128)(given[0], given[1], layers=some)
    assert torch.equal(replayed.accept.cpu(), expected.accept[:100])
    assert torch.equal(replayed.p_value.cpu(), expected.p_value[:100])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_means_over_positions_on_a_gpu(rng: Rng, dtype: torch.dtype) -> None:
    """They equal those of the CPU in every layout, a row's does not depend on the batch, and they have a gradient."""
    for shape in ((40, 70, 9, 13), (3, 512, 8, 8), (40, 50, 33)):
        x = torch.from_numpy(rng.normal(size=shape)).to(dtype)
        expected = layer_rows(x, "some")
        form = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        for given in (x.cuda(), x.cuda().contiguous(memory_format=form)):
            found = layer_rows(given, "some")
            if dtype == torch.float64:
                assert torch.allclose(found.cpu(), expected, rtol=1e-12, atol=1e-13)
                continue
            assert torch.equal(found.cpu(), expected)
            assert torch.equal(layer_rows(given[1:2], "some"), found[1:2])
        given = x.cuda().requires_grad_()
        (slope,) = torch.autograd.grad(layer_rows(given, "some").sum(), given)
        positions = x[0].numel() // expected.shape[1]
        assert torch.allclose(slope.double().cpu(), torch.full(shape, 1.0 / positions, dtype=torch.float64), rtol=1e-2)


def test_examples_of_unknowns_have_layers(rng: Rng) -> None:
    """Examples that only an earlier layer sees give weight to this layer; the layers of examples are checked."""
    head = fitted(rng)
    z, y, logits, layers = draw(rng, 300)
    unknown, _, unknown_logits, unknown_layers = draw(rng, 60, shift=4.0)
    given: dict[str, Any] = {"layers": layers, "unknowns": unknown, "unknown_logits": unknown_logits}
    assert head.evidence is not None
    column = head.evidence.kinds.index("layer stem")
    weights = []
    for more in ({"layers": layers}, {**given, "unknown_layers": unknown_layers}):
        calibration = head.calibrate(z, y, logits, **more).calibration
        assert calibration is not None
        weights.append(float(calibration.network.combined_score.weights[column]))
    assert weights[1] > weights[0]
    assert head.unknown_share(unknown, unknown_logits, layers=unknown_layers).rows == 60
    with pytest.raises(ValueError, match="pass those of unknowns as unknown_layers"):
        head.calibrate(z, y, logits, **given)
    with pytest.raises(ValueError, match="unknown_layers are those of unknowns"):
        head.calibrate(z, y, logits, layers=layers, unknown_layers=unknown_layers)
