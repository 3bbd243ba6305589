"""The scheduler's jobs of a run: RUN/jobs.jsonl, and what squeue says of them. Imports no torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

_PATIENCE_SECONDS = 20.0  # a busy controller


def log(run_dir: Path) -> list[dict[str, Any]]:
    """What `kamui-dist submit` and the job scripts noted, oldest first. A line that a crash cut short is left out."""
    path, entries = run_dir / "jobs.jsonl", []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def known(run_dir: Path) -> list[str]:
    """Their numbers, the newest first."""
    return list(dict.fromkeys(str(e["job"]) for e in reversed(log(run_dir)) if e.get("job")))


def note(run_dir: Path, job: str) -> None:
    """Remembers a submission: the job may wait for days before its script writes anything."""
    with (run_dir / "jobs.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": "submit", "job": job, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}) + "\n")


def state(job: str) -> str:
    """For people: "running for 1:02:03 of 1-00:00:00 on node[1-2]", "pending (Priority)"; "" if it is over, unknown, or if
    nobody can be asked here."""
    squeue = shutil.which("squeue")
    if squeue is None:
        return ""
    try:
        done = subprocess.run(
            [squeue, "--noheader", f"--jobs={job}", "--format=%T|%M|%l|%R"], capture_output=True, text=True, check=False,
            timeout=_PATIENCE_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return ""
    name, used, limit, where = (lines[0].split("|", 3) + [""] * 3)[:4]
    if name in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"):
        return ""
    return (
        f"{name.lower()} for {used} of {limit} on {where}" if name == "RUNNING" else f"{name.lower()} {where}".strip()
    )
