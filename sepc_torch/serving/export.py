"""Exported trust heads: files for ONNX Runtime and for ``torch.export.load``, which run without this package."""

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
from typing import Any

import torch
from torch import Tensor, nn

from sepc_torch.data import files
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.serving.standard_operators import StandardOperators

# The first opset with ScatterElements(reduction="max"), which the largest density of a class needs.
OPSET = 18
# Rows of the example that is traced. Any number above 1: torch treats 0 and 1 as constants.
_ROWS = 3


class _Fields(nn.Module):
    """A head in standard operators that returns a dictionary: a reader needs nothing of this package."""

    def __init__(self, head: TrustHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, z: Tensor, logits: Tensor | None = None) -> dict[str, Tensor]:
        """The fields of the head's prediction by name."""
        with StandardOperators():
            found = self.head(z, logits=logits)._asdict()
            # Without logits some fields are one tensor, and one output of a graph has one name.
            return {name: column.clone() for name, column in found.items()}


def exported_program(head: TrustHead, *, logits: bool | None = None) -> torch.export.ExportedProgram:
    """A head as a graph of standard operators for any batch size, on the CPU.

    Args:
        head: The head.
        logits: Whether the graph takes logits; by default if the head was calibrated with logits.
    """
    _check_exportable(head)
    if logits is None:
        logits = head.calibration is not None and head.calibration.network.done
    on_cpu = copy.deepcopy(head).cpu()
    like = on_cpu.projection.shift
    example = [like.new_ones(_ROWS, on_cpu.in_features)]
    if logits:
        example.append(like.new_ones(_ROWS, len(on_cpu.classes)))
    batch = torch.export.Dim("batch")
    with torch.no_grad():
        program = torch.export.export(
            _Fields(on_cpu), tuple(example), dynamic_shapes=tuple({0: batch} for _ in example), strict=False
        )
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # paths of this machine have no place in a file for others
    return program


def write_pt2(head: TrustHead, path: str | os.PathLike[str], *, logits: bool | None = None) -> None:
    """Write a head as a ``.pt2`` file; see :meth:`TrustHead.export`."""
    # An open file: torch warns of a path that does not end in .pt2, and the temporary one does not.
    with _without_notes(), files.replacing(Path(path)) as temporary, temporary.open("wb") as file:
        program = exported_program(head, logits=logits)
        torch.export.save(program, file, extra_files={"head.json": json.dumps(_description(head))})


def write_onnx(head: TrustHead, path: str | os.PathLike[str], *, logits: bool | None = None) -> None:
    """Write a head as an ONNX file; see :meth:`TrustHead.to_onnx`."""
    for package in ("onnx", "onnxscript"):  # before the trace, which takes long
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(
                f"Writing ONNX needs the package {package}: pip install 'sepc_torch[onnx]'.", name=package
            )
    with _without_notes():
        program = exported_program(head, logits=logits)
        made = torch.onnx.export(
            program,
            input_names=["z", "logits"][: len(program.graph_signature.user_inputs)],
            output_names=list(HeadPrediction._fields),
            opset_version=OPSET,
            dynamo=True,
            optimize=False,  # ONNX Runtime optimises the graph when it loads the file, in less time
            verbose=False,
        )
    assert made is not None  # None only if a file is given
    for node in made.model.graph.all_nodes():
        node.metadata_props.clear()  # how torch made the node: most of the file's bytes, and no use to a reader
    made.model.metadata_props.update({name: json.dumps(value) for name, value in _description(head).items()})
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
    """Context without torch's notes on operators that the graph does not need, and without its warning of itself."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # torch 2.13 makes a LeafSpec when it copies the description of a graph's outputs.
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
            yield
    finally:
        logger.setLevel(before)


def _description(head: TrustHead) -> dict[str, Any]:
    """Facts of a head that a user of the file needs beside the graph."""
    encoding = None if head.encoding is None else head.encoding.to_dict()
    names = {"classes": head.classes, "feature_names": head.feature_names, "in_features": head.in_features}
    return {**names, "encoding": encoding}
