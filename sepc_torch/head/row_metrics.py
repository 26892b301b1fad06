"""Numbers about judged rows for monitoring systems, as OpenMetrics text."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.shapes import Array

# Quantiles of p-values, over this many last rows.
_QUANTILES, _LAST = (0.01, 0.05, 0.25, 0.5, 0.75), 1000


class Family(NamedTuple):
    """One metric: its name, type (gauge, counter, summary or stateset), help, and samples.

    A sample has the ending of its name, its labels and its value.
    """

    name: str
    kind: str
    help: str
    samples: Sequence[tuple[str, Mapping[str, Any], float | int]]


class RowMetrics:
    """Counts of judged and accepted rows, and their p-values, in one process: a pickle holds none.

    >>> print(openmetrics(RowMetrics().families()[:1]))
    # TYPE sepc_rows counter
    # HELP sepc_rows Judged rows.
    sepc_rows_total 0
    # EOF
    """

    def __init__(self) -> None:
        self.rows, self.accepted = 0, 0
        self._sum = 0.0
        self._last: Array = np.zeros(0)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[RowMetrics], tuple[()]]:
        return RowMetrics, ()

    def add(self, out: HeadPrediction) -> None:
        """Count rows; a row without a p-value counts as one with the least p-value."""
        p = np.nan_to_num(out.p_value.double().cpu().numpy(), nan=0.0)
        with self._lock:
            self.rows += len(p)
            self.accepted += int(out.accept.sum())
            self._sum += float(p.sum())
            self._last = np.concatenate([self._last, p])[-_LAST:]

    def state(self) -> dict[str, Array]:
        """Return the counts as arrays, for a file."""
        whole = {"rows": np.array(self.rows), "accepted": np.array(self.accepted)}
        return {**whole, "sum": np.array(self._sum), "last": self._last}

    @classmethod
    def of(cls, state: Mapping[str, Array]) -> RowMetrics:
        """Restore counts from the arrays of :meth:`state`."""
        found = cls()
        found.rows, found.accepted, found._sum = int(state["rows"]), int(state["accepted"]), float(state["sum"])
        found._last = state["last"].astype(float)
        return found

    def families(self) -> list[Family]:
        """The metrics."""
        found = np.quantile(self._last, _QUANTILES).tolist() if len(self._last) else []
        shares = [("", {"quantile": q}, value) for q, value in zip(_QUANTILES, found, strict=False)]
        p_values = [*shares, ("_count", {}, self.rows), ("_sum", {}, self._sum)]
        return [
            Family("sepc_rows", "counter", "Judged rows.", [("_total", {}, self.rows)]),
            Family("sepc_accepted_rows", "counter", "Accepted rows.", [("_total", {}, self.accepted)]),
            Family("sepc_p_value", "summary", f"P-values; quantiles of the last {_LAST} rows.", p_values),
        ]


def openmetrics(families: Iterable[Family]) -> str:
    """Metrics as OpenMetrics text; its media type is :data:`MEDIA_TYPE`."""
    lines = []
    for name, kind, about, samples in families:
        lines += [f"# TYPE {name} {kind}", f"# HELP {name} {about}"]
        for ending, labels, value in samples:
            inside = ",".join(f'{key}="{label}"' for key, label in labels.items())
            lines.append(f"{name}{ending}{f'{{{inside}}}' if inside else ''} {_number(value)}")
    return "\n".join([*lines, "# EOF\n"])


MEDIA_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def _number(value: float | int) -> str:
    """A number as the format has it."""
    return "NaN" if value != value else "+Inf" if value == np.inf else "-Inf" if value == -np.inf else f"{value:.12g}"
