"""Batch access for the callback: number of samples, inputs, labels and ids of a batch of any structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from sepc_torch.shapes import Int
from sepc_torch.training.lightning.lightning_names import MisconfigurationException

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
                f"labels= must return a tensor (batch,) of integers, or None; got {_kind(found)}. Convert it, for "
                "instance with .long()."
            )
        return found.detach().to("cpu", torch.int64)
    found = _second(batch)
    return found.detach().to("cpu", torch.int64) if _are_labels(found) else None


def labels_found(batch: Any, labels: Callable[[Any], Any] | None) -> str:
    """Second half of the error message for a batch without labels: what was found instead, and what to do."""
    found = None if labels is not None else _second(batch)
    if found is None:
        return "found none. Specify them: TrustMonitor(..., labels=lambda batch: batch['label'])."
    return f"found {_kind(found)}. Convert them: TrustMonitor(..., labels=lambda batch: batch[1].long())."


def _second(batch: Any) -> Any:
    return batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None


def _are_labels(found: Any) -> bool:
    """Whether a value is a vector of integers or booleans."""
    return isinstance(found, Tensor) and found.ndim == 1 and not found.is_floating_point() and not found.is_complex()


def _kind(found: Any) -> str:
    """Short description of a value for error messages."""
    return f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"


def batch_ids(batch: Any, ids: Callable[[Any], Any] | str) -> Ids:
    """Ids of the samples in a batch, by a function or by a key of the batch."""
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


def positions_of(loader: Any) -> Sequence[Sequence[int]]:
    """Data-set positions of the samples in every batch of a loader with a fixed order.

    Raises an error if the order cannot be read without consuming the loader's sampler.
    """
    sampler = getattr(loader, "batch_sampler", None)
    seen = getattr(sampler, "seen_batch_indices", None)
    if seen is not None:  # Lightning's sampler for prediction; iterating over it would reset its record
        return _RecordedBatches(sampler)
    inner = getattr(sampler, "sampler", None)
    repeatable = type(inner) is SequentialSampler or (
        type(inner) is DistributedSampler and inner.dataset is getattr(loader, "dataset", None) and not inner.shuffle
    )
    if isinstance(loader, DataLoader) and type(sampler) is BatchSampler and repeatable:
        return list(sampler)
    what = (
        "an iterable data set"
        if isinstance(getattr(loader, "dataset", None), IterableDataset)
        else f"a {type(inner or sampler).__name__}"
    )
    raise MisconfigurationException(
        f"The samples of a {type(loader).__name__} with {what} cannot be identified by their order. Do not shuffle it, "
        "or put ids into the batches: TrustMonitor(..., ids=lambda batch: ...) or ids='key'."
    )


class _RecordedBatches(Sequence[Sequence[int]]):
    """Positions of the batches that Lightning has recorded so far."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler.seen_batch_indices)

    def __getitem__(self, batch: Any) -> Any:
        return self._sampler.seen_batch_indices[batch]
