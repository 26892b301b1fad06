r"""Acceptance by group: one threshold, and one promise of the risk, for each group of points.

Groups are the predicted classes, the regions of the head (nearest ellipsoids), groups that the caller names, or the
true classes. For groups :math:`g = 1, \dots, G`, :func:`accept_by_group` promises

.. math:: P\big(\forall g : P(\mathrm{wrong} \mid \mathrm{accepted}, g) \le r\big) \ge 1 - \delta.

Proof. (1) Which groups are merged depends only on calibration points that are not ranked, so the groups are fixed
before the ranked points are seen. (2) Given the number :math:`n_g` of ranked points in each group, the points of group
g are independent draws from the distribution of g. (3) Hence the search of
:func:`~sepc_torch.guarantees.risk_threshold` in group g fails with probability at most :math:`\delta_g`. (4)
:math:`\delta_g = \delta / J` for the J groups that have enough points to promise anything, which depends only on the
:math:`n_g`; the other groups accept nothing and cannot fail. (5) The probabilities sum to at most :math:`\delta`.
``joint=False`` uses :math:`\delta_g = \delta`: each promise by itself holds with probability :math:`1 - \delta`.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from sepc_torch.data.options import check_choice
from sepc_torch.data.text_table import text_table
from sepc_torch.head.binomial_search import binomial_tail, least_points, search_level
from sepc_torch.head.conformal import check_share, risk_threshold
from sepc_torch.head.label_calibration import LabelCalibration, separated
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
    """

    groups: tuple[GroupPromise, ...]
    coverage: float
    error: float
    points: int
    found: bool

    def __str__(self) -> str:
        rows = [[", ".join(map(str, row.group)), *row[1:5], "yes" if row.found else "no"] for row in self.groups]
        return text_table(list(GroupPromise._fields), rows)


class Groups(NamedTuple):
    """Groups of the ranked points: their members by key, the group of each key, and the key of each ranked point.

    A key is a class index, the index of an ellipsoid, or a given group.
    """

    members: list[tuple[Any, ...]]
    of_key: Int[Array, "keys"]
    keys: Int[Array, "h"]


def accept_by_group(
    labels: LabelCalibration, sepc: SEPC, risk: float, delta: float, by: By | Any, joint: bool
) -> GroupAcceptance:
    """Set the thresholds of one source of labels by group; see :meth:`TrustHead.accept_at`."""
    risk, delta = check_share(risk, "risk"), check_share(delta, "delta")
    kind = by if isinstance(by, str) else "given"
    if kind == "given":
        groups = _given(labels, by)
    else:
        check_choice("by", by, get_args(By))
        groups = _observed(labels, sepc, risk, delta, by, joint)
    group = groups.of_key[groups.keys]
    count = len(groups.members)
    sizes = np.bincount(group, minlength=count)
    share = promised_delta(sizes, risk, delta) if joint else delta
    if kind == "class":
        thresholds = np.full(count, _shared_threshold(labels, group, sizes, risk, share))
        labels.set_table(None, None)
        labels.threshold = labels.threshold.new_tensor(thresholds[0])
    else:
        thresholds = np.array([_threshold(labels, group == g, risk, share) for g in range(count)])
        table = {"predicted": "class_threshold", "region": "region_threshold"}.get(kind, "group_threshold")
        labels.set_table(table, thresholds[groups.of_key])
        labels.threshold = labels.threshold.new_tensor(torch.inf)
    score, right = labels.held_joint.double().cpu().numpy(), labels.held_right.cpu().numpy()
    accepted = score >= thresholds[group]
    rows = []
    for g in range(count):
        mine = group == g
        taken = accepted & mine
        coverage, error = _share(taken.sum(), mine.sum()), _share((taken & ~right).sum(), taken.sum())
        threshold = float(thresholds[g])
        rows.append(GroupPromise(groups.members[g], int(mine.sum()), threshold, coverage, error, threshold < math.inf))
    error = _share((accepted & ~right).sum(), accepted.sum())
    return GroupAcceptance(tuple(rows), float(accepted.mean()), error, len(accepted), all(row.found for row in rows))


def promised_delta(sizes: Int[Array, "G"], risk: float, delta: float) -> float:
    r"""Level of each group, :math:`\delta / J` for the J groups with enough points to promise the risk at that level.

    J is the largest number such that J groups have at least :func:`least_points` ``(risk, delta / J)`` points.

    >>> promised_delta(np.array([500, 100, 3]), risk=0.05, delta=0.05)  # 72 points can promise at 0.025, 3 cannot
    0.025
    """
    ordered = np.sort(sizes)[::-1]
    enough = [j for j in range(1, len(ordered) + 1) if ordered[j - 1] >= least_points(risk, delta / j)]
    return delta / max(enough, default=1)


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
    expected, gaps = expected.astype(float), gaps.copy()
    np.fill_diagonal(gaps, np.inf)
    group, alive = np.arange(len(expected)), len(expected)
    while alive > 1:
        smallest = int(np.argmin(expected))
        if expected[smallest] >= _SPARE * least_points(risk, delta / alive if joint else delta):
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


def _observed(labels: LabelCalibration, sepc: SEPC, risk: float, delta: float, by: By, joint: bool) -> Groups:
    """Groups by class or region, merged where points that are not ranked say that a group is thin."""
    points = {"class": labels.point_class, "predicted": labels.point_label, "region": labels.point_region}[by]
    keys, held = points.cpu().numpy(), labels.held_rows.cpu().numpy()
    if len(keys) == 0:
        raise RuntimeError("The calibration of this head is of an older version, without groups; calibrate it again.")
    gaps = region_gaps(sepc) if by == "region" else class_gaps(sepc)
    fitted = np.delete(keys, held)
    expected = np.bincount(fitted, minlength=len(gaps)) * (len(held) / len(fitted))
    of_key = merge_thin(expected, gaps, risk, delta, joint)
    names = np.arange(len(gaps)).tolist() if by == "region" else sepc.classes
    members = [tuple(names[k] for k in np.flatnonzero(of_key == g)) for g in range(of_key.max() + 1)]
    return Groups(members, of_key, keys[held])


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
    return Groups([(g,) for g in range(count)], np.arange(count), keys[labels.held_rows.cpu().numpy()].astype(np.int64))


def _threshold(labels: LabelCalibration, mine: Array, risk: float, delta: float) -> float:
    """Threshold of the points of one group."""
    rows = torch.from_numpy(mine)
    if not mine.any():
        return math.inf
    steps = separated(labels.log_odds().cpu()[rows])
    return steps.threshold(risk_threshold(steps.scores, labels.held_right.cpu()[rows], risk, delta).threshold)


def _shared_threshold(
    labels: LabelCalibration, group: Int[Array, "h"], sizes: Int[Array, "G"], risk: float, delta: float
) -> float:
    """Lowest threshold that qualifies in every group at once; inf if there is none.

    The true class of a new point is unknown, so that all classes share one threshold. The search level bounds the
    failure of a group at all thresholds at once, hence also at this one.
    """
    steps, wrong = separated(labels.log_odds()), ~labels.held_right.cpu().numpy()
    scores = steps.scores.numpy()
    values = np.unique(scores)
    qualified = np.ones(len(values), dtype=bool)
    for g, size in enumerate(sizes.tolist()):
        mine = group == g
        accepted = size - np.searchsorted(np.sort(scores[mine]), values)
        errors = (mine & wrong).sum() - np.searchsorted(np.sort(scores[mine & wrong]), values)
        level = search_level(size, risk, delta) if size else 0.0
        qualified &= binomial_tail(errors, accepted, risk) <= level
    return steps.threshold(float(values[qualified][0])) if qualified.any() else math.inf


def _share(part: Any, whole: Any) -> float:
    return float(part / whole) if whole else math.nan
