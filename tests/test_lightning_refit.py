"""Tests of refits: their schedule, the weights they use, and the head in checkpoints."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning_parts import FEATURES, FIT, Net, blobs, fitted, loader, messages, monitor, quiet_trainer, same_tables
from torch import Tensor
from torch.utils.data import Dataset

from sepc_torch import TrustHead, TrustMonitor
from sepc_torch.training.callbacks import FitSample
from sepc_torch.training.flags import as_trust_head
from sepc_torch.training.lightning.hooks import ActivePass
from sepc_torch.training.lightning.refitting import head_bytes, head_from_bytes
from sepc_torch.training.lightning.schedule import CostMeter, ends_with_validation
from sepc_torch.training.subsets import calibration_half, hash_ids, sample_per_class

Rng = np.random.Generator

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    # The warning about small classes is expected: the tests fit heads to few samples, to be fast.
    pytest.mark.filterwarnings("ignore:Classes with fewer than:UserWarning"),
    pytest.mark.filterwarnings("ignore:TrustMonitor. the head is not calibrated:UserWarning"),  # few samples are fast
]


class TestRefit:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "options",
        [{}, {"check_val_every_n_epoch": 2}, {"val_check_interval": 0.5}, {"limit_val_batches": 0}],
        ids=["every epoch", "every other", "mid-epoch", "no validation"],
    )
    def test_a_checkpoint_holds_the_head_of_its_weights(self, tmp_path: Path, options: dict[str, Any]) -> None:
        saver = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{step}")
        watch = monitor()
        run = quiet_trainer(watch, saver, folder=tmp_path, enable_checkpointing=True, **options)
        run.fit(Net(), loader(blobs(150)), loader(blobs(61, 1)))
        steps = {}
        for path in tmp_path.glob("*.ckpt"):
            found = torch.load(path, weights_only=True)
            (state,) = (s for key, s in found["callbacks"].items() if key.startswith("TrustMonitor"))
            steps[found["global_step"]] = state["fit_step"]
        ends = [10, 20] if options.get("check_val_every_n_epoch") is None else [20]
        assert {step: steps[step] for step in ends} == {step: step for step in ends}

    @pytest.mark.slow
    @pytest.mark.parametrize("first", [True, False])
    def test_the_head_is_fitted_to_averaged_weights(self, tmp_path: Path, first: bool) -> None:
        from lightning.pytorch.callbacks import EMAWeightAveraging

        class Seen(TrustMonitor):
            def on_validation_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
                if not trainer.sanity_checking:
                    assert not self._is_stale(pl_module), "the head belongs to the weights that are validated"
                super().on_validation_batch_end(trainer, pl_module, *rest)

        watch, average = Seen("backbone", fit=FIT, max_cost=None), EMAWeightAveraging(decay=0.9)
        callbacks = [watch, average] if first else [average, watch]
        quiet_trainer(*callbacks, folder=tmp_path).fit(Net(), loader(blobs(150)), loader(blobs(61, 1)))
        assert watch.n_refits >= 2

    @pytest.mark.slow
    def test_training_is_not_disturbed(self, tmp_path: Path) -> None:
        """With dropout, shuffling and batch norm, the weights are bitwise those of a run without the monitor."""
        weights = []
        for callbacks in ([], [monitor(embed="auto", pool=blobs(20, 7))]):
            L.seed_everything(5, verbose=False)
            model = Net(dropout=0.4)
            quiet_trainer(*callbacks, folder=tmp_path).fit(
                model, loader(blobs(150), shuffle=True), loader(blobs(61, 1))
            )
            weights.append(copy.deepcopy(model.state_dict()))
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    def test_module_modes_are_restored(self, tmp_path: Path) -> None:
        """A batch norm frozen by the user stays frozen after an inference pass."""

        class Frozen(Net):
            def on_train_epoch_start(self) -> None:
                self.backbone[1].eval()

            def on_train_epoch_end(self) -> None:
                assert not self.backbone[1].training
                assert self.backbone[0].training

        watch = monitor()
        quiet_trainer(watch, folder=tmp_path, limit_val_batches=0).fit(
            Frozen(), loader(blobs(150)), loader(blobs(20, 1))
        )
        assert watch.n_refits == 2

    @pytest.mark.slow
    def test_schedule_and_last_epoch(self, tmp_path: Path) -> None:
        watch, _, run = fitted(tmp_path, trainer={"max_epochs": 5}, refit_every_n_epochs=2)
        assert watch.n_refits == 4, "first validation, epochs 1 and 3, and the last epoch"
        assert watch.fit_epoch == 4
        assert watch.fit_step == run.global_step
        never = monitor(refit_every_n_epochs=0, head=watch.head)
        quiet_trainer(never, folder=tmp_path).fit(Net(), loader(blobs(150)), loader(blobs(61, 1)))
        assert never.n_refits == 0
        assert never.head is watch.head

    def test_training_replaces_a_given_head(self, tmp_path: Path) -> None:
        given = TrustHead.fit(torch.randn(60, 16), torch.arange(60) % 3, progress=False)
        watch, _, _ = fitted(tmp_path, trainer={"max_epochs": 1}, head=given)
        assert watch.n_refits == 1
        assert watch.head is not given
        assert "to keep the given head, pass ``refit_every_n_epochs=0``" in (TrustMonitor.__doc__ or "")

    @pytest.mark.slow
    def test_a_monitor_can_be_reused(self, tmp_path: Path) -> None:
        """A second run has new weights at the same global steps, and refits to them."""
        watch = monitor()
        for _ in range(2):
            model = Net()
            run = quiet_trainer(watch, folder=tmp_path)
            run.fit(model, loader(blobs(150)), loader(blobs(61, 1)))
            assert not watch._is_stale(model)
        assert watch.n_refits == 4

    def test_an_early_stop_leaves_a_fresh_head(self, tmp_path: Path) -> None:
        class Stop(L.Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                trainer.should_stop = trainer.global_step >= 13

        watch = monitor(refit_every_n_epochs=7)
        run = quiet_trainer(watch, Stop(), folder=tmp_path, max_epochs=20, limit_val_batches=0)
        run.fit(Net(), loader(blobs(150)), loader(blobs(20, 1)))
        assert run.current_epoch < 20
        assert watch.fit_step == run.global_step

    @pytest.mark.slow
    def test_training_batches_are_not_consumed(self, tmp_path: Path) -> None:
        """With persistent workers, iterating over the training loader again would take batches from the epoch."""

        class Count(L.Callback):
            batches = 0

            def on_train_batch_end(self, *_: Any) -> None:
                self.batches += 1

        counter, watch = Count(), monitor()
        train = loader(blobs(96), shuffle=True, num_workers=1, persistent_workers=True)
        run = quiet_trainer(watch, counter, folder=tmp_path, val_check_interval=0.5)
        run.fit(Net(), train, loader(blobs(20, 1)))
        assert counter.batches == 2 * 6
        assert watch.n_refits == 3, "first validation, in mid-epoch, and the ends of both epochs"

    @pytest.mark.slow
    def test_a_failed_refit_keeps_the_old_head(self, tmp_path: Path) -> None:
        calls = []

        def fit(z: Tensor, y: Tensor) -> TrustHead:
            calls.append(len(z))
            if len(calls) == 2:
                raise RuntimeError("no luck")
            return TrustHead.fit(z, y, progress=False, **FIT)

        watch = monitor(fit=fit)
        run = quiet_trainer(watch, folder=tmp_path, max_epochs=3)
        with pytest.warns(UserWarning, match=r"the refit failed: RuntimeError: no luck.*the previous head stays"):
            run.fit(Net(), loader(blobs(150)), loader(blobs(61, 1)))
        assert calls == [150, 150, 150]
        assert watch.n_refits == 2
        assert run.callback_metrics["trust/head_refit_failures"] == 1

    def test_refits_use_a_sample(self, tmp_path: Path) -> None:
        sizes, passed = [], []

        class Counting(Net):
            def forward(self, x: Tensor) -> Tensor:
                if ActivePass.owner is not None:
                    passed.append(len(x))
                return super().forward(x)

        def fit(z: Tensor, y: Tensor) -> TrustHead:
            sizes.append(y.bincount().tolist())
            return TrustHead.fit(z, y, progress=False, **FIT)

        watch = monitor(fit=fit)
        watch.max_per_class = 30
        run = quiet_trainer(watch, folder=tmp_path)
        run.fit(Counting(), loader(blobs(150)), loader(blobs(61, 1)))
        assert sizes == [[30, 30, 30]] * 2
        half = int(calibration_half(torch.arange(61)).sum())
        assert sum(passed) == 150 + half + 90 + half, "the first pass finds the sample, later ones read only the sample"

    @pytest.mark.parametrize(
        ("monitored", "assessed"),
        [
            # The first refit and assessment take 2 seconds, the last ones will take 5: 15 % of 60 seconds pay for one
            # more assessment, of 70 seconds for two, and so on.
            (None, 4),
            pytest.param("trust/val_aurc", 8, marks=pytest.mark.slow),
        ],
    )
    def test_the_cost_is_bounded(
        self,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        monitored: str | None,
        assessed: int,
    ) -> None:
        """The clock gives an epoch 10 seconds, a refit 1 second for 30 samples, and an assessment 1."""
        seconds, found, sizes = [0.0], [], []

        def fit(z: Tensor, y: Tensor) -> TrustHead:
            seconds[0] += len(z) / 30
            sizes.append(len(z))
            return TrustHead.fit(z, y, progress=False, **FIT)

        def judged(*_: Any) -> None:
            seconds[0] += 1.0

        class Epoch(L.Callback):
            monitor = monitored

            def on_train_epoch_start(self, *_: Any) -> None:
                seconds[0] += 10.0

            def on_validation_end(self, trainer: Any, *_: Any) -> None:
                assert math.isfinite(trainer.callback_metrics.get("trust/val_aurc", 0.0)), "the last value stays"
                if not trainer.sanity_checking:
                    found.append(watch.n_refits)

        watch = monitor(fit=fit, max_cost=0.15, on_flag=judged)
        watch.max_per_class = 40
        watch.cost.clock = lambda: seconds[0]
        run = quiet_trainer(watch, Epoch(), folder=tmp_path, max_epochs=8)
        with messages(caplog):
            run.fit(Net(), loader(blobs(120)), loader(blobs(61, 1)))
        assert found == [1] * 7 + [2]
        assert sizes == [30, 120], "the first fit uses a quarter of the samples"
        spent = 1 + 4 + assessed
        assert watch.cost.share() == pytest.approx(spent / 80)
        assert monitored or watch.cost.share() <= 0.15
        assert not watch._is_stale(run.lightning_module)
        (said,) = (record.getMessage() for record in caplog.records if "took" in record.getMessage())
        assert f"took {spent:.2f} s, {spent / 80:.0%} of the training's time (limit 15%" in said
        assert f"Refits: 2. Assessed validations: {assessed} of 8." in said

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("keeps_best", "assessed"),
        [
            # Before a refit is measured it counts as 0.3 seconds, with another 0.3 for the last one: 15 % of 4 seconds.
            (False, [None, None, None, 1, 1, 2]),
            (True, [1, 1, 1, 1, 1, 2]),
        ],
    )
    def test_the_first_assessment_waits_for_the_budget(
        self, tmp_path: Path, keeps_best: bool, assessed: list[int | None]
    ) -> None:
        seconds, found = [0.0], []

        class Epoch(L.Callback):
            monitor = "val_loss" if keeps_best else None

            def on_train_epoch_start(self, *_: Any) -> None:
                seconds[0] += 1.0

            def on_validation_end(self, trainer: Any, *_: Any) -> None:
                if not trainer.sanity_checking:
                    found.append(watch.n_refits or None)
                    assert ("val" in watch.flagged) == ("trust/val_aurc" in trainer.callback_metrics) == bool(found[-1])
                    assert "trust/cost" in trainer.callback_metrics

        def fit(z: Tensor, y: Tensor) -> TrustHead:
            seconds[0] += 0.2
            return TrustHead.fit(z, y, progress=False, **FIT)

        watch = monitor(fit=fit, max_cost=0.15)
        watch.cost.clock = lambda: seconds[0]
        run = quiet_trainer(watch, Epoch(), folder=tmp_path, max_epochs=len(assessed))
        run.fit(Net(), loader(blobs(120)), loader(blobs(61, 1)))
        assert found == assessed
        assert not watch._is_stale(run.lightning_module)

    @pytest.mark.parametrize(
        ("options", "callbacks", "known"),
        [
            ({}, [], True),
            ({"max_epochs": 6, "check_val_every_n_epoch": 3}, [], True),
            ({"max_epochs": 7, "check_val_every_n_epoch": 3}, [], False),
            ({"max_epochs": -1}, [], False),
            ({"max_steps": 30}, [], False),
            ({"val_check_interval": 0.3}, [], False),
            ({"max_time": "00:01:00:00"}, [], False),
            ({}, [EarlyStopping("val_loss")], False),
            ({"enable_checkpointing": True}, [ModelCheckpoint()], True),
            ({"enable_checkpointing": True}, [ModelCheckpoint(monitor="val_loss")], False),
            ({"enable_checkpointing": True}, [ModelCheckpoint(save_top_k=-1)], False),
        ],
    )
    def test_a_run_that_ends_with_a_validation(
        self, tmp_path: Path, options: dict[str, Any], callbacks: list[Any], known: bool
    ) -> None:
        run = quiet_trainer(*callbacks, folder=tmp_path, **options)
        assert ends_with_validation(run) == known

    def test_the_first_pass_reads_pieces(self) -> None:
        """Pieces are disjoint, the first holds 5000 samples, all hold at most 50 000; the kept sample is one piece."""
        sample, data = FitSample(), range(120_000)
        pieces = sample.pieces(data, 100)
        assert [len(piece) for piece in pieces] == [5000, 5000, 10_000, 30_000]
        assert len(torch.cat(pieces).unique()) == 50_000
        assert [len(piece) for piece in sample.pieces(range(7000), 100)] == [5000, 2000]
        assert [len(piece) for piece in sample.pieces(range(7000), None)] == [7000]
        sample.keep(data, torch.arange(3))
        assert sample.pieces(data, 100)[0].tolist() == [0, 1, 2]

    def test_the_subset_does_not_depend_on_the_number_of_processes(self, rng: Rng) -> None:
        ids, labels = torch.from_numpy(rng.permutation(500)), torch.from_numpy(rng.integers(0, 4, 500))
        whole = set(ids[sample_per_class(ids, labels, 20)].tolist())
        halves = [ids[::2], ids[1::2]], [labels[::2], labels[1::2]]
        kept = [(i[k], y[k]) for i, y in zip(*halves, strict=True) for k in [sample_per_class(i, y, 20)]]
        i, y = torch.cat([a for a, _ in kept]), torch.cat([b for _, b in kept])
        assert set(i[sample_per_class(i, y, 20)].tolist()) == whole
        assert len(hash_ids(torch.arange(10_000)).unique()) == 10_000
        assert abs(np.corrcoef(np.arange(10_000), hash_ids(torch.arange(10_000)).argsort().numpy())[0, 1]) < 0.05

    def test_augmented_data_give_a_warning(self, tmp_path: Path) -> None:
        class Noisy(Dataset[Any]):
            def __len__(self) -> int:
                return 150

            def __getitem__(self, i: int) -> Any:
                x, y = blobs(150)[i]
                return x + 0.1 * torch.randn(FEATURES), y

        run = quiet_trainer(monitor(), folder=tmp_path, limit_val_batches=0)
        with pytest.warns(UserWarning, match=r"the data seem augmented.*fit_data"):
            run.fit(Net(), loader(Noisy()), loader(blobs(20, 1)))


class TestCheckpoints:
    @pytest.mark.slow
    def test_a_resumed_run_equals_an_uninterrupted_one(self, tmp_path: Path) -> None:
        def run(epochs: int, ckpt: Path | None) -> tuple[Net, TrustMonitor, L.Trainer]:
            L.seed_everything(3, verbose=False)
            watch, model = monitor(pool=blobs(40, 9)), Net()
            trainer = quiet_trainer(watch, folder=tmp_path, max_epochs=epochs)
            trainer.fit(model, loader(blobs(150)), loader(blobs(61, 1)), ckpt_path=ckpt)
            return model, watch, trainer

        _, _, half = run(2, None)
        half.save_checkpoint(tmp_path / "half.ckpt")
        resumed, uninterrupted = run(4, tmp_path / "half.ckpt"), run(4, None)
        assert all(
            torch.equal(a, b) for a, b in zip(resumed[0].parameters(), uninterrupted[0].parameters(), strict=True)
        )
        for stage in ("val", "pool"):
            assert same_tables(resumed[1].scores[stage], uninterrupted[1].scores[stage])
        assert resumed[1].query(5) == uninterrupted[1].query(5)
        assert resumed[1].n_refits == uninterrupted[1].n_refits == 4

    @pytest.mark.slow
    def test_a_checkpoint_restores_the_head(self, tmp_path: Path) -> None:
        watch, model, run = fitted(tmp_path)
        run.save_checkpoint(tmp_path / "x.ckpt")
        run.test(model, loader(blobs(30, 2)), verbose=False)
        fresh = monitor()
        other = quiet_trainer(fresh, folder=tmp_path)
        other.test(Net(), loader(blobs(30, 2)), ckpt_path=tmp_path / "x.ckpt", verbose=False)
        assert same_tables(fresh.scores["test"], watch.scores["test"])
        assert (fresh.fit_epoch, fresh.fit_step, fresh.n_refits) == (watch.fit_epoch, watch.fit_step, watch.n_refits)

    def test_loading_a_checkpoint_keeps_earlier_results(self, tmp_path: Path) -> None:
        watch, model, run = fitted(tmp_path)
        run.save_checkpoint(tmp_path / "x.ckpt")
        before = watch.scores["val"]
        run.test(model, loader(blobs(30, 2)), ckpt_path=tmp_path / "x.ckpt", verbose=False)
        assert watch.scores["val"] is before

    @pytest.mark.slow
    def test_a_resumed_finished_run_can_be_queried(self, tmp_path: Path) -> None:
        watch, _, run = fitted(tmp_path, pool=blobs(40, 9))
        run.save_checkpoint(tmp_path / "done.ckpt")
        again = monitor(pool=blobs(40, 9))
        quiet_trainer(again, folder=tmp_path).fit(
            Net(), loader(blobs(150)), loader(blobs(61, 1)), ckpt_path=tmp_path / "done.ckpt"
        )
        assert again.n_refits == watch.n_refits, "the run trains no further"
        assert same_tables(again.scores["pool"], watch.scores["pool"])

    @pytest.mark.slow
    def test_other_weights_give_a_warning(self, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
        _watch, model, run = fitted(tmp_path)
        run.test(model, loader(blobs(30, 2)), verbose=False)
        assert not [w for w in recwarn if "stale" in str(w.message)]
        with torch.no_grad():
            model.classifier.bias.add_(1e-3)
        with pytest.warns(UserWarning, match="may be stale"):
            run.test(model, loader(blobs(30, 2)), verbose=False)

    def test_heads_are_serialised_to_bytes(self, rng: Rng) -> None:
        x, y = blobs(90).tensors
        head = TrustHead.fit(x, y, progress=False)
        for each in (head, as_trust_head(head.sepc)):
            data = head_bytes(each)
            assert data.dtype == torch.uint8
            again = head_from_bytes(data)
            assert all(torch.equal(a, b) for a, b in zip(again.buffers(), each.buffers(), strict=True))

    def test_the_head_has_no_inference_tensors_after_validation(self, tmp_path: Path) -> None:
        """Validation runs in inference mode, but the head's buffers can be loaded into and differentiated through."""
        watch, _, _ = fitted(tmp_path)
        assert watch.head is not None
        assert not any(buffer.is_inference() for buffer in watch.head.buffers())
        watch.head.load_state_dict(watch.head.state_dict())
        z = torch.randn(4, 16, requires_grad=True)
        watch.head(z).distance.sum().backward()
        assert z.grad is not None


class TestCost:
    def test_nested_work_counts_once(self) -> None:
        now = [0.0]
        meter = CostMeter(lambda: now[0])
        assert meter.share() == 0.0
        meter.start()
        now[0] = 8.0
        with meter.paying(), meter.paying():
            now[0] = 10.0
        assert meter.share() == 0.25
        assert not meter.affords(0.15)
        assert meter.affords(None)
        now[0] = 30.0
        assert meter.affords(0.15)
