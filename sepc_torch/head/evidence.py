r"""What speaks for a label at a point, and how strange the point is: continuous, in every region, for every rule.

The paper's trust counts the training points of a region; it explains, but it is 1 in most places and cannot rank
there. Two ratios can, and both compare the judged class with all others:

- regions: :math:`\log \frac{p(z, c)}{\sum_{c' \ne c} p(z, c')}` with the densities of :mod:`sepc_torch.head.densities`,
- neighbours: :math:`\log \frac{d_{\ne c}(z)}{d_c(z)}`, the distance to the nearest training point of another class
  over that of the class itself (the trust score of Jiang et al. 2018).

Three distances say how far a point lies from everything seen in training: minus the log of the greatest class density,
and the distance to the nearest training point, as embeddings are and with every direction scaled to unit variance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch.head.densities import RegionDensities, fit_densities
from sepc_torch.head.neighbours import Neighbours
from sepc_torch.head.projection import Projection, fit_projection
from sepc_torch.model.bank import EllipsoidBank
from sepc_torch.partitioning.record import Partition, PartitionEllipsoid
from sepc_torch.shapes import Array, Float, Int

# Directions in which regions have a shape, and neighbours a unit: on embeddings of 384 features more of them lost more
# in estimating the regions than they told, and a region costs the square of it.
_MOST_DIRECTIONS = 64
# A point that lies on a training point has a distance of zero; a factor of a thousand says all there is to say.
_MOST_LOG_RATIO = 7.0
# A logit of -inf, which masks a class, makes log odds infinite; as certain are log odds of ten thousand.
_MOST_SOFTMAX = 10.0


class Facts(NamedTuple):
    """Evidence for the judged label, and strangeness of the point, for every row of a batch."""

    support: Float[Tensor, "B F"]
    strangeness: Float[Tensor, "B S"]


class Measured(NamedTuple):
    """Log densities of every class, distances to the nearest witness of each (if any are kept), and strangeness."""

    density: Float[Tensor, "B C"]
    near: Float[Tensor, "B C"] | None
    strangeness: Float[Tensor, "B S"]


class Evidence(nn.Module):
    """Densities of regions and, where training points were kept, distances to neighbours.

    Args:
        polar: From embeddings to the coordinates of the densities: direction and log length.
        densities: Of the classes, in those coordinates.
        white: From embeddings to directions of unit variance.
        witnesses: The kept training points, in the coordinates of the embeddings; none where it holds none.
    """

    def __init__(self, polar: Projection, densities: RegionDensities, white: Projection, witnesses: Neighbours) -> None:
        super().__init__()
        self.polar, self.densities, self.white, self.witnesses = polar, densities, white, witnesses
        self._whiten_witnesses()
        self.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]

    def _whiten_witnesses(self) -> None:
        """The same points in the other coordinates; they follow from the rest, so no file holds them."""
        points = self.white(self.witnesses.points)
        self.white_witnesses = Neighbours(points, torch.zeros_like(self.witnesses.codes), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Evidence:
        before = self.witnesses.offsets.dtype
        moved = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.witnesses.offsets.dtype != before:
            self._whiten_witnesses()
        return moved

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Evidence:
        """The evidence of a state dict's tensors."""
        bank = EllipsoidBank(*(tensors[f"densities.bank.{name}"] for name in ("offsets", "whiteners", "origin")))
        polar = {name: tensors[f"polar.{name}"] for name in ("shift", "matrix", "least_length")}
        regions = (tensors[f"densities.{name}"] for name in ("log_weight", "freedom", "codes"))
        return cls(
            Projection(**polar, unit_length=True),
            RegionDensities(bank, *regions),
            Projection(tensors["white.shift"], tensors["white.matrix"], unit_length=False),
            Neighbours(*(tensors[f"witnesses.{name}"] for name in ("offsets", "codes", "origin"))),
        )

    @property
    def kinds(self) -> int:
        """How many kinds of strangeness there are."""
        return 3 if self.witnesses.ends else 1

    @property
    def names(self) -> tuple[str, ...]:
        """What the columns of the support are."""
        return ("regions", "neighbours") if self.witnesses.ends else ("regions",)

    @torch.no_grad()
    def measure(self, z: Float[Tensor, "B D"]) -> Measured:
        """What embeddings are measured by, whatever their label."""
        density = self.densities(self.polar(z))
        strangeness = [-density.amax(dim=1)]
        near = None
        if self.witnesses.ends:
            near = self.witnesses(z)
            strangeness += [near.amin(dim=1), self.white_witnesses(self.white(z)).squeeze(1)]
        return Measured(density, near, torch.stack(strangeness, dim=1))

    def judge(self, measured: Measured, label: Int[Tensor, "B"]) -> Facts:
        """What the measures say for labels (indices into the classes)."""
        support = [torch.asinh(log_odds(measured.density, label))]
        if measured.near is not None:
            support.append(_log_ratio(measured.near, label).clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO))
        return Facts(torch.stack(support, dim=1), measured.strangeness)

    def forward(self, z: Float[Tensor, "B D"], label: Int[Tensor, "B"]) -> Facts:
        """Support for a label and strangeness of each embedding; no gradient flows through them."""
        return self.judge(self.measure(z), label)


def _after_loading(module: Evidence, _keys: Any) -> None:
    module._whiten_witnesses()


def log_odds(score: Float[Tensor, "B C"], label: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    r"""The log odds :math:`s_c - \log \sum_{c' \ne c} e^{s_{c'}}` of a label, from log densities or logits.

    >>> log_odds(torch.tensor([[0.0, 0.0, 0.0]]).log_softmax(1), torch.tensor([1])).exp()
    tensor([0.5000])
    """
    index = label.unsqueeze(1)
    return score.gather(1, index).squeeze(1) - score.scatter(1, index, -torch.inf).logsumexp(dim=1)


def with_softmax(facts: Facts, logits: Float[Tensor, "B C"], label: Int[Tensor, "B"]) -> Facts:
    """The facts with the network's own opinion before them."""
    support = facts.support
    odds = log_odds(logits.double(), label)
    # Two logits of the same infinity leave it open which is larger.
    softmax = torch.asinh(odds.nan_to_num(nan=0.0)).clamp(-_MOST_SOFTMAX, _MOST_SOFTMAX)
    return facts._replace(support=torch.cat([softmax.to(support.dtype).unsqueeze(1), support], dim=1))


def _log_ratio(near: Float[Tensor, "B C"], label: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    r"""The log ratio :math:`\log \frac{d_{\ne c}}{d_c}` of the distances to any other class and to the label's."""
    index = label.unsqueeze(1)
    tiny = torch.finfo(near.dtype).tiny
    own = near.gather(1, index).squeeze(1).clamp_min(tiny)
    return near.scatter(1, index, torch.inf).amin(dim=1).clamp_min(tiny).log() - own.log()


def pieces_of(
    part: Partition, points: Float[Array, "N R"], codes: Int[Array, "N"], device: torch.device | str | None = None
) -> Int[Array, "N"]:
    """The ellipsoid of its own class that each point is nearest to, -1 where it has no more points than dimensions.

    Distances are measured on the torch device, if one is given.
    """
    piece = np.empty(len(points), dtype=np.int64)
    for c in range(len(part.classes)):
        rows = np.flatnonzero(codes == c)
        own = np.flatnonzero(part.codes == c)
        piece[rows] = own[_nearest([part.ellipsoids[k] for k in own], points[rows], device)]
    return np.where(np.bincount(piece)[piece] > points.shape[1], piece, -1)


def _nearest(
    ellipsoids: list[PartitionEllipsoid], points: Float[Array, "n R"], device: torch.device | str | None
) -> Int[Array, "n"]:
    if device is None:
        return np.argmin([e.distance(points) for e in ellipsoids], axis=0)
    centers, whiteners = (
        torch.from_numpy(np.stack(arrays)) for arrays in zip(*((e.center, e.whitener) for e in ellipsoids), strict=True)
    )
    bank = EllipsoidBank(centers, whiteners).to(device)
    return bank(torch.from_numpy(points).to(device)).argmin(dim=1).cpu().numpy()


def fit_evidence(
    points: Float[Array, "N D"], codes: Int[Array, "N"], pieces: Int[Array, "N"], witnesses: int, seed: int = 0
) -> Evidence:
    """Learn the evidence of labelled embeddings.

    Args:
        points: Training embeddings.
        codes: Their classes.
        pieces: The piece of its class that each belongs to; -1 for none.
        witnesses: How many training points to keep at most, of every class in proportion and one at least.
        seed: For the choice of those.
    """
    polar = fit_projection(points, codes, _MOST_DIRECTIONS, "polar", "pca")
    white = fit_projection(points, codes, _MOST_DIRECTIONS, None, "pca")
    tensor = torch.from_numpy(points).float()
    coordinates = polar(tensor).double().numpy()
    if not np.isfinite(coordinates).all():
        raise ValueError("The embeddings are too large for float32: their squares overflow. Scale them.")
    densities = fit_densities(coordinates, codes, pieces)
    kept = _choose(codes, witnesses, np.random.default_rng(seed)) if witnesses else np.zeros(0, dtype=np.int64)
    return Evidence(polar, densities, white, Neighbours(tensor[kept], torch.from_numpy(codes[kept])))


def _choose(codes: Int[Array, "N"], most: int, rng: np.random.Generator) -> Int[Array, "n"]:
    """Rows of every class in proportion, at least one each, in the order of the classes."""
    share = min(1.0, most / len(codes))
    chosen = []
    for c in range(int(codes.max()) + 1):
        rows = np.flatnonzero(codes == c)
        chosen.append(np.sort(rng.choice(rows, max(1, int(share * len(rows))), replace=False)))
    return np.concatenate(chosen)
