"""Evidence and nonconformity scores against closed forms, along rays and in files; polar coordinates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from sepc_torch.head.evidence.evidence import (
    DISTANCE_STEP,
    LOG_STEP,
    ODDS_STEP,
    Evidence,
    EvidenceValues,
    energies,
    fit_evidence,
    log_odds,
    on_grid,
    pieces_of,
    with_softmax,
)
from sepc_torch.head.reading.passes import _choose_reference_points, first_pass, second_pass
from sepc_torch.head.reading.projection import fit_projection, projection_from
from sepc_torch.head.reading.sources import ArraySource
from sepc_torch.model.derived import resize_buffers
from sepc_torch.partitioning.fit import partition
from sepc_torch.shapes import Array

Rng = np.random.Generator


def clusters(rng: Rng, count: int = 300, dim: int = 6, classes: int = 3) -> tuple[Array, Array]:
    """Classes in different directions; the means are ten standard deviations from zero."""
    codes = np.concatenate([np.arange(classes), rng.integers(0, classes, count - classes)])
    return 10.0 * np.eye(classes, dim)[codes] + rng.normal(size=(count, dim)), codes


def evidence_of(points: Array, codes: Array, pieces: Array, reference_points: int) -> Evidence:
    """The evidence of embeddings in memory; the projection of the partition does not affect it."""
    source = ArraySource(points, codes)
    first = first_pass(source)
    data = second_pass(source, first, projection_from(first.moments, 2, None, "pca"), reference_points)
    return fit_evidence(data, pieces)


def fitted(rng: Rng, reference_points: int = 1000) -> tuple[Evidence, Tensor, Tensor]:
    points, codes = clusters(rng)
    evidence = evidence_of(points, codes, np.full(len(codes), -1), reference_points)
    return evidence, torch.from_numpy(points).float(), torch.from_numpy(codes)


class TestPolar:
    def test_direction_and_log_length(self, rng: Rng) -> None:
        """The projection equals that of (x / |x|, log |x|), computed explicitly."""
        x, y = clusters(rng)
        project = fit_projection(x, y, 4, "polar", "pca", torch.float64)
        length = np.linalg.norm(x, axis=1, keepdims=True)
        polar = np.hstack([x / length, np.log(length)])
        centred = polar - polar.mean(axis=0)
        found = project(torch.from_numpy(x)).numpy()
        assert found == pytest.approx(centred @ project.matrix.numpy().T, abs=1e-9)
        assert found.var(axis=0) == pytest.approx(np.ones(4))
        values = np.linalg.svd(centred, compute_uv=False) ** 2
        directions = np.linalg.qr(project.matrix.numpy().T)[0]
        assert np.sum((centred @ directions) ** 2) == pytest.approx(values[:4].sum())
        assert project.in_features == 6

    def test_scale_of_the_input_does_not_matter(self, rng: Rng) -> None:
        x, y = clusters(rng)
        a = fit_projection(x, y, 7, "polar", "pca", torch.float64)
        for scale in (1e-8, 1e8):
            b = fit_projection(scale * x, y, 7, "polar", "pca", torch.float64)
            assert torch.allclose(a(torch.from_numpy(x)), b(torch.from_numpy(scale * x)), atol=1e-6)

    def test_length_moves_points_along_one_line(self, rng: Rng) -> None:
        x, y = clusters(rng)
        project = fit_projection(x, y, 7, "polar", "pca", torch.float64)
        z = torch.from_numpy(x)
        step = project.matrix[:, -1]
        assert torch.allclose(project(math.e * z) - project(z), step.expand(len(z), -1), atol=1e-9)

    def test_embeddings_without_a_direction_become_nan(self, rng: Rng) -> None:
        """Zeros, and values whose squares overflow, which normalising would turn into zeros."""
        x, y = clusters(rng)
        z = torch.from_numpy(x[:4]).float()
        z[1], z[2] = 0.0, 1e25
        assert fit_projection(x, y, 3, "l2", "pca")(z).isnan().all(dim=1).tolist() == [False, True, True, False]
        assert fit_projection(x, y, 3, "polar", "pca")(z).isnan().all(dim=1).tolist() == [False, False, True, False]

    def test_zeros_have_the_least_length(self, rng: Rng) -> None:
        """With the length as a feature, zeros have the least length, a thousandth of the median length."""
        x, y = clusters(rng)
        project = fit_projection(x, y, 7, "polar", "pca", torch.float64)
        direction = torch.from_numpy(x[:1] / np.linalg.norm(x[0]))
        least = 1e-3 * np.median(np.linalg.norm(x, axis=1))
        apart = project(torch.zeros(1, 6, dtype=torch.float64)) - project(least * direction)
        assert torch.allclose(apart, -direction @ project.matrix[:, :-1].T, atol=1e-9)


def test_log_odds_equal_the_logit_of_softmax(rng: Rng) -> None:
    score = torch.from_numpy(5.0 * rng.normal(size=(50, 4)))
    label = torch.from_numpy(rng.integers(0, 4, 50))
    own = score.softmax(dim=1).gather(1, label[:, None]).squeeze(1)
    assert torch.allclose(log_odds(score, label), torch.logit(own), atol=1e-9)
    shifted = log_odds(score + torch.from_numpy(1e3 * rng.normal(size=(50, 1))), label)
    assert torch.allclose(shifted, log_odds(score, label), atol=1e-9)


def test_softmax_is_the_first_column_and_increases_with_the_logit(rng: Rng) -> None:
    values = EvidenceValues(torch.from_numpy(rng.normal(size=(9, 2))).float(), torch.zeros(9, 3))
    label = torch.zeros(9, dtype=torch.int64)
    logits = torch.zeros(9, 3, dtype=torch.float64)
    logits[:, 0] = torch.linspace(-4, 4, 9)
    found = with_softmax(values, logits, label)
    assert torch.equal(found.support[:, 1:], values.support)
    assert torch.equal(found.nonconformity, values.nonconformity)
    assert torch.allclose(found.support[:, 0].double().sinh(), logits[:, 0] - np.log(2), atol=1e-5)


def test_infinite_logits_reach_the_bound() -> None:
    """Other classes masked by -inf, the label masked, the label infinite, all classes masked, and huge logits."""
    inf = torch.inf
    logits = torch.tensor([[1.0, -inf, -inf], [-inf, 1.0, 0.0], [inf, 0.0, 0.0], [-inf] * 3, [1e30, -1e30, 0.0]])
    values = EvidenceValues(torch.zeros(5, 1), torch.zeros(5, 1))
    found = with_softmax(values, logits, torch.zeros(5, dtype=torch.int64)).support[:, 0]
    assert found.tolist() == [10.0, -10.0, 10.0, 0.0, 10.0]


@pytest.mark.parametrize("reference_points", [0, 60, 1000])
def test_support_is_positive_for_the_true_class_only(rng: Rng, reference_points: int) -> None:
    """For points at the class means and all labels, in every column."""
    evidence, _, _ = fitted(rng, reference_points)
    for mean in range(3):
        z = 10.0 * torch.eye(6)[mean].expand(3, -1)
        support = evidence(z, torch.arange(3)).support
        assert support.shape == (3, len(evidence.support_names))
        own = torch.arange(3) == mean
        assert (support[own] > 1.0).all()
        assert (support[~own] < -1.0).all()


def test_support_for_two_classes_is_opposite(rng: Rng) -> None:
    points, codes = clusters(rng, classes=2)
    evidence = evidence_of(points, codes, codes, 1000)
    z = torch.from_numpy(3.0 * rng.normal(size=(50, 6))).float()
    label = torch.zeros(50, dtype=torch.int64)
    a, b = evidence(z, label), evidence(z, label + 1)
    assert torch.allclose(a.support, -b.support, atol=1e-4)
    assert torch.equal(a.nonconformity, b.nonconformity)


def test_the_neighbours_column_is_the_trust_score(rng: Rng) -> None:
    evidence, points, codes = fitted(rng)
    z = torch.from_numpy(5.0 * rng.normal(size=(40, 6))).float()
    label = torch.from_numpy(rng.integers(0, 3, 40))
    each = torch.cdist(z.double(), points.double())
    own = codes == label[:, None]
    ratio = each.masked_fill(own, torch.inf).amin(dim=1) / each.masked_fill(~own, torch.inf).amin(dim=1)
    values = evidence(z, label)
    # Each of the two logs is rounded by at most half a step.
    # Eleven bits change a distance d by at most the lengths of the row and of the point times 2^-12.
    bits = float(2.0**-12 * (points.double().norm(dim=1).amax() + z.double().norm(dim=1)).max() / each.amin())
    assert torch.allclose(values.support[:, 1], ratio.log(), rtol=0.0, atol=DISTANCE_STEP + 2.0 * bits + 1e-5)
    assert (values.support[:, 1] % DISTANCE_STEP == 0).all()
    assert torch.allclose(values.nonconformity[:, 1], each.amin(dim=1), rtol=0.51 * DISTANCE_STEP + bits, atol=0.0)
    white = fit_projection(points.double().numpy(), codes.numpy(), 64, None, "pca", torch.float64)
    rows, known = white(z.double()), white(points.double())
    unit = torch.cdist(rows, known).amin(dim=1)
    bits = float(2.0**-12 * ((known.norm(dim=1).amax() + rows.norm(dim=1)) / unit).max())
    assert torch.allclose(values.nonconformity[:, 2], unit, rtol=0.51 * DISTANCE_STEP + bits, atol=1e-5)


def test_what_depends_on_rounding_lies_on_grids(rng: Rng) -> None:
    """Columns are the nearest multiples of their steps, so changes far below a step change nothing."""
    evidence, _, _ = fitted(rng)
    logits = torch.from_numpy(8.0 * rng.normal(size=(200, 3)))
    z = torch.from_numpy(5.0 * rng.normal(size=(200, 6))).float()
    label = torch.from_numpy(rng.integers(0, 3, 200))
    measured = evidence.measure(z)
    values = evidence.values(measured, label)
    exact = torch.asinh(log_odds(measured.density, label)), torch.asinh(measured.density.amax(dim=1))
    for found, expected, step in (
        (values.support[:, 0], exact[0], ODDS_STEP),
        (-torch.asinh(values.nonconformity[:, 0]), exact[1], LOG_STEP),
        (values.nonconformity[:, 3].log(), measured.mahalanobis[0].log(), DISTANCE_STEP),
        (torch.asinh(energies(logits)), torch.asinh(-logits.logsumexp(dim=1)), LOG_STEP),
    ):
        steps = found / step
        assert torch.allclose(steps, steps.round(), rtol=0.0, atol=1e-9)
        assert ((found - expected).abs() <= step / 2 + 1e-12).all()
        assert torch.allclose(on_grid(expected, step), found, rtol=1e-12)
    other = evidence.values(measured._replace(density=measured.density * (1.0 + 1e-13)), label)
    assert torch.equal(other.support, values.support)
    assert torch.equal(other.nonconformity, values.nonconformity)


def test_a_training_point_has_the_largest_support(rng: Rng) -> None:
    """For a point with two labels in the training set, the support from neighbours is zero."""
    points, codes = clusters(rng)
    points[0] = points[1]
    codes[:2] = [0, 1]
    evidence = evidence_of(points, codes, np.full(300, -1), 1000)
    values = evidence(torch.from_numpy(points).float(), torch.from_numpy(codes))
    assert values.support.isfinite().all()
    assert values.support[:2, 1].tolist() == [0.0, 0.0]
    assert (values.support[2:, 1] == 7.0).all()
    assert (values.nonconformity[:, 1] == 0.0).all()


@pytest.mark.parametrize("reference_points", [0, 1000])
def test_nonconformity_increases_along_a_ray(rng: Rng, reference_points: int) -> None:
    """Along a ray from the origin, beyond all training points."""
    evidence, points, _ = fitted(rng, reference_points)
    ray = points[int(rng.integers(300))]
    z = torch.logspace(0.5, 8, 30)[:, None] * ray
    found = evidence(z, torch.zeros(30, dtype=torch.int64)).nonconformity
    assert found.shape == (30, len(evidence.kinds))
    assert found.isfinite().all()
    assert (found.diff(dim=0) > 0).all(), "distant points must have no ties"


def test_columns_with_and_without_reference_points(rng: Rng) -> None:
    evidence, points, codes = fitted(rng, 0)
    values = evidence(points, codes)
    assert (values.support.shape, values.nonconformity.shape) == ((300, 1), (300, 2))
    assert (evidence.kinds, evidence.support_names) == (("density", "mahalanobis"), ("regions",))
    full, _, _ = fitted(rng)
    assert full.support_names == ("regions", "neighbours")
    assert full.kinds == ("density", "nearest", "nearest_white", "mahalanobis")


def test_reference_points_are_proportional_to_class_sizes(rng: Rng) -> None:
    sizes = np.array([600, 399, 1])
    for most in (1, 100, 1000, 5000):
        chosen = _choose_reference_points(sizes, most, rng)
        expected = [max(1, int(min(1.0, most / 1000) * n)) for n in (600, 399, 1)]
        assert [int(part.sum()) for part in np.split(chosen, [600, 999])] == expected
        assert chosen.sum() <= max(most + 1, 3)
    assert not _choose_reference_points(sizes, 0, rng).any()


def test_pieces_belong_to_the_class_of_their_points(rng: Rng) -> None:
    points, codes = clusters(rng, dim=3)
    points[codes == 0] += np.where(rng.random((int((codes == 0).sum()), 1)) < 0.5, 0.0, 30.0) * [0.0, 0.0, 1.0]
    part = partition(points, codes, progress=False)
    pieces = pieces_of(part, points, codes)
    held = pieces >= 0
    assert held.any()
    assert (part.codes[pieces[held]] == codes[held]).all()
    assert (np.bincount(pieces[held])[pieces[held]] > 3).all()


@pytest.mark.parametrize("reference_points", [0, 50])
def test_checkpoints_keep_every_bit(rng: Rng, reference_points: int) -> None:
    evidence, points, codes = fitted(rng, reference_points)
    expected = evidence(points, codes)
    other, _, _ = fitted(rng, 1000)
    resize_buffers(other, evidence.state_dict(), "")
    other.load_state_dict(evidence.state_dict())
    assert other.support_names == evidence.support_names
    assert all(torch.equal(u, v) for u, v in zip(other(points, codes), expected, strict=True))


def test_no_gradient_and_no_rows(rng: Rng) -> None:
    evidence, points, codes = fitted(rng)
    assert not any(field.requires_grad for field in evidence(points.requires_grad_(), codes))
    empty = evidence(points[:0], codes[:0])
    assert empty.support.shape == (0, 2)
    assert empty.nonconformity.shape == (0, 4)


def test_embeddings_of_zeros(rng: Rng) -> None:
    """In training, zeros keep all values finite; without zeros in training, they have a large nonconformity score."""
    points, codes = clusters(rng)
    z, label = torch.from_numpy(points).float(), torch.from_numpy(codes)
    found = evidence_of(
        np.vstack([np.zeros((5, 6)), points]), np.append([0, 1, 2, 0, 0], codes), np.full(len(z) + 5, -1), 0
    )
    assert all(field.isfinite().all() for field in found(z, label))
    without = evidence_of(points, codes, codes, 1000)
    zero = without(torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64))
    assert all(field.isfinite().all() for field in zero)
    assert float(zero.nonconformity[0, 0]) > float(without(z, label).nonconformity[:, 0].max())
    with pytest.raises(ValueError, match="rescale the features"):
        evidence_of(1e30 * points, codes, codes, 0)


@pytest.mark.parametrize("scale", [1e-8, 1e8])
def test_scale_of_the_embeddings_does_not_matter(rng: Rng, scale: float) -> None:
    points, codes = clusters(rng)
    z, label = torch.from_numpy(2.0 * rng.normal(size=(50, 6))), torch.from_numpy(rng.integers(0, 3, 50))
    a = evidence_of(points, codes, codes, 1000)(z, label)
    b = evidence_of(scale * points, codes, codes, 1000)(scale * z, label)
    assert torch.allclose(a.support, b.support, atol=0.01)
    units = torch.tensor([1.0, scale, 1.0, 1.0])
    assert torch.allclose(a.nonconformity * units, b.nonconformity, rtol=2 * LOG_STEP)
