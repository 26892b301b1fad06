"""The commands ``sepc fit`` and ``sepc calibrate``: a calibrated trust head from a file of labelled rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from sepc_torch.cli.paper import Jobs, MaxImpure, NearestBy, Solver, Standardize, fit_paper
from sepc_torch.cli.shell import (
    AsJson,
    Data,
    Delta,
    FlagRate,
    Ignored,
    Label,
    Logits,
    MaxRows,
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
# Most rows that a fit reads into memory. Ellipsoids are fitted to about half as many.
_MAX_ROWS = 2**19
# Share of ordinary rows that a new head refuses, where the user asks for nothing else.
_FLAG_RATE = 0.05
_SCOPE = " It holds for rows drawn like the calibration rows."


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
    categorical: Annotated[
        list[str] | None, typer.Option(help="Column of numbers or text that names categories; repeatable.")
    ] = None,
    missing: Annotated[list[str] | None, typer.Option(help="Text that stands for a missing value; repeatable.")] = None,
    identify: Annotated[
        str | None, typer.Option("--id", help="Column that names the rows in explanations. Default: row number.")
    ] = None,
    logits: Logits = None,
    classes: Annotated[str | None, typer.Option(help="Labels in the order of the logits, separated by commas.")] = None,
    risk: Risk = None,
    delta: Delta = 0.05,
    flag_rate: FlagRate = None,
    sep: Separator = None,
    max_rows: MaxRows = _MAX_ROWS,
    seed: Seed = 0,
    jobs: Jobs = None,
    paper: Annotated[bool, typer.Option("--paper", help="Fit the paper's classifier, without calibration.")] = False,
    max_impure: MaxImpure = None,
    standardize: Standardize = True,
    nearest: Annotated[NearestBy, typer.Option(help=f"{NearestBy.__doc__} (--paper)")] = NearestBy.euclidean,
    solver: Solver = "native",
    as_json: AsJson = False,
) -> None:
    """Fit a model to labelled rows, and calibrate it on a quarter of them."""
    output = new_model(output)
    if paper:
        calibrated = {"categorical": categorical, "missing": missing, "logits": logits, "classes": classes}
        for option, given in (calibrated | {"id": identify, "sep": sep, "risk": risk, "flag-rate": flag_rate}).items():
            if given:
                raise ValueError(f"--{option} does not go with --paper, which reads plain tables of numbers.")
        fit_paper(data, output, label, drop, max_impure, standardize, nearest, solver, jobs, as_json)
        return
    import numpy as np

    from sepc_torch.cli.columns import (
        chosen_label,
        feature_columns,
        label_values,
        logit_columns,
        refuse_unusable,
        survey,
    )
    from sepc_torch.cli.head_rows import plain_numbers, sample_rows
    from sepc_torch.cli.row_files import open_rows
    from sepc_torch.data.table_encoding import MISSING, TableEncoding, category_texts
    from sepc_torch.head.trust_head import TrustHead

    file = open_rows(data, sep)
    drop, categorical = drop or [], categorical or []
    label = chosen_label(file, label)
    file.require([*drop, *categorical, *([] if identify is None else [identify])])
    order = None if classes is None else [name.strip() for name in classes.split(",")]
    scores = logit_columns(file, logits, order)
    embeddings = file.embeddings or bool(scores)
    features = feature_columns(file, [label, identify, *scores, *drop])
    columns = [*features, label, *scores, *([] if identify is None else [identify])]
    sample = sample_rows(file, list(dict.fromkeys(columns)), label, max_rows, seed)
    absent = (*MISSING, *(missing or []))
    found = survey(sample.table, sample.rows, features, categorical, frozenset(absent))
    if embeddings:
        told = "holds categories, which embeddings have not"
        found.unusable.update({name: f"{told} (--drop {name})" for name in found.categories})
    refuse_unusable(file, found.unusable)
    if embeddings:  # rows with a missing number have no embedding
        sample = sample.without(plain_numbers(_columns(sample, features)).problems)
    if scores:
        sample = sample.without(plain_numbers(_columns(sample, scores)).problems)
    targets = np.array(label_values(sample.table.column(label)))
    names = sorted(set(targets.tolist())) if order is None else _checked_order(order, targets)
    scores = logit_columns(file, logits, names)
    held, kept = _split(targets, seed)
    train, calibrating = sample.take(kept), sample.take(held)
    encoding = None
    if not embeddings:
        encoding = TableEncoding.fit(_columns(train, features), found.numbers, found.categories, absent)

    def points(part: Any) -> Any:
        columns = _columns(part, features)
        return (plain_numbers(columns) if encoding is None else encoding.encode(columns)).points

    if scores and len(scores) != len(names):
        raise ValueError(
            f"There are {len(scores)} columns of logits and {len(names)} labels; every class needs a column and rows. "
            "Name the columns with --logits, in the order of the sorted labels or of --classes."
        )
    head = TrustHead.fit(
        points(train),
        targets[kept],
        normalize="l2" if embeddings else None,
        nan_policy="flag",
        max_impure=max_impure,
        n_jobs=jobs,
        solver=solver,
        classes=names,
        ids=train.rows if identify is None else category_texts(train.table.column(identify).to_pylist()).tolist(),
    )
    named_features = tuple(features) if embeddings and file.named else None
    head = TrustHead(head.projection, head.sepc, head.evidence, named_features, head.reference_ids, encoding=encoding)
    head.calibrate(points(calibrating), targets[held], _logits(calibrating, scores), seed=seed)
    promise = promise_of(head, risk, delta, flag_rate)
    head.save(output)
    for name in found.suspicious:
        note(f"column {name!r} looks like a row number: new rows would all look strange. Leave it out: --drop {name}")
    notes_on_rows(sample)
    counts = Counter(targets.tolist())
    if as_json:
        described = {
            "model": str(output),
            "points": len(targets),
            "fitted": len(kept),
            "calibrated": len(held),
            "features": features,
            "categories": found.categories,
            "encoded": head.in_features,
            "classes": by_label(names, [counts[name] for name in names]),
            "logits": scores,
            "ellipsoids": len(head.sepc.bank),
            "suspicious": found.suspicious,
            "left_out": len(sample.left_out),
        }
        print_json(described | {"promise": promise.numbers})
        return
    print(f"Rows: {len(targets)}, of which {len(kept)} fit and {len(held)} calibrate (seed {seed}).")
    print(f"Classes: {', '.join(f'{printable(name)} ({counts[name]})' for name in names)}")
    print(f"Features: {', '.join(_described(name, encoding) for name in features)}")
    if encoding is not None and head.in_features != len(features):
        print(f"Encoded as {head.in_features} numbers.")
    if scores:
        print(f"Logits: {', '.join(f'{printable(c)} for {printable(n)}' for c, n in zip(scores, names, strict=True))}")
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
    max_rows: MaxRows = _MAX_ROWS,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Calibrate a model on labelled rows that it was not fitted on."""
    from sepc_torch.cli.columns import chosen_label, logit_columns
    from sepc_torch.cli.head_rows import labelled_points
    from sepc_torch.cli.row_files import open_rows
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


def promise_of(head: Any, risk: float | None, delta: float, flag_rate: float | None) -> Promise:
    """Set the acceptance threshold of a calibrated head; return what is promised.

    Args:
        head: The head.
        risk: Allowed share of wrong labels among the accepted ones, or None.
        delta: Allowed probability that the promise of ``risk`` fails.
        flag_rate: Allowed share of refused rows, or None; 5 % if neither is given.
    """
    if risk is not None and flag_rate is not None:
        raise ValueError("Pass --risk or --flag-rate, not both: one threshold keeps one promise.")
    if risk is None and flag_rate is None:
        flag_rate = head.calibration.own.least_flag_rate(_FLAG_RATE)
    found = head.accept_at(risk=risk, delta=delta, flag_rate=flag_rate)
    if risk is not None:
        text = (
            f"Promise: with probability {1 - delta:.0%} over the calibration rows, at most {risk:.1%} of the accepted "
            f"labels are wrong.{_SCOPE}"
        )
        if not found.found:
            text = (
                f"No promise: {found.points} calibration rows cannot show that at most {risk:.1%} of the accepted "
                "labels are wrong, so nothing is accepted. Allow a larger --risk, or calibrate with more rows."
            )
    else:
        text = f"Promise: on average at most {flag_rate:.1%} of new rows are refused.{_SCOPE}"
    if found.found:
        text += f"\nOn {found.points} ranked calibration rows: {found.coverage:.1%} accepted"
        text += "." if found.coverage == 0 else f", {found.error:.1%} of the accepted labels wrong."
    numbers = {"risk": risk, "delta": delta if risk is not None else None, "flag_rate": flag_rate, **found._asdict()}
    return Promise(text, numbers)


def notes_on_rows(sample: Any) -> None:
    """Say which rows were sampled and which were left out."""
    if sample.read > len(sample.rows) + len(sample.left_out):
        note(f"used a random sample of the {sample.read} rows of the file; --max-rows changes its size")
    if sample.left_out:
        row, problem = next(iter(sorted(sample.left_out.items())))
        few = "1 row is" if len(sample.left_out) == 1 else f"{len(sample.left_out)} rows are"
        note(f"{few} left out: row {row}: {problem}{', and more' if len(sample.left_out) > 1 else ''}")


def _columns(sample: Any, names: list[str]) -> dict[str, Any]:
    from sepc_torch.cli.columns import cells

    return {name: cells(sample.table.column(name)) for name in names}


def _logits(sample: Any, names: list[str]) -> Any:
    from sepc_torch.cli.head_rows import plain_numbers

    return plain_numbers(_columns(sample, names)).points if names else None


def _checked_order(order: list[str], targets: Any) -> list[Any]:
    """The classes in the order that the user names, with the type of the labels."""
    by_text = {str(name): name for name in set(targets.tolist())}
    if sorted(order) != sorted(by_text):
        raise ValueError(f"--classes names {order}, and the labels are {sorted(by_text)}; name each label once.")
    return [by_text[name] for name in order]


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
            "Add rows, or fit the paper's classifier with --paper."
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
