"""Rules of the watch on time and memory, a window of steps at a time: waiting for data, a slow rank, a drop of throughput,
memory that creeps up. Pure; imports no torch."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from kamui_dist import knobs
from kamui_dist.findings import Sign
from kamui_dist.rules import Rule, Windows, stretch

OFTEN = 0.8  # share of a window's steps in which the same rank has to be the slow one
POINTS = 16  # of memory over the whole run
CREEP_POINTS = 6  # at least, to call it a trend
STILL = 0.7  # a trend's second half has at least this share of its mean slope
CREEP_GIB = 1 / 16  # less than this is the allocator's business


@dataclass
class Waits(Rule):
    """The share of a window's time that went into waiting for data. The longest wait is left out: one is an accident."""

    cfg: knobs.Watch
    size: int
    begins: int = 0
    ended: int = 0
    count: int = 0
    waited: float = 0.0
    longest: float = 0.0
    seconds: float = 0.0

    def add(self, step: int, data_seconds: float, step_seconds: float) -> bool:
        if self.count == 0 or self.count >= self.size:
            self.begins, self.count, self.waited, self.longest, self.seconds = step, 0, 0.0, 0.0, 0.0
        self.ended = step
        self.count, self.waited, self.seconds = self.count + 1, self.waited + data_seconds, self.seconds + step_seconds
        self.longest = max(self.longest, data_seconds)
        return self.count == self.size

    def sign(self) -> Sign | None:
        waited = self.waited - self.longest
        # The seconds are those of the step before: a long wait at the end of a window is not among them.
        seconds = max(self.seconds - self.longest, waited)
        if waited <= self.cfg.starvation_share * seconds:
            return None
        return Sign(
            f"{stretch(self.begins, self.ended, self.size)} waited {waited:.3g} s for data, "
            f"{waited / seconds:.0%} of their time ({waited / self.size * 1000:.3g} ms a step).", self.begins,
        )  # fmt: skip


@dataclass
class SlowRank(Rule):
    """The same rank is the slowest, and above slow_rank_factor times the median rank, in most steps of a window."""

    cfg: knobs.Watch
    size: int
    begins: int = 0
    ended: int = 0
    count: int = 0
    slow: dict[str, int] = field(default_factory=dict)  # rank -> steps (a string, as JSON would make it one)
    own: float = 0.0
    median: float = 0.0

    def add(self, step: int, rank: int, own_seconds: float, median_seconds: float) -> bool:
        if self.count == 0 or self.count >= self.size:
            self.begins, self.count, self.slow, self.own, self.median = step, 0, {}, 0.0, 0.0
        self.ended = step
        self.count, self.own, self.median = self.count + 1, self.own + own_seconds, self.median + median_seconds
        if own_seconds > self.cfg.slow_rank_factor * median_seconds:
            self.slow[str(rank)] = self.slow.get(str(rank), 0) + 1
        return self.count == self.size

    def sign(self) -> Sign | None:
        rank, times = max(self.slow.items(), key=lambda item: item[1], default=("", 0))
        if times < OFTEN * self.size:
            return None
        return Sign(
            f"rank {rank} was the slowest in {times} of {stretch(self.begins, self.ended, self.size)}: "
            f"{self.own / self.size:.3g} s a step, the median rank takes {self.median / self.size:.3g} s.", self.begins,
        )  # fmt: skip


@dataclass
class Throughput(Windows):
    """A window's median of tokens per second below that of the best window so far. The first window is not compared."""

    best: float = 0.0
    best_step: int = 0

    def sign(self) -> Sign | None:
        speed = statistics.median(self.values)
        if speed > self.best:
            self.best, self.best_step = speed, self.begins
        if speed >= (1 - self.cfg.throughput_drop) * self.best:
            return None
        return Sign(
            f"{speed:,.0f} tokens per second (median of {stretch(self.begins, self.ended, self.size, last='')}), "
            f"{1 - speed / self.best:.0%} below the {self.best:,.0f} of the steps from {self.best_step} on.", self.begins,
        )  # fmt: skip


@dataclass
class Memory(Rule):
    """Each window's median, over the last 8 windows and, thinned out, over the whole run; the first window, in which the
    allocator warms up, is left out. It creeps if it rises from nearly every point to the next, by more than memory_growth of
    itself in all, and no slower in the end than before: a curve that flattens is a cache that fills."""

    cfg: knobs.Watch
    size: int
    windows: int = 0
    stride: int = 1
    values: list[float] = field(default_factory=list)
    recent: deque[list[float]] = field(default_factory=lambda: deque(maxlen=POINTS // 2))  # [step, GiB]
    whole: list[list[float]] = field(default_factory=list)

    def add(self, step: int, gib: float) -> bool:
        self.values.append(gib)
        if len(self.values) < self.size:
            return False
        middle, self.values = statistics.median(self.values), []
        self.windows += 1
        if self.windows == 1:
            return False
        self.recent.append([step, middle])
        if self.windows % self.stride == 0:
            self.whole.append([step, middle])
        if len(self.whole) > POINTS:
            self.whole, self.stride = self.whole[::2], 2 * self.stride
        return True

    def sign(self) -> Sign | None:
        return self._creeps(list(self.recent)) or self._creeps(self.whole)

    def _creeps(self, points: list[list[float]]) -> Sign | None:
        if len(points) < CREEP_POINTS:
            return None
        (began, first), (half, middle), (ended, last) = points[0], points[len(points) // 2], points[-1]
        growth = last - first
        rising = sum(b > a for (_, a), (_, b) in pairwise(points)) / (len(points) - 1)
        slower = (last - middle) / (ended - half) < STILL * growth / (ended - began)
        if rising < OFTEN or slower or growth <= max(self.cfg.memory_growth * first, CREEP_GIB):
            return None
        return Sign(
            f"memory rose from {first:.3f} to {last:.3f} GiB between steps {began:.0f} and {ended:.0f}, "
            f"{growth / (ended - began) * 1000:.2g} GiB in 1000 steps, and still rises.", int(began),
        )  # fmt: skip
