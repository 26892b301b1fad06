"""Files: a partition survives a round trip, writing is atomic, and unreadable files raise clear errors."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from safetensors.numpy import save_file

from sepc_torch import SEPC, Partition, partition
from sepc_torch.data import files as storage


@pytest.fixture
def part(rng: np.random.Generator) -> Partition:
    x = rng.normal(size=(50, 2))
    return partition(x, x[:, 0] + rng.normal(size=50) > 0)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "labels", [(0, 1, 2), ("a", "b", "über"), (-0.5, 0.5, 1.5)], ids=lambda labels: type(labels[0]).__name__
)
def test_a_partition_survives_a_round_trip(rng: np.random.Generator, tmp_path: Path, labels: tuple[Any, ...]) -> None:
    y = rng.integers(0, 3, size=80)
    x = rng.normal(size=(80, 3)) + y[:, None]
    part = partition(x, [labels[i] for i in y])
    part.save(tmp_path / "part")
    again = Partition.load(tmp_path / "part")
    assert again == part
    assert again.classes.dtype == part.classes.dtype
    for mine, theirs in zip(part.ellipsoids, again.ellipsoids, strict=True):
        assert (type(mine.label), mine.label, mine.kind) == (type(theirs.label), theirs.label, theirs.kind)
        np.testing.assert_array_equal(mine.support, theirs.support)
        np.testing.assert_array_equal(mine.distance(x), theirs.distance(x))
    assert again.ledger.reached(0, 2.0).tolist() == part.ledger.reached(0, 2.0).tolist()
    again.save(str(tmp_path / "again"))
    assert (tmp_path / "again").read_bytes() == (tmp_path / "part").read_bytes()


def test_boolean_labels_and_feature_names_survive_a_round_trip(tmp_path: Path) -> None:
    import pandas as pd

    frame = pd.DataFrame({"left": [0, 1, 0, 1], "right": [0, 1, 1, 0]})
    part = partition(frame, frame.left == frame.right)
    part.save(tmp_path / "xor")
    again = Partition.load(tmp_path / "xor")
    assert again == part
    assert again.hyperplanes == ()
    assert again.feature_names == ("left", "right")
    assert [e.label for e in again.ellipsoids] == [False, True]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file .*absent"):
        Partition.load(tmp_path / "absent")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_refused(part: Partition, tmp_path: Path, share: float) -> None:
    part.save(tmp_path / "part")
    whole = (tmp_path / "part").read_bytes()
    (tmp_path / "part").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=r"part' cannot be read: it is not a complete safetensors file"):
        Partition.load(tmp_path / "part")


@pytest.mark.parametrize("content", [b"PK\x03\x04" + bytes(200), b"a,b\n1,2\n" * 40], ids=["archive", "table"])
def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        Partition.load(tmp_path / "other")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_safetensors_file_of_another_program_is_refused(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    save_file({"weight": np.ones((2, 2))}, tmp_path / "foreign", metadata=metadata)
    with pytest.raises(ValueError, match="sepc_torch did not write it"):
        Partition.load(tmp_path / "foreign")


@pytest.mark.parametrize("step", [-1, 1])
def test_another_format_is_refused(part: Partition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    with monkeypatch.context() as other:
        other.setattr(storage, "FORMAT", storage.FORMAT + step)
        part.save(tmp_path / "part")
    with pytest.raises(ValueError, match=rf"format {storage.FORMAT + step},.*reads format {storage.FORMAT} only"):
        Partition.load(tmp_path / "part")


def test_a_saved_model_holds_no_derived_counts(part: Partition, tmp_path: Path) -> None:
    SEPC.from_partition(part).save(tmp_path / "model")
    arrays, _ = storage.read(tmp_path / "model", "sepc")
    assert {name: str(arrays[name].dtype) for name in ("step_ids", "step_distances", "cell_members")} == {
        "step_ids": "int32",
        "step_distances": "float32",
        "cell_members": "int32",
    }
    assert not {"held", "cells", "counts"} & set(arrays)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    storage.write(tmp_path / "head", "trust head", {"weight": np.ones(2)}, {})
    with pytest.raises(ValueError, match="holds a trust head, not a partition"):
        Partition.load(tmp_path / "head")
    arrays, _ = storage.read(tmp_path / "head", "trust head")
    np.testing.assert_array_equal(arrays["weight"], np.ones(2))


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["failure", "Ctrl-C"])
@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_file(
    part: Partition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, error: BaseException
) -> None:
    (tmp_path / "part").write_bytes(b"the old file")
    reached = []

    def fail(*_: object) -> NoReturn:
        reached.append(sorted(path.name for path in tmp_path.iterdir()))
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(os, moment, fail)
        with pytest.raises(type(error)):
            part.save(tmp_path / "part")
    assert len(reached) == 1
    assert len(reached[0]) == 2, "the new file was not written beside the old one"
    assert files(tmp_path) == {"part": b"the old file"}


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError)):
        storage.write(tmp_path / "bad", "partition", {"x": np.ones(1)}, {"when": object()})
    with pytest.raises(ValueError, match="JSON"):
        storage.write(tmp_path / "bad", "partition", {"x": np.ones(1)}, {"value": float("nan")})
    assert files(tmp_path) == {}


def test_a_link_keeps_pointing_to_the_file_that_is_replaced(part: Partition, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for _ in range(2):
        part.save(tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert Partition.load(tmp_path / "target") == part
        (tmp_path / "target").write_bytes(b"old")


def test_a_longer_file_is_replaced_completely(part: Partition, tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(b"longer than the new file" * 10_000)
    part.save(tmp_path / "part")
    assert list(files(tmp_path)) == ["part"]
    assert Partition.load(tmp_path / "part") == part


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_saved_file_has_the_usual_permissions(
    part: Partition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int
) -> None:
    """Those of any new file; the umask belongs to the whole process, so it is not touched."""
    before = os.umask(mask)
    try:
        with monkeypatch.context() as fixed:
            fixed.setattr(os, "umask", lambda _: pytest.fail("the umask was changed"))
            part.save(tmp_path / "part")
        (tmp_path / "plain").touch()
    finally:
        os.umask(before)
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "part")}
    assert len(modes) == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a pipe with a name")
@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_only_a_file_is_replaced(part: Partition, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    if kind == "folder":
        target.mkdir()
    elif kind == "pipe":
        os.mkfifo(target)
    else:
        target.symlink_to(os.devnull)

    def state() -> tuple[int, int, int]:
        found = target.lstat()  # the time of the last access changes when a link is followed
        return found.st_mode, found.st_ino, found.st_mtime_ns

    before = state()
    with pytest.raises((IsADirectoryError, FileExistsError), match=rf"Cannot write .*target': it is a .*{kind}"):
        part.save(target)
    assert state() == before
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_write_deletes_old_temporary_files_of_the_same_target(part: Partition, tmp_path: Path) -> None:
    """Old ones only: a younger one may belong to a running process. Files of other targets and of users stay."""
    old = {".part.0123abcd.partial", ".part.ab_c12de.partial"}
    others = {".part.2.0123abcd.partial", ".part.mine.partial", "part.0123abcd.partial", ".part.0123abcd"}
    for name in old | others:
        (tmp_path / name).touch()
        hours = 2 * storage._LEFTOVER_SECONDS
        os.utime(tmp_path / name, (time.time() - hours, time.time() - hours))
    young = ".part.89abcdef.partial"
    (tmp_path / young).touch()
    part.save(tmp_path / "part")
    assert set(files(tmp_path)) == {"part", young} | others


def test_a_killed_write_leaves_a_temporary_file_that_a_later_write_deletes(tmp_path: Path) -> None:
    """The names that the cleaning looks for are those that a write makes."""
    with storage.replacing(tmp_path / "a [1].csv") as temporary:
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {temporary.name}
    temporary.touch()
    os.utime(temporary, (0, 0))
    with storage.replacing(tmp_path / "a [1].csv") as again:
        again.write_text("new")
    assert files(tmp_path) == {"a [1].csv": b"new"}


@pytest.mark.parametrize("read", [str, Path, lambda path: os.fspath(path)])
def test_paths_are_strings_or_path_objects(part: Partition, tmp_path: Path, read: Callable[[Path], Any]) -> None:
    part.save(read(tmp_path / "part"))
    assert Partition.load(read(tmp_path / "part")) == part


def test_the_file_holds_no_code(part: Partition, tmp_path: Path) -> None:
    """The file holds arrays and JSON, readable without this package."""
    from safetensors import safe_open

    part.save(tmp_path / "part")
    with safe_open(tmp_path / "part", framework="numpy") as file:
        header = json.loads(file.metadata()["sepc_torch"])
        center = file.get_tensor("center")
    assert header["kind"] == "partition"
    np.testing.assert_array_equal(center, [e.center for e in part.ellipsoids])
