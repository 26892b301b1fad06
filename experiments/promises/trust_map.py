"""A trust map: a small U-Net labels every pixel of made-up pictures, and a TrustedModel says which labels to accept.

Pixels are the rows, and pictures the units of the promise. Some of the pictures that are drawn hold a star, a kind of
object that the network has never seen. The script draws the picture of the gallery.

    python -m experiments.promises.trust_map
"""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from experiments.harness import arguments
from experiments.pictures import save_figure
from sepc_torch import TrustedModel
from sepc_torch.head.trusted_model import TrustedPrediction

# Colours of the objects; the star is no class.
KINDS = {"ball": (0.85, 0.35, 0.2), "crate": (0.25, 0.45, 0.75), "tent": (0.9, 0.75, 0.3), "star": (0.6, 0.3, 0.6)}
CLASSES, STAR = ["ground", "ball", "crate", "tent"], 4
SHOWN = (["ball", "crate", "tent"], ["star", "tent", "crate"], ["crate", "star", "ball"])
row, column = np.mgrid[:56, :56]


def surface(rng: np.random.Generator, colour: tuple[float, ...]) -> np.ndarray:
    """A colour with waves and noise, (3, H, W)."""
    a, b, c = rng.normal(0, 0.4, 3)
    waves = 0.08 * np.cos(a * row + b * column) + 0.05 * np.cos(c * row - a * column)
    tint, noise = rng.normal(0, 0.06, (3, 1, 1)), rng.normal(0, 0.03, (3, *row.shape))
    found: np.ndarray = np.array(colour)[:, None, None] + waves + tint + noise
    return found


def scene(rng: np.random.Generator, kinds: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """A picture (3, H, W) with objects of some kinds, and the labels of its pixels (H, W)."""
    picture, label = surface(rng, (0.45, 0.55, 0.35)), np.zeros(row.shape, dtype=np.int64)
    for kind, place in zip(kinds, rng.permutation([(15, 15), (41, 15), (15, 41), (41, 41)]), strict=False):
        (x, y), r, turn = place + rng.uniform(-4, 4, 2), rng.uniform(8, 12), rng.uniform(-0.5, 0.5)
        u = (column - x) * np.cos(turn) + (row - y) * np.sin(turn)
        v = (row - y) * np.cos(turn) - (column - x) * np.sin(turn)
        shapes = {
            "ball": np.hypot(u, v) < r,
            "crate": np.maximum(abs(u), abs(v)) < 0.9 * r,
            "tent": (v < 0.7 * r) & (v > 2 * abs(u) - 1.2 * r),
            "star": np.hypot(u, v) < r * (0.9 + 0.3 * np.cos(5 * np.arctan2(v, u))),
        }
        picture = np.where(shapes[kind], surface(rng, KINDS[kind]), picture)
        label[shapes[kind]] = 1 + list(KINDS).index(kind)
    return picture.clip(0, 1).astype(np.float32), label


def loader(rng: np.random.Generator, count: int) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of pictures with two or three objects of known kinds."""
    drawn = [scene(rng, rng.choice(CLASSES[1:], rng.integers(2, 4)).tolist()) for _ in range(count)]
    parts = [torch.from_numpy(np.stack(part)) for part in zip(*drawn, strict=True)]
    return DataLoader(TensorDataset(*parts), batch_size=8, shuffle=True)


class UNet(nn.Module):
    """A U-Net with two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(3, 12, 5, padding=2), nn.Conv2d(12, 32, 5, padding=2)
        self.join, self.last = nn.Conv2d(44, 16, 3, padding=1), nn.Conv2d(16, len(CLASSES), 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, C, H, W)."""
        fine = self.fine(x).relu()
        coarse = self.coarse(nn.functional.max_pool2d(fine, 4)).relu()
        joined = torch.cat([fine, nn.functional.interpolate(coarse, scale_factor=4.0)], dim=1)
        logits: Tensor = self.last(self.join(joined).relu())
        return logits


def trained(training: DataLoader[tuple[Tensor, ...]], epochs: int) -> UNet:
    """A network that is trained for some seconds."""
    network = UNet()
    optimizer = torch.optim.Adam(network.parameters(), 5e-3)
    for pictures, labels in (batch for _ in range(epochs) for batch in training):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(pictures), labels).backward()
        optimizer.step()
    return network.eval()


def draw(shown: list[tuple[np.ndarray, np.ndarray]], out: TrustedPrediction) -> Figure:
    """Picture, labels, trust map and accepted labels, one row for each picture."""
    label, joint, accept = out.label.numpy(), out.joint.numpy(), out.accept.numpy()
    refused = len(CLASSES)
    colours = ListedColormap(["#d8d2c4", "#D55E00", "#0072B2", "#E69F00", "white"])
    figure = Figure(figsize=(10, 8.4), layout="constrained")
    axes = figure.subplots(len(shown), 4, subplot_kw={"xticks": [], "yticks": []})
    for i, (picture, truth) in enumerate(shown):
        axes[i, 0].imshow(picture.transpose(1, 2, 0))
        axes[i, 1].imshow(label[i], colours, vmin=0, vmax=refused)
        trust = axes[i, 2].imshow(joint[i], "viridis", vmin=0, vmax=1)
        axes[i, 3].imshow(np.where(accept[i], label[i], refused), colours, vmin=0, vmax=refused)
        for ax in axes[i] if (truth == STAR).any() else ():
            ax.contour(truth == STAR, [0.5], colors="#CC0077", linewidths=1.5)
    for ax, title in zip(axes[0], ("picture", "labels of the network", "trust map", "accepted labels"), strict=True):
        ax.set_title(title)
    figure.colorbar(trust, ax=axes[-1, 2], location="bottom", label="joint score", pad=0.02)
    names = [*CLASSES, "refused"]
    patches = [Patch(facecolor=colours(code), edgecolor="gray", label=name) for code, name in enumerate(names)]
    patches.append(Patch(fill=False, edgecolor="#CC0077", label="unknown object"))
    figure.legend(handles=patches, ncols=len(patches), loc="outside lower center", frameon=False)
    return figure


def main() -> None:
    """Train, fit, and draw."""
    args = arguments(__doc__).parse_args()
    rng = np.random.default_rng(args.seed)
    torch.manual_seed(args.seed)
    count, epochs = (40, 2) if args.smoke else (160, 8)
    training, calibration = loader(rng, count), loader(rng, count)
    # 300 pixels of each class are enough for four classes, and fast.
    trusted = TrustedModel.fit(trained(training, epochs), training, calibration, risk=0.05, max_per_class=300).eval()
    print(trusted.head.promise)
    shown = [scene(rng, kinds) for kinds in SHOWN]
    with torch.no_grad():
        out = trusted(torch.from_numpy(np.stack([picture for picture, _ in shown])))
    truth, accept = np.stack([label for _, label in shown]), out.accept.numpy()
    for name, chosen in (("known kinds", truth != STAR), ("stars", truth == STAR)):
        print(f"accepted pixels of {name}: {accept[chosen].mean():.0%}")
    figure = draw(shown, out)
    if not args.smoke:
        save_figure(figure, "trust_map")


if __name__ == "__main__":
    main()
