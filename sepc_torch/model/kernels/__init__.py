"""CUDA kernels of the frozen classifier, as torch operators: distances, and decisions from points or distances.

A batch is processed in pieces, so that memory does not grow with rows times ellipsoids, and without synchronising with
the host. Importing this package does not import Triton; the first launch does.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sepc_torch.model import torch_ops
from sepc_torch.model.kernels.decision_tables import RuleTables, addressable, rule_tables
from sepc_torch.model.kernels.launch import available, on_device, within_32_bits
from sepc_torch.model.kernels.rounded_ellipsoids import Rounded, rounded
from sepc_torch.model.kernels.tables import Split, block_size, split
from sepc_torch.model.rules import TrainingCounts
from sepc_torch.shapes import Float, Int

__all__ = [
    "Kernel",
    "Kernels",
    "Split",
    "addressable",
    "available",
    "decide_distances",
    "decide_points",
    "fused_distances",
    "kernels_for",
    "possible",
    "split",
    "worth_screening",
]

Kernel = Literal["auto", "triton", "torch"]

# Distances of one piece: 256 MiB in float32.
_PIECE = 2**26
# Below these sizes, selecting and refining cost more than screening saves (measured on an H200).
_SCREEN_ROWS = 2**15
_SCREEN_WORK = 2048
# Above this row scale, the squares of 64 sums of 64 products of numbers up to 2^14 could overflow float32.
_MOST_ROW_SCALE = 2.0**27


class Kernels(NamedTuple):
    """A model as the kernels read it: rule tables, and, for a float32 model, split and rounded ellipsoids."""

    tables: RuleTables
    bank: Split | None
    coarse: Rounded | None


def possible(like: Tensor) -> bool:
    """Whether the distance kernel can run on the device and in the dtype of a tensor."""
    return available(like) and like.dtype == torch.float32


def kernels_for(
    offsets: Float[Tensor, "K D"],
    whiteners: Float[Tensor, "K D D"],
    prepared: Split | None,
    training: TrainingCounts,
    totals: Int[Tensor, "C"],
) -> Kernels:
    """Lay out a model for the kernels.

    Args:
        offsets: Centres relative to the origin.
        whiteners: Whiteners.
        prepared: The split ellipsoids in the model's order, or None if the distance kernel cannot run.
        training: Training counts.
        totals: Training points of each class.
    """
    tables = rule_tables(training, totals)
    if prepared is None:
        return Kernels(tables, None, None)
    order = tables.order.long()
    is_sorted = bool((order.diff() > 0).all())
    bank = prepared if is_sorted else split(offsets[order], whiteners[order])
    # Squares of the accurate kernel must not overflow where those of the estimate do not.
    screens = worth_screening(*offsets.shape) and float(bank.row_scale.max()) < _MOST_ROW_SCALE
    return Kernels(tables, bank, rounded(bank) if screens else None)


def worth_screening(count: int, dim: int) -> bool:
    """Whether large batches are screened for this number of ellipsoids and dimensions.

    More than 64 dimensions do not fit the registers; with too many ellipsoids a piece has too few rows.

    >>> worth_screening(128, 64), worth_screening(10, 64), worth_screening(128, 65), worth_screening(5000, 64)
    (True, False, False, False)
    """
    block = block_size(dim)
    return dim <= block and count * block >= _SCREEN_WORK and count * _SCREEN_ROWS <= _PIECE


def fused_distances(
    z: Tensor,
    origin: Float[Tensor, "D"],
    offsets: Float[Tensor, "K D"],
    whiteners: Float[Tensor, "K D D"],
    bank: Split,
) -> Float[Tensor, "B K"]:
    r"""Mahalanobis distances :math:`\|W_k (z - c_k)\|` on CUDA, as accurate as float32, differentiable in z.

    Args:
        z: Points (B, D) in float32, float16 or bfloat16.
        origin: The origin of the centres.
        offsets: Centres relative to the origin, for the gradient.
        whiteners: Whiteners, for the gradient.
        bank: The same ellipsoids, split.
    """
    return _fused_distances(z, origin, offsets, whiteners, *bank)


def decide_points(
    z: Tensor, given: Int[Tensor, "B"] | None, origin: Float[Tensor, "D"], kernels: Kernels, *, screening: bool
) -> tuple[Int[Tensor, "I B"], Float[Tensor, "F B"]]:
    """Decide for points.

    Args:
        z: The points (B, D) in float32, float16 or bfloat16.
        given: Class indices to judge besides the model's own label.
        origin: The origin of the centres.
        kernels: The model.
        screening: Whether to screen large batches in float16. The decisions are the same.

    Returns:
        Label, rule, nearest and runner-up; trust, distance and margin. With given labels also the runner-up to them,
        and their trust and margin.
    """
    tables, bank, coarse = kernels
    if bank is None:
        raise ValueError("The model is not in float32: use decide_distances with the distances of its bank.")
    coarse = coarse if screening else None
    if not torch.compiler.is_compiling():  # passing dozens of tensors to an operator takes longer than a small batch
        return _decide_point_pieces(z, given, origin, bank, coarse, tables)
    coarse_tensors, relative = ([], 0.0) if coarse is None else (list(coarse[:-1]), coarse.relative)
    bank_tensors, table_tensors = list(bank[:-1]), list(tables[:-2])
    return _decide_points(
        z, given, origin, bank_tensors, bank.reach, coarse_tensors, relative, table_tensors, *tables[-2:]
    )


def decide_distances(
    distance: Float[Tensor, "B K"],
    nearness: Float[Tensor, "B K"] | None,
    given: Int[Tensor, "B"] | None,
    kernels: Kernels,
) -> tuple[Int[Tensor, "I B"], Float[Tensor, "F B"]]:
    """Decide from distances, and from another measure of "nearest" for points outside.

    Returns:
        The columns of :func:`decide_points`.
    """
    tables = kernels.tables
    return _decide_distances(distance, nearness, given, list(tables[:-2]), *tables[-2:])


@functools.cache
def _triton() -> SimpleNamespace:
    """The modules that need Triton; an import statement in every call would cost microseconds."""
    from sepc_torch.model.kernels import decide, distances, screening

    return SimpleNamespace(decide=decide, distances=distances, screening=screening)


def _decide_point_pieces(
    z: Tensor, given: Tensor | None, origin: Tensor, bank: Split, coarse: Rounded | None, tables: RuleTables
) -> tuple[Tensor, Tensor]:
    modules = _triton()
    ints, floats = _columns(z, origin.dtype, given)
    given = None if given is None else given.contiguous()
    z = within_32_bits(z)
    rows = max(1, _PIECE // bank.centers.shape[0])
    with on_device(z):
        for start in range(0, z.shape[0], rows):
            some = slice(start, start + rows)
            labels = None if given is None else given[some]
            # The distances of a piece are freed before the next piece allocates its own.
            modules.decide.decide_into(
                _piece_distances(z[some], labels, origin, bank, coarse, tables), None, labels, tables,
                ints[:, some], floats[:, some],
            )  # fmt: skip
    return ints, floats


def _piece_distances(
    z: Tensor, given: Tensor | None, origin: Tensor, bank: Split, coarse: Rounded | None, tables: RuleTables
) -> Float[Tensor, "K B"]:
    """Distances of a piece to the ellipsoids; with screening, accurate only where the decision needs them."""
    modules = _triton()
    count, rows = bank.centers.shape[0], z.shape[0]
    if coarse is not None and rows >= _SCREEN_ROWS:
        return modules.screening.screened_distances(z, given, origin, bank, coarse, tables.starts)[0]
    distance = torch.empty(count, rows, dtype=torch.float32, device=z.device)
    modules.distances.distances_into(distance, z, origin, bank, 1, rows)
    return distance


def _decide_point_tensors(
    z: Tensor,
    given: Tensor | None,
    origin: Tensor,
    bank: list[Tensor],
    reach: float,
    coarse: list[Tensor],
    relative: float,
    tables: list[Tensor],
    *sizes: int,
) -> tuple[Tensor, Tensor]:
    estimates = Rounded(*coarse, relative) if coarse else None  # type: ignore[call-arg, arg-type]
    ellipsoids = Split(*bank, reach)  # type: ignore[call-arg, arg-type]
    return _decide_point_pieces(z, given, origin, ellipsoids, estimates, RuleTables(*tables, *sizes))  # type: ignore[arg-type]


def _decide_distance_pieces(
    distance: Tensor, nearness: Tensor | None, given: Tensor | None, tensors: list[Tensor], *sizes: int
) -> tuple[Tensor, Tensor]:
    modules = _triton()
    tables = RuleTables(*tensors, *sizes)  # type: ignore[arg-type]
    ints, floats = _columns(distance, distance.dtype, given)
    given = None if given is None else given.contiguous()
    rows = max(1, _PIECE // distance.shape[1])

    def by_ellipsoid(numbers: Tensor) -> Tensor:
        """Distances (K, B) to the ellipsoids sorted by class."""
        return numbers.T.index_select(0, tables.order)

    with on_device(distance):
        for start in range(0, len(distance), rows):
            some = slice(start, start + rows)
            modules.decide.decide_into(
                by_ellipsoid(distance[some]), None if nearness is None else by_ellipsoid(nearness[some]),
                None if given is None else given[some], tables, ints[:, some], floats[:, some],
            )  # fmt: skip
    return ints, floats


def _columns(like: Tensor, dtype: torch.dtype, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """Uninitialised result columns: four of integers, three of numbers, and those of the given labels."""
    rows, device = like.shape[0], like.device
    ints = torch.empty(4 if given is None else 5, rows, dtype=torch.int64, device=device)
    return ints, torch.empty(3 if given is None else 5, rows, dtype=dtype, device=device)


def _launch_distances(z: Tensor, origin: Tensor, _offsets: Tensor, _whiteners: Tensor, *bank: Any) -> Tensor:
    with on_device(z):
        return _triton().distances.distances(within_32_bits(z), origin, Split(*bank))


def _distances_shape(z: Tensor, _origin: Tensor, offsets: Tensor, _whiteners: Tensor, *_bank: Any) -> Tensor:
    return offsets.new_empty(z.shape[0], offsets.shape[0])


def _distances_gradient(
    z: Tensor, origin: Tensor, offsets: Tensor, whiteners: Tensor, *rest: Tensor
) -> tuple[Tensor | None, ...]:
    *bank, output, grad = rest
    gradient = torch_ops.distances_gradient(z.float() - origin, offsets, whiteners, output, grad)
    return gradient.to(z.dtype), *[None] * (4 + len(bank))


_fused_distances = torch_ops.operator(
    "fused_distances(Tensor z, Tensor origin, Tensor offsets, Tensor whiteners, Tensor feature_scale, Tensor centers, "
    "Tensor high, Tensor low, Tensor row_scale, float reach) -> Tensor",
    _launch_distances,
    _distances_shape,
)
torch_ops.differentiable("fused_distances", _distances_gradient)
_decide_points = torch_ops.operator(
    "decide_points(Tensor z, Tensor? given, Tensor origin, Tensor[] bank, float reach, Tensor[] coarse, "
    "float relative, Tensor[] tables, int most_words, int probes) -> (Tensor, Tensor)",
    _decide_point_tensors,
    lambda z, given, origin, *_: _columns(z, origin.dtype, given),
)
_decide_distances = torch_ops.operator(
    "decide_distances(Tensor distance, Tensor? nearness, Tensor? given, Tensor[] tables, int most_words, int probes) "
    "-> (Tensor, Tensor)",
    _decide_distance_pieces,
    lambda distance, _nearness, given, *_: _columns(distance, distance.dtype, given),
)
