"""Stop requests, in real processes: a handler only sets a flag, and whatever asks for a stop is heard."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kamui_dist import distributed, job, validation
from kamui_dist.errors import EXIT_FINISHED, EXIT_STOPPED
from kamui_dist.exchange import Exchange
from kamui_dist.signals import REASONS, Pace, StopRequest
from tests import stop_many, tiny
from tests.ranks import run_ranks

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
    stop.stop_file.mkdir()  # no such file
    assert stop.poll() == 0
    stop.stop_file.rmdir()
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


# ---- deadlines


def test_the_end_of_the_job() -> None:
    stop = StopRequest()
    stop.end_time = time.time() + 3600
    assert stop.poll(margin_seconds=3000.0) == 0
    assert REASONS[stop.poll(margin_seconds=3601.0)] == "end of the job"


def test_the_margin_is_what_would_pass_before_all_is_saved() -> None:
    last = [0.0]
    pace = Pace(eval_every=10, save_every=4, guess=20.0, saved=lambda: last[0])
    assert pace.save == 32.0  # a guess: 1.5 saves and 2 s to leave
    pace.step(500.0)  # compiles
    assert pace.margin(2, 1.0) == pace.save, "what the first step took says nothing"
    pace.step(1.0)
    pace.step(3.0)
    last[0] = 10.0
    assert pace.save == 17.0
    assert pace.margin(5, 0.1) == 2 * 3.0 + 17.0
    assert pace.margin(5, 8.0) == 2 * 8.0 + 17.0, "this step is slower than all before"
    assert pace.margin(8, 0.1) == 2 * 3.0 + 10.0 + 17.0, "a save is due before the next look at the clock"
    pace.evaluation(60.0)
    assert pace.margin(10, 0.1) == 2 * 3.0 + 60.0 + 17.0
    assert pace.margin(20, 0.1) == 2 * 3.0 + 70.0 + 17.0
    last[0] = 5.0
    assert pace.save == 17.0, "the largest of the last few"
    for seconds in (5.5, 5.0):
        last[0] = seconds
        _ = pace.save
    assert pace.save == 1.5 * 5.5 + 2.0
    for _ in range(20):
        pace.step(2.0)
    assert pace.margin(5, 0.1) == 2 * 2.0 + 1.5 * 5.5 + 2.0


def test_slurm_tells_when_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    assert job.end_time() is None  # no job
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert job.end_time() is None  # E08
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "the end of job 4711 is not known: there is no scontrol here" in told

    def scontrol(script: str) -> None:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "scontrol").chmod(0o755)

    line = (
        "echo '   RunTime=00:00:02 TimeLimit=00:02:00'; echo '   StartTime=2030-01-01T00:00:00 EndTime={} Deadline=N/A'"
    )
    scontrol('test "$*" = "show job 4711" || exit 1; ' + line.format("2030-01-01T00:02:00"))
    assert job.end_time() == 1893456120.0
    scontrol(line.format("Unknown"))
    assert job.end_time() is None  # a job without a limit
    assert capsys.readouterr().err == ""
    scontrol("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    assert job.end_time() is None
    assert "Unable to contact slurm controller" in capsys.readouterr().err
    monkeypatch.setattr(job, "_PATIENCE_SECONDS", 0.2)
    scontrol("exec /bin/sleep 60")
    assert job.end_time() is None
    assert "does not answer" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1893456000")
    assert job.end_time() == 1893456000.0  # nobody is asked


# ---- the loop


def exchanged(asked_at: int) -> list[int]:
    """After which batches the ranks meet, and when they are told, if rank 1 hears something during batch `asked_at`."""
    done = [0]
    heard = StopRequest()
    exchange = Exchange(heard.poll, distributed.choose_device("cpu"))
    for done[0] in range(1, 201):
        time.sleep(0.001 * (1 + distributed.rank()))
        if distributed.rank() == 1 and done[0] == asked_at:
            heard.code = REASONS.index("SIGTERM")
        if asked := exchange.after_batch():
            return [done[0], asked]
    return [done[0], 0]


def during_validation(base: Path, data: Path) -> list[Any]:
    """A signal to rank 1 during a validation, then the run to its end; and one that was not disturbed."""
    args: dict[str, Any] = {"data__val_path": str(data), "eval__every": 2, "eval__batches": 0, "train__micro_batch": 1}
    whole = tiny.run_and_trace(tiny.config(base / "whole", data, **args))[0]
    batches, read = validation.evaluation_batches, [0]

    def disturbed(*args: Any, **more: Any) -> Iterator[Any]:
        for batch in batches(*args, **more):
            read[0] += 1
            if read[0] == 2 and distributed.rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            yield batch

    validation.evaluation_batches = disturbed
    code = tiny.run_and_trace(tiny.config(base / "cut", data, **args))[0]
    distributed.barrier()  # until rank 0 has written it
    status, there = tiny.status(base / "cut"), read[0]
    validation.evaluation_batches = batches
    distributed.barrier()
    # The last one is cut too: the run is not finished before it has its last validation.
    again = tiny.run_and_trace(tiny.config(base / "cut", data, **args), tiny.signalling(3, signal.SIGTERM, only_rank=0))
    distributed.barrier()
    last = tiny.status(base / "cut")
    distributed.barrier()
    return [whole, code, status["step"], there, again[0], last["outcome"], tiny.run(tiny.config(base / "cut", data, **args)),
            [exchanged(at) for at in (1, 5, 1000)]]  # fmt: skip


@pytest.mark.slow
def test_a_stop_cuts_a_validation_short_on_all_ranks_alike(tmp_path: Path) -> None:
    data = tiny.write_data(tmp_path / "data", windows=64)
    first, second = run_ranks(during_validation, 2, tmp_path, data)
    assert first == second, "codes, and batches read"
    whole, code, step, read, again, last, finished, exchanges = first
    assert (whole, code, step, again, last, finished) == (0, EXIT_STOPPED, 2, EXIT_STOPPED, "stopped", EXIT_FINISHED)
    assert 2 <= read < 20, "of 32 batches a rank"
    for kind in ("step", "eval"):
        assert tiny.records(tmp_path / "cut", kind) == tiny.records(tmp_path / "whole", kind)
    assert tiny.same(tiny.weights(tmp_path / "cut", prefix=""), tiny.weights(tmp_path / "whole", prefix=""))
    assert exchanges[0] == [1, REASONS.index("SIGTERM")]
    assert 5 <= exchanges[1][0] <= 15
    assert exchanges[2] == [200, 0]


@pytest.mark.slow
def test_all_ranks_stop_after_the_same_step_whenever_and_however_they_are_asked(tmp_path: Path) -> None:
    """`python -m tests.stop_many` does it 20 times."""
    data = tiny.write_data(tmp_path / "data", windows=4096)
    lines = stop_many.check(tmp_path, run_ranks(stop_many.many, 2, tmp_path, data, 4, 1), timed=False)
    assert len(lines) == 4


@pytest.mark.slow
def test_a_request_before_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = tiny.write_data(tmp_path / "data"), tmp_path / "run"
    for steps in (0, 0):  # and again: nothing of the first try is in the way
        stop = StopRequest()
        stop.code = REASONS.index("SIGTERM")  # while torch was imported, say
        assert tiny.run(tiny.config(run, data), stop) == EXIT_STOPPED
        status = tiny.status(run)
        assert (status["outcome"], status["step"], status["requeue"]) == ("stopped", steps, True)
        assert "stopped before the first step (SIGTERM)" in capsys.readouterr().out
        assert tiny.steps_saved(run) == []
    assert tiny.run(tiny.config(run, data)) == 0
    assert len(tiny.records(run)) == 5
    # After a resume there is nothing new to save, either.
    longer = tiny.config(run, data, train__steps=7)
    stop = StopRequest()
    stop.end_time = time.time() - 1
    assert tiny.run(longer, stop) == EXIT_STOPPED
    assert tiny.status(run)["reason"] == "end of the job"
    assert tiny.steps_saved(run) == [5]
    assert tiny.run(longer) == 0
    assert tiny.steps_saved(run) == [5, 7]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_commands_end_in_order(tmp_path: Path, number: signal.Signals) -> None:
    """prepare leaves nothing half-written behind."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text/0.txt").write_text("It is a truth universally acknowledged. " * 20_000)
    for i in range(1, 5000):  # 4 GB, which take a while
        os.link(tmp_path / "text/0.txt", tmp_path / f"text/{i}.txt")
    process = subprocess.Popen(
        [sys.executable, "-m", "kamui_dist.cli", "prepare", "text", "--tokenizer", "bytes", "--out", "out", "--workers", "1"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    tiny.wait_for(lambda: [p for p in tmp_path.glob(".*/**/*") if p.is_file()], process, seconds=60, pause=0.005)
    for _ in range(3):
        process.send_signal(number)
    told = process.communicate(timeout=30)[1]
    assert process.returncode == 128 + number
    assert f"ended by {number.name}" in told
    assert "Traceback" not in told
    assert [p.name for p in tmp_path.iterdir()] == ["text"]


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["python", "local.sh", "head", "closed"])
def test_nobody_reads_any_more(tmp_path: Path, launch: str) -> None:
    """A terminal that is closed is a request to stop, with a checkpoint; a reader that goes away or never was is nothing."""
    data = tiny.write_data(tmp_path / "data", windows=512)
    steps = 10**6 if launch in ("python", "local.sh") else 40
    cfg = tiny.config(tmp_path / "run", data, train__steps=steps, log__every=1)
    config = tiny.write_toml(tmp_path / "c.toml", cfg)
    words = [sys.executable, "-m", "kamui_dist.train", str(config)]
    env = {**os.environ, "ENV_DIR": sys.prefix, "NPROC": "2"}
    if launch == "local.sh":
        words = [str(ROOT / "launch" / "local.sh"), str(config)]
    if launch in ("head", "closed"):
        after = "| head -2" if launch == "head" else ">&-"
        told = subprocess.run(
            ["bash", "-o", "pipefail", "-c", f'"$@" {after}', "-", *words], cwd=ROOT, env=env, timeout=120
        )
        assert told.returncode == 0
        assert tiny.status(tmp_path / "run")["outcome"] == "finished"
        return
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvpe(words[0], words, env)
    try:
        seen = b""
        while b" 12/1000000 " not in seen:
            seen += os.read(terminal, 4096)
    finally:
        os.close(terminal)
    os.waitpid(pid, 0)
    status = tiny.status(tmp_path / "run")
    assert (status["outcome"], status["exit_code"]) == ("stopped", 75), status
    assert tiny.steps_saved(tmp_path / "run") == [status["step"]]
