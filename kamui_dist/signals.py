"""Stop requests: SIGTERM, SIGUSR1, SIGUSR2, SIGHUP, SIGINT, a file STOP in the run directory, a time limit, a dead launcher.

A handler only sets a flag. The loop polls the flag and sends it through the step's packed reduction, so that all ranks stop
after the same step, whichever of them heard the signal. Imports no torch: handlers are installed before torch is imported,
which takes seconds in which a signal would otherwise kill the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from types import FrameType

# A reason travels between ranks as its index here; the highest wins.
REASONS = ["", "the launcher is gone", "time limit", "file STOP", "SIGHUP", "SIGUSR2", "SIGUSR1", "SIGTERM", "SIGINT"]


class StopRequest:
    def __init__(self) -> None:
        self.code = 0
        self.started = time.monotonic()
        self.limit_seconds: float | None = None
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
        """0, or the index in REASONS of what this rank has heard. `margin_seconds`: what one more step and a save would take."""
        now = time.monotonic()
        if self.limit_seconds is not None and now - self.started + margin_seconds > self.limit_seconds:
            self.code = max(self.code, REASONS.index("time limit"))
        if os.getppid() != self._parent:  # torchrun was killed: nobody would ever end this process
            self.code = max(self.code, REASONS.index("the launcher is gone"))
        if self.stop_file is not None and now - self._looked > 1.0:  # once a second: it may be a network file system
            self._looked = now
            if self.stop_file.exists():
                self.code = max(self.code, REASONS.index("file STOP"))
                with contextlib.suppress(OSError):  # heard: it must not stop the resumed run too
                    self.stop_file.unlink()
        return self.code
