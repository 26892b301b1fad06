"""Results of one stage of the callback: rows are collected per batch, gathered over processes, and summarised."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sepc_torch.shapes import Bool, Float, Int
from sepc_torch.training.assessment import (
    CALIBRATED,
    Seen,
    assess,
    binary_logits,
    class_count,
    judged_of,
    no_rows,
    stage_numbers,
)
from sepc_torch.training.flagging import Criteria, Head, class_values, find_reasons, in_features, label_values
from sepc_torch.training.lightning.batches import (
    Ids,
    Rows,
    batch_ids,
    batch_labels,
    batch_rows,
    count_repeats,
    gather_rows,
    gather_text,
    loader_list,
    positions_of,
    unique_rows,
)
from sepc_torch.training.lightning.hooks import Captures, read_all
from sepc_torch.training.lightning.settings import Functions, MisconfigurationException
from sepc_torch.training.subsets import calibration_half, id_numbers
from sepc_torch.training.trust_table import TrustTable

# Number of labels in an error message.
_NAMED = 5
# Embeddings and logits that wait for the head: a call of a head takes 15 ms, however few rows it judges. 4 MiB.
_WAITING_VALUES = 2**20


class StageResult(NamedTuple):
    """Table of all samples of a stage, and its summary statistics.

    Attributes:
        table: All samples.
        numbers: Numbers of the measured samples, those that did not calibrate the head.
        rows: Columns of the measured samples, with ``emb`` and ``logits`` if they were kept.
        ids: Ids of the measured samples.
    """

    table: TrustTable
    numbers: dict[str, float]
    rows: Rows
    ids: list[Any]

    @property
    def right(self) -> Bool[Tensor, "B"]:
        """Whether each judged label of a measured sample is its target."""
        return self.rows["network_label"] == self.rows["target"]


class StageTables(dict[str, TrustTable]):
    """Tables by stage, under the logged name (``"val"``) or Lightning's name (``"validate"``).

    >>> tables = StageTables(val=TrustTable.of([], {}, []))
    >>> tables["validate"] is tables["val"]
    True
    """

    def __missing__(self, stage: str) -> TrustTable:
        if stage.startswith("validate") and (short := stage.replace("validate", "val", 1)) in self:
            return self[short]
        raise KeyError(
            f"There are no results for the stage {stage!r}; the stages with results are {', '.join(self) or 'none'}."
        )


def checked_logits(head: Head, logits: Float[Tensor, "B L"]) -> Float[Tensor, "B M"]:
    """Logits with one column per class, so that column c belongs to label c."""
    logits = binary_logits(logits, class_count(head))
    columns = logits.shape[1]
    if columns < 2:
        raise MisconfigurationException(
            "logits= returns one number per sample; expected one column per class, or one number for two classes. "
            "Return all columns: logits=lambda module, batch: module(batch[0])."
        )
    values = class_values(head)
    outside = values[(values < 0) | (values >= columns)].tolist()
    if outside:
        raise MisconfigurationException(
            f"logits= returns {columns} columns, for the classes 0 to {columns - 1}, but the head was fitted to labels "
            f"outside this range: {outside[:_NAMED]}. Number the classes from 0, in the data set or by "
            "TrustMonitor(..., labels=lambda batch: torch.searchsorted(torch.tensor(classes), batch[1].cpu())) with "
            "your classes in the order of the columns, ascending."
        )
    return logits


def assessed_rows(
    head: Head,
    z: Float[Tensor, "B D"],
    logits: Float[Tensor, "B L"] | None,
    target: Int[Tensor, "B"] | None,
    *,
    keep: bool = False,
    seen: Seen | None = None,
) -> Rows:
    """Columns of a batch, on the CPU: those of :func:`assess` and the target if it is known.

    ``keep`` adds the embeddings and the logits of the head's classes.
    """
    logits = None if logits is None else checked_logits(head, logits).to(z.device)
    rows = assess(head, z.float(), logits, seen)
    if keep:
        rows["emb"] = z.float().cpu()
        if logits is not None:
            rows["logits"] = logits[:, class_values(head)].float().cpu()
    return rows if target is None else {**rows, "target": target.cpu()}


class Batch(NamedTuple):
    """What a head needs of a batch: ids, embeddings, and logits and targets where they are known."""

    ids: Ids
    z: Float[Tensor, "B D"]
    logits: Float[Tensor, "B L"] | None
    target: Int[Tensor, "B"] | None

    @property
    def columns(self) -> tuple[int, ...]:
        """Widths of the embeddings, the logits and the targets; batches with the same ones can be joined."""
        return tuple(0 if column is None else column.shape[1:].numel() for column in (self.z, self.logits, self.target))

    @property
    def values(self) -> int:
        """Number of values of the embeddings and the logits."""
        return self.z.numel() + (0 if self.logits is None else self.logits.numel())


class Recorder:
    """Collects the rows of one loader on this process, and lets the head judge several batches at a time.

    Args:
        keep: Whether to keep embeddings and logits.
    """

    def __init__(self, keep: bool = False) -> None:
        self.parts: list[Rows] = []
        self.names: list[str] = []
        self._keep = keep
        self._waiting: list[Batch] = []

    def add(self, head: Head, batch: Batch, seen: Seen | None = None) -> None:
        """Add a batch; the head judges when enough of them wait."""
        if self._waiting and self._waiting[0].columns != batch.columns:
            self.judge(head, seen)
        self._waiting.append(batch)
        if sum(each.values for each in self._waiting) >= _WAITING_VALUES:
            self.judge(head, seen)

    def judge(self, head: Head, seen: Seen | None = None) -> None:
        """Let the head judge the batches that wait."""
        if not self._waiting:
            return
        ids: Any = [name for batch in self._waiting for name in batch.ids]
        with torch.inference_mode(False), torch.no_grad():
            z = torch.cat([batch.z for batch in self._waiting])
            logits = _joined([batch.logits for batch in self._waiting])
            target = _joined([batch.target for batch in self._waiting])
            self._waiting = []
            self._store(ids, assessed_rows(head, z, logits, target, keep=self._keep, seen=seen))

    def _store(self, ids: Ids, rows: Rows) -> None:
        n = len(rows["trust"])
        if ids and isinstance(ids[0], str):
            self.names += [str(name) for name in ids]
            numbers = torch.arange(n)  # placeholders; `join` assigns numbers to all names
        else:
            numbers = torch.tensor(ids, dtype=torch.int64)
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
            warnings.warn(
                f"{repeats} of {len(rows['id'])} samples have the id of another sample, and only the first sample of "
                "each id is kept. Let ids= return a different id for every sample.",
                stacklevel=2,
            )
        return unique_rows(rows), names


def _joined(columns: list[Any]) -> Any:
    """The columns of batches that all have it, or None."""
    return None if columns[0] is None else torch.cat(columns)


class StageRecords:
    """Collects the rows of all loaders of a stage.

    Args:
        captures: The captures of embeddings and logits, by name.
        functions: The user's functions.
        keep: Whether to keep embeddings and logits, for reports.
    """

    def __init__(self, captures: Captures, functions: Functions, keep: bool = False) -> None:
        self.keep = keep
        self.captures = captures
        self.functions = functions
        self.recorders: list[Recorder] = []
        self.positions: list[Any] = []
        self.has_network = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "recorders": [], "positions": []}

    def begin(self, loaders: Any) -> None:
        """Begin a stage over its loaders. If the batches carry no ids, the order of the loaders must be fixed."""
        found = loader_list(loaders)
        self.recorders = [Recorder(self.keep) for _ in found]
        self.positions = [] if self.functions.ids is not None else [positions_of(loader) for loader in found]

    def clear(self) -> None:
        """Discard the captured values."""
        for capture in self.captures.values():
            capture.clear()

    def add(self, head: Head, module: Any, batch: Any, batch_idx: int, loader: int, seen: Seen | None = None) -> None:
        """Add a batch that the module has just processed, for the head to judge."""
        n = batch_rows(batch)
        with torch.inference_mode(False), torch.no_grad():
            captured = read_all(self.captures, module, batch, n)
            if captured["emb"].shape[1] != in_features(head):
                raise MisconfigurationException(
                    f"Embeddings have {captured['emb'].shape[1]} features, but the head was fitted to "
                    f"{in_features(head)}. Fit a new head: pass head=None and refit_every_n_epochs above 0. If the "
                    "number of features changes from batch to batch, pass embed a function that returns one vector per "
                    "sample, always of the same length."
                )
            self.has_network = "logits" in captured
            labels = batch_labels(batch, self.functions.labels)
            # Copies, because a compiled module may write the next batch to the same memory.
            target = labels.clone() if labels is not None and len(labels) == n else None
            logits = checked_logits(head, captured["logits"]).clone() if self.has_network else None
            z = captured["emb"].to(torch.float32, copy=True)
        ids = self.functions.ids
        names = list(self.positions[loader][batch_idx]) if ids is None else batch_ids(batch, ids, n)
        self.recorders[loader].add(head, Batch(names, z, logits, target), seen)

    def judge(self, head: Head, seen: Seen | None = None) -> None:
        """Let the head judge all batches that wait."""
        for recorder in self.recorders:
            recorder.judge(head, seen)

    def finish(self, trainer: Any, head: Head, criteria: Criteria, halved: bool) -> list[StageResult]:
        """Results of the stage, one per loader, equal on every process.

        With ``halved`` the calibration half of the first loader, which the head was calibrated on, is not measured.
        """
        found = [
            stage_result(*recorder.join(trainer), head, criteria, self.has_network, halved and number == 0)
            for number, recorder in enumerate(self.recorders)
        ]
        self.recorders = []
        return found


def stage_result(
    rows: Rows, names: list[str], head: Head, criteria: Criteria, has_network: bool, halved: bool = False
) -> StageResult:
    """Build the table and the numbers of a stage from its gathered rows."""
    rows = rows or no_rows()
    judged = judged_of(rows)
    values = class_values(head)
    finite = judged.label >= 0
    own = torch.where(finite, values[judged.label.clamp_min(0)], -1)
    reason = rows.get("reason")
    if reason is None:
        reason = find_reasons(judged, criteria, (judged.network_label == own) | ~finite)
    ids = [names[place] if names else place for place in rows["id"].tolist()]
    target = rows.get("target")
    halved = halved and "joint" in rows
    calibrates: Bool[Tensor, "B"] = calibration_half(id_numbers(ids)) if halved else torch.zeros(len(ids)) > 0
    measured = {name: column[~calibrates] for name, column in rows.items()}
    numbers = stage_numbers(
        measured, reason[~calibrates], own[~calibrates], measured.get("target"), has_network=has_network
    )
    shown = {name: rows[name] for name in CALIBRATED if name in rows and name != "reason"}
    if has_network:
        shown |= {name: rows[name] for name in ("network_label", "network_trust", "network_margin")}
    shown |= {"reason": reason} | {name: rows[name] for name in ("trust", "label", "rule", "distance", "margin")}
    if target is not None:
        shown["target"] = target
    if halved:
        shown["calibrates"] = calibrates
    kept = [name for name, out in zip(ids, calibrates.tolist(), strict=True) if not out]
    return StageResult(
        TrustTable.of(ids, shown, head.classes), numbers, {**measured, "reason": reason[~calibrates]}, kept
    )


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
    return accepted, label_values(table.classes)[columns["label"].clamp_min(0)] == columns["target"]
