r"""Distance to the nearest reference point of every class; reference points are training points that a head keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sepc_torch.head.evidence.class_search import class_nearest, group_classes
from sepc_torch.head.kernels.tables import SearchTables, distinct_points, search_tables
from sepc_torch.model import torch_ops
from sepc_torch.model.derived import Derived
from sepc_torch.model.device_sync import readable
from sepc_torch.model.kernels import possible
from sepc_torch.model.kernels.launch import on_device
from sepc_torch.model.precision import as_dtype
from sepc_torch.shapes import Float, Int

# Largest relative error of a squared distance that products in single precision may cause. With more, for reference
# points in clusters far apart, the search is in float64.
_MAX_ERROR = 1e-3
# Reference points whose nearest other point is found to estimate that error and the next one.
_SAMPLE = 64
# Largest change of distances between neighbours by rounding their coordinates to eleven bits: the median, as a share of
# the distance. That of rounding to the grid of distances is the same: a quarter of its step of 1/1024.
_MAX_CHANGE = 2.0**-12
# Coordinates of points that the kernel takes are below this size: a larger scale would overflow.
_MAX_SIZE = 2.0**126
# Float16 holds eleven bits of numbers up to this one.
_HALF_RANGE = 2.0**15


class Neighbours(Derived):
    """Reference points of every class, and the distance to the nearest one of each class.

    The points are stored relative to an ``origin``, by default their mean: products of coordinates far from zero would
    lose digits.

    Args:
        points: The reference points (N, D), relative to ``origin`` if ``origin`` is given.
        codes: The class of each point, in ascending order; every class has a point.
        origin: The origin (D,); by default the mean of the points.
        persistent: Whether the state dict includes the points.
        eleven_bits: Whether to search coordinates rounded to the digits of float16 (:func:`as_half`), relative to the
            origin, if that changes the distances between neighbours little. CUDA kernels then need one product instead
            of three.

    >>> near = Neighbours(torch.tensor([[0.0, 0.0], [5.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 0, 1]))
    >>> near(torch.tensor([[6.0, 0.0]])).round(decimals=4)
    tensor([[1., 3.]])
    >>> near.nearest(torch.tensor([[6.0, 0.0]]))[1]
    tensor([[1, 2]])
    """

    derived = ("tables",)
    origin: Tensor
    offsets: Tensor
    codes: Tensor
    searched: Tensor
    kept: Tensor | None
    distinct: Tensor
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
        eleven_bits: bool = False,
    ) -> None:
        super().__init__()
        self.eleven_bits = eleven_bits
        if origin is None:
            # In float64, so that it is the same on every device.
            mean = points.mean(dim=0, dtype=torch.float64).to(points.dtype)
            origin = mean if len(points) else points.new_zeros(points.shape[1])
            points = points - origin
        self.register_buffer("origin", origin, persistent=persistent)
        self.register_buffer("offsets", points, persistent=persistent)
        # A copy: torch.export.save cannot write an empty tensor of NumPy's.
        self.register_buffer("codes", codes.clone(), persistent=persistent)
        self.restore()

    @property
    def points(self) -> Float[Tensor, "N D"]:
        """The reference points in the caller's coordinates."""
        return self.origin + self.offsets

    def restore(self) -> None:
        """Find the typical distance between neighbours, and whether eleven bits keep such distances (``in_half``).

        Not repeated when the module moves: it searches the same digits on every device and in every dtype.
        """
        self.typical, self.in_half = torch.inf, False
        if len(self.offsets) >= 2:
            first, second = _neighbouring(self.offsets)
            apart = _between(self.offsets, first, second)
            self.typical = float(apart.median())
            if self.eleven_bits and 0.0 < self.typical < torch.inf:
                change = _between(as_half(self.offsets), first, second) / apart - 1.0
                self.in_half = bool(change.nan_to_num(0.0).abs().median() <= _MAX_CHANGE)  # 0/0 for equal points
        self._places: list[Any] = []
        self.derive()

    def derive(self) -> None:
        """Compute values derived from the points; ``ends`` is a Python list, so that inference does not synchronise.

        ``searched`` holds the points with the digits of the search. Of those of a class that are equal only the first
        is searched: ``distinct`` holds their digits, ``kept`` their indices, or None if all differ. Nothing is computed
        if no dtype and device changed.
        """
        if self._places and self._places == self._dtypes_and_devices():
            return
        self.ends: list[int] = torch.bincount(self.codes).cumsum(0).tolist() if len(self.codes) else []
        searched = as_half(self.offsets) if self.in_half else self.offsets
        self.register_buffer("searched", searched, persistent=False)
        dim, most = searched.shape[1], _largest_rounding(searched, self.typical)
        self.far_apart = dim**0.5 > most
        kept, self.distinct_ends = distinct_points(searched, self.ends)
        repeated = len(kept) < len(searched)
        self.register_buffer("kept", kept if repeated else None, persistent=False)
        self.register_buffer("distinct", searched[kept] if repeated else searched, persistent=False)
        squares = searched[kept].double().square().sum(dim=1) / 2
        self.register_buffer("half_squares", squares if self.far_apart else squares.to(searched), persistent=False)
        groups = group_classes(self.distinct_ends)
        self.register_buffer("slots", groups.slots.to(self.codes.device), persistent=False)
        self.register_buffer("columns", groups.columns.to(self.codes.device), persistent=False)
        self.shapes = groups.shapes
        # The tables of the CUDA kernel, or none where it cannot run. It drops three bits of the products.
        wanted = bool(self.ends) and possible(searched) and max(dim**0.5, 8.0) <= most
        wanted = wanted and bool(searched.abs().amax() < _MAX_SIZE)
        layout = kept, self.distinct_ends
        self.tables = list(search_tables(searched, *layout, pairs=not self.in_half)) if wanted else []
        self._places = self._dtypes_and_devices()

    def _dtypes_and_devices(self) -> list[Any]:
        return [(part.dtype, part.device) for part in (self.offsets, self.searched, self.half_squares)]

    def forward(self, z: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
        """Return the Euclidean distance to the nearest reference point of each class."""
        return self.nearest(z)[0]

    def nearest(self, z: Float[Tensor, "B D"]) -> tuple[Float[Tensor, "B C"], Int[Tensor, "B C"]]:
        """Return the distance to the nearest reference point of each class, and the index of that point."""
        z, dtype = self._prepared(z)
        if self._in_kernel(z):
            distance, index = _search(z, as_dtype(self.origin, z.dtype), self.searched, self.tables)
            return as_dtype(distance, dtype), index
        return self._by_torch(z, dtype)

    def for_labels(self, z: Float[Tensor, "B D"], label: Int[Tensor, "B"]) -> Float[Tensor, "B C"]:
        """Return the distances of :meth:`forward` as far as the label's and the nearest other class need them.

        CUDA kernels return, for every class but the label's, the distance to the nearest point of all of them, which
        is faster. The labels are indices into the classes; -1 is taken for 0.
        """
        z, dtype = self._prepared(z)
        if self._in_kernel(z):
            origin = as_dtype(self.origin, z.dtype)
            return as_dtype(_search_for_labels(z, label, origin, self.searched, self.tables), dtype)
        return self._by_torch(z, dtype)[0]

    def _prepared(self, z: Float[Tensor, "B D"]) -> tuple[Float[Tensor, "B D"], torch.dtype]:
        """The embeddings without gradients in the dtype of their offsets, and the dtype of distances."""
        dtype = z.dtype if z.dtype == self.offsets.dtype else torch.promote_types(z.dtype, self.offsets.dtype)
        z = z.detach() if z.requires_grad else z
        exact = torch.float64 if self.far_apart else dtype
        return as_dtype(z, torch.float32 if self.in_half else exact), dtype

    def _in_kernel(self, z: Float[Tensor, "B D"]) -> bool:
        """Whether the CUDA kernels search these embeddings; their shape is checked, since kernels do not."""
        if not self.tables or z.dtype != torch.float32:
            return False
        if z.dim() != 2 or z.shape[1] != self.offsets.shape[1]:
            raise ValueError(f"z must have shape (B, {self.offsets.shape[1]}), got {tuple(z.shape)}.")
        return True

    def _by_torch(self, z: Float[Tensor, "B D"], dtype: torch.dtype) -> tuple[Float[Tensor, "B C"], Int[Tensor, "B C"]]:
        """Distances in the given dtype, and indices, by matrix products in plain torch."""
        offset = torch_ops.relative(z, as_dtype(self.origin, z.dtype))
        if self.in_half:
            offset = as_dtype(as_half(offset), self.half_squares.dtype)
        points, half_squares = as_dtype(self.distinct, offset.dtype), self.half_squares
        if half_squares.dtype != offset.dtype:
            half_squares = points.square().sum(dim=1) / 2
        layout = self.distinct_ends, self.slots, self.columns, self.shapes
        distance, index = class_nearest(offset, points, half_squares, *layout)
        return as_dtype(distance, dtype), index if self.kept is None else torch.take(self.kept, index)


def _largest_rounding(points: Float[Tensor, "N D"], typical: float) -> float:
    """Largest rounding with which products in the dtype of the points keep the digits of a typical distance.

    The error of a squared distance is about the rounding times eps times the largest squared length. The rounding of
    products of D features is sqrt(D).
    """
    if not 0.0 < typical < torch.inf:
        return torch.inf
    largest = float(points.double().square().sum(dim=1).amax())
    # Two divisions: the product of eps and a small length could round to zero.
    return _MAX_ERROR * (typical**2 / largest) / torch.finfo(points.dtype).eps


def _neighbouring(points: Float[Tensor, "N D"]) -> tuple[Int[Tensor, "n"], Int[Tensor, "n"]]:
    """A sample of points and the nearest other point of each, as indices.

    >>> _neighbouring(torch.tensor([[0.0], [1.0], [3.0]]))
    (tensor([0, 1, 2]), tensor([1, 0, 1]))
    """
    count, points = len(points), points.double()
    sample = min(count, _SAMPLE)
    some = torch.arange(sample, device=points.device) * (count - 1) // max(sample - 1, 1)
    apart = torch.cdist(points[some], points)
    apart[torch.arange(sample), some] = torch.inf
    return some, apart.argmin(dim=1)


def _between(points: Float[Tensor, "N D"], first: Int[Tensor, "n"], second: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Distances between points in float64."""
    return torch.linalg.vector_norm(points[first].double() - points[second].double(), dim=1)


def _launch_search(
    z: Tensor, origin: Tensor, offsets: Tensor, tables: list[Tensor], label: Tensor | None = None
) -> tuple[Float[Tensor, "B C"], Int[Tensor, "B C"]]:
    """The kernels' search: without the matrix of products, and with all distances from differences."""
    from sepc_torch.head.kernels.search import nearest_into

    distance, index = _search_shape(z, origin, offsets, tables)
    with on_device(z):
        nearest_into(z.contiguous(), origin, offsets, SearchTables(*tables), distance, index, label)
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
# Distances to the nearest points of the label's and of all other classes.
_search_for_labels = torch_ops.operator(
    "search_for_labels(Tensor z, Tensor label, Tensor origin, Tensor offsets, Tensor[] tables) -> Tensor",
    lambda z, label, origin, offsets, tables: _launch_search(z, origin, offsets, tables, label.contiguous())[0],
    lambda z, label, *others: _search_shape(z, *others)[0],
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
