r"""The batched computations of the frozen model, as torch operators.

As operators they are opaque to ``torch.compile`` and ``torch.export``: both see one node each, without a graph
break, while the work inside runs in pieces of a bounded size and may look at the data. Only distances are
differentiable, in ``z``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from sepc_torch.shapes import Bool, Float, Int

# Bytes of the largest temporary. On a CPU a piece should stay in the cache, on a GPU it should fill the machine.
CPU_BYTES = 2 * 2**20
GPU_BYTES = 256 * 2**20
# Newton's method on the secular equation: 8 steps are usual; thin ellipsoids far away need the most.
_SECULAR_STEPS = 40


class _Exactness:
    """The precision of float32 products is a setting of the whole process: full while any thread asks for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._restore: Callable[[], None] = lambda: None

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._restore = _raise_precision()
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._restore()


def _raise_precision() -> Callable[[], None]:
    """Set products to full precision; what is returned sets them back."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by the newer names, one for each backend, which the older function does not read
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


_EXACTNESS = _Exactness()


@contextmanager
def full_precision(z: Tensor) -> Iterator[None]:
    """Matrix products in the tensor's own precision, whatever autocast and TF32 settings say."""
    with torch.autocast(z.device.type, enabled=False):
        _EXACTNESS.enter()
        try:
            yield
        finally:
            _EXACTNESS.leave()


def rows_per_piece(like: Tensor, values_per_row: int) -> int:
    """How many rows of a batch to take at once, for a temporary with so many values a row."""
    budget = CPU_BYTES if like.device.type == "cpu" else GPU_BYTES
    return max(1, budget // (max(values_per_row, 1) * like.element_size()))


def _distances(
    z: Float[Tensor, "B D"], centers: Float[Tensor, "K D"], whiteners: Float[Tensor, "K D D"]
) -> Float[Tensor, "B K"]:
    r"""Mahalanobis distances :math:`d_k(z) = \|W_k (z - c_k)\|`, in pieces of rows.

    The difference is taken first: :math:`W z + b` would lose the digits that thin ellipsoids far from the origin need.
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
    r"""The gradient :math:`\sum_k g_k W_k^\top W_k (z - c_k) / d_k` in z; zero where there is none, as at a centre."""
    out = torch.empty_like(z)
    rows = rows_per_piece(z, centers.numel())
    factor = torch.where(output > 0, grad / output, torch.zeros_like(grad))
    with full_precision(z):
        for start in range(0, len(z), rows):
            whitened = torch.bmm(z[start : start + rows] - centers[:, None, :], whiteners.mT)
            whitened *= factor[start : start + rows].T.unsqueeze(2)
            out[start : start + rows] = torch.bmm(whitened, whiteners).sum(dim=0)
    # Nothing was asked of rows without a distance: their gradient is zero, though zero times their offsets is NaN.
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
    r"""Euclidean distance to each ellipsoid for the wanted rows, zero inside and for the rest.

    In the axes of an ellipsoid (rows of ``axes``, lengths ``semi_axes``) the nearest point solves
    the secular equation
    :math:`\sum_i (e_i y_i / (e_i^2 + t))^2 = 1`; see :func:`sepc_torch.ellipsoid.euclidean_distance`.
    """
    out = z.new_zeros(len(z), len(centers))
    index = wanted.nonzero().squeeze(1)
    rows = rows_per_piece(z, 4 * centers.numel())
    # In units of a power of two about the longest axis, which rounds nothing, and lets squares overflow much later.
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
            # Of lengths that overflow nothing is known but that they are long.
            out[piece] = torch.where(outside, torch.where(distance.isnan(), torch.inf, distance), 0).T
    return out


def _euclidean_distances_shape(z: Tensor, centers: Tensor, axes: Tensor, semi_axes: Tensor, wanted: Tensor) -> Tensor:
    return z.new_empty(z.shape[0], centers.shape[0])


def _region_counts(
    inside: Bool[Tensor, "B K"], cells: Bool[Tensor, "P K"], counts: Int[Tensor, "P C"]
) -> Int[Tensor, "2 B C"]:
    """Training points of each class in all, and in any, of the ellipsoids that hold each point.

    A cell lies in all of them if it shares as many ellipsoids with the point as hold it, in any if it shares one:
    both are a matrix product. Rows that fewer than two ellipsoids hold need no region and stay zero.
    """
    out = torch.zeros(2, len(inside), counts.shape[1], dtype=torch.int64, device=inside.device)
    held = inside.sum(dim=1)
    # float32 holds the integers of both products exactly up to 2^24; larger training sets are counted in float64.
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
    """Training points of each class in the nearest ellipsoid, expanded to touch the point.

    Where several are nearest all of them are expanded; what is known of each alone bounds the counts in all of them
    (the least) and in any of them (the greatest), exactly if they are nested or share no point of a class.
    """
    out = torch.zeros(2, len(distance), sorted_distances.shape[1], dtype=torch.int64, device=distance.device)
    rows = wanted.nonzero().squeeze(1)
    if len(rows) == 0:
        return out
    near = nearness[rows]
    least, nearest = near.min(dim=1)
    out[:, rows] = _reached(sorted_distances, counts_at, nearest, distance[rows, nearest] * (1.0 + surface))
    tied = near <= (least * (1.0 + tie)).unsqueeze(1)
    several = (tied.sum(dim=1) > 1).nonzero().squeeze(1)
    if len(several):
        row, k = tied[several].nonzero(as_tuple=True)
        found = _reached(sorted_distances, counts_at, k, distance[rows[several[row]], k] * (1.0 + surface))
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


def _reached(
    sorted_distances: Float[Tensor, "K C Q"],
    counts_at: Int[Tensor, "C Q"],
    k: Int[Tensor, "n"],
    within: Float[Tensor, "n"],
) -> Int[Tensor, "n C"]:
    """Training points of each class within a distance of ellipsoid k, by binary search."""
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


# The library itself rather than torch.library.custom_op, which imports the compiler at the first call (a second)
# and costs more at every one.
_LIBRARY = torch.library.Library("sepc_torch", "DEF")


T = TypeVar("T", Tensor, tuple[Tensor, Tensor])


def operator(schema: str, function: Callable[..., T], shape: Callable[..., T]) -> Callable[..., T]:
    """Register a function, and what is known of its result without running it, under the name in the schema."""
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
    """Give an operator a gradient, from the tensors it was called with, its result and the gradient of that."""

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
    "expanded_counts(Tensor distance, Tensor nearness, Tensor wanted, Tensor sorted_distances, Tensor counts_at, float surface, "
    "float tie) -> Tensor",
    _expanded_counts,
    _expanded_counts_shape,
)
