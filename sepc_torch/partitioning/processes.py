"""Processes and threads of a partition: worker processes end with their parent, and BLAS uses one thread."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

from sepc_torch.data.shared_setting import SharedSetting

T = TypeVar("T")

# Seconds between two looks at the parent process.
_PERIOD = 1.0
_NAME = "end with the parent process"


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """A joblib call; if this process is killed, its worker process ends too, and does not wait for five minutes."""
    import joblib

    return joblib.delayed(run)(os.getpid(), function, *arguments)


def run(caller: int, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a worker process of the process with the id ``caller``, in a thread of it, or elsewhere."""
    end_with(caller)
    return function(*arguments)


def end_with(caller: int) -> None:
    """Start a thread that ends this process when its parent has ended, if the caller is the parent.

    Processes of a cluster have another parent, and the cluster ends them. A signal of the kernel
    (``PR_SET_PDEATHSIG``) would come too early: when the thread of the parent ends that started this process. On
    Windows the process does not learn that its parent has ended.
    """
    parent = multiprocessing.parent_process()
    started = any(thread.name == _NAME for thread in threading.enumerate())
    if parent is not None and parent.pid == caller and not started:
        threading.Thread(target=_watch, args=(caller,), name=_NAME, daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PERIOD)
    os._exit(1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit BLAS to one thread: the matrices are small, and the order of sums is then the same on every machine.

    Several threads may be inside at once. The limit holds until the last one leaves, and nothing stays changed.
    """
    # OpenMP has a limit for each thread, BLAS one for the process. Some builds of BLAS follow OpenMP.
    with _libraries(len(sys.modules)).select(user_api="openmp").limit(limits=1), _ONE_BLAS_THREAD:
        yield


@lru_cache(maxsize=1)
def _libraries(_modules: int) -> Any:
    """The loaded libraries with threads, searched again after an import: a search takes 5 ms, a small class as much."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@contextmanager
def _limited_blas() -> Iterator[None]:
    blas = _libraries(len(sys.modules)).select(user_api="blas")
    limit = blas.limit(limits=1)
    _release(blas)
    try:
        yield
    finally:
        limit.restore_original_limits()
        _release(blas)


def _release(blas: Any) -> None:
    """Let any thread set the limits next: threadpoolctl 3.8 ignores all threads but the one that set them first."""
    for library in blas.lib_controllers:
        if hasattr(library, "clear_controlling_thread"):
            library.clear_controlling_thread()


_ONE_BLAS_THREAD = SharedSetting(_limited_blas)
