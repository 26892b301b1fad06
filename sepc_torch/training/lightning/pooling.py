"""Pool of the callback: find the user's pool, score its unlabelled samples, check new labels against the head."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sepc_torch.partitioning.landscape import SmallDisjunct
from sepc_torch.shapes import Int
from sepc_torch.training import LabelPool, confirmed_disjuncts
from sepc_torch.training.flagging import Head, class_values
from sepc_torch.training.lightning.distributed import Rows, gather_rows, unique_rows
from sepc_torch.training.lightning.hooks import Capture
from sepc_torch.training.lightning.inference_pass import embed_samples, sequential_loader
from sepc_torch.training.lightning.refitting import BATCH_SIZE, Samples, hash_ids, samples_of
from sepc_torch.training.lightning.stage_results import judged_rows
from sepc_torch.training.pool import View


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
        rows: Columns ``id``, ``emb``, ``logits`` if captured, and the fields of ``Judged``; None before the first
            scores.
        head: The head that gave the scores.
        record: The ``LabelPool`` that the samples belong to, or None.
        seconds: Duration of the last pass.
    """

    _warned = False  # whether the warning about unreadable labels was given

    def __init__(self) -> None:
        self.rows: Rows | None = None
        self.head: Head | None = None
        self.record: LabelPool | None = None
        self.seconds = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": None, "head": None, "record": None, "seconds": self.seconds}

    def score(
        self,
        trainer: Any,
        module: Any,
        source: Any,
        head: Head,
        captures: dict[str, Capture],
        inputs: Callable[[Any], Any] | None,
        limit: int | None,
        record: LabelPool | None,
    ) -> Rows:
        """Evaluate a head on the pool, on at most ``limit`` samples, a different subset at every step.

        ``record`` is the ``LabelPool`` of the run. It is kept if the samples belong to it.
        """
        begun = time.perf_counter()
        samples = samples_of(source, "the pool")
        own = record is not None and isinstance(samples.dataset, View) and samples.dataset.dataset is record.eval_view
        self.record = record if own else None
        samples, ids = _subset(samples, limit, int(trainer.global_step))

        def to_rows(_batch: Any, positions: Int[Tensor, "B"], captured: Rows) -> Rows:
            rows = judged_rows(head, captured["emb"].to(module.device), captured.get("logits"), None)
            return {"id": ids[positions], **captured, **rows}

        rows: Rows = {}
        if len(ids):
            loader = sequential_loader(trainer, samples.dataset, samples.like, BATCH_SIZE)
            rows = unique_rows(gather_rows(trainer, embed_samples(trainer, module, loader, captures, inputs, to_rows)))
        self.rows, self.head = rows, head
        self.seconds = time.perf_counter() - begun
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


def _subset(samples: Samples, limit: int | None, step: int) -> tuple[Samples, Int[Tensor, "n"]]:
    """At most ``limit`` samples to score, a pseudo-random subset that depends on the step, and their ids."""
    ids = torch.arange(len(samples.dataset)) if samples.ids is None else samples.ids
    if limit is None or len(ids) <= limit:
        return samples, ids
    chosen = hash_ids(ids + hash_ids(torch.tensor([step]))).argsort(stable=True)[:limit].sort().values
    return samples._replace(dataset=View(samples.dataset, chosen)), ids[chosen]
