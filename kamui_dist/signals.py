"""Stop requests: SIGTERM, SIGUSR1, SIGUSR2, SIGHUP, SIGINT, a file STOP in the run directory, a time limit, the end of the
scheduler's job, a dead launcher.

A handler only sets a flag. The loop polls the flag and sends it through the step's packed reduction, so that all ranks stop
after the same step, whichever of them heard the signal. Imports no torch: handlers are installed before torch is imported,
which takes seconds in which a signal would otherwise kill the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType

# A reason travels between ranks as its index here; the highest wins.
REASONS = ["", "the launcher is gone", "time limit", "end of the job", "file STOP", "SIGHUP", "SIGUSR2", "SIGUSR1", "SIGTERM",
           "SIGINT"]  # fmt: skip
BY_HAND = ("file STOP", "SIGINT")  # a person asked: nobody should start the run again without being asked to


class StopRequest:
    def __init__(self) -> None:
        self.code = 0
        self.started = time.monotonic()
        self.limit_seconds: float | None = None  # since the start
        self.end_time: float | None = None  # since the epoch
        self.stop_file: Path | None = None
        self._parent = os.getppid()
        self._interrupted = 0.0
        self._looked = 0.0

    def install(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
            # nohup means it; but SIGUSR1 is ignored by our launchers for torchrun's sake, and inherited from there.
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            signal.signal(number, self._heard)
        return self

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            # A second Ctrl-C means now. torchrun may pass one Ctrl-C on several times, hence the second of grace.
            if self._interrupted and time.monotonic() - self._interrupted > 1.0:
                raise KeyboardInterrupt
            self._interrupted = self._interrupted or time.monotonic()
        self.code = max(self.code, REASONS.index(signal.Signals(number).name))

    def poll(self, margin_seconds: float = 0.0) -> int:
        """0, or the index in REASONS of what this rank has heard. `margin_seconds`: what would pass before all is saved, if the
        run were to go on until the next poll (Pace.margin)."""
        now = time.monotonic()
        if self.limit_seconds is not None and now - self.started + margin_seconds > self.limit_seconds:
            self.code = max(self.code, REASONS.index("time limit"))
        if self.end_time is not None and time.time() + margin_seconds > self.end_time:
            self.code = max(self.code, REASONS.index("end of the job"))
        if os.getppid() != self._parent:  # torchrun was killed: nobody would ever end this process
            self.code = max(self.code, REASONS.index("the launcher is gone"))
        if self.stop_file is not None and now - self._looked > 1.0:  # once a second: it may be a network file system
            self._looked = now
            if self.stop_file.exists():
                self.code = max(self.code, REASONS.index("file STOP"))
                with contextlib.suppress(OSError):  # heard: it must not stop the resumed run too
                    self.stop_file.unlink()
        return self.code


def ignore() -> None:
    """After the end: Python gives the handlers back while it exits, and a late request would kill a run that has ended well."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


class Pace:
    """How long steps, saves and validations take on this rank, as far as a deadline has to know. Each rank compares its own pace
    with the deadline, and the first that finds it close stops all: so the slowest one counts.

    Estimates are the largest of the last few: a deadline that is missed costs the steps since the last checkpoint, one that is
    kept too early costs a step or two. eval_every: 0 if there is no validation. `saved()`: seconds of the last save, 0 before
    the first, for which `guess` stands in.
    """

    def __init__(self, eval_every: int, save_every: int, guess: float, saved: Callable[[], float]) -> None:
        self.eval_every, self.save_every, self.guess, self.saved = eval_every, save_every, guess, saved
        self.steps: deque[float] = deque(maxlen=20)
        self.saves: deque[float] = deque(maxlen=3)
        self.evaluations: deque[float] = deque([0.0], maxlen=3)
        self._first = True

    def step(self, seconds: float) -> None:
        # The first step warms up and compiles: up to minutes that do not come again.
        if not self._first:
            self.steps.append(seconds)
        self._first = False

    def evaluation(self, seconds: float) -> None:
        self.evaluations.append(seconds)

    @property
    def save(self) -> float:
        """Seconds to reserve for the save that follows a stop, and for leaving."""
        return 1.5 * self._save() + 2.0

    def margin(self, step: int, seconds: float) -> float:
        """Seconds from here, where update `step` (from 1) has been at work for `seconds`, to a saved stop after update step + 1:
        the rest of this one with what is due after it, a whole one, and the save."""
        if not self.steps:
            return self.save
        due = max(self.evaluations) if self.eval_every and step % self.eval_every == 0 else 0.0
        due += self._save() if step % self.save_every == 0 else 0.0
        return 2 * max(*self.steps, seconds) + due + self.save

    def _save(self) -> float:
        seconds = self.saved()
        if seconds and (not self.saves or seconds != self.saves[-1]):
            self.saves.append(seconds)
        return max(self.saves, default=self.guess)
