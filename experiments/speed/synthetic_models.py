"""Synthetic frozen models of any size, made without a partition: groups of ellipsoids, and training counts.

Points come from normal clouds. Every cloud has four ellipsoids near its middle, each with its own centre and axes.
They are scaled to contain the same share of the cloud, such that a given share of all points is in no ellipsoid. At any
number of dimensions about a third of the points is then in no ellipsoid, a third in one and a third in several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sepc_torch import SEPC, EllipsoidBank
from sepc_torch.ellipsoid import Ellipsoid
from sepc_torch.model.kernels import Kernel
from sepc_torch.model.rules import TrainingCounts
from sepc_torch.partitioning.cells import ledger
from sepc_torch.shapes import Array

TRAINING_POINTS = 10_000
MOST_CLASSES = 10
# Ellipsoids of one cloud. They have different classes, so that classes overlap.
GROUP = 4
# Share of labels drawn at random; the others are the class of the nearest ellipsoid.
WRONG_LABELS = 0.2
# Share of the query points that come from clouds three times as wide.
FAR, FAR_WIDTH = 0.1, 3.0


@dataclass(frozen=True)
class Synthetic:
    """Middles (G, D) of the clouds, centres (K, D) and whiteners (K, D, D), and the counts of the training points."""

    middles: Tensor
    centers: Tensor
    whiteners: Tensor
    training: TrainingCounts
    totals: Tensor

    def bank(self, kernel: Kernel = "auto", dtype: torch.dtype = torch.float32) -> EllipsoidBank:
        origin = torch.zeros_like(self.middles[0])
        return EllipsoidBank(self.centers.to(dtype), self.whiteners.to(dtype), origin.to(dtype), kernel=kernel)

    def sepc(self, kernel: Kernel = "auto") -> SEPC:
        return SEPC(
            self.bank(kernel),
            self.training,
            self.totals,
            torch.ones_like(self.middles[0]),
            classes=list(range(len(self.totals))),
            nan_policy="flag",
        )

    def points(self, rows: int, seed: int) -> Tensor:
        """Query points (B, D) from the clouds of the training points, a share of them from wider clouds."""
        generator = torch.Generator(self.middles.device).manual_seed(seed)
        z, _ = _draw(self.middles, rows, generator, far=FAR)
        return z

    @property
    def condition(self) -> float:
        """The median condition number of the whiteners."""
        return float(torch.linalg.cond(self.whiteners.double()).median())


def synthetic(
    count: int,
    dim: int,
    seed: int,
    device: str,
    *,
    apart: float = 3.0,
    stretch: float = math.e**2,
    outside: float = 0.3,
    points: int = TRAINING_POINTS,
) -> Synthetic:
    """A synthetic model with a given number of ellipsoids and dimensions.

    Args:
        count: Ellipsoids K. They have ten classes, or as many as there are ellipsoids, but at least two.
        dim: Features D.
        seed: The seed; equal seed and device give an equal model.
        device: The device that draws and holds the model.
        apart: Standard deviation of the clouds' middles; a cloud has standard deviation 1.
        stretch: Ratio of the longest to the shortest axis before shearing.
        outside: The share of the training points in no ellipsoid.
        points: Number of training points.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    group = torch.arange(count, device=device) // GROUP
    middles = apart * normal(-(-count // GROUP), dim)
    centers = middles[group] + 0.5 * normal(count, dim)
    whiteners = normal(count, dim, dim).triu_() / dim**0.5 + torch.eye(dim, device=device)
    whiteners *= stretch ** torch.rand(count, dim, 1, generator=generator, device=device)

    x, cloud = _draw(middles, points, generator, far=0.0)
    own = cloud[:, None] == group
    whiteners /= _radii(_distances(x, centers, whiteners), own, outside).float()[:, None, None]
    distance = _distances(x, centers, whiteners)

    classes = min(MOST_CLASSES, max(2, count))
    codes = torch.arange(count, device=device) % classes
    chance = torch.randint(classes, (points,), generator=generator, device=device)
    wrong = torch.rand(points, generator=generator, device=device) < WRONG_LABELS
    labels = torch.where(wrong, chance, codes[distance.argmin(dim=1)])
    totals = labels.bincount(minlength=classes)
    by_class = labels.argsort(stable=True)
    ellipsoids = [Ellipsoid(c, w) for c, w in zip(*(_array(t) for t in (centers, whiteners)), strict=True)]
    # On the device, because NumPy would take minutes for the largest models.
    found = ledger(ellipsoids, _array(x[by_class]), labels[by_class].cpu().numpy(), classes, torch.device(device))
    training = TrainingCounts.from_ledger(codes.cpu(), found, torch.float32)
    training = TrainingCounts(*(table.to(device) for table in training))
    return Synthetic(middles, centers, whiteners, training, totals)


def _array(numbers: Tensor) -> Array:
    return numbers.double().cpu().numpy()


def _draw(middles: Tensor, rows: int, generator: torch.Generator, far: float) -> tuple[Tensor, Tensor]:
    """Points (B, D) of the clouds, a share of them from wider clouds, and the cloud of each (B,)."""
    cloud = torch.randint(len(middles), (rows,), generator=generator, device=middles.device)
    noise = torch.randn(rows, middles.shape[1], generator=generator, device=middles.device)
    wide = torch.rand(rows, 1, generator=generator, device=middles.device) < far
    return middles[cloud] + torch.where(wide, FAR_WIDTH, 1.0) * noise, cloud


def _distances(x: Tensor, centers: Tensor, whiteners: Tensor) -> Tensor:
    """Distances in float64 to ellipsoids in float32."""
    bank = EllipsoidBank(centers.double(), whiteners.double(), torch.zeros_like(x[0]).double(), kernel="torch")
    return bank(x.double())


def _radii(distance: Tensor, own: Tensor, outside: float) -> Tensor:
    """Radii (K,) at which all ellipsoids contain the same share of their cloud and leave a share of points outside."""
    ordered = torch.where(own, distance, torch.inf).sort(dim=0).values
    sizes = own.sum(dim=0)

    def holding(share: float) -> Tensor:
        last = torch.minimum((share * sizes).long(), sizes - 1)
        return ordered.gather(0, last[None, :]).squeeze(0)

    low, high = 0.0, 1.0
    for _ in range(15):
        share = (low + high) / 2
        left = float((distance > holding(share)).all(dim=1).double().mean())
        low, high = (share, high) if left > outside else (low, share)
    return holding(low)
