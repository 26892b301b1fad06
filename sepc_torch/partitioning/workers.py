"""Calls for worker processes that end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

# Seconds between two looks at the parent process.
_PERIOD = 1.0
_NAME = "end with the parent process"


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """A joblib call of a function; if this process is killed, the worker process ends too.

    A worker process of joblib would finish its calls and then wait five minutes for others.

    >>> import joblib
    >>> joblib.Parallel(n_jobs=1)(call(pow, 2, n) for n in range(4))
    [1, 2, 4, 8]
    """
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
