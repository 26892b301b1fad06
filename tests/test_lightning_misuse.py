"""Tests of the callback's error messages: every misuse raises an error that says how to correct it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning_parts import CLASSES, FEATURES, Net, blobs, fitted, loader, monitor, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from sepc_torch import TrustMonitor
from sepc_torch.head.network import Places
from sepc_torch.training.lightning import MisconfigurationException
from sepc_torch.training.lightning.hooks import LogitsFinder

Rng = np.random.Generator

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    # The warning about small classes is expected: the tests fit heads to few samples, to be fast.
    pytest.mark.filterwarnings("ignore:Classes with fewer than:UserWarning"),
    pytest.mark.filterwarnings("ignore:TrustMonitor. the head is not calibrated:UserWarning"),  # few samples are fast
]


class Iterable(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (blobs(60)[i] for i in range(60))


def returns_a_tuple(module: Any, batch: Any) -> Any:
    return (module.backbone(batch[0]),)


def float_labels() -> TensorDataset:
    x, y = blobs(60).tensors
    return TensorDataset(x, y.float())


def several_labels() -> TensorDataset:
    x, y = blobs(60).tensors
    return TensorDataset(x, torch.stack([y, 1 - y], dim=1))


def longer_every_time(module: Any, batch: Any) -> Tensor:
    """Embeddings of varying width, as of sequences that are padded per batch."""
    module.calls = getattr(module, "calls", 0) + 1
    return nn.functional.pad(module.backbone(batch[0]), (0, module.calls - 1))


def one_logit(module: Any, batch: Any) -> Tensor:
    return module(batch[0])[:, 0]


def shifted_labels(by: int) -> TrustMonitor:
    """A monitor whose labels do not match the columns of the logits."""
    return monitor(logits="classifier", labels=lambda batch: batch[1] + by)


class TestMisuse:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"embed": 3}, "name of a submodule or a function"),
            ({"head": "sepc"}, "SEPC or a TrustHead"),
            ({"fit": 3}, "options of TrustHead.fit as a dictionary"),
            ({"flag_rate": 1.0}, "flag_rate must lie between 0 and 1"),
            ({"flag_rate": "0.5"}, "flag_rate must be a number"),
            ({"risk": 2}, "risk must lie between 0 and 1"),
            ({"max_cost": 0}, "max_cost must be a number above 0"),
            ({"calibrate": 3}, "calibrate must be an indexable data set"),
            ({"logits": True}, "logits must be the name of a submodule or a function"),
            ({"refit_every_n_epochs": -1}, "refit_every_n_epochs must be an integer of at least 0"),
            ({"fit": {"max_per_class": 0}}, "max_per_class must be an integer of at least 1"),
            ({"inputs": 3}, "inputs must be a function"),
            ({"dirpath": __file__}, "is a file; name a folder"),
            ({"dirpath": 3}, "dirpath must be a path"),
            ({"dirpath": b"x"}, "dirpath must be a path"),
            ({"prefix": ""}, "prefix must be a non-empty string"),
            ({"prefix": None}, "prefix must be a non-empty string"),
            ({"ids": 3}, "ids must be a function"),
            ({"pool": 3}, "pool must be a LabelPool"),
            ({"fit_data": 3}, "fit_data must be an indexable data set"),
            ({"fit": {"bogus": 1}}, "fit has the unknown options 'bogus'; TrustHead.fit accepts 'dim'"),
        ],
    )
    def test_invalid_arguments(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(MisconfigurationException, match=message):
            # Unwrapped, so that beartype does not reject the argument first.
            inspect.unwrap(TrustMonitor.__init__)(object.__new__(TrustMonitor), **{"embed": "backbone", **options})

    @pytest.mark.parametrize(
        ("watch", "train", "val", "message"),
        [
            (TrustMonitor("backbones"), None, None, r"no submodule of Picky. Did you mean 'backbone'\? It has"),
            (TrustMonitor(returns_a_tuple), None, None, "returns a tuple"),
            (TrustMonitor("backbone"), None, loader(blobs(30), shuffle=True), "Do not shuffle"),
            (TrustMonitor("backbone"), None, loader(Iterable()), "an iterable data set"),
            (TrustMonitor("backbone"), loader(Iterable()), None, "it cannot be read by index"),
            (TrustMonitor("backbone"), {"a": loader(blobs(30))}, None, "fit_data="),
            (TrustMonitor("backbone", ids="file"), None, None, "ids='file' is not a key of a batch"),
            (TrustMonitor("backbone", ids=lambda b: [1.5] * len(b[0])), None, None, "integers or text"),
            (TrustMonitor("backbone", ids=lambda b: [1]), None, None, "There are 1 ids for a batch of"),
            (TrustMonitor("backbone", labels=lambda b: b[0]), None, None, r"tensor \(batch,\) of integers"),
            (TrustMonitor("backbone", labels=lambda b: None), None, None, "label per sample; found none"),
            (TrustMonitor("backbone", fit_data=float_labels()), None, None, r"found torch.float32.*batch\[1\].long"),
            (
                TrustMonitor("backbone", fit_data=several_labels()),
                None,
                None,
                r"found torch.int64 of shape \(60, 2\). Labels are one class per sample.* one monitor for each of them",
            ),
            (
                TrustMonitor("backbone", labels=lambda b: nn.functional.one_hot(b[1])),
                None,
                None,
                r"Labels are one class per sample.*batch\['label'\].argmax\(dim=1\)",
            ),
            (
                TrustMonitor("backbone", inputs=lambda b: (b[0], b[1])),
                None,
                None,
                "forward of Picky does not accept the result of inputs=.*tuple of all",
            ),
            (
                TrustMonitor(longer_every_time),
                None,
                None,
                "returned 16 and 17 features .* expected one vector per sample",
            ),
            (
                TrustMonitor("backbone", logits=one_logit),
                None,
                None,
                "one number per sample; expected one column per class",
            ),
            (shifted_labels(10), None, None, r"the classes 0 to 2, .* outside this range: \[10, 11, 12\]"),
            (shifted_labels(1), None, None, r"the classes 0 to 2, .* outside this range: \[3\]"),
            (TrustMonitor(lambda m, b: m.backbone(b[0])[:2]), None, None, r"returned \[2\] rows for a batch of 16"),
        ],
    )
    @pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled")
    def test_errors_in_a_run(self, tmp_path: Path, watch: TrustMonitor, train: Any, val: Any, message: str) -> None:
        class Picky(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                return super().training_step(batch["a"] if isinstance(batch, dict) else batch, batch_idx)

        model = Picky()
        with pytest.raises(MisconfigurationException, match=message):
            quiet_trainer(watch, folder=tmp_path).fit(
                model,
                loader(blobs(150)) if train is None else train,
                loader(blobs(61, 1)) if val is None else val,
            )
        assert not model.backbone._forward_hooks

    @pytest.mark.slow
    def test_one_monitor_for_each_of_several_labels(self, tmp_path: Path) -> None:
        """The remedy that the error message of several labels names."""

        class Several(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                return nn.functional.binary_cross_entropy_with_logits(self(batch[0])[:, :2], batch[1].float())

        def watch(label: int) -> TrustMonitor:
            return monitor(
                labels=lambda batch: batch[1][:, label].long(),
                logits=lambda module, batch: module(batch[0])[:, [label]],
                prefix=f"trust_{label}",
            )

        x, y = blobs(150).tensors
        held, other = blobs(61, 1).tensors
        train, val = (TensorDataset(a, torch.stack([b == 0, b != 2], dim=1).long()) for a, b in ((x, y), (held, other)))
        both = [watch(0), watch(1)]
        run = quiet_trainer(*both, folder=tmp_path, max_epochs=1)
        run.fit(Several(), loader(train), loader(val))
        for label, each in enumerate(both):
            table = each.scores["val"]
            assert torch.equal(table.columns["target"], val.tensors[1][torch.tensor(table.ids), label])
            assert math.isfinite(run.callback_metrics[f"trust_{label}/val_aurc"])

    def test_a_submodule_that_does_not_run(self, tmp_path: Path) -> None:
        class Idle(Net):
            def __init__(self) -> None:
                super().__init__()
                self.idle = nn.Linear(2, 2)

        with pytest.raises(MisconfigurationException, match="'idle' did not run in this step"):
            quiet_trainer(TrustMonitor("idle"), folder=tmp_path).fit(Idle(), loader(blobs(150)), loader(blobs(61, 1)))

    def test_an_unknown_argument(self) -> None:
        with pytest.raises(TypeError, match="unexpected keyword argument 'flag_rates'"):
            TrustMonitor("backbone", flag_rates=0.1)  # type: ignore[call-arg]

    def test_no_forward(self, tmp_path: Path) -> None:
        class Stepwise(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = Net()

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                return self.net.training_step(batch, batch_idx)

            def configure_optimizers(self) -> Any:
                return self.net.configure_optimizers()

        run = quiet_trainer(TrustMonitor("net.backbone"), folder=tmp_path, max_epochs=1)
        with pytest.raises(MisconfigurationException, match=r"Stepwise has no forward of its own.*embed="):
            run.fit(Stepwise(), loader(blobs(30)))

    def test_repeated_ids(self, tmp_path: Path) -> None:
        watch, model, _ = fitted(tmp_path, trainer={"max_epochs": 1})
        same = monitor(head=watch.head, ids=lambda b: [0] * len(b[0]))
        with pytest.warns(UserWarning, match="60 of 61 samples have the id of another sample"):
            quiet_trainer(same, folder=tmp_path).validate(model, loader(blobs(61, 1)), verbose=False)

    @pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # Lightning's warning, expected here
    def test_a_checkpoint_of_another_prefix(self, tmp_path: Path) -> None:
        _, model, run = fitted(tmp_path, trainer={"max_epochs": 1})
        run.save_checkpoint(tmp_path / "x.ckpt")
        with pytest.raises(MisconfigurationException, match=r"the same prefix \(this one has prefix='late'\)"):
            quiet_trainer(monitor(prefix="late"), folder=tmp_path).test(
                model, loader(blobs(20, 1)), ckpt_path=tmp_path / "x.ckpt"
            )

    def test_no_head(self, tmp_path: Path) -> None:
        for stage in ("validate", "test", "predict"):
            with pytest.raises(MisconfigurationException, match=f"no head to {stage} with"):
                getattr(quiet_trainer(monitor(), folder=tmp_path), stage)(Net(), loader(blobs(61, 1)))

    def test_embeddings_of_another_width(self, tmp_path: Path) -> None:
        watch, model, _ = fitted(tmp_path)
        wide = TrustMonitor(lambda module, batch: batch[0], head=watch.head)
        with pytest.raises(MisconfigurationException, match="have 8 features, but the head was fitted to 16"):
            quiet_trainer(wide, folder=tmp_path).test(model, loader(blobs(20)), verbose=False)

    def test_fit_to_embeddings_with_nan(self, tmp_path: Path) -> None:
        x, y = blobs(150).tensors
        x[[4, 9]] = math.nan
        watch = monitor(fit_data=TensorDataset(x, y))
        with pytest.warns(
            UserWarning, match=r"2 embeddings hold NaN or infinity; the first belong to the samples \[4, 9\]"
        ):
            quiet_trainer(watch, folder=tmp_path, max_epochs=1).fit(Net(), loader(blobs(150)), loader(blobs(61, 1)))
        assert watch.head is None

    def test_one_class(self, tmp_path: Path) -> None:
        x, y = blobs(150).tensors
        with pytest.warns(UserWarning, match="the refit failed: ValueError"):
            quiet_trainer(monitor(fit_data=TensorDataset(x, 0 * y)), folder=tmp_path, max_epochs=1).fit(
                Net(), loader(blobs(150)), loader(blobs(61, 1))
            )

    def test_sharded_weights(self, tmp_path: Path) -> None:
        from lightning.pytorch.strategies import SingleDeviceStrategy

        class FSDPStrategy(SingleDeviceStrategy):
            """The monitor checks the name only; the real strategy needs GPUs."""

        run = quiet_trainer(monitor(), folder=tmp_path, strategy=FSDPStrategy(device="cpu"), devices="auto")
        with pytest.raises(MisconfigurationException, match="FSDPStrategy shards its weights"):
            run.fit(Net(), loader(blobs(30)), loader(blobs(30, 1)))


def test_a_module_without_a_linear_layer_must_name_its_embedding(tmp_path: Path) -> None:
    class Normalised(Net):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.BatchNorm1d(FEATURES))
            self.classifier = nn.BatchNorm1d(FEATURES)  # type: ignore[assignment]

    run = quiet_trainer(TrustMonitor(), folder=tmp_path)
    with pytest.raises(MisconfigurationException, match=r"No linear layer was found.*TrustMonitor\('backbone'\)"):
        run.fit(Normalised(), loader(blobs(30)), loader(blobs(30, 1)))


def test_the_message_about_missing_logits_names_a_layer_of_the_module() -> None:
    finder = LogitsFinder("trust")
    finder.attach(Net(), Places("classifier"))
    finder.classes = CLASSES
    assert "logits='classifier'" in finder.finding
    finder.classes = CLASSES + 1  # no layer has as many outputs
    assert "logits=lambda module, batch: ..." in finder.finding
    finder.detach()
