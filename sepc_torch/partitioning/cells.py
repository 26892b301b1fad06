r"""The :class:`Ledger` of a partition: class counts in each region (cell), and class counts in expanded ellipsoids.

A *cell* is a distinct set of ellipsoids that hold a training point together. For any set of ellipsoids, the cells give
the training points of each class in their intersection and in their union. A point outside every ellipsoid is
classified by expanded ellipsoids. To count in them, the ledger keeps *steps*: the distances to which an ellipsoid must
be expanded to hold certain numbers of points of a class. It does not keep the training points themselves.

The size of a ledger is bounded: at most :data:`STEPS` steps per ellipsoid, for any number of points and classes, and
only the members and the classes that occur in a cell.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sepc_torch.ellipsoid import SURFACE_TOLERANCE, Ellipsoid, column_norms
from sepc_torch.partitioning.processes import call, one_thread
from sepc_torch.partitioning.ranked_distances import ranked_distances
from sepc_torch.shapes import Array, Bool, Float, Int

if TYPE_CHECKING:
    import torch

# Largest number of steps per ellipsoid: 16 KiB with a float32 distance and an int32 index each.
STEPS = 2048
# Distances beyond the horizon of an ellipsoid that does not keep all steps: 1/64 of the memory of its steps.
TAIL = 32
# Relative spacings of the grid of counts, in percent; zero keeps every count. Whole percents keep the arithmetic exact.
_SPACINGS = (0, 1, 2, 5, 10, 20, 50, 100)
# Float64 values in one batch of differences on a device: half a GiB.
_BATCH = 2**26
# With at least this many points for each grid point, not all distances are computed exactly.
_MANY_POINTS = 8
# Pairs of an entry and an ellipsoid listed at a time: each takes about 50 bytes.
_PAIRS = 2**22
# Multiplications N K D^2 below which one process counts: they take about as long as starting other processes.
_PARALLEL_WORK = 2**32
# Blocks of ellipsoids per process, so that processes that finish early take over work from the others.
_BLOCKS = 4


class Ledger(NamedTuple):
    r"""Sparse cells with their class counts, and steps for counting in expanded ellipsoids.

    Shapes: M members of cells, E entries, T grid points, L steps and J tail distances per ellipsoid. Indices are int32,
    numbers of points or members int64, distances float64. Every class has a training point.

    **Cells.** The ellipsoids of cell p are ``cell_sizes[p]`` elements of ``cell_members``, cell after cell, ascending.
    Entry e says that cell ``entry_cells[e]`` holds ``entry_counts[e]`` points of class ``entry_classes[e]``. Entries
    are sorted by cell, then by class; a pair without points has no entry.

    **Grid.** Each class has an ascending grid of counts, from 1 to its number of points :math:`N_c`. ``grid_classes``
    and ``grid_counts`` list the grids of all classes, class after class. If the training set has at most :data:`STEPS`
    points, the grids hold every count. Otherwise they are geometric,
    :math:`n_{j+1} = n_j + \lceil \eta\, n_j \rceil` up to :math:`N_c`, with the least :math:`\eta` of 0.01, 0.02, 0.05,
    0.1, 0.2, 0.5 and 1 for which all grids together have at most :data:`STEPS` counts, or 1 if none is that large.

    **Steps.** Ellipsoid k must be expanded to ``step_distances[k, l]`` to hold ``grid_counts[i]`` points of class
    ``grid_classes[i]``, i = ``step_ids[k, l]``. The indices ascend along l. A count :math:`n_c(d)` read from the steps
    is the largest that a step of class c within distance d gives. It is never above the true count, and below it by a
    share of less than :math:`\eta` (:attr:`relative_count_error`).

    **Tail.** If the grids have more than :data:`STEPS` counts, an ellipsoid keeps the steps of least distance, which
    are the first of each class. The last of these distances is its *horizon* :math:`h`. Beyond it all classes share one
    curve: ``tail_distances[k, j - 1]`` is the least distance within which the share j / J of the training points beyond
    the horizon lie, J = :data:`TAIL`. With j(d) of these distances at most d,

    .. math:: n_c(d) = n_c(h) + \Bigl\lfloor (N_c - n_c(h)) \frac{j(d)}{J} \Bigr\rfloor .

    This is an estimate, exact only at the last distance, which holds all training points. Without a horizon J = 0.
    """

    cell_sizes: Int[Array, "P"]
    cell_members: Int[Array, "M"]
    entry_cells: Int[Array, "E"]
    entry_classes: Int[Array, "E"]
    entry_counts: Int[Array, "E"]
    grid_classes: Int[Array, "T"]
    grid_counts: Int[Array, "T"]
    step_ids: Int[Array, "K L"]
    step_distances: Float[Array, "K L"]
    tail_distances: Float[Array, "K J"]

    @property
    def totals(self) -> Int[Array, "C"]:
        """Number of training points of each class: the last count of its grid."""
        return self.grid_counts[np.append(np.flatnonzero(np.diff(self.grid_classes)), -1)]

    @property
    def cells(self) -> Bool[Array, "P K"]:
        """Whether each cell lies in each ellipsoid, as a dense matrix."""
        dense = np.zeros((len(self.cell_sizes), len(self.step_ids)), dtype=bool)
        dense[np.repeat(np.arange(len(dense)), self.cell_sizes), self.cell_members] = True
        return dense

    @property
    def counts(self) -> Int[Array, "P C"]:
        """Training points of each class in each cell, as a dense matrix."""
        dense = np.zeros((len(self.cell_sizes), len(self.totals)), dtype=np.int64)
        dense[self.entry_cells, self.entry_classes] = self.entry_counts
        return dense

    @property
    def held(self) -> Int[Array, "K C"]:
        """Training points of each class in each ellipsoid."""
        held = np.zeros((len(self.step_ids), len(self.totals)), dtype=np.int64)
        for entry, ellipsoid in entry_members(self.cell_sizes, self.cell_members, self.entry_cells):
            np.add.at(held, (ellipsoid, self.entry_classes[entry]), self.entry_counts[entry])
        return held

    @property
    def relative_count_error(self) -> float:
        """Largest share of the true count by which a count within the horizon can be too low; 0 if counts are exact."""
        first = np.diff(self.grid_classes, prepend=-1) > 0
        read = np.where(first, 0, np.roll(self.grid_counts, 1))
        true = self.grid_counts - 1  # the largest count for which the grid gives ``read``
        return float(((true - read) / np.maximum(true, 1)).max())

    def reached(self, ellipsoid: int, distance: float) -> Int[Array, "C"]:
        """Number of training points of each class within the given distance of an ellipsoid, as read from the ledger.

        >>> points, codes = np.array([[0.0], [0.5], [3.0], [4.0]]), np.array([0, 0, 1, 1])
        >>> found = ledger([Ellipsoid(np.zeros(1), np.eye(1))], points, codes, 2)
        >>> found.reached(0, 1.0), found.reached(0, 3.5)
        (array([2, 0]), array([2, 1]))
        """
        within = distance * (1.0 + SURFACE_TOLERANCE)
        steps = self.step_ids[ellipsoid, self.step_distances[ellipsoid] <= within]
        totals = self.totals
        counts = np.zeros_like(totals)
        np.maximum.at(counts, self.grid_classes[steps], self.grid_counts[steps])
        levels = self.tail_distances[ellipsoid]
        return counts + (totals - counts) * np.count_nonzero(levels <= within) // max(len(levels), 1)


class _Measured(NamedTuple):
    """The points in some ellipsoids, as row indices, and the steps and tails of these ellipsoids."""

    rows: list[Array]
    step_ids: Int[Array, "k L"]
    step_distances: Float[Array, "k L"]
    tail_distances: Float[Array, "k J"]


def ledger(
    ellipsoids: Sequence[Ellipsoid],
    points: Float[Array, "N D"],
    codes: Int[Array, "N"],
    classes: int,
    device: torch.device | None = None,
    n_jobs: int | None = None,
) -> Ledger:
    """Count the training points of each class in the cells of the ellipsoids and in expanded ellipsoids.

    Besides the result, the memory is that of the points, of one batch of distances, and of a few numbers per pair of a
    point and an ellipsoid that holds it.

    Args:
        ellipsoids: The K ellipsoids.
        points: The training points, sorted by class. NumPy copies them if they are not in Fortran order.
        codes: The class of each training point, from 0 to ``classes`` - 1, ascending.
        classes: Number of classes C. Each has at least one training point.
        device: Torch device that computes the distances in float64; by default NumPy does.
        n_jobs: Number of processes for NumPy, as in joblib. The result is the same for every number.

    >>> points, codes = np.array([[0.0], [0.5], [3.0]]), np.array([0, 0, 1])
    >>> found = ledger([Ellipsoid.ball(np.zeros(1), 1.0), Ellipsoid.ball(np.ones(1), 2.0)], points, codes, 2)
    >>> found.held.tolist(), found.step_distances.tolist()
    ([[2, 0], [2, 1]], [[0.0, 0.5, 3.0], [0.25, 0.5, 1.0]])
    """
    totals = np.bincount(codes, minlength=classes)
    if len(totals) > classes or not totals.all() or (np.diff(codes) < 0).any():
        raise ValueError(
            f"codes must be ascending and contain each of the {classes} classes 0 to {classes - 1}; "
            f"got {len(np.unique(codes))} classes up to {codes.max()}. Sort the points by class."
        )
    grid_classes, grid_counts = count_grid(totals)
    bounds = np.concatenate([[0], np.cumsum(totals)])
    places = bounds[grid_classes] + grid_counts - 1
    if device is None:
        found = _measure_in_blocks(ellipsoids, np.asfortranarray(points), bounds, places, n_jobs)
    else:
        found = _measure_on(device, ellipsoids, points, codes, places)
    return Ledger(*_cells(found.rows, codes, classes), grid_classes, grid_counts, *found[1:])


def count_grid(totals: Int[Array, "C"]) -> tuple[Int[Array, "T"], Int[Array, "T"]]:
    """Class and count of every grid point, class after class; see :class:`Ledger`.

    >>> [array.tolist() for array in count_grid(np.array([3, 2]))]
    [[0, 0, 0, 1, 1], [1, 2, 3, 1, 2]]
    """
    largest = int(totals.max())
    for percent in _SPACINGS:
        # One sequence for all classes: a class uses its first numbers, and the number of its points as the last.
        counts = [1]
        while counts[-1] < largest and len(counts) <= STEPS:
            counts.append(counts[-1] + max(1, -(-counts[-1] * percent // 100)))
        sizes = np.searchsorted(counts, totals) + 1
        if counts[-1] >= largest and sizes.sum() <= STEPS:
            break
    grid_classes = np.repeat(np.arange(len(totals), dtype=np.int32), sizes)
    places = _ranges(np.zeros_like(sizes), sizes)
    return grid_classes, np.minimum(np.array(counts, dtype=np.int64)[places], totals[grid_classes])


def _measure_in_blocks(
    ellipsoids: Sequence[Ellipsoid],
    points: Float[Array, "N D"],
    bounds: Int[Array, "b"],
    places: Int[Array, "T"],
    n_jobs: int | None,
) -> _Measured:
    """Apply :func:`_measure` to blocks of ellipsoids, in several processes if the work is large enough."""
    import joblib

    jobs = joblib.effective_n_jobs(n_jobs)
    if jobs == 1 or len(ellipsoids) * points.size * points.shape[1] < _PARALLEL_WORK:
        return _measure(ellipsoids, points, bounds, places)
    size = -(-len(ellipsoids) // (_BLOCKS * jobs))
    blocks = (ellipsoids[start : start + size] for start in range(0, len(ellipsoids), size))
    # All calls get the same array object, which joblib then writes to shared memory once.
    parts = joblib.Parallel(n_jobs=n_jobs)(call(_measure, some, points, bounds, places) for some in blocks)
    return _joined(parts)


def _joined(parts: list[_Measured]) -> _Measured:
    rows, *tables = zip(*parts, strict=True)
    return _Measured(list(itertools.chain.from_iterable(rows)), *(np.concatenate(table) for table in tables))


def _measure(
    ellipsoids: Sequence[Ellipsoid], points: Float[Array, "N D"], bounds: Int[Array, "b"], places: Int[Array, "T"]
) -> _Measured:
    """Measure some ellipsoids.

    Args:
        ellipsoids: The ellipsoids.
        points: The training points, sorted by class, in Fortran order.
        bounds: First row of each class, and the number of rows.
        places: Row of each grid point, if the rows of a class are sorted by distance.
    """
    kept, levels = min(len(places), STEPS), TAIL if len(places) > STEPS else 0
    rows: list[Array] = []
    step_ids = np.tile(np.arange(kept, dtype=np.int32), (len(ellipsoids), 1))
    step_distances, tail_distances = np.empty((len(ellipsoids), kept)), np.empty((len(ellipsoids), levels))
    with one_thread():
        if not levels and len(points) >= _MANY_POINTS * len(places):
            rows, step_distances = ranked_distances(ellipsoids, points, bounds, places)
            return _Measured(rows, step_ids, step_distances, tail_distances)
        for k, ellipsoid in enumerate(ellipsoids):
            distance = column_norms(points.T, ellipsoid.center, ellipsoid.whitener)
            rows.append(np.flatnonzero(distance <= 1.0 + SURFACE_TOLERANCE).astype(np.int32))
            # Sorting each class in place is 20 times faster than sorting by (class, distance): 11 ms instead of 0.2 s
            # for 1.3 million points of 1000 classes.
            for start, end in itertools.pairwise(bounds.tolist()):
                distance[start:end].sort()
            reached = distance[places]
            if levels:
                # A stable sort keeps the first steps of a class if some have equal distances.
                step_ids[k] = np.sort(np.argsort(reached, kind="stable")[:kept])
                reached = reached[step_ids[k]]
                horizon = reached.max()
                beyond = np.sort(np.append(distance[distance > horizon], horizon))
                # The horizon comes first, then the points beyond it: a share of them, rounded up, is an index.
                tail_distances[k] = beyond[-(-np.arange(1, levels + 1) * (len(beyond) - 1) // levels)]
            step_distances[k] = reached
    return _Measured(rows, step_ids, step_distances, tail_distances)


def _measure_on(
    device: torch.device,
    ellipsoids: Sequence[Ellipsoid],
    points: Float[Array, "N D"],
    codes: Int[Array, "N"],
    places: Int[Array, "T"],
) -> _Measured:
    """Compute the results of :func:`_measure` in torch, in batches of ellipsoids."""
    import torch

    centers = torch.from_numpy(np.stack([e.center for e in ellipsoids])).to(device)
    whiteners = torch.from_numpy(np.stack([e.whitener for e in ellipsoids])).to(device)
    z, labels, at = (torch.from_numpy(array).to(device) for array in (points, codes, places))
    share = torch.arange(1, TAIL + 1, device=device)
    parts = []
    for c, w in zip(*(t.split(max(1, _BATCH // z.numel())) for t in (centers, whiteners)), strict=True):
        distance = torch.linalg.vector_norm((z - c[:, None]) @ w.mT, dim=2)
        inside = distance <= 1.0 + SURFACE_TOLERANCE
        rows = inside.nonzero()[:, 1].int().cpu().numpy()
        ordered, order = distance.sort(dim=1)
        by_class = ordered.gather(1, labels[order].sort(dim=1, stable=True).indices)
        reached = by_class[:, at]
        ids = torch.arange(len(at), device=device).expand_as(reached)
        tail = reached[:, :0]
        if len(at) > STEPS:
            ids = reached.sort(dim=1, stable=True).indices[:, :STEPS].sort(dim=1).values
            reached = reached.gather(1, ids)
            within = torch.searchsorted(ordered, reached.amax(dim=1, keepdim=True), right=True)
            tail = ordered.gather(1, within - 1 - (-share * (len(z) - within)) // TAIL)
        sizes = inside.sum(dim=1).cpu().numpy()
        parts.append(
            _Measured(
                np.split(rows, np.cumsum(sizes)[:-1]),
                ids.int().cpu().numpy(),
                reached.cpu().numpy(),
                tail.cpu().numpy(),
            )
        )
    return _joined(parts)


def _cells(rows: list[Array], codes: Int[Array, "N"], classes: int) -> tuple[Array, Array, Array, Array, Array]:
    """The first five fields of a :class:`Ledger`, from the rows in each ellipsoid.

    Cells are sorted by the hash of their ellipsoids, so their order does not depend on the order of the rows.
    """
    ellipsoid = np.repeat(np.arange(len(rows), dtype=np.int32), [len(own) for own in rows])
    row = np.concatenate(rows)
    sizes = np.bincount(row, minlength=len(codes))
    members = ellipsoid[np.argsort(row, kind="stable")]  # of each row, row after row, ascending
    starts = np.cumsum(sizes) - sizes
    for seed in itertools.count():
        keys = set_keys(sizes, members, ellipsoid_hashes(len(rows), seed))
        _, first, cell = np.unique(keys, return_index=True, return_inverse=True)
        same = first[cell]
        # Other random numbers are tried if different sets have equal hashes.
        if (sizes == sizes[same]).all() and (members == members[_ranges(starts[same], sizes)]).all():
            break
    entry, counts = np.unique(cell * classes + codes, return_counts=True)
    return (
        sizes[first],
        members[_ranges(starts[first], sizes[first])],
        (entry // classes).astype(np.int32),
        (entry % classes).astype(np.int32),
        counts,
    )


def ellipsoid_hashes(count: int, seed: int = 0) -> Int[Array, "K"]:
    """One random 64-bit number per ellipsoid; always the same numbers for a seed."""
    return np.random.default_rng(seed).integers(-(2**63), 2**63, size=count, dtype=np.int64)


def set_keys(sizes: Int[Array, "n"], members: Int[Array, "M"], hashes: Int[Array, "K"]) -> Int[Array, "n"]:
    """The hash of each set of ellipsoids, listed one after another in ``members``: the sum of hashes modulo 2^64."""
    sums = np.concatenate([[0], np.cumsum(hashes[members])])
    ends = np.cumsum(sizes)
    return sums[ends] - sums[ends - sizes]


def entry_members(
    cell_sizes: Int[Array, "P"], cell_members: Int[Array, "M"], entry_cells: Int[Array, "E"]
) -> Iterator[tuple[Int[Array, "n"], Int[Array, "n"]]]:
    """All pairs of an entry and an ellipsoid of its cell, in pieces of bounded memory.

    >>> for entry, ellipsoid in entry_members(np.array([2, 1]), np.array([0, 3, 1]), np.array([0, 1, 1])):
    ...     print(entry, ellipsoid)
    [0 0 1 2] [0 3 1 1]
    """
    starts = np.cumsum(cell_sizes) - cell_sizes
    sizes = cell_sizes[entry_cells]
    ends = np.cumsum(sizes)
    begin = 0
    while begin < len(sizes):
        stop = max(begin + 1, int(np.searchsorted(ends, ends[begin] - sizes[begin] + _PAIRS, side="right")))
        some = slice(begin, stop)
        ellipsoid = cell_members[_ranges(starts[entry_cells[some]], sizes[some])]
        yield np.repeat(np.arange(begin, stop), sizes[some]), ellipsoid
        begin = stop


def _ranges(starts: Int[Array, "n"], sizes: Int[Array, "n"]) -> Int[Array, "m"]:
    """The numbers from each start on, as many as its size, one range after another."""
    ends = np.cumsum(sizes)
    return np.repeat(starts - ends + sizes, sizes) + np.arange(ends[-1] if len(ends) else 0)
