"""Test points grouped by region, with their pictures, for the reproductions on tables.

A region of SEP-C is the set of ellipsoids that contain a point, or, for points outside all of them, the nearest
ellipsoid. A region of a decision tree is a leaf. Trust is the Bayes trust of SEP-C; for a tree it is the share of the
predicted label among the training points of the leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from sklearn.metrics import roc_auc_score
from sklearn.tree import DecisionTreeClassifier

from sepc_torch import SEPC, Partition, Rule
from sepc_torch.ellipsoid import SURFACE_TOLERANCE, Kind
from sepc_torch.model.sepc import Nearest
from sepc_torch.plot import COLORS

# The paper accepts a label at trust above 95 % and calls a trust below 50 % low.
ACCEPTED, LOW = 0.95, 0.5
RIGHT, WRONG, TRUST = COLORS[0], COLORS[1], COLORS[2]


class Judged(NamedTuple):
    """Test points (B,): true and predicted labels as indices, trust, and region.

    ``region`` is the region's name. ``outside`` says whether no ellipsoid contains the point. ``shared`` counts the
    training points in the intersection of the point's ellipsoids, or in its leaf.
    """

    truth: np.ndarray
    label: np.ndarray
    trust: np.ndarray
    region: np.ndarray
    outside: np.ndarray
    shared: np.ndarray

    @property
    def right(self) -> np.ndarray:
        return self.label == self.truth


class Region(NamedTuple):
    """A region with its test points, the mean trust in their labels, and whether they lie outside the ellipsoids."""

    name: str
    right: int
    wrong: int
    trust: float
    outside: bool


def judge(
    part: Partition, x: np.ndarray, y: np.ndarray, names: Sequence[str], nearest: Nearest = "euclidean"
) -> Judged:
    """SEP-C's judgement of test points, by default with Euclidean distance; ``names`` are short class names."""
    sepc = SEPC.from_partition(part, nearest, dtype=torch.float64)
    # In batches: Euclidean distance needs memory for each point, ellipsoid and feature.
    out = [sepc(torch.from_numpy(x[i : i + 256])) for i in range(0, len(x), 256)]
    label, trust, rule, near = (
        torch.cat([getattr(o, field) for o in out]).numpy() for field in ("label", "trust", "rule", "nearest")
    )
    outside = rule == int(Rule.OUTSIDE)
    called = ellipsoid_names(part, names)
    inside = part.distances(x) <= 1.0 + SURFACE_TOLERANCE
    region = [
        f"near {called[k]}" if beyond else r" $\cap$ ".join(called[i] for i in np.flatnonzero(row))
        for row, beyond, k in zip(inside, outside, near, strict=True)
    ]
    # A cell lies in all ellipsoids of a point if as many of them contain the cell as the point.
    within = inside.astype(int) @ part.cells.T.astype(int) == inside.sum(axis=1, keepdims=True)
    shared = np.where(outside, 0, within @ part.counts.sum(axis=1))
    return Judged(np.searchsorted(part.classes, y), label, trust, np.array(region), outside, shared)


def judge_by_leaf(tree: DecisionTreeClassifier, x: np.ndarray, y: np.ndarray) -> Judged:
    """A fitted decision tree's judgement of test points."""
    share = tree.predict_proba(x)
    leaf, truth = tree.apply(x), np.searchsorted(tree.classes_, y)
    names, inside = np.array([f"leaf {i}" for i in leaf]), np.zeros(len(x), dtype=bool)
    return Judged(truth, share.argmax(axis=1), share.max(axis=1), names, inside, tree.tree_.n_node_samples[leaf])


def pooled(parts: Sequence[Judged]) -> Judged:
    """The test points of several folds together."""
    return Judged(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def ellipsoid_names(part: Partition, names: Sequence[str]) -> list[str]:
    """Names B1, B2, ... in the order found; isolated points of a class share one name."""
    found, called = [0] * len(names), []
    for e, code in zip(part.ellipsoids, part.codes, strict=True):
        found[code] += e.kind is not Kind.ISOLATED
        called.append(f"{names[code]} point" if e.kind is Kind.ISOLATED else f"{names[code]}{found[code]}")
    return called


def regions(judged: Judged) -> list[Region]:
    """The regions with test points: regions inside ellipsoids first, then by number of points."""
    found = []
    for name in np.unique(judged.region):
        here = judged.region == name
        right = int(judged.right[here].sum())
        found.append(
            Region(
                str(name),
                right,
                int(here.sum()) - right,
                float(judged.trust[here].mean()),
                bool(judged.outside[here][0]),
            )
        )
    return sorted(found, key=lambda r: (r.outside, -(r.right + r.wrong), r.name))


def summary(judged: Judged) -> dict[str, Any]:
    """Accuracy, and accuracy and coverage by trust."""
    right, trust, outside = judged.right, judged.trust, judged.outside
    accepted, wrong = trust > ACCEPTED, ~right
    surely_wrong = wrong & accepted
    return {
        "points": len(right),
        "accuracy": float(right.mean()),
        "regions": len(np.unique(judged.region)),
        "regions_inside": len(np.unique(judged.region[~outside])),
        "outside": float(outside.mean()),
        "mean_trust_right": _mean(trust[right]),
        "mean_trust_wrong": _mean(trust[wrong]),
        "wrong": int(wrong.sum()),
        "wrong_with_low_trust": _mean(trust[wrong] < LOW),
        "right_with_low_trust": _mean(trust[right] < LOW),
        "auroc_of_trust": float(roc_auc_score(right, trust)) if 0 < right.sum() < len(right) else None,
        "accepted": selection(right, accepted),
        "accepted_inside": selection(right, accepted & ~outside),
        "inside": selection(right, ~outside),
        "wrong_accepted": int(surely_wrong.sum()),
        "wrong_accepted_outside": int((surely_wrong & outside).sum()),
        "wrong_accepted_shared": judged.shared[surely_wrong].tolist(),
    }


def selection(right: np.ndarray, kept: np.ndarray) -> dict[str, Any]:
    """Coverage and accuracy of the kept test points."""
    return {"points": int(kept.sum()), "coverage": float(kept.mean()), "accuracy": _mean(right[kept])}


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def percent(value: float | None) -> str:
    """A share as text, one decimal."""
    return "none" if value is None else f"{100.0 * value:.1f} %"


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation of shares as text."""
    return f"{100.0 * np.mean(values):.1f} ± {100.0 * np.std(values, ddof=1):.1f} %"


def show(rows: Sequence[dict[str, str]]) -> None:
    """Print the rows that compare the paper with what was computed here."""
    for row in rows:
        print(f"{row['artefact']}\n    paper: {row['paper']}\n    ours:  {row['ours']}\n    {row['why']}")


def reproduced(artefact: str, paper: str, ours: str, why: str = "") -> dict[str, str]:
    """A row of the table that compares the paper with what was computed here."""
    return {"artefact": artefact, "paper": paper, "ours": ours, "why": why}


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
