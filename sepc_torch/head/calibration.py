r"""Calibration of a trust head: confidence, typicality, p-values, the joint score and the acceptance threshold.

- The confidence is the logistic model of :mod:`sepc_torch.head.confidence`.
- The typicality of a point is the share of calibration points with a combined nonconformity score
  (:mod:`sepc_torch.head.strangeness`) at least as large. From the start of the largest tenth of the scores on, the
  share falls exponentially, so that distant points have no ties.
- The joint score combines both.

The guarantees of p-values and thresholds (:mod:`sepc_torch.head.conformal`) are exact only if the ranked score was not
fitted to the points it is ranked on. Calibration therefore splits its points: one part fits the typicality and the
joint score, the other part is only ranked. The confidence carries no guarantee and is fitted to all points.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch.head.assess import assess, finite_logits
from sepc_torch.head.evidence import EvidenceValues, Measurements, label_support, with_energy, with_softmax
from sepc_torch.head.label_calibration import LabelCalibration
from sepc_torch.head.strangeness import MIN_TAIL_POINTS
from sepc_torch.head.temperature import fit_temperature
from sepc_torch.model import torch_ops
from sepc_torch.shapes import Bool, Float, Int

# Bound of the temperature and of its inverse: labels without a mistake would drive the temperature to zero.
_MAX_TEMPERATURE = 20.0


_narrow = torch_ops.opaque(
    "narrow(Tensor columns) -> Tensor",
    lambda columns: columns.float(),
    lambda columns: torch.empty_like(columns, dtype=torch.float32),
)


def _in_dtype(columns: Float[Tensor, "n B"], dtype: torch.dtype) -> Float[Tensor, "n B"]:
    return _narrow(columns) if dtype == torch.float32 else columns.to(dtype)


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
        labels: Mapping[str, Int[Tensor, "M"]] | None = None,
        region: Int[Tensor, "M"] | None = None,
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
            labels: The labels of each source, for promises by class; by default the true classes.
            region: The nearest ellipsoid of each point, for promises by region; by default the first.
        """
        ranked = round(rank_fraction * len(codes))
        if min(ranked, len(codes) - ranked) < MIN_TAIL_POINTS:
            raise ValueError(
                f"rank_fraction={rank_fraction} of {len(codes)} points leaves {ranked} to rank and "
                f"{len(codes) - ranked} to fit; both need at least {MIN_TAIL_POINTS}. Give more points, or a "
                "rank_fraction nearer to one half."
            )
        order = np.random.default_rng(seed).permutation(len(codes))
        held, fitted = torch.from_numpy(order[:ranked]), torch.from_numpy(order[ranked:])
        if logits is not None:
            logits, label = finite_logits(logits).cpu(), logits.argmax(dim=1).cpu()
            temperature = fit_temperature(logits[fitted], codes.cpu()[fitted])
            self.network.temperature.fill_(min(max(temperature, 1.0 / _MAX_TEMPERATURE), _MAX_TEMPERATURE))
            network = EvidenceValues(*(part.cpu() for part in values["network"]))
            values = {**values, "network": self._with_logits(network, logits, label)}
        region = torch.zeros_like(codes) if region is None else region
        for name, source in (("network", self.network), ("own", self.own)):
            if name in values:
                evidence = EvidenceValues(*(part.cpu() for part in values[name]))
                given = codes if labels is None else labels[name]
                source.fit(
                    evidence, right[name].cpu(), codes.cpu(), classes, fitted, held, given.cpu(), region.long().cpu()
                )

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
        plain = labels.plain
        if plain is not None and (logits is not None or own):
            least = labels.least_score(label, region, group)
            columns, accept = assess(measured, logits, label, invalid, least, labels.tables(), plain)
            confidence, p_value, class_p_value, nonconformity, joint = _in_dtype(columns, dtype).unbind()
            return Calibrated(confidence, p_value, class_p_value, nonconformity, joint, accept)
        plain = self.own.plain
        if plain is None:
            return self._uncalibrated(measured, label, invalid, logits, dtype)
        # Labels without a calibration: p-values are those of the point alone.
        nothing = torch.full((), torch.inf, dtype=torch.float64, device=label.device)
        columns, accept = assess(measured, None, label, invalid, nothing, self.own.tables(), plain)
        confidence, p_value, class_p_value, nonconformity, joint = columns.unbind()
        # Zero marks refused rows.
        confidence, joint = (torch.where(column > 0, torch.nan, column) for column in (confidence, joint))
        columns = torch.stack([confidence, p_value, class_p_value, nonconformity, joint]).to(dtype)
        confidence, p_value, class_p_value, nonconformity, joint = columns.unbind()
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
        values = with_softmax(values, logits / self.network.temperature.double(), label)
        # Heads of file formats 1 to 3 were calibrated without the energy.
        has_energy = self.network.strangeness.weights.shape[0] > values.nonconformity.shape[1]
        return with_energy(values, logits) if has_energy else values
