"""What is tried on the cluster. A case drives its jobs and returns the runs that came out of it, which test_slurm.py looks at."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests import tiny
from tests.slurm.cluster import ROOT, Cluster, Job, attempts, records, until


@dataclass
class Site:
    """A case's directory on the cluster, with a config for 20 updates of a tiny model."""

    cluster: Cluster
    where: Path
    nodes: tuple[int, int]  # its own pair, so that no case is in another's way

    def pace(self, seconds: float | str) -> None:
        """From now on each update takes so long; "crash": it fails."""
        beside = self.where / "pace.new"
        beside.write_text(
            seconds if isinstance(seconds, str) else str(seconds / 2)
        )  # two micro-batches on each of two ranks
        beside.rename(self.where / "pace")

    def submit(self, *overrides: str, script: str = "train.sbatch", options: str = "", **env: str) -> Job:
        first, last = self.nodes
        pair = f"--nodelist=node{first},node{last}" if "--nodes=1" not in options else f"--nodelist=node{first}"
        options = f"--gpus-per-node=2 {pair} {options}"
        return self.cluster.submit(self.where, script, self.where / "c.toml", *overrides, options=options, **env)

    @property
    def run(self) -> Path:
        return self.where / "run"


def case_one_node(site: Site) -> list[Path]:
    """1 node x 2. It is what the interrupted runs are compared with."""
    job = site.submit(options="--nodes=1")
    job.ends()
    assert "1 node(s)" in job.log()
    return [site.run]


def case_two_nodes(site: Site) -> list[Path]:
    """2 nodes x 2 by torchrun, from kamui-dist submit."""
    first, last = site.nodes
    options = (
        f"--nodes=2 --gpus-per-node=2 --time=5 --sbatch=--nodelist=node{first},node{last} --cpus-per-node=1".split()
    )
    told = site.cluster.run(
        sys.executable, "-m", "kamui_dist.cli", "submit", site.where / "c.toml", *options, PYTHONPATH=str(ROOT)
    )
    job = Job(site.cluster, told.split()[1].rstrip(":"), site.run)
    job.ends()
    assert "x 2 = 4 process(es)" in job.log()
    return [site.run]


def case_check(site: Site) -> list[Path]:
    """The preflight on two nodes."""
    first, last = site.nodes
    options = f"--nodes=2 --ntasks-per-node=1 --gpus-per-node=2 --nodelist=node{first},node{last} --output=%x-%j.out"
    args = ("check", site.where / "c.toml", "--megabytes=1", "--slow-factor=1000")
    job = site.cluster.submit(site.where, "interactive.sh", *args, options=options, NPROC="1")
    job.ends()
    for part in (
        "DDP 2 on 2 process(es), 2 host(s)",
        f"node{last} ",
        "all-reduce",
        "parity: FSDP 2",
        "check: all is well",
    ):
        assert part in job.log(), job.log()
    assert not site.run.exists()
    return []


def case_srun(site: Site) -> list[Path]:
    """2 nodes x 2, started by srun itself."""
    job = site.submit(script="srun.sbatch", options="--ntasks-per-node=2")
    job.ends()
    return [site.run]


def case_time_limit(site: Site) -> list[Path]:
    """The real limit of a minute, twice; then the rest in one go, with a longer one: SLURM may warn a minute early, which on a busy
    machine can be before the first step, again and again."""
    site.pace(4)
    # On a busy machine the warning of so short a limit comes before the first step: no progress, and not the job's fault.
    job = site.submit(options="--time=1 --signal=USR1@15", NPROC="1", MAX_IDLE="10")
    job.requeued(2, seconds=250)
    site.pace(0)
    site.cluster.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=5")
    job.ends()
    ends = attempts(site.run)
    assert [e["verdict"] for e in ends[:2]] == ["requeue", "requeue"]
    assert all("SIGUSR1" in e["reason"] or "end of the job" in e["reason"] for e in ends[:2]), ends
    assert job.log().count("meeting at") == len(ends)  # one log for all attempts
    return [site.run]


def case_warned_srun(site: Site) -> list[Path]:
    """Without torchrun: all ranks stop at the same step, and exit code 75 of one does not kill the others."""
    site.pace(0.4)
    job = site.submit(script="srun.sbatch", options="--ntasks-per-node=1")
    job.reaches(site.run, 3)
    site.cluster.run("scancel", "--signal=USR1", job.id)
    job.requeued()
    site.pace(0)
    job.ends()
    assert "SIGUSR1" in attempts(site.run)[0]["reason"]
    return [site.run]


def case_preemption(site: Site) -> list[Path]:
    """A job of a higher partition takes the nodes."""
    site.pace(0.4)
    job = site.submit(options="--partition=low", NPROC="1")
    job.reaches(site.run, 3)
    first, last = site.nodes
    options = f"--partition=high --exclusive --time=1 --nodes=2 --nodelist=node{first},node{last} --output=high-%j.out".split()
    high = site.cluster.run("sbatch", "--parsable", f"--chdir={site.where}", *options, "--wrap=sleep 2")
    job.requeued()
    Job(site.cluster, high, site.where).ends()
    site.pace(0)
    job.ends()
    assert "SIGUSR1" in attempts(site.run)[0]["reason"]
    return [site.run]


def case_scancel(site: Site) -> list[Path]:
    """A cancelled job saves, and stays cancelled. The same command goes on from there."""
    site.pace(0.4)
    job = site.submit(NPROC="1")
    job.reaches(site.run, 3)
    site.cluster.run("scancel", job.id)
    job.ends("CANCELLED")
    status = until(lambda: (s := tiny.status(site.run))["outcome"] == "stopped" and s, "the checkpoint")
    assert status["reason"] == "SIGTERM"
    assert status["step"] in tiny.steps_saved(site.run)
    assert (job.restarts(), job.state(), attempts(site.run)) == (0, "CANCELLED", [])
    site.pace(0)
    site.submit(NPROC="1").ends()
    return [site.run]


def case_killed_rank(site: Site) -> list[Path]:
    """kill -9 of a rank: requeued, since the checkpoint has advanced."""
    site.pace(0.4)
    job = site.submit(NPROC="1")
    job.reaches(site.run, 6)
    os.kill(job.rank(1), 9)
    job.requeued()
    site.pace(0)
    job.ends()
    assert (attempts(site.run)[0]["verdict"], attempts(site.run)[0]["checkpoint"]) == ("requeue", 5)
    return [site.run]


def case_power_loss(site: Site) -> list[Path]:
    """A node dies in the middle."""
    site.pace(0.4)
    job = site.submit(NPROC="1")
    job.reaches(site.run, 6)
    site.cluster.node("kill", site.nodes[1])
    job.requeued()
    site.pace(0)
    site.cluster.node("start", site.nodes[1])
    job.ends()
    assert any(r["kind"] == "resume" and r["step"] in (5, 10) for r in records(site.run))
    return [site.run]


def case_power_loss_at_launch(site: Site) -> list[Path]:
    """A node dies as the ranks are launched on it. No progress would be the end here (MAX_IDLE): but not after a lost node."""
    job = site.submit(NPROC="1", MAX_IDLE="1")
    until(lambda: "ok: " in job.log(), lambda: job.told("the check of the config"))
    site.cluster.node("unplug", site.nodes[1])
    job.requeued()
    site.cluster.node("start", site.nodes[1])
    job.ends()
    # SLURM may notice before srun has given up, and then it requeues the job itself.
    lost = attempts(site.run)[0]
    assert "a node is lost" in lost["reason"] or "DUE TO NODE FAILURE" in job.log()
    assert lost["verdict"] == "requeue" or "DUE TO NODE FAILURE" in job.log()
    return [site.run]


def case_mistakes(site: Site) -> list[Path]:
    """What is wrong fails once: a typo; what only the ranks can see; a crash that comes back is tried a second time."""
    one = "--nodes=1"
    typo = site.submit("optim.warmup=5", "run.dir=typo", options=one, NPROC="1")
    device = site.submit("run.device=cuda", "run.dir=device", options=one, NPROC="1")
    typo.ends("FAILED")
    assert (typo.facts()["ExitCode"], typo.restarts()) == ("2:0", 0)
    assert typo.log().count("\n") == 1
    assert "optim.warmup" in typo.log()
    assert not (site.where / "typo").exists()
    device.ends("FAILED")
    assert (device.facts()["ExitCode"], device.restarts()) == ("2:0", 0), device.log()
    site.pace("crash")
    crash = site.submit("run.dir=crash", options=one, NPROC="1")
    crash.ends("FAILED")
    assert crash.restarts() == 1, crash.log()
    assert "2 attempts in a row: not requeued" in crash.log()
    return []


def case_port(site: Site) -> list[Path]:
    """The port that the job id gives is taken: the next one is."""
    job = site.submit(options="--hold", NPROC="1")
    port = 10000 + int(job.id) * 7 % 20000
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", port))
        taken.listen()
        site.cluster.run("scontrol", "release", job.id)
        job.ends()
    assert f":{port}," not in job.log()
    assert job.restarts() == 0
    return [site.run]


def case_array(site: Site) -> list[Path]:
    """Tasks of a sweep. One is warned: only that one is requeued, though its job id is that of the whole array."""
    site.pace(0.4)
    job = site.submit(script="array.sbatch", options="--nodes=1 --gpus-per-node=1 --array=0-1", RUNS="sweep")
    last = site.where / "sweep" / "1"
    job.reaches(last, 3)
    site.cluster.run("scancel", "--signal=USR1", f"{job.id}_1")
    job.requeued(task="_1")
    site.pace(0)
    for task in ("_0", "_1"):
        job.ends(task=task)
    assert (job.restarts("_0"), job.restarts("_1")) == (0, 1)
    return [site.where / "sweep" / "0", last]


# The longest first.
CASES: list[Callable[[Site], list[Path]]] = [
    case_time_limit, case_power_loss_at_launch, case_power_loss, case_one_node, case_preemption, case_mistakes, case_killed_rank,
    case_scancel, case_array, case_warned_srun, case_two_nodes, case_srun, case_port, case_check,
]  # fmt: skip
