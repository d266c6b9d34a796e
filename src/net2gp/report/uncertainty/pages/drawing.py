"""Figures as inline SVG, which follow the colors of the page, and the marks that are drawn in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from net2gp.report.uncertainty.pages.words import number

Row = Sequence[float] | np.ndarray
"""Numbers along one axis."""

WIDTH, HEIGHT = 440, 330
LEFT, RIGHT, TOP, BOTTOM = 80, 14, 14, 52
STYLES = ("a", "b", "c")
"""Classes of the style sheet: a color, a dash pattern and a mark for each of three series."""


@dataclass(eq=False)
class Chart:
    """A pair of axes to draw into.

    Args:
        alt: What the figure shows, for readers who cannot see it.
        across: The name of the horizontal axis.
        up: The name of the vertical axis.
        x: The range of the horizontal axis.
        y: The range of the vertical axis.

    >>> chart = Chart("a line", "time", "height", (0, 1), (0, 2))
    >>> chart.line([0, 1], [0, 2], "a", "ball")
    >>> "<polyline" in chart.html() and 'role="img"' in chart.html()
    True
    """

    alt: str
    across: str
    up: str
    x: tuple[float, float]
    y: tuple[float, float]
    marks: list[str] = field(default_factory=list)
    legend: list[tuple[str, str, str]] = field(default_factory=list)
    identity: str = ""

    def line(self, xs: Row, ys: Row, style: str, label: str = "") -> None:
        """Draw a line."""
        points = " ".join(f"{u:.1f},{v:.1f}" for u, v in self._places(xs, ys))
        self.marks.append(f'<polyline class="line {style}" points="{points}"/>')
        if label:
            self.legend.append(("line", style, label))

    def dots(self, xs: Row, ys: Row, style: str, sizes: Row = ()) -> None:
        """Draw a mark at each point, in the shape of its style."""
        radii = sizes if len(sizes) else [4.0] * len(xs)
        for (u, v), r in zip(self._places(xs, ys), radii, strict=True):
            self.marks.append(_dot(u, v, r, style))

    def band(self, xs: Row, low: Row, high: Row, label: str = "") -> None:
        """Fill the range between two lines."""
        there, back = self._places(xs, low), self._places(xs, high)[::-1]
        points = " ".join(f"{u:.1f},{v:.1f}" for u, v in [*there, *back])
        self.marks.append(f'<polygon class="band" points="{points}"/>')
        if label:
            self.legend.append(("band", "", label))

    def whisker(self, x: float, low: float, high: float) -> None:
        """Draw a wide vertical bar from low to high, as a range to expect."""
        (u, v), (_, w) = self._places([x, x], [low, high])
        self.marks.append(
            f'<line class="range" x1="{u:.1f}" x2="{u:.1f}" y1="{v:.1f}" y2="{w:.1f}"/>'
        )

    def bars(self, edges: Row, heights: Row, style: str, label: str = "") -> None:
        """Draw the outline of a histogram, filled faintly."""
        xs = np.repeat(edges, 2)
        ys = np.concatenate([[0.0], np.repeat(heights, 2), [0.0]])
        points = " ".join(f"{u:.1f},{v:.1f}" for u, v in self._places(xs.tolist(), ys.tolist()))
        self.marks.append(f'<polygon class="bar {style}" points="{points}"/>')
        if label:
            self.legend.append(("line", style, label))

    def marker(self, x: float, name: str) -> None:
        """Draw a vertical line that a script can move; `data-` attributes hold the range of the axis."""
        (u, _), _ = self._places([x, x], [0, 0])
        low, high = self.x
        ends = (
            f'data-left="{LEFT}" data-right="{WIDTH - RIGHT}" data-low="{low}" data-high="{high}"'
        )
        self.marks.append(
            f'<line class="marker" id="{name}" {ends} x1="{u:.1f}" x2="{u:.1f}" y1="{TOP}" '
            f'y2="{HEIGHT - BOTTOM}"/>'
        )

    def html(self) -> str:
        """Return the figure with its legend."""
        picture = (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.alt)}">'
            f"{self._axes()}{''.join(self.marks)}</svg>"
        )
        keys = "".join(
            f'<li><svg viewBox="0 0 34 14" aria-hidden="true">{_key(kind, style)}</svg>{escape(label)}</li>'
            for kind, style, label in self.legend
        )
        caption = f'<figcaption><ul class="legend">{keys}</ul></figcaption>' if keys else ""
        return f'<figure class="chart">{picture}{caption}</figure>'

    def _places(self, xs: Row, ys: Row) -> list[tuple[float, float]]:
        wide, high = self.x[1] - self.x[0] or 1.0, self.y[1] - self.y[0] or 1.0
        across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return [
            (LEFT + across * (a - self.x[0]) / wide, TOP + up * (1 - (b - self.y[0]) / high))
            for a, b in zip(np.clip(xs, *self.x), np.clip(ys, *self.y), strict=True)
        ]

    def _axes(self) -> str:
        found = []
        for value in ticks(*self.x):
            (u, v), _ = self._places([value, value], [self.y[0]] * 2)
            found.append(f'<text class="tick" x="{u:.1f}" y="{v + 17:.1f}">{_short(value)}</text>')
        for value in ticks(*self.y):
            (u, v), (w, _) = self._places(self.x, [value, value])
            found.append(
                f'<line class="grid" x1="{u:.1f}" x2="{w:.1f}" y1="{v:.1f}" y2="{v:.1f}"/>'
            )
            found.append(
                f'<text class="tick up" x="{u - 7:.1f}" y="{v + 4:.1f}">{_short(value)}</text>'
            )
        middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
        found.append(
            f'<text class="name" x="{LEFT + (WIDTH - LEFT - RIGHT) / 2}" y="{HEIGHT - 9}">'
            f"{escape(self.across)}</text>"
            f'<text class="name" transform="translate(14 {middle}) rotate(-90)">{escape(self.up)}</text>'
        )
        return "".join(found)


def ticks(low: float, high: float) -> list[float]:
    """Choose about five round numbers between two.

    >>> ticks(0, 1)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    span = high - low
    if not span > 0 or not np.isfinite(span):
        return [low]
    rough = span / 5
    power = 10.0 ** np.floor(np.log10(rough))
    step = float(min((power * k for k in (1, 2, 5, 10)), key=lambda s: abs(s - rough)))
    first = np.ceil(low / step - 1e-9)
    numbers = np.arange(first, np.floor(high / step + 1e-9) + 1)
    return [round(float(k * step), 12) + 0.0 for k in numbers]


def _short(value: float) -> str:
    return number(value + 0.0, 4)


def _dot(u: float, v: float, r: float, style: str) -> str:
    """A circle, a square or a triangle."""
    if style == "b":
        place = f'x="{u - r:.1f}" y="{v - r:.1f}" width="{2 * r:.1f}" height="{2 * r:.1f}"'
        return f'<rect class="dot b" {place}/>'
    if style == "c":
        path = f"M{u:.1f} {v - 1.3 * r:.1f}l{1.2 * r:.1f} {2.2 * r:.1f}h{-2.4 * r:.1f}z"
        return f'<path class="dot c" d="{path}"/>'
    return f'<circle class="dot {style}" cx="{u:.1f}" cy="{v:.1f}" r="{r:.1f}"/>'


def _key(kind: str, style: str) -> str:
    if kind == "band":
        return '<rect class="band" x="2" y="2" width="30" height="10"/>'
    line = f'<polyline class="line {style}" points="1,7 33,7"/>'
    return line + (_dot(17, 7, 3.2, style) if kind == "dots" else "")
