"""The commands ``sepc paper``: the paper's classifier, which takes tables of numbers and has no calibration.

Every cell must be a finite number: there is no row without a label, and no row is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
import typer

from sepc_torch.cli import shell
from sepc_torch.cli.columns import (
    IdColumns,
    chosen_label,
    class_names,
    encoded_rows,
    feature_columns,
    label_texts,
    label_values,
    model_columns,
    refuse_other_types,
)
from sepc_torch.cli.row_files import Piece, RowFile, open_rows, score_writer
from sepc_torch.cli.tally import RuleTally
from sepc_torch.data.files import FileFormatError, kind_of
from sepc_torch.data.memory import check_memory
from sepc_torch.data.text import printable
from sepc_torch.model.prediction import Prediction
from sepc_torch.model.rules import Rule
from sepc_torch.model.sepc import SEPC
from sepc_torch.partitioning.fit import partition
from sepc_torch.partitioning.landscape import landscape
from sepc_torch.shapes import Array, Float

# Number of points of other classes that an ellipsoid may contain, as in the paper.
_MAX_IMPURE = 2
# Peak memory of a fit as a multiple of its numbers in float64: pieces, the whole table, and the copies of a partition.
_COPIES = 5


class NearestBy(StrEnum):
    """Distance that selects the nearest ellipsoid for a point outside every ellipsoid."""

    mahalanobis = "mahalanobis"
    euclidean = "euclidean"


Model = Annotated[Path, typer.Argument(help="Model file written by `sepc paper fit` or SEPC.save.")]
MaxImpure = Annotated[int, typer.Option(min=0, help="Points of other classes that an ellipsoid may contain.")]
Standardize = Annotated[bool, typer.Option(help="Scale features to standard deviation 1 to separate the classes.")]


def fit(
    data: shell.Data,
    output: shell.NewModel,
    label: shell.Label = None,
    drop: shell.Ignored = None,
    sep: shell.Separator = None,
    max_impure: MaxImpure = _MAX_IMPURE,
    standardize: Standardize = True,
    nearest: Annotated[NearestBy, typer.Option(help=NearestBy.__doc__)] = NearestBy.euclidean,
    solver: shell.Solver = "native",
    jobs: shell.Jobs = None,
    as_json: shell.AsJson = False,
) -> None:
    """Fit ellipsoids to labelled rows."""
    output = shell.new_model(output)
    frame, targets = _labelled_table(open_rows(data, sep), label, drop or [])
    found = partition(frame, targets, max_impure=max_impure, solver=solver, standardize=standardize, n_jobs=jobs)
    SEPC.from_partition(found, nearest.value).save(output)
    if not as_json:
        print(f"{found}\n\nWritten: {printable(output)}")
        return
    shell.print_json(
        {
            "model": str(output),
            "points": int(found.class_counts.sum()),
            "features": list(frame.columns),
            "classes": shell.by_label(found.classes.tolist(), found.class_counts.tolist()),
            "ellipsoids": len(found),
            "cells": len(found.ledger.cell_sizes),
            "made": dict(found.made),
            "seconds": dict(found.seconds),
        }
    )


def score(
    model: Model,
    data: shell.Data,
    output: shell.Scores,
    label: shell.TrueLabel = None,
    identify: shell.Copied = None,
    sep: shell.Separator = None,
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Lowest trust of an accepted label.")] = 0.95,
    as_json: shell.AsJson = False,
) -> None:
    """Label new rows, and compute the trust in each label."""
    shell.check_writable(output, shell.WRITABLE, data)
    sepc, file = _load(model), open_rows(data, sep)
    label = label or file.label
    ids = IdColumns(file, identify or [], output.name.lower().endswith(".parquet"))
    others = [*ids.names, *([] if label is None else [label])]
    file.require(others)
    features = _features(sepc, file, others)
    columns = list(dict.fromkeys([*features, *others]))
    tally = RuleTally(sepc.classes, threshold)
    given: Counter[Any] = Counter()
    with score_writer(output) as writer:
        for piece in file.pieces(columns, "score"):
            rows = range(tally.rows, tally.rows + piece.table.num_rows)
            out = sepc(torch.from_numpy(_numbers(file, piece, features, rows)))
            writer.write(ids.beside(piece.table, _scores(sepc, out), rows.start))
            given.update(out.label.tolist())
            tally.add_prediction(out, None if label is None else label_texts(piece.table.column(label)))
        if not tally.rows:
            raise ValueError(f"{str(data)!r} has no rows.")
        tally.check_labels(file.path, label)
    unused = [name for name in file.names if name not in columns]
    if unused:
        shell.note(f"columns not used by the model: {', '.join(unused)}")
    if as_json:
        predicted = shell.by_label(sepc.classes, [given[code] for code in range(len(sepc.classes))])
        described = {"output": str(output), "ignored": unused, "predicted": predicted, "threshold": threshold}
        shell.print_json(described | tally.numbers("rules"))
    else:
        print(f"{tally}\n\nWritten: {printable(output)}")


def explain(
    model: Model, data: shell.Data, row: shell.RowNumbers, sep: shell.Separator = None, as_json: shell.AsJson = False
) -> None:
    """Explain the label of a row: the rule, the ellipsoids and the features."""
    sepc, file = _load(model), open_rows(data, sep)
    features = _features(sepc, file, [])
    reasons = sepc.explain(_numbers(file, file.rows(features, row), features, row))
    assert isinstance(reasons, list)  # one for each row
    if as_json:
        shell.print_json([{"row": i, **reason.details} for i, reason in zip(row, reasons, strict=True)])
    else:
        print("\n\n".join(f"row {i}: {reason}" for i, reason in zip(row, reasons, strict=True)))


def overlap(
    data: shell.Data,
    label: shell.Label = None,
    drop: shell.Ignored = None,
    sep: shell.Separator = None,
    max_impure: MaxImpure = _MAX_IMPURE,
    standardize: Standardize = True,
    solver: shell.Solver = "native",
    jobs: shell.Jobs = None,
    as_json: shell.AsJson = False,
) -> None:
    """Measure how much the classes overlap."""
    frame, targets = _labelled_table(open_rows(data, sep), label, drop or [])
    found = partition(frame, targets, max_impure=max_impure, solver=solver, standardize=standardize, n_jobs=jobs)
    seen = landscape(frame, targets, partition=found, solver=solver)
    if not as_json:
        print(seen)
        return
    of_class = ("points", "inside", "outside", "overlap_ratio", "ellipsoids", "isolated")
    shell.print_json(
        {
            "classes": [
                {"label": name, **{field: getattr(seen, field)[name] for field in of_class}}
                for name in seen.classes.tolist()
            ],
            "pairs": [{"labels": list(pair), **overlap._asdict()} for pair, overlap in seen.pairs.items()],
            "disjuncts": [{**found._asdict(), "rows": found.rows.tolist()} for found in seen.disjuncts],
        }
    )


def _load(model: Path) -> SEPC:
    """Load a classifier; the suffix .safetensors may be left out."""
    path = shell.existing_model(model)
    try:
        return SEPC.load(path)
    except FileFormatError:
        if kind_of(path) == "trust_head":
            raise ValueError(f"{str(path)!r} holds a calibrated model: use `sepc score` or `sepc explain`.") from None
        raise


def _features(sepc: SEPC, file: RowFile, others: Sequence[str]) -> list[str]:
    """The columns with the features, by name if the model and the file have names, otherwise by position."""
    names = sepc.feature_names if file.named else None
    return model_columns(file, names, sepc.dim, [file.label, *file.logits, *others])


def _numbers(file: RowFile, piece: Piece, features: Sequence[str], rows: Sequence[int]) -> Float[Array, "n D"]:
    """The features of a piece; raise ValueError for a cell that is no finite number. ``rows`` numbers its rows."""
    refuse_other_types(file, piece.table, features)
    found = encoded_rows(piece.table, features, None)
    problems = found.problems | piece.problems
    if problems:
        i = min(problems)
        raise ValueError(
            f"{str(file.path)!r}, row {rows[i]}: {problems[i]}. Correct or leave out the row, or leave out the column."
        )
    return found.points


def _labelled_table(file: RowFile, label: str | None, drop: Sequence[str]) -> tuple[pd.DataFrame, Array]:
    """All rows of a file: the features, as a DataFrame so that their names are kept, and the labels."""
    label = chosen_label(file, label)
    file.require(drop)
    features = feature_columns(file, [label, *file.logits, *drop])
    parts, targets, read = [], [], 0
    for piece in file.pieces([*features, label], "read"):
        rows = range(read, read + piece.table.num_rows)
        parts.append(_numbers(file, piece, features, rows))
        targets.append(piece.table.column(label))
        absent = label_texts(targets[-1])
        if None in absent:
            where = f"{str(file.path)!r}, row {rows[absent.index(None)]}, column {label!r}"
            raise ValueError(f"{where}: the label is missing. Add the labels or drop the rows.")
        read = rows.stop
        expected = round(read * max(file.total / max(piece.done, 1), 1.0))  # of the whole file
        check_memory(
            _COPIES * 8 * expected * len(features),
            f"Reading all rows of {str(file.path)!r}, as the paper's classifier does,",
            "Split the file, or fit a calibrated model with `sepc fit`, which reads a sample.",
        )
    if not read:
        raise ValueError(f"{str(file.path)!r} has no rows.")
    labels = pa.chunked_array([chunk for column in targets for chunk in column.chunks])
    frame = pd.DataFrame(np.concatenate(parts), columns=features)
    return frame, np.array(label_values(labels, f"{str(file.path)!r}, column {label!r},"))


def _scores(sepc: SEPC, out: Prediction) -> dict[str, Any]:
    """The columns of the output."""
    return {
        "label": class_names(sepc.classes, out.label.numpy()),
        "trust": pa.array(out.trust.numpy()),
        "rule": pa.array([rule.name for rule in Rule]).take(pa.array(out.rule.numpy())),
        "distance": pa.array(out.distance.numpy()),
        "margin": pa.array(out.margin.numpy()),
        "runner_up": class_names(sepc.classes, out.runner_up.numpy()),
    }
