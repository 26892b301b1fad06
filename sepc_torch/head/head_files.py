"""Files of trust heads: every buffer of the head, and its options, in one safetensors file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sepc_torch.data import files
from sepc_torch.head.evidence import Evidence
from sepc_torch.head.projection import Projection
from sepc_torch.head.training_set import KeptTrainingSet
from sepc_torch.model.sepc import SEPC

# Prefix of the arrays of training points.
_TRAINING = "training."


class HeadParts(NamedTuple):
    """The parts of a head in a file: its modules, the state of its calibration, and its options."""

    projection: Projection
    sepc: SEPC
    evidence: Evidence | None
    calibration: dict[str, Tensor]
    options: dict[str, Any]
    training_set: KeptTrainingSet | None


def write_head(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    options: Mapping[str, Any],
    training_set: KeptTrainingSet | None = None,
) -> None:
    """Write the state dict of a head, its options and the training points that it keeps to a file."""
    arrays = {name: value.cpu().numpy() for name, value in state.items() if isinstance(value, Tensor)}
    if training_set is not None:
        arrays |= {_TRAINING + name: array for name, array in training_set.arrays().items()}
        options = {**options, "training": training_set.metadata()}
    files.write(path, "trust_head", arrays, options)


def read_head(path: str | os.PathLike[str]) -> HeadParts:
    """Read the parts of a head from a file."""
    arrays, options = files.read(path, "trust_head")
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    training = {name.removeprefix(_TRAINING): a for name, a in arrays.items() if name.startswith(_TRAINING)}
    with files.interpreting(path):
        return HeadParts(
            Projection(tensors["projection.shift"], tensors["projection.matrix"], unit_length=options["unit_length"]),
            SEPC.from_tensors(part("sepc."), options["sepc"]),
            Evidence.from_tensors(part("evidence.")) if "evidence.polar.shift" in tensors else None,
            part("calibration."),
            options,
            KeptTrainingSet.from_arrays(training, options["training"], arrays["sepc.codes"]) if training else None,
        )
