r"""The scores that one would otherwise take: plain baselines on logits and embeddings, each as its authors define it.

All of them are larger for what is more to be trusted, one float64 value per sample. Scores of logits are functions.
Scores of embeddings are learnt, ``fit(z, y)``, then asked with the predicted labels, ``score(z, predicted)``; most do
not look at the latter. :func:`baseline_scores` gives them all at once. Labels are 0 to C - 1, and every class occurs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sepc_torch.inputs import count, positive
from sepc_torch.shapes import Float, Int

# Entries of a matrix of distances that are held at a time: 64 MiB in float64.
_ENTRIES = 2**23
# Directions of less than this share of the largest variance count as absent: their deviation, 1e-6 of the largest, is
# ten roundings of float32 features.
_ABSENT = 1e-12
# The ridge of a Gaussian per class, a share of the mean variance. The authors add as little as a Cholesky factor needs;
# with about as many points as dimensions such a density tells unknowns far worse than with this (AUROC 0.69 against
# 0.88, 60 points in 64 dimensions), and with five times as many points this changes nothing (0.966).
_RIDGE = 1e-2
# Guards a ratio of distances against a division by zero, as the 1e-12 of the trust score's authors, but as a share of
# the other distance: units do not matter, and the order of ratios stays.
_LEAST_SHARE = 1e-12


def max_softmax(logits: Float[Tensor, "B C"], temperature: float = 1.0) -> Float[Tensor, "B"]:
    r"""The largest softmax probability (Hendrycks and Gimpel 2017), :math:`\max_c \mathrm{softmax}(l / T)_c`.

    >>> max_softmax(torch.tensor([[0.0, math.log(3.0)]]))
    tensor([0.7500], dtype=torch.float64)
    """
    return (logits.double() / positive(temperature, "temperature", "logits")).softmax(dim=1).amax(dim=1)


def entropy(logits: Float[Tensor, "B C"]) -> Float[Tensor, "B"]:
    r"""Minus the entropy of the softmax, :math:`\sum_c p_c \log p_c`.

    >>> entropy(torch.tensor([[1.0, 1.0]]))
    tensor([-0.6931], dtype=torch.float64)
    """
    return -torch.special.entr(logits.double().softmax(dim=1)).sum(dim=1)


def max_logit(logits: Float[Tensor, "B C"]) -> Float[Tensor, "B"]:
    r"""The largest logit (Hendrycks et al. 2022), :math:`\max_c l_c`.

    >>> max_logit(torch.tensor([[1.0, 4.0]]))
    tensor([4.], dtype=torch.float64)
    """
    return logits.double().amax(dim=1)


def energy(logits: Float[Tensor, "B C"]) -> Float[Tensor, "B"]:
    r"""Minus the free energy (Liu et al. 2020), :math:`\log \sum_c e^{l_c}`.

    >>> energy(torch.tensor([[0.0, 0.0]]))
    tensor([0.6931], dtype=torch.float64)
    """
    return logits.double().logsumexp(dim=1)


def gen(logits: Float[Tensor, "B C"], gamma: float = 0.1, m: int = 100) -> Float[Tensor, "B"]:
    r"""Minus the generalised entropy (Liu et al. 2023), :math:`-\sum_c (p_c (1 - p_c))^\gamma` over the top m.

    >>> gen(torch.tensor([[0.0, 0.0]]), gamma=0.5)
    tensor([-1.], dtype=torch.float64)
    """
    p = logits.double().softmax(dim=1)
    top = p.topk(min(count(m, "m", least=1), p.shape[1]), dim=1).values
    return -(top * (1.0 - top)).pow(gamma).sum(dim=1)


def fit_temperature(logits: Float[Tensor, "N C"], labels: Int[Tensor, "N"]) -> float:
    r"""The temperature (Guo et al. 2017) of the least :math:`-\sum_i \log \mathrm{softmax}(l_i / T)_{y_i}`.

    The loss is convex in :math:`b = 1 / T`: Newton's steps on its slope, and halves of the bracket where these leave it
    or do not shrink. The bracket spans six decades about one over the spread of the logits. Labels that the logits
    never miss have no best temperature, nor have labels that they always miss: they get a very small or large one.

    >>> logits = torch.tensor([[0.0, math.log(9.0)]]).repeat(4, 1)
    >>> round(fit_temperature(logits, torch.tensor([1, 1, 1, 0])), 6)  # log 9 / log 3: right three times of four
    2.0
    """
    values = logits.detach().double()
    _check_labels(labels, len(values))
    own = values.gather(1, labels.long().unsqueeze(1))
    margin = values - own  # to the label; the softmax does not see what is common to a row
    spread = float(values.std(dim=1, correction=0).mean())
    if not spread > 0:
        return 1.0  # equal logits: no temperature changes anything
    low, high = 1e-3 / spread, 1e3 / spread
    b, moved = math.sqrt(low * high), math.inf
    for _ in range(200):
        p = (b * margin).softmax(dim=1)
        mean = (p * margin).sum(dim=1)
        slope = float(mean.mean())
        curvature = float(((p * margin.square()).sum(dim=1) - mean.square()).mean())
        low, high = (b, high) if slope < 0 else (low, b)
        newton = b - slope / curvature if curvature > 0 else math.inf
        shrinks = low < newton < high and abs(newton - b) < moved / 2
        following = newton if shrinks else math.sqrt(low * high)
        moved = abs(following - b)
        b = following
        if moved <= 1e-14 * b:
            break
    return 1.0 / b


@dataclass(frozen=True, eq=False)
class Mahalanobis:
    r"""Minus the squared Mahalanobis distance to the nearest class (Lee et al. 2018).

    .. math:: -\min_c (z - \mu_c)^\top \Sigma^+ (z - \mu_c)

    One covariance :math:`\Sigma` serves all classes. With ``unit_length`` all embeddings are first scaled to length
    one: Mahalanobis++ (Mueller and Hein 2025). Directions in which no class varies are not seen.

    >>> z = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 4.0], [0.0, 6.0]])
    >>> Mahalanobis.fit(z, torch.tensor([0, 0, 1, 1])).score(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).round(decimals=9)
    tensor([-2., -2.], dtype=torch.float64)
    """

    origin: Float[Tensor, "D"]
    whitener: Float[Tensor, "D R"]
    means: Float[Tensor, "C R"]
    unit_length: bool

    @classmethod
    def fit(cls, z: Float[Tensor, "N D"], y: Int[Tensor, "N"], *, unit_length: bool = False) -> Mahalanobis:
        """Learn from training embeddings and their labels."""
        points, labels, classes = _training(z, y)
        points = _unit(points) if unit_length else points
        means = _class_means(points, labels, classes)
        origin, whitener = points.mean(dim=0), _whitener(points - means[labels])
        return cls(origin, whitener, (means - origin) @ whitener, unit_length)

    def distances(self, z: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
        r"""The squared distance to every class."""
        points = z.detach().double()
        points = _unit(points) if self.unit_length else points
        return _squared_distances((points - self.origin) @ self.whitener, self.means)

    def score(self, z: Float[Tensor, "B D"], predicted: Int[Tensor, "B"] | None = None) -> Float[Tensor, "B"]:
        """Minus the squared distance to the nearest class."""
        return -self.distances(z).amin(dim=1)


@dataclass(frozen=True, eq=False)
class RelativeMahalanobis:
    r"""Mahalanobis against one Gaussian of all data (Ren et al. 2021), :math:`-\min_c (d_c^2(z) - d_0^2(z))`.

    >>> z = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 4.0], [0.0, 6.0]])
    >>> RelativeMahalanobis.fit(z, torch.tensor([0, 0, 1, 1])).score(torch.tensor([[0.0, 0.0]])).round(decimals=4)
    tensor([0.9259], dtype=torch.float64)
    """

    within: Mahalanobis
    background: Mahalanobis

    @classmethod
    def fit(cls, z: Float[Tensor, "N D"], y: Int[Tensor, "N"], *, unit_length: bool = False) -> RelativeMahalanobis:
        """Learn from training embeddings and their labels."""
        within = Mahalanobis.fit(z, y, unit_length=unit_length)
        return cls(within, Mahalanobis.fit(z, torch.zeros_like(y), unit_length=unit_length))

    def score(self, z: Float[Tensor, "B D"], predicted: Int[Tensor, "B"] | None = None) -> Float[Tensor, "B"]:
        """How much nearer the nearest class is than the whole."""
        return self.within.score(z) - self.background.score(z)


@dataclass(frozen=True, eq=False)
class Gaussians:
    r"""Log density of a Gaussian per class (DDU, Mukhoti et al. 2023), :math:`\log \sum_c \pi_c N(z; \mu_c, \Sigma_c)`.

    ``ridge`` times the mean variance within classes is added to every :math:`\Sigma_c`, so that a class of fewer points
    than dimensions, or of one, has a density too.

    >>> z, y = torch.tensor([[-1.0], [1.0], [9.0], [11.0]]), torch.tensor([0, 0, 1, 1])
    >>> Gaussians.fit(z, y, ridge=0.0).score(torch.tensor([[0.0]]))  # log(1/2) - log(2 pi 2) / 2
    tensor([-1.9587], dtype=torch.float64)
    """

    means: Float[Tensor, "C D"]
    factors: Float[Tensor, "C D D"]
    log_weights: Float[Tensor, "C"]

    @classmethod
    def fit(cls, z: Float[Tensor, "N D"], y: Int[Tensor, "N"], *, ridge: float = _RIDGE) -> Gaussians:
        """Learn from training embeddings and their labels."""
        points, labels, classes = _training(z, y)
        means = _class_means(points, labels, classes)
        centred = points - means[labels]
        added = (ridge * centred.square().mean()).clamp_min(torch.finfo(torch.float64).tiny)
        factors = torch.empty(classes, *2 * points.shape[1:], dtype=torch.float64, device=points.device)
        for c in range(classes):
            own = centred[labels == c]
            covariance = own.T @ own / max(len(own) - 1, 1)
            factors[c] = torch.linalg.cholesky(covariance + added * torch.eye(len(covariance)).to(covariance))
        return cls(means, factors, (torch.bincount(labels).double() / len(labels)).log())

    def score(self, z: Float[Tensor, "B D"], predicted: Int[Tensor, "B"] | None = None) -> Float[Tensor, "B"]:
        """The log density of all classes together."""
        points = z.detach().double()
        constant = 0.5 * points.shape[1] * math.log(2.0 * math.pi)
        logs = []
        for mean, factor, log_weight in zip(self.means, self.factors, self.log_weights, strict=True):
            white = torch.linalg.solve_triangular(factor, (points - mean).T, upper=False)
            logs.append(log_weight - 0.5 * white.square().sum(dim=0) - factor.diagonal().log().sum() - constant)
        return torch.stack(logs, dim=1).logsumexp(dim=1)


@dataclass(frozen=True, eq=False)
class NearestNeighbours:
    r"""Minus the distance to the k-th nearest training point, all scaled to length one (Sun et al. 2022).

    >>> z = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    >>> NearestNeighbours.fit(z, torch.tensor([0, 1]), k=1).score(torch.tensor([[3.0, 0.0], [-1.0, 0.0]]))
    tensor([-0.0000, -1.4142], dtype=torch.float64)
    """

    points: Float[Tensor, "N D"]
    k: int

    @classmethod
    def fit(cls, z: Float[Tensor, "N D"], y: Int[Tensor, "N"], *, k: int = 50) -> NearestNeighbours:
        """Keep the training embeddings; ``k`` is at most their number."""
        points, _, _ = _training(z, y)
        return cls(_unit(points), min(count(k, "k", least=1), len(points)))

    def score(self, z: Float[Tensor, "B D"], predicted: Int[Tensor, "B"] | None = None) -> Float[Tensor, "B"]:
        """Minus the distance to the k-th neighbour."""
        return -_neighbour_distance(_unit(z.detach().double()), self.points, self.k)


@dataclass(frozen=True, eq=False)
class TrustScore:
    r"""The trust score of Jiang et al. (2018): distance to the nearest other class, over that to the predicted class.

    .. math:: \min_{c \ne p} d_c(z) \,/\, d_p(z)

    :math:`d_c` is the distance to the nearest point of class c in the paper (``neighbour=1``); the authors' code takes
    the second nearest, so that a training point is not its own neighbour, and so do we by default. ``alpha`` drops that
    share of each class, those with the farthest k-th neighbour; 0, their default, keeps all.

    >>> z, y = torch.tensor([[0.0], [1.0], [5.0], [6.0]]), torch.tensor([0, 0, 1, 1])
    >>> TrustScore.fit(z, y, neighbour=1).score(torch.tensor([[2.0], [2.0]]), torch.tensor([0, 1]))
    tensor([3.0000, 0.3333], dtype=torch.float64)
    """

    points: Float[Tensor, "N D"]
    labels: Int[Tensor, "N"]
    neighbour: int

    @classmethod
    def fit(
        cls, z: Float[Tensor, "N D"], y: Int[Tensor, "N"], *, k: int = 10, alpha: float = 0.0, neighbour: int = 2
    ) -> TrustScore:
        """Keep the training embeddings, without the ``alpha`` of each class that lie in the thinnest places."""
        points, labels, classes = _training(z, y)
        if not 0.0 <= alpha < 1.0:
            raise ValueError(f"alpha is a share of at least 0 and below 1, got {alpha}.")
        kept = torch.ones(len(points), dtype=torch.bool, device=points.device)
        for c in range(classes) if alpha > 0 else ():
            own = points[labels == c]
            # The k-th neighbour counts the point itself as the first, as the authors' code does.
            radius = _neighbour_distance(own, own, min(count(k, "k", least=1), len(own)))
            kept[labels == c] = radius <= radius.quantile(1.0 - alpha)
        return cls(points[kept], labels[kept], count(neighbour, "neighbour", least=1))

    def distances(self, z: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
        """The distance to every class; one of fewer points than ``neighbour`` is as far as its farthest."""
        points = z.detach().double()
        members = [self.points[self.labels == c] for c in range(int(self.labels.max()) + 1)]
        return torch.stack([_neighbour_distance(points, own, min(self.neighbour, len(own))) for own in members], dim=1)

    def score(self, z: Float[Tensor, "B D"], predicted: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Distance to the nearest class other than the predicted, over the distance to the predicted."""
        return _other_over_own(self.distances(z), predicted)


@dataclass(frozen=True, eq=False)
class OneEllipsoid:
    r"""One minimum-volume ellipsoid per class: SEP-C without the partition.

    >>> z = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> found = OneEllipsoid.fit(torch.cat([z, z + 8.0]), torch.arange(8) // 4)
    >>> found.distance(torch.tensor([[2.0, 0.0]]), torch.tensor([0])).round(decimals=3)
    tensor([-2.], dtype=torch.float64)
    """

    centers: Float[Tensor, "C D"]
    whiteners: Float[Tensor, "C D D"]

    @classmethod
    def fit(
        cls, z: Float[Tensor, "N D"], y: Int[Tensor, "N"], *, tol: float = 1e-4, floor: float = 0.0
    ) -> OneEllipsoid:
        """Solve one program per class; ``tol`` and ``floor`` are those of ``minimum_volume_ellipsoid``."""
        from sepc_torch.solvers import minimum_volume_ellipsoid  # needs SciPy, which the scores do not

        points, labels, classes = _training(z, y)
        found = [
            minimum_volume_ellipsoid(points[labels == c].cpu().numpy(), tol=tol, floor=floor) for c in range(classes)
        ]
        centers = torch.stack([torch.from_numpy(e.center) for e in found])
        return cls(centers.to(points), torch.stack([torch.from_numpy(e.whitener) for e in found]).to(points))

    def distances(self, z: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
        """The distance to every class's ellipsoid, 1 on its surface."""
        points = z.detach().double()
        pairs = zip(self.centers, self.whiteners, strict=True)
        return torch.stack([((points - center) @ whitener.T).norm(dim=1) for center, whitener in pairs], dim=1)

    def distance(self, z: Float[Tensor, "B D"], predicted: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Minus the distance to the ellipsoid of the predicted class."""
        return -self.distances(z).gather(1, predicted.long().unsqueeze(1)).squeeze(1)

    def score(self, z: Float[Tensor, "B D"], predicted: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Distance to the nearest ellipsoid of another class, over that to the predicted class's."""
        return _other_over_own(self.distances(z), predicted)


@dataclass(frozen=True, eq=False)
class ViM:
    r"""Virtual-logit matching (Wang et al. 2022), :math:`\log \sum_c e^{l_c} - \alpha \|R^\top (z - o)\|`.

    The columns of R span what the principal space of the training embeddings leaves over, and :math:`\alpha` makes the
    residual as large as the largest logit, on average over the training set. The origin o is :math:`-W^+ b` of the last
    layer, or the mean embedding where that is unknown.

    >>> z = torch.tensor([[-2.0, 0.1], [2.0, 0.1], [-2.0, -0.1], [2.0, -0.1]])
    >>> found = ViM.fit(z, logits := torch.cat([z[:, :1], -z[:, :1]], dim=1))
    >>> round(found.alpha, 4), found.score(torch.tensor([[2.0, 0.3]]), logits[:1]).round(decimals=3)
    (20.0, tensor([-3.9820], dtype=torch.float64))
    """

    origin: Float[Tensor, "D"]
    residual: Float[Tensor, "D Q"]
    alpha: float

    @classmethod
    def fit(
        cls,
        z: Float[Tensor, "N D"],
        logits: Float[Tensor, "N C"],
        *,
        classifier: tuple[Float[Tensor, "C D"], Float[Tensor, "C"]] | None = None,
        principal: int | None = None,
    ) -> ViM:
        """Learn from training embeddings and logits.

        Args:
            z: Training embeddings.
            logits: What the network says of them.
            classifier: Weight and bias of the layer that makes logits of embeddings.
            principal: Dimension of the principal space. The authors take 1000 of at least 2048 features and 512 of
                fewer; of no more than 512, half, as OpenOOD and pytorch-ood do.
        """
        points = z.detach().double()
        dim = points.shape[1]
        if principal is None:
            principal = 1000 if dim >= 2048 else 512 if dim > 512 else dim // 2
        if not 0 <= principal < dim:
            raise ValueError(
                f"principal is a dimension from 0 to {dim - 1}, below that of the embeddings; got {principal}."
            )
        if classifier is None:
            origin = points.mean(dim=0)
        else:
            weight, bias = (given.detach().double() for given in classifier)
            origin = -torch.linalg.pinv(weight) @ bias
        centred = points - origin
        residual = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, : dim - principal]  # smallest first
        size = (centred @ residual).norm(dim=1).mean().clamp_min(torch.finfo(torch.float64).tiny)
        return cls(origin, residual, float(max_logit(logits.detach()).mean() / size))

    def score(self, z: Float[Tensor, "B D"], logits: Float[Tensor, "B C"]) -> Float[Tensor, "B"]:
        """The energy of the logits less that of the residual."""
        return energy(logits.detach()) - self.alpha * ((z.detach().double() - self.origin) @ self.residual).norm(dim=1)


def baseline_scores(
    train_z: Float[Tensor, "N D"],
    train_y: Int[Tensor, "N"],
    test_z: Float[Tensor, "B D"],
    test_logits: Float[Tensor, "B C"],
    train_logits: Float[Tensor, "N C"] | None = None,
    calibration: tuple[Float[Tensor, "M C"], Int[Tensor, "M"]] | None = None,
    classifier: tuple[Float[Tensor, "C D"], Float[Tensor, "C"]] | None = None,
) -> dict[str, Float[Tensor, "B"]]:
    """Every baseline that the inputs allow, by name; larger is more to be trusted.

    Args:
        train_z: Training embeddings.
        train_y: Their labels.
        test_z: Embeddings to score.
        test_logits: What the network says of them; its label is the largest.
        train_logits: What it says of the training set, for ``vim``.
        calibration: Logits and labels of samples that trained nothing, for ``scaled_softmax``.
        classifier: Weight and bias of the last layer, for the origin of ``vim``.

    >>> generator = torch.Generator().manual_seed(0)
    >>> y = torch.arange(60) % 2
    >>> z = torch.randn(60, 3, generator=generator) + 4.0 * y.unsqueeze(1)
    >>> scores = baseline_scores(z[:40], y[:40], z[40:], z[40:, :2])
    >>> len(scores), scores["trust_score"].shape
    (14, torch.Size([20]))
    """
    test_logits = test_logits.detach()
    predicted = test_logits.argmax(dim=1)
    found = {
        "max_softmax": max_softmax(test_logits),
        "entropy": entropy(test_logits),
        "max_logit": max_logit(test_logits),
        "energy": energy(test_logits),
        "gen": gen(test_logits),
    }
    if calibration is not None:
        found["scaled_softmax"] = max_softmax(test_logits, fit_temperature(*calibration))
    for suffix, unit_length in (("", False), ("++", True)):
        relative = RelativeMahalanobis.fit(train_z, train_y, unit_length=unit_length)
        found[f"mahalanobis{suffix}"] = relative.within.score(test_z)
        found[f"relative_mahalanobis{suffix}"] = found[f"mahalanobis{suffix}"] - relative.background.score(test_z)
    found["gaussians"] = Gaussians.fit(train_z, train_y).score(test_z)
    found["knn"] = NearestNeighbours.fit(train_z, train_y).score(test_z)
    found["trust_score"] = TrustScore.fit(train_z, train_y).score(test_z, predicted)
    if train_logits is not None:
        found["vim"] = ViM.fit(train_z, train_logits, classifier=classifier).score(test_z, test_logits)
    ellipsoids = OneEllipsoid.fit(train_z, train_y)
    found["ellipsoid_distance"] = ellipsoids.distance(test_z, predicted)
    found["ellipsoid_ratio"] = ellipsoids.score(test_z, predicted)
    return found


def _training(z: Tensor, y: Tensor) -> tuple[Float[Tensor, "N D"], Int[Tensor, "N"], int]:
    """Embeddings in float64, labels, and the number of classes."""
    points = z.detach().double()
    _check_labels(y, len(points))
    if not points.isfinite().all():
        raise ValueError("The training embeddings hold NaN or infinity. Drop such rows.")
    sizes = torch.bincount(y.long())
    if (sizes == 0).any():
        missing = (sizes == 0).nonzero().flatten().tolist()
        raise ValueError(f"No training point has the label {missing}; number the classes from 0, or leave them out.")
    return points, y.long(), len(sizes)


def _check_labels(y: Tensor, rows: int) -> None:
    if y.shape != (rows,) or rows == 0:
        raise ValueError(f"Every row needs one label, got {rows} rows and labels of shape {tuple(y.shape)}.")
    if bool((y < 0).any()):
        raise ValueError("Labels are numbered from 0; got a negative one. Leave out samples of no class.")


def _class_means(points: Float[Tensor, "N D"], labels: Int[Tensor, "N"], classes: int) -> Float[Tensor, "C D"]:
    sums = torch.zeros(classes, points.shape[1], dtype=torch.float64, device=points.device)
    return sums.index_add_(0, labels, points) / torch.bincount(labels, minlength=classes).unsqueeze(1)


def _whitener(centred: Float[Tensor, "N D"]) -> Float[Tensor, "D R"]:
    r"""A matrix V with :math:`V V^\top = \Sigma^+`, found on features of variance one, so that units do not matter."""
    scale = centred.square().mean(dim=0).sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    unit = centred / scale
    variances, directions = torch.linalg.eigh(unit.T @ unit / len(unit))
    present = variances > _ABSENT * variances[-1]
    return directions[:, present] / variances[present].sqrt() / scale.unsqueeze(1)


def _unit(points: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """Every row scaled to length one; a row of zeros stays."""
    length = points.norm(dim=1, keepdim=True)
    return points / torch.where(length > 0, length, 1.0)


def _squared_distances(a: Float[Tensor, "B D"], b: Float[Tensor, "N D"]) -> Float[Tensor, "B N"]:
    return (a.square().sum(dim=1, keepdim=True) + b.square().sum(dim=1) - 2.0 * a @ b.T).clamp_min(0.0)


def _neighbour_distance(z: Float[Tensor, "B D"], points: Float[Tensor, "N D"], k: int) -> Float[Tensor, "B"]:
    """The distance of each row to its k-th nearest point, some rows at a time.

    A matrix product finds the neighbour; its distance is then taken directly, so that a small one is accurate.
    """
    origin = points.mean(dim=0)
    near = points - origin
    found = []
    for rows in (z - origin).split(max(1, _ENTRIES // len(points))):
        nearest = _squared_distances(rows, near).topk(k, dim=1, largest=False).indices
        found.append((rows - near[nearest[:, -1]]).norm(dim=1))
    return torch.cat(found) if found else z.new_empty(0)


def _other_over_own(distances: Float[Tensor, "B C"], predicted: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    own = predicted.long().unsqueeze(1)
    other = distances.scatter(1, own, math.inf).amin(dim=1)
    least = (_LEAST_SHARE * other).clamp_min(torch.finfo(torch.float64).tiny)
    return other / (distances.gather(1, own).squeeze(1) + least)
