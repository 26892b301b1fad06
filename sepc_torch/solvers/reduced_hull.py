r"""Closest points of two reduced convex hulls, program (4) of the paper.

The reduced hull of points :math:`x_i` is :math:`\{\sum_i u_i x_i : \sum_i u_i = 1,\ 0 \le u_i \le D\}`. Minimising
a linear function over it is a selection: the :math:`1/D` points of least value, each with weight :math:`D`.

Large sets are solved in a band. Points far below the selection threshold keep weight :math:`D`, points far above it
weight 0; only those around it are free. One pass over all points then either proves the result or moves the band. A
point whose weight disagrees with its side of the threshold always joins the band, so every round starts from the
last solution and improves on it, and the rounds are finite. The first round takes the points farthest from the
mean instead of a band: a reduced hull that contains the other's closest point shows it there, at a fraction of the
cost.

Within the band Wolfe's min-norm-point method needs nothing but the selection and ends after finitely many steps. In
many dimensions these are many; there an interior point (:mod:`sepc_torch.solvers.capped_weights`) goes first, and Wolfe's
method stops at once. Where ties leave the interior point undecided, it has the word alone.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg.lapack import dgelsy, dposv

from sepc_torch.ellipsoid import ReducedHullPoints
from sepc_torch.shapes import Array, Bool, Float, Int
from sepc_torch.solvers.capped_weights import nearest_combination

# Half the band, in points: enough for the D + 1 free points of an optimum and for the threshold to wander.
_HALF_BAND = 300
# Up to so many free points, or dimensions, Wolfe's method alone is faster: it takes a few steps for each dimension.
_FEW = 100
_FEW_DIMENSIONS = 11
# The first round looks at this many of the outermost points, or at four times as many as a vertex selects.
_OUTERMOST = 1500
# Points that tell the spread of a set well enough.
_SAMPLE = 256
# Certified gap at which to stop, relative to the squared extent of the data: where rounding ends the descent.
_GAP = 1e-14
# Above this gap, steps through normal equations are precise enough.
_COARSE = 1e-8
# Hulls closer than the square root of this, relative to the extent, have a point in common.
_TOUCHING = 1e-20
_MAX_ROUNDS = 60
_MAX_STEPS = 1000
_NOTHING = np.zeros(0)
# A vertex whose share of the current point is below this has left the corral.
_EMPTY = 1e-12


def closest_points(
    x: Float[Array, "N D"],
    y: Float[Array, "M D"],
    cap: float,
    direction: Float[Array, "D"] | None = None,
) -> ReducedHullPoints:
    """Solve program (4) natively; ``direction`` is a guess of c - d, the arguments are checked by the caller."""
    means = x.mean(axis=0), y.mean(axis=0)
    origin = 0.5 * (means[0] + means[1])
    # Far from the origin differences lose digits; near it, copies of large sets would be a good part of the work.
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
    # A vertex that averages many points is well inside: then the outermost tell little, and the centroids enough.
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
        # Each band allows what improves on the last solution, so that no progress means: up to rounding.
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
    """The weights of the closest points that the present bands allow, from weights (u, v) that they allow."""
    sizes = np.array([len(first.free), len(second.free)])
    z = np.concatenate([u[first.free], v[second.free]])
    if len(z) > _FEW and len(first.base) > _FEW_DIMENSIONS:
        points = np.concatenate([first.band, -second.band])
        groups = np.repeat(np.eye(2, dtype=bool), sizes, axis=0)[:, sizes > 0]
        sums = np.array([first.mass, second.mass])[sizes > 0]
        found = nearest_combination(points, first.base - second.base, groups, sums, first.cap, 0.1 * _GAP * extent)
        z = z if found is None else found
    corral = _Corral(first, second, z[: sizes[0]], z[sizes[0] :])
    corral.descend(extent)
    return corral.weights()


def _select(values: Float[Array, "m"], mass: float, cap: float) -> Float[Array, "m"]:
    """Spread the mass over the least values, each up to the cap."""
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
    """One reduced hull: all points, and the band within which weights are free at present."""

    free: Int[Array, "m"]
    band: Float[Array, "m D"]
    base: Float[Array, "D"]
    mass: float

    def __init__(self, points: Float[Array, "N D"], cap: float) -> None:
        self.points, self.cap = points, cap
        self.single = cap * len(points) <= 1.0 + 1e-9  # the hull is its centroid

    def best(self, w: Float[Array, "D"]) -> Float[Array, "N"]:
        """Weights of the vertex of least value along w, over all points."""
        if self.single:
            return np.full(len(self.points), 1.0 / len(self.points))
        return _select(self.points @ w, 1.0, self.cap)

    def free_outermost(self, weights: Float[Array, "N"]) -> None:
        """Open a round in which the points farthest from the mean, and those that carry weight, are free."""
        count = len(self.points)
        wanted = max(_OUTERMOST, int(4.0 / self.cap))
        free = np.full(count, not self.single)
        if wanted < count and not self.single:
            offsets = self.points - self.points.mean(axis=0)
            free = weights > 0
            free[np.argpartition(-np.einsum("ij,ij->i", offsets, offsets), wanted)[:wanted]] = True
        self._open(free, weights)

    def free_band(self, w: Float[Array, "D"], weights: Float[Array, "N"], half: int) -> None:
        """Open a round in which the points around the selection threshold along w are free."""
        count = len(self.points)
        chosen = int(1.0 / self.cap + 1e-9)
        low, high = max(chosen - half, 0), min(chosen + half, count)
        free = np.full(count, not self.single)
        if high - low < count and not self.single:
            order = np.argpartition(self.points @ w, [i for i in (low, high) if i < count])
            assigned = np.zeros(count)
            assigned[order[:low]] = self.cap
            free = np.abs(weights - assigned) > 1e-12 * self.cap
            free[order[low:high]] = True
        self._open(free, weights)

    def _open(self, free: Bool[Array, "N"], weights: Float[Array, "N"]) -> None:
        self.free = np.flatnonzero(free)
        self._fixed = np.where(free, 0.0, weights)
        self.base = self._fixed @ self.points
        self.band, self.mass = self.points[self.free], float(weights[self.free].sum())

    def vertex(self, w: Float[Array, "D"]) -> tuple[Float[Array, "D"], Float[Array, "m"]]:
        """The point of least value along w that the present band allows, and its weights in the band."""
        if self.single:
            return self.base, _NOTHING
        weights = _select(self.band @ w, self.mass, self.cap)
        return self.base + weights @ self.band, weights

    def everywhere(self, weights: Float[Array, "m"]) -> Float[Array, "N"]:
        """Weights of the band among those of all points."""
        whole = self._fixed.copy()
        whole[self.free] = weights
        return whole


class _Corral:
    r"""Wolfe's corral: affinely independent points of the difference of two hulls, and its point of least norm.

    Each major step adds the vertex of least value along the current point; minor steps move to the closest point of the
    corral's affine hull, dropping those whose share runs out. It may begin with any point of the hulls.
    """

    def __init__(self, first: _Side, second: _Side, u: Float[Array, "m"], v: Float[Array, "q"]) -> None:
        self.first, self.second = first, second
        self.vertices = (first.base + u @ first.band - second.base - v @ second.band)[None]
        self.shares = np.ones(1)
        self.found = [(u, v)]

    def weights(self) -> tuple[Float[Array, "N"], Float[Array, "M"]]:
        """The weights of the current point in either set."""
        u, v = (self.shares @ np.stack(weights) for weights in zip(*self.found, strict=True))
        return self.first.everywhere(u), self.second.everywhere(v)

    def descend(self, extent: float) -> None:
        """Steps until no vertex within the present bands improves."""
        for _ in range(_MAX_STEPS):
            w = self.shares @ self.vertices
            norm = float(w @ w)
            (p, p_weights), (q, q_weights) = self.first.vertex(w), self.second.vertex(-w)
            gap = norm - float(w @ (p - q))
            if norm <= _TOUCHING * extent or gap <= 0.5 * _GAP * extent:
                return
            before = self.vertices, self.shares, self.found
            self.vertices = np.concatenate([self.vertices, (p - q)[None]])
            self.shares = np.concatenate([self.shares, np.zeros(1)])
            self.found = [*self.found, (p_weights, q_weights)]
            self._minor_steps(precise=gap <= _COARSE * extent)
            w = self.shares @ self.vertices
            if float(w @ w) >= norm:  # rounding ends the descent
                self.vertices, self.shares, self.found = before
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
            if keep.all():  # only rounding separates the two
                return
            self.vertices = self.vertices[keep]
            self.found = [vertex for vertex, kept in zip(self.found, keep, strict=True) if kept]
            self.shares = self.shares[keep] / self.shares[keep].sum()


def _affine_minimiser(vertices: Float[Array, "k D"], precise: bool) -> Float[Array, "k"]:
    r"""Shares of sum 1, of either sign, that minimise :math:`\|\sum_j a_j p_j\|`.

    They are proportional to :math:`(P P^\top + e e^\top)^{-1} e`; squaring costs half the digits, so the last steps
    solve the least-squares problem itself.
    """
    if not precise:
        gram = vertices @ vertices.T
        gram += gram.trace()  # e e^T on the scale of the rest
        _, a, failed = dposv(gram, np.ones(len(gram)))
        if not failed:
            return a / a.sum()
    last = vertices[-1]
    count, dim = len(vertices) - 1, len(last)
    right = np.zeros(max(count, dim))
    right[:dim] = -last
    # Rank-revealing least squares; LAPACK directly, since this is called for every step. 1e-13 tells noise from rank.
    _, a, *_ = dgelsy((vertices[:-1] - last).T, right, np.zeros(count, dtype=np.int32), 1e-13, 8 * (count + dim) + 64)
    return np.append(a[:count], 1.0 - a[:count].sum())
