"""The paper's classifier on the command line: fit, score and explain, and the overlap of classes (extra ``cli``)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sepc_torch.cli.shell import AsJson, Data, Ignored, Label, app, by_label, note, one_line_errors, print_json
from sepc_torch.data.text_table import printable

if TYPE_CHECKING:
    from sepc_torch.cli_tables import Table
    from sepc_torch.model.prediction import Prediction
    from sepc_torch.model.sepc import SEPC
    from sepc_torch.shapes import Array, Float, Int

# Rows per batch when scoring: large enough to use all cores, small enough for the progress bar to move.
_BATCH = 2**16
# Number of points of other classes that an ellipsoid may contain, as in the paper.
_MAX_IMPURE = 2


class NearestBy(StrEnum):
    """Distance that selects the nearest ellipsoid for a point outside every ellipsoid."""

    mahalanobis = "mahalanobis"
    euclidean = "euclidean"


MaxImpure = Annotated[
    int | None, typer.Option(min=0, help="Number of points of other classes that an ellipsoid may contain.")
]
Standardize = Annotated[
    bool, typer.Option(help="Scale features to standard deviation 1 to separate the classes (--paper).")
]
Solver = Annotated[str, typer.Option(help="native, or the name of an installed cvxpy solver.")]
Jobs = Annotated[int | None, typer.Option(help="Processes, for more than two classes; -1 uses every core.")]


def fit_paper(
    data: Path,
    output: Path,
    label: str | None,
    drop: Sequence[str] | None,
    max_impure: int | None,
    standardize: bool,
    nearest: NearestBy,
    solver: str,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Fit ellipsoids to labelled points and write the frozen classifier."""
    from sepc_torch.cli_tables import read_table
    from sepc_torch.model.sepc import SEPC
    from sepc_torch.partitioning.fit import partition

    max_impure = _MAX_IMPURE if max_impure is None else max_impure
    frame, targets = _labelled(read_table(data), label, drop)
    found = partition(frame, targets, max_impure=max_impure, solver=solver, standardize=standardize, n_jobs=jobs)
    SEPC.from_partition(found, nearest.value).save(output)
    if not as_json:
        print(f"{found}\n\nWritten: {printable(output)}")
        return
    print_json(
        {
            "model": str(output),
            "points": int(found.class_counts.sum()),
            "features": list(frame.columns),
            "classes": by_label(found.classes.tolist(), found.class_counts.tolist()),
            "ellipsoids": len(found),
            "cells": len(found.ledger.cell_sizes),
            "made": dict(found.made),
            "seconds": dict(found.seconds),
        }
    )


def score_paper(
    sepc: SEPC,
    data: Path,
    output: Path,
    label: str | None,
    identify: Sequence[str] | None,
    threshold: float,
    as_json: bool,
) -> None:
    """Label new points with the paper's classifier and compute the trust in each label."""
    from sepc_torch.cli_tables import numbers, read_table, require, scored_table, summary, write_table

    table = read_table(data)
    label, identify = label or table.label, list(dict.fromkeys(identify or []))
    require(table, [*identify, *([] if label is None else [label])])
    columns, ignored = _features(sepc, table, {label, *identify})
    truth = None if label is None else _truth(sepc, table, label)
    out = _predict(sepc, numbers(table, columns))
    scored = scored_table(out, sepc.classes)
    clash = sorted(set(identify) & set(scored.columns))
    if clash:
        raise ValueError(f"--id {clash[0]!r} is also the name of a score; rename the column or leave out --id.")
    if identify:
        scored = table.frame[identify].join(scored)
    else:
        scored.insert(0, "row", range(len(scored)))
    write_table(scored, output)
    if ignored:
        note(f"columns not used by the model: {', '.join(ignored)}")
    found = summary(out, truth, threshold)
    if as_json:
        given = scored["label"].value_counts()
        predicted = by_label(sepc.classes, [int(given.get(name, 0)) for name in sepc.classes])
        print_json({"output": str(output), "ignored": ignored, "predicted": predicted, **found.as_dict()})
    else:
        print(f"{found}\n\nWritten: {printable(output)}")


def explain_paper(sepc: SEPC, data: Path, row: list[int], as_json: bool) -> None:
    """Explain labels of the paper's classifier: the rule, the ellipsoids, the trust and the most important features."""
    from sepc_torch.cli_tables import numbers, read_table

    table = read_table(data)
    beyond = [i for i in row if i >= len(table.frame)]
    if beyond:
        raise ValueError(f"{str(data)!r} has no row {beyond[0]}; it has the rows 0 to {len(table.frame) - 1}.")
    columns, _ = _features(sepc, table, {table.label})
    reasons = sepc.explain(numbers(table, columns, row))
    assert isinstance(reasons, list)  # one for each row
    if as_json:
        print_json([{"row": i, **reason.details} for i, reason in zip(row, reasons, strict=True)])
    else:
        print("\n\n".join(f"row {i}: {reason}" for i, reason in zip(row, reasons, strict=True)))


@app.command()
@one_line_errors()
def landscape(
    data: Data,
    label: Label = None,
    drop: Ignored = None,
    max_impure: MaxImpure = _MAX_IMPURE,
    standardize: Standardize = True,
    solver: Solver = "native",
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Measure how much the classes overlap."""
    from sepc_torch.cli_tables import read_table
    from sepc_torch.partitioning.fit import partition
    from sepc_torch.partitioning.landscape import landscape as measure

    max_impure = _MAX_IMPURE if max_impure is None else max_impure
    frame, targets = _labelled(read_table(data), label, drop)
    found = partition(frame, targets, max_impure=max_impure, solver=solver, standardize=standardize, n_jobs=jobs)
    seen = measure(frame, targets, partition=found, solver=solver)
    if not as_json:
        print(seen)
        return
    of_class = ("points", "inside", "outside", "overlap_ratio", "ellipsoids", "isolated")
    print_json(
        {
            "classes": [
                {"label": name, **{field: getattr(seen, field)[name] for field in of_class}}
                for name in seen.classes.tolist()
            ],
            "pairs": [{"labels": list(pair), **overlap._asdict()} for pair, overlap in seen.pairs.items()],
            "disjuncts": [{**found._asdict(), "rows": found.rows.tolist()} for found in seen.disjuncts],
        }
    )


def _labelled(table: Table, label: str | None, ignore: Sequence[str] | None) -> tuple[Any, Array]:
    """The features, as a DataFrame so that their names are kept, and the labels."""
    import pandas as pd

    from sepc_torch.cli_tables import labels, named, numbers, require

    label, ignore = label or table.label, ignore or []
    if label is None:
        columns = named(list(table.frame.columns))
        raise ValueError(f"Name the label column of {str(table.path)!r} with --label; the file has {columns}.")
    require(table, [label, *ignore])
    targets = labels(table, label)
    features = [column for column in table.frame.columns if column != label and column not in ignore]
    if not features:
        raise ValueError(f"{str(table.path)!r} has no feature column besides the label {label!r}.")
    return pd.DataFrame(numbers(table, features), columns=features), targets


def _features(sepc: SEPC, table: Table, others: set[str | None]) -> tuple[list[str], list[str]]:
    """The columns that the model uses, in the order of the model, and the unused columns."""
    from sepc_torch.cli_tables import require

    candidates = [column for column in table.frame.columns if column not in others]
    if sepc.feature_names is not None and table.named:
        require(table, sepc.feature_names)
        return list(sepc.feature_names), [column for column in candidates if column not in sepc.feature_names]
    # If the model or the file has no feature names, columns are matched by position.
    if len(candidates) != sepc.dim:
        raise ValueError(
            f"{str(table.path)!r} has {len(candidates)} feature columns and the model has {sepc.dim} features. Columns "
            "are matched by position here, because the file or the model has no feature names."
        )
    return candidates, []


def _truth(sepc: SEPC, table: Table, label: str) -> Int[Array, "N"]:
    """The true classes as indices, -1 for labels unknown to the model; labels are compared as text, as in a file."""
    from sepc_torch.cli_tables import labels, named
    from sepc_torch.data.labels import label_codes

    known = list(map(str, sepc.classes))
    given = [str(name) for name in labels(table, label).tolist()]
    unknown = sorted(set(given) - set(known))
    if len(unknown) == len(set(given)):
        raise ValueError(
            f"{str(table.path)!r}, column {label!r}: the model knows none of the labels {named(unknown)}; "
            f"it knows {named(known)}."
        )
    if unknown:
        note(f"labels unknown to the model count as mistakes: {named(unknown)}")
    return label_codes(given, known)


def _predict(sepc: SEPC, points: Float[Array, "N D"]) -> Prediction:
    import torch

    from sepc_torch.data.progress import Bar
    from sepc_torch.model.prediction import Prediction

    parts = []
    with Bar("score", len(points), "auto") as bar:
        for batch in torch.from_numpy(points).split(_BATCH):
            parts.append(sepc(batch))
            bar.advance(len(batch))
    return Prediction(*(torch.cat(field) for field in zip(*parts, strict=True)))
