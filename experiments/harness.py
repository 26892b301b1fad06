"""What the experiment scripts share: where results go, what ran them, and timing side by side."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sepc_torch import __version__

RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parent / "figures"

T = TypeVar("T")


def arguments(description: str | None, *, solver: bool = False) -> argparse.ArgumentParser:
    """A parser with the options every script has; with ``solver``, also the one of those that partition."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small run that writes nothing, for CI")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random")
    if solver:
        parser.add_argument("--solver", default="native", help="native, or an installed cvxpy solver such as CLARABEL")
    return parser


def environment(*packages: str) -> dict[str, Any]:
    """Versions and machine, for the JSON."""
    names = ("numpy", "scipy", *packages)
    return {
        "sepc_torch": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        **{name: version(name) for name in names},
    }


def write_results(name: str, results: dict[str, Any]) -> Path:
    """Store one JSON for the script."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(results, indent=1, default=_plain) + "\n")
    return path


def cpu_time(function: Callable[[], T], repeats: int) -> tuple[float, T]:
    """The least CPU seconds over some repeats, and the last result."""
    best = np.inf
    for _ in range(repeats):
        begun = time.process_time()
        result = function()
        best = min(best, time.process_time() - begun)
    return float(best), result


def _plain(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"{value!r} does not go into JSON")
