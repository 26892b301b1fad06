"""Adapters to other libraries, tested with these libraries: pytorch-ood, scikit-activeml, Label Studio's format."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peer_libraries import peer

from sepc_torch import TrustHead
from sepc_torch.serving.label_studio import pre_annotations
from sepc_torch.serving.ood_detector import TrustHeadDetector
from sepc_torch.training import read_answers, write_questions
from sepc_torch.training.trust_table import TrustTable


@pytest.fixture(scope="module")
def points() -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    y = np.arange(240) % 3
    return torch.from_numpy(rng.normal(size=(240, 4)) + 5.0 * np.eye(3, 4)[y]).float(), torch.from_numpy(y)


def test_a_detector_has_the_interface_of_pytorch_ood(points: tuple[torch.Tensor, torch.Tensor]) -> None:
    api = peer("pytorch_ood.api")
    for name in ("fit", "fit_features", "predict", "predict_features", "to"):
        ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (TrustHeadDetector, api.FeaturesDetector))
        assert list(ours.parameters) == list(theirs.parameters), name
    api.FeaturesDetector.register(TrustHeadDetector)
    x, y = points
    double = torch.nn.Linear(4, 4, bias=False)
    double.weight.data.copy_(2.0 * torch.eye(4))
    detector = TrustHeadDetector(double, dim=3)
    assert isinstance(detector, api.Detector)
    assert detector.requires_fit
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64)
    far = torch.randn(100, 4, generator=torch.Generator().manual_seed(0)) - 20.0
    by_inputs = detector.fit(loader).predict(torch.cat([x, far]))
    assert by_inputs[len(x) :].median() > by_inputs[: len(x)].median()
    unknown = torch.cat([y, torch.full((100,), -1)])  # outliers of pytorch-ood
    by_features = TrustHeadDetector(dim=3).fit_features(torch.cat([2.0 * x, far]), unknown)
    torch.testing.assert_close(by_features.to("cpu").predict_features(2.0 * x), detector(x))
    torch.testing.assert_close(by_features.predict(2.0 * x), by_features.predict_features(2.0 * x))  # no encoder


def test_a_query_strategy_runs_in_scikit_activeml(points: tuple[torch.Tensor, torch.Tensor]) -> None:
    pytest.importorskip("skactiveml", reason="needs scikit-activeml")
    from sklearn.base import clone

    from sepc_torch.serving.active_query import TrustQuery

    x, true = points[0].numpy(), points[1].numpy()
    y = np.where(np.arange(240) < 120, true.astype(float), np.nan)
    strategy = clone(TrustQuery(fit_options={"dim": 3}))
    index, utilities = strategy.query(x, y, batch_size=5, return_utilities=True)
    assert len(set(index)) == 5
    assert (index >= 120).all()
    assert utilities.shape == (5, 240)
    assert np.isnan(utilities[:, :120]).all()
    assert np.isnan(utilities[4, index[:4]]).all()
    np.testing.assert_array_equal(strategy.query(x, y, batch_size=5), index)
    assert set(strategy.query(x, y, candidates=[130, 131, 132], batch_size=2)) <= {130, 131, 132}
    among = strategy.query(x, y, candidates=x[200:220], batch_size=2)
    assert (among < 20).all()


def test_pre_annotations_fit_the_tasks_of_write_questions(
    points: tuple[torch.Tensor, torch.Tensor], tmp_path: Path
) -> None:
    x, y = points[0].numpy(), np.array(["ant", "bee", "cat"])[points[1]]
    head = TrustHead.fit(x, y, dim=3, nan_policy="flag")
    ids = [5, 17, 100]
    out = head.judge(x[ids])
    write_questions(tmp_path / "tasks.json", TrustTable.of(ids, {"trust": out.trust, "label": out.label}, head.classes))
    tasks = json.loads((tmp_path / "tasks.json").read_text())
    found = pre_annotations(tasks, head, x)
    by_id = {task["data"]["id"]: task["predictions"][0]["result"] for task in tasks}
    assert [prediction["result"] for prediction in found] == [by_id[task["data"]["id"]] for task in tasks]
    json.dumps(found, allow_nan=False)
    # An annotator who confirms every prediction gives the labels back.
    answered = [{**task, "annotations": [new]} for task, new in zip(tasks, found, strict=True)]
    (tmp_path / "answers.json").write_text(json.dumps(answered))
    answers = read_answers(tmp_path / "answers.json", classes=head.classes)
    assert {name: head.classes[code] for name, code in answers.items()} == {name: y[name] for name in ids}
    head.calibrate(x + 0.1, y)
    assert pre_annotations(tasks, head, x)[0]["score"] == pytest.approx(
        head.judge(x[[tasks[0]["data"]["id"]]]).joint.item(), abs=1e-5
    )
    x = np.vstack([x, np.full((1, 4), np.nan)])
    assert pre_annotations([{"data": {"id": 240}}], head, x)[0]["result"] == []
    with pytest.raises(ValueError, match=r"data.id 241; expected .* 0 to 240"):
        pre_annotations([{"data": {"id": 241}}], head, x)
