"""``partition(rest="whole")``, more than two classes: purity, screening, samples, shared memory, interruption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from sepc_torch import Kind, Partition, partition
from sepc_torch.partitioning.algorithm import Separator
from sepc_torch.partitioning.steps import Separation
from sepc_torch.partitioning.tasks import ClassTask, run_all
from sepc_torch.shapes import Array
from sepc_torch.solvers.other_points import OtherPoints

Rng = np.random.Generator


def overlapping(rng: Rng, size: int, dim: int, classes: int, apart: float = 1.0) -> tuple[Array, Array]:
    y = rng.integers(0, classes, size=size)
    y[:classes] = np.arange(classes)
    return rng.normal(size=(size, dim)) + apart * rng.normal(size=(classes, dim))[y], y


def bits(part: Partition) -> list[tuple[Any, ...]]:
    return [(e.label, str(e.kind), e.covered, e.center.tobytes(), e.whitener.tobytes()) for e in part.ellipsoids]


def inside(part: Partition, x: Array) -> Array:
    """Membership by the definition, with the tolerance of the surface."""
    return np.stack([np.linalg.norm((x - e.center) @ e.whitener.T, axis=1) <= 1.0001 for e in part.ellipsoids], axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("max_impure", [0, 3])
@pytest.mark.parametrize(("dim", "classes", "apart"), [(2, 3, 1.0), (4, 8, 0.3), (3, 5, 0.0), (8, 12, 2.0)])
def test_no_ellipsoid_holds_more_points_of_other_classes(
    rng: Rng, dim: int, classes: int, apart: float, max_impure: int
) -> None:
    """The promise counts all points of other classes; terminal ellipsoids are named as such."""
    x, y = overlapping(rng, 200, dim, classes, apart)
    part = partition(x, y, max_impure=max_impure)
    member = inside(part, x)
    for e, held in zip(part.ellipsoids, member.T, strict=True):
        foreign = np.count_nonzero(held & (y != e.label))
        assert foreign == e.counts.sum() - e.counts[e.label]
        assert foreign <= max_impure or e.kind is Kind.TERMINAL
    own = part.codes[None, :] == y[:, None]
    assert (member & own).any(axis=1).all(), "a point lies in no ellipsoid of its class"
    assert [sum(e.covered for e in part.ellipsoids if e.label == c) for c in range(classes)] == np.bincount(y).tolist()


def test_equal_points_of_all_classes_are_terminal(rng: Rng) -> None:
    x = np.repeat(rng.normal(size=(30, 3)), 4, axis=0)
    part = partition(x, np.tile(np.arange(4), 30), max_impure=0)
    assert {e.kind for e in part.ellipsoids} == {Kind.TERMINAL}


@pytest.mark.slow
@pytest.mark.parametrize("dim", [3, 12])
def test_screening_does_not_change_a_bit(rng: Rng, monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    x, y = overlapping(rng, 6000, dim, 5, apart=20.0 / dim)
    x, y = np.concatenate([x, x[:1], x[:1] + 9.0]), np.append(y, [5, 5])  # a class of two isolated points
    original, kept = OtherPoints.near, []

    def counting(self: OtherPoints, *query: Any) -> Iterator[Array]:
        for block in original(self, *query):
            kept.append(len(block) / 4096)
            yield block

    monkeypatch.setattr(OtherPoints, "near", counting)
    screened = partition(x, y, max_impure=20)
    assert min(kept) < 0.2, "nothing was screened"
    assert [e.covered for e in screened.ellipsoids if e.label == 5] == [1, 1], "no ball was tested"
    monkeypatch.setattr(OtherPoints, "near", lambda self, *query: iter([self.all()]))
    monkeypatch.setattr(OtherPoints, "near_any", lambda self, *query: self.all())
    assert bits(partition(x, y, max_impure=20)) == bits(screened)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dim", [1, 2, 5, 16])
def test_screening_keeps_every_point_within_the_level(rng: Rng, dim: int, order: Literal["C", "F"]) -> None:
    points, codes = np.asarray(rng.normal(size=(9000, dim)), order=order), rng.integers(0, 9, size=9000)
    others, rest = OtherPoints(points, codes, 3), points[codes != 3]
    factor, center = rng.normal(size=(dim, dim)), rng.normal(size=dim)
    squares = np.sum(((rest - center) @ factor.T) ** 2, axis=1)
    level = float(np.quantile(squares, 0.05))
    near = np.concatenate(list(others.near(center, factor, level)))
    assert len(others) == len(rest)
    assert len(near) < len(others)
    wanted = [row.tobytes() for row in rest[squares <= level]]
    found = {row.tobytes(): i for i, row in enumerate(near)}
    places = [found[row] for row in wanted]
    assert places == sorted(places), "the order of the rows is lost"
    few = OtherPoints(points[:100], codes[:100], 3)
    assert len(few) == len(np.concatenate(list(few.near(center, factor, level)))) == np.count_nonzero(codes[:100] != 3)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("far", [0.0, 1e3])
@pytest.mark.parametrize("dim", [1, 7])
def test_balls_meet_every_point_within_their_radius(rng: Rng, dim: int, far: float, scale: float) -> None:
    """Equal points, points on the surface, and points far from the origin; most others are left out."""
    points = np.asfortranarray(scale * (rng.normal(size=(9000, dim)) + far))
    codes = rng.integers(0, 3, size=9000)
    centers, radius = points[:20].copy(), 1e-3 * scale
    points[20:40] = centers
    steps = rng.normal(size=(20, dim))
    points[40:60] = centers + radius * steps / np.linalg.norm(steps, axis=1, keepdims=True)
    near = OtherPoints(points, codes, 1).near_any(centers, radius * (1.0 + 1e-4))
    rest = points[codes != 1]
    within = (np.linalg.norm(rest[:, None] - centers, axis=2) <= radius).any(axis=1)
    found = {row.tobytes() for row in near}
    assert all(row.tobytes() in found for row in rest[within])
    assert within.sum() <= len(near) < 0.5 * len(rest)
    assert len(OtherPoints(points, codes, 1).near_any(centers[:0], radius)) == 0


@pytest.mark.slow
def test_partitioned_is_the_papers_one_versus_rest(rng: Rng) -> None:
    x, y = overlapping(rng, 150, 2, 3)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    part = partition(x, y, rest="partitioned", standardize=False)
    for c in range(3):
        run = Separator(max_impure=2, floor=1e-3, keep=(True, False)).separate(x[y == c], x[y != c])
        mine = sorted((str(e.kind), e.iteration, e.covered) for e in part.ellipsoids if e.label == c)
        assert mine == sorted((str(p.kind), p.iteration, len(p.members)) for p in run.pieces)


def test_two_classes_are_separated_as_in_the_paper_either_way(rng: Rng) -> None:
    x, y = overlapping(rng, 80, 2, 2)
    assert bits(partition(x, y)) == bits(partition(x, y, rest="partitioned"))


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 4])
def test_a_limit_of_isolated_points(rng: Rng, classes: int) -> None:
    """Above the limit no point has a ball; a class of isolated points only has one terminal ellipsoid."""
    x, y = overlapping(rng, 160, 4, classes, apart=0.5)
    x, y = np.concatenate([x, 40.0 + rng.normal(size=(2, 4))]), np.append(y, [classes, classes])
    balls = partition(x, y, max_impure=0)
    covered = {e.label for e in balls.ellipsoids if e.kind is not Kind.ISOLATED}
    isolated = sum(e.kind is Kind.ISOLATED and e.label in covered for e in balls.ellipsoids)
    assert isolated
    assert classes not in covered
    for limit in (isolated - 1, isolated):
        limited = partition(x, y, max_impure=0, max_isolated=limit)
        (last,) = [e for e in limited.ellipsoids if e.label == classes]
        assert (last.kind, last.covered) == (Kind.TERMINAL, 2)
        kept = [
            b
            for b, e in zip(bits(balls), balls.ellipsoids, strict=True)
            if e.label in covered and (e.kind is not Kind.ISOLATED or limit == isolated)
        ]
        assert [b for b in bits(limited) if b[0] in covered] == kept
        assert limited.counts.sum() == len(x), "an uncovered point is not counted"


def test_a_limit_of_isolated_points_for_two_classes(rng: Rng) -> None:
    """The paper's run for two classes obeys the limit as well."""
    x, y = rng.normal(size=(42, 3)), np.append(np.zeros(40, dtype=int), [1, 1])
    x[:40, 0] += 9.0
    part = partition(x, y, max_isolated=5)
    assert [e.kind for e in part.ellipsoids if e.label == 1] == [Kind.TERMINAL]


@pytest.mark.slow
def test_a_sample_of_each_class(rng: Rng) -> None:
    """Ellipsoids of the sample, counts of all points, whatever the order of the rows."""
    x, y = overlapping(rng, 900, 3, 3, apart=2.0)
    part = partition(x, y, max_per_class=50)
    assert [sum(e.covered for e in part.ellipsoids if e.label == c) for c in range(3)] == [50] * 3
    assert part.counts.sum(axis=0).tolist() == np.bincount(y).tolist()
    member = inside(part, x)
    assert [int(e.counts.sum()) for e in part.ellipsoids] == member.sum(axis=0).tolist()
    rows = rng.permutation(len(x))
    assert bits(partition(x[rows], y[rows], max_per_class=50)) == bits(part)
    assert bits(partition(x, y, max_per_class=900)) == bits(partition(x, y))


class MemoryTask(ClassTask):
    """Writes how the points reached the process to a file."""

    def run(self, tick: Any = None) -> Separation:
        report = f"{os.getpid()} {type(self.points).__name__} {getattr(self.points, 'filename', None)}"
        (self.parameters["folder"] / str(self.code)).write_text(report)
        return Separation((), ())


def test_processes_share_one_copy_of_the_points(rng: Rng, tmp_path: Path) -> None:
    points, codes = rng.normal(size=(40_000, 8)), rng.integers(0, 4, size=40_000)
    tasks = [MemoryTask(points, codes, code, {"folder": tmp_path}) for code in range(4)]
    run_all(tasks, n_jobs=2, progress=False)
    processes, kinds, files = zip(*(path.read_text().split() for path in tmp_path.iterdir()), strict=True)
    assert len(files) == 4
    assert set(kinds) == {"memmap"}
    assert len(set(files)) == 1, "the points were written more than once"
    assert str(os.getpid()) not in processes


LONG_FIT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore SIGINT
import numpy as np, sys
from sepc_torch import partition
rng = np.random.default_rng(0)
y = rng.integers(0, 40, size=30_000)
x = rng.normal(size=(30_000, 12)) + 0.2 * rng.normal(size=(40, 12))[y]
print("ready", flush=True)
partition(x, y, n_jobs=2, progress=False)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the processes from /proc")
def test_interruption_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    environment = {**os.environ, "JOBLIB_TEMP_FOLDER": str(folder), "SEPC_TEST_MARK": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", LONG_FIT], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 300
        while not any(folder.rglob("*.pkl")):
            assert time.monotonic() < deadline, "the points were never shared"
            time.sleep(0.1)
        time.sleep(2.0)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=600)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    deadline = time.monotonic() + 120
    while (left := [*_processes(str(tmp_path)), *folder.iterdir()]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def _processes(mark: str) -> list[str]:
    """Processes whose environment names the folder of the test."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"SEPC_TEST_MARK={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(entry.name)
            except OSError:
                continue  # the process ended, or belongs to another user
    return found
