"""A ready network with a trust head: labels, and which of them to trust, from one forward pass.

::

    trusted = TrustedModel.fit(model, train_loader, calibration_loader, risk=0.05)
    out = trusted(images)            # out.label, out.accept, out.confidence, out.p_value, out.reason, out.logits
    trusted.save("trusted.safetensors")
    trusted = TrustedModel.load("trusted.safetensors", model)
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch.data.options import check_count
from sepc_torch.data.progress import Bar, Choice
from sepc_torch.data.warn import warn_user
from sepc_torch.head.calibration.calibration import better_order
from sepc_torch.head.explanation import DecisionExplanation
from sepc_torch.head.network import (
    LABELS,
    Places,
    TappedNetwork,
    channels_first,
    find_places,
    output_logits,
    submodule,
    unwrapped,
)
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.promises.conformal import check_share
from sepc_torch.head.reading.layers import layer_rows
from sepc_torch.head.reading.sources import evaluation_mode, row_ids
from sepc_torch.head.reasons import Reason, refusal_reason
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.shapes import Array

# Rows of the batch that finds the places in a network: all activations are kept for a moment.
_TRACED_ROWS = 4
# With this many calibration rows for each class, all classes are expected among them.
_EACH_CLASS = 10
# Positions of a map or sequence that are read of each sample; they are alike, and more add little.
_POSITIONS = 200
# Least share of calibration rows that differ from each other.
_DISTINCT = 0.9
# Numbers of each tensor of a network that enter its fingerprint.
_FINGERPRINT = 256
# A network that is right more often on calibration rows than on training rows by more than this many standard errors,
# and by more than this share, has seen them.
_DEVIATIONS, _LEAST_GAP = 4.0, 0.03


class TrustedPrediction(NamedTuple):
    """Predictions of a :class:`TrustedModel` for a batch; every field but ``logits`` has a value for each row.

    Attributes:
        label: The network's label, as an index into ``classes``; -1 if there is none.
        accept: Whether to accept the label, under the promise of the model.
        confidence: Probability that the label is right, for a row of a known kind.
        joint: Probability that the label is right and the row of a known kind; the decision is by this score.
        p_value: Conformal p-value: how ordinary the row is among calibration rows.
        reason: Why a label is refused, a :class:`~sepc_torch.head.reasons.Reason` as a number.
        logits: The network's logits (B, C), as the network computed them.
        judged: All fields of the trust head.
    """

    label: Tensor
    accept: Tensor
    confidence: Tensor
    joint: Tensor
    p_value: Tensor
    reason: Tensor
    logits: Tensor
    judged: HeadPrediction

    @property
    def reasons(self) -> list[str]:
        """The reasons as text."""
        return [Reason(code).text for code in self.reason.flatten().tolist()]

    def __repr__(self) -> str:
        if type(self.reason) is not Tensor:  # a tensor without values, as in a trace
            return f"TrustedPrediction({', '.join(self._fields)})"
        counts = torch.bincount(self.reason.flatten(), minlength=len(Reason)).tolist()
        shown = ", ".join(f"{number} {Reason(code).text}" for code, number in enumerate(counts) if number)
        return f"TrustedPrediction({', '.join(filter(None, [f'{sum(counts)} rows', shown]))})"


class Features(NamedTuple):
    """What a network gives for a batch: embeddings (R, D), logits (R, C) and earlier layers, for R rows.

    A row is a sample or, for a network that labels every position, a position. ``raw`` holds the logits as the network
    gave them, ``shape`` the shape of a field of the prediction: (B,), (B, H, W) or (B, T).
    """

    z: Tensor
    logits: Tensor
    layers: dict[str, Tensor] | None
    raw: Tensor
    shape: tuple[int, ...]


class ReadRows(NamedTuple):
    """What a network gives for the rows of a loader, as arrays: embeddings, labels, logits and earlier layers.

    ``units`` holds the unit of each row, if units were asked for; otherwise, for a network that labels every position,
    the number of the sample that the row belongs to.
    """

    z: Array
    y: Array | None
    logits: Array
    layers: dict[str, Array] | None
    units: Array | None


class Reading(TypedDict, total=False):
    """How batches are read; see :meth:`TrustedModel.fit`."""

    inputs: Callable[[Any], Any] | None
    labels: Callable[[Any], Any] | None
    units: Callable[[Any], Any] | None
    ignore_index: int


class TrustedModel(nn.Module):
    """A network and a trust head on its last layer and earlier stages; make one with :meth:`fit`.

    Args:
        network: The network.
        head: A trust head on the embeddings of the network.
        places: Where embeddings and earlier layers are read.

    >>> torch.manual_seed(0)
    <torch._C.Generator object at ...>
    >>> x, y = torch.randn(600, 4), torch.arange(600) % 3
    >>> x[torch.arange(600), y] += 4.0
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    >>> with torch.no_grad():
    ...     _ = net[0].weight.copy_(torch.eye(8, 4)), net[2].weight.copy_(3 * torch.eye(3, 8))
    >>> data = torch.utils.data.TensorDataset(x, y)
    >>> parts = torch.utils.data.random_split(data, [300, 300])
    >>> train, calibration = (torch.utils.data.DataLoader(part, batch_size=100) for part in parts)
    >>> trusted = TrustedModel.fit(net, train, calibration, risk=0.1).eval()
    >>> trusted.places
    Places(last='2', layers=('0',), normalised=False)
    >>> out = trusted(torch.tensor([[5.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, -90.0]]))
    >>> out.label[0], out.accept, out.reasons[1]
    (tensor(0), tensor([ True, False]), 'novel')
    """

    def __init__(self, network: nn.Module, head: TrustHead, places: Places) -> None:
        super().__init__()
        inner = unwrapped(network)
        tapped: nn.Module = TappedNetwork(inner, places)
        if network is not inner and isinstance(network, nn.DataParallel):
            tapped = nn.DataParallel(tapped, network.device_ids, getattr(network, "output_device", None))
        elif network is not inner and hasattr(network, "_orig_mod"):
            tapped = network.dynamo_ctx(tapped)  # type: ignore[operator]  # compiled with the options of the network
        self.tapped, self.head, self.places = tapped, head, places
        self._warned = False  # whether a warning said that the network is in training mode

    @property
    def network(self) -> nn.Module:
        """The plain network."""
        return self._tapped().network

    def detach(self) -> nn.Module:
        """Remove the hooks from the network and return it; the model cannot predict any more."""
        self._tapped().remove()
        return self.network

    def _tapped(self) -> TappedNetwork:
        tapped = unwrapped(self.tapped)
        assert isinstance(tapped, TappedNetwork)
        return tapped

    @property
    def classes(self) -> list[Any]:
        """The classes, in the order of the columns of the logits."""
        return self.head.classes

    @classmethod
    def fit(
        cls,
        network: nn.Module,
        training: Iterable[Any],
        calibration: Iterable[Any],
        *,
        risk: float | None = None,
        delta: float = 0.05,
        flag_rate: float | None = None,
        classes: Sequence[Any] | None = None,
        layer: str = "auto",
        layers: Sequence[str] | Literal["auto"] | None = "auto",
        inputs: Callable[[Any], Any] | None = None,
        labels: Callable[[Any], Any] | None = None,
        units: Callable[[Any], Any] | None = None,
        unknowns: Iterable[Any] | None = None,
        ignore_index: int = -100,
        seed: int = 0,
        progress: Choice = "auto",
        **options: Any,
    ) -> TrustedModel:
        """Fit a trust head to a network's training data, and calibrate it with held-out data.

        Each loader is read once, in evaluation mode and without gradients. The network keeps its weights, its mode and
        its device; hooks on it read the embedding and the stages.

        A network may label every position of a map (B, C, H, W) or of a sequence (B, T, C): a segmentation, or a label
        for every token. Some positions of each sample, drawn at random, are then the rows, the fields of a prediction
        are maps, no stages are read, and the promise is over samples, since positions of a sample are not independent.

        Args:
            network: A trained network that classifies; also inside ``torch.compile`` or ``nn.DataParallel``.
            training: The data that the network was trained on: batches ``(inputs, labels)``, several inputs first, or
                dictionaries with the labels under ``"labels"``, ``"label"``, ``"targets"``, ``"target"`` or ``"y"``.
                Without augmentation, if possible.
            calibration: The same for data that the network was *not* trained on, drawn as the data in use: some
                hundred rows or more.
            risk: The promised share of wrong labels among the accepted ones; see :meth:`TrustHead.accept_at`.
            delta: The probability that the promise of ``risk`` fails.
            flag_rate: Instead of ``risk``, the share of ordinary rows that may be refused.
            classes: Names of the classes in the order of the logits. Labels that are names need it.
            layer: Name of the module whose input is the embedding and whose output is the logits. By default the last
                linear layer, also a convolution of one position.
            layers: Names of up to a few earlier modules, whose activations help to find unknown kinds. By default up to
                three stages, spread over the depth; None for none.
            inputs: Function from a batch to the network's input: a tensor, a tuple or a dictionary of arguments.
            labels: Function from a batch to its labels.
            units: Function from a calibration batch to the names of the unit of each sample, such as its video or
                patient. Samples of a unit need not be independent; the promise is then over units.
            unknowns: Batches of some examples of unknowns, which should be refused; see :meth:`TrustHead.calibrate`.
            ignore_index: Label of positions without a label, which are left out.
            seed: Seed of the split of the calibration rows, and of the choice of positions.
            progress: ``"auto"`` shows progress on a terminal for long work.
            options: Further options of :meth:`TrustHead.fit`, such as ``dim`` or ``max_per_class``.
        """
        if risk is not None and flag_rate is not None:
            raise ValueError("Pass risk or flag_rate, not both.")
        for name, share in (("risk", risk), ("delta", delta), ("flag_rate", flag_rate)):
            if share is not None:
                check_share(share, name)
        _check_options(options)
        check_count(seed, "seed")
        reading: Reading = {"inputs": inputs, "labels": labels, "ignore_index": ignore_index}
        take = _Batches(**reading, seed=seed)
        for name, data in (("training", training), ("calibration", calibration)):
            _check_loader(data, name)
        first, training = _peek(training, "training")
        inner = unwrapped(network)
        args, kwargs = _on_device_of(inner, *take.inputs(first))
        with evaluation_mode(inner):
            try:
                places = find_places(inner, *_few_rows(args, kwargs), layer, layers)
            except TypeError as error:
                if "argument" not in str(error):
                    raise
                raise TypeError(
                    f"The network does not take the batch: {error}. Pass inputs=, a function from a batch to the "
                    "network's input, and labels=, one to its labels."
                ) from error
        trusted = cls(network, TrustHead.empty(), places)
        try:
            order = None if classes is None else list(classes)
            rows = _joined(trusted._read(training, take, "Training data", progress), places.layers)
            assert rows.y is not None
            columns = rows.logits.shape[1]
            codes, names = _codes(rows.y, order, columns), order if order is not None else list(range(columns))
            _check_every_class(codes, names)
            _check_logits(codes, rows.logits, names, "training")
            trusted.head = TrustHead.fit(
                rows.z, np.array(names)[codes], layers=rows.layers, classes=names, progress=progress, **options
            )
            right = rows.logits.argmax(axis=1) == codes
            trusted.head.network = trusted._description(*_few_rows(args, kwargs))
            trusted.head.to(next((p.device for p in inner.parameters()), torch.device("cpu")))
            reading["units"] = units
            trusted.calibrate(calibration, unknowns=unknowns, **reading, seed=seed, progress=progress)
            _warn_of_seen_rows(trusted.head, right)
            if risk is not None or flag_rate is not None:
                trusted.head.accept_at(risk=risk, delta=delta, flag_rate=flag_rate)
        except BaseException:
            trusted.detach()
            raise
        trusted.training = inner.training  # the modes of the network's modules stay as they are
        return trusted

    def calibrate(
        self,
        calibration: Iterable[Any],
        *,
        unknowns: Iterable[Any] | None = None,
        seed: int = 0,
        progress: Choice = "auto",
        **reading: Unpack[Reading],
    ) -> TrustedModel:
        """Calibrate with other held-out data; a promise is kept with new thresholds, or nothing is accepted.

        Args:
            calibration: The data, as in :meth:`fit`.
            unknowns: Batches of some examples of unknowns, with or without labels, which are not used.
            seed: Seed of the split of the rows, and of the choice of positions.
            progress: ``"auto"`` shows progress on a terminal for long work.
            reading: ``inputs``, ``labels``, ``units`` and ``ignore_index`` of :meth:`fit`.
        """
        _check_loader(calibration, "calibration")
        _warn_of_augmentation(calibration)
        batches = self._read(calibration, _Batches(**reading, seed=seed), "Calibration data", progress)
        rows = _joined(batches, self.places.layers)
        assert rows.y is not None
        codes = _codes(rows.y, self._names(), rows.logits.shape[1])
        _check_logits(codes, rows.logits, self.classes, "calibration")
        if rows.units is None:
            _warn_of_copies(rows.z)
        names = np.array(self.classes)[codes]
        logits = torch.from_numpy(rows.logits)
        examples: dict[str, Any] = {}
        if unknowns is not None:
            _check_loader(unknowns, "unknown")
            reading |= {"labels": lambda _: None, "units": None}
            shown = self.read(unknowns, progress=progress, **reading)
            of_unknowns = torch.from_numpy(shown.logits)
            examples = {"unknowns": shown.z, "unknown_logits": of_unknowns, "unknown_layers": shown.layers}
        self.head.calibrate(rows.z, names, logits, layers=rows.layers, seed=seed, units=rows.units, **examples)
        return self

    def accept_at(self, **options: Any) -> Any:
        """Set the promise; see :meth:`TrustHead.accept_at`."""
        return self.head.accept_at(**options)

    def forward(self, *args: Any, **kwargs: Any) -> TrustedPrediction:
        """Run the network once, and judge its labels; the arguments are those of the network.

        A dictionary as the only argument is passed as arguments by name, without labels.
        """
        first = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(first, Mapping):
            args, kwargs = (), {name: value for name, value in first.items() if name not in LABELS}
        if not self._warned and not torch.compiler.is_compiling() and any(part.training for part in self._in_modes()):
            self._warned = True
            warn_user(
                "Dropout or batch normalisation of the network is in training mode, and the head was calibrated in "
                "evaluation mode: call trusted.eval().",
            )
        return self.judge(self.features(*args, **kwargs))

    def _in_modes(self) -> list[nn.Module]:
        """The modules of the network that behave otherwise in training mode."""
        kinds = nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase
        return [part for part in self.network.modules() if isinstance(part, kinds)]

    def judge(self, found: Features) -> TrustedPrediction:
        """Judge what :meth:`features` returned."""
        out = self.head(found.z, found.logits, layers=found.layers)
        reason = refusal_reason(out, self.head.promise)
        if len(found.shape) > 1:
            out, reason = HeadPrediction(*(field.reshape(found.shape) for field in out)), reason.reshape(found.shape)
        known = out.network_label, out.accept, out.confidence, out.joint, out.p_value
        return TrustedPrediction(*known, reason, found.raw, out)

    def explain(self, *args: Any, **kwargs: Any) -> list[DecisionExplanation]:
        """Explain the decisions for a batch; the arguments are those of the network."""
        with torch.no_grad():
            args, kwargs = _on_device_of(self.network, args, kwargs)
            rows = self.features(*args, **kwargs)
        found = self.head.explain(rows.z, logits=rows.logits, layers=rows.layers)
        assert isinstance(found, list)
        return found

    def read(self, data: Iterable[Any], *, progress: Choice = "auto", **reading: Unpack[Reading]) -> ReadRows:
        """Embeddings, labels, logits and layers of all batches as arrays, for ``write_report``, ``compare`` and others.

        Args:
            data: Batches as in :meth:`fit`; labels may be missing.
            progress: ``"auto"`` shows progress on a terminal for long work.
            reading: ``inputs``, ``labels``, ``units`` and ``ignore_index`` of :meth:`fit`.
        """
        return _joined(self._read(data, _Batches(**reading), "Data", progress), self.places.layers)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the head and where it sits to a safetensors file; the network's weights are not in it."""
        self.head.save(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], network: nn.Module) -> TrustedModel:
        """Load what :meth:`save` wrote, for a network with the same weights.

        Args:
            path: The file.
            network: The network, with its weights. Other weights than those of the fit give a warning.
        """
        head = TrustHead.load(path)
        found = head.network
        if found is None:
            raise ValueError(
                f"The file {str(path)!r} holds a TrustHead without a place in a network; load it with TrustHead.load."
            )
        inner = unwrapped(network)
        places = Places(found["layer"], tuple(found["layers"]), bool(found["normalised"]))
        _check_last(inner, places.last, head)
        trusted = cls(network, head, places)
        if found["fingerprint"] != _fingerprint(inner):
            warn_user(
                "This network has other weights than the one that the head was fitted to. Promises hold for that "
                "network only; load its weights, or fit again.",
            )
        head.to(next((p.device for p in inner.parameters()), torch.device("cpu")))
        trusted.training = inner.training
        return trusted

    def _names(self) -> list[Any] | None:
        """The names of the classes; None if they are the numbers of the columns."""
        return None if self.classes == list(range(len(self.classes))) else self.classes

    def features(self, *args: Any, **kwargs: Any) -> Features:
        """Run the network and return what the head judges; a network with one logit has two columns there."""
        output, embedding, linear, layers = self.tapped(*args, **kwargs)
        given = output_logits(output)
        raw = linear if self.places.normalised else given
        if given.dim() > 2 and given.shape[2:].numel() > 1:
            z, logits, shape = _positions(embedding, raw)
            return Features(_wide(z), _wide(logits), None, raw, shape)
        raw = raw.flatten(1) if raw.dim() > 1 else raw.reshape(-1, 1)
        logits = torch.cat([torch.zeros_like(raw), raw], dim=1) if raw.shape[1] == 1 else raw
        z = layer_rows(channels_first(embedding), "embedding")
        rows = {name: layer_rows(channels_first(x), name) for name, x in zip(self.places.layers, layers, strict=True)}
        stages = {name: _wide(x) for name, x in rows.items()} or None
        return Features(_wide(z), _wide(logits), stages, raw, (raw.shape[0],))

    def _read(self, data: Iterable[Any], take: _Batches, what: str, progress: Choice) -> Iterator[ReadRows]:
        """Run the network over batches, in evaluation mode and without gradients."""
        network = self.network
        total = len(data) if isinstance(data, Sized) else 0
        bar = Bar(f"{what}: network", total, progress) if total else nullcontext()
        samples = 0
        with torch.no_grad(), bar as shown:
            for batch in data:
                args, kwargs = _on_device_of(network, *take.inputs(batch))
                with evaluation_mode(network):
                    found = self.features(*args, **kwargs)
                y = take.labels(batch, found.shape)
                if y is None and what != "Data":
                    raise ValueError(_NO_LABELS)
                rows, samples_of = take.rows(found.shape, y)
                units = take.units(batch, found.shape[0], samples_of, samples)
                samples += found.shape[0]
                yield ReadRows(
                    _chosen(found.z, rows),
                    y if y is None or rows is None else y[rows],
                    _chosen(found.logits, rows),
                    None if found.layers is None else {name: _chosen(x, rows) for name, x in found.layers.items()},
                    units,
                )
                if shown is not None:
                    shown.advance(1)
        if not samples:
            raise ValueError(f"{what} have no batch; check the loader (drop_last drops a short one).")

    def _description(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Where the head sits in the network, for files."""
        arguments: list[Any] = [_form(value) for value in args]
        named = {name: _form(value) for name, value in kwargs.items()}
        return {
            "layer": self.places.last,
            "layers": list(self.places.layers),
            "normalised": self.places.normalised,
            "fingerprint": _fingerprint(self.network),
            "inputs": arguments,
            "named_inputs": named,
        }


_NO_LABELS = (
    "A batch has no labels. Pass batches (inputs, labels), dictionaries with the key 'labels', or labels=, a function "
    "from a batch to its labels."
)


class _Batches:
    """How batches are divided into inputs and labels, and which positions of maps are rows."""

    def __init__(
        self,
        inputs: Callable[[Any], Any] | None = None,
        labels: Callable[[Any], Any] | None = None,
        units: Callable[[Any], Any] | None = None,
        ignore_index: int = -100,
        seed: int = 0,
    ) -> None:
        self._inputs, self._labels, self._units, self._ignored = inputs, labels, units, ignore_index
        self._rng = np.random.default_rng(seed)

    def rows(self, shape: tuple[int, ...], y: Array | None) -> tuple[Array | None, Array | None]:
        """Numbers of some labelled positions of every sample, and their samples in the batch; None for all rows.

        Args:
            shape: The samples and their positions.
            y: The labels of all positions, or None.
        """
        if len(shape) == 1:
            return None, None
        positions = int(np.prod(shape[1:]))
        chosen = []
        for sample in range(shape[0]):
            there = np.arange(sample * positions, (sample + 1) * positions)
            there = there if y is None else there[y[there] != self._ignored]
            chosen.append(self._rng.permutation(there)[:_POSITIONS])
        return np.concatenate(chosen), np.repeat(np.arange(shape[0]), [len(some) for some in chosen])

    def units(self, batch: Any, samples: int, sample: Array | None, before: int) -> Array | None:
        """The units of the rows of a batch: those of their samples, or the samples themselves if rows are positions.

        Args:
            batch: The batch.
            samples: The number of its samples.
            sample: The number of the sample of each row, or None if every sample is a row.
            before: Number of samples in earlier batches.
        """
        if self._units is None:
            return None if sample is None else before + sample
        named = row_ids(self._units(batch), samples, "units")
        return named if sample is None else named[sample]

    def inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the network, by position and by name."""
        if self._inputs is not None:
            found = self._inputs(batch)
            if isinstance(found, Mapping):
                return (), dict(found)
            return (found if isinstance(found, tuple) else (found,)), {}
        if isinstance(batch, Mapping):
            return (), {name: value for name, value in batch.items() if name not in LABELS}
        if isinstance(batch, (tuple, list)):
            if len(batch) == 2 and isinstance(batch[0], Mapping):
                return (), dict(batch[0])
            return tuple(batch[:-1]) if len(batch) > 1 else tuple(batch), {}
        return (batch,), {}

    def labels(self, batch: Any, shape: tuple[int, ...]) -> Array | None:
        """The labels of the rows of a batch as an array of numbers or names; None without labels."""
        if self._labels is not None:
            found = self._labels(batch)
        elif isinstance(batch, Mapping):
            found = next((batch[name] for name in LABELS if name in batch), None)
        elif isinstance(batch, (tuple, list)) and len(batch) > 1:
            found = batch[-1]
        else:
            return None
        return None if found is None else _label_rows(found, shape)


def _label_rows(given: Any, shape: tuple[int, ...]) -> Array:
    """Labels of all rows, from one-hot rows too; others are refused with what works instead."""
    y = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    if len(shape) > 1:
        y = y[:, 0] if y.ndim == len(shape) + 1 and y.shape[1] == 1 else y
        if y.shape != shape or y.dtype.kind not in "iub":
            raise ValueError(f"The labels have the shape {y.shape}; expected whole numbers of the shape {shape}.")
        return y.astype(np.int64).ravel()
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim == 2 and y.dtype.kind in "fiub":
        if not (np.isin(y, (0, 1)).all() and (y.sum(axis=1) == 1).all()):
            raise TypeError(
                "The labels are rows of several numbers: multi-label or soft targets. A trust head judges one label of "
                "each row; fit one for each label, with a two-class network or its column of logits."
            )
        y = y.argmax(axis=1)
    if y.ndim != 1:
        raise TypeError(f"The labels have the shape {y.shape}, and the network gives one label for each sample.")
    if y.dtype.kind == "f":
        if not (y == np.round(y)).all():
            raise TypeError(
                "The labels are not whole numbers: regression has no right or wrong label. Divide the range into "
                "classes, or use conformal regression."
            )
        y = y.astype(np.int64)
    if len(y) != shape[0]:
        raise ValueError(f"A batch has {len(y)} labels for {shape[0]} rows of logits; pass one for each row.")
    return y


def _check_last(network: nn.Module, last: str, head: TrustHead) -> None:
    """Raise ValueError if the last layer of a network has not the sizes that the head was fitted to."""
    layer = submodule(network, last, "layer")
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor):
        return
    other_classes = len(head.classes) > 2 and len(head.classes) not in weight.shape
    if other_classes or (isinstance(layer, nn.Linear) and layer.in_features != head.in_features):
        raise ValueError(
            f"The layer {last!r} has a weight of shape {tuple(weight.shape)}, and the head has {len(head.classes)} "
            f"classes and embeddings of {head.in_features} numbers; pass the network that it was fitted to."
        )


def _codes(y: Array, classes: list[Any] | None, columns: int) -> Array:
    """The columns of the labels; labels that are names need the classes."""
    if classes is not None and len(classes) != columns:
        raise ValueError(f"classes names {len(classes)} classes, and the network has {columns} logits; name them all.")
    if classes is not None and (y.dtype.kind in "UO" or not all(isinstance(name, str) for name in classes)):
        index = {name: code for code, name in enumerate(classes)}
        unknown = sorted({str(label) for label in y.tolist() if label not in index})
        if unknown:
            raise ValueError(
                f"The labels {unknown[:5]} are not in classes; name every label, in the order of the logits."
            )
        return np.array([index[label] for label in y.tolist()], dtype=np.int64)
    if y.dtype.kind not in "iub":
        raise ValueError(
            "Labels that are names do not say which column of the logits is theirs. Pass classes=, the names in the "
            "order of the logits."
        )
    codes = y.astype(np.int64)
    if len(codes) and (codes.min() < 0 or codes.max() >= columns):
        wrong = codes.max() if codes.max() >= columns else codes.min()
        raise ValueError(
            f"A label is {wrong}, and the network has {columns} logits, for labels from 0 to {columns - 1}. Drop rows "
            "of other labels, pass labels=, a function that maps them, or, for positions of a map, ignore_index=."
        )
    return codes


def _check_every_class(codes: Array, names: list[Any]) -> None:
    """Raise ValueError if a class has no training row."""
    there = np.bincount(codes, minlength=len(names)) > 0
    missing = [name for name, found in zip(names, there, strict=True) if not found]
    if missing:
        raise ValueError(
            f"The training data have no row of the classes {missing[:10]}, for which the network has logits: "
            f"{len(names)} columns, the first tensor that it returns. Pass data with rows of every class."
        )


def _check_logits(codes: Array, logits: Array, names: list[Any], what: str) -> None:
    """Raise ValueError if the labels are in another order than the columns, or one logit is a probability.

    Warn if classes have no row.
    """
    columns = logits.shape[1]
    if columns == 2 and not logits[:, 0].any() and logits[:, 1].min() >= 0.0 and logits[:, 1].max() <= 1.0:
        raise ValueError(
            "The network's single output lies between 0 and 1, so that it is a probability, not a logit. Let the "
            "network return the value before its sigmoid."
        )
    if (found := better_order(codes, logits.argmax(axis=1), columns)) is not None:
        raise ValueError(
            f"The labels of the {what} data seem to be in another order than the columns of the logits: {found[0]:.0%} "
            f"of the network's labels are wrong, and {found[1]:.0%} would be in another order. Pass classes=, names in "
            "the order of the logits, with labels that are these names; or labels=, a function that maps them to "
            "columns."
        )
    counts = np.bincount(codes, minlength=columns).tolist()
    missing = [name for name, count in zip(names, counts, strict=True) if not count]
    if missing and len(codes) >= _EACH_CLASS * columns:
        shown = ", ".join(map(str, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        warn_user(
            f"The {what} data have no row of the classes {shown}: nothing is promised about them. Calibrate with data "
            "drawn like those in use.",
        )


def _warn_of_seen_rows(head: TrustHead, right: Array) -> None:
    """Warn if the network is right more often on the calibration rows than on its training rows.

    Args:
        head: The calibrated head.
        right: Whether the network's label of each training row is right.
    """
    assert head.calibration is not None
    labels = head.calibration.labels
    known = (labels.point_label == labels.point_class).double()
    mean, count = float(known.mean()), len(known)
    error = (right.mean() * (1.0 - right.mean()) / len(right) + mean * (1.0 - mean) / count) ** 0.5
    if mean - right.mean() > max(_DEVIATIONS * error, _LEAST_GAP):
        warn_user(
            f"The network is right in {mean:.1%} of the calibration rows, and in {right.mean():.1%} of the training "
            "rows. Are the loaders swapped, or was the network trained on the calibration rows? Promises hold for rows "
            "that it was not trained on. Strong augmentation of the training rows has the same effect.",
        )


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that TrustHead.fit does not have, and those that make no sense for a network."""
    known = set(inspect.signature(TrustHead.fit).parameters) - {"embeddings", "labels", "encoder", "layers", "classes"}
    known -= {"device", "encoding", "ids", "keep_points", "progress"}
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, [*known, "risk", "delta", "flag_rate", "ignore_index"], 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"TrustedModel.fit takes no {name!r}.{hint} Further options are {sorted(known)}.")


def _peek(data: Iterable[Any], what: str) -> tuple[Any, Iterable[Any]]:
    """The first batch, and all batches: an iterator is read once, so that its first batch is put back."""
    if isinstance(data, Iterator):
        first = next(data, None)
        if first is None:
            raise ValueError(f"The {what} data are empty; pass at least one batch.")
        return first, (batch for part in ([first], data) for batch in part)
    for first in data:
        return first, data
    raise ValueError(f"The {what} data are empty; pass at least one batch.")


def _check_loader(data: Any, what: str) -> None:
    """Raise TypeError for a data set, which gives samples in place of batches."""
    if isinstance(data, torch.utils.data.Dataset) and not isinstance(data, torch.utils.data.IterableDataset):
        raise TypeError(
            f"The {what} data are a data set, which gives single samples. Pass batches: "
            "torch.utils.data.DataLoader(data, batch_size=256), or batch_size=None if its items are batches."
        )


def _few_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first rows of all tensors."""

    def few(value: Any) -> Any:
        return value[:_TRACED_ROWS] if isinstance(value, Tensor) and value.dim() else value

    return tuple(map(few, args)), {name: few(value) for name, value in kwargs.items()}


def _on_device_of(
    network: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tensors on the device of the network; floats in the dtype of weights in half precision, without autocast."""
    like = next((p for p in network.parameters() if p.is_floating_point()), None)

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor) or like is None:
            return value
        halves = like.dtype in (torch.float16, torch.bfloat16) and value.is_floating_point()
        narrow = halves and not torch.is_autocast_enabled(like.device.type)
        return value.to(like.device, like.dtype if narrow else value.dtype)

    return tuple(map(move, args)), {name: move(value) for name, value in kwargs.items()}


def _positions(embedding: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Embeddings and logits of all positions as rows, and the shape of samples and positions.

    Maps are (B, D, H, W), sequences (B, T, D); embedding and logits have the same positions.

    >>> z, logits, shape = _positions(torch.ones(2, 8, 4, 4), torch.ones(2, 3, 4, 4))
    >>> z.shape, logits.shape, shape
    (torch.Size([32, 8]), torch.Size([32, 3]), (2, 4, 4))
    """
    if embedding.dim() != logits.dim() or logits.dim() > 4:
        raise TypeError(
            f"The network gives logits of shape {tuple(logits.shape)} from an embedding of shape "
            f"{tuple(embedding.shape)}; expected logits (B, C), maps (B, C, H, W) or tokens (B, T, C)."
        )
    if logits.dim() == 4:
        embedding, logits = embedding.movedim(1, -1), logits.movedim(1, -1)
    shape = tuple(logits.shape[:-1])
    if embedding.shape[:-1] != logits.shape[:-1]:
        raise TypeError(
            f"The network labels {tuple(logits.shape[1:-1])} positions, and its embedding has "
            f"{tuple(embedding.shape[1:-1])}: it resizes its logits. Let it return the logits of its last convolution, "
            "with labels of that size."
        )
    return embedding.flatten(0, -2), logits.flatten(0, -2), shape


def _chosen(x: Tensor, rows: Array | None) -> Array:
    """Some rows of a tensor, or all, as an array."""
    return (x if rows is None else x[torch.from_numpy(rows).to(x.device)]).cpu().numpy()


def _joined(batches: Iterable[ReadRows], layers: Sequence[str]) -> ReadRows:
    """The rows of all batches."""
    parts = list(batches)
    stages = [part.layers for part in parts if part.layers is not None]
    known, units = [part.y for part in parts if part.y is not None], [part.units for part in parts]
    owners = [some for some in units if some is not None]
    return ReadRows(
        np.concatenate([part.z for part in parts]),
        np.concatenate(known) if len(known) == len(parts) else None,
        np.concatenate([part.logits for part in parts]),
        {name: np.concatenate([some[name] for some in stages]) for name in layers} or None,
        np.concatenate(owners) if owners else None,
    )


def _wide(x: Tensor) -> Tensor:
    """Half precision as float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _form(value: Any) -> dict[str, Any] | None:
    """Shape without rows and dtype of a tensor, for an example input; None for anything else."""
    if not isinstance(value, Tensor):
        return None
    return {"shape": list(value.shape[1:]), "dtype": str(value.dtype).removeprefix("torch.")}


def _fingerprint(network: nn.Module) -> str:
    """A fingerprint of some weights and statistics of every layer, the same on every device."""
    found = hashlib.sha256()
    for value in network.state_dict().values():
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            flat = value.detach().flatten()
            some = flat[:: max(1, len(flat) // _FINGERPRINT)].float().cpu().numpy()
            found.update(np.ascontiguousarray(some).tobytes())
    return found.hexdigest()[:16]


def _warn_of_copies(z: Array) -> None:
    """Warn if many calibration rows are copies of others: a sampler may draw rows with replacement."""
    distinct = len({row.tobytes() for row in z})
    if distinct < _DISTINCT * len(z):
        warn_user(
            f"Only {distinct} of {len(z)} calibration rows differ. Promises hold for independent rows; read every row "
            "once, without a sampler that repeats rows.",
        )


def _warn_of_augmentation(data: Any) -> None:
    """Warn if a data set gives another first sample when it is asked again: promises would hold for such samples."""
    dataset = getattr(data, "dataset", None)
    if dataset is None or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or not len(dataset):
        return
    try:
        pair = [dataset[0], dataset[0]]
    except Exception:
        return
    first, second = (
        [value for value in (item.values() if isinstance(item, Mapping) else item) if isinstance(value, Tensor)]
        if isinstance(item, (Mapping, tuple, list))
        else []
        for item in pair
    )
    if any(a.shape != b.shape or not _same(a, b) for a, b in zip(first, second, strict=False)):
        warn_user(
            "The calibration data are augmented at random: reading a sample twice gives two results. P-values and "
            "promises then hold for augmented samples; calibrate with the transforms that are used in prediction.",
        )


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of the same shape hold the same values; NaN equals NaN."""
    return bool(((first == second) | (first.isnan() & second.isnan())).all())
