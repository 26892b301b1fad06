"""Pictures of a trust head: its embeddings on a plane, and the table of its classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sepc_torch.data.arrays import rank_shares
from sepc_torch.data.labels import label_codes
from sepc_torch.metrics.class_table import class_table
from sepc_torch.model.plane import viewing_plane
from sepc_torch.plot.palette import axes_or_new, class_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sepc_torch.head.trust_head import TrustHead

# Ellipses drawn: those with most training points.
_MOST_ELLIPSES = 80


def draw_embedding(head: TrustHead, z: Any, logits: Any = None, *, legend: bool = True, ax: Axes | None = None) -> Axes:
    """Draw embeddings on the plane on which the ellipsoids of a head spread most, with the ellipsoids' shadows.

    Colour and marker give the label, the size gives the nonconformity; a hollow marker is not accepted. The shadow of
    an ellipsoid is its exact projection; a point in the shadow can lie outside, in the dimensions that are left out.

    Args:
        head: A trust head; before its calibration all markers are filled and of one size.
        z: (B, D) embeddings.
        logits: (B, C) logits of the network; without them the labels are the head's own.
        legend: Whether to draw a legend beside the axes.
        ax: Axes to draw on; new axes by default.

    Returns:
        The axes.
    """
    ax = axes_or_new(ax, (8.0, 5.5))
    out = head.judge(z, logits)
    plane = viewing_plane(head.sepc)
    with torch.no_grad():
        points = plane.points(head.projection(head.as_tensor(z))).numpy()
    calibrated = head.calibration is not None and head.calibration.done
    label = out.network_label.numpy()
    accept = out.accept.numpy() if calibrated else np.ones(len(label), dtype=bool)
    size = 8 + 50 * rank_shares(out.nonconformity.numpy()) ** 3 if calibrated else np.full(len(label), 18.0)
    training = head.sepc.held.cpu().sum(dim=1).numpy()
    shadows = plane.shadows(head.sepc.bank)
    circle = np.stack([np.cos(t := np.linspace(0.0, 2.0 * np.pi, 120)), np.sin(t)])
    for k in np.argsort(-training, kind="stable")[:_MOST_ELLIPSES].tolist():
        values, vectors = np.linalg.eigh(shadows.matrices[k].numpy())
        line = shadows.centers[k].numpy() + (vectors * np.sqrt(values.clip(0.0)) @ circle).T
        color = class_style(int(head.sepc.codes[k]))[0]
        ax.fill(*line.T, color=color, alpha=0.05, lw=0, zorder=1)
        ax.plot(*line.T, color=color, lw=1.0, alpha=0.6, zorder=1)
    for c, name in enumerate(head.classes):
        color, marker = class_style(c)
        own = label == c
        kept, off = own & accept, own & ~accept
        x, y = points.T
        ax.scatter(x[kept], y[kept], s=size[kept], c=color, marker=marker, lw=0, alpha=0.8, zorder=2, label=str(name))
        ax.scatter(x[off], y[off], s=size[off] + 12, facecolors="none", edgecolors=color, marker=marker, zorder=3)
    ax.set(xlabel="first axis of the plane", ylabel="second axis of the plane")
    if legend:
        # A column holds about 20 names at the default height.
        columns = -(-len(head.classes) // 20)
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9, frameon=False, ncols=columns, title="class")
    return ax


def draw_class_table(head: TrustHead, z: Any, y: Any = None, logits: Any = None, *, ax: Axes | None = None) -> Axes:
    """Draw the table of classes of a calibrated head: points, accuracy, accepted, error and the usual confusion.

    Args:
        head: A calibrated trust head.
        z: (B, D) embeddings.
        y: The true labels (B,); without them the rows are the given labels.
        logits: (B, C) logits of the network; without them the labels are the head's own.
        ax: Axes to draw on; new axes by default.

    Returns:
        The axes, which hold the table ``ax.tables[0]``.
    """
    out = head.judge(z, logits)
    given = y.tolist() if hasattr(y, "tolist") else y
    truth = None if given is None else label_codes(given, head.classes)
    rows = class_table(out.network_label.numpy(), out.accept.numpy(), truth, len(head.classes))
    ax = axes_or_new(ax, (7.0, 0.4 + 0.3 * (len(rows) + 1)))
    names = [str(name) for name in head.classes]
    cells = []
    for row in rows:
        name = names[row.code] if row.code >= 0 else ("unknown" if truth is not None else "no label")
        cells.append([name, str(row.points), _share(row.accepted, row.points)])
        if row.right is not None and row.wrong_accepted is not None:
            confused = "" if row.confused_with is None else f"{names[row.confused_with]} ({row.confusions})"
            accuracy = _share(row.right, row.points)
            cells[-1] += [accuracy, _share(row.wrong_accepted, row.accepted), confused]
    titles = ["class", "points", "accepted", "accuracy", "error of accepted", "confused with"]
    ax.axis("off")
    table = ax.table(cells, colLabels=titles[: len(cells[0])], loc="center", cellLoc="right", edges="horizontal")
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    return ax


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
