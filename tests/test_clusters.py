"""``partition`` through a user's joblib backend: a Dask cluster and a Ray cluster of two processes each.

Each test counts the bytes that this process sends to the cluster. The points would be sent with every class if a
backend did not recognise that the classes share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import joblib
import numpy as np
import pytest

from sepc_torch import Partition, partition
from sepc_torch.partitioning.tasks import ClassTask
from sepc_torch.shapes import Array

pytestmark = pytest.mark.slow

CLASSES = 8


class Fit(NamedTuple):
    """Points, their labels, and the bytes of the file of their partition, fitted in this process."""

    X: Array
    y: Array
    file: bytes


def fitted(X: Array, y: Array) -> Partition:
    """A partition with more than one ellipsoid for some classes, in about a second: one point in 50 may be impure."""
    return partition(X, y, max_impure=30, progress=False)


@pytest.fixture(scope="module")
def fit(module_rng: np.random.Generator, tmp_path_factory: pytest.TempPathFactory) -> Fit:
    """Points of 768 kB; Ray sends arguments of less than 100 kB inside a call, Dask those of less than 1 kB."""
    y = np.repeat(np.arange(CLASSES), 1500)
    X = module_rng.normal(size=(len(y), CLASSES)) + 4.5 * np.eye(CLASSES)[y]
    return Fit(X, y, file_of(fitted(X, y), tmp_path_factory.mktemp("here") / "partition"))


def file_of(part: Partition, path: Path) -> bytes:
    part.save(path)
    return path.read_bytes()


@pytest.fixture
def only_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that is fitted in this process raises an error. The processes of a cluster import their own ClassTask."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a class was fitted in this process, not on the cluster")

    monkeypatch.setattr(ClassTask, "run", refuse)


@pytest.mark.usefixtures("only_elsewhere")
def test_a_fit_in_this_process_is_noticed(fit: Fit) -> None:
    with pytest.raises(AssertionError, match="fitted in this process"):
        fitted(fit.X, fit.y)


@pytest.mark.usefixtures("only_elsewhere")
def test_dask_gives_the_same_file_and_sends_the_points_once(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = pytest.importorskip("distributed", reason="needs dask[distributed]")
    from distributed.comm.tcp import TCP

    sent: list[int] = []
    write: Any = TCP.write

    async def counted(comm: Any, *args: Any, **options: Any) -> int:
        sent.append(await write(comm, *args, **options))
        return sent[-1]

    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster, timeout=120) as client,
    ):
        client.wait_for_workers(2, timeout=120)
        monkeypatch.setattr(TCP, "write", counted)
        with joblib.parallel_config(backend="dask"):
            part = fitted(fit.X, fit.y)
        passed_on = client.run(lambda dask_worker: dask_worker.transfer_outgoing_bytes_total)
    assert file_of(part, tmp_path / "cluster") == fit.file
    # The client sends the points to the scheduler and the scheduler sends them to one worker, both in this process.
    # These are two copies. Two more are allowed for the counts, in case they run on the cluster one day.
    assert fit.X.nbytes <= sum(sent) < 4.5 * fit.X.nbytes, "the points were sent more than once"
    # The other worker takes its copy from the first.
    assert sum(passed_on.values()) < 2.5 * fit.X.nbytes, "a worker took the points more than once"


@pytest.fixture
def ray_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A Ray cluster of two processes; the sizes of all objects that this process sends to it."""
    ray = pytest.importorskip("ray", reason="needs ray, which has no wheel for this platform or this Python")
    from joblib.pool import PicklingPool
    from ray._private.serialization import SerializationContext
    from ray.util.joblib import register_ray

    sizes: list[int] = []
    serialize = SerializationContext.serialize

    def counted(context: Any, value: Any) -> Any:
        found = serialize(context, value)
        sizes.append(found.total_bytes)
        return found

    bases = PicklingPool.__bases__
    register_ray()
    # 200 MB of object store, because the default is a third of the machine's memory.
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    monkeypatch.setattr(SerializationContext, "serialize", counted)
    yield sizes
    ray.shutdown()
    # Ray's backend replaces the base class of joblib's pool in the whole process, and other tests may need the old one.
    PicklingPool.__bases__ = bases


@pytest.mark.usefixtures("only_elsewhere")
def test_ray_gives_the_same_file_and_sends_the_points_once(fit: Fit, tmp_path: Path, ray_sizes: list[int]) -> None:
    with joblib.parallel_config(backend="ray", n_jobs=-1):
        part = fitted(fit.X, fit.y)
    assert file_of(part, tmp_path / "cluster") == fit.file
    # One copy for the runs. One more is allowed for the counts, in case they run on the cluster one day.
    assert fit.X.nbytes <= sum(ray_sizes) < 2.5 * fit.X.nbytes, "the points were sent more than once"
