"""Rule tables: the rules and the training counts in the memory layout of the decision kernels.

Rule tables (:class:`RuleTables`) hold the result of the rules for every region that contains training points, so
that most rows need one lookup. A row in one ellipsoid uses the counts of that ellipsoid. A row in several uses the
counts of its cell, found by a hash of its set of ellipsoids. A row outside uses the counts of the nearest ellipsoid,
expanded to touch the row. A row in several ellipsoids needs counting only if its set of ellipsoids is the set of no
training point, or if classes tie. Counting uses bits: an *entry* stands for the points of one class in one cell; every
ellipsoid has one bit per entry; the numbers of points are stored in binary, one row of bits per digit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch.model import torch_ops
from sepc_torch.model.counting import region_counts
from sepc_torch.model.kernels.cell_tables import entries, entry_words, hash_table
from sepc_torch.model.rules import TrainingCounts, decided
from sepc_torch.partitioning.cells import ellipsoid_hashes, set_keys
from sepc_torch.shapes import Array, Float, Int

# Distances merged at a time: each takes about 50 bytes while its piece is sorted and summed.
_MERGED_AT_ONCE = 2**22
# The verdict of a region in which several classes tie for the majority: the distances of the row must decide.
TIED = -1


class RuleTables(NamedTuple):
    """Results of the rules for regions with training points, and bit tables for counting in other regions.

    Ellipsoids are sorted by class. There is one line of class counts per ellipsoid (first K), then one per cell (P).
    E is the number of words of entries, S the number of hash slots, M the number of (cell, ellipsoid) pairs. Grid,
    steps and tail are those of :class:`~sepc_torch.model.rules.TrainingCounts`, with ellipsoids in the model's order.
    Integers are int32 unless stated otherwise.

    Attributes:
        codes: Class of each ellipsoid (K,).
        order: Index in the model of each sorted ellipsoid (K,).
        starts: First ellipsoid of each class (C + 1,).
        totals: Training points of each class (C,), int64.
        hashes: A random number per ellipsoid (K,), int64. The hash of a set of ellipsoids is their sum modulo 2^64.
        keys: Hash of the cell in each slot (S,), int64.
        slots: The cell in each slot (S,), or -1.
        cell_starts: First member of each cell in ``cell_members`` (P + 1,).
        cell_members: The ellipsoids of each cell (M,).
        verdicts: 2 x label + 1 if the majority in all ellipsoids decides, 2 x label if the majority in any of them
            decides, :data:`TIED` if neither does (K + P,).
        verdict_counts: Count of the label in the class counts that decide (K + P,).
        sums: Sum over classes of count times class total (K + P,), int64.
        line_starts: First element of each line in the next two tables (K + P + 1,), int64.
        line_classes: Classes with a count in the line, ascending.
        line_counts: Their counts, which decide.
        merged: Sorted distances of the steps of all classes, then of the tail, of each ellipsoid (K, L + J), in the
            model's dtype.
        merged_counts: Points of the ellipsoid's own class within each of these distances (K, L + J + 1).
        merged_sums: Sums over all classes within each of these distances (K, L + J + 1), int64.
        class_starts: First grid point of each class (C + 1,).
        grid_counts: Count of each grid point (T,).
        step_ids: Grid points of the steps of each ellipsoid (K, L).
        step_distances: Distances of the steps of each ellipsoid (K, L), in the model's dtype.
        tail_distances: Distances beyond the horizon of each ellipsoid (K, J), in the model's dtype.
        members: Bits of the entries in each ellipsoid (K, E).
        entry_starts: First word of the entries of each class (C + 1,).
        digits: Binary digits of the numbers of points, the lowest first (n, E).
        most_words: Largest number of entry words of a class.
        probes: Slots that a lookup must examine.
    """

    codes: Int[Tensor, "K"]
    order: Int[Tensor, "K"]
    starts: Int[Tensor, "C+1"]
    totals: Int[Tensor, "C"]
    hashes: Int[Tensor, "K"]
    keys: Int[Tensor, "S"]
    slots: Int[Tensor, "S"]
    cell_starts: Int[Tensor, "P+1"]
    cell_members: Int[Tensor, "M"]
    verdicts: Int[Tensor, "K+P"]
    verdict_counts: Int[Tensor, "K+P"]
    sums: Int[Tensor, "K+P"]
    line_starts: Int[Tensor, "K+P+1"]
    line_classes: Int[Tensor, "n"]
    line_counts: Int[Tensor, "n"]
    merged: Float[Tensor, "K L+J"]
    merged_counts: Int[Tensor, "K L+J+1"]
    merged_sums: Int[Tensor, "K L+J+1"]
    class_starts: Int[Tensor, "C+1"]
    grid_counts: Int[Tensor, "T"]
    step_ids: Int[Tensor, "K L"]
    step_distances: Float[Tensor, "K L"]
    tail_distances: Float[Tensor, "K J"]
    members: Int[Tensor, "K E"]
    entry_starts: Int[Tensor, "C+1"]
    digits: Int[Tensor, "n E"]
    most_words: int
    probes: int


def rule_tables(training: TrainingCounts, totals: Int[Tensor, "C"]) -> RuleTables:
    """Lay out the training counts; runs once, whenever they change or move."""
    device = training.codes.device
    order = torch.argsort(training.codes, stable=True)
    codes = training.codes[order]
    sizes, cell_members = training.cell_sizes.cpu().numpy(), order.argsort()[training.cell_members].cpu().numpy()
    hashes = ellipsoid_hashes(len(codes))
    keys = set_keys(sizes, cell_members, hashes)
    # A row in fewer than two ellipsoids needs no cell.
    slots, probes = hash_table(keys, np.flatnonzero(sizes > 1))
    entry_cells, entry_classes, entry_counts = (table.cpu().numpy() for table in training[3:6])
    members, entry_starts, digits = entries(
        sizes, cell_members, entry_cells, entry_classes, entry_counts, len(codes), len(totals)
    )

    def there(array: Array) -> Tensor:
        return torch.from_numpy(array).to(device)

    def class_starts(classes: Int[Tensor, "n"]) -> Int[Tensor, "s"]:
        return torch.searchsorted(classes, torch.arange(len(totals) + 1, dtype=classes.dtype, device=device)).int()

    return RuleTables(
        codes=codes.int(),
        order=order.int(),
        starts=class_starts(codes),
        totals=totals.long(),
        hashes=there(hashes),
        keys=there(np.where(slots >= 0, keys[slots] if len(keys) else 0, 0)),
        slots=there(slots),
        cell_starts=there(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)),
        cell_members=there(cell_members.astype(np.int32)),
        **_lines(training, order, totals),
        **_merged(training, order, totals),
        class_starts=class_starts(training.grid_classes),
        grid_counts=training.grid_counts.int(),
        step_ids=training.step_ids.contiguous(),
        step_distances=training.step_distances.contiguous(),
        tail_distances=training.tail_distances.contiguous(),
        members=there(members),
        entry_starts=there(entry_starts),
        digits=there(digits),
        most_words=max(1, int(np.diff(entry_starts).max())),
        probes=probes,
    )


def _lines(training: TrainingCounts, order: Int[Tensor, "K"], totals: Int[Tensor, "C"]) -> dict[str, Tensor]:
    """Class counts that decide in each ellipsoid and in each cell, in pieces of bounded memory."""
    count, classes = training.held.shape
    pieces = [
        _line(2 * training.codes[some] + 1, training.codes[some], training.held[some], totals)
        for some in order.split(torch_ops.rows_per_piece(training.held, classes))
    ]
    starts = torch.nn.functional.pad(training.cell_sizes.cumsum(0), (1, 0))
    cells = torch.arange(len(training.cell_sizes), device=order.device)
    for piece in cells.split(torch_ops.rows_per_piece(training.held, 4 * classes + count)):
        sizes = training.cell_sizes[piece]
        inside = torch.zeros(len(piece), count, dtype=torch.bool, device=order.device)
        row = torch.arange(len(piece), device=order.device).repeat_interleave(sizes)
        inside[row, training.cell_members[starts[piece[0]] : starts[piece[-1] + 1]].long()] = True
        in_all, in_any = region_counts(inside, *training[1:6], classes)
        by_all = decided(in_all)
        counts = torch.where(by_all[:, None], in_all, in_any)
        label = counts.argmax(dim=1)
        verdicts = torch.where(by_all | decided(in_any), 2 * label + by_all.long(), TIED)
        pieces.append(_line(verdicts, label, counts, totals))
    tables = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    ends = tables.pop("line_sizes").cumsum(0)
    return {"line_starts": torch.nn.functional.pad(ends, (1, 0)), **tables}


def _line(
    verdicts: Int[Tensor, "n"], label: Int[Tensor, "n"], counts: Int[Tensor, "n C"], totals: Int[Tensor, "C"]
) -> dict[str, Tensor]:
    """Some lines of the rule tables, from their verdicts, labels and dense class counts."""
    row, line_classes = counts.nonzero(as_tuple=True)
    return {
        "verdicts": verdicts.int(),
        "verdict_counts": counts.gather(1, label[:, None])[:, 0].int(),
        "sums": (counts * totals).sum(dim=1),
        "line_sizes": (counts > 0).sum(dim=1),
        "line_classes": line_classes.int(),
        "line_counts": counts[row, line_classes].int(),
    }


def _merged(training: TrainingCounts, order: Int[Tensor, "K"], totals: Int[Tensor, "C"]) -> dict[str, Tensor]:
    """For each ellipsoid, the steps of all classes in one sorted list, then its tail, and the counts within each."""
    classes, grid = training.grid_classes.long(), training.grid_counts
    is_first = classes.diff(prepend=classes.new_full((1,), -1)) > 0
    added = torch.where(is_first, grid, grid - grid.roll(1))  # by a step, to the count of its class
    steps, levels = training.step_ids.shape[1], training.tail_distances.shape[1]
    pieces = []
    for some in order.split(max(1, _MERGED_AT_ONCE // (steps + len(totals)))):
        distance, place = training.step_distances[some].sort(dim=1)
        ids = training.step_ids[some].long()
        step = ids.gather(1, place)
        own = added[step] * (classes[step] == training.codes[some][:, None])
        weighted = (added * totals[classes])[step]
        own, weighted = (torch.nn.functional.pad(numbers.cumsum(dim=1), (1, 0)) for numbers in (own, weighted))
        base = torch.zeros(len(some), len(totals), dtype=grid.dtype, device=grid.device)
        base = base.scatter_reduce(1, classes[ids], grid[ids], "amax")
        missing = totals - base
        for level in range(1, levels + 1):
            counts = base + missing * level // levels
            own = torch.cat([own, counts.gather(1, training.codes[some][:, None])], dim=1)
            weighted = torch.cat([weighted, (counts * totals).sum(dim=1, keepdim=True)], dim=1)
        pieces.append((torch.cat([distance, training.tail_distances[some]], dim=1), own.int(), weighted))
    names = ("merged", "merged_counts", "merged_sums")
    return {name: torch.cat(tensors) for name, tensors in zip(names, zip(*pieces, strict=True), strict=True)}


def addressable(training: TrainingCounts) -> bool:
    """Whether 32-bit offsets can address every element of the tables that the kernels address in this way."""
    words = int(entry_words(training.entry_classes.bincount()).sum())
    return max(len(training.codes) * words, len(training.cell_members)) < 2**31
