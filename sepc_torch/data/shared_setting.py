"""Temporary changes of settings of the whole process, for several threads at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class SharedSetting:
    """Context manager that several threads share: the first one changes a setting, the last one restores it.

    Without the count, a thread that enters second reads the changed setting as the user's own and restores that.

    Args:
        change: Returns a context manager that changes the setting. One thread may enter it and another one leave it.

    >>> from contextlib import contextmanager
    >>> @contextmanager
    ... def change():
    ...     print("changed")
    ...     yield
    ...     print("restored")
    >>> setting = SharedSetting(change)
    >>> with setting, setting:
    ...     print("inside")
    changed
    inside
    restored
    """

    def __init__(self, change: Callable[[], AbstractContextManager[Any]]) -> None:
        self._change = change
        self._changed: AbstractContextManager[Any] = nullcontext()
        self._inside = 0
        self._lock = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._changed = self._change()
                self._changed.__enter__()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._changed.__exit__(None, None, None)

    def _after_fork(self) -> None:
        """Restore the setting in a forked process: the threads that were inside do not exist there."""
        self._lock = threading.Lock()
        if self._inside > 0:
            self._inside = 0
            self._changed.__exit__(None, None, None)
