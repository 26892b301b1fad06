"""Samples to fit and calibrate the callback's head with, the fit itself, and the form of a head in a checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from sepc_torch.head.network import Places, find_places
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.model.sepc import SEPC
from sepc_torch.shapes import Int
from sepc_torch.training import LabelPool
from sepc_torch.training.callbacks import FitSample
from sepc_torch.training.flags import Rows, as_trust_head
from sepc_torch.training.lightning.batches import (
    batch_ids,
    batch_labels,
    first_tensor,
    gather_rows,
    labels_found,
    loader_list,
    on_rank_zero,
    unique_rows,
)
from sepc_torch.training.lightning.inference_pass import (
    Pass,
    Samples,
    embed_samples,
    on_device,
    run_forward,
    undisturbed,
)
from sepc_torch.training.lightning.settings import MisconfigurationException
from sepc_torch.training.pool import View
from sepc_torch.training.subsets import calibration_half, id_numbers, random_subset, sample_per_class

# Number of ids in an error message.
_NAMED = 5
# Validation samples to calibrate with: half of them rank the scores, enough to promise an error of 0.3 %.
_MOST_CALIBRATION = 2000
# Samples that find the last linear layer: all activations are kept for a moment.
_TRACED = 4
_BOTH = ("emb", "logits")


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


def find_last_layer(run: Pass, fit_data: Any) -> Places:
    """Find the last linear layer of the module by tracing samples of ``fit_data``, or else of the first loader."""
    trainer, module = run.trainer, run.module
    loaders = [
        trainer.train_dataloader,
        trainer.val_dataloaders,
        trainer.test_dataloaders,
        trainer.predict_dataloaders,
    ]
    source = next(iter(loader_list(loaders)), None) if fit_data is None else fit_data
    samples = samples_of(source, "the data to trace the module with")
    if not len(samples.dataset):
        raise MisconfigurationException("The data set to trace the module with is empty.")
    with undisturbed(module), trainer.precision_plugin.forward_context():
        rows = [samples.dataset[i] for i in range(min(_TRACED, len(samples.dataset)))]
        return run_forward(
            module,
            on_device(trainer, module, samples.collate(rows)),
            run.functions.inputs,
            lambda *args, **named: find_places(module, args, named, layers=None),
        )


def is_augmented(module: Any, dataset: Any) -> bool:
    """Whether reading the first sample twice returns different tensors."""
    if len(dataset) == 0:
        return False
    with undisturbed(module):
        first, second = first_tensor(dataset[0]), first_tensor(dataset[0])
    return first is not None and second is not None and not torch.equal(first.nan_to_num(), second.nan_to_num())


def labelled_rows(
    run: Pass, samples: Samples, positions: Int[Tensor, "n"], what: str, only: tuple[str, ...], limit: int | None = None
) -> Rows:
    """Embeddings and labels of the samples at some positions, at most ``limit`` per class, equal on every process.

    The columns are ``id`` (the position), ``key`` (a number of the user's id), ``target``, and those of ``only`` that
    are found.
    """
    functions = run.functions
    if len(positions) == 0:
        raise MisconfigurationException(f"The data set {what} is empty. Label some samples first.")

    def to_rows(batch: Any, ids: Int[Tensor, "B"], captured: Rows) -> Rows:
        target = batch_labels(batch, functions.labels)
        if target is None or len(target) != len(ids):
            found = labels_found(batch, functions.labels)
            if target is not None:
                found = f"found {len(target)} for {len(ids)} samples."
            raise MisconfigurationException(f"A batch {what} needs one integer label per sample; {found}")
        key = ids
        if functions.ids is not None and "logits" in only:
            key = id_numbers(batch_ids(batch, functions.ids, len(ids)))
        return {"id": ids, "key": key, **captured, "target": target}

    rows = embed_samples(run, samples, positions, to_rows, only)
    mine = sample_per_class(rows["id"], rows["target"], limit)  # reduces the data to gather
    rows = unique_rows(gather_rows(run.trainer, {name: column[mine] for name, column in rows.items()}))
    kept = sample_per_class(rows["id"], rows["target"], limit)
    return {name: column[kept] for name, column in rows.items()}


def fit_rows(run: Pass, samples: Samples, limit: int | None, sample: FitSample) -> Rows:
    """Embeddings and labels to fit to, at most ``limit`` per class, equal on every process."""
    return sample.rows(
        samples.dataset, limit, lambda piece: labelled_rows(run, samples, piece, "to fit to", ("emb",), limit)
    )


def calibration_rows(run: Pass, data: Any) -> Rows | None:
    """Embeddings, logits and labels to calibrate with, equal on every process; None if there are none.

    ``data`` is the data set or loader of the user, which is used whole; None for the calibration half of the first
    validation loader, at most ``_MOST_CALIBRATION`` samples.
    """
    if data is not None:
        samples = samples_of(data, "calibrate")
        every = torch.arange(len(samples.dataset))
        return labelled_rows(run, samples, every, "to calibrate with", _BOTH)
    loaders = loader_list(run.trainer.val_dataloaders)
    if not loaders or not isinstance(loaders[0], DataLoader) or isinstance(loaders[0].dataset, IterableDataset):
        return None
    samples = samples_of(loaders[0], "the validation data")
    every = torch.arange(len(samples.dataset))
    if run.functions.ids is None:
        every = every[calibration_half(every)]
    # Ids in batches are known only when the batches are read: then the half is taken afterwards.
    chosen = every[random_subset(every, _MOST_CALIBRATION * (1 if run.functions.ids is None else 2))]
    if len(chosen) == 0 or not _has_labels(run, samples):
        return None
    rows = labelled_rows(run, samples, chosen, "to calibrate with", _BOTH)
    half = calibration_half(rows["key"])
    return {name: column[half] for name, column in rows.items()}


def _has_labels(run: Pass, samples: Samples) -> bool:
    """Whether the first sample, as a batch, holds labels."""
    with undisturbed(run.module):
        return batch_labels(samples.collate([samples.dataset[0]]), run.functions.labels) is not None


def fit_head(
    trainer: Any, rows: Rows, fit: Mapping[str, Any] | Callable[[Tensor, Tensor], SEPC | TrustHead] | None
) -> TrustHead:
    """Fit a head on the main process; every process receives the head or raises the error."""

    def work() -> TrustHead:
        bad = rows["id"][~torch.isfinite(rows["emb"]).all(dim=1)]
        if len(bad):
            raise ValueError(
                f"{len(bad)} embeddings hold NaN or infinity; the first belong to the samples {bad[:_NAMED].tolist()}."
            )
        if callable(fit):
            head = fit(rows["emb"], rows["target"])
            if not isinstance(head, (SEPC, TrustHead)):
                raise TypeError(f"fit= must return an SEPC or a TrustHead; got a {type(head).__name__}.")
            return as_trust_head(head)
        return TrustHead.fit(rows["emb"], rows["target"], **{"progress": False, **(fit or {})})

    return on_rank_zero(trainer, "the refit", work)


def head_bytes(head: TrustHead) -> Tensor:
    """Serialise a head to a tensor of bytes in its own file format, so that ``weights_only`` loading accepts it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "head.safetensors"
        head.save(path)
        return torch.from_numpy(np.frombuffer(path.read_bytes(), dtype=np.uint8).copy())


def head_from_bytes(data: Tensor) -> TrustHead:
    """Restore a head from the bytes written by :func:`head_bytes`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "head.safetensors"
        path.write_bytes(data.cpu().numpy().tobytes())
        return TrustHead.load(path)
