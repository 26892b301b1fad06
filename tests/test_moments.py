"""Moments that are accumulated in chunks, against the same moments of the whole data."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch

from sepc_torch.data import arrays
from sepc_torch.head.reading import moments as module
from sepc_torch.head.reading.moments import EmbeddingMoments, Moments
from sepc_torch.head.reading.projection import fit_projection
from sepc_torch.shapes import Array

Rng = np.random.Generator


def pieces(rng: Rng, count: int) -> list[slice]:
    """Random cuts of ``count`` rows; a piece may be empty."""
    cuts = [0, *np.sort(rng.integers(0, count + 1, 9)).tolist(), count]
    return [slice(a, b) for a, b in pairwise(cuts)]


def accumulated(x: Array, parts: list[slice], device: str | None = None) -> Moments:
    moments = Moments(x.shape[1], None if device is None else torch.device(device))
    for part in parts:
        moments.add(x[part])
    return moments


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_moments_equal_those_of_the_whole(rng: Rng, device: str | None, offset: float) -> None:
    """Also far from zero and sorted, where a difference of sums would lose all digits of the scatter."""
    x = np.sort(rng.normal(size=(300, 5)), axis=0) + offset
    found = accumulated(x, pieces(rng, 300), device)
    assert found.count == 300
    assert found.mean == pytest.approx(x.mean(axis=0), rel=1e-12)
    assert found.covariance == pytest.approx(np.cov(x.T, bias=True), rel=1e-8, abs=1e-9)


def test_moments_of_integers_are_exact_fractions(rng: Rng) -> None:
    x = rng.integers(-9, 10, size=(37, 2))
    found = accumulated(x.astype(np.float32), pieces(rng, 37))
    mean = [Fraction(int(x[:, j].sum()), 37) for j in range(2)]
    for i in range(2):
        assert found.mean[i] == pytest.approx(float(mean[i]), rel=1e-13, abs=1e-13)
        for j in range(2):
            exact = sum((int(a) - mean[i]) * (int(b) - mean[j]) for a, b in zip(x[:, i], x[:, j], strict=True))
            assert found.scatter[i, j] == pytest.approx(float(exact), rel=1e-13, abs=1e-12)


def with_short_rows(rng: Rng) -> Array:
    """Embeddings of length about 5, among them some of a millionth of that length, and zeros."""
    x = 2.0 * rng.normal(size=(200, 6)) + 1.0
    x[rng.choice(200, 20, replace=False)] *= 1e-6
    x[rng.choice(200, 5, replace=False)] = 0.0
    return x


def test_directions_and_polar_features_equal_their_definitions(rng: Rng) -> None:
    x = with_short_rows(rng)
    found = EmbeddingMoments()
    for start in range(0, 200, 17):
        found.add(x[start : start + 17], np.zeros(len(x[start : start + 17]), dtype=np.int64))
    found.finish()
    length = np.linalg.norm(x, axis=1, keepdims=True)
    least = 1e-3 * np.median(length)
    bounded = np.maximum(length, least)
    polar = np.hstack([x / bounded, np.log(bounded)])
    direction = np.divide(x, length, where=length > 0, out=np.zeros_like(x))
    assert found.least == pytest.approx(least)
    assert found.zeros
    for name, moments, features in (
        ("raw", found.raw, x),
        ("direction", found.direction(), direction),
        ("polar", found.polar(), polar),
    ):
        assert moments.count == 200, name
        assert moments.mean == pytest.approx(features.mean(axis=0), abs=1e-12), name
        assert moments.covariance == pytest.approx(np.cov(features.T, bias=True), rel=1e-9, abs=1e-12), name


def test_the_median_length_is_that_of_the_first_chunks(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are kept until they hold enough rows; later rows do not change the least length."""
    monkeypatch.setattr(module, "_MEDIAN_ROWS", 50)
    x = rng.normal(size=(200, 3)) * np.repeat([1.0, 100.0], [60, 140])[:, None]
    found = EmbeddingMoments()
    for start in range(0, 200, 20):
        found.add(x[start : start + 20], np.zeros(20, dtype=np.int64))
    found.finish()
    assert found.least == pytest.approx(1e-3 * np.median(np.linalg.norm(x[:60], axis=1)))
    assert found.raw.count == found.polar().count == 200


@pytest.mark.parametrize("sums_of", ["raw", "direction"])
def test_class_means(rng: Rng, sums_of: str) -> None:
    x, codes = rng.normal(size=(90, 4)) + 1e4, rng.permutation(np.arange(90) % 3)
    found = EmbeddingMoments(sums_of)  # type: ignore[arg-type]
    for start in range(0, 90, 7):
        found.add(x[start : start + 7], codes[start : start + 7])
    found.finish()
    features = x if sums_of == "raw" else x / np.linalg.norm(x, axis=1, keepdims=True)
    expected = [features[codes == c].mean(axis=0) - features.mean(axis=0) for c in range(3)]
    assert found.class_counts.tolist() == [30, 30, 30]
    assert found.class_means() == pytest.approx(np.array(expected), abs=1e-10 if sums_of == "raw" else 1e-14)


@pytest.mark.parametrize(
    ("normalize", "method"),
    [
        ("polar", "pca"),
        *((normalize, method) for normalize in ("l2", "standardize", None) for method in ("pca", "lda")),
    ],
)
def test_the_size_of_chunks_does_not_change_a_projection(
    rng: Rng, normalize: str | None, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = rng.integers(0, 4, 200)
    x = with_short_rows(rng) + 3.0 * np.eye(4, 6)[codes] * np.linspace(1, 2, 6)
    matrices = []
    for values in (2**21, 60, 6):  # one chunk, chunks of ten rows, chunks of one row
        monkeypatch.setattr(arrays, "_CHUNK_VALUES", values)
        project = fit_projection(x, codes, 3, normalize, method, torch.float64)  # type: ignore[arg-type]
        matrices.append(np.column_stack([project.matrix.numpy(), project.matrix.numpy() @ project.shift.numpy()]))
    for matrix in matrices[1:]:
        assert matrix == pytest.approx(matrices[0], rel=1e-8, abs=1e-9)
