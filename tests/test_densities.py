"""Class densities: Student's t against references, invariance under changes of coordinates, and extreme data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import multigammaln
from scipy.stats import multivariate_t
from torch import Tensor

from sepc_torch.head.evidence import densities
from sepc_torch.head.evidence.densities import RegionDensities, fit_densities
from sepc_torch.model.derived import resize_buffers
from sepc_torch.shapes import Array

Rng = np.random.Generator


def sample(rng: Rng, sizes: tuple[int, ...] = (40, 25, 12), dim: int = 3) -> tuple[Array, Array]:
    """Classes of different sizes, covariances and means."""
    codes = np.repeat(np.arange(len(sizes)), sizes)
    shapes = rng.normal(size=(len(sizes), dim, dim))
    points = np.einsum("nij,nj->ni", shapes[codes], rng.normal(size=(len(codes), dim)))
    return points + 2.0 * rng.normal(size=(len(sizes), dim))[codes], codes


def pooled(points: Array, group: Array) -> Array:
    """Pooled covariance within groups, with the least variance of every direction."""
    means = np.stack([points[group == k].mean(axis=0) for k in range(group.max() + 1)])
    spread = points - means[group]
    within = spread.T @ spread / max(len(points) - len(means), 1)
    return within + (1e-3 * np.trace(within) / len(within) + 1e-6) * np.eye(len(within))


def fit64(points: Array, codes: Array, pieces: Array | None = None) -> RegionDensities:
    return fit_densities(points, codes, np.full(len(codes), -1) if pieces is None else pieces, torch.float64)[0]


def log_density(points: Array, codes: Array, queries: Array, pieces: Array | None = None) -> Array:
    return fit64(points, codes, pieces)(torch.from_numpy(queries)).numpy()


def test_each_class_is_students_t(rng: Rng) -> None:
    points, codes = sample(rng)
    queries = 3.0 * rng.normal(size=(50, 3))
    found = log_density(points, codes, queries)
    prior = pooled(points, codes)
    for c in range(3):
        own = points[codes == c]
        n = len(own)
        scatter = (n - 1) * np.cov(own.T)
        t = multivariate_t(own.mean(axis=0), (prior + scatter) * (n + 1) / (n * (n + 3)), df=n + 3)
        assert found[:, c] == pytest.approx(t.logpdf(queries) + np.log(n / len(points)))


def test_the_density_is_the_posterior_predictive(rng: Rng) -> None:
    """Against the ratio of marginal likelihoods of the normal-inverse-Wishart model with and without z."""
    dim = 3
    points, codes = sample(rng, dim=dim)
    queries = 3.0 * rng.normal(size=(20, dim))
    found = log_density(points, codes, queries)
    prior = pooled(points, codes)

    def evidence(x: Array) -> float:
        """Log marginal likelihood up to a constant that cancels in the ratio; the mean has a flat prior."""
        freedom = dim + 2 + len(x)
        centred = x - x.mean(axis=0)
        _, log_det = np.linalg.slogdet(prior + centred.T @ centred)
        parts = multigammaln(freedom / 2, dim), -freedom / 2 * log_det, -dim / 2 * np.log(len(x))
        return float(sum(parts) - len(x) * dim / 2 * np.log(np.pi))

    for c in range(3):
        own = points[codes == c]
        for row, z in enumerate(queries):
            predictive = evidence(np.vstack([own, z])) - evidence(own)
            assert found[row, c] == pytest.approx(np.log(len(own) / len(points)) + predictive)


@pytest.mark.parametrize("with_pieces", [False, True])
def test_the_densities_of_all_classes_integrate_to_one(rng: Rng, with_pieces: bool) -> None:
    points, codes = sample(rng, (9, 1, 30), dim=1)
    pieces = np.where(codes == 0, -1, codes + 5 * (rng.random(40) < 0.5)) if with_pieces else None
    # The tails decay like a power. Substituting sinh(u) makes them exponential, and the trapezoidal rule is then exact.
    u = np.linspace(-25.0, 25.0, 20001)
    density = np.exp(log_density(points, codes, np.sinh(u)[:, None], pieces))
    mass = (density * np.cosh(u)[:, None]).sum(axis=0) * (u[1] - u[0])
    assert mass.sum() == pytest.approx(1.0, abs=1e-6)
    if not with_pieces:
        assert mass == pytest.approx(np.array([9, 1, 30]) / 40, abs=1e-6)


def test_densities_are_invariant_under_rotations_and_shifts(rng: Rng) -> None:
    points, codes = sample(rng)
    pieces = np.where(codes == 0, rng.integers(0, 2, len(codes)), -1)
    queries = 3.0 * rng.normal(size=(50, 3))
    turn, shift = np.linalg.qr(rng.normal(size=(3, 3)))[0], rng.normal(size=3)
    moved = log_density(points @ turn.T + shift, codes, queries @ turn.T + shift, pieces)
    assert moved == pytest.approx(log_density(points, codes, queries, pieces))


def test_linear_maps_change_densities_by_the_determinant(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact only without the isotropic least variance."""
    monkeypatch.setattr(densities, "_LEAST_VARIANCE", 0.0)
    monkeypatch.setattr(densities, "_LEAST_SHARE", 0.0)
    points, codes = sample(rng)
    queries = 3.0 * rng.normal(size=(50, 3))
    stretch = np.linalg.qr(rng.normal(size=(3, 3)))[0] * [0.1, 1.0, 20.0] @ np.linalg.qr(rng.normal(size=(3, 3)))[0]
    moved = log_density(points @ stretch.T, codes, queries @ stretch.T)
    assert moved + np.linalg.slogdet(stretch)[1] == pytest.approx(log_density(points, codes, queries), rel=1e-6)


def test_the_order_of_points_and_classes_does_not_matter(rng: Rng) -> None:
    points, codes = sample(rng)
    pieces = np.where(codes == 1, rng.integers(0, 2, len(codes)), -1)
    queries = 3.0 * rng.normal(size=(50, 3))
    expected = log_density(points, codes, queries, pieces)
    order, rename = rng.permutation(len(codes)), rng.permutation(3)
    assert log_density(points[order], codes[order], queries, pieces[order]) == pytest.approx(expected)
    assert log_density(points, rename[codes], queries, pieces)[:, rename] == pytest.approx(expected)
    assert log_density(points, codes, queries, np.where(pieces < 0, -1, 1000 - 7 * pieces)) == pytest.approx(expected)


def test_pieces_equal_to_the_classes_change_nothing(rng: Rng) -> None:
    points, codes = sample(rng)
    queries = 3.0 * rng.normal(size=(50, 3))
    assert log_density(points, codes, queries, codes + 4) == pytest.approx(log_density(points, codes, queries))


def test_half_of_the_density_is_that_of_the_pieces(rng: Rng) -> None:
    points, codes = sample(rng)
    pieces = np.where(codes == 0, rng.integers(0, 2, len(codes)), np.where(codes == 1, 7, -1))
    queries = 3.0 * rng.normal(size=(50, 3))
    inside = pieces >= 0
    _, number = np.unique(pieces[inside], return_inverse=True)
    whole, parts = np.exp(log_density(points, codes, queries)), np.exp(log_density(points[inside], number, queries))
    expected = whole / 2 + np.stack([parts[:, 0] + parts[:, 1], parts[:, 2], 0 * parts[:, 0]], axis=1) / 2
    assert log_density(points, codes, queries, pieces) == pytest.approx(np.log(expected))


def test_pieces_show_the_gap_in_a_class(rng: Rng) -> None:
    """A class of two distant clusters: with pieces its density is low between them."""
    side = np.repeat([0, 1], 100)
    points = np.concatenate([rng.normal(size=(200, 2)) + 20.0 * side[:, None], rng.normal(size=(50, 2)) - 20.0])
    codes, pieces = np.repeat([0, 1], [200, 50]), np.concatenate([side, np.full(50, 2)])
    middle, centre = np.array([[10.0, 10.0]]), np.array([[20.0, 20.0]])
    without = log_density(points, codes, middle)[0, 0] - log_density(points, codes, centre)[0, 0]
    with_pieces = log_density(points, codes, middle, pieces)[0, 0] - log_density(points, codes, centre, pieces)[0, 0]
    assert without > 0
    assert with_pieces < -1.0


def test_a_class_of_one_point_borrows_its_shape(rng: Rng) -> None:
    points, codes = sample(rng, (200, 200, 1), dim=4)
    points[-1] = points[:400].mean(axis=0) + 100.0
    found = log_density(points, codes, points)
    assert np.isfinite(found).all()
    assert found[-1].argmax() == 2
    assert (found[:400].argmax(axis=1) != 2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identical_points_have_finite_densities(rng: Rng, dtype: torch.dtype) -> None:
    places = np.eye(3)
    codes = np.repeat([0, 1, 2], [30, 4, 1])
    found = fit_densities(places[codes], codes, codes, dtype)[0](torch.eye(3, dtype=dtype))
    assert found.isfinite().all()
    assert found.argmax(dim=1).tolist() == [0, 1, 2]
    mixed = np.concatenate([rng.normal(size=(50, 3)), np.tile(places[0] + 9.0, (50, 1))])
    groups = np.repeat([0, 1], 50)
    assert log_density(mixed, groups, mixed).argmax(axis=1).tolist() == groups.tolist()


def test_one_class_much_larger(rng: Rng) -> None:
    """Where both classes overlap the larger wins by about the ratio of sizes; alone, the smaller class wins."""
    codes = np.repeat([0, 1], [20000, 10])
    points = rng.normal(size=(20010, 2))
    points[-10:] = points[:20000].mean(axis=0) + rng.normal(size=(10, 2))
    there = np.zeros((1, 2))
    together = log_density(points, codes, there)[0]
    # The scale matrix of ten points is at least 11 / 130 of the prior, so their t is at most 11.8 times as high.
    assert together[0] - together[1] > np.log(2000 / 11.8) - 0.1
    points[-10:] += 30.0
    assert log_density(points, codes, there + 30.0)[0].argmax() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_densities_of_distant_points_are_finite_and_decreasing(rng: Rng, dtype: torch.dtype) -> None:
    points, codes = sample(rng)
    model, _ = fit_densities(points, codes, codes, dtype)
    ray = torch.from_numpy(rng.normal(size=3)).to(dtype)
    ray /= ray.norm()
    far = model(torch.logspace(3, 15, 13, dtype=dtype)[:, None] * ray)
    assert far.isfinite().all()
    assert (far.diff(dim=0) < 0).all()
    gone = model(torch.stack([torch.full((3,), torch.nan, dtype=dtype), ray]))
    assert gone[0].isnan().all(), "a point of NaN must have the density NaN"
    assert gone[1].isfinite().all()


def test_float32_agrees_with_float64(rng: Rng) -> None:
    points, codes = sample(rng)
    queries = torch.from_numpy(5.0 * rng.normal(size=(200, 3)))
    exact = fit_densities(points, codes, codes, torch.float64)[0](queries)
    single = fit_densities(points, codes, codes)[0](queries.float())
    assert single.dtype == torch.float64
    # Relative errors of 1e-6 in the distance, times (degrees of freedom + dimension) / 2, at most 46 / 2.
    assert torch.allclose(single, exact, atol=1e-3)


def test_a_state_dict_of_other_sizes_can_be_loaded(rng: Rng) -> None:
    points, codes = sample(rng)
    model, other = fit64(points, codes, codes), fit64(*sample(rng, (10, 10), dim=2))
    resize_buffers(other, model.state_dict(), "")
    other.load_state_dict(model.state_dict())
    queries = torch.from_numpy(rng.normal(size=(20, 3)))
    assert torch.equal(other(queries), model(queries))
    assert other.classes == 3


def test_an_empty_batch_gives_no_densities(rng: Rng) -> None:
    points, codes = sample(rng)
    found: Tensor = fit64(points, codes)(torch.zeros(0, 3, dtype=torch.float64))
    assert found.shape == (0, 3)
