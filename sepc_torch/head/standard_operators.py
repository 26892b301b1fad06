"""This package's torch operators in terms of standard ones, for exported graphs.

The operators of this package process a batch in pieces and skip rows that need nothing. A graph
for any batch size can do neither. The functions here compute the same values for the whole batch, in standard
operators; each has the name and the arguments of its operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sepc_torch.head.evidence.densities import Mixture, mixtures
from sepc_torch.model.counting import counts_within
from sepc_torch.model.torch_ops import OPAQUE, SECULAR_STEPS, secular_step
from sepc_torch.shapes import Bool, Float, Int

# Number of equally near ellipsoids that a graph expands for a point outside; further ones are left out. Four is a
# guess: equal distances need mirror images or repeated ellipsoids, and each one more adds the cost of a search.
TIED = 4


def distances(
    z: Float[Tensor, "B D"], centers: Float[Tensor, "K D"], whiteners: Float[Tensor, "K D D"]
) -> Float[Tensor, "B K"]:
    """Mahalanobis distances of points to ellipsoids."""
    whitened = torch.matmul(z.unsqueeze(0) - centers.unsqueeze(1), whiteners.transpose(1, 2))
    return whitened.square().sum(dim=2).sqrt().T


def euclidean_distances(
    z: Float[Tensor, "B D"],
    centers: Float[Tensor, "K D"],
    axes: Float[Tensor, "K D D"],
    semi_axes: Float[Tensor, "K D"],
    wanted: Bool[Tensor, "B"],
) -> Float[Tensor, "B K"]:
    """Euclidean distances to ellipsoids by all steps of Newton's method; zero inside and in unwanted rows."""
    unit = semi_axes.amax(dim=1, keepdim=True)
    e = (semi_axes / unit)[:, None, :]
    y = torch.matmul(z.unsqueeze(0) - centers.unsqueeze(1), axes.transpose(1, 2)).abs() / unit.unsqueeze(2)
    t = (e * y - e * e).amax(dim=2).clamp_min(0)
    outside = ((y / e).square().sum(dim=2) > 1) & wanted
    for _ in range(SECULAR_STEPS):
        t = t + torch.where(outside, secular_step(y, e, t), 0)
    distance = (t.unsqueeze(2) * y / (e * e + t.unsqueeze(2))).square().sum(dim=2).sqrt() * unit
    return torch.where(outside, torch.where(distance.isnan(), torch.inf, distance), 0).T


def region_counts(
    inside: Bool[Tensor, "B K"],
    cell_sizes: Int[Tensor, "P"],
    cell_members: Int[Tensor, "M"],
    entry_cells: Int[Tensor, "E"],
    entry_classes: Int[Tensor, "E"],
    entry_counts: Int[Tensor, "E"],
    classes: int,
) -> Int[Tensor, "2 B C"]:
    """Class counts in the intersection and the union of the ellipsoids that hold each point; exact in int64."""
    held = inside.sum(dim=1, keepdim=True)
    shared = _list_sums(inside[:, cell_members.long()].long(), cell_sizes.long().cumsum(0))
    by_class = entry_classes.argsort()
    cells, numbers = entry_cells[by_class].long(), entry_counts[by_class].long()
    # With a dtype: ONNX Runtime warns of the graph of a range without one.
    every_class = torch.arange(classes, dtype=entry_classes.dtype, device=inside.device)
    ends = (entry_classes.unsqueeze(0) <= every_class.unsqueeze(1)).sum(dim=1)
    regions = torch.stack([shared == held, shared > 0])
    counts = _list_sums(torch.where(regions[:, :, cells], numbers, 0), ends)
    return torch.where(held > 1, counts, 0)


def _list_sums(values: Int[Tensor, "*b m"], ends: Int[Tensor, "n"]) -> Int[Tensor, "*b n"]:
    """Sums of consecutive lists of the last dimension, given where each list ends."""
    running = torch.nn.functional.pad(values.cumsum(-1), (1, 0))
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    return running[..., ends] - running[..., starts]


def expanded_counts(
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
    """Class counts in the nearest ellipsoid, expanded until it touches the point; at most TIED equally near ones."""
    ellipsoids, steps = step_ids.shape
    near, k = nearness.topk(min(TIED, ellipsoids), dim=1, largest=False)
    first = near.argmin(dim=1, keepdim=True)  # rows of NaN have no order: any index will do
    nearest = near.gather(1, first)
    tied = near <= nearest * (1.0 + tie)
    within = distance.gather(1, k) * (1.0 + surface)
    # Each class has a run of steps in the table of every ellipsoid; starts and ends of the runs are (K, C + 1).
    bounds = torch.arange(classes + 1, dtype=grid_classes.dtype, device=distance.device)
    starts = (grid_classes.unsqueeze(0) < bounds.unsqueeze(1)).sum(dim=1)
    runs = starts.expand(ellipsoids, -1)
    if tail_distances.shape[1]:
        runs = _search(step_ids.long(), starts.expand(ellipsoids, -1))
    longest = min(steps, grid_classes.shape[0])
    grid_counts = grid_counts.long()
    counts = counts_within(k, within, runs[k], longest, starts, grid_counts, step_distances, tail_distances)
    tied = tied.unsqueeze(2)
    most = grid_counts.sum()
    narrow, wide = torch.where(tied, counts, most).amin(dim=1), torch.where(tied, counts, 0).amax(dim=1)
    return torch.where(wanted.unsqueeze(1), torch.stack([narrow, wide]), 0)


def class_nearest(
    z: Float[Tensor, "B D"],
    points: Float[Tensor, "N D"],
    half_squares: Float[Tensor, "N"],
    ends: list[int],
    *_layout: Any,
) -> tuple[Float[Tensor, "B C"], Int[Tensor, "B C"]]:
    """Distance to the nearest reference point of every class, computed from differences, and the point's index.

    The two points of a class that are nearest up to the rounding of the product are compared in float64.
    """
    closeness = z @ points.T - half_squares
    distances, indices = [], []
    # One class at a time: the differences to the points of all classes would take C times the memory.
    for first, end in zip([0, *ends[:-1]], ends, strict=True):
        two = closeness[:, first:end].topk(min(2, end - first), dim=1).indices + first
        apart = (points[two].double() - z.double().unsqueeze(1)).square().sum(dim=2)
        least, place = apart.min(dim=1)
        distances.append(least.sqrt().to(z.dtype))
        indices.append(two.gather(1, place.unsqueeze(1)).squeeze(1))
    return torch.stack(distances, dim=1), torch.stack(indices, dim=1)


def log_densities(distance: Float[Tensor, "B K"], regions: list[Tensor], classes: int) -> Float[Tensor, "B C"]:
    """Log density of each class, from the distances to all regions."""
    return mixtures(distance.double(), Mixture(*regions), classes)


def _search(ordered: Tensor, values: Tensor) -> Int[Tensor, "*k B"]:
    """``torch.searchsorted`` along the last dimension, by binary search; ONNX has no such operator."""
    count = ordered.shape[-1]
    below = torch.zeros_like(values, dtype=torch.int64)
    for power in reversed(range(count.bit_length())):
        further = below + 2**power
        index = further.clamp_max(count) - 1
        found = ordered[index] if ordered.dim() == 1 else ordered.gather(-1, index)
        below = torch.where((further <= count) & (found < values), further, below)
    return below


def _asinh(x: Tensor) -> Tensor:
    """Inverse hyperbolic sine in float64, which ONNX Runtime has in float32 only."""
    wide = x.double().abs()
    return ((wide + (wide * wide + 1.0).sqrt()).log() * x.sign().double()).to(x.dtype)


def _sinh(x: Tensor) -> Tensor:
    """Hyperbolic sine in the dtype of x; ONNX Runtime has it in float32 only."""
    return (x.exp() - (-x).exp()) / 2.0


def _log1p(x: Tensor) -> Tensor:
    """The logarithm of 1 + x in float64: ONNX has no log1p, and 1 + x in float32 loses the digits of a small x."""
    return (x.double() + 1.0).log().to(x.dtype)


def _log_sigmoid(x: Tensor) -> Tensor:
    """The logarithm of the sigmoid in float64; ONNX takes the logarithm of a sigmoid that has rounded to zero."""
    wide = x.double()
    return (wide.clamp_max(0.0) - ((-wide.abs()).exp() + 1.0).log()).to(x.dtype)


def _nan_to_num(x: Tensor, nan: float = 0.0) -> Tensor:
    """A number for NaN, the largest one for infinity; torch's ONNX exporter takes that number for float32."""
    limits = torch.finfo(x.dtype)
    return torch.where(x.isnan(), nan, x).clamp(limits.min, limits.max)


def _logsumexp(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Logarithm of a sum of exponentials relative to the largest; ONNX Runtime lets all of them round to zero."""
    most = x.amax(dim=dim, keepdim=True).clamp_min(torch.finfo(x.dtype).min)
    found = (x - most).exp().sum(dim=dim, keepdim=True).log() + most
    return found if keepdim else found.squeeze(dim)


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    **{
        getattr(torch.ops.sepc_torch, function.__name__).default: function
        for function in (
            distances,
            euclidean_distances,
            region_counts,
            expanded_counts,
            class_nearest,
            log_densities,
        )
    },
    **OPAQUE,
    torch.searchsorted: _search,
    torch.asinh: _asinh,
    torch.sinh: _sinh,
    torch.log1p: _log1p,
    torch.nn.functional.logsigmoid: _log_sigmoid,
    torch.Tensor.nan_to_num: _nan_to_num,
    torch.Tensor.logsumexp: _logsumexp,
}


class StandardOperators(TorchFunctionMode):
    """Context in which a head computes with the standard operators that torch and ONNX share.

    This package's operators are replaced, and functions of torch that ONNX lacks or computes with less accuracy.
    Numbers beside float64 tensors become float64 tensors: torch's ONNX exporter rounds plain numbers to float32.

    >>> x = torch.tensor([[1.0, 2.0]])
    >>> with StandardOperators():
    ...     torch.ops.sepc_torch.distances.default(x, 0 * x, torch.eye(2)[None])
    tensor([[2.2361]])
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the replacement of a function, or the function itself."""
        if func in _REPLACEMENTS:
            with self:  # a mode is off while it handles a call
                return _REPLACEMENTS[func](*args, **(kwargs or {}))
        if any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in args):
            args = tuple(_exact(value) for value in args)
        return func(*args, **(kwargs or {}))


def _exact(value: Any) -> Any:
    """A finite number that float32 cannot represent as a float64 tensor; any other value as it is."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    within = abs(value) <= torch.finfo(torch.float32).max
    return value if within and float(np.float32(value)) == value else torch.tensor(value, dtype=torch.float64)
