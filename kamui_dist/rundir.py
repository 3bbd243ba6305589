"""The run directory: who may write into it, effective config, provenance, status. Rank 0 writes; what goes wrong is agreed by
all ranks. Where rank 0 has died, another one tells it."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy
import torch

from kamui_dist import __version__, config, distributed, evidence, incident, retention, signals, status, watchdog
from kamui_dist.config import Config
from kamui_dist.errors import EXIT_FINISHED, EXIT_HUNG, EXIT_STOPPED, UserError
from kamui_dist.files import write_json, write_text
from kamui_dist.lock import Lock, held_by_other
from kamui_dist.manifest import step_links
from kamui_dist.plan import Plan
from kamui_dist.retention import access
from kamui_dist.state import State

_RANK_0_SECONDS = 3.0  # in which it tells a failure that all ranks have, if it lives


_lock: Lock | None = None  # rank 0's
_ours: bool | None = None  # on all ranks: whether this start holds the run directory; None: not asked yet


def locate(cfg: Config) -> Path:
    """One directory for all ranks, whatever their working directories, and from now on for nobody else: if it is there, it is
    locked before anything in it is read or changed. Makes none. Collective. Raises UserError saying who holds it, or which of
    its checkpoints is a link."""
    path = Path(distributed.broadcast_object(str(Path(cfg.run.dir or "").absolute())))
    release()
    status.remember(path)  # no rank gets past _take, and tells of a failure, before all have
    there = False
    with distributed.together(), access(path, "used"):
        there = path.is_dir()
    if distributed.broadcast_object(there):
        _take(path)
        with distributed.together(), access(path, "used"):
            if distributed.is_main() and (links := step_links(path / "checkpoints")):
                raise UserError(
                    f"{links[0]} is a symbolic link, and a checkpoint has to be a directory; move the directory itself back "
                    "to this name, or remove the link to go on without it"
                )
    return path


def prepare(path: Path) -> None:
    """Makes the run directory, or shows that it can be written. Collective. Raises UserError on every rank alike."""
    os.umask(os.umask(0o022) | 0o022)  # whatever this process makes from now on, group and others cannot write
    with distributed.together(), access(path, "written"):
        if distributed.is_main():
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            for place in (path, path / "checkpoints"):
                probe = place / f".probe-{os.getpid()}"
                probe.touch()
                probe.unlink()
    if not _ours:
        _take(path)
    with distributed.together(), access(path, "written"):
        if distributed.is_main():
            status.reserve(path)
            watchdog.clear(path)


def _take(path: Path) -> None:
    global _lock, _ours
    _ours = False
    with distributed.together(), access(path, "locked"):
        if distributed.is_main():
            _lock = Lock(path)
    _ours = True
    status.hold(path)
    if signals.start_up is not None:
        signals.start_up.tell = functools.partial(ended_early, path)


def moved() -> str:
    """Why nothing may be written into the run directory any more, in one line: it is not there, or not this run's. "" if it is, and
    on other ranks than 0. Looks."""
    return "" if _lock is None else _lock.moved()


def seen_moved() -> bool:
    """Whether the lock's heartbeat has seen that. Costs nothing."""
    return _lock is not None and bool(_lock.gone)


def release() -> None:
    """Lets go of the run directory. May be called again, and on any rank."""
    global _lock, _ours
    if _lock is not None:
        _lock.release()
    _lock = _ours = None


def versions(device: torch.device) -> dict[str, str | None]:
    """Of what numbers can depend on; rank 0's, on all ranks. Collective."""
    told: dict[str, str | None] = distributed.broadcast_object(_versions(device) if distributed.is_main() else None)
    return told


@functools.cache
def _versions(device: torch.device) -> dict[str, str | None]:
    git = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {
        "kamui_dist": __version__, "git": git.stdout.strip() or None, "torch": torch.__version__, "numpy": numpy.__version__,
        "python": platform.python_version(), "device": _device_name(device), "cuda": torch.version.cuda,
    }  # fmt: skip


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def describe(
    path: Path, cfg: Config, device: torch.device, fingerprint: str, tokenizer: str | None, parameters: int
) -> None:
    """config.toml, provenance.json and a copy of the tokenizer: what is needed to repeat and to use the run. Collective.
    Raises UserError on every rank if there is no room for them."""
    devices = distributed.gather_objects(_device_name(device))
    with distributed.together(), access(path, "written"):
        if distributed.is_main():
            _describe(path, cfg, device, fingerprint, tokenizer, devices, parameters)


def _describe(
    path: Path, cfg: Config, device: torch.device, fingerprint: str, tokenizer: str | None, devices: list[str],
    parameters: int,
) -> None:  # fmt: skip
    write_text(path / "config.toml", config.to_toml(cfg))
    write_json(path / "provenance.json", {
        **_versions(device), "command": [sys.executable, *sys.orig_argv[1:]], "cwd": str(Path.cwd()),
        "host": platform.node(), "world_size": distributed.world_size(), "devices": devices,
        "parameters": parameters, "data_fingerprint": fingerprint, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    })  # fmt: skip
    if tokenizer is not None and Path(tokenizer).is_file():  # else "bytes", or data that do not say
        shutil.copyfile(tokenizer, path / "tokenizer.json")


def write_status(
    path: Path, outcome: str, step: int, reason: str = "", exit_code: int | None = None, requeue: bool = False
) -> None:
    """Rank 0; see status.py. What hinders it is a warning: the run is worth more."""
    if int(os.environ.get("RANK", "0")) == 0:
        try:
            status.write(path, outcome, step, reason, exit_code, requeue)
        except OSError as error:
            print(f"warning: {path / 'status.json'} was not written: {error.strerror}", file=sys.stderr, flush=True)


def close(path: Path, outcome: str, step: int, reason: str, exit_code: int, requeue: bool = False) -> None:
    """The end of an orderly run: the last status, and the directory is anybody's again. A STOP file that came when the run was over
    has what it asked for; it must not stop the one that goes on when train.steps is raised. Where the run was stopped by something
    else it stays: a scheduler may start it again, and a person has asked that it shall not run."""
    write_status(path, outcome, step, reason, exit_code, requeue)
    if outcome in ("finished", "early_stopped") and distributed.is_main() and status.is_home(path):
        with contextlib.suppress(OSError):
            (path / "STOP").unlink()
    release()


def nothing_left(path: Path, plan: Plan, state: State) -> int:
    """For a run that is over already; returns the exit code. Not "stopped": nobody shall start it again."""
    if distributed.is_main():
        how = "is finished" if state.step >= plan.steps else "was stopped early"
        print(f"nothing left to do: {path} {how} at step {state.step} of {plan.steps}")
    close(
        path,
        "finished" if state.step >= plan.steps else "early_stopped",
        state.step,
        "nothing left to do",
        EXIT_FINISHED,
    )
    distributed.stop()
    return EXIT_FINISHED


def tell_failure(cfg: Config, error: Exception) -> None:
    """What is no user's mistake, on stderr and in status.json, with where the ranks were."""
    record_failure(cfg, error, 1)  # before anything is printed: there may be nobody who reads it any more
    path = Path(cfg.run.dir or "").absolute()
    told = incident.crash(path, error, cfg) if _ours and status.is_home(path) else None
    failed = f"rank {os.environ.get('RANK', '0')} failed"
    lines = [f"{failed}: {type(error).__name__}: {error}{_where_ranks_were(cfg)}"]
    lines += [f"  {line}" for line in (evidence.advice(cfg) if incident.is_out_of_memory(error) else [])]
    lines += [f"incident: {told}"] if told else []
    with contextlib.suppress(OSError):
        print("\n".join(lines), file=sys.stderr, flush=True)
    # torchrun's summary, the last thing on stderr, ends with it
    error.add_note(failed + (f"; see {told}" if told else ""))


def record_failure(cfg: Config, error: BaseException, exit_code: int) -> None:
    """Outcome "failed", unless there is no run directory: a wrong config makes none, or leaves none. The rank that failed first
    tells the reason; what the others see later is only that it has gone."""
    path, rank = Path(cfg.run.dir or ""), int(os.environ.get("RANK", "0"))
    not_ours = _ours is False or (_ours is None and held_by_other(path))
    if isinstance(error, UserError) and _lock is not None and status.is_home(path):
        _leave_nothing(path)
    now = status.home(path)
    if now is None or not os.path.isdir(now) or not_ours:  # noqa: PTH112 - Path.is_dir raises where nobody may look
        return
    path = now
    end = time.monotonic() + (_RANK_0_SECONDS if rank and getattr(error, "agreed", False) else 0)
    while not (told := status.told(path)) and path.is_dir() and time.monotonic() < end:
        time.sleep(0.05)
    if told or not path.is_dir():
        return
    outcome, requeue = "failed", not isinstance(error, UserError)
    reason = (f"rank {rank}: " if rank else "") + (_in_words(error) or type(error).__name__).splitlines()[0]
    # torchrun had the store by which ranks meet
    if requeue and signals.start_up is not None and signals.start_up.orphan:
        outcome, reason, exit_code = "stopped", "the launcher is gone", EXIT_STOPPED
    with contextlib.suppress(OSError):  # it must not hide the error that it tells
        status.write(path, outcome, status.step(path), reason, exit_code, requeue)


def _in_words(error: BaseException) -> str:
    """What gloo says of a rank that has gone begins with a path of its own source."""
    text = str(error)
    gone = isinstance(error, RuntimeError) and "pair.cc" in text and re.search("closed by peer|reset by peer", text)
    return "another rank has gone, or its network: the connection to it broke" if gone else text


def _leave_nothing(path: Path) -> None:
    """Takes away a run directory in which there is nothing but what prepare() has just made."""
    release()
    with contextlib.suppress(OSError):
        made = {".lock", status.SPARE, "checkpoints", "heartbeat"}
        if {p.name for p in path.iterdir()} <= made and not any((path / "checkpoints").iterdir()):
            shutil.rmtree(path)


def ended_early(path: Path, outcome: str, reason: str, exit_code: int, requeue: bool) -> None:
    """In a thread, just before the end of the process. The first rank tells it."""
    with contextlib.suppress(OSError):
        if not status.told(path):
            status.write(path, outcome, status.step(path), reason, exit_code, requeue)


def hung(path: Path, text: str) -> None:
    """In the watchdog: as `ended_early`."""
    ended_early(path, "failed", text, EXIT_HUNG, requeue=True)
    told, rank = incident.hang(path, text) if status.is_home(path) else None, os.environ.get("RANK", "0")
    if told and (rank == "0" or text.startswith(f"rank {rank} ")):
        print(f"incident: {told}", file=sys.stderr, flush=True)


def _where_ranks_were(cfg: Config) -> str:
    """For the report of a failure, a line of its own: which rank is furthest behind. "" if nothing is known."""
    path, ranks = Path(cfg.run.dir or ""), int(os.environ.get("WORLD_SIZE", "1"))
    told = watchdog.who_hangs(watchdog.read_beats(path, ranks), ranks) if _ours and ranks > 1 else ""
    return f"\n{told}" if told else ""


def mend_best(path: Path, state: State) -> None:
    """At a start: best.json as the checkpoint that the run goes on from knows it. Collective."""
    with distributed.together(), access(path, "written"):
        if distributed.is_main():
            retention.mend_best(path / "checkpoints", state.best_step, state.best_val_loss)


def published(path: Path, state: State) -> None:
    """After a checkpoint: status and best.json. Rank 0. Raises OSError if best.json cannot be written; then the next one tries."""
    write_status(path, "running", state.step)
    retention.mend_best(path / "checkpoints", state.best_step, state.best_val_loss)
