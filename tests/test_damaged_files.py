"""Damaged and hostile files: every change is noticed, nothing large is allocated, and one error class is raised."""

from __future__ import annotations

import functools
import json
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from sepc_torch import (
    SEPC,
    DriftMonitor,
    FileFormatError,
    Guard,
    LabelPool,
    Partition,
    RiskMonitor,
    TrustHead,
    partition,
)
from sepc_torch.data import files, memory, schemas

Rng = np.random.Generator
# Endings of the names of arrays whose values index or divide other arrays.
INDICES = ("codes", "code", "_classes", "_members", "_ids", "entry_cells", "cell_sizes", "support_size")


@functools.cache
def fitted() -> tuple[np.ndarray, np.ndarray, TrustHead]:
    """Points, labels and a calibrated head."""
    rng = np.random.default_rng(0)
    y = np.arange(90) % 3
    x = rng.normal(size=(90, 4)) + 2.0 * np.eye(4)[y]
    head = TrustHead.fit(x, y, keep_points=True)
    return x, y, head.calibrate(rng.normal(size=(90, 4)) + 2.0 * np.eye(4)[y], y, 4.0 * np.eye(3)[y])


KINDS: dict[str, Callable[[Path], Any]] = {
    "partition": Partition.load,
    "sepc": SEPC.load,
    "trust_head": TrustHead.load,
    "label_pool": lambda path: LabelPool(list(range(600))).restore(path),
    "drift_monitor": lambda path: DriftMonitor.load(path, fitted()[2]),
    "risk_monitor": RiskMonitor.load,
    "guard": lambda path: Guard.load(path, fitted()[2]),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The bytes of one file of each kind."""
    folder, (x, y, head) = tmp_path_factory.mktemp("files"), fitted()
    part = partition(x, y)
    pool = LabelPool([(i, i % 5) for i in range(600)], labelled=range(300))
    monitor = DriftMonitor(head)
    monitor.update(x, 4.0 * np.eye(3)[y])
    risk = RiskMonitor(head, risk=0.1, groups="predicted")
    risk.expect(head.judge(x, 4.0 * np.eye(3)[y]), ids=np.arange(90))
    risk.update(risk.waiting[::2], y[risk.waiting[::2]])
    guard = Guard(head, risk=0.1, on_alarm="refuse", window=20)
    guard.judge(x + 9.0, 4.0 * np.eye(3)[y])
    guard.ask(30)
    savers = {"partition": part.save, "sepc": SEPC.from_partition(part).save, "trust_head": head.save}
    monitors = {"drift_monitor": monitor.save, "risk_monitor": risk.save, "guard": guard.save}
    for name, save in (savers | {"label_pool": pool.save} | monitors).items():
        save(folder / name)
    return {name: (folder / name).read_bytes() for name in KINDS}


def header_of(data: bytes) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its arrays begin."""
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), 8 + size


def contents(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["sepc_torch"])  # noqa: SIM118


@pytest.mark.parametrize("kind", KINDS)
def test_no_flipped_bit_is_unnoticed(rng: Rng, written: dict[str, bytes], tmp_path: Path, kind: str) -> None:
    """Most flips hit arrays; a third of them is aimed at the header, which is smaller."""
    path, whole = tmp_path / kind, written[kind]
    end = header_of(whole)[1]
    for number in range(120):
        damaged = bytearray(whole)
        place = int(rng.integers(0, end)) if number % 3 == 0 else int(rng.integers(0, len(whole)))
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            if header_of(bytes(damaged))[0] == header_of(whole)[0] and damaged[end:] == whole[end:]:
                continue  # white space after the header
        except (ValueError, struct.error, MemoryError, OverflowError):
            pass
        tracemalloc.start()
        with pytest.raises(FileFormatError, match=r"cannot be read: .*\. [A-Z].*\.$"):
            KINDS[kind](path)
        assert tracemalloc.get_traced_memory()[1] < 50e6
        tracemalloc.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_cut_and_overwritten_files(rng: Rng, written: dict[str, bytes], tmp_path: Path, kind: str) -> None:
    path, whole = tmp_path / kind, written[kind]
    for _ in range(20):
        start, length = int(rng.integers(0, len(whole) - 1)), int(rng.integers(1, 4096))
        zeroed = whole[:start] + bytes(len(whole[start : start + length])) + whole[start + length :]
        for damaged in (whole[:start], zeroed, whole + b"more", whole[start:]):
            if damaged != whole:
                path.write_bytes(damaged)
                with pytest.raises(FileFormatError):
                    KINDS[kind](path)


def forge(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    """A file with a right checksum, as somebody could make it who knows the format."""
    metadata = {key: value for key, value in metadata.items() if key != "checksum"}
    metadata["checksum"] = files._checksum(arrays, metadata)
    save_file(arrays, path, metadata={"sepc_torch": json.dumps(metadata)})


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_forged_values_are_checked(written: dict[str, bytes], tmp_path: Path, kind: str) -> None:
    """Every array in turn: another dtype, another shape, values out of range, missing."""
    path = tmp_path / kind
    path.write_bytes(written[kind])
    arrays, metadata = contents(path)
    forge(path, arrays, metadata)
    KINDS[kind](path)  # the forged file itself is fine
    for name, array in arrays.items():
        wrong: list[np.ndarray | None] = [None, array.astype(np.complex64), array[None].repeat(2, axis=0)]
        if array.dtype.kind == "f" and array.size:
            wrong.append(np.full_like(array, np.nan))
        if array.dtype.kind == "i" and array.size and name not in ("answers", "support", "iteration", "covered"):
            wrong.append(np.full_like(array, np.iinfo(array.dtype).min))
        if array.dtype.kind == "i":
            wrong += [array.astype(dtype) for dtype in (np.int8, np.int16, np.int32, np.int64) if dtype != array.dtype]
        if name.endswith("grid_classes"):
            wrong.append(array[::-1])
        if name.endswith(
            ("codes", "code", "_classes", "_members", "_ids", "entry_cells", "cell_sizes", "support_size")
        ):
            wrong.append(np.full_like(array, np.iinfo(array.dtype).max))
        for value in wrong:
            if name == "block_checksums" and value is None:
                continue  # optional: files of pools without it are as old as the checksum
            changed = {key: a for key, a in arrays.items() if key != name}
            if value is not None:
                changed[name] = np.ascontiguousarray(value)
            forge(path, changed, metadata)
            tracemalloc.start()
            with pytest.raises(FileFormatError):
                KINDS[kind](path)
            assert tracemalloc.get_traced_memory()[1] < 50e6, name
            tracemalloc.stop()
    forge(path, {**arrays, "more": np.zeros(1)}, metadata)
    with pytest.raises(FileFormatError, match="unknown arrays: more"):
        KINDS[kind](path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"classes": None}, "lack the classes"),
        ({"classes": [0, 1]}, "expected"),
        ({"classes": [0, 1, 1]}, "occurs twice"),
        ({"classes": [0, 1, [2]]}, "not a plain value"),
        ({"feature_names": ["a"]}, "shape"),
        ({"feature_names": [1, 2, 3, 4]}, "no name"),
        ({"nearest": "manhattan"}, "nearest = 'manhattan'"),
        ({"nan_policy": 3}, "nan_policy = 3"),
        ({"made": []}, "how it was made"),
        ({"made": {"max_impure": None}}, "made with max_impure = None"),
        ({"made": {"max_impure": True}}, "made with max_impure = True"),
        ({"made": {"max_isolated": -1}}, "made with max_isolated = -1"),
        ({"made": {"max_per_class": 0}}, "made with max_per_class = 0"),
        ({"made": {"rest": ["whole"]}}, r"made with rest = \['whole'\]"),
        ({"made": {"solver": 3}}, "made with solver = 3"),
        ({"made": {"standardize": "yes"}}, "made with standardize = 'yes'"),
        ({"made": {"floor": 0}}, "made with floor = 0"),
        ({"format": "x"}, "do not name a format"),
        ({"format": 0}, "of format 0, and this version"),
        ({"format": 99}, "of format 99, and this version"),
        ({"kind": "partition"}, r"Read it with Partition\.load"),
    ],
)
def test_forged_metadata_are_checked(
    written: dict[str, bytes], tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "model"
    path.write_bytes(written["sepc"])
    arrays, metadata = contents(path)
    forge(path, arrays, metadata | change)
    with pytest.raises(FileFormatError, match=problem):
        SEPC.load(path)


@pytest.mark.parametrize("key", ["max_impure", "max_isolated", "max_per_class", "rest", "solver", "floor"])
def test_a_head_that_can_be_updated_says_how_it_was_made(written: dict[str, bytes], tmp_path: Path, key: str) -> None:
    path = tmp_path / "head"
    path.write_bytes(written["trust_head"])
    arrays, metadata = contents(path)
    made = {name: value for name, value in metadata["sepc"]["made"].items() if name != key}
    forge(path, arrays, metadata | {"sepc": metadata["sepc"] | {"made": made}})
    with pytest.raises(FileFormatError, match=f"how it was made: {key}"):
        TrustHead.load(path)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("ranked_joint", 2.0, "expected at most 1"),
        ("fitted_joint", -1.0, "expected at least 0"),
        ("ranked_rows", 0, "repeats a value"),
        ("ranked_place", 0, "repeats a value"),
    ],
)
def test_forged_calibrations_are_refused(
    written: dict[str, bytes], tmp_path: Path, name: str, value: float, problem: str
) -> None:
    """Scores that are no probabilities, and points that are ranked twice."""
    path = tmp_path / "head"
    path.write_bytes(written["trust_head"])
    arrays, metadata = contents(path)
    for source in ("own", "network"):
        key = f"calibration.{source}.{name}"
        forge(path, arrays | {key: np.full_like(arrays[key], value)}, metadata)
        with pytest.raises(FileFormatError, match=problem):
            TrustHead.load(path)


@pytest.mark.parametrize(
    ("kind", "array", "described", "problem"),
    [
        ("partition", {"code": 0}, {}, "a class has no ellipsoid"),
        ("partition", {}, {"classes": ["a", 1, 2]}, "of several types"),
        ("drift_monitor", {"seen": 2**63 - 1}, {}, "expected at most"),
    ],
)
def test_values_that_would_fail_in_use_are_refused(
    written: dict[str, bytes], tmp_path: Path, kind: str, array: dict[str, int], described: dict[str, Any], problem: str
) -> None:
    path = tmp_path / kind
    path.write_bytes(written[kind])
    arrays, metadata = contents(path)
    changed = {name: np.full_like(arrays[name], value) for name, value in array.items()}
    forge(path, arrays | changed, metadata | described)
    with pytest.raises(FileFormatError, match=problem):
        KINDS[kind](path)


@pytest.mark.parametrize("text", ["[]", "[" * 100_000, "3", "{", '{"kind": "sepc"}'])
def test_metadata_of_another_shape(written: dict[str, bytes], tmp_path: Path, text: str) -> None:
    path = tmp_path / "model"
    path.write_bytes(written["sepc"])
    save_file(contents(path)[0], path, metadata={"sepc_torch": text})
    with pytest.raises(FileFormatError, match="metadata"):
        SEPC.load(path)


def test_a_file_without_its_checksum_is_refused(written: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(written["sepc"])
    arrays, metadata = contents(path)
    del metadata["checksum"]
    save_file(arrays, path, metadata={"sepc_torch": json.dumps(metadata)})
    with pytest.raises(FileFormatError, match="do not match its checksum"):
        SEPC.load(path)


def test_the_error_names_file_problem_and_remedy(tmp_path: Path) -> None:
    error = FileFormatError(tmp_path / "head", "it is damaged", "Make it again.")
    assert str(error) == f"'{tmp_path / 'head'}' cannot be read: it is damaged. Make it again."
    assert isinstance(error, ValueError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # errors of worker processes are pickled


def test_every_array_has_a_field(written: dict[str, bytes], tmp_path: Path) -> None:
    """A new buffer must be added to the schema: a file with an unknown array cannot be read."""
    for kind, data in written.items():
        (tmp_path / kind).write_bytes(data)
        arrays, metadata = contents(tmp_path / kind)
        schemas.check(kind, arrays, metadata)


class TestDamagedPools:
    def saved(self, tmp_path: Path, damage: int | None) -> tuple[LabelPool, Path]:
        """A pool of 600 samples, 300 of them labelled; one answer in the block of sample ``damage`` is changed."""
        pool = LabelPool([(i, i % 5) for i in range(600)], labelled=range(300))
        path = tmp_path / "pool"
        pool.save(path)
        if damage is not None:
            data = bytearray(path.read_bytes())
            header, start = header_of(bytes(data))
            first = start + header["round"]["data_offsets"][0]
            data[first + 8 * damage] ^= 1
            path.write_bytes(data)
        return pool, path

    def test_the_error_says_what_can_be_saved(self, tmp_path: Path) -> None:
        pool, path = self.saved(tmp_path, 10)
        before = pool.state_dict()
        with pytest.raises(FileFormatError, match=r"44 labels lie in undamaged blocks; 256 of 600 samples do not"):
            pool.restore(path)
        assert all(torch.equal(before[name], value) for name, value in pool.state_dict().items())

    def test_undamaged_blocks_are_restored(self, tmp_path: Path) -> None:
        pool, path = self.saved(tmp_path, 10)
        fresh = LabelPool([(i, i % 5) for i in range(600)])
        with pytest.warns(UserWarning, match="256 of 600 samples do not and lose theirs"):
            fresh.restore(path, damaged="skip")
        state, wanted = fresh.state_dict(), pool.state_dict()
        assert (state["round"][:256] == -1).all()
        for name in ("round", "answered", "answers", "ignored"):
            assert torch.equal(state[name][256:], wanted[name][256:])

    def test_a_whole_file_is_restored_without_a_warning(self, tmp_path: Path) -> None:
        pool, path = self.saved(tmp_path, None)
        fresh = LabelPool([(i, i % 5) for i in range(600)])
        fresh.restore(path, damaged="skip")
        assert all(torch.equal(pool.state_dict()[name], value) for name, value in fresh.state_dict().items())


def test_a_table_of_classes_that_does_not_fit_into_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a few megabytes can state so many classes and ellipsoids that their table has gigabytes."""
    head = fitted()[2]
    head.save(tmp_path / "head")
    head.sepc.save(tmp_path / "sepc")
    size = 8 * len(head.classes) * len(head.sepc.bank)
    for kind, name in ((TrustHead, "head"), (SEPC, "sepc")):
        monkeypatch.setattr(memory, "available_memory", lambda: size)
        kind.load(tmp_path / name)
        monkeypatch.setattr(memory, "available_memory", lambda: size - 1)
        with pytest.raises(FileFormatError, match=r"needs more memory.*and 3 classes.*if you trust its source"):
            kind.load(tmp_path / name)
