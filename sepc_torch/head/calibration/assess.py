r"""Calibrated values of labels from the measurements of points: one operator, in plain torch and as a CUDA kernel.

For a label c and its point, with the tables of a calibration,

1. the support x is asinh of softmax's log odds for c, asinh of the log odds of the class densities, and the log ratio
   of the distances to the nearest reference points of other classes and of c, the last two rounded to grids
   (:mod:`sepc_torch.head.evidence.evidence`);
2. the confidence is the beta-calibrated logistic of x (:mod:`sepc_torch.head.calibration.confidence`), or the joint
   score if that is larger: a label that is right and whose point is known is right;
3. the nonconformity score s combines all kinds (:mod:`sepc_torch.head.calibration.combined_score`), its p-values are
   the shares of ranked calibration points with a score at least as large (:mod:`sepc_torch.head.promises.conformal`);
4. the joint score is the ranking's logistic of x times the odds that the point is of a known kind.

Everything that a head returns depends on the densities only through two numbers, both rounded to grids: asinh of the
log odds of the label, and asinh of the largest log density. A row is *open* if the error of densities from distances in
float32 could move one of them to another grid point. The densities of open rows are computed again in float64, so that
all values are those of densities in float64. On CUDA there are no open rows, since kernels compute the densities that
matter in float64.

All arithmetic is in float64. ``torch.compile`` sees one operator, so compiled results are those of plain calls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sepc_torch.head.calibration.calibration_tables import MAX_LOGIT, RESOLUTION, CalibrationTables
from sepc_torch.head.calibration.combined_score import Survival, combined_score, finite_scores, survival
from sepc_torch.head.calibration.confidence import LogisticModels, confidences, logistic_models
from sepc_torch.head.evidence.densities import OpenTables, densities_again
from sepc_torch.head.evidence.evidence import LOG_STEP, ODDS_STEP, Measurements, energies, log_odds, support_columns
from sepc_torch.head.promises.conformal import ClassCalibration, class_share_above, share_above
from sepc_torch.model import torch_ops
from sepc_torch.model.device_sync import readable
from sepc_torch.model.kernels.launch import available
from sepc_torch.model.precision import as_dtype
from sepc_torch.shapes import Bool, Float, Int


def settled(measured: Measurements, label: Int[Tensor, "B"], invalid: Bool[Tensor, "B"]) -> Measurements:
    """The measurements with the densities of open rows in float64; on a CPU, outside of graphs.

    Args:
        measured: The measurements; without tables of the regions they are returned as they are.
        label: The labels as indices into the classes.
        invalid: Rows with an invalid embedding, which are never open.
    """
    if not measured.regions:
        return measured
    tables, density = OpenTables(*measured.regions), measured.density
    rows = (open_rows(density, label, tables.error) & ~invalid).nonzero().squeeze(1)
    if len(rows):
        density = density.index_copy(0, rows, densities_again(tables, rows, density.shape[1]))
    return measured._replace(density=density, regions=[])


def open_rows(density: Float[Tensor, "B C"], label: Int[Tensor, "B"], error: Float[Tensor, "B C"]) -> Bool[Tensor, "B"]:
    r"""Whether a row is open, from its log densities and their largest errors.

    The error of the log of a sum is the mean of the errors of the logs of its terms. asinh has the slope
    :math:`1 / \sqrt{1 + x^2}`.

    >>> density = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]], dtype=torch.float64)
    >>> open_rows(density, torch.tensor([0, 0]), torch.full((2, 2), 1e-6).double())
    tensor([False, False])
    >>> open_rows(density, torch.tensor([0, 0]), torch.full((2, 2), 1e-3).double())
    tensor([True, True])
    """
    index, top = label.unsqueeze(1), density.amax(dim=1, keepdim=True)
    share = density.scatter(1, index, -torch.inf).softmax(dim=1)
    of_odds = error.gather(1, index).squeeze(1) + (share * error).sum(dim=1)
    # A class whose log density is almost the largest could have the largest one.
    of_density = torch.where(density > top - 1.0, error, 0.0).amax(dim=1)
    numbers = torch.stack([log_odds(density, label), top.squeeze(1)])
    errors = torch.stack([of_odds, of_density])
    errors = errors / (1.0 + (numbers.abs() - errors).clamp_min(0.0).square()).sqrt()
    step = numbers.new_tensor([[ODDS_STEP], [LOG_STEP]])
    place = torch.asinh(numbers) / step + 0.5
    # NaN and infinity are not farther from an edge than the error.
    return ~((place - place.round()).abs() > errors / step).all(dim=0)


class Assessed(NamedTuple):
    """Confidence, p-value, class p-value, nonconformity score and joint score (5, B); whether a row is accepted."""

    columns: Float[Tensor, "5 B"]
    accept: Bool[Tensor, "B"]


class PlainTables(NamedTuple):
    """A calibration as plain torch needs it: what does not depend on a point is computed once, in float64."""

    temperature: Float[Tensor, ""]
    weights: Float[Tensor, "S"]
    held: Float[Tensor, "H"]
    by_class: ClassCalibration
    unknown_odds: Float[Tensor, ""]
    kinds: Survival
    combined: Survival
    models: LogisticModels

    @classmethod
    def of(cls, tables: CalibrationTables) -> PlainTables:
        """Lay out the tables of a calibration."""
        wide = CalibrationTables(*(table if table.dtype == torch.int64 else table.double() for table in tables))
        return cls(
            wide.temperature,
            wide.weights,
            wide.held,
            ClassCalibration(wide.by_class, wide.class_counts),
            wide.unknown_odds,
            survival(wide.ordered, wide.tails[:-1]),
            survival(wide.combined, wide.tails[-1]),
            logistic_models(torch.stack([wide.confidence, wide.ranking])),
        )

    def tensors(self) -> list[Tensor]:
        """All tensors, for an operator."""
        return [*self[:3], *self.by_class, self.unknown_odds, *self.kinds, *self.combined, *self.models]

    @classmethod
    def from_tensors(cls, tensors: list[Tensor]) -> PlainTables:
        """The tables from the list that :meth:`tensors` makes."""
        temperature, weights, held, ordered, counts, unknown_odds, *others = tensors
        kinds, combined, models = Survival(*others[:5]), Survival(*others[5:10]), LogisticModels(*others[10:])
        return cls(temperature, weights, held, ClassCalibration(ordered, counts), unknown_odds, kinds, combined, models)


def assess(
    measured: Measurements,
    logits: Float[Tensor, "B C"] | None,
    label: Int[Tensor, "B"],
    invalid: Bool[Tensor, "B"],
    least: Float[Tensor, "*B"],
    tables: CalibrationTables,
    plain: PlainTables,
) -> Assessed:
    """Calibrated values of labels.

    Args:
        measured: The measurements of the points.
        logits: The network's logits, if the labels are the network's and the calibration had logits.
        label: The labels; -1 for a row without a label.
        invalid: Rows with an invalid embedding.
        least: The least accepted joint score, of every row or of all.
        tables: The calibration.
        plain: The same calibration, for devices without kernels.

    Returns:
        The values in float64. Rows that are invalid or without a label have the confidence and the joint score zero,
        and are not accepted.
    """
    density, *others, mahalanobis, _ = measured
    given = logits.detach() if logits is not None and logits.requires_grad else logits
    if not density.is_cuda and not torch.compiler.is_compiling():
        return _assess_by_rows(measured, given, label, invalid, least, plain)
    near, white, scores = ([] if part is None else [part] for part in (*others, given))
    rows = density, near, white, mahalanobis, scores, label, invalid, least
    if density.is_cuda:
        return Assessed(*_assess(*rows, list(tables)))
    return Assessed(*_assess_plain(*rows, plain.tensors()))


def _assess_rows(*arguments: Any) -> tuple[Tensor, Tensor]:
    rows, tables = arguments[:-1], CalibrationTables(*arguments[-1])
    if available(rows[0]):
        from sepc_torch.head.kernels.assess import assess_on_cuda

        given: Any = *rows, tables
        return assess_on_cuda(*given)
    given = *rows, PlainTables.of(tables).tensors()
    return assess_plainly(*given)


def assess_plainly(
    density: Float[Tensor, "B C"],
    near: list[Tensor],
    white: list[Tensor],
    mahalanobis: Float[Tensor, "L1 B"],
    logits: list[Tensor],
    label: Int[Tensor, "B"],
    invalid: Bool[Tensor, "B"],
    least: Float[Tensor, "*B"],
    plain: list[Tensor],
) -> tuple[Float[Tensor, "5 B"], Bool[Tensor, "B"]]:
    """The operator in plain torch, from the tensors of :class:`PlainTables`."""
    near_points, near_white, given = (part[0] if part else None for part in (near, white, logits))
    measured = Measurements(density, near_points, near_white, mahalanobis, [])
    columns, accept = _assess_by_rows(measured, given, label, invalid, least, PlainTables.from_tensors(plain))
    return columns, accept


class Rated(NamedTuple):
    """Values of labels before promises: confidence, the ranking's logistic, nonconformity score, log typicality.

    ``invalid`` marks rows with an embedding or a layer that is not finite, ``refused`` also those without a label.
    """

    confidence: Float[Tensor, "B"]
    ranking: Float[Tensor, "B"]
    score: Float[Tensor, "B"]
    typicality: Float[Tensor, "B"]
    invalid: Bool[Tensor, "B"]
    refused: Bool[Tensor, "B"]


def rate_rows(
    measured: Measurements,
    logits: Float[Tensor, "B C"] | None,
    label: Int[Tensor, "B"],
    invalid: Bool[Tensor, "B"],
    tables: PlainTables,
) -> Rated:
    """Rate labels in plain torch, on any device; see :func:`assess` for the arguments.

    Supports, kinds and models are rows, so that one call serves all of them: a few points cost only calls.
    """
    index, finite = label.clamp_min(0), None if logits is None else finite_logits(logits)
    scaled = None if finite is None else finite / tables.temperature
    measured = settled(measured, index, invalid)
    support = torch.stack(support_columns(measured.density, measured.near, scaled, index))
    invalid = invalid | support.isnan().any(dim=0) | measured.mahalanobis.isnan().any(dim=0)
    refused = invalid | (label < 0)
    some_refused = not readable(refused) or bool(refused.any())
    kinds = measured.kinds()
    if some_refused:
        kinds = [torch.where(refused, torch.nan, kind) for kind in kinds]
    if finite is not None:
        kinds.append(energies(finite))
    log_shares = tables.kinds.log_share(finite_scores(torch.stack(kinds)))
    score = combined_score(log_shares.T.contiguous(), tables.weights)  # the last digit of a sum depends on the layout
    typicality = tables.combined.log_share(score)
    confidence, ranking = confidences(support, tables.models).unbind()
    return Rated(confidence, ranking, score, typicality, invalid, refused)


def _assess_by_rows(
    measured: Measurements,
    logits: Float[Tensor, "B C"] | None,
    label: Int[Tensor, "B"],
    invalid: Bool[Tensor, "B"],
    least: Float[Tensor, "*B"],
    tables: PlainTables,
) -> Assessed:
    """The operator from the measurements."""
    rated = rate_rows(measured, logits, label, invalid, tables)
    confidence, ranking, score, typicality, invalid, refused = rated
    some_refused = not readable(refused) or bool(refused.any())
    # Calibration scores that are equal up to rounding count as at least as large, which can only raise a p-value.
    lower = score - RESOLUTION * (1.0 + score.abs())
    by_class = class_share_above(tables.by_class, lower, label.clamp_min(0))
    joint = joint_score(ranking, typicality, tables.unknown_odds)
    accept = joint >= least
    confidence = torch.maximum(confidence, joint)
    if some_refused:
        confidence, joint = torch.where(refused, 0.0, confidence), torch.where(refused, 0.0, joint)
        by_class = torch.where(refused & ~invalid, torch.nan, by_class)
        accept = accept & ~refused
    return Assessed(torch.stack([confidence, share_above(tables.held, lower), by_class, score, joint]), accept)


def finite_logits(logits: Float[Tensor, "B C"]) -> Float[Tensor, "B C"]:
    """Logits in float64 within finite bounds; softmax still gives a masked class (-inf) the probability zero."""
    return logits.double().clamp(-MAX_LOGIT, MAX_LOGIT)


def class_probabilities(
    confidence: Float[Tensor, "B"], label: Int[Tensor, "B"], scores: Float[Tensor, "B C"]
) -> Float[Tensor, "B C"]:
    """Probabilities of all classes: the confidence for the label; the other classes share the rest by softmax.

    >>> class_probabilities(torch.tensor([0.7]), torch.tensor([1]), torch.tensor([[0.0, 5.0, 0.0]]))
    tensor([[0.1500, 0.7000, 0.1500]])
    """
    index = label.unsqueeze(1)
    others = scores.scatter(1, index, -torch.inf).softmax(dim=1).to(confidence.dtype)
    return (others * (1.0 - confidence).unsqueeze(1)).scatter(1, index, confidence.unsqueeze(1))


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
    return confidence * torch.sigmoid(log_typicality - as_dtype(unknown_odds.log(), log_typicality.dtype))


def _shapes(density: Tensor, *_arguments: object) -> tuple[Tensor, Tensor]:
    count = density.shape[0]
    return density.new_empty(5, count), density.new_empty(count, dtype=torch.bool)


_ARGUMENTS = (
    "Tensor density, Tensor[] near, Tensor[] white, Tensor mahalanobis, Tensor[] logits, Tensor label, "
    "Tensor invalid, Tensor least, Tensor[] tables"
)
_RESULTS = "(Tensor, Tensor)"
_assess = torch_ops.operator(f"assess({_ARGUMENTS}) -> {_RESULTS}", _assess_rows, _shapes)
_assess_plain = torch_ops.opaque(f"assess_plainly({_ARGUMENTS}) -> {_RESULTS}", assess_plainly, _shapes)
