"""A small calibrated head and rows for the tests of reports and pictures."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sepc_torch import TrustHead
from sepc_torch.shapes import Array

CLASSES = ("ant", "bee", "cat")


class Reported(NamedTuple):
    """A calibrated head, and rows of its three classes and of an unknown one ("dog")."""

    head: TrustHead
    z: Array
    y: Array
    logits: Array


def reported_head(dim: int = 3) -> Reported:
    """Fit and calibrate a head on three overlapping classes; the seed is fixed."""
    rng = np.random.default_rng(0)
    centers = np.eye(3, 6) * 4.0

    def draw(n: int) -> tuple[Array, Array, Array]:
        codes = np.arange(n) % 3
        z = rng.normal(size=(n, 6)) * 1.6 + centers[codes]
        logits = z[:, :3] + rng.normal(size=(n, 3)) * 1.5
        return z, np.array(CLASSES)[codes], logits

    train, labels, _ = draw(240)
    head = TrustHead.fit(train, labels, dim=dim, normalize="standardize")
    head.calibrate(*draw(400))
    head.accept_at(risk=0.1)
    z, y, logits = draw(300)
    z[-40:] = rng.normal(size=(40, 6)) - 12.0  # far from every class
    y = np.where(np.arange(300) >= 260, "dog", y)
    return Reported(head, z, y, logits)
