"""Calibration of one source of labels, the network or the head itself: scores, p-values, acceptance threshold."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data.warn import warn_user
from sepc_torch.head.calibration.assess import PlainTables, class_probabilities, finite_logits, joint_score
from sepc_torch.head.calibration.calibration_tables import RESOLUTION, CalibrationTables
from sepc_torch.head.calibration.combined_score import CombinedScore
from sepc_torch.head.calibration.confidence import Confidence
from sepc_torch.head.evidence.evidence import EvidenceValues
from sepc_torch.head.promises.conformal import (
    average_threshold,
    binomial_tail,
    check_share,
    class_calibration,
    counts_above,
    flag_threshold,
    least_risk,
    passed_sequence,
    points_needed,
    search_level,
    sorted_calibration,
)
from sepc_torch.head.promises.costs import (
    CostAcceptance,
    CostRows,
    cheapest_thresholds,
    cost_bound,
    cost_range,
    row_costs,
    unit_means,
)
from sepc_torch.head.promises.units import (
    UnitRows,
    candidates,
    least_unit_risk,
    unit_flag_threshold,
    unit_risk_threshold,
    unit_shares,
    units_needed,
)
from sepc_torch.model.derived import Derived, device_only
from sepc_torch.model.precision import as_dtype
from sepc_torch.shapes import Array, Bool, Float, Int

# Relative rounding error of one divided by a flag rate.
_ROUNDING = 1e-12
# Bound of the log odds of a joint score, which can round to zero.
_MAX_LOG_ODDS = 1e3
# Largest prior odds that a point is of an unknown kind. At typicality p the odds are UNKNOWN_ODDS / p: three points in
# a hundred of the calibration distribution have odds above one.
UNKNOWN_ODDS = 0.03
# The largest odds for a head that was given examples of unknowns, since unknowns are then known to come.
EXAMPLE_ODDS = 1.0
# The least odds to choose from, and the factor to the next ones. Smaller odds change the order of almost no point of
# the calibration distribution; ten steps lead to UNKNOWN_ODDS.
_LEAST_ODDS, _ODDS_STEP = UNKNOWN_ODDS / 2.0**10, 2.0
# The largest share of accepted points that the odds may cost at any of these risks, which are shares of the error.
ODDS_PRICE, _RISKS = 0.01, (0.25, 0.5, 0.75)
# The share of delta that the exact search keeps beside a sequence of tests, and the expected errors from which on a
# sequence accepts more, since its start is then known well enough. Simulated scores cross between 20 and 40 errors.
_EXACT_PART, _MANY_ERRORS = 0.25, 30
# Buffers of thresholds by label, by nearest ellipsoid and by given group.
_TABLES = ("class_threshold", "region_threshold", "group_threshold")


class Acceptance(NamedTuple):
    """Acceptance threshold of a head, with its coverage and error on the ranked calibration points.

    If the calibration points came in units, every unit counts alike in coverage and error.

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


class LabelCalibration(Derived):
    """Calibration for one source of labels: the network, or the head itself.

    ``confidence`` is the reported model, fitted to all calibration points. ``ranking`` is the model inside the joint
    score; it and ``combined_score`` are fitted only to the points that are not ranked. ``ranked_joint`` holds the joint
    scores of the ranked points, ``ranked_right`` whether their labels are right, ``ranked_nonconformity`` and, by
    class, ``class_nonconformity`` their sorted nonconformity scores; ``ranked_truth`` holds the scores of their true
    classes (:meth:`class_scores`), for prediction sets, and ``ranked_place`` the place of each ranked point in
    ``ranked_nonconformity``. ``threshold`` is the least accepted joint score. Logits, and
    other scores of all classes, are divided by ``temperature``.

    ``ranked_rows`` holds the positions of the ranked points among the M calibration points; ``point_label``,
    ``point_class`` and ``point_region`` hold the label, the true class and the nearest ellipsoid of all M points, for
    promises by group. ``class_threshold`` (C,), ``region_threshold`` (K,) and ``group_threshold`` (G,) are further
    lower bounds of accepted scores, by label, by nearest ellipsoid and by given group. They are empty unless in use:
    their shapes, not their values, say which one applies, so that a decision needs no device synchronisation.

    ``fitted_joint`` and ``fitted_right`` hold joint scores and correctness of the points that are not ranked, in the
    order of their positions; they say where a sequence of tests starts. For points that came in units, ``point_unit``
    holds the unit of all M points; otherwise it is empty.

    Args:
        names: Names of the columns of the support.
        kinds: Number of kinds of nonconformity.
    """

    derived = ("_tables", "plain")
    # Thresholds and scores of ranked points must stay those of the calibration, bit for bit.
    conversion = staticmethod(device_only)
    ranked_joint: Tensor
    ranked_right: Tensor
    ranked_truth: Tensor
    ranked_nonconformity: Tensor
    class_nonconformity: Tensor
    class_counts: Tensor
    ranked_rows: Tensor
    ranked_place: Tensor
    point_label: Tensor
    point_class: Tensor
    point_region: Tensor
    point_unit: Tensor
    fitted_joint: Tensor
    fitted_right: Tensor
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
        self.combined_score = CombinedScore(kinds)
        self.register_buffer("unknown_odds", torch.tensor(UNKNOWN_ODDS, dtype=torch.float64))
        self.register_buffer("ranked_nonconformity", torch.zeros(0, dtype=torch.float64))
        self.register_buffer("class_nonconformity", torch.zeros(0, 0, dtype=torch.float64))
        self.register_buffer("class_counts", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("ranked_joint", torch.zeros(0, dtype=torch.float64))
        self.register_buffer("ranked_right", torch.zeros(0, dtype=torch.bool))
        self.register_buffer("ranked_truth", torch.zeros(0, dtype=torch.float64))
        self.register_buffer("fitted_joint", torch.zeros(0, dtype=torch.float64))
        self.register_buffer("fitted_right", torch.zeros(0, dtype=torch.bool))
        for name in ("ranked_rows", "ranked_place", "point_label", "point_class", "point_region", "point_unit"):
            self.register_buffer(name, torch.zeros(0, dtype=torch.int64))
        self.register_buffer("threshold", torch.tensor(torch.inf, dtype=torch.float64))
        for name in _TABLES:
            self.register_buffer(name, torch.zeros(0, dtype=torch.float64))
        for name in ("confidence_parameters", "ranking_parameters", "tails"):
            self.register_buffer(name, torch.zeros(0, dtype=torch.float64), persistent=False)
        self.restore()

    @property
    def done(self) -> bool:
        """Whether these labels were calibrated."""
        return self.plain is not None

    def fit(
        self,
        values: EvidenceValues,
        right: Bool[Tensor, "M"],
        codes: Int[Tensor, "M"],
        scores: Float[Tensor, "M C"],
        fitted: Int[Tensor, "f"],
        held: Int[Tensor, "h"],
        label: Int[Tensor, "M"],
        region: Int[Tensor, "M"],
        unit: Int[Tensor, "M"] | None = None,
        unknown_odds: float | None = None,
        unknowns: Float[Tensor, "U S"] | None = None,
    ) -> None:
        """Fit to calibration points.

        Args:
            values: The evidence for the labels.
            right: Whether the labels are right.
            codes: The true classes.
            scores: Scores of all classes, in float64 and finite.
            fitted: Indices of the points that fit the ranked scores.
            held: Indices of the points that are only ranked.
            label: The labels; -1 for a row without a label, which is ranked last, as it is when it is judged.
            region: The nearest ellipsoids.
            unit: The units, none of which has points in both parts; None for independent points.
            unknown_odds: Prior odds of an unknown kind; by default those of :func:`affordable_odds`.
            unknowns: Nonconformity of examples of unknowns; they are never ranked.
        """
        support, nonconformity = values.support, values.nonconformity
        self.confidence.fit(support.double().numpy(), right.numpy())
        self.ranking.fit(support[fitted].double().numpy(), right[fitted].numpy(), bend=False)
        self.combined_score.fit(nonconformity[fitted], ~right[fitted], unknowns)
        if unknown_odds is None:
            typicality = self.combined_score(nonconformity[fitted])[1]
            most = UNKNOWN_ODDS if unknowns is None else EXAMPLE_ODDS
            unknown_odds = affordable_odds(self.ranking(support[fitted].double()), typicality, most)
        self.unknown_odds.fill_(unknown_odds)
        combined, log_typicality, self.ranked_joint = self._scores(values, label, held)
        by_class = self.class_scores(self.ranking(support[held].double()), log_typicality, label[held], scores[held])
        self.ranked_truth = by_class.gather(1, codes[held].unsqueeze(1)).squeeze(1)
        self.ranked_nonconformity, self.ranked_place = sorted_calibration(combined), combined.argsort().argsort()
        self.class_nonconformity, self.class_counts = class_calibration(combined, codes[held], scores.shape[1])
        self.ranked_right = right[held]
        others = fitted.sort().values
        self.fitted_joint, self.fitted_right = self._scores(values, label, others)[2], right[others]
        if unit is not None:
            self.point_unit = unit.clone()
        self.ranked_rows, self.point_label, self.point_class, self.point_region = (
            part.clone()
            for part in (held, label.clamp_min(0), codes, region)  # loading a state dict resizes no shared buffer
        )
        self.restore()

    def _scores(
        self, values: EvidenceValues, label: Int[Tensor, "M"], rows: Int[Tensor, "n"]
    ) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"], Float[Tensor, "n"]]:
        """Nonconformity, log typicality and joint scores of points; those of a row without a label are the worst."""
        missing = label[rows] < 0
        nonconformity = torch.where(missing[:, None], torch.nan, values.nonconformity[rows])
        combined, log_typicality = self.combined_score(nonconformity)
        joint = torch.where(missing, 0.0, self.joint(values.support[rows], log_typicality))
        return combined, log_typicality, joint

    def class_scores(
        self,
        ranking: Float[Tensor, "B"],
        log_typicality: Float[Tensor, "B"],
        label: Int[Tensor, "B"],
        scores: Float[Tensor, "B C"],
    ) -> Float[Tensor, "B C"]:
        r"""Scores that prediction sets are made of: :math:`P(c) \frac{p}{p + \lambda}` for every class c, in float64.

        :math:`P(c)` is the ranking's probability of the label, and the share of the other classes in the rest;
        the factor is that of :func:`joint_score`, so the score of the label is its joint score. The scores of a row
        without a label, -1, are 1: its set holds every class.

        Where some of the points are unknown, no other sets of the same coverage of the known points are smaller on
        average than those of the largest scores, by the lemma of Neyman and Pearson, if the probabilities are right.

        Args:
            ranking: The ranking's probability that the label is right.
            log_typicality: Log of the typicality.
            label: The labels.
            scores: Scores of all classes, before the temperature.
        """
        known = joint_score(torch.ones_like(ranking), log_typicality, self.unknown_odds)
        tempered = finite_logits(scores) / self.temperature.double()
        found = class_probabilities(ranking, label.clamp_min(0), tempered) * known.unsqueeze(1)
        return torch.where((label < 0).unsqueeze(1), 1.0, found)

    def tables(self) -> CalibrationTables:
        """The tensors that calibrated values are computed from."""
        return self._tables

    def restore(self) -> None:
        """Compute the buffers that depend on others; they are not saved."""
        self.confidence_parameters = self.confidence.parameters_in_one()
        self.ranking_parameters = self.ranking.parameters_in_one()
        if self.ranked_joint.shape[0]:
            self.tails = self.combined_score.tails()
        self.derive()

    def derive(self) -> None:
        """Collect the tensors that :meth:`tables` returns, and lay them out for plain torch."""
        self._tables = CalibrationTables(
            temperature=self.temperature,
            confidence=self.confidence_parameters,
            ranking=self.ranking_parameters,
            weights=self.combined_score.weights,
            tails=self.tails,
            ordered=self.combined_score.ordered,
            combined=self.combined_score.combined,
            held=self.ranked_nonconformity,
            by_class=self.class_nonconformity,
            class_counts=self.class_counts,
            unknown_odds=self.unknown_odds,
        )
        self.plain = PlainTables.of(self._tables) if self.ranked_joint.shape[0] else None

    def joint(self, support: Float[Tensor, "B F"], log_typicality: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Return the joint score of labels in float64; see :func:`joint_score`."""
        return joint_score(self.ranking(support.double()), log_typicality.double(), self.unknown_odds)

    def accept(self, risk: float | None, delta: float, flag_rate: float | None, average: bool = False) -> Acceptance:
        """Set the threshold for a flag rate, or for a risk that is kept with probability 1 - delta or on average."""
        if risk is not None and self.in_units:
            ranked, fitted = self.unit_rows()
            threshold = unit_risk_threshold(ranked, fitted, self.candidates(), risk, delta)
            return self._set_threshold(threshold, threshold < math.inf)
        steps = separated(self.log_odds())
        if flag_rate is not None:
            score = (
                unit_flag_threshold(steps.scores.numpy(), self.unit_rows()[0].unit, flag_rate)
                if self.in_units
                else flag_threshold(steps.scores, flag_rate)
            )
            threshold = steps.threshold(score)
            if threshold == -math.inf:
                warn_user(
                    f"The head accepts every point: {self.flag_rate_shortfall(flag_rate)} Or choose a flag_rate of at "
                    f"least {self.least_flag_rate(flag_rate):.3g}.",
                )
            return self._set_threshold(threshold, found=True)
        assert risk is not None
        if average:
            threshold = steps.threshold(average_threshold(steps.scores, self.ranked_right.cpu(), risk))
        else:
            threshold = self.risk_threshold(*self._one_group(), risk, delta)
        return self._set_threshold(threshold, threshold < math.inf)

    def risk_threshold(
        self,
        ranked: Int[Array, "h"],
        fitted: Int[Array, "f"],
        risk: float,
        delta: float,
        delta_of_group: float | None = None,
    ) -> float:
        r"""Lowest joint score t that keeps the risk in every group, with probability :math:`1 - \delta`; inf if none.

        Two searches share :math:`\delta`, and the lower of their thresholds is taken. The exact search
        (:func:`~sepc_torch.head.promises.conformal.search_level`) tests all thresholds at once. The sequence
        (:func:`~sepc_torch.head.promises.conformal.passed_sequence`) has three quarters of :math:`\delta` and tests
        thresholds one by one, from where the fitted points show most evidence. With fewer than :data:`_MANY_ERRORS`
        expected errors in a single group it often starts too high or too low, and the exact search has all of
        :math:`\delta`. Which case applies depends on the fitted points and on the numbers of ranked points, and on
        nothing else of these.

        Args:
            ranked: The group of each ranked point, as an index from 0; -1 for points that do not count.
            fitted: The same for the points that are not ranked.
            risk: The allowed share of wrong labels among the accepted ones of each group.
            delta: The allowed probability that the promise fails.
            delta_of_group: The share of delta of one group in the exact search; by default all.
        """
        risk, delta = check_share(risk, "risk"), check_share(delta, "delta")
        share = delta if delta_of_group is None else delta_of_group
        mine, joint = ranked >= 0, self.ranked_joint.double().cpu().numpy()
        if not mine.any():
            return math.inf
        group, wrong = ranked[mine], ~self.ranked_right.cpu().numpy()[mine]
        sizes = np.bincount(group)
        tests = self._sequence(sizes, fitted, risk)
        steps = separated(self.log_odds().cpu()[torch.from_numpy(mine)])
        values = np.unique(steps.scores.numpy())[::-1]
        part = 1.0 if tests is None else _EXACT_PART
        levels = [search_level(size, risk, part * share) if size else 0.0 for size in sizes.tolist()]
        tails = _tails(steps.scores.numpy(), wrong, group, values, risk)
        qualified = np.flatnonzero((tails <= np.array(levels)[:, None]).all(axis=0))
        found = steps.threshold(float(values[qualified[-1]])) if len(qualified) else math.inf
        if tests is not None:
            thresholds, expected = tests
            worst = _tails(joint[mine], wrong, group, thresholds, risk).max(axis=0)
            last = passed_sequence(worst, expected, (1.0 - part) * delta)
            found = found if last is None else min(found, float(thresholds[last]))
        return found

    def _sequence(
        self, sizes: Int[Array, "G"], fitted: Int[Array, "f"], risk: float
    ) -> tuple[Float[Array, "T"], Float[Array, "T"]] | None:
        """Thresholds in descending order with expected tails; None if too few errors are expected for a sequence."""
        mine, count = fitted >= 0, len(sizes)
        seen = np.bincount(fitted[mine], minlength=count)
        if not seen.all() or len(seen) > count:
            return None
        thresholds = self.candidates()
        joint, wrong = self.fitted_joint.double().cpu().numpy()[mine], ~self.fitted_right.cpu().numpy()[mine]
        scale = (sizes / seen)[:, None]
        given = joint, wrong, fitted[mine], thresholds, risk
        accepted = scale * _counts(joint, fitted[mine], thresholds, count)
        good = (_tails(*given) <= 0.5).all(axis=0)
        most = accepted[:, good].min(axis=0).max(initial=0.0)
        if count == 1 and risk * most < _MANY_ERRORS:
            return None
        # Half an error more than was seen: none among a few points is little evidence.
        return thresholds, _tails(*given, scale, 0.5).max(axis=0)

    def _one_group(self) -> tuple[Int[Array, "h"], Int[Array, "f"]]:
        return np.zeros(len(self.ranked_joint), dtype=np.int64), np.zeros(len(self.fitted_joint), dtype=np.int64)

    def accept_cheapest(self, costs: Float[Array, "C C"], review: float, delta: float) -> CostAcceptance:
        """Set the thresholds of least expected cost; see :mod:`sepc_torch.head.promises.costs`."""
        held, label = self.ranked_rows.cpu().numpy(), self.point_label.cpu().numpy()
        cost = costs[self.point_class.cpu().numpy(), label]
        unit = self.point_unit.cpu().numpy() if self.in_units else np.arange(len(label))
        ranked, fitted = (part.double().cpu().numpy() for part in (self.ranked_joint, self.fitted_joint))
        # A score of zero marks a row without a label, which is never accepted.
        ranked = np.where(ranked > 0, ranked, np.nan)
        steps = separated(log_odds(self.fitted_joint))
        scores = np.where(fitted > 0, steps.scores.numpy(), np.nan)
        choosing = CostRows(scores, *(np.delete(part, held) for part in (cost, label, unit)))
        judged = CostRows(ranked, *(part[held] for part in (cost, label, unit)))
        found = cheapest_thresholds(choosing, review, len(costs))
        thresholds = np.array([steps.threshold(score) for score in found.tolist()])
        one = bool((thresholds == thresholds[0]).all())
        self.set_table(*(None, None) if one else ("class_threshold", thresholds))
        self.threshold = self.threshold.new_tensor(thresholds[0] if one else torch.inf)
        accepted = ranked >= thresholds[judged.group]
        shares = [accepted, accepted & ~self.ranked_right.cpu().numpy(), row_costs(judged, thresholds, review)]
        shares.append(np.where(np.isnan(ranked), review, judged.cost))
        means = [unit_means(values.astype(float), judged.unit) for values in shares]
        coverage, wrong, mean, of_all = (float(values.mean()) for values in means)
        bound = cost_bound(means[2], *cost_range(costs, thresholds, review), delta)
        kept = tuple(thresholds[:1].tolist() if one else thresholds.tolist())
        return CostAcceptance(
            kept, coverage, wrong / coverage if coverage else math.nan, len(held), mean, bound, of_all
        )

    def log_odds(self) -> Float[Tensor, "h"]:
        """Log odds of the joint scores of the ranked points, within finite bounds."""
        return log_odds(self.ranked_joint)

    @property
    def in_units(self) -> bool:
        """Whether the calibration points came in units, so that promises are over units."""
        return len(self.point_unit) > 0

    def unit_rows(self) -> tuple[UnitRows, UnitRows]:
        """The joint scores of the ranked and of the other points, with their correctness and their units."""
        unit, held = self.point_unit.cpu().numpy(), self.ranked_rows.cpu().numpy()
        scores = [part.double().cpu().numpy() for part in (self.ranked_joint, self.fitted_joint)]
        right = [part.cpu().numpy() for part in (self.ranked_right, self.fitted_right)]
        return UnitRows(scores[0], right[0], unit[held]), UnitRows(scores[1], right[1], np.delete(unit, held))

    def candidates(self) -> Float[Array, "T"]:
        """Thresholds that points which are not ranked propose, in descending order; none lies between equal scores."""
        steps = separated(log_odds(self.fitted_joint))
        found = [steps.threshold(score) for score in candidates(steps.scores.numpy()).tolist()]
        return np.unique(found)[::-1]

    def shortfall(
        self,
        risk: float,
        delta: float,
        rows: float = 1.0,
        what: str = "calibration points",
        ranked: Bool[Array, "h"] | None = None,
    ) -> str:
        """Say which risk the calibration can promise, and how many more rows the wanted risk needs.

        Args:
            risk: The wanted risk.
            delta: The allowed probability that the guarantee fails.
            rows: Number of rows, or units, that a user must add for each further calibration point or unit.
            what: Name of these rows.
            ranked: The ranked points that count, those of a group; by default all.
        """
        if self.in_units:
            return self._unit_shortfall(risk, delta, rows)
        mine = torch.ones(len(self.ranked_joint), dtype=torch.bool) if ranked is None else torch.from_numpy(ranked)
        if not bool(mine.any()):
            return f"no {what} to rank."
        scores = separated(self.log_odds().cpu()[mine]).scores
        _, accepted, errors = counts_above(scores, self.ranked_right.cpu()[mine])
        if ranked is None and self._sequence(np.array([len(scores)]), self._one_group()[1], risk) is not None:
            delta *= _EXACT_PART
        least = least_risk(errors, accepted, delta)
        needed = points_needed(errors, accepted, risk, delta)
        more = None if needed is None else self._missing(needed, rows, len(scores))
        used = self._used() if ranked is None else f"{len(scores)} calibration points that set thresholds"
        return risk_limits(used, risk, least, more, what)

    def _unit_shortfall(self, risk: float, delta: float, rows: float) -> str:
        """The text of :meth:`shortfall` for points in units; it counts units."""
        (ranked, fitted), thresholds = self.unit_rows(), self.candidates()
        needed = units_needed(ranked, thresholds, risk, delta)
        more = None if needed is None else self._missing(needed, rows, self.ranked_count)
        least = least_unit_risk(ranked, fitted, thresholds, delta)
        return risk_limits(self._used(), risk, least, more, "units")

    def flag_rate_shortfall(self, flag_rate: float, rows: float = 1.0, what: str = "calibration points") -> str:
        """Say how many more rows a flag rate needs; ``rows`` and ``what`` are those of :meth:`shortfall`."""
        needed = math.ceil((1.0 / flag_rate) * (1.0 - _ROUNDING)) - 1
        more = self._missing(needed, rows, self.ranked_count)
        what = "units" if self.in_units else what
        return f"{self._used()} are too few for flag_rate={flag_rate:g}; about {more} more {what} are needed."

    @property
    def ranked_count(self) -> int:
        """The number of independent draws that set thresholds: ranked units, or ranked points without units."""
        return len(self.point_unit[self.ranked_rows].unique()) if self.in_units else len(self.ranked_joint)

    @property
    def ranked_name(self) -> str:
        """What :attr:`ranked_count` counts."""
        return "units" if self.in_units else "points"

    def _count(self) -> int:
        """The number of all calibration units, or points without units."""
        return len(self.point_unit.unique()) if self.in_units else len(self.point_label)

    def _used(self) -> str:
        name = f"units with {len(self.point_label)} calibration points" if self.in_units else "calibration points"
        return f"{self._count()} {name} ({self.ranked_count} of them set thresholds)"

    def _missing(self, needed: int, rows: float, ranked: int) -> int:
        """Rows to add until ``needed`` points instead of ``ranked`` ones set thresholds, rounded up to two digits."""
        per_ranked = self._count() / self.ranked_count
        return two_digits(math.ceil(max(needed - ranked, 1) * per_ranked * rows))

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
            tensor = torch.tensor(values, dtype=torch.float64, device=self.ranked_joint.device)
            setattr(self, table, tensor)

    def least_flag_rate(self, wanted: float) -> float:
        """The larger of the wanted rate and the least rate that this number of points or units can guarantee."""
        return max(wanted, 1.0 / (self.ranked_count + 1))

    def _set_threshold(self, threshold: float, found: bool) -> Acceptance:
        self.threshold = torch.tensor(threshold, dtype=torch.float64, device=self.ranked_joint.device)
        self.set_table(None, None)
        accepted = self.ranked_joint >= threshold
        if self.in_units:
            shares = unit_shares(self.unit_rows()[0], np.array([threshold]))
            coverage, wrong_share = float(shares.accepted.mean()), float(shares.wrong.mean())
            error = wrong_share / coverage if coverage else math.nan
            return Acceptance(threshold, coverage, error, len(accepted), found)
        # Of counts, since the last digit of a mean depends on the device.
        number, wrong = int(accepted.sum()), int((accepted & ~self.ranked_right).sum())
        error = wrong / number if number else math.nan
        return Acceptance(threshold, number / len(accepted), error, len(accepted), found)


def affordable_odds(
    confidence: Float[Tensor, "M"], log_typicality: Float[Tensor, "M"], most: float = UNKNOWN_ODDS
) -> float:
    r"""The largest prior odds of unknowns, up to ``most``, that cost few accepted points.

    The price of odds is the share of points that confidence accepts at a risk and the joint score with these odds does
    not, at the worst of three risks: a quarter, half and three quarters of the error. It is at most :data:`ODDS_PRICE`
    for the result and all smaller odds tried. The least odds are taken at any price, so that points unlike all others
    are never accepted: among few points, a single one would be a price of more than one in a hundred. A point counts as
    wrong with probability 1 - c for its confidence c: observed mistakes are too few to tell a price of one point in a
    hundred from none.

    >>> confidence = torch.linspace(0.5, 1.0, 1000).double()
    >>> affordable_odds(confidence, torch.linspace(1e-3, 1.0, 1000).double().log())  # both have the same order
    0.03
    >>> affordable_odds(confidence, torch.linspace(1.0, 1e-3, 1000).double().log()) < 0.003
    True
    """
    wrong = 1.0 - confidence

    def accepted(score: Float[Tensor, "M"]) -> Float[Tensor, "r"]:
        """Share of points that the best threshold of the score accepts at each risk."""
        rank = torch.arange(1, len(score) + 1)
        error = wrong[score.argsort(descending=True, stable=True)].cumsum(0) / rank
        return torch.stack([torch.where(error <= r * wrong.mean(), rank, 0).max() for r in _RISKS]) / len(score)

    of_confidence, chosen = accepted(confidence), _LEAST_ODDS
    while (odds := chosen * _ODDS_STEP) <= most:
        joint = joint_score(confidence, log_typicality, torch.tensor(odds).double())
        if float((of_confidence - accepted(joint)).max()) > ODDS_PRICE:
            break
        chosen = odds
    return chosen


def _counts(
    score: Float[Array, "n"], group: Int[Array, "n"], thresholds: Float[Array, "T"], count: int
) -> Int[Array, "G T"]:
    """Number of scores of each group at or above each threshold."""
    found = np.empty((count, len(thresholds)), dtype=np.int64)
    for g in range(count):
        mine = np.sort(score[group == g])
        found[g] = len(mine) - np.searchsorted(mine, thresholds)
    return found


def _tails(
    score: Float[Array, "n"],
    wrong: Bool[Array, "n"],
    group: Int[Array, "n"],
    thresholds: Float[Array, "T"],
    risk: float,
    scale: Float[Array, "G 1"] | float = 1.0,
    more: float = 0.0,
) -> Float[Array, "G T"]:
    """Binomial tails of the errors in each group at each threshold; counts are scaled, after ``more`` errors."""
    count = int(group.max()) + 1
    accepted = _counts(score, group, thresholds, count)
    errors = np.minimum(_counts(score[wrong], group[wrong], thresholds, count) + more, accepted)
    return binomial_tail(scale * errors, scale * accepted, risk)


def log_odds(joint: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Log odds of scores within finite bounds, in float64."""
    return joint.double().logit().clamp(-_MAX_LOG_ODDS, _MAX_LOG_ODDS)


def risk_limits(used: str, risk: float, least: float, more: int | None, what: str) -> str:
    """The sentence about a risk that cannot be promised: the least risk, and how many more rows would help."""
    can = f"they can promise a risk of {least:.2g}" if least < 1.0 else "they can promise no risk below 1"
    want = (
        "more of them would not help: labels are wrong too often at every score, so use a more accurate classifier"
        if more is None
        else f"about {more} more {what} are needed if labels are wrong as often as now"
    )
    return f"{used} cannot promise a risk of {risk:g}: {can}; {want}."


def two_digits(number: int) -> int:
    """A whole number rounded up to two digits, for estimates.

    >>> two_digits(1234)
    1300
    """
    unit = 10 ** max(len(str(number)) - 2, 0)
    return -(-number // unit) * unit


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
