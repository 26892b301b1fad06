"""Class counts of the training points in the regions of a batch, as torch operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sepc_torch.model import torch_ops
from sepc_torch.model.precision import as_dtype
from sepc_torch.shapes import Bool, Float, Int

# Largest number of values of a temporary for which a few operators on long lists replace many on short ones.
_FEW_VALUES = 2**16


def _region_counts(
    inside: Bool[Tensor, "B K"],
    cell_sizes: Int[Tensor, "P"],
    cell_members: Int[Tensor, "M"],
    entry_cells: Int[Tensor, "E"],
    entry_classes: Int[Tensor, "E"],
    entry_counts: Int[Tensor, "E"],
    classes: int,
) -> Int[Tensor, "2 B C"]:
    """Class counts in the intersection (index 0) and the union (index 1) of the ellipsoids that hold each point.

    A sum over the members of a cell counts the ellipsoids that it shares with the point. A cell lies in the
    intersection if it shares all ellipsoids that hold the point, and in the union if it shares at least one. A sum over
    the entries of a class then counts its points. Rows of points in fewer than two ellipsoids stay zero; the rules do
    not use them.
    """
    out = torch.zeros(2, len(inside), classes, dtype=torch.int64, device=inside.device)
    held = inside.sum(dim=1)
    wanted = (held > 1).nonzero().squeeze(1)
    if len(wanted) == 0:
        return out
    if len(wanted) * (len(cell_members) + 2 * len(entry_cells)) <= _FEW_VALUES:
        inside = inside.index_select(0, wanted).index_select(1, cell_members).long()
        cells = torch.repeat_interleave(cell_sizes).expand_as(inside)
        shared = inside.new_zeros(len(inside), len(cell_sizes)).scatter_add_(1, cells, inside)
        region = torch.stack([shared == held.index_select(0, wanted).unsqueeze(1), shared > 0])
        counts = region.index_select(2, entry_cells) * entry_counts
        found = counts.new_zeros(2, len(inside), classes)
        out[:, wanted] = found.scatter_add_(2, entry_classes.long().expand_as(counts), counts)
        return out
    # Float32 represents integers exactly up to 2^24; larger training sets are counted in float64.
    exact = torch.float32 if int(entry_counts.sum()) < 2**24 else torch.float64
    by_class = entry_classes.argsort(stable=True)
    cells_of, numbers = entry_cells[by_class], entry_counts[by_class].to(exact)
    class_ends = _ends(entry_classes.bincount(minlength=classes))
    cell_ends = _ends(cell_sizes)
    for piece in wanted.split(torch_ops.rows_per_piece(numbers, inside.shape[1] + 3 * len(cell_sizes))):
        shared = _sums(cell_members, cell_ends, inside[piece].T.to(exact))
        for slot, region in ((0, shared == held[piece]), (1, shared > 0)):
            out[slot, piece] = _sums(cells_of, class_ends, region.to(exact), numbers).T.round().long()
    return out


def _ends(sizes: Int[Tensor, "n"]) -> Int[Tensor, "n+1"]:
    """Zero, and the end of each of n consecutive lists."""
    return torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()


def _sums(
    lists: Int[Tensor, "m"],
    ends: Int[Tensor, "e"],
    values: Float[Tensor, "v B"],
    weights: Float[Tensor, "m"] | None = None,
) -> Float[Tensor, "n B"]:
    """For each of n consecutive lists of indices, the weighted sum of the rows of ``values`` with these indices."""
    return torch.nn.functional.embedding_bag(
        lists, values.contiguous(), ends, mode="sum", per_sample_weights=weights, include_last_offset=True
    )


def _region_counts_shape(inside: Tensor, *tables_and_classes: Any) -> Tensor:
    return torch.empty(2, inside.shape[0], tables_and_classes[-1], dtype=torch.int64, device=inside.device)


def _expanded_counts(
    distance: Float[Tensor, "B K"],
    nearness: Float[Tensor, "B K"],
    wanted: Bool[Tensor, "B"],
    grid_classes: Int[Tensor, "T"],
    grid_counts: Int[Tensor, "T"],
    step_ids: Int[Tensor, "K L"],
    step_distances: Float[Tensor, "K L"],
    tail_distances: Float[Tensor, "K J"],
    classes: int,
    surface: float,
    tie: float,
) -> Int[Tensor, "2 B C"]:
    """Class counts in the nearest ellipsoid, expanded until it touches the point.

    If several ellipsoids are equally near, up to the relative difference ``tie``, all of them are expanded. Index 0 is
    the least class count over these ellipsoids, an upper bound of the count in their intersection. Index 1 is the
    greatest class count, a lower bound of the count in their union. Both bounds are exact if the points of the class in
    the expanded ellipsoids are nested sets.
    """
    out = torch.zeros(2, distance.shape[0], classes, dtype=torch.int64, device=distance.device)
    rows = wanted.nonzero().squeeze(1)
    if rows.shape[0] == 0:
        return out
    tables = grid_classes, grid_counts, step_ids, step_distances, tail_distances
    near = nearness.index_select(0, rows)
    least, nearest = near.min(dim=1)
    out[:, rows] = counts_in_reach(nearest, distance[rows, nearest], *tables, classes, surface)
    tied = near <= (least * (1.0 + tie)).unsqueeze(1)
    several = (tied.sum(dim=1) > 1).nonzero().squeeze(1)
    if several.shape[0] == 0:
        return out
    out[0, rows[several]] = torch.iinfo(torch.int64).max
    place, k = tied[several].nonzero().unbind(dim=1)
    row = rows[several[place]]
    found = counts_in_reach(k, distance[row, k], *tables, classes, surface)
    for slot, how in ((0, "amin"), (1, "amax")):
        out[slot].scatter_reduce_(0, row.unsqueeze(1).expand_as(found), found, how)
    return out


def counts_in_reach(
    k: Int[Tensor, "n"],
    reach: Float[Tensor, "n"],
    grid_classes: Int[Tensor, "T"],
    grid_counts: Int[Tensor, "T"],
    step_ids: Int[Tensor, "K L"],
    step_distances: Float[Tensor, "K L"],
    tail_distances: Float[Tensor, "K J"],
    classes: int,
    surface: float,
) -> Int[Tensor, "n C"]:
    """Class counts in ellipsoids k, each expanded to the distance ``reach``; reads values."""
    within, levels = reach * (1.0 + surface), tail_distances.shape[1]
    if k.shape[0] * step_ids.shape[1] <= _FEW_VALUES and not levels:
        # Every ellipsoid has a step for each count of the grid: the largest count within reach.
        steps = as_dtype(step_distances.index_select(0, k), within.dtype)
        reached = (steps <= within.unsqueeze(1)) * grid_counts
        found = torch.zeros(k.shape[0], classes, dtype=torch.int64, device=k.device)
        return found.scatter_reduce_(1, grid_classes.long().expand_as(reached), as_dtype(reached, torch.int64), "amax")
    starts = torch.searchsorted(grid_classes, torch.arange(classes + 1, dtype=torch.int32, device=k.device))
    longest = int(starts.diff().max())
    # A binary search needs about eight integers per class. With a tail, the int32 indices of the steps are copied too.
    size = torch_ops.rows_per_piece(starts, 8 * classes + (step_ids.shape[1] // 2 if levels else 0))
    pieces = []
    for some, distance in zip(k.split(size), within.split(size), strict=True):
        runs = starts.expand(some.shape[0], -1)
        if levels:  # the ellipsoids keep different steps
            runs = torch.searchsorted(step_ids[some], runs.int().contiguous())
        tables = grid_counts, step_distances, tail_distances
        pieces.append(counts_within(some, distance, runs, longest, starts, *tables))
    return torch.cat(pieces)


def _expanded_counts_shape(distance: Tensor, *arguments: Any) -> Tensor:
    return torch.empty(2, distance.shape[0], arguments[-3], dtype=torch.int64, device=distance.device)


def counts_within(
    k: Int[Tensor, "*n"],
    within: Float[Tensor, "*n"],
    runs: Int[Tensor, "*n s"],
    longest: int,
    starts: Int[Tensor, "s"],
    grid_counts: Int[Tensor, "T"],
    step_distances: Float[Tensor, "K L"],
    tail_distances: Float[Tensor, "K J"],
) -> Int[Tensor, "*n C"]:
    """Class counts within a distance of ellipsoid k, by binary search in its steps.

    The steps of a class that an ellipsoid keeps are the first of the class's grid, so that the number of steps within
    the distance says which count was reached. Each class has one of the ``runs`` of steps, of at most ``longest``, in
    the table of the ellipsoid; ``starts`` are those of the grids.
    """
    steps, levels = step_distances.shape[1], tail_distances.shape[1]
    low, high, within = runs[..., :-1], runs[..., 1:], within.unsqueeze(-1)
    base, first, flat = (k * steps).unsqueeze(-1), low, step_distances.reshape(-1)
    for _ in range(longest.bit_length()):
        middle = (low + high) // 2
        passed = (middle < high) & (flat[base + middle.clamp_max(steps - 1)].to(within.dtype) <= within)
        low, high = torch.where(passed, middle + 1, low), torch.where(passed, high, middle)
    reached = low - first
    counts = torch.where(reached > 0, grid_counts[(starts[:-1] + reached - 1).clamp_min(0)], 0)
    if levels:
        level = (tail_distances[k].to(within.dtype) <= within).sum(dim=-1, keepdim=True)
        counts = counts + (grid_counts[(starts[1:] - 1).clamp_min(0)] - counts) * level // levels
    return counts


region_counts = torch_ops.operator(
    "region_counts(Tensor inside, Tensor cell_sizes, Tensor cell_members, Tensor entry_cells, Tensor entry_classes, "
    "Tensor entry_counts, int classes) -> Tensor",
    _region_counts,
    _region_counts_shape,
)
expanded_counts = torch_ops.operator(
    "expanded_counts(Tensor distance, Tensor nearness, Tensor wanted, Tensor grid_classes, Tensor grid_counts, "
    "Tensor step_ids, Tensor step_distances, Tensor tail_distances, int classes, float surface, float tie) -> Tensor",
    _expanded_counts,
    _expanded_counts_shape,
)
