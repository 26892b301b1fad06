r"""Calibrated values of labels from the measurements of points: one operator, in plain torch and as a CUDA kernel.

For a label c and its point, with the tables of a calibration,

1. the support x is asinh of softmax's log odds for c, asinh of the log odds of the class densities, and the log ratio
   of the distances to the nearest reference points of other classes and of c;
2. the confidence is the beta-calibrated logistic of x (:mod:`sepc_torch.head.confidence`);
3. the nonconformity score s combines all kinds (:mod:`sepc_torch.head.strangeness`), its p-values are the shares of
   ranked calibration points with a score at least as large (:mod:`sepc_torch.head.conformal`);
4. the joint score is the ranking's logistic of x times the odds that the point is of a known kind.

All arithmetic is in float64. ``torch.compile`` sees one operator, so compiled results are those of plain calls.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.head.calibration_tables import MAX_LOGIT, RESOLUTION, CalibrationTables
from sepc_torch.head.confidence import confidences_from
from sepc_torch.head.conformal import ClassCalibration, class_share_above, share_above
from sepc_torch.head.evidence import EvidenceValues, Measurements, label_support, with_energy, with_softmax
from sepc_torch.head.strangeness import combined_score, log_survival_from
from sepc_torch.model import torch_ops
from sepc_torch.model.device_sync import readable
from sepc_torch.model.kernels.launch import available
from sepc_torch.shapes import Bool, Float, Int


class Assessed(NamedTuple):
    """Confidence, p-value, class p-value, nonconformity score and joint score (5, B); whether a row is accepted."""

    columns: Float[Tensor, "5 B"]
    accept: Bool[Tensor, "B"]


def assess(
    measured: Measurements,
    logits: Float[Tensor, "B C"] | None,
    label: Int[Tensor, "B"],
    invalid: Bool[Tensor, "B"],
    least: Float[Tensor, "*B"],
    tables: CalibrationTables,
) -> Assessed:
    """Calibrated values of labels.

    Args:
        measured: The measurements of the points.
        logits: The network's logits, if the labels are the network's and the calibration had logits.
        label: The labels; -1 for a row without a label.
        invalid: Rows with an invalid embedding.
        least: The least accepted joint score, of every row or of all.
        tables: The calibration.

    Returns:
        The values in float64. Rows that are invalid or without a label have the confidence and the joint score zero,
        and are not accepted.
    """
    near, white, mahalanobis, given = (
        [] if part is None else [part] for part in (measured.near, measured.white, measured.mahalanobis, logits)
    )
    point = measured.density, near, white, mahalanobis
    return Assessed(*_assess(*point, given, label, invalid, least, list(tables)))


def _assess_rows(
    density: Tensor,
    near: list[Tensor],
    white: list[Tensor],
    mahalanobis: list[Tensor],
    logits: list[Tensor],
    label: Tensor,
    invalid: Tensor,
    least: Tensor,
    tensors: list[Tensor],
) -> tuple[Tensor, Tensor]:
    if available(density):
        from sepc_torch.head.kernels.assess import assess_on_cuda

        measured = density, near, white, mahalanobis
        return assess_on_cuda(*measured, logits, label, invalid, least, CalibrationTables(*tensors))
    return assess_plainly(density, near, white, mahalanobis, logits, label, invalid, least, tensors)


def assess_plainly(
    density: Float[Tensor, "B C"],
    near: list[Tensor],
    white: list[Tensor],
    mahalanobis: list[Tensor],
    logits: list[Tensor],
    label: Int[Tensor, "B"],
    invalid: Bool[Tensor, "B"],
    least: Float[Tensor, "*B"],
    tensors: list[Tensor],
) -> tuple[Float[Tensor, "5 B"], Bool[Tensor, "B"]]:
    """The operator in plain torch."""
    tables = CalibrationTables(*(table if table.dtype == torch.int64 else table.double() for table in tensors))
    parts = (part[0] if part else None for part in (near, white, mahalanobis))
    nonconformity = Measurements(density, *parts).nonconformity
    index = label.clamp_min(0)
    support = label_support(density, near[0] if near else None, index)
    invalid = invalid | support.isnan().any(dim=1)
    refused = invalid | (label < 0)
    values = EvidenceValues(support, torch.where(refused[:, None], torch.nan, nonconformity))
    if logits:
        finite = finite_logits(logits[0])
        values = with_softmax(values, finite / tables.temperature, index)
        if len(tables.weights) > values.nonconformity.shape[1]:  # file formats 1 to 3 had no energy
            values = with_energy(values, finite)
    kinds = log_survival_from(tables.ordered, values.nonconformity.T, tables.tails[:-1])
    score = combined_score(-kinds.T, tables.weights)
    typicality = log_survival_from(tables.combined, score, tables.tails[-1])
    # Calibration scores that are equal up to rounding count as at least as large, which can only raise a p-value.
    lower = score - RESOLUTION * (1.0 + score.abs())
    by_class = class_share_above(ClassCalibration(tables.by_class, tables.class_counts), lower, index)
    confidence, ranking = confidences_from(values.support, torch.stack([tables.confidence, tables.ranking]))
    joint = joint_score(ranking, typicality, tables.unknown_odds)
    accept = joint >= least
    if not readable(refused) or bool(refused.any()):
        confidence, joint = torch.where(refused, 0.0, confidence), torch.where(refused, 0.0, joint)
        by_class = torch.where(refused & ~invalid, torch.nan, by_class)
        accept = accept & ~refused
    return torch.stack([confidence, share_above(tables.held, lower), by_class, score, joint]), accept


def finite_logits(logits: Float[Tensor, "B C"]) -> Float[Tensor, "B C"]:
    """Logits in float64 within finite bounds; softmax still gives a masked class (-inf) the probability zero."""
    return logits.double().clamp(-MAX_LOGIT, MAX_LOGIT)


def joint_score(
    confidence: Float[Tensor, "B"], log_typicality: Float[Tensor, "B"], unknown_odds: Float[Tensor, ""]
) -> Float[Tensor, "B"]:
    r"""Probability :math:`c \, \frac{p}{p + \lambda}` that a label is right and the point is of a known kind.

    c is the confidence, p the typicality and :math:`\lambda` the prior odds that a point is of an unknown kind. At
    typicality p the odds are :math:`\lambda / p`: the prior odds times 1/p, the strongest evidence that a p-value can
    give against the known kinds. Points of ordinary typicality, :math:`p \gg \lambda`, keep the order of their
    confidence.

    >>> joint_score(torch.tensor([0.9, 0.9]), torch.tensor([1.0, 0.001]).log(), torch.tensor(0.1))
    tensor([0.8182, 0.0089])
    """
    return confidence * torch.sigmoid(log_typicality - unknown_odds.log().to(log_typicality.dtype))


def _shapes(density: Tensor, *_arguments: object) -> tuple[Tensor, Tensor]:
    count = density.shape[0]
    return density.new_empty(5, count), density.new_empty(count, dtype=torch.bool)


_assess = torch_ops.operator(
    "assess(Tensor density, Tensor[] near, Tensor[] white, Tensor[] mahalanobis, Tensor[] logits, Tensor label, "
    "Tensor invalid, Tensor least, Tensor[] tables) -> (Tensor, Tensor)",
    _assess_rows,
    _shapes,
)
