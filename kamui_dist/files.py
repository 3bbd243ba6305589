"""Files that are either whole or not there: written beside, flushed to disk, renamed into place."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

FULL = {errno.ENOSPC, errno.EDQUOT}


def write_text(path: Path, text: str) -> None:
    """Replaces `path` by `text` in one step; after a crash the old content or the new one is there, never a part. Not writable for
    group and others."""
    beside = path.with_name(f".{path.name}.tmp")
    with open(beside, "w", encoding="utf-8", opener=_for_all_to_read) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    sync_directory(path.parent)


def _for_all_to_read(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


class Appender:
    """A file that text is appended to. Raises OSError only for a file that cannot be opened at first for another reason
    than a full disk; what a full disk does not take waits in memory and goes with the next text that it does take. Tells so
    once, on stderr."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = b""
        self._told = False
        self._fd: int | None = None
        try:
            self._open()
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._tell(error)

    def write(self, text: str) -> None:
        self._waiting += text.encode()
        try:
            fd = self._open()
            while self._waiting:
                self._waiting = self._waiting[os.write(fd, self._waiting) :]
        except OSError as error:
            self._tell(error)

    def sync(self) -> None:
        """To disk, if the disk takes it."""
        self.write("")
        try:
            os.fsync(self._open())
        except OSError as error:
            self._tell(error)

    def close(self) -> None:
        self.write("")
        if self._fd is not None:
            os.close(self._fd)

    def _open(self) -> int:
        if self._fd is None:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        return self._fd

    def _tell(self, error: OSError) -> None:
        if not self._told:
            print(f"warning: {self.path}: {error.strerror}; lines wait in memory", file=sys.stderr, flush=True)
        self._told = True


def sync_directory(path: Path) -> None:
    """A rename is on disk only when its directory is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
