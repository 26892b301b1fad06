"""Exported heads: standard operators, ONNX files and .pt2 files give the answers of the head itself."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sepc_torch import HeadPrediction, TrustHead, export, to_onnx
from sepc_torch.head.calibration.calibration_tables import RESOLUTION
from sepc_torch.head.standard_operators import StandardOperators
from sepc_torch.serving.export import exported_program

pytestmark = pytest.mark.slow

# Settings of heads that use every operator: two distances, several sizes of classes, with and without neighbours.
HEADS: dict[str, dict[str, Any]] = {
    "mahalanobis": {"classes": 3, "dim": 3},
    "euclidean": {"classes": 3, "dim": 3, "partition": {"nearest": "euclidean"}},
    "many classes": {"classes": 33, "dim": 2, "rows": 330},
    "no reference points": {"classes": 2, "dim": 2, "reference_points": 0, "normalize": "standardize"},
}


def assert_equal(got: HeadPrediction, want: HeadPrediction) -> None:
    """Equal labels and decisions; scores equal within the resolution that the head itself calls equal.

    Another processor rounds in another way, and can move one of some thousand points over a surface or a threshold.
    """
    rows = len(want.label)
    for name in ("label", "rule", "network_label", "accept"):
        assert int((getattr(got, name) != getattr(want, name)).sum()) <= rows // 5000, name
    for name in ("distance", "confidence", "nonconformity", "joint"):
        a, b = getattr(got, name), getattr(want, name)
        torch.testing.assert_close(a, b, rtol=RESOLUTION, atol=RESOLUTION, equal_nan=True, msg=name)
    for name in ("trust", "network_trust", "margin", "network_margin", "p_value", "class_p_value"):
        a, b = getattr(got, name), getattr(want, name)
        same = torch.isclose(a, b, rtol=RESOLUTION, atol=RESOLUTION, equal_nan=True)
        # A p-value can differ by one rank, where a score lies at the edge of the resolution around a calibration score.
        assert int((~same).sum()) <= rows // 100, name


@pytest.mark.filterwarnings("ignore:.*classes have few:UserWarning", "ignore:Classes with fewer than:UserWarning")
@pytest.mark.parametrize("name", HEADS)
def test_standard_operators_give_the_answers_of_our_own(name: str) -> None:
    rng = np.random.default_rng(0)
    settings = dict(HEADS[name])
    classes, rows = int(settings.pop("classes")), int(settings.pop("rows", 240))
    y = np.arange(rows) % classes
    x = rng.normal(size=(rows, 5)) + 3.0 * rng.normal(size=(classes, 5))[y]
    logits = rng.normal(size=(rows, classes)) + 3.0 * np.eye(classes)[y]
    head = TrustHead.fit(x, y, nan_policy="flag", **settings).calibrate(x + 0.3 * rng.normal(size=x.shape), y, logits)
    z = torch.from_numpy(np.concatenate([x, 4.0 * x[:50], np.zeros((1, 5)), np.full((1, 5), np.nan)])).float()
    given = torch.from_numpy(np.concatenate([logits, logits[:52]])).float()
    given[3], given[4] = torch.nan, 0.0
    for some in (None, given):
        with StandardOperators():
            got = head(z, logits=some)
        assert_equal(got, head(z, logits=some))


def test_equally_near_ellipsoids_are_all_expanded() -> None:
    """A point between mirror images of one class has the same counts in the graph."""
    corner = np.array([[1.0, 0.0], [2.0, 0.3], [2.0, -0.3], [3.0, 0.0]])
    points = np.concatenate([corner, -corner, corner[:, ::-1], -corner[:, ::-1]])
    head = TrustHead.fit(points, np.repeat([0, 1, 2, 3], 4), normalize=None, dim=2)
    z = torch.tensor([[0.0, 0.0], [0.1, 0.1], [0.1, 0.0]])
    with StandardOperators():
        got = head(z)
    assert_equal(got, head(z))


# Writes the .pt2 file by the head, and the ONNX file by the command line.
SCRIPT = """
    import sys, warnings
    import numpy as np
    from sepc_torch import TrustHead
    from sepc_torch.cli import app
    from sepc_torch.serving import export
    rng = np.random.default_rng(0)
    centres = 2.0 * rng.normal(size=(3, 5))
    def data(n):
        y = rng.integers(0, 3, n)
        x = rng.normal(size=(n, 5)) + centres[y]
        return x, np.array(["a", "b", "c"])[y], -((x[:, None] - centres) ** 2).sum(-1) / 2
    x, y, _ = data(240)
    head = TrustHead.fit(x, y, dim=3, reference_points=60, classes=["a", "b", "c"]).calibrate(*data(60))
    head.save(sys.argv[1] + "/head.safetensors")
    program = export.exported_program(head)
    export.exported_program = lambda *_arguments, **_options: program  # one trace for both files
    warnings.filterwarnings("error", "No complete tensor")  # torch's, about constants that are written as they are
    export.export(head, sys.argv[1] + "/head.pt2")
    app(["export", sys.argv[1] + "/head.safetensors", "-o", sys.argv[1] + "/head.onnx"], standalone_mode=False)
    x, _, logits = data(100_000)
    x[::3] *= 4.0
    x[7], logits[8], logits[9, 0], logits[10:13] = np.nan, np.nan, -np.inf, 0.0
    np.savez(sys.argv[1] + "/rows.npz", z=x.astype(np.float32), logits=logits.astype(np.float32))
"""
# Reads the .pt2 file where this package cannot be imported.
ALONE = """
    import json, sys
    sys.modules["sepc_torch"] = None
    import numpy as np, torch
    rows = {name: torch.from_numpy(array[:10_000]) for name, array in np.load(sys.argv[1] + "/rows.npz").items()}
    extra = {"head.json": ""}
    program = torch.export.load(sys.argv[1] + "/head.pt2", extra_files=extra).module()
    assert json.loads(extra["head.json"])["classes"] == ["a", "b", "c"]
    assert json.loads(extra["head.json"])["reasons"]["3"] == "novel"
    assert len(program(rows["z"][:1], rows["logits"][:1])["label"]) == 1
    out = program(rows["z"], rows["logits"])
    np.savez(sys.argv[1] + "/alone.npz", **{name: column.numpy() for name, column in out.items()})
"""


def run_python(code: str, folder: Path) -> None:
    """Run a script in a fresh process, without the shape checks of the tests; an overflow is an error.

    So is torch's warning of itself, which this package keeps from users.
    """
    errors = ("error::RuntimeWarning", "error:`isinstance(treespec, LeafSpec)` is deprecated:FutureWarning")
    options = [part for rule in ("ignore", *errors) for part in ("-W", rule)]
    command = [sys.executable, *options, "-c", textwrap.dedent(code), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a head, its exported files and rows to score."""
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    made = tmp_path_factory.mktemp("exported")
    run_python(SCRIPT, made)
    return made


@pytest.fixture(scope="module")
def many(folder: Path) -> dict[str, np.ndarray]:
    """100 000 rows."""
    return dict(np.load(folder / "rows.npz"))


@pytest.fixture(scope="module")
def rows(many: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: values[:10_000] for name, values in many.items()}


def by_torch(folder: Path, rows: dict[str, np.ndarray]) -> HeadPrediction:
    """Answers of the head itself, which flags rows with NaN as graphs do under either policy."""
    head = TrustHead.load(folder / "head.safetensors")
    head.sepc.nan_policy = "flag"
    return head(torch.from_numpy(rows["z"]), logits=torch.from_numpy(rows["logits"]))


def by_onnx(path: Path, rows: dict[str, np.ndarray], provider: str = "CPUExecutionProvider") -> HeadPrediction:
    """Answers of ONNX Runtime, in batches of 4096 rows."""
    ort = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    if provider not in ort.get_available_providers():
        pytest.skip(f"this onnxruntime has no {provider}: pip install onnxruntime-gpu")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # TF32, the default on CUDA, would keep 10 bits of a float32 product.
    settings = {"use_tf32": "0"} if provider == "CUDAExecutionProvider" else {}
    session = ort.InferenceSession(path, options, providers=[(provider, settings)])
    assert provider in session.get_providers()
    parts = [
        session.run(None, {name: values[start : start + 4096] for name, values in rows.items()})
        for start in range(0, len(rows["z"]), 4096)
    ]
    return HeadPrediction(*(torch.from_numpy(np.concatenate(columns)) for columns in zip(*parts, strict=True)))


@pytest.fixture(scope="module")
def expected(folder: Path, rows: dict[str, np.ndarray]) -> HeadPrediction:
    return by_torch(folder, rows)


@pytest.mark.slow
def test_onnx_runtime_gives_the_answers_of_the_head(
    folder: Path, rows: dict[str, np.ndarray], expected: HeadPrediction, capfd: pytest.CaptureFixture[str]
) -> None:
    ort = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    session = ort.InferenceSession(folder / "head.onnx", providers=["CPUExecutionProvider"])
    assert "node_" not in capfd.readouterr().err  # no warning about a node
    assert [value.name for value in session.get_outputs()] == list(HeadPrediction._fields)
    assert session.get_modelmeta().custom_metadata_map["classes"] == '["a", "b", "c"]'
    assert_equal(by_onnx(folder / "head.onnx", rows), expected)
    one = session.run(None, {name: values[:1] for name, values in rows.items()})
    assert [len(values) for values in one] == [1] * len(HeadPrediction._fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    "provider", ["CPUExecutionProvider", pytest.param("CUDAExecutionProvider", marks=pytest.mark.gpu)]
)
def test_onnx_decides_and_ranks_identically(folder: Path, many: dict[str, np.ndarray], provider: str) -> None:
    """Scores are in float64: their rounding errors are far below the distance of a row to a threshold or a rank."""
    got, want = by_onnx(folder / "head.onnx", many, provider), by_torch(folder, many)
    for name in ("label", "rule", "nearest", "runner_up", "network_label", "accept", "p_value", "class_p_value"):
        a, b = getattr(got, name).numpy(), getattr(want, name).numpy()
        np.testing.assert_array_equal(a, b, err_msg=name)
    # The nearest reference point is searched in float32: of two that are equally near to its accuracy, either is found.
    torch.testing.assert_close(got.nonconformity, want.nonconformity, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.joint, want.joint, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_onnx_files_use_standard_operators_only(folder: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
    model = onnx.load(folder / "head.onnx")
    onnx.checker.check_model(model)
    assert [(entry.domain, entry.version) for entry in model.opset_import if not entry.domain.startswith("pkg.")] == [
        ("", 18)
    ]
    functions = {(function.domain, function.name) for function in model.functions}
    assert all(node.domain == "" or (node.domain, node.op_type) in functions for node in model.graph.node)


@pytest.mark.slow
def test_pt2_files_load_without_this_package(folder: Path, expected: HeadPrediction) -> None:
    run_python(ALONE, folder)
    found = np.load(folder / "alone.npz")
    assert_equal(HeadPrediction(*(torch.from_numpy(found[name]) for name in HeadPrediction._fields)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["head.onnx", "head.pt2"])
def test_exported_files_hold_no_paths_of_this_machine(folder: Path, name: str) -> None:
    assert b"trust_head.py" not in (folder / name).read_bytes()  # the archive of a .pt2 file is not compressed


@pytest.mark.slow
def test_outputs_without_logits_have_their_names() -> None:
    """Without logits some fields are one tensor; each is an output of its own."""
    rng = np.random.default_rng(0)
    head = TrustHead.fit(rng.normal(size=(60, 3)), np.arange(60) % 2, dim=2, reference_points=20)
    program = exported_program(head, logits=False)
    outputs = program.graph_signature.user_outputs
    assert len(set(outputs)) == len(outputs) == len(HeadPrediction._fields)


def test_heads_that_need_groups_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(400) % 2
    x = rng.normal(size=(400, 3)) + 8.0 * y[:, None]
    head = TrustHead.fit(x, y, dim=2).calibrate(x + 0.1, y)
    head.accept_at(risk=0.5, delta=0.2, by=y)
    for write in (export, to_onnx):
        with pytest.raises(ValueError, match=r"an exported graph takes no groups\. Call accept_at without by"):
            write(head, tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    head = TrustHead.fit(np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2, dim=2)
    with pytest.raises(ModuleNotFoundError, match=r"needs the package onnxscript: pip install 'sepc_torch\[onnx\]'"):
        to_onnx(head, tmp_path / "head.onnx")


def test_a_failed_export_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise RuntimeError("no space")

    monkeypatch.setattr("sepc_torch.serving.export.exported_program", lambda *_args, **_options: None)
    monkeypatch.setattr(torch.export, "save", fail)
    head = TrustHead.fit(np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2, dim=2)
    with pytest.raises(RuntimeError, match="no space"):
        export(head, tmp_path / "head.pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize("points", [0, 20])
def test_no_buffer_is_an_empty_tensor_of_numpy_s(tmp_path: Path, loaded: bool, points: int) -> None:
    """``torch.export.save`` cannot write those: their storage has an address, and they have none."""
    x = np.random.default_rng(0).normal(size=(40, 3))
    head = TrustHead.fit(x, np.arange(40) % 2, dim=2, reference_points=points)
    head.save(tmp_path / "head.safetensors")
    head = TrustHead.load(tmp_path / "head.safetensors") if loaded else head
    empty = [buffer for buffer in head.buffers() if buffer.numel() == 0]
    assert empty
    assert all(buffer.untyped_storage().data_ptr() == buffer.data_ptr() for buffer in empty)


# Exports a module that holds a network and a loaded head, in each of the ways that docs/architecture.md names.
MODULE = """
    import contextlib, sys, warnings
    import numpy as np, torch
    from sepc_torch import TrustHead
    from sepc_torch.head.standard_operators import StandardOperators
    class Trusted(torch.nn.Module):
        def __init__(self, head, network):
            super().__init__()
            self.head, self.network = head, network
        def forward(self, x):
            out = self.head(x, self.network(x))
            return out.joint, out.accept
    rng = np.random.default_rng(0)
    y = np.arange(300) % 2
    x = rng.normal(size=(300, 3)) + 2.0 * y[:, None]
    network = torch.nn.Linear(3, 2)
    with torch.no_grad():
        logits = network(torch.from_numpy(x).float())
    for points, mode in ((0, contextlib.nullcontext()), (20, StandardOperators())):
        head = TrustHead.fit(x[:100], y[:100], dim=2, reference_points=points)
        head.calibrate(x[100:], y[100:], logits[100:]).save(sys.argv[1] + "/head.safetensors")
        module = Trusted(TrustHead.load(sys.argv[1] + "/head.safetensors"), network).eval()
        inputs, rows = torch.from_numpy(x).float(), {"x": {0: torch.export.Dim("rows")}}
        with torch.no_grad():
            want = module(inputs)
        with mode:
            program = torch.export.export(module, (inputs[:5],), dynamic_shapes=rows)
        ours = {node.target for node in program.graph.nodes if getattr(node.target, "namespace", "") == "sepc_torch"}
        assert bool(ours) == isinstance(mode, contextlib.nullcontext), ours
        torch.export.save(program, sys.argv[1] + "/module.pt2")
        got = torch.export.load(sys.argv[1] + "/module.pt2").module()(inputs)
        assert torch.equal(got[1], want[1]) and torch.allclose(got[0], want[0], rtol=1e-5)
    warnings.simplefilter("ignore")  # of torch.onnx, of itself
    file = sys.argv[1] + "/module.onnx"
    torch.onnx.export(module, (inputs[:5],), file, dynamo=True, dynamic_shapes=rows, opset_version=18, verbose=False)
    import onnxruntime
    got = onnxruntime.InferenceSession(file).run(None, {"x": inputs.numpy()})
    assert (got[1] == want[1].numpy()).all() and np.allclose(got[0], want[0], rtol=1e-5)
    assert 0 < got[1].sum() < 300
"""


@pytest.mark.slow
def test_modules_with_heads_are_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs ONNX Runtime")
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    run_python(MODULE, tmp_path)
