"""The tensors of a calibration that values are computed from, and the resolution of scores."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sepc_torch.shapes import Float, Int

# Scores closer than this count as equal: log odds of joint scores and nonconformity scores, relative to 1 + |score|.
# Rounding errors, and differences between devices, are far below.
RESOLUTION = 1e-4
# Bound of the logits: a masked class has the logit -inf.
MAX_LOGIT = 1e4


class CalibrationTables(NamedTuple):
    """Tensors of a calibration that values are computed from.

    ``confidence`` and ``ranking`` hold the weights, the bias, the two bends and the shift of a logistic model.
    ``ordered`` (S, M) holds the sorted scores of every kind, ``combined`` (M,) the sorted combined scores, and
    ``tails`` (S + 1, 4) the constants of their tails. ``held`` (H,) and ``by_class`` (C, m) are the sorted scores of
    the ranked points, ``class_counts`` their numbers by class.
    """

    temperature: Float[Tensor, ""]
    confidence: Float[Tensor, "f"]
    ranking: Float[Tensor, "f"]
    weights: Float[Tensor, "S"]
    tails: Float[Tensor, "S1 4"]
    ordered: Float[Tensor, "S M"]
    combined: Float[Tensor, "M"]
    held: Float[Tensor, "H"]
    by_class: Float[Tensor, "C m"]
    class_counts: Int[Tensor, "C"]
    unknown_odds: Float[Tensor, ""]
