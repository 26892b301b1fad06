"""Checks of the kernels on the CPU, run by test_kernels.py in a process with TRITON_INTERPRET=1.

Triton reads its mode when it is imported, so that the interpreter needs a process of its own.

    TRITON_INTERPRET=1 python tests/kernels_in_the_interpreter.py decisions 7
"""

from __future__ import annotations

import sys
import warnings

import numpy as np
import torch
import triton_interpreter  # noqa: F401 - before the first kernel
from ellipsoid_banks import bank_of
from ellipsoid_models import distances_in_many, model_of, points_for

from sepc_torch.ellipsoid import SURFACE_TOLERANCE
from sepc_torch.model.kernels import fused, judging, resolving, screening, tables
from sepc_torch.model.kernels.bounds import screen
from sepc_torch.model.kernels.splitting import split
from sepc_torch.model.prediction import Prediction, verdict
from sepc_torch.model.rules import TrainingCounts, resolve
from sepc_torch.model.sepc import SEPC

Rng = np.random.Generator
# Numbers are split into 22 bits; three such errors and the rounding of sums, in units of the terms that are summed.
ACCURACY = 2e-6


def distances(rng: Rng) -> None:
    """As accurate as float32, for odd shapes, strides and precisions, around an origin that is not zero."""
    for count, dim, points in ((3, 7, 40), (1, 1, 1), (2, 100, 9), (2, 64, 17)):
        centers, whiteners = (numbers.float().double() for numbers in bank_of(rng, count, dim))
        spread = centers.abs().amax(dim=0)
        origin = centers.mean(dim=0).float()
        offsets = (centers - origin).float().double()
        z = (centers[0] + torch.from_numpy(rng.normal(size=(points, 2 * dim)))[:, ::2] * spread).float()
        z[0] = centers[0].float()
        wide = torch.full((points, 2 * dim), torch.nan)
        wide[:, ::2] = z
        bank = split(offsets, whiteners)
        for given in (z, wide[:, ::2], z.bfloat16()):
            found = fused.launch(given, origin, bank)
            # The points as float32 has them after subtracting the origin: that rounding is everyone's.
            relative = (given.float() - origin).double()[:, None] - offsets
            exact = torch.linalg.vector_norm(relative[:, :, None] @ whiteners.mT, dim=(2, 3))
            terms = torch.linalg.vector_norm(relative.abs()[:, :, None] @ whiteners.abs().mT, dim=(2, 3))
            error = float(((found - exact).abs() / terms.clamp_min(1e-30)).max())
            assert error < ACCURACY, (count, dim, points, error)
        turned = torch.full((count, points), torch.nan)
        fused.launch_into(turned, z, origin, bank, 1, points)
        assert torch.equal(turned.T, fused.launch(z, origin, bank))
        z[0, 0] = torch.nan
        assert fused.launch(z, origin, bank)[0].isnan().all()
        assert fused.launch(z, origin, bank)[1:].isfinite().all()
        assert fused.launch(z[:0], origin, bank).shape == (0, count)


def rows_are_many_from(number: int) -> None:
    """From so many rows on a thread takes each, which the interpreter is quicker with; below, a warp."""
    resolving._MANY_ROWS = resolving._MOST_ROWS = number
    resolving._program_shape.cache_clear()


def kernels_of(sepc: SEPC) -> judging.Kernels:
    bank, exact = sepc.bank, sepc.scale.dtype == torch.float32
    prepared = split(bank.offsets, bank.whiteners) if exact else None
    return judging.kernels_for(bank.offsets, bank.whiteners, prepared, sepc.training_counts, sepc.totals)


def compare(found: tuple[torch.Tensor, torch.Tensor], own: Prediction, given: Prediction) -> None:
    """What a kernel wrote against what torch says; rows without a distance have a label of -1 and no trust."""
    ints, floats = found
    good = own.label >= 0
    assert torch.equal(ints[0], own.label)
    assert torch.equal(ints[1], own.rule)
    assert torch.equal(ints[2][good], own.nearest[good])
    for label, runner_up, trust, margin in ((own, 3, 0, 2), (given, 4, 3, 4)):
        assert torch.equal(ints[runner_up][good], label.runner_up[good])
        assert torch.allclose(floats[trust], label.trust, rtol=1e-6, atol=0)
        assert torch.allclose(floats[margin], label.margin, rtol=2e-5, atol=0, equal_nan=True)
    assert torch.allclose(floats[1][good], own.distance[good], rtol=1e-5, atol=0, equal_nan=True)
    assert not floats[1][~good].isfinite().any()


def decisions(rng: Rng) -> None:
    """The kernel decides as torch does from the same distances, also where rules are rare."""
    seen = set()
    for count, dim, classes, rows, dtype, options in (
        (9, 2, 3, 60, torch.float32, {"held": 2.0}),
        (1, 1, 2, 10, torch.float32, {}),
        (40, 3, 5, 50, torch.float64, {"held": 3.0}),
        (70, 2, 40, 40, torch.float32, {"held": 3.0}),
        (12, 2, 4, 50, torch.float64, {"twins": True}),
        (34, 2, 4, 40, torch.float32, {"mixed": True}),
        (8, 3, 3, 40, torch.float64, {"nearest": "euclidean"}),
    ):
        sepc = model_of(rng, count, dim, classes, dtype=dtype, **options)
        z = points_for(rng, sepc, rows)
        label = torch.from_numpy(rng.integers(0, classes, rows))
        own, given = sepc.judge(z, label)
        distance = sepc.bank(z)
        nearness = sepc._nearness(z, distance)
        # A warp to a row and a thread to a row; the classes' distances together and one after another; what counting
        # needs read beforehand and when it is needed.
        ways = ((2**12, 2**24, 2048, 8), (2**12, 0, 0, 8), (0, 2**24, 0, rows), (0, 0, 0, 24))
        for many, merged, ahead, some in ways:
            resolving._AHEAD_NUMBERS = ahead
            rows_are_many_from(many)
            tables._MOST_MERGED = merged
            few = slice(0, some)
            near = None if nearness is None else nearness[few]
            found = judging.decide(distance[few], near, label[few], kernels_of(sepc))
            compare(found, *(Prediction(*(field[few] for field in judged)) for judged in (own, given)))
        seen |= set(own.rule.tolist())
    assert seen == {0, 1, 2, 3}


def by_kernel_and_by_torch(
    distance: torch.Tensor, training: TrainingCounts, totals: torch.Tensor, given: torch.Tensor
) -> None:
    """Distances however odd are judged alike, by a thread to a row and by a warp, with given labels and without."""
    found = resolve(distance, training)
    own, judged = (verdict(distance, found, training, totals, label) for label in (found.label, given))
    kernels = judging.Kernels(tables.rule_tables(training, totals), None, None)
    for many in (0, 2**30):
        rows_are_many_from(many)
        both = judging.decide(distance, None, given, kernels)
        compare(both, own, judged)
        for parts, whole in zip(judging.decide(distance, None, None, kernels), both, strict=True):
            assert torch.equal(parts.nan_to_num(), whole[: len(parts)].nan_to_num())


def ties(rng: Rng) -> None:
    """A tie goes to the nearest of its classes, which may be the nearest of all, the second, or a third.

    Ellipsoids 0, 1 and 2 are of classes 0, 1 and 2; class 3 has none.
    """
    most, far = torch.finfo(torch.float32).max, torch.inf
    distance = torch.tensor(
        [[0.2, 0.5, 0.9], [0.9, 0.2, 0.5], [0.5, 0.9, 0.2], [0.3, 0.3, 0.3], [far, most, most], [far, far, most]]
    )
    for tied in ([0, 1], [0, 2], [1, 2], [2, 3], [0, 3], [0, 1, 2], [0, 1, 2, 3]):
        counts = torch.zeros(2, 4, dtype=torch.int64)
        counts[0, tied] = 7
        counts[1] = torch.tensor([3, 1, 0, 2])
        training = TrainingCounts(
            torch.arange(3),
            torch.tensor([[True, True, True], [False, False, False]]),
            counts,
            counts[:1].repeat(3, 1),
            torch.ones(3, 4, 1),
            torch.full((4, 1), 9),
        )
        totals = torch.from_numpy(rng.integers(10, 50, 4))
        label = resolve(distance, training).label
        assert set(label[:4].tolist()) <= set(tied)
        by_kernel_and_by_torch(distance, training, totals, torch.arange(6) % 4)


def odd_distances(rng: Rng) -> None:
    """Rows with some distances that are infinite or no numbers, and with more ellipsoids than lanes."""
    for count, classes, rows in ((1, 2, 12), (9, 3, 20), (40, 4, 12), (300, 3, 3), (1100, 3, 3)):
        sepc = model_of(rng, count, 2, classes, held=2.0, points=200)
        distance = sepc.bank(points_for(rng, sepc, rows))
        odd = torch.from_numpy(rng.random(distance.shape) < 0.1)
        numbers = torch.tensor([torch.nan, torch.inf, 1.0, 3.4e38])[
            torch.from_numpy(rng.integers(0, 4, distance.shape))
        ]
        distance[::2] = torch.where(odd, numbers, distance)[::2]
        given = torch.from_numpy(rng.integers(0, classes, rows))
        by_kernel_and_by_torch(distance, sepc.training_counts, sepc.totals, given)


def patterns_of_many(rng: Rng) -> None:
    """Rows in sets of ellipsoids that no training point has, of two to twelve."""
    for count, rows in ((40, 8), (300, 9), (1000, 2)):
        sepc = model_of(rng, count, 2, 4, held=2.0, points=300)
        given = torch.from_numpy(rng.integers(0, 4, rows))
        by_kernel_and_by_torch(distances_in_many(rng, count, rows), sepc.training_counts, sepc.totals, given)


def large_counts(rng: Rng) -> None:
    """Numbers of 23 digits: the high ones take several tiles, and sums of products need more than 54 bits."""
    for count in (40, 200):
        sepc = model_of(rng, count, 2, 4, held=3.0, points=200)
        training = sepc.training_counts
        some = rng.random(training.counts.shape) < 0.2
        large = torch.from_numpy(np.where(some, rng.integers(2**22, 2**23 - 200, some.shape), 0))
        counts = torch.where(training.counts > 0, training.counts + large, 0)
        training = training._replace(counts=counts, held=training.cells.T.long() @ counts)
        totals = counts.sum(dim=0) + 2**29
        rules = tables.rule_tables(training, totals)
        assert rules.digits == 23
        rows_are_many_from(2**12)
        assert resolving._program_shape(4, count, 4, *rules.entries).heavy > 1
        given = torch.from_numpy(rng.integers(0, 4, 4))
        by_kernel_and_by_torch(distances_in_many(rng, count, 4), training, totals, given)


def equal_hashes(rng: Rng) -> None:
    """A pattern with the hash of another is not taken for it. Of the 2^20 patterns of two lanes some are alike."""
    words = np.zeros((1024, 32), dtype=np.int16)
    words[:, 0] = np.arange(1024)
    first, second = tables.hashed_by_lane(words), tables.hashed_by_lane(np.roll(words, 1, axis=1))
    hashes = (first[:, None] ^ second[None, :]).ravel()  # but for what no lane has, which is the same for all
    order = np.argsort(hashes, kind="stable")
    alike = np.flatnonzero(np.diff(hashes[order]) == 0)
    pair = order[alike[rng.integers(len(alike))] :][:2]
    patterns = np.zeros((2, 320), dtype=bool)
    for pattern, place in zip(patterns, pair, strict=True):
        for lane, word in enumerate(divmod(int(place), 1024)):
            pattern[lane::32] = (word >> np.arange(10)) & 1
    assert len(np.unique(tables.hashed_by_lane(tables.packed_by_lane(patterns)))) == 1
    cells = np.concatenate([patterns[:1], patterns[1:] | (rng.random((6, 320)) < 0.02), rng.random((6, 320)) < 0.02])
    counts = torch.from_numpy(rng.integers(1, 30, (len(cells), 3)))
    training = TrainingCounts(
        torch.arange(320) % 3, torch.from_numpy(cells), counts, torch.from_numpy(cells.T.astype(np.int64)) @ counts,
        torch.ones(320, 3, 1), torch.full((3, 1), 9),
    )  # fmt: skip
    training = training._replace(codes=training.codes.sort().values)
    distance = torch.from_numpy(np.where(patterns, 0.5, 2.0) + 0.1 * rng.random((2, 320))).float()
    by_kernel_and_by_torch(distance, training, counts.sum(dim=0), torch.arange(2))


def known_patterns(rng: Rng) -> None:
    """Patterns that a training point has are looked up, ties too: without the numbers of entries all is the same."""
    sepc = model_of(rng, 40, 2, 4, held=3.0)
    z = points_for(rng, sepc, 64, bad=False)
    distance = sepc.bank(z)
    inside = distance <= 1.0 + SURFACE_TOLERANCE
    kernels = kernels_of(sepc)
    _, sections = tables.laid_out(sepc.training_counts, sepc.totals)
    listed = set(sections["slots"].tolist()) - {-1}
    cells = {tuple(cell): p for p, cell in enumerate(sepc.cells.tolist())}
    cell = torch.tensor([cells.get(tuple(row), -1) for row in inside.tolist()])
    known = torch.tensor([p in listed for p in cell.tolist()])
    assert 2 < int(known.sum()) < int((inside.sum(dim=1) > 1).sum())
    words = kernels.tables.words.clone()
    place = int(words[len(tables.SIZES) + tables.SECTIONS.index("numbers")])
    words[place : place + sections["numbers"].numel()] = 0
    wiped = kernels._replace(tables=kernels.tables._replace(words=words))
    whole = judging.decide(distance, None, None, kernels)
    without = judging.decide(distance, None, None, wiped)
    assert not torch.equal(without[1][0], whole[1][0])  # others needed those counts
    rows_are_many_from(2**12)
    by_warps = judging.decide(distance[known], None, None, wiped)
    for ours, theirs, wanted in zip(without, by_warps, whole, strict=True):
        assert torch.equal(ours[:, known], wanted[:, known])
        assert torch.equal(theirs, wanted[:, known])


def stored_either_way(rng: Rng) -> None:
    """Distances by row and by column are judged alike, by a warp to a row and by a thread."""
    for count, many in ((40, 2**12), (300, 2**12), (40, 0)):
        rows_are_many_from(many)
        sepc = model_of(rng, count, 2, 4, held=2.0)
        kernels, z = kernels_of(sepc), points_for(rng, sepc, 12)
        assert kernels.bank is not None
        found = []
        for by_row in (False, True):
            room = resolving.room_for(count, len(z), z)
            fused.launch_into(room, z, sepc.bank.origin, kernels.bank, *((count, 1) if by_row else (1, len(z))))
            ints, floats = judging._room(z, torch.float32, None)
            resolving.resolve(room, None, None, kernels.tables, ints, floats, by_row)
            found.append((ints, floats.nan_to_num()))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])


def pieces(rng: Rng) -> None:
    """From points to decisions, in one piece and in several, with and without labels to judge."""
    sepc = model_of(rng, 11, 4, 3)
    kernels = kernels_of(sepc)
    z = points_for(rng, sepc, 50)
    label = torch.from_numpy(rng.integers(0, 3, 50))
    whole = judging.judge(z, label, sepc.bank.origin, kernels, screening=True)
    compare(whole, *sepc.judge(z, label))
    judging._PIECE = 11 * 16
    for parts, wanted in zip(judging.judge(z, label, sepc.bank.origin, kernels, screening=True), whole, strict=True):
        assert torch.equal(parts.nan_to_num(), wanted.nan_to_num())
    # Labels of any stride, and points of any.
    strided = torch.stack([label + 7, label], dim=1)[:, 1]
    turned = z.T.contiguous().T
    for parts, wanted in zip(
        judging.judge(turned, strided, sepc.bank.origin, kernels, screening=True), whole, strict=True
    ):
        assert torch.equal(parts.nan_to_num(), wanted.nan_to_num())
    by_distance = judging.decide(sepc.bank(z), None, strided, kernels)
    assert torch.equal(by_distance[0], whole[0])
    # The model's own way to them, without a gradient and with one.
    for points in (z, z.clone().requires_grad_()):
        for ours, theirs in zip(sepc._by_kernel(points, label, kernels), sepc.judge(points, label), strict=True):
            assert torch.equal(ours.label, theirs.label)
            assert torch.equal(ours.rule, theirs.rule)
            assert torch.allclose(ours.margin, theirs.margin, rtol=2e-5, equal_nan=True)
            assert ours.margin.requires_grad == points.requires_grad
    alone = judging.judge(z, None, sepc.bank.origin, kernels, screening=False)
    assert torch.equal(alone[0], whole[0][:4])
    assert [tuple(part.shape) for part in judging.judge(z[:0], None, sepc.bank.origin, kernels, screening=True)] == [
        (4, 0),
        (3, 0),
    ]


def bounds(rng: Rng) -> None:
    """No estimate is farther from the exact distance, nor from the accurate one, than its bound says."""
    for count, dim in ((6, 3), (5, 20), (3, 64)):
        centers, whiteners = (numbers.float().double() for numbers in bank_of(rng, count, dim))
        origin = torch.zeros(dim)
        bank = split(centers, whiteners)
        coarse = screen(bank)
        z = (centers[0] + torch.from_numpy(rng.normal(size=(40, dim))) * centers.abs().amax(dim=0)).float()
        z[0], z[1] = centers[0].float(), 0.0
        estimate, norm = torch.full((count, 40), torch.nan), torch.full((40,), torch.nan)
        screening.estimate(z, origin, bank, coarse, estimate, norm)
        exact = torch.linalg.vector_norm((z.double()[:, None] - centers)[:, :, None] @ whiteners.mT, dim=(2, 3)).T
        bound = coarse.slope[:, None] * norm + coarse.offset[:, None] + coarse.relative * estimate
        error = (estimate - exact).abs()
        assert (error <= bound).all()
        assert ((estimate - fused.launch(z, origin, bank).T).abs() <= bound).all()
        # Useful, too: not far above what rounding does.
        assert float((error / bound).max()) > 0.02


def screening_decides(rng: Rng) -> None:
    """Every result from screened distances is that from accurate ones, to the last bit, and fewer were computed."""
    for count, dim, classes, judging_labels in ((7, 2, 3, True), (12, 20, 4, False), (33, 3, 5, True)):
        sepc = model_of(rng, count, dim, classes, held=2.0)
        kernels = kernels_of(sepc)
        assert kernels.bank is not None
        assert kernels.coarse is None  # so few are not worth it
        coarse = screen(kernels.bank)
        z = points_for(rng, sepc, 40)
        given = torch.from_numpy(rng.integers(0, classes, 40)) if judging_labels else None
        origin, rules = sepc.bank.origin, kernels.tables
        distance, used = screening.screened(z, given, origin, kernels.bank, coarse, rules.starts)
        accurate = torch.full_like(distance, torch.nan)
        fused.launch_into(accurate, z, origin, kernels.bank, 1, len(z))
        assert int(used.sum()) < 0.8 * count * len(z)
        results = []
        for numbers in (distance, accurate):
            ints, floats = judging._room(z, torch.float32, given)
            resolving.resolve(numbers, None, given, rules, ints, floats, by_row=False)
            results.append((ints, floats.nan_to_num()))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of NaN and overflow, which the kernels are tested with
    rows_are_many_from(0)
    check, seed = sys.argv[1:]
    globals()[check](np.random.default_rng(int(seed)))
    sys.stdout.write("right")
