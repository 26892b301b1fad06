"""Every misuse of the monitor gets an error that says what to do."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning_parts import Net, blobs, fitted, loader, monitor, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from sepc_torch import TrustMonitor
from sepc_torch.callbacks import MisconfigurationException

Rng = np.random.Generator

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    # The head of the small network projects on few dimensions where classes are small; that is the tests' own choice.
    pytest.mark.filterwarnings("ignore:.*classes have fewer than:UserWarning"),
]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (blobs(60)[i] for i in range(60))


def returns_a_tuple(module: Any, batch: Any) -> Any:
    return (module.backbone(batch[0]),)


class TestMisuse:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"embed": 3}, "name of a submodule or a function"),
            ({"head": "sepc"}, "SEPC or a TrustHead"),
            ({"fit": 3}, "options of TrustHead.fit as a dictionary"),
            ({"threshold": 1.5}, "threshold must lie between 0 and 1"),
            ({"threshold": None}, "Give threshold or flag_fraction"),
            ({"threshold": 0.7, "flag_fraction": 0.1}, "Give threshold or flag_fraction"),
            ({"flag_fraction": 0.0}, "flag_fraction must lie between 0 and 1"),
            ({"reasons": ("strange",)}, "some of novel, disagrees, ambiguous"),
            ({"reasons": ("disagrees",)}, "logits='classifier'"),
            ({"refit_every_n_epochs": -1}, "refit_every_n_epochs must be an integer of at least 0"),
            ({"max_fit_per_class": 0}, "max_fit_per_class must be an integer of at least 1"),
            ({"stages": ("train",)}, "'validate', 'test', 'predict'"),
            ({"file_format": "xml"}, "'csv', 'jsonl'"),
            ({"refit_errors": "ignore"}, "'warn', 'raise'"),
            ({"inputs": 3}, "inputs must be a function"),
            ({"novel_distance": 0.5}, "novel_distance at least 1"),
            ({"dirpath": __file__}, "is a file; name a folder"),
        ],
    )
    def test_settings(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(MisconfigurationException, match=message):
            # Without the type checks of these tests, as users run it.
            inspect.unwrap(TrustMonitor.__init__)(object.__new__(TrustMonitor), **{"embed": "backbone", **options})

    @pytest.mark.parametrize(
        ("watch", "train", "val", "message"),
        [
            (TrustMonitor("backbones"), None, None, r"no submodule of Picky. Did you mean 'backbone'\? It has"),
            (TrustMonitor(returns_a_tuple), None, None, "returns a tuple"),
            (TrustMonitor("backbone"), None, loader(blobs(30), shuffle=True), "Do not shuffle"),
            (TrustMonitor("backbone"), None, loader(Endless()), "an iterable data set"),
            (TrustMonitor("backbone"), loader(Endless()), None, "it cannot be read by index"),
            (TrustMonitor("backbone"), {"a": loader(blobs(30))}, None, "fit_data="),
            (TrustMonitor("backbone", ids="file"), None, None, "ids='file' is not in a batch"),
            (TrustMonitor("backbone", ids=lambda b: [1.5] * len(b[0])), None, None, "whole numbers or text"),
            (TrustMonitor("backbone", ids=lambda b: [1]), None, None, "There are 1 ids for a batch of"),
            (TrustMonitor("backbone", labels=lambda b: b[0]), None, None, r"tensor \(batch,\) of whole numbers"),
            (TrustMonitor("backbone", labels=lambda b: None), None, None, "label; found none"),
            (TrustMonitor(lambda m, b: m.backbone(b[0])[:2]), None, None, r"gave \[2\] rows for a batch of 16"),
        ],
    )
    @pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled")
    def test_in_a_run(self, tmp_path: Path, watch: TrustMonitor, train: Any, val: Any, message: str) -> None:
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

    def test_a_submodule_that_does_not_run(self, tmp_path: Path) -> None:
        class Idle(Net):
            def __init__(self) -> None:
                super().__init__()
                self.idle = nn.Linear(2, 2)

        with pytest.raises(MisconfigurationException, match="'idle' did not run in this step"):
            quiet_trainer(TrustMonitor("idle"), folder=tmp_path).fit(Idle(), loader(blobs(150)), loader(blobs(61, 1)))

    def test_no_head(self, tmp_path: Path) -> None:
        for stage in ("validate", "test", "predict"):
            with pytest.raises(MisconfigurationException, match=f"no head to {stage} with"):
                getattr(quiet_trainer(monitor(), folder=tmp_path), stage)(Net(), loader(blobs(61, 1)))

    def test_another_width(self, tmp_path: Path) -> None:
        watch, model, _ = fitted(tmp_path)
        wide = TrustMonitor(lambda module, batch: batch[0], head=watch.head)
        with pytest.raises(MisconfigurationException, match="have 8 features, and the head was fitted to 16"):
            quiet_trainer(wide, folder=tmp_path).test(model, loader(blobs(20)), verbose=False)

    def test_broken_embeddings_to_fit_to(self, tmp_path: Path) -> None:
        x, y = blobs(150).tensors
        x[[4, 9]] = math.nan
        watch = monitor(fit_data=TensorDataset(x, y))
        with pytest.warns(UserWarning, match=r"2 embeddings hold NaN or infinity, those of the samples \[4, 9\]"):
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
            """The name is what counts; the real one needs GPUs."""

        run = quiet_trainer(monitor(), folder=tmp_path, strategy=FSDPStrategy(device="cpu"), devices="auto")
        with pytest.raises(MisconfigurationException, match="keeps only a part in each process"):
            run.fit(Net(), loader(blobs(30)), loader(blobs(30, 1)))
