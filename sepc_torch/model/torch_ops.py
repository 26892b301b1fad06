r"""Custom torch operators: distances and class counts for batches; also operator registration.

``torch.compile`` and ``torch.export`` treat each operator as one opaque node, without a graph break. Inside, an
operator processes the batch in pieces of bounded memory and can read values. Only ``distances`` is differentiable, in
``z``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from sepc_torch.model.precision import full_precision as full_precision
from sepc_torch.shapes import Bool, Float, Int

# Bytes of the largest temporary. On a CPU a piece should fit into the cache; on a GPU it should occupy all cores.
CPU_BYTES = 2 * 2**20
GPU_BYTES = 256 * 2**20
# Rows from which a CPU computes distances with points as columns, and the largest number of columns of a piece.
_COLUMN_ROWS = 16
_COLUMN_PIECE = 1024
# Limit of Newton steps on the secular equation. The loop stops at convergence; distant thin ellipsoids need most steps.
SECULAR_STEPS = 40


def rows_per_piece(like: Tensor, values_per_row: int) -> int:
    """Number of batch rows per piece, so that a temporary with ``values_per_row`` values per row stays in budget."""
    budget = CPU_BYTES if like.device.type == "cpu" else GPU_BYTES
    return max(1, budget // (max(values_per_row, 1) * like.element_size()))


def _distances(
    z: Float[Tensor, "B D"], centers: Float[Tensor, "K D"], whiteners: Float[Tensor, "K D D"]
) -> Float[Tensor, "B K"]:
    r"""Mahalanobis distances :math:`d_k(z) = \|W_k (z - c_k)\|`, in pieces of rows.

    The subtraction comes first: for thin ellipsoids far from the origin, :math:`W z + b` would lose digits to
    cancellation.
    """
    count, dim = z.shape
    if z.device.type == "cpu" and count >= _COLUMN_ROWS:
        return _column_distances(z, centers, whiteners)
    out = z.new_empty(count, len(centers))
    rows = rows_per_piece(z, len(centers) * dim)
    transposed = whiteners.mT
    with full_precision(z):
        for start in range(0, count, rows):
            offsets = z[start : start + rows] - centers[:, None, :]
            whitened = torch.bmm(offsets, transposed)
            torch.linalg.vector_norm(whitened, dim=2, out=out[start : start + rows].T)
    return out


def _column_distances(
    z: Float[Tensor, "B D"], centers: Float[Tensor, "K D"], whiteners: Float[Tensor, "K D D"]
) -> Float[Tensor, "B K"]:
    """Mahalanobis distances with the points as columns, in pieces of rows and of ellipsoids.

    Sums over the dimensions then run over whole columns, which CPUs add side by side: a third of the time.
    """
    count, dim = z.shape
    out = z.new_empty(len(centers), count)
    values = CPU_BYTES // 4 // z.element_size()  # of a temporary; there are two, and the whiteners
    rows = max(1, min(count, _COLUMN_PIECE, values // dim))
    some = max(1, values // (rows * dim))
    with full_precision(z):
        for start in range(0, count, rows):
            columns = z[start : start + rows].T.contiguous()
            for first in range(0, len(centers), some):
                block = slice(first, first + some)
                whitened = torch.bmm(whiteners[block], columns - centers[block, :, None])
                out[block, start : start + rows] = whitened.square_().sum(dim=1)
    return out.sqrt_().T.contiguous()


def _distances_shape(z: Tensor, centers: Tensor, whiteners: Tensor) -> Tensor:
    return z.new_empty(z.shape[0], centers.shape[0])


def _distances_gradient(
    z: Float[Tensor, "B D"],
    centers: Float[Tensor, "K D"],
    whiteners: Float[Tensor, "K D D"],
    output: Float[Tensor, "B K"],
    grad: Float[Tensor, "B K"],
) -> Float[Tensor, "B D"]:
    r"""The gradient :math:`\sum_k g_k W_k^\top W_k (z - c_k) / d_k` in z; terms with :math:`d_k = 0` are zero."""
    out = torch.empty_like(z)
    rows = rows_per_piece(z, centers.numel())
    factor = torch.where(output > 0, grad / output, torch.zeros_like(grad))
    with full_precision(z):
        for start in range(0, len(z), rows):
            whitened = torch.bmm(z[start : start + rows] - centers[:, None, :], whiteners.mT)
            whitened *= factor[start : start + rows].T.unsqueeze(2)
            out[start : start + rows] = torch.bmm(whitened, whiteners).sum(dim=0)
    # Rows without a finite distance get no incoming gradient; their sum is NaN (zero times NaN), so zero replaces it.
    return torch.where((factor != 0).any(dim=1, keepdim=True), out, 0.0)


def _distances_gradient_shape(z: Tensor, centers: Tensor, whiteners: Tensor, output: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(z)


def _euclidean_distances(
    z: Float[Tensor, "B D"],
    centers: Float[Tensor, "K D"],
    axes: Float[Tensor, "K D D"],
    semi_axes: Float[Tensor, "K D"],
    wanted: Bool[Tensor, "B"],
) -> Float[Tensor, "B K"]:
    r"""Euclidean distances to each ellipsoid for the wanted rows; zero for points inside and for all other rows.

    Let y be a point in the principal axes of an ellipsoid (rows of ``axes``, lengths e = ``semi_axes``). Newton's
    method finds the root t of the secular equation :math:`\sum_i (e_i y_i / (e_i^2 + t))^2 = 1`, which gives the
    nearest point of the surface; see :func:`sepc_torch.ellipsoid.euclidean_distance`.
    """
    out = z.new_zeros(len(z), len(centers))
    index = wanted.nonzero().squeeze(1)
    rows = rows_per_piece(z, 4 * centers.numel())
    # The unit is a power of two near the longest semi-axis: division is exact, and squares overflow much later.
    largest = semi_axes.amax(dim=1)
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)[:, None]
    e = (semi_axes / unit)[:, None, :]
    with full_precision(z):
        for piece in index.split(rows):
            y = torch.bmm(z[piece] - centers[:, None, :], axes.mT).abs() / unit.unsqueeze(2)
            t = (e * y - e * e).amax(dim=2).clamp_min(0)
            outside = (y / e).square().sum(dim=2) > 1
            for _ in range(SECULAR_STEPS):
                ahead = t + torch.where(outside, secular_step(y, e, t), 0)
                if bool((ahead <= t * (1 + 4 * torch.finfo(t.dtype).eps)).all()):
                    break
                t = ahead
            distance = torch.linalg.vector_norm(t.unsqueeze(2) * y / (e * e + t.unsqueeze(2)), dim=2) * unit
            # NaN comes from overflow, so the distance is too large for the dtype: report infinity.
            out[piece] = torch.where(outside, torch.where(distance.isnan(), torch.inf, distance), 0).T
    return out


def secular_step(y: Float[Tensor, "K n D"], e: Float[Tensor, "K 1 D"], t: Float[Tensor, "K n"]) -> Float[Tensor, "K n"]:
    r"""Newton's step on :math:`(\sum_i (e_i y_i / (e_i^2 + t))^2)^{-1/2} = 1`, zero instead of a step back."""
    denominator = e * e + t.unsqueeze(2)
    terms = (e * y / denominator).square()
    norm = terms.sum(dim=2).sqrt()
    step = (norm - 1) * norm.square() / (terms / denominator).sum(dim=2)
    return step.clamp_min(0)


def _euclidean_distances_shape(z: Tensor, centers: Tensor, axes: Tensor, semi_axes: Tensor, wanted: Tensor) -> Tensor:
    return z.new_empty(z.shape[0], centers.shape[0])


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
    # Float32 represents integers exactly up to 2^24; larger training sets are counted in float64.
    exact = torch.float32 if int(entry_counts.sum()) < 2**24 else torch.float64
    by_class = entry_classes.argsort(stable=True)
    cells_of, numbers = entry_cells[by_class], entry_counts[by_class].to(exact)
    class_ends = _ends(entry_classes.bincount(minlength=classes))
    cell_ends = _ends(cell_sizes)
    for piece in wanted.split(rows_per_piece(numbers, inside.shape[1] + 3 * len(cell_sizes))):
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

    If several ellipsoids are equally near, all of them are expanded. Index 0 is the least class count over these
    ellipsoids, an upper bound of the count in their intersection. Index 1 is the greatest class count, a lower bound of
    the count in their union. Both bounds are exact if the points of the class in the expanded ellipsoids are nested
    sets.
    """
    out = torch.zeros(2, len(distance), classes, dtype=torch.int64, device=distance.device)
    rows = wanted.nonzero().squeeze(1)
    if len(rows) == 0:
        return out
    starts = torch.searchsorted(grid_classes, torch.arange(classes + 1, dtype=torch.int32, device=distance.device))
    longest = int(starts.diff().max())
    # A binary search needs about eight integers per class. With a tail, the int32 indices of the steps are copied too.
    copied = step_ids.shape[1] // 2 if tail_distances.shape[1] else 0
    size = rows_per_piece(out, 8 * classes + copied)

    def counts(k: Int[Tensor, "n"], row: Int[Tensor, "n"]) -> Int[Tensor, "n C"]:
        runs = starts.expand(len(k), -1)
        if tail_distances.shape[1]:  # the ellipsoids keep different steps
            runs = torch.searchsorted(step_ids[k], runs.int().contiguous())
        within = distance[row, k] * (1.0 + surface)
        return counts_within(k, within, runs, longest, starts, grid_counts, step_distances, tail_distances)

    near = nearness[rows]
    least, nearest = near.min(dim=1)
    for k, row in zip(nearest.split(size), rows.split(size), strict=True):
        out[:, row] = counts(k, row)
    tied = near <= (least * (1.0 + tie)).unsqueeze(1)
    several = (tied.sum(dim=1) > 1).nonzero().squeeze(1)
    if len(several) == 0:
        return out
    out[0, rows[several]] = torch.iinfo(torch.int64).max
    for pairs in tied[several].nonzero().split(size):
        row, k = rows[several[pairs[:, 0]]], pairs[:, 1]
        found = counts(k, row)
        for slot, how in ((0, "amin"), (1, "amax")):
            out[slot].scatter_reduce_(0, row.unsqueeze(1).expand_as(found), found, how)
    return out


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


# torch.library.Library rather than torch.library.custom_op, which imports the compiler at the first call and has a
# higher overhead per call.
_LIBRARY = torch.library.Library("sepc_torch", "DEF")


T = TypeVar("T", Tensor, tuple[Tensor, Tensor], list[Tensor])


def operator(schema: str, function: Callable[..., T], shape: Callable[..., T]) -> Callable[..., T]:
    """Register a function as the torch operator ``sepc_torch::<name in the schema>``.

    Args:
        schema: Name and signature of the operator.
        function: The implementation.
        shape: Returns an empty tensor of the result's shape and dtype, for tracing without running ``function``.

    Returns:
        The callable operator.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sepc_torch::{name}", shape, lib=_LIBRARY)
    return getattr(torch.ops.sepc_torch, name).default


distances = operator("distances(Tensor z, Tensor centers, Tensor whiteners) -> Tensor", _distances, _distances_shape)
distances_gradient = operator(
    "distances_gradient(Tensor z, Tensor centers, Tensor whiteners, Tensor output, Tensor grad) -> Tensor",
    _distances_gradient,
    _distances_gradient_shape,
)


def differentiable(name: str, backward: Callable[..., tuple[Tensor | None, ...]]) -> None:
    """Register the gradient of an operator.

    Args:
        name: Name of the operator without namespace.
        backward: Maps the operator's input tensors, its output and the output's gradient to one gradient per argument,
            or None for an argument without a gradient.
    """

    def setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)), output)

    def call(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        return backward(*ctx.saved_tensors, grad)

    torch.library.register_autograd(f"sepc_torch::{name}", call, setup_context=setup, lib=_LIBRARY)


differentiable("distances", lambda *tensors: (distances_gradient(*tensors), None, None))
euclidean_distances = operator(
    "euclidean_distances(Tensor z, Tensor centers, Tensor axes, Tensor semi_axes, Tensor wanted) -> Tensor",
    _euclidean_distances,
    _euclidean_distances_shape,
)
region_counts = operator(
    "region_counts(Tensor inside, Tensor cell_sizes, Tensor cell_members, Tensor entry_cells, Tensor entry_classes, "
    "Tensor entry_counts, int classes) -> Tensor",
    _region_counts,
    _region_counts_shape,
)
expanded_counts = operator(
    "expanded_counts(Tensor distance, Tensor nearness, Tensor wanted, Tensor grid_classes, Tensor grid_counts, "
    "Tensor step_ids, Tensor step_distances, Tensor tail_distances, int classes, float surface, float tie) -> Tensor",
    _expanded_counts,
    _expanded_counts_shape,
)
