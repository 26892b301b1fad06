r"""Lazily refined minimum-volume ellipsoid (program (2)): solved only as accurately as each query requires.

The partition algorithm asks whether an ellipsoid contains more than a given number of points of other classes, which
they are, and whether two ellipsoids intersect. A coarse design with its enclosure
:math:`E_- \subseteq E_\star \subseteq E_+` (:mod:`sepc_torch.solvers.d_optimal`) answers most queries. If it does not
decide a query, the design is refined. Every yes or no is that of the exact ellipsoid :math:`E_\star`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sepc_torch.ellipsoid import SURFACE_TOLERANCE, Ellipsoid, MinimumVolumeEllipsoid, whitened_norms
from sepc_torch.shapes import Array, Bool, Float, Int
from sepc_torch.solvers.affine_hull import AffineHull, affine_hull, thickness
from sepc_torch.solvers.d_optimal import Bounds, Design, inverse_root
from sepc_torch.solvers.minimum_volume import from_weights, lifted, minimum_volume
from sepc_torch.solvers.other_points import OtherPoints

# Gaps at which an undecided query is tried again. After the last stage the exact ellipsoid costs hardly more.
_STAGES = (0.3, 0.05, 5e-3, 2e-4)
# A design whose first gap is at most this large is tried before any refinement.
_FIRST_GAP = 2.0
# Against more points than this, a query starts at a smaller gap: in many dimensions a coarse enclosure is so large that
# it excludes few points, and a pass over all of them takes longer than the refinement.
_MANY_OTHERS = 4096
_FIRST_GAP_OF_MANY = 5e-3


class ProgressiveEllipsoid:
    """Minimum-volume ellipsoid of ``points`` with semi-axes of at least ``floor``, refined to ``tol`` on demand.

    ``start`` holds indices of points that probably support the ellipsoid. If the enclosure cannot be used (the floor is
    active, the points coincide, or a factorisation fails), the exact ellipsoid is computed at once.
    """

    def __init__(
        self,
        points: Float[Array, "N D"],
        tol: float,
        floor: float,
        start: Int[Array, "S"] | None = None,
    ) -> None:
        self.points, self.tol, self.floor = points, tol, floor
        self._exact: MinimumVolumeEllipsoid | None = None
        self._inherited = False
        try:
            self._hull = affine_hull(points)
            decidable = self._hull.rank > 0 and thickness(points - self._hull.origin, self._hull, floor) in (0.0, floor)
            if decidable:
                self._design = Design(lifted(self._hull), start)
                decidable = self._floor_is_inactive()
        except np.linalg.LinAlgError:
            decidable = False
        if not decidable:
            self._exact = minimum_volume(points, tol, floor, start)

    def subset(self, rows: Int[Array, "n"]) -> ProgressiveEllipsoid:
        """The ellipsoid of some of the points, started from the design of this ellipsoid where possible."""
        points = self.points[rows]
        if self._exact is None and not self._hull.normals.shape[1] and len(rows) > self._hull.rank:
            part = ProgressiveEllipsoid.__new__(ProgressiveEllipsoid)
            part.points, part.tol, part.floor = points, self.tol, self.floor
            part._exact, part._hull, part._inherited = None, self._hull, True
            try:
                part._design = self._design.subset(rows)
                if part._floor_is_inactive():
                    return part
            except np.linalg.LinAlgError:
                pass  # the remaining support points do not span the space
        return ProgressiveEllipsoid(points, self.tol, self.floor)

    def exact(self) -> MinimumVolumeEllipsoid:
        """The ellipsoid with a certified gap of ``tol``."""
        if self._exact is None and self._inherited:
            # Solve in the whitened coordinates of these points: the result must not depend on the parent set.
            self._exact = minimum_volume(self.points, self.tol, self.floor, self._design.support)
        elif self._exact is None:
            self._design.refine(self.tol)
            self._exact = from_weights(self.points, self._hull, self._design.support, self._design.weights, self.floor)
        return self._exact

    def holds_more_than(self, limit: int, others: OtherPoints) -> bool:
        """Whether more than ``limit`` of the other points lie inside or on the surface."""
        return any(
            found.certain > limit
            for found in self._searches(others, limit + 1)
            if found.certain > limit or found.possible <= limit
        )

    def intruders(self, limit: int, others: OtherPoints, enough: int) -> Float[Array, "m D"] | None:
        """The other points that the enclosure does not exclude; None if at most ``limit`` lie inside or on the surface.

        The enclosure is the first that shows that more than ``limit`` points lie inside. Of more than ``enough`` points
        the first ``enough`` are returned, in the order of ``others``.
        """
        enough = max(enough, limit + 1)
        for found in self._searches(others, enough):
            if found.possible <= limit:
                return None
            if found.certain > limit:
                break
        return found.points[found.inside | found.undecided][:enough]

    def _searches(self, others: OtherPoints, enough: int) -> Iterator[_Search]:
        """Search for the other points inside, ever more exactly; the last search leaves no point undecided.

        The search ends early as soon as ``enough`` points certainly lie inside. The points before the end of the search
        then include the first ``enough`` points inside.
        """
        found: _Search | None = None
        for view in self._views(_FIRST_GAP if len(others) <= _MANY_OTHERS else _FIRST_GAP_OF_MANY):
            if found is None:
                blocks = others.near(view.center, view.factor, view.farthest_level())
                found = _search(blocks, view.sides, enough)
            else:
                found.refine(view.sides)
            yield found
        exact = self.exact()

        def sides(z: Float[Array, "M D"]) -> tuple[Bool[Array, "M"], Bool[Array, "M"]]:
            inside = exact.contains(z)
            return inside, ~inside

        if found is None:
            found = _search(others.near(exact.center, exact.whitener, (1.0 + SURFACE_TOLERANCE) ** 2), sides, enough)
        else:
            found.refine(sides)
        yield found

    def intersects(self, other: ProgressiveEllipsoid) -> bool:
        """Whether the two ellipsoids have a point in common."""
        for mine, theirs in zip(self._views(), other._views(), strict=False):
            inner, other_inner = mine.ellipsoid(outer=False), theirs.ellipsoid(outer=False)
            if inner is not None and other_inner is not None and inner.intersects(other_inner):
                return True
            outer, other_outer = mine.ellipsoid(outer=True), theirs.ellipsoid(outer=True)
            if outer is not None and other_outer is not None and not outer.intersects(other_outer):
                return False
        return self.exact().intersects(other.exact())

    def _floor_is_inactive(self) -> bool:
        """Whether the floor is inactive, so that the enclosure of the ellipsoid without a floor is valid."""
        return any(view.thinnest() >= self.floor for view in self._views())

    def _views(self, coarsest: float = _FIRST_GAP) -> Iterator[_View]:
        """Successively tighter enclosures from the gap ``coarsest`` on; none once the exact ellipsoid is known."""
        if self._exact is not None:
            return
        if self._design.gap <= coarsest:
            yield self._view()
        for stage in _STAGES:
            if stage <= coarsest and self._design.gap > stage:
                self._design.refine(stage)
                yield self._view()

    def _view(self) -> _View:
        weights, y = self._design.weights, self._design.columns()[:, :-1]
        middle = weights @ y
        factor = self._hull.in_callers_coordinates(inverse_root(y - middle, weights))
        center = self._hull.origin + weights @ (self.points[self._design.support] - self._hull.origin)
        return _View(self._hull, center, factor, self._design.bounds, self.floor)


Sides = Callable[[Array], tuple[Array, Array]]


@dataclass
class _Search:
    """Points that may lie inside an ellipsoid: those certainly inside, and those undecided."""

    points: Float[Array, "m D"]
    inside: Bool[Array, "m"]
    undecided: Bool[Array, "m"]

    @property
    def certain(self) -> int:
        """Number of points that certainly lie inside."""
        return int(np.count_nonzero(self.inside))

    @property
    def possible(self) -> int:
        """Number of points that may lie inside."""
        return self.certain + int(np.count_nonzero(self.undecided))

    def refine(self, sides: Sides) -> None:
        """Decide more points by masks of those certainly inside and certainly outside."""
        rows = np.flatnonzero(self.undecided)
        inside, outside = sides(self.points[rows])
        self.inside[rows] = inside
        self.undecided[rows] = ~(inside | outside)


def _search(blocks: Iterator[Float[Array, "m D"]], sides: Sides, enough: int) -> _Search:
    """Search block by block until ``enough`` points certainly lie inside."""
    points, inside, certain = [], [], 0
    for block in blocks:
        held, outside = sides(block)
        kept = ~outside
        points.append(block[kept])
        inside.append(held[kept])
        certain += int(np.count_nonzero(held))
        if certain >= enough:
            break
    held = np.concatenate(inside)
    return _Search(np.concatenate(points), held, ~held)


class _View(NamedTuple):
    r"""Enclosure of the exact ellipsoid at one stage of refinement.

    With :math:`g(z) = 1 + \|F (z - c)\|^2` the exact value satisfies
    :math:`g / \lambda_+ \le g_\star \le g / \lambda_-`.
    """

    hull: AffineHull
    center: Float[Array, "D"]
    factor: Float[Array, "R D"]
    bounds: Bounds
    thickness: float

    def sides(self, z: Float[Array, "M D"]) -> tuple[Bool[Array, "M"], Bool[Array, "M"]]:
        """Masks of the points that are certainly inside and certainly outside the exact ellipsoid."""
        g = 1.0 + whitened_norms(z, self.center, self.factor) ** 2
        across = np.zeros(1)
        if self.hull.normals.shape[1]:
            across = whitened_norms(z, self.center, self.hull.normals.T / self.thickness) ** 2
        # Within the hull the squared distance to the exact ellipsoid is (g* - 1) / r.
        farthest = (g / self.bounds.inner - 1.0) / self.hull.rank + across
        nearest = (g / self.bounds.outer - 1.0) / self.hull.rank + across
        return farthest <= 1.0, nearest > (1.0 + 2.0 * SURFACE_TOLERANCE) ** 2

    def farthest_level(self) -> float:
        """The value of ||F (z - c)||^2 beyond which a point is certainly outside."""
        return self.bounds.outer * (1.0 + self.hull.rank * (1.0 + 2.0 * SURFACE_TOLERANCE) ** 2) - 1.0

    def thinnest(self) -> float:
        """A lower bound on the semi-axes within the hull."""
        level = self._level(self.bounds.inner)
        return float(np.sqrt(level) / np.linalg.norm(self.factor, 2)) if level > 0 else 0.0

    def ellipsoid(self, outer: bool) -> Ellipsoid | None:
        """The outer or inner ellipsoid of the enclosure; None if the enclosure is too coarse for an inner ellipsoid."""
        level = self._level(self.bounds.outer if outer else self.bounds.inner)
        if level <= 0:
            return None
        normals = self.hull.normals
        rows = self.factor / np.sqrt(level)
        if normals.shape[1]:
            rows = np.concatenate([rows, normals.T / self.thickness])
        return Ellipsoid(self.center, rows)

    def _level(self, bound: float) -> float:
        """The level of ||F (z - c)||^2 at the surface g = (r + 1) * bound."""
        return (self.hull.rank + 1) * bound - 1.0
