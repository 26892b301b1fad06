"""Pictures of two-dimensional partitions and decision regions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sepc_torch.data.labels import training_set
from sepc_torch.ellipsoid import Ellipsoid, Kind
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.partitioning.record import Partition
from sepc_torch.plot.palette import COLORS, axes_or_new, class_style
from sepc_torch.shapes import Array, Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sepc_torch.model.sepc import SEPC


def outline(ellipsoid: Ellipsoid, points: int = 200) -> Float[Array, "P 2"]:
    r"""Points along the boundary of an ellipse, :math:`c + W^{-1} (\cos t, \sin t)`.

    >>> import numpy as np
    >>> outline(Ellipsoid.ball(np.zeros(2), 2.0), points=3).round(6) + 0.0
    array([[ 2.,  0.],
           [-2.,  0.],
           [ 2.,  0.]])
    """
    if ellipsoid.dim != 2:
        raise ValueError(f"Only an ellipsoid of 2 dimensions can be drawn; this one has {ellipsoid.dim} dimensions.")
    t = np.linspace(0.0, 2.0 * np.pi, points)
    circle = np.stack([np.cos(t), np.sin(t)])
    return ellipsoid.center + np.linalg.solve(ellipsoid.whitener, circle).T


def draw_partition(
    partition: Partition, X: Any, y: Any, *, hyperplanes: bool = True, legend: bool = True, ax: Axes | None = None
) -> Axes:
    """Draw labelled points, the ellipses that cover them and the hyperplane of every iteration.

    Each iteration has a dotted line halfway between its two parallel hyperplanes, with the number of the iteration.
    Ellipses of terminal sets are dashed. A ring marks an isolated point.

    Args:
        partition: A partition of two-dimensional points.
        X: The points to draw (N, 2).
        y: Labels of the points (N,).
        hyperplanes: Whether to draw the hyperplanes; with many classes they hide the ellipses.
        legend: Whether to draw a legend beside the axes; a figure with several panels needs one legend.
        ax: Axes to draw on; new axes by default.

    Returns:
        The axes.
    """
    data = training_set(X, y, partition.classes)
    ax = axes_or_new(ax, (8.0, 5.5))
    labels = partition.classes.tolist()
    for c, label in enumerate(labels):
        color, marker = class_style(c)
        own = data.points[data.codes == c]
        ax.scatter(
            own[:, 0],
            own[:, 1],
            s=16,
            c=color,
            marker=marker,
            alpha=0.75,
            linewidths=0,
            zorder=2,
            label=f"class {label}",
        )
        for e in (e for e in partition.ellipsoids if e.label == label):
            if e.kind is Kind.ISOLATED:
                ax.plot(*e.center, marker="o", ms=9, mfc="none", mec=color, mew=1.2, zorder=3)
                continue
            style = "--" if e.kind is Kind.TERMINAL else "-"
            ax.fill(*outline(e).T, color=color, alpha=0.10, zorder=1)
            ax.plot(*outline(e).T, color=color, lw=1.6, ls=style, zorder=3)
    box = _frame(partition, data.points)
    if hyperplanes:
        _draw_hyperplanes(partition, ax, box)
    ax.set(xlim=(box[0][0], box[1][0]), ylim=(box[0][1], box[1][1]))
    names = partition.feature_names or ("feature 0", "feature 1")
    ax.set(xlabel=names[0], ylabel=names[1])
    if not legend:
        return ax
    handles, _ = ax.get_legend_handles_labels()
    kinds = {e.kind for e in partition.ellipsoids}
    handles.append(Line2D([], [], color="0.3", lw=1.6, label="ellipsoid"))
    if Kind.TERMINAL in kinds:
        handles.append(Line2D([], [], color="0.3", lw=1.6, ls="--", label="terminal ellipsoid"))
    if Kind.ISOLATED in kinds:
        handles.append(Line2D([], [], color="0.3", ls="", marker="o", ms=9, mfc="none", label="isolated point"))
    if hyperplanes and partition.hyperplanes:
        handles.append(Line2D([], [], color="0.45", lw=1.0, ls=":", label="hyperplane of iteration n"))
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9, frameon=False)
    return ax


def draw_decisions(sepc: SEPC | TrustHead, X: Any, y: Any, ax: Axes | None = None, *, legend: bool = True) -> Axes:
    """Draw labelled points over the plane coloured by predicted label; a deeper colour means more trust.

    White means trust no better than chance. Hatching marks the area outside every ellipsoid: a label there is an
    extrapolation, even where its trust is high.

    Args:
        sepc: A frozen model of two-dimensional points, or a trust head of embeddings of two features.
        X: The points to draw (N, 2).
        y: Labels of the points (N,).
        ax: Axes to draw on; new axes by default.
        legend: Whether to draw a legend and a colour bar beside the axes.

    Returns:
        The axes.
    """
    features = sepc.in_features if isinstance(sepc, TrustHead) else sepc.dim
    if features != 2:
        raise ValueError(f"Only a model of 2 features can be drawn; this model has {features} features.")
    data = training_set(X, y, sepc.classes)
    ax = axes_or_new(ax, (8.0, 5.5))
    low, high = data.points.min(axis=0), data.points.max(axis=0)
    low, high = low - 0.18 * (high - low), high + 0.18 * (high - low)
    # 400 steps per axis resolve thin ellipses at the default figure size.
    across, up = (np.linspace(low[axis], high[axis], 400) for axis in (0, 1))
    grid = np.stack(np.meshgrid(across, up), axis=-1)
    with torch.no_grad():
        out = sepc(sepc.as_tensor(grid.reshape(-1, 2)))
    chance = 1.0 / len(sepc.classes)
    depth = ((out.trust.cpu().numpy() - chance) / (1.0 - chance)).clip(0.0, 1.0)
    palette = np.array([to_rgb(COLORS[c % len(COLORS)]) for c in range(len(sepc.classes))])
    # 0.45 keeps the colour of full trust pale enough for the points to remain visible.
    color = 1.0 - 0.45 * depth[:, None] * (1.0 - palette[out.label.cpu().numpy()])
    extent = (low[0], high[0], low[1], high[1])
    ax.imshow(color.reshape(*grid.shape[:2], 3), extent=extent, origin="lower", aspect="auto", zorder=0)
    distance = out.distance.cpu().numpy().reshape(grid.shape[:2])
    beyond = ax.contourf(across, up, distance, levels=[1.0, np.inf], colors="none", hatches=["///"], zorder=1)
    beyond.set(edgecolor="0.7", linewidth=0.0)
    ax.contour(across, up, distance, levels=[1.0], colors="0.25", linewidths=1.0, zorder=2)
    for c, label in enumerate(sepc.classes):
        own = data.points[data.codes == c]
        ax.scatter(
            own[:, 0],
            own[:, 1],
            s=18,
            c=class_style(c)[0],
            marker=class_style(c)[1],
            edgecolors="white",
            linewidths=0.4,
            zorder=3,
            label=f"class {label}",
        )
    names = sepc.feature_names or ("feature 0", "feature 1")
    ax.set(xlim=extent[:2], ylim=extent[2:], xlabel=names[0], ylabel=names[1])
    if not legend:
        return ax
    handles, _ = ax.get_legend_handles_labels()
    handles.append(Line2D([], [], color="0.25", lw=1.0, label="boundary of the ellipsoids"))
    handles.append(Patch(facecolor="none", edgecolor="0.7", hatch="///", lw=0.0, label="outside every ellipsoid"))
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9, frameon=False)
    greys = LinearSegmentedColormap.from_list("trust", ["1.0", "0.55"])
    bar = ScalarMappable(cmap=greys)
    bar.set_clim(chance, 1.0)
    ax.figure.colorbar(bar, ax=ax, label="trust in the label (colour depth)", pad=0.02, aspect=30)
    return ax


def _frame(partition: Partition, points: Float[Array, "N 2"]) -> tuple[Array, Array]:
    """Lower and upper corner of the axes: the points and every ellipse, with a margin."""
    low, high = points.min(axis=0), points.max(axis=0)
    size = high - low
    lines = [outline(e) for e in partition.ellipsoids if e.kind is not Kind.ISOLATED]
    drawn = np.concatenate([*lines, points])
    low, high = low - 0.18 * size, high + 0.18 * size
    return np.minimum(low, drawn.min(axis=0) - 0.03 * size), np.maximum(high, drawn.max(axis=0) + 0.03 * size)


def _draw_hyperplanes(partition: Partition, ax: Axes, box: tuple[Array, Array]) -> None:
    """Draw the dotted line of every iteration and its number."""
    taken: list[Array] = []
    for h in partition.hyperplanes:
        ends = _line_in_box(h.w, 0.5 * (h.alpha + h.beta), box)
        if ends is None:
            continue
        ax.plot(*ends.T, color="0.45", lw=1.0, ls=":", zorder=2)
        at = _number_position(ends, taken, box)
        taken.append(at)
        pad = {"boxstyle": "circle,pad=0.15", "fc": "white", "ec": "0.6", "lw": 0.6}
        ax.text(at[0], at[1], str(h.iteration), fontsize=8, color="0.25", ha="center", va="center", bbox=pad, zorder=4)


def _number_position(ends: Float[Array, "2 2"], taken: list[Array], box: tuple[Array, Array]) -> Float[Array, "2"]:
    """Position of a number on its line: near the upper end, or elsewhere if another number is too close."""
    spots = [ends[1] + share * (ends[0] - ends[1]) for share in (0.04, 0.96, 0.12, 0.88, 0.2, 0.8)]
    for at in spots:
        if all(np.abs((at - other) / (box[1] - box[0])).max() > 0.045 for other in taken):
            return at
    return spots[0]


def _line_in_box(w: Float[Array, "2"], level: float, box: tuple[Array, Array]) -> Float[Array, "2 2"] | None:
    r"""End points, lower one first, of the line :math:`w^\top z = t` inside the box; None if it misses the box."""
    ends = []
    for axis in (0, 1):
        other = 1 - axis
        if w[other] == 0:
            continue
        for edge in (box[0][axis], box[1][axis]):
            value = (level - w[axis] * edge) / w[other]
            if box[0][other] <= value <= box[1][other]:
                end = np.empty(2)
                end[axis], end[other] = edge, value
                ends.append(end)
    if len(ends) < 2:
        return None
    ends.sort(key=lambda end: (end[1], end[0]))
    return np.stack([ends[0], ends[-1]])
