"""The kernels: what they are given carries float32's digits, who runs them, and (in the interpreter) they are right."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ellipsoid_banks import bank_of
from ellipsoid_models import model_of

from sepc_torch.model.bank import EllipsoidBank
from sepc_torch.model.kernels.bounds import spectral_bound
from sepc_torch.model.kernels.judging import Kernels, kernels_for
from sepc_torch.model.kernels.splitting import TOP, split
from sepc_torch.model.kernels.tables import rule_tables

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
@pytest.mark.parametrize(
    "check",
    [
        "distances",
        "decisions",
        "ties",
        "odd_distances",
        "patterns_of_many",
        "large_counts",
        "equal_hashes",
        "known_patterns",
        "stored_either_way",
        "pieces",
        "bounds",
        "screening_decides",
    ],
)
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


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("number", "rows", "ellipsoids", "classes", "euclidean", "judging", "merged"),
    [
        ("fp32", 2**20, 100, 4, False, True, True),
        ("fp32", 2**20, 1, 2, False, False, True),
        ("fp32", 1, 50, 40, False, False, False),
        ("fp32", 1000, 300, 8, False, False, True),
        ("fp32", 1, 1100, 16, False, False, True),
        ("fp64", 2**20, 20, 1, True, True, True),
    ],
)
def test_decisions_compile_for_a_gpu(
    number: str, rows: int, ellipsoids: int, classes: int, euclidean: bool, judging: bool, merged: bool
) -> None:
    """The compiler is stricter than the interpreter, and needs no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sepc_torch.model.kernels import overlapping
    from sepc_torch.model.kernels.resolving import _program_shape, _resolve

    shape = _program_shape(rows, ellipsoids, classes, most_words=5, heavy_words=1, digits=9)._asdict()
    options = {"num_warps": shape.pop("warps"), "maxnreg": 255}
    integers = {"given": "*i64", "tables": "*i32", "ints": "*i64", "rows": "i32", "stride": "i32", "pages": "i32"}
    constants = shape | {
        "euclidean": euclidean, "judging": judging, "merged": merged, "double": number == "fp64",
        "by_row": shape["tile"] == 1, "overlap": overlapping.wait_for_previous is not None, "_layout": 0,
    }  # fmt: skip
    types = {name: "constexpr" if name in constants else f"*{number}" for name in _resolve.arg_names} | integers
    source = ASTSource(_resolve, types, constants)
    assert compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_overlap_where_the_chip_can(monkeypatch: pytest.MonkeyPatch) -> None:
    from sepc_torch.model.kernels import overlapping

    chips = {0: (8, 0), 1: (9, 0), 2: (10, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", chips.__getitem__)
    for version, wanted in (((3, 4), [False] * 4), ((3, 5), [False, False, True, True])):
        monkeypatch.setattr(overlapping, "triton_version", lambda version=version: version)
        overlapping.overlaps.cache_clear()
        assert [overlapping.overlaps(device) for device in (-1, 0, 1, 2)] == wanted
    overlapping.overlaps.cache_clear()


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_a_kernel_is_launched_again_only_for_arguments_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled is kept by all that the arguments differ in, and launched on the current stream."""
    from sepc_torch.model.kernels import launching

    seen: list[tuple[object, ...]] = []

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Kernel]:
            def run(*arguments: object, **options: object) -> Kernel:
                seen.append((self.name, grid, arguments, options))
                return Kernel(f"compiled {options.get('num_warps')}")

            return run

    streams = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: ("stream of", device)))
    monkeypatch.setattr(launching, "driver", streams)
    launcher = launching.Launcher(Kernel("source"))
    assert not launcher.direct
    x = torch.zeros(3)
    for direct in (False, True):
        launcher.direct = direct
        seen.clear()
        for like, warps in (("a", 1), ("a", 1), ("b", 1), ("a", 2), ("a", 2)):
            launcher((5, 1, 1), like, (x, 7), (64,), num_warps=warps)
        again = [name for name, *_ in seen]
        assert again == (["source", "compiled 1", "source", "source", "compiled 2"] if direct else ["source"] * 5)
    assert seen[1][1:] == ((5, 1, 1), (x, 7, 64), {"stream": ("stream of", -1)})
    assert seen[2][1:] == ((5, 1, 1), (x, 7, 64), {"num_warps": 1})


def test_the_bound_of_a_norm_is_above_it_and_close(rng: Rng) -> None:
    matrices = torch.from_numpy(rng.normal(size=(30, 24, 24)) * np.exp(rng.normal(size=(30, 1, 24))))
    exact = torch.linalg.matrix_norm(matrices, ord=2)
    assert (spectral_bound(matrices) >= exact).all()
    assert (spectral_bound(matrices) <= 1.06 * exact).all()
    assert float(spectral_bound(torch.zeros(1, 3, 3, dtype=torch.float64))) < 1e-100


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
