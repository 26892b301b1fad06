"""Baselines: closed forms, invariances, brute force, degenerate inputs, and the detectors of pytorch-ood."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from peer_libraries import peer
from sklearn.neighbors import KDTree
from torch import Tensor
from torch.distributions import Categorical, MultivariateNormal

from sepc_torch.metrics import aurc, baselines
from sepc_torch.metrics.baselines import (
    DICE,
    FDBD,
    NCI,
    SHE,
    SIRC,
    Gaussians,
    KLMatching,
    Mahalanobis,
    MaxLogitPNorm,
    NearestNeighbours,
    NNGuide,
    OneEllipsoid,
    ReAct,
    RelativeMahalanobis,
    TrustScore,
    ViM,
    ash,
    baseline_scores,
    energy,
    entropy,
    fit_temperature,
    gen,
    margin,
    max_logit,
    max_softmax,
    scale,
)

Rng = np.random.Generator
CLASSES, DIM = 3, 5


class Data(NamedTuple):
    """Three classes of different size, shape and location, rows to score, and a linear classifier."""

    z: Tensor
    y: Tensor
    test: Tensor
    weight: Tensor
    bias: Tensor

    @property
    def logits(self) -> Tensor:
        """Logits of the rows to score."""
        return self.test @ self.weight.T + self.bias

    @property
    def train_logits(self) -> Tensor:
        """Logits of the training rows."""
        return self.z @ self.weight.T + self.bias

    @property
    def layer(self) -> torch.nn.Linear:
        """The linear classifier as a module, in the default dtype."""
        layer = torch.nn.Linear(DIM, CLASSES)
        layer.load_state_dict({"weight": self.weight, "bias": self.bias})
        return layer

    @property
    def predicted(self) -> Tensor:
        """Predicted labels of the rows to score."""
        return self.logits.argmax(dim=1)


@pytest.fixture
def data(rng: Rng) -> Data:
    y = torch.from_numpy(rng.permutation(np.repeat(np.arange(CLASSES), [40, 60, 90])))
    shapes = torch.from_numpy(rng.normal(size=(CLASSES, DIM, DIM)))
    centers = torch.from_numpy(4.0 * rng.normal(size=(CLASSES, DIM)))
    noise = torch.from_numpy(rng.normal(size=(len(y), DIM)))
    z = centers[y] + torch.einsum("nde,ne->nd", shapes[y], noise)
    test = torch.from_numpy(6.0 * rng.normal(size=(70, DIM)))
    weight, bias = torch.from_numpy(rng.normal(size=(CLASSES, DIM))), torch.from_numpy(rng.normal(size=CLASSES))
    return Data(z, y, test, weight, bias)


@pytest.fixture
def in_double() -> Generator[None]:
    """Sets the default dtype to float64, in which pytorch-ood then creates its tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


Score = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
LEARNT: dict[str, Score] = {
    "mahalanobis": lambda z, y, test, predicted: Mahalanobis.fit(z, y).score(test, predicted),
    "mahalanobis++": lambda z, y, test, predicted: Mahalanobis.fit(z, y, unit_length=True).score(test, predicted),
    "relative": lambda z, y, test, predicted: RelativeMahalanobis.fit(z, y).score(test, predicted),
    "relative++": lambda z, y, test, predicted: RelativeMahalanobis.fit(z, y, unit_length=True).score(test, predicted),
    "gaussians": lambda z, y, test, predicted: Gaussians.fit(z, y).score(test, predicted),
    "knn": lambda z, y, test, predicted: NearestNeighbours.fit(z, y).score(test),
    "trust_score": lambda z, y, test, predicted: TrustScore.fit(z, y).score(test, predicted),
    "trust_score_filtered": lambda z, y, test, predicted: TrustScore.fit(z, y, alpha=0.2).score(test, predicted),
    "ellipsoid_distance": lambda z, y, test, predicted: OneEllipsoid.fit(z, y, tol=1e-9).distance(test, predicted),
    "ellipsoid_ratio": lambda z, y, test, predicted: OneEllipsoid.fit(z, y, tol=1e-9).score(test, predicted),
}
learnt = pytest.mark.parametrize("score", LEARNT.values(), ids=LEARNT)
AFFINE = ["mahalanobis", "relative", "ellipsoid_distance", "ellipsoid_ratio"]


def close(found: Tensor, expected: Tensor, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, check_dtype=False)


def drawn(logits: Tensor, rng: Rng) -> Tensor:
    """Labels drawn from the softmax probabilities of the logits."""
    return (logits + torch.from_numpy(rng.gumbel(size=logits.shape))).argmax(dim=1)


def test_scores_of_logits(rng: Rng) -> None:
    logits = torch.from_numpy(rng.normal(size=(50, 7)) * 3.0)
    p = logits.exp() / logits.exp().sum(dim=1, keepdim=True)
    close(max_softmax(logits), p.amax(dim=1))
    close(max_softmax(logits, temperature=2.0), p.sqrt().amax(dim=1) / p.sqrt().sum(dim=1))
    close(entropy(logits), -Categorical(logits=logits).entropy())
    close(max_logit(logits), logits.amax(dim=1))
    close(energy(logits), logits.exp().sum(dim=1).log())
    close(gen(logits), -(p * (1 - p)).pow(0.1).sum(dim=1))
    close(gen(logits, gamma=1.0), p.square().sum(dim=1) - 1.0)
    top = p.sort(dim=1, descending=True).values[:, :2]
    sure = torch.tensor([[60.0, 0.0]], dtype=torch.float64)  # 1 - p rounds to zero; e^-60 does not
    close(gen(sure), torch.full((1,), -2.0 * math.exp(-6.0), dtype=torch.float64))
    close(gen(logits, gamma=0.3, m=2), -(top * (1 - top)).pow(0.3).sum(dim=1))


def test_scores_of_logits_have_the_same_order_for_two_classes(rng: Rng) -> None:
    logits = torch.from_numpy(rng.normal(size=(200, 2)))
    order = max_softmax(logits).argsort()
    for score in (entropy, gen):
        assert torch.equal(score(logits).argsort(), order)


def test_large_logits_give_finite_scores() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4], [0.0, 0.0, 0.0]], dtype=torch.float32)
    for score in (max_softmax, entropy, max_logit, energy, gen):
        values = score(logits)
        assert values.dtype == torch.float64
        assert values.isfinite().all()
        assert values[0] > values[1]


def test_temperature_minimises_the_loss(rng: Rng) -> None:
    logits = torch.from_numpy(rng.normal(size=(300, 4)) * 3.0)
    labels = drawn(logits / 2.5, rng)
    found = fit_temperature(logits, labels)
    t = torch.tensor(found, dtype=torch.float64, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits / t, labels)
    (slope,) = torch.autograd.grad(loss, t)
    assert abs(float(slope)) < 1e-12
    for other in (found / 1.1, found * 1.1):
        assert torch.nn.functional.cross_entropy(logits / other, labels) > loss


def test_temperature_with_one_mistake_in_a_thousand() -> None:
    """Closed form for two classes: margin / log-odds of being right. Plain Newton steps converge slowly here."""
    logits = torch.tensor([[9.0, 0.0]]).repeat(1001, 1)
    labels = torch.zeros(1001, dtype=torch.int64)
    labels[0] = 1
    assert fit_temperature(logits, labels) == pytest.approx(9.0 / math.log(1000.0), rel=1e-9)
    assert fit_temperature(logits / 64, labels) == pytest.approx(9.0 / 64 / math.log(1000.0), rel=1e-9)


@pytest.mark.parametrize("factor", [1e-6, 0.1, 1e5])
def test_temperature_has_the_units_of_logits(factor: float, rng: Rng) -> None:
    logits = torch.from_numpy(rng.normal(size=(300, 4)))
    labels = drawn(logits, rng)
    expected = fit_temperature(logits, labels)
    offset = torch.from_numpy(rng.normal(size=(300, 1)))  # the softmax does not depend on it
    assert fit_temperature(factor * (logits + offset), labels) == pytest.approx(factor * expected, rel=1e-6)


def test_temperature_without_an_optimum() -> None:
    logits = torch.tensor([[3.0, 0.0], [0.0, 3.0]])
    assert 0.0 < fit_temperature(logits, torch.tensor([0, 1])) < 0.01  # never wrong: the lower bound
    assert 100.0 < fit_temperature(logits, torch.tensor([1, 0])) < math.inf  # always wrong: the upper bound
    assert fit_temperature(torch.zeros(2, 2), torch.tensor([1, 0])) == 1.0


def test_mahalanobis_agrees_with_gaussians_of_one_covariance(data: Data) -> None:
    means = torch.stack([data.z[data.y == c].mean(dim=0) for c in range(CLASSES)])
    covariance = torch.cov((data.z - means[data.y]).T, correction=0)
    everything = MultivariateNormal(data.z.mean(dim=0), torch.cov(data.z.T, correction=0))
    one = [MultivariateNormal(mean, covariance) for mean in means]
    squared = torch.stack([2.0 * (g.log_prob(g.mean) - g.log_prob(data.test)) for g in one], dim=1)
    background = 2.0 * (everything.log_prob(everything.mean) - everything.log_prob(data.test))
    close(Mahalanobis.fit(data.z, data.y).distances(data.test), squared)
    close(Mahalanobis.fit(data.z, data.y).score(data.test), -squared.amin(dim=1))
    close(RelativeMahalanobis.fit(data.z, data.y).score(data.test), background - squared.amin(dim=1))


def test_unit_length_equals_scaling_before_the_fit(data: Data) -> None:
    unit, test = (v / v.norm(dim=1, keepdim=True) for v in (data.z, data.test))
    close(Mahalanobis.fit(data.z, data.y, unit_length=True).score(data.test), Mahalanobis.fit(unit, data.y).score(test))


def test_gaussians_agree_with_the_mixture_density(data: Data) -> None:
    logs = []
    for c in range(CLASSES):
        own = data.z[data.y == c]
        gaussian = MultivariateNormal(own.mean(dim=0), torch.cov(own.T))
        logs.append(math.log(len(own) / len(data.z)) + gaussian.log_prob(data.test))
    close(Gaussians.fit(data.z, data.y, ridge=0.0).score(data.test), torch.stack(logs).logsumexp(dim=0))


@pytest.mark.parametrize("k", [1, 2, 50, 10_000])
def test_neighbours_by_brute_force(k: int, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    unit, test = (v / v.norm(dim=1, keepdim=True) for v in (data.z, data.test))
    distances = (test.unsqueeze(1) - unit).norm(dim=2).sort(dim=1).values
    expected = -distances[:, min(k, len(unit)) - 1]
    close(NearestNeighbours.fit(data.z, data.y, k=k).score(data.test), expected)
    monkeypatch.setattr(baselines.shared, "ENTRIES", 1000)  # forces small batches
    close(NearestNeighbours.fit(data.z, data.y, k=k).score(data.test), expected)


@pytest.mark.parametrize(("points", "k"), [(3, 1), (1400, 1), (1600, 2), (50_000, 50)])
def test_default_k_is_a_thousandth_of_the_points(points: int, k: int) -> None:
    assert NearestNeighbours.fit(torch.ones(points, 1), torch.zeros(points, dtype=torch.int64)).k == k


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5])
def test_trust_score_agrees_with_the_authors_algorithm(alpha: float, data: Data) -> None:
    """The authors query a KDTree per class for the second neighbour, and filter each class by its tenth."""
    columns = []
    for c in range(CLASSES):
        own = data.z[data.y == c].numpy()
        radius = KDTree(own).query(own, k=10)[0][:, -1]
        own = own[radius <= np.percentile(radius, (1 - alpha) * 100) * (1 + 1e-12)]
        columns.append(KDTree(own).query(data.test.numpy(), k=2)[0][:, -1])
    distances, rows, label = np.stack(columns, axis=1), np.arange(len(data.test)), data.predicted.numpy()
    own = distances[rows, label].copy()
    distances[rows, label] = np.inf
    expected = torch.from_numpy(distances.min(axis=1) / (own + 1e-12))
    close(TrustScore.fit(data.z, data.y, alpha=alpha).score(data.test, data.predicted), expected)


def test_one_ellipsoid_contains_its_class(data: Data) -> None:
    found = OneEllipsoid.fit(data.z, data.y)
    own = -found.distance(data.z, data.y)
    assert own.max() == pytest.approx(1.0, abs=1e-6)
    ratio = found.score(data.z, data.y)
    close(ratio, found.distances(data.z).scatter(1, data.y.unsqueeze(1), math.inf).amin(dim=1) / own)


def test_vim_scales_the_residual_to_the_logits(data: Data) -> None:
    logits = data.z @ data.weight.T + data.bias
    found = ViM.fit(data.z, logits, classifier=(data.weight, data.bias), principal=2)
    close(found.origin @ data.weight.T, -data.bias)  # where all logits are zero
    virtual = energy(logits) - found.score(data.z, logits)
    assert float(virtual.mean()) == pytest.approx(float(logits.amax(dim=1).mean()))
    # Inside the principal space the residual is zero, and the score is the energy.
    inside = data.test - (data.test - found.origin) @ found.residual @ found.residual.T
    close(found.score(inside, data.logits), energy(data.logits))


@pytest.mark.parametrize(("dim", "principal"), [(1, 0), (5, 2), (512, 256), (513, 512)])
def test_vim_default_dimension(dim: int, principal: int, rng: Rng) -> None:
    z = torch.from_numpy(rng.normal(size=(20, dim)))
    assert ViM.fit(z, z[:, :1].expand(20, 2)).residual.shape == (dim, dim - principal)


@learnt
def test_scores_do_not_depend_on_the_scale(score: Score, data: Data) -> None:
    """Scaling the embeddings does not change a score; only the log density shifts by a known constant."""
    expected = score(data.z, data.y, data.test, data.predicted)
    for factor in (2.0**-40, 2.0**30):  # exact in floating point
        found = score(factor * data.z, data.y, factor * data.test, data.predicted)
        if score is LEARNT["gaussians"]:
            found = found + DIM * math.log(factor)
        close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("score", [LEARNT[name] for name in AFFINE], ids=AFFINE)
def test_affine_maps_do_not_change_scores(score: Score, data: Data, rng: Rng) -> None:
    turn = torch.linalg.qr(torch.from_numpy(rng.normal(size=(DIM, DIM)))).Q
    matrix = turn * torch.tensor([1e-3, 0.1, 1.0, 10.0, 1e3])
    offset = 10.0 * torch.from_numpy(rng.normal(size=DIM))
    found = score(data.z @ matrix + offset, data.y, data.test @ matrix + offset, data.predicted)
    close(found, score(data.z, data.y, data.test, data.predicted), rtol=1e-5, atol=1e-5)


@learnt
def test_scores_do_not_depend_on_class_codes_or_row_order(score: Score, data: Data, rng: Rng) -> None:
    expected = score(data.z, data.y, data.test, data.predicted)
    names, order = torch.tensor([2, 0, 1]), torch.from_numpy(rng.permutation(len(data.z)))
    found = score(data.z[order], names[data.y[order]], data.test, names[data.predicted])
    close(found, expected, rtol=1e-6, atol=1e-6)


@learnt
def test_degenerate_classes_give_finite_scores(score: Score, rng: Rng) -> None:
    """Classes with fewer points than dimensions, a feature that is always zero, and a class of one point."""
    z = torch.from_numpy(np.maximum(rng.normal(size=(30, 40)) + 0.5, 0.0)).float()
    z[:, 7] = 0.0
    y = torch.tensor([0] * 14 + [1] * 15 + [2])
    test = torch.from_numpy(np.maximum(rng.normal(size=(9, 40)), 0.0)).float()
    values = score(z, y, test, torch.arange(9) % 3)
    assert values.shape == (9,)
    assert values.dtype == torch.float64
    assert values.isfinite().all()


def test_trust_score_is_finite_on_training_points(data: Data) -> None:
    """At the location of two training points of the class the distance is zero; the score is large but finite."""
    twice = torch.cat([data.z, data.z])
    values = TrustScore.fit(twice, torch.cat([data.y, data.y])).score(data.z, data.y)
    assert values.isfinite().all()
    assert values.min() > 1e6


def test_baseline_scores_returns_every_score(data: Data) -> None:
    logits = data.z @ data.weight.T + data.bias
    plain = baseline_scores(data.z, data.y, data.test, data.logits)
    full = baseline_scores(
        data.z, data.y, data.test, data.logits, logits, (logits, data.y), classifier=(data.weight, data.bias)
    )
    assert full.keys() - plain.keys() == {
        *("scaled_softmax", "kl_matching", "max_logit_p_norm"),
        *("vim", "nnguide", "she"),
        *("react", "ash", "scale", "dice", "nci", "fdbd", "geometric_margin"),
    }
    for name, values in full.items():
        assert values.shape == (len(data.test),), name
        assert values.dtype == torch.float64, name
        assert values.isfinite().all(), name
    for name in LEARNT.keys() & full.keys():
        tol = 1e-2 if name.startswith("ellipsoid") else 1e-9  # the ellipsoids are solved to another tolerance
        close(full[name], LEARNT[name](data.z, data.y, data.test, data.predicted), rtol=tol)
    relative = RelativeMahalanobis.fit(data.z, data.y, unit_length=True)
    close(full["relative_mahalanobis++"], relative.score(data.test))


def test_rows_far_from_the_training_set_have_lower_scores(rng: Rng) -> None:
    """Compares rows of the training distribution with rows far from it."""
    y = torch.from_numpy(rng.integers(0, 2, 400))
    centers = torch.tensor([[8.0, 0.0, 0.0], [0.0, 8.0, 0.0]], dtype=torch.float64)
    z = centers[y] + torch.from_numpy(rng.normal(size=(400, 3)))
    far = torch.tensor([0.0, 0.0, 40.0]) + torch.from_numpy(rng.normal(size=(100, 3)))
    test = torch.cat([z[300:], far])
    scores = baseline_scores(z[:300], y[:300], test, test[:, :2], z[:300, :2])
    for name in scores.keys() - {"relative_mahalanobis", "relative_mahalanobis++"}:
        assert scores[name][:100].median() > scores[name][100:].median(), name


def test_input_errors(data: Data) -> None:
    with pytest.raises(ValueError, match="one label"):
        fit_temperature(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="negative"):
        Mahalanobis.fit(data.z, data.y - 1)
    with pytest.raises(ValueError, match=r"label \[0\]"):
        TrustScore.fit(data.z, data.y + 1)
    with pytest.raises(ValueError, match="NaN"):
        NearestNeighbours.fit(data.z / 0.0, data.y)
    with pytest.raises(ValueError, match="alpha must be at least 0 and below 1"):
        TrustScore.fit(data.z, data.y, alpha=1.0)
    with pytest.raises(ValueError, match="principal must lie between 0 and 4"):
        ViM.fit(data.z, data.z, principal=DIM)
    with pytest.raises(ValueError, match="k must"):
        NearestNeighbours.fit(data.z, data.y, k=0)
    with pytest.raises(ValueError, match="temperature"):
        max_softmax(data.z, temperature=0.0)


def test_peers_scores_of_logits(rng: Rng) -> None:
    """pytorch-ood averages the generalised entropy, and clips the probabilities of both entropies at 1e-7."""
    logits = torch.from_numpy(rng.normal(size=(50, 7)))
    close(
        max_softmax(logits, 2.0), -peer("pytorch_ood.detector.softmax").MaxSoftmax(None, t=2.0).predict_logits(logits)
    )
    close(entropy(logits), -peer("pytorch_ood.detector.entropy").Entropy(None).predict_logits(logits), rtol=1e-5)
    close(max_logit(logits), -peer("pytorch_ood.detector.maxlogit").MaxLogit(None).predict_logits(logits))
    close(energy(logits), -peer("pytorch_ood.detector.energy").EnergyBased(None).predict_logits(logits))
    theirs = peer("pytorch_ood.detector.gen").GEN(None, gamma=0.1, M=4).predict_logits(logits)
    close(gen(logits, gamma=0.1, m=4), -4.0 * theirs, rtol=1e-6)


def test_peers_temperature_lies_between_one_and_the_optimum(rng: Rng) -> None:
    """pytorch-ood takes fifty short L-BFGS steps from 1 and stops before the optimum."""
    logits = torch.from_numpy(rng.normal(size=(300, 4)) * 3.0).float()
    labels = drawn(logits / 2.0, rng)
    theirs = peer("pytorch_ood.detector.tscaling").TemperatureScaling(None).fit_logits(logits, labels).t.item()
    assert 1.0 < theirs < fit_temperature(logits, labels) * (1 + 1e-3)


@pytest.mark.usefixtures("in_double")
def test_peers_mahalanobis(data: Data) -> None:
    """The covariance of pytorch-ood is a sum, not a mean, and its Mahalanobis score is half the squared distance."""
    theirs = peer("pytorch_ood.detector.mahalanobis").Mahalanobis(None).fit_features(data.z, data.y)
    expected = -2.0 * len(data.z) * theirs.predict_features(data.test)
    close(Mahalanobis.fit(data.z, data.y).score(data.test), expected, rtol=1e-4)
    theirs = peer("pytorch_ood.detector.rmd").RMD(None).fit_features(data.z, data.y)
    expected = -len(data.z) * theirs.predict_features(data.test)
    close(RelativeMahalanobis.fit(data.z, data.y).score(data.test), expected, rtol=1e-4, atol=1e-4)


def test_peers_gaussians(data: Data) -> None:
    """pytorch-ood divides the covariance by n, the authors of DDU by n - 1; the test rescales the deviations."""
    stretched = data.z.clone()
    for c in range(CLASSES):
        own = data.z[data.y == c]
        mean = own.mean(dim=0)
        stretched[data.y == c] = mean + (own - mean) * math.sqrt(len(own) / (len(own) - 1))
    theirs = peer("pytorch_ood.detector.gmm").GMM(None, reg=0.0).fit_features(stretched, data.y)
    close(Gaussians.fit(data.z, data.y, ridge=0.0).score(data.test), -theirs.predict_features(data.test), rtol=1e-6)


@pytest.mark.parametrize("k", [1, 50])
def test_peers_neighbours(k: int, data: Data) -> None:
    theirs = peer("pytorch_ood.detector.knn").KNN(None, k=k).fit_features(data.z, data.y)
    close(NearestNeighbours.fit(data.z, data.y, k=k).score(data.test), -theirs.predict_features(data.test), atol=1e-7)


def test_peers_vim(data: Data) -> None:
    """pytorch-ood computes ViM in float32, hence the tolerance."""
    theirs = peer("pytorch_ood.detector.vim").ViM(None, d=2, w=data.weight, b=data.bias).fit_features(data.z, data.y)
    logits = data.z @ data.weight.T + data.bias
    ours = ViM.fit(data.z, logits, classifier=(data.weight, data.bias), principal=2)
    assert ours.alpha == pytest.approx(theirs.alpha, rel=1e-4)
    close(ours.score(data.test, data.logits), -theirs.predict_features(data.test).double(), rtol=1e-3, atol=1e-3)


def test_peers_nnguide(data: Data) -> None:
    """pytorch-ood computes in float32, hence the tolerance."""
    head = torch.nn.Linear(DIM, CLASSES)
    head.weight.data, head.bias.data = data.weight.float(), data.bias.float()
    theirs = peer("pytorch_ood.detector.nnguide").NNGuide(None, head, k=10).fit_features(data.z, data.y)
    logits = data.z @ data.weight.T + data.bias
    ours = NNGuide.fit(data.z, logits).score(data.test, data.logits)
    close(ours, -theirs.predict_features(data.test.float()).double(), rtol=1e-3, atol=1e-3)


def test_peers_fdbd(data: Data) -> None:
    head = torch.nn.Linear(DIM, CLASSES)
    head.weight.data, head.bias.data = data.weight.float(), data.bias.float()
    theirs = peer("pytorch_ood.detector.fdbd").fDBD(None, head).fit_features(data.z)
    ours = FDBD.fit(data.z, data.weight).score(data.test, data.logits)
    close(ours, -theirs.predict_features(data.test).double(), rtol=1e-3, atol=1e-4)


def test_scores_of_embeddings_and_logits_by_the_formulas(data: Data) -> None:
    """NNGuide, fDBD and SIRC as their authors write them, row by row."""
    train_logits = (data.z @ data.weight.T + data.bias).numpy()
    z, w, test, logits = (part.numpy() for part in (data.z, data.weight, data.test, data.logits))

    def log_sum(values: np.ndarray) -> float:
        return float(np.log(np.exp(values - values.max()).sum()) + values.max())

    norms = np.abs(z).sum(axis=1)
    a, b = norms.mean() - 3 * norms.std(), 1 / norms.std()
    guide, boundary, sirc = [], [], []
    for point, row in zip(test, logits, strict=True):
        cosines = z @ point / np.linalg.norm(z, axis=1) / np.linalg.norm(point)
        weighted = sorted(c * log_sum(r) for c, r in zip(cosines, train_logits, strict=True))
        guide.append(log_sum(row) * np.mean(weighted[-10:]))
        best = int(row.argmax())
        others = [c for c in range(CLASSES) if c != best]
        distances = [(row[best] - row[c]) / np.linalg.norm(w[best] - w[c]) for c in others]
        boundary.append(np.mean(distances) / np.linalg.norm(point - z.mean(axis=0)))
        rest = sum(np.exp(row[c] - log_sum(row)) for c in others)
        sirc.append(-rest * (1 + np.exp(-b * (np.abs(point).sum() - a))))
    close(NNGuide.fit(data.z, torch.from_numpy(train_logits)).score(data.test, data.logits), torch.tensor(guide))
    close(FDBD.fit(data.z, data.weight).score(data.test, data.logits), torch.tensor(boundary))
    close(SIRC.fit(data.z).score(data.test, data.logits), -torch.tensor(sirc).neg().log())


ON_LAYER: dict[str, Callable[[Data], Tensor]] = {
    "react": lambda d: ReAct.fit(d.z, d.weight, d.bias).score(d.test),
    "ash": lambda d: ash(d.test, d.weight, d.bias),
    "scale": lambda d: scale(d.test, d.weight, d.bias),
    "dice": lambda d: DICE.fit(d.z, d.weight, d.bias).score(d.test),
    "nci": lambda d: NCI.fit(d.z, d.weight).score(d.test, d.logits),
    "she": lambda d: SHE.fit(d.z, d.y, d.train_logits).score(d.test, d.logits),
    "fdbd": lambda d: FDBD.fit(d.z, d.weight).score(d.test, d.logits),
    "geometric_margin": lambda d: margin(d.logits, classifier=(d.weight, d.bias)),
}
on_layer = pytest.mark.parametrize("score", ON_LAYER.values(), ids=ON_LAYER)


@on_layer
def test_scores_of_the_last_layer_do_not_depend_on_the_order_of_classes_and_features(
    score: Callable[[Data], Tensor], data: Data, rng: Rng
) -> None:
    names, places = torch.tensor([2, 0, 1]), torch.from_numpy(rng.permutation(DIM))
    back = names.argsort()
    turned = Data(data.z[:, places], names[data.y], data.test[:, places], data.weight[back][:, places], data.bias[back])
    close(score(turned), score(data))


@on_layer
def test_scores_of_the_last_layer_are_finite_on_degenerate_rows(score: Callable[[Data], Tensor], data: Data) -> None:
    """A row of zeros, the mean of the training rows, a row without a positive entry, and a layer of zeros."""
    rows = torch.stack([torch.zeros(DIM, dtype=torch.float64), data.z.mean(dim=0), -data.test[0].abs()])
    assert score(data._replace(test=rows)).isfinite().all()
    assert score(data._replace(test=rows, weight=0.0 * data.weight, bias=0.0 * data.bias)).isfinite().all()


def test_shaping_without_pruning_or_clipping_is_the_energy(data: Data) -> None:
    layer = data.weight, data.bias
    close(ReAct(math.inf, *layer).score(data.test), energy(data.logits))
    points = data.test.abs()
    for shaped in (ash, scale):  # both sums are equal
        close(shaped(points, *layer, pruned=0.0), energy(math.e * points @ data.weight.T + data.bias))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.65, 0.9])
def test_quantiles_of_react_and_dice(share: float, data: Data) -> None:
    assert ReAct.fit(data.z, data.weight, data.bias, quantile=share).limit == pytest.approx(np.quantile(data.z, share))
    kept = int((DICE.fit(data.z, data.weight, data.bias, sparsity=share).weight != 0).sum())
    assert kept == CLASSES * DIM - 1 - int(share * (CLASSES * DIM - 1))


def test_margins_by_the_formulas(data: Data) -> None:
    ordered = data.logits.sort(dim=1).values
    close(margin(data.logits), ordered[:, -1] - ordered[:, -2])
    distances = data.logits / torch.sqrt(data.weight.square().sum(dim=1) + data.bias.square())
    ordered = distances.sort(dim=1).values
    close(margin(data.logits, classifier=(data.weight, data.bias)), ordered[:, -1] - ordered[:, -2])
    scaled = torch.tensor([2.0, 5.0, 0.1]).unsqueeze(1)  # the geometric margin depends on the hyperplanes alone
    layer = scaled * data.weight, scaled.squeeze(1) * data.bias
    close(
        margin(data.test @ layer[0].T + layer[1], classifier=layer),
        margin(data.logits, classifier=(data.weight, data.bias)),
    )


def test_p_norm_by_the_formula_and_its_choice(rng: Rng) -> None:
    logits = torch.from_numpy(rng.normal(size=(400, 5)) * 3.0)
    labels = drawn(logits, rng)
    right = logits.argmax(dim=1) == labels
    values = []
    for p in range(10):
        centred = logits.numpy() - logits.numpy().mean(axis=1, keepdims=True)
        norm = np.linalg.norm(centred, ord=p, axis=1) if p else np.full(len(centred), 5.0)
        close(MaxLogitPNorm(p).score(logits), torch.from_numpy(centred.max(axis=1) / norm))
        values.append(float(aurc(MaxLogitPNorm(p).score(logits), right)))
    found = MaxLogitPNorm.fit(logits, labels)
    best = float(aurc(found.score(logits), right))
    assert best == min([*values, float(aurc(max_softmax(logits), right))])
    assert float(MaxLogitPNorm(3).score(torch.zeros(1, 5))) == 0.0
    close(MaxLogitPNorm(None).score(logits), max_softmax(logits))
    # Logits whose length says nothing about mistakes: a norm repairs what softmax loses.
    lengths = torch.from_numpy(10.0 ** rng.uniform(-2.0, 2.0, (400, 1)))
    repaired = MaxLogitPNorm.fit(lengths * logits, labels)
    assert repaired.p is not None
    assert aurc(repaired.score(lengths * logits), right) < aurc(max_softmax(lengths * logits), right)


def test_she_uses_the_correctly_labelled_rows(data: Data) -> None:
    logits = torch.nn.functional.one_hot(data.y, CLASSES).double()
    logits[:100] = logits[:100].roll(1, dims=1)  # wrong
    patterns = SHE.fit(data.z, data.y, logits).patterns
    for c in range(CLASSES):
        close(patterns[c], data.z[100:][data.y[100:] == c].mean(dim=0))
    never = SHE.fit(data.z, data.y, logits.roll(1, dims=1)[:, :1] - torch.eye(CLASSES)[data.y]).patterns
    close(never, torch.stack([data.z[data.y == c].mean(dim=0) for c in range(CLASSES)]))


def test_kl_matching_by_the_formula(rng: Rng) -> None:
    held_out, logits = (torch.from_numpy(rng.normal(size=(n, 4)) * 2.0) for n in (60, 30))
    held_out[:, 3] = -9.0  # never predicted
    p, q = held_out.softmax(dim=1), logits.softmax(dim=1)
    typical = [p[p.argmax(dim=1) == k].mean(dim=0) for k in range(3)]
    divergence = torch.stack([(q * (q / d).log()).sum(dim=1) for d in typical], dim=1)
    found = KLMatching.fit(held_out)
    assert len(found.log_typical) == 3
    close(found.score(logits), -divergence.amin(dim=1))
    sure = 2000.0 * torch.eye(4, dtype=torch.float64)  # e^-2000 is zero in float64
    assert KLMatching.fit(sure).score(torch.cat([sure, -sure])).isfinite().all()
    close(KLMatching.fit(sure).score(sure), torch.zeros(4))


def test_shares_outside_the_range_are_refused(data: Data) -> None:
    for call in (
        lambda: ReAct.fit(data.z, data.weight, data.bias, quantile=90.0),
        lambda: DICE.fit(data.z, data.weight, data.bias, sparsity=1.0),
        lambda: ash(data.test, data.weight, data.bias, pruned=-0.1),
        lambda: scale(data.test, data.weight, data.bias, pruned=65.0),
    ):
        with pytest.raises(ValueError, match="must be at least 0 and below 1"):
            call()


@pytest.mark.usefixtures("in_double")
def test_peers_scores_of_the_last_layer(data: Data) -> None:
    """pytorch-ood computes NCI in float32, hence the tolerance, and reads activations as feature maps."""
    layer, maps = data.layer, data.test.abs().unsqueeze(2).unsqueeze(3)
    head = torch.nn.Sequential(torch.nn.Flatten(), layer)
    points, used = data.test.abs(), (data.weight, data.bias)
    theirs = peer("pytorch_ood.detector.react").ReAct(None, head, percentile=0.9)
    theirs.fit_feature_maps(data.z, data.y)
    close(ReAct.fit(data.z, *used).score(points), -theirs.predict_feature_maps(maps))
    for pruned in (0.0, 0.4, 0.65, 0.8):  # with 0.9, pytorch-ood keeps none of five entries
        theirs = peer("pytorch_ood.detector.ash").ASH(None, head, "ash-s", pruned).predict_feature_maps(maps)
        close(ash(points, *used, pruned=pruned), -theirs)
        theirs = peer("pytorch_ood.detector.scale").SCALE(None, head, pruned).predict_feature_maps(maps)
        close(scale(points, *used, pruned=pruned), -theirs)
    for alpha in (1e-4, 0.1):
        theirs = peer("pytorch_ood.detector.nci").NCI(None, layer.float(), alpha).fit_features(data.z)
        ours = NCI.fit(data.z, data.weight, alpha=alpha).score(data.test, data.logits)
        close(ours, -theirs.predict_features(data.test), rtol=1e-3, atol=1e-3)
    # SHE needs right predictions of every class: the logit of each class is a feature, and half of the labels are its.
    data = data._replace(weight=torch.eye(CLASSES, DIM).double(), bias=torch.zeros(CLASSES).double())
    centred = data._replace(z=data.z - data.z.mean(dim=0))
    y = torch.where(torch.arange(len(data.y)) % 2 == 0, centred.train_logits.argmax(dim=1), data.y)
    theirs = peer("pytorch_ood.detector.she").SHE(None, centred.layer).fit_features(centred.z, y)
    ours = SHE.fit(centred.z, y, centred.train_logits).score(data.test, data.logits)
    close(ours, -theirs.predict_features(data.test))


def test_peers_dice(data: Data) -> None:
    """pytorch-ood computes DICE in float32, hence the tolerance."""
    used = data.weight, data.bias
    theirs = peer("pytorch_ood.detector.dice").DICE(None, data.weight.float(), data.bias.float(), 0.6)
    theirs.fit_features(data.z.float(), data.y)
    ours = DICE.fit(data.z, *used, sparsity=0.6).score(data.test)
    close(ours, -theirs.predict_features(data.test.float()).double(), rtol=1e-3, atol=1e-3)


def test_peers_kl_matching(rng: Rng) -> None:
    held_out, logits = (torch.from_numpy(rng.normal(size=(n, 6)) * 2.0) for n in (200, 50))
    theirs = peer("pytorch_ood.detector.klmatching").KLMatching(None).fit_logits(held_out)
    close(KLMatching.fit(held_out).score(logits), -theirs.predict_logits(logits))
