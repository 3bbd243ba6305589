"""What is taken out of the records of a run when it goes back to an earlier step, and at what cost."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kamui_dist import files
from kamui_dist.history import forget_after, read_records


def write(path: Path, records: list[dict[str, Any]], end: str = "") -> list[dict[str, Any]]:
    path.write_text("".join(json.dumps(r) + "\n" for r in records) + end)
    return records


def steps(*numbers: int) -> list[dict[str, Any]]:
    return [{"kind": "step", "step": n} for n in numbers]


def test_a_validation_that_is_made_up_for_is_not_told_twice(tmp_path: Path) -> None:
    """The run was killed between the validation and the save that follows: it is done again, with what it has found."""
    path = tmp_path / "metrics.jsonl"
    stays: list[dict[str, Any]] = [
        {"kind": "start", "step": 0}, *steps(1, 2), {"kind": "eval", "step": 1}, {"kind": "sample", "step": 1},
        {"kind": "detail", "step": 2}, {"kind": "checkpoint", "step": 2}, {"kind": "end", "step": 2}, {"kind": "resume", "step": 2},
    ]  # fmt: skip
    again = [{"kind": "eval", "step": 2, "set": name, "eval_seconds": 0.5} for name in ("val", "news")]
    write(path, [*stays, *again, {"kind": "sample", "step": 2}])
    assert forget_after(path, 2) == (0, 0.0)
    assert len(read_records(path)) == len(stays) + 3
    assert forget_after(path, 2, evaluates=True) == (0, 1.0)
    assert read_records(path) == stays

    found = tmp_path / "findings.jsonl"
    stays = [
        {"kind": "spike", "step": 2, "action": "warn", "message": "loss 9."},
        {"kind": "non-finite", "step": 2, "action": "skip", "message": "loss nan: update skipped on all ranks."},
        {"kind": "overfitting", "step": 1, "action": "warn", "message": "validation loss 2."},
        {"kind": "overfitting", "step": 2, "action": "rollback", "message": "validation loss 3."},
    ]
    again = [
        {"kind": "overfitting", "step": 2, "action": "warn", "message": "validation loss 3."},
        {"kind": "non-finite", "step": 2, "action": "warn", "message": "validation loss nan."},
    ]
    write(found, stays + again)
    forget_after(found, 2, evaluates=True)
    assert read_records(found) == stays


class NoRoom:
    """A file system on which nothing can be begun any more; what is there can be made shorter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        monkeypatch.setattr("kamui_dist.history.write_text", self.write_text)

    def write_text(self, *_: object) -> None:
        self.asked += 1
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_in_which_all_stays_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = NoRoom(monkeypatch), tmp_path / "metrics.jsonl"
    write(path, steps(1, 2, 3))
    os.utime(path, ns=(0, 0))
    before = path.stat()
    assert forget_after(path, 3) == (0, 0.0)
    assert forget_after(path, 9) == (0, 0.0)
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (before.st_ino, 0, before.st_size)
    assert disk.asked == 0


@pytest.mark.parametrize("end", ["", '{"kind": "step", "st', '\n{"kind": "step", "step": 5'])
def test_a_file_that_only_loses_its_end_needs_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """As after a kill: updates since the checkpoint, and a line that was cut short."""
    disk, path = NoRoom(monkeypatch), tmp_path / "metrics.jsonl"
    write(path, steps(1, 2, 3, 4), end)
    assert forget_after(path, 2) == (2, 0.0)
    assert path.read_text() == "".join(json.dumps(r) + "\n" for r in steps(1, 2))
    assert disk.asked == 0
    write(path, steps(1, 2), end)
    assert forget_after(path, 2) == (0, 0.0)
    assert path.read_text() == "".join(json.dumps(r) + "\n" for r in steps(1, 2))


def test_where_there_is_no_room_all_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    records = write(path, [*steps(1, 2), {"kind": "resume", "step": 1}])  # which stays: more than the end has to go
    before, fsync = path.read_bytes(), os.fsync

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        forget_after(path, 1)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path], "no part of a new one is left"
    monkeypatch.setattr(files.os, "fsync", fsync)
    assert forget_after(path, 1) == (1, 0.0)
    assert read_records(path) == [records[0], records[2]]
