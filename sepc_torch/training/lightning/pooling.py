"""Pool of the callback: find it, score its samples, check new labels; the data module ``PoolDataModule``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from sepc_torch.partitioning.landscape import SmallDisjunct
from sepc_torch.shapes import Int
from sepc_torch.training import LabelPool, confirmed_disjuncts
from sepc_torch.training.flagging import Head, class_values
from sepc_torch.training.lightning.batches import Rows, gather_rows, unique_rows
from sepc_torch.training.lightning.hooks import Captures
from sepc_torch.training.lightning.inference_pass import embed_samples, sequential_loader
from sepc_torch.training.lightning.refitting import BATCH_SIZE, samples_of
from sepc_torch.training.lightning.settings import DataModuleBase, Functions, MisconfigurationException
from sepc_torch.training.lightning.stage_results import assessed_rows
from sepc_torch.training.pool import View
from sepc_torch.training.subsets import random_subset


def find_pool(trainer: Any, module: Any, pool: Any) -> Any:
    """The pool: the user's argument, else that of the data module or the module, else None.

    A data module or module has an attribute ``pool`` (a ``LabelPool``) or a method ``pool_dataloader()``.
    """
    if pool is not None:
        return pool
    for owner in (trainer.datamodule, module):
        if isinstance(getattr(owner, "pool", None), LabelPool):
            return owner.pool
        if callable(getattr(owner, "pool_dataloader", None)):
            return owner.pool_dataloader()
    return None


def has_pool(trainer: Any, module: Any, pool: Any) -> bool:
    """Whether :func:`find_pool` finds a pool; does not create a loader."""
    return pool is not None or any(
        isinstance(getattr(owner, "pool", None), LabelPool) or callable(getattr(owner, "pool_dataloader", None))
        for owner in (trainer.datamodule, module)
    )


def find_label_pool(trainer: Any, module: Any, pool: Any) -> LabelPool | None:
    """The ``LabelPool`` of the user, the data module or the module; None without one."""
    for candidate in (pool, getattr(trainer.datamodule, "pool", None), getattr(module, "pool", None)):
        if isinstance(candidate, LabelPool):
            return candidate
    return None


class PoolScores:
    """Last scores of the pool, equal on every process.

    Attributes:
        rows: Columns ``id``, ``emb``, ``logits`` if found, and those of ``assess``; None before the first scores.
        head: The head that gave the scores.
        record: The ``LabelPool`` that the samples belong to, or None.
    """

    _warned = False  # whether the warning about unreadable labels was given

    def __init__(self) -> None:
        self.rows: Rows | None = None
        self.head: Head | None = None
        self.record: LabelPool | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": None, "head": None, "record": None}

    def score(
        self,
        trainer: Any,
        module: Any,
        source: Any,
        head: Head,
        captures: Captures,
        functions: Functions,
        limit: int | None,
        record: LabelPool | None,
    ) -> Rows:
        """Evaluate a head on the pool, on at most ``limit`` samples, a different subset at every step.

        ``record`` is the ``LabelPool`` of the run. It is kept if the samples belong to it.
        """
        samples = samples_of(source, "the pool")
        own = record is not None and isinstance(samples.dataset, View) and samples.dataset.dataset is record.eval_view
        self.record = record if own else None
        ids = torch.arange(len(samples.dataset)) if samples.ids is None else samples.ids
        chosen = random_subset(ids, limit, int(trainer.global_step))

        def to_rows(_batch: Any, positions: Int[Tensor, "B"], captured: Rows) -> Rows:
            logits = captured.get("logits")
            rows = assessed_rows(head, captured["emb"].to(module.device), logits, None)
            return {"id": ids[chosen[positions]], **captured, **rows}

        rows: Rows = {}
        if len(ids):
            loader = sequential_loader(trainer, View(samples.dataset, chosen), samples.like, BATCH_SIZE)
            found = embed_samples(trainer, module, loader, captures, functions.inputs, to_rows)
            rows = unique_rows(gather_rows(trainer, found))
        self.rows, self.head = rows, head
        return rows

    def unlabelled(self) -> Rows | None:
        """Rows of the samples that are still unlabelled; some may have been labelled since they were scored."""
        if not self.rows or self.record is None:
            return self.rows
        unlabelled = torch.isin(self.rows["id"], self.record.pool_ids)
        return {name: column[unlabelled] for name, column in self.rows.items()}

    def disjuncts(self, pool: LabelPool) -> tuple[SmallDisjunct, ...]:
        """Small disjuncts: regions where the labels given since the last scores contradict the head too often.

        The field ``rows`` of each disjunct holds ids. If the pool cannot read the labels, the method warns once and
        returns no disjuncts, so that training continues.
        """
        if not self.rows or self.head is None:
            return ()
        ids = self.rows["id"]
        known = pool.round_of[ids] >= 0
        finite = self.rows["label"] >= 0
        chosen = known & finite
        if not bool(chosen.any()):
            return ()
        given = class_values(self.head)[self.rows["label"][chosen]]
        try:
            truth = pool.labels_of(ids[chosen])
        except TypeError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(f"{error} New labels are not checked for confirmed mistakes.", stacklevel=2)
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
