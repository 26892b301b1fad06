"""A small CNN on digits with ``TrustMonitor``, as a script to copy: does the monitor find mistakes, and at what cost?

python -m experiments.labels.lightning_digits

An epoch takes a tenth of a second on one core, and 30 epochs train the network. The last assessment is never skipped,
so it decides about the cost of a shorter run. The long run is assessed several times within the limit of 15 %.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import lightning.pytorch as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from experiments.harness import arguments, write_results
from sepc_torch import TrustMonitor

EPOCHS, REPEATS = 30, 3


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(512, 32), nn.ReLU()
        )
        self.classifier = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.backbone(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_acc", (self(batch[0]).argmax(dim=1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def fit(epochs: int, seed: int, *callbacks: L.Callback) -> tuple[L.Trainer, float]:
    """Train the network; returns the Trainer and the CPU seconds that it took."""
    L.seed_everything(seed, verbose=False)
    pictures, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.from_numpy(pictures).float().view(-1, 1, 8, 8) / 16, torch.from_numpy(labels))
    train, val = torch.utils.data.random_split(data, [1000, len(data) - 1000])
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=list(callbacks), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    begun = time.process_time()
    trainer.fit(Digits(), DataLoader(train, 64, shuffle=True), DataLoader(val, 200))
    return trainer, time.process_time() - begun


def costs(epochs: int, seed: int) -> dict[str, Any]:
    """Medians of repeated runs: CPU seconds of the training, those of the monitor, and their ratio."""
    runs = []
    for _ in range(REPEATS):
        stages: list[tuple[Any, ...]] = []
        monitor = TrustMonitor("backbone", on_flag=lambda *stage, seen=stages: seen.append(stage))
        monitor.cost.clock = time.process_time  # other work on the machine does not count
        _, together = fit(epochs, seed, monitor)
        runs.append((together - monitor.cost.spent, monitor.cost.spent, monitor.cost.share(), len(stages)))
    names = ("training_seconds", "monitor_seconds", "share", "assessed")
    found = {name: median(values) for name, values in zip(names, zip(*runs, strict=True), strict=True)}
    print(f"epochs {epochs}:", ", ".join(f"{name} {value:.2f}" for name, value in found.items()), flush=True)
    return {"epochs": epochs, **found}


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    monitor = TrustMonitor("backbone")
    trainer, _ = fit(1 if options.smoke else EPOCHS, options.seed, monitor)

    print(monitor.flagged["val"])
    numbers = {name: round(float(value), 4) for name, value in trainer.callback_metrics.items()}
    for name in ("val_acc", "trust/val_accepted", "trust/val_acc_accepted", "trust/val_acc_at_80", "trust/val_aurc"):
        print(f"{name:24s} {numbers.get(name, float('nan')):.3f}")
    if not options.smoke:
        results = {"numbers": numbers, "cost": [costs(epochs, options.seed) for epochs in (8, EPOCHS, 80)]}
        write_results("lightning_digits", options, ("torch", "lightning", "scikit-learn"), results)


if __name__ == "__main__":
    main()
