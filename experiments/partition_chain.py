"""Sequential steps of separating one class, recorded on the CPU, and their arithmetic replayed on a device.

The record holds the sizes of everything that a port to the device would have to compute in sequence: Newton steps of
the reduced hulls (points x dims), Newton steps of the ellipsoids with a Cholesky factor of as many rows as points,
factors of the design, steps of Wolfe's method, and passes over many points. The replay computes only these, in float64,
for all classes at once, as if every class had the same sequence and no step depended on a decision. Its time is a lower
bound for a port with torch's operators.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch.partitioning.fit import _separate, _Task
from sepc_torch.solvers import capped_weights, d_optimal, progressive, reduced_hull

# A pass over fewer points than this counts as a sequential step.
LARGE = 2000


def _shape(array: Any, *_: Any) -> tuple[int, int]:
    return array.shape


RECORDED: dict[tuple[Any, str], tuple[str, Callable[..., tuple[int, int]]]] = {
    (capped_weights, "_newton"): ("hull steps", _shape),
    (reduced_hull, "_affine_minimiser"): ("Wolfe steps", _shape),
    (d_optimal, "newton_system"): ("ellipsoid steps", _shape),
    (d_optimal, "inverse_root"): ("factors", _shape),
    (progressive, "inverse_root"): ("factors", _shape),
    (d_optimal, "variances"): ("products", lambda lifted, root: lifted.shape[::-1]),
    (progressive._View, "sides"): ("products", lambda view, z: z.shape),
    (progressive, "affine_hull"): ("Gram passes", _shape),
    (reduced_hull._Side, "best"): ("selections", lambda side, w: side.points.shape),
    (reduced_hull._Side, "free_band"): ("selections", lambda side, w, weights, half: side.points.shape),
}
# Functions that consist of sequential steps only.
SEQUENTIAL = [(reduced_hull, "nearest_combination"), (reduced_hull._Corral, "descend"), (d_optimal, "interior_point")]
PASSES = ("products", "Gram passes", "selections")


class Chain(NamedTuple):
    """Sizes (rows, dims) of the recorded operations by kind, and the seconds in all, in steps and in large passes."""

    sizes: dict[str, list[tuple[int, int]]]
    seconds: float
    in_steps: float
    in_passes: float


def record(task: _Task) -> Chain:
    """Separate one class and record its operations."""
    sizes: dict[str, list[tuple[int, int]]] = {kind: [] for kind, _ in RECORDED.values()}
    spent = {"steps": 0.0, "passes": 0.0}

    def listening(function: Callable[..., Any], kind: str, shape: Callable[..., tuple[int, int]]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            size = shape(*args)
            sizes[kind].append(size)
            begun = time.process_time()
            result = function(*args)
            if kind in PASSES and size[0] >= LARGE:
                spent["passes"] += time.process_time() - begun
            return result

        return call

    def timing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begun = time.process_time()
            result = function(*args)
            spent["steps"] += time.process_time() - begun
            return result

        return call

    replaced = {place: listening(getattr(*place), *how) for place, how in RECORDED.items()}
    replaced |= {place: timing(getattr(*place)) for place in SEQUENTIAL}
    with _replaced(replaced):
        begun = time.process_time()
        _separate(task)
        seconds = time.process_time() - begun
    return Chain(sizes, seconds, spent["steps"], spent["passes"])


@contextmanager
def _replaced(functions: dict[tuple[Any, str], Callable[..., Any]]) -> Iterator[None]:
    originals = {place: getattr(*place) for place in functions}
    for (owner, name), function in functions.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name), function in originals.items():
            setattr(owner, name, function)


def summary(chain: Chain) -> dict[str, Any]:
    """The number and the median size of the operations of each kind."""
    rows = {kind: np.array([size[0] for size in sizes]) for kind, sizes in chain.sizes.items() if sizes}
    return {
        kind: {"count": len(n), "median_rows": float(np.median(n)), "large": int(np.count_nonzero(n >= LARGE))}
        for kind, n in rows.items()
    }


class Stage:
    """Random float64 data for every class on a device; operations of any size use the leading rows and columns."""

    def __init__(self, device: torch.device, classes: int, rows: int, dims: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.device = device
        self._points = torch.randn(classes, rows, dims, generator=generator, dtype=torch.float64).to(device)
        self._ones = torch.ones(classes, rows, 2, dtype=torch.float64, device=device)
        self._ones[:, ::2, 0] = self._ones[:, 1::2, 1] = 0.0
        self._eye = torch.eye(dims, dtype=torch.float64, device=device)
        # As in the middle of the central path: weights and slacks of size 1, away from their bounds.
        self._positive = 1.0 + torch.rand(classes, rows, generator=generator, dtype=torch.float64).to(device)

    def hull_algebra(self, rows: int, dims: int) -> Tensor:
        """The linear algebra of one Newton step of a reduced hull: a D x D factorisation and three solves."""
        solve = self._hull_system(rows, dims)
        solve(self._positive[:, :rows])
        return solve(self._positive[:, :rows])[0]

    def _hull_system(self, rows: int, dims: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        p, d, member = self._points[:, :rows, :dims], self._positive[:, :rows, None], self._ones[:, :rows]
        over = p / d
        eye = self._eye[:dims, :dims]
        lower = torch.linalg.cholesky_ex(torch.baddbmm(eye, p.mT, over)).L
        # As few kernels as possible: products with inverses instead of triangular solves.
        root = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
        back = over @ (root.mT @ root)

        def without_sums(r: Tensor) -> Tensor:
            x = r / d
            return torch.baddbmm(x, back, p.mT @ x, alpha=-1.0)

        along = without_sums(member)
        schur = torch.linalg.inv_ex(member.mT @ along).inverse

        def solve(r: Tensor) -> tuple[Tensor, Tensor]:
            x = without_sums(r[..., None])
            multiplier = schur @ (member.mT @ x)
            return torch.baddbmm(x, along, multiplier, alpha=-1.0).squeeze(2), multiplier

        return solve

    def hull_step(self, rows: int, dims: int) -> list[Tensor]:
        """The whole step with residuals, step lengths and updates, as in ``solvers/capped_weights.py``."""
        p, member = self._points[:, :rows, :dims], self._ones[:, :rows]
        z = room = s = t = self._positive[:, :rows]
        multiplier = self._positive[:, :2, None]
        gap = (z * s).sum(1, keepdim=True) + (room * t).sum(1, keepdim=True)
        value = p @ (z[:, None] @ p).mT - member @ multiplier
        right = -(value.squeeze(2) - s + t) - s + t
        solve = self._hull_system(rows, dims)
        dz, _ = solve(right)
        ds, dt = -s - s * dz / z, -t + t * dz / room
        primal, dual = torch.minimum(_length(z, dz), _length(room, -dz)), torch.minimum(_length(s, ds), _length(t, dt))
        predicted = ((z + primal * dz) * (s + dual * ds) + (room - primal * dz) * (t + dual * dt)).sum(1, keepdim=True)
        center = (predicted / gap) ** 3 * gap / (2 * rows)
        lower, upper = center - dz * ds, center + dz * dt
        dz, shift = solve(right + lower / z - upper / room)
        ds, dt = (lower - s * dz) / z - s, (upper + t * dz) / room - t
        primal, dual = torch.minimum(_length(z, dz), _length(room, -dz)), torch.minimum(_length(s, ds), _length(t, dt))
        moved = [z + primal * dz, room - primal * dz, s + dual * ds, t + dual * dt]
        return [*moved, multiplier - dual[..., None] * shift]

    def ellipsoid_step(self, rows: int, dims: int) -> Tensor:
        """A Newton step of an ellipsoid: the squared Gram matrix, its Cholesky factor and two solves."""
        v, d = self._points[:, :rows, :dims], self._positive[:, :rows]
        h = v @ v.mT
        h *= h
        h.diagonal(dim1=1, dim2=2).add_(d)
        factor = torch.linalg.cholesky_ex(h).L
        return torch.cholesky_solve(torch.cholesky_solve(d[..., None], factor), factor)

    def factor(self, rows: int, dims: int) -> Tensor:
        """The inverse Cholesky factor of the weighted points."""
        x = self._points[:, :rows, :dims]
        information = (x * self._positive[:, :rows, None]).mT @ x + self._eye[:dims, :dims]
        lower = torch.linalg.cholesky_ex(information).L
        return torch.linalg.solve_triangular(lower, self._eye[:dims, :dims].expand_as(lower), upper=False)

    def wolfe_step(self, rows: int, dims: int) -> Tensor:
        """Weights of the corral's vertices from their normal equations."""
        v = self._points[:, :rows, :dims]
        factor = torch.linalg.cholesky_ex(v @ v.mT + float(rows * dims)).L
        return torch.cholesky_solve(self._positive[:, :rows, None], factor)

    def product(self, rows: int, dims: int) -> Tensor:
        """Squared norms of all points in the coordinates of an ellipsoid."""
        return (self._points[:, :rows, :dims] @ self._eye[:dims, :dims]).square().sum(dim=2)

    def gram(self, rows: int, dims: int) -> Tensor:
        """The two Gram passes of whitening."""
        p = self._points[:, :rows, :dims]
        return p.mT @ (p @ (p.mT @ p))

    def selection(self, rows: int, dims: int) -> Tensor:
        """Values along a direction, the smaller half of them, and the sum of their points."""
        p = self._points[:, :rows, :dims]
        values = p @ self._eye[0, :dims]
        return (values <= values.median(dim=1, keepdim=True).values).to(p.dtype)[:, None] @ p


def _length(x: Tensor, dx: Tensor) -> Tensor:
    return (-0.995 / (dx / x).amin(dim=1, keepdim=True).clamp_max(-0.995)).clamp_max(1.0)


def replay(chain: Chain, device: torch.device, classes: int, seed: int) -> dict[str, Any]:
    """Seconds of the recorded arithmetic on a device, for all classes at once and without reading a result.

    ``floor`` is the sum of linear algebra and passes. ``hull_steps_whole`` is the hull steps with their vector updates.
    ``decisions`` is the time to read one number per step, which every step needs to decide whether it is the last.
    """
    rows, dims = np.max([size for sizes in chain.sizes.values() for size in sizes], axis=0)
    stage = Stage(device, classes, int(rows), int(dims), seed)
    operations: dict[str, Callable[[int, int], Any]] = {
        "hull steps": stage.hull_algebra,
        "ellipsoid steps": stage.ellipsoid_step,
        "factors": stage.factor,
        "Wolfe steps": stage.wolfe_step,
        "products": stage.product,
        "Gram passes": stage.gram,
        "selections": stage.selection,
    }
    seconds = {kind: _timed(operation, chain.sizes[kind], device) for kind, operation in operations.items()}
    steps = len(chain.sizes["hull steps"]) + len(chain.sizes["ellipsoid steps"])
    return {
        "seconds": seconds,
        "floor": sum(seconds.values()),
        "passes": sum(seconds[kind] for kind in PASSES),
        "hull_steps_whole": _timed(stage.hull_step, chain.sizes["hull steps"], device),
        "decisions": steps * _read_back(device),
        "hull_steps_captured": _captured(stage, chain.sizes["hull steps"]) if device.type == "cuda" else None,
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(operation: Callable[[int, int], Any], sizes: list[tuple[int, int]], device: torch.device) -> float:
    for size in sizes[:3]:
        operation(*size)
    _synchronize(device)
    begun = time.perf_counter()
    for size in sizes:
        operation(*size)
    _synchronize(device)
    return time.perf_counter() - begun


def _read_back(device: torch.device, repeats: int = 200) -> float:
    """Seconds to compute one number on the device and read it in Python."""
    number = torch.ones((), dtype=torch.float64, device=device)
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        (number + 1.0).item()
        taken.append(time.perf_counter() - begun)
    return float(np.median(taken))


def _captured(stage: Stage, sizes: list[tuple[int, int]]) -> float | None:
    """Seconds of the whole hull steps as a CUDA graph of the median size, without launch overhead.

    None if the libraries behind a factorisation cannot be captured.
    """
    if not sizes:
        return 0.0
    size = (int(np.median([rows for rows, _ in sizes])), sizes[0][1])
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            kept = stage.hull_step(*size)
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"no CUDA graph: {str(error).splitlines()[0]}")
        return None
    begun = time.perf_counter()
    for _ in sizes:
        graph.replay()
    torch.cuda.synchronize()
    del kept
    return time.perf_counter() - begun
