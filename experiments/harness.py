"""Shared parts of the experiment scripts: options, stored results with their stamp, and CPU timing."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Collection, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import numpy as np
import torch

from experiments.provenance import ROOT, read_sources, running, stamp, stamp_parts
from sepc_torch import __version__

RESULTS, FIGURES = (ROOT / "experiments" / name for name in ("results", "figures"))
# Read when the process starts: the stamp must name the sources that ran, even if somebody edits them meanwhile.
SOURCES = read_sources()
BEGUN = time.perf_counter()

T = TypeVar("T")


def arguments(
    description: str | None, *, solver: bool = False, jobs: bool = False, parts: Collection[str] = ()
) -> argparse.ArgumentParser:
    """A parser with the options of every script.

    Args:
        description: The docstring of the script.
        solver: Whether to add the option of scripts that partition.
        jobs: Whether to add the number of processes.
        parts: Names of parts that can be measured alone, for the option ``--only``.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small run that writes nothing, for CI")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    if solver:
        parser.add_argument("--solver", default="native", help="native, or an installed cvxpy solver such as CLARABEL")
    if jobs:
        parser.add_argument("--jobs", type=int, default=1, help="number of processes")

    def chosen(text: str) -> list[str]:
        if unknown := sorted(set(text.split(",")) - set(parts)):
            raise argparse.ArgumentTypeError(f"unknown part {unknown[0]!r}; choose from {', '.join(parts)}")
        return text.split(",")

    if parts:
        parser.add_argument("--only", type=chosen, default=list(parts), help=f"some of {','.join(parts)}")
    return parser


def environment(*packages: str) -> dict[str, Any]:
    """Versions and machine, for the JSON; None for a package that is not installed."""
    names = ("numpy", "scipy", *packages)
    return {
        "sepc_torch": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        **{name: _version(name) for name in names},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def load(name: str) -> dict[str, Any]:
    """The stored results of a script; empty if there are none."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write_results(
    name: str,
    options: argparse.Namespace,
    packages: Sequence[str],
    results: dict[str, Any],
    measured: Collection[str] = (),
) -> None:
    """Store the results of the running script as JSON, with seed, seconds, versions, and a stamp under ``measured``.

    The stamp says which command measured the numbers, when, and on which sources (``provenance.py``). Results with
    ``parts`` can be measured again in part; each part then has its own stamp.

    Args:
        name: The name of the file in results/, without its suffix.
        options: The options of the script.
        packages: Packages whose versions matter, besides NumPy and SciPy.
        results: The numbers.
        measured: The parts that this run measured, where results has ``parts``. The others keep their stored stamp.
    """
    RESULTS.mkdir(exist_ok=True)
    about = {key: value for key, value in vars(options).items() if key in ("seed", "solver")}
    about |= {"environment": environment(*packages), "seconds": time.perf_counter() - BEGUN}
    results = json.loads(json.dumps(about | results, default=_plain))
    new = stamp(running(), SOURCES)
    if "parts" in results:
        new = {"parts": stamp_parts(results["parts"], load(name), new, measured)}
    (RESULTS / f"{name}.json").write_text(json.dumps({"measured": new} | _seven_digits(results), indent=0) + "\n")
    print(f"written: {name}.json", flush=True)


def write_part(name: str, options: argparse.Namespace, packages: Sequence[str], part: str, found: Any) -> None:
    """Store one part of the results with its environment; the other parts stay as they are."""
    parts = load(name).get("parts", {}) | {part: {"environment": environment(*packages), **found}}
    write_results(name, options, packages, {"parts": parts}, [part])


def cpu_time(function: Callable[[], T], repeats: int) -> tuple[float, T]:
    """The least CPU seconds over some repeats, and the last result."""
    best = np.inf
    for _ in range(repeats):
        begun = time.process_time()
        result = function()
        best = min(best, time.process_time() - begun)
    return float(best), result


def wall_time(function: Callable[[], T], repeats: int) -> tuple[list[float], T]:
    """Seconds of each repeat from the call to the result, host and device together, and the last result."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else bool
    times = []
    for _ in range(repeats):
        synchronize()
        begun = time.perf_counter()
        result = function()
        synchronize()
        times.append(time.perf_counter() - begun)
    return times, result


def _plain(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"{value!r} does not go into JSON")


def _seven_digits(value: Any) -> Any:
    """The numbers of a result with seven significant digits, which is more than any page prints."""
    if isinstance(value, dict):
        return {key: _seven_digits(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_seven_digits(part) for part in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value
