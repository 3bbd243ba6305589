"""A rank that hangs is named and ends the run; one that dies ends the others; torchrun's restart goes on from the checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kamui_dist import watchdog
from kamui_dist.errors import EXIT_HUNG
from kamui_dist.knobs import Run
from kamui_dist.state import State
from kamui_dist.watchdog import Beat, Watchdog, read_beats, who_hangs, write_beat
from tests import tiny

ROOT = Path(__file__).parent.parent

# The trainer, and a fault: rank FAULT_RANK hangs or dies when it asks for the batch of update FAULT_AT, in torchrun's first try.
FAULTY = """
import os, signal, sys, time
from kamui_dist import command_line
COMMAND = command_line.begin(sys.argv[1:])
from torch.distributed.elastic.multiprocessing.errors import record
from kamui_dist import train
from kamui_dist.data import Loader

class Faulty(Loader):
    updates = 0
    def next(self):
        self.updates += 1
        here = os.environ["RANK"] == os.environ["FAULT_RANK"] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if here and self.updates == int(os.environ["FAULT_AT"]):
            if os.environ["FAULT"] == "hang":
                time.sleep(1e6)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().next()

train.COMMAND, train.Loader = COMMAND, Faulty
sys.exit(record(train.main)())
"""


def faulty(base: Path, *, restarts: int = 0, fault: tuple[str, int, int], **overrides: Any) -> tuple[int, str, float]:
    """Exit code, output and seconds of a 2-rank torchrun of FAULTY; `fault`: (what, rank, update)."""
    data = tiny.write_data(base / "data")
    config = tiny.write_toml(base / "c.toml", tiny.config(base / "run", data, **overrides))
    (base / "faulty.py").write_text(FAULTY)
    what, rank, at = fault
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}",
         str(base / "faulty.py"), str(config)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
             "FAULT": what, "FAULT_RANK": str(rank), "FAULT_AT": str(at)},
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200,
    )  # fmt: skip
    return done.returncode, done.stdout, time.monotonic() - began


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:  # I12
    code, out, seconds = faulty(
        tmp_path, fault=("hang", 1, 3), run__hang_minutes=0.1, run__timeout_minutes=1.0, train__steps=1000
    )
    assert code != 0, out
    assert "rank 1 last seen in batch of step 3" in out, out
    assert seconds < 120
    status = tiny.status(tmp_path / "run")
    assert (status["outcome"], status["requeue"], status["exit_code"]) == ("failed", True, EXIT_HUNG)
    assert "rank 1 last seen in batch of step 3" in status["reason"]
    stacks = (tmp_path / "run/stacks/rank-00001.txt").read_text()
    assert "faulty.py" in stacks
    assert " in train" in stacks


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others_and_the_restart_goes_on(tmp_path: Path) -> None:
    undisturbed = tiny.config(
        tmp_path / "whole", tiny.write_data(tmp_path / "data"), train__steps=8, checkpoint__every=2
    )
    code, out, seconds = faulty(
        tmp_path, restarts=2, fault=("kill", 1, 6), train__steps=8, checkpoint__every=2, run__hang_minutes=9.0
    )
    assert code == 0, out
    assert seconds < 270  # nowhere near hang_minutes, on a busy machine too
    # Ranks tell once a second where they are; here all moved until the end, so nobody need be named.
    assert "rank 0 failed" in out
    resumes = tiny.records(tmp_path / "run", "resume")
    assert [(r["step"], r["restarts"]) for r in resumes] == [(4, 1)]
    assert tiny.status(tmp_path / "run")["restarts"] == 1
    assert [r["step"] for r in tiny.records(tmp_path / "run")] == list(range(1, 9))
    assert tiny.run(undisturbed) == 0  # one process: the same to rounding
    assert tiny.distance(tiny.weights(tmp_path / "run"), tiny.weights(tmp_path / "whole")) < 1e-5


# ---- in this process


def beat(rank: int, step: int, section: str, ago: float, **more: Any) -> Beat:
    now = time.time()
    return Beat(**{"rank": rank, "step": step, "section": section, "progress": now - ago, "limit": 300.0, "written": now,
                   "host": f"node{rank}", "pid": 10 + rank, **more})  # fmt: skip


def test_the_report_names_who_is_furthest_behind() -> None:
    waiting = [beat(r, 812, "update", 299) for r in (0, 1, 2)]
    assert who_hangs([*waiting, beat(3, 812, "backward", 301)], 4) == (
        "rank 3 last seen in backward of step 812, 5 min ago; the other 3 wait in update of step 812"
    )
    assert who_hangs([beat(1, 0, "start", 30), beat(0, 1, "batch", 20)], 2) == (
        "rank 1 last seen in start-up, 30 s ago; the other 1 wait in batch of step 1"
    )
    # a process that answers no more is the one, however far it got
    gone = beat(2, 812, "log", 400, written=time.time() - 180)
    assert who_hangs([*waiting[:2], gone], 4) == (
        "rank 2 last seen in log of step 812, 7 min ago; process 12 on node2 has not answered for 3 min; the other 2 wait in "
        "update of step 812; nothing was heard of 1 rank(s)"
    )
    assert who_hangs([beat(r, 5, "forward", 60) for r in range(100)], 100).endswith("; and 92 more")
    assert who_hangs([], 4) == ""


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    watchdog.clear(tmp_path)
    written = beat(1, 12, "checkpoint", 3)
    write_beat(tmp_path, written)
    write_beat(tmp_path, beat(2, 1, "log", 3))
    (tmp_path / "heartbeat/rank-00000").write_text("")
    (tmp_path / "heartbeat/rank-00002").write_text("[]")
    assert read_beats(tmp_path, 4) == [written]
    watchdog.clear(tmp_path)
    assert read_beats(tmp_path, 4) == []


class Stage:
    """Lets a thread stand at places of a loop like the trainer's, one after the other."""

    def __init__(self, run_dir: Path, run: Run, **more: Any) -> None:
        self.state, self.turn, self.there = State(), threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self.loop, args=(run_dir, run, more), daemon=True)
        self.thread.start()
        self.there.acquire()

    def wait(self) -> None:
        self.there.release()
        self.turn.acquire()

    def go(self) -> None:
        self.turn.release()
        self.there.acquire()
        time.sleep(0.05)  # until it stands there

    def advance(self, _: Any = None) -> None:
        self.state.step += 1

    def loop(self, run_dir: Path, run: Run, more: dict[str, Any]) -> None:
        rank, ranks = more.get("rank", 0), more.get("ranks", 2)
        self.dog = Watchdog(run_dir, run, rank, ranks, self.state, more.get("on_hang", lambda *_: None))
        state = self
        self.wait()
        for _ in range(2):
            # 1. batch: as in train.py
            self.wait()
            # 2. forward + loss: more words
            self.wait()
            # 4. update
            self.wait()
            state.advance(None)
            self.wait()
            # 7. checkpoint: every rank
            self.wait()
        self.there.release()


def test_sections_and_steps_are_read_off_the_loop(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Run(hang_minutes=1.0, timeout_minutes=2.0))
    seen = []
    for _ in range(11):
        found = stage.dog.beat()
        assert found is not None
        seen.append((found.step, found.section, found.limit))
        stage.go()
    # The first step is a slow one, as are checkpoints always.
    assert seen == [
        (0, "start", 120.0), (1, "batch", 120.0), (1, "forward", 120.0), (1, "update", 120.0), (1, "update", 120.0),
        (1, "checkpoint", 120.0), (2, "batch", 60.0), (2, "forward", 60.0), (2, "update", 60.0), (2, "update", 60.0),
        (2, "checkpoint", 120.0),
    ]  # fmt: skip
    stage.thread.join()
    assert stage.dog.beat() is None, "it has left the loop: so does the watchdog"


def test_it_waits_for_a_rank_that_may_take_longer(tmp_path: Path) -> None:
    """Rank 0 deletes old checkpoints, the others wait for it in the next step: nobody hangs."""
    watchdog.clear(tmp_path)
    stage = Stage(tmp_path, Run(hang_minutes=1.0, timeout_minutes=20.0))
    mine = beat(1, 812, "backward", 400)
    for other, excused in (
        (beat(0, 811, "checkpoint", 390, limit=1200.0), True),
        (beat(0, 811, "checkpoint", 1300, limit=1200.0), False),
        (beat(0, 811, "checkpoint", 390, limit=1200.0, written=time.time() - 100), False),  # it is gone
        (beat(0, 812, "backward", 10), False),  # it is where we are
        (beat(0, 812, "forward", 10), True),  # slow, but it moves
    ):
        write_beat(tmp_path, other)
        assert stage.dog._excused(mine) == excused, other


def test_breakpoints_do_not_hang(tmp_path: Path) -> None:
    for run, ranks, enabled in ((Run(debug=True), 2, False), (Run(), 2, True)):
        assert Watchdog(tmp_path, run, 0, ranks, State(), lambda *_: None).enabled == enabled


def test_the_packed_line_of_a_heartbeat_is_of_one_size(tmp_path: Path) -> None:
    watchdog.clear(tmp_path)
    for step in (1, 10**9):
        write_beat(tmp_path, beat(3, step, "checkpoint", 1.0, host="h" * 64))
        line = (tmp_path / "heartbeat/rank-00003").read_text()
        assert len(line) == 300
        assert json.loads(line)["step"] == step
