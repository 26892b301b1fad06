"""Cost of a monitor beside the training that it watches, and whether it can afford another refit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CostMeter:
    """Measures the time that a monitor takes, relative to the time of the training itself.

    Args:
        clock: Returns seconds.

    >>> seconds = iter([0.0, 10.0, 13.0, 20.0])  # training to 10, the monitor to 13, training to 20
    >>> meter = CostMeter(lambda: next(seconds))
    >>> meter.start()
    >>> with meter.paying():
    ...     pass
    >>> round(meter.share(), 3)  # 3 of 17 seconds
    0.176
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._began, self._spent, self._depth, self._since = 0.0, 0.0, 0, 0.0

    def start(self) -> None:
        """Begin a new training run."""
        self._began, self._spent, self._depth = self.clock(), 0.0, 0

    @contextmanager
    def paying(self) -> Iterator[None]:
        """Count the time inside as the monitor's; nested uses count once."""
        self._depth += 1
        if self._depth == 1:
            self._since = self.clock()
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._spent += self.clock() - self._since

    def share(self) -> float:
        """Time of the monitor divided by the time of the training without it; 0 before any training."""
        now = self.clock()
        spent = self._spent + (now - self._since if self._depth else 0.0)
        training = now - self._began - spent
        return spent / training if training > 0.0 else 0.0

    def affords(self, limit: float | None) -> bool:
        """Whether the cost so far is at most a limit; None for no limit."""
        return limit is None or self.share() <= limit
