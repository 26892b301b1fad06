"""Table of classes: how many points each has, how many labels are right and accepted, and the usual confusion."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sepc_torch.shapes import Array, Bool, Int


class ClassRow(NamedTuple):
    """Numbers of the points of one class.

    Attributes:
        code: Index of the class; -1 for points of no known class.
        points: Number of points of the class; without true labels, of points that were given its label.
        right: Number of right labels; None without true labels.
        accepted: Number of accepted labels.
        wrong_accepted: Number of labels that are accepted and wrong; None without true labels.
        confused_with: Index of the most frequent wrong label; None if no label is wrong or no true label is known.
        confusions: Number of points with that wrong label.
    """

    code: int
    points: int
    right: int | None
    accepted: int
    wrong_accepted: int | None
    confused_with: int | None
    confusions: int


def class_table(
    label: Int[Array, "N"], accept: Bool[Array, "N"], truth: Int[Array, "N"] | None, classes: int
) -> list[ClassRow]:
    """Count points, right and accepted labels by class; by given label where no true label is known.

    Args:
        label: The assessed labels as class indices; -1 for a point without a label.
        accept: Whether each label is accepted.
        truth: The true classes, -1 for a point of no known class; or None.
        classes: Number of classes C.

    >>> table = class_table(np.array([0, 1, 1]), np.array([True, True, False]), np.array([0, 0, -1]), classes=2)
    >>> table[0]
    ClassRow(code=0, points=2, right=1, accepted=2, wrong_accepted=1, confused_with=1, confusions=1)
    >>> table[-1].code, table[-1].points, table[-1].accepted
    (-1, 1, 0)
    """
    group = label if truth is None else truth
    slot = np.where(group < 0, classes, group)  # points of no class come last
    points = np.bincount(slot, minlength=classes + 1)
    accepted = np.bincount(slot[accept], minlength=classes + 1)
    if truth is None:
        rows = [
            ClassRow(c, n, None, a, None, None, 0)
            for c, (n, a) in enumerate(zip(points.tolist(), accepted.tolist(), strict=True))
        ]
    else:
        wrong = (label != truth) | (truth < 0)
        errors = np.bincount(slot[wrong], minlength=classes + 1)
        slipped = np.bincount(slot[wrong & accept], minlength=classes + 1)
        usual, times = _usual_confusions(slot[wrong & (label >= 0)], label[wrong & (label >= 0)], classes)
        rows = [
            ClassRow(
                code=c,
                points=int(points[c]),
                right=int(points[c] - errors[c]),
                accepted=int(accepted[c]),
                wrong_accepted=int(slipped[c]),
                confused_with=int(usual[c]) if times[c] else None,
                confusions=int(times[c]),
            )
            for c in range(classes + 1)
        ]
    last = rows.pop()
    return [*rows, last._replace(code=-1)] if last.points else rows


def _usual_confusions(
    slot: Int[Array, "M"], label: Int[Array, "M"], classes: int
) -> tuple[Int[Array, "S"], Int[Array, "S"]]:
    """The most frequent wrong label of each class, and its number; the lowest index of equally frequent ones."""
    usual, times = np.zeros(classes + 1, dtype=np.int64), np.zeros(classes + 1, dtype=np.int64)
    # Only the pairs that occur are counted: a matrix of all pairs would need C^2 numbers.
    pairs, counts = np.unique(slot * classes + label, return_counts=True)
    for pair, number in zip(pairs.tolist(), counts.tolist(), strict=True):
        c, other = divmod(pair, classes)
        if number > times[c]:
            usual[c], times[c] = other, number
    return usual, times
