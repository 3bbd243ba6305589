"""The exit code of a training whose torchrun has ended. Standard library only; called by common.sh.

    outcome.py STATUS_JSON IS_NEW TORCHRUN_CODE TIMES_ASKED_TO_STOP NODE_RANK NOTED

torchrun ends with 1 however its ranks ended. What they did stands in NOTED (a file: see command_line.for_launcher), or in
status.json, if that is of this start. If it still says "running", nobody lived to tell: it becomes "failed" here.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path


def main(status_json: str, is_new: str, torchrun_code: str, asked: str, node_rank: str, noted: str) -> int:
    path, code = Path(status_json), int(torchrun_code)
    if text := Path(noted).read_text(encoding="ascii") if noted else "":
        return int(text)
    if not int(is_new):
        return 75 if int(asked) == 1 else code  # asked before there was anything to tell it in
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return code or 1
    told = {"finished": 0, "early_stopped": 0, "stopped": 75}.get(status.get("outcome"), status.get("exit_code"))
    if status.get("outcome") == "running" and int(node_rank) == 0 and not lives(status.get("pid")):
        told = code or 1
        status |= {
            "outcome": "failed",
            "reason": "killed: no rank lived to tell why",
            "requeue": True,
            "exit_code": told,
        }
        beside = path.with_name(f".status.json.{socket.gethostname()}.{os.getpid()}")  # nobody else's
        try:
            beside.write_text(json.dumps(status, indent=2) + "\n", encoding="utf-8")
            beside.replace(path)
        except OSError as error:
            print(f"warning: {path} still says running: {error.strerror}", file=sys.stderr)
    return told if isinstance(told, int) else code or 1


def lives(pid: object) -> bool:
    """Of rank 0: torchrun may have been killed, and its ranks are about to stop by themselves."""
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
