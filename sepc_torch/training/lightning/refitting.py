"""Refit of the callback's head: choose the samples, embed them with the current weights, fit on the main process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from sepc_torch.head.trust_head import TrustHead
from sepc_torch.shapes import Bool, Int
from sepc_torch.training import LabelPool
from sepc_torch.training.flagging import Head
from sepc_torch.training.lightning.batches import batch_labels, first_tensor, labels_found
from sepc_torch.training.lightning.distributed import Rows, gather_rows, on_rank_zero, unique_rows
from sepc_torch.training.lightning.hooks import Capture
from sepc_torch.training.lightning.inference_pass import embed_samples, sequential_loader, undisturbed
from sepc_torch.training.lightning.lightning_names import MisconfigurationException
from sepc_torch.training.pool import View

# Batch size of an inference pass without a loader to copy the batch size from.
BATCH_SIZE = 256
# Number of ids in an error message.
_NAMED = 5


class Samples(NamedTuple):
    """Samples for an inference pass.

    Attributes:
        dataset: The data set.
        ids: Ids of its samples; None if they are the positions.
        like: Loader whose collate function, batch size and workers to copy; None for the defaults.
    """

    dataset: Any
    ids: Tensor | None
    like: Any


def fit_samples(trainer: Any, fit_data: Any, pool: LabelPool | None) -> Samples:
    """Samples to fit to: ``fit_data`` if given, else the labelled samples of the pool, else the training data set."""
    if fit_data is not None:
        return samples_of(fit_data, "fit_data")
    loader = trainer.train_dataloader
    if pool is not None:
        return Samples(pool.labelled_eval(), None, loader if isinstance(loader, DataLoader) else None)
    if not isinstance(loader, DataLoader):
        raise MisconfigurationException(
            f"The training loader is a {type(loader).__name__}; expected a DataLoader. Pass TrustMonitor(..., "
            "fit_data=...) with a data set of labelled samples without augmentation."
        )
    return samples_of(loader, "the training data")


def samples_of(source: Any, what: str) -> Samples:
    """Samples of a data set, of a loader, or the unlabelled samples of a ``LabelPool``."""
    if isinstance(source, LabelPool):
        view = source.pool()
        return Samples(view, view.ids, None)
    dataset = source.dataset if isinstance(source, DataLoader) else source
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise MisconfigurationException(
            f"{what} is an iterable {type(dataset).__name__}, so it cannot be read by index. Pass an indexable data "
            "set as fit_data= or pool=."
        )
    ids = dataset.ids if isinstance(dataset, View) else None
    return Samples(dataset, ids, source if isinstance(source, DataLoader) else None)


def is_augmented(module: Any, dataset: Any) -> bool:
    """Whether reading the first sample twice returns different tensors."""
    if len(dataset) == 0:
        return False
    with undisturbed(module):
        first, second = first_tensor(dataset[0]), first_tensor(dataset[0])
    return first is not None and second is not None and not torch.equal(first.nan_to_num(), second.nan_to_num())


def hash_ids(ids: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
    """Pseudo-random hash of ids: the finaliser of SplitMix64, in arithmetic modulo 2**64.

    The samples with the lowest hashes are a random subset that does not depend on the number of processes.
    """
    x = ids.to(torch.int64) + -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def sample_per_class(ids: Int[Tensor, "n"], labels: Int[Tensor, "n"], limit: int | None) -> Bool[Tensor, "n"]:
    """Mask of at most ``limit`` samples per class, a pseudo-random subset that depends on ids and labels only."""
    keep = torch.ones(len(ids), dtype=torch.bool)
    if limit is None:
        return keep
    hashes = hash_ids(ids)
    for label in labels.unique().tolist():
        here = (labels == label).nonzero().squeeze(1)
        keep[here[hashes[here].argsort(stable=True)[limit:]]] = False
    return keep


def fit_rows(
    trainer: Any,
    module: Any,
    samples: Samples,
    capture: Capture,
    inputs: Callable[[Any], Any] | None,
    labels: Callable[[Any], Any] | None,
    limit: int | None,
) -> Rows:
    """Embeddings and labels to fit to, equal on every process: columns ``id``, ``emb``, ``target``."""
    if len(samples.dataset) == 0:
        raise MisconfigurationException("The data set to fit to is empty. Label some samples first.")

    def to_rows(batch: Any, positions: Int[Tensor, "B"], captured: Rows) -> Rows:
        target = batch_labels(batch, labels)
        if target is None or len(target) != len(positions):
            found = f"found {0 if target is None else len(target)} for {len(positions)} samples."
            if target is None:
                found = labels_found(batch, labels)
            raise MisconfigurationException(f"A batch to fit to needs one integer label per sample; {found}")
        return {"id": positions, "emb": captured["emb"], "target": target}

    loader = sequential_loader(trainer, samples.dataset, samples.like, BATCH_SIZE)
    rows = embed_samples(trainer, module, loader, {"emb": capture}, inputs, to_rows)
    mine = sample_per_class(rows["id"], rows["target"], limit)  # reduces the data to gather
    rows = unique_rows(gather_rows(trainer, {name: column[mine] for name, column in rows.items()}))
    kept = sample_per_class(rows["id"], rows["target"], limit)
    return {name: column[kept] for name, column in rows.items()}


def fit_head(trainer: Any, rows: Rows, fit: Mapping[str, Any] | Callable[[Tensor, Tensor], Head] | None) -> Head:
    """Fit a head on the main process; every process receives the head or raises the error."""

    def work() -> Head:
        bad = rows["id"][~torch.isfinite(rows["emb"]).all(dim=1)]
        if len(bad):
            raise ValueError(
                f"{len(bad)} embeddings hold NaN or infinity; the first belong to the samples {bad[:_NAMED].tolist()}."
            )
        if callable(fit):
            head = fit(rows["emb"], rows["target"])
            if not isinstance(head, Head):
                raise TypeError(f"fit= must return an SEPC or a TrustHead; got a {type(head).__name__}.")
            return head
        # Flags use the ellipsoids only, and every checkpoint holds the head: no reference points unless requested.
        options = {"progress": False, **(fit or {})}
        if "witnesses" not in options:  # the deprecated name of reference_points
            options.setdefault("reference_points", 0)
        return TrustHead.fit(rows["emb"], rows["target"], **options)

    return on_rank_zero(trainer, "the refit", work)
