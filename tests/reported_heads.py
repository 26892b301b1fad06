"""A small calibrated head and rows for the tests of reports and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

from sepc_torch import HeadPrediction, TrustHead, write_report
from sepc_torch.shapes import Array

CLASSES = ("ant", "bee", "cat")
MILLION = 10**6
# Bound on a page of a million rows without pictures.
MOST_BYTES = 600_000


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
    head = TrustHead.fit(train, labels, dim=dim, normalize="standardize", classes=CLASSES)
    head.calibrate(*draw(400))
    head.accept_at(risk=0.1)
    z, y, logits = draw(300)
    z[-40:] = rng.normal(size=(40, 6)) - 12.0  # far from every class
    y = np.where(np.arange(300) >= 260, "dog", y)
    return Reported(head, z, y, logits)


def _random_predictions(n: int, head: TrustHead) -> HeadPrediction:
    """Predictions for n rows without the work of the head."""
    classes, regions = len(head.classes), len(head.sepc.bank)
    rng = np.random.default_rng(0)

    def share() -> torch.Tensor:
        return torch.from_numpy(rng.random(n, dtype=np.float32))

    label, other = (torch.from_numpy(rng.integers(classes, size=n)) for _ in range(2))
    where = torch.from_numpy(rng.integers(regions, size=n))
    joint = share()
    return HeadPrediction(
        label=label,
        trust=share(),
        rule=torch.zeros_like(label),
        distance=2 * share(),
        margin=share(),
        nearest=where,
        runner_up=where,
        network_label=torch.where(joint > 0.2, label, other),
        network_trust=share(),
        network_margin=share(),
        confidence=share(),
        p_value=share(),
        class_p_value=share(),
        nonconformity=share(),
        joint=joint,
        accept=joint > 0.4,
    )


def report_of_a_million(reported: Reported, path: Path) -> Path:
    """Write the report of a million rows, whose predictions are random."""
    head = reported.head
    z = np.lib.stride_tricks.as_strided(reported.z, (MILLION, 6), (0, 8))  # one row, a million times
    y = np.array([*CLASSES, "dog"])[np.random.default_rng(1).integers(4, size=MILLION)]
    logits = np.broadcast_to(reported.logits[:1], (MILLION, 3))
    with mock.patch.object(TrustHead, "judge", return_value=_random_predictions(MILLION, head)):
        return write_report(head, z, y, logits, path)
