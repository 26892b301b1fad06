"""Samples of a prediction as a stream: drift of the stream, merged over all processes."""

from __future__ import annotations

import logging
from typing import Any

from torch import distributed as dist

from sepc_torch.head.drift import DriftMonitor
from sepc_torch.head.drift_report import DriftReport
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.training.assessment import is_calibrated
from sepc_torch.training.flagging import Head

_log = logging.getLogger(__name__)


class PredictionStream:
    """Drift of one prediction: each process watches its own samples, and the states are merged at the end.

    Args:
        trainer: The Trainer.
        head: The head, the same on every process.
        has_network: Whether the network's labels are judged.
    """

    def __init__(self, trainer: Any, head: Head | None, has_network: bool) -> None:
        self._monitor: DriftMonitor | None = None
        self._seen_all = True
        if not isinstance(head, TrustHead) or not is_calibrated(head, has_network):
            return
        try:
            # Processes break ties by different random numbers.
            self._monitor = DriftMonitor(head, seed=int(trainer.global_rank))
        except (RuntimeError, ValueError) as error:  # a head of the user, calibrated in another way
            _log.info("TrustMonitor: drift is not watched. %s", error)

    def add(self, out: HeadPrediction, has_logits: bool) -> None:
        """Add the predictions of a batch, in the order of the stream."""
        if self._monitor is not None and has_logits == self._monitor.with_logits:
            self._monitor.update_from(out)
        else:
            self._seen_all = False

    def report(self, trainer: Any) -> DriftReport | None:
        """Report on the samples of all processes, equal on every process; None if drift was not watched."""
        mine = self._monitor if self._seen_all else None
        if trainer.world_size == 1:
            return None if mine is None else mine.report()
        states: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(states, None if mine is None else mine.state_dict())
        if mine is None or any(state is None for state in states):
            return None
        workers = []
        for state in states:
            workers.append(DriftMonitor(mine.head, mine.alpha))
            workers[-1].load_state_dict(state)
        return workers[0].merge(*workers[1:]).report()
