r"""The landscape of a data set: how far the classes overlap, and where a partition keeps making the same mistake.

With :math:`E_a` the minimum-volume ellipsoid of class :math:`a`, the overlap of two classes is the minimum-volume
ellipsoid of the points that lie in both. Its volume relative to :math:`E_a`, the overlap ratio, is near 1 where
class :math:`a` lies within the other and near 0 where they are apart. With more than two classes, the overlap of a
class is that with all others together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from sepc_torch.data.arrays import count, feature_scale, label_array, numeric_points, training_set
from sepc_torch.data.text_table import text_table
from sepc_torch.ellipsoid import SURFACE_TOLERANCE, Ellipsoid
from sepc_torch.partitioning.fit import partition as make_partition
from sepc_torch.partitioning.record import Partition
from sepc_torch.shapes import Array, Bool, Float, Int
from sepc_torch.solvers import NATIVE, minimum_volume_ellipsoid

# Thickness of flat sets, in standard deviations: equal for all, so that it cancels in ratios, and too thin to act
# otherwise.
_THICKNESS = 1e-6


class PairOverlap(NamedTuple):
    """The overlap of two classes: points in both ellipsoids, and the volume of theirs relative to either class."""

    points: int
    ratio: tuple[float, float]
    meet: bool


class SmallDisjunct(NamedTuple):
    """A region in which more mistakes are known than the partition tolerates.

    ``ellipsoids`` are the indices of those that hold the region, ``predicted`` and ``true`` the label given and the
    labels that were right (most frequent first), ``rows`` the mistaken points in the labelled set. Outside every
    ellipsoid a region is what lies ``nearest`` to the same one; inside that is None.
    """

    ellipsoids: tuple[int, ...]
    predicted: Any
    true: tuple[Any, ...]
    rows: Int[Array, "n"]
    nearest: int | None = None

    @property
    def place(self) -> str:
        """Where the region is, for people."""
        return str(self.ellipsoids) if self.nearest is None else f"near {self.nearest}"


@dataclass(frozen=True, eq=False, repr=False)
class Landscape:
    """What :func:`landscape` finds; all dictionaries are keyed by label.

    Attributes:
        classes: The labels (C,).
        points: Points of each class.
        inside: Points of each class that lie in the overlap.
        outside: Points of each class that do not.
        overlap_ratio: Volume of the overlap relative to the class's ellipsoid.
        pairs: The overlap of every two classes, keyed by both labels in the order of ``classes``.
        ellipsoids: Ellipsoids of each class by iteration; isolated points are not counted.
        isolated: Isolated points of each class.
        disjuncts: Regions with more known mistakes than ``max_impure``.
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
    """Measure how the classes overlap and how the partition copes.

    Args:
        X: Labelled points (N, D).
        y: Their labels (N,).
        partition: The partition to report on; by default one of these points. Give the one in use, with new
            labelled points, to learn where it needs repartitioning.
        max_impure: For the default partition.
        solver: ``"native"`` or the name of an installed cvxpy solver.
        classes: The labels in the order wanted; by default sorted.

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
            f"y holds the labels {foreign}, which the partition of {partition.classes.tolist()} does not know."
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
    """Regions of the partition that hold more known mistakes than it tolerates, the worst first.

    Such points, given back with their labels, get ellipsoids of their own in a new partition.

    Args:
        partition: The partition in use.
        X: Labelled points (N, D).
        y: Their true labels (N,).
        predicted: The labels that were given to them. By default the majority of the training points in the same
            region; points whose region held none are then left out.
        max_impure: How many mistakes to tolerate; by default what the partition was made with.
    """
    points, _ = numeric_points(X)
    if points.shape[1] != partition.dim:
        raise ValueError(f"X has {points.shape[1]} features, the partition {partition.dim}.")
    limit = int(partition.made["max_impure"]) if max_impure is None else count(max_impure, "max_impure")
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
    """The regions with more than ``limit`` mistakes, the worst first.

    Args:
        distance: Mahalanobis distance of each point to each ellipsoid.
        given: The labels that the points were given (N,), None where there was none.
        truth: Their true labels (N,).
        limit: Mistakes to tolerate.
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
    """Labels as Python values: arrays of strings would cut longer ones to their own width."""
    values = np.array(label_array(labels, name).tolist(), dtype=object)
    if len(values) != rows:
        raise ValueError(f"X has {rows} rows and {name} has {len(values)} labels; one label per row is needed.")
    return values


def _majority(partition: Partition, patterns: Bool[Array, "R K"]) -> Array:
    """The class with the most training points in each region, None where there are none."""
    labels = np.empty(len(patterns), dtype=object)
    cells = {cell.tobytes(): counts for cell, counts in zip(partition.cells, partition.counts, strict=True)}
    names = partition.classes.tolist()
    for i, pattern in enumerate(patterns):
        counts = cells.get(pattern.tobytes())
        if counts is not None and pattern.any():
            labels[i] = names[int(counts.argmax())]
    return labels


def _by_iteration(partition: Partition, label: Any) -> dict[int, int]:
    found: dict[int, int] = {}
    for e in partition.ellipsoids:
        if e.label == label and e.kind != "isolated":
            found[e.iteration] = found.get(e.iteration, 0) + 1
    return found


def _ratio(joint: Float[Array, "n D"], whole: Ellipsoid, solver: str) -> float:
    """Volume of the ellipsoid of the joint points relative to the whole; no volume where they do not span."""
    if len(joint) <= joint.shape[1]:
        return 0.0
    overlap = minimum_volume_ellipsoid(joint, solver=solver, floor=_THICKNESS)
    return float(np.exp(overlap.log_volume - whole.log_volume))
