"""Pool of the callback: find it, score its samples, check new labels; the data module ``PoolDataModule``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from sepc_torch.data.warn import warn_user
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.partitioning.landscape import SmallDisjunct
from sepc_torch.shapes import Int
from sepc_torch.training.flags import Rows, confirmed_disjuncts, own_labels
from sepc_torch.training.lightning.batches import gather_rows, unique_rows
from sepc_torch.training.lightning.inference_pass import Pass, embed_samples
from sepc_torch.training.lightning.refitting import samples_of
from sepc_torch.training.lightning.settings import DataModuleBase, MisconfigurationException
from sepc_torch.training.lightning.stage_results import assessed_rows
from sepc_torch.training.pool import LabelPool, View
from sepc_torch.training.subsets import random_subset


class PoolScores:
    """Pool of a run, and its last scores, equal on every process.

    Attributes:
        label_pool: The ``LabelPool`` of the run, or None.
        rows: Columns ``id``, ``emb``, ``logits`` if found, and those of ``assess``; None before the first scores.
        head: The head that gave the scores.
        record: The ``LabelPool`` that the scored samples belong to, or None.
        step: Global step of the scores; -1 if this run has not scored the pool with the head in use.
    """

    _warned = False  # whether the warning about unreadable labels was given

    def __init__(self) -> None:
        self.label_pool: LabelPool | None = None
        self.rows: Rows | None = None
        self.head: TrustHead | None = None
        self.record: LabelPool | None = None
        self.step = -1
        self._given: Any = None
        self._loader: Callable[[], Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return PoolScores().__dict__

    def find(self, trainer: Any, module: Any, pool: Any) -> None:
        """Find the pool of a run: the user's argument, else that of the data module or the module.

        A data module or module has an attribute ``pool`` (a ``LabelPool``) or a method ``pool_dataloader()``.
        """
        self._given, self._loader, self.step = pool, None, -1
        pools = [pool]
        for owner in (trainer.datamodule, module):
            pools.append(getattr(owner, "pool", None))
            if not self.exists and isinstance(pools[-1], LabelPool):
                self._given = pools[-1]
            elif not self.exists and callable(getattr(owner, "pool_dataloader", None)):
                self._loader = owner.pool_dataloader  # called for every scoring, because the pool shrinks
        self.label_pool = next((each for each in pools if isinstance(each, LabelPool)), None)

    @property
    def exists(self) -> bool:
        """Whether there are samples to score."""
        return self._given is not None or self._loader is not None

    def score(self, run: Pass, head: TrustHead, limit: int | None) -> Rows:
        """Evaluate a head on the pool, on at most ``limit`` samples, a different subset at every step."""
        samples = samples_of(self._given if self._loader is None else self._loader(), "the pool")
        pool = self.label_pool
        own = pool is not None and isinstance(samples.dataset, View) and samples.dataset.dataset is pool.eval_view
        self.record = pool if own else None
        ids = torch.arange(len(samples.dataset)) if samples.ids is None else samples.ids
        chosen = random_subset(ids, limit, int(run.trainer.global_step))

        def to_rows(_batch: Any, positions: Int[Tensor, "B"], captured: Rows) -> Rows:
            rows = assessed_rows(head, {**captured, "emb": captured["emb"].to(run.module.device)})
            return {"id": ids[positions], **captured, **rows}

        rows: Rows = {}
        if len(ids):
            rows = unique_rows(gather_rows(run.trainer, embed_samples(run, samples, chosen, to_rows)))
        self.rows, self.head, self.step = rows, head, int(run.trainer.global_step)
        return rows

    def discard(self) -> None:
        """Discard the scores of a head that is replaced."""
        self.rows, self.step = None, -1

    def unlabelled(self) -> Rows | None:
        """Rows of the samples that are still unlabelled; some may have been labelled since they were scored."""
        if not self.rows or self.record is None:
            return self.rows
        unlabelled = torch.isin(self.rows["id"], self.record.pool_ids)
        return {name: column[unlabelled] for name, column in self.rows.items()}

    def disjuncts(self) -> tuple[SmallDisjunct, ...]:
        """Small disjuncts: regions where the labels given since the last scores contradict the head too often.

        The field ``rows`` of each disjunct holds ids. If the pool cannot read the labels, the method warns once and
        returns no disjuncts, so that training continues.
        """
        pool = self.label_pool
        if pool is None or not self.rows or self.head is None:
            return ()
        ids = self.rows["id"]
        chosen = (pool.round_of[ids] >= 0) & (self.rows["label"] >= 0)
        if not bool(chosen.any()):
            return ()
        given = own_labels(self.head.classes, self.rows["label"][chosen])
        try:
            truth = pool.labels_of(ids[chosen])
        except TypeError as error:
            if not self._warned:
                self._warned = True
                warn_user(f"{error} New labels are not checked for confirmed mistakes.")
            return ()
        device = next(self.head.buffers()).device
        found = confirmed_disjuncts(self.head, self.rows["emb"][chosen].to(device), truth, given)
        return tuple(disjunct._replace(rows=ids[chosen].numpy()[disjunct.rows]) for disjunct in found)


class PoolDataModule(DataModuleBase):
    """Loaders for a :class:`~sepc_torch.training.LabelPool` and for the sets to validate, test and predict on.

    With ``Trainer(reload_dataloaders_every_n_epochs=1)`` each epoch trains on all samples labelled before it starts. A
    checkpoint holds the pool's record. Loading a checkpoint merges its record into the pool and removes no label.

    Args:
        pool: The labelled and unlabelled samples.
        val: Validation data set or loader.
        test: Test data set or loader.
        predict: Data set or loader to predict on.
        loader: Arguments of every ``DataLoader``: ``batch_size``, ``num_workers``, ``collate_fn`` and so on.

    >>> samples = [([float(i)], i % 2) for i in range(6)]
    >>> data = PoolDataModule(LabelPool(samples, labelled=[0, 1]), val=samples, batch_size=4)
    >>> len(data.train_dataloader().dataset), len(data.pool_dataloader().dataset)
    (2, 4)
    """

    def __init__(self, pool: LabelPool, val: Any = None, test: Any = None, predict: Any = None, **loader: Any) -> None:
        super().__init__()
        if not isinstance(pool, LabelPool):
            raise MisconfigurationException(f"pool must be a LabelPool; got a {type(pool).__name__}.")
        for name in ("shuffle", "sampler", "batch_sampler"):
            if name in loader:
                raise MisconfigurationException(
                    f"{name} cannot be set: the training data are shuffled, and all others are read in order. Leave it "
                    "out."
                )
        self.pool = pool
        self.loader_options = loader
        # Methods are set only for existing data, because Lightning calls every loader method that it finds.
        for name, data in (("val", val), ("test", test), ("predict", predict)):
            if data is not None:
                setattr(self, f"{name}_dataloader", partial(self._loader, data))

    def train_dataloader(self) -> DataLoader[Any]:
        """Loader of the samples that are labelled now, shuffled."""
        if len(self.pool.labelled_ids) == 0:
            raise MisconfigurationException(
                "The pool has no labelled samples to train on. Label some samples first: LabelPool(..., labelled=ids), "
                "or pool.label(ids, y)."
            )
        return DataLoader(self.pool.labelled(), shuffle=True, **self.loader_options)

    def pool_dataloader(self) -> DataLoader[Any]:
        """Loader of the samples that are unlabelled now, in order."""
        return DataLoader(self.pool.pool(), **self.loader_options)

    def _loader(self, data: Any) -> DataLoader[Any]:
        return data if isinstance(data, DataLoader) else DataLoader(data, **self.loader_options)

    def state_dict(self) -> dict[str, Any]:
        """The pool's record."""
        return self.pool.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Merge the record of a checkpoint into the pool's."""
        self.pool.absorb(state_dict)
