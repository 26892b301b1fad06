r"""Steps of the partition that are common to both ways of treating the rest: covering, directions, isolated points.

:class:`~sepc_torch.partitioning.algorithm.Separator` separates two sets as the paper does.
:class:`~sepc_torch.partitioning.class_separator.ClassSeparator` covers one class and leaves the others as they are.
Both cover selected points with an ellipsoid, find the direction along which to select points, and give isolated points
a ball each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from sepc_torch.ellipsoid import SURFACE_TOLERANCE, Ellipsoid, Kind, MinimumVolumeEllipsoid
from sepc_torch.shapes import Array, Float, Int
from sepc_torch.solvers import NATIVE, minimum_volume_ellipsoid, reduced_hull_points
from sepc_torch.solvers.other_points import OtherPoints
from sepc_torch.solvers.progressive import ProgressiveEllipsoid
from sepc_torch.solvers.reduced_hull import closest_points

# Tolerance of the selection, relative to the spread along w: interior-point solvers leave an error of this size in c
# and d.
_TIE = 1e-7
# Support points must lie this near to the surface. Points farther inside have weight only from the solver's error.
_ON_SURFACE = 1e-4
# Hulls count as touching when c and d are closer than this share of the data's extent.
_COINCIDENT = 1e-7
# A direction leads away from at most twice as many points as are covered, but at least this many if there are more:
# more points would hardly change the direction.
_ENOUGH_INTRUDERS = 512


class Piece(NamedTuple):
    """An ellipsoid of the first (side 0) or second (side 1) set; the set of a class is the first.

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

    def holds_more_than(self, limit: int, others: OtherPoints) -> bool:
        """Whether more than ``limit`` of the other points lie inside."""

    def intruders(self, limit: int, others: OtherPoints, enough: int) -> Float[Array, "m D"] | None:
        """At most ``enough`` other points in or near the ellipsoid; None if at most ``limit`` lie inside."""

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

    def holds_more_than(self, limit: int, others: OtherPoints) -> bool:
        return int(np.count_nonzero(self._ellipsoid.contains(others.all()))) > limit

    def intruders(self, limit: int, others: OtherPoints, enough: int) -> Float[Array, "m D"] | None:
        points = others.all()
        inside = points[self._ellipsoid.contains(points)]
        return inside[: max(enough, limit + 1)] if len(inside) > limit else None


class Shrunk(NamedTuple):
    """The result of shrinking a selection until its ellipsoid is pure enough.

    ``members`` are the rows covered, ``covering`` is their ellipsoid (None for isolated points), ``pure`` says whether
    it holds at most ``max_impure`` others, and ``first`` is the first pair of points (c, d) along which points were
    selected, or None.
    """

    members: Int[Array, "n"]
    covering: Covering | None
    pure: bool
    first: tuple[Float[Array, "D"], Float[Array, "D"]] | None

    def kind(self, iteration: int) -> Kind:
        """How the algorithm came to fit the ellipsoid."""
        return Kind.TERMINAL if not self.pure else Kind.FIRST if iteration == 1 else Kind.FURTHER


class Steps:
    r"""The common steps with their parameters.

    Args:
        max_impure: Points of other classes that an ellipsoid may hold.
        floor: Least semi-axis of an ellipsoid.
        dim: Dimension of the space that the data span, by default the number of features. Selections with at most this
            many points are treated as isolated points.
        metric: Factor by which each feature is scaled for the reduced hulls. Reduced hulls depend on the scale of the
            features, ellipsoids do not.
        tol: Relative gap to which ellipsoids are certified.
        solver: ``"native"`` or the name of an installed cvxpy solver.
        max_isolated: Largest number of isolated points that get a ball each; None for all. In a class with more, none
            does. With a limit, a class whose points are all isolated gets one terminal ellipsoid instead of balls.
        tick: Callback for progress, called with the number of points that were just covered.
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
        max_isolated: int | None = None,
        tick: Callable[[int], None] | None = None,
    ) -> None:
        self.max_impure, self.floor, self.dim, self.metric = max_impure, floor, dim, metric
        self.tol, self.solver, self.max_isolated, self.tick = tol, solver, max_isolated, tick

    def _dim(self, points: Float[Array, "N D"]) -> int:
        return points.shape[1] if self.dim is None else self.dim

    def _done(self, points: int) -> None:
        if self.tick is not None:
            self.tick(points)

    def _cover(self, points: Float[Array, "N D"]) -> Covering:
        if self.solver == NATIVE:
            return ProgressiveEllipsoid(points, self.tol, self.floor)
        return _CvxpyCovering(points, self.floor, self.solver)

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

    def _shrink(
        self,
        own: Float[Array, "N D"],
        others: OtherPoints,
        members: Int[Array, "n"],
        covering: Covering | None = None,
        rest: Float[Array, "M D"] | None = None,
    ) -> Shrunk:
        """Repeat Algorithm 2 on the covered points until the ellipsoid holds at most ``max_impure`` of the others.

        Args:
            own: The points of the class.
            others: The points that may not lie inside.
            members: Rows of the first selection.
            covering: Their ellipsoid, if it is known.
            rest: The points that the selection moves away from. By default those of the others that lie inside, or the
                first of them if there are many.
        """
        dim, first, direction = self._dim(own), None, None
        away = None if rest is None else self._in_metric(rest)
        if covering is None and len(members) > dim:
            covering = self._cover(own[members])
        while covering is not None:
            if away is None:
                found = covering.intruders(self.max_impure, others, max(_ENOUGH_INTRUDERS, 2 * len(members)))
                against = None if found is None else self._in_metric(found)
            else:
                against = away if covering.holds_more_than(self.max_impure, others) else None
            if against is None:
                return Shrunk(members, covering, True, first)
            points = self._in_metric(own[members])
            for c, d in self._directions(points, against, direction):
                beyond = rows_beyond(points, c - d, c)
                if 0 < len(beyond) < len(points):
                    break
            else:
                return Shrunk(members, covering, False, first)
            first = (c, d) if first is None else first
            # The hull of all others changes little from step to step. That of the points inside does.
            direction = None if rest is None else c - d
            members = members[beyond]
            covering = covering.subset(beyond) if len(beyond) > dim else None
        return Shrunk(members, None, True, first)

    def _piece(
        self,
        side: int,
        kind: Kind,
        iteration: int,
        points: Float[Array, "N D"],
        rows: Int[Array, "n"],
        covering: Covering,
    ) -> Piece:
        """The piece of the given kind for the covering of ``rows``."""
        ellipsoid = covering.exact()
        on_surface = ellipsoid.distance(points[rows[ellipsoid.support]]) >= 1.0 - _ON_SURFACE
        return Piece(side, kind, iteration, ellipsoid, rows, rows[ellipsoid.support[on_surface]])

    def _whole(self, side: int, iteration: int, points: Float[Array, "N D"]) -> Piece:
        """One terminal ellipsoid for a class whose points are all isolated."""
        return self._piece(side, Kind.TERMINAL, iteration, points, np.arange(len(points)), self._cover(points))

    def _balls(
        self,
        side: int,
        iteration: int,
        points: Float[Array, "N D"],
        rows: Int[Array, "n"],
        others: OtherPoints,
    ) -> list[Piece]:
        """One ball for each distinct location of the isolated points ``rows``."""
        places, place = np.unique(points[rows], axis=0, return_inverse=True)
        near = others.near_any(places, self.floor * (1.0 + SURFACE_TOLERANCE))
        pieces = []
        for i in range(len(places)):
            ball = Ellipsoid.ball(places[i], self.floor)
            # Points of both sets at one location cannot be separated: a ball that holds too many others is terminal.
            impure = int(np.count_nonzero(ball.contains(near))) > self.max_impure
            members = rows[place.ravel() == i]
            kind = Kind.TERMINAL if impure else Kind.ISOLATED
            pieces.append(Piece(side, kind, iteration, ball, members, members[:1]))
        return pieces

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


def hyperplane(iteration: int, c: Float[Array, "D"], d: Float[Array, "D"]) -> Hyperplane:
    """The hyperplanes through c and d, perpendicular to their difference."""
    w = c - d
    return Hyperplane(iteration, w, float(c @ w), float(d @ w))


def rows_beyond(points: Float[Array, "N D"], w: Float[Array, "D"], c: Float[Array, "D"]) -> Int[Array, "n"]:
    r"""Rows with :math:`x^\top w \ge c^\top w`, ties included."""
    values = points @ w
    rounding = 1e-13 * float(np.abs(values).max())
    return np.flatnonzero(values >= float(c @ w) - _TIE * float(np.ptp(values)) - rounding)
