"""Calibration of a trust head, and acceptance of its labels with guarantees."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar, overload

import torch

from sepc_torch.data.arrays import numeric_points
from sepc_torch.data.options import count
from sepc_torch.head.calibration import Calibration
from sepc_torch.head.calibration_set import LEAST_CALIBRATION, calibration_set
from sepc_torch.head.conformal import check_share
from sepc_torch.head.evidence import GRIDS
from sepc_torch.head.groups import By, GroupAcceptance, accept_by_group
from sepc_torch.head.head_module import HeadModule
from sepc_torch.head.label_calibration import Acceptance
from sepc_torch.head.novelties import Novelties, find_novelties
from sepc_torch.head.promise import Promise
from sepc_torch.model.queries import class_codes, feature_columns

# Share of in-distribution points that a newly calibrated head flags.
_FLAG_RATE = 0.05

# The class of the head that a method returns. Not typing.Self: beartype, which checks the tests, refuses it here.
Head = TypeVar("Head", bound="CalibratedHead")


class CalibratedHead(HeadModule):
    """A head that held-out points calibrate: it accepts labels with a guarantee, and declares samples novel."""

    @torch.inference_mode(False)  # the new buffers outlive the call, and load_state_dict writes to them
    @torch.no_grad()
    def calibrate(
        self: Head,
        embeddings: Any,
        labels: Any,
        logits: Any = None,
        *,
        rank_fraction: float = 0.5,
        seed: int = 0,
        hold_out: float | None = None,
    ) -> Head:
        """Calibrate the head with points that neither the network nor the head was fitted on.

        After calibration :attr:`HeadPrediction.confidence` is a probability, p-values and joint scores are defined, and
        the head accepts on average at least 95 % of the points of the calibration distribution. :meth:`accept_at`
        changes the threshold.

        Args:
            embeddings: (M, D) embeddings of at least 20 points, from the distribution of the points to assess.
            labels: The true labels (M,).
            logits: The network's logits (M, C). Without logits only the head's own labels are calibrated, and softmax
                is not used.
            rank_fraction: The share of the points that are only ranked, for p-values and thresholds; the other points
                fit the joint score. The guarantees hold because no point does both.
            seed: Seed of the random choice of the ranked points.
            hold_out: Deprecated name of ``rank_fraction``.
        """
        if self.evidence is None or self.calibration is None:
            raise RuntimeError("This head has no evidence to calibrate; make it with TrustHead.fit.")
        if hold_out is not None:
            # Two frames of the decorators lie between this method and its caller.
            warnings.warn("hold_out is deprecated; use rank_fraction.", DeprecationWarning, stacklevel=4)
            rank_fraction = hold_out
        rank_fraction, seed = check_share(rank_fraction, "rank_fraction"), count(seed, "seed")
        points = numeric_points(feature_columns(self._encoded(embeddings), self.feature_names), "embeddings")[0]
        z = torch.tensor(points, dtype=self.projection.shift.dtype, device=self.sepc.codes.device)
        codes = class_codes(labels, self.classes, len(z), z.device)
        if len(z) < LEAST_CALIBRATION:
            raise ValueError(
                f"{len(z)} points are too few to calibrate with; pass at least {LEAST_CALIBRATION - len(z)} more."
            )
        own = self.sepc(self.projection(z))
        data = calibration_set(self.evidence, z, codes, own.label, logits, len(self.classes))
        calibration = Calibration(self.evidence.support_names, len(self.evidence.kinds))
        calibration.fit(
            *(data.values, data.right, codes, len(self.classes), rank_fraction, seed),
            *(data.logits, data.label, own.nearest),
        )
        self.calibration = calibration.to(z.device)
        self.training_set = None if self.training_set is None else self.training_set.calibrated()
        self._stale_warned, self._grids = False, GRIDS
        self.accept_at(flag_rate=self.calibration.own.least_flag_rate(_FLAG_RATE))
        return self

    @overload
    def accept_at(
        self, *, risk: float | None = None, delta: float = 0.05, flag_rate: float | None = None, by: None = None
    ) -> Acceptance: ...

    @overload
    def accept_at(self, *, risk: float, delta: float = 0.05, by: By | Any, joint: bool = True) -> GroupAcceptance: ...

    def accept_at(
        self,
        *,
        risk: float | None = None,
        delta: float = 0.05,
        flag_rate: float | None = None,
        by: By | Any = None,
        joint: bool = True,
    ) -> Acceptance | GroupAcceptance:
        """Set the acceptance threshold, with a guarantee for every sample size. Pass ``risk`` or ``flag_rate``.

        Args:
            risk: The allowed share of wrong labels among the accepted ones. It holds with probability 1 - ``delta``
                over the calibration points. If no threshold qualifies, nothing is accepted, ``found`` is False, and a
                warning says which risk could be promised.
            delta: The allowed probability that the guarantee of ``risk`` fails.
            flag_rate: The share of points of the calibration distribution that may be refused, on average over
                calibration sets.
            by: Keep the risk in every group, not only on average; see :mod:`sepc_torch.head.groups` for the proof.

                - ``"predicted"``: among the accepted points of each predicted class, one threshold per class;
                - ``"region"``: among those of each region (the nearest ellipsoid, ``out.nearest``), one threshold per
                  region. Thin classes are merged with the nearest class, thin regions with the nearest region, of the
                  same class first; the promise then holds for the merged group;
                - integers from 0 that give the group of each calibration point: one threshold per group. Every call of
                  the head then needs ``groups=``. Groups are not merged;
                - ``"class"``: among the accepted points of each *true* class. The true class of a new point is unknown,
                  so all points share one threshold, the lowest that keeps the risk in every class. If there is none,
                  nothing is accepted.
            joint: Whether ``delta`` is the probability that the promise fails in any group, or in each single group.

        Returns:
            With ``by``, a record of every group; see :class:`~sepc_torch.head.groups.GroupAcceptance`. Otherwise the
            threshold with its coverage and error on the ranked calibration points: for the network's labels if
            :meth:`calibrate` had logits, otherwise for the head's own labels. Labels without a calibration are never
            accepted: labels passed as ``labels=``, and the network's labels after a calibration without logits.
        """
        if self.calibration is None or not self.calibration.done:
            raise RuntimeError("The head must be calibrated first: head.calibrate(embeddings, labels, logits).")
        if (risk is None) == (flag_rate is None):
            raise ValueError("Pass exactly one of risk and flag_rate.")
        self._warn_if_stale(stacklevel=3)
        network = self.calibration.network if self.calibration.network.done else None
        if by is not None:
            if risk is None:
                raise ValueError("by keeps a risk in every group; pass risk, not flag_rate.")
            table = accept_by_group(self.calibration.own, self.sepc, risk, delta, by, joint)
            if network is not None:
                table = accept_by_group(network, self.sepc, risk, delta, by, joint)
            some = any(row.found for row in table.groups)
            self.promise = Promise(risk, delta, None, by if isinstance(by, str) else "group", some)
            if not table.found:
                refused = sum(not row.found for row in table.groups)
                warnings.warn(
                    f"The risk {risk:g} cannot be promised in {refused} of {len(table.groups)} groups; the head "
                    "accepts none of their points. Print the result for a table; calibrate with more points, or raise "
                    "risk.",
                    stacklevel=2,
                )
            return table
        found = self.calibration.own.accept(risk, delta, flag_rate)
        if network is not None:
            found = network.accept(risk, delta, flag_rate)
        self.promise = Promise(risk, delta, flag_rate, found=found.found)
        if risk is not None and not found.found:
            limits = (network or self.calibration.own).shortfall(risk, delta)
            warnings.warn(f"The head accepts nothing: {limits}", stacklevel=2)
        return found

    def novelties(self, z: Any, logits: Any = None, fdr: float = 0.1) -> Novelties:
        """Declare which samples of a batch are novel, with the false discovery rate controlled.

        On average at most a share ``fdr`` of the samples declared novel are ordinary: drawn from the distribution of
        the calibration points. :func:`~sepc_torch.head.novelties.find_novelties` has the procedure and its proof. The
        rate is over calibration sets and batches; no promise is made about one batch, or for samples that were chosen
        by their scores. Rows without a prediction count as the least typical.

        Args:
            z: (B, D) embeddings in any form that :meth:`judge` takes.
            logits: (B, C) logits of the network, or None for p-values without their energy.
            fdr: The allowed share of ordinary samples among those declared novel.
        """
        if self.calibration is None or not self.calibration.done:
            raise RuntimeError("The head must be calibrated first: head.calibrate(embeddings, labels, logits).")
        network = self.calibration.network if logits is not None and self.calibration.network.done else None
        ranked = len((network or self.calibration.own).held_nonconformity)
        return find_novelties(self.judge(z, logits).p_value, ranked, fdr)
