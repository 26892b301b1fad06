"""Tests of pools, queries and both active-learning loops in a Trainer."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning_parts import CLASSES, Net, blobs, fitted, loader, monitor, quiet_trainer

from sepc_torch import LabelPool, PoolDataModule, TrustHead
from sepc_torch.training.lightning import MisconfigurationException

Rng = np.random.Generator

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    # The warning about small classes is expected: the tests fit heads to few samples, to be fast.
    pytest.mark.filterwarnings("ignore:Classes with fewer than:UserWarning"),
    pytest.mark.filterwarnings("ignore:TrustMonitor. the head is not calibrated:UserWarning"),  # few samples are fast
]


class TestPool:
    def test_a_query_is_from_the_pool(self, tmp_path: Path) -> None:
        pool = LabelPool(blobs(200), labelled=range(60))
        watch, model = monitor(pool=pool), Net()
        run = quiet_trainer(watch, folder=tmp_path)
        run.fit(model, datamodule=PoolDataModule(pool, val=blobs(61, 1), batch_size=16))
        assert sorted(watch.scores["pool"].ids) == list(range(60, 200))
        assert "target" not in watch.scores["pool"].columns, "the labels of the pool are hidden"
        ids = watch.query(10)
        assert ids == watch.query(10)
        assert len(set(ids)) == 10
        assert min(ids) >= 60
        assert run.callback_metrics["trust/pool_n"] == 140
        assert "p_value" in watch.scores["pool"].columns, "the pool is scored after the calibration"
        answer, table = watch.stop_at(error=0.5), watch.scores["val"]
        used = table.where(~table.columns["calibrates"] & (table.columns["reason"] < 0))
        assert answer.points == len(used)
        assert answer.errors == int((used.columns["network_label"] != used.columns["target"]).sum())
        assert answer.stop == (answer.bound <= 0.5)
        with pytest.warns(UserWarning, match="fewer than the 999"):
            assert sorted(watch.query(999)) == list(range(60, 200))
        with pytest.raises(ValueError, match="k must be an integer of at least 1"):
            watch.query(0)

    @pytest.mark.parametrize("as_loader", [False, True])
    def test_a_query_leaves_out_labelled_samples(self, tmp_path: Path, as_loader: bool) -> None:
        pool = LabelPool(blobs(80), labelled=range(60))
        watch = monitor(pool=loader(pool.pool()) if as_loader else None)
        data = PoolDataModule(pool, val=blobs(20, 1), batch_size=16)
        quiet_trainer(watch, folder=tmp_path, max_epochs=1).fit(Net(), datamodule=data)
        first = watch.query(8)
        pool.label(first)
        second = watch.query(8)
        assert len(set(first) | set(second)) == 16
        pool.label(second)
        with pytest.warns(UserWarning, match="The pool has 4 samples, fewer than the 8"):
            pool.label(watch.query(8))
        assert watch.query(8) == []
        assert len(pool.pool_ids) == 0

    @pytest.mark.slow
    def test_the_end_of_a_fit_scores_the_pool_once(self, tmp_path: Path) -> None:
        steps: list[int] = []
        pool = LabelPool(blobs(90), labelled=range(60))
        watch = monitor(on_flag=lambda run, stage, _: steps.append(run.global_step) if stage == "pool" else None)
        run = quiet_trainer(watch, folder=tmp_path, max_epochs=3)
        run.fit(Net(), datamodule=PoolDataModule(pool, val=blobs(20, 1), batch_size=16))
        assert watch.n_refits == 3
        assert steps == [run.global_step]
        watch.query(3)
        assert len(steps) == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("max_cost", [None, 1e-9])
    def test_a_query_during_a_fit_scores_the_pool_with_the_current_weights(
        self, tmp_path: Path, max_cost: float | None
    ) -> None:
        pool = LabelPool(blobs(90), labelled=range(60))
        refits: list[int] = []

        class Ask(L.Callback):
            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                if trainer.current_epoch != 1:
                    return
                assert watch.query(3) == watch.query(3)
                assert watch.fit_step == trainer.global_step
                refits.append(watch.n_refits)
                rows = watch._pool_scores.rows
                assert rows is not None
                x = torch.stack([pool.dataset[i][0] for i in rows["id"].tolist()])
                with torch.no_grad():
                    assert torch.allclose(rows["emb"], pl_module.eval().backbone(x), atol=1e-5)
                pl_module.train()

        watch = monitor(refit_every_n_epochs=100, max_cost=max_cost)
        run = quiet_trainer(watch, Ask(), folder=tmp_path, max_epochs=3)
        run.fit(Net(), datamodule=PoolDataModule(pool, val=blobs(61, 1), batch_size=16))
        first = 0 if max_cost else 1  # the first validation waits for the budget
        assert refits == [first + 1]
        assert watch.n_refits == first + 2
        assert watch._fitting is None

    def test_an_early_stop_scores_the_pool(self, tmp_path: Path) -> None:
        class Halt(L.Callback):
            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                trainer.should_stop = True

        pool = LabelPool(blobs(90), labelled=range(60))
        watch = monitor()
        run = quiet_trainer(watch, Halt(), folder=tmp_path, max_epochs=3)
        run.fit(Net(), datamodule=PoolDataModule(pool, val=blobs(61, 1), batch_size=16))
        assert run.current_epoch == 1
        assert watch._pool_scores.step == run.global_step
        assert len(watch.query(3)) == 3

    def test_nothing_labelled(self, tmp_path: Path) -> None:
        data = PoolDataModule(LabelPool(blobs(30)), val=blobs(20, 1), batch_size=16)
        with pytest.raises(MisconfigurationException, match="The pool has no labelled samples"):
            quiet_trainer(monitor(), folder=tmp_path).fit(Net(), datamodule=data)

    @pytest.mark.slow
    def test_no_pool(self, tmp_path: Path) -> None:
        watch, _, _ = fitted(tmp_path)
        with pytest.raises(MisconfigurationException, match="no scores of a pool"):
            watch.query(3)
        with pytest.raises(MisconfigurationException, match="no labelled validation samples to bound"):
            monitor().stop_at(error=0.1)

    @pytest.mark.slow
    @pytest.mark.parametrize("left", [0, 1, 3])
    def test_small_pools(self, tmp_path: Path, left: int) -> None:
        pool = LabelPool(blobs(90), labelled=range(90 - left))
        watch = monitor()
        run = quiet_trainer(watch, folder=tmp_path)
        run.fit(Net(), datamodule=PoolDataModule(pool, val=blobs(61, 1), batch_size=16))
        assert run.callback_metrics["trust/pool_n"] == left
        if left > 1:
            assert len(watch.query(2)) == 2
        if left == 0:
            assert watch.query(2) == []
            assert watch.scores["pool"]["trust"] == []
            watch.flagged["pool"].to_csv(tmp_path / "none.csv")
            assert (tmp_path / "none.csv").read_text() == (
                "id,network_label,network_trust,network_margin,reason,trust,label,rule,distance,margin\n"
            )

    def test_max_pool_scores_a_subset(self, tmp_path: Path) -> None:
        pool = LabelPool(blobs(200), labelled=range(60))
        seen: list[set[Any]] = []
        watch = monitor(pool=pool, on_flag=lambda *_: None)
        watch.max_pool = 30
        for _ in range(2):
            quiet_trainer(watch, folder=tmp_path, max_epochs=len(seen) + 1).fit(
                Net(), datamodule=PoolDataModule(pool, val=blobs(20, 1), batch_size=16)
            )
            seen.append(set(watch.scores["pool"].ids))
        assert all(len(ids) == 30 and min(ids) >= 60 for ids in seen)
        assert seen[0] != seen[1], "the subset depends on the step"

    @pytest.mark.slow
    def test_outer_loop(self, tmp_path: Path) -> None:
        """New weights and a new Trainer in every round, as in benchmarks."""
        pool = LabelPool(blobs(200), labelled=range(30))
        for _ in range(3):
            watch = monitor(pool=pool, fit={"dim": 2})
            data = PoolDataModule(pool, val=blobs(20, 1), batch_size=16)
            quiet_trainer(watch, folder=tmp_path).fit(Net(), datamodule=data)
            pool.label(watch.query(10))
        assert pool.rounds == 3
        assert len(pool.labelled_ids) == 60
        assert pool.round_of[pool.labelled_ids].bincount().tolist() == [30, 10, 10, 10]

    @pytest.mark.slow
    def test_in_fit_loop(self, tmp_path: Path) -> None:
        """The training set grows within one run."""
        pool = LabelPool(blobs(200), labelled=range(30))
        sizes = []

        class Ask(L.Callback):
            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                sizes.append(len(trainer.train_dataloader.dataset))
                if trainer.current_epoch % 2 == 1:
                    pool.label(watch.query(20))

        watch = monitor(pool=pool, fit={"dim": 2})
        run = quiet_trainer(watch, Ask(), folder=tmp_path, max_epochs=6, reload_dataloaders_every_n_epochs=1)
        run.fit(Net(), datamodule=PoolDataModule(pool, val=blobs(61, 1), batch_size=16))
        assert sizes == [30, 30, 50, 50, 70, 70]
        run.save_checkpoint(tmp_path / "x.ckpt")
        again = LabelPool(blobs(200), labelled=range(30))
        data = PoolDataModule(again, test=blobs(30, 4), batch_size=16)
        quiet_trainer(monitor(), folder=tmp_path).test(Net(), data, ckpt_path=tmp_path / "x.ckpt", verbose=False)
        assert torch.equal(again.round_of, pool.round_of), "the checkpoint holds the record"

    @pytest.mark.slow
    def test_an_older_checkpoint_removes_no_label(self, tmp_path: Path) -> None:
        pool = LabelPool(blobs(200), labelled=range(60))
        data = PoolDataModule(pool, val=blobs(61, 1), test=blobs(30, 4), batch_size=16)
        watch, model = monitor(), Net()
        run = quiet_trainer(watch, folder=tmp_path)
        run.fit(model, data)
        run.save_checkpoint(tmp_path / "old.ckpt")
        pool.label([100, 101], y=[2, 2])
        run.test(model, data, ckpt_path=tmp_path / "old.ckpt", verbose=False)
        assert len(pool.labelled_ids) == 62
        assert pool.labels_of([100, 101]).tolist() == [2, 2]

    @pytest.mark.slow
    def test_confirmed_mistakes_refit_before_the_schedule(self, tmp_path: Path) -> None:
        """Five labels contradict the head in one region and two are tolerated: a small disjunct."""
        pool = LabelPool(blobs(200), labelled=range(90))

        class Contradict(L.Callback):
            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                if trainer.current_epoch != 2:
                    return
                watch.query(1)
                rows = watch._pool_scores.rows
                assert rows is not None
                head = watch.head
                assert isinstance(head, TrustHead)
                inside = head.sepc.bank(head.projection(rows["emb"])) <= 1
                _patterns, cell, size = inside.unique(dim=0, return_inverse=True, return_counts=True)
                here = (cell == size.argmax()).nonzero().squeeze(1)
                label = rows["label"][here].mode().values
                here = here[rows["label"][here] == label][:5]
                pool.label(rows["id"][here], y=[(int(label) + 1) % CLASSES] * len(here))

        watch = monitor(refit_every_n_epochs=3, pool=pool, fit={"dim": 2, "max_impure": 2})
        run = quiet_trainer(watch, Contradict(), folder=tmp_path, max_epochs=5, reload_dataloaders_every_n_epochs=1)
        with pytest.warns(UserWarning, match=r"Regions with more confirmed mistakes.*: \d+\. .*5 samples predicted as"):
            run.fit(Net(), datamodule=PoolDataModule(pool, val=blobs(61, 1), batch_size=16))
        assert watch.n_refits == 4, (
            "first validation, epoch 2 by schedule, epoch 3 by the mistakes, epoch 4 as the last"
        )

    def test_refuses_wrong_arguments(self) -> None:
        with pytest.raises(MisconfigurationException, match="pool must be a LabelPool"):
            inspect.unwrap(PoolDataModule.__init__)(object.__new__(PoolDataModule), blobs(3))
        with pytest.raises(MisconfigurationException, match="shuffle cannot be set"):
            PoolDataModule(LabelPool(blobs(3)), shuffle=True)
