"""What an incident is told with (incident.py): the files of the run, the threads, the memory, and the report. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kamui_dist import __version__, memory_advice, watchdog
from kamui_dist.errors import UserError
from kamui_dist.findings import Finding
from kamui_dist.knobs import Config
from kamui_dist.plan import make_plan

RECORDS = 200
ALONE = ("crash", "out-of-memory", "hang")  # the kinds that one rank tells, the first
_TAIL_BYTES = 8 << 20  # of a file of records, in which the last ones are

Files = dict[str, str]  # name in the directory -> text
Section = tuple[str, Sequence[str]]  # of the report: title, lines


def collect(run_dir: Path, cuda: bool = True) -> tuple[int, Files]:
    """The last step that metrics.jsonl knows, and what there is to tell of any incident. `cuda`: ask its allocator too."""
    records = _tail(run_dir / "metrics.jsonl")
    files = {
        "records.jsonl": _lines(records), "findings.jsonl": _lines(_tail(run_dir / "findings.jsonl")),
        "stacks.txt": _stacks(), "memory.txt": _memory(run_dir, cuda),
    }  # fmt: skip
    for name in ("config.toml", "provenance.json"):
        with contextlib.suppress(OSError):
            files[name] = (run_dir / name).read_text(encoding="utf-8")
    details = [r for r in records if r.get("kind") == "detail"]
    if details:
        files["layers.json"] = json.dumps(details[-1], indent=1) + "\n"
    steps = [
        r["step"] for r in records if r.get("kind") in ("step", "start", "resume") and isinstance(r.get("step"), int)
    ]
    return steps[-1] if steps else 0, files


def report(run_dir: Path, finding: Finding, sections: Sequence[Section]) -> str:
    torch = sys.modules.get("torch")
    saved = [p for p in (run_dir / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
    if finding.since is not None:  # those saved since are set aside, if there is one of before (rollback.condemn)
        saved = [p for p in saved if int(p.name.removeprefix("step-")) < finding.since] or saved
    newest = f"the checkpoint {max(saved).name}" if saved else "the beginning: there is no checkpoint yet"
    first = "Run it again:" if finding.kind in ("crash", "hang") else "Change something first (see above), then"
    on = {
        "rollback": "Unless watch.max_rollbacks is used up, the run goes back to an earlier checkpoint by itself, and leaves out "
        "the data in between (rollbacks.json).",
        "skip": "The run goes on: this update was skipped on all ranks.",
    }.get(finding.action, f"{first} the same command goes on from {newest}.")
    step = finding.step + (finding.kind in ALONE)
    facts = [
        f"when      {time.strftime('%Y-%m-%dT%H:%M:%S%z')}",
        f"run       {run_dir.absolute()}",
        f"written   by rank {rank()} of {os.environ.get('WORLD_SIZE', '1')}, process {os.getpid()} on {platform.node()}",
        f"versions  kamui_dist {__version__}, torch {getattr(torch, '__version__', 'not loaded')}, "
        f"python {platform.python_version()}, {platform.platform()}",
    ]
    trained = f"What step {step} trained on: kamui-dist inspect data {run_dir.absolute()} --step {step} --text"
    if finding.action == "rollback":
        trained = (
            "What this step trained on: windows.json; after the rollback it is left out, and the step another one."
        )
    going = [on, trained]
    since = f" (since step {finding.since})" if finding.since is not None else ""
    blocks = [
        f"{finding.kind} at step {finding.step}{since}, action {finding.action}\n\n" + "\n".join(
            textwrap.fill(line, 118) for line in (finding.message, f"Likely: {finding.cause}", f"Do: {finding.advice}")
        ),
        "\n".join(facts),
        *(f"{title}:\n" + "\n".join(f"  {line}" for line in lines) for title, lines in sections if any(lines)),
        "how to go on:\n" + "\n".join(f"  {line}" for line in going),
    ]  # fmt: skip
    return "\n\n".join(blocks) + "\n"


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def where_ranks_are(run_dir: Path) -> str:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return watchdog.who_hangs(watchdog.read_beats(run_dir, ranks), ranks)


def _tail(path: Path) -> list[dict[str, Any]]:
    """The last records of a file with one JSON object a line; parts of lines are left out."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().splitlines()
    records = []
    for line in lines:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [r for r in records if isinstance(r, dict)][-RECORDS:]


def _lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def _stacks() -> str:
    """Where every thread of this process is, but for the one that asks."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = [(i, frame) for i, frame in sys._current_frames().items() if i != threading.get_ident()]
    return "\n".join(f"thread {names.get(i, i)}:\n{''.join(traceback.format_stack(frame))}" for i, frame in frames)


def _memory(run_dir: Path, cuda: bool) -> str:
    text = ""
    for path in ("/proc/self/status", "/proc/meminfo"):
        with contextlib.suppress(OSError):
            text += f"==== {path}\n{Path(path).read_text(encoding='utf-8')}\n"
    disk = shutil.disk_usage(run_dir)
    text += f"==== file system of {run_dir}\n{disk.free / 2**30:.2f} GiB free of {disk.total / 2**30:.2f} GiB\n"
    torch = sys.modules.get("torch")
    if cuda and torch is not None and torch.cuda.is_initialized():
        text += f"\n==== CUDA's allocator\n{torch.cuda.memory_summary()}\n"
    return text


def advice(cfg: Config | None) -> list[str]:
    """For a run that lacks memory: what it holds, and which key frees how much of it."""
    if cfg is None:
        return []
    try:
        plan = make_plan(cfg, int(os.environ.get("WORLD_SIZE", "1")))
    except UserError:
        return []
    parameters = memory_advice.count_parameters(cfg.model)
    if parameters is None:  # of a model of the user's own
        with contextlib.suppress(OSError, ValueError):
            provenance = json.loads((Path(cfg.run.dir or "") / "provenance.json").read_text(encoding="utf-8"))
            parameters = provenance.get("parameters")
    return memory_advice.advise(cfg, plan, parameters)


def memory_history(run_dir: Path, cfg: Config | None) -> list[str]:
    torch = sys.modules.get("torch")
    if cfg is None or not cfg.log.memory_history or torch is None or not torch.cuda.is_initialized():
        return []
    from kamui_dist import profiler

    path = run_dir / "profile" / f"out-of-memory-rank-{rank()}.pickle"
    try:
        path.parent.mkdir(exist_ok=True)
        profiler.dump_memory(path)
    except OSError as error:
        return [f"{path} could not be written: {error.strerror}"]
    return [f"{path} (for pytorch.org/memory_viz)"]
