"""status.json: whole at any moment, told on a full disk too, and by the first who has something to tell."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kamui_dist import status
from kamui_dist.errors import EXIT_USER_ERROR
from tests import tiny
from tests.ranks import HEAVY
from tests.test_checkpoint_chain import fill, small_disk

ROOT = Path(__file__).parent.parent


def read(run: Path) -> dict[str, Any]:
    return json.loads((run / "status.json").read_text())


def test_the_same_with_and_without_the_spare(tmp_path: Path) -> None:
    status.write(tmp_path, "running", 0, "", None, False)
    assert (tmp_path / status.SPARE).stat().st_size == 4096
    for step in (1, 2):
        status.write(
            tmp_path, "failed", step, "é" * 3000 if step == 1 else "x", 1, True
        )  # longer than the spare, then shorter
        assert read(tmp_path)["step"] == status.step(tmp_path) == step
    for left in (".status.json.host.99", f"{status.SPARE}.host.99"):
        (tmp_path / left).touch()  # by a killed process
    status.reserve(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [status.SPARE, "status.json"]


def test_who_has_told(tmp_path: Path) -> None:
    assert not status.told(tmp_path)
    for outcome, told in (("running", False), ("failed", True), ("stopped", True), ("finished", True)):
        status.write(tmp_path, outcome, 3, "", None, False)
        assert status.told(tmp_path) == told
    os.utime(tmp_path / "status.json", (1e9, 1e9))
    assert not status.told(tmp_path), "that was another start"
    (tmp_path / "status.json").write_text("[]")
    assert (status.told(tmp_path), status.step(tmp_path)) == (False, 0)


def test_a_clock_that_is_ahead_hides_no_failed_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_found", None)
    status.write(tmp_path, "stopped", 3, "", None, False)
    os.utime(tmp_path / "status.json", (4e9, 4e9))  # the file server's
    assert status.told(tmp_path), "nobody knows better yet"
    status.remember(tmp_path)
    assert not status.told(tmp_path), "it was there before"
    status.write(tmp_path, "failed", 3, "", None, False)
    os.utime(tmp_path / "status.json", (1e9, 1e9))  # and one that is behind
    assert status.told(tmp_path)
    new = tmp_path / "new"
    new.mkdir()
    status.remember(new)
    assert not status.told(new)
    status.write(new, "failed", 0, "", None, False)
    assert status.told(new)


def _write_many(run: Path, name: str) -> None:
    for step in range(300):
        status.write(run, name, step, name * (step % 50), None, False)


@pytest.mark.slow
def test_several_ranks_at_once(tmp_path: Path) -> None:
    """A reader never finds a part of one, or of two."""
    status.write(tmp_path, "running", 0, "", None, False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(HEAVY)
    ranks = [context.Process(target=_write_many, args=(tmp_path, name)) for name in ("failed", "stopped")]
    for rank in ranks:
        rank.start()
    while any(rank.is_alive() for rank in ranks):
        found = read(tmp_path)
        assert found["reason"] == found["outcome"] * (found["step"] % 50) or found["outcome"] == "running"
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0


def test_a_spare_in_the_making_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            monkeypatch.undo()
            status.write(tmp_path, "failed", 2, "another rank", 1, True)
            return file.write(data)

    status.write(tmp_path, "running", 0, "", None, False)
    monkeypatch.setattr(Path, "write_bytes", slowly)
    status.write(tmp_path, "failed", 1, "this rank", 1, True)
    assert read(tmp_path)["step"] == 2


def test_a_full_disk_takes_it(tmp_path: Path) -> None:
    with small_disk("size=1m") as disk:
        status.reserve(disk)
        status.write(disk, "running", 5, "", None, False)
        fill(disk)
        for step in range(6, 10):
            status.write(disk, "failed", step, "the disk is full", 1, True)
            assert read(disk)["step"] == step
        with pytest.raises(OSError, match="No space left"):
            (disk / "other").write_bytes(bytes(4096))


def command(config: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "kamui_dist.train", str(config), *words]


@pytest.mark.slow
def test_a_start_on_a_full_disk_says_what_to_free() -> None:
    with small_disk("size=4m") as disk:
        data = tiny.write_data(disk / "data")
        cfg = tiny.config(disk / "run", data, train__steps=6, checkpoint__every=2)
        config = tiny.write_toml(disk / "c.toml", cfg)
        assert tiny.run(cfg) == 0
        fill(disk)
        starts = {
            run: subprocess.Popen(
                command(config, "train.steps=9", f"run.dir={disk / run}"), cwd=ROOT, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, text=True,
            )
            for run in ("run", "new")
        }  # fmt: skip
        for run, start in starts.items():
            told = start.communicate(timeout=120)[1]
            assert start.returncode == EXIT_USER_ERROR, told
            assert told.count("\n") == 1, told
            assert (
                f"run.dir: {disk / run} cannot be locked: the disk is full, or a quota is used up; free some of: "
                in told
            )
            assert run == "new" or "checkpoints older than the newest" in told
        assert tiny.steps_saved(disk / "run") == [2, 4, 6]
        (disk / "ballast").unlink()
        cfg.train.steps = 9
        assert tiny.run(cfg) == 0


@pytest.mark.slow
def test_a_stop_on_a_full_disk_is_told() -> None:
    with small_disk("size=4m") as disk:
        data = tiny.write_data(disk / "data", windows=128, sentinels=tuple(range(128)))
        trap: dict[str, Any] = {"model__factory": "tests.tiny:trap", "model__factory_args": {"trap": "none"}}
        cfg = tiny.config(disk / "run", data, train__steps=10**6, checkpoint__every=10**6, log__every=1, **trap)
        config = tiny.write_toml(disk / "c.toml", cfg)
        with (disk / "log").open("wb") as log:
            process = subprocess.Popen(command(config), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            tiny.wait_for(lambda: tiny.records(disk / "run"), process)
            fill(disk)
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 1
        finally:
            process.kill()
            process.wait()
        found = tiny.status(disk / "run")
        assert (found["outcome"], found["exit_code"], found["requeue"]) == ("failed", 1, True)
        assert "No space left on device" in found["reason"]
