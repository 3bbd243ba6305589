"""RUN/status.json, which scripts read since torchrun hides exit codes. It can be told on a full disk too: it is written over the
bytes of a file that was made while there was room (.status.spare), which then takes its name.

    {"outcome": "running" | "finished" | "early_stopped" | "stopped" | "failed", "step", "reason", "requeue", "exit_code", "pid",
     "restarts"}        requeue: running the same command again will help
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from kamui_dist import job
from kamui_dist.files import is_another, sync_directory, where

SPARE = ".status.spare"
_SPARE_BYTES = 4096
_STARTED = time.time()
_found: tuple[Path, tuple[int, int] | None] | None = None  # by `remember`
_held: tuple[Path, int] | None = None  # by `hold`


def hold(run_dir: Path) -> None:
    """On each rank: from now on the run directory is known by more than its name."""
    global _held
    if _held is not None:
        os.close(_held[1])
    _held = None
    with contextlib.suppress(OSError):  # another node may not see yet what rank 0 has just made
        _held = run_dir.absolute(), os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)


def home(run_dir: Path) -> Path | None:
    """Where the run directory is: it may have been moved away, and another one may have its name. None if it was removed."""
    if _held is None or _held[0] != run_dir.absolute() or not is_another(run_dir, _held[1]):
        return run_dir
    return where(_held[1])


def is_home(run_dir: Path) -> bool:
    """Whether what is written into `run_dir` goes where it belongs."""
    return home(run_dir) == run_dir


def reserve(run_dir: Path) -> None:
    """Makes the spare file, and removes what killed processes have left. Raises OSError if there is no room, or a directory has
    the name of the file."""
    if (run_dir / "status.json").is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(run_dir / "status.json"))
    for path in [*run_dir.glob(".status.json.*"), *run_dir.glob(f"{SPARE}.*")]:
        path.unlink(missing_ok=True)
    _make_spare(run_dir)


def write(run_dir: Path, outcome: str, step: int, reason: str, exit_code: int | None, requeue: bool) -> None:
    """On any rank; several at once do no harm. Goes with a directory that is moved, and nowhere if it is removed."""
    if (now := home(run_dir)) is None:
        return
    run_dir = now
    status = {
        "outcome": outcome, "step": step, "reason": reason, "requeue": requeue, "exit_code": exit_code, "pid": os.getpid(),
        "restarts": job.restarts(),
    }  # fmt: skip
    mine = run_dir / f".status.json.{_me()}"
    with contextlib.suppress(FileNotFoundError):
        (run_dir / SPARE).rename(mine)  # one rank alone gets it
    with open(mine, "r+b" if mine.exists() else "wb") as file:  # noqa: PTH123
        file.write((json.dumps(status, indent=2, allow_nan=False) + "\n").encode())
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    mine.rename(run_dir / "status.json")
    sync_directory(run_dir)
    with contextlib.suppress(OSError):  # on a full disk there is room for it just now: what the old status had
        _make_spare(run_dir)


def _make_spare(run_dir: Path) -> None:
    """Under a name of its own at first: else another rank could take it while it is written, and write its status into it."""
    mine = run_dir / f"{SPARE}.{_me()}"
    try:
        mine.write_bytes(bytes(_SPARE_BYTES))
        mine.rename(run_dir / SPARE)
    except OSError:
        mine.unlink(missing_ok=True)
        raise


def _me() -> str:
    return f"{socket.gethostname()}.{os.getpid()}"  # ranks of two nodes may have the same pid


def remember(run_dir: Path) -> None:
    """On each rank, when a start comes to the run directory: the status that is there is an earlier start's."""
    global _found
    _found = run_dir.absolute(), _identity(run_dir)


def told(run_dir: Path) -> bool:
    """Whether a rank of this start has told how the run ends: the status is another than `remember` found, for a file server's
    clock need not be ours. Before that, whether it is younger than this process."""
    if _found is not None and _found[0] == run_dir.absolute():
        fresh = _identity(run_dir) not in (None, _found[1])
    else:
        fresh = (_identity(run_dir) or (0, 0))[1] >= _STARTED * 1e9
    return fresh and _read(run_dir).get("outcome") not in (None, "running")


def _identity(run_dir: Path) -> tuple[int, int] | None:
    """Of status.json: every write makes a new file. None without one."""
    try:
        found = (run_dir / "status.json").stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def step(run_dir: Path) -> int:
    """As the last status has it; 0 without one."""
    found = _read(run_dir).get("step")
    return found if isinstance(found, int) else 0


def _read(run_dir: Path) -> dict[str, Any]:
    try:
        found = json.loads((run_dir / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
