"""The HTML page of a report: the template, filled with numbers and pictures."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("A report needs jinja2: pip install 'sepc_torch[report]'", name="jinja2") from error
from markupsafe import Markup

from sepc_torch.head.reasons import Reason
from sepc_torch.report import svg
from sepc_torch.report.record import Record, State
from sepc_torch.report.rows import take, text_of
from sepc_torch.report.samples import thumbnail
from sepc_torch.report.sentences import between, figure, number, percent

# What stands on the badge of each state of a promise.
_BADGES: dict[State, str] = {
    "kept": "✓ promise kept",
    "open": "? promise open",
    "broken": "✗ promise broken",
    "does not apply": "! promise does not apply",
    "not checked": "promise not checked",
    "no promise": "no promise",
}
# What the decisions and reasons mean.
_WORDS = {
    "accepted": "Use the label.",
    "novel": "The row is unlike the calibration points: perhaps of a new kind.",
    "disagrees": "The training points around the row have another label than the network gives.",
    "ambiguous": "The row is of a known kind, but its score is below the threshold.",
    "no prediction": "The row or its logits hold values that cannot be used.",
    "no promise": "No threshold keeps the wanted risk, so that the head accepts nothing.",
}


class Media(NamedTuple):
    """Images and texts of all rows, or None; only those of shown rows are read."""

    images: Any
    texts: Any

    def image(self, row: int) -> str | None:
        """Data URI of the thumbnail of a row."""
        return None if self.images is None else thumbnail(take(self.images, np.array([row]))[0])

    def text(self, row: int) -> str | None:
        """Beginning of the text of a row."""
        return None if self.texts is None else text_of(self.texts, row)


def render(record: Record, numbers: dict[str, Any], media: Media) -> str:
    """Render the page of a record; ``numbers`` is the record as JSON can hold it."""
    style, script = _asset("report.css"), _asset("report.js")
    totals = record.totals
    chosen = None
    if record.risk is not None and record.risk.source == "rows" and totals.accepted_error is not None:
        chosen = (totals.coverage, totals.accepted_error)
    samples = {sample.row for sample in record.samples}
    kinds: dict[str, int] = {}
    for sample in record.samples:
        kinds[sample.kind] = kinds.get(sample.kind, 0) + 1
    reasons = [reason.text for reason in Reason]
    return (
        _environment()
        .get_template("report.html")
        .render(
            record=record,
            totals=totals,
            numbers=numbers,
            media=media,
            style=Markup(style),
            script=Markup(script),
            # Only this style sheet and this script may run, and nothing may be loaded: a second wall behind autoescape.
            policy=f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
            "base-uri 'none'; form-action 'none'",
            risk_chart=None if record.risk is None else svg.risk_chart(record.risk, chosen, record.promised_risk),
            reliability_chart=svg.reliability_chart(record.reliability) if record.reliability else None,
            map_chart=svg.map_chart(record.map, record.class_names, record.ids, samples, reasons),
            kinds=kinds,
            labels=sorted({sample.label for sample in record.samples}),
            badges=_BADGES,
            words=_WORDS,
            legend=_legend(record),
        )
    )


def _legend(record: Record) -> list[tuple[int, str]]:
    """Classes on the map that have a style of their own."""
    drawn = {*record.map.code, *(ellipse[1] for ellipse in record.map.ellipses)}
    return [(code, record.class_names[code]) for code in sorted(drawn) if 0 <= code < svg.STYLED_CLASSES]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("sepc_torch.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_unbroken,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(percent=percent, number=number, figure=figure)
    environment.globals.update(between=between, meter=svg.meter, swatch=svg.swatch)
    return environment


def _unbroken(value: Any) -> Any:
    """What is shown of a value: a number stays on one line with its percent sign."""
    return value.replace(" %", "\xa0%") if type(value) is str else value


@cache
def _asset(name: str) -> str:
    return resources.files("sepc_torch.report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """The source expression by which a content security policy names an inline style sheet or script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}"
