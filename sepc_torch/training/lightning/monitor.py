"""The callback ``TrustMonitor``: refits, calibration, recording of stages, queries, logging and checkpoints."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sepc_torch.data import files
from sepc_torch.data.options import check_count
from sepc_torch.data.warn import warn_user
from sepc_torch.head.drift import DriftReport
from sepc_torch.head.network import Places
from sepc_torch.head.promises.conformal import check_share
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.model.sepc import SEPC
from sepc_torch.partitioning.landscape import SmallDisjunct
from sepc_torch.training.callbacks import FitSample, StageResult, fingerprint, same_weights, stage_result
from sepc_torch.training.flags import (
    Rows,
    as_trust_head,
    calibrated_copy,
    class_count,
    is_calibrated,
    logged_names,
    no_numbers,
    pool_numbers,
)
from sepc_torch.training.lightning.batches import RankZeroError, batch_ids, loader_list, on_rank_zero, positions_of
from sepc_torch.training.lightning.hooks import AUTO, Capture, Captures, LogitsFinder, Source
from sepc_torch.training.lightning.inference_pass import Pass, active_pass
from sepc_torch.training.lightning.pages import figure_loggers, file_stem, log_figures, write_page
from sepc_torch.training.lightning.pooling import PoolScores
from sepc_torch.training.lightning.refitting import (
    calibration_rows,
    find_last_layer,
    fit_head,
    fit_rows,
    fit_samples,
    head_bytes,
    head_from_bytes,
    is_augmented,
)
from sepc_torch.training.lightning.schedule import Schedule, is_last
from sepc_torch.training.lightning.settings import (
    CallbackBase,
    Functions,
    MisconfigurationException,
    check_data,
    check_fit,
    check_folder,
    check_functions,
    check_report,
    check_sources,
    configuring,
    require,
    say,
)
from sepc_torch.training.lightning.stage_results import (
    PredictionStream,
    Recorder,
    accepted_and_right,
    batch_columns,
    checked_logits,
)
from sepc_torch.training.query import BETA, METHOD, NOVEL_SHARE, Candidates, Stop, choose, stopping_rule
from sepc_torch.training.selection import Method
from sepc_torch.training.subsets import sample_per_class
from sepc_torch.training.trust_table import TrustTable

# Strategies that shard the weights over the processes.
_SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")
# Largest number of samples of a pool to score after a refit; a larger pool gives a different subset after each refit.
_MOST_POOL = 50_000
# Samples of a class to fit to, by default.
_MOST_PER_CLASS = 100
# Share of ``max_per_class`` that the first of several fits uses, one over this number: a fit to 25 instead of 100
# samples of each of 10 classes takes half of the time.
_FIRST_PART = 4
# File of the state in `dirpath`.
_SNAPSHOT = "monitor.pt"


class TrustMonitor(CallbackBase):
    r"""Callback that tells which of a network's labels to trust, in validation, test and prediction.

    ::

        monitor = TrustMonitor()
        trainer = Trainer(callbacks=[monitor])
        trainer.fit(model, train_loader, val_loader)         # fits and calibrates a head while the network trains
        print(monitor.flagged["val"])                        # id, joint, network_label, reason, ...

    A head is fitted to a sample of the training data and calibrated on half of the validation samples, chosen by their
    ids. It judges the labels of the network, whose logits the monitor finds itself. Samples whose joint score is below
    the calibrated threshold are flagged, with the reason: ``novel``, ``disagrees``, ``ambiguous``, ``no
    promise`` or ``no prediction``. Every checkpoint holds the head. With fewer than 20 labelled samples to calibrate
    with, the least safe share ``flag_rate`` is flagged, without a promise.

    ``flagged`` and ``scores`` hold tables by stage, the least safe samples first: ``"val"``, ``"test"``, ``"predict"``,
    ``"pool"``; with several loaders ``"val_0"`` and so on. Of several validation loaders the first one calibrates.

    These numbers about the network's labels are logged at every validation that is assessed (see ``max_cost``), and
    other callbacks can monitor them. They are measured on the validation samples that did not calibrate the head
    (``calibrates`` in the table). If no logits are found, they are about the head's labels and are called
    ``trust/head_val_aurc`` and so on:

    - ``trust/val_aurc``: area under the risk-coverage curve; lower is better;
    - ``trust/val_acc_at_80``: accuracy of the 80 % of the labels with the highest joint score;
    - ``trust/val_accepted``, ``trust/val_acc_accepted``: share and accuracy of the accepted labels; the accuracy is 0
      if no label is accepted;
    - ``trust/val_acc``, ``trust/val_n``: accuracy and number of the measured samples;
    - ``trust/val_unknown``, ``trust/val_unknown_accepted``: number of the measured samples of unknown classes (negative
      labels), and the share of them that is accepted; the numbers above, but ``trust/val_n``, leave them out;
    - ``trust/cost``: time of the monitor divided by that of the training.

    A prediction gives the loggers ``trust/drift``, 1 if its samples have drifted from the calibration samples, and
    ``trust/drift_p_value``; an alarm warns, and ``drift`` is the :class:`~sepc_torch.head.drift.DriftReport`. Each
    prediction is a stream of its own, watched in a random order; without drift it raises an alarm with probability at
    most 1 %.

    Numbers of the head itself begin with ``trust/head_``. A number is NaN if it is undefined: without true labels, or
    without a head because the first fit failed.

    Args:
        embed: Name of the submodule whose output is the embedding, or a function (module, batch) -> (B, D). By default
            the embedding is the input of the last linear layer, which is found by tracing some samples, as by
            :class:`~sepc_torch.TrustedModel`; a message says which layer.
        logits: Source of the network's logits, like ``embed``; ``""`` is the module's own ``forward``. By default the
            output of ``forward``, or of the last linear layer in it, if it is (B, C) for C classes; a message says
            which. One column for two classes is the logit of the second. False judges the head's own
            labels. Column c belongs to label c, so the labels must be 0 to C - 1.
        head: An :class:`~sepc_torch.SEPC` or :class:`~sepc_torch.TrustHead` to start with; None to fit one in training.
            Training replaces it at the first refit; to keep the given head, pass ``refit_every_n_epochs=0``.
        fit: Options of ``TrustHead.fit`` as a dictionary, or a function (embeddings, labels) -> head. At most
            ``max_per_class`` samples of each class are read and fitted to, 100 by default and all for None; for a
            function the attribute ``max_per_class`` says how many. The first refit reads 5000 to 50 000 samples of the
            data set to find them and, with a limit of the cost, uses a quarter of them unless it is also the last.
        fit_data: Data set or loader to fit to, without augmentation. By default the labelled samples of the pool, else
            the training data set, read in order by a separate loader.
        calibrate: Data set or loader to calibrate with, instead of half of the validation samples. Neither the network
            nor the head may be fitted on it.
        flag_rate: Share of samples like the calibration samples that may be flagged, on average.
        risk: Instead of ``flag_rate``, the allowed share of wrong labels among the accepted ones; see
            :meth:`TrustHead.accept_at`.
        refit_every_n_epochs: Refit after every n epochs, after the last epoch, and before a validation without a head.
            0 disables refits.
        max_cost: Largest share of the training's time that the monitor may take; None for no limit. The last validation
            is always assessed (refit, calibration, judging). Others are assessed, and refit, if the time pays for it
            and for the last one; which they are depends on the clock. The first one does not wait if the last one may
            come unforeseen (a callback monitors a number, or steps or time are limited). A validation that is not
            assessed logs only ``trust/cost``. There is no limit for queries, and for assessments whose numbers a
            callback or a learning-rate schedule monitors.
        pool: Unlabelled samples for :meth:`query`: a :class:`~sepc_torch.training.LabelPool`, a data set or a loader;
            by default ``pool_dataloader()`` of the data module or the module. They are scored at the end of a fit, by a
            query during the fit, and after every refit if a callback monitors a number of the pool.
        inputs: From a batch to the argument of the module's ``forward``, for passes over data outside Lightning's
            loops; by default the first entry of the batch. A tuple gives several arguments, a dictionary named ones.
            Return ``(batch,)`` to pass one dictionary.
        labels: From a batch to its labels (B,), or None; by default the second entry of the batch.
        ids: From a batch to the ids of its samples, or a key of the batch. By default the positions in the loader's
            data set.
        dirpath: Folder for one CSV file per stage and refit, and for the head.
        report: Whether to write a report (:func:`~sepc_torch.write_report`) of every assessed stage to ``dirpath``,
            which links those of earlier epochs, and to give its figures to TensorBoard and CSV loggers.
        on_flag: Called on the main process with (trainer, stage, table of flagged samples).
        prefix: Prefix of the logged names; two monitors need different prefixes.

    Attributes:
        flagged, scores: Tables by stage.
        disjuncts: Regions with more confirmed mistakes than tolerated, at the last refit.
        drift: Report on the samples of the last prediction; None before, and if the head is not calibrated.
        head: The head in use; None before the first fit. An SEPC is part of a head that projects nothing.
        fit_epoch, fit_step: Epoch and global step of the head's last fit; -1 for a head given by the user.
        n_refits: Number of successful fits.
        cost: Time that the monitor takes.
        max_per_class: Fit to at most this number of samples per class; None for all.
        max_pool: Score at most this number of samples of the pool; None for all.
    """

    log_dict: Any  # set by the Trainer

    def __init__(
        self,
        embed: Source = AUTO,
        *,
        logits: Source | bool | None = None,
        head: SEPC | TrustHead | None = None,
        fit: Mapping[str, Any] | Callable[[Tensor, Tensor], SEPC | TrustHead] | None = None,
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
    ) -> None:
        check_sources(embed=embed, **({} if logits is None or logits is False else {"logits": logits}))
        check_functions(inputs=inputs, labels=labels, on_flag=on_flag)
        check_data("", fit_data=fit_data, calibrate=calibrate)
        check_data("a LabelPool, ", pool=pool)
        check_fit(fit)
        require(
            head is None or isinstance(head, (SEPC, TrustHead)),
            f"head must be an SEPC or a TrustHead, or None to fit one while training; got a {type(head).__name__}.",
        )
        require(
            ids is None or isinstance(ids, str) or callable(ids),
            f"ids must be a function from a batch to ids, the key of a batch, or None; got {ids!r}.",
        )
        share: Any = max_cost
        require(
            share is None or (isinstance(share, Real) and float(share) > 0.0),
            f"max_cost must be a number above 0, or None for no limit; got {max_cost!r}.",
        )
        require(
            isinstance(prefix, str) and bool(prefix),
            f"prefix must be a non-empty string, such as 'trust'; got {prefix!r}.",
        )
        limit = fit.get("max_per_class", "auto") if isinstance(fit, Mapping) else "auto"
        with configuring():
            self.flag_rate = check_share(flag_rate, "flag_rate")
            self.risk = None if risk is None else check_share(risk, "risk")
            every = check_count(refit_every_n_epochs, "refit_every_n_epochs", 0)
            limit = _MOST_PER_CLASS if limit == "auto" else limit
            self.max_per_class = None if limit is None else check_count(limit, "max_per_class", 1)
        self.dirpath, self.report, self.prefix = check_folder(dirpath), check_report(report), prefix
        self.fit_data, self.calibrate, self.pool = fit_data, calibrate, pool
        self.max_pool: int | None = _MOST_POOL
        self.flagged, self.scores = dict[str, TrustTable](), dict[str, TrustTable]()
        self.disjuncts: tuple[SmallDisjunct, ...] = ()
        self.drift: DriftReport | None = None
        self.head = None if head is None else as_trust_head(head)
        self.fit_epoch, self.fit_step, self.n_refits = -1, -1, 0
        self._schedule = Schedule(every, None if max_cost is None else float(max_cost))
        self.cost = self._schedule.cost
        self._functions = Functions(inputs, labels, ids, fit, on_flag)
        self._captures: Captures = {"emb": Capture(embed, "embed", prefix)}
        if logits is None:
            self._captures["logits"] = LogitsFinder(prefix)
        elif not isinstance(logits, bool):
            self._captures["logits"] = Capture(logits, "logits", prefix)
        self._places: Places | None = None  # the last linear layer of the module
        self._attached = False  # whether the layer was looked for in this run
        self._failures = 0  # fits that failed
        self._weights: Tensor | None = None  # fingerprint of the weights that the head belongs to
        self._fit_rows: Rows = {}  # embeddings and labels of the last fit
        self._fit_sample, self._pool_scores = FitSample(), PoolScores()
        self._recorders: list[Recorder] = []
        self._found_logits = False  # whether the last batch had logits
        self._stream: PredictionStream | None = None
        self._pending, self._pool_numbers = dict[str, float](), dict[str, float]()
        self._said = set[str]()  # messages that are given once
        self._fitting: tuple[Any, Any] | None = None  # Trainer and module while a fit runs

    def query(
        self, k: int, *, method: Method = METHOD, beta: float = BETA, novel_share: float = NOVEL_SHARE
    ) -> list[int]:
        """Ids of k samples of the pool to label next: ambiguous samples, spread out, and a few novel ones.

        The most ambiguous samples are clustered, and each cluster gives its most ambiguous one. Ambiguity comes from
        the network's logits if they are found, otherwise from the head. The network's ambiguity selects better while
        labels are few (``experiments/labels``, digits with a trained network and at most 20 labels per
        class). Novelty comes from the p-values of a calibrated head, otherwise from the distance to its ellipsoids.
        Samples that a ``LabelPool`` has labelled since the last scores are left out. The result is equal on every
        process. During a fit, in a callback, the query refits the head and scores the pool with the current weights, so
        every process must call it. See :func:`~sepc_torch.training.choose` for the arguments.
        """
        k = check_count(k, "k", least=1)
        self._refresh_pool()
        rows = self._pool_scores.unlabelled()
        if rows is None:
            raise MisconfigurationException(
                "There are no scores of a pool to choose from. Pass TrustMonitor(pool=...) or a data module with "
                "pool_dataloader(), then fit: the pool is scored when the fit ends, or by a query during the fit. A "
                "fit that is interrupted or has no head gives no scores."
            )
        if not rows or len(rows["id"]) == 0:
            return []
        if k > len(rows["id"]):
            warn_user(f"The pool has {len(rows['id'])} samples, fewer than the {k} requested.")
        if "logits" in rows and self._pool_scores.head is not None:
            rows = {**rows, "logits": checked_logits(self._pool_scores.head, rows["logits"])}
        labelled = self._fit_rows.get("emb")
        chosen = choose(Candidates.of(rows), k, labelled, method=method, beta=beta, novel_share=novel_share)
        return rows["id"][chosen].tolist()

    def stop_at(self, *, error: float, delta: float = 0.05) -> Stop:
        """Whether the labels that the head accepts in the rest of the pool have at most this share of mistakes.

        The bound comes from the validation samples that the head was not calibrated on, so it holds for a pool drawn
        like them; an accepted sample of an unknown class (a negative label) is a mistake. See
        :func:`~sepc_torch.training.query.stopping_rule`.

        Args:
            error: The allowed share of wrong labels among the accepted ones.
            delta: The allowed probability that the bound fails.
        """
        table = next((self.scores[name] for name in ("val", "val_0") if name in self.scores), None)
        if table is None or "target" not in table.columns:
            raise MisconfigurationException(
                "There are no labelled validation samples to bound the error with. Fit with a validation loader that "
                "has labels."
            )
        return stopping_rule(*accepted_and_right(table), error, delta)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: the head and the step of its fit, as tensors and plain values."""
        state: dict[str, Any] = {
            "fit_epoch": self.fit_epoch,
            "fit_step": self.fit_step,
            "refits": self.n_refits,
            "failures": self._failures,
        }
        if self.head is not None:
            state["head"] = head_bytes(self.head)
        if self._weights is not None:
            state["weights"] = self._weights.clone()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the head of a checkpoint; the tables of earlier stages, and without a head the current one, stay."""
        self.fit_epoch, self.fit_step = int(state_dict["fit_epoch"]), int(state_dict["fit_step"])
        self.n_refits, self._failures = int(state_dict["refits"]), int(state_dict["failures"])
        if "head" in state_dict:
            self.head = head_from_bytes(state_dict["head"])
            self._weights = state_dict["weights"].clone() if "weights" in state_dict else None
        self._fit_rows = {}

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling, without the Trainer's logging functions, which hold a reference to the module."""
        kept = {name: value for name, value in self.__dict__.items() if name not in ("log", "log_dict")}
        return {**kept, "_fit_rows": {}, "_recorders": [], "_fitting": None, "_attached": False}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Reject strategies that shard the weights, and broadcast the output folder."""
        strategy = type(trainer.strategy).__name__
        if strategy in _SHARDED:
            raise MisconfigurationException(
                f"TrustMonitor runs the whole module in each process, but {strategy} shards its weights. Use "
                "strategy='ddp', or apply the head to saved embeddings."
            )
        if self.report and self.dirpath is None and not figure_loggers(trainer.loggers):
            raise MisconfigurationException(
                "report=True has nowhere to write to. Pass TrustMonitor(dirpath=...) for reports, or a TensorBoard or "
                "CSV logger to the Trainer for figures."
            )
        if self.dirpath is not None:
            self.dirpath = Path(trainer.strategy.broadcast(str(self.dirpath)))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Reset the state of an earlier run."""
        self._pool_numbers = {}
        self._pool_scores.find(trainer, pl_module, self.pool)
        self._schedule.start(trainer, self.prefix)
        self._fitting = trainer, pl_module

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Register the forward hooks before the module first runs, unless a validation did."""
        with self.cost.paying():
            self._attach(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Discard captured values."""
        self._clear()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Discard the values captured in the training step."""
        self._clear()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Refit, unless a validation refitted to these weights already."""
        with self.cost.paying():
            self._maybe_refit(trainer, pl_module)
            self._log(trainer, self._pending)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Refit to the last weights, also after an early stop."""
        if self._schedule.every and self._schedule.tried_step != int(trainer.global_step):
            self._refit(trainer, pl_module)
            self._log(trainer, self._pending, directly=True)
        self._schedule.stop(trainer, self.n_refits, self._pool_scores.exists)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Score the pool for the next query, if the last weights did not: a stop may come unforeseen."""
        if self.head is not None and self._pool_scores.step != int(trainer.global_step):
            self._score_pool(trainer, pl_module)
            self._log(trainer, self._pending, directly=True)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to record the stage."""
        with self.cost.paying():
            self._begin(trainer, pl_module, trainer.val_dataloaders)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to record the stage."""
        self._begin(trainer, pl_module, trainer.test_dataloaders)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to record the stage."""
        self._begin(trainer, pl_module, trainer.predict_dataloaders)
        self.drift = None
        self._stream = PredictionStream(trainer, self.head, self._has_network)
        for recorder in self._recorders:
            recorder.seen = self._stream.add

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Refit and calibrate before the first batch: by now averaged weights, if any, replace the module's own."""
        self._clear()
        if trainer.sanity_checking or batch_idx or dataloader_idx:
            return
        with self.cost.paying():
            self._open_validation(trainer, pl_module)
        self._clear()

    def on_test_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Discard values captured before the batch."""
        self._clear()

    on_predict_batch_start = on_test_batch_start

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Evaluate the head on the batch."""
        with self.cost.paying():
            self._judge(trainer, pl_module, batch, batch_idx, dataloader_idx)

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Evaluate the head on the batch."""
        self._judge(trainer, pl_module, batch, batch_idx, dataloader_idx)

    on_predict_batch_end = on_test_batch_end

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Publish the results and log their numbers, which other callbacks can monitor."""
        with self.cost.paying():
            numbers = self._conclude(trainer, pl_module, "val")
            self._log(trainer, numbers | self._pending)
        self._schedule.concluded()

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Publish the results and log their numbers."""
        self._log(trainer, self._conclude(trainer, pl_module, "test"))

    def on_predict_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Publish the results and log their numbers to the loggers, because Lightning does not log in prediction."""
        self._log(trainer, self._conclude(trainer, pl_module, "predict"), directly=True)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Remove the forward hooks and the references to the Trainer and the module."""
        self._detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove the forward hooks and the references to the Trainer and the module."""
        self._detach()

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint; monitors with different prefixes have different keys."""
        return self._generate_state_key(prefix=self.prefix)

    def _attach(self, trainer: Any, module: Any) -> None:
        """Register the forward hooks, unless they are registered already; find the last linear layer before."""
        if not self._attached:
            self._places, self._attached = self._find_places(trainer, module), True
        for capture in self._captures.values():
            capture.attach(module, self._places)

    def _find_places(self, trainer: Any, module: Any) -> Places | None:
        """The last linear layer of the module; None if it is not needed or if only the search for logits needs it."""
        needed = self._captures["emb"].source == AUTO
        if not needed and not isinstance(self._captures.get("logits"), LogitsFinder):
            return None
        with warnings.catch_warnings():
            if not needed:
                warnings.filterwarnings("ignore", "The logits are not the output")
            try:
                found = find_last_layer(self._pass(trainer, module), self.fit_data)
            except Exception as error:
                if not needed:
                    return None
                raise MisconfigurationException(
                    f"TrustMonitor: the last linear layer of the module was not found. {error} Or name the submodule "
                    "whose output is the embedding: TrustMonitor('backbone')."
                ) from error
        if needed and "embedding" not in self._said:
            self._said.add("embedding")
            say(trainer, f"the embedding is the input of the submodule {found.last!r}; embed= decides otherwise.")
        return found

    def _detach(self) -> None:
        self._fitting, self._places, self._attached = None, None, False
        for capture in self._captures.values():
            capture.detach()

    def _clear(self) -> None:
        """Discard the captured values."""
        for capture in self._captures.values():
            capture.clear()

    def _pass(self, trainer: Any, module: Any) -> Pass:
        return Pass(trainer, module, self._captures, self._functions)

    def _maybe_refit(self, trainer: Any, module: Any, *, first: bool = False) -> None:
        """Refit if the schedule says so or too many new labels contradict the head; at most once per global step.

        ``first`` ignores the schedule, because there is no head to validate with; 0 still disables refits.
        """
        plan, epoch, step = self._schedule, int(trainer.current_epoch), int(trainer.global_step)
        if not plan.every or step in (plan.tried_step, plan.skipped_step):
            return
        self.disjuncts = self._pool_scores.disjuncts()
        if self.disjuncts and trainer.is_global_zero:
            worst = self.disjuncts[0]
            warn_user(
                f"Regions with more confirmed mistakes than tolerated: {len(self.disjuncts)}. In the worst region, "
                f"{len(worst.rows)} samples predicted as {worst.predicted} are mostly {worst.true[0]}. The head is "
                "refitted.",
            )
        if first or is_last(trainer) or self.disjuncts:
            self._refit(trainer, module)
        elif (epoch + 1) % plan.every == 0:
            if plan.affords_refit(trainer):
                self._refit(trainer, module)
            else:
                plan.skipped_step = step

    def _refit(self, trainer: Any, module: Any, *, query: bool = False) -> None:
        """Refit the head to the current weights, calibrate it, and write it to ``dirpath``.

        The last refit scores the pool. ``query`` says that a query needs the head.
        """
        last = is_last(trainer)
        # The head of a network that has just begun to learn is soon replaced.
        quick = self._schedule.bounded and self.head is None and not last and not query
        part = _FIRST_PART if quick and self.max_per_class is not None else 1
        with self._schedule.refitting(int(trainer.global_step), part):
            self._attach(trainer, module)
            samples = fit_samples(trainer, self.fit_data, self._pool_scores.label_pool)
            self._check_augmentation(trainer, module, samples.dataset)
            rows = fit_rows(self._pass(trainer, module), samples, self.max_per_class, self._fit_sample)
            if part > 1 and self.max_per_class is not None:
                few = sample_per_class(rows["id"], rows["target"], max(self.max_per_class // part, 1))
                rows = {name: column[few] for name, column in rows.items()}
            with self._schedule.fitting():
                fitted = self._fit(trainer, module, rows)
            if fitted:
                self._calibrate(trainer, module)
                self._pool_scores.discard()
                if last or self._schedule.scores_pool:
                    self._score_pool(trainer, module)
                if self.dirpath is not None and not trainer.fast_dev_run:
                    on_rank_zero(trainer, f"writing to {self.dirpath}", self._write_state)
        self._pending |= self._refit_numbers()

    def _fit(self, trainer: Any, module: Any, rows: Rows) -> bool:
        """Fit a head to rows and return whether this succeeded; if it fails, keep the previous head and warn."""
        try:
            self.head = fit_head(trainer, rows, self._functions.fit)  # on the CPU; `_head_on` moves it
        except RankZeroError as error:
            self._failures += 1
            kept = "the previous head stays in use" if self.head is not None else "there is no head yet"
            if trainer.is_global_zero:
                warn_user(f"{error} Training continues; {kept}.")
            return False
        self.fit_epoch, self.fit_step = int(trainer.current_epoch), int(trainer.global_step)
        self.n_refits += 1
        self._fit_rows, self._weights = rows, fingerprint(module)
        return True

    def _head_on(self, device: torch.device) -> TrustHead:
        """Move the head to a device and return it."""
        assert self.head is not None
        self.head = self.head.to(device)
        return self.head

    def _is_stale(self, module: Any) -> bool:
        """Whether the module's weights differ from those that the head was last fitted to or calibrated with."""
        return self._weights is not None and not same_weights(self._weights, fingerprint(module))

    def _write_state(self) -> None:
        """Write the state to ``dirpath``, through which spawned processes return it to the main process."""
        assert self.dirpath is not None
        self.dirpath.mkdir(parents=True, exist_ok=True)
        with files.replacing(self.dirpath / _SNAPSHOT) as temporary:
            torch.save(self.state_dict(), temporary)

    def _calibrate(self, trainer: Any, module: Any) -> None:
        """Calibrate the head with the current weights, on ``calibrate=`` or half of the validation samples."""
        head = self.head
        if head is None or head.evidence is None:
            return
        self._attach(trainer, module)
        self._expect_classes()
        rows = calibration_rows(self._pass(trainer, module), self.calibrate)
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
                self.head, self._weights = found, fingerprint(module)
        self._say_once(trainer)

    def _say_once(self, trainer: Any) -> None:
        """Say which labels are judged, and warn if the head is not calibrated, once for each."""
        finder = self._captures.get("logits")
        if isinstance(finder, LogitsFinder) and finder.looked and "labels" not in self._said:
            self._said.add("labels")
            say(trainer, finder.finding)
        if not is_calibrated(self.head, self._has_network) and "calibration" not in self._said:
            self._said.add("calibration")
            missing = self.calibrate is None and not loader_list(trainer.val_dataloaders)
            why = "there is no validation loader" if missing else "fewer than 20 labelled samples can be used"
            what = "Validate on labelled samples" if missing else "Validate on more labelled samples"
            if trainer.is_global_zero:
                warn_user(
                    f"TrustMonitor: the head is not calibrated, because {why}; flags promise no rate. {what}, or pass "
                    "calibrate=.",
                )

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
        return {
            "head_refits": float(self.n_refits),
            "head_refit_failures": float(self._failures),
            "head_small_disjuncts": float(len(self.disjuncts)),
            "cost": self.cost.share(),
        }

    def _check_augmentation(self, trainer: Any, module: Any, dataset: Any) -> None:
        """Warn once if the fit data are augmented."""
        if "augmentation" in self._said:
            return
        self._said.add("augmentation")
        if is_augmented(module, dataset) and trainer.is_global_zero:
            warn_user(
                "Two reads of the first fit sample differ: the data seem augmented. Pass the data without "
                "augmentation: TrustMonitor(fit_data=...) or LabelPool(eval_view=...).",
            )

    def _refresh_pool(self) -> None:
        """During a fit, refit the head to the current weights and score the pool, unless this is done."""
        if self._fitting is None or not self._pool_scores.exists:
            return
        (trainer, module), plan = self._fitting, self._schedule
        step = int(trainer.global_step)
        # The head that judges a validation stays until its end; it was calibrated with the same weights.
        judging = trainer.validating and plan.assessing and self.head is not None
        with self.cost.paying():
            if plan.every and not judging and (plan.tried_step != step or self._is_stale(module)):
                self._refit(trainer, module, query=True)
            if self.head is not None and self._pool_scores.step != step:
                self._score_pool(trainer, module)

    def _score_pool(self, trainer: Any, module: Any) -> None:
        """Evaluate the head on the pool and publish the result."""
        if not self._pool_scores.exists:
            return
        self._attach(trainer, module)
        head = self._head_on(module.device)
        self._expect_classes()
        rows = self._pool_scores.score(self._pass(trainer, module), head, self.max_pool)
        found = stage_result(rows, [], head, self.flag_rate, "logits" in rows if rows else self._has_network)
        self._publish(trainer, "pool", found)
        self._pool_numbers = pool_numbers(found.numbers)
        self._pending |= self._pool_numbers

    def _begin(self, trainer: Any, module: Any, loaders: Any) -> None:
        """Begin to record a stage; outside of training, check that there is a head and that it fits the weights."""
        self._attach(trainer, module)
        # If the batches carry no ids, the order of the loaders must be fixed.
        fixed = self._functions.ids is None
        self._recorders = [
            Recorder(positions_of(loader) if fixed else None, self.report) for loader in loader_list(loaders)
        ]
        self._stream = None
        if trainer.state.fn == "fit":
            return
        self._schedule.assessing = True
        if self.head is None and self.dirpath is not None and (self.dirpath / _SNAPSHOT).is_file():
            self.load_state_dict(torch.load(self.dirpath / _SNAPSHOT, weights_only=True))
        if self.head is None:
            raise MisconfigurationException(
                f"There is no head to {trainer.state.fn.value} with. Fit with this monitor first, load a checkpoint of "
                f"a fit (ckpt_path=...) by a monitor of the same prefix (this one has prefix={self.prefix!r}), or pass "
                "TrustMonitor(head=...). If the fit spawns processes, pass dirpath=: they return the head through a "
                "file in this folder."
            )
        if self._is_stale(module) and trainer.is_global_zero:
            warn_user(
                "The head was fitted to different weights than the module's current ones, so trust may be stale. Load "
                "the head and the weights from one checkpoint (ckpt_path=...). A checkpoint of a validation that "
                "max_cost= skipped holds the head of an earlier one.",
            )

    def _open_validation(self, trainer: Any, module: Any) -> None:
        """Refit and calibrate before the first batch, as the schedule decides."""
        plan, step = self._schedule, int(trainer.global_step)
        fitting, first = trainer.state.fn == "fit", self.head is None
        # Labels given since a query may contradict the head, which would then be refitted at once.
        if fitting and self._pool_scores.rows is None and plan.waits(trainer):
            return
        if fitting and (first or trainer.fit_loop.epoch_loop.batch_progress.is_last_batch):
            self._maybe_refit(trainer, module, first=first)
        refitted = plan.tried_step == step
        if fitting and not plan.plan(trainer, refitted=refitted):
            return
        # The weights have changed since the last calibration; a head that the user wants to keep has its own.
        if (fitting and plan.every > 0 and not refitted) or not is_calibrated(self.head, self._has_network):
            self._calibrate(trainer, module)

    def _judge(self, trainer: Any, module: Any, batch: Any, batch_idx: int, loader: int) -> None:
        """Record a batch for the head."""
        if self.head is None or trainer.sanity_checking or not self._schedule.assessing:
            self._clear()
            return
        self._expect_classes()
        head, recorder, ids = self._head_on(module.device), self._recorders[loader], self._functions.ids
        # For embed= and logits= functions that run the module.
        with trainer.precision_plugin.forward_context(), active_pass(self.prefix):
            columns = batch_columns(head, self._captures, self._functions, module, batch)
            self._found_logits = "logits" in columns
            if ids is not None:
                names = batch_ids(batch, ids, len(columns["emb"]))
            else:
                assert recorder.positions is not None
                names = list(recorder.positions(batch_idx))
            recorder.add(head, names, columns)

    def _conclude(self, trainer: Any, module: Any, stage: str) -> dict[str, float]:
        """Publish the results of a stage and return the numbers to log, always under the same names.

        A callback that monitors a name fails if the name is missing, so undefined numbers are logged as NaN. After a
        validation that was not assessed, Lightning still has the last values for callbacks.
        """
        if trainer.sanity_checking:
            return {}
        if not self._schedule.assessing:
            return {"cost": self.cost.share()}
        recorders, self._recorders = self._recorders, []
        for recorder in recorders if self.head is not None else ():
            recorder.flush(self._head_on(module.device))
        if self._stream is not None:
            self.drift = self._stream.report(trainer)
        numbers: dict[str, float] = {}
        for number, recorder in enumerate(recorders):
            name = stage if len(recorders) == 1 else f"{stage}_{number}"
            if self.head is None:
                numbers |= logged_names(name, no_numbers("logits" in self._captures))
                continue
            halved = stage == "val" and number == 0 and self.calibrate is None
            rows, ids = recorder.join(trainer)
            found = stage_result(rows, ids, self.head, self.flag_rate, self._found_logits, halved)
            numbers |= self._publish(trainer, name, found)
            self._say_unknown(trainer, name, found.numbers)
        if trainer.state.fn == "fit":
            age = int(trainer.global_step) - self.fit_step
            numbers["head_age_steps"] = float(age) if self.fit_step >= 0 else math.nan
            numbers |= self._refit_numbers()
            if self._pool_scores.exists:
                numbers |= self._pool_numbers or pool_numbers(no_numbers("logits" in self._captures))
        if self._stream is not None:
            numbers |= self._drift_numbers(trainer)
        return numbers | {"head_ellipsoids": 0.0 if self.head is None else float(len(self.head.sepc.bank))}

    def _say_unknown(self, trainer: Any, name: str, numbers: Mapping[str, float]) -> None:
        """Say once for each stage that samples of unknown classes are counted apart."""
        if numbers["unknown"] > 0 and f"unknown {name}" not in self._said:
            self._said.add(f"unknown {name}")
            say(
                trainer,
                f"{numbers['unknown']:.0f} of {numbers['n']:.0f} samples of {name} have negative labels, which stand "
                f"for unknown classes. They do not count as mistakes: {self.prefix}/{name}_unknown is their number, "
                f"and {self.prefix}/{name}_unknown_accepted the share of them that is accepted.",
            )

    def _drift_numbers(self, trainer: Any) -> dict[str, float]:
        """Drift of the predicted samples as numbers, NaN if it was not watched; an alarm warns."""
        found = self.drift
        if found is None:
            return {"drift": math.nan, "drift_p_value": math.nan}
        if found.alarm and trainer.is_global_zero:
            warn_user(f"{found.sentence} print(monitor.drift) says where.")
        return {"drift": float(found.alarm), "drift_p_value": found.p_value}

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
        if head is None or not is_calibrated(head, "logits" in found.rows) or not found.ids:
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

    def _log(self, trainer: Any, numbers: Mapping[str, float], *, directly: bool = False) -> None:
        """Log numbers and clear the pending ones: on every process, or directly where Lightning forbids ``log``."""
        named = {f"{self.prefix}/{name}": value for name, value in numbers.items()}
        if named and directly and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(dict(named), step=int(trainer.global_step))
        elif named and not directly and not trainer.barebones:
            self.log_dict(named, sync_dist=True)
        self._pending = {}
