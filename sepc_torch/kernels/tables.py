r"""What the rules look up, laid out for a kernel.

Membership in K ellipsoids is a pattern of bits, 32 to a word. The training counts of a pattern that some training point
has are found by its hash, in a table with open addressing, and the pattern is compared to the last bit before they are
believed. Only a pattern that no training point has needs the pass over all cells.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch import ops
from sepc_torch.rules import TrainingCounts
from sepc_torch.shapes import Array, Bool, Float, Int

WORD = 32
# An odd number below 2^63 with its bits well mixed; the kernel multiplies by the same.
MULTIPLIER = 0x2545F4914F6CDD1D
# Slots for each pattern: with so many free, few patterns need a second look.
_ROOM = 4


class RuleTables(NamedTuple):
    """What the kernel reads besides distances; integers are int32 unless said otherwise.

    Attributes:
        order: The ellipsoids by class (K,). All else has them in this order.
        codes: Their classes (K,).
        starts: Where each class begins (C + 1,).
        words: The cells as words of bits, one for every ellipsoid (W, P).
        members: Ellipsoids as words of bits, one for every cell they hold (K, ceil(P / 32)).
        keys: The hash of every cell (P,), int64.
        slots: The cell at each place of the hash table (S,), S a power of two; -1 where there is none.
        counts: Training points of each class in every cell (P, C).
        in_all: The same in all of the ellipsoids that hold the cell (P, C); zero where fewer than two do.
        in_any: The same in any of them (P, C).
        held: Training points of each class in every ellipsoid (K, C).
        reach: Distances of the training points, sorted (K, C, Q), in the dtype of distances.
        ranks: How many points lie within each of them, none before the first (C, Q + 1).
        totals: Training points of each class (C,).
        probes: How many slots a search looks at, at most.
    """

    order: Int[Tensor, "K"]
    codes: Int[Tensor, "K"]
    starts: Int[Tensor, "C+1"]
    words: Int[Tensor, "W P"]
    members: Int[Tensor, "K M"]
    keys: Int[Tensor, "P"]
    slots: Int[Tensor, "S"]
    counts: Int[Tensor, "P C"]
    in_all: Int[Tensor, "P C"]
    in_any: Int[Tensor, "P C"]
    held: Int[Tensor, "K C"]
    reach: Float[Tensor, "K C Q"]
    ranks: Int[Tensor, "C Q+1"]
    totals: Int[Tensor, "C"]
    probes: int


def rule_tables(training: TrainingCounts, totals: Int[Tensor, "C"]) -> RuleTables:
    """Lay out the training counts; done once, whenever they change or move."""
    device = training.codes.device
    classes = training.counts.shape[1]
    order = torch.argsort(training.codes, stable=True)
    starts = torch.searchsorted(training.codes[order], torch.arange(classes + 1, device=device))
    cells = training.cells[:, order].cpu().numpy()
    words = packed(cells)
    keys = hashed(words)
    # Points in fewer than two ellipsoids are judged without their cell.
    slots, probes = hash_table(keys, np.flatnonzero(cells.sum(axis=1) > 1))
    in_all, in_any = ops.region_counts(training.cells, training.cells, training.counts).int()
    return RuleTables(
        order=order.int(),
        codes=training.codes[order].int(),
        starts=starts.int(),
        words=torch.from_numpy(words).T.contiguous().to(device),
        members=torch.from_numpy(packed(cells.T)).to(device),
        keys=torch.from_numpy(keys).to(device),
        slots=torch.from_numpy(slots).to(device),
        counts=training.counts.int().contiguous(),
        in_all=in_all,
        in_any=in_any,
        held=training.held[order].int(),
        reach=training.reach[order],
        ranks=torch.nn.functional.pad(training.ranks, (1, 0)).int().contiguous(),
        totals=totals.int(),
        probes=probes,
    )


def addressable(training: TrainingCounts) -> bool:
    """Whether the kernel's 32-bit addresses reach every table."""
    return max(table.numel() for table in (training.cells, training.counts, training.reach)) < 2**31


def packed(cells: Bool[Array, "P K"]) -> Int[Array, "P W"]:
    """Rows of booleans as words: bit i of word w is column 32 w + i.

    >>> packed(np.array([[True, False, True]])).tolist()
    [[5]]
    """
    count, width = cells.shape
    room = np.zeros((count, -(-width // WORD) * WORD), dtype=bool)
    room[:, :width] = cells
    return np.packbits(room, axis=1, bitorder="little").view("<i4").astype(np.int32)


def hashed(words: Int[Array, "P W"]) -> Int[Array, "P"]:
    """The hash of every row, from the first word to the last as the kernel meets them; arithmetic is modulo 2^64."""
    value = np.zeros(len(words), dtype=np.int64)
    with np.errstate(over="ignore"):
        for word in words.T:
            value = (value ^ word.astype(np.int64)) * np.int64(MULTIPLIER)
            value ^= (value >> np.int64(WORD)) & np.int64(0xFFFFFFFF)
    return value


def hash_table(keys: Int[Array, "P"], rows: Int[Array, "n"]) -> tuple[Int[Array, "S"], int]:
    """A table with the rows at the places of their keys, and how far a search has to look."""
    size = 1 << (max(_ROOM * len(rows), 2) - 1).bit_length()
    slots = np.full(size, -1, dtype=np.int32)
    place = keys & (size - 1)
    probes = 1
    # All rows that still look for a place try the same distance from their first choice; one of each place gets it.
    for distance in range(size):
        if len(rows) == 0:
            break
        probes = distance + 1
        wanted = (place[rows] + distance) & (size - 1)
        _, first = np.unique(wanted, return_index=True)
        first = first[slots[wanted[first]] < 0]
        slots[wanted[first]] = rows[first]
        rows = np.delete(rows, first)
    return slots, probes
