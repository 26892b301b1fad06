r"""Distance to the nearest reference point of every class; reference points are training points that a head keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sepc_torch.head.kernels.tables import SearchTables, search_tables
from sepc_torch.model import torch_ops
from sepc_torch.model.device_sync import readable
from sepc_torch.model.kernels import possible
from sepc_torch.model.kernels.launch import on_device
from sepc_torch.model.precision import as_dtype
from sepc_torch.shapes import Float, Int

# Largest relative error of a squared distance that products in single precision may cause. With more, for reference
# points in clusters far apart, the search is in float64.
_MAX_ERROR = 1e-3
# Reference points whose nearest other point is found to estimate that error.
_SAMPLE = 64
# Above this number of classes, or up to this number of products, classes of similar size are searched together: copying
# the products into groups then takes less time than one argmax call for each class.
_MANY_CLASSES = 32
_FEW_PRODUCTS = 2**16
# Float16 holds eleven bits of numbers up to this one.
_HALF_RANGE = 2.0**15
# Values of a block of the search for the largest one, and the mean number of points of a class above which a CPU
# searches in blocks.
_BLOCK, _MANY_POINTS = 64, 512
# Number of nearest classes whose distances are then computed from differences: the label's and the nearest other class
# are among them, unless the label is wrong.
_RECOMPUTED = 8


class Neighbours(nn.Module):
    """Reference points of every class, and the distance to the nearest one of each class.

    The points are stored relative to an ``origin``, by default their mean: products of coordinates far from zero would
    lose digits.

    Args:
        points: The reference points (N, D), relative to ``origin`` if ``origin`` is given.
        codes: The class of each point, in ascending order; every class has a point.
        origin: The origin (D,); by default the mean of the points.
        persistent: Whether the state dict includes the points.
        in_half: Whether to round the points, and all embeddings, to the digits of float16; there is no origin then.
            CUDA kernels then search with one product instead of three.

    >>> near = Neighbours(torch.tensor([[0.0, 0.0], [5.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 0, 1]))
    >>> near(torch.tensor([[6.0, 0.0]])).round(decimals=4)
    tensor([[1., 3.]])
    >>> near.nearest(torch.tensor([[6.0, 0.0]]))[1]
    tensor([[1, 2]])
    """

    in_half = False  # in pickles of older versions
    origin: Tensor
    offsets: Tensor
    codes: Tensor
    half_squares: Tensor
    slots: Tensor
    columns: Tensor

    def __init__(
        self,
        points: Float[Tensor, "N D"],
        codes: Int[Tensor, "N"],
        origin: Float[Tensor, "D"] | None = None,
        *,
        persistent: bool = True,
        in_half: bool = False,
    ) -> None:
        super().__init__()
        self.in_half = in_half
        if in_half:
            origin, points = points.new_zeros(points.shape[1]), as_half(points).to(points.dtype)
        elif origin is None:
            # In float64, so that it is the same on every device.
            mean = points.mean(dim=0, dtype=torch.float64).to(points.dtype)
            origin = mean if len(points) else points.new_zeros(points.shape[1])
            points = points - origin
        self.register_buffer("origin", origin, persistent=persistent)
        self.register_buffer("offsets", points, persistent=persistent)
        self.register_buffer("codes", codes, persistent=persistent)
        self._derive()
        self.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]

    @property
    def points(self) -> Float[Tensor, "N D"]:
        """The reference points in the caller's coordinates."""
        return self.origin + self.offsets

    def _derive(self) -> None:
        """Compute values derived from the points; ``ends`` is a Python list, so that inference does not synchronise."""
        self.ends: list[int] = torch.bincount(self.codes).cumsum(0).tolist() if len(self.codes) else []
        dim = self.offsets.shape[1]
        most = _largest_rounding(self.offsets)
        self.far_apart = dim**0.5 > most
        squares = self.offsets.double().square().sum(dim=1) / 2
        self.register_buffer("half_squares", squares if self.far_apart else squares.to(self.offsets), persistent=False)
        groups = _group(self.ends)
        self.register_buffer("slots", groups.slots.to(self.codes.device), persistent=False)
        self.register_buffer("columns", groups.columns.to(self.codes.device), persistent=False)
        self.shapes = groups.shapes
        # The tables of the CUDA kernel, or none where it cannot run. It drops three bits of the products.
        wanted = bool(self.ends) and possible(self.offsets) and max(dim**0.5, 8.0) <= most
        self.tables = list(search_tables(self.offsets, self.ends, pairs=not self.in_half)) if wanted else []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tables": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._derive()

    def forward(self, z: Float[Tensor, "B D"], *, rounded: bool = False) -> Float[Tensor, "B C"]:
        """Return the Euclidean distance to the nearest reference point of each class.

        With ``rounded`` the embeddings are those of :func:`as_half` already.
        """
        return self.nearest(z, rounded=rounded)[0]

    def nearest(
        self, z: Float[Tensor, "B D"], *, rounded: bool = False
    ) -> tuple[Float[Tensor, "B C"], Int[Tensor, "B C"]]:
        """Return the distance to the nearest reference point of each class, and the index of that point."""
        points = self.offsets
        dtype = z.dtype if z.dtype == points.dtype else torch.promote_types(z.dtype, points.dtype)
        within = torch.float64 if self.far_apart else dtype
        z = z.detach() if z.requires_grad else z
        z = as_dtype(as_half(z) if self.in_half and not rounded else z, within)
        if self.tables and within == torch.float32:
            if z.dim() != 2 or z.shape[1] != points.shape[1]:
                raise ValueError(f"z must have shape (B, {points.shape[1]}), got {tuple(z.shape)}.")
            return _search(z, self.origin, points, self.tables)
        offset = torch_ops.relative(z, as_dtype(self.origin, within))
        points, half_squares = as_dtype(points, within), as_dtype(self.half_squares, within)
        distance, index = _nearest(offset, points, half_squares, self.ends, self.slots, self.columns, self.shapes)
        return as_dtype(distance, dtype), index

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Neighbours:
        before = self.offsets.dtype, self.half_squares.dtype, self.offsets.device
        moved = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if (self.offsets.dtype, self.half_squares.dtype, self.offsets.device) != before and not self.offsets.is_meta:
            self._derive()  # recomputed in the new dtype, so that a saved and loaded module gives equal results
        return moved


def _largest_rounding(offsets: Float[Tensor, "N D"]) -> float:
    """Largest rounding with which products in the dtype of the points keep the digits of the nearest distance.

    The error of a squared distance is about the rounding times eps times the largest squared length. The rounding of
    products of D features is sqrt(D).
    """
    typical = typical_distance(offsets) ** 2
    if not 0.0 < typical < torch.inf:
        return torch.inf
    largest = float(offsets.double().square().sum(dim=1).amax())
    # Two divisions: the product of eps and a small length could round to zero.
    return _MAX_ERROR * (typical / largest) / torch.finfo(offsets.dtype).eps


def typical_distance(points: Float[Tensor, "N D"]) -> float:
    """Median distance of a point to the nearest other one, from a sample; infinity for fewer than two points.

    >>> typical_distance(torch.tensor([[0.0], [1.0], [3.0]]))
    1.0
    """
    count = len(points)
    if count < 2:
        return torch.inf
    points = points.double()
    some = torch.linspace(0, count - 1, min(count, _SAMPLE), device=points.device).long()
    apart = torch.cdist(points[some], points)
    apart[torch.arange(len(some)), some] = torch.inf
    return float(apart.amin(dim=1).median())


def _after_loading(module: Neighbours, _keys: Any) -> None:
    module._derive()


class _Groups(NamedTuple):
    """Layout of groups of classes of similar size, each searched with one argmax.

    A group is a table with a row per class and a fixed number of places per row. ``slots`` holds the point index of
    every place, group after group. ``shapes`` holds, for each group in turn, the number of classes and the number of
    places. ``columns`` holds the position of each class in this order. A class with fewer points than places repeats
    its last point, which does not change the nearest distance.
    """

    slots: Int[Tensor, "n"]
    columns: Int[Tensor, "C"]
    shapes: list[int]


def _group(ends: list[int]) -> _Groups:
    """Group classes by their size rounded up to a power of two; less than half of the places repeat a point.

    >>> _group([1, 5, 8])
    _Groups(slots=tensor([0, 1, 2, 3, 4, 5, 6, 7, 7]), columns=tensor([0, 1, 2]), shapes=[1, 1, 2, 4])
    """
    starts = [0, *ends[:-1]]
    members: dict[int, list[int]] = {}
    for c, (start, end) in enumerate(zip(starts, ends, strict=False)):
        members.setdefault((end - start - 1).bit_length(), []).append(c)
    slots, shapes = [torch.zeros(0, dtype=torch.int64)], []
    for group in members.values():
        first, last = (torch.tensor([where[c] for c in group]).unsqueeze(1) for where in (starts, ends))
        width = int((last - first).max())
        slots.append(torch.minimum(first + torch.arange(width), last - 1).flatten())
        shapes += [len(group), width]
    order = torch.tensor([c for group in members.values() for c in group], dtype=torch.int64)
    return _Groups(torch.cat(slots), order.argsort(), shapes)


def _class_nearest(
    z: Tensor,
    points: Tensor,
    half_squares: Tensor,
    ends: list[int],
    slots: Tensor,
    columns: Tensor,
    shapes: list[int],
) -> tuple[Tensor, Tensor]:
    r"""Find the nearest points by a matrix product, then compute short distances from differences.

    The nearest point is :math:`\arg\max_i z \cdot x_i - \tfrac12 \|x_i\|^2`, up to rounding. A distance computed from
    the product loses the digits of short distances. With few classes all distances are computed from differences; with
    many classes, only those of the nearest classes.
    """
    if not ends:
        return _class_nearest_shape(z, points, half_squares, ends)
    many = len(ends) > _MANY_CLASSES
    exact = min(len(ends), _RECOMPUTED) if many else len(ends)
    count, dim = z.shape
    rows = torch_ops.rows_per_piece(z, max(points.shape[0] + (slots.shape[0] if many else 0), exact * dim))
    in_blocks = not (many or z.is_cuda) and points.shape[0] > _MANY_POINTS * len(ends)

    def search(piece: Float[Tensor, "b D"]) -> tuple[Float[Tensor, "b C"], Int[Tensor, "b C"]]:
        few = len(piece) * points.shape[0] <= _FEW_PRODUCTS
        if in_blocks and not few:
            best = _best_in_blocks(piece, points, half_squares, ends)
            return _apart(piece, points, best), best
        closeness = torch.addmm(half_squares, piece, points.T, beta=-1)
        best = _best_together(closeness, slots, columns, shapes) if many or few else _best_of_each(closeness, ends)
        if not many:
            return _apart(piece, points, best), best
        squares = piece.square().sum(dim=1, keepdim=True) - 2.0 * closeness.gather(1, best)
        near = squares.topk(exact, dim=1, largest=False).indices
        distance = squares.clamp_min_(0).sqrt_()
        return distance.scatter_(1, near, _apart(piece, points, best.gather(1, near))), best

    with torch_ops.full_precision(z):
        if count <= rows:
            return search(z)
        distances, places = zip(*map(search, z.split(rows)), strict=True)
    return torch.cat(distances), torch.cat(places)


def _apart(z: Float[Tensor, "b D"], points: Float[Tensor, "N D"], index: Int[Tensor, "b n"]) -> Float[Tensor, "b n"]:
    """Distances between every row and the points of its indices, from differences.

    The sums are in float64: in float32 they would depend on the batch size.
    """
    apart = torch.embedding(points, index)
    apart -= z.unsqueeze(1)
    return as_dtype(torch.linalg.vector_norm(apart, dim=2, dtype=torch.float64), z.dtype)


def _best_of_each(closeness: Float[Tensor, "b N"], ends: list[int]) -> Int[Tensor, "b C"]:
    """Index of the closest point of every class, with one argmax for each class."""
    starts = [0, *ends[:-1]]
    found = [closeness[:, start:end].argmax(dim=1).add_(start) for start, end in zip(starts, ends, strict=True)]
    return torch.stack(found, dim=1)


def _best_in_blocks(
    z: Float[Tensor, "b D"], points: Float[Tensor, "N D"], half_squares: Float[Tensor, "N"], ends: list[int]
) -> Int[Tensor, "b C"]:
    """Index of the closest point of every class, as :func:`_best_of_each` finds it.

    The closeness of a class fills whole blocks. On a CPU ``amax`` of blocks takes a fraction of the time of ``argmax``,
    which then searches the best block of every class.
    """
    starts = [0, *ends[:-1]]
    counts = [-(-(end - start) // _BLOCK) for start, end in zip(starts, ends, strict=True)]
    closeness = z.new_empty(len(z), _BLOCK * sum(counts))
    for start, end, part in zip(starts, ends, closeness.split([_BLOCK * count for count in counts], 1), strict=True):
        torch.addmm(half_squares[start:end], z, points[start:end].T, beta=-1, out=part[:, : end - start])
        part[:, end - start :] = -torch.inf
    blocks = closeness.view(len(z), -1, _BLOCK)
    parts = blocks.amax(dim=2).split(counts, dim=1)
    best = torch.stack([part.argmax(dim=1) for part in parts], dim=1)
    shift = torch.tensor([0, *counts[:-1]], device=z.device).cumsum(0)
    row = torch.arange(len(z), device=z.device).unsqueeze(1) * blocks.shape[1]
    inside = torch.embedding(blocks.flatten(0, 1), row + shift + best).argmax(dim=2)
    return torch.tensor(starts, device=z.device) + best * _BLOCK + inside


def _best_together(
    closeness: Float[Tensor, "b N"], slots: Int[Tensor, "n"], columns: Int[Tensor, "C"], shapes: list[int]
) -> Int[Tensor, "b C"]:
    """Index of the closest point of every class, with one argmax for each group of classes."""
    if shapes[0] == 1 and len(shapes) == 2:
        return closeness.argmax(dim=1, keepdim=True)
    counts, widths = shapes[::2], shapes[1::2]
    groups = slots.split([count * width for count, width in zip(counts, widths, strict=True)])
    # A class is a run of points, and repeats its last point behind them, where argmax does not look.
    found = [
        closeness.index_select(1, places).view(-1, count, width).argmax(dim=2) + places[::width]
        for places, count, width in zip(groups, counts, widths, strict=True)
    ]
    return found[0] if len(found) == 1 else torch.cat(found, dim=1).index_select(1, columns)  # one group is in order


def _class_nearest_shape(
    z: Tensor, points: Tensor, half_squares: Tensor, ends: list[int], *layout: Any
) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape[0], len(ends)), z.new_empty(z.shape[0], len(ends), dtype=torch.int64)


_nearest = torch_ops.operator(
    "class_nearest(Tensor z, Tensor points, Tensor half_squares, int[] ends, Tensor slots, Tensor columns, "
    "int[] shapes) -> (Tensor, Tensor)",
    _class_nearest,
    _class_nearest_shape,
)


def _launch_search(
    z: Tensor, origin: Tensor, offsets: Tensor, tables: list[Tensor]
) -> tuple[Float[Tensor, "B C"], Int[Tensor, "B C"]]:
    """The kernels' search: without the matrix of products, and with all distances from differences."""
    from sepc_torch.head.kernels.search import nearest_into

    layout = SearchTables(*tables)
    distance, index = _search_shape(z, origin, offsets, tables)
    with on_device(z):
        nearest_into(z.contiguous(), origin, offsets, layout, distance, index)
    return distance, index


def _search_shape(z: Tensor, _origin: Tensor, _offsets: Tensor, tables: list[Tensor]) -> tuple[Tensor, Tensor]:
    shape = z.shape[0], tables[SearchTables._fields.index("ranges")].shape[0]
    return z.new_empty(shape), z.new_empty(shape, dtype=torch.int64)


# Distances and indices for rows (B, D) in the coordinates of the caller, on CUDA devices.
_search = torch_ops.operator(
    "search(Tensor z, Tensor origin, Tensor offsets, Tensor[] tables) -> (Tensor, Tensor)",
    _launch_search,
    _search_shape,
)


def _rounded(x: Tensor) -> Tensor:
    x = as_dtype(x, torch.float32)
    if readable(x) and bool((x.abs() < _HALF_RANGE).all()):
        return x.half().float()
    # Powers of two bring larger numbers into the range of float16.
    size, scale = x.abs(), torch.ones_like(x)
    for power in range(5):
        scale = torch.where(size < _HALF_RANGE * 2.0 ** (24 * power), scale, 2.0 ** (-24 * (power + 1)))
    return (x * scale).half().float() / scale


# Numbers with the eleven bits of float16, in float32. Numbers below the range of float16 are multiples of 2^-24.
as_half = torch_ops.opaque("as_half(Tensor x) -> Tensor", _rounded, lambda x: x.new_empty(x.shape, dtype=torch.float32))
