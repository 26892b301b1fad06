r"""Fault campaign: random hostile inputs against the promises of the library.

The script draws inputs, files and commands that a careless or hostile user could give, and checks what the
documentation promises. Each fault prints one line and writes a script that reproduces it alone, ``finding_0001.py``; a
fault that occurs again is only counted. The exit code is 1 if there are findings. With ``--smoke`` it is 0, because
open faults must not stop an unrelated change.

========= =============================================================================================================
target    promise
========= =============================================================================================================
partition finite ellipsoids that cover their classes and hold few points of others, for every order of rows, or an error
head      finite or documented values; equal after saving and loading, for every batch size and dtype
layers    finite gradients, or an error
files     a damaged file is refused in 2 s and 200 MB; saving leaves no trace but the file
cli       one-line errors, no partial output, no control characters, no formulas
pool      concurrent or killed writers lose no label and double none; unclear annotations are refused
========= =============================================================================================================

Case n of a target depends on the seed, the target and n only. Every case runs in its own process with a limit of CPU
time, so that a crash is a finding too. The script needs ``os.fork``.

Command: ``python -m experiments.fuzz.campaign --minutes 10 --seed 0``
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import resource
import select
import signal
import sys
import tempfile
import textwrap
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from experiments.fuzz import commands, files, models
from experiments.fuzz.checks import Finding, Rng
from experiments.harness import arguments
from experiments.provenance import ROOT

Target = Callable[[Rng], Finding | None]

TARGETS: dict[str, Target] = {
    "partition": models.partition_target,
    "head": models.head_target,
    "layers": models.layers_target,
    "files": files.files_target,
    "cli": commands.cli_target,
    "pool": files.pool_target,
}
# Seconds of each target in a smoke run.
_SMOKE = 3.0
# No case needs more than a few seconds. Wall time only ends a case that waits for something.
_CPU_SECONDS, _WALL_SECONDS = 60, 300


class Found(NamedTuple):
    """A finding with the target and the seed that reproduce it."""

    target: str
    seed: list[int]
    finding: Finding

    def __str__(self) -> str:
        text = f"{self.target} seed={self.seed}: {self.finding.fault} | {self.finding.detail}"
        # Details may quote hostile input: keep them on one line of printable characters.
        return text.encode("unicode_escape").decode()


def run_case(target: Target, seed: Sequence[int]) -> Finding | None:
    """Run one case in a process of its own; a process that dies or hangs is a finding."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(target, seed, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        ready = select.select([pipe], [], [], _WALL_SECONDS)[0]
        if not ready:
            os.killpg(child, signal.SIGKILL)
        data = pipe.read() if ready else b""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # processes that the case left behind
    if not ready:
        return Finding("hangs", f"no answer within {_WALL_SECONDS} s")
    if code == -signal.SIGXCPU:
        return Finding("takes too long", f"more than {_CPU_SECONDS} s of CPU time")
    if code or not data:
        return Finding(f"the process dies with {signal.Signals(-code).name if code < 0 else code}")
    found: Finding | str | None = pickle.loads(data)
    if isinstance(found, str):
        raise RuntimeError(f"The target itself failed for the seed {list(seed)}:\n{found}")
    return found


def _answer(target: Target, seed: Sequence[int], writer: int) -> None:
    """Run the target in the forked process, write its pickled finding to the pipe, and end the process."""
    import traceback

    os.setpgid(0, 0)
    signal.alarm(_WALL_SECONDS + 5)  # ends a case that hangs even if the campaign itself was killed
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS + 5))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    found: Finding | str | None
    try:
        found = target(np.random.default_rng(list(seed)))
    except BaseException:
        found = traceback.format_exc()  # a bug of the target: targets catch what the library raises
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(pickle.dumps(found))
    os._exit(0)


def campaign(names: Sequence[str], seed: int, seconds: float, most: int | None = None) -> Iterator[Found | None]:
    """Run cases of the targets, with equal time for each, and yield what each case found.

    Args:
        names: Keys of ``TARGETS``.
        seed: The first part of the seed of every case.
        seconds: Seconds for all targets together.
        most: Largest number of cases of a target.
    """
    used = dict.fromkeys(names, 0.0)
    cases = dict.fromkeys(names, 0)
    while True:
        open_targets = [name for name in names if used[name] < seconds / len(names) and cases[name] != most]
        if not open_targets:
            return
        name = min(open_targets, key=used.__getitem__)
        case = [seed, zlib.crc32(name.encode()), cases[name]]
        begun = time.perf_counter()
        finding = run_case(TARGETS[name], case)
        used[name] += time.perf_counter() - begun
        cases[name] += 1
        yield None if finding is None else Found(name, case, finding)


def write_script(path: Path, found: Found) -> None:
    """Write a script that runs the one case again; it exits with 1 if the fault is still there."""
    target = TARGETS[found.target]
    folders = [str(ROOT), str(Path(inspect.getfile(target)).resolve().parent)]
    path.write_text(
        textwrap.dedent(
            f'''\
            """Reproduces one finding. To debug it: {target.__name__}(np.random.default_rng(SEED)), in this process."""

            import sys

            sys.path[:0] = {folders}
            import numpy as np
            from experiments.fuzz.campaign import Found, run_case
            from {target.__module__} import {target.__name__}

            SEED = {found.seed}
            finding = run_case({target.__name__}, SEED)
            print("nothing found" if finding is None else Found({found.target!r}, SEED, finding))
            sys.exit(finding is not None)
            '''
        )
    )


def main(given: Sequence[str] | None = None) -> int:
    """Run the campaign and return the exit code."""
    parser = arguments(__doc__, parts=TARGETS)
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes for all targets together")
    parser.add_argument("--out", type=Path, help="folder for the scripts; by default a temporary one")
    options = parser.parse_args(given)
    names = options.only
    torch.set_num_threads(1)  # a process with OpenMP threads cannot be forked
    files.originals()  # made, and its modules imported, once before the fork instead of in every case
    seconds = _SMOKE * len(names) if options.smoke else 60.0 * options.minutes
    times: Counter[tuple[str, str]] = Counter()
    folder: Path | None = options.out
    cases = 0
    for found in campaign(names, options.seed, seconds):
        cases += 1
        if found is None:
            continue
        times[found.target, found.finding.fault] += 1
        if times[found.target, found.finding.fault] > 1:
            continue
        print(found, flush=True)
        if not options.smoke:
            folder = folder or Path(tempfile.mkdtemp(prefix="findings_"))
            folder.mkdir(parents=True, exist_ok=True)
            write_script(folder / f"finding_{len(times):04d}.py", found)
    where = "" if folder is None or not times else f"; scripts in {folder}"
    print(f"{cases} cases, {len(times)} different faults in {times.total()} of them{where}")
    return 1 if times and not options.smoke else 0


if __name__ == "__main__":
    sys.exit(main())
