"""Suspicious labels: flipped labels are found, the false discovery rate by simulation, invariances, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from sklearn.datasets import load_digits

from sepc_torch import suspicious_labels
from sepc_torch.head.label_errors import _asinh_odds, _log_share, _stratified, _without, ridge_shares
from sepc_torch.metrics import unknown_auroc
from sepc_torch.shapes import Array

pytestmark = pytest.mark.slow


def flipped(rng: np.random.Generator, y: Array, share: float) -> Array:
    """Labels of which a share is replaced by another class."""
    classes = y.max() + 1
    wrong = rng.random(len(y)) < share
    return np.where(wrong, (y + rng.integers(1, classes, len(y))) % classes, y)


def clouds(rng: np.random.Generator, rows: int, apart: float = 4.0) -> tuple[Array, Array]:
    y = np.arange(rows) % 3
    return rng.normal(size=(rows, 3)) + apart * np.eye(3)[y], y


def separates(score: Array, wrong: Array) -> float:
    """AUROC of a score for wrong labels."""
    values = torch.from_numpy(-score)
    return float(unknown_auroc(values[torch.from_numpy(~wrong)], values[torch.from_numpy(wrong)]))


def test_flipped_digits_are_found() -> None:
    z, y = load_digits(return_X_y=True)
    given = flipped(np.random.default_rng(0), y, 0.1)
    wrong = given != y
    found = suspicious_labels(z, given)
    assert separates(found.wrong, wrong) > 0.99
    assert found.share == pytest.approx(wrong.mean(), abs=0.02)
    assert (found.found == wrong).mean() > 0.98
    assert (found.suggested == y).mean() > 0.97
    first = found.order[: wrong.sum() // 2]
    assert wrong[first].mean() > 0.98
    assert set(found.weights) == {"regions", "regions (asinh)", "neighbours", "linear"}


def test_linear_shares_are_those_of_ridge_regression(rng: np.random.Generator) -> None:
    """The weights solve the normal equations for one of the penalties, the one with the least leave-one-out error."""
    z, y = clouds(rng, 40)
    new = rng.normal(size=(5, 3))
    x, target = z - z.mean(axis=0), np.eye(3)[y] - np.eye(3)[y].mean(axis=0)
    errors, shares = [], []
    for penalty in np.linalg.norm(x, 2) ** 2 * 10.0 ** np.arange(-6, 1):
        missed = []
        for i in range(40):
            rest = np.arange(40) != i
            a, b = z[rest] - z[rest].mean(axis=0), np.eye(3)[y[rest]]
            w = np.linalg.solve(a.T @ a + penalty * np.eye(3), a.T @ b)
            missed.append(np.eye(3)[y[i]] - b.mean(axis=0) - (z[i] - z[rest].mean(axis=0)) @ w)
        errors.append(np.square(missed).mean())
        w = np.linalg.solve(x.T @ x + penalty * np.eye(3), x.T @ target)
        shares.append((np.eye(3)[y].mean(axis=0) + (new - z.mean(axis=0)) @ w).clip(0.0, 1.0))
    found = ridge_shares(z, y, 3, new)
    # Two penalties can have nearly equal errors; either may win.
    good = np.flatnonzero(np.array(errors) <= 1.001 * min(errors))
    assert any(np.allclose(found, shares[i], atol=1e-6) for i in good)


def test_logits_help() -> None:
    rng = np.random.default_rng(0)
    z, y = clouds(rng, 150, apart=1.0)
    given = flipped(rng, y, 0.1)
    logits = 4.0 * np.eye(3)[y] + rng.normal(size=(150, 3))
    alone, both = (suspicious_labels(z, given, extra, normalize=None) for extra in (None, logits))
    assert separates(both.wrong, given != y) > separates(alone.wrong, given != y) + 0.05
    assert {"logits", "logits (asinh)"} < set(both.weights)
    masked = np.where(np.eye(3, dtype=bool)[(y + 1) % 3], -np.inf, logits)
    assert np.isfinite(suspicious_labels(z, given, torch.from_numpy(masked), normalize=None).p_value).all()


def test_false_discoveries_are_below_the_rate() -> None:
    """Labels drawn from the model: classes overlap, so some right labels are unlikely, and 8 % are then flipped."""
    found, hits = [], []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        z, y = clouds(rng, 300, apart=3.0)
        given = flipped(rng, y, 0.08)
        chosen = suspicious_labels(z, given, normalize=None, fdr=0.2).found
        found.append((chosen & (given == y)).sum() / max(1, chosen.sum()))
        hits.append((chosen & (given != y)).sum() / (given != y).sum())
    assert np.mean(found) <= 0.2
    assert np.mean(hits) > 0.1


def test_clean_labels_give_few_discoveries() -> None:
    """Without wrong labels every discovery is false: the share of draws with one is at most the rate."""
    found = []
    for seed in range(6):
        z, y = clouds(np.random.default_rng(seed), 150, apart=3.0)
        found.append(suspicious_labels(z, y, normalize=None, fdr=0.1).found.any())
    assert np.mean(found) <= 1 / 6  # the seeds are fixed


def test_the_record() -> None:
    rng = np.random.default_rng(1)
    z, y = clouds(rng, 240, apart=8.0)
    given = np.array(["a", "b", "c"])[flipped(rng, y, 0.1)]
    names = [f"row {i}" for i in range(240)]
    found = suspicious_labels(z, given, normalize=None, fdr=0.3, ids=names)
    np.testing.assert_array_equal(found.found, found.adjusted <= 0.3)
    np.testing.assert_array_equal(np.sort(found.order), np.arange(240))
    assert (np.diff(found.wrong[found.order]) <= 1e-12).all()
    assert found.found_ids.tolist() == [names[i] for i in found.order if found.found[i]]
    assert len(found.found_ids)
    assert set(found.suggested) <= {"a", "b", "c"}
    assert ((found.p_value >= 0) & (found.p_value <= 1)).all()
    assert (found.adjusted >= found.p_value - 1e-12).all()


@pytest.mark.parametrize("normalize", ["l2", "standardize"])
def test_scale_of_the_embeddings_does_not_matter(rng: np.random.Generator, normalize: Any) -> None:
    z, y = clouds(rng, 90)
    scale = 4.0 if normalize == "l2" else np.array([0.25, 4.0, 64.0])
    one, other = (suspicious_labels(points, y, normalize=normalize) for points in (z, z * scale))
    np.testing.assert_allclose(one.wrong, other.wrong, atol=1e-4)


def test_folds_are_stratified(rng: np.random.Generator) -> None:
    codes = rng.permutation(np.repeat([0, 1, 2], [50, 7, 23]))
    fold = _stratified(codes, 5, seed=3)
    counts = np.array([np.bincount(fold[codes == c], minlength=5) for c in range(3)])
    assert (np.ptp(counts, axis=1) <= 1).all()


def test_a_class_that_would_lose_most_rows_keeps_all() -> None:
    codes, fold = np.repeat([0, 1], 10), np.arange(20) % 5
    doubtful = np.arange(20) < 8
    kept = _without(doubtful, codes, fold)
    assert kept[:10].all()
    np.testing.assert_array_equal(_without(np.arange(20) < 2, codes, fold), np.arange(20) >= 2)


def test_evidence_is_that_of_the_softmax(rng: np.random.Generator) -> None:
    score = rng.normal(size=(50, 4)) * 3
    log_share = log_softmax(score, axis=1)
    np.testing.assert_allclose(_log_share(score), log_share, atol=1e-12)
    np.testing.assert_allclose(np.sinh(_asinh_odds(score)), log_share - np.log1p(-np.exp(log_share)), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": np.zeros(30)}, "at least two classes"),
        ({"y": np.append(np.zeros(28), [1, 1])}, "Choose fewer folds"),
        ({"y": np.zeros(29)}, "z has 30 rows and y has 29 labels"),
        ({"ids": ["a"]}, "one id for each of 30 rows"),
        ({"logits": np.zeros((30, 3))}, r"logits of shape \(30, 2\)"),
        ({"logits": np.full((30, 2), np.nan)}, "without NaN"),
        ({"fdr": 0.0}, "fdr must lie"),
        ({"folds": 1}, "folds must be"),
        ({"normalize": "l1"}, "normalize must be"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    inputs: dict[str, Any] = {"z": np.random.default_rng(0).normal(size=(30, 2)), "y": np.arange(30) % 2} | change
    with pytest.raises(ValueError, match=message):
        suspicious_labels(**inputs)
