"""The commands ``sepc novelties`` and ``sepc label-errors``, which list rows for a person to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sepc_torch.cli.shell import (
    AsJson,
    Categorical,
    Classes,
    Data,
    Ignored,
    Label,
    Logits,
    MaxRows,
    Missing,
    Model,
    Seed,
    Separator,
    app,
    existing_model,
    note,
    one_line_errors,
    print_json,
)
from sepc_torch.cli.streams import judged
from sepc_torch.data.text_table import printable

# Most rows that the search for wrong labels reads; it takes about a minute for so many.
_MAX_ROWS = 2**16

Output = Annotated[Path, typer.Option("--output", "-o", help="File to write the found rows to (.csv or .parquet).")]
Identify = Annotated[str | None, typer.Option("--id", help="Column to copy into the result.")]


@app.command()
@one_line_errors()
def novelties(
    model: Model,
    data: Data,
    output: Output,
    fdr: Annotated[
        float, typer.Option(help="Allowed share of known rows among those declared novel, on average.")
    ] = 0.1,
    identify: Identify = None,
    logits: Logits = None,
    sep: Separator = None,
    as_json: AsJson = False,
) -> None:
    """List the rows of a file that are of a new kind, the strangest first. All rows of the file are one batch."""
    import numpy as np
    import pyarrow as pa

    from sepc_torch.cli.row_files import open_rows
    from sepc_torch.cli_tables import WRITABLE, check_writable
    from sepc_torch.head.trust_head import TrustHead

    check_writable(output, WRITABLE)
    head = TrustHead.load(existing_model(model))
    head.sepc.nan_policy = "flag"  # one unusable row does not end the file
    z, scores, tables, left_out = [], [], [], 0
    for piece, points in judged(head, open_rows(data, sep), None, logits, [identify]):
        z.append(points.z)
        left_out += len(points.problems)
        if points.logits is not None:
            scores.append(points.logits)
        if identify is not None:
            tables.append(piece.table.select([identify]))
    if not sum(map(len, z)):
        raise ValueError(f"{str(data)!r} has no rows.")
    found = head.novelties(np.concatenate(z), np.concatenate(scores) if scores else None, fdr)
    rows = np.flatnonzero(found.novel.numpy())
    rows = rows[np.argsort(found.p_value.numpy()[rows], kind="stable")]
    names = pa.concat_tables(tables).take(pa.array(rows)) if tables else None
    values = {"p_value": found.p_value, "adjusted": found.adjusted}
    _write(output, rows, names, {name: column.numpy()[rows] for name, column in values.items()})
    if left_out:
        note(f"rows with an unusable value, which count as the strangest ones: {left_out}; `sepc score` names them.")
    described = {"output": str(output), "rows": len(found.novel), "novel": len(rows), "fdr": fdr, "least": found.least}
    if as_json:
        print_json(described | {"ordinary": found.ordinary, "threshold": found.threshold})
        return
    print(f"{len(rows)} of {len(found.novel)} rows are novel.", end=" ")
    if len(rows):
        print(f"On average at most {fdr:.1%} of the rows found are known ones.")
    else:
        print(f"Any can be found only if {found.least} or more are novel; calibrate with more rows to find fewer.")
    print(f"Written: {printable(output)}")


@app.command(name="label-errors")
@one_line_errors()
def label_errors(
    data: Data,
    output: Output,
    label: Label = None,
    fdr: Annotated[
        float | None,
        typer.Option(help="Allowed share of right labels among the listed rows. Default: rows more likely wrong."),
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=1, help="List this many rows, the most suspicious ones, instead of those found.")
    ] = None,
    drop: Ignored = None,
    categorical: Categorical = None,
    missing: Missing = None,
    identify: Identify = None,
    logits: Logits = None,
    classes: Classes = None,
    sep: Separator = None,
    max_rows: MaxRows = _MAX_ROWS,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """List the rows whose label the other rows contradict, the most suspicious first. It needs no model.

    Logits must come from a network that was not trained on these rows, for example out of fold.
    """
    import numpy as np

    from sepc_torch.cli.columns import notes_on_columns
    from sepc_torch.cli.row_files import open_rows
    from sepc_torch.cli.training_rows import ColumnOptions, notes_on_rows, training_rows
    from sepc_torch.cli_tables import WRITABLE, check_writable
    from sepc_torch.head.label_errors import suspicious_labels

    check_writable(output, WRITABLE)
    options = ColumnOptions(label, drop, categorical, missing, identify, logits, classes)
    rows = training_rows(open_rows(data, sep), options, max_rows, seed)
    z, scores = rows.points(rows.sample, rows.encoding(rows.sample)), rows.logits_of(rows.sample)
    if scores is not None:  # the search takes classes in sorted order
        scores = scores[:, np.argsort(np.array(rows.classes), kind="stable")]
    normalize = "l2" if rows.embeddings else None
    found = suspicious_labels(z, rows.targets, scores, fdr=fdr, normalize=normalize, seed=seed)
    listed = found.order[found.found[found.order]] if top is None else found.order[:top]
    names = None if identify is None else rows.sample.take(listed).table.select([identify])
    values = {"label": rows.targets, "suggested": found.suggested, "wrong": found.wrong, "adjusted": found.adjusted}
    _write(output, rows.sample.rows[listed], names, {name: column[listed] for name, column in values.items()})
    notes_on_columns(rows.columns)
    notes_on_rows(rows.sample)
    if as_json:
        counts = {"rows": len(rows.targets), "found": int(found.found.sum()), "share": found.share, "fdr": fdr}
        print_json({"output": str(output), **counts})
        return
    print(f"About {found.share:.1%} of {len(rows.targets)} labels seem wrong; rows listed: {len(listed)}.")
    if not len(listed):
        print("The other rows contradict no label clearly; --top 20 lists the most suspicious ones all the same.")
    print(f"Written: {printable(output)}")


def _write(output: Path, rows: Any, names: Any, columns: dict[str, Any]) -> None:
    """Write the numbers of rows, the user's column that names them, if there is one, and the columns found."""
    import pyarrow as pa

    from sepc_torch.cli.writing import score_writer

    named = {} if names is None else {name: names.column(name) for name in names.column_names}
    clash = sorted(set(named) & {"row", *columns})
    if clash:
        raise ValueError(f"--id {clash[0]!r} is also the name of a result; rename the column or leave out --id.")
    with score_writer(output) as writer:
        writer.write(pa.table({"row": pa.array(rows), **named, **{name: pa.array(v) for name, v in columns.items()}}))
