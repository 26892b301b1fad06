"""CPU seconds of the phases of a partition, for ``bench_classes.py``."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from sepc_torch.partitioning import fit
from sepc_torch.partitioning.steps import Steps
from sepc_torch.solvers import progressive
from sepc_torch.solvers.d_optimal import Design
from sepc_torch.solvers.progressive import ProgressiveEllipsoid

# The functions of each phase; time in a function of another phase counts only there.
PHASES: dict[str, tuple[tuple[Any, str], ...]] = {
    "ellipsoids": (
        (ProgressiveEllipsoid, "__init__"),
        (ProgressiveEllipsoid, "subset"),
        (ProgressiveEllipsoid, "exact"),
        (ProgressiveEllipsoid, "_view"),
        (Design, "refine"),
    ),
    "directions": ((Steps, "_closest"),),
    "tests": ((progressive, "_search"), (progressive._Search, "refine"), (Steps, "_balls")),
    "counts": ((fit, "count_partition"),),
}


class PhaseClock:
    """CPU seconds of each phase and of the rest, and the number of ellipsoids and directions that were solved."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._phases, self._since = ["rest"], 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the partitions within the context."""
        with ExitStack() as stack:
            for phase, places in PHASES.items():
                for owner, name in places:
                    stack.enter_context(patch.object(owner, name, self._timed(phase, name, getattr(owner, name))))
            self._since = time.process_time()
            yield
            self._book()

    def _timed(self, phase: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._book()
            self._phases.append(phase)
            self.calls[name] += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._book()
                self._phases.pop()

        return timed

    def _book(self) -> None:
        """Book the seconds since the last call on the present phase."""
        now = time.process_time()
        self.seconds[self._phases[-1]] += now - self._since
        self._since = now
