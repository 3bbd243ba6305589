"""Curves from records: numpy columns, moving averages, and as many points as a picture can show."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Curve: TypeAlias = tuple[Floats, Floats]  # x ascending, y; NaN in y is a gap

COLUMNS = 900  # of the picture; each keeps at most four points


def column(records: Iterable[dict[str, Any]], name: str) -> Floats:
    """NaN where there is no number."""
    return np.array([as_float(r.get(name)) for r in records], dtype=np.float64)


def curve(records: list[dict[str, Any]], name: str, by: str) -> Curve | None:
    """`name` over `by` (step or tokens); None if no record has it."""
    x, y = column(records, by), column(records, name)
    y = y[np.isfinite(x)]
    return (x[np.isfinite(x)], y) if np.isfinite(y).any() else None


def moving_average(y: Floats, window: int) -> Floats:
    """Of the last `window` finite values, this one included; NaN before the first."""
    finite = np.isfinite(y)
    total = np.concatenate([[0.0], np.cumsum(y[finite])])
    k = np.cumsum(finite)  # finite values up to and with each place
    first = np.maximum(k - window, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(k > 0, (total[k] - total[first]) / (k - first), np.nan)


def thin(x: Floats, y: Floats, columns: int = COLUMNS) -> Curve:
    """The first, lowest, highest and last point of each of `columns` equal parts of x: what a line of so many pixels looks like
    with all points, so a single outlier stays (M4: Jugel et al. 2014, PVLDB 7(10))."""
    if len(x) <= 4 * columns:
        return x, y
    edges = np.searchsorted(x, np.linspace(x[0], x[-1], columns + 1)[1:-1])
    keep = []
    for start, end in zip([0, *edges], [*edges, len(x)], strict=True):
        if start == end:
            continue
        finite = start + np.flatnonzero(np.isfinite(y[start:end]))
        if len(finite) == 0:
            keep.append(start)  # one NaN: the gap
        else:
            low, high = finite[np.argmin(y[finite])], finite[np.argmax(y[finite])]
            keep += sorted({int(finite[0]), int(low), int(high), int(finite[-1])})
    return x[keep], y[keep]


def binned(x: Floats, values: dict[str, Floats], bins: int) -> tuple[Floats, dict[str, Floats]]:
    """Means over `bins` parts of x, for what is stacked: there the sum of a part matters, not its extremes. NaN counts as 0."""
    count = min(bins, len(x))
    if count == 0:
        return x, values
    place = np.minimum((np.arange(len(x)) * count) // len(x), count - 1)  # the same number of records in each
    weight = np.bincount(place, minlength=count)
    means = {n: np.bincount(place, np.nan_to_num(v), minlength=count) / weight for n, v in values.items()}
    return np.bincount(place, x, minlength=count) / weight, means


def median(records: Iterable[dict[str, Any]], name: str) -> float | None:
    return _of(records, name, lambda found: float(np.median(found)))


def _of(records: Iterable[dict[str, Any]], name: str, what: Callable[[Floats], float]) -> float | None:
    found = column(records, name)
    found = found[np.isfinite(found)]
    return what(found) if len(found) else None


def as_float(value: Any) -> float:
    """NaN for what is no number; what no axis could span is NaN or 0."""
    if not isinstance(value, int | float) or not abs(value) < 1e100:
        return np.nan
    return float(value) if abs(value) > 1e-100 else 0.0
