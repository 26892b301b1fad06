"""Calibration of a head by out-of-fold evidence, for data that are too few to hold a calibration part back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sepc_torch.head.calibration import Calibration
from sepc_torch.head.calibration_set import LEAST_CALIBRATION, CalibrationSet, calibration_set
from sepc_torch.head.evidence import EvidenceValues
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.model.queries import class_codes, points_as_tensor
from sepc_torch.shapes import Float


class Fold(NamedTuple):
    """A head that was fitted without some rows, with the embeddings, labels and logits of these rows."""

    head: TrustHead
    z: Float[Tensor, "n D"]
    labels: Any
    logits: Float[Tensor, "n C"]


@torch.inference_mode(False)  # the new buffers outlive the call
@torch.no_grad()
def calibrate_out_of_fold(head: TrustHead, folds: Sequence[Fold], *, seed: int = 0) -> TrustHead:
    """Calibrate a head fitted on all rows with the evidence that the heads of folds give for the rows they left out.

    The folds' heads and networks differ from the final ones, so the guarantees of :meth:`TrustHead.calibrate` are not
    exact here. Scores of new rows come from a head with more training rows: it is typically better than those of the
    folds, so errors and flag rates are typically below the promised ones.

    Args:
        head: The head fitted on all rows, with the classes of the folds' heads in the same order.
        folds: The folds; together at least 20 rows.
        seed: Seed of the random choice of the ranked rows.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> y = np.arange(120) % 2
    >>> z = rng.normal(size=(120, 4)) + 3.0 * y[:, None]
    >>> odds = torch.tensor(np.stack([-z.sum(1), z.sum(1) - 12.0], axis=1))
    >>> folds = []
    >>> for k in range(3):
    ...     out = np.arange(120) % 3 == k
    ...     fitted = TrustHead.fit(z[~out], y[~out], normalize=None)
    ...     folds.append(Fold(fitted, torch.tensor(z[out]), y[out], odds[torch.tensor(out)]))
    >>> head = calibrate_out_of_fold(TrustHead.fit(z, y, normalize=None), folds)
    >>> head.accept_at(flag_rate=0.1).points
    60
    """
    evidence = head.evidence
    if evidence is None:
        raise RuntimeError("This head has no evidence to calibrate; make it with TrustHead.fit.")
    rows = sum(len(fold.z) for fold in folds)
    if rows < LEAST_CALIBRATION:
        raise ValueError(f"{rows} points are too few to calibrate with; pass at least {LEAST_CALIBRATION}.")
    sets, codes = zip(*(_evidence_of(fold, head.classes) for fold in folds), strict=True)
    values = {name: _joined([found.values[name] for found in sets]) for name in sets[0].values}
    right = {name: torch.cat([found.right[name] for found in sets]) for name in sets[0].right}
    logits = torch.cat([fold.logits.double() for fold in folds])
    calibration = Calibration(evidence.support_names, len(evidence.kinds))
    calibration.fit(values, right, torch.cat(codes), len(head.classes), 0.5, seed, logits)
    head.calibration = calibration.to(head.sepc.codes.device)
    head.accept_at(flag_rate=calibration.network.least_flag_rate(0.05))
    return head


def _evidence_of(fold: Fold, classes: list[Any]) -> tuple[CalibrationSet, Tensor]:
    """The evidence of a fold's head for the rows that it left out, and their classes."""
    assert fold.head.evidence is not None
    device = fold.head.sepc.codes.device
    z = points_as_tensor(fold.z, None, device, fold.head.projection.shift.dtype)
    codes = class_codes(fold.labels, classes, len(z), device)
    own = fold.head.sepc(fold.head.projection(z)).label
    return calibration_set(fold.head.evidence, z, codes, own, fold.logits, len(classes)), codes


def _joined(parts: list[EvidenceValues]) -> EvidenceValues:
    return EvidenceValues(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
