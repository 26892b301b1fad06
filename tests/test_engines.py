"""A scorer inside Dask, with a worker that is killed, and inside Ray Data: every row once, with the same decisions."""

from __future__ import annotations

import subprocess
import sys

import pytest

from experiments.provenance import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_engines_score_every_row_once(engine: str) -> None:
    """In a fresh process, which ends the processes of the engine with it."""
    pytest.importorskip({"dask": "distributed"}.get(engine, engine), reason=f"needs {engine}")
    command = [sys.executable, "-m", "experiments.serving.engines", "--engine", engine, "--rows", "10000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'rows': 10000, 'lost': 0, 'twice': 0, 'different': 0" in done.stdout, done.stdout
