"""The record ``Partition``: text, equality, immutability and the DataFrame of its ellipsoids."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from sepc_torch import Kind, Partition, partition


@pytest.fixture(scope="module")
def part(module_rng: np.random.Generator) -> Partition:
    y = np.array(["near", "far", "beyond"])[np.arange(90) % 3]
    return partition(module_rng.normal(size=(90, 2)) + (np.arange(90) % 3)[:, None], y)


def test_repr_is_one_line(part: Partition) -> None:
    assert "\n" not in repr(part)
    for number in (len(part), len(part.classes), len(part.cells), 90):
        assert str(number) in repr(part)


def test_str_is_a_table(part: Partition) -> None:
    head, classes, ellipsoids = str(part).split("\n\n")
    assert head == repr(part)
    rows = [line.split() for line in classes.splitlines()]
    assert rows[0] == ["class", "points", "iterations", *Kind]
    for row, label, points in zip(rows[1:], part.classes, part.class_counts, strict=True):
        kinds = [e.kind for e in part.ellipsoids if e.label == label]
        last = max(e.iteration for e in part.ellipsoids if e.label == label)
        assert row == [label, str(points), str(last), *(str(kinds.count(kind)) for kind in Kind)]
    shown = [k for k, e in enumerate(part.ellipsoids) if e.kind is not Kind.ISOLATED]
    lines = ellipsoids.splitlines()
    if len(shown) > len(lines) - 1:
        assert lines.pop() == f"... and {len(shown) - len(lines) + 1} more"
    for line, k in zip(lines[1:], shown, strict=False):
        e = part.ellipsoids[k]
        assert line.split()[:5] == [str(k), e.label, str(e.iteration), str(e.kind), str(e.covered)]


def test_columns_are_aligned(part: Partition) -> None:
    for table in str(part).split("\n\n")[1:]:
        lines = [line for line in table.splitlines() if not line.startswith("...")]
        end = lines[0].index("iteration") + len("iteration") + ("iterations" in lines[0])
        assert all(line[end - 1].isdigit() and line[end : end + 1] in ("", " ") for line in lines[1:])


def test_to_frame_has_a_row_per_ellipsoid(part: Partition) -> None:
    frame = part.to_frame()
    assert frame.index.tolist() == list(range(len(part)))
    for k, e in enumerate(part.ellipsoids):
        row: dict[Any, Any] = frame.loc[k].to_dict()
        assert (row["label"], row["kind"], row["iteration"]) == (e.label, str(e.kind), e.iteration)
        assert (row["covered"], row["support"]) == (e.covered, len(e.support))
        assert [row[f"holds {label}"] for label in part.classes] == e.counts.tolist()
        assert (row["purity"], row["log_volume"], row["gap"]) == pytest.approx((e.purity, e.log_volume, e.gap))
    totals = frame.groupby("label")["covered"].sum()
    assert [totals[label] for label in part.classes] == part.class_counts.tolist()


def test_distances_are_those_of_the_ellipsoids(rng: np.random.Generator, part: Partition) -> None:
    z = rng.normal(size=(7, 2))
    table = part.distances(z)
    assert table.shape == (7, len(part))
    for k, e in enumerate(part.ellipsoids):
        np.testing.assert_array_equal(table[:, k], e.distance(z))
        assert part.classes[part.codes[k]] == e.label


def test_equal_partitions_are_equal(part: Partition) -> None:
    assert part == replace(part)
    assert part == replace(part, seconds={"separate": 1e9}), "seconds take no part in equality"
    assert part != "a partition"
    with pytest.raises(TypeError, match="unhashable"):
        hash(part)


def changed(part: Partition) -> dict[str, Partition]:
    """Copies of the partition, each with one field changed."""
    e, h, held = part.ellipsoids[0], part.hyperplanes[0], part.ledger
    ellipsoids = {
        "center": replace(e, center=np.nextafter(e.center, np.inf)),
        "whitener": replace(e, whitener=e.whitener * (1 + 1e-15)),
        "label": replace(e, label=next(label for label in part.classes.tolist() if label != e.label)),
        "kind": replace(e, kind=Kind.TERMINAL if e.kind is not Kind.TERMINAL else Kind.FIRST),
        "iteration": replace(e, iteration=e.iteration + 1),
        "support": replace(e, support=e.support[:-1]),
        "covered": replace(e, covered=e.covered + 1),
        "purity": replace(e, purity=e.purity / 2),
        "gap": replace(e, gap=e.gap + 1e-9),
    }
    ledger = {
        name: replace(part, ledger=held._replace(**{name: table + 1}))
        for name, table in held._asdict().items()
        if table.size  # the tail is empty
    }
    assert len(ledger) == 9
    return {
        **{name: replace(part, ellipsoids=(new, *part.ellipsoids[1:])) for name, new in ellipsoids.items()},
        "one ellipsoid less": replace(part, ellipsoids=part.ellipsoids[:-1]),
        "hyperplane w": replace(part, hyperplanes=(h._replace(w=h.w * 2), *part.hyperplanes[1:])),
        "hyperplane level": replace(part, hyperplanes=(h._replace(alpha=h.alpha + 1), *part.hyperplanes[1:])),
        "hyperplane iteration": replace(part, hyperplanes=(h._replace(iteration=9), *part.hyperplanes[1:])),
        "no hyperplanes": replace(part, hyperplanes=()),
        "class counts": replace(part, class_counts=part.class_counts + 1),
        **ledger,
        "names": replace(part, feature_names=("a", "b")),
        "parameters": replace(part, made={**part.made, "max_impure": 3}),
    }


def test_different_partitions_differ(part: Partition) -> None:
    for what, other in changed(part).items():
        assert part != other, what
        assert other != part, what


def test_a_partition_is_frozen(part: Partition) -> None:
    with pytest.raises(FrozenInstanceError):
        part.classes = np.zeros(3)  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        part.ellipsoids[0].label = "other"  # type: ignore[misc]
