"""The commands ``sepc report`` and ``sepc drift``, which judge all rows of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from pyarrow import concat_tables

from sepc_torch.cli import shell
from sepc_torch.cli.heads import HeadRows, use_promise
from sepc_torch.data.files import check_target
from sepc_torch.data.text import printable
from sepc_torch.head.drift import DriftMonitor
from sepc_torch.report import write_report


def report(
    model: shell.Model,
    data: shell.Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="Page to write (.html).")] = Path("report.html"),
    label: shell.Label = None,
    logits: shell.Logits = None,
    identify: Annotated[str | None, typer.Option("--id", help="Column that names the rows.")] = None,
    text: Annotated[str | None, typer.Option("--text", help="Column with texts to show.")] = None,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Trust report",
    risk: shell.Risk = None,
    delta: shell.Delta = 0.05,
    flag_rate: shell.FlagRate = None,
    sep: shell.Separator = None,
    encoding: shell.Encoding = None,
    trust: shell.Trust = False,
) -> None:
    """Write a trust report: one HTML page, and its numbers in a JSON file beside.

    Without --risk and --flag-rate the report is about the promise of the model.
    """
    shell.check_writable(output, [".html"])
    rows = HeadRows(model, data, sep, logits, label, [identify, text], encoding, trust)
    use_promise(rows.head, risk, delta, flag_rate)
    by_text = rows.classes_by_text()
    z, scores, tables, left_out = [], [], [], 0
    truth: list[Any] = []
    names: list[str] = []
    texts: list[str] = []
    for piece, points in rows.pieces():
        good = np.setdiff1d(np.arange(len(points.z)), list(points.problems))
        if points.truth is not None:
            good = good[[points.truth[i] is not None for i in good]]
            truth += [by_text.get(str(points.truth[i]), points.truth[i]) for i in good]
        left_out += len(points.z) - len(good)
        z.append(points.z[good])
        if rows.head.encoding is not None:  # the cells as they are in the file, to be shown
            tables.append(piece.table.select(list(rows.head.encoding.columns)).take(good))
        if points.logits is not None:
            scores.append(points.logits[good])
        for column, cells in ((identify, names), (text, texts)):
            if column is not None:
                values = piece.table.column(column).to_pylist()
                cells += [str(values[i]) for i in good]
    if not sum(map(len, z)):
        raise ValueError(f"{str(data)!r} has no row that can be judged.")
    path = write_report(
        rows.head,
        np.concatenate(z),
        None if rows.label is None else truth,
        np.concatenate(scores) if scores else None,
        output,
        ids=None if identify is None else names,
        texts=None if text is None else texts,
        table=concat_tables(tables, promote_options="permissive") if tables else None,
        title=title,
        model=model.name,
        data=data.name,
    )
    if left_out:
        shell.note(f"rows left out, without a label or with an unusable value: {left_out}; `sepc score` names them.")
    print(f"Written: {printable(path)} (open it in a browser) and {printable(path.with_suffix('.json'))}")


def drift(
    model: shell.Model,
    data: shell.Data,
    logits: shell.Logits = None,
    alpha: Annotated[float, typer.Option(help="Probability of ever raising an alarm without drift.")] = 0.01,
    state: Annotated[
        Path | None, typer.Option(help="File that carries the stream on from one call to the next; made if missing.")
    ] = None,
    identify: Annotated[str | None, typer.Option("--id", help="Column that names rows that moved.")] = None,
    sep: shell.Separator = None,
    encoding: shell.Encoding = None,
    trust: shell.Trust = False,
    as_json: shell.AsJson = False,
) -> None:
    """Tell whether the rows of a file, in their order, still look like the rows that calibrated the model.

    With --state the rows continue the stream of earlier calls, and --alpha holds for all of them together. The exit
    code is 1 if the rows have drifted, and 0 if no drift is shown.
    """
    rows = HeadRows(model, data, sep, logits, None, [identify], encoding, trust)
    if state is not None:
        check_target(state)
    head = rows.head
    monitor = DriftMonitor(head, alpha) if state is None or not state.exists() else DriftMonitor.load(state, head)
    if monitor.alpha != alpha:
        raise ValueError(f"The stream of {str(state)!r} began with --alpha {monitor.alpha:g}, got {alpha:g}; keep it.")
    before = monitor.report().seen
    left_out = 0
    for piece, points in rows.pieces():
        names = None if identify is None else [str(name) for name in piece.table.column(identify).to_pylist()]
        monitor.update(points.z, points.logits, ids=names)
        left_out += len(points.problems)
    found = monitor.report()
    if found.seen == before:
        raise ValueError(f"{str(data)!r} has no rows.")
    if state is not None:
        monitor.save(state)
    if left_out:
        shell.note(f"rows with an unusable value, which count as the most unusual ones: {left_out}")
    if as_json:
        shell.print_json(found.to_dict())
    else:
        print(found)
    if found.alarm:
        raise typer.Exit(1)
