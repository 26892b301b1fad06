"""The commands ``sepc novelties`` and ``sepc label-errors``, which list rows for a person to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer

from sepc_torch.cli import shell
from sepc_torch.cli.columns import notes_on_columns
from sepc_torch.cli.heads import HeadRows
from sepc_torch.cli.row_files import open_rows, score_writer
from sepc_torch.cli.training_rows import ColumnOptions, notes_on_rows, training_rows
from sepc_torch.data.text import printable
from sepc_torch.head.label_errors import suspicious_labels

# Most rows that the search for wrong labels reads; it takes about a minute for so many.
_MAX_ROWS = 2**16
# Groups of novel rows that are printed.
_GROUPS = 5

Output = Annotated[
    Path,
    typer.Option("--output", "-o", help="File to write the found rows to (.csv, .csv.gz, .tsv, .jsonl or .parquet)."),
]
Identify = Annotated[str | None, typer.Option("--id", help="Column to copy into the result.")]


def novelties(
    model: shell.Model,
    data: shell.Data,
    output: Output,
    fdr: Annotated[
        float, typer.Option(help="Allowed share of known rows among those declared novel, on average.")
    ] = 0.1,
    identify: Identify = None,
    logits: shell.Logits = None,
    target: Annotated[
        Path | None,
        typer.Option(help="File with other, known rows from where these rows are from, if the data have shifted."),
    ] = None,
    sep: shell.Separator = None,
    encoding: shell.Encoding = None,
    trust: shell.Trust = False,
    as_json: shell.AsJson = False,
) -> None:
    """List the rows of a file that are of a new kind, the strangest first.

    All rows of the file are one batch. Found rows that are near each other have the same number in the column group;
    the largest group, which may be a new class, is 1.
    """
    shell.check_writable(output, shell.WRITABLE)
    given = HeadRows(model, data, sep, logits, None, [identify], encoding, trust)
    z, scores, tables, left_out = [], [], [], 0
    for piece, points in given.pieces():
        z.append(points.z)
        left_out += len(points.problems)
        if points.logits is not None:
            scores.append(points.logits)
        if identify is not None:
            tables.append(piece.table.select([identify]))
    if not sum(map(len, z)):
        raise ValueError(f"{str(data)!r} has no rows.")
    known, known_logits = None, None
    if target is not None:
        known, known_logits = HeadRows(model, target, sep, logits, encoding=encoding, trust=trust).usable()
    batch = np.concatenate(z), np.concatenate(scores) if scores else None
    found = given.head.novelties(*batch, fdr, target=known, target_logits=known_logits)
    rows = np.flatnonzero(found.novel.numpy())
    rows = rows[np.argsort(found.p_value.numpy()[rows], kind="stable")]
    names = pa.concat_tables(tables).take(pa.array(rows)) if tables else None
    group = np.zeros(len(found.novel), dtype=np.int64)  # 0 for a row that cannot be compared
    for number, members in enumerate(found.groups, start=1):
        group[np.array(members.ids, dtype=np.int64)] = number
    values = {"p_value": found.p_value.numpy(), "adjusted": found.adjusted.numpy(), "group": group}
    _write(output, rows, names, {name: column[rows] for name, column in values.items()})
    if left_out:
        shell.note(
            f"rows with an unusable value, which count as the strangest ones: {left_out}; `sepc score` names them."
        )
    described = {"output": str(output), "rows": len(found.novel), "novel": len(rows), "fdr": fdr, "least": found.least}
    if as_json:
        groups = [members.to_dict() for members in found.groups]
        shell.print_json(described | {"ordinary": found.ordinary, "threshold": found.threshold, "groups": groups})
        return
    print(f"{len(rows)} of {len(found.novel)} rows are novel.", end=" ")
    if len(rows):
        print(f"On average at most {fdr:.1%} of the rows found are known ones.")
        for number, members in enumerate(found.groups[:_GROUPS], start=1):
            print(f"Group {number}: {members}")
    else:
        print(f"Any can be found only if {found.least} or more are novel; calibrate with more rows to find fewer.")
    print(f"Written: {printable(output)}")


def label_errors(
    data: shell.Data,
    output: Output,
    label: shell.Label = None,
    fdr: Annotated[
        float | None,
        typer.Option(help="Allowed share of right labels among the listed rows. Default: rows more likely wrong."),
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=1, help="List this many rows, the most suspicious ones, instead of those found.")
    ] = None,
    drop: shell.Ignored = None,
    categorical: shell.Categorical = None,
    missing: shell.Missing = None,
    identify: Identify = None,
    logits: shell.Logits = None,
    classes: shell.Classes = None,
    sep: shell.Separator = None,
    encoding: shell.Encoding = None,
    decimal: shell.Decimal = None,
    na_values: shell.NaValues = None,
    max_rows: shell.MaxRows = _MAX_ROWS,
    seed: shell.Seed = 0,
    as_json: shell.AsJson = False,
) -> None:
    """List the rows whose label the other rows contradict, the most suspicious first.

    It needs no model. Logits must come from a network that was not trained on these rows, for example out of fold.
    """
    shell.check_writable(output, shell.WRITABLE)
    options = ColumnOptions(label, drop, categorical, missing, identify, logits, classes, None, na_values)
    options = options._replace(decimal=shell.decimal_mark(decimal))
    rows = training_rows(open_rows(data, sep, encoding), options, max_rows, seed)
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
        shell.print_json({"output": str(output), **counts})
        return
    print(f"About {found.share:.1%} of {len(rows.targets)} labels seem wrong; rows listed: {len(listed)}.")
    if not len(listed):
        print("The other rows contradict no label clearly; --top 20 lists the most suspicious ones all the same.")
    print(f"Written: {printable(output)}")


def _write(output: Path, rows: Any, names: Any, columns: dict[str, Any]) -> None:
    """Write the numbers of rows, the user's column that names them, if there is one, and the columns found."""
    named = {} if names is None else {name: names.column(name) for name in names.column_names}
    clash = sorted(set(named) & {"row", *columns})
    if clash:
        raise ValueError(f"--id {clash[0]!r} is also the name of a result; rename the column or leave out --id.")
    with score_writer(output) as writer:
        writer.write(pa.table({"row": pa.array(rows), **named, **{name: pa.array(v) for name, v in columns.items()}}))
