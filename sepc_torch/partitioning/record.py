"""The records :class:`Partition` (the fitted result) and :class:`PartitionEllipsoid`, with saving and loading."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from sepc_torch.data import files
from sepc_torch.data.labels import label_codes
from sepc_torch.data.text import text_table
from sepc_torch.ellipsoid import Ellipsoid, Kind
from sepc_torch.partitioning.cells import Ledger
from sepc_torch.shapes import Array, Bool, Float, Int

if TYPE_CHECKING:
    import pandas as pd

Rest = Literal["whole", "partitioned"]
"""How a class of more than two is separated from the others; see :func:`~sepc_torch.partition`."""

# Largest number of ellipsoids in a printed table. The last line gives the number of the others.
_PRINTED = 24


@dataclass(frozen=True, eq=False)
class PartitionEllipsoid(Ellipsoid):
    """An ellipsoid of a partition, with its class, its origin in the algorithm and its class counts.

    Attributes:
        label: Its class.
        kind: How Algorithm 1 came to fit it.
        iteration: The iteration of Algorithm 1 that fitted it.
        support: Rows of the training set on its surface.
        covered: Number of points that it was fitted to.
        counts: Training points of each class inside (C,).
        purity: Share of its own class among the training points inside.
        gap: Relative gap that certifies its volume (0 for isolated points).
    """

    label: Any
    kind: Kind
    iteration: int
    support: Int[Array, "S"]
    covered: int
    counts: Int[Array, "C"]
    purity: float
    gap: float


class UncountedEllipsoid(NamedTuple):
    """An ellipsoid in the caller's coordinates, before the training points in it are counted.

    ``code`` is the index of its class. The other fields are those of :class:`PartitionEllipsoid`.
    """

    code: int
    ellipsoid: Ellipsoid
    kind: Kind
    iteration: int
    support: Int[Array, "S"]
    covered: int
    gap: float

    def with_counts(self, label: Any, counts: Int[Array, "C"]) -> PartitionEllipsoid:
        """The ellipsoid of the partition, with its label and the training points of each class inside."""
        return PartitionEllipsoid(
            center=self.ellipsoid.center,
            whitener=self.ellipsoid.whitener,
            label=label,
            kind=self.kind,
            iteration=self.iteration,
            support=self.support,
            covered=self.covered,
            counts=counts,
            purity=int(counts[self.code]) / max(int(counts.sum()), 1),
            gap=self.gap,
        )


class PartitionHyperplane(NamedTuple):
    r"""The pair of hyperplanes of one iteration.

    The iteration selected points of ``label`` with :math:`w^\top z \ge \alpha` and points of the other classes with
    :math:`w^\top z \le \beta`.
    """

    label: Any
    iteration: int
    w: Float[Array, "D"]
    alpha: float
    beta: float


@dataclass(frozen=True, eq=False, repr=False)
class Partition:
    r"""The result of :func:`~sepc_torch.partition`. It holds no training point.

    Attributes:
        ellipsoids: K ellipsoids in the caller's coordinates, by class and iteration; isolated points are balls.
        hyperplanes: The pair of hyperplanes of every iteration.
        classes: The labels (C,).
        class_counts: Number of training points of each class (C,).
        scale: The unit of each feature (D,) for Euclidean distances.
        ledger: Class counts in cells and in expanded ellipsoids; see :class:`~sepc_torch.partitioning.cells.Ledger`.
        feature_names: Column names, if the points came in a DataFrame.
        made: Parameters, solver and versions.
        seconds: Seconds spent in each step. They take no part in equality and are not saved, so that equal input gives
            equal files.
    """

    ellipsoids: tuple[PartitionEllipsoid, ...]
    hyperplanes: tuple[PartitionHyperplane, ...]
    classes: Array
    class_counts: Int[Array, "C"]
    scale: Float[Array, "D"]
    ledger: Ledger
    feature_names: tuple[str, ...] | None
    made: Mapping[str, Any]
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def cells(self) -> Bool[Array, "P K"]:
        """Distinct membership patterns of the training points, as a dense matrix; ``ledger`` holds them sparsely."""
        return self.ledger.cells

    @property
    def counts(self) -> Int[Array, "P C"]:
        """Number of training points of each class in each cell, as a dense matrix."""
        return self.ledger.counts

    @property
    def dim(self) -> int:
        """Number of features D."""
        return self.ellipsoids[0].dim

    @property
    def codes(self) -> Int[Array, "K"]:
        """The class of each ellipsoid, as an index into ``classes``."""
        return label_codes((e.label for e in self.ellipsoids), self.classes.tolist())

    def uncounted(self) -> tuple[UncountedEllipsoid, ...]:
        """The ellipsoids without their counts, for a partition of other points."""
        return tuple(
            UncountedEllipsoid(code, Ellipsoid(e.center, e.whitener), e.kind, e.iteration, e.support, e.covered, e.gap)
            for code, e in zip(self.codes.tolist(), self.ellipsoids, strict=True)
        )

    def distances(self, z: Float[Array, "B D"]) -> Float[Array, "B K"]:
        r"""Mahalanobis distance of every point to every ellipsoid."""
        return np.stack([e.distance(z) for e in self.ellipsoids], axis=1)

    def __len__(self) -> int:
        return len(self.ellipsoids)

    def __repr__(self) -> str:
        return (
            f"Partition({len(self)} ellipsoids of {len(self.classes)} classes in {self.dim} dimensions, "
            f"{len(self.ledger.cell_sizes)} cells, {int(self.class_counts.sum())} points)"
        )

    def __str__(self) -> str:
        return f"{self!r}\n\n{self._class_table()}\n\n{self._ellipsoid_table()}"

    def _class_table(self) -> str:
        rows: list[list[object]] = []
        for label, points in zip(self.classes.tolist(), self.class_counts.tolist(), strict=True):
            kinds = [e.kind for e in self.ellipsoids if e.label == label]
            iterations = max(e.iteration for e in self.ellipsoids if e.label == label)
            rows.append([label, points, iterations, *(kinds.count(kind) for kind in Kind)])
        return text_table(["class", "points", "iterations", *Kind], rows)

    def _ellipsoid_table(self) -> str:
        shown = [k for k, e in enumerate(self.ellipsoids) if e.kind is not Kind.ISOLATED]
        rows = [
            [k, e.label, e.iteration, str(e.kind), e.covered, int(e.counts.sum()), float(e.purity), len(e.support)]
            for k, e in ((k, self.ellipsoids[k]) for k in shown[:_PRINTED])
        ]
        header = ["k", "class", "iteration", "kind", "covers", "holds", "purity", "support"]
        more = len(shown) - _PRINTED
        return text_table(header, rows) + (f"\n... and {more} more" if more > 0 else "")

    def to_frame(self) -> pd.DataFrame:
        """One row per ellipsoid, as a pandas DataFrame."""
        import pandas as pd

        return pd.DataFrame(
            {
                "label": [e.label for e in self.ellipsoids],
                "kind": [str(e.kind) for e in self.ellipsoids],
                "iteration": [e.iteration for e in self.ellipsoids],
                "covered": [e.covered for e in self.ellipsoids],
                **{
                    f"holds {label}": [int(e.counts[c]) for e in self.ellipsoids]
                    for c, label in enumerate(self.classes.tolist())
                },
                "purity": [e.purity for e in self.ellipsoids],
                "support": [len(e.support) for e in self.ellipsoids],
                "log_volume": [e.log_volume for e in self.ellipsoids],
                "gap": [e.gap for e in self.ellipsoids],
            }
        ).rename_axis("k")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Partition):
            return NotImplemented
        mine, theirs = self._arrays(), other._arrays()
        same = mine.keys() == theirs.keys() and all(np.array_equal(mine[k], theirs[k]) for k in mine)
        return same and self._metadata() == other._metadata()

    __hash__ = None  # type: ignore[assignment]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the partition to a safetensors file, atomically; equal partitions give equal bytes."""
        files.write(path, "partition", self._arrays(), self._metadata())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Partition:
        """Read a partition from a file written by :meth:`save`."""
        arrays, metadata = files.read(path, "partition")
        with files.interpreting(path):
            return cls._from_arrays(arrays, metadata)

    @classmethod
    def _from_arrays(cls, arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> Partition:
        classes = np.array(metadata["classes"])
        ends = np.cumsum(arrays["support_size"])
        ledger = Ledger(**{name: arrays[name] for name in Ledger._fields})
        held = ledger.held
        ellipsoids = tuple(
            PartitionEllipsoid(
                center=arrays["center"][k],
                whitener=arrays["whitener"][k],
                label=metadata["classes"][int(arrays["code"][k])],
                kind=Kind(kind),
                iteration=int(arrays["iteration"][k]),
                support=arrays["support"][ends[k] - arrays["support_size"][k] : ends[k]],
                covered=int(arrays["covered"][k]),
                counts=held[k],
                purity=float(arrays["purity"][k]),
                gap=float(arrays["gap"][k]),
            )
            for k, kind in enumerate(metadata["kinds"])
        )
        hyperplanes = tuple(
            PartitionHyperplane(label, iteration, w, float(levels[0]), float(levels[1]))
            for (label, iteration), w, levels in zip(
                metadata["hyperplanes"], arrays["hyperplane_w"], arrays["hyperplane_levels"], strict=True
            )
        )
        names = metadata["feature_names"]
        return cls(
            ellipsoids,
            hyperplanes,
            classes,
            arrays["class_counts"],
            arrays["scale"],
            ledger,
            None if names is None else tuple(names),
            metadata["made"],
        )

    def _arrays(self) -> dict[str, Array]:
        es, dim = self.ellipsoids, self.dim
        return {
            "center": np.stack([e.center for e in es]),
            "whitener": np.stack([e.whitener for e in es]),
            "code": self.codes,
            "iteration": np.array([e.iteration for e in es], dtype=np.int64),
            "support": np.concatenate([e.support for e in es]),
            "support_size": np.array([len(e.support) for e in es], dtype=np.int64),
            "covered": np.array([e.covered for e in es], dtype=np.int64),
            "purity": np.array([e.purity for e in es]),
            "gap": np.array([e.gap for e in es]),
            "hyperplane_w": np.array([h.w for h in self.hyperplanes]).reshape(-1, dim),
            "hyperplane_levels": np.array([[h.alpha, h.beta] for h in self.hyperplanes]).reshape(-1, 2),
            "class_counts": self.class_counts,
            "scale": self.scale,
            **self.ledger._asdict(),
        }

    def _metadata(self) -> dict[str, Any]:
        return {
            "classes": self.classes.tolist(),
            "kinds": [str(e.kind) for e in self.ellipsoids],
            "hyperplanes": [[h.label, h.iteration] for h in self.hyperplanes],
            "feature_names": None if self.feature_names is None else list(self.feature_names),
            "made": dict(self.made),
        }
