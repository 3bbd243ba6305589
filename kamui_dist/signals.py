"""Stop requests: SIGTERM, SIGUSR1, SIGUSR2, SIGHUP, SIGINT, a file STOP in the run directory, a time limit, the end of the
scheduler's job, a dead launcher.

A handler only sets a flag. The loop polls the flag and sends it through the step's packed reduction, so that all ranks stop
after the same step, whichever of them heard the signal. Imports no torch: handlers are installed before torch is imported,
which takes seconds in which a signal would otherwise kill the process.

Until the loop there are waits for other ranks in which no handler runs: StartUp ends those that are in vain.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from kamui_dist.errors import EXIT_STOPPED

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
        self._polls = 0

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
        self._polls += 1
        if self._polls == 2:  # the first is the last act before the loop; at the second, all ranks have met in a step
            start_up_is_over()
        if self.limit_seconds is not None and now - self.started + margin_seconds > self.limit_seconds:
            self.code = max(self.code, REASONS.index("time limit"))
        if self.end_time is not None and time.time() + margin_seconds > self.end_time:
            self.code = max(self.code, REASONS.index("end of the job"))
        if os.getppid() != self._parent:  # torchrun was killed: nobody would ever end this process
            self.code = max(self.code, REASONS.index("the launcher is gone"))
        if self.stop_file is not None and now - self._looked > 1.0:  # once a second: it may be a network file system
            self._looked = now
            if os.path.isfile(self.stop_file):  # noqa: PTH113 - Path.is_file raises where a file server is away
                self.code = max(self.code, REASONS.index("file STOP"))
                with contextlib.suppress(OSError):  # heard: it must not stop the resumed run too
                    self.stop_file.unlink()
        return self.code


def ignore() -> None:
    """After the end: Python gives the handlers back while it exits, and a late request would kill a run that has ended well."""
    start_up_is_over()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


class StartUp:
    """Ends this process if, before the first step, it has been asked to stop and waits for ranks that do not come.

    In init_process_group and in new_group the main thread waits inside C++, where Python's handlers do not run. After the death of
    another rank torchrun's SIGTERM would not be heard, and 30 s later all would be killed without a word. But the signal itself
    does arrive: its C handler writes the number into a pipe, which a thread reads. The main thread then has time to go on (import,
    read, meet the others, stop in order, as ever); the process ends when it has stood still for WAIT_SECONDS, or, where all ranks
    of this node live, for PATIENCE_SECONDS: then somebody may just be slow. No step has been done: there is nothing to lose.
    """

    WAIT_SECONDS = 3.0
    PATIENCE_SECONDS = 10.0  # launchers kill after 30
    TICK_SECONDS = 0.5
    HEARD = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # after these a launcher kills

    def __init__(self, stop: StopRequest) -> None:
        # (outcome, reason, exit code, requeue): set by rundir as soon as there is a run directory to tell it in
        self.tell: Callable[[str, str, int, bool], None] | None = None
        self.over = threading.Event()
        self._before = REASONS[stop.code]  # heard before there was a pipe
        self._parent = os.getppid()
        self._main = threading.get_ident()
        self._pipe, heard = os.pipe()
        os.set_blocking(heard, False)
        signal.set_wakeup_fd(heard, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="kamui-start-up", daemon=True)
        self._thread.start()

    @property
    def orphan(self) -> bool:
        return os.getppid() != self._parent

    def _watch(self) -> None:
        asked = self._before if self._before in [number.name for number in self.HEARD] else ""
        still, seen, done, before = 0.0, [(0, 0)], 0, time.monotonic()
        while not self.over.is_set():
            if select.select([self._pipe], [], [], self.TICK_SECONDS)[0]:
                numbers = os.read(self._pipe, 4096)
                asked = asked or next((number.name for number in self.HEARD if number in numbers), "")
            asked = asked or ("the launcher is gone" if self.orphan else "")
            place = [(id(frame.f_code), frame.f_lasti) for frame in self._stack()]
            moved, now = bytes_moved(), time.monotonic()
            still += min(now - before, 2 * self.TICK_SECONDS)  # not the clock: SIGSTOP and SIGCONT is no standing still
            if not asked or place != seen or moved - done > MOVING_BYTES:
                still = 0.0
            seen, done, before = place, moved, now
            if still > self.WAIT_SECONDS:
                dead = not self.orphan and a_rank_is_gone()
                if (self.orphan or dead or still > self.PATIENCE_SECONDS) and not self.over.is_set():
                    self._end(asked, dead)

    def _stack(self) -> list[FrameType]:
        """Of the main thread, innermost first."""
        frame, found = sys._current_frames().get(self._main), []
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
        return found

    def _end(self, asked: str, dead: bool) -> NoReturn:
        places = [(frame.f_globals.get("__name__", ""), frame.f_code.co_name) for frame in self._stack()]
        place = next((f" in {name}.{function}" for name, function in places if name.startswith("kamui_dist.")), "")
        why = "another rank has died" if dead else "the other ranks do not come"
        told = f"rank {os.environ.get('RANK', '0')} ends in start-up: {asked}, and it waits{place}, but {why}"
        print(told, file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            if self.tell is not None and dead:
                self.tell("failed", f"another rank died in start-up ({asked} from the launcher)", 1, True)
            elif self.tell is not None:
                self.tell("stopped", asked, EXIT_STOPPED, asked not in BY_HAND)
            sys.stdout.flush()
        os._exit(128 + signal.SIGTERM)  # never 0: under a launcher the other ranks have to end too


start_up: StartUp | None = None


def guard_start_up(stop: StopRequest) -> None:
    """From here to the first step (see StartUp); in the main thread. One process alone waits for nobody."""
    global start_up
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        start_up = StartUp(stop)


def start_up_is_over() -> None:
    """May be called again."""
    global start_up
    if start_up is not None:
        start_up.over.set()
        signal.set_wakeup_fd(-1)
        start_up = None


def a_rank_is_gone() -> bool:
    """Whether torchrun has fewer living processes on this node than it has started. False where that cannot be seen."""
    torchrun = os.getppid()
    if "TORCHELASTIC_RUN_ID" not in os.environ or _is_rank(torchrun):  # or a wrapper around each rank
        return False
    pids: set[str] = set()
    for path in Path(f"/proc/{torchrun}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids |= set(path.read_text(encoding="ascii").split())
    return 0 < sum(_is_rank(int(pid)) for pid in pids) < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _is_rank(pid: int) -> bool:
    """Whether a living process was told a LOCAL_RANK. (One that is dead and not yet waited for has no environment.)"""
    try:
        return b"LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


MOVING_BYTES = 1 << 20  # read or written between two looks: a thread is at work, even if always at the same line


def bytes_moved() -> int:
    """By this process, from files and sockets and to them, since it began; 0 where that is not told."""
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return 0
    return sum(int(value) for value in re.findall(r"^[rw]char: (\d+)", text, re.MULTILINE))


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
