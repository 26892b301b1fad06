"""The commands ``sepc explain``, ``sepc compare`` and ``sepc demo``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sepc_torch.cli.fitting import use_promise
from sepc_torch.cli.paper import explain_paper
from sepc_torch.cli.shell import (
    AsJson,
    Data,
    Delta,
    FlagRate,
    Label,
    Logits,
    MaxRows,
    Model,
    Risk,
    Seed,
    Separator,
    app,
    existing_model,
    one_line_errors,
    print_json,
)

if TYPE_CHECKING:
    from sepc_torch.cli.row_files import Piece, RowFile

# Most rows that a comparison reads; its scores take a few seconds for so many.
_MAX_ROWS = 2**14


@app.command()
@one_line_errors()
def explain(
    model: Model,
    data: Data,
    row: Annotated[list[int], typer.Option("--row", min=0, help="Index of a row, counted from 0; repeatable.")],
    logits: Logits = None,
    risk: Risk = None,
    delta: Delta = 0.05,
    flag_rate: FlagRate = None,
    sep: Separator = None,
    as_json: AsJson = False,
) -> None:
    """Explain the decision about a row.

    Without --risk and --flag-rate the decision is by the promise of the model; pass what `sepc score` was given.
    """
    from sepc_torch.cli.columns import logit_columns
    from sepc_torch.cli.head_rows import head_features, note_missing_logits, points_of
    from sepc_torch.cli.row_files import open_rows
    from sepc_torch.data.files import kind_of
    from sepc_torch.head.trust_head import TrustHead
    from sepc_torch.model.sepc import SEPC

    model = existing_model(model)
    if kind_of(model) != "trust_head":
        explain_paper(SEPC.load(model), data, row, as_json)
        return
    head = TrustHead.load(model)
    use_promise(head, risk, delta, flag_rate)
    file = open_rows(data, sep)
    scores = logit_columns(file, logits, head.classes)
    features = head_features(head, file, [file.label, *scores])
    piece = _rows(file, [*features, *scores], row)
    points = points_of(head, piece, features, scores)
    for i, problem in points.problems.items():
        raise ValueError(f"{str(data)!r}, row {row[i]} has no decision: {problem}. Correct the row.")
    note_missing_logits(head, scores)
    explained = head.explain(points.z, logits=points.logits)
    assert isinstance(explained, list)  # one for each row
    reasons = [_in_units(head, reason) for reason in explained]
    if as_json:
        print_json([{"row": i, **reason.to_dict()} for i, reason in zip(row, reasons, strict=True)])
    else:
        print("\n\n".join(f"row {i}: {reason}" for i, reason in zip(row, reasons, strict=True)))


@app.command()
@one_line_errors()
def compare(
    model: Model,
    data: Data,
    label: Label = None,
    logits: Logits = None,
    sep: Separator = None,
    max_rows: MaxRows = _MAX_ROWS,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Compare the scores of a model with other scores on labelled rows that it was not fitted on.

    Without logits, the labels of a logistic regression on the model's reference points are judged.
    """
    from sepc_torch.cli.columns import chosen_label, logit_columns
    from sepc_torch.cli.head_rows import labelled_points
    from sepc_torch.cli.row_files import open_rows
    from sepc_torch.cli.training_rows import notes_on_rows
    from sepc_torch.head.trust_head import TrustHead
    from sepc_torch.metrics.compare import compare as compare_scores

    head = TrustHead.load(existing_model(model))
    file = open_rows(data, sep)
    label = chosen_label(file, label)
    rows = labelled_points(head, file, label, logit_columns(file, logits, head.classes), max_rows, seed)
    z_train, codes = _reference_points(head)
    y_train = [head.classes[code] for code in codes]
    scores = _logistic_scores(z_train, codes, rows.z) if rows.logits is None else rows.logits
    found = compare_scores(z_train, y_train, rows.z, rows.targets, scores, head=head, seed=seed, show=False)
    notes_on_rows(rows.sample)
    if as_json:
        print_json({"accuracy": found.accuracy, "rows": len(found.judged), "scores": found.rows})
    else:
        judged = "the network" if rows.logits is not None else "a logistic regression"
        print(f"Labels: those of {judged}.\n\n{found}")


@app.command()
@one_line_errors()
def demo(
    folder: Annotated[Path, typer.Argument(help="Folder to write the models and figures to.")] = Path("demo"),
) -> None:
    """Run the demonstration: every step on data sets that scikit-learn includes."""
    from sepc_torch.demo import main

    main(folder)


def _rows(file: RowFile, columns: list[str], wanted: list[int]) -> Piece:
    """The wanted rows, read no further than the last of them."""
    import pyarrow as pa

    from sepc_torch.cli.row_files import Piece

    start, found = 0, {}
    problems: dict[int, str] = {}
    for piece in file.pieces(columns):
        for i in wanted:
            if start <= i < start + piece.table.num_rows:
                found[i] = piece.table.slice(i - start, 1)
                problems |= {i: piece.problems[i - start]} if i - start in piece.problems else {}
        start += piece.table.num_rows
        if start > max(wanted):
            break
    else:
        beyond = next((i for i in wanted if i >= start), None)
        if beyond is not None:
            raise ValueError(f"{str(file.path)!r} has no row {beyond}; it has the rows 0 to {start - 1}.")
    places = {j: problems[i] for j, i in enumerate(wanted) if i in problems}
    return Piece(pa.concat_tables([found[i] for i in wanted]), places, file.total)


def _in_units(head: Any, reason: Any) -> Any:
    """The explanation with features in the units of the table, if the head has an encoding."""
    if head.encoding is None:
        return reason
    units = {column.name: column for column in head.encoding.numbers}
    features = [
        replace(item, **{key: units[item.name].original(getattr(item, key)) for key in ("value", "mean")})
        if item.name in units
        else item
        for item in reason.features
    ]
    return replace(reason, features=tuple(features))


def _reference_points(head: Any) -> tuple[Any, Any]:
    """The training embeddings that a head keeps, and the indices of their classes."""
    if head.evidence is None or not len(head.evidence.reference_points.codes):
        raise ValueError("The model keeps no reference points to compare with; fit it with reference points.")
    kept = head.evidence.reference_points
    return kept.points.double().numpy(), kept.codes.numpy()


def _logistic_scores(z_train: Any, codes: Any, z: Any) -> Any:
    """Logits (N, C) of a logistic regression, with zero for the first of two classes."""
    import numpy as np
    from sklearn.linear_model import LogisticRegression

    scores = LogisticRegression(max_iter=1000).fit(z_train, codes).decision_function(z)
    return np.stack([np.zeros(len(z)), scores], axis=1) if scores.ndim == 1 else scores
