"""Numbers in words, and the verdict of a report."""

from __future__ import annotations

import math

import numpy as np

from sepc_torch.head.conformal import binomial_tail
from sepc_torch.head.promise import Promise
from sepc_torch.report.record import Totals

# An error above the promised risk is called broken if chance explains it with less than this probability.
_CHANCE = 0.01


def percent(share: float | None) -> str:
    """A share in percent, with at least one significant digit.

    >>> percent(0.8831), percent(0.0004), percent(1.0), percent(None)
    ('88.3 %', '0.04 %', '100 %', '-')
    """
    if share is None or not math.isfinite(share):
        return "-"
    if share in (0.0, 1.0):
        return f"{100 * share:.0f} %"
    if share < 0.0005:
        return f"{100 * share:.1g} %" if share >= 0.00001 else "< 0.001 %"
    return f"{100 * share:.1f} %" if share < 0.9995 else f"{math.floor(10000 * share) / 100:.2f} %"


def number(count: int | float) -> str:
    """A whole number with thin spaces between thousands.

    >>> number(1234567)
    '1\u202f234\u202f567'
    """
    return f"{round(count):,}".replace(",", "\u202f")


def verdict(totals: Totals, promise: Promise | None, drift: str | None, age: float = 0.0) -> list[str]:
    """The verdict: how much is accepted under which promise, what was found, and whether anything drifts.

    Args:
        totals: The counts of the rows.
        promise: The promise of the head.
        drift: A sentence about drift.
        age: The head's ``calibration_age``: the share of its training points that changed since the calibration.
    """
    first = f"The head accepts {percent(totals.coverage)} of {number(totals.rows)} labels"
    first += f" and promises that {promise}." if promise is not None else "; its file does not say what was promised."
    found = [first, _found(totals, promise)]
    if age:
        found.append(
            f"The calibration is stale: {percent(age)} of the training points were added or forgotten since, and the "
            "promise is that of the head before."
        )
    return [*found, drift] if drift is not None else found


def _found(totals: Totals, promise: Promise | None) -> str:
    if totals.wrong is None or totals.wrong_accepted is None:
        main = max(totals.reasons, key=lambda name: totals.reasons[name])
        if totals.accepted == totals.rows:
            return "No label is refused; without true labels the report cannot say how many are wrong."
        return (
            f"Of the {number(totals.rows - totals.accepted)} refused labels {number(totals.reasons[main])} are {main}; "
            "without true labels the report cannot say how many are wrong."
        )
    if not totals.accepted:
        return f"Nothing is accepted; {percent(totals.error)} of all labels are wrong."
    text = f"Of the accepted labels {percent(totals.accepted_error)} are wrong{_kept(totals, promise)}, of all labels "
    text += percent(totals.error)
    if totals.softmax_wrong is not None:
        text += f"; of as many labels chosen by softmax {percent(totals.softmax_wrong / totals.accepted)} are wrong"
    return f"{text}."


def _kept(totals: Totals, promise: Promise | None) -> str:
    """Whether the promised risk is kept, in brackets; the promise does not cover rows of unknown classes."""
    if totals.wrong_accepted is None or not totals.known_accepted:
        return ""
    known = totals.known_accepted
    wrong = totals.wrong_accepted - (totals.accepted - known)
    found = f"without rows of unknown classes {percent(wrong / known)}" if totals.unknown else ""
    if promise is None or promise.risk is None:
        return f" ({found})" if found else ""
    return f" ({', '.join(filter(None, [found, _compared(wrong, known, promise.risk)]))})"


def _compared(wrong: int, accepted: int, risk: float) -> str:
    """An error rate compared with the promised risk."""
    if wrong <= risk * accepted:
        return "as promised"
    # Probability of at least this many errors at the promised risk.
    chance = 1.0 - float(binomial_tail(np.array([wrong - 1]), np.array([accepted]), risk)[0])
    if chance >= _CHANCE:
        return "more than promised, but no more than chance explains"
    return "the promise is broken: these rows are not distributed like the calibration points"
