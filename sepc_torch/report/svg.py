"""Charts of a report as inline SVG; colours are classes of the style sheet, so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup, escape

from sepc_torch.report.record import Diagram, MapSection, RiskSection
from sepc_torch.report.sentences import percent

# Sizes in units of the viewBox; a chart is shown at about this many pixels.
_WIDTH, _HEIGHT = 460.0, 320.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 68.0, 24.0, 14.0, 46.0
_MAP_WIDTH, _MAP_HEIGHT, _MAP_EDGE = 960.0, 560.0, 18.0
# Bins with fewer labels are drawn pale and without a line: their interval spans half the diagram.
_FEW = 10
# Coverage from which on a risk curve decides how high its chart is.
_FIRST = 0.05
# Classes with a colour and shape of their own: 8 colours that are readable with every common colour blindness, times 3
# shapes. Further classes are grey.
STYLED_CLASSES = 24


class Frame(NamedTuple):
    """A chart's axes: data from 0 to ``right`` and 0 to ``top`` in the pixels of the viewBox."""

    right: float
    top: float

    def x(self, value: float) -> float:
        """Horizontal pixel of a value."""
        return _LEFT + value / self.right * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Vertical pixel of a value; pixels grow downward."""
        return _HEIGHT - _BOTTOM - value / self.top * (_HEIGHT - _TOP - _BOTTOM)

    def path(self, xs: Iterable[float], ys: Iterable[float]) -> str:
        """A line through points, as the ``points`` of a polyline."""
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in zip(xs, ys, strict=True))

    def axes(self, x_ticks: Sequence[float], y_ticks: Sequence[float], x_title: str, y_title: str) -> str:
        """Grid lines, tick labels in percent and axis titles."""
        low, high = _HEIGHT - _BOTTOM, _TOP
        parts = []
        for tick in y_ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{_tick(tick)}</text>')
        for tick in x_ticks:
            x = self.x(tick)
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{high}" y2="{low}"/>')
            parts.append(f'<text class="tick" x="{x:.1f}" y="{low + 18}" text-anchor="middle">{_tick(tick)}</text>')
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(f'<text class="axis" x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_title)}</text>')
        across = (high + low) / 2
        parts.append(
            f'<text class="axis" transform="translate(13 {across}) rotate(-90)" text-anchor="middle">'
            f"{escape(y_title)}</text>"
        )
        return "".join(parts)


def risk_chart(section: RiskSection, chosen: tuple[float, float] | None, promised: float | None) -> Markup:
    """Selective risk over coverage, the chosen point (coverage, risk) and the promised risk as a line."""
    # The risk of the first few labels says little, and can be 1.
    risks = [r for curve in section.curves for c, r in zip(curve.coverage, curve.risk, strict=True) if c >= _FIRST]
    highest = max([*risks, promised or 0.0, 0.005])
    ticks = _ticks(highest)
    frame = Frame(1.0, max(ticks[-1], highest * 1.02))
    parts = [frame.axes([0.0, 0.25, 0.5, 0.75, 1.0], ticks, "coverage: accepted share", "wrong among accepted")]
    if promised is not None:
        y = frame.y(promised)
        parts.append(f'<line class="promise" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for i, curve in reversed(list(enumerate(section.curves))):
        line = frame.path(curve.coverage, np.minimum(curve.risk, frame.top))
        parts.append(f'<polyline class="curve s{i}" points="{line}"/>')
    if chosen is not None:
        x, y = frame.x(chosen[0]), frame.y(min(chosen[1], frame.top))
        parts.append(f'<line class="drop" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<circle class="chosen" cx="{x:.1f}" cy="{y:.1f}" r="6"/>')
    label = "Selective risk over coverage: " + ", ".join(
        f"AURC {curve.aurc:.4f} {curve.name}" for curve in section.curves
    )
    edges = (
        f' data-left="{_LEFT}" data-right="{_WIDTH - _RIGHT}"'  # for the script, which reads the curves at the pointer
    )
    return _svg("risk", _WIDTH, _HEIGHT, label, parts, edges)


def reliability_chart(diagrams: Sequence[Diagram]) -> Markup:
    """Share of right labels over confidence, with 95 % intervals; the area of a point is its share of the rows."""
    ticks = [0.0, 0.25, 0.5, 0.75, 1.0]
    frame = Frame(1.0, 1.0)
    parts = [frame.axes(ticks, ticks, "stated probability", "right labels")]
    parts.append(f'<polyline class="ideal" points="{frame.path([0.0, 1.0], [0.0, 1.0])}"/>')
    for i, diagram in reversed(list(enumerate(diagrams))):
        total = sum(diagram.size)
        many = [j for j, size in enumerate(diagram.size) if size >= _FEW]
        line = frame.path([diagram.confidence[j] for j in many], [diagram.right[j] for j in many])
        parts.append(f'<polyline class="curve thin s{i}" points="{line}"/>')
        for x, right, low, high, size in zip(*diagram[2:], strict=True):
            cx, r = frame.x(x), 2.5 + 6 * math.sqrt(size / total)
            few = "" if size >= _FEW else " few"
            ends = f'y1="{frame.y(low):.1f}" y2="{frame.y(high):.1f}"'
            parts.append(
                f'<line class="bar s{i}{few}" x1="{cx:.1f}" x2="{cx:.1f}" {ends}/>'
                f'<circle class="dot s{i}{few}" cx="{cx:.1f}" cy="{frame.y(right):.1f}" r="{r:.1f}">'
                f"<title>{escape(diagram.name)}: {size} labels, stated {percent(x)}, right {percent(right)}</title>"
                "</circle>"
            )
    label = "Reliability diagram: " + ", ".join(f"ECE {diagram.ece:.4f} {diagram.name}" for diagram in diagrams)
    return _svg("reliability", _WIDTH, _HEIGHT, label, parts)


def map_chart(
    section: MapSection, names: Sequence[str], ids: dict[int, str], samples: set[int], reasons: Sequence[str]
) -> Markup:
    """Rows and ellipses on the plane of the head; refused rows are hollow, strange rows are large."""
    scale = _map_scale(section)
    parts = ['<g class="shadows">']
    for region, code, x, y, s00, s01, s11 in section.ellipses:
        rx, ry, angle = _ellipse(s00 * scale[0][0] ** 2, -s01 * scale[0][0] * scale[0][1], s11 * scale[0][1] ** 2)
        parts.append(
            f'<ellipse class="c{class_style(code)}" data-region="{region}" rx="{rx:.1f}" ry="{ry:.1f}" '
            f'transform="translate({_place(scale, x, y)}) rotate({angle:.1f})"/>'
        )
    parts.append("</g>")
    columns = zip(section.row, section.x, section.y, section.code, section.reason, section.rank, strict=True)
    # Accepted rows first: a row worth a look is drawn over them.
    for row, x, y, code, reason, rank in sorted(columns, key=lambda column: (column[4] != 0, column[0])):
        style = class_style(code)
        kind = "pt" if reason == 0 else "pt off"
        sample = f' data-row="{row}"' if row in samples else ""
        label = names[code] if code >= 0 else "no label"
        place, shape = _place(scale, x, y).split(), _shape(style, 2.4 + 4.0 * rank**3)
        # Most files have few classes, all circles; a circle takes half the bytes of a path.
        tag = "circle" if shape.startswith("r=") else "path"
        at = f'cx="{place[0]}" cy="{place[1]}"' if tag == "circle" else f'transform="translate({place[0]} {place[1]})"'
        parts.append(
            f'<{tag} class="{kind} c{style}" {at} {shape}{sample}>'
            f"<title>{escape(ids[row])}: {escape(label)}, {escape(reasons[reason])}</title></{tag}>"
        )
    return _svg("map", _MAP_WIDTH, _MAP_HEIGHT, "Map of the embeddings with the shadows of the ellipsoids", parts)


def swatch(code: int) -> Markup:
    """The shape and colour of a class, for a legend."""
    style, shape = class_style(code), _shape(class_style(code), 6.0)
    tag = "circle" if shape.startswith("r=") else "path"
    return Markup(
        f'<svg class="swatch" viewBox="-8 -8 16 16" aria-hidden="true"><{tag} class="pt c{style}" {shape}/></svg>'
    )


def meter(share: float | None, kind: str = "") -> Markup:
    """A small bar for a share."""
    width = 0.0 if share is None or not math.isfinite(share) else 100.0 * share
    return Markup(
        f'<svg class="meter {kind}" viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="rail" width="100" height="6"/><rect class="fill" width="{width:.1f}" height="6"/></svg>'
    )


def class_style(code: int) -> str:
    """Number of the style of a class, "x" for a class without a style of its own."""
    return str(code) if 0 <= code < STYLED_CLASSES else "x"


def _shape(style: str, r: float) -> str:
    """Attribute of a circle (``r``) or of the path (``d``) of a square or triangle of the same area, by the style."""
    family = 0 if style == "x" else int(style) // 8
    if family == 0:
        return f'r="{r:.1f}"'
    if family == 1:
        a = 0.886 * r
        return f'd="M-{a:.1f}-{a:.1f}h{2 * a:.1f}v{2 * a:.1f}h-{2 * a:.1f}z"'
    a = 1.35 * r
    return f'd="M0-{a:.1f}L{1.155 * a:.1f} {0.75 * a:.1f}H-{1.155 * a:.1f}z"'


def _map_scale(section: MapSection) -> tuple[tuple[float, float], tuple[float, float]]:
    """Factors and least coordinates of the map: 98 % of the points and the middle of every ellipse are inside."""
    if not section.x:
        return (1.0, 1.0), (0.0, 0.0)
    spans = []
    for axis, values in enumerate((section.x, section.y)):
        low, high = np.quantile(values, [0.01, 0.99]).tolist()
        for ellipse in section.ellipses:
            # The shadow of an ellipsoid in many dimensions dwarfs the points; a quarter of each semi-axis is kept.
            half = 0.25 * math.sqrt(max(ellipse[4 + 2 * axis], 0.0))
            low, high = min(low, ellipse[2 + axis] - half), max(high, ellipse[2 + axis] + half)
        spans.append((low, max(high - low, 1e-9)))
    return (
        ((_MAP_WIDTH - 2 * _MAP_EDGE) / spans[0][1], (_MAP_HEIGHT - 2 * _MAP_EDGE) / spans[1][1]),
        (spans[0][0], spans[1][0]),
    )


def _place(scale: tuple[tuple[float, float], tuple[float, float]], x: float, y: float) -> str:
    """Pixels of a point; points beyond the map are drawn at its edge, where the largest mark is still whole."""
    (across, up), (left, low) = scale
    px = _MAP_EDGE + (x - left) * across
    py = _MAP_HEIGHT - _MAP_EDGE - (y - low) * up
    return f"{min(max(px, 8.0), _MAP_WIDTH - 8):.1f} {min(max(py, 8.0), _MAP_HEIGHT - 8):.1f}"


def _ellipse(s00: float, s01: float, s11: float) -> tuple[float, float, float]:
    """Semi-axes and the angle in degrees of the ellipse of a symmetric matrix."""
    values, vectors = np.linalg.eigh(np.array([[s00, s01], [s01, s11]]))
    rx, ry = np.sqrt(np.maximum(values[::-1], 0.0)).tolist()
    return rx, ry, math.degrees(math.atan2(float(vectors[1, 1]), float(vectors[0, 1])))


def _ticks(highest: float) -> list[float]:
    """About five round tick values from 0 to at least most of ``highest``."""
    step = 10.0 ** math.floor(math.log10(highest / 4))
    step = next(factor * step for factor in (1, 2, 2.5, 5, 10) if highest / (factor * step) <= 5)
    return [i * step for i in range(math.ceil(highest / step - 1e-9) + 1)]


def _tick(value: float) -> str:
    return f"{100 * value:.3g}\u202f%"


def _svg(kind: str, width: float, height: float, label: str, parts: Sequence[str], more: str = "") -> Markup:
    return Markup(
        f'<svg class="chart {kind}" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}"{more}>'
        f"{''.join(parts)}</svg>"
    )
