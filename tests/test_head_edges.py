"""A head on extreme data: few points, flat, collinear, repeated, constant, far from the origin, huge and tiny."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from overlapping_classes import MEANS, batch, draw

from sepc_torch import TrustHead
from sepc_torch.model.rules import Rule
from sepc_torch.shapes import Array

Rng = np.random.Generator


def few(rng: Rng) -> tuple[Array, Array]:
    labels = np.repeat([0, 1], 12)
    return rng.normal(size=(24, 4)) + 3.0 * labels[:, None], labels


def flat(rng: Rng) -> tuple[Array, Array]:
    x, labels, _ = draw(rng, 60)
    return x[:, :2], labels


def collinear(rng: Rng) -> tuple[Array, Array]:
    """On a line that misses the origin."""
    x, labels, _ = draw(rng, 60)
    return 3.0 * x[:, :1] * np.ones(4) + np.arange(4.0), labels


def repeated(rng: Rng) -> tuple[Array, Array]:
    x, labels, _ = draw(rng, 30)
    return np.repeat(x, 3, axis=0), np.repeat(labels, 3)


def all_alike(_: Rng) -> tuple[Array, Array]:
    labels = np.repeat([0, 1, 2], 40)
    return MEANS[labels], labels


def with_constants(rng: Rng) -> tuple[Array, Array]:
    x, labels, _ = draw(rng, 60)
    return np.column_stack([x, np.full(60, 7.0), np.zeros(60)]), labels


def lonely(rng: Rng) -> tuple[Array, Array]:
    """A class of a single point."""
    x, labels, _ = draw(rng, 60)
    labels = labels % 2
    labels[0] = 2
    return x, labels


def many_classes(rng: Rng) -> tuple[Array, Array]:
    labels = np.arange(150) % 30
    return 9.0 * rng.normal(size=(30, 10))[labels] + rng.normal(size=(150, 10)), labels


def far_off(rng: Rng) -> tuple[Array, Array]:
    x, labels, _ = draw(rng, 60)
    return x + 1e4, labels


def huge(rng: Rng) -> tuple[Array, Array]:
    x, labels, _ = draw(rng, 60)
    return 1e8 * x, labels


def tiny(rng: Rng) -> tuple[Array, Array]:
    x, labels, _ = draw(rng, 60)
    return 1e-8 * x, labels


def half(rng: Rng) -> tuple[Array, Array]:
    x, labels, _ = draw(rng, 60)
    return x.astype(np.float16), labels


def on_the_sphere(rng: Rng) -> tuple[Array, Array]:
    """Of unit length up to rounding, so that the length holds no information."""
    x, labels, _ = draw(rng, 60)
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32), labels


EDGES = [few, flat, collinear, repeated, all_alike, with_constants, lonely, many_classes, far_off, huge, tiny, half]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "normalize"),
    [(make, "l2") for make in [*EDGES, on_the_sphere]]
    + [(make, None) for make in (few, all_alike, far_off, huge, tiny)],
)
def test_extreme_data(rng: Rng, data: Callable[[Rng], tuple[Array, Array]], normalize: Any) -> None:
    x, labels = data(rng)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # expected: small classes, calibration on training points
        head = TrustHead.fit(x, labels, normalize=normalize)
        head.calibrate(x, labels)
    z = batch(x)
    out = head(z)
    assert all(field.double().isfinite().all() for field in out[10:])
    assert ((out.confidence >= 0) & (out.confidence <= 1)).all()
    assert ((out.joint >= 0) & (out.joint <= 1)).all()
    assert ((out.p_value > 0) & (out.p_value <= 1)).all()
    assert float(out.accept.double().mean()) >= 0.75
    assert head(z[:0]).confidence.shape == (0,)
    assert head.evidence is not None
    truth = torch.tensor([head.classes.index(label) for label in labels.tolist()])
    right, wrong = (head.evidence(z, label).support for label in (truth, (truth + 1) % len(head.classes)))
    assert float(right.mean()) > float(wrong.mean())


@pytest.mark.parametrize("size", [1e38, -1e38, 3e38, torch.inf])
def test_a_row_beyond_the_range_of_float32_does_not_change_the_others(rng: np.random.Generator, size: float) -> None:
    x, labels, logits = draw(rng, 120)
    head = TrustHead.fit(x[:60], labels[:60], dim=3, nan_policy="flag")
    head.calibrate(x[60:], labels[60:], logits[60:])
    z = batch(x[:20]).float()
    expected = head(z, logits=batch(logits[:20]))
    for column in range(z.shape[1]):
        far = z.clone()
        far[3, column] = size
        out = head(far, logits=batch(logits[:20]))
        others = torch.arange(20) != 3
        assert torch.equal(out.joint[others], expected.joint[others])
        assert not out.accept[3]


def test_a_single_row_is_a_batch_of_one() -> None:
    rng = np.random.default_rng(0)
    x, labels, logits = draw(rng, 120)
    head = TrustHead.fit(x[:60], labels[:60], dim=3, keep_points=True, nan_policy="flag")
    head.calibrate(x[60:], labels[60:], logits[60:])
    row = x[0]
    calls: list[Callable[[], Any]] = [
        lambda: head(batch(row)),
        lambda: head.sepc(torch.zeros(3)),
        lambda: head.judge(row),
        lambda: head.novelties(row),
        lambda: head.predict(row),
        lambda: head.update(row, [0]),
        lambda: head.calibrate(row, [0]),
        lambda: TrustHead.fit(row, [0]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"single row as a batch of one: z\[None\]"):
            call()
    for call in (lambda: head(batch(x[:1]), logits=batch(logits[0])), lambda: head.judge(x[:1], logits[0])):
        with pytest.raises(ValueError, match=r"logits\[None\]"):
            call()
    out = head.judge(np.stack([row, np.full_like(row, np.nan)]))
    assert repr(out).startswith(f"HeadPrediction(2 rows, {int(out.accept.sum())} accepted, fields: label, trust, rule")
    assert out.rule_names == [Rule(int(out.rule[0])).name, None]
