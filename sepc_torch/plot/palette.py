"""Colours and markers of classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The palette of Okabe and Ito, which is readable with every common colour blindness. Markers also encode the class.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
MARKERS = ("o", "^", "s", "D", "v", "P", "X", "*")


def class_style(c: int) -> tuple[str, str]:
    """Colour and marker of class number c; 64 classes have different pairs.

    >>> class_style(0), class_style(8)
    (('#0072B2', 'o'), ('#0072B2', '^'))
    >>> len({class_style(c) for c in range(64)})
    64
    """
    return COLORS[c % len(COLORS)], MARKERS[(c + c // len(COLORS)) % len(MARKERS)]


def axes_or_new(ax: Axes | None, size: tuple[float, float] = (6.0, 4.5)) -> Axes:
    """The given axes, or the axes of a new figure of this size in inches."""
    return plt.subplots(figsize=size, layout="constrained")[1] if ax is None else ax
