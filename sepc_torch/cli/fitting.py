"""The commands ``sepc fit`` and ``sepc calibrate``: a calibrated trust head from a file of labelled rows."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from sklearn.exceptions import ConvergenceWarning

from sepc_torch.cli import shell
from sepc_torch.cli.columns import notes_on_columns
from sepc_torch.cli.heads import HeadRows, calibrated_labels, made_the_head, set_promise
from sepc_torch.cli.row_files import open_rows
from sepc_torch.cli.training_rows import (
    ColumnOptions,
    TrainingRows,
    equal_rows,
    leaks,
    notes_on_leaks,
    notes_on_rows,
    training_rows,
    unit_names,
)
from sepc_torch.data.table_encoding import category_texts, part_name, row_hashes
from sepc_torch.data.text import printable
from sepc_torch.head.calibration.calibration import LEAST_CALIBRATION
from sepc_torch.head.reading.defaults import default_dim
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.shapes import Array, Int
from sepc_torch.sklearn.tables import check_kind, fit_classifier, right_shares

# Share of the rows that calibrate.
_HELD = 0.25
# Dimensions that a head may be reduced to, so that its smallest class has twice as many rows.
_LEAST_DIM = 8
# Rows that ellipsoids are fitted to where a classifier gives the labels, and the least number of each class: they then
# describe regions, and overlapping classes take time that grows faster than their rows.
_MOST_FITTED, _LEAST_SAMPLE = 2**12, 2**8
# Classifiers of which the better one is the default.
_CHOICE = ("boosting", "logistic")
_NAMES = {"boosting": "gradient boosting", "forest": "a random forest", "logistic": "a logistic regression"}


def fit(
    data: shell.Data,
    output: shell.NewModel,
    label: shell.Label = None,
    drop: shell.Ignored = None,
    categorical: shell.Categorical = None,
    missing: shell.Missing = None,
    identify: Annotated[
        str | None, typer.Option("--id", help="Column that names the rows in explanations. Default: row number.")
    ] = None,
    logits: shell.Logits = None,
    classes: shell.Classes = None,
    units: shell.Units = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Classifier that gives the labels: boosting, forest, logistic, sepc (the ellipsoids alone), or "
            "module:object for your own estimator. Default: boosting or logistic, whichever labels more rows right on "
            "folds of the rows that fit; sepc for embeddings, unless they have --logits."
        ),
    ] = None,
    risk: shell.Risk = None,
    delta: shell.Delta = 0.05,
    flag_rate: shell.FlagRate = None,
    by: shell.By = None,
    sep: shell.Separator = None,
    encoding: shell.Encoding = None,
    decimal: shell.Decimal = None,
    na_values: shell.NaValues = None,
    max_rows: shell.MaxTableRows = None,
    seed: shell.Seed = 0,
    jobs: shell.Jobs = None,
    max_impure: shell.MaxImpure = None,
    solver: shell.Solver = "native",
    keep_points: Annotated[
        bool, typer.Option("--keep-points", help="Keep the training rows in the model, to update it later in Python.")
    ] = False,
    as_json: shell.AsJson = False,
) -> None:
    """Fit a model to labelled rows, and calibrate it on a quarter of them."""
    output = shell.new_model(output)
    if model not in (None, "sepc"):
        check_kind(model)
    file = open_rows(data, sep, encoding)
    options = ColumnOptions(label, drop, categorical, missing, identify, logits, classes, units, na_values)
    options = options._replace(decimal=shell.decimal_mark(decimal))
    rows = training_rows(file, options, max_rows, seed)
    if model is None and rows.embeddings:
        model = "sepc"
    elif rows.embeddings and model != "sepc":
        raise ValueError("--model is for tables, and these rows are embeddings of a network: leave it out.")
    if identify is not None and units is None:
        names = rows.sample.table.column(identify)
        repeated = len(names) - len(names.unique())
        if repeated:
            shell.note(
                f"{repeated} rows repeat an id of {printable(identify)}. Rows with the same id are not independent, "
                f"and the promise holds for independent rows only: pass --units {printable(identify)}."
            )
    unit = unit_names(rows.sample, units)
    groups = equal_rows(rows) if unit is None else None
    held, kept = _split(rows.targets, unit if groups is None else groups, seed)
    if groups is not None and len(_sizes(rows, kept)) < len(rows.classes):  # a class lies in repeated rows only
        groups = None
        held, kept = _split(rows.targets, None, seed)
    train, calibrating = rows.sample.take(kept), rows.sample.take(held)
    encoded = rows.encoding(train)
    points = rows.points(train, encoded)
    classifier, dim, most = None, None, None
    compared: dict[str, float] = {}
    if model != "sepc":
        assert encoded is not None
        sizes = _sizes(rows, kept)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=ConvergenceWarning)  # the labels are measured below
            if model is None:
                together = unit if groups is None else groups
                together = None if together is None else np.unique(together[kept], return_inverse=True)[1]
                compared = right_shares(_CHOICE, points, rows.targets[kept], encoded, together, seed)
                model = max(compared, key=lambda kind: compared[kind])  # the first of equal ones
            classifier = fit_classifier(model, points, rows.targets[kept], encoded, seed)
        least = int(sizes.min()) // 2
        dim = min(least, default_dim(sizes, points.shape[1])) if least >= _LEAST_DIM else None
        most = max(_LEAST_SAMPLE, _MOST_FITTED // len(sizes))
    head = TrustHead.fit(
        points,
        rows.targets[kept],
        dim=dim,
        normalize="l2" if rows.embeddings else None,
        nan_policy="flag",
        max_impure=max_impure,
        max_per_class=most or "auto",
        n_jobs=jobs,
        partition={"solver": solver},
        keep_points=keep_points,
        encoding=encoded,
        classifier=classifier,
        classes=rows.classes if classifier is None else np.unique(rows.targets).tolist(),  # as the classifier's
        ids=train.rows if identify is None else category_texts(train.table.column(identify).to_pylist()).tolist(),
    )
    if rows.embeddings and file.named:
        head.feature_names = tuple(rows.features)
    calibrating_points, of_units = rows.points(calibrating, encoded), None if unit is None else unit[held]
    _keep_hashes(head, points, calibrating_points)
    head.calibrate(calibrating_points, rows.targets[held], rows.logits_of(calibrating), seed=seed, units=of_units)
    promise = set_promise(head, risk, delta, flag_rate, 1.0 / _HELD, "rows in the file (a quarter calibrates)", by=by)
    head.save(output)
    notes_on_columns(rows.columns)
    notes_on_rows(rows.sample)
    leaking = []
    if encoded is not None:
        both = encoded.columns_of(np.concatenate([points, calibrating_points]))
        order = [*(c.name for c in encoded.categories), *(c.name for c in encoded.numbers)]
        targets = np.concatenate([rows.targets[kept], rows.targets[held]])
        parts = {part_name(date.name, part): date.name for date in encoded.dates for part in date.parts}
        found = leaks(both, targets, np.arange(len(both)) >= len(points), order)
        leaking = list(dict.fromkeys(parts.get(name, name) for name in found))  # columns as the file has them
        notes_on_leaks(leaking)
    if groups is not None:
        repeats = 1 - len(np.unique(groups)) / len(groups)
        shell.note(f"{repeats:.1%} of the rows repeat another row; equal rows fit together or calibrate together")
    right, common = _accuracy(head), _commonest(rows, held)
    if right <= common:
        shell.note(
            f"the labels are right in {right:.1%} of the calibration rows, and always saying the commonest label is "
            f"right in {common:.1%}: the columns tell little about the label"
        )
    counts = Counter(rows.targets.tolist())
    if as_json:
        described = {
            "model": str(output),
            "classifier": model,
            "compared": compared,
            "points": len(rows.targets),
            "fitted": len(kept),
            "calibrated": len(held),
            "accuracy": right,
            "commonest": common,
            "features": rows.features,
            "categories": rows.columns.categories,
            "encoded": head.in_features,
            "classes": shell.by_label(rows.classes, [counts[name] for name in rows.classes]),
            "logits": rows.logits,
            "ellipsoids": len(head.sepc.bank),
            "suspicious": rows.columns.suspicious,
            "dates": list(rows.columns.dates),
            "empty": list(rows.columns.left_out),
            "leaks": leaking,
            "left_out": len(rows.sample.left_out),
        }
        shell.print_json(described | {"promise": promise})
        return
    print(f"Rows: {len(rows.targets)}, of which {len(kept)} fit and {len(held)} calibrate (seed {seed}).")
    print(f"Classes: {', '.join(f'{printable(name)} ({counts[name]})' for name in rows.classes)}")
    print(f"Features: {', '.join(_described(name, encoded) for name in rows.features)}")
    if encoded is not None and head.in_features != len(rows.features):
        print(f"Encoded as {head.in_features} numbers.")
    if rows.logits:
        pairs = zip(rows.logits, rows.classes, strict=True)
        print(f"Logits: {', '.join(f'{printable(column)} for {printable(name)}' for column, name in pairs)}")
    whose = "the network" if rows.logits else "the ellipsoids" if classifier is None else _NAMES.get(model, model)
    print(
        f"Labels: those of {printable(whose)}, {right:.1%} right on the calibration rows (always the commonest label: "
        f"{common:.1%})."
    )
    if compared:
        shares = ", ".join(f"{_NAMES[kind]} {share:.1%}" for kind, share in compared.items())
        print(f"Chosen on the rows that fit, right labels in folds: {shares}.")
    print(f"{promise['text']}\nWritten: {printable(output)}")


def _sizes(rows: TrainingRows, kept: Int[Array, "n"]) -> Int[Array, "C"]:
    """Number of training rows of each class."""
    return np.unique(rows.targets[kept], return_counts=True)[1]


def _keep_hashes(head: TrustHead, points: Any, calibrating: Any) -> None:
    """Keep a hash of every row, and the share of calibration rows that equal a row of the fit."""
    fitted, held = row_hashes(points), row_hashes(calibrating)
    head.fitted_rows = np.unique(np.concatenate([fitted, held]))
    head.repeats = float(np.isin(held, fitted).mean())


def _accuracy(head: TrustHead) -> float:
    """Share of right labels among all calibration rows."""
    labels = calibrated_labels(head)
    return float((labels.point_label == labels.point_class).double().mean())


def _commonest(rows: TrainingRows, held: Int[Array, "n"]) -> float:
    """Share of the commonest class among the calibration rows."""
    return float(np.unique(rows.targets[held], return_counts=True)[1].max() / len(held))


def calibrate(
    model: shell.Model,
    data: shell.Data,
    label: shell.Label = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Model file to write; by default the model is replaced.")
    ] = None,
    logits: shell.Logits = None,
    units: shell.Units = None,
    risk: shell.Risk = None,
    delta: shell.Delta = 0.05,
    flag_rate: shell.FlagRate = None,
    by: shell.By = None,
    sep: shell.Separator = None,
    encoding: shell.Encoding = None,
    max_rows: shell.MaxTableRows = None,
    seed: shell.Seed = 0,
    trust: shell.Trust = False,
    as_json: shell.AsJson = False,
) -> None:
    """Calibrate a model on labelled rows that it was not fitted on."""
    model = shell.existing_model(model)
    output = shell.new_model(output or model)
    given = HeadRows(model, data, sep, logits, label, [units], encoding, trust)
    head, rows = given.head, given.labelled(max_rows, seed)
    seen = head.seen(rows.z) or 0.0
    if made_the_head(head, seen, len(rows.z)):
        raise ValueError(
            f"{seen:.0%} of the rows are rows of the training file. They say nothing about new ones, so no promise can "
            "be made: calibrate with rows that the model was not fitted on."
        )
    before, head.order_stated = head.promise, True  # the columns are in the order of head.classes
    wishes = (risk, flag_rate, by)
    if before is not None and (any(wish is not None for wish in wishes) or not before.chosen):
        before = None
    of_units = unit_names(rows.sample, units)
    if before is None or (before.by is None and (not before.units or of_units is not None)):
        if before is not None:
            risk, delta, flag_rate = before.risk, before.delta, before.flag_rate
        head.promise = None
        head.calibrate(rows.z, rows.targets, rows.logits, seed=seed, units=of_units)
        promise = set_promise(head, risk, delta, flag_rate, by=by)
    else:  # thresholds of groups, set in Python, or over units, which these rows do not have
        head.calibrate(rows.z, rows.targets, rows.logits, seed=seed, units=of_units)
        assert head.promise is not None
        promise = {"text": f"Promise: {head.promise}.", **head.promise._asdict()}
    head.save(output)
    notes_on_rows(rows.sample)
    if as_json:
        counts = {"calibrated": len(rows.targets), "left_out": len(rows.sample.left_out)}
        shell.print_json({"model": str(output), **counts, "promise": promise})
    else:
        print(f"Rows: {len(rows.targets)} calibrate (seed {seed}).\n{promise['text']}\nWritten: {printable(output)}")


def _split(targets: Any, units: Any, seed: int) -> tuple[Any, Any]:
    """Positions of the rows that calibrate and of those that fit: a quarter and the rest, by chance in each class.

    Whole units calibrate or fit; the class of a unit is that of its first row. Without units every row is one.
    """
    rng = np.random.default_rng(seed)
    classes, codes = np.unique(targets, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"The labels hold the single class {classes.tolist()[0]!r}; a model needs at least two.")
    names = np.arange(len(targets)) if units is None else units
    _, first, unit = np.unique(names, return_index=True, return_inverse=True)
    held = []
    for code in range(len(classes)):
        own = np.flatnonzero(codes[first] == code)
        held.append(rng.permutation(own)[: round(_HELD * len(own))])
    chosen = np.flatnonzero(np.isin(unit, np.concatenate(held)))
    if len(chosen) < LEAST_CALIBRATION:
        if len(first) < len(targets):
            raise ValueError(
                f"The {len(targets)} rows form {len(first)} units, which are too few: a quarter of the units "
                f"calibrates, which takes at least {LEAST_CALIBRATION} rows. Add units."
            )
        raise ValueError(
            f"{len(targets)} rows are too few: a quarter of them calibrates, which takes at least {LEAST_CALIBRATION}. "
            f"Add about {round((LEAST_CALIBRATION - len(chosen)) / _HELD)} rows, or fit the paper's classifier with "
            "`sepc paper fit`."
        )
    return chosen, np.setdiff1d(np.arange(len(targets)), chosen)


def _described(name: str, encoding: Any) -> str:
    shown = printable(name)
    if encoding is not None:
        for column in encoding.categories:
            if column.name == name:
                return f"{shown} ({len(column.categories)} categories{' and other' if column.other else ''})"
        if any(column.name == name for column in encoding.dates):
            return f"{shown} (date)"
        if any(column.name == name and column.gaps for column in encoding.numbers):
            return f"{shown} (with gaps)"
    return shown
