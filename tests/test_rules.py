"""Decision rules and ties: a Venn diagram computed by hand, and a slow reference on random partitions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from ellipsoid_models import model_of

from sepc_torch import SEPC, Kind, Partition, Rule, partition
from sepc_torch.ellipsoid import SURFACE_TOLERANCE
from sepc_torch.model import torch_ops
from sepc_torch.model.counting import region_counts
from sepc_torch.model.rules import NEAREST_TIE
from sepc_torch.partitioning.cells import TAIL, Ledger, ledger
from sepc_torch.partitioning.record import PartitionEllipsoid
from sepc_torch.shapes import Array

Rng = np.random.Generator


def frozen(balls: list[tuple[list[float], float, int]], points: list[tuple[list[float], int]], classes: int) -> SEPC:
    """A model of given balls (centre, radius, class) and training points (coordinates, class)."""
    points = sorted(points, key=lambda point: point[1])
    z, codes = np.array([p for p, _ in points]), np.array([c for _, c in points])
    none = np.zeros(0, dtype=np.int64)
    plain = [
        PartitionEllipsoid(np.array(c), np.eye(len(c)) / r, label, Kind.FIRST, 1, none, 0, none, 0.0, 0.0)
        for c, r, label in balls
    ]
    held = ledger(plain, z, codes, classes)
    es = tuple(
        PartitionEllipsoid(e.center, e.whitener, e.label, e.kind, 1, none, 0, held.held[k], 0.0, 0.0)
        for k, e in enumerate(plain)
    )
    totals = np.bincount(codes, minlength=classes).astype(np.int64)
    made = {"max_impure": 2}
    part = Partition(es, (), np.arange(classes), totals, np.ones(z.shape[1]), held, None, made)
    return SEPC.from_partition(part, dtype=torch.float64)


# Three discs: A (class 0) around (0, 0), B (class 1) around (2, 0), C (class 2) around (1, 2), radius 1.5 each.
#
# A and B share a lens around (1, 0), A and C a lens around (0.5, 1), B and C a lens around (1.5, 1).
# The point (1, 0.7) lies in all three.
VENN = [([0.0, 0.0], 1.5, 0), ([2.0, 0.0], 1.5, 1), ([1.0, 2.0], 1.5, 2)]
TRAIN = [
    *([([-1.0, 0.0], 0)] * 4),  # only in A
    *([([3.0, 0.0], 1)] * 2),  # only in B
    *([([1.0, 3.0], 2)] * 2),  # only in C
    *([([1.0, -0.5], 0)] * 2),  # in A and B: two of class 0 ...
    ([1.0, -0.4], 1),  # ... and one of class 1
    ([1.5, 1.1], 1),  # in B and C: one of each, a tie
    ([1.6, 1.0], 2),
]


@pytest.mark.parametrize(
    ("point", "rule", "label", "counts"),
    [
        # A holds four points outside the other discs, and (2, 1) in its lens with B.
        ([-1.0, 0.5], Rule.SINGLE, 0, [6, 1, 0]),
        # B holds two points outside the other discs, (2, 1) in its lens with A and one each of classes 1 and 2 in its
        # lens with C.
        ([3.2, 0.1], Rule.SINGLE, 1, [2, 4, 1]),
        # In A and B: their lens holds two of class 0 and one of class 1.
        ([1.0, -0.6], Rule.OVERLAP, 0, [2, 1, 0]),
        # In B and C: one point each is a tie, so the union of B and C decides: class 0 has 2, class 1 has 2 + 1 + 1,
        # class 2 has 2 + 1.
        ([1.6, 1.1], Rule.UNION, 1, [2, 4, 3]),
        # In A and C: no training point lies in both, so the union decides: class 0 has 6, class 1 has 2, class 2 has 3.
        ([0.3, 1.0], Rule.UNION, 0, [6, 2, 3]),
        # In all three: no training point lies in the intersection, and the union holds all points: 6, 4 and 3.
        ([1.0, 0.7], Rule.UNION, 0, [6, 4, 3]),
        # A point on the surface of A counts as inside.
        ([-1.5, 0.0], Rule.SINGLE, 0, [6, 1, 0]),
        # Outside, nearest to B: B expanded by 1.5 to radius 2.25 extends to x >= -0.25. C's points at (1, 3) are
        # sqrt(10) away, so the expanded B holds the points of B and no other.
        ([4.25, 0.0], Rule.OUTSIDE, 1, [2, 4, 1]),
        # Far to the left: A expanded to radius 3 holds all points but the two at (1, 3), at distance sqrt(10); the two
        # at (3, 0) are at distance 3.
        ([-3.0, 0.0], Rule.OUTSIDE, 0, [6, 4, 1]),
        # Below A and B, at distance 2 from both: the expansions hold (6, 2, 1) and (2, 4, 1).
        # The least counts (2, 2, 1) are a tie; the greatest counts (6, 4, 1) give class 0.
        ([1.0, -np.sqrt(8.0)], Rule.OUTSIDE, 0, [6, 4, 1]),
    ],
)
def test_the_venn_diagram(point: list[float], rule: Rule, label: int, counts: list[int]) -> None:
    sepc = frozen(VENN, TRAIN, 3)
    z = torch.tensor([point], dtype=torch.float64)
    out = sepc(z)
    assert Rule(int(out.rule[0])) is rule
    assert int(out.label[0]) == label
    found = sepc.explain(z, 0)
    assert list(found.details["counts"].values()) == counts  # type: ignore[union-attr]


def test_a_tie_in_the_union_goes_to_the_nearest_class() -> None:
    balls = [([0.0, 0.0], 1.0, 0), ([1.0, 0.0], 1.0, 1)]
    train = [([-0.5, 0.0], 0), ([1.5, 0.0], 1)]
    sepc = frozen(balls, train, 2)
    out = sepc(torch.tensor([[0.4, 0.0], [0.6, 0.0]], dtype=torch.float64))
    assert out.rule.tolist() == [Rule.UNION, Rule.UNION]
    assert out.label.tolist() == [0, 1]
    assert out.trust.tolist() == pytest.approx([4 / 5, 4 / 5])  # (1+1)(1+1) / ((1+1)(1+1) + 1·1)


def test_equal_distances_outside_are_decided_by_the_union() -> None:
    """Two equally near discs hold one class each: the least counts are zero, so the larger class wins the union."""
    balls = [([-2.0, 0.0], 1.0, 0), ([2.0, 0.0], 1.0, 1)]
    train = [([-2.0, 0.5], 0), ([2.0, 0.5], 1), ([2.0, -0.5], 1)]
    out = frozen(balls, train, 2)(torch.tensor([[0.0, 0.0]], dtype=torch.float64))
    assert out.rule.tolist() == [Rule.OUTSIDE]
    assert out.label.tolist() == [1]


class Reference(NamedTuple):
    label: int
    rule: Rule
    counts: list[int]


def reference(part: Partition, distances: Array, codes: Array, z: Array) -> Reference:
    """The rules of the paper for one point, computed with sets and loops over the training points."""
    limit = 1 + SURFACE_TOLERANCE
    classes = range(len(part.classes))
    owner = part.codes
    d = [float(e.distance(z)[0]) for e in part.ellipsoids]
    members = [{i for i in range(len(distances)) if distances[i, k] <= limit} for k in range(len(d))]

    def tally(rows: set[int]) -> list[int]:
        return [sum(1 for i in rows if codes[i] == c) for c in classes]

    def winner(counts: list[int]) -> int | None:
        best = [c for c in classes if counts[c] == max(counts)]
        return best[0] if len(best) == 1 else None

    holding = [k for k in range(len(d)) if d[k] <= limit]
    if len(holding) == 1:
        return Reference(int(owner[holding[0]]), Rule.SINGLE, tally(members[holding[0]]))
    if len(holding) > 1:
        common = tally(set.intersection(*(members[k] for k in holding)))
        if winner(common) is not None:
            return Reference(winner(common), Rule.OVERLAP, common)  # type: ignore[arg-type]
        union = tally(set.union(*(members[k] for k in holding)))
        label = winner(union)
        if label is None:
            tied = [c for c in classes if union[c] == max(union)]
            label = min(tied, key=lambda c: min((d[k] for k in range(len(d)) if owner[k] == c), default=np.inf))
        return Reference(label, Rule.UNION, union)
    nearest = int(np.argmin(d))
    assert sum(v <= d[nearest] * (1 + NEAREST_TIE) for v in d) == 1, (
        "a random point must not be equally near to two ellipsoids"
    )
    expanded = {i for i in range(len(distances)) if distances[i, nearest] <= d[nearest] * limit}
    return Reference(int(owner[nearest]), Rule.OUTSIDE, tally(expanded))


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "dim", "max_impure"), [(2, 2, 0), (2, 3, 5), (3, 2, 3), (4, 2, 1)])
def test_agrees_with_the_reference(rng: Rng, classes: int, dim: int, max_impure: int) -> None:
    codes = rng.integers(0, classes, 120)
    x = rng.normal(size=(120, dim)) + 1.2 * rng.normal(size=(classes, dim))[codes]
    part = partition(x, codes, max_impure=max_impure)
    sepc = SEPC.from_partition(part, dtype=torch.float64)
    z = np.concatenate([2.0 * rng.normal(size=(60, dim)), x[:30]])
    out = sepc(torch.from_numpy(z))
    _, found = sepc._resolve(torch.from_numpy(z))
    distances = part.distances(x)
    for i in range(len(z)):
        expected = reference(part, distances, codes, z[i])
        assert Rule(int(out.rule[i])) is expected.rule
        assert int(out.label[i]) == expected.label
        assert found.counts[i].tolist() == expected.counts


@pytest.mark.slow
def test_every_rule_occurs_in_an_overlapping_set(rng: Rng) -> None:
    codes = rng.integers(0, 2, 400)
    x = rng.normal(size=(400, 2)) + 1.0 * codes[:, None]
    sepc = SEPC.from_partition(partition(x, codes, max_impure=3))
    rules = sepc(torch.from_numpy(2.5 * rng.normal(size=(20_000, 2))).float()).rule
    assert set(rules.tolist()) == {0, 1, 2, 3}


def test_geometric_steps_keep_counts_within_the_relative_error(rng: Rng) -> None:
    """With more points than steps, counts outside are too small by at most ``relative_count_error``."""
    codes = np.repeat([0, 1], [3000, 300])
    x = rng.normal(size=(3300, 2)) + 4.0 * codes[:, None]
    part = partition(x, codes, max_impure=20)
    assert 0 < part.ledger.relative_count_error < 0.01
    sepc = SEPC.from_partition(part, dtype=torch.float64)
    z = 8.0 * rng.normal(size=(200, 2))
    distance, found = sepc._resolve(torch.from_numpy(z))
    outside = (found.rule == int(Rule.OUTSIDE)).numpy()
    assert outside.any()
    for i in np.flatnonzero(outside):
        k = int(found.nearest[i])
        within = part.ellipsoids[k].distance(x) <= float(distance[i, k]) * (1 + SURFACE_TOLERANCE)
        true = np.bincount(codes[within], minlength=2)
        short = true - found.counts[i].numpy()
        assert (short >= 0).all()
        assert (short <= part.ledger.relative_count_error * true).all()


@pytest.mark.parametrize("size", [2**12, 2**30])
def test_counts_outside_are_those_of_the_ledger_if_steps_are_left_out(
    rng: Rng, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Points before and beyond the horizon of their nearest ellipsoid, in one piece and in pieces of a few rows."""
    monkeypatch.setattr(torch_ops, "CPU_BYTES", size)
    sepc = model_of(rng, 9, 2, 40, held=0.5, steps=100, dtype=torch.float64)
    ledger_of_model = Ledger(*(table.numpy() for table in sepc.training_counts[1:11]))
    assert ledger_of_model.tail_distances.shape == (9, TAIL)
    z = torch.from_numpy(rng.normal(size=(300, 2)) * rng.uniform(0.5, 8, size=(300, 1)))
    distance, found = sepc._resolve(z)
    outside = (found.rule == int(Rule.OUTSIDE)).nonzero()[:, 0].tolist()
    beyond = []
    for i in outside:
        k = int(found.nearest[i])
        assert found.counts[i].tolist() == ledger_of_model.reached(k, float(distance[i, k])).tolist()
        beyond.append(float(distance[i, k]) > ledger_of_model.step_distances[k].max())
    assert any(beyond)
    assert not all(beyond)


@pytest.mark.parametrize("scale", [1, 2**20])
@pytest.mark.parametrize("size", [2**12, 2**30])
def test_counts_in_regions_are_those_of_the_points(
    rng: Rng, monkeypatch: pytest.MonkeyPatch, size: int, scale: int
) -> None:
    """Sets of ellipsoids that points share or not, counted point by point; large counts need more than 24 bits."""
    monkeypatch.setattr(torch_ops, "CPU_BYTES", size)
    codes = np.sort(rng.integers(0, 5, 200))
    member = rng.random((200, 12)) < 0.3
    cells, cell = np.unique(member, axis=0, return_inverse=True)
    counts = np.zeros((len(cells), 5), dtype=np.int64)
    np.add.at(counts, (cell.ravel(), codes), scale)
    entry_cells, entry_classes = np.nonzero(counts)
    tables = (
        cells.sum(axis=1), np.nonzero(cells)[1].astype(np.int32), entry_cells.astype(np.int32),
        entry_classes.astype(np.int32), counts[entry_cells, entry_classes],
    )  # fmt: skip
    inside = np.concatenate([member[:50], rng.random((50, 12)) < 0.2])
    found = region_counts(torch.from_numpy(inside), *(torch.from_numpy(table) for table in tables), 5)
    for row, narrow, wide in zip(inside, *found, strict=True):
        several = row.sum() > 1
        for mine, rows in ((narrow, member[:, row].all(axis=1)), (wide, member[:, row].any(axis=1))):
            assert mine.tolist() == (several * scale * np.bincount(codes[rows], minlength=5)).tolist()


def test_euclidean_distances_that_overflow_are_infinite() -> None:
    """A distance that float32 cannot compute is large or infinite, never NaN."""
    centers, axes, lengths = torch.zeros(2, 2), torch.eye(2).expand(2, 2, 2), torch.tensor([[1e12, 1e12], [1e9, 1e9]])
    z = torch.tensor([[1e27, 0.0], [1e15, 0.0]])
    found = torch_ops.euclidean_distances(z, centers, axes, lengths, torch.tensor([True, True]))
    assert (found[0] > 1e26).all()
    assert torch.allclose(found[1], torch.tensor([1e15 - 1e12, 1e15 - 1e9]))
