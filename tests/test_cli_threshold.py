"""The command ``sepc threshold``: decisions by a column of scores, every option, files, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from sepc_torch import accept_scores
from sepc_torch.cli import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["threshold", *map(str, arguments)])


def succeed(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def fail(*arguments: object) -> str:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


@pytest.fixture
def rows(rng: np.random.Generator) -> pd.DataFrame:
    """1000 rows of which the last 200 are new; a prediction of score s is wrong with probability (1 - s) / 2."""
    score = rng.random(1000)
    right = pd.Series(rng.random(1000) >= (1.0 - score) / 2).map({True: "yes", False: "no"})
    right[800:] = None
    site = np.where(np.arange(1000) % 2, "north", "south")
    return pd.DataFrame(
        {
            "key": np.arange(1000) + 7,
            "s": score,
            "distance": -score,
            "ok": right,
            "site": site,
            "visit": np.arange(1000) // 4,
        }
    )


@pytest.fixture
def file(rows: pd.DataFrame, tmp_path: Path) -> Path:
    path = tmp_path / "scores.csv"
    rows.to_csv(path, index=False)
    return path


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_the_decisions_are_those_of_the_library(rows: pd.DataFrame, tmp_path: Path, suffix: str) -> None:
    rows.loc[5, "s"] = np.nan
    path, out = tmp_path / f"scores.{suffix}", tmp_path / f"decisions.{suffix}"
    rows.to_csv(path, index=False) if suffix == "csv" else rows.to_parquet(path)
    text = succeed(path, "--score", "s", "--right", "ok", "--risk", 0.2, "--out", out, "--id", "key")
    old = rows[:800]
    rule = accept_scores(old["s"], old["ok"] == "yes", risk=0.2)
    assert text.startswith(str(rule))
    assert "of 200 new rows are accepted" in text
    found = pd.read_csv(out) if suffix == "csv" else pd.read_parquet(out)
    assert list(found) == ["key", "score", "accept"]
    assert found["key"].tolist() == rows["key"].tolist()
    assert found["accept"].tolist() == rule(rows["s"]).tolist()
    assert not found["accept"][5]


def test_groups_units_costs_and_flag_rates(rows: pd.DataFrame, file: Path) -> None:
    old = rows[:800]
    right: Any = old["ok"] == "yes"
    common = file, "--score", "s", "--right", "ok", "--json"
    by = json.loads(succeed(*common, "--risk", 0.3, "--by", "site"))
    wanted = accept_scores(old["s"], right, risk=0.3, by=old["site"])
    assert [row["threshold"] for row in by["groups"]] == [row.threshold for row in wanted.groups]
    over = json.loads(succeed(*common, "--risk", 0.4, "--units", "visit"))
    assert over["threshold"] == accept_scores(old["s"], right, risk=0.4, units=old["visit"].astype(str)).threshold
    cost = json.loads(succeed(*common, "--cost", 4, "--review", 1))
    assert cost["bound"] == accept_scores(old["s"], right, costs=4.0, review=1.0).promise.bound
    rate = json.loads(succeed(file, "--score", "s", "--flag-rate", 0.1, "--json"))
    assert rate["threshold"] == accept_scores(rows["s"], flag_rate=0.1).threshold


def test_low_scores_can_be_the_safe_ones(file: Path, tmp_path: Path) -> None:
    high = json.loads(succeed(file, "--score", "s", "--right", "ok", "--risk", 0.2, "--json"))
    out = tmp_path / "decisions.csv"
    low = file, "--score", "distance", "--lower-is-safer", "--right", "ok", "--risk", 0.2
    assert json.loads(succeed(*low, "--json", "-o", out))["threshold"] == -high["threshold"]
    decided = pd.read_csv(out)
    assert (decided["accept"] == (decided["score"] <= -high["threshold"])).all()
    assert "(-distance >= " in succeed(*low)


def test_the_picture_is_written(file: Path, tmp_path: Path) -> None:
    for name in ("risk.png", "risk.svg"):
        succeed(file, "--score", "s", "--right", "ok", "--risk", 0.2, "--plot", tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000


def test_right_may_be_a_number_with_a_fraction(rows: pd.DataFrame, file: Path, tmp_path: Path) -> None:
    """As pandas writes 0, 1 and empty cells."""
    rows.assign(ok=rows["ok"].map({"yes": 1.0, "no": 0.0})).to_csv(tmp_path / "numbers.csv", index=False)
    options = ("--score", "s", "--right", "ok", "--risk", 0.2, "--json")
    assert succeed(tmp_path / "numbers.csv", *options) == succeed(file, *options)


def test_a_picture_without_right_is_refused_before_anything_is_written(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    result = run(file, "--score", "s", "--flag-rate", 0.1, "-o", out, "--plot", tmp_path / "p.png")
    assert result.exit_code == 2
    assert "--right" in result.stderr
    assert not out.exists()


def test_a_risk_that_cannot_be_promised_is_noted(file: Path) -> None:
    result = run(file, "--score", "s", "--right", "ok", "--risk", 0.001)
    assert result.exit_code == 0
    assert "nothing is accepted" in result.stdout
    assert "800 rows cannot promise a risk of 0.001" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--score", "s", "--right", "ok"], "exactly one of --risk, --flag-rate and --cost"),
        (["--score", "s", "--right", "ok", "--cost", "1"], "--cost needs --review"),
        (["--score", "s", "--risk", "0.1"], "need right"),
        (["--score", "t", "--right", "ok", "--risk", "0.1"], "has no column 't'"),
        (["--score", "site", "--right", "ok", "--risk", "0.1"], "No cell of 'site'"),
        (
            ["--score", "s", "--right", "site", "--risk", "0.1"],
            "row 0: 'site' must say whether the prediction is right",
        ),
        (["--score", "s", "--right", "ok", "--risk", "0.1", "--units", "ok"], "row 800 has no value of 'ok'"),
        (["--score", "s", "--right", "ok", "--risk", "0"], "a share must lie between 0 and 1, not '0'"),
        (["--score", "s", "--right", "ok", "--risk", "0.1", "-o", "out.txt"], "must end in .csv or .csv.gz"),
        (["--score", "s", "--right", "ok", "--risk", "0.1", "--plot", "out.csv"], "must end in .png"),
    ],
)
def test_errors_are_one_line(file: Path, options: list[str], message: str) -> None:
    (line,) = fail(file, *options).splitlines()
    assert message in line


def test_a_share_can_be_a_percentage(file: Path) -> None:
    columns = ["--score", "s", "--right", "ok"]
    assert run(file, *columns, "--risk", "20%").stdout == run(file, *columns, "--risk", 0.2).stdout
    assert "Did you mean 2%" in fail(file, *columns, "--risk", "2")
    assert "Write 0.05 or 5%" in fail(file, *columns, "--risk", "a fifth")


def test_a_file_without_labelled_rows_is_refused(rows: pd.DataFrame, file: Path) -> None:
    rows[800:].to_csv(file, index=False)
    assert "says in 'ok' whether its prediction is right" in fail(file, "--score", "s", "--right", "ok", "--risk", 0.1)
