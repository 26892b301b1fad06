"""Whether the rows of a report are drawn like the calibration points, and which regions differ."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sepc_torch.head.drift import DriftMonitor
from sepc_torch.head.drift_report import DriftReport, Move
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.report.rows import Rows
from sepc_torch.report.sentences import number

# Rows that are tested: more take time and change little.
_MOST_ROWS = 100_000


class BatchDrift(NamedTuple):
    """A test of all rows of a batch together against the calibration points, in a random order."""

    found: DriftReport

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        tested = f"(p = {self.found.p_value:.2g} from {number(self.found.seen)} rows)"
        if self.found.alarm:
            return f"The rows are not drawn like the calibration points {tested}: promises do not cover them."
        return f"No difference from the calibration points is shown {tested}."

    @property
    def moves(self) -> tuple[Move, ...]:
        """The changes, if any is shown."""
        return self.found.moves if self.found.alarm else ()

    def to_dict(self) -> dict[str, Any]:
        """The numbers; positions in the random order mean nothing and are left out."""
        found = self.found.to_dict()
        moves = [{name: value for name, value in move.items() if name != "since"} for move in found["moves"]]
        return {**{name: found[name] for name in ("seen", "p_value", "alarm", "accuracy")}, "moves": moves}


def batch_drift(head: TrustHead, rows: Rows) -> BatchDrift | None:
    """Test the rows against the calibration points.

    The order of a file is often by class or by date. In a random order the rows are exchangeable with the calibration
    points if all are drawn alike, whatever the order of the file.

    Returns:
        None if there is nothing to test with: no rows, a calibration of other labels or of an older version, or
        thresholds by given groups.
    """
    assert head.calibration is not None
    with_logits = rows.softmax is not None
    labels = head.calibration.network if with_logits else head.calibration.own
    if not len(rows) or head.calibration.network.done != with_logits:
        return None
    if len(labels.point_region) == 0 or len(labels.group_threshold):
        return None
    order = np.random.default_rng(0).permutation(len(rows))[:_MOST_ROWS]
    return BatchDrift(DriftMonitor(head).update_from(HeadPrediction(*(field[order] for field in rows.out))))
