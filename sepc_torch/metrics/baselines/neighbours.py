"""Embedding scores from nearest training points: k-NN distance and TrustScore; a higher score means more trust."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sepc_torch.data.options import check_count
from sepc_torch.metrics.baselines.shared import neighbour_distance, other_over_own, training, unit
from sepc_torch.shapes import Float, Int


@dataclass(frozen=True, eq=False)
class NearestNeighbours:
    """Minus the distance to the k-th nearest training point, all points scaled to length one (Sun et al. 2022).

    The authors choose k on validation data: 50 for the 50 000 points of CIFAR-10. The default keeps that proportion.

    >>> z = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    >>> NearestNeighbours.fit(z, torch.tensor([0, 1]), k=1).score(torch.tensor([[3.0, 0.0], [-1.0, 0.0]]))
    tensor([-0.0000, -1.4142], dtype=torch.float64)
    """

    points: Float[Tensor, "N D"]
    k: int

    @classmethod
    def fit(cls, z: Float[Tensor, "N D"], y: Int[Tensor, "N"], *, k: int | None = None) -> NearestNeighbours:
        """Store the training embeddings; the default ``k`` is N / 1000, and ``k`` is capped at N."""
        points, _, _ = training(z, y)
        k = max(1, round(len(points) / 1000)) if k is None else check_count(k, "k", least=1)
        return cls(unit(points), min(k, len(points)))

    def score(self, z: Float[Tensor, "B D"], predicted: Int[Tensor, "B"] | None = None) -> Float[Tensor, "B"]:
        """Minus the distance to the k-th neighbour; ``predicted`` is ignored."""
        return -neighbour_distance(unit(z.detach().double()), self.points, self.k)


@dataclass(frozen=True, eq=False)
class TrustScore:
    r"""TrustScore (Jiang et al. 2018): distance to the nearest other class divided by that to the predicted class.

    .. math:: \min_{c \ne p} d_c(z) \,/\, d_p(z)

    In the paper :math:`d_c` is the distance to the nearest point of class c (``neighbour=1``). The authors' code takes
    the second nearest, so that a training point is not its own neighbour; ``neighbour=2`` is the default here too.
    ``alpha`` is the fraction of each class that ``fit`` drops: the points with the farthest k-th neighbour. The
    authors' default, 0, keeps all points.

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
        """Store the training embeddings, without the fraction ``alpha`` of each class where the density is lowest."""
        points, labels, classes = training(z, y)
        if not 0.0 <= alpha < 1.0:
            raise ValueError(f"alpha must be at least 0 and below 1, got {alpha}.")
        kept = torch.ones(len(points), dtype=torch.bool, device=points.device)
        for c in range(classes) if alpha > 0 else ():
            own = points[labels == c]
            # The point itself counts as its first neighbour, as in the authors' code.
            radius = neighbour_distance(own, own, min(check_count(k, "k", least=1), len(own)))
            kept[labels == c] = radius <= radius.quantile(1.0 - alpha)
        return cls(points[kept], labels[kept], check_count(neighbour, "neighbour", least=1))

    def distances(self, z: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
        """Distance to every class; to its farthest point if the class has fewer than ``neighbour`` points."""
        points = z.detach().double()
        members = [self.points[self.labels == c] for c in range(int(self.labels.max()) + 1)]
        return torch.stack([neighbour_distance(points, own, min(self.neighbour, len(own))) for own in members], dim=1)

    def score(self, z: Float[Tensor, "B D"], predicted: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Distance to the nearest class other than the predicted one, divided by that to the predicted class."""
        return other_over_own(self.distances(z), predicted)
