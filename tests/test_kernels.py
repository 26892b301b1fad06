"""The kernels without a GPU: split ellipsoids keep float32 digits, kernels compile, and small cases are right."""

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
from sepc_torch.model.kernels import Kernels, kernels_for
from sepc_torch.model.kernels.decision_tables import rule_tables
from sepc_torch.model.kernels.rounded_ellipsoids import rounded, spectral_bound
from sepc_torch.model.kernels.tables import TOP, power_of_two_above, split

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


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("script", ["kernels_in_the_interpreter.py", "head_kernels_in_the_interpreter.py"])
def test_in_the_interpreter(rng: Rng, script: str) -> None:
    path = Path(__file__).with_name(script)
    done = subprocess.run(
        [sys.executable, str(path), str(rng.integers(2**31))],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(path.parents[1])},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout.split()[-1:] == ["right"], done.stdout + done.stderr[-3000:]


_SIZES = (
    "rows", "stride", "ellipsoids", "steps", "levels", "classes", "slot_mask", "probes", "entry_words", "digit_count",
)  # fmt: skip
_LONG = ("given", "ints", "totals", "hashes", "keys", "sums", "line_starts", "merged_sums")
_NUMBERS = ("distance", "nearness", "floats", "merged", "step_distances", "tail_distances")


@needs_triton
@pytest.mark.parametrize(
    ("number", "rows", "ellipsoids", "classes", "euclidean", "judging"),
    [
        ("fp32", 2**20, 100, 4, False, True),
        ("fp32", 1000, 300, 40, False, False),
        pytest.param("fp32", 1, 1100, 16, False, False, marks=pytest.mark.slow),
        pytest.param("fp64", 2**20, 20, 2, True, True, marks=pytest.mark.slow),
    ],
)
def test_decision_kernels_compile_for_a_gpu(
    number: str, rows: int, ellipsoids: int, classes: int, euclidean: bool, judging: bool
) -> None:
    """The compiler is stricter than the interpreter, and needs no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sepc_torch.model.kernels import decide, lookup, majority

    rules = {"limit": 1.0001, "tie": 1.000001, "judging": judging}
    look = decide.lookup_shape(rows, ellipsoids)._asdict() | rules | {"euclidean": euclidean}
    count = decide.count_shape(rows, ellipsoids, classes, most_words=5)._asdict() | rules
    for kernel, constants in ((lookup.decide_rows, look), (majority.count_rows, count)):
        options = {"num_warps": constants.pop("warps")}
        types = dict.fromkeys(kernel.arg_names, "*i32")
        for names, kind in ((_SIZES, "i32"), (_LONG, "*i64"), (_NUMBERS, f"*{number}"), (constants, "constexpr")):
            types |= {name: kind for name in names if name in types}
        compiled = compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", 90, 32), options=options)
        assert compiled.asm["cubin"]


@needs_triton
@pytest.mark.parametrize("many", [False, True])
def test_head_kernels_compile_for_a_gpu(many: bool) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sepc_torch.head.kernels import assess, coordinates, exact_search, labels, mixtures, search
    from sepc_torch.model.kernels import screening

    rows = 128 if many else 4
    flags = {"has_near": True, "has_logits": True, "layers": 3 if many else 1}
    sizes = {"kind_count": 5, "steps": 12, "held_steps": 13, "class_steps": 9, "fan": 1 if many else 5, "rows": rows}
    tiles = {
        "block": 64,
        "blocks": 2 if many else 1,
        "pairs": many,
        "size": 128 if many else 64,
        "beside": 4 if many else 1,
        "last": 7,
        "rows": 64,
    }
    integers = ("points", "classes", "most", "held_count", "class_width", "logit_stride", "least_stride", "row_stride",
                "column_stride", "count", "per", "dim", "parts", "channels", "positions", "step", "channel_step",
                "position_step")  # fmt: skip
    lists = "chunks", "place", "lists", "used", "codes", "order", "starts", "index", "ranges"
    masks = "invalid", "missing", "accept"
    half = "high", "low", "tile_high", "tile_low"
    single = ("near", "white", "logits", "factor", "half", "best", "z", "origin", "feature_scale", "bias", "unit",
              "norms", "estimate", "slope", "offset", "marked", "out", "scale_of_points", "longest", "slack", "runner",
              "offsets", "distance")  # fmt: skip
    for kernel, constants in (
        (assess._assess, flags | sizes),
        (labels._largest, {"rows": rows, "lanes": 16}),
        (search._split_rows, tiles | {"top": 2.0**14, "twice": 1e-5, "floor": 1e-6, "rows": 32}),
        (search._closest, tiles | {"rows": 64}),
        (exact_search.nearest_points, tiles | {"labelled": many, "tiles": 8, "group": 16, "features": 16, "rows": 16}),
        (coordinates._nearest_mean, {"columns": 64, "rows": 16, "one_tile": many}),
        (coordinates._average, {"dense": 1 if many else 2, "rows": 16, "columns": 64}),
        (screening._estimate, {"top": 2.0**14, "block": 64, "blocks": 2 if many else 1, "rows": 128}),
        (mixtures._select, {"relative": 1e-5, "cut": 28.0, "rows": rows, "lanes": 2 if many else 64, "apart": 32}),
        (mixtures._exact, {"rows": 64, "features": 16, "apart": 32}),
        (mixtures._mixtures, {"rows": 16, "lanes": 16}),
    ):
        types = dict.fromkeys(kernel.arg_names, "*fp64") | dict.fromkeys(lists, "*i32")
        types |= dict.fromkeys(("label", "class_counts"), "*i64") | dict.fromkeys(masks, "*i1")
        for names, kind in ((integers, "i32"), (half, "*fp16"), (single, "*fp32"), (constants, "constexpr")):
            types |= dict.fromkeys(names, kind)
        types |= {"reach": "fp32"} | ({"matrix": "*fp16"} if kernel is screening._estimate else {})
        types |= {"offsets": "*fp64"} if kernel is mixtures._exact else {}
        types |= {"x": "*fp16" if many else "*fp32"} if kernel is coordinates._average else {}
        types |= {"found": "*i64"} if kernel is exact_search.nearest_points else {}
        types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        compiled = compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", 90, 32))
        assert compiled.asm["cubin"]


@needs_triton
def test_a_compiled_variant_is_launched_again_only_for_equal_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher compiles once per variant, constants and options, and launches on the current stream."""
    from sepc_torch.model.kernels import launch

    seen: list[tuple[object, ...]] = []

    class Kernel:
        function, packed_metadata = "function", "metadata"

        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Kernel]:
            def run(*arguments: object, **options: object) -> Kernel:
                seen.append((self.name, grid, arguments, options))
                return Kernel(f"compiled {options.get('num_warps')}")

            return run

        def run(self, *arguments: object) -> None:
            seen.append((self.name, arguments))

    streams = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: ("stream of", device)))
    monkeypatch.setattr(launch, "_driver", lambda: streams)
    launcher = launch.Launcher(Kernel("source"))
    assert not launcher.direct
    x = torch.zeros(3)
    for direct, without_hooks in ((False, True), (True, True), (True, False)):
        launcher.direct, launcher.without_hooks = direct, without_hooks
        launcher.compiled.clear()
        seen.clear()
        for variant, warps in (("a", 1), ("a", 1), ("b", 1), ("a", 2), ("a", 2)):
            launcher((5, 1, 1), variant, (x, 7), (64,), num_warps=warps)
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


@pytest.mark.parametrize(("count", "dim"), [(6, 3), (5, 20), (3, 64)])
def test_the_error_of_a_float16_estimate_is_within_its_bound(rng: Rng, count: int, dim: int) -> None:
    """The estimate of the screening kernel, in plain torch: float16 inputs, exact sums."""
    centers, whiteners = (numbers.float().double() for numbers in bank_of(rng, count, dim))
    bank = split(centers, whiteners)
    coarse = rounded(bank)
    z = (centers[0] + torch.from_numpy(rng.normal(size=(200, dim))) * centers.abs().amax(dim=0)).float()
    z[0], z[1] = centers[0].float(), 0.0
    x = torch.nn.functional.pad(z * bank.feature_scale[:dim], (0, bank.centers.shape[1] - dim)).double()
    factor = TOP / power_of_two_above(x.abs().amax(dim=1) + bank.reach).unsqueeze(1)
    y = (x * factor).half().double() @ coarse.matrix.double() - factor * coarse.bias.double().unsqueeze(1)
    estimate = torch.linalg.vector_norm(y, dim=2) / factor.T * coarse.unit.double().unsqueeze(1)
    exact = torch.linalg.vector_norm((z.double()[:, None] - centers)[:, :, None] @ whiteners.mT, dim=(2, 3)).T
    bound = coarse.slope[:, None] * x.norm(dim=1) + coarse.offset[:, None] + coarse.relative * estimate
    error = (estimate - exact).abs()
    assert (error <= bound).all()
    assert float((error / bound).max()) > 0.02, "the bound is useless if it is far above the error"


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
