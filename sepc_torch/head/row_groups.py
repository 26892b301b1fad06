r"""Rows that deserve a look together: groups of near rows, with their region, training rows and columns.

:func:`group_rows` clusters rows by average linkage in whitened embeddings (directions of unit variance among the
training points): two groups become one while the mean distance between their rows is at most a cut. The cut is the
distance below which nine in ten pairs of training points of one class lie, so that a group is about as wide as a class.
The result depends on no random number, and not on the order of the rows, up to ties. Groups describe; they promise
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data.text import printable
from sepc_torch.head.explanation import Example, nearest_examples
from sepc_torch.shapes import Array, Float, Int

if TYPE_CHECKING:
    from sepc_torch.head.trust_head import TrustHead

# Share of the pairs of training points of a class that are nearer than the cut, and number of points whose pairs count.
_WITHIN, _PAIRED = 0.9, 512
# Rows that are clustered at once: the distances of all pairs take 16 MB.
_MOST_ROWS = 2000
# Columns that a group names, and the standard deviations by which a column must have moved.
_COLUMNS, _MOVED = 5, 0.5
# Identifiers that a line of text names.
_NAMED = 5


class ColumnMove(NamedTuple):
    """A column of a table: its mean among rows, its usual mean, and the difference in standard deviations.

    The usual mean and the deviation are those of training points, in the units of the table. For a category, as in
    ``"pet=cat"``, means are shares of the category.
    """

    name: str
    mean: float
    usual: float
    deviations: float

    def __str__(self) -> str:
        return f"{printable(self.name)} {self.mean:.4g} instead of {self.usual:.4g}"


class RowGroup(NamedTuple):
    """Rows that are near each other.

    Attributes:
        ids: Identifiers of the rows, the most central row first.
        region: Number of the ellipsoid that is nearest to most of them.
        label: The class of this region.
        examples: The training points nearest to the most central row, of any class; empty if the head keeps none.
        columns: The columns that differ most from the training points of the class, if the head was fitted on a table.
    """

    ids: tuple[int | str, ...]
    region: int
    label: Any
    examples: tuple[Example, ...]
    columns: tuple[ColumnMove, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain Python values."""
        parts = {"examples": [vars(e) for e in self.examples], "columns": [c._asdict() for c in self.columns]}
        return {**self._asdict(), "ids": list(self.ids), **parts}

    def __str__(self) -> str:
        rest = len(self.ids) - _NAMED
        named = ", ".join(printable(str(name)) for name in self.ids[:_NAMED])
        named += f" and {rest} more" if rest > 0 else ""
        rows = f"{len(self.ids)} row{'s' if len(self.ids) > 1 else ''}"
        text = f"{rows} near region {self.region} (class {printable(str(self.label))}): {named}"
        if self.examples:
            text += f"; nearest training rows {', '.join(printable(str(e.id)) for e in self.examples)}"
        return text + "".join(f"; {column}" for column in self.columns)


def group_rows(head: TrustHead, z: Float[Tensor, "n D"], ids: Sequence[Any] | Int[Array, "n"]) -> tuple[RowGroup, ...]:
    """Cluster rows, the largest group first; a row without a near one is a group of its own.

    Rows whose embedding is not finite are left out, and of more than 2000 rows those after the first 2000. A head
    without reference points has no cut: its groups are the rows of one nearest region each.

    Args:
        head: The head.
        z: The embeddings, as a tensor.
        ids: Identifiers of the rows.

    >>> from sepc_torch import TrustHead
    >>> rng = np.random.default_rng(0)
    >>> y = np.arange(400) % 2
    >>> head = TrustHead.fit(rng.normal(size=(400, 4)) + 4.0 * y[:, None], y, normalize=None)
    >>> places = torch.tensor([[20.0, 0.0, 0.0, 0.0]] * 3 + [[0.0, 30.0, 0.0, 0.0]] * 2)
    >>> [group.ids for group in group_rows(head, places + 0.1 * torch.eye(5, 4), ["a", "b", "c", "d", "e"])]
    [('a', 'b', 'c'), ('d', 'e')]
    """
    with torch.no_grad():
        z = z.to(head.projection.shift)
        kept = z.isfinite().all(dim=1).nonzero().squeeze(1)[:_MOST_ROWS]
        if not len(kept):
            return ()
        z, names = z[kept], [ids[i] for i in kept.tolist()]
        region = head.sepc(head.projection(z)).nearest.cpu().numpy()
        points, group = _clusters(head, z, region)
    found = []
    for g in range(int(group.max()) + 1):
        rows = np.flatnonzero(group == g)
        gaps = np.linalg.norm(points[rows] - points[rows].mean(axis=0), axis=1)
        rows = rows[np.argsort(gaps, kind="stable")]
        near = int(np.bincount(region[rows].clip(min=0)).argmax())
        code = int(head.sepc.codes[near])
        found.append(
            RowGroup(
                tuple(_plain(names[i]) for i in rows.tolist()),
                near,
                head.classes[code],
                nearest_examples(head, z[int(rows[0])]),
                column_moves(head, z[torch.from_numpy(rows)], code),
            )
        )
    return tuple(sorted(found, key=lambda group: -len(group.ids)))


def _clusters(
    head: TrustHead, z: Float[Tensor, "n D"], region: Int[Array, "n"]
) -> tuple[Float[Array, "n W"], Int[Array, "n"]]:
    """Whitened coordinates of rows, and their groups."""
    if head.evidence is None or not head.evidence.reference_points.ends:
        return head.projection(z).double().cpu().numpy(), np.unique(region, return_inverse=True)[1]
    points = head.evidence.white(z).double().cpu().numpy()
    if len(points) == 1:
        return points, np.zeros(1, dtype=np.int64)
    from scipy.cluster.hierarchy import fcluster, linkage

    return points, fcluster(linkage(points, "average"), _cut(head), "distance") - 1


def _cut(head: TrustHead) -> float:
    """The distance in whitened coordinates below which nine in ten pairs of reference points of one class lie."""
    from scipy.spatial.distance import pdist

    assert head.evidence is not None
    kept = head.evidence.white_reference_points
    points, codes = kept.points.double().cpu().numpy(), head.evidence.reference_points.codes.cpu().numpy()
    some = np.linspace(0, len(codes) - 1, min(len(codes), _PAIRED)).round().astype(np.int64)
    parts = [pdist(points[some[codes[some] == c]]) for c in np.unique(codes[some])]
    distances = np.concatenate(parts)
    return float(np.quantile(distances, _WITHIN)) if len(distances) else 0.0


def column_moves(head: TrustHead, z: Float[Tensor, "n D"], code: int | None) -> tuple[ColumnMove, ...]:
    """The columns of a table whose mean among rows is furthest from that of training points, in deviations.

    A column counts from half a deviation on; one with a single value among the training points has no deviation.

    Args:
        head: The head.
        z: The embeddings of the rows.
        code: The class of the training points; all of them by default.
    """
    if head.evidence is None or head.feature_names is None or not head.evidence.reference_points.ends:
        return ()
    kept = head.evidence.reference_points
    mine = torch.ones_like(kept.codes, dtype=torch.bool) if code is None else kept.codes == code
    some, origin = kept.offsets[mine].double(), kept.origin.double()
    usual, varies = some.mean(dim=0), some.amax(dim=0) > some.amin(dim=0)
    moved = z.double().mean(dim=0) - origin
    deviations = torch.where(varies, (moved - usual) / some.std(dim=0, correction=0), 0.0)
    units = {} if head.encoding is None else {column.name: column for column in head.encoding.numbers}
    found = []
    for j in deviations.abs().argsort(descending=True, stable=True)[:_COLUMNS].tolist():
        if abs(float(deviations[j])) < _MOVED:
            break
        name, values = head.feature_names[j], [float(origin[j] + part[j]) for part in (moved, usual)]
        if name in units:
            values = [units[name].original(value) for value in values]
        found.append(ColumnMove(name, values[0], values[1], float(deviations[j])))
    return tuple(found)


def _plain(name: Any) -> int | str:
    """An identifier as a plain Python value."""
    return int(name) if isinstance(name, (int, np.integer)) else str(name)
