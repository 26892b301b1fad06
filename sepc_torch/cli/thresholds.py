"""The command ``sepc threshold``: which rows to accept by a score that the file holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer

from sepc_torch.cli import shell
from sepc_torch.cli.columns import IdColumns, label_texts, number_cells
from sepc_torch.cli.row_files import RowFile, open_rows, score_writer
from sepc_torch.data.table_encoding import MISSING, parse_numbers
from sepc_torch.data.text import printable
from sepc_torch.head.promises.scores import ScoreAcceptance, accept_scores

_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_PICTURES = (".png", ".svg", ".pdf")


def threshold(
    data: shell.Data,
    score: Annotated[str, typer.Option(help="Column with the scores; higher is safer. Rows without one are refused.")],
    right: Annotated[
        str | None,
        typer.Option(
            help="Column that says whether the prediction is right: true or false, 1 or 0, yes or no. Rows where it is "
            "empty are new ones, which set no threshold. Not needed with --flag-rate."
        ),
    ] = None,
    risk: shell.Risk = None,
    delta: shell.Delta = 0.05,
    flag_rate: shell.FlagRate = None,
    cost: Annotated[float | None, typer.Option(help="Cost of accepting a wrong prediction; needs --review.")] = None,
    review: Annotated[float | None, typer.Option(help="Cost of a refused row; needs --cost.")] = None,
    by: Annotated[str | None, typer.Option(help="Column with groups; each has its own threshold.")] = None,
    units: Annotated[
        str | None, typer.Option(help="Column with the units of the rows, such as patients, which are independent.")
    ] = None,
    lower: Annotated[bool, typer.Option("--lower-is-safer", help="A low score is safer than a high one.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "--out",
            "-o",
            help="File to write the decision of every row to (.csv, .csv.gz, .tsv, .jsonl or .parquet).",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Picture of the risk over the coverage to write (.png, .svg or .pdf).")
    ] = None,
    identify: shell.Copied = None,
    sep: shell.Separator = None,
    encoding: shell.Encoding = None,
    as_json: shell.AsJson = False,
) -> None:
    """Choose a threshold for the scores of a file, so that a promise about the accepted rows holds.

    It needs no model. The rows must not have trained the model that made the scores. Pass one of --risk, --flag-rate
    and --cost.
    """
    if sum(given is not None for given in (risk, flag_rate, cost)) != 1 or (cost is None) != (review is None):
        raise ValueError("Pass exactly one of --risk, --flag-rate and --cost; --cost needs --review.")
    if plot is not None and right is None:
        raise ValueError("--plot draws the share of wrong predictions: name the column of right ones with --right.")
    for path, suffixes in ((output, shell.WRITABLE), (plot, _PICTURES)):
        if path is not None:
            shell.check_writable(path, suffixes, data)
    file = open_rows(data, sep, encoding)
    ids = IdColumns(file, identify or [], output is not None and output.name.lower().endswith(".parquet"))
    names = [name for name in (score, right, by, units, *ids.names) if name is not None]
    file.require(names)
    table = _read(file, list(dict.fromkeys(names)))
    values = _scores(file, table, score)
    values = -values if lower else values
    flags = np.ones(len(values)) if right is None else _truth(file, table, right)
    known = ~np.isnan(flags)
    groups, of_units = (None if name is None else _names(file, table, name) for name in (by, units))
    if not known.any():
        raise ValueError(f"No row of {str(data)!r} says in {right!r} whether its prediction is right.")
    rule = accept_scores(
        values[known],
        None if right is None else flags[known] == 1.0,
        risk=risk,
        delta=delta,
        flag_rate=flag_rate,
        by=None if groups is None else groups[known],
        units=None if of_units is None else of_units[known],
        costs=cost,
        review=review,
    )
    accepted = rule(values, by=groups)
    if output is not None:
        with score_writer(output) as writer:
            own = pa.array(-values if lower else values, from_pandas=True)
            writer.write(ids.beside(table, {"score": own, "accept": pa.array(accepted)}, 0))
    if plot is not None:
        from matplotlib.figure import Figure  # no window, whatever the display

        figure = Figure(figsize=(6.0, 4.0), layout="constrained")
        rule.plot(figure.subplots())
        figure.savefig(plot)
    written = [str(path) for path in (output, plot) if path is not None]
    if as_json:
        shell.print_json(_described(rule, lower) | {"new": int((~known).sum()), "output": written})
        return
    text = str(rule)
    print(text.replace("(score >=", f"(-{score} >=") if lower else text)
    if not known.all():
        print(f"\n{accepted[~known].mean():.1%} of {int((~known).sum())} new rows are accepted.")
    for name in written:
        print(f"Written: {printable(name)}")


def _read(file: RowFile, columns: list[str]) -> pa.Table:
    """These columns of all rows; a broken row holds nulls."""
    pieces = list(file.pieces(columns, "read"))
    broken = sum(len(piece.problems) for piece in pieces)
    if not sum(piece.table.num_rows for piece in pieces):
        raise ValueError(f"{str(file.path)!r} has no rows.")
    if broken:
        shell.note(f"rows that cannot be read, which are refused: {broken}")
    return pa.concat_tables([piece.table for piece in pieces])


def _scores(file: RowFile, table: pa.Table, name: str) -> Any:
    """The scores, NaN where there is none."""
    missing = frozenset(MISSING)
    numbers, wrong = parse_numbers(number_cells(table.column(name), missing), missing)
    lacking = int(np.isnan(numbers).sum())
    if lacking == len(numbers):
        cell = shell.shortened(table.column(name)[0].as_py())
        raise ValueError(f"No cell of {name!r} in {str(file.path)!r} is a finite number; the first one is {cell}.")
    if lacking:
        shell.note(f"rows without a score, which are refused: {lacking} (no finite number: {int(wrong.sum())})")
    return np.where(wrong, np.nan, numbers)


def _truth(file: RowFile, table: pa.Table, name: str) -> Any:
    """1 where a prediction is right, 0 where it is wrong, NaN where the cell is empty."""
    texts = label_texts(table.column(name))
    for row, text in enumerate(texts):
        if text is not None and text.lower() not in _TRUTH:
            raise ValueError(
                f"{str(file.path)!r}, row {row}: {name!r} must say whether the prediction is right (true or false, "
                f"1 or 0, yes or no), got {shell.shortened(text)}."
            )
    return np.array([np.nan if text is None else float(_TRUTH[text.lower()]) for text in texts])


def _names(file: RowFile, table: pa.Table, name: str) -> Any:
    """Names of groups or units as text; every row must have one."""
    texts = label_texts(table.column(name))
    if None in texts:
        raise ValueError(f"{str(file.path)!r}, row {texts.index(None)} has no value of {name!r}; every row needs one.")
    return np.array(texts)


def _described(rule: ScoreAcceptance, lower: bool) -> dict[str, Any]:
    """The rule as JSON holds it, with thresholds in the units of the file."""
    sign = -1.0 if lower else 1.0
    names = ("found", "coverage", "error", "points", "cost")
    return {
        "threshold": None if rule.threshold is None else sign * rule.threshold,
        **{name: getattr(rule, name) for name in names},
        "promise": str(rule.promise),
        "bound": rule.promise.bound,
        "groups": [row._asdict() | {"group": row.group[0], "threshold": sign * row.threshold} for row in rule.groups],
    }
