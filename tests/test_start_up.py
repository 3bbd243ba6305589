"""Before the first step: a rank that dies, a launcher that dies and a stop request end all ranks soon, and with the right word."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kamui_dist import command_line, signals
from kamui_dist.errors import EXIT_DIVERGED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USER_ERROR
from tests import tiny

ROOT = Path(__file__).parent.parent

# The trainer, and a fault: at FAULT_AT rank FAULT_RANK waits until the other is there, waits a moment more, and dies (kill, raise),
# never comes (hold) or comes late (late).
FAULTY = """
import os, signal, sys, time
from pathlib import Path
from kamui_dist import command_line
COMMAND = command_line.begin(sys.argv[1:])
rank, at, what = os.environ["RANK"], os.environ["FAULT_AT"], os.environ["FAULT"]
mine, here = rank == os.environ["FAULT_RANK"], Path(os.environ["FAULT_HERE"])

def fault():
    (here / f"pid-{rank}").write_text(str(os.getpid()))
    if not mine:
        return
    end = time.monotonic() + 120
    while len(list(here.glob("pid-*"))) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(1.0)
    (here / "fault").touch()
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        raise RuntimeError("boom-123")
    time.sleep(3.0 if what == "late" else 1e6)

if at == "import" and mine:
    fault()
from torch.distributed.elastic.multiprocessing.errors import record
from kamui_dist import checkpoint, distributed, rundir, saver, train
owner, name = {
    "import": (distributed, "start"), "init": (distributed, "start"), "meet": (rundir, "locate"),
    "group": (saver, "checkpoint_group"), "finish": (checkpoint._PublishingWriter, "finish"),
}[at]
call = getattr(owner, name)

def faulty(*args, **more):
    fault()
    return call(*args, **more)

setattr(owner, name, faulty)
train.COMMAND = COMMAND
sys.exit(record(train.main)())
"""


class Faulty:
    """A torchrun of FAULTY on two ranks."""

    def __init__(self, base: Path, at: str, rank: int, what: str, **overrides: Any) -> None:
        base.mkdir(exist_ok=True)
        self.run, self.log = base / "run", base / "log"
        data = tiny.write_data(base / "data")
        config = tiny.write_toml(base / "c.toml", tiny.config(self.run, data, **overrides))
        (base / "faulty.py").write_text(FAULTY)
        env = {"FAULT": what, "FAULT_AT": at, "FAULT_RANK": str(rank), "FAULT_HERE": str(base), "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(base / "faulty.py"),
                 str(config)],
                env={**os.environ, **env, "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.base = base

    def pids(self) -> list[int]:
        """Once both ranks are where the fault is."""
        paths = [self.base / f"pid-{rank}" for rank in (0, 1)]
        end = time.monotonic() + 120
        while not all(path.exists() and path.read_text() for path in paths):
            assert time.monotonic() < end, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        return [int(path.read_text()) for path in paths]

    def end(self) -> tuple[int, str]:
        try:
            code = self.process.wait(150)
        finally:
            self.process.kill()
        text = self.log.read_text()
        assert "forcefully exiting via 9" not in text, "torchrun had to kill a rank that did not hear"
        return code, text


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


DEATHS = [("import", 1, "kill"), ("init", 0, "kill"), ("init", 1, "raise"), ("meet", 1, "kill"), ("group", 1, "kill")]


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, str], tuple[Faulty, int, str]]:
    """All of them, two at a time: much of each is waiting."""
    # pytest makes its directories from one thread: two that ask for the first of a worker get in each other's way.
    base = tmp_path_factory.mktemp("deaths")

    def die(death: tuple[str, int, str]) -> tuple[Faulty, int, str]:
        faulty = Faulty(base / "-".join(map(str, death)), *death)
        return faulty, *faulty.end()

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(DEATHS, pool.map(die, DEATHS), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("at", "rank", "what"), DEATHS)
def test_a_rank_that_dies_ends_the_other(
    deaths: dict[tuple[str, int, str], tuple[Faulty, int, str]], at: str, rank: int, what: str
) -> None:
    faulty, code, out = deaths[at, rank, what]
    assert code == 1
    other = 1 - rank
    by_guard = f"rank {other} ends in start-up: SIGTERM, and it waits in kamui_dist."
    # Where the two are connected already, the connection tells it.
    assert by_guard in out or f"rank {other} failed: " in out, out
    if at != "meet":
        assert out.count("ends in start-up") == 1, out
        assert "another rank has died" in out
    assert what != "raise" or f"rank {rank} failed: RuntimeError: boom-123" in out
    if at == "group":  # there is a run directory
        status = tiny.status(faulty.run)
        assert (status["outcome"], status["requeue"], status["exit_code"]) == ("failed", True, 1)
        assert status["reason"] == "another rank died in start-up (SIGTERM from the launcher)"
    else:
        assert not faulty.run.exists()


@pytest.mark.slow
def test_a_launcher_that_dies_ends_the_ranks(tmp_path: Path) -> None:
    faulty = Faulty(tmp_path, "group", 1, "hold")
    pids = faulty.pids()
    faulty.process.kill()
    end = time.monotonic() + 60
    while any(map(alive, pids)):
        assert time.monotonic() < end, faulty.log.read_text()
        time.sleep(0.1)
    assert faulty.process.wait() == -signal.SIGKILL
    assert "ends in start-up: the launcher is gone" in faulty.log.read_text()
    status = tiny.status(faulty.run)
    assert (status["outcome"], status["requeue"], status["exit_code"]) == ("stopped", True, EXIT_STOPPED)
    assert status["reason"] == "the launcher is gone"


@pytest.mark.slow
def test_a_request_while_all_live(tmp_path: Path) -> None:
    """To both, as in a preemption. A rank that is late is waited for; one that never comes is not, and nobody has died."""
    started = {what: Faulty(tmp_path / what, "group", 1, what) for what in ("late", "hold")}
    for faulty in started.values():
        for pid in faulty.pids():
            os.kill(pid, signal.SIGTERM)
    for what, faulty in started.items():
        code, out = faulty.end()
        early = "ends in start-up: SIGTERM" in out
        assert early or (what, code) == ("late", 0), out
        assert not early or "but the other ranks do not come" in out
        status = tiny.status(faulty.run)
        assert (status["outcome"], status["requeue"], status["exit_code"]) == ("stopped", True, EXIT_STOPPED)
        assert (status["reason"], status["step"]) == ("SIGTERM", 0)
        assert tiny.steps_saved(faulty.run) == []


@pytest.mark.slow
def test_a_request_to_one_rank_is_carried_to_the_end_of_start_up(tmp_path: Path) -> None:
    faulty = Faulty(tmp_path, "init", 1, "late")
    os.kill(faulty.pids()[0], signal.SIGTERM)
    faulty.end()
    status = tiny.status(faulty.run)
    assert (status["outcome"], status["requeue"], status["exit_code"]) == ("stopped", True, EXIT_STOPPED)
    assert status["reason"] == "SIGTERM"


@pytest.mark.slow
def test_rank_0_killed_while_it_publishes_is_told_by_another(tmp_path: Path) -> None:
    """Rank 1 hears of it inside the save, whose failures rank 0 tells for everybody as long as it lives."""
    faulty = Faulty(tmp_path, "finish", 0, "kill", train__steps=6, checkpoint__every=3)
    (tmp_path / "pid-1").touch()  # only rank 0 calls `finish`
    code, out = faulty.end()
    assert code == 1
    assert "rank 1 failed: CheckpointError" in out
    status = tiny.status(faulty.run)
    assert (status["outcome"], status["requeue"], status["exit_code"]) == ("failed", True, 1)
    assert status["reason"].startswith("rank 1: ")


# ---- what a restart cannot help


def local(*words: str, **env: str) -> tuple[int, str]:
    done = subprocess.run(
        [ROOT / "launch/local.sh", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "NPROC": "2", "OMP_NUM_THREADS": "1", **env}, timeout=200, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.slow
def test_a_mistake_and_a_divergence_are_not_tried_again(tmp_path: Path) -> None:
    data = tiny.write_data(tmp_path / "data", windows=128, sentinels=tuple(range(128)))
    trap: dict[str, Any] = {"model__factory": "tests.tiny:trap", "model__factory_args": {"trap": "nan"}}
    cfg = tiny.config(tmp_path / "run", data, train__steps=9, watch__max_skipped=2, **trap)
    diverges = [str(tiny.write_toml(tmp_path / "nan.toml", cfg))]
    cfg = tiny.config(tmp_path / "other", tiny.write_data(tmp_path / "plain"), train__steps=2)
    assert tiny.run(cfg) == 0
    mistaken = [str(tiny.write_toml(tmp_path / "c.toml", cfg)), "--resume-strict", "train.steps=3", "optim.lr=0.05"]
    with ThreadPoolExecutor(2) as pool:
        (code, out), mistake = pool.map(lambda words: local(*words, MAX_RESTARTS="2"), (diverges, mistaken))
    assert code == EXIT_DIVERGED, out
    assert out.count("starts from") == 1, out
    assert "Traceback" not in out
    assert tiny.status(tmp_path / "run")["restarts"] == 0

    code, out = mistake
    assert code == EXIT_USER_ERROR, out
    assert out.count("optim.lr 0.1 -> 0.05") == 1, out
    status = tiny.status(tmp_path / "other")
    assert (status["outcome"], status["exit_code"], status["requeue"]) == ("failed", EXIT_USER_ERROR, False)


@pytest.mark.slow
def test_slurms_torchrun_tells_srun_what_torchrun_hides(tmp_path: Path) -> None:
    data = tiny.write_data(tmp_path / "data", windows=128, sentinels=tuple(range(128)))
    trap: dict[str, Any] = {"model__factory": "tests.tiny:trap", "model__factory_args": {"trap": "nan"}}
    cfg = tiny.config(tmp_path / "run", data, train__steps=9, watch__max_skipped=2, **trap)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    step = {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NPROC": "2", "PYTHON": sys.executable}  # fmt: skip
    done = subprocess.run(
        [ROOT / "slurm/torchrun.sh", "-m", "kamui_dist.train", tiny.write_toml(tmp_path / "c.toml", cfg)], cwd=ROOT,
        env={**os.environ, **step, "OMP_NUM_THREADS": "1", "MAX_RESTARTS": "1", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == EXIT_DIVERGED, done.stdout
    assert done.stdout.count("starts from") == 1, done.stdout
    assert not list(tmp_path.glob("tmp.*"))


@pytest.mark.slow
def test_a_stop_before_there_is_a_run_directory(tmp_path: Path) -> None:
    """Rank 1 is building its model, which takes for ever."""
    (tmp_path / "slow.py").write_text(
        "import os, time\nfrom pathlib import Path\nfrom tests import tiny\n"
        "def model(cfg):\n    if os.environ['RANK'] == '1':\n"
        f"        Path({str(tmp_path / 'there')!r}).touch()\n        time.sleep(1e6)\n    return tiny.lstm(cfg)\n"
    )
    cfg = tiny.config(tmp_path / "run", tiny.write_data(tmp_path / "data"), model__factory="slow:model")
    config = tiny.write_toml(tmp_path / "c.toml", cfg)
    process = subprocess.Popen(
        [ROOT / "launch/local.sh", config], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "NPROC": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )  # fmt: skip
    try:
        tiny.wait_for((tmp_path / "there").exists, process)
        time.sleep(1.0)
        process.terminate()
        out = process.communicate(timeout=100)[0]
    finally:
        process.kill()
    assert process.returncode == EXIT_STOPPED, out
    assert "the other ranks do not come" in out
    assert not (tmp_path / "run").exists()


def test_exit_codes_for_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "KAMUI_EXIT_CODE_FILE"):
        monkeypatch.delenv(name, raising=False)
    codes = [EXIT_FINISHED, EXIT_USER_ERROR, EXIT_DIVERGED, EXIT_STOPPED, 1]
    assert list(map(command_line.for_launcher, codes)) == codes
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert list(map(command_line.for_launcher, codes)) == [0, EXIT_USER_ERROR, EXIT_DIVERGED, 0, 1], (
        "by hand: the truth"
    )
    noted = tmp_path / "code"
    monkeypatch.setenv("KAMUI_EXIT_CODE_FILE", str(noted))
    assert command_line.for_launcher(EXIT_STOPPED) == command_line.for_launcher(EXIT_FINISHED) == 0
    assert not noted.exists(), "status.json has these"
    assert command_line.for_launcher(EXIT_DIVERGED) == 0
    assert noted.read_text() == f"{EXIT_DIVERGED}\n"
    assert command_line.for_launcher(EXIT_USER_ERROR, agreed=False) == EXIT_USER_ERROR, "torchrun has to end the others"
    assert noted.read_text() == f"{EXIT_USER_ERROR}\n"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    before = [signal.getsignal(number) for number in tiny.HEARD]
    try:
        with pytest.raises(SystemExit) as ended:
            command_line.begin(["there-is-none.toml"])  # it is not even looked at
    finally:
        for number, handler in zip(tiny.HEARD, before, strict=True):
            signal.signal(number, handler)
    assert ended.value.code == 0
    monkeypatch.setenv("KAMUI_EXIT_CODE_FILE", str(tmp_path / "no/where"))
    assert command_line.for_launcher(EXIT_DIVERGED) == EXIT_DIVERGED, "nobody would know"


# ---- the guard, in a process of its own

CHILD = """
import os, sys, time
from kamui_dist import signals
assert "torch" not in sys.modules
signals.StartUp.WAIT_SECONDS, signals.StartUp.PATIENCE_SECONDS, signals.StartUp.TICK_SECONDS = 0.3, 0.6, 0.1
stop = signals.StopRequest().install()
os.environ["WORLD_SIZE"] = "2"
EARLY
signals.guard_start_up(stop)
signals.start_up.tell = lambda *told: print(*told, flush=True)
print("ready", flush=True)
EXEC
print("went on", stop.poll(), flush=True)
"""


def child(code: str, send: signal.Signals | None = signal.SIGTERM, early: str = "") -> tuple[int, str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD.replace("EXEC", code).replace("EARLY", early)], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if send is not None:
            process.send_signal(send)
        out = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    return process.returncode, out


DEAF = "time.sleep(60)"  # as a wait in C++: the handler runs, and the thread goes on to wait
MOVES = "for _ in range(22):\n" + "    time.sleep(0.013)\n" * 7  # not in time with the ticks


@pytest.mark.slow
def test_only_who_was_asked_and_stands_still_is_ended() -> None:
    term, usr1 = signals.REASONS.index("SIGTERM"), signals.REASONS.index("SIGUSR1")
    cases: list[tuple[Any, ...]] = [
        (DEAF,), (DEAF, signal.SIGINT), (DEAF, None, "os.kill(os.getpid(), 15)"), (MOVES,), ("time.sleep(2)", None),
        ("time.sleep(2)", signal.SIGUSR1), ("stop.poll(), stop.poll(), time.sleep(2)",), ("signals.ignore(), time.sleep(2)",),
    ]  # fmt: skip
    with ThreadPoolExecutor(4) as pool:
        deaf, by_hand, early, moves, unasked, unkilled, begun, ended = pool.map(lambda case: child(*case), cases)
    code, out = deaf
    assert code == 128 + signal.SIGTERM
    assert "rank 0 ends in start-up: SIGTERM, and it waits, but the other ranks do not come" in out
    assert "stopped SIGTERM 75 True" in out
    assert "stopped SIGINT 75 False" in by_hand[1], "by hand: no requeue"
    assert "stopped SIGTERM 75 True" in early[1], "before there was a guard"
    assert moves == (0, f"went on {term}\n")
    assert unasked == (0, "went on 0\n"), "nobody asked"
    assert unkilled == (0, f"went on {usr1}\n"), "nobody will kill"
    assert begun == (0, f"went on {term}\n"), "the loop has begun"
    assert ended[0] == 0, "it has ended"


@pytest.mark.slow
def test_a_process_that_was_held_has_not_stood_still() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD.replace("EXEC", MOVES).replace("EARLY", "")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.0)
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=60)[0].startswith("went on")
    finally:
        process.kill()


def test_who_is_gone_is_seen(tmp_path: Path) -> None:
    """Two ranks, of which one dies and is not waited for."""
    rank = (
        "import sys, time\nfrom kamui_dist import signals\nif sys.argv[1] == '1': time.sleep(60)\n"
        "print(signals.a_rank_is_gone(), flush=True); sys.stdin.readline()\n"
        "print(signals.a_rank_is_gone(), flush=True)"
    )
    launcher = f"""
import json, os, subprocess, sys, time
env = lambda r: {{**os.environ, "LOCAL_RANK": r, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}}
start = lambda r, **o: subprocess.Popen([sys.executable, "-c", {rank!r}, r], env=env(r), text=True, **o)
one = start("1")
time.sleep(0.5)
zero = start("0", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
before = zero.stdout.readline()
one.kill()
time.sleep(0.5)
print(json.dumps([before.strip(), zero.communicate("x")[0].strip()]))
"""
    clean = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    done = subprocess.run(
        [sys.executable, "-c", launcher], cwd=ROOT, capture_output=True, text=True, check=True, env=clean
    )
    assert json.loads(done.stdout) == ["False", "True"]
