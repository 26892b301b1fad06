"""Worker processes: they end with the process that started them, and all parallel parts of a partition use them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import joblib
import numpy as np
import pytest

from sepc_torch import partition
from sepc_torch.partitioning import cells, processes

# One worker process of joblib, which has run one call and waits for the next one.
PARENT = """
import os, time
from joblib.externals.loky import get_reusable_executor
from sepc_torch.partitioning.processes import run
print(get_reusable_executor(max_workers=1).submit(run, os.getpid(), os.getppid).result() == os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs os.getppid to change")
def test_a_worker_process_ends_when_its_parent_is_killed() -> None:
    """The worker holds the pipe open, so the pipe ends with the worker. Without a call of ours it waits 300 s."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().strip() == b"True"
        parent.send_signal(signal.SIGKILL)
        assert parent.communicate(timeout=300)[0] == b""


@pytest.mark.slow
def test_all_parallel_parts_of_a_partition_watch_their_parent(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of this process run the calls here, so that the test sees them."""
    callers: list[int] = []
    monkeypatch.setattr(processes, "end_with", callers.append)
    monkeypatch.setattr(cells, "_PARALLEL_WORK", 0)
    y = np.repeat([0, 1, 2, 3], 20)
    x = rng.normal(size=(80, 2)) + y[:, None]
    with joblib.parallel_config(backend="threading", n_jobs=2):
        part = partition(x, y, n_jobs=2)
    assert set(callers) == {os.getpid()}
    assert len(callers) > 4, "one call for each class, and at least one for the counts of the ellipsoids"
    assert part == partition(x, y)


def test_a_process_does_not_end_with_an_unrelated_caller() -> None:
    before = [thread.name for thread in threading.enumerate()]
    assert processes.run(os.getpid(), pow, 2, 3) == 8
    assert [thread.name for thread in threading.enumerate()] == before
