"""Measure every stored result that is older than the sources again, one script after the other, and write the pages.

    SEPC_DATA=... python -m experiments.rerun          # a night on a CPU; make results does the same
    SEPC_DATA=... python -m experiments.rerun --gpu    # what needs a CUDA device
    python -m experiments.rerun --list                 # only show the commands

The output of a script goes to build/results. A script that fails keeps its stored result; the others go on, and the
exit code is 1. A run that was stopped goes on where it ended, since results on the present sources are left out.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from experiments.harness import RESULTS, SOURCES, load
from experiments.provenance import ROOT, Files, older, script_of, stamps

# Scripts that need a CUDA device, and their options there.
GPU = {
    "panel.openood": [],
    "serving.onnx_gpu": [],
    "solvers.bench_layers": ["--gpu"],
    "speed.bench_gpu": [],
    "speed.bench_head": ["--only", "gpu,fashion,exactness,layers"],
}
# Options of those that also measure on a CPU.
CPU: dict[str, list[str]] = {"solvers.bench_layers": [], "speed.bench_head": ["--only", "cpu,compile"]}


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


def run(lines: Iterable[str]) -> list[str]:
    """Run commands; return those that failed."""
    folder = ROOT / "build" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for line in lines:
        begun = time.perf_counter()
        print(f"{time.strftime('%H:%M')} {line}", flush=True)
        log = folder / f"{script_of(line)}.log"
        with log.open("w") as out:
            ended = subprocess.run([sys.executable, *shlex.split(line)[1:]], cwd=ROOT, stdout=out, stderr=out)
        if ended.returncode:
            failed.append(line)
        state = f"failed, see {log.relative_to(ROOT)}" if ended.returncode else "done"
        print(f"      {state} after {time.perf_counter() - begun:.0f} s", flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="run the scripts that need a CUDA device")
    parser.add_argument("--all", action="store_true", help="also renew results on the present sources")
    parser.add_argument("--list", action="store_true", help="show the commands and run nothing")
    options = parser.parse_args()
    results = {path.stem: load(path.stem) for path in sorted(RESULTS.glob("*.json"))}
    lines = commands(results, SOURCES, gpu=options.gpu, every=options.all)
    if options.list:
        print("\n".join(lines) or "All results were measured on the present sources.")
        return
    failed = run([*lines, "python -m experiments.report"])
    if failed:
        sys.exit(f"{len(failed)} of {len(lines) + 1} commands failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
