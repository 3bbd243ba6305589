"""One writer to a run directory: a second start is refused and says by whom, and nothing that is dead keeps a run from going on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kamui_dist import lock
from kamui_dist.errors import UserError
from kamui_dist.lock import Lock
from tests import tiny

ROOT = Path(__file__).parent.parent

HOLDER = """
import sys, time
from pathlib import Path
from kamui_dist import lock
assert "torch" not in sys.modules
lock.TOUCH_SECONDS = 0.1
held = lock.Lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
held.release()
"""


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Another process that holds the lock of tmp_path, until a line is written to it."""
    children: list[subprocess.Popen[str]] = []

    def make(**env: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.PIPE, cwd=ROOT, env={**os.environ, **env},
        )  # fmt: skip
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        return child

    yield make
    for child in children:
        child.kill()
        child.communicate()


def change(run_dir: Path, **values: Any) -> None:
    path = run_dir / "lock.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.slow
def test_a_second_start_is_told_who_holds_it(tmp_path: Path, hold: Callable[..., subprocess.Popen[str]]) -> None:
    child = hold(SLURM_JOB_ID="4711")
    for again in range(2):
        with pytest.raises(
            UserError, match=rf"is in use by process {child.pid} on .*, job 4711, since 20\d\d-"
        ) as caught:
            Lock(tmp_path)
        assert str(tmp_path) in str(caught.value)
        assert "\n" not in str(caught.value)
        with pytest.raises(UserError, match=f"process {child.pid}"):
            lock.refuse_if_held(tmp_path)
        if not again:
            child.send_signal(signal.SIGSTOP)  # it does not answer, but it lives
            time.sleep(0.3)
    child.send_signal(signal.SIGCONT)
    child.communicate("\n", timeout=10)
    assert child.returncode == 0
    assert not (tmp_path / "lock.json").exists()
    lock.refuse_if_held(tmp_path)
    Lock(tmp_path).release()


def test_a_killed_holder_is_in_nobodys_way(tmp_path: Path, hold: Callable[..., subprocess.Popen[str]]) -> None:
    child = hold()
    child.kill()
    began = time.monotonic()
    mine = Lock(tmp_path)  # also while its parent has not waited for it
    assert time.monotonic() - began < 5
    assert json.loads((tmp_path / "lock.json").read_text())["pid"] == os.getpid()
    mine.release()


def test_a_process_number_that_is_used_again(tmp_path: Path, hold: Callable[..., subprocess.Popen[str]]) -> None:
    child = hold()
    child.kill()
    child.wait()
    change(tmp_path, pid=os.getppid(), process_started=1)
    lock.refuse_if_held(tmp_path)
    Lock(tmp_path).release()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock that a process of another machine has left or holds, on a file system whose locks do not reach that far."""
    monkeypatch.setattr(lock, "TOUCH_SECONDS", 0.1)
    monkeypatch.setattr(lock, "STALE_SECONDS", 1.0)
    held = Lock(tmp_path)
    held.released.set()
    held.thread.join()
    os.close(held.handle)
    change(tmp_path, machine="another", host="node7", pid=1)
    return tmp_path


@pytest.mark.slow
def test_another_machine_that_lives(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(0.2):
            os.utime(elsewhere / "lock.json")

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        with pytest.raises(UserError, match="in use by process 1 on node7"):
            Lock(elsewhere)
    finally:
        ended.set()
        thread.join()
    assert "to see whether it lives" in capsys.readouterr().err


def test_another_machine_that_is_gone(elsewhere: Path) -> None:
    Lock(elsewhere).release()  # after STALE_SECONDS without a sign of life
    assert not (elsewhere / "lock.json").exists()


def test_a_clock_that_was_ahead_blocks_nobody_for_long(elsewhere: Path) -> None:
    os.utime(elsewhere / "lock.json", (4e9, 4e9))
    began = time.monotonic()
    Lock(elsewhere).release()
    assert time.monotonic() - began >= lock.STALE_SECONDS, "it could have lived"


def test_a_holder_whose_clock_was_ahead_is_seen_to_live(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(elsewhere / "lock.json", (4e9, 4e9))
    monkeypatch.setattr(time, "sleep", lambda _: os.utime(elsewhere / "lock.json"))
    monkeypatch.setattr(lock, "DYING_SECONDS", -1.0)
    with pytest.raises(UserError, match="in use by process 1 on node7"):
        Lock(elsewhere)


def test_restarts_do_not_lock_themselves_out(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "STALE_SECONDS", 1e9)
    change(elsewhere, torchrun="abc")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
    Lock(elsewhere).release()


def test_a_requeued_job_does_not_wait_for_itself(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "STALE_SECONDS", 1e9)
    change(elsewhere, job="4711", requeued=0)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    Lock(elsewhere).release()


@pytest.mark.slow
def test_without_locks_in_the_file_system(
    tmp_path: Path, hold: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_lock", lambda handle: None)
    child = hold()
    with pytest.raises(UserError, match=f"process {child.pid}"):
        Lock(tmp_path)
    child.kill()
    Lock(tmp_path).release()


def test_a_holder_that_was_taken_for_dead_ends(tmp_path: Path, hold: Callable[..., subprocess.Popen[str]]) -> None:
    child = hold()
    change(tmp_path, token="another", pid=1, host="node7")
    assert child.wait(10) == 1
    assert child.stderr is not None
    assert "in use by process 1 on node7" in child.stderr.read()


@pytest.mark.slow
def test_a_copy_of_a_live_run_can_be_started(
    tmp_path: Path, hold: Callable[..., subprocess.Popen[str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    child = hold()
    copy = tmp_path_factory.mktemp("of") / "copy"
    shutil.copytree(tmp_path, copy)
    assert json.loads((copy / "lock.json").read_text())["pid"] == child.pid
    lock.refuse_if_held(copy)
    assert not lock.held_by_other(copy)
    mine = Lock(copy)
    with pytest.raises(UserError, match=f"process {child.pid}"):
        Lock(tmp_path)
    mine.release()


def test_without_its_file_the_directory_is_held_all_the_same(
    tmp_path: Path, hold: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody took .lock for one that was left behind."""
    monkeypatch.setattr(lock, "DYING_SECONDS", 0.0)
    child = hold()
    (tmp_path / ".lock").unlink()
    for _ in range(2):
        with pytest.raises(UserError, match=f"process {child.pid}"):
            Lock(tmp_path)  # makes the file anew, and has the kernel's lock on it
    moved = tmp_path.with_name("moved-from-here")
    tmp_path.rename(moved)
    with pytest.raises(UserError, match=f"process {child.pid}"):
        Lock(moved)
    moved.rename(tmp_path)


def test_a_copy_of_a_run_of_before_there_was_an_identity(
    tmp_path: Path, hold: Callable[..., subprocess.Popen[str]], tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(lock, "DYING_SECONDS", 0.0)
    child = hold()
    copy = tmp_path_factory.mktemp("of") / "copy"
    shutil.copytree(tmp_path, copy)
    change(copy, directory=None)
    with pytest.raises(UserError, match=f"process {child.pid}"):
        Lock(copy)


def test_a_damaged_file_is_no_lock(tmp_path: Path) -> None:
    for text in ("", "[]", '{"pid": "x"}', "\0"):
        (tmp_path / "lock.json").write_text(text)
        if text.startswith("{"):
            change(tmp_path, machine=lock._machine())
        Lock(tmp_path).release()


@pytest.mark.slow
def test_a_double_submission_leaves_the_run_alone(tmp_path: Path) -> None:
    """The real trainer, in the middle of a run; it would also have tidied away an unfinished checkpoint."""
    data = tiny.write_data(tmp_path / "data", windows=128, sentinels=tuple(range(128)))
    trap: dict[str, Any] = {"model__factory": "tests.tiny:trap", "model__factory_args": {"trap": "sleep"}}
    config = tiny.write_toml(tmp_path / "c.toml", tiny.config(tmp_path / "run", data, **trap))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "kamui_dist.train", str(config)]
    first = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        tiny.wait_for((tmp_path / "run/status.json").exists, first)
        unfinished = tmp_path / "run/checkpoints/.tmp-step-00000001"
        unfinished.mkdir()
        before = {
            name: (tmp_path / "run" / name).read_bytes() for name in ("status.json", "metrics.jsonl", "lock.json")
        }
        seconds = [
            subprocess.Popen(
                [*command, *more], env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            for more in ([], ["--check"])
        ]
        for second in seconds:
            told = second.communicate(timeout=120)[1]
            assert second.returncode == 2, told
            assert told.count("\n") == 1
            assert f"in use by process {first.pid}" in told
        assert unfinished.exists()
        assert before == {name: (tmp_path / "run" / name).read_bytes() for name in before}
    finally:
        first.kill()
        first.wait()
    third = subprocess.run([*command, "--check"], env=env, cwd=ROOT, capture_output=True, text=True)
    assert third.returncode == 0, third.stderr
