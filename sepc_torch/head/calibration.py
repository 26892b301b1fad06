r"""Calibration of a trust head: confidence, typicality, p-values, the joint score and the acceptance threshold.

- The confidence is the logistic model of :mod:`sepc_torch.head.confidence`.
- The typicality of a point is the share of calibration points with a nonconformity score at least as large. From
  the start of the largest tenth of the scores on, the share falls exponentially, so that distant points have no ties.
- The joint score combines both.

The guarantees of p-values and thresholds (:mod:`sepc_torch.head.conformal`) are exact only if the ranked score was not
fitted to the points it is ranked on. Calibration therefore splits its points: one part fits the typicality and the
joint score, the other part is only ranked. The confidence carries no guarantee and is fitted to all points.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch.head.confidence import Confidence
from sepc_torch.head.conformal import (
    ClassCalibration,
    class_calibration,
    class_p_value,
    flag_threshold,
    p_value_from_sorted,
    risk_threshold,
    sorted_calibration,
)
from sepc_torch.head.evidence import EvidenceValues, with_softmax
from sepc_torch.head.temperature import fit_temperature
from sepc_torch.shapes import Bool, Float, Int

# Bound of the temperature and of its inverse: labels without a mistake would drive the temperature to zero.
_MAX_TEMPERATURE = 20.0
# Bound of the logits: a masked class has the logit -inf.
_MAX_LOGIT = 1e4
# Fraction of calibration points that form the tail (their mean excess sets its slope), and their least number.
_TAIL_FRACTION = 0.1
_MIN_TAIL_POINTS = 5
# Prior odds that a point is of an unknown kind. At typicality p the odds are UNKNOWN_ODDS / p, so they are
# even at p = 0.1.
UNKNOWN_ODDS = 0.1


class Typicality(nn.Module):
    r"""Typicality of points, from several nonconformity scores.

    Each score j becomes the share :math:`p_j` of calibration points with a score at least as large. Fisher's
    combination :math:`-\sum_j \log p_j` is one nonconformity score, and becomes a share in the same way.
    """

    ordered: Tensor
    combined: Tensor

    def __init__(self, ordered: Float[Tensor, "S M"], combined: Float[Tensor, "M"]) -> None:
        super().__init__()
        self.register_buffer("ordered", ordered)
        self.register_buffer("combined", combined)

    def fit(self, nonconformity: Float[Tensor, "M S"]) -> None:
        """Keep the sorted scores of calibration points."""
        self.ordered = nonconformity.double().T.sort(dim=1).values.contiguous()
        self.combined = self._combine(nonconformity).sort().values

    def forward(self, nonconformity: Float[Tensor, "B S"]) -> tuple[Float[Tensor, "B"], Float[Tensor, "B"]]:
        """Return the combined nonconformity score and the log typicality of every row."""
        combined = self._combine(nonconformity)
        dtype = nonconformity.dtype
        return combined.to(dtype), log_survival(self.combined.double(), combined).to(dtype)

    def _combine(self, nonconformity: Float[Tensor, "B S"]) -> Float[Tensor, "B"]:
        columns = zip(self.ordered.double(), nonconformity.double().T, strict=True)
        return -torch.stack([log_survival(ordered, values) for ordered, values in columns]).sum(dim=0)


def log_survival(ordered: Float[Tensor, "M"], values: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    r"""Log of the share of calibration scores that are at least as large as each value, smooth and finite.

    Between two calibration scores the share is interpolated linearly. Beyond the start u of the largest tenth it falls
    like :math:`e^{-(s - u) / m}`, where m is the mean excess of that tenth. NaN counts as infinity.

    >>> log_survival(torch.arange(1.0, 100.0), torch.tensor([50.0, 110.0])).exp()
    tensor([0.5100, 0.0026])
    """
    count = len(ordered)
    tail = min(max(_MIN_TAIL_POINTS, round(_TAIL_FRACTION * count)), count - 1)
    start = ordered[count - 1 - tail]
    excess = (ordered[count - tail :] - start).mean()
    # Equal calibration scores would make the slope infinite.
    excess = excess.clamp_min(torch.finfo(ordered.dtype).eps * (1.0 + start.abs()))
    values = torch.where(values.isnan(), torch.inf, values)
    above = torch.searchsorted(ordered, values.contiguous())
    upper = ordered[above.clamp_max(count - 1)]
    lower = ordered[(above - 1).clamp_min(0)]
    fraction = torch.where(upper > lower, (values - lower) / (upper - lower), torch.ones_like(values)).clamp(0.0, 1.0)
    rank = torch.where(above > 0, above - 1 + fraction, torch.zeros_like(values))
    inside = torch.log((count + 1 - rank) / (count + 1))
    outside = math.log((tail + 2) / (count + 1)) - (values - start) / excess
    return torch.where(values > start, outside, inside).clamp_min(-torch.finfo(torch.float32).max)


class Calibrated(NamedTuple):
    """Calibrated values of a batch; the last six fields of :class:`~sepc_torch.HeadPrediction`."""

    confidence: Float[Tensor, "B"]
    p_value: Float[Tensor, "B"]
    class_p_value: Float[Tensor, "B"]
    nonconformity: Float[Tensor, "B"]
    joint: Float[Tensor, "B"]
    accept: Bool[Tensor, "B"]


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
    score, fitted only to the points that are not ranked. ``held_joint`` holds the joint scores of the ranked points,
    ``held_right`` whether their labels are right. ``threshold`` is the least accepted joint score. Logits are divided
    by ``temperature``.
    """

    held_joint: Tensor
    held_right: Tensor
    threshold: Tensor
    temperature: Tensor

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones((), dtype=torch.float64))
        self.confidence = Confidence(names)
        self.ranking = Confidence(names)
        self.register_buffer("held_joint", torch.zeros(0))
        self.register_buffer("held_right", torch.zeros(0, dtype=torch.bool))
        self.register_buffer("threshold", torch.tensor(torch.inf))

    @property
    def done(self) -> bool:
        """Whether these labels were calibrated."""
        return self.held_joint.shape[0] > 0

    def accept(self, risk: float | None, delta: float, flag_rate: float | None) -> Acceptance:
        """Set the threshold for a flag rate, or for a risk that is kept with probability 1 - delta."""
        if flag_rate is not None:
            threshold = flag_threshold(self.held_joint, flag_rate)
            if threshold == -math.inf:
                warnings.warn(
                    f"{len(self.held_joint)} ranked points are too few for flag_rate={flag_rate:g}; the head accepts "
                    f"every point. Calibrate with more points, or choose a flag_rate of at least "
                    f"{self.least_flag_rate(flag_rate):.3g}.",
                    stacklevel=4,
                )
            return self._set_threshold(threshold, found=True)
        assert risk is not None
        found = risk_threshold(self.held_joint, self.held_right, risk, delta)
        return self._set_threshold(found.threshold, found.found)

    def least_flag_rate(self, wanted: float) -> float:
        """The larger of the wanted rate and the least rate that this number of points can guarantee."""
        return max(wanted, 1.0 / (len(self.held_joint) + 1))

    def _set_threshold(self, threshold: float, found: bool) -> Acceptance:
        self.threshold = self.held_joint.new_tensor(threshold)  # in the dtype of the scores: no rounding
        accepted = self.held_joint >= threshold
        error = float((~self.held_right[accepted]).double().mean())  # the mean of no values is NaN
        return Acceptance(threshold, float(accepted.double().mean()), error, len(accepted), found)


class Calibration(nn.Module):
    """Calibration of a head: models fitted to one part of the points, sorted scores of the ranked part.

    Args:
        names: Names of the columns of the support.
        scores: Number of nonconformity scores.
    """

    held_nonconformity: Tensor
    class_nonconformity: Tensor
    class_counts: Tensor

    def __init__(self, names: tuple[str, ...], scores: int) -> None:
        super().__init__()
        self.network = LabelCalibration(["softmax", *names])
        self.own = LabelCalibration(list(names))
        self.typicality = Typicality(torch.zeros(scores, 0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))
        self.register_buffer("held_nonconformity", torch.zeros(0))
        self.register_buffer("class_nonconformity", torch.zeros(0, 0))
        self.register_buffer("class_counts", torch.zeros(0, dtype=torch.int64))

    @property
    def done(self) -> bool:
        """Whether the head was calibrated."""
        return self.own.done

    @property
    def without_logits(self) -> bool:
        """Whether the head was calibrated without logits, so that the network's labels have no calibration."""
        return self.own.done and not self.network.done

    def fit(
        self,
        values: Mapping[str, EvidenceValues],
        right: Mapping[str, Bool[Tensor, "M"]],
        codes: Int[Tensor, "M"],
        classes: int,
        rank_fraction: float,
        seed: int,
        logits: Float[Tensor, "M C"] | None = None,
    ) -> None:
        """Fit to points with known labels.

        Args:
            values: Evidence for the head's own labels under ``"own"`` and, with logits, for the network's labels under
                ``"network"``.
            right: Whether the labels of each source are right.
            codes: The true classes.
            classes: Number of classes.
            rank_fraction: The share of the points that are only ranked.
            seed: Seed of the random choice of the ranked points.
            logits: The network's logits, or None to calibrate the head's own labels only.
        """
        ranked = round(rank_fraction * len(codes))
        if min(ranked, len(codes) - ranked) < _MIN_TAIL_POINTS:
            raise ValueError(
                f"rank_fraction={rank_fraction} of {len(codes)} points leaves {ranked} to rank and "
                f"{len(codes) - ranked} to fit; both need at least {_MIN_TAIL_POINTS}. Give more points, or a "
                "rank_fraction nearer to one half."
            )
        order = np.random.default_rng(seed).permutation(len(codes))
        held, fitted = torch.from_numpy(order[:ranked]), torch.from_numpy(order[ranked:])
        nonconformity = values["own"].nonconformity.cpu()
        self.typicality.fit(nonconformity[fitted])
        combined, log_typicality = self.typicality(nonconformity[held])
        self.held_nonconformity = sorted_calibration(combined)
        self.class_nonconformity, self.class_counts = class_calibration(combined, codes.cpu()[held], classes)
        if logits is not None:
            logits, label = _finite(logits).cpu(), logits.argmax(dim=1).cpu()
            temperature = fit_temperature(logits[fitted], codes.cpu()[fitted])
            self.network.temperature.fill_(min(max(temperature, 1.0 / _MAX_TEMPERATURE), _MAX_TEMPERATURE))
            network = EvidenceValues(*(part.cpu() for part in values["network"]))
            values = {**values, "network": with_softmax(network, logits / self.network.temperature, label)}
        for name, labels in (("network", self.network), ("own", self.own)):
            if name not in values:
                continue
            support, correct = values[name].support.cpu(), right[name].cpu()
            labels.confidence.fit(support.double().numpy(), correct.numpy())
            labels.ranking.fit(support[fitted].double().numpy(), correct[fitted].numpy(), bend=False)
            labels.held_joint = joint_score(labels.ranking(support[held]), log_typicality)
            labels.held_right = correct[held]

    def forward(
        self,
        values: EvidenceValues,
        label: Int[Tensor, "B"],
        logits: Float[Tensor, "B C"] | None = None,
        *,
        own: bool = True,
    ) -> Calibrated:
        """Return the calibrated values of labels, from the evidence for them.

        Args:
            values: The evidence for the labels.
            label: The labels.
            logits: The network's logits if the labels are the network's.
            own: Without logits, whether the labels are the head's own. Labels from another source have no
                calibration. The same holds for the network's labels after a calibration without logits. The confidence
                and the joint score of labels without a calibration are NaN.
        """
        labels = self.own if logits is None else self.network
        if logits is not None:
            values = with_softmax(values, _finite(logits) / labels.temperature.double(), label)
        confidence = labels.confidence(values.support)
        unknown = torch.full_like(confidence, torch.nan)
        nothing = torch.zeros_like(label, dtype=torch.bool)
        if not self.done:
            return Calibrated(confidence, unknown, unknown, unknown, unknown, nothing)
        nonconformity, log_typicality = self.typicality(values.nonconformity)
        by_class = ClassCalibration(self.class_nonconformity, self.class_counts)
        calibrated = Calibrated(
            confidence=unknown,
            p_value=p_value_from_sorted(self.held_nonconformity, nonconformity),
            class_p_value=class_p_value(by_class, nonconformity, label),
            nonconformity=nonconformity,
            joint=unknown,
            accept=nothing,
        )
        if not labels.done or (logits is None and not own):
            return calibrated
        joint = joint_score(labels.ranking(values.support), log_typicality)
        return calibrated._replace(confidence=confidence, joint=joint, accept=joint >= labels.threshold.to(joint.dtype))


def _finite(logits: Float[Tensor, "B C"]) -> Float[Tensor, "B C"]:
    """Logits in float64 within finite bounds; softmax still gives a masked class (-inf) the probability zero."""
    return logits.double().clamp(-_MAX_LOGIT, _MAX_LOGIT)


def joint_score(confidence: Float[Tensor, "B"], log_typicality: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    r"""Probability :math:`c \, \frac{p}{p + \lambda}` that a label is right and the point is of a known kind.

    c is the confidence, p the typicality and :math:`\lambda` the prior odds :data:`UNKNOWN_ODDS` that a point is of an
    unknown kind. At typicality p the odds are :math:`\lambda / p`: the prior odds times 1/p, the strongest evidence
    that a p-value can give against the known kinds.

    >>> joint_score(torch.tensor([0.9, 0.9]), torch.tensor([1.0, 0.001]).log())
    tensor([0.8182, 0.0089])
    """
    return confidence * torch.sigmoid(log_typicality - math.log(UNKNOWN_ODDS))
