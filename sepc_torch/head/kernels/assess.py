"""Kernel of the calibrated values of labels: the operator of :mod:`sepc_torch.head.calibration.assess`.

A program takes a block of rows. Sorted calibration scores are searched by bisection. All arithmetic is in float64;
constants come in tensors, since the compiler may take the numbers of a kernel's source for float32.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor

from sepc_torch.head.calibration.calibration_tables import MAX_LOGIT, RESOLUTION, CalibrationTables
from sepc_torch.head.calibration.combined_score import BULK_END, SCORE_RESOLUTION
from sepc_torch.head.evidence.evidence import DISTANCE_STEP, LOG_STEP, MAX_LOG_RATIO, MAX_SOFTMAX, ODDS_STEP, ROUNDING
from sepc_torch.model.kernels.launch import Launcher, aligned, int_kind, jit, on_device
from sepc_torch.shapes import Bool, Float, Int

# Rows of a program with few and with many rows, and the number from which there are many.
_FEW_ROWS, _MANY_ROWS, _MANY = 1, 128, 2**13
# Bits that a step of a search finds with few rows: fewer steps, of more loads. With many rows bisection is faster.
_FAN = 5
_NUMBERS = (MAX_LOGIT, MAX_SOFTMAX, MAX_LOG_RATIO, SCORE_RESOLUTION, RESOLUTION, -math.log(BULK_END),
            torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max, ROUNDING, ODDS_STEP,
            LOG_STEP, DISTANCE_STEP)  # fmt: skip


@jit
def _asinh(x):
    size = tl.abs(x)
    # The square of a huge number overflows; there asinh(x) = log(2 x).
    near = tl.log(size + tl.sqrt(size * size + 1.0))
    value = tl.where(size < 1e150, near, tl.log(size) + tl.log(size * 0.0 + 2.0))
    return tl.where(x < 0.0, -value, value)


@jit
def _on_grid(x, step):
    """The multiple of ``step`` nearest to x."""
    return tl.floor(x / step + 0.5) * step


@jit
def _log_on_grid(x, step):
    """The number, the log of a density or of a sum, whose asinh is on the grid."""
    value = _on_grid(_asinh(x), step)
    return (tl.exp(value) - tl.exp(-value)) * 0.5


@jit
def _distance_on_grid(distance, step):
    """The distance whose log is on the grid; a distance of zero stays zero."""
    return tl.exp(_on_grid(tl.log(distance), step))


@jit
def _log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@jit
def _odds(scores, live, row, index, stride, classes, divisor, bound, bounded: tl.constexpr):
    """Log odds of the label, the log of the sum of exponentials, and the largest of a row's scores.

    With ``bounded`` the scores are cut off at plus and minus ``bound``; the odds are of the scores over ``divisor``.
    """
    start = scores + row.to(tl.int64) * stride
    most = tl.full([row.shape[0]], float("-inf"), tl.float64)
    most_other = most
    missing = row < 0
    for c in range(classes):
        x = tl.load(start + c, mask=live, other=0.0).to(tl.float64)
        missing = missing | (x != x)
        if bounded:
            x = tl.minimum(tl.maximum(x, -bound), bound)
        most = tl.maximum(most, x)
        most_other = tl.where(index == c, most_other, tl.maximum(most_other, x))
    total = most * 0.0
    other = total
    total = tl.where(total == total, total, 0.0)
    other = total
    own = total
    for c in range(classes):
        x = tl.load(start + c, mask=live, other=0.0).to(tl.float64)
        if bounded:
            x = tl.minimum(tl.maximum(x, -bound), bound)
        total += tl.exp(x - most)
        other += tl.where(index == c, 0.0, tl.exp((x - most_other) / divisor))
        own = tl.where(index == c, x, own)
    odds = (own - most_other) / divisor - tl.log(other)
    nan = float("nan")
    return tl.where(missing, nan, odds), tl.where(missing, nan, most + tl.log(total)), tl.where(missing, nan, most)


@jit
def _below(table, count, x, live, bits: tl.constexpr, fan: tl.constexpr):
    """Number of entries of sorted lists (``table``: a pointer for every row) that are below x.

    ``bits`` is the length of the largest number of entries. Every step reads 2^fan - 1 entries of a row side by side
    and finds the next ``fan`` bits of the result.
    """
    below = (x * 0.0).to(tl.int32) * 0
    steps: tl.constexpr = (bits + fan - 1) // fan
    size = count + below
    for power in tl.static_range(steps):
        if fan == 1:
            further = below + (1 << (steps - 1 - power))
            value = tl.load(table + tl.minimum(further, size) - 1, mask=live & (size > 0), other=0.0)
            below = tl.where((further <= size) & (value < x), further, below)
        else:
            further = below[:, None] + (tl.arange(0, 1 << fan) << (fan * (steps - 1 - power)))[None, :]
            there = (further > below[:, None]) & (further <= size[:, None])
            value = tl.load(table[:, None] + further - 1, mask=there & live[:, None], other=float("inf"))
            below += tl.sum((there & (value < x[:, None])).to(tl.int32), axis=1) << (fan * (steps - 1 - power))
    return below


@jit
def _log_survival(table, constants, x, live, resolution, deepest, count, steps: tl.constexpr, fan: tl.constexpr):
    """The function of :func:`sepc_torch.head.calibration.combined_score.log_survival`."""
    start, excess = tl.load(constants), tl.load(constants + 1)
    scale, share = tl.load(constants + 2), tl.load(constants + 3)
    finite = (x == x) & (tl.abs(x) < float("inf"))
    x = tl.where(x == x, tl.where(finite, x - resolution * (scale + tl.abs(x)), x), float("inf"))
    searched = tl.minimum(tl.maximum(x, -1e300), 1e300)
    above = _below(table + above_zero(x), count, searched, live, steps, fan)
    upper = tl.load(table + tl.minimum(above, count - 1), mask=live, other=0.0)
    lower = tl.load(table + tl.maximum(above - 1, 0), mask=live, other=0.0)
    fraction = tl.where(upper > lower, (searched - lower) / (upper - lower), 1.0)
    fraction = tl.minimum(tl.maximum(fraction, 0.0), 1.0)
    rank = tl.where(above > 0, (above - 1).to(tl.float64) + fraction, 0.0)
    inside = tl.log((count + 1 - rank) / (count + 1).to(tl.float64))
    outside = share - (x - start) / excess
    return tl.maximum(tl.where(x > start, outside, inside), -deepest)


@jit
def above_zero(x):
    """Zero for every row, to turn a pointer into a block of pointers."""
    return (x == float("inf")).to(tl.int32) * 0


@jit
def _logistic(softmax, regions, neighbours, model, has_softmax: tl.constexpr, has_near: tl.constexpr):
    """The logistic model of the support; its parameters are weights, bias, bends and shift."""
    at = 0
    score = regions * 0.0
    if has_softmax:
        score += softmax * tl.load(model)
        at = 1
    score += regions * tl.load(model + at)
    at += 1
    if has_near:
        score += neighbours * tl.load(model + at)
        at += 1
    score += tl.load(model + at)
    value = tl.load(model + at + 1) * _log_sigmoid(score) - tl.load(model + at + 2) * _log_sigmoid(-score)
    value += tl.load(model + at + 3)
    return 1.0 / (1.0 + tl.exp(-value))


@jit(do_not_specialize=["points", "most", "held_count", "class_width", "logit_stride"])
def _assess(
    density, near, white, mahalanobis, logits, label, invalid, least,
    temperature, confidence, ranking, weights, tails, ordered, combined, held, by_class, class_counts, unknown_odds,
    numbers, columns, accept,
    points, classes, most, held_count, class_width, logit_stride, least_stride,
    has_near: tl.constexpr, has_logits: tl.constexpr, layers: tl.constexpr,
    kind_count: tl.constexpr, steps: tl.constexpr, held_steps: tl.constexpr, class_steps: tl.constexpr,
    fan: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    live = row < points
    given = tl.load(label + row, mask=live, other=0).to(tl.int32)
    index = tl.maximum(given, 0)
    bound, most_softmax, most_ratio = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    score_unit, unit, end = tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5)
    tiny, deepest, rounding = tl.load(numbers + 6), tl.load(numbers + 7), tl.load(numbers + 8)
    odds_step, log_step, distance_step = tl.load(numbers + 9), tl.load(numbers + 10), tl.load(numbers + 11)
    one = bound * 0.0 + 1.0

    odds, _, densest = _odds(density, live, row, index, classes, classes, one, bound, False)
    bad = tl.load(invalid + row, mask=live, other=0).to(tl.int1) | (odds != odds)
    regions = _on_grid(_asinh(odds), odds_step)
    densest = _log_on_grid(densest, log_step)
    neighbours = regions
    nearest = regions
    if has_near:
        own = regions * 0.0
        other = tl.full([rows], float("inf"), tl.float64)
        for c in range(classes):
            d = tl.load(near + row.to(tl.int64) * classes + c, mask=live, other=1.0).to(tl.float64)
            own = tl.where(index == c, d, own)
            bad = bad | (d != d)
            other = tl.where(index == c, other, tl.minimum(other, d))
        nearest = _distance_on_grid(tl.minimum(own, other), distance_step)
        neighbours = _on_grid(tl.log(tl.maximum(other, tiny)), distance_step)
        neighbours -= _on_grid(tl.log(tl.maximum(own, tiny)), distance_step)
        bad = bad | (neighbours != neighbours)
        neighbours = tl.minimum(tl.maximum(neighbours, -most_ratio), most_ratio)
    softmax = regions
    energy = regions
    if has_logits:
        given_odds, energy, _ = _odds(
            logits, live, row, index, logit_stride, classes, tl.load(temperature), bound, True
        )
        softmax = tl.where(given_odds == given_odds, _asinh(given_odds), 0.0)
        softmax = tl.minimum(tl.maximum(softmax, -most_softmax), most_softmax)
    for layer in range(layers):
        x = tl.load(mahalanobis + layer * points + row, mask=live, other=0.0)
        bad = bad | (x != x)
    refused = bad | (given < 0)

    # The kinds of evidence.Evidence.kinds, in this order, and the energy; those that are not there take any number.
    whitened = regions
    if has_near:
        whitened = tl.load(white + row, mask=live, other=0.0).to(tl.float64)
        whitened = _distance_on_grid(tl.where(whitened < rounding, 0.0, whitened), distance_step)
    energy = _log_on_grid(-energy, log_step)
    score = regions * 0.0
    score = tl.where(score == score, score, 0.0)
    beyond = score
    # A loop, not unrolled: most of the time of few rows is that of fetching code.
    for j in range(kind_count):
        x = -densest
        if has_near:
            x = tl.where(j == 1, nearest, tl.where(j == 2, whitened, x))
        layer = j - 1 - 2 * has_near
        if (layer >= 0) & (layer < layers):
            x = _distance_on_grid(tl.load(mahalanobis + layer * points + row, mask=live, other=0.0), distance_step)
        x = tl.where(refused, float("nan"), x)
        if has_logits:
            x = tl.where(j == kind_count - 1, energy, x)
        surprise = -_log_survival(ordered + j * most, tails + 4 * j, x, live, score_unit, deepest, most, steps, fan)
        score += tl.load(weights + j) * tl.minimum(surprise, end)
        excess = tl.maximum(surprise - end, 0.0)
        excess = excess * excess / (1.0 + excess)
        beyond += excess * excess
    score += tl.sqrt(beyond)
    typicality = _log_survival(combined, tails + 4 * kind_count, score, live, score_unit, deepest, most, steps, fan)
    lower = score - unit * (1.0 + tl.abs(score))
    below = _below(held + above_zero(lower), held_count, lower, live, held_steps, fan)
    p_value = (held_count + 1 - below).to(tl.float64) / (held_count + 1).to(tl.float64)
    number = tl.load(class_counts + index, mask=live, other=0).to(tl.int32)
    table = by_class + index.to(tl.int64) * class_width
    below = _below(table, class_width + index * 0, lower, live, class_steps, fan)
    p_class = (1 + tl.maximum(number - below, 0)).to(tl.float64) / (number + 1).to(tl.float64)
    known = 1.0 / (1.0 + tl.exp(tl.log(tl.load(unknown_odds)) - typicality))
    ranked = _logistic(softmax, regions, neighbours, ranking, has_logits, has_near)
    joint = ranked * known
    sure = tl.maximum(_logistic(softmax, regions, neighbours, confidence, has_logits, has_near), joint)
    tl.store(columns + row, tl.where(refused, 0.0, sure), mask=live)
    tl.store(columns + points + row, p_value, mask=live)
    tl.store(columns + 2 * points + row, tl.where(refused & ~bad, float("nan"), p_class), mask=live)
    tl.store(columns + 3 * points + row, score, mask=live)
    tl.store(columns + 4 * points + row, tl.where(refused, 0.0, joint), mask=live)
    threshold = tl.load(least + row * least_stride, mask=live, other=0.0)
    tl.store(accept + row, (joint >= threshold) & ~refused, mask=live)


_launch = Launcher(_assess)
_numbers: dict[torch.device, Tensor] = {}


def assess_on_cuda(
    density: Float[Tensor, "B C"],
    near: list[Tensor],
    white: list[Tensor],
    mahalanobis: Float[Tensor, "L1 B"],
    logits: list[Tensor],
    label: Int[Tensor, "B"],
    invalid: Bool[Tensor, "B"],
    least: Float[Tensor, "*B"],
    tables: CalibrationTables,
) -> tuple[Float[Tensor, "5 B"], Bool[Tensor, "B"]]:
    """The operator of :mod:`sepc_torch.head.calibration.assess`."""
    points, classes = density.shape
    columns = torch.empty(5, points, dtype=torch.float64, device=density.device)
    accept = torch.empty(points, dtype=torch.bool, device=density.device)
    if points == 0:
        return columns, accept
    if density.device not in _numbers:
        _numbers[density.device] = torch.tensor(_NUMBERS, dtype=torch.float64, device=density.device)
    *floats, class_counts, unknown_odds = (
        table.contiguous() if name == "class_counts" else table.double().contiguous()
        for name, table in zip(CalibrationTables._fields, tables, strict=True)
    )
    density = density.double().contiguous()
    distances = near[0].contiguous() if near else density
    whitened = white[0].contiguous() if white else density
    gaussian = mahalanobis.double().contiguous()
    scores = logits[0].contiguous() if logits else density
    kind_count, most = tables.ordered.shape
    rows = _FEW_ROWS if points < _MANY else _MANY_ROWS
    least_stride = 1 if least.dim() else 0
    with on_device(density):
        _launch(
            (-(-points // rows), 1, 1),
            (distances.dtype, whitened.dtype, scores.dtype, label.dtype, class_counts.dtype, int_kind(classes),
             least_stride,
             *map(aligned, (density, distances, whitened, gaussian, scores, label, invalid, least))),
            (density, distances, whitened, gaussian, scores,
             label.contiguous(), invalid.contiguous(), least.contiguous(),
             *floats, class_counts, unknown_odds, _numbers[density.device], columns, accept,
             points, classes, most, tables.held.shape[0], tables.by_class.shape[1], scores.stride(0),
             least_stride),
            (bool(near), bool(logits), len(gaussian), kind_count,
             most.bit_length(), tables.held.shape[0].bit_length(), tables.by_class.shape[1].bit_length(),
             _FAN if rows == _FEW_ROWS else 1, rows),
            num_warps=1 if rows == _FEW_ROWS else 4,
        )  # fmt: skip
    return columns, accept
