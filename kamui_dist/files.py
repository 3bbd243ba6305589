"""Files that are either whole or not there: written beside, flushed to disk, renamed into place. And what an open file tells that
its name does not: whether it is still the same one."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

FULL = {errno.ENOSPC, errno.EDQUOT}
# What may be over when the same command is started again: a device or a file server in trouble. Anything else (rights, a directory
# in place of a file, no room) a person has to see to.
PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN, errno.ECONNRESET, errno.EAGAIN, errno.EINTR,
           errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENODEV, errno.ENXIO}  # fmt: skip
_MANY_BYTES = 1 << 20


def write_text(path: Path, text: str) -> None:
    """Replaces `path` by `text` in one step; after a crash the old content or the new one is there, never a part. Not writable for
    group and others."""
    beside = path.with_name(f".{path.name}.tmp")
    with open(beside, "w", encoding="utf-8", opener=_for_all_to_read) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            beside.rename(path)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()  # on a full disk it would be in the way of what is more important
            raise
    sync_directory(path.parent)


def _for_all_to_read(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


class Appender:
    """A file that text is appended to, in whole lines. What it does not take (the disk is full, ...) waits in memory and goes with
    the next text that it does take; told once, on stderr. Raises OSError only if it cannot be opened at first, for another reason
    than a full disk, and not even then if `patient`.

    Somebody may replace the file (sed -i, mv, an editor), cut it or take it away. So at every `sync` the file of this name has to
    end with what was written since the last one. If it does not, those of these lines that are not in it are written again, to that
    file: none is lost, and none is there twice. key: what makes a line this line, though its text was changed. ours: whether the
    directory of that name is the one that it was; in another one no file is opened.
    """

    def __init__(
        self, path: Path, patient: bool = False, key: Callable[[bytes], Hashable] = lambda line: line,
        ours: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        self.path, self.key, self.ours = path, key, ours
        self._waiting = b""
        self._recent = b""  # written since the last look
        self._told: set[str] = set()
        self._fd: int | None = None
        try:
            self._open()
        except OSError as error:
            if not (patient or error.errno in FULL):
                raise
            self._tell(f"{error.strerror}; lines wait in memory")

    def write(self, text: str) -> None:
        self._waiting += text.encode()
        try:
            fd = self._open()
            while self._waiting:
                done = os.write(fd, self._waiting)
                self._recent, self._waiting = self._recent + self._waiting[:done], self._waiting[done:]
        except OSError as error:
            self._tell(f"{error.strerror}; lines wait in memory")
        if len(self._recent) > _MANY_BYTES:
            self._look()

    def sync(self) -> None:
        """To disk, if the disk takes it."""
        self.write("")
        self._look()
        try:
            os.fsync(self._open())
        except OSError as error:
            self._tell(f"{error.strerror}; lines wait in memory")

    def close(self) -> None:
        self.write("")
        self._look()
        if self._fd is not None:
            os.close(self._fd)

    def _look(self) -> None:
        """Whether the file of this name is the one that was written to, and still has what was."""
        if self._fd is None or not self.ours():
            return
        try:
            there = self._changed(self._fd)
        except OSError as error:  # no proof of anything
            self._tell(f"{error.strerror}: whether it is still the file that the run writes is not known")
            return
        if there is None:
            self._recent = b""
            return
        whole, newline, part = self._recent.rpartition(b"\n")  # a full disk may have cut a line, whose rest is waiting
        lines = (whole + newline).splitlines(keepends=True)
        another, lost, kept = is_another(self.path, self._fd), self._missing(lines, there), len(there)
        if lost and not (another or part):
            for line in reversed(lines):  # cut in place: what was written since comes after what is written again
                if there[kept - len(line) : kept] != line:
                    break
                kept -= len(line)
            os.ftruncate(self._fd, kept)
        os.close(self._fd)
        self._fd = None
        end = b"\n" if kept and there[kept - 1 : kept] != b"\n" else b""
        self._waiting = end + b"".join(self._missing(lines, there[:kept])) + part + self._waiting
        self._recent = b""
        if lost or another:
            again = f"; {len(lost)} line(s) that it did not have were written to it again" if lost else ""
            self._tell(f"it was replaced, cut or removed while the run wrote it{again}")
        self.write("")

    def _missing(self, lines: list[bytes], there: bytes) -> list[bytes]:
        known = {self.key(line) for line in there.splitlines(keepends=True)}
        return [line for line in lines if self.key(line) not in known]

    def _changed(self, fd: int) -> bytes | None:
        """None if nothing has happened; else what is in the file of this name now, b"" if there is none."""
        try:
            with self.path.open("rb") as file:
                if os.path.samestat(os.fstat(file.fileno()), os.fstat(fd)):
                    file.seek(max(0, os.fstat(fd).st_size - len(self._recent)))
                    if file.read() == self._recent:
                        return None
                    file.seek(0)
                return file.read()
        except FileNotFoundError:
            return b""

    def _open(self) -> int:
        if self._fd is None:
            if not self.ours():
                raise FileNotFoundError(errno.ENOENT, "its directory was moved away")
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        return self._fd

    def _tell(self, what: str) -> None:
        kind = what.partition(";")[0]
        if kind not in self._told:
            print(f"warning: {self.path}: {what}", file=sys.stderr, flush=True)
        self._told.add(kind)


def is_another(path: Path, handle: int) -> bool:
    """Whether `path` is surely not the name of the open file `handle`. Where nobody can say (a file server is away) it is."""
    try:
        return not os.path.samestat(path.stat(), os.fstat(handle))
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


def where(handle: int) -> Path | None:
    """Where an open file or directory is now; None if it was removed, or the system does not tell."""
    try:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        return None if is_another(path, handle) else path
    except OSError:
        return None


def sync_directory(path: Path) -> None:
    """A rename is on disk only when its directory is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
