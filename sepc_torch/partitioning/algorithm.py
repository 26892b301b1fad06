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

from typing import Any, NamedTuple

import numpy as np

from sepc_torch.ellipsoid import Kind
from sepc_torch.partitioning.steps import Covering, Hyperplane, Piece, Separation, Steps, hyperplane, rows_beyond
from sepc_torch.shapes import Array, Float, Int
from sepc_torch.solvers import ellipsoids_intersect
from sepc_torch.solvers.other_points import OtherPoints
from sepc_torch.solvers.progressive import ProgressiveEllipsoid


class _Step(NamedTuple):
    """The hyperplane of one application of Algorithm 2 and the rows that it selects in each set.

    ``coverings`` are the ellipsoids of the selected rows, if they are already known.
    """

    hyperplane: Hyperplane
    chosen: tuple[Int[Array, "n"], Int[Array, "m"]]
    coverings: tuple[Covering | None, Covering | None]


class Separator(Steps):
    r"""Algorithms 1 and 2 with their parameters.

    Args:
        keep: Whether to return the ellipsoids of the first and of the second set. A set that is not kept only serves to
            separate the other.
        **parameters: The parameters of :class:`~sepc_torch.partitioning.steps.Steps`. ``max_impure`` counts remaining
            points of the other set, and ``tick`` receives points of the kept sets.
    """

    def __init__(self, *, keep: tuple[bool, bool] = (True, True), **parameters: Any) -> None:
        super().__init__(**parameters)
        self.keep = keep

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
                own, others = remaining[side], OtherPoints(remaining[1 - side])
                # The ellipsoids of the two sets need no intersection test while they shrink: an impure ellipsoid holds
                # points of the other set, so that the two ellipsoids intersect.
                found = self._shrink(own, others, step.chosen[side], step.coverings[side], others.all())
                if self.keep[side]:
                    rows = left[side][found.members]
                    pieces += self._pieces(
                        side, found.kind(iteration), iteration, sets[side], rows, others, found.covering
                    )
                    self._done(len(rows))
                left[side] = np.delete(left[side], found.members)
            iteration += 1
        for side in (0, 1):
            if self.keep[side] and len(left[side]):
                # Line 27 of Algorithm 1 needs n points here, the loop n + 1. The two points of each XOR class therefore
                # get an ellipsoid.
                covering = self._cover(sets[side][left[side]]) if len(left[side]) >= dim else None
                others = OtherPoints(sets[1 - side][left[1 - side]])
                pieces += self._pieces(side, Kind.TERMINAL, iteration, sets[side], left[side], others, covering)
                self._done(len(left[side]))
        if self.max_isolated is not None:
            for side in (0, 1):
                if self.keep[side] and all(p.kind is Kind.ISOLATED for p in pieces if p.side == side):
                    pieces = [p for p in pieces if p.side != side] + [self._whole(side, iteration, sets[side])]
        return Separation(tuple(pieces), tuple(hyperplanes))

    def _pieces(
        self,
        side: int,
        kind: Kind,
        iteration: int,
        points: Float[Array, "N D"],
        rows: Int[Array, "n"],
        others: OtherPoints,
        covering: Covering | None,
    ) -> list[Piece]:
        """One piece of the given kind for the covering of ``rows``; without a covering, balls for isolated points."""
        if covering is None:
            return self._balls(side, iteration, points, rows, others)
        return [self._piece(side, kind, iteration, points, rows, covering)]

    def _wanted(self, left: list[Array]) -> bool:
        return any(keep and len(rows) > 0 for keep, rows in zip(self.keep, left, strict=True))

    def _first_step(self, x: Float[Array, "N D"], y: Float[Array, "M D"], iteration: int) -> _Step | None:
        """Apply Algorithm 2 to the remaining points of both sets; None if they cannot be separated."""
        disjoint = self._disjoint(x, y)
        hx, hy = self._in_metric(x), self._in_metric(y)
        if disjoint is not None:
            c, d = self._closest(hx, hy, cap=1.0)
            return _Step(hyperplane(iteration, c, d), (np.arange(len(x)), np.arange(len(y))), disjoint)
        for c, d in self._directions(hx, hy):
            chosen = rows_beyond(hx, c - d, c), rows_beyond(hy, d - c, d)
            if min(map(len, chosen)) > 0 and len(chosen[0]) + len(chosen[1]) < len(x) + len(y):
                return _Step(hyperplane(iteration, c, d), chosen, (None, None))
        return None

    def _disjoint(self, x: Float[Array, "N D"], y: Float[Array, "M D"]) -> tuple[Covering, Covering] | None:
        """The ellipsoids of both sets if they do not intersect, otherwise None."""
        mine, theirs = self._cover(x), self._cover(y)
        if isinstance(mine, ProgressiveEllipsoid) and isinstance(theirs, ProgressiveEllipsoid):
            meet = mine.intersects(theirs)
        else:
            meet = ellipsoids_intersect(mine.exact(), theirs.exact(), solver=self.solver)
        return None if meet else (mine, theirs)
