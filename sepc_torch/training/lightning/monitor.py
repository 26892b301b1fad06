"""A callback that says which samples to look at, and why, in every stage of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sepc_torch.training.lightning.core import MonitorCore, pool_numbers
from sepc_torch.training.lightning.lightning_names import CallbackBase, MisconfigurationException
from sepc_torch.training.lightning.stage_results import undefined

# Strategies that keep only a part of the weights in each process.
_SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


class TrustMonitor(MonitorCore, CallbackBase):
    r"""Judge every sample of validation, test and prediction by a trust head, and flag those to look at.

    ::

        monitor = TrustMonitor("backbone")                   # a submodule of your LightningModule
        trainer = Trainer(callbacks=[monitor])
        trainer.fit(model, train_loader, val_loader)         # fits a head at the end of every epoch
        print(monitor.flagged["val"])                        # id, trust, label, rule, reason, distance, margin

    The head is fitted on the weights that are about to be validated and saved, and is part of every checkpoint.
    ``flagged`` and ``scores`` are tables by stage: ``"val"``, ``"test"``, ``"predict"``, ``"pool"``, with several
    loaders ``"val_0"`` and so on. Numbers are logged under ``trust/val_mean``, ``trust/val_flagged_frac``,
    ``trust/val_acc_trusted`` and the like, and can be monitored. The names are always the same; a number is NaN where
    nothing defines it, such as ``trust/val_acc_flagged`` without a flag, or all of them after a first fit that failed.
    ``EarlyStopping`` stops at NaN: give it ``check_finite=False`` for those.

    Args:
        embed: Name of the submodule whose output is the embedding, or a function (module, batch) -> (B, D).
        head: An :class:`~sepc_torch.SEPC` or :class:`~sepc_torch.TrustHead` to begin with; None to fit one in training.
            Training replaces it at the first refit: to keep it, give ``refit_every_n_epochs=0``.
        fit: Options of ``TrustHead.fit`` as a dictionary, or a function (embeddings, labels) -> head. Unless
            ``{"witnesses": n}`` is among them the head keeps no training embeddings; to calibrate it later, keep some.
        refit_every_n_epochs: How often to refit; the last epoch always does, and so does a validation without any head
            yet. 0 is never.
        fit_data: What to fit to: a data set or loader, without augmentation. By default the pool's labelled samples,
            else the training data set, read in order by a loader of our own.
        max_fit_per_class: At most so many samples of each class.
        pool: Unlabelled samples to score after each refit: a :class:`~sepc_torch.training.LabelPool`, data set or loader;
            by default what ``pool_dataloader()`` of the data module or the module gives.
        max_pool: Score at most so many of the pool, chosen anew each time.
        threshold: Flag trust below this.
        flag_fraction: Instead, flag this share, the least safe.
        reasons: Of ``"ambiguous"``, ``"novel"`` and ``"disagrees"`` (needs ``logits``), those that count.
        min_margin, novel_distance: See :class:`~sepc_torch.training.flagging.Criteria`.
        inputs: From a batch to what the module's ``forward`` takes, in our own passes; by default its first entry. A
            tuple is several arguments, a dictionary named ones (``(batch,)`` is one that is a dictionary).
        labels: From a batch to its labels (B,), or None; by default its second entry.
        ids: From a batch to the ids of its samples, or its key. By default the positions in the loader's data set.
        logits: Like ``embed``, for the network's logits; ``""`` is the module's own ``forward``. Trust then judges the
            network's label instead of the head's. Column c of the logits is the label c, so labels must be 0 to C - 1.
        stages: Where to judge.
        dirpath: Folder for one file per stage and refit, and for the head.
        file_format: ``"csv"`` or ``"jsonl"``.
        on_flag: Called on the main process with (trainer, stage, table of flagged samples).
        prefix: Of the logged names; give two monitors different ones.
        refit_errors: ``"warn"`` keeps the old head when a refit fails, ``"raise"`` stops.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what cannot work; agree on the folder."""
        strategy = type(trainer.strategy).__name__
        if strategy in _SHARDED:
            raise MisconfigurationException(
                f"TrustMonitor runs the module itself, of which {strategy} keeps only a part in each process. Use "
                "strategy='ddp', or judge saved embeddings with the head."
            )
        if self.dirpath is not None:
            self.dirpath = Path(trainer.strategy.broadcast(str(self.dirpath)))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch the module before it first runs: on a compiled one, later hooks are not always called."""
        self._tried_step = -1  # the steps of an earlier run say nothing of these weights
        self._pool_numbers = pool_numbers(undefined())
        self._attach(pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Training steps run the watched submodules too; keep nothing of them."""
        self._records.clear()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """As above."""
        self._records.clear()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Refit here if no validation did so for these weights."""
        self._maybe_refit(trainer, pl_module)
        self._log(trainer, self._pending)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave a head of the last weights behind, also after an early stop."""
        if self.refit_every_n_epochs and self._tried_step != int(trainer.global_step):
            self._refit(trainer, pl_module)
            self._log_directly(trainer, self._pending)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """A run that was resumed after its last epoch trained nothing, and still wants the scores of its pool."""
        if self.head is not None and self._pool_scores.rows is None:
            self._attach(pl_module)
            self._score_pool(trainer, pl_module)
            self._log_directly(trainer, self._pending)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to record."""
        self._begin(trainer, pl_module, "validate", trainer.val_dataloaders)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to record."""
        self._begin(trainer, pl_module, "test", trainer.test_dataloaders)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to record."""
        self._begin(trainer, pl_module, "predict", trainer.predict_dataloaders)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Refit with the weights that are about to be validated: now averaged ones have been swapped in too."""
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
        """Forget what ran before."""
        self._records.clear()

    def on_predict_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Forget what ran before."""
        self._records.clear()

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Judge the batch."""
        self._judge(trainer, pl_module, "validate", batch, batch_idx, dataloader_idx)

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Judge the batch."""
        self._judge(trainer, pl_module, "test", batch, batch_idx, dataloader_idx)

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Judge the batch."""
        self._judge(trainer, pl_module, "predict", batch, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Conclude, and log what can be monitored."""
        self._log(trainer, self._conclude(trainer, pl_module, "validate") | self._pending)

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Conclude and log."""
        self._log(trainer, self._conclude(trainer, pl_module, "test"))

    def on_predict_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Conclude; Lightning logs nothing while predicting, so the loggers get it directly."""
        self._log_directly(trainer, self._conclude(trainer, pl_module, "predict"))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave no hook behind."""
        self._detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave no hook behind."""
        self._detach()

    @property
    def state_key(self) -> str:
        """Two monitors with different prefixes keep different states."""
        return self._generate_state_key(prefix=self.prefix)
