"""A run over the x axis of a picture: its lines, and its marks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from kamui_dist.errors import UserError
from kamui_dist.report.figures import Line, Mark
from kamui_dist.report.found import Row
from kamui_dist.report.lines import plain
from kamui_dist.report.logs import ATTEMPTS, Run
from kamui_dist.report.series import Floats, column, moving_average


@dataclass(frozen=True)
class Drawn:
    """A run and what is drawn of it. by: "step" or "tokens"."""

    run: Run
    rows: list[Row]
    by: str = "step"
    window: int = 128  # of the moving average
    clip: float | None = None  # largest gradient norm
    first: int = 1  # number of its first finding

    def place(self, steps: Floats) -> Floats:
        """Steps on the x axis. Raises UserError if it is of tokens and the run does not count them."""
        if self.by == "step":
            return steps
        there = self.run.of("step")
        x, tokens = column(there, "step"), column(there, "tokens")
        known = np.isfinite(tokens)
        if not known.any():
            raise UserError(f"{plain(self.run.name)} does not say how many tokens it has seen: compare by steps")
        return np.interp(steps, x[known], tokens[known])

    def curve(self, kind: str, name: str) -> tuple[Floats, Floats] | None:
        records = self.run.of(kind)
        y = column(records, name)
        return (self.place(column(records, "step")), y) if np.isfinite(y).any() else None

    def line(self, kind: str, field: str, name: str, colour: int | str = 0, style: str = "line") -> list[Line]:
        """None or one."""
        found = self.curve(kind, field)
        return [] if found is None else [Line(name, *found, colour, style)]

    def smoothed(self, field: str, name: str, colour: int, average: str = "") -> list[Line]:
        """The values, faint, and their moving average, whose window a short run shortens; of a very short one the values."""
        found = self.curve("step", field)
        if found is None:
            return []
        x, y = found
        window = self.averaged(len(y))
        if window < 4:
            return [Line(average or name, x, y, colour)]
        mean = moving_average(y, window)
        return [Line(name, x, y, colour, "faint"), Line(average or f"average of {window}", x, mean, colour)]

    def averaged(self, values: int) -> int:
        """A trailing average lags by half its window: a fiftieth of the picture at most."""
        return max(1, min(self.window, values // 50))

    def marks(self) -> list[Mark]:
        steps = np.array([float(row.finding.step) for row in self.rows])
        places = self.place(steps).tolist()
        ends = self.place(np.array([float(row.last) for row in self.rows])).tolist()
        marks = [
            Mark(
                x,
                str(n),
                f"{row.finding.kind}, step {row.steps}: {row.finding.message}",
                row.level,
                f"finding-{n}",
                end,
            )
            for n, (x, end, row) in enumerate(zip(places, ends, self.rows, strict=True), self.first)
        ]
        begun = [r for r in self.run.records if r["kind"] in ATTEMPTS]
        again = [r for before, r in itertools.pairwise(begun) if before["kind"] != "rollback"]
        at = self.place(np.array([float(r["step"]) for r in again])).tolist()
        told = {"resume": "resumed", "rollback": "went back", "start": "started again"}
        starts = [
            Mark(x, "", f"{told[r['kind']]} at step {r['step']:,}", "start") for x, r in zip(at, again, strict=True)
        ]
        return sorted([*starts, *marks], key=lambda mark: mark.x)

    @property
    def x_title(self) -> str:
        return "tokens" if self.by == "tokens" else "step"
