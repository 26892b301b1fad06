"""Cost of a monitor beside the training that it watches, and what it can still afford."""

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
    >>> meter.stop()
    >>> meter.spent, round(meter.share(), 3)  # 3 of 17 seconds
    (3.0, 0.176)
    >>> meter.affords(0.5, 5.0), meter.affords(0.5, 6.0)
    (True, False)
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._began, self._spent, self._depth, self._since = 0.0, 0.0, 0, 0.0
        self._ended: float | None = 0.0

    def start(self) -> None:
        """Begin a new training run."""
        self._began, self._spent, self._depth, self._ended = self.clock(), 0.0, 0, None

    def stop(self) -> None:
        """End the training run: the numbers stay as they are until the next one."""
        self._ended = self.clock()

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

    @property
    def spent(self) -> float:
        """Seconds of the monitor."""
        return self._seconds()[0]

    def share(self) -> float:
        """Time of the monitor divided by the time of the training without it; 0 before any training."""
        spent, training = self._seconds()
        return spent / training if training > 0.0 else 0.0

    def affords(self, limit: float | None, further: float = 0.0) -> bool:
        """Whether the cost so far and further seconds are at most a share of the training; None for no limit."""
        if limit is None:
            return True
        spent, training = self._seconds()
        return spent + further <= limit * training

    def _seconds(self) -> tuple[float, float]:
        """Seconds of the monitor and of the training so far."""
        now = self.clock() if self._ended is None else self._ended
        spent = self._spent + (now - self._since if self._depth else 0.0)
        return spent, now - self._began - spent
