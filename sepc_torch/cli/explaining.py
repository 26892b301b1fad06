"""The commands ``sepc explain`` and ``sepc compare``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import typer
from sklearn.linear_model import LogisticRegression

from sepc_torch.cli import shell
from sepc_torch.cli.columns import label_texts
from sepc_torch.cli.heads import HeadRows, use_promise
from sepc_torch.cli.row_files import RowFile
from sepc_torch.cli.training_rows import notes_on_rows
from sepc_torch.metrics.compare import compare as compare_scores

# Most rows that a comparison reads; its scores take a few seconds for so many.
_MAX_ROWS = 2**14


def explain(
    model: shell.Model,
    data: shell.Data,
    row: Annotated[
        list[int] | None, typer.Option("--row", min=0, help="Index of a row, counted from 0; repeatable.")
    ] = None,
    identify: Annotated[
        list[str] | None,
        typer.Option("--id", metavar="COLUMN=VALUE", help="Value of a column that names rows; repeatable."),
    ] = None,
    logits: shell.Logits = None,
    risk: shell.Risk = None,
    delta: shell.Delta = 0.05,
    flag_rate: shell.FlagRate = None,
    sep: shell.Separator = None,
    encoding: shell.Encoding = None,
    trust: shell.Trust = False,
    as_json: shell.AsJson = False,
) -> None:
    """Explain the decision about a row.

    --row takes the index of a row, --id the value of a column that names it.

    Without --risk and --flag-rate the decision is by the promise of the model; pass what `sepc score` was given.
    """
    wanted: dict[str, list[str]] = {}
    for text in identify or []:
        column, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--id names rows as COLUMN=VALUE, got {text!r}.")
        wanted.setdefault(column, []).append(value)
    rows = HeadRows(model, data, sep, logits, None, list(wanted), encoding, trust)
    use_promise(rows.head, risk, delta, flag_rate)
    names = dict.fromkeys(row or []) | _named_rows(rows.file, wanted)
    if not names:
        raise ValueError("Say which rows to explain: --row INDEX or --id COLUMN=VALUE.")
    points = rows.points(rows.file.rows(rows.columns, list(names)))
    shown = [f"row {i}" + ("" if name is None else f" ({name})") for i, name in names.items()]
    for i, problem in points.problems.items():
        raise ValueError(f"{str(data)!r}, {shown[i]} has no decision: {problem}. Correct the row.")
    rows.note_missing_logits()
    reasons = rows.head.explain(points.z, logits=points.logits)
    assert isinstance(reasons, list)  # one for each row
    if as_json:
        shell.print_json([{"row": i, **reason.to_dict()} for i, reason in zip(names, reasons, strict=True)])
    else:
        print("\n\n".join(f"{name}: {reason}" for name, reason in zip(shown, reasons, strict=True)))


def _named_rows(file: RowFile, wanted: Mapping[str, Sequence[str]]) -> dict[int, str]:
    """The rows whose columns have these values, with their names; every value must occur."""
    if not wanted:
        return {}
    found: dict[int, str] = {}
    missing = dict.fromkeys((column, value) for column, values in wanted.items() for value in values)
    start = 0
    for piece in file.pieces(list(wanted), "find"):
        for column, values in wanted.items():
            for i, text in enumerate(label_texts(piece.table.column(column), frozenset()), start):
                if text is not None and text in values:
                    found[i] = f"{column}={text}"
                    missing.pop((column, text), None)
        start += piece.table.num_rows
    for column, value in missing:
        raise ValueError(f"{str(file.path)!r} has no row with {value!r} in column {column!r}.")
    return dict(sorted(found.items()))


def compare(
    model: shell.Model,
    data: shell.Data,
    label: shell.Label = None,
    logits: shell.Logits = None,
    sep: shell.Separator = None,
    encoding: shell.Encoding = None,
    max_rows: shell.MaxRows = _MAX_ROWS,
    seed: shell.Seed = 0,
    trust: shell.Trust = False,
    as_json: shell.AsJson = False,
) -> None:
    """Compare the scores of a model with other scores on labelled rows that it was not fitted on.

    Without logits, the labels of a logistic regression on the model's reference points are judged.
    """
    given = HeadRows(model, data, sep, logits, label, (), encoding, trust)
    head, rows = given.head, given.labelled(max_rows, seed)
    z_train, codes = _reference_points(head)
    y_train = [head.classes[code] for code in codes]
    scores = _logistic_scores(z_train, codes, rows.z) if rows.logits is None else rows.logits
    table = z_train, y_train, rows.z, rows.targets, scores
    found = compare_scores(*table, head=head, classes=head.classes, seed=seed, show=False)
    notes_on_rows(rows.sample)
    if as_json:
        shell.print_json({"accuracy": found.accuracy, "rows": len(found.judged), "scores": found.rows})
    else:
        judged = "the network" if head.classifier is None else "the model's classifier"
        judged = "a logistic regression" if rows.logits is None else judged
        print(f"Labels: those of {judged}.\n\n{found}")


def _reference_points(head: Any) -> tuple[Any, Any]:
    """The training embeddings that a head keeps, and the indices of their classes."""
    if head.evidence is None or not len(head.evidence.reference_points.codes):
        raise ValueError("The model keeps no reference points to compare with; fit it with reference points.")
    kept = head.evidence.reference_points
    return kept.points.double().numpy(), kept.codes.numpy()


def _logistic_scores(z_train: Any, codes: Any, z: Any) -> Any:
    """Logits (N, C) of a logistic regression, with zero for the first of two classes."""
    scores = LogisticRegression(max_iter=1000).fit(z_train, codes).decision_function(z)
    return np.stack([np.zeros(len(z)), scores], axis=1) if scores.ndim == 1 else scores
