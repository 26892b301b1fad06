"""Files of tables: one graph of classifier and head gives the labels and decisions of the library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.neighbors import KNeighborsClassifier
from test_cli_models import some, table
from test_export import run_python

from sepc_torch import TrustHead, export, to_onnx
from sepc_torch.data.table_classifier import OwnEstimator
from sepc_torch.data.table_encoding import TableEncoding
from sepc_torch.head.standard_operators import StandardOperators
from sepc_torch.serving.export import TRUSTED, _graph
from sepc_torch.serving.table_logits import TableLogits, _below
from sepc_torch.sklearn.tables import fit_classifier, frozen_boosting

Rng = np.random.Generator
CASES = [("boosting", 2), ("boosting", 4), ("forest", 3), ("logistic", 2), ("logistic", 3)]


def encoded(rng: Rng, rows: int, classes: int) -> tuple[TableEncoding, np.ndarray, np.ndarray]:
    """An encoding, its rows and their labels; of the last rows some have new categories, gaps or no encoding."""
    columns, labels = table(rng, rows, classes)
    encoding = TableEncoding.fit(some(columns, slice(rows // 2)), ["x", "y"], ["kind", "side"])
    columns["kind"][-40:-20] = "never seen"
    columns["x"][-30:-10] = np.nan
    columns["x"][-5:] = np.inf
    return encoding, encoding.encode(columns).points, labels


def in_torch(module: TableLogits, features: np.ndarray) -> np.ndarray:
    with StandardOperators(), torch.no_grad():
        return module(torch.from_numpy(np.asarray(features, dtype=np.float32))).numpy()


@pytest.mark.parametrize(("kind", "classes"), CASES)
def test_logits_are_those_of_the_classifier(rng: Rng, kind: str, classes: int) -> None:
    encoding, features, labels = encoded(rng, 800, classes)
    classifier = fit_classifier(kind, features[:400], labels[:400], encoding)
    expected, module = classifier.logits(features, encoding), TableLogits(classifier, encoding)
    found = in_torch(module, features)
    assert np.isnan(expected).sum() == 5 * classes
    near = 0.0 if kind == "boosting" else 1e-12
    np.testing.assert_allclose(found, expected, rtol=near, atol=near)
    one = np.concatenate([in_torch(module, features[i : i + 1]) for i in range(0, 800, 40)])
    np.testing.assert_allclose(one, found[::40], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("table_of", ["both", "categories", "numbers"])
def test_trees_of_any_order_and_depth_are_added_as_they_stand(rng: Rng, table_of: str) -> None:
    """Outputs in any order and number, trees of one leaf, and tables without numbers or without categories."""
    encoding, features, labels = encoded(rng, 600, 3)
    if table_of == "categories":
        encoding, features = TableEncoding((), encoding.categories), features[:, 3:]
    if table_of == "numbers":
        encoding, features = TableEncoding(encoding.numbers, ()), features[:, :3]
    native = encoding.columns_of(np.asarray(features, dtype=np.float32))
    kinds = np.arange(native.shape[1]) < len(encoding.categories)
    boosting = HistGradientBoostingClassifier(max_iter=9, max_depth=4, min_samples_leaf=2, categorical_features=kinds)
    boosting.set_params(random_state=0, max_leaf_nodes=int(rng.integers(2, 9)))
    trees = frozen_boosting(boosting.fit(native[:300], labels[:300]))
    order = rng.permutation(27)[:20]
    leaf = np.flatnonzero(trees.column < 0)[:1].astype(np.int32)
    root, output = trees.root[order], trees.output[order]
    mixed = replace(trees, root=np.append(root, leaf), output=np.append(output, np.int32(1)))
    mixed.check(native.shape[1])
    module = TableLogits(mixed, encoding)
    np.testing.assert_array_equal(in_torch(module, features), mixed.logits(features, encoding))
    assert all(buffer.numel() for buffer in module.buffers())  # torch.export.save writes no empty tensor of NumPy's


def test_a_threshold_in_float32_parts_the_same_values(rng: Rng) -> None:
    values = np.concatenate([rng.normal(size=200), 10.0 ** rng.uniform(-50, 38, 200), [0.0, np.inf]])
    values = np.concatenate([values, -values]).astype(np.float32)[:, None]
    wide = values.astype(np.float64)
    ends = np.array([-np.inf, np.inf])
    between = (wide + np.nextafter(values, ends.astype(np.float32))) / 2
    thresholds = np.concatenate([wide, np.nextafter(wide, ends), between], axis=1)
    for threshold in thresholds.T:
        for other in (values[:, 0], rng.permutation(values[:, 0])):
            np.testing.assert_array_equal(other <= _below(threshold), other.astype(np.float64) <= threshold)


def head_of_table(rng: Rng, kind: str) -> TrustHead:
    encoding, features, labels = encoded(rng, 300, 2)
    good = slice(250)
    if kind == "own":
        classifier: Any = OwnEstimator(KNeighborsClassifier().fit(features[good], labels[good]))
    else:
        classifier = fit_classifier(kind, features[good], labels[good], encoding)
    return TrustHead.fit(
        features[good], labels[good], dim=2, max_per_class=30, encoding=encoding, classifier=classifier
    )


def test_the_classifier_is_a_part_of_the_graph_unless_logits_is_given(rng: Rng) -> None:
    head = head_of_table(rng, "logistic")
    whole, alone = _graph(head, None), _graph(head, True)
    assert (whole.inputs, whole.outputs) == (["z"], TRUSTED)
    assert alone.inputs == ["z", "logits"]
    assert "network_label" in alone.outputs
    assert _graph(head, False).inputs == ["z"]
    assert "nearest" in _graph(head, False).outputs


def test_an_own_estimator_has_no_graph(rng: Rng, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    head = head_of_table(rng, "own")
    for write in (export, to_onnx):
        with pytest.raises(ValueError, match=r"there is no graph\. Export the head alone, with logits=True"):
            write(head, tmp_path / "head")
    assert list(tmp_path.iterdir()) == []
    assert _graph(head, True).inputs == ["z", "logits"]


# Fits and exports on the command line, and compares in a process without shape checks, which cannot be traced.
SCRIPT = """
    import json, sys
    sys.path.insert(0, {tests!r})
    import numpy as np, onnxruntime, pandas as pd, torch
    from test_cli_models import table
    from sepc_torch import TrustHead, export
    from sepc_torch.cli import app
    from sepc_torch.head.reasons import refusal_reason
    folder, rng = sys.argv[1], np.random.default_rng(0)
    def frame(rows):
        columns, labels = table(rng, rows, {classes})
        return pd.DataFrame(columns).assign(answer=np.array(["a", "b", "c", "d"])[labels])
    frame(2000).to_csv(folder + "/train.csv", index=False)
    fit = ["fit", folder + "/train.csv", "--label", "answer", "--model", {kind!r}, "--flag-rate", "0.3"]
    for command in (fit + ["-o", folder + "/model"], ["export", folder + "/model", "-o", folder + "/model.onnx"]):
        app(command, standalone_mode=False)
    head = TrustHead.load(folder + "/model.safetensors")
    new = frame(10_000).drop(columns="answer").astype(dict(x=object))
    new.loc[:200, "kind"] = "never seen"
    new.loc[100:300, "side"] = None
    new.loc[200:400, "x"] = None
    new.loc[500:509, "x"] = "no number"
    encoded = head.encode(new)
    encoded[510:520, -1] = np.nan
    expected = head.judge(encoded)
    z, reason = np.array(encoded), refusal_reason(expected, head.promise).numpy()
    assert np.isnan(z).any(axis=1).sum() == 20 and 2000 < expected.accept.sum() < 9500 and len(np.unique(reason)) > 3
    logits = head.classifier.logits(z, head.encoding)

    def compare(found):
        assert list(found) == ["label", "accept", "confidence", "joint", "p_value", "reason", "logits"]
        np.testing.assert_array_equal(found["label"], expected.network_label)
        np.testing.assert_array_equal(found["accept"], expected.accept)
        np.testing.assert_array_equal(found["reason"], reason)
        np.testing.assert_array_equal(found["p_value"], expected.p_value)
        np.testing.assert_allclose(found["joint"], expected.joint, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found["confidence"], expected.confidence, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found["logits"], logits.astype(np.float32), rtol=1e-6)

    session = onnxruntime.InferenceSession(folder + "/model.onnx", providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    parts = [session.run(None, dict(z=z[start : start + 4096])) for start in range(0, len(z), 4096)]
    compare(dict(zip(names, map(np.concatenate, zip(*parts)))))
    for row in (0, 250, 350, 505, 515, 9_999):
        one = dict(zip(names, session.run(None, dict(z=z[row : row + 1]))))
        for name, want in (("label", expected.network_label), ("accept", expected.accept), ("reason", reason)):
            assert one[name].shape == (1,) and one[name][0] == want[row], (row, name)
    facts = {{name: json.loads(value) for name, value in session.get_modelmeta().custom_metadata_map.items()}}
    assert facts["encoding"] == head.encoding.to_dict() and len(facts["feature_names"]) == z.shape[1]
    assert facts["classes"] == head.classes
    if {portable}:
        export(head, folder + "/model.pt2")
        found = torch.export.load(folder + "/model.pt2").module()(torch.from_numpy(z))
        compare({{name: values.numpy() for name, values in found.items()}})
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "classes"), [case for case in CASES if case != ("logistic", 2)])
def test_a_file_of_a_table_decides_as_the_library(
    tmp_path: Path, kind: str, classes: int, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    ort = pytest.importorskip("onnxruntime", reason="needs ONNX Runtime")
    portable = kind == "forest"  # a .pt2 file of one kind
    script = SCRIPT.format(tests=str(Path(__file__).parent), kind=kind, classes=classes, portable=portable)
    run_python(script, tmp_path)
    ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert "node_" not in capfd.readouterr().err  # no warning about a node
