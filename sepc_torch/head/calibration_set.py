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
# Largest deviation of a sum of probabilities from one: that of probabilities in bfloat16. All rows must be as near.
_NORMALISED = 0.02


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
    warn_of_probabilities(given, stacklevel=6)
    label = given.argmax(dim=1)
    values["network"] = evidence.values(measurements, label)
    right["network"] = label == codes
    return CalibrationSet(values, right, {"own": own, "network": label}, given)


def warn_of_probabilities(logits: Float[Tensor, "M C"], stacklevel: int = 2) -> None:
    """Warn if logits are probabilities or their logarithms, which lack what the energy of logits says.

    Args:
        logits: The given logits.
        stacklevel: The frame to name in the warning.

    >>> warn_of_probabilities(torch.tensor([[3.0, 0.0], [0.0, 2.0]]))
    """
    values = logits.double()
    sums = values.sum(dim=1)
    if bool((values >= 0).all() & ((sums - 1.0).abs() < _NORMALISED).all()):
        warnings.warn(
            "logits look like probabilities: they are not negative, and every row sums to one. Pass the network's "
            "output before softmax, at calibrate and at every call; or the logarithm of the probabilities, which is "
            "right for softmax but has no energy, one of the signs of an unknown kind.",
            stacklevel=stacklevel,
        )
    elif bool((values.logsumexp(dim=1).abs() < _NORMALISED).all()):
        warnings.warn(
            "logits look like logarithms of probabilities: the probabilities of every row sum to one. Labels and "
            "confidence are right, but the energy of the logits is the same for all points, so one of the signs of an "
            "unknown kind is lost. Pass the network's output before log_softmax if you have it.",
            stacklevel=stacklevel,
        )
