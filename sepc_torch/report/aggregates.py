"""Aggregates of the rows of a report: totals, curves, reliability diagrams, classes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sepc_torch.head.promises.costs import cost_matrix
from sepc_torch.head.reasons import Reason
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.metrics.calibration import ece
from sepc_torch.metrics.class_table import ClassRow, class_table
from sepc_torch.metrics.curves import reliability_bins, risk_coverage
from sepc_torch.metrics.selective import aurc, expected_losses
from sepc_torch.report.record import Confusion, Curve, Diagram, RiskSection, Totals
from sepc_torch.report.rows import Rows
from sepc_torch.report.sentences import share_interval
from sepc_torch.shapes import Bool, Float

# Points of a curve: more than the page has pixels to tell apart.
_CURVE_POINTS = 160
# Bins of the calibration error, of equal width, as it is usually reported; and bins that are drawn. These hold equally
# many rows each, so that the interval of none spans the diagram.
_BINS, _DRAWN = 15, 10
# Classes in the table: a page of more rows is not read. The classes with most refusals and errors are kept.
_MOST_CLASSES = 200
# Classes in the confusion matrix: as many columns as a page has room for.
_MOST_COLUMNS = 20


def totals(rows: Rows) -> Totals:
    """Count accepted, refused and wrong labels."""
    counts = np.bincount(rows.reason, minlength=len(Reason))
    accepted = int(rows.accept.sum())
    reasons = {reason.text: int(counts[reason]) for reason in Reason if reason is not Reason.ACCEPTED}
    if rows.right is None or rows.truth is None:
        return Totals(len(rows), accepted, reasons, None, None, None, None, None)
    known = rows.truth >= 0
    softmax_wrong = None
    if rows.softmax is not None:
        losses = expected_losses(torch.from_numpy(rows.softmax), torch.from_numpy(~rows.right).double())
        softmax_wrong = float(losses[:accepted].sum())
    return Totals(
        rows=len(rows),
        accepted=accepted,
        reasons=reasons,
        unknown=int((~known).sum()),
        wrong=int((~rows.right).sum()),
        wrong_accepted=int((~rows.right & rows.accept).sum()),
        softmax_wrong=softmax_wrong,
        known_accepted=int((known & rows.accept).sum()),
    )


def intervals(found: Totals) -> dict[str, tuple[float, float]]:
    """Exact 95 % intervals of the shares of accepted labels, of wrong ones, and of wrong ones among the accepted."""
    counts = {"coverage": (found.accepted, found.rows)}
    if found.wrong is not None and found.wrong_accepted is not None:
        counts |= {"error": (found.wrong, found.rows), "accepted_error": (found.wrong_accepted, found.accepted)}
    return {name: share_interval(count, of) for name, (count, of) in counts.items() if of}


def risk_section(rows: Rows, head: TrustHead) -> RiskSection:
    """Risk over coverage of the joint score and of softmax; without true labels, on the ranked calibration points."""
    if rows.right is None:
        assert head.calibration is not None
        labels = head.calibration.own if rows.softmax is None else head.calibration.network
        score, right = labels.ranked_joint.cpu().double(), labels.ranked_right.cpu()
        return RiskSection("calibration", [_curve("trust head", score, right)])
    right = torch.from_numpy(rows.right)
    curves = [_curve("trust head", rows.out.joint.nan_to_num(0.0), right)]
    if rows.softmax is not None:
        curves.append(_curve("softmax", torch.from_numpy(rows.softmax), right))
    return RiskSection("rows", curves)


def reliability_section(rows: Rows) -> list[Diagram]:
    """Reliability of the confidence and of softmax on rows of known classes; empty without true labels.

    Both are probabilities that a label is right, provided that its row is of a known class.
    """
    if rows.right is None or rows.truth is None or not (rows.truth >= 0).any():
        return []
    known = torch.from_numpy(rows.truth >= 0)
    right = torch.from_numpy(rows.right)[known]
    probabilities = {"trust head": rows.out.confidence.nan_to_num(0.0)}
    if rows.softmax is not None:
        probabilities["softmax"] = torch.from_numpy(rows.softmax)
    diagrams = []
    for name, given in probabilities.items():
        probability = given[known].clamp(0.0, 1.0)
        bins = reliability_bins(probability, right, _DRAWN, binning="mass")
        error = float(ece(probability, right, _BINS))
        diagrams.append(Diagram(name, error, *(column.tolist() for column in bins)))
    return diagrams


def class_section(rows: Rows) -> tuple[list[ClassRow], int]:
    """The table of classes, and the number of classes that it leaves out."""
    table = class_table(rows.label, rows.accept, rows.truth, len(rows.names))
    if len(table) <= _MOST_CLASSES:
        return table, 0
    # The most refusals and errors first; of equals, the larger class.
    worst = sorted(table, key=lambda row: (row.accepted - row.points - (row.wrong_accepted or 0), -row.points))
    kept = {row.code for row in worst[:_MOST_CLASSES]}
    return [row for row in table if row.code in kept], len(table) - _MOST_CLASSES


def confusion_section(rows: Rows) -> Confusion | None:
    """Accepted labels and refusals by true class, of the classes with most accepted mistakes; None without truth."""
    if rows.truth is None:
        return None
    classes = len(rows.names)
    slipped = rows.accept & (rows.label != rows.truth)
    mistakes = np.bincount(rows.label[slipped], minlength=classes)
    mistakes += np.bincount(rows.truth[slipped & (rows.truth >= 0)], minlength=classes)
    kept = np.sort(np.argsort(-mistakes, kind="stable")[:_MOST_COLUMNS])
    slot = np.full(classes + 1, len(kept))  # other classes, and -1
    slot[kept] = np.arange(len(kept))
    column = np.where(rows.accept, slot[rows.label], len(kept) + 1)
    counts = [
        np.bincount(column[rows.truth == code], minlength=len(kept) + 2).tolist()
        for code in (*kept.tolist(), -1)
        if code >= 0 or (rows.truth < 0).any()
    ]
    return Confusion(kept.tolist(), counts, classes - len(kept))


def mean_cost(rows: Rows, head: TrustHead) -> float | None:
    """The mean cost of a row of a known class, by the costs of the head's promise; None without costs or truth."""
    promise = head.promise
    if promise is None or promise.costs is None or promise.review is None or rows.truth is None:
        return None
    known = rows.truth >= 0
    costs = cost_matrix(promise.costs, head.classes)[rows.truth[known], rows.label[known]]
    return float(np.where(rows.accept[known], costs, promise.review).mean()) if known.any() else None


def _curve(name: str, score: Float[Tensor, "B"], right: Bool[Tensor, "B"]) -> Curve:
    found = risk_coverage(score, right, _CURVE_POINTS)
    return Curve(name, found.coverage.tolist(), found.risk.tolist(), float(aurc(score, right)))
