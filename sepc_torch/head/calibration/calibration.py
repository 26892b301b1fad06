r"""Calibration of a trust head: confidence, typicality, p-values, the joint score and the acceptance threshold.

- The confidence is the logistic model of :mod:`sepc_torch.head.calibration.confidence`.
- The typicality of a point is the share of calibration points with a combined nonconformity score
  (:mod:`sepc_torch.head.calibration.combined_score`) at least as large. From the start of the largest tenth of the
  scores on, the share falls exponentially, so that distant points have no ties.
- The joint score combines both.

The guarantees of p-values and thresholds (:mod:`sepc_torch.head.promises.conformal`) are exact only if the ranked score
was not fitted to the points it is ranked on. Calibration therefore splits its points: one part fits the typicality and
the joint score, the other part is only ranked. The confidence carries no guarantee and is fitted to all points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch.data.warn import warn_user
from sepc_torch.head.calibration.assess import assess, finite_logits
from sepc_torch.head.calibration.combined_score import MIN_TAIL_POINTS
from sepc_torch.head.calibration.confidence import fit_temperature
from sepc_torch.head.calibration.label_calibration import LabelCalibration
from sepc_torch.head.evidence.evidence import (
    Evidence,
    EvidenceValues,
    Measurements,
    class_scores,
    energies,
    label_support,
    with_energy,
    with_softmax,
)
from sepc_torch.model import torch_ops
from sepc_torch.model.queries import (
    check_logits,
    points_as_tensor,
    refuse_undefined_logits,
    rows_without_prediction,
)
from sepc_torch.shapes import Array, Bool, Float, Int

# Least number of calibration points: both halves of the split need enough points to fit and to rank.
LEAST_CALIBRATION = 20
# Least number of examples of unknowns: fewer hardly move the weights.
LEAST_EXAMPLES = 5
# Share of calibration points that may coincide with training points: some data sets contain duplicates.
_MAX_DUPLICATES = 0.5
# Share of the calibration points that fit the scores, and the least number of them; the others are ranked. The scores
# have a dozen parameters. In experiments/promises/power.py a fifth accepts more than half at every number of points.
_FITTED_SHARE, _LEAST_FITTED = 0.2, 40
# Largest deviation of a sum of probabilities from one: that of probabilities in bfloat16. All rows must be as near.
_NORMALISED = 0.02
# Labels are taken for those of other columns if another order makes this many times fewer mistakes, and few; orders of
# more classes than this are not searched.
_MIXED_UP, _FEW_MISTAKES, _MOST_ORDERED = 3.0, 0.5, 1000
# Bound of the temperature and of its inverse: labels without a mistake would drive the temperature to zero.
_MAX_TEMPERATURE = 20.0


_narrow = torch_ops.opaque(
    "narrow(Tensor columns) -> Tensor",
    lambda columns: columns.float(),
    lambda columns: torch.empty_like(columns, dtype=torch.float32),
)


class CalibrationSet(NamedTuple):
    """Evidence for the labels of calibration points, whether the labels are right, the labels, scores of all classes.

    The keys of the dictionaries are the sources of labels: ``"own"`` for the head and, with logits, ``"network"``. The
    label of a row whose largest logit is not unique is -1, and wrong. The network's scores of classes are its logits.
    """

    values: dict[str, EvidenceValues]
    right: dict[str, Bool[Tensor, "M"]]
    label: dict[str, Int[Tensor, "M"]]
    scores: dict[str, Float[Tensor, "M C"]]


def calibration_set(
    evidence: Evidence,
    z: Float[Tensor, "M D"],
    codes: Int[Tensor, "M"],
    own: Int[Tensor, "M"],
    logits: Any,
    classes: int,
    layers: Sequence[Float[Tensor, "M _"]] = (),
) -> CalibrationSet:
    """Check calibration points and compute the evidence for their labels.

    Args:
        evidence: The evidence of the head.
        z: Embeddings.
        codes: True classes.
        own: Labels that the head predicts; -1 for an invalid embedding.
        logits: The network's logits (M, C) as a tensor, array, list or table, or None.
        classes: Number of classes.
        layers: Activations of earlier layers of the network, in the order of the head.
    """
    measurements = evidence.measure(z, layers=layers)
    unknown = measurements.mahalanobis[1:].isnan().any(dim=0)
    if bool(unknown.any()):
        raise ValueError(
            f"Row {int(unknown.nonzero()[0])} of layers holds NaN or infinity; drop it from the calibration points."
        )
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
        warn_user(
            "Most calibration points are training points of the head: every new point would get a small p-value. "
            "Calibrate with points that neither the network nor the head was fitted on.",
        )
    scores = {"own": class_scores(measurements.density, near)}
    if logits is None:
        return CalibrationSet(values, right, {"own": own}, scores)
    # The logit -inf, which masks a class, is allowed.
    given = logits if isinstance(logits, Tensor) else points_as_tensor(logits, None, z.device, z.dtype, "logits")
    given = given.to(z.device)
    check_logits(given, (len(z), classes), z.device)
    refuse_undefined_logits(given, "Drop those rows from the calibration points.")
    warn_of_probabilities(given)
    label = given.argmax(dim=1)
    if (found := better_order(codes.cpu().numpy(), label.cpu().numpy(), classes)) is not None:
        warn_user(
            f"The labels seem to be in another order than the columns of the logits: {found[0]:.0%} of the network's "
            f"labels are wrong, and {found[1]:.0%} would be in another order. Column c must be that of classes[c].",
        )
    values["network"] = evidence.values(measurements, label)
    label = torch.where(rows_without_prediction(given), -1, label)
    right["network"] = label == codes
    return CalibrationSet(values, right, {"own": own, "network": label}, {**scores, "network": given})


def example_set(
    evidence: Evidence, z: Float[Tensor, "U D"], logits: Any, classes: int, layers: Sequence[Float[Tensor, "U _"]] = ()
) -> dict[str, Tensor]:
    """Check examples of unknowns and compute their nonconformity, without and, if logits are given, with the energy.

    Args:
        evidence: The evidence of the head.
        z: Embeddings.
        logits: The network's logits (U, C) in any form that :func:`calibration_set` takes, or None.
        classes: Number of classes.
        layers: Activations of earlier layers of the network, in the order of the head.
    """
    if len(z) < LEAST_EXAMPLES:
        raise ValueError(
            f"{len(z)} examples of unknowns are too few to learn from; pass at least {LEAST_EXAMPLES}, or none. A few "
            "dozen are useful."
        )
    own = evidence.measure(z, layers=layers).nonconformity
    if bool(own.isnan().any()):
        raise ValueError(
            f"Row {int(own.isnan().any(dim=1).nonzero()[0])} of unknowns has no direction, or a layer that is not "
            "finite; drop it."
        )
    if logits is None:
        return {"own": own}
    given = (
        logits if isinstance(logits, Tensor) else points_as_tensor(logits, None, z.device, z.dtype, "unknown_logits")
    )
    given = given.to(z.device)
    check_logits(given, (len(z), classes), z.device)
    refuse_undefined_logits(given, "Drop those rows from the examples of unknowns.")
    return {"own": own, "network": torch.cat([own, energies(finite_logits(given)).unsqueeze(1)], dim=1)}


def better_order(codes: Int[Array, "M"], predicted: Int[Array, "M"], classes: int) -> tuple[float, float] | None:
    """The share of mistakes, and that with labels in the best other order, if that makes far fewer mistakes; or None.

    The best order is the assignment of labels to columns with the fewest mistakes. Not searched for many classes.

    >>> better_order(np.array([0, 1, 2, 0, 1, 2]), np.array([2, 1, 0, 2, 1, 0]), 3)
    (0.66..., 0.0)
    >>> better_order(np.array([0, 1, 2, 0, 1, 2]), np.array([0, 1, 2, 0, 1, 1]), 3)
    """
    from scipy.optimize import linear_sum_assignment

    if classes > _MOST_ORDERED:
        return None
    counts = np.zeros((classes, classes))
    np.add.at(counts, (codes, predicted), 1)
    rows, best = linear_sum_assignment(-counts)
    wrong, least = (float(1.0 - right / len(codes)) for right in (np.trace(counts), counts[rows, best].sum()))
    return (wrong, least) if wrong > _MIXED_UP * max(least, 1.0 / len(codes)) and least < _FEW_MISTAKES else None


def warn_of_probabilities(logits: Float[Tensor, "M C"]) -> None:
    """Warn if logits are probabilities or their logarithms, which lack what the energy of logits says.

    Args:
        logits: The given logits.

    >>> warn_of_probabilities(torch.tensor([[3.0, 0.0], [0.0, 2.0]]))
    """
    values = logits.double()
    sums = values.sum(dim=1)
    if bool((values >= 0).all() & ((sums - 1.0).abs() < _NORMALISED).all()):
        warn_user(
            "logits look like probabilities: they are not negative, and every row sums to one. Pass the network's "
            "output before softmax, at calibrate and at every call; or the logarithm of the probabilities, which is "
            "right for softmax but has no energy, one of the signs of an unknown kind.",
        )
    elif bool((values.logsumexp(dim=1).abs() < _NORMALISED).all()):
        warn_user(
            "logits look like logarithms of probabilities: the probabilities of every row sum to one. Labels and "
            "confidence are right, but the energy of the logits is the same for all points, so one of the signs of an "
            "unknown kind is lost. Pass the network's output before log_softmax if you have it.",
        )


def _in_dtype(columns: Float[Tensor, "n B"], dtype: torch.dtype) -> Float[Tensor, "n B"]:
    return _narrow(columns) if dtype == torch.float32 else columns.to(dtype)


def _split(
    points: int, rank_fraction: float | None, seed: int, units: Int[Array, "M"] | None
) -> tuple[Int[Tensor, "h"], Int[Tensor, "f"]]:
    """Choose at random the points that are ranked, and those that fit: by units if there are units.

    By default a fifth of the points fit, but at least :data:`_LEAST_FITTED` or half of them.
    """
    count = points if units is None else int(units.max()) + 1
    if rank_fraction is None:
        rank_fraction = 1.0 - max(_FITTED_SHARE, min(_LEAST_FITTED / count, 0.5))
    ranked = round(rank_fraction * count)
    order = np.random.default_rng(seed).permutation(count)
    held, fitted = order[:ranked], order[ranked:]
    if units is not None:
        chosen = np.isin(units, held)
        held, fitted = np.flatnonzero(chosen), np.flatnonzero(~chosen)
    if min(len(held), len(fitted)) < MIN_TAIL_POINTS:
        of, more = ("", "points") if units is None else (f" in {count} units", "units")
        raise ValueError(
            f"rank_fraction={rank_fraction} of {points} points{of} leaves {len(held)} to rank and {len(fitted)} to "
            f"fit; both need at least {MIN_TAIL_POINTS}. Give more {more}, or a rank_fraction nearer to one half."
        )
    return torch.from_numpy(held), torch.from_numpy(fitted)


class Calibrated(NamedTuple):
    """Calibrated values of a batch; the last six fields of :class:`~sepc_torch.HeadPrediction`."""

    confidence: Float[Tensor, "B"]
    p_value: Float[Tensor, "B"]
    class_p_value: Float[Tensor, "B"]
    nonconformity: Float[Tensor, "B"]
    joint: Float[Tensor, "B"]
    accept: Bool[Tensor, "B"]


class Calibration(nn.Module):
    """Calibration of a head: one for the network's labels, which uses logits, and one for the head's own labels.

    Args:
        names: Names of the columns of the support.
        kinds: Number of kinds of nonconformity without logits.
    """

    def __init__(self, names: tuple[str, ...], kinds: int) -> None:
        super().__init__()
        self.network = LabelCalibration(["softmax", *names], kinds + 1)
        self.own = LabelCalibration(list(names), kinds)

    @property
    def done(self) -> bool:
        """Whether the head was calibrated."""
        return self.own.done

    @property
    def labels(self) -> LabelCalibration:
        """The calibration of the labels that the head was calibrated for: the network's, or its own without logits."""
        return self.network if self.network.done else self.own

    @property
    def without_logits(self) -> bool:
        """Whether the head was calibrated without logits, so that the network's labels have no calibration."""
        return self.own.done and not self.network.done

    def fit(
        self,
        values: Mapping[str, EvidenceValues],
        right: Mapping[str, Bool[Tensor, "M"]],
        codes: Int[Tensor, "M"],
        labels: Mapping[str, Int[Tensor, "M"]],
        region: Int[Tensor, "M"],
        scores: Mapping[str, Float[Tensor, "M C"]],
        rank_fraction: float | None,
        seed: int,
        unknown_odds: float | None = None,
        unknowns: Mapping[str, Float[Tensor, "U _"]] | None = None,
        units: Int[Array, "M"] | None = None,
        ranked: Bool[Tensor, "M"] | None = None,
    ) -> None:
        """Fit to points with known labels.

        Args:
            values: Evidence for the head's own labels under ``"own"`` and, with logits, for the network's labels under
                ``"network"``.
            right: Whether the labels of each source are right.
            codes: The true classes.
            labels: The labels of each source, for promises by predicted class.
            region: The nearest ellipsoid of each point, for promises by region and for drift.
            scores: Scores of all classes for each source of labels; those of the network are its logits.
            rank_fraction: The share of the points that are only ranked; None for the default of :func:`_split`.
            seed: Seed of the random choice of the ranked points.
            unknown_odds: Prior odds of unknowns, or None to choose them by their price.
            unknowns: Nonconformity of examples of unknowns for each source of labels; see :func:`example_set`.
            units: The unit of each point, as an index from 0; a unit is ranked as a whole or not at all. None for
                independent points.
            ranked: Which points are ranked; None to choose them by chance.
        """
        if ranked is None:
            held, fitted = _split(len(codes), rank_fraction, seed, units)
        else:
            held, fitted = ranked.nonzero().squeeze(1), (~ranked).nonzero().squeeze(1)
        unit = None if units is None else torch.from_numpy(units)
        for name, source in (("network", self.network), ("own", self.own)):
            if name in values:
                finite = finite_logits(scores[name]).cpu()
                temperature = fit_temperature(finite[fitted], codes.cpu()[fitted])
                source.temperature.fill_(min(max(temperature, 1.0 / _MAX_TEMPERATURE), _MAX_TEMPERATURE))
                evidence = EvidenceValues(*(part.cpu() for part in values[name]))
                if name == "network":
                    evidence = self._with_logits(evidence, finite, scores[name].argmax(dim=1).cpu())
                given = labels[name].cpu(), region.long().cpu(), unit
                shown = None if unknowns is None else unknowns[name].cpu()
                source.fit(evidence, right[name].cpu(), codes.cpu(), finite, fitted, held, *given, unknown_odds, shown)

    def renumber_regions(self, old: Int[Array, "K"]) -> None:
        """Adapt to another partition; ``old`` holds the old number of each region, -1 for a new region.

        A region that stays keeps its threshold, and a new region accepts nothing. The regions of the calibration points
        are not known any more, unless all regions stay.
        """
        for source in (self.network, self.own):
            thresholds, regions = source.region_threshold, source.point_region
            if len(thresholds):
                number = torch.from_numpy(old).to(thresholds.device)
                source.region_threshold = torch.where(number >= 0, thresholds[number.clamp_min(0)], torch.inf)
            if not np.array_equal(old, np.arange(len(old))) or (len(regions) and int(regions.max()) >= len(old)):
                source.point_region = regions.new_zeros(0)

    def forward(
        self,
        measured: Measurements,
        label: Int[Tensor, "B"],
        invalid: Bool[Tensor, "B"],
        logits: Float[Tensor, "B C"] | None = None,
        *,
        own: bool = True,
        region: Int[Tensor, "B"] | None = None,
        group: Int[Tensor, "B"] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Calibrated:
        """Return the calibrated values of labels, from the measurements of their points.

        Args:
            measured: The measurements of the points.
            label: The labels; -1 for a row without a label, which is refused.
            invalid: Rows with an invalid embedding, which are refused.
            logits: The network's logits if the labels are the network's.
            own: Without logits, whether the labels are the head's own. Labels from another source have no
                calibration. The same holds for the network's labels after a calibration without logits. The confidence
                and the joint score of labels without a calibration are NaN.
            region: The nearest ellipsoids, for thresholds by region.
            group: The given groups, for thresholds by group.
            dtype: Dtype of the results, which are computed in float64.
        """
        labels = self.own if logits is None else self.network
        calibrated = labels.done and (logits is not None or own)
        source = (
            labels if calibrated else self.own
        )  # the p-values of labels without a calibration are the point's alone
        if source.plain is None:
            return self._uncalibrated(measured, label, invalid, logits, dtype)
        if calibrated:
            least = labels.least_score(label, region, group)
        else:
            logits, least = None, torch.full((), torch.inf, dtype=torch.float64, device=label.device)
        columns, accept = assess(measured, logits, label, invalid, least, source.tables(), source.plain)
        confidence, p_value, class_p_value, nonconformity, joint = _in_dtype(columns, dtype).unbind()
        if not calibrated:  # zero marks refused rows
            confidence, joint = (torch.where(column > 0, torch.nan, column) for column in (confidence, joint))
        return Calibrated(confidence, p_value, class_p_value, nonconformity, joint, accept)

    def _uncalibrated(
        self,
        measured: Measurements,
        label: Int[Tensor, "B"],
        invalid: Bool[Tensor, "B"],
        logits: Float[Tensor, "B C"] | None,
        dtype: torch.dtype,
    ) -> Calibrated:
        """Confidence from the weights before any calibration; nothing else is known."""
        index = label.clamp_min(0)
        values = EvidenceValues(label_support(measured.density, measured.near, index), measured.nonconformity)
        refused = invalid | values.support.isnan().any(dim=1) | (label < 0)
        if logits is not None:
            values = self._with_logits(values, finite_logits(logits), index)
        confidence = (self.own if logits is None else self.network).confidence(values.support).to(dtype)
        unknown = torch.full_like(confidence, torch.nan)
        return Calibrated(
            confidence=torch.where(refused, 0.0, confidence),
            p_value=unknown,
            class_p_value=unknown,
            nonconformity=unknown,
            joint=torch.where(refused, 0.0, unknown),
            accept=torch.zeros_like(refused),
        )

    def _with_logits(
        self, values: EvidenceValues, logits: Float[Tensor, "B C"], label: Int[Tensor, "B"]
    ) -> EvidenceValues:
        """Add the evidence of logits: softmax to the support, the energy to the nonconformity."""
        return with_energy(with_softmax(values, logits / self.network.temperature.double(), label), logits)
