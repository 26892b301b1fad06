"""The workings of the monitor: when to refit, what to judge, where results go. The hooks are in ``monitor``."""

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
from sepc_torch.training.lightning.head_state import HeadKeeper
from sepc_torch.training.lightning.hooks import Capture, Source
from sepc_torch.training.lightning.lightning_names import MisconfigurationException
from sepc_torch.training.lightning.pooling import PoolScores, find_pool, has_pool, label_pool
from sepc_torch.training.lightning.refitting import fit_rows, fit_samples, is_augmented
from sepc_torch.training.lightning.settings import Functions
from sepc_torch.training.lightning.stage_results import Found, StageRecords, StageTables, conclude, undefined
from sepc_torch.training.query import BETA, NOVEL_SHARE
from sepc_torch.training.selection import Method
from sepc_torch.training.trust_table import TrustTable

# What spawned processes leave behind for the main one, beside the tables.
_SNAPSHOT = "monitor.pt"
_SHORT = {"validate": "val", "test": "test", "predict": "predict"}


def pool_numbers(numbers: Mapping[str, float], seconds: float = math.nan) -> dict[str, float]:
    """The numbers of the pool by their logged names; it has no labels, and so no accuracy."""
    named = {f"pool_{name}": value for name, value in numbers.items() if not name.startswith("acc_")}
    return {**named, "pool_seconds": seconds}


class MonitorCore:
    """A monitor without hooks."""

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
        settings.check_data("fit_data", fit_data, (DataLoader,), "a data set with a length and an index, a loader,")
        settings.check_data(
            "pool", pool, (DataLoader, LabelPool), "a LabelPool, a data set with a length and an index, a loader,"
        )
        self.criteria = settings.criteria(
            threshold, flag_fraction, reasons, min_margin=min_margin, novel_distance=novel_distance
        )
        if logits is not None:
            settings.check_source("logits", logits)
        elif "disagrees" in self.criteria.reasons:
            raise MisconfigurationException(
                "reasons names 'disagrees', which compares the network's labels with the head's: say where the logits "
                "are, TrustMonitor(..., logits='classifier')."
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
        self._keeper = HeadKeeper(head)
        self._pool_scores = PoolScores()
        self._records = StageRecords(self._captures, self._functions)
        self._pending: dict[str, float] = {}
        self._pool_numbers = pool_numbers(undefined())
        self._augmentation_checked = False
        self._tried_step = -1

    @property
    def head(self) -> Head | None:
        """The head in use, or None before the first fit."""
        return self._keeper.head

    @property
    def fit_epoch(self) -> int:
        """The epoch whose weights the head was fitted to; -1 for a head that was given."""
        return self._keeper.fit_epoch

    @property
    def fit_step(self) -> int:
        """The global step of those weights."""
        return self._keeper.fit_step

    @property
    def n_refits(self) -> int:
        """How often a head was fitted."""
        return self._keeper.refits

    def query(
        self, k: int, *, method: Method = "kmeans", beta: float = BETA, novel_share: float = NOVEL_SHARE
    ) -> list[int]:
        """Ids of k samples of the pool to label next: ambiguous ones, spread out, and a few that are new.

        The same on every process. With ``logits`` the network says what is ambiguous, which is better while labels are
        few: a head of fewer than some twenty samples a class knows little. Samples that a ``LabelPool`` got a label for
        since the last scores are not asked for again. See :func:`~sepc_torch.training.choose`.
        """
        k = count(k, "k", least=1)
        rows = self._pool_scores.waiting()
        if rows is None:
            raise MisconfigurationException(
                "There are no scores of a pool to choose from. Give TrustMonitor(pool=...) or a data module with "
                "pool_dataloader(), and fit; the pool is scored after every refit."
            )
        if not rows or len(rows["id"]) == 0:
            return []
        if k > len(rows["id"]):
            warnings.warn(f"The pool has {len(rows['id'])} samples, fewer than the {k} asked for.", stacklevel=2)
        judged = Judged(**{name: rows[name] for name in Judged._fields})
        candidates = Candidates.of(judged, rows["emb"], rows.get("logits"), self.criteria.novel_distance)
        chosen = choose(candidates, k, self._keeper.rows.get("emb"), method=method, beta=beta, novel_share=novel_share)
        return rows["id"][chosen].tolist()

    def state_dict(self) -> dict[str, Any]:
        """The head, and when it was fitted, in tensors and plain values."""
        return self._keeper.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the head; the tables of earlier calls stay."""
        self._keeper.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """For spawned processes: without what the Trainer attached, which would drag the module along."""
        return {name: value for name, value in self.__dict__.items() if name not in ("log", "log_dict")}

    def _attach(self, module: Any) -> None:
        for capture in self._captures.values():
            capture.attach(module)

    def _detach(self) -> None:
        for capture in self._captures.values():
            capture.detach()

    def _maybe_refit(self, trainer: Any, module: Any, *, first: bool = False) -> None:
        """Refit if this epoch is due, or too many answers contradict the head; once for the same weights.

        ``first`` is to fit without waiting for the end of an epoch, for there is no head to validate with.
        """
        every, epoch, step = self.refit_every_n_epochs, int(trainer.current_epoch), int(trainer.global_step)
        if not every or step == self._tried_step:
            return
        pool = label_pool(trainer, module, self.pool)
        self.disjuncts = () if pool is None else self._pool_scores.disjuncts(pool)
        if self.disjuncts and trainer.is_global_zero:
            worst = self.disjuncts[0]
            warnings.warn(
                f"{len(self.disjuncts)} cells hold more confirmed mistakes than tolerated: {len(worst.rows)} samples "
                f"labelled {worst.predicted} turned out to be mostly {worst.true[0]}. The head is fitted again.",
                stacklevel=2,
            )
        if first or (epoch + 1) % every == 0 or epoch + 1 == trainer.max_epochs or self.disjuncts:
            self._refit(trainer, module)

    def _refit(self, trainer: Any, module: Any) -> None:
        self._tried_step = int(trainer.global_step)
        self._attach(module)
        samples = fit_samples(trainer, self.fit_data, label_pool(trainer, module, self.pool))
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
        keeper = self._keeper
        fitted = keeper.refit(trainer, module, rows, functions.fit, stop=self.refit_errors == "raise")
        self._pending |= self._refit_numbers()
        if fitted:
            self._score_pool(trainer, module)
            if self.dirpath is not None and not trainer.fast_dev_run:
                on_rank_zero(trainer, f"writing to {self.dirpath}", self._write_snapshot)

    def _refit_numbers(self) -> dict[str, float]:
        keeper = self._keeper
        return {
            "refits": float(keeper.refits),
            "refit_failures": float(keeper.failures),
            "refit_seconds": keeper.seconds,
            "small_disjuncts": float(len(self.disjuncts)),
        }

    def _check_augmentation(self, trainer: Any, module: Any, dataset: Any) -> None:
        if self._augmentation_checked:
            return
        self._augmentation_checked = True
        if is_augmented(module, dataset) and trainer.is_global_zero:
            warnings.warn(
                "The data to fit to come out different every time they are read: they seem augmented, and the head "
                "would learn that. Give the plain view: TrustMonitor(fit_data=...) or LabelPool(eval_view=...).",
                stacklevel=2,
            )

    def _score_pool(self, trainer: Any, module: Any) -> None:
        source = find_pool(trainer, module, self.pool)
        if source is None:
            return
        head = self._keeper.on(module.device)
        rows = self._pool_scores.score(
            trainer,
            module,
            source,
            head,
            self._captures,
            self._functions.inputs,
            self.max_pool,
            label_pool(trainer, module, self.pool),
        )
        found = conclude(rows, [], head, self.criteria, "logits" in self._captures)
        self._publish(trainer, "pool", found)
        self._pool_numbers = pool_numbers(found.numbers, self._pool_scores.seconds)
        self._pending |= self._pool_numbers

    def _begin(self, trainer: Any, module: Any, stage: str, loaders: Any) -> None:
        """Begin to record a stage; outside of training there must be a head, of these weights."""
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
                f"There is no head to {stage} with. Fit first with this monitor, load a checkpoint of such a fit "
                f"(ckpt_path=...) by a monitor of the same prefix (this one has prefix={self.prefix!r}), or give "
                "TrustMonitor(head=...). Spawned processes hand it back through dirpath=."
            )
        if self._keeper.is_stale(module) and trainer.is_global_zero:
            warnings.warn(
                "The head was fitted to other weights than the module has now, so trust may be stale. Load both from "
                "one checkpoint (ckpt_path=...).",
                stacklevel=2,
            )

    def _judge(self, trainer: Any, module: Any, stage: str, batch: Any, batch_idx: int, loader: int) -> None:
        if self.head is None or stage not in self.stages or trainer.sanity_checking:
            self._records.clear()
            return
        with trainer.precision_plugin.forward_context():  # for functions that run the module
            self._records.add(self._keeper.on(module.device), module, batch, batch_idx, loader)

    def _conclude(self, trainer: Any, module: Any, stage: str) -> dict[str, float]:
        """Publish what a stage found; the numbers to log, under the same names every time.

        A callback that monitors a name fails where it is missing, so what nothing defines yet is NaN.
        """
        fitting = trainer.state.fn == "fit"
        if trainer.sanity_checking or not (fitting or stage in self.stages):
            return {}
        numbers: dict[str, float] = {}
        many = len(self._records.recorders)
        names = [_SHORT[stage]] if many == 1 else [f"{_SHORT[stage]}_{number}" for number in range(many)]
        if stage not in self.stages:
            pass  # nothing was recorded; when the head was fitted is of interest all the same
        elif self.head is None:
            numbers |= {f"{name}_{key}": value for name in names for key, value in undefined().items()}
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
        head = self.head
        return 0 if head is None else len(head.bank if isinstance(head, SEPC) else head.sepc.bank)

    def _publish(self, trainer: Any, name: str, found: Found) -> dict[str, float]:
        """Tables to attributes, files and the user's function; the numbers by their logged names."""
        flagged = found.table.where(found.table.columns["reason"] >= 0)
        self.scores[name], self.flagged[name] = found.table, flagged
        if self.dirpath is not None and not trainer.fast_dev_run:
            on_rank_zero(trainer, f"writing to {self.dirpath}", lambda: self._write(trainer, name, flagged))
        on_flag = self._functions.on_flag
        if on_flag is not None:
            on_rank_zero(trainer, "on_flag", lambda: on_flag(trainer, name, flagged))
        return {f"{name}_{key}": value for key, value in found.numbers.items()}

    def _write(self, trainer: Any, name: str, flagged: TrustTable) -> None:
        # Outside of training Lightning's counters are 0 and would make every file the same.
        fitting = trainer.state.fn == "fit"
        epoch = int(trainer.current_epoch) if fitting else self.fit_epoch
        step = int(trainer.global_step) if fitting else self.fit_step
        when = f"-epoch={epoch}-step={step}" if epoch >= 0 else ""  # a head that was given has no step
        path = self._folder() / f"{name}{when}.{self.file_format}"
        if self.file_format == "csv":
            flagged.to_csv(path)
        else:
            flagged.to_jsonl(path)

    def _folder(self) -> Path:
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
        """Log by Lightning, the same on every process; what was pending is then done."""
        if numbers and not trainer.barebones:
            self.log_dict({f"{self.prefix}/{name}": value for name, value in numbers.items()}, sync_dist=True)
        self._pending = {}

    def _log_directly(self, trainer: Any, numbers: Mapping[str, float]) -> None:
        """Log where Lightning's own logging is not allowed."""
        if numbers and trainer.is_global_zero:
            for logger in trainer.loggers:
                named = {f"{self.prefix}/{name}": value for name, value in numbers.items()}
                logger.log_metrics(named, step=int(trainer.global_step))
        self._pending = {}
