"""Models of tables with a usual classifier: its labels everywhere, files without pickles, columns, formats, notes."""

from __future__ import annotations

import gzip
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from test_cli_head import fail, people, run, succeed

from sepc_torch import DriftMonitor, FileFormatError, TrustHead, write_report
from sepc_torch.cli import columns as table_columns
from sepc_torch.data import files
from sepc_torch.data.table_classifier import Trees, leading
from sepc_torch.data.table_encoding import TableEncoding, plain_number, row_hashes
from sepc_torch.serving.mlflow import PyfuncHead, input_example
from sepc_torch.serving.scorer import Scorer
from sepc_torch.sklearn.tables import fit_classifier, frozen_boosting, frozen_forest, right_shares

Rng = np.random.Generator


def table(rng: Rng, rows: int, classes: int = 2) -> tuple[dict[str, Any], np.ndarray]:
    """Numbers with gaps, many categories with rare ones, and labels that need both."""
    kinds = [*"abcdefghijklmnop", "rare 1", "rare 2"]
    columns: dict[str, Any] = {
        "x": rng.normal(size=rows),
        "y": rng.normal(size=rows) * 1e4,
        "kind": rng.choice(kinds, rows, p=[0.0615] * 16 + [0.008] * 2),
        "side": rng.choice(["left", "right"], rows),
    }
    score = (
        columns["x"] + 2.0 * np.isin(columns["kind"], list("abc")) + columns["y"] / 1e4 * (columns["side"] == "left")
    )
    score = score + 0.5 * rng.normal(size=rows)
    columns["y"][rng.random(rows) < 0.2] = np.nan
    return columns, np.digitize(score, np.quantile(score, np.arange(1, classes) / classes))


def some(columns: dict[str, Any], rows: slice) -> dict[str, Any]:
    return {name: column[rows] for name, column in columns.items()}


@pytest.mark.parametrize("classes", [2, 4])
def test_frozen_trees_equal_those_of_scikit_learn_to_the_last_bit(rng: Rng, classes: int) -> None:
    columns, labels = table(rng, 900, classes)
    encoding = TableEncoding.fit(some(columns, slice(600)), ["x", "y"], ["kind", "side"])
    columns["kind"][610:620] = "never seen"
    columns["x"][620:640] = np.nan
    features = np.asarray(encoding.encode(columns).points, dtype=np.float32).astype(np.float64)
    native = encoding.columns_of(features)
    boosting = HistGradientBoostingClassifier(max_iter=12, categorical_features=[True, True, False, False])
    boosting.fit(native[:600], labels[:600])
    forest = RandomForestClassifier(12, min_samples_leaf=int(rng.integers(1, 6)), random_state=0)
    forest.fit(features[:600], labels[:600])
    for frozen, scores, predicted in (
        (frozen_boosting(boosting), boosting._raw_predict(native), boosting.predict(native)),
        (frozen_forest(forest), forest.predict_proba(features), forest.predict(features)),
    ):
        assert frozen.scores(features, encoding).tobytes() == scores.astype(float, order="C").tobytes()
        parts = [frozen.scores(features[i : i + 9], encoding) for i in range(0, 900, 9)]  # few rows take another path
        np.testing.assert_array_equal(np.concatenate(parts), scores)
        assert frozen.logits(features, encoding).astype(np.float32).argmax(axis=1).tolist() == predicted.tolist()


def test_a_linear_classifier_and_ties(rng: Rng) -> None:
    columns, labels = table(rng, 300, 3)
    encoding = TableEncoding.fit(columns, ["x", "y"], ["kind"])
    features = encoding.encode(columns).points
    x = np.asarray(features, dtype=np.float32).astype(np.float64)
    frozen, fitted = fit_classifier("logistic", features, labels, encoding), LogisticRegression(max_iter=1000)
    fitted.fit(x, labels)
    np.testing.assert_array_equal(frozen.scores(x, encoding), fitted.decision_function(x))
    scores = rng.integers(0, 3, (50, 4)).astype(float)  # with ties
    label = np.array([rng.choice(np.flatnonzero(row == row.max())) for row in scores])
    assert leading(scores, label).astype(np.float32).argmax(axis=1).tolist() == label.tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training rows, new rows, and a model of each kind."""
    path = tmp_path_factory.mktemp("models")
    people(0, 400).to_csv(path / "train.csv", index=False)
    people(1, 100).to_csv(path / "new.csv", index=False)
    for kind in ("boosting", "forest", "logistic"):
        fit = ("fit", path / "train.csv", "-l", "answer", "--id", "name", "--model", kind, "-o", path / kind)
        (path / f"{kind}.txt").write_text(succeed(*fit))
    return path


@pytest.mark.parametrize("kind", ["boosting", "forest", "logistic"])
def test_every_way_in_gives_the_labels_of_the_classifier(folder: Path, tmp_path: Path, kind: str) -> None:
    """The labels are at least as right as the head's own, and file, head, scorer and MLflow agree."""
    frame, head = people(1, 100), TrustHead.load(folder / f"{kind}.safetensors")
    assert head.classifier is not None
    assert head.classifier.kind == kind
    out = head.judge(frame)
    labels = np.array(head.classes)[out.network_label]
    assert (labels == frame["answer"]).mean() > 0.85
    np.testing.assert_array_equal(head.predict(frame), labels)
    for found in (head.judge(head.encode(frame)), head.judge(*head.with_logits(frame))):
        np.testing.assert_array_equal(found.joint, out.joint)
        np.testing.assert_array_equal(found.accept, out.accept)
    succeed("score", folder / kind, folder / "new.csv", "-o", tmp_path / "s.csv")
    scored = pd.read_csv(tmp_path / "s.csv")
    assert scored["label"].tolist() == labels.tolist()
    assert scored["accept"].tolist() == out.accept.tolist()
    scorer = pickle.loads(pickle.dumps(Scorer(folder / f"{kind}.safetensors", "cpu", 33, keep=["name"])))
    columns = scorer(frame)
    assert columns["network_label"].tolist() == labels.tolist()
    np.testing.assert_allclose(columns["joint"], out.joint, rtol=1e-5)
    assert PyfuncHead(folder / f"{kind}.safetensors").predict(frame)["prediction"].tolist() == labels.tolist()
    assert set(input_example(head)) == {"age", "city", "income"}


def test_all_uses_of_a_head_take_the_logits_of_its_classifier(folder: Path, tmp_path: Path) -> None:
    frame, head = people(2, 100), TrustHead.load(folder / "boosting.safetensors")
    z, logits = head.with_logits(frame)
    np.testing.assert_array_equal(head.predict_proba(frame), head.predict_proba(z, logits))
    np.testing.assert_array_equal(head.sets(frame).sets, head.sets(z, logits).sets)
    np.testing.assert_array_equal(head.novelties(frame).p_value, head.novelties(z, logits).p_value)
    assert DriftMonitor(head).update(frame).seen == 100
    explained = head.explain(frame[:3])
    assert isinstance(explained, list)
    assert [item.source for item in explained] == ["classifier"] * 3
    write_report(head, frame, frame["answer"], path=tmp_path / "r.html")
    other = TrustHead.load(folder / "boosting.safetensors").calibrate(frame, frame["answer"])
    assert other.takes_logits
    assert "leave out --logits" in fail(
        "score", folder / "boosting", folder / "new.csv", "-o", tmp_path / "s.csv", "--logits", "age"
    )


class TestDefaultModel:
    """Without --model, the better of boosting and logistic regression on folds of the rows that fit."""

    def of(self, frame: pd.DataFrame, tmp_path: Path) -> dict[str, Any]:
        frame.to_csv(tmp_path / "d.csv", index=False)
        found: dict[str, Any] = json.loads(
            succeed("fit", tmp_path / "d.csv", "-l", "answer", "-o", tmp_path / "m", "--json")
        )
        kind = max(found["compared"], key=found["compared"].get)
        assert found["classifier"] == kind
        classifier = TrustHead.load(tmp_path / "m.safetensors").classifier
        assert classifier is not None
        assert classifier.kind == kind
        return found

    def test_many_classes_of_embeddings(self, rng: Rng, tmp_path: Path) -> None:
        codes = np.arange(360) % 30
        x = rng.normal(size=(30, 24))[codes] + 0.6 * rng.normal(size=(360, 24))
        found = self.of(pd.DataFrame(x).assign(answer=[f"class {code}" for code in codes]), tmp_path)
        assert found["classifier"] == "logistic"
        assert found["compared"]["logistic"] > 0.9
        assert abs(found["accuracy"] - found["compared"]["logistic"]) < 0.1

    def test_labels_that_no_line_separates(self, rng: Rng, tmp_path: Path) -> None:
        x = rng.normal(size=(400, 2))
        found = self.of(pd.DataFrame(x).assign(answer=np.where(x.prod(axis=1) > 0, "same", "other")), tmp_path)
        assert found["classifier"] == "boosting"
        assert found["compared"]["boosting"] > 0.8 > found["compared"]["logistic"]

    def test_rows_that_belong_together_are_in_one_fold(self, rng: Rng) -> None:
        """Copies with labels by chance: memory helps only where a copy is in another fold."""
        copies = np.repeat(np.arange(80), 12)
        x = {"x": rng.normal(size=80)[copies]}
        encoding = TableEncoding.fit(x, ["x"], [])
        given = encoding.encode(x).points, rng.integers(0, 2, 80)[copies], encoding
        apart, together = (right_shares(["forest"], *given, groups)["forest"] for groups in (None, copies))
        assert apart > 0.9
        assert together < 0.75

    def test_classes_of_few_rows(self, rng: Rng) -> None:
        """A class may be missing in a fold, and nothing can be compared if a fold has one class."""
        x = {"x": rng.normal(size=60)}
        encoding = TableEncoding.fit(x, ["x"], [])
        labels = np.where(np.arange(60) == 0, "rare", "usual")
        shares = right_shares(["boosting", "logistic"], encoding.encode(x).points, labels, encoding)
        assert shares["logistic"] == 1.0  # the fold whose other rows have one class is left out
        labels = np.arange(60).astype(str)  # every row is a class
        assert right_shares(["logistic"], encoding.encode(x).points, labels, encoding) == {"logistic": 0.0}


def test_the_ellipsoids_alone_are_a_choice(folder: Path, tmp_path: Path) -> None:
    printed = succeed(
        "fit", folder / "train.csv", "-l", "answer", "--id", "name", "--model", "sepc", "-o", tmp_path / "m"
    )
    assert "Labels: those of the ellipsoids" in printed
    head = TrustHead.load(tmp_path / "m.safetensors")
    assert head.classifier is None
    assert not head.takes_logits
    assert "Labels: those of gradient boosting" in (folder / "boosting.txt").read_text()


@pytest.fixture(scope="module")
def own(folder: Path) -> Path:
    """A model with an estimator of its user, whose module lies beside."""
    pytest.importorskip("skops")
    (folder / "mymodels.py").write_text(
        "from sklearn.naive_bayes import GaussianNB\nchosen = GaussianNB(var_smoothing=1e-6)\n"
    )
    arguments = ("fit", folder / "train.csv", "-l", "answer", "--id", "name", "--model", "mymodels:chosen")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        succeed(*arguments, "-o", folder / "own")
    return folder


class TestOwnEstimator:
    def test_it_is_loaded_only_if_trusted(self, own: Path, tmp_path: Path) -> None:
        score = ("score", own / "own", own / "new.csv", "-o", tmp_path / "s.csv")
        assert "load it with --trust on the command line" in fail(*score)
        assert not (tmp_path / "s.csv").exists()
        succeed(*score, "--trust")
        head = TrustHead.load(own / "own.safetensors", trust=True)
        frame = people(1, 100)
        assert pd.read_csv(tmp_path / "s.csv")["label"].tolist() == head.predict(frame).tolist()
        found = Scorer(own / "own.safetensors", "cpu", trust=True)(frame)
        assert found["network_label"].tolist() == head.predict(frame).tolist()
        with pytest.raises(PermissionError, match="can run code"):
            Scorer(own / "own.safetensors", "cpu")(frame)
        exported = ("export", own / "own", "-o", tmp_path / "own.pt2", "--trust")
        assert "Export the head alone, with logits=True or --logits" in fail(*exported)
        # The estimator sees the encoded numbers, and gives the labels that it gives by itself.
        assert head.classifier is not None
        features = np.asarray(head.encode(frame), dtype=np.float64)
        assert head.classifier.estimator.predict(features).tolist() == head.predict(frame).tolist()  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            ("tree", "There is no model 'tree': pass boosting"),
            ("nowhere:x", "'nowhere:x' cannot be imported"),
            ("json:absent", "'json:absent' cannot be imported"),
            ("collections:OrderedDict", "without fit and predict"),
            ("sklearn.linear_model:LinearRegression", "is a regressor, which predicts numbers and no labels"),
        ],
    )
    def test_what_is_no_estimator(self, folder: Path, tmp_path: Path, model: str, message: str) -> None:
        fit = ("fit", folder / "train.csv", "-l", "answer", "--drop", "name", "-o", tmp_path / "m", "--model", model)
        assert message in fail(*fit)

    def test_without_skops(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "skops.io", None)
        fit = ("fit", folder / "train.csv", "-l", "answer", "--drop", "name", "-o", tmp_path / "m")
        result = run(*fit, "--model", "sklearn.naive_bayes:GaussianNB")
        assert result.exit_code == 2
        assert "is written and read with skops: pip install skops" in result.stderr


def test_damaged_trees_are_refused(folder: Path, tmp_path: Path) -> None:
    """Cycles, unknown columns and classifiers of other classes never reach the evaluation."""
    arrays, options = files.read(folder / "boosting.safetensors", "trust_head")

    def refused(name: str, change: Any) -> None:
        array = arrays[f"classifier.{name}"].copy()
        changed = {**arrays, f"classifier.{name}": change(array)}
        files.write(tmp_path / "m.safetensors", "trust_head", changed, options)
        with pytest.raises(FileFormatError):
            TrustHead.load(tmp_path / "m.safetensors")

    inner = int(np.flatnonzero(arrays["classifier.column"] >= 0)[-1])
    refused("left", lambda left: np.where(np.arange(len(left)) == inner, 0, left).astype(np.int32))
    refused("column", lambda column: np.where(column >= 0, 99, column).astype(np.int32))
    refused("output", lambda output: np.full_like(output, 1))
    refused("start", lambda start: np.concatenate([start, start]))
    refused("goes_left", lambda kinds: kinds[:, :1])
    assert set(Trees.NAMES) == {name.removeprefix("classifier.") for name in arrays if name.startswith("classifier.")}


class TestColumns:
    def fit(self, frame: pd.DataFrame, tmp_path: Path, *more: object, **how: Any) -> tuple[dict[str, Any], str]:
        frame.to_csv(tmp_path / "d.csv", index=False, **how)
        result = run("fit", tmp_path / "d.csv", "-l", "answer", "-o", tmp_path / "m", "--json", *more)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout), result.stderr

    def test_ids_leaks_constants_and_codes(self, rng: Rng, tmp_path: Path) -> None:
        frame = people(0, 300).drop(columns="name").assign(ID=rng.permutation(300), const=7, fixed="x", empty="")
        frame["status"] = np.where(frame["answer"] == "yes", "left", "stayed")
        frame["zip"] = rng.integers(1000, 1020, 300)
        found, said = self.fit(frame, tmp_path)
        assert found["suspicious"] == ["ID"]
        assert found["leaks"] == ["status"]
        assert sorted(found["empty"]) == ["const", "empty", "fixed"]
        assert "column 'status' alone decides the label" in said
        with_date = frame.assign(status=np.where(frame["answer"] == "yes", "2024-03-01", "2021-03-01"))
        found, said = self.fit(with_date, tmp_path)  # the parts of a date are no columns of the file
        assert found["leaks"] == ["status"]
        assert "leave it out: --drop status" in said
        assert "column 'zip' is read as numbers; if they are names, pass --categorical zip" in said
        assert "column 'const' is left out: it holds the single value 7" in said
        found, said = self.fit(frame, tmp_path, "--id", "ID", "--drop", "status")
        assert not found["suspicious"]
        assert not found["leaks"]
        head = TrustHead.load(tmp_path / "m.safetensors")
        assert head.encoding is not None
        assert sorted(head.encoding.columns) == ["age", "city", "income", "zip"]

    def test_equal_rows_stay_on_one_side(self, tmp_path: Path) -> None:
        frame = people(0, 300).drop(columns="name")
        _, said = self.fit(pd.concat([frame, frame[:150]]), tmp_path)
        assert "33.3% of the rows repeat another row" in said
        assert TrustHead.load(tmp_path / "m.safetensors").repeats == 0.0
        _, said = self.fit(pd.concat([frame] * 3), tmp_path)
        assert "66.7% of the rows repeat another row" in said
        assert TrustHead.load(tmp_path / "m.safetensors").repeats == 0.0

    def test_too_few_units_are_named(self, tmp_path: Path) -> None:
        people(0, 300).to_csv(tmp_path / "t.csv", index=False)
        fit = ("fit", tmp_path / "t.csv", "-l", "answer", "--drop", "name", "--units", "city", "-o", tmp_path / "m")
        assert "rows form 3 units, which are too few" in fail(*fit)

    def test_money_decimal_commas_and_dates(self, rng: Rng, tmp_path: Path) -> None:
        frame = people(0, 300).drop(columns="name")
        euros = (frame["age"] * 100).map("{:,.2f}".format)
        frame["price"] = euros.str.translate(str.maketrans(",.", ".,")) + " €"
        frame["pay"] = " $" + euros
        days = pd.Timestamp("2021-05-01") + pd.to_timedelta(rng.integers(0, 700, 300), unit="D")
        frame["day"] = days.strftime("%d.%m.%Y")
        plain, _ = self.fit(frame.drop(columns="age"), tmp_path)
        assert sorted(plain["features"]) == ["city", "day", "income", "pay", "price"]
        assert plain["dates"] == ["day"]
        head = TrustHead.load(tmp_path / "m.safetensors")
        assert head.encoding is not None
        by_name = {column.name: column for column in head.encoding.numbers}
        assert (by_name["price"].decimal, by_name["pay"].decimal) == (",", ".")
        assert by_name["price"].mean == pytest.approx(by_name["pay"].mean)
        assert {f"day ({part})" for part in ("year", "month", "weekday", "age")} <= set(by_name)
        # A DataFrame with dates of pandas and the file with texts are the same table.
        typed = frame.assign(day=days)
        np.testing.assert_array_equal(head.encode(typed), head.encode(frame))
        explained = head.explain(frame[:40])
        assert isinstance(explained, list)
        for item in explained:
            names = [feature.name.partition(" (")[0] for feature in item.features]
            assert len(names) == len(set(names)), "every column once"
            assert np.isfinite([feature.deviations for feature in item.features]).all()

    @pytest.mark.parametrize(
        ("texts", "mark"),
        [
            (["0,123", "0,456", "1,789"], ","),
            (["1272,286", "12,345", "7,125"], ","),
            (["1,234", "12,345", "1,000,123"], "."),
            (["1,234", "10,000", "100,000"], "."),
        ],
    )
    def test_three_digits_after_a_comma(self, texts: list[str], mark: str) -> None:
        assert table_columns._decimal_mark(texts) == mark

    def test_a_given_decimal_mark_decides(self, tmp_path: Path) -> None:
        frame = people(0, 200).drop(columns="name")
        frame["size"] = [f"{i % 50 + 1}.{i % 9}00" for i in range(200)]
        self.fit(frame, tmp_path, "--decimal", ",")
        head = TrustHead.load(tmp_path / "m.safetensors")
        assert head.encoding is not None
        column = next(column for column in head.encoding.numbers if column.name == "size")
        assert column.mean > 1000
        assert "--decimal must be a comma or a point" in fail(
            "fit", tmp_path / "d.csv", "-l", "answer", "-o", tmp_path / "x", "--decimal", "x"
        )

    def test_na_as_a_label(self, tmp_path: Path) -> None:
        frame = people(0, 300).drop(columns="name").replace({"answer": {"yes": "NA", "no": "EU"}})
        frame.to_csv(tmp_path / "d.csv", index=False)
        fit = ("fit", tmp_path / "d.csv", "-l", "answer", "-o", tmp_path / "m")
        result = run(*fit)
        assert result.exit_code == 2
        assert "rows have the label 'NA', which counts as missing; --na-values '' keeps it as a label" in result.stderr
        succeed(*fit, "--na-values", "")
        printed = succeed(
            "score", tmp_path / "m", tmp_path / "d.csv", "-l", "answer", "-o", tmp_path / "s.jsonl", "--json"
        )
        assert {line["label"] for line in json.loads(printed)["labels"]} == {"EU", "NA"}
        assert json.loads(printed)["accuracy"] > 0.9

    def test_measurements_are_no_labels(self, rng: Rng, tmp_path: Path) -> None:
        frame = people(0, 300).drop(columns="name")
        frame["answer"] = rng.normal(size=300).round(6)
        frame.to_csv(tmp_path / "d.csv", index=False)
        fit = ("fit", tmp_path / "d.csv", "-l", "answer", "-o", tmp_path / "m")
        assert "different values in 300 rows" in fail(*fit)
        frame.assign(answer=rng.integers(0, 40, 300) / 3).to_csv(tmp_path / "d.csv", index=False)
        assert "it seems to be a measurement" in fail(*fit)

    def test_a_model_that_knows_nothing_says_so(self, rng: Rng, tmp_path: Path) -> None:
        frame = people(0, 400).drop(columns="name").assign(answer=rng.choice(["a", "b"], 400, p=[0.8, 0.2]))
        found, said = self.fit(frame, tmp_path)
        assert (found["accuracy"] <= found["commonest"]) == ("tell little about the label" in said)
        assert 0.7 < found["commonest"] < 0.9
        _, said = self.fit(people(0, 400), tmp_path, "--id", "name")
        assert "tell little about the label" not in said

    def test_names_are_suggested(self, folder: Path, tmp_path: Path) -> None:
        found = fail("fit", folder / "train.csv", "-l", "Answer ", "-o", tmp_path / "m")
        assert (
            "has no column 'Answer '. Did you mean 'answer'? It has 'name', 'age', 'city', 'income', 'answer'." in found
        )


class TestFiles:
    def test_separators_and_encodings_are_found_and_said(self, folder: Path, tmp_path: Path) -> None:
        frame = people(1, 100).replace({"city": {"Oslo": "Malmö"}})
        frame.to_csv(tmp_path / "utf8.csv", index=False)
        succeed("score", folder / "boosting", tmp_path / "utf8.csv", "-o", tmp_path / "expected.csv", "--id", "city")
        expected = pd.read_csv(tmp_path / "expected.csv")
        for encoding in ("cp1252", "utf-16"):
            frame.to_csv(tmp_path / "d.csv", index=False, sep=";", encoding=encoding)
            result = run("score", folder / "boosting", tmp_path / "d.csv", "-o", tmp_path / "s.csv", "--id", "city")
            assert f"is read as {encoding}; --encoding names another" in result.stderr
            assert "are separated by ';'" in result.stderr
            pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "s.csv"), expected)
        wrong = ("score", folder / "boosting", tmp_path / "d.csv", "-o", tmp_path / "s.csv", "--encoding")
        assert "There is no encoding 'latin-99'" in fail(*wrong, "latin-99")

    @pytest.mark.parametrize("fitted", ["csv", "jsonl", "parquet"])
    def test_equal_rows_have_equal_labels_in_every_format(self, rng: Rng, tmp_path: Path, fitted: str) -> None:
        """Text files hold booleans, codes with gaps and labels such as 1.0 as text; other files have types."""
        active, code = rng.random(600) < 0.5, rng.integers(1, 5, 600).astype(float)
        right = np.where(active == (code > 2), 1.0, 2.5)
        code[rng.random(600) < 0.1] = np.nan
        frame = pd.DataFrame({"x": rng.normal(size=600), "active": active, "code": code, "right": right})
        for part, rows in (("train", frame[:500]), ("new", frame[500:])):
            rows.to_csv(tmp_path / f"{part}.csv", index=False)
            rows.to_json(tmp_path / f"{part}.jsonl", orient="records", lines=True)
            rows.to_parquet(tmp_path / f"{part}.parquet")
        model = tmp_path / "m.safetensors"
        succeed("fit", tmp_path / f"train.{fitted}", "-l", "right", "--categorical", "code", "-o", model)
        found = {}
        for kind in ("csv", "jsonl", "parquet"):
            told = succeed("score", model, tmp_path / f"new.{kind}", "-l", "right", "-o", tmp_path / "s.csv", "--json")
            found[kind] = pd.read_csv(tmp_path / "s.csv"), json.loads(told)["labels"]
        for scored, counted in found.values():
            pd.testing.assert_frame_equal(scored, found[fitted][0])
            assert counted == found[fitted][1]
        scored = found["csv"][0]
        assert (scored["label"] == scored["true_label"]).mean() > 0.8
        assert TrustHead.load(model).judge(frame[500:]).accept.tolist() == scored["accept"].tolist()

    @pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".tsv", ".jsonl", ".parquet"])
    def test_every_format_that_is_written_is_read(self, folder: Path, tmp_path: Path, suffix: str) -> None:
        frame = people(3, 60).assign(city="=Rome")
        frame.to_csv(tmp_path / "d.csv", index=False)
        copied = [part for name in frame for part in ("--id", name)]
        target = tmp_path / f"s{suffix}"
        succeed("score", folder / "boosting", tmp_path / "d.csv", "-l", "answer", *copied, "-o", target)
        again = tmp_path / "again.parquet"
        succeed("score", folder / "boosting", target, "-l", "true_label", "--id", "city", "--id", "name", "-o", again)
        read = pd.read_parquet(again)
        assert read["city"].tolist() == ["=Rome"] * 60
        assert read["name"].tolist() == frame["name"].tolist()
        assert read["true_label"].tolist() == frame["answer"].tolist()
        if suffix == ".csv.gz":
            assert gzip.decompress(target.read_bytes()).startswith(b'"name"')

    def test_standard_input_and_output(self, folder: Path, tmp_path: Path) -> None:
        import subprocess

        succeed("score", folder / "boosting", folder / "new.csv", "-o", tmp_path / "s.csv")
        command = [sys.executable, "-m", "sepc_torch.cli", "score", str(folder / "boosting"), "-", "-o", "-"]
        text = (folder / "new.csv").read_bytes()
        done = subprocess.run(command, input=text, capture_output=True, check=True)
        assert done.stdout == (tmp_path / "s.csv").read_bytes()
        assert b"decision" in done.stderr

    def test_swapped_files(self, folder: Path, tmp_path: Path) -> None:
        model, data = folder / "boosting.safetensors", folder / "new.csv"
        for command in (["score", data, model, "-o", tmp_path / "s.csv"], ["explain", data, model, "--row", "0"]):
            assert "is a file of rows and no model: the model comes first, then the rows" in fail(*command)
        assert "is a model and no file of rows" in fail("fit", model, "-l", "y", "-o", tmp_path / "m")


class TestScore:
    def test_new_categories_and_counts_by_label(self, folder: Path, tmp_path: Path) -> None:
        frame = people(5, 200)
        frame.loc[:19, "city"] = "Lima"
        frame.loc[20:22, "city"] = "Quito"
        frame.to_csv(tmp_path / "d.csv", index=False)
        score = ("score", folder / "boosting", tmp_path / "d.csv", "-l", "answer", "-o", tmp_path / "s.csv")
        result = run(*score)
        assert (
            "column 'city' has categories that training did not have (rows): 'Lima' (20), 'Quito' (3)" in result.stderr
        )
        found, scored = json.loads(succeed(*score, "--json")), pd.read_csv(tmp_path / "s.csv")
        assert found["new_categories"] == {"city": {"Lima": 20, "Quito": 3}}
        for line in found["labels"]:
            name = line["label"]
            taken, true = scored[scored["label"] == name], scored[scored["true_label"] == name]
            assert (line["rows"], line["accepted"]) == (len(taken), taken["accept"].sum())
            assert (line["truly"], line["truly_accepted"]) == (len(true), true["accept"].sum())
            assert line["right"] == pytest.approx((taken["true_label"] == name)[taken["accept"]].mean())
            assert line["truly_wrong"] == pytest.approx((true["label"] != name)[true["accept"]].mean())

    def test_rows_of_the_training_file_are_known_by_their_hashes(self, folder: Path, tmp_path: Path) -> None:
        score = ("score", folder / "boosting", "-o", tmp_path / "s.csv")
        assert (
            "100% of the rows are rows of the training file" in run(*score[:2], folder / "train.csv", *score[2:]).stderr
        )
        assert "rows of the training file" not in run(*score[:2], folder / "new.csv", *score[2:]).stderr
        head = TrustHead.load(folder / "boosting.safetensors")
        assert head.seen(people(0, 400)[10:30]) == 1.0
        assert head.seen(people(1, 100)) == 0.0
        assert TrustHead.empty().seen([[1.0]]) is None

    def test_a_broken_promise_says_why(self, folder: Path, tmp_path: Path) -> None:
        fit = ("fit", folder / "train.csv", "-l", "answer", "--id", "name", "-o", tmp_path / "m", "--risk", "0.001")
        run(*fit)
        printed = run("score", tmp_path / "m", folder / "new.csv", "-o", tmp_path / "s.csv").stdout
        assert "No promise, nothing is accepted: 100 calibration points" in printed
        assert set(pd.read_csv(tmp_path / "s.csv")["reason"]) <= {"no promise", "no prediction"}

    def test_explanations_speak_of_columns(self, folder: Path) -> None:
        printed = succeed(
            "explain", folder / "boosting", folder / "new.csv", *[p for i in range(30) for p in ("--row", i)]
        )
        assert "inf" not in printed
        assert "city=" not in printed
        assert "of them)" in printed
        assert "classifier's label" in printed


def test_hashes_tell_rows_apart(rng: Rng) -> None:
    rows = rng.integers(0, 3, (500, 6)).astype(float)
    rows[0] = -0.0
    _, expected = np.unique(rows, axis=0, return_inverse=True)
    _, found = np.unique(row_hashes(rows), return_inverse=True)
    assert (
        len(set(zip(expected.tolist(), found.tolist(), strict=True))) == len(set(expected.tolist())) == found.max() + 1
    )


@pytest.mark.parametrize("mark", [".", ","])
def test_written_numbers_are_read_back(rng: Rng, mark: Any) -> None:
    for value in rng.normal(size=50) * 10.0 ** rng.integers(0, 9, 50):
        text = f"{value:,.3f}"
        text = text if mark == "." else text.translate(str.maketrans(",.", ".,"))
        assert float(plain_number(f" {text} €", mark)) == pytest.approx(value, abs=1e-3)


@pytest.mark.slow
def test_twelve_overlapping_classes_take_seconds(rng: Rng, tmp_path: Path) -> None:
    """The labels are better than the commonest class, and the ellipsoids do not cost minutes."""
    import time

    x, weights = rng.normal(size=(20_000, 20)), 0.25 * rng.normal(size=(20, 12))
    y = (x @ weights + rng.gumbel(size=(20_000, 12))).argmax(axis=1)
    pd.DataFrame(x, columns=[f"x{j}" for j in range(20)]).assign(y=y).to_parquet(tmp_path / "d.parquet")
    begun = time.process_time()
    found = json.loads(run("fit", tmp_path / "d.parquet", "-l", "y", "-o", tmp_path / "m", "--json").stdout)
    assert found["accuracy"] > found["commonest"]
    assert time.process_time() - begun < 60.0, "30 s on a free core"
