"""A run directory that is moved, removed or replaced while it is trained in, and one whose files are not what they should be."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kamui_dist import (
    checkpoint,
    distributed,
    history,
    lock,
    manifest,
    metrics,
    retention,
    rundir,
    status,
    train,
)
from kamui_dist.config import Config
from kamui_dist.data import Loader
from kamui_dist.errors import EXIT_USER_ERROR, UserError
from kamui_dist.findings import Finding
from kamui_dist.lock import Lock
from kamui_dist.signals import StopRequest
from tests import tiny
from tests.ranks import run_ranks
from tests.test_checkpoint_chain import join_saves

ROOT = Path(__file__).parent.parent
EVERY_TWO: dict[str, Any] = {"train__steps": 6, "checkpoint__every": 2, "model__n_layers": 1}
Main = Callable[..., int]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_data(tmp_path_factory.mktemp("data") / "train", windows=64)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Main:
    """The trainer's own, in this process: the exit code."""

    def run(cfg: Config, loader: type[Loader] = Loader) -> int:
        with monkeypatch.context() as here:
            here.setattr(train, "COMMAND", (cfg, StopRequest()), raising=False)
            here.setattr(train, "Loader", loader)
            return train.main()

    monkeypatch.setattr(lock, "AGAIN_SECONDS", 0.0)
    return run


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


def wait_until(there: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not there():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- the lock knows its file


@pytest.mark.slow
def test_the_lock_tells_what_has_become_of_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "AGAIN_SECONDS", 0.0)
    run, away = tmp_path / "run", tmp_path / "away"
    run.mkdir()
    held = Lock(run)
    try:
        assert held.moved() == ""
        run.rename(away)
        assert f"{run} was moved, removed or replaced while it trained (it is {away} now: move it back)" in held.moved()
        run.mkdir()
        other = Lock(run)  # another run in its place
        assert f"(it is {away} now" in held.moved()
        assert other.moved() == ""
        other.release()
        shutil.rmtree(run)
        away.rename(run)
        assert held.moved() == ""
        # Only the files are gone, as where something cleans up old ones: they are made again, and keep others out again.
        for files in ([".lock"], [".lock", "lock.json"]):
            for name in files:
                (run / name).unlink()
            assert held.moved() == ""
            assert {p.name for p in run.iterdir()} == {".lock", "lock.json"}
            assert "in use by process" in of_another_process(run)
        # Unless somebody has them.
        (run / ".lock").unlink()
        (run / "lock.json").write_text('{"token": "of another run"}')
        assert f"{run / '.lock'} was removed while the run trained, and another process has it now" in held.moved()
        shutil.rmtree(run)
        assert f"{run} was moved, removed or replaced while it trained; the run ends" in held.moved()
        assert "\n" not in held.moved()
    finally:
        held.release()
    assert not run.exists()


def of_another_process(run: Path) -> str:
    """What a second start is told."""
    code = f"from pathlib import Path; from kamui_dist.lock import Lock; Lock(Path({str(run)!r}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT).stderr


def test_a_file_server_that_is_away_is_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "AGAIN_SECONDS", 0.0)
    held, stat = Lock(tmp_path), Path.stat
    answers: list[OSError] = []

    def failing(path: Path, **more: Any) -> os.stat_result:
        if answers and path.name == ".lock":
            raise answers.pop()
        return stat(path, **more)

    monkeypatch.setattr(Path, "stat", failing)
    for number in (errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT):
        answers[:] = [OSError(number, "x")] * 2
        assert held.moved() == ""
    answers[:] = [FileNotFoundError(errno.ENOENT, "x")]  # once, and then it is there
    assert held.moved() == ""
    answers.clear()
    held.release()


def test_the_heartbeat_sees_it_and_leaves_the_other_directory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(lock, "TOUCH_SECONDS", 0.01)
    run = tmp_path / "run"
    run.mkdir()
    held = Lock(run)
    run.rename(tmp_path / "away")
    run.mkdir()
    (run / "lock.json").write_text('{"token": "of another run"}')
    os.utime(run / "lock.json", (1e9, 1e9))
    wait_until(lambda: held.gone)
    assert "was moved" in held.gone
    assert (run / "lock.json").stat().st_mtime == 1e9
    shutil.rmtree(run)
    (tmp_path / "away").rename(run)
    wait_until(lambda: not held.gone)
    held.release()
    assert not (run / "lock.json").exists()


def test_a_moved_directory_is_let_go_of_where_it_is(tmp_path: Path) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    run.mkdir()
    held = Lock(run)
    run.rename(away)
    held.release()
    assert not (away / "lock.json").exists()
    assert not run.exists()


# ---- training


def move(run: Path) -> None:
    run.rename(run.with_name("away"))


def replace(run: Path) -> None:
    move(run)
    shutil.copytree(run.with_name("another"), run)


@pytest.mark.parametrize("how", [{}, {"checkpoint__async": True}], ids=["sync", "async"])
@pytest.mark.parametrize("act", [move, replace, shutil.rmtree])
def test_the_run_ends_at_the_next_save_and_is_no_ghost(
    tmp_path: Path, data: Path, main: Main, capfd: pytest.CaptureFixture[str], act: Callable[[Path], None], how: dict[str, Any]
) -> None:  # fmt: skip
    run, away, another = tmp_path / "run", tmp_path / "away", tmp_path / "another"
    assert main(tiny.config(another, data, **EVERY_TWO | {"train__steps": 2})) == 0
    before = contents(another)

    def go() -> None:
        join_saves()
        act(run)

    capfd.readouterr()
    assert main(tiny.config(run, data, **EVERY_TWO | how), tiny.acting(4, go)) == EXIT_USER_ERROR
    [told] = errors(capfd.readouterr().err)
    assert f"run.dir: {run} was moved, removed or replaced while it trained" in told
    assert (f"(it is {away} now: move it back)" in told) == (act is not shutil.rmtree)
    if act is replace:
        assert contents(run) == before
    else:
        assert not run.exists()
    if act is shutil.rmtree:
        assert not away.exists()
        return
    assert tiny.steps_saved(away) == [2]
    assert not list((away / "checkpoints").glob(".tmp*"))
    assert [r["step"] for r in tiny.records(away)] == [1, 2, 3, 4]
    found = tiny.status(away)
    assert (found["outcome"], found["exit_code"], found["requeue"]) == ("failed", EXIT_USER_ERROR, False)
    assert not (away / "incidents").exists()
    assert not (away / "lock.json").exists()
    shutil.rmtree(run, ignore_errors=True)
    away.rename(run)
    assert main(tiny.config(run, data, **EVERY_TWO | how)) == 0
    assert tiny.steps_saved(run) == [2, 4, 6]
    assert [r["step"] for r in tiny.records(run)] == [1, 2, 3, 4, 5, 6]


def test_moved_away_and_back_is_nothing(tmp_path: Path, data: Path, main: Main) -> None:
    run = tmp_path / "run"

    def there_and_back() -> None:
        move(run)
        run.with_name("away").rename(run)

    assert main(tiny.config(run, data, **EVERY_TWO), tiny.acting(4, there_and_back)) == 0
    assert tiny.steps_saved(run) == [2, 4, 6]


def test_no_failure_is_told_in_a_directory_that_is_not_the_runs(tmp_path: Path, data: Path, main: Main) -> None:
    run, another = tmp_path / "run", tmp_path / "another"
    assert main(tiny.config(another, data, **EVERY_TWO | {"train__steps": 2})) == 0
    before = contents(another)

    def crash() -> None:
        replace(run)
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        main(tiny.config(run, data, **EVERY_TWO), tiny.acting(4, crash))
    assert contents(run) == before
    assert tiny.status(tmp_path / "away")["reason"] == "boom"
    rundir.hung(run, "rank 0 last seen")
    assert contents(run) == before


def test_a_save_that_fails_because_the_directory_went_is_told_as_that(
    tmp_path: Path, data: Path, main: Main, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes between the look and the write."""
    run, save = tmp_path / "run", checkpoint.save

    def late(directory: Path, step: int, *args: Any, **more: Any) -> Any:
        if step == 4:
            move(run)
        return save(directory, step, *args, **more)

    monkeypatch.setattr(checkpoint, "save", late)
    assert main(tiny.config(run, data, **EVERY_TWO)) == EXIT_USER_ERROR
    assert len(errors(capfd.readouterr().err)) == 1
    assert not run.exists()
    assert tiny.steps_saved(tmp_path / "away") == [2]


def moving(cfg: Any) -> Any:
    """For model.factory: rank 0 moves the run directory away in its third step, and waits there until the heartbeat has seen it."""
    lock.TOUCH_SECONDS, lock.AGAIN_SECONDS = 0.05, 0.0
    model, run = tiny.trap(cfg), Path(cfg.factory_args["run"])
    steps = iter(range(1, 99))

    def look(*_: Any) -> None:
        if torch.is_grad_enabled() and next(steps) == 3 and distributed.rank() == 0:
            move(run)
            wait_until(rundir.seen_moved)

    model.register_forward_pre_hook(look)
    return model


@pytest.mark.slow
def test_all_ranks_end_at_the_next_step_with_one_line(tmp_path: Path, data: Path) -> None:
    run = tmp_path / "run"
    args = {"run": str(run), "trap": "none"}
    changes: dict[str, Any] = {
        "model__factory": "tests.test_moved:moving",
        "model__factory_args": args,
        "train__micro_batch": 8,
    }
    config = tiny.write_toml(
        tmp_path / "c.toml", tiny.config(run, data, train__steps=9, checkpoint__every=2, **changes)
    )
    noted = tmp_path / "noted"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2",
         "-m", "kamui_dist.train", str(config)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "KAMUI_EXIT_CODE_FILE": str(noted)},
    )  # fmt: skip
    assert noted.read_text().strip() == "2", done.stderr
    assert done.returncode == 0, "our launch script ends with the code that was noted; nothing is started again"
    assert len(errors(done.stderr)) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not run.exists()
    away = tmp_path / "away"
    assert [r["step"] for r in tiny.records(away)] == [1, 2]
    assert tiny.steps_saved(away) == [2]
    assert tiny.status(away)["requeue"] is False


# ---- the best one


@pytest.mark.parametrize("how", [{}, {"checkpoint__async": True}], ids=["sync", "async"])
@pytest.mark.parametrize("fault", ["one write fails", "all writes fail", "removed", "spoilt"])
def test_the_best_is_kept_whatever_becomes_of_its_file(
    tmp_path: Path, data: Path, main: Main, monkeypatch: pytest.MonkeyPatch, fault: str, how: dict[str, Any]
) -> None:
    best, write, writes = tmp_path / "run" / "checkpoints" / "best.json", retention.write_json, iter(range(1, 99))

    def failing(path: Path, value: Any) -> None:
        if fault == "all writes fail" or (fault == "one write fails" and next(writes) == 1):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        write(path, value)

    def harm() -> None:
        if fault == "removed":
            best.unlink()
        if fault == "spoilt":
            best.write_text('{"step": 4, "val_loss": 9}')

    monkeypatch.setattr(retention, "write_json", failing)
    changes: dict[str, Any] = {
        "train__steps": 10,
        "checkpoint__every": 2,
        "checkpoint__keep": 1,
        "data__val_path": str(data),
    }
    changes |= {
        "eval__every": 2,
        "eval__batches": 1,
        "optim__lr": 0.0,
        "model__n_layers": 1,
    } | how  # so that the first is best
    assert main(tiny.config(tmp_path / "run", data, **changes), tiny.acting(6, harm)) == 0
    assert tiny.steps_saved(tmp_path / "run") == [2, 10]
    if fault == "all writes fail":
        assert not best.exists()
    else:
        assert json.loads(best.read_text())["step"] == 2


def test_a_best_loss_that_is_no_number_is_written_as_none(tmp_path: Path) -> None:
    (tmp_path / "step-00000002").mkdir()
    for _ in range(2):
        retention.mend_best(tmp_path, 2, float("inf"))
        assert retention.read_best(tmp_path) == {"step": 2, "val_loss": None}
    retention.mend_best(tmp_path, 3, 1.0)  # was not saved
    assert retention.best_step(tmp_path) == 2


# ---- what cannot be used is one line


def something_to_forget(run: Path) -> None:
    """Updates 5 and 6 have to be done again, and their records are not the last of the file: it is written anew."""
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "resume", "step": 4}\n')


def blocked(run: Path, name: str) -> None:
    """A directory with something in it in place of a file."""
    path = run / name
    path.unlink(missing_ok=True)
    (path / "something").mkdir(parents=True)


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "findings.jsonl", ".metrics.jsonl.tmp", "status.json", "checkpoints/best.json",
             "checkpoints/.best.json.tmp", "lock.json", ".lock", "config.toml", "heartbeat/rank-00000"],
)  # fmt: skip
def test_a_directory_in_place_of_a_file_is_one_line(
    tmp_path: Path, data: Path, main: Main, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    run = tmp_path / "run"
    changes = {**EVERY_TWO, "data__val_path": str(data), "eval__every": 2, "eval__batches": 1}
    assert main(tiny.config(run, data, **changes)) == 0
    something_to_forget(run)
    (run / "checkpoints" / "best.json").write_text("{")
    blocked(run, name)
    capfd.readouterr()
    assert main(tiny.config(run, data, **changes)) == EXIT_USER_ERROR
    err = capfd.readouterr().err
    [told] = errors(err)
    assert told.startswith(f"error: run.dir: {run} cannot be ")
    assert name in told
    assert os.strerror(errno.EISDIR) in told
    assert "Traceback" not in err
    if name not in ("status.json", ".lock", "lock.json"):
        found = tiny.status(run)
        assert (found["outcome"], found["exit_code"], found["requeue"]) == ("failed", EXIT_USER_ERROR, False)


@pytest.mark.parametrize(("number", "passes"), [(errno.EACCES, False), (errno.EIO, True)])
@pytest.mark.parametrize("place", ["manifest", "data", "tidy"])
def test_a_checkpoint_that_may_not_be_read(
    tmp_path: Path, data: Path, main: Main, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int,
    passes: bool, place: str,
) -> None:  # fmt: skip
    """Rights are a person's affair; a disk in trouble may be better at the next start. Nothing is moved for either."""
    run = tmp_path / "run"
    assert main(tiny.config(run, data, **EVERY_TWO)) == 0
    cfg, opened, broken = tiny.config(run, data, **EVERY_TWO | {"train__steps": 8}), manifest.open_regular, [True]

    def refusing(path: Path) -> Any:
        if broken and (path.name == "manifest.json") == (place == "manifest") and place != "tidy":
            raise OSError(number, os.strerror(number), str(path))
        return opened(path)

    def stuck(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(manifest, "open_regular", refusing)
    if place == "tidy":
        (run / "checkpoints" / ".tmp-step-00000008").mkdir()
        monkeypatch.setattr(checkpoint, "remove", stuck)
    capfd.readouterr()
    if passes:
        with pytest.raises(RuntimeError, match=os.strerror(number)):
            main(cfg)
    else:
        assert main(cfg) == EXIT_USER_ERROR
        [told] = errors(capfd.readouterr().err)
        assert told.startswith(f"error: run.dir: {run} cannot be used: {run / 'checkpoints'}")
        assert os.strerror(number) in told
    assert tiny.status(run)["requeue"] is passes
    assert tiny.steps_saved(run) == [2, 4, 6]
    assert not (run / "checkpoints" / "quarantine").exists()


@pytest.mark.parametrize("place", [".", "checkpoints"])
def test_a_directory_that_cannot_be_written_is_told_at_the_start(
    tmp_path: Path,
    data: Path,
    main: Main,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    run, touch = tmp_path / "run", Path.touch

    def refusing(path: Path, **more: Any) -> None:
        if path.parent == run / place and path.name.startswith(".probe"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        touch(path, **more)

    monkeypatch.setattr(Path, "touch", refusing)
    assert main(tiny.config(run, data, **EVERY_TWO)) == EXIT_USER_ERROR
    [told] = errors(capfd.readouterr().err)
    assert told.startswith(f"error: run.dir: {run} cannot be written: {run / place}/.probe-")


def test_a_disk_that_is_full_when_records_are_forgotten(
    tmp_path: Path, data: Path, main: Main, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert main(tiny.config(run, data, **EVERY_TWO)) == 0
    something_to_forget(run)
    before = (run / "metrics.jsonl").read_bytes()
    write = history.write_text

    def full(path: Path, text: str) -> None:
        with monkeypatch.context() as here:
            here.setattr(
                os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))
            )
            write(path, text)

    monkeypatch.setattr(history, "write_text", full)
    capfd.readouterr()
    assert main(tiny.config(run, data, **EVERY_TWO)) == EXIT_USER_ERROR
    [told] = errors(capfd.readouterr().err)
    assert "the disk is full, or a quota is used up; free some of: checkpoints older than the newest" in told
    assert (run / "metrics.jsonl").read_bytes() == before
    assert not (run / ".metrics.jsonl.tmp").exists()
    assert tiny.status(run)["requeue"] is False


def open_metrics(run: Path) -> str:
    with pytest.raises(UserError) as caught:
        metrics.Metrics(run, distributed.is_main(), 1, 1, False, resumed=0)
    assert caught.value.agreed
    return str(caught.value)


@pytest.mark.slow
def test_all_ranks_know_that_the_records_cannot_be_written(tmp_path: Path) -> None:
    blocked(tmp_path, "metrics.jsonl")
    told = run_ranks(open_metrics, 2, tmp_path)
    assert told[0] == told[1]
    assert "metrics.jsonl: Is a directory" in told[0]


def test_a_status_that_cannot_be_written_ends_no_run(
    tmp_path: Path, data: Path, main: Main, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(tiny.config(run, data, **EVERY_TWO), tiny.acting(3, lambda: blocked(run, "status.json"))) == 0
    assert tiny.steps_saved(run) == [2, 4, 6]
    assert f"warning: {run / 'status.json'} was not written: Is a directory" in capfd.readouterr().err


# ---- a STOP file that comes too late


def test_a_stop_file_in_a_run_that_is_over_stops_no_later_one(
    tmp_path: Path, data: Path, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert main(tiny.config(run, data, **EVERY_TWO)) == 0
    (run / "STOP").touch()
    assert main(tiny.config(run, data, **EVERY_TWO)) == 0
    assert tiny.status(run)["reason"] == "nothing left to do"
    assert not (run / "STOP").exists()
    longer = tiny.config(run, data, **EVERY_TWO | {"train__steps": 8})
    with monkeypatch.context() as here:
        here.setattr(StopRequest, "poll", lambda *_: 0)  # nobody looks any more
        assert main(longer, tiny.acting(2, (run / "STOP").touch)) == 0
    assert tiny.status(run)["step"] == 8
    assert not (run / "STOP").exists()
    rundir.close(run, "stopped", 8, "SIGTERM", 75, requeue=True)
    (run / "STOP").touch()
    rundir.close(run, "stopped", 8, "SIGTERM", 75, requeue=True)
    assert (run / "STOP").exists(), "the job may be requeued, and somebody wants it to end"


def test_no_finding_and_no_record_goes_to_another_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    run.mkdir()
    status.hold(run)
    written = metrics.Metrics(run, True, 1, 9, False, resumed=0)
    written.write("step", step=1)
    move(run)
    run.mkdir()
    (run / "metrics.jsonl").write_text("another run's\n")
    written.write("step", step=2)
    written.findings([Finding("spike", 2, "m.", "c.", "a.", "warn")])
    written.sync()
    written.close()
    assert contents(run) == {"metrics.jsonl": b"another run's\n"}
    assert [r["step"] for r in tiny.records(away)] == [1, 2]
    assert "its directory was moved away; lines wait in memory" in capsys.readouterr().err
    status.hold(run)


def test_the_status_goes_with_the_directory(tmp_path: Path) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    run.mkdir()
    status.hold(run)
    try:
        assert status.is_home(run)
        run.rename(away)
        assert status.home(run) == away
        status.write(run, "failed", 3, "x", 2, False)
        assert status.step(away) == 3
        assert not run.exists()
        shutil.rmtree(away)
        assert status.home(run) is None
        status.write(run, "failed", 4, "x", 2, False)
        assert list(tmp_path.iterdir()) == []
    finally:
        run.mkdir()
        status.hold(run)
