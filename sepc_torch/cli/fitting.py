"""The commands ``sepc fit`` and ``sepc calibrate``: a calibrated trust head from a file of labelled rows."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from sepc_torch.cli.paper import Jobs, MaxImpure, NearestBy, Solver, Standardize, fit_paper
from sepc_torch.cli.shell import (
    AsJson,
    Categorical,
    Classes,
    Data,
    Delta,
    FlagRate,
    Ignored,
    Label,
    Logits,
    MaxRows,
    Missing,
    Model,
    Risk,
    Seed,
    Separator,
    app,
    by_label,
    existing_model,
    new_model,
    note,
    one_line_errors,
    print_json,
)
from sepc_torch.data.text_table import printable

# Share of the rows that calibrate.
_HELD = 0.25
# Share of rows that a new head refuses, where the user asks for nothing else.
_FLAG_RATE = 0.05
_SCOPE = " It holds for rows drawn like the calibration rows."


class Rows(NamedTuple):
    """Rows that a user must add for each further calibration row, and their name."""

    number: float = 1.0
    name: str = "calibration rows"


_CALIBRATION = Rows()


class Promise(NamedTuple):
    """The acceptance threshold of a head, in words and numbers."""

    text: str
    numbers: dict[str, Any]


@app.command()
@one_line_errors()
def fit(
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="Model file to write (.safetensors).")],
    label: Label = None,
    drop: Ignored = None,
    categorical: Categorical = None,
    missing: Missing = None,
    identify: Annotated[
        str | None, typer.Option("--id", help="Column that names the rows in explanations. Default: row number.")
    ] = None,
    logits: Logits = None,
    classes: Classes = None,
    risk: Risk = None,
    delta: Delta = 0.05,
    flag_rate: FlagRate = None,
    sep: Separator = None,
    max_rows: MaxRows = None,
    seed: Seed = 0,
    jobs: Jobs = None,
    paper: Annotated[
        bool,
        typer.Option("--paper", help="Fit the paper's classifier, without calibration; reads the whole file at once."),
    ] = False,
    max_impure: MaxImpure = None,
    standardize: Standardize = True,
    nearest: Annotated[NearestBy, typer.Option(help=f"{NearestBy.__doc__} (--paper)")] = NearestBy.euclidean,
    solver: Solver = "native",
    keep_points: Annotated[
        bool, typer.Option("--keep-points", help="Keep the training rows in the model, to update it later in Python.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Fit a model to labelled rows, and calibrate it on a quarter of them."""
    output = new_model(output)
    if paper:
        calibrated: dict[str, Any] = {
            "categorical": categorical,
            "missing": missing,
            "logits": logits,
            "classes": classes,
        }
        calibrated |= {"id": identify, "sep": sep, "risk": risk, "flag-rate": flag_rate, "keep-points": keep_points}
        for option, given in calibrated.items():
            if given:
                raise ValueError(f"--{option} does not go with --paper, which reads plain tables of numbers.")
        fit_paper(data, output, label, drop, max_impure, standardize, nearest, solver, jobs, as_json)
        return
    from sepc_torch.cli.columns import notes_on_columns
    from sepc_torch.cli.row_files import open_rows
    from sepc_torch.cli.training_rows import ColumnOptions, notes_on_rows, training_rows
    from sepc_torch.data.table_encoding import category_texts
    from sepc_torch.head.trust_head import TrustHead

    file = open_rows(data, sep)
    options = ColumnOptions(label, drop, categorical, missing, identify, logits, classes)
    rows = training_rows(file, options, max_rows, seed)
    held, kept = _split(rows.targets, seed)
    train, calibrating = rows.sample.take(kept), rows.sample.take(held)
    encoding = rows.encoding(train)
    head = TrustHead.fit(
        rows.points(train, encoding),
        rows.targets[kept],
        normalize="l2" if rows.embeddings else None,
        nan_policy="flag",
        max_impure=max_impure,
        n_jobs=jobs,
        solver=solver,
        keep_points=keep_points,
        classes=rows.classes,
        ids=train.rows if identify is None else category_texts(train.table.column(identify).to_pylist()).tolist(),
    )
    names = tuple(rows.features) if rows.embeddings and file.named else None
    parts = head.projection, head.sepc, head.evidence, names, head.reference_ids, head.training_set
    head = TrustHead(*parts, encoding=encoding)
    head.calibrate(rows.points(calibrating, encoding), rows.targets[held], rows.logits_of(calibrating), seed=seed)
    promise = promise_of(head, risk, delta, flag_rate, Rows(1.0 / _HELD, "rows in the file (a quarter calibrates)"))
    head.save(output)
    notes_on_columns(rows.columns)
    notes_on_rows(rows.sample)
    counts = Counter(rows.targets.tolist())
    if as_json:
        described = {
            "model": str(output),
            "points": len(rows.targets),
            "fitted": len(kept),
            "calibrated": len(held),
            "features": rows.features,
            "categories": rows.columns.categories,
            "encoded": head.in_features,
            "classes": by_label(rows.classes, [counts[name] for name in rows.classes]),
            "logits": rows.logits,
            "ellipsoids": len(head.sepc.bank),
            "suspicious": rows.columns.suspicious,
            "dates": rows.columns.dates,
            "left_out": len(rows.sample.left_out),
        }
        print_json(described | {"promise": promise.numbers})
        return
    print(f"Rows: {len(rows.targets)}, of which {len(kept)} fit and {len(held)} calibrate (seed {seed}).")
    print(f"Classes: {', '.join(f'{printable(name)} ({counts[name]})' for name in rows.classes)}")
    print(f"Features: {', '.join(_described(name, encoding) for name in rows.features)}")
    if encoding is not None and head.in_features != len(rows.features):
        print(f"Encoded as {head.in_features} numbers.")
    if rows.logits:
        pairs = zip(rows.logits, rows.classes, strict=True)
        print(f"Logits: {', '.join(f'{printable(column)} for {printable(name)}' for column, name in pairs)}")
    print(f"{promise.text}\nWritten: {printable(output)}")


@app.command()
@one_line_errors()
def calibrate(
    model: Model,
    data: Data,
    label: Label = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Model file to write; by default the model is replaced.")
    ] = None,
    logits: Logits = None,
    risk: Risk = None,
    delta: Delta = 0.05,
    flag_rate: FlagRate = None,
    sep: Separator = None,
    max_rows: MaxRows = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Calibrate a model on labelled rows that it was not fitted on."""
    from sepc_torch.cli.columns import chosen_label, logit_columns
    from sepc_torch.cli.head_rows import labelled_points
    from sepc_torch.cli.row_files import open_rows
    from sepc_torch.cli.training_rows import notes_on_rows
    from sepc_torch.head.trust_head import TrustHead

    model = existing_model(model)
    output = new_model(output or model)
    head = TrustHead.load(model)
    file = open_rows(data, sep)
    label = chosen_label(file, label)
    rows = labelled_points(head, file, label, logit_columns(file, logits, head.classes), max_rows, seed)
    before = head.promise
    head.calibrate(rows.z, rows.targets, rows.logits, seed=seed)
    if risk is None and flag_rate is None and before is not None and before.risk is not None and before.by is None:
        risk, delta = before.risk, before.delta  # the promise that the model had
    promise = promise_of(head, risk, delta, flag_rate)
    head.save(output)
    notes_on_rows(rows.sample)
    if as_json:
        counts = {"calibrated": len(rows.targets), "left_out": len(rows.sample.left_out)}
        print_json({"model": str(output), **counts, "promise": promise.numbers})
    else:
        print(f"Rows: {len(rows.targets)} calibrate (seed {seed}).\n{promise.text}\nWritten: {printable(output)}")


def use_promise(head: Any, risk: float | None, delta: float, flag_rate: float | None) -> None:
    """Set the acceptance threshold of a head if the user asks for a promise; note a promise that cannot be kept."""
    if risk is not None or flag_rate is not None:
        promise = promise_of(head, risk, delta, flag_rate)
        if not promise.numbers["found"]:
            note(promise.text)


def promise_of(
    head: Any, risk: float | None, delta: float, flag_rate: float | None, rows: Rows = _CALIBRATION
) -> Promise:
    """Set the acceptance threshold of a calibrated head; return what is promised.

    Args:
        head: The head.
        risk: Allowed share of wrong labels among the accepted ones, or None.
        delta: Allowed probability that the promise of ``risk`` fails.
        flag_rate: Allowed share of refused rows, or None; 5 % if neither is given.
        rows: Rows to add if there are too few.
    """
    if risk is not None and flag_rate is not None:
        raise ValueError("Pass --risk or --flag-rate, not both: one threshold keeps one promise.")
    labels = head.calibration.network if head.calibration.network.done else head.calibration.own
    wanted = _FLAG_RATE if flag_rate is None else flag_rate
    if risk is None and flag_rate is None:
        flag_rate = labels.least_flag_rate(_FLAG_RATE)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The head accepts", UserWarning)  # the promise says so
        found = head.accept_at(risk=risk, delta=delta, flag_rate=flag_rate)
    if risk is not None:
        text = (
            f"Promise: with probability {1 - delta:.0%} over the calibration rows, at most {risk:.1%} of the accepted "
            f"labels are wrong.{_SCOPE}"
        )
        if not found.found:
            text = f"No promise, nothing is accepted: {labels.shortfall(risk, delta, *rows)}"
    else:
        text = f"Promise: on average at most {flag_rate:.1%} of new rows are refused.{_SCOPE}"
        if labels.least_flag_rate(wanted) > wanted:
            text += f"\nNote: {labels.flag_rate_shortfall(wanted, *rows)}"
    if found.found:
        text += f"\nOn the {found.points} calibration rows that set the threshold: {found.coverage:.1%} accepted"
        text += "." if found.coverage == 0 else f", {found.error:.1%} of the accepted labels wrong."
    asked = {"text": text, "risk": risk, "delta": delta if risk is not None else None, "flag_rate": flag_rate}
    return Promise(text, {**asked, **found._asdict()})


def _split(targets: Any, seed: int) -> tuple[Any, Any]:
    """Positions of the rows that calibrate and of those that fit: a quarter and the rest, by chance in each class."""
    import numpy as np

    from sepc_torch.head.calibration_set import LEAST_CALIBRATION

    rng = np.random.default_rng(seed)
    classes, codes = np.unique(targets, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"The labels hold the single class {classes.tolist()[0]!r}; a model needs at least two.")
    held = []
    for code in range(len(classes)):
        own = np.flatnonzero(codes == code)
        held.append(rng.permutation(own)[: round(_HELD * len(own))])
    chosen = np.sort(np.concatenate(held))
    if len(chosen) < LEAST_CALIBRATION:
        raise ValueError(
            f"{len(targets)} rows are too few: a quarter of them calibrates, which takes at least {LEAST_CALIBRATION}. "
            f"Add about {round((LEAST_CALIBRATION - len(chosen)) / _HELD)} rows, or fit the paper's classifier with "
            "--paper."
        )
    return chosen, np.setdiff1d(np.arange(len(targets)), chosen)


def _described(name: str, encoding: Any) -> str:
    shown = printable(name)
    if encoding is not None:
        for column in encoding.categories:
            if column.name == name:
                return f"{shown} ({len(column.categories)} categories{' and other' if column.other else ''})"
        if any(column.name == name and column.gaps for column in encoding.numbers):
            return f"{shown} (with gaps)"
    return shown
