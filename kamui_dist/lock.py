"""One writer to a run directory. Imports no torch.

    RUN/.lock        locked through the kernel (fcntl) as long as the holder lives, where the file system can do that
    RUN/lock.json    who holds it; touched every few seconds, so that other machines see that the holder lives

The run directory itself may be moved, removed or replaced while it is trained in. Then its name is no longer ours to write to:
`Lock.moved` tells so, and the heartbeat looks too.

A lock that was left behind must not keep a run from going on, and a second start must not write into a run that is alive:
- the kernel's lock is held: somebody lives;
- the same machine: the process is there, with the same start time (numbers are used again), or it is not; and it holds this
  directory, of which this one may be a copy (cp -r);
- another machine: its file is touched, or has not been for STALE_SECONDS, by the file system's clock (it may be wrong) or by ours;
- the same torchrun (a restart in place), or the same job requeued: what held the lock is over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from kamui_dist import job
from kamui_dist.errors import UserError
from kamui_dist.files import is_another, where, write_json

TOUCH_SECONDS = 10.0
AGAIN_SECONDS = 1.0  # a file server may give a wrong answer, once
STALE_SECONDS = 120.0
DYING_SECONDS = 3.0

_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class Lock:
    """Held from the constructor until `release`, or until the process dies.

    Raises UserError, saying who holds it, if another process lives that does; OSError if the directory cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path, self.file = run_dir / "lock.json", run_dir / ".lock"
        self.handle = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o644)
        self.token = uuid.uuid4().hex
        self.gone = ""  # what the heartbeat has seen, as `moved`
        self.looks = threading.Lock()  # the heartbeat and the loop both do
        try:
            kernel = _acquire(run_dir, self.path, self.handle)
            self.directory = _identity(run_dir)
            taken = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            self.holder = {**_me(), "directory": self.directory, "token": self.token, "taken": taken}
            write_json(self.path, self.holder)
            self.steady = not is_another(self.file, self.handle)  # else this file system's numbers tell nothing
            if kernel is None:  # two that found it free at once: the later file counts
                time.sleep(1.0)
                if (_read(self.path) or {}).get("token") != self.token:
                    raise UserError(_told(run_dir, _read(self.path)))
        except BaseException:
            os.close(self.handle)
            raise
        self.released = threading.Event()
        self.thread = threading.Thread(target=self._touch, name="kamui-lock", daemon=True)
        self.thread.start()

    def release(self) -> None:
        """May be called again."""
        if self.released.is_set():
            return
        self.released.set()
        self.thread.join(5)
        path = self.path if (found := where(self.handle)) is None else found.with_name("lock.json")
        if (_read(path) or {}).get("token") == self.token:
            path.unlink(missing_ok=True)
        os.close(self.handle)  # frees the kernel's lock; the file stays, or two could lock two files of one name

    def moved(self) -> str:
        """What has become of the run directory, in one line, if RUN/.lock is not the file that is locked here; else "". Looks.
        Where only the file is gone (something cleans up old files) it is made and locked again."""
        with self.looks:
            return self._moved()

    def _moved(self) -> str:
        if not (self.steady and is_another(self.file, self.handle)):
            return ""
        time.sleep(AGAIN_SECONDS)
        if not is_another(self.file, self.handle):
            return ""
        run_dir, now = self.file.parent, where(self.handle)
        if self.directory == _identity(run_dir):
            return "" if self._taken_again() else (
                f"run.dir: {self.file} was removed while the run trained, and another process has it now; the run ends without a "
                "checkpoint; the same command goes on from the newest one"
            )  # fmt: skip
        found = "" if now is None else f" (it is {now.parent} now: move it back)"
        return (
            f"run.dir: {run_dir} was moved, removed or replaced while it trained{found}; the run ends without a checkpoint; the "
            "same command goes on from the newest one that it finds there, and begins anew where there is none"
        )

    def _taken_again(self) -> bool:
        """Whether .lock could be made anew. False if somebody else has it; but a second start, which will be refused, lets go."""
        end, handle = time.monotonic() + 2 * DYING_SECONDS, os.open(self.file, os.O_RDWR | os.O_CREAT, 0o644)
        while (held := _lock(handle) is False) and time.monotonic() < end:
            time.sleep(0.1)
        if held or (_read(self.path) or self.holder).get("token") != self.token:
            os.close(handle)
            return False
        os.close(self.handle)
        self.handle = handle
        write_json(self.path, self.holder)
        return True

    def _touch(self) -> None:
        while not self.released.wait(TOUCH_SECONDS):
            self.gone = self.moved()
            if self.gone:
                continue  # the loop ends the run at its next step, on all ranks
            found = _read(self.path)
            if found is not None and found.get("token") != self.token and not self.released.is_set():
                # This process was taken for dead (asleep, or cut off from the file system). The other one has the run now.
                print(f"error: {_told(self.path.parent, found)}; this process ends", file=sys.stderr, flush=True)
                os._exit(1)
            with contextlib.suppress(OSError):
                os.utime(self.handle)  # neither is to look like an old file
                if found is None and not self.path.exists() and not self.released.is_set():
                    write_json(self.path, self.holder)
                os.utime(self.path)


def refuse_if_held(run_dir: Path) -> None:
    """Raises UserError if a living process surely holds the lock. Takes nothing, changes nothing, waits for nothing."""
    holder = _read(run_dir / "lock.json")
    if holder is not None and _lives_here(holder) and not _is_over(holder) and not _is_elsewhere(holder, run_dir):
        raise UserError(_told(run_dir, holder))


def held_by_other(run_dir: Path) -> bool:
    """Whether a living process of this machine holds the lock, and belongs to another start than this one."""
    try:
        refuse_if_held(run_dir)
    except UserError:
        holder = _read(run_dir / "lock.json") or {}
        return not holder.get("torchrun") or holder["torchrun"] != job.torchrun()
    return False


def _me() -> dict[str, Any]:
    name, requeued = job.incarnation()
    return {"host": platform.node(), "machine": _machine(), "pid": os.getpid(), "process_started": _process_start(os.getpid()),
            "job": name, "requeued": requeued, "torchrun": job.torchrun(), "restarts": job.restarts()}  # fmt: skip


def _acquire(run_dir: Path, path: Path, handle: int) -> bool | None:
    """As `_lock`, but for False: UserError. A process that was just killed needs a moment to let go of what it holds."""
    end = time.monotonic() + DYING_SECONDS
    while True:
        try:
            kernel = _lock(handle)
            if kernel is False:
                raise UserError(_told(run_dir, _read(path)))
            if not (kernel and _is_elsewhere(_read(path), run_dir)):
                _wait_for_the_dead(run_dir, path, handle)
            return kernel
        except UserError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)


def _wait_for_the_dead(run_dir: Path, path: Path, handle: int) -> None:
    """Returns when nobody holds the lock any more; raises UserError as soon as it is sure that somebody does."""
    told = False
    touched: float | None = None
    began = time.monotonic()
    while (holder := _read(path)) is not None and not _is_over(holder):
        if holder.get("machine") == _machine():
            if _lives_here(holder):
                raise UserError(_told(run_dir, holder))
            return
        try:
            with path.open() as file:  # opened, and not only asked for: NFS looks again then
                seen = os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return
        os.utime(handle)  # the clock of the file system, which is the one that `seen` was read from
        age = os.fstat(handle).st_mtime - seen
        if touched is not None and seen != touched:
            raise UserError(_told(run_dir, holder))
        if max(age, time.monotonic() - began) > STALE_SECONDS:
            return
        touched = seen
        if not told:
            told = True
            wait = f"waiting up to {STALE_SECONDS - max(0.0, age):.0f} s to see whether it lives"
            print(f"{_told(run_dir, holder)}; {wait}", file=sys.stderr, flush=True)
        time.sleep(min(1.0, TOUCH_SECONDS / 4))


def _is_over(holder: dict[str, Any]) -> bool:
    """A holder that cannot live, whatever its file says, for this process would not have been started."""
    name, requeued = job.incarnation()
    if name and holder.get("job") == name and int(holder.get("requeued") or 0) < requeued:
        return True
    if holder.get("pid") == os.getpid() and holder.get("process_started") == _process_start(os.getpid()):
        return holder.get("machine") == _machine()  # this very process, in an earlier run
    same = bool(job.torchrun()) and holder.get("torchrun") == job.torchrun()
    # Restarts are counted by each node for itself, so that after a failure the number can be the same.
    return same and not _lives_here(holder)


def _is_elsewhere(holder: dict[str, Any] | None, run_dir: Path) -> bool:
    """Whether the file is that of a process of this machine which holds another directory: this one is a copy. (The same directory
    with another .lock is none: somebody has removed the file.)"""
    known = (holder or {}).get("directory")
    return bool(known) and (holder or {}).get("machine") == _machine() and known != _identity(run_dir)


def _identity(run_dir: Path) -> list[int] | None:
    """Of the directory, whatever its name."""
    with contextlib.suppress(OSError):
        return [(found := run_dir.stat()).st_dev, found.st_ino]
    return None


def _lives_here(holder: dict[str, Any]) -> bool:
    """False for a process of another machine, too."""
    pid = holder.get("pid")
    if holder.get("machine") != _machine() or not isinstance(pid, int):
        return False
    started = _process_start(pid)
    return started is not None and started == holder.get("process_started")


def _told(run_dir: Path, holder: dict[str, Any] | None) -> str:
    who = "another process"
    if holder:
        work = f", job {holder['job']}" if holder.get("job") else ""
        who = f"process {holder.get('pid')} on {holder.get('host')}{work}, since {holder.get('taken')}"
    return f"run.dir: {run_dir} is in use by {who}; stop that one, or choose another run.dir"


def _lock(handle: int) -> bool | None:
    """True: the kernel's lock is ours. False: another process has it. None: this file system has no locks.

    fcntl's and not flock: it is not inherited by children, which may outlive a killed trainer."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS_HERE:
            return None
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _machine() -> str:
    """Where a process number means something: this boot of this machine, and this container."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return platform.node()


def _process_start(pid: int) -> int | None:
    """In clock ticks since boot; None if there is no such process, or it is dead and only not yet waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None if Path("/proc/self/stat").exists() else _is_there(pid)
    return None if fields[0] in "ZX" else int(fields[19])


def _is_there(pid: int) -> int | None:
    """Without /proc: all that can be asked."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0
