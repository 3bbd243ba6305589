"""What a run has written about itself, read back and put right after it went back to an earlier step. No torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from kamui_dist.files import write_text

OF_ATTEMPTS = ("start", "resume", "rollback")  # and not of updates: these records stay
# What each kind took of the training thread's time, and of that only.
COSTS = {"step": "step_seconds", "eval": "eval_seconds", "checkpoint": "stall_seconds"}


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole records of a metrics.jsonl; a last line that a crash cut short is left out."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and "kind" in record and type(record.get("step", 0)) is int:
            records.append(record)
    return records


def forget_after(path: Path, step: int) -> tuple[int, float]:
    """Takes out the records of updates that a resume or a rollback to `step` does again, so that none is visible twice. Returns
    how many updates those were, and the seconds that they, their validations and their checkpoints had taken.

    Findings that led to a rollback stay: the data that they tell of is not seen again.
    """
    if not path.exists():
        return 0, 0.0
    kept: list[dict[str, Any]] = []
    lost: list[dict[str, Any]] = []
    for r in read_records(path):
        stays = r["kind"] in OF_ATTEMPTS or r.get("action") == "rollback" or r.get("step", 0) <= step
        (kept if stays else lost).append(r)
    write_text(path, "".join(json.dumps(r) + "\n" for r in kept))
    costs = [r.get(COSTS.get(r["kind"], "")) for r in lost]
    seconds = math.fsum(cost for cost in costs if isinstance(cost, float | int))
    return len([r for r in lost if r["kind"] == "step"]), seconds


def finite_or_null(value: Any) -> Any:
    """`value` for JSON, with None for every number in it that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite_or_null(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(v) for v in value]
    return value
