"""Calibrated models on the command line: a stranger's script for each command, every format, and bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from sepc_torch import TrustHead
from sepc_torch.cli import app, row_files
from sepc_torch.head.prediction import Promise
from sepc_torch.serving import export
from sepc_torch.serving.export import _description

ROOT = Path(__file__).resolve().parent.parent
SCORES = ["label", "confidence", "joint", "p_value", "accept", "trust", "rule", "reason"]
FEATURES = ["age", "city", "income"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def succeed(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an NPZ file, which is closed."""
    with np.load(path) as file:
        return dict(file)


def fail(*arguments: object) -> str:
    """Run a command that must fail; return its one-line error message."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit)
    (line,) = result.stderr.splitlines()
    return line.removeprefix("sepc: ")


def people(seed: int, rows: int) -> pd.DataFrame:
    """A table with an id, numbers, categories and gaps."""
    rng = np.random.default_rng(seed)
    age, income = rng.normal(50, 10, rows), rng.normal(30, 5, rows)
    city = rng.choice(["Oslo", "Paris", "Rome"], rows)
    answer = np.where(age + 20 * (city == "Rome") + income > 87, "yes", "no")
    income[rng.random(rows) < 0.1] = np.nan
    names = [f"person {i}" for i in range(rows)]
    return pd.DataFrame({"name": names, "age": age, "city": city, "income": income, "answer": answer})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("people")
    people(0, 500).to_csv(path / "train.csv", index=False)
    people(1, 120).to_csv(path / "new.csv", index=False)
    printed = succeed("fit", path / "train.csv", "--label", "answer", "--id", "name", "-o", path / "model")
    (path / "printed.txt").write_text(printed)
    return path


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Embeddings, labels and logits of a network, as NPZ and as CSV, and a model."""
    path, rng = tmp_path_factory.mktemp("network"), np.random.default_rng(0)
    for name, rows in (("train", 400), ("new", 80)):
        y = rng.integers(0, 3, rows)
        z = rng.normal(size=(rows, 4)) + 2.0 * np.eye(4)[y]
        logits = 3.0 * z[:, :3] + rng.normal(size=(rows, 3))
        labels = np.array(["cat", "dog", "eel"])[y]
        np.savez(path / f"{name}.npz", embeddings=z, labels=labels, logits=logits)
        columns = {f"z{j}": z[:, j] for j in range(4)} | {f"logit_{n}": logits[:, j] for n, j in NAMED}
        pd.DataFrame(columns).assign(kind=labels).to_csv(path / f"{name}.csv", index=False)
    succeed("fit", path / "train.npz", "-o", path / "model")
    return path


# The columns of the CSV file are not in the order of the classes.
NAMED = [("eel", 2), ("cat", 0), ("dog", 1)]


class TestFit:
    def test_prints_what_is_used_and_promised(self, folder: Path) -> None:
        printed = (folder / "printed.txt").read_text()
        assert "Rows: 500, of which 375 fit and 125 calibrate" in printed
        assert "Features: age, city (3 categories), income (with gaps)" in printed
        assert "Promise: on average at most 5 % of the points of the calibration distribution are refused." in printed
        assert "calibration rows that set the threshold: " in printed
        head = TrustHead.load(folder / "model.safetensors")
        assert head.classes == ["no", "yes"]
        assert head.encoding is not None
        assert sorted(head.encoding.columns) == FEATURES
        assert head.calibration is not None
        assert head.calibration.done
        assert set(head.reference_ids or ()) <= set(people(0, 500)["name"])

    def test_all_unusable_columns_are_listed_at_once(self, tmp_path: Path) -> None:
        frame = people(0, 200).assign(
            n=range(200),
            when=pd.Timestamp("2020-01-01"),
            empty=np.nan,
            size=["12"] * 190 + ["wide"] * 10,
            note=[f"text {i // 2}" if i < 50 else f"text {i}" for i in range(200)],
        )
        frame.to_parquet(tmp_path / "d.parquet")
        arguments = ["fit", tmp_path / "d.parquet", "--label", "answer", "-o", tmp_path / "m"]
        reported = fail(*arguments)
        assert "has 3 unusable columns" in reported
        for part in (
            "'name' holds a different text in every row, like an id (--id name, which leaves it out and names the rows",
            "10 cells are no finite number, such as 'wide' in row 190 (--missing wide, --categorical size, or --drop",
            "'note' holds 175 different texts in 200 rows (--drop note",
        ):
            assert part in reported
        assert [path.name for path in tmp_path.iterdir()] == ["d.parquet"]
        drop = [item for name in ("name", "note") for item in ("--drop", name)]
        result = run(*arguments, *drop, "--missing", "wide", "--json")
        assert "column 'n' holds a different whole number in every row" in result.stderr
        assert "--id n leaves it out and names the rows by it" in result.stderr
        assert "column 'empty' is left out: it holds no value" in result.stderr
        assert "column 'when' is left out: it holds a single date" in result.stderr
        reported_json = json.loads(result.stdout)
        assert reported_json["suspicious"] == ["n"]
        assert reported_json["empty"] == ["empty", "when"]
        assert reported_json["features"] == ["age", "city", "income", "n", "size"]
        assert reported_json["calibrated"] == 50

    def test_dates_are_pointed_out(self, folder: Path, tmp_path: Path) -> None:
        frame = (
            people(0, 200)
            .drop(columns="name")
            .assign(
                day=[f"2024-01-{1 + i % 9:02}" for i in range(200)],
                seen=[f"{1 + i % 7}.3.24 12:30" for i in range(200)],
            )
        )
        frame.to_csv(tmp_path / "d.csv", index=False)
        found = run("fit", tmp_path / "d.csv", "-l", "answer", "-o", tmp_path / "m", "--json")
        assert json.loads(found.stdout)["dates"] == ["day", "seen"]
        assert "column 'day' is read as dates (year-month-day): the model sees year, month, weekday" in found.stderr
        assert "column 'seen' is read as dates (day-month-year)" in found.stderr
        assert "--drop day" in found.stderr

    def test_points_are_kept_for_updates(self, folder: Path, tmp_path: Path) -> None:
        frame = pd.read_csv(folder / "train.csv")
        arguments = ["fit", folder / "train.csv", "-l", "answer", "--drop", "name", "-o", tmp_path / "m"]
        succeed(*arguments, "--keep-points")
        head = TrustHead.load(tmp_path / "m.safetensors")
        assert head.training_set is not None
        before = len(head.training_set)
        head.update(frame[:10], frame["answer"][:10])
        assert len(head.training_set) == before + 10

    def test_repeated_ids_are_told(self, folder: Path, tmp_path: Path) -> None:
        frame = pd.read_csv(folder / "train.csv")
        frame.assign(name=frame["name"].to_numpy()[np.arange(500) // 2]).to_csv(tmp_path / "d.csv", index=False)
        said = run("fit", tmp_path / "d.csv", "-l", "answer", "--id", "name", "-o", tmp_path / "m").stderr
        assert "250 rows repeat an id of name. Rows with the same id are not independent" in said
        assert "repeat an id" not in (folder / "printed.txt").read_text()

    def test_a_promise_that_needs_more_rows(self, folder: Path, tmp_path: Path) -> None:
        """Of 125 calibration rows 85 set thresholds: a risk of 1 % needs at least 299 of them, four fifths of 374."""
        arguments = ["fit", folder / "train.csv", "-l", "answer", "--id", "name", "-o", tmp_path / "m"]
        found = run(*arguments, "--risk", "0.01")
        said = re.search(
            r"No promise, nothing is accepted: 125 calibration points \(85 of them set thresholds\) cannot promise a "
            r"risk of 0\.01: they can promise a risk of .*; about (\d+) more rows in the file \(a quarter calibrates\)",
            found.stdout,
        )
        assert said is not None, found.output
        assert int(said[1]) >= 4 * (374 - 125)
        assert "accepts nothing" not in found.stderr
        printed = run("score", tmp_path / "m", folder / "new.csv", "-o", tmp_path / "s.csv", "--flag-rate", "0.01")
        assert "about 21 more calibration rows are needed" in printed.stdout
        noted = run("explain", tmp_path / "m", folder / "new.csv", "--row", "0", "--risk", "0.001").stderr
        assert "more calibration rows are needed" in noted

    def test_rows_that_cannot_be_used_are_left_out(self, folder: Path, tmp_path: Path) -> None:
        lines = (folder / "train.csv").read_text().splitlines()
        lines[6] = "one,two"
        lines[9] = lines[9].rpartition(",")[0] + ","
        (tmp_path / "d.csv").write_text("\n".join(lines))
        result = run("fit", tmp_path / "d.csv", "-l", "answer", "--drop", "name", "-o", tmp_path / "m", "--json")
        assert "2 rows are left out: row 5: the row has 2 fields, expected 5, and more" in result.stderr
        assert json.loads(result.stdout)["points"] == 498

    def test_a_sample_of_the_rows(self, folder: Path, tmp_path: Path) -> None:
        arguments = ["fit", folder / "train.csv", "-l", "answer", "--drop", "name", "--max-rows", 200, "--json"]
        result = run(*arguments, "-o", tmp_path / "m")
        assert "used a random sample of the 500 rows" in result.stderr
        assert json.loads(result.stdout)["points"] == 200
        succeed(*arguments, "-o", tmp_path / "same")
        assert (tmp_path / "m.safetensors").read_bytes() == (tmp_path / "same.safetensors").read_bytes()

    def test_whole_numbers_are_labels(self, tmp_path: Path) -> None:
        frame = people(0, 200).assign(answer=lambda f: (f["answer"] == "yes").astype(int))
        frame.to_csv(tmp_path / "d.csv", index=False)
        succeed("fit", tmp_path / "d.csv", "-l", "answer", "--drop", "name", "-o", tmp_path / "m.safetensors")
        assert TrustHead.load(tmp_path / "m.safetensors").classes == [0, 1]


class TestScore:
    def test_agrees_with_the_head(self, folder: Path, tmp_path: Path) -> None:
        output = tmp_path / "s.csv"
        arguments = ["score", folder / "model", folder / "new.csv", "-o", output, "--id", "name", "-l", "answer"]
        printed = succeed(*arguments, "--flag-rate", "0.2")
        scored, frame = pd.read_csv(output), people(1, 120)
        assert list(scored.columns) == ["name", *SCORES, "head_label", "true_label"]
        assert scored["name"].tolist() == frame["name"].tolist()
        assert scored["true_label"].tolist() == frame["answer"].tolist()
        head = TrustHead.load(folder / "model.safetensors")
        head.accept_at(flag_rate=0.2)
        out = head.judge(pd.read_csv(folder / "new.csv"))
        assert scored["label"].tolist() == [head.classes[code] for code in out.network_label.tolist()]
        assert scored["head_label"].tolist() == [head.classes[code] for code in out.label.tolist()]
        assert scored["accept"].tolist() == out.accept.tolist()
        for field in ("confidence", "joint", "p_value", "network_trust"):
            np.testing.assert_allclose(scored[field.removeprefix("network_")], getattr(out, field), rtol=1e-6)
        assert ((scored["reason"] == "accepted") == scored["accept"]).all()
        assert "Promise: on average at most 20 % of the points of the calibration distribution are refused." in printed
        promise = TrustHead.load(folder / "model.safetensors").promise
        assert f"Promise of the model: {promise}. It holds for rows drawn like the calibration rows." in succeed(
            *arguments
        )
        reported = json.loads(succeed(*arguments, "--json"))
        assert reported["promise"]["found"]
        assert reported["accuracy"] == pytest.approx((scored["label"] == scored["true_label"]).mean())
        assert reported["points"] == sum(share["points"] for share in reported["reasons"].values()) == 120

    def test_a_risk(self, folder: Path, tmp_path: Path) -> None:
        arguments = ["score", folder / "model", folder / "new.csv", "-o", tmp_path / "s.csv", "-l", "answer", "--json"]
        reported = json.loads(succeed(*arguments, "--risk", 0.5, "--delta", 0.1))
        promise = reported["promise"]
        assert (promise["found"], promise["risk"], promise["delta"]) == (True, 0.5, 0.1)
        assert reported["accepted_accuracy"] > 0.5
        reported = json.loads(run(*arguments, "--risk", 0.0001).stdout)
        assert (reported["promise"]["found"], reported["accepted"]) == (False, 0)
        assert set(pd.read_csv(tmp_path / "s.csv")["reason"]) == {"no promise"}
        printed = run(*arguments[:-1], "--risk", 0.0001).stdout
        assert "No promise, nothing is accepted: " in printed
        assert reported["promise"]["text"] in printed

    @pytest.mark.slow
    @pytest.mark.parametrize("block", [300, 2**22])
    def test_one_bad_row_is_flagged(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
    ) -> None:
        monkeypatch.setattr(row_files, "BLOCK", block)
        lines = (folder / "new.csv").read_text().splitlines()
        lines[4] += ",more"
        lines[8] = lines[8].replace(lines[8].split(",")[1], "=old")
        lines[-1] = "cut"
        (tmp_path / "d.csv").write_text("\n".join(lines))
        result = run("score", folder / "model", tmp_path / "d.csv", "-o", tmp_path / "s.csv", "-l", "answer")
        assert result.exit_code == 0, result.output
        assert "3 rows have no decision; row 3: the row has 6 fields, expected 5" in result.stderr
        succeed("score", folder / "model", folder / "new.csv", "-o", tmp_path / "whole.csv", "-l", "answer")
        scored, whole = pd.read_csv(tmp_path / "s.csv"), pd.read_csv(tmp_path / "whole.csv")
        bad = scored["label"].isna().to_numpy()
        assert np.flatnonzero(bad).tolist() == [3, 7, 119]
        assert not scored["accept"][bad].any()
        assert scored["reason"][bad].tolist() == [
            "the row has 6 fields, expected 5",
            "age: '=old' is not a finite number",
            "the row has 1 field, expected 5",
        ]
        assert scored["row"].tolist() == list(range(120))
        assert scored["true_label"][7] == whole["true_label"][7]
        for column in ("label", "rule", "reason"):
            assert scored[column][~bad].tolist() == whole[column][~bad].tolist()
        np.testing.assert_allclose(scored["joint"][~bad], whole["joint"][~bad], rtol=1e-4)

    def test_every_format(self, folder: Path, tmp_path: Path) -> None:
        frame = pd.read_csv(folder / "new.csv")
        frame.to_csv(tmp_path / "d.tsv", sep="\t", index=False)
        frame.to_csv(tmp_path / "semi.csv", sep=";", index=False)
        frame.to_csv(tmp_path / "d.csv.gz", index=False)
        frame.to_json(tmp_path / "d.jsonl", orient="records", lines=True, double_precision=15)
        frame[frame.columns[::-1]].to_parquet(tmp_path / "d.parquet")
        succeed("score", folder / "model", folder / "new.csv", "-o", tmp_path / "expected.csv")
        expected = pd.read_csv(tmp_path / "expected.csv")
        for name in ("d.tsv", "semi.csv", "d.csv.gz", "d.jsonl", "d.parquet"):
            sep = ["--sep", ";"] if name == "semi.csv" else []
            succeed("score", folder / "model", tmp_path / name, "-o", tmp_path / "s.parquet", *sep)
            scored = pd.read_parquet(tmp_path / "s.parquet")
            assert list(scored.columns) == ["row", *SCORES, "head_label"]
            assert scored["label"].tolist() == expected["label"].tolist()
            np.testing.assert_allclose(scored["joint"], expected["joint"], rtol=1e-5)

    def test_missing_values_are_named(self, folder: Path, tmp_path: Path) -> None:
        pd.read_csv(folder / "new.csv").assign(age=np.nan).to_csv(tmp_path / "d.csv", index=False)
        result = run("score", folder / "model", tmp_path / "d.csv", "-o", tmp_path / "s.csv")
        assert "training did not have were replaced by the median: age (120 rows)" in result.stderr

    def test_labels_unknown_to_the_model(self, folder: Path, tmp_path: Path) -> None:
        frame = pd.read_csv(folder / "new.csv")
        frame.loc[:9, "answer"] = "maybe"
        frame.to_csv(tmp_path / "d.csv", index=False)
        arguments = ["score", folder / "model", tmp_path / "d.csv", "-o", tmp_path / "s.csv"]
        assert "count as mistakes: 'maybe'" in run(*arguments, "-l", "answer").stderr
        (tmp_path / "s.csv").unlink()
        assert "the model knows none of the labels 'person" in fail(*arguments, "-l", "name")
        assert not (tmp_path / "s.csv").exists()

    def test_formulas_and_control_characters(self, folder: Path, tmp_path: Path) -> None:
        frame = pd.read_csv(folder / "new.csv").rename(columns={"name": "@name"})
        frame["@name"] = "=" + frame["@name"]
        frame.assign(**{"x\x1b[2J": 1}).to_csv(tmp_path / "d.csv", index=False)
        result = run("score", folder / "model", tmp_path / "d.csv", "-o", tmp_path / "s.csv", "--id", "@name")
        assert result.exit_code == 0, result.output
        assert all(character.isprintable() or character == "\n" for character in result.output)
        scored = pd.read_csv(tmp_path / "s.csv")
        assert scored.columns[0] == "'@name"
        assert scored["'@name"].str.startswith("'=person").all()

    def test_types_in_parquet(self, folder: Path, tmp_path: Path) -> None:
        frame = people(2, 300).assign(answer=lambda t: (t["answer"] == "yes").astype(int), key=range(300))
        frame["code"] = [f"{i:03d}" for i in range(300)]
        frame.to_csv(tmp_path / "d.csv", index=False)
        frame.to_parquet(tmp_path / "d.parquet")
        drop = ["--drop", "name", "--drop", "code", "--drop", "key"]
        succeed("fit", tmp_path / "d.csv", "-l", "answer", *drop, "-o", tmp_path / "m")
        for name in ("d.csv", "d.parquet"):
            ids = ["--id", "key", "--id", "code"]
            succeed("score", tmp_path / "m", tmp_path / name, "-l", "answer", *ids, "-o", tmp_path / "s.parquet")
            scored = pd.read_parquet(tmp_path / "s.parquet")
            right = scored["label"].to_numpy() == frame["answer"].to_numpy()
            assert right.any()
            assert (scored["label"] == scored["true_label"]).tolist() == right.tolist()
            assert scored["key"].tolist() == list(range(300))
            assert scored["code"].tolist() == frame["code"].tolist(), "leading zeros belong to a name"

    def test_own_scores_are_read_as_they_were(self, folder: Path, tmp_path: Path) -> None:
        """Labels, categories and ids that look like formulas, through CSV and back."""
        frame = people(3, 300)
        frame["answer"] = np.where(frame["answer"] == "yes", "+", "-")
        frame["city"] = "=" + frame["city"]
        frame["name"] = "@" + frame["name"]
        frame.to_parquet(tmp_path / "d.parquet")
        succeed("fit", tmp_path / "d.parquet", "-l", "answer", "--id", "name", "-o", tmp_path / "m")
        copied = [part for name in frame.columns for part in ("--id", name)]
        succeed("score", tmp_path / "m", tmp_path / "d.parquet", *copied, "-o", tmp_path / "first.csv")
        first = pd.read_csv(tmp_path / "first.csv")
        assert set(first["label"]) == {"'+", "'-"}
        succeed("score", tmp_path / "m", tmp_path / "first.csv", *copied, "-l", "answer", "-o", tmp_path / "again.csv")
        again = pd.read_csv(tmp_path / "again.csv")
        pd.testing.assert_frame_equal(again[first.columns], first)
        assert again["true_label"].tolist() == first["answer"].tolist()

    def test_out_of_memory_names_the_file(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail_to_allocate(*_: object, **__: object) -> None:
            raise MemoryError

        monkeypatch.setattr(TrustHead, "judge", fail_to_allocate)
        message = fail("score", folder / "model", folder / "new.csv", "-o", tmp_path / "s.csv")
        assert "new.csv' needs more memory than is available" in message
        assert "Split its rows or columns" in message


class TestNetwork:
    def test_scores_of_the_network_s_labels(self, network: Path, tmp_path: Path) -> None:
        succeed("score", network / "model", network / "new.npz", "-o", tmp_path / "s.csv")
        scored = pd.read_csv(tmp_path / "s.csv")
        assert list(scored.columns) == ["row", *SCORES, "head_label", "true_label"]
        data = arrays_of(network / "new.npz")
        head = TrustHead.load(network / "model.safetensors")
        out = head.judge(data["embeddings"], data["logits"])
        assert scored["label"].tolist() == [head.classes[code] for code in data["logits"].argmax(axis=1)]
        assert scored["accept"].tolist() == out.accept.tolist()
        np.testing.assert_allclose(scored["joint"], out.joint, rtol=1e-6)
        assert scored["true_label"].tolist() == data["labels"].tolist()

    def test_prediction_sets_are_written_as_names(self, network: Path, tmp_path: Path) -> None:
        """The column has the classes of every set; a coverage that is no share is refused."""
        files = ["score", network / "model", network / "new.npz"]
        succeed(*files, "--sets", 0.8, "-o", tmp_path / "s.csv")
        data = arrays_of(network / "new.npz")
        expected = TrustHead.load(network / "model.safetensors").sets(data["embeddings"], data["logits"], coverage=0.8)
        written = pd.read_csv(tmp_path / "s.csv", keep_default_na=False)["set"].tolist()
        assert written == ["|".join(names) for names in expected.names]
        assert "Did you mean 2%" in fail(*files, "--sets", 2, "-o", tmp_path / "t.csv")

    @pytest.mark.slow
    def test_logits_in_columns_are_ordered_by_class(self, network: Path, tmp_path: Path) -> None:
        options = ["--label", "kind", "--logits", "logit_"]
        printed = succeed("fit", network / "train.csv", *options, "-o", tmp_path / "m")
        assert "Logits: logit_cat for cat, logit_dog for dog, logit_eel for eel" in printed
        succeed("score", tmp_path / "m", network / "new.csv", *options, "-o", tmp_path / "s.csv")
        succeed("score", network / "model", network / "new.npz", "-o", tmp_path / "t.csv")
        scored, expected = pd.read_csv(tmp_path / "s.csv"), pd.read_csv(tmp_path / "t.csv")
        assert scored["label"].tolist() == expected["label"].tolist()
        np.testing.assert_allclose(scored["joint"], expected["joint"], rtol=1e-3)

    def test_an_array_is_matched_by_position(self, network: Path, tmp_path: Path) -> None:
        np.save(tmp_path / "d.npy", arrays_of(network / "new.npz")["embeddings"])
        result = run("score", network / "model", tmp_path / "d.npy", "-o", tmp_path / "s.csv")
        assert "without --logits it judges its own labels" in result.stderr
        assert len(pd.read_csv(tmp_path / "s.csv")) == 80
        np.save(tmp_path / "d.npy", np.zeros((3, 5)))
        reported = fail("score", network / "model", tmp_path / "d.npy", "-o", tmp_path / "t.csv")
        assert "has 5 feature columns and the model has 4 features" in reported

    def test_explanation(self, network: Path) -> None:
        printed = succeed("explain", network / "model", network / "new.npz", "--row", 2, "--row", 0)
        data, head = arrays_of(network / "new.npz"), TrustHead.load(network / "model.safetensors")
        expected = head.explain(data["embeddings"], logits=data["logits"])
        assert printed == f"row 2: {expected[2]}\n\nrow 0: {expected[0]}\n"  # type: ignore[index]

    def test_comparison(self, network: Path) -> None:
        reported = json.loads(succeed("compare", network / "model", network / "new.npz", "--json"))
        assert reported["rows"] == 40
        assert [row["score"] for row in reported["scores"]][:2] == ["SEP-C", "SEP-C joint"]


def test_explanation_of_a_table(folder: Path) -> None:
    printed = succeed("explain", folder / "model", folder / "new.csv", "--row", 3)
    assert printed.startswith(("row 3: Accepted", "row 3: Refused"))
    assert "'person " in printed
    reported = json.loads(succeed("explain", folder / "model", folder / "new.csv", "--row", 3, "--json"))
    values = {feature["name"]: feature["value"] for feature in reported[0]["features"]}
    assert values["age"] == pytest.approx(people(1, 120)["age"][3], rel=1e-5)
    command = ("explain", folder / "model", folder / "new.csv")
    assert "has no row 120; it has the rows 0 to 119" in fail(*command, "--row", 120)
    name = people(1, 120)["name"][3]
    named = succeed(*command, "--id", f"name={name}")
    assert named == printed.replace("row 3:", f"row 3 (name={name}):")
    here = people(1, 120)["city"]
    several = json.loads(succeed(*command, "--row", 5, "--id", f"name={name}", "--id", f"city={here[3]}", "--json"))
    assert [each["row"] for each in several] == [5, *sorted({*np.flatnonzero(here == here[3]).tolist()} - {5})]
    assert "has no row with 'nobody' in column 'name'" in fail(*command, "--id", "name=nobody")
    assert "--id names rows as COLUMN=VALUE" in fail(*command, "--id", str(name))
    assert "has no column 'nmae'" in fail(*command, "--id", "nmae=x")
    assert "--row INDEX or --id COLUMN=VALUE" in fail(*command)


def test_calibration_with_other_rows(folder: Path, tmp_path: Path) -> None:
    arguments = ["calibrate", folder / "model", folder / "new.csv", "--label", "answer"]
    printed = succeed(*arguments, "-o", tmp_path / "m", "--flag-rate", 0.1)
    assert "Rows: 120 calibrate" in printed
    assert "at most 10 % of the points of the calibration distribution are refused" in printed
    before, after = (
        TrustHead.load(path).calibration for path in (folder / "model.safetensors", tmp_path / "m.safetensors")
    )
    assert before is not None
    assert after is not None
    assert len(after.own.ranked_joint) == 80
    assert len(before.own.ranked_joint) != 60
    (tmp_path / "copy.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    succeed("calibrate", tmp_path / "copy", *arguments[2:], "--flag-rate", 0.1)
    assert (tmp_path / "copy.safetensors").read_bytes() == (tmp_path / "m.safetensors").read_bytes()


def test_a_report_about_training_rows_says_so(tmp_path: Path) -> None:
    model, train, page = tmp_path / "m", tmp_path / "t.csv", tmp_path / "r.html"
    people(0, 300).to_csv(train, index=False)
    succeed("fit", train, "-l", "answer", "--id", "name", "--risk", 0.3, "-o", model)
    succeed("report", model, train, "-l", "answer", "-o", page)
    assert "The promise does not apply: 100 % of these rows are rows of the training file" in page.read_text()
    people(1, 300).to_csv(tmp_path / "n.csv", index=False)
    succeed("report", model, tmp_path / "n.csv", "-l", "answer", "-o", page)
    assert "rows of the training file" not in page.read_text()


@pytest.mark.slow
def test_explanations_and_reports_take_the_promise_of_score(folder: Path, tmp_path: Path) -> None:
    succeed("score", folder / "model", folder / "new.csv", "-o", tmp_path / "scored.csv", "--flag-rate", "0.4")
    accept = pd.read_csv(tmp_path / "scored.csv")["accept"]
    rows = [argument for i in range(30) for argument in ("--row", i)]
    text = succeed("explain", folder / "model", folder / "new.csv", *rows, "--flag-rate", "0.4", "--json")
    assert [item["accepted"] for item in json.loads(text)] == accept[:30].tolist()
    succeed("report", folder / "model", folder / "new.csv", "-o", tmp_path / "page.html", "--flag-rate", "0.4")
    assert json.loads((tmp_path / "page.json").read_text())["totals"]["accepted"] == accept.sum()


@pytest.mark.slow
def test_the_risk_is_kept_in_every_group(tmp_path: Path) -> None:
    """The decisions of the file are those of the library; a later calibration keeps the groups."""
    people(0, 1500).to_csv(tmp_path / "d.csv", index=False)
    people(1, 500).to_csv(tmp_path / "later.csv", index=False)
    fit = ("fit", tmp_path / "d.csv", "-l", "answer", "--drop", "name", "--model", "logistic", "-o", tmp_path / "m")
    found = json.loads(succeed(*fit, "--risk", "30%", "--by", "predicted", "--json"))["promise"]
    assert found["by"] == "predicted"
    assert sorted(group["group"][0] for group in found["groups"]) == ["no", "yes"]
    frame = people(2, 400)
    head = TrustHead.load(tmp_path / "m.safetensors")
    accept = head.judge(frame).accept
    assert 0 < accept.sum() < len(frame)
    kept = head.accept_at(risk=0.3, by="predicted")
    assert [list(group._asdict().values())[1:] for group in kept.groups] == [
        list(group.values())[1:] for group in found["groups"]
    ]
    assert head.judge(frame).accept.tolist() == accept.tolist()
    calibrate = ("calibrate", tmp_path / "m", tmp_path / "later.csv", "-l", "answer", "-o", tmp_path / "n")
    assert "of each predicted class are wrong" in succeed(*calibrate)
    printed = succeed(*calibrate, "--risk", 0.3, "--by", "class")
    assert "of each true class are wrong" in printed
    assert "group  points  threshold" in printed
    assert "No promise.\n\ngroup" in succeed(*calibrate, "--risk", 0.0001, "--by", "predicted")
    assert "pass --risk too" in fail(*calibrate, "--by", "class")
    assert "by must be one of 'class', 'predicted', 'region'" in fail(*fit, "--risk", 0.1, "--by", "city")


def test_a_calibration_keeps_the_risk_of_the_model(folder: Path, tmp_path: Path) -> None:
    people(2, 300).to_csv(tmp_path / "later.csv", index=False)
    first, second = tmp_path / "first", tmp_path / "second"
    calibrate = ("calibrate", folder / "model", tmp_path / "later.csv", "--label", "answer")
    succeed(*calibrate, "-o", first, "--risk", "0.4", "--delta", "0.2")
    printed = succeed("calibrate", first, tmp_path / "later.csv", "--label", "answer", "-o", second)
    assert (
        "Promise: at most 40 % of the accepted labels are wrong, with probability 80 % over calibration sets."
        in printed
    )
    promise = TrustHead.load(second.with_suffix(".safetensors")).promise
    assert promise is not None
    assert (promise.risk, promise.delta) == (0.4, 0.2)
    head = TrustHead.load(second.with_suffix(".safetensors"))
    head.accept_at(risk=0.4, delta=0.2, by="predicted")
    head.save(first.with_suffix(".safetensors"))
    printed = succeed("calibrate", first, tmp_path / "later.csv", "--label", "answer", "-o", second)
    assert "at most 40 % of the accepted labels of each predicted class are wrong" in printed


def test_a_calibration_without_units_does_not_keep_a_promise_over_units(folder: Path, tmp_path: Path) -> None:
    people(2, 300).to_csv(tmp_path / "later.csv", index=False)
    head = TrustHead.load(folder / "model.safetensors")
    head.promise = Promise(0.4, 0.2, None, units=True)
    head.save(tmp_path / "model.safetensors")
    printed = succeed("calibrate", tmp_path / "model", tmp_path / "later.csv", "--label", "answer", "--json")
    assert not json.loads(printed)["promise"]["found"]


@pytest.fixture(scope="module")
def households(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of households, whose members are copies of each other, up to a little noise; and a model."""
    path, rng = tmp_path_factory.mktemp("units"), np.random.default_rng(0)
    for name, seed in (("train", 3), ("later", 4)):
        frame = people(seed, 300).loc[np.repeat(np.arange(300), 3)]
        frame["age"] += rng.normal(size=900)
        frame.sample(frac=1.0, random_state=0).to_csv(path / f"{name}.csv", index=False)
    fit = ("fit", path / "train.csv", "-l", "answer", "--units", "name", "--risk", "0.3", "-o", path / "model")
    (path / "printed.txt").write_text(succeed(*fit))
    return path


class TestUnits:
    def test_whole_units_calibrate_or_fit(self, households: Path) -> None:
        head = TrustHead.load(households / "model.safetensors")
        assert head.encoding is not None
        assert "name" not in head.encoding.columns  # units are no feature
        assert head.promise is not None
        assert (head.promise.units, head.promise.risk) == (True, 0.3)
        assert head.calibration is not None
        sizes = head.calibration.labels.point_unit.unique(return_counts=True)[1].tolist()
        assert sizes == [3] * len(sizes)
        assert abs(len(sizes) - 75) <= 1
        printed = (households / "printed.txt").read_text()
        assert f"of which {900 - 3 * len(sizes)} fit and {3 * len(sizes)} calibrate" in printed
        assert "It holds for units drawn like the calibration units." in printed

    def test_a_calibration_with_units_keeps_the_promise_over_units(self, households: Path, tmp_path: Path) -> None:
        again = ("calibrate", households / "model", households / "later.csv", "-l", "answer", "--units", "name")
        found = json.loads(succeed(*again, "-o", tmp_path / "again", "--json"))
        assert found["promise"]["found"]
        head = TrustHead.load(tmp_path / "again.safetensors")
        assert head.promise is not None
        assert (head.promise.units, head.promise.risk) == (True, 0.3)
        frame = pd.read_csv(households / "later.csv")
        expected = TrustHead.load(households / "model.safetensors")
        expected.calibrate(frame[FEATURES], frame["answer"], units=frame["name"].to_numpy())
        assert expected.calibration is not None
        assert expected.calibration.labels.threshold == found["promise"]["threshold"]

    def test_what_assumes_independent_rows_says_so(self, households: Path, tmp_path: Path) -> None:
        assert "one row of each unit" in fail("drift", households / "model", households / "later.csv")
        listed = run("novelties", households / "model", households / "later.csv", "-o", tmp_path / "novel.csv")
        assert listed.exit_code == 0
        assert "p-values are approximate" in listed.stderr

    def test_a_row_without_a_unit(self, households: Path, tmp_path: Path) -> None:
        pd.read_csv(households / "later.csv").assign(name=["", *["a"] * 899]).to_csv(tmp_path / "d.csv", index=False)
        fit = ("fit", tmp_path / "d.csv", "-l", "answer", "--units", "name", "-o", tmp_path / "m")
        assert fail(*fit).startswith("1 rows have no unit in column 'name', the first is row 0; give every row a unit")


def test_comparison_of_a_table(folder: Path) -> None:
    printed = succeed("compare", folder / "model", folder / "new.csv", "--label", "answer")
    assert printed.startswith("Labels: those of the model's classifier.")
    assert "Evaluation rows: 60 test" in printed


BAD: dict[str, tuple[Callable[[Path], list[object]], str]] = {
    "no label": (lambda f: ["fit", f / "train.csv", "-o", f / "x"], "Name the label column"),
    "other label": (lambda f: ["fit", f / "train.csv", "-o", f / "x", "-l", "class"], "has no column 'class'"),
    "one class": (lambda f: ["fit", f / "one.csv", "-o", f / "x", "-l", "y"], "hold the single class 1"),
    "few rows": (lambda f: ["fit", f / "few.csv", "-o", f / "x", "-l", "y"], "too few: a quarter of them calibrates"),
    "no rows": (lambda f: ["fit", f / "head.csv", "-o", f / "x", "-l", "y"], "has no rows"),
    "drop": (lambda f: ["fit", f / "few.csv", "-o", f / "x", "-l", "y", "--drop", "b"], "has no column 'b'"),
    "no feature": (lambda f: ["fit", f / "few.csv", "-o", f / "x", "-l", "y", "--drop", "a"], "no feature column"),
    "logits": (lambda f: ["fit", f / "few.csv", "-o", f / "x", "-l", "y", "--logits", "l"], "starts with 'l'"),
    "suffix": (lambda f: ["fit", f / "few.csv", "-o", f / "x.csv", "-l", "y"], "must end in .safetensors"),
    "no model": (lambda f: ["score", f / "absent", f / "new.csv", "-o", f / "x.csv"], "There is no file"),
    "two promises": (
        lambda f: ["score", f / "model", f / "new.csv", "-o", f / "x.csv", "--risk", "0.1", "--flag-rate", "0.1"],
        "Pass --risk or --flag-rate, not both",
    ),
    "impossible risk": (
        lambda f: ["score", f / "model", f / "new.csv", "-o", f / "x.csv", "--risk", "1.5"],
        "Did you mean 1.5%?",
    ),
    "other columns": (
        lambda f: ["score", f / "model", f / "few.csv", "-o", f / "x.csv"],
        "has no columns 'age', 'income', 'city'. It has 'a', 'y'.",
    ),
    "id of a score": (
        lambda f: ["score", f / "model", f / "trust.csv", "-o", f / "x.csv", "--id", "trust"],
        "--id 'trust' is also the name of a score",
    ),
    "empty": (lambda f: ["score", f / "model", f / "none.csv", "-o", f / "x.csv"], "has no rows"),
    "calibrate": (lambda f: ["calibrate", f / "model", f / "ten.csv", "-l", "answer", "-o", f / "x"], "too few"),
    "compare": (lambda f: ["compare", f / "model", f / "ten.csv", "-l", "answer"], "too few"),
    "explain": (
        lambda f: ["explain", f / "model", f / "cut.csv", "--row", "1"],
        "row 1 has no decision: the row has 1",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_nothing_is_written(folder: Path, case: str) -> None:
    people(1, 10).to_csv(folder / "ten.csv", index=False)
    people(1, 30).rename(columns={"name": "trust"}).to_csv(folder / "trust.csv", index=False)
    lines = (folder / "new.csv").read_text().splitlines()
    (folder / "cut.csv").write_text("\n".join([*lines[:2], "cut", *lines[3:5]]))
    (folder / "none.csv").write_text(lines[0])
    (folder / "few.csv").write_text("a,y\n" + "".join(f"{i % 7},{i % 2}\n" for i in range(30)))
    (folder / "one.csv").write_text("a,y\n" + "".join(f"{i % 7},1\n" for i in range(90)))
    (folder / "head.csv").write_text("a,y\n")
    before = sorted(folder.iterdir())
    arguments, message = BAD[case]
    assert message in fail(*arguments(folder))
    assert sorted(folder.iterdir()) == before


@pytest.mark.slow
def test_rows_of_a_shifted_source(network: Path, tmp_path: Path) -> None:
    """The promise for a target, in both kinds, and novelties are those of the head in Python."""
    rng = np.random.default_rng(1)
    data: dict[str, dict[str, Any]] = {}
    for name, count in (("more", 1500), ("today", 800), ("new", 120)):
        y = rng.choice(3, count, p=[1 / 3] * 3 if name == "more" else [0.6, 0.2, 0.2])
        z = rng.normal(size=(count, 4)) + 4.0 * np.eye(4)[y]
        z[: 12 * (name == "new"), 3] += 40.0
        logits = 3.0 * z[:, :3] + rng.normal(size=(count, 3))
        data[name] = {"embeddings": z, "logits": logits, "labels": np.array(["cat", "dog", "eel"])[y]}
        np.savez(tmp_path / f"{name}.npz", **data[name])
    model, output = tmp_path / "m", tmp_path / "scores.parquet"
    succeed("calibrate", network / "model", tmp_path / "more.npz", "-o", model)
    head = TrustHead.load(tmp_path / "m.safetensors")
    rows, today = ([data[name][part] for part in ("embeddings", "logits")] for name in ("new", "today"))
    given: dict[str, Any] = {"target": today[0], "target_logits": today[1]}
    command = ("score", model, tmp_path / "new.npz", "-o", output, "--json")
    shifted = (*command, "--target", tmp_path / "today.npz")
    thresholds = set()
    for options, wanted in (
        (("--risk", "10%"), {"risk": 0.1}),
        (("--risk", 0.1, "--delta", 0.2, "--shift", "label"), {"risk": 0.1, "delta": 0.2, "shift": "label"}),
        (("--flag-rate", 0.1), {"flag_rate": 0.1}),
    ):
        promise = json.loads(succeed(*shifted, *options))["promise"]
        found = head.accept_at(**given, **wanted)
        assert found.found
        assert {name: promise[name] for name in ("threshold", "rows", "points")} == {
            "threshold": found.threshold,
            "rows": 800,
            "points": found.points,
        }
        assert str(head.promise) in promise["text"]
        assert pd.read_parquet(output)["accept"].tolist() == head.judge(*rows).accept.tolist()
        thresholds.add(found.threshold)
    assert len(thresholds) == 3
    np.savez(tmp_path / "blurred.npz", **data["today"] | {"embeddings": today[0] + 3.0})
    refused = json.loads(succeed(*command, "--risk", 0.1, "--target", tmp_path / "blurred.npz"))["promise"]
    assert not refused["found"]
    assert refused["text"].startswith("No promise, nothing is accepted: within regions the target rows have other")
    assert not pd.read_parquet(output)["accept"].any()
    assert "--target is for a promise: pass --risk or --flag-rate too" in fail(*shifted)
    assert "--shift must be" in fail(*shifted, "--risk", 0.1, "--shift", "other")
    assert "pass --target too" in fail(*command, "--risk", 0.1, "--shift", "label")
    assert "needs shift='covariate'" in fail(*shifted, "--flag-rate", 0.1, "--shift", "label")
    strange = ("novelties", model, tmp_path / "new.npz", "-o", output)
    succeed(*strange, "--target", tmp_path / "today.npz")
    listed = pd.read_parquet(output)
    novel = head.novelties(*rows, **given)
    assert sorted(listed["row"]) == np.flatnonzero(novel.novel).tolist()
    assert set(range(12)) <= set(listed["row"])
    assert listed["p_value"].tolist() == novel.p_value.numpy()[listed["row"]].tolist()
    succeed(*strange)
    plain = pd.read_parquet(output).set_index("row")["p_value"][:12]
    assert (plain != listed.set_index("row")["p_value"][plain.index]).any()  # against other points


def test_novel_rows_are_listed(folder: Path, tmp_path: Path) -> None:
    frame = people(1, 60)
    frame.loc[:14, "age"] += 500.0
    frame.to_csv(tmp_path / "n.csv", index=False)
    arguments = ["novelties", folder / "model", tmp_path / "n.csv", "-o", tmp_path / "o.csv"]
    printed = succeed(*arguments, "--fdr", 0.2, "--id", "name")
    found = pd.read_csv(tmp_path / "o.csv")
    assert f"{len(found)} of 60 rows are novel" in printed
    assert found.columns.tolist() == ["row", "name", "p_value", "adjusted", "group"]
    assert set(range(15)) <= set(found["row"])
    assert found["name"].tolist() == frame["name"][found["row"]].tolist()
    assert json.loads(succeed(*arguments, "--fdr", 0.001, "--json"))["novel"] == 0
    assert pd.read_csv(tmp_path / "o.csv").empty


@pytest.mark.slow
def test_label_errors_are_listed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    kind = np.array(["cat", "dog"])[np.arange(200) % 2]
    frame = pd.DataFrame(rng.normal(size=(200, 3)), columns=list("abc"))
    frame["a"] += 12.0 * (kind == "dog")
    frame = frame.assign(place=rng.choice(["x", "y"], 200), kind=kind, key=[f"k{i}" for i in range(200)])
    frame.loc[[7, 30], "kind"] = ["cat", "dog"]
    frame.to_csv(tmp_path / "d.csv", index=False)
    arguments = ["label-errors", tmp_path / "d.csv", "-l", "kind", "--id", "key", "-o", tmp_path / "o.parquet"]
    assert "rows listed: 2." in succeed(*arguments)
    found = pd.read_parquet(tmp_path / "o.parquet").sort_values("row")
    assert found.columns.tolist() == ["row", "key", "label", "suggested", "wrong", "adjusted"]
    assert found[["row", "key", "label", "suggested"]].to_numpy().tolist() == [
        [7, "k7", "cat", "dog"],
        [30, "k30", "dog", "cat"],
    ]
    assert json.loads(succeed(*arguments, "--top", 5, "--json"))["found"] == 2
    assert set(pd.read_parquet(tmp_path / "o.parquet")["row"][:2]) == {7, 30}
    assert len(pd.read_parquet(tmp_path / "o.parquet")) == 5
    renamed = frame.rename(columns={"key": "wrong"})
    renamed.to_csv(tmp_path / "d.csv", index=False)
    assert "also the name of a result" in fail(*arguments[:4], "--id", "wrong", "-o", tmp_path / "x.csv")


def test_drift_has_an_exit_code(folder: Path, tmp_path: Path) -> None:
    people(2, 300).to_csv(tmp_path / "same.csv", index=False)
    people(2, 300).assign(age=90.0).to_csv(tmp_path / "other.csv", index=False)
    assert "no drift shown: p = " in succeed("drift", folder / "model", tmp_path / "same.csv")
    found = run("drift", folder / "model", tmp_path / "other.csv")
    assert found.exit_code == 1
    assert found.stdout.startswith("drift: alarm at point ")


@pytest.mark.slow
def test_score_with_a_guard(folder: Path, tmp_path: Path) -> None:
    """The stream goes on from file to file; drift suspends the promise, and true labels count."""
    state, output = tmp_path / "guard.safetensors", tmp_path / "scores.csv"
    people(2, 200).to_csv(tmp_path / "same.csv", index=False)
    people(3, 300).assign(age=90.0).to_csv(tmp_path / "other.csv", index=False)
    succeed(
        "calibrate", folder / "model", folder / "new.csv", "--label", "answer", "--risk", "0.3", "-o", tmp_path / "m"
    )
    command = ("score", tmp_path / "m", "-o", output, "--guard", state)
    assert "The promise holds after 200 rows" in succeed(*command, tmp_path / "same.csv", "--label", "answer")
    assert set(pd.read_csv(output)["promise"]) == {"holds"}
    kept = state.read_bytes()
    assert "leave out --risk" in fail(*command, tmp_path / "same.csv", "--risk", "0.2")
    assert "must be warn or refuse" in fail(*command, tmp_path / "same.csv", "--on-alarm", "stop")
    assert "not a guard" in fail(*command[:-1], folder / "model.safetensors", tmp_path / "same.csv")
    assert state.read_bytes() == kept
    found = run(*command, tmp_path / "other.csv", "--on-alarm", "refuse", "--json")
    assert found.exit_code == 1
    report = json.loads(found.stdout)["guard"]
    assert (report["state"], report["rows"]) == ("unverified", 500)
    scores = pd.read_csv(output)
    assert not scores["accept"].any()
    assert set(scores["reason"]) == {"no promise"}
    printed = run(*command, tmp_path / "other.csv", "--on-alarm", "refuse").stdout
    assert "Score later rows with their true labels (--label): enough of them restore it." in printed


@pytest.mark.slow
def test_drift_goes_on_from_file_to_file(folder: Path, tmp_path: Path) -> None:
    """Two halves with a state are one stream; a failed call changes nothing."""
    rows, state = people(2, 300).assign(age=lambda frame: frame["age"] + 3.0), tmp_path / "stream.safetensors"
    for name, part in (("all", rows), ("a", rows[:150]), ("b", rows[150:]), ("none", rows[:0])):
        part.to_csv(tmp_path / f"{name}.csv", index=False)
    command = ("drift", folder / "model", "--json")
    whole = json.loads(run(*command, tmp_path / "all.csv").stdout)
    first = json.loads(run(*command, tmp_path / "a.csv", "--state", state).stdout)
    assert first["seen"] == 150
    kept = state.read_bytes()
    assert "has no rows" in fail(*command, tmp_path / "none.csv", "--state", state)
    assert "began with --alpha 0.01, got 0.1" in fail(*command, tmp_path / "b.csv", "--state", state, "--alpha", 0.1)
    assert "not a drift_monitor" in fail(*command, tmp_path / "b.csv", "--state", folder / "model.safetensors")
    assert state.read_bytes() == kept
    assert json.loads(run(*command, tmp_path / "b.csv", "--state", state).stdout) == whole


def test_a_head_without_calibration_is_not_scored(folder: Path, tmp_path: Path) -> None:
    head = TrustHead.load(folder / "model.safetensors")
    TrustHead(head.projection, head.sepc, head.evidence, encoding=head.encoding).save(tmp_path / "m.safetensors")
    reported = fail("score", tmp_path / "m", folder / "new.csv", "-o", tmp_path / "s.csv")
    assert "calibrate it with `sepc calibrate" in reported


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of the memory is read from /proc")
def test_memory_does_not_grow_with_the_file(folder: Path, tmp_path: Path) -> None:
    """A file of 200 MB is scored with less than 120 MB more than a file of a few rows: Arrow reads 32 MB ahead."""
    with (tmp_path / "large.csv").open("w") as file:
        file.write("age,city,income,text\n")
        text = "x" * 20_000
        file.writelines(f"{40 + i % 20},Rome,{i % 9},{text}{i}\n" for i in range(10_000))
    assert (tmp_path / "large.csv").stat().st_size > 200e6
    program = """
        import re, sys
        from pathlib import Path
        from sepc_torch.cli import app
        for data in sys.argv[2:]:
            app(["score", sys.argv[1], data, "-o", data + ".scored.csv", "--id", "city"], standalone_mode=False)
            # Unlike ru_maxrss, this peak does not include that of the parent process before exec.
            print(re.search("VmHWM: *(.*) kB", Path("/proc/self/status").read_text().replace(chr(9), " ")).group(1))
    """
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(program),
        folder / "model",
        folder / "new.csv",
        tmp_path / "large.csv",
    ]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    first, last = (1024 * int(line) for line in done.stdout.splitlines() if line.isdecimal())
    assert last - first < 120e6


class TestExport:
    """Real files are written in test_export.py: tracing a head takes long."""

    def test_the_ending_chooses_the_kind_of_file(
        self, network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for method in ("to_onnx", "export"):

            def write(_head: TrustHead, path: Path, *, logits: bool | None, method: str = method) -> None:
                path.write_text(f"{method} {logits}")

            monkeypatch.setattr(export, method, write)
        printed = succeed("export", network / "model", "-o", tmp_path / "head.onnx")
        assert (tmp_path / "head.onnx").read_text() == "to_onnx True"
        assert printed.startswith("Inputs: z (rows, 4), logits (rows, 3) in float32.\nWritten: ")
        found = json.loads(succeed("export", network / "model", "-o", tmp_path / "a.PT2", "--no-logits", "--json"))
        assert (tmp_path / "a.PT2").read_text() == "export False"
        assert found["columns"] == {"z": 4}
        assert found["classes"] == ["cat", "dog", "eel"]

    def test_a_table_is_encoded_before(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(export, "export", lambda _head, path, *, logits: path.write_text(str(logits)))
        printed = succeed("export", folder / "model", "-o", tmp_path / "head.pt2")
        assert printed.startswith(
            "Inputs: z (rows, 6) in float32.\nOutputs: label, accept, confidence, joint, p_value,"
        )
        z = "z holds 6 encoded numbers, not the 3 columns of the table: TrustHead.load(model).encode(table)"
        assert z in printed
        assert (tmp_path / "head.pt2").read_text() == "None"  # the classifier is a part of the file
        printed = succeed("export", folder / "model", "-o", tmp_path / "head.pt2", "--logits")
        assert printed.startswith("Inputs: z (rows, 6), logits (rows, 2) in float32.\nlogits are those of the model's")
        assert z in printed
        assert (tmp_path / "head.pt2").read_text() == "True"

    def test_the_description_of_the_encoding_suffices(self, folder: Path) -> None:
        """The steps of docs/serving.md, without the package: the numbers are those of ``head.encode``."""
        head = TrustHead.load(folder / "model.safetensors")
        described = json.loads(json.dumps(_description(head)))["encoding"]
        frame = pd.read_csv(folder / "new.csv").assign(city=lambda t: t["city"].where(t.index != 3))
        numbers, gaps, categories = [], [], []
        for column in described["numbers"]:
            values = frame[column["name"]]
            numbers.append((values.fillna(column["median"]) - column["mean"]) / column["scale"])
            gaps += [values.isna()] if column["gaps"] else []
        for column in described["categories"]:
            texts = frame[column["name"]].fillna("(missing)")
            categories += [texts == category for category in column["categories"]]
            categories += [~texts.isin(column["categories"])] if column["other"] else []
        expected = np.stack([*numbers, *gaps, *categories], axis=1).astype(np.float32)
        np.testing.assert_allclose(head.encode(frame), expected, rtol=1e-6)
        assert head.encode(frame).dtype == np.float32
        assert len(_description(head)["feature_names"]) == expected.shape[1]

    def test_misuse_is_one_line(self, folder: Path, tmp_path: Path) -> None:
        assert "must end in .onnx or .pt2" in fail("export", folder / "model", "-o", tmp_path / "head.tflite")
        assert "no-folder" in fail("export", folder / "model", "-o", tmp_path / "no-folder" / "head.onnx")
        assert "no-model" in fail("export", tmp_path / "no-model", "-o", tmp_path / "head.onnx")
        fail("export", folder / "train.csv", "-o", tmp_path / "head.onnx")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["fit", "calibrate", "compare", "label-errors"])
def test_help_names_one_default_of_the_rows(command: str) -> None:
    words = " ".join(CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "1000"}).output.split())
    described = words.partition("--max-rows")[2].partition("--seed")[0]
    assert described.lower().count("default:") == 1
