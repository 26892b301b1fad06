"""Pictures of the trust panel: risk over coverage, and the mean rank of every score."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from panel_summary import OURS
from peer_names import PEERS
from pictures import save_png


def draw(results: list[dict[str, Any]]) -> None:
    """Risk over coverage: the network's mistakes above, mistakes and unknowns together below."""
    wanted = {"letter, open": "left out", "fashion": "notmnist", "clinc150": "out of scope"}
    shown = {r["set"]: r["curves"] for r in results if r["curves"] is not None and r["set"] in wanted}
    styles = {
        "max_softmax": ("#8a8a8a", "--"),
        "trust_score": ("#e69f00", "-."),
        "mahalanobis++": ("#009e73", ":"),
        "gaussians": ("#cc79a7", (0, (3, 1, 1, 1, 1, 1))),
        "confidence": ("#0072b2", "-"),
        "joint": ("#d55e00", "-"),
    }
    titles = PEERS | {"confidence": "SEP-C confidence", "joint": "SEP-C joint"}
    figure, axes = plt.subplots(2, len(shown), figsize=(4.1 * len(shown), 7), squeeze=False, layout="constrained")
    for column, (name, found) in enumerate(shown.items()):
        for row, lines in enumerate((found["mistakes"], found["both"][wanted[name]])):
            ax = axes[row, column]
            for score, (color, style) in styles.items():
                if score == ("joint", "confidence")[row]:
                    continue
                ax.plot(found["coverage"], lines[score], color=color, ls=style, lw=2, label=titles[score])
            ax.set(xlabel="coverage", xlim=(0, 1), ylim=(0, None))
            ax.grid(alpha=0.3)
            unknown = f"mistakes and unknowns ({wanted[name]})"
            ax.set_title(f"{name}: {'mistakes of the network' if row == 0 else unknown}", fontsize=10)
        axes[0, column].legend(fontsize=8)
        axes[1, column].legend(fontsize=8)
    for ax in axes[:, 0]:
        ax.set_ylabel("share of accepted that is wrong")
    save_png(figure, "trust_panel")


def draw_ranks(rows: list[dict[str, Any]], near: set[tuple[str, str]]) -> None:
    """The mean rank of every score over the sets, for each question; ours in colour.

    Args:
        rows: The rows of :func:`summarise`.
        near: Sets and groups of unknowns that resemble the known classes.
    """
    figures: dict[str, list[dict[str, float]]] = {
        kind: [] for kind in ("mistakes", "near unknowns", "far unknowns", "both")
    }
    for row in rows:
        kind, _, group = row["question"].partition(": ")
        if kind == "unknowns":
            kind = "near unknowns" if (row["set"], group) in near else "far unknowns"
        if kind != "calibration":
            ours = OURS[row["question"].partition(":")[0]]
            values = {name: value for name, value in row["all"].items() if name in PEERS} | {"SEP-C": row["all"][ours]}
            sign = -1.0 if "unknowns" in kind else 1.0
            figures[kind].append({name: sign * value for name, value in values.items()})
    figure, axes = plt.subplots(1, len(figures), figsize=(4.2 * len(figures), 6.2), layout="constrained")
    for ax, (kind, sets) in zip(np.atleast_1d(axes), figures.items(), strict=True):
        names = sorted(set.intersection(*(set(values) for values in sets)))
        order = np.array([[values[name] for name in names] for values in sets])
        ranks = (1 + (order[:, :, None] > order[:, None, :]).sum(axis=2)).mean(axis=0)
        places = np.argsort(ranks)[::-1]
        colors = ["#d55e00" if names[i] == "SEP-C" else "#8a8a8a" for i in places]
        ax.hlines(range(len(names)), 1, ranks[places], color=colors, lw=2)
        ax.scatter(ranks[places], range(len(names)), color=colors, s=36, zorder=3)
        ax.set_yticks(range(len(names)), [(PEERS | {"SEP-C": "SEP-C"})[names[i]] for i in places], fontsize=8)
        for tick, color in zip(ax.get_yticklabels(), colors, strict=True):
            tick.set_color(color if color != "#8a8a8a" else "black")
        ax.set(xlim=(1, None), xlabel=f"mean rank of {len(names)} scores (1 is best)")
        ax.set_title(f"{kind}: {len(sets)} {'set' if len(sets) == 1 else 'sets'}", fontsize=10)
        ax.grid(axis="x", alpha=0.3)
    save_png(figure, "trust_panel_ranks")
