"""Limit of the threads that BLAS uses during a partition."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


def one_thread() -> AbstractContextManager[Any]:
    """Limit BLAS to one thread: the matrices are small, and the order of sums is then the same on every machine."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1)
