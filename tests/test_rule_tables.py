"""The rule tables of the kernels: every line agrees with the general path, and every set is found by its hash."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from ellipsoid_models import model_of

from sepc_torch.ellipsoid import SURFACE_TOLERANCE
from sepc_torch.model.kernels.cell_tables import entries, hash_table, packed
from sepc_torch.model.kernels.decision_tables import TIED, RuleTables, addressable, rule_tables
from sepc_torch.model.rules import TrainingCounts
from sepc_torch.partitioning.cells import TAIL, Ledger, ellipsoid_hashes, set_keys

Rng = np.random.Generator


def ledger_of(training: TrainingCounts) -> Ledger:
    return Ledger(*(table.numpy() for table in training[1:11]))


def dense_lines(tables: RuleTables, classes: int) -> torch.Tensor:
    """The lines of class counts as a matrix."""
    sizes = tables.line_starts.diff()
    dense = torch.zeros(len(sizes), classes, dtype=torch.int64)
    row = torch.arange(len(sizes)).repeat_interleave(sizes)
    dense[row, tables.line_classes.long()] = tables.line_counts.long()
    assert int((dense > 0).sum()) == len(tables.line_classes), "a class occurs twice, or without points"
    assert (tables.line_classes.diff()[row.diff() == 0] > 0).all()
    return dense


def test_booleans_are_packed_bit_by_bit(rng: Rng) -> None:
    cells = rng.random((20, 70)) < 0.4
    words = packed(cells)
    assert words.shape == (20, 3)
    assert (((words[:, np.arange(70) // 32] >> (np.arange(70) % 32)) & 1) == cells).all()


@pytest.mark.parametrize(("count", "width"), [(0, 5), (1, 40), (500, 40), (3000, 12)])
def test_every_cell_is_found_by_its_hash(rng: Rng, count: int, width: int) -> None:
    """A lookup that starts at the cell's own slot finds it within the promised number of probes."""
    cells = np.unique(rng.random((count, width)) < 0.5, axis=0)
    hashes = ellipsoid_hashes(width)
    keys = set_keys(cells.sum(axis=1), np.nonzero(cells)[1], hashes)
    assert keys.tolist() == [int(hashes[cell].sum()) for cell in cells]
    assert len(np.unique(keys)) == len(cells)
    rows = rng.permutation(len(cells))
    slots, probes = hash_table(keys, rows)
    assert np.array_equal(np.sort(slots[slots >= 0]), np.arange(len(cells)))
    for row in rows:
        assert row in slots[(keys[row] + np.arange(probes)) & (len(slots) - 1)]
    assert probes < 40


def test_colliding_keys_are_all_stored() -> None:
    slots, probes = hash_table(np.repeat(np.array([3, 9], dtype=np.int64), 20), np.arange(40))
    assert np.array_equal(np.sort(slots[slots >= 0]), np.arange(40))
    assert probes >= 20


def test_hashes_depend_on_nothing_but_the_number_of_ellipsoids() -> None:
    assert np.array_equal(ellipsoid_hashes(30)[:20], ellipsoid_hashes(20))


@pytest.mark.parametrize("size", [2**11, 2**30])
def test_lines_agree_with_the_general_path(rng: Rng, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Ellipsoids are sorted by class; each cell has its members, its deciding counts, their sum and the verdict."""
    monkeypatch.setattr("sepc_torch.model.torch_ops.CPU_BYTES", size)
    sepc = model_of(rng, 20, 2, 4, mixed=True)
    ledger = ledger_of(sepc.training_counts)
    tables = rule_tables(sepc.training_counts, sepc.totals)
    order, codes, starts = tables.order.long(), tables.codes, tables.starts
    assert torch.equal(codes.long(), sepc.codes[order])
    assert (codes.diff() >= 0).all()
    for c in range(4):
        assert (codes[starts[c] : starts[c + 1]] == c).all()
    assert int(starts[-1]) == 20
    lines = dense_lines(tables, 4)
    assert torch.equal(lines[:20], sepc.held[order])
    assert torch.equal(tables.verdict_counts[:20].long(), sepc.held[order, codes.long()])
    assert torch.equal(tables.verdicts[:20], 2 * codes + 1)
    cells, counts = torch.from_numpy(ledger.cells)[:, order], torch.from_numpy(ledger.counts)
    keys = set_keys(ledger.cell_sizes, tables.cell_members.numpy(), tables.hashes.numpy())
    taken = tables.slots >= 0
    assert np.array_equal(tables.keys[taken].numpy(), keys[tables.slots[taken].numpy()])
    listed = set(tables.slots[taken].tolist())
    for p, own in enumerate(cells):
        members = tables.cell_members[tables.cell_starts[p] : tables.cell_starts[p + 1]]
        assert sorted(members.tolist()) == own.nonzero()[:, 0].tolist()
        assert (p in listed) == (int(own.sum()) > 1)
        if p not in listed:
            continue
        narrow = counts[cells[:, own].all(dim=1)].sum(dim=0)
        wide = counts[cells[:, own].any(dim=1)].sum(dim=0)
        by_all = int((narrow == narrow.max()).sum()) == 1
        deciding = narrow if by_all else wide
        assert torch.equal(lines[20 + p], deciding)
        assert int(tables.verdict_counts[20 + p]) == int(deciding.max())
        assert int(tables.sums[20 + p]) == int((deciding * sepc.totals).sum())
        tied = int((deciding == deciding.max()).sum()) > 1
        assert int(tables.verdicts[20 + p]) == (TIED if tied else 2 * int(deciding.argmax()) + by_all)


def test_bits_count_the_points_in_all_and_in_any_of_some_ellipsoids(rng: Rng) -> None:
    cells = rng.random((70, 9)) < 0.3
    counts = rng.integers(0, 40, size=(70, 5)) * (rng.random((70, 5)) < 0.5)
    counts[:, 3] = 0  # a class without a point
    cell, label = np.nonzero(counts)
    members, starts, digits = entries(
        cells.sum(axis=1), np.nonzero(cells)[1], cell, label, counts[cell, label], ellipsoids=9, classes=5
    )
    assert members.shape[1] == digits.shape[1] == starts[-1]
    for inside in ([0], [1, 4], [2, 3, 8]):
        for words, wanted in (
            (np.bitwise_and.reduce(members[inside]), counts[cells[:, inside].all(axis=1)].sum(axis=0)),
            (np.bitwise_or.reduce(members[inside]), counts[cells[:, inside].any(axis=1)].sum(axis=0)),
        ):
            bits = np.unpackbits((words & digits).view(np.uint8), axis=1).reshape(*digits.shape, 32)
            points = (bits.sum(axis=2, dtype=int) * 2 ** np.arange(len(digits))[:, None]).sum(axis=0)
            assert [points[a:b].sum() for a, b in itertools.pairwise(starts)] == wanted.tolist()


@pytest.mark.parametrize("at_once", [1, 2**22])
@pytest.mark.parametrize("steps", [20, 2048])
def test_merged_distances_count_like_those_of_the_classes(
    rng: Rng, monkeypatch: pytest.MonkeyPatch, at_once: int, steps: int
) -> None:
    """Points of the own class within a distance, and the sum over classes, at and between the stored distances.

    With 20 steps the ellipsoids have a horizon.
    """
    monkeypatch.setattr("sepc_torch.model.kernels.decision_tables._MERGED_AT_ONCE", at_once)
    sepc = model_of(rng, 12, 2, 4, mixed=True, steps=steps, dtype=torch.float64)
    training = sepc.training_counts
    ledger = ledger_of(training)
    assert training.tail_distances.shape[1] == (TAIL if steps == 20 else 0)
    tables = rule_tables(training, sepc.totals)
    for k, before in enumerate(tables.order.tolist()):
        distances = np.concatenate([ledger.step_distances[before, :20], ledger.tail_distances[before, ::5]])
        for distance in [*distances, 0.0, float(np.median(distances)) * 1.01, 1e300]:
            counts = torch.from_numpy(ledger.reached(before, distance))
            within = torch.tensor(distance * (1 + SURFACE_TOLERANCE), dtype=torch.float64)
            place = int(torch.searchsorted(tables.merged[k], within, right=True))
            assert int(tables.merged_counts[k, place]) == int(counts[training.codes[before]])
            assert int(tables.merged_sums[k, place]) == int((counts * sepc.totals).sum())


def test_tables_beyond_32_bit_offsets_are_refused(rng: Rng) -> None:
    training = model_of(rng, 7, 2, 3).training_counts
    assert addressable(training)
    assert not addressable(training._replace(codes=torch.empty(2**31, dtype=torch.int8, device="meta")))
    assert not addressable(training._replace(cell_members=torch.empty(2**31, dtype=torch.int8, device="meta")))
