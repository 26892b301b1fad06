"""Calibration of one source of labels, the network or the head itself: scores, p-values, acceptance threshold."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sepc_torch.head.assess import PlainTables, joint_score
from sepc_torch.head.binomial_search import least_risk, points_needed
from sepc_torch.head.calibration_tables import RESOLUTION, CalibrationTables
from sepc_torch.head.confidence import Confidence
from sepc_torch.head.conformal import (
    class_calibration,
    counts_above,
    flag_threshold,
    risk_threshold,
    sorted_calibration,
)
from sepc_torch.head.evidence import EvidenceValues
from sepc_torch.head.strangeness import Strangeness
from sepc_torch.model.precision import as_dtype
from sepc_torch.shapes import Array, Bool, Float, Int

# Relative rounding error of one divided by a flag rate.
_ROUNDING = 1e-12
# Bound of the log odds of a joint score, which can round to zero.
_MAX_LOG_ODDS = 1e3
# Prior odds that a point is of an unknown kind. At typicality p the odds are UNKNOWN_ODDS / p: three points in a
# hundred of the calibration distribution have odds above one.
UNKNOWN_ODDS = 0.03
# Buffers of thresholds by label, by nearest ellipsoid and by given group.
_TABLES = ("class_threshold", "region_threshold", "group_threshold")


class Acceptance(NamedTuple):
    """Acceptance threshold of a head, with its coverage and error on the ranked calibration points.

    Attributes:
        threshold: The head accepts joint scores of at least this value. It is inf if the head accepts nothing, and
            -inf if it accepts everything.
        coverage: The share of the ranked points that are accepted.
        error: The share of the accepted points whose label is wrong; NaN if no point is accepted.
        points: The number of ranked points.
        found: Whether a threshold satisfies the request; if not, the head accepts nothing.
    """

    threshold: float
    coverage: float
    error: float
    points: int
    found: bool


class LabelCalibration(nn.Module):
    """Calibration for one source of labels: the network, or the head itself.

    ``confidence`` is the reported model, fitted to all calibration points. ``ranking`` is the model inside the joint
    score; it and ``strangeness`` are fitted only to the points that are not ranked. ``held_joint`` holds the joint
    scores of the ranked points, ``held_right`` whether their labels are right, ``held_nonconformity`` and, by class,
    ``class_nonconformity`` their sorted nonconformity scores. ``threshold`` is the least accepted joint score. Logits
    are divided by ``temperature``.

    ``held_rows`` holds the positions of the ranked points among the M calibration points; ``point_label``,
    ``point_class`` and ``point_region`` hold the label, the true class and the nearest ellipsoid of all M points, for
    promises by group. ``class_threshold`` (C,), ``region_threshold`` (K,) and ``group_threshold`` (G,) are further
    lower bounds of accepted scores, by label, by nearest ellipsoid and by given group. They are empty unless in use:
    their shapes, not their values, say which one applies, so that a decision needs no device synchronisation.

    Args:
        names: Names of the columns of the support.
        kinds: Number of kinds of nonconformity.
    """

    held_joint: Tensor
    held_right: Tensor
    held_nonconformity: Tensor
    class_nonconformity: Tensor
    class_counts: Tensor
    held_rows: Tensor
    point_label: Tensor
    point_class: Tensor
    point_region: Tensor
    threshold: Tensor
    class_threshold: Tensor
    region_threshold: Tensor
    group_threshold: Tensor
    temperature: Tensor
    unknown_odds: Tensor
    confidence_parameters: Tensor
    ranking_parameters: Tensor
    tails: Tensor

    def __init__(self, names: list[str], kinds: int) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones((), dtype=torch.float64))
        self.confidence = Confidence(names)
        self.ranking = Confidence(names)
        self.strangeness = Strangeness(kinds)
        self.register_buffer("unknown_odds", torch.tensor(UNKNOWN_ODDS, dtype=torch.float64))
        self.register_buffer("held_nonconformity", torch.zeros(0, dtype=torch.float64))
        self.register_buffer("class_nonconformity", torch.zeros(0, 0, dtype=torch.float64))
        self.register_buffer("class_counts", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("held_joint", torch.zeros(0, dtype=torch.float64))
        self.register_buffer("held_right", torch.zeros(0, dtype=torch.bool))
        for name in ("held_rows", "point_label", "point_class", "point_region"):
            self.register_buffer(name, torch.zeros(0, dtype=torch.int64))
        self.register_buffer("threshold", torch.tensor(torch.inf, dtype=torch.float64))
        for name in _TABLES:
            self.register_buffer(name, torch.zeros(0, dtype=torch.float64))
        for name in ("confidence_parameters", "ranking_parameters", "tails"):
            self.register_buffer(name, torch.zeros(0, dtype=torch.float64), persistent=False)
        self.derive()
        self.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]

    @property
    def done(self) -> bool:
        """Whether these labels were calibrated."""
        return self.plain is not None

    def fit(
        self,
        values: EvidenceValues,
        right: Bool[Tensor, "M"],
        codes: Int[Tensor, "M"],
        classes: int,
        fitted: Int[Tensor, "f"],
        held: Int[Tensor, "h"],
        label: Int[Tensor, "M"],
        region: Int[Tensor, "M"],
    ) -> None:
        """Fit to calibration points.

        Args:
            values: The evidence for the labels.
            right: Whether the labels are right.
            codes: The true classes.
            classes: Number of classes.
            fitted: Indices of the points that fit the ranked scores.
            held: Indices of the points that are only ranked.
            label: The labels.
            region: The nearest ellipsoids.
        """
        support, nonconformity = values.support, values.nonconformity
        self.confidence.fit(support.double().numpy(), right.numpy())
        self.ranking.fit(support[fitted].double().numpy(), right[fitted].numpy(), bend=False)
        self.strangeness.fit(nonconformity[fitted], ~right[fitted])
        combined, log_typicality = self.strangeness(nonconformity[held])
        self.held_nonconformity = sorted_calibration(combined)
        self.class_nonconformity, self.class_counts = class_calibration(combined, codes[held], classes)
        self.held_joint = self.joint(support[held], log_typicality)
        self.held_right = right[held]
        self.held_rows, self.point_label, self.point_class, self.point_region = (
            part.clone()
            for part in (held, label, codes, region)  # loading a state dict resizes no shared buffer
        )
        self.derive()

    def tables(self) -> CalibrationTables:
        """The tensors that calibrated values are computed from."""
        return self._tables

    def derive(self) -> None:
        """Compute the buffers that depend on others; called after a fit and after loading. They are not saved."""
        self.confidence_parameters = self.confidence.parameters_in_one()
        self.ranking_parameters = self.ranking.parameters_in_one()
        if self.held_joint.shape[0]:
            self.tails = self.strangeness.tails()
        self._lay_out()

    def _lay_out(self) -> None:
        """Collect the tensors that :meth:`tables` returns, and lay them out for plain torch."""
        self._tables = CalibrationTables(
            temperature=self.temperature,
            confidence=self.confidence_parameters,
            ranking=self.ranking_parameters,
            weights=self.strangeness.weights,
            tails=self.tails,
            ordered=self.strangeness.ordered,
            combined=self.strangeness.combined,
            held=self.held_nonconformity,
            by_class=self.class_nonconformity,
            class_counts=self.class_counts,
            unknown_odds=self.unknown_odds,
        )
        self.plain = PlainTables.of(self._tables) if self.held_joint.shape[0] else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LabelCalibration:
        moved = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not self.threshold.is_meta:
            self._lay_out()
        return moved

    def joint(self, support: Float[Tensor, "B F"], log_typicality: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Return the joint score of labels in float64; see :func:`joint_score`."""
        return joint_score(self.ranking(support.double()), log_typicality.double(), self.unknown_odds)

    def accept(self, risk: float | None, delta: float, flag_rate: float | None) -> Acceptance:
        """Set the threshold for a flag rate, or for a risk that is kept with probability 1 - delta."""
        steps = separated(self.log_odds())
        if flag_rate is not None:
            threshold = steps.threshold(flag_threshold(steps.scores, flag_rate))
            if threshold == -math.inf:
                warnings.warn(
                    f"The head accepts every point: {self.flag_rate_shortfall(flag_rate)} Or choose a flag_rate of at "
                    f"least {self.least_flag_rate(flag_rate):.3g}.",
                    stacklevel=4,
                )
            return self._set_threshold(threshold, found=True)
        assert risk is not None
        found = risk_threshold(steps.scores, self.held_right.cpu(), risk, delta)
        return self._set_threshold(steps.threshold(found.threshold), found.found)

    def log_odds(self) -> Float[Tensor, "h"]:
        """Log odds of the joint scores of the ranked points, within finite bounds."""
        return self.held_joint.double().logit().clamp(-_MAX_LOG_ODDS, _MAX_LOG_ODDS)

    def shortfall(self, risk: float, delta: float, rows: float = 1.0, what: str = "calibration points") -> str:
        """Say which risk the calibration can promise, and how many more rows the wanted risk needs.

        Args:
            risk: The wanted risk.
            delta: The allowed probability that the guarantee fails.
            rows: Number of rows that a user must add for each further calibration point.
            what: Name of these rows.
        """
        _, accepted, errors = counts_above(separated(self.log_odds()).scores, self.held_right)
        least = least_risk(errors, accepted, delta)
        needed = points_needed(errors, accepted, risk, delta)
        can = f"they can promise a risk of {least:.2g}" if least < 1.0 else "they can promise no risk below 1"
        want = (
            "more of them would not help: labels are wrong too often at every score, so use a more accurate classifier"
            if needed is None
            else f"about {self._missing(needed, rows)} more {what} are needed if labels are wrong as often as now"
        )
        return f"{self._used()} cannot promise a risk of {risk:g}: {can}; {want}."

    def flag_rate_shortfall(self, flag_rate: float, rows: float = 1.0, what: str = "calibration points") -> str:
        """Say how many more rows a flag rate needs; ``rows`` and ``what`` are those of :meth:`shortfall`."""
        needed = math.ceil((1.0 / flag_rate) * (1.0 - _ROUNDING)) - 1
        more = self._missing(needed, rows)
        return f"{self._used()} are too few for flag_rate={flag_rate:g}; about {more} more {what} are needed."

    def _used(self) -> str:
        ranked, points = len(self.held_joint), len(self.point_label)  # no points: a calibration of version 0.1
        return f"{points} calibration points ({ranked} of them set thresholds)" if points else f"{ranked} points"

    def _missing(self, needed: int, rows: float) -> int:
        """Rows to add before ``needed`` points set thresholds, rounded up to two digits: the number is an estimate."""
        # Without the number of points, of a calibration of version 0.1: half of them are ranked by default.
        per_ranked = len(self.point_label) / len(self.held_joint) if len(self.point_label) else 2.0
        more = math.ceil(max(needed - len(self.held_joint), 1) * per_ranked * rows)
        unit = 10 ** max(len(str(more)) - 2, 0)
        return -(-more // unit) * unit

    def least_score(
        self, label: Int[Tensor, "B"], region: Int[Tensor, "B"] | None, group: Int[Tensor, "B"] | None
    ) -> Float[Tensor, "B"] | Float[Tensor, ""]:
        """Return the least accepted joint score of points, by label, nearest ellipsoid or given group if these apply.

        A group without a threshold, such as -1, accepts nothing. For a row without a label, -1, any score is returned.
        """
        if (group is None) == (self.group_threshold.shape[0] > 0):
            raise ValueError(
                "This head accepts by given groups (accept_at(by=array)): pass groups=, the group of each point."
                if group is None
                else "This head does not accept by given groups; call accept_at(by=array) first, or leave out groups=."
            )
        least = as_dtype(self.threshold, torch.float64)
        if self.class_threshold.shape[0]:
            least = self.class_threshold.double()[label.clamp_min(0)]
        if self.region_threshold.shape[0]:
            assert region is not None
            least = self.region_threshold.double()[region.clamp_min(0)]
        if group is not None:
            known = (group >= 0) & (group < len(self.group_threshold))
            least = torch.where(known, self.group_threshold.double()[torch.where(known, group, 0)], torch.inf)
        return least

    def set_table(self, name: str | None, thresholds: Float[Array, "G"] | None) -> None:
        """Fill one table of thresholds, such as ``"class_threshold"``, and empty the others."""
        for table in _TABLES:
            values = thresholds if table == name and thresholds is not None else ()
            tensor = torch.tensor(values, dtype=torch.float64, device=self.held_joint.device)
            setattr(self, table, tensor)

    def least_flag_rate(self, wanted: float) -> float:
        """The larger of the wanted rate and the least rate that this number of points can guarantee."""
        return max(wanted, 1.0 / (len(self.held_joint) + 1))

    def _set_threshold(self, threshold: float, found: bool) -> Acceptance:
        self.threshold = torch.tensor(threshold, dtype=torch.float64, device=self.held_joint.device)
        self.set_table(None, None)
        accepted = self.held_joint >= threshold
        # Of counts, since the last digit of a mean depends on the device.
        number, wrong = int(accepted.sum()), int((accepted & ~self.held_right).sum())
        error = wrong / number if number else math.nan
        return Acceptance(threshold, number / len(accepted), error, len(accepted), found)


def _after_loading(module: LabelCalibration, _keys: Any) -> None:
    module.derive()


class Steps(NamedTuple):
    """Scores in groups that are clearly apart.

    ``scores`` holds, for every point, the least score of its group. ``below`` maps such a score to a threshold under
    it: halfway to the next lower group.
    """

    scores: Float[Tensor, "M"]
    below: dict[float, float]

    def threshold(self, score: float) -> float:
        """Threshold that accepts the group of a score and all higher ones, as a probability; inf stays inf."""
        return score if math.isinf(score) else float(torch.tensor(self.below[score], dtype=torch.float64).sigmoid())


def separated(scores: Float[Tensor, "M"]) -> Steps:
    """Group scores that are closer than :data:`RESOLUTION`, so that a threshold never lies between equal ones.

    Points with the same embedding have equal scores up to rounding errors. A threshold between them would treat equal
    points differently in calibration and in use. Groups are at most four resolutions wide: dense scores do not form one
    large group.

    >>> separated(torch.tensor([0.0, 1.0, 1.0 + 1e-6, 2.0], dtype=torch.float64)).scores
    tensor([0., 1., 1., 2.], dtype=torch.float64)
    """
    values, order = scores.cpu().sort()
    unit = RESOLUTION * (1.0 + values.abs())
    far = torch.ones_like(values, dtype=torch.bool)
    far[1:] = ~(values.diff() <= unit[1:])
    chain = far.cumsum(0) - 1
    within = ((values - values[far][chain]) / (4 * unit)).nan_to_num(0.0).floor()
    far[1:] |= within.diff() != 0
    group = far.cumsum(0) - 1
    starts = values[far]
    ends = values[torch.cat([far[1:], far.new_ones(1)])]
    lower = torch.cat([starts[:1] - unit[:1], (starts[1:] + ends[:-1]) / 2])
    found = torch.empty_like(values)
    found[order] = starts[group]
    return Steps(found, dict(zip(starts.tolist(), lower.tolist(), strict=True)))
