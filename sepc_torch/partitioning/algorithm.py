r"""Algorithms 1 and 2 of the paper: cover two sets of points with ellipsoids, a pair of ellipsoids per iteration.

Each iteration finds the closest points :math:`c, d` of the reduced hulls of the remaining points of :math:`X` and
:math:`Y`. With :math:`w = c - d` it selects the points beyond the hyperplanes,
:math:`x^\top w \ge \alpha = c^\top w` and :math:`y^\top w \le \beta = d^\top w`, and covers the selected points of each
set with an ellipsoid. While an ellipsoid holds more than ``max_impure`` remaining points of the other set, the
selection is repeated on the points that the ellipsoid covers. The paper leaves some cases open. The code decides them
as follows:

- An ellipsoid is impure if it holds *more than* ``max_impure`` points of the other set. Algorithm 1 says "at least";
  with "at least", ``max_impure=0`` would never end.
- If :math:`c = d`, or if the selection leaves out no point, the centroids of both sets replace c and d. If the
  centroids do not help either, the points cannot be separated further, and a *terminal* ellipsoid covers all of them.
- A selection with no more points than dimensions is not covered by an ellipsoid; its points are *isolated*. So are the
  points left after the last iteration, if fewer than dimensions. Each isolated point gets a ball whose radius is the
  least semi-axis. Dimensions are counted in the span of the data; constant or dependent features do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from sepc_torch.ellipsoid import Ellipsoid, Kind, MinimumVolumeEllipsoid
from sepc_torch.shapes import Array, Float, Int
from sepc_torch.solvers import NATIVE, ellipsoids_intersect, minimum_volume_ellipsoid, reduced_hull_points
from sepc_torch.solvers.progressive import ProgressiveEllipsoid
from sepc_torch.solvers.reduced_hull import closest_points

# Tolerance of the selection, relative to the spread along w: interior-point solvers leave an error of this size in c
# and d.
_TIE = 1e-7
# Support points must lie this near to the surface. Points farther inside have weight only from the solver's error.
_ON_SURFACE = 1e-4
# Hulls count as touching when c and d are closer than this share of the data's extent.
_COINCIDENT = 1e-7


class Piece(NamedTuple):
    """An ellipsoid of the first (side 0) or second (side 1) set.

    ``members`` are the rows of the set that the ellipsoid was fitted to, ``support`` the rows on its surface.
    """

    side: int
    kind: Kind
    iteration: int
    ellipsoid: Ellipsoid
    members: Int[Array, "n"]
    support: Int[Array, "S"]


class Hyperplane(NamedTuple):
    r"""The hyperplanes :math:`w^\top z = \alpha` and :math:`w^\top z = \beta` of one iteration, :math:`w = c - d`."""

    iteration: int
    w: Float[Array, "D"]
    alpha: float
    beta: float


class Separation(NamedTuple):
    """The ellipsoids of both sets and the hyperplanes of every iteration."""

    pieces: tuple[Piece, ...]
    hyperplanes: tuple[Hyperplane, ...]


@runtime_checkable
class Covering(Protocol):
    """The minimum-volume ellipsoid of a set, with the operations that the algorithm needs."""

    def exact(self) -> MinimumVolumeEllipsoid:
        """The ellipsoid, solved to the tolerance."""

    def holds_more_than(self, limit: int, others: Float[Array, "M D"]) -> bool:
        """Whether more than ``limit`` of the points ``others`` lie inside."""

    def subset(self, rows: Int[Array, "n"]) -> Covering:
        """The covering of the points in the given rows."""


class _CvxpyCovering:
    """A covering solved by a cvxpy solver."""

    def __init__(self, points: Float[Array, "N D"], floor: float, solver: str) -> None:
        self._points, self._floor, self._solver = points, floor, solver
        self._ellipsoid = minimum_volume_ellipsoid(points, solver=solver, floor=floor)

    def subset(self, rows: Int[Array, "n"]) -> _CvxpyCovering:
        return _CvxpyCovering(self._points[rows], self._floor, self._solver)

    def exact(self) -> MinimumVolumeEllipsoid:
        return self._ellipsoid

    def holds_more_than(self, limit: int, others: Float[Array, "M D"]) -> bool:
        return int(np.count_nonzero(self._ellipsoid.contains(others))) > limit


class _Step(NamedTuple):
    """The hyperplane of one application of Algorithm 2 and the rows that it selects in each set.

    ``coverings`` are the ellipsoids of the selected rows, if they are already known.
    """

    hyperplane: Hyperplane
    chosen: tuple[Int[Array, "n"], Int[Array, "m"]]
    coverings: tuple[Covering | None, Covering | None]


class Separator:
    r"""Algorithms 1 and 2 with their parameters.

    Args:
        max_impure: Remaining points of the other set that an ellipsoid may hold.
        floor: Least semi-axis of an ellipsoid.
        dim: Dimension of the space that the data span, by default the number of features. Selections with at most this
            many points are treated as isolated points.
        metric: Factor by which each feature is scaled for the reduced hulls. Reduced hulls depend on the scale of the
            features, ellipsoids do not.
        tol: Relative gap to which ellipsoids are certified.
        solver: ``"native"`` or the name of an installed cvxpy solver.
        keep: Whether to return the ellipsoids of the first and of the second set. A set that is not kept only serves to
            separate the other.
        tick: Callback for progress, called with the number of points of the kept sets that were just covered.
    """

    def __init__(
        self,
        *,
        max_impure: int,
        floor: float,
        dim: int | None = None,
        metric: Float[Array, "D"] | None = None,
        tol: float = 1e-7,
        solver: str = NATIVE,
        keep: tuple[bool, bool] = (True, True),
        tick: Callable[[int], None] | None = None,
    ) -> None:
        self.max_impure, self.floor, self.dim, self.metric = max_impure, floor, dim, metric
        self.tol, self.solver = tol, solver
        self.keep, self.tick = keep, tick

    def separate(self, x: Float[Array, "N D"], y: Float[Array, "M D"]) -> Separation:
        """Run Algorithm 1 on the sets ``x`` and ``y``."""
        sets, dim = (x, y), self._dim(x)
        left = [np.arange(len(x)), np.arange(len(y))]
        pieces: list[Piece] = []
        hyperplanes: list[Hyperplane] = []
        iteration = 1
        while min(len(left[0]), len(left[1])) > dim and self._wanted(left):
            remaining = x[left[0]], y[left[1]]
            step = self._first_step(*remaining, iteration)
            if step is None:
                break
            hyperplanes.append(step.hyperplane)
            for side in (0, 1):
                if not self.keep[side] and len(left[1 - side]) <= dim:
                    break  # the kept set has too few points left to be separated further
                own, others = remaining[side], remaining[1 - side]
                members, covering, pure = self._shrink(own, others, step.chosen[side], step.coverings[side])
                if self.keep[side]:
                    kind = Kind.TERMINAL if not pure else Kind.FIRST if iteration == 1 else Kind.FURTHER
                    rows = left[side][members]
                    pieces += self._pieces(side, kind, iteration, sets[side], rows, others, covering)
                left[side] = np.delete(left[side], members)
                self._done(side, len(members))
            iteration += 1
        for side in (0, 1):
            if self.keep[side] and len(left[side]):
                # Line 27 of Algorithm 1 needs n points here, the loop n + 1. The two points of each XOR class therefore
                # get an ellipsoid.
                covering = self._cover(sets[side][left[side]]) if len(left[side]) >= dim else None
                others = sets[1 - side][left[1 - side]]
                pieces += self._pieces(side, Kind.TERMINAL, iteration, sets[side], left[side], others, covering)
                self._done(side, len(left[side]))
        return Separation(tuple(pieces), tuple(hyperplanes))

    def _dim(self, points: Float[Array, "N D"]) -> int:
        return points.shape[1] if self.dim is None else self.dim

    def _done(self, side: int, points: int) -> None:
        if self.tick is not None and self.keep[side]:
            self.tick(points)

    def _wanted(self, left: list[Array]) -> bool:
        return any(keep and len(rows) > 0 for keep, rows in zip(self.keep, left, strict=True))

    def _first_step(self, x: Float[Array, "N D"], y: Float[Array, "M D"], iteration: int) -> _Step | None:
        """Apply Algorithm 2 to the remaining points of both sets; None if they cannot be separated."""
        disjoint = self._disjoint(x, y)
        hx, hy = self._in_metric(x), self._in_metric(y)
        if disjoint is not None:
            c, d = self._closest(hx, hy, cap=1.0)
            return _Step(_hyperplane(iteration, c, d), (np.arange(len(x)), np.arange(len(y))), disjoint)
        for c, d in self._directions(hx, hy):
            chosen = _beyond(hx, c - d, c), _beyond(hy, d - c, d)
            if min(map(len, chosen)) > 0 and len(chosen[0]) + len(chosen[1]) < len(x) + len(y):
                return _Step(_hyperplane(iteration, c, d), chosen, (None, None))
        return None

    def _shrink(
        self,
        own: Float[Array, "N D"],
        others: Float[Array, "M D"],
        members: Int[Array, "n"],
        covering: Covering | None,
    ) -> tuple[Int[Array, "m"], Covering | None, bool]:
        """Repeat Algorithm 2 on the covered points until the ellipsoid holds at most ``max_impure`` of the others.

        Returns the rows covered, their ellipsoid (None for isolated points) and whether the ellipsoid is pure enough.
        The ellipsoids of the two sets need no intersection test here: an impure ellipsoid holds points of the other
        set, so that the two ellipsoids intersect.
        """
        own_in_metric, others_in_metric = self._in_metric(own), self._in_metric(others)
        direction = None
        if covering is None and len(members) > self._dim(own):
            covering = self._cover(own[members])
        while covering is not None:
            if not self._impure(covering, others):
                return members, covering, True
            points = own_in_metric[members]
            for c, d in self._directions(points, others_in_metric, direction):
                beyond = _beyond(points, c - d, c)
                if 0 < len(beyond) < len(points):
                    members, direction = members[beyond], c - d
                    covering = covering.subset(beyond) if len(beyond) > self._dim(own) else None
                    break
            else:
                return members, covering, False
        return members, None, True

    def _directions(
        self, x: Float[Array, "N D"], y: Float[Array, "M D"], guess: Float[Array, "D"] | None = None
    ) -> Iterator[tuple[Float[Array, "D"], Float[Array, "D"]]]:
        """Yield the pairs (c, d) to try: the closest points of the reduced hulls, then the centroids."""
        means = x.mean(axis=0), y.mean(axis=0)
        extent = max(float(np.maximum(z.max(axis=0) - means[0], means[0] - z.min(axis=0)).max()) for z in (x, y))
        # For sets of equal size the reduced hulls are the centroids, which are yielded below.
        if len(x) != len(y):
            c, d = self._closest(x, y, 1.0 / min(len(x), len(y)), guess)
            if float(np.linalg.norm(c - d)) > _COINCIDENT * extent:
                yield c, d
        if float(np.linalg.norm(means[0] - means[1])) > _COINCIDENT * extent:
            yield means

    def _pieces(
        self,
        side: int,
        kind: Kind,
        iteration: int,
        points: Float[Array, "N D"],
        rows: Int[Array, "n"],
        others: Float[Array, "M D"],
        covering: Covering | None,
    ) -> list[Piece]:
        """One piece of the given kind for the covering of ``rows``; without a covering, balls for isolated points."""
        if covering is None:
            return self._balls(side, iteration, points, rows, others)
        ellipsoid = covering.exact()
        on_surface = ellipsoid.distance(points[rows[ellipsoid.support]]) >= 1.0 - _ON_SURFACE
        return [Piece(side, kind, iteration, ellipsoid, rows, rows[ellipsoid.support[on_surface]])]

    def _balls(
        self,
        side: int,
        iteration: int,
        points: Float[Array, "N D"],
        rows: Int[Array, "n"],
        others: Float[Array, "M D"],
    ) -> list[Piece]:
        """One ball for each distinct location of the isolated points ``rows``."""
        places, place = np.unique(points[rows], axis=0, return_inverse=True)
        pieces = []
        for i in range(len(places)):
            ball = Ellipsoid.ball(places[i], self.floor)
            # Points of both sets at one location cannot be separated: a ball that holds too many others is terminal.
            impure = int(np.count_nonzero(ball.contains(others))) > self.max_impure
            members = rows[place.ravel() == i]
            kind = Kind.TERMINAL if impure else Kind.ISOLATED
            pieces.append(Piece(side, kind, iteration, ball, members, members[:1]))
        return pieces

    def _cover(self, points: Float[Array, "N D"]) -> Covering:
        if self.solver == NATIVE:
            return ProgressiveEllipsoid(points, self.tol, self.floor)
        return _CvxpyCovering(points, self.floor, self.solver)

    def _impure(self, covering: Covering, others: Float[Array, "M D"]) -> bool:
        return len(others) > self.max_impure and covering.holds_more_than(self.max_impure, others)

    def _disjoint(self, x: Float[Array, "N D"], y: Float[Array, "M D"]) -> tuple[Covering, Covering] | None:
        """The ellipsoids of both sets if they do not intersect, otherwise None."""
        mine, theirs = self._cover(x), self._cover(y)
        if isinstance(mine, ProgressiveEllipsoid) and isinstance(theirs, ProgressiveEllipsoid):
            meet = mine.intersects(theirs)
        else:
            meet = ellipsoids_intersect(mine.exact(), theirs.exact(), solver=self.solver)
        return None if meet else (mine, theirs)

    def _closest(
        self, x: Float[Array, "N D"], y: Float[Array, "M D"], cap: float, guess: Float[Array, "D"] | None = None
    ) -> tuple[Float[Array, "D"], Float[Array, "D"]]:
        if self.solver == NATIVE:
            found = closest_points(x, y, cap, guess)
        else:
            found = reduced_hull_points(x, y, cap=cap, solver=self.solver)
        return found.c, found.d

    def _in_metric(self, points: Float[Array, "N D"]) -> Float[Array, "N D"]:
        return points if self.metric is None else points * self.metric


def _hyperplane(iteration: int, c: Float[Array, "D"], d: Float[Array, "D"]) -> Hyperplane:
    w = c - d
    return Hyperplane(iteration, w, float(c @ w), float(d @ w))


def _beyond(points: Float[Array, "N D"], w: Float[Array, "D"], c: Float[Array, "D"]) -> Int[Array, "n"]:
    r"""Rows with :math:`x^\top w \ge c^\top w`, ties included."""
    values = points @ w
    rounding = 1e-13 * float(np.abs(values).max())
    return np.flatnonzero(values >= float(c @ w) - _TIE * float(np.ptp(values)) - rounding)
