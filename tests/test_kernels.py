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
from sepc_torch.kernels.tables import SECTIONS, SIZES, hash_table, hashed, laid_out, packed, rule_tables

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
    sizes, tables = laid_out(sepc.training_counts, sepc.totals)
    assert (sizes["ellipsoids"], sizes["classes"], sizes["cells"]) == (20, 4, len(sepc.cells))
    order, codes, starts = tables["order"].long(), tables["codes"], tables["starts"]
    assert torch.equal(codes.long(), sepc.codes[order])
    assert (codes.diff() >= 0).all()
    for c in range(4):
        assert (codes[starts[c] : starts[c + 1]] == c).all()
    assert int(starts[-1]) == 20
    cells = sepc.cells[:, order]
    assert torch.equal(tables["words"].T.contiguous(), torch.from_numpy(packed(cells.numpy())))
    assert torch.equal(tables["members"], torch.from_numpy(packed(cells.T.numpy())))
    assert torch.equal(tables["counts"][:20].long(), sepc.held[order])
    listed = set(tables["slots"].tolist())
    for p in range(len(cells)):
        own = cells[p]
        narrow = sepc.counts[cells[:, own].all(dim=1)].sum(dim=0)
        wide = sepc.counts[cells[:, own].any(dim=1)].sum(dim=0)
        by_all = int((narrow == narrow.max()).sum()) == 1
        vouching = narrow if by_all else wide
        tied = int((vouching == vouching.max()).sum()) > 1
        assert (p in listed) == (int(own.sum()) > 1 and not tied)
        if p in listed:
            assert torch.equal(tables["counts"][20 + p].long(), vouching)
            assert int(tables["verdicts"][20 + p]) == 2 * int(vouching.argmax()) + by_all
            assert int(tables["sums"][20 + p]) == int((vouching * sepc.totals).sum())


def test_merged_distances_count_as_those_of_the_classes_do(rng: Rng) -> None:
    """How many points of the own class are within a distance, and the sum over classes, at and between the entries."""
    sepc = model_of(rng, 12, 2, 4, mixed=True, dtype=torch.float64)
    training = sepc.training_counts
    _, tables = laid_out(training, sepc.totals)
    for k, before in enumerate(tables["order"].tolist()):
        distances = training.reach[before].flatten()
        middle = torch.tensor([0.0, float(distances.median()) * 1.01, 1e300])
        for within in torch.cat([distances[:20], middle.double()]):
            passed = (training.reach[before] <= within).sum(dim=1)
            reached = torch.nn.functional.pad(training.ranks, (1, 0)).gather(1, passed[:, None])[:, 0]
            place = int(torch.searchsorted(tables["merged"][k], within, right=True))
            assert int(tables["merged_own"][k, place]) == int(reached[training.codes[before]])
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
    assert tables.merged
    assert not tables.double


def test_large_tables_are_not_merged(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    sepc = model_of(rng, 7, 2, 3)
    monkeypatch.setattr("sepc_torch.kernels.tables._MOST_MERGED", sepc.reach.numel() - 1)
    tables = rule_tables(sepc.training_counts, sepc.totals)
    assert not tables.merged
    assert "merged" not in laid_out(sepc.training_counts, sepc.totals)[1]


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
    _, wanted = laid_out(training, sepc.totals)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        _, found = laid_out(training, sepc.totals)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(found["counts"], wanted["counts"])
    assert not (wanted["counts"][20:] % 1001).any()


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
