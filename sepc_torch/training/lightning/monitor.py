"""The callback ``TrustMonitor``: maps Lightning's hooks to refits, recording, logging and checkpointing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sepc_torch.training.lightning.core import MonitorCore, pool_numbers
from sepc_torch.training.lightning.lightning_names import CallbackBase, MisconfigurationException
from sepc_torch.training.lightning.stage_results import empty_summary

# Strategies that shard the weights over the processes.
_SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


class TrustMonitor(MonitorCore, CallbackBase):
    r"""Callback that evaluates a trust head on every sample of validation, test and prediction, and flags samples.

    ::

        monitor = TrustMonitor("backbone")                   # a submodule of your LightningModule
        trainer = Trainer(callbacks=[monitor])
        trainer.fit(model, train_loader, val_loader)         # fits a head at the end of every epoch
        print(monitor.flagged["val"])                        # id, trust, label, rule, reason, distance, margin

    The head is fitted to the weights that are about to be validated and saved, and every checkpoint holds it.
    ``flagged`` and ``scores`` hold tables by stage: ``"val"``, ``"test"``, ``"predict"``, ``"pool"``; with several
    loaders ``"val_0"`` and so on. Numbers are logged as ``trust/val_mean``, ``trust/val_flagged_frac``,
    ``trust/val_acc_trusted`` and so on, and other callbacks can monitor them. The names are always the same. An
    undefined number is NaN: ``trust/val_acc_flagged`` if no sample is flagged, or all numbers if the first fit fails.
    ``EarlyStopping`` stops at NaN; to monitor a number that may be NaN, pass it ``check_finite=False``.

    Args:
        embed: Name of the submodule whose output is the embedding, or a function (module, batch) -> (B, D).
        head: An :class:`~sepc_torch.SEPC` or :class:`~sepc_torch.TrustHead` to start with; None to fit one in training.
            Training replaces it at the first refit; to keep the given head, pass ``refit_every_n_epochs=0``.
        fit: Options of ``TrustHead.fit`` as a dictionary, or a function (embeddings, labels) -> head. By default the
            head keeps no reference points; to calibrate it later, keep some with ``{"reference_points": n}``.
        refit_every_n_epochs: Refit after every n epochs, after the last epoch, and before a validation without a head.
            0 disables refits.
        fit_data: Data set or loader to fit to, without augmentation. By default the labelled samples of the pool, else
            the training data set, read in order by a separate loader.
        max_fit_per_class: Fit to at most this number of samples per class; None for all.
        pool: Unlabelled samples to score after each refit: a :class:`~sepc_torch.training.LabelPool`, a data set or a
            loader; by default ``pool_dataloader()`` of the data module or the module.
        max_pool: Score at most this number of samples of the pool, a different subset after each refit; None for all.
        threshold: Flag samples whose trust is below this value.
        flag_fraction: Instead of ``threshold``, flag this fraction of the samples, the least safe ones.
        reasons: The reasons that lead to a flag: ``"ambiguous"``, ``"novel"`` and ``"disagrees"`` (needs ``logits``).
        min_margin, novel_distance: See :class:`~sepc_torch.training.flagging.Criteria`.
        inputs: From a batch to the argument of the module's ``forward``, for passes over ``fit_data`` and ``pool``; by
            default the first entry of the batch. A tuple gives several arguments, a dictionary named ones. Return
            ``(batch,)`` to pass one dictionary.
        labels: From a batch to its labels (B,), or None; by default the second entry of the batch.
        ids: From a batch to the ids of its samples, or a key of the batch. By default the positions in the loader's
            data set.
        logits: Source of the network's logits, like ``embed``; ``""`` is the module's own ``forward``. Trust and flags
            then refer to the network's label instead of the head's. Column c of the logits belongs to label c, so the
            labels must be 0 to C - 1.
        stages: The stages to record: ``"validate"``, ``"test"``, ``"predict"``.
        dirpath: Folder for one file per stage and refit, and for the head.
        file_format: ``"csv"`` or ``"jsonl"``.
        on_flag: Called on the main process with (trainer, stage, table of flagged samples).
        prefix: Prefix of the logged names; two monitors need different prefixes.
        refit_errors: ``"warn"`` keeps the old head if a refit fails, ``"raise"`` raises the error.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Reject strategies that shard the weights, and broadcast the output folder."""
        strategy = type(trainer.strategy).__name__
        if strategy in _SHARDED:
            raise MisconfigurationException(
                f"TrustMonitor runs the whole module in each process, but {strategy} shards its weights. Use "
                "strategy='ddp', or apply the head to saved embeddings."
            )
        if self.dirpath is not None:
            self.dirpath = Path(trainer.strategy.broadcast(str(self.dirpath)))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Register the forward hooks before the module first runs, and reset the state of an earlier run."""
        self._tried_step = -1  # the steps of an earlier run do not refer to these weights
        self._pool_numbers = pool_numbers(empty_summary())
        self._attach(pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Discard captured values."""
        self._records.clear()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Discard the values captured in the training step."""
        self._records.clear()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Refit, unless a validation refitted to these weights already."""
        self._maybe_refit(trainer, pl_module)
        self._log(trainer, self._pending)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Refit to the last weights, also after an early stop."""
        if self.refit_every_n_epochs and self._tried_step != int(trainer.global_step):
            self._refit(trainer, pl_module)
            self._log_directly(trainer, self._pending)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Score the pool if the run did not: a run resumed after its last epoch trains nothing."""
        if self.head is not None and self._pool_scores.rows is None:
            self._attach(pl_module)
            self._score_pool(trainer, pl_module)
            self._log_directly(trainer, self._pending)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to record the stage."""
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
        """Refit before the first batch: by now averaged weights, if any, have replaced the module's own."""
        self._records.clear()
        if trainer.state.fn != "fit" or trainer.sanity_checking or batch_idx or dataloader_idx:
            return
        first = self.head is None
        if first or trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._maybe_refit(trainer, pl_module, first=first)
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
        self._log(trainer, self._conclude(trainer, pl_module, "validate") | self._pending)

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
