"""The command ``sepc export``: a model file for ONNX Runtime or for plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sepc_torch.cli import shell
from sepc_torch.cli.heads import load_head
from sepc_torch.data.text import printable
from sepc_torch.serving import export as graphs


def export(
    model: shell.Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write: .onnx for ONNX Runtime, .pt2 for torch.export.load.")
    ],
    logits: Annotated[
        bool | None,
        typer.Option(
            help="Whether the file takes logits; by default if the model was calibrated with logits of a network. The "
            "file of a table computes those of its classifier, and with either option holds the head alone."
        ),
    ] = None,
    trust: shell.Trust = False,
    as_json: shell.AsJson = False,
) -> None:
    """Write a model as a graph that runs without sepc_torch: ONNX, or a program of torch.export."""
    shell.check_writable(output, [".onnx", ".pt2"])
    head = load_head(model, trust)
    whole = head.classifier is not None and logits is None
    if logits is None and not whole:
        logits = head.takes_logits
    write = graphs.to_onnx if output.suffix.lower() == ".onnx" else graphs.export
    write(head, output, logits=logits)
    inputs = {"z": head.in_features} | ({"logits": len(head.classes)} if logits else {})
    size = output.stat().st_size
    if as_json:
        described = {"file": str(output), "bytes": size, "columns": inputs, "classes": head.classes}
        encoding = None if head.encoding is None else head.encoding.to_dict()
        shell.print_json(described | {"features": head.feature_names, "encoding": encoding})
        return
    shapes = ", ".join(f"{name} (rows, {width})" for name, width in inputs.items())
    print(f"Inputs: {shapes} in {str(head.projection.shift.dtype).removeprefix('torch.')}.")
    if whole:
        print(f"Outputs: {', '.join(graphs.TRUSTED)}. The labels are those of the model's classifier.")
    if head.encoding is not None:
        if head.classifier is not None and logits:
            print("logits are those of the model's classifier: TrustHead.load(model).with_logits(table) gives both.")
        print(
            f"z holds {head.in_features} encoded numbers, not the {len(head.encoding.columns)} columns of the table: "
            "TrustHead.load(model).encode(table) gives them, and the file describes the encoding in its metadata."
        )
    print(f"Written: {printable(output)} ({size / 2**20:.1f} MiB)")
