"""Sources of embeddings: arrays on disk, tensors, frames, batches, Arrow tables and Parquet files."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sepc_torch import TrustHead
from sepc_torch.data import arrays
from sepc_torch.head.reading.passes import first_pass
from sepc_torch.head.reading.sources import ArraySource, BatchSource, EmbeddingSource, embedding_source
from sepc_torch.shapes import Array

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
dataset = pytest.importorskip("pyarrow.dataset")

Rng = np.random.Generator


def embeddings(rng: Rng, count: int = 120, dim: int = 4) -> tuple[Array, Array]:
    """Two classes in different directions, in float32; labels are text."""
    codes = rng.permutation(np.arange(count) % 2)
    return (4.0 * np.eye(2, dim)[codes] + rng.normal(size=(count, dim))).astype(np.float32), np.array(["u", "v"])[codes]


def rows_of(source: EmbeddingSource) -> tuple[Array, Array]:
    """All rows of a source, read twice."""
    reads = [list(source.chunks()) for _ in range(2)]
    found = [tuple(np.concatenate([np.asarray(part[i]) for part in parts]) for i in range(2)) for parts in reads]
    assert all((a == b).all() for a, b in zip(*found, strict=True)), "the second pass gave other rows"
    return found[0]  # type: ignore[return-value]


ARRAYS: dict[str, Callable[[Array], Any]] = {
    "float32": lambda x: x,
    "float64": lambda x: x.astype(np.float64),
    "float16": lambda x: x.astype(np.float16),
    "integers": lambda x: (10 * x).astype(np.int64),
    "big-endian": lambda x: x.astype(">f4"),
    "column-major": np.asfortranarray,
    "reversed": lambda x: x[::-1],
    "read-only": lambda x: np.frombuffer(x.tobytes(), np.float32).reshape(x.shape),
    "list": lambda x: x.tolist(),
    "tensor": torch.from_numpy,
    "tensor with gradients": lambda x: torch.from_numpy(x).requires_grad_(),
    "bfloat16 tensor": lambda x: torch.from_numpy(x).bfloat16(),
    "bool tensor": lambda x: torch.from_numpy(x) > 0,
    "frame": pd.DataFrame,
    "frame with missing types": lambda x: pd.DataFrame((10 * x).astype(int)).astype("Int64"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_of_every_kind(rng: Rng, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_CHUNK_VALUES", 28)  # seven rows
    x, y = embeddings(rng)
    given = ARRAYS[kind](x)
    found, labels = rows_of(ArraySource(given, y))
    whole = given.detach().double().numpy() if isinstance(given, Tensor) else np.asarray(given, dtype=np.float64)
    assert found.dtype in (np.float32, np.float64)
    assert (found == whole).all()
    assert (labels == y).all()
    if kind in ("integers", "reversed", "read-only"):
        TrustHead.fit(given, y, dim=2)


def test_a_memmap_is_never_loaded(rng: Rng, tmp_path: Path) -> None:
    """The chunks are views of the file."""
    x, y = embeddings(rng)
    np.save(tmp_path / "x.npy", x)
    stored = np.load(tmp_path / "x.npy", mmap_mode="r")
    for z, _ in ArraySource(stored, y).chunks():
        assert np.shares_memory(z, stored)
    head, expected = TrustHead.fit(stored, y), TrustHead.fit(x, y)
    for name, value in head.state_dict().items():
        assert not isinstance(value, Tensor) or torch.equal(value, expected.state_dict()[name]), name


def test_a_loader_that_shuffles(rng: Rng) -> None:
    x, y = embeddings(rng)
    data = TensorDataset(torch.from_numpy(x), torch.from_numpy((y == "v").astype(int)))
    loader = DataLoader(data, batch_size=13, shuffle=True)
    head, expected = TrustHead.fit(loader, encoder=nn.Identity()), TrustHead.fit(*data.tensors)
    z = torch.from_numpy(embeddings(rng)[0])
    assert torch.allclose(head.projection(z), expected.projection(z), atol=1e-4)
    assert torch.equal(head(z).label, expected(z).label)
    assert head.evidence is not None
    assert expected.evidence is not None
    # Whether points are searched in eleven bits is decided by some of them, which depend on the order. The rounding
    # moves a point by at most 2^-11 of its distance from the origin.
    pair = head.evidence.reference_points, head.evidence.white_reference_points
    moved = max(float(points.offsets.norm(dim=1).amax()) for points in pair) * 2.0**-11
    for a, b in zip(head.evidence.measure(z)[:-1], expected.evidence.measure(z)[:-1], strict=True):
        assert a is not None
        assert b is not None
        assert torch.allclose(a, b, rtol=1e-5, atol=moved)


def test_a_generator_is_encoded_once(rng: Rng) -> None:
    x, y = embeddings(rng)
    calls: list[int] = []

    def encoder(inputs: Tensor) -> Tensor:
        calls.append(len(inputs))
        return 2.0 * inputs.double()

    def batches() -> Iterator[tuple[Tensor, Array]]:
        for start in range(0, 120, 50):
            yield torch.from_numpy(x[start : start + 50]), y[start : start + 50]

    found, labels = rows_of(BatchSource(batches(), encoder))
    assert calls == [50, 50, 20]
    assert (found == 2.0 * x).all()
    assert found.dtype == np.float32
    assert (labels == y).all()
    rows_of(BatchSource(list(batches()), encoder))
    assert len(calls) == 9, "a list of batches is encoded in each of two passes"


class Modes(nn.Module):
    """An encoder that records its mode, and fails on the second batch if told to."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.fails, self.seen = fails, []  # type: ignore[var-annotated]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((self.training, torch.is_grad_enabled()))
        if self.fails and len(self.seen) == 2:
            raise RuntimeError("broken")
        return self.weight * x


@pytest.mark.parametrize("training", [True, False])
def test_the_encoder_keeps_its_mode(training: bool) -> None:
    encoder = Modes().train(training)
    source = BatchSource([(torch.ones(2, 3), [0, 1])] * 2, encoder)
    next(source.chunks())  # an unfinished pass
    assert encoder.training == training
    encoder = Modes(fails=True).train(training)
    with pytest.raises(RuntimeError, match="broken"):
        list(BatchSource([(torch.ones(2, 3), [0, 1])] * 2, encoder).chunks())
    assert encoder.training == training
    assert encoder.seen == [(False, False), (False, False)]
    assert torch.is_grad_enabled()


def test_frozen_parts_of_the_encoder_stay_frozen(rng: Rng) -> None:
    """A network in training whose batch normalisation is in evaluation mode keeps both modes, and its statistics."""
    x, y = embeddings(rng)
    encoder = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())
    TrustHead.fit([(torch.from_numpy(x), y)], encoder=encoder, dim=2)
    assert [part.training for part in encoder.modules()] == [True, True, False]


def test_maps_and_sequences_are_refused_as_in_judge() -> None:
    x, y = torch.randn(40, 1, 8, 8), torch.arange(40) % 2
    convolution = nn.Conv2d(1, 4, 3)
    with pytest.raises(ValueError, match=r"shape \(B, D\), got \(40, 4, 6, 6\). Average a map"):
        TrustHead.fit([(x, y)], encoder=convolution)
    head = TrustHead.fit([(x, y)], encoder=lambda x: convolution(x).mean(dim=(2, 3)), dim=2)
    assert head.in_features == 4
    with pytest.raises(ValueError, match="Expected embeddings of shape"):
        head.judge(convolution(x).detach())


def columns(x: Array, y: Array) -> Any:
    return pa.table({**{f"z{j}": x[:, j] for j in range(x.shape[1])}, "kind": y.tolist()})


def fixed_lists(x: Array, y: Array) -> Any:
    return pa.table({"z": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), x.shape[1]), "kind": y.tolist()})


def lists(x: Array, y: Array) -> Any:
    return pa.table({"kind": pa.array(y.tolist()).dictionary_encode(), "z": pa.array(list(x))})


@pytest.mark.parametrize("make", [columns, fixed_lists, lists])
@pytest.mark.parametrize("place", ["table", "dataset", "file", "text path", "folder"])
def test_arrow_and_parquet(rng: Rng, tmp_path: Path, make: Any, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_CHUNK_VALUES", 7 * 512)  # seven rows
    x, y = embeddings(rng)
    table = make(x, y)
    if place == "dataset":
        given = dataset.dataset(table)
    elif place == "folder":
        for k in range(3):
            parquet.write_table(table.slice(40 * k, 40), tmp_path / f"part{k}.parquet")
        (tmp_path / "readme.txt").write_text("not a table")
        given = tmp_path
    elif place != "table":
        parquet.write_table(table, tmp_path / "x.parquet", row_group_size=50)
        given = tmp_path / "x.parquet" if place == "file" else str(tmp_path / "x.parquet")
    else:
        given = table
    source = embedding_source(given, "kind", None)
    assert max(len(z) for z, _ in source.chunks()) == 7
    found, labels = rows_of(source)
    assert found.dtype == np.float32
    assert (found == x).all()
    assert (labels == y).all()


def test_a_fit_from_parquet_equals_that_from_arrays(rng: Rng, tmp_path: Path) -> None:
    x, y = embeddings(rng)
    parquet.write_table(columns(x, y), tmp_path / "x.parquet")
    head, expected = TrustHead.fit(tmp_path / "x.parquet", labels="kind"), TrustHead.fit(x, y)
    for name, value in head.state_dict().items():
        assert not isinstance(value, Tensor) or torch.equal(value, expected.state_dict()[name]), name


def test_arrow_numbers_of_every_type() -> None:
    table = pa.table(
        {
            "half": pa.array(np.array([1.5, 2.5], np.float16)),
            "whole": pa.array([2**60 + 1, 3], pa.int64()),
            "flag": [True, False],
            "y": [0, 1],
        }
    )
    found, _ = rows_of(embedding_source(table, "y", None))
    assert found.tolist() == [[1.5, 2.0**60, 1.0], [2.5, 3.0, 0.0]]


X = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
BAD_TABLES: dict[str, tuple[Callable[[], Any], Any, type[Exception], str]] = {
    "record batch": (lambda: pa.record_batch({"a": [1.0]}), "a", TypeError, "got RecordBatch; make a table of it"),
    "no label": (lambda: pa.table({"a": [1.0], "y": [0]}), None, ValueError, "name the label column.*got None.*a, y"),
    "unknown label": (lambda: pa.table({"a": [1.0], "y": [0]}), "z", ValueError, "got 'z'; its columns are a, y"),
    "labels": (lambda: pa.table({"a": [1.0], "y": [0]}), [0], ValueError, r"got \[0\]"),
    "no embeddings": (lambda: pa.table({"y": [0]}), "y", ValueError, "no column besides the labels 'y'"),
    "text": (
        lambda: pa.table({"a": [1.0], "town": ["x"], "y": [0]}),
        "y",
        TypeError,
        r"embeddings has columns that are not numbers: town\. Encode or drop",
    ),
    "equal columns": (
        lambda: pa.Table.from_arrays([[0.0], [1.0], [0]], names=["a", "a", "y"]),
        "y",
        ValueError,
        "The table has more than one column 'a'; give each",
    ),
    "control characters": (lambda: pa.table({"\x1b[2J": [0.0]}), "y", ValueError, r"its columns are \\x1b\[2J\."),
    "lists of text": (lambda: pa.table({"z": [["a"]], "y": [0]}), "y", TypeError, "not numbers: z"),
    "a list and an id": (
        lambda: pa.table({"id": [1], "z": [[1.0]], "y": [0]}),
        "y",
        ValueError,
        r"'z' must be the only column.*got also id.*select\(\['z', 'y'\]\)",
    ),
    "missing value": (
        lambda: pa.table({"a": [1.0, 2.0, None], "b": [1, None, 3], "y": [0, 1, 0]}),
        "y",
        ValueError,
        "embeddings holds 2 NaN or infinite values, the first in row 1, column 'b'",
    ),
    "missing value in a list": (
        lambda: pa.table({"z": [[1.0, 2.0], [3.0, None], [5.0, 6.0]], "y": [0, 1, 0]}),
        "y",
        ValueError,
        "embeddings holds 1 NaN or infinite values, the first in row 1, column 1",
    ),
    "missing list": (
        lambda: pa.table({"z": [*X, None], "y": [0, 1, 0, 1]}),
        "y",
        ValueError,
        "Row 3 .*'z' holds no list",
    ),
    "first list missing": (lambda: pa.table({"z": [None, *X], "y": [0, 1, 0, 1]}), "y", ValueError, "Row 0 .* no list"),
    "ragged lists": (
        lambda: pa.table({"z": [*X, [1.0]], "y": [0, 1, 0, 1]}),
        "y",
        ValueError,
        "Row 3 of the column 'z' holds 1 values, but row 0 holds 2",
    ),
    "missing label": (lambda: pa.table({"a": [1.0, 2.0], "y": ["u", None]}), "y", ValueError, "missing labels"),
    "no rows": (
        lambda: pa.table({"a": pa.array([], pa.float32()), "y": pa.array([], pa.int64())}),
        "y",
        ValueError,
        "The table has no rows",
    ),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_rejects_invalid_tables(case: str) -> None:
    make, labels, error, message = BAD_TABLES[case]
    with pytest.raises(error, match=message):
        first_pass(embedding_source(make(), labels, None))


def test_rejects_invalid_paths(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"There is no file .*none\.parquet"):
        TrustHead.fit(tmp_path / "none.parquet", labels="y")
    for path in (tmp_path, tmp_path / "x.csv"):
        with pytest.raises(ValueError, match=r"path of a \.parquet file or of a folder.*mmap_mode"):
            TrustHead.fit(path, labels="y")


@pytest.mark.parametrize("given", [lambda: pa.table({"a": [1.0], "y": [0]}), lambda: "x.parquet"])
def test_without_pyarrow(given: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    table = given()
    found = builtins.__import__

    def hidden(name: str, *args: Any) -> Any:
        if name.partition(".")[0] == "pyarrow":
            raise ImportError(name)
        return found(name, *args)

    monkeypatch.setattr(builtins, "__import__", hidden)
    with pytest.raises(ImportError, match=r"need pyarrow\. Install it: pip install pyarrow"):
        embedding_source(table, "y", None)


@pytest.mark.parametrize(
    ("embeddings", "labels", "encoder", "error", "message"),
    [
        (X, None, None, ValueError, "labels are missing; only batches with an encoder"),
        (X, [0, 1], None, ValueError, "There are 3 rows and 2 labels"),
        ([1.0, 2.0], [0, 1], None, ValueError, r"shape \(points, features\), got shape \(2,\)"),
        ([["a"], ["b"]], [0, 1], None, TypeError, "must hold real numbers"),
        (iter([]), None, None, TypeError, "got list_iterator; batches need an encoder. Pass encoder="),
        (X, [0, 1, 0], nn.Identity(), ValueError, "do not give labels as well"),
    ],
)
def test_rejects_other_inputs(embeddings: Any, labels: Any, encoder: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        embedding_source(embeddings, labels, encoder)
