"""Shared parts of the experiment scripts: options, stored results with their stamp, and CPU timing."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Collection
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from provenance import read_sources, stamp, stamp_parts

from sepc_torch import __version__

RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parent / "figures"
# Read when the process starts: the stamp must name the sources that ran, even if somebody edits them meanwhile.
SOURCES = read_sources()

T = TypeVar("T")


def arguments(description: str | None, *, solver: bool = False) -> argparse.ArgumentParser:
    """A parser with the options of every script; ``solver`` adds the option of scripts that partition."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small run that writes nothing, for CI")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
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


def write_results(name: str, results: dict[str, Any], measured: Collection[str] = ()) -> Path:
    """Store the results of a script as JSON, with a stamp under ``measured``.

    The stamp says which command measured the numbers, when, and on which sources (``provenance.py``). Results with
    ``parts`` can be measured again in part; each part then has its own stamp.

    Args:
        name: The name of the file in results/, without its suffix.
        results: The numbers, with the documented ``command``.
        measured: The parts that this run measured, where results has ``parts``. The others keep their stored stamp.
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    results = json.loads(json.dumps(results, default=_plain))
    new = stamp(results["command"], SOURCES)
    if "parts" in results:
        before = json.loads(path.read_text()) if path.exists() else {}
        new = {"parts": stamp_parts(results["parts"], before, new, measured)}
    path.write_text(json.dumps({"command": results["command"], "measured": new} | results, indent=1) + "\n")
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
