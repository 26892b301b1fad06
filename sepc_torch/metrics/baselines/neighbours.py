"""Training points as scores of embeddings; larger is more to be trusted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sepc_torch.data.arrays import count
from sepc_torch.metrics.baselines.shared import neighbour_distance, other_over_own, training, unit
from sepc_torch.shapes import Float, Int


@dataclass(frozen=True, eq=False)
class NearestNeighbours:
    r"""Minus the distance to the k-th nearest training point, all scaled to length one (Sun et al. 2022).

    The authors choose k on validation data: 50 for the 50 000 points of CIFAR-10. By default it is in that proportion.

    >>> z = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    >>> NearestNeighbours.fit(z, torch.tensor([0, 1]), k=1).score(torch.tensor([[3.0, 0.0], [-1.0, 0.0]]))
    tensor([-0.0000, -1.4142], dtype=torch.float64)
    """

    points: Float[Tensor, "N D"]
    k: int

    @classmethod
    def fit(cls, z: Float[Tensor, "N D"], y: Int[Tensor, "N"], *, k: int | None = None) -> NearestNeighbours:
        """Keep the training embeddings; ``k`` is at most their number, by default one in a thousand of them."""
        points, _, _ = training(z, y)
        k = max(1, round(len(points) / 1000)) if k is None else count(k, "k", least=1)
        return cls(unit(points), min(k, len(points)))

    def score(self, z: Float[Tensor, "B D"], predicted: Int[Tensor, "B"] | None = None) -> Float[Tensor, "B"]:
        """Minus the distance to the k-th neighbour."""
        return -neighbour_distance(unit(z.detach().double()), self.points, self.k)


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
        points, labels, classes = training(z, y)
        if not 0.0 <= alpha < 1.0:
            raise ValueError(f"alpha is a share of at least 0 and below 1, got {alpha}.")
        kept = torch.ones(len(points), dtype=torch.bool, device=points.device)
        for c in range(classes) if alpha > 0 else ():
            own = points[labels == c]
            # The k-th neighbour counts the point itself as the first, as the authors' code does.
            radius = neighbour_distance(own, own, min(count(k, "k", least=1), len(own)))
            kept[labels == c] = radius <= radius.quantile(1.0 - alpha)
        return cls(points[kept], labels[kept], count(neighbour, "neighbour", least=1))

    def distances(self, z: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
        """The distance to every class; one of fewer points than ``neighbour`` is as far as its farthest."""
        points = z.detach().double()
        members = [self.points[self.labels == c] for c in range(int(self.labels.max()) + 1)]
        return torch.stack([neighbour_distance(points, own, min(self.neighbour, len(own))) for own in members], dim=1)

    def score(self, z: Float[Tensor, "B D"], predicted: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Distance to the nearest class other than the predicted, over the distance to the predicted."""
        return other_over_own(self.distances(z), predicted)
