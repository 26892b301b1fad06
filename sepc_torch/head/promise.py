"""The promise of a head's acceptance threshold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_GROUPS = {"predicted": "predicted class", "class": "true class"}


class Promise(NamedTuple):
    """The request that set the threshold: a risk with its probability to fail, or a share that may be refused.

    Attributes:
        risk: The allowed share of wrong labels among the accepted ones, or None.
        delta: The allowed probability that ``risk`` is exceeded.
        flag_rate: The allowed share of refused points of the calibration distribution, or None.
        by: The groups in each of which the risk holds: ``"predicted"``, ``"region"``, ``"class"`` or ``"group"``; None
            for the average over all points.
        found: Whether a threshold keeps the promise; if not, the head accepts nothing (in no group, with ``by``).
    """

    risk: float | None
    delta: float
    flag_rate: float | None
    by: str | None = None
    found: bool = True

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> Promise | None:
        """Restore a promise from a file; None for a head of a file that holds none."""
        if options is None:
            return None
        risk, flag_rate = (None if options[name] is None else float(options[name]) for name in ("risk", "flag_rate"))
        by = options.get("by")
        found = bool(options.get("found", True))
        return cls(risk, float(options["delta"]), flag_rate, None if by is None else str(by), found)

    def __str__(self) -> str:
        """The promise as the end of a sentence.

        >>> str(Promise(0.01, 0.05, None))
        'at most 1 % of the accepted labels are wrong, with probability 95 % over calibration sets'
        """
        if not self.found:
            return f"nothing is accepted: no threshold keeps a risk of {(self.risk or 0.0) * 100:.3g} %"
        if self.risk is not None:
            where = "" if self.by is None else f" of each {_GROUPS.get(self.by, self.by)}"
            return (
                f"at most {self.risk * 100:.3g} % of the accepted labels{where} are wrong, with probability "
                f"{(1 - self.delta) * 100:.3g} % over calibration sets"
            )
        rate = (self.flag_rate or 0.0) * 100
        return f"on average at most {rate:.3g} % of the points of the calibration distribution are refused"
