"""Which checkpoints stay, which are deleted, and whether there is room for the next one.

checkpoints/step-00001000.pinned   beside the checkpoint: it is never deleted. Made and removed by hand as well
                                   (`kamui-dist inspect pin`); it survives when the step is saved again.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kamui_dist import distributed
from kamui_dist.errors import UserError
from kamui_dist.files import FULL, PASSING, write_json
from kamui_dist.history import finite_or_null
from kamui_dist.knobs import CheckpointSection, Watch
from kamui_dist.manifest import CheckpointError, check_sizes, open_checkpoint, remove, step_directories

_SLACK = 1 << 20  # of a checkpoint's size, for its manifest and what the file system keeps for itself


def pin_file(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.pinned")


def best_step(directory: Path) -> int | None:
    """The step that best.json names: of what was saved, the best by validation loss. None without a readable one."""
    step = (read_best(directory) or {}).get("step")
    return step if type(step) is int else None


def read_best(directory: Path) -> dict[str, Any] | None:
    """best.json; None without a readable one."""
    try:
        found = json.loads((directory / "best.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def mend_best(directory: Path, step: int | None, val_loss: float | None) -> None:
    """best.json as the run's state knows the best, if its checkpoint is there: a kill may have come between the two, or the file
    was not written, or is lost. Rank 0."""
    best = {"step": step, "val_loss": finite_or_null(val_loss)}
    if step is None:  # none yet, or none on what is validated on now
        (directory / "best.json").unlink(missing_ok=True)
    elif step in dict(step_directories(directory)) and read_best(directory) != best:
        write_json(directory / "best.json", best)


def prune(directory: Path, keep: int, keep_every: int, protect: set[int]) -> list[int]:
    """Deletes old checkpoints on rank 0 and returns their steps (none on other ranks). Not collective.

    Kept: the newest `keep` (0: all), multiples of `keep_every` (0: none), `protect`, and pinned ones. One whose manifest
    or sizes are wrong counts for nothing: it takes no place among the newest, and it is not deleted. A failure is only
    warned of.
    """
    if not distributed.is_main() or keep == 0:
        return []
    removed = []
    for step, path in [(step, path) for step, path in step_directories(directory) if whole(path)][:-keep]:
        if step in protect or (keep_every and step % keep_every == 0) or pin_file(path).exists():
            continue
        doomed = path.with_name(f".tmp-pruned-{path.name}")  # never half of one under a published name
        try:
            remove(doomed)
            path.rename(doomed)
            removed.append(step)
            remove(doomed)
        except OSError as error:
            print(f"warning: old checkpoint {path} was not removed: {error}", file=sys.stderr, flush=True)
    return removed


class Pruner:
    """`prune` in a thread of rank 0: deleting may take minutes, and with checkpoint.async it comes in the middle of a step, in
    which the other ranks would wait for rank 0 and take it for one that hangs."""

    def __init__(self, directory: Path, cfg: CheckpointSection, watch: Watch) -> None:
        self.directory, self.cfg, self.watch = directory, cfg, watch
        self._thread: threading.Thread | None = None

    def start(self, best: int | None) -> None:
        """After a checkpoint, on rank 0. best: the best step by the run's state. It is kept, and so is that of best.json, which is
        another where the state's was not saved, or the file not written."""
        # a daemon: what a crash leaves half deleted goes at the next start
        self._thread = threading.Thread(target=self._run, args=(self._thread, best), name="prune", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until all is deleted; at once on other ranks."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, before: threading.Thread | None, best: int | None) -> None:
        if before is not None:
            before.join()
        bests = [best, best_step(self.directory)] if self.cfg.best else []
        try:
            protect = wanted_by_rollback(
                self.watch, [step for step, path in step_directories(self.directory) if whole(path)]
            )
            protect |= {step for step in bests if step is not None}
            prune(self.directory, self.cfg.keep, self.cfg.keep_every, protect)
        except OSError as error:
            print(f"warning: no old checkpoint was deleted: {error}", file=sys.stderr, flush=True)


def wanted_by_rollback(watch: Watch, steps: list[int]) -> set[int]:
    """Of the checkpoints of `steps` the one that a rollback would go back to if a divergence were found right after the last, and
    the one after it, which will take its place; none if nothing turns a run back or stops it for what began earlier."""
    turns_back = "rollback" in watch.model_dump().values() or "stop" in (watch.on_divergence, watch.on_spike)
    if not (turns_back and steps):
        return set()
    begun = steps[-1] - watch.divergence_steps - watch.rollback_steps
    good = max((s for s in steps if s <= begun), default=steps[0])
    return {good, min((s for s in steps if s > good), default=good)}


def whole(path: Path) -> bool:
    """Whether manifest, names and sizes are right; nothing is hashed."""
    try:
        check_sizes(open_checkpoint(path))
    except (CheckpointError, OSError):
        return False
    return True


def free_bytes(directory: Path) -> int:
    """What this user may still write where `directory` is or will be. If nobody can say, a lot: the save itself will tell."""
    try:
        while not directory.exists():
            directory = directory.parent
        found = os.statvfs(directory)
    except OSError:
        return 1 << 62
    return found.f_bavail * found.f_frsize


def needed_bytes(checkpoint_bytes: int) -> int:
    """Free space without which a save of this size is not begun: 2 % and 1 MiB more."""
    return checkpoint_bytes + checkpoint_bytes // 50 + _SLACK


def _no_access(run_dir: Path, what: str, error: OSError) -> UserError:
    """One line: which file, what the system says of it, and what could be freed where that would help. what: as in "written"."""
    names = [str(name) for name in (error.filename, error.filename2) if name and str(name) != str(run_dir)]
    if error.errno not in FULL:
        why = ": ".join([*names[-1:], error.strerror or str(error)])
        return UserError(f"run.dir: {run_dir} cannot be {what}: {why}")
    return UserError(
        f"run.dir: {run_dir} cannot be {what}: the disk is full, or a quota is used up; free some of: "
        f"{what_to_free(run_dir / 'checkpoints')}"
    )


@contextlib.contextmanager
def access(run_dir: Path, what: str) -> Iterator[None]:
    """Around what a start does in the run directory: an OSError that a person has to see to becomes a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno in PASSING:
            raise
        raise _no_access(run_dir, what, error) from None


def what_to_free(directory: Path) -> str:
    """The largest things below the run directory that a user could do without, for a message."""
    held = []
    if size := directory_bytes(directory / "quarantine"):
        held.append(f"{directory / 'quarantine'} ({mebibytes(size)}: damaged ones, kept only for you to look at)")
    steps = step_directories(directory)
    if older := steps[:-1]:
        size = sum(directory_bytes(path) for _, path in older)
        numbers = ", ".join(str(step) for step, _ in older[:5]) + (", ..." if len(older) > 5 else "")
        pinned = sum(pin_file(path).exists() for _, path in older)
        held.append(
            f"checkpoints older than the newest ({mebibytes(size)}: steps {numbers}; {pinned} pinned; fewer are kept with a "
            "lower checkpoint.keep)"
        )
    held.append(f"whatever else fills the file system of {directory.absolute()}")
    return "; ".join(held)


def directory_bytes(directory: Path) -> int:
    """Of all regular files below; what vanishes meanwhile counts nothing."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(Path(folder) / name).st_size
            except OSError:
                continue
    return total


def mebibytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 10 << 30 else f"{size / 2**20:.1f} MiB"
