"""The callback ``TrustMonitor``: queries, and Lightning's hooks for refits, recording, logging and checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from sepc_torch.data.options import count
from sepc_torch.training.lightning.pages import figure_loggers
from sepc_torch.training.lightning.pooling import has_pool
from sepc_torch.training.lightning.settings import CallbackBase, MisconfigurationException
from sepc_torch.training.lightning.stage_results import accepted_and_right, checked_logits
from sepc_torch.training.lightning.stages import StageCore
from sepc_torch.training.query import BETA, METHOD, NOVEL_SHARE, Stop, propose, stopping_rule
from sepc_torch.training.selection import Method

# Strategies that shard the weights over the processes.
_SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


class TrustMonitor(StageCore, CallbackBase):
    r"""Callback that tells which of a network's labels to trust, in validation, test and prediction.

    ::

        monitor = TrustMonitor("backbone")                   # a submodule of your LightningModule
        trainer = Trainer(callbacks=[monitor])
        trainer.fit(model, train_loader, val_loader)         # fits and calibrates a head while the network trains
        print(monitor.flagged["val"])                        # id, joint, network_label, reason, ...

    A head is fitted to a sample of the training data and calibrated on half of the validation samples, chosen by their
    ids. It judges the labels of the network, whose logits the monitor finds itself. Samples whose joint score is below
    the calibrated threshold are flagged, with the reason: ``novel``, ``disagrees``, ``ambiguous``, or ``no
    prediction``. Every checkpoint holds the head. With fewer than 20 labelled samples to calibrate with, the least safe
    share ``flag_rate`` is flagged, without a promise.

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
    - ``trust/cost``: time of the monitor divided by that of the training.

    A prediction gives the loggers ``trust/drift``, 1 if its samples have drifted from the calibration samples, and
    ``trust/drift_p_value``; an alarm warns, and ``drift`` is the :class:`~sepc_torch.head.drift.DriftReport`. Each
    prediction is a stream of its own; without drift it raises an alarm with probability at most 1 %.

    Numbers of the head itself begin with ``trust/head_``. A number is NaN if it is undefined: without true labels, or
    without a head because the first fit failed.

    Args:
        embed: Name of the submodule whose output is the embedding, or a function (module, batch) -> (B, D).
        logits: Source of the network's logits, like ``embed``; ``""`` is the module's own ``forward``. By default the
            output of ``forward``, or of the layer after the embedding layer, if it is (B, C) for C classes; the log
            says which. One column for two classes is the logit of the second. False judges the head's own labels.
            Column c belongs to label c, so the labels must be 0 to C - 1.
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
            assessed logs only ``trust/cost``. There is no limit for a run with a pool, and for assessments whose
            numbers a callback or a learning-rate schedule monitors.
        pool: Unlabelled samples to score after each refit: a :class:`~sepc_torch.training.LabelPool`, a data set or a
            loader; by default ``pool_dataloader()`` of the data module or the module.
        inputs: From a batch to the argument of the module's ``forward``, for passes over data outside Lightning's
            loops; by default the first entry of the batch. A tuple gives several arguments, a dictionary named ones.
            Return ``(batch,)`` to pass one dictionary.
        labels: From a batch to its labels (B,), or None; by default the second entry of the batch.
        ids: From a batch to the ids of its samples, or a key of the batch. By default the positions in the loader's
            data set.
        dirpath: Folder for one CSV file per stage and refit, and for the head.
        report: Whether to write a report (:meth:`TrustHead.report`) of every assessed stage to ``dirpath``, which links
            those of earlier epochs, and to give its figures to TensorBoard and CSV loggers.
        on_flag: Called on the main process with (trainer, stage, table of flagged samples).
        prefix: Prefix of the logged names; two monitors need different prefixes.
        **old: Deprecated arguments: ``flag_fraction`` is ``flag_rate``; ``max_per_class`` and ``max_fit_per_class`` are
            an option of ``fit``; ``threshold``, ``reasons``, ``min_margin`` and ``novel_distance`` apply while the head
            is not calibrated.
    """

    def query(
        self, k: int, *, method: Method = METHOD, beta: float = BETA, novel_share: float = NOVEL_SHARE
    ) -> list[int]:
        """Ids of k samples of the pool to label next: ambiguous samples, spread out, and a few novel ones.

        The most ambiguous samples are clustered, and each cluster gives its most ambiguous one. Ambiguity comes from
        the network's logits if they are found, otherwise from the head. The network's ambiguity selects better while
        labels are few (``experiments/active_learning.py``, digits with a trained network and at most 20 labels per
        class). Novelty comes from the p-values of a calibrated head, otherwise from the distance to its ellipsoids.
        Samples that a ``LabelPool`` has labelled since the last scores are left out. The result is equal on every
        process. See :func:`~sepc_torch.training.choose` for the arguments.
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
        if "logits" in rows and self._pool_scores.head is not None:
            rows = {**rows, "logits": checked_logits(self._pool_scores.head, rows["logits"])}
        labelled = self._head_state.rows.get("emb")
        distance = self.criteria.novel_distance
        options: Any = {"novel_distance": distance, "method": method, "beta": beta, "novel_share": novel_share}
        return rows["id"][propose(rows, k, labelled, **options)].tolist()

    def stop_at(self, *, error: float, delta: float = 0.05) -> Stop:
        """Whether the labels that the head accepts in the rest of the pool have at most this share of mistakes.

        The bound comes from the validation samples that the head was not calibrated on, so it holds for a pool drawn
        like them; see :func:`~sepc_torch.training.query.stopping_rule`.

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
        """Register the forward hooks before the module first runs, and reset the state of an earlier run."""
        self._pool_numbers = {}
        self._attach(pl_module)
        self._schedule.start(trainer, self.prefix, has_pool(trainer, pl_module, self.pool))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Discard captured values."""
        self._records.clear()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Discard the values captured in the training step."""
        self._records.clear()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Refit, unless a validation refitted to these weights already."""
        with self.cost.paying():
            self._maybe_refit(trainer, pl_module)
            self._log(trainer, self._pending)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Refit to the last weights, also after an early stop."""
        if self._schedule.every and self._schedule.tried_step != int(trainer.global_step):
            self._refit(trainer, pl_module)
            self._log_directly(trainer, self._pending)
        self._schedule.stop(trainer, self.n_refits)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Score the pool if the run did not: a run resumed after its last epoch trains nothing."""
        if self.head is not None and self._pool_scores.rows is None:
            self._attach(pl_module)
            self._score_pool(trainer, pl_module)
            self._log_directly(trainer, self._pending)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to record the stage."""
        with self.cost.paying():
            self._begin(trainer, pl_module, "validate", trainer.val_dataloaders)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to record the stage."""
        self._begin(trainer, pl_module, "test", trainer.test_dataloaders)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to record the stage."""
        self._begin(trainer, pl_module, "predict", trainer.predict_dataloaders)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Refit and calibrate before the first batch: by now averaged weights, if any, replace the module's own."""
        self._records.clear()
        if trainer.sanity_checking or batch_idx or dataloader_idx:
            return
        with self.cost.paying():
            self._open_validation(trainer, pl_module)
        self._records.clear()

    def on_test_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Discard values captured before the batch."""
        self._records.clear()

    def on_predict_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Discard values captured before the batch."""
        self._records.clear()

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Evaluate the head on the batch."""
        with self.cost.paying():
            self._judge(trainer, pl_module, "validate", batch, batch_idx, dataloader_idx)

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Evaluate the head on the batch."""
        self._judge(trainer, pl_module, "test", batch, batch_idx, dataloader_idx)

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Evaluate the head on the batch."""
        self._judge(trainer, pl_module, "predict", batch, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Publish the results and log their numbers, which other callbacks can monitor."""
        with self.cost.paying():
            numbers = self._conclude(trainer, pl_module, "validate")
            self._log(trainer, numbers | self._pending)
        self._schedule.concluded()

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Publish the results and log their numbers."""
        self._log(trainer, self._conclude(trainer, pl_module, "test"))

    def on_predict_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Publish the results and log their numbers to the loggers, because Lightning does not log in prediction."""
        self._log_directly(trainer, self._conclude(trainer, pl_module, "predict"))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Remove the forward hooks."""
        self._detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove the forward hooks."""
        self._detach()

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint; monitors with different prefixes have different keys."""
        return self._generate_state_key(prefix=self.prefix)
