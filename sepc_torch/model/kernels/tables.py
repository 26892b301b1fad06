r"""What the rules look up, laid out for a kernel.

Most rows need one line of a table: a point in one ellipsoid that ellipsoid's counts, a point in several the counts of
its cell, a point outside those of the nearest ellipsoid expanded to touch it. What only depends on that line is worked
out beforehand, label and rule included.

Membership in K ellipsoids is a pattern of bits, 32 to a word. A cell is found by the hash of its pattern, in a table
with open addressing, and the pattern is compared to the last bit before it is believed. Only patterns that no training
point has need the pass over all cells. That pass counts bits: an entry stands for the points of one class in one cell,
every ellipsoid has a bit for each entry, and the numbers of points are there in binary, a row of bits for each digit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch.model import torch_ops
from sepc_torch.model.rules import TrainingCounts, decided
from sepc_torch.shapes import Array, Bool, Float, Int

WORD = 32
_LOW = np.int64(2**WORD - 1)
# An odd number below 2^63 with its bits well mixed; the kernel multiplies by the same.
MULTIPLIER = 0x2545F4914F6CDD1D
# The same for 32 bits: how far lanes are apart, and by how much to shift and to multiply, in turns.
LANE_STEP = 0x9E3779B9
LANE_MIX = ((16, 0x7FEB352D), (15, 0x846CA68B))
# Slots for each pattern: with so many free, few patterns need a second look.
_ROOM = 4
# Entries of the merged distances, of 20 or 24 bytes: above, a kernel searches the classes one after another.
_MOST_MERGED = 2**24
# Sections begin at multiples of so many words, so that they hold numbers of any size.
_ALIGNED = 4
# Ellipsoids whose entries are laid out at once: each takes a byte for every entry.
_AT_ONCE = 64
# Digits of the numbers of points that all entries have room for beforehand; higher ones have only the heavy words.
LOW_DIGITS = 3
# Words of the tables that one instruction of a warp brings near; there is a whole number of them.
PAGE = 1024
# Numbers by which the merged distances of an ellipsoid are divided into parts of the same length.
GUIDE = 256

# What a table of words begins with: sizes, and where its sections begin.
SIZES = (
    "ellipsoids", "classes", "most_words", "digits", "size", "slot_mask", "probes", "lane_slot_mask",
)  # fmt: skip
SECTIONS = (
    "codes", "order", "starts", "totals", "entry_starts", "numbers", "lane_slots", "lane_keys", "verdicts", "trusts",
    "lane_patterns", "counts", "members", "guide", "merged", "merged_trusts", "patterns", "slots", "keys", "sums",
    "reach", "ranks", "merged_sums",
)  # fmt: skip


class RuleTables(NamedTuple):
    """What the kernels read besides distances.

    Attributes:
        words: All tables in one, as int32: a kernel with few arguments is launched sooner.
        order: The ellipsoids by class (K,). The tables have them in this order.
        starts: Where each class begins (C + 1,).
        merged: Whether the distances of the training points are also there for all classes together.
        double: Whether these distances are in float64.
        most_words: Words of the entries of a class, at most.
        heavy_words: Words of those that stand for so many points that more than the low digits are needed.
        digits: Binary digits of the numbers of points, at most.
    """

    words: Int[Tensor, "N"]
    order: Int[Tensor, "K"]
    starts: Int[Tensor, "C+1"]
    merged: bool
    double: bool
    most_words: int
    heavy_words: int
    digits: int

    @property
    def entries(self) -> tuple[int, int, int]:
        """What the entries of a class take at most: words, words with high digits, and digits."""
        return self.most_words, self.heavy_words, self.digits

    @property
    def pages(self) -> int:
        """How many pages the words are."""
        return self.words.shape[0] // PAGE


def rule_tables(training: TrainingCounts, totals: Int[Tensor, "C"]) -> RuleTables:
    """Lay out the training counts; done once, whenever they change or move."""
    sizes, sections = laid_out(training, totals)
    begin = -(-(len(SIZES) + len(SECTIONS)) // _ALIGNED) * _ALIGNED
    header, parts = [sizes[name] for name in SIZES], []
    for name in SECTIONS:
        header.append(begin)
        if name in sections:
            part = sections[name].contiguous().flatten().view(torch.int32)
            parts.append(torch.nn.functional.pad(part, (0, -len(part) % _ALIGNED)))
            begin += len(parts[-1])
    head = torch.tensor(header, dtype=torch.int32, device=totals.device)
    words = torch.cat([torch.nn.functional.pad(head, (0, -len(head) % _ALIGNED)), *parts])
    words = torch.nn.functional.pad(words, (0, -len(words) % PAGE))
    double = training.sorted_distances.dtype == torch.float64
    merged = "merged" in sections
    heavy = _entry_words((training.counts >= 2**LOW_DIGITS).sum(dim=0)).max()
    of_entries = sizes["most_words"], int(heavy), sizes["digits"]
    return RuleTables(words, sections["order"], sections["starts"], merged, double, *of_entries)


def laid_out(training: TrainingCounts, totals: Int[Tensor, "C"]) -> tuple[dict[str, int], dict[str, Tensor]]:
    """The sizes and the sections of the tables; integers are int32 unless said otherwise.

    - ``codes`` (K,), ``order`` (K,): the classes of the ellipsoids, which come by class, and where each was before; of
      exactly equal distances the first in this order is the nearest;
    - ``starts`` (C + 1,), ``totals`` (C,): where each class begins, and its training points;
    - ``patterns`` (P, W): the cells as words of bits, one for every ellipsoid;
    - ``slots`` (S,), ``keys`` (S,) int64: the cell at each place of the hash table, S a power of two, or -1 where there
      is none, and its hash;
    - ``lane_patterns`` (P, 32), ``lane_slots``, ``lane_keys``: the same for 32 lanes that share a row, where their
      words have room for all ellipsoids (:func:`packed_by_lane`). Hashes are of 32 bits; a cell that the lanes do not
      find at first sight, or whose hash another has too, is as if no training point had its pattern, and counted;
    - ``members`` (K, E): ellipsoids as words of bits, one for every entry in them; entries come by class;
    - ``entry_starts`` (C + 1,), ``numbers`` (n, E): where the words of entries of each class begin, and the binary
      digits of the numbers of points that they stand for, the lowest first;
    - ``counts`` (K + P, C): the points that vouch in every ellipsoid alone, then in the region of every cell: those in
      all of its ellipsoids if they have a majority, else those in any of them;
    - ``sums`` (K + P,) int64: their sums over classes, each count times the points of the class;
    - ``verdicts`` (K + P,): four times the label, plus one where the majority is that in all ellipsoids, plus two where
      there is none: the label then has as many points as others, and what is nearest decides;
    - ``trusts`` (K + P,) float64: the trust in that label;
    - ``reach`` (K, C, Q): distances of the training points, sorted, in the dtype of the model;
    - ``ranks`` (C, Q + 1): how many points lie within each of them, none before the first;
    - ``merged`` (K, C Q): the same distances, all classes together;
    - ``guide`` (K, G): of these every so manyth (:func:`part`), infinite after the last of them;
    - ``merged_sums`` (K, C Q + 1) int64, ``merged_trusts`` (K, C Q + 1) float64: the sums over classes of the points
      within each, and the trust in the ellipsoid's own class.
    """
    device = training.codes.device
    classes, size = training.sorted_distances.shape[1:]
    order = torch.argsort(training.codes, stable=True)
    codes = training.codes[order]
    cells = training.cells[:, order].cpu().numpy()
    words = packed(cells)
    lane_words = packed_by_lane(cells)
    keys, lane_keys = hashed(words), hashed_by_lane(lane_words)

    in_all, in_any = torch_ops.region_counts(training.cells, training.cells, training.counts)
    by_all = decided(in_all)
    in_region = torch.where(by_all[:, None], in_all, in_any)
    # Points in fewer than two ellipsoids are judged without their cell.
    shared = np.flatnonzero(cells.sum(axis=1) > 1)
    slots, probes = hash_table(keys, shared)
    lane_slots, _ = hash_table(lane_keys, shared[: len(lane_keys)], most=WORD)
    counts = torch.cat([training.held[order], in_region])
    label = torch.cat([codes, in_region.argmax(dim=1)])
    narrow = torch.cat([torch.ones_like(codes), by_all.to(codes.dtype)])
    torn = torch.cat([torch.zeros_like(codes), (~by_all & ~decided(in_any)).to(codes.dtype)])
    sums = (counts * totals).sum(dim=1)
    members, entry_starts, numbers = entries(cells, training.counts.cpu().numpy())
    sizes = {
        "ellipsoids": len(codes),
        "classes": classes,
        "most_words": int(np.diff(entry_starts).max()),
        "digits": len(numbers),
        "size": size,
        "slot_mask": len(slots) - 1,
        "probes": probes,
        "lane_slot_mask": len(lane_slots) - 1,
    }
    sections = {
        "codes": codes.int(),
        "order": order.int(),
        "starts": torch.searchsorted(codes, torch.arange(classes + 1, device=device)).int(),
        "totals": totals.int(),
        "patterns": torch.from_numpy(words).to(device),
        "keys": torch.from_numpy(_keys_at(slots, keys)).to(device),
        "slots": torch.from_numpy(slots).to(device),
        "lane_patterns": torch.from_numpy(lane_words.view(np.int32)).to(device),
        "lane_keys": torch.from_numpy(_keys_at(lane_slots, lane_keys)).to(device),
        "lane_slots": torch.from_numpy(lane_slots).to(device),
        "entry_starts": torch.from_numpy(entry_starts).to(device),
        "numbers": torch.from_numpy(numbers).to(device),
        "members": torch.from_numpy(members).to(device),
        "counts": counts.int(),
        "sums": sums,
        "verdicts": (4 * label + 2 * torn + narrow).int(),
        "trusts": _trust(counts.gather(1, label[:, None])[:, 0], totals[label], sums),
        "reach": training.sorted_distances[order],
        "ranks": torch.nn.functional.pad(training.counts_at, (1, 0)).int(),
    }
    if training.sorted_distances.numel() <= _MOST_MERGED:
        sections |= _merged(sections["reach"], codes, training.counts_at, totals)
    return sizes, sections


def _merged(
    reach: Float[Tensor, "K C Q"], codes: Int[Tensor, "K"], ranks: Int[Tensor, "C Q"], totals: Int[Tensor, "C"]
) -> dict[str, Tensor]:
    distance, place = reach.flatten(1).sort(dim=1)
    added = ranks.diff(dim=1, prepend=torch.zeros_like(ranks[:, :1])).flatten()
    classes = torch.arange(len(ranks), device=ranks.device).repeat_interleave(ranks.shape[1])
    own = added[place] * (classes[place] == codes[:, None])
    sums = (added * totals[classes])[place]
    sums, own = (torch.nn.functional.pad(numbers.cumsum(dim=1), (1, 0)) for numbers in (sums, own))
    guide = torch.full((len(distance), GUIDE), torch.inf, dtype=distance.dtype, device=distance.device)
    step = part(distance.shape[1])
    guide[:, : distance.shape[1] // step] = distance[:, step - 1 :: step]
    trusts = _trust(own, totals[codes][:, None], sums)
    return {"guide": guide, "merged": distance, "merged_sums": sums, "merged_trusts": trusts}


def part(size: int) -> int:
    """How many of so many numbers lie between two that guide to them, one of these included.

    >>> part(5120), part(100), 5120 // part(5120) <= GUIDE
    (20, 1, True)
    """
    return size // (GUIDE + 1) + 1


def _trust(number: Int[Tensor, "..."], total: Int[Tensor, "..."], sums: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Trust in classes of which so many points vouch, of so many in all; see :mod:`sepc_torch.model.trust`."""
    own = (number + 1).double() * (total + 1).double()
    return own / (own + (sums - number * total).double())


def addressable(training: TrainingCounts) -> bool:
    """Whether 32-bit addresses reach every word of the tables."""
    return _words(training) < 2**31


def _words(training: TrainingCounts) -> int:
    """How many words the tables have, at most."""
    ellipsoids, classes, size = training.sorted_distances.shape
    cells, distances, wide = (
        len(training.cells),
        training.sorted_distances.numel(),
        training.sorted_distances.element_size() // 4,
    )
    merged = (wide + 4) * distances + (4 + wide * GUIDE) * ellipsoids if distances <= _MOST_MERGED else 0
    patterns = (ellipsoids // WORD + 1 + lane_bits(ellipsoids)) * cells
    of_entries = (ellipsoids + WORD) * int(_entry_words((training.counts > 0).sum(dim=0)).sum())
    counts = classes * (cells + ellipsoids + size + 4) + 2
    # Codes, order, verdicts, trusts, sums; keys and slots twice, at most eight to a cell; the header, the gaps.
    others = 7 * ellipsoids + 45 * cells + 2 * _ALIGNED * (len(SIZES) + len(SECTIONS))
    return wide * distances + merged + patterns + of_entries + counts + others + PAGE


def _entry_words(number: Any) -> Any:
    """Words for so many entries of each class."""
    return -(-number // WORD)


def entries(
    cells: Bool[Array, "P K"], counts: Int[Array, "P C"]
) -> tuple[Int[Array, "K E"], Int[Array, "C+1"], Int[Array, "n E"]]:
    """Members, where each class begins, and numbers: an entry for every class in every cell, 32 to a word of a class.

    Of every class those with the most points come first: only few words have high digits.

    >>> members, starts, numbers = entries(np.array([[True, False], [True, True]]), np.array([[1, 0], [5, 2]]))
    >>> members.tolist(), starts.tolist(), numbers.tolist()
    ([[3, 1], [1, 1]], [0, 1, 2], [[3, 0], [0, 1], [1, 0]])
    """
    label, cell = np.nonzero(counts.T)
    order = np.lexsort((-counts[cell, label], label))
    label, cell = label[order], cell[order]
    words = _entry_words(np.bincount(label, minlength=counts.shape[1]))
    starts = np.concatenate([[0], np.cumsum(words)]).astype(np.int32)
    place = WORD * starts[label] + np.arange(len(label)) - np.searchsorted(label, label)
    room = WORD * int(starts[-1])
    members = np.zeros((cells.shape[1], room // WORD), dtype=np.int32)
    for begin in range(0, len(members), _AT_ONCE):
        held = np.zeros((len(members[begin : begin + _AT_ONCE]), room), dtype=bool)
        held[:, place] = cells[cell, begin : begin + _AT_ONCE].T
        members[begin : begin + _AT_ONCE] = packed(held)
    points = np.zeros(room, dtype=np.int64)
    points[place] = counts[cell, label]
    digits = np.arange(int(points.max(initial=0)).bit_length())
    return members, starts, packed(((points >> digits[:, None]) & 1).astype(bool))


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
    """The hash of every row: the sum over its words, each mixed with its place; arithmetic is modulo 2^64."""
    value = (words.astype(np.int64) & _LOW) + (np.arange(words.shape[1], dtype=np.int64) << np.int64(WORD))
    with np.errstate(over="ignore"):
        return np.where(words != 0, _mixed(value), 0).sum(axis=1)


def packed_by_lane(cells: Bool[Array, "P K"]) -> Int[Array, "P 32"]:
    """The same for lanes that take every 32nd column: bit i of the word of lane w is column 32 i + w.

    Words have as few bits as will do, and there are none for more columns than 32 words of 32 bits have room for.

    >>> packed_by_lane(np.array([[True] + 31 * [False] + [True]]))[0, :2].tolist()
    [3, 0]
    """
    count, width = cells.shape
    bits = lane_bits(width)
    if bits == 0:
        return np.zeros((0, WORD), dtype=np.int32)
    room = np.zeros((count, bits * WORD), dtype=bool)
    room[:, :width] = cells
    by_lane = np.ascontiguousarray(room.reshape(count, bits, WORD).transpose(0, 2, 1))
    return np.packbits(by_lane, axis=2, bitorder="little").view(f"<i{bits // 8}").reshape(count, WORD)


def lane_bits(ellipsoids: int) -> int:
    """Bits of the word of a lane, of 32 that share so many ellipsoids; none, if there are too many.

    >>> lane_bits(1), lane_bits(256), lane_bits(257), lane_bits(1024), lane_bits(1025)
    (8, 8, 16, 32, 0)
    """
    return next((bits for bits in (8, 16, 32) if ellipsoids <= WORD * bits), 0)


def hashed_by_lane(words: Int[Array, "P 32"]) -> Int[Array, "P"]:
    """Another hash, of 32 bits: the words of lanes, each mixed with its lane, exclusive or."""
    value = words.view(f"u{words.itemsize}").astype(np.uint32) + np.arange(WORD, dtype=np.uint32) * np.uint32(LANE_STEP)
    for shift, factor in LANE_MIX:
        value = (value ^ (value >> np.uint32(shift))) * np.uint32(factor)
    value ^= value >> np.uint32(LANE_MIX[0][0])
    return np.bitwise_xor.reduce(value, axis=1).view(np.int32)


def _mixed(value: Int[Array, "..."]) -> Int[Array, "..."]:
    """Numbers with all their bits mixed."""
    with np.errstate(over="ignore"):
        for _ in range(2):
            value = value * np.int64(MULTIPLIER)
            value ^= (value >> np.int64(WORD)) & _LOW
    return value


def hash_table(
    keys: Int[Array, "P"], rows: Int[Array, "n"], *, most: int | None = None
) -> tuple[Int[Array, "S"], int]:  # fmt: skip
    """A table with the rows at the places of their keys, and how far a search has to look.

    Rows that would be found only farther than at ``most`` places are left out.
    """
    size = 1 << (max(_ROOM * len(rows), 2) - 1).bit_length()
    slots = np.full(size, -1, dtype=np.int32)
    place = keys & (size - 1)
    probes = 1
    # All rows that still look for a place try the same distance from their first choice; one of each place gets it.
    for distance in range(size if most is None else min(size, most)):
        if len(rows) == 0:
            break
        probes = distance + 1
        wanted = (place[rows] + distance) & (size - 1)
        _, first = np.unique(wanted, return_index=True)
        first = first[slots[wanted[first]] < 0]
        slots[wanted[first]] = rows[first]
        rows = np.delete(rows, first)
    return slots, probes


def _keys_at(slots: Int[Array, "S"], keys: Int[Array, "P"]) -> Int[Array, "S"]:
    """The keys of the rows at the places of a table, zero where there is none."""
    taken = slots >= 0
    found = np.zeros(len(slots), dtype=keys.dtype)
    found[taken] = keys[slots[taken]]
    return found
