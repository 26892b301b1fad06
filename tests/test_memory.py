"""Available memory of machines and containers, read from files like those of Linux, and the check before a fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from sepc_torch import TrustHead, partition
from sepc_torch.data import memory
from sepc_torch.data.arrays import rows_per_chunk
from sepc_torch.data.memory import available_memory, check_memory
from sepc_torch.head.reading import passes
from sepc_torch.head.reading.passes import first_pass
from sepc_torch.head.reading.sources import embedding_source
from sepc_torch.shapes import Array


def machine(root: Path, groups: dict[str, tuple[str, int, int]], own: str = "/") -> Path:
    """A folder like / of a machine with 8000 KiB; a group has a limit, used bytes and bytes of cached files."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text("MemTotal: 16000 kB\nMemFree: 100 kB\nMemAvailable:    8000 kB\n")
    (root / "proc" / "self" / "cgroup").write_text(f"5:devices:/elsewhere\n0::{own}\n")
    for name, (limit, used, cached) in groups.items():
        folder = root / "sys" / "fs" / "cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 7\nactive_file {cached - 1}\ninactive_file 1\n")
    return root


@pytest.mark.parametrize(
    ("groups", "own", "expected"),
    [
        ({}, "/", 8000 * 1024),
        ({".": ("max", 10, 5)}, "/", 8000 * 1024),
        ({".": ("5000", 3000, 1000)}, "/", 3000),
        ({"a/b": ("5000", 3000, 1000), "a": ("2500", 2400, 100), ".": ("max", 9, 9)}, "/a/b", 200),
        ({"a": ("5000", 9000, 1000)}, "/a", 0),
        ({"other": ("5000", 3000, 1000)}, "/a", 8000 * 1024),
    ],
)
def test_the_smallest_limit_counts(
    tmp_path: Path, groups: dict[str, tuple[str, int, int]], own: str, expected: int
) -> None:
    assert available_memory(machine(tmp_path, groups, own)) == expected


def test_this_machine_has_memory() -> None:
    found = available_memory()
    assert found is None or found > 2**20


def test_without_any_information_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sysconf")
    assert available_memory(tmp_path) is None
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    check_memory(2**60, "The fit", "Wait.")


def test_work_that_just_fits_is_not_refused() -> None:
    check_memory(1000, "The fit", "Wait.", available=1000)
    with pytest.raises(
        MemoryError, match=r"The fit needs about 2\.0 GiB of memory, and 0\.5 GiB are available\. Wait\."
    ):
        check_memory(2**31, "The fit", "Wait.", available=2**29)


def test_a_fit_is_refused_before_it_keeps_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.eye(4)[np.arange(40) % 4] + 0.1 * np.arange(40)[:, None], np.arange(40) % 2
    needed: list[int] = []
    monkeypatch.setattr(passes, "check_memory", lambda size, *_: needed.append(size))
    TrustHead.fit(x, y, dim=2, reference_points=0)
    # Four times 2 values in float64, and 5 in float32; four 5 x 5 matrices; two regions of 5 x 5, twice.
    # The same is checked at the first chunk, with the classes of that chunk, and before the rows are kept.
    assert needed == 2 * [40 * (4 * 16 + 20) + 4 * 8 * 25 + 2 * 8 * 2 * 25]
    monkeypatch.undo()
    monkeypatch.setattr(memory, "available_memory", lambda: needed[0] - 1)
    expected = r"The fit of 40 rows x 4 features, 2 classes and 2 dimensions needs .* GiB.*smaller dim.*DataLoader"
    with pytest.raises(MemoryError, match=expected):
        TrustHead.fit(x, y, dim=2, reference_points=0)
    monkeypatch.setattr(memory, "available_memory", lambda: needed[0])
    TrustHead.fit(x, y, dim=2, reference_points=0)


@pytest.mark.parametrize("form", ["array", "table"])
def test_a_fit_is_refused_at_its_first_chunk(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a known number of rows the first pass is not read to its end."""
    x, y = np.random.default_rng(0).normal(size=(2 * rows_per_chunk(4), 4)), np.arange(2 * rows_per_chunk(4)) % 2
    table = pyarrow.table({**dict(zip("abcd", x.T, strict=True)), "label": y})
    source = embedding_source(x, y, None) if form == "array" else embedding_source(table, "label", None)
    assert source.row_count() == len(x)
    read: list[int] = []
    chunks = source.chunks

    def counted() -> Iterator[tuple[Array, Any]]:
        for z, labels in chunks():
            read.append(len(z))
            yield z, labels

    monkeypatch.setattr(source, "chunks", counted)
    monkeypatch.setattr(memory, "available_memory", lambda: 2**20)
    with pytest.raises(MemoryError, match=f"The fit of {len(x)} rows"):
        first_pass(source)
    assert sum(read) < len(x)


def test_a_partition_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.random.default_rng(0).normal(size=(90, 4)), np.arange(90) % 3
    monkeypatch.setattr(memory, "available_memory", lambda: 3 * x.nbytes - 1)
    with pytest.raises(MemoryError, match=r"The partition of 90 rows x 4 features needs .* GiB.*max_per_class"):
        partition(x, y)
    monkeypatch.setattr(memory, "available_memory", lambda: 3 * x.nbytes)
    partition(x, y)
