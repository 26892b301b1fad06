"""Lightning: accuracy of all labels and of the accepted ones, epoch by epoch, with one callback."""

import sys
from pathlib import Path

import lightning.pytorch as L
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sepc_torch import TrustMonitor

torch.manual_seed(0)
pixels, digit = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
data = TensorDataset(pixels.float() / 16, digit)
train, val = torch.utils.data.random_split(data, [800, len(data) - 800])


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.classifier = nn.Sequential(nn.Linear(64, 32), nn.ReLU()), nn.Linear(32, 10)
        self.curve: list[list[float]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.backbone(x))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_acc", (self(batch[0]).argmax(dim=1) == batch[1]).float().mean())

    def on_train_epoch_start(self) -> None:
        names = ("trust/val_acc", "trust/val_acc_accepted", "trust/val_accepted")
        self.curve.append([float(self.trainer.callback_metrics.get(name, torch.nan)) for name in names])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=5e-3)


model, monitor = Digits(), TrustMonitor(flag_rate=0.1)
trainer = L.Trainer(max_epochs=6, accelerator="cpu", callbacks=[monitor], logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
trainer.fit(model, DataLoader(train, 64, shuffle=True), DataLoader(val, 500))
model.on_train_epoch_start()
figure = Figure(figsize=(7, 4), layout="constrained")
ax = figure.subplots()
every, accepted, share = zip(*model.curve, strict=True)
ax.plot(every, "o-", label="right, of all labels")
ax.plot(accepted, "^-", label="right, of the accepted")
ax.plot(share, "s--", label="accepted")
ax.set(xlabel="epochs", ylabel="share of validation samples")
ax.legend()
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"), dpi=80)
