"""The two passes of a fit: any order of rows, sizes of chunks, number of passes, memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sepc_torch import TrustHead
from sepc_torch.data import arrays
from sepc_torch.head.evidence.evidence import fit_evidence
from sepc_torch.head.reading.passes import ProjectedSet, first_pass, second_pass
from sepc_torch.head.reading.projection import choose_projection, projection_from
from sepc_torch.head.reading.sources import ArraySource, BatchSource, EmbeddingSource
from sepc_torch.shapes import Array

Rng = np.random.Generator


def embeddings(rng: Rng, count: int = 300, dim: int = 8) -> tuple[Array, Array]:
    """Three classes in different directions, in float32."""
    codes = rng.permutation(np.arange(count) % 3)
    return (4.0 * np.eye(3, dim)[codes] + rng.normal(size=(count, dim))).astype(np.float32), codes


class Batches:
    """Batches of three rows that can be read again; counts how often. Each pass has another order."""

    def __init__(self, x: Array, y: Array, rng: Rng) -> None:
        self.x, self.y, self.rng = x, y, rng
        self.passes = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.passes += 1
        order = self.rng.permutation(len(self.x))
        for start in range(0, len(order), 3):
            rows = order[start : start + 3]
            yield torch.from_numpy(self.x[rows]), torch.from_numpy(self.y[rows])


def passed(source: EmbeddingSource, dim: int = 4, reference_points: int = 60, **options: Any) -> ProjectedSet:
    first = first_pass(source, **options)
    project = choose_projection(first.moments, first.classes, first.sizes, dim, options.get("normalize", "l2"), "pca")
    return second_pass(source, first, project, reference_points)


def sorted_rows(*columns: Array) -> Array:
    """Columns side by side, with the rows in the order of the first column."""
    table = np.column_stack(columns)
    return table[np.argsort(table[:, 0])]


@pytest.mark.slow
@pytest.mark.parametrize("normalize", ["l2", "standardize", None])
@pytest.mark.parametrize("values", [2**21, 40, 8])
def test_the_size_of_chunks_does_not_matter(
    rng: Rng, normalize: Any, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expected values come from one product with all rows."""
    x, y = embeddings(rng)
    monkeypatch.setattr(arrays, "_CHUNK_VALUES", values)
    data = passed(ArraySource(x, y), normalize=normalize)
    first = first_pass(ArraySource(x, y), normalize=normalize)
    project = choose_projection(first.moments, first.classes, first.sizes, 4, normalize, "pca")
    assert data.points == pytest.approx(project(torch.from_numpy(x)).numpy(), abs=1e-5)
    assert data.coordinates == pytest.approx(data.polar(torch.from_numpy(x)).numpy(), abs=1e-5)
    assert [str(data.points.dtype), str(data.coordinates.dtype)] == ["float64", "float32"]
    assert (data.codes == y).all()
    assert np.cov(data.points.T, bias=True) == pytest.approx(np.eye(4), abs=1e-4)
    assert np.cov(data.coordinates.T, bias=True) == pytest.approx(np.eye(9), abs=1e-3)


def test_two_passes_in_any_order(rng: Rng) -> None:
    """A source with another order in each pass gives each row its own class and coordinates."""
    x, y = embeddings(rng)
    batches = Batches(x, y, rng)
    data = passed(BatchSource(batches, nn.Identity()))
    assert batches.passes == 2
    expected = passed(ArraySource(x, y))
    found, wanted = (sorted_rows(d.points, d.coordinates, d.codes) for d in (data, expected))
    assert found == pytest.approx(wanted, abs=1e-4)
    assert (found[:, -1] == wanted[:, -1]).all()


def test_reference_points_are_training_embeddings_of_their_class(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_CHUNK_VALUES", 80)  # ten rows
    x, y = embeddings(rng)
    near = passed(BatchSource(Batches(x, y, rng), nn.Identity()), reference_points=90).reference_points
    assert torch.bincount(near.codes).tolist() == [30, 30, 30]
    apart = torch.cdist(near.points.double(), torch.from_numpy(x).double())
    rows = apart.argmin(dim=1)
    assert float(apart.amin(dim=1).max()) < 1e-5
    assert len(rows.unique()) == 90
    assert (torch.from_numpy(y)[rows] == near.codes).all()
    assert len(passed(ArraySource(x, y), reference_points=0).reference_points.codes) == 0


def test_a_fit_reads_a_loader_twice_and_equals_that_of_an_array(rng: Rng) -> None:
    x, y = embeddings(rng)
    batches = Batches(x, np.array([5, 7, 9])[y], rng)
    head = TrustHead.fit(batches, encoder=nn.Identity(), dim=3, classes=[9, 7, 5])
    expected = TrustHead.fit(x, np.array([5, 7, 9])[y], dim=3, classes=[9, 7, 5])
    assert batches.passes == 2
    assert head.classes == [9, 7, 5]
    z = torch.from_numpy(embeddings(rng)[0])
    a, b = head(z), expected(z)
    assert float((a.label == b.label).float().mean()) > 0.99
    assert torch.allclose(head.projection(z), expected.projection(z), atol=1e-4)


@pytest.mark.parametrize("classes", [None, ["c", "a", "b"]])
def test_sizes_belong_to_their_classes(rng: Rng, classes: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_CHUNK_VALUES", 15)  # five rows; "c" comes first
    labels = np.repeat(["c", "b", "a"], [30, 20, 10])
    first = first_pass(ArraySource(rng.normal(size=(60, 3)), labels), classes)
    assert first.classes.tolist() == (classes or ["a", "b", "c"])
    assert first.sizes.tolist() == [np.count_nonzero(labels == name) for name in first.classes]
    other = ArraySource(rng.normal(size=(60, 3)), labels)
    data = second_pass(other, first, projection_from(first.moments, 2, None, "pca"), 0)
    assert (first.classes[data.codes] == labels).all()


class Changing:
    """Batches whose labels or rows differ between the passes."""

    def __init__(self, *passes: list[tuple[Array, Any]]) -> None:
        self.passes = iter(passes)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, Any]]:
        return ((torch.from_numpy(x), y) for x, y in next(self.passes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: [(x, np.where(y == 1, 0, y))], r"rows per class 0: 100 and 200; 1: 100 and 0\. A fit reads"),
        (lambda x, y: [(x, np.where(y == 1, 8, y))], "100 labels that the first did not have"),
        (lambda x, y: [(x[:-1], y[:-1])], r"rows per class .: 100 and 99\..*drop_last=False.*iter\(loader\)"),
        (lambda x, y: [(x, y), (x[:1], y[:1])], "rows per class .*: 100 and 101"),
        (lambda x, y: [(x[:, :5], y)], r"embeddings must have shape \(points, 8\), got \(300, 5\)"),
        (lambda x, y: [(np.where(x > 3, np.nan, x), y)], "embeddings holds .* NaN or infinite values"),
    ],
)
def test_a_second_pass_that_differs_is_refused(rng: Rng, change: Any, message: str) -> None:
    x, y = embeddings(rng)
    with pytest.raises(ValueError, match=message):
        passed(BatchSource(Changing([(x, y)], change(x, y)), nn.Identity()))


@pytest.mark.parametrize("chunk_values", [2**21, 16])
def test_the_error_for_bad_values_counts_rows_of_all_chunks(
    rng: Rng, chunk_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "_CHUNK_VALUES", chunk_values)
    x, y = embeddings(rng)
    x[211, 5], x[250, 0], x[250, 1] = np.nan, np.inf, -np.inf
    expected = "embeddings holds 3 NaN or infinite values, the first in row 211, column 5"
    for source in (ArraySource(x, y), BatchSource([(torch.from_numpy(x), y)], nn.Identity())):
        with pytest.raises(ValueError, match=expected):
            first_pass(source)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e-30, 1e20, 1e160, 1e300])
@pytest.mark.parametrize("normalize", ["l2", "standardize", None])
def test_embeddings_of_extreme_scale_are_refused(rng: Rng, scale: float, normalize: Any) -> None:
    """Their squares overflow or underflow in float32, some also in float64."""
    x, labels = rng.normal(size=(60, 4)), np.arange(60) % 2
    with pytest.raises(ValueError, match=r"embeddings has a scale of .*; rescale the features"):
        TrustHead.fit(scale * x, labels, normalize=normalize)


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ([(torch.zeros(3, 2), [0, 1])], ValueError, "There are 3 rows and 2 labels"),
        (
            [(torch.zeros(2, 2), [0, 1]), (torch.zeros(2, 3), [0, 1])],
            ValueError,
            r"shape \(points, 2\), got .*\(2, 3\)",
        ),
        ([(torch.zeros(2, 0), [0, 1])], ValueError, r"non-empty array of shape \(points, features\), got .*\(2, 0\)"),
        ([(torch.zeros(2, 2), [0, None])], ValueError, "missing labels"),
        (
            [(torch.zeros(2, 2), [0, 1]), (torch.zeros(2, 2), ["a", "b"])],
            TypeError,
            "mixes labels of the types int, str",
        ),
        ([(torch.zeros(2, 2), [3, 3])], ValueError, "the single class 3"),
        ([(torch.zeros(0, 2), [])], ValueError, "batches are empty"),
        ([], ValueError, "batches are empty"),
    ],
)
def test_rejects_invalid_batches(batches: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        first_pass(BatchSource(batches, nn.Identity()))


def test_empty_batches_are_left_out(rng: Rng) -> None:
    x, y = embeddings(rng)
    z = torch.from_numpy(x)
    data = passed(BatchSource([(z[:100], y[:100]), (z[:0], y[:0]), (z[100:], y[100:])], nn.Identity()))
    assert (data.codes == y).all()


def test_products_on_a_device(rng: Rng) -> None:
    x, y = embeddings(rng)
    source = ArraySource(x, y)
    a, b = first_pass(source), first_pass(source, device=torch.device("cpu"))
    assert b.moments.polar().scatter == pytest.approx(a.moments.polar().scatter, rel=1e-9, abs=1e-9)
    assert b.moments.raw.scatter == pytest.approx(a.moments.raw.scatter, rel=1e-9, abs=1e-9)


def test_the_size_of_chunks_does_not_change_densities(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """The densities themselves are tested against closed forms in test_densities.py, in one chunk."""
    x, y = embeddings(rng)
    data = passed(ArraySource(x, y))
    pieces = np.where(rng.random(300) < 0.3, -1, y + 3 * rng.integers(0, 2, 300))
    expected = fit_evidence(data, pieces).densities
    monkeypatch.setattr(arrays, "_CHUNK_VALUES", 48)  # five rows of nine coordinates
    found = fit_evidence(data, pieces).densities
    z = torch.from_numpy(data.coordinates)
    assert torch.allclose(found(z), expected(z), atol=1e-4)
    assert len(found.codes) == 9


@pytest.mark.slow
def test_memory_stays_near_that_of_the_coordinates(rng: Rng, tmp_path: Path) -> None:
    """200 000 x 256 in float32 on disk are 205 MB; the coordinates that a fit keeps are 64 MB.

    The memory of NumPy arrays is measured; torch holds the reference points and a few chunks besides.
    """
    count, dim = 200_000, 256
    x = np.memmap(tmp_path / "x.bin", np.float32, "w+", shape=(count, dim))
    y = np.arange(count) % 4
    block = rng.normal(size=(20_000, dim)).astype(np.float32) + 2.0 * np.eye(4, dim, dtype=np.float32)[y[:20_000]]
    for start in range(0, count, len(block)):
        x[start : start + len(block)] = block
    x.flush()
    source = ArraySource(np.memmap(tmp_path / "x.bin", np.float32, "r", shape=(count, dim)), y)
    tracemalloc.start()
    try:
        data = passed(source, dim=8, reference_points=16384)
        fit_evidence(data, y)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    kept = data.points.nbytes + data.coordinates.nbytes
    assert kept == count * (8 * 8 + 4 * 64)
    assert peak < 2.5 * kept
