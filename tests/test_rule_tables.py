"""What the kernels look up: patterns are found by their hash, and every line says what the general path counts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from ellipsoid_models import model_of

from sepc_torch.model.kernels import tables
from sepc_torch.model.kernels.tables import (
    GUIDE,
    LOW_DIGITS,
    PAGE,
    SECTIONS,
    SIZES,
    entries,
    hash_table,
    hashed,
    hashed_by_lane,
    laid_out,
    packed,
    packed_by_lane,
    part,
    rule_tables,
)
from sepc_torch.model.trust import bayes_trust

Rng = np.random.Generator


def test_patterns_are_packed_bit_by_bit(rng: Rng) -> None:
    cells = rng.random((20, 70)) < 0.4
    words = packed(cells)
    assert words.shape == (20, 3)
    assert (((words[:, np.arange(70) // 32] >> (np.arange(70) % 32)) & 1) == cells).all()


@pytest.mark.parametrize("count", [0, 1, 20])
@pytest.mark.parametrize(("width", "bits"), [(3, 8), (256, 8), (300, 16), (700, 32), (1024, 32)])
def test_lanes_take_every_32nd_ellipsoid(rng: Rng, width: int, bits: int, count: int) -> None:
    cells = rng.random((count, width)) < 0.4
    words = packed_by_lane(cells)
    assert (words.shape, words.itemsize) == ((count, 32), bits // 8)
    assert words.view(np.int32).shape == (count, bits)
    k = np.arange(width)
    assert (((words[:, k % 32] >> (k // 32)) & 1) == cells).all()
    assert np.unpackbits(words.view(np.uint8)).sum() == cells.sum()


@pytest.mark.parametrize("by_lane", [False, True])
@pytest.mark.parametrize(("count", "width"), [(0, 5), (1, 40), (500, 40), (3000, 12)])
def test_every_pattern_is_found_by_its_hash(rng: Rng, count: int, width: int, by_lane: bool) -> None:
    """From its own place on, within the number of probes promised, and before an empty slot."""
    cells = np.unique(rng.random((count, width)) < 0.5, axis=0)
    words = packed_by_lane(cells) if by_lane else packed(cells)
    keys = hashed_by_lane(words) if by_lane else hashed(words)
    assert len(np.unique(keys)) >= len(words) - (2 if by_lane else 0)  # of 32 bits two may be the same
    rows = rng.permutation(len(words))
    slots, probes = hash_table(keys, rows)
    assert np.array_equal(np.sort(slots[slots >= 0]), np.arange(len(words)))
    for row in rows:
        reached = slots[(keys[row] + np.arange(probes)) & (len(slots) - 1)]
        place = np.flatnonzero(reached == row)[0]
        assert (reached[:place] >= 0).all()
    assert probes < 40


def test_what_is_not_found_soon_is_left_out(rng: Rng) -> None:
    """The lanes of a row look once, at 32 places: all that stay are there, and as many stay as there is room for."""
    keys = np.repeat(rng.integers(2**31, size=3).astype(np.int32), 50)
    slots, probes = hash_table(keys, np.arange(150), most=32)
    assert probes == 32
    places = np.flatnonzero(slots >= 0)
    assert (((places - keys[slots[places]]) & (len(slots) - 1)) < 32).all()
    assert len(np.unique(slots[places])) == len(places)
    for key in np.unique(keys):
        assert (slots[(key + np.arange(32)) & (len(slots) - 1)] >= 0).all()
    assert (hash_table(keys, np.arange(150))[0] >= 0).sum() == 150


def test_tables_know_the_training_set(rng: Rng) -> None:
    """In order of the classes; the counts of a cell's region are those of the general path."""
    sepc = model_of(rng, 20, 2, 4, mixed=True)
    sizes, tables = laid_out(sepc.training_counts, sepc.totals)
    assert (sizes["ellipsoids"], sizes["classes"]) == (20, 4)
    order, codes, starts = tables["order"].long(), tables["codes"], tables["starts"]
    assert torch.equal(codes.long(), sepc.codes[order])
    assert (codes.diff() >= 0).all()
    for c in range(4):
        assert (codes[starts[c] : starts[c + 1]] == c).all()
    assert int(starts[-1]) == 20
    cells = sepc.cells[:, order]
    assert torch.equal(tables["patterns"], torch.from_numpy(packed(cells.numpy())))
    assert torch.equal(tables["counts"][:20].long(), sepc.held[order])
    assert torch.equal(tables["trusts"][:20], bayes_trust(sepc.held[order], sepc.totals, codes.long()))
    slots, keys = tables["slots"].numpy(), tables["keys"].numpy()
    assert np.array_equal(keys[slots >= 0], hashed(packed(cells.numpy()))[slots[slots >= 0]])
    lane_slots, lane_keys = tables["lane_slots"].numpy(), tables["lane_keys"].numpy()
    by_lane = packed_by_lane(cells.numpy())
    assert np.array_equal(tables["lane_patterns"].numpy(), by_lane.view(np.int32))
    assert np.array_equal(lane_keys[lane_slots >= 0], hashed_by_lane(by_lane)[lane_slots[lane_slots >= 0]])
    listed = set(slots.tolist())
    assert set(lane_slots.tolist()) == listed
    for p in range(len(cells)):
        own = cells[p]
        narrow = sepc.counts[cells[:, own].all(dim=1)].sum(dim=0)
        wide = sepc.counts[cells[:, own].any(dim=1)].sum(dim=0)
        by_all = int((narrow == narrow.max()).sum()) == 1
        vouching = narrow if by_all else wide
        tied = int((vouching == vouching.max()).sum()) > 1
        assert (p in listed) == (int(own.sum()) > 1)
        if p in listed:
            assert torch.equal(tables["counts"][20 + p].long(), vouching)
            assert int(tables["sums"][20 + p]) == int((vouching * sepc.totals).sum())
            verdict = int(tables["verdicts"][20 + p])
            assert (bool(verdict & 2), bool(verdict & 1)) == (tied, by_all)
            assert vouching[verdict >> 2] == vouching.max()
            trust = bayes_trust(vouching[None], sepc.totals, torch.tensor([verdict >> 2]))
            assert tables["trusts"][20 + p] == trust


def test_bits_count_the_points_in_all_and_in_any_of_some_ellipsoids(rng: Rng) -> None:
    """Words of entries, with the digits of their numbers, sum to the counts of the cells."""
    cells = rng.random((70, 9)) < 0.3
    counts = rng.integers(0, 40, size=(70, 5)) * (rng.random((70, 5)) < 0.5)
    counts[:, 3] = 0  # a class without a point
    members, starts, numbers = entries(cells, counts)
    assert members.shape[1] == numbers.shape[1] == starts[-1]
    for held in ([0], [1, 4], [2, 3, 8]):
        for words, wanted in (
            (np.bitwise_and.reduce(members[held]), counts[cells[:, held].all(axis=1)].sum(axis=0)),
            (np.bitwise_or.reduce(members[held]), counts[cells[:, held].any(axis=1)].sum(axis=0)),
        ):
            bits = (
                np.unpackbits((words & numbers).view(np.uint8), axis=1)
                .reshape(*numbers.shape, 32)
                .sum(axis=2, dtype=int)
            )
            points = (bits * 2 ** np.arange(len(numbers))[:, None]).sum(axis=0)
            assert [points[a:b].sum() for a, b in itertools.pairwise(starts)] == wanted.tolist()


def test_high_digits_are_in_the_heavy_words_alone(rng: Rng) -> None:
    """Of 512 cells with a point of every class, forty have many, wherever these are."""
    sepc = model_of(rng, 9, 2, 3)
    cells = torch.tensor(list(itertools.product([False, True], repeat=9)))
    counts = torch.ones(512, 3, dtype=torch.int64)
    counts[rng.permutation(512)[:40]] = 2**LOW_DIGITS + 100
    training = sepc.training_counts._replace(cells=cells, counts=counts)
    _, found = laid_out(training, sepc.totals)
    assert rule_tables(training, sepc.totals).entries == (16, 2, 7)
    for begin in found["entry_starts"][:-1].tolist():
        high = found["numbers"][LOW_DIGITS:, begin : begin + 16].any(dim=0)
        assert high.tolist() == [True] * 2 + [False] * 14


@pytest.mark.parametrize("size", [1, 5, 256, 257, 700, 5120])
def test_guides_divide_the_merged_distances_into_parts(rng: Rng, size: int) -> None:
    """How many of them are within a bound tells the part, to the number."""
    numbers = np.sort(rng.normal(size=size))
    step = part(size)
    guides = numbers[step - 1 :: step]
    assert len(guides) <= GUIDE
    for bound in (*rng.normal(size=20), numbers[0], numbers[-1], np.inf):
        passed = int((guides <= bound).sum()) * step
        assert passed <= (numbers <= bound).sum() < passed + step


def test_tables_have_the_guides(rng: Rng) -> None:
    sepc = model_of(rng, 5, 2, 3, points=900)
    _, found = laid_out(sepc.training_counts, sepc.totals)
    step = part(found["merged"].shape[1])
    wanted = found["merged"][:, step - 1 :: step]
    assert torch.equal(found["guide"][:, : wanted.shape[1]], wanted)
    assert found["guide"].shape == (5, GUIDE)
    assert found["guide"][:, wanted.shape[1] :].isinf().all()


def test_merged_distances_count_as_those_of_the_classes_do(rng: Rng) -> None:
    """Trust in the own class by the points within a distance, and the sum over classes, at and between the entries."""
    sepc = model_of(rng, 12, 2, 4, mixed=True, dtype=torch.float64)
    training = sepc.training_counts
    _, tables = laid_out(training, sepc.totals)
    for k, before in enumerate(tables["order"].tolist()):
        distances = training.sorted_distances[before].flatten()
        middle = torch.tensor([0.0, float(distances.median()) * 1.01, 1e300])
        for within in torch.cat([distances[:20], middle.double()]):
            passed = (training.sorted_distances[before] <= within).sum(dim=1)
            reached = torch.nn.functional.pad(training.counts_at, (1, 0)).gather(1, passed[:, None])[:, 0]
            place = int(torch.searchsorted(tables["merged"][k], within, right=True))
            trust = bayes_trust(reached[None], sepc.totals, training.codes[before][None])
            assert tables["merged_trusts"][k, place] == trust
            assert int(tables["merged_sums"][k, place]) == int((reached * sepc.totals).sum())


def test_tables_are_one_after_another(rng: Rng) -> None:
    """A kernel finds sizes and sections by what the words begin with, each at a multiple of sixteen bytes."""
    sepc = model_of(rng, 7, 2, 3)
    sizes, sections = laid_out(sepc.training_counts, sepc.totals)
    tables = rule_tables(sepc.training_counts, sepc.totals)
    header = dict(zip((*SIZES, *SECTIONS), tables.words.tolist(), strict=False))
    assert {name: header[name] for name in SIZES} == sizes
    for name in SECTIONS:
        section = sections[name].contiguous().flatten()
        found = tables.words[header[name] :][: section.numel() * section.element_size() // 4]
        assert header[name] % 4 == 0
        assert torch.equal(found.view(section.dtype), section)
    assert len(tables.words) % PAGE == 0
    assert tables.merged
    assert not tables.double


@pytest.mark.parametrize(
    ("count", "classes", "points"), [(1, 2, 8), (40, 3, 300), (7, 30, 200), (9, 400, 900), (90, 2, 2000)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("most_merged", [0, 2**24])
def test_no_table_is_larger_than_foreseen(
    rng: Rng,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    classes: int,
    points: int,
    dtype: torch.dtype,
    most_merged: int,
) -> None:
    monkeypatch.setattr(tables, "_MOST_MERGED", most_merged)
    sepc = model_of(rng, count, 2, classes, points=points, dtype=dtype)
    foreseen = tables._words(sepc.training_counts)
    assert len(rule_tables(sepc.training_counts, sepc.totals).words) <= foreseen
    assert tables.addressable(sepc.training_counts)
    huge = torch.empty(2**15, 2**8, 2**8, device="meta")
    assert not tables.addressable(sepc.training_counts._replace(sorted_distances=huge))


def test_large_tables_are_not_merged(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    sepc = model_of(rng, 7, 2, 3)
    monkeypatch.setattr("sepc_torch.model.kernels.tables._MOST_MERGED", sepc.sorted_distances.numel() - 1)
    tables = rule_tables(sepc.training_counts, sepc.totals)
    assert not tables.merged
    assert "merged" not in laid_out(sepc.training_counts, sepc.totals)[1]


def test_counts_do_not_depend_on_precision(rng: Rng) -> None:
    """Thousands of points in a cell, which bfloat16 and TF32 would round."""
    sepc = model_of(rng, 20, 2, 4)
    training = sepc.training_counts._replace(counts=sepc.counts * 1001)
    _, wanted = laid_out(training, sepc.totals)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        _, found = laid_out(training, sepc.totals)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(found["counts"], wanted["counts"])
    assert not (wanted["counts"][20:] % 1001).any()
