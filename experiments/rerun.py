"""Measure every stored result that is older than the sources again, one script after the other, and write the pages.

    SEPC_DATA=... python -m experiments.rerun          # a night on a CPU; make results does the same
    SEPC_DATA=... python -m experiments.rerun --gpu    # what needs a CUDA device
    python -m experiments.rerun --list                 # only show the commands
    make results ARGS="--jobs 16"                      # several scripts at a time

The output of a script goes to build/results. A script that fails keeps its stored result; the others go on, and the
exit code is 1. A run that was stopped goes on where it ended, since results on the present sources are left out.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from experiments.harness import RESULTS, SOURCES, load
from experiments.provenance import ROOT, Files, older, script_of, stamps

# Scripts that need a CUDA device, and their options there.
GPU = {
    "panel.openood": [],
    "serving.onnx_gpu": [],
    "solvers.bench_layers": ["--gpu"],
    "speed.bench_classes": ["--only", "cores,imagenet,solver"],
    "speed.bench_gpu": [],
    "speed.bench_head": ["--only", "gpu,fashion,exactness,layers"],
}
# Options of those that also measure on a CPU.
CPU: dict[str, list[str]] = {
    "solvers.bench_layers": [],
    "speed.bench_classes": ["--only", "clinc,hundred,growth,rest"],
    "speed.bench_head": ["--only", "cpu,compile"],
}
# Beginnings of the names of scripts that publish times: nothing may run beside them.
TIMED = ("speed.", "serving.", "solvers.", "paper.adult", "paper.complexity", "paper.peers", "panel.head_defaults")


def commands(results: Mapping[str, Mapping[str, Any]], files: Files, *, gpu: bool, every: bool = False) -> list[str]:
    """The commands that renew stored results, each script once.

    Args:
        results: Stored results by name.
        files: The present sources.
        gpu: Whether to measure what needs a CUDA device, or everything else.
        every: Also renew results on the present sources.
    """
    wanted = {
        script_of(stamp["command"]): None
        for result in results.values()
        for stamp in stamps(dict(result)).values()
        if every or older(stamp, files)
    }
    scripts = [script for script in wanted if (script in GPU if gpu else script in CPU or script not in GPU)]
    options = GPU if gpu else CPU
    return [shlex.join(["python", "-m", f"experiments.{name}", *options.get(name, [])]) for name in sorted(scripts)]


def run(lines: Iterable[str], jobs: int = 1, *, one_thread: bool = True) -> list[str]:
    """Run commands, at most ``jobs`` at a time; return those that failed.

    Scripts that publish times run after the others, one after the other. With ``one_thread`` each script has one:
    libraries of linear algebra spend more time on small matrices with several.
    """
    environ = {**os.environ, "OMP_NUM_THREADS": "1"} if one_thread else None
    folder = ROOT / "build" / "results"
    folder.mkdir(parents=True, exist_ok=True)

    def failed(line: str) -> bool:
        begun = time.perf_counter()
        print(f"{time.strftime('%H:%M')} {line}", flush=True)
        log = folder / f"{script_of(line)}.log"
        with log.open("w") as out:
            command = [sys.executable, *shlex.split(line)[1:]]
            ended = subprocess.run(command, cwd=ROOT, env=environ, stdout=out, stderr=out)
        state = f"failed, see {log.relative_to(ROOT)}" if ended.returncode else "done"
        print(f"      {script_of(line)} {state} after {time.perf_counter() - begun:.0f} s", flush=True)
        return bool(ended.returncode)

    beside: list[str] = []
    alone: list[str] = []
    for line in lines:
        (alone if jobs == 1 or script_of(line).startswith(TIMED) else beside).append(line)
    with ThreadPoolExecutor(jobs) as pool:
        states = list(pool.map(failed, beside))
    states += [failed(line) for line in alone]
    return [line for line, bad in zip([*beside, *alone], states, strict=True) if bad]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="run the scripts that need a CUDA device")
    parser.add_argument("--all", action="store_true", help="also renew results on the present sources")
    parser.add_argument("--list", action="store_true", help="show the commands and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="scripts that run at a time; those with times run alone")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    results = {path.stem: load(path.stem) for path in sorted(RESULTS.glob("*.json"))}
    lines = commands(results, SOURCES, gpu=options.gpu, every=options.all)
    if options.list:
        print("\n".join(lines) or "All results were measured on the present sources.")
        return
    # Some scripts for a GPU compare with methods that use all cores.
    failed = run(lines, options.jobs, one_thread=not options.gpu) + run(["python -m experiments.report"])
    if failed:
        sys.exit(f"{len(failed)} of {len(lines) + 1} commands failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
