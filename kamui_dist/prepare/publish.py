"""A directory that appears whole or not at all: made beside its place under a lock, and renamed when it is done. No torch."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from kamui_dist import files
from kamui_dist.errors import UserError

_TEMPORARY = ".preparing"


@contextlib.contextmanager
def published(out: Path, replace: bool = False) -> Iterator[Path]:
    """A temporary directory beside `out` that becomes `out` by a rename if the body succeeds, and is removed if not.

    replace: what is at `out` then goes. What killed runs left behind is removed first; a live run holds a lock on its
    own directory. Raises OSError, and UserError if another run made `out` meanwhile.
    """
    made = _make_directories(out.parent)
    try:
        _remove_leftovers(out)
        temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.", suffix=_TEMPORARY))
        try:
            with (temporary / "lock").open("w") as lock:
                _try_lock(lock)
                inner = temporary / "data"
                inner.mkdir()
                yield inner
                if replace and os.path.lexists(out):
                    out.rename(temporary / "replaced")
                _rename(inner, out)
                files.sync_directory(out.parent)
        finally:
            if (temporary / "replaced").exists() and not os.path.lexists(out):
                (temporary / "replaced").rename(out)  # the second rename failed
            shutil.rmtree(temporary, ignore_errors=True)
    except BaseException:
        for directory in made:
            with contextlib.suppress(OSError):  # it holds something by now
                directory.rmdir()
        raise


def _rename(inner: Path, out: Path) -> None:
    try:
        inner.rename(out)  # an empty directory is replaced, any other is not
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise UserError(f"{out} was made by something else meanwhile; it stays as it is") from error
        raise


def _make_directories(directory: Path) -> list[Path]:
    """Makes `directory` and its parents; returns those that were not there, the innermost first."""
    missing = [d for d in (directory, *directory.parents) if not d.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    return missing


def _remove_leftovers(out: Path) -> None:
    for leftover in out.parent.glob(f".{out.name}.*{_TEMPORARY}"):
        with contextlib.suppress(OSError), (leftover / "lock").open("r+") as lock:
            if _try_lock(lock):
                shutil.rmtree(leftover, ignore_errors=True)


def _try_lock(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # A file system without locks: nobody's leftovers are removed then.
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        return False
    return True
