"""Mahalanobis distance of directions with the residual, against the full covariance matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sepc_torch.head.evidence.densities import fit_densities
from sepc_torch.head.evidence.shared_gaussian import shared_gaussian
from sepc_torch.head.reading.moments import EmbeddingMoments
from sepc_torch.head.reading.projection import projection_from

Rng = np.random.Generator


@pytest.mark.parametrize("dim", [3, 8, 9])
def test_agrees_with_the_full_covariance(rng: Rng, dim: int) -> None:
    """The covariance has the pooled spread in the first directions and one variance in all others."""
    codes = rng.integers(0, 4, 500)
    x = rng.normal(size=(500, 8)) * rng.uniform(0.5, 2.0, 8) + 3.0 * rng.normal(size=(4, 8))[codes]
    moments = EmbeddingMoments()
    moments.add(x, codes)
    moments.finish()
    polar = projection_from(moments, dim, "polar", "pca", torch.float64)
    coordinates = polar(torch.from_numpy(x)).numpy()
    spread = fit_densities(coordinates, codes, np.full(500, -1), torch.float64)[1]
    deviations = 1.0 / np.linalg.norm(polar.matrix.numpy(), axis=1)
    variance = float(np.trace(moments.polar().covariance))
    model = shared_gaussian(spread, deviations, 9, variance, torch.float64)
    z = torch.from_numpy(3.0 * rng.normal(size=(60, 8)))
    found = model(*polar.with_square(z)).numpy()

    length = z.norm(dim=1, keepdim=True)
    features = torch.cat([z / length, length.log()], dim=1).numpy() - polar.shift.numpy()
    axes = polar.matrix.numpy() * deviations[:, None]  # orthonormal rows
    within = np.linalg.inv(spread.whitener.T @ spread.whitener) * np.outer(deviations, deviations)
    covariance = axes.T @ within @ axes
    if dim < 9:
        outside = (variance - (deviations**2).sum()) / (9 - dim)
        covariance += outside * (np.eye(9) - axes.T @ axes)
    apart = features[:, None] - (spread.means * deviations) @ axes
    expected = np.einsum("bci,ij,bcj->bc", apart, np.linalg.inv(covariance), apart).min(axis=1)
    assert found == pytest.approx(expected, rel=1e-6)
    # The pooled spread is the mean covariance within classes, up to the least variance of a direction.
    residuals = coordinates - spread.means[codes]
    pooled = residuals.T @ residuals / (500 - 4)
    pooled += (1e-3 * np.trace(pooled) / dim + 1e-6) * np.eye(dim)
    assert np.linalg.inv(spread.whitener.T @ spread.whitener) == pytest.approx(pooled)


def test_features_that_never_varied_are_far_outside(rng: Rng) -> None:
    """A feature that is zero for all training embeddings: a value there makes a point strange."""
    codes = rng.integers(0, 2, 200)
    x = np.abs(rng.normal(size=(200, 5))) + 2.0 * np.eye(5)[codes]
    x[:, 4] = 0.0
    moments = EmbeddingMoments()
    moments.add(x, codes)
    moments.finish()
    polar = projection_from(moments, 64, "polar", "pca")
    assert len(polar.matrix) == 5  # of six features
    coordinates = polar(torch.from_numpy(x).float()).numpy()
    spread = fit_densities(coordinates, codes, np.full(200, -1))[1]
    deviations = 1.0 / np.linalg.norm(polar.matrix.double().numpy(), axis=1)
    model = shared_gaussian(spread, deviations, 6, float(np.trace(moments.polar().covariance)))
    usual = model(*polar.with_square(torch.from_numpy(x).float()))
    active = torch.from_numpy(x).float()
    active[:, 4] = 1.0
    assert float(model(*polar.with_square(active)).min()) > 3.0 * float(usual.max())
