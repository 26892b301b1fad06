"""The command ``sepc export``: a model file for ONNX Runtime or for plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sepc_torch.cli.shell import AsJson, Model, app, existing_model, one_line_errors, print_json
from sepc_torch.data.text_table import printable


@app.command()
@one_line_errors()
def export(
    model: Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write: .onnx for ONNX Runtime, .pt2 for torch.export.load.")
    ],
    logits: Annotated[
        bool | None,
        typer.Option(help="Whether the file takes logits; by default if the model was calibrated with logits."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a model as a graph that runs without sepc_torch: ONNX, or a program of torch.export."""
    from sepc_torch.cli_tables import check_writable
    from sepc_torch.head.trust_head import TrustHead

    check_writable(output, [".onnx", ".pt2"])
    head = TrustHead.load(existing_model(model))
    if logits is None:
        logits = head.calibration is not None and head.calibration.network.done
    write = head.to_onnx if output.suffix.lower() == ".onnx" else head.export
    write(output, logits=logits)
    inputs = {"z": head.in_features} | ({"logits": len(head.classes)} if logits else {})
    size = output.stat().st_size
    if as_json:
        described = {"file": str(output), "bytes": size, "columns": inputs, "classes": head.classes}
        encoding = None if head.encoding is None else head.encoding.to_dict()
        print_json(described | {"features": head.feature_names, "encoding": encoding})
        return
    shapes = ", ".join(f"{name} (rows, {width})" for name, width in inputs.items())
    print(f"Inputs: {shapes} in {str(head.projection.shift.dtype).removeprefix('torch.')}.")
    if head.encoding is not None:
        print(
            f"z holds {head.in_features} encoded numbers, not the {len(head.encoding.columns)} columns of the table: "
            "TrustHead.load(model).encode(table) gives them, and the file describes the encoding in its metadata."
        )
    print(f"Written: {printable(output)} ({size / 2**20:.1f} MiB)")
