r"""Native solver of program (4), the closest points of two reduced convex hulls: Wolfe's method on a working set.

The reduced hull of points :math:`x_i` is :math:`\{\sum_i u_i x_i : \sum_i u_i = 1,\ 0 \le u_i \le D\}`. A selection
minimises a linear function over it: the :math:`1/D` points of least value get weight :math:`D` each.

For large sets the working set is a band around the selection threshold. Points far below the threshold keep weight
:math:`D` and points far above it keep weight 0; only the weights in the band are free. A pass over all points then
either certifies the result or moves the band. A point whose weight disagrees with its side of the threshold always
joins the band. So every round starts from the last solution and improves it, and the number of rounds is finite. In the
first round the points farthest from the mean are free instead of a band. If one reduced hull contains the closest point
of the other, this round can find it at a fraction of the cost.

Within the band, Wolfe's min-norm-point method needs only the selection and ends after finitely many steps. In many
dimensions it needs many steps. There an interior-point method with crossover (:mod:`sepc_torch.solvers.capped_weights`)
runs first, and Wolfe's method only confirms its result. If ties prevent the crossover, Wolfe's method runs alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.linalg.lapack import dgelsy, dposv

from sepc_torch.shapes import Array, Bool, Float, Int
from sepc_torch.solvers.capped_weights import nearest_combination

# Points on each side of the threshold in the first band: room for the D + 1 free points of an optimum and for a moving
# threshold.
_HALF_BAND = 300
# Up to this many free points or dimensions Wolfe's method alone is faster: it takes a few steps per dimension.
_FEW_POINTS = 100
_FEW_DIMENSIONS = 11
# Number of outermost points that are free in the first round, unless four times a vertex's selection is more.
_OUTERMOST = 1500
# Number of points of each set that are enough to estimate its spread.
_SAMPLE = 256
# Certified gap at which to stop, relative to the squared extent of the data; rounding prevents smaller gaps.
_GAP = 1e-14
# Above this gap, relative to the squared extent, normal equations are accurate enough for a step.
_COARSE = 1e-8
# Hulls with a squared distance below this share of the squared extent have a point in common.
_TOUCHING = 1e-20
# Limits on the rounds and on the major steps of Wolfe's method; safeguards.
_MAX_ROUNDS = 60
_MAX_STEPS = 1000
# A vertex whose share of the current point is below this value leaves the corral.
_EMPTY = 1e-12
_NO_WEIGHTS = np.zeros(0)


class ReducedHullPoints(NamedTuple):
    r"""The closest points :math:`c = X^\top u` and :math:`d = Y^\top v` of two reduced hulls, with their weights."""

    c: Float[Array, "D"]
    d: Float[Array, "D"]
    u: Float[Array, "N"]
    v: Float[Array, "M"]


def closest_points(
    x: Float[Array, "N D"],
    y: Float[Array, "M D"],
    cap: float,
    direction: Float[Array, "D"] | None = None,
) -> ReducedHullPoints:
    """Solve program (4); ``direction`` is an optional guess of c - d. The caller validates the arguments."""
    means = x.mean(axis=0), y.mean(axis=0)
    origin = 0.5 * (means[0] + means[1])
    # Far from the origin differences lose digits, so the sets are moved. Otherwise copying large sets would be a
    # considerable part of the work.
    sample = np.concatenate([x[:_SAMPLE], y[:_SAMPLE]])
    if float(np.abs(origin).max()) > 100.0 * float(np.ptp(sample, axis=0).max()):
        x, y = x - origin, y - origin
    else:
        origin = np.zeros_like(origin)
    first, second = _Side(x, cap), _Side(y, cap)
    extent = max(float(np.einsum("ij,ij->i", side.points, side.points).max()) for side in (first, second))
    w = means[0] - means[1] if direction is None else direction
    u, v = first.best(w), second.best(-w)
    half = _HALF_BAND
    # If a vertex averages many points, it lies well inside the set and the outermost points do not help.
    if direction is None and 4.0 / cap <= 2 * _OUTERMOST:
        first.free_outermost(u)
        second.free_outermost(v)
    else:
        first.free_band(w, u, half)
        second.free_band(-w, v, half)
    last = np.inf
    for _ in range(_MAX_ROUNDS):
        u, v = _solve_band(first, second, u, v, extent)
        c, d = u @ first.points, v @ second.points
        w = c - d
        norm = float(w @ w)
        vertex = first.best(w) @ first.points - second.best(-w) @ second.points
        # Each band admits an improvement on the last solution if one exists. No progress means optimal up to rounding.
        if norm <= _TOUCHING * extent or norm - float(w @ vertex) <= _GAP * extent or norm >= last:
            break
        last = norm
        first.free_band(w, u, half)
        second.free_band(-w, v, half)
        half *= 2
    return ReducedHullPoints(c + origin, d + origin, u, v)


def _solve_band(
    first: _Side, second: _Side, u: Float[Array, "N"], v: Float[Array, "M"], extent: float
) -> tuple[Float[Array, "N"], Float[Array, "M"]]:
    """Weights of the closest points within the current bands, started from feasible weights (u, v)."""
    sizes = np.array([len(first.free), len(second.free)])
    z = np.concatenate([u[first.free], v[second.free]])
    if len(z) > _FEW_POINTS and len(first.base) > _FEW_DIMENSIONS:
        points = np.concatenate([first.band, -second.band])
        groups = np.repeat(np.eye(2, dtype=bool), sizes, axis=0)[:, sizes > 0]
        sums = np.array([first.mass, second.mass])[sizes > 0]
        found = nearest_combination(points, first.base - second.base, groups, sums, first.cap, 0.1 * _GAP * extent)
        z = z if found is None else found
    corral = _Corral(first, second, z[: sizes[0]], z[sizes[0] :])
    corral.descend(extent)
    return corral.weights()


def _select(values: Float[Array, "m"], mass: float, cap: float) -> Float[Array, "m"]:
    """Weights that distribute the mass over the least values, each weight up to the cap."""
    weights = np.zeros(len(values))
    whole = min(int(mass / cap + 1e-9), len(values))
    if whole == len(values):
        weights[:] = cap
        return weights
    order = np.argpartition(values, whole)
    weights[order[:whole]] = cap
    rest = mass - whole * cap
    if rest > 1e-12 * cap:
        weights[order[whole]] = rest
    return weights


class _Side:
    """One reduced hull: all points, and the working set (band) of points whose weights are free in this round.

    ``free`` holds the indices of the band, ``band`` its points and ``mass`` the sum of its weights. ``base`` is the
    contribution of the fixed weights.
    """

    free: Int[Array, "m"]
    band: Float[Array, "m D"]
    base: Float[Array, "D"]
    mass: float

    def __init__(self, points: Float[Array, "N D"], cap: float) -> None:
        self.points, self.cap = points, cap
        self.is_centroid = cap * len(points) <= 1.0 + 1e-9  # all weights are equal

    def best(self, w: Float[Array, "D"]) -> Float[Array, "N"]:
        """Weights, over all points, of the vertex with the least value along w."""
        if self.is_centroid:
            return np.full(len(self.points), 1.0 / len(self.points))
        return _select(self.points @ w, 1.0, self.cap)

    def free_outermost(self, weights: Float[Array, "N"]) -> None:
        """Start a round in which the points farthest from the mean and the points with positive weight are free."""
        count = len(self.points)
        wanted = max(_OUTERMOST, int(4.0 / self.cap))
        free = np.full(count, not self.is_centroid)
        if wanted < count and not self.is_centroid:
            offsets = self.points - self.points.mean(axis=0)
            free = weights > 0
            free[np.argpartition(-np.einsum("ij,ij->i", offsets, offsets), wanted)[:wanted]] = True
        self._start_round(free, weights)

    def free_band(self, w: Float[Array, "D"], weights: Float[Array, "N"], half: int) -> None:
        """Start a round in which ``half`` points on each side of the selection threshold along w are free."""
        count = len(self.points)
        chosen = int(1.0 / self.cap + 1e-9)
        low, high = max(chosen - half, 0), min(chosen + half, count)
        free = np.full(count, not self.is_centroid)
        if high - low < count and not self.is_centroid:
            order = np.argpartition(self.points @ w, [i for i in (low, high) if i < count])
            assigned = np.zeros(count)
            assigned[order[:low]] = self.cap
            free = np.abs(weights - assigned) > 1e-12 * self.cap
            free[order[low:high]] = True
        self._start_round(free, weights)

    def _start_round(self, free: Bool[Array, "N"], weights: Float[Array, "N"]) -> None:
        self.free = np.flatnonzero(free)
        self._fixed = np.where(free, 0.0, weights)
        self.base = self._fixed @ self.points
        self.band, self.mass = self.points[self.free], float(weights[self.free].sum())

    def vertex(self, w: Float[Array, "D"]) -> tuple[Float[Array, "D"], Float[Array, "m"]]:
        """The vertex with the least value along w within the current band, and its weights in the band."""
        if self.is_centroid:
            return self.base, _NO_WEIGHTS
        weights = _select(self.band @ w, self.mass, self.cap)
        return self.base + weights @ self.band, weights

    def all_weights(self, weights: Float[Array, "m"]) -> Float[Array, "N"]:
        """Weights of all points, from the weights of the band."""
        whole = self._fixed.copy()
        whole[self.free] = weights
        return whole


class _Corral:
    r"""Wolfe's min-norm-point method on the difference of two reduced hulls.

    The corral is a set of affinely independent vertices whose affine hull has its min-norm point inside their convex
    hull. Each major step adds the vertex with the least value along the current point. Minor steps move towards the
    min-norm point of the affine hull and drop vertices whose share becomes zero. Any point of the hulls can start the
    method.
    """

    def __init__(self, first: _Side, second: _Side, u: Float[Array, "m"], v: Float[Array, "q"]) -> None:
        self.first, self.second = first, second
        self.vertices = (first.base + u @ first.band - second.base - v @ second.band)[None]
        self.shares = np.ones(1)
        self.vertex_weights = [(u, v)]

    def weights(self) -> tuple[Float[Array, "N"], Float[Array, "M"]]:
        """The weights of the current point in each of the two sets."""
        u, v = (self.shares @ np.stack(weights) for weights in zip(*self.vertex_weights, strict=True))
        return self.first.all_weights(u), self.second.all_weights(v)

    def descend(self, extent: float) -> None:
        """Take steps until no vertex within the current bands improves the norm."""
        for _ in range(_MAX_STEPS):
            w = self.shares @ self.vertices
            norm = float(w @ w)
            (p, p_weights), (q, q_weights) = self.first.vertex(w), self.second.vertex(-w)
            gap = norm - float(w @ (p - q))
            if norm <= _TOUCHING * extent or gap <= 0.5 * _GAP * extent:
                return
            before = self.vertices, self.shares, self.vertex_weights
            self.vertices = np.concatenate([self.vertices, (p - q)[None]])
            self.shares = np.concatenate([self.shares, np.zeros(1)])
            self.vertex_weights = [*self.vertex_weights, (p_weights, q_weights)]
            self._minor_steps(precise=gap <= _COARSE * extent)
            w = self.shares @ self.vertices
            if float(w @ w) >= norm:  # no descent: rounding
                self.vertices, self.shares, self.vertex_weights = before
                return

    def _minor_steps(self, precise: bool) -> None:
        while len(self.shares) > 1:
            affine = _affine_minimiser(self.vertices, precise)
            if float(affine.min()) > _EMPTY:
                self.shares = affine
                return
            shrinking = affine < self.shares
            step = float((self.shares[shrinking] / (self.shares - affine)[shrinking]).min(initial=1.0))
            self.shares = self.shares + min(step, 1.0) * (affine - self.shares)
            keep = self.shares > _EMPTY
            if keep.all():  # the affine minimiser is reached up to rounding
                return
            self.vertices = self.vertices[keep]
            self.vertex_weights = [vertex for vertex, kept in zip(self.vertex_weights, keep, strict=True) if kept]
            self.shares = self.shares[keep] / self.shares[keep].sum()


def _affine_minimiser(vertices: Float[Array, "k D"], precise: bool) -> Float[Array, "k"]:
    r"""Shares of sum 1, of either sign, that minimise :math:`\|\sum_j a_j p_j\|`.

    The shares are proportional to :math:`(P P^\top + e e^\top)^{-1} e`. These normal equations lose half the digits, so
    ``precise`` solves the least-squares problem instead.
    """
    if not precise:
        gram = vertices @ vertices.T
        gram += gram.trace()  # e e^T, scaled like the Gram matrix
        _, a, failed = dposv(gram, np.ones(len(gram)))
        if not failed:
            return a / a.sum()
    last = vertices[-1]
    count, dim = len(vertices) - 1, len(last)
    right = np.zeros(max(count, dim))
    right[:dim] = -last
    # Rank-revealing least squares, by LAPACK directly because every step calls it. Singular values below 1e-13 are
    # noise.
    _, a, *_ = dgelsy((vertices[:-1] - last).T, right, np.zeros(count, dtype=np.int32), 1e-13, 8 * (count + dim) + 64)
    return np.append(a[:count], 1.0 - a[:count].sum())
