r"""Decision kernels, the rules on CUDA: label, rule, trust, margin, nearest and runner-up, from distances.

Two kernels give the results of :func:`sepc_torch.model.rules.resolve` without a matrix product over the cells and
without synchronising with the host.

A row is one point. Its *members* are the ellipsoids that contain it.

1. ``decide_rows`` (:mod:`~sepc_torch.model.kernels.lookup`) passes once over the distances of a row. The kernel finds
   the members, the nearest ellipsoid, and the nearest ellipsoid of another class. Then it looks the row up in the rule
   tables (:class:`~sepc_torch.model.kernels.decision_tables.RuleTables`).
2. ``count_rows`` (:mod:`~sepc_torch.model.kernels.majority`) takes the rows that the first kernel left pending: rows
   whose set of members is that of no training point, rows for which several classes tie for the majority, and rows
   outside that are equally near to several ellipsoids. It counts the training points of the region and applies the
   majority rules.

Per-row values are blocks of shape [tile]. Distances are stored ellipsoid by ellipsoid, (K, B).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from sepc_torch.ellipsoid import SURFACE_TOLERANCE
from sepc_torch.model.kernels.decision_tables import RuleTables
from sepc_torch.model.kernels.launch import Launcher, aligned
from sepc_torch.model.kernels.lookup import decide_rows
from sepc_torch.model.kernels.majority import count_rows
from sepc_torch.model.kernels.tables import power_of_two
from sepc_torch.model.rules import NEAREST_TIE
from sepc_torch.shapes import Float, Int

_LIMIT = 1.0 + SURFACE_TOLERANCE
_TIE = 1.0 + NEAREST_TIE

_launch_decide = Launcher(decide_rows)
_launch_count = Launcher(count_rows)


def decide_into(
    distance: Float[Tensor, "K B"],
    nearness: Float[Tensor, "K B"] | None,
    given: Int[Tensor, "B"] | None,
    tables: RuleTables,
    ints: Int[Tensor, "I B"],
    floats: Float[Tensor, "F B"],
) -> None:
    """Decide for every row and write the results.

    Args:
        distance: Mahalanobis distances to the ellipsoids, sorted by class.
        nearness: Distances that define the nearest ellipsoid of rows outside; by default ``distance``.
        given: Class indices to judge besides the model's own label; contiguous.
        tables: The rule tables of the model.
        ints: Receives label, rule, nearest and runner-up, and the runner-up to the given label.
        floats: Receives trust, distance and margin, and trust and margin of the given label.
    """
    ellipsoids, rows = distance.shape
    classes = len(tables.totals)
    near = distance if nearness is None else nearness
    labels = tables.codes if given is None else given
    variant = (
        distance.dtype, aligned(distance), tables.merged.dtype, labels.dtype, aligned(labels), aligned(ints),
        aligned(floats),
    )  # fmt: skip
    sizes = (rows, ints.stride(0), ellipsoids, tables.step_ids.shape[1], tables.tail_distances.shape[1])
    look = lookup_shape(rows, ellipsoids)
    _launch_decide(
        (-(-rows // look.tile), 1, 1),
        variant,
        (distance, near, labels, ints, floats, *tables[:23],
         *sizes, len(tables.slots) - 1, tables.probes),
        (_LIMIT, _TIE, nearness is not None, given is not None, look.tile, look.lanes, look.unroll),
        num_warps=look.warps,
    )  # fmt: skip
    if ellipsoids > 1:  # a single ellipsoid leaves no row pending
        count = count_shape(rows, ellipsoids, classes, tables.most_words)
        _launch_count(
            (-(-rows // count.tile), 1, 1),
            variant,
            (distance, near, labels, ints, floats, *tables[1:4], *tables[18:26],
             *sizes, classes, tables.digits.shape[1], tables.digits.shape[0]),
            (_LIMIT, _TIE, given is not None, count.tile, count.span, count.class_chunk, count.words),
            num_warps=count.warps,
        )  # fmt: skip


class LookupShape(NamedTuple):
    """Launch shape of the first kernel: rows per program, ellipsoids per load, unrolled loads, warps."""

    tile: int
    lanes: int
    unroll: int
    warps: int


class CountShape(NamedTuple):
    """Launch shape of the second kernel.

    Rows per program; ellipsoids, classes and entry words (per class) at a time; warps.
    """

    tile: int
    span: int
    class_chunk: int
    words: int
    warps: int


# The shapes below were the fastest on an H200 (experiments/speed). Large batches use one thread per row. Smaller
# batches would leave the chip idle, so several threads share a row.
_MANY_ROWS, _MANY_ROWS_OF_MANY = 2**13, 2**15  # with up to 128 ellipsoids, and with more


@functools.lru_cache(maxsize=1024)
def lookup_shape(rows: int, ellipsoids: int) -> LookupShape:
    """Shape of the first kernel."""
    lanes = min(1024, max(32, power_of_two(ellipsoids)))
    if rows >= (_MANY_ROWS if ellipsoids <= 128 else _MANY_ROWS_OF_MANY):
        return LookupShape(128, 1, min(4, power_of_two(ellipsoids)), warps=4)
    if rows > 2048:
        return LookupShape(8, 32, min(4, lanes // 32), warps=2)
    if rows > 128 or ellipsoids <= 128:
        return LookupShape(1, min(lanes, 256), 1, warps=1)
    return LookupShape(1, lanes, 1, warps=4)


@functools.lru_cache(maxsize=1024)
def count_shape(rows: int, ellipsoids: int, classes: int, most_words: int) -> CountShape:
    """Shape of the second kernel. A program counts the pending rows of its tile one after another."""
    chunk = min(32, power_of_two(classes))
    words = min(512 // chunk, power_of_two(most_words))
    span = min(256, max(32, power_of_two(ellipsoids)))
    many = rows >= (_MANY_ROWS if ellipsoids <= 128 else _MANY_ROWS_OF_MANY)
    return CountShape(64 if many else 1, span, chunk, words, warps=1 if ellipsoids <= 128 else 4)


__all__ = ["count_shape", "decide_into", "lookup_shape"]
