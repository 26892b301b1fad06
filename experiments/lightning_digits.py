"""A small CNN on digits with ``TrustMonitor``, as a script to copy: does the monitor find mistakes during training?

python experiments/lightning_digits.py
"""

from __future__ import annotations

import lightning.pytorch as L
import torch
from harness import arguments, environment, write_results
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sepc_torch import TrustMonitor


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


def main() -> None:
    options = arguments(__doc__).parse_args()
    L.seed_everything(options.seed)
    pictures, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.from_numpy(pictures).float().view(-1, 1, 8, 8) / 16, torch.from_numpy(labels))
    train, val = torch.utils.data.random_split(data, [1000, len(data) - 1000])

    monitor = TrustMonitor("backbone")
    trainer = L.Trainer(
        max_epochs=1 if options.smoke else 8, accelerator="cpu", callbacks=[monitor], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Digits(), DataLoader(train, 64, shuffle=True), DataLoader(val, 200))

    print(monitor.flagged["val"])
    numbers = {name: round(float(value), 4) for name, value in trainer.callback_metrics.items()}
    for name in (
        "val_acc",
        "trust/val_accepted",
        "trust/val_acc_accepted",
        "trust/val_acc_at_80",
        "trust/val_aurc",
        "trust/cost",
    ):
        print(f"{name:24s} {numbers.get(name, float('nan')):.3f}")
    if not options.smoke:
        results = {
            "command": "python experiments/lightning_digits.py",
            "environment": environment("torch", "lightning", "scikit-learn"),
            "seed": options.seed,
            "numbers": numbers,
        }
        print(f"written: {write_results('lightning_digits', results).name}")


if __name__ == "__main__":
    main()
