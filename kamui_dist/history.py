"""What a run has written about itself, read back and put right after it went back to an earlier step. No torch."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from kamui_dist.files import write_text

OF_ATTEMPTS = ("start", "resume", "rollback")  # and not of updates: these records stay
# What each kind took of the training thread's time, and of that only.
COSTS = {"step": "step_seconds", "eval": "eval_seconds", "checkpoint": "stall_seconds"}


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole records of a metrics.jsonl; a last line that a crash cut short is left out."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return [record for line in text.splitlines() if (record := _record(line)) is not None]


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    whole = isinstance(record, dict) and "kind" in record and type(record.get("step", 0)) is int
    return record if whole else None


def forget_after(path: Path, step: int, evaluates: bool = False) -> tuple[int, float]:
    """Takes out the records of updates that a resume or a rollback to `step` does again, so that none is visible twice. Returns
    how many updates those were, and the seconds that they, their validations and their checkpoints had taken.

    evaluates: the validation of `step` itself is done again, too. Findings that led to a rollback stay: the data that they tell of
    is not seen again. A file in which all stays is not touched, and one that only loses its end needs no room for that. Raises
    OSError; then the file is as it was.
    """
    if not path.exists():
        return 0, 0.0
    kept: list[str] = []
    lost: list[dict[str, Any]] = []
    before = path.read_bytes()
    for line in before.decode("utf-8", errors="replace").splitlines():
        if (r := _record(line)) is None:
            continue
        again = r.get("step", 0) > step or (evaluates and r.get("step") == step and _of_validation(r))
        if not again or r["kind"] in OF_ATTEMPTS or r.get("action") == "rollback":
            kept.append(line)
        else:
            lost.append(r)
    now = "".join(f"{line}\n" for line in kept).encode()
    if not before.startswith(now):
        write_text(path, now.decode())
    elif len(now) < len(before):
        os.truncate(path, len(now))
    costs = [r.get(COSTS.get(r["kind"], "")) for r in lost]
    seconds = math.fsum(cost for cost in costs if isinstance(cost, float | int))
    return len([r for r in lost if r["kind"] == "step"]), seconds


def _of_validation(r: dict[str, Any]) -> bool:
    """Whether a validation makes this record, or this finding (watch.validated)."""
    told = r["kind"] == "non-finite" and str(r.get("message")).startswith("validation loss")
    return told or r["kind"] in ("eval", "sample", "overfitting")


def finite_or_null(value: Any) -> Any:
    """`value` for JSON, with None for every number in it that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite_or_null(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(v) for v in value]
    return value
