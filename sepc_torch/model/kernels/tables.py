r"""A frozen model in the memory layout of the kernels: split ellipsoids, rounded ellipsoids, and rule tables.

**Split ellipsoids** (:class:`Split`) give float32 accuracy from float16 tensor cores. A number scaled to magnitudes
around :math:`2^{14}` is the sum of two float16 numbers: ``high`` holds its first eleven bits, ``low`` the next eleven.
A product of two such sums needs three of the four partial products: high x high, high x low and low x high. The scales
are powers of two, so scaling rounds nothing:

- features by :math:`s_i`, so that all features contribute alike to :math:`(z - c) / s`;
- row j of the upper triangular :math:`R` with :math:`R^\top R = W^\top W` by :math:`t_j`, so that each row uses the
  range of float16:
  :math:`d^2 = \sum_j \bigl(t_j \sum_{i \ge j} \tfrac{R_{ji} s_i}{t_j} \tfrac{z_i - c_i}{s_i}\bigr)^2`;
- each point by its own scale, inside the kernel.

Numbers more than :math:`2^{28}` times smaller than the largest of their row lose digits; float32 sums lose them too.

**Rounded ellipsoids** (:class:`Rounded`) let a screening pass use one float16 product instead of three. With
:math:`\hat R = R \operatorname{diag}(s) / u`, one unit u per ellipsoid, and :math:`x = z / s`, the pass computes

.. math:: \tilde d = u \,\| H \operatorname{fl}_{16}(x) - b \|, \quad H = \operatorname{fl}_{16}(\hat R),\
   b = \operatorname{fl}_{32}(\hat R c).

By the triangle inequality, and :math:`|\operatorname{fl}_{16}(x_i) - x_i| \le 2^{-11} |x_i|`,

.. math:: |\tilde d - d| \le u \bigl(\|H - \hat R\| + 2^{-11} \|H\| + \gamma \||H|\|\bigr) \|x\|
   + u \bigl(\|\hat R c - b\| + \gamma \|b\|\bigr) + \rho \tilde d

in spectral norms, where :math:`\gamma` bounds the rounding of sums and :math:`\rho` that of squares and the root. The
second term also covers the error of the float32-accurate distance. If the bound leaves one possible decision, it is
therefore the decision of that distance.

**Rule tables** (:class:`RuleTables`) hold the result of the rules for every region that contains training points, so
that most rows need one lookup. A row in one ellipsoid uses the counts of that ellipsoid. A row in several uses the
counts of its cell, found by a hash of its set of ellipsoids. A row outside uses the counts of the nearest ellipsoid,
expanded to touch the row. A row in several ellipsoids needs counting only if its set of ellipsoids is the set of no
training point, or if classes tie. Counting uses bits: an *entry* stands for the points of one class in one cell; every
ellipsoid has one bit per entry; the numbers of points are stored in binary, one row of bits per digit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch.model import torch_ops
from sepc_torch.model.counting import region_counts
from sepc_torch.model.rules import TrainingCounts, decided
from sepc_torch.partitioning.cells import ellipsoid_hashes, entry_members, set_keys
from sepc_torch.shapes import Array, Bool, Float, Int

# The largest magnitude after scaling. Float16 ends at 2^16, and sums of products stay far within float32.
TOP = 2.0**14
# Tensor cores multiply blocks of at least 16; beyond 64 features the kernel works block by block.
_SMALLEST_BLOCK = 16
_LARGEST_BLOCK = 64
# Half a unit in the last place of float16, and the least float16 number in units of TOP.
_HALF_UNIT = 2.0**-11
_LEAST_UNIT = 2.0**-38
# Rounding of sums on tensor cores: four float32 units for every addition that can round, and as much again for *each*
# of the two other products of the accurate distance.
_SUM_UNIT = 3.0 * 2.0**-21
# Squarings of a matrix before its Frobenius norm: the bound exceeds the spectral norm by at most the factor D^(1/128).
_SQUARINGS = 5
_WORD = 32
# Slots per cell of the hash table. At a load of at most 1/4, few cells need a second probe.
_SLOTS_PER_CELL = 4
# Distances merged at a time: each takes about 50 bytes while its piece is sorted and summed.
_MERGED_AT_ONCE = 2**22
# The verdict of a region in which several classes tie for the majority: the distances of the row must decide.
TIED = -1


class Split(NamedTuple):
    r"""Ellipsoids as pairs of float16 numbers. F is the number of features, padded with zeros to whole blocks.

    ``feature_scale`` (F,) is :math:`1 / s`, ``centers`` (K, F) are in units of s, ``high`` and ``low`` (K, F, F) hold
    :math:`R_{ji} s_i / t_j` at [k, i, j], ``row_scale`` (K, F) is :math:`t`, and ``reach`` is the largest coordinate of
    a centre.
    """

    feature_scale: Float[Tensor, "F"]
    centers: Float[Tensor, "K F"]
    high: Tensor
    low: Tensor
    row_scale: Float[Tensor, "K F"]
    reach: float


def block_size(dim: int) -> int:
    """Features per block: a power of two between 16 and 64.

    >>> block_size(5), block_size(40), block_size(200)
    (16, 64, 64)
    """
    return min(max(_SMALLEST_BLOCK, power_of_two(dim)), _LARGEST_BLOCK)


def power_of_two(number: int) -> int:
    """The least power of two that is not below a positive number.

    >>> power_of_two(1), power_of_two(5), power_of_two(8)
    (1, 8, 8)
    """
    return 1 << (number - 1).bit_length()


def power_of_two_above(x: Tensor) -> Tensor:
    """The least power of two above each number, exactly; a logarithm could round."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(mantissa), exponent)


def split(centers: Float[Tensor, "K D"], whiteners: Float[Tensor, "K D D"]) -> Split:
    """Split the ellipsoids of a bank, in float64; runs once, whenever the ellipsoids change."""
    dim = centers.shape[1]
    block = block_size(dim)
    padded = -(-dim // block) * block
    c, w = centers.double(), whiteners.double()
    if bool(w.tril(-1).count_nonzero()):
        w = torch.linalg.qr(w, mode="r")[1]
    # Typical offset from the centre along a feature: half the chord of the ellipsoid through its centre.
    width = 1.0 / torch.linalg.vector_norm(w, dim=1)
    s = power_of_two_above(torch.maximum(c.abs(), width).amax(dim=0))
    r = w * s
    t = power_of_two_above(r.abs().amax(dim=2))
    r = (r * (TOP / t)[:, :, None]).mT
    high = r.half()
    pad = padded - dim
    return Split(
        feature_scale=torch.nn.functional.pad(1.0 / s, (0, pad)).float(),
        centers=torch.nn.functional.pad(c / s, (0, pad)).float().contiguous(),
        high=torch.nn.functional.pad(high, (0, pad, 0, pad)).contiguous(),
        low=torch.nn.functional.pad((r - high.double()).half(), (0, pad, 0, pad)).contiguous(),
        row_scale=torch.nn.functional.pad(t / TOP, (0, pad)).float().contiguous(),
        reach=float((c / s).abs().max()),
    )


class Rounded(NamedTuple):
    r"""Ellipsoids in float16 and the bound :math:`e = \mathtt{slope}\,\|x\| + \mathtt{offset} + \rho \tilde d`.

    ``matrix`` (K, F, F) holds :math:`H_{ji}` at [k, i, j], ``bias`` (K, F) is b, ``unit`` (K,) is u, ``relative`` is
    :math:`\rho`. Features are in the units of the bank's :class:`Split`.
    """

    matrix: Tensor
    bias: Float[Tensor, "K F"]
    unit: Float[Tensor, "K"]
    slope: Float[Tensor, "K"]
    offset: Float[Tensor, "K"]
    relative: float


def rounded(bank: Split) -> Rounded:
    """Round the ellipsoids of a bank to float16 and bound the error; norms are computed in float64 and rounded up."""
    # The triangular factor at [k, i, j], as in the split bank.
    r = (bank.high.double() + bank.low.double()) * bank.row_scale.double().unsqueeze(1)
    padded = r.shape[1]
    u = power_of_two_above(r.abs().amax(dim=(1, 2)).clamp_min(torch.finfo(torch.float32).tiny)) / TOP
    scaled = r / u[:, None, None]
    matrix = scaled.half()
    h = matrix.double()
    exact_bias = torch.einsum("kij,ki->kj", scaled, bank.centers.double())
    bias = exact_bias.float()
    size, terms = spectral_bound(h), spectral_bound(h.abs())
    sums = (padded / 16 + 8) * _SUM_UNIT
    root = padded**0.5
    center = torch.linalg.vector_norm(bank.centers.double(), dim=1)
    slope = spectral_bound(h - scaled) + (_HALF_UNIT + _LEAST_UNIT * root) * size + sums * terms
    offset = (
        # Squares below the range of float32 are lost from the norm of a point.
        2.0**-63 * root * slope
        + torch.linalg.vector_norm(exact_bias - bias.double(), dim=1)
        + _LEAST_UNIT * root * bank.reach * size
        + sums * (torch.linalg.vector_norm(exact_bias, dim=1) + terms * center)
    )
    return Rounded(
        matrix=matrix.contiguous(),
        bias=bias.contiguous(),
        unit=u.float(),
        slope=_rounded_up(slope * u),
        offset=_rounded_up(offset * u),
        relative=(padded + 16) * 2.0**-23,
    )


def spectral_bound(matrix: Float[Tensor, "K F F"]) -> Float[Tensor, "K"]:
    r"""A bound on spectral norms: :math:`\|A\|_2^{2^{m + 1}} = \|(A^\top A)^{2^m}\|_2 \le \|(A^\top A)^{2^m}\|_F`."""
    gram = matrix.mT @ matrix
    logarithm = torch.zeros(len(matrix), dtype=torch.float64, device=matrix.device)
    for step in range(_SQUARINGS + 1):
        size = torch.linalg.matrix_norm(gram).clamp_min(torch.finfo(torch.float64).tiny)
        logarithm += size.log() / 2**step
        if step < _SQUARINGS:
            gram = gram / size[:, None, None]
            gram = gram @ gram
    return torch.exp(logarithm / 2) * (1.0 + 1e-6)


def _rounded_up(numbers: Float[Tensor, "K"]) -> Float[Tensor, "K"]:
    """Convert to float32, increased by more than the rounding errors of a point's norm and of the bound."""
    return (numbers * (1.0 + 2.0**-16) + 1e-30).float()


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
    entry_words = int(_entry_words(training.entry_classes.bincount()).sum())
    return max(len(training.codes) * entry_words, len(training.cell_members)) < 2**31


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
    starts = np.concatenate([[0], np.cumsum(_entry_words(sizes))]).astype(np.int32)
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


def _entry_words(number: Any) -> Any:
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
