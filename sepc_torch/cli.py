"""Command line interface ``sepc``: fit, score, explain, landscape and demo (extra ``cli``).

Results go to standard output, notes and progress to standard error. Exit code 0 means success. Exit code 1 means an
error in the data or the files, reported in one line. Exit code 2 means wrong command line arguments.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sepc_torch import __version__
from sepc_torch.data.text_table import printable

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit("sepc: the command line needs more packages: pip install 'sepc_torch[cli]'") from None

if TYPE_CHECKING:
    from sepc_torch.cli_tables import Table
    from sepc_torch.model.prediction import Prediction
    from sepc_torch.model.sepc import SEPC
    from sepc_torch.shapes import Array, Float, Int

# Rows per batch when scoring: large enough to use all cores, small enough for the progress bar to move.
_BATCH = 2**16

app = typer.Typer(
    help="Label the rows of a table and compute the trust in each label: sequential ellipsoidal partitioning (SEP-C).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class NearestBy(StrEnum):
    """Distance that selects the nearest ellipsoid for a point outside every ellipsoid."""

    mahalanobis = "mahalanobis"
    euclidean = "euclidean"


Data = Annotated[Path, typer.Argument(help="CSV, Parquet, or NPZ with the arrays X, y and optionally feature_names.")]
Model = Annotated[Path, typer.Argument(help="Model file written by `sepc fit` or SEPC.save.")]
Label = Annotated[str | None, typer.Option("--label", "-l", help="Column with the labels; y in an NPZ file.")]
Ignored = Annotated[list[str] | None, typer.Option("--ignore", help="Column that is not a feature; repeatable.")]
MaxImpure = Annotated[int, typer.Option(min=0, help="Number of points of other classes that an ellipsoid may contain.")]
Standardize = Annotated[bool, typer.Option(help="Scale features to standard deviation 1 to separate the classes.")]
Solver = Annotated[str, typer.Option(help="native, or the name of an installed cvxpy solver.")]
Jobs = Annotated[int | None, typer.Option(help="Processes, for more than two classes; -1 uses every core.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Report errors that a user can correct as one line on standard error, with exit code 1."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader closed the pipe; typer exits quietly
    except ModuleNotFoundError as error:
        _note(f"{error.name} is not installed: pip install 'sepc_torch[all]'")
        raise typer.Exit(1) from None
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        _note(" ".join(str(error).split()))
        raise typer.Exit(1) from None


def _version(wanted: bool) -> bool:
    if wanted:
        print(f"sepc {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command()
@_one_line_errors()
def fit(
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="Model file to write (.safetensors).")],
    label: Label = None,
    ignore: Ignored = None,
    max_impure: MaxImpure = 2,
    standardize: Standardize = True,
    nearest: Annotated[NearestBy, typer.Option(help=NearestBy.__doc__)] = NearestBy.euclidean,
    solver: Solver = "native",
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Fit ellipsoids to labelled points and write the frozen model."""
    from sepc_torch.cli_tables import check_writable, read_table
    from sepc_torch.model.sepc import SEPC
    from sepc_torch.partitioning.fit import partition

    check_writable(output, [".safetensors"])
    frame, targets = _labelled(read_table(data), label, ignore)
    found = partition(frame, targets, max_impure=max_impure, solver=solver, standardize=standardize, n_jobs=jobs)
    SEPC.from_partition(found, nearest.value).save(output)
    if not as_json:
        print(f"{found}\n\nWritten: {printable(output)}")
        return
    _print_json(
        {
            "model": str(output),
            "points": int(found.class_counts.sum()),
            "features": list(frame.columns),
            "classes": _by_label(found.classes.tolist(), found.class_counts.tolist()),
            "ellipsoids": len(found),
            "cells": len(found.ledger.cell_sizes),
            "made": dict(found.made),
            "seconds": dict(found.seconds),
        }
    )


@app.command()
@_one_line_errors()
def score(
    model: Model,
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write the scores to (.csv or .parquet).")],
    label: Annotated[
        str | None, typer.Option("--label", "-l", help="Column with the true labels, to measure the accuracy.")
    ] = None,
    identify: Annotated[
        list[str] | None, typer.Option("--id", help="Column to copy into the scores; repeatable. Default: row number.")
    ] = None,
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Lowest trust of an accepted prediction.")] = 0.95,
    as_json: AsJson = False,
) -> None:
    """Label new points and compute the trust in each label."""
    from sepc_torch.cli_tables import (
        WRITABLE,
        check_writable,
        numbers,
        read_table,
        require,
        scored_table,
        summary,
        write_table,
    )
    from sepc_torch.model.sepc import SEPC

    check_writable(output, WRITABLE)
    if output.resolve() == data.resolve():
        raise ValueError(f"The output is the input file {str(data)!r}; choose another output.")
    sepc = SEPC.load(model)
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
        _note(f"columns not used by the model: {', '.join(ignored)}")
    found = summary(out, truth, threshold)
    if as_json:
        given = scored["label"].value_counts()
        predicted = _by_label(sepc.classes, [int(given.get(name, 0)) for name in sepc.classes])
        _print_json({"output": str(output), "ignored": ignored, "predicted": predicted, **found.as_dict()})
    else:
        print(f"{found}\n\nWritten: {printable(output)}")


@app.command()
@_one_line_errors()
def explain(
    model: Model,
    data: Data,
    row: Annotated[list[int], typer.Option("--row", min=0, help="Index of a row, counted from 0; repeatable.")],
    as_json: AsJson = False,
) -> None:
    """Explain the label of a point: the rule, the ellipsoids, the trust and the most important features."""
    from sepc_torch.cli_tables import numbers, read_table
    from sepc_torch.model.sepc import SEPC

    sepc = SEPC.load(model)
    table = read_table(data)
    beyond = [i for i in row if i >= len(table.frame)]
    if beyond:
        raise ValueError(f"{str(data)!r} has no row {beyond[0]}; it has the rows 0 to {len(table.frame) - 1}.")
    columns, _ = _features(sepc, table, {table.label})
    reasons = sepc.explain(numbers(table, columns, row))
    assert isinstance(reasons, list)  # one for each row
    if as_json:
        _print_json([{"row": i, **reason.details} for i, reason in zip(row, reasons, strict=True)])
    else:
        print("\n\n".join(f"row {i}: {reason}" for i, reason in zip(row, reasons, strict=True)))


@app.command()
@_one_line_errors()
def landscape(
    data: Data,
    label: Label = None,
    ignore: Ignored = None,
    max_impure: MaxImpure = 2,
    standardize: Standardize = True,
    solver: Solver = "native",
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Measure how much the classes overlap."""
    from sepc_torch.cli_tables import read_table
    from sepc_torch.partitioning.fit import partition
    from sepc_torch.partitioning.landscape import landscape as measure

    frame, targets = _labelled(read_table(data), label, ignore)
    found = partition(frame, targets, max_impure=max_impure, solver=solver, standardize=standardize, n_jobs=jobs)
    seen = measure(frame, targets, partition=found, solver=solver)
    if not as_json:
        print(seen)
        return
    of_class = ("points", "inside", "outside", "overlap_ratio", "ellipsoids", "isolated")
    _print_json(
        {
            "classes": [
                {"label": name, **{field: getattr(seen, field)[name] for field in of_class}}
                for name in seen.classes.tolist()
            ],
            "pairs": [{"labels": list(pair), **overlap._asdict()} for pair, overlap in seen.pairs.items()],
            "disjuncts": [{**found._asdict(), "rows": found.rows.tolist()} for found in seen.disjuncts],
        }
    )


@app.command()
@_one_line_errors()
def demo(
    folder: Annotated[Path, typer.Argument(help="Folder to write the models and figures to.")] = Path("demo"),
) -> None:
    """Run the demonstration: every step on data sets that scikit-learn includes."""
    from sepc_torch.demo import main

    main(folder)


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
    from sepc_torch.data.arrays import label_codes

    known = list(map(str, sepc.classes))
    given = [str(name) for name in labels(table, label).tolist()]
    unknown = sorted(set(given) - set(known))
    if len(unknown) == len(set(given)):
        raise ValueError(
            f"{str(table.path)!r}, column {label!r}: the model knows none of the labels {named(unknown)}; "
            f"it knows {named(known)}."
        )
    if unknown:
        _note(f"labels unknown to the model count as mistakes: {named(unknown)}")
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


def _note(text: str) -> None:
    print(f"sepc: {printable(text)}", file=sys.stderr)


def _by_label(names: Sequence[Any], counts: Sequence[int]) -> list[dict[str, Any]]:
    """Labels with their counts, as a list, because JSON keys must be text and labels may be numbers."""
    return [{"label": name, "points": count} for name, count in zip(names, counts, strict=True)]


def _print_json(value: Any) -> None:
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    """Replace infinity and NaN by None, because JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    app(prog_name="sepc")
