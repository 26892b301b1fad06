"""Warnings name the line of the user as their place, whatever lies between it and the warning."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

from sepc_torch import TrustClassifier, TrustHead

Rng = np.random.Generator
LABELS = np.arange(60) % 3


@pytest.fixture
def head(rng: Rng) -> TrustHead:
    y = np.arange(120) % 3
    x = rng.normal(size=(120, 4)) + 4.0 * np.eye(4)[y]
    return TrustHead.fit(x, y, normalize=None, keep_points=True).calibrate(x + 0.1 * rng.normal(size=x.shape), y)


CALLS: dict[str, Callable[[TrustHead], object]] = {
    "decorators": lambda head: head.accept_at(risk=1e-4),
    "a comprehension": lambda head: head.accept_at(flag_rate=1e-4),
    "nn.Module": lambda head: head.forget([0])(torch.ones(2, 4)),
    "a chunk of rows": lambda head: head.forget([0]).sets(np.ones((2, 4))),
    "probabilities": lambda head: head.calibrate(np.eye(4)[LABELS], LABELS, np.eye(3)[LABELS]),
    "scikit-learn": lambda head: cross_val_score(
        TrustClassifier(LogisticRegression()), np.arange(30.0)[:, None], np.arange(30) % 2, cv=2
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_the_users_line_is_named(head: TrustHead, call: Callable[[TrustHead], object]) -> None:
    with pytest.warns(UserWarning, match=".") as told:
        call(head)
    assert {one.filename for one in told} == {__file__}
