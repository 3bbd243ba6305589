"""A throw-away SLURM on this machine (up.sh), and jobs on it as a test sees them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEBIAN = "apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}


def missing() -> str:
    """Why there can be no cluster here, or ""."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    absent = [tool for tool in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(tool, path=path) is None]
    if absent:
        return f"no {', '.join(absent)} here: {DEBIAN}"
    if os.geteuid() != 0:
        return "needs root: each virtual node gets a host name of its own"
    return ""


def until(condition: Callable[[], Any], what: str | Callable[[], str], seconds: float = 120) -> Any:
    """The first true value of `condition`. Raises AssertionError saying `what` was waited for."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain for {what() if callable(what) else what}"
        time.sleep(0.2)
    return value


class Cluster:
    """Nodes node1..nodeN with two fake GPUs and four claimed CPUs each; partitions batch (default), low (preemptable), high."""

    def __init__(self, directory: Path, nodes: int, **knobs: str) -> None:
        self.directory = directory
        settings = {f"TSLURM_{name}": value for name, value in knobs.items()} | {"TSLURM_NODES": str(nodes)}
        done = subprocess.run(
            [HERE / "up.sh", directory],
            env=os.environ | settings,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        ours = ("SLURM_", "SBATCH_", "NPROC", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MAX_", "TORCHELASTIC_")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        self.env |= {"SLURM_CONF": f"{directory}/slurm.conf", "PROJECT_DIR": str(ROOT), "ENV_DIR": sys.prefix,
                     "OMP_NUM_THREADS": "1", "TMPDIR": str(directory / "job")}  # fmt: skip

    def down(self) -> None:
        subprocess.run([HERE / "down.sh", self.directory], check=False, timeout=60)

    def node(self, what: str, number: int) -> None:
        """`what`: "kill" is a power failure of the node, "start" ends it."""
        subprocess.run(
            [HERE / "node.sh", self.directory, what, str(number)], check=True, timeout=60, capture_output=True
        )

    def run(self, *command: str | Path, **env: str) -> str:
        done = subprocess.run(command, env=self.env | env, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, where: Path, script: str, *args: str | Path, options: str = "", **env: str) -> Job:
        """sbatch OPTIONS slurm/SCRIPT ARGS in the directory `where`."""
        words = ["sbatch", "--parsable", f"--chdir={where}", "--time=5", "--cpus-per-task=1", *options.split()]
        return Job(self, self.run(*words, ROOT / "slurm" / script, *map(str, args), **env), where)


@dataclass
class Job:
    cluster: Cluster
    id: str
    where: Path

    def facts(self, task: str = "") -> dict[str, str]:
        text = self.cluster.run("scontrol", "show", "job", "--oneliner", self.id + task)
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def state(self, task: str = "") -> str:
        return self.facts(task)["JobState"]

    def restarts(self, task: str = "") -> int:
        return int(self.facts(task)["Restarts"])

    def log(self) -> str:
        return "".join(p.read_text(errors="replace") for p in sorted(self.where.glob(f"*-{self.id}*.out")))

    def told(self, what: str) -> str:
        return f"{what}; {self.facts()}\n{self.log()[-4000:]}"

    def ends(self, state: str = "COMPLETED", task: str = "", seconds: float = 150) -> None:
        found = until(lambda: (s := self.state(task)) in ENDED and s, lambda: self.told("its end"), seconds)
        assert found == state, self.told(f"{found}, not {state}")

    def requeued(self, times: int = 1, task: str = "", seconds: float = 150) -> None:
        until(lambda: self.restarts(task) >= times, lambda: self.told(f"requeue {times}"), seconds)

    def reaches(self, run: Path, step: int, attempt: int = 0, seconds: float = 150) -> None:
        """Waits until update `step` is done, in the attempt of that number or a later one."""

        def there() -> bool:
            metrics = records(run)
            starts = sum(r["kind"] in ("start", "resume") for r in metrics)
            return starts > attempt and any(r["kind"] == "step" and r["step"] >= step for r in metrics)

        until(there, lambda: self.told(f"step {step}"), seconds)

    def rank(self, number: int) -> int:
        """The pid of a rank of this job."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                env = set((process / "environ").read_bytes().split(b"\0"))
                command = (process / "cmdline").read_bytes()
            except OSError:
                continue
            wanted = {f"RANK={number}".encode(), f"SLURM_JOB_ID={self.id}".encode(),
                      f"SLURM_CONF={self.cluster.env['SLURM_CONF']}".encode()}  # fmt: skip
            if wanted <= env and b"kamui_dist.train" in command and b"torch.distributed.run" not in command:
                return int(process.name)
        raise AssertionError(self.told(f"no process of rank {number}"))


def records(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl as it lies there, read while it is written."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def attempts(run: Path) -> list[dict[str, Any]]:
    """What the job scripts noted at the end of each attempt."""
    entries = [json.loads(line) for line in (run / "jobs.jsonl").read_text().splitlines()]
    return [e for e in entries if e["event"] == "end"]
