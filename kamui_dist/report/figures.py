"""What is drawn in a figure, before it is drawn: lines, marks, panels over one x axis."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kamui_dist.report.axes import Scale, limits, prefers_log
from kamui_dist.report.series import COLUMNS, Floats

LEFT, RIGHT = 58, 14  # pixels beside the panels


@dataclass(frozen=True)
class Line:
    name: str  # "": what belongs to the line before it
    x: Floats
    y: Floats
    colour: int | str = 0  # of the palette, or a word that page.css knows
    style: str = "line"  # line, faint, dash, dots, rug (strokes on the lower edge: y does not count)
    listed: bool = True  # in the legend


@dataclass(frozen=True)
class Mark:
    x: float
    label: str
    title: str  # shown by the pointer
    level: str = "note"  # note, warn, bad; start: where an attempt begins
    href: str = ""
    end: float | None = None  # of the stretch that it is about


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    lines: list[Line]
    log: bool | None = None  # None: where most of the curve would be flat otherwise
    zero: bool = False  # the axis begins at 0
    stacked: bool = False  # lines are areas one upon the other, the first one lowest
    note: str = ""  # what a reader should know

    @property
    def columns(self) -> int:
        """Of each line: many lines (one a layer) share what a page can carry."""
        return COLUMNS if len(self.lines) <= 6 else max(30, COLUMNS * 6 // len(self.lines) // 2)

    def spans(self, x: tuple[float, float], top: float, width: float, height: float) -> tuple[Scale, Scale]:
        values = [line.y for line in self.lines if line.style != "rug"]
        if self.stacked and values:
            values = [np.sum([np.nan_to_num(v) for v in values], axis=0)]
        log = prefers_log(values) if self.log is None else self.log
        low, high = limits(values, log, self.zero or self.stacked)
        return Scale(*x, LEFT, width - RIGHT), Scale(low, high, top + height, top, log)


@dataclass(frozen=True)
class Figure:
    name: str  # of files and ids: letters, digits, "-"
    charts: list[Chart]  # panels from top to bottom
    x_title: str = "step"
    marks: list[Mark] = field(default_factory=list)
    width: int = 720
    height: int = 170  # of a panel
    caption: list[str] = field(default_factory=list)  # below, in a picture that stands by itself


def span(figures: list[Figure]) -> tuple[float, float]:
    """The x axis that they all have room on."""
    ends = [v for f in figures for c in f.charts for line in c.lines if len(line.x) for v in (line.x[0], line.x[-1])]
    low, high = (float(min(ends)), float(max(ends))) if ends else (0.0, 1.0)
    low = 0.0 if low < 0.05 * high else low
    return low, high if high > low else low + 1.0
