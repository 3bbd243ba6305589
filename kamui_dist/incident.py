"""What is needed to understand why a run ended or turned back: RUN/incidents/step-00000123-divergence/. Imports no torch.

    report.txt        what happened, likely cause, what to do; when and where, versions; how to go on
    records.jsonl     the last 200 records of metrics.jsonl           findings.jsonl   the last 200 findings
    layers.json       the last look into the layers, if there was one
    windows.json      what every rank trained on in this step, and the loss of each sequence     (of a finding, see worst.py)
    worst.txt         the text of the sequences with the highest loss                            (of a finding)
    stacks.txt        all threads of the rank that wrote this, an error's traceback, and what a hang left in RUN/stacks
    memory.txt        of the process, the machine, the file system and CUDA's allocator
    config.toml, provenance.json

Of a finding all ranks tell together (worst.py). Of a crash or a hang one rank tells alone, by the functions here: no
collective, nothing that waits for a device. The directory is made aside and renamed when it is whole. What hinders that is one
line on stderr, and hinders nothing else. The first directory of a run and its 9 newest are kept.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import platform
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from kamui_dist import evidence, status
from kamui_dist.evidence import ALONE, Files, Section
from kamui_dist.files import sync_directory
from kamui_dist.findings import Finding
from kamui_dist.knobs import Config

KEPT = 10
PATIENCE_SECONDS = 20.0  # a file system that hangs must not keep a failed process alive
_STALE_SECONDS = 3600.0  # after which a directory that is not whole is what a killed process left
_STARTED = time.time()


def worth(findings: Iterable[Finding], first_non_finite: bool) -> Finding | None:
    """The finding of a step that all ranks write an incident for: one that ends or turns back the run, or the first non-finite
    update of a row. The caller says whether it is that one (and no search of the fp16 scale, in which the loss is finite).
    """
    listed = list(findings)
    grave = [f for f in listed if f.action in ("stop", "rollback")]
    return next(iter(grave + [f for f in listed if f.kind == "non-finite" and first_non_finite]), None)


def crash(run_dir: Path, error: BaseException, cfg: Config | None = None) -> Path | None:
    """After an exception that ends the run. Returns the directory, which another rank may have made; None if there is none.
    Never raises. With `cfg` a lack of memory is answered with what would free some."""
    if getattr(error, "agreed", False) and evidence.rank():
        return None  # all ranks have it: rank 0 tells it
    return patiently(lambda: _crash(run_dir, error, cfg))


def hang(run_dir: Path, text: str) -> Path | None:
    """In the watchdog, before it ends the process. `text` says which rank is behind. Else as `crash`."""
    return patiently(lambda: _hang(run_dir, text))


def is_out_of_memory(error: BaseException) -> bool:
    """Of a CUDA device (torch's OutOfMemoryError, or the driver's error) or of the host."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and bool(re.search("out of memory|you tried to allocate", str(error)))


def _crash(run_dir: Path, error: BaseException, cfg: Config | None) -> Path | None:
    if told := _told(run_dir):
        return told
    step, files = evidence.collect(run_dir)
    files["stacks.txt"] = "".join(traceback.format_exception(error)) + "\n" + files["stacks.txt"]
    message = f"rank {evidence.rank()}: {type(error).__name__}: {(str(error) or '(no message)').splitlines()[0]}"
    sections: list[Section] = [("the ranks", [evidence.where_ranks_are(run_dir)])]
    if is_out_of_memory(error):
        sections += [
            ("what frees memory", evidence.advice(cfg)),
            ("the allocator's history", evidence.memory_history(run_dir, cfg)),
        ]
        cause = "weights, optimizer, activations and logits need more than there is."
        finding = Finding("out-of-memory", step, message, cause, "see below what frees memory.", "stop")
    else:
        advice = "if it is not your model's or your data's, report it with this directory."
        finding = Finding("crash", step, message, "see the traceback in stacks.txt.", advice, "stop")
    return publish(run_dir, finding, files | {"report.txt": evidence.report(run_dir, finding, sections)})


def _hang(run_dir: Path, text: str) -> Path | None:
    if told := _told(run_dir):
        return told
    step, files = evidence.collect(run_dir, cuda=False)  # the thread that hangs may hold the allocator's lock
    for path in sorted((run_dir / "stacks").glob("rank-*.txt"))[:64]:
        if path.stat().st_mtime >= _STARTED:
            files["stacks.txt"] += f"\n==== {path.name}\n{path.read_text(encoding='utf-8', errors='replace')}"
    finding = Finding(
        "hang", step, f"no progress: {text}.", "a rank that waits for what never comes; stacks.txt has the line of each.",
        "the same command again goes on; if it comes back at the same rank, leave its node out.", "stop",
    )  # fmt: skip
    return publish(run_dir, finding, files | {"report.txt": evidence.report(run_dir, finding, [])})


def patiently(write: Callable[[], Path | None]) -> Path | None:
    """What `write` returns; None, and a line on stderr, if it raises or takes too long. In a thread, which is then left behind."""
    made: list[Path | None] = []

    def run() -> None:
        try:
            made.append(write())
        except Exception as error:  # the failure that this was to tell must be told all the same
            made.append(None)
            _tell(f"{type(error).__name__}: {error}")

    try:
        thread = threading.Thread(target=run, name="kamui-incident", daemon=True)
        thread.start()
        thread.join(PATIENCE_SECONDS)
    except Exception as error:  # no thread can be started where memory has run out
        _tell(f"{type(error).__name__}: {error}")
    if not made:
        _tell(f"not written within {PATIENCE_SECONDS:.0f} s")
    return made[0] if made else None


def publish(run_dir: Path, finding: Finding, files: Files) -> Path | None:
    """The directory, with a number added if it exists already. None and a line on stderr if it cannot be written, or
    another directory has the name of the run's."""
    root, name = run_dir / "incidents", f"step-{finding.step:08d}-{finding.kind}"
    aside = root / f".{name}-{platform.node()}-{os.getpid()}"
    try:
        if not status.is_home(run_dir):
            raise FileNotFoundError(errno.ENOENT, "moved away", str(run_dir))
        root.mkdir(exist_ok=True)
        aside.mkdir(exist_ok=True)
        for file, text in files.items():
            with (aside / file).open("w", encoding="utf-8", errors="backslashreplace") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
        sync_directory(aside)
        target = _rename(aside, root / name, once=finding.kind in ALONE)
        sync_directory(root)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        _tell(f"{root / name}: {error.strerror or error}")
        return None
    with contextlib.suppress(OSError):  # another rank may be at it too
        _forget(root)
    return target


def _rename(aside: Path, target: Path, once: bool) -> Path:
    """A rename onto a directory that is not empty fails, so of several ranks that do this at once one is the first."""
    for number in itertools.count(1):
        numbered = target if number == 1 else target.with_name(f"{target.name}-{number}")
        try:
            aside.rename(numbered)
            return numbered
        except OSError:
            if not numbered.is_dir():
                raise
            if once and numbered.stat().st_mtime >= _STARTED:
                shutil.rmtree(aside)
                return numbered
    raise AssertionError("count() has no end")


def _forget(root: Path) -> None:
    """The first one tells how it began, the newest ones how it is."""
    whole = sorted((p for p in root.glob("step-*")), key=lambda p: (p.stat().st_mtime, p.name))
    left = [p for p in root.glob(".step-*") if time.time() - p.stat().st_mtime > _STALE_SECONDS]
    for path in whole[1 : max(1, len(whole) - KEPT + 1)] + left:
        shutil.rmtree(path, ignore_errors=True)


def _told(run_dir: Path) -> Path | None:
    """What a rank has already told of the end of this start."""
    found = [p for p in (run_dir / "incidents").glob("step-*") if re.sub(r"^step-\d+-|-\d+$", "", p.name) in ALONE]
    return next((p for p in found if p.stat().st_mtime >= _STARTED), None)


def _tell(what: str) -> None:
    with contextlib.suppress(Exception):
        print(f"warning: the incident could not be kept: {what}", file=sys.stderr, flush=True)
