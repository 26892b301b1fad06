"""Explanations of a head's decisions, identifiers of training examples, empty heads, and judge."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from sepc_torch import FileFormatError, TrustHead
from sepc_torch.data import files, schemas
from sepc_torch.head.explanation import DecisionExplanation
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.reasons import Reason, refusal_reason
from sepc_torch.shapes import Array

NAMES = ["cat", "dog", "owl"]


class Case(NamedTuple):
    """A calibrated head, its training set with ids, and new rows of every reason."""

    head: TrustHead
    train: Array
    labels: Array
    ids: Array
    z: Tensor
    logits: Tensor


@pytest.fixture(scope="module")
def case() -> Case:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 3, size=900)
    centres = 3.0 * np.eye(3, 8)
    z = rng.normal(size=(900, 8)) + centres[codes]
    logits = 2.0 * z[:, :3] + rng.normal(size=(900, 3))
    ids = np.array([f"sample-{i:03d}" for i in range(600)])
    labels = np.array(NAMES)[codes]
    head = TrustHead.fit(z[:600], labels[:600], ids=ids, normalize=None, nan_policy="flag", classes=NAMES)
    head.calibrate(z[600:], labels[600:], logits[600:])
    head.accept_at(flag_rate=0.2)
    clear = np.vstack([centres, centres[:1] + 40.0, centres[:1], (centres[:1] + centres[1:2]) / 2, centres[:1]])
    given = np.array([[9, 0, 0], [0, 9, 0], [0, 0, 9], [9, 0, 0], [0, 9, 0], [3.1, 3, -3], [np.nan, 0, 0]])
    new, answers = torch.from_numpy(clear).float(), torch.from_numpy(given.astype(np.float64)).float()
    return Case(head, z[:600], labels[:600], ids, new, answers)


def explained(case: Case) -> list[DecisionExplanation]:
    found = case.head.explain(case.z, logits=case.logits)
    assert isinstance(found, list)
    return found


def test_explains_the_decision_that_forward_takes(case: Case) -> None:
    out = case.head(case.z, logits=case.logits)
    reasons = refusal_reason(out).tolist()
    for i, found in enumerate(explained(case)):
        assert found.accepted == bool(out.accept[i])
        assert found.reason == Reason(reasons[i]).text
        assert found.joint == pytest.approx(float(out.joint[i]))
        assert found.confidence == pytest.approx(float(out.confidence[i]))
        assert found.threshold is not None
        assert (found.joint >= found.threshold) == found.accepted
        assert found.sentence.startswith("Accepted" if found.accepted else "Refused")
        assert found.source == "network"


def test_reasons_and_sentences(case: Case) -> None:
    found = explained(case)
    assert [item.reason for item in found] == ["accepted"] * 3 + ["novel", "disagrees", "ambiguous", "no prediction"]
    assert found[0].sentence.startswith(
        "Accepted: label 'cat' is right, and the sample of a known kind, with probability"
    )
    assert "is new to the head" in found[3].sentence
    assert "the network says 'dog' and the training examples nearby say 'cat'" in found[4].sentence
    assert "'dog' is the most likely alternative" in found[5].sentence
    assert found[6].label is None
    assert found[6].examples == ()


@pytest.mark.filterwarnings("ignore:The head accepts nothing")
def test_without_a_promise_every_refusal_says_so(case: Case) -> None:
    head = copy.deepcopy(case.head)
    head.accept_at(risk=1e-6)
    found = head.explain(case.z, logits=case.logits)
    assert isinstance(found, list)
    assert [item.reason for item in found] == ["no promise"] * 6 + ["no prediction"]
    assert all("accepts nothing" in item.sentence for item in found[:6])


def test_examples_are_the_nearest_training_examples_by_id(case: Case) -> None:
    for row, found in zip(case.z.double().numpy(), explained(case), strict=True):
        for label, examples in ((found.label, found.examples), (found.runner_up, found.runner_up_examples)):
            own = np.flatnonzero(case.labels == label)
            distance = np.linalg.norm(case.train[own] - row, axis=1)
            nearest = np.argsort(distance)[: len(examples)]
            assert [item.id for item in examples] == case.ids[own[nearest]].tolist()
            np.testing.assert_allclose([item.distance for item in examples], distance[nearest], rtol=1e-5)
            assert {item.label for item in examples} <= {label}


def test_one_row_and_plain_values(case: Case) -> None:
    found = explained(case)
    one = case.head.explain(case.z, 3, logits=case.logits)
    assert str(one) == str(found[3])
    assert str(case.head.explain(case.z[3], logits=case.logits[3])) == str(found[3])
    for item in found:
        parsed = json.loads(json.dumps(item.to_dict()))
        assert parsed["reason"] == item.reason
        assert str(item).splitlines()[0] == item.sentence
        assert "component" not in str(item), "a projected coordinate has no meaning for a reader"


def test_thresholds_by_group_are_explained(case: Case) -> None:
    head = copy.deepcopy(case.head)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some groups can be too thin to promise a risk
        table = head.accept_at(risk=0.2, delta=0.2, by="predicted")
    expected = {label: row.threshold for row in table.groups for label in row.group}
    found = head.explain(case.z[:3], logits=case.logits[:3])
    assert isinstance(found, list)
    assert [item.threshold for item in found] == [expected[item.label] for item in found]


def test_own_labels_without_logits(case: Case) -> None:
    found = case.head.explain(case.z[:3])
    assert isinstance(found, list)
    for item, name in zip(found, NAMES, strict=True):
        assert item.source == "head"
        assert item.label == item.head_label == name
        assert item.softmax is None


def test_features_are_named_for_tables() -> None:
    rng = np.random.default_rng(1)
    y = np.repeat([0, 1], 100)
    frame = pd.DataFrame({"age": rng.normal(40 + 20 * y, 4), "weight": rng.normal(70, 9, 200), "row": range(200)})
    head = TrustHead.fit(frame, y, ids="row", normalize="standardize")
    assert head.feature_names == ("age", "weight")
    found = head.explain(pd.DataFrame({"weight": [70.0], "age": [140.0]}), 0)
    assert isinstance(found, DecisionExplanation)
    first = found.features[0]
    own = frame["age"][y == found.label]
    assert (first.name, first.value) == ("age", 140.0)
    assert first.mean == pytest.approx(own.mean(), rel=1e-5)
    assert first.deviations == pytest.approx((140.0 - own.mean()) / own.std(ddof=0), rel=1e-4)
    assert "features that differ most" in str(found)
    assert "not calibrated" in found.sentence


def test_constant_features_are_no_reason() -> None:
    rng = np.random.default_rng(1)
    y = np.repeat([0, 1], 100)
    columns = {"age": rng.normal(40 + 20 * y, 4), "weight": rng.normal(70, 9, 200)}
    frame = pd.DataFrame({**columns, "member": 0.1 * (y == 1), "year": 2024.1})
    head = TrustHead.fit(frame, y, normalize="standardize")
    for row in (0, 150):
        found = head.explain(frame.assign(member=0.3, year=2025.0), row)
        assert isinstance(found, DecisionExplanation)
        assert sorted(item.name for item in found.features) == ["age", "weight"]
        assert "inf" not in str(found)


def test_ids_are_saved_and_checked(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "head.safetensors"
    case.head.save(path)
    loaded = TrustHead.load(path)
    assert loaded.reference_ids == case.head.reference_ids
    assert str(loaded.explain(case.z, 4, logits=case.logits)) == str(explained(case)[4])
    arrays, options = files.read(path, "trust_head")
    monkeypatch.setattr(schemas, "check", lambda *_: None)
    files.write(path, "trust_head", arrays, {**options, "reference_ids": [1, 2]})
    monkeypatch.undo()
    with pytest.raises(FileFormatError, match="do not list 600 identifiers"):
        TrustHead.load(path)


def test_ids_default_to_positions_and_may_be_a_column() -> None:
    import pyarrow as pa

    rng = np.random.default_rng(2)
    y = np.repeat([0, 1], 30)
    z = rng.normal(size=(60, 3)) + 4.0 * y[:, None]
    head = TrustHead.fit(z, y)
    assert head.reference_ids == tuple(range(60))
    table = pa.table({**{f"z{j}": z[:, j] for j in range(3)}, "y": y, "name": [f"r{i}" for i in range(60)]})
    head = TrustHead.fit(table, "y", ids="name")
    assert head.reference_ids == tuple(f"r{i}" for i in range(60))
    assert head.in_features == 3


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([1, 2], ValueError, "Got 2 ids for 60 rows"),
        (np.linspace(0, 1, 60), TypeError, "integers or strings"),
        ("name", ValueError, "names no column"),
    ],
)
def test_bad_ids_are_refused(ids: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TrustHead.fit(np.zeros((60, 3)), np.repeat([0, 1], 30), ids=ids)


def test_an_empty_head_loads_the_state_of_another(case: Case) -> None:
    head = TrustHead.empty(in_features=5, classes=["x", "y"])
    head.load_state_dict(case.head.state_dict())
    expected, found = case.head(case.z, logits=case.logits), head(case.z, logits=case.logits)
    for name, column in expected._asdict().items():
        torch.testing.assert_close(getattr(found, name), column, rtol=0, atol=0, equal_nan=True, msg=name)
    assert head.classes == NAMES


def test_judge_takes_any_form_in_chunks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sepc_torch.data.arrays._CHUNK_VALUES", 24)
    expected = case.head(case.z, logits=case.logits)
    for z, logits in (
        (case.z, case.logits),
        (case.z.numpy(), case.logits.numpy()),
        (case.z.tolist(), case.logits.tolist()),
        (pd.DataFrame(case.z.numpy()), pd.DataFrame(case.logits.numpy())),
    ):
        assert_equal(case.head.judge(z, logits), expected)
    assert len(case.head.judge(case.z[:0]).label) == 0
    with pytest.raises(ValueError, match=r"Got 7 rows of embeddings and logits of shape \(2, 3\)"):
        case.head.judge(case.z, case.logits[:2])
    with pytest.raises(ValueError, match=r"Expected embeddings of shape \(B, 8\)"):
        case.head.judge(case.z[0])


def assert_equal(found: HeadPrediction, expected: HeadPrediction) -> None:
    for name, column in expected._asdict().items():
        torch.testing.assert_close(getattr(found, name), column, rtol=1e-5, atol=1e-6, equal_nan=True, msg=name)


def test_a_head_that_accepts_nothing_says_so(case: Case) -> None:
    head = copy.deepcopy(case.head)
    with pytest.warns(UserWarning, match="accepts nothing"):
        head.accept_at(risk=1e-6, delta=1e-6)
    assert head.promise is not None
    assert str(head.promise) == "nothing is accepted: no threshold keeps a risk of 0.0001 %"
    found = head.explain(case.z, 0, logits=case.logits)
    assert isinstance(found, DecisionExplanation)
    assert found.sentence.startswith("Refused, because the head accepts nothing: no threshold keeps the wanted risk")
    head.accept_at(flag_rate=0.1)
    assert head.promise.found


def test_logits_are_passed_by_name(case: Case) -> None:
    with pytest.raises(TypeError):  # the type checks of the tests speak first
        case.head.explain(case.z, case.logits)  # type: ignore[arg-type]
