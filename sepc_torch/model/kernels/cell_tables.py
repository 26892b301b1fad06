"""Tables of the cells: a hash table that finds a cell by its ellipsoids, and bits that count its training points."""

from __future__ import annotations

from typing import Any

import numpy as np

from sepc_torch.model.kernels.tables import power_of_two
from sepc_torch.partitioning.cells import entry_members
from sepc_torch.shapes import Array, Bool, Int

# Bits of a word.
_WORD = 32
# Slots per cell of the hash table. At a load of at most 1/4, few cells need a second probe.
_SLOTS_PER_CELL = 4


def hash_table(keys: Int[Array, "P"], rows: Int[Array, "n"]) -> tuple[Int[Array, "S"], int]:
    """A hash table with linear probing for the keys at ``rows``, and the number of probes that a lookup needs."""
    size = power_of_two(max(_SLOTS_PER_CELL * len(rows), 2))
    slots = np.full(size, -1, dtype=np.int32)
    first_choice = keys & (size - 1)
    probes = 1
    # Every round, all rows without a slot try the next slot; each free slot takes one row.
    while len(rows):
        wanted = (first_choice[rows] + probes - 1) & (size - 1)
        _, first = np.unique(wanted, return_index=True)
        first = first[slots[wanted[first]] < 0]
        slots[wanted[first]] = rows[first]
        rows = np.delete(rows, first)
        probes += 1 if len(rows) else 0
    return slots, probes


def entries(
    cell_sizes: Int[Array, "P"],
    cell_members: Int[Array, "M"],
    entry_cells: Int[Array, "e"],
    entry_classes: Int[Array, "e"],
    entry_counts: Int[Array, "e"],
    ellipsoids: int,
    classes: int,
) -> tuple[Int[Array, "K E"], Int[Array, "s"], Int[Array, "n E"]]:
    """Members, class starts and digits of the entries, 32 entries of a class per word.

    Args:
        cell_sizes: Number of ellipsoids of each cell.
        cell_members: The ellipsoids of each cell, cell after cell.
        entry_cells: Cell of each entry.
        entry_classes: Class of each entry.
        entry_counts: Training points of that class in that cell.
        ellipsoids: Number of ellipsoids K.
        classes: Number of classes C.

    >>> cells = np.array([1, 2]), np.array([0, 0, 1])
    >>> members, starts, digits = entries(*cells, np.array([0, 1, 1]), np.array([0, 0, 1]), np.array([1, 5, 2]), 2, 2)
    >>> members.tolist(), starts.tolist(), digits.tolist()
    ([[3, 1], [2, 1]], [0, 1, 2], [[3, 0], [0, 1], [2, 0]])
    """
    sizes = np.bincount(entry_classes, minlength=classes)
    starts = np.concatenate([[0], np.cumsum(entry_words(sizes))]).astype(np.int32)
    by_class = np.argsort(entry_classes, kind="stable")
    place = np.empty(len(by_class), dtype=np.int64)  # of the bit of each entry
    place[by_class] = np.arange(len(by_class)) + np.repeat(_WORD * starts[:-1] - np.cumsum(sizes) + sizes, sizes)
    words = int(starts[-1])
    members = np.zeros((ellipsoids, words), dtype=np.uint32)
    for entry, ellipsoid in entry_members(cell_sizes, cell_members, entry_cells):
        # Each bit is added once, so that the sum is the bitwise or.
        bit = np.left_shift(np.uint32(1), (place[entry] % _WORD).astype(np.uint32))
        np.add.at(members, (ellipsoid, place[entry] // _WORD), bit)
    points = np.zeros(_WORD * words, dtype=np.int64)
    points[place] = entry_counts
    digits = np.arange(int(points.max(initial=0)).bit_length())
    return members.view(np.int32), starts, packed(((points >> digits[:, None]) & 1).astype(bool))


def entry_words(number: Any) -> Any:
    """Words for a number of entries."""
    return -(-number // _WORD)


def packed(rows: Bool[Array, "n m"]) -> Int[Array, "n W"]:
    """Rows of booleans as 32-bit words: bit i of word w is column 32 w + i.

    >>> packed(np.array([[True, False, True]])).tolist()
    [[5]]
    """
    count, width = rows.shape
    room = np.zeros((count, -(-width // _WORD) * _WORD), dtype=bool)
    room[:, :width] = rows
    return np.packbits(room, axis=1, bitorder="little").view("<i4").astype(np.int32)
