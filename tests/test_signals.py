"""Stop requests, in real processes: a handler only sets a flag, and whatever asks for a stop is heard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kamui_dist.signals import REASONS, StopRequest

ROOT = Path(__file__).parent.parent

# Says what it has heard whenever it is asked by a line on stdin; ends with 75, or with 130 on KeyboardInterrupt.
CHILD = """
import sys
from kamui_dist.signals import REASONS, StopRequest
assert "torch" not in sys.modules
stop = StopRequest().install()
print("ready", flush=True)
try:
    for line in sys.stdin:
        print(REASONS[stop.poll()] or "nothing", flush=True)
    sys.exit(75)
except KeyboardInterrupt:
    sys.exit(130)
"""


class Child:
    def __init__(self, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=ROOT, **options,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def ask(self) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def ask_until(self, reason: str) -> None:
        """A signal that was sent is handled soon, not at once."""
        end = time.monotonic() + 10
        while (heard := self.ask()) != reason:
            assert heard == "nothing", heard
            assert time.monotonic() < end, f"{reason} was not heard"

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(10)


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    children = []

    def make(**options: Any) -> Child:
        children.append(Child(**options))
        return children[-1]

    yield make
    for child in children:
        child.process.kill()
        child.process.wait()
        for pipe in (child.process.stdin, child.process.stdout, child.process.stderr):
            assert pipe is not None
            pipe.close()


def test_every_signal_is_heard_and_only_sets_a_flag(start: Callable[..., Child]) -> None:
    child = start()
    assert child.ask() == "nothing"
    # The highest reason wins, so each of them shows.
    for name in ("SIGHUP", "SIGUSR2", "SIGUSR1", "SIGTERM", "SIGINT"):
        end = time.monotonic() + 10
        child.process.send_signal(signal.Signals[name])
        while child.ask() != name:
            assert time.monotonic() < end, f"{name} was not heard"
    for _ in range(30):  # E06
        child.process.send_signal(signal.SIGTERM)
    assert child.ask() == "SIGINT", "and it stays heard"
    assert child.end() == 75, "no signal ended the process"


def test_what_is_ignored_by_inheritance(start: Callable[..., Child]) -> None:
    """Our launchers ignore SIGUSR1 for torchrun's sake, and workers inherit that; nohup ignores SIGHUP and means it."""
    before = [signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGHUP)]
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        child = start()
    finally:
        signal.signal(signal.SIGUSR1, before[0])
        signal.signal(signal.SIGHUP, before[1])
    child.process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    assert child.ask() == "nothing"
    child.process.send_signal(signal.SIGUSR1)
    child.ask_until("SIGUSR1")
    assert child.end() == 75


def test_interrupts_within_a_second_are_one(start: Callable[..., Child]) -> None:
    child = start()
    for _ in range(3):  # as a terminal and torchrun pass on one Ctrl-C
        child.process.send_signal(signal.SIGINT)
        child.ask_until("SIGINT")
    assert child.end() == 75


def test_a_second_interrupt_means_now(start: Callable[..., Child]) -> None:
    child = start()
    child.process.send_signal(signal.SIGINT)
    child.ask_until("SIGINT")
    time.sleep(1.2)
    assert child.ask() == "SIGINT"
    child.process.send_signal(signal.SIGINT)
    assert child.process.wait(10) == 130


def test_time_limit() -> None:
    stop = StopRequest()
    assert stop.poll(margin_seconds=1e9) == 0, "no limit"
    stop.limit_seconds = 3600.0
    assert stop.poll() == 0
    assert stop.poll(margin_seconds=3000.0) == 0
    assert REASONS[stop.poll(margin_seconds=3600.0)] == "time limit", "one more step and a save would be too late"
    assert REASONS[stop.poll()] == "time limit"
    stop = StopRequest()
    stop.limit_seconds = 0.05
    time.sleep(0.1)
    assert REASONS[stop.poll()] == "time limit"


def test_stop_file(tmp_path: Path) -> None:
    stop = StopRequest()
    stop.stop_file = tmp_path / "STOP"
    assert stop.poll() == 0
    stop.stop_file.touch()
    end = time.monotonic() + 10
    while not stop.poll():
        assert time.monotonic() < end, "the file was not seen"
        time.sleep(0.05)
    assert REASONS[stop.poll()] == "file STOP"
    assert not stop.stop_file.exists(), "heard: it must not stop the run again when it is resumed"


def test_a_dead_launcher_is_noticed(tmp_path: Path) -> None:
    """torchrun killed with SIGKILL tells its workers nothing."""
    heard = tmp_path / "heard"
    orphan = (
        "import sys, time\nfrom pathlib import Path\nfrom kamui_dist.signals import REASONS, StopRequest\n"
        "stop = StopRequest().install()\nassert stop.poll() == 0\nprint('ready', flush=True)\n"
        "end = time.monotonic() + 30\n"
        "while not stop.poll() and time.monotonic() < end:\n    time.sleep(0.02)\n"
        f"path = Path({str(heard)!r})\npath.with_suffix('.tmp').write_text(REASONS[stop.poll()])\n"
        "path.with_suffix('.tmp').rename(path)\n"
    )
    launcher = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv[1]])\n"
    process = subprocess.Popen([sys.executable, "-c", launcher, orphan], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.wait()
    process.stdout.close()
    end = time.monotonic() + 20
    while not heard.exists():
        assert time.monotonic() < end, "the orphan did not notice"
        time.sleep(0.02)
    assert heard.read_text() == "the launcher is gone"


def test_reasons_travel_as_numbers() -> None:
    """The index goes through the packed reduction; the highest wins, and a person's Ctrl-C is the highest."""
    assert REASONS[0] == ""
    assert len(set(REASONS)) == len(REASONS)
    assert REASONS.index("SIGINT") == max(range(len(REASONS)))
    assert os.getppid() == StopRequest()._parent
