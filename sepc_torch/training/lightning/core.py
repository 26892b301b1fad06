"""Base class ``MonitorCore`` of ``TrustMonitor``: refits, stage records, tables and queries, without hooks.

``monitor`` adds the hooks that call these methods.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from sepc_torch.data import files
from sepc_torch.data.arrays import count
from sepc_torch.model.sepc import SEPC
from sepc_torch.partitioning.landscape import SmallDisjunct
from sepc_torch.training import Candidates, LabelPool, choose
from sepc_torch.training.flagging import Criteria, Head, Judged
from sepc_torch.training.lightning import settings
from sepc_torch.training.lightning.distributed import on_rank_zero
from sepc_torch.training.lightning.head_state import HeadState
from sepc_torch.training.lightning.hooks import Capture, Source
from sepc_torch.training.lightning.lightning_names import MisconfigurationException
from sepc_torch.training.lightning.pooling import PoolScores, find_label_pool, find_pool, has_pool
from sepc_torch.training.lightning.refitting import fit_rows, fit_samples, is_augmented
from sepc_torch.training.lightning.settings import Functions
from sepc_torch.training.lightning.stage_results import (
    StageRecords,
    StageResult,
    StageTables,
    empty_summary,
    stage_result,
)
from sepc_torch.training.query import BETA, NOVEL_SHARE
from sepc_torch.training.selection import Method
from sepc_torch.training.trust_table import TrustTable

# File in `dirpath` through which spawned processes return the head to the main process.
_SNAPSHOT = "monitor.pt"
# Names of the stages in logs, attributes and files.
_SHORT = {"validate": "val", "test": "test", "predict": "predict"}


def pool_numbers(numbers: Mapping[str, float], seconds: float = math.nan) -> dict[str, float]:
    """Summary statistics of the pool under their logged names, without the accuracies, which need labels."""
    named = {f"pool_{name}": value for name, value in numbers.items() if not name.startswith("acc_")}
    return {**named, "pool_seconds": seconds}


class MonitorCore:
    """State and methods of a monitor, without Lightning's hooks; see ``TrustMonitor`` for the arguments."""

    log_dict: Any  # set by the Trainer

    def __init__(
        self,
        embed: Source,
        *,
        head: Head | None = None,
        fit: Mapping[str, Any] | Callable[[Tensor, Tensor], Head] | None = None,
        refit_every_n_epochs: int = 1,
        fit_data: Any = None,
        max_fit_per_class: int | None = 2000,
        pool: Any = None,
        max_pool: int | None = None,
        threshold: float | None = settings.UNSET_THRESHOLD,
        flag_fraction: float | None = None,
        reasons: Collection[str] = Criteria.reasons,
        min_margin: float = Criteria.min_margin,
        novel_distance: float = Criteria.novel_distance,
        inputs: Callable[[Any], Any] | None = None,
        labels: Callable[[Any], Any] | None = None,
        ids: Callable[[Any], Any] | str | None = None,
        logits: Source | None = None,
        stages: Collection[str] = settings.STAGES,
        dirpath: str | os.PathLike[str] | None = None,
        file_format: str = "csv",
        on_flag: Callable[[Any, str, TrustTable], None] | None = None,
        prefix: str = "trust",
        refit_errors: str = "warn",
    ) -> None:
        settings.check_source("embed", embed)
        settings.check_head(head)
        settings.check_fit(fit)
        settings.check_functions(inputs=inputs, labels=labels, on_flag=on_flag)
        settings.check_ids(ids)
        settings.check_data("fit_data", fit_data, (DataLoader,), "an indexable data set, a loader")
        settings.check_data("pool", pool, (DataLoader, LabelPool), "a LabelPool, an indexable data set, a loader")
        self.criteria = settings.criteria(
            threshold, flag_fraction, reasons, min_margin=min_margin, novel_distance=novel_distance
        )
        if logits is not None:
            settings.check_source("logits", logits)
        elif "disagrees" in self.criteria.reasons:
            raise MisconfigurationException(
                "The reason 'disagrees' compares the network's labels with the head's, so it needs the logits: "
                "TrustMonitor(..., logits='classifier')."
            )
        self.refit_every_n_epochs = settings.check_count("refit_every_n_epochs", refit_every_n_epochs, 0)
        self.max_fit_per_class = settings.check_optional_count("max_fit_per_class", max_fit_per_class, 1)
        self.max_pool = settings.check_optional_count("max_pool", max_pool, 1)
        self.stages = settings.check_stages(stages)
        self.file_format = settings.check_choice("file_format", file_format, settings.FORMATS)
        self.refit_errors = settings.check_choice("refit_errors", refit_errors, settings.POLICIES)
        self.dirpath: Path | None = settings.check_folder(dirpath)
        self.fit_data = fit_data
        self.pool = pool
        self.prefix = settings.check_prefix(prefix)
        self.flagged, self.scores = StageTables(), StageTables()
        self.disjuncts: tuple[SmallDisjunct, ...] = ()
        self._functions = Functions(inputs, labels, ids, fit, on_flag)
        self._captures = {"emb": Capture(embed, "embed", prefix)}
        if logits is not None:
            self._captures["logits"] = Capture(logits, "logits", prefix)
        self._head_state = HeadState(head)
        self._pool_scores = PoolScores()
        self._records = StageRecords(self._captures, self._functions)
        self._pending: dict[str, float] = {}
        self._pool_numbers = pool_numbers(empty_summary())
        self._augmentation_checked = False
        self._tried_step = -1

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

    def query(
        self, k: int, *, method: Method = "kmeans", beta: float = BETA, novel_share: float = NOVEL_SHARE
    ) -> list[int]:
        """Ids of k samples of the pool to label next: ambiguous samples, spread out, and a few novel ones.

        The result is equal on every process. With ``logits`` the ambiguity comes from the network, otherwise from the
        head. The network's ambiguity selects better while labels are few (``experiments/active_learning.py``, digits
        with a trained network and at most 20 labels per class). Samples that a ``LabelPool`` has labelled since the
        last scores are left out. See :func:`~sepc_torch.training.choose` for the arguments.
        """
        k = count(k, "k", least=1)
        rows = self._pool_scores.unlabelled()
        if rows is None:
            raise MisconfigurationException(
                "There are no scores of a pool to choose from. Pass TrustMonitor(pool=...) or a data module with "
                "pool_dataloader(), then fit: the pool is scored after every refit."
            )
        if not rows or len(rows["id"]) == 0:
            return []
        if k > len(rows["id"]):
            warnings.warn(f"The pool has {len(rows['id'])} samples, fewer than the {k} requested.", stacklevel=2)
        judged = Judged(**{name: rows[name] for name in Judged._fields})
        candidates = Candidates.of(judged, rows["emb"], rows.get("logits"), self.criteria.novel_distance)
        labelled = self._head_state.rows.get("emb")
        chosen = choose(candidates, k, labelled, method=method, beta=beta, novel_share=novel_share)
        return rows["id"][chosen].tolist()

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
        every, epoch, step = self.refit_every_n_epochs, int(trainer.current_epoch), int(trainer.global_step)
        if not every or step == self._tried_step:
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
        if first or (epoch + 1) % every == 0 or epoch + 1 == trainer.max_epochs or self.disjuncts:
            self._refit(trainer, module)

    def _refit(self, trainer: Any, module: Any) -> None:
        """Refit the head to the current weights, score the pool, and write the head to ``dirpath``."""
        self._tried_step = int(trainer.global_step)
        self._attach(module)
        samples = fit_samples(trainer, self.fit_data, find_label_pool(trainer, module, self.pool))
        self._check_augmentation(trainer, module, samples.dataset)
        functions = self._functions
        rows = fit_rows(
            trainer,
            module,
            samples,
            self._captures["emb"],
            functions.inputs,
            functions.labels,
            self.max_fit_per_class,
        )
        fitted = self._head_state.refit(trainer, module, rows, functions.fit, stop=self.refit_errors == "raise")
        self._pending |= self._refit_numbers()
        if fitted:
            self._score_pool(trainer, module)
            if self.dirpath is not None and not trainer.fast_dev_run:
                on_rank_zero(trainer, f"writing to {self.dirpath}", self._write_snapshot)

    def _refit_numbers(self) -> dict[str, float]:
        """Refit statistics to log."""
        state = self._head_state
        return {
            "refits": float(state.refits),
            "refit_failures": float(state.failures),
            "refit_seconds": state.seconds,
            "small_disjuncts": float(len(self.disjuncts)),
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
        rows = self._pool_scores.score(
            trainer,
            module,
            source,
            head,
            self._captures,
            self._functions.inputs,
            self.max_pool,
            find_label_pool(trainer, module, self.pool),
        )
        found = stage_result(rows, [], head, self.criteria, "logits" in self._captures)
        self._publish(trainer, "pool", found)
        self._pool_numbers = pool_numbers(found.numbers, self._pool_scores.seconds)
        self._pending |= self._pool_numbers

    def _begin(self, trainer: Any, module: Any, stage: str, loaders: Any) -> None:
        """Begin to record a stage; outside of training, check that there is a head and that it fits the weights."""
        self._attach(module)
        if stage not in self.stages:
            return
        self._records.begin(loaders)
        if trainer.state.fn == "fit":
            return
        if self.head is None:
            self._read_snapshot()
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
                "the head and the weights from one checkpoint (ckpt_path=...).",
                stacklevel=2,
            )

    def _judge(self, trainer: Any, module: Any, stage: str, batch: Any, batch_idx: int, loader: int) -> None:
        """Evaluate the head on a batch and record its rows."""
        if self.head is None or stage not in self.stages or trainer.sanity_checking:
            self._records.clear()
            return
        with trainer.precision_plugin.forward_context():  # for embed= and logits= functions that run the module
            self._records.add(self._head_state.on(module.device), module, batch, batch_idx, loader)

    def _conclude(self, trainer: Any, module: Any, stage: str) -> dict[str, float]:
        """Publish the results of a stage and return the numbers to log, always under the same names.

        A callback that monitors a name fails if the name is missing, so undefined numbers are logged as NaN.
        """
        fitting = trainer.state.fn == "fit"
        if trainer.sanity_checking or not (fitting or stage in self.stages):
            return {}
        numbers: dict[str, float] = {}
        many = len(self._records.recorders)
        names = [_SHORT[stage]] if many == 1 else [f"{_SHORT[stage]}_{number}" for number in range(many)]
        if stage not in self.stages:
            pass  # nothing was recorded; refit statistics are still logged
        elif self.head is None:
            numbers |= {f"{name}_{key}": value for name in names for key, value in empty_summary().items()}
        else:
            for name, each in zip(names, self._records.finish(trainer, self.head, self.criteria), strict=True):
                numbers |= self._publish(trainer, name, each)
        if fitting:
            age = int(trainer.global_step) - self.fit_step
            numbers["partition_age_steps"] = float(age) if self.fit_step >= 0 else math.nan
            numbers |= self._refit_numbers()
            if has_pool(trainer, module, self.pool):
                numbers |= self._pool_numbers
        return numbers | {"n_ellipsoids": float(self._n_ellipsoids)}

    @property
    def _n_ellipsoids(self) -> int:
        """Number of ellipsoids of the head; 0 without a head."""
        head = self.head
        return 0 if head is None else len(head.bank if isinstance(head, SEPC) else head.sepc.bank)

    def _publish(self, trainer: Any, name: str, found: StageResult) -> dict[str, float]:
        """Store the tables, write them to files, call ``on_flag``, and return the numbers by their logged names."""
        flagged = found.table.where(found.table.columns["reason"] >= 0)
        self.scores[name], self.flagged[name] = found.table, flagged
        if self.dirpath is not None and not trainer.fast_dev_run:
            on_rank_zero(trainer, f"writing to {self.dirpath}", lambda: self._write(trainer, name, flagged))
        on_flag = self._functions.on_flag
        if on_flag is not None:
            on_rank_zero(trainer, "on_flag", lambda: on_flag(trainer, name, flagged))
        return {f"{name}_{key}": value for key, value in found.numbers.items()}

    def _write(self, trainer: Any, name: str, flagged: TrustTable) -> None:
        """Write the table of flagged samples to ``dirpath``."""
        # Outside of training Lightning's counters are 0, so all files would have one name.
        fitting = trainer.state.fn == "fit"
        epoch = int(trainer.current_epoch) if fitting else self.fit_epoch
        step = int(trainer.global_step) if fitting else self.fit_step
        when = f"-epoch={epoch}-step={step}" if epoch >= 0 else ""  # -1 for a head given by the user
        path = self._folder() / f"{name}{when}.{self.file_format}"
        if self.file_format == "csv":
            flagged.to_csv(path)
        else:
            flagged.to_jsonl(path)

    def _folder(self) -> Path:
        """The output folder, created if necessary."""
        assert self.dirpath is not None
        self.dirpath.mkdir(parents=True, exist_ok=True)
        return self.dirpath

    def _write_snapshot(self) -> None:
        with files.replacing(self._folder() / _SNAPSHOT) as temporary:
            torch.save(self.state_dict(), temporary)

    def _read_snapshot(self) -> None:
        if self.dirpath is not None and (self.dirpath / _SNAPSHOT).is_file():
            self.load_state_dict(torch.load(self.dirpath / _SNAPSHOT, weights_only=True))

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
