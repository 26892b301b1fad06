r"""Custom torch operators: distances and class counts for batches; also operator registration, full precision.

``torch.compile`` and ``torch.export`` treat each operator as one opaque node, without a graph break. Inside, an
operator processes the batch in pieces of bounded memory and can read values. Only ``distances`` is differentiable, in
``z``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from sepc_torch.shapes import Bool, Float, Int

# Bytes of the largest temporary. On a CPU a piece should fit into the cache; on a GPU it should occupy all cores.
CPU_BYTES = 2 * 2**20
GPU_BYTES = 256 * 2**20
# Limit of Newton steps on the secular equation. The loop stops at convergence; distant thin ellipsoids need most steps.
_SECULAR_STEPS = 40


class _FullPrecision:
    """Reference-counted switch to full float32 matrix products.

    Torch keeps the precision of float32 matrix products as a setting of the whole process. The setting is "full" while
    at least one thread is between ``enter`` and ``leave``; the last ``leave`` restores the user's setting.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._restore: Callable[[], None] = lambda: None

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._restore = _set_full_precision()
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._restore()


def _set_full_precision() -> Callable[[], None]:
    """Set float32 matrix products to full precision; return a function that restores the previous setting."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # raised if the user set fp32_precision per backend, which this older function cannot read
        backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
        precisions = [backend.fp32_precision for backend in backends]
        _set_precisions(backends, ["ieee" for _ in backends])
        return lambda: _set_precisions(backends, precisions)
    if before == "highest":
        return lambda: None
    torch.set_float32_matmul_precision("highest")
    return lambda: torch.set_float32_matmul_precision(before)


def _set_precisions(backends: list[Any], precisions: list[str]) -> None:
    for backend, precision in zip(backends, precisions, strict=True):
        backend.fp32_precision = precision


_FULL_PRECISION = _FullPrecision()


@contextmanager
def full_precision(z: Tensor) -> Iterator[None]:
    """Context in which matrix products use the tensor's own dtype, regardless of autocast and TF32 settings."""
    with torch.autocast(z.device.type, enabled=False):
        _FULL_PRECISION.enter()
        try:
            yield
        finally:
            _FULL_PRECISION.leave()


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
    out = z.new_empty(count, len(centers))
    rows = rows_per_piece(z, len(centers) * dim)
    transposed = whiteners.mT
    with full_precision(z):
        for start in range(0, count, rows):
            offsets = z[start : start + rows] - centers[:, None, :]
            whitened = torch.bmm(offsets, transposed)
            torch.linalg.vector_norm(whitened, dim=2, out=out[start : start + rows].T)
    return out


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
            for _ in range(_SECULAR_STEPS):
                denominator = e * e + t.unsqueeze(2)
                terms = (e * y / denominator).square()
                norm = terms.sum(dim=2).sqrt()
                step = (norm - 1) * norm.square() / (terms / denominator).sum(dim=2)
                ahead = t + torch.where(outside, step.clamp_min(0), 0)
                if bool((ahead <= t * (1 + 4 * torch.finfo(t.dtype).eps)).all()):
                    break
                t = ahead
            distance = torch.linalg.vector_norm(t.unsqueeze(2) * y / (e * e + t.unsqueeze(2)), dim=2) * unit
            # NaN comes from overflow, so the distance is too large for the dtype: report infinity.
            out[piece] = torch.where(outside, torch.where(distance.isnan(), torch.inf, distance), 0).T
    return out


def _euclidean_distances_shape(z: Tensor, centers: Tensor, axes: Tensor, semi_axes: Tensor, wanted: Tensor) -> Tensor:
    return z.new_empty(z.shape[0], centers.shape[0])


def _region_counts(
    inside: Bool[Tensor, "B K"], cells: Bool[Tensor, "P K"], counts: Int[Tensor, "P C"]
) -> Int[Tensor, "2 B C"]:
    """Class counts in the intersection (index 0) and the union (index 1) of the ellipsoids that hold each point.

    A matrix product counts the ellipsoids that a cell shares with the point. A cell lies in the intersection if it
    shares all ellipsoids that hold the point, and in the union if it shares at least one. Rows of points in fewer than
    two ellipsoids stay zero; the rules do not use them.
    """
    out = torch.zeros(2, len(inside), counts.shape[1], dtype=torch.int64, device=inside.device)
    held = inside.sum(dim=1)
    # Float32 represents integers exactly up to 2^24; larger training sets are counted in float64.
    exact = torch.float32 if int(counts.sum()) < 2**24 else torch.float64
    patterns, numbers = cells.to(exact).T.contiguous(), counts.to(exact)
    rows = rows_per_piece(patterns, 3 * len(cells))
    with full_precision(patterns):
        for piece in (held > 1).nonzero().squeeze(1).split(rows):
            shared = inside[piece].to(exact) @ patterns
            everywhere = (shared == held[piece].unsqueeze(1)).to(exact)
            out[0, piece] = (everywhere @ numbers).round().long()
            out[1, piece] = ((shared > 0).to(exact) @ numbers).round().long()
    return out


def _region_counts_shape(inside: Tensor, cells: Tensor, counts: Tensor) -> Tensor:
    return torch.empty(2, inside.shape[0], counts.shape[1], dtype=torch.int64, device=inside.device)


def _expanded_counts(
    distance: Float[Tensor, "B K"],
    nearness: Float[Tensor, "B K"],
    wanted: Bool[Tensor, "B"],
    sorted_distances: Float[Tensor, "K C Q"],
    counts_at: Int[Tensor, "C Q"],
    surface: float,
    tie: float,
) -> Int[Tensor, "2 B C"]:
    """Class counts in the nearest ellipsoid, expanded until it touches the point.

    If several ellipsoids are equally near, all of them are expanded. Index 0 is the least class count over these
    ellipsoids, an upper bound of the count in their intersection. Index 1 is the greatest class count, a lower bound of
    the count in their union. Both bounds are exact if the points of the class in the expanded ellipsoids are nested
    sets.
    """
    out = torch.zeros(2, len(distance), sorted_distances.shape[1], dtype=torch.int64, device=distance.device)
    rows = wanted.nonzero().squeeze(1)
    if len(rows) == 0:
        return out
    near = nearness[rows]
    least, nearest = near.min(dim=1)
    out[:, rows] = _counts_within(sorted_distances, counts_at, nearest, distance[rows, nearest] * (1.0 + surface))
    tied = near <= (least * (1.0 + tie)).unsqueeze(1)
    several = (tied.sum(dim=1) > 1).nonzero().squeeze(1)
    if len(several):
        row, k = tied[several].nonzero(as_tuple=True)
        found = _counts_within(sorted_distances, counts_at, k, distance[rows[several[row]], k] * (1.0 + surface))
        index = row.unsqueeze(1).expand_as(found)
        for slot, how in ((0, "amin"), (1, "amax")):
            start = torch.zeros(len(several), found.shape[1], dtype=found.dtype, device=found.device)
            out[slot, rows[several]] = start.scatter_reduce(0, index, found, how, include_self=False)
    return out


def _expanded_counts_shape(
    distance: Tensor,
    nearness: Tensor,
    wanted: Tensor,
    sorted_distances: Tensor,
    counts_at: Tensor,
    surface: float,
    tie: float,
) -> Tensor:
    return torch.empty(2, distance.shape[0], sorted_distances.shape[1], dtype=torch.int64, device=distance.device)


def _counts_within(
    sorted_distances: Float[Tensor, "K C Q"],
    counts_at: Int[Tensor, "C Q"],
    k: Int[Tensor, "n"],
    within: Float[Tensor, "n"],
) -> Int[Tensor, "n C"]:
    """Class counts within a distance of ellipsoid k, by binary search in its sorted distances."""
    _, classes, size = sorted_distances.shape
    c = torch.arange(classes, device=k.device)
    base = (k.unsqueeze(1) * classes + c) * size
    low = torch.zeros_like(base)
    high = torch.full_like(base, size)
    flat = sorted_distances.reshape(-1)
    for _ in range(size.bit_length()):
        middle = (low + high) // 2
        passed = (middle < size) & (flat[base + middle.clamp_max(size - 1)] <= within.unsqueeze(1))
        low, high = torch.where(passed, middle + 1, low), torch.where(passed, high, middle)
    padded = torch.cat([counts_at.new_zeros(classes, 1), counts_at], dim=1)
    return padded[c, low]


# torch.library.Library rather than torch.library.custom_op, which imports the compiler at the first call and has a
# higher overhead per call.
_LIBRARY = torch.library.Library("sepc_torch", "DEF")


T = TypeVar("T", Tensor, tuple[Tensor, Tensor])


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
    "region_counts(Tensor inside, Tensor cells, Tensor counts) -> Tensor", _region_counts, _region_counts_shape
)
expanded_counts = operator(
    "expanded_counts(Tensor distance, Tensor nearness, Tensor wanted, Tensor sorted_distances, Tensor counts_at, "
    "float surface, float tie) -> Tensor",
    _expanded_counts,
    _expanded_counts_shape,
)
