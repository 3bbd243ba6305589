"""A run as it is read from disk: its records, its findings, its config, and what the watch has to know of it.

A run directory or metrics.jsonl of ours; any other file is the log of another trainer (foreign.py). Nothing that is read is
executed, and what is damaged is left out, with a note.
"""

from __future__ import annotations

import contextlib
import json
import tomllib
import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kamui_dist import config
from kamui_dist.config import Config
from kamui_dist.errors import UserError
from kamui_dist.findings import ACTIONS, Finding
from kamui_dist.plan import make_plan, watch_facts
from kamui_dist.report import foreign
from kamui_dist.report.axes import counted
from kamui_dist.report.lines import lines, plain
from kamui_dist.report.sound import is_record, sound
from kamui_dist.watch import Facts

KINDS = ("start", "resume", "rollback", "step", "eval", "checkpoint", "detail", "end")
ATTEMPTS = ("start", "resume", "rollback")


@dataclass(frozen=True)
class Run:
    name: str
    path: Path  # the run directory, or the file
    records: list[dict[str, Any]]  # in the words of metrics.jsonl, whoever wrote the log
    ours: bool = True
    found: list[Finding] = field(default_factory=list)  # by the run itself, while it trained
    config: Config | None = None
    table: dict[str, str] = field(default_factory=dict)  # config.toml: section.key -> value as text
    status: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what a reader has to know of how it was read

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [r for r in self.records if r["kind"] == kind]


def read_run(path: Path, columns: dict[str, str] | None = None, patterns: list[str] | None = None) -> Run:
    """columns, patterns: for the log of another trainer, see foreign.read. Raises UserError in one line, of which a terminal obeys
    nothing."""
    try:
        return _read(path.absolute(), columns or {}, patterns or [])
    except UserError as error:
        raise UserError(plain(str(error))) from None


def _read(path: Path, columns: dict[str, str], patterns: list[str]) -> Run:
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        if not file.is_file():
            what = (
                "is not a run directory: it has no metrics.jsonl"
                if path.is_dir()
                else "is no file, and no run directory"
            )
            raise UserError(f"{path} {what}")
        if not _is_ours(file):
            records, notes = foreign.read(file, columns, patterns)
            return Run(file.name, file, records, ours=False, notes=notes)
        records, broken, wrong = _records(file)
    except (OSError, EOFError, zlib.error) as error:  # the last two: a .gz that was cut short, or is damaged
        raise UserError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not records:
        raise UserError(f"{file} has no records")
    damage = f"{counted(broken, 'damaged line')} of {file.name} {'is' if broken == 1 else 'are'} left out"
    notes = [damage] if broken else []
    if wrong:
        count, are = wrong.total(), "is" if wrong.total() == 1 else "are"
        notes.append(
            f"{counted(count, 'field')} of {file.name} {are} left out, of a wrong type: {', '.join(sorted(wrong))}"
        )
    directory = file.parent
    cfg, table = None, {}
    if (directory / "config.toml").is_file():
        try:
            cfg, _ = config.load(directory / "config.toml", [])
        except UserError:
            notes.append("its config.toml is not of this version: the watch runs with its defaults")
        table = _table(directory / "config.toml")
    return Run(
        directory.name if file.name == "metrics.jsonl" else file.name, directory, records, True,
        _findings(directory / "findings.jsonl"), cfg, table, _json(directory / "status.json"), notes,
    )  # fmt: skip


def named(runs: list[Run]) -> list[Run]:
    """The same runs with names that differ: as much of the path as that takes."""
    names = [run.name for run in runs]
    for depth in range(2, 6):
        if len(set(names)) == len(names):
            break
        names = [str(Path(*run.path.parts[-depth:])) for run in runs]
    seen: dict[str, int] = {}
    for k, name in enumerate(names):  # the same one twice
        seen[name] = seen.get(name, 0) + 1
        names[k] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def facts(run: Run) -> Facts:
    """What the run's own watch was told; for a log without a config nothing, for one that was changed since what still holds."""
    cfg = run.config
    starts = [r for r in run.records if r["kind"] in ATTEMPTS]
    if cfg is None or not starts:
        return Facts()
    first, last = starts[0], starts[-1]
    done, windows = (last["step"], last.get("samples") or 0, last.get("tokens") or 0), _windows(run, cfg)
    fresh = first["kind"] == "start" and cfg.checkpoint.init_from is None
    data = {name: last[name] for name in ("repeats", "entropy") if isinstance(last.get(name), float)}
    try:
        return watch_facts(cfg, make_plan(cfg, int(last.get("world_size") or 1), windows, done), fresh, **data)
    except UserError:
        return Facts(vocab_size=cfg.model.vocab_size, lr=cfg.optim.lr, grad_clip=cfg.optim.grad_clip, windows=windows,
                     global_batch=last.get("global_batch"), fresh=fresh and cfg.model.factory is None,
                     setup=last.get("setup"))  # fmt: skip


def _windows(run: Run, cfg: Config) -> int | None:
    """Windows of the training data: a step record tells how many tokens make how much of an epoch."""
    for r in run.records:
        if r["kind"] == "step" and r.get("epoch") and r.get("tokens"):
            return round(r["tokens"] / cfg.model.context_length / r["epoch"])
    return None


def _is_ours(file: Path) -> bool:
    """By its first line: the records of every run of ours begin with a start."""
    with contextlib.suppress(ValueError, RecursionError):
        first = json.loads(next(lines(file), ""))
        return isinstance(first, dict) and first.get("kind") in KINDS
    return False


def _records(file: Path) -> tuple[list[dict[str, Any]], int, Counter[str]]:
    """The records, how many lines are none, and the fields that are left out. A last line that a crash cut short is no fault."""
    found: list[dict[str, Any]] = []
    wrong: Counter[str] = Counter()
    broken = 0
    torn = False
    for line in lines(file):
        broken += torn
        torn = False
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            torn = bool(line.strip())
            continue
        if is_record(record):
            kept, left_out = sound(record)
            found.append(kept)
            wrong.update(left_out)
        else:
            broken += 1
    return found, broken, wrong


def _findings(file: Path) -> list[Finding]:
    found = []
    for line in lines(file) if file.is_file() else ():
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError, OverflowError):
            r = json.loads(line)
            message, cause, advice = (str(r[name]) for name in ("message", "cause", "advice"))
            if r["action"] in ACTIONS and type(r["step"]) is int and 0 <= r["step"] < 1e15:
                found.append(Finding(str(r["kind"]), int(r["step"]), message, cause, advice, r["action"]))
    return found


def _json(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        value = json.loads(file.read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else {}
    return {}


def _table(file: Path) -> dict[str, str]:
    with contextlib.suppress(OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        return {
            f"{section}.{key}": value if isinstance(value, str) else json.dumps(value, default=str)
            for section, keys in values.items() if isinstance(keys, dict) for key, value in keys.items()
        }  # fmt: skip
    return {}
