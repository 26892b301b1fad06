r"""Overlap of the classes of a data set, and regions of a partition with repeated mistakes (small disjuncts).

Let :math:`E_a` be the minimum-volume ellipsoid of class :math:`a`. The overlap of two classes is the minimum-volume
ellipsoid of the points that lie in both class ellipsoids. The overlap ratio is its volume relative to :math:`E_a`. The
ratio is near 1 where class :math:`a` lies within the other class and near 0 where the classes are apart. With more than
two classes, the overlap of a class is its overlap with all other classes together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from sepc_torch.data.arrays import feature_scale, numeric_points
from sepc_torch.data.labels import label_array, training_set
from sepc_torch.data.options import check_count
from sepc_torch.data.text import text_table
from sepc_torch.ellipsoid import SURFACE_TOLERANCE, Ellipsoid
from sepc_torch.partitioning.fit import partition as make_partition
from sepc_torch.partitioning.record import Partition
from sepc_torch.shapes import Array, Bool, Float, Int
from sepc_torch.solvers import NATIVE, minimum_volume_ellipsoid

# Thickness of flat sets, in standard deviations. It is equal for all sets, so that it cancels in ratios, and too small
# to affect sets that are not flat.
_THICKNESS = 1e-6


class PairOverlap(NamedTuple):
    """The overlap of two classes.

    ``points`` is the number of points in both ellipsoids, ``ratio`` the volume of the overlap relative to each class's
    ellipsoid, and ``meet`` says whether the two ellipsoids intersect.
    """

    points: int
    ratio: tuple[float, float]
    meet: bool


class SmallDisjunct(NamedTuple):
    """A region with more known mistakes of one predicted label than the partition tolerates.

    Attributes:
        ellipsoids: Indices of the ellipsoids that contain the region; empty outside every ellipsoid.
        predicted: The wrong label that the points were given.
        true: The true labels of these points, most frequent first.
        rows: Rows of the wrongly labelled points in the labelled set.
        nearest: Outside every ellipsoid, a region consists of the points with one nearest ellipsoid, and this is its
            index. None inside an ellipsoid.
    """

    ellipsoids: tuple[int, ...]
    predicted: Any
    true: tuple[Any, ...]
    rows: Int[Array, "n"]
    nearest: int | None = None

    @property
    def place(self) -> str:
        """The region as text: the indices of its ellipsoids, or ``near`` and the index of the nearest one."""
        return str(self.ellipsoids) if self.nearest is None else f"near {self.nearest}"


@dataclass(frozen=True, eq=False, repr=False)
class Landscape:
    """The result of :func:`landscape`. All dictionaries are keyed by label.

    Attributes:
        classes: The labels (C,).
        points: Number of points of each class.
        inside: Number of points of each class that lie in the overlap.
        outside: Number of points of each class outside the overlap.
        overlap_ratio: Volume of the overlap relative to the class's ellipsoid.
        pairs: The overlap of every two classes, keyed by both labels in the order of ``classes``.
        ellipsoids: Number of ellipsoids of each class by iteration, without isolated points.
        isolated: Number of isolated points of each class.
        disjuncts: Regions with more than ``max_impure`` known mistakes.
    """

    classes: Array
    points: dict[Any, int]
    inside: dict[Any, int]
    outside: dict[Any, int]
    overlap_ratio: dict[Any, float]
    pairs: dict[tuple[Any, Any], PairOverlap]
    ellipsoids: dict[Any, dict[int, int]]
    isolated: dict[Any, int]
    disjuncts: tuple[SmallDisjunct, ...]

    def __repr__(self) -> str:
        points, disjuncts = sum(self.points.values()), len(self.disjuncts)
        return f"Landscape({len(self.classes)} classes, {points} points, {disjuncts} small disjuncts)"

    def __str__(self) -> str:
        labels = self.classes.tolist()
        classes = text_table(
            ["class", "points", "inside overlap", "outside", "overlap ratio", "ellipsoids by iteration", "isolated"],
            [
                [
                    label,
                    self.points[label],
                    self.inside[label],
                    self.outside[label],
                    self.overlap_ratio[label],
                    " ".join(f"{i}:{n}" for i, n in sorted(self.ellipsoids[label].items())),
                    self.isolated[label],
                ]
                for label in labels
            ],
        )
        parts = [repr(self), classes]
        if len(labels) > 2:
            rows = [
                [a, b, pair.points, pair.ratio[0], pair.ratio[1]] for (a, b), pair in self.pairs.items() if pair.meet
            ]
            if rows:
                parts.append(text_table(["class", "meets", "points in both", "ratio", "ratio of the other"], rows))
        if self.disjuncts:
            found = [[d.place, d.predicted, d.true[0], len(d.rows)] for d in self.disjuncts]
            parts.append(text_table(["small disjunct in", "predicted", "mostly", "mistakes"], found))
        return "\n\n".join(parts)


def landscape(
    X: Any,
    y: Any,
    *,
    partition: Partition | None = None,
    max_impure: int = 2,
    solver: str = NATIVE,
    classes: Any = None,
) -> Landscape:
    """Measure the overlap of the classes, and count the ellipsoids and small disjuncts of a partition.

    Args:
        X: Labelled points (N, D).
        y: Their labels (N,).
        partition: The partition to report on; by default a new one of ``X`` and ``y``. Pass the partition in use with
            new labelled points to find the regions that need repartitioning.
        max_impure: ``max_impure`` of the default partition.
        solver: ``"native"`` or the name of an installed cvxpy solver.
        classes: The labels in the wanted order; by default sorted.

    >>> import numpy as np
    >>> X = np.array([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0], [9.0, 9.0], [9.0, 8.0], [8.0, 9.0]])
    >>> found = landscape(X, [0, 0, 0, 0, 1, 1, 1])
    >>> found.overlap_ratio, found.outside
    ({0: 0.0, 1: 0.0}, {0: 4, 1: 3})
    """
    data = training_set(X, y, classes)
    if partition is None:
        partition = make_partition(X, y, max_impure=max_impure, solver=solver, classes=classes)
    foreign = [label for label in data.classes.tolist() if label not in partition.classes.tolist()]
    if foreign:
        raise ValueError(
            f"y holds the labels {foreign}, but the partition has only the classes {partition.classes.tolist()}. "
            "Drop these points, or pass a partition that was fitted with these classes."
        )
    points = (data.points - data.points.mean(axis=0)) / feature_scale(data.points)
    labels = data.classes.tolist()
    own = [
        minimum_volume_ellipsoid(points[data.codes == c], solver=solver, floor=_THICKNESS) for c in range(len(labels))
    ]
    member = np.stack([e.contains(points) for e in own], axis=1)
    shared = member & (member.sum(axis=1, keepdims=True) > 1)
    inside = [int(np.count_nonzero(shared[data.codes == c, c])) for c in range(len(labels))]
    pairs = {}
    for a, b in combinations(range(len(labels)), 2):
        both = member[:, a] & member[:, b]
        ratio = _ratio(points[both], own[a], solver), _ratio(points[both], own[b], solver)
        pairs[labels[a], labels[b]] = PairOverlap(int(both.sum()), ratio, own[a].intersects(own[b]))
    totals = np.bincount(data.codes).tolist()
    known = partition.classes.tolist()
    return Landscape(
        classes=data.classes,
        points=dict(zip(labels, totals, strict=True)),
        inside=dict(zip(labels, inside, strict=True)),
        outside={label: total - n for label, total, n in zip(labels, totals, inside, strict=True)},
        overlap_ratio={label: _ratio(points[shared[:, c]], own[c], solver) for c, label in enumerate(labels)},
        pairs=pairs,
        ellipsoids={label: _by_iteration(partition, label) for label in known},
        isolated={
            label: sum(e.label == label and e.kind == "isolated" for e in partition.ellipsoids) for label in known
        },
        disjuncts=small_disjuncts(partition, X, y),
    )


def small_disjuncts(
    partition: Partition,
    X: Any,
    y: Any,
    predicted: Any = None,
    *,
    max_impure: int | None = None,
) -> tuple[SmallDisjunct, ...]:
    """Find the regions of the partition with more known mistakes than it tolerates, most mistakes first.

    A new partition whose training set includes these points gives them ellipsoids of their own.

    Args:
        partition: The partition in use.
        X: Labelled points (N, D).
        y: Their true labels (N,).
        predicted: The predicted labels (N,). By default the majority class of the training points in the same region;
            points in a region without training points are then left out.
        max_impure: Number of mistakes to tolerate; by default the ``max_impure`` of the partition.
    """
    points, _ = numeric_points(X)
    if points.shape[1] != partition.dim:
        raise ValueError(
            f"X has {points.shape[1]} features, but the partition has {partition.dim}. Pass the features of its "
            "training set."
        )
    limit = int(partition.made["max_impure"]) if max_impure is None else check_count(max_impure, "max_impure")
    truth = _as_objects(y, "y", len(points))
    distance = partition.distances(points)
    if predicted is None:
        patterns, region = np.unique(distance <= 1.0 + SURFACE_TOLERANCE, axis=0, return_inverse=True)
        given = _majority(partition, patterns)[region.ravel()]
    else:
        given = _as_objects(predicted, "predicted", len(points))
    return mistaken_regions(distance, given, truth, limit)


def mistaken_regions(
    distance: Float[Array, "N K"], given: Array, truth: Array, limit: int
) -> tuple[SmallDisjunct, ...]:
    """Find the regions with more than ``limit`` mistakes, most mistakes first.

    Args:
        distance: Mahalanobis distance of each point to each ellipsoid.
        given: The predicted labels (N,), None for points without a prediction.
        truth: The true labels (N,).
        limit: Number of mistakes to tolerate.
    """
    member = distance <= 1.0 + SURFACE_TOLERANCE
    nearest = np.where(member.any(axis=1), -1, distance.argmin(axis=1))
    patterns, region = np.unique(np.column_stack([member, nearest]), axis=0, return_inverse=True)
    region = region.ravel()
    wrong = np.array([g is not None and g != t for g, t in zip(given, truth, strict=True)], dtype=bool)
    found = []
    for r in np.unique(region[wrong]):
        here = wrong & (region == r)
        for label in sorted(set(given[here])):
            rows = np.flatnonzero(here & (given == label))
            if len(rows) > limit:
                times = Counter(truth[rows]).most_common()
                inside = tuple(int(k) for k in np.flatnonzero(patterns[r, :-1]))
                near = int(patterns[r, -1]) if patterns[r, -1] >= 0 else None
                found.append(SmallDisjunct(inside, label, tuple(true for true, _ in times), rows, near))
    return tuple(sorted(found, key=lambda d: (-len(d.rows), d.ellipsoids, -1 if d.nearest is None else d.nearest)))


def _as_objects(labels: Any, name: str, rows: int) -> Array:
    """Labels as an array of Python objects: an array of strings would truncate longer labels to its width."""
    values = np.array(label_array(labels, name).tolist(), dtype=object)
    if len(values) != rows:
        raise ValueError(f"X has {rows} rows and {name} has {len(values)} labels; give one label per row.")
    return values


def _majority(partition: Partition, patterns: Bool[Array, "R K"]) -> Array:
    """The class with the most training points in each region, None in a region without training points."""
    labels = np.empty(len(patterns), dtype=object)
    cells = {cell.tobytes(): counts for cell, counts in zip(partition.cells, partition.counts, strict=True)}
    names = partition.classes.tolist()
    for i, pattern in enumerate(patterns):
        counts = cells.get(pattern.tobytes())
        if counts is not None and pattern.any():
            labels[i] = names[int(counts.argmax())]
    return labels


def _by_iteration(partition: Partition, label: Any) -> dict[int, int]:
    """Number of ellipsoids of a class in each iteration, without isolated points."""
    found: dict[int, int] = {}
    for e in partition.ellipsoids:
        if e.label == label and e.kind != "isolated":
            found[e.iteration] = found.get(e.iteration, 0) + 1
    return found


def _ratio(joint: Float[Array, "n D"], whole: Ellipsoid, solver: str) -> float:
    """Volume of the ellipsoid of the joint points relative to the whole; 0 if there are too few points to span it."""
    if len(joint) <= joint.shape[1]:
        return 0.0
    overlap = minimum_volume_ellipsoid(joint, solver=solver, floor=_THICKNESS)
    return float(np.exp(overlap.log_volume - whole.log_volume))
