"""Batches of any structure (inputs, labels, ids of their samples), and their rows gathered over all processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler
from torchmetrics.utilities.distributed import gather_all_tensors

from sepc_torch.shapes import Int
from sepc_torch.training.flags import Rows
from sepc_torch.training.lightning.settings import MisconfigurationException

Ids = list[int] | list[str]


def first_tensor(batch: Any) -> Tensor | None:
    """First tensor of a nested batch, or None."""
    if isinstance(batch, Tensor):
        return batch
    parts: Any = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)


def batch_rows(batch: Any) -> int:
    """Number of samples in a batch: the length of its first tensor."""
    found = first_tensor(batch)
    if found is None or found.ndim == 0:
        raise MisconfigurationException(
            f"A batch of type {type(batch).__name__} holds no tensor with one row per sample, so its samples cannot be "
            "counted. Collate the samples into tensors."
        )
    return len(found)


def batch_inputs(batch: Any, inputs: Callable[[Any], Any] | None) -> Any:
    """Argument of the module's ``forward``: the result of ``inputs``, else the first entry of the batch."""
    if inputs is not None:
        return inputs(batch)
    if isinstance(batch, (tuple, list)):
        return batch[0]
    if isinstance(batch, Mapping):
        raise MisconfigurationException(
            f"A batch is a dictionary with the keys {list(batch)}. Specify the argument of the module's forward: "
            "TrustMonitor(..., inputs=lambda batch: batch['x'])."
        )
    return batch


def batch_labels(batch: Any, labels: Callable[[Any], Any] | None) -> Int[Tensor, "B"] | None:
    """Labels of a batch: the result of ``labels``, else the second entry if it holds integers; None without labels."""
    if labels is not None:
        found = labels(batch)
        if found is None:
            return None
        if not _are_labels(found):
            raise MisconfigurationException(
                f"labels= must return a tensor (batch,) of integers, or None; got {_kind(found)}. "
                + _conversion(found, "batch['label']")
            )
        return found.detach().to("cpu", torch.int64)
    found = _second(batch)
    return found.detach().to("cpu", torch.int64) if _are_labels(found) else None


def labels_found(batch: Any, labels: Callable[[Any], Any] | None) -> str:
    """Second half of the error message for a batch without labels: what was found instead, and what to do."""
    found = None if labels is not None else _second(batch)
    if found is None:
        return "found none. Specify them: TrustMonitor(..., labels=lambda batch: batch['label'])."
    return f"found {_kind(found)}. {_conversion(found, 'batch[1]')}"


def _conversion(found: Any, name: str) -> str:
    """Sentence that says how to make labels of a value, which is called ``name``."""
    if isinstance(found, Tensor) and found.ndim > 1:
        return (
            "Labels are one class per sample. For one-hot labels pass "
            f"TrustMonitor(..., labels=lambda batch: {name}.argmax(dim=1)); for several labels per sample pass one "
            "monitor for each of them, here for the first: "
            f"TrustMonitor(..., labels=lambda batch: {name}[:, 0].long(), "
            "logits=lambda module, batch: module(batch[0])[:, [0]], prefix='trust_0')."
        )
    return f"Convert them: TrustMonitor(..., labels=lambda batch: {name}.long())."


def _second(batch: Any) -> Any:
    return batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None


def _are_labels(found: Any) -> bool:
    """Whether a value is a vector of integers or booleans."""
    return isinstance(found, Tensor) and found.ndim == 1 and not found.is_floating_point() and not found.is_complex()


def _kind(found: Any) -> str:
    """Short description of a value for error messages."""
    return f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"


def batch_ids(batch: Any, ids: Callable[[Any], Any] | str, rows: int) -> Ids:
    """Ids of the samples in a batch of ``rows`` samples, by a function or by a key of the batch."""
    found = _given_ids(batch, ids)
    if len(found) != rows:
        raise MisconfigurationException(
            f"There are {len(found)} ids for a batch of {rows} samples; expected one id per sample."
        )
    return found


def _given_ids(batch: Any, ids: Callable[[Any], Any] | str) -> Ids:
    if callable(ids):
        found = ids(batch)
    elif isinstance(batch, Mapping) and ids in batch:
        found = batch[ids]
    else:
        keys = f" with the keys {list(batch)}" if isinstance(batch, Mapping) else ""
        raise MisconfigurationException(
            f"ids={ids!r} is not a key of a batch of type {type(batch).__name__}{keys}. Pass a function: "
            "ids=lambda batch: ..."
        )
    if isinstance(found, Tensor):
        if found.ndim != 1 or found.is_floating_point() or found.dtype == torch.bool:
            raise MisconfigurationException(
                f"ids must be integers or text, one for each sample; got {found.dtype} of shape {tuple(found.shape)}."
            )
        return [int(i) for i in found.tolist()]
    names = list(found)
    if all(isinstance(name, str) for name in names) or all(type(name) is int for name in names):
        return names
    raise MisconfigurationException(
        f"ids must be integers or text, one for each sample; got a {type(names[0]).__name__}."
    )


def loader_list(loaders: Any) -> list[Any]:
    """Flat list of the loaders of a stage, from a loader or any nesting of lists and dictionaries."""
    if isinstance(loaders, Mapping):
        return [each for value in loaders.values() for each in loader_list(value)]
    if isinstance(loaders, (list, tuple)):
        return [each for value in loaders for each in loader_list(value)]
    return [] if loaders is None else [loaders]


def positions_of(loader: Any) -> Callable[[int], Sequence[int]]:
    """From a batch of a loader with a fixed order to the data-set positions of its samples.

    Raises an error if the order cannot be read without consuming the loader's sampler.
    """
    sampler: Any = getattr(loader, "batch_sampler", None)
    if hasattr(sampler, "seen_batch_indices"):  # Lightning's, for prediction; iterating over it would reset its record
        return lambda batch: sampler.seen_batch_indices[batch]
    inner = getattr(sampler, "sampler", None)
    repeatable = type(inner) is SequentialSampler or (
        type(inner) is DistributedSampler and inner.dataset is getattr(loader, "dataset", None) and not inner.shuffle
    )
    if isinstance(loader, DataLoader) and type(sampler) is BatchSampler and repeatable:
        return list(sampler).__getitem__
    what = (
        "an iterable data set"
        if isinstance(getattr(loader, "dataset", None), IterableDataset)
        else f"a {type(inner or sampler).__name__}"
    )
    raise MisconfigurationException(
        f"The samples of a {type(loader).__name__} with {what} cannot be identified by their order. Do not shuffle it, "
        "or put ids into the batches: TrustMonitor(..., ids=lambda batch: ...) or ids='key'."
    )


T = TypeVar("T")

# Relative difference up to which two distances count as equal: rounding in bfloat16, which has 8 significant bits,
# accumulates over the layers of a network.
_ROUNDING = 0.05


class RankZeroError(RuntimeError):
    """Error of the main process, raised on every process."""


def gather_rows(trainer: Any, rows: Mapping[str, Tensor]) -> Rows:
    """Concatenate the rows of all processes; the number of rows may differ between processes and may be zero."""
    if trainer.world_size == 1:
        return dict(rows)
    empty = not rows or len(next(iter(rows.values()))) == 0
    everyone: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(everyone, {} if empty else {name: column[:0].cpu() for name, column in rows.items()})
    columns = {name: column for each in everyone for name, column in each.items()}
    gathered: Rows = {}
    for name in sorted(columns):  # all processes must call the collectives in one order
        mine = (columns if empty else rows)[name].to(trainer.strategy.root_device)
        gathered[name] = torch.cat(gather_all_tensors(mine)).cpu()
    return gathered


def gather_text(trainer: Any, names: list[str]) -> list[str]:
    """Concatenate the text of all processes, in the order of :func:`gather_rows`."""
    if trainer.world_size == 1:
        return names
    parts: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(parts, names)
    return [name for part in parts for name in part]


def unique_rows(rows: Mapping[str, Tensor], key: str = "id") -> Rows:
    """Keep the first row of every id, in ascending order of id.

    Distributed samplers repeat samples to give every process the same number.

    >>> unique_rows({"id": torch.tensor([2, 0, 2]), "trust": torch.tensor([0.5, 0.6, 0.7])})
    {'id': tensor([0, 2]), 'trust': tensor([0.6000, 0.5000])}
    """
    order = rows[key].argsort(stable=True)
    ids = rows[key][order]
    first = torch.ones(len(ids), dtype=torch.bool)
    first[1:] = ids[1:] != ids[:-1]
    return {name: column[order][first] for name, column in rows.items()}


def count_repeats(rows: Mapping[str, Tensor], distributed: bool, key: str = "id") -> int:
    """Count rows whose id also belongs to another sample.

    Distributed samplers repeat samples. So with ``distributed`` a repeated id counts only if its target or distance
    differs from that of the previous row by more than rounding.

    >>> rows = {"id": torch.tensor([2, 0, 2]), "distance": torch.tensor([0.5, 0.6, 0.7])}
    >>> count_repeats(rows, distributed=False), count_repeats({**rows, "distance": torch.ones(3)}, distributed=True)
    (1, 0)
    """
    order = rows[key].argsort(stable=True)
    ids = rows[key][order]
    repeated = ids[1:] == ids[:-1]
    if distributed:
        other = torch.zeros_like(repeated)
        for name in ("target", "distance"):
            if name in rows:
                column = rows[name][order].double()
                other |= ~torch.isclose(column[1:], column[:-1], rtol=_ROUNDING, equal_nan=True)
        repeated &= other
    return int(repeated.sum())


def on_rank_zero(trainer: Any, what: str, function: Callable[[], T]) -> T:
    """Run a function on the main process and broadcast its result, or raise its error, on all processes.

    Without the broadcast of an error the other processes would wait for ever, or fail with a broken connection.
    """
    result, error, cause = None, None, None
    if trainer.is_global_zero:
        try:
            result = function()
        except Exception as raised:
            error, cause = f"{type(raised).__name__}: {raised}", raised
    if trainer.world_size > 1:
        result, error = trainer.strategy.broadcast((result, error))
    if error is not None:
        raise RankZeroError(f"TrustMonitor: {what} failed: {error}") from cause
    return result  # type: ignore[return-value] # None only if the function returns None
