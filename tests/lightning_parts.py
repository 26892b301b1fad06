"""Small network, data and Trainer for the tests of the Lightning callback and the scripts that they start."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sepc_torch import TrustMonitor
from sepc_torch.training.trust_table import TrustTable

FEATURES, CLASSES = 8, 3
# Options of a small head, which is fast to fit.
FIT: dict[str, Any] = {"dim": 4}


class Net(L.LightningModule):
    """An encoder and a classifier without any code for the monitor, as users write them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout))
        self.classifier = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.backbone(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self(batch[0])

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self(batch[0])

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


def blobs(n: int, seed: int = 0) -> TensorDataset:
    """Three clouds with labels. With seed 0, for training, they are apart and fast to fit; otherwise they overlap."""
    generator = torch.Generator().manual_seed(seed)
    spread = 0.6 if seed == 0 else 1.2
    y = torch.arange(n) % CLASSES
    x = torch.randn(n, FEATURES, generator=generator) * spread
    x[:, :CLASSES] += 2.5 * nn.functional.one_hot(y, CLASSES)
    return TensorDataset(x, y)


def drifted(n: int) -> TensorDataset:
    """Samples of one class only, far from those of ``blobs``."""
    x, y = blobs(CLASSES * n, 4).tensors
    return TensorDataset(x[y == 0] + 3.0, y[y == 0])


def loader(data: Any, shuffle: bool = False, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, **{"batch_size": 16, "shuffle": shuffle, **options})


@contextmanager
def messages(caplog: Any) -> Iterator[None]:
    """Collect the messages of Lightning's logger, which need not reach the root logger."""
    logger = logging.getLogger("lightning.pytorch")
    before, logger.propagate = logger.propagate, True
    try:
        with caplog.at_level("INFO", logger.name):
            yield
    finally:
        logger.propagate = before


def quiet_trainer(*callbacks: Callback, folder: Path | str = ".", **options: Any) -> L.Trainer:
    """A Trainer on the CPU without logger, checkpoints, progress bar or summary, unless ``options`` enable them."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "default_root_dir": folder,
    }
    return L.Trainer(callbacks=list(callbacks), **{**defaults, **options})


def monitor(**options: Any) -> TrustMonitor:
    """A monitor of the small network. Without a limit of the cost, refits do not depend on the speed of the machine."""
    return TrustMonitor(**{"embed": "backbone", "fit": FIT, "max_cost": None, **options})


def fitted(folder: Path, trainer: dict[str, Any] | None = None, **options: Any) -> tuple[TrustMonitor, Net, L.Trainer]:
    """A monitor after two epochs of training, with its network and Trainer."""
    watch, model = monitor(**options), Net()
    run = quiet_trainer(watch, folder=folder, **(trainer or {}))
    run.fit(model, loader(blobs(150), shuffle=True), loader(blobs(61, 1)))
    return watch, model, run


def same_tables(a: TrustTable, b: TrustTable) -> bool:
    """Whether two tables have equal ids and columns."""
    return a.ids == b.ids and all(torch.equal(a.columns[name], b.columns[name]) for name in a.columns)
