"""The training points that a head keeps to be updated, and their arrays in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from sepc_torch.ellipsoid import Ellipsoid, Kind
from sepc_torch.partitioning.record import UncountedEllipsoid
from sepc_torch.shapes import Array, Bool, Float, Int

State = Literal["unchanged", "counts only", "refitted", "marked"]
"""What happened to a class since its ellipsoids were solved; see :class:`KeptTrainingSet`."""

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
        changes: Number of points added and removed since the calibration.

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
    changes: int = 0

    def __len__(self) -> int:
        return len(self.codes)

    def __repr__(self) -> str:
        return f"KeptTrainingSet({len(self)} points of {len(self.states)} classes, {len(self.ellipsoids)} ellipsoids)"

    @property
    def marked(self) -> Int[Array, "m"]:
        """Indices of the classes that must be solved again."""
        return np.flatnonzero([state == "marked" for state in self.states])

    @property
    def age(self) -> float:
        """Points added and removed since the calibration, as a share of the present points."""
        return self.changes / len(self)

    @property
    def reference_ids(self) -> tuple[int | str, ...]:
        """Identifiers of the reference points."""
        return tuple(self.ids[self.reference_rows].tolist())

    def calibrated(self) -> KeptTrainingSet:
        """The same points after a new calibration."""
        return replace(self, changes=0)

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
            "changes": self.changes,
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
            changes=int(metadata["changes"]),
        )


def kept_points(training_set: KeptTrainingSet | None) -> KeptTrainingSet:
    """The training points of a head; raise RuntimeError if it kept none."""
    if training_set is None:
        raise RuntimeError(
            "This head keeps no training points, so it cannot be updated: fit it with TrustHead.fit(..., "
            "keep_points=True). Files of save() hold the points, state dicts do not."
        )
    return training_set
