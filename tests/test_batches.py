"""One answer for a point: in every batch, from every dtype, and after loading; test_compile.py has compiled code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sepc_torch import HeadPrediction, TrustHead

Rng = np.random.Generator
# What decides, and what is promised. Distances and margins of the classifier may differ in their last digit.
SAME = ("label", "trust", "rule", "confidence", "p_value", "class_p_value", "nonconformity", "joint", "accept")


class Calibrated:
    """A head whose calibration points are few distinct embeddings, each repeated: all comparisons are ties."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        labels = np.arange(600) % 4
        x = rng.normal(size=(600, 19)) + 1.2 * np.eye(4, 19)[labels]
        self.head = TrustHead.fit(x, labels, dim=6)
        rows = rng.integers(0, 60, 500)
        some, classes = rng.normal(size=(60, 19)) + 1.2 * np.eye(4, 19)[labels[:60]], labels[:60]
        logits = 2.0 * some[:, :4] + rng.normal(size=(60, 4))
        self.head.calibrate(some[rows], classes[rows], logits[rows])
        self.head.accept_at(flag_rate=0.1)
        order = rng.integers(0, 60, 1000)
        self.z, self.logits = (torch.from_numpy(part[order]).float() for part in (some, logits))
        self.z[500:] += torch.from_numpy(rng.normal(size=(500, 19))).float()
        self.whole = self.head(self.z, logits=self.logits)

    def check(self, judge: Callable[..., HeadPrediction], z: Tensor, size: int, rows: int = 1000) -> None:
        for start in range(0, rows, size):
            some = slice(start, start + size)
            out = judge(z[some], logits=self.logits[some])
            for name in SAME:
                assert torch.equal(getattr(out, name), getattr(self.whole, name)[some]), (name, size, start)


@pytest.fixture(scope="module")
def case() -> Calibrated:
    return Calibrated()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 31, 64, 100, 333, 1000])
def test_every_batch_size(case: Calibrated, size: int) -> None:
    case.check(case.head, case.z, size, rows=max(150, size))


def test_repeated_embeddings_have_one_answer(case: Calibrated) -> None:
    assert len(case.whole.p_value[:500].unique()) <= 60
    assert float(case.whole.accept[:500].double().mean()) > 0.85


def test_the_order_of_rows(case: Calibrated) -> None:
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    out = case.head(case.z[order], logits=case.logits[order])
    for name in SAME:
        assert torch.equal(getattr(out, name), getattr(case.whole, name)[order]), name


def test_dtypes_of_the_input(case: Calibrated) -> None:
    case.check(case.head, case.z.double(), 250)
    half = case.z.half()
    wide, narrow = case.head(half.float(), logits=case.logits), case.head(half, logits=case.logits)
    assert all(torch.equal(getattr(wide, name), getattr(narrow, name)) for name in SAME)


def test_numbers_of_threads(case: Calibrated) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if before > 1 else 2)
        case.check(case.head, case.z, 500)
    finally:
        torch.set_num_threads(before)


def test_after_loading(case: Calibrated, tmp_path: Path) -> None:
    case.head.save(tmp_path / "head.safetensors")
    loaded = TrustHead.load(tmp_path / "head.safetensors")
    case.check(loaded, case.z, 77)
    again = TrustHead.empty()
    again.load_state_dict(case.head.state_dict())
    case.check(again, case.z, 501)
