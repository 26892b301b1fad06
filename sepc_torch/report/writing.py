"""Writing of a trust report: from a head and rows to one HTML file and a JSON file beside it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from sepc_torch import __version__
from sepc_torch.data.files import check_target, replacing
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.report.aggregates import class_section, reliability_section, risk_section, totals
from sepc_torch.report.batch_drift import batch_drift
from sepc_torch.report.page import Media, render
from sepc_torch.report.record import Record, to_json
from sepc_torch.report.rows import Rows, check_length, judged_rows, row_ids
from sepc_torch.report.samples import samples
from sepc_torch.report.selection import embedding_map, regions, rows_to_look_at
from sepc_torch.report.sentences import number, percent, verdict


@runtime_checkable
class DriftSummary(Protocol):
    """What a report needs to know about drift: a sentence for the verdict, and numbers for the JSON file.

    Regions of its ``moves``, if it has any, get cards.
    """

    @property
    def sentence(self) -> str:
        """The sentence."""

    def to_dict(self) -> dict[str, Any]:
        """The numbers of the summary."""


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
    drift: DriftSummary | None = None,
    title: str = "Trust report",
    earlier: Sequence[tuple[str, str]] = (),
) -> Path:
    """Write a trust report: one self-contained HTML file, and its numbers as JSON beside it.

    The file holds aggregates and a few hundred rows, so its size does not grow with the number of rows.

    Args:
        head: A calibrated head.
        z: (N, D) embeddings in any form that :meth:`TrustHead.judge` takes.
        y: The true labels (N,), or None. A label that is not a class of the head marks a row of an unknown class.
        logits: The network's logits (N, C); without them the report is about the head's own labels.
        path: The HTML file. The JSON file has the same name with the suffix ``.json``.
        images: N images, of which the shown ones are embedded; see :func:`~sepc_torch.report.thumbnails.thumbnail`.
        texts: N texts, of which the beginnings of the shown ones are embedded.
        ids: N names of the rows; by default their row numbers.
        class_names: Names of the classes to show: a sequence in the order of ``head.classes``, or a mapping from label.
        unknown: (N,) booleans that mark rows of unknown classes; accepting one is an error. It needs ``y``.
        groups: (N,) groups of the rows, if :meth:`TrustHead.accept_at` was given groups.
        drift: A summary of drift with a ``sentence`` and ``to_dict()``, such as the report of a
            :class:`~sepc_torch.DriftMonitor`. By default the rows are compared with the calibration points.
        title: The title of the page.
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
    rows = judged_rows(head, z, y, logits, class_names, unknown, groups)
    for name, values in (("images", images), ("texts", texts), ("ids", ids)):
        check_length(values, name, len(rows))
    record = summarise(head, rows, z, logits, groups=groups, ids=ids, drift=drift, title=title, earlier=earlier)
    numbers = to_json(record)
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
    ids: Any = None,
    drift: DriftSummary | None = None,
    title: str = "Trust report",
    earlier: Sequence[tuple[str, str]] = (),
) -> Record:
    """Compute all numbers of a report from assessed rows, their embeddings, logits and groups."""
    found = totals(rows)
    chosen = rows_to_look_at(rows)
    drift = batch_drift(head, rows) if drift is None else drift
    cards = regions(rows, head, getattr(drift, "moves", ()))
    drawn = embedding_map(rows, head, z, list(chosen))
    classes, left_out = class_section(rows)
    named = {*drawn.row, *chosen, *(row for card in cards for row in card.examples)}
    return Record(
        title=title,
        earlier=list(earlier),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        verdict=verdict(found, head.promise, None if drift is None else drift.sentence, head.calibration_age),
        promised_risk=None if head.promise is None else head.promise.risk,
        totals=found,
        risk=risk_section(rows, head),
        reliability=reliability_section(rows),
        class_names=rows.names,
        classes=classes,
        classes_left_out=left_out,
        map=drawn,
        regions=cards,
        samples=samples(rows, head, z, logits, groups, chosen),
        ids=row_ids(ids, np.array(sorted(named), dtype=np.int64)),
        made=_made(head, rows),
        drift=None if drift is None else drift.to_dict(),
    )


def _made(head: TrustHead, rows: Rows) -> list[tuple[str, str]]:
    """How the head was made, as terms and descriptions."""
    sepc, calibration = head.sepc, head.calibration
    assert calibration is not None
    labels = calibration.own if rows.softmax is None else calibration.network
    if head.promise is not None and head.promise.by in ("predicted", "region", "group"):
        threshold = f"one for each {head.promise.by.replace('predicted', 'predicted class')}"
    else:
        accepted = labels.held_joint >= labels.threshold
        share, error = accepted.double().mean(), (~labels.held_right[accepted]).double().mean()
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
        ("Calibration", f"{number(len(labels.held_joint))} points were only ranked, for p-values and the threshold"),
        ("Threshold", threshold),
        ("Promise", "not recorded" if head.promise is None else str(head.promise)),
        ("Fitted with", ", ".join(f"{name} {number}" for name, number in versions.items()) or "not recorded"),
        ("Reported with", f"sepc_torch {__version__}, torch {torch.__version__}, Python {platform.python_version()}"),
    ]
