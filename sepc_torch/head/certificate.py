r"""The certificate of an updated head: for each class, what was done and how near its ellipsoids are to a full fit.

A full fit is a partition of all present points with the same projection and the same options. Its ellipsoids are known
for two kinds of classes:

- classes that were solved with the present points: they are equal bit by bit;
- classes that one pure ellipsoid covers. It is the minimum-volume ellipsoid of its points, because its support points
  are there and no point of the class is outside. A full fit begins with this ellipsoid, finds it pure, and stops. Both
  are solved to a relative gap g, so in D dimensions their log-volumes differ by at most
  :math:`\tfrac D2 \log(1 + g \tfrac{D + 1}{D})`, and the D-th roots of their volumes, the geometric means of the
  semi-axes, by a share of at most g.

For other classes the kept ellipsoids still are those of least volume around the points that they cover, but a full fit
may choose other groups of points. The certificate is of ellipsoids, not of the balls around isolated points: the limit
``max_isolated`` keeps or drops the balls of all classes together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sepc_torch.data.arrays import feature_scale
from sepc_torch.data.text_table import text_table
from sepc_torch.ellipsoid import Ellipsoid, Kind
from sepc_torch.head.training_set import KeptTrainingSet, State
from sepc_torch.model.sepc import SEPC
from sepc_torch.shapes import Array, Float, Int

# Relative distance beyond the surface at which a point counts as inside its ellipsoid: a hundredth of the relative gap
# to which ellipsoids are solved. Rounding puts copies of support points on either side of the surface.
INSIDE_TOLERANCE = 1e-9
# Relative gaps to which the native solver and cvxpy solvers certify ellipsoids.
_NATIVE_GAP, _CVXPY_GAP = 1e-7, 1e-6
# Semi-axes must exceed the floor by this share, so that the floor of a full fit is certainly inactive.
_ABOVE_FLOOR = 1e-6


class ClassCertificate(NamedTuple):
    """What is known of one class.

    Attributes:
        label: The class.
        state: ``"unchanged"``, ``"counts only"``, ``"refitted"`` or ``"marked"``.
        points: Number of its training points.
        ellipsoids: Number of its ellipsoids.
        volume_error: Bound on the relative difference from a full fit, of the D-th root of the volume of each of its
            ellipsoids: 0 if solved with the present points, NaN if no bound is known.
    """

    label: Any
    state: State
    points: int
    ellipsoids: int
    volume_error: float


@dataclass(frozen=True)
class UpdateCertificate:
    """What updates did to a head, class by class; ``str()`` gives a table.

    Attributes:
        classes: One record for each class.
        calibration_age: Points added and removed since the calibration, as a share of the present points.
    """

    classes: tuple[ClassCertificate, ...]
    calibration_age: float

    @property
    def equals_full_fit(self) -> bool:
        """Whether the ellipsoids of all classes are known to be those of a full fit with the same projection."""
        return all(not math.isnan(c.volume_error) for c in self.classes)

    def __str__(self) -> str:
        rows: list[list[object]] = [
            [c.label, c.state, c.points, c.ellipsoids, _described(c.volume_error)] for c in self.classes
        ]
        known = sum(not math.isnan(c.volume_error) for c in self.classes)
        return (
            f"{text_table(['class', 'state', 'points', 'ellipsoids', 'volumes, against a full fit'], rows)}\n\n"
            f"The ellipsoids of {known} of {len(rows)} classes are those of a full fit with the same projection. "
            f"{self.calibration_age:.1%} of the training points changed since the calibration."
        )


def certify(sepc: SEPC, kept: KeptTrainingSet) -> UpdateCertificate:
    """Make the certificate of a head.

    Args:
        sepc: The classifier of the head.
        kept: Its training points.

    >>> from sepc_torch import TrustHead
    >>> z = [[1.0, 0.0], [2.0, 0.1], [3.0, 0.0], [0.0, 1.0], [0.1, 2.0], [0.0, 3.0]]
    >>> head = TrustHead.fit(z, ["a", "a", "a", "b", "b", "b"], dim=1, normalize=None, keep_points=True)
    >>> certify(head.sepc, head.training_set).classes[0]
    ClassCertificate(label='a', state='unchanged', points=3, ellipsoids=1, volume_error=0.0)
    """
    sizes = np.bincount(kept.codes, minlength=len(kept.states))
    count = np.bincount([e.code for e in kept.ellipsoids], minlength=len(kept.states))
    errors = _structural_errors(sepc, kept, sizes)
    errors[kept.current] = 0.0
    errors[kept.marked] = math.nan
    rows = zip(sepc.classes, kept.states, sizes.tolist(), count.tolist(), errors.tolist(), strict=True)
    return UpdateCertificate(tuple(ClassCertificate(*row) for row in rows), kept.age)


def _structural_errors(sepc: SEPC, kept: KeptTrainingSet, sizes: Int[Array, "C"]) -> Float[Array, "C"]:
    """Bounds for the classes that one pure ellipsoid covers, NaN for the others."""
    made, dim = sepc.made, kept.points.shape[1]
    errors = np.full(len(sizes), math.nan)
    if made["rest"] == "partitioned" and len(sizes) > 2:
        return errors  # the ellipsoids of a class depend on how all others are covered
    unit, held = feature_scale(kept.points), sepc.held.cpu().numpy()
    alone = np.bincount([e.code for e in kept.ellipsoids], minlength=len(sizes)) == 1
    gap = _NATIVE_GAP if made["solver"] == "native" else _CVXPY_GAP
    single: dict[int, Ellipsoid] = {}
    for e, counts in zip(kept.ellipsoids, held, strict=True):
        c = e.code
        if not alone[c] or e.kind is not Kind.FIRST or sizes[c] <= dim:
            continue
        if counts.sum() - counts[c] > made["max_impure"] or sizes[c] > (made["max_per_class"] or math.inf):
            continue
        thinnest = Ellipsoid(e.ellipsoid.center, e.ellipsoid.whitener * unit).semi_axes[-1]
        farthest = e.ellipsoid.distance(kept.points[kept.codes == c]).max()
        if thinnest >= made["floor"] * (1.0 + _ABOVE_FLOOR) and farthest <= 1.0 + INSIDE_TOLERANCE:
            single[c] = e.ellipsoid
            errors[c] = 0.5 * math.log1p(max(e.gap, gap) * (dim + 1) / dim) + INSIDE_TOLERANCE
    # Two classes are separated in one run, which keeps their first ellipsoids only if these are disjoint.
    if len(sizes) == 2 and (len(single) < 2 or single[0].intersects(single[1])):
        errors[:] = math.nan
    return errors


def _described(error: float) -> str:
    if math.isnan(error):
        return "not known"
    return f"within {error:.1e}" if error else "equal"
