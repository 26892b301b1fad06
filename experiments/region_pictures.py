"""Pictures of test points by region, as in the paper's Figures 5 and 6."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from regions import ACCEPTED, Judged, Region, pooled, regions

from sepc_torch.plot import COLORS

RIGHT, WRONG, TRUST = COLORS[0], COLORS[1], COLORS[2]


def by_truth(title: str, judged: Judged, classes: dict[int, str]) -> list[tuple[str, Judged]]:
    """A row of panels, one for each true class, given by index and name."""
    rows = ((name, judged.truth == code) for code, name in classes.items())
    return [(f"{title}truth: {name}", Judged(*(column[here] for column in judged))) for name, here in rows]


def draw_regions(grid: Sequence[Sequence[tuple[str, Judged]]], *, named: bool = False, height: float = 3.0) -> Figure:
    """A grid of panels, each with the test points by region above and the trust in them below.

    Args:
        grid: Rows of panels, each a title and test points. The panels of a row share their regions, in one order.
        named: Whether the axis shows the names of the regions instead of numbers.
        height: Height of a row in inches.
    """
    figure = plt.figure(figsize=(5.5 * len(grid[0]), height * len(grid)), layout="constrained")
    parts = figure.subfigures(len(grid), len(grid[0]), squeeze=False)
    for r, row in enumerate(grid):
        order = [region.name for region in regions(pooled([judged for _, judged in row]))]
        most = max(region.right + region.wrong for _, judged in row for region in regions(judged))
        for c, (title, judged) in enumerate(row):
            upper, lower = parts[r, c].subplots(2, 1, sharex=True, height_ratios=(1.6, 1.0))
            _draw_panel(upper, lower, regions(judged), order, named)
            upper.set(title=title, ylim=(0, 1.12 * most))
            if c == 0:
                upper.set_ylabel("test points")
                lower.set_ylabel("trust")
    handles = _legend(any(judged.outside.any() for row in grid for _, judged in row))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=10)
    return figure


def _draw_panel(upper: Axes, lower: Axes, found: list[Region], order: list[str], named: bool) -> None:
    at = np.array([order.index(region.name) + 1 for region in found])
    right, wrong = (np.array([getattr(region, name) for region in found]) for name in ("right", "wrong"))
    trust, outside = np.array([region.trust for region in found]), np.array([region.outside for region in found])
    upper.bar(at, right, width=0.75, color=RIGHT)
    upper.bar(at, wrong, width=0.75, bottom=right, color=WRONG, hatch="////", edgecolor="white", linewidth=0.0)
    lower.vlines(at, 0.0, trust, color="0.85", lw=1.0, zorder=1)
    for here, face in ((~outside, TRUST), (outside, "white")):
        lower.scatter(
            at[here], trust[here], s=18, marker="s", facecolor=face, edgecolor=TRUST, linewidths=1.0, zorder=3
        )
    lower.axhline(ACCEPTED, color="0.4", lw=0.8, ls="--", zorder=2)
    lower.set(ylim=(0.0, 1.08), yticks=[0.0, 0.5, 1.0], xlim=(0.3, len(order) + 0.7))
    upper.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    upper.grid(axis="y", color="0.92")
    upper.set_axisbelow(True)
    if named:
        lower.set_xticks(np.arange(1, len(order) + 1), order, rotation=40, ha="right", fontsize=8)
    else:
        lower.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        lower.set_xlabel("region (inside ellipsoids first, then outside)" if outside.any() else "leaf")
    for ax in (upper, lower):
        ax.spines[["top", "right"]].set_visible(False)


def _legend(outside: bool) -> list[Any]:
    handles: list[Any] = [
        Patch(facecolor=RIGHT, label="correct"),
        Patch(facecolor=WRONG, edgecolor="white", hatch="////", label="misclassified"),
        Line2D([], [], ls="", marker="s", color=TRUST, label="trust"),
    ]
    if outside:
        handles.append(Line2D([], [], ls="", marker="s", mfc="white", color=TRUST, label="mean trust, outside"))
    return [*handles, Line2D([], [], color="0.4", lw=0.8, ls="--", label="trust 95 %")]
