"""Checks of the kernels on the CPU, run by test_kernels.py in a process with TRITON_INTERPRET=1.

Triton reads its mode at import, so the interpreter needs its own process. The checks are small: the interpreter takes
about a second per row. The tests marked ``gpu`` are the thorough ones, and the only ones of the screening kernels.

    TRITON_INTERPRET=1 python tests/kernels_in_the_interpreter.py 7
"""

from __future__ import annotations

import sys
import warnings
from unittest import mock

import numpy as np
import torch
from ellipsoid_banks import bank_of
from ellipsoid_models import distances_in_many, model_of, points_for

from sepc_torch.model import kernels
from sepc_torch.model.kernels import Kernels, decide, decision_tables, distances, tables
from sepc_torch.model.prediction import Prediction, predict_for_label
from sepc_torch.model.rules import TrainingCounts, resolve
from sepc_torch.partitioning.cells import Ledger

Rng = np.random.Generator
# Numbers are split into 22 bits. The bound covers three such errors and the rounding of sums, relative to the terms.
ACCURACY = 2e-6


def check_distances(rng: Rng) -> None:
    """Distances are as accurate as float32, for odd shapes, strides and dtypes, and an origin that is not zero."""
    for count, dim, points in ((3, 7, 20), (1, 1, 1), (2, 70, 5)):
        centers, whiteners = (numbers.float().double() for numbers in bank_of(rng, count, dim))
        spread = centers.abs().amax(dim=0)
        origin = centers.mean(dim=0).float()
        offsets = (centers - origin).float().double()
        z = (centers[0] + torch.from_numpy(rng.normal(size=(points, 2 * dim)))[:, ::2] * spread).float()
        z[0] = centers[0].float()
        wide = torch.full((points, 2 * dim), torch.nan)
        wide[:, ::2] = z
        bank = tables.split(offsets, whiteners)
        for given in (z, wide[:, ::2], z.bfloat16()):
            found = distances.distances(given, origin, bank)
            # The points as float32 holds them after subtracting the origin: that rounding precedes the kernel.
            relative = (given.float() - origin).double()[:, None] - offsets
            exact = torch.linalg.vector_norm(relative[:, :, None] @ whiteners.mT, dim=(2, 3))
            terms = torch.linalg.vector_norm(relative.abs()[:, :, None] @ whiteners.abs().mT, dim=(2, 3))
            error = float(((found - exact).abs() / terms.clamp_min(1e-30)).max())
            assert error < ACCURACY, (count, dim, points, error)
        z[0, 0] = torch.nan
        found = distances.distances(z, origin, bank)
        assert found[0].isnan().all()
        assert found[1:].isfinite().all()
        assert distances.distances(z[:0], origin, bank).shape == (0, count)


def use_many_rows_from(number: int) -> None:
    """Choose how rows are shared out: a program to a row below this number of rows, a thread to a row from it on."""
    decide._MANY_ROWS = decide._MANY_ROWS_OF_MANY = number
    decide.lookup_shape.cache_clear()
    decide.count_shape.cache_clear()


def compare(found: tuple[torch.Tensor, torch.Tensor], own: Prediction, given: Prediction) -> None:
    """Compare the columns of the kernels with the predictions of torch."""
    ints, floats = found
    good = own.label >= 0
    assert torch.equal(ints[0], own.label)
    assert torch.equal(ints[1][good], own.rule[good])
    assert torch.equal(ints[2][good], own.nearest[good])
    for label, runner_up, trust, margin in ((own, 3, 0, 2), (given, 4, 3, 4)):
        assert torch.equal(ints[runner_up][good], label.runner_up[good])
        assert torch.allclose(floats[trust], label.trust, rtol=1e-6, atol=0)
        assert torch.allclose(floats[margin], label.margin, rtol=2e-5, atol=0, equal_nan=True)
    assert torch.allclose(floats[1][good], own.distance[good], rtol=1e-5, atol=0, equal_nan=True)
    assert not floats[1][~good].isfinite().any()


def check_against_torch(
    distance: torch.Tensor,
    training: TrainingCounts,
    totals: torch.Tensor,
    given: torch.Tensor,
    nearness: torch.Tensor | None = None,
) -> set[int]:
    """Kernels and torch decide alike, for a program to a row and a thread to a row; returns the rules that fired."""
    found = resolve(distance, training, nearness)
    own, judged = (predict_for_label(distance, found, training, totals, label) for label in (found.label, given))
    model = Kernels(decision_tables.rule_tables(training, totals), None, None)
    for many in (1, 2**30):
        use_many_rows_from(many)
        both = kernels.decide_distances(distance, nearness, given, model)
        compare(both, own, judged)
    alone = kernels.decide_distances(distance[:1], None if nearness is None else nearness[:1], None, model)
    assert torch.equal(alone[0], both[0][:4, :1])
    return set(own.rule.tolist())


def check_rules(rng: Rng) -> None:
    """Every rule, in both dtypes; more classes than a program counts at a time; ties; unsorted classes; Euclidean.

    With ``steps`` the ellipsoids keep fewer steps than the grids have counts.
    """
    seen: set[int] = set()
    for count, dim, classes, rows, dtype, options in (
        (9, 2, 3, 7, torch.float32, {"held": 2.0}),
        (1, 1, 2, 4, torch.float32, {}),
        (20, 2, 40, 4, torch.float32, {"held": 3.0}),
        (9, 2, 40, 6, torch.float32, {"held": 0.5, "twins": True, "steps": 50}),
        (12, 2, 4, 6, torch.float64, {"twins": True}),
        (34, 2, 4, 5, torch.float32, {"mixed": True}),
        (8, 3, 3, 6, torch.float64, {"nearest": "euclidean"}),
    ):
        sepc = model_of(rng, count, dim, classes, dtype=dtype, **options)
        z = points_for(rng, sepc, rows)
        given = torch.from_numpy(rng.integers(0, classes, rows))
        distance = sepc.bank(z)
        seen |= check_against_torch(
            distance, sepc.training_counts, sepc.totals, given, sepc._nearness(z, distance)
        )  # fmt: skip
    assert seen == {0, 1, 2, 3}


def check_ties(rng: Rng) -> None:
    """A tie goes to the nearest of its classes. Ellipsoids 0, 1, 2 have classes 0, 1, 2; class 3 has no ellipsoid."""
    most, far = torch.finfo(torch.float32).max, torch.inf
    distance = torch.tensor([[0.2, 0.5, 0.9], [0.5, 0.9, 0.2], [0.3, 0.3, 0.3], [far, most, most]])
    for tied in ([1, 2], [0, 3], [0, 1, 2, 3]):
        counts = torch.zeros(2, 4, dtype=torch.int64)
        counts[0, tied] = 7
        counts[1] = torch.tensor([3, 1, 0, 2])
        entries = counts.nonzero().int()
        training = TrainingCounts(
            codes=torch.arange(3),
            cell_sizes=torch.tensor([3, 0]),
            cell_members=torch.arange(3, dtype=torch.int32),
            entry_cells=entries[:, 0],
            entry_classes=entries[:, 1],
            entry_counts=counts[counts > 0],
            grid_classes=torch.arange(4, dtype=torch.int32),
            grid_counts=torch.full((4,), 9),
            step_ids=torch.arange(4, dtype=torch.int32).repeat(3, 1),
            step_distances=torch.ones(3, 4),
            tail_distances=torch.ones(3, 0),
            held=counts[:1].repeat(3, 1),
        )
        label = resolve(distance, training).label
        assert set(label[:3].tolist()) <= set(tied)
        check_against_torch(distance, training, torch.from_numpy(rng.integers(10, 50, 4)), torch.arange(4))


def check_odd_distances(rng: Rng) -> None:
    """Rows in which some distances are infinite, NaN or at the end of float32."""
    sepc = model_of(rng, 40, 2, 4, held=2.0, points=200)
    distance = sepc.bank(points_for(rng, sepc, 6))
    numbers = torch.tensor([torch.nan, torch.inf, 1.0, 3.4e38])[torch.from_numpy(rng.integers(0, 4, distance.shape))]
    distance = torch.where(torch.from_numpy(rng.random(distance.shape) < 0.1), numbers, distance)
    check_against_torch(distance, sepc.training_counts, sepc.totals, torch.from_numpy(rng.integers(0, 4, 6)))


def check_counting(rng: Rng) -> None:
    """Sets of ellipsoids that no training point shares, with counts of 23 binary digits."""
    sepc = model_of(rng, 40, 2, 4, held=3.0, points=200)
    training = sepc.training_counts
    some = rng.random(len(training.entry_counts)) < 0.2
    some[0] = True
    counts = training.entry_counts + torch.from_numpy(np.where(some, rng.integers(2**22, 2**23 - 200, len(some)), 0))
    training = TrainingCounts.from_ledger(
        training.codes,
        Ledger(*(table.numpy() for table in training[1:11]))._replace(entry_counts=counts.numpy()),
        torch.float32,
    )
    totals = torch.zeros(4, dtype=torch.int64).index_add_(0, training.entry_classes, counts) + 2**29
    assert len(decision_tables.rule_tables(training, totals).digits) == 23
    check_against_torch(distances_in_many(rng, 40, 4), training, totals, torch.from_numpy(rng.integers(0, 4, 4)))


def check_equal_hashes(rng: Rng) -> None:
    """A set of ellipsoids with the hash of another set is not mistaken for it: here every hash is the set's size."""
    sepc = model_of(rng, 20, 2, 3, held=3.0, points=60)
    z = points_for(rng, sepc, 6, bad=False)
    given = torch.from_numpy(rng.integers(0, 3, 6))
    with mock.patch.object(decision_tables, "ellipsoid_hashes", lambda count: np.ones(count, dtype=np.int64)):
        check_against_torch(sepc.bank(z), sepc.training_counts, sepc.totals, given)


def check_lookup(rng: Rng) -> None:
    """Known sets of ellipsoids are looked up: wrong digits for counting do not change them."""
    sepc = model_of(rng, 20, 2, 3, held=3.0, points=60)
    rules = decision_tables.rule_tables(sepc.training_counts, sepc.totals)
    cells = torch.from_numpy(Ledger(*(table.numpy() for table in sepc.training_counts[1:11])).cells)
    known = (rules.verdicts[20:] >= 0) & (sepc.cell_sizes > 1)
    inside = cells[known][:5]
    assert len(inside) == 5
    distance = torch.where(inside, 0.5, 2.0) + 0.1 * torch.from_numpy(rng.random(inside.shape)).float()
    wiped = rules._replace(digits=torch.zeros_like(rules.digits))
    for many in (1, 2**30):
        use_many_rows_from(many)
        whole, without = (
            kernels.decide_distances(distance, None, None, Kernels(found, None, None)) for found in (rules, wiped)
        )
        assert torch.equal(whole[0], without[0])
        assert torch.equal(whole[1], without[1])
        unseen = distances_in_many(rng, 20, 6)  # the digits decide some rows, not every one
        assert not torch.equal(
            kernels.decide_distances(unseen, None, None, Kernels(wiped, None, None))[1][0],
            kernels.decide_distances(unseen, None, None, Kernels(rules, None, None))[1][0],
        )


def check_pieces(rng: Rng) -> None:
    """Points to decisions, in one piece and in several, with labels and points of any stride."""
    sepc = model_of(rng, 6, 4, 3)
    bank = tables.split(sepc.bank.offsets, sepc.bank.whiteners)
    model = kernels.kernels_for(sepc.bank.offsets, sepc.bank.whiteners, bank, sepc.training_counts, sepc.totals)
    z, label = points_for(rng, sepc, 9), torch.from_numpy(rng.integers(0, 3, 9))
    use_many_rows_from(1)
    whole = kernels.decide_points(z, label, sepc.bank.origin, model, screening=True)
    compare(whole, *sepc.judge(z, label))
    compiled = torch.compile(
        lambda z: kernels.decide_points(z, label, sepc.bank.origin, model, screening=True),
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(compiled(z)[0], whole[0])
    kernels._PIECE = 6 * 4
    strided = torch.stack([label + 7, label], dim=1)[:, 1]
    for points, labels in ((z, label), (z.T.contiguous().T, strided)):
        parts = kernels.decide_points(points, labels, sepc.bank.origin, model, screening=True)
        for part, wanted in zip(parts, whole, strict=True):
            assert torch.equal(part.nan_to_num(), wanted.nan_to_num())
    empty = kernels.decide_points(z[:0], None, sepc.bank.origin, model, screening=True)
    assert [tuple(part.shape) for part in empty] == [(4, 0), (3, 0)]


CHECKS = [
    check_distances, check_rules, check_ties, check_odd_distances, check_counting, check_equal_hashes, check_lookup,
    check_pieces,
]  # fmt: skip

if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy warns of the NaN and overflow that the checks contain
    for check in CHECKS:
        check(np.random.default_rng([int(sys.argv[1]), CHECKS.index(check)]))
        sys.stdout.write(f"{check.__name__}\n")
    sys.stdout.write("right\n")
