"""Scales, ticks, and numbers as people write them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kamui_dist.report.series import Floats

_SUFFIXES = [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")]


@dataclass(frozen=True)
class Scale:
    """Values in [low, high] onto pixels [start, end]."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, values: Floats) -> Floats:
        """What a logarithm does not have (0 and below) lies on the lower edge."""
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            values = np.log10(np.maximum(values, self.low))
        else:
            low, high = self.low, self.high
        return self.start + (values - low) / (high - low) * (self.end - self.start)

    def at(self, value: float) -> float:
        return float(self(np.array([value]))[0])

    def ticks(self, count: int) -> list[float]:
        return log_ticks(self.low, self.high, count) if self.log else linear_ticks(self.low, self.high, count)


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten in [low, high]."""
    raw = (high - low) / max(1, count)
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(s * unit for s in (1, 2, 5, 10) if s * unit >= 0.75 * raw)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """Powers of ten in [low, high], every so many; where there are few also 2 and 5 times them; over less than that linear ones."""
    if high / low <= 20:
        return linear_ticks(low, high, count)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = -(-len(decades) // count)
    factors = (1, 2, 5) if high / low < 300 else (1,)
    found = [m * 10.0**d for d in decades if d % every == 0 for m in factors]
    return [t for t in found if low * (1 - 1e-9) <= t <= high * (1 + 1e-9)]


def limits(values: list[Floats], log: bool, zero: bool) -> tuple[float, float]:
    """What an axis spans: all finite values with a little air; from 0 if `zero`. On a logarithmic one those above 0."""
    finite = np.concatenate([v[np.isfinite(v)] for v in values]) if values else np.array([])
    if log:
        finite = finite[finite > 0]
    if len(finite) == 0:
        return (0.1, 1.0) if log else (0.0, 1.0)
    low, high = float(finite.min()), float(finite.max())
    if log:
        air = max(0.04 * math.log10(high / low), 0.02)
        return 10 ** (math.log10(low) - air), 10 ** (math.log10(high) + air)
    low = min(low, 0.0) if zero else low
    air = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return (low if zero and low == 0 else low - air), high + air


def prefers_log(values: list[Floats]) -> bool:
    """Whether most of a curve would lie in the lowest tenth of a linear axis."""
    finite = np.concatenate([v[np.isfinite(v)] for v in values]) if values else np.array([])
    if len(finite) < 10 or (finite < 0).any() or (finite <= 0).mean() > 0.01:
        return False
    low, high = float(finite.min()), float(finite.max())
    return high > low and float(np.quantile(finite, 0.9)) < low + 0.1 * (high - low)


def short(value: float, digits: int = 3) -> str:
    """12,345,678 -> 12.3M, 0.000312 -> 3.12e-4; trailing zeros go."""
    if value == 0:
        return "0"
    size = abs(value)
    for factor, suffix in _SUFFIXES:
        if size >= factor * (1 - 0.5 * 10.0**-digits):
            return _strip(f"{value / factor:.{max(0, digits - 1 - math.floor(math.log10(size / factor)))}f}") + suffix
    if size < 1e-3:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{_strip(mantissa)}e{int(exponent)}"
    return _strip(f"{value:.{max(0, digits - 1 - math.floor(math.log10(size)))}f}")


def _strip(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def tick_labels(ticks: list[float]) -> list[str]:
    """Short, and as precise as it takes to tell them apart."""
    for digits in range(2, 8):
        labels = [short(t, digits) for t in ticks]
        if len(set(labels)) == len(labels) and all(
            t == 0 or abs(_value(text) / t - 1) < 1e-6 for t, text in zip(ticks, labels, strict=True)
        ):
            break
    return labels if ticks else []


def _value(text: str) -> float:
    factor = next((f for f, suffix in _SUFFIXES if text.endswith(suffix)), 1.0)
    return float(text.rstrip("TBMk")) * factor


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s" if seconds < 600 else f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes // 60 % 24} h"


def counted(number: int, what: str) -> str:
    """1 start, 2 starts."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")
