r"""From evidence to probabilities: how likely a label is right, how ordinary a point is, and both in one number.

The confidence is the logistic model of :mod:`sepc_torch.head.confidence`. The typicality is the share of ordinary points
that are as strange; beyond the strangest tenth the share falls exponentially, so that it never ends in ties.

P-values and thresholds promise something about fresh points, and keep it exactly (:mod:`sepc_torch.head.conformal`) only if
what they rank was not fitted to the points they rank it on. So calibration data are split in two: one half fits the
typicality and the joint score, the other half is only ranked. The confidence promises nothing and is fitted to both.
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
from sepc_torch.head.evidence import Facts, with_softmax
from sepc_torch.head.temperature import fit_temperature
from sepc_torch.shapes import Bool, Float, Int

# Bounds of temperatures, which labels without a mistake would drive to zero, and of logits.
_MOST_HEAT = 20.0
_MOST_LOGIT = 1e4
# The share of ordinary points whose excess sets the slope of the tail, and how many there must be.
_TAIL = 0.1
_LEAST_TAIL = 5
# Odds that a point is unknown before it is looked at. At a typicality p they are this over p: where one ordinary point
# in ten is as strange, known and unknown are equally likely.
UNKNOWN_ODDS = 0.1


class Typicality(nn.Module):
    r"""How ordinary points are, from several kinds of strangeness.

    Each kind becomes the share of ordinary points that are as strange, :math:`p_j`; together they are as strange as
    :math:`-\sum_j \log p_j` (Fisher's combination), and that becomes a share again.
    """

    ordered: Tensor
    combined: Tensor

    def __init__(self, ordered: Float[Tensor, "S M"], combined: Float[Tensor, "M"]) -> None:
        super().__init__()
        self.register_buffer("ordered", ordered)
        self.register_buffer("combined", combined)

    def fit(self, strangeness: Float[Tensor, "M S"]) -> None:
        """Learn from ordinary points."""
        self.ordered = strangeness.double().T.sort(dim=1).values.contiguous()
        self.combined = self._combine(strangeness).sort().values

    def forward(self, strangeness: Float[Tensor, "B S"]) -> tuple[Float[Tensor, "B"], Float[Tensor, "B"]]:
        """The combined strangeness and the log of the typicality of every row."""
        together = self._combine(strangeness)
        return together.to(strangeness.dtype), log_share(self.combined.double(), together).to(strangeness.dtype)

    def _combine(self, strangeness: Float[Tensor, "B S"]) -> Float[Tensor, "B"]:
        columns = zip(self.ordered.double(), strangeness.double().T, strict=True)
        return -torch.stack([log_share(own, values) for own, values in columns]).sum(dim=0)


def log_share(ordered: Float[Tensor, "M"], values: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    r"""The log of the share of ordinary points that are at least as strange, smooth and never zero.

    Between two ordinary values the share is interpolated. Beyond the strangest tenth, from u on, it falls like
    :math:`e^{-(s - u) / m}`, where m is the mean excess of that tenth. NaN is as strange as can be.

    >>> log_share(torch.arange(1.0, 100.0), torch.tensor([50.0, 110.0])).exp()
    tensor([0.5100, 0.0026])
    """
    count = len(ordered)
    tail = min(max(_LEAST_TAIL, round(_TAIL * count)), count - 1)
    start = ordered[count - 1 - tail]
    excess = (ordered[count - tail :] - start).mean()
    # Where all ordinary points are alike the slope would be infinite.
    excess = excess.clamp_min(torch.finfo(ordered.dtype).eps * (1.0 + start.abs()))
    values = torch.where(values.isnan(), torch.inf, values)
    above = torch.searchsorted(ordered, values.contiguous())
    upper = ordered[above.clamp_max(count - 1)]
    lower = ordered[(above - 1).clamp_min(0)]
    # The share at an ordinary value is a step; between two of them a line.
    part = torch.where(upper > lower, (values - lower) / (upper - lower), torch.ones_like(values)).clamp(0.0, 1.0)
    place = torch.where(above > 0, above - 1 + part, torch.zeros_like(values))
    inside = torch.log((count + 1 - place) / (count + 1))
    outside = math.log((tail + 2) / (count + 1)) - (values - start) / excess
    return torch.where(values > start, outside, inside).clamp_min(-torch.finfo(torch.float32).max)


class Calibrated(NamedTuple):
    """What calibration says of a batch: see :class:`~sepc_torch.HeadPrediction`."""

    confidence: Float[Tensor, "B"]
    p_value: Float[Tensor, "B"]
    class_p_value: Float[Tensor, "B"]
    strangeness: Float[Tensor, "B"]
    joint: Float[Tensor, "B"]
    accept: Bool[Tensor, "B"]


class Acceptance(NamedTuple):
    """From which joint score on a head accepts, and what the ranked calibration points say of that.

    Attributes:
        threshold: Accepted is what has at least this joint score; inf where nothing can be accepted, -inf where all is.
        coverage: The share of the ranked points that it accepts.
        error: The share of those that are wrong; NaN where there are none.
        points: How many points were ranked.
        found: Whether the wish can be granted; if not, nothing is accepted.
    """

    threshold: float
    coverage: float
    error: float
    points: int
    found: bool


class View(nn.Module):
    """One kind of label to judge, the network's or the head's own.

    ``confidence`` was fitted to all calibration points, ``ranking`` to half of them; of the other half ``held_joint``
    are the joint scores and ``held_right`` says which labels are right. ``threshold`` is from where on it accepts,
    ``temperature`` what logits are divided by.
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
        """Whether it was calibrated."""
        return self.held_joint.shape[0] > 0

    def accept(self, risk: float | None, delta: float, flag_rate: float | None) -> Acceptance:
        """Accept as much as keeps the risk with confidence 1 - delta, or refuse at most a share of ordinary points."""
        if flag_rate is not None:
            threshold = flag_threshold(self.held_joint, flag_rate)
            if threshold == -math.inf:
                warnings.warn(
                    f"{len(self.held_joint)} ranked points are too few to refuse only {flag_rate:g} of ordinary ones, "
                    f"so nothing is refused; calibrate with more, or ask for at least "
                    f"{self.least_flag_rate(flag_rate):.3g}.",
                    stacklevel=4,
                )
            return self._accept(threshold, found=True)
        assert risk is not None
        found = risk_threshold(self.held_joint, self.held_right, risk, delta)
        return self._accept(found.threshold, found.found)

    def least_flag_rate(self, wanted: float) -> float:
        """The rate that is wanted, or the least that so few points can promise."""
        return max(wanted, 1.0 / (len(self.held_joint) + 1))

    def _accept(self, threshold: float, found: bool) -> Acceptance:
        self.threshold = self.held_joint.new_tensor(threshold)  # in the dtype of the scores, so that none is rounded
        accepted = self.held_joint >= threshold
        wrong = float((~self.held_right[accepted]).double().mean())  # of nothing, torch says NaN
        return Acceptance(threshold, float(accepted.double().mean()), wrong, len(accepted), found)


class Calibration(nn.Module):
    """What a head learnt from calibration data: one half fitted as models, the other half kept as sorted numbers."""

    held_strangeness: Tensor
    class_strangeness: Tensor
    class_counts: Tensor

    def __init__(self, names: tuple[str, ...], kinds: int) -> None:
        super().__init__()
        self.network = View(["softmax", *names])
        self.own = View(list(names))
        self.typicality = Typicality(torch.zeros(kinds, 0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))
        self.register_buffer("held_strangeness", torch.zeros(0))
        self.register_buffer("class_strangeness", torch.zeros(0, 0))
        self.register_buffer("class_counts", torch.zeros(0, dtype=torch.int64))

    @property
    def done(self) -> bool:
        """Whether there was a calibration."""
        return self.own.done

    @property
    def without_logits(self) -> bool:
        """Whether there was one that knew no logits, and says nothing of the network's labels."""
        return self.own.done and not self.network.done

    def fit(
        self,
        facts: Mapping[str, Facts],
        right: Mapping[str, Bool[Tensor, "M"]],
        codes: Int[Tensor, "M"],
        classes: int,
        hold_out: float,
        seed: int,
        logits: Float[Tensor, "M C"] | None = None,
    ) -> None:
        """Learn from points with known labels.

        Args:
            facts: Under ``"own"`` those of the head's own labels and, where logits are known, under ``"network"``
                those of the network's.
            right: Whether those labels are right.
            codes: The true classes.
            classes: Number of classes.
            hold_out: The share of points that is only ranked.
            seed: For the choice of those.
            logits: What the network says, if it is asked.
        """
        ranked = round(hold_out * len(codes))
        if min(ranked, len(codes) - ranked) < _LEAST_TAIL:
            raise ValueError(
                f"hold_out={hold_out} of {len(codes)} points leaves {ranked} to rank and {len(codes) - ranked} to fit; "
                f"both need at least {_LEAST_TAIL}."
            )
        order = np.random.default_rng(seed).permutation(len(codes))
        held, fitted = torch.from_numpy(order[:ranked]), torch.from_numpy(order[ranked:])
        strangeness = facts["own"].strangeness.cpu()
        self.typicality.fit(strangeness[fitted])
        combined, typical = self.typicality(strangeness[held])
        self.held_strangeness = sorted_calibration(combined)
        self.class_strangeness, self.class_counts = class_calibration(combined, codes.cpu()[held], classes)
        if logits is not None:
            logits, label = _finite(logits).cpu(), logits.argmax(dim=1).cpu()
            temperature = fit_temperature(logits[fitted], codes.cpu()[fitted])
            self.network.temperature.fill_(min(max(temperature, 1.0 / _MOST_HEAT), _MOST_HEAT))
            network = Facts(*(part.cpu() for part in facts["network"]))
            facts = {**facts, "network": with_softmax(network, logits / self.network.temperature, label)}
        for name, view in (("network", self.network), ("own", self.own)):
            if name not in facts:
                continue
            support, correct = facts[name].support.cpu(), right[name].cpu()
            view.confidence.fit(support.double().numpy(), correct.numpy())
            view.ranking.fit(support[fitted].double().numpy(), correct[fitted].numpy(), bend=False)
            view.held_joint = joint_score(view.ranking(support[held]), typical)
            view.held_right = correct[held]

    def forward(
        self, facts: Facts, label: Int[Tensor, "B"], logits: Float[Tensor, "B C"] | None = None, *, own: bool = True
    ) -> Calibrated:
        """Judge labels with the evidence for them.

        Args:
            facts: The evidence for the labels.
            label: The labels.
            logits: The network's logits, if the labels are its.
            own: Whether the labels are the head's own, where there are no logits. Of others, and of the network's after
                a calibration without logits, nothing is known: their confidence and joint score are NaN.
        """
        view = self.own if logits is None else self.network
        if logits is not None:
            facts = with_softmax(facts, _finite(logits) / view.temperature.double(), label)
        confidence = view.confidence(facts.support)
        unknown = torch.full_like(confidence, torch.nan)
        nothing = torch.zeros_like(label, dtype=torch.bool)
        if not self.done:
            return Calibrated(confidence, unknown, unknown, unknown, unknown, nothing)
        strangeness, typical = self.typicality(facts.strangeness)
        found = Calibrated(
            confidence=unknown,
            p_value=p_value_from_sorted(self.held_strangeness, strangeness),
            class_p_value=class_p_value(
                ClassCalibration(self.class_strangeness, self.class_counts), strangeness, label
            ),
            strangeness=strangeness,
            joint=unknown,
            accept=nothing,
        )
        if not view.done or (logits is None and not own):
            return found
        joint = joint_score(view.ranking(facts.support), typical)
        return found._replace(confidence=confidence, joint=joint, accept=joint >= view.threshold.to(joint.dtype))


def _finite(logits: Float[Tensor, "B C"]) -> Float[Tensor, "B C"]:
    """Logits in float64; a class that is masked by -inf gets a number that softmax takes for zero."""
    return logits.double().clamp(-_MOST_LOGIT, _MOST_LOGIT)


def joint_score(confidence: Float[Tensor, "B"], log_typicality: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    r"""The probability :math:`c \, \frac{p}{p + \lambda}` that a label is right and the point of a known kind.

    With typicality p, a point is unknown with odds :math:`\lambda / p`: the prior odds :math:`\lambda` times 1/p,
    the most that a p-value can speak against the known.

    >>> joint_score(torch.tensor([0.9, 0.9]), torch.tensor([1.0, 0.001]).log())
    tensor([0.8182, 0.0089])
    """
    return confidence * torch.sigmoid(log_typicality - math.log(UNKNOWN_ODDS))
