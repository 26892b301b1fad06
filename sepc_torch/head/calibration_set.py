"""Calibration points of a trust head: validation, and the evidence for their labels."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch.head.evidence import Evidence, EvidenceValues
from sepc_torch.model.queries import check_logits, refuse_rows_without_prediction, rows_without_prediction
from sepc_torch.shapes import Bool, Float, Int

# Least number of calibration points: both halves of the split need enough points to fit and to rank.
LEAST_CALIBRATION = 20
# Share of calibration points that may coincide with training points: some data sets contain duplicates.
_MAX_DUPLICATES = 0.5


class CalibrationSet(NamedTuple):
    """Evidence for the labels of calibration points, whether the labels are right, the labels, the network's logits.

    The keys of the dictionaries are the sources of labels: ``"own"`` for the head and, with logits, ``"network"``.
    """

    values: dict[str, EvidenceValues]
    right: dict[str, Bool[Tensor, "M"]]
    label: dict[str, Int[Tensor, "M"]]
    logits: Float[Tensor, "M C"] | None


def calibration_set(
    evidence: Evidence,
    z: Float[Tensor, "M D"],
    codes: Int[Tensor, "M"],
    own: Int[Tensor, "M"],
    logits: Any,
    classes: int,
) -> CalibrationSet:
    """Check calibration points and compute the evidence for their labels.

    Args:
        evidence: The evidence of the head.
        z: Embeddings.
        codes: True classes.
        own: Labels that the head predicts; -1 for an invalid embedding.
        logits: The network's logits (M, C) as a tensor, array, list or table, or None.
        classes: Number of classes.
    """
    measurements = evidence.measure(z)
    values = {"own": evidence.values(measurements, own.clamp_min(0))}
    right = {"own": own == codes}
    invalid = (own < 0) | values["own"].support.isnan().any(dim=1)
    if bool(invalid.any()):
        raise ValueError(
            f"Row {int(invalid.nonzero()[0])} of embeddings has no direction; drop it. The guarantees then hold for "
            "embeddings that have a direction."
        )
    near = measurements.near
    if near is not None and float((near.amin(dim=1) == 0).double().mean()) > _MAX_DUPLICATES:
        warnings.warn(
            "Most calibration points are training points of the head: every new point would get a small p-value. "
            "Calibrate with points that neither the network nor the head was fitted on.",
            stacklevel=5,  # the caller of TrustHead.calibrate, beyond two frames of its decorators
        )
    if logits is None:
        return CalibrationSet(values, right, {"own": own}, None)
    # np.array also converts lists and tables. The logit -inf, which masks a class, is allowed.
    given = logits if isinstance(logits, Tensor) else torch.from_numpy(np.array(logits, dtype=np.float64))
    given = given.to(z.device)
    check_logits(given, (len(z), classes), z.device)
    refuse_rows_without_prediction(rows_without_prediction(given), "Drop those rows from the calibration points.")
    label = given.argmax(dim=1)
    values["network"] = evidence.values(measurements, label)
    right["network"] = label == codes
    return CalibrationSet(values, right, {"own": own, "network": label}, given)
