"""Shared parts of the fault campaign (``campaign.py``): findings, deliberate errors, memory limits, hostile points."""

from __future__ import annotations

import linecache
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

import sepc_torch
from sepc_torch.shapes import Array

Rng = np.random.Generator

_PACKAGE = Path(sepc_torch.__file__).parent
# Powers of ten of the least subnormal and of the largest float64.
_LEAST, _MOST = -323.0, 308.0


class Finding(NamedTuple):
    """A broken promise of the library.

    Attributes:
        fault: The promise, without numbers of the case: a campaign reports equal faults once.
        detail: What happened in this case.
    """

    fault: str
    detail: str = ""


def refused(
    error: BaseException, *documented: type[BaseException], where: str = "", detail: str = ""
) -> Finding | None:
    """None for a documented error that the library raised on purpose, otherwise the finding.

    On purpose means that the innermost frame is a ``raise`` statement of the package. "not enough values to unpack" is
    a ValueError too, but nobody wrote that sentence for the user.
    """
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    ours, place = False, "?"
    trace = error.__traceback__
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        ours = path.is_relative_to(_PACKAGE)
        if ours:
            place = f"{path.relative_to(_PACKAGE)}:{trace.tb_frame.f_code.co_name}"
        trace = trace.tb_next
    stated = (
        ours
        and frame is not None
        and linecache.getline(frame.tb_frame.f_code.co_filename, frame.tb_lineno).lstrip().startswith("raise ")
    )
    if stated and isinstance(error, documented):
        return None
    return Finding(f"{where}{type(error).__name__} from {place}", f"{str(error)[:160]} {detail}".strip())


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder; in memory where that is possible, because every save waits for the disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@contextmanager
def memory_limit(extra: int) -> Iterator[None]:
    """Refuse more than ``extra`` bytes of new address space to this process; without Linux's /proc, no limit."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(pages.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + extra, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def hostile_points(rng: Rng, least: float = _LEAST, most: float = _MOST) -> tuple[Array, Array]:
    """Few or many finite points (N, D) with labels (N,): ties, flat sets, duplicates, tiny classes, any magnitude.

    Args:
        rng: The random numbers.
        least: Power of ten of the smallest scale.
        most: Power of ten of the largest scale.
    """
    n = int(rng.choice([rng.integers(2, 8), rng.integers(8, 60), rng.integers(60, 150)]))
    d, classes = int(rng.integers(1, 6)), int(rng.choice([2, 2, 3, 5, 12]))
    y = rng.choice(classes, size=n, p=rng.dirichlet(np.full(classes, rng.choice([0.3, 3.0]))))
    x = _shape(rng, n, d) + rng.choice([0.0, 0.5, 3.0]) * rng.normal(size=(classes, d))[y]
    if rng.random() < 0.3:  # constant, equal, or dependent features
        j, k = rng.integers(0, d, size=2)
        x[:, j] = rng.choice([np.zeros(n), x[:, k], 2 * x.sum(axis=1)])
    if rng.random() < 0.3:  # repeated rows, also across classes
        x[rng.integers(0, n, size=n // 2)] = x[rng.integers(0, n)]
    with np.errstate(over="ignore"):  # clipped afterwards
        return _moved(rng, x, least, most), y


def _shape(rng: Rng, n: int, d: int) -> Array:
    kind = rng.choice(["normal", "lattice", "heavy tails", "line", "sphere"])
    x = rng.normal(size=(n, d))
    if kind == "lattice":
        return rng.integers(0, 4, size=(n, d)).astype(float)
    if kind == "heavy tails":
        return rng.standard_t(1.0, size=(n, d))
    if kind == "line":
        return x[:, :1] * np.ones(d)
    return x / np.linalg.norm(x, axis=1, keepdims=True) if kind == "sphere" else x


def _moved(rng: Rng, x: Array, least: float, most: float) -> Array:
    """The points with another scale and offset, finite."""
    kind = rng.choice(["as they are", "scale", "scales", "offset"])
    if kind == "scale":
        powers = rng.choice([rng.uniform(least, most), rng.uniform(least, least + 20), rng.uniform(most - 5, most)])
        x = x * 10.0**powers
    elif kind == "scales":
        x = x * 10.0 ** rng.uniform(least / 2, most / 2, size=x.shape[1])
    elif kind == "offset":
        x = x + rng.normal(size=x.shape[1]) * 10.0 ** rng.uniform(0, min(most, 18))
    return np.clip(x, -np.finfo(float).max, np.finfo(float).max)
