"""Default settings of a fit that depend on the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sepc_torch import TrustHead
from sepc_torch.head.reading import defaults
from sepc_torch.head.reading.defaults import default_max_per_class


def test_the_default_sample_is_the_largest_that_is_allowed(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "_LEAST_SAMPLE", 1)
    for _ in range(50):
        sizes = rng.integers(1, 1000, size=rng.integers(2, 200))
        allowed = int(rng.integers(len(sizes), sizes.sum() + 100))
        monkeypatch.setattr(defaults, "_MAX_FITTED", allowed)
        most = default_max_per_class(sizes)
        if sizes.sum() <= allowed:
            assert most is None
        else:
            assert most is not None
            assert np.minimum(sizes, most).sum() <= allowed < np.minimum(sizes, most + 1).sum()


def test_a_large_fit_uses_a_sample_unless_told_otherwise(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "_MAX_FITTED", 400)
    y = np.arange(900) % 3
    x = rng.normal(size=(900, 6)) + 4.0 * np.eye(6)[y]
    choices: dict[str, dict[str, Any]] = {
        "auto": {},
        "sample": {"max_per_class": 133},
        "all": {"max_per_class": None},
        "enough": {"max_per_class": 900},
    }
    centers = {
        name: TrustHead.fit(x, y, reference_points=0, **options).sepc.bank.centers for name, options in choices.items()
    }
    assert torch.equal(centers["auto"], centers["sample"])
    assert torch.equal(centers["all"], centers["enough"])
    assert not torch.equal(centers["auto"], centers["all"])
