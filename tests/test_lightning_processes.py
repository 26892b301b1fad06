"""Tests of the callback in several processes and after a kill, as subprocesses with a time limit."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning_parts import Net, blobs, drifted, loader, quiet_trainer
from lightning_processes import FIT, judge_all

from sepc_torch import DriftMonitor, TrustHead, TrustMonitor
from sepc_torch.training.subsets import calibration_half

HERE = Path(__file__).parent
# Seconds; several times the duration on a busy machine. Without a limit a deadlock would last for ever.
LIMIT = 500
# Of the 31 validation samples, those that do not calibrate the head.
MEASURED = int((~calibration_half(torch.arange(31))).sum())


def run_script(name: str, folder: Path) -> str:
    """Run a part of ``lightning_processes.py`` and return what it wrote to the standard error."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "lightning_processes.py"), name, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def by_id(table: dict[str, list[Any]]) -> dict[int, dict[str, Any]]:
    return {row[0]: dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)}


@pytest.mark.slow
def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    """61, 30 and 23 samples on two processes: padding is dropped, and every sample has the values of one process."""
    L.seed_everything(2, verbose=False)
    watch, model = TrustMonitor("backbone", fit=FIT, max_cost=None), Net()
    trainer = quiet_trainer(watch, folder=tmp_path)
    trainer.fit(model, loader(blobs(150)), loader(blobs(61, 1)))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    again = TrustMonitor("backbone", fit=FIT, max_cost=None)
    alone = judge_all(quiet_trainer(again, folder=tmp_path), again, tmp_path / "one.ckpt")
    run_script("ddp", tmp_path)
    first, second = (read(tmp_path / f"rank{rank}.json") for rank in (0, 1))
    assert first == second, "the results are equal on every process"
    for stage, table in alone.items():
        other = by_id(first["stages"][stage])
        for name, row in by_id(table).items():
            # Batches of another size differ by rounding, which can move a p-value by a few ranks.
            ranked = {key: row.pop(key) for key in ("p_value", "reason") if key in row}
            same = {key: other[name][key] for key in row}
            assert same == pytest.approx(row, rel=1e-3, abs=1e-3)
            assert other[name]["p_value"] == pytest.approx(ranked["p_value"], abs=0.2)
            assert (other[name]["reason"] < 0) == (ranked["reason"] < 0)
        assert other.keys() == by_id(table).keys()
    assert sorted(alone["val"]["id"]) == list(range(61))
    for left in (40, 3, 1, 0):
        found = first[f"pool {left}"]
        assert found["pool"] == list(range(93 - left, 93))
        assert len(found["ids"]) == min(2, left)
        assert found["rows"] == 31, "counts are exact"
        assert found["n"] == MEASURED
    # Each process watches every other sample in a random order, and the states are merged.
    assert isinstance(watch.head, TrustHead)
    workers = [DriftMonitor(watch.head, seed=rank) for rank in (0, 1)]
    with torch.no_grad():
        z = model.eval().backbone(drifted(301).tensors[0])
        for rank, worker in enumerate(workers):
            mine = z[rank::2]
            mine = mine[torch.randperm(len(mine), generator=torch.Generator().manual_seed(rank))]
            worker.update(mine, model.classifier(mine))
    merged = workers[0].merge(workers[1]).report()
    assert (first["drift"]["seen"], first["drift"]["alarm"]) == (301, merged.alarm)
    assert merged.p_value < 0.1
    assert math.log(first["drift"]["p_value"]) == pytest.approx(math.log(merged.p_value), rel=0.05, abs=0.1)
    assert "OSError: disk full" in first["on_flag"]
    assert first["refit failures"] == 1, "a failure of the main process is known to all"
    assert {path.name.partition("-")[0] for path in (tmp_path / "flags").glob("*.csv")} == {"val", "test", "predict"}


@pytest.mark.slow
def test_spawned_processes_return_files(tmp_path: Path) -> None:
    run_script("spawn", tmp_path)
    found = read(tmp_path / "spawn.json")
    assert found["no_head"], "spawned processes do not return attributes; if they do now, update the docs"
    assert found["rows"] == 30
    assert found["metrics"]["trust/val_n"] == MEASURED
    assert {"monitor.pt", "val-epoch=0-step=3.csv", "test-epoch=0-step=3.csv"} == set(found["files"])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_run_resumes_without_losing_or_repeating_labels(tmp_path: Path) -> None:
    run_script("kill", tmp_path)
    found = read(tmp_path / "kill.json")
    # Number of rounds that must equal those of the uninterrupted run. Outer loop: all, because every round sets its
    # seed. In-fit loop: those in the last checkpoint, because Lightning shuffles with other random numbers after it.
    kept = {"outer": [4, 4, 4], "in-fit": [1, 2]}
    for name, rounds in kept.items():
        uninterrupted = found[f"{name} 0"]
        assert uninterrupted["ends"] == [0]
        for number, same in enumerate([4, *rounds]):
            again = found[f"{name} {number}"]
            assert again["ends"] == ([-9, 0] if number else [0])
            assert again["rounds"] == 4
            assert [again["round_of"].count(r) for r in range(5)] == [24, 6, 6, 6, 6], "no label is lost or repeated"
            for r in range(same + 1):
                ids = [
                    [i for i, round_of in enumerate(run["round_of"]) if round_of == r] for run in (again, uninterrupted)
                ]
                assert ids[0] == ids[1], f"{name} {number}, round {r}"


@pytest.mark.slow
def test_messages_and_warnings_are_seen_without_any_setting(tmp_path: Path) -> None:
    """No handler, level or filter is set, as in a user's script."""
    said = run_script("plain", tmp_path)
    assert "TrustMonitor: the embedding is the input of the submodule 'classifier'" in said
    assert "there is no validation loader; flags promise no rate" in said
