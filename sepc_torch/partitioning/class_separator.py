r"""Cover one class with ellipsoids and leave the other classes as they are, for more than two classes.

The paper separates a class from the rest by covering both, and throws the ellipsoids of the rest away. Here only the
class is covered. An ellipsoid covers all remaining points of the class. While it holds more than ``max_impure`` points
of other classes, Algorithm 2 selects points away from those in the ellipsoid: with the closest points :math:`c, d` of
the reduced hulls of the covered points and of the points inside, :math:`w = c - d`, it keeps the points with
:math:`x^\top w \ge c^\top w`. The points inside need not be exact for that: an enclosure of the ellipsoid and a sample
of many points suffice. The points of the pure ellipsoid are then removed from the class, and the next iteration covers
the others.

No point of another class is ever removed. So no ellipsoid holds more than ``max_impure`` of *all* points of other
classes, except terminal ellipsoids, which cover points that no direction separates. An ellipsoid
that holds few other points is tested against all of them, so the work for a class grows with the number of all points;
far points are screened (:mod:`sepc_torch.solvers.other_points`).
"""

from __future__ import annotations

import numpy as np

from sepc_torch.partitioning.steps import Hyperplane, Piece, Separation, Steps, hyperplane
from sepc_torch.shapes import Array, Float, Int
from sepc_torch.solvers.other_points import OtherPoints


class ClassSeparator(Steps):
    """Covers the points of one class; the parameters are those of :class:`~sepc_torch.partitioning.steps.Steps`."""

    def separate(self, own: Float[Array, "N D"], others: OtherPoints) -> Separation:
        """Cover the points ``own`` with ellipsoids that hold at most ``max_impure`` of ``others``."""
        left, dim = np.arange(len(own)), self._dim(own)
        pieces: list[Piece] = []
        hyperplanes: list[Hyperplane] = []
        isolated: list[tuple[int, Int[Array, "n"]]] = []
        iteration = 1
        while len(left) > dim:
            found = self._shrink(own, others, left)
            if found.first is not None:
                hyperplanes.append(hyperplane(iteration, *found.first))
            if found.covering is None:
                isolated.append((iteration, found.members))
            else:
                pieces.append(self._piece(0, found.kind(iteration), iteration, own, found.members, found.covering))
            left = np.setdiff1d(left, found.members, assume_unique=True)
            self._done(len(found.members))
            iteration += 1
        isolated.append((iteration, left))
        alone = sum(len(rows) for _, rows in isolated)
        if self.max_isolated is None or (pieces and alone <= self.max_isolated):
            for number, rows in isolated:
                pieces += self._balls(0, number, own, rows, others)
        elif not pieces:
            pieces.append(self._whole(0, iteration, own))
        self._done(len(left))
        return Separation(tuple(pieces), tuple(hyperplanes))
