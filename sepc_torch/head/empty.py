"""Parts of a head without knowledge, whose buffers ``load_state_dict`` replaces."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch.ellipsoid import Ellipsoid
from sepc_torch.head.densities import RegionDensities
from sepc_torch.head.evidence import Evidence
from sepc_torch.head.neighbours import Neighbours
from sepc_torch.head.projection import Projection
from sepc_torch.head.shared_gaussian import SharedGaussian
from sepc_torch.model.bank import EllipsoidBank
from sepc_torch.model.rules import TrainingCounts
from sepc_torch.model.sepc import SEPC
from sepc_torch.partitioning.cells import ledger


class EmptyParts(NamedTuple):
    """The modules of a head without knowledge."""

    projection: Projection
    sepc: SEPC
    evidence: Evidence


def empty_parts(in_features: int, classes: list[Any]) -> EmptyParts:
    """Return the modules of a head whose classes have one training point each, all at one place."""
    codes = np.arange(len(classes))
    balls = [Ellipsoid(np.zeros(1), np.eye(1))] * len(classes)
    training = TrainingCounts.from_ledger(
        torch.from_numpy(codes), ledger(balls, np.zeros((len(classes), 1)), codes, len(classes)), torch.float32
    )
    bank = EllipsoidBank(torch.zeros(len(classes), 1), torch.ones(len(classes), 1, 1))
    sepc = SEPC(bank, training, torch.ones(len(classes), dtype=torch.int64), torch.ones(1), classes=classes)
    regions = EllipsoidBank(torch.zeros(len(classes), 1), torch.ones(len(classes), 1, 1))
    ones = torch.ones(len(classes))
    evidence = Evidence(
        _projection(in_features + 1, least_length=torch.ones(())),
        RegionDensities(regions, ones, ones.clone(), torch.from_numpy(codes)),
        _projection(in_features),
        Neighbours(torch.zeros(len(classes), in_features), torch.from_numpy(codes), eleven_bits=True),
        SharedGaussian(torch.ones(1, 1), torch.zeros(len(classes), 1), torch.ones(1), torch.zeros(())),
    )
    return EmptyParts(_projection(in_features), sepc, evidence)


def _projection(columns: int, least_length: Tensor | None = None) -> Projection:
    return Projection(
        torch.zeros(columns), torch.zeros(1, columns), unit_length=least_length is not None, least_length=least_length
    )
