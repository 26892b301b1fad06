"""Shared parts of the pictures: reproducible files, and marks that the library does not draw."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from experiments.harness import FIGURES
from sepc_torch import Ellipsoid
from sepc_torch.plot import COLORS, MARKERS, outline

mpl.use("Agg")


def save_figure(figure: Figure, name: str) -> Path:
    """Write the figure as PNG; 256 colours take a third of the space."""
    FIGURES.mkdir(exist_ok=True)
    png = FIGURES / f"{name}.png"
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150, bbox_inches="tight")
    picture = Image.open(drawn).convert("RGB")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(png, optimize=True)
    return png


def draw_points(ax: Axes, x: np.ndarray, y: np.ndarray, *, alpha: float = 0.75, names: list[str] | None = None) -> None:
    """Draw points in the colours and shapes of their classes, numbered from 0."""
    for c in range(int(y.max()) + 1):
        label = f"class {c}" if names is None else names[c]
        own = x[y == c]
        ax.scatter(
            own[:, 0], own[:, 1], s=18, c=COLORS[c], marker=MARKERS[c], alpha=alpha, linewidths=0, zorder=2, label=label
        )


def draw_ellipse(
    ax: Axes,
    ellipsoid: Ellipsoid,
    color: str,
    *,
    style: str = "-",
    width: float = 1.8,
    fill: bool = False,
    label: str = "",
) -> None:
    """Draw the outline of an ellipse, with a faint filling if ``fill``."""
    line = outline(ellipsoid)
    if fill:
        ax.fill(*line.T, color=color, alpha=0.12, zorder=1, linewidth=0)
    ax.plot(*line.T, color=color, ls=style, lw=width, zorder=3, label=label or None)


def panel(ax: Axes, letter: str, title: str) -> None:
    """Set a title that begins with the letter of the panel."""
    ax.set_title(f"({letter}) {title}", loc="left", fontsize=11)


def legend_below(ax: Axes, columns: int = 2) -> None:
    """Put the legend below the axes; a legend beside them moves there."""
    beside = ax.get_legend()
    handles = ax.get_legend_handles_labels()[0] if beside is None else beside.legend_handles
    known = [handle for handle in handles if handle is not None]
    ax.legend(handles=known, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=columns, fontsize=10, frameon=False)
