r"""The training points that a head keeps to be updated, their arrays in files, and the certificate of an updated head.

The certificate says of each class what was done, and how near its ellipsoids are to those of a full fit.
A full fit is a partition of all present points with the same projection and the same options. Its ellipsoids are known
for two kinds of classes:

- classes that were solved with the present points: they are equal bit for bit;
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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from sepc_torch.data.arrays import feature_scale
from sepc_torch.data.text import text_table
from sepc_torch.ellipsoid import Ellipsoid, Kind
from sepc_torch.model.sepc import SEPC
from sepc_torch.partitioning.record import UncountedEllipsoid
from sepc_torch.shapes import Array, Bool, Float, Int

if TYPE_CHECKING:
    from sepc_torch.head.trust_head import TrustHead

State = Literal["unchanged", "counts only", "refitted", "marked"]
"""What happened to a class since its ellipsoids were solved; see :class:`KeptTrainingSet`."""

# Relative distance beyond the surface at which a point counts as inside its ellipsoid: a hundredth of the relative gap
# to which ellipsoids are solved. Rounding puts copies of support points on either side of the surface.
INSIDE_TOLERANCE = 1e-9
# Relative gaps to which the native solver and cvxpy solvers certify ellipsoids.
_NATIVE_GAP, _CVXPY_GAP = 1e-7, 1e-6
# Semi-axes must exceed the floor by this share, so that the floor of a full fit is certainly inactive.
_ABOVE_FLOOR = 1e-6

# Names of the arrays of the points and of the ellipsoids in a file; their kinds are in the metadata.
_POINTS = ("points", "coordinates", "codes", "reference_rows", "current")


@dataclass(frozen=True, eq=False)
class KeptTrainingSet:
    """Training points of a head, without their embeddings, and the ellipsoids in float64.

    The embeddings of reference points are in the head's evidence, in the order of ``reference_rows``.

    Attributes:
        points: Coordinates of the partition (N, R).
        coordinates: Coordinates of the densities (N, S).
        codes: The class of each point (N,).
        ids: Identifiers (N,), integers or strings.
        reference_rows: Rows of the reference points, by class and row.
        ellipsoids: The K ellipsoids; their ``support`` are rows of ``points``.
        states: For each class: ``"unchanged"``, or ``"counts only"`` if points of the class or in its ellipsoids were
            added or removed, ``"refitted"`` if its ellipsoids were solved again, ``"marked"`` if they must be.
        current: For each class, whether its ellipsoids were solved with the present points of all classes.
        most_reference_points: Largest number of reference points.
        variance: Sum of the variances of all polar features.

    >>> from sepc_torch import TrustHead
    >>> z = [[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 2.0]]
    >>> TrustHead.fit(z, ["a", "a", "b", "b"], dim=1, keep_points=True).training_set
    KeptTrainingSet(4 points of 2 classes, 2 ellipsoids)
    """

    points: Float[Array, "N R"]
    coordinates: Float[Array, "N S"]
    codes: Int[Array, "N"]
    ids: Array
    reference_rows: Int[Array, "n"]
    ellipsoids: tuple[UncountedEllipsoid, ...]
    states: tuple[State, ...]
    current: Bool[Array, "C"]
    most_reference_points: int
    variance: float

    def __len__(self) -> int:
        return len(self.codes)

    def __repr__(self) -> str:
        return f"KeptTrainingSet({len(self)} points of {len(self.states)} classes, {len(self.ellipsoids)} ellipsoids)"

    @property
    def marked(self) -> Int[Array, "m"]:
        """Indices of the classes that must be solved again."""
        return np.flatnonzero([state == "marked" for state in self.states])

    @property
    def reference_ids(self) -> tuple[int | str, ...]:
        """Identifiers of the reference points."""
        return tuple(self.ids[self.reference_rows].tolist())

    def arrays(self) -> dict[str, Array]:
        """The arrays for a file."""
        return {
            **{name: getattr(self, name) for name in _POINTS},
            "center": np.stack([e.ellipsoid.center for e in self.ellipsoids]),
            "whitener": np.stack([e.ellipsoid.whitener for e in self.ellipsoids]),
            "iteration": np.array([e.iteration for e in self.ellipsoids], dtype=np.int64),
            "support": np.concatenate([e.support for e in self.ellipsoids]),
            "support_size": np.array([len(e.support) for e in self.ellipsoids], dtype=np.int64),
            "covered": np.array([e.covered for e in self.ellipsoids], dtype=np.int64),
            "gap": np.array([e.gap for e in self.ellipsoids]),
        }

    def metadata(self) -> dict[str, Any]:
        """The other values for a file, as plain types."""
        return {
            "ids": self.ids.tolist(),
            "kinds": [str(e.kind) for e in self.ellipsoids],
            "states": list(self.states),
            "most_reference_points": self.most_reference_points,
            "variance": self.variance,
        }

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Array], metadata: Mapping[str, Any], ellipsoid_codes: Int[Array, "K"]
    ) -> KeptTrainingSet:
        """Build the record from the arrays and metadata of a file.

        Args:
            arrays: The arrays of :meth:`arrays`.
            metadata: The values of :meth:`metadata`.
            ellipsoid_codes: The class of each ellipsoid, which the classifier holds.
        """
        ends = np.cumsum(arrays["support_size"])
        ellipsoids = tuple(
            UncountedEllipsoid(
                code=code,
                ellipsoid=Ellipsoid(arrays["center"][k], arrays["whitener"][k]),
                kind=Kind(metadata["kinds"][k]),
                iteration=int(arrays["iteration"][k]),
                support=arrays["support"][ends[k] - arrays["support_size"][k] : ends[k]],
                covered=int(arrays["covered"][k]),
                gap=float(arrays["gap"][k]),
            )
            for k, code in enumerate(ellipsoid_codes.tolist())
        )
        return cls(
            **{name: arrays[name] for name in _POINTS},
            ids=np.array(metadata["ids"]),
            ellipsoids=ellipsoids,
            states=tuple(metadata["states"]),
            most_reference_points=int(metadata["most_reference_points"]),
            variance=float(metadata["variance"]),
        )


def kept_points(head: TrustHead) -> KeptTrainingSet:
    """The training points of a head; raise RuntimeError if it kept none."""
    if head.training_set is None:
        raise RuntimeError(
            "This head keeps no training points, so it cannot be updated: fit it with TrustHead.fit(..., "
            "keep_points=True). Files of save() hold the points, state dicts do not."
        )
    return head.training_set


def kept_regions(old: tuple[UncountedEllipsoid, ...], new: tuple[UncountedEllipsoid, ...]) -> Int[Array, "K"]:
    """For each new ellipsoid the number of the equal old one of the same class; -1 if there is none.

    >>> from sepc_torch import partition
    >>> old = partition([[0.0], [1.0], [5.0], [6.0]], ["a", "a", "b", "b"]).uncounted()
    >>> kept_regions(old, old[1:])
    array([1])
    """
    numbers = {_contents(e): k for k, e in enumerate(old)}
    return np.array([numbers.get(_contents(e), -1) for e in new])


def _contents(e: UncountedEllipsoid) -> tuple[int, bytes, bytes]:
    return e.code, e.ellipsoid.center.tobytes(), e.ellipsoid.whitener.tobytes()


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


def certify(head: TrustHead) -> UpdateCertificate:
    """Make the certificate of a head.

    >>> from sepc_torch import TrustHead
    >>> z = [[1.0, 0.0], [2.0, 0.1], [3.0, 0.0], [0.0, 1.0], [0.1, 2.0], [0.0, 3.0]]
    >>> head = TrustHead.fit(z, ["a", "a", "a", "b", "b", "b"], dim=1, normalize=None, keep_points=True)
    >>> certify(head).classes[0]
    ClassCertificate(label='a', state='unchanged', points=3, ellipsoids=1, volume_error=0.0)
    """
    sepc, kept = head.sepc, kept_points(head)
    sizes = np.bincount(kept.codes, minlength=len(kept.states))
    count = np.bincount([e.code for e in kept.ellipsoids], minlength=len(kept.states))
    errors = _structural_errors(sepc, kept, sizes)
    errors[kept.current] = 0.0
    errors[kept.marked] = math.nan
    rows = zip(sepc.classes, kept.states, sizes.tolist(), count.tolist(), errors.tolist(), strict=True)
    return UpdateCertificate(tuple(ClassCertificate(*row) for row in rows), head.calibration_age)


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
