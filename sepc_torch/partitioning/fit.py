r"""The function :func:`~sepc_torch.partition`: fit a :class:`~sepc_torch.Partition` to labelled points.

Two classes are separated in one run of the paper's Algorithm 1, which yields the ellipsoids of both. With more classes
every class has a run of its own, and the partition pools the ellipsoids. The runs are independent and go through
joblib, so a user's own joblib backend (Dask, Ray, Spark) distributes them over machines::

    with joblib.parallel_config(backend="dask"):
        part = partition(X, y)
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from sepc_torch.data.arrays import feature_scale, scale_or_one
from sepc_torch.data.labels import TrainingSet, training_set
from sepc_torch.data.memory import PARTITION_COPIES, check_memory
from sepc_torch.data.options import check_choice, check_count, check_jobs, check_positive, float64_device
from sepc_torch.data.progress import Choice
from sepc_torch.ellipsoid import DEFAULT_FLOOR, Ellipsoid, Kind, MinimumVolumeEllipsoid
from sepc_torch.partitioning.cells import ledger
from sepc_torch.partitioning.record import Partition, PartitionHyperplane, Rest, UncountedEllipsoid
from sepc_torch.partitioning.steps import Separation
from sepc_torch.partitioning.tasks import ClassTask, PairTask, Task, canonical_order, in_columns, run_all
from sepc_torch.shapes import Array, Float, Int
from sepc_torch.solvers import NATIVE
from sepc_torch.solvers.affine_hull import affine_hull, stretched

if TYPE_CHECKING:
    import torch

# Rows that are scaled at once: a copy of all points would double the memory of a large fit.
_ROWS_AT_ONCE = 2**17
# The dimension of the space that the points span is computed from at most this many points.
_ENOUGH_POINTS = 2**16


class Separated(NamedTuple):
    """The ellipsoids and hyperplanes of the classes that were solved, and the standard deviation of each feature."""

    pieces: list[UncountedEllipsoid]
    hyperplanes: tuple[PartitionHyperplane, ...]
    unit: Float[Array, "D"]


def partition(
    X: Any,
    y: Any,
    *,
    max_impure: int = 2,
    rest: Rest = "whole",
    solver: str = NATIVE,
    standardize: bool = True,
    floor: float = DEFAULT_FLOOR,
    max_isolated: int | None = None,
    max_per_class: int | None = None,
    n_jobs: int | None = None,
    progress: Choice = "auto",
    classes: Any = None,
    device: torch.device | str | None = None,
) -> Partition:
    r"""Cover the points of every class with minimum-volume ellipsoids, by Algorithms 1 and 2 of the paper.

    Args:
        X: Training points (N, D): array, list of rows, torch tensor, or DataFrame (column names are kept).
        y: Labels (N,), of any sortable type.
        max_impure: Largest number of points of other classes in an ellipsoid (the paper's :math:`n_{Imp}`). Terminal
            ellipsoids, which cover points that cannot be separated, may hold more.
        rest: How a class of more than two is separated from the others. ``"whole"`` covers the class alone and counts
            *all* points of other classes as impure. ``"partitioned"`` is the paper's one-versus-rest: it covers the
            rest too and counts only points that are not covered yet, which takes much longer with many classes. Two
            classes are separated as in the paper either way.
        solver: ``"native"``, or the name of an installed cvxpy solver to solve the paper's programs in cvxpy.
        standardize: Measure the reduced hulls in standard deviations of each feature. The ellipsoids themselves do
            not depend on scale and are returned in the coordinates of ``X`` either way.
        floor: Least semi-axis, in standard deviations of each feature. It is also the radius of isolated points.
        max_isolated: Largest number of isolated points that get a ball each; by default all do. If there are more,
            none gets a ball, and isolated points lie in no ellipsoid. With a limit, a class whose points are all
            isolated gets one terminal ellipsoid.
        max_per_class: Fit the ellipsoids of every class to a random sample of at most this many points, chosen
            independently of the order of the rows. The counts are of all points. Points outside the sample may lie
            in no ellipsoid, and ``max_impure`` holds for the sample.
        n_jobs: Number of processes that separate more than two classes and that count the training points in the
            ellipsoids, as in joblib: ``None`` means 1 unless a joblib context says otherwise.
        progress: ``"auto"`` shows a bar on a terminal for fits of more than a second.
        classes: The labels in the wanted order; by default sorted.
        device: Torch device that counts the training points in the ellipsoids, in float64. By default NumPy counts
            them in ``n_jobs`` processes. The ellipsoids are fitted on the CPU either way, because they form a chain of
            problems that are too small for a GPU (measured by ``experiments/speed``). The device does not
            change a bit of the ellipsoids.

    The result is bit-identical for every order of the rows and every number of processes. A partition that needs more
    memory than is available raises MemoryError before it starts.

    >>> import numpy as np
    >>> X = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [5.0, 5.0], [6.0, 5.0], [5.0, 6.0]])
    >>> part = partition(X, ["near", "near", "near", "far", "far", "far"])
    >>> part
    Partition(2 ellipsoids of 2 classes in 2 dimensions, 2 cells, 6 points)
    >>> [e.label for e in part.ellipsoids], part.ellipsoids[1].center.round(6)
    (['far', 'near'], array([0.333333, 0.333333]))
    """
    begun = time.perf_counter()
    max_impure = check_count(max_impure, "max_impure")
    floor = check_positive(floor, "floor", "standard deviations")
    check_choice("rest", rest, get_args(Rest))
    if max_isolated is not None:
        max_isolated = check_count(max_isolated, "max_isolated")
    if max_per_class is not None:
        max_per_class = check_count(max_per_class, "max_per_class", least=1)
    _check_solver(solver)
    check_jobs(n_jobs)
    where = None if device is None else float64_device(device)
    data = training_set(X, y, classes)
    check_memory(
        PARTITION_COPIES * data.points.nbytes,
        f"The partition of {len(data.points)} rows x {data.points.shape[1]} features",
        "Choose max_per_class, fit on fewer rows, or project the points to fewer dimensions.",
    )
    made = {
        "max_impure": max_impure,
        "solver": solver,
        "standardize": bool(standardize),
        "floor": floor,
        "rest": rest,
        "max_isolated": max_isolated,
        "max_per_class": max_per_class,
        "versions": _versions(solver),
    }
    found = separate_classes(data, made, None, n_jobs, progress)
    separated = time.perf_counter()
    part = count_partition(found.pieces, data, made, where, n_jobs)
    return replace(
        part,
        hyperplanes=found.hyperplanes,
        scale=found.unit if standardize else np.ones_like(found.unit),
        seconds={"separate": separated - begun, "count": time.perf_counter() - separated},
    )


def separate_classes(
    data: TrainingSet, made: Mapping[str, Any], wanted: Collection[int] | None, n_jobs: int | None, progress: Choice
) -> Separated:
    """Cover the points of some classes with ellipsoids.

    A class that is solved alone gets the ellipsoids that it gets among all classes, bit for bit. Two classes are
    separated in one run, so both are solved if either is wanted.

    Args:
        data: The points of all classes.
        made: The parameters of :func:`partition`, checked.
        wanted: Indices of the classes to solve; None for all.
        n_jobs: Number of processes.
        progress: Whether to show a progress bar.

    >>> from sepc_torch.data.labels import training_set
    >>> data = training_set([[0.0], [1.0], [5.0], [6.0], [10.0], [12.0]], ["a", "a", "b", "b", "c", "c"])
    >>> made = {"max_impure": 0, "solver": "native", "standardize": True, "floor": 1e-3}
    >>> made |= {"rest": "whole", "max_isolated": None, "max_per_class": None}
    >>> [piece.ellipsoid.center.round(6).tolist() for piece in separate_classes(data, made, [2], None, False).pieces]
    [[11.0]]
    """
    # A canonical order of the rows makes all sums, and so the result, independent of the order of the input.
    order = canonical_order(data.points, data.codes)
    mean, unit = _location_and_scale(data.points, order)
    paper = len(data.classes) == 2 or made["rest"] == "partitioned"
    rows = _sample(order, data.codes, made["max_per_class"])
    if not paper:
        rows = _shuffled(data.points, rows)
    # The classes of "whole" are tested against all points, which is several times faster feature by feature.
    standard = data.points[rows] if paper else in_columns(data.points, rows)
    standard -= mean
    standard /= unit
    parameters = {
        "max_impure": made["max_impure"],
        "floor": made["floor"],
        "dim": max(affine_hull(standard[:: -(-len(standard) // _ENOUGH_POINTS)]).rank, 1),
        "solver": made["solver"],
        "metric": None if made["standardize"] else unit,
        "max_isolated": made["max_isolated"],
    }
    tasks: Sequence[Task]
    if paper:
        tasks = _pair_tasks(standard, data.codes[rows], parameters)
    else:
        tasks = _class_tasks(standard, data.codes[rows], parameters)
    if wanted is not None and len(data.classes) != 2:
        tasks = [task for task in tasks if task.code in wanted]
    runs: list[tuple[Task, Separation]] = list(zip(tasks, run_all(tasks, n_jobs, progress), strict=True))
    pieces = _pool_pieces(runs, data, rows, mean, unit)
    labels = data.classes.tolist()
    hyperplanes = _pool_hyperplanes(runs, data.codes[rows], labels, mean, unit if made["standardize"] else None)
    return Separated(pieces, hyperplanes, unit)


def count_partition(
    pieces: Sequence[UncountedEllipsoid],
    data: TrainingSet,
    made: Mapping[str, Any],
    device: torch.device | None = None,
    n_jobs: int | None = None,
) -> Partition:
    """Count the training points in the ellipsoids of all classes; the partition has no hyperplanes, and unit scale.

    Args:
        pieces: The ellipsoids of all classes. Isolated points are left out if they are more than ``max_isolated``.
        data: The points of all classes.
        made: The parameters of :func:`partition`.
        device: Torch device that counts; by default NumPy does.
        n_jobs: Number of processes.

    >>> from sepc_torch.data.labels import training_set
    >>> data = training_set([[0.0], [1.0], [5.0], [6.0]], ["a", "a", "b", "b"])
    >>> pieces = partition(data.points, ["a", "a", "b", "b"]).uncounted()
    >>> count_partition(pieces, data, {"max_isolated": None})
    Partition(2 ellipsoids of 2 classes in 1 dimensions, 2 cells, 4 points)
    """
    most = made["max_isolated"]
    if most is not None and sum(piece.kind is Kind.ISOLATED for piece in pieces) > most:
        pieces = [piece for piece in pieces if piece.kind is not Kind.ISOLATED]
    kinds = list(Kind)
    pieces = sorted(pieces, key=lambda piece: (piece.code, piece.iteration, kinds.index(piece.kind)))
    labels = data.classes.tolist()
    order = canonical_order(data.points, data.codes)  # distances are then bit-identical for every order of the rows
    order = order[np.argsort(data.codes[order], kind="stable")]
    ellipsoids = [piece.ellipsoid for piece in pieces]
    points = in_columns(data.points, order) if device is None else data.points[order]
    found = ledger(ellipsoids, points, data.codes[order], len(labels), device, n_jobs)
    return Partition(
        ellipsoids=tuple(p.with_counts(labels[p.code], counts) for p, counts in zip(pieces, found.held, strict=True)),
        hyperplanes=(),
        classes=data.classes,
        class_counts=np.bincount(data.codes).astype(np.int64),
        scale=np.ones(data.points.shape[1]),
        ledger=found,
        feature_names=data.feature_names,
        made=made,
    )


def _location_and_scale(
    points: Float[Array, "N D"], order: Int[Array, "N"]
) -> tuple[Float[Array, "D"], Float[Array, "D"]]:
    """Mean and standard deviation of each feature, summed in the given order; see :func:`feature_scale`."""
    if len(order) <= _ROWS_AT_ONCE:
        ordered = points[order]
        return ordered.mean(axis=0), feature_scale(ordered)
    blocks = [order[start : start + _ROWS_AT_ONCE] for start in range(0, len(order), _ROWS_AT_ONCE)]
    mean = sum(points[block].sum(axis=0) for block in blocks) / len(order)
    scales = np.stack([np.abs(points[block] - mean).max(axis=0) for block in blocks]).max(axis=0)
    unit = np.where(scales > 0, scales, 1.0)
    squares = sum((((points[block] - mean) / unit) ** 2).sum(axis=0) for block in blocks)
    deviation = unit * np.sqrt(squares / len(order))
    return mean, scale_or_one(deviation, np.abs(mean) + scales)


def _sample(order: Int[Array, "N"], codes: Int[Array, "N"], most: int | None) -> Int[Array, "n"]:
    """At most ``most`` rows of each class, in the given order; the choice depends on the points only."""
    if most is None:
        return order
    rng = np.random.default_rng(0)
    kept = np.ones(len(order), dtype=bool)
    for code, size in enumerate(np.bincount(codes).tolist()):
        if size > most:
            rows = np.flatnonzero(codes[order] == code)
            kept[rng.choice(rows, size - most, replace=False)] = False
    return order[kept]


def _shuffled(points: Float[Array, "N D"], rows: Int[Array, "n"]) -> Int[Array, "n"]:
    """The rows in a fixed random order. Equal points stay together, so that the names of the classes do not matter.

    The first points of other classes in an ellipsoid, in this order, are then a random sample of them.
    """
    place = np.zeros(len(rows), dtype=np.int64)  # index of the distinct point of each row
    for start in range(1, len(rows), _ROWS_AT_ONCE):
        here = rows[start : start + _ROWS_AT_ONCE]
        before = rows[start - 1 : start - 1 + len(here)]
        place[start : start + len(here)] = (points[here] != points[before]).any(axis=1)
    place = place.cumsum()
    return rows[np.argsort(np.random.default_rng(0).permutation(int(place[-1]) + 1)[place], kind="stable")]


def _class_tasks(points: Float[Array, "N D"], codes: Int[Array, "N"], parameters: dict[str, Any]) -> list[ClassTask]:
    """One run for each class."""
    return [ClassTask(points, codes, code, parameters) for code in range(int(codes.max()) + 1)]


def _pair_tasks(points: Float[Array, "N D"], codes: Int[Array, "N"], parameters: dict[str, Any]) -> list[PairTask]:
    """The runs of Algorithm 1: one for two classes, otherwise one for each class."""
    sizes = np.bincount(codes)
    if len(sizes) > 2:
        return [PairTask(points, codes, code, (True, False), parameters) for code in range(len(sizes))]
    # The larger class comes first, as in the paper. If both have the same size, the class of the first row in canonical
    # order comes first, so that the result does not depend on the names of the classes.
    first = int(codes[0]) if sizes[0] == sizes[1] else int(sizes.argmax())
    return [PairTask(points, codes, first, (True, True), parameters)]


def _pool_pieces(
    runs: list[tuple[Task, Separation]],
    data: TrainingSet,
    rows: Int[Array, "n"],
    mean: Float[Array, "D"],
    unit: Float[Array, "D"],
) -> list[UncountedEllipsoid]:
    """The ellipsoids of all runs in the caller's coordinates and rows."""
    found: list[UncountedEllipsoid] = []
    for task, separation in runs:
        sides = [rows[side] for side in task.sides()]
        for piece in separation.pieces:
            members, support = (sides[piece.side][places] for places in (piece.members, piece.support))
            e = piece.ellipsoid
            center = mean + unit * e.center
            # The sum above rounds the centre of data far from the origin. Stretching restores the cover.
            whitener = stretched(e.whitener / unit, data.points[members] - center)
            found.append(
                UncountedEllipsoid(
                    code=int(data.codes[members[0]]),
                    ellipsoid=Ellipsoid(center, whitener),
                    kind=piece.kind,
                    iteration=piece.iteration,
                    support=np.sort(support),
                    covered=len(members),
                    gap=e.gap if isinstance(e, MinimumVolumeEllipsoid) else 0.0,
                )
            )
    return found


def _pool_hyperplanes(
    runs: list[tuple[Task, Separation]],
    codes: Int[Array, "n"],
    labels: list[Any],
    mean: Float[Array, "D"],
    unit: Float[Array, "D"] | None,
) -> tuple[PartitionHyperplane, ...]:
    """The hyperplanes of all runs in the caller's coordinates; ``unit`` is None if the runs used its units."""
    hyperplanes = []
    for task, separation in runs:
        label = labels[codes[task.sides()[0][0]]]
        for h in separation.hyperplanes:
            w = h.w if unit is None else h.w / unit
            shift = float(w @ mean)
            hyperplanes.append(PartitionHyperplane(label, h.iteration, w, h.alpha + shift, h.beta + shift))
    return tuple(hyperplanes)


def _check_solver(solver: str) -> None:
    if solver == NATIVE:
        return
    from sepc_torch.solvers.programs import check_installed

    check_installed(solver)


def _versions(solver: str) -> dict[str, str]:
    names = ["sepc_torch", "numpy", "scipy"] + ([] if solver == NATIVE else ["cvxpy"])
    return {name: _version(name) for name in names}


@cache  # reading the metadata of a package takes 5 ms
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # a source tree on the path has no metadata
        return "not installed"
