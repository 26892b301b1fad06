"""Pictures of scores: risk over coverage, reliability, sizes of prediction sets, and drift over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor

from sepc_torch.head.promises.sets import PredictionSets
from sepc_torch.metrics.calibration import ece
from sepc_torch.metrics.curves import reliability_bins, risk_coverage
from sepc_torch.metrics.selective import aurc
from sepc_torch.plot.palette import COLORS, axes_or_new

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = ("-", "--", ":", "-.")


def draw_risk_coverage(
    scores: Any, correct: Any, *, chosen: float | None = None, promised: float | None = None, ax: Axes | None = None
) -> Axes:
    """Draw the selective risk over the coverage of one score or several, each with its AURC.

    Args:
        scores: (B,) scores, higher is safer, or a mapping from name to scores.
        correct: (B,) booleans: whether each label is right.
        chosen: Coverage of the chosen threshold, marked on the first curve.
        promised: Promised risk, drawn as a line.
        ax: Axes to draw on; new axes by default.

    Returns:
        The axes.

    >>> ax = draw_risk_coverage({"head": [0.9, 0.8, 0.1]}, [True, True, False], chosen=2 / 3, promised=0.1)
    >>> [line.get_label() for line in ax.lines][:2]
    ['head (AURC 0.1111)', 'promised: at most 10%']
    """
    ax = axes_or_new(ax)
    right = torch.as_tensor(np.asarray(correct), dtype=torch.bool)
    for i, (name, score) in enumerate(_named(scores, "score").items()):
        curve = risk_coverage(score, right, points=400)
        label = f"{name} (AURC {float(aurc(score, right)):.4f})"
        color = COLORS[i % len(COLORS)]
        ax.plot(curve.coverage, curve.risk, color=color, ls=_STYLES[i % len(_STYLES)], lw=2, label=label)
        if i == 0 and chosen is not None:
            at = float(np.interp(chosen, curve.coverage.numpy(), curve.risk.numpy()))
            ax.scatter([chosen], [at], s=60, facecolor="white", edgecolor="black", linewidths=2, zorder=5)
    if promised is not None:
        label = f"promised: at most {100 * promised:.3g}%"
        ax.axhline(promised, color=COLORS[2], ls=(0, (4, 3)), lw=1.2, label=label)
    ax.set(xlim=(0, 1), xlabel="coverage: accepted share", ylabel="wrong among accepted")
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.grid(alpha=0.25)
    ax.legend(frameon=False, loc="upper left")
    return ax


def draw_reliability(probabilities: Any, correct: Any, *, bins: int = 15, ax: Axes | None = None) -> Axes:
    """Draw the share of right labels over the stated probability in bins of equal width, with 95 % intervals and ECE.

    Args:
        probabilities: (B,) probabilities that the labels are right, or a mapping from name to probabilities.
        correct: (B,) booleans: whether each label is right.
        bins: Number of bins.
        ax: Axes to draw on; new axes by default.

    Returns:
        The axes.

    >>> ax = draw_reliability([0.9, 0.9, 0.6, 0.6], [True, True, True, False])
    >>> ax.get_legend_handles_labels()[1]
    ['perfect', 'confidence (ECE 0.1000)']
    """
    ax = axes_or_new(ax)
    right = torch.as_tensor(np.asarray(correct), dtype=torch.bool)
    ax.plot([0, 1], [0, 1], color="0.5", ls=":", lw=1, label="perfect")
    for i, (name, probability) in enumerate(_named(probabilities, "confidence").items()):
        found = reliability_bins(probability, right, bins)
        label = f"{name} (ECE {float(ece(probability, right, bins)):.4f})"
        color = COLORS[i % len(COLORS)]
        interval = [(found.right - found.low).clamp_min(0.0), (found.high - found.right).clamp_min(0.0)]
        ax.errorbar(
            found.confidence, found.right, yerr=interval, fmt="none", ecolor=color, elinewidth=1, alpha=0.6, zorder=2
        )
        size = 15 + 150 * (found.size / found.size.sum()).sqrt()
        ax.scatter(found.confidence, found.right, s=size, color=color, edgecolors="white", label=label, zorder=3)
    ax.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel="stated probability", ylabel="right labels")
    ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.grid(alpha=0.25)
    ax.legend(frameon=False, loc="upper left")
    return ax


def draw_set_sizes(found: PredictionSets, *, ax: Axes | None = None) -> Axes:
    """Draw how many prediction sets are empty, have one class, two classes, and so on.

    Args:
        found: The sets of :meth:`sepc_torch.TrustHead.sets`.
        ax: Axes to draw on; new axes by default.

    Returns:
        The axes.

    >>> from sepc_torch.head.promises.sets import PredictionSets
    >>> sets = PredictionSets(torch.tensor([[True, False], [True, True], [True, False]]), 0.9, False, (0, 1))
    >>> [round(float(bar.get_height()), 2) for bar in draw_set_sizes(sets).patches]
    [0.0, 0.67, 0.33]
    """
    ax = axes_or_new(ax)
    counts = torch.bincount(found.size.cpu(), minlength=2)
    shares = (counts.double() / counts.sum().clamp_min(1)).tolist()
    ax.bar(range(len(shares)), shares, color=[COLORS[1], COLORS[0], *["0.6"] * (len(shares) - 2)])
    ax.set(xlabel=f"classes in the set, coverage {found.coverage:g}", ylabel="points")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.grid(alpha=0.25, axis="y")
    return ax


def draw_drift(log_martingale: Any, alarm: float, *, steps: Any = None, ax: Axes | None = None) -> Axes:
    """Draw the evidence of drift over time: the logarithm of a test martingale, and the level of an alarm.

    Args:
        log_martingale: (T,) natural logarithms of the martingale after each step.
        alarm: Level of the logarithm from which on drift is reported.
        steps: (T,) numbers of the steps; by default 1 to T.
        ax: Axes to draw on; new axes by default.

    Returns:
        The axes; the first step at or above the level is marked.

    >>> ax = draw_drift([0.0, 1.0, 5.0], alarm=3.0)
    >>> ax.texts[0].get_text()
    'alarm at 3'
    """
    ax = axes_or_new(ax, (8.0, 3.5))
    values = np.asarray(log_martingale, dtype=np.float64)
    at = np.arange(1, len(values) + 1) if steps is None else np.asarray(steps)
    if values.ndim != 1 or at.shape != values.shape:
        raise ValueError(f"Expected one value for each step, got the shapes {values.shape} and {at.shape}.")
    ax.plot(at, values, color=COLORS[0], lw=1.8, label="evidence of drift")
    ax.axhline(alarm, color=COLORS[1], ls="--", lw=1.2, label="alarm level")
    over = np.flatnonzero(values >= alarm)
    if len(over):
        first = over[0]
        ax.scatter([at[first]], [values[first]], s=60, facecolor="white", edgecolor=COLORS[1], linewidths=2, zorder=5)
        ax.annotate(
            f"alarm at {at[first]}", (at[first], values[first]), xytext=(8, 6), textcoords="offset points", fontsize=9
        )
    ax.set(xlabel="step", ylabel="log martingale")
    ax.grid(alpha=0.25)
    ax.legend(frameon=False, loc="best")
    return ax


def _named(given: Any, name: str) -> dict[str, Tensor]:
    """Scores by name, as tensors in float64."""
    by_name = given if isinstance(given, Mapping) else {name: given}
    return {
        str(key): (value.detach().cpu() if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))).double()
        for key, value in by_name.items()
    }
