"""The kernels: what they are given carries float32's digits, who runs them, and (in the interpreter) they are right."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from ellipsoid_banks import bank_of
from ellipsoid_models import model_of

from sepc_torch.bank import EllipsoidBank
from sepc_torch.kernels.bounds import spectral_bound
from sepc_torch.kernels.judging import Kernels, kernels_for
from sepc_torch.kernels.splitting import TOP, split
from sepc_torch.kernels.tables import hash_table, hashed, packed, rule_tables

Rng = np.random.Generator


@pytest.mark.parametrize("triangular", [True, False])
@pytest.mark.parametrize(("count", "dim"), [(1, 1), (5, 3), (4, 40), (2, 100)])
def test_the_halves_make_up_the_whitener(rng: Rng, count: int, dim: int, triangular: bool) -> None:
    """W'W follows from the parts to twenty bits and more, for every ellipsoid and whatever the scale of features."""
    centers, whiteners = bank_of(rng, count, dim, triangular)
    parts = split(centers, whiteners)
    assert parts.high.shape[1] % 16 == 0
    assert float(parts.high.abs().max()) <= TOP
    r = (parts.high.double() + parts.low.double()).mT * parts.row_scale.double()[:, :, None]
    assert not r[:, dim:].count_nonzero()
    assert not r[:, :, dim:].count_nonzero()
    assert not r.tril(-1).count_nonzero()
    scale = parts.feature_scale[:dim].double()
    r = r[:, :dim, :dim]
    wanted = (whiteners / scale).mT @ (whiteners / scale)
    error = (r.mT @ r - wanted).abs().amax(dim=(1, 2)) / wanted.abs().amax(dim=(1, 2))
    assert float(error.max()) < 2e-6
    assert torch.allclose(parts.centers[:, :dim].double(), centers * scale, rtol=1e-6, atol=0)


def test_scales_are_powers_of_two(rng: Rng) -> None:
    parts = split(*bank_of(rng, 3, 9))
    for scale in (parts.feature_scale[:9], parts.row_scale[:, :9]):
        assert (torch.frexp(scale)[0] == 0.5).all()


def test_the_kernel_says_what_it_needs(rng: Rng) -> None:
    centers, whiteners = bank_of(rng, 2, 3)
    bank = EllipsoidBank(centers, whiteners, kernel="triton")
    with pytest.raises(RuntimeError, match=r"kernel='triton' runs on a CUDA device in float32.*torch.float64 on cpu"):
        bank(centers)
    assert EllipsoidBank(centers, whiteners)(centers).shape == (2, 2)  # "auto" goes another way


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("check", ["distances", "decisions", "pieces", "bounds", "screening_decides"])
def test_in_the_interpreter(rng: Rng, check: str) -> None:
    script = Path(__file__).with_name("kernels_in_the_interpreter.py")
    done = subprocess.run(
        [sys.executable, str(script), check, str(rng.integers(2**31))],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(script.parents[1])},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout.strip() == "right", done.stderr[-3000:]


def test_patterns_are_packed_bit_by_bit(rng: Rng) -> None:
    cells = rng.random((20, 70)) < 0.4
    words = packed(cells)
    assert words.shape == (20, 3)
    assert (((words[:, np.arange(70) // 32] >> (np.arange(70) % 32)) & 1) == cells).all()


@pytest.mark.parametrize(("count", "width"), [(0, 5), (1, 40), (500, 40), (3000, 12)])
def test_every_pattern_is_found_by_its_hash(rng: Rng, count: int, width: int) -> None:
    """From its own place on, within the number of probes promised, and before an empty slot."""
    words = packed(np.unique(rng.random((count, width)) < 0.5, axis=0))
    keys = hashed(words)
    assert len(np.unique(keys)) == len(words)
    rows = rng.permutation(len(words))
    slots, probes = hash_table(keys, rows)
    assert np.array_equal(np.sort(slots[slots >= 0]), np.arange(len(words)))
    for row in rows:
        reached = slots[(keys[row] + np.arange(probes)) & (len(slots) - 1)]
        place = np.flatnonzero(reached == row)[0]
        assert (reached[:place] >= 0).all()
    assert probes < 40


def test_tables_know_the_training_set(rng: Rng) -> None:
    """In order of the classes; the counts of a cell's region are those of the general path."""
    sepc = model_of(rng, 20, 2, 4, mixed=True)
    tables = rule_tables(sepc.training_counts, sepc.totals)
    order = tables.order.long()
    assert torch.equal(tables.codes.long(), sepc.codes[order])
    assert (tables.codes.diff() >= 0).all()
    for c in range(4):
        assert (tables.codes[tables.starts[c] : tables.starts[c + 1]] == c).all()
    assert int(tables.starts[-1]) == 20
    cells = sepc.cells[:, order]
    assert torch.equal(tables.words.T.contiguous(), torch.from_numpy(packed(cells.numpy())))
    assert torch.equal(tables.members, torch.from_numpy(packed(cells.T.numpy())))
    for p in rng.integers(0, len(cells), 10):
        own = cells[p]
        everywhere, anywhere = (cells[:, own]).all(dim=1), cells[:, own].any(dim=1)
        if int(own.sum()) > 1:
            assert torch.equal(tables.in_all[p].long(), sepc.counts[everywhere].sum(dim=0))
            assert torch.equal(tables.in_any[p].long(), sepc.counts[anywhere].sum(dim=0))


def test_the_bound_of_a_norm_is_above_it_and_close(rng: Rng) -> None:
    matrices = torch.from_numpy(rng.normal(size=(30, 24, 24)) * np.exp(rng.normal(size=(30, 1, 24))))
    exact = torch.linalg.matrix_norm(matrices, ord=2)
    assert (spectral_bound(matrices) >= exact).all()
    assert (spectral_bound(matrices) <= 1.06 * exact).all()
    assert float(spectral_bound(torch.zeros(1, 3, 3, dtype=torch.float64))) < 1e-100


def test_counts_do_not_depend_on_precision(rng: Rng) -> None:
    """Thousands of points in a cell, which bfloat16 and TF32 would round."""
    sepc = model_of(rng, 20, 2, 4)
    training = sepc.training_counts._replace(counts=sepc.counts * 1001)
    wanted = rule_tables(training, sepc.totals)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = rule_tables(training, sepc.totals)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(found.in_all, wanted.in_all)
    assert torch.equal(found.in_any, wanted.in_any)
    assert not (wanted.in_any % 1001).any()


def test_copies_and_files_hold_no_tables(rng: Rng) -> None:
    """They are derived anew where the copy is: a file read on a CPU does not bring those of a GPU."""
    sepc = model_of(rng, 5, 2, 3)
    z = torch.from_numpy(rng.normal(size=(10, 2))).float()
    wanted = sepc(z).margin
    tables = rule_tables(sepc.training_counts, sepc.totals)
    sepc._kernels = Kernels(tables, None, None)
    sepc.bank.prepared = split(sepc.bank.offsets, sepc.bank.whiteners)
    assert torch.equal(sepc(z).margin, wanted)  # points are not on a GPU, wherever these tables came from
    for other in (copy.deepcopy(sepc), pickle.loads(pickle.dumps(sepc))):
        assert other._kernels is None
        assert other.bank.prepared is None
        assert torch.equal(other(z).margin, wanted)


def test_ellipsoids_too_thin_for_float32_squares_are_not_screened() -> None:
    centers, whiteners = torch.zeros(40, 64), torch.eye(64).repeat(40, 1, 1)
    for scale, screened in ((1.0, True), (1e14, False)):
        sepc = model_of(np.random.default_rng(0), 40, 2, 3)
        bank = split(centers + 1.0, scale * whiteners)
        found = kernels_for(centers + 1.0, scale * whiteners, bank, sepc.training_counts, sepc.totals)
        assert (found.coarse is not None) == screened
