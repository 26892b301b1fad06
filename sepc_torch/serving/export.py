"""Exported trust heads, alone or with what gives their labels: files for ONNX Runtime and for ``torch.export.load``.

Such a file runs without this package.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sepc_torch import __version__
from sepc_torch.data import files
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.reasons import Reason, refusal_reason
from sepc_torch.head.standard_operators import StandardOperators
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.head.trusted_model import TrustedModel, TrustedPrediction
from sepc_torch.serving.table_logits import TableLogits

# The first opset with ScatterElements(reduction="max"), which the largest density of a class needs.
OPSET = 18
# Rows of the example that is traced. Any number above 1: torch treats 0 and 1 as constants.
_ROWS = 3
# The outputs of a network, or of the classifier of a table, with its head.
TRUSTED = [name for name in TrustedPrediction._fields if name != "judged"]


class _Fields(nn.Module):
    """A head in standard operators that returns a dictionary: a reader needs nothing of this package."""

    def __init__(self, head: TrustHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        """The fields of the head's prediction by name; ``inputs`` are embeddings, logits, if taken, and layers."""
        z, *others = inputs
        names = self.head.layer_names
        logits = others[0] if len(others) > len(names) else None
        layers = dict(zip(names, others[len(others) - len(names) :], strict=True))
        with StandardOperators():
            found = self.head(z, logits=logits, layers=layers or None)._asdict()
            # Without logits some fields are one tensor, and one output of a graph has one name.
            return {name: column.clone() for name, column in found.items()}


class _TrustedFields(nn.Module):
    """A network with its head, in standard operators, that returns a dictionary of the fields of its prediction."""

    def __init__(self, trusted: TrustedModel) -> None:
        super().__init__()
        self.trusted = trusted

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        """The fields by name; ``inputs`` are the network's arguments by position, then those by name."""
        found = self.trusted.head.network
        assert found is not None
        first = len(found["inputs"])
        named = dict(zip(found["named_inputs"], inputs[first:], strict=True))
        features = self.trusted.features(*inputs[:first], **named)
        with StandardOperators():
            out = self.trusted.judge(features)._asdict()
            return {name: out[name].clone() for name in TRUSTED}


class _TableFields(nn.Module):
    """The classifier of a table with its head, in standard operators, that returns a dictionary of fields."""

    def __init__(self, head: TrustHead) -> None:
        super().__init__()
        assert head.classifier is not None
        assert head.encoding is not None
        self.classifier, self.head = TableLogits(head.classifier, head.encoding), head

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        """The fields of :class:`~sepc_torch.TrustedPrediction` by name; ``inputs`` are encoded rows, and layers."""
        z, *layers = inputs
        with StandardOperators():
            logits = self.classifier(z).to(z.dtype)
            named = dict(zip(self.head.layer_names, layers, strict=True))
            out = self.head(z, logits=logits, layers=named or None)
            made = {"label": out.network_label, "reason": refusal_reason(out, self.head.promise), "logits": logits}
            found = out._asdict() | made
            return {name: found[name].clone() for name in TRUSTED}


class _Graph(NamedTuple):
    """A module to export: example inputs, the names of inputs and outputs, and facts for the file."""

    module: nn.Module
    example: tuple[Tensor, ...]
    inputs: list[str]
    outputs: list[str]


def _graph(model: TrustHead | TrustedModel, logits: bool | None) -> _Graph:
    """A copy of a head, or of a network with its head, on the CPU, for export."""
    head = model.head if isinstance(model, TrustedModel) else model
    _check_exportable(head)
    if isinstance(model, TrustedModel):
        if logits is not None:
            raise ValueError("A TrustedModel makes its logits itself; leave out logits=.")
        found = head.network
        assert found is not None
        forms = [*found["inputs"], *found["named_inputs"].values()]
        if not all(isinstance(form, dict) for form in forms):
            raise TypeError("The network takes inputs that are no tensors, and a graph takes tensors only.")
        unnamed = ["input"] if len(found["inputs"]) == 1 else [f"input_{i}" for i in range(len(found["inputs"]))]
        with torch.inference_mode(False):
            copied = TrustedModel(copy.deepcopy(model.network), copy.deepcopy(head), model.places).cpu().eval()
            example = [torch.ones(_ROWS, *form["shape"], dtype=getattr(torch, form["dtype"])) for form in forms]
        return _Graph(_TrustedFields(copied), tuple(example), [*unnamed, *found["named_inputs"]], list(TRUSTED))
    whole = head.classifier is not None and logits is None
    takes_logits = not whole and (head.takes_logits if logits is None else logits)
    on_cpu = copy.deepcopy(head).cpu()
    like, widths = on_cpu.projection.shift, [on_cpu.in_features]
    widths += [len(on_cpu.classes)] if takes_logits else []
    widths += [] if on_cpu.evidence is None else on_cpu.evidence.layer_widths
    names = ["z", *(["logits"] if takes_logits else []), *head.layer_names]
    module = _TableFields(on_cpu) if whole else _Fields(on_cpu)
    outputs = TRUSTED if whole else HeadPrediction._fields
    return _Graph(module, tuple(like.new_ones(_ROWS, width) for width in widths), names, list(outputs))


def exported_program(model: TrustHead | TrustedModel, *, logits: bool | None = None) -> torch.export.ExportedProgram:
    """A head, or a network with its head, as a graph of standard operators for any number of rows from 1, on the CPU.

    Args:
        model: The head or the model.
        logits: As in :func:`to_onnx`.
    """
    return _traced(_graph(model, logits))


def _traced(graph: _Graph) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch")
    sizes = tuple({0: batch} for _ in graph.example)
    with torch.no_grad():
        program = torch.export.export(graph.module, graph.example, dynamic_shapes=(sizes,), strict=False)
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # paths of this machine have no place in a file for others
    return program


def export(model: TrustHead | TrustedModel, path: str | os.PathLike[str], *, logits: bool | None = None) -> None:
    """Write a head, alone or with its network or classifier, as a ``.pt2`` file that ``torch.export.load`` reads.

    The process that reads it does not need this package.

    ``torch.export.load(path).module()(z, logits)`` returns a dictionary of the fields of
    :class:`~sepc_torch.HeadPrediction`, on the CPU. The rows of layers follow the logits, in the order of the head.
    Arguments, other inputs and outputs, and limits are those of :func:`to_onnx`; the description is the extra file
    ``head.json``.
    """
    # An open file: torch warns of a path that does not end in .pt2, and the temporary one does not.
    with _without_notes(), files.replacing(Path(path)) as temporary, temporary.open("wb") as file:
        program = exported_program(model, logits=logits)
        torch.export.save(program, file, extra_files={"head.json": json.dumps(_description(model))})


def to_onnx(model: TrustHead | TrustedModel, path: str | os.PathLike[str], *, logits: bool | None = None) -> None:
    """Write a head, alone or with its network or classifier, as an ONNX file of standard operators (extra ``onnx``).

    The opset is 18.

    The file of a :class:`~sepc_torch.TrustedModel` takes the inputs of its network, ``input`` or their names. That of a
    model of a table (``sepc fit``) holds its classifier and takes encoded rows ``z`` (B, D), which
    :meth:`TrustHead.encode` returns. Both give ``label``, ``accept``, ``confidence``, ``joint``, ``p_value``,
    ``reason`` and ``logits``. For a head without a classifier:

    The inputs are ``z`` (B, D), ``logits`` (B, C) and, for a head with layers, their rows (B, D_l) under their names,
    for any B from 1 on. The outputs are the fields of :class:`~sepc_torch.HeadPrediction`. The metadata of the file
    hold ``classes``, ``feature_names``, ``in_features``, ``layers``, ``encoding``, ``promise``, ``threshold`` and
    ``version`` as JSON. Rows with NaN are flagged, whatever the ``nan_policy``. Of ellipsoids equally near to a point
    outside, the graph expands at most four.

    Args:
        model: The head or the model.
        path: The file to write.
        logits: Whether the graph of a head takes logits; by default if the head was calibrated with logits. If given,
            the graph of a head with a classifier is that of the head alone.
    """
    for package in ("onnx", "onnxscript"):  # before the trace, which takes long
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(
                f"Writing ONNX needs the package {package}: pip install 'sepc_torch[onnx]'.", name=package
            )
    with _without_notes():
        graph = _graph(model, logits)
        program = _traced(graph)
        made = torch.onnx.export(
            program,
            input_names=graph.inputs,
            output_names=graph.outputs,
            opset_version=OPSET,
            dynamo=True,
            optimize=False,  # ONNX Runtime optimises the graph when it loads the file, in less time
            verbose=False,
        )
    assert made is not None  # None only if a file is given
    for node in made.model.graph.all_nodes():
        node.metadata_props.clear()  # how torch made the node: most of the file's bytes, and no use to a reader
    made.model.metadata_props.update({name: json.dumps(value) for name, value in _description(model).items()})
    with files.replacing(Path(path)) as temporary:
        made.save(temporary)


def _check_exportable(head: TrustHead) -> None:
    """Raise ValueError for a head whose decisions need more than embeddings and logits."""
    if head.calibration is not None and len(head.calibration.own.group_threshold):
        raise ValueError(
            "This head accepts by given groups (accept_at(by=array)), and an exported graph takes no groups. Call "
            "accept_at without by, or with by='predicted' or by='region', and export again."
        )


@contextmanager
def _without_notes() -> Iterator[None]:
    """Context without torch's notes on operators that the graph does not need, and without its warnings of itself."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # torch 2.13 makes a LeafSpec when it copies the description of a graph's outputs.
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
            # A transposed constant is written as it is; the warning is about constants on a GPU.
            warnings.filterwarnings("ignore", "No complete tensor found in the group", UserWarning)
            yield
    finally:
        logger.setLevel(before)


def _description(model: TrustHead | TrustedModel) -> dict[str, Any]:
    """Facts of a head that a user of the file needs beside the graph."""
    head = model.head if isinstance(model, TrustedModel) else model
    threshold = None
    if head.calibration is not None and head.calibration.done:
        threshold = float(head.calibration.labels.threshold)
    encoding = None if head.encoding is None else head.encoding.to_dict()
    names = {"classes": head.classes, "feature_names": head.feature_names, "in_features": head.in_features}
    promise = None if head.promise is None else str(head.promise)
    made = {"promise": promise, "threshold": threshold, "version": __version__}
    reasons = {int(reason): reason.text for reason in Reason}
    return {**names, "layers": head.layer_names, "encoding": encoding, **made, "reasons": reasons}
