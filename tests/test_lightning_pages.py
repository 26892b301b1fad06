"""Tests of the callback's reports, figures for loggers, and drift of predicted samples."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning_parts import Net, blobs, drifted, loader, monitor, quiet_trainer
from torch.utils.data import TensorDataset

from sepc_torch import DriftMonitor, TrustHead, TrustMonitor
from sepc_torch.training.lightning import MisconfigurationException
from sepc_torch.training.lightning.pages import earlier_pages
from sepc_torch.training.subsets import calibration_half

FIGURES = ("risk_coverage", "reliability", "embedding")
STEPS = (10, 20)

# The warning about small classes is expected: the tests fit heads to few samples, to be fast.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Classes with fewer than:UserWarning"),
    pytest.mark.filterwarnings("ignore:TrustMonitor. the head is not calibrated:UserWarning"),  # few samples are fast
]


class Run(NamedTuple):
    """A fit of two epochs with reports and figures."""

    folder: Path
    watch: TrustMonitor
    model: Net
    trainer: L.Trainer
    table_logger: CSVLogger


# It takes several seconds, so all tests that use it are marked slow.
@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("pages")
    L.seed_everything(0, verbose=False)
    watch, model = monitor(dirpath=folder / "trust", report=True), Net()
    table = CSVLogger(folder, name="table")
    trainer = quiet_trainer(watch, folder=folder, max_epochs=2, logger=[TensorBoardLogger(folder, name="board"), table])
    trainer.fit(model, loader(blobs(150)), loader(blobs(200, 1)))
    return Run(folder, watch, model, trainer, table)


def page(run: Run, epoch: int) -> Path:
    return run.folder / "trust" / f"val-epoch={epoch}-step={STEPS[epoch]}.html"


class TestReports:
    @pytest.mark.slow
    def test_every_validation_has_a_report_and_the_newest_names_all(self, run: Run) -> None:
        for epoch in range(2):
            text = page(run, epoch).read_text(encoding="utf-8")
            assert f"<title>Trust: val, epoch {epoch}</title>" in text
            links = re.findall(r'<a href="([^"#]+)">(epoch \d)</a>', text)
            assert links == [(page(run, e).name, f"epoch {e}") for e in reversed(range(epoch))]
        assert not list((run.folder / "trust").glob("*epoch=0-step=0*")), "no report of the sanity check"

    @pytest.mark.slow
    def test_the_report_is_about_the_measured_samples(self, run: Run) -> None:
        numbers = json.loads(page(run, 1).with_suffix(".json").read_text(encoding="utf-8"))
        logged = run.trainer.callback_metrics
        measured = int((~calibration_half(torch.arange(200))).sum())
        assert numbers["totals"]["rows"] == measured == logged["trust/val_n"]
        assert numbers["totals"]["accepted"] == pytest.approx(float(logged["trust/val_accepted"]) * measured)
        assert numbers["totals"]["wrong"] == pytest.approx((1 - float(logged["trust/val_acc"])) * measured, abs=1e-3)
        (joint,) = (curve for curve in numbers["risk"]["curves"] if "softmax" not in curve["name"].lower())
        assert joint["aurc"] == pytest.approx(float(logged["trust/val_aurc"]), rel=1e-3)

    def test_reports_of_an_older_run_are_not_linked_as_earlier(self, tmp_path: Path) -> None:
        for name in ("val-epoch=9-step=90.html", "val-epoch=0-step=10.html", "val_0-epoch=0-step=5.html", "val.html"):
            (tmp_path / name).touch()
        assert earlier_pages(tmp_path, "val", 20) == [("epoch 0", "val-epoch=0-step=10.html")]
        (tmp_path / "val-epoch=0-step=5.html").touch()
        assert [title for title, _ in earlier_pages(tmp_path, "val", 20)] == ["epoch 0, step 5", "epoch 0, step 10"]

    def test_a_head_that_is_not_calibrated_has_no_report(self, tmp_path: Path) -> None:
        watch = monitor(dirpath=tmp_path, report=True)
        quiet_trainer(watch, folder=tmp_path, max_epochs=1).fit(Net(), loader(blobs(150)), loader(blobs(20, 1)))
        assert not list(tmp_path.glob("*.html"))

    def test_a_report_needs_a_place(self, tmp_path: Path) -> None:
        with pytest.raises(MisconfigurationException, match=r"nowhere to write to. Pass TrustMonitor\(dirpath="):
            quiet_trainer(monitor(report=True), folder=tmp_path).fit(Net(), loader(blobs(30)), loader(blobs(30, 1)))


class TestFigures:
    @pytest.mark.slow
    def test_tensorboard_shows_the_figures(self, run: Run) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        (board,) = (logger for logger in run.trainer.loggers if isinstance(logger, TensorBoardLogger))
        board.experiment.flush()
        events = EventAccumulator(board.log_dir)
        events.Reload()
        assert set(events.Tags()["images"]) == {f"trust/val_{name}" for name in FIGURES}
        for name in FIGURES:
            shown = events.Images(f"trust/val_{name}")
            assert [image.step for image in shown] == list(STEPS)
            assert all(image.encoded_image_string.startswith(b"\x89PNG") for image in shown)

    @pytest.mark.slow
    def test_a_csv_logger_gets_files(self, run: Run) -> None:
        files = {path.name for path in (Path(run.table_logger.log_dir) / "figures").iterdir()}
        assert files == {f"trust_val_{name}-step={step}.png" for name in FIGURES for step in STEPS}


class TestDrift:
    @pytest.mark.slow
    def test_a_stream_like_the_calibration_samples(self, run: Run, tmp_path: Path) -> None:
        """Lightning does not log in prediction: the loggers get the numbers directly."""
        head, logger = run.watch.head, CSVLogger(tmp_path)
        assert isinstance(head, TrustHead)
        watch = monitor(head=head)
        trainer = quiet_trainer(watch, folder=tmp_path, logger=logger)
        trainer.predict(run.model, loader(blobs(120, 1)), return_predictions=False)
        found = watch.drift
        assert found is not None
        assert (found.seen, found.alarm) == (120, False)
        with torch.no_grad():
            order = torch.randperm(120, generator=torch.Generator().manual_seed(0))
            z = run.model.eval().backbone(blobs(120, 1).tensors[0][order])
            alone = DriftMonitor(head).update(z, run.model.classifier(z))
        assert found.p_value == pytest.approx(alone.p_value, rel=1e-3)
        logger.save()
        with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
            (logged,) = csv.DictReader(file)
        assert float(logged["trust/drift"]) == 0.0
        assert float(logged["trust/drift_p_value"]) == pytest.approx(found.p_value)

    def test_the_order_of_a_data_set_means_nothing(self, tmp_path: Path) -> None:
        """Folders of pictures are sorted by class: the same samples must not raise an alarm for that."""
        x, y = blobs(300, 1).tensors
        head = TrustHead.fit(*blobs(150).tensors, dim=4, progress=False).calibrate(*blobs(400, 2).tensors)
        by_class = y.argsort()
        assert DriftMonitor(head).update(x[by_class]).alarm
        watch = TrustMonitor(lambda module, batch: batch[0], head=head, logits=False)
        data = TensorDataset(x[by_class], y[by_class])
        quiet_trainer(watch, folder=tmp_path).predict(Net(), loader(data), return_predictions=False)
        assert watch.drift is not None
        assert (watch.drift.seen, watch.drift.alarm) == (300, False)

    @pytest.mark.slow
    def test_an_alarm_warns(self, run: Run) -> None:
        with pytest.warns(
            UserWarning, match=r"The stream has drifted \(alarm .*; p = .* after 150 points\). print\(monitor.drift"
        ):
            run.trainer.predict(run.model, loader(drifted(150)), return_predictions=False)
        assert run.watch.drift is not None
        assert run.watch.drift.alarm
        text = (run.folder / "trust" / "predict-epoch=1-step=20.html").read_text(encoding="utf-8")
        assert "The stream has drifted" in text, "the report of the prediction says so too"

    def test_a_head_that_is_not_calibrated(self, tmp_path: Path) -> None:
        x, y = blobs(90).tensors
        watch = TrustMonitor(lambda module, batch: batch[0], head=TrustHead.fit(x, y, progress=False), logits=False)
        quiet_trainer(watch, folder=tmp_path).predict(Net(), loader(blobs(30, 1)), return_predictions=False)
        assert watch.drift is None
        assert math.isnan(watch._drift_numbers(None)["drift"])


def test_packages_of_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec

    def hidden(name: str, *rest: Any) -> Any:
        return None if name == "matplotlib" else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    with pytest.raises(MisconfigurationException, match="report=True needs matplotlib: pip install matplotlib"):
        TrustMonitor("backbone", report=True)
