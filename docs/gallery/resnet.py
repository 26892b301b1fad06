"""Embeddings of a ResNet: which labels to accept when unknown classes are mixed in.

With SEPC_DATA=folder it reads cifar10_resnet18.npz: embeddings and logits of a ResNet-18 on CIFAR-10, with CIFAR-100
and textures as unknowns. Without it, a synthetic stand-in of the same form shows how the code runs, not how good a head
is.
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from sepc_torch import TrustHead
from sepc_torch.plot import draw_risk_coverage

file = Path(os.environ.get("SEPC_DATA", "")) / "cifar10_resnet18.npz"
rng = np.random.default_rng(0)


def stand_in(count: int, unknown: bool = False) -> tuple[np.ndarray, ...]:
    """Embeddings and logits of ten classes in 32 dimensions, or of unknown points between them, with labels."""
    y = rng.integers(10, size=count)
    z = rng.normal(size=(count, 32)) + (2.0 if unknown else 3.0) * np.eye(10, 32)[y]
    z[:, 12] += 3.0 * unknown
    return z, 2.0 * z[:, :10] + rng.normal(size=(count, 10)), np.full(count, -1) if unknown else y


if file.is_file():
    data = np.load(file)
    sets = [[data[f"{part}_{name}"] for name in ("X", "logits", "y")] for part in ("train", "val", "test")]
    unknown = [
        [data[f"ood_{name}_X"], data[f"ood_{name}_logits"], np.full(600, -1)] for name in ("cifar100", "textures")
    ]
    title = "ResNet-18 on CIFAR-10; CIFAR-100 and textures mixed in"
else:
    sets, unknown = [list(stand_in(n)) for n in (1000, 1000, 1000)], [list(stand_in(300, unknown=True))]
    title = "synthetic stand-in for a ResNet; unknown points mixed in"
(z, _, y), (held_z, held_logits, held_y), test = sets
new_z, new_logits, new_y = (np.concatenate(parts).astype(np.float32) for parts in zip(test, *unknown, strict=True))

head = TrustHead.fit(z, y).calibrate(held_z, held_y, held_logits)
print(head.accept_at(flag_rate=0.1))
out = head.judge(new_z, new_logits)
softmax = torch.from_numpy(new_logits).softmax(dim=1).amax(dim=1)

figure = Figure(figsize=(7, 4.2), layout="constrained")
ax = draw_risk_coverage({"joint score": out.joint, "softmax": softmax}, out.network_label.numpy() == new_y,
                        chosen=float(out.accept.float().mean()), ax=figure.subplots())  # fmt: skip
ax.set_title(title)
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"), dpi=80)
