"""How a run is doing: state, step, loss, speed, time left, last checkpoint, and its job.

kamui-dist status runs/gpt2_1558m_fsdp
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

from kamui_dist import config, jobs
from kamui_dist.errors import UserError
from kamui_dist.plan import make_plan

_TAIL_BYTES = 1 << 20  # of metrics.jsonl: thousands of records
_RECENT = 50  # updates that speed and time left are taken from
_QUIET_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory")


def run(args: argparse.Namespace) -> int:
    """Raises UserError if there is no such run."""
    path = Path(args.run).absolute()
    found = jobs.known(path)
    job = found[0] if found else ""
    if not (path / "status.json").exists():
        if not job:
            raise UserError(f"{path} is not a run directory: it has no status.json")
        print(f"state       not started\njob         {_job(path, job)}")
        return 0
    status = json.loads((path / "status.json").read_text(encoding="utf-8"))
    for name, text in _facts(path, status, job):
        print(f"{name:<12}{text}")
    return 0


def _facts(path: Path, status: dict[str, Any], job: str) -> list[tuple[str, str]]:
    records = _tail(path / "metrics.jsonl")
    steps = [r for r in records if r["kind"] == "step"]
    last = steps[-1] if steps else {}
    step = max(status.get("step") or 0, last.get("step") or 0)
    total, facts = _total(path, records), []
    reason = f" ({status['reason']})" if status.get("reason") else ""
    state = f"{status.get('outcome')}{reason}"
    quiet = time.time() - last["time"] if last.get("time") else None
    if status.get("outcome") == "running" and quiet is not None and quiet > _QUIET_SECONDS:
        state = f"running, but no update for {_clock(quiet)}: a long validation or checkpoint, or it has crashed"
    facts.append(("state", state))
    facts.append(("step", f"{step:,}" + (f" of {total:,} ({100 * step / total:.1f} %)" if total else "")))
    if last.get("loss") is not None:
        facts.append(("loss", f"{last['loss']:.4f}"))
    validations = [r for r in records if r["kind"] == "eval" and r.get("val_loss") is not None]
    if validations:
        facts.append(("validation", f"{validations[-1]['val_loss']:.4f} at step {validations[-1]['step']:,}"))
    begun = max((i for i, r in enumerate(records) if r["kind"] in ("start", "resume")), default=0)
    recent = [r for r in records[begun:] if r["kind"] == "step"][
        -_RECENT:
    ]  # of this attempt: between two lies the queue
    rates = [r["tokens_per_sec"] for r in recent if r.get("tokens_per_sec")]
    if rates:
        facts.append(("tokens/s", f"{sum(rates) / len(rates):,.0f}"))
    if status.get("outcome") == "running" and total and len(recent) > 1 and recent[-1]["step"] > recent[0]["step"]:
        pace = (recent[-1]["time"] - recent[0]["time"]) / (recent[-1]["step"] - recent[0]["step"])
        facts.append(("time left", f"{_clock(pace * (total - step))} without the queue"))
    names = [p.name[5:] for p in (path / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
    facts.append(("checkpoint", f"step {max(map(int, names)):,}" if names else "none yet"))
    facts.append(("job", _job(path, job) if job else "none"))
    return facts


def _total(path: Path, records: list[dict[str, Any]]) -> int | None:
    """Updates of the whole run, as far as they follow from the config alone (train.epochs needs the data)."""
    try:
        cfg, _ = config.load(path / "config.toml", [])
        world = json.loads((path / "provenance.json").read_text(encoding="utf-8"))["world_size"]
        begun = [r for r in records if r["kind"] in ("start", "resume") and r.get("samples") is not None]
        done = (begun[-1]["step"], begun[-1]["samples"], begun[-1]["tokens"]) if begun else (0, 0, 0)
        return None if cfg.train.epochs is not None else make_plan(cfg, world, done=done).steps
    except (UserError, OSError, ValueError, KeyError):
        return None


def _job(path: Path, job: str) -> str:
    attempts = [e for e in jobs.log(path) if e.get("job") == job and e.get("event") == "begin"]
    text = f"{job} {jobs.state(job) or 'not in the queue'}"
    if len(attempts) > 1:
        text += f", attempt {len(attempts)}"
    ended = [e for e in jobs.log(path) if e.get("job") == job and e.get("event") == "end"]
    return text + (f"; last: {ended[-1]['reason']}" if ended else "")


def _tail(path: Path) -> list[dict[str, Any]]:
    """The last records; the first of them may be cut off and is left out."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "kind" in record:
            found.append(record)
    return found


def _clock(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 1440} d {minutes // 60 % 24} h" if minutes >= 1440 else f"{minutes // 60}:{minutes % 60:02} h"
