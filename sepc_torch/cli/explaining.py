"""The commands ``sepc explain`` and ``sepc compare``."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression

from sepc_torch.cli import shell
from sepc_torch.cli.heads import HeadRows, use_promise
from sepc_torch.cli.training_rows import notes_on_rows
from sepc_torch.metrics.compare import compare as compare_scores

# Most rows that a comparison reads; its scores take a few seconds for so many.
_MAX_ROWS = 2**14


def explain(
    model: shell.Model,
    data: shell.Data,
    row: shell.RowNumbers,
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

    Without --risk and --flag-rate the decision is by the promise of the model; pass what `sepc score` was given.
    """
    rows = HeadRows(model, data, sep, logits, None, (), encoding, trust)
    use_promise(rows.head, risk, delta, flag_rate)
    points = rows.points(rows.file.rows(rows.columns, row))
    for i, problem in points.problems.items():
        raise ValueError(f"{str(data)!r}, row {row[i]} has no decision: {problem}. Correct the row.")
    rows.note_missing_logits()
    reasons = rows.head.explain(points.z, logits=points.logits)
    assert isinstance(reasons, list)  # one for each row
    if as_json:
        shell.print_json([{"row": i, **reason.to_dict()} for i, reason in zip(row, reasons, strict=True)])
    else:
        print("\n\n".join(f"row {i}: {reason}" for i, reason in zip(row, reasons, strict=True)))


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
