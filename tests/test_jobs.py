"""Jobs without a scheduler: the rules of requeueing, the ranks' environment, submit and status. tests/slurm has a real one."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import tiny

ROOT = Path(__file__).resolve().parent.parent
SLURM = ROOT / "slurm"
spec = importlib.util.spec_from_file_location("requeue", SLURM / "requeue.py")
assert spec is not None
assert spec.loader is not None
requeue = importlib.util.module_from_spec(spec)
spec.loader.exec_module(requeue)

DONE = {"outcome": "finished", "step": 9, "exit_code": 0}
WARNED = {"outcome": "stopped", "step": 9, "reason": "SIGUSR1", "requeue": True, "exit_code": 75}
TYPO = {"outcome": "failed", "step": 0, "reason": "bad", "requeue": False, "exit_code": 2}
DIVERGED = {"outcome": "failed", "step": 9, "reason": "nan", "requeue": False, "exit_code": 70}
CRASH = {"outcome": "failed", "step": 9, "reason": "boom", "requeue": True, "exit_code": 1}
KILLED = {"outcome": "running", "step": 9, "exit_code": None}


@pytest.mark.parametrize(("status", "code", "before", "after", "idle", "lost", "verdict"), [
    (DONE, 0, 5, 9, 0, False, "0"),
    (DONE, 138, 5, 9, 0, True, "0"),  # signalled while it was leaving
    (DONE | {"outcome": "early_stopped"}, 1, 9, 9, 5, False, "0"),
    (WARNED, 0, 5, 9, 0, False, "requeue"),
    (WARNED | {"reason": "end of the job"}, 0, None, 9, 1, False, "requeue"),
    (WARNED | {"reason": "SIGINT"}, 0, 5, 9, 0, False, "75"),
    (WARNED | {"reason": "file STOP"}, 0, 5, 9, 0, False, "75"),
    (WARNED, 0, 9, 9, 0, False, "requeue"),
    (WARNED, 0, 9, 9, 1, False, "75"),  # a limit too short for one update would go on for ever
    (TYPO, 1, None, None, 0, False, "2"),
    (TYPO, 1, None, None, 0, True, "2"),
    (DIVERGED, 1, 5, 9, 0, False, "70"),
    (CRASH, 1, 5, 9, 3, False, "requeue"),
    (CRASH, 1, 9, 9, 0, False, "requeue"),
    (CRASH, 1, 9, 9, 1, False, "1"),
    (CRASH, 1, 9, 9, 7, True, "requeue"),
    (KILLED, 137, None, 5, 0, False, "requeue"),
    (KILLED, 137, None, None, 1, False, "137"),
    ({}, 233, None, None, 0, True, "requeue"),  # srun could not launch: no status at all
    ({}, 2, None, None, 0, False, "2"),  # srun tells a rank's exit code
    ({}, 0, None, None, 1, False, "1"),  # nothing ran, and nobody complained
])  # fmt: skip
def test_what_is_requeued(
    status: dict, code: int, before: int, after: int, idle: int, lost: bool, verdict: str
) -> None:
    told, reason = requeue.decide(status, code, before, after, idle, 2, lost)
    assert told == verdict, reason
    assert reason


def test_attempts_without_progress_are_counted_and_an_old_status_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def attempt(number: int, status: dict | None, checkpoint: int | None = None, *flags: str) -> str:
        requeue.main(["begin", str(tmp_path), "7", str(number), "node[1-2]"])
        if status is not None:
            (tmp_path / "status.new").write_text(json.dumps(status))
            (tmp_path / "status.new").rename(tmp_path / "status.json")
        if checkpoint is not None:
            (tmp_path / f"checkpoints/step-{checkpoint:08}").mkdir(parents=True)
        requeue.main(["end", str(tmp_path), "7", str(number), "1", *flags])
        return capsys.readouterr().out.splitlines()[0]

    assert attempt(0, CRASH, 5) == "requeue"
    assert attempt(1, CRASH) == "requeue"
    assert attempt(2, None, None, "--lost-node") == "requeue"  # not counted
    assert attempt(3, CRASH, 6) == "requeue"  # progress: counted anew
    assert attempt(4, DONE, 7) == "0"
    (tmp_path / "jobs.jsonl").open("a").write('{"event": "beg')  # a power loss
    (tmp_path / "jobs.jsonl").open("a").write("\n")
    assert attempt(5, None) == "requeue"  # "finished" is what the attempt before said
    assert attempt(6, None) == "1"
    assert attempt(7, KILLED, 8) == "requeue"
    found = json.loads((tmp_path / "status.json").read_text())
    assert (found["outcome"], found["step"], found["requeue"]) == ("failed", 9, True), "no rank lived to tell it"


def rank_env(*args: str, **env: str) -> tuple[int, dict[str, str], str]:
    """What rank.sh gives its Python."""
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "RANK", "WORLD", "MASTER", "CUDA", "GLOO"))
    }
    code = "import os, json; print(json.dumps(dict(os.environ)))"
    done = subprocess.run(
        [SLURM / "rank.sh", *(args or ("-c", code))], env=clean | {"PYTHON": sys.executable} | env,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout) if done.stdout.startswith("{") else {}, done.stderr


STEP = {"SLURM_JOB_ID": "9", "SLURM_JOB_NAME": "bash", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "7", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "MASTER_ADDR": "localhost",
        "SLURM_RESTART_COUNT": "0"}  # fmt: skip


def test_a_rank_is_told_by_its_step_and_not_by_its_job() -> None:
    code, env, _ = rank_env(**STEP)
    assert code == 0
    assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"]) == ("1", "1", "2", "localhost")
    assert 10000 <= int(env["MASTER_PORT"]) < 30000
    assert rank_env(**STEP, CUDA_VISIBLE_DEVICES="0,1")[1]["LOCAL_RANK"] == "1"
    assert rank_env(**STEP, CUDA_VISIBLE_DEVICES="3")[1]["LOCAL_RANK"] == "0"  # bound to one GPU
    assert rank_env(**STEP, GLOO_SOCKET_IFNAME="mine", MASTER_PORT="4")[1]["GLOO_SOCKET_IFNAME"] == "mine"


def test_an_allocations_shell_is_no_step() -> None:
    code, _, err = rank_env(SLURM_JOB_ID="9", SLURM_NTASKS="4", SLURM_JOB_NAME="bash")
    assert (code, err.count("\n")) == (2, 1)
    assert "interactive.sh" in err


def test_a_rank_that_stopped_on_request_is_no_failure() -> None:
    assert rank_env("-c", "import sys; sys.exit(75)", **STEP)[0] == 0
    assert rank_env("-c", "import sys; sys.exit(70)", **STEP)[0] == 70


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
def test_the_job_scripts_are_clean() -> None:
    scripts = [*SLURM.glob("*.sh"), *SLURM.glob("*.sbatch"), *(ROOT / "tests/slurm").glob("*.sh")]
    subprocess.run(["shellcheck", "-x", "-P", "SCRIPTDIR", *scripts], check=True)


@pytest.mark.parametrize("script", sorted([*SLURM.glob("*.sh"), *SLURM.glob("*.sbatch")]), ids=lambda p: p.name)
def test_they_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK) == (script.name not in ("common.sh", "task.sh"))


@pytest.fixture
def here(tmp_path: Path) -> dict[str, Any]:
    """A directory with a config, and stand-ins for the scheduler's commands on PATH."""
    data = tiny.write_data(tmp_path / "data")
    tiny.write_toml(tmp_path / "c.toml", tiny.config(tmp_path / "run", data, model__vocab_size=65))
    for name, text in (
        ("sbatch", 'cp "$2" submitted; echo "4242;cluster"'),
        ("squeue", "test ! -e queue || cat queue"),
    ):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return {
        "cwd": tmp_path,
        "env": os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
    }


def kamui(here: dict[str, Any], *args: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kamui_dist.cli", *args], **here, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_submit_checks_writes_and_tells_what_to_type(here: dict[str, Any]) -> None:
    options = ["--nodes=2", "--gpus-per-node=2", "--time=1:00:00"]
    code, _, err = kamui(here, "submit", "c.toml", "train.global_batch=20", *options)
    assert (code, err.count("\n")) == (2, 1)
    assert "train.global_batch (20) must be a multiple" in err
    code, _, err = kamui(here, "submit", "c.toml", "data.path=nowhere", *options)
    assert code == 2
    assert "nowhere" in err
    code, out, _ = kamui(here, "submit", "c.toml", *options, "--dry-run")
    assert code == 0
    assert not (here["cwd"] / "run").exists()
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --gpus-per-node=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --signal=USR1@180",
    ):
        assert line in out.splitlines()

    code, out, err = kamui(here, "submit", "c.toml", "optim.lr=0.2", *options, "--partition=long", "--sbatch=--qos=high",
                           "--launcher=srun", "--cpus-per-node=16")  # fmt: skip
    assert code == 0, err
    for part in ("job 4242: DDP 4 on 2 node(s) x 2 = 4", "kamui-dist status run", "scancel 4242", "job-4242.out"):
        assert part in out
    script = (here["cwd"] / "submitted").read_text()
    subprocess.run(["bash", "-n", here["cwd"] / "submitted"], check=True)
    header = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    for line in (
        "--partition=long",
        "--qos=high",
        "--ntasks-per-node=2",
        "--cpus-per-task=8",
        "--job-name=run",
        "--time=1:00:00",
    ):
        assert f"#SBATCH {line}" in header
    assert "code " in script.splitlines()[1]
    assert "optim.lr=0.2" in script.splitlines()[1]
    assert "lr = 0.2" in (here["cwd"] / "run/job.toml").read_text()

    assert "state       not started" in kamui(here, "status", "run")[1]
    (here["cwd"] / "queue").write_text("PENDING|0:00|1:00:00|(Priority)\n")
    assert "4242 pending (Priority)" in kamui(here, "status", "run")[1]
    code, _, err = kamui(here, "submit", "c.toml", *options)  # twice the same run
    assert code == 2
    assert "has job 4242 already (pending (Priority))" in err


@pytest.mark.slow
def test_status_of_a_run(here: dict[str, Any]) -> None:
    run = here["cwd"] / "run"
    code, _, err = kamui(here, "status", "nowhere")
    assert (code, err.count("\n")) == (2, 1)
    subprocess.run([sys.executable, "-m", "kamui_dist.train", "c.toml"], **here, check=True, capture_output=True)
    out = kamui(here, "status", "run")[1]
    for line in ("state       finished", "step        5 of 5 (100.0 %)", "checkpoint  step 5", "job         none"):
        assert line in out, out
    assert "loss" in out
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"outcome": "running", "step": 3}))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    kept = [r for r in records if r["kind"] == "start" or (r["kind"] == "step" and r["step"] <= 3)]
    now = time.time()
    for r in kept:
        r["time"] = now - 3600 * (3 - r["step"])
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in kept) + '{"kind": "st')
    out = kamui(here, "status", "run")[1]
    for line in ("state       running", "step        3 of 5 (60.0 %)", "time left   2:00 h"):
        assert line in out, out
