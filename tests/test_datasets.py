"""Data sets of the experiments: equal records from the folder and from OpenML, or a clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pandas as pd
import pytest
from sklearn.utils import Bunch

from experiments import datasets


def serve(monkeypatch: pytest.MonkeyPatch, frame: pd.DataFrame, data_id: int) -> None:
    """Replace OpenML by this one table, and unset SEPC_DATA."""

    def fetch(**options: Any) -> Bunch:
        assert options["data_id"] == data_id
        assert options["cache"]
        return Bunch(frame=frame)

    monkeypatch.delenv("SEPC_DATA", raising=False)
    monkeypatch.setattr(datasets, "fetch_openml", fetch)


def like_openml_adult(folder: Path) -> pd.DataFrame:
    """The records as OpenML lists them: test set first, categories typed, its own name for the label."""
    table = pd.read_csv(folder / "adult.csv.gz", na_values="?")
    table = pd.concat([table[table["split"] == "test"], table[table["split"] == "train"]])
    table = table.drop(columns="split").rename(columns={"income": "class"})
    return table.astype(dict.fromkeys([*datasets.ADULT_CATEGORIES, "class"], "category"))


def like_openml_vertebral(folder: Path) -> pd.DataFrame:
    """The records as OpenML lists them: two decimals, columns V1 to V6, classes 1 and 2."""
    table = pd.read_csv(folder / "vertebral_column_2c.csv")
    values = table[datasets.VERTEBRAL_FEATURES].round(2).set_axis([f"V{i}" for i in range(1, 7)], axis=1)
    return values.assign(Class=table["class"].map({"AB": "1", "NO": "2"}).astype("category"))


def test_adult_from_the_folder_has_the_known_counts(data_dir: Path) -> None:
    assert (data_dir / "adult.csv.gz").is_file()
    income = datasets.adult()["income"]
    assert len(income) == 30162
    assert income.value_counts().to_dict() == {"<=50K": 22654, ">50K": 7508}
    x, y = datasets.adult_stratum()
    assert x.shape == (803, 5)
    assert np.bincount(y).tolist() == [548, 255]
    x, y = datasets.adult_encoded()
    assert x.shape == (30162, 14)
    assert np.bincount(y).tolist() == [22654, 7508]


@pytest.mark.usefixtures("data_dir")
def test_the_stratum_has_the_codes_of_the_paper() -> None:
    table = datasets.adult()
    codes = [sorted(table[name].unique()).index(datasets.STRATUM[name]) for name in datasets.ADULT_CATEGORIES]
    assert codes == [2, 11, 2, 2, 0, 4, 1, 38]


@pytest.mark.usefixtures("data_dir")
def test_vertebral_from_the_folder_has_the_known_counts() -> None:
    x, y = datasets.vertebral()
    assert x.shape == (310, 6)
    assert np.bincount(y).tolist() == [100, 210]


def test_adult_from_openml_is_the_same(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = datasets.adult()
    serve(monkeypatch, like_openml_adult(data_dir), 1590)
    pd.testing.assert_frame_equal(datasets.adult(), expected)


def test_vertebral_from_openml_is_the_same(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = datasets.vertebral()
    serve(monkeypatch, like_openml_vertebral(data_dir), 1524)
    for found, wanted in zip(datasets.vertebral(), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_changed_value_fails_the_checksum(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = like_openml_vertebral(data_dir)
    frame["V3"] = frame["V3"].to_numpy() + np.where(np.arange(len(frame)) == 7, 0.01, 0.0)
    serve(monkeypatch, frame, 1524)
    with pytest.raises(ValueError, match=r"310 records with checksum \w{64}, expected"):
        datasets.vertebral()


def test_another_table_fails_the_checksum(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pd.DataFrame(rng.normal(size=(12, 6))).assign(Class=["1"] * 8 + ["2"] * 4)
    serve(monkeypatch, frame, 1524)
    with pytest.raises(ValueError, match="12 records with checksum"):
        datasets.vertebral()


@pytest.mark.parametrize("folder", ["unset", "empty"])
@pytest.mark.parametrize("name", ["adult", "vertebral"])
def test_offline_says_what_to_do(name: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(**_: Any) -> Bunch:
        raise URLError("no network")

    monkeypatch.setenv("SEPC_DATA", str(tmp_path) if folder == "empty" else "")
    monkeypatch.setattr(datasets, "fetch_openml", unreachable)
    with pytest.raises(RuntimeError, match=rf"no network.*SEPC_DATA.*{datasets.FILES[name]}"):
        getattr(datasets, name)()


@pytest.mark.usefixtures("data_dir")
def test_the_folder_comes_before_openml(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(**_: Any) -> Bunch:
        raise AssertionError("OpenML was asked although SEPC_DATA holds the file")

    monkeypatch.setattr(datasets, "fetch_openml", never)
    assert len(datasets.vertebral()[0]) == 310
