"""Multi-process runs for test_lightning_processes.py: ``python lightning_processes.py NAME FOLDER``."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_parts import Net, blobs, drifted, loader, quiet_trainer

from sepc_torch import LabelPool, PoolDataModule, TrustMonitor
from sepc_torch.training.trust_table import TrustTable

FIT = {"dim": 3}
SEED = 4


def plain(table: TrustTable) -> dict[str, Any]:
    """A table as a dictionary for JSON, which preserves floats exactly."""
    return {"id": list(table.ids), **{name: column.tolist() for name, column in table.columns.items()}}


def judge_all(trainer: L.Trainer, watch: TrustMonitor, checkpoint: Path) -> dict[str, Any]:
    """Validate, test and predict with the weights and head of a checkpoint, on 61, 30 and 23 samples."""
    model = Net()
    trainer.validate(model, loader(blobs(61, 1)), ckpt_path=checkpoint, verbose=False)
    trainer.test(model, loader(blobs(30, 2)), ckpt_path=checkpoint, verbose=False)
    trainer.predict(model, loader(blobs(23, 3)), ckpt_path=checkpoint, return_predictions=False)
    return {name: plain(table) for name, table in watch.scores.items()}


def fit_pool(trainer: L.Trainer, watch: TrustMonitor, left: int) -> dict[str, Any]:
    """Fit with ``left`` unlabelled samples and query two."""
    L.seed_everything(SEED, verbose=False)
    pool = LabelPool(blobs(93), labelled=range(93 - left))
    trainer.fit(Net(), datamodule=PoolDataModule(pool, val=blobs(31, 1), batch_size=16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the pool may be smaller than the query
        ids = watch.query(2)
    pool.label(ids)
    numbers = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "ids": ids,
        "labelled": pool.labelled_ids.tolist(),
        "pool": sorted(watch.scores["pool"].ids),
        "rows": len(watch.scores["val"]),
        "n": numbers["trust/val_n"],
        "mean": numbers["trust/head_val_trust"],
        "step": watch.fit_step,
    }


def run_ddp(folder: Path) -> None:
    """Stages, pools of several sizes, and errors on two processes; each process writes its results to a file."""
    options: dict[str, Any] = {"devices": 2, "strategy": "ddp", "folder": folder}
    watch = TrustMonitor("backbone", max_cost=None, fit=FIT, dirpath=folder / "flags")
    trainer = quiet_trainer(watch, **options)
    found: dict[str, Any] = {"stages": judge_all(trainer, watch, folder / "one.ckpt")}
    trainer.predict(Net(), loader(drifted(301)), ckpt_path=folder / "one.ckpt", return_predictions=False)
    assert watch.drift is not None
    found["drift"] = {"seen": watch.drift.seen, "alarm": watch.drift.alarm, "p_value": watch.drift.p_value}
    for left in (40, 3, 1, 0):
        watch = TrustMonitor("backbone", max_cost=None, fit=FIT)
        found[f"pool {left}"] = fit_pool(quiet_trainer(watch, max_epochs=1, **options), watch, left)
    watch = TrustMonitor("backbone", fit=FIT, on_flag=fail)
    try:
        fit_pool(quiet_trainer(watch, max_epochs=1, **options), watch, 3)
    except RuntimeError as error:
        found["on_flag"] = str(error)
    watch = TrustMonitor("backbone", fit=fail)
    quiet_trainer(watch, max_epochs=1, **options).fit(Net(), loader(blobs(93)), loader(blobs(31, 1)))
    found["refit failures"] = watch._failures
    rank = os.environ.get("LOCAL_RANK", "0")
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def fail(*_: Any) -> Any:
    raise OSError("disk full")


def run_spawn(folder: Path) -> None:
    """Fit in spawned processes, which return files only; the main process reads the head from them."""
    watch, model = TrustMonitor("backbone", max_cost=None, fit=FIT, dirpath=folder / "flags"), Net()
    trainer = quiet_trainer(watch, devices=2, strategy="ddp_spawn", max_epochs=1, folder=folder)
    trainer.fit(model, loader(blobs(93)), loader(blobs(31, 1)))
    before = watch.head is None
    quiet_trainer(watch, folder=folder).test(model, loader(blobs(30, 2)), verbose=False)
    found = {
        "no_head": before,
        "rows": len(watch.scores["test"]),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "files": sorted(path.name for path in (folder / "flags").iterdir()),
    }
    (folder / "spawn.json").write_text(json.dumps(found))


def run_plain(folder: Path) -> None:
    """Fit without validation data; the embedding is found."""
    quiet_trainer(TrustMonitor(fit=FIT), max_epochs=1, folder=folder).fit(Net(), loader(blobs(60)))


def outer_loop(folder: Path, die: tuple[str, int] | None) -> None:
    """Four rounds with new weights; the record of the pool is saved before the next round begins."""

    def reached(point: str) -> None:
        if die == (point, pool.rounds):
            os.kill(os.getpid(), signal.SIGKILL)

    pool = LabelPool(blobs(120), labelled=range(24))
    if (folder / "pool.safetensors").exists():
        pool.restore(folder / "pool.safetensors")
    while pool.rounds < 4:
        L.seed_everything(SEED + pool.rounds, verbose=False)
        watch = TrustMonitor("backbone", fit={"dim": 2})
        data = PoolDataModule(pool, val=blobs(20, 1), batch_size=16)
        reached("before")
        quiet_trainer(watch, max_epochs=1, folder=folder).fit(Net(), data)
        ids = watch.query(6)
        reached("asked")
        pool.label(ids)
        reached("before saving")
        pool.save(folder / "pool.safetensors")


def in_fit_loop(folder: Path, die: tuple[str, int] | None) -> None:
    """One run of eight epochs that labels after every second epoch, with a checkpoint after each epoch."""
    L.seed_everything(SEED, verbose=False)
    pool = LabelPool(blobs(120), labelled=range(24))
    watch = TrustMonitor("backbone", fit={"dim": 2})

    class Ask(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch % 2 == 1:
                pool.label(watch.query(6))
                if die == ("asked", trainer.current_epoch):
                    os.kill(os.getpid(), signal.SIGKILL)

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if die == ("training", trainer.current_epoch):
                os.kill(os.getpid(), signal.SIGKILL)

    saver = ModelCheckpoint(folder, filename="each", save_last=True, every_n_epochs=1)
    trainer = quiet_trainer(
        watch, Ask(), saver, folder=folder, max_epochs=8, enable_checkpointing=True, reload_dataloaders_every_n_epochs=1
    )
    last = folder / "last.ckpt"
    trainer.fit(Net(), PoolDataModule(pool, val=blobs(20, 1), batch_size=16), ckpt_path=last if last.exists() else None)
    pool.save(folder / "pool.safetensors")


def run_kill(folder: Path) -> None:
    """Both loops, killed at several points and restarted, and once without interruption for comparison.

    Children are forked, so that Lightning is imported once.
    """
    plans: dict[str, tuple[Any, list[tuple[str, int]]]] = {
        "outer": (outer_loop, [("before", 1), ("asked", 2), ("before saving", 2)]),
        "in-fit": (in_fit_loop, [("training", 3), ("asked", 5)]),
    }
    found: dict[str, Any] = {}
    for name, (loop, points) in plans.items():
        for number, point in enumerate([None, *points]):
            place = folder / f"{name} {number}"
            place.mkdir()
            ends = [] if point is None else [in_child(loop, place, point)]
            ends.append(in_child(loop, place, None))
            pool = LabelPool(blobs(120))
            pool.restore(place / "pool.safetensors")
            found[f"{name} {number}"] = {"ends": ends, "round_of": pool.round_of.tolist(), "rounds": pool.rounds}
    (folder / "kill.json").write_text(json.dumps(found))


def in_child(loop: Any, place: Path, die: tuple[str, int] | None) -> int:
    """Run a loop in a forked process; returns 0, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            loop(place, die)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads do not survive a fork
    if sys.argv[1] != "plain":
        warnings.simplefilter("ignore")
    {"ddp": run_ddp, "spawn": run_spawn, "kill": run_kill, "plain": run_plain}[sys.argv[1]](Path(sys.argv[2]))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # the other process may still communicate with this one
    sys.stderr.flush()
    # Exit without cleanup: Gloo's threads sometimes outlive the interpreter, and a signal would end the process.
    os._exit(0)
