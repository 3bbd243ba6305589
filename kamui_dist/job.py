"""The scheduler's job that this process belongs to: its name, and when it ends. The one Python file that knows SLURM, since a run
has to stop in time however it was started. Imports no torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time

# A scheduler that does not answer must not keep the run from starting.
_PATIENCE_SECONDS = 20.0


def name() -> str:
    """The job for messages, "" outside of one."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"job {job}" if job else ""


def incarnation() -> tuple[str, int]:
    """(job, how often it was requeued): the same job with a higher number means that the earlier one is over."""
    try:
        return os.environ.get("SLURM_JOB_ID", ""), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    except ValueError:
        return os.environ.get("SLURM_JOB_ID", ""), 0


def torchrun() -> str:
    """The id of the torchrun that started this process; all its restarts share it. "" without one, or if it is not unique."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if run == "none" else run


def restarts() -> int:
    """How often torchrun has restarted this process's group."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def end_time() -> float | None:
    """When the job is killed, in seconds since the epoch; None if there is no job or it has no limit. Asks the scheduler only
    where the environment does not say; what goes wrong is a warning, for a run without a deadline is better than none."""
    told = os.environ.get("SLURM_JOB_END_TIME", "")
    if told.isdecimal() and int(told):
        return float(told)
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return None
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return _unknown(
            job, "there is no scontrol here (a container?); pass SLURM_JOB_END_TIME in, or set run.max_minutes"
        )
    try:
        done = subprocess.run(
            [scontrol, "show", "job", job], capture_output=True, text=True, check=False, timeout=_PATIENCE_SECONDS,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return _unknown(job, f"scontrol does not answer ({error})")
    if done.returncode:
        return _unknown(job, f"scontrol: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    found = re.search(r"\bEndTime=(\S+)", done.stdout)
    if found is None:
        return _unknown(job, "scontrol shows no EndTime")
    return _parse(found[1])


def _parse(text: str) -> float | None:
    """SLURM prints local time without a zone; "Unknown" where there is no limit."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def _unknown(job: str, why: str) -> float | None:
    print(f"warning: the end of job {job} is not known: {why}", file=sys.stderr, flush=True)
    return None
