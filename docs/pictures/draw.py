"""Draw the pictures of README.md and of the page "What the numbers mean": ``python docs/pictures/draw.py``.

A small network separates two moons and is sure of itself everywhere. A third group of points, which no training set
has seen, shows what each number of the head says about it.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from sklearn.datasets import make_moons
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from sepc_torch import HeadPrediction, TrustHead
from sepc_torch.plot import COLORS

FOLDER = Path(__file__).parent
INK = "#808080"  # legible on white and on black
STEPS = 121  # grid points in each direction
LOW, HIGH = np.array([-2.2, -1.9]), np.array([4.2, 3.1])
TITLES = {
    "trust": "trust: how many training points of the region support the label?",
    "confidence": "confidence: is the label right, if the point is of a known kind?",
    "p_value": "p-value: how unusual is the point among ordinary ones?",
    "joint": "joint: is the label right and the point of a known kind?",
    "accept": "accept: use the label, or ask a person?",
}


class Example(NamedTuple):
    """A calibrated head, its training points, new points of an unknown kind, and the values on a grid of the plane."""

    head: TrustHead
    points: np.ndarray
    labels: np.ndarray
    unknown: np.ndarray
    softmax: np.ndarray
    values: HeadPrediction


def example(steps: int = STEPS) -> Example:
    x, y = make_moons(400, noise=0.15, random_state=0)
    held, held_y = make_moons(1000, noise=0.15, random_state=1)
    unknown = np.random.default_rng(0).normal([3.3, -1.0], 0.22, size=(40, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        network = MLPClassifier([16], solver="lbfgs", max_iter=200, alpha=1e-3, random_state=0).fit(x, y)

    def logits(z: np.ndarray) -> np.ndarray:
        log_odds = np.maximum(z @ network.coefs_[0] + network.intercepts_[0], 0) @ network.coefs_[1]
        return np.concatenate([np.zeros_like(log_odds), log_odds + network.intercepts_[1]], axis=1)

    head = TrustHead.fit(x, y, normalize=None).calibrate(held, held_y, logits(held))
    head.accept_at(risk=0.02, delta=0.1)
    grid = np.stack(np.meshgrid(*np.linspace(LOW, HIGH, steps).T), axis=-1).reshape(-1, 2)
    softmax = torch.from_numpy(logits(grid)).softmax(dim=1).amax(dim=1)
    return Example(head, x, y, unknown, softmax.numpy(), head.judge(grid, logits(grid)))


def draw_map(ax: Axes, found: Example, values: np.ndarray, title: str, steps: int, bar: str | None) -> None:
    """One value over the plane, the training points and the unknown ones."""
    image = ax.imshow(
        values.reshape(steps, steps), extent=(LOW[0], HIGH[0], LOW[1], HIGH[1]), origin="lower", cmap="viridis",
        vmin=0.0, vmax=1.0, interpolation="bilinear" if bar else "nearest", aspect="equal",
    )  # fmt: skip
    for code, marker in ((0, "o"), (1, "^")):
        ax.scatter(*found.points[found.labels == code].T, s=11, marker=marker, c=COLORS[code], ec="white", lw=0.3)
    ax.scatter(*found.unknown.T, s=22, marker="x", c="red", lw=1.0, label="unknown kind")
    ax.set(xticks=[], yticks=[], xlim=(LOW[0], HIGH[0]), ylim=(LOW[1], HIGH[1]))
    ax.set_title(title, fontsize=9)
    if bar:
        ax.figure.colorbar(image, ax=ax, shrink=0.8, label=bar)


def draw_all(folder: Path = FOLDER, steps: int = STEPS) -> list[Path]:
    """Write one picture for each number, and the picture of README.md; return their paths."""
    with rc_context(
        dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    ):
        return _draw_all(folder, example(steps), steps)


def _draw_all(folder: Path, found: Example, steps: int) -> list[Path]:
    written = []
    for name, title in TITLES.items():
        field = "network_trust" if name == "trust" else name
        figure = Figure(figsize=(5.6, 3.6), layout="constrained")
        ax = figure.subplots()
        draw_map(
            ax, found, getattr(found.values, field).double().numpy(), title, steps, None if name == "accept" else name
        )
        if name == "trust":
            _line(ax, found.values.distance.double().numpy() <= 1.0, steps)  # the union of the ellipsoids
        written.append(_save(figure, folder / f"{name}.png"))
    figure = Figure(figsize=(9.2, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_map(left, found, found.softmax, "softmax of the network: sure almost everywhere", steps, "softmax")
    draw_map(
        right,
        found,
        found.values.joint.numpy(),
        "joint score of the trust head; accepted inside the line",
        steps,
        "joint",
    )
    _line(right, found.values.accept.numpy(), steps)
    right.legend(loc="upper right", fontsize=8, labelcolor="black", facecolor="white")
    written.append(_save(figure, folder / "readme.png"))
    return written


def _line(ax: Axes, inside: np.ndarray, steps: int) -> None:
    """The boundary of a region of the plane."""
    across, up = np.linspace(LOW, HIGH, steps).T
    ax.contour(across, up, inside.astype(float).reshape(steps, steps), [0.5], colors="white", linewidths=1.0)


def _save(figure: Figure, path: Path) -> Path:
    """Write a picture without a ground, of 128 colours: a third of the size of one with all of them."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120, transparent=True)
    Image.open(drawn).quantize(128, Image.Quantize.FASTOCTREE).save(path, optimize=True)
    return path


if __name__ == "__main__":
    for path in draw_all():
        print(path, path.stat().st_size // 1000, "kB")
