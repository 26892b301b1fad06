r"""From labelled points to a :class:`~sepc_torch.Partition`: the offline half of SEP-C.

Two classes are separated in one run of Algorithm 1, which yields the ellipsoids of both. More classes are separated
one-versus-rest; each run keeps the ellipsoids of its own class, and all are pooled. The runs are independent and go
through joblib, so a user's own joblib backend (Dask, Ray, Spark) spreads them over machines::

    with joblib.parallel_config(backend="dask"):
        part = partition(X, y)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sepc_torch.data.arrays import TrainingSet, count, feature_scale, float64_device, positive, training_set
from sepc_torch.data.progress import Bar, Choice
from sepc_torch.ellipsoid import DEFAULT_FLOOR, Kind, MinimumVolumeEllipsoid
from sepc_torch.partitioning.algorithm import Piece, Separation, Separator
from sepc_torch.partitioning.cells import ledger
from sepc_torch.partitioning.record import Partition, PartitionEllipsoid, PartitionHyperplane
from sepc_torch.shapes import Array, Float, Int
from sepc_torch.solvers import NATIVE
from sepc_torch.solvers.affine_hull import affine_hull, stretched

if TYPE_CHECKING:
    import torch


class _Task(NamedTuple):
    """One run of Algorithm 1: the class (or the first of two) against the rest, in standardised coordinates."""

    points: Float[Array, "N D"]
    codes: Int[Array, "N"]
    code: int
    keep: tuple[bool, bool]
    parameters: dict[str, Any]


def partition(
    X: Any,
    y: Any,
    *,
    max_impure: int = 2,
    solver: str = NATIVE,
    standardize: bool = True,
    floor: float = DEFAULT_FLOOR,
    n_jobs: int | None = None,
    progress: Choice = "auto",
    classes: Any = None,
    device: torch.device | str | None = None,
) -> Partition:
    r"""Cover the points of every class with minimum-volume ellipsoids, Algorithms 1 and 2 of the paper.

    Args:
        X: Training points (N, D): array, list of rows, torch tensor, or DataFrame (column names are kept).
        y: Labels (N,), of any sortable type.
        max_impure: How many remaining points of other classes an ellipsoid may hold (the paper's :math:`n_{Imp}`).
        solver: ``"native"``, or the name of an installed cvxpy solver to run the paper's programs as stated.
        standardize: Measure the reduced hulls in standard deviations of each feature. The ellipsoids themselves do
            not depend on scale and are returned in the coordinates of ``X`` either way.
        floor: Least semi-axis, in standard deviations of each feature; it is also the radius of isolated points.
        n_jobs: Processes for more than two classes, as in joblib: ``None`` means 1 unless a joblib context says
            otherwise.
        progress: ``"auto"`` shows a bar on a terminal for fits of more than a second.
        classes: The labels in the order wanted; by default sorted.
        device: Where to count the training points in all the ellipsoids, in torch's float64; by default NumPy does it
            on one core. Ellipsoids are found on the CPU's cores either way, a chain of problems too small for a GPU
            (``experiments/bench_partition_gpu.py`` measures that), and are the same to the last bit.

    The result depends neither on the order of the rows nor on the number of processes, to the last bit.

    >>> import numpy as np
    >>> X = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [5.0, 5.0], [6.0, 5.0], [5.0, 6.0]])
    >>> part = partition(X, ["near", "near", "near", "far", "far", "far"])
    >>> part
    Partition(2 ellipsoids of 2 classes in 2 dimensions, 2 cells, 6 points)
    >>> [e.label for e in part.ellipsoids], part.ellipsoids[1].center.round(6)
    (['far', 'near'], array([0.333333, 0.333333]))
    """
    begun = time.perf_counter()
    max_impure = count(max_impure, "max_impure")
    floor = positive(floor, "floor", "standard deviations")
    _check_solver(solver)
    where = None if device is None else float64_device(device)
    data = training_set(X, y, classes)
    # One canonical order of rows makes sums, and with them the result, independent of the order they came in.
    order = np.lexsort((data.codes, *data.points.T[::-1]))
    points, codes = data.points[order], data.codes[order]
    mean, unit = points.mean(axis=0), feature_scale(points)
    standard = np.ascontiguousarray((points - mean) / unit)
    parameters = {
        "max_impure": max_impure,
        "floor": floor,
        "dim": max(affine_hull(standard).rank, 1),
        "solver": solver,
        "metric": None if standardize else unit,
    }
    runs = _run(_tasks(standard, codes, data.classes, parameters), n_jobs, progress)
    separated = time.perf_counter()
    ellipsoids, hyperplanes = _pool(runs, data, order, mean, unit, standardize)
    with _one_thread():
        held = ledger(ellipsoids, points, codes, len(data.classes), where)
    inside = held.cells.T.astype(np.int64) @ held.counts
    return Partition(
        ellipsoids=tuple(_with_counts(e, inside[k], data.classes) for k, e in enumerate(ellipsoids)),
        hyperplanes=hyperplanes,
        classes=data.classes,
        class_counts=np.bincount(codes).astype(np.int64),
        scale=unit if standardize else np.ones_like(unit),
        ledger=held,
        feature_names=data.feature_names,
        made={
            "max_impure": max_impure,
            "solver": solver,
            "standardize": bool(standardize),
            "floor": floor,
            "versions": _versions(solver),
        },
        seconds={"separate": separated - begun, "count": time.perf_counter() - separated},
    )


def _tasks(
    points: Float[Array, "N D"], codes: Int[Array, "N"], classes: Array, parameters: dict[str, Any]
) -> list[_Task]:
    if len(classes) > 2:
        return [_Task(points, codes, code, (True, False), parameters) for code in range(len(classes))]
    # The larger class comes first, as in the paper; with equal sizes the one with the first row, whatever their names.
    sizes = np.bincount(codes)
    first = int(codes[0]) if sizes[0] == sizes[1] else int(sizes.argmax())
    return [_Task(points, codes, first, (True, True), parameters)]


def _run(tasks: list[_Task], n_jobs: int | None, progress: Choice) -> list[tuple[_Task, Separation]]:
    import joblib

    total = sum(
        int(np.count_nonzero(task.codes == task.code)) if not task.keep[1] else len(task.codes) for task in tasks
    )
    with Bar("partition", total, progress) as bar:
        parallel = joblib.Parallel(n_jobs=n_jobs, return_as="generator")
        if len(tasks) == 1 or parallel.n_jobs == 1:
            return [(task, _separate(task, bar.advance)) for task in tasks]
        done = []
        for task, separation in zip(tasks, parallel(joblib.delayed(_separate)(task) for task in tasks), strict=True):
            done.append((task, separation))
            bar.advance(int(np.count_nonzero(task.codes == task.code)))
        return done


def _separate(task: _Task, advance: Callable[[int], None] | None = None) -> Separation:
    own = task.codes == task.code
    separator = Separator(**task.parameters, keep=task.keep, tick=advance)
    with _one_thread():
        return separator.separate(task.points[own], task.points[~own])


def _one_thread() -> AbstractContextManager[Any]:
    """The matrices are small: threads cost more than they give, and one thread makes sums the same everywhere."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1)


def _pool(
    runs: list[tuple[_Task, Separation]],
    data: TrainingSet,
    order: Int[Array, "N"],
    mean: Float[Array, "D"],
    unit: Float[Array, "D"],
    standardize: bool,
) -> tuple[list[PartitionEllipsoid], tuple[PartitionHyperplane, ...]]:
    """All pieces in the caller's coordinates, with rows and labels of the caller's data."""
    labels = data.classes.tolist()
    found: list[tuple[int, PartitionEllipsoid]] = []
    hyperplanes = []
    for task, separation in runs:
        own = task.codes == task.code
        sides = order[own], order[~own]
        for piece in separation.pieces:
            code = int(data.codes[sides[piece.side][0]])
            rows = np.sort(sides[piece.side][piece.support])
            covered = data.points[sides[piece.side][piece.members]]
            found.append((code, _in_callers_coordinates(piece, labels[code], rows, covered, mean, unit)))
        for h in separation.hyperplanes:
            w = h.w / unit if standardize else h.w
            shift = float(w @ mean)
            hyperplanes.append(PartitionHyperplane(labels[task.code], h.iteration, w, h.alpha + shift, h.beta + shift))
    kinds = list(Kind)
    found.sort(key=lambda item: (item[0], item[1].iteration, kinds.index(item[1].kind)))
    return [e for _, e in found], tuple(hyperplanes)


def _in_callers_coordinates(
    piece: Piece,
    label: Any,
    rows: Int[Array, "S"],
    covered: Float[Array, "n D"],
    mean: Float[Array, "D"],
    unit: Float[Array, "D"],
) -> PartitionEllipsoid:
    e = piece.ellipsoid
    center = mean + unit * e.center
    return PartitionEllipsoid(
        center=center,
        whitener=stretched(e.whitener / unit, covered - center),  # far from the origin the centre is rounded
        label=label,
        kind=piece.kind,
        iteration=piece.iteration,
        support=rows,
        covered=len(piece.members),
        counts=np.zeros(0, dtype=np.int64),
        purity=0.0,
        gap=e.gap if isinstance(e, MinimumVolumeEllipsoid) else 0.0,
    )


def _with_counts(e: PartitionEllipsoid, inside: Int[Array, "C"], classes: Array) -> PartitionEllipsoid:
    own = int(inside[classes.tolist().index(e.label)])
    return replace(e, counts=inside, purity=own / max(int(inside.sum()), 1))


def _check_solver(solver: str) -> None:
    if solver == NATIVE:
        return
    from sepc_torch.solvers.programs import check_installed

    check_installed(solver)


def _versions(solver: str) -> dict[str, str]:
    names = ["sepc_torch", "numpy", "scipy"] + ([] if solver == NATIVE else ["cvxpy"])
    return {name: _version(name) for name in names}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # a source tree on the path has no metadata
        return "not installed"
