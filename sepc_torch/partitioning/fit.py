r"""The function :func:`~sepc_torch.partition`: fit a :class:`~sepc_torch.Partition` to labelled points.

Two classes are separated in one run of Algorithm 1, which yields the ellipsoids of both. More classes are separated
one-versus-rest: each run keeps the ellipsoids of its own class, and the partition pools them. The runs are independent
and go through joblib, so a user's own joblib backend (Dask, Ray, Spark) distributes them over machines::

    with joblib.parallel_config(backend="dask"):
        part = partition(X, y)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sepc_torch.data.arrays import TrainingSet, count, feature_scale, float64_device, positive, training_set
from sepc_torch.data.progress import Bar, Choice
from sepc_torch.ellipsoid import DEFAULT_FLOOR, Ellipsoid, Kind, MinimumVolumeEllipsoid
from sepc_torch.partitioning.algorithm import Separation, Separator
from sepc_torch.partitioning.cells import ledger
from sepc_torch.partitioning.record import Partition, PartitionEllipsoid, PartitionHyperplane
from sepc_torch.shapes import Array, Float, Int
from sepc_torch.solvers import NATIVE
from sepc_torch.solvers.affine_hull import affine_hull, stretched

if TYPE_CHECKING:
    import torch


class _Task(NamedTuple):
    """One run of Algorithm 1 in standardised coordinates: the class ``code`` against all other points.

    ``keep`` says whether to keep the ellipsoids of the class and of the rest.
    """

    points: Float[Array, "N D"]
    codes: Int[Array, "N"]
    code: int
    keep: tuple[bool, bool]
    parameters: dict[str, Any]


class _UncountedEllipsoid(NamedTuple):
    """An ellipsoid in the caller's coordinates, before the training points in it are counted.

    ``code`` is the index of its class. The other fields are those of :class:`PartitionEllipsoid`.
    """

    code: int
    ellipsoid: Ellipsoid
    kind: Kind
    iteration: int
    support: Int[Array, "S"]
    covered: int
    gap: float

    def with_counts(self, label: Any, counts: Int[Array, "C"]) -> PartitionEllipsoid:
        """The ellipsoid of the partition, with its label and the training points of each class inside."""
        return PartitionEllipsoid(
            center=self.ellipsoid.center,
            whitener=self.ellipsoid.whitener,
            label=label,
            kind=self.kind,
            iteration=self.iteration,
            support=self.support,
            covered=self.covered,
            counts=counts,
            purity=int(counts[self.code]) / max(int(counts.sum()), 1),
            gap=self.gap,
        )


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
        max_impure: Largest number of remaining points of other classes in an ellipsoid (the paper's :math:`n_{Imp}`).
        solver: ``"native"``, or the name of an installed cvxpy solver to solve the paper's programs in cvxpy.
        standardize: Measure the reduced hulls in standard deviations of each feature. The ellipsoids themselves do
            not depend on scale and are returned in the coordinates of ``X`` either way.
        floor: Least semi-axis, in standard deviations of each feature. It is also the radius of isolated points.
        n_jobs: Number of processes for more than two classes, as in joblib: ``None`` means 1 unless a joblib context
            says otherwise.
        progress: ``"auto"`` shows a bar on a terminal for fits of more than a second.
        classes: The labels in the wanted order; by default sorted.
        device: Torch device that counts the training points in the ellipsoids, in float64. By default NumPy counts
            them on one core. The ellipsoids are fitted on the CPU either way, because they form a chain of problems
            that are too small for a GPU (measured by ``experiments/bench_partition_gpu.py``). The device does not
            change a bit of the ellipsoids.

    The result is bit-identical for every order of the rows and every number of processes.

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
    # A canonical order of the rows makes all sums, and so the result, independent of the order of the input.
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
    pieces = _pool_pieces(runs, data, order, mean, unit)
    with _one_thread():
        held = ledger([piece.ellipsoid for piece in pieces], points, codes, len(data.classes), where)
    inside = held.cells.T.astype(np.int64) @ held.counts
    labels = data.classes.tolist()
    return Partition(
        ellipsoids=tuple(p.with_counts(labels[p.code], counts) for p, counts in zip(pieces, inside, strict=True)),
        hyperplanes=_pool_hyperplanes(runs, labels, mean, unit if standardize else None),
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
    # The larger class comes first, as in the paper. If both have the same size, the class of the first row in canonical
    # order comes first, so that the result does not depend on the names of the classes.
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
    """Limit BLAS to one thread: the matrices are small, and the order of sums is then the same on every machine."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1)


def _pool_pieces(
    runs: list[tuple[_Task, Separation]],
    data: TrainingSet,
    order: Int[Array, "N"],
    mean: Float[Array, "D"],
    unit: Float[Array, "D"],
) -> list[_UncountedEllipsoid]:
    """The ellipsoids of all runs in the caller's coordinates and rows, sorted by class, iteration and kind."""
    found: list[_UncountedEllipsoid] = []
    for task, separation in runs:
        own = task.codes == task.code
        sides = order[own], order[~own]
        for piece in separation.pieces:
            rows, e = sides[piece.side], piece.ellipsoid
            center = mean + unit * e.center
            # The sum above rounds the centre of data far from the origin. Stretching restores the cover.
            whitener = stretched(e.whitener / unit, data.points[rows[piece.members]] - center)
            found.append(
                _UncountedEllipsoid(
                    code=int(data.codes[rows[0]]),
                    ellipsoid=Ellipsoid(center, whitener),
                    kind=piece.kind,
                    iteration=piece.iteration,
                    support=np.sort(rows[piece.support]),
                    covered=len(piece.members),
                    gap=e.gap if isinstance(e, MinimumVolumeEllipsoid) else 0.0,
                )
            )
    kinds = list(Kind)
    return sorted(found, key=lambda piece: (piece.code, piece.iteration, kinds.index(piece.kind)))


def _pool_hyperplanes(
    runs: list[tuple[_Task, Separation]], labels: list[Any], mean: Float[Array, "D"], unit: Float[Array, "D"] | None
) -> tuple[PartitionHyperplane, ...]:
    """The hyperplanes of all runs in the caller's coordinates; ``unit`` is None if the runs used its units."""
    hyperplanes = []
    for task, separation in runs:
        for h in separation.hyperplanes:
            w = h.w if unit is None else h.w / unit
            shift = float(w @ mean)
            hyperplanes.append(PartitionHyperplane(labels[task.code], h.iteration, w, h.alpha + shift, h.beta + shift))
    return tuple(hyperplanes)


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
