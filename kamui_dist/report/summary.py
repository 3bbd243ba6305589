"""The summary of a run in some twenty lines of plain text: how it ended, what it cost, what was found, what to do next.

print(summary.text(run_dir))            at the end of a run, and `kamui-dist report RUN`
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kamui_dist import findings, knobs
from kamui_dist.errors import UserError
from kamui_dist.findings import Finding
from kamui_dist.report import ledger, logs
from kamui_dist.report.axes import counted, duration, short
from kamui_dist.report.found import diagnose
from kamui_dist.report.ledger import PARTS, Ledger
from kamui_dist.report.lines import plain
from kamui_dist.report.logs import ATTEMPTS, Run
from kamui_dist.report.series import column, median

Lines = list[tuple[str, str]]  # (what, text)


def text(run_dir: Path) -> str:
    """Raises UserError if there is no run, or nothing in it."""
    return "\n".join(f"{what:<12}{line}" for what, line in lines(logs.read_run(run_dir)))


def closing(run_dir: Path) -> str:
    """`text`, or why there is none: with a full disk there may be no record, and no run fails for want of its summary."""
    try:
        return text(run_dir)
    except (UserError, OSError) as error:
        return f"no summary: {error}"


def markdown(run_dir: Path) -> str:
    """For an issue."""
    rows = [f"| {what} | {_cell(line)} |" for what, line in lines(logs.read_run(run_dir))]
    return "\n".join(["| | |", "|---|---|", *rows])


def _cell(text: str) -> str:
    return re.sub(r"([\\|<>*_`\[\]])", r"\\\1", text)


def lines(run: Run, found: Sequence[Finding] | None = None) -> Lines:
    """found: instead of what the run itself found; in the log of another trainer, what our watch finds."""
    books = ledger.account(run.records)
    if found is None:
        found = run.found if run.ours else [f for f, _ in diagnose(run, knobs.Watch(), logs.facts(run))]
    seen = incident(run.path) if run.ours else ""
    told: Lines = [("run", f"{run.path if run.ours else run.name}: {outcome(run)}")]
    told += [("note", note) for note in run.notes]
    told += _progress(run, books) + _speed(run) + _learning(run) + _findings(found, seen)
    told += [*_checkpoints(run, books), ("next", _next(run))] if run.ours else []
    return [(what, plain(line)) for what, line in told]


def outcome(run: Run) -> str:
    """In words: finished at step 600 of 600."""
    facts = logs.facts(run)
    last = max((r["step"] for r in run.records if r["kind"] != "detail"), default=0)
    of = f" of {facts.steps:,}" if facts.steps else ""
    state, reason = state_of(run)
    return f"{state} at step {last:,}{of}" + (f" ({reason})" if reason else "")


def state_of(run: Run) -> tuple[str, str]:
    """(outcome, reason). A record `end` after the last start says it: at the end of a run status.json is not yet written."""
    begun = max((k for k, r in enumerate(run.records) if r["kind"] in ATTEMPTS), default=0)
    ends = [r for r in run.records[begun:] if r["kind"] == "end"]
    told: dict[str, Any] = ends[-1] if ends else run.status
    state = str(told.get("outcome") or ("unknown" if run.ours else "log read"))
    return state.replace("_", " "), str(told.get("reason") or "")


def _progress(run: Run, books: Ledger) -> Lines:
    steps = run.of("step")
    told: Lines = []
    tokens = [r["tokens"] for r in steps if r.get("tokens")]
    if tokens:
        epoch = steps[-1].get("epoch")
        told.append(("tokens", f"{tokens[-1]:,}" + (f" ({epoch:.2f} epochs)" if isinstance(epoch, float) else "")))
    if run.ours and books.total:
        starts = f" in {counted(books.starts, 'start')}" if books.starts > 1 else ""
        told.append(("time", f"{duration(books.total / 1e6)}{starts}; goodput {books.goodput:.1%}"))
        told.append(("  went to", where(books)))
    return told


def where(books: Ledger) -> str:
    """The parts of the time, the largest first; those below a tenth of a per cent are left out."""
    parts = sorted(((v, PARTS[n][0]) for n, v in books.parts.items() if v >= 0.001 * books.total), reverse=True)
    told = ", ".join(f"{name} {value / books.total:.1%}" for value, name in parts)
    missing = [PARTS[n][0] for n in PARTS if n in books.unknown]
    return told + (f" (not recorded: {', '.join(missing)})" if missing else "")


def _speed(run: Run) -> Lines:
    steps = run.of("step")
    parts = []
    if speed := median(steps, "tokens_per_sec"):
        parts.append(f"{short(speed)} tokens/s")
    if seconds := median(steps, "step_seconds"):
        parts.append(f"{short(seconds)} s a step")
    if share := median(steps, "mfu"):
        parts.append(f"mfu {share:.1%}")
    told: Lines = [("speed", f"{', '.join(parts)} (median)")] if parts else []
    memory = column(steps, "peak_memory_gib")
    return told + ([("memory", f"{np.nanmax(memory):.2f} GiB at most")] if np.isfinite(memory).any() else [])


def _learning(run: Run) -> Lines:
    steps, told = run.of("step"), []
    loss, step = column(steps, "loss"), column(steps, "step")
    if (there := np.flatnonzero(np.isfinite(loss))).size:
        low, after = there[np.argmin(loss[there])], loss.size - 1 - there[-1]
        told.append(("loss", f"{loss[there[0]]:.4f} first, {loss[there[-1]]:.4f} {_last(after)}, {loss[low]:.4f} lowest at step "
                     f"{step[low]:,.0f}"))  # fmt: skip
    evals = [r for r in run.of("eval") if r.get("val_loss") is not None]
    names = list(dict.fromkeys(str(r.get("set", "val")) for r in evals))
    for name in names[:3]:
        mine = [r for r in evals if str(r.get("set", "val")) == name]
        best = best_eval(mine)
        blind = sum(str(r.get("set", "val")) == name and r["step"] > mine[-1]["step"] for r in run.of("eval"))
        told.append(("validation", (f"{name}: " if len(names) > 1 else "") + f"{best['val_loss']:.4f} best at step "
                     f"{best['step']:,}, {mine[-1]['val_loss']:.4f} {_last(blind)}"))  # fmt: skip
    norm, after = column(steps, "grad_norm_pre_clip"), column(steps, "grad_norm_post_clip")
    if (there := np.flatnonzero(np.isfinite(norm))).size:
        high = there[np.argmax(norm[there])]
        clipped = np.isfinite(after) & (after < norm * (1 - 1e-4))
        share = f"; {clipped.sum() / there.size:.1%} of updates clipped" if np.isfinite(after).any() else ""
        told.append(
            ("norm", f"{np.median(norm[there]):.3g} median, {norm[high]:.3g} largest at step {step[high]:,.0f}{share}")
        )
    if skipped := [r["step"] for r in steps if r.get("skipped")]:
        what = ("skipped", "") if run.ours else ("not finite", "the gradient norm of ")
        told.append((what[0], f"{what[1]}{counted(len(skipped), 'update')} ({_span(skipped)})"))
    return told


def _last(after: int) -> str:
    """after: how many came after it that were not finite."""
    return f"last finite ({after:,} after it {'was' if after == 1 else 'were'} not finite)" if after else "last"


def best_eval(evals: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """evals: of one set, with a val_loss. The newest that the run called its best (eval.min_improvement), else the lowest."""
    named = [r for r in evals if r.get("best")]
    return named[-1] if named else min(evals, key=lambda r: r["val_loss"])


def _span(steps: Sequence[int]) -> str:
    return f"step {steps[0]:,}" if steps[0] == steps[-1] else f"steps {steps[0]:,} to {steps[-1]:,}"


def _findings(found: Sequence[Finding], seen: str = "") -> Lines:
    """seen: the newest incident. A crash is one, and no finding of the watch."""
    incidents: Lines = [("incident", seen)] if seen else []
    if not found:
        return [("findings", "none by the watch; see the incident" if seen else "none"), *incidents]
    kinds: dict[str, list[Finding]] = {}
    for f in found:
        kinds.setdefault(f.kind, []).append(f)
    order = sorted(kinds.values(), key=lambda fs: -findings.ACTIONS.index(findings.gravest(fs)))
    told = []
    for place, fs in enumerate(order[:5]):
        span = (f"{len(fs):,} times, " if len(fs) > 1 else "") + _span([f.step for f in fs])
        told.append(("findings" if place == 0 else "", f"{fs[0].kind}: {span} ({findings.gravest(fs)})"))
    if len(order) > 5:
        told.append(("", f"and {len(order) - 5} other kinds: kamui-dist diagnose shows all"))
    worst = max(found, key=lambda f: findings.ACTIONS.index(f.action))  # the first of the gravest
    if worst.action != "note":
        told += [("  gravest", f"{worst.kind}: {worst.message}"), ("  do", worst.advice)]
    return told + incidents


def _checkpoints(run: Run, books: Ledger) -> Lines:
    kept, best = _kept(run), best_step(run)
    text = f"{len(kept)} kept: {_some(kept)}" if kept else "none"
    told: Lines = [("checkpoints", text + (f"; best {best:,}" if best in kept else ""))]
    backs = run.of("rollback")
    if books.starts > 1 or backs:
        parts = [counted(books.starts - 1, "restart")] if books.starts > 1 else []
        parts += [f"{counted(len(backs), 'rollback')} (to step {_some([r['step'] for r in backs])})"] if backs else []
        parts += [f"{counted(books.lost_steps, 'update')} lost and done again"] if books.lost_steps else []
        told.append(("restarts", ", ".join(parts)))
    return told


def _kept(run: Run) -> list[int]:
    names = [p.name for p in (run.path / "checkpoints").glob("step-*")]
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d{8,}", name))


def incident(run_dir: Path) -> str:
    """The newest directory in RUN/incidents, and the first line of its report: "" if there is none."""
    told = [(p.stat().st_mtime, p) for p in (run_dir / "incidents").glob("step-*")]
    if not told:
        return ""
    path = max(told)[1]
    try:
        with (path / "report.txt").open(encoding="utf-8", errors="replace") as file:
            return f"{path}: {file.readline().strip()}"
    except OSError:
        return str(path)


def best_step(run: Run) -> int | None:
    try:
        return int(json.loads((run.path / "checkpoints" / "best.json").read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _some(steps: list[int]) -> str:
    told = [f"{step:,}" for step in steps]
    return ", ".join(told if len(told) <= 6 else [*told[:2], "...", *told[-3:]])


def _next(run: Run) -> str:
    """The command that makes sense now."""
    directory = shlex.quote(str(run.path))
    state, reason = state_of(run)
    if state in ("finished", "early stopped"):
        return f"kamui-dist sample {directory}"
    if state == "running":
        return f"kamui-dist status {directory}"
    if state == "failed" and reason.startswith(("watch", "checkpoint")):
        return f"kamui-dist diagnose {directory} --html report.html"
    if _kept(run):
        return "the same command again: it goes on from the newest checkpoint"
    if run.of("checkpoint"):  # start.find_checkpoint refuses to begin again in place of them
        return "its checkpoints are gone: bring them back, or choose another run.dir"
    return "the same command again: it begins again, there is no checkpoint yet"
