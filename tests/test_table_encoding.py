"""Encoding of tables: the same numbers as scikit-learn's transformers, through files and in heads."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from sklearn.compose import ColumnTransformer
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from sepc_torch import DriftMonitor, FileFormatError, TrustHead, write_report
from sepc_torch.data import files
from sepc_torch.data.table_encoding import CategoryColumn, TableEncoding

Rng = np.random.Generator
NUMBERS, CATEGORIES = ["a", "b", "c"], ["colour", "shape"]


def frame(rng: Rng, rows: int, gaps: bool = True) -> pd.DataFrame:
    table = pd.DataFrame(rng.normal(size=(rows, 3)) * [1.0, 50.0, 1e-3] + [0.0, 1e4, 0.0], columns=NUMBERS)
    table["colour"] = rng.choice(["red", "green", "blue", "rare 1", "rare 2"], rows, p=[0.4, 0.3, 0.28, 0.01, 0.01])
    table["shape"] = rng.choice(["round", "square"], rows)
    if gaps:
        table.loc[rng.random(rows) < 0.2, "b"] = np.nan
        table.loc[rng.random(rows) < 0.1, "shape"] = None
    return table


def of_sklearn(train: pd.DataFrame, table: pd.DataFrame) -> np.ndarray:
    """Numbers, then indicators, then categories, by scikit-learn alone."""
    one_hot = OneHotEncoder(min_frequency=5, max_categories=32, handle_unknown="infrequent_if_exist")
    transformer = ColumnTransformer(
        [
            ("numbers", make_pipeline(SimpleImputer(strategy="median"), StandardScaler()), NUMBERS),
            ("gaps", MissingIndicator(features="missing-only", error_on_new=False), NUMBERS),
            ("kinds", make_pipeline(SimpleImputer(strategy="constant", fill_value="(missing)"), one_hot), CATEGORIES),
        ],
        sparse_threshold=0.0,
    )
    as_objects = [part.astype(dict.fromkeys(CATEGORIES, object)) for part in (train, table)]
    for part in as_objects:
        part[CATEGORIES] = part[CATEGORIES].where(part[CATEGORIES].notna(), np.nan)
    return np.asarray(transformer.fit(as_objects[0]).transform(as_objects[1]), dtype=np.float64)


def test_encoding_equals_scikit_learn(rng: Rng) -> None:
    train, new = frame(rng, 300), frame(rng, 50)
    encoding = TableEncoding.fit(train, NUMBERS, CATEGORIES)
    new.loc[0, "colour"] = "never seen"
    for table in (train, new):
        np.testing.assert_allclose(encoding.encode(table).points, of_sklearn(train, table), rtol=0, atol=1e-12)
    assert len(encoding.feature_names) == encoding.encode(train).points.shape[1]


def test_memory_grows_with_the_rows_and_not_with_the_square_of_the_categories() -> None:
    names = tuple(map(str, range(5000)))
    encoding = TableEncoding((), (CategoryColumn("c", names, False),))
    tracemalloc.start()
    try:
        found = encoding.encode({"c": np.array(["7", "4999"], dtype=object)}).points
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.argwhere(found).tolist() == [[0, 7], [1, 4999]]
    assert peak < 5e6, "a matrix of all pairs of categories has 200 MB"


def test_text_is_encoded_like_numbers(rng: Rng) -> None:
    """A CSV file gives text; the encoding reads the same values from it."""
    train, new = frame(rng, 100), frame(rng, 20)
    encoding = TableEncoding.fit(train, NUMBERS, CATEGORIES)
    text = {name: np.array(["" if pd.isna(v) else str(v) for v in new[name]], dtype=object) for name in new}
    np.testing.assert_array_equal(encoding.encode(text).points, encoding.encode(new).points)


def test_a_file_holds_the_encoding_exactly(rng: Rng) -> None:
    encoding = TableEncoding.fit(frame(rng, 100), NUMBERS, CATEGORIES, ["?"])
    assert TableEncoding.from_dict(json.loads(json.dumps(encoding.to_dict()))) == encoding


def test_rows_that_are_no_numbers_have_a_problem(rng: Rng) -> None:
    table = frame(rng, 100)
    encoding = TableEncoding.fit(table, NUMBERS, CATEGORIES)
    wrong = table.astype(object)
    wrong.loc[3, "a"], wrong.loc[7, "b"], wrong.loc[8, "a"] = "wide", np.inf, None
    found = encoding.encode(wrong)
    assert found.problems == {3: "a: 'wide' is not a finite number", 7: "b: inf is not a finite number"}
    assert np.flatnonzero(np.isnan(found.points).all(axis=1)).tolist() == [3, 7]
    assert found.filled == {"a": 1}, "column b has gaps in training"
    with pytest.raises(ValueError, match=r"lacks the columns \['c'\]"):
        encoding.encode(table.drop(columns="c"))


BROKEN: dict[str, Any] = {
    "empty": {},
    "no columns": {"numbers": [], "categories": [], "missing": []},
    "text as scale": {"numbers": [{"name": "a", "median": 0.0, "mean": 0.0, "scale": "1", "gaps": False}]},
    "no scale": {"numbers": [{"name": "a", "median": 0.0, "mean": 0.0, "scale": 0.0, "gaps": False}]},
    "unknown key": {"numbers": [{"name": "a", "other": 1}]},
    "number as category": {"categories": [{"name": "a", "categories": [1], "other": False}]},
    "list": [],
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_descriptions_are_refused(case: str) -> None:
    whole: dict[str, Any] = {"numbers": [], "categories": [], "missing": []}
    described = whole | BROKEN[case] if BROKEN[case] and isinstance(BROKEN[case], dict) else BROKEN[case]
    with pytest.raises(ValueError, match="the encoding of the table"):
        TableEncoding.from_dict(described)


@pytest.fixture(scope="module")
def fitted() -> tuple[TrustHead, pd.DataFrame, np.ndarray]:
    table = frame(np.random.default_rng(0), 300)
    labels = np.where(table["a"] > 0, "high", "low")
    encoding = TableEncoding.fit(table[:200], NUMBERS, CATEGORIES)
    head = TrustHead.fit(encoding.encode(table[:200]).points, labels[:200], normalize=None)
    return TrustHead(head.projection, head.sepc, head.evidence, encoding=encoding), table, labels


def test_a_head_with_an_encoding_takes_tables(
    fitted: tuple[TrustHead, pd.DataFrame, np.ndarray], tmp_path: Path
) -> None:
    head, table, labels = fitted
    held = table[200:].reset_index(drop=True)
    head.calibrate(held, labels[200:])
    head.save(tmp_path / "head.safetensors")
    again = TrustHead.load(tmp_path / "head.safetensors")
    assert again.encoding == head.encoding
    assert again.feature_names == head.encoding.feature_names  # type: ignore[union-attr]
    shuffled = held[held.columns[::-1]].assign(more=1.0)
    points = head.encoding.encode(held).points  # type: ignore[union-attr]
    for found in (again.judge(shuffled), again.judge(points)):
        np.testing.assert_array_equal(found.joint, head.judge(points).joint)
    assert again.predict(shuffled).tolist() == head.predict(points).tolist()


def test_a_head_with_an_encoding_knows_raw_columns_from_encoded_features(
    fitted: tuple[TrustHead, pd.DataFrame, np.ndarray],
) -> None:
    """Numbers without names could be either, so they are refused; all forms of a table give one answer."""
    head, table, labels = fitted
    head.calibrate(table[200:], labels[200:])
    held = table[200:240]
    want = head.judge(held)
    features = head.encode(held)
    columns = {str(name): held[name].to_numpy() for name in held}
    for given in (features, columns, pa.Table.from_pandas(held)):
        np.testing.assert_array_equal(head.judge(given).joint, want.joint)
    np.testing.assert_array_equal(head(torch.from_numpy(features)).joint, want.joint)
    numbers = np.asarray(features)
    for bare in (numbers, numbers.tolist(), torch.from_numpy(numbers), held[NUMBERS].to_numpy()):
        for call in (
            head.judge,
            head.explain,
            head.encode,
            head.predict,
            head.novelties,
            DriftMonitor(head).update,
            lambda z: head.calibrate(z, labels[200:240]),
            lambda z: head.update(z, labels[200:240]),
            lambda z: write_report(head, z, labels[200:240]),
        ):
            with pytest.raises(TypeError, match=r"does not say whether its numbers are encoded. Pass the table"):
                call(bare)
    with pytest.raises(ValueError, match="more than one column 'a'"):
        head.judge(pd.concat([held, held[["a"]]], axis=1))


def test_a_file_with_another_encoding_is_refused(
    fitted: tuple[TrustHead, pd.DataFrame, np.ndarray], tmp_path: Path
) -> None:
    head = fitted[0]
    head.save(tmp_path / "head.safetensors")
    arrays, options = files.read(tmp_path / "head.safetensors", "trust_head")
    options["encoding"]["numbers"][0]["name"] = "other"
    files.write(tmp_path / "other.safetensors", "trust_head", arrays, options)
    with pytest.raises(FileFormatError, match="does not give the features of the head"):
        TrustHead.load(tmp_path / "other.safetensors")
