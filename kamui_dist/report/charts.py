"""One figure as SVG text: panels over a common x axis, findings marked on them. Nothing but arithmetic and strings.

A figure stands by itself (figure(..., standalone=True): with its style, light and dark) or in a page, whose script reads
`data(...)` to follow the pointer and to zoom.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from html import escape
from importlib import resources
from typing import Any

import numpy as np

from kamui_dist.report.axes import Scale, tick_labels
from kamui_dist.report.figures import LEFT, RIGHT, Chart, Figure, Line, span
from kamui_dist.report.lines import plain
from kamui_dist.report.series import thin

TITLE, MARKS, GAP, BOTTOM = 24, 34, 14, 34  # pixels around and between the panels
_LETTER = 6.4  # pixels of a letter in the legend, on average


@dataclass(frozen=True)
class _Panel:
    chart: Chart
    legend: list[list[tuple[float, Line]]]  # rows of (x, line)
    title: float  # y of the title's baseline
    x: Scale
    y: Scale


def _panels(figure: Figure, x: tuple[float, float]) -> tuple[list[_Panel], float]:
    """And the y at which the last one ends."""
    panels, top = [], 0.0
    for place, chart in enumerate(figure.charts):
        title = top + 16
        scales = chart.spans(x, 0, figure.width, figure.height)
        legend = _legend(chart, figure.width, scales[1].log)
        top += TITLE + 16 * (len(legend) - 1) + (MARKS if place == 0 and figure.marks else 4)
        y = replace(scales[1], start=top + figure.height, end=top)
        panels.append(_Panel(chart, legend, title, scales[0], y))
        top += figure.height + GAP
    return panels, top - GAP


def _legend(chart: Chart, width: int, log: bool) -> list[list[tuple[float, Line]]]:
    """To the right of the title, in as many rows as it takes."""
    rows: list[list[tuple[float, Line]]] = [[]]
    begin = at = LEFT + 7.4 * len(chart.title) + 6.2 * (len(chart.unit) + 6 * log) + 34
    for line in chart.lines:
        if not (line.name and line.listed):
            continue
        length = 24 + _LETTER * len(line.name) + 12
        if at + length > width and rows[-1]:
            rows.append([])
            at = begin if begin < width / 2 else float(LEFT)
        rows[-1].append((at, line))
        at += length
    return rows


def figure(fig: Figure, x: tuple[float, float] | None = None, standalone: bool = False) -> str:
    """SVG text. `x`: the span of the axis, for several figures that shall have the same."""
    panels, bottom = _panels(fig, x or span([fig]))
    captions = fig.caption if standalone else []
    height = bottom + BOTTOM + 18 * len(captions) + (6 if captions else 0)
    parts = [_axis(fig, panels[-1], bottom)] + [_panel(fig, panel) for panel in panels]
    parts.append(_marks(fig, panels, bottom))
    for row, text in enumerate(captions):
        parts.append(f'<text class="caption" x="{LEFT}" y="{bottom + BOTTOM + 14 + 18 * row:.0f}">{clean(text)}</text>')
    title = clean(", ".join(dict.fromkeys(chart.title for chart in fig.charts)))
    back = (
        f'<style>{resource("chart.css")}</style><rect class="back" width="100%" height="100%"/>' if standalone else ""
    )
    return (
        f'<svg class="figure" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {fig.width} {height:.0f}" role="img" '
        f'aria-label="{title}"' + (f' width="{fig.width}" height="{height:.0f}"' if standalone else "") + ">"
        f"{back}{''.join(parts)}</svg>"
    )


def data(fig: Figure, x: tuple[float, float]) -> dict[str, Any]:
    """What the page's script needs to draw the same again for another span of x."""
    panels, bottom = _panels(fig, x)
    return {
        "name": fig.name, "x": list(x), "left": LEFT, "right": fig.width - RIGHT, "bottom": round(bottom, 1), "panels": [
            {
                "top": round(p.y.end, 1), "bottom": round(p.y.start, 1), "y": [p.y.low, p.y.high], "log": p.y.log,
                "zero": p.chart.zero or p.chart.stacked, "stacked": p.chart.stacked, "ticks": _ticks(fig),
                "lines": [_line_data(line, p.chart) for line in p.chart.lines],
            }
            for p in panels
        ],
    }  # fmt: skip


def _line_data(line: Line, chart: Chart) -> dict[str, Any]:
    x, y = (line.x, line.y) if chart.stacked else thin(line.x, line.y, chart.columns)
    values = [None if v != v else float(f"{v:.5g}") for v in y.tolist()]
    places = [int(v) if v == int(v) else float(f"{v:.8g}") for v in x.tolist()]
    return {"name": line.name, "style": line.style, "x": places, "y": [] if line.style == "rug" else values}


def _panel(fig: Figure, panel: _Panel) -> str:
    chart, x, y = panel.chart, panel.x, panel.y
    ticks = y.ticks(_ticks(fig))
    grid = "".join(
        f'<path class="grid" d="M{LEFT} {y.at(t):.1f}H{x.end:.0f}"/>'
        f'<text class="tick" x="{LEFT - 7}" y="{y.at(t) + 4:.1f}" text-anchor="end">{label}</text>'
        for t, label in zip(ticks, tick_labels(ticks), strict=True)
    )
    key = f"{fig.name}-{y.end:.0f}"
    lines = _stack(chart, x, y) if chart.stacked else "".join(_line(line, x, y, chart.columns) for line in chart.lines)
    unit = f'<tspan class="unit" dx="7">{clean(chart.unit)}{" (log)" if y.log else ""}</tspan>'
    legend = "".join(
        _key(chart, line, at, panel.title + 16 * row) for row, keys in enumerate(panel.legend) for at, line in keys
    )
    return (
        f'<text class="title" x="{LEFT}" y="{panel.title:.0f}">{clean(chart.title)}{unit}</text>{legend}'
        f'<g class="y">{grid}</g><clipPath id="{key}"><rect x="{LEFT}" y="{y.end:.1f}" '
        f'width="{x.end - x.start:.0f}" height="{y.start - y.end:.1f}"/></clipPath>'
        f'<g class="plot" clip-path="url(#{key})">{lines}</g>'
    )


def _ticks(fig: Figure) -> int:
    return fig.height // 38


def _key(chart: Chart, line: Line, x: float, y: float) -> str:
    """An entry of the legend."""
    text = f'<text x="{x + 22:.0f}" y="{y:.0f}">{clean(line.name)}</text>'
    return f'<g class="key {_colour(line)} k-{line.style}">{_swatch(line, chart, x, y)}{text}</g>'


def _swatch(line: Line, chart: Chart, x: float, y: float) -> str:
    if chart.stacked:
        return f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="14" height="10"/>'
    if line.style == "dots":
        return f'<path d="M{x + 9:.0f} {y - 4:.0f}h0"/>'
    return f'<path d="M{x:.0f} {y - 4:.0f}h18"/>' if line.style != "rug" else f'<path d="M{x + 9:.0f} {y:.0f}v-9"/>'


def _colour(line: Line) -> str:
    return f"c{line.colour}" if isinstance(line.colour, int) else line.colour


def _line(line: Line, x: Scale, y: Scale, columns: int) -> str:
    classes = f'class="line {_colour(line)} {line.style}"'
    if line.style == "rug":
        places = np.unique(np.round(x(line.x), 0))
        return f'<path {classes} d="{"".join(f"M{px:.0f} {y.start:.0f}v-8" for px in places.tolist())}"/>'
    xs, ys = thin(line.x, line.y, columns)
    finite = np.isfinite(ys)
    pixels = zip(x(xs).tolist(), y(np.nan_to_num(ys)).tolist(), finite.tolist(), strict=True)
    if line.style == "dots":
        return f'<path {classes} d="{"".join(f"M{px:.1f} {py:.1f}h0" for px, py, there in pixels if there)}"/>'
    path, pen = [], "M"
    for px, py, there in pixels:
        if there:
            path.append(f"{pen}{px:.1f} {py:.1f}")
        pen = "L" if there else "M"
    return f'<path {classes} d="{"".join(path)}"/>'


def _stack(chart: Chart, x: Scale, y: Scale) -> str:
    """Each value a bar as wide as its part of the run, not joined to the next: between two means nothing was measured."""
    places = x(chart.lines[0].x)
    between = (places[1:] + places[:-1]) / 2
    edges = np.concatenate([places[:1], between, places[-1:]]).tolist()
    base = np.zeros_like(chart.lines[0].y)
    areas = []
    for line in chart.lines:
        top = base + np.nan_to_num(line.y)
        there = _steps(edges, y(top).tolist())
        back = _steps(edges, y(base).tolist())[::-1]
        areas.append(f'<path class="area {_colour(line)}" d="M{"L".join(there + back)}Z"/>')
        base = top
    return "".join(areas)


def _steps(edges: list[float], heights: list[float]) -> list[str]:
    ends = zip(edges[:-1], edges[1:], heights, strict=True)
    return [f"{px:.1f} {py:.1f}" for left, right, py in ends for px in (left, right)]


def _axis(fig: Figure, panel: _Panel, bottom: float) -> str:
    ticks = panel.x.ticks(8)
    marks = "".join(
        f'<path class="grid" d="M{panel.x.at(t):.1f} {bottom:.1f}v5"/>'
        f'<text class="tick" x="{panel.x.at(t):.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{label}</text>'
        for t, label in zip(ticks, tick_labels(ticks), strict=True)
    )
    title = f'<text class="tick" x="{fig.width - RIGHT}" y="{bottom + 31:.0f}" text-anchor="end">{clean(fig.x_title)}</text>'
    return f'<path class="axis" d="M{LEFT} {bottom:.1f}H{fig.width - RIGHT}"/><g class="x">{marks}</g>{title}'


def _marks(fig: Figure, panels: list[_Panel], bottom: float) -> str:
    """Lines through all panels, with their numbers above in two rows; a number that finds no room is left out, its line stays."""
    x, top = panels[0].x, panels[0].y.end
    strokes = "".join(f"M0 {p.y.end:.0f}V{p.y.start:.0f}" for p in panels)
    taken = [-1e9, -1e9]  # where each row is taken up to
    drawn = []
    for mark in fig.marks:
        px = x.at(mark.x)
        row = next((r for r, end in enumerate(taken) if px - 9 > end), None)
        badge = ""
        if mark.label and row is not None:
            taken[row] = px + 9
        if mark.label:
            hidden = ' visibility="hidden"' if row is None else ""
            up = top - 9 - 16 * (row or 0)
            badge = (
                f'<g class="badge"{hidden}><circle cx="0" cy="{up:.0f}" r="8"/>'
                f'<text x="0" y="{up + 4:.0f}">{clean(mark.label)}</text></g>'
            )
        band = ""
        if mark.end is not None and mark.end > mark.x:
            band = f'<rect class="band" x="0" y="{top:.0f}" width="{x.at(mark.end) - px:.1f}" height="{bottom - top:.0f}"/>'
        inner = f'<title>{clean(mark.title)}</title>{band}<path d="{strokes}"/>{badge}'
        inner = f'<a href="#{clean(mark.href)}">{inner}</a>' if mark.href else inner
        end = "" if mark.end is None else f' data-end="{mark.end:.8g}"'
        drawn.append(
            f'<g class="mark {mark.level}" data-x="{mark.x:.8g}"{end} transform="translate({px:.1f} 0)">{inner}</g>'
        )
    return f'<g class="marks">{"".join(drawn)}</g>'


def clean(text: str) -> str:
    """Text for SVG and HTML: nothing in it is markup, and no character that XML forbids."""
    return escape(plain(text))


def wrapped(text: str, letters: int) -> list[str]:
    """Lines of a caption; those after the first are indented. Non-breaking spaces, since SVG folds others."""
    first, *rest = textwrap.wrap(text, letters) or [""]
    return [first, *(f"\u00a0\u00a0\u00a0 {line}" for line in rest)]


def resource(name: str) -> str:
    return resources.files("kamui_dist.report").joinpath(name).read_text(encoding="utf-8")
