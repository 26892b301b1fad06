"""``device=`` changes nothing: ellipsoids are bit-identical, counts equal, and distances equal to rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sepc_torch import Partition, TrustHead, partition
from sepc_torch.head.evidence.evidence import pieces_of
from sepc_torch.partitioning import cells
from sepc_torch.shapes import Array

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Gap to which the partition's ellipsoids are certified, see Separator.
TOLERANCE = 1e-7


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer steps than training points, so that the grids of counts are geometric."""
    monkeypatch.setattr(cells, "STEPS", 512)


def classes_of(rng: np.random.Generator, classes: int, dim: int, size: int = 150) -> tuple[Array, Array]:
    """Slightly overlapping classes away from the origin; the first has more points than an ellipsoid has steps."""
    y = np.concatenate([np.zeros(cells.STEPS + 50, dtype=np.int64), rng.integers(1, classes, size)])
    return rng.normal(size=(len(y), dim)) + 3.0 * rng.normal(size=(classes, dim))[y] + 10.0, y


def assert_invariants(part: Partition, x: Array, y: Array, max_impure: int) -> None:
    """Ellipsoids are certified, cover their class, and have the right counts.

    In the first iteration, when no point has been removed, an ellipsoid holds at most ``max_impure`` other points.
    """
    assert max(e.gap for e in part.ellipsoids) <= 10 * TOLERANCE
    inside = np.array([e.contains(x) & (y == e.label) for e in part.ellipsoids])
    assert inside.any(axis=0).all()
    assert part.counts.sum(axis=0).tolist() == np.bincount(y).tolist()
    for e in part.ellipsoids:
        assert e.counts.tolist() == np.bincount(y[e.contains(x)], minlength=len(part.classes)).tolist()
        if e.kind == "first" and len(part.classes) > 2:
            assert e.counts.sum() - e.counts[e.label] <= max_impure


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("classes", "dim"), [(2, 3), (3, 2), (4, 13)])
def test_the_partition_equals_that_of_numpy(rng: np.random.Generator, device: str, classes: int, dim: int) -> None:
    x, y = classes_of(rng, classes, dim)
    max_impure = int(rng.integers(5, 15))
    plain = partition(x, y, max_impure=max_impure)
    found = partition(x, y, max_impure=max_impure, device=torch.device(device))
    assert_invariants(found, x, y, max_impure)
    for mine, theirs in zip(plain.ellipsoids, found.ellipsoids, strict=True):
        assert mine.center.tobytes() == theirs.center.tobytes()
        assert mine.whitener.tobytes() == theirs.whitener.tobytes()
        assert (mine.label, mine.kind, mine.gap, mine.covered) == (
            theirs.label,
            theirs.kind,
            theirs.gap,
            theirs.covered,
        )
        assert mine.counts.tolist() == theirs.counts.tolist()
    assert plain.ledger.relative_count_error > 0
    for name, wanted, table in zip(plain.ledger._fields, plain.ledger, found.ledger, strict=True):
        assert table.dtype == wanted.dtype, name
        tolerance = 1e-9 if "distances" in name else 0
        np.testing.assert_allclose(table, wanted, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("device", DEVICES)
def test_pieces_of_training_points_equal_those_of_numpy(rng: np.random.Generator, device: str) -> None:
    x, y = classes_of(rng, 3, 2)
    part = partition(x, y, max_impure=10)
    np.testing.assert_array_equal(pieces_of(part, x, y, torch.device(device)), pieces_of(part, x, y))


@pytest.mark.parametrize("device", DEVICES)
def test_the_head_equals_that_of_numpy(rng: np.random.Generator, device: str) -> None:
    x, y = classes_of(rng, 3, 6)
    plain, found = (TrustHead.fit(x, y, dim=4, device=where) for where in (None, device))
    theirs = dict(found.named_buffers())
    for name, tensor in plain.named_buffers():
        torch.testing.assert_close(theirs[name], tensor, msg=name)  # assert_close compares the devices too
    z = torch.from_numpy(x + rng.normal(size=x.shape)).float()
    assert torch.equal(found(z).label, plain(z).label)
    torch.testing.assert_close(found(z).trust, plain(z).trust)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("gpu", "must name a torch device, such as 'cuda' or 'cpu', got 'gpu'"),
        (f"cuda:{torch.cuda.device_count()}", "cannot be used here in float64"),
        ("meta", "device 'meta' cannot be used here in float64"),
    ],
)
def test_an_unusable_device_is_an_error(rng: np.random.Generator, device: str, expected: str) -> None:
    x, y = classes_of(rng, 2, 2)
    with pytest.raises(ValueError, match=expected):
        partition(x, y, device=device)
    with pytest.raises(ValueError, match=expected):
        TrustHead.fit(x, y, device=device)
