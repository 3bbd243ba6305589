"""Where a step's time goes, and what memory this rank holds. On CUDA by events in the stream, read when they have passed: nothing
waits for them.

    clock = Stopwatch(device)
    clock.start()               with the batch in hand
    clock.lap("own")            before each backward: the time to the beginning of the last one adds up
    clock.lap("backward")       the last backward is launched
    rows = gather_rows(..., clock.own_seconds, ...)
    clock.lap("meet")           the ranks have met
    clock.lap("update")         the update is launched
    slow = slowest([row[k] for row in rows])
    metrics.write(..., **slow, **clock.record())
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

Stamp = Any  # seconds on the host's clock, or a CUDA event


def stamp(device: torch.device) -> Stamp:
    """Now; on CUDA: when the work that is in the stream by now will be done."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def passed(end: Stamp) -> bool:
    return isinstance(end, float) or end.query()


def seconds_between(begin: Stamp, end: Stamp) -> float:
    """Of two stamps that have passed."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000


class Stopwatch:
    """Sections of a step on this rank: own, backward, meet, update.

    own: from the batch to the beginning of the last micro-batch's backward. Under DDP nothing is communicated in that time (but
    the buffers of a model that has some), so that a slow rank shows there and not the peers that wait for it in backward; under
    FSDP weights are gathered in it, and all wait for the slowest.

    seconds: of each section, in the last step for which it is known. On CUDA that is when the device has come past its end:
    after the step's one host synchronisation `own` and `backward` are of this step, `meet` and `update` of the one before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.ends: dict[str, Stamp] = {}  # when each section was last over
        self._last: Stamp = None
        self._steps: list[dict[str, list[tuple[Stamp, Stamp]]]] = []  # laps not yet read, the newest step last

    def start(self) -> None:
        """A step begins: what has passed since the last lap (log, validation, checkpoint, waiting for data) counts nowhere."""
        self._steps.append({})
        self._last = stamp(self.device)

    def lap(self, name: str) -> None:
        """What has passed since the last `lap` or `start` was `name`; laps of one name in a step add up."""
        begin, self._last = self._last, stamp(self.device)
        self._steps[-1].setdefault(name, []).append((begin, self._last))
        self.ends[name] = self._last

    @property
    def own_seconds(self) -> float:
        """For the ranks' message: of the step before, as that of this one is not known on CUDA before they have met. 0: none."""
        return self.seconds.get("own", 0.0)

    def record(self) -> dict[str, float | None]:
        """For the log, after the update: seconds of this rank."""
        for laps in self._steps:
            for name in [name for name, parts in laps.items() if passed(parts[-1][1])]:
                self.seconds[name] = sum(seconds_between(*part) for part in laps.pop(name))
        self._steps = [laps for laps in self._steps[:-1] if laps] + self._steps[-1:]
        known = self.seconds
        return {
            "compute_seconds": known["own"] + known["backward"] if {"own", "backward"} <= known.keys() else None,
            "meet_seconds": known.get("meet"), "update_seconds": known.get("update"),
        }  # fmt: skip


def slowest(own: list[float]) -> dict[str, Any]:
    """For the log and the watch. own: `own_seconds` of every rank. None: they are not known yet."""
    longest = max(own)
    if longest == 0.0:
        return {"own_seconds": None, "slowest_rank": None, "median_own_seconds": None}
    return {"own_seconds": longest, "slowest_rank": own.index(longest), "median_own_seconds": statistics.median(own)}


def memory_gib(device: torch.device) -> float:
    """What this rank holds now: tensors in CUDA's allocator, or on CPU the process's resident memory but for mapped files."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**30
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE") / 2**30
