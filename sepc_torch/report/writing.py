"""Writing of a trust report: from a head and rows to one HTML file and a JSON file beside it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from sepc_torch import __version__
from sepc_torch.data.files import check_target, replacing
from sepc_torch.data.text import to_json
from sepc_torch.head.drift import DriftEvidence, DriftMonitor, DriftReport, Move
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.row_groups import column_moves, group_rows
from sepc_torch.head.trust_head import TrustHead, checked_head
from sepc_torch.report.aggregates import (
    class_section,
    confusion_section,
    intervals,
    mean_cost,
    reliability_section,
    risk_section,
    totals,
)
from sepc_torch.report.columns import column_drift
from sepc_torch.report.page import Media, render
from sepc_torch.report.record import MovedGroup, MovedSection, Record
from sepc_torch.report.rows import Rows, check_length, is_table, judged_rows, row_ids, shortened, take
from sepc_torch.report.samples import embedding_map, regions, rows_to_look_at, samples
from sepc_torch.report.sentences import cost_sentence, group_codes, number, percent, promise_state, verdict

# Significant digits of a number in JSON: more than any page shows, and half the length of a float64.
_DIGITS = 6
# Groups of rows that moved, and rows of each, on the page.
_GROUPS, _GROUP_ROWS = 8, 8
# Rows that are tested for drift: more take time and change little.
_MOST_ROWS = 100_000


@runtime_checkable
class DriftSummary(Protocol):
    """What a report needs to know about drift: a sentence for the verdict, and numbers for the JSON file.

    If it has an ``alarm`` that is true, the promise does not apply. Regions of its ``moves``, if any, get cards, and so
    do the groups of its ``evidence``.
    """

    @property
    def sentence(self) -> str:
        """The sentence."""

    def to_dict(self) -> dict[str, Any]:
        """The numbers of the summary."""


class BatchDrift(NamedTuple):
    """A test of all rows of a batch together against the calibration points, in a random order."""

    found: DriftReport

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        tested = f"(test of {number(self.found.seen)} rows, p-value {self.found.p_value:.2g})"
        if self.found.alarm:
            return f"The rows are not drawn like the calibration points {tested}: promises do not cover them."
        return f"No difference from the calibration points is shown {tested}."

    @property
    def alarm(self) -> bool:
        """Whether the rows are shown not to be drawn like the calibration points."""
        return self.found.alarm

    @property
    def moves(self) -> tuple[Move, ...]:
        """The changes, if any is shown."""
        return self.found.moves if self.found.alarm else ()

    @property
    def evidence(self) -> DriftEvidence | None:
        """The rows that moved, by their numbers."""
        return self.found.evidence

    def to_dict(self) -> dict[str, Any]:
        """The numbers; positions in the random order mean nothing and are left out."""
        found = self.found.to_dict()
        moves = [{name: value for name, value in move.items() if name != "since"} for move in found["moves"]]
        return {**{name: found[name] for name in ("seen", "p_value", "alarm", "accuracy", "evidence")}, "moves": moves}


def write_report(
    head: TrustHead,
    z: Any,
    y: Any = None,
    logits: Any = None,
    path: str | os.PathLike[str] = "report.html",
    *,
    images: Any = None,
    texts: Any = None,
    ids: Any = None,
    class_names: Any = None,
    unknown: Any = None,
    groups: Any = None,
    layers: Mapping[str, Any] | None = None,
    drift: DriftSummary | None = None,
    table: Any = None,
    title: str = "Trust report",
    model: str | None = None,
    data: str | None = None,
    date: str | None = None,
    earlier: Sequence[tuple[str, str]] = (),
) -> Path:
    """Write a trust report: one self-contained HTML file, and its numbers as JSON beside it.

    The file holds aggregates and a few hundred rows, so its size does not grow with the number of rows.

    Args:
        head: A calibrated head.
        z: (N, D) embeddings in any form that :meth:`TrustHead.judge` takes.
        y: The true labels (N,), or None. A label that is not a class of the head marks a row of an unknown class.
        logits: The network's logits (N, C); without them the report is about the labels of the head's classifier, or,
            without one, its own labels.
        path: The HTML file. The JSON file has the same name with the suffix ``.json``.
        images: N images, of which the shown ones are embedded; see :func:`~sepc_torch.report.samples.thumbnail`.
        texts: N texts, of which the beginnings of the shown ones are embedded.
        ids: N names of the rows; by default their row numbers.
        class_names: Names of the classes to show: a sequence in the order of ``head.classes``, or a mapping from label.
        unknown: (N,) booleans that mark rows of unknown classes; accepting one is an error. It needs ``y``.
        groups: (N,) groups of the rows, if :meth:`TrustHead.accept_at` was given groups.
        layers: Activations of the layers that the head was fitted with, by name, as in :meth:`TrustHead.judge`.
        drift: A summary of drift with a ``sentence`` and ``to_dict()``, such as the report of a
            :class:`~sepc_torch.DriftMonitor`. By default the rows are compared with the calibration points.
        table: Columns whose values are shown with the rows: a DataFrame, an Arrow table or a mapping, of N rows; by
            default ``z``, if it has named columns.
        title: The title of the page.
        model: The name of the model, for the top of the page.
        data: The name of the data set or file.
        date: The date of the report; by default now.
        earlier: Titles and addresses, relative to this page, of earlier reports to link to.

    Returns:
        The path of the HTML file.
    """
    target = Path(path)
    beside = target.with_suffix(".json")
    if beside == target:
        raise ValueError(f"The report {str(target)!r} would be overwritten by its JSON file; name it *.html.")
    for file in (target, beside):
        check_target(file)
    logits = checked_head(head).with_logits(z, logits)[1]
    rows = judged_rows(head, z, y, logits, class_names, unknown, groups, layers)
    if table is not None and not is_table(table):
        raise TypeError(
            f"table must have named columns: pass a DataFrame, an Arrow table or a mapping, got {type(table).__name__}."
        )
    for name, values in (("images", images), ("texts", texts), ("ids", ids), ("table", table)):
        check_length(values, name, len(rows))
    record = summarise(
        *(head, rows, z, logits),
        groups=groups,
        layers=layers,
        ids=ids,
        drift=drift,
        table=table,
        title=title,
        model=model,
        data=data,
        date=date,
        earlier=earlier,
    )
    numbers = to_json(record, _DIGITS)
    page = render(record, numbers, Media(images, texts))
    with replacing(target) as temporary:
        temporary.write_text(page, encoding="utf-8")
    with replacing(beside) as temporary:
        temporary.write_text(json.dumps(numbers, indent=1, ensure_ascii=False), encoding="utf-8")
    return target


def summarise(
    head: TrustHead,
    rows: Rows,
    z: Any,
    logits: Any = None,
    *,
    groups: Any = None,
    layers: Mapping[str, Any] | None = None,
    ids: Any = None,
    drift: DriftSummary | None = None,
    table: Any = None,
    title: str = "Trust report",
    model: str | None = None,
    data: str | None = None,
    date: str | None = None,
    earlier: Sequence[tuple[str, str]] = (),
) -> Record:
    """Compute all numbers of a report from assessed rows; the other arguments are those of :func:`write_report`."""
    found = totals(rows)
    chosen = rows_to_look_at(rows)
    moved_rows = drift is None  # then the evidence names rows of this report
    drift = batch_drift(head, rows, z) if drift is None else drift
    moved = _moved(head, getattr(drift, "evidence", None), moved_rows)
    table = z if table is None and is_table(z) else table
    cards = regions(rows, head, getattr(drift, "moves", ()))
    drawn = embedding_map(rows, head, z, list(chosen))
    classes, left_out = class_section(rows)
    named = {*drawn.row, *chosen, *(row for card in cards for row in card.examples)}
    named |= {row for group in moved.groups for row in group.rows} if moved else set()
    cost, alarm = mean_cost(rows, head), bool(getattr(drift, "alarm", False))
    sentence = None if drift is None else drift.sentence
    return Record(
        title=title,
        model=model,
        data=data,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC") if date is None else date,
        earlier=list(earlier),
        promise=promise_state(
            *(head, rows, found),
            alarm=alarm,
            groups=group_codes(groups, len(rows)),
            cost=cost,
            seen=head.seen(z) or 0.0,
        ),
        verdict=verdict(found, head.promise, sentence, cost_sentence(head.promise, cost)),
        promised_risk=None if head.promise is None else head.promise.risk,
        totals=found,
        intervals=intervals(found),
        risk=risk_section(rows, head),
        reliability=reliability_section(rows),
        class_names=rows.names,
        classes=classes,
        classes_left_out=left_out,
        confusion=confusion_section(rows),
        columns=column_drift(head, z, len(rows)),
        map=drawn,
        regions=cards,
        samples=samples(rows, head, z, logits, groups, layers, table, chosen),
        ids=row_ids(ids, np.array(sorted(named), dtype=np.int64)),
        made=_made(head, rows),
        drift=None if drift is None else drift.to_dict(),
        moved=moved,
    )


def _moved(head: TrustHead, evidence: DriftEvidence | None, numbered: bool) -> MovedSection | None:
    """The largest groups of rows that moved; ``numbered`` says whether identifiers are row numbers of this report."""
    if evidence is None or not evidence.ids:
        return None
    groups = []
    for group in evidence.groups[:_GROUPS]:
        shown = group.ids[:_GROUP_ROWS]
        groups.append(
            MovedGroup(
                region=group.region,
                code=head.classes.index(group.label),
                size=len(group.ids),
                ids=[shortened(name, 24) for name in shown],
                rows=[int(name) for name in shown] if numbered else [],
                nearest=[shortened(example.id, 24) for example in group.examples],
                columns=[str(column) for column in group.columns],
            )
        )
    return MovedSection(evidence.kept, len(evidence.ids), [str(column) for column in evidence.columns], groups)


def batch_drift(head: TrustHead, rows: Rows, z: Any) -> BatchDrift | None:
    """Test the rows against the calibration points.

    The order of a file is often by class or by date. In a random order the rows are exchangeable with the calibration
    points if all are drawn alike, whatever the order of the file.

    Returns:
        None if there is nothing to test with: no rows, a calibration of other labels, with out-of-fold rows or of other
        regions, or thresholds by given groups.
    """
    assert head.calibration is not None
    with_logits = rows.softmax is not None
    if not len(rows) or head.takes_logits != with_logits:
        return None
    try:
        monitor = DriftMonitor(head)
    except (RuntimeError, ValueError):
        return None
    order = np.random.default_rng(0).permutation(len(rows))[:_MOST_ROWS]
    rows_in_order = HeadPrediction(*(field[order] for field in rows.out))
    found = monitor.update_from(rows_in_order, with_logits=with_logits, ids=order)
    if found.evidence is not None and found.evidence.ids:
        numbers = np.array(found.evidence.ids, dtype=np.int64)
        points = head.as_tensor(take(z, numbers)).to(head.projection.shift)
        whole = points.isfinite().all(dim=1)
        columns = column_moves(head, points[whole], None) if bool(whole.any()) else ()
        evidence = found.evidence._replace(groups=group_rows(head, points, numbers), columns=columns)
        found = found._replace(evidence=evidence)
    return BatchDrift(found)


def _made(head: TrustHead, rows: Rows) -> list[tuple[str, str]]:
    """How the head was made, as terms and descriptions."""
    sepc, calibration = head.sepc, head.calibration
    assert calibration is not None
    labels = calibration.own if rows.softmax is None else calibration.network
    tables = {
        "predicted class": labels.class_threshold,
        "region": labels.region_threshold,
        "group": labels.group_threshold,
    }
    used = [name for name, table in tables.items() if len(table)]
    if used:
        threshold = f"one for each {used[0]}"
    else:
        accepted = labels.ranked_joint >= labels.threshold
        share, error = accepted.double().mean(), (~labels.ranked_right[accepted]).double().mean()
        threshold = f"{float(labels.threshold):.4f}: accepts {percent(float(share))} of these points, "
        threshold += f"{percent(float(error))} wrong"
    made = dict(sepc.made)
    versions = made.pop("versions", None) or {}
    settings = ", ".join(f"{name} = {value}" for name, value in made.items() if value is not None)
    return [
        ("Embeddings", f"{number(head.in_features)} features, projected on {sepc.dim}"),
        ("Training points", f"{number(int(sepc.totals.sum()))} in {number(len(head.classes))} classes"),
        ("Ellipsoids", number(len(sepc.bank))),
        ("Settings", settings or "not recorded"),
        ("Labels assessed", "the head's own" if rows.softmax is None else "the network's"),
        ("Calibration", f"{number(len(labels.ranked_joint))} points were only ranked, for p-values and the threshold"),
        ("Threshold", threshold),
        ("Promise", "not recorded" if head.promise is None else str(head.promise)),
        ("Fitted with", ", ".join(f"{name} {number}" for name, number in versions.items()) or "not recorded"),
        ("Reported with", f"sepc_torch {__version__}, torch {torch.__version__}, Python {platform.python_version()}"),
    ]
