r"""The minimum-volume ellipsoid of a set, computed only as far as the questions asked of it need.

The partition mostly asks yes-or-no questions: do more than so many points of another class lie inside, do two
ellipsoids meet? A coarse design with its enclosure :math:`E_- \subseteq E_\star \subseteq E_+`
(:mod:`sepc_torch.solvers.d_optimal`) answers nearly all of them; what it leaves open is refined, and the answer is
always that of the exact ellipsoid.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sepc_torch.ellipsoid import SURFACE_TOLERANCE, Ellipsoid, MinimumVolumeEllipsoid, whitened_norms
from sepc_torch.shapes import Array, Bool, Float, Int
from sepc_torch.solvers.affine_hull import AffineHull, affine_hull, thickness
from sepc_torch.solvers.d_optimal import Bounds, Design, inverse_root
from sepc_torch.solvers.minimum_volume import from_weights, lifted, minimum_volume

# Gaps at which open questions are looked at again; after the last the exact ellipsoid costs hardly more.
_STAGES = (0.3, 0.05, 5e-3, 2e-4)
# A design that begins with less than this gap may already answer.
_WORTH_A_LOOK = 2.0


class ProgressiveEllipsoid:
    """The ellipsoid of ``points`` with semi-axes of at least ``floor``, exact to ``tol`` once that matters."""

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
                decidable = self._thick_enough()
        except np.linalg.LinAlgError:
            decidable = False
        if not decidable:
            self._exact = minimum_volume(points, tol, floor, start)

    def subset(self, rows: Int[Array, "n"]) -> ProgressiveEllipsoid:
        """The ellipsoid of some of the points, which begins with what is known of this one."""
        points = self.points[rows]
        if self._exact is None and not self._hull.normals.shape[1] and len(rows) > self._hull.rank:
            part = ProgressiveEllipsoid.__new__(ProgressiveEllipsoid)
            part.points, part.tol, part.floor = points, self.tol, self.floor
            part._exact, part._hull, part._inherited = None, self._hull, True
            try:
                part._design = self._design.subset(rows)
                if part._thick_enough():
                    return part
            except np.linalg.LinAlgError:
                pass  # too few of the points that carried weight are left
        return ProgressiveEllipsoid(points, self.tol, self.floor)

    def exact(self) -> MinimumVolumeEllipsoid:
        """The certified ellipsoid."""
        if self._exact is None and self._inherited:
            # In coordinates of its own the result does not depend on how one got here.
            self._exact = minimum_volume(self.points, self.tol, self.floor, self._design.support)
        elif self._exact is None:
            self._design.refine(self.tol)
            self._exact = from_weights(self.points, self._hull, self._design.support, self._design.weights, self.floor)
        return self._exact

    def holds_more_than(self, limit: int, others: Float[Array, "M D"]) -> bool:
        """Whether more than ``limit`` of the other points lie inside (the surface included)."""
        for view in self._views():
            if len(others) <= limit:
                return False
            inside, outside = view.sides(others)
            # Only the undecided points are looked at again, against what is left of the limit.
            limit -= int(np.count_nonzero(inside))
            if limit < 0:
                return True
            others = others[~(inside | outside)]
        return len(others) > limit and int(np.count_nonzero(self.exact().contains(others))) > limit

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

    def _thick_enough(self) -> bool:
        """Whether what the enclosure says of the plain ellipsoid holds for the floored one: the floor does not act."""
        return any(view.thinnest() >= self.floor for view in self._views())

    def _views(self) -> Iterator[_View]:
        """What is known, more precise each time, until the exact ellipsoid is the better answer."""
        if self._exact is not None:
            return
        if self._design.gap <= _WORTH_A_LOOK:
            yield self._view()
        for stage in _STAGES:
            if self._design.gap > stage:
                self._design.refine(stage)
                yield self._view()

    def _view(self) -> _View:
        weights, y = self._design.weights, self._design.columns()[:, :-1]
        middle = weights @ y
        factor = self._hull.in_callers_coordinates(inverse_root(y - middle, weights))
        center = self._hull.origin + weights @ (self.points[self._design.support] - self._hull.origin)
        return _View(self._hull, center, factor, self._design.bounds, self.floor)


class _View(NamedTuple):
    r"""One stage: :math:`g(z) = 1 + \|F (z - c)\|^2` with :math:`g / \lambda_+ \le g_\star \le g / \lambda_-`."""

    hull: AffineHull
    center: Float[Array, "D"]
    factor: Float[Array, "R D"]
    bounds: Bounds
    thickness: float

    def sides(self, z: Float[Array, "M D"]) -> tuple[Bool[Array, "M"], Bool[Array, "M"]]:
        """Which points are surely inside and which surely outside."""
        g = 1.0 + whitened_norms(z, self.center, self.factor) ** 2
        across = np.zeros(1)
        if self.hull.normals.shape[1]:
            across = whitened_norms(z, self.center, self.hull.normals.T / self.thickness) ** 2
        # Inside the hull the squared distance to the exact ellipsoid is (g* - 1) / r.
        farthest = (g / self.bounds.inner - 1.0) / self.hull.rank + across
        nearest = (g / self.bounds.outer - 1.0) / self.hull.rank + across
        return farthest <= 1.0, nearest > (1.0 + 2.0 * SURFACE_TOLERANCE) ** 2

    def thinnest(self) -> float:
        """A lower bound on the semi-axes inside the hull."""
        level = self._level(self.bounds.inner)
        return float(np.sqrt(level) / np.linalg.norm(self.factor, 2)) if level > 0 else 0.0

    def ellipsoid(self, outer: bool) -> Ellipsoid | None:
        """An ellipsoid around the exact one, or one inside it if the enclosure is tight enough to have one."""
        level = self._level(self.bounds.outer if outer else self.bounds.inner)
        if level <= 0:
            return None
        normals = self.hull.normals
        rows = self.factor / np.sqrt(level)
        if normals.shape[1]:
            rows = np.concatenate([rows, normals.T / self.thickness])
        return Ellipsoid(self.center, rows)

    def _level(self, bound: float) -> float:
        return (self.hull.rank + 1) * bound - 1.0
