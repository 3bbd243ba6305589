"""What the rules of the watch are made of: windows of numbers, and state that a checkpoint keeps. Pure; imports no torch."""

from __future__ import annotations

import copy
import math
import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kamui_dist import knobs


class Window:
    """The last `size` values, and beside them the same in order: a median costs a binary search instead of a sort."""

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self.size = size
        self.values = deque(values, size)
        self.ordered = sorted(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def add(self, value: float) -> None:
        if len(self.values) == self.size:
            del self.ordered[bisect_left(self.ordered, self.values[0])]
        self.values.append(value)
        insort(self.ordered, value)

    def mean(self, last: int = 0) -> float:
        """Of all, or of the last so many."""
        values = list(self.values)[-last:]
        return math.fsum(values) / len(values)

    def median(self) -> float:
        return self.ordered[len(self.ordered) // 2]

    def spread(self) -> float:
        """The standard deviation, estimated from the median absolute deviation (Rousseeuw & Croux 1993)."""
        middle = self.median()
        return 1.4826 * statistics.median(abs(value - middle) for value in self.values)

    def noise(self) -> float:
        """The standard deviation without the trend, from the median absolute difference of neighbours."""
        return 1.0484 * statistics.median(abs(b - a) for a, b in pairwise(self.values)) if len(self) > 1 else 0.0


class Rule:
    """State of a rule: all its fields but those that the config and the run give it."""

    GIVEN: tuple[str, ...] = ("cfg", "size", "span", "warmup", "peak_lr", "decay_from", "vocab_size", "fresh", "start")

    def state(self) -> dict[str, Any]:
        return {name: _plain(value) for name, value in vars(self).items() if name not in self.GIVEN}

    def load(self, state: dict[str, Any]) -> None:
        """What an older state does not have stays as it is."""
        for name in vars(self).keys() & state.keys():
            now, saved = getattr(self, name), copy.deepcopy(state[name])
            if isinstance(now, Window):
                saved = Window(now.size, saved)
            elif isinstance(now, deque):
                saved = deque(saved, now.maxlen)
            setattr(self, name, saved)


def stretch(begins: int, ended: int, count: int, what: str = "steps", last: str = "the last ") -> str:
    """A window of `count` records in words: its steps, which are more where a log does not have all of them."""
    steps = round((ended - begins) * count / (count - 1)) if count > 1 else 1
    return f"{last}{count:,} {what}" if steps <= count else f"{count:,} records of {last}{steps:,} {what}"


@dataclass
class Windows(Rule):
    """The values of a window of `size` steps, one window after the other."""

    cfg: knobs.Watch
    size: int
    begins: int = 0
    ended: int = 0
    values: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> bool:
        """Whether the window is now full and to be judged."""
        if not self.values or len(self.values) >= self.size:
            self.begins, self.values = step, []
        self.ended = step
        self.values.append(value)
        return len(self.values) == self.size


def _plain(value: Any) -> Any:
    values = value.values if isinstance(value, Window) else value
    return copy.deepcopy(list(values) if isinstance(values, deque) else values)
