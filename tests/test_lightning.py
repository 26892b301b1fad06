"""Tests of the callback in a Trainer: evaluated stages, logged numbers, written files and forward hooks."""

from __future__ import annotations

import copy
import csv
import math
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import lightning_fabric
import numpy as np
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning_parts import (
    CLASSES,
    FEATURES,
    FIT,
    Net,
    blobs,
    fitted,
    loader,
    messages,
    monitor,
    quiet_trainer,
    same_tables,
)
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from sepc_torch import SEPC, LabelPool, PoolDataModule, TrustHead, TrustMonitor
from sepc_torch.metrics import aurc
from sepc_torch.training.lightning import MisconfigurationException, stage_results
from sepc_torch.training.lightning.stage_results import Recorder, assessed_rows

Rng = np.random.Generator

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    # The warning about small classes is expected: the tests fit heads to few samples, to be fast.
    pytest.mark.filterwarnings("ignore:Classes with fewer than:UserWarning"),
    pytest.mark.filterwarnings("ignore:TrustMonitor. the head is not calibrated:UserWarning"),  # few samples are fast
]


class TestStages:
    @pytest.mark.slow
    def test_every_stage(self, tmp_path: Path) -> None:
        watch, model, run = fitted(tmp_path, flag_rate=0.3)
        assert watch.n_refits == 2
        assert watch.fit_step == run.global_step
        run.test(model, loader(blobs(30, 2)), verbose=False)
        run.predict(model, loader(blobs(23, 3)), return_predictions=False)
        assert {name: len(table) for name, table in watch.scores.items()} == {"val": 61, "test": 30, "predict": 23}
        table = watch.scores["val"]
        assert sorted(table.ids) == list(range(61))
        head = watch.head
        assert isinstance(head, TrustHead)
        x, y = blobs(61, 1).tensors
        with torch.no_grad():
            z = model.eval().backbone(x)
            out = head(z, logits=model.classifier(z))
        order = torch.tensor(table.ids)
        for name in ("trust", "label", "network_label", "network_trust"):
            assert torch.equal(table.columns[name], getattr(out, name)[order])
        assert torch.allclose(table.columns["joint"], out.joint[order], atol=1e-5), "batches differ by rounding"
        assert table["joint"] == sorted(table["joint"])
        assert [not reason for reason in table["reason"]] == out.accept[order].tolist()
        assert torch.equal(table.columns["target"], y[order])
        flagged = watch.flagged["val"]
        assert set(flagged.ids) == {i for i, r in zip(table.ids, table["reason"], strict=True) if r}
        assert 0 < len(flagged) < 61

    @pytest.mark.slow
    def test_numbers_can_be_monitored(self, tmp_path: Path) -> None:
        saver = ModelCheckpoint(tmp_path, monitor="trust/val_aurc", save_top_k=1)
        stop = EarlyStopping("trust/val_acc_at_80", mode="max", patience=1, min_delta=2.0)  # no epoch improves by 2
        watch, model = monitor(flag_rate=0.3), Net()
        run = quiet_trainer(watch, saver, stop, folder=tmp_path, enable_checkpointing=True, max_epochs=6)
        run.fit(model, loader(blobs(150)), loader(blobs(61, 1)))
        assert run.current_epoch == 2, "the second epoch does not improve, so training stops"
        assert saver.best_model_score is not None
        numbers = run.callback_metrics
        table = watch.scores["val"]
        measured = table.where(~table.columns["calibrates"])
        right = measured.columns["network_label"] == measured.columns["target"]
        accepted = measured.columns["reason"] < 0
        assert 20 <= 61 - len(measured) <= 41
        assert numbers["trust/val_n"] == len(measured)
        assert numbers["trust/val_acc"] == pytest.approx(float(right.double().mean()))
        assert numbers["trust/val_accepted"] == pytest.approx(float(accepted.double().mean()))
        assert numbers["trust/val_acc_accepted"] == pytest.approx(float(right[accepted].double().mean()))
        assert numbers["trust/val_aurc"] == pytest.approx(float(aurc(measured.columns["joint"], right)))
        own = torch.tensor(measured["label"]) == measured.columns["target"]
        assert numbers["trust/head_val_acc"] == pytest.approx(float(own.double().mean()))
        assert numbers["trust/head_refits"] == watch.n_refits == 2
        assert numbers["trust/head_age_steps"] == 0
        assert numbers["trust/cost"] > 0

    @pytest.mark.slow
    def test_a_checkpoint_by_aurc_is_not_of_the_untrained_network(self, tmp_path: Path) -> None:
        """The head's own labels are good from the start, but the network's are not."""

        class Late(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                loss = super().training_step(batch, batch_idx)
                return loss * 0.0 if self.current_epoch == 0 else loss

        saver = ModelCheckpoint(tmp_path, monitor="trust/val_aurc", save_top_k=1, filename="{epoch}")
        watch, model = monitor(), Late()
        with torch.no_grad():
            model.classifier.weight.zero_()
            model.classifier.bias.copy_(torch.tensor([2.0, 0.0, 0.0]))  # every label is 0
        run = quiet_trainer(watch, saver, folder=tmp_path, enable_checkpointing=True, max_epochs=4)
        run.fit(model, loader(blobs(150)), loader(blobs(90, 1)))
        assert "epoch=0" not in saver.best_model_path

    def test_names_of_a_head_that_judges_its_own_labels(self, tmp_path: Path) -> None:
        _, _, run = fitted(tmp_path, logits=False)
        assert "trust/val_aurc" not in run.callback_metrics, "this name is only for the network's labels"
        assert math.isfinite(run.callback_metrics["trust/head_val_aurc"])

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("name", "trainer", "options"),
        [
            ("trust/val_aurc", {"val_check_interval": 0.5}, {}),
            ("trust/val_acc_accepted", {}, {"refit_every_n_epochs": 2}),
            ("trust/pool_accepted", {"val_check_interval": 0.5}, {"refit_every_n_epochs": 2, "pool": blobs(20, 3)}),
        ],
    )
    def test_the_first_validation_has_a_head(
        self, tmp_path: Path, name: str, trainer: dict[str, Any], options: dict[str, Any]
    ) -> None:
        stop = EarlyStopping(name, mode="max", patience=20)
        saver = ModelCheckpoint(tmp_path, monitor=name, mode="max")
        watch = monitor(**options)
        run = quiet_trainer(watch, stop, saver, folder=tmp_path, enable_checkpointing=True, **trainer)
        run.fit(Net(), loader(blobs(150)), loader(blobs(20, 1)))
        assert run.current_epoch == 2
        assert math.isfinite(float(stop.best_score))

    def test_validation_samples_of_unknown_classes_are_no_mistakes(self, tmp_path: Path, caplog: Any) -> None:
        x, y = blobs(90, 1).tensors
        unknown = torch.arange(90) >= 61
        watch, model = monitor(), Net()
        run = quiet_trainer(watch, folder=tmp_path, max_epochs=1)
        with messages(caplog):
            run.fit(model, loader(blobs(150)), loader(TensorDataset(x, torch.where(unknown, -1, y))))
        table = watch.scores["val"]
        measured = table.where(~table.columns["calibrates"])
        target = measured.columns["target"]
        right = measured.columns["network_label"] == target
        assert run.callback_metrics["trust/val_acc"] == pytest.approx(float(right[target >= 0].double().mean()))
        assert run.callback_metrics["trust/val_unknown"] == (target < 0).sum() > 0
        assert caplog.text.count("have negative labels, which stand for unknown classes") == 1

    @pytest.mark.parametrize("name", ["trust/val_aurc", "trust/pool_accepted", "trust/cost"])
    def test_a_first_fit_that_fails_does_not_end_training(self, tmp_path: Path, name: str) -> None:
        calls = []

        def fit(z: Tensor, y: Tensor) -> TrustHead:
            calls.append(len(z))
            if len(calls) == 1:
                raise RuntimeError("no luck")
            return TrustHead.fit(z, y, progress=False, **FIT)

        stop = EarlyStopping(name, mode="max", patience=20, check_finite=False)
        saver = ModelCheckpoint(tmp_path, monitor=name, mode="max")
        watch = monitor(fit=fit, pool=blobs(20, 3))
        run = quiet_trainer(watch, stop, saver, folder=tmp_path, enable_checkpointing=True)
        with pytest.warns(UserWarning, match="no luck.*Training continues; there is no head yet"):
            run.fit(Net(), loader(blobs(150)), loader(blobs(20, 1)))
        assert run.current_epoch == 2
        assert math.isfinite(run.callback_metrics[name])

    def test_a_head_that_is_not_calibrated_flags_a_share(self, tmp_path: Path) -> None:
        """20 samples are too few to calibrate with: the least safe one is flagged."""
        stop = EarlyStopping("trust/val_acc_accepted", mode="max", patience=20)
        watch = monitor()
        run = quiet_trainer(watch, stop, folder=tmp_path)
        run.fit(Net(), loader(blobs(150)), loader(blobs(20, 1)))
        assert len(watch.flagged["val"]) == 1
        assert run.current_epoch == 2
        assert float(run.callback_metrics["trust/val_accepted"]) == pytest.approx(0.95)

    @pytest.mark.parametrize("named", [False, True])
    def test_a_forward_of_several_arguments(self, tmp_path: Path, named: bool) -> None:
        class Scaled(Net):
            def forward(self, x: Tensor, scale: Tensor | None = None, *, shift: float = 0.0) -> Tensor:
                assert scale is not None
                return super().forward(x * scale + shift)

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                return nn.functional.cross_entropy(self(batch[0], batch[2]), batch[1])

            def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
                self(batch[0], batch[2])

        x, y = blobs(90).tensors
        ones = torch.ones(90, 1)
        watch = monitor(
            inputs=(lambda b: {"x": b[0], "scale": b[2]}) if named else (lambda b: (b[0], b[2])),
            fit_data=TensorDataset(x, y > 0, ones),  # boolean labels are accepted
        )
        train, val = (loader(TensorDataset(*blobs(90, seed).tensors, ones)) for seed in (0, 1))
        quiet_trainer(watch, folder=tmp_path, max_epochs=1).fit(Scaled(), train, val)
        assert watch.head is not None
        assert list(watch.head.classes) == [0, 1]
        assert len(watch.scores["val"]) == 90

    def test_the_networks_labels_are_judged(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with messages(caplog):
            watch, model, _ = fitted(tmp_path)
        said = [record.getMessage() for record in caplog.records if record.name == "lightning.pytorch.trust_monitor"]
        assert said[:-1] == [
            "TrustMonitor: the network's logits are the output of the module's forward; logits= decides otherwise."
        ]
        assert "of the training's time (no limit). Refits: 2. Assessed validations: 2 of 2." in said[-1]
        table = watch.scores["val"]
        with torch.no_grad():
            given = model.eval()(blobs(61, 1).tensors[0]).argmax(dim=1)
        assert torch.equal(table.columns["network_label"], given[torch.tensor(table.ids)])
        same = torch.tensor([a == b for a, b in zip(table["label"], table["network_label"], strict=True)])
        assert torch.equal(table.columns["network_trust"][same], table.columns["trust"][same])
        assert not (set(table.where(same)["reason"]) & {"disagrees"})
        named = monitor(head=watch.head, logits="classifier")
        quiet_trainer(named, folder=tmp_path).validate(model, loader(blobs(61, 1)), verbose=False)
        assert same_tables(named.scores["val"], table)

    def test_the_embedding_is_found(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """The input of the last linear layer is the output of the backbone: both monitors judge alike."""
        watches = [monitor(embed="auto"), monitor(prefix="named")]
        with messages(caplog):
            model = Net()
            run = quiet_trainer(*watches, folder=tmp_path, max_epochs=1)
            run.fit(model, loader(blobs(150)), loader(blobs(61, 1)))
        assert "the embedding is the input of the submodule 'classifier'; embed= decides otherwise." in caplog.text
        assert same_tables(*(watch.scores["val"] for watch in watches))
        again = copy.deepcopy(watches[0])
        quiet_trainer(again, folder=tmp_path).validate(model, loader(blobs(61, 1)), verbose=False)
        assert same_tables(again.scores["val"], watches[0].scores["val"])

    def test_logits_before_a_softmax(self, tmp_path: Path) -> None:
        class Probabilities(Net):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x).softmax(dim=1)

        watch = monitor(embed="auto")
        run = quiet_trainer(watch, folder=tmp_path, max_epochs=1)
        run.fit(Probabilities(), loader(blobs(150)), loader(blobs(61, 1)))
        assert watch._captures["logits"].source == "classifier"

    def test_the_embedding_of_maps_is_their_mean(self, tmp_path: Path) -> None:
        class Maps(Net):
            """Classifies every position by a convolution, and averages the logits."""

            def __init__(self) -> None:
                super().__init__()
                self.backbone, self.classifier = nn.Conv2d(2, 6, 1), nn.Conv2d(6, CLASSES, 1)  # type: ignore[assignment]

            def forward(self, x: Tensor) -> Tensor:
                maps = self.backbone(x.view(-1, 2, 2, 2)).relu()
                return self.classifier(maps).mean(dim=(2, 3))

        watch = monitor(embed="auto")
        run = quiet_trainer(watch, folder=tmp_path, max_epochs=1)
        run.fit(Maps(), loader(blobs(150)), loader(blobs(61, 1)))
        assert watch.head is not None
        assert watch.head.in_features == 6
        assert watch._captures["logits"].source == ""

    def test_logits_are_found_beside_the_embedding(self, tmp_path: Path) -> None:
        """The step runs the layers itself, and forward returns something else."""

        class Inner(Net):
            def forward(self, x: Tensor) -> Any:
                return {"logits": super().forward(x)}

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                return nn.functional.cross_entropy(self(batch[0])["logits"], batch[1])

            def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
                self.classifier(self.backbone(batch[0]))

        watch, model = monitor(), Inner()
        run = quiet_trainer(watch, folder=tmp_path, max_epochs=1)
        run.fit(model, loader(blobs(150)), loader(blobs(61, 1)))
        assert watch._captures["logits"].source == "classifier"
        assert "joint" in watch.scores["val"].columns
        assert math.isfinite(run.callback_metrics["trust/val_aurc"])

    @pytest.mark.parametrize("flat", [False, True])
    def test_one_logit_for_two_classes(self, tmp_path: Path, flat: bool) -> None:
        class Binary(Net):
            def __init__(self) -> None:
                super().__init__()
                self.classifier = nn.Linear(16, 1)

            def forward(self, x: Tensor) -> Tensor:
                found = super().forward(x)
                return found.squeeze(1) if flat else found

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                return nn.functional.binary_cross_entropy_with_logits(self(batch[0]).view(-1), batch[1].float())

        def two(data: TensorDataset) -> Any:
            x, y = data.tensors
            return loader(TensorDataset(x, (y > 0).long()))

        watch, model = monitor(), Binary()
        quiet_trainer(watch, folder=tmp_path, max_epochs=1).fit(model, two(blobs(150)), two(blobs(61, 1)))
        table = watch.scores["val"]
        with torch.no_grad():
            positive = model.eval()(blobs(61, 1).tensors[0]).view(-1) > 0
        assert torch.equal(table.columns["network_label"], positive[torch.tensor(table.ids)].long())

    def test_calibration_with_data_of_its_own(self, tmp_path: Path) -> None:
        watch, _, run = fitted(tmp_path, calibrate=loader(blobs(60, 5)))
        assert "calibrates" not in watch.scores["val"].columns
        assert run.callback_metrics["trust/val_n"] == 61
        head = watch.head
        assert isinstance(head, TrustHead)
        assert head.calibration is not None
        assert len(head.calibration.network.ranked_joint) == 30, "half of the 60 samples are ranked"

    def test_too_few_samples_to_calibrate(self, tmp_path: Path) -> None:
        watch = monitor(flag_rate=0.2)
        with pytest.warns(UserWarning, match="fewer than 20 labelled samples can be used") as warned:
            quiet_trainer(watch, folder=tmp_path).fit(Net(), loader(blobs(150)), loader(blobs(20, 1)))
        assert sum("not calibrated" in str(each.message) for each in warned) == 1, "once, though it is fitted twice"
        assert "joint" not in watch.scores["val"].columns
        assert len(watch.flagged["val"]) == math.ceil(0.2 * 20)
        assert all(watch.flagged["val"]["reason"])
        assert watch.stop_at(error=0.5) == (False, 1.0, 0, 0), "flags without calibration promise nothing"

    @pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
    def test_without_validation_a_warning_says_that_nothing_is_promised(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """No batch was searched for logits yet, so nothing is said about them."""
        watch, model = monitor(), Net()
        trainer = quiet_trainer(watch, folder=tmp_path, max_epochs=1)
        with messages(caplog), pytest.warns(UserWarning, match="there is no validation loader; flags promise no"):
            trainer.fit(model, loader(blobs(60)))
        assert "no logits" not in caplog.text
        assert "of the training's time" in caplog.text
        trainer.predict(model, loader(blobs(30, 1)), return_predictions=False)
        assert "network_label" in watch.scores["predict"].columns

    def test_an_embedding_may_be_a_function(self, tmp_path: Path) -> None:
        by_name, model, _ = fitted(tmp_path)
        by_function = TrustMonitor(lambda module, batch: module.backbone(batch[0]), head=by_name.head)
        quiet_trainer(by_function, folder=tmp_path).validate(model, loader(blobs(61, 1)), verbose=False)
        assert same_tables(by_function.scores["val"], by_name.scores["val"])

    def test_functions_and_hooks_together(self, tmp_path: Path) -> None:
        """A function that runs the module again does not change the values captured by a hook."""
        both = TrustMonitor(lambda m, b: m.backbone(b[0]) + 0 * m(b[0]).sum(), logits="classifier", fit=FIT)
        quiet_trainer(both, folder=tmp_path, precision="bf16-mixed").fit(
            Net(), loader(blobs(150)), loader(blobs(61, 1))
        )
        assert len(both.scores["val"]) == 61

    def test_an_sepc_is_a_head_too(self, tmp_path: Path) -> None:
        from sepc_torch import partition

        x, y = blobs(150).tensors
        sepc = SEPC.from_partition(partition(x.numpy(), y.numpy()))
        watch = TrustMonitor(lambda module, batch: batch[0], head=sepc)
        quiet_trainer(watch, folder=tmp_path).test(Net(), loader(blobs(20, 5)), verbose=False)
        out = sepc(blobs(20, 5).tensors[0])
        assert torch.equal(watch.scores["test"].columns["trust"], out.trust[torch.tensor(watch.scores["test"].ids)])

    def test_several_loaders(self, tmp_path: Path) -> None:
        watch = monitor()
        run = quiet_trainer(watch, folder=tmp_path)
        run.fit(Net(), loader(blobs(150)), [loader(blobs(20, 1)), loader(blobs(31, 2))])
        assert {name: len(table) for name, table in watch.scores.items()} == {"val_0": 20, "val_1": 31}
        assert run.callback_metrics["trust/val_1_n"] == 31

    @pytest.mark.parametrize(("limit", "rows"), [(2, 32), (0, 0)])
    def test_limited_validation(self, tmp_path: Path, limit: int, rows: int) -> None:
        watch, _, _ = fitted(tmp_path, trainer={"limit_val_batches": limit})
        assert len(watch.scores.get("val", ())) == rows
        assert watch.n_refits == 2, "without validation the end of the epoch refits"

    def test_batches_may_carry_ids(self, tmp_path: Path) -> None:
        class Named(Dataset[Any]):
            data = blobs(40, 1)

            def __len__(self) -> int:
                return 40

            def __getitem__(self, i: int) -> Any:
                return {"x": self.data[i][0], "y": self.data[i][1], "file": f"{i:02d}.png"}

        class DictNet(Net):
            def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
                self(batch["x"])

        watch = monitor(
            ids="file",
            inputs=lambda b: b["x"] if isinstance(b, dict) else b[0],
            labels=lambda b: b["y"] if isinstance(b, dict) else b[1],
        )
        with pytest.warns(
            UserWarning, match="sampler has shuffling enabled"
        ):  # Lightning's warning; ids make shuffling harmless
            quiet_trainer(watch, folder=tmp_path).fit(DictNet(), loader(blobs(150)), loader(Named(), shuffle=True))
        table = watch.scores["val"]
        assert sorted(table.ids) == [f"{i:02d}.png" for i in range(40)]
        targets = dict(zip(table.ids, table["target"], strict=True))
        assert all(targets[f"{i:02d}.png"] == i % CLASSES for i in range(40))

    @pytest.mark.slow
    def test_broken_embeddings_are_flagged_and_counted(self, tmp_path: Path) -> None:
        watch, model, run = fitted(tmp_path)
        x, y = blobs(10, 4).tensors
        x[3] = math.nan
        run.test(model, loader(TensorDataset(x, y)), verbose=False)
        row = watch.scores["test"].find([3])
        assert row["reason"] == ["no prediction"]
        assert row["trust"] == [0.0]
        assert row["label"] == [None]
        assert run.callback_metrics["trust/test_nonfinite"] == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
    def test_precision(self, tmp_path: Path, precision: str) -> None:
        watch, _, _ = fitted(tmp_path, trainer={"precision": precision})
        assert len(watch.scores["val"]) == 61
        assert watch.scores["val"].columns["trust"].dtype == torch.float32
        assert torch.isfinite(watch.scores["val"].columns["trust"]).all()


class TestFiles:
    @pytest.mark.slow
    def test_one_file_per_stage_and_refit(self, tmp_path: Path) -> None:
        watch, model, run = fitted(tmp_path, dirpath=tmp_path / "flags", flag_rate=0.3)
        run.test(model, loader(blobs(30, 2)), verbose=False)
        names = {path.name for path in (tmp_path / "flags").iterdir()}
        expected = {f"val-epoch={e}-step={s}.csv" for e, s in ((0, 10), (1, 20))}
        assert names == expected | {"test-epoch=1-step=20.csv", "monitor.pt"}
        text = (tmp_path / "flags" / "val-epoch=1-step=20.csv").read_text().splitlines()
        rows = list(csv.DictReader(text))
        assert [int(row["id"]) for row in rows] == list(watch.flagged["val"].ids)
        assert [row["reason"] for row in rows] == watch.flagged["val"]["reason"]

    def test_fast_dev_run_writes_nothing(self, tmp_path: Path) -> None:
        watch = monitor(dirpath=tmp_path / "flags")
        quiet_trainer(watch, folder=tmp_path, fast_dev_run=True).fit(Net(), loader(blobs(150)), loader(blobs(61, 1)))
        assert watch.n_refits == 1
        assert not (tmp_path / "flags").exists()

    @pytest.mark.slow
    def test_on_flag_receives_the_flagged_samples(self, tmp_path: Path) -> None:
        got: list[tuple[str, int]] = []
        watch = monitor(on_flag=lambda _, stage, table: got.append((stage, len(table))), flag_rate=0.1)
        run = quiet_trainer(watch, folder=tmp_path)
        run.fit(Net(), loader(blobs(150)), loader(blobs(20, 1)))
        assert got == [("val", 2), ("val", 2)]

        def broken(*_: Any) -> None:
            raise OSError("disk full")

        with pytest.raises(RuntimeError, match="on_flag failed: OSError: disk full"):
            fitted(tmp_path, on_flag=broken)

    def test_batches_judged_together_are_those_judged_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x, y = blobs(150).tensors
        head, calls = TrustHead.fit(x, y, progress=False, **FIT), []
        # The last batches have no logits or no targets, the fourth is empty.
        batches: list[tuple[list[int], dict[str, Tensor]]] = []
        for i, j in [(0, 16), (16, 32), (32, 48), (48, 48), (48, 60), (60, 80), (80, 90)]:
            columns = {"emb": x[i:j]} | ({"logits": x[i:j, :CLASSES]} if i < 60 else {})
            batches.append((list(range(i, j)), columns | ({"target": y[i:j]} if i < 80 else {})))

        def counted(*args: Any, **options: Any) -> Any:
            calls.append(len(args[1]["emb"]))
            return assessed_rows(*args, **options)

        monkeypatch.setattr(stage_results, "assessed_rows", counted)
        together, alone = Recorder(), Recorder()
        for batch in batches:
            together.add(head, *batch)
            alone.add(head, *batch)
            alone.flush(head)
        together.flush(head)
        assert [size for size in calls if size > 20] == [60]
        assert [len(part["id"]) for part in together.parts] == [60, 20, 10]
        for name in together.parts[0]:
            if name not in ("network_label", "network_trust", "network_margin", "target"):
                both = (torch.cat([part[name] for part in each.parts]) for each in (together, alone))
                torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)
        monkeypatch.setattr(stage_results, "_WAITING_VALUES", 30 * (FEATURES + CLASSES))
        several = Recorder()
        for batch in batches:
            several.add(head, *batch)
        assert [len(part["id"]) for part in several.parts] == [32, 28, 20]

    def test_the_limit_of_a_fit_is_an_option_of_the_fit(self) -> None:
        assert (monitor().max_per_class, monitor(fit=TrustHead.fit).max_per_class) == (100, 100)
        assert monitor(fit={"max_per_class": 30}).max_per_class == 30
        assert monitor(fit={"max_per_class": None}).max_per_class is None

    def test_barebones(self, tmp_path: Path) -> None:
        watch = monitor()
        trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, barebones=True, callbacks=[watch])
        trainer.fit(Net(), loader(blobs(150)), loader(blobs(61, 1)))
        assert watch.n_refits == 1


class TestHooks:
    @pytest.mark.slow
    def test_hooks_are_removed(self, tmp_path: Path) -> None:
        _watch, model, run = fitted(tmp_path, logits="")
        run.validate(model, loader(blobs(30, 2)), verbose=False)
        run.predict(model, loader(blobs(30, 2)), return_predictions=False)
        assert not model.backbone._forward_hooks
        assert not model._forward_hooks

        class Broken(Net):
            def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
                raise RuntimeError("broken step")

        broken = Broken()
        with pytest.raises(RuntimeError, match="broken step"):
            quiet_trainer(monitor(), folder=tmp_path).fit(broken, loader(blobs(150)), loader(blobs(61, 1)))
        assert not broken.backbone._forward_hooks

    @pytest.mark.slow
    @pytest.mark.parametrize("embed", ["auto", "backbone"])
    def test_a_compiled_module_is_captured_in_every_batch(self, tmp_path: Path, embed: str) -> None:
        torch._dynamo.reset()
        model = Net()
        (model.backbone if embed == "backbone" else model).compile(backend="eager")
        watch = monitor(embed=embed)
        quiet_trainer(watch, folder=tmp_path).fit(model, loader(blobs(150)), loader(blobs(61, 1)))
        assert len(watch.scores["val"]) == 61

    @pytest.mark.slow
    def test_trainers_of_both_packages(self, tmp_path: Path) -> None:
        class Plain(pytorch_lightning.LightningModule):
            backbone: nn.Module

            def __init__(self) -> None:
                super().__init__()
                self.backbone, self.classifier = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                return nn.functional.cross_entropy(self.classifier(self.backbone(batch[0])), batch[1])

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.backbone(batch[0])

            def forward(self, x: Tensor) -> Tensor:
                return self.backbone(x)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), 0.1)

        quiet: dict[str, Any] = {
            "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": tmp_path,
        }  # fmt: skip
        for callbacks in (lambda w: w, lambda w: [w]):
            watch = monitor()
            trainer = pytorch_lightning.Trainer(callbacks=callbacks(watch), **quiet)
            trainer.fit(Plain(), loader(blobs(150)), loader(blobs(61, 1)))
            assert len(watch.scores["val"]) == 61
            watch = monitor()
            L.Trainer(callbacks=callbacks(watch), **quiet).fit(Net(), loader(blobs(150)), loader(blobs(61, 1)))
            assert len(watch.scores["val"]) == 61
        with pytest.raises(lightning_fabric.utilities.exceptions.MisconfigurationException, match="non-empty string"):
            monitor(prefix="")
        data: Any = PoolDataModule(LabelPool(blobs(150), labelled=range(90)), val=blobs(20, 1), batch_size=16)
        assert isinstance(data, pytorch_lightning.LightningDataModule)
        either: Any = monitor()
        pytorch_lightning.Trainer(callbacks=either, **quiet).fit(Plain(), datamodule=data)

    @pytest.mark.slow
    def test_two_monitors(self, tmp_path: Path) -> None:
        a, b = monitor(), TrustMonitor("classifier", fit={"dim": 2}, prefix="late")
        run = quiet_trainer(a, b, folder=tmp_path)
        run.fit(Net(), loader(blobs(150)), loader(blobs(61, 1)))
        assert {"trust/val_aurc", "late/val_aurc"} <= set(run.callback_metrics)
        with pytest.raises(RuntimeError, match="more than one"):
            quiet_trainer(monitor(), monitor(), folder=tmp_path)

    @pytest.mark.slow
    def test_copy_and_pickle(self, tmp_path: Path) -> None:
        watch, _, _ = fitted(tmp_path, on_flag=lambda *_: None, pool=blobs(20, 3))
        copied = copy.deepcopy(watch)
        assert copied.n_refits == 2
        with pytest.raises(MisconfigurationException, match=r"on_flag=.*cannot be sent to spawned processes"):
            pickle.dumps(watch)
        plain, _, _ = fitted(tmp_path)
        again = pickle.loads(pickle.dumps(plain))
        assert same_tables(again.scores["val"], plain.scores["val"])
