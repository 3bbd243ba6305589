"""Whether a job goes on: the rules of slurm/README.md. Standard library only; called by common.sh.

    requeue.py begin RUN JOB ATTEMPT NODES           before the ranks start: notes the attempt
    requeue.py end RUN JOB ATTEMPT SRUN_CODE         after they ended: prints "requeue" or an exit code, and the reason

RUN/jobs.jsonl holds both, one JSON object a line. RUN/status.json, which the trainer writes, decides; torchrun hides exit codes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

# Stops that a person asked for in the run itself. (After scancel this script is not asked: the job script is dead by then.)
_BY_A_PERSON = {"SIGINT", "file STOP"}


def decide(
    status: dict[str, Any],
    srun_code: int,
    before: int | None,
    after: int | None,
    idle: int,
    max_idle: int,
    lost_node: bool,
) -> tuple[str, str]:
    """("requeue" or the exit code of the job, why).

    status: status.json if this attempt wrote it, else empty. before, after: step of the newest checkpoint at the start and at the
    end of this attempt. idle: attempts in a row without a new checkpoint, before this one. A job that could go on for ever without
    one ends after `max_idle` of them.
    """
    outcome, reason = status.get("outcome"), status.get("reason") or ""
    if outcome in ("finished", "early_stopped"):
        return "0", f"{outcome} at step {status.get('step')}"
    code = status.get("exit_code") if outcome in ("failed", "stopped") else None
    if not isinstance(code, int):
        code = srun_code
    # srun tells the exit code of a rank, torchrun does not.
    if code in (2, 70) or (outcome == "failed" and not status.get("requeue")):
        return str(code or 1), f"not requeued, it would end the same way: {reason or f'exit code {code}'}"
    if outcome == "stopped" and reason in _BY_A_PERSON:
        return "75", f"stopped on request ({reason}) at step {status.get('step')}; not requeued"
    what = (
        f"stopped at step {status.get('step')} ({reason})"
        if outcome == "stopped"
        else f"crashed ({reason or srun_code})"
    )
    if lost_node:
        return "requeue", f"a node is lost ({what}): requeued"
    at = "no checkpoint yet" if after is None else f"the newest checkpoint is still that of step {after}"
    if after != before:
        return "requeue", f"{what}, checkpoint of step {after}: requeued"
    if idle + 1 < max_idle:
        return "requeue", f"{what}; {at}: requeued, to see whether it happens again"
    return str(code or 1), f"{what}; {at}, {idle + 1} attempts in a row: not requeued"


def newest(run: Path) -> int | None:
    """The step of the newest published checkpoint."""
    names = [p.name for p in (run / "checkpoints").glob("step-*")]
    return max((int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name)), default=None)


def identity(path: Path) -> list[int] | None:
    """Tells whether a file was replaced since."""
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_ino, found.st_mtime_ns]


def read_status(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def tell_death(path: Path, status: dict[str, Any], code: int) -> None:
    """All ranks have ended, and none lived to tell it."""
    died = {"outcome": "failed", "reason": "killed: no rank lived to tell why", "requeue": True, "exit_code": code or 1}
    beside = path.with_name(f".status.json.{socket.gethostname()}.{os.getpid()}")  # nobody else's
    try:
        beside.write_text(json.dumps(status | died, indent=2) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        print(f"warning: {path} still says running: {error.strerror}", file=sys.stderr)


def read_log(path: Path) -> list[dict[str, Any]]:
    """A line that a power loss cut off is left out."""
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("event", choices=["begin", "end"])
    parser.add_argument("run", type=Path)
    parser.add_argument("job")
    parser.add_argument("attempt", type=int)
    parser.add_argument("detail", help="begin: the nodes; end: srun's exit code")
    parser.add_argument("--max-idle", type=int, default=2)
    parser.add_argument("--lost-node", action="store_true")
    args = parser.parse_args(argv)
    log, status = args.run / "jobs.jsonl", args.run / "status.json"
    entry: dict[str, Any] = {
        "event": args.event,
        "job": args.job,
        "attempt": args.attempt,
        "checkpoint": newest(args.run),
    }
    if args.event == "begin":
        entry |= {"nodes": args.detail, "status": identity(status)}
    else:
        mine = [e for e in read_log(log) if e.get("job") == args.job]
        began: dict[str, Any] = next((e for e in reversed(mine) if e.get("event") == "begin"), {})
        ended = [e for e in mine if e.get("event") == "end"]
        idle = ended[-1].get("idle", 0) if ended else 0
        fresh = read_status(status) if identity(status) != began.get("status") else {}
        if fresh.get("outcome") == "running":
            tell_death(status, fresh, int(args.detail))
        verdict, reason = decide(
            fresh, int(args.detail), began.get("checkpoint"), entry["checkpoint"], idle, args.max_idle, args.lost_node
        )
        if entry["checkpoint"] != began.get("checkpoint"):
            idle = 0
        elif not args.lost_node:
            idle += 1
        entry |= {"srun_code": int(args.detail), "idle": idle, "verdict": verdict, "reason": reason}
        print(f"{verdict}\n{' '.join(reason.split())}")
    entry["time"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
