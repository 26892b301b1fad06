"""The paper's classifier on the command line: round trips, one-line errors, and complete output files."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.datasets import load_iris
from typer.testing import CliRunner, Result

from sepc_torch import SEPC, Partition, Rule, TrustHead, __version__, partition
from sepc_torch.cli import app
from sepc_torch.cli.paper import NearestBy, _labelled_table
from sepc_torch.cli.row_files import ScoreWriter, open_rows
from sepc_torch.cli.shell import _COMMANDS, _PAPER
from sepc_torch.data import memory
from sepc_torch.model.sepc import Nearest

ROOT = Path(__file__).resolve().parent.parent
SCORES = ["label", "trust", "rule", "distance", "margin", "runner_up"]


def run(*arguments: object) -> Result:
    """Run a command; those of the paper's classifier are in a group of their own."""
    group = ["paper"] if arguments[0] in ("fit", "score", "explain", "overlap") else []
    return CliRunner().invoke(app, [*group, *map(str, arguments)])


def succeed(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def fail(*arguments: object) -> str:
    """Run a command that must fail; return its one-line error message."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit)
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("sepc: ")
    return lines[0].removeprefix("sepc: ")


def iris() -> pd.DataFrame:
    data = load_iris(as_frame=True)
    names = ["sepal length", "sepal width", "petal length", "petal width"]
    frame = data.data.set_axis(names, axis=1).assign(species=np.array(data.target_names)[data.target])
    frame.insert(0, "id", [f"flower {i}" for i in range(len(frame))])
    return frame.sample(frac=1, random_state=0, ignore_index=True)


FEATURES = ["sepal length", "sepal width", "petal length", "petal width"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Iris, split into train and new, in every format, and a model fitted on train."""
    path = tmp_path_factory.mktemp("iris")
    frame = iris()
    for name, part in (("train", frame[:100]), ("new", frame[100:].reset_index(drop=True))):
        part.to_csv(path / f"{name}.csv", index=False)
        part.to_csv(path / f"{name}.csv.gz", index=False)
        part.to_parquet(path / f"{name}.parquet")
        X, y = part[FEATURES].to_numpy(), part["species"].to_numpy(dtype=str)
        np.savez(path / f"{name}.npz", X=X, y=y, feature_names=FEATURES)
        np.savez(path / f"{name}_plain.npz", X=X, y=y)
    succeed("fit", path / "train.csv", "--label", "species", "--ignore", "id", "-o", path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def part() -> Partition:
    frame = iris()[:100]
    return partition(frame[FEATURES], frame["species"])


def test_version() -> None:
    assert succeed("--version").strip() == f"sepc {__version__}"


def test_the_choices_agree_with_the_library() -> None:
    assert [choice.value for choice in NearestBy] == list(get_args(Nearest))


@pytest.mark.parametrize("source", ["train.csv", "train.csv.gz", "train.parquet", "train.npz"])
def test_fit_writes_the_frozen_model(folder: Path, part: Partition, tmp_path: Path, source: str) -> None:
    output = tmp_path / "model.safetensors"
    options = [] if source.endswith(".npz") else ["--label", "species", "--ignore", "id"]
    printed = succeed("fit", folder / source, "-o", output, *options)
    assert str(part) in printed
    assert str(output) in printed
    expected = tmp_path / "expected.safetensors"
    SEPC.from_partition(part, "euclidean").save(expected)
    assert output.read_bytes() == expected.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected.safetensors", "model.safetensors"]


def test_fit_options_reach_the_model(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    options = ["--max-impure", 7, "--no-standardize", "--nearest", "euclidean", "--jobs", 2, "--json"]
    reported = json.loads(succeed("fit", folder / "train.npz", "-o", output, *options))
    model = SEPC.load(output)
    assert model.nearest == "euclidean"
    assert (model.made["max_impure"], model.made["standardize"]) == (7, False)
    assert reported["made"] == model.made
    assert reported["model"] == str(output)
    assert reported["features"] == FEATURES
    assert reported["points"] == 100
    assert {c["label"]: c["points"] for c in reported["classes"]} == iris()[:100]["species"].value_counts().to_dict()
    assert reported["ellipsoids"] == len(model.bank)


@pytest.mark.parametrize("source", ["new.csv", "new.csv.gz", "new.parquet", "new.npz", "new_plain.npz"])
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_score_agrees_with_the_model(folder: Path, tmp_path: Path, source: str, suffix: str) -> None:
    output = tmp_path / f"scored{suffix}"
    succeed("score", folder / "model.safetensors", folder / source, "-o", output)
    assert list(tmp_path.iterdir()) == [output]
    scored = pd.read_csv(output) if suffix == ".csv" else pd.read_parquet(output)
    assert list(scored.columns) == ["row", *SCORES]
    assert scored["row"].tolist() == list(range(50))
    model = SEPC.load(folder / "model.safetensors")
    out = model(model.as_tensor(np.array(iris()[FEATURES][100:])))
    assert scored["label"].tolist() == [model.classes[i] for i in out.label.tolist()]
    assert scored["runner_up"].tolist() == [model.classes[i] for i in out.runner_up.tolist()]
    assert scored["rule"].tolist() == [Rule(i).name for i in out.rule.tolist()]
    for field in ("trust", "distance", "margin"):
        np.testing.assert_array_equal(scored[field], getattr(out, field).numpy())


def test_score_summary_with_and_without_labels(folder: Path, tmp_path: Path) -> None:
    arguments = ["score", folder / "model.safetensors", folder / "new.csv", "-o", tmp_path / "s.csv"]
    blind = json.loads(succeed(*arguments, "--json"))
    assert blind["accuracy"] is None
    assert blind["ignored"] == ["id", "species"]
    reported = json.loads(succeed(*arguments, "--json", "--label", "species", "--id", "id", "--threshold", 0.9))
    scored = pd.read_csv(tmp_path / "s.csv")
    assert scored["id"].tolist() == iris()["id"][100:].tolist()
    right = scored["label"].to_numpy() == iris()["species"][100:].to_numpy()
    accepted = (scored["trust"] >= 0.9) & (scored["rule"] != "OUTSIDE")
    assert reported["ignored"] == []
    assert reported["points"] == 50
    assert reported["accuracy"] == pytest.approx(right.mean())
    assert (reported["threshold"], reported["accepted"]) == (0.9, accepted.sum())
    assert reported["coverage"] == pytest.approx(accepted.mean())
    assert reported["accepted_accuracy"] == pytest.approx(right[accepted].mean())
    assert {rule: share["points"] for rule, share in reported["rules"].items() if share["points"]} == scored[
        "rule"
    ].value_counts().to_dict()
    for rule, share in reported["rules"].items():
        own = right[scored["rule"] == rule]
        assert share["accuracy"] == (pytest.approx(own.mean()) if len(own) else None)
    assert {p["label"]: p["points"] for p in reported["predicted"]} == scored["label"].value_counts().to_dict()


def test_score_prints_a_table(folder: Path, tmp_path: Path) -> None:
    arguments = ["score", folder / "model.safetensors", folder / "new.csv", "-o", tmp_path / "s.csv"]
    result = run(*arguments, "--label", "species")
    assert result.stderr == "sepc: columns not used by the model: id\n"
    assert re.search(r"^all +50 +100\.0% +\d+\.\d%$", result.stdout, re.MULTILINE)
    assert "trust >= 0.95, inside" in result.stdout


def test_columns_are_found_by_name(folder: Path, tmp_path: Path) -> None:
    """The order of the columns and further columns do not matter."""
    shuffled = tmp_path / "shuffled.csv"
    pd.read_csv(folder / "new.csv")[["petal width", "species", "sepal width", "petal length", "sepal length"]].assign(
        colour="blue"
    ).to_csv(shuffled, index=False)
    for source, output in ((folder / "new.csv", "a.csv"), (shuffled, "b.csv")):
        succeed("score", folder / "model.safetensors", source, "-o", tmp_path / output)
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


def test_numbers_as_labels_and_features_without_names(tmp_path: Path) -> None:
    X, y = load_iris(return_X_y=True)
    np.savez(tmp_path / "d.npz", X=X, y=y)
    succeed("fit", tmp_path / "d.npz", "-o", tmp_path / "m.safetensors")
    model = SEPC.load(tmp_path / "m.safetensors")
    assert model.classes == [0, 1, 2]
    assert model.feature_names == ("x0", "x1", "x2", "x3")
    reported = json.loads(
        succeed("score", tmp_path / "m.safetensors", tmp_path / "d.npz", "-o", tmp_path / "s.csv", "--json")
    )
    assert reported["accuracy"] > 0.9
    # A model without feature names takes columns by position.
    SEPC.from_partition(partition(X, y), "euclidean").save(tmp_path / "nameless.safetensors")
    pd.DataFrame(X, columns=FEATURES).assign(kind=y).to_csv(tmp_path / "d.csv", index=False)
    again = ["score", tmp_path / "nameless.safetensors", tmp_path / "d.csv", "-o", tmp_path / "t.csv"]
    reported = json.loads(succeed(*again, "--label", "kind", "--json"))
    assert reported["accuracy"] > 0.9
    assert "has 5 feature columns and the model has 4 features" in fail(*again)


def test_labels_unknown_to_the_model(folder: Path, tmp_path: Path) -> None:
    frame = pd.read_csv(folder / "new.csv")
    frame.loc[:9, "species"] = "tulip"
    frame.to_csv(tmp_path / "new.csv", index=False)
    arguments = ["score", folder / "model.safetensors", tmp_path / "new.csv", "-o", tmp_path / "s.csv"]
    result = run(*arguments, "--label", "species", "--id", "id", "--json")
    assert result.stderr == "sepc: labels unknown to the model count as mistakes: 'tulip'\n"
    assert json.loads(result.stdout)["accuracy"] <= 0.8
    (tmp_path / "s.csv").unlink()
    assert "knows none of the labels 'flower" in fail(*arguments, "--label", "id")
    assert not (tmp_path / "s.csv").exists()


@pytest.mark.parametrize("source", ["new.csv", "new.parquet", "new.npz"])
def test_explain(folder: Path, source: str) -> None:
    model = SEPC.load(folder / "model.safetensors")
    points = np.array(iris()[FEATURES][100:])
    arguments = ["explain", folder / "model.safetensors", folder / source, "--row", 3, "--row", 0]
    assert succeed(*arguments) == f"row 3: {model.explain(points, 3)}\n\nrow 0: {model.explain(points, 0)}\n"
    reported = json.loads(succeed(*arguments, "--json"))
    assert [reason["row"] for reason in reported] == [3, 0]
    assert reported[0]["label"] == model.predict(points)[3]
    assert set(reported[0]["features"]) == set(FEATURES)


def test_explain_needs_only_the_rows_it_explains(folder: Path, tmp_path: Path) -> None:
    frame = pd.read_csv(folder / "new.csv")
    frame.loc[5, "petal width"] = np.nan
    frame.to_csv(tmp_path / "new.csv", index=False)
    arguments = ["explain", folder / "model.safetensors", tmp_path / "new.csv", "--row"]
    assert succeed(*arguments, 3).startswith("row 3: label ")
    assert "row 5: petal width: the value is missing" in fail(*arguments, 5)


def test_overlap(folder: Path) -> None:
    from sepc_torch import landscape

    arguments = ["overlap", folder / "train.csv", "--label", "species", "--ignore", "id"]
    frame = iris()[:100]
    seen = landscape(frame[FEATURES], frame["species"])
    assert succeed(*arguments) == f"{seen}\n"
    reported = json.loads(succeed(*arguments, "--json"))
    assert {c["label"]: c["overlap_ratio"] for c in reported["classes"]} == pytest.approx(seen.overlap_ratio)
    assert [tuple(pair["labels"]) for pair in reported["pairs"]] == list(seen.pairs)


def edited(folder: Path, tmp_path: Path, edit: Callable[[pd.DataFrame], Any]) -> Path:
    frame = pd.read_csv(folder / "new.csv").astype(object)
    changed = edit(frame)
    path = tmp_path / "edited.csv"
    (frame if changed is None else changed).to_csv(path, index=False)
    return path


def put(row: int, column: str, value: str | float | None) -> Callable[[pd.DataFrame], None]:
    def edit(frame: pd.DataFrame) -> None:
        frame.loc[row, column] = value

    return edit


ERRORS_IN_CELLS = {
    "text": (put(7, "petal width", "wide"), "row 7: petal width: 'wide' is not a finite number"),
    "missing": (put(8, "sepal width", None), "row 8: sepal width: the value is missing"),
    "infinite": (put(9, "sepal width", np.inf), "row 9: sepal width: 'inf' is not a finite number"),
    "400 digits": (
        lambda frame: frame.assign(**{"sepal width": [int("9" * 400), *range(len(frame) - 1)]}),
        f"row 0: sepal width: '{'9' * 36}... is not a finite number",
    ),
    "long text": (put(7, "petal width", "w" * 5000), f"'{'w' * 36}... is not a finite number"),
    "no column": (
        lambda frame: frame.drop(columns=["petal width", "sepal width"]),
        "has no columns 'sepal width', 'petal width'. It has 'id', 'sepal length', 'petal length', 'species'",
    ),
    "no rows": (lambda frame: frame[:0], "has no rows"),
}


@pytest.mark.parametrize("error", ERRORS_IN_CELLS)
def test_errors_name_the_cell_or_column(folder: Path, tmp_path: Path, error: str) -> None:
    edit, message = ERRORS_IN_CELLS[error]
    path = edited(folder, tmp_path, edit)
    reported = fail("score", folder / "model.safetensors", path, "-o", tmp_path / "s.csv")
    assert repr(str(path)) in reported
    assert message in reported
    if error not in ("no column", "no rows"):
        fitting = ["fit", path, "--label", "species", "--ignore", "id", "-o", tmp_path / "m.safetensors"]
        assert message in fail(*fitting)
        assert message in fail("overlap", path, "--label", "species", "--ignore", "id")
    assert list(tmp_path.iterdir()) == [path]


NPY = io.BytesIO()
np.save(NPY, np.eye(2))
ERRORS_IN_FILES: dict[str, tuple[str, bytes | None, str]] = {
    "absent": ("absent.csv", None, "There is no file"),
    "unknown suffix": ("data.xlsx", b"x", "must end in .csv or .csv.gz or .tsv"),
    "empty": ("data.csv", b"", "is not a usable CSV file (the file is empty)"),
    "not text": ("data.csv", b"\xff\xfe\x00\x01\x80", "is not a usable CSV file"),
    "cut gzip": ("data.csv.gz", gzip.compress(b"a,species\n1,x\n" * 99)[:30], "is not a usable CSV file"),
    "equal columns": ("data.csv", b"a,b,,,a,b,species\n1,2,,,3,4,x\n", "more than one column 'a', 'b'; give each"),
    "equal escaped columns": ("data.csv", b"=a,'=a,species\n1,2,x\n", "more than one column '=a'"),
    "broken parquet": ("data.parquet", b"PAR1 and no more", "is not a usable PARQUET file"),
    "single array": ("data.npz", NPY.getvalue(), "is not a usable NPZ file (File is not a zip file"),
    "broken npz": ("data.npz", b"PK\x03\x04 and no more", "is not a usable NPZ file"),
    "other separator": (
        "data.csv",
        b"a:b:species\n1:2:x\n",
        "has no column 'species'. It has 'a:b:species'.",
    ),
}


def parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def archive(name: str) -> bytes:
    """NPZ file with text in place of an array."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, "text")
    return buffer.getvalue()


ERRORS_IN_FILES |= {
    "text in npz": ("data.npz", archive("X"), "is not a usable NPZ file (X is not an array)"),
    "text as npy": ("data.npz", archive("X.npy"), "is not a usable NPZ file (X is not an array)"),
    "equal parquet columns": (
        "data.parquet",
        parquet(pa.Table.from_arrays([[1.0], [2.0], ["x"]], names=["a", "a", "species"])),
        "is not a usable PARQUET file (it has more than one column 'a'; give each",
    ),
}


@pytest.mark.parametrize("error", ERRORS_IN_FILES)
def test_errors_name_a_broken_file(folder: Path, tmp_path: Path, error: str) -> None:
    name, content, message = ERRORS_IN_FILES[error]
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    reported = fail("fit", path, "--label", "species", "-o", tmp_path / "m.safetensors")
    assert repr(str(path)) in reported
    assert message in reported
    reported = fail("score", folder / "model.safetensors", path, "--label", "species", "-o", tmp_path / "s.csv")
    assert message in reported
    assert not [p for p in tmp_path.iterdir() if p != path]


def test_rows_with_another_number_of_fields(tmp_path: Path) -> None:
    for text, message in (
        ("a,b,species\n1,2,x\n1,2,x,4,5\n", "row 1: the row has 5 fields, expected 3"),
        ("a,b,species\n1,2,3,x\n1,2,3,y\n", "row 0: the row has 4 fields, expected 3"),
    ):
        (tmp_path / "data.csv").write_text(text)
        assert message in fail("fit", tmp_path / "data.csv", "--label", "species", "-o", tmp_path / "m.safetensors")


def test_an_index_that_is_no_column(tmp_path: Path) -> None:
    """The metadata of pandas name a column that the file lacks."""
    table = pa.table({"a": [*range(9)], "b": [0.0, 1.0, 0.5] * 3, "species": ["x", "y", "x"] * 3})
    described = {"pandas": json.dumps({"index_columns": ["name"], "columns": [], "column_indexes": []})}
    (tmp_path / "data.parquet").write_bytes(parquet(table.replace_schema_metadata(described)))
    succeed("fit", tmp_path / "data.parquet", "--label", "species", "-o", tmp_path / "m.safetensors")


ERRORS_IN_NPZ: dict[str, tuple[dict[str, Any], str]] = {
    "no X": ({"Z": np.eye(3)}, "the array 'X' or 'embeddings' is missing; the file has 'Z'"),
    "objects": ({"X": np.array([[1, "a"]], dtype=object)}, "X is an array of Python objects"),
    "one dimension": ({"X": np.arange(3.0)}, "X must have shape (rows, columns), got (3,)"),
    "names": ({"X": np.eye(3), "feature_names": ["a", "b"]}, "X has 3 columns and feature_names has 2 names"),
    "equal names": ({"X": np.eye(3), "feature_names": ["a", "b", "a"]}, "more than one column 'a'"),
    "labels": ({"X": np.eye(3), "y": np.arange(2)}, "X has 3 rows and y has shape (2,)"),
    "a feature y": ({"X": np.eye(2), "y": np.arange(2), "feature_names": ["x", "y"]}, "more than one column 'y'"),
    "complex": ({"X": np.eye(2) * 1j, "y": np.arange(2)}, "is not a usable NPZ file"),
    "no labels": ({"X": np.eye(2)}, "Name the label column of"),
}


@pytest.mark.parametrize("error", ERRORS_IN_NPZ)
def test_errors_in_npz_files(tmp_path: Path, error: str) -> None:
    arrays, message = ERRORS_IN_NPZ[error]
    np.savez(tmp_path / "data.npz", **arrays)
    assert message in fail("fit", tmp_path / "data.npz", "-o", tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


def test_errors_in_labels(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "m.safetensors"
    train = folder / "train.csv"
    assert "has no column 'kind'. It has 'id', 'sepal length'" in fail("fit", train, "--label", "kind", "-o", output)
    assert "has no column 'ID'" in fail("fit", train, "--label", "species", "--ignore", "ID", "-o", output)
    assert "with --label; the file has 'id'" in fail("fit", train, "-o", output)
    reported = fail("fit", train, "--label", "species", "-o", output)
    assert "row 0: id: 'flower" in reported
    assert "is not a finite number" in reported
    unlabelled = edited(folder, tmp_path, put(4, "species", None))
    reported = fail("fit", unlabelled, "--label", "species", "--ignore", "id", "-o", output)
    assert "row 4, column 'species': the label is missing" in reported
    single = edited(folder, tmp_path, lambda frame: frame.assign(species="x"))
    assert "single class 'x'" in fail("fit", single, "--label", "species", "--ignore", "id", "-o", output)
    ignored = [item for column in ["id", *FEATURES] for item in ("--ignore", column)]
    assert "no feature column besides the label" in fail("fit", train, "--label", "species", *ignored, "-o", output)
    assert not output.exists()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("nowhere/s.csv", "there is no folder"),
        ("", "its name must end in .csv or .csv.gz or .tsv or .jsonl or .parquet"),
        ("s.xlsx", "its name must end in .csv or .csv.gz or .tsv or .jsonl or .parquet"),
        ("taken.csv", "it is a folder"),
        ("new.csv", "The output is the input file"),
    ],
)
def test_an_unwritable_output_is_rejected_before_any_work(
    folder: Path, tmp_path: Path, output: str, message: str
) -> None:
    (tmp_path / "taken.csv").mkdir()
    (tmp_path / "new.csv").write_bytes((folder / "new.csv").read_bytes())
    before = sorted(tmp_path.iterdir())
    reported = fail("score", folder / "model.safetensors", tmp_path / "new.csv", "-o", tmp_path / output)
    assert message in reported
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "new.csv").read_bytes() == (folder / "new.csv").read_bytes()


def test_fit_refuses_to_overwrite_data(folder: Path) -> None:
    reported = fail("fit", folder / "train.npz", "-o", folder / "train.csv")
    assert "its name must end in .safetensors" in reported


def test_a_failed_write_leaves_the_old_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "s.csv"
    output.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ScoreWriter, "write", full)
    assert "No space left on device" in fail("score", folder / "model.safetensors", folder / "new.csv", "-o", output)
    assert output.read_text() == "old"
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_scores_have_the_default_file_mode(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    succeed("score", folder / "model.safetensors", folder / "new.csv", "-o", tmp_path / "s.csv")
    assert (tmp_path / "s.csv").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_errors_in_the_model_file(folder: Path, part: Partition, tmp_path: Path) -> None:
    rest = [folder / "new.csv", "-o", tmp_path / "s.csv"]
    assert "There is no file" in fail("score", tmp_path / "absent.safetensors", *rest)
    assert "is not a complete safetensors file" in fail("score", folder / "new.csv", *rest)
    part.save(tmp_path / "partition.safetensors")
    assert "holds a partition, not a sepc" in fail("score", tmp_path / "partition.safetensors", *rest)
    assert not (tmp_path / "s.csv").exists()


def test_errors_in_rows_and_ids(folder: Path, tmp_path: Path) -> None:
    model, new = folder / "model.safetensors", folder / "new.csv"
    assert "has no row 50; it has the rows 0 to 49" in fail("explain", model, new, "--row", 50)
    named = pd.read_csv(new).rename(columns={"id": "trust"})
    named.to_csv(tmp_path / "named.csv", index=False)
    arguments = ["score", model, tmp_path / "named.csv", "-o", tmp_path / "s.csv", "--id", "trust"]
    assert "--id 'trust' is also the name of a score" in fail(*arguments)
    assert not (tmp_path / "s.csv").exists()


def test_ids_with_many_digits(folder: Path, tmp_path: Path) -> None:
    """CSV holds whole numbers of any length, Parquet holds 64 bits: longer ones stay text."""
    large = [10**400 + i for i in range(50)]
    pd.read_csv(folder / "new.csv").assign(id=[str(number) for number in large]).to_csv(tmp_path / "d.csv", index=False)
    arguments = ["score", folder / "model.safetensors", tmp_path / "d.csv", "--id", "id", "--id", "id", "-o"]
    succeed(*arguments, tmp_path / "s.csv")
    scored = pd.read_csv(tmp_path / "s.csv")
    assert scored.columns.tolist() == ["id", *SCORES], "a column that is named twice is copied once"
    assert scored["id"].map(int).tolist() == large
    succeed(*arguments, tmp_path / "s.parquet")
    assert pd.read_parquet(tmp_path / "s.parquet")["id"].tolist() == list(map(str, large))


@pytest.mark.slow
def test_a_missing_package_is_no_damaged_file(folder: Path) -> None:
    program = (
        "import sys; sys.modules['pyarrow.parquet'] = None; from sepc_torch.cli import app; "
        "app(['paper', 'explain', *sys.argv[1:], '--row', '0'])"
    )
    command = [sys.executable, "-c", program, str(folder / "model.safetensors"), str(folder / "new.parquet")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "sepc: pyarrow.parquet is not installed: pip install 'sepc_torch[all]'\n"


def test_no_control_characters_are_printed(folder: Path, tmp_path: Path) -> None:
    odd = tmp_path / "\x1b[2J"
    odd.mkdir()
    frame = iris().rename(columns={"petal width": "p\x1b]0;title\x07", "id": "i\x1b[31m"})
    frame.assign(species="\x1b[2J" + frame["species"]).to_csv(odd / "d.csv", index=False)
    options = ["--label", "species", "--ignore", "i\x1b[31m"]
    results = [
        run("fit", odd / "d.csv", *options, "-o", odd / "m.safetensors"),
        run("overlap", odd / "d.csv", *options),
        run("explain", odd / "m.safetensors", odd / "d.csv", "--row", 3),
        run("score", odd / "m.safetensors", odd / "d.csv", "-o", odd / "s.csv"),
        run("score", folder / "model.safetensors", odd / "d.csv", "-o", odd / "s.csv"),
        run("explain", odd / "m.safetensors", odd / "d.csv", "--row", 3, "--json"),
    ]
    assert [result.exit_code for result in results] == [0, 0, 0, 0, 2, 0]
    for result in results:
        assert "x1b" in result.output or "u001b" in result.output
        assert all(character.isprintable() or character == "\n" for character in result.output)


def test_formulas_in_scores(tmp_path: Path) -> None:
    """The exported scores hold no formula, and a fit on the export learns the labels of the model."""
    frame = iris()
    frame = frame.assign(species="=" + frame["species"]).rename(columns={"id": "@id"})
    frame.to_csv(tmp_path / "d.csv", index=False)
    succeed("fit", tmp_path / "d.csv", "--label", "species", "--ignore", "@id", "-o", tmp_path / "m.safetensors")
    copied = [option for name in ["@id", *FEATURES] for option in ("--id", name)]
    succeed("score", tmp_path / "m.safetensors", tmp_path / "d.csv", *copied, "-o", tmp_path / "s.csv")
    scored = pd.read_csv(tmp_path / "s.csv")
    assert scored.columns.tolist() == ["'@id", *FEATURES, *SCORES]
    assert set(scored["label"]) == {"'=setosa", "'=versicolor", "'=virginica"}
    ignored = [option for name in ["@id", *SCORES[1:]] for option in ("--ignore", name)]
    succeed("fit", tmp_path / "s.csv", "--label", "label", *ignored, "-o", tmp_path / "again.safetensors")
    assert SEPC.load(tmp_path / "again.safetensors").classes == SEPC.load(tmp_path / "m.safetensors").classes


@pytest.mark.parametrize(
    "arguments",
    [
        ["fit"],
        ["fit", "data.csv"],
        ["fit", "data.csv", "-o", "m.safetensors", "--max-impure", "-1"],
        ["fit", "data.csv", "-o", "m.safetensors", "--nearest", "manhattan"],
        ["score", "m.safetensors", "new.csv", "-o", "s.csv", "--threshold", "2"],
        ["explain", "m.safetensors", "new.csv"],
        ["explain", "m.safetensors", "new.csv", "--row", "first"],
        ["dance"],
    ],
)
def test_wrong_arguments_exit_with_code_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_an_unknown_solver_is_a_one_line_error(folder: Path, tmp_path: Path) -> None:
    reported = fail("fit", folder / "train.npz", "-o", tmp_path / "m.safetensors", "--solver", "abacus")
    assert "abacus" in reported


def test_numbers_are_read_exactly(rng: np.random.Generator, tmp_path: Path) -> None:
    """Text to float64 and back, and numbers that pandas stores as objects or nullable integers."""
    X = rng.normal(size=(100, 2)) * 10.0 ** rng.integers(-12, 12, size=(100, 2))
    pd.DataFrame(X, columns=["a", "b"]).assign(y=0).to_csv(tmp_path / "d.csv", index=False)
    frame, labels = _labelled_table(open_rows(tmp_path / "d.csv"), "y", [])
    np.testing.assert_array_equal(frame.to_numpy(), X)
    assert labels.tolist() == [0] * 100
    frame = pd.DataFrame(
        {"a": pd.array([1, 2], dtype="Int64"), "b": pd.array([True, False], dtype="boolean"), "c": ["1.5", "2e3"]}
    )
    frame.assign(y=["p", "q"]).to_parquet(tmp_path / "d.parquet")
    frame, labels = _labelled_table(open_rows(tmp_path / "d.parquet"), "y", [])
    np.testing.assert_array_equal(frame.to_numpy(), [[1.0, 1.0, 1.5], [2.0, 0.0, 2000.0]])
    assert labels.tolist() == ["p", "q"]


def test_dates_are_not_numbers(tmp_path: Path) -> None:
    pd.DataFrame({"when": pd.to_datetime(["2020-01-01", "2021-01-01"]), "y": [0, 1]}).to_parquet(tmp_path / "d.parquet")
    reported = fail("fit", tmp_path / "d.parquet", "--label", "y", "-o", tmp_path / "m.safetensors")
    assert "'when' holds dates or times" in reported


def test_an_index_of_a_parquet_file_is_not_a_feature(folder: Path, tmp_path: Path) -> None:
    pd.read_csv(folder / "new.csv").set_index("id")[::-1].to_parquet(tmp_path / "new.parquet")
    succeed("score", folder / "model.safetensors", tmp_path / "new.parquet", "-o", tmp_path / "s.csv")
    succeed("score", folder / "model.safetensors", folder / "new.csv", "-o", tmp_path / "t.csv")
    backward, forward = pd.read_csv(tmp_path / "s.csv"), pd.read_csv(tmp_path / "t.csv")
    assert backward["label"].tolist() == forward["label"].tolist()[::-1]
    assert backward["row"].tolist() == forward["row"].tolist()


@pytest.mark.slow
def test_errors_in_a_separate_process(tmp_path: Path) -> None:
    """The error is one line on standard error, and the exit code is 2."""
    command = [
        sys.executable,
        "-m",
        "sepc_torch.cli",
        "paper",
        "fit",
        str(tmp_path / "absent.csv"),
        "-o",
        "model.safetensors",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"sepc: There is no file '.*absent.csv'\.\n", done.stderr)


def test_importing_the_command_line_is_fast() -> None:
    """The help loads no command: neither torch nor pandas."""
    code = (
        "import sys; from sepc_torch.cli import app; app(['--help'], standalone_mode=False); "
        "print(sorted({'numpy', 'torch', 'pandas', 'pyarrow', 'sklearn', 'cvxpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_help_has_the_first_sentences_of_the_commands() -> None:
    for table, group in ((_COMMANDS, []), (_PAPER, ["paper"])):
        for name, (module, function, summary) in table.items():
            written = getattr(import_module(f"sepc_torch.{module}"), function).__doc__.splitlines()[0]
            assert written == summary
            shown = CliRunner().invoke(app, [*group, name, "--help"])
            assert shown.exit_code == 0
            assert summary.split()[0] in shown.stdout


def test_each_kind_of_model_has_its_commands(folder: Path, tmp_path: Path) -> None:
    rest = [str(folder / "new.csv"), "-o", str(tmp_path / "s.csv")]
    refused = CliRunner().invoke(app, ["score", str(folder / "model"), *rest])
    assert refused.exit_code == 2
    assert "holds the paper's classifier: use `sepc paper score`" in refused.stderr
    np.savez(tmp_path / "d.npz", X=iris()[FEATURES].to_numpy(), y=iris()["species"].to_numpy(dtype=str))
    fitted = CliRunner().invoke(app, ["fit", str(tmp_path / "d.npz"), "-o", str(tmp_path / "head")])
    assert fitted.exit_code == 0, fitted.output
    assert "holds a calibrated model: use `sepc score`" in fail("score", tmp_path / "head", *rest)


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    printed = succeed("demo", tmp_path / "shown")
    written = {path.name for path in (tmp_path / "shown").iterdir()}
    models = {"wdbc.partition.safetensors", "wdbc.safetensors", "digits.head.safetensors"}
    assert written == models | {"moons.png", "moons-decisions.png", "report.html", "report.json"}
    assert all(name in printed for name in written)
    for said in (
        "OUTSIDE",
        "half of the records",
        "A trusted record",
        "A record far outside",
        "A mistake",
        "runner-up",
    ):
        assert said in printed
    assert SEPC.load(tmp_path / "shown" / "wdbc.safetensors").dim == 30
    assert TrustHead.load(tmp_path / "shown" / "digits.head.safetensors").accept_at(flag_rate=0.1).found
    assert Partition.load(tmp_path / "shown" / "wdbc.partition.safetensors").dim == 30
    assert all((tmp_path / "shown" / name).stat().st_size > 50_000 for name in ("moons.png", "moons-decisions.png"))


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet", ".npz"])
def test_a_table_that_does_not_fit_into_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, suffix: str
) -> None:
    data = tmp_path / f"rows{suffix}"
    frame = pd.DataFrame({"a": np.arange(50.0), "b": np.arange(50.0) % 7, "y": [0, 1] * 25})
    if suffix == ".npz":
        np.savez(data, X=np.ascontiguousarray(frame[["a", "b"]]), y=frame["y"].to_numpy())
    else:
        frame.to_parquet(data) if suffix == ".parquet" else frame.to_csv(data, index=False)
    monkeypatch.setattr(memory, "available_memory", lambda: 100)
    reported = fail("fit", data, "-l", "y", "-o", tmp_path / "model")
    assert "needs about" in reported
    assert "with `sepc fit`, which reads a sample" in reported
    assert not (tmp_path / "model.safetensors").exists()
