"""Frozen models of random ellipsoids, which no partition was needed for, and points that meet every rule."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch

from sepc_torch import SEPC, EllipsoidBank
from sepc_torch.ellipsoid import Ellipsoid
from sepc_torch.model.rules import TrainingCounts
from sepc_torch.partitioning import cells

Rng = np.random.Generator


def model_of(
    rng: Rng,
    count: int,
    dim: int,
    classes: int = 3,
    *,
    points: int = 300,
    held: float = 1.2,
    twins: bool = False,
    mixed: bool = False,
    steps: int = cells.STEPS,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> SEPC:
    """A model whose every point lies in about ``held`` ellipsoids on average, so that some lie in none.

    With ``twins`` every other ellipsoid is that before it, and so equally near; with ``mixed`` the ellipsoids do not
    come by class. ``steps`` is the largest number of steps per ellipsoid. The last class has no ellipsoid.
    """
    x = rng.normal(size=(points, dim))
    labels = rng.integers(0, classes, points)
    labels[:classes] = np.arange(classes)
    whiteners = np.triu(rng.normal(size=(count, dim, dim)) / np.sqrt(dim) + 2.0 * np.eye(dim))
    whiteners *= np.exp(rng.uniform(0.0, 2.0, size=(count, dim, 1)))
    centers = 0.7 * rng.normal(size=(count, dim))
    if twins:
        centers[1::2], whiteners[1::2] = centers[: 2 * (count // 2) : 2], whiteners[: 2 * (count // 2) : 2]
    distance = np.linalg.norm(np.einsum("kij,nkj->nki", whiteners, x[:, None] - centers), axis=2)
    whiteners /= np.quantile(distance, min(0.6, held / count), axis=0)[:, None, None]
    ellipsoids = [Ellipsoid(c, w) for c, w in zip(centers, whiteners, strict=True)]
    codes = rng.integers(0, max(classes - 1, 1), count)
    by_class = np.argsort(labels)
    with mock.patch.object(cells, "STEPS", steps):
        found = cells.ledger(ellipsoids, x[by_class], labels[by_class], classes)
    training = TrainingCounts.from_ledger(torch.from_numpy(codes if mixed else np.sort(codes)), found, dtype)
    kernel = options.pop("kernel", "auto")
    bank = EllipsoidBank(torch.from_numpy(centers), torch.from_numpy(whiteners), kernel=kernel).to(dtype)
    return SEPC(
        bank,
        training,
        torch.from_numpy(np.bincount(labels, minlength=classes)),
        torch.ones(dim, dtype=dtype),
        classes=list(range(classes)),
        **{"nan_policy": "flag"} | options,
    )


def points_for(rng: Rng, sepc: SEPC, rows: int, bad: bool = True) -> torch.Tensor:
    """Points like the training points and some farther out, one on a surface and, if wanted, one that holds NaN."""
    z = rng.normal(size=(rows, sepc.dim)) * rng.choice([0.5, 1.0, 1.5], size=(rows, 1))
    points = torch.from_numpy(z).to(sepc.scale.dtype)
    if rows > 2:
        direction = torch.from_numpy(rng.normal(size=sepc.dim))
        direction /= direction.norm()
        whitener = sepc.bank.whiteners[0].double().cpu()
        points[1] = (sepc.bank.centers[0].double().cpu() + torch.linalg.solve(whitener, direction)).to(points.dtype)
        if bad:
            points[2, 0] = torch.nan
    return points


def distances_in_many(rng: Rng, count: int, rows: int) -> torch.Tensor:
    """Distances of rows in two to twelve ellipsoids drawn at random, in every third row of such as one lane has."""
    distance = 2 + rng.random((rows, count))
    for row, of_row in enumerate(distance):
        places = np.arange(rng.integers(min(32, count)), count, 32) if row % 3 == 0 else np.arange(count)
        held = rng.permutation(places)[: rng.integers(2, 13)]
        of_row[held] = rng.random(len(held))
    return torch.from_numpy(distance).float()
