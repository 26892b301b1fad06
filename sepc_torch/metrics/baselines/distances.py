"""Embedding scores from Gaussians, ellipsoids and subspaces: Mahalanobis, DDU, one ellipsoid per class, ViM.

A higher score means more trust.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sepc_torch.metrics.baselines.shared import class_means, other_over_own, squared_distances, training, unit, whitener
from sepc_torch.metrics.baselines.softmax import energy, max_logit
from sepc_torch.shapes import Float, Int

# Default ridge of the per-class covariances, as a fraction of the mean variance. The authors of DDU add only what the
# Cholesky factorisation needs. A class with about as many points as dimensions then has directions of almost zero
# variance, and these dominate the density. One per cent bounds their effect and is negligible for larger classes.
_RIDGE = 1e-2


@dataclass(frozen=True, eq=False)
class Mahalanobis:
    r"""Minus the squared Mahalanobis distance to the nearest class (Lee et al. 2018).

    .. math:: -\min_c (z - \mu_c)^\top \Sigma^+ (z - \mu_c)

    All classes share one covariance :math:`\Sigma`. With ``unit_length`` all embeddings are first scaled to length one:
    Mahalanobis++ (Mueller and Hein 2025). The pseudo-inverse ignores directions in which no class varies.

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
        points, labels, classes = training(z, y)
        points = unit(points) if unit_length else points
        means = class_means(points, labels, classes)
        origin, whiten = points.mean(dim=0), whitener(points - means[labels])
        return cls(origin, whiten, (means - origin) @ whiten, unit_length)

    def distances(self, z: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
        """Squared Mahalanobis distance to every class."""
        points = z.detach().double()
        points = unit(points) if self.unit_length else points
        return squared_distances((points - self.origin) @ self.whitener, self.means)

    def score(self, z: Float[Tensor, "B D"], predicted: Int[Tensor, "B"] | None = None) -> Float[Tensor, "B"]:
        """Minus the squared distance to the nearest class; ``predicted`` is ignored."""
        return -self.distances(z).amin(dim=1)


@dataclass(frozen=True, eq=False)
class RelativeMahalanobis:
    r"""Relative Mahalanobis score (Ren et al. 2021), :math:`-\min_c (d_c^2(z) - d_0^2(z))`.

    :math:`d_c` is the Mahalanobis distance to class c, :math:`d_0` the distance to one Gaussian of all training points.

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
        """Squared distance to the Gaussian of all points minus that to the nearest class; ``predicted`` is ignored."""
        return self.within.score(z) - self.background.score(z)


@dataclass(frozen=True, eq=False)
class Gaussians:
    r"""Log density of a Gaussian per class (DDU, Mukhoti et al. 2023), :math:`\log \sum_c \pi_c N(z; \mu_c, \Sigma_c)`.

    ``ridge`` times the mean within-class variance is added to the diagonal of every :math:`\Sigma_c`. A class with
    fewer points than dimensions, even with one point, then has a density.

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
        points, labels, classes = training(z, y)
        means = class_means(points, labels, classes)
        centred = points - means[labels]
        added = (ridge * centred.square().mean()).clamp_min(torch.finfo(torch.float64).tiny)
        factors = torch.empty(classes, *2 * points.shape[1:], dtype=torch.float64, device=points.device)
        for c in range(classes):
            own = centred[labels == c]
            covariance = own.T @ own / max(len(own) - 1, 1)
            factors[c] = torch.linalg.cholesky(covariance + added * torch.eye(len(covariance)).to(covariance))
        return cls(means, factors, (torch.bincount(labels).double() / len(labels)).log())

    def score(self, z: Float[Tensor, "B D"], predicted: Int[Tensor, "B"] | None = None) -> Float[Tensor, "B"]:
        """Log density of the mixture; ``predicted`` is ignored."""
        points = z.detach().double()
        constant = 0.5 * points.shape[1] * math.log(2.0 * math.pi)
        logs = []
        for mean, factor, log_weight in zip(self.means, self.factors, self.log_weights, strict=True):
            white = torch.linalg.solve_triangular(factor, (points - mean).T, upper=False)
            logs.append(log_weight - 0.5 * white.square().sum(dim=0) - factor.diagonal().log().sum() - constant)
        return torch.stack(logs, dim=1).logsumexp(dim=1)


@dataclass(frozen=True, eq=False)
class OneEllipsoid:
    """One minimum-volume ellipsoid per class: SEP-C without the partition.

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
        """Fit one ellipsoid per class; ``tol`` and ``floor`` are passed to ``minimum_volume_ellipsoid``."""
        from sepc_torch.solvers import minimum_volume_ellipsoid  # needs SciPy; the other scores do not

        points, labels, classes = training(z, y)
        found = [
            minimum_volume_ellipsoid(points[labels == c].cpu().numpy(), tol=tol, floor=floor) for c in range(classes)
        ]
        centers = torch.stack([torch.from_numpy(e.center) for e in found])
        return cls(centers.to(points), torch.stack([torch.from_numpy(e.whitener) for e in found]).to(points))

    def distances(self, z: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
        """Distance to the ellipsoid of every class; 1 is the surface."""
        points = z.detach().double()
        pairs = zip(self.centers, self.whiteners, strict=True)
        return torch.stack([((points - center) @ whitener.T).norm(dim=1) for center, whitener in pairs], dim=1)

    def distance(self, z: Float[Tensor, "B D"], predicted: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Minus the distance to the ellipsoid of the predicted class."""
        return -self.distances(z).gather(1, predicted.long().unsqueeze(1)).squeeze(1)

    def score(self, z: Float[Tensor, "B D"], predicted: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Distance to the nearest ellipsoid of another class, divided by that to the predicted class's ellipsoid."""
        return other_over_own(self.distances(z), predicted)


@dataclass(frozen=True, eq=False)
class ViM:
    r"""Virtual-logit matching (Wang et al. 2022), :math:`\log \sum_c e^{l_c} - \alpha \|R^\top (z - o)\|`.

    The columns of R span the orthogonal complement of the principal space of the training embeddings. The factor
    :math:`\alpha` scales the mean residual of the training set to the mean of its largest logits. The origin o is
    :math:`-W^+ b` of the last layer, or the mean embedding if the last layer is not given.

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
            logits: Logits of ``z``.
            classifier: Weight and bias of the last layer, which maps embeddings to logits.
            principal: Dimension of the principal space. The default is 1000 for at least 2048 features and 512 for
                fewer, as the authors choose; for at most 512 features it is half of them, as in OpenOOD and
                pytorch-ood.
        """
        points = z.detach().double()
        dim = points.shape[1]
        if principal is None:
            principal = 1000 if dim >= 2048 else 512 if dim > 512 else dim // 2
        if not 0 <= principal < dim:
            raise ValueError(
                f"principal must lie between 0 and {dim - 1}, below the dimension of the embeddings; got {principal}."
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
        """Energy of the logits minus the virtual logit, which is ``alpha`` times the norm of the residual."""
        return energy(logits.detach()) - self.alpha * ((z.detach().double() - self.origin) @ self.residual).norm(dim=1)
