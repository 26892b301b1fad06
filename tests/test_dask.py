"""``partition`` through a user's joblib backend: a Dask cluster of two workers."""

from __future__ import annotations

import joblib
import numpy as np
import pytest
from dask.distributed import Client, LocalCluster, get_task_stream

from sepc_torch import partition


@pytest.mark.slow
def test_a_cluster_gives_the_same_partition(rng: np.random.Generator) -> None:
    y = rng.integers(0, 3, size=120)
    X = rng.normal(size=(120, 3)) + y[:, None]
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,  # type: ignore[no-untyped-call]
        Client(cluster, timeout=30) as client,  # type: ignore[no-untyped-call]
        get_task_stream(client) as stream,
    ):
        client.wait_for_workers(2, timeout=30)
        with joblib.parallel_config(backend="dask"):
            part = partition(X, y)
    done = [task for task in stream.data if "separate" in task["key"]]
    assert len(done) == 3, "not every class was fitted on the cluster"
    assert part == partition(X, y)
