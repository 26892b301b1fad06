r"""The independent runs of a partition, one for each class, in one or several processes.

The runs go through joblib, so a user's own joblib backend (Dask, Ray, Spark) distributes them over machines. All runs
read one array of points. Joblib writes it once to a file that the processes of a machine map into memory, Dask sends it
once to each process, and Ray puts it once into the object store of each machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sepc_torch.data.progress import Bar, Choice
from sepc_torch.partitioning.algorithm import Separator
from sepc_torch.partitioning.class_separator import ClassSeparator
from sepc_torch.partitioning.processes import call, one_thread
from sepc_torch.partitioning.steps import Separation
from sepc_torch.shapes import Array, Float, Int
from sepc_torch.solvers.other_points import OtherPoints

# Rows copied at a time.
_ROWS_AT_ONCE = 2**12


class ClassTask(NamedTuple):
    """Cover the class in the rows with ``codes`` equal to ``code``, and leave the other rows as they are.

    The run is fastest if ``points`` is in Fortran order (:func:`in_columns`).
    """

    points: Float[Array, "N D"]
    codes: Int[Array, "N"]
    code: int
    parameters: dict[str, Any]

    @property
    def size(self) -> int:
        """Number of points that the run covers."""
        return int(np.count_nonzero(self.codes == self.code))

    def sides(self) -> tuple[Int[Array, "n"], ...]:
        """The rows of each set that the run covers."""
        rows = np.flatnonzero(self.codes == self.code)
        return (rows[canonical_order(self.points[rows])],)

    def run(self, tick: Callable[[int], None] | None = None) -> Separation:
        """Run the task; the caller limits BLAS to one thread."""
        own = np.ascontiguousarray(self.points[self.sides()[0]])
        others = OtherPoints(self.points, self.codes, self.code)
        return ClassSeparator(**self.parameters, tick=tick).separate(own, others)


class PairTask(NamedTuple):
    """Separate the rows of one class (``codes`` equal to ``code``) from all others by the paper's Algorithm 1.

    ``keep`` says whether to keep the ellipsoids of the class and of the rest.
    """

    points: Float[Array, "N D"]
    codes: Int[Array, "N"]
    code: int
    keep: tuple[bool, bool]
    parameters: dict[str, Any]

    @property
    def size(self) -> int:
        """Number of points that the run covers."""
        return sum(len(rows) for rows, keep in zip(self.sides(), self.keep, strict=True) if keep)

    def sides(self) -> tuple[Int[Array, "n"], ...]:
        """The rows of each set that the run covers."""
        own = self.codes == self.code
        return np.flatnonzero(own), np.flatnonzero(~own)

    def run(self, tick: Callable[[int], None] | None = None) -> Separation:
        """Run the task; the caller limits BLAS to one thread."""
        first, second = self.sides()
        separator = Separator(**self.parameters, keep=self.keep, tick=tick)
        return separator.separate(self.points[first], self.points[second])


Task = ClassTask | PairTask


def run_all(tasks: Sequence[Task], n_jobs: int | None, progress: Choice) -> list[Separation]:
    """Run all tasks and return their results in the order of the tasks; the bar counts points and classes."""
    import joblib
    from joblib.parallel import get_active_backend

    backend, _ = get_active_backend()
    sizes = [task.size for task in tasks]
    with Bar("partition", sum(sizes), progress, parts=len(tasks), part_name="classes") as bar:
        # Ray returns all results at the end, so the bar stands still until then.
        way = "generator" if backend.supports_return_generator else "list"
        parallel = joblib.Parallel(n_jobs=n_jobs, return_as=way)
        if len(tasks) == 1 or parallel.n_jobs == 1:
            done = []
            with one_thread():  # once: looking for the libraries takes as long as a small class
                for task in tasks:
                    done.append(task.run(bar.advance))
                    bar.finish_part()
            return done
        # The largest classes first: a large class that starts last would keep one process busy alone.
        order = sorted(range(len(tasks)), key=lambda i: -sizes[i])
        found: list[Separation | None] = [None] * len(tasks)
        in_ray = type(backend).__module__.startswith("ray.")
        calls = (_ray_calls if in_ray else _calls)([tasks[i] for i in order])
        for i, separation in zip(order, parallel(calls), strict=True):
            found[i] = separation
            bar.advance(sizes[i])
            bar.finish_part()
        return [separation for separation in found if separation is not None]


def _calls(tasks: Sequence[Task]) -> list[Any]:
    """One joblib call for each task.

    Each field is an argument of its own, because joblib's Dask backend recognises an array that several calls share
    only among their arguments, not inside an object.
    """
    return [call(separate, type(task), *task) for task in tasks]


def _ray_calls(tasks: Sequence[Task]) -> list[Any]:
    """One joblib call for each task, with references to Ray's object store in place of the arrays.

    Ray 2.60 means to store shared arguments once by itself, but does not recognise the calls of joblib 1.6, and copies
    the array with every call.
    """
    import joblib
    import ray

    arrays = {id(field): field for task in tasks for field in task if isinstance(field, np.ndarray)}
    stored = {name: ray.put(array) for name, array in arrays.items()}
    return [
        joblib.delayed(separate_stored)(type(task), *(stored.get(id(field), field) for field in task)) for task in tasks
    ]


def separate(kind: type[Task], *fields: Any) -> Separation:
    """Run the task with the given fields; a function of its own, so that every backend can send it."""
    with one_thread():
        return kind(*fields).run()


def separate_stored(kind: type[Task], *fields: Any) -> Separation:
    """Run the task with the given fields; arrays are references to Ray's object store."""
    import ray

    return separate(kind, *(ray.get(field) if isinstance(field, ray.ObjectRef) else field for field in fields))


def canonical_order(points: Float[Array, "N D"], codes: Int[Array, "N"] | None = None) -> Int[Array, "N"]:
    """Rows sorted by the first feature, then by the others, then by class.

    Only rows that agree in the first feature need the others.

    >>> canonical_order(np.array([[2.0, 0.0], [1.0, 5.0], [1.0, 4.0]])).tolist()
    [2, 1, 0]
    """
    order = np.argsort(points[:, 0], kind="stable")
    first = points[order, 0]
    tied = np.zeros(len(order), dtype=bool)
    tied[1:] = first[1:] == first[:-1]
    tied[:-1] |= tied[1:]
    among = order[tied]
    last = () if codes is None else (codes[among],)
    order[tied] = among[np.lexsort((*last, *points[among].T[::-1]))]
    return order


def in_columns(points: Float[Array, "N D"], rows: Int[Array, "n"]) -> Float[Array, "n D"]:
    """The given rows in Fortran order, copied in blocks: a transposed copy at once would take twice the memory."""
    copied = np.empty((len(rows), points.shape[1]), order="F")
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        copied[start : start + _ROWS_AT_ONCE] = points[rows[start : start + _ROWS_AT_ONCE]]
    return copied
