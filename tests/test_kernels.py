"""The fused kernel: what it is given carries float32's digits, who runs it, and (in the interpreter) it is right."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from ellipsoid_banks import bank_of

from sepc_torch.bank import EllipsoidBank
from sepc_torch.kernels.splitting import TOP, split

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


IN_THE_INTERPRETER = """
import sys
import numpy as np
import torch
from sepc_torch.kernels.fused import launch
from sepc_torch.kernels.splitting import split
sys.path.insert(0, {tests!r})
from ellipsoid_banks import bank_of

rng = np.random.default_rng({seed})
for count, dim, points in ((3, 7, 40), (1, 1, 1), (2, 100, 9), (2, 64, 17)):
    centers, whiteners = (numbers.float().double() for numbers in bank_of(rng, count, dim))
    spread = centers.abs().amax(dim=0)
    z = (centers[0] + torch.from_numpy(rng.normal(size=(points, 2 * dim)))[:, ::2] * spread).float()
    z[0] = centers[0].float()
    wide = torch.empty(points, 2 * dim)
    wide[:, ::2] = z
    exact = torch.linalg.vector_norm((z.double()[:, None] - centers)[:, :, None] @ whiteners.mT, dim=(2, 3))
    # Where large terms cancel, float32 itself has no more digits: the error counts in units of the terms.
    sums = (z.double()[:, None] - centers).abs()[:, :, None] @ whiteners.abs().mT
    terms = torch.linalg.vector_norm(sums, dim=(2, 3)).clamp_min(1e-30)
    bank = split(centers, whiteners)
    for given in (z, wide[:, ::2]):
        found = launch(given, bank)
        error = float(((found - exact).abs() / terms).max())
        assert error < 2e-6, (count, dim, points, error)
    z[0, 0] = float("nan")
    assert launch(z, bank)[0].isnan().all() and launch(z, bank)[1:].isfinite().all()
    assert launch(z[:0], bank).shape == (0, count)
print("right")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_is_right_in_the_interpreter(rng: Rng) -> None:
    """Triton reads its mode when it is imported, so that the interpreter needs a process of its own."""
    script = IN_THE_INTERPRETER.format(tests=os.path.dirname(__file__), seed=int(rng.integers(2**31)))  # noqa: PTH120
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "right", done.stderr[-2000:]
