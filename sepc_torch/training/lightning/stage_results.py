"""Results of one stage of the callback: rows are collected per batch, gathered over processes, and summarised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from sepc_torch.data.warn import warn_user
from sepc_torch.head.drift import DriftMonitor, DriftReport
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.shapes import Bool, Float
from sepc_torch.training.flags import (
    Rows,
    Seen,
    assess,
    binary_logits,
    class_count,
    is_calibrated,
    label_values,
    own_labels,
)
from sepc_torch.training.lightning.batches import (
    Ids,
    batch_labels,
    batch_rows,
    count_repeats,
    gather_rows,
    gather_text,
    unique_rows,
)
from sepc_torch.training.lightning.hooks import Captures, read_all
from sepc_torch.training.lightning.settings import Functions, MisconfigurationException, say
from sepc_torch.training.trust_table import TrustTable

# Number of labels in an error message.
_NAMED = 5
# Embeddings and logits that wait for the head: a call of a head takes 15 ms, however few rows it judges. 4 MiB.
_WAITING_VALUES = 2**20


def checked_logits(head: TrustHead, logits: Float[Tensor, "B L"]) -> Float[Tensor, "B M"]:
    """Logits with one column per class, so that column c belongs to label c."""
    logits = binary_logits(logits, class_count(head))
    columns = logits.shape[1]
    if columns < 2:
        raise MisconfigurationException(
            "logits= returns one number per sample; expected one column per class, or one number for two classes. "
            "Return all columns: logits=lambda module, batch: module(batch[0])."
        )
    values = label_values(head.classes)
    outside = values[(values < 0) | (values >= columns)].tolist()
    if outside:
        raise MisconfigurationException(
            f"logits= returns {columns} columns, for the classes 0 to {columns - 1}, but the head was fitted to labels "
            f"outside this range: {outside[:_NAMED]}. Number the classes from 0, in the data set or by "
            "TrustMonitor(..., labels=lambda batch: torch.searchsorted(torch.tensor(classes), batch[1].cpu())) with "
            "your classes in the order of the columns, ascending."
        )
    return logits


def assessed_rows(head: TrustHead, batch: Rows, *, keep: bool = False, seen: Seen | None = None) -> Rows:
    """Columns of a batch with the columns ``emb`` and, if known, ``logits`` and ``target``; on the CPU.

    They are those of :func:`assess` and the target if it is known. ``keep`` adds the embeddings and the logits of the
    head's classes.
    """
    z, logits = batch["emb"].float(), batch.get("logits")
    logits = None if logits is None else checked_logits(head, logits).to(z.device)
    rows = assess(head, z, logits, seen)
    if keep:
        rows["emb"] = z.cpu()
        if logits is not None:
            rows["logits"] = logits[:, label_values(head.classes)].float().cpu()
    return rows if "target" not in batch else {**rows, "target": batch["target"].cpu()}


def batch_columns(head: TrustHead, captures: Captures, functions: Functions, module: Any, batch: Any) -> Rows:
    """Columns ``emb`` and, if known, ``logits`` and ``target`` of a batch that the module has just processed.

    They are copies, because a compiled module may write the next batch to the same memory.
    """
    n = batch_rows(batch)
    with torch.inference_mode(False), torch.no_grad():
        captured = read_all(captures, module, batch, n)
        width = captured["emb"].shape[1]
        if width != head.in_features:
            raise MisconfigurationException(
                f"Embeddings have {width} features, but the head was fitted to {head.in_features}. Fit a new head: "
                "pass head=None and refit_every_n_epochs above 0. If the number of features changes from batch to "
                "batch, pass embed a function that returns one vector per sample, always of the same length."
            )
        columns = {"emb": captured["emb"].to(torch.float32, copy=True)}
        if "logits" in captured:
            columns["logits"] = checked_logits(head, captured["logits"]).clone()
        labels = batch_labels(batch, functions.labels)
        if labels is not None and len(labels) == n:
            columns["target"] = labels.clone()
    return columns


class Recorder:
    """Collects the rows of one loader on this process, and lets the head judge several batches at a time.

    ``positions`` gives the positions of the samples of a batch, which are their ids; None if the batches carry ids.
    ``keep`` keeps embeddings and logits. ``seen`` gets the head's predictions too.
    """

    seen: Seen | None = None

    def __init__(self, positions: Callable[[int], Sequence[int]] | None = None, keep: bool = False) -> None:
        self.positions = positions
        self.parts: list[Rows] = []
        self.names: list[str] = []
        self._keep = keep
        self._waiting: list[tuple[Ids, Rows]] = []

    def add(self, head: TrustHead, ids: Ids, batch: Rows) -> None:
        """Add a batch; the head judges when enough of them wait, or when a batch with other columns follows."""
        if self._waiting and _layout(self._waiting[0][1]) != _layout(batch):
            self.flush(head)
        self._waiting.append((ids, batch))
        waiting = (rows[name].numel() for _, rows in self._waiting for name in rows if name != "target")
        if sum(waiting) >= _WAITING_VALUES:
            self.flush(head)

    def flush(self, head: TrustHead) -> None:
        """Let the head judge the batches that wait."""
        if not self._waiting:
            return
        batches, self._waiting = self._waiting, []
        ids = [name for names, _ in batches for name in names]
        with torch.inference_mode(False), torch.no_grad():
            joined = {name: torch.cat([rows[name] for _, rows in batches]) for name in batches[0][1]}
            rows = assessed_rows(head, joined, keep=self._keep, seen=self.seen)
        texts = [name for name in ids if isinstance(name, str)]
        self.names += texts
        # Names have placeholders here; `join` assigns numbers to all of them.
        numbers = torch.arange(len(ids)) if texts else torch.tensor(ids, dtype=torch.int64)
        self.parts.append({"id": numbers, **rows})

    def join(self, trainer: Any) -> tuple[Rows, list[str]]:
        """Gather the rows of all processes, one row per id in ascending order, and the names if the ids are text."""
        shared = set.intersection(*(set(part) for part in self.parts)) if self.parts else set()
        mine = {name: torch.cat([part[name] for part in self.parts]) for name in sorted(shared)}
        rows = gather_rows(trainer, mine)
        names = gather_text(trainer, self.names)
        if names:
            places = {name: place for place, name in enumerate(sorted(set(names)))}
            rows["id"] = torch.tensor([places[name] for name in names], dtype=torch.int64)
            names = list(places)
        if not rows:
            return rows, names
        repeats = count_repeats(rows, distributed=trainer.world_size > 1)
        if repeats and trainer.is_global_zero:
            warn_user(
                f"{repeats} of {len(rows['id'])} samples have the id of another sample, and only the first sample of "
                "each id is kept. Let ids= return a different id for every sample.",
            )
        return unique_rows(rows), names


def _layout(batch: Rows) -> dict[str, tuple[int, ...]]:
    """Names and widths of the columns; batches with the same ones can be joined."""
    return {name: tuple(column.shape[1:]) for name, column in batch.items()}


def accepted_and_right(table: TrustTable) -> tuple[Bool[Tensor, "B"], Bool[Tensor, "B"]]:
    """Which samples with a known target are accepted and did not calibrate the head, and whose labels are right.

    A head that is not calibrated accepts nothing here: its flags promise nothing.
    """
    columns = table.columns
    accepted = (columns["reason"] < 0) & ("joint" in columns)
    if "calibrates" in columns:
        accepted &= ~columns["calibrates"]
    if "network_label" in columns:
        return accepted, columns["network_label"] == columns["target"]
    return accepted, own_labels(table.classes, columns["label"]) == columns["target"]


class PredictionStream:
    """Drift of one prediction: each process watches its own samples, and the states are merged at the end.

    The order of a data set means nothing, and one that is sorted by class would raise an alarm. So the samples are
    watched in a random order, when all of them are known.
    """

    def __init__(self, trainer: Any, head: TrustHead | None, has_network: bool) -> None:
        self._monitor: DriftMonitor | None = None
        self._parts: list[HeadPrediction] = []
        self._seen_all = True
        if head is None or not is_calibrated(head, has_network):
            return
        try:
            # Processes break ties by different random numbers.
            self._monitor = DriftMonitor(head, seed=int(trainer.global_rank))
        except (RuntimeError, ValueError) as error:  # a head of the user, calibrated in another way
            say(trainer, f"drift is not watched. {error}")

    def add(self, out: HeadPrediction, has_logits: bool) -> None:
        """Add the predictions of a batch."""
        if self._monitor is not None and has_logits == self._monitor.with_logits:
            self._parts.append(HeadPrediction(*(column.cpu() for column in out)))
        else:
            self._seen_all = False

    def report(self, trainer: Any) -> DriftReport | None:
        """Report on the samples of all processes, equal on every process; None if drift was not watched."""
        mine = self._monitor if self._seen_all else None
        if mine is not None and self._parts:
            whole = HeadPrediction(*(torch.cat(columns) for columns in zip(*self._parts, strict=True)))
            order = torch.randperm(len(whole.label), generator=torch.Generator().manual_seed(mine.seed))
            mine.update_from(HeadPrediction(*(column[order] for column in whole)), with_logits=mine.with_logits)
            self._parts = []
        if trainer.world_size == 1:
            return None if mine is None else mine.report()
        states: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(states, None if mine is None else mine.state_dict())
        if mine is None or any(state is None for state in states):
            return None
        workers = []
        for state in states:
            workers.append(DriftMonitor(mine.head, mine.alpha))
            workers[-1].load_state_dict(state)
        return workers[0].merge(*workers[1:]).report()
