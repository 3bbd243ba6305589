"""The shell scripts. A stand-in for the trainer answers in most tests: what is tested is what happens around it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), ROOT / ".ci" / "run"])

# Writes one file for each thing that the tests want to know. torchrun is real.
TRAINER = """
import json, os, signal, sys, time
from pathlib import Path
run = Path("run")
args = sys.argv[1:]
if "--print" in args:
    print(run)
elif "--check" in args:
    (run / "checked").write_text(args[args.index("--world-size") + 1])
    if "bad=1" in args:
        print("unknown key bad", file=sys.stderr)
        sys.exit(2)
else:
    rank = int(os.environ["RANK"])
    def stop(number, frame):
        (run / f"stopped-{rank}").write_text(f"{number} {os.environ['WORLD_SIZE']}")
        if rank == 0:
            (run / "status.json").write_text(json.dumps({"outcome": "stopped", "step": 7, "exit_code": 75}))
        sys.exit(0)
    if rank == 0:
        (run / "status.json").write_text(json.dumps({"outcome": "running", "step": 0, "exit_code": None}))
    if "crash" in args:
        if rank == 1:
            raise RuntimeError("boom-123")
        time.sleep(60)
    signal.signal(signal.SIGTERM, stop)
    if "watch" in args:
        if rank == 0:
            (run / "status.json").write_text(json.dumps({"outcome": "failed", "step": 7, "exit_code": 70}))
        sys.exit(70)
    (run / f"ready-{rank}").write_text(str(os.getpid()))
    time.sleep(60)
    sys.exit(9)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A root with the real launchers, this Python as .venv, and the stand-in trainer."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / ".venv/bin/python").chmod(0o755)
    (tmp_path / "kamui_dist").mkdir()
    (tmp_path / "kamui_dist/__init__.py").touch()
    (tmp_path / "kamui_dist/train.py").write_text(TRAINER)
    (tmp_path / "run").mkdir()
    # of an earlier start: no script may take it for this one's
    (tmp_path / "run/status.json").write_text(json.dumps({"outcome": "finished", "step": 5, "exit_code": 0}))
    return tmp_path


def environment(**values: str) -> dict[str, str]:
    ours = ("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "MAX_RESTARTS", "OMP_NUM_THREADS")
    return {k: v for k, v in os.environ.items() if k not in ours} | values


def start(project: Path, script: str, *args: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(project / "launch" / script), *args], cwd=project, env=environment(**env), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def ready(project: Path, ranks: int = 2) -> list[int]:
    """The pids of the stand-in's ranks, once they can hear signals."""
    files = [project / f"run/ready-{r}" for r in range(ranks)]
    wait_until(lambda: all(f.exists() and f.read_text() for f in files))
    return [int(f.read_text()) for f in files]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK) == (script.name not in ("env.sh", "common.sh"))  # those two are sourced


def env_after(**values: str) -> dict[str, str]:
    script = f'set -eu; . "{ROOT}/launch/env.sh"; env -0'
    out = subprocess.run(
        ["bash", "-c", script], env={"PATH": os.environ["PATH"], **values}, capture_output=True, text=True, check=True
    )
    return dict(line.split("=", 1) for line in out.stdout.split("\0") if line)


def test_env_never_overwrites_what_the_user_set() -> None:
    ours = env_after().keys() - {"PATH", "PWD", "SHLVL", "_"}
    assert {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "PYTHONUNBUFFERED"} <= ours
    mine = dict.fromkeys(ours, "mine")
    assert {k: v for k, v in env_after(**mine).items() if k in ours} == mine
    assert env_after(PYTHONUNBUFFERED="")["PYTHONUNBUFFERED"] == ""  # set to nothing is set, too


def test_threads_are_divided_among_the_ranks() -> None:
    cores = len(os.sched_getaffinity(0))
    assert env_after()["OMP_NUM_THREADS"] == str(cores)
    assert env_after(RANKS_PER_NODE=str(cores))["OMP_NUM_THREADS"] == "1"
    assert env_after(RANKS_PER_NODE=str(cores * 4))["OMP_NUM_THREADS"] == "1"


def run(project: Path, script: str, *args: str, **env: str) -> tuple[int, str]:
    process = start(project, script, *args, **env)
    return (process.communicate(timeout=120)[0], process.returncode)[::-1]


@pytest.mark.parametrize(("env", "told"), [
    ({}, "set NNODES NODE_RANK MASTER_ADDR"),
    ({"NNODES": "2", "NODE_RANK": "1"}, "set MASTER_ADDR"),
    ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "from 0 to NNODES - 1 = 1; it is '2'"),
    ({"NNODES": "two", "NODE_RANK": "0", "MASTER_ADDR": "a"}, "it is 'two'"),
    ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a", "MAX_RESTARTS": "1"}, "MAX_RESTARTS works on one node only"),
])  # fmt: skip
def test_node_refuses_in_one_line(env: dict[str, str], told: str) -> None:
    code, out = run(ROOT, "node.sh", "configs/x.toml", **env)
    assert (code, out.count("\n")) == (2, 1)
    assert told in out


@pytest.mark.parametrize("script", ["local.sh", "debug.sh"])
def test_without_a_config_there_is_one_line(project: Path, script: str) -> None:
    for args in [(), ("--help",)]:
        code, out = run(project, script, *args)
        assert (code, out.count("\n")) == (2, 1)
        assert "CONFIG" in out
    code, out = run(project, "local.sh", "x.toml", NPROC="many")
    assert (code, out) == (2, "local.sh: NPROC is the number of processes on this node, 1 or more; it is 'many'\n")


def test_a_wrong_config_never_reaches_torchrun(project: Path) -> None:
    assert run(project, "local.sh", "x.toml", "bad=1", NPROC="3") == (2, "unknown key bad\n")
    assert (project / "run/checked").read_text() == "3"


def test_debug_puts_the_users_overrides_last(project: Path) -> None:
    (project / "kamui_dist/train.py").write_text("import sys; print(sys.argv[1:])")
    code, out = run(project, "debug.sh", "x.toml", "model.compile=true")
    assert code == 0
    assert out.startswith("['x.toml', 'run.debug=true',")
    assert out.endswith("'model.compile=true']\n")


@pytest.mark.slow
def test_sigterm_stops_the_ranks_and_tells_their_exit_code(project: Path) -> None:
    process = start(project, "local.sh", "x.toml", NPROC="2")
    ranks = ready(project)
    torchrun = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in (process.pid, torchrun):  # both would die of it, and leave the ranks behind
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    assert all(map(alive, [process.pid, torchrun, *ranks]))
    process.terminate()  # this process only, not its children
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 75, out
    assert [(project / f"run/stopped-{r}").read_text() for r in (0, 1)] == ["15 2", "15 2"]
    assert "Traceback" not in out
    assert not any(map(alive, [torchrun, *ranks]))


@pytest.mark.slow
def test_ctrl_c_stops_and_a_stop_is_not_restarted(project: Path) -> None:
    process = start(project, "local.sh", "x.toml", NPROC="2", MAX_RESTARTS="3")
    ranks = ready(project)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
    assert process.wait(60) == 75
    assert not any(map(alive, ranks))


@pytest.mark.slow
def test_ranks_that_do_not_answer_are_killed_in_the_end(project: Path) -> None:
    (project / "kamui_dist/train.py").write_text(TRAINER.replace("SIGTERM, stop)", "SIGTERM, signal.SIG_IGN)"))
    process = start(project, "local.sh", "x.toml", NPROC="2")
    ranks = ready(project)
    for _ in range(3):
        process.terminate()
        time.sleep(2.5)
    assert process.wait(20) != 0
    wait_until(lambda: not any(map(alive, ranks)), 5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv (util-linux)")
def test_nothing_lives_on_when_the_launcher_is_killed(project: Path) -> None:
    process = start(project, "local.sh", "x.toml", NPROC="2")
    ranks = ready(project)
    process.kill()
    wait_until(lambda: not any(map(alive, ranks)), 20)
    assert (project / "run/stopped-0").exists()  # asked, not killed


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("crash", 1), ("watch", 70)])
def test_exit_code_of_a_failure(project: Path, how: str, code: int) -> None:
    told, out = run(project, "local.sh", "x.toml", how, NPROC="2")
    assert told == code, out
    assert how != "crash" or "boom-123" in out
    status = json.loads((project / "run/status.json").read_text())
    assert (status["outcome"], status["exit_code"]) == ("failed", code), "no rank told it"


@pytest.mark.parametrize(("status", "new", "torchrun", "asked", "node", "noted", "code", "outcome"), [
    ({"outcome": "finished"}, 1, 1, 0, 0, "", 0, "finished"),  # a signal came while it left
    ({"outcome": "stopped"}, 1, 0, 1, 0, "", 75, "stopped"),
    ({"outcome": "failed", "exit_code": 76}, 1, 1, 0, 0, "", 76, "failed"),
    ({"outcome": "failed", "exit_code": 1}, 1, 0, 0, 0, "2\n", 2, "failed"),  # a mistake: torchrun was told 0
    ({"outcome": "finished"}, 0, 0, 0, 0, "70\n", 70, "finished"),
    ({"outcome": "stopped"}, 0, 1, 0, 0, "", 1, "stopped"),  # of an earlier start
    ({"outcome": "stopped"}, 0, 1, 1, 0, "", 75, "stopped"),
    ({"outcome": "stopped"}, 0, 137, 3, 0, "", 137, "stopped"),  # asked three times: killed
    ({"outcome": "running", "pid": 0}, 1, 137, 0, 0, "", 137, "running"),  # somebody lives
    ({"outcome": "running"}, 1, 137, 0, 0, "", 137, "failed"),
    ({"outcome": "running"}, 1, 0, 0, 0, "", 1, "failed"),
    ({"outcome": "running"}, 1, 1, 0, 1, "", 1, "running"),  # rank 0 is on another node
])  # fmt: skip
def test_what_a_launch_ends_with(
    tmp_path: Path, status: dict, new: int, torchrun: int, asked: int, node: int, noted: str, code: int, outcome: str
) -> None:
    (tmp_path / "noted").write_text(noted)
    (tmp_path / "status.json").write_text(json.dumps({"step": 7, **status}))
    words = [tmp_path / "status.json", new, torchrun, asked, node, tmp_path / "noted"]
    done = subprocess.run(
        [sys.executable, ROOT / "launch/outcome.py", *map(str, words)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == code
    found = json.loads((tmp_path / "status.json").read_text())
    assert (found["outcome"], found["step"]) == (outcome, 7)
    assert (
        outcome != "failed" or status["outcome"] != "running" or (found["exit_code"], found["requeue"]) == (code, True)
    )


@pytest.mark.slow
def test_an_old_status_says_nothing_about_this_start(project: Path) -> None:
    (project / "kamui_dist/train.py").write_text(TRAINER.replace("    rank = ", "    sys.exit('too early'); rank = "))
    assert run(project, "local.sh", "x.toml", NPROC="1")[0] == 1  # the old status.json: finished


@pytest.mark.slow
def test_two_nodes_meet(project: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    nodes = [start(project, "node.sh", "x.toml", NODE_RANK=str(r), **shared) for r in (0, 1)]
    ready(project)
    for node in nodes:
        node.terminate()
    assert [node.wait(60) for node in nodes] == [75, 75]
    assert [(project / f"run/stopped-{r}").read_text() for r in (0, 1)] == ["15 2", "15 2"]


# A Python that records what it is asked to do. As -m venv it copies itself, as -m pip it fails or dies as told.
PYTHON = """#!/bin/bash
here=$(dirname "$0"); log=ROOT/log
case "$*" in
  *-m\\ venv*) echo venv >>$log; rm -rf ROOT/.venv; mkdir -p ROOT/.venv/bin; cp "$0" ROOT/.venv/bin/python ;;
  *-m\\ ensurepip*) echo "$here/python" >$here/pip ;;
  *-m\\ pip\\ --version) test -e $here/pip ;;
  *-m\\ pip\\ install*) echo "pip ${@: -1}" >>$log
    if [ -e ROOT/die ]; then kill -9 $PPID; fi
    if [ -e ROOT/fail ]; then echo no-such-pin; exit 1; fi ;;
  *version_info*) test ! -e ROOT/old ;;
  *ensurepip*) test ! -e ROOT/no-ensurepip ;;
  --version) echo "Python 3.9.1" ;;
esac
"""


def test_install_is_done_once_and_redone_when_it_has_to_be(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch/install.sh", tmp_path / "launch")
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("1")
    fake = tmp_path / "python-fake"
    fake.write_text(PYTHON.replace("ROOT", str(tmp_path)))
    fake.chmod(0o755)

    def install(*extra: str) -> tuple[int, list[str], str]:
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        done = subprocess.run(
            [tmp_path / "launch/install.sh", *extra], env=environment(PYTHON=str(fake)), capture_output=True, text=True
        )
        return done.returncode, log.read_text().splitlines() if log.exists() else [], done.stderr

    (tmp_path / "old").touch()
    code, did, err = install()
    assert (code, did, err.count("\n")) == (1, [], 2)
    assert f"Python 3.11 or newer is needed; {fake} is Python 3.9.1" in err
    (tmp_path / "old").unlink()

    (tmp_path / "no-ensurepip").touch()
    code, did, err = install()
    assert (code, did) == (1, [])
    assert "install its venv package" in err
    (tmp_path / "no-ensurepip").unlink()

    (tmp_path / "die").touch()  # killed in the middle of pip
    assert install()[:2] == (-9, ["venv", "pip ."])
    (tmp_path / "die").unlink()
    assert install()[:2] == (0, ["venv", "pip ."])  # from scratch, and then never again
    assert install() == (0, [], "")
    assert install("dev")[:2] == (0, ["pip .[dev]"])
    assert install("dev") == (0, [], "")
    assert install() == (0, [], "")  # more than was asked for is fine

    (tmp_path / "constraints.txt").write_text("2")
    (tmp_path / "fail").touch()
    code, did, err = install()
    assert (code, did) == (1, ["pip .[dev]"])  # the extra stays, or its pins would go stale
    assert "no-such-pin" in err
    (tmp_path / "fail").unlink()
    assert install()[0] == 0
    assert install() == (0, [], "")

    pip = tmp_path / ".venv/bin/pip"  # names the folder that it was made in
    pip.write_text(pip.read_text().replace(str(tmp_path), "/elsewhere"))
    (tmp_path / "constraints.txt").write_text("3")
    assert install()[:2] == (0, ["venv", "pip ."])


@pytest.mark.slow
def test_a_typo_in_a_config_is_one_line(tmp_path: Path) -> None:
    """The real trainer."""
    config = tmp_path / "typo.toml"
    config.write_text("[optim]\nlr = 1e-3\nwarmup = 5\n")
    code, out = run(ROOT, "local.sh", str(config), f"run.dir={tmp_path / 'run'}", NPROC="2")
    assert code == 2, out
    assert out.count("\n") == 1, out
    assert "optim.warmup" in out
    assert "schedule.warmup" in out
    assert not (tmp_path / "run").exists()
