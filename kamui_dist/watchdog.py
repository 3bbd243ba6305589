"""Names the rank that hangs, and ends a run that no longer moves. Imports no torch.

A thread on each rank looks once a second at where the training thread is: at which line of the loop, and so in which of its
numbered sections. The loop itself does nothing for it. What it sees goes into RUN/heartbeat/rank-00003, for the others to read.

When this rank has made no progress for the time that its section may take, and no rank that it may be waiting for is inside
its own time, the thread writes the stacks of all threads to RUN/stacks/rank-00003.txt, says which rank is furthest behind,
and ends the process. A launcher with restarts left then starts all ranks again from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import linecache
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import NoReturn

from kamui_dist import status
from kamui_dist.errors import EXIT_HUNG
from kamui_dist.knobs import Run
from kamui_dist.signals import MOVING_BYTES, bytes_moved
from kamui_dist.state import State

# Sections in the order in which a step goes through them; "start" is everything before the loop.
SECTIONS = ["start", "batch", "forward", "backward", "update", "log", "evaluate", "checkpoint"]
# How long these take has nothing to do with how long a step takes.
_SLOW = {"start", "evaluate", "checkpoint"}
_SILENT_SECONDS = 60.0  # a heartbeat file that is not written any more: the process or its machine is gone


@dataclass
class Beat:
    """What a rank tells of itself."""

    rank: int
    step: int  # that it is in, from 1; 0: before the first
    section: str
    progress: float  # when it last moved, in seconds since the epoch
    limit: float  # seconds that it may stay where it is
    written: float
    host: str
    pid: int

    @property
    def place(self) -> tuple[int, int]:
        return self.step, SECTIONS.index(self.section) if self.section in SECTIONS else len(SECTIONS)

    def text(self, now: float) -> str:
        where = f"{self.section} of step {self.step}" if self.step else "start-up"
        gone = now - self.written > _SILENT_SECONDS
        silent = f"; process {self.pid} on {self.host} has not answered for {_ago(now - self.written)}" if gone else ""
        return f"rank {self.rank} last seen in {where}, {_ago(now - self.progress)} ago{silent}"


class Watchdog:
    """Watches the thread that makes it, until that leaves the function that it is in: the one with the loop.

    run_dir: shared by all ranks. `run.hang_minutes` is the limit of a section of an ordinary step, `run.timeout_minutes` before
    the loop, in the first step, in validations and checkpoints. `state` tells the step. `on_hang(run_dir, text)` is called
    before the process ends with EXIT_HUNG.
    """

    def __init__(
        self, run_dir: Path, run: Run, rank: int, ranks: int, state: State, on_hang: Callable[[Path, str], None]
    ) -> None:
        self.run_dir, self.rank, self.ranks, self.state, self.on_hang = run_dir, rank, ranks, state, on_hang
        self.hang_seconds = 60 * run.hang_minutes
        self.slow_seconds = 60 * max(run.timeout_minutes, run.hang_minutes)
        # Somebody who stands at a breakpoint does not hang.
        self.enabled = not run.debug and (ranks > 1 or not sys.stdin.isatty())
        self.code: CodeType = sys._getframe(1).f_code
        self.first_step = state.step
        self.interval = max(min(1.0, self.hang_seconds / 10), ranks / 100)  # thousands of ranks share a file system
        self._watched = threading.get_ident()
        self._host = platform.node()
        self._sections, self._advance = _sections(self.code)
        self._seen: object = None
        self._bytes = 0
        self._stalled = 0.0
        self._armed = 0.0
        self._over = False
        self._thread = threading.Thread(target=self._run, name="kamui-watchdog", daemon=True)

    def start(self) -> None:
        if self.enabled:
            self._thread.start()

    def stop(self) -> None:
        """Before the function that it watches is called again, by another one's watchdog then."""
        self._over = True

    def beat(self) -> Beat | None:
        """Where the watched thread is now, and since when as far as was seen; None once it has left the function."""
        frame: FrameType | None = sys._current_frames().get(self._watched)
        where, line = [], 0
        while frame is not None:
            where.append((id(frame.f_code), frame.f_lasti))
            if frame.f_code is self.code:
                line = frame.f_lineno
            frame = frame.f_back
        if not line:
            return None
        section = next((name for first, name in reversed(self._sections) if line >= first), "start")
        step = self.state.step
        done = bytes_moved()
        seen = (step, tuple(where))
        if seen != self._seen or done - self._bytes > MOVING_BYTES:
            self._seen, self._stalled = seen, 0.0
        self._bytes = done
        if section == "start":
            step = 0
        elif line <= self._advance:
            step += 1
        slow = section in _SLOW or step <= self.first_step + 1
        limit = self.slow_seconds if slow else self.hang_seconds
        now = time.time()
        return Beat(self.rank, step, section, now - self._stalled, limit, now, self._host, os.getpid())

    def _run(self) -> None:
        before = time.monotonic()
        while not self._over and (mine := self.beat()) is not None:
            with contextlib.suppress(OSError):
                if status.is_home(self.run_dir):
                    write_beat(self.run_dir, mine)
            if before - self._armed > mine.limit / 10:
                # For a thread that never lets go of the interpreter: then this one does not run either.
                self._armed = before
                if sys.__stderr__ is not None:
                    faulthandler.dump_traceback_later(2 * self.slow_seconds, exit=False, file=sys.__stderr__)
            if self._stalled > mine.limit and not self._excused(mine):
                self._end(mine)
            time.sleep(self.interval)
            now = time.monotonic()
            # Not simply the clock: a process that was stopped and goes on (SIGSTOP, a laptop's lid) has not hung.
            self._stalled += min(now - before, 2 * self.interval)
            before = now
        faulthandler.cancel_dump_traceback_later()

    def _excused(self, mine: Beat) -> bool:
        """Whether a rank that this one may be waiting for is where it may be: in a slow validation, say."""
        now = time.time()
        return any(
            other.place < mine.place and now - other.progress < other.limit and now - other.written < _SILENT_SECONDS
            for other in read_beats(self.run_dir, self.ranks)
        )

    def _end(self, mine: Beat) -> NoReturn:
        path = self.run_dir / "stacks" / f"rank-{self.rank:05d}.txt"
        with contextlib.suppress(OSError):
            path = (status.home(self.run_dir) or self.run_dir) / "stacks" / path.name
            path.parent.mkdir(exist_ok=True)
            with path.open("w", encoding="utf-8") as file:
                print(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {mine.text(time.time())}\n", file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
                os.fsync(file.fileno())
        # The others are at the same point a moment later, and the launcher kills them as soon as one has ended.
        time.sleep(min(30.0, 2 * self.interval + mine.limit / 10))
        text = who_hangs(read_beats(self.run_dir, self.ranks), self.ranks) or mine.text(time.time())
        if self.rank == 0 or text.startswith(f"rank {self.rank} "):
            told = f"error: no progress for {_ago(self._stalled)}: {text}; stacks of all ranks: {path.parent}"
            print(told, file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            self.on_hang(self.run_dir, text)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(EXIT_HUNG)


def write_beat(run_dir: Path, beat: Beat) -> None:
    """In place and of one size: a reader on this machine never sees a part of it, and on others an old one at worst."""
    handle = os.open(_path(run_dir, beat.rank), os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(handle, (json.dumps(asdict(beat)).ljust(299) + "\n").encode(), 0)
    finally:
        os.close(handle)


def read_beats(run_dir: Path, ranks: int) -> list[Beat]:
    """Of all ranks that have told something; what cannot be read is left out."""
    beats = []
    for rank in range(ranks):
        with contextlib.suppress(OSError, ValueError, TypeError):
            beats.append(Beat(**json.loads(_path(run_dir, rank).read_text(encoding="utf-8"))))
    return beats


def who_hangs(beats: list[Beat], ranks: int) -> str:
    """ "rank 3 last seen in backward of step 812, 5 min ago", for those that are furthest behind; "" if nothing is known."""
    if not beats:
        return ""
    now = time.time()
    silent = [b for b in beats if now - b.written > _SILENT_SECONDS]
    last = min(b.place for b in beats)
    behind = silent or [b for b in beats if b.place == last]
    behind = sorted(behind, key=lambda b: b.progress)
    text = "; ".join(b.text(now) for b in behind[:8]) + (f"; and {len(behind) - 8} more" if len(behind) > 8 else "")
    others = [b for b in beats if b not in behind]
    if others:
        first = max(others, key=lambda b: b.place)
        text += f"; the other {len(others)} wait in {first.section} of step {first.step}"
    missing = ranks - len(beats)
    return text + (f"; nothing was heard of {missing} rank(s)" if missing else "")


def clear(run_dir: Path) -> None:
    """Before any rank of this start tells something: what an earlier one told must not be read."""
    for path in (run_dir / "heartbeat").glob("rank-*"):
        path.unlink(missing_ok=True)
    (run_dir / "heartbeat").mkdir(exist_ok=True)


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / "heartbeat" / f"rank-{rank:05d}"


def _sections(code: CodeType) -> tuple[list[tuple[int, str]], int]:
    """[(first line, section)], from the comments of the loop that begin with a number: "# 3. backward: ..."; and the line from
    which on state.step counts the running step."""
    found, advance = [], 0
    for line in range(code.co_firstlineno, max((n for *_, n in code.co_lines() if n), default=0) + 1):
        text = linecache.getline(code.co_filename, line)
        if match := re.match(r"\s*# \d\. (\w+)", text):
            found.append((line, match[1]))
        advance = line if "state.advance(" in text else advance
    return found, advance


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
