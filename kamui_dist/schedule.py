"""The learning rate as a pure function of the step. No object to step, to save or to restore. Imports no torch.

`step` counts optimizer updates from 0, so update number n is step n - 1:

    n = 1 ... warmup        peak * n / warmup          the first update has lr > 0, update `warmup` has exactly the peak
    then                    from peak to floor         the last update (n = total) has exactly the floor
    n > total               the floor (constant: the peak)

Sources: cosine, Loshchilov & Hutter 2017 (arXiv:1608.03983); wsd (warmup-stable-decay), Hu et al. 2024 (arXiv:2404.06395);
its 1 - sqrt decay, Hägele et al. 2024 (arXiv:2405.18392).
"""

from __future__ import annotations

import math


def lr_at(
    step: int,
    *,
    kind: str,
    peak: float,
    floor: float,
    total: int,
    warmup: int,
    decay: int = 0,
    decay_shape: str = "linear",
) -> float:
    """The learning rate of update `step` (from 0). `total`, `warmup`, `decay` are in updates; `decay` is for wsd only.

    No warmup is the same as a warmup of one update. Defined for every step >= 0, also past the end.
    """
    n = step + 1
    warmup = max(warmup, 1)
    if n <= warmup:
        return peak * (n / warmup)  # exactly the peak at n = warmup
    if kind == "constant":
        return peak
    start = warmup if kind in ("linear", "cosine") else total - decay  # the last update that still has the peak
    if n <= start:
        return peak
    x = min(1.0, (n - start) / (total - start)) if total > start else 1.0
    return _between(peak, floor, x, kind if kind in ("linear", "cosine") else decay_shape)


def _between(peak: float, floor: float, x: float, shape: str) -> float:
    """From `peak` at x = 0 to `floor` at x = 1, exact at both ends."""
    if x >= 1.0:
        return floor
    if shape == "exponential":
        return peak * (floor / peak) ** x
    left = {"linear": 1.0 - x, "cosine": 0.5 * (1.0 + math.cos(math.pi * x)), "sqrt": 1.0 - math.sqrt(x)}[shape]
    return floor + (peak - floor) * left


def draw(values: list[float], width: int = 72, height: int = 12) -> str:
    """The curve as lines of text for the terminal: `values` (one an update) over step, highest on top."""
    top = max(values) or 1.0
    columns = [values[min(len(values) - 1, i * len(values) // width)] for i in range(min(width, len(values)))]
    columns[-1] = values[-1]
    eighths = " ▁▂▃▄▅▆▇█"
    lines = []
    for row in range(height, 0, -1):
        fill = [eighths[max(0, min(8, round((v / top * height - (row - 1)) * 8)))] for v in columns]
        label = f"{top:9.2e}" if row == height else f"{top / 2:9.2e}" if row == height // 2 else " " * 9
        lines.append(f"{label} │{''.join(fill)}".rstrip())
    lines.append(f"{'0':>9} └{'─' * len(columns)}")
    lines.append(f"{'update':>9}  1{str(len(values)).rjust(len(columns) - 1)}")
    return "\n".join(lines)
