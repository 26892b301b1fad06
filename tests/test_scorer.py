"""The scorer: one answer for every form of a batch and every batch size, small pickles, one load in a process."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from sepc_torch import HeadPrediction, Scorer, TrustHead
from sepc_torch.data.table_encoding import TableEncoding
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
    made = TrustHead.fit(rows["z"], rows["y"], dim=3, classes=CLASSES)
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


@pytest.mark.filterwarnings("ignore:The head accepts nothing")
def test_without_a_promise_every_reason_says_so(head: TrustHead, rows: dict[str, Any], tmp_path: Path) -> None:
    other = copy.deepcopy(head)
    other.accept_at(risk=1e-6)
    other.save(tmp_path / "head.safetensors")
    assert set(Scorer(tmp_path / "head.safetensors", "cpu")(batch(rows))["reason"]) == {"no promise"}


@pytest.fixture(scope="module")
def wide(head: TrustHead, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The head in float64, whose p-values do not depend on the batch: rounding errors are far below any rank."""
    file = tmp_path_factory.mktemp("scorer") / "wide.safetensors"
    copy.deepcopy(head).double().save(file)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 7, 15, 16, 17, 31, 64, 100, 255, 399, 400, 1000])
def test_batches_of_any_size_give_the_same_columns(path: Path, wide: Path, rows: dict[str, Any], size: int) -> None:
    few = {name: column[: 20 * size] for name, column in batch(rows).items()}
    decided = ["label", "network_label", "runner_up", "rule", "nearest", "accept", "reason"]
    for file, identical, tolerance in ((path, [], 1e-4), (wide, ["p_value", "class_p_value"], 1e-9)):
        want = Scorer(file, "cpu")(few)
        chunks = [{name: column[i : i + size] for name, column in few.items()} for i in range(0, len(few["z"]), size)]
        parts = list(Scorer(file, "cpu")(iter(chunks)))
        by_caller = {name: np.concatenate([part[name] for part in parts]) for name in want}
        for got in (by_caller, Scorer(file, "cpu", batch_size=size)(few)):
            for name in decided + identical:
                np.testing.assert_array_equal(got[name], want[name], err_msg=name)
            for name in ("trust", "confidence", "nonconformity", "joint"):
                np.testing.assert_allclose(got[name], want[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.fixture(scope="module")
def grouped(rows: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that accepts by given groups; the second group holds mistakes, and nothing of it is accepted."""
    wrong = np.where(np.arange(400) % 2, rows["y"], CLASSES[(rows["logits"].argmax(axis=1) + 1) % 3])
    made = TrustHead.fit(rows["z"], rows["y"], dim=3, classes=CLASSES)
    made.calibrate(rows["z"] + 0.2, wrong, rows["logits"])
    with pytest.warns(UserWarning, match="cannot be promised in 1 of 2 groups"):
        made.accept_at(risk=0.2, delta=0.2, by=1 - np.arange(400) % 2)
    file = tmp_path_factory.mktemp("grouped") / "head.safetensors"
    made.save(file)
    return file


@pytest.mark.slow
def test_groups_decide_in_every_form_and_batch_size(grouped: Path, rows: dict[str, Any]) -> None:
    pd = pytest.importorskip("pandas")
    groups = np.arange(60) % 3  # the third group is unknown to the head
    given = {name: column[:60] for name, column in batch(rows).items()} | {"groups": groups}
    want = TrustHead.load(grouped).judge(given["z"], given["logits"], groups).accept.numpy()
    assert want[groups == 0].any()
    assert not want[groups != 0].any()
    for size in (1, 7, 64, 4096):
        np.testing.assert_array_equal(Scorer(grouped, "cpu", size)(given)["accept"], want)
    lists = {**given, "z": list(given["z"]), "logits": list(given["logits"])}
    np.testing.assert_array_equal(Scorer(grouped, "cpu")(pd.DataFrame(lists))["accept"], want)
    np.testing.assert_array_equal(Scorer(grouped, "cpu")(pa.table(lists))["accept"].to_numpy(), want)


def test_groups_are_asked_for_only_where_they_decide(grouped: Path, path: Path, rows: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="pass groups="):
        Scorer(grouped, "cpu")(batch(rows))
    with pytest.raises(ValueError, match="groups"):
        Scorer(grouped, "cpu")({**batch(rows), "groups": np.zeros(3, dtype=int)})
    # A head that does not accept by groups leaves such a column alone.
    found = Scorer(path, "cpu")({**batch(rows), "groups": np.zeros(400, dtype=int)})["accept"]
    np.testing.assert_array_equal(found, Scorer(path, "cpu")(batch(rows))["accept"])


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
    alone = Scorer(path, "cpu", logits=None)
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


@pytest.mark.slow
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

    def counted(file: str, device: str, *, trust: bool) -> TrustHead:
        loaded.append(file)
        return load(file, device, trust=trust)

    monkeypatch.setattr(TrustHead, "load", counted)
    module._load.cache_clear()
    copies = [pickle.loads(pickle.dumps(Scorer(path, "cpu", logits=None))) for _ in range(8)]
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_child_that_is_forked_during_a_load_can_load(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module._load.cache_clear()
    begun, done = threading.Event(), threading.Event()
    load = TrustHead.load

    def slow(file: str, device: str, *, trust: bool) -> TrustHead:
        begun.set()
        done.wait()
        return load(file, device, trust=trust)

    monkeypatch.setattr(TrustHead, "load", slow)
    thread = threading.Thread(target=lambda: Scorer(path, "cpu").head)
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        # The threads of the parent do not exist here; the lock of the loading one must not either.
        os._exit(0 if module._LOADING.acquire(timeout=0.5) else 1)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    module._load.cache_clear()


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps no time of the last change")
def test_a_file_of_the_same_size_and_time_is_loaded_again(path: Path, tmp_path: Path) -> None:
    shutil.copy2(path, tmp_path / "head.safetensors")
    scorer = Scorer(tmp_path / "head.safetensors", "cpu")
    first = scorer.head
    assert scorer.head is first
    shutil.copy2(path, tmp_path / "head.safetensors")
    assert scorer.head is not first


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The file of a head with an encoding of numbers and categories, and rows of its table."""
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 400)
    table = pd.DataFrame({"age": 40 + 9 * rng.normal(size=400) + 20 * y, "pet": np.array(["cat", "dog"])[y]})
    table["pet"] = table["pet"].where(rng.random(400) < 0.8, "cow")
    encoding = TableEncoding.fit(table[:200], ["age"], ["pet"])
    fitted = TrustHead.fit(encoding.encode(table[:200]).points, y[:200], normalize=None, nan_policy="flag")
    head = TrustHead(fitted.projection, fitted.sepc, fitted.evidence, encoding=encoding)
    file = tmp_path_factory.mktemp("people") / "head.safetensors"
    head.calibrate(table[200:], y[200:]).save(file)
    return file, table[200:].reset_index(drop=True)


def test_the_columns_of_a_table_are_encoded(people: tuple[Path, Any]) -> None:
    path, table = people
    scorer, want = Scorer(path, "cpu", batch_size=64), TrustHead.load(path).judge(table)
    arrow = pa.Table.from_pandas(table)
    by_code = arrow.set_column(1, "pet", arrow["pet"].dictionary_encode())
    arrays = {name: table[name].to_numpy() for name in table}
    for given in (table, table[["pet", "age"]].assign(z=1.0), arrays, arrow, arrow.to_batches()[0], by_code):
        found = scorer(given)
        np.testing.assert_array_equal(np.asarray(found["accept"]), want.accept)
        np.testing.assert_array_equal(np.asarray(found["joint"]), want.joint)
    assert want.accept.any()
    gaps = scorer(table[:2].assign(age=["old", None]))
    assert gaps["label"][0] is None  # text in place of a number
    assert gaps["label"][1] is not None  # a missing number is encoded
    for given in (table["age"].to_numpy()[:, None], table[["age"]]):
        with pytest.raises(ValueError, match=r"lacks the columns \[.*'pet'\]"):
            scorer(given)


@pytest.mark.slow
def test_logits_are_not_forgotten(path: Path, head: TrustHead, rows: dict[str, Any], tmp_path: Path) -> None:
    """A head that was calibrated with logits judges the network's labels, unless its own are asked for."""
    misspelt = {"z": rows["z"], "logit": rows["logits"]}
    with pytest.raises(ValueError, match=r"no column 'logits'; it has the columns .*. Did you mean 'logit'\?"):
        Scorer(path, "cpu")(misspelt)
    with pytest.raises(ValueError, match=r"own labels: Scorer\(..., logits=None\)"):
        Scorer(path, "cpu")(rows["z"])
    want = head.judge(rows["z"], rows["logits"])
    np.testing.assert_array_equal(Scorer(path, "cpu", logits="logit")(misspelt)["accept"], want.accept)
    own = Scorer(path, "cpu", logits=None)
    for given in (misspelt, batch(rows), rows["z"]):
        np.testing.assert_array_equal(own(given)["accept"], head.judge(rows["z"]).accept)
    TrustHead.fit(rows["z"], rows["y"], dim=3).save(tmp_path / "head.safetensors")
    assert len(Scorer(tmp_path / "head.safetensors", "cpu")(rows["z"])["label"]) == 400


def test_half_precision_is_read(path: Path, rows: dict[str, Any]) -> None:
    given = {name: torch.from_numpy(rows[name]).bfloat16() for name in ("z", "logits")}
    wide = {name: column.float().numpy() for name, column in given.items()}
    scorer = Scorer(path, "cpu")
    np.testing.assert_array_equal(scorer(given)["accept"], scorer(wide)["accept"])


@pytest.mark.slow
def test_unusable_cells_are_named(path: Path, rows: dict[str, Any], tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    own = Scorer(path, "cpu", logits=None)
    lists = rows["z"][:3].tolist()
    for given, told in (
        ([*lists[:2], None], "Row 2 of the column 'z' holds None; expected a list of 4"),
        ([None, *lists], "Row 0 of the column 'z' holds None"),
        ([lists[0], lists[1][:3]], "Row 1 of the column 'z' holds 3 values"),
        ([lists[0], [1.0, 2.0, "wide", 4.0]], "Row 1: z: 'wide' is not a finite number"),
    ):
        for form in (lambda z: {"z": z}, lambda z: pd.DataFrame({"z": z})):
            with pytest.raises(ValueError, match=told):
                own(form(given))
    with pytest.raises(ValueError, match=r"one length, got the lengths {'z': 3, 'id': 2}"):
        Scorer(path, "cpu", logits=None, keep=["id"])({"z": lists, "id": [1, 2]})
    with pytest.raises(ValueError, match=r"one length, got the lengths {'z': 3, 'logits': 2}"):
        Scorer(path, "cpu")({"z": lists, "logits": rows["logits"][:2]})
    frame = pd.DataFrame(rows["z"], columns=list("abcd"))
    for policy in ("raise", "flag"):
        TrustHead.fit(frame, rows["y"], dim=3, nan_policy=policy).save(tmp_path / f"{policy}.safetensors")
    wrong = frame[:3].astype(object).assign(a=[1.0, "wide", pd.NA])
    with pytest.raises(ValueError, match="Row 1: a: 'wide' is not a finite number"):
        Scorer(tmp_path / "raise.safetensors", "cpu")(wrong)
    found = Scorer(tmp_path / "flag.safetensors", "cpu")(wrong)["label"]
    assert [label is None for label in found] == [False, True, True]


def test_misuse_is_explained(path: Path, rows: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"pass \['id'\]"):
        Scorer(path, keep="id")
    with pytest.raises(ValueError, match="batch_size"):
        Scorer(path, batch_size=0)
    with pytest.raises(ValueError, match=r"lacks the columns \['id'\]"):
        Scorer(path, keep=["id"])({"z": rows["z"]})
    with pytest.raises(ValueError, match="also names of scores"):
        Scorer(path, keep=["label"], logits=None)({"z": rows["z"], "label": rows["y"]})
    with pytest.raises(ValueError, match=r"shape \(B, 4\), got \(400, 3\)"):
        Scorer(path, logits=None)({"z": rows["z"][:, :3]})
    with pytest.raises(ValueError, match="Rename the column"):
        Scorer(path, logits=None)({"vectors": rows["z"]})
    with pytest.raises(FileNotFoundError):
        Scorer(path.with_name("missing"))(rows["z"])
