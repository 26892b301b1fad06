"""Result columns of the decision kernels: rules, trust, marks of pending rows, and how results are written.

A row that the first kernel leaves pending passes values to the second kernel in its own columns.
"""

from __future__ import annotations

import triton.language as tl

from sepc_torch.model.kernels.launch import jit
from sepc_torch.model.rules import Rule
from sepc_torch.model.trust import trust_ratio

SINGLE, OVERLAP = tl.constexpr(int(Rule.SINGLE)), tl.constexpr(int(Rule.OVERLAP))
UNION, OUTSIDE = tl.constexpr(int(Rule.UNION)), tl.constexpr(int(Rule.OUTSIDE))
# Labels that mark a row as pending for the second kernel: inside several ellipsoids, and outside all of them.
PENDING_INSIDE = tl.constexpr(-2)
PENDING_OUTSIDE = tl.constexpr(-3)

trust_of = jit(trust_ratio)


@jit
def store_columns(ints, floats, stride, row, wanted, label, rule, nearest, runner_up, trust, nearest_distance, margin):
    """Write the results for the model's own label."""
    tl.store(ints + row, label.to(tl.int64), mask=wanted)
    tl.store(ints + stride + row, rule.to(tl.int64), mask=wanted)
    tl.store(ints + 2 * stride + row, nearest.to(tl.int64), mask=wanted)
    tl.store(ints + 3 * stride + row, runner_up.to(tl.int64), mask=wanted)
    tl.store(floats + row, trust, mask=wanted)
    tl.store(floats + stride + row, nearest_distance, mask=wanted)
    tl.store(floats + 2 * stride + row, margin, mask=wanted)


@jit
def store_given(ints, floats, stride, row, wanted, runner_up, trust, margin):
    """Write the results for a given label."""
    tl.store(ints + 4 * stride + row, runner_up.to(tl.int64), mask=wanted)
    tl.store(floats + 3 * stride + row, trust, mask=wanted)
    tl.store(floats + 4 * stride + row, margin, mask=wanted)
