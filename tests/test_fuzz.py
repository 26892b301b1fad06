"""The fault campaign: a planted fault is found, reported once and reproduced; equal seeds give equal cases."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from experiments.fuzz import campaign as fuzz
from experiments.fuzz import files as fuzz_files
from experiments.fuzz.checks import Finding, hostile_points, refused
from sepc_torch import partition

PLANTED = """
import os, signal
from experiments.fuzz.checks import Finding

def fails(rng):
    number = int(rng.integers(0, 3))
    return Finding("a planted fault", f"drew {number}\\n") if number else None

def dies(rng):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two targets with faults, in a module of their own, in place of the real ones; returns the folder for scripts."""
    (tmp_path / "planted_targets.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "planted_targets", raising=False)
    import planted_targets  # type: ignore[import-not-found]

    monkeypatch.setattr(fuzz, "TARGETS", {"fails": planted_targets.fails, "dies": planted_targets.dies})
    monkeypatch.setattr(fuzz_files, "originals", dict)
    return tmp_path / "findings"


@pytest.mark.slow
def test_a_planted_fault_is_found_and_its_script_reproduces_it(
    planted: Path, capfd: pytest.CaptureFixture[str], rng: np.random.Generator
) -> None:
    seed = str(rng.integers(0, 1000))
    assert fuzz.main(["--minutes", "0.02", "--only", "fails", "--seed", seed, "--out", str(planted)]) == 1
    line, total = capfd.readouterr().out.splitlines()  # one line, although many cases have the fault
    assert re.fullmatch(rf"fails seed=\[{seed}, \d+, \d+\]: a planted fault \| drew [12]\\n", line)
    assert "1 different faults" in total
    again = subprocess.run([sys.executable, str(planted / "finding_0001.py")], capture_output=True, text=True)
    assert (again.stdout.strip(), again.returncode) == (line, 1), again.stderr


@pytest.mark.slow
def test_a_crash_is_a_finding_and_a_smoke_run_does_not_fail(planted: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--smoke", "--only", "dies"]) == 0
    assert "the process dies with SIGKILL" in capfd.readouterr().out
    assert not planted.exists()


def test_an_unknown_target_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fuzz.main(["--only", "nothing"])
    assert "unknown part 'nothing'" in capsys.readouterr().err


@pytest.mark.slow
def test_equal_seeds_give_equal_cases(planted: Path, rng: np.random.Generator) -> None:
    del planted
    seed = int(rng.integers(0, 1000))
    first, second = (list(fuzz.campaign(["fails"], seed, 600.0, most=60)) for _ in range(2))
    assert len(first) == 60
    assert first == second
    assert any(first)
    assert not all(first)


def test_hostile_points_are_finite_and_repeatable(rng: np.random.Generator) -> None:
    seed = int(rng.integers(0, 1000))
    for case in range(50):
        (x, y), (again, labels) = (hostile_points(np.random.default_rng([seed, case])) for _ in range(2))
        assert np.isfinite(x).all()
        assert (x.tobytes(), y.tobytes()) == (again.tobytes(), labels.tobytes())


def stated() -> None:
    partition([[0.0], [np.nan]], [0, 1])


@pytest.mark.parametrize(
    ("call", "documented", "deliberate"),
    [
        (stated, ValueError, True),
        (stated, TypeError, False),  # another class than the documented one
        (lambda: int("x"), ValueError, False),  # an error that Python raised
    ],
)
def test_only_deliberate_documented_errors_are_accepted(
    call: Callable[[], None], documented: type[Exception], deliberate: bool
) -> None:
    with pytest.raises(ValueError, match=r"NaN|invalid literal") as caught:
        call()
    found = refused(caught.value, documented)
    assert (found is None) == deliberate
    assert found is None or isinstance(found, Finding)
