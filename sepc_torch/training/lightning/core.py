"""Base class ``MonitorCore`` of ``TrustMonitor``: refits, calibration, the pool, and results that are published.

``stages`` adds the methods that record a stage, ``monitor`` the hooks that call them.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from sepc_torch.head.drift_report import DriftReport
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.partitioning.landscape import SmallDisjunct
from sepc_torch.training import LabelPool
from sepc_torch.training.assessment import (
    calibrated_copy,
    class_count,
    is_calibrated,
    logged_names,
    pool_numbers,
)
from sepc_torch.training.cost import CostMeter
from sepc_torch.training.flagging import Head
from sepc_torch.training.lightning import settings
from sepc_torch.training.lightning.batches import on_rank_zero
from sepc_torch.training.lightning.head_state import HeadState
from sepc_torch.training.lightning.hooks import Capture, Captures, LogitsFinder, Source
from sepc_torch.training.lightning.pages import file_stem, log_figures, write_page
from sepc_torch.training.lightning.pooling import PoolScores, find_label_pool, find_pool
from sepc_torch.training.lightning.refitting import FitSample, calibration_rows, fit_rows, fit_samples, is_augmented
from sepc_torch.training.lightning.schedule import Schedule, is_last
from sepc_torch.training.lightning.settings import Functions
from sepc_torch.training.lightning.stage_results import (
    StageRecords,
    StageResult,
    StageTables,
    checked_logits,
    stage_result,
)
from sepc_torch.training.subsets import sample_per_class
from sepc_torch.training.trust_table import TrustTable

# Largest number of samples of a pool to score after a refit; a larger pool gives a different subset after each refit.
_MOST_POOL = 50_000
# Samples of a class to fit to, by default.
_MOST_PER_CLASS = 100
# Share of ``max_per_class`` that the first of several fits uses, one over this number: a fit to 25 instead of 100
# samples of each of 10 classes takes half of the time.
_FIRST_PART = 4

_log = logging.getLogger(__name__)


class MonitorCore:
    """State and methods of a monitor, without Lightning's hooks; see ``TrustMonitor`` for the arguments.

    Attributes:
        flagged, scores: Tables by stage.
        disjuncts: Regions with more confirmed mistakes than tolerated, at the last refit.
        drift: Report on the samples of the last prediction; None before, and if the head is not calibrated.
        max_per_class: Fit to at most this number of samples per class; None for all.
        max_pool: Score at most this number of samples of the pool; None for all.
    """

    log_dict: Any  # set by the Trainer

    def __init__(
        self,
        embed: Source,
        *,
        logits: Source | bool | None = None,
        head: Head | None = None,
        fit: Mapping[str, Any] | Callable[[Tensor, Tensor], Head] | None = None,
        fit_data: Any = None,
        calibrate: Any = None,
        flag_rate: float = 0.05,
        risk: float | None = None,
        refit_every_n_epochs: int = 1,
        max_cost: float | None = 0.15,
        pool: Any = None,
        inputs: Callable[[Any], Any] | None = None,
        labels: Callable[[Any], Any] | None = None,
        ids: Callable[[Any], Any] | str | None = None,
        dirpath: str | os.PathLike[str] | None = None,
        report: bool = False,
        on_flag: Callable[[Any, str, TrustTable], None] | None = None,
        prefix: str = "trust",
        **old: Any,
    ) -> None:
        renamed = settings.rename_old(old)
        flag_rate = renamed.pop("flag_rate", flag_rate)
        settings.check_source("embed", embed)
        settings.check_logits(logits)
        settings.check_head(head)
        settings.check_fit(fit)
        settings.check_functions(inputs=inputs, labels=labels, on_flag=on_flag)
        settings.check_ids(ids)
        settings.check_data("fit_data", fit_data, (DataLoader,), "an indexable data set, a loader")
        settings.check_data("calibrate", calibrate, (DataLoader,), "an indexable data set, a loader")
        settings.check_data("pool", pool, (DataLoader, LabelPool), "a LabelPool, an indexable data set, a loader")
        self.flag_rate = settings.check_rate("flag_rate", flag_rate)
        self.risk = None if risk is None else settings.check_rate("risk", risk)
        self._schedule = Schedule(
            settings.check_count("refit_every_n_epochs", refit_every_n_epochs, 0), settings.check_cost(max_cost)
        )
        limit = renamed.pop("max_per_class", settings.per_class_limit(fit, _MOST_PER_CLASS))
        self.max_per_class = settings.check_optional_count("max_per_class", limit, 1)
        self.criteria = settings.criteria(self.flag_rate, **renamed)
        self.max_pool: int | None = _MOST_POOL
        self.dirpath: Path | None = settings.check_folder(dirpath)
        self.report = settings.check_report(report)
        self.drift: DriftReport | None = None
        self.fit_data, self.calibrate, self.pool = fit_data, calibrate, pool
        self.prefix = settings.check_prefix(prefix)
        self.flagged, self.scores = StageTables(), StageTables()
        self.disjuncts: tuple[SmallDisjunct, ...] = ()
        self._functions = Functions(inputs, labels, ids, fit, on_flag)
        self._captures: Captures = {"emb": Capture(embed, "embed", prefix)}
        if logits is None:
            self._captures["logits"] = LogitsFinder(embed, prefix)
        elif not isinstance(logits, bool):
            self._captures["logits"] = Capture(logits, "logits", prefix)
        self._head_state = HeadState(head)
        self._fit_sample = FitSample()
        self._pool_scores = PoolScores()
        self._records = StageRecords(self._captures, self._functions, keep=self.report)
        self._pending, self._pool_numbers = dict[str, float](), dict[str, float]()
        self._augmentation_checked, self._said = False, set[str]()

    @property
    def cost(self) -> CostMeter:
        """Time that the monitor takes."""
        return self._schedule.cost

    @property
    def head(self) -> Head | None:
        """The head in use, or None before the first fit."""
        return self._head_state.head

    @property
    def fit_epoch(self) -> int:
        """Epoch of the head's last fit; -1 for a head given by the user."""
        return self._head_state.fit_epoch

    @property
    def fit_step(self) -> int:
        """Global step of the head's last fit; -1 for a head given by the user."""
        return self._head_state.fit_step

    @property
    def n_refits(self) -> int:
        """Number of successful fits."""
        return self._head_state.refits

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: the head and the step of its fit, as tensors and plain values."""
        return self._head_state.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the head of a checkpoint; the tables of earlier stages are kept."""
        self._head_state.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling, without the Trainer's logging functions, which hold a reference to the module."""
        return {name: value for name, value in self.__dict__.items() if name not in ("log", "log_dict")}

    def _attach(self, module: Any) -> None:
        for capture in self._captures.values():
            capture.attach(module)

    def _detach(self) -> None:
        for capture in self._captures.values():
            capture.detach()

    def _maybe_refit(self, trainer: Any, module: Any, *, first: bool = False) -> None:
        """Refit if the schedule says so or too many new labels contradict the head; at most once per global step.

        ``first`` ignores the schedule, because there is no head to validate with; 0 still disables refits.
        """
        plan, epoch, step = self._schedule, int(trainer.current_epoch), int(trainer.global_step)
        if not plan.every or step in (plan.tried_step, plan.skipped_step):
            return
        pool = find_label_pool(trainer, module, self.pool)
        self.disjuncts = () if pool is None else self._pool_scores.disjuncts(pool)
        if self.disjuncts and trainer.is_global_zero:
            worst = self.disjuncts[0]
            warnings.warn(
                f"Regions with more confirmed mistakes than tolerated: {len(self.disjuncts)}. In the worst region, "
                f"{len(worst.rows)} samples predicted as {worst.predicted} are mostly {worst.true[0]}. The head is "
                "refitted.",
                stacklevel=2,
            )
        if first or is_last(trainer) or self.disjuncts:
            self._refit(trainer, module)
        elif (epoch + 1) % plan.every == 0:
            if plan.affords_refit(trainer):
                self._refit(trainer, module)
            else:
                plan.skipped_step = step

    def _refit(self, trainer: Any, module: Any) -> None:
        """Refit the head to the current weights, calibrate it, score the pool, and write the head to ``dirpath``."""
        # The head of a network that has just begun to learn is soon replaced.
        quick = self._schedule.bounded and self.head is None and not is_last(trainer)
        part = _FIRST_PART if quick and self.max_per_class is not None else 1
        with self._schedule.refitting(int(trainer.global_step), part):
            self._refit_now(trainer, module, part)
        self._pending |= self._refit_numbers()

    def _refit_now(self, trainer: Any, module: Any, part: int) -> None:
        self._attach(module)
        samples = fit_samples(trainer, self.fit_data, find_label_pool(trainer, module, self.pool))
        self._check_augmentation(trainer, module, samples.dataset)
        functions = self._functions
        rows = fit_rows(trainer, module, samples, self._captures, functions, self.max_per_class, self._fit_sample)
        if part > 1 and self.max_per_class is not None:
            few = sample_per_class(rows["id"], rows["target"], max(self.max_per_class // part, 1))
            rows = {name: column[few] for name, column in rows.items()}
        with self._schedule.fitting():
            fitted = self._head_state.refit(trainer, module, rows, functions.fit)
        if fitted:
            self._calibrate(trainer, module)
            self._score_pool(trainer, module)
            if self.dirpath is not None and not trainer.fast_dev_run:
                folder = self.dirpath
                on_rank_zero(trainer, f"writing to {folder}", lambda: self._head_state.write(folder))

    def _calibrate(self, trainer: Any, module: Any) -> None:
        """Calibrate the head with the current weights, on ``calibrate=`` or half of the validation samples."""
        head = self.head
        if not isinstance(head, TrustHead):
            return
        self._attach(module)
        self._expect_classes()
        rows = calibration_rows(trainer, module, self.calibrate, self._captures, self._functions)
        if rows is not None and len(rows["id"]):
            logits = None if "logits" not in rows else checked_logits(head, rows["logits"])
            found = on_rank_zero(
                trainer,
                "the calibration",
                lambda: calibrated_copy(
                    head, rows["emb"], rows["target"], logits, flag_rate=self.flag_rate, risk=self.risk
                ),
            )
            if found is not None:
                self._head_state.calibrated(found, module)
        self._say_once(trainer)

    def _say_once(self, trainer: Any) -> None:
        """Say in the log which labels are judged and whether the head is calibrated, once for each."""
        finder = self._captures.get("logits")
        texts = {"labels": finder.finding} if isinstance(finder, LogitsFinder) else {}
        if not is_calibrated(self.head, self._has_network):
            texts["calibration"] = (
                "the head is not calibrated, because fewer than 20 labelled samples can be used; flags promise no "
                "rate. Validate on more samples, or pass calibrate=."
            )
        for name in texts.keys() - self._said:
            self._said.add(name)
            if trainer.is_global_zero:
                _log.info("TrustMonitor: %s", texts[name])

    @property
    def _has_network(self) -> bool:
        """Whether the network's labels are judged, or, before the logits were looked for, whether they may be."""
        finder = self._captures.get("logits")
        return finder is not None and (not isinstance(finder, LogitsFinder) or finder.source is not None)

    def _expect_classes(self) -> None:
        """Tell the search for logits how many classes there are."""
        finder = self._captures.get("logits")
        if isinstance(finder, LogitsFinder) and self.head is not None:
            finder.classes = class_count(self.head)

    def _refit_numbers(self) -> dict[str, float]:
        """Refit statistics to log."""
        state = self._head_state
        return {
            "head_refits": float(state.refits),
            "head_refit_failures": float(state.failures),
            "head_small_disjuncts": float(len(self.disjuncts)),
            "cost": self.cost.share(),
        }

    def _check_augmentation(self, trainer: Any, module: Any, dataset: Any) -> None:
        """Warn once if the fit data are augmented."""
        if self._augmentation_checked:
            return
        self._augmentation_checked = True
        if is_augmented(module, dataset) and trainer.is_global_zero:
            warnings.warn(
                "Two reads of the first fit sample differ: the data seem augmented. Pass the data without "
                "augmentation: TrustMonitor(fit_data=...) or LabelPool(eval_view=...).",
                stacklevel=2,
            )

    def _score_pool(self, trainer: Any, module: Any) -> None:
        """Evaluate the head on the pool and publish the result."""
        source = find_pool(trainer, module, self.pool)
        if source is None:
            return
        head = self._head_state.on(module.device)
        self._expect_classes()
        rows = self._pool_scores.score(
            trainer,
            module,
            source,
            head,
            self._captures,
            self._functions,
            self.max_pool,
            find_label_pool(trainer, module, self.pool),
        )
        found = stage_result(rows, [], head, self.criteria, "logits" in rows if rows else self._has_network)
        self._publish(trainer, "pool", found)
        self._pool_numbers = pool_numbers(found.numbers)
        self._pending |= self._pool_numbers

    def _publish(self, trainer: Any, name: str, found: StageResult) -> dict[str, float]:
        """Store the tables, write them to files, call ``on_flag``, and return the numbers by their logged names."""
        flagged = found.table.where(found.table.columns["reason"] >= 0)
        self.scores[name], self.flagged[name] = found.table, flagged
        if self.dirpath is not None and not trainer.fast_dev_run:
            on_rank_zero(trainer, f"writing to {self.dirpath}", lambda: self._write(trainer, name, flagged))
        if self.report and name != "pool" and not trainer.fast_dev_run:
            on_rank_zero(trainer, "the report", lambda: self._show(trainer, name, found))
        on_flag = self._functions.on_flag
        if on_flag is not None:
            on_rank_zero(trainer, "on_flag", lambda: on_flag(trainer, name, flagged))
        return logged_names(name, found.numbers)

    def _write(self, trainer: Any, name: str, flagged: TrustTable) -> None:
        """Write the table of flagged samples to ``dirpath``."""
        assert self.dirpath is not None
        self.dirpath.mkdir(parents=True, exist_ok=True)
        flagged.to_csv(self.dirpath / f"{file_stem(name, *self._when(trainer))}.csv")

    def _show(self, trainer: Any, name: str, found: StageResult) -> None:
        """Write the report of a stage to ``dirpath``, and give its figures to the loggers."""
        head, drift = self.head, self.drift if name.startswith("predict") else None
        if not isinstance(head, TrustHead) or not is_calibrated(head, "logits" in found.rows) or not found.ids:
            return
        epoch, step = self._when(trainer)
        if self.dirpath is not None:
            write_page(self.dirpath, name, epoch, step, head, found, drift)
        log_figures(trainer.loggers, f"{self.prefix}/{name}", max(step, 0), head, found)

    def _when(self, trainer: Any) -> tuple[int, int]:
        """Epoch and step that a file belongs to; -1 for a head given by the user.

        Outside of training Lightning's counters are 0, so all files would have one name.
        """
        if trainer.state.fn == "fit":
            return int(trainer.current_epoch), int(trainer.global_step)
        return self.fit_epoch, self.fit_step

    def _log(self, trainer: Any, numbers: Mapping[str, float]) -> None:
        """Log numbers through Lightning on every process, and clear the pending ones."""
        if numbers and not trainer.barebones:
            self.log_dict({f"{self.prefix}/{name}": value for name, value in numbers.items()}, sync_dist=True)
        self._pending = {}

    def _log_directly(self, trainer: Any, numbers: Mapping[str, float]) -> None:
        """Log numbers to the loggers directly, in hooks where Lightning forbids ``log``; clear the pending ones."""
        if numbers and trainer.is_global_zero:
            for logger in trainer.loggers:
                named = {f"{self.prefix}/{name}": value for name, value in numbers.items()}
                logger.log_metrics(named, step=int(trainer.global_step))
        self._pending = {}
