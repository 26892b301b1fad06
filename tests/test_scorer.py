"""The scorer: one answer for every form of a batch and every batch size, small pickles, one load in a process."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from sepc_torch import HeadPrediction, Scorer, TrustHead
from sepc_torch.serving import scorer as module

CLASSES = np.array(["cat", "dog", "owl"])


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 400)
    z = rng.normal(size=(400, 4)) + 3.0 * rng.normal(size=(3, 4))[y]
    return {"id": np.arange(400), "z": z, "logits": rng.normal(size=(400, 3)) + 3.0 * np.eye(3)[y], "y": CLASSES[y]}


@pytest.fixture(scope="module")
def head(rows: dict[str, Any]) -> TrustHead:
    made = TrustHead.fit(rows["z"], rows["y"], dim=3)
    return made.calibrate(rows["z"] + 0.2, rows["y"], rows["logits"])


@pytest.fixture(scope="module")
def path(head: TrustHead, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("scorer") / "head.safetensors"
    head.save(file)
    return file


def batch(rows: dict[str, Any]) -> dict[str, Any]:
    return {name: rows[name] for name in ("id", "z", "logits")}


def test_columns_are_those_of_the_head(path: Path, head: TrustHead, rows: dict[str, Any]) -> None:
    found = Scorer(path, "cpu", keep=["id"])(batch(rows))
    out = head.judge(rows["z"], rows["logits"])
    assert list(found) == ["id", *HeadPrediction._fields, "reason"]
    np.testing.assert_array_equal(found["network_label"], CLASSES[out.network_label])
    np.testing.assert_array_equal(found["accept"], out.accept)
    np.testing.assert_array_equal(found["accept"], found["reason"] == "accepted")
    np.testing.assert_allclose(found["joint"], out.joint, rtol=1e-5)
    assert set(found["rule"]) <= {"SINGLE", "OVERLAP", "UNION", "OUTSIDE"}


@pytest.mark.parametrize("size", [1, 7, 399, 1000])
def test_batches_of_any_size_give_the_same_decisions(path: Path, rows: dict[str, Any], size: int) -> None:
    few = {name: column[:60] for name, column in batch(rows).items()}
    want, got = Scorer(path, "cpu")(few), Scorer(path, "cpu", batch_size=size)(few)
    for name in ("label", "network_label", "rule", "accept", "reason"):
        np.testing.assert_array_equal(got[name], want[name])
    np.testing.assert_allclose(got["joint"], want["joint"], rtol=1e-4)


def test_every_form_of_a_batch_gives_the_same_columns(path: Path, rows: dict[str, Any]) -> None:
    pd = pytest.importorskip("pandas")
    scorer = Scorer(path, "cpu", keep=["id"])
    want = scorer(batch(rows))
    lists = {"id": rows["id"], "z": list(rows["z"]), "logits": list(rows["logits"])}
    frame = pd.DataFrame(lists, index=rows["id"] + 5)
    scored = scorer(frame)
    assert scored.index.equals(frame.index)
    table = pa.table({name: list(column) for name, column in lists.items()})
    assert isinstance(scorer(table), pa.Table)
    one = scorer(table.combine_chunks().to_batches()[0])
    assert isinstance(one, pa.RecordBatch)
    assert one.schema == scorer(table).schema
    (streamed,) = scorer(iter([frame]))
    for found in (scored, scorer(table).to_pandas(), one.to_pandas(), streamed):
        assert list(found) == list(want)
        for name, column in want.items():
            np.testing.assert_array_equal(found[name].to_numpy(), column)
    alone = scorer.__class__(path, "cpu")
    for array in (rows["z"], torch.from_numpy(rows["z"]), rows["z"].tolist()):
        np.testing.assert_array_equal(alone(array)["label"], want["label"])


def test_empty_batches_have_the_same_columns_and_types(path: Path, rows: dict[str, Any]) -> None:
    pd = pytest.importorskip("pandas")
    scorer = Scorer(path, "cpu", keep=["id"])
    lists = {"id": rows["id"], "z": list(rows["z"]), "logits": list(rows["logits"])}
    frame = pd.DataFrame(lists)
    assert scorer(frame[:0]).dtypes.equals(scorer(frame).dtypes)
    table = pa.table({name: list(column) for name, column in lists.items()})
    assert scorer(table[:0]).schema == scorer(table).schema


def test_features_are_found_by_name_in_any_order(rows: dict[str, Any], tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(rows["z"], columns=list("wxyz"))  # a feature has a name that embeddings have elsewhere
    TrustHead.fit(frame, rows["y"], dim=3).save(tmp_path / "head.safetensors")
    scorer = Scorer(tmp_path / "head.safetensors", "cpu")
    want = scorer(frame)["label"]
    np.testing.assert_array_equal(scorer(frame[list("zyxw")].assign(other="text"))["label"], want)
    np.testing.assert_array_equal(scorer({name: frame[name].to_numpy() for name in "zwxy"})["label"], want)
    with pytest.raises(ValueError, match="columns of features such as 'w'; got the columns"):
        scorer({"a": frame["w"].to_numpy()})


def test_flagged_rows_have_no_label(rows: dict[str, Any], tmp_path: Path) -> None:
    TrustHead.fit(rows["z"], rows["y"], dim=3, nan_policy="flag").save(tmp_path / "head.safetensors")
    scorer = Scorer(tmp_path / "head.safetensors", "cpu")
    bad = np.vstack([rows["z"][:1], np.full((1, 4), np.nan)])
    assert scorer(bad)["label"].tolist()[1] is None
    assert scorer(pa.table({"z": list(bad)}))["label"].null_count == 1
    assert scorer(pa.table({"z": list(bad)})).schema == scorer(pa.table({"z": list(bad[:1])})).schema


def test_a_pickle_holds_the_arguments_only(path: Path, rows: dict[str, Any]) -> None:
    scorer = Scorer(path, "cpu", keep=["id"])
    want = scorer(batch(rows))["label"]
    content = pickle.dumps(scorer)
    assert len(content) < 1000
    np.testing.assert_array_equal(pickle.loads(content)(batch(rows))["label"], want)


def test_a_process_loads_a_head_once(path: Path, rows: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    load = TrustHead.load

    def counted(file: str, device: str) -> TrustHead:
        loaded.append(file)
        return load(file, device)

    monkeypatch.setattr(TrustHead, "load", counted)
    module._load.cache_clear()
    copies = [pickle.loads(pickle.dumps(Scorer(path, "cpu"))) for _ in range(8)]
    threads = [threading.Thread(target=copy, args=(rows["z"][:3],)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loaded == [str(path)]
    path.touch()  # a new file, or one that may be new
    copies[0](rows["z"][:3])
    assert len(loaded) == 2
    module._load.cache_clear()


def test_misuse_is_explained(path: Path, rows: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"pass \['id'\]"):
        Scorer(path, keep="id")
    with pytest.raises(ValueError, match="batch_size"):
        Scorer(path, batch_size=0)
    with pytest.raises(ValueError, match=r"lacks the columns \['id'\]"):
        Scorer(path, keep=["id"])({"z": rows["z"]})
    with pytest.raises(ValueError, match="also names of scores"):
        Scorer(path, keep=["label"])({"z": rows["z"], "label": rows["y"]})
    with pytest.raises(ValueError, match=r"shape \(B, 4\), got \(400, 3\)"):
        Scorer(path)({"z": rows["z"][:, :3]})
    with pytest.raises(ValueError, match="Rename the column"):
        Scorer(path)({"vectors": rows["z"]})
    with pytest.raises(FileNotFoundError):
        Scorer(path.with_name("missing"))(rows["z"])
