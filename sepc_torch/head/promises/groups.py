r"""Acceptance by group: one threshold, and one promise of the risk, for each group of points.

Groups are the predicted classes, the regions of the head (nearest ellipsoids), groups that the caller names, or the
true classes. For groups :math:`g = 1, \dots, G`, :func:`accept_by_group` promises

.. math:: P\big(\forall g : P(\mathrm{wrong} \mid \mathrm{accepted}, g) \le r\big) \ge 1 - \delta.

Proof. (1) Which groups are merged depends only on calibration points that are not ranked, so the groups are fixed
before the ranked points are seen. (2) Given the number :math:`n_g` of ranked points in each group, the points of group
g are independent draws from the distribution of g. (3) Hence the search of
:meth:`~sepc_torch.head.calibration.label_calibration.LabelCalibration.risk_threshold` in group g fails with probability
at most :math:`\delta_g`.
(4) :math:`\delta_g = \delta / J` for all groups, where J depends only on the :math:`n_g` and at most J groups have
enough points to promise anything at the level :math:`\delta / J` (:func:`promised_delta`). The other groups accept
nothing and cannot fail. (5) The probabilities of at most J groups sum to at most :math:`\delta`. ``joint=False`` uses
:math:`\delta_g = \delta`: each promise by itself holds with probability :math:`1 - \delta`.

True classes, and groups that are not known of new points (``known=False``), share one threshold. A sequence of tests of
this threshold needs no division of :math:`\delta`, since every group must pass every test
(:func:`~sepc_torch.head.promises.conformal.passed_sequence`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from sepc_torch.data.options import check_choice
from sepc_torch.data.text import text_table
from sepc_torch.data.warn import warn_user
from sepc_torch.head.calibration.label_calibration import LabelCalibration
from sepc_torch.head.promises.conformal import check_share, least_points
from sepc_torch.model.sepc import SEPC
from sepc_torch.shapes import Array, Float, Int

By = Literal["class", "predicted", "region"]

# A group is merged if it is expected to hold fewer than this many times the least number of points that promise
# anything. The least number allows no error; twice as many allow one or two.
_SPARE = 2


class GroupPromise(NamedTuple):
    """Acceptance in one group.

    Attributes:
        group: The members of the group: labels of classes, numbers of ellipsoids or of given groups. More than one if
            groups were merged.
        points: The number of ranked calibration points in the group.
        threshold: The head accepts joint scores of at least this value; inf if it accepts nothing.
        coverage: The share of the points that are accepted; NaN without points.
        error: The share of the accepted points whose label is wrong; NaN if no point is accepted.
        found: Whether the risk is promised in this group; if not, the head accepts nothing in it.
    """

    group: tuple[Any, ...]
    points: int
    threshold: float
    coverage: float
    error: float
    found: bool


class GroupAcceptance(NamedTuple):
    """Acceptance by group; ``print`` shows it as a table.

    Attributes:
        groups: One :class:`GroupPromise` per group.
        coverage: The share of all ranked points that are accepted.
        error: The share of wrong labels among them; NaN if no point is accepted.
        points: The number of ranked points.
        found: Whether the risk is promised in every group.
        limits: Of a group without a promise: the risk that its points can promise, and how many more are needed. It is
            the largest of these groups, or the smallest with ``by="class"``, where every class needs a promise. Empty
            if the risk is promised in every group.
    """

    groups: tuple[GroupPromise, ...]
    coverage: float
    error: float
    points: int
    found: bool
    limits: str

    def __str__(self) -> str:
        rows = [[", ".join(map(str, row.group)), *row[1:5], "yes" if row.found else "no"] for row in self.groups]
        return text_table(list(GroupPromise._fields), rows)


class Groups(NamedTuple):
    """Groups of the calibration points: their members by key, the group of each key, and the key of each point.

    A key is a class index, the index of an ellipsoid, or a given group.
    """

    members: list[tuple[Any, ...]]
    of_key: Int[Array, "keys"]
    keys: Int[Array, "M"]


def accept_by_group(
    labels: LabelCalibration, sepc: SEPC, risk: float, delta: float, by: By | Any, joint: bool, known: bool = True
) -> GroupAcceptance:
    """Set the thresholds of one source of labels by group; see :meth:`TrustHead.accept_at`."""
    risk, delta = check_share(risk, "risk"), check_share(delta, "delta")
    kind = by if isinstance(by, str) else "given"
    if kind == "given":
        groups = _given(labels, by)
    else:
        check_choice("by", by, get_args(By))
        groups = observed_groups(labels, sepc, risk, delta, by, joint)
        if len(groups.of_key) > 1 and not groups.of_key.any():
            named = "regions" if by == "region" else "classes"
            warn_user(
                f"The {len(groups.of_key)} {named} have too few points for promises of their own, so that all were "
                "merged and the promise is one over all rows. Calibrate with more rows, or ask for a larger risk or "
                "joint=False.",
            )
    of_point, held = groups.of_key[groups.keys], labels.ranked_rows.cpu().numpy()
    group, others = of_point[held], np.delete(of_point, held)
    count = len(groups.members)
    sizes = np.bincount(group, minlength=count)
    share = promised_delta(sizes, risk, delta) if joint else delta
    if kind == "class" or not known:
        # One threshold for all groups, so that all of them must have ranked points.
        shared = labels.risk_threshold(group, others, risk, delta, share) if sizes.all() else math.inf
        thresholds = np.full(count, shared)
        labels.set_table(None, None)
        labels.threshold = labels.threshold.new_tensor(thresholds[0])
    else:
        members = [(np.where(group == g, 0, -1), np.where(others == g, 0, -1)) for g in range(count)]
        thresholds = np.array([labels.risk_threshold(*rows, risk, share) for rows in members])
        table = {"predicted": "class_threshold", "region": "region_threshold"}.get(kind, "group_threshold")
        labels.set_table(table, thresholds[groups.of_key])
        labels.threshold = labels.threshold.new_tensor(torch.inf)
    score, right = labels.ranked_joint.double().cpu().numpy(), labels.ranked_right.cpu().numpy()
    accepted = score >= thresholds[group]
    rows = []
    for g in range(count):
        mine = group == g
        taken = accepted & mine
        coverage, error = _share(taken.sum(), mine.sum()), _share((taken & ~right).sum(), taken.sum())
        threshold = float(thresholds[g])
        rows.append(GroupPromise(groups.members[g], int(mine.sum()), threshold, coverage, error, threshold < math.inf))
    error, refused = _share((accepted & ~right).sum(), accepted.sum()), [g for g in range(count) if not rows[g].found]
    limits = ""
    if refused:
        g = (min if kind == "class" else max)(refused, key=lambda g: sizes[g])
        limits = f"group {', '.join(map(str, rows[g].group))}: {labels.shortfall(risk, share, ranked=group == g)}"
    return GroupAcceptance(tuple(rows), float(accepted.mean()), error, len(accepted), not refused, limits)


def promised_delta(sizes: Int[Array, "G"], risk: float, delta: float) -> float:
    r"""Level :math:`\delta / J` of each group such that at most J groups can promise the risk at that level.

    J is the smallest number for which at most J groups have :func:`least_points` ``(risk, delta / J)`` points. Every
    group that can fail is one of these, so the probabilities of failure sum to at most :math:`\delta`.

    >>> promised_delta(np.array([500, 100, 3]), risk=0.05, delta=0.05)  # 72 points can promise at 0.025, 3 cannot
    0.025
    >>> promised_delta(np.full(100, 60), risk=0.05, delta=0.05)  # 60 points can promise at 0.05, and at 0.025 no longer
    0.025
    """
    able = (int((sizes >= least_points(risk, delta / j)).sum()) <= j for j in range(1, len(sizes) + 1))
    return delta / next(j for j, few in enumerate(able, start=1) if few)


def merge_thin(
    expected: Float[Array, "K"], gaps: Float[Array, "K K"], risk: float, delta: float, joint: bool
) -> Int[Array, "K"]:
    """Merge the smallest group with its nearest neighbour until every group can be expected to promise the risk.

    Args:
        expected: The expected number of ranked points of each group, from points that are not ranked.
        gaps: Distances between groups. The distance between merged groups is the least one of their members.
        risk: The risk to promise.
        delta: The allowed probability of failure, shared by all groups if ``joint``.
        joint: Whether the promises hold together.

    Returns:
        The index of the merged group of each group.

    >>> line = np.abs(np.subtract.outer([0.0, 1.0, 5.0], [0.0, 1.0, 5.0]))
    >>> merge_thin(np.array([10.0, 300.0, 300.0]), line, risk=0.05, delta=0.05, joint=True)
    array([0, 0, 1])
    """
    return merge_smallest(expected, gaps, lambda alive: _SPARE * least_points(risk, delta / alive if joint else delta))


def merge_smallest(
    expected: Float[Array, "K"], gaps: Float[Array, "K K"], least: Callable[[int], float]
) -> Int[Array, "K"]:
    """Merge the smallest group with its nearest neighbour until every group is as large as ``least(number of groups)``.

    >>> line = np.abs(np.subtract.outer([0.0, 1.0, 5.0], [0.0, 1.0, 5.0]))
    >>> merge_smallest(np.array([3.0, 9.0, 9.0]), line, lambda groups: 5.0)
    array([0, 0, 1])
    """
    expected, gaps = expected.astype(float), gaps.copy()
    np.fill_diagonal(gaps, np.inf)
    group, alive = np.arange(len(expected)), len(expected)
    while alive > 1:
        smallest = int(np.argmin(expected))
        if expected[smallest] >= least(alive):
            break
        nearest = int(np.argmin(gaps[smallest]))
        group[group == smallest] = nearest
        expected[nearest] += expected[smallest]
        gaps[nearest] = gaps[:, nearest] = np.minimum(gaps[nearest], gaps[smallest])
        gaps[nearest, nearest] = np.inf
        # A merged group is neither the smallest nor the nearest of another one.
        expected[smallest] = gaps[smallest] = gaps[:, smallest] = np.inf
        alive -= 1
    return np.unique(group, return_inverse=True)[1]


def region_gaps(sepc: SEPC) -> Float[Array, "K K"]:
    """Distances between ellipsoids: of one's centre from the other, the smaller of both; greater between classes.

    Every ellipsoid of the same class is nearer than any ellipsoid of another class.
    """
    with torch.no_grad():
        distance = sepc.bank(sepc.bank.centers).double().cpu().numpy()
    gaps = np.minimum(distance, distance.T)
    codes = sepc.codes.cpu().numpy()
    return gaps + np.where(codes[:, None] == codes, 0.0, 1.0 + gaps.max())


def class_gaps(sepc: SEPC) -> Float[Array, "C C"]:
    """Distances between classes: the least distance between their ellipsoids; the largest if a class has none."""
    regions, codes = region_gaps(sepc), sepc.codes.cpu().numpy()
    gaps = np.full((len(sepc.classes), len(sepc.classes)), regions.max())
    np.minimum.at(gaps, (codes[:, None], codes[None, :]), regions)
    return gaps


def observed_groups(labels: LabelCalibration, sepc: SEPC, risk: float, delta: float, by: By, joint: bool) -> Groups:
    """Groups by class or region, merged where points that are not ranked say that a group is thin."""
    points = {"class": labels.point_class, "predicted": labels.point_label, "region": labels.point_region}[by]
    keys, held = points.cpu().numpy(), labels.ranked_rows.cpu().numpy()
    if len(keys) == 0:
        raise RuntimeError("The regions of the head changed since the calibration; call head.calibrate again.")
    gaps = region_gaps(sepc) if by == "region" else class_gaps(sepc)
    fitted = np.delete(keys, held)
    expected = np.bincount(fitted, minlength=len(gaps)) * (len(held) / len(fitted))
    of_key = merge_thin(expected, gaps, risk, delta, joint)
    names = np.arange(len(gaps)).tolist() if by == "region" else sepc.classes
    members = [tuple(names[k] for k in np.flatnonzero(of_key == g)) for g in range(of_key.max() + 1)]
    return Groups(members, of_key, keys)


def _given(labels: LabelCalibration, by: Any) -> Groups:
    """Groups that the caller gives, one for each calibration point; they are never merged."""
    keys, points = np.asarray(by.cpu() if isinstance(by, torch.Tensor) else by), len(labels.point_label)
    if keys.shape != (points,):
        raise ValueError(
            f"by needs one group for each of the {points} calibration points, in their order; got the shape "
            f"{keys.shape}. Or pass 'class', 'predicted' or 'region'."
        )
    if keys.dtype.kind not in "iu" or keys.min() < 0:
        raise TypeError(
            f"Groups are integers from 0, got {keys.dtype} values such as {keys[0]!r}; number them first, with "
            "names, by = numpy.unique(labels, return_inverse=True)."
        )
    count = int(keys.max()) + 1
    if count > points:
        raise ValueError(f"The largest of the given groups is {count - 1}, with {points} points; number them from 0.")
    return Groups([(g,) for g in range(count)], np.arange(count), keys.astype(np.int64))


def _share(part: Any, whole: Any) -> float:
    return float(part / whole) if whole else math.nan
