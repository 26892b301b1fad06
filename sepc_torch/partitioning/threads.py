"""Limit of the threads that BLAS uses during a partition."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from sepc_torch.data.shared_setting import SharedSetting


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
