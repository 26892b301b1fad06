"""The commands ``sepc report`` and ``sepc drift``, which judge all rows of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sepc_torch.cli.fitting import use_promise
from sepc_torch.cli.shell import (
    AsJson,
    Data,
    Delta,
    FlagRate,
    Label,
    Logits,
    Model,
    Risk,
    Separator,
    app,
    existing_model,
    note,
    one_line_errors,
    print_json,
)
from sepc_torch.data.text_table import printable

if TYPE_CHECKING:
    from sepc_torch.cli.head_rows import Points
    from sepc_torch.cli.row_files import Piece, RowFile
    from sepc_torch.head.trust_head import TrustHead


@app.command()
@one_line_errors()
def report(
    model: Model,
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="Page to write (.html).")] = Path("report.html"),
    label: Label = None,
    logits: Logits = None,
    identify: Annotated[str | None, typer.Option("--id", help="Column that names the rows.")] = None,
    text: Annotated[str | None, typer.Option("--text", help="Column with texts to show.")] = None,
    risk: Risk = None,
    delta: Delta = 0.05,
    flag_rate: FlagRate = None,
    sep: Separator = None,
) -> None:
    """Write a trust report: one HTML page, and its numbers in a JSON file beside.

    Without --risk and --flag-rate the report is about the promise of the model.
    """
    import numpy as np

    from sepc_torch.cli.row_files import open_rows
    from sepc_torch.cli_tables import check_writable
    from sepc_torch.data.table_encoding import category_texts
    from sepc_torch.head.trust_head import TrustHead

    check_writable(output, [".html"])
    head = TrustHead.load(existing_model(model))
    use_promise(head, risk, delta, flag_rate)
    file = open_rows(data, sep)
    label = label or file.label
    by_text = dict(zip(category_texts(head.classes).tolist(), head.classes, strict=True))
    z, scores, left_out = [], [], 0
    truth: list[Any] = []
    names: list[str] = []
    texts: list[str] = []
    for piece, points in judged(head, file, label, logits, [identify, text]):
        good = np.setdiff1d(np.arange(len(points.z)), list(points.problems))
        if points.truth is not None:
            good = good[[points.truth[i] is not None for i in good]]
            truth += [by_text.get(str(points.truth[i]), points.truth[i]) for i in good]
        left_out += len(points.z) - len(good)
        z.append(points.z[good])
        if points.logits is not None:
            scores.append(points.logits[good])
        for column, cells in ((identify, names), (text, texts)):
            if column is not None:
                values = piece.table.column(column).to_pylist()
                cells += [str(values[i]) for i in good]
    if not sum(map(len, z)):
        raise ValueError(f"{str(data)!r} has no row that can be judged.")
    path = head.report(
        np.concatenate(z),
        None if label is None else truth,
        np.concatenate(scores) if scores else None,
        output,
        ids=None if identify is None else names,
        texts=None if text is None else texts,
    )
    if left_out:
        note(f"rows left out, without a label or with an unusable value: {left_out}; `sepc score` names them.")
    print(f"Written: {printable(path)} and {printable(path.with_suffix('.json'))}")


@app.command()
@one_line_errors()
def drift(
    model: Model,
    data: Data,
    logits: Logits = None,
    alpha: Annotated[float, typer.Option(help="Probability of ever raising an alarm without drift.")] = 0.01,
    state: Annotated[
        Path | None, typer.Option(help="File that carries the stream on from one call to the next; made if missing.")
    ] = None,
    sep: Separator = None,
    as_json: AsJson = False,
) -> None:
    """Tell whether the rows of a file, in their order, still look like the rows that calibrated the model.

    With --state the rows continue the stream of earlier calls, and --alpha holds for all of them together. The exit
    code is 1 if the rows have drifted, and 0 if no drift is shown.
    """
    from sepc_torch.cli.row_files import open_rows
    from sepc_torch.data.files import check_target
    from sepc_torch.head.drift import DriftMonitor
    from sepc_torch.head.trust_head import TrustHead

    head = TrustHead.load(existing_model(model))
    if state is not None:
        check_target(state)
    monitor = DriftMonitor(head, alpha) if state is None or not state.exists() else DriftMonitor.load(state, head)
    if monitor.alpha != alpha:
        raise ValueError(f"The stream of {str(state)!r} began with --alpha {monitor.alpha:g}, got {alpha:g}; keep it.")
    before = monitor.report().seen
    head.sepc.nan_policy = "flag"  # one unusable row does not end the file
    left_out = 0
    for _, points in judged(head, open_rows(data, sep), None, logits, []):
        monitor.update(points.z, points.logits)
        left_out += len(points.problems)
    found = monitor.report()
    if found.seen == before:
        raise ValueError(f"{str(data)!r} has no rows.")
    if state is not None:
        monitor.save(state)
    if left_out:
        note(f"rows with an unusable value, which count as the most unusual ones: {left_out}")
    if as_json:
        print_json(found.to_dict())
    else:
        print(found)
    if found.alarm:
        raise typer.Exit(1)


def judged(
    head: TrustHead, file: RowFile, label: str | None, logits: str | None, others: list[str | None]
) -> Iterator[tuple[Piece, Points]]:
    """Read the rows of a file as points of a head, a piece at a time; ``others`` are columns that are no features."""
    from sepc_torch.cli.columns import logit_columns
    from sepc_torch.cli.head_rows import head_features, note_missing_logits, points_of, with_progress

    scores = logit_columns(file, logits, head.classes)
    named = [column for column in (label, *others) if column is not None]
    file.require(named)
    features = head_features(head, file, [file.label, *named, *scores])
    note_missing_logits(head, scores)
    columns: list[Any] = list(dict.fromkeys([*features, *scores, *named]))
    for piece in with_progress(file, columns, "read"):
        yield piece, points_of(head, piece, features, scores, label)
