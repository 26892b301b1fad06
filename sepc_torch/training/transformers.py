"""The callback ``TrustCallback`` for the Trainer of transformers: refits, calibration, flags and numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from sepc_torch.data.options import check_count
from sepc_torch.data.warn import warn_user
from sepc_torch.head.network import Places, find_places, unwrapped
from sepc_torch.head.promises.conformal import check_share
from sepc_torch.head.reading.sources import evaluation_mode
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.head.trusted_model import TrustedModel
from sepc_torch.shapes import Int
from sepc_torch.training.callbacks import FitSample, fingerprint, same_weights, stage_result
from sepc_torch.training.flags import Rows, assess, calibrated_copy, is_calibrated, logged_names, no_numbers
from sepc_torch.training.subsets import calibration_half
from sepc_torch.training.trust_table import TrustTable

try:
    from transformers import TrainerCallback
except ImportError:  # an optional package: the documentation and the type checker read this module without it
    TrainerCallback = object

# Samples that find the last linear layer: all activations are kept for a moment.
_TRACED = 4


class TrustCallback(TrainerCallback):  # type: ignore[misc] # transformers is not installed where types are checked
    r"""Callback of transformers' ``Trainer`` that tells which of a network's labels to trust, at every evaluation.

    ::

        trainer = Trainer(model, args, train_dataset=train, eval_dataset=validation)
        callback = TrustCallback(trainer)
        trainer.add_callback(callback)
        trainer.train()                                      # fits and calibrates a head at every evaluation
        print(callback.flagged["val"])                       # id, joint, network_label, reason, ...

    The flags, tables and numbers are those of :class:`~sepc_torch.TrustMonitor`. If the weights have changed since the
    last evaluation, a head is fitted to the embeddings of a sample of the training data, read in order and in
    evaluation mode, and calibrated on half of the evaluated samples, chosen by their positions. It judges the network's
    labels of all evaluated samples. The embedding is the input of the last linear layer. Weights, modes and random
    states of the training stay as they are.

    ``flagged`` and ``scores`` hold tables by stage: ``"val"`` for the data sets of evaluations, ``"val_name"`` for each
    of several ones, of which the first calibrates, and ``"test"`` for ``trainer.evaluate(data,
    metric_key_prefix="test")``. The ids are positions in the data set.

    The numbers are measured on the samples that did not calibrate the head. Their names are ``eval_``, the prefix of
    the Trainer, and those of :class:`~sepc_torch.TrustMonitor`, such as ``eval_trust/val_aurc``. They are logged, and
    are among the metrics of the evaluation, so that ``metric_for_best_model="trust/val_aurc"`` finds them. With several
    processes, each of them reads all samples.

    Args:
        trainer: The Trainer that gets the callback.
        layer: Name of the module whose input is the embedding; by default the last linear layer.
        fit: Options of :meth:`TrustHead.fit`. At most ``max_per_class`` samples of each class are fitted to, by default
            100 and all for None.
        fit_data: Data set to fit to, without augmentation; by default the training data.
        calibrate: Data set to calibrate with, instead of half of the evaluated samples.
        flag_rate: Share of samples like the calibration samples that may be flagged, on average.
        risk: Instead of ``flag_rate``, the allowed share of wrong labels among the accepted ones.
        prefix: Prefix of the logged names.

    Attributes:
        flagged, scores: Tables by stage, the least safe samples first.
        head: The head in use; None before the first fit. ``TrustedModel(trainer.model, callback.head,
            callback.places).to(trainer.args.device).eval()`` judges new samples.
        places: Where the embedding is read.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        layer: str = "auto",
        fit: Mapping[str, Any] | None = None,
        fit_data: Any = None,
        calibrate: Any = None,
        flag_rate: float = 0.05,
        risk: float | None = None,
        prefix: str = "trust",
    ) -> None:
        if TrainerCallback is object:
            raise ImportError("TrustCallback needs transformers and accelerate: pip install transformers accelerate")
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ValueError("TrustCallback runs the whole network in each process, but FSDP and DeepSpeed shard it.")
        if len(trainer.label_names) != 1:
            raise ValueError(
                f"TrustCallback judges one label of each sample; the network has the labels {trainer.label_names}. "
                "Name the one to judge: TrainingArguments(label_names=['labels'])."
            )
        self.trainer, self.layer, self.prefix = trainer, layer, prefix
        self.fit, self.fit_data, self.calibrate = dict(fit or {}), fit_data, calibrate
        limit = self.fit.get("max_per_class", 100)
        self.max_per_class = None if limit is None else check_count(limit, "max_per_class", 1)
        self.flag_rate = check_share(flag_rate, "flag_rate")
        self.risk = None if risk is None else check_share(risk, "risk")
        self.flagged, self.scores = dict[str, TrustTable](), dict[str, TrustTable]()
        self.head: TrustHead | None = None
        self.places: Places | None = None
        self._weights: Tensor | None = None  # fingerprint of the weights that the head belongs to
        self._calibrates = ""  # stage whose first half calibrated the head
        self._fit_sample = FitSample()

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any, model: Any, eval_dataloader: Any, **kwargs: Any
    ) -> None:
        """Fit and calibrate a head if the weights have changed, flag the evaluated samples, and log the numbers."""
        from accelerate.utils import broadcast_object_list

        key = next((name.removesuffix("_runtime") for name in metrics if name.endswith("_runtime")), "eval")
        stage = f"val{key.removeprefix('eval')}" if key.startswith("eval") else key
        network, every = unwrapped(model), torch.arange(_length(eval_dataloader))
        with _unchanged_random_states():
            self.places = self._find_places(network, eval_dataloader)
            rows = self._read(network, eval_dataloader, every)
            weights = fingerprint(network)
            if self.head is None or self._weights is None or not same_weights(self._weights, weights):
                train = kwargs.get("train_dataloader")
                self.head = self._fitted(network, rows, self.trainer.get_train_dataloader() if train is None else train)
                self._weights, self._calibrates = weights, stage if self.calibrate is None else ""
            if self.head is None:
                numbers = no_numbers(True)
            else:
                rows |= assess(self.head, rows["emb"], rows["logits"])
                found = stage_result(rows, [], self.head, self.flag_rate, True, stage == self._calibrates)
                numbers, self.scores[stage] = found.numbers, found.table
                self.flagged[stage] = found.table.where(found.table.columns["reason"] >= 0)
        (numbers,) = broadcast_object_list([numbers])  # they may choose the checkpoint, on every process
        named = {f"eval_{self.prefix}/{name}": value for name, value in logged_names(stage, numbers).items()}
        metrics.update(named)
        self.trainer.log(named)

    def _fitted(self, network: nn.Module, rows: Rows, train: Any) -> TrustHead | None:
        """A head fitted to a sample of the training data and calibrated on half of some rows; None if the fit fails."""
        loader = train if self.fit_data is None else self.trainer.get_test_dataloader(self.fit_data)
        _length(loader)
        few = self._fit_sample.rows(
            loader.dataset, self.max_per_class, lambda piece: self._read(network, loader, piece, labelled=True)
        )
        if self.calibrate is None:
            half = calibration_half(rows["id"])
            rows = {name: column[half] for name, column in rows.items()}
        else:
            loader = self.trainer.get_test_dataloader(self.calibrate)
            rows = self._read(network, loader, torch.arange(_length(loader)), labelled=True)
        try:
            head = TrustHead.fit(few["emb"], few["target"], **{"progress": False, **self.fit})
        except (RuntimeError, ValueError) as error:
            warn_user(f"TrustCallback: the fit failed: {error} Training continues without flags.")
            return None
        if "target" in rows:
            known = rows["emb"], rows["target"], rows["logits"]
            head = calibrated_copy(head, *known, flag_rate=self.flag_rate, risk=self.risk) or head
        if not is_calibrated(head, True):
            warn_user(
                "TrustCallback: the head is not calibrated, because fewer than 20 labelled samples can be used; flags "
                "promise no rate. Evaluate on more labelled samples, or pass calibrate=.",
            )
        return head

    def _inputs(self, batch: Any) -> dict[str, Any]:
        return {key: value for key, value in batch.items() if key not in self.trainer.label_names}

    def _find_places(self, network: nn.Module, loader: Any) -> Places:
        samples = [loader.dataset[i] for i in range(min(_TRACED, len(loader.dataset)))]
        with evaluation_mode(network):
            batch = self.trainer._prepare_inputs(loader.collate_fn(samples))
            return find_places(network, (), self._inputs(batch), self.layer, layers=None)

    def _read(self, network: nn.Module, loader: Any, positions: Int[Tensor, "n"], labelled: bool = False) -> Rows:
        """Embeddings, logits and labels of the samples at some positions of a loader's data set."""
        assert self.places is not None
        name, args = self.trainer.label_names[0], self.trainer.args
        options = {"collate_fn": loader.collate_fn, "num_workers": args.dataloader_num_workers}
        samples = DataLoader(Subset(loader.dataset, positions.tolist()), args.eval_batch_size, **options)
        trusted = TrustedModel(network, TrustHead.empty(), self.places)
        try:
            found = trusted.read(samples, progress=False, inputs=self._inputs, labels=lambda batch: batch.get(name))
        finally:
            trusted.detach()
        if found.units is not None:
            raise ValueError("The network labels every position of a sample; TrustCallback judges one label of each.")
        rows = {"id": positions, "emb": torch.from_numpy(found.z), "logits": torch.from_numpy(found.logits)}
        if found.y is not None:
            rows["target"] = torch.from_numpy(found.y).long()
        columns = rows["logits"].shape[1]
        if labelled and ("target" not in rows or not (0 <= rows["target"].min() <= rows["target"].max() < columns)):
            raise ValueError(
                f"TrustCallback: the samples to fit to and to calibrate with need labels {name!r} from 0 to "
                f"{columns - 1}, one for each column of the logits. Drop other samples: TrustCallback(fit_data=...)."
            )
        return rows


def _length(loader: Any) -> int:
    """Number of samples of a loader; an iterable data set, which has no positions, raises ValueError."""
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise ValueError(
            f"TrustCallback reads samples by position, and a {type(loader.dataset).__name__} has none. Pass an "
            "indexable data set: as eval_dataset, and as train_dataset or TrustCallback(fit_data=...)."
        )
    return len(loader.dataset)


@contextmanager
def _unchanged_random_states() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch on exit."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - data sets of users may use it
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
