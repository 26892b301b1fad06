"""Base class ``StageCore`` of ``TrustMonitor``: what happens from the first to the last batch of a stage, no hooks."""

from __future__ import annotations

import math
import warnings
from typing import Any

from sepc_torch.model.sepc import SEPC
from sepc_torch.training.assessment import Seen, is_calibrated, logged_names, no_numbers, pool_numbers
from sepc_torch.training.lightning.core import MonitorCore
from sepc_torch.training.lightning.pooling import has_pool
from sepc_torch.training.lightning.settings import MisconfigurationException
from sepc_torch.training.lightning.stream import PredictionStream

# Names of the stages in logs, attributes and files.
_SHORT = {"validate": "val", "test": "test", "predict": "predict"}


class StageCore(MonitorCore):
    """Methods of a monitor that record, judge and conclude a stage."""

    _stream: PredictionStream | None = None

    def _begin(self, trainer: Any, module: Any, stage: str, loaders: Any) -> None:
        """Begin to record a stage; outside of training, check that there is a head and that it fits the weights."""
        self._attach(module)
        self._records.begin(loaders)
        self._stream = None
        if trainer.state.fn == "fit":
            return
        self._schedule.assessing = True
        if self.head is None and self.dirpath is not None:
            self._head_state.read(self.dirpath)
        if self.head is None:
            raise MisconfigurationException(
                f"There is no head to {stage} with. Fit with this monitor first, load a checkpoint of a fit "
                f"(ckpt_path=...) by a monitor of the same prefix (this one has prefix={self.prefix!r}), or pass "
                "TrustMonitor(head=...). If the fit spawns processes, pass dirpath=: they return the head through a "
                "file in this folder."
            )
        if self._head_state.is_stale(module) and trainer.is_global_zero:
            warnings.warn(
                "The head was fitted to different weights than the module's current ones, so trust may be stale. Load "
                "the head and the weights from one checkpoint (ckpt_path=...). A checkpoint of a validation that "
                "max_cost= skipped holds the head of an earlier one.",
                stacklevel=2,
            )
        if stage == "predict":
            self.drift = None
            self._stream = PredictionStream(trainer, self.head, self._has_network)

    def _open_validation(self, trainer: Any, module: Any) -> None:
        """Refit and calibrate before the first batch, as the schedule decides."""
        plan, step = self._schedule, int(trainer.global_step)
        fitting, first = trainer.state.fn == "fit", self.head is None
        if fitting and plan.waits(trainer):
            return
        if fitting and (first or trainer.fit_loop.epoch_loop.batch_progress.is_last_batch):
            self._maybe_refit(trainer, module, first=first)
        refitted = plan.tried_step == step
        if fitting and not plan.plan(trainer, refitted=refitted):
            return
        # The weights have changed since the last calibration; a head that the user wants to keep has its own.
        if (fitting and plan.every > 0 and not refitted) or not is_calibrated(self.head, self._has_network):
            self._calibrate(trainer, module)

    def _judge(self, trainer: Any, module: Any, stage: str, batch: Any, batch_idx: int, loader: int) -> None:
        """Record a batch for the head."""
        if self.head is None or trainer.sanity_checking or not self._schedule.assessing:
            self._records.clear()
            return
        self._expect_classes()
        with trainer.precision_plugin.forward_context():  # for embed= and logits= functions that run the module
            self._records.add(self._head_state.on(module.device), module, batch, batch_idx, loader, self._seen)

    @property
    def _seen(self) -> Seen | None:
        """Where the head's predictions of a stage go, besides the tables."""
        return None if self._stream is None else self._stream.add

    def _conclude(self, trainer: Any, module: Any, stage: str) -> dict[str, float]:
        """Publish the results of a stage and return the numbers to log, always under the same names.

        A callback that monitors a name fails if the name is missing, so undefined numbers are logged as NaN. After a
        validation that was not assessed, Lightning still has the last values for callbacks.
        """
        if trainer.sanity_checking:
            return {}
        if not self._schedule.assessing:
            return {"cost": self.cost.share()}
        if self.head is not None:
            self._records.judge(self._head_state.on(module.device), self._seen)
        if self._stream is not None:
            self.drift = self._stream.report(trainer)
        numbers: dict[str, float] = {}
        many = len(self._records.recorders)
        names = [_SHORT[stage]] if many == 1 else [f"{_SHORT[stage]}_{number}" for number in range(many)]
        if self.head is None:
            missing = no_numbers("logits" in self._captures)
            numbers |= {key: value for name in names for key, value in logged_names(name, missing).items()}
        else:
            halved = stage == "validate" and self.calibrate is None
            for name, each in zip(names, self._records.finish(trainer, self.head, self.criteria, halved), strict=True):
                numbers |= self._publish(trainer, name, each)
        if trainer.state.fn == "fit":
            age = int(trainer.global_step) - self.fit_step
            numbers["head_age_steps"] = float(age) if self.fit_step >= 0 else math.nan
            numbers |= self._refit_numbers()
            if has_pool(trainer, module, self.pool):
                numbers |= self._pool_numbers or pool_numbers(no_numbers("logits" in self._captures))
        if self._stream is not None:
            numbers |= self._drift_numbers(trainer)
        bank = () if self.head is None else (self.head if isinstance(self.head, SEPC) else self.head.sepc).bank
        return numbers | {"head_ellipsoids": float(len(bank))}

    def _drift_numbers(self, trainer: Any) -> dict[str, float]:
        """Drift of the predicted samples as numbers, NaN if it was not watched; an alarm warns."""
        found = self.drift
        if found is None:
            return {"drift": math.nan, "drift_p_value": math.nan}
        if found.alarm and trainer.is_global_zero:
            warnings.warn(f"{found.sentence} print(monitor.drift) says where.", stacklevel=2)
        return {"drift": float(found.alarm), "drift_p_value": found.p_value}
