r"""The independent runs of a partition, one for each class, in one or several processes.

The runs go through joblib, so a user's own joblib backend (Dask, Ray, Spark) distributes them over machines. All runs
read one array of points. Joblib writes it once to a file that the processes of a machine map into memory, and Dask
sends it once to each machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sepc_torch.data.progress import Bar, Choice
from sepc_torch.partitioning.algorithm import Separator
from sepc_torch.partitioning.class_separator import ClassSeparator
from sepc_torch.partitioning.steps import Separation
from sepc_torch.partitioning.threads import one_thread
from sepc_torch.shapes import Array, Float, Int
from sepc_torch.solvers.other_points import OtherPoints


class ClassTask(NamedTuple):
    """Cover the class in the rows with ``codes`` equal to ``code``, and leave the other rows as they are."""

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
        """Run the task."""
        others = OtherPoints(self.points, self.codes, self.code)
        with one_thread():
            return ClassSeparator(**self.parameters, tick=tick).separate(self.points[self.sides()[0]], others)


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
        """Run the task."""
        first, second = self.sides()
        with one_thread():
            return Separator(**self.parameters, keep=self.keep, tick=tick).separate(
                self.points[first], self.points[second]
            )


Task = ClassTask | PairTask


def run_all(tasks: Sequence[Task], n_jobs: int | None, progress: Choice) -> list[Separation]:
    """Run all tasks and return their results in the order of the tasks; the bar counts points and classes."""
    import joblib

    sizes = [task.size for task in tasks]
    with Bar("partition", sum(sizes), progress, parts=len(tasks), part_name="classes") as bar:
        parallel = joblib.Parallel(n_jobs=n_jobs, return_as="generator")
        if len(tasks) == 1 or parallel.n_jobs == 1:
            done = []
            for task in tasks:
                done.append(task.run(bar.advance))
                bar.finish_part()
            return done
        # The largest classes first: a large class that starts last would keep one process busy alone.
        order = sorted(range(len(tasks)), key=lambda i: -sizes[i])
        found: list[Separation | None] = [None] * len(tasks)
        for i, separation in zip(order, parallel(joblib.delayed(separate)(tasks[i]) for i in order), strict=True):
            found[i] = separation
            bar.advance(sizes[i])
            bar.finish_part()
        return [separation for separation in found if separation is not None]


def separate(task: Task) -> Separation:
    """Run one task; a function of its own, so that every backend can send it."""
    return task.run()


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
