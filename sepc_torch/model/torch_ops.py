r"""Custom torch operators: registration, and distances for batches.

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
from sepc_torch.shapes import Bool, Float

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
    rows = rows_per_piece(z, centers.shape[0] * dim)
    centers, transposed = centers.unsqueeze(1), whiteners.mT
    with full_precision(z):
        pieces = [
            torch.linalg.vector_norm(torch.bmm(piece - centers, transposed), dim=2).T
            for piece in ((z,) if count <= rows else z.split(rows))
        ]
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)


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
        A function that calls the operator or, where neither gradients nor traces nor modes could tell, ``function``.
    """
    registered = _register(schema, function, shape)

    def call(*arguments: Any) -> T:
        if torch.compiler.is_compiling() or _observed(arguments[0]) or _differentiable(arguments):
            return registered(*arguments)
        return function(*arguments)  # which costs less

    return call


def _observed(tensor: Tensor) -> bool:
    """Whether a mode or a subclass of tensors, such as those of a trace, handles the operators that are called."""
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    return modes > 0 or type(tensor) is not Tensor or torch._C._get_tracing_state() is not None


def _differentiable(arguments: tuple[Any, ...]) -> bool:
    """Whether gradients of an argument are wanted; tensors in lists never have any."""
    return torch.is_grad_enabled() and any(isinstance(given, Tensor) and given.requires_grad for given in arguments)


def _register(schema: str, function: Callable[..., T], shape: Callable[..., T]) -> Callable[..., T]:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sepc_torch::{name}", shape, lib=_LIBRARY)
    return getattr(torch.ops.sepc_torch, name).default


# The functions of all opaque operators, for graphs without these operators.
OPAQUE: dict[Any, Callable[..., Any]] = {}


def opaque(schema: str, function: Callable[..., T], shape: Callable[..., T]) -> Callable[..., T]:
    """Register a function that ``torch.compile`` sees as one operator, unless gradients are wanted.

    Compiled results are then those of plain calls, and there is less to compile. Elsewhere the function itself is
    called, which costs less. The arguments are those of :func:`operator`.
    """
    registered = _register(schema, function, shape)
    OPAQUE[registered] = function

    def call(*arguments: Any) -> T:
        hidden = torch.compiler.is_compiling() and not _differentiable(arguments)
        return registered(*arguments) if hidden else function(*arguments)

    return call


# Points (B, D) relative to an origin (D,) of the same dtype.
relative = opaque(
    "relative(Tensor z, Tensor origin) -> Tensor", lambda z, origin: z - origin, lambda z, origin: z.new_empty(z.shape)
)
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
