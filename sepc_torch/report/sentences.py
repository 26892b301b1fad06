"""Numbers in words, whether the promise of a head holds on the rows of a report, and the verdict."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sepc_torch.head.prediction import Promise
from sepc_torch.head.promises.conformal import binomial_tail, least_points, upper_bound
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.report.record import PromiseState, Totals
from sepc_torch.report.rows import Rows
from sepc_torch.shapes import Array, Int

# An excess over a promise is called broken if chance explains it with less than this probability.
CHANCE = 0.01
# Probability that an interval of a share misses the share.
_MISSED = 0.05
# From this share and number of rows of the training file on, a report is about these and not about new rows.
_SEEN, _LEAST_SEEN = 0.1, 20


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
    """A whole number, from 10 000 on with thin spaces between thousands; years have none."""
    return f"{round(count):,}".replace(",", "\u202f") if abs(count) >= 10_000 else f"{round(count)}"


def figure(value: float) -> str:
    r"""A number with three significant digits, and all digits of its whole part.

    >>> figure(7.8134), figure(12345.6), figure(-0.0001234)
    ('7.81', '12\u202f346', '-0.000123')
    """
    return number(value) if 1000 <= abs(value) < 1e15 else f"{value:.3g}"


def share_interval(count: int, of: int) -> tuple[float, float]:
    r"""Clopper-Pearson interval of a share: it holds the true share with a probability of at least 95 %.

    The ends are the shares at which at least, and at most, ``count`` of ``of`` have the probability 2.5 %.

    >>> [round(end, 4) for end in share_interval(0, 20)], [round(end, 4) for end in share_interval(3, 20)]
    ([0.0, 0.1684], [0.0321, 0.3789])
    """
    return 1.0 - upper_bound(of - count, of, _MISSED / 2), upper_bound(count, of, _MISSED / 2)


def between(count: int, of: int) -> str:
    """The interval of a share in words; empty without points.

    >>> between(3, 20)
    '3.2 % to 37.9 %'
    """
    return " to ".join(map(percent, share_interval(count, of))) if of else ""


def promise_state(
    head: TrustHead,
    rows: Rows,
    totals: Totals,
    *,
    alarm: bool = False,
    groups: Int[Array, "N"] | None = None,
    cost: float | None = None,
    seen: float = 0.0,
) -> PromiseState:
    r"""Whether the promise of a head holds on the rows, in words, and what to do next.

    An excess is broken if it has a probability below 1 % where the promise holds. For a risk r, the wrong labels of n
    accepted rows are then at most binomial, :math:`\mathrm{Bin}(n, r)`; with J groups each is tested at 1 % / J. A flag
    rate r is promised on average over calibration sets of m points: the number of refused rows is then beta-binomial,
    with the parameters :math:`r (m + 1)` and :math:`(1 - r)(m + 1)`, since it counts ranks. For an average risk the
    same distribution, with m accepted calibration points, is an approximation. A mean of n costs in [0, c] exceeds the
    bound by t with a probability of at most :math:`\exp(-2 n t^2 / c^2)` (Hoeffding). Rows of unknown classes are not
    counted: no promise covers them.

    Args:
        head: A calibrated head.
        rows: The rows, judged by the head.
        totals: Their counts.
        alarm: Whether the rows are shown not to be drawn like the calibration points.
        groups: The groups of the rows, for a promise by given groups.
        cost: The mean cost of the rows of known classes, for a promise about costs.
        seen: Share of the rows that equal a row that made the head.
    """
    promise, age = head.promise, head.calibration_age
    recalibrate = "Calibrate with more labelled rows, or promise less: head.accept_at(risk=...) with a larger risk."
    if promise is None:
        return PromiseState("no promise", "The file of the head does not say what was promised.", recalibrate)
    if not promise.found:
        return PromiseState("no promise", f"{str(promise)[0].upper()}{str(promise)[1:]}.", recalibrate)
    if age:
        changed = f"{percent(age)} of the training points were added or forgotten since the calibration"
        step = "Calibrate the head again with held-out rows, and report again."
        return PromiseState("does not apply", f"The promise does not apply: {changed}.", step)
    if seen >= max(_SEEN, 2.0 * head.repeats) and seen * len(rows) >= _LEAST_SEEN:
        why = f"{percent(seen)} of these rows are rows of the training file, and say nothing about new ones"
        return PromiseState("does not apply", f"The promise does not apply: {why}.", "Report on rows of another file.")
    outside = (
        "Look at the novel rows below. If such rows will come again, fit the head with their classes or calibrate it "
        "with labelled rows like these, and report again; until then, do not rely on the promise."
    )
    if alarm:
        why = "these rows are not drawn like the calibration points"
        if totals.unknown:
            why = f"{number(totals.unknown)} of {number(totals.rows)} rows are of unknown classes"
        return PromiseState("does not apply", f"The promise does not apply: {why}.", outside)
    needs_labels = promise.flag_rate is None
    if needs_labels and (rows.truth is None or not totals.known_accepted):
        lacking = "no true labels were given" if rows.truth is None else "no label of a known class is accepted"
        return PromiseState("not checked", f"The promise is not checked: {lacking}.", _labels_to_check(promise, rows))
    found, excess, chance = _compared(head, promise, rows, groups, cost)
    if not excess:
        if promise.risk is not None and (totals.wrong_accepted or 0) > promise.risk * totals.accepted:
            strangers = f"{number(totals.accepted - (totals.known_accepted or 0))} accepted rows are of unknown classes"
            return PromiseState(
                "does not apply", f"The promise does not apply to all rows: {strangers}. {found}.", outside
            )
        use = f"Use the {number(totals.accepted)} accepted labels; a person looks at the "
        return PromiseState(
            "kept",
            f"The promise is kept on these rows: {_lower(found)}.",
            f"{use}{number(totals.rows - totals.accepted)} refused rows.",
        )
    if chance is None or chance >= CHANCE:
        why = "and chance can explain the difference"
        if chance is None:  # the units of these rows are not known, so nothing says what chance explains
            why = "but the promise is over units, and here every row counts alike"
        step = "Report again with more labelled rows of the same kind: these are too few to tell."
        return PromiseState("open", f"The promise is open: {_lower(found)}, {why}.", step)
    why = f"chance explains that with less than {percent(CHANCE)}"
    step = (
        "Do not rely on accepted labels of such rows: they are not drawn like the calibration points, or these were an "
        "unlucky draw. Calibrate the head with labelled rows like these, and report again."
    )
    return PromiseState("broken", f"The promise is broken: {_lower(found)}; {why}.", step)


def _compared(
    head: TrustHead, promise: Promise, rows: Rows, groups: Int[Array, "N"] | None, cost: float | None
) -> tuple[str, bool, float | None]:
    """What was found, whether it is more than promised, and how probable such an excess is (None: unknown)."""
    known = np.ones(len(rows), dtype=bool) if rows.truth is None else rows.truth >= 0
    of_known = "" if known.all() else " of known classes"
    if promise.costs is not None:
        assert cost is not None
        assert promise.bound is not None
        assert promise.review is not None
        said = f"A row{of_known} costs {cost:.3g} on average, and at most {promise.bound:.3g} was promised"
        possible = np.append(np.ravel(promise.costs), promise.review)
        above = max(cost - promise.bound, 0.0) / max(float(np.ptp(possible)), 1e-300)
        chance = math.exp(-2.0 * int(known.sum()) * above**2)
        return said, cost > promise.bound, None if promise.units else chance
    assert head.calibration is not None
    labels = head.calibration.own if rows.softmax is None else head.calibration.network
    if promise.flag_rate is not None:
        n, refused = int(known.sum()), int((known & ~rows.accept).sum())
        said = f"{percent(refused / max(n, 1))} of the rows{of_known} are refused, and at most "
        said += f"{percent(promise.flag_rate)} were promised on average"
        excess = refused > promise.flag_rate * n
        chance = _average_tail(refused, n, promise.flag_rate, len(labels.ranked_joint))
        return said, excess, None if promise.units else chance
    assert promise.risk is not None
    assert rows.truth is not None
    risk = promise.risk
    counted = rows.accept & known
    keys = {"predicted": rows.label, "class": rows.truth, "region": rows.out.nearest.numpy(), "group": groups}
    key = keys.get(promise.by or "")
    if promise.groups is not None:  # classes or regions of one merged group share a threshold
        table = {"predicted": labels.class_threshold, "region": labels.region_threshold}.get(promise.by or "")
        key = None if table is None or key is None else table.cpu().numpy()[key]
    values, group = np.unique(np.zeros(len(rows), dtype=np.int64) if key is None else key, return_inverse=True)
    accepted = np.bincount(group[counted], minlength=1)
    wrong = (
        np.bincount(group[counted], rows.label[counted] != rows.truth[counted], minlength=1).round().astype(np.int64)
    )
    values, wrong, accepted = (part[accepted > 0] for part in (values[: len(accepted)], wrong, accepted))
    said = f"{percent(wrong.sum() / accepted.sum())} of the accepted labels{of_known} are wrong, and at most "
    said += f"{percent(risk)} were promised"
    if len(accepted) > 1:
        worst = int((wrong / accepted).argmax())
        named = "" if promise.groups is not None else f" ({_group_name(head, promise.by, int(values[worst]))})"
        said += f" in every group; {len(accepted)} groups have accepted rows; in the worst{named}, "
        said += f"{percent(wrong[worst] / accepted[worst])} are wrong"
    excess = bool((wrong > risk * accepted).any())
    if promise.units:
        return said, excess, None
    if promise.average:
        held = int((labels.ranked_joint >= labels.threshold).sum())
        return said, excess, _average_tail(int(wrong.sum()), int(accepted.sum()), risk, held)
    tails = 1.0 - binomial_tail(np.maximum(wrong - 1, 0), accepted, risk)
    return said, excess, min(1.0, float(np.where(wrong > 0, tails, 1.0).min()) * len(tails))


def _group_name(head: TrustHead, by: str | None, key: int) -> str:
    """The words for a group of a promise."""
    if by in ("predicted", "class") and key >= 0:
        return f"{by.replace('class', 'true')} class {head.classes[key]}"
    return f"{'region' if by == 'region' else 'group'} {key}"


def _average_tail(count: int, of: int, rate: float, calibration: int) -> float:
    """Probability of at least ``count`` if the rate is promised on average over sets of ``calibration`` points."""
    from scipy.stats import betabinom

    return float(betabinom.sf(count - 1, of, rate * (calibration + 1), (1.0 - rate) * (calibration + 1)))


def _labels_to_check(promise: Promise, rows: Rows) -> str:
    """How to check a promise that was not checked."""
    if rows.truth is None and promise.risk is not None and rows.accept.any():
        enough = number(least_points(promise.risk, _MISSED))
        return (
            f"Label {enough} accepted rows that are drawn at random, and report on them: if all labels are right, the "
            f"share of wrong ones is below {percent(promise.risk)} with a confidence of 95 %."
        )
    return "Report again with labelled rows of known classes."


def _lower(sentence: str) -> str:
    """A sentence as the end of another one."""
    return sentence[:1].lower() + sentence[1:]


def verdict(totals: Totals, promise: Promise | None, drift: str | None, review: str | None = None) -> list[str]:
    """How much is accepted under which promise, what was found, and whether anything drifts.

    Args:
        totals: The counts of the rows.
        promise: The promise of the head.
        drift: A sentence about drift.
        review: A sentence about costs, if the promise is about these.
    """
    first = f"The head accepts {percent(totals.coverage)} of {number(totals.rows)} labels"
    if promise is None or not promise.found:
        first += "."
    else:
        first += f". It promises, for rows that are drawn like the calibration points: {promise}."
    return [sentence for sentence in (first, _found(totals), review, drift) if sentence is not None]


def cost_sentence(promise: Promise | None, cost: float | None) -> str | None:
    """The mean cost of a row beside that of a refused row; None without costs."""
    if promise is None or cost is None:
        return None
    return f"A row of a known class costs {cost:.3g} on average, and a refused row {promise.review:.3g}."


def _found(totals: Totals) -> str:
    if totals.wrong is None or totals.wrong_accepted is None:
        main = max(totals.reasons, key=lambda name: totals.reasons[name])
        if totals.accepted == totals.rows:
            return "No label is refused; without true labels the report cannot say how many are wrong."
        return (
            f"Of the {number(totals.rows - totals.accepted)} refused labels {number(totals.reasons[main])} have the "
            f"reason '{main}'; without true labels the report cannot say how many are wrong."
        )
    if not totals.accepted:
        return f"Nothing is accepted; {percent(totals.error)} of all labels are wrong."
    text = f"Of the accepted labels {percent(totals.accepted_error)} are wrong"
    if totals.unknown:
        text += f" (without rows of unknown classes {percent(totals.known_accepted_error)})"
    text += f", of all labels {percent(totals.error)}"
    if totals.softmax_wrong is not None:
        text += f"; of as many labels chosen by softmax {percent(totals.softmax_wrong / totals.accepted)} are wrong"
    return f"{text}."


def group_codes(groups: Any, rows: int) -> Int[Array, "N"] | None:
    """Given groups as integers, one for each row; None without groups."""
    if groups is None:
        return None
    values = groups.detach().cpu().numpy() if hasattr(groups, "detach") else np.asarray(groups)
    return np.unique(values.reshape(rows), return_inverse=True)[1]
